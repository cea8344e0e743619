from __future__ import annotations

import json

import pytest

from kvtools.cli.main import main
from kvtools.doctor import Check
from kvtools.doctor.diagnose import SECTIONS


@pytest.fixture
def sick(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [Check("one", "ok", "as it should be"), Check("another one", "error", "broken", "mend it")]
    monkeypatch.setitem(SECTIONS, "machine", lambda: iter(checks))


def test_what_is_found_is_printed_with_what_to_do(sick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--only", "machine"]) == 3
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "machine",
        "  [ ok ] one          as it should be",
        "  [FAIL] another one  broken",
        "                     -> mend it",
    ]
    assert captured.err.count("\n") == 1 and "1 of its parts" in captured.err


def test_json_is_one_object(sick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--only", "machine", "--only", "serving", "--json"]) == 3
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False and set(answer["sections"]) == {"machine", "serving"}
    assert answer["sections"]["machine"][1] == {
        "name": "another one",
        "status": "error",
        "value": "broken",
        "advice": "mend it",
    }


def test_a_section_that_is_not_there_is_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--only", "nope"]) == 2
    assert "expected one of kvtools, machine, tensorflow" in capsys.readouterr().err


def test_this_environment_is_looked_at_without_tensorflow(capsys: pytest.CaptureFixture[str]) -> None:
    sections = [word for section in SECTIONS if section != "tensorflow" for word in ("--only", section)]
    assert main(["doctor", *sections, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] and all(answer["sections"].values())
