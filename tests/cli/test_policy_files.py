"""One policy file for clip, cast and export: which rows of each table stay, and in which type."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvtools.array_table import ArrayTable, table_from_arrays
from kvtools.cli.main import main
from kvtools.dialects.chunk import Array
from kvtools.dialects.detect import open_checkpoint
from kvtools.migrate import write_tables
from kvtools.quantized_rows import decode, encode

Capture = pytest.CaptureFixture[str]
POLICY = """
[[tables]]
name = "user"
dtype = "int8"
min-freq = 4

[[tables]]
name = "ads/*"
dtype = "bfloat16"

[[tables]]
name = "item"
clip-l2 = 2.5
"""
ROWS = 12
DIM = 16


def rows_of(seed: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(ROWS, DIM)).astype(np.float32) * rng.uniform(0.2, 2, size=(ROWS, 1)).astype(np.float32)
    return np.arange(ROWS) * 7 - 20, values, np.arange(ROWS)


NAMES = ("ads/emb", "item", "user")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tables = []
    for seed, name in enumerate(NAMES):
        keys, values, freqs = rows_of(seed)
        tables.append(table_from_arrays(name, keys, values, slots={"Adam.m": values * 2}, freqs=freqs))
    write_tables(tables, tmp_path / "model", "tfplugin")
    (tmp_path / "policy.toml").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def kept(name: str) -> Array:
    """Which rows the policy keeps, in plain NumPy."""
    _, values, freqs = rows_of(NAMES.index(name))
    if name == "user":
        return freqs >= 4
    if name == "item":
        return np.sqrt((values.astype(np.float64) ** 2).sum(axis=1)) >= 2.5
    return np.ones(ROWS, np.bool_)


def cast_of(name: str, values: Array) -> Array:
    """What the policy makes of rows, in plain NumPy where NumPy has the type."""
    if name == "user":
        return decode(encode(values, "int8"), "int8", DIM)
    if name == "ads/emb":
        return values.astype(ml_dtypes.bfloat16)
    return values


def run(capsys: Capture, line: str) -> Any:
    assert main([*line.split(), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def expect(path: Path, *, cast: bool = True, slots: bool = False, names: Sequence[str] = NAMES) -> None:
    checkpoint = open_checkpoint(path)
    assert sorted(checkpoint.tables) == sorted(names)
    for name, table in checkpoint.tables.items():
        keys, values, freqs = rows_of(NAMES.index(name))
        mask = kept(name)
        chunk = table.to_numpy()
        order, by_key = np.argsort(chunk.keys), np.argsort(keys[mask])
        expected = cast_of(name, values[mask]) if cast else values[mask]
        assert chunk.values is not None and chunk.freqs is not None
        np.testing.assert_array_equal(chunk.keys[order], keys[mask][by_key])
        assert chunk.values[order].dtype == expected.dtype
        assert chunk.values[order].tobytes() == expected[by_key].tobytes()
        np.testing.assert_array_equal(chunk.freqs[order], freqs[mask][by_key])
        if slots:
            np.testing.assert_array_equal(chunk.slots["Adam.m"][order], (values[mask] * 2)[by_key])


def test_cast_clips_and_casts_by_table(here: Path, capsys: Capture) -> None:
    told = run(capsys, "cast model small.kvsnap --policy policy.toml --to snapshot")
    expect(here / "small.kvsnap")
    assert {one["table"]: one["kept"] for one in told["clipped"]} == {name: int(kept(name).sum()) for name in NAMES}
    assert sorted(told["roundings"]) == ["ads/emb", "user"]
    assert {name for name in NAMES if open_checkpoint(here / "small.kvsnap").table(name).schema.rows_as} == {"user"}


def test_clip_cuts_by_the_same_file_and_leaves_types(here: Path, capsys: Capture) -> None:
    assert main(["clip", "model", "out", "--policy", "policy.toml"]) == 0
    assert "note: the dtype of 2 tables in 'policy.toml' is for `kvtools cast` and" in capsys.readouterr().out
    expect(here / "out", cast=False, slots=True)


@pytest.mark.parametrize("output", ["--snapshot out.kvsnap", "--savedmodel out"])
def test_export_takes_the_types_too(output: str, here: Path, capsys: Capture) -> None:
    planned = run(capsys, f"export model {output} --policy policy.toml --dry-run")
    told = run(capsys, f"export model {output} --policy policy.toml")
    types = {one["name"]: one["value_dtype"] for one in told["tables"]}
    assert types == {"user": "int8", "ads/emb": "bfloat16", "item": "float32"}
    assert {one["name"]: one["rows"] for one in told["tables"]} == {name: int(kept(name).sum()) for name in NAMES}
    assert {one["table"]: one["kept"] for one in planned["tables"]} == {
        one["name"]: one["rows"] for one in told["tables"]
    }
    if "snapshot" in output:
        expect(here / "out.kvsnap")
        return
    checkpoint = open_checkpoint(here / "out")
    for name, table in checkpoint.tables.items():
        mask = kept(name)
        keys, values, _ = rows_of(NAMES.index(name))
        chunk = table.to_numpy()
        order = np.argsort(chunk.keys)
        assert chunk.values is not None
        expected = cast_of(name, values[mask])[np.argsort(keys[mask])]
        np.testing.assert_array_equal(chunk.values[order].astype(np.float32), expected.astype(np.float32))


def test_tables_beside_those_of_the_option_stay(here: Path, capsys: Capture) -> None:
    run(capsys, "cast model small.kvsnap --policy policy.toml --to snapshot --table user")
    found = open_checkpoint(here / "small.kvsnap")
    chunk = found.table("item").to_numpy()
    assert chunk.values is not None and len(chunk) == ROWS and found.table("user").rows == int(kept("user").sum())


def test_a_budget_counts_the_bytes_that_rows_take_there(here: Path, capsys: Capture) -> None:
    """An int8 row of 16 numbers takes 8 bytes of key, 16 + 6 of values, 8 of its frequency, and no slot is there."""
    entry = '[[tables]]\nname = "user"\ndtype = "int8"\n'
    per_row = 8 + DIM + 6 + 8
    (here / "small.toml").write_text(f'budget = "{5 * per_row + 3}B"\nby = "freq"\n{entry}')
    told = run(capsys, "cast model small.kvsnap --policy small.toml --to snapshot --table user")
    assert told["clipped"][0]["kept"] == 5 and told["budget"]["by"] == "freq"


def test_a_dry_run_of_a_policy_is_the_real_account(here: Path, capsys: Capture) -> None:
    line = "cast model small.kvsnap --policy policy.toml --to snapshot"
    planned = run(capsys, f"{line} --dry-run")
    assert planned.pop("dry_run") is True and not (here / "small.kvsnap").exists()
    done = run(capsys, line)
    assert planned["clipped"] == done["clipped"] and planned["roundings"] == done["roundings"]
    assert [(t["name"], t["rows_written"]) for t in planned["tables"]] == [
        (t["name"], t["rows_written"]) for t in done["tables"]
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("cast model out --policy policy.toml --dtype int8", "got --dtype int8, and a dtype in the policy"),
        ("cast model out --policy policy.toml --to-value-dtype float16", "got --policy policy.toml and another type"),
        ("cast model out --policy none.toml", "its policy says of no table what rows become"),
        ("cast model out --policy policy.toml", "tfplugin has no rows of int8"),
        ("export model --snapshot out.kvsnap --policy policy.toml --dtype int4", "and a dtype in 'policy.toml'"),
    ],
)
def test_what_does_not_go_together(line: str, message: str, here: Path, capsys: Capture) -> None:
    (here / "none.toml").write_text('[[tables]]\nname = "user"\nmin-freq = 2\n')
    assert main(line.split()) == 2
    assert message in capsys.readouterr().err
    assert not (here / "out").exists() and not (here / "out.kvsnap").exists()


def test_a_type_on_the_command_line_goes_with_a_policy_of_rows_alone(here: Path, capsys: Capture) -> None:
    (here / "rows.toml").write_text('[[tables]]\nname = "user"\nmin-freq = 4\n')
    run(capsys, "cast model out --policy rows.toml --dtype bfloat16")
    found = open_checkpoint(here / "out")
    assert {table.schema.value_dtype for table in found.tables.values()} == {"bfloat16"}
    assert [found.table(name).rows for name in NAMES] == [ROWS, ROWS, int(kept("user").sum())]


BUDGET = 1500
WRITTEN = {
    "clip to itself": "clip model out --budget {budget}",
    "clip to npz": "clip model out.npz --budget {budget} --to npz",
    "clip to snapshot": "clip model out.kvsnap --budget {budget} --to snapshot",
    "cast to snapshot": "cast model out.kvsnap --policy budget.toml --to snapshot",
    "cast to savedmodel": "cast model out --policy budget.toml --to savedmodel",
    "cast to deeprec": "cast model out --policy floats.toml --to deeprec",
    "cast to hdf5": "cast model out.h5 --policy floats.toml --to hdf5",
    "cast to itself": "cast model out --policy floats.toml",
    "export snapshot": "export model --snapshot out.kvsnap --budget {budget}",
    "export savedmodel": "export model --savedmodel out --policy budget.toml",
}


def row_of(table: Any) -> int:
    """What a row takes in the file where a table was read, by what is known of the format."""
    schema = table.schema
    value = np.dtype(ml_dtypes.bfloat16 if schema.value_dtype == "bfloat16" else schema.value_dtype).itemsize
    size = 8 + (DIM + 6 if schema.rows_as == "int8" else DIM * value)
    for slot in schema.slots:
        size += slot.width * np.dtype(ml_dtypes.bfloat16 if slot.dtype == "bfloat16" else slot.dtype).itemsize
    counters = [dtype for dtype in (schema.freq_dtype, schema.version_dtype) if dtype]
    return size + sum(np.dtype(dtype).itemsize for dtype in counters)


@pytest.mark.parametrize("line", WRITTEN.values(), ids=WRITTEN)
def test_a_budget_counts_what_is_written(line: str, here: Path, capsys: Capture) -> None:
    head = f"budget = {BUDGET}\n"
    (here / "budget.toml").write_text(head + POLICY.replace("min-freq = 4\n", "").replace("clip-l2 = 2.5\n", ""))
    (here / "floats.toml").write_text(head + '[[tables]]\nname = "user"\ndtype = "bfloat16"\n')
    told = run(capsys, line.format(budget=BUDGET))
    output = next(path for path in ("out", "out.npz", "out.kvsnap", "out.h5") if f" {path} " in f"{line} ")
    tables = open_checkpoint(here / output).tables
    sizes = {name: row_of(table) for name, table in tables.items()}
    there = {name: table.rows * sizes[name] for name, table in tables.items()}
    assert BUDGET - max(sizes.values()) < sum(there.values()) <= BUDGET
    assert {table["name"]: table["bytes"] for table in told["tables"]} == there
    if "clipped" in told:
        assert {choice["table"]: choice["bytes"] for choice in told["clipped"]} == there


@pytest.mark.parametrize(
    "line",
    [
        "cast model out.kvsnap --policy policy.toml --to snapshot",
        "cast twice.npz out.kvsnap --to snapshot --dtype bfloat16",
    ],
)
def test_a_dry_run_tells_the_losses_of_the_real_one(line: str, here: Path, capsys: Capture) -> None:
    keys, values, freqs = rows_of(0)
    write_tables([ArrayTable("user", keys // 21, values, freqs=freqs)], here / "twice.npz", "npz")
    planned, told = run(capsys, f"{line} --dry-run"), run(capsys, line)
    assert planned.pop("dry_run") is True
    for account in (planned, told):
        assert any("rows are int8" in loss or "a later row" in loss for t in account["tables"] for loss in t["losses"])
        for table in account["tables"]:
            table["checks"] = [check.replace("rows read and written", "rows read") for check in table["checks"]]
    assert planned == told


def test_a_planned_migration_tells_what_int8_loses(here: Path, capsys: Capture) -> None:
    line = "migrate model out.kvsnap --to snapshot --compression int8"
    planned, told = run(capsys, f"{line} --dry-run"), run(capsys, line)
    assert any("rows are int8" in loss for loss in planned["tables"][0]["losses"])
    for what in ("losses", "bytes", "rows_written"):
        assert [table[what] for table in planned["tables"]] == [table[what] for table in told["tables"]]
