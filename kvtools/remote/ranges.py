"""One range of a remote file: read piece by piece, and on from where it stood when a connection died."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from kvtools.errors import BadInputError, KvtoolsError
from kvtools.remote.fault import ShortAnswerError, is_broken_off, is_passing, reason_of
from kvtools.remote.store import TRIES, Store, pause

Sink = Callable[[int, Any], None]
"""Takes bytes that have come, and the offset in the file at which they belong."""

_PIECE = 1 << 20
_PROGRESS = 1 << 16
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


def read_range(
    store: Store, name: str, shown: str, start: int, stop: int, size: int, identity: str, sink: Sink
) -> None:
    """Read bytes `start` to `stop` of a file of `size` bytes.

    A connection that dies, and an answer that is too short, are asked for again from the first byte that is missing;
    after `TRIES` in a row that brought next to nothing it is given up.

    Raises:
        BadInputError: the store refuses, breaks off again and again, gives other bytes than those that were asked for,
            or has another file there by now.
    """
    doing = f"reading '{shown}'"
    at, tries, most = start, 0, stop - start

    def take(offset: int, data: Any) -> None:
        nonlocal at
        if offset != at or at + len(data) > stop:
            raise BadInputError(f"{doing}: got bytes of another place than those that were asked for; open it again")
        sink(at, data)
        at += len(data)

    while at < stop:
        before = at
        end = min(stop, at + most)
        try:
            if store.scheme in ("s3", "s3a"):
                _of_s3(store, name, doing, at, end, size, identity, take)
            else:
                _of_any(store, name, doing, at, end, size, take)
            if at < end:
                raise ShortAnswerError(f"got {at - before} bytes of {end - before}")
        except KvtoolsError:
            raise
        except Exception as error:
            if not is_passing(error):
                raise BadInputError(f"{doing}: {reason_of(error)}") from error
            tries = 0 if at - before >= _PROGRESS else tries + 1
            if tries >= TRIES:
                raise BadInputError(f"{doing}, bytes {at} to {stop}: {reason_of(error)}") from error
            if is_broken_off(error) and at == before:
                # Where fsspec gives all of a range or nothing, a smaller one may come through.
                most = max(_PROGRESS, most // 2)
            pause(tries)
        else:
            tries = 0


def _of_any(store: Store, name: str, doing: str, start: int, stop: int, size: int, take: Sink) -> None:
    data = store.fs.cat_file(name, start=start, end=stop)
    if len(data) > stop - start:
        raise BadInputError(
            f"{doing}: got {len(data)} bytes of {stop - start} that were asked for: the server gives no ranges; copy"
            " the file, and name the copy"
        )
    take(start, data)


def _of_s3(store: Store, name: str, doing: str, start: int, stop: int, size: int, identity: str, take: Sink) -> None:
    from fsspec.asyn import sync

    sync(store.fs.loop, _stream_s3, store.fs, name, doing, start, stop, size, identity, take)


async def _stream_s3(
    fs: Any, name: str, doing: str, start: int, stop: int, size: int, identity: str, take: Sink
) -> None:
    """Hand on what comes as it comes, so that it is there when the connection dies before the end."""
    bucket, key, version = fs.split_path(name)
    asked: dict[str, Any] = {"Bucket": bucket, "Key": key, "Range": f"bytes={start}-{stop - 1}"}
    if version:
        asked["VersionId"] = version
    if identity.startswith('"'):
        asked["IfMatch"] = identity
    answer = await fs._call_s3("get_object", **asked)
    body = answer["Body"]
    try:
        told = _RANGE.fullmatch(answer.get("ContentRange") or "")
        if told is None and (start, stop) != (0, size):
            raise BadInputError(f"{doing}: the server gives no ranges; copy the file, and name the copy")
        if told is not None and (int(told[1]) != start or int(told[2]) >= stop or told[3] not in ("*", str(size))):
            raise BadInputError(
                f"{doing}: got {told[0]}, expected bytes {start}-{stop - 1}/{size}; it was changed while it was read,"
                " or the server is at fault: open it again"
            )
        at = start
        while piece := await body.read(_PIECE):
            take(at, piece)
            at += len(piece)
    finally:
        body.close()
