"""HTTP as the server speaks it: uvicorn's protocol, with a short way for lookups, time limits and a limit of
connections.

**The short way.** A lookup that comes as clients send it (HTTP/1.1, a head of plain headers, a body of known length)
on a connection where nothing else is in hand is answered here, from its bytes, without ASGI. Everything else goes the
usual way, through FastAPI, and so does whatever is doubtful about a request: a short way is not a second opinion on
what HTTP is. Both ways end in `Lookups`, and give the same answers.

A client sends the same head again and again, but for a few values: the length of the body, an id. From the second time
on, a lookup of such a shape is prepared: `Lookups.prepare` looks once at what is the same each time (who asks, what, in
which form), and C++ answers from segment to response what follows of it, as long as nothing changes of what is served
and to whom. Segments come to C++ first (`ShortWay`), which is armed while nothing is in hand on the connection, and
leaves to this file all that is not answered by a small 200. Lookups in the protocols of others are prepared, too; where
they are not, they go the usual way.

**What a connection is doing** is one of: nothing (`_open` is ""), in the middle of the "head" or the "body" of a
request, or having one answered. Nothing may take `keep_alive`, a head `header_timeout` and a body `body_timeout` from
its first byte; then the connection is closed, after a 408 if a request was begun. A client that does not read its
answer for `body_timeout` is cut off. One timer for each connection looks after all of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from kvtools import _snapshot
from kvtools._snapshot import PreparedLookup, ShortWay
from kvtools.errors import KvtoolsError, one_line
from kvtools.server.answer import Answer
from kvtools.server.codecs import choose_codec
from kvtools.server.lookups import Ask, Lookups, Size, error_answer
from kvtools.server.prepared import HOLES, Hole, Inference, Shape, shape_of
from kvtools.server.request import RequestError
from kvtools.server.request_ids import request_id

_log = logging.getLogger("kvtools.serve")

_HEAD_LIMIT = 65536
_AROUND_A_HEADER = 4  # bytes: colon, space and the end of the line
# Heads are remembered, as a client sends the same one with each request.
_HEADS_KEPT = 1024
_LONGEST_KEPT = 2048
# Beyond this many connections over the limit, or this share of it, there is not even a 503.
_REFUSALS = 256
_REFUSED_SHARE = 1 / 8
_REFUSAL_TIME = 1.0
# Who asks whether the server lives is answered also where all connections are taken.
_PROBES = (b"GET /livez ", b"GET /readyz ", b"GET /healthz ", b"HEAD /livez ", b"HEAD /readyz ", b"HEAD /healthz ")

_LINE = re.compile(
    rb"(?:POST (?P<tables>/v1/tables:lookup)|POST /v1/tables/(?P<table>[\w./~@!$&'()*+,;=:-]*):lookup"
    rb"|GET /v1/tables/(?P<of>[\w./~@!$&'()*+,;=:-]*)/rows/(?P<key>-?[0-9]{1,20}))"
    rb"(?:\?model=(?P<model>[\w.-]+))?(?:(?(model)&|\?)missing=(?P<missing>zeros|default|error))? HTTP/1\.1",
    re.ASCII,
)
_INFERENCE = re.compile(
    rb"POST (?:/v1/models/(?P<predicts>[\w.-]+)"
    rb"(?:/versions/(?P<number>[0-9]{1,18})|/labels/(?P<label>[\w.-]+))?:predict"
    rb"|/v2/models/(?P<infers>[\w.-]+)(?:/versions/(?P<version>[\w.-]+))?/infer) HTTP/1\.1",
    re.ASCII,
)
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*((?:[!-~](?:[ \t!-~]*[!-~])?)?)[ \t]*")
_LENGTH = re.compile("[0-9]{1,12}")
# Headers that say that a request is not of the plain kind.
_UNUSUAL = frozenset(("transfer-encoding", "expect", "upgrade", "content-encoding", "trailer", "te", "http2-settings"))


@dataclass(slots=True)
class _Head:
    """A head of the plain kind: what it asks for, how long its body is, and what in it may be another each time.

    `shape` is what other heads have in common with it: None until a second one of it comes.
    """

    ask: Ask | Inference
    length: int
    holes: list[tuple[int, int, int]]
    shape: Shape | None = None


class _Way(Enum):
    """What has become of a lookup: it is answered; or what follows has to wait; or it goes the usual way."""

    DONE = 1
    LATER = 2
    USUAL = 3


def read_head(head: bytes) -> _Head | None:
    """Read the head of a lookup (with the empty line that ends it), or return None: it goes the usual way."""
    line, *fields = head[:-4].split(b"\r\n")
    asked = _LINE.fullmatch(line)
    inference = _INFERENCE.fullmatch(line) if asked is None else None
    if asked is None and inference is None:
        return None
    headers: dict[str, str] = {}
    holes: list[tuple[int, int, int]] = []
    at = len(line) + 2
    for each in fields:
        matched = _HEADER.fullmatch(each)
        if matched is None:
            return None
        name = matched[1].decode().lower()
        if name in headers or name in _UNUSUAL:
            return None
        headers[name] = matched[2].decode()
        if name in HOLES and matched[2]:
            holes.append((at + matched.start(2), at + matched.end(2), HOLES[name]))
        at += len(each) + 2
    if headers.get("connection", "keep-alive").lower() != "keep-alive":
        return None
    length = headers.get("content-length")
    if inference is not None:
        if length is None or not _LENGTH.fullmatch(length):
            return None
        return _Head(_inference(inference, headers), int(length), holes)
    assert asked is not None
    codec = choose_codec(headers.get("content-type", ""), headers.get("accept", ""))
    missing = asked["missing"].decode() if asked["missing"] else None
    model = asked["model"].decode() if asked["model"] else None
    if asked["key"] is not None:
        if length is not None:
            return None
        ask = Ask("row", asked["of"].decode(), codec, asked["key"].decode(), missing, "", headers, model)
        return _Head(ask, 0, [(*asked.span("key"), Hole.KEY), *holes])
    if length is None or not _LENGTH.fullmatch(length):
        return None
    if asked["tables"] is not None:
        return _Head(Ask("tables", "", codec, "", missing, "", headers, model), int(length), holes)
    return _Head(Ask("lookup", asked["table"].decode(), codec, "", missing, "", headers, model), int(length), holes)


def _inference(asked: re.Match[bytes], headers: Mapping[str, str]) -> Inference:
    part = {name: text.decode() for name, text in asked.groupdict(b"").items()}
    if part["predicts"]:
        return Inference("predict", part["predicts"], part["number"], part["label"], headers)
    return Inference("infer", part["infers"], part["version"], "", headers)


class LookupProtocol(HttpToolsProtocol):
    """One connection; see the top of this file. `lookups` is set by `make_protocol`."""

    lookups: Lookups
    heads: dict[bytes, _Head]
    shapes: dict[bytes, Shape]
    # Not in the instance's dictionary: with these it would be too large for Python's fast access to attributes.
    __slots__ = (
        "_answering",
        "_closing",
        "_default_lines",
        "_defaults",
        "_ended",
        "_gathered",
        "_gathering",
        "_head_bytes",
        "_open",
        "_prepared",
        "_refused",
        "_short",
        "_since",
        "_stalled",
        "_timer",
    )

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._defaults: list[tuple[bytes, bytes]] = []
        self._default_lines = b""
        self._open = ""  # "head" or "body" of a request that is not whole
        self._since = 0.0  # when that began, or when there was nothing to do
        self._head_bytes = (
            0  # of a head that is not whole, as they came; those of its first segment only if it began it
        )
        self._requests = 0  # that were whole, on the usual way
        self._field_bytes = 0  # of the parts of the head that is read
        self._gathered = bytearray()  # a lookup on the short way that is not whole; or what came while one is answered
        self._gathering: _Head | None = None
        self._prepared: PreparedLookup | None = None  # of the last head
        self._short = ShortWay()
        # uvloop keeps what it finds here, so that it is called without Python in between.
        self.data_received = self._short.received  # type: ignore[method-assign]
        self._answering = False  # a lookup of the short way is on a thread
        self._closing = False  # no more requests after the one in hand
        self._refused = False
        self._ended = False  # the client sends no more
        self._stalled: float | None = None  # since when the client does not read
        self._timer: asyncio.TimerHandle | None = None

    # ---- What comes

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or refuse: beyond the limit of connections there is a 503, at once."""
        super().connection_made(transport)
        own = transport.get_extra_info("socket")
        descriptor = -1 if own is None or self.scheme == "https" else own.fileno()
        self._short.begin(self._received, transport, self.server_state, descriptor, self.lookups.spin(self.loop))
        self._since = self.loop.time()
        most = self.lookups.settings.max_connections
        over = len(self.connections) - most
        if over > max(1, min(_REFUSALS, most * _REFUSED_SHARE)):
            transport.abort()
        elif over > 0:
            self._refused = True
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        """End; an answer that a thread is at work on is thrown away."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._gathered.clear()
        self._short.end()
        super().connection_lost(exc)

    def _received(self, data: bytes) -> None:
        """Take a segment that `_short` does not answer: as long as it has whole lookups, else on the usual way."""
        self._short.disarm()
        if self._refused:
            self._refuse_unless_probe(data)
        elif self._gathering is not None:
            self._gather(self._gathering, data)
        elif self._answering or self._stalled is not None:
            self._hold(data)
        elif self._open or (self.cycle is not None and not self.cycle.response_complete):
            self._feed(data)
        else:
            self._take(data)
            # Only where nothing is in hand. Whatever else changes that, `_received` apart, disarms first.
            prepared = self._prepared
            if (
                prepared is not None
                and prepared.valid
                and not (self._answering or self._closing or self._gathering or self._open)
                and self._stalled is None
                and (self.cycle is None or self.cycle.response_complete)
            ):
                self._short.arm(prepared)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Go on for a client that sends no more and still reads, until it has its answers."""
        if self._open or self.scheme == "https" or not self._in_hand():
            return None  # closes
        self._ended = True
        return True

    def _in_hand(self) -> bool:
        """Whether there is an answer to give."""
        return bool(self._answering or self._gathered or (self.cycle is not None and not self.cycle.response_complete))

    def _take(self, data: bytes) -> None:
        heads, at = self.heads, 0
        while at < len(data):
            if self._prepared is not None and not self._closing:
                state = self.server_state
                if self._defaults is not state.default_headers:
                    self._read_defaults()
                answered = self._prepared.answer(data, at, self._default_lines)
                if answered is not None:
                    responses, at, count = answered
                    self.transport.write(responses)
                    state.total_requests += count
                    self._since = self.loop.time()
                    if self._stalled is None:
                        continue
                    if at < len(data):
                        self._hold(data[at:])
                    return
            body = data.find(b"\r\n\r\n", at) + 4
            if body < 4 or body - at > _HEAD_LIMIT:
                break
            text = data[at:body]
            head = heads.get(text)
            if head is None:
                head = read_head(text)
                if head is None:
                    break
                if len(text) <= _LONGEST_KEPT:
                    if len(heads) >= _HEADS_KEPT:
                        heads.clear()
                    heads[text] = head
            if head.length > self.lookups.body_limit:
                break
            if self._prepare(head, text):
                continue
            ask = head.ask
            if isinstance(ask, Inference):
                break
            if self.timeout_keep_alive_task is not None:
                self._unset_keepalive_if_required()
            end = body + head.length
            if len(data) < end:
                self._gathering = head
                self._gathered[:] = data[at:]
                self._begin("body")
                return
            way = self._answer(ask, data[body:end])
            if way is _Way.USUAL:
                break
            at = end
            if way is _Way.LATER:
                self._hold(data[at:])
                return
        if at < len(data):
            self._feed(data[at:])

    def _prepare(self, head: _Head, text: bytes) -> bool:
        """Have lookups of a head prepared, if they can be; return whether that is worth a try which was not made.

        The first one of a shape is not: its client may send no other.
        """
        shape = head.shape
        if shape is None:
            if len(text) > _LONGEST_KEPT:
                return False
            own = shape_of(text, head.holes)
            shape = head.shape = self.shapes.get(own)
            if shape is None:
                if len(self.shapes) >= _HEADS_KEPT:
                    self.shapes.clear()
                self.shapes[own] = Shape()
                return False
        if shape.prepared is None or not shape.prepared.valid:
            shape.prepared = self.lookups.prepare(head.ask, text, head.holes)
        tried = self._prepared
        self._prepared = shape.prepared
        return shape.prepared is not None and shape.prepared is not tried

    def _gather(self, head: _Head, data: bytes) -> None:
        self._gathered += data
        end = self._gathered.find(b"\r\n\r\n") + 4
        if len(self._gathered) < end + head.length:
            return
        self._open = ""
        self._gathering = None
        self._resume()

    def _hold(self, data: bytes) -> None:
        self._gathered += data
        if len(self._gathered) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()

    def _resume(self) -> None:
        """Go on with what was gathered or held."""
        data = bytes(self._gathered)
        self._gathered.clear()
        self.flow.resume_reading()
        if data and not self.transport.is_closing():
            self._received(data)

    def _feed(self, data: bytes) -> None:
        """The usual way."""
        was_head, before = self._open == "head", self._requests
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._open == "head" and not self.transport.is_closing():
            if self._requests != before:  # most of what came is of other requests
                self._head_bytes = 0
            else:
                self._head_bytes = len(data) + (self._head_bytes if was_head else 0)
            if self._head_bytes > _HEAD_LIMIT:
                self._refuse_head()

    def _parse(self, data: bytes) -> None:
        """Have the parser take what came.

        A request that offers to go over to another protocol (h2c, as the clients of Java and curl do) is read again
        without the offer, which a server need not take: the parser would take its body for that protocol's.
        """
        try:
            while True:
                try:
                    self.parser.feed_data(data)
                    return
                except HttpParserUpgrade as offer:
                    version = self.parser.get_http_version().encode()
                    line = b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)
                    fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
                    data = b"\r\n".join([line, *fields, b"", data[offer.args[0] :]])
                    self.parser = HttpRequestParser(self)
                    with contextlib.suppress(AttributeError):  # httptools before 0.6.3
                        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        except HttpParserError:
            self.send_400_response("")

    def _refuse_head(self) -> None:
        self._fail(431, "head_too_large", f"the head of the request is over {_HEAD_LIMIT} bytes")

    # ---- The short way

    def _answer(self, ask: Ask, body: bytes) -> _Way:
        """Answer a whole lookup, or see to it; what comes after it has to wait where its answer is not written."""
        began = time.perf_counter()
        lookups = self.lookups
        name = request_id(ask.headers)
        size = lookups.size(ask, body)
        if size is Size.STREAMED:
            return _Way.USUAL
        answer = lookups.authorize(ask)
        if answer is None:
            if size is Size.LARGE:
                self._answering = True
                task = self.loop.create_task(self._answer_in_thread(ask, body, began, name))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
                return _Way.LATER
            answer = lookups.answer(ask, body)
        self._write(answer, name)
        lookups.tell(ask, answer, began=began, bytes_in=len(body), client=self.client, short=True, request_id=name)
        return _Way.DONE if self._stalled is None else _Way.LATER

    async def _answer_in_thread(self, ask: Ask, body: bytes, began: float, name: str) -> None:
        answer = await self.lookups.answer_in_thread(ask, body)
        self._answering = False
        if not self.transport.is_closing():
            self._write(answer, name)
            self.lookups.tell(
                ask, answer, began=began, bytes_in=len(body), client=self.client, short=True, request_id=name
            )
            if self._stalled is None:
                self._resume()
            self._close_if_ended()

    def _close_if_ended(self) -> None:
        if self._ended and not self._in_hand() and not self.transport.is_closing():
            self.transport.close()

    def _write(self, answer: Answer, request: str) -> None:
        body = answer.body
        assert body is not None
        if self._defaults is not self.server_state.default_headers:
            self._read_defaults()
        parts = [STATUS_LINE[answer.status], self._default_lines]
        parts += [b"%s: %s\r\n" % (name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
        parts.append(
            b"content-length: %d\r\ncontent-type: %s\r\nx-request-id: %s\r\n"
            % (len(body), answer.media_type.encode(), request.encode())
        )
        if self._closing:
            parts.append(b"connection: close\r\n")
        parts += [b"\r\n", body]
        self.transport.write(b"".join(parts))
        self.server_state.total_requests += 1
        self._since = self.loop.time()
        if self._closing:
            self.transport.close()

    def _read_defaults(self) -> None:
        self._defaults = self.server_state.default_headers
        self._default_lines = b"".join([b"%s: %s\r\n" % header for header in self._defaults])

    # ---- The usual way, and where a request is in it

    def on_message_begin(self) -> None:
        """Note that a head has begun."""
        self._begin("head")
        self._field_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Count the bytes of a head."""
        self._field_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count the bytes of a head."""
        self._field_bytes += len(name) + len(value) + _AROUND_A_HEADER
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Note that a body has begun, unless the head is over its limit; one may come whole, in one segment."""
        if self._field_bytes > _HEAD_LIMIT:
            self._refuse_head()
            raise ValueError("the head is too large")  # has the parser stop
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("this is no proxy")
        if self.parser.should_upgrade():
            return  # it is read again
        self._begin("body")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that a request is whole."""
        if self.parser.should_upgrade():
            return
        self._open = ""
        self._requests += 1
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Note that there is nothing to do, unless the next request has begun."""
        super().on_response_complete()
        self._unset_keepalive_if_required()  # this class has a timer of its own
        if not self._open:
            self._since = self.loop.time()
        self._close_if_ended()

    def shutdown(self) -> None:
        """Close as soon as the request in hand has its answer, at once if there is none whose head is whole."""
        self._closing = True
        self._short.disarm()
        if self._gathering is None and not self._answering:
            super().shutdown()

    def pause_writing(self) -> None:
        """Note that the client does not read."""
        self._stalled = self.loop.time()
        self._short.disarm()
        super().pause_writing()
        self._arm()

    def resume_writing(self) -> None:
        """Go on with what the client sent meanwhile."""
        self._stalled = None
        super().resume_writing()
        if self._gathered and self._gathering is None and not self._answering:
            self._resume()
        self._close_if_ended()

    # ---- Limits

    def _begin(self, what: str) -> None:
        self._open = what
        self._since = self.loop.time()
        self._arm()

    def _deadline(self) -> float:
        settings = self.lookups.settings
        if self._stalled is not None:
            return self._stalled + settings.body_timeout
        if self._refused:
            return self._since + _REFUSAL_TIME
        if not self._open:
            return max(self._since, self._short.since) + settings.keep_alive
        limit = {"head": settings.header_timeout, "body": settings.body_timeout}[self._open]
        return self._since + limit

    def _arm(self) -> None:
        """See to it that the timer fires at the deadline, or before it."""
        deadline = self._deadline()
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return
            self._timer.cancel()
        self._timer = self.loop.call_at(deadline, self._look)

    def _look(self) -> None:
        """The timer fired: end what has taken too long, or look again."""
        self._timer = None
        now = self.loop.time()
        if self.transport.is_closing():
            if self._stalled is not None and now >= self._deadline():
                self.transport.abort()
            elif self._stalled is not None:
                self._arm()
            return
        answering = self._answering or (self.cycle is not None and not self.cycle.response_complete)
        if self._stalled is None and answering and self._open != "body":
            # How long an answer takes is not the client's doing. A next request that has begun waits, too.
            self._timer = self.loop.call_at(now + self.lookups.settings.header_timeout, self._look)
        elif now < self._deadline():
            self._arm()
        elif self._stalled is not None:
            self.transport.abort()
        elif self._refused:
            self._refuse()
        elif self._open:
            limit = self._deadline() - self._since
            self._fail(408, "timeout", f"the {self._open} of the request did not come within {limit:g} s")
        else:
            self.transport.close()

    def _refuse_unless_probe(self, data: bytes) -> None:
        if self.cycle is not None or data.startswith(_PROBES):
            self._feed(data)
            if self.cycle is not None:
                self.cycle.keep_alive = False
        else:
            self._refuse()

    def _refuse(self) -> None:
        most = self.lookups.settings.max_connections
        message = f"there are {most} connections, which is the most at a time; try again, or keep connections open"
        self._fail(503, "too_many_connections", message, {"Retry-After": "1"})

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, as every error is answered, and say whose it was and what is wrong with it."""
        host = "a client" if not self.client else f"{self.client[0]}:{self.client[1]}"
        _log.warning("%s sent what is no HTTP that this server reads: %s", host, one_line(str(sys.exc_info()[1]))[:200])
        self._fail(400, "bad_request", "the request is no HTTP that this server reads")

    def _fail(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        """End the connection with an error, unless an answer is under way that it would be in the middle of."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and self._gathering is None:
            # The request that fails is the one whose body is open, or the next after the last answer.
            if self._open == "body":
                answered = cycle.response_started or bool(self.pipeline)
            else:
                answered = not cycle.response_complete
            if answered:
                self.transport.close()
                return
        if self._answering:
            self.transport.close()
            return
        answer = error_answer(RequestError(status, code, message, headers))
        self._closing = True
        self._short.disarm()
        self._open = ""
        name = request_id({})
        self._write(answer, name)
        self.lookups.tell(
            None, answer, began=time.perf_counter(), bytes_in=0, client=self.client, short=True, request_id=name
        )


def try_connection(lookups: Lookups, loop: asyncio.AbstractEventLoop) -> None:
    """Make once what each connection makes, before there are any: who connects would get no answer where that fails.

    Raises:
        KvtoolsError: the C++ module is of another version than its Python.
    """
    short = ShortWay()
    try:
        short.begin(_ignore, asyncio.Transport(), object(), -1, lookups.spin(loop))
    except (TypeError, AttributeError) as error:
        raise KvtoolsError(
            f"serving: the C++ module '{_snapshot.__file__}' is of another version than the Python beside it, so no "
            f"connection could be answered ({one_line(str(error))[:200]}); install kvtools anew, with its modules"
        ) from error
    short.end()


def _ignore(data: bytes) -> None:
    del data


def make_protocol(lookups: Lookups) -> type[LookupProtocol]:
    """Return the protocol that answers from `lookups`, for `uvicorn.Config(http=...)`."""
    return type("LookupProtocol", (LookupProtocol,), {"lookups": lookups, "heads": {}, "shapes": {}, "__slots__": ()})
