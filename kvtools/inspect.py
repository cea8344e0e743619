"""What is in a checkpoint: its tables, its dense variables, and the rows of single keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtools.dialects.interface import (
    ALL_COLUMNS,
    Array,
    Checkpoint,
    Progress,
    TableReader,
    TableSchema,
)
from kvtools.get import rows_of_keys
from kvtools.json_numbers import json_numbers
from kvtools.row_norms import row_norms


@dataclass(frozen=True)
class KeyRow:
    """One row of a table: `value` [dim], norms of value and slots, frequency and version or None."""

    table: str
    key: int
    value: Array
    l2: float
    freq: int | None
    version: int | None
    slots_l2: dict[str, float]


def describe_table(schema: TableSchema) -> dict[str, Any]:
    """Return a table's schema as `kvtools inspect --json` prints it."""
    return {
        "name": schema.name,
        "dialect": schema.dialect,
        "key_dtype": schema.key_dtype,
        "value_dtype": schema.value_dtype,
        "dim": schema.dim,
        "rows": schema.rows,
        "parts": schema.parts,
        "slots": [slot.name for slot in schema.slots],
        "bytes": schema.bytes,
    }


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return everything an inspection shows, ready for JSON; no data file is read for it.

    Keys: `path`, `dialect`, `tables` (see `describe_table`) and `variables` (name, dtype, shape, bytes).
    """
    return {
        "path": str(checkpoint.path),
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
    }


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
    hits = table.take(rows, ALL_COLUMNS)
    assert hits.values is not None
    norms = row_norms(hits.values, "l2")
    slot_norms = {name: row_norms(slot, "l2") for name, slot in hits.slots.items()}
    return [
        KeyRow(
            table=table.schema.name,
            key=int(hits.keys[i]),
            value=hits.values[i],
            l2=float(norms[i]),
            freq=None if hits.freqs is None else int(hits.freqs[i]),
            version=None if hits.versions is None else int(hits.versions[i]),
            slots_l2={name: float(norm[i]) for name, norm in slot_norms.items()},
        )
        for i in range(len(hits.keys))
    ]


def describe_row(row: KeyRow) -> dict[str, Any]:
    """Return a row ready for JSON; numbers that JSON lacks are shown as `kvtools.json_numbers` says."""
    return {
        "table": row.table,
        "key": row.key,
        "value": json_numbers(row.value),
        "l2": json_numbers(np.array([row.l2]))[0],
        "freq": row.freq,
        "version": row.version,
        "slots_l2": {name: json_numbers(np.array([norm]))[0] for name, norm in row.slots_l2.items()},
    }
