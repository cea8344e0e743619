"""Whole models: a SavedModel run by TensorFlow, with the signatures that it has, for every protocol that has them.

It is loaded as TensorFlow Serving loads it, into a session whose inputs are fed and outputs fetched by the tensors that
the signature names; so what an answer does not need is not computed. TensorFlow is imported only here, and only where
a SavedModel holds no table that can be served without it.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.bundle.wire import WireError, as_bytes, read_fields
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.options import OpenOptions, Progress
from kvtools.dialects.savedmodel import check_graph, is_whole_model, tables_read
from kvtools.errors import BadInputError, CorruptFileError, MissingDependencyError, one_line
from kvtools.model_requests import InputSpec
from kvtools.quiet_import import import_quietly
from kvtools.server.allocator import expect_many_threads
from kvtools.server.protocol_error import HTTP_STATUSES, ProtocolError
from kvtools.server.protos import DATA_TYPES
from kvtools.server.settings import Settings
from kvtools.server.signatures import FROM_TENSORFLOW, STRING, Array, TensorSpec
from kvtools.server.store import ServedFile, TableStore
from kvtools.tensorflow_error import reason
from kvtools.tfrecord import read_records
from kvtools.warmup import MOST_RECORDS, WARMUP_FILE, logged_request

_LOG = logging.getLogger("kvtools.serve")
_MODEL_FILE = "saved_model.pb"
_TAG = "serve"
_BAD_SAID = 5
_META_GRAPHS = 2  # of a SavedModel, saved_model.proto
_SAVER_DEF = 3  # of a MetaGraphDef, meta_graph.proto
_TYPE_NAMES = {number: name for name, number in DATA_TYPES.items()}


@dataclass(frozen=True)
class ModelSignature:
    """A signature of a SavedModel."""

    name: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]
    method_name: str
    graph: _Graph = field(repr=False)
    tables: tuple[str, ...] | None = None
    defaults: Mapping[str, Array] = field(default_factory=dict)

    def takes(self, name: str, dtype: np.dtype[Any]) -> bool:
        """An input has the one type that the signature says."""
        return bool(dtype == self.inputs[name].dtype)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str], settings: Settings) -> dict[str, Array]:
        """Run the model; an error of an operation is told with the code that TensorFlow gives it."""
        names = list(self.inputs)
        fetched = self.graph.fetch(
            tuple(self.outputs[name].tensor for name in outputs),
            tuple(self.inputs[name].tensor for name in names),
            [inputs[name] for name in names],
        )
        # The type is said: of one string, which is no array, NumPy would make text of fixed width.
        return {name: np.asarray(array, self.outputs[name].dtype) for name, array in zip(outputs, fetched, strict=True)}


class _Graph:
    """A SavedModel's graph in a session. Signatures hold it, and not the store: so it goes when the store does."""

    def __init__(self, tf: Any, session: Any) -> None:
        self._tf = tf
        self._session = session
        self._callables: dict[Any, Any] = {}
        self._making = threading.Lock()

    def fetch(self, outputs: tuple[str, ...], inputs: tuple[str, ...], arrays: Sequence[Array]) -> Sequence[Array]:
        """Run what `outputs` need, fed with `arrays`; raises a `ProtocolError`."""
        errors = self._tf.errors
        try:
            call = self._callables.get((outputs, inputs))
            if call is None:
                with self._making:
                    call = self._session.make_callable(list(outputs), feed_list=list(inputs))
                    self._callables[outputs, inputs] = call
            return call(*arrays)  # type: ignore[no-any-return]
        except errors.OpError as error:
            code = next((name for name, number in _codes(errors).items() if number == error.error_code), "UNKNOWN")
            raise ProtocolError(code if code in HTTP_STATUSES else "UNKNOWN", reason(error)) from None
        except ValueError as error:  # a shape that the graph refuses before it runs, or an error that quotes bytes
            raise ProtocolError("INVALID_ARGUMENT", reason(error)) from None


class SavedModelStore:
    """A SavedModel folder, loaded: to the server what a `TableStore` is, without tables and with signatures.

    Raises:
        MissingDependencyError: TensorFlow is not installed.
        BadInputError: TensorFlow cannot load the model.

    Example:
        ```python
        store = SavedModelStore(Path("models/ranker/7"))
        store.signatures["serving_default"].run({"x": x}, ["scores"], Settings())
        ```
    """

    dialect = "tensorflow_savedmodel"
    warm = True
    resident = True

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.file = ServedFile()
        self.tables: dict[str, Any] = {}
        try:
            self.fingerprint = hashlib.sha256((self.path / _MODEL_FILE).read_bytes()).hexdigest()
        except OSError as error:
            raise BadInputError(f"reading '{self.path}': {error.strerror or error}") from error
        tf = _import_tensorflow(self.path)
        tf1 = tf.compat.v1
        graph = tf1.Graph()
        said = tf.get_logger()
        level = said.level
        try:
            said.setLevel(logging.ERROR)  # that this loader is TensorFlow 1's is as it should be
            with graph.as_default():
                session = tf1.Session(graph=graph)
                meta = tf1.saved_model.load(session, [_TAG], str(self.path))
        except Exception as error:  # a damaged protobuf, an unknown operation, a missing file: all sorts of types
            raise BadInputError(f"loading '{self.path}' with TensorFlow: {reason(error)[:500]}") from error
        finally:
            said.setLevel(level)
        runs = _Graph(tf, session)
        self.reads = tables_read(self.path)
        self.signatures: dict[str, ModelSignature] = {}
        for name, definition in sorted(meta.signature_def.items()):
            if name.startswith("__saved_model"):
                continue  # what initialises the model
            inputs, outputs = _specs(definition.inputs), _specs(definition.outputs)
            if inputs is None or not outputs:
                _LOG.warning(
                    "'%s': signature '%s' has tensors that are not dense, or of types that requests lack; left out",
                    self.path,
                    name,
                )
                continue
            defaults = {key: tf.make_ndarray(tensor) for key, tensor in definition.defaults.items()}
            self.signatures[name] = ModelSignature(
                name, inputs, outputs, definition.method_name, runs, self.reads, defaults
            )
        if not self.signatures:
            raise BadInputError(f"serving '{self.path}': the model has no signature that can be asked")
        self._check_values(tf1, session)

    def _check_values(self, tf1: Any, session: Any) -> None:
        """Look for variables that loading gave no value, as those of Keras 3 in files of `tf.saved_model.save`.

        Raises:
            BadInputError: no signature can be answered without them.
        """
        empty = _without_value(tf1, session)
        if not empty:
            return
        without = {}
        for name, signature in self.signatures.items():
            outputs = [spec.tensor for spec in signature.outputs.values()]
            lacking = _needed(session.graph, outputs) & empty.keys()
            if lacking:
                without[name] = sorted(empty[variable] for variable in lacking)
        if not without:
            return
        name, variables = next(iter(without.items()))
        shown = ", ".join(f"'{variable}'" for variable in variables[:3]) + (", ..." if len(variables) > 3 else "")
        said = (
            f"signature '{name}' reads {len(variables)} variables that loading gives no value ({shown})"
            if len(variables) > 1
            else f"signature '{name}' reads variable {shown}, which loading gives no value"
        )
        said += ". Models of Keras 3 are so where tf.saved_model.save wrote them: write it anew by model.export(folder)"
        if len(without) == len(self.signatures):
            raise BadInputError(f"serving '{self.path}': {said}")
        _LOG.warning("'%s': %s; %d of %d signatures will fail", self.path, said, len(without), len(self.signatures))

    def table(self, name: str) -> Any:
        """A whole model has no tables of its own; raises `UnknownTableError`."""
        return TableStore.table(self, name)  # type: ignore[arg-type]

    def populate(self, stop: threading.Event | None = None) -> None:
        """Do nothing: the session holds everything in memory."""

    def verify(self, go_on: Callable[[], bool] | None = None) -> bool:
        """Do nothing: TensorFlow has checked what it read."""
        return True

    verifies_on_use = False
    intact = True  # what TensorFlow has read is in memory
    identity = ""

    def warm_up(self, stop: threading.Event | None = None) -> None:
        """Answer the requests that the model brings along, as TensorFlow Serving does: so no client's is the first.

        A request that is damaged, or that the model refuses, is told in the log.
        """
        file = self.path / WARMUP_FILE
        if not file.is_file():
            return
        takes = {name: _input_specs(signature) for name, signature in self.signatures.items()}
        done, bad = 0, 0
        try:
            for number, record in enumerate(read_records(file), 1):
                if number > MOST_RECORDS:
                    _LOG.warning("'%s': it has more than %d requests to warm up by", self.path, MOST_RECORDS)
                    break
                if stop is not None and stop.is_set():
                    return
                try:
                    request = logged_request(record, takes)
                    signature = self.signatures[request.signature]
                    signature.run(request.inputs, [*signature.outputs], Settings())
                    done += 1
                except (ValueError, ProtocolError) as error:
                    bad += 1
                    if bad <= _BAD_SAID:
                        _LOG.warning(
                            "'%s': warm-up request %d is left out: %s", self.path, number, one_line(str(error))
                        )
        except BadInputError as error:
            _LOG.warning("'%s': its warm-up requests end early: %s", self.path, error)
        if bad > _BAD_SAID:
            _LOG.warning("'%s': so are %d more warm-up requests", self.path, bad - _BAD_SAID)
        _LOG.info("'%s': warmed up by %d requests", self.path, done)

    def discard(self) -> bool:
        """Return that nothing was made for it."""
        return False

    def verify_on_use(self) -> None:
        """Do nothing, for the same reason."""

    def trust(self, identity: str) -> None:
        """Do nothing."""


def open_store(
    path: str | os.PathLike[str],
    *,
    options: OpenOptions | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Any:
    """Open what lies at `path`: as tables where it holds any, otherwise as a whole model (`SavedModelStore`).

    A whole model has answered its warm-up requests then, or as many as there were until `stop`.
    """
    is_model = (Path(path) / _MODEL_FILE).is_file()
    if not is_model or (not is_whole_model(Path(path)) and _has_tables(path, options)):
        return TableStore(path, options=options, cache=cache, progress=progress)
    _check_whole(Path(path))
    if is_whole_model(Path(path)):
        check_graph(Path(path))
    store = SavedModelStore(path)
    store.warm_up(stop)
    return store


def _has_tables(path: str | os.PathLike[str], options: OpenOptions | None) -> bool:
    try:
        return bool(open_checkpoint(path, options).tables)
    except CorruptFileError:
        raise
    except BadInputError:
        return False  # variables of no dialect, or none at all


def _check_whole(folder: Path) -> None:
    """Raise `BadInputError` for a model whose variables are not all there: TensorFlow is not started to find out."""
    variables = folder / "variables"
    missing = ""
    if (variables / "variables.index").is_file():
        parts = sorted(variables.glob("variables.data-*-of-*"))
        if not parts or parts[0].name.rpartition("-")[2] != f"{len(parts):05d}":
            missing = "variables.data"
    elif _has_variables(folder / _MODEL_FILE):
        missing = "variables.index"
    if missing:
        raise BadInputError(f"serving '{folder}': it has no 'variables/{missing}', or not all; copy it as a whole")


def _has_variables(file: Path) -> bool:
    """Tell whether a SavedModel has a saver, which restores variables."""
    try:
        graphs = [as_bytes(value) for number, value in read_fields(file.read_bytes()) if number == _META_GRAPHS]
        return any(number == _SAVER_DEF for graph in graphs for number, _ in read_fields(graph))
    except (OSError, WireError):
        return False  # which TensorFlow will say in its words


def _without_value(tf1: Any, session: Any) -> dict[str, str]:
    """Return the names of variables that have no value, by their operations."""
    handles = [op for op in session.graph.get_operations() if op.type == "VarHandleOp"]
    with session.graph.as_default():
        known = session.run([tf1.raw_ops.VarIsInitializedOp(resource=op.outputs[0]) for op in handles])
    return {
        op.name: op.get_attr("shared_name").decode() or op.name
        for op, has_value in zip(handles, known, strict=True)
        if not has_value
    }


def _needed(graph: Any, tensors: Sequence[str]) -> set[str]:
    """Return the names of the operations that tensors need."""
    waiting = [graph.get_tensor_by_name(tensor).op for tensor in tensors]
    needed: set[str] = set()
    while waiting:
        op = waiting.pop()
        if op.name not in needed:
            needed.add(op.name)
            waiting += [*(tensor.op for tensor in op.inputs), *op.control_inputs]
    return needed


def _specs(infos: Any) -> dict[str, TensorSpec] | None:
    specs = {}
    for name, info in sorted(infos.items()):
        dtype = FROM_TENSORFLOW.get(_TYPE_NAMES.get(info.dtype, ""))
        if dtype is None or info.WhichOneof("encoding") != "name":
            return None
        shape = None if info.tensor_shape.unknown_rank else tuple(dim.size for dim in info.tensor_shape.dim)
        specs[name] = TensorSpec(dtype, shape, info.name)
    return specs


def _input_specs(signature: ModelSignature) -> list[InputSpec]:
    return [
        InputSpec(name, "string" if spec.dtype == STRING else spec.dtype.name, spec.shape)
        for name, spec in signature.inputs.items()
    ]


def _codes(errors: Any) -> dict[str, int]:
    return {name: value for name, value in vars(errors).items() if name.isupper() and isinstance(value, int)}


def _import_tensorflow(path: Path) -> Any:
    expect_many_threads()
    is_first = "tensorflow" not in sys.modules
    try:
        tensorflow = import_quietly("tensorflow")[0]
    except ImportError as error:
        raise MissingDependencyError(
            f"serving '{path}': a SavedModel without tables is run by TensorFlow, which cannot be imported"
            f" ({one_line(str(error))}); run `pip install 'kvtools[tensorflow]'`"
        ) from error
    # The objects of a graph hold one another, so a model that was let go lies in memory until Python looks at all that
    # there are; by itself it does so once a quarter of them are new, and those of TensorFlow are very many.
    if is_first:
        gc.freeze()  # they stay, and need not be looked at
    gc.collect()
    return tensorflow
