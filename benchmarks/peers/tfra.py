"""TensorFlow Recommenders Addons (TFRA) in a virtual environment of its own, because it is pinned to one TensorFlow.

    python benchmarks/peers/tfra.py        # makes benchmarks/peers/.venv-tfra; does nothing if it is there

The calls that are measured are in `benchmarks/libraries/tfra.py`.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

ENVIRONMENT = Path(__file__).resolve().parent / ".venv-tfra"
PYTHON = ENVIRONMENT / "bin" / "python"

# The last release of TFRA, the only TensorFlow that its wheel loads in, and a NumPy that this TensorFlow was built for.
PACKAGES = (
    "tensorflow-cpu==2.16.2",
    "tensorflow-recommenders-addons==0.8.1",
    "tf-keras==2.16.0",
    "numpy==1.26.4",
)
_WANTED = "\n".join(PACKAGES) + "\n"
# Written last: an environment without it was interrupted, one with other contents is from another list of packages.
_MARK = ENVIRONMENT / "packages.txt"


class PeerError(Exception):
    """TFRA cannot be used here; the message says why and what to do."""


def is_set_up() -> bool:
    """Whether the environment is there, with these packages."""
    return _MARK.exists() and _MARK.read_text() == _WANTED


def set_up() -> Path:
    """The environment's Python, after installing what is missing. Raises `PeerError` where that fails."""
    if is_set_up():
        return PYTHON
    if not (3, 9) <= sys.version_info[:2] <= (3, 11):
        raise PeerError(f"TFRA 0.8.1 has wheels for Python 3.9 to 3.11, and this is {sys.version.split()[0]}")
    print(f"setting up TFRA in {ENVIRONMENT}: some minutes, once", file=sys.stderr, flush=True)
    try:
        venv.create(ENVIRONMENT, with_pip=True, clear=not PYTHON.exists())
        pip = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "on", *PACKAGES]
        subprocess.run(pip, check=True, stdout=sys.stderr)
    except (subprocess.CalledProcessError, OSError) as error:
        raise PeerError(f"TFRA could not be installed into {ENVIRONMENT}: {error}; see the lines above") from error
    _MARK.write_text(_WANTED)
    return PYTHON


if __name__ == "__main__":
    try:
        print(set_up())
    except PeerError as problem:
        sys.exit(f"tfra.py: {problem}")
