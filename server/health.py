"""Three questions to a server: does it live, can it answer, does it answer as fast as it will.

`/livez`  200 as long as the process answers: restart it when this fails.
`/readyz` 200 once every model has a version that answers, 503 before and while the server ends: send it requests then.
`/warmz`  200 once what is served is in memory, 503 before: move a large share of the traffic to it then.

A 503 says what is missing, in the form of every other error. `/healthz` is `/livez` under its older name.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from kvtools.server.catalog import Catalog
from kvtools.server.request import RequestError
from kvtools.server.settings import Settings

_UNREADY: dict[int | str, dict[str, Any]] = {503: {"description": "Not yet, or not any more; the message says why."}}


def router(catalog: Catalog, settings: Settings) -> APIRouter:
    """Return the routes of the health checks."""
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz", summary="Tell that the server is up")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/livez", summary="Tell that the process answers")
    async def livez() -> dict[str, str]:
        return {"status": "live"}

    @routes.get("/readyz", summary="Tell whether every model can be asked", responses=_UNREADY)
    async def readyz() -> dict[str, str]:
        if reason := catalog.unready():
            raise RequestError(503, "not_ready", reason)
        return {"status": "ready"}

    @routes.get("/warmz", summary="Tell whether what is served is in memory", responses=_UNREADY)
    async def warmz() -> dict[str, str]:
        if reason := catalog.unready():
            raise RequestError(503, "not_ready", reason)
        if not catalog.warm:
            raise RequestError(503, "not_warm", "rows are still being read into memory; answers are right, and slower")
        return {"status": "warm"}

    return routes
