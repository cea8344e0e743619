"""What readers ask for bytes before they touch them: nothing for a file of this machine, a fetch for a remote one."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

_BUFFER = 1 << 14  # less than a block: who reads a header fetches no more

Places = npt.NDArray[Any]


class Stored(Protocol):
    """A file whose bytes are here while they are held."""

    remote: bool

    def held(
        self, start: int = 0, stop: int | None = None, upto: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Have bytes `start` to `stop` (the end if None) on this machine until the block ends.

        Who will go on to read up to `upto` says so: what follows is then fetched while this is worked on.
        """
        ...

    def keep(self, start: int = 0, stop: int | None = None) -> None:
        """Have these bytes on this machine until the process ends, for a map that outlives every block."""
        ...

    def groups(self, offsets: Places, size: int) -> Iterator[tuple[Places | slice, Any]]:
        """Yield which of the runs of `size` bytes at `offsets` to read together, and what holds them."""
        ...


class _Here:
    """A file of this machine."""

    remote = False

    def __init__(self) -> None:
        self._nothing = contextlib.nullcontext()

    def held(
        self, start: int = 0, stop: int | None = None, upto: int | None = None
    ) -> contextlib.AbstractContextManager[None]:
        return self._nothing

    def keep(self, start: int = 0, stop: int | None = None) -> None:
        pass

    def groups(self, offsets: Places, size: int) -> Iterator[tuple[Places | slice, Any]]:
        yield slice(None), self._nothing


HERE = _Here()
_remote_files: dict[str, Any] = {}
"""The remote files by their local paths."""


def stored(path: str | os.PathLike[str]) -> Stored:
    """Return what gives the bytes of a file; whoever keeps a descriptor or a map of it keeps this beside it.

    >>> with stored("/etc/hosts").held(0, 10):
    ...     pass
    """
    file: Stored = _remote_files.get(os.fspath(path), HERE) if _remote_files else HERE
    return file


def register(path: str | os.PathLike[str], file: Stored) -> None:
    """Have `file` give the bytes of a path from now on."""
    _remote_files[os.fspath(path)] = file


def forget(path: str | os.PathLike[str], *, below: bool = False) -> None:
    """Have nothing give the bytes of a path, nor `below` it: who reads on in a remote file that was there gets an
    error."""
    start = os.fspath(path)
    for name in [start, *(name for name in _remote_files if below and name.startswith(f"{start}/"))]:
        gone = _remote_files.pop(name, None)
        if gone is not None:
            gone.become_stale()


def keep_below(path: str | os.PathLike[str]) -> None:
    """Have all of a file, of the files of a folder, or of a checkpoint's prefix, here until the process ends."""
    start = os.fspath(path)
    for name, file in list(_remote_files.items()):
        if name == start or name.startswith((f"{start}/", f"{start}.")):
            file.keep()


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Return all bytes of a file; raises `OSError` as `Path.read_bytes` does."""
    with stored(path).held():
        return Path(path).read_bytes()


def open_binary(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading; what a remote one has is fetched as it is read. It has no `fileno` then."""
    file = stored(path)
    if not file.remote:
        return Path(path).open("rb")
    return io.BufferedReader(_Reader(Path(path), file), _BUFFER)


def for_library(path: str | os.PathLike[str]) -> Any:
    """Return what a library in C is to open: the path itself, or, of a remote file, a Python file."""
    return open_binary(path) if stored(path).remote else path


def take_runs(file: Stored, data: Any, offsets: Places, size: int) -> Places:
    """Copy the runs of `size` bytes at int64 `offsets` [n] of a mapped file `data`; void<size> [n]."""
    # Every byte begins a (overlapping) record of this view, so one fancy index gathers rows, aligned or not.
    records: Places = np.ndarray((max(len(data) - size + 1, 0),), f"V{size}", buffer=data, strides=(1,))
    if not file.remote:
        return records[offsets]
    taken = np.empty(len(offsets), f"V{size}")
    for which, holding in file.groups(offsets, size):
        with holding:
            taken[which] = records[offsets[which]]
    return taken


class _Reader(io.RawIOBase):
    """A remote file as Python's raw files are."""

    def __init__(self, path: Path, file: Stored) -> None:
        self.name = str(path)  # what zipfile calls the archive
        self.mode = "rb"
        self._file = file
        self._raw = path.open("rb", buffering=0)
        self._size = os.fstat(self._raw.fileno()).st_size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def readinto(self, buffer: Any) -> int:
        at = self._raw.tell()
        stop = min(self._size, at + memoryview(buffer).nbytes)
        if stop <= at:
            return 0
        with self._file.held(at, stop):
            return self._raw.readinto(memoryview(buffer).cast("B")[: stop - at]) or 0

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()
