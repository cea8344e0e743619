"""Snapshots that `kvtools serve` makes of what it is given, kept for its next start.

A snapshot's name says what it was made of: the files of the source with their sizes, times of change and numbers on
disk, and how they were opened. A source that has changed in any way gets another snapshot, and the one before is
removed. So there is one for each source, and of sources those that were served last. The folder may be deleted at any
time: what is being served from it stays mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvtools import __version__
from kvtools.cache_folder import cache_folder
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import OpenOptions, Progress
from kvtools.dialects.snapshot import NAME, SUFFIX
from kvtools.dialects.tfra_files import FOLDER
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, KvtoolsError, OutputError
from kvtools.migrate import write_tables
from kvtools.snapshot import Snapshot

_MOST_SNAPSHOTS = 16
_CLOCK_TICK = 0.02
"""Seconds between two times of a file system that differ for sure."""


def snapshot_of(
    checkpoint: Checkpoint,
    tables: Sequence[TableReader],
    *,
    options: OpenOptions,
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Snapshot:
    """Return an open snapshot of `tables` of `checkpoint`, made now unless there is one in the cache.

    Args:
        checkpoint: what was opened.
        tables: of it.
        options: how it was opened.
        cache: the folder; `snapshots` in `kvtools.cache_folder` if None. It is made if it is not there.
        progress: called as rows are written.

    Raises:
        OutputError: the folder cannot be written.
        CorruptFileError: the source is damaged.
        BadInputError: the source was changed while it was read.
    """
    folder = cache if cache is not None else cache_folder() / "snapshots"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"making a snapshot of '{checkpoint.path}' in '{folder}': {error.strerror or error}; name another --cache"
        ) from error
    opened = (options.dialect, options.key_dtype, options.value_dtype, options.dim)
    names = [table.schema.name for table in tables]
    if isinstance(checkpoint.path, str):  # a URL: nothing tells whether what is there has changed
        path = folder / f"{_digest(os.getpid(), time.time_ns())}{SUFFIX}"
        try:
            return _write(tables, path, progress)
        finally:
            path.unlink(missing_ok=True)
    source = _digest(checkpoint.path.absolute(), opened, names)
    with _lock(folder / f"{source}.lock"):
        files = _state_of(checkpoint.path)
        path = folder / f"{source}-{_digest(files, __version__)}{SUFFIX}"
        if path.exists():
            with contextlib.suppress(KvtoolsError, OSError):  # cut, or of another version: made again
                os.utime(path)
                return Snapshot(path)
        snapshot = _write(tables, path, progress)
        if _state_of(checkpoint.path) != files:
            path.unlink(missing_ok=True)
            raise BadInputError(
                f"reading '{checkpoint.path}': it was changed while it was read; start again when it is whole"
            )
        _remove_old(folder, source, path)
        return snapshot


def _remove_old(folder: Path, source: str, made: Path) -> None:
    """Remove the snapshots of what `source` was before, and those served longest ago; who serves one keeps it."""
    for old in folder.glob(f"{source}-*{SUFFIX}"):
        if old != made:
            old.unlink(missing_ok=True)
    served: list[tuple[float, Path]] = []
    for path in folder.glob(f"*-*{SUFFIX}"):
        with contextlib.suppress(OSError):
            served.append((path.stat().st_mtime, path))
    for _, path in sorted(served, reverse=True)[_MOST_SNAPSHOTS:]:
        path.unlink(missing_ok=True)
    kept = {path.name.partition("-")[0] for path in folder.glob(f"*-*{SUFFIX}")}
    for lock in folder.glob("*.lock"):
        # One that another process is waiting for, or holds while it makes its first snapshot, may go, too: at worst two
        # make the same snapshot, and the last one stays.
        if lock.stem not in kept:
            lock.unlink(missing_ok=True)


def _write(tables: Sequence[TableReader], path: Path, progress: Progress | None) -> Snapshot:
    write_tables(tables, path, NAME, options=WriteOptions(force=True), progress=progress)
    return Snapshot(path)


def _digest(*of: object) -> str:
    return hashlib.sha256(repr(of).encode()).hexdigest()[:24]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process at a time make a snapshot of a source: those that wait find it made."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _state_of(path: Path) -> list[tuple[str, int, int, int, int]]:
    """Return what tells the files of a checkpoint from any others: names, sizes, times of change, numbers on disk."""
    state, newest = _look(path), 0
    while True:
        newest = max((changed for _, _, changed, _, _ in state), default=0)
        # A file that is written to once more within a tick of the clock could look the same.
        wait = newest / 1e9 + _CLOCK_TICK - time.time()
        if not 0 < wait <= _CLOCK_TICK:
            return state
        time.sleep(wait)
        state = _look(path)


def _look(path: Path) -> list[tuple[str, int, int, int, int]]:
    state = []
    for file in _files_of(path):
        try:
            status = file.stat()
        except OSError as error:
            raise BadInputError(f"reading '{file}': {error.strerror or error}") from error
        state.append((str(file), status.st_size, status.st_ctime_ns, status.st_mtime_ns, status.st_ino))
    return state


def _files_of(path: Path) -> list[Path]:
    """Return the files that a checkpoint may be made of: all of a folder, all that begin with a prefix."""
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    if path.is_file():
        return [path]
    files = [file for file in path.parent.iterdir() if file.name.startswith(path.name) and file.is_file()]
    for folder in path.parent.glob(f"{FOLDER}*"):  # of a saver of TFRA, beside the checkpoint
        files += [file for file in folder.rglob("*") if file.is_file()]
    return sorted(files)
