"""Functions with gradients of their own: lookups in those of `tf.custom_gradient` and `tf.recompute_grad`, and
TensorFlow's sum over replicas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record as eager_record

from tfplugin.kv_variable import KvVariable


def refuse_tables(original: Callable[..., Any], function: Any, *args: Any) -> Any:
    """What calls such a function, and reads the variables that it has used to give them to its gradient.

    Raises:
      TypeError: one of them is a table, which cannot be read.
    """
    with eager_record.VariableWatcher() as watcher:
        try:
            return original(function, *args)
        except TypeError as error:
            tables = [variable for variable in watcher.watched_variables() if isinstance(variable, KvVariable)]
            if not tables:
                raise
            raise TypeError(
                f"Key-value variable '{tables[0].name}' is looked up in a function of tf.recompute_grad or "
                "tf.custom_gradient, whose gradients know dense variables only. Look its rows up before, and give them "
                "to that function as an argument: its gradient then goes on to the table."
            ) from error


def all_reduce(
    original: Callable[..., Any], replica: Any, reduce_op: Any, value: Any, *args: Any, **kwargs: Any
) -> Any:
    """``ReplicaContextBase.all_reduce``, by which optimizers of Keras add up gradients: those of one are the sum.

    TensorFlow's gives them a gradient of their own even then. What it registers for that is there as long as the
    process lives, and with it the graph of the step, the tables that are looked up in it, and their rows.
    """
    if replica.num_replicas_in_sync == 1 and all(isinstance(one, tf.Tensor) for one in tf.nest.flatten(value)):
        return value
    return original(replica, reduce_op, value, *args, **kwargs)
