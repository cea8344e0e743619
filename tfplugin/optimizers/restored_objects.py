"""What is an optimizer's and stands beside a table, as a checkpoint of objects restores it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin import saveable
from tfplugin.kv_variable import KvVariable
from tfplugin.optimizers import accumulated_rows
from tfplugin.optimizers.generic_update import StepVariable
from tfplugin.partitioned_kv_variable import PartitionedKvVariable


def bind_object(stock: Any, position: Any, trackable: Any) -> bool:
    """Has what is an optimizer's and stands beside a table take what a checkpoint has, for
    ``CheckpointPosition.bind_object``.

    A table takes no place at which another kind of object was saved: `assert_existing_objects_matched` would say that
    it has been restored.

    A `StepVariable` takes no value. Where tables come before dense variables, their step variables have the places in
    an optimizer's lists for a time that dense slots have in the checkpoint. Those are found by the optimizer's list of
    all its variables, unless another object has been bound to them.

    Sums of gradients are taken in whatever dtype they were saved, by as many parts as they were saved by. Optimizers of
    `dynamic_embedding` look first at what TFRA has saved of them.
    """
    accumulated_rows.about_to_be_restored(trackable, position)
    about_to_be_restored = getattr(trackable, "_kv_about_to_be_restored", None)
    if about_to_be_restored is not None:
        about_to_be_restored(position)
    if isinstance(trackable, StepVariable) and position.object_proto.attributes:
        return False
    if isinstance(trackable, (KvVariable, PartitionedKvVariable)) and not saveable.is_table(position.object_proto):
        return False
    bound: bool = stock(position, trackable)
    if not bound or not getattr(trackable, "_kv_takes_any_dtype", False) or not tf.executing_eagerly():
        return bound
    for value in position.value_tensors().values():
        trackable.assign(tf.cast(value, trackable.dtype))
    trackable._update_uid = position.checkpoint.restore_uid
    return False
