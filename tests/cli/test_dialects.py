from __future__ import annotations

import json

import pytest

from kvtools.cli.main import main
from kvtools.lossless import page_tables

Capture = pytest.CaptureFixture[str]


def test_text(capsys: Capture) -> None:
    assert main(["dialects"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["dialect", "reads", "writes", "what", "it", "is"]
    assert [line.split()[:3] for line in lines if line.startswith("tfplugin ")] == [["tfplugin", "yes", "yes"]]
    assert [line.split()[:3] for line in lines if line.startswith("tensorflow ")] == [["tensorflow", "yes", "-"]]


def test_the_moves_of_one_dialect(capsys: Capture) -> None:
    assert main(["dialects", "--from", "savedmodel"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["to", "what", "arrives"] and ["tfplugin", "everything"] in [x.split() for x in lines]
    assert main(["dialects", "--from", "nope"]) == 2
    assert "got --from 'nope', expected one of" in capsys.readouterr().err


def test_json_and_markdown(capsys: Capture) -> None:
    assert main(["dialects", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["dialects", "moves"]
    assert list(report["moves"][0]) == ["from", "to", "lossless", "left_out", "narrowed", "refused"]
    assert {"name", "title", "writes", "output", "holds"} == set(report["dialects"][0])
    assert main(["dialects", "--markdown"]) == 0
    assert capsys.readouterr().out == page_tables()
