"""Where tables are, and the ops on them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import device as tf_device
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import gen_resource_variable_ops

from tfplugin import library


def table_device(device: str | None) -> str:
    """Where a table goes that is wanted on `device`: to a GPU if it is named and can have tables, else to a CPU."""
    spec = tf_device.DeviceSpec.from_string(device or "")
    if spec.device_type in (None, "CPU") or (spec.device_type == "GPU" and library.has_gpu_tables()):
        return spec.to_string()
    return cpu_device(device)


def cpu_device(device: str | None) -> str:
    """The CPU of the task that `device` names."""
    spec = tf_device.DeviceSpec.from_string(device or "")
    if spec.device_type in (None, "CPU"):
        return spec.to_string()
    return spec.replace(device_type="CPU", device_index=0).to_string()


@contextlib.contextmanager
def like_a_variable(name: str, dtype: tf.DType, dim: int) -> Iterator[tf.Tensor]:
    """Puts a table where a variable would go (graph mode). Gives the op that was asked.

    Device functions such as ``replica_device_setter`` look at the type of the op they place: ask them by an op
    of the type they know.
    """
    probe = gen_resource_variable_ops.var_handle_op(
        dtype=dtype, shape=[0, dim], shared_name=f"{name}/placement", name=f"{name}/placement"
    )
    # After the probe: to ignore colocation is to ignore device functions, too.
    with tf_ops.colocate_with(None, ignore_existing=True), tf_ops.device(table_device(probe.device)):
        yield probe


def on_device_of(table: Any) -> contextlib.AbstractContextManager[Any]:
    """Puts an op where the table is. In eager mode it goes there by itself."""
    if context.executing_eagerly():
        return contextlib.nullcontext()
    scopes = contextlib.ExitStack()
    scopes.enter_context(tf_ops.colocate_with(None, ignore_existing=True))
    scopes.enter_context(tf_ops.device(table._op_device()))
    return scopes


def refuse_copies(name: str) -> None:
    """Raises ValueError under a `tf.distribute` strategy that keeps a copy of each variable on several devices."""
    strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    if strategy is not None and not isinstance(strategy, tf.distribute.OneDeviceStrategy):
        raise ValueError(
            f"Key-value variable '{name}' cannot be made under {type(strategy).__name__}, which would keep copies of "
            "it apart. In one process train without a strategy, or under tf.distribute.OneDeviceStrategy: a table uses "
            "all CPUs. In several train with Horovod, where tfplugin.sok.DynamicVariable spreads a table over the "
            "ranks, or with sessions on parameter servers (tf.compat.v1.train.replica_device_setter)."
        )
