"""Tables whose rows are written in fewer bits: checked for what these cannot hold, and what that costs them counted."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvtools.cast import FLOATS, CastTable, ColumnCost, rounded
from kvtools.default_row import with_default_row
from kvtools.dialects.chunk import KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import Progress
from kvtools.dialects.schema import DEFAULT_ROW, TableSchema, are_initial_values, numpy_dtype
from kvtools.errors import BadInputError, UsageError
from kvtools.quantized_rows import (
    QUANTIZED,
    Rounding,
    RowLoss,
    bytes_of_row,
    decode,
    encode,
    first_unfit,
    loss_of,
    written_out,
)
from kvtools.row_norms import any_in_row, rows_not_finite
from kvtools.table_view import MaskedTable

if TYPE_CHECKING:
    from kvtools.clip import Choice

DTYPES = ("float32", "float16", "bfloat16", *QUANTIZED)
_LARGEST = {"float16": "65504", "bfloat16": "3.39e+38"}
_BAD_COSINE = 0.99
_DEFAULT = "the default row"
KEYS_BEGIN_WITH = "a row that keys begin with"
_SLOTS_WAY_OUT = (
    "the dialect has one type for values and slots: write another type, or --to a dialect whose slots keep theirs, such"
    " as hdf5"
)

Dtypes = str | Mapping[str, str] | None
"""What rows of floating-point numbers become: one type for all tables, or one for each of these names."""


def dtype_of(schema: TableSchema, dtypes: Dtypes) -> str | None:
    """Return what the rows of a table become, None where they stay.

    Integers do, whatever they count or name, and rows so short that the offset and the scale take more than codes save.

    >>> dtype_of(TableSchema("emb", "npz", "int64", "float32", 4, (9,)), "int8")
    'int8'
    """
    return None if _why_not(schema, dtypes) else _asked(schema, dtypes)


def dtype_notes(schema: TableSchema, dtypes: Dtypes) -> tuple[str, ...]:
    """Say what of a table's rows does not become what was asked for, or is no longer what it was, one sentence each."""
    if _asked(schema, dtypes) is None and schema.rows_as:
        return (f"{written_out(schema.rows_as)}; --dtype {schema.rows_as} makes such of them again",)
    reason = _why_not(schema, dtypes)
    return (f"its {schema.value_dtype} rows are written as they are: {reason}",) if reason else ()


def _asked(schema: TableSchema, dtypes: Dtypes) -> str | None:
    return dtypes if isinstance(dtypes, str) or dtypes is None else dtypes.get(schema.name)


def _why_not(schema: TableSchema, dtypes: Dtypes) -> str:
    """Why the rows of a table do not become what was asked for; empty where they do, or nothing was."""
    asked = _asked(schema, dtypes)
    if asked is None:
        return ""
    if schema.value_dtype not in FLOATS:
        return f"only floating-point numbers become {asked}"
    bytes_now = schema.dim * numpy_dtype(schema.value_dtype).itemsize
    if asked in QUANTIZED and bytes_of_row(asked, schema.dim) >= bytes_now:
        return f"as {asked} one would take {bytes_of_row(asked, schema.dim)} bytes and not {bytes_now}"
    return ""


def check_dtypes(doing: str, dtypes: Dtypes) -> None:
    """Raise `UsageError` unless rows can become these."""
    for dtype in [dtypes] if isinstance(dtypes, str) else (dtypes or {}).values():
        if dtype not in DTYPES:
            raise UsageError(f"{doing}: got --dtype {dtype}, expected {', '.join(DTYPES)}")


def bytes_of_values(schema: TableSchema, dtypes: Dtypes) -> int:
    """Return how many bytes the numbers of one row take when they are written."""
    dtype = dtype_of(schema, dtypes)
    if dtype in QUANTIZED:
        return bytes_of_row(dtype, schema.dim)
    return schema.dim * numpy_dtype(dtype or schema.value_dtype).itemsize


def cosine_warning(table: str, dtype: str, rounding: Rounding | None) -> str | None:
    """Return what to warn of where the rows of a table point elsewhere than they did; None where they do not."""
    if rounding is None or rounding.mean_cosine >= _BAD_COSINE:
        return None
    return (
        f"table '{table}': as {dtype} its rows have a cosine of {rounding.mean_cosine:.4f} with what they were, on"
        f" average (the least one {rounding.least_cosine:.4f}); a wider --dtype keeps more"
    )


class NarrowTable(CastTable):
    """A table as it is written in `dtype`, one of `DTYPES` or None, which only counts rows that are not finite.

    Rows that become int8 or int4 are given as float32, not rounded yet: whoever writes them encodes them. `rounding`
    tells what the parts that were read with `read_part` lose, `non_finite` how many rows have a NaN or an infinity.
    Slots keep their type, unless `slots_follow`, for whatever has one type for a whole row: then `cost` tells what they
    lose.

    Raises:
        BadInputError: as rows are read: a number is too large for `dtype`, or none that int8 and int4 can be.
    """

    def __init__(self, source: TableReader, dtype: str | None, *, slots_follow: bool = False) -> None:
        self.dtype = dtype
        self.rows_as = dtype if dtype in QUANTIZED else None
        super().__init__(source, value_dtype="float32" if self.rows_as else dtype, slots_follow=slots_follow)
        if dtype is not None:  # whatever the source's rows are stored as, these are not to be that
            self.schema = dataclasses.replace(self.schema, rows_as=None)
        self._counts: dict[int, tuple[RowLoss, int]] = {}
        self._counting = threading.Lock()
        if dtype is None:
            return
        # What missing keys get, of the source and here: made of an initializer, or stored.
        tables = with_default_row(source), with_default_row(self)
        if all(any(extra.name == DEFAULT_ROW for extra in table.schema.extras) for table in tables):
            was, became = (table.extra(DEFAULT_ROW) for table in tables)
            self._check(was[None], became[None], _DEFAULT)

    def stored(self, values: Array) -> Array:
        """Return rows of this table as they lie in a variable: bytes where they are int8 or int4."""
        return encode(values, self.rows_as) if self.rows_as else values

    def read_back(self, values: Array) -> Array:
        """Return what is read of rows of this table when they were stored."""
        return decode(encode(values, self.rows_as), self.rows_as, self.dim) if self.rows_as else values

    def beside(self, rows: Array, whose: str) -> Array:
        """Return rows [n, dim] of the source's type, which belong to the table and are none of its rows, in this type.

        Raises:
            BadInputError: one does not fit; `whose` says what it is.
        """
        became = rounded(rows, self.schema.value_dtype)
        if self.dtype is not None:
            self._check(rows, became, whose)
        return became

    @property
    def rounding(self) -> Rounding | None:
        """What the rows lose; None where they stay as they are."""
        if self.dtype is None or self.dtype == self.source.schema.value_dtype:
            return None
        total = RowLoss()
        for loss, _ in self._counts.values():
            total = total.plus(loss)
        return total.rounding()

    @property
    def cost(self) -> list[ColumnCost]:
        """What each slot that changed its type has lost so far; see `rounding` for the values."""
        return [cost for cost in super().cost if cost.column != "values"]

    @property
    def non_finite(self) -> int:
        """How many rows have a NaN or an infinity."""
        return sum(count for _, count in self._counts.values())

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part; see `TableReader.read_part`."""
        loss, non_finite = RowLoss(), 0
        costs: dict[str, ColumnCost] = {}
        for chunk in self.source.read_part(part, columns, rows, verify):
            cast = self._cast(chunk, costs)
            if chunk.values is not None and cast.values is not None:
                non_finite += int(np.count_nonzero(rows_not_finite(cast.values)))
                if self.rows_as:
                    loss = loss.plus(loss_of(chunk.values, self.read_back(cast.values)))
                elif cast.values.dtype != chunk.values.dtype:
                    loss = loss.plus(loss_of(chunk.values, cast.values))
            yield cast
        # By part, so that a part that is read again is not counted twice.
        with self._counting:
            if columns.values:
                self._counts[part] = loss, non_finite
            if columns.slots:
                self._cost[part] = costs

    def extra(self, name: str) -> Array:
        """Return an extra array; see `CastTable.extra`.

        Raises:
            BadInputError: initial values have a number that is too large.
        """
        array = super().extra(name)
        if self.dtype is not None and are_initial_values(name):
            self._check(self.source.extra(name), array, f"a row of {name}")
        return array

    def _cast(self, chunk: Chunk, costs: dict[str, ColumnCost]) -> Chunk:
        cast = super()._cast(chunk, costs)
        if self.dtype is not None and chunk.values is not None and cast.values is not None:
            self._check(chunk.values, cast.values, "the row of key {}", chunk.keys)
        if self.dtype is not None:
            for name, was in chunk.slots.items():
                if cast.slots[name].dtype != was.dtype:
                    self._check_finite(was, cast.slots[name], f"slot {name} of key {{}}", chunk.keys, _SLOTS_WAY_OUT)
        return cast

    def _check(self, was: Array, became: Array, whose: str, keys: Array | None = None) -> None:
        """Raise `BadInputError` where a finite number of rows [n, dim] became infinite, or one is not what fits."""
        name = self.schema.name
        self._check_finite(was, became, whose, keys, "write another type, or drop such rows")
        unfit = first_unfit(became) if self.rows_as and whose != _DEFAULT else None
        if unfit is not None:
            what = "NaN or infinity" if rows_not_finite(became[unfit : unfit + 1])[0] else "numbers 3.3e+38 apart"
            row = whose.format(None if keys is None else keys[unfit])
            raise BadInputError(
                f"writing table '{name}' as {self.dtype}: {row} has {what}, which {self.dtype}"
                " does not hold; write another type, or drop such rows"
            )

    def _check_finite(self, was: Array, became: Array, whose: str, keys: Array | None, way_out: str) -> None:
        lost = np.isinf(became) & np.isfinite(was) if rows_not_finite(became).any() else np.zeros((0, 1), np.bool_)
        rows = np.flatnonzero(any_in_row(lost))
        if len(rows):
            number = float(was[rows[0]][lost[rows[0]]][0])
            row = whose.format(None if keys is None else keys[rows[0]])
            raise BadInputError(
                f"writing table '{self.schema.name}' as {self.dtype}: {row} has {number:g}, which would become"
                f" infinite, expected at most {_LARGEST.get(str(self.dtype), '3.40e+38')} in size; {way_out}"
            )


def check_fits(
    checkpoint: Checkpoint, choices: Sequence[Choice], dtypes: Dtypes, *, progress: Progress | None = None
) -> None:
    """Read the rows that were chosen of each table, as they are read to be written, and write nothing.

    Raises:
        BadInputError: a row has a number that its type does not hold.
    """
    for choice in choices:
        table = checkpoint.tables[choice.table]
        dtype = dtype_of(table.schema, dtypes)
        if dtype is None or dtype == table.schema.value_dtype:
            continue
        done = 0
        for chunk in NarrowTable(MaskedTable(table, choice.mask), dtype).chunks(KEYS_AND_VALUES):
            done += len(chunk.keys)
            if progress:
                progress(choice.table, done, choice.kept)
