"""`kvtools serve` in a process of its own, with a real HTTP port and a real gRPC port."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ports:
    http: int
    grpc: int


@contextlib.contextmanager
def serving(path: Path, *options: str) -> Iterator[Ports]:
    command = [
        sys.executable,
        "-m",
        "kvtools.cli.main",
        "serve",
        str(path),
        "--port",
        "0",
        "--grpc-port",
        "0",
        "--json",
    ]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=path.resolve().parent
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read()
        told = json.loads(line)
        try:
            yield Ports(int(told["url"].rpartition(":")[2]), told["grpc_port"])
            assert process.poll() is None, "the server died"
        finally:
            process.send_signal(signal.SIGTERM)
            said = process.stderr.read()
        status = process.wait(60)
        assert status == 0 and "Traceback" not in said, f"exit status {status}: {said}"
