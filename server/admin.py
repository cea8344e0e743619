"""Changing what is served while the server runs: labels of versions, and looking for new ones now.

Whoever reaches the port may do that, so it is refused unless the server was started with `--admin`. Every worker of the
server takes the change over; the others a moment after the one that was asked.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from kvtools.server.catalog import Catalog, Changes
from kvtools.server.observer import Observer
from kvtools.server.request import RequestError
from kvtools.server.request_body import model_schema, read_model
from kvtools.server.settings import Settings

_RESPONSES: dict[int | str, dict[str, Any]] = {
    403: {"description": "The server was started without --admin, or the key is not for administration."},
    404: {"description": "There is no such model, or no such version or label of it now."},
}


class LabelledVersion(BaseModel):
    """The version that a label names from now on."""

    version: int = Field(ge=0, examples=[7])


def router(catalog: Catalog, settings: Settings, observer: Observer | None = None) -> APIRouter:
    """Return the routes under `/admin`."""
    routes = APIRouter(prefix="/admin", tags=["administration"])

    asked = observer or Observer()

    def changes(request: Request) -> Changes:
        asked.authorize_change(request.headers)
        if not settings.admin:
            raise RequestError(403, "forbidden", "changes are off; start the server with --admin")
        if catalog.changes is None:
            raise RequestError(403, "forbidden", "what this server serves cannot be changed")
        return catalog.changes

    @routes.put(
        "/models/{model}/labels/{label}",
        summary="Give a label to a version",
        responses={400: {"description": "The body names no version."}, **_RESPONSES},
        openapi_extra=model_schema(LabelledVersion),
    )
    async def set_label(model: str, label: str, request: Request) -> dict[str, int]:
        change = changes(request)  # before the body is read
        change.set_label(model, label, (await read_model(request, LabelledVersion, settings.body_limit)).version)
        return catalog.labels(model)

    @routes.delete("/models/{model}/labels/{label}", summary="Take a label away", responses=_RESPONSES)
    async def remove_label(model: str, label: str, request: Request) -> dict[str, int]:
        changes(request).set_label(model, label, None)
        return catalog.labels(model)

    @routes.post("/look", summary="Look for new versions now", responses=_RESPONSES)
    async def look(request: Request) -> dict[str, str]:
        changes(request).look_soon()
        for follows in catalog.follows.values():
            follows.look_soon()
        return {"status": "looking"}

    return routes
