"""Our own interface: lookups in one table or several, rows by key, and a list of the tables.

The model is the one that `?model=` names, or the only one that has the table; see `Catalog.model_of`. The lookups here
are those that `http_protocol.py` does not answer by its short way. They give the same bytes, and describe both for
OpenAPI.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Request, Response
from fastapi.responses import StreamingResponse

from kvtools.dialects.schema import TableSchema
from kvtools.inspect import describe_table
from kvtools.lookup_frame import COMBINERS, MISSING
from kvtools.lookup_frame import MEDIA_TYPE as FRAME
from kvtools.server.answer import Answer
from kvtools.server.catalog import Catalog, ServedVersion
from kvtools.server.codecs import JSON, choose_codec
from kvtools.server.lookups import Ask, Lookups, Size, error_answer
from kvtools.server.request import BINARY, RequestError, checked_missing
from kvtools.server.request_body import read_within
from kvtools.split_manifest import EXPORT_HEADER

_ERROR = {"error": {"code": "unknown_table", "message": "there is no table 'x'; GET /v1/tables lists the tables"}}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {"code": {"type": "string"}, "message": {"type": "string"}},
        }
    },
}
_NUMBER = {"oneOf": [{"type": "number"}, {"type": "boolean"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}
_ROW = {"type": "array", "items": _NUMBER}
_MISSING: dict[str, Any] = {
    "type": "string",
    "enum": list(MISSING),
    "description": "What a key without a row gets; the server's setting unless said.",
}
_KEY = {"type": "integer"}
_LOOKUP_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["keys"],
    "additionalProperties": False,
    "properties": {
        "keys": {
            "type": "array",
            "items": {"oneOf": [_KEY, {"type": "array", "items": _KEY}]},
            "description": "A row is given for each key; for each list of keys, one that combines theirs.",
        },
        "combiner": {"type": "string", "enum": list(COMBINERS), "description": "Of keys in lists, or with row_splits."},
        "row_splits": {
            "type": "array",
            "items": {"type": "integer"},
            "description": "Bag b has keys [row_splits[b], row_splits[b + 1]).",
        },
        "weights": {
            "type": "array",
            "items": {"oneOf": [{"type": "number"}, {"type": "array", "items": {"type": "number"}}]},
            "description": "Of pooled keys, in their form.",
        },
        "missing": _MISSING,
    },
}
_ANSWER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["embeddings"],
    "properties": {
        "embeddings": {"type": "array", "items": _ROW},
        "found": {"type": "array", "items": {"type": "boolean"}, "description": "Of each key; not of pooled ones."},
        "missing": {"type": "integer", "description": "How many of the pooled keys have no row."},
    },
}
_VERSION_HEADER = {
    "X-Embedding-Version": {"description": "The model version that answered.", "schema": {"type": "integer"}}
}
_SHAPE_HEADERS = {
    "X-Embedding-Shape": {
        "description": "Of the binary answer: rows and dim.",
        "schema": {"type": "string"},
        "example": "2,16",
    },
    "X-Embedding-Missing": {
        "description": "Of the binary answer: how many keys were not found.",
        "schema": {"type": "integer"},
    },
}
_FLOATS = {
    "schema": {
        "type": "string",
        "format": "binary",
        "description": "Little-endian float32 rows; the shape is in X-Embedding-Shape, as `2,16`.",
    }
}


def _errors(**others: str) -> dict[int | str, dict[str, Any]]:
    errors = {
        "400": "The body, a key or a parameter is wrong; or several models have the table, and none is named.",
        "401": "An access key is needed.",
        "403": "The access key is not for this.",
        "404": "There is no such table or model; or a key has no row, where that is an error.",
        **others,
        "429": "Too many lookups at a time; Retry-After says when to try again.",
    }
    return {
        int(status): {
            "description": text,
            "content": {JSON: {"schema": _ERROR_SCHEMA, "example": _ERROR}},
        }
        for status, text in errors.items()
    }


_BODY_ERRORS = {
    "408": "The body did not come in time.",
    "413": "Too many keys or numbers, or too large a body.",
    "415": "Another Content-Encoding than gzip or deflate, or a binary form that this path does not have.",
}
_MISSING_PARAMETER: dict[str, Any] = {
    "name": "missing",
    "in": "query",
    "required": False,
    "schema": {"type": "string", "enum": list(MISSING)},
    "description": "What a key without a row gets, where the body does not say it.",
}
MODEL_PARAMETER: dict[str, Any] = {
    "name": "model",
    "in": "query",
    "required": False,
    "schema": {"type": "string"},
    "description": "The model; the only one that has the table unless said.",
}
_LOOKUP_DOCUMENT: dict[str, Any] = {
    "parameters": [_MISSING_PARAMETER, MODEL_PARAMETER],
    "requestBody": {
        "required": True,
        "content": {
            JSON: {"schema": _LOOKUP_SCHEMA, "example": {"keys": [17, -3]}},
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
        "description": "One row per key or bag, in their order.",
        "content": {
            JSON: {
                "schema": _ANSWER_SCHEMA,
                "example": {"embeddings": [[0.25, -0.5], [0.0, 0.0]], "found": [True, False]},
            },
            BINARY: _FLOATS,
        },
        "headers": _VERSION_HEADER | _SHAPE_HEADERS,
    },
    **_errors(**_BODY_ERRORS),
}
_FRAME = {"schema": {"type": "string", "format": "binary", "description": "A frame, see docs/serve.md."}}
_TABLES_DOCUMENT: dict[str, Any] = {
    "parameters": [_MISSING_PARAMETER, MODEL_PARAMETER],
    "requestBody": {
        "required": True,
        "content": {
            JSON: {
                "schema": {
                    "type": "object",
                    "required": ["tables"],
                    "additionalProperties": False,
                    "properties": {
                        "tables": {"type": "object", "additionalProperties": _LOOKUP_SCHEMA},
                        "missing": _MISSING,
                    },
                },
                "example": {"tables": {"user": {"keys": [17]}, "item": {"keys": [[1, 2], [3]], "combiner": "mean"}}},
            },
            FRAME: _FRAME,
        },
    },
}
_TABLES_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer of each table, as one table alone gives it.",
        "content": {
            JSON: {
                "schema": {
                    "type": "object",
                    "required": ["tables"],
                    "properties": {"tables": {"type": "object", "additionalProperties": _ANSWER_SCHEMA}},
                },
            },
            FRAME: _FRAME,
        },
        "headers": _VERSION_HEADER,
    },
    **_errors(**_BODY_ERRORS),
}
_ROW_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The row.",
        "content": {
            JSON: {
                "schema": {
                    "type": "object",
                    "required": ["key", "embedding"],
                    "properties": {"key": _KEY, "embedding": _ROW},
                },
                "example": {"key": 17, "embedding": [0.25, -0.5]},
            },
            BINARY: _FLOATS,
        },
        "headers": _VERSION_HEADER | _SHAPE_HEADERS,
    },
    **_errors(),
}
_TableName = Annotated[str, Path(description="As GET /v1/tables lists it, slashes too.")]
_ROW_DOCUMENT: dict[str, Any] = {
    "parameters": [
        {**_MISSING_PARAMETER, "description": "What a key without a row gets; an error unless said."},
        MODEL_PARAMETER,
    ]
}
_LISTING_DOCUMENT: dict[str, Any] = {
    "parameters": [{**MODEL_PARAMETER, "description": "The model; all of them unless said."}]
}
_LISTING_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: answer for status, answer in _errors().items() if status in (400, 401, 404)
}


def router(lookups: Lookups) -> APIRouter:
    """Return the routes under `/v1/tables`: of models' latest versions."""
    routes = APIRouter(tags=["tables"])

    @routes.post(
        "/v1/tables/{table:path}:lookup",
        summary="Look up the embeddings of keys",
        responses=_LOOKUP_RESPONSES,
        openapi_extra=_LOOKUP_DOCUMENT,
        response_class=Response,
    )
    async def lookup(table: _TableName, request: Request) -> Response:
        return await _serve(lookups, "lookup", request, table)

    @routes.post(
        "/v1/tables:lookup",
        summary="Look up keys in several tables at once",
        responses=_TABLES_RESPONSES,
        openapi_extra=_TABLES_DOCUMENT,
        response_class=Response,
    )
    async def tables_lookup(request: Request) -> Response:
        return await _serve(lookups, "tables", request)

    @routes.get(
        "/v1/tables/{table:path}/rows/{key}",
        summary="Look up the embedding of one key",
        responses=_ROW_RESPONSES,
        openapi_extra=_ROW_DOCUMENT,
        response_class=Response,
    )
    async def row(table: _TableName, key: str, request: Request) -> Response:
        return await _serve(lookups, "row", request, table, key)

    @routes.get("/v1/tables", summary="List the tables", responses=_LISTING_RESPONSES, openapi_extra=_LISTING_DOCUMENT)
    async def tables(request: Request) -> dict[str, Any]:
        lookups.observer.authorize(request.headers, ())
        limits = {"max_keys": lookups.settings.max_keys, "max_values": lookups.settings.max_values}
        model = named_model(request)
        export = request.headers.get(EXPORT_HEADER)
        if export is None and model is None and len(lookups.catalog.names()) > 1:
            return _listing_of_all(lookups.catalog, limits)
        version = lookups.catalog.of_export(export, model) if export else lookups.catalog.choose((), model)
        return {
            "model": version.model,
            "version": version.number,
            **_export(version),
            **_follow(lookups.catalog, version.model),
            "dialect": version.store.dialect,
            "limits": limits,
            "tables": _described_tables(version),
        }

    return routes


def named_model(request: Request) -> str | None:
    """Return the model that the URL names, or None. Raises `RequestError` if it names several."""
    return _only_one(request, "model")


def _only_one(request: Request, name: str) -> str | None:
    values = request.query_params.getlist(name)
    if len(values) > 1:
        raise RequestError(400, "bad_parameter", f"got the parameter '{name}' twice in the URL, expected it once")
    return values[0] if values else None


def _listing_of_all(catalog: Catalog, limits: dict[str, int]) -> dict[str, Any]:
    """Describe the tables of several models: each table says its own, and there is no one version of them all."""
    latest = {name: next(reversed(catalog.versions(name)), None) for name in catalog.names()}
    if not any(latest.values()):
        catalog.version()  # which says that there is none
    models = [
        {
            "model": name,
            "version": version.number if version else None,
            **(_export(version) if version else {}),
            **_follow(catalog, name),
            "dialect": version.store.dialect if version else None,
        }
        for name, version in latest.items()
    ]
    tables = [
        {"model": name, **table} for name, version in latest.items() if version for table in _described_tables(version)
    ]
    return {
        "model": None,
        "version": None,
        "dialect": None,
        "limits": limits,
        "models": models,
        "tables": tables,
    }


def _export(version: ServedVersion) -> dict[str, str]:
    """The export that the tables of a version are of, where it was one in two halves."""
    export = getattr(version.store, "export", None)
    return {"export": export} if export else {}


def _follow(catalog: Catalog, model: str) -> dict[str, Any]:
    """How a model follows its chain, where it does."""
    if model not in catalog.follows:
        return {}
    status = catalog.follows[model].status
    said = {
        "sequence": status.sequence,
        "lag_seconds": round(status.lag, 3),
        "moment": status.moment or None,
        "refused": dict(status.refused),
    }
    return {"follow": said | ({"trouble": status.trouble} if status.trouble else {})}


async def _serve(
    lookups: Lookups, kind: Literal["lookup", "tables", "row"], request: Request, table: str = "", key: str = ""
) -> Response:
    began = time.perf_counter()
    headers = request.headers
    body = b""
    missing, model = request.query_params.get("missing"), request.query_params.get("model")
    ask = Ask(
        kind,
        table,
        choose_codec(headers.get("content-type", ""), headers.get("accept", "")),
        key,
        missing,
        headers.get("content-encoding", "") if kind != "row" else "",
        headers,
        model,
    )
    try:
        for name in request.query_params:
            if name not in ("missing", "model"):  # a misspelt one would say nothing, and be believed
                raise RequestError(
                    400, "bad_parameter", f"got the parameter {name[:60]!r} in the URL, expected missing or model"
                )
        named_model(request)
        if _only_one(request, "missing") is not None:
            checked_missing(missing)
        answer = lookups.authorize(ask)
        if answer is None and kind != "row":
            body = await read_within(request.receive, headers, lookups.body_limit)
    except RequestError as error:
        answer = error_answer(error)
    if answer is None:
        small = lookups.size(ask, body) is Size.SMALL
        answer = lookups.answer(ask, body) if small else await lookups.answer_in_thread(ask, body)
    client = request.client
    lookups.tell(
        ask,
        replace(answer, body=b"") if "without_body" in request.scope else answer,
        began=began,
        bytes_in=len(body),
        client=(client.host, client.port) if client else None,
        short=False,
        request_id=request.scope.get("request_id", ""),
    )
    request.scope["told"] = True
    return await _response(lookups, answer, request.scope.get("http_version", "1.1"))


async def _response(lookups: Lookups, answer: Answer, http_version: str) -> Response:
    body = answer.body
    if body is None:
        blocks = lookups.blocks_of(answer)
        if http_version != "1.0":
            return StreamingResponse(blocks, answer.status, answer.headers, answer.media_type)
        body = b"".join([block async for block in blocks])  # HTTP/1.0 has no chunks
    return Response(body, answer.status, answer.headers, answer.media_type)


def _described_tables(version: ServedVersion) -> list[dict[str, Any]]:
    return [_described(table.schema) for table in version.store.tables.values()]


def _described(schema: TableSchema) -> dict[str, Any]:
    return {**describe_table(schema), "shard": schema.metadata.get("shard")}
