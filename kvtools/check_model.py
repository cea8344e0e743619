"""Ask a trained model and its export the same, and compare what they answer, bit by bit. TensorFlow runs both."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.bundle.dtypes import dtype_name, number_named, numpy_dtype
from kvtools.dialects.chunk import KEYS, Array
from kvtools.dialects.interface import Checkpoint
from kvtools.errors import BadInputError, MissingDependencyError, one_line
from kvtools.meta_file import TrainedGraph
from kvtools.stock_model.fields import entries, last, messages, number_in, split, text
from kvtools.stock_model.meta_graph import MetaGraph

_BATCH = 16
_SAMPLE = 4096
_INTEGERS = ("int64", "int32", "uint64")
_INTERNAL = "__saved_model"

Request = Mapping[str, Array]
Answer = Callable[[Request], Mapping[str, Array]]


@dataclass(frozen=True)
class SignatureCheck:
    """What a comparison found: `different` names the outputs that are not the same to the bit, and by how much; of all
    values, `differing` differ.

    `refused` says why a signature was not compared: the trained model answered none of the requests.
    """

    signature: str
    requests: int
    outputs: int
    different: tuple[str, ...] = ()
    refused: str = ""
    values: int = 0
    differing: int = 0


@dataclass(frozen=True)
class _Input:
    name: str
    dtype: str
    shape: tuple[int, ...] | None


def check_available() -> None:
    """Raise `MissingDependencyError` unless both models can be run here."""
    for package in ("tensorflow", "tfplugin"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"checking an export: there is no {package}, which runs the trained model; install kvtools[tensorflow],"
                " or leave --check out"
            )


def check_model(
    checkpoint: Checkpoint, export: Checkpoint, requests: int, seed: int = 0, graph: TrainedGraph | None = None
) -> list[SignatureCheck]:
    """Compare the answers of a model to random requests with those of its export.

    Ids are keys of the export, keys of none, and duplicates. Rows that were left out are not asked for, but a model may
    make other ids of those that it is given.

    Args:
        checkpoint: the trained SavedModel, opened.
        export: what was made of it, opened.
        requests: how many requests of 16 samples to make of each signature.
        seed: for other requests.
        graph: of a checkpoint of TensorFlow 1, what is served of its graph.

    Raises:
        BadInputError: TensorFlow cannot load the model.

    Example:
        ```python
        from kvtools.dialects.detect import open_checkpoint
        check_model(open_checkpoint("trained_model"), open_checkpoint("models/1"), 100)
        ```
    """
    trained, exported = Path(checkpoint.path), Path(export.path)
    meta = _serving_graph(exported if graph is not None else trained)
    signatures = {name: value for name, value in meta.signatures.items() if not name.startswith(_INTERNAL)}
    ids = _Ids(checkpoint, export, np.random.default_rng(seed))
    found: list[SignatureCheck] = []
    run = _run_objects if meta.objects else _run_session
    ours = run(trained, meta) if graph is None else _run_training(trained, graph)
    theirs = run(exported, _serving_graph(exported))
    for name, encoded in sorted(signatures.items()):
        found.append(_check(name, _inputs(encoded), ours(name), theirs(name), ids, requests))
    return found


def _serving_graph(folder: Path) -> MetaGraph:
    graphs = [MetaGraph.decode(data) for data in messages(split((folder / "saved_model.pb").read_bytes()), 2)]
    return next((graph for graph in graphs if "serve" in graph.tags), graphs[0])


def _inputs(signature: bytes) -> list[_Input]:
    found = []
    for name, info in entries(split(signature), 1):
        fields = split(info)
        shape = split(last(fields, 3))
        sizes = [number_in(split(dim), 1) for dim in messages(shape, 2)]
        known = None if number_in(shape, 3) else tuple(-1 if size >> 63 else size for size in sizes)
        found.append(_Input(name, dtype_name(number_in(fields, 2)), known))
    return sorted(found, key=lambda one: one.name)


class _Ids:
    """Ids to ask for: keys that the export has, and keys that the trained model has not."""

    def __init__(self, checkpoint: Checkpoint, export: Checkpoint, random: np.random.Generator) -> None:
        self.random = random
        self._taken = np.unique(self._sample(checkpoint, all_of_it=True))
        kept = self._sample(export)
        cut = np.setdiff1d(self._taken, self._sample(export, all_of_it=True))
        self._kept = kept[~np.isin(kept, cut)]

    @staticmethod
    def _sample(checkpoint: Checkpoint, all_of_it: bool = False) -> Array:
        sampled = [np.zeros(0, np.int64)]
        for table in checkpoint.tables.values():
            seen = 0
            for chunk in table.chunks(KEYS, rows=1 << 18):
                sampled.append(chunk.keys.astype(np.int64) if all_of_it else chunk.keys[:_SAMPLE].astype(np.int64))
                seen += len(chunk.keys)
                if not all_of_it and seen >= _SAMPLE:
                    break
        return np.concatenate(sampled)

    def _is_taken(self, ids: Array) -> Array:
        if not len(self._taken):
            return np.zeros(len(ids), np.bool_)
        places = np.minimum(np.searchsorted(self._taken, ids), len(self._taken) - 1)
        found: Array = self._taken[places] == ids
        return found

    def draw(self, dtype: str, count: int) -> Array:
        """Return `count` ids of a type: about half of them keys, some of them twice."""
        limits = np.iinfo(dtype)
        low, high = max(int(limits.min), -(1 << 62)), min(int(limits.max), 1 << 62)
        near = self.random.integers(max(low, -100), 10_000, count)
        far = self.random.integers(low, high, count)
        missing = np.where(self.random.random(count) < 0.5, near, far)
        missing = missing[~self._is_taken(missing)]
        kept = self._kept
        # A table of uint64 keys has them bit by bit.
        if dtype not in ("int64", "uint64"):
            kept = kept[(kept >= limits.min) & (kept <= limits.max)]
        pool = np.concatenate([self.random.choice(kept, count) if len(kept) else kept, missing])
        ids = self.random.choice(pool, count) if len(pool) else np.zeros(count, np.int64)
        return ids.astype(np.int64).astype(dtype)


def _requests(inputs: Sequence[_Input], ids: _Ids) -> Iterator[Request]:
    """Yield a request for each way in which the inputs may belong together: sparse, ragged, or each by itself."""
    names = {one.name: one for one in inputs}
    alone = {one.name: _plain(one, ids) for one in inputs}
    sparse, ragged = dict(alone), dict(alone)
    # The same for all: weights are of as many rows as ids.
    sizes = ids.random.integers(0, 4, _BATCH)
    total = int(sizes.sum())
    for one in inputs:
        second, third = names.get(f"{one.name}_1"), names.get(f"{one.name}_2")
        if second is None or second.dtype not in (*_INTEGERS, "float32", "string"):
            continue
        if third is not None and one.dtype == third.dtype == "int64" and one.shape is not None and len(one.shape) == 2:
            places = [(row, column) for row in range(_BATCH) for column in range(sizes[row])]
            sparse[one.name] = np.array(places, np.int64).reshape(-1, 2)
            sparse[second.name] = _values(second.dtype, (total,), ids)
            sparse[third.name] = np.array([_BATCH, 4], np.int64)
        elif third is None and second.dtype in ("int64", "int32"):
            ragged[one.name] = _values(one.dtype, (total,), ids)
            ragged[second.name] = np.concatenate([[0], np.cumsum(sizes)]).astype(second.dtype)
            sparse[one.name], sparse[second.name] = ragged[one.name], ragged[second.name]
    yield sparse
    yield ragged
    yield alone


def _plain(one: _Input, ids: _Ids) -> Array:
    shape = (-1,) if one.shape is None else one.shape
    return _values(one.dtype, tuple(_BATCH if size < 0 else size for size in shape), ids)


def _values(dtype: str, shape: tuple[int, ...], ids: _Ids) -> Array:
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


def _check(
    name: str, inputs: Sequence[_Input], ours: Answer, theirs: Answer, ids: _Ids, requests: int
) -> SignatureCheck:
    way, refusal = -1, ""
    for at, request in enumerate(_requests(inputs, ids)):
        try:
            ours(request)
            way = at
            break
        except Exception as error:
            refusal = one_line(str(error))[:300]
    if way < 0:
        return SignatureCheck(name, 0, 0, refused=refusal)
    done, outputs, values, differing = 0, 0, 0, 0
    different: dict[str, str] = {}
    for _ in range(requests):
        request = list(_requests(inputs, ids))[way]
        try:
            expected = ours(request)
        except Exception:
            continue
        got = theirs(request)
        done, outputs = done + 1, len(expected)
        for output, array in expected.items():
            values += array.size
            if not _same(array, got[output]):
                different[output] = _difference(array, got[output])
                comparable = array.shape == got[output].shape
                differing += int(np.count_nonzero(array != got[output])) if comparable else array.size
    told = tuple(f"{output}: {what}" for output, what in sorted(different.items()))
    return SignatureCheck(name, done, outputs, told, "", values, differing)


def _same(a: Array, b: Array) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(np.array_equal(a, b)) if a.dtype == object else a.tobytes() == b.tobytes()


def _difference(a: Array, b: Array) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {list(a.shape)} became {b.dtype} {list(b.shape)}"
    if a.dtype == object or a.dtype == bool:
        return f"{np.count_nonzero(a != b)} of {a.size} values differ"
    return f"values differ by up to {np.nanmax(np.abs(a.astype(np.float64) - b.astype(np.float64))):.3g}"


def _run_objects(folder: Path, meta: MetaGraph) -> Callable[[str], Answer]:
    """A model of TensorFlow 2, by its signatures."""
    tf = _tensorflow()
    try:
        loaded = tf.saved_model.load(str(folder))
    except (tf.errors.OpError, ValueError, OSError, RuntimeError, TypeError) as error:
        raise BadInputError(f"checking '{folder}': TensorFlow cannot load it: {one_line(str(error))[:300]}") from error

    def signature(name: str) -> Answer:
        function = loaded.signatures[name]
        specs = function.structured_input_signature[1]

        def answer(request: Request) -> Mapping[str, Array]:
            fed = {key: tf.constant(value, specs[key].dtype) for key, value in request.items()}
            return {key: np.asarray(tensor.numpy()) for key, tensor in function(**fed).items()}

        return answer

    return signature


def _run_session(folder: Path, meta: MetaGraph) -> Callable[[str], Answer]:
    """A model of TensorFlow 1, in a session."""
    tf = _tensorflow()
    graph = tf.Graph()
    session = tf.compat.v1.Session(graph=graph)
    said = tf.get_logger()
    level = said.level
    try:
        said.setLevel("ERROR")  # that this loader is TensorFlow 1's is as it should be
        with graph.as_default():
            tf.compat.v1.saved_model.load(session, list(meta.tags), str(folder))
    except (tf.errors.OpError, ValueError, OSError, KeyError) as error:
        raise BadInputError(f"checking '{folder}': TensorFlow cannot load it: {one_line(str(error))[:300]}") from error
    finally:
        said.setLevel(level)

    def signature(name: str) -> Answer:
        fields = split(meta.signatures[name])
        names = [{key: text(last(split(info), 1)) for key, info in entries(fields, number)} for number in (1, 2)]

        def answer(request: Request) -> Mapping[str, Array]:
            fed = {names[0][key]: value for key, value in request.items()}
            return {key: np.asarray(array) for key, array in session.run(names[1], fed).items()}

        return answer

    return signature


def _run_training(prefix: Path, trained: TrainedGraph) -> Callable[[str], Answer]:
    """A training session, restored from its checkpoint."""
    tf = _tensorflow()
    graph = tf.Graph()
    session = tf.compat.v1.Session(graph=graph)
    try:
        with graph.as_default():
            meta = tf.compat.v1.MetaGraphDef.FromString(trained.trained)
            saver = tf.compat.v1.train.import_meta_graph(meta, clear_devices=True)
            if saver is not None:
                saver.restore(session, str(prefix))
            session.run(tf.compat.v1.tables_initializer())
            fixed = {tensor if ":" in tensor else f"{tensor}:0": value for tensor, value in trained.values.items()}
            fixed = {tensor: _parsed(value, graph.get_tensor_by_name(tensor).dtype) for tensor, value in fixed.items()}
    except (tf.errors.OpError, ValueError, OSError, KeyError, RuntimeError) as error:
        told = one_line(str(error))[:300]
        raise BadInputError(f"checking '{trained.file}': TensorFlow cannot restore it: {told}") from error

    def signature(name: str) -> Answer:
        def answer(request: Request) -> Mapping[str, Array]:
            fed = {trained.fed[name][key]: value for key, value in request.items()}
            fetched = {key: tensor if ":" in tensor else f"{tensor}:0" for key, tensor in trained.fetched[name].items()}
            got = session.run(fetched, {**fixed, **{t if ":" in t else f"{t}:0": v for t, v in fed.items()}})
            return {key: np.asarray(array) for key, array in got.items()}

        return answer

    return signature


def _parsed(value: str, dtype: Any) -> Any:
    if dtype.is_bool:
        return value.lower() in ("true", "1")
    if dtype.is_integer or dtype.is_floating:
        return dtype.as_numpy_dtype(int(value) if dtype.is_integer else float(value))
    return value


def _tensorflow() -> Any:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    tf = importlib.import_module("tensorflow")
    importlib.import_module("tfplugin")
    return tf
