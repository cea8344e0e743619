"""Tables of every kind that a lossless dialect must give back to the byte, and how that is checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvtools.array_table import ArrayTable
from kvtools.dialects.chunk import ALL_COLUMNS, KEYS, Chunk
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.writing import WriteOptions
from kvtools.migrate import Account, write_tables

KEY_DTYPES = ("int64", "int32", "uint64", "uint32")
VALUE_DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64")
TYPES = tuple(itertools.product(KEY_DTYPES, VALUE_DTYPES))
NAMES = ("emb", "ads/emb", "ads", ".", "..", "", "a=b", "Ünï/çødé 表", "_x", "a%2Fb", "nul\0tab\t", "x" * 400, "\udc80")


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Any bit pattern: NaNs with payloads, infinities, denormals, negative zeros."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return rng.integers(0, 256, (*shape, kind.itemsize), np.uint8).view(kind)[..., 0]


def table(
    name: str = "ads/emb",
    rows: int = 50,
    dim: int = 4,
    key_dtype: str = "int64",
    value_dtype: str = "float32",
    parts: int = 1,
    seed: int = 0,
    bare: bool = False,
) -> ArrayTable:
    """A table with everything, or, `bare`, with keys and values only."""
    rng = np.random.default_rng(seed)
    limits = np.iinfo(key_dtype)
    keys = rng.integers(limits.min, limits.max, rows, key_dtype, endpoint=True)
    special = [limits.min, limits.max, 0, 1, limits.max - 1]
    keys[: len(special)] = special[:rows]
    if bare:
        return ArrayTable(name, keys, numbers(rng, (rows, dim), value_dtype), part_rows=_cut(rows, parts))
    return ArrayTable(
        name,
        keys,
        numbers(rng, (rows, dim), value_dtype),
        slots={
            "Adam.m": numbers(rng, (rows, dim), value_dtype),
            "beta/power": numbers(rng, (rows, 1), "float32"),
            "": numbers(rng, (rows, 7), "bfloat16"),
        },
        freqs=numbers(rng, (rows,), "uint32"),
        versions=numbers(rng, (rows,), "int64"),
        version_unit="steps",
        part_rows=_cut(rows, parts),
        partition="mod_1000",
        extras={
            "initial_values": numbers(rng, (3, dim), value_dtype),
            "blacklist": keys[:3].copy(),
            "filtered_keys": keys[:0].copy(),
        },
        metadata={"initializer": {"kind": "uniform", "a": -0.5}, "object_path": "a/b", "anything": [1, None, "ü"]},
    )


def grid() -> Iterator[ArrayTable]:
    """Tables over all types, widths, part and row counts."""
    for key_dtype, value_dtype in itertools.product(KEY_DTYPES, VALUE_DTYPES):
        yield table(f"{key_dtype}/{value_dtype}", 97, 3, key_dtype, value_dtype, parts=3)
    for rows, dim, parts in ((0, 1, 1), (0, 5, 3), (1, 1, 4), (1000, 1, 2), (40, 257, 2)):
        yield table(f"{rows} {dim} {parts}", rows, dim, parts=parts)
        yield table(f"bare {rows} {dim} {parts}", rows, dim, parts=parts, bare=True)


def write(tables: list[TableReader], path: Path, dialect: str, **options: Any) -> Account:
    """Write tables, and see that the target says it lost nothing."""
    account = write_tables(tables, path, dialect, options=WriteOptions(**options))
    assert account.lossless
    assert not any(each.changes for each in account.tables)
    return account


def write_and_open(tables: list[TableReader], path: Path, dialect: str, **options: Any) -> Checkpoint:
    """Write tables and open what was written, its dialect found out."""
    write(tables, path, dialect, **options)
    checkpoint = open_checkpoint(path)
    assert checkpoint.dialect == dialect
    return checkpoint


def same_bytes(a: Any, b: Any) -> bool:
    """Whether two columns are of one type and shape and the same to the byte."""
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def check_same(got: TableReader, expected: TableReader) -> None:
    """Check that a table is the same as another: its description, every row of every part, however it is read."""
    a, b = got.schema, expected.schema
    for field in (
        "name",
        "key_dtype",
        "value_dtype",
        "dim",
        "part_rows",
        "slots",
        "freq_dtype",
        "version_dtype",
        "version_unit",
        "partition",
        "extras",
        "metadata",
    ):
        assert getattr(a, field) == getattr(b, field), field
    for rows in (None, 7):
        for part in range(b.parts):
            chunks = list(got.chunks(rows=rows, part=part))
            assert all(chunk.part == part and 0 < len(chunk) <= (rows or b.rows) for chunk in chunks)
            check_same_chunk(joined(chunks), joined(list(expected.chunks(rows=rows, part=part))))
    assert same_bytes(got.all_keys(), expected.all_keys())
    wanted = np.random.default_rng(1).integers(0, b.rows, 30) if b.rows else np.zeros(0, np.int64)
    check_same_chunk(got.take(wanted, ALL_COLUMNS), expected.take(wanted, ALL_COLUMNS))
    keys_only = got.take(wanted, KEYS)
    assert keys_only.values is None and not keys_only.slots and keys_only.freqs is None and keys_only.versions is None
    for extra in b.extras:
        assert same_bytes(got.extra(extra.name), expected.extra(extra.name))


def joined(chunks: list[Chunk]) -> Chunk | None:
    """Make one chunk of several."""

    def column(columns: list[Any]) -> Any:
        return None if columns[0] is None else np.concatenate(columns)

    if not chunks:
        return None
    return Chunk(
        column([chunk.keys for chunk in chunks]),
        column([chunk.values for chunk in chunks]),
        {name: column([chunk.slots[name] for chunk in chunks]) for name in chunks[0].slots},
        column([chunk.freqs for chunk in chunks]),
        column([chunk.versions for chunk in chunks]),
    )


def check_same_chunk(a: Any, b: Any) -> None:
    """Check that two chunks are the same to the byte."""
    if a is None or b is None:
        assert a is b
        return
    assert same_bytes(a.keys, b.keys)
    assert same_bytes(a.values, b.values)
    assert same_bytes(a.freqs, b.freqs)
    assert same_bytes(a.versions, b.versions)
    assert list(a.slots) == list(b.slots)
    for name, slot in b.slots.items():
        assert same_bytes(a.slots[name], slot)


def _cut(rows: int, parts: int) -> list[int]:
    """Parts of different lengths, empty ones among them."""
    if parts == 1:
        return [rows]
    lengths = [0] * parts
    lengths[0] = rows // 3
    lengths[-1] = rows - rows // 3
    return lengths
