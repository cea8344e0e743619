"""Who may write to a chain: one manager at a time, which holds a lock on a file beside the members."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import os
import socket
import weakref
from pathlib import Path

_NOT_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class WriterLock:
    """A lock on a chain. Who lets go of it, is collected, or ends in whatever way, holds it no longer.

    Where the file system has no locks nothing is held.

    Args:
      folder, name: of the chain.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._path = folder / f".{name}.writer"
        self._held: weakref.finalize | None = None
        self._file = -1

    def hold(self) -> None:
        """Takes the lock, unless it is held already.

        Raises:
          BlockingIOError: another one holds it; says which process of which machine.
          OSError: the disk refuses.
        """
        if self._held is not None:
            if self._is_there():
                return
            self.release()  # the folder was removed, or replaced, meanwhile
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _locked(file):
                holder = os.pread(file, 1000, 0).decode(errors="replace").strip()
                if holder != _this_process():
                    raise BlockingIOError(errno.EWOULDBLOCK, holder or "a process that did not say its name")
                gc.collect()  # a manager that nobody has any longer, in a cycle
                if not _locked(file):
                    raise BlockingIOError(errno.EWOULDBLOCK, f"another manager of this process ({holder})")
        except BlockingIOError:
            os.close(file)
            raise
        except OSError as error:
            os.close(file)
            if error.errno in _NOT_HERE:
                return
            raise
        with contextlib.suppress(OSError):  # a full disk: nobody learns the name then
            os.ftruncate(file, 0)
            os.pwrite(file, f"{_this_process()}\n".encode(), 0)
        self._file = file
        self._held = weakref.finalize(self, _unlock, file, os.getpid())
        self._held.atexit = False

    def release(self) -> None:
        """Lets go of it."""
        if self._held is not None:
            self._held()
            self._held = None

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), self._path.stat())
        except OSError:
            return False


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _locked(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(file: int, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork of it, which shares the lock
        fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)
