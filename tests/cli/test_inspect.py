from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.cli.main import main
from kvtools.dialects import tfplugin
from kvtools.dialects.dialect import Source
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import ExtraSchema

Capture = pytest.CaptureFixture[str]


def inspect_json(capsys: Capture, *arguments: str) -> dict[str, object]:
    assert main(["inspect", "--json", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    result = json.loads(captured.out)
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("path", ["sample", "sample/model.ckpt-7", "sample/model.ckpt-7.index"])
def test_json(sample_path: Path, capsys: Capture, path: str) -> None:
    report = inspect_json(capsys, str(sample_path.parent / path))
    assert list(report) == ["path", "dialect", "tables", "variables", "unreadable"]
    assert report["path"] == str(sample_path / "model.ckpt-7")
    assert report["dialect"] == "tfplugin"
    fields = [
        "name",
        "dialect",
        "key_dtype",
        "value_dtype",
        "rows_as",
        "dim",
        "rows",
        "parts",
        "slots",
        "bytes",
        "slot_columns",
        "freq_dtype",
        "version_dtype",
        "version_unit",
        "partition",
        "part_rows",
        "extras",
        "notes",
    ]
    assert [list(table) for table in report["tables"]] == [fields] * 3  # type: ignore[attr-defined]
    assert [list(v) for v in report["variables"]] == [["name", "dtype", "shape", "bytes"]] * 2  # type: ignore[attr-defined]


def test_tables_only(sample_path: Path, capsys: Capture) -> None:
    report = inspect_json(capsys, "--tables", str(sample_path))
    assert list(report) == ["path", "dialect", "tables", "variables", "unreadable"]
    assert report["variables"] == []
    assert main(["inspect", "--tables", str(sample_path)]) == 0
    assert "global_step" not in capsys.readouterr().out


def test_one_table(sample_path: Path, capsys: Capture) -> None:
    report = inspect_json(capsys, "--table", "user_emb", str(sample_path))
    assert [table["name"] for table in report["tables"]] == ["user_emb"]  # type: ignore[attr-defined]
    assert main(["inspect", "--table", "nope", str(sample_path)]) == 1
    assert "no such table; it has 'ads/emb', 'empty_emb', 'user_emb'" in capsys.readouterr().err


def test_text(sample_path: Path, capsys: Capture) -> None:
    assert main(["inspect", str(sample_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["table", "dialect", "key", "value", "dim", "rows", "parts", "slots", "bytes"]
    assert lines[3].split() == [
        "ads/emb",
        "tfplugin",
        "int64",
        "float32",
        "4",
        "11",
        "3",
        "Adam.m,",
        "Adam.v",
        "1.7",
        "KiB",
    ]
    assert "2 dense variables, 32 B" in lines


@pytest.mark.parametrize(
    "keys", [["--keys", "0", "-7", "99"], ["--keys", "0,-7,99"], ["--keys=0", "--keys=-7", "--keys", "99"]]
)
def test_keys(sample_path: Path, capsys: Capture, keys: list[str]) -> None:
    report = inspect_json(capsys, str(sample_path), *keys)
    rows = report["rows"]
    assert isinstance(rows, list)
    assert [(row["table"], row["key"]) for row in rows] == [("ads/emb", 0), ("ads/emb", -7), ("user_emb", 0)]
    assert rows[1]["value"] == [2, 2.125, 2.25, 2.375] and rows[1]["freq"] == 2
    assert main(["inspect", str(sample_path), *keys]) == 0
    output = capsys.readouterr().out
    assert "2 2.125 2.25 2.375" in output and "in no table: 99" in output


def test_keys_before_the_path(sample_path: Path, capsys: Capture) -> None:
    assert main(["inspect", "--keys", "5", "7", str(sample_path)]) == 0
    assert "in no table: 7" in capsys.readouterr().out


def test_checkpoint_without_tables(save_plain: Callable[..., Path], tmp_path: Path, capsys: Capture) -> None:
    path = save_plain(tmp_path / "a", {f"w{number}": np.zeros((number, 2)) for number in range(30)})
    assert inspect_json(capsys, str(path))["dialect"] == "tensorflow"
    assert main(["inspect", str(path)]) == 0
    output = capsys.readouterr().out
    assert "no key-value tables" in output and "30 dense variables" in output and "and 20 smaller ones" in output


def test_missing_index_names_the_file(sample_path: Path, capsys: Capture) -> None:
    (sample_path / "model.ckpt-7.index").unlink()
    assert main(["inspect", str(sample_path / "model.ckpt-7")]) == 1
    assert "no 'model.ckpt-7.index'" in capsys.readouterr().err


def test_head(sample_path: Path, capsys: Capture) -> None:
    rows = inspect_json(capsys, "--head", "2", str(sample_path))["rows"]
    assert [(row["table"], row["key"]) for row in rows] == [  # type: ignore[attr-defined]
        ("ads/emb", -3),
        ("ads/emb", 0),
        ("user_emb", -(2**31)),
        ("user_emb", -5),
    ]
    assert main(["inspect", "--head", "2", "--table", "empty_emb", str(sample_path)]) == 0
    assert capsys.readouterr().out == "no rows\n"


def test_sample(sample_path: Path, capsys: Capture) -> None:
    arguments = ["--sample", "3", "--table", "ads/emb", str(sample_path)]
    rows = inspect_json(capsys, *arguments)["rows"]
    assert len(rows) == 3  # type: ignore[arg-type]
    assert rows == inspect_json(capsys, "--seed", "0", *arguments)["rows"]
    assert rows != inspect_json(capsys, "--seed", "1", *arguments)["rows"]


def test_slots(sample_path: Path, capsys: Capture) -> None:
    assert main(["inspect", "--slots", "--tables", str(sample_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["ads/emb", "Adam.m", "float32", "4"] in lines
    assert main(["inspect", "--slots", "--keys", "-7", "--", str(sample_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["Adam.v", "4", "4.25", "4.5", "4.75"] in lines
    report = inspect_json(capsys, "--slots", "--keys", "-7", "--", str(sample_path))
    assert report["rows"][0]["slots"]["Adam.v"] == [4, 4.25, 4.5, 4.75]  # type: ignore[index]
    assert main(["inspect", "--slots", "--table", "user_emb", str(sample_path)]) == 0
    assert "no slots" in capsys.readouterr().out


def test_parts(sample_path: Path, capsys: Capture) -> None:
    assert main(["inspect", "--parts", str(sample_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["ads/emb", "0", "3", "floor_mod", "uint32", "uint32", "seconds"] in lines
    assert ["2", "4"] in lines


def test_notes_and_extras_are_shown(sample_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    real = tfplugin.open_checkpoint

    def noted(source: Source, options: OpenOptions) -> Checkpoint:
        checkpoint = real(source, options)
        table = checkpoint.table("user_emb")
        extra = ExtraSchema("initial_values", "float32", (5, 8))
        table.schema = dataclasses.replace(table.schema, notes=("dim was inferred\nfrom sizes",), extras=(extra,))
        return checkpoint

    monkeypatch.setattr(tfplugin, "DIALECT", dataclasses.replace(tfplugin.DIALECT, open=noted))
    assert main(["inspect", "--parts", str(sample_path)]) == 0
    output = capsys.readouterr().out
    assert "note: user_emb: dim was inferred\\nfrom sizes\n" in output
    assert ["user_emb", "initial_values", "float32", "[5,", "8]"] in [line.split() for line in output.splitlines()]
    report = inspect_json(capsys, "--table", "user_emb", str(sample_path))
    assert report["tables"][0]["notes"] == ["dim was inferred\nfrom sizes"]  # type: ignore[index]


def test_a_table_that_cannot_be_read_does_not_hide_the_others(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path, capsys: Capture
) -> None:
    tensors = table_tensors(make_sample("good"), 1) | table_tensors(make_sample("torn"), 3)
    path = save_plain(tmp_path / "a", {name: t for name, t in tensors.items() if not name.startswith("torn/part_1")})
    assert main(["inspect", str(path)]) == 1
    captured = capsys.readouterr()
    assert "good " in captured.out and "unreadable: torn: " in captured.out and "part 1 is missing" in captured.out
    assert (
        captured.err.count("\n") == 1 and "1 of 2 tables cannot be read, 'torn': opening table 'torn'" in captured.err
    )
    assert main(["inspect", "--json", str(path)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [table["name"] for table in report["tables"]] == ["good"]
    assert [broken["table"] for broken in report["unreadable"]] == ["torn"]
    assert inspect_json(capsys, "--table", "good", str(path))["unreadable"] == []
    assert main(["inspect", "--table", "torn", str(path)]) == 1
    assert "part 1 is missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["--head", "0"], ["--head", "-1"], ["--sample", "0"], ["--sample", "2000000"], ["--head", "1", "--sample", "1"]],
)
def test_bad_counts_of_rows(sample_path: Path, capsys: Capture, arguments: list[str]) -> None:
    assert main(["inspect", str(sample_path), *arguments]) == 2
    assert "expected" in capsys.readouterr().err


def test_dialect_and_types_are_checked(sample_path: Path, capsys: Capture) -> None:
    assert main(["inspect", "--dialect", "tensorflow", str(sample_path)]) == 0
    assert "no key-value tables" in capsys.readouterr().out
    assert main(["inspect", "--dialect", "nope", str(sample_path)]) == 2


def test_a_file_that_is_not_there_is_not_looked_for_as_a_checkpoint_alone(capsys: Capture) -> None:
    for command in ("inspect", "get"):
        assert main([command, "nosuch.kvsnap", *["5"] * (command == "get")]) == 1
        assert "at 'nosuch.kvsnap': there is no such file" in capsys.readouterr().err
