"""Several tables as one, part after part: what `kvtools merge` reads."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from kvtools.admission_filter import can_join, joined_filter
from kvtools.dialects.chunk import KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import TableReader, Unmatched
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
from kvtools.fit import of_part
from kvtools.table_view import unmatched_of
from kvtools.waiting_keys import FREQS, KEYS, VERSIONS

_WAITING = (KEYS, FREQS, VERSIONS)
_ADDED_UP = ("blacklist", "deleted_keys")
_UNTOLD = ("max_capacity", "eviction", "epoch", "versions", "step")
"""What policies record that is no policy, or that does not go along with rows of several tables."""


class JoinedTable(TableReader):
    """The parts of several tables of one schema as the parts of one.

    Args:
        name: the name of the whole.
        sources: the tables, in order; row numbers count along them.
        labels: what to call each in an error: its file, and its table.
        common: leave out the columns that not all of them have, instead of refusing.
        first: what new rows begin with and policies are those of the first that records them, not of the last.

    Raises:
        BadInputError: the tables do not agree; the message says in what, and where.
    """

    def __init__(
        self,
        name: str,
        sources: Sequence[TableReader],
        labels: Sequence[str],
        *,
        common: bool,
        first: bool = False,
    ) -> None:
        self.sources = tuple(sources)
        self.labels = tuple(labels)
        self._preferred = range(len(sources)) if first else range(len(sources))[::-1]
        self._waiting: dict[str, Array] = {}
        self.schema = _joined_schema(name, [source.schema for source in sources], labels, common, self._preferred)
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
        rows = self.row_numbers(rows)
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
        """Return an extra array: lists of keys of all sources, others of the preferred one that has them."""
        if name.startswith(ADMISSION_FILTER):
            return joined_filter(self.sources)
        if name in self._waiting:
            return self._waiting[name]
        if are_initial_values(name):
            return self.sources[_beginning([s.schema for s in self.sources], self._preferred)].extra(name)
        having = [self.sources[n] for n in self._preferred if name in _names(self.sources[n].schema)]
        if name not in _ADDED_UP:
            return having[0].extra(name)
        dtype = next(extra.dtype for extra in self.schema.extras if extra.name == name)
        return np.concatenate(
            [source.extra(name).astype(dtype, copy=False) for source in having[:: self._preferred.step]]
        )

    def unmatched(self) -> Unmatched:
        """Return what of the sources' slots does not fit their rows; see `TableReader.unmatched`."""
        return unmatched_of(self.sources, self.labels)

    def set_waiting(self, extras: Mapping[str, Array]) -> None:
        """Give the whole the keys that wait for admission, and their counters."""
        self._waiting = dict(extras)
        more = tuple(ExtraSchema(name, array.dtype.name, array.shape) for name, array in extras.items())
        self.schema = dataclasses.replace(self.schema, extras=(*self.schema.extras, *more))

    def differences(self) -> tuple[str, ...]:
        """Say of what sources record differently of new rows and of policies whose it is that the whole has."""
        schemas = [source.schema for source in self.sources]
        beginning = _beginning(schemas, self._preferred)
        found = []
        recorded = [n for n, schema in enumerate(schemas) if "initializer" in schema.metadata]
        kinds = {n: json.dumps(schemas[n].metadata["initializer"], sort_keys=True) for n in recorded}
        found.append(self._difference("the initializer of new rows", kinds, beginning))
        arrays = {n: _initial_values(self.sources[n]) for n in range(len(schemas))}
        others = {n: digest for n, digest in arrays.items() if digest}
        if len(set(others.values())) > 1 and found[0] is None:
            names = " and ".join(self.labels[n] for n in others)
            found.append(
                f"initial values of new rows: they differ in {names}; those of {self.labels[beginning]} were taken"
            )
        for slot in self.schema.slots:
            told = {n: schema.metadata.get("slots", {}).get(slot.name) for n, schema in enumerate(schemas)}
            starts = {n: _slot_start(record) for n, record in told.items() if record is not None}
            taken = next((n for n in self._preferred if n in starts), 0)
            found.append(self._difference(f"what slot {slot.name} of new rows begins as", starts, taken))
        most = max(schema.parts for schema in schemas)
        told = {n: told_policies(schema, most) for n, schema in enumerate(schemas)}
        tell = {n: policies for n, policies in told.items() if policies or "initializer" in schemas[n].metadata}
        taken = next((n for n in self._preferred if told[n]), 0)
        for policy in dict.fromkeys(name for policies in told.values() for name in policies):
            values = {
                n: json.dumps(policies[policy], sort_keys=True) if policy in policies else "none"
                for n, policies in tell.items()
            }
            found.append(self._difference(f"the policy {policy}", values, taken))
        return tuple(one for one in found if one)

    def _difference(self, what: str, values: Mapping[int, str], taken: int) -> str | None:
        if len(set(values.values())) < 2:
            return None
        by_value: dict[str, list[str]] = {}
        for number, value in values.items():
            by_value.setdefault(value, []).append(self.labels[number])
        told = ", ".join(f"{value} in {' and '.join(labels)}" for value, labels in by_value.items())
        return f"{what}: {told}; that of {self.labels[taken]} was taken"

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


def _joined_schema(
    name: str, schemas: Sequence[TableSchema], labels: Sequence[str], common: bool, preferred: Sequence[int]
) -> TableSchema:
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
        extras=_extras(schemas, preferred),
        metadata=_metadata(schemas, preferred),
        rows_as=next((schema.rows_as for schema in schemas if schema.rows_as), None),
        bytes=0,
    )
    return dataclasses.replace(joined, bytes=joined.rows * row_bytes(joined))


def _metadata(schemas: Sequence[TableSchema], preferred: Sequence[int]) -> dict[str, Any]:
    """Return the metadata of the first, with what new rows begin with and the policies of the preferred one that
    records them, and the largest step and number of draws of all."""
    metadata = dict(schemas[0].metadata)
    metadata.pop("initializer", None)
    beginning = schemas[_beginning(schemas, preferred)].metadata
    if "initializer" in beginning:
        metadata["initializer"] = beginning["initializer"]
    slots: dict[str, Any] = {}
    for number in reversed(preferred):
        slots.update(schemas[number].metadata.get("slots") or {})
    if slots:
        metadata["slots"] = slots
    draws = [schema.metadata["draws"] for schema in schemas if "draws" in schema.metadata]
    if draws:
        metadata["draws"] = max(draws)
    parts = sum(schema.parts for schema in schemas)
    policies = next((_policies(schemas[n], parts) for n in preferred if told_policies(schemas[n], parts)), None)
    recorded = [told for schema in schemas if isinstance(told := schema.metadata.get("policies"), dict)]
    if policies is None and recorded:
        policies = dict(recorded[0])
    steps = [told["step"] for told in recorded if "step" in told]
    if steps:
        policies = {**(policies or {}), "versions": "steps", "step": max(steps)}
    metadata.pop("policies", None)
    return metadata if policies is None else {**metadata, "policies": policies}


def told_policies(schema: TableSchema, parts: int) -> dict[str, Any]:
    """Return the policies of a table that go along: which keys get rows, and which rows go, as of one of so many
    parts, in which those of tables in other parts are compared."""
    policies = schema.metadata.get("policies")
    found = dict(policies) if isinstance(policies, dict) else {}
    if isinstance(expiry := found.get("expiry"), list):
        found["expiry"] = [of_part(policy, schema.parts, parts) for policy in expiry]
    return {name: value for name, value in found.items() if name not in _UNTOLD}


def _policies(schema: TableSchema, parts: int) -> dict[str, Any]:
    """Return all that a table records of policies, as of one of so many parts: how many rows each keeps is a fraction,
    which is rounded once, where parts are written."""
    policies = dict(schema.metadata["policies"])
    if isinstance(expiry := policies.get("expiry"), list):
        policies["expiry"] = [
            {**policy, "rows": Fraction(policy["rows"] * schema.parts, parts)}
            if isinstance(policy, dict) and isinstance(policy.get("rows"), int)
            else policy
            for policy in expiry
        ]
    return policies


def _beginning(schemas: Sequence[TableSchema], preferred: Sequence[int]) -> int:
    """Return the number of the table whose initializer and initial values the whole has: they belong together."""
    having = (
        n for n in preferred if "initializer" in schemas[n].metadata or any(map(are_initial_values, _names(schemas[n])))
    )
    return next(having, 0)


def _names(schema: TableSchema) -> list[str]:
    return [extra.name for extra in schema.extras]


def _initial_values(table: TableReader) -> str:
    """Return a digest of the initial values of a table; nothing where it has none."""
    names = sorted(filter(are_initial_values, _names(table.schema)))
    digest = hashlib.sha256()
    for name in names:
        digest.update(name.encode() + np.ascontiguousarray(table.extra(name)).tobytes())
    return digest.hexdigest() if names else ""


def _slot_start(record: Any) -> str:
    told = record if isinstance(record, dict) else {}
    start = told.get("init", "constant")
    return f"{told.get('constant', 0.0)}" if start == "constant" else str(start)


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


def _extras(schemas: Sequence[TableSchema], preferred: Sequence[int]) -> tuple[ExtraSchema, ...]:
    """Return the extra arrays of the whole, but for keys that wait for admission; deleted keys only where the first is
    an increment itself."""
    found: dict[str, ExtraSchema] = {}
    beginning = _beginning(schemas, preferred)
    for number in preferred:
        for extra in schemas[number].extras:
            if extra.name in _WAITING:
                continue
            if are_initial_values(extra.name) and number != beginning:
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
    if "deleted_keys" not in _names(schemas[0]):
        found.pop("deleted_keys", None)
    return tuple(found.values())
