from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtools.cli.main import main

pytest.importorskip("matplotlib")

Capture = pytest.CaptureFixture[str]


def test_page_is_written(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "report.html"
    assert main(["report", str(sample_path), "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>") and "<h2>ads/emb</h2>" in text and "<h2>user_emb</h2>" in text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.html", "sample"]


def test_an_existing_page_is_replaced_only_with_force(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "report.html"
    page.write_text("mine")
    assert main(["report", str(sample_path), "--html", str(page)]) == 1
    assert "--force" in capsys.readouterr().err and page.read_text() == "mine"
    assert main(["report", str(sample_path), "--html", str(page), "--force"]) == 0
    assert "<svg" in page.read_text()


def test_json_and_title_and_table(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    page = tmp_path / "report.html"
    options = ["--table", "user_emb", "--title", "Users & co", "--json"]
    assert main(["report", str(sample_path), "--html", str(page), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {
        "path": str(sample_path / "model.ckpt-7"),
        "html": str(page),
        "bytes": page.stat().st_size,
        "tables": ["user_emb"],
    }
    text = page.read_text()
    assert "<h1>Users &amp; co</h1>" in text and "ads/emb" not in text


def test_growth_of_several_checkpoints(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    other = shutil.copytree(sample_path, tmp_path / "other")
    page = tmp_path / "report.html"
    # The same checkpoint by two of its files counts once, as a shell's pattern gives it.
    paths = [*sorted(map(str, sample_path.glob("model.ckpt-7.*"))), str(other)]
    assert len(paths) == 3
    assert main(["report", *paths, "--html", str(page)]) == 0
    text = page.read_text()
    assert "Growth by checkpoint" in text and ">+0<" in text
    assert "sample/model.ckpt-7" in text and "other/model.ckpt-7" in text


def test_a_table_that_cannot_be_read_does_not_hide_the_others(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path, capsys: Capture
) -> None:
    tensors = table_tensors(make_sample("good"), 1) | table_tensors(make_sample("torn"), 3)
    path = save_plain(tmp_path / "a", {name: t for name, t in tensors.items() if not name.startswith("torn/part_1")})
    page = tmp_path / "report.html"
    assert main(["report", str(path), "--html", str(page)]) == 1
    assert "'torn'" in capsys.readouterr().err
    assert "<h2>good</h2>" in page.read_text() and "Table torn cannot be read" in page.read_text()
    assert main(["stats", str(path)]) == 1
    captured = capsys.readouterr()
    assert "good: 50 rows" in captured.out and "1 of 2 tables cannot be read, 'torn'" in captured.err
    assert main(["stats", str(path), "--table", "good"]) == 0
    assert main(["stats", str(path), "--table", "torn"]) == 1


def test_usage(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["report", str(sample_path)]) == 2
    assert "--html" in capsys.readouterr().err
    assert main(["report", str(sample_path), "--html", str(sample_path / "model.ckpt-7.index" / "r.html")]) == 1
    assert "is no folder" in capsys.readouterr().err
