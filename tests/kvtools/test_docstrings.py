"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import kvtools

MODULES = [module.name for module in pkgutil.walk_packages(kvtools.__path__, "kvtools.")]
# The compiled ones have tests of their own.
PURE = [name for name in MODULES if importlib.util.find_spec(name).origin.endswith(".py")]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", PURE)
def test_examples(name: str) -> None:
    if name.startswith("kvtools.server."):
        pytest.importorskip("fastapi")
    module = importlib.import_module(name)
    assert doctest.testmod(module, optionflags=doctest.ELLIPSIS).failed == 0


def test_version_is_the_distributions() -> None:
    project = (Path(__file__).parent.parent.parent / "pyproject.toml").read_text()
    assert re.search(r'^version = "(.+)"$', project, re.M)[1] == kvtools.__version__  # type: ignore[index]
