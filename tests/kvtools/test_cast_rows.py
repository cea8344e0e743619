"""Rows of int8 and int4 by `kvtools cast`: into what holds them, and said of what does not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.cast_rows import cast_rows
from kvtools.cli.main import main
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint
from kvtools.errors import BadInputError, OutputError, UnknownTableError, UsageError
from kvtools.quantized_rows import QUANTIZED, decode, encode
from kvtools.server.store import TableStore

KEYS = np.arange(60) * 3 - 5
VALUES = np.random.default_rng(0).normal(size=(60, 24)).astype(np.float32)


def source(path: Path) -> Checkpoint:
    values = VALUES.copy()
    values[9] = 0
    tables = [
        ArrayTable("user", KEYS, values, slots={"m": VALUES}, freqs=np.arange(60), part_rows=(20, 40)),
        ArrayTable("item", KEYS, VALUES),
        ArrayTable("ids", KEYS, np.arange(120).reshape(60, 2)),
    ]
    return Checkpoint(path, "memory", {table.schema.name: table for table in tables})


def rows_of(path: Path, table: str) -> np.ndarray:
    chunk = open_checkpoint(path).table(table).to_numpy()
    assert chunk.values is not None
    rows = dict(zip(chunk.keys.tolist(), chunk.values, strict=True))
    return np.stack([rows[key] for key in KEYS.tolist()])


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("to", ["snapshot", "savedmodel"])
def test_rows_become_small_where_a_dialect_has_such(tmp_path: Path, to: str, dtype: str) -> None:
    account, losses, _ = cast_rows(source(tmp_path), tmp_path / "out", dtype, to=to)
    assert account.dialect == to and [table.rows_written for table in account.tables] == [60, 60, 60]
    assert list(losses) == ["user", "item"]
    expected = decode(encode(VALUES, dtype), dtype, 24)
    assert np.array_equal(rows_of(tmp_path / "out", "item"), expected)
    assert losses["item"].max_error == np.abs(expected.astype(np.float64) - VALUES).max()
    assert not rows_of(tmp_path / "out", "user")[9].any()  # a row of zeros is a row
    assert np.array_equal(rows_of(tmp_path / "out", "ids"), np.arange(120).reshape(60, 2))
    opened = open_checkpoint(tmp_path / "out").tables
    assert {name: table.schema.rows_as for name, table in opened.items()} == {"user": dtype, "item": dtype, "ids": None}
    said = {table.name: table for table in account.tables}
    assert said["item"].bytes == 60 * (8 + 6 + (24 if dtype == "int8" else 12))
    assert any("only floating-point numbers become" in change for change in said["ids"].changes)
    assert any("optimizer slots m" in loss for loss in said["user"].losses)


@pytest.mark.parametrize("to", ["snapshot", "savedmodel"])
def test_other_tables_are_written_as_they_are(tmp_path: Path, to: str) -> None:
    _, losses, _ = cast_rows(source(tmp_path), tmp_path / "out", "int4", to=to, tables=["user"])
    assert list(losses) == ["user"]
    assert np.array_equal(rows_of(tmp_path / "out", "item"), VALUES)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("to", ["snapshot", "savedmodel", "npz"])
def test_half_precision_goes_anywhere(tmp_path: Path, to: str, dtype: str) -> None:
    _, losses, _ = cast_rows(source(tmp_path), tmp_path / "out", dtype, to=to)
    assert open_checkpoint(tmp_path / "out", None).table("item").schema.value_dtype == dtype
    assert 0 < losses["item"].mean_error < losses["item"].max_error < 0.02


@pytest.mark.parametrize("to", [None, "npz", "tfplugin", "safetensors"])
def test_a_dialect_without_such_rows_names_the_ways_out(tmp_path: Path, sample_path: Path, to: str | None) -> None:
    with pytest.raises(
        UsageError, match=r"no rows of int8 .* --to snapshot or --to savedmodel, or choose --dtype float16"
    ):
        cast_rows(open_checkpoint(sample_path), tmp_path / "out", "int8", to=to)
    assert not (tmp_path / "out").exists()


def test_what_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="got --dtype int2, expected float32, float16, bfloat16, int8, int4"):
        cast_rows(source(tmp_path), out, "int2", to="snapshot")
    with pytest.raises(UnknownTableError):
        cast_rows(source(tmp_path), out, "int8", to="savedmodel", tables=["no"])
    values = VALUES.copy()
    values[3, 5] = np.inf
    bad = Checkpoint(tmp_path, "memory", {"emb": ArrayTable("emb", KEYS, values)})
    for to in ("snapshot", "savedmodel"):
        with pytest.raises(BadInputError, match="table 'emb' as int8: the row of key 4 has NaN or infinity"):
            cast_rows(bad, out, "int8", to=to)
    assert list(tmp_path.iterdir()) == []
    out.mkdir()
    for to in ("snapshot", "savedmodel"):
        with pytest.raises(OutputError, match=str(out)):
            cast_rows(source(tmp_path), out, "int8", to=to)


def test_what_the_server_answers(tmp_path: Path) -> None:
    for to in ("snapshot", "savedmodel"):
        cast_rows(source(tmp_path), tmp_path / to, "int4", to=to)
        store = TableStore(tmp_path / to, cache=tmp_path / "cache")
        got, found = store.table("item").lookup(KEYS)
        assert found.all() and np.array_equal(got, decode(encode(VALUES, "int4"), "int4", 24))


def test_the_command_tells_what_is_lost(tmp_path: Path, sample_path: Path, capsys: Any) -> None:
    out = str(tmp_path / "a.kvsnap")
    assert main(["cast", str(sample_path), out, "--dtype", "int8", "--to", "snapshot"]) == 0
    told = capsys.readouterr().out
    assert "mean cosine" in told and "rows are int8 with an offset and a scale" in told
    assert main(["cast", str(sample_path), out, "--dtype", "int4", "--to", "snapshot", "--force", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert 0.99 < report["roundings"]["ads/emb"]["mean_cosine"] <= 1
    assert main(["inspect", out, "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert {table["name"]: table["rows_as"] for table in tables}["ads/emb"] == "int4"
    assert main(["cast", str(sample_path), out, "--dtype", "int4", "--to-key-dtype", "int64"]) == 2
    assert "cast in two steps" in capsys.readouterr().err


def test_rows_that_point_elsewhere_are_a_warning(tmp_path: Path, capsys: Any) -> None:
    values = np.random.default_rng(0).standard_t(1.2, size=(500, 64)).astype(np.float32)
    np.savez(tmp_path / "t.npz", keys=np.arange(500), values=values)
    path = str(tmp_path / "t.npz")
    for number, command in enumerate(
        (["cast", path], ["export", path, "--savedmodel"], ["export", path, "--snapshot"])
    ):
        for dtype in QUANTIZED:
            out = str(tmp_path / f"{number}_{dtype}")
            more = ["--to", "savedmodel"] if command[0] == "cast" else []
            assert main([*command, out, "--dtype", dtype, *more]) == 0
            warned = capsys.readouterr().err
            assert ("as int4 its rows have a cosine of 0.9" in warned) == (dtype == "int4")
            assert ("a wider --dtype keeps more" in warned) == (dtype == "int4")


def with_slots(path: Path, accumulator: float = 2.0) -> Checkpoint:
    slots = {"m": np.full((60, 24), 1e-9, np.float32), "accumulator": np.ones((60, 24), np.float32)}
    slots["accumulator"][7, 3] = accumulator
    return Checkpoint(path, "memory", {"user": ArrayTable("user", KEYS, VALUES, slots=slots)})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("to", ["hdf5", "npz"])
def test_slots_keep_their_type_where_a_dialect_can_hold_it(tmp_path: Path, to: str, dtype: str) -> None:
    _, _, costs = cast_rows(with_slots(tmp_path, 1e6), tmp_path / "out", dtype, to=to)
    written = open_checkpoint(tmp_path / "out").table("user").to_numpy()
    assert costs == {} and written.values is not None and written.values.dtype.name == dtype
    assert written.slots["accumulator"].dtype == np.float32 and written.slots["accumulator"].max() == 1e6
    assert written.slots["m"].min() == np.float32(1e-9)


@pytest.mark.parametrize("to", ["tfplugin", "tfra"])
def test_slots_that_follow_are_told_of(tmp_path: Path, to: str) -> None:
    _, _, costs = cast_rows(with_slots(tmp_path), tmp_path / "out", "float16", to=to)
    assert [(cost.column, cost.became, cost.vanished) for cost in costs["user"]] == [
        ("slot m", "float16", 60 * 24),
        ("slot accumulator", "float16", 0),
    ]


def test_a_slot_that_would_become_infinite_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(
        BadInputError,
        match=r"table 'user' as float16: slot accumulator of key 16 has 1e\+06, which would .* such as hdf5",
    ):
        cast_rows(with_slots(tmp_path, 1e6), tmp_path / "out", "float16", to="tfplugin")
    assert list(tmp_path.iterdir()) == []


def test_initial_values_that_would_become_infinite_are_an_error(tmp_path: Path) -> None:
    begun = np.full((2, 24), 1e6, np.float32)
    table = ArrayTable("user", KEYS, VALUES, extras={"initial_values": begun})
    checkpoint = Checkpoint(tmp_path, "memory", {"user": table})
    with pytest.raises(BadInputError, match=r"a row of initial_values has 1e\+06, which would become infinite"):
        cast_rows(checkpoint, tmp_path / "out", "float16", to="tfplugin")


def test_the_command_tells_what_slots_lose(tmp_path: Path, capsys: Any) -> None:
    path, out = str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")
    cast_rows(with_slots(tmp_path), path, "float32", to="tfplugin")
    assert main(["cast", path, out, "--dtype", "float16"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"^user +m +float32 to float16 .*1,440", told, re.M), told
    assert main(["cast", path, out, "--dtype", "float16", "--force", "--json"]) == 0
    costs = json.loads(capsys.readouterr().out)["casts"]["user"]
    assert [cost["vanished"] for cost in costs] == [1440, 0]


def test_a_model_of_tables_tells_what_a_snapshot_does(tmp_path: Path, sample_path: Path) -> None:
    said = []
    for to in ("snapshot", "savedmodel"):
        account, _, _ = cast_rows(open_checkpoint(sample_path), tmp_path / to, "int8", to=to)
        table = account.tables[0]
        exact = [loss for loss in table.losses if loss.startswith("the exact numbers: rows are int8")]
        said.append((exact, table.checks))
    assert said[0] == said[1] and len(said[0][0]) == 1 and len(said[0][1]) == 2


def test_int8_rows_that_become_float32_are_told_of(tmp_path: Path, capsys: Any) -> None:
    path = str(tmp_path / "a.kvsnap")
    cast_rows(source(tmp_path), path, "int8", to="snapshot")
    line = "its int8 rows are written as the float32 that they are read as; `kvtools cast --dtype int8` makes such"
    for number, command in enumerate(
        (
            ["migrate", "--to", "snapshot"],
            ["clip", "--max-abs", "1e-30"],
            ["split", "--by", "mod:2"],
            ["merge"],
            ["reshard", "--parts", "1"],
        )
    ):
        before = [path, str(tmp_path / f"{number}.kvsnap")]
        if command[0] == "split":
            before[1] = str(tmp_path / "{}.kvsnap")
        if command[0] == "merge":
            before = [path, path, before[1]]
        assert main([command[0], *before, *command[1:]]) == 0
        assert line in capsys.readouterr().out, command
    assert main(["migrate", path, str(tmp_path / "d"), "--to", "snapshot", "--compression", "int8"]) == 0
    assert line not in capsys.readouterr().out
    assert main(["export", path, "--snapshot", str(tmp_path / "c.kvsnap")]) == 0
    assert "they are read as; --dtype int8 makes such of them again" in capsys.readouterr().out
    assert main(["cast", path, str(tmp_path / "b.kvsnap"), "--dtype", "int4"]) == 0
    assert "float32 that they" not in capsys.readouterr().out


def test_statistics_count_the_bytes_that_are_stored(tmp_path: Path, capsys: Any) -> None:
    path = str(tmp_path / "a.kvsnap")
    cast_rows(source(tmp_path), path, "int8", to="snapshot", tables=["item"])
    assert main(["stats", path, "--json", "--table", "item"]) == 0
    table = json.loads(capsys.readouterr().out)["tables"][0]
    assert table["row_bytes"] == 8 + 6 + 24
    assert table["clip"]["abs"][-1]["bytes"] == table["clip"]["abs"][-1]["rows"] * table["row_bytes"]
