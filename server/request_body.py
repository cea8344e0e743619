"""A request's body, whole and decoded, within a limit."""

from __future__ import annotations

import zlib

from fastapi import Request
from starlette.requests import ClientDisconnect

from kvtools.server.protocol_error import ProtocolError, invalid
from kvtools.server.request import body_limit
from kvtools.server.settings import Settings

# How much of a body that is too large is read and dropped: a client that is still sending when the
# connection is closed may never see the answer.
_DRAINED_BYTES = 4 << 20
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


def limit_of(settings: Settings) -> int:
    """Return how many bytes a body may have, once decoded."""
    return settings.max_body_bytes or body_limit(settings.max_keys)


async def read_within(request: Request, limit: int) -> bytes | None:
    """Return the body as it was sent, None if it is over `limit` bytes; raises `ClientDisconnect`."""
    chunks, total = [], 0
    async for chunk in request.stream():
        total += len(chunk)
        if total <= limit:
            chunks.append(chunk)
        elif total > limit + _DRAINED_BYTES:
            break
    return b"".join(chunks) if total <= limit else None


async def read_body(request: Request, settings: Settings) -> bytes:
    """Return the body, unpacked if it is gzip or deflate; raises a `ProtocolError`."""
    limit = limit_of(settings)
    try:
        body = await read_within(request, limit)
    except ClientDisconnect:
        raise ProtocolError("CANCELLED", "the client went away") from None
    if body is None:
        raise _too_large(limit)
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in _WINDOWS:
        raise ProtocolError(
            "INVALID_ARGUMENT",
            f"got Content-Encoding '{encoding[:40]}', expected gzip, deflate or none",
            status=415,
        )
    decoder = zlib.decompressobj(_WINDOWS[encoding])
    try:
        unpacked = decoder.decompress(body, limit + 1)
    except zlib.error:
        raise invalid(f"the body is no {encoding}, though its Content-Encoding says so") from None
    if len(unpacked) > limit or decoder.unconsumed_tail:
        raise _too_large(limit)
    if not decoder.eof:
        raise invalid(f"the body is cut off: its {encoding} has no end")
    return unpacked


def _too_large(limit: int) -> ProtocolError:
    return ProtocolError("INVALID_ARGUMENT", f"the body is over {limit} bytes; send fewer ids a request", status=413)
