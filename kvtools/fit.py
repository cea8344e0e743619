"""Turn a table into what a dialect can hold, and name what is lost on the way."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from numbers import Rational
from typing import Any

import numpy as np

from kvtools.admission_filter import can_join, filters_of, joined_filter
from kvtools.dialects.chunk import KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.dialect import Dialect, Holds
from kvtools.dialects.interface import TableReader, Unmatched
from kvtools.dialects.schema import (
    ADMISSION_FILTER,
    INITIAL_VALUES,
    ROW_EXTRAS,
    ExtraSchema,
    SlotSchema,
    TableSchema,
    VersionUnit,
    has_values_dtype,
    initial_values_of,
    numpy_dtype,
    part_of_initial_values,
)
from kvtools.errors import BadInputError
from kvtools.quantized_rows import inexact, stored_row_bytes

_ROW_LOSS = (
    "eviction scores: they are not carried along; a variable with a max_capacity that restores the table"
    " starts from its frequencies or versions"
)
_BOUNDS = ("max_capacity", "eviction", "epoch")
"""What a policy records of what a table evicts by: of no use without the scores."""
_PART_RECORDS = "part_records"
_SECONDS_PER_DAY = 86_400
_KEYS_WITHIN = {
    "int32": ("int64",),
    "uint32": ("uint64", "int64"),
    "int64": (),
    "uint64": (),
}
_VALUES_WITHIN = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
    "int8": ("int32", "int64", "float32", "float64"),
    "int32": ("int64", "float64"),
    "bool": ("int8",),
}
"""The types that hold every number of another one exactly."""


@dataclass(frozen=True)
class Fit:
    """How a table becomes one that a dialect holds.

    `schema` is what will be written; `losses` say what of the source will not be, one sentence each; `changes` say
    what is written in another form without loss. `joins_filters`: each part gets the filters of admission of all.
    """

    source: TableSchema
    schema: TableSchema
    losses: tuple[str, ...]
    changes: tuple[str, ...]
    joins_filters: bool = False

    def convert(self, chunk: Chunk) -> Chunk:
        """Return a chunk of the source as the target's columns; raises `BadInputError` for a number out of range."""
        schema = self.schema
        return Chunk(
            keys=self._integers(chunk.keys, schema.key_dtype, "key"),
            values=None if chunk.values is None else as_type(chunk.values, schema.value_dtype),
            slots={slot.name: as_type(chunk.slots[slot.name], slot.dtype) for slot in schema.slots if chunk.slots},
            freqs=self._counter(chunk.freqs, schema.freq_dtype),
            versions=self._versions(chunk.versions),
            part=chunk.part,
        )

    def cut_freqs(self, chunk: Chunk) -> int:
        """Return how many frequencies of a chunk of the source `convert` has to cut to the target's range."""
        if chunk.freqs is None or self.schema.freq_dtype is None or chunk.freqs.dtype == self.schema.freq_dtype:
            return 0
        limits = np.iinfo(self.schema.freq_dtype)
        return int(np.count_nonzero(chunk.freqs > limits.max) + np.count_nonzero(chunk.freqs < limits.min))

    def extra(self, name: str, reader: TableReader) -> Array:
        """Return an extra array of the source, in the target's type."""
        if self.joins_filters and name.startswith(ADMISSION_FILTER):
            return joined_filter([reader])
        dtype = next(extra.dtype for extra in self.schema.extras if extra.name == name)
        return as_type(reader.extra(name), dtype)

    def keys(self, keys: Array) -> Array:
        """Return keys of the source in the target's type."""
        return self._integers(keys, self.schema.key_dtype, "key")

    def _counter(self, freqs: Array | None, dtype: str | None) -> Array | None:
        if freqs is None or dtype is None or freqs.dtype == dtype:
            return freqs if dtype else None
        # A count that does not fit stays at the largest that does; `cut_freqs` says how many those are.
        target, own = np.iinfo(dtype), np.iinfo(freqs.dtype)  # NumPy 2.0 takes no bound that its type does not hold
        return np.clip(freqs, max(target.min, own.min), min(target.max, own.max)).astype(dtype)

    def _versions(self, versions: Array | None) -> Array | None:
        if versions is None or self.schema.version_dtype is None:
            return None
        units = (self.source.version_unit, self.schema.version_unit)
        if units == ("days", "seconds"):
            return self._integers(versions, self.schema.version_dtype, "version", times=_SECONDS_PER_DAY)
        if units == ("seconds", "days"):
            versions = versions.astype(np.int64) // _SECONDS_PER_DAY
        return self._integers(versions, self.schema.version_dtype, "version")

    def _integers(self, numbers: Array, dtype: str, what: str, *, times: int = 1) -> Array:
        if numbers.dtype == dtype and times == 1:
            return numbers
        wanted = np.iinfo(dtype)
        least, largest = (int(numbers.min()) * times, int(numbers.max()) * times) if len(numbers) else (0, 0)
        if not (wanted.min <= least and largest <= wanted.max):
            worst = least if least < wanted.min else largest
            raise BadInputError(
                f"writing table '{self.source.name}' as {self.schema.dialect}: {what} {worst} does not fit {dtype},"
                f" expected {wanted.min} to {wanted.max}; drop such rows, or write another dialect"
            )
        return (numbers if times == 1 else numbers.astype(np.int64) * times).astype(dtype)


def fit(source: TableSchema, dialect: Dialect, *, parts: int | None = None) -> Fit:
    """Return how a table of schema `source` is written in `dialect`.

    Args:
        source: the table.
        dialect: the target; it has a writer.
        parts: how many parts to write; as many as the source has if None. `Fit.schema.part_rows` then still has to be
            counted by whoever routes the rows: it holds the source's rows in its first part.

    Raises:
        BadInputError: a type that the dialect has not, and no other that holds it exactly.
    """
    holds = dialect.holds
    losses: list[str] = []
    changes: list[str] = []
    doing = f"writing table '{source.name}' as {dialect.name}"
    key_dtype = _fitting(source.key_dtype, holds.key_dtypes, _KEYS_WITHIN)
    if key_dtype is None and source.key_dtype in ("uint64", "int64") and holds.key_dtypes:
        key_dtype = "int64" if "int64" in holds.key_dtypes else holds.key_dtypes[0]
    if key_dtype is None:
        raise BadInputError(f"{doing}: its keys are {source.key_dtype}, expected {' or '.join(holds.key_dtypes)}")
    if key_dtype != source.key_dtype:
        changes.append(f"keys were {source.key_dtype}, are {key_dtype}")

    def value_type(dtype: str, allowed: tuple[str, ...], what: str) -> str:
        fitting = _fitting(dtype, allowed, _VALUES_WITHIN)
        if fitting is None:
            raise BadInputError(
                f"{doing}: {what} is {dtype}, expected {' or '.join(allowed)}; cast it first, see `kvtools cast`"
            )
        if fitting != dtype:
            changes.append(f"{what} was {dtype}, is {fitting}, which holds it exactly")
        return fitting

    value_dtype = value_type(source.value_dtype, holds.value_dtypes, "its value")
    slots: list[SlotSchema] = []
    if source.slots and not holds.slots:
        losses.append(f"optimizer slots {', '.join(slot.name for slot in source.slots)}: the dialect has none")
    for slot in source.slots if holds.slots else ():
        if holds.slot_width_is_dim and slot.width != source.dim:
            losses.append(f"slot {slot.name}: it is {slot.width} wide, the dialect's slots are as wide as the value")
            continue
        if holds.only_slots is not None:
            if slot in holds.only_slots:
                slots.append(slot)
            else:
                there = ", ".join(f"{one.name} of {one.width} {one.dtype}" for one in holds.only_slots)
                losses.append(f"slot {slot.name}: the dialect has a place for {there} only")
            continue
        slot_dtypes = (value_dtype,) if holds.slot_dtype_is_value else holds.slot_dtypes or holds.value_dtypes
        if holds.slot_dtype_is_value and _fitting(slot.dtype, slot_dtypes, _VALUES_WITHIN) is None:
            raise BadInputError(
                f"{doing}: slot {slot.name} is {slot.dtype}, expected {value_dtype}: {dialect.name} has one type for"
                " values and slots; `kvtools cast` makes them of one (--to-value-dtype and --to-slot-dtype), and other"
                " dialects, such as --to hdf5, keep two"
            )
        dtype = value_type(slot.dtype, slot_dtypes, f"slot {slot.name}")
        slots.append(SlotSchema(slot.name, slot.width, dtype))
    freq_dtype = _counter_type(source.freq_dtype, holds.freq_dtypes, "frequencies", losses, changes)
    version_dtype, unit = _version_type(source, holds, losses, changes)
    wanted = source.parts if parts is None else parts
    by_row = [extra for extra in source.extras if extra.name.startswith(ROW_EXTRAS)]
    # Written as training would write it: what is of a part stays with it, as long as the parts are the same.
    whole = _PART_RECORDS in source.metadata and wanted == source.parts
    whole = whole and holds.metadata is not None and _PART_RECORDS in holds.metadata
    if by_row and not whole:
        losses.append(_ROW_LOSS)
    of_parts = [e for e in source.extras if whole and e.name.startswith((*ROW_EXTRAS, ADMISSION_FILTER))]
    others = [extra for extra in source.extras if extra not in by_row and extra not in of_parts]
    joins_filters = not whole and bool(filters_of(source)) and _holds_filters(holds)
    if joins_filters:
        filters = [extra for extra in others if extra.name.startswith(ADMISSION_FILTER)]
        others = [extra for extra in others if extra not in filters]
        if can_join([source]):
            of_parts = [dataclasses.replace(filters[0], name=f"{ADMISSION_FILTER}{part}") for part in range(wanted)]
        else:
            losses.append(
                "admission filters: the source does not record their admission, or they are of different sizes"
            )
    extras = (*_extras(others, holds, wanted, losses), *of_parts)
    # New rows are copied from these: they are of the rows' type.
    extras = tuple(
        dataclasses.replace(extra, dtype=value_dtype)
        if has_values_dtype(extra.name) and extra.dtype == source.value_dtype
        else extra
        for extra in extras
    )
    metadata = _metadata(source, dialect, {slot.name for slot in slots}, losses)
    if not whole:
        metadata.pop(_PART_RECORDS, None)
    if not holds.many_parts and wanted > 1:
        changes.append(f"{wanted} parts became one, the dialect has no parts")
        wanted = 1
    if not holds.empty_dim and source.rows == 0:
        losses.append(f"the width {source.dim}: the dialect does not record it, and there are no rows to tell it")
    metadata |= _policies(source, dialect, wanted, unit, losses)
    part_rows = source.part_rows if wanted == source.parts else (source.rows, *[0] * (wanted - 1))
    schema = dataclasses.replace(
        source,
        dialect=dialect.name,
        key_dtype=key_dtype,
        value_dtype=value_dtype,
        part_rows=part_rows,
        slots=tuple(slots),
        freq_dtype=freq_dtype,
        version_dtype=version_dtype,
        version_unit=unit,
        partition=_partition(source, holds, wanted),
        checksums=None,
        extras=extras,
        metadata=metadata,
        notes=(),
        rows_as=None,
    )
    schema = dataclasses.replace(schema, bytes=schema.rows * written_row_bytes(schema, dialect))
    return Fit(source, schema, tuple(losses), tuple(changes), joins_filters)


def written_row_bytes(schema: TableSchema, dialect: Dialect) -> int:
    """Return how many bytes a row of a fitted table takes in `dialect`: its key and every column, uncompressed.

    What is there once, a header or an index, is not counted.
    """
    size = stored_row_bytes(schema)
    if dialect.holds.key_bytes is not None:
        size += dialect.holds.key_bytes - numpy_dtype(schema.key_dtype).itemsize
    return size


def as_rows_of(fitted: Fit, dialect: Dialect, rows_as: str | None) -> Fit:
    """Return the fit of a table whose rows are written as "int8" or "int4", and that they are not exact then."""
    if rows_as is None or numpy_dtype(fitted.schema.value_dtype).kind in "iub":
        return fitted
    schema = dataclasses.replace(fitted.schema, rows_as=rows_as)
    schema = dataclasses.replace(schema, bytes=schema.rows * written_row_bytes(schema, dialect))
    return dataclasses.replace(fitted, schema=schema, losses=(*fitted.losses, inexact(rows_as)))


def without_row_extras(fitted: Fit) -> Fit:
    """Return the fit of a table whose rows do not stay in their order: what has a number for each row is left out."""
    kept = tuple(extra for extra in fitted.schema.extras if not extra.name.startswith(ROW_EXTRAS))
    if len(kept) == len(fitted.schema.extras):
        return fitted
    schema = dataclasses.replace(fitted.schema, extras=kept)
    return dataclasses.replace(fitted, schema=schema, losses=(*fitted.losses, _ROW_LOSS))


def _extras(extras: Sequence[ExtraSchema], holds: Holds, parts: int, losses: list[str]) -> tuple[ExtraSchema, ...]:
    """Return the extra arrays that are kept, and name the others."""
    of_parts = {extra.name: part for extra in extras if (part := part_of_initial_values(extra.name)) is not None}
    kept = tuple(extra for extra in extras if holds.extras is None or extra.name in holds.extras)
    # Initial values of single parts are of use where none of these parts is missing.
    if (
        holds.extras is not None
        and initial_values_of("<part>") in holds.extras
        and max(of_parts.values(), default=0) < parts
    ):
        kept = tuple(extra for extra in extras if extra in kept or extra.name in of_parts)
    lost = [extra for extra in extras if extra not in kept]
    losses += [
        f"{extra.name.replace('_', ' ')} {list(extra.shape)}: the dialect has no place for them"
        for extra in lost
        if extra.name not in of_parts and 0 not in extra.shape
    ]
    parts_lost = [str(of_parts[extra.name]) for extra in lost if extra.name in of_parts]
    if parts_lost:
        instead = (
            "new rows of all parts start from those of one"
            if any(e.name == INITIAL_VALUES for e in kept)
            else ("the dialect has no place for them")
        )
        losses.append(f"initial values of part{'s' * (len(parts_lost) > 1)} {', '.join(parts_lost)}: {instead}")
    return kept


def as_type(numbers: Array, dtype: str) -> Array:
    """Return `numbers` as `dtype`, copying only where the type differs.

    >>> as_type(np.float32([1.5]), "bfloat16").dtype.name
    'bfloat16'
    """
    wanted = numpy_dtype(dtype)
    return numbers if numbers.dtype == wanted else numbers.astype(wanted)


def _partition(source: TableSchema, holds: Holds, parts: int) -> str | None:
    if holds.partition is not None:
        return holds.partition(source) if callable(holds.partition) else holds.partition
    return source.partition if parts == source.parts else source.partition or "floor_mod"


def _fitting(dtype: str, allowed: tuple[str, ...], within: dict[str, tuple[str, ...]]) -> str | None:
    if dtype in allowed:
        return dtype
    return next((wider for wider in within.get(dtype, ()) if wider in allowed), None)


def _counter_type(
    dtype: str | None, allowed: tuple[str, ...], what: str, losses: list[str], changes: list[str]
) -> str | None:
    if dtype is None:
        return None
    if not allowed:
        losses.append(f"{what}: the dialect has none")
        return None
    if dtype in allowed:
        return dtype
    chosen = max(allowed, key=lambda name: int(np.iinfo(name).max)) if len(allowed) > 1 else allowed[0]
    changes.append(f"{what} were {dtype}, are {chosen}")
    return chosen


def _version_type(
    source: TableSchema, holds: Holds, losses: list[str], changes: list[str]
) -> tuple[str | None, VersionUnit]:
    allowed, units = holds.version_dtypes, holds.version_units
    if source.version_dtype is None:
        return None, "unknown"
    if not allowed:
        losses.append("versions: the dialect has none")
        return None, "unknown"
    dtype = source.version_dtype if source.version_dtype in allowed else allowed[0]
    unit = source.version_unit
    if units is not None and unit not in units:
        if unit == "days" and "seconds" in units:
            unit = "seconds"
            changes.append("versions were days, are seconds")
        elif unit == "seconds" and "days" in units:
            unit = "days"
            losses.append("the time of day of versions: the dialect counts days")
        else:
            losses.append(f"versions: they count {unit}, the dialect's count {' or '.join(units)}")
            return None, "unknown"
    if unit == "unknown" and holds.unknown_versions_are is not None:
        unit = holds.unknown_versions_are
        changes.append(
            f"versions, which do not say what they count, are taken for {unit}, of which nobody knows since when; see"
            " `kvtools migrate --version-unit`"
        )
    return dtype, unit


def _metadata(source: TableSchema, dialect: Dialect, slots: Collection[str], losses: list[str]) -> dict[str, Any]:
    metadata = dict(source.metadata)
    if isinstance(described := metadata.get("slots"), dict):
        metadata["slots"] = _beginnings(described, dialect.holds, slots, losses)
        if described and not metadata["slots"]:
            del metadata["slots"]
    metadata.pop("policies", None)  # see `_policies`
    if dialect.holds.metadata is None:
        return metadata
    kept = {name: value for name, value in metadata.items() if name in dialect.holds.metadata}
    if source.dialect != dialect.name:
        kept.pop("object_path", None)
    for name in metadata:
        if name == "initializer" and name not in kept:
            losses.append("the initializer of new rows: the dialect does not record it")
        if name == "increment" and name not in kept:
            losses.append("that it is an increment, of the rows that changed: the dialect does not record it")
        if name == "shard" and name not in kept:
            losses.append("which shard of a table it is: the dialect does not record it")
    return kept


def _holds_filters(holds: Holds) -> bool:
    """Tell whether a dialect has a filter of admission for each of the parts that are written, and no others."""
    return holds.extras is not None and f"{ADMISSION_FILTER}<part>" in holds.extras


def _policies(
    source: TableSchema, dialect: Dialect, parts: int, unit: VersionUnit, losses: list[str]
) -> dict[str, Any]:
    """Return the policies that are kept, as of one of so many parts, in a dictionary; name what is lost of them."""
    told = source.metadata.get("policies")
    if not isinstance(told, dict):
        return {}
    kept = {name: value for name, value in told.items() if name not in _BOUNDS}
    if unit != "steps":  # versions are left out: there is nothing to count
        kept = {name: value for name, value in kept.items() if name not in ("versions", "step")}
    if isinstance(expiry := kept.get("expiry"), list):
        kept["expiry"] = [of_part(policy, source.parts, parts) for policy in expiry]
    if dialect.holds.metadata is None or "policies" in dialect.holds.metadata:
        return {"policies": kept} if kept else {}
    if "step" in kept:
        losses.append(f"the step {kept['step']} that ages of rows are counted from: the dialect does not record it")
    names = [name for name in ("admission", "expiry", "padding_key") if name in kept]
    if names:
        losses.append(f"policies ({', '.join(names)}): the dialect does not record them")
    return {}


def of_part(policy: Any, before: int, parts: int) -> Any:
    """Return a policy of expiry as one of so many parts records it: its share of the rows that are kept, rounded up."""
    rows = policy.get("rows") if isinstance(policy, dict) else None
    return {**policy, "rows": math.ceil(Fraction(rows) * before / parts)} if isinstance(rows, Rational) else policy


def _beginnings(
    described: Mapping[str, Any], holds: Holds, slots: Collection[str], losses: list[str]
) -> dict[str, Any]:
    """Return what is kept of how slots of new rows begin; name the rest for those of `slots`, which are kept: of
    others, all is left out."""
    held = holds.slot_inits if holds.metadata is None or "slots" in holds.metadata else frozenset()
    kept: dict[str, Any] = {}
    for name, record in described.items():
        told = record if isinstance(record, dict) else {}
        init, number = told.get("init", "constant"), told.get("constant", 0.0)
        if init in held:
            kept[name] = record
        elif name not in slots:
            continue
        elif init == "copy_value":
            losses.append(f"initial values of slot {name}: a copy of the value, which the dialect does not record")
        elif init != "constant":
            losses.append(f"initial values of slot {name}: no more than one number is kept of them")
        elif number != 0:  # where nothing is recorded, slots of new rows are read as zeros
            losses.append(f"initial values of slot {name}, {number}: the dialect does not record them")
    return kept


class FittedTable(TableReader):
    """A table as it is written: the rows of `reader`, in its order and parts, converted by `fit`."""

    def __init__(self, reader: TableReader, fit: Fit) -> None:
        self._reader = reader
        self._fit = fit
        self.schema = dataclasses.replace(
            fit.schema, part_rows=reader.schema.part_rows, checksums=reader.schema.checksums
        )

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the converted rows of one part; see `TableReader.read_part`."""
        for chunk in self._reader.read_part(part, columns, rows, verify):
            yield self._fit.convert(chunk)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy converted rows; see `TableReader.take`."""
        return self._fit.convert(self._reader.take(rows, columns))

    def extra(self, name: str) -> Array:
        """Return a converted extra array; see `TableReader.extra`."""
        return self._fit.extra(name, self._reader)

    def unmatched(self) -> Unmatched:
        """Return what of the reader's slots does not fit its rows; see `TableReader.unmatched`."""
        return self._reader.unmatched()
