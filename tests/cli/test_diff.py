from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.cli.main import main

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def two(save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path) -> tuple[str, str]:
    """Table emb: 2 of 50 rows changed, one removed, one added; dense variable w changed."""
    before, after = make_sample("emb"), make_sample("emb")
    after.values[3] += 2
    after.values[4, 0] = np.nan
    after.keys[10] = 12345
    a = save_plain(tmp_path / "a", {**table_tensors(before), "w": np.zeros(3), "old": np.zeros(1)})
    b = save_plain(tmp_path / "b", {**table_tensors(after, parts=2), "w": np.ones(3)})
    return str(a), str(b)


def test_same(sample_path: Path, capsys: Capture) -> None:
    assert main(["diff", str(sample_path), str(sample_path)]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[-1] == "the same: 3 tables, 16 rows, 2 dense variables"
    assert output.err == ""


def test_different(two: tuple[str, str], capsys: Capture) -> None:
    assert main(["diff", *two, "--top", "1"]) == 3
    output = capsys.readouterr()
    assert output.err == ""
    lines = [line.split() for line in output.out.splitlines()]
    assert ["emb", "50", "50", "1", "1", "2", "47"] in lines
    assert lines[-1] == ["different"]
    assert ["w", "3", "1", "1", "1.73205", "inf", "0"] in lines
    assert "emb: added keys 12345" in output.out
    assert "dense variables only in a: old" in output.out
    assert "emb: in form alone: parts: 1 -> 2" in output.out
    (mover,) = [line for line in lines if line[:1] == ["emb"] and len(line) == 5]
    assert mover[2] == "4"


def test_json(two: tuple[str, str], capsys: Capture) -> None:
    assert main(["diff", *two, "--json", "--top", "2", "--exit-zero"]) == 0
    report = json.loads(capsys.readouterr().out)
    (table,) = report["tables"]
    assert (table["changed"], table["added"], table["removed"], table["unchanged"]) == (2, 1, 1, 47)
    assert table["columns"]["value"]["non_finite"] == 1
    assert report["same"] is False and len(table["movers"]) == 2
    assert report["variables"][0]["numbers"]["relative_change"] == "Infinity"


def test_bad_options(sample_path: Path, capsys: Capture) -> None:
    for options in (["--rtol", "-1"], ["--top", "-1"], ["--memory", "0"], ["--dialect-b", "parchment"]):
        assert main(["diff", str(sample_path), str(sample_path), *options]) == 2
    assert main(["diff", str(sample_path), str(sample_path), "--table", "nope"]) == 1
    assert main(["diff", str(sample_path), str(sample_path / "gone")]) == 1
