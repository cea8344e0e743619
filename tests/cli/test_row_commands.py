"""`kvtools top`, `scan` and `neighbours`, and `--where` of those that read and of those that write."""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.cli.main import main
from kvtools.dialects.detect import open_checkpoint
from kvtools.migrate import write_tables

Capture = pytest.CaptureFixture[str]


def table(name: str, rows: int, dim: int, **more: Any) -> ArrayTable:
    rng = np.random.default_rng(rows)
    values = rng.normal(size=(rows, dim)).astype(np.float32)
    values[3], values[4, 0] = 0, np.nan
    return ArrayTable(name, rng.permutation(rows) - rows // 2, values, **more)


def freqs(rows: int) -> np.ndarray:
    return np.random.default_rng(1).zipf(1.5, rows).clip(1, 10**6).astype(np.uint32)


@pytest.fixture(scope="module")
def tables() -> dict[str, ArrayTable]:
    slots = {"Adam.m": np.arange(300, dtype=np.float32).reshape(60, 5)}
    return {
        "deep/user": table("deep/user", 60, 5, freqs=freqs(60), versions=np.arange(60)[::-1], slots=slots),
        "deep/item": table("deep/item", 40, 5, freqs=freqs(40)),
        "wide": table("wide", 20, 3),
    }


@pytest.fixture(scope="module")
def path(tables: dict[str, ArrayTable], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("rows") / "model.ckpt-1")
    write_tables(list(tables.values()), path, "tfplugin")
    return path


def rows_of(capsys: Capture, path: str, line: str) -> list[dict[str, Any]]:
    command, *words = shlex.split(line)
    assert main([command, path, *words, "--json-lines"]) == 0
    return [json.loads(one) for one in capsys.readouterr().out.splitlines()]


def run(path: str, line: str) -> int:
    command, *words = shlex.split(line)
    return main([command, path, *words])


# ---- top


def test_top_of_each_table_and_of_all(path: str, tables: dict[str, ArrayTable], capsys: Capture) -> None:
    rows = rows_of(capsys, path, "top -n 3")
    for name in ("deep/user", "deep/item"):
        of, keys = tables[name].to_numpy().freqs, tables[name].all_keys()
        expected = sorted(range(len(keys)), key=lambda at: (-int(of[at]), int(keys[at])))[:3]
        assert [(row["key"], row["freq"]) for row in rows if row["table"] == name] == [
            (keys[at], of[at]) for at in expected
        ]
    assert {row["table"] for row in rows} == {"deep/user", "deep/item"}
    together = rows_of(capsys, path, "top -n 5 --overall --by norm --columns norm")
    norms = [row["norm"] for row in together]
    assert norms == sorted(norms, reverse=True) and {"wide", "deep/user"} & {row["table"] for row in together}
    assert list(together[0]) == ["table", "key", "norm"]


def test_top_says_which_tables_and_rows_are_left_out(path: str, capsys: Capture) -> None:
    assert run(path, "top --by freq -n 1") == 0
    assert "kvtools: wide is left out: ranking table 'wide' by freq: it has no frequencies\n" in capsys.readouterr().err
    assert run(path, "top --by freq --table wide") == 1
    assert "it has no frequencies" in capsys.readouterr().err
    assert run(path, "top --by norm -n 1 --table wide") == 0
    assert capsys.readouterr().err == "kvtools: wide: 1 row has no number to compare (NaN): left out\n"


def test_top_without_frequencies_is_by_norm(path: str, capsys: Capture) -> None:
    assert run(path, "top --table wide -n 2") == 0
    assert capsys.readouterr().out.split()[:5] == ["table", "key", "freq", "version", "norm"]


@pytest.mark.parametrize(
    ("by", "name"), [("version", "version"), ("value-abs", "value-abs"), ("norm * 2", "norm * 2"), ("-key", "-key")]
)
@pytest.mark.parametrize("ascending", [False, True])
def test_top_by_anything(path: str, capsys: Capture, by: str, name: str, ascending: bool) -> None:
    rows = rows_of(capsys, path, f"top --table deep/user --by={shlex.quote(by)} {'--ascending' * ascending}")
    numbers = [row[name] for row in rows]
    assert len(numbers) == 10 and numbers == sorted(numbers, reverse=not ascending)


def test_top_in_other_forms(path: str, tables: dict[str, ArrayTable], tmp_path: Path, capsys: Capture) -> None:
    assert run(path, "top --table deep/user --by norm -n 2 --csv --columns freq") == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert list(lines[0]) == ["key", "freq", "norm"] and len(lines) == 2
    assert run(path, "top --table deep/user --by norm -n 2 --json") == 0
    record = json.loads(capsys.readouterr().out)
    assert record["by"] == "norm" and [row["key"] for row in record["rows"]] == [int(line["key"]) for line in lines]
    assert run(path, f"top --table deep/user --by norm -n 2 --output {tmp_path}/top.npz") == 0
    assert open_checkpoint(tmp_path / "top.npz").table("deep/user").all_keys().tolist() == [
        int(x["key"]) for x in lines
    ]
    assert run(path, "top --table wide --by key -n 1 --csv --columns part") == 0
    assert capsys.readouterr().out.splitlines()[-2] == "key,part", "which has been there already"
    for none, how in (("top --limit 0", ""), ("top --where 'norm < 0'", " that meets --where")):
        assert run(path, none) == 3
        said = capsys.readouterr().err.splitlines()[-1]
        assert said == f"kvtools: ranking rows: there is none to show in the tables{how}"
    for wrong in ("top --limit -1", "top --by 'freq >'", "top --by 'freq > 2'", "top --by frq", "top --csv"):
        assert run(path, wrong) == 2
    assert "Traceback" not in capsys.readouterr().err


# ---- scan


def test_scan_of_a_range(path: str, tables: dict[str, ArrayTable], capsys: Capture) -> None:
    rows = rows_of(capsys, path, "scan --from -3 --to 4")
    expected = [
        (name, key) for name in sorted(tables) for key in range(-3, 5) if key in tables[name].all_keys().tolist()
    ]
    assert [(row["table"], row["key"]) for row in rows] == expected
    values = dict(zip(tables["deep/user"].all_keys().tolist(), tables["deep/user"].to_numpy().values, strict=True))
    for row in rows:
        if row["table"] == "deep/user" and "NaN" not in row["value"]:
            np.testing.assert_array_equal(np.float32(row["value"]), values[row["key"]])


def test_scan_as_rows_lie(path: str, tables: dict[str, ArrayTable], capsys: Capture) -> None:
    assert run(path, "scan --order stream --limit 7 --table wide --csv --columns value,part") == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [int(line["key"]) for line in lines] == tables["wide"].all_keys()[:7].tolist()
    got = np.array([[line[f"value.{i}"] for i in range(3)] for line in lines], np.float32)
    np.testing.assert_array_equal(got, tables["wide"].to_numpy().values[:7])
    assert list(lines[0])[:2] == ["key", "part"]


@pytest.mark.parametrize("order", ["key", "stream"])
def test_scan_into_a_file(
    path: str, tables: dict[str, ArrayTable], tmp_path: Path, capsys: Capture, order: str
) -> None:
    out = tmp_path / "out"
    assert run(path, f"scan --from 0 --order {order} --output {out} --output-dialect npz --table 'deep/*'") == 0
    assert "wrote 50 rows" in capsys.readouterr().out
    written = open_checkpoint(out)
    for name in ("deep/user", "deep/item"):
        keys = tables[name].all_keys()
        inside = keys[keys >= 0]
        assert written.table(name).all_keys().tolist() == (np.sort(inside) if order == "key" else inside).tolist()
    assert run(path, f"scan --output {tmp_path}/none.any") == 2
    assert "say --output-dialect one of" in capsys.readouterr().err
    assert run(path, f"scan --from 1000 --output {tmp_path}/none.npz") == 3
    assert {one.rows for one in open_checkpoint(tmp_path / "none.npz").tables.values()} == {0}


def test_scan_where_nothing_is(path: str, capsys: Capture) -> None:
    assert run(path, "scan --from 1000") == 3
    assert run(path, "scan --from 1000 --csv --table wide --columns value,norm") == 3
    said = capsys.readouterr()
    assert said.out == "key,norm,value.0,value.1,value.2\n"
    assert said.err.count("kvtools: reading rows: there is none with a key in the range\n") == 2
    for wrong in ("scan --from 5 --to 4", "scan --from x", f"scan --to {2**64}", "scan --limit -1", "scan --order up"):
        assert run(path, wrong) == 2
    assert "Traceback" not in capsys.readouterr().err


# ---- neighbours


def cosines(values: np.ndarray, vector: np.ndarray) -> np.ndarray:
    wide = values.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (wide @ vector) / np.sqrt((wide**2).sum(axis=1)) / np.sqrt((vector.astype(np.float64) ** 2).sum())


def test_neighbours_of_keys(path: str, tables: dict[str, ArrayTable], capsys: Capture) -> None:
    keys = tables["deep/user"].all_keys()
    asked = [int(keys[0]), int(keys[10])]
    assert run(path, f"neighbours {asked[0]} {asked[1]} 9999 --table deep/user -k 4 --json") == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record["metric"] == "cosine" and record["missing"] == [9999]
    values = tables["deep/user"].to_numpy().values
    for found, row in zip(record["neighbours"], (0, 10), strict=True):
        near = cosines(values, values[row])
        near[row] = np.nan
        order = np.argsort(-np.where(np.isnan(near), -np.inf, near))[:4]
        assert found["key"] == keys[row] and [one["key"] for one in found["neighbours"]] == keys[order].tolist()
        np.testing.assert_allclose([one["score"] for one in found["neighbours"]], near[order])
    assert "1 row with NaN or infinity: left out" in captured.err
    assert "1 row of zeros, which have no direction: left out" in captured.err
    assert "1 key in no table: 9999" in captured.err


@pytest.mark.parametrize("form", ["npy", "text"])
def test_neighbours_of_vectors(
    path: str, tables: dict[str, ArrayTable], tmp_path: Path, capsys: Capture, form: str
) -> None:
    vectors = np.random.default_rng(0).normal(size=(2, 5)).astype(np.float32)
    if form == "npy":
        np.save(tmp_path / "v", vectors)
    else:
        lines = [", ".join(repr(float(number)) for number in vector) for vector in vectors]
        (tmp_path / "v.npy").write_text("\n".join(lines) + "\n\n")
    for metric in ("dot", "l2"):
        line = f"neighbours --vector {tmp_path}/v.npy --table deep/item -k 3 --metric {metric} --csv"
        assert run(path, line) == 0
        lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
        keys, values = tables["deep/item"].all_keys(), tables["deep/item"].to_numpy().values.astype(np.float64)
        for number, vector in enumerate(vectors):
            scores = -(values @ vector) if metric == "dot" else np.sqrt(((values - vector) ** 2).sum(axis=1))
            order = np.argsort(np.where(np.isnan(scores), np.inf, scores))[:3]
            mine = [line for line in lines if int(line["of_vector"]) == number]
            assert [int(line["key"]) for line in mine] == keys[order].tolist()
            assert [line["rank"] for line in mine] == ["1", "2", "3"]
            expected = -scores[order] if metric == "dot" else scores[order]
            np.testing.assert_allclose([float(line["score"]) for line in mine], expected)


def test_neighbours_in_another_table(path: str, tables: dict[str, ArrayTable], capsys: Capture) -> None:
    key = int(tables["deep/user"].all_keys()[0])
    assert run(path, f"neighbours {key} --of deep/user --table deep/item --metric dot -k 40 --json-lines") == 0
    (found,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found["table"] == "deep/item" and len(found["neighbours"]) == 39  # all but the row with NaN
    assert key in [one["key"] for one in found["neighbours"]]
    assert run(path, f"neighbours {key} --of deep/user --table wide") == 1
    assert (
        "got vectors of 5 numbers, expected as many as the rows of the tables have: 'wide' 3" in capsys.readouterr().err
    )


def test_neighbours_of_rows_that_have_none(path: str, tables: dict[str, ArrayTable], capsys: Capture) -> None:
    keys = tables["wide"].all_keys()
    assert run(path, f"neighbours {keys[3]} {keys[4]} --table wide") == 3
    assert f"wide: nothing is near key {keys[3]}, {keys[4]}: a NaN" in capsys.readouterr().err
    assert run(path, "neighbours 777777") == 3
    assert run(path, f"neighbours {keys[3]} --table wide --metric l2 -k 1") == 0


def test_vectors_from_standard_input_and_wrong_ones(
    path: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"1 0 0\n0 1 0\n")))
    assert run(path, "neighbours --vector - --table wide -k 1 --csv") == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    for data, said in (
        (b"", "got no numbers"),
        (b"1 2\n3 x\n", "line 2: got '3 x'"),
        (b"1 2\n3\n", "line 2: got 1 numbers, expected 2"),
        (b"\xff\xfe\x00", "neither text nor .npy"),
        (b"\x93NUMPY\x01", "it is no .npy file"),
    ):
        (tmp_path / "v").write_bytes(data)
        assert run(path, f"neighbours --vector {tmp_path}/v --table wide") == 1
        assert said in (err := capsys.readouterr().err) and err.count("\n") == 1
    np.save(tmp_path / "three.npy", np.zeros((2, 2, 2)))
    assert run(path, f"neighbours --vector {tmp_path}/three.npy --table wide") == 1
    for wrong in (
        "neighbours",
        "neighbours 5 --vector x",
        "neighbours 5 -k 0",
        "neighbours 5 -k -1",
        "neighbours 5 --metric far",
        "neighbours 5 --csv",
        "neighbours --vector x --of wide",
    ):
        assert run(path, wrong) == 2
    assert "got -k -1, expected 1 or more" in (err := capsys.readouterr().err) and "Traceback" not in err


# ---- --where


CONDITION = "freq >= 3 and norm < 2.5"


def meets(table: ArrayTable) -> np.ndarray:
    norms = np.sqrt((table.to_numpy().values.astype(np.float64) ** 2).sum(axis=1)).astype(np.float32)
    return np.asarray((table.to_numpy().freqs >= 3) & (norms < 2.5))


def test_get_all_rows_that_meet_a_condition(
    path: str, tables: dict[str, ArrayTable], tmp_path: Path, capsys: Capture
) -> None:
    rows = rows_of(capsys, path, f"get --where '{CONDITION}' --table 'deep/*' --columns freq")
    for name in ("deep/user", "deep/item"):
        one = tables[name]
        assert [row["key"] for row in rows if row["table"] == name] == one.all_keys()[meets(one)].tolist()
    assert run(path, f"get --where '{CONDITION}' --table 'deep/*' --output {tmp_path}/a.npz") == 0
    written = open_checkpoint(tmp_path / "a.npz").tables
    assert {name: one.rows for name, one in written.items()} == {
        name: int(meets(tables[name]).sum()) for name in ("deep/user", "deep/item")
    }
    capsys.readouterr()
    assert run(path, "get --where 'freq > 1000000' --json") == 3
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"rows": [], "missing": []}
    assert "wide is left out: judging rows of table 'wide'" in captured.err


def test_get_keys_that_meet_a_condition(path: str, tables: dict[str, ArrayTable], capsys: Capture) -> None:
    one = tables["deep/user"]
    keys = one.all_keys().tolist()
    asked = " ".join(map(str, [*keys, 999]))
    assert run(path, f"get {asked} --table deep/user --where '{CONDITION}' --json --columns freq") == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert [row["key"] for row in record["rows"]] == one.all_keys()[meets(one)].tolist()
    left = int((~meets(one)).sum())
    assert record["missing"] == [999] and record["filtered"] == left
    assert f"kvtools: {left} of 61 keys do not meet --where\n" in captured.err
    assert run(path, f"get {keys[0]} --table deep/user --where 'freq < 0'") == 3


@pytest.mark.parametrize("command", ["clip", "migrate", "export --snapshot"])
def test_rows_that_are_written_meet_it(
    path: str, tables: dict[str, ArrayTable], tmp_path: Path, capsys: Capture, command: str
) -> None:
    out = tmp_path / "out.kvsnap"
    words = [path, str(out)] if command != "export --snapshot" else [path, "--snapshot", str(out)]
    options = ["--table", "deep/*", "--where", CONDITION, "--json"] + (
        ["--to", "snapshot"] if command == "clip" else []
    )
    if command == "clip":  # other tables are carried along, so each has to be written
        options[-2:] = ["--to", "npz"]
        words[1] = str(out := tmp_path / "out.npz")
    assert main([command.split()[0], *words, *options]) == 0, capsys.readouterr().err
    written = open_checkpoint(out).tables
    for name in ("deep/user", "deep/item"):
        expected = tables[name].all_keys()[meets(tables[name])].tolist()
        if command != "export --snapshot":  # an export leaves out rows of zeros, too
            assert sorted(written[name].all_keys().tolist()) == sorted(expected)
        else:
            zeros = tables[name].all_keys()[(tables[name].to_numpy().values == 0).all(axis=1)].tolist()
            assert sorted(written[name].all_keys().tolist()) == sorted(set(expected) - set(zeros))
    told = json.loads(capsys.readouterr().out)
    if command == "clip":
        failed = {one["table"]: one["failed"]["where"] for one in told["clipped"]}
        assert failed == {name: int((~meets(tables[name])).sum()) for name in ("deep/item", "deep/user")}
        assert written["wide"].rows == 20
    if command == "migrate":
        kept = {one["table"]: one["bytes"] for one in told["clipped"]}
        assert kept == {one["name"]: one["bytes"] for one in told["tables"]}


def test_clip_drops_rows_that_meet_a_condition(
    path: str, tables: dict[str, ArrayTable], tmp_path: Path, capsys: Capture
) -> None:
    line = f"clip {tmp_path}/out --drop-where '{CONDITION}' --table deep/user --table deep/item"
    assert run(path, line) == 0
    cut = int(meets(tables["deep/user"]).sum())
    assert f"cut: deep/user: {cut} fail drop-where" in capsys.readouterr().out
    written = open_checkpoint(tmp_path / "out").table("deep/user").all_keys().tolist()
    assert written == tables["deep/user"].all_keys()[~meets(tables["deep/user"])].tolist()


def test_conditions_in_a_policy(path: str, tables: dict[str, ArrayTable], tmp_path: Path, capsys: Capture) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(f'[[tables]]\nname = "deep/*"\nwhere = "{CONDITION}"\ndrop-where = "key < 0"\n')
    assert run(path, f"clip {tmp_path}/out --policy {policy}") == 0
    one = tables["deep/user"]
    expected = one.all_keys()[meets(one) & (one.all_keys() >= 0)].tolist()
    assert open_checkpoint(tmp_path / "out").table("deep/user").all_keys().tolist() == expected
    policy.write_text('[[tables]]\nname = "wide"\nwhere = "freq > 2"\n')
    assert run(path, f"clip {tmp_path}/none --policy {policy}") == 2
    assert "judging rows of table 'wide' by 'freq > 2': got 'freq'" in capsys.readouterr().err
    policy.write_text('[[tables]]\nname = "wide"\nwhere = "norm >"\n')
    assert run(path, f"clip {tmp_path}/none --policy {policy}") == 2
    assert not (tmp_path / "none.index").exists()


def test_split_by_a_condition(path: str, tables: dict[str, ArrayTable], tmp_path: Path, capsys: Capture) -> None:
    assert run(path, f"split {tmp_path}/{{}}.npz --to npz --where '{CONDITION}' --table 'deep/*'") == 0
    for name in ("deep/user", "deep/item"):
        keys, meeting = tables[name].all_keys(), meets(tables[name])
        found = open_checkpoint(tmp_path / "matching.npz").table(name).all_keys()
        rest = open_checkpoint(tmp_path / "rest.npz").table(name).all_keys()
        assert found.tolist() == keys[meeting].tolist() and rest.tolist() == keys[~meeting].tolist()
    assert run(path, f"split {tmp_path}/x --where 'freq > 2'") == 2
    assert "table 'wide'" in capsys.readouterr().err and not (tmp_path / "x").exists()


def test_a_dry_run_of_migrate_counts_the_rows_that_meet_it(path: str, tmp_path: Path, capsys: Capture) -> None:
    assert run(path, f"migrate {tmp_path}/a.npz --where 'key >= 0' --table wide --dry-run --json") == 0
    record = json.loads(capsys.readouterr().out)
    assert [one["rows_written"] for one in record["tables"]] == [10] and record["clipped"][0]["cut"] == 10
    assert run(path, f"migrate {tmp_path}/a.npz --where 'key >= 0' --table wide") == 0
    assert "cut: wide: 10 fail where" in (out := capsys.readouterr().out) and "nothing left out" not in out


# ---- lists of tables


def test_tables_in_an_order_and_their_total(path: str, capsys: Capture) -> None:
    def names(line: str) -> list[str]:
        assert run(path, f"{line} --json") == 0
        return [table["name"] for table in json.loads(capsys.readouterr().out)["tables"]]

    for command in ("inspect", "stats"):
        assert names(f"{command} --sort rows") == ["deep/user", "deep/item", "wide"]
        assert names(f"{command} --sort bytes") == ["deep/user", "deep/item", "wide"]
        assert names(f"{command} --sort name") == ["deep/item", "deep/user", "wide"]
        assert run(path, f"{command} --sort size") == 2
        assert "got --sort 'size', expected bytes, rows or name" in capsys.readouterr().err
        assert run(path, command) == 0
        assert "\n3 tables, 120 rows, 5.4 KiB\n" in capsys.readouterr().out
        assert run(path, f"{command} --table wide") == 0
        assert "tables, " not in capsys.readouterr().out


def test_accounts_end_with_a_total(path: str, tmp_path: Path, capsys: Capture) -> None:
    assert run(path, f"clip {tmp_path}/a.npz --to npz --max-abs 0.5") == 0
    said = capsys.readouterr().out
    assert "\n3 tables, 120 rows, " in said and " cut, " in said and "\n3 tables, " in said.partition("nothing")[0]


def test_a_number_beyond_the_end_of_rows_is_null_and_said_to_be(path: str, capsys: Capture) -> None:
    assert run(path, "top --by value[9] --table wide") == 3
    assert "20 rows have no number to compare (NULL or NaN; value[n] is NULL" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["1_000", "\u0661", "1.5"])
def test_scan_takes_whole_numbers_only(path: str, capsys: Capture, word: str) -> None:
    assert main(["scan", path, "--from", word]) == 2
    assert f"got --from {word!r}, expected a whole number" in capsys.readouterr().err


def test_rows_are_told_the_part_that_they_lie_in(sample_path: Path, capsys: Capture) -> None:
    whole = ["-7", "-3", "-1", "0", "1", "2", "5"]
    parts = {int(key): int(key) % 3 for key in whole}
    for line in (
        f"get {' '.join(whole)}",
        "scan --from -7 --to 5",
        "top --by part -n 11 --where 'key between -7 and 5'",
    ):
        found = rows_of(capsys, str(sample_path), f"{line} --table ads/emb --columns part")
        assert {row["key"]: row["part"] for row in found} == parts, line
    found = rows_of(capsys, str(sample_path), f"get {' '.join(whole)} --table ads/emb --where 'part = 2'")
    assert [row["key"] for row in found] == [key for key, part in parts.items() if part == 2]
