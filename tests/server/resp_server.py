"""The Redis protocol's port, served by a thread of the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import uvloop

from kvtools.server.catalog import Catalog
from kvtools.server.observer import Observer
from kvtools.server.resp import RespServer, start
from kvtools.server.settings import Settings


@contextlib.contextmanager
def serving(catalog: Catalog, *, observer: Observer | None = None, **settings: object) -> Iterator[RespServer]:
    """A server on a free port while the block runs."""
    loop = uvloop.new_event_loop()  # as `kvtools serve` does
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    chosen = Settings(**{"resp_port": 0, **settings})  # type: ignore[arg-type]
    server = asyncio.run_coroutine_threadsafe(start(catalog, chosen, observer=observer), loop).result(30)
    try:
        yield server
    finally:
        try:
            asyncio.run_coroutine_threadsafe(server.close(), loop).result(30)
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
