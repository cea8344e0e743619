"""Routes of the protocols that others have defined: an endpoint takes the request and its path's parts, and an error
of any kind is `{"error": "..."}`.

FastAPI knows all of them, for its description of the interface. Lookups are found before it (`ProtocolLookups`): its
way through middleware and past some tens of routes costs more than a lookup of some ids.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from pydantic_core import to_json
from starlette.datastructures import Headers
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from kvtools.errors import KvtoolsError
from kvtools.server.answer import STREAMED_NUMBERS
from kvtools.server.caller import Caller
from kvtools.server.observer import Observer
from kvtools.server.protocol_error import ProtocolError
from kvtools.server.request_ids import HEADER, request_id
from kvtools.server.settings import Settings

JSON = "application/json"
Endpoint = Callable[[Request, Caller], Awaitable[Response]]
Answered = Callable[[Request], Awaitable[Response]]
_LOG = logging.getLogger("kvtools.serve")
_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_INTEGERS = {"version": {"type": "string", "pattern": "^[0-9]+$"}}
_ERRORS = {
    "400": "The request is wrong.",
    "401": "An access key is needed.",
    "403": "The access key is not for this model or table.",
    "404": "There is no such model, version or signature.",
    "413": "Too many ids, or too large a body.",
    "415": "The body has an encoding that is not known here.",
    "429": "There is too much to do; Retry-After says when to try again.",
    "503": "What is asked for is not there now.",
}
_OF_BODIES = ("413", "415", "429")
_ERROR_SCHEMA = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}


@dataclass(frozen=True)
class Body:
    """What goes in or out, as the description of the interface tells it: an example, and a JSON schema."""

    example: Any
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})
    required: bool = True


class ProtocolRouter(APIRouter):
    """Routes of one protocol; `observer` is asked by the endpoints, and told of every answer.

    `lookups` are those of a `kind`, with the ends of their paths, in the order in which they were added.
    """

    def __init__(self, name: str, observer: Observer | None = None) -> None:
        super().__init__(tags=[name])
        self.lookups: list[tuple[str, re.Pattern[str], Answered]] = []
        self._observer = observer or Observer()

    def answer(
        self,
        method: str,
        path: str,
        endpoint: Endpoint,
        *,
        kind: str = "",
        summary: str = "",
        body: Body | None = None,
        answer: Body | None = None,
    ) -> None:
        """Add a route, documented if it has a summary: `body` and `answer` are what goes in and out.

        `kind` is what the observer is told that it is; what has none is told of as any other page.
        """

        async def answered(request: Request) -> Response:
            address = (request.client.host, request.client.port) if request.client else None
            headers = {
                name.decode("latin-1"): value.decode("latin-1") for name, value in reversed(request.scope["headers"])
            }
            caller = Caller(self._observer, headers, address, request_id=request.scope.get("request_id", ""))
            code = ""
            try:
                response = await endpoint(request, caller)
            except ProtocolError as error:
                response, code = error_response(error), error.code.lower()
            except Exception as error:
                known = isinstance(error, KvtoolsError)
                _LOG.error("answering %s: %s", request.url.path, error, exc_info=None if known else error)
                response = json_response({"error": f"{type(error).__name__}; the server's log says more"}, 500)
                code = "internal"
            request.scope["error_code"] = code
            if not kind:  # `Guard` tells, by the path
                return response
            sent = headers.get("content-length", "")
            bytes_in = int(sent) if sent.isdecimal() else 0
            bytes_out = len(response.body) if hasattr(response, "body") else 0
            self._observer.on_answer(caller.told(kind, response.status_code, code, bytes_in, bytes_out))
            request.scope["told"] = True
            return response

        if kind:
            self.lookups.append((path.rpartition("}")[2], compile_path(path)[0], answered))
        self.add_api_route(
            path,
            answered,
            methods=[method],
            summary=summary,
            include_in_schema=bool(summary),
            openapi_extra=_document(path, body, answer),
            response_class=Response,
        )


def _document(path: str, body: Body | None, answer: Body | None) -> dict[str, Any]:
    def content(described: Body) -> dict[str, Any]:
        return {JSON: {"schema": described.schema, "example": described.example}}

    document: dict[str, Any] = {
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": _INTEGERS.get(name, {"type": "string"})}
            for name in _PARAMETER.findall(path)
        ],
        "responses": {
            "200": {"description": "The answer.", **({} if answer is None else {"content": content(answer)})},
            **{
                status: {"description": text, "content": {JSON: {"schema": _ERROR_SCHEMA}}}
                for status, text in _ERRORS.items()
                if body is not None or status not in _OF_BODIES
            },
        },
    }
    if body is not None:
        document["requestBody"] = {"required": body.required, "content": content(body)}
    return document


class ProtocolLookups:
    """Lookups in the protocols of others, as the routes in `routers` answer them, found without FastAPI."""

    def __init__(self, routers: Iterable[ProtocolRouter]) -> None:
        self._lookups = [lookup for router in routers for lookup in router.lookups]

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer one request; False: it is no lookup of these, and nothing is done."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope.get("root_path"):
            return False
        path = scope["path"]
        for end, pattern, answered in self._lookups:
            if path.endswith(end) and (matched := pattern.match(path)):
                name = request_id(Headers(scope=scope))
                request = Request({**scope, "path_params": matched.groupdict(), "request_id": name}, receive)
                response = await answered(request)
                response.raw_headers.append((HEADER.encode(), name.encode()))
                await response(scope, receive, send)
                return True
        return False


def json_response(document: Any, status: int = 200) -> Response:
    """Return a document as JSON."""
    return Response(to_json(document), status, media_type=JSON)


class Threads:
    """Where requests are worked on: a small one at once, others by a thread, at most `settings.max_concurrent`."""

    def __init__(self, settings: Settings) -> None:
        self._most = settings.max_concurrent
        self._running = 0
        # Beside the threads that all else takes, of which there are 40: metrics shall not wait for slow models.
        self._limiter: anyio.CapacityLimiter | None = None

    async def run(self, work: Callable[[], Response], *, small: bool) -> Response:
        """Return what `work` returns; raises a `ProtocolError` if there is too much to do."""
        if small:
            return work()
        if self._running >= self._most:
            raise ProtocolError(
                "RESOURCE_EXHAUSTED", f"{self._running} requests are being worked on, which is the most at a time"
            )
        self._running += 1
        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(self._most)
        try:
            return await anyio.to_thread.run_sync(work, limiter=self._limiter)
        except asyncio.CancelledError:  # by uvicorn alone, when the time of grace is over
            message = "the server ends, and this was not done in time"
            raise ProtocolError("UNAVAILABLE", message, headers={"Retry-After": "1"}) from None
        finally:
            self._running -= 1


def blocks_response(blocks: Iterable[bytes], numbers: int) -> Response:
    """Return JSON that comes in blocks; one of many numbers is sent while it is made."""
    if numbers > STREAMED_NUMBERS:
        return StreamingResponse(blocks, media_type=JSON)
    return Response(b"".join(blocks), media_type=JSON)


def error_response(error: ProtocolError) -> Response:
    """Return an error as TensorFlow Serving and KServe tell it."""
    response = json_response({"error": error.message}, error.status)
    response.headers.update(error.headers)
    if error.status == 429:
        response.headers["Retry-After"] = "1"
    return response


def version_number(text: str | None) -> int | None:
    """Return the number of a version that stands in a path; raises a `ProtocolError`."""
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,19}", text) or int(text) >= 1 << 63:
        raise ProtocolError("INVALID_ARGUMENT", f"Failed to convert version: {text[:40]} to numeric.")
    return int(text)
