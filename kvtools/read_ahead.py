"""Read the next chunks in a thread while the last one is worked on."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


def read_ahead(items: Iterator[T], most: int = 4) -> Iterator[T]:
    """Yield what an iterator yields, in its order; a thread asks for the next ones, up to `most`, meanwhile.

    That is faster where both sides leave the interpreter to others most of the time, as reading, checksums and writing
    do. The first two are read without a thread: there may be no more. Who stops early waits for the item in hand.

    Raises:
        Exception: what the iterator raised, when all before that has been yielded.

    >>> list(read_ahead(iter(range(3))))
    [0, 1, 2]
    """
    yield from itertools.islice(items, 2)
    ready: queue.Queue[tuple[bool, object]] = queue.Queue(most)
    stop = threading.Event()

    def read() -> None:
        try:
            for item in items:
                ready.put((True, item))
                if stop.is_set():
                    return
            ready.put((False, None))
        except BaseException as error:
            ready.put((False, error))

    thread = threading.Thread(target=read, name="kvtools-read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            there, got = ready.get()
            if not there:
                if isinstance(got, BaseException):
                    raise got
                return
            yield got  # type: ignore[misc]
    finally:
        stop.set()
        while thread.is_alive():
            with contextlib.suppress(queue.Empty):
                ready.get(timeout=0.05)
        thread.join()
