"""The commands and the Python of docs/dialects/snapshot.md run as they stand there, and print what it says."""

import contextlib
import io
import re
import shutil
from pathlib import Path

from kvtools.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```(console|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_does_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "tests" / "data" / "sample", "checkpoints")
    blocks = BLOCK.findall((ROOT / "docs" / "dialects" / "snapshot.md").read_text())
    assert [kind for kind, _ in blocks] == ["console", "python"]
    for kind, block in blocks:
        if kind == "console":
            for line in block.splitlines():
                assert main(line.removeprefix("$ kvtools ").split()) == 0
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "snapshot.md", "exec"), {})
        said = [line.removeprefix("# ") for line in block.splitlines() if line.startswith("# ")]
        assert printed.getvalue().splitlines() == said
