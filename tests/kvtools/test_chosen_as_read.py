"""A table that is read once to be exported is the one that is read twice."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError
from kvtools.export import export_saved_model
from kvtools.migrate import write_tables

KEYS = np.arange(400) * 7 - 50


def saved(path: Path, keys: np.ndarray, values: np.ndarray) -> Path:
    table = ArrayTable("emb", keys, values, freqs=np.arange(len(keys)))
    write_tables([table], str(path), "tfplugin", parts=3)
    return path


def content(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in sorted((folder / "variables").iterdir()) if ".data" in file.name]


@pytest.mark.parametrize("keep_zeros", [False, True])
@pytest.mark.parametrize("keys", ["distinct", "repeated"])
@pytest.mark.parametrize("dtype", [None, "float16", "int8"])
def test_the_export_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: str, dtype: str | None, keep_zeros: bool
) -> None:
    values = np.random.default_rng(0).standard_normal((400, 8)).astype(np.float32)
    values[::5], values[7, 1] = 0, np.inf if dtype is None else 3
    source = tmp_path / "a"
    saved(source, KEYS, values)
    if keys == "repeated":  # in a dialect that may have it
        source = tmp_path / "a.npz"
        write_tables([ArrayTable("emb", np.where(KEYS == 6, 13, KEYS), values)], str(source), "npz")
    both: list[Any] = []
    for least in (1, 10**9):
        monkeypatch.setattr("kvtools.export.LEAST_ROWS", least)
        out = tmp_path / str(least)
        (export,) = export_saved_model(open_checkpoint(source), out, dtype=dtype, keep_zeros=keep_zeros)
        both.append((dataclasses.asdict(export), [data[: export.rows * 8] for data in content(out)]))
        assert export.duplicates == (keys == "repeated") and export.rows == (399 if keep_zeros else 319) + (
            keys == "distinct"
        )
    assert both[0] == both[1]


@pytest.mark.parametrize("index", ["hash", "perfect"])
def test_the_later_of_two_rows_of_a_key_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: Any) -> None:
    monkeypatch.setattr("kvtools.export.LEAST_ROWS", 1)
    keys, values = np.where(KEYS == 6, 13, KEYS), np.float32([[at + 1, 0] for at in range(400)])
    write_tables([ArrayTable("emb", keys, values)], str(tmp_path / "a.npz"), "npz")
    (export,) = export_saved_model(open_checkpoint(tmp_path / "a.npz"), tmp_path / "out", index=index)
    assert (export.rows, export.duplicates) == (399, 1)
    table = open_checkpoint(tmp_path / "out").table("emb")
    rows = {int(key): row for chunk in table.chunks() for key, row in zip(chunk.keys, chunk.values, strict=True)}
    assert rows[13].tolist() == [10, 0] and len(rows) == 399


def test_what_is_wrong_is_told_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtools.export.LEAST_ROWS", 1)
    values = np.full((400, 2), 7e4, np.float32)
    with pytest.raises(BadInputError, match="would become infinite"):
        export_saved_model(open_checkpoint(saved(tmp_path / "a", KEYS, values)), tmp_path / "out", dtype="float16")
    assert not (tmp_path / "out").exists()
