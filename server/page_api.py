"""The page at `/`, and what it asks that nobody else does: nearest neighbours, and what a table's rows are like.

Both read rows in blocks, on a thread, one request at a time, and at most so many of them that it takes about a second;
of a larger table they read blocks spread evenly over it. Rows lie in the order of their mixed keys, so that is a fair
sample. `--no-page` leaves all of this out.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from pydantic import BaseModel, Field

from kvtools.server.lookups import Lookups
from kvtools.server.request import RequestError, parse_key, table_keys
from kvtools.server.request_body import model_schema, read_model
from kvtools.server.store import StoredTable, lookup_errors
from kvtools.server.tables_api import MODEL_PARAMETER, named_model

_FOLDER = FilePath(__file__).parent / "page"
_FILES = {"page.js": "text/javascript", "page.css": "text/css"}
_HEADERS = {
    # Nothing from elsewhere, and nothing to elsewhere.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
_BLOCK_NUMBERS = 1 << 19
_MOST_NUMBERS = 1 << 26  # about a second of work
_MOST_ROWS = 1 << 20
_SAMPLED_NUMBERS = 1 << 22
_SMALL_NORM = 1e-15  # below it, squares of float32 are lost
_BINS = 24
_KEYS_SHOWN = 12

_RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"description": "The key or a parameter is wrong, or the rows are not here."},
    401: {"description": "An access key is needed."},
    403: {"description": "The access key is not for this table."},
    404: {"description": "There is no such table or model, or no row of this key."},
    429: {"description": "Another table is being read; Retry-After says when to try again."},
}

Floats = npt.NDArray[np.float32]
_TableName = Annotated[str, Path(description="As GET /v1/tables lists it, slashes too.")]


class Wanted(BaseModel):
    """Whose neighbours, and how many."""

    key: str = Field(pattern=r"^-?[0-9]{1,20}$", examples=["17"], description="As text, as 64 bits are no JSON number.")
    metric: Literal["cosine", "dot"] = "cosine"
    count: int = Field(default=10, ge=1, le=100)


def router(lookups: Lookups) -> APIRouter:
    """Return the routes of the page."""
    routes = APIRouter(tags=["page"])
    busy = False

    @routes.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(_FOLDER / "page.html", media_type="text/html", headers=_HEADERS)

    @routes.get("/page/{name}", include_in_schema=False)
    async def file(name: str) -> Response:
        if name not in _FILES:
            raise RequestError(404, "not_found", f"the page has no file '{name[:80]}'")
        return FileResponse(_FOLDER / name, media_type=_FILES[name], headers=_HEADERS)

    def stored(request: Request, table: str) -> StoredTable:
        lookups.observer.authorize(request.headers, ())
        model = lookups.catalog.model_of((table,), named_model(request))
        lookups.observer.authorize_model(request.headers, model)
        lookups.observer.authorize(request.headers, (table,))
        found = lookups.catalog.choose((table,), model).store.table(table)
        if not found.table:
            raise RequestError(400, "not_local", f"the rows of table '{table}' are not here, but in its backend")
        return found

    async def worked_out(work: Any, *arguments: Any) -> dict[str, Any]:
        nonlocal busy
        if busy:
            raise RequestError(429, "too_busy", "another table is being read; try again", {"Retry-After": "1"})
        busy = True
        try:
            found: dict[str, Any] = await run_in_threadpool(work, *arguments)
            return found
        finally:
            busy = False

    @routes.post(
        "/v1/tables/{table:path}:nearest",
        summary="Find the rows that are most like a row",
        responses=_RESPONSES,
        openapi_extra={**model_schema(Wanted), "parameters": [MODEL_PARAMETER]},
    )
    async def nearest(table: _TableName, request: Request) -> dict[str, Any]:
        found = stored(request, table)
        wanted = await read_model(request, Wanted, lookups.body_limit)
        return await worked_out(find_nearest, found, wanted.key, wanted.metric, wanted.count)

    @routes.get(
        "/v1/tables/{table:path}:rows",
        summary="Tell what a table's rows are like",
        responses=_RESPONSES,
        openapi_extra={"parameters": [MODEL_PARAMETER]},
    )
    async def rows(
        table: _TableName, request: Request, bins: Annotated[int, Query(ge=1, le=200)] = _BINS
    ) -> dict[str, Any]:
        return await worked_out(describe_rows, stored(request, table), bins)

    return routes


def find_nearest(stored: StoredTable, key: str, metric: str, count: int) -> dict[str, Any]:
    """Return the `count` rows with the largest product with the row of `key`, or the largest cosine, largest first.

    The row itself is left out, and so are rows that are not finite and, by cosine, zeros, which have no direction. Ties
    have no order. Where none is left, `reason` says why. Raises `RequestError`: there is no row of this key.
    """
    asked = table_keys(parse_key(key, stored.schema.key_dtype), stored.schema.key_dtype, stored.key_limits)
    with lookup_errors(stored):
        place = int(stored.table.find(asked)[0])
        if place < 0:
            raise RequestError(404, "missing_keys", f"table '{stored.schema.name}' has no row for key {key}")
        wanted = _float32(stored.table.take(np.array([place]), freqs=False, versions=False)[1])[0]
    reason = _why_none(key, wanted, metric)
    if metric == "cosine":
        with np.errstate(all="ignore"):
            wanted = _unit(wanted[None])[0]
    best_scores, best_keys, scanned = np.empty(0, np.float32), np.empty(0, stored.schema.key_dtype), 0
    for numbers, keys, rows in _blocks(stored, _MOST_NUMBERS):
        scanned += len(keys)
        with np.errstate(all="ignore"):
            scores = (_unit(rows) if metric == "cosine" else rows) @ wanted
        scores[~np.isfinite(scores)] = -np.inf
        scores[numbers == place] = -np.inf
        best_scores, best_keys = np.concatenate([best_scores, scores]), np.concatenate([best_keys, keys])
        kept = np.argsort(-best_scores, kind="stable")[:count]
        best_scores, best_keys = best_scores[kept], best_keys[kept]
    neighbours = [
        {"key": str(each), "score": float(score)}
        for each, score in zip(best_keys, best_scores, strict=True)
        if np.isfinite(score)
    ]
    answer = {"key": key, "metric": metric, "rows": stored.table.rows, "scanned": scanned, "neighbours": neighbours}
    return answer if neighbours else answer | {"reason": reason}


def _why_none(key: str, row: Floats, metric: str) -> str:
    """Return why a row [dim] has no neighbours, if it has none."""
    if not np.isfinite(row).all():
        return f"the row of key {key} has NaN or infinity"
    if metric == "cosine" and not row.any():
        return f"the row of key {key} is zeros, which have no direction; the metric dot compares it"
    return "there is no other row that can be compared"


def describe_rows(stored: StoredTable, bins: int) -> dict[str, Any]:
    """Return some keys, and histograms of the norms of rows and of frequencies, where there are any."""
    norms: list[npt.NDArray[Any]] = []
    freqs: list[npt.NDArray[Any]] = []
    shown: list[str] = []
    for numbers, keys, rows in _blocks(stored, _SAMPLED_NUMBERS):
        with np.errstate(all="ignore"):
            norms.append(_norms(rows))
        if stored.table.freq_dtype:
            counted = stored.table.take(numbers, values=False, versions=False)[2]
            assert counted is not None
            freqs.append(counted)
        if len(shown) < _KEYS_SHOWN:
            shown += [str(key) for key in keys[: _KEYS_SHOWN - len(shown)]]
    lengths = np.concatenate(norms) if norms else np.empty(0, np.float32)
    return {
        "rows": stored.table.rows,
        "dim": stored.table.dim,
        "sampled": len(lengths),
        "keys": shown,
        "norms": _histogram(lengths, bins),
        "frequencies": _histogram(np.concatenate(freqs), bins) if freqs else None,
    }


def _blocks(stored: StoredTable, most: int) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any], Floats]]:
    """Yield numbers, keys and rows of blocks: all of them, or of a large table as many as `most` allows, spread."""
    table = stored.table
    over = table.levels > 0  # then some numbers are of rows that are gone, or are another's by now
    rows, block = table.positions, max(1, _BLOCK_NUMBERS // max(1, table.dim))
    wanted = min(rows, _MOST_ROWS, max(block, most // max(1, table.dim)))
    blocks = -(-wanted // block)
    step = block if wanted == rows else rows // blocks
    for number in range(blocks):
        first = number * step
        with lookup_errors(stored):
            keys, values, _, _ = table.read(first, min(block, rows - first), freqs=False, versions=False)
            numbers = np.arange(first, first + len(keys))
            if over:
                there = table.find(keys) == numbers
                keys, values, numbers = keys[there], np.asarray(values)[there], numbers[there]
        yield numbers, keys, _float32(values)


def _float32(values: Any) -> Floats:
    rows: Floats = np.asarray(values).astype(np.float32)
    return rows


def _norms(rows: Floats) -> npt.NDArray[np.float64]:
    """Return the lengths of rows [n, dim], also where a square is beyond what float32 has."""
    norms: npt.NDArray[np.float64] = np.linalg.norm(rows, axis=1).astype(np.float64)
    beyond = ~np.isfinite(norms) | (norms < _SMALL_NORM)
    norms[beyond] = np.linalg.norm(rows[beyond].astype(np.float64), axis=1)
    return norms


def _unit(rows: Floats) -> Floats:
    """Return the directions of rows [n, dim]; one of zeros has none, and neither has one that is not finite: NaN."""
    unit: Floats = (rows / _norms(rows).astype(np.float32)[:, None]).astype(np.float32, copy=False)
    return unit


def _histogram(values: npt.NDArray[Any], bins: int) -> dict[str, Any]:
    finite = values[np.isfinite(values)].astype(np.float64)
    if not len(finite):
        return {"edges": [], "counts": []}
    counts, edges = np.histogram(finite, bins)
    return {"edges": edges.tolist(), "counts": counts.tolist()}
