"""Where tables are, and the ops on them."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import device as tf_device
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import gen_resource_variable_ops
from tensorflow.python.util.tf_export import get_canonical_name_for_symbol

from tfplugin import library

#: How many rows a variable has for those who ask before there are any, where `capacity_hint` does not say: a
#: partitioner for its parts, a strategy of parameter servers for the bytes that one takes.
NOMINAL_ROWS = 1 << 20


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


def task_of(device: str) -> str:
    """The process that `device` is in, as a device string."""
    spec = tf_device.DeviceSpec.from_string(device)
    return tf_device.DeviceSpec(job=spec.job, replica=spec.replica, task=spec.task).to_string()


def is_in_this_process(device: str) -> bool:
    """Whether `device`, in eager mode, is one of this process."""
    return task_of(device) == task_of(context.context().host_address_space())


@contextlib.contextmanager
def like_a_variable(name: str, dtype: tf.DType, rows: int, dim: int) -> Iterator[tf.Tensor]:
    """Puts a table where a variable would go (graph mode). Gives the op that was asked.

    Device functions such as ``replica_device_setter`` look at the type of the op they place: ask them by an op
    of the type they know. Those that balance bytes look at its shape, too.
    """
    probe = gen_resource_variable_ops.var_handle_op(
        dtype=dtype, shape=[rows, dim], shared_name=f"{name}/placement", name=f"{name}/placement"
    )
    # After the probe: to ignore colocation is to ignore device functions, too.
    with tf_ops.colocate_with(None, ignore_existing=True), tf_ops.device(table_device(probe.device)):
        yield probe


def tell_neighbours(parts: Sequence[Any]) -> None:
    """In a graph: tells the handle of each part of a variable how many of them a device function put beside it."""
    if context.executing_eagerly():
        return
    beside = collections.Counter(part.handle.device for part in parts)
    for part in parts:
        part.parts_beside = beside[part.handle.device]
        part.handle.op._set_attr("parts_beside", attr_value_pb2.AttrValue(i=part.parts_beside))


def on_device_of(table: Any) -> contextlib.AbstractContextManager[Any]:
    """Puts an op where the table is. In eager mode it goes there by itself.

    Raises:
      RuntimeError: the table is of eager mode, and the op of a graph that is no function's.
    """
    if context.executing_eagerly():
        return contextlib.nullcontext()
    if table._eager and not tf_ops.inside_function():
        raise RuntimeError(
            f"Key-value variable '{table.name}' was made in eager mode, and a tf.Graph, as this one, can only look up "
            "those that were made in it: make it there, or use a tf.function in the place of the graph."
        )
    scopes = contextlib.ExitStack()
    scopes.enter_context(tf_ops.colocate_with(None, ignore_existing=True))
    scopes.enter_context(tf_ops.device(table._op_device()))
    return scopes


def name_of(strategy: Any) -> str:
    """The name by which programs make a strategy: the class of ``MultiWorkerMirroredStrategy`` has another."""
    name: str = get_canonical_name_for_symbol(type(strategy)) or type(strategy).__name__
    return name.rpartition(".")[2]


def refuse_copies(name: str, strategy: Any = None, what: str = "made") -> None:
    """Raises ValueError under a `tf.distribute` strategy that keeps a copy of each variable on several devices.

    `strategy`: the one to look at; default: that in whose scope this is, if any. `what` is to be done with the table.
    """
    if strategy is None and tf.distribute.has_strategy():
        strategy = tf.distribute.get_strategy()
    if strategy is None or isinstance(strategy, (tf.distribute.OneDeviceStrategy, *_PARAMETER_SERVERS)):
        return
    raise ValueError(
        f"Key-value variable '{name}' cannot be {what} under {name_of(strategy)}, which would keep copies "
        "of it apart. In one process train without a strategy, or under tf.distribute.OneDeviceStrategy: a table uses "
        "all CPUs. In several train with Horovod, where tfplugin.sok.DynamicVariable spreads a table over the "
        "ranks; under tf.distribute.ParameterServerStrategy; or with sessions on parameter servers "
        "(tf.compat.v1.train.replica_device_setter)."
    )


def refuse_repeated_write(name: str) -> None:
    """Raises ValueError in a step of such a strategy, whose replicas would each make the write."""
    if not tf.distribute.in_cross_replica_context():
        refuse_copies(name, what="written")


#: The strategy of TensorFlow 2, whose variables are on one server each. (That of TensorFlow 1 has copies on workers.)
_PARAMETER_SERVERS = (tf.distribute.ParameterServerStrategy,)

#: How many tables each strategy has placed.
_placed: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def strategy_in_scope() -> Any:
    """The `tf.distribute` strategy in whose scope, or step, this is; None of none, and of one that changes nothing."""
    strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    return None if isinstance(strategy, tf.distribute.OneDeviceStrategy) else strategy


def parameter_servers() -> int:
    """How many servers the `tf.distribute.ParameterServerStrategy` has in whose scope this is; 0 outside of one."""
    strategy = strategy_in_scope()
    return strategy.extended._num_ps if isinstance(strategy, _PARAMETER_SERVERS) else 0


@contextlib.contextmanager
def on_next_parameter_server(name: str) -> Iterator[None]:
    """Under `tf.distribute.ParameterServerStrategy`: makes a table on a server, one after the other in turns.

    Raises:
      RuntimeError: the server's process has not imported tfplugin.
    """
    servers = parameter_servers()
    if not servers:
        yield
        return
    strategy = tf.distribute.get_strategy()
    task = _placed.get(strategy, 0) % servers
    _placed[strategy] = task + 1
    try:
        with tf.device(f"/job:ps/task:{task}/device:CPU:0"):
            yield
    except tf.errors.NotFoundError as error:
        if "KvTableHandle" not in str(error):
            raise
        raise RuntimeError(
            f"Key-value variable '{name}' cannot be made on parameter server {task}: its process does not know the "
            "operations of tables. Have each server and worker `import tfplugin` before it makes its "
            "tf.distribute.Server."
        ) from error
