from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import kvtools
from kvtools.array_table import ArrayTable
from kvtools.cli.main import main

Capture = pytest.CaptureFixture[str]


def test_text(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["migrate", str(sample_path), str(tmp_path / "out"), "--to", "tfplugin", "--parts", "2"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.splitlines() == [
        "table      rows read  rows written  parts  bytes",
        "ads/emb           11            11      2  704 B",
        "empty_emb          0             0      2    0 B",
        "user_emb           5             5      2  140 B",
        "3 tables, 16 rows, 844 B",
        "2 dense variables",
        "checked: all tables: as many rows read and written as the source says it has",
        "checked: all tables: CRC-32C of every column read",
        "nothing left out",
        f"wrote {tmp_path}/out (tfplugin)",
    ]
    assert [table.parts for table in kvtools.open(tmp_path / "out").tables.values()] == [2, 2, 2]


def test_json_and_verify(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = ["migrate", str(sample_path), str(tmp_path / "out"), "--to", "tfplugin", "--json", "--verify"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == [
        *["output", "dialect", "tables", "variables", "losses", "notes", "lossless"],
        *["source", "from", "dry_run"],
    ]
    assert (report["from"], report["dialect"], report["lossless"], report["dry_run"]) == (
        "tfplugin",
        "tfplugin",
        True,
        False,
    )
    fields = ["name", "rows_read", "rows_written", "parts", "bytes", "part_rows", "losses", "changes", "checks"]
    fields += ["repeated_keys", "notes"]
    assert [list(table) for table in report["tables"]] == [fields] * 3
    assert "every row read again and compared with the source, by key" in report["tables"][0]["checks"]


def test_what_versions_count_can_be_told(tmp_path: Path, sample_path: Path, capsys: Capture) -> None:
    rows = kvtools.table_from_arrays("emb", [7, 1], [[1.0], [2.0]], versions=[19_000, 20_000])
    kvtools.write_tables([rows], tmp_path / "a.npz", "npz")
    arguments = ["migrate", str(tmp_path / "a.npz"), str(tmp_path / "b"), "--to", "tfplugin", "--force"]
    assert main(arguments) == 0
    assert "taken for steps" in capsys.readouterr().out
    assert main([*arguments, "--version-unit", "days"]) == 0
    assert "versions were days, are seconds" in capsys.readouterr().out
    table = kvtools.open(tmp_path / "b").table("emb")
    versions = table.to_numpy().versions
    assert versions is not None and versions.tolist() == [19_000 * 86_400, 20_000 * 86_400]
    assert table.schema.version_unit == "seconds"
    assert main([*arguments, "--version-unit", "hours"]) == 2
    capsys.readouterr()
    told = ["migrate", str(tmp_path / "b"), str(tmp_path / "c"), "--to", "tfplugin", "--version-unit", "steps"]
    assert main(told) == 2
    error = capsys.readouterr().err
    assert "no table has versions that do not say what they count ('emb' seconds); leave --version-unit out" in error


def test_what_goes_with_a_source_that_is_replaced_is_told(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    kvtools.write_tables(
        kvtools.open(sample_path).select([]), tmp_path / "m", "tfplugin", beside=kvtools.open(sample_path)
    )
    path = str(tmp_path / "m")
    arguments = ["migrate", path, path, "--to", "tfplugin", "--force", "--table", "user_emb"]
    told = f"2 tables ('ads/emb', 'empty_emb') and 2 dense variables of '{path}', which this replaces: --table leaves"
    assert main([*arguments, "--strict"]) == 3
    assert told in " ".join(capsys.readouterr().err.split())
    assert main([*arguments, "--dry-run"]) == 0
    assert f"would be left out: {told}" in " ".join(capsys.readouterr().out.split())
    assert len(kvtools.open(path).tables) == 3
    assert main([*arguments, "--json"]) == 0
    account = json.loads(capsys.readouterr().out)
    assert account["losses"][0].startswith(told) and not account["lossless"]
    assert list(kvtools.open(path).tables) == ["user_emb"]
    assert main(arguments) == 0 and "nothing left out" in capsys.readouterr().out


def test_keys_that_come_twice_are_told(tmp_path: Path, capsys: Capture) -> None:
    rows = ArrayTable("emb", np.array([7, 1, 7]), np.array([[1], [2], [3]], np.float32))
    kvtools.write_tables([rows], tmp_path / "twice", "tfplugin")
    arguments = [str(tmp_path / "twice"), "--to", "tfplugin"]
    told = "1 row whose key stands again in a later row: all go along, and most readers take the last one;"
    for command, more in (("migrate", [str(tmp_path / "a")]), ("reshard", ["--parts", "2", str(tmp_path / "b")])):
        assert main([command, *arguments[:1], *more, *arguments[1:]]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert f"note: emb: {told} `kvtools repair` keeps one" in out and "nothing left out" in out
    assert main(["migrate", *arguments, str(tmp_path / "c"), "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert table["repeated_keys"] == 1 and table["notes"][0].startswith(told)
    assert main(["split", *arguments, str(tmp_path / "d"), "--by", "table"]) == 0
    assert told in " ".join(capsys.readouterr().out.split())
    assert main(["repair", *arguments, str(tmp_path / "e")]) == 0
    assert told not in " ".join(capsys.readouterr().out.split())


def test_one_table_goes_without_the_dense_variables(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    arguments = ["migrate", str(sample_path), str(tmp_path / "out"), "--to", "tfplugin", "--table", "user_emb"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["variables"], report["lossless"]) == (0, True)
    checkpoint = kvtools.open(tmp_path / "out")
    assert (list(checkpoint.tables), checkpoint.variables) == (["user_emb"], ())
    assert main([*arguments, "--force", "--table", "nope"]) == 1
    assert "no such table; it has 'ads/emb', 'empty_emb', 'user_emb'" in capsys.readouterr().err


def test_a_dry_run_says_what_would_be_and_writes_nothing(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["migrate", str(sample_path), str(tmp_path / "out"), "--to", "tfplugin", "--dry-run"]) == 0
    output = capsys.readouterr().out
    assert "table      rows  parts  bytes\nads/emb      11      3  704 B\n" in output
    assert output.endswith(f"nothing left out\nwould write {tmp_path}/out (tfplugin)\n")
    assert "checked: all tables: as many rows read as the source says it has" in output
    assert [file.name for file in tmp_path.iterdir()] == ["sample"]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["out"], 2, "its name does not tell the dialect; say --to one of"),
        (["out", "--to", "nope"], 2, "there is none; expected one of"),
        (["out", "--to", "tensorflow"], 2, "kvtools reads tensorflow and does not write it"),
        (["out", "--to", "tfplugin", "--parts", "0"], 2, "got 0 parts"),
        (["out", "--to", "tfplugin", "--batch-rows", "0"], 2, "got --batch-rows 0"),
        (["out", "--to", "tfplugin", "--memory", "much"], 2, "got --memory 'much'"),
        (["out", "--to", "tfplugin", "--engine", "spark"], 2, "expected local or ray"),
        (["out", "--to", "tfplugin", "--workers", "0"], 2, "got 0 workers"),
        (["sample/model.ckpt-7.index/out", "--to", "tfplugin"], 1, "is no folder"),
        (["sample/model.ckpt-7", "--to", "tfplugin"], 1, "exists; name another place, or add --force"),
    ],
    ids=str,
)
def test_what_cannot_be_is_one_line(
    arguments: list[str],
    status: int,
    message: str,
    sample_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["migrate", "sample", *arguments]) == status
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and message in captured.err
    assert [file.name for file in tmp_path.iterdir()] == ["sample"]
    assert len(list(sample_path.iterdir())) == 3


def test_a_checkpoint_without_tables_is_told(tmp_path: Path, save_plain: object, capsys: Capture) -> None:
    import numpy as np

    save_plain(tmp_path / "a", {"w": np.zeros(3)})  # type: ignore[operator]
    assert main(["migrate", str(tmp_path / "a"), str(tmp_path / "b"), "--to", "tfplugin"]) == 1
    assert "it has no key-value tables, only 1 dense variable;" in capsys.readouterr().err
