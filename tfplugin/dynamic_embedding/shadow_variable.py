"""`ShadowVariable`: lookups through an object that stays, for eager code, `tf.function` and modules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.saved_model import save_context

from tfplugin.dynamic_embedding.sharded_table import ShardedTable
from tfplugin.dynamic_embedding.trainable import TrainableWrapper
from tfplugin.keys import constant_keys


class ShadowVariable(TrainableWrapper):
    """The rows of the latest lookup through it, as a variable that optimizers train.

    Args:
      params: a `Variable`.
      name: under which ``params.trainable_store`` has it.
      max_norm: rows of a larger norm are scaled down to it when they are read.
      trainable: whether optimizers train it.
      distribute_strategy: a `tf.distribute.Strategy`, or None.
      kwargs: ``ids`` and ``exists``: resource variables of any shape that each lookup assigns its keys to, and which of
        them were there.

    Raises:
      NotImplementedError: not in eager mode.
      TypeError: `params`, ``ids`` or `distribute_strategy` are something else.

    Example:
      >>> shadow = de.shadow_ops.ShadowVariable(params, name="user")
      >>> with tf.GradientTape() as tape:
      ...     loss = tf.reduce_sum(de.shadow_ops.embedding_lookup(shadow, ids))
      >>> optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])
    """

    def __init__(
        self,
        params: ShardedTable,
        name: str = "ShadowVariable",
        max_norm: Any = None,
        trainable: bool = True,
        distribute_strategy: Any = None,
        **kwargs: Any,
    ) -> None:
        with tf_ops.init_scope():
            if not tf.executing_eagerly():
                raise NotImplementedError(
                    f"ShadowVariable '{name}' is for eager mode and tf.function: in a graph, take what "
                    "embedding_lookup returns with return_trainable=True."
                )
        if not isinstance(params, ShardedTable):
            raise TypeError(f"ShadowVariable '{name}': params must be a Variable, got {type(params).__name__}.")
        for what in ("ids", "exists"):
            given = kwargs.get(what)
            if given is not None and not isinstance(given, resource_variable_ops.BaseResourceVariable):
                raise TypeError(
                    f"ShadowVariable '{name}': {what} must be a resource variable, got {type(given).__name__}."
                )
        if distribute_strategy is not None and not isinstance(distribute_strategy, distribute_lib.StrategyBase):
            raise TypeError(
                f"ShadowVariable '{name}': distribute_strategy must be a tf.distribute.Strategy, got "
                f"{type(distribute_strategy).__name__}."
            )
        self._ids_variable = kwargs.get("ids")
        self.exists = kwargs.get("exists")
        super().__init__(params, None, max_norm, trainable=trainable, name=name, model_mode=kwargs.get("model_mode"))
        params.trainable_store[name] = self

    @property
    def ids(self) -> Any:
        """The keys of the latest lookup, none before the first. A `tf.function` tells them to a given ``ids`` only."""
        if self._ids_variable is not None:
            return self._ids_variable
        return tf.zeros([0], self.params.key_dtype) if self._ids is None else self._ids

    def rows_of(self, ids: tf.Tensor, max_norm: Any = None) -> tf.Tensor:
        """As of `TrainableWrapper`; notes the keys."""
        if self._ids_variable is not None:
            self._ids_variable.assign(ids)
        elif isinstance(ids, tf_ops.EagerTensor):
            self._ids = ids
        if self.exists is not None:
            self.exists.assign(self.params.lookup(ids, return_exists=True)[1])
        return super().rows_of(ids, max_norm)

    @tf.autograph.experimental.do_not_convert
    def embedding_lookup(
        self, ids: Any, name: str | None = None, max_norm: Any = None, return_trainable: bool = True
    ) -> Any:
        """As `shadow_ops.embedding_lookup` of this object; beside the rows what is trained, which is this object."""
        rows = _lookup(self, ids, max_norm)
        return (rows, self) if return_trainable else rows


def shadow_of(params: ShardedTable, name: str, max_norm: Any = None, awaited: bool = False) -> Any:
    """The ShadowVariable of this name, made where there is none.

    `awaited` says that it is asked for before there is a lookup of that name: the lookup takes it.
    """
    # Name scopes end with a slash, and TFRA adds another.
    name = re.sub("/+", "/", name)
    shadow = params.trainable_store.get(name)
    if shadow is None:
        with tf_ops.init_scope():
            shadow = ShadowVariable(params, name, max_norm, params.trainable)
            shadow.awaited = awaited
    shadow.awaited &= awaited
    return shadow


def serving() -> bool:
    """Whether a SavedModel is being made: its functions only read."""
    return bool(save_context.in_save_context())


def _lookup(shadow: TrainableWrapper, ids: Any, max_norm: Any = None) -> Any:
    shadow.awaited = False
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(_lookup(shadow, ids.flat_values, max_norm))
    ids = tf.convert_to_tensor(ids) if hasattr(ids, "dtype") else constant_keys(ids, shadow.key_dtype)
    if ids.dtype != shadow.key_dtype:
        raise ValueError(
            f"Lookup through {shadow!r}: ids are of {ids.dtype.name}, its keys of {shadow.key_dtype.name}: cast them."
        )
    if serving():
        return shadow.transform(shadow.params.gather(ids)[0])
    return shadow.rows_of(ids, max_norm)


@tf.autograph.experimental.do_not_convert
def embedding_lookup(
    shadow: ShadowVariable,
    ids: Any,
    partition_strategy: str | None = None,
    name: str | None = None,
    validate_indices: Any = None,
) -> Any:
    """Rows of ids, ids.shape + [dim], ragged where ids are; the gradient goes to `shadow`. Inserts nothing.

    Raises:
      ValueError: ids of another dtype than the keys.
    """
    del partition_strategy, name, validate_indices
    return _lookup(shadow, ids)


def embedding_lookup_unique_base(
    ids: Any,
    embedding_size: int,
    lookup_function: Callable[[Any], Any],
    with_unique: bool = True,
    name: str | None = None,
) -> Any:
    """Rows of ids by `lookup_function`, each id once where `with_unique`; ids.shape + [embedding_size], ragged too."""
    if isinstance(ids, tf.RaggedTensor):
        flat = embedding_lookup_unique_base(ids.flat_values, embedding_size, lookup_function, with_unique, name)
        return ids.with_flat_values(flat)
    with tf.name_scope(name or "EmbeddingWithUnique"):
        ids = tf.convert_to_tensor(ids)
        flat = tf.reshape(ids, [-1])
        if with_unique:
            unique, where = tf.unique(flat)
            rows = tf.gather(lookup_function(unique), where)
        else:
            rows = lookup_function(flat)
        rows = tf.reshape(rows, tf.concat([tf.shape(ids), [embedding_size]], 0))
        rows.set_shape(ids.shape.concatenate([embedding_size]))
        return rows


@tf.autograph.experimental.do_not_convert
def embedding_lookup_unique(
    shadow: ShadowVariable, ids: Any, embedding_size: int, with_unique: bool = True, name: str | None = None
) -> Any:
    """Rows of ids, ids.shape + [embedding_size], ragged where ids are.

    `with_unique` changes nothing: a lookup finds equal keys once, and an update sums their gradients.
    """
    del with_unique, name
    if embedding_size != shadow.params.dim:
        raise ValueError(f"{shadow!r} has rows of {shadow.params.dim} elements, got embedding_size {embedding_size}.")
    return _lookup(shadow, ids)
