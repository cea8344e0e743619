"""The README, walked by somebody who has nothing else: each of its commands and snippets in their order, with times.

    python benchmarks/first_hour.py [--wheel] [--source]

An environment with nothing in it but what `env -i` leaves: an own HOME, empty caches, and a path without compilers
(`--wheel`: an install from the wheel of dist/) or with them (`--source`: a clone of the last commit, and `make demo`).
It is no container: the same kernel and C library, and a package index at the usual distance. Writes its tables into
docs/first-hour.md. A step that fails stands there as such.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from machine import machine

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "first-hour.md"
README = (ROOT / "README.md").read_text()
COMPILERS = re.compile(r"(.*-)?(gcc|g\+\+|c\+\+|cc|cpp|clang|clang\+\+|nvcc|ccache|ld|as|make|cmake|ninja)(-[\d.]+)?")
PASSED_ON = re.compile(r"(PIP|SSL|https?_proxy|HTTPS?_PROXY)")
"""How pip reaches its index: that is the machine's, and no part of the walk."""


class Walk:
    """Steps in one folder with one environment; what each took and said."""

    def __init__(self, folder: Path, path: str) -> None:
        self.folder = folder
        home = folder / "home"
        home.mkdir()
        passed = {name: value for name, value in os.environ.items() if PASSED_ON.match(name)}
        self.environment = {**passed, "PATH": path, "HOME": str(home), "LANG": "C.UTF-8", "TF_CPP_MIN_LOG_LEVEL": "3"}
        self.environment |= {"PIP_NO_CACHE_DIR": "1", "CCACHE_DISABLE": "1"}
        self.steps: list[tuple[str, float, str]] = []

    def step(self, shown: str, command: str, *, cwd: Path | None = None) -> bool:
        """Run a command; note how long it took and the last line that it printed."""
        began = time.monotonic()
        done = subprocess.run(
            ["/bin/bash", "-c", command],
            cwd=cwd or self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        lines = [
            line.strip() for line in done.stdout.splitlines() if line.strip() and "absl::InitializeLog" not in line
        ]
        said = lines[-1] if lines else ""
        if done.returncode:
            said = f"**failed ({done.returncode})**: {said}"
            print(done.stdout, file=sys.stderr)
        self.note(shown, time.monotonic() - began, said)
        return done.returncode == 0

    def note(self, shown: str, seconds: float, said: str) -> None:
        """Add a row to the table."""
        said = said.replace(str(self.folder), "…").replace("|", "\\|")
        self.steps.append((shown, seconds, said if len(said) < 110 else said[:107] + "..."))
        print(f"{seconds:8.1f} s  {shown}: {said}", flush=True)

    def table(self) -> str:
        """The steps as Markdown."""
        rows = [
            f"| {number} | {shown} | {seconds:.1f} | {said} |"
            for number, (shown, seconds, said) in enumerate(self.steps, 1)
        ]
        total = sum(seconds for _, seconds, _ in self.steps)
        return "\n".join(
            ["| | step | s | its last line |", "|---|---|---|---|", *rows, f"| | in all | {total:.1f} | |", ""]
        )


def snippets() -> list[str]:
    """The Python of the README."""
    return re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def tools() -> list[str]:
    """The commands of the README that need nothing but what its snippets have left."""
    return [line for line in re.findall(r"^\$ (kvtools .*?)\s*(?:#.*)?$", README, re.MULTILINE) if "serve" not in line]


def path_without_compilers(folder: Path) -> str:
    """A folder of links to the programs of the system that a small image has, compilers left out."""
    programs = folder / "bin"
    programs.mkdir()
    for source in ("/bin", "/usr/bin"):
        for program in sorted(Path(source).iterdir()):
            if not COMPILERS.fullmatch(program.name) and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program.resolve())
    (programs / "python3").unlink(missing_ok=True)
    (programs / "python3").symlink_to(sys.executable)
    return str(programs)


def from_wheel(folder: Path) -> Walk:
    """Install the wheel, look, run the snippets and the tools, serve."""
    walk = Walk(folder, path_without_compilers(folder))
    shutil.copytree(ROOT / "dist", folder / "dist")
    names = "cc c++ g++ gcc clang make"
    missing = f"for c in {names}; do command -v $c && exit 1; done; echo none of {names} is here"
    walk.step("is there a compiler?", missing)
    walk.step("`python3 -m venv .venv`", "python3 -m venv .venv")
    walk.environment["PATH"] = f"{folder}/.venv/bin:{walk.environment['PATH']}"
    install = "pip install --find-links dist 'kvtools[tensorflow,serve]'"
    walk.step(f"`{install}`", f"{install} -q && echo installed")
    walk.step("`kvtools doctor`", "kvtools doctor")
    names = ["the Keras snippet", "the snippet of TensorFlow 1"]
    together = ""
    for name, snippet in zip(names, snippets(), strict=True):
        together += snippet
        (folder / "snippet.py").write_text(together if name != names[0] else snippet)
        walk.step(f"{name}, in a file", "python snippet.py && echo done")
    for tool in tools():
        walk.step(f"`{tool}`", tool)
    serve(walk)
    return walk


def serve(walk: Walk) -> None:
    """The last command of the README, one lookup, and its end."""
    (command,) = re.findall(r"^\$ (kvtools serve .*?)\s*(?:#.*)?$", README, re.MULTILINE)
    began = time.monotonic()
    with subprocess.Popen(
        ["/bin/bash", "-c", f"exec {command} --port 8599"],
        cwd=walk.folder,
        env=walk.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as server:
        assert server.stdout is not None
        line = ""
        for line in server.stdout:
            if line.startswith(("serving", "kvtools:")):
                break
        walk.note(f"`{command}`", time.monotonic() - began, line.strip())
        if line.startswith("serving"):
            began = time.monotonic()
            request = urllib.request.Request(
                "http://127.0.0.1:8599/v1/models/ctr:predict",
                b'{"instances": [[17, -3, 5]]}',
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                said = answer.read().decode()
            walk.note(
                "`curl -d '{\"instances\": [[17, -3, 5]]}' .../v1/models/ctr:predict`",
                time.monotonic() - began,
                f"`{said}`",
            )
        server.send_signal(signal.SIGTERM)


def from_source(folder: Path) -> Walk:
    """Clone, and `make demo`."""
    walk = Walk(folder, f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin")
    walk.step("is there a compiler?", "c++ --version | head -1")
    walk.step("`git clone`", f"git clone -q {ROOT} kvtools && echo cloned")
    clone = folder / "kvtools"
    walk.step("`make setup`, which `make demo` begins with", "make setup", cwd=clone)
    walk.step("`make demo`", "make demo", cwd=clone)
    walk.step("`.venv/bin/kvtools doctor`", ".venv/bin/kvtools doctor", cwd=clone)
    return walk


def main() -> None:
    """Walk, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", action="store_true", help="without a compiler, from the wheel in dist/")
    parser.add_argument("--source", action="store_true", help="with one, from a clone")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "first-hour", help="made anew")
    arguments = parser.parse_args()
    for name, walked in (("wheel", from_wheel), ("source", from_source)):
        if not getattr(arguments, name):
            continue
        folder = (arguments.folder / name).resolve()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        on = machine()
        table = walked(folder).table()
        day = datetime.datetime.now(datetime.timezone.utc).date()
        told = f"{day}; {on['cpu']}, {on['cpus']} CPUs, Python {on['python']}; "
        told += f"load average before {on['load_before']:.1f}.\n\n"
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        text = PAGE.read_text()
        head, _, rest = text.partition(begin)
        PAGE.write_text(head + begin + "\n" + told + table + "\n" + end + rest.partition(end)[2])


if __name__ == "__main__":
    main()
