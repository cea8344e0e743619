from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtools import __version__
from kvtools.cli import start
from kvtools.cli.main import COMMANDS, main


def loaded_by(arguments: list[str], cwd: Path) -> set[str]:
    """The top-level modules that a command line loads, in a process of its own."""
    program = (
        "import sys; from kvtools.cli.main import main; main(sys.argv[1:]);"
        "print('MODULES', *{name.split('.')[0] for name in sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], cwd=cwd, capture_output=True, text=True, check=True
    )
    return set(done.stdout.rpartition("MODULES")[2].split())


def test_help_loads_nothing_heavy(tmp_path: Path) -> None:
    assert not loaded_by(["--help"], tmp_path) & {
        "tensorflow",
        "numpy",
        "fastapi",
        "uvicorn",
        "ml_dtypes",
        "rich",
    }


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_loads_no_tensorflow(tmp_path: Path, command: str) -> None:
    assert not loaded_by([command, "--help"], tmp_path) & {"tensorflow", "fastapi", "uvicorn"}


def test_inspect_loads_no_tensorflow(tmp_path: Path, sample_path: Path) -> None:
    for arguments in (["inspect", str(sample_path)], ["inspect", str(sample_path), "--json", "--keys", "0"]):
        assert not loaded_by(arguments, tmp_path) & {"tensorflow", "tfplugin", "fastapi", "google.protobuf"}


def test_an_interrupt_while_the_command_line_is_loaded_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "kvtools.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "kvtools.cli.main")
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert start.main() == 130
    assert capsys.readouterr() == ("", "kvtools: interrupted\n")


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(f"\n  {name} " in output for name in COMMANDS)
    assert "Examples:" in output


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"\n    kvtools {command} " in capsys.readouterr().out


def test_arguments_and_options_that_may_be_left_out_are_there_on_every_python(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sql", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "[PATH... QUERY]" in shown and "--attach NAME=PATH" in shown


def test_without_arguments_the_help_is_shown_and_the_status_is_that_of_bad_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert main([]) == 2
    assert capsys.readouterr() == ("", shown)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvtools {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["nope"],
        ["-q"],
        ["--color", "never"],
        ["--color", "some", "dialects"],
        ["--nope"],
        ["inspect"],
        ["inspect", "a", "b"],
        ["inspect", "a", "--keys"],
        ["inspect", "a", "--keys", "x"],
        ["inspect", "a", "--keys", "1.5"],
        ["export", "a"],
        ["export", "a", "--savedmodel", "b", "--clip-abs", "x"],
        ["export", "a", "--savedmodel", "b", "--clip-abs", "nan"],
        ["export", "a", "--savedmodel", "b", "--clip-l2", "-1"],
        ["export", "a", "--savedmodel", "b", "--clip-l2", "1", "--policy", "c"],
        ["serve", "a", "--port", "65536"],
        ["serve", "a", "--port", "x"],
        ["serve", "a", "--max-keys", "0"],
    ],
    ids=" ".join,
)
def test_bad_usage_is_one_line_and_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("kvtools: ") and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["inspect"], "kvtools: looking for a checkpoint at "),
        (["export", "--savedmodel", "out"], "kvtools: looking for a checkpoint at "),
        (["serve", "--port", "0"], "kvtools: serving '"),
    ],
)
def test_bad_input_is_one_line_and_exits_1(
    command: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path / "no\nsuch")]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(said) and captured.err.count("\n") == 1


def test_reader_that_goes_away_is_told_nothing(tmp_path: Path, sample_path: Path) -> None:
    command = f"{sys.executable} -m kvtools.cli.main inspect {sample_path} --json | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == "" and done.returncode in (0, 1)
