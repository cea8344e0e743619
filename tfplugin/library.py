"""Finds the TensorFlow ops that fit the installed TensorFlow, or compiles them, once, and loads them.

A wheel brings ready ops for each TensorFlow that it knows; `kvtools.op_library` says which fit. Where none does, the
sources that come with the package (``kvtools/ops``) are compiled; the table engine is the installed ``libkvtable.so``.
The result is cached by TensorFlow's version, compiler flags and a hash of the sources, so that one package serves every
TensorFlow.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import tensorflow as tf

from kvtools.cache_folder import others_cache_folders
from kvtools.op_compiler import BuildError, compile_ops
from kvtools.op_library import (
    FIRST_TENSORFLOW,
    OpLibrary,
    TensorFlowBuild,
    compile_seconds,
    compiled_op_library,
    find_op_library,
    is_whole,
    package_folder,
    told_duration,
    unsupported,
)

__all__ = ["BuildError", "cache_dir", "has_gpu_tables", "library_path", "load"]


def _package_dir() -> Path:
    package = package_folder()
    if package is None:
        import kvtools

        raise BuildError(
            f"tfplugin: no libkvtable.so in {list(kvtools.__path__)}: "
            "kvtools is imported from a source tree; install it with pip and run outside the tree."
        )
    return package


def cache_dir() -> Path:
    """Where compiled ops are kept: ``$KVTOOLS_CACHE_DIR``, else the virtual environment, else ``~/.cache/kvtools``."""
    from kvtools.cache_folder import cache_folder

    return cache_folder()


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


def _build(package: Path, build: TensorFlowBuild, found: OpLibrary) -> None:
    started = time.monotonic()
    _say(
        f"building the ops for TensorFlow {build.version} (once; {told_duration(compile_seconds())}):"
        f" {found.why_not_ready} ..."
    )
    compile_ops(package, build, found.path, _say)
    _say(f"built in {time.monotonic() - started:.0f} s: {found.path}")


def _check_runs(folder: Path) -> None:
    """Raises where no library can be loaded from, before one is compiled for minutes."""
    there = next(place for place in (folder, *folder.parents) if os.path.exists(place))  # noqa: PTH110
    if os.statvfs(there).f_flag & os.ST_NOEXEC:
        raise BuildError(
            f"tfplugin: {folder} is in a file system that is mounted noexec, from which the compiled ops cannot be "
            "loaded: set KVTOOLS_CACHE_DIR to a folder in another."
        )


def _compiled(package: Path, build: TensorFlowBuild, found: OpLibrary) -> Path:
    """Ops of the cache; compiles them where it has none, or one that is not what was built."""
    folder = found.path.parent
    _check_runs(folder)
    if found.kind == "compiled":
        return found.path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not is_whole(found.path):
                if found.path.exists():
                    _say(f"{found.path} is damaged")
                _build(package, build, found)
    except OSError as error:
        raise BuildError(
            f"tfplugin: cannot write the compiled ops to {folder} ({error.strerror or error}): "
            "set KVTOOLS_CACHE_DIR to a folder that can be written and has 10 MB free."
        ) from error
    return found.path


def library_path() -> Path:
    """Path of the ops: of ready ones that fit this TensorFlow, else of compiled ones, which are built if need be.

    Safe when several processes start at once: one builds, the others wait, and say so.

    Raises:
      BuildError: a TensorFlow that is too old, no compiler, an unwritable cache, or a compile error (shown).
    """
    package = _package_dir()
    build = TensorFlowBuild.of(tf)
    found = find_op_library(package, cache_dir(), build, others_cache_folders())
    if found.kind == "ready":
        return found.path
    if build.minor < FIRST_TENSORFLOW:
        raise BuildError(f"tfplugin: {unsupported(build)}.")
    if found.kind == "missing" and (said := unsupported(build)):
        _say(f"{said}; trying it")
    return _compiled(package, build, found)


@functools.cache
def _loaded() -> tuple[ModuleType, Path]:
    package = _package_dir()
    path = library_path()
    # The ops name libkvtable.so by its soname only: bring it in first, from where the package is.
    ctypes.CDLL(str(package / "libkvtable.so"))
    try:
        return tf.load_op_library(str(path)), path
    except tf.errors.NotFoundError as error:
        why = f"{path} does not load into TensorFlow {tf.version.VERSION}: {error.message}"
        if path.is_relative_to(cache_dir()):
            raise BuildError(f"tfplugin: {why}. Delete {path.parent} and import again to rebuild it.") from error
        _say(why)
        build = TensorFlowBuild.of(tf)
        why = "the ready ones do not load"
        path = _compiled(package, build, compiled_op_library(package, cache_dir(), build, why, others_cache_folders()))
        return tf.load_op_library(str(path)), path


def load() -> ModuleType:
    """Loads the ops into TensorFlow and returns their Python wrappers.

    Ready ones that this TensorFlow refuses are named, and others are compiled in their place.

    Raises:
      BuildError: see `library_path`; or what was compiled does not load.
    """
    return _loaded()[0]


@functools.cache
def has_gpu_tables() -> bool:
    """Whether tables can be in a GPU's memory: kvtools was built with CUDA (``-C cmake.define.KVTOOLS_CUDA=on``)."""
    function = ctypes.CDLL(str(_loaded()[1])).kvtools_has_gpu_tables
    function.restype = ctypes.c_bool
    return bool(function())
