"""A file that readers open when they want its bytes, and again later: it has to be the one that they began with."""

from __future__ import annotations

import os
from pathlib import Path

from kvtools.errors import BadInputError
from kvtools.remote.stored import stored


class SameFile:
    """A file as it is now, to be opened later: nobody takes rows of another file for those of this one.

    Its size and the time at which it was written tell. Numbers of inodes do not: there are file systems that give
    others after a while. A remote file tells by itself.

    Args:
        path: the file.

    Raises:
        OSError: there is no such file.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "keys"
        >>> _ = path.write_bytes(b"old")
        >>> file = SameFile(path)
        >>> os.read(file.open(), 3)
        b'old'
        >>> _ = path.write_bytes(b"another")
        >>> file.open()
        Traceback (most recent call last):
        kvtools.errors.BadInputError: reading '...keys': it was changed since it was opened; open it again
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._remote = stored(path).remote
        status = path.stat()
        self.size = status.st_size
        self._written = status.st_mtime_ns

    def open(self) -> int:
        """Return a descriptor to read from; raises `BadInputError` where it is another by now, or there is none."""
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise BadInputError(f"opening '{self.path}': {error.strerror or error}") from error
        try:
            self._check(os.fstat(descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def check(self, descriptor: int | None = None) -> None:
        """Raise `BadInputError` where its path leads to another file by now, or the open one was written over.

        For whoever has just opened its path otherwise, or reads bytes of `descriptor` that no checksum tells of.
        """
        try:
            status = self.path.stat() if descriptor is None else os.fstat(descriptor)
        except OSError as error:
            raise BadInputError(f"reading '{self.path}': {error.strerror or error}") from error
        self._check(status)

    def _check(self, status: os.stat_result) -> None:
        if not self._remote and (status.st_size, status.st_mtime_ns) != (self.size, self._written):
            raise BadInputError(f"reading '{self.path}': it was changed since it was opened; open it again")
