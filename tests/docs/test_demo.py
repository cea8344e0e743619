"""The demo's own checks of what is served, on a model made beforehand; `make demo` runs the whole of it."""

from __future__ import annotations

import os
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


def test_what_is_served_is_compared_over_http_and_grpc(
    demo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tables([ArrayTable("deep/user", KEYS, VALUES)], tmp_path / "model.kvsnap", "snapshot")
    rng = np.random.default_rng(0)
    with demo.server(tmp_path / "model.kvsnap") as address:
        assert address.grpc
        assert demo.predict(address.grpc, "deep/user", [2**62]).tobytes() == VALUES[2].tobytes()
        sound = demo.check_served(address, {"deep/user": (KEYS[:3], VALUES[:3])}, rng)
        with monkeypatch.context() as patch:
            patch.setattr(demo, "predict", lambda address, table, keys: np.zeros((len(keys), 2), np.float32))
            other = demo.check_served(address, {"deep/user": (KEYS[:3], VALUES[:3])}, rng)
        false = demo.check_served(address, {"deep/user": (KEYS[:3], np.nextafter(VALUES[:3], np.float32(9)))}, rng)
    assert sound == []
    assert other == ["gRPC: vectors of deep/user differ from those over HTTP"]
    assert false == ["HTTP: vectors of deep/user differ from the trained ones"]
