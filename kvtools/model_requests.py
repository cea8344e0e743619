"""Random requests to a SavedModel, made from the inputs that its signatures have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvtools.dialects.bundle.dtypes import dtype_name, number_named, numpy_dtype
from kvtools.dialects.chunk import KEYS, Array
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.example_features import Feature, parsed_features, serialized_example
from kvtools.remote.stored import read_bytes
from kvtools.stock_model.fields import entries, last, messages, number_in, split, text
from kvtools.stock_model.graph_def import Graph
from kvtools.stock_model.meta_graph import MetaGraph

SAMPLES = 16
_SAMPLED = 4096
_INTEGERS = ("int64", "int32", "uint64")
_INTERNAL = "__saved_model"

Request = Mapping[str, Array]


@dataclass(frozen=True)
class InputSpec:
    """An input of a signature: -1 for a size that varies, None for any shape; and of tf.Examples what is in them."""

    name: str
    dtype: str
    shape: tuple[int, ...] | None
    features: tuple[Feature, ...] = ()


class IdSource(Protocol):
    """Where the integers of a request come from."""

    random: np.random.Generator

    def draw(self, dtype: str, count: int) -> Array:
        """Return `count` integers of a type."""
        ...


def serving_graph(folder: Path) -> MetaGraph:
    """Return the graph that servers load of a SavedModel."""
    return serving_graph_of(read_bytes(folder / "saved_model.pb"))


def serving_graph_of(saved_model: bytes) -> MetaGraph:
    """Return the graph that servers load of a SavedModel, encoded."""
    graphs = [MetaGraph.decode(data) for data in messages(split(saved_model), 2)]
    return next((graph for graph in graphs if "serve" in graph.tags), graphs[0])


def signature_inputs(meta: MetaGraph) -> dict[str, list[InputSpec]]:
    """Return the inputs of each signature that can be asked, by its name."""
    return {
        name: _inputs(data, meta.graph)
        for name, data in sorted(meta.signatures.items())
        if not name.startswith(_INTERNAL)
    }


def _inputs(signature: bytes, graph: Graph) -> list[InputSpec]:
    found = []
    for name, info in entries(split(signature), 1):
        fields = split(info)
        shape = split(last(fields, 3))
        sizes = [number_in(split(dim), 1) for dim in messages(shape, 2)]
        known = None if number_in(shape, 3) else tuple(-1 if size >> 63 else size for size in sizes)
        dtype = dtype_name(number_in(fields, 2))
        features = parsed_features(graph, text(last(fields, 1))) if dtype == "string" else ()
        found.append(InputSpec(name, dtype, known, features))
    return sorted(found, key=lambda one: one.name)


class MixedIds:
    """Ids to compare two models by: keys that the export has, keys that were cut, and keys that no table has."""

    def __init__(self, checkpoint: Checkpoint, export: Checkpoint, random: np.random.Generator) -> None:
        self.random = random
        taken, kept, cut = [], [], []
        for name, reader in checkpoint.tables.items():
            keys = sampled_keys([reader], all_of_it=True)
            taken.append(keys)
            if name in export.tables:
                there = np.isin(keys, sampled_keys([export.tables[name]], all_of_it=True))
                kept.append(self._some(keys[there]))
                cut.append(self._some(keys[~there]))
        nothing = np.zeros(0, np.int64)
        self._taken = np.unique(np.concatenate([nothing, *taken]))
        self._kept, self._cut = np.concatenate([nothing, *kept]), np.concatenate([nothing, *cut])

    def _some(self, keys: Array) -> Array:
        """As many of each table, few as they may be, so that none goes under."""
        return self.random.choice(keys, _SAMPLED) if len(keys) else keys

    def _is_taken(self, ids: Array) -> Array:
        if not len(self._taken):
            return np.zeros(len(ids), np.bool_)
        places = np.minimum(np.searchsorted(self._taken, ids), len(self._taken) - 1)
        found: Array = self._taken[places] == ids
        return found

    def draw(self, dtype: str, count: int) -> Array:
        """Return `count` ids of a type: as many keys, cut keys and others, some of them twice."""
        limits = np.iinfo(dtype)
        low, high = max(int(limits.min), -(1 << 62)), min(int(limits.max), 1 << 62)
        near = self.random.integers(max(low, -100), 10_000, count)
        far = self.random.integers(low, high, count)
        missing = np.where(self.random.random(count) < 0.5, near, far)
        missing = missing[~self._is_taken(missing)]
        keys = [_fitting(each, dtype) for each in (self._kept, self._cut)]
        pool = np.concatenate([*(self.random.choice(each, count) for each in keys if len(each)), missing])
        ids = self.random.choice(pool, count) if len(pool) else np.zeros(count, np.int64)
        return ids.astype(np.int64).astype(dtype)


class KnownIds:
    """Ids that are keys of tables, as far as a type holds any: those that a server is warmed up by."""

    def __init__(self, keys: Array, random: np.random.Generator) -> None:
        self.random = random
        self._keys = keys

    def draw(self, dtype: str, count: int) -> Array:
        """Return `count` keys of a type; zeros where it holds none."""
        keys = _fitting(self._keys, dtype)
        ids = self.random.choice(keys, count) if len(keys) else np.zeros(count, np.int64)
        return ids.astype(np.int64).astype(dtype)


def sampled_keys(tables: Iterator[TableReader] | Sequence[TableReader] | Any, all_of_it: bool = False) -> Array:
    """Return keys of tables as int64, uint64 ones bit by bit: the first thousands of each, or all."""
    sampled = [np.zeros(0, np.int64)]
    for table in tables:
        seen = 0
        for chunk in table.chunks(KEYS, rows=1 << 18):
            sampled.append(chunk.keys.astype(np.int64) if all_of_it else chunk.keys[:_SAMPLED].astype(np.int64))
            seen += len(chunk.keys)
            if not all_of_it and seen >= _SAMPLED:
                break
    return np.concatenate(sampled)


def _fitting(keys: Array, dtype: str) -> Array:
    # A table of uint64 keys has them bit by bit.
    if dtype in ("int64", "uint64"):
        return keys
    limits = np.iinfo(dtype)
    return keys[(keys >= limits.min) & (keys <= limits.max)]


def requests(inputs: Sequence[InputSpec], ids: IdSource) -> Iterator[Request]:
    """Yield a request for each way in which the inputs may belong together: sparse, ragged, or each by itself."""
    names = {one.name: one for one in inputs}
    alone = {one.name: _plain(one, ids) for one in inputs}
    sparse, ragged = dict(alone), dict(alone)
    # The same for all: weights are of as many rows as ids.
    sizes = ids.random.integers(0, 4, SAMPLES)
    total = int(sizes.sum())
    for one in inputs:
        second, third = names.get(f"{one.name}_1"), names.get(f"{one.name}_2")
        if second is None or second.dtype not in (*_INTEGERS, "float32", "string"):
            continue
        if third is not None and one.dtype == third.dtype == "int64" and one.shape is not None and len(one.shape) == 2:
            places = [(row, column) for row in range(SAMPLES) for column in range(sizes[row])]
            sparse[one.name] = np.array(places, np.int64).reshape(-1, 2)
            sparse[second.name] = _values(second.dtype, (total,), ids)
            sparse[third.name] = np.array([SAMPLES, 4], np.int64)
        elif third is None and second.dtype in ("int64", "int32"):
            ragged[one.name] = _values(one.dtype, (total,), ids)
            ragged[second.name] = np.concatenate([[0], np.cumsum(sizes)]).astype(second.dtype)
            sparse[one.name], sparse[second.name] = ragged[one.name], ragged[second.name]
    yield sparse
    yield ragged
    yield alone


def _plain(one: InputSpec, ids: IdSource) -> Array:
    shape = tuple(SAMPLES if size < 0 else size for size in ((-1,) if one.shape is None else one.shape))
    return _examples(one.features, shape, ids) if one.features else _values(one.dtype, shape, ids)


def _examples(features: Sequence[Feature], shape: tuple[int, ...], ids: IdSource) -> Array:
    """Return serialized tf.Examples."""
    examples = np.empty(int(np.prod(shape)), object)
    for place in range(len(examples)):
        some = int(ids.random.integers(0, 4))  # the same for all: weights are as many as ids
        examples[place] = serialized_example({one.name: _values(one.dtype, _sizes(one, some), ids) for one in features})
    return examples.reshape(shape)


def _sizes(feature: Feature, some: int) -> tuple[int, ...]:
    sizes = (-1,) if feature.shape is None else feature.shape
    return (int(np.prod([some if size < 0 else size for size in sizes])),)


def _values(dtype: str, shape: tuple[int, ...], ids: IdSource) -> Array:
    count = int(np.prod(shape))
    if dtype == "string":
        return ids.random.choice([b"a", b"b", b"c", b"unknown"], count).astype(object).reshape(shape)
    if dtype == "bool":
        return (ids.random.random(count) < 0.5).reshape(shape)
    if "int" in dtype:
        if shape == ():
            return np.asarray(ids.random.integers(0, 5), dtype)
        return ids.draw(dtype, count).reshape(shape)
    return ids.random.standard_normal(count).astype(_real(dtype)).reshape(shape)


def _real(dtype: str) -> np.dtype[Any]:
    found = numpy_dtype(number_named(dtype))
    assert found is not None
    return found
