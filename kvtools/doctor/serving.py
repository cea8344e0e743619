"""What `kvtools serve` meets: ports, descriptors, queues, temporary files."""

from __future__ import annotations

import importlib.util
import resource
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvtools.doctor.check import Check

PORTS = {8501: "HTTP", 8500: "gRPC"}
"""Those that a server has unless it is told others."""

_DESCRIPTORS = 4096
_QUEUE = 1024


def check_serving(root: Path = Path("/")) -> Iterator[Check]:
    """What is there; `root` is where `proc` is looked for."""
    for port, protocol in PORTS.items():
        yield _port(port, protocol)
    yield _descriptors()
    yield from _queue(root)
    yield _temporary_files()
    if importlib.util.find_spec("uvicorn") and not importlib.util.find_spec("uvloop"):
        yield Check("event loop", "warning", "Python's own: uvloop is not installed", "pip install 'kvtools[serve]'")


def _port(port: int, protocol: str) -> Check:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            return Check(
                f"port {port}",
                "note",
                f"cannot be had ({error.strerror}); {protocol} has it unless told another",
                f"another program listens there: ss -ltnp 'sport = :{port}', or take another with --port, --grpc-port",
            )
    return Check(f"port {port}", "ok", f"free; {protocol} has it unless told another")


def _descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = ["without limit" if limit == resource.RLIM_INFINITY else f"{limit:,}" for limit in (soft, hard)]
    value = f"{told[0]} file descriptors, up to {told[1]} if a server asks: that many connections, less some 500"
    if hard != resource.RLIM_INFINITY and hard < _DESCRIPTORS:
        return Check("descriptors", "warning", value, "raise the limit: ulimit -Hn 65536, or LimitNOFILE= of systemd")
    return Check("descriptors", "ok", value)


def _queue(root: Path) -> Iterator[Check]:
    try:
        longest = int((root / "proc/sys/net/core/somaxconn").read_text())
    except (OSError, ValueError):
        return
    value = f"{longest:,} connections may wait to be accepted"
    if longest < _QUEUE:
        yield Check("accept queue", "warning", value, f"as root: sysctl net.core.somaxconn={4 * _QUEUE}")
    else:
        yield Check("accept queue", "ok", value)


def _temporary_files() -> Check:
    try:
        return Check("temporary files", "ok", tempfile.gettempdir())
    except OSError as error:
        advice = "set TMPDIR to a folder that can be written: not even TensorFlow starts without one"
        return Check("temporary files", "error", error.strerror or str(error), advice)
