"""/docs: the interface, described, from files of this machine alone.

FastAPI's own page loads Swagger UI from elsewhere; a server often stands where there is no elsewhere. The files are
those of the package `fastapi-offline`, which `kvtools[serve]` asks for.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse

from kvtools.server.request import RequestError

_FILES = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon.png": "image/png",
}
_WITHOUT = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>
<body><p>The interface is described in <a href="openapi.json">openapi.json</a>. To see it as a page, run
<code>pip install 'kvtools[serve]'</code> where the server runs: the package fastapi-offline is not
there.</p></body></html>
"""


def router(title: str) -> APIRouter:
    """Return the routes of the page and its files."""
    routes = APIRouter(include_in_schema=False)
    folder = _folder()

    @routes.get("/docs")
    async def page() -> Response:
        if folder is None:
            return HTMLResponse(_WITHOUT.format(title=title))
        # Names without a slash in front: the page works behind a proxy that gives the server a path of its own.
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=title,
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url="docs/favicon.png",
            swagger_ui_parameters={"validatorUrl": None},  # which would be asked from elsewhere
        )

    @routes.get("/docs/{name}")
    async def file(name: str) -> Response:
        if folder is None or name not in _FILES:
            raise RequestError(404, "not_found", f"there is no file '{name[:80]}' here; see /docs")
        return FileResponse(folder / name, media_type=_FILES[name], headers={"Cache-Control": "max-age=3600"})

    return routes


def _folder() -> Path | None:
    found = find_spec("fastapi_offline")
    if found is None or found.origin is None:
        return None
    folder = Path(found.origin).parent / "static"
    return folder if all((folder / name).is_file() for name in _FILES) else None
