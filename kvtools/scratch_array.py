"""Arrays and bytes in temporary files, for what does not fit in memory; without room for them, an error in words."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.errors import ScratchError


def scratch_array(rows: int, dtype: npt.DTypeLike, *, prefix: str) -> npt.NDArray[Any]:
    """Return zeros [rows] in a temporary file that nobody else sees.

    All of its room is taken at once: a page of a mapped file that finds none later kills the process with SIGBUS.

    Raises:
        ScratchError: the disk has no room for it.

    >>> scratch_array(3, np.int64, prefix="kvtools-rows-").tolist()
    [0, 0, 0]
    """
    size = rows * np.dtype(dtype).itemsize
    with scratch_room(), tempfile.NamedTemporaryFile(prefix=prefix) as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)
        return np.memmap(file.name, dtype, "r+", shape=(rows,))


@contextlib.contextmanager
def scratch_room() -> Iterator[None]:
    """Within it, what the system refuses of temporary files is an error that names their folder and what to do.

    >>> with scratch_room():
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
        ...
    kvtools.errors.ScratchError: writing temporary files in ...: No space left on device; make room there, ...
    """
    try:
        yield
    except OSError as error:
        try:
            folder = f"'{tempfile.gettempdir()}'"
        except OSError:
            folder = "a folder for them"
        raise ScratchError(
            f"writing temporary files in {folder}: {error.strerror or error}; make room there, name another folder by"
            " TMPDIR, or say a larger --memory, so that less goes to them"
        ) from error
