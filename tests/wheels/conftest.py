"""What the tests of the wheels' machinery share."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def module(monkeypatch):
    """Imports a module of the folder wheels/, as it is when run in the root."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"wheels.{name}")
