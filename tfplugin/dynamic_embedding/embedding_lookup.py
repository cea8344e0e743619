"""The lookups of `dynamic_embedding`, single and pooled."""

from __future__ import annotations

import contextlib
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import variable_scope

from tfplugin.composed_pool import bags_of, pool
from tfplugin.dynamic_embedding.model_mode import ModelMode
from tfplugin.dynamic_embedding.shadow_variable import serving, shadow_of
from tfplugin.dynamic_embedding.sharded_table import ShardedTable
from tfplugin.dynamic_embedding.trainable import TrainableWrapper
from tfplugin.fused_lookup import pool_many
from tfplugin.keys import how_to_convert, refuse_keras_input
from tfplugin.lookup import COMBINERS, pooled_ids


def _one(params: Any, caller: str) -> Any:
    """The variable, or what trains it, out of what may be given as `params`."""
    if isinstance(params, (list, tuple)):
        if len(params) != 1:
            raise ValueError(f"{caller}: params must be one variable, got {len(params)}.")
        params = params[0]
    if not isinstance(params, ShardedTable) and not hasattr(params, "embedding_lookup"):
        raise TypeError(f"{caller}: params must be a dynamic_embedding.Variable, got {type(params).__name__}.")
    return params


def _check_ids(params: ShardedTable, ids: Any, caller: str) -> Any:
    refuse_keras_input(ids, f"{caller}: {params!r}")
    if isinstance(ids, (tf.SparseTensor, tf.compat.v1.SparseTensorValue)):
        raise TypeError(
            f"{caller}: ids must be dense or ragged, got a {type(ids).__name__}: pass it to embedding_lookup_sparse, "
            "or pass its values."
        )
    if not hasattr(ids, "dtype"):
        ids = params.keys_tensor(ids)
    dtype = tf.as_dtype(ids.dtype)
    if dtype != params.key_dtype:
        raise TypeError(
            f"{caller}: {params!r} has {params.key_dtype.name} keys, got ids of {dtype.name}: "
            f"{how_to_convert(dtype, params.key_dtype)}"
        )
    return ids if isinstance(ids, tf.RaggedTensor) else tf.convert_to_tensor(ids)


def _trainable(params: ShardedTable, ids: tf.Tensor, name: str | None, max_norm: Any, caller: str) -> TrainableWrapper:
    """What trains the rows of a lookup: a new wrapper in a graph, the shadow of this name elsewhere."""
    in_function = tf_ops.inside_function()
    if not tf.executing_eagerly() and not in_function:
        scope = variable_scope.get_variable_scope().name
        inner = f"{name or caller}/{name or caller}"
        with tf.name_scope(""):  # the name has the variable scope in it
            wrapper_name = tf_ops.get_default_graph().unique_name(f"{scope}/{inner}" if scope else inner)
        wrapper = TrainableWrapper(params, ids, max_norm, name=wrapper_name)
        params.trainable_store[name or wrapper.name] = wrapper
        return wrapper
    with tf_ops.init_scope():
        if not tf.executing_eagerly():
            raise NotImplementedError(
                f"{caller} of {params!r} in a loop, a branch or a function of a graph: what trains its rows is of the "
                "graph itself. Look the rows up before, and use them within."
            )
    if name is None:
        if not in_function:
            raise ValueError(
                f"{caller} wants a name in eager mode: what is trained goes by it. Or make a ShadowVariable, and "
                "look up through shadow_ops.embedding_lookup."
            )
        graph = tf_ops.get_default_graph()
        name = f"{graph.name}/{graph.unique_name(caller)}"
    shadow: TrainableWrapper = shadow_of(params, name, max_norm)
    return shadow


def _scope(name: str) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if context.executing_eagerly() else tf.name_scope(name)


@tf.autograph.experimental.do_not_convert
def embedding_lookup(
    params: Any,
    ids: Any,
    partition_strategy: str | None = None,
    name: str | None = None,
    validate_indices: Any = None,
    max_norm: Any = None,
    return_trainable: bool = False,
) -> Any:
    """Rows of ids; the initial value of keys that are not there. An optimizer that applies the gradient inserts them.

    Args:
      params: a `Variable`.
      ids: keys, any shape, duplicates included; a RaggedTensor, too.
      partition_strategy, validate_indices: not used.
      name: of the lookup; eager mode needs it.
      max_norm: rows of a larger norm are scaled down to it.
      return_trainable: whether to return also what an optimizer trains: a `TrainableWrapper` in a graph, else a
        `ShadowVariable`.

    Returns:
      ids.shape + [dim]; ragged where ids are.

    Raises:
      TypeError: ids of another dtype than the keys, or `params` is no Variable.
      ValueError: several `params`; no `name` in eager mode.
      NotImplementedError: in a loop, a branch or a function of a graph of TensorFlow 1; look the rows up before.

    Example:
      >>> rows, trainable = de.embedding_lookup(params, ids, name="user", return_trainable=True)
    """
    del partition_strategy, validate_indices
    return _embedding_lookup(params, ids, name, max_norm, return_trainable, "embedding_lookup")


def _embedding_lookup(
    params: Any, ids: Any, name: str | None, max_norm: Any, return_trainable: bool, caller: str
) -> Any:
    params = _one(params, caller)
    if not isinstance(params, ShardedTable):
        return params.embedding_lookup(ids, name=name, max_norm=max_norm, return_trainable=return_trainable)
    ids = _check_ids(params, ids, caller)
    with _scope(name or caller):
        if isinstance(ids, tf.RaggedTensor):
            found = _embedding_lookup(params, ids.flat_values, name, max_norm, return_trainable, caller)
            rows = ids.with_flat_values(found[0] if return_trainable else found)
            return (rows, found[1]) if return_trainable else rows
        trainable = _trainable(params, ids, name, max_norm, caller)
        rows = trainable.transform(params.gather(ids)[0]) if serving() else trainable.rows_of(ids, max_norm)
        return (rows, trainable) if return_trainable else rows


@tf.autograph.experimental.do_not_convert
def embedding_lookup_unique(
    params: Any,
    ids: Any,
    partition_strategy: str | None = None,
    name: str | None = None,
    validate_indices: Any = None,
    max_norm: Any = None,
    return_trainable: bool = False,
) -> Any:
    """As `embedding_lookup`, for ids that have duplicates: here both find equal keys once and train them once."""
    del partition_strategy, validate_indices
    return _embedding_lookup(params, ids, name, max_norm, return_trainable, "embedding_lookup_unique")


def _check_combiner(combiner: str, caller: str) -> None:
    if combiner not in COMBINERS:
        raise ValueError(f"{caller}: combiner must be one of {COMBINERS}, got {combiner!r}.")


def _pooled(
    params: Any,
    sp_ids: Any,
    sp_weights: Any,
    name: str | None,
    combiner: str,
    max_norm: Any,
    caller: str,
    **how: Any,
) -> tuple[tf.Tensor, Any, Any]:
    """Rows of ids combined, what trains them, and the ids as the op takes them."""
    if not isinstance(sp_ids, (tf.SparseTensor, tf.compat.v1.SparseTensorValue, tf.RaggedTensor)):
        raise TypeError(f"{caller}: sp_ids must be a SparseTensor or a RaggedTensor, got {type(sp_ids).__name__}.")
    params = _one(params, caller)
    variable = params if isinstance(params, ShardedTable) else getattr(params, "params", None)
    if variable is not None:
        _check_ids(variable, sp_ids.values, caller)
    ids = pooled_ids(variable if variable is not None else params, sp_ids, sp_weights, caller, **how)
    if not isinstance(params, (ShardedTable, TrainableWrapper)):  # looks up in its own way
        bags = bags_of(ids)
        unique, which = tf.unique(bags.keys)
        rows, trainable = params.embedding_lookup(unique, name=name, max_norm=max_norm, return_trainable=True)
        return pool(rows, which, bags, combiner), trainable, ids
    ours = isinstance(params, TrainableWrapper)
    trainable = params if ours else _trainable(params, ids.keys, name, max_norm, caller)
    trainable.awaited = False
    max_norm = trainable.max_norm if max_norm is None else max_norm
    trains = ModelMode.CURRENT_SETTING == ModelMode.TRAIN and not serving() and trainable.trainable
    if max_norm is None and variable._many and variable.value_dtype.is_floating:
        if not trains:
            return pool_many([variable.parts], [ids], [combiner], False, missing="initial")[0], trainable, ids
        if variable._one is not None:
            trainable._ids = ids.keys if tf.executing_eagerly() else trainable._ids
            return pool_many([[trainable]], [ids], [combiner], False, missing="initial")[0], trainable, ids
    bags = bags_of(ids)
    unique, which = tf.unique(bags.keys)
    if trains:
        rows = trainable.rows_of(unique, max_norm)
    else:
        rows = variable.gather(unique)[0]
        rows = rows if max_norm is None else tf.clip_by_norm(rows, max_norm, axes=[-1])
    return pool(rows, which, bags, combiner), trainable, ids


@tf.autograph.experimental.do_not_convert
def embedding_lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any,
    partition_strategy: str | None = None,
    name: str | None = "embedding_lookup_sparse",
    combiner: str = "mean",
    max_norm: Any = None,
    return_trainable: bool = False,
) -> Any:
    """Rows of the ids of each row of a SparseTensor or RaggedTensor, combined; zeros where a row has none.

    Args:
      params: a `Variable`, or a `ShadowVariable`.
      sp_ids: [rows, any number], of the key dtype.
      sp_weights: of the form of sp_ids, or None for ones.
      partition_strategy: not used.
      name: of the lookup. What it trains is known by ``<name>/embedding_lookup``; see `Variable.get_trainable_by_name`.
      combiner: ``"mean"`` (weighted), ``"sqrtn"`` or ``"sum"``.
      max_norm: rows of a larger norm are scaled down to it before they are combined.
      return_trainable: as of `embedding_lookup`.

    Returns:
      [rows of sp_ids, dim], of the value dtype; float32 for 16-bit values of a SparseTensor.

    Raises:
      TypeError: sp_ids or sp_weights of another form, ids of another dtype than the keys.
      ValueError: another combiner.
    """
    del partition_strategy
    caller = "embedding_lookup_sparse"
    _check_combiner(combiner, caller)
    with _scope(name or caller):
        inner = f"{name or caller}/embedding_lookup"
        rows, trainable, _ = _pooled(params, sp_ids, sp_weights, inner, combiner, max_norm, caller)
        if not isinstance(sp_ids, tf.RaggedTensor) and rows.dtype in (tf.float16, tf.bfloat16):
            rows = tf.cast(rows, tf.float32)
    return (rows, trainable) if return_trainable else rows


@tf.autograph.experimental.do_not_convert
def safe_embedding_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: str = "mean",
    default_id: Any = None,
    name: str | None = "safe_embedding_lookup_sparse",
    partition_strategy: str | None = None,
    max_norm: Any = None,
    return_trainable: bool = False,
) -> Any:
    """As `embedding_lookup_sparse`, for ids of any rank of which the last dimension is combined.

    Ids whose weight is not positive are left out unless the combiner is ``"sum"``. A row without ids gives the row of
    `default_id`, or zeros: no key is looked up for it, and none is trained. What it trains is known by
    ``<name>/embedding_lookup_sparse/embedding_lookup``.

    Raises:
      TypeError: as of `embedding_lookup_sparse`; weights of another dtype than the values.
      ValueError: another combiner; no `embedding_weights`.
    """
    del partition_strategy
    caller = "safe_embedding_lookup_sparse"
    if embedding_weights is None:
        raise ValueError(f"{caller}: embedding_weights must be a dynamic_embedding.Variable, got None.")
    _check_combiner(combiner, caller)
    variable = _one(embedding_weights, caller)
    value_dtype = getattr(variable, "value_dtype", None) or getattr(variable, "dtype", None)
    if sparse_weights is not None and value_dtype is not None and sparse_weights.dtype != value_dtype:
        raise TypeError(
            f"{caller}: weights must be of the dtype of the values, {value_dtype.name}, got "
            f"{sparse_weights.dtype.name}."
        )
    with _scope(name or caller):
        rows, trainable, ids = _pooled(
            embedding_weights,
            sparse_ids,
            sparse_weights,
            f"{name or caller}/embedding_lookup_sparse/embedding_lookup",
            combiner,
            max_norm,
            caller,
            outer=0,
            positive=combiner != "sum",
            default_id=default_id,
        )
        if ids.shape is not None and ids.segments.shape[-1] != 2:
            rows = tf.reshape(rows, tf.concat([ids.shape[:-1], [tf.cast(rows.shape[-1], tf.int64)]], 0))
        if not isinstance(sparse_ids, tf.RaggedTensor) and rows.dtype in (tf.float16, tf.bfloat16):
            rows = tf.cast(rows, tf.float32)
    return (rows, trainable) if return_trainable else rows
