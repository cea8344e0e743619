from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from kvtools.array_table import ArrayTable, table_from_arrays
from kvtools.cli.main import main
from kvtools.dialects.detect import open_checkpoint
from kvtools.migrate import write_tables

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize("keys", [["0", "-7", "99"], ["0,-7", "99"], ["--", "0", "-7", "99"]])
def test_text(sample_path: Path, capsys: Capture, keys: list[str]) -> None:
    assert main(["get", str(sample_path), *keys]) == 0
    output = capsys.readouterr()
    lines = [line.split() for line in output.out.splitlines()]
    assert [line[:2] for line in lines[1:]] == [["ads/emb", "0"], ["ads/emb", "-7"], ["user_emb", "0"]]
    assert lines[2][:8] == ["ads/emb", "-7", "2", "1700000001", "2", "2.125", "2.25", "2.375"]
    assert lines[2][8:13] == ["Adam.m", "-2", "-2.125", "-2.25", "-2.375"]
    assert output.err == "kvtools: looking up 3 keys: 1 in no table: 99\n"


def test_integers_are_whole(tmp_path: Path, capsys: Capture) -> None:
    table = ArrayTable("ids", np.array([7]), np.array([[2**53 + 1, -(2**63)]]))
    write_tables([table], str(tmp_path / "ids.npz"), "npz")
    for arguments in (["get", "7"], ["inspect", "--head", "1"]):
        assert main([arguments[0], str(tmp_path / "ids.npz"), *arguments[1:]]) == 0
        assert capsys.readouterr().out.rstrip().endswith(" 9007199254740993 -9223372036854775808")


def test_only_negative_keys_before_options(sample_path: Path, capsys: Capture) -> None:
    assert main(["get", str(sample_path), "-7", "-3", "--table", "ads/emb", "--columns", "freqs"]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["table", "key", "freq"],
        ["ads/emb", "-7", "2"],
        ["ads/emb", "-3", "3"],
    ]


def test_json(sample_path: Path, capsys: Capture) -> None:
    assert main(["get", str(sample_path), "5", "-7", "77", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["missing"] == [77]
    assert [row["key"] for row in report["rows"]] == [5, -7]
    assert report["rows"][1] == {
        "table": "ads/emb",
        "key": -7,
        "value": [2, 2.125, 2.25, 2.375],
        "freq": 2,
        "version": 1700000001,
        "slots": {"Adam.m": [-2, -2.125, -2.25, -2.375], "Adam.v": [4, 4.25, 4.5, 4.75]},
    }
    assert main(["get", str(sample_path), "77", "--json"]) == 3
    assert json.loads(capsys.readouterr().out) == {"rows": [], "missing": [77]}


def test_json_lines_from_stdin(sample_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"5\n-7\n5\n")))
    assert main(["get", str(sample_path), "--keys-file", "-", "--columns", "values", "--json-lines"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["key"] for row in rows] == [5, -7, 5] and list(rows[0]) == ["table", "key", "value"]


def test_no_two_columns_of_csv_have_one_name(tmp_path: Path, capsys: Capture) -> None:
    keys, rows = np.arange(2), np.ones((2, 2), np.float32)
    table = table_from_arrays("t", keys, rows, slots={"value": 3 * rows, "m": rows})
    write_tables([table], str(tmp_path / "a.npz"), "npz")
    assert main(["get", str(tmp_path / "a.npz"), "1", "--csv"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "key,value.0,value.1,slot_value.0,slot_value.1,m.0,m.1",
        "1,1.0,1.0,3.0,3.0,1.0,1.0",
    ]


def test_slots_called_as_fields_have_the_names_that_sql_gives_them(tmp_path: Path, capsys: Capture) -> None:
    names = ["value", "slot_value", "norm", "freq", "m", "M"]
    rows = np.ones((1, 1), np.float32)
    slots = {name: at * rows for at, name in enumerate(names)}
    path = str(tmp_path / "a.npz")
    write_tables([table_from_arrays("t", np.arange(1), rows, slots=slots, freqs=np.array([7]))], path, "npz")
    assert main(["get", path, "0", "--csv"]) == 0
    header, numbers = (line.split(",") for line in capsys.readouterr().out.splitlines())
    shown = dict(zip(header, numbers, strict=True))
    assert len(shown) == len(header) == 9
    assert main(["sql", path, "from t", "--csv"]) == 0
    header, numbers = (line.split(",") for line in capsys.readouterr().out.splitlines())
    asked = dict(zip(header, numbers, strict=True))
    assert {name: asked[name] for name in shown} == shown
    assert main(["get", path, "0", "--csv", "--columns", "norm,slot_norm,slot_value"]) == 0
    assert capsys.readouterr().out == "key,norm,slot_value.0,slot_slot_value.0,slot_norm.0\n0,1.0,0.0,1.0,2.0\n"


def test_csv(sample_path: Path, capsys: Capture) -> None:
    arguments = ["get", str(sample_path), "-7", "--csv", "--columns", "values,freqs,Adam.v"]
    assert main([*arguments, "--table", "ads/emb"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows == [
        {
            "key": "-7",
            "freq": "2",
            **{f"value.{i}": str(2 + i / 8) for i in range(4)},
            **{f"Adam.v.{i}": str(4 + i / 4) for i in range(4)},
        }
    ]
    assert main(arguments) == 2


def test_writing_the_rows(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    np.save(tmp_path / "keys.npy", np.array([42, -7, 42, 99]))
    out = str(tmp_path / "rows")
    arguments = [
        "get",
        str(sample_path),
        "--keys-file",
        str(tmp_path / "keys.npy"),
        "--output",
        out,
        "--to",
        "tfplugin",
    ]
    assert main(arguments) == 0
    assert "wrote 2 rows" in capsys.readouterr().out
    table = open_checkpoint(out).tables["ads/emb"]
    assert table.all_keys().tolist() == [42, -7] and table.schema.slots
    assert main(arguments) == 1
    assert main([*arguments, "--force"]) == 0


@pytest.mark.parametrize("suffix", ["npz", "h5"])
def test_writing_none_of_the_rows_writes_tables_without_any(
    sample_path: Path, tmp_path: Path, capsys: Capture, suffix: str
) -> None:
    out = tmp_path / f"rows.{suffix}"
    assert main(["get", str(sample_path), "77777", "--output", str(out)]) == 3
    captured = capsys.readouterr()
    assert captured.out == f"wrote 0 rows to {out} ({open_checkpoint(out).dialect})\n"
    assert "1 in no table: 77777" in captured.err
    assert {name: table.rows for name, table in open_checkpoint(out).tables.items()} == {
        "ads/emb": 0,
        "empty_emb": 0,
        "user_emb": 0,
    }


def test_missing_keys_fail_if_strict(sample_path: Path, capsys: Capture) -> None:
    assert main(["get", str(sample_path), "0", "99", "--strict"]) == 3
    assert "1 in no table: 99" in capsys.readouterr().err
    assert main(["get", str(sample_path), "0", "--strict"]) == 0


@pytest.mark.parametrize("form", [[], ["--json"], ["--json-lines"], ["--csv", "--table", "user_emb"], ["--strict"]])
def test_the_status_tells_a_script_that_no_key_is_there(sample_path: Path, capsys: Capture, form: list[str]) -> None:
    assert main(["get", str(sample_path), "98", "99", *form]) == 3
    assert capsys.readouterr().err == "kvtools: looking up 2 keys: 2 in no table: 98, 99\n"


def test_no_keys_are_not_missing(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "none.txt").write_text("")
    assert main(["get", str(sample_path), "--keys-file", str(tmp_path / "none.txt"), "--json"]) == 0
    captured = capsys.readouterr()
    assert (json.loads(captured.out), captured.err) == ({"rows": [], "missing": []}, "")


@pytest.mark.parametrize(
    "command",
    [
        "get {} 0 --table user_emb --output {out}/rows.npz",
        "migrate {} {out}/user.npz --table user_emb",
        "split {} {out}/pieces --by table --table user_emb",
        "export {} --savedmodel {out}/model --table user_emb",
    ],
)
def test_a_table_that_is_named_is_asked_alone(sample_path: Path, tmp_path: Path, capsys: Capture, command: str) -> None:
    """user_emb is 8 wide, ads/emb is 4: `--dim 8` contradicts a table that nobody asked for, 7 the one that is."""
    (tmp_path / "out").mkdir()
    arguments = command.format(sample_path, out=tmp_path / "out").split()
    assert main([*arguments, "--dim", "7"]) == 2
    assert "opening table 'user_emb'" in (said := capsys.readouterr().err) and "got --dim 7, it says 8" in said
    assert main([*arguments, "--dim", "8"]) == 0


def test_bad_usage(sample_path: Path, capsys: Capture) -> None:
    path = str(sample_path)
    for arguments in (
        [],
        [""],
        ["", "--where", "freq>0"],
        ["5", "--json", "--csv"],
        ["5", "--jsonn"],
        ["5", "--output", "rows.unknown"],
        ["5", "--to", "npz"],
        ["5", "--force"],
        ["5", "--dry-run"],
        ["5", "--output", "rows.csv"],
        ["5", "--output", "rows.npz", "--csv"],
        ["5", "--output", "rows.npz", "--columns", "value"],
        ["5", "--columns", "Adam.x"],
        ["abc"],
        ["1.5"],
    ):
        assert main(["get", path, *arguments]) == 2
    for arguments in (["--keys-file", "gone"], ["5", "--table", "x"]):
        assert main(["get", path, *arguments]) == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("key", ["18446744073709551616", "-9223372036854775809", "9" * 50])
def test_a_key_beyond_64_bits_is_named(sample_path: Path, capsys: Capture, key: str) -> None:
    for command in (["get", str(sample_path), "5", key], ["inspect", str(sample_path), "--keys", "5", key]):
        assert main(command) == 2
        said = capsys.readouterr().err
        assert key[:40] in said and "64-bit integers, -9223372036854775808 to 18446744073709551615" in said


@pytest.mark.parametrize("form", [[], ["--json"], ["--csv"], ["--output", "rows.npz"]])
def test_damaged_rows_of_a_snapshot_are_told(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, form: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = 40_000  # three mebibytes
    table = ArrayTable("emb", np.arange(rows), np.arange(rows * 16, dtype=np.float32).reshape(rows, 16))
    write_tables([table], "a.kvsnap", "snapshot")
    wanted = np.float32([160, 161, 162, 163]).tobytes()  # of row 10
    with Path("a.kvsnap").open("r+b") as file:
        data = file.read()
        file.seek(data.index(wanted) + 1)
        file.write(b"\x7f")
    assert main(["get", "a.kvsnap", "10", *form]) == 1
    said = capsys.readouterr().err
    assert "a.kvsnap" in said and "table 'emb', its rows from byte" in said
    assert not Path("rows.npz").exists()
    order = open_checkpoint("a.kvsnap").table("emb").all_keys()
    far = np.flatnonzero(order == 10)[0] + (rows // 2 if np.flatnonzero(order == 10)[0] < rows // 2 else -rows // 2)
    assert main(["get", "a.kvsnap", str(order[far])]) == 0  # of a mebibyte that is sound
    assert main(["inspect", "a.kvsnap", "--keys", "10"]) == 1


@pytest.mark.parametrize("line", ["get {} 5 -7 77 {options}", "scan {} --table ads/emb --limit 2 {options}"])
@pytest.mark.parametrize(("name", "form"), [("rows.csv", "--csv"), ("rows.jsonl", "--json-lines")])
def test_lines_in_a_file_are_those_that_are_printed(
    sample_path: Path, tmp_path: Path, capsys: Capture, line: str, name: str, form: str
) -> None:
    more = ["--table", "ads/emb", "--columns", "freq,norm,Adam.v"]
    assert main([*line.format(sample_path, options=form).split(), *more]) == 0
    printed = capsys.readouterr().out
    written = [*line.format(sample_path, options="--output").split(), str(tmp_path / name), *more]
    assert main([*written, "--dry-run"]) == 0
    assert capsys.readouterr().out == f"would write 2 rows to {tmp_path / name}\n"
    assert not (tmp_path / name).exists()
    assert main([*written, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.pop("missing", [77]) == [77]
    assert told == {"output": str(tmp_path / name), "rows": 2, "dry_run": False}
    assert (tmp_path / name).read_text() == printed
    assert main(written) == 1


def test_what_is_written_is_told_as_json(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    out = str(tmp_path / "rows.npz")
    assert main(["get", str(sample_path), "5", "77", "--table", "ads/emb", "--output", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "output": out,
        "dialect": "npz",
        "rows": 1,
        "dry_run": False,
        "missing": [77],
    }
