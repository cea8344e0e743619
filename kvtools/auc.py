"""How well scores tell clicks from the rest, with tables as they are and as they would be.

A scorer is `dot`, the sum of the dot products of all pairs of features' rows, or a Python callable `module:function`.
It is given a float32 [n, dim] for each feature, and gives n scores. The row of a feature with several ids is their
mean; a key without a row counts as zeros, which is what it gives where it is served.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvtools._kvtable import Table
from kvtools.dialects.chunk import KEYS_AND_VALUES, Array
from kvtools.dialects.interface import TableReader
from kvtools.errors import BadInputError, UsageError
from kvtools.id_log import Ids, LogBatch, as_keys
from kvtools.log_counts import LogCounts
from kvtools.row_errors import read_back
from kvtools.row_mask import RowMask

Scorer = Callable[[Mapping[str, Array]], Array]


def scorer_named(name: str) -> Scorer:
    """Return the scorer that `dot` or `module:function` is; modules of the working folder are found, too.

    Raises:
        UsageError: there is no such thing.
    """
    if name == "dot":
        return dot_products
    module, colon, function = name.partition(":")
    if not (module and colon and function):
        raise UsageError(f"scoring: got --scorer {name}, expected dot or module:function")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"scoring: --scorer {name} cannot be imported: {error}") from error
    finally:
        sys.path.remove(here)
    if not callable(found):
        raise UsageError(f"scoring: --scorer {name} is no function")
    return found  # type: ignore[no-any-return]


def dot_products(rows: Mapping[str, Array]) -> Array:
    """Return the sum of the dot products of all pairs of features: float32 [n].

    >>> dot_products({"user": np.float32([[1, 2]]), "item": np.float32([[3, 1]])}).tolist()
    [5.0]

    Raises:
        UsageError: there is one feature alone, or rows are of different widths.
    """
    widths = {name: array.shape[1] for name, array in rows.items()}
    if len(rows) < 2 or len(set(widths.values())) > 1:
        told = ", ".join(f"'{name}' of {width} numbers" for name, width in widths.items())
        raise UsageError(
            f"scoring: --scorer dot multiplies the rows of two features or more, all as wide; the log has"
            f" {told}; write a"
            " function, and name it as module:function"
        )
    total = np.sum(list(rows.values()), axis=0)
    squares = sum(np.einsum("nd,nd->n", array, array) for array in rows.values())
    scores: Array = (np.einsum("nd,nd->n", total, total) - squares) / 2
    return scores


class LookedUpRows:
    """The rows of one table that a log looks up, as they are and as they would be: two of them for each key."""

    def __init__(self, reader: TableReader, mask: RowMask, hidden: Array, dtype: str | None, counts: LogCounts) -> None:
        schema = reader.schema
        self._key_dtype = reader.key_dtype
        self._doing = f"scoring with table '{schema.name}'"
        self.dim = schema.dim
        self._before, self._after = (Table(reader.key_dtype, "float32", schema.dim) for _ in range(2))
        row = 0
        for part in range(reader.parts):
            at = 0
            for chunk in reader.chunks(KEYS_AND_VALUES, part=part):
                assert chunk.values is not None
                wanted = counts.of(chunk.keys) > 0
                first, last = np.searchsorted(hidden, [row, row + len(chunk)])
                wanted[hidden[first:last] - row] = False
                kept = mask.get(part, at, len(chunk)) & wanted
                self._put(self._before, chunk.keys[wanted], chunk.values[wanted])
                values = chunk.values[kept]
                self._put(self._after, chunk.keys[kept], values if dtype is None else read_back(values, dtype))
                at += len(chunk)
                row += len(chunk)

    def _put(self, table: Table, keys: Array, values: Array) -> None:
        table.upsert(np.ascontiguousarray(keys), np.ascontiguousarray(values.astype(np.float32)))

    def of(self, ids: Ids) -> tuple[Array, Array]:
        """Return the rows of each example, before and after: float32 [n, dim]."""
        keys = as_keys(ids.keys, self._key_dtype, self._doing)
        return _means(self._before.gather(keys), ids), _means(self._after.gather(keys), ids)


def _means(rows: Array, ids: Ids) -> Array:
    if ids.lengths is None:
        return rows
    sums = np.zeros((len(ids.lengths), rows.shape[1]), np.float32)
    np.add.at(sums, np.repeat(np.arange(len(ids.lengths)), ids.lengths), rows)
    means: Array = sums / np.maximum(ids.lengths, 1).astype(np.float32)[:, None]
    return means


class Scores:
    """The scores of a log's examples with tables as they are, and as they would be."""

    def __init__(self, scorer: Scorer, tables: Mapping[str, LookedUpRows], table_of: Mapping[str, str]) -> None:
        self._scorer, self._tables, self._table_of = scorer, tables, table_of
        self._labels: list[Array] = []
        self._scores: tuple[list[Array], list[Array]] = ([], [])

    def add(self, batch: LogBatch) -> None:
        """Score some examples.

        Raises:
            BadInputError: the scorer raises, or does not give a score for each.
        """
        assert batch.labels is not None
        found = {name: self._tables[self._table_of[name]].of(ids) for name, ids in batch.ids.items()}
        for number, scores in enumerate(self._scores):
            rows = {name: pair[number] for name, pair in found.items()}
            try:
                given: Any = np.asarray(self._scorer(rows), np.float64)
            except UsageError:
                raise
            except Exception as error:
                raise BadInputError(f"scoring: the scorer failed: {type(error).__name__}: {error}") from error
            if given.shape != (batch.examples,) or not np.isfinite(given).all():
                raise BadInputError(
                    f"scoring: the scorer gave shape {list(given.shape)} for {batch.examples} examples, expected a"
                    f" finite"
                    " number for each"
                )
            scores.append(given)
        self._labels.append(batch.labels)

    def auc(self) -> tuple[float, float]:
        """Return the area under the ROC curve, before and after.

        Raises:
            BadInputError: all labels are the same.
        """
        labels = np.concatenate(self._labels)
        before, after = (np.concatenate(scores) for scores in self._scores)
        return area_under_curve(labels, before), area_under_curve(labels, after)


def area_under_curve(labels: Array, scores: Array) -> float:
    """Return the probability that one of the true labels [n] has a higher score than one of the others; ties are
    halves.

    >>> area_under_curve(np.array([True, False, True]), np.array([3.0, 2.0, 2.0]))
    0.75

    Raises:
        BadInputError: all labels are the same.
    """
    positives = int(np.count_nonzero(labels))
    negatives = len(labels) - positives
    if not positives or not negatives:
        raise BadInputError(f"scoring: all {len(labels)} labels are {int(bool(positives))}, which tells nothing apart")
    order = np.argsort(scores, kind="stable")
    ordered = scores[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    ends = np.concatenate([starts[1:], [len(ordered)]])
    ranks = np.empty(len(ordered))
    ranks[order] = np.repeat((starts + ends + 1) / 2, ends - starts)
    return float((ranks[labels].sum() - positives * (positives + 1) / 2) / (positives * negatives))
