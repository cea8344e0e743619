"""A graph of TensorFlow 1 that trains in a session, saved as a SavedModel, as often as is wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf

if TYPE_CHECKING:
    from kvtools.meta_file import TrainedGraph

v1 = tf.compat.v1

_MAIN_OP = "saved_model_main_op"
_PLACEHOLDERS = frozenset({"Placeholder", "PlaceholderV2"})
_READS_TRAINING_DATA = ("IteratorGetNext", "QueueDequeue", "ReaderRead", "Unstage", "MapUnstage")
_EXAMPLES = {tf.bool: "False", tf.string: "'text'", tf.float16: "1.0", tf.float32: "1.0", tf.float64: "1.0"}

#: On a graph: (the names of its variables, the saver of these, what initializes its lookup tables), for the next time.
_KEPT = "_kvtools_saver"


def is_session(model: Any) -> bool:
    """Whether it is a session of TensorFlow 1, monitored ones included."""
    return isinstance(model, (v1.Session, v1.InteractiveSession)) or hasattr(model, "_tf_sess")


def tables(session: Any) -> list[Any]:
    """The key-value variables of a session's graph."""
    variables = session.graph.get_collection(v1.GraphKeys.GLOBAL_VARIABLES)
    return [variable for variable in variables if hasattr(type(variable), "_kv_parts")]


def save(session: Any, folder: Path, signatures: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]]) -> None:
    """Writes the graph and the variables of a session.

    The ops that save are added to its graph the first time; a graph that was finalized is so again afterwards.

    Args:
      session: one of TensorFlow 1, whose variables are initialized.
      folder: to write.
      signatures: by name, inputs and outputs by name: tensors of the graph.

    Raises:
      ValueError: a tensor of another graph.
      kvtools.errors.BadInputError: an output depends on what is no input, and what no server has.
      tf.errors.FailedPreconditionError: a variable is not initialized.
    """
    plain = _plain(session)
    graph = plain.graph
    for name, given in signatures.items():
        for side in given:
            _check_tensors(graph, name, side)
        _check_given(name, *given)
    definitions = {
        name: v1.saved_model.predict_signature_def(dict(inputs), dict(outputs))
        for name, (inputs, outputs) in signatures.items()
    }
    with graph.as_default(), unfinalized(graph):
        saver, initializer = _saver_of(graph)
        # The builder notes there what initializes, and refuses a graph that has such a note.
        noted = graph.get_collection_ref(_MAIN_OP)
        before, noted[:] = noted[:], []
        builder = v1.saved_model.Builder(str(folder))
        builder.add_meta_graph_and_variables(
            plain,
            [tf.saved_model.SERVING],
            signature_def_map=definitions,
            assets_collection=graph.get_collection(v1.GraphKeys.ASSET_FILEPATHS),
            main_op=initializer,
            saver=saver,
            strip_default_attrs=True,
        )
        noted[:] = before
        builder.save()


def save_graph(
    session: Any,
    prefix: Path,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    feed: Mapping[Any, Any],
    read_only: bool,
) -> TrainedGraph:
    """Writes the variables of a session as a checkpoint, and its graph beside it.

    Args:
      session, inputs, outputs: as for `save`, of one signature.
      prefix: of the checkpoint.
      feed: values of other tensors.
      read_only: whether lookups that insert keys are to give zeros.

    Returns:
      What is served of the graph.
    """
    from kvtools.dialects.detect import open_checkpoint
    from kvtools.meta_file import trained_graph
    from kvtools.stock_model.training_graph import Wanted

    plain = _plain(session)
    graph = plain.graph
    fed = {tensor if isinstance(tensor, str) else tensor.name: tensor for tensor in feed}
    given = [inputs, outputs, {name: tensor for name, tensor in fed.items() if not isinstance(tensor, str)}]
    for side in given:
        _check_tensors(graph, tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY, side)
    _check_given(tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY, inputs, outputs, fed)
    with graph.as_default(), unfinalized(graph):
        saver, _ = _saver_of(graph)
        saver.save(plain, str(prefix), write_meta_graph=False, write_state=False)
        saver.export_meta_graph(f"{prefix}.meta", strip_default_attrs=True)
    names = [{key: tensor.name for key, tensor in side.items()} for side in (inputs, outputs)]
    values = {name: _text(feed[tensor]) for name, tensor in fed.items()}
    return trained_graph(open_checkpoint(prefix), Wanted("", *names, values, read_only))


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _plain(session: Any) -> Any:
    return session._tf_sess() if hasattr(session, "_tf_sess") else session


def _check_tensors(graph: tf.Graph, signature: str, tensors: Mapping[str, Any]) -> None:
    for key, tensor in tensors.items():
        if getattr(tensor, "graph", None) is not graph:
            raise ValueError(f"Signature '{signature}': '{key}' is no tensor of the session's graph, but {tensor!r}.")


def _check_given(
    signature: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any], fed: Iterable[str] = ()
) -> None:
    """Raises `BadInputError` where an output depends on a placeholder, or data of training, that nothing gives."""
    from kvtools.errors import BadInputError
    from kvtools.stock_model.graph_def import tensor_name

    given = {tensor.name for tensor in tf.nest.flatten(dict(inputs), expand_composites=True)}
    given |= {tensor_name(name) for name in fed}
    nodes = {name.partition(":")[0] for name in given}
    waiting = [
        (tensor.op, tensor)
        for tensor in tf.nest.flatten(dict(outputs), expand_composites=True)
        if tensor.name not in given
    ]
    seen: set[str] = set()
    while waiting:
        operation, tensor = waiting.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        if operation.type in _PLACEHOLDERS or operation.type.startswith(_READS_TRAINING_DATA):
            what = "placeholder" if operation.type in _PLACEHOLDERS else f"operation '{operation.type}', node"
            raise BadInputError(
                f"exporting the session: an output depends on {what} '{operation.name}', which is no input:"
                f" {_way_out(signature, tensor)}"
            )
        waiting += [(source.op, source) for source in operation.inputs if source.name not in given]
        waiting += [
            (before, before.outputs[0] if before.outputs else tensor)
            for before in operation.control_inputs
            if before.name not in nodes
        ]


def _way_out(signature: str, tensor: tf.Tensor) -> str:
    of_default = signature == tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY
    name = tensor.op.name.rpartition("/")[2]
    told = f"add '{tensor.name}' to " + (
        f"inputs, as in inputs={{'{name}': tensor}}" if of_default else f"the inputs of signature '{signature}'"
    )
    if of_default and tensor.op.type in _PLACEHOLDERS and tensor.shape.rank in (0, None):
        told += f", or give it a value, as in feed={{'{tensor.name}': {_EXAMPLES.get(tensor.dtype, '1')}}}"
    return told


def _saver_of(graph: tf.Graph) -> tuple[Any, Any]:
    names = tuple(
        sorted(
            variable.name
            for collection in (v1.GraphKeys.GLOBAL_VARIABLES, v1.GraphKeys.SAVEABLE_OBJECTS)
            for variable in graph.get_collection(collection)
        )
    )
    kept = getattr(graph, _KEPT, None)
    if kept is None or kept[0] != names:
        with tf.name_scope(""), v1.device(None), graph.control_dependencies(None):
            kept = names, v1.train.Saver(max_to_keep=0, allow_empty=True), v1.tables_initializer()
        setattr(graph, _KEPT, kept)
    return kept[1], kept[2]


@contextlib.contextmanager
def unfinalized(graph: tf.Graph) -> Iterator[None]:
    """While ops are added to a graph that may be finalized."""
    finalized = graph.finalized
    if finalized:
        graph._unsafe_unfinalize()
    try:
        yield
    finally:
        if finalized:
            graph.finalize()
