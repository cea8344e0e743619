"""Snapshots that `kvtools serve` makes of what it is given, kept for its next start.

A snapshot's name says what it was made of: the files of the source with their sizes, times of change and numbers on
disk, and how they were opened. A source that has changed in any way gets another snapshot, and the one before is
removed. So there is one for each source, and of sources those that were served last: 16 at most, in half of the space
that the disk would have without them. Whoever serves one holds a lock on it, and it stays. The folder may be deleted at
any time: what is being served from it stays mapped.

Where training would begin all rows with the same one, that is the snapshot's row for missing keys (`default_row`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
import weakref
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

log = logging.getLogger("kvtools.serve")

_MOST_SNAPSHOTS = 16
_CONTENTS = 2
"""Rises when something else is written from the same source, so that those of before are made again."""
_BYTES_OF_KEY = 9  # with its share of the directory
_TRIES = 3
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
    folder = folder_of(cache)
    opened = (options.dialect, options.key_dtype, options.value_dtype, options.dim)
    names = [table.schema.name for table in tables]
    if isinstance(checkpoint.path, str):  # a URL: nothing tells whether what is there has changed
        path = folder / f"{_digest(os.getpid(), time.time_ns())}{SUFFIX}"
        make_room(folder, keep=path, needed=_bytes_of(tables))
        try:
            return _write(checkpoint, tables, path, progress, stays=False)
        finally:
            path.unlink(missing_ok=True)
    source = _digest(Path(os.path.normpath(checkpoint.path.absolute())), opened, names)
    with _lock(folder / f"{source}.lock") as lock:
        files = _state_of(checkpoint.path)
        path = folder / f"{source}-{_digest(files, __version__, _CONTENTS)}{SUFFIX}"
        if path.exists():
            with contextlib.suppress(KvtoolsError, OSError):  # cut, or of another version: made again
                os.utime(lock)  # not the snapshot: whoever has it mapped takes that for writing
                return in_use(Snapshot(path))
        make_room(folder, keep=path, needed=_bytes_of(tables))
        snapshot = in_use(_write(checkpoint, tables, path, progress))
        if _state_of(checkpoint.path) != files:
            path.unlink(missing_ok=True)
            raise BadInputError(
                f"reading '{checkpoint.path}': it was changed while it was read; start again when it is whole"
            )
        for old in folder.glob(f"{source}-*{SUFFIX}"):  # of what it was before: nobody will ask for it again
            if old != path:
                old.unlink(missing_ok=True)
        make_room(folder, keep=path, needed=0)
        _remove_locks(folder)
        return snapshot


def folder_of(cache: Path | None) -> Path:
    """Return the folder of snapshots that `--cache` names, or the user's; it is made if it is not there.

    Raises `OutputError` if it cannot be.
    """
    folder = cache if cache is not None else cache_folder() / "snapshots"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error
    return folder


def make_room(folder: Path, *, keep: Path, needed: int) -> None:
    """Remove the snapshots served longest ago, until those that are left and `needed` bytes more are few enough.

    Neither `keep` is removed nor one that is in use, as far as its file system has locks to tell.
    """
    served: list[tuple[float, int, Path]] = []
    for path in folder.glob(f"*-*{SUFFIX}"):
        with contextlib.suppress(OSError):
            status = path.stat()
            served.append((_last_served(path, status), status.st_blocks * 512, path))
    taken = sum(size for _, size, _ in served)
    most = (shutil.disk_usage(folder).free + taken) // 2
    left = len(served) + (needed > 0)
    for _, size, path in sorted(served):
        if left <= _MOST_SNAPSHOTS and taken + needed <= most:
            return
        if path != keep and not _is_in_use(path):
            path.unlink(missing_ok=True)
            log.info("removed the snapshot '%s' (%s bytes), which was not served for longest", path, f"{size:,}")
            taken, left = taken - size, left - 1


def _last_served(path: Path, status: os.stat_result) -> float:
    """Return when a snapshot was made or last opened from the cache, in s since the epoch."""
    try:
        return max(status.st_mtime, path.with_name(f"{path.name.partition('-')[0]}.lock").stat().st_mtime)
    except OSError:
        return status.st_mtime


def _remove_locks(folder: Path) -> None:
    kept = {path.name.partition("-")[0] for path in folder.glob(f"*-*{SUFFIX}")}
    for lock in folder.glob("*.lock"):
        # One that another process is waiting for, or holds while it makes its first snapshot, may go, too: at worst two
        # make the same snapshot, and the last one stays.
        if lock.stem not in kept:
            lock.unlink(missing_ok=True)


def in_use(snapshot: Snapshot) -> Snapshot:
    """Hold a shared lock on the file of `snapshot` for as long as it lives, where that can be had."""
    with contextlib.suppress(OSError):
        lock = os.open(snapshot.path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(snapshot, os.close, lock)
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return snapshot


def _is_in_use(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks here
        return False
    finally:
        os.close(lock)
    return False


def _bytes_of(tables: Sequence[TableReader]) -> int:
    """Return about how many bytes a snapshot of `tables` takes."""
    return sum(table.schema.rows * (table.schema.dim * table.value_dtype.itemsize + _BYTES_OF_KEY) for table in tables)


def _write(
    checkpoint: Checkpoint, tables: Sequence[TableReader], path: Path, progress: Progress | None, *, stays: bool = True
) -> Snapshot:
    started = time.monotonic()
    snapshot = _written(tables, path, progress, _TRIES)
    seconds = time.monotonic() - started
    where = f"'{path}'" if stays else f"a file without a name in '{path.parent}'"
    size = f"{snapshot.bytes:,}"
    log.info("made a snapshot of '%s' in %.1f s: %s (%s bytes)", checkpoint.path, seconds, where, size)
    return snapshot


def _written(tables: Sequence[TableReader], path: Path, progress: Progress | None, tries: int) -> Snapshot:
    write_tables(tables, path, NAME, options=WriteOptions(force=True), progress=progress)
    try:
        return Snapshot(path)
    except BadInputError:
        # Until it is open nothing says that it is in use: another process that needs room may have removed it.
        if tries == 1 or path.exists():
            raise
        return _written(tables, path, progress, tries - 1)


def _digest(*of: object) -> str:
    return hashlib.sha256(repr(of).encode()).hexdigest()[:24]


def _unusable(folder: Path, error: OSError) -> OutputError:
    return OutputError(f"making a snapshot in '{folder}': {error.strerror or error}; name another --cache")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[int]:
    """Let one process at a time make a snapshot of a source: those that wait find it made. Gives the descriptor."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _unusable(path.parent, error) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:  # some file systems have no locks
            raise _unusable(path.parent, error) from error
        yield lock
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
    base = path if path.is_dir() else path.parent  # names are told from here: `path` may be spelled in many ways
    for file in _files_of(path):
        try:
            status = file.stat()
        except OSError as error:
            raise BadInputError(f"reading '{file}': {error.strerror or error}") from error
        name = str(file.relative_to(base))
        state.append((name, status.st_size, status.st_ctime_ns, status.st_mtime_ns, status.st_ino))
    return state


def _files_of(path: Path) -> list[Path]:
    """Return the files that a checkpoint may be made of: all of a folder, all that begin with a prefix."""
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.is_file())
    if path.is_file():
        return [path]
    # Not those of ckpt-12 and of the increment ckpt-1.delta, where ckpt-1 is meant.
    others = re.compile(re.escape(path.name) + r"(\d|\.delta\.)") if path.name[-1:].isdigit() else None
    files = [file for file in path.parent.iterdir() if file.name.startswith(path.name) and file.is_file()]
    files = [file for file in files if others is None or not others.match(file.name)]
    for folder in path.parent.glob(f"{FOLDER}*"):  # of a saver of TFRA, beside the checkpoint
        files += [file for file in folder.rglob("*") if file.is_file()]
    return sorted(files)
