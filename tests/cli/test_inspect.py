from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from kvtools.cli.main import main

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
    assert list(report) == ["path", "dialect", "tables", "variables"]
    assert report["path"] == str(sample_path / "model.ckpt-7")
    assert report["dialect"] == "tfplugin"
    fields = ["name", "dialect", "key_dtype", "value_dtype", "dim", "rows", "parts", "slots", "bytes"]
    assert [list(table) for table in report["tables"]] == [fields] * 3  # type: ignore[attr-defined]
    assert [list(v) for v in report["variables"]] == [["name", "dtype", "shape", "bytes"]] * 2  # type: ignore[attr-defined]


def test_tables_only(sample_path: Path, capsys: Capture) -> None:
    report = inspect_json(capsys, "--tables", str(sample_path))
    assert list(report) == ["path", "dialect", "tables", "variables"]
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
