"""`tf.train.Checkpoint.restore` of a checkpoint without an object graph, in eager mode: by names.

`tf.compat.v1.train.Saver` writes such checkpoints, and ``kvtools migrate`` may. TensorFlow reads the tensors of each
variable by their names, and hands them to it; a table's tensors are many, and an op reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfplugin.saveable import KvSaveable


def eager_restore(original: Callable[..., Any], coordinator: Any, trackable: Any) -> Any:
    """Replaces ``_NameBasedRestoreCoordinator.eager_restore``: a key-value variable gets its rows by its name.

    One that the checkpoint has not counts as such, as every variable does: ``assert_consumed`` says so.
    """
    if not hasattr(trackable, "_kv_parts"):
        return original(coordinator, trackable)
    for saveable in coordinator.globally_named_object_attributes(trackable):
        assert isinstance(saveable, KvSaveable)
        whole = saveable.whole_prefix
        if any(name == f"{whole}-values" or _is_of_part(name, whole) for name in coordinator.dtype_map):
            saveable.restore_op(coordinator.save_path)
        else:
            coordinator.unused_attributes.setdefault(trackable, []).append(saveable.name)
    return None


def _is_of_part(name: str, whole: str) -> bool:
    return name.startswith(f"{whole}/part_") and name.endswith("-values")
