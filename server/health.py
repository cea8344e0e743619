"""Three questions to a server: does it live, can it answer, does it answer as fast as it will.

`/livez`  200 as long as the process answers: restart it when this fails.
`/readyz` 200 once every model has a version that answers, 503 before and while the server ends: send it requests then.
`/warmz`  200 once what is served is in memory, 503 before: move a large share of the traffic to it then.

A 503 says what is missing, in the form of every other error. `/healthz` is `/livez` under its older name. A real server
answers them beneath FastAPI (`late_app.py`); the routes here are for the documents, and where there is none.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from kvtools.server.catalog import Catalog
from kvtools.server.request import RequestError
from kvtools.server.settings import Settings

if TYPE_CHECKING:
    from fastapi import APIRouter

_UNREADY: dict[int | str, dict[str, Any]] = {503: {"description": "Not yet, or not any more; the message says why."}}


def check(catalog: Catalog, path: str) -> dict[str, str] | None:
    """Return the answer to a check, or None: `path` is none. Raises `RequestError` (503) where it is no.

    Example:
        >>> check(Catalog(), "/livez")
        {'status': 'live'}
    """
    if path == "/healthz":
        return {"status": "ok"}
    if path == "/livez":
        return {"status": "live"}
    if path not in ("/readyz", "/warmz"):
        return None
    if reason := catalog.unready():
        raise RequestError(503, "not_ready", reason)
    if path == "/readyz":
        return {"status": "ready"}
    if not catalog.warm:
        raise RequestError(503, "not_warm", "rows are still being read into memory; answers are right, and slower")
    return {"status": "warm"}


def check_in_json(catalog: Catalog, path: str) -> tuple[int, bytes] | None:
    """Return status and body of the answer to a check, or None: `path` is none."""
    try:
        status, answer = 200, check(catalog, path)
    except RequestError as error:
        status, answer = error.status, {"error": {"code": error.code, "message": error.message}}  # type: ignore[dict-item]
    return None if answer is None else (status, json.dumps(answer, separators=(",", ":")).encode())


def router(catalog: Catalog, settings: Settings) -> APIRouter:
    """Return the routes of the health checks."""
    from fastapi import APIRouter

    routes = APIRouter(tags=["health"])

    @routes.get("/healthz", summary="Tell that the server is up")
    async def healthz() -> dict[str, str] | None:
        return check(catalog, "/healthz")

    @routes.get("/livez", summary="Tell that the process answers")
    async def livez() -> dict[str, str] | None:
        return check(catalog, "/livez")

    @routes.get("/readyz", summary="Tell whether every model can be asked", responses=_UNREADY)
    async def readyz() -> dict[str, str] | None:
        return check(catalog, "/readyz")

    @routes.get("/warmz", summary="Tell whether what is served is in memory", responses=_UNREADY)
    async def warmz() -> dict[str, str] | None:
        return check(catalog, "/warmz")

    return routes
