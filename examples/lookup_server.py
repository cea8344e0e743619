"""Starts `kvtools serve` for an example, on a free port, and ends it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path


def kvtools(*arguments: str | Path) -> list[str]:
    """The command line of a kvtools command, by the program that pip installed beside this Python."""
    program = Path(sysconfig.get_path("scripts")) / "kvtools"
    if not program.exists():
        sys.exit(
            f"{Path(sys.argv[0]).name}: no command {program}: install kvtools into this Python, or run `make setup`."
        )
    return [str(program), *map(str, arguments)]


def run(*arguments: str | Path) -> str:
    """Runs a kvtools command, prints it, and returns what it wrote; leaves the program if it fails."""
    print(f"$ kvtools {' '.join(map(str, arguments))}", flush=True)
    done = subprocess.run(kvtools(*arguments), check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{Path(sys.argv[0]).name}: the command ended with status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def serve(*arguments: str | Path) -> Iterator[str]:
    """`kvtools serve ARGUMENTS`; gives its URL. The server goes when the block is left, however it is."""
    print(f"$ kvtools serve {' '.join(map(str, arguments))}", flush=True)
    command = kvtools("serve", *arguments, "--port", "0", "--json")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            if not line:
                sys.exit(f"{Path(sys.argv[0]).name}: the server did not start: {process.stderr.read().strip()}")
            yield json.loads(line)["url"]
        finally:
            process.terminate()
