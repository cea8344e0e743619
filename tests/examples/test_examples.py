"""The examples, each whole and with little to learn from: they check what they claim, and here, what they print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
NUMBER = r"[\d,.]+"

SMALL = {
    "deepfm": (
        ["--examples", "20000", "--held-out", "4000", "--batch", "500"],
        rf"held-out AUC {NUMBER}, {NUMBER} without the strings; loaded from .keras it predicts the same",
    ),
    "two_tower": (
        ["--users", "1200", "--movies", "600", "--epochs", "3", "--batch", "256"],
        rf"recall@100 {NUMBER}, {NUMBER} by popularity, over all 600 movies; the server's vectors .*",
    ),
    "din": (
        ["--users", "800", "--epochs", "2"],
        rf"held-out AUC {NUMBER} with attention, {NUMBER} with the mean of the history; {NUMBER} items have a row, .*",
    ),
    "online_training": (
        ["--minutes", "0.3", "--freshness", "60"],
        rf"served rows were {NUMBER} s old in the median; .*; all {NUMBER} equal the trained ones",
    ),
    "kv_variable": ([], r"6 rows as a dense variable's to \S+; restored into 5 parts and 2, bit for bit"),
    "from_tfra": (
        [],
        rf"stock TensorFlow and kvtools serve give TFRA's 59 answers bit for bit; .* loss {NUMBER} to {NUMBER}",
    ),
}


def run(name: str, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", SMALL)
def test_an_example(name: str, tmp_path: Path) -> None:
    arguments, last = SMALL[name]
    done = run(name, *arguments, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.fullmatch(last, done.stdout.strip().splitlines()[-1]), done.stdout
    assert list(tmp_path.iterdir()) == []  # and leaves nothing


def test_clicks_of_ones_own(tmp_path: Path) -> None:
    lines = [f"{number % 40 - 20},{number % 23 * 10**15},{number % 3 == 0:d}\n" for number in range(9000)]
    (tmp_path / "clicks.csv").write_text("".join(lines))
    done = run("online_training", "--data", "clicks.csv", "--batch", 100, "--freshness", 60, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "23 items were seen, 23 have a row" in done.stdout


def test_ids_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text(f"{2**62}\n-5\n{2**62}\n17\n")
    done = run("kv_variable", "--ids", "ids.txt", "--checkpoint", "run/model.ckpt", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 rows as a dense variable's" in done.stdout and (tmp_path / "run" / "model.ckpt.index").is_file()
