from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvtools.cli.main import COMMANDS, main


@pytest.fixture
def pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert main(["man", "--output", str(tmp_path / "man1")]) == 0
    pages = {file.name: file.read_text() for file in (tmp_path / "man1").iterdir()}
    assert capsys.readouterr().out == f"wrote {len(pages)} pages to {tmp_path / 'man1'}\n"
    return pages


def test_there_is_a_page_of_each_command_with_what_its_help_says(pages: dict[str, str]) -> None:
    assert set(pages) == {"kvtools.1", *(f"kvtools-{name}.1" for name in COMMANDS)}
    assert all(f"kvtools-{name}(1)".replace("-", "\\-") in pages["kvtools.1"] for name in COMMANDS)
    clip = pages["kvtools-clip.1"]
    for heading in ("NAME", "SYNOPSIS", "DESCRIPTION", "ARGUMENTS", "OPTIONS", "EXAMPLES", "EXIT STATUS"):
        assert f".SH {heading}\n" in clip
    assert ".B \\-\\-max\\-abs X\nCut rows whose values are all below X in size.\n" in clip
    assert "\nkvtools clip model.ckpt\\-100 \\-\\-max\\-abs 1e\\-6 \\-\\-dry\\-run\n" in clip


@pytest.mark.skipif(shutil.which("groff") is None, reason="there is no groff")
def test_troff_takes_them_without_a_warning(pages: dict[str, str]) -> None:
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Tutf8", "-"], input="\n".join(pages.values()), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_page_is_printed_as_it_is_in_a_pipe(capsys: pytest.CaptureFixture[str], pages: dict[str, str]) -> None:
    assert main(["man", "clip"]) == 0
    assert capsys.readouterr().out == pages["kvtools-clip.1"]
    assert main(["man"]) == 0
    assert capsys.readouterr().out == pages["kvtools.1"]


def test_bad_usage_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["man", "nope"]) == 2 and main(["man", "clip", "--output", "x"]) == 2
    (tmp_path / "file").touch()
    assert main(["man", "--output", str(tmp_path / "file")]) == 1
    assert capsys.readouterr().err.count("\n") == 3
