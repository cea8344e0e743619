"""`kvtools hash`: the keys of strings, for other commands."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtools import string_keys
from kvtools.cli.main import main

WINE = 6833201401099529939


def test_a_key_in_each_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = tmp_path / "lines"
    lines.write_bytes(b"red wine\r\n\n\xff\nlast")
    assert main(["hash", "wine", "--file", str(lines)]) == 0
    keys = [WINE, *string_keys([b"red wine", b"", b"\xff", b"last"]).tolist()]
    assert [int(line) for line in capsys.readouterr().out.split()] == keys
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(lines.read_bytes())))
    assert main(["hash", "--file", "-", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["keys"]
    assert [one["key"] for one in told] == keys[1:] and [one["string"] for one in told][2:] == ["\\xff", "last"]
    assert main(["hash", "--", "-x"]) == 0
    assert capsys.readouterr().out == f"{string_keys(['-x'])[0]}\n"


def test_nothing_to_hash_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["hash"]) == 2
    assert main(["hash", "--file", str(tmp_path / "none")]) == 1
    said = capsys.readouterr().err
    assert "got none, expected some" in said and "No such file" in said


def test_keys_that_are_words_are_told_of_it(capsys: pytest.CaptureFixture[str], sample_path: Path) -> None:
    assert main(["get", str(sample_path), "wine"]) == 2
    assert capsys.readouterr().err.endswith("got 'wine', expected integers; the key of a string: kvtools hash STRING\n")
