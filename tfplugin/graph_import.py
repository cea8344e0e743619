"""Graphs of TensorFlow 1 that are imported, where TensorFlow makes a dense variable of what was a table.

For models that `tf.saved_model.load` gives to eager code it imports the graph into a function and lifts its variables
out: a table is lifted as a table. After `import_meta_graph` such a variable stays among those of the graph. The ops and
the Saver of the graph work on the table; what is made anew for the variable cannot, and says so.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops.resource_variable_ops import ResourceVariable
from tensorflow.python.training.saving.saveable_object_util import ResourceVariableSaveable

from tfplugin.kv_variable import KvVariable
from tfplugin.ops import raw
from tfplugin.policies import Policies

_COLLECTIONS = (
    tf.compat.v1.GraphKeys.GLOBAL_VARIABLES,
    tf.compat.v1.GraphKeys.LOCAL_VARIABLES,
    tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES,
)


class VariableOfTable(ResourceVariable):
    """What the collections of an imported graph have for a table."""

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """Scalar bool: whether the table has been initialized or restored."""
        return raw.kv_table_is_initialized(self.handle, name=name)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(KvVariable, name):
            raise AttributeError(f"'{name}' is of tables that tf.get_kv_variable made. {_refusal([self.op.name])}")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def sparse_read(self, *_: Any, **__: Any) -> Any:
        """Refuses a new lookup."""
        raise TypeError(_refusal([self.op.name]))

    def _ref(self) -> Any:  # what an optimizer asks for
        raise TypeError(_refusal([self.op.name]))


def variable_from_proto(original: Callable[..., Any], variable_def: Any, import_scope: str | None = None) -> Any:
    """``ResourceVariable.from_proto``: of a table a `VariableOfTable`."""
    variable = original(variable_def, import_scope)
    if variable.handle.op.type == "KvTableHandle":
        variable.__class__ = VariableOfTable
    return variable


def variables_of(saveables: Sequence[Any]) -> list[Any]:
    """The resource variables that a Saver saves or restores; in a graph, of those that its collections have."""
    read = [saveable.op for saveable in saveables if isinstance(saveable, ResourceVariableSaveable)]
    if tf.executing_eagerly():
        return read
    # In a function of eager code variables have no hash.
    names = {tensor.name for tensor in read}
    variables = [variable for collection in _COLLECTIONS for variable in tf.compat.v1.get_collection(collection)]
    return [
        v for v in variables if isinstance(v, ResourceVariable) and getattr(v._graph_element, "name", None) in names
    ]


def refuse_saver(saveables: Sequence[Any]) -> tf.Operation | None:
    """An op that fails in the place of what saves or restores; None if no table of an imported graph is among it."""
    tables = [variable for variable in variables_of(saveables) if isinstance(variable, VariableOfTable)]
    names = sorted({table.op.name for table in tables})
    return tf.raw_ops.Assert(condition=False, data=[_refusal(names)], summarize=-1) if names else None


def _refusal(names: Sequence[str]) -> str:
    named = ", ".join(f"'{name}'" for name in names)
    return (
        f"Key-value variables of an imported graph ({named}) are saved and restored by the Saver that "
        "tf.compat.v1.train.import_meta_graph gives of a .meta file that Saver.save wrote, and trained by the ops that "
        "the graph has. For another Saver or optimizer build the graph by its code, with tf.get_kv_variable."
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
