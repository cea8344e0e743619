from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from kvtools.cli.main import main


def test_without_fastapi(sample_path: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['fastapi'] = None; from kvtools.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "serve", str(sample_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "pip install 'kvtools[serve]'" in done.stderr


def test_port_that_is_taken(sample_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert main(["serve", str(sample_path), "--port", str(taken.getsockname()[1])]) == 1
    assert "name another --host or --port" in capsys.readouterr().err
