"""Chains for tests, written without TensorFlow: tables as plain dicts of rows, in a folder as training leaves it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvtools import chain
from kvtools.array_table import table_from_arrays
from kvtools.chain_increment import increment_of, write_member
from kvtools.dialects.chunk import ALL_COLUMNS
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.schema import VariableSchema

DIM = 3
CHAIN = "0d5e6b1e-7f0c-4a53-9f8e-2f5f1f2b8f60"

Row = tuple[tuple[float, ...], tuple[float, ...], int, int, int]
"""Value [DIM], slot [DIM], frequency, version and score of a key."""
Rows = dict[int, Row]


def row(number: float, freq: int = 1, version: int = 7, score: int = 5) -> Row:
    """A row that one number tells from others."""
    return (number, number + 1, number + 2), (-number, 0.5, number), freq, version, score


def table_of(
    rows: Mapping[int, Row], *, name: str = "emb", parts: int = 1, pending: Mapping[int, int] | None = None
) -> TableReader:
    """A table of these rows as training saves it: with a capacity, scores, and keys that wait for admission."""
    keys = np.array(list(rows), np.int64)
    columns = list(zip(*rows.values(), strict=True)) if rows else [[], [], [], [], []]
    owner = keys % parts
    order = np.argsort(owner, kind="stable")
    scores = np.array(columns[4], np.uint64)[order]
    owner = owner[order]
    extras: dict[str, Any] = {f"eviction_scores_{part}": scores[owner == part] for part in range(parts)}
    extras |= {f"eviction_orders_{part}": scores[owner == part] + 100 for part in range(parts)}
    if pending is not None:
        extras["filtered_keys"] = np.array(list(pending), np.int64)
        extras["filtered_freqs"] = np.array(list(pending.values()), np.uint32)
    policies = {"max_capacity": 1000, "eviction": "lru", "enter_threshold": 3}
    return table_from_arrays(
        name,
        keys,
        np.array(columns[0], np.float32).reshape(-1, DIM),
        slots={"Adam.m": np.array(columns[1], np.float32).reshape(-1, DIM)},
        freqs=np.array(columns[2], np.uint32),
        versions=np.array(columns[3], np.uint32),
        version_unit="seconds",
        parts=parts,
        extras=extras,
        metadata={
            "initializer": {"kind": "constant", "a": 0.25},
            "part_records": [{"policies": dict(policies), "seen_by": part} for part in range(parts)],
        },
    )


def rows_of(table: TableReader) -> Rows:
    """The rows of a table, to compare with what was written."""
    names = {extra.name for extra in table.schema.extras}
    found: Rows = {}
    for part in range(table.parts):
        scores = table.extra(f"eviction_scores_{part}").tolist() if f"eviction_scores_{part}" in names else None
        if scores is not None:
            assert table.extra(f"eviction_orders_{part}").tolist() == [score + 100 for score in scores]
        at = 0
        for chunk in table.chunks(ALL_COLUMNS, part=part):
            assert chunk.values is not None and chunk.freqs is not None and chunk.versions is not None
            for i, key in enumerate(chunk.keys.tolist()):
                assert key not in found
                found[key] = (
                    tuple(chunk.values[i].tolist()),
                    tuple(chunk.slots["Adam.m"][i].tolist()),
                    int(chunk.freqs[i]),
                    int(chunk.versions[i]),
                    0 if scores is None else scores[at],
                )
                at += 1
    return found


def dense(bias: float) -> Checkpoint:
    """What is beside the tables: one dense variable."""
    array = np.array([bias, 2 * bias], np.float32)
    schema = VariableSchema("bias", "float32", (2,), 8)
    return Checkpoint(Path("none"), "tfplugin", {}, (schema,), lambda name: iter([array]))


class ChainWriter:
    """Writes the members of a chain to a folder, a state of all tables after the other.

    Example:
        writer = ChainWriter(tmp_path)
        writer.full({"emb": table_of({1: row(1)})})
        writer.delta({"emb": table_of({1: row(2), 5: row(3)})})
    """

    def __init__(self, folder: Path, *, name: str = "ckpt", of: str = CHAIN) -> None:
        self.folder = folder
        self.name = name
        self.chain = of
        self.number = 0
        self.tables: Mapping[str, TableReader] = {}
        self._full = 0
        self._previous: chain.Previous | None = None

    def full(self, tables: Mapping[str, TableReader], *, bias: float = 0.0, same_moment: bool = False) -> Path:
        """Write a full checkpoint; with `same_moment`, one of the number and moment of the increment before."""
        self.number += not same_moment
        self._full = self.number
        prefix = self.folder / f"{self.name}-{self.number}"
        record = chain.Record(
            self.chain, self.number, "full", self.number, self._previous, 1e9 + self.number, 10 * self.number, {}
        )
        write_member(prefix, list(tables.values()), record, beside=dense(bias))
        if not same_moment:
            self._previous = chain.Previous(self.number, chain.fingerprint(prefix))
        self.tables = tables
        return prefix

    def delta(self, tables: Mapping[str, TableReader], *, bias: float = 0.0, **fields: Any) -> Path:
        """Write what changed since the member before; `fields` are put into the record as they are."""
        self.number += 1
        prefix = self.folder / f"{self.name}-{self.number}.delta"
        record = chain.Record(
            self.chain, self.number, "delta", self._full, self._previous, 1e9 + self.number, 10 * self.number, {}
        )
        increments = [increment_of(self.tables[name], table)[0] for name, table in tables.items()]
        write_member(prefix, increments, dataclasses.replace(record, **fields), beside=dense(bias))
        self._previous = chain.Previous(self.number, chain.fingerprint(prefix))
        self.tables = tables
        return prefix
