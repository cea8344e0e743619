"""What `kvtools export --snapshot` keeps, of which rows, in which type."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.clip import Clip, Criteria
from kvtools.clip_policy import Policy
from kvtools.dialects.interface import Checkpoint
from kvtools.errors import BadInputError, OutputError, UnknownTableError
from kvtools.export_snapshot import choose_for_snapshot, export_snapshot
from kvtools.snapshot import Snapshot

KEYS = np.array([5, 6, 5, 7, 6, 8])
VALUES = np.float32([[9, 9], [9, 1], [0.1, 0], [np.nan, 0], [2, 3], [4, 5]])


def checkpoint(path: Path, **columns: np.ndarray) -> Checkpoint:
    tables = [ArrayTable(name, KEYS, VALUES, slots={"m": VALUES}, **columns) for name in ("scope/emb", "other")]
    return Checkpoint(path, "memory", {table.schema.name: table for table in tables})


def rows_of(path: Path) -> dict[int, list[float]]:
    values, found = Snapshot(path).table("scope/emb").lookup(np.array([5, 6, 7, 8]))
    return {key: row.tolist() for key, row, there in zip([5, 6, 7, 8], values, found, strict=True) if there}


def test_a_key_whose_last_row_is_cut_is_gone(tmp_path: Path) -> None:
    out = tmp_path / "a.kvsnap"
    exports = export_snapshot(
        checkpoint(tmp_path), out, tables=["scope/emb"], policy=Policy.of(Criteria(norms=(Clip("l2", 1),)))
    )
    (export,) = exports
    assert (export.rows, export.cut, export.duplicates, export.non_finite) == (3, 1, 2, 1)
    assert export.signature == "scope_emb" and export.bytes == 3 * 16
    kept = rows_of(out)
    assert list(kept) == [6, 7, 8] and kept[6] == [2, 3]


def test_all_rows_where_nothing_is_clipped(tmp_path: Path) -> None:
    exports = export_snapshot(checkpoint(tmp_path, freqs=np.arange(6)), tmp_path / "a.kvsnap")
    assert [(e.name, e.rows, e.cut, e.duplicates) for e in exports] == [("scope/emb", 4, 0, 2), ("other", 4, 0, 2)]
    assert rows_of(tmp_path / "a.kvsnap")[5] == [np.float32(0.1), 0]
    assert Snapshot(tmp_path / "a.kvsnap").table("other").native.freq_dtype == "int64"


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_in_another_type_are_rounded_to_the_nearest(tmp_path: Path, dtype: str) -> None:
    (export, _) = export_snapshot(checkpoint(tmp_path), tmp_path / "a.kvsnap", dtype=dtype)
    values, _ = Snapshot(tmp_path / "a.kvsnap").table("scope/emb").lookup(np.array([5, 8]))
    assert export.value_dtype == dtype == values.dtype.name
    assert np.array_equal(values, VALUES[[2, 5]].astype(getattr(ml_dtypes, dtype, dtype)))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_nan_is_refused_where_rows_are_quantized_and_nothing_is_left_behind(tmp_path: Path, dtype: str) -> None:
    wide = ArrayTable("scope/emb", KEYS, np.repeat(VALUES, 4, axis=1))
    source = Checkpoint(tmp_path, "memory", {"scope/emb": wide})
    with pytest.raises(BadInputError, match=f"table 'scope/emb' as {dtype}: the row of key 7 has NaN or infinity"):
        export_snapshot(source, tmp_path / "a.kvsnap", dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnknownTableError):
        export_snapshot(checkpoint(tmp_path), tmp_path / "a.kvsnap", tables=["no"])
    (tmp_path / "a.kvsnap").write_text("mine")
    with pytest.raises(OutputError, match="exists"):
        export_snapshot(checkpoint(tmp_path), tmp_path / "a.kvsnap")
    assert (tmp_path / "a.kvsnap").read_text() == "mine"
    with pytest.raises(BadInputError, match="no key-value table"):
        export_snapshot(Checkpoint(tmp_path, "memory", {}), tmp_path / "b.kvsnap")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "int4"])
def test_what_a_smaller_type_saves_is_what_the_file_is_smaller_by(tmp_path: Path, dtype: str) -> None:
    rows = 1 << 16  # so that all sections are whole pages
    table = ArrayTable("emb", np.arange(rows), np.ones((rows, 8), np.float32))
    source = Checkpoint(tmp_path, "memory", {"emb": table})
    export_snapshot(source, tmp_path / "whole.kvsnap")
    (export,) = export_snapshot(source, tmp_path / "small.kvsnap", dtype=dtype)
    whole, small = ((tmp_path / f"{name}.kvsnap").stat().st_size for name in ("whole", "small"))
    assert export.bytes_saved > 0 and 0 <= whole - small - export.bytes_saved < 16  # fewer checksums
    (clipped,) = export_snapshot(
        source, tmp_path / "c.kvsnap", dtype=dtype, policy=Policy.of(Criteria(norms=(Clip("l2", 9),)))
    )
    assert (clipped.rows, clipped.bytes, clipped.bytes_saved) == (0, 0, rows * (8 * 4 + 8))
    (same,) = export_snapshot(source, tmp_path / "same.kvsnap", dtype="float32")
    assert same.bytes_saved == 0


def test_rows_of_zeros_stay_where_a_missing_key_gets_something_else(tmp_path: Path) -> None:
    values = np.float32([[0, 0], [1, 2]])
    tables = {
        name: ArrayTable(name, KEYS[:2], values, metadata={"initializer": {"kind": "constant", "a": constant}})
        for name, constant in (("ones", 1.0), ("zeros", 0.0))
    }
    exports = export_snapshot(Checkpoint(tmp_path, "memory", tables), tmp_path / "a.kvsnap")
    assert [(export.name, export.rows, export.cut) for export in exports] == [("ones", 2, 0), ("zeros", 1, 1)]


@pytest.mark.parametrize(
    ("dtype", "numbers", "shown"),
    [
        ("float16", np.float32([1, 1e5]), "100000"),
        ("float16", np.float32([np.nan, -65520]), "-65520"),
        ("bfloat16", np.float32([3.4e38, 1]), r"3.4e\+38"),
        ("float32", np.float64([1, 1e300]), r"1e\+300"),
        ("int8", np.float64([1, 1e39]), r"1e\+39"),
        ("int4", np.float64([1, 1e39]), r"1e\+39"),
    ],
)
def test_a_number_that_would_become_infinite_is_named(
    tmp_path: Path, dtype: str, numbers: np.ndarray, shown: str
) -> None:
    table = ArrayTable("emb", np.array([3, 7]), np.tile(np.stack([np.zeros_like(numbers), numbers]), 4))
    with pytest.raises(BadInputError, match=f"'emb' as {dtype}: the row of key 7 has {shown}, which would become"):
        export_snapshot(Checkpoint(tmp_path, "memory", {"emb": table}), tmp_path / "a.kvsnap", dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_just_fit_and_rows_that_were_infinite_are_kept(tmp_path: Path) -> None:
    values = np.float32([[65519, 1], [np.inf, np.nan]])
    table = ArrayTable("emb", np.array([3, 7]), values)
    (export,) = export_snapshot(Checkpoint(tmp_path, "memory", {"emb": table}), tmp_path / "a.kvsnap", dtype="float16")
    assert export.non_finite == 1
    rows, _ = Snapshot(tmp_path / "a.kvsnap").table("emb").lookup(np.array([3, 7]))
    assert rows[0, 0] == 65504 and np.isinf(rows[1, 0]) and np.isnan(rows[1, 1])


def test_a_default_row_that_would_become_infinite_is_named(tmp_path: Path) -> None:
    told = {"initializer": {"kind": "constant", "a": 1e5}}
    table = ArrayTable("emb", KEYS[:2], np.float32([[1, 2], [3, 4]]), metadata=told)
    with pytest.raises(BadInputError, match="table 'emb' as float16: the default row has 100000"):
        export_snapshot(Checkpoint(tmp_path, "memory", {"emb": table}), tmp_path / "a.kvsnap", dtype="float16")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int4"])
def test_integers_stay_as_they_are(tmp_path: Path, dtype: str) -> None:
    tables = {
        "float": ArrayTable("float", np.array([1, 2]), np.float32([[1, 2, 3, 4], [3, 4, 5, 6]])),
        "ids": ArrayTable("ids", np.array([1, 2]), np.array([[2**24 + 1], [2**62 + 1]])),
        "small": ArrayTable("small", np.array([1, 2]), np.int8([[-128] * 8, [127] * 8])),
    }
    source = Checkpoint(tmp_path, "memory", tables)
    exports = export_snapshot(source, tmp_path / "a.kvsnap", dtype=dtype)
    assert [export.value_dtype for export in exports] == [dtype, "int64", "int8"]
    assert [export.notes for export in exports] == [
        (),
        (f"its int64 rows are written as they are: only floating-point numbers become {dtype}",),
        (f"its int8 rows are written as they are: only floating-point numbers become {dtype}",),
    ]
    assert [(export.bytes, export.bytes_saved) for export in exports[1:]] == [(2 * 16, 0), (2 * 16, 0)]
    written = Snapshot(tmp_path / "a.kvsnap")
    assert written.table("float").native.quantized == (dtype in ("int8", "int4"))
    for name in ("ids", "small"):
        rows, found = written.table(name).lookup(np.array([1, 2]))
        assert found.all() and not written.table(name).native.quantized
        assert rows.dtype == tables[name].value_dtype and np.array_equal(rows, tables[name].to_numpy().values)
    planned = choose_for_snapshot(source, dtype=dtype)
    assert [choice.bytes for choice in planned[1:]] == [export.bytes for export in exports[1:]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("value_dtype", ["float32", "float64", "bfloat16"])
def test_what_rows_lose_is_told(tmp_path: Path, value_dtype: str, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, value_dtype, value_dtype))
    values = np.random.default_rng(0).normal(size=(300, 7)).astype(kind)
    table = ArrayTable("emb", np.arange(300), values, part_rows=(100, 200))
    source = Checkpoint(tmp_path, "memory", {"emb": table})
    (export,) = export_snapshot(source, tmp_path / "a.kvsnap", dtype=dtype)
    written, _ = Snapshot(tmp_path / "a.kvsnap").table("emb").lookup(np.arange(300))
    a, b = values.astype(np.float64), written.astype(np.float64)
    cosines = (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    if dtype == value_dtype:
        assert export.rounding is None
        return
    assert export.rounding is not None
    told = list(vars(export.rounding).values())
    assert np.allclose(told, [np.abs(a - b).max(), np.abs(a - b).mean(), cosines.mean(), cosines.min()], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rows_that_would_grow_stay_as_they_are(tmp_path: Path, dtype: str) -> None:
    values = np.random.default_rng(0).normal(size=(9, 2)).astype(np.float32)
    source = Checkpoint(tmp_path, "memory", {"emb": ArrayTable("emb", np.arange(9), values[:, :1])})
    (export,) = export_snapshot(source, tmp_path / "a.kvsnap", dtype=dtype)
    assert export.value_dtype == "float32" and export.rounding is None
    assert export.notes == (f"its float32 rows are written as they are: as {dtype} one would take 7 bytes and not 4",)
    assert np.array_equal(Snapshot(tmp_path / "a.kvsnap").table("emb").lookup(np.arange(9))[0], values[:, :1])


def test_rows_further_apart_than_float32_reaches_are_refused(tmp_path: Path) -> None:
    table = ArrayTable("emb", np.array([3, 7]), np.float32([[0, 1, 2, 3], [3e38, 0, -3e38, 1]]))
    source = Checkpoint(tmp_path, "memory", {"emb": table})
    with pytest.raises(BadInputError, match=r"'emb' as int8: the row of key 7 has numbers 3.3e\+38 apart"):
        export_snapshot(source, tmp_path / "a.kvsnap", dtype="int8")
