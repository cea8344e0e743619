"""The FastAPI application: the interfaces side by side, and one shape of error for each.

Every error is an object with a status of 4xx or 5xx: `{"error": {"code": ..., "message": ...}}` in our own interface,
`{"error": "..."}` under `/v1/models` (TensorFlow Serving's) and `/v2` (KServe's).
"""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from kvtools import __version__
from kvtools.errors import KvtoolsError, UnknownTableError
from kvtools.server import admin, documentation, health, kserve_rest, page_api, tables_api, tensorflow_rest
from kvtools.server.catalog import (
    AmbiguousTableError,
    Catalog,
    NoVersionError,
    OtherExportError,
    UnknownModelError,
    UnknownVersionError,
)
from kvtools.server.guard import Guard
from kvtools.server.head_requests import HeadRequests
from kvtools.server.lookups import Lookups
from kvtools.server.metrics import MEDIA_TYPE as METRICS
from kvtools.server.protocol_routes import ProtocolLookups
from kvtools.server.request import RequestError
from kvtools.server.request_ids import HEADER
from kvtools.server.settings import Settings

_PLAIN_ERRORS = ("/v1/models", "/v2")  # where an error is one string
_log = logging.getLogger("kvtools.server")
_UNKNOWN: dict[type[KvtoolsError], str] = {
    UnknownTableError: "unknown_table",
    UnknownModelError: "unknown_model",
    UnknownVersionError: "unknown_version",
}


class Application(FastAPI):
    """FastAPI's, behind the lookups of other protocols, which do without it."""

    lookups: ProtocolLookups | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if self.lookups is None or not await self.lookups.answer(scope, receive, send):
            await super().__call__(scope, receive, send)


def create_app(catalog: Catalog, settings: Settings | None = None, *, lookups: Lookups | None = None) -> FastAPI:
    """Make the application that answers from what `catalog` serves; `lookups` are shared with `http_protocol.py`.

    Example:
        ```python
        uvicorn.run(create_app(static_catalog("exported")), port=8501)
        ```
    """
    settings = settings or Settings()
    app = Application(
        title="kvtools serve",
        version=__version__,
        summary="Embedding lookups from a read-only store.",
        docs_url=None,
        redoc_url=None,
    )
    lookups = lookups or Lookups(catalog, settings)
    app.add_middleware(HeadRequests)
    app.add_middleware(Guard, observer=lookups.observer, refuse=_refused)
    app.include_router(tables_api.router(lookups))
    protocols = [each.router(catalog, settings, lookups.observer) for each in (tensorflow_rest, kserve_rest)]
    for routes in protocols:
        app.include_router(routes)
    app.lookups = ProtocolLookups(protocols)
    app.include_router(admin.router(catalog, settings, lookups.observer))
    app.include_router(health.router(catalog, settings))
    app.include_router(documentation.router(app.title))
    if settings.page:
        app.include_router(page_api.router(lookups))

    @app.get("/monitoring/prometheus/metrics", include_in_schema=False)
    @app.get("/metrics", tags=["health"], summary="Give metrics, for Prometheus", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(await run_in_threadpool(lookups.observer.metrics), media_type=METRICS)

    @app.exception_handler(RequestError)
    async def on_request_error(request: Request, error: RequestError) -> Response:
        return _refused(request, error)

    @app.exception_handler(KvtoolsError)
    async def on_kvtools_error(request: Request, error: KvtoolsError) -> Response:
        if isinstance(error, NoVersionError):
            return _error(request, 503, "not_ready", str(error), {"Retry-After": "1"})
        if isinstance(error, OtherExportError):
            return _error(request, 503, "other_export", str(error))
        if isinstance(error, AmbiguousTableError):
            return _error(request, 400, "ambiguous_table", str(error))
        if code := _UNKNOWN.get(type(error)):
            return _error(request, 404, code, str(error))
        _log.error("answering %s: %s", request.url.path, error)  # the message may have a path of this host in it
        return _error(request, 500, "internal", f"{type(error).__name__}; the server's log says more")

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> Response:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
        message = f"{request.method} {request.url.path}: {error.detail}; see /docs"
        return _error(request, error.status_code, code, message, dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def on_bad_request(request: Request, error: RequestValidationError) -> Response:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        return _error(request, 400, "bad_request", f"{wrong}; see /docs")

    @app.exception_handler(Exception)
    async def on_other_error(request: Request, error: Exception) -> Response:
        answer = _error(request, 500, "internal", f"{type(error).__name__}; the server's log says more")
        answer.headers[HEADER] = request.scope.get("request_id", "")  # this is made outside of `Guard`
        return answer

    return app


def _refused(request: Request, error: RequestError) -> Response:
    return _error(request, error.status, error.code, error.message, error.headers)


def _error(request: Request, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Response:
    request.scope["error_code"] = code
    plain = request.url.path.startswith(_PLAIN_ERRORS)
    return JSONResponse({"error": message if plain else {"code": code, "message": message}}, status, headers)
