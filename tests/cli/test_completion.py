"""Scripts for shells, each run by its shell; those that are not installed are skipped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtools.cli.main import COMMANDS, main

BASH = """
source ./script
COMP_WORDS=({words}) COMP_CWORD={last}
_kvtools
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def script(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Write a shell's script into an empty folder, where `kvtools` is this one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "kvtools"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m kvtools.cli.main "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path('/usr/bin')}:{Path('/bin')}")

    def write(shell: str) -> str:
        if shutil.which(shell) is None:
            pytest.skip(f"there is no {shell}")
        assert main(["completion", shell]) == 0
        text = capsys.readouterr().out
        (tmp_path / "script").write_text(text)
        return text

    return write


def bash(*words: str) -> list[str]:
    program = BASH.format(words=" ".join(f"'{word}'" for word in words), last=len(words) - 1)
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return [word for word in done.stdout.splitlines() if word]


def test_bash_completes_commands_options_values_and_files(script) -> None:
    script("bash")
    assert bash("kvtools", "") == [*COMMANDS, "--version", "--string-keys", "-q", "--quiet", "--color", "-h", "--help"]
    assert bash("kvtools", "re") == [name for name in COMMANDS if name.startswith("re")]
    assert bash("kvtools", "--color", "never", "-q", "res") == ["reshard"]
    assert bash("kvtools", "clip", "--max") == ["--max-abs"]
    assert bash("kvtools", "clip", "a", "--by", "") == ["freq", "l2", "abs", "version"]
    assert bash("kvtools", "migrate", "a", "b", "--to", "tfp") == ["tfplugin", "tfplus"]
    assert bash("kvtools", "clip", "a", "--color", "a") == ["auto", "always"]
    assert bash("kvtools", "clip", "a", "--min-freq", "") == []
    assert bash("kvtools", "completion", "") == ["bash", "zsh", "fish"]
    assert bash("kvtools", "man", "cl") == ["clip"]
    Path("my model.ckpt.index").touch()
    assert bash("kvtools", "clip", "my") == ["my model.ckpt.index"]


def test_bash_completes_the_tables_of_a_path(script, sample_path: Path) -> None:
    script("bash")
    assert bash("kvtools", "clip", "--force", str(sample_path), "--table", "") == ["ads/emb", "empty_emb", "user_emb"]
    assert bash("kvtools", "clip", str(sample_path), "--table", "us") == ["user_emb"]
    assert bash("kvtools", "clip", "gone", "--table", "") == []


def test_tables_are_asked_of_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tables", "redis://nowhere.invalid/0"]) == 0
    assert main(["completion", "tables", "gone"]) == 0
    assert capsys.readouterr() == ("", "")


def test_fish_completes_commands_values_and_tables(script, sample_path: Path) -> None:
    script("fish")

    def fish(line: str) -> list[str]:
        command = f"source script; complete -C '{line}'"
        done = subprocess.run(["fish", "-N", "-c", command], capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return [word.split("\t")[0] for word in done.stdout.splitlines()]

    assert set(COMMANDS) <= set(fish("kvtools "))
    assert fish("kvtools man cli") == ["clip"]
    assert fish("kvtools clip a --by ") == ["abs", "freq", "l2", "version"]
    assert fish(f"kvtools clip {sample_path} --table ") == ["ads/emb", "empty_emb", "user_emb"]


def test_zsh_takes_the_script(script) -> None:
    text = script("zsh")
    program = "autoload -Uz compinit && compinit -u -D && source ./script && print -r -- $_comps[kvtools]"
    done = subprocess.run(["zsh", "-f", "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("_kvtools\n", "")
    assert "'1:\\[COMMAND\\]:(dialects inspect " in text
    assert "'*--by[What --top-k and --budget compare" in text and "(freq l2 abs version)'" in text


def test_a_shell_that_is_unknown_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "tcsh"]) == 2
    assert capsys.readouterr().err == "kvtools: completing: got tcsh, expected one of bash, zsh, fish\n"
