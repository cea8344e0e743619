"""One request and one answer of HTTP/1.1, as bytes; whoever has a socket moves them.

The standard library's `http.client` reads headers as those of a mail, which takes longer than a small lookup does,
and asyncio has no HTTP at all. What a server answers to a lookup is a small part of the protocol: RFC 9112.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtools import __version__
from kvtools.client.endpoint import Endpoint
from kvtools.client.errors import BadAnswerError

_SCRATCH = 1 << 16
_LONGEST_HEAD = 1 << 16
_LONGEST_CHUNK_LINE = 1 << 12
_BEGINNING = b"HTTP/"
_AGENT = f"kvtools/{__version__}"

Body = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Request:
    """A request: `target` begins with `/v1`; `headers` are those beside Host, User-Agent and Content-Length."""

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | memoryview = b""

    def bytes_for(self, endpoint: Endpoint) -> list[bytes | memoryview]:
        """Return what to send to a server: the head, and the body if there is one."""
        lines = [f"{self.method} {endpoint.prefix}{self.target} HTTP/1.1", f"Host: {endpoint.authority}"]
        lines += [f"User-Agent: {_AGENT}", *(f"{name}: {value}" for name, value in self.headers.items())]
        size = len(self.body) if isinstance(self.body, bytes) else self.body.nbytes
        if size or self.method == "POST":
            lines.append(f"Content-Length: {size}")
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")
        if not size:
            return [head]
        # A small body goes in one packet with its head.
        return [head + bytes(self.body)] if size <= 4096 else [head, self.body]


@dataclass
class Answer:
    """An answer: names of `headers` are in lower case; `body` is uint8 [length], one's own, and writable."""

    status: int
    headers: dict[str, str]
    body: Body

    def error(self) -> tuple[str, str]:
        """Return code and message of an error of `kvtools serve`; of another server, "" and what it says, in a line."""
        try:
            error = json.loads(self.body.tobytes())["error"]
            return str(error.get("code", "")), str(error.get("message", ""))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return "", " ".join(self.body[:2000].tobytes().decode("utf-8", "replace").split())[:300]


class AnswerReader:
    """Reads one answer: put bytes into `buffer()`, say how many by `received()`, until that is true.

    `keep_alive` then tells whether the connection may be used again.

    Raises, from `received` and `ended`:
        BadAnswerError: these bytes are no answer of HTTP/1.1, or a longer one than `max_body` bytes.
    """

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._scratch = memoryview(bytearray(_SCRATCH))
        self.reset()

    def reset(self) -> None:
        """Begin with another answer."""
        self._head = b""
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body: Body | None = None
        self._view: memoryview | None = None
        self._have = 0
        self._chunks: _Chunks | None = None
        self._pieces: list[bytes] | None = None
        self.begun = False
        self.keep_alive = False
        self.answer: Answer | None = None

    def buffer(self) -> memoryview:
        """Return where the next bytes go."""
        return self._scratch if self._view is None else self._view[self._have :]

    def received(self, count: int) -> bool:
        """Take `count` bytes that are in the buffer now; return whether the answer is whole."""
        self.begun = True
        if self._view is not None:
            self._have += count
            return self._whole_if(self._have == len(self._view))
        data = bytes(self._scratch[:count])
        if not self._status:
            data = self._head + data
            if not data.startswith(_BEGINNING[: len(data)]):
                raise _no_http(data)
            end = data.find(b"\r\n\r\n")
            while end >= 0:
                self._read_head(data[:end])
                data = data[end + 4 :]
                if self._status >= 200:
                    return self._begin_body(data)
                self._status, self._headers = 0, {}  # "100 Continue" and its like come before the answer.
                end = data.find(b"\r\n\r\n")
            if len(data) > _LONGEST_HEAD:
                raise BadAnswerError(f"got a head of over {_LONGEST_HEAD} bytes, expected an answer of HTTP")
            self._head = data
            return False
        return self._more(data)

    def ended(self) -> bool:
        """Note that the server closed the connection; return whether the answer is whole now."""
        if self._pieces is not None and self._chunks is None:
            self.keep_alive = False
            return self._finish(b"".join(self._pieces))
        return False

    def _read_head(self, head: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, rest = first.partition(" ")
        status = rest[:3]
        if version not in ("HTTP/1.1", "HTTP/1.0") or not (
            status.isascii() and status.isdecimal() and len(status) == 3
        ):
            raise _no_http(head)
        self._status = int(status)
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise BadAnswerError(f"got the header {line[:60]!r}, expected a name and a colon")
            self._headers[name.lower()] = value.strip()
        connection = self._headers.get("connection", "").lower()
        self.keep_alive = "close" not in connection and (version == "HTTP/1.1" or "keep-alive" in connection)

    def _begin_body(self, data: bytes) -> bool:
        if self._status in (204, 304):
            return self._finish(b"", data)
        if "chunked" in self._headers.get("transfer-encoding", "").lower():
            self._chunks, self._pieces = _Chunks(), []
            return self._more(data)
        length = self._headers.get("content-length")
        if length is None:
            self._pieces = []  # It ends with the connection.
            return self._more(data)
        if not (length.isascii() and length.isdecimal()) or int(length) > self._max_body:
            raise BadAnswerError(f"got an answer of {length[:20]} bytes, expected at most {self._max_body}")
        size = int(length)
        self._body = np.empty(size, np.uint8)
        self._have = min(len(data), size)
        self._body[: self._have] = np.frombuffer(data, np.uint8, self._have)
        if len(data) > size:
            self.keep_alive = False  # Nobody asked for more: the next answer would be another's.
        if self._have < size:
            self._view = self._body.data
        return self._whole_if(self._have == size)

    def _more(self, data: bytes) -> bool:
        assert self._pieces is not None
        if self._chunks is None:
            self._pieces.append(data)
        else:
            self._pieces += self._chunks.feed(data)
        self._have += len(data)
        if self._have > self._max_body:
            raise BadAnswerError(f"got an answer of over {self._max_body} bytes")
        if self._chunks is not None and self._chunks.ended:
            return self._finish(b"".join(self._pieces), self._chunks.rest)
        return False

    def _finish(self, body: bytes, rest: bytes = b"") -> bool:
        if rest:
            self.keep_alive = False
        self._body = np.frombuffer(body, np.uint8).copy()
        return self._whole_if(True)

    def _whole_if(self, whole: bool) -> bool:
        if whole:
            assert self._body is not None
            self.answer = Answer(self._status, self._headers, self._body)
        return whole


def _no_http(data: bytes) -> BadAnswerError:
    hint = ""
    if data[:1] in b"-+$*:":
        hint = " but one that speaks the Redis protocol"
    elif data[:1] in (b"\x15", b"\x16"):
        hint = " but one that speaks TLS (https://)"
    line = data.partition(b"\r\n")[0][:60]
    return BadAnswerError(
        f"got {line!r}, expected an answer of HTTP/1.1: this is no kvtools server{hint}; check the port of the URL"
    )


class _Chunks:
    """Takes a chunked body apart. `ended`: the last chunk was there; `rest`: what came behind it."""

    def __init__(self) -> None:
        self._pending = b""
        self._left = 0
        self._trailers = False
        self.ended = False
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes as they come; return what of the body is in them."""
        found: list[bytes] = []
        data = self._pending + data
        at = 0
        while not self.ended:
            if self._left > 2:
                piece = data[at : at + self._left - 2]
                found.append(piece)
                self._left -= len(piece)
                at += len(piece)
            if self._left > 2 or (self._left > 0 and len(data) - at < self._left):
                break
            if self._left:  # A line end behind the chunk.
                if data[at : at + 2] != b"\r\n":
                    raise BadAnswerError("got a chunk without its end, expected a chunked answer of HTTP/1.1")
                self._left, at = 0, at + 2
            end = data.find(b"\r\n", at)
            if end < 0:
                if len(data) - at > _LONGEST_CHUNK_LINE:
                    raise BadAnswerError("got an overlong line, expected a chunked answer of HTTP/1.1")
                break
            line = data[at:end]
            at = end + 2
            if self._trailers:
                self.ended = not line
                continue
            size = line.partition(b";")[0].strip()
            if not size or len(size) > 15 or size.strip(b"0123456789abcdefABCDEF"):
                raise BadAnswerError(f"got {line[:40]!r} as the size of a chunk, expected a hexadecimal number")
            self._left = int(size, 16) + 2
            if self._left == 2:
                self._left, self._trailers = 0, True
        if self.ended:
            self.rest = data[at:]
        else:
            self._pending = data[at:]
        return found
