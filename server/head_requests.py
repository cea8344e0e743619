"""HEAD where there is a GET: the same status and headers, and no body (RFC 9110, 9.3.2)."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadRequests:
    """Has `app` answer a HEAD as if it were a GET, and leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        asked = {**scope, "method": "GET", "without_body": True}

        async def send_head(message: Message) -> None:
            scope.update((name, asked[name]) for name in ("told", "error_code") if name in asked)  # for who counts
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self.app(asked, receive, send_head)
