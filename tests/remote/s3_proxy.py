"""A server in front of an S3 server that counts what goes by, and does what servers do on bad days."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_PASSED_ON = ("content-type", "content-range", "etag", "last-modified", "accept-ranges", "x-amz-version-id")


@dataclass
class Request:
    """One request that came by; `range` is (first, last) byte, `number` counts requests of this method and path."""

    method: str
    path: str
    number: int
    range: tuple[int, int] | None
    answered: int = 0


@dataclass
class Answer:
    """What the server behind answers, to be changed by a fault: `cut` ends the connection after so many bytes."""

    status: int
    headers: dict[str, str]
    body: bytes
    cut: int | None = None


Fault = Callable[[Request, Answer], Answer]


@dataclass
class Proxy:
    """Listens on `url`; `requests` are those that came since `reset`, `fault` may change each answer."""

    behind: tuple[str, int]
    requests: list[Request] = field(default_factory=list)
    fault: Fault | None = None
    before: Callable[[Request], Answer | None] | None = None

    def __post_init__(self) -> None:
        proxy = self
        self._counts: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                proxy.handle(self)

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def reset(self) -> None:
        self.requests, self.fault, self.before, self._counts = [], None, None, {}

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def gets(self, name: str = "") -> list[Request]:
        """The requests for the bytes of objects whose names have `name` in them."""
        return [
            one for one in self.requests if one.method == "GET" and "list-type" not in one.path and name in one.path
        ]

    def handle(self, client: Any) -> None:
        size = int(client.headers.get("content-length") or 0)
        if client.headers.get("expect"):
            client.send_response_only(100)
            client.end_headers()
        sent = client.rfile.read(size)
        asked = client.headers.get("range")
        span = None if asked is None else tuple(int(x or 0) for x in asked.removeprefix("bytes=").split("-"))
        with self._lock:
            key = client.command, client.path
            self._counts[key] = self._counts.get(key, 0) + 1
            request = Request(client.command, client.path, self._counts[key], span)  # type: ignore[arg-type]
            self.requests.append(request)
        answer = self.before(request) if self.before else None
        if answer is None:
            answer = self._ask(client, sent)
            if self.fault is not None:
                answer = self.fault(request, answer)
        body = answer.body if client.command != "HEAD" else b""
        client.send_response(answer.status)
        for name, value in answer.headers.items():
            client.send_header(name, value)
        if "content-length" not in answer.headers:
            client.send_header("content-length", str(len(answer.body)))
        client.end_headers()
        request.answered = len(body) if answer.cut is None else min(answer.cut, len(body))
        client.wfile.write(body[: request.answered])
        if answer.cut is not None:
            client.wfile.flush()
            client.close_connection = True
            client.connection.close()

    def _ask(self, client: Any, sent: bytes) -> Answer:
        behind = http.client.HTTPConnection(*self.behind, timeout=60)
        try:
            headers = {name: value for name, value in client.headers.items() if name.lower() != "expect"}
            behind.request(client.command, client.path, sent, headers)
            answer = behind.getresponse()
            kept = {name.lower(): value for name, value in answer.getheaders() if name.lower() in _PASSED_ON}
            if client.command == "HEAD":
                kept["content-length"] = answer.getheader("content-length") or "0"
            return Answer(answer.status, kept, answer.read())
        finally:
            behind.close()


def refusal(status: int, code: str, message: str = "told by the test") -> Answer:
    """An error as S3 gives it."""
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Answer(status, {"content-type": "application/xml"}, body.encode())
