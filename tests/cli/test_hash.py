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


def test_an_empty_string_has_a_key_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hash", "", "wine"]) == 0
    assert [int(line) for line in capsys.readouterr().out.split()] == string_keys([b"", b"wine"]).tolist()


def test_the_mark_that_windows_puts_before_a_text_is_no_part_of_its_first_string(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "marked").write_text("wine\r\n", encoding="utf-8-sig")
    assert main(["hash", "--file", str(tmp_path / "marked")]) == 0
    assert int(capsys.readouterr().out) == WINE


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("wine\n".encode("utf-16"), "it is in UTF-16, expected UTF-8: `iconv -f UTF-16`"),
        (b"\x1f\x8b\x08", "it is compressed, expected text: `zcat FILE | kvtools hash --file -`"),
        (b"PK\x03\x04", "it is a zip archive"),
        (b"\x93NUMPY\x01\x00", "it is an array of NumPy, expected text; kvtools.string_keys takes arrays"),
    ],
)
def test_files_that_have_no_strings_in_their_lines_are_errors(
    data: bytes, said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(data)
    assert main(["hash", "--file", str(tmp_path / "file"), "--json"]) == 1
    out, err = capsys.readouterr()
    assert not out and said in err


def test_json_of_many_strings_is_written_as_they_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtools.cli.hash._LINES", 2)
    (tmp_path / "lines").write_bytes(b"a\nb\nc\n")
    assert main(["hash", "wine", "--file", str(tmp_path / "lines"), "--json", "--string-keys"]) == 0
    told = json.loads(capsys.readouterr().out)["keys"]
    assert [one["string"] for one in told] == ["wine", "a", "b", "c"] and told[0]["key"] == str(WINE)
    (tmp_path / "lines").write_bytes(b"")
    assert main(["hash", "--file", str(tmp_path / "lines"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"keys": []}


def test_nothing_to_hash_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["hash"]) == 2
    assert main(["hash", "--file", str(tmp_path / "none")]) == 1
    said = capsys.readouterr().err
    assert "got none, expected some" in said and "No such file" in said


@pytest.mark.parametrize("word", ["wine", "u000252"])
def test_keys_that_are_words_are_told_of_it(capsys: pytest.CaptureFixture[str], sample_path: Path, word: str) -> None:
    assert main(["get", str(sample_path), word]) == 2
    said = f"got '{word}', expected integers; the key of a string: kvtools hash STRING\n"
    assert capsys.readouterr().err.endswith(said)
