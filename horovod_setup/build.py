"""Compiles Horovod, with Gloo and for the TensorFlow that is installed, from its source package into a wheel.

Horovod 0.28.1 is its last release, and three things keep it from building as it is against a TensorFlow of today: an
optional XLA op whose headers TensorFlow no longer ships (left out here), CMake files that CMake 4 refuses, and a
setup.py for a setuptools of its time. Debug symbols and a second Gloo, a third of the work, are left out. CMake 3 and
that setuptools go into the scratch folder, never into the environment. Nothing of the download runs before its
checksum is compared.
"""

from __future__ import annotations

import collections
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvtools.errors import BadInputError, KvtoolsError, MissingDependencyError

VERSION = "0.28.1"
ARCHIVE = f"horovod-{VERSION}.tar.gz"
ARCHIVE_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

# The build's own tools; the last four are what Horovod's setup.py would otherwise fetch by itself.
TOOLS = (
    "cmake>=3.31,<4",
    "setuptools>=65,<81",
    "wheel>=0.43",
    "cloudpickle>=3",
    "packaging>=24",
    "psutil>=5.9",
    "pyyaml>=6",
)
RUNTIME = ("cloudpickle>=3", "packaging>=24", "psutil>=5.9", "pyyaml>=6")

OPTIONS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_CPU_OPERATIONS": "GLOO",
}
XLA_SOURCE = "xla_mpi_ops.cc"
IDLE_WORK = {
    '"-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO': '"-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO',
    "add_subdirectory(third_party/gloo)": "add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)",
}
NEEDED_BYTES = 1 << 30  # tools, sources, objects and wheel together, with room to spare

_PERCENT = re.compile(r"\[ *(\d+)%\]")
_ERROR = re.compile(
    r"\b(?:fatal )?error:|\bCMake Error|undefined reference|No space left|Killed|ModuleNotFoundError", re.I
)
_ERRORS_SHOWN = 8

Progress = Callable[[str, int, int], None]


class HorovodBuildError(KvtoolsError):
    """Horovod could not be fetched, compiled or started (exit 1); `details` are the lines that tell why."""

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = list(details)


def build_wheel(scratch: Path, log: Path, *, jobs: int, sdist: Path | None, progress: Progress) -> Path:
    """Compile Horovod in the folder `scratch` and return the path of the wheel in it.

    Args:
        scratch: an empty folder.
        log: takes all that the tools print.
        jobs: how many files to compile at once.
        sdist: Horovod's source package, if it need not be fetched.
        progress: called with (what is being done, parts done, parts in all).

    Raises:
        MissingDependencyError: no C++ compiler, make or pip.
        BadInputError: the source package is not the one that this version knows.
        HorovodBuildError: fetching or compiling failed.
    """
    find_compiler()
    check_space(scratch)
    tools = scratch / "tools"
    progress("fetching the build tools", 0, 1)
    pip(["install", "--target", str(tools), *TOOLS], log, "fetching CMake and setuptools")
    environment = build_environment(os.environ, tools, jobs)
    if sdist is None:
        progress(f"fetching {ARCHIVE}", 0, 1)
        wanted = scratch / "wanted.txt"
        wanted.write_text(f"horovod=={VERSION} --no-binary horovod --hash=sha256:{ARCHIVE_SHA256}\n")
        # With the hash, pip compares before it runs the setup.py that it found.
        options = ["--no-deps", "--no-build-isolation", "--require-hashes", "-d", str(scratch), "-r", str(wanted)]
        pip(["download", *options], log, f"fetching {ARCHIVE}", environment)
        sdist = scratch / ARCHIVE
    check_archive(sdist)
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(scratch, filter="data")
        else:  # Python before its security releases of 2023; the checksum vouches for the members
            archive.extractall(scratch)
    source = scratch / f"horovod-{VERSION}"
    lists = source / "horovod" / "tensorflow" / "CMakeLists.txt"
    lists.write_text(without_xla(lists.read_text()))
    lists = source / "CMakeLists.txt"
    lists.write_text(without_idle_work(lists.read_text()))
    compile_source(source, scratch / "dist", log, environment, progress)
    wheels = list((scratch / "dist").glob("*.whl"))
    if len(wheels) != 1:
        raise HorovodBuildError(f"building Horovod: got {len(wheels)} wheels, expected one; the log is {log}")
    return wheels[0]


def without_xla(cmake_lists: str) -> str:
    """Drop the one line that names the XLA op from the text of Horovod's CMakeLists.txt for TensorFlow.

    >>> without_xla('a\\nlist(APPEND TF_SOURCES "xla_mpi_ops.cc")\\nb\\n')
    'a\\nb\\n'
    """
    lines = cmake_lists.splitlines(keepends=True)
    named = [number for number, line in enumerate(lines) if XLA_SOURCE in line]
    if len(named) != 1:
        raise HorovodBuildError(
            f"building Horovod: {XLA_SOURCE} is named {len(named)} times in horovod/tensorflow/CMakeLists.txt,"
            f" expected once: this is not Horovod {VERSION}"
        )
    del lines[named[0]]
    return "".join(lines)


def without_idle_work(cmake_lists: str) -> str:
    """Change Horovod's own CMakeLists.txt so that it builds no debug symbols, and no Gloo but the one for C++17.

    TensorFlow is linked with that one; the other is for PyTorch.
    """
    for old, new in IDLE_WORK.items():
        if cmake_lists.count(old) != 1:
            raise HorovodBuildError(
                f"building Horovod: '{old}' stands {cmake_lists.count(old)} times in CMakeLists.txt, expected once:"
                f" this is not Horovod {VERSION}"
            )
        cmake_lists = cmake_lists.replace(old, new)
    return cmake_lists


def check_archive(sdist: Path) -> None:
    """Raise `BadInputError` unless the file is Horovod's source package, bit for bit."""
    try:
        got = hashlib.sha256(sdist.read_bytes()).hexdigest()
    except OSError as error:
        raise BadInputError(f"reading '{sdist}': {error.strerror or error}; expected {ARCHIVE}") from error
    if got != ARCHIVE_SHA256:
        raise BadInputError(
            f"reading '{sdist}': got sha256 {got}, expected {ARCHIVE_SHA256}, that of {ARCHIVE}; fetch it again"
        )


def build_environment(base: Mapping[str, str], tools: Path, jobs: int) -> dict[str, str]:
    """Return `base` with what Horovod's setup.py reads, and none of the caller's own settings for it."""
    kept = {name: value for name, value in base.items() if not name.startswith("HOROVOD_") and name != "PYTHONPATH"}
    return {
        **kept,
        **OPTIONS,
        "HOROVOD_CMAKE": str(tools / "cmake" / "data" / "bin" / "cmake"),
        "MAKEFLAGS": f"-j{jobs}",
        "PYTHONPATH": str(tools),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
    }


def find_compiler() -> str:
    """Return the C++ compiler that CMake will take; raises `MissingDependencyError` if it or make is missing."""
    named = os.environ.get("CXX")
    compiler = next((name for name in ([named] if named else ["c++", "g++", "clang++"]) if shutil.which(name)), None)
    missing = "C++ compiler" + (f" '{named}' (from $CXX)" if named else "") if compiler is None else "make"
    if compiler is None or shutil.which("make") is None:
        raise MissingDependencyError(
            f"building Horovod: no {missing} was found; install g++ and make (Debian, Ubuntu: apt-get install g++ make;"
            " Fedora: dnf install gcc-c++ make) and run this again"
        )
    return compiler


def check_space(folder: Path) -> None:
    """Raise `HorovodBuildError` where the disk has not the room that a build takes."""
    free = shutil.disk_usage(folder).free
    if free < NEEDED_BYTES:
        raise HorovodBuildError(_full(folder, f"{free >> 20} MiB are free, {NEEDED_BYTES >> 20} MiB are needed"))


def _full(folder: Path, why: str) -> str:
    return f"building Horovod in '{folder}': the disk is full: {why}; make room, or set TMPDIR to a folder that has it"


def pip(arguments: Sequence[str], log: Path, doing: str, environment: Mapping[str, str] | None = None) -> None:
    """Run this Python's pip; raises `HorovodBuildError` with pip's own words if it fails."""
    if importlib.util.find_spec("pip") is None:
        raise MissingDependencyError(f"{doing}: {sys.executable} has no pip; run `{sys.executable} -m ensurepip`")
    command = [sys.executable, "-m", "pip", *arguments[:1], "--disable-pip-version-check", *arguments[1:]]
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    with log.open("a") as out:
        out.write(f"$ {' '.join(command)}\n{done.stdout}\n")
    if done.returncode == 0:
        return
    lines = [line.strip() for line in done.stdout.splitlines() if line.lstrip().lower().startswith("error")]
    if "externally-managed-environment" in done.stdout:
        step = "this Python takes no packages; use a virtual environment (`python3 -m venv`) and run this again there"
    elif "DO NOT MATCH THE HASHES" in done.stdout:
        step = "what was fetched is not the package that is known: ask who runs your package index"
    elif "No space left" in done.stdout:
        step = "the disk is full; make room, or set TMPDIR to a folder that has it"
    elif "download" in arguments:
        step = f"check the network and pip's settings, or fetch {ARCHIVE} elsewhere and name it with --sdist"
    else:
        step = "check the network and pip's settings (`pip config list`)"
    why = f" ({lines[-1]})" if lines else ""
    raise HorovodBuildError(f"{doing}: pip failed{why}; {step}; the log is {log}", lines[:-1][:_ERRORS_SHOWN])


def compile_source(source: Path, out: Path, log: Path, environment: Mapping[str, str], progress: Progress) -> None:
    """Run Horovod's setup.py to make a wheel in `out`; raises `HorovodBuildError` with the compiler's errors."""
    command = [sys.executable, "setup.py", "bdist_wheel", "-d", str(out)]
    doing = "compiling Horovod"
    progress(doing, 0, 100)
    done = 0
    errors: list[str] = []
    last: collections.deque[str] = collections.deque(maxlen=_ERRORS_SHOWN)
    with log.open("a") as written:
        written.write(f"$ cd {source}; {' '.join(command)}\n")
        process = subprocess.Popen(
            command,
            cwd=source,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                written.write(line)
                if line.strip():
                    last.append(line.rstrip())
                if _ERROR.search(line) and len(errors) < _ERRORS_SHOWN:
                    errors.append(line.strip())
                percent = _PERCENT.match(line.lstrip())
                if percent and int(percent[1]) > done:
                    done = int(percent[1])
                    progress(doing, done, 100)
        finally:
            if process.poll() is None:
                process.terminate()  # only when this was interrupted: otherwise the output is at its end
            status = process.wait()
    if status == 0:
        progress(doing, 100, 100)
        return
    told = "\n".join(errors)
    if "No space left" in told:
        raise HorovodBuildError(_full(source.parent, "the compiler could not write"), errors)
    step = "report it with these lines and the log"
    if "Killed" in told:
        step = "the compiler was killed, mostly for lack of memory: run this again with --jobs 1"
    raise HorovodBuildError(f"compiling Horovod failed; {step}: {log}", errors or list(last))
