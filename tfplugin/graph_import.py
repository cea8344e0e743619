"""Models of TensorFlow 1 that `tf.saved_model.load` gives to eager code.

TensorFlow imports their graph into a function and lifts its variables out: it makes a dense variable in the place of
each. For a table that is a table.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

from tfplugin.kv_variable import KvVariable
from tfplugin.policies import Policies

_COLLECTIONS = (
    tf.compat.v1.GraphKeys.GLOBAL_VARIABLES,
    tf.compat.v1.GraphKeys.LOCAL_VARIABLES,
    tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES,
)


def lift_variables(original: Callable[..., Any], graph: Any, variable_holder: Any) -> Any:
    """`_lift_unlifted_variables` of TensorFlow: tables are lifted here, what is left there."""
    tables: dict[str, Any] = {}
    for collection in _COLLECTIONS:
        variables = graph.get_collection_ref(collection)
        of_tables = [variable for variable in variables if _stands_for_table(variable, graph)]
        tables |= {variable.handle.name: variable for variable in of_tables}
        variables[:] = [variable for variable in variables if not any(variable is one for one in of_tables)]
    if tables and tf_ops.executing_eagerly_outside_functions():
        with graph.as_default():
            for variable in tables.values():
                _lift(variable, graph, variable_holder)
    return original(graph, variable_holder)


def _stands_for_table(variable: Any, graph: Any) -> bool:
    handle = getattr(variable, "handle", None)
    return tf.is_tensor(handle) and getattr(handle, "graph", None) is graph and handle.op.type == "KvTableHandle"


def _lift(variable: Any, graph: Any, variable_holder: Any) -> None:
    op = variable.handle.op
    with tf.init_scope():
        table = KvVariable(
            tf.compat.as_str(op.get_attr("variable")),
            op.get_attr("dim"),
            op.get_attr("key_dtype"),
            op.get_attr("dtype"),
            trainable=variable.trainable,
            max_capacity=op.get_attr("max_capacity"),
            eviction=tf.compat.as_str(op.get_attr("eviction")),
            policies=Policies.from_json(op.get_attr("policies")),
            read_only=op.get_attr("read_only"),
        )
    graph.add_capture(table.handle, variable.handle)
    # What was loaded holds its tables by this.
    variable_holder._variables_by_name[op.name] = table
    graph._weak_variables.append(weakref.ref(table))
