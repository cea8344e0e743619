"""A remote file: a sparse one on this machine, whose blocks are fetched before a reader touches them."""

from __future__ import annotations

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.errors import BadInputError
from kvtools.remote import block_cache
from kvtools.remote.block_cache import BLOCK, LOCK
from kvtools.remote.ranges import read_range
from kvtools.remote.store import Entry, Store
from kvtools.remote.stored import Places

_RUN = 128
"""Blocks of one request that somebody waits for, at most: 8 MiB."""
_LONG_RUN = 512
"""Blocks of one request ahead of who reads on, where the bytes are written as they come: 32 MiB."""
_AHEAD = 4096
"""Blocks that are fetched ahead of who reads on: 256 MiB."""
_STREAMS = 32
_GATHERED_AT_ONCE = 1024
"""Blocks that single rows are taken from at once."""
_ABSENT, _COMING, _HERE = 0, 1, 2


class RemoteFile:
    """One file of a store, and the file of the same size that stands for it.

    A block is absent, coming (a request for it is under way) or here. `held` waits until all blocks of a range are
    here, and counts them as held until it ends; blocks that nobody holds may be given back. Where the file is replaced
    by another one in the store, this one gives an error from then on: rows of two files are never mixed.
    """

    remote = True

    def __init__(self, store: Store, entry: Entry, path: Path, shown: str) -> None:
        self.entry = entry
        self.path = path
        self.shown = shown
        self._store = store
        self._size = entry.size
        self._long_run = _LONG_RUN if store.scheme in ("s3", "s3a") else _RUN
        self._blocks = -(-entry.size // BLOCK)
        self._state = bytearray()  # made when a byte is asked for
        self._coming: dict[int, Future[None]] = {}
        self._holds: dict[int, int] = {}
        self._kept: set[int] = set()
        self._streams: OrderedDict[int, int] = OrderedDict()
        self._file = -1
        self._stale = False

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # which is gone when the process ends
        if self._file >= 0:
            close(self._file)

    @contextlib.contextmanager
    def held(self, start: int = 0, stop: int | None = None, upto: int | None = None) -> Iterator[None]:
        """Have bytes here until the block ends; see `Stored.held`.

        Raises:
            BadInputError: the store does not give them, or has another file there by now.
        """
        stop = self._size if stop is None else min(stop, self._size)
        if start >= stop:
            yield
            return
        first, last = start // BLOCK, (stop - 1) // BLOCK
        self._hold(first, last)
        try:
            self._have(first, last, upto)
            yield
        finally:
            self._let_go(first, last)

    def keep(self, start: int = 0, stop: int | None = None) -> None:
        """Have bytes here until the process ends; see `Stored.keep`."""
        stop = self._size if stop is None else min(stop, self._size)
        first, last = start // BLOCK, (stop - 1) // BLOCK
        with LOCK:
            self._kept.update(range(first, last + 1))
        for begin in range(first, last + 1, _AHEAD):
            self._have(begin, min(last, begin + _AHEAD - 1), stop)
        with LOCK:
            block_cache.drop(self, first, last)

    def groups(self, offsets: Places, size: int) -> Iterator[tuple[Places, Any]]:
        """Yield which runs of `size` bytes to read together, in the order in which they lie; see `Stored.groups`."""
        order = np.argsort(offsets, kind="stable")
        first = offsets[order] // BLOCK
        last = (offsets[order] + max(size - 1, 0)) // BLOCK
        # How many blocks the runs up to each one touch, as they are counted one after the other.
        touched = np.cumsum(np.maximum(last - np.maximum(np.concatenate([[-1], last[:-1]]), first - 1), 0))
        begin = 0
        while begin < len(order):
            done = touched[begin - 1] if begin else 0
            end = max(begin + 1, int(np.searchsorted(touched, done + _GATHERED_AT_ONCE, side="right")))
            yield order[begin:end], self._held_runs(first[begin:end], last[begin:end])
            begin = end

    def become_stale(self) -> None:
        """Give nothing any more: the store has another file there."""
        with LOCK:
            self._stale = True
            block_cache.drop(self, 0, self._blocks - 1) if self._state else None

    def give_back(self, first: int, last: int) -> None:
        """Take notice that blocks are gone; see `HasBlocks`."""
        self._state[first : last + 1] = bytes(last - first + 1)

    def is_held(self, block: int) -> bool:
        """Tell whether a block may not go; see `HasBlocks`."""
        return block in self._holds or block in self._kept

    @property
    def descriptor(self) -> int:
        """The file on this machine."""
        with LOCK:
            if self._file < 0:
                self._file = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
            return self._file

    @contextlib.contextmanager
    def _held_runs(self, first: Places, last: Places) -> Iterator[None]:
        longer = [np.arange(f, t) for f, t in zip(first, last, strict=True) if t - f > 1]
        blocks = np.unique(np.concatenate([first, last, *longer]))
        runs = [(int(run[0]), int(run[-1])) for run in np.split(blocks, np.flatnonzero(np.diff(blocks) != 1) + 1)]
        with contextlib.ExitStack() as holding:
            for run in runs:
                self._hold(*run)
                holding.callback(self._let_go, *run)
            # All are asked for before the first is waited for.
            waiting = [future for run in runs for future in self._ask(*run, (run[1] + 1) * BLOCK)]
            for future in waiting:
                future.result()
            yield

    def _hold(self, first: int, last: int) -> None:
        with LOCK:
            for block in range(first, last + 1):
                self._holds[block] = self._holds.get(block, 0) + 1

    def _let_go(self, first: int, last: int) -> None:
        with LOCK:
            for block in range(first, last + 1):
                count = self._holds[block] - 1
                if count:
                    self._holds[block] = count
                else:
                    del self._holds[block]

    def _have(self, first: int, last: int, upto: int | None) -> None:
        """Wait until blocks are here, which are held or kept, so that they stay."""
        for future in self._ask(first, last, upto):
            future.result()

    def _ask(self, first: int, last: int, upto: int | None) -> list[Future[None]]:
        """Ask for the blocks that are absent, and for what is likely to come next; return what is to be waited for."""
        with LOCK:
            if self._stale:
                raise BadInputError(f"reading '{self.shown}': it was replaced while it was read; open it again")
            if not self._state:
                self._state = bytearray(self._blocks)
            block_cache.used(self, first, last)
            ahead = max(1, min(_AHEAD, block_cache.limit() // BLOCK // 16))
            if upto is not None:
                final = (min(upto, self._size) - 1) // BLOCK
                end = min(final, last + ahead)
            else:
                final = self._blocks - 1
                end = min(final, last + self._stream(first, last, ahead))
            if self._state.count(_HERE, first, last + 1) < last + 1 - first:
                self._request(first, last, end)
            if end > last:
                self._request_ahead(last + 1, end, final)
            waiting = {id(f): f for b in range(first, last + 1) if (f := self._coming.get(b)) is not None}
            return list(waiting.values())

    def _stream(self, first: int, last: int, most: int) -> int:
        """Return how many blocks to fetch ahead: more and more for whoever reads on and on from where it stood."""
        ahead = 0
        expected = next((block for block in (first, last) if block in self._streams), None)
        if expected is not None:
            ahead = min(most, max(4, self._streams.pop(expected) * 4))
        self._streams.setdefault(last + 1, ahead)  # a read within a block that it knows changes nothing
        while len(self._streams) > _STREAMS:
            self._streams.popitem(last=False)
        return ahead

    def _request(self, first: int, last: int, end: int) -> None:
        """Ask for what is absent of `first` to `last`, and in the last request for what follows up to `end`."""
        block = first
        while block <= last:
            if self._state[block] == _ABSENT:
                block = self._submit(block, end, _RUN)
            block += 1

    def _request_ahead(self, first: int, end: int, final: int) -> None:
        """Ask for what follows up to `end`: in no small requests for the small steps that a reader takes."""
        block, least = first, min(self._long_run // 2, end + 1 - first)
        while (block := self._state.find(_ABSENT, block, end + 1)) >= 0:
            here = self._state.find(_HERE, block, end + 1)
            coming = self._state.find(_COMING, block, end + 1)
            stop = min([place for place in (here, coming) if place >= 0], default=end + 1) - 1
            if stop == end < final and stop + 1 - block < least:
                return
            block = self._submit(block, stop, self._long_run) + 1

    def _submit(self, first: int, end: int, most: int) -> int:
        """Ask for absent blocks from `first` on, up to `end` and `most` in one request; return the last one."""
        last = first
        while last < end and last + 1 - first < most and self._state[last + 1] == _ABSENT:
            last += 1
        self._state[first : last + 1] = bytes([_COMING]) * (last + 1 - first)
        future = block_cache.pool().submit(self._fetch, first, last)
        self._coming.update(dict.fromkeys(range(first, last + 1), future))
        return last

    def _fetch(self, first: int, last: int) -> None:
        start, stop = first * BLOCK, min((last + 1) * BLOCK, self._size)
        came = False
        try:
            file = self.descriptor

            def write(offset: int, data: Any) -> None:
                view = memoryview(data)
                while view:
                    done = os.pwrite(file, view, offset)
                    view, offset = view[done:], offset + done

            read_range(self._store, self.entry.name, self.shown, start, stop, self._size, self.entry.identity, write)
            came = True
        finally:
            with LOCK:
                for block in range(first, last + 1):
                    self._state[block] = _HERE if came else _ABSENT
                    del self._coming[block]
                if came and not self._stale:
                    block_cache.came(self, [block for block in range(first, last + 1) if block not in self._kept])
