"""The `.meta` file of a TensorFlow 1 checkpoint, as a model to be exported: which of its tensors are served.

A `.meta` is a MetaGraphDef, which `tf.compat.v1.train.Saver` writes beside each checkpoint:
https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/protobuf/meta_graph.proto
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtools.dialects.bundle.dtypes import number_named
from kvtools.dialects.interface import Checkpoint
from kvtools.errors import BadInputError, CorruptFileError, UsageError
from kvtools.lookup_model.messages import message
from kvtools.remote.stored import read_bytes
from kvtools.stock_model.meta_graph import DAMAGED, MetaGraph, malformed
from kvtools.stock_model.training_graph import NotServable, UnknownName, Wanted, make_read_only, served_graph

_SCHEMA_VERSION = 1


@dataclass(frozen=True)
class TrainedGraph:
    """The graph of a training session, with what is served of it.

    Attributes:
        file: the `.meta`.
        saved_model: as a SavedModel, encoded.
        tensors: the dense tensors of the checkpoint that it restores.
        files: what its assets are called, and where they are.
        fed, fetched: per signature, the names of inputs and outputs, and their tensors in the `.meta`.
        values: what else is fed, as text.
        trained: the graph of the training session, encoded; of one that was made read-only, as it is now.
    """

    file: Path
    saved_model: bytes
    tensors: frozenset[str]
    files: Mapping[str, Path]
    fed: Mapping[str, Mapping[str, str]]
    fetched: Mapping[str, Mapping[str, str]]
    values: Mapping[str, str]
    trained: bytes


def trained_graph(checkpoint: Checkpoint, wanted: Wanted, file: Path | None = None) -> TrainedGraph:
    """Read the graph of a checkpoint of TensorFlow 1, as one to be served.

    Args:
        checkpoint: opened; of `tf.compat.v1.train.Saver`, or of the saver of another engine.
        wanted: the signature, or the tensors, to serve.
        file: the `.meta`; the one beside the checkpoint if None.

    Raises:
        UsageError: a signature and tensors, or inputs without outputs.
        BadInputError: there is no `.meta`, or no such tensor; an output needs what neither inputs nor the checkpoint
            have.
        CorruptFileError: the `.meta` is damaged.

    Example:
        ```python
        from kvtools.dialects.detect import open_checkpoint
        checkpoint = open_checkpoint("model.ckpt-100")
        graph = trained_graph(checkpoint, Wanted(inputs={"ids": "ids:0"}, outputs={"click": "Sigmoid:0"}))
        export_model(checkpoint, Path("models/1"), graph=graph)
        ```
    """
    if wanted.signature and (wanted.inputs or wanted.outputs):
        raise UsageError(
            f"exporting: got --signature {wanted.signature} and --input or --output: a signature has its own"
        )
    if wanted.inputs and not wanted.outputs:
        raise UsageError("exporting: got --input without --output: say which tensors to answer with")
    if (Path(checkpoint.path) / "saved_model.pb").is_file():
        raise UsageError(
            f"exporting: '{checkpoint.path}' is a SavedModel, which has a graph and signatures of its own: leave out"
            " --meta, --input, --output, --signature, --feed and --read-only"
        )
    path = file or Path(f"{checkpoint.path}.meta")
    meta, trained = _read(path, named=file is not None)
    try:
        if wanted.read_only:
            make_read_only(meta)
            trained = meta.encode()
        dtypes = {variable.name: number_named(variable.dtype) for variable in checkpoint.variables}
        served = served_graph(meta, wanted, dtypes)
        encoded = served.meta.encode()
    except (UnknownName, NotServable) as error:
        raise BadInputError(f"exporting '{checkpoint.path}' by '{path}': {error}") from None
    except DAMAGED as error:
        raise malformed(path, error, "checkpoint") from error
    files = {name: _found(given, Path(checkpoint.path).parent, path) for name, given in served.files.items()}
    saved_model = message((1, _SCHEMA_VERSION), (2, encoded))
    return TrainedGraph(
        path, saved_model, served.tensors, files, served.fed, served.fetched, dict(wanted.values), trained
    )


def named_tensors(option: str, given: Sequence[str]) -> dict[str, str]:
    """Return the tensors that `NAME=TENSOR` name; raises `UsageError` where something else is given.

    >>> named_tensors("--input", ["ids=batch/ids:0"])
    {'ids': 'batch/ids:0'}
    """
    found: dict[str, str] = {}
    for one in given:
        name, _, tensor = one.partition("=")
        if not name or not tensor:
            expected = "TENSOR=VALUE" if option == "--feed" else "NAME=TENSOR"
            raise UsageError(f"exporting: got {option} '{one}', expected {expected}")
        if name in found:
            raise UsageError(f"exporting: got {option} '{name}' twice")
        found[name] = tensor
    return found


def _read(path: Path, *, named: bool) -> tuple[MetaGraph, bytes]:
    """A graph, and its bytes."""
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        way_out = "check --meta" if named else "say where it is with --meta FILE"
        raise BadInputError(
            f"reading '{path}': there is no such file, which holds the checkpoint's graph; {way_out}"
        ) from None
    except OSError as error:
        raise BadInputError(f"reading '{path}': {error.strerror or error}") from error
    try:
        meta = MetaGraph.decode(data)
    except DAMAGED as error:
        if data.lstrip()[:13] in (b"meta_info_def", b"graph_def {\n "):
            raise BadInputError(f"reading '{path}': it is text; write it again without as_text") from None
        raise malformed(path, error, "checkpoint") from error
    if not meta.graph.nodes:
        raise CorruptFileError(f"reading '{path}': there is no graph in it; save the checkpoint again")
    return meta, data


def _found(given: str, folder: Path, meta: Path) -> Path:
    """Where a file of words is: where training had it, or beside the checkpoint."""
    for path in (Path(given), folder / Path(given).name, meta.parent / Path(given).name):
        if path.is_file():
            return path
    raise BadInputError(
        f"exporting by '{meta}': its graph reads file '{given}', which is not there, nor is '{Path(given).name}' beside"
        " the checkpoint; put it there"
    )
