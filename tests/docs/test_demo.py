"""The demo's own checks of what is served, on tables made beforehand; and all of it, with little training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.migrate import write_tables

ROOT = Path(__file__).resolve().parents[2]
KEYS = np.array([5, -3, 2**62, 7])
VALUES = np.float32([[1, 2], [0.1, -0.3], [1e-30, 3], [0, 0]])


@pytest.fixture
def demo(tf: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for package in ("tfplugin", "fastapi", "tensorflow_serving.apis.prediction_service_pb2_grpc"):
        pytest.importorskip(package)
    monkeypatch.setattr(os, "environ", os.environ.copy())  # it sets what TensorFlow prints
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import ctr_demo

    return ctr_demo


def test_served_rows_are_compared_over_http_and_grpc(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tables([ArrayTable("deep/user", KEYS, VALUES)], tmp_path / "model.kvsnap", "snapshot")
    rng = np.random.default_rng(0)
    with demo.server(**{demo.TABLES: tmp_path / "model.kvsnap"}) as address:
        assert address.grpc
        asked = demo.over_grpc(address, demo.TABLES, "deep/user", {"ids": np.array([2**62])})
        assert asked.tobytes() == VALUES[2].tobytes()
        sound = demo.check_rows(address, {"deep/user": (KEYS[:3], VALUES[:3])}, rng)
        with monkeypatch.context() as patch:
            patch.setattr(demo, "over_grpc", lambda *asked: np.zeros((len(asked[3]["ids"]), 2), np.float32))
            other = demo.check_rows(address, {"deep/user": (KEYS[:3], VALUES[:3])}, rng)
        false = demo.check_rows(address, {"deep/user": (KEYS[:3], np.nextafter(VALUES[:3], np.float32(9)))}, rng)
    assert sound == []
    assert other == ["gRPC: vectors of deep/user differ from those over HTTP"]
    assert false == ["HTTP: vectors of deep/user differ from the trained ones"]


def test_click_probabilities_are_compared_to_the_bit(demo: ModuleType) -> None:
    trained = np.float32([0.25, 0.5])
    nearly = np.nextafter(trained, np.float32(1))
    assert demo.compare({"training": trained, "a": trained.copy(), "b": trained.copy()}) == []
    (complaint,) = demo.compare({"training": trained, "a": trained.copy(), "b": nearly})
    assert complaint.startswith("b gives other click probabilities than training")
    assert demo.compare({"training": trained, "a": trained.astype(np.float64)})


def test_a_request_over_rest_has_the_floats_of_the_impression(demo: ModuleType) -> None:
    dense = np.float32([[0.1, 1e-30], [np.pi, -3]])
    body = demo.json.loads(demo.json_of({"user": np.array([2**62 + 1, -1]), "dense": dense}))["inputs"]
    assert body["user"] == [2**62 + 1, -1]
    assert np.float32(body["dense"]).tobytes() == dense.tobytes()


def test_errors_of_a_command_are_told_and_the_notes_of_tensorflow_are_not(demo: ModuleType) -> None:
    notes = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    notes += "I0000 00:00:1795371816.317608   14968 port.cc:153] oneDNN custom operations are on.\n"
    assert demo.without_notes(notes + "kvtools: warning: something\n") == "kvtools: warning: something\n"


@pytest.mark.thorough
def test_all_of_the_demo(demo: ModuleType, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "ctr_demo.py"), "--steps", "20", "--output", "out"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WRONG" not in done.stdout
    assert "100 requests, 1 outputs each: the same to the bit" in done.stdout
    for who in ("training", "stock TensorFlow", "kvtools serve", "its gRPC"):
        assert who in done.stdout
    assert "are the same bit for bit" in done.stdout
    assert (tmp_path / "out" / "models" / "1" / "saved_model.pb").is_file()
