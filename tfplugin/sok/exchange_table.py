"""What an exchange of keys and rows needs to know about a variable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfplugin import ranks
from tfplugin.kv_variable import KvVariable
from tfplugin.partitioned_kv_variable import PartitionedKvVariable
from tfplugin.sok.distributed_variable import ShardedVariable
from tfplugin.sok.dynamic_variable import DynamicVariable


@dataclass(frozen=True)
class ExchangeTable:
    """A variable as the ranks see it.

    Attributes:
      variable: this rank's share of it.
      name: for messages.
      owner: the rank that holds it all; -1 where rank ``key floor-mod size`` holds a key.
      rows: how many rows a static variable has on all ranks together; -1 for a key-value table.
      key_dtype: of the keys of a key-value table; tf.int64 for a static variable.
      dtype: of the rows.
      dim: width of a row.
      row_limit: the most rows that a lookup may leave a rank with; -1 for any number.
      read: gives rows [n, dim] of keys [n] of this rank, where `variable` does not do it in the usual way.
    """

    variable: Any
    name: str
    owner: int
    rows: int
    key_dtype: tf.DType
    dtype: tf.DType
    dim: int
    row_limit: int = -1
    read: Callable[[tf.Tensor], tf.Tensor] | None = None

    @property
    def is_dynamic(self) -> bool:
        """Whether rows are found by key rather than by number."""
        return self.rows < 0

    def is_plain(self, key_dtype: tf.DType) -> bool:
        """Whether the lookups of tables of one process do for such keys. They check less than an exchange."""
        return self.is_dynamic and self.row_limit < 0 and key_dtype == self.key_dtype


def exchange_table(variable: Any, caller: str) -> ExchangeTable:
    """Describes a variable (a description stays as it is), or says why it cannot be looked up on several ranks.

    Raises:
      TypeError: not a variable that can be looked up.
      ValueError: one that only this rank knows, where there are several; one that was made on other ranks.
    """
    if isinstance(variable, ExchangeTable):
        return variable
    if isinstance(variable, (DynamicVariable, ShardedVariable)):
        if variable.world.has_ended:
            raise ValueError(f"{caller}: '{variable.name}' has its rows of ranks of before. {ranks.CHANGED}")
        if variable.ranks != ranks.size():
            raise ValueError(
                f"{caller}: '{variable.name}' was made by one of {variable.ranks} ranks, has its rows of these, and "
                f"there are {ranks.size()} now. {ranks.ANEW}"
            )
    if isinstance(variable, DynamicVariable):
        return ExchangeTable(
            variable,
            variable.name,
            variable.target_gpu,
            -1,
            variable.key_dtype,
            variable.dtype,
            variable.dim,
            variable.row_limit,
        )
    if isinstance(variable, ShardedVariable):
        rows, dim = variable.global_shape
        return ExchangeTable(variable, variable.name, variable.target_gpu, rows, tf.int64, variable.dtype, dim)
    if not isinstance(variable, (KvVariable, PartitionedKvVariable, tf.Variable)):
        raise TypeError(f"{caller}: params must be sok.Variable or sok.DynamicVariable, got {type(variable).__name__}.")
    if ranks.size() > 1:
        raise ValueError(
            f"{caller}: '{variable.name}' is a {type(variable).__name__}, whose rows each of the {ranks.size()} ranks "
            "has for itself: make it with sok.Variable or sok.DynamicVariable, or look it up with "
            "tf.nn.embedding_lookup."
        )
    if isinstance(variable, tf.Variable):
        if variable.shape.rank != 2 or not variable.shape.is_fully_defined():
            raise ValueError(f"{caller}: '{variable.name}' must be of shape [rows, dim], got {variable.shape}.")
        rows, dim = variable.shape
        return ExchangeTable(variable, variable.name, -1, int(rows), tf.int64, variable.dtype, int(dim))
    return ExchangeTable(variable, variable.name, -1, -1, variable.key_dtype, variable.dtype, variable.dim)
