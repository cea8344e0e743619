"""`tf.nn.embedding_lookup`, its sparse forms and `tf.gather` on key-value variables.

Registered with TensorFlow's dispatch by type: nothing is replaced, and calls on other types never come here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.ops import array_ops, embedding_ops
from tensorflow.python.ops.ragged import ragged_embedding_ops, ragged_tensor
from tensorflow.python.util import dispatch

from tfplugin import training_mode
from tfplugin.composed_pool import PooledIds, bags_of, pool
from tfplugin.fused_lookup import can_fuse, pool_many
from tfplugin.keys import keys_to_tensor
from tfplugin.kv_variable import KvVariable
from tfplugin.partitioned_kv_variable import PartitionedKvVariable
from tfplugin.same_places import in_same_places, places_of

AnyKvVariable = KvVariable | PartitionedKvVariable

COMBINERS = ("mean", "sqrtn", "sum")


def _as_one(params: Any, caller: str) -> AnyKvVariable:
    """A single variable out of what TensorFlow allows as `params`: a variable, a partitioned one, or its parts."""
    if isinstance(params, (KvVariable, PartitionedKvVariable)):
        return params
    parts = [part for item in params for part in (item if isinstance(item, PartitionedKvVariable) else [item])]
    if len(parts) == 1:
        return parts[0]
    for i, part in enumerate(parts):
        if not isinstance(part, KvVariable) or part.parts != len(parts) or part.part != i:
            raise ValueError(
                f"{caller}: a list of key-value variables must be all parts of one partitioned variable in order, "
                f"got {parts!r}."
            )
    return PartitionedKvVariable(parts[0].partitioned_name or parts[0].name, parts)


def _clip_rows(rows: tf.Tensor, max_norm: Any) -> tf.Tensor:
    return rows if max_norm is None else tf.clip_by_norm(rows, max_norm, axes=[-1])


def embedding_lookup(
    params: Any,
    ids: Any,
    partition_strategy: str | None = None,
    name: str | None = None,
    validate_indices: bool = True,
    max_norm: Any = None,
) -> tf.Tensor:
    """Rows of ids, ``[*ids.shape, dim]``; ragged where ids are. Keys go to parts by floor-mod whatever
    `partition_strategy` says.
    """
    del partition_strategy, validate_indices
    variable = _as_one(params, "embedding_lookup")
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(_clip_rows(variable.sparse_read(ids.flat_values, name), max_norm))
    return _clip_rows(variable.sparse_read(ids, name), max_norm)


def embedding_lookup_v2(params: Any, ids: Any, max_norm: Any = None, name: str | None = None) -> tf.Tensor:
    """`embedding_lookup` with the argument order of TensorFlow 2."""
    return embedding_lookup(params, ids, name=name, max_norm=max_norm)


def pooled_ids(
    variable: AnyKvVariable,
    sp_ids: Any,
    sp_weights: Any,
    caller: str,
    outer: int = 1,
    positive: bool = False,
    default_id: Any = None,
) -> PooledIds:
    """Ids and weights of a SparseTensor or a RaggedTensor. See `PooledIds` for the last three."""
    if isinstance(sp_ids, tf.RaggedTensor):
        if sp_ids.ragged_rank != 1 or sp_ids.flat_values.shape.rank not in (1, None):
            raise ValueError(f"{caller}: a RaggedTensor of ids has shape [batch, None], got {sp_ids.shape}.")
        segments, shape = sp_ids.row_splits, None
        if segments.dtype != tf.int64:
            segments = tf.cast(segments, tf.int64)
    elif isinstance(sp_ids, (tf.SparseTensor, tf.compat.v1.SparseTensorValue)):
        segments, shape = (tf.convert_to_tensor(part, tf.int64) for part in (sp_ids.indices, sp_ids.dense_shape))
    else:
        raise TypeError(f"{caller}: sp_ids must be a SparseTensor or a RaggedTensor, got {type(sp_ids).__name__}.")
    for part in getattr(variable, "_kv_parts", ()):
        part._clipped_whole = True
    return PooledIds(
        keys_to_tensor(sp_ids.values, variable.key_dtype, variable.name),
        segments,
        shape,
        outer,
        _weight_values(sp_weights, sp_ids, caller),
        positive and sp_weights is not None,
        None if default_id is None else keys_to_tensor(default_id, variable.key_dtype, variable.name),
    )


def _weight_values(sp_weights: Any, sp_ids: Any, caller: str) -> tf.Tensor | None:
    if sp_weights is None:
        return None
    if type(sp_weights) is not type(sp_ids) and not (
        isinstance(sp_weights, tf.SparseTensor) and isinstance(sp_ids, tf.SparseTensor)
    ):
        raise TypeError(
            f"{caller}: sp_weights must be of the type of sp_ids ({type(sp_ids).__name__}) or None, "
            f"got {type(sp_weights).__name__}."
        )
    ragged = isinstance(sp_weights, tf.RaggedTensor)
    weights = sp_weights.flat_values if ragged else tf.convert_to_tensor(sp_weights.values)
    of_ids, of_weights = places_of(sp_ids), places_of(sp_weights)
    if len(of_ids) != len(of_weights):
        raise ValueError(f"{caller}: sp_weights of shape {sp_weights.shape} for sp_ids of shape {sp_ids.shape}.")
    what = "row splits" if ragged else "indices"
    told = f"{caller}: sp_weights must lie where the ids do: their {what} are not those of sp_ids."
    numbers = [values.shape.num_elements() for values in (tf.convert_to_tensor(sp_ids.values), weights)]
    if None not in numbers and numbers[0] != numbers[1]:
        told = f"{told[:-1]}, got {numbers[0]} ids and {numbers[1]} weights."
    return in_same_places(weights, of_ids, of_weights, told)


def parts_of(variable: AnyKvVariable) -> list[KvVariable]:
    """The parts of a variable, or the variable itself."""
    return variable.as_list() if isinstance(variable, PartitionedKvVariable) else [variable]


def pooled_lookup(
    variable: AnyKvVariable,
    ids: PooledIds,
    combiner: str,
    max_norm: Any,
    name: str | None,
    training: bool | None = None,
) -> tf.Tensor:
    """Rows of `ids` combined, ``[rows, dim]``. Rows without ids are zeros."""
    train = training_mode.is_training(training)
    parts = parts_of(variable)
    if max_norm is None and can_fuse(parts, train):
        return pool_many([parts], [ids], [combiner], train, name)[0]
    bags = bags_of(ids)
    unique, which = tf.unique(bags.keys)
    return pool(_clip_rows(variable.sparse_read(unique, training=train), max_norm), which, bags, combiner)


def _scope(name: str) -> contextlib.AbstractContextManager[Any]:
    """A name scope, where names are kept."""
    return contextlib.nullcontext() if context.executing_eagerly() else tf.name_scope(name)


def _check_combiner(combiner: str | None, caller: str) -> str:
    if combiner is None:
        return "mean"
    if combiner not in COMBINERS:
        raise ValueError(f"{caller}: combiner must be one of {COMBINERS}, got {combiner!r}.")
    return combiner


def embedding_lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any,
    partition_strategy: str | None = None,
    name: str | None = None,
    combiner: str | None = None,
    max_norm: Any = None,
    allow_fast_lookup: bool = False,
) -> tf.Tensor:
    """Pooled rows of a SparseTensor or RaggedTensor of ids: ``[rows of sp_ids, dim]``, zeros where a row is empty."""
    del partition_strategy, allow_fast_lookup
    caller = "embedding_lookup_sparse"
    variable = _as_one(params, caller)
    combiner = _check_combiner(combiner, caller)
    with _scope(name or caller):
        return pooled_lookup(variable, pooled_ids(variable, sp_ids, sp_weights, caller), combiner, max_norm, name)


def embedding_lookup_sparse_v2(
    params: Any,
    sp_ids: Any,
    sp_weights: Any,
    combiner: str | None = None,
    max_norm: Any = None,
    name: str | None = None,
    allow_fast_lookup: bool = False,
) -> tf.Tensor:
    """`embedding_lookup_sparse` with the argument order of TensorFlow 2."""
    del allow_fast_lookup
    return embedding_lookup_sparse(params, sp_ids, sp_weights, None, name, combiner, max_norm)


def safe_embedding_lookup_sparse(
    embedding_weights: Any,
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: str | None = "mean",
    default_id: Any = None,
    name: str | None = None,
    partition_strategy: str = "div",
    max_norm: Any = None,
    allow_fast_lookup: bool = False,
) -> tf.Tensor:
    """Pooled rows; an empty row gives zeros, or the row of `default_id`.

    Ids may be of rank 2 or more: the last dimension is pooled. Ids whose weight is not positive are left out unless
    the combiner is ``sum``. Negative ids are keys like any other, and no key is looked up for an empty row.
    """
    del partition_strategy, allow_fast_lookup
    caller = "safe_embedding_lookup_sparse"
    variable = _as_one(embedding_weights, caller)
    combiner = _check_combiner(combiner, caller)
    with _scope(name or caller):
        # Of a rank that is known, exported models need no operation that TFLite and ONNX lack.
        rank = sparse_ids.shape.rank if isinstance(sparse_ids, tf.SparseTensor) else None
        ids = pooled_ids(variable, sparse_ids, sparse_weights, caller, (rank or 1) - 1, combiner != "sum", default_id)
        pooled = pooled_lookup(variable, ids, combiner, max_norm, name)
        if ids.shape is None or ids.segments.shape[-1] == 2:
            return pooled
        return tf.reshape(pooled, tf.concat([ids.shape[:-1], [tf.cast(variable.dim, tf.int64)]], 0))


def safe_embedding_lookup_sparse_v2(
    embedding_weights: Any,
    sparse_ids: Any,
    sparse_weights: Any = None,
    combiner: str | None = "mean",
    default_id: Any = None,
    max_norm: Any = None,
    name: str | None = None,
    allow_fast_lookup: bool = False,
) -> tf.Tensor:
    """`safe_embedding_lookup_sparse` with the argument order of TensorFlow 2."""
    del allow_fast_lookup
    return safe_embedding_lookup_sparse(
        embedding_weights, sparse_ids, sparse_weights, combiner, default_id, name, "div", max_norm
    )


def _gather(params: AnyKvVariable, indices: Any, axis: Any, batch_dims: Any, name: str | None) -> tf.Tensor:
    if axis not in (None, 0) or batch_dims not in (None, 0):
        raise ValueError(f"tf.gather on '{params.name}': rows are keyed, so axis and batch_dims must be 0.")
    return embedding_lookup(params, indices, name=name)


def gather(
    params: Any,
    indices: Any,
    validate_indices: Any = None,
    name: str | None = None,
    axis: Any = None,
    batch_dims: Any = 0,
) -> tf.Tensor:
    """`tf.compat.v1.gather`: rows of keys."""
    del validate_indices
    return _gather(params, indices, axis, batch_dims, name)


def gather_v2(
    params: Any,
    indices: Any,
    validate_indices: Any = None,
    axis: Any = None,
    batch_dims: Any = 0,
    name: str | None = None,
) -> tf.Tensor:
    """`tf.gather`: rows of keys."""
    del validate_indices
    return _gather(params, indices, axis, batch_dims, name)


_TARGETS: list[tuple[Callable[..., Any], str, Callable[..., Any]]] = [
    # (TensorFlow's function, its argument that selects us, ours)
    (embedding_ops.embedding_lookup, "params", embedding_lookup),
    (embedding_ops.embedding_lookup_v2, "params", embedding_lookup_v2),
    (embedding_ops.embedding_lookup_sparse, "params", embedding_lookup_sparse),
    (embedding_ops.embedding_lookup_sparse_v2, "params", embedding_lookup_sparse_v2),
    (embedding_ops.safe_embedding_lookup_sparse, "embedding_weights", safe_embedding_lookup_sparse),
    (embedding_ops.safe_embedding_lookup_sparse_v2, "embedding_weights", safe_embedding_lookup_sparse_v2),
    (array_ops.gather, "params", gather),
    (array_ops.gather_v2, "params", gather_v2),
]


def _ours_or(stock: Callable[..., Any], argument: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` for calls whose `argument` is one of our variables, `stock` for the rest."""
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def choose(*args: Any, **kwargs: Any) -> Any:
        params = signature.bind(*args, **kwargs).arguments[argument]
        first = params[0] if isinstance(params, (list, tuple)) and params else params
        return (ours if isinstance(first, (KvVariable, PartitionedKvVariable)) else stock)(*args, **kwargs)

    return choose


# Three of the functions have a dispatch target of TensorFlow's own, for ragged ids. A call that matches two targets is
# an error, so one target stands for both.
_RAGGED = {
    embedding_ops.embedding_lookup: (ragged_embedding_ops.embedding_lookup, "ids"),
    embedding_ops.embedding_lookup_sparse: (ragged_embedding_ops.embedding_lookup_sparse, "sp_ids"),
    embedding_ops.safe_embedding_lookup_sparse: (ragged_embedding_ops.safe_embedding_lookup_sparse, "sparse_ids"),
}
_registered: list[Callable[..., Any]] = []


def register() -> None:
    """Registers the lookups with TensorFlow's type-based dispatch."""
    for api, argument, target in _TARGETS:
        types = (KvVariable, PartitionedKvVariable, typing.List[KvVariable], typing.List[PartitionedKvVariable])  # noqa: UP006
        signatures: list[dict[str, Any]] = [{argument: type_} for type_ in types]
        if api in _RAGGED:
            stock, ids = _RAGGED[api]
            dispatch.unregister_dispatch_for(stock)
            signatures.append({ids: ragged_tensor.Ragged})
            target = _ours_or(stock, argument, target)
        dispatch.dispatch_for_api(api, *signatures)(target)
        _registered.append(target)


def unregister() -> None:
    """Takes the lookups out of TensorFlow's dispatch again."""
    while _registered:
        dispatch.unregister_dispatch_for(_registered.pop())
    for api, (stock, ids) in _RAGGED.items():
        dispatch.dispatch_for_api(api, {ids: ragged_tensor.Ragged})(stock)
