"""A request's body, whole and decoded, within a limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.types import Receive

from kvtools.server.protocol_error import ProtocolError, of_request
from kvtools.server.request import RequestError, body_too_large, decode_body, way_out

# How much of a body that is too large is read and dropped: a client that is still sending when the
# connection is closed may never see the answer.
_DRAINED_BYTES = 4 << 20

Model = TypeVar("Model", bound=BaseModel)


async def read_within(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    """Return the body as it was sent; raises `RequestError` if it is over `limit` bytes, or the client went away."""
    length = headers.get("content-length", "")
    if "expect" in headers and length.isdecimal() and int(length) > limit:
        raise body_too_large(limit)  # before the client sends it
    chunks, total, more = [], 0, True
    while more and total <= limit + _DRAINED_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError(400, "disconnected", "the client went away")
        chunk = message.get("body", b"")
        total += len(chunk)
        if total <= limit:
            chunks.append(chunk)
        more = message.get("more_body", False)
    if total > limit:
        raise body_too_large(limit)
    return b"".join(chunks)


async def read_model(request: Request, kind: type[Model], limit: int) -> Model:
    """Return a JSON body as a `kind`, whatever its Content-Type says; raises `RequestError`."""
    body = await read_within(request.receive, request.headers, limit)
    body = decode_body(body, request.headers.get("content-encoding", ""), limit)
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, ('body', *each['loc'])))}: {each['msg']}" for each in error.errors())
        raise RequestError(400, "bad_request", f"{wrong}; see /docs") from None


def model_schema(kind: type[BaseModel]) -> dict[str, Any]:
    """Return what the interface's description says of a body that `read_model` reads."""
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": kind.model_json_schema()}}}}


async def read_ids(receive: Receive, headers: Mapping[str, str], limit: int) -> bytes:
    """Return the body of a request in a protocol of others, as it was sent; raises a `ProtocolError`."""
    try:
        return await read_within(receive, headers, limit)
    except RequestError as error:
        raise _in_protocol(error, limit) from None


def decode_ids(body: bytes, encoding: str, limit: int) -> bytes:
    """Return what `read_ids` gave without its `Content-Encoding`; raises a `ProtocolError`."""
    try:
        return decode_body(body, encoding, limit)
    except RequestError as error:
        raise _in_protocol(error, limit) from None


def _in_protocol(error: RequestError, limit: int) -> ProtocolError:
    if error.code == "disconnected":
        return ProtocolError("CANCELLED", error.message)
    if error.status == 413:
        message = f"the body is over {limit} bytes; {way_out('ids')}"
        return ProtocolError("INVALID_ARGUMENT", message, status=413)
    return of_request(error)
