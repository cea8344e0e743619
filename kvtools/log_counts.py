"""How often a log looks each key of a table up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvtools._kvtable import Table
from kvtools.dialects.chunk import Array
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import Progress
from kvtools.dialects.schema import numpy_dtype
from kvtools.errors import UsageError
from kvtools.id_log import ARRAY, IdLog, LogBatch, as_keys, check_table, features_of_tables

_AT_ONCE = 1 << 16


class LogCounts:
    """The lookups of one table in a log, by key: some 35 bytes for each different key."""

    def __init__(self, table: str, key_dtype: np.dtype[Any]) -> None:
        self._counts = Table(key_dtype, "float16", 1)
        self._key_dtype = key_dtype
        self._doing = f"counting the lookups of table '{table}'"
        self.lookups = 0

    def add(self, ids: Array) -> None:
        """Count these ids [n], each as often as it is there."""
        for start in range(0, len(ids), _AT_ONCE):
            keys = as_keys(ids[start : start + _AT_ONCE], self._key_dtype, self._doing)
            self._counts.upsert(keys, np.zeros((len(keys), 1), np.float16), frequency=1)
        self.lookups += len(ids)

    @property
    def keys(self) -> int:
        """How many different keys there are."""
        return len(self._counts)

    def of(self, keys: Array) -> Array:
        """Return how often each of these keys [n] was looked up: int64 [n]."""
        keys = as_keys(keys, self._key_dtype, self._doing)
        return self._counts.gather_stamps(keys)[0].astype(np.int64)

    def all(self) -> Array:
        """Return the counts of all keys [keys], in no order: int64."""
        found = [chunk[1].astype(np.int64) for chunk in self._counts.export([])]
        return np.concatenate([np.empty(0, np.int64), *found])


def count_lookups(
    log: IdLog,
    tables: Mapping[str, TableReader],
    columns: Sequence[str] = (),
    *,
    labels: str | None = None,
    each: Callable[[LogBatch], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, LogCounts]:
    """Count the lookups of a log in these tables; those that it does not name are left out.

    Args:
        log: from `id_log.open_log`.
        tables: the tables there are.
        columns: COLUMN=TABLE, for columns whose name is not that of their table.
        labels: the column of labels, if they are to come to `each`.
        each: called with each batch.
        progress: called with (the log, percent read, 100).

    Raises:
        UsageError: a column or table that is not there, or a log of none of these tables.
        BadInputError: something in the log is no id, or it is empty.
    """
    table_of = columns_of_tables(log, tables, columns)
    counts: dict[str, LogCounts] = {}
    for batch in log.batches(sorted(table_of), _AT_ONCE, labels=labels):
        for column, ids in batch.ids.items():
            table = table_of.get(column, column)
            if table not in counts:
                check_table(log, table, [*tables])
                counts[table] = LogCounts(table, numpy_dtype(tables[table].schema.key_dtype))
            counts[table].add(ids.keys)
        if each:
            each(batch)
        if progress:
            progress(log.path, int(100 * log.share_read), 100)
    return counts


def columns_of_tables(log: IdLog, tables: Mapping[str, TableReader], columns: Sequence[str]) -> dict[str, str]:
    """Return by column whose ids it has; of a log of lookups nothing.

    Raises:
        UsageError: a column or table that is not there, or no column is of any table.
    """
    found = features_of_tables(log, columns, [*tables])
    if log.features == (ARRAY,) and not found:
        if len(tables) == 1:
            return {ARRAY: next(iter(tables))}
        raise UsageError(
            f"reading the log '{log.path}': it is an array of ids, and nothing says of which table; say --column"
            f" {ARRAY}=TABLE"
        )
    if not found and not log.of_lookups:
        raise UsageError(
            f"reading the log '{log.path}': none of its columns"
            f" ({', '.join(map(repr, log.features[:8])) or 'none'}) has the"
            f" name of a table ({', '.join(map(repr, list(tables)[:8]))}); say --column COLUMN=TABLE"
        )
    return found
