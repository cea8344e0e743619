from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import CorruptFileError
from kvtools.inspect import describe, describe_row, find_rows, first_rows, sample_rows


def test_description(sample_path: Path) -> None:
    report = describe(open_checkpoint(sample_path))
    assert list(report) == ["path", "dialect", "tables", "variables", "unreadable"]
    assert report["tables"][0] == {
        "name": "ads/emb",
        "dialect": "tfplugin",
        "key_dtype": "int64",
        "value_dtype": "float32",
        "rows_as": None,
        "dim": 4,
        "rows": 11,
        "parts": 3,
        "slots": ["Adam.m", "Adam.v"],
        "bytes": 1718,
        "slot_columns": [
            {"name": "Adam.m", "width": 4, "dtype": "float32"},
            {"name": "Adam.v", "width": 4, "dtype": "float32"},
        ],
        "freq_dtype": "uint32",
        "version_dtype": "uint32",
        "version_unit": "seconds",
        "partition": "floor_mod",
        "part_rows": [3, 4, 4],
        "extras": [],
        "notes": [],
    }
    assert report["variables"][0] == {
        "name": "dense/kernel",
        "dtype": "float32",
        "shape": [2, 3],
        "bytes": 24,
    }
    json.dumps(report)


def test_description_reads_no_row(sample_path: Path) -> None:
    """Only kvmeta is read: with all other bytes gone, the answer is the same."""
    expected = describe(open_checkpoint(sample_path))
    data = sample_path / "model.ckpt-7.data-00000-of-00001"
    checkpoint = open_checkpoint(sample_path)
    from kvtools.dialects.bundle import Bundle

    kept = bytearray(data.stat().st_size)
    for entry in Bundle(sample_path / "model.ckpt-7").entries.values():
        if entry.dtype == 7:
            kept[entry.offset : entry.offset + entry.size] = data.read_bytes()[entry.offset : entry.offset + entry.size]
    data.write_bytes(bytes(kept))
    assert describe(open_checkpoint(checkpoint.path)) == expected


def test_rows_by_key(sample_path: Path, sample_values: dict[str, dict[int, np.ndarray]]) -> None:
    checkpoint = open_checkpoint(sample_path)
    keys = [0, -7, 2**63 - 1, 2**64 - 1, -(2**31), 77, 0]
    rows = find_rows(checkpoint.select([]), keys)
    assert [(row.table, row.key) for row in rows] == [
        ("ads/emb", 0),
        ("ads/emb", -7),
        ("ads/emb", 2**63 - 1),
        ("user_emb", 0),
        ("user_emb", -(2**31)),
    ]
    for row in rows:
        expected = sample_values[row.table][row.key]
        assert np.array_equal(row.value.astype(np.float32), expected)
        assert row.l2 == pytest.approx(float(np.linalg.norm(expected)))
    assert rows[1].freq == 2 and rows[1].version == 1_700_000_001
    assert rows[1].slots_l2["Adam.v"] == pytest.approx(2 * rows[1].l2)
    assert json.loads(json.dumps(describe_row(rows[1]), allow_nan=False))["value"] == [2, 2.125, 2.25, 2.375]


def test_row_without_counters_and_with_nan(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    sample = make_sample("emb", rows=3, slots=())
    sample.freqs = sample.versions = None
    sample.values[1] = np.nan
    checkpoint = open_checkpoint(save_plain(tmp_path / "a", table_tensors(sample)))
    schema = checkpoint.table("emb").schema
    assert not schema.has_freqs and not schema.has_versions
    (row,) = find_rows(checkpoint.select([]), [int(sample.keys[1])])
    assert describe_row(row) == {
        "table": "emb",
        "key": int(sample.keys[1]),
        "value": ["NaN"] * 4,
        "norm": "NaN",
        "freq": None,
        "version": None,
        "slot_norms": {},
    }


def test_keys_are_checked_against_their_checksum(sample_path: Path) -> None:
    checkpoint = open_checkpoint(sample_path)
    from kvtools.dialects.bundle import Bundle

    entry = Bundle(sample_path / "model.ckpt-7").entries["ads/emb/part_2-keys"]
    data = sample_path / "model.ckpt-7.data-00000-of-00001"
    damaged = bytearray(data.read_bytes())
    damaged[entry.offset] ^= 1
    data.write_bytes(bytes(damaged))
    checkpoint = open_checkpoint(sample_path)
    with pytest.raises(CorruptFileError, match=r"'ads/emb/part_2-keys'.*checksum mismatch"):
        find_rows(checkpoint.select(["ads/emb"]), [1])


def test_first_rows_are_those_of_the_stream(sample_path: Path) -> None:
    table = open_checkpoint(sample_path).table("ads/emb")
    keys = table.all_keys().tolist()
    for count in (1, 3, 5, 11, 100):
        rows = first_rows(table, count)
        assert [row.key for row in rows] == keys[:count]
    assert np.array_equal(rows[0].slots["Adam.v"], 2 * rows[0].value)
    assert describe_row(rows[0], slots=True)["slots"]["Adam.v"] == (2 * rows[0].value).tolist()
    assert first_rows(open_checkpoint(sample_path).table("empty_emb"), 3) == []


def test_sample_is_the_same_for_the_same_seed(sample_path: Path) -> None:
    checkpoint = open_checkpoint(sample_path)
    table = checkpoint.table("ads/emb")
    draws = {seed: [row.key for row in sample_rows(table, 4, seed=seed)] for seed in range(20)}
    assert draws[0] == [row.key for row in sample_rows(table, 4)]
    assert all(len(set(keys)) == 4 for keys in draws.values())
    assert len({tuple(keys) for keys in draws.values()}) > 10
    assert {key for keys in draws.values() for key in keys} == set(table.all_keys().tolist())
    assert [row.key for row in sample_rows(table, 50)] == table.all_keys().tolist()
    assert sample_rows(checkpoint.table("empty_emb"), 4) == []


def test_sample_is_uniform(sample_path: Path) -> None:
    table = open_checkpoint(sample_path).table("ads/emb")
    counts = dict.fromkeys(table.all_keys().tolist(), 0)
    for seed in range(1100):
        counts[sample_rows(table, 1, seed=seed)[0].key] += 1
    assert all(60 < count < 140 for count in counts.values())
