"""`make examples`: a line for each, and an exit status that tells of failures."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    # benchmarks/ has a run.py, too, and a test before may have imported it.
    spec = importlib.util.spec_from_file_location("run_examples", ROOT / "examples" / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_run_and_listed(runner: ModuleType) -> None:
    index = (ROOT / "examples" / "README.md").read_text()
    programs = {path.stem for path in (ROOT / "examples").glob("*.py") if "\ndef parse_options" in path.read_text()}
    assert programs == set(runner.EXAMPLES)
    shown = [*(f"{name}.py" for name in runner.EXAMPLES), *(path.name for path in (ROOT / "examples").glob("*.ipynb"))]
    for name in shown:
        assert f"[{name}]({name})" in index
    for path in (ROOT / "examples").glob("*.py"):
        assert path.name in index, f"examples/README.md does not name {path.name}"


def test_a_line_for_each_says_what_it_showed(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "HERE", tmp_path)
    monkeypatch.setattr(runner, "EXAMPLES", {"good": [], "ranks": [], "bad": [], "none": ["no-such-program"]})
    (tmp_path / "good.py").write_text("print('first')\nprint('AUC 0.8')\nprint()")
    (tmp_path / "ranks.py").write_text("print('[1,0]<stdout>: AUC 0.9')")
    (tmp_path / "bad.py").write_text("print('so far')\nassert False, 'it differs'")
    monkeypatch.setattr(sys, "argv", ["run.py", "good", "ranks"])
    assert runner.main() == 0
    assert [re.sub(r"\d+ s", "N s", line) for line in capsys.readouterr().out.splitlines()] == [
        "good                N s  AUC 0.8",
        "ranks               N s  AUC 0.9",
    ]
    monkeypatch.setattr(sys, "argv", ["run.py"])
    assert runner.main() == 1
    told = capsys.readouterr().out
    assert "so far\n" in told and "AssertionError: it differs" in told and re.search(r"bad +\d+ s  FAILED: 1", told)
    assert "none: there is no no-such-program: run `make setup-horovod`" in told


def test_an_example_that_is_not_there(
    runner: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "deepfn"])
    with pytest.raises(SystemExit):
        runner.main()
    assert "there is no example 'deepfn'; there are deepfm, two_tower" in capsys.readouterr().err
