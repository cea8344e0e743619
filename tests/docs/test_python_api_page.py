"""The Python of docs/python-api.md runs as it stands there and prints what it says; it needs no TensorFlow."""

import contextlib
import io
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_prints_what_it_says(tmp_path, monkeypatch):
    for package in ("h5py", "pandas", "pyarrow"):
        pytest.importorskip(package)
    shutil.copytree(ROOT / "tests" / "data" / "sample", tmp_path / "tests" / "data" / "sample")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "python-api.md").read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) > 5
    names: dict[str, object] = {}
    for block in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(block, "python-api.md", "exec"), names)
        said = [line.removeprefix("# ") for line in block.splitlines() if line.startswith("# ")]
        assert printed.getvalue().splitlines() == said
