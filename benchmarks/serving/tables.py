"""A table as everything that is measured needs it: a snapshot, a SavedModel, and the commands that fill a Redis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtools.array_table import ArrayTable
from kvtools.dialects.detect import open_checkpoint
from kvtools.export import export_saved_model
from kvtools.migrate import write_tables

NAME = "emb"
DIGITS = 12  # what redis-benchmark writes for __rand_int__


@dataclass(frozen=True)
class Table:
    """Keys 0 to `rows` - 1, each with a row float32 [dim]; `values` is [rows, dim]."""

    rows: int
    dim: int
    values: np.ndarray
    snapshot: Path
    saved_model: Path


def make_table(folder: Path, rows: int, dim: int, *, with_saved_model: bool) -> Table:
    """Write a table of random rows into a folder."""
    rng = np.random.default_rng(0)
    table = Table(rows, dim, rng.random((rows, dim), np.float32), folder / "table.kvsnap", folder / "saved_model")
    keys = rng.permutation(rows)
    write_tables([ArrayTable(NAME, keys, table.values[keys])], table.snapshot, "snapshot")
    if with_saved_model:
        export_saved_model(open_checkpoint(table.snapshot), table.saved_model)
    return table


def redis_key(key: int) -> bytes:
    """A key as Redis has it; our port for its protocol reads the same."""
    return b"%0*d" % (DIGITS, key)


def redis_commands(table: Table, at_once: int = 10_000) -> Iterator[bytes]:
    """MSET commands that fill a Redis."""
    size = 4 * table.dim
    head = b"$%d\r\n" % size
    pair = np.dtype(
        [
            ("key_head", "S5"),
            ("key", f"S{DIGITS}"),
            ("key_end", "S2"),
            ("head", f"S{len(head)}"),
            ("row", f"V{size}"),
            ("end", "S2"),
        ]
    )
    for first in range(0, table.rows, at_once):
        rows = np.ascontiguousarray(table.values[first : first + at_once])
        pairs = np.empty(len(rows), pair)
        pairs["key_head"] = b"$%d\r\n" % DIGITS
        pairs["key"] = [redis_key(key) for key in range(first, first + len(rows))]
        pairs["key_end"] = pairs["end"] = b"\r\n"
        pairs["head"] = head
        pairs["row"] = rows.view(f"V{size}").reshape(-1)
        yield b"*%d\r\n$4\r\nMSET\r\n" % (1 + 2 * len(rows)) + pairs.tobytes()
