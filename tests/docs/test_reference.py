"""The reference has every public name, and each of them says what it is."""

from __future__ import annotations

import importlib
import inspect
import re
from types import ModuleType

import pytest
from page_blocks import ROOT

PAGES = {
    page.stem: re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    for page in sorted((ROOT / "docs" / "reference").glob("*.md"))
}
MODULES = (
    "kvtools",
    "kvtools.client",
    "tfplugin",
    "tfplugin.dynamic_embedding",
    "tfplugin.keras",
    "tfplugin.optimizers",
    "tfplugin.policies",
    "tfplugin.sok",
)
SHOWN = [name for names in PAGES.values() for name in names]


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_in_the_reference_and_has_a_docstring(name: str, tf: object) -> None:
    pytest.importorskip("tfplugin")
    module = importlib.import_module(name)
    assert name in SHOWN
    for public in module.__all__:
        thing = getattr(module, public)
        if isinstance(thing, ModuleType):
            below = [shown for shown in SHOWN if shown.startswith(f"{name}.{public}")]
            assert below, f"{name}.{public} has no page in docs/reference"
        elif (ROOT / f"{name.replace('.', '/')}/{public}.py").is_file():
            # A function in a module of its name: what reads sources sees the module.
            assert f"{name}.{public}.{public}" in SHOWN, f"{name}.{public} is missing in docs/reference"
        elif inspect.isroutine(thing) or inspect.isclass(thing):
            told = inspect.getdoc(thing)
            assert told and told != inspect.getdoc(object), f"{name}.{public} has no docstring"


def test_pages_show_what_is_there(tf: object) -> None:
    pytest.importorskip("tfplugin")
    for shown in SHOWN:
        try:
            importlib.import_module(shown)
        except ImportError:
            module, _, name = shown.rpartition(".")
            assert hasattr(importlib.import_module(module), name), shown
