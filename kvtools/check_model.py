"""Ask a trained model and its export the same, and compare what they answer, bit by bit. TensorFlow runs both."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.dialects.interface import Checkpoint
from kvtools.errors import BadInputError, MissingDependencyError, one_line
from kvtools.meta_file import TrainedGraph
from kvtools.model_requests import (
    InputSpec,
    MixedIds,
    Request,
    requests,
    serving_graph,
    serving_graph_of,
    signature_inputs,
)
from kvtools.stock_model.fields import entries, last, split, text
from kvtools.stock_model.meta_graph import MetaGraph
from kvtools.stock_model.training_graph import only_what_runs

Answer = Callable[[Request], Mapping[str, Array]]


@dataclass(frozen=True)
class SignatureCheck:
    """What a comparison found: `different` names the outputs that are not the same to the bit, and by how much; of all
    values, `differing` differ, by `largest` at most.

    `refused` says why a signature was not compared: the trained model answered none of the requests.
    """

    signature: str
    requests: int
    outputs: int
    different: tuple[str, ...] = ()
    refused: str = ""
    values: int = 0
    differing: int = 0
    largest: float = 0.0


def check_available() -> None:
    """Raise `MissingDependencyError` unless both models can be run here."""
    for package in ("tensorflow", "tfplugin"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError(
                f"checking an export: there is no {package}, which runs the trained model; install kvtools[tensorflow],"
                " or leave --check out"
            )


def check_model(
    checkpoint: Checkpoint,
    export: Checkpoint,
    count: int,
    seed: int = 0,
    graph: TrainedGraph | None = None,
    run: Path | None = None,
    theirs: Callable[[str], Answer] | None = None,
) -> list[SignatureCheck]:
    """Compare the answers of a model to random requests with those of its export.

    Ids are keys of the export, keys of none, and duplicates. Rows that were left out are not asked for, but a model may
    make other ids of those that it is given.

    Args:
        checkpoint: the trained SavedModel, opened.
        export: what was made of it, opened.
        count: how many requests of 16 samples to make of each signature.
        seed: for other requests.
        graph: of a checkpoint of TensorFlow 1, what is served of its graph.
        run: another export with the keys of `export`, to be asked in its place.
        theirs: what answers each signature, where `export` has the tables only.

    Raises:
        BadInputError: TensorFlow cannot load the model.

    Example:
        ```python
        from kvtools.dialects.detect import open_checkpoint
        check_model(open_checkpoint("trained_model"), open_checkpoint("models/1"), 100)
        ```
    """
    trained, exported = Path(checkpoint.path), run or Path(export.path)
    ids = MixedIds(checkpoint, export, np.random.default_rng(seed))
    found: list[SignatureCheck] = []
    ours = answers_of(trained) if graph is None else _run_training(trained, graph)
    theirs = theirs or answers_of(exported)
    meta = serving_graph(trained) if graph is None else serving_graph_of(graph.saved_model)
    for name, inputs in signature_inputs(meta).items():
        found.append(_check(name, inputs, ours(name), theirs(name), ids, count))
    return found


def answers_of(folder: Path) -> Callable[[str], Answer]:
    """Load a SavedModel, and return what answers requests to a signature; raises `BadInputError`."""
    meta = serving_graph(folder)
    return (_run_objects if meta.objects else _run_session)(folder)


def _check(
    name: str, inputs: Sequence[InputSpec], ours: Answer, theirs: Answer, ids: MixedIds, count: int
) -> SignatureCheck:
    way, refusal = -1, ""
    for at, request in enumerate(requests(inputs, ids)):
        try:
            ours(request)
            way = at
            break
        except Exception as error:
            refusal = one_line(str(error))[:300]
    if way < 0:
        return SignatureCheck(name, 0, 0, refused=refusal)
    done, outputs, values, differing, largest = 0, 0, 0, 0, 0.0
    different: dict[str, str] = {}
    for _ in range(count):
        request = list(requests(inputs, ids))[way]
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
                largest = max(largest, _largest(array, got[output]) if comparable else np.inf)
    told = tuple(f"{output}: {what}" for output, what in sorted(different.items()))
    return SignatureCheck(name, done, outputs, told, "", values, differing, largest)


def _same(a: Array, b: Array) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(np.array_equal(a, b)) if a.dtype == object else a.tobytes() == b.tobytes()


def _difference(a: Array, b: Array) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{a.dtype} {list(a.shape)} became {b.dtype} {list(b.shape)}"
    if a.dtype == object or a.dtype == bool:
        return f"{np.count_nonzero(a != b)} of {a.size} values differ"
    return f"values differ by up to {_largest(a, b):.3g}"


def _largest(a: Array, b: Array) -> float:
    """The largest difference between two arrays of one shape; 0 where they are no numbers, infinite where only one is
    not finite."""
    if a.dtype.kind not in "fiuV":
        return 0.0
    with np.errstate(invalid="ignore"):
        differences = np.abs(a.astype(np.float64) - b.astype(np.float64))
    differences[(a == b) | ((a != a) & (b != b))] = 0
    return float(np.nan_to_num(differences, nan=np.inf).max(initial=0))


def _run_objects(folder: Path) -> Callable[[str], Answer]:
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


def _run_session(folder: Path) -> Callable[[str], Answer]:
    """A model in a session, as TensorFlow 1 loads it, and servers do."""
    tf = _tensorflow()
    meta = serving_graph(folder)
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
            fed = {_fed(names[0], key): value for key, value in request.items()}
            return {key: np.asarray(array) for key, array in session.run(names[1], fed).items()}

        return answer

    return signature


def _fed(names: Mapping[str, str], key: str) -> str:
    """The tensor of an input."""
    if not names.get(key):
        raise ValueError(f"input '{key}' is a sparse or composite tensor, and no requests are made of such")
    return names[key]


def _run_training(prefix: Path, trained: TrainedGraph) -> Callable[[str], Answer]:
    """A training session, restored from its checkpoint."""
    tf = _tensorflow()
    source = MetaGraph.decode(trained.trained)
    named = [
        *trained.values,
        *(tensor for of in (trained.fed, trained.fetched) for one in of.values() for tensor in one.values()),
    ]
    only_what_runs(source, named)
    encoded = source.encode()
    graph = tf.Graph()
    session = tf.compat.v1.Session(graph=graph)
    try:
        with graph.as_default():
            meta = tf.compat.v1.MetaGraphDef.FromString(encoded)
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
            fed = {_fed(trained.fed[name], key): value for key, value in request.items()}
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
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # 2 complains of GPUs that are not there
    tf = importlib.import_module("tensorflow")
    importlib.import_module("tfplugin")
    return tf
