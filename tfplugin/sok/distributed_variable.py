"""`sok.Variable`: a dense variable whose rows are spread over the ranks, or held by one of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from tfplugin import ranks
from tfplugin.sok.placement import ModelParallel, owner_of_mode, refuse_strategies

_numbers = itertools.count()


class ShardedVariable(resource_variable_ops.ResourceVariable, ModelParallel):
    """This rank's rows of a variable [rows, dim] that the ranks hold together. Made by `Variable`.

    It is a ``tf.Variable`` of the local rows: it trains, prints and converts as one.

    Attributes:
      global_shape: (rows, dim) of the whole.
      target_gpu: the rank that holds it all; -1 where the ranks share it.
      num_gpus: number of ranks.
      global_gpu_id: this rank.
    """

    #: Has `tfplugin.keras_models` look for it in layers, whose files would lack rows of it.
    _is_shard = True

    def __init__(
        self, local: Any, global_shape: tuple[int, int], owner: int | None, trainable: bool | None, **kwargs: Any
    ) -> None:
        self.global_shape = global_shape
        self.target_gpu = -1 if owner is None else owner
        self.world = ranks.known()
        self.num_gpus = self.world.size
        self.global_gpu_id = ranks.rank()
        super().__init__(initial_value=local, trainable=trainable, **kwargs)

    @property
    def owner(self) -> int | None:
        """The rank that holds it all; None where the ranks share it."""
        return None if self.target_gpu < 0 else self.target_gpu

    @property
    def ranks(self) -> int:
        """How many ranks hold rows of the whole, or could."""
        return self.num_gpus

    @property
    def mode(self) -> str:
        """``"distributed"`` or ``"localized:#"``."""
        return "distributed" if self.target_gpu < 0 else f"localized:{self.target_gpu}"

    def describe(self) -> str:
        """What must be the same on all ranks."""
        return f"'{self.name}' (static, {self.dtype.name}{list(self.global_shape)}, {self.mode})"

    def key_map(self, indices: Any) -> tf.Tensor:
        """Local row numbers of rows of the whole that this rank holds."""
        indices = tf.convert_to_tensor(indices)
        return indices // self.num_gpus if self.target_gpu < 0 else indices

    def global_rows(self) -> np.ndarray:
        """The numbers, in the whole, of the local rows: int64 [local rows]."""
        return held_rows(self.global_shape[0], self.owner, self.global_gpu_id, self.num_gpus)


class DistributedVariable(ShardedVariable):
    """A `ShardedVariable` whose rows are spread over all ranks."""


class LocalizedVariable(ShardedVariable):
    """A `ShardedVariable` that one rank holds."""


def held_rows(rows: int, owner: int | None, rank: int, size: int) -> np.ndarray:
    """Which of `rows` rows a rank holds, in the order in which it does: int64.

    >>> held_rows(5, None, 1, 2)
    array([1, 3])
    """
    if owner is None:
        return np.arange(rank, rows, size, dtype=np.int64)
    return np.arange(rows if rank == owner else 0, dtype=np.int64)


def Variable(
    initial_value: Any = None,
    trainable: bool | None = None,
    *args: Any,
    mode: str | None = None,
    shape: Any = None,
    initializer: Any = None,
    dtype: Any = None,
    name: str | None = None,
    **kwargs: Any,
) -> ShardedVariable:
    """Makes a model-parallel variable: each rank keeps some of its rows.

    Row r of a distributed variable is on rank ``r % size``, in its local row ``r // size``; a localized one is whole on
    one rank and has no rows on the others. Give `initial_value`, the same on every rank, or `shape` with `initializer`.

    Args:
      initial_value: [rows, dim], or [dim] for a single row: an array, a list, a Tensor or a function that gives one.
      trainable, name, and what else there is: as for ``tf.Variable``.
      mode: ``"distributed"`` (default) or ``"localized:#"`` with the number of a rank.
      shape: (rows, dim) of the whole; each rank then draws its own rows only.
      initializer: a function of (shape, dtype), an initializer of TensorFlow or Keras, or its name; with `shape`.
        Default: Keras's ``"uniform"``.
      dtype: default that of `initial_value`, or tf.float32.

    Raises:
      ValueError: a mode that there is not, a rank that there is not, or a shape other than those above; in the scope of
        a ``tf.distribute`` strategy other than ``OneDeviceStrategy``.

    Example:
      >>> v = sok.Variable(np.arange(4 * 3).reshape(4, 3), dtype=tf.float32)
      >>> v.shape                      # on each of 2 ranks
      TensorShape([2, 3])
    """
    name = f"sok_static_Variable_{next(_numbers)}" if name is None else name
    what = f"sok.Variable '{name}'"
    refuse_strategies(f"{what} cannot be made")
    owner = owner_of_mode(mode, what)
    if (initial_value is None) == (shape is None):
        raise ValueError(f"{what}: give either initial_value or shape (with an initializer).")
    if initial_value is None:
        whole = _shape_of_whole(shape, what)
        mine = held_rows(whole[0], owner, ranks.rank(), ranks.size())
        make = tf.keras.initializers.get("uniform" if initializer is None else initializer)
        dtype = tf.as_dtype(dtype or tf.float32)
        local = lambda: tf.cast(make([len(mine), whole[1]], dtype=dtype), dtype)  # noqa: E731
    else:
        if callable(initial_value):
            initial_value = initial_value()
        value = tf.convert_to_tensor(initial_value, dtype) if _is_tensor(initial_value) else np.asarray(initial_value)
        if len(value.shape) == 1:
            value = value[None, :]
        whole = _shape_of_whole(value.shape, what)
        mine = held_rows(whole[0], owner, ranks.rank(), ranks.size())
        local = tf.gather(value, mine) if tf.is_tensor(value) else tf.convert_to_tensor(value[mine], dtype)
    kind = DistributedVariable if owner is None else LocalizedVariable
    return kind(local, whole, owner, trainable, *args, dtype=dtype, name=name, **kwargs)


def _is_tensor(value: Any) -> bool:
    return tf.is_tensor(value) or isinstance(value, tf.Variable)


def _shape_of_whole(shape: Any, what: str) -> tuple[int, int]:
    found = tf.TensorShape(shape)
    if found.rank != 2 or not found.is_fully_defined() or found[1] < 1:
        raise ValueError(f"{what}: the shape must be (rows, dim), both known, got {found}.")
    return int(found[0]), int(found[1])
