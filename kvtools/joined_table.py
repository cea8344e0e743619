"""Several tables as one, part after part: what `kvtools merge` reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvtools.admission_filter import can_join, joined_filter
from kvtools.dialects.chunk import KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import TableReader
from kvtools.dialects.schema import (
    ADMISSION_FILTER,
    ExtraSchema,
    SlotSchema,
    TableSchema,
    are_initial_values,
    numpy_dtype,
    row_bytes,
)
from kvtools.errors import BadInputError

_FILTERED = ("filtered_keys", "filtered_freqs", "filtered_versions")
_ADDED_UP = ("blacklist", "deleted_keys", *_FILTERED)


class JoinedTable(TableReader):
    """The parts of several tables of one schema as the parts of one.

    Args:
        name: the name of the whole.
        sources: the tables, in order; row numbers count along them.
        labels: what to call each in an error: its file, and its table.
        common: leave out the columns that not all of them have, instead of refusing.

    Raises:
        BadInputError: the tables do not agree; the message says in what, and where.
    """

    def __init__(self, name: str, sources: Sequence[TableReader], labels: Sequence[str], *, common: bool) -> None:
        self.sources = tuple(sources)
        self.labels = tuple(labels)
        self.schema = _joined_schema(name, [source.schema for source in sources], labels, common)
        self._places = [(source, part) for source in sources for part in range(source.parts)]
        self.first_rows = np.cumsum([0, *(source.rows for source in sources)])

    def source_of(self, rows: Array) -> Array:
        """Return which of the sources each of these rows is of, int64 [n]."""
        which: Array = np.searchsorted(self.first_rows, rows, side="right") - 1
        return which

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part; see `TableReader.read_part`."""
        source, number = self._places[part]
        for chunk in source.read_part(number, columns, rows, verify):
            yield dataclasses.replace(self._fitted(chunk), part=part)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        rows = np.asarray(rows, np.int64)
        which = self.source_of(rows)
        order = np.argsort(which, kind="stable")
        pieces = []
        for number, source in enumerate(self.sources):
            here = order[which[order] == number]
            if len(here) or (number == 0 and not len(rows)):
                pieces.append(self._fitted(source.take(rows[here] - self.first_rows[number], columns)))
        back = np.empty(len(rows), np.int64)
        back[order] = np.arange(len(rows))
        return _concatenated(pieces).take(back)

    def extra(self, name: str) -> Array:
        """Return an extra array: keys of all sources, initial values of the first that has them."""
        if name.startswith(ADMISSION_FILTER):
            return joined_filter(self.sources)
        having = [source for source in self.sources if any(extra.name == name for extra in source.schema.extras)]
        if name not in _ADDED_UP:
            return having[0].extra(name)
        dtype = next(extra.dtype for extra in self.schema.extras if extra.name == name)
        arrays = []
        for source in self.sources if name in _FILTERED else having:
            if source in having:
                arrays.append(source.extra(name).astype(dtype, copy=False))
            else:  # counters of filtered keys stay in step with the keys
                keys = next((extra for extra in source.schema.extras if extra.name == "filtered_keys"), None)
                arrays.append(np.zeros(keys.shape[0] if keys else 0, dtype))
        return np.concatenate(arrays)

    def _fitted(self, chunk: Chunk) -> Chunk:
        schema = self.schema
        freqs = None if schema.freq_dtype is None else chunk.freqs
        versions = None if schema.version_dtype is None else chunk.versions
        return dataclasses.replace(
            chunk,
            slots={slot.name: chunk.slots[slot.name] for slot in schema.slots if slot.name in chunk.slots},
            freqs=None if freqs is None else freqs.astype(schema.freq_dtype, copy=False),
            versions=None if versions is None else versions.astype(schema.version_dtype, copy=False),
        )


def _concatenated(pieces: Sequence[Chunk]) -> Chunk:
    first = pieces[0]

    def joined(columns: list[Array | None]) -> Array | None:
        arrays = [column for column in columns if column is not None]
        return np.concatenate(arrays) if arrays else None

    keys = joined([piece.keys for piece in pieces])
    assert keys is not None
    return Chunk(
        keys=keys,
        values=joined([piece.values for piece in pieces]),
        slots={name: np.concatenate([piece.slots[name] for piece in pieces]) for name in first.slots},
        freqs=joined([piece.freqs for piece in pieces]),
        versions=joined([piece.versions for piece in pieces]),
    )


def _joined_schema(name: str, schemas: Sequence[TableSchema], labels: Sequence[str], common: bool) -> TableSchema:
    first = schemas[0]

    def differs(what: str, mine: Any, other: Any, label: str, advice: str) -> BadInputError:
        return BadInputError(
            f"merging into table '{name}': {what} {mine} in {labels[0]} and {other} in {label}; {advice}"
        )

    for schema, label in zip(schemas[1:], labels[1:], strict=True):
        if schema.dim != first.dim:
            raise differs("dim is", first.dim, schema.dim, label, "such tables cannot be merged, leave one out")
        for what, field in (("the keys' type is", "key_dtype"), ("the values' type is", "value_dtype")):
            mine, other = getattr(first, field), getattr(schema, field)
            if mine != other:
                raise differs(what, mine, other, label, "cast one of them first, see `kvtools cast`")
        if schema.has_versions and first.has_versions and schema.version_unit != first.version_unit:
            units = first.version_unit, schema.version_unit
            raise differs(
                "the unit of versions is", *units, label, "versions that count different things have no order"
            )
        if not common:
            for what, mine, other in (
                ("the slots are", _slots(first), _slots(schema)),
                ("frequencies are", _there(first.has_freqs), _there(schema.has_freqs)),
                ("versions are", _there(first.has_versions), _there(schema.has_versions)),
            ):
                if mine != other:
                    raise differs(what, mine, other, label, "add --slots common to keep only what all have")
    slots = tuple(slot for slot in first.slots if all(slot in schema.slots for schema in schemas))
    if not common:
        slots = first.slots
    part_rows = tuple(rows for schema in schemas for rows in schema.part_rows)
    joined = dataclasses.replace(
        first,
        name=name,
        part_rows=part_rows,
        slots=slots,
        freq_dtype=_counter([schema.freq_dtype for schema in schemas]),
        version_dtype=_counter([schema.version_dtype for schema in schemas]),
        extras=_extras(schemas),
        metadata=_latest(schemas),
        rows_as=next((schema.rows_as for schema in schemas if schema.rows_as), None),
        bytes=0,
    )
    return dataclasses.replace(joined, bytes=joined.rows * row_bytes(joined))


def _latest(schemas: Sequence[TableSchema]) -> dict[str, Any]:
    """Return the metadata of the first, with the largest step and number of draws of all."""
    metadata = dict(schemas[0].metadata)
    draws = [schema.metadata["draws"] for schema in schemas if "draws" in schema.metadata]
    if draws:
        metadata["draws"] = max(draws)
    policies = [told for schema in schemas if isinstance(told := schema.metadata.get("policies"), dict)]
    steps = [told["step"] for told in policies if "step" in told]
    if steps:
        metadata["policies"] = {**(metadata.get("policies") or {}), "versions": "steps", "step": max(steps)}
    return metadata


def _there(column: bool) -> str:
    return "there" if column else "missing"


def _slots(schema: TableSchema) -> str:
    slots: list[SlotSchema] = sorted(schema.slots, key=lambda slot: slot.name)
    return ", ".join(f"{slot.name} [{slot.width}] {slot.dtype}" for slot in slots) or "none"


def _counter(dtypes: Sequence[str | None]) -> str | None:
    """Return the narrowest integer type that holds all counters, or None if one table has none."""
    if None in dtypes:
        return None
    result = np.result_type(*(numpy_dtype(dtype) for dtype in dtypes if dtype))
    return result.name if result.kind in "iu" else "int64"


def _extras(schemas: Sequence[TableSchema]) -> tuple[ExtraSchema, ...]:
    """Return the extra arrays of the whole; deleted keys only where the first is an increment itself."""
    found: dict[str, ExtraSchema] = {}
    initial = next((s for s in schemas if any(are_initial_values(extra.name) for extra in s.extras)), None)
    for schema in schemas:
        for extra in schema.extras:
            if are_initial_values(extra.name) and schema is not initial:
                continue  # those of one table belong together
            if extra.name.startswith(ADMISSION_FILTER):
                if can_join(schemas):  # one of all, as the parts of what is written get it
                    found.setdefault(f"{ADMISSION_FILTER}0", dataclasses.replace(extra, name=f"{ADMISSION_FILTER}0"))
                continue
            if extra.name not in found:
                found[extra.name] = extra
            elif extra.name in _ADDED_UP:
                rows = found[extra.name].shape[0] + extra.shape[0]
                found[extra.name] = dataclasses.replace(found[extra.name], shape=(rows,))
    if "filtered_keys" in found:
        for name in _FILTERED[1:]:
            if name in found:
                found[name] = dataclasses.replace(found[name], shape=found["filtered_keys"].shape)
    if all(extra.name != "deleted_keys" for extra in schemas[0].extras):
        found.pop("deleted_keys", None)
    return tuple(found.values())
