"""Every call that the pages for users of other engines name on our side is there, with the arguments that they name."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest
from page_blocks import ROOT

from kvtools.cli.main import COMMANDS, main

PAGES = ("docs/from-deeprec.md", "docs/from-sok.md", "docs/from-tfplus.md", "docs/from-tfra.md")
ROW = re.compile(r"^\| (.+) \| (.+) \|$", re.MULTILINE)
CODE = re.compile(r"`([^`]+)`")
CALL = re.compile(r"(tf|tfplugin|sok|de|KvVariable|kvtools)(\.[\w.]+)(?:\((.*)\))?")


def calls(page: str) -> list[str]:
    """What stands in the right column of the table of calls."""
    text = (ROOT / page).read_text().partition("## The calls")[2].partition("\n## ")[0]
    return [call for row in ROW.findall(text)[1:] for call in CODE.findall(row[1])]


@pytest.mark.parametrize("page", PAGES)
def test_the_calls_are_there(page: str, tf: object, capsys: pytest.CaptureFixture[str]) -> None:
    tfplugin = pytest.importorskip("tfplugin")
    sok = importlib.import_module("tfplugin.sok")
    importlib.import_module("tfplugin.keras")
    roots = {
        "tf": tf,
        "tfplugin": tfplugin,
        "sok": sok,
        "de": importlib.import_module("tfplugin.dynamic_embedding"),
        "KvVariable": tfplugin.KvVariable,
        "kvtools": importlib.import_module("kvtools"),
    }
    checked = 0
    for call in calls(page):
        if call.startswith("kvtools "):
            _, command, *options = call.split()
            assert command in COMMANDS, call
            assert main([command, "--help"]) == 0
            said = capsys.readouterr().out
            assert all(option in said for option in options if option.startswith("--")), call
        elif named := CALL.fullmatch(call):
            found = roots[named[1]]
            for part in named[2].split(".")[1:]:
                found = getattr(found, part)
            arguments = re.findall(r"(\w+)=", named[3] or "")
            if arguments:
                known = inspect.signature(found).parameters
                assert set(arguments) <= set(known), call
        else:
            continue
        checked += 1
    assert checked > 20
