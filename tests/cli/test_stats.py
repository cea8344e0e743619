from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.cli.main import main

Capture = pytest.CaptureFixture[str]


def test_text(sample_path: Path, capsys: Capture) -> None:
    assert main(["stats", str(sample_path)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    output = captured.out
    assert "ads/emb: 11 rows of 4 float32, 1.7 KiB, 64 B a row" in output
    assert "values from 1 to 11.375, mean 6.1875, std 3.16536" in output
    assert "█" in output and "#" not in output
    lines = [line.split() for line in output.splitlines()]
    assert ["all", "zero", "0", "0%"] in lines
    assert ["2023-11-14", "22:13:20", "█" * 40, "1", "9.1%"] in lines
    assert "the top 1% of the keys have 16.7% of all frequency, the top 10% have 31.8%; Zipf exponent" in output
    assert "3 parts, the largest 1.091 times the mean" in output
    assert ["Adam.m", "4", "float32", "0", "0", "0", "2.391", "11.89", "22.24", "22.38"] in lines
    assert "empty_emb: 0 rows of 2 float64" in output


def test_savings_are_shown_by_threshold(sample_path: Path, capsys: Capture) -> None:
    assert main(["stats", "--table", "ads/emb", str(sample_path)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1e-05", "0", "0%", "0", "B", "1e-05", "0", "0%", "0", "B", "8", "7", "64%", "448", "B"] in lines


@pytest.mark.parametrize("how", ["option", "encoding"])
def test_ascii(sample_path: Path, how: str) -> None:
    arguments = ["stats", str(sample_path), *(["--ascii"] if how == "option" else [])]
    encoding = "utf-8" if how == "option" else "ascii"
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kvtools.cli.main", *arguments],
        env=os.environ | {"PYTHONIOENCODING": encoding},
        capture_output=True,
        check=True,
    )
    assert b"#####" in done.stdout
    done.stdout.decode("ascii")


def test_the_example_of_the_page_reads_fields_that_are_there(sample_path: Path, capsys: Capture) -> None:
    page = (Path(__file__).parents[2] / "docs" / "stats.md").read_text()
    (paths,) = re.findall(r"jq '\.tables\[\] \| \[(.*)\]'", page)
    assert main(["stats", "--json", str(sample_path)]) == 0
    for table in json.loads(capsys.readouterr().out)["tables"]:
        for path in paths.split(", "):
            field = table
            for name in path.removeprefix(".").split("."):
                field = field[name]
            assert isinstance(field, str | int)


def test_json(sample_path: Path, capsys: Capture) -> None:
    assert main(["stats", "--json", "--table", "user_emb", "--workers", "2", str(sample_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["path", "dialect", "tables"]
    (table,) = report["tables"]
    assert table["name"] == "user_emb" and table["rows"] == 5
    assert table["value"]["min"] == 1.0 and table["value"]["max"] == 5.875
    assert table["clip"]["freq"] == [
        {"threshold": 1, "rows": 0, "bytes": 0},
        {"threshold": 2, "rows": 5, "bytes": 140},
    ]
    assert table["version"]["unset"] == 5


def test_bad_numbers_are_counted(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path, capsys: Capture
) -> None:
    sample = make_sample("a\nb[red]", rows=10, slots=())
    sample.freqs = sample.versions = None
    sample.values[0] = np.nan
    sample.values[1] = 0
    sample.values[2, 1] = np.inf
    sample.values[3, :2] = 1e-40
    sample.keys[4] = sample.keys[5]
    assert main(["stats", str(save_plain(tmp_path / "a", table_tensors(sample)))]) == 0
    output = capsys.readouterr().out
    lines = [line.split() for line in output.splitlines()]
    assert ["all", "zero", "1", "10%"] in lines
    assert any(line[:1] == ["0"] and line[-2:] == ["1", "12%"] for line in lines)
    assert ["with", "NaN", "1", "10%", "4"] in lines
    assert ["with", "an", "infinity", "1", "10%", "1"] in lines
    assert ["with", "denormal", "numbers", "1", "10%", "2"] in lines
    assert ["of", "a", "key", "that", "comes", "again", "1", "10%"] in lines
    assert "a\\nb[red]: 10 rows" in output and "frequency" not in output and "update" not in output


def test_checkpoint_without_tables(save_plain: Callable[..., Path], tmp_path: Path, capsys: Capture) -> None:
    assert main(["stats", str(save_plain(tmp_path / "a", {"w": np.zeros((2, 2))}))]) == 0
    assert "no key-value tables" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--engine", "slurm"], 2, "expected local or ray"),
        (["--workers", "0"], 2, "expected 1 or more"),
        (["--memory", "much"], 2, "expected a size"),
        (["--table", "nope"], 1, "no such table"),
        (["--dialect", "nope"], 2, "there is none"),
    ],
)
def test_bad_arguments(sample_path: Path, capsys: Capture, arguments: list[str], status: int, message: str) -> None:
    assert main(["stats", str(sample_path), *arguments]) == status
    assert message in capsys.readouterr().err


def test_damaged_rows_are_an_error(sample_path: Path, capsys: Capture) -> None:
    data = sample_path / "model.ckpt-7.data-00000-of-00001"
    from kvtools.dialects.bundle import Bundle

    entry = Bundle(sample_path / "model.ckpt-7").entries["ads/emb/part_1-values"]
    damaged = bytearray(data.read_bytes())
    damaged[entry.offset] ^= 1
    data.write_bytes(bytes(damaged))
    assert main(["stats", str(sample_path)]) == 1
    assert "checksum mismatch" in capsys.readouterr().err
