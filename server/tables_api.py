"""Our own interface: lookups by table, and a list of the tables.

Lookups run in a pool of threads, so that a big one does not hold up the others. JSON has no NaN and no infinity: such
values are the strings "NaN", "Infinity" and "-Infinity"; the binary answer has their bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic_core import to_json
from starlette.requests import ClientDisconnect

from kvtools.inspect import describe_table
from kvtools.json_numbers import json_numbers
from kvtools.server.catalog import Catalog
from kvtools.server.request import BINARY, RequestError, body_limit, parse_keys
from kvtools.server.settings import Settings
from kvtools.server.store import StoredTable

# How much of a body that is too large is read and dropped: a client that is still sending when the
# connection is closed may never see the answer.
_DRAINED_BYTES = 4 << 20
_NUMBERS_AT_ONCE = 32768
_EXAMPLE = {"keys": [17, -3]}
_ANSWER = {"embeddings": [[0.25, -0.5], [0.0, 0.0]], "found": [True, False]}
_ERROR = {"error": {"code": "unknown_table", "message": "there is no table 'x'; GET /v1/tables lists the tables"}}
_ERROR_SCHEMA = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
        }
    },
}
_LOOKUP_DOCUMENT: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["keys"],
                    "properties": {"keys": {"type": "array", "items": {"type": "integer"}}},
                },
                "example": _EXAMPLE,
            },
            BINARY: {
                "schema": {
                    "type": "string",
                    "format": "binary",
                    "description": "Keys as little-endian int64; for a table of uint64 keys, their bits.",
                }
            },
        },
    },
}
_LOOKUP_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One row per key, in the order of the keys; zeros where there is none.",
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {
                        "embeddings": {
                            "type": "array",
                            "items": {"type": "array", "items": {"type": "number"}},
                        },
                        "found": {"type": "array", "items": {"type": "boolean"}},
                    },
                },
                "example": _ANSWER,
            },
            BINARY: {
                "schema": {
                    "type": "string",
                    "format": "binary",
                    "description": "Little-endian float32 rows; the shape is in X-Embedding-Shape, as `2,16`.",
                }
            },
        },
        "headers": {
            "X-Embedding-Shape": {
                "description": "Keys and dim.",
                "schema": {"type": "string"},
                "example": "2,16",
            },
            "X-Embedding-Missing": {
                "description": "How many keys were not found.",
                "schema": {"type": "integer"},
            },
        },
    },
    **{
        status: {
            "description": description,
            "content": {"application/json": {"schema": _ERROR_SCHEMA, "example": _ERROR}},
        }
        for status, description in (
            (400, "The body or a key is wrong."),
            (404, "There is no such table."),
            (413, "Too many keys, or too large a body."),
        )
    },
}


def router(catalog: Catalog, settings: Settings) -> APIRouter:
    """Return the routes under `/v1/tables`: of the first model's latest version."""
    routes = APIRouter(tags=["tables"])
    limit = body_limit(settings.max_keys)

    @routes.post(
        "/v1/tables/{table:path}:lookup",
        summary="Look up the embeddings of keys",
        responses=_LOOKUP_RESPONSES,
        openapi_extra=_LOOKUP_DOCUMENT,
        response_class=Response,
    )
    async def lookup(table: str, request: Request) -> Response:
        stored = catalog.version().store.table(table)
        body = await _read_body(request, limit)
        binary_keys = _media_type(request.headers.get("content-type", "")) == BINARY
        binary_answer = _wants_binary(request.headers.get("accept", ""))
        return await run_in_threadpool(_answer, stored, body, binary_keys, binary_answer, settings.max_keys)

    @routes.get("/v1/tables", summary="List the tables")
    async def tables() -> dict[str, Any]:
        store = catalog.version().store
        return {
            "path": str(store.path),
            "dialect": store.dialect,
            "tables": [describe_table(table.schema) for table in store.tables.values()],
        }

    return routes


def _answer(stored: StoredTable, body: bytes, binary_keys: bool, binary: bool, max_keys: int) -> Response:
    keys = parse_keys(
        body,
        binary=binary_keys,
        key_dtype=stored.schema.key_dtype,
        limits=stored.key_limits,
        max_keys=max_keys,
    )
    embeddings, found = stored.lookup(keys)
    if binary:
        with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinity, as it would anywhere
            data = embeddings.astype("<f4").tobytes()
        headers = {
            "X-Embedding-Shape": f"{embeddings.shape[0]},{embeddings.shape[1]}",
            "X-Embedding-Missing": str(len(found) - int(np.count_nonzero(found))),
        }
        return Response(data, media_type=BINARY, headers=headers)
    return Response(_json_answer(embeddings, found), media_type="application/json")


def _json_answer(embeddings: npt.NDArray[Any], found: npt.NDArray[np.bool_]) -> bytes:
    """Encode an answer in blocks of rows, so that other threads get their turn between blocks."""
    rows = max(1, _NUMBERS_AT_ONCE // max(1, embeddings.shape[1]))
    blocks = [
        to_json(json_numbers(embeddings[start : start + rows]))[1:-1] for start in range(0, len(embeddings), rows)
    ]
    return b'{"embeddings":[' + b",".join(blocks) + b'],"found":' + to_json(found.tolist()) + b"}"


async def _read_body(request: Request, limit: int) -> bytes:
    chunks, total = [], 0
    try:
        async for chunk in request.stream():
            total += len(chunk)
            if total <= limit:
                chunks.append(chunk)
            elif total > limit + _DRAINED_BYTES:
                break
    except ClientDisconnect:
        raise RequestError(400, "disconnected", "the client went away") from None
    if total > limit:
        raise RequestError(413, "body_too_large", f"the body is over {limit} bytes; send fewer keys a request")
    return b"".join(chunks)


def _media_type(header: str) -> str:
    return header.partition(";")[0].strip().lower()


def _wants_binary(accept: str) -> bool:
    """Tell whether an Accept header asks for the binary answer and not, as much or more, for JSON."""
    weights = {"application/json": -1.0, BINARY: 0.0}
    for item in accept.split(","):
        media, *parameters = (part.strip().lower() for part in item.split(";"))
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    weight = float(parameter[2:])
                except ValueError:
                    weight = 0.0
        if media in weights:
            weights[media] = weight
    return weights[BINARY] > max(weights["application/json"], 0.0)
