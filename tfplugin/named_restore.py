"""`tf.train.Checkpoint.restore` of a checkpoint without an object graph, in eager mode: by names.

`tf.compat.v1.train.Saver` writes such checkpoints, and ``kvtools migrate`` may. TensorFlow reads the tensors of each
variable by their names, and hands them to it; a table's tensors are many, and an op reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfplugin.checkpoint import BesideSaveable
from tfplugin.saveable import KvSaveable


def eager_restore(original: Callable[..., Any], coordinator: Any, trackable: Any) -> Any:
    """Replaces ``_NameBasedRestoreCoordinator.eager_restore``: a key-value variable gets its rows by its name.

    One that the checkpoint has not counts as such, as every variable does: ``assert_consumed`` says so. What a dynamic
    embedding variable is made of, which TensorFlow comes to after it, is restored with it.
    """
    restored = coordinator.__dict__.setdefault("_kv_restored", set())
    if id(trackable) in restored:
        return None
    if not hasattr(trackable, "_kv_parts"):
        return original(coordinator, trackable)
    if trackable._kv_parts and restored.issuperset(id(part) for part in trackable._kv_parts):
        return None
    for saveable in coordinator.globally_named_object_attributes(trackable):
        if not isinstance(saveable, (KvSaveable, BesideSaveable)):
            there = _restore_tensors(saveable, coordinator)
            restored.add(id(saveable.op))
        elif there := saveable.is_in(coordinator.save_path, coordinator.dtype_map):
            saveable.restore_op(tf.constant(coordinator.save_path))
            restored.update(id(part) for part in trackable._kv_parts)
        if not there:
            coordinator.unused_attributes.setdefault(trackable, []).append(saveable.name)
    return None


def _restore_tensors(saveable: Any, coordinator: Any) -> bool:
    """Restores what TensorFlow itself would, such as the strings of string keys. Whether it is there."""
    names = [spec.name for spec in saveable.specs]
    if not all(name in coordinator.dtype_map for name in names):
        return False
    dtypes = [coordinator.dtype_map[name] for name in names]
    slices = [""] * len(names)
    saveable.restore(
        tf.raw_ops.RestoreV2(prefix=coordinator.save_path, tensor_names=names, shape_and_slices=slices, dtypes=dtypes),
        None,
    )
    return True
