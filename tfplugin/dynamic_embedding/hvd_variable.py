"""`HvdVariable`: the rows of a `ShadowVariable` spread over Horovod's ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin import ranks
from tfplugin.dynamic_embedding.rank_part import be_part
from tfplugin.dynamic_embedding.shadow_variable import ShadowVariable, serving
from tfplugin.dynamic_embedding.shadow_variable import embedding_lookup as shadow_lookup
from tfplugin.sok.all2all_dense_embedding import all2all_dense_embedding
from tfplugin.sok.exchange_table import ExchangeTable


class HvdVariable:
    """Looks ids up on whichever rank has their rows: rank ``key floor-mod size`` has a key. On one rank, in `shadow`.

    Every rank makes it, and calls `embedding_lookup` as often as the others, with ids of its own. Gradients, which are
    summed over the ranks, go to `shadow`. Save its variable with `tfplugin.sok.Checkpoint`, on all ranks.

    Args:
      name: of the exchange between ranks.
      shadow: a `ShadowVariable` of a `Variable` with one device, which holds no rows yet.
      embedding_size: width of a row.
      with_unique, with_secondary_unique: accepted: a key is sent once however often it occurs.
      mpi_size: the number of ranks, which is the default; 1 for rows that each rank has for itself.

    Raises:
      TypeError: `shadow` is something else; keys that do not travel between ranks.
      ValueError: another `mpi_size`; several devices.
      RuntimeError: there are several ranks, and ``hvd.init()`` has not been called.

    Example:
      >>> shadow = de.shadow_ops.ShadowVariable(de.Variable(dim=2, name="user"), name="user")
      >>> rows, _ = de.shadow_ops.HvdVariable("user", shadow, 2).embedding_lookup(ids)
    """

    def __init__(
        self,
        name: str,
        shadow: ShadowVariable,
        embedding_size: int,
        with_unique: bool = True,
        with_secondary_unique: bool = True,
        mpi_size: int | None = None,
    ) -> None:
        if not isinstance(shadow, ShadowVariable):
            raise TypeError(f"HvdVariable '{name}': shadow must be a ShadowVariable, got {type(shadow).__name__}.")
        self.name = name
        self.shadow = shadow
        self.embedding_size = int(embedding_size)
        self.with_unique = bool(with_unique)
        self.with_secondary_unique = bool(with_secondary_unique)
        self.mpi_size = mpi_size
        self._table = spread(shadow, mpi_size, f"HvdVariable '{name}'")

    @property
    def params(self) -> Any:
        """The `Variable`."""
        return self.shadow.params

    @property
    def key_dtype(self) -> tf.DType:
        """Of the keys."""
        return self.shadow.params.key_dtype

    @property
    def value_dtype(self) -> tf.DType:
        """Of the rows."""
        return self.shadow.params.value_dtype

    @tf.autograph.experimental.do_not_convert
    def embedding_lookup(
        self, ids: Any, name: str | None = None, max_norm: Any = None, return_trainable: bool = True
    ) -> Any:
        """Rows of ids, ids.shape + [dim], and what is trained.

        Raises:
          ValueError: ids of another dtype than the keys; `max_norm`, which belongs to `shadow`.
        """
        if max_norm is not None and max_norm != self.shadow.max_norm:
            raise ValueError(f"HvdVariable '{self.name}': give its ShadowVariable the max_norm.")
        rows = spread_lookup(self._table, self.shadow, ids, name or self.name)
        return (rows, self.shadow) if return_trainable else rows


def spread(shadow: ShadowVariable, size: int | None, what: str) -> ExchangeTable | None:
    """What exchanges keys and rows of a variable between the ranks, of which each has a part; None for one rank.

    Args:
      shadow: of the variable.
      size: the number of ranks, or None for those that there are.
      what: has the variable, for messages.

    Raises:
      TypeError, ValueError: as of `HvdVariable`.
    """
    check_size(size, what)
    world = ranks.found()
    if (world.size if size is None else size) == 1:
        return None
    params = shadow.params
    if params.key_dtype not in (tf.int64, tf.int32, tf.uint64):
        raise TypeError(
            f"{what}: keys that travel between ranks are int64, int32 or uint64, got {params.key_dtype.name}: hash "
            "strings with tf.strings.to_hash_bucket_strong."
        )
    be_part(params, world.rank, world.size)
    return ExchangeTable(
        params, params.name, -1, -1, params.key_dtype, params.value_dtype, params.dim, read=shadow.rows_of
    )


def check_size(size: int | None, what: str) -> None:
    """Raises ValueError for a number of ranks that is neither 1 nor that of the ranks there are."""
    there = ranks.found().size
    if size not in (None, 1, there):
        raise ValueError(
            f"{what}: mpi_size must be the number of ranks, {there}, 1 for a table that each rank has for itself, or "
            f"None, got {size!r}."
        )


def spread_lookup(table: ExchangeTable | None, shadow: ShadowVariable, ids: Any, name: str) -> Any:
    """Rows of ids, on whichever rank they are."""
    if table is None or serving():
        return shadow_lookup(shadow, ids)
    shadow.awaited = False
    return all2all_dense_embedding(table, ids, training=False, name=name)
