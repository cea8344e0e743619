"""The outermost layer of the application: an id for each request, a key asked for, and whoever watches told.

Lookups are told by who answers them, as only that knows of tables and keys; everything else is told here. Whatever is
added to the application is behind a key, unless it is named here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtools.server.observer import Answered, Observer
from kvtools.server.request import RequestError
from kvtools.server.request_ids import HEADER, request_id

# What the server is, how it is, and pages, which have no row in them.
_CHECKS = frozenset(  # which nobody is told of: there are so many of them
    ("/healthz", "/livez", "/readyz", "/warmz", "/v2/health/live", "/v2/health/ready")
)
_OPEN = _CHECKS | {"/", "/docs", "/openapi.json", "/v2", "/v2/"}
_OPEN_FILES = ("/docs/", "/page/")
# Who answers these asks by itself, and tells what was asked for.
_ASKING = ("/v1/tables", "/v1/models", "/v2/models")


class Guard:
    """Lets requests through to `app`; `refuse` makes the answer to those that are not, in their protocol's form."""

    def __init__(self, app: ASGIApp, observer: Observer, refuse: Callable[[Request, RequestError], Response]) -> None:
        self._app = app
        self._observer = observer
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        headers = Headers(scope=scope)
        name = scope["request_id"] = request_id(headers)
        path: str = scope["path"]
        status, sent, code = 500, 0, "internal"

        async def send_with_id(message: Message) -> None:
            nonlocal status, sent, code
            if message["type"] == "http.response.start":
                status = message["status"]
                code = "" if status < 400 else scope.get("error_code", "error")
                message = {**message, "headers": [*message["headers"], (HEADER.encode(), name.encode())]}
            else:
                sent += len(message.get("body", b""))
            await send(message)

        try:
            if path not in _OPEN and not path.startswith(_OPEN_FILES + _ASKING):
                try:
                    self._observer.authorize(headers, ())
                except RequestError as error:
                    await self._refuse(Request(scope), error)(scope, receive, send_with_id)
                    return
            await self._app(scope, receive, send_with_id)
        finally:
            if "told" not in scope and path not in _CHECKS:
                client: Any = scope.get("client")
                length = headers.get("content-length", "")
                self._observer.on_answer(
                    Answered(
                        "",
                        status,
                        code,
                        (),
                        time.perf_counter() - began,
                        int(length) if length.isdecimal() and len(length) < 16 else 0,
                        sent,
                        tuple(client) if client else None,
                        headers,
                        False,
                        request_id=name,
                        path=path[:500],
                    )
                )
