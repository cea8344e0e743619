"""Tables that a checkpoint of `tf.train.Checkpoint` has and nothing took: said as of dense variables.

TensorFlow looks at what it saved itself, the attributes of objects. Tables are saved by a registered saver.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container
from typing import Any

from tensorflow.python.checkpoint.checkpoint import ObjectGraphProtoPrettyPrinter

_log = logging.getLogger("tfplugin")


def assert_consumed(original: Callable[..., Any], status: Any) -> Any:
    """Replaces ``CheckpointLoadStatus.assert_consumed``.

    Raises:
      AssertionError: also where a table of the checkpoint has no object.
    """
    consumed = original(status)
    found = status._checkpoint
    if left := _left(found.object_graph_proto, found.object_by_proto_id):
        raise AssertionError(f"Unresolved object in checkpoint {left[0]}: {_AWAY}")
    return consumed


def deleted(original: Callable[..., Any], deleter: Any) -> None:
    """Replaces ``_CheckpointRestoreCoordinatorDeleter.__del__``, by which TensorFlow warns of unrestored values."""
    original(deleter)
    if not deleter.expect_partial:
        for name in _left(deleter.object_graph_proto, deleter.matched_proto_ids):
            _log.warning("Rows in checkpoint could not be found in the restored object: %s: %s", name, _AWAY)


_AWAY = (
    "a key-value variable. If it has another name or place now, tfplugin.restore_tables(path, {variable: old name}) "
    "restores it; if it is not wanted, status.expect_partial() says so."
)


def _left(graph: Any, taken: Container[int]) -> list[str]:
    """The paths of objects with a registered saver that are not among those `taken`, those within others left out."""
    left = [i for i, node in enumerate(graph.nodes) if node.registered_saver.name and i not in taken]
    within = {child.node_id for i in left for child in graph.nodes[i].children}
    if not left:
        return []
    names = ObjectGraphProtoPrettyPrinter(graph).node_names
    return [names[i] for i in left if i not in within]
