"""`kvtools export --savedmodel` of a whole model: versions, warm-up requests, and what goes wrong on the way."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.cli.main import main
from kvtools.dialects.bundle import BundleWriter
from kvtools.dialects.detect import open_checkpoint
from kvtools.model_requests import serving_graph, signature_inputs
from kvtools.tfrecord import read_records
from kvtools.warmup import WARMUP_FILE, logged_request

Capture = pytest.CaptureFixture[str]
MODEL = Path(__file__).parents[1] / "data" / "tfra" / "savedmodel"
"""Whole, with operations of TensorFlow Recommenders Addons; neither that nor TensorFlow is needed to export it."""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def export(*arguments: object) -> int:
    return main(["export", str(MODEL), *map(str, arguments)])


# ---- Versions ----


def test_versions_come_and_the_oldest_go(tmp_path: Path, capsys: Capture) -> None:
    models = tmp_path / "ctr"
    models.mkdir()
    (models / "2").mkdir()  # somebody else's
    for number in (9, 10):
        assert export("--savedmodel", models / str(number)) == 0
    capsys.readouterr()
    assert export("--savedmodel", models, "--next-version", "--keep", 2, "--dry-run") == 0
    assert f"would remove {models / '9'}\nnothing was written\n" in capsys.readouterr().out
    assert export("--savedmodel", models, "--next-version", "--keep", 2) == 0
    assert capsys.readouterr().out.endswith(f"wrote {models / '11'}\nremoved {models / '9'}\n")
    assert export("--savedmodel", models / "7", "--keep", 1, "--json") == 0
    assert json.loads(capsys.readouterr().out)["removed"] == [str(models / "10")]
    assert sorted(path.name for path in models.iterdir()) == ["11", "2", "7"]


def test_snapshots_are_versions_too(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    models = tmp_path / "models"
    models.mkdir()
    for number in range(1, 4):
        command = ["export", str(sample_path), "--snapshot", str(models), "--next-version", "--keep", "2", "--json"]
        assert main([*command, "--dry-run"]) == 0
        planned = json.loads(capsys.readouterr().out)["removed"]
        assert main(command) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["snapshot"] == str(models / f"{number}.kvsnap")
        assert report["removed"] == planned == ([str(models / "1.kvsnap")] if number == 3 else [])
    assert sorted(path.name for path in models.iterdir()) == ["2.kvsnap", "3.kvsnap"]


@pytest.mark.parametrize(
    ("options", "status", "message"),
    [
        (
            ["--savedmodel", "model", "--keep", "3"],
            2,
            "versions are told by their numbers; name one, such as 'model/1'",
        ),
        (["--savedmodel", "1", "--keep", "0"], 2, "got --keep 0, expected 1 or more"),
        (["--savedmodel", "none", "--next-version"], 1, "'none': there is no such folder; make it first"),
        (["--snapshot", "a.kvsnap", "--warmup", "3"], 2, "--warmup 3, which is for --savedmodel"),
        (["--savedmodel", "1", "--warmup", "0"], 2, "got --warmup 0, expected 1 to 1000 requests"),
        (["--savedmodel", "1", "--warmup", "-3"], 2, "got --warmup -3, expected 1 to 1000 requests, which TensorFlow"),
        (["--split", "1", "--warmup", "3"], 2, "is for --savedmodel; a model in two halves takes none"),
        (["--savedmodel", "1", "--warmup", "none.jsonl"], 1, "reading 'none.jsonl': No such file"),
    ],
)
def test_options_that_make_no_sense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, options: list[str], status: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert export(*options) == status
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# ---- Warm-up requests ----


def test_a_model_brings_its_warm_up_requests_along(tmp_path: Path, capsys: Capture) -> None:
    assert export("--savedmodel", tmp_path / "1", "--warmup", 3, "--json") == 0
    told = json.loads(capsys.readouterr().out)["warmup"]
    signatures = signature_inputs(serving_graph(tmp_path / "1"))
    made = [logged_request(record, signatures) for record in read_records(tmp_path / "1" / WARMUP_FILE)]
    assert told["requests"] == len(made) == 3 * len(signatures)
    (name, inputs), *_ = signatures.items()
    body = {"signature_name": name, "inputs": {one.name: made[0].inputs[one.name].tolist() for one in inputs}}
    (tmp_path / "file").write_text(json.dumps(body) + "\n")
    assert export("--savedmodel", tmp_path / "2", "--warmup", tmp_path / "file") == 0
    assert "warm-up: 1 requests\nwrote " in capsys.readouterr().out
    (tmp_path / "file").write_text('{"signature_name": "unknown", "inputs": [1]}')
    assert export("--savedmodel", tmp_path / "3", "--warmup", tmp_path / "file") == 1
    assert "line 1: there is no signature 'unknown'" in capsys.readouterr().err
    assert not (tmp_path / "3").exists()


def test_tables_are_warmed_up_by_their_own_keys(sample_path: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["export", str(sample_path), "--savedmodel", str(tmp_path / "1"), "--warmup", "2"]) == 0
    signatures = signature_inputs(serving_graph(tmp_path / "1"))
    made = [logged_request(record, signatures) for record in read_records(tmp_path / "1" / WARMUP_FILE)]
    of_user = [request.inputs["ids"] for request in made if request.signature == "user_emb"]
    keys = open_checkpoint(sample_path).table("user_emb").to_numpy().keys
    assert len(of_user) == 2 and np.isin(np.concatenate(of_user), keys).all()


# ---- Bad input ----


@pytest.fixture
def versions(tmp_path: Path) -> Path:
    for number in (1, 2):
        assert export("--savedmodel", tmp_path / str(number)) == 0
    return tmp_path


@pytest.fixture
def small_files() -> Iterator[Callable[[], None]]:
    """Have the disk refuse files of more than a kilobyte."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("where", [["3"], ["2", "--force"]], ids=["new", "replaced"])
def test_a_full_disk_leaves_all_versions(
    versions: Path, capsys: Capture, small_files: Callable[[], None], where: list[str]
) -> None:
    before = contents(versions)
    small_files()
    assert export("--savedmodel", versions / where[0], *where[1:], "--keep", 1, "--warmup", 2) == 1
    assert "File too large; nothing was changed there, make room" in capsys.readouterr().err
    assert contents(versions) == before
    assert sorted(path.name for path in versions.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", [["3"], ["2", "--force"]], ids=["new", "replaced"])
def test_an_interrupt_leaves_all_versions(
    versions: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, where: list[str], number: int
) -> None:
    close = BundleWriter.close

    def interrupted(self: Any) -> None:
        os.kill(os.getpid(), number)  # all rows are there, and the index is not
        close(self)

    before = contents(versions)
    monkeypatch.setattr(BundleWriter, "close", interrupted)
    handler = signal.getsignal(number)
    if number == signal.SIGTERM:  # which a library that another test loaded may handle
        signal.signal(number, signal.SIG_DFL)
    try:
        assert export("--savedmodel", versions / where[0], *where[1:], "--keep", 1) == 128 + number
    finally:
        signal.signal(number, handler or signal.SIG_DFL)
    assert {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[
        signal.Signals(number)
    ] in capsys.readouterr().err
    assert contents(versions) == before
    assert sorted(path.name for path in versions.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("threshold", ["nan", "inf", "-1"])
@pytest.mark.parametrize("option", ["--clip-l2", "--clip-abs"])
def test_thresholds_that_are_no_numbers(versions: Path, capsys: Capture, option: str, threshold: str) -> None:
    before = contents(versions)
    assert export("--savedmodel", versions / "2", "--force", option, threshold) == 2
    assert f"clipping by {option.removeprefix('--clip-')}: got threshold {threshold}" in capsys.readouterr().err
    assert contents(versions) == before


def test_a_model_without_its_variables(versions: Path, tmp_path: Path, capsys: Capture) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(MODEL, damaged)
    (data,) = (damaged / "variables").glob("variables.data-*")
    os.truncate(data, data.stat().st_size // 2)
    before = contents(versions / "2")
    assert main(["export", str(damaged), "--savedmodel", str(versions / "2"), "--force"]) == 1
    assert str(data.parent) in capsys.readouterr().err
    assert contents(versions / "2") == before
