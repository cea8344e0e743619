"""A graph of TensorFlow 1 that trains in a session, saved as a SavedModel, as often as is wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

v1 = tf.compat.v1

_MAIN_OP = "saved_model_main_op"

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
      tf.errors.FailedPreconditionError: a variable is not initialized.
    """
    plain = session._tf_sess() if hasattr(session, "_tf_sess") else session
    graph = plain.graph
    for name, given in signatures.items():
        for key, tensor in (item for side in given for item in side.items()):
            if getattr(tensor, "graph", None) is not graph:
                raise ValueError(f"Signature '{name}': '{key}' is no tensor of the session's graph, but {tensor!r}.")
    definitions = {
        name: v1.saved_model.predict_signature_def(dict(inputs), dict(outputs))
        for name, (inputs, outputs) in signatures.items()
    }
    with graph.as_default(), _unfinalized(graph):
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
def _unfinalized(graph: tf.Graph) -> Iterator[None]:
    finalized = graph.finalized
    if finalized:
        graph._unsafe_unfinalize()
    try:
        yield
    finally:
        if finalized:
            graph.finalize()
