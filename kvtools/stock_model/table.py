"""A table in a model of stock operations: what it holds, and by which resources its functions reach it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtools.dialects.bundle.dtypes import number_named
from kvtools.lookup_model.messages import INT64, RESOURCE, shape
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.initial_rows import InitialRows
from kvtools.stock_model.stored_rows import stored_type

RESOURCES = ("index", "values", "keys")
"""What the handle of a table becomes: the index from keys to rows, which may be a variable, and two variables."""


@dataclass(frozen=True)
class Variable:
    """A variable of a table: which of its resources it is, its type, and its shape, encoded."""

    resource: str
    dtype: int
    shape: bytes


@dataclass(frozen=True)
class PerfectSlots:
    """What the slots of keys are computed by, beside the pilots of the buckets: see `kvtools.perfect_hash`."""

    seed: int
    slots: int
    buckets: int


@dataclass(frozen=True)
class StockTable:
    """A table, by its number in the model.

    Row i of the variable `values` is that of key i; row number `zeros_row` is zeros, and those behind it are what keys
    begin with (`InitialRows.stored`). `part_rows` are the rows of each part. `index_name` is what its index is called
    in a process: two models must never share one. `place` is what its tensors are below in the bundle of variables.
    `rows_as` is what the rows are in the variable, one of `kvtools.narrow_rows.DTYPES`; empty where that is
    `value_dtype`, which the model computes with.
    `perfect` is how row numbers are computed; there is a hash table if it is None. `rows_behind` are the rows from
    `zeros_row` on.
    """

    number: int
    name: str
    key_dtype: str
    value_dtype: str
    dim: int
    part_rows: tuple[int, ...]
    initial: InitialRows
    index_name: str
    place: str = "kvtools_tables"
    rows_as: str = ""
    perfect: PerfectSlots | None = None
    rows_behind: int = 1

    @property
    def rows(self) -> int:
        """How many keys there are."""
        return sum(self.part_rows)

    @property
    def zeros_row(self) -> int:
        """The number of the row of zeros."""
        return self.perfect.slots if self.perfect else self.rows

    @property
    def dtype(self) -> int:
        """The type of the values."""
        return number_named(self.value_dtype)

    @property
    def key_type(self) -> int:
        """The type of the keys, as the model looks them up."""
        return number_named(self.key_dtype)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """Its variables, in the order in which they are written, of the shapes that they are written in.

        Keras makes weights of variables of known shapes alone (`keras.layers.TFSMLayer`).
        """
        stored, width = stored_type(self.value_dtype, self.rows_as, self.dim)
        values = Variable("values", number_named(stored), shape(self.zeros_row + self.rows_behind, width))
        if self.perfect is None:
            return Variable("keys", INT64, shape(max(self.rows, 1))), values
        keys = Variable("keys", INT64, shape(self.perfect.slots))
        return keys, values, Variable("index", INT64, shape(self.perfect.buckets))

    def node(self, resource: str) -> str:
        """Return the name of the node of a resource."""
        return f"kvtools/table_{self.number}/{resource}"

    def tensor(self, variable: str) -> str:
        """Return what a variable is called in the bundle of variables."""
        return f"{self.place}/{self.number}/{variable}/.ATTRIBUTES/VARIABLE_VALUE"

    def function(self, does: str) -> str:
        """Return the name of a function of this table."""
        return f"__kvtools_{does}_{self.number}"


@dataclass(frozen=True)
class Handle:
    """What a tensor that is a table's handle stands for: a table, or part number `part` of it.

    `read_only` says that lookups through it never insert, whatever they ask for.
    """

    table: StockTable
    part: int
    read_only: bool


@dataclass(frozen=True)
class Resources:
    """The tensors of a table's resources, in the order of `RESOURCES`."""

    index: str
    values: str
    keys: str


def resources_of(body: FunctionBody, handles: Sequence[Handle]) -> list[Resources]:
    """Add the arguments for some handles to a function; return them for each."""
    found = []
    for at, _ in enumerate(handles):
        found.append(Resources(*(body.argument(f"table_{at}_{resource}", RESOURCE) for resource in RESOURCES)))
    return found
