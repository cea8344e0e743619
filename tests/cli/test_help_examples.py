"""The examples of every command's `--help` run as they stand there, on the files of `sample_folder.py`."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from sample_folder import lay_out

from kvtools.cli.main import COMMANDS, main

NOT_HERE = {
    "doctor": "looks at the machine: tests/cli/test_doctor.py",
    "follow": "needs a Redis, and goes on: tests/kvtools/test_follow_redis.py",
    "serve": "goes on: tests/cli/test_serve.py",
    "setup-horovod": "builds for minutes: tests/cli/test_setup_horovod.py",
}
"""Commands whose examples are read by the parser alone."""

LEFT_OUT = {
    "trained_model": "tests/cli/test_export_whole_model.py",
    "--input": "tests/cli/test_export_whole_model.py",
    "--terminal": "tests/kvtools/test_explore.py",
}
"""What only models that TensorFlow has trained, and real terminals, have; and where it is tested."""

WRITTEN = {
    "advise": {"policy.toml"},
    "apply": {"tuesday.ckpt"},
    "diff": {"tuesday.delta"},
    "export": {"exported", "model.kvsnap"},
    "migrate": {"tables.h5"},
    "split": {"shards"},
}
"""What examples of a command write, which others read."""

STATUS = {"diff": {0, 3}}
"""Exit statuses that are no failure, where not 0 alone."""


def examples(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out.partition("Examples:\n")[2]
    return [line.strip() for line in re.split(r"\n\n", text)[0].replace("\\\n", " ").splitlines()]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_of_the_help_works(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("h5py")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("webbrowser.open", lambda *_: True)
    lines = examples(command, capsys)
    assert lines
    for number, line in enumerate(lines):
        before, _, called = line.rpartition(" | ") if " | " in line else ("", "", line)
        called = called.split(" && ")[0]
        if not called.startswith("kvtools ") or command in NOT_HERE or any(word in line for word in LEFT_OUT):
            assert line.startswith(("kvtools ", "curl ")) or before, line
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        lay_out(folder, line, without=frozenset(WRITTEN.get(command, ())))
        if before:
            fed = subprocess.run(before, shell=True, capture_output=True, check=True).stdout
            monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(fed)))
        words = shlex.split(called, comments=True)
        words = words[: words.index(">")] if ">" in words else words
        status = main(words[1:])
        said = capsys.readouterr()
        assert status in STATUS.get(command, {0}), f"{line}\n{said.out}{said.err}"
