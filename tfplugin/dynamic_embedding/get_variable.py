"""`get_variable`: dynamic embedding variables by name, under `tf.compat.v1.variable_scope`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import variable_scope

from tfplugin.dynamic_embedding.partition import default_partition_fn
from tfplugin.dynamic_embedding.variable import Variable, table_policies
from tfplugin.policies import Admission, EvictionPolicy, Policies

_GRAPH_ATTRIBUTE = "_tfplugin_dynamic_embedding_variables"


def variables_by_name() -> dict[str, Variable]:
    """Variables by name: one store for each graph, one for eager code."""
    # Not a collection: those are written into MetaGraphs.
    graph = tf_ops.get_default_graph()
    if not hasattr(graph, _GRAPH_ATTRIBUTE):
        setattr(graph, _GRAPH_ATTRIBUTE, {})
    store: dict[str, Variable] = getattr(graph, _GRAPH_ATTRIBUTE)
    return store


def unused_name(name: str) -> str:
    """This name, or with a number behind it, so that `get_variable` makes a variable."""
    scope = variable_scope.get_variable_scope().name
    with tf_ops.init_scope():
        store = variables_by_name()
    names = (name, *(f"{name}_{number}" for number in range(1, len(store) + 1)))
    return next(n for n in names if n not in store and (f"{scope}/{n}" if scope else n) not in store)


def get_variable(
    name: str,
    key_dtype: Any = tf.int64,
    value_dtype: Any = tf.float32,
    dim: int = 1,
    devices: Any = None,
    partitioner: Callable[[Any, int], tf.Tensor] = default_partition_fn,
    shared_name: str | None = "get_variable",
    initializer: Any = None,
    trainable: bool = True,
    checkpoint: bool = True,
    init_size: int = 0,
    kv_creator: Any = None,
    restrict_policy: Any = None,
    bp_v2: bool = False,
    short_file_name: bool = False,
    *,
    enter_threshold: int = 0,
    admission: Admission | None = None,
    padding_key: int | None = None,
    expiry: EvictionPolicy | Sequence[EvictionPolicy] | None = None,
    expire_every: int = 0,
    expire_on_save: bool = False,
    policies: Policies | None = None,
) -> Variable:
    """Gets the variable of this name, or makes it. See `Variable` for the arguments.

    Eager code gets the same variable each time; in a graph the variable scope says whether a name may come again.

    Raises:
      ValueError: the name exists and the scope does not allow reuse, or it exists with other dtypes or width, or with
        its rows in Redis or not.
      TypeError: as of `Variable`.

    Example:
      >>> with tf.compat.v1.variable_scope("tower", reuse=tf.compat.v1.AUTO_REUSE):
      ...     v = de.get_variable("user", dim=16)
      >>> v.name
      'tower/user'
    """
    scope = variable_scope.get_variable_scope()
    full_name = f"{scope.name}/{name}" if scope.name and not short_file_name else name
    with tf_ops.init_scope():
        store = variables_by_name()
        found = store.get(full_name)
        if found is None:
            found = store[full_name] = Variable(
                key_dtype,
                value_dtype,
                dim,
                devices,
                partitioner,
                shared_name,
                full_name,
                initializer,
                trainable,
                checkpoint,
                init_size,
                kv_creator,
                restrict_policy,
                bp_v2,
                short_file_name,
                enter_threshold=enter_threshold,
                admission=admission,
                padding_key=padding_key,
                expiry=expiry,
                expire_every=expire_every,
                expire_on_save=expire_on_save,
                policies=policies,
            )
            return found
        eager = tf.executing_eagerly()
    if scope.reuse is False and not eager:
        raise ValueError(
            f"Dynamic embedding variable {full_name} already exists. Did you mean to set reuse=True or "
            "reuse=tf.compat.v1.AUTO_REUSE in its variable_scope?"
        )
    wanted = (tf.as_dtype(key_dtype), tf.as_dtype(value_dtype), int(dim))
    have = (found.key_dtype, found.value_dtype, found.dim)
    for what, want, has in zip(("key_dtype", "value_dtype", "dim"), wanted, have, strict=True):
        if want != has:
            raise ValueError(
                f"Dynamic embedding variable {full_name} exists with {what} {getattr(has, 'name', has)}, wanted "
                f"{getattr(want, 'name', want)}: give one of them another name."
            )
    in_redis = getattr(kv_creator, "one_table", False)
    if kv_creator is not None and in_redis != found.rows_elsewhere:
        raise ValueError(
            f"Dynamic embedding variable {full_name} exists with its rows "
            f"{'in Redis' if found.rows_elsewhere else 'in memory'}, wanted {'in Redis' if in_redis else 'in memory'}: "
            "give one of them another name."
        )
    asked = table_policies(
        full_name,
        key_dtype,
        value_dtype,
        found.kv_creator,
        policies,
        enter_threshold=enter_threshold,
        admission=admission,
        padding_key=padding_key,
        expiry=expiry,
        expire_every=expire_every,
        expire_on_save=expire_on_save,
    )
    if asked is not None and asked != found.policies:
        raise ValueError(
            f"Dynamic embedding variable {full_name} exists with policies {found.policies.to_json() or 'none'}, wanted "
            f"{asked.to_json()}: give one of them another name."
        )
    return found
