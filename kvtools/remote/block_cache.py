"""The blocks of remote files that lie on this machine's disk: how many at most, and which go first.

A block that is held is never given back, so whoever reads within `RemoteFile.held` reads what the store has. All state
of blocks, of every file, is guarded by one lock, `LOCK`: what is done under it is arithmetic, and punching holes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from kvtools.byte_size import byte_size
from kvtools.errors import BadInputError

BLOCK = 1 << 16
"""Bytes of a block: what is fetched at least."""
REQUESTS = 8
"""How many ranges are asked for at once."""
LOCK = threading.RLock()

_LIMIT = 8 << 30
_SLACK = 256
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_VARIABLE = "KVTOOLS_REMOTE_CACHE"

_fallocate = ctypes.CDLL(None, use_errno=True).fallocate
_pool: ThreadPoolExecutor | None = None
_order: OrderedDict[tuple[Any, int], None] = OrderedDict()
_limit: int | None = None


class HasBlocks(Protocol):
    """A file whose blocks are counted here."""

    def give_back(self, first: int, last: int) -> None:
        """Take notice that blocks `first` to `last` are gone; `descriptor` is the file's."""
        ...

    def is_held(self, block: int) -> bool:
        """Tell whether a block may not go."""
        ...

    @property
    def descriptor(self) -> int:
        """The file on this machine."""
        ...


def pool() -> ThreadPoolExecutor:
    """Return the threads that fetch."""
    global _pool
    with LOCK:
        if _pool is None:
            _pool = ThreadPoolExecutor(REQUESTS, "kvtools-fetch")
        return _pool


def limit() -> int:
    """Return how many bytes of remote files may lie here: `KVTOOLS_REMOTE_CACHE`, else 8 GiB or half of what is free.

    Raises:
        UsageError: the variable is no size.
    """
    global _limit
    if _limit is None:
        said = os.environ.get(_VARIABLE)
        free = shutil.disk_usage(tempfile.gettempdir()).free
        _limit = byte_size(said, _VARIABLE) if said else min(_LIMIT, free // 2)
    return _limit


def came(file: HasBlocks, blocks: Iterable[int]) -> None:
    """Take notice of blocks that came, and give others back where that makes too many; call it under `LOCK`."""
    for block in blocks:
        _order[file, block] = None
    most = max(1, limit() // BLOCK)
    if len(_order) > most:
        _evict(len(_order) - most + min(_SLACK, most // 8))


def used(file: HasBlocks, first: int, last: int) -> None:
    """Take notice that blocks are read: they go last; call it under `LOCK`."""
    for block in range(first, last + 1):
        if (file, block) in _order:
            _order.move_to_end((file, block))


def drop(file: HasBlocks, first: int, last: int) -> None:
    """Count these blocks no longer: they are kept for ever, or gone with their file; call it under `LOCK`."""
    for block in range(first, last + 1):
        _order.pop((file, block), None)


def held_bytes() -> int:
    """Return how many bytes of remote files lie here now, but for what is kept."""
    with LOCK:
        return len(_order) * BLOCK


def _evict(count: int) -> None:
    going = []
    for file, block in _order:
        if not file.is_held(block):
            going.append((file, block))
            if len(going) == count:
                break
    by_file: dict[Any, list[int]] = {}
    for file, block in going:
        by_file.setdefault(file, []).append(block)
    for file, blocks in by_file.items():
        blocks.sort()
        first = 0
        for place in range(1, len(blocks) + 1):
            if place == len(blocks) or blocks[place] != blocks[place - 1] + 1:
                run = blocks[first], blocks[place - 1]
                _punch(file.descriptor, run[0] * BLOCK, (run[1] - run[0] + 1) * BLOCK)
                file.give_back(*run)
                drop(file, *run)
                first = place


def _punch(descriptor: int, offset: int, size: int) -> None:
    if _fallocate(descriptor, _KEEP_SIZE | _PUNCH_HOLE, ctypes.c_int64(offset), ctypes.c_int64(size)) != 0:
        number = ctypes.get_errno()
        told = "its file system gives no room back" if number == errno.EOPNOTSUPP else os.strerror(number)
        raise BadInputError(
            f"making room in '{tempfile.gettempdir()}' for a remote file: {told}; name another folder by TMPDIR, or"
            f" let more of the file lie there by {_VARIABLE}"
        )
