"""The FastAPI application, made in the background once the server listens.

Importing FastAPI and making all routes takes several times as long as mapping a model. Lookups do not need it
(`http_protocol.py`), and neither do health checks, which are answered here. Any other request waits until it is there.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import Future
from threading import Thread
from typing import Any

from kvtools.server.catalog import Catalog
from kvtools.server.health import check_in_json

_AGAIN = 0.1  # s
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class LateApp:
    """An ASGI application that answers health checks from `catalog`, and the rest by what `make` returns.

    `make` is called in a thread of its own by `begin`. What it raises, every request that needs it raises.
    """

    def __init__(self, catalog: Catalog, make: Callable[[], App]) -> None:
        self._catalog = catalog
        self._make = make
        self._made: Future[App] = Future()

    def begin(self) -> None:
        """Make the application, in the background."""
        Thread(target=self._run, name="application", daemon=True).start()

    def _run(self) -> None:
        try:
            self._made.set_result(self._make_in_time())
        except BaseException as error:
            self._made.set_exception(error)

    def _make_in_time(self) -> App:
        while True:
            try:
                return self._make()
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
            time.sleep(_AGAIN)  # connections have all descriptors just now; modules are files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            answer = check_in_json(self._catalog, scope["path"])
            if answer is not None:
                status, body = answer
                headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
                await send({"type": "http.response.start", "status": status, "headers": headers})
                body = body if scope["method"] == "GET" else b""
                await send({"type": "http.response.body", "body": body})
                return
        if not self._made.done():
            await asyncio.shield(asyncio.wrap_future(self._made))  # a request that is cancelled cancels only itself
        app = self._made.result()
        await app(scope, receive, send)
