"""Finds the interpreters that wheels are built with and tested on."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

_ASK = "import sys; print('%d.%d' % sys.version_info[:2], sys.implementation.name, sys.executable)"


def find_interpreters(names: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the path of each interpreter by its minor version, and the names that were not found.

    Args:
        names: versions ("3.12") or paths. A version is looked for on the path, then in pyenv's folder: `python3.12` on
            the path may be a stand-in of pyenv that leads nowhere, so each one found is asked what it is.
    """
    found: dict[str, str] = {}
    missing = []
    for name in names:
        for candidate in [name] if "/" in name else _candidates(name):
            version = _version(candidate)
            if version and (version == name or "/" in name):
                found[version] = candidate
                break
        else:
            missing.append(name)
    return dict(sorted(found.items(), key=lambda item: [int(number) for number in item[0].split(".")])), missing


def _candidates(version: str) -> Iterator[str]:
    if on_path := shutil.which(f"python{version}"):
        yield on_path
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    patches = [path for path in versions.glob(f"{version}.*") if path.name.removeprefix(f"{version}.").isdigit()]
    for path in sorted(patches, key=lambda path: -int(path.name.rpartition(".")[2])):
        yield str(path / "bin" / "python")


def _version(python: str) -> str | None:
    """The minor version of a CPython, None if it does not run or is something else."""
    try:
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = done.stdout.split()
    return words[0] if done.returncode == 0 and words[1:2] == ["cpython"] else None
