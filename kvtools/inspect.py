"""What is in a checkpoint: its tables, its dense variables, and some of its rows."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtools.dialects.chunk import ALL_COLUMNS, Array, Chunk
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import Progress
from kvtools.dialects.schema import TableSchema
from kvtools.get import rows_of_keys
from kvtools.json_numbers import json_numbers
from kvtools.remote.paths import shown_path
from kvtools.row_norms import row_norms


@dataclass(frozen=True)
class KeyRow:
    """One row of a table: `value` [dim], norms of value and slots, frequency and version or None; `slots` [width] by
    name."""

    table: str
    key: int
    value: Array
    l2: float
    freq: int | None
    version: int | None
    slots_l2: dict[str, float]
    slots: dict[str, Array] = field(default_factory=dict)


def describe_table(schema: TableSchema) -> dict[str, Any]:
    """Return a table's schema as `kvtools inspect --json` prints it."""
    return {
        "name": schema.name,
        "dialect": schema.dialect,
        "key_dtype": schema.key_dtype,
        "value_dtype": schema.value_dtype,
        "rows_as": schema.rows_as,
        "dim": schema.dim,
        "rows": schema.rows,
        "parts": schema.parts,
        "slots": [slot.name for slot in schema.slots],
        "bytes": schema.bytes,
        "slot_columns": [{"name": slot.name, "width": slot.width, "dtype": slot.dtype} for slot in schema.slots],
        "freq_dtype": schema.freq_dtype,
        "version_dtype": schema.version_dtype,
        "version_unit": schema.version_unit if schema.has_versions else None,
        "partition": schema.partition,
        "part_rows": list(schema.part_rows),
        "extras": [{"name": extra.name, "dtype": extra.dtype, "shape": list(extra.shape)} for extra in schema.extras],
        "notes": list(schema.notes),
    }


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return everything an inspection shows, ready for JSON; no data file is read for it.

    Keys: `path`, `dialect`, `tables` (see `describe_table`), `variables` (name, dtype, shape, bytes) and `unreadable`
    (table, error), the tables that could not be opened.
    """
    return {
        "path": shown_path(checkpoint.path),
        "dialect": checkpoint.dialect,
        "tables": [describe_table(table.schema) for table in checkpoint.tables.values()],
        "variables": [
            {
                "name": variable.name,
                "dtype": variable.dtype,
                "shape": list(variable.shape),
                "bytes": variable.bytes,
            }
            for variable in checkpoint.variables
        ],
        "unreadable": [{"table": name, "error": str(error)} for name, error in checkpoint.broken.items()],
    }


def first_rows(table: TableReader, count: int) -> list[KeyRow]:
    """Return the first `count` rows of a table, or all if it has fewer."""
    rows: list[KeyRow] = []
    for chunk in table.chunks(ALL_COLUMNS, rows=min(max(count, 1), table.chunk_rows()), verify=False):
        rows += _rows_of(table, chunk.take(slice(0, count - len(rows))))
        if len(rows) >= count:
            break
    return rows


def sample_rows(table: TableReader, count: int, *, seed: int = 0) -> list[KeyRow]:
    """Return `count` different rows of a table, each as likely as any other, in row order; all if it has fewer.

    The same seed gives the same rows of the same number of rows, on every machine.
    """
    numbers = random.Random(seed).sample(range(table.rows), min(count, table.rows))
    return list(_rows_of(table, table.take(np.sort(np.array(numbers, np.int64)), ALL_COLUMNS)))


def find_rows(tables: Sequence[TableReader], keys: Sequence[int], *, progress: Progress | None = None) -> list[KeyRow]:
    """Look `keys` up in each of `tables` and return the rows found, by table and then in the order of `keys`.

    Streams each table's keys (checking their checksums) and reads only the rows found. A key outside the
    range of a table's key type is not in that table.
    """
    found: list[KeyRow] = []
    for table in tables:
        found += _find_in_table(table, list(dict.fromkeys(keys)), progress)
    return found


def _find_in_table(table: TableReader, keys: list[int], progress: Progress | None) -> list[KeyRow]:
    rows = rows_of_keys(table, np.array(keys, object), progress=progress)
    rows = rows[rows >= 0]
    if not len(rows):
        return []
    return list(_rows_of(table, table.take(rows, ALL_COLUMNS)))


def _rows_of(table: TableReader, chunk: Chunk) -> Iterator[KeyRow]:
    """Yield the rows of a chunk of all columns."""
    assert chunk.values is not None
    norms = row_norms(chunk.values, "l2")
    slot_norms = {name: row_norms(slot, "l2") for name, slot in chunk.slots.items()}
    for i in range(len(chunk)):
        yield KeyRow(
            table=table.schema.name,
            key=int(chunk.keys[i]),
            value=chunk.values[i],
            l2=float(norms[i]),
            freq=None if chunk.freqs is None else int(chunk.freqs[i]),
            version=None if chunk.versions is None else int(chunk.versions[i]),
            slots_l2={name: float(norm[i]) for name, norm in slot_norms.items()},
            slots={name: slot[i] for name, slot in chunk.slots.items()},
        )


def describe_row(row: KeyRow, *, slots: bool = False) -> dict[str, Any]:
    """Return a row ready for JSON, with the slots' numbers if `slots`.

    Numbers that JSON lacks are shown as `kvtools.json_numbers` says.
    """
    described = {
        "table": row.table,
        "key": row.key,
        "value": json_numbers(row.value),
        "norm": json_numbers(np.array([row.l2]))[0],
        "freq": row.freq,
        "version": row.version,
        "slot_norms": {name: json_numbers(np.array([norm]))[0] for name, norm in row.slots_l2.items()},
    }
    if slots:
        described["slots"] = {name: json_numbers(slot) for name, slot in row.slots.items()}
    return described
