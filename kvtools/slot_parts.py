"""Cut an optimizer slot into several, or put several side by side: engines keep the same state in different ways.

TFPlus keeps m, v and z of GroupAdam in one slot that is three times as wide as the value; others have three slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvtools.dialects.chunk import KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.schema import SlotSchema
from kvtools.errors import BadInputError
from kvtools.table_names import near
from kvtools.table_view import TableView, replace_schema


class _OtherSlots(TableView):
    """A table whose slots are made of the source's, chunk by chunk."""

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part; see `TableReader.read_part`."""
        return map(self._changed, self.source.read_part(part, columns, rows, verify))

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        return self._changed(self.source.take(rows, columns))

    def _changed(self, chunk: Chunk) -> Chunk:
        return dataclasses.replace(chunk, slots=self._slots(dict(chunk.slots))) if chunk.slots else chunk

    def _slots(self, slots: dict[str, Array]) -> dict[str, Array]:
        raise NotImplementedError


class SplitSlot(_OtherSlots):
    """A table with one of its slots cut into `names`, all of the same width."""

    def __init__(self, source: TableReader, slot: str, names: Sequence[str]) -> None:
        self._old, self._new = slot, tuple(names)
        schemas: list[SlotSchema] = []
        for schema in source.schema.slots:
            if schema.name == slot:
                width = schema.width // len(names)
                schemas += [SlotSchema(name, width, schema.dtype) for name in names]
            else:
                schemas.append(schema)
        metadata = dict(source.schema.metadata)
        described = dict(metadata.get("slots") or {})
        if slot in described:
            record = described.pop(slot)
            if record.get("init") == "copy_value":
                record = {"init": "rows"}  # each begins as a piece of the value: named as left out
            described |= {name: {**record, "name": name, "width": width} for name in names}
            metadata["slots"] = described
        super().__init__(source, replace_schema(source, slots=tuple(schemas), metadata=metadata))

    def _slots(self, slots: dict[str, Array]) -> dict[str, Array]:
        changed: dict[str, Array] = {}
        for name, rows in slots.items():
            if name == self._old:
                changed |= dict(zip(self._new, np.split(rows, len(self._new), axis=1), strict=True))
            else:
                changed[name] = rows
        return changed


class JoinedSlots(_OtherSlots):
    """A table with some of its slots side by side as one, where the first of them was."""

    def __init__(self, source: TableReader, slots: Sequence[str], name: str) -> None:
        self._old, self._new = tuple(slots), name
        own = {schema.name: schema for schema in source.schema.slots}
        joined = SlotSchema(name, sum(own[slot].width for slot in slots), own[slots[0]].dtype)
        schemas = tuple(
            joined if schema.name == slots[0] else schema
            for schema in source.schema.slots
            if schema.name == slots[0] or schema.name not in slots
        )
        metadata = dict(source.schema.metadata)
        described = dict(metadata.get("slots") or {})
        records = [described.pop(slot, None) for slot in slots]
        begins = [(record or {}).get("constant") for record in records]
        if None not in begins and len(set(begins)) == 1:
            described[name] = {**(records[0] or {}), "name": name, "width": joined.width}
        elif any(records):
            described[name] = {"name": name, "init": "rows"}  # not one number: named as left out
        if "slots" in metadata:
            metadata["slots"] = described
        super().__init__(source, replace_schema(source, slots=schemas, metadata=metadata))

    def _slots(self, slots: dict[str, Array]) -> dict[str, Array]:
        joined = np.concatenate([slots[name] for name in self._old], axis=1)
        return {
            self._new if name == self._old[0] else name: joined if name == self._old[0] else rows
            for name, rows in slots.items()
            if name == self._old[0] or name not in self._old
        }


def with_other_slots(
    checkpoint: Checkpoint,
    split: Sequence[tuple[str, Sequence[str]]] = (),
    join: Sequence[tuple[Sequence[str], str]] = (),
) -> Checkpoint:
    """Return a checkpoint whose tables have slots cut into several, then several put together.

    Args:
        checkpoint: what to change; tables without such a slot stay as they are.
        split: (slot, names of what it is cut into), in the order of the numbers in a row.
        join: (slots, name of what they become), in the order in which they stand in a row.

    Raises:
        BadInputError: no table has such slots, a width that cannot be cut so, slots of different types, or a name that
            a table has already.
    """
    doing = f"changing slots of '{checkpoint.path}'"
    tables = dict(checkpoint.tables)

    def apply(needed: Sequence[str], names: Sequence[str], change: Any) -> None:
        found = [name for name, table in tables.items() if set(needed) <= set(table.slots)]
        if not found:
            slots = sorted({slot for table in tables.values() for slot in table.slots})
            there = ", ".join(f"'{slot}'" for slot in slots) or "none"
            meant = "".join(near(name, slots) for name in needed if name not in slots)
            raise BadInputError(
                f"{doing}: no table has slot {' and '.join(map(repr, needed))}; there are {there}{meant}"
            )
        if "" in names or len(set(names)) < len(names):
            raise BadInputError(f"{doing}: got the names {list(names)}, expected different ones")
        for table in found:
            twice = (set(tables[table].slots) - set(needed)) & set(names)
            if twice:
                raise BadInputError(f"{doing}: table '{table}' has a slot '{min(twice)}' already")
            tables[table] = change(tables[table])

    def cut(slot: str, names: Sequence[str], table: TableReader) -> TableReader:
        (width,) = (schema.width for schema in table.schema.slots if schema.name == slot)
        if width % len(names):
            raise BadInputError(
                f"{doing}: slot '{slot}' of table '{table.schema.name}' is {width} wide, expected a multiple of"
                f" {len(names)} to cut it into {', '.join(names)}"
            )
        return SplitSlot(table, slot, names)

    def put_together(slots: Sequence[str], name: str, table: TableReader) -> TableReader:
        kinds = {schema.dtype for schema in table.schema.slots if schema.name in slots}
        if len(kinds) > 1 or len(set(slots)) < len(slots):
            raise BadInputError(
                f"{doing}: slots {', '.join(slots)} of table '{table.schema.name}' are {' and '.join(sorted(kinds))},"
                " expected different slots of one type"
            )
        return JoinedSlots(table, slots, name)

    for slot, names in split:
        apply([slot], names, lambda table, slot=slot, names=names: cut(slot, names, table))
    for slots, name in join:
        apply(slots, [name], lambda table, slots=slots, name=name: put_together(slots, name, table))
    return dataclasses.replace(checkpoint, tables=tables)
