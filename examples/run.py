"""Run the examples, one after the other, and say of each what it showed and how long it took.

    python examples/run.py                    # all: `make examples`
    python examples/run.py din two_tower      # some: `make examples EXAMPLE=din`

The exit status is 1 where one of them failed; what it wrote is printed then.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
LIMIT = 120  # seconds that an example may take on two cores
GIVEN_UP = 600

_RANKS = [str(Path(sysconfig.get_path("scripts")) / "horovodrun"), "-np", "2"]
#: In the order in which a reader would go; what stands before `python NAME.py`.
EXAMPLES = {
    "deepfm": [],
    "two_tower": [],
    "din": [],
    "online_training": [],
    "kv_variable": [],
    "from_tfra": [],
    "sok_two_ranks": _RANKS,
    "ctr_demo": [],
}


def main() -> int:
    """Runs those that are asked for; returns how many failed, at most 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXAMPLES)} (default: all)")
    names = parser.parse_args().names or list(EXAMPLES)
    if unknown := [name for name in names if name not in EXAMPLES]:
        parser.error(f"there is no example '{unknown[0]}'; there are {', '.join(EXAMPLES)}")
    return 1 if sum([not shown(name) for name in names]) else 0


def shown(name: str) -> bool:
    """Runs an example in a folder of its own, and prints its last line and the time; whether it succeeded."""
    command = [*EXAMPLES[name], sys.executable, str(HERE / f"{name}.py")]
    started = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryFile("w+") as output,
        tempfile.TemporaryFile("w+") as errors,
    ):
        try:
            status = subprocess.run(
                command, cwd=folder, stdout=output, stderr=errors, timeout=GIVEN_UP, check=False
            ).returncode
        except FileNotFoundError:
            print(f"{name}: there is no {command[0]}: run `make setup-horovod`", flush=True)
            return False
        except subprocess.TimeoutExpired:
            status = f"no end after {GIVEN_UP} s"
        output.seek(0)
        errors.seek(0)
        text, complaints = output.read(), errors.read()
    seconds = time.monotonic() - started
    if status != 0:
        print(f"{text}{complaints}\n{name:16} {seconds:4.0f} s  FAILED: {status}", flush=True)
        return False
    # Of horovodrun each line says its rank first.
    lines = [re.sub(r"^\[[\d,]+\]<std\w+>:\s?", "", line).strip() for line in text.splitlines()]
    late = f" (longer than the {LIMIT} s that two idle cores take)" if seconds > LIMIT else ""
    print(f"{name:16} {seconds:4.0f} s  {[line for line in lines if line][-1]}{late}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
