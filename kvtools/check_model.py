"""Ask a trained model and its export the same, and compare what they answer, bit by bit. TensorFlow runs both."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.dialects.interface import Checkpoint
from kvtools.errors import BadInputError, CheckFailedError, MissingDependencyError
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
from kvtools.quantized_rows import encode
from kvtools.quiet_import import import_quietly
from kvtools.remote.stored import keep_below
from kvtools.stock_model.fields import entries, last, split, text
from kvtools.stock_model.graph_def import tensor_name
from kvtools.stock_model.meta_graph import MetaGraph
from kvtools.stock_model.table import StockTable
from kvtools.stock_model.training_graph import only_what_runs
from kvtools.tensorflow_error import reason

Answer = Callable[[Request], Mapping[str, Array]]
Asked = list[tuple[str, Request]]
"""Requests, each with its signature."""
REAL = "give real requests with --warmup FILE"
_ROWS_AT_ONCE = 1 << 14
_ASKED_FIRST = 32


@dataclass(frozen=True)
class SignatureCheck:
    """What a comparison found: `different` names the outputs that are not the same to the bit, and by how much; of all
    values, `differing` differ, by `largest` at most.

    `refused` says why a signature was not compared: the trained model answered none of the requests. `reordered` says
    that nothing but TensorFlow's optimizer of graphs makes the answers differ: without it they are the same to the bit.
    """

    signature: str
    requests: int
    outputs: int
    different: tuple[str, ...] = ()
    refused: str = ""
    values: int = 0
    differing: int = 0
    largest: float = 0.0
    reordered: bool = False


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
    given: Sequence[tuple[str, Request]] = (),
    asked: Asked | None = None,
) -> list[SignatureCheck]:
    """Compare the answers of a model to random requests, and to given ones, with those of its export.

    Ids are keys of the export, keys of rows that were cut, keys of none, and duplicates.

    Args:
        checkpoint: the trained SavedModel, opened.
        export: what was made of it, opened.
        count: how many requests of 16 samples to make of each signature.
        seed: for other requests.
        graph: of a checkpoint of TensorFlow 1, what is served of its graph.
        run: another export with the keys of `export`, to be asked in its place.
        theirs: what answers each signature, where `export` has the tables only.
        given: further requests.
        asked: is given the requests that were compared.

    Raises:
        BadInputError: TensorFlow cannot load the model.

    Example:
        ```python
        from kvtools.dialects.detect import open_checkpoint
        check_model(open_checkpoint("trained_model"), open_checkpoint("models/1"), 100)
        ```
    """
    trained, exported = Path(checkpoint.path), run or Path(export.path)
    keep_below(trained)  # TensorFlow opens it
    ids = MixedIds(checkpoint, export, np.random.default_rng(seed))
    found: list[SignatureCheck] = []
    ours = answers_of(trained) if graph is None else _run_training(trained, graph)
    theirs = theirs or answers_of(exported)
    meta = serving_graph(trained) if graph is None else serving_graph_of(graph.saved_model)
    for name, inputs in signature_inputs(meta).items():
        real = [request for signature, request in given if signature == name]
        compared: list[Request] = []
        found.append(_check(name, inputs, ours(name), theirs(name), ids, count, real, compared))
        if asked is not None:
            asked += [(name, request) for request in compared]
    return found


@contextmanager
def as_written() -> Iterator[None]:
    """Run the graphs that are loaded inside as they are written, without TensorFlow's optimizer of graphs.

    That changes the order of sums and products where it knows shapes, and it knows those of stock operations better. So
    two graphs of the same operations may differ in the last bit.
    """
    options = _tensorflow().config.optimizer
    before = options.get_experimental_options().get("disable_meta_optimizer", False)
    options.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        options.set_experimental_options({"disable_meta_optimizer": before})


def mark_reordered(
    checks: Sequence[SignatureCheck], again: Callable[[], Sequence[SignatureCheck]]
) -> list[SignatureCheck]:
    """Mark the signatures whose answers are the same to the bit once graphs run `as_written`; `again` compares anew."""
    if not any(one.different for one in checks):
        return list(checks)
    with as_written():
        same = {one.signature for one in again() if one.requests and not one.different}
    return [replace(one, reordered=bool(one.different) and one.signature in same) for one in checks]


def wrong_answers(checks: Sequence[SignatureCheck]) -> list[str]:
    """Say which outputs differ for another reason than the order of sums and products."""
    return [f"{one.signature}: {what}" for one in checks if not one.reordered for what in one.different]


def expect_answers(checks: Sequence[SignatureCheck], doing: str, real: str = REAL) -> None:
    """Raise `CheckFailedError` where nothing was compared; `real` says how to give requests."""
    if any(one.requests for one in checks):
        return
    why = "; ".join(f"{one.signature}: {one.refused}" for one in checks if one.refused)
    raise CheckFailedError(
        f"{doing}: nothing could be compared, so nothing was written: "
        + (f"the model took none of the requests ({why})" if why else "the model has no signature that can be asked")
        + f"; {real} (a file for warmup= in Python), or leave --check out"
    )


def refusals(checks: Sequence[SignatureCheck], real: str = REAL) -> list[str]:
    """Say which signatures were not compared, a sentence each."""
    return [
        f"signature '{one.signature}' was not compared, as the model took none of the requests ({one.refused}); {real}"
        for one in checks
        if not one.requests
    ]


def not_compared(tables: Sequence[str], real: str = REAL) -> list[str]:
    """Say of which tables no row was compared, a sentence each."""
    return [f"no answer came from a row of table '{name}', so its rows were not compared; {real}" for name in tables]


def rows_not_asked_for(folder: Path, tables: Sequence[StockTable], asked: Asked) -> list[str]:
    """Return of which tables of an export no answer came from a row.

    The export is loaded, and the rows of one table after the other become other numbers. Where that changes no answer,
    the requests tell nothing of them: no key was found, or the model makes nothing of what it found.
    """
    tables = [table for table in tables if table.rows]
    if not tables or not asked:
        return [table.name for table in tables]
    session, answers = _session_of(folder)
    random = np.random.default_rng(1)

    def answered(requests: Asked) -> Iterator[bytes]:
        for signature, request in requests:
            try:
                yield _digest(answers(signature)(request))
            except Exception as error:  # a row may be an id, of which there is none now
                yield str(error).encode()

    # A few requests tell of most tables.
    for some in (asked[:: -(-len(asked) // _ASKED_FIRST)], asked):
        remaining: list[StockTable] = []
        before = list(answered(some)) if tables else []
        for table in tables:
            _change_rows(session, table, random)
            if all(a == b for a, b in zip(before, answered(some), strict=True)):
                remaining.append(table)
            else:
                before = list(answered(some))
        tables = remaining
    session.close()
    return [table.name for table in tables]


def _digest(answer: Mapping[str, Array]) -> bytes:
    digest = hashlib.blake2b()
    for output, array in sorted(answer.items()):
        digest.update(f"{output} {array.dtype} {array.shape}".encode())
        digest.update(repr(array.tolist()).encode() if array.dtype == object else array.tobytes())
    return digest.digest()


def _change_rows(session: Any, table: StockTable, random: np.random.Generator) -> None:
    """Give the keys of a table other rows; those of missing keys stay."""
    tf = _tensorflow()
    name = table.node("values")
    with session.graph.as_default():
        handle = session.graph.get_tensor_by_name(f"{name}:0")
        stored = session.graph.get_operation_by_name(name).get_attr("dtype")
        at, rows = tf.compat.v1.placeholder(tf.int64, [None]), tf.compat.v1.placeholder(stored, [None, None])
        update = tf.raw_ops.ResourceScatterUpdate(resource=handle, indices=at, updates=rows)
    end = table.zeros_row
    drawn = random.standard_normal((min(end, _ROWS_AT_ONCE), table.dim)) * 2
    if table.rows_as in ("int8", "int4"):
        others = encode(drawn.astype(np.float32), table.rows_as).view(stored.as_numpy_dtype)
    elif stored.is_floating:
        others = drawn.astype(stored.as_numpy_dtype)
    else:
        others = random.integers(0, 2 if stored.is_bool else 100, drawn.shape).astype(stored.as_numpy_dtype)
    for first in range(0, end, _ROWS_AT_ONCE):
        count = min(_ROWS_AT_ONCE, end - first)
        session.run(update, {at: np.arange(first, first + count), rows: others[:count]})


def answers_of(folder: Path) -> Callable[[str], Answer]:
    """Load a SavedModel, and return what answers requests to a signature; raises `BadInputError`."""
    meta = serving_graph(folder)
    return (_run_objects if meta.objects else _run_session)(folder)


def _check(
    name: str,
    inputs: Sequence[InputSpec],
    ours: Answer,
    theirs: Answer,
    ids: MixedIds,
    count: int,
    given: Sequence[Request],
    compared: list[Request],
) -> SignatureCheck:
    way, refusal = -1, ""
    for at, request in enumerate(requests(inputs, ids)):
        try:
            ours(request)
            way = at
            break
        except Exception as error:
            refusal = reason(error)[:300]
    done, outputs, values, differing, largest = 0, 0, 0, 0, 0.0
    different: dict[str, str] = {}
    drawn = (list(requests(inputs, ids))[way] for _ in range(count if way >= 0 else 0))
    for request in (*given, *drawn):
        try:
            expected = ours(request)
        except Exception as error:
            refusal = reason(error)[:300]
            continue
        got = theirs(request)
        compared.append(request)
        done, outputs = done + 1, len(expected)
        for output, array in expected.items():
            values += array.size
            if not _same(array, got[output]):
                different[output] = _difference(array, got[output])
                comparable = array.shape == got[output].shape
                differing += int(np.count_nonzero(array != got[output])) if comparable else array.size
                largest = max(largest, _largest(array, got[output]) if comparable else np.inf)
    if not done:
        return SignatureCheck(name, 0, 0, refused=refusal or "there was no request")
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
        raise BadInputError(f"checking '{folder}': TensorFlow cannot load it: {reason(error)[:300]}") from error

    def signature(name: str) -> Answer:
        function = loaded.signatures[name]
        specs = function.structured_input_signature[1]

        def answer(request: Request) -> Mapping[str, Array]:
            fed = {key: tf.constant(value, specs[key].dtype) for key, value in request.items()}
            return {key: np.asarray(tensor.numpy()) for key, tensor in function(**fed).items()}

        return answer

    return signature


def _run_session(folder: Path) -> Callable[[str], Answer]:
    return _session_of(folder)[1]


def _session_of(folder: Path) -> tuple[Any, Callable[[str], Answer]]:
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
            # Without the machines of a cluster that trained it.
            tf.compat.v1.saved_model.load(session, list(meta.tags), str(folder), clear_devices=True)
    except (tf.errors.OpError, ValueError, OSError, KeyError) as error:
        raise BadInputError(f"checking '{folder}': TensorFlow cannot load it: {reason(error)[:300]}") from error
    finally:
        said.setLevel(level)

    def signature(name: str) -> Answer:
        fields = split(meta.signatures[name])
        names = [{key: text(last(split(info), 1)) for key, info in entries(fields, number)} for number in (1, 2)]

        def answer(request: Request) -> Mapping[str, Array]:
            fed = {_fed(names[0], key): value for key, value in request.items()}
            return {key: np.asarray(array) for key, array in session.run(names[1], fed).items()}

        return answer

    return session, signature


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
            fixed = {tensor_name(tensor): value for tensor, value in trained.values.items()}
            fixed = {tensor: _parsed(value, graph.get_tensor_by_name(tensor).dtype) for tensor, value in fixed.items()}
    except (tf.errors.OpError, ValueError, OSError, KeyError, RuntimeError) as error:
        told = reason(error)[:300]
        raise BadInputError(f"checking '{trained.file}': TensorFlow cannot restore it: {told}") from error

    def signature(name: str) -> Answer:
        def answer(request: Request) -> Mapping[str, Array]:
            fed = {tensor_name(_fed(trained.fed[name], key)): value for key, value in request.items()}
            fetched = {key: tensor_name(tensor) for key, tensor in trained.fetched[name].items()}
            got = session.run(fetched, {**fixed, **fed})
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
    tf, _ = import_quietly("tensorflow", "tfplugin")
    return tf
