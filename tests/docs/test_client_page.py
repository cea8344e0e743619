"""The Python of docs/client.md runs as it stands there, against a server, and prints what it says."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_the_page_prints_what_it_says(tmp_path):
    for package in ("fastapi", "uvicorn", "redis"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "kvtools.cli.main", "serve", str(ROOT / "tests" / "data" / "sample"), "--json"]
    command += ["--port", "0", "--resp-port", "0", "--workers", "2"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            said = json.loads(server.stdout.readline())
            text = (ROOT / "docs" / "client.md").read_text()
            text = text.replace("http://127.0.0.1:8501", said["url"]).replace("port=6390", f"port={said['resp_port']}")
            blocks = BLOCK.findall(text)
            assert len(blocks) == 5
            names: dict[str, object] = {}
            for block in blocks:
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(compile(block, "client.md", "exec"), names)
                said = [line.strip().removeprefix("# ") for line in block.splitlines() if line.strip().startswith("# ")]
                assert printed.getvalue().splitlines() == said
        finally:
            server.terminate()
