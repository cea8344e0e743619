"""Give values, slots and keys of tables another type, and say what that costs.

Numbers are rounded to the nearest of the new type, and to the one with an even last bit where two are equally near
(IEEE 754, the way TensorFlow and NumPy round).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtools.default_row import constant_row
from kvtools.dialects.chunk import KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import Progress
from kvtools.dialects.schema import ExtraSchema, has_values_dtype, numpy_dtype
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, UsageError
from kvtools.migrate import Account, write_tables
from kvtools.shown_tables import counted
from kvtools.table_view import TableView, changed_tables, replace_schema

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int16", "int8")
KEYS = ("int64", "int32", "uint64", "uint32")
_KEY_EXTRAS = ("blacklist", "filtered_keys", "deleted_keys")


@dataclass(frozen=True)
class ColumnCost:
    """What a cast did to a column, "values" or "slot <name>", or to what new rows begin with: "initial values",
    "initial values of slot <name>", "default row".

    `max_error` is the largest absolute difference between a number and what became of it; numbers that were or
    became infinite or NaN do not count. `overflowed` finite numbers became infinite, and `vanished` ones zero.
    """

    column: str
    was: str
    became: str
    max_error: float = 0.0
    overflowed: int = 0
    vanished: int = 0

    def plus(self, other: ColumnCost) -> ColumnCost:
        """Return the cost of both."""
        return dataclasses.replace(
            self,
            max_error=max(self.max_error, other.max_error),
            overflowed=self.overflowed + other.overflowed,
            vanished=self.vanished + other.vanished,
        )


class CastTable(TableView):
    """A table in other types. `cost` tells what the parts that were read with `read_part` have lost.

    Slots that have the values' type go on having it, unless `slot_dtype` or not `slots_follow`.
    """

    def __init__(
        self,
        source: TableReader,
        *,
        value_dtype: str | None = None,
        slot_dtype: str | None = None,
        key_dtype: str | None = None,
        slots_follow: bool = True,
    ) -> None:
        schema = source.schema
        doing = f"casting table '{schema.name}'"
        value = _number_type(doing, "values", schema.value_dtype, value_dtype)
        slots = []
        for slot in schema.slots:
            # Some engines have one type for a whole row.
            wanted = slot_dtype or (value if slots_follow and slot.dtype == schema.value_dtype else None)
            slots.append(dataclasses.replace(slot, dtype=_number_type(doing, f"slot {slot.name}", slot.dtype, wanted)))
        if key_dtype is not None and key_dtype not in KEYS:
            raise UsageError(f"{doing}: got key type '{key_dtype}', expected {' or '.join(KEYS)}")
        key = key_dtype or schema.key_dtype
        extras = tuple(_extra(extra, key, value) for extra in schema.extras)
        super().__init__(
            source,
            replace_schema(source, value_dtype=value, slots=tuple(slots), key_dtype=key, extras=extras),
        )
        self._cost: dict[int, dict[str, ColumnCost]] = {}
        self._cost_beside: dict[str, ColumnCost] = {}
        self._count_constants()

    @property
    def cost(self) -> list[ColumnCost]:
        """What each column that changed its type has lost so far, and what new rows begin with where that became
        infinite or zero."""
        total: dict[str, ColumnCost] = {}
        for part in self._cost.values():
            for column, cost in part.items():
                total[column] = total[column].plus(cost) if column in total else cost
        beside = [cost for cost in self._cost_beside.values() if cost.overflowed or cost.vanished]
        return [*total.values(), *beside]

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part in their new types; see `TableReader.read_part`."""
        costs: dict[str, ColumnCost] = {}
        for chunk in self.source.read_part(part, columns, rows, verify):
            yield self._cast(chunk, costs)
        if columns.values or columns.slots:
            # By part, so that a part that is read again is not counted twice.
            self._cost[part] = {**self._cost.get(part, {}), **costs}

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        return self._cast(self.source.take(rows, columns), {})

    def extra(self, name: str) -> Array:
        """Return an extra array, keys and initial values in their new types."""
        array = self.source.extra(name)
        if name in _KEY_EXTRAS:
            return self._keys(array)
        if has_values_dtype(name) and array.dtype == numpy_dtype(self.source.schema.value_dtype):
            costs: dict[str, ColumnCost] = {}  # of this array once, however often it is read
            array = self._priced(array, self.schema.value_dtype, name.replace("_", " "), costs)
            self._cost_beside |= costs
        return array

    def _count_constants(self) -> None:
        """Count what becomes of the numbers that new rows and slots begin with, where each has only one."""
        of = self.source.schema
        told = of.metadata.get("slots")
        described = told if isinstance(told, Mapping) else {}
        initializer = of.metadata.get("initializer")
        constants = [("initial values", of.value_dtype, self.schema.value_dtype, initializer, "kind", "a")]
        for before, after in zip(of.slots, self.schema.slots, strict=True):
            column = f"initial values of slot {before.name}"
            constants.append((column, before.dtype, after.dtype, described.get(before.name), "init", "constant"))
        for column, was, became, record, kind, number in constants:
            if not isinstance(record, Mapping) or record.get(kind) != "constant" or was not in FLOATS:
                continue
            row = constant_row(record.get(number, 0.0), was, 1)
            if row is not None and was != became:
                self._priced(row, became, column, self._cost_beside)

    def _cast(self, chunk: Chunk, costs: dict[str, ColumnCost]) -> Chunk:
        values = chunk.values
        if values is not None:
            values = self._priced(values, self.schema.value_dtype, "values", costs, chunk.keys)
        dtypes = {slot.name: slot.dtype for slot in self.schema.slots}
        slots = {
            name: self._priced(slot, dtypes[name], f"slot {name}", costs, chunk.keys)
            for name, slot in chunk.slots.items()
        }
        return dataclasses.replace(chunk, keys=self._keys(chunk.keys), values=values, slots=slots)

    def _priced(
        self, numbers: Array, dtype: str, column: str, costs: dict[str, ColumnCost], keys: Array | None = None
    ) -> Array:
        """Return `numbers` as `dtype` and add what that cost to `costs`; rows of `keys` [n], if they are rows."""
        wanted = numpy_dtype(dtype)
        if numbers.dtype == wanted:
            return numbers
        if wanted.kind in "iu":
            self._check_whole(numbers, wanted, column, keys)
            return numbers.astype(wanted)
        result = rounded(numbers, dtype)
        cost = ColumnCost(column, numbers.dtype.name, dtype)
        if not np.can_cast(numbers.dtype, wanted, "safe") or numbers.dtype.kind in "iu":
            cost = dataclasses.replace(cost, **_lost(numbers, result))
        costs[column] = costs[column].plus(cost) if column in costs else cost
        return result

    def _check_whole(self, numbers: Array, wanted: np.dtype[Any], column: str, keys: Array | None) -> None:
        limits = np.iinfo(wanted)
        if not numbers.size or (limits.min <= int(numbers.min()) and int(numbers.max()) <= limits.max):
            return
        at = np.unravel_index(int(np.argmax((numbers < limits.min) | (numbers > limits.max))), numbers.shape)
        of_key = "" if keys is None else f" of key {keys[at[0]]}"
        raise BadInputError(
            f"casting table '{self.schema.name}': {column}{of_key}: {numbers[at]} does not fit {wanted}, expected"
            f" {limits.min} to {limits.max}; choose a wider type"
        )

    def _keys(self, keys: Array) -> Array:
        wanted = np.iinfo(self.schema.key_dtype)
        if keys.dtype == wanted.dtype:
            return keys
        if len(keys):
            low, high = int(keys.min()), int(keys.max())
            if low < wanted.min or high > wanted.max:
                raise BadInputError(
                    f"casting table '{self.schema.name}': key {low if low < wanted.min else high} does not fit"
                    f" {wanted.dtype}, expected {wanted.min} to {wanted.max}; drop such rows, see `kvtools clip`, or"
                    " choose a wider --to-key-dtype"
                )
        return keys.astype(wanted.dtype)


def cast(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    *,
    value_dtype: str | None = None,
    slot_dtype: str | None = None,
    key_dtype: str | None = None,
    to: str | None = None,
    tables: Sequence[str] = (),
    options: WriteOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[Account, dict[str, list[ColumnCost]]]:
    """Write a checkpoint whose tables have other types.

    Args:
        checkpoint: what to read.
        output: where to write it.
        value_dtype: the type of the values: float64, float32, float16, bfloat16, or for whole numbers int8 to int64.
        slot_dtype: the type of the optimizer slots; that of the values where the slots have it now.
        key_dtype: the type of the keys: int64, int32, uint64 or uint32.
        to: the dialect to write; that of `checkpoint` if None.
        tables: which tables to change; all if empty. The others, and the dense variables, are written as they are.
        options: what to ask of the writer.
        workers: how many parts to work on at once.
        progress: called as rows are written.

    Returns:
        The account, and by table what each column that changed its type has lost.

    Raises:
        UsageError: a type that is none, or a cast that makes no sense.
        BadInputError: a key, or a whole number, that the new type does not hold.
        OutputError: `output` exists, or cannot be written.

    Example:
        ```python
        account, costs = cast(kvtools.open("model.ckpt-100"), "half.ckpt-100", value_dtype="bfloat16")
        print(costs["user_emb"][0].max_error)
        ```
    """
    if not (value_dtype or slot_dtype or key_dtype):
        raise UsageError(f"casting '{checkpoint.path}': nothing says to which type; see `kvtools cast --help`")
    casts: list[CastTable] = []

    def change(table: TableReader) -> TableReader:
        casts.append(CastTable(table, value_dtype=value_dtype, slot_dtype=slot_dtype, key_dtype=key_dtype))
        return casts[-1]

    account = write_tables(
        changed_tables(checkpoint, tables, change),
        output,
        to or checkpoint.dialect,
        beside=checkpoint,
        options=options,
        workers=workers,
        progress=progress,
    )
    costs = {table.schema.name: table.cost for table in casts}
    return with_losses(account, {name: losses_of(of_table) for name, of_table in costs.items()}), costs


def losses_of(costs: Sequence[ColumnCost]) -> list[str]:
    """Say what a table's account calls lost, of what each column lost.

    >>> losses_of([ColumnCost("values", "float32", "float16", max_error=0.5, overflowed=2)])
    ['the exact numbers: they are rounded to float16', '2 numbers, which became infinite']
    >>> losses_of([ColumnCost("values", "float16", "float32")])
    []
    """
    types = sorted({cost.became for cost in costs if cost.max_error or cost.overflowed or cost.vanished})
    lines = [f"the exact numbers: they are rounded to {' and '.join(types)}"] * bool(types)
    for what, count in (
        ("infinite", sum(cost.overflowed for cost in costs)),
        ("zero", sum(cost.vanished for cost in costs)),
    ):
        lines += [f"{counted(count, 'number')}, which became {what}"] * bool(count)
    return lines


def with_losses(account: Account, losses: Mapping[str, Sequence[str]]) -> Account:
    """Return an account that tells of some tables, by name, more that is left out."""
    tables = tuple(
        dataclasses.replace(table, losses=(*table.losses, *losses.get(table.name, ()))) for table in account.tables
    )
    return dataclasses.replace(account, tables=tables)


def rounded(numbers: Array, dtype: str) -> Array:
    """Return `numbers` as `dtype`, each rounded once, to nearest even; what is too large becomes infinite.

    >>> rounded(np.array([65519.9, 65520.0]), "float16").tolist()
    [65504.0, inf]
    """
    wanted = numpy_dtype(dtype)
    if numbers.dtype == wanted:
        return numbers
    if wanted.itemsize == 2 and numbers.dtype.kind in "iu":
        numbers = numbers.astype(np.float64)  # exact but beyond 2**53; NumPy's own way is by float32
    if dtype == "bfloat16" and numbers.dtype == np.float64:
        numbers = _odd_float32(numbers)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return numbers.astype(wanted)


def _odd_float32(numbers: Array) -> Array:
    """Return float32 numbers that round to bfloat16 as these float64 numbers do.

    By way of the nearest float32 a number could be rounded twice, first to a tie and then off it. Rounded towards
    zero with the last bit set where anything was lost, it stays on the side of the tie where it was
    (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        nearest = numbers.astype(np.float32)
        exact = nearest.astype(np.float64)
    lost = (exact != numbers) & np.isfinite(numbers)
    beyond = np.abs(exact) > np.abs(numbers)
    odd = (nearest.view(np.uint32) - beyond.astype(np.uint32)) | np.uint32(1)
    return np.where(lost, odd.view(np.float32), nearest)


def _lost(numbers: Array, result: Array) -> dict[str, Any]:
    # The difference between a number and its rounding is itself a number of the wider type.
    wide: Any = np.float32 if numbers.dtype.itemsize <= 4 and numbers.dtype.kind not in "iu" else np.float64
    if numbers.dtype in (np.int64, np.uint64):
        wide = np.longdouble
    before = numbers.astype(wide, copy=False)
    after = result.astype(wide, copy=False)
    with np.errstate(invalid="ignore", over="ignore"):
        error = np.abs(after - before)
    largest = error.max(initial=0)
    overflowed = 0
    if not np.isfinite(largest):
        finite = np.isfinite(error)
        overflowed = int(np.count_nonzero(~finite & np.isfinite(before)))
        largest = error.max(initial=0, where=finite)
    vanished = int(np.count_nonzero((after == 0) & (before != 0)))
    return {"max_error": float(largest), "overflowed": overflowed, "vanished": vanished}


def _number_type(doing: str, what: str, was: str, wanted: str | None) -> str:
    if wanted is None or wanted == was:
        return was
    if wanted not in FLOATS + INTEGERS:
        raise UsageError(f"{doing}: got type '{wanted}' for {what}, expected one of {', '.join(FLOATS + INTEGERS)}")
    if was not in (*FLOATS, *INTEGERS, "bool"):
        raise BadInputError(
            f"{doing}: {what} are {was}, which are no numbers to cast; leave the table out with --table"
        )
    if wanted in INTEGERS and was in FLOATS:
        raise UsageError(
            f"{doing}: {what} are {was}; as {wanted} they would lose everything behind the point, which is no cast;"
            f" expected one of {', '.join(FLOATS)}"
        )
    return wanted


def _extra(extra: ExtraSchema, key_dtype: str, value_dtype: str) -> ExtraSchema:
    if extra.name in _KEY_EXTRAS:
        return dataclasses.replace(extra, dtype=key_dtype)
    return dataclasses.replace(extra, dtype=value_dtype) if has_values_dtype(extra.name) else extra
