"""Compiles the TensorFlow ops against the installed TensorFlow, once, and loads them.

The sources come with the package (``kvtools/ops``), the table engine is the installed ``libkvtable.so``. The result
is cached by TensorFlow version, compiler flags and a hash of the sources, so that one package serves every TensorFlow.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import tensorflow as tf

_LIBRARY_NAME = "libkvtools_ops.so"
_CHECKSUM_NAME = "libkvtools_ops.sha256"

# How many pieces the sources are compiled in. TensorFlow's headers take longer to read than the sources behind them, so
# each file for itself would take three times as long; and the same pieces everywhere, so that what was tested is built.
_UNITS = 4


class BuildError(ImportError):
    """The ops could not be compiled or loaded; the message says why and what to do."""


def _package_dir() -> Path:
    spec = importlib.util.find_spec("kvtools")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("tfplugin: the package 'kvtools' is not installed: pip install kvtools[tensorflow]")
    for location in spec.submodule_search_locations:
        if (Path(location) / "libkvtable.so").exists():
            return Path(location)
    raise BuildError(
        f"tfplugin: no libkvtable.so in {list(spec.submodule_search_locations)}: "
        "kvtools is imported from a source tree; install it with pip and run outside the tree."
    )


def cache_dir() -> Path:
    """Where compiled ops are kept: ``$KVTOOLS_CACHE_DIR``, else the virtual environment, else ``~/.cache/kvtools``."""
    _package_dir()  # says what to do where kvtools is missing
    from kvtools.cache_folder import cache_folder

    return cache_folder()


def _compiler() -> str:
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name):
            return name
    raise BuildError(
        "tfplugin: no C++ compiler found to build the TensorFlow ops. Install one "
        "(Debian and Ubuntu: apt-get install g++; conda: conda install gxx) or name it in $CXX, then import again."
    )


def _compile_flags() -> list[str]:
    flags = tf.sysconfig.get_compile_flags()
    includes = [flag.removeprefix("-I") for flag in flags if flag.startswith("-I")]
    others = [flag for flag in flags if not flag.startswith("-I")]
    return [*others, *(f"-isystem{path}" for path in includes), "-O2", "-fPIC", "-Wall", "-Wextra"]


def _cache_key(sources: list[Path], headers: list[Path], flags: list[str]) -> str:
    digest = hashlib.sha256()
    for part in (tf.version.VERSION, tf.version.GIT_VERSION, tf.version.COMPILER_VERSION, *flags):
        digest.update(part.encode() + b"\0")
    for path in (*sources, *headers):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"tensorflow-{tf.version.VERSION}-{digest.hexdigest()[:16]}"


def _say(message: str) -> None:
    print(f"tfplugin: {message}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process builds the ops for TensorFlow {tf.version.VERSION}; waiting for it ...")
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        errors = [line for line in lines if "error" in line] or lines
        raise BuildError(
            "tfplugin: building the TensorFlow ops failed.\n  "
            + "\n  ".join(errors[:8])
            + f"\nThe command was:\n  {' '.join(command)}"
        )


def _units(sources: list[Path]) -> list[list[Path]]:
    """The sources in pieces of about the same size."""
    units: list[list[Path]] = [[] for _ in range(min(_UNITS, len(sources)))]
    for source in sorted(sources, key=lambda path: (-path.stat().st_size, path.name)):
        min(units, key=lambda unit: sum(path.stat().st_size for path in unit)).append(source)
    return [sorted(unit) for unit in units]


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_whole(target: Path) -> bool:
    """Whether the library is there as it was built. One that was cut short would end the process that loads it."""
    try:
        return target.with_name(_CHECKSUM_NAME).read_text() == _checksum(target)
    except FileNotFoundError:
        return False


def _build(package: Path, sources: list[Path], flags: list[str], target: Path) -> None:
    compiler = _compiler()
    started = time.monotonic()
    _say(f"building the ops for TensorFlow {tf.version.VERSION} (once; about a minute) ...")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        units = [Path(scratch) / f"unit_{number}.cc" for number in range(len(_units(sources)))]
        for unit, parts in zip(units, _units(sources), strict=True):
            unit.write_text("".join(f'#include "{part.resolve()}"\n' for part in parts))
        objects = [unit.with_suffix(".o") for unit in units]
        include = f"-I{package / 'include'}"
        strict = ["-Werror"] if os.environ.get("KVTOOLS_WERROR") else []
        with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            jobs = [
                pool.submit(_run, [compiler, *flags, *strict, include, "-c", str(source), "-o", str(out)])
                for source, out in zip(units, objects, strict=True)
            ]
            for number, job in enumerate(concurrent.futures.as_completed(jobs), 1):
                job.result()
                _say(f"  {number}/{len(jobs)} parts compiled")
        built = Path(scratch) / _LIBRARY_NAME
        libraries = [*tf.sysconfig.get_link_flags(), f"-L{package}", "-lkvtable"]
        _run([compiler, "-shared", "-o", str(built), *map(str, objects), *libraries])
        checksum = Path(scratch) / _CHECKSUM_NAME
        checksum.write_text(_checksum(built))
        built.replace(target)
        checksum.replace(target.with_name(_CHECKSUM_NAME))
    _say(f"built in {time.monotonic() - started:.0f} s: {target}")


def library_path() -> Path:
    """Path of the compiled ops; compiles them where the cache has none, or one that is not what was built.

    Safe when several processes start at once: one builds, the others wait, and say so.

    Raises:
      BuildError: no compiler, an unwritable cache, or a compile error (shown).
    """
    package = _package_dir()
    sources = sorted((package / "ops").glob("*.cc"))
    headers = sorted((package / "ops").glob("*.h")) + sorted((package / "include").rglob("*.h"))
    if not sources:
        raise BuildError(f"tfplugin: no op sources in {package / 'ops'}: reinstall kvtools.")
    flags = _compile_flags()
    folder = cache_dir() / _cache_key(sources, headers, flags)
    target = folder / _LIBRARY_NAME
    try:
        if _is_whole(target):
            return target
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not _is_whole(target):
                if target.exists():
                    _say(f"{target} is damaged")
                _build(package, sources, flags, target)
    except OSError as error:
        raise BuildError(
            f"tfplugin: cannot write the compiled ops to {folder} ({error.strerror or error}): "
            "set KVTOOLS_CACHE_DIR to a folder that can be written and has 10 MB free."
        ) from error
    return target


def load() -> ModuleType:
    """Loads the ops into TensorFlow and returns their Python wrappers."""
    path = library_path()
    # The ops name libkvtable.so by its soname only: bring it in first, from where the package is.
    ctypes.CDLL(str(_package_dir() / "libkvtable.so"))
    try:
        return tf.load_op_library(str(path))
    except tf.errors.NotFoundError as error:
        raise BuildError(
            f"tfplugin: {path} does not load into TensorFlow {tf.version.VERSION}: {error.message}. "
            f"Delete {path.parent} and import again to rebuild it."
        ) from error


@functools.cache
def has_gpu_tables() -> bool:
    """Whether tables can be in a GPU's memory: kvtools was built with CUDA (``-C cmake.define.KVTOOLS_CUDA=on``)."""
    function = ctypes.CDLL(str(library_path())).kvtools_has_gpu_tables
    function.restype = ctypes.c_bool
    return bool(function())
