"""Sees to it that Horovod is installed and works with the TensorFlow that is installed: builds it where it does not.

>>> from kvtools.horovod_setup.setup import setup_horovod
>>> setup = setup_horovod()  # doctest: +SKIP
>>> setup.action, setup.horovod, setup.tensorflow  # doctest: +SKIP
('kept', '0.28.1', '2.21.0')
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvtools.cache_folder import cache_folder
from kvtools.errors import MissingDependencyError, OutputError, UsageError
from kvtools.horovod_setup.build import OPTIONS, RUNTIME, VERSION, HorovodBuildError, Progress, build_wheel, pip

RANKS = 2
KNOWN_TENSORFLOW = ((2, 16), (2, 21))  # the first and the last minor version
CHECK_SECONDS = 300
_LINES_SHOWN = 15

# What decides whether a wheel fits, asked of TensorFlow in a process of its own: it takes seconds to import.
_ASK_TENSORFLOW = """
import json, tensorflow as tf
flags = [*tf.sysconfig.get_compile_flags(), *tf.sysconfig.get_link_flags()]
version = tf.version
print("\\n" + json.dumps([version.VERSION, version.GIT_VERSION, version.COMPILER_VERSION,
                          [f for f in flags if not f.startswith(("-I", "-L"))]]))
"""
# Without its question whether Horovod has Gloo, for which the launcher imports TensorFlow twice: the exchange tells.
HOROVODRUN = "from horovod.runner import launch; launch.gloo_built = lambda **_: True; launch.run_commandline()"

Action = Literal["kept", "checked", "installed", "built"]


@dataclass(frozen=True)
class HorovodSetup:
    """What `setup_horovod` found or did.

    Attributes:
        action: "kept": it was there, and was checked before; "checked": it was there and works; "installed": from a
            wheel that an earlier run built; "built": compiled and installed.
        horovod: the version of Horovod.
        tensorflow: the version of TensorFlow that it was checked with.
        library: Horovod's compiled library.
        wheel: the wheel it was installed from, None if this package did not build it.
        log: what compiler and pip said, if they ran.
        seconds: how long all this took.
    """

    action: Action
    horovod: str
    tensorflow: str
    library: str
    wheel: str | None
    log: str | None
    seconds: float


@dataclass(frozen=True)
class TensorFlowBuild:
    """The TensorFlow that is installed, as far as a library compiled against it depends on it."""

    version: str
    git_version: str
    compiler: str
    flags: tuple[str, ...]

    def cache_key(self) -> str:
        """Name a folder: equal for two environments exactly where one wheel serves both."""
        python = f"{sys.version_info[0]}.{sys.version_info[1]}"
        digest = hashlib.sha256(
            json.dumps([self.version, self.git_version, self.compiler, self.flags, OPTIONS, sys.platform]).encode()
        )
        name = f"horovod-{VERSION}-tensorflow-{self.version}-python-{python}-{os.uname().machine}"
        return f"{name}-{digest.hexdigest()[:16]}"


def setup_horovod(
    *,
    force: bool = False,
    jobs: int | None = None,
    sdist: Path | None = None,
    any_tensorflow: bool = False,
    progress: Progress | None = None,
) -> HorovodSetup:
    """Build and install Horovod with Gloo for the installed TensorFlow, unless one that works is there.

    The compiled wheel is kept, so that a second environment or a repair takes seconds. The environment is touched only
    once the wheel is whole. Whatever was installed is then checked by an alltoall between two ranks.

    Args:
        force: compile even where a working Horovod or a wheel is there.
        jobs: how many files to compile at once; as many as processors and memory allow.
        sdist: Horovod's source package, where it cannot be fetched.
        any_tensorflow: try with a TensorFlow that is not known to work, too.
        progress: called with (what is being done, parts done, parts in all).

    Raises:
        MissingDependencyError: no TensorFlow, C++ compiler, make or pip.
        UsageError: `jobs` is less than 1.
        BadInputError: `sdist` is not the source package.
        HorovodBuildError: fetching, compiling or checking failed, or this TensorFlow is not known to work.
        OutputError: a folder cannot be written.
    """
    started = time.monotonic()
    if jobs is not None and jobs < 1:
        raise UsageError(f"setting up Horovod: got --jobs {jobs}, expected 1 or more")
    tell: Progress = progress or (lambda *_: None)
    folder = cache_folder() / "horovod"
    record = folder / f"checked-{hashlib.sha256(sys.prefix.encode()).hexdigest()[:16]}.json"

    def setup(action: Action, tensorflow: str, wheel: Path | None = None, log: Path | None = None) -> HorovodSetup:
        return HorovodSetup(
            action,
            VERSION,
            tensorflow,
            library=str(horovod_library()),
            wheel=str(wheel) if wheel else None,
            log=str(log) if log else None,
            seconds=round(time.monotonic() - started, 1),
        )

    try:
        if not force and (version := _checked_before(record)):
            return setup("kept", version)
        tell("asking TensorFlow", 0, 1)
        tensorflow = ask_tensorflow()
        if not any_tensorflow:
            check_known(tensorflow.version)
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock", lambda: tell("waiting for another setup-horovod to end", 0, 1)):
            if not force and _is_installed():
                tell(f"checking the installed Horovod with {RANKS} ranks", 0, 1)
                with contextlib.suppress(HorovodBuildError):  # it may be of another TensorFlow: then build
                    check_alltoall()
                    _remember(record, tensorflow.version)
                    return setup("checked", tensorflow.version)
            place = folder / tensorflow.cache_key()
            place.mkdir(exist_ok=True)
            log = place / "build.log"
            wheel = None if force else next(place.glob("*.whl"), None)
            action: Action = "built" if wheel is None else "installed"
            if wheel is None:
                log.unlink(missing_ok=True)
                wheel = _build_into(place, log, jobs or default_jobs(), sdist, tell)
            tell("installing Horovod", 0, 1)
            pip(["install", *RUNTIME], log, "installing what Horovod needs")
            pip(["install", "--no-deps", "--no-index", "--force-reinstall", str(wheel)], log, "installing Horovod")
            tell(f"checking Horovod with {RANKS} ranks", 0, 1)
            importlib.invalidate_caches()
            try:
                check_alltoall()
            except HorovodBuildError:
                wheel.unlink(missing_ok=True)  # the next run is to compile, not to install this again
                raise
            _remember(record, tensorflow.version)
            return setup(action, tensorflow.version, wheel, log)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise HorovodBuildError(
                f"setting up Horovod: the disk is full ({error.filename or folder}); make room, or set TMPDIR (for the"
                " build) and KVTOOLS_CACHE_DIR (for the wheel) to folders that have it"
            ) from error
        raise OutputError(
            f"setting up Horovod: cannot write '{error.filename or folder}': {error.strerror or error};"
            " set KVTOOLS_CACHE_DIR to a folder that can be written"
        ) from error


def ask_tensorflow() -> TensorFlowBuild:
    """Return what is to be known of the installed TensorFlow; raises `MissingDependencyError` if there is none."""
    if importlib.util.find_spec("tensorflow") is None:
        raise MissingDependencyError(
            f"setting up Horovod: {sys.executable} has no TensorFlow to build it for; run"
            " `pip install 'kvtools[tensorflow]'` and then this again"
        )
    done = subprocess.run(
        [sys.executable, "-c", _ASK_TENSORFLOW], capture_output=True, text=True, env=_quiet(), cwd=tempfile.gettempdir()
    )
    if done.returncode != 0:
        raise HorovodBuildError(
            "setting up Horovod: the installed TensorFlow cannot be imported; repair it first, until"
            " `python -c 'import tensorflow'` works",
            done.stderr.splitlines()[-_LINES_SHOWN:],
        )
    version, git_version, compiler, flags = json.loads(done.stdout.splitlines()[-1])
    return TensorFlowBuild(version, git_version, compiler, tuple(flags))


def check_known(version: str) -> None:
    """Raise `HorovodBuildError` for a version of TensorFlow that Horovod is not known to build against.

    >>> check_known("2.21.0")
    """
    try:
        major, minor = (int(number) for number in version.split(".")[:2])
    except ValueError:
        major, minor = 0, 0
    first, last = KNOWN_TENSORFLOW
    if not first <= (major, minor) <= last:
        known = " to ".join(".".join(map(str, edge)) for edge in KNOWN_TENSORFLOW)
        raise HorovodBuildError(
            f"setting up Horovod: TensorFlow {version} is not known to work with Horovod {VERSION}, {known} are;"
            " install one of those, or try with --any-tensorflow"
        )


def check_alltoall() -> None:
    """Import Horovod and exchange rows between two ranks of this machine; raises `HorovodBuildError` if that fails."""
    ranks = ["-np", str(RANKS), "--gloo", "-H", f"localhost:{RANKS}"]
    command = [sys.executable, "-c", HOROVODRUN, *ranks, sys.executable, "-m", "kvtools.horovod_setup.alltoall"]
    environment = {name: value for name, value in _quiet().items() if not name.startswith("HOROVOD_")}
    # In a folder of its own: `-c` and `-m` import from where they run.
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**environment, "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"},
            cwd=folder,
        )
        try:
            printed, _ = process.communicate(timeout=CHECK_SECONDS)
            why = f"ended with status {process.returncode}"
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its ranks
            printed, _ = process.communicate()
            why = f"did not end within {CHECK_SECONDS} s"
    if process.returncode != 0 or printed.count("is right") != RANKS:
        raise HorovodBuildError(
            f"checking Horovod: the alltoall between {RANKS} ranks {why}; run this again with --force to compile it"
            " anew; if it fails again, see the page 'Horovod' of the documentation",
            [line for line in printed.splitlines() if line.strip()][-_LINES_SHOWN:],
        )


def default_jobs() -> int:
    """Return how many files to compile at once: the processors of this process, and 2 GiB of free memory for each."""
    processors = len(os.sched_getaffinity(0))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) << 10
    return max(1, min(processors, free >> 31))


def horovod_library() -> Path | None:
    """Return Horovod's compiled library for TensorFlow, None if it is not installed; imports neither."""
    spec = importlib.util.find_spec("horovod")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        for library in Path(location, "tensorflow").glob("mpi_lib*.so"):
            return library
    return None


def _is_installed() -> bool:
    try:
        return importlib.metadata.version("horovod") == VERSION and horovod_library() is not None
    except importlib.metadata.PackageNotFoundError:
        return False


def _fingerprint() -> list[list[Any]] | None:
    """The files of TensorFlow and Horovod that change when either is installed anew; None if one is missing."""
    spec = importlib.util.find_spec("tensorflow")
    places = (spec.submodule_search_locations or ()) if spec else ()
    framework = [path for place in places for path in sorted(Path(place).glob("libtensorflow_framework.so*"))]
    library = horovod_library()
    if not framework or library is None or not _is_installed():
        return None
    status = [(path, path.stat()) for path in (*framework, library)]
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in status]


def _checked_before(record: Path) -> str | None:
    """The version of TensorFlow with which the very files that are installed were found to work."""
    try:
        known = json.loads(record.read_text())
        return str(known["tensorflow"]) if known["files"] and known["files"] == _fingerprint() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remember(record: Path, version: str) -> None:
    fresh = record.with_suffix(f".{os.getpid()}")
    fresh.write_text(json.dumps({"tensorflow": version, "files": _fingerprint()}))
    fresh.replace(record)


def _build_into(place: Path, log: Path, jobs: int, sdist: Path | None, progress: Progress) -> Path:
    with tempfile.TemporaryDirectory(prefix="kvtools-horovod-") as scratch:
        wheel = build_wheel(Path(scratch), log, jobs=jobs, sdist=sdist, progress=progress)
        fresh = place / f"{wheel.name}.part"
        shutil.copyfile(wheel, fresh)
        for old in place.glob("*.whl"):
            old.unlink()
        return fresh.rename(place / wheel.name)


@contextlib.contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _quiet() -> dict[str, str]:
    return {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
