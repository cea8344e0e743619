"""Lookups as a service: what is asked, where it is worked on, and an answer whatever happens.

Both ways on which a lookup comes, FastAPI's (`tables_api.py`) and the short one (`http_protocol.py`), make an `Ask` and
have it answered here. So both give the same bytes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from kvtools._snapshot import PreparedLookup, Spin
from kvtools.errors import KvtoolsError, UnknownTableError
from kvtools.lookup_frame import MISSING
from kvtools.server.answer import FRAMES, STREAMED_NUMBERS, Answer, answer_lookup, answer_row, answer_tables
from kvtools.server.catalog import (
    AmbiguousTableError,
    Catalog,
    NoVersionError,
    OtherExportError,
    ServedVersion,
    UnknownModelError,
    UnknownVersionError,
)
from kvtools.server.codecs import JSON, Codec
from kvtools.server.observer import Answered, Observer, Tallied
from kvtools.server.prepared import MOST_NUMBERS, Holes, Inference, What, prepare, prepare_frame
from kvtools.server.request import RequestError, decode_body, tables_asked
from kvtools.server.request_ids import MADE
from kvtools.server.settings import Settings
from kvtools.server.spinning import make_spin
from kvtools.split_manifest import EXPORT_HEADER

# A lookup that makes more numbers than this goes to a thread: about a third of a millisecond of work.
_SMALL_BINARY = 65_536
_SMALL_JSON = 8_192
_UNKNOWN: dict[type[Exception], str] = {
    UnknownTableError: "unknown_table",
    UnknownModelError: "unknown_model",
    UnknownVersionError: "unknown_version",
}
# Why it cannot be told which version is asked.
_NOT_CHOSEN = (AmbiguousTableError, OtherExportError, UnknownTableError, UnknownModelError, UnknownVersionError)


class Size(Enum):
    """How a lookup is answered: at once, by a thread, or by a thread and in blocks."""

    SMALL = 1
    LARGE = 2
    STREAMED = 3


_log = logging.getLogger("kvtools.server")


@dataclass(frozen=True, slots=True)
class Ask:
    """A request for rows, but for its body. `headers` have names in lower case; `model` is None if none is named."""

    kind: Literal["lookup", "tables", "row"]
    table: str
    codec: Codec
    key: str = ""
    missing: str | None = None
    encoding: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None


class Lookups:
    """Answers what is asked of models' latest versions in `catalog`, within `settings`.

    The model is the one that is named, or the only one that has the table; see `Catalog.model_of`.

    Small lookups are answered at once, on the event loop; others by threads, at most `settings.max_concurrent` at a
    time. `observer` is asked before, and told after.
    """

    def __init__(self, catalog: Catalog, settings: Settings | None = None, observer: Observer | None = None) -> None:
        self.catalog = catalog
        self.settings = settings or Settings()
        self.observer = observer or Observer()
        self.body_limit = self.settings.body_limit
        self.running = 0
        self._spin: tuple[asyncio.AbstractEventLoop, Spin | None] | None = None
        workers = min(self.settings.max_concurrent, 2 * (os.cpu_count() or 1) + 2)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="lookup")

    def size(self, ask: Ask, body: bytes) -> Size:
        """Tell how much of an answer `ask` has, at most, as far as can be told without reading the body."""
        keys = 1
        if ask.kind != "row":
            keys = body.count(b",") + 1 if ask.codec.reads == "json" else len(body) // 8
        try:
            if self._by_body(ask):
                models = map(self.catalog.versions, self.catalog.names())
                stores = [versions[-1].store for versions in models if versions]
            else:
                stores = [self._version(ask).store]
            if ask.kind == "tables":
                dim = max((table.schema.dim for store in stores for table in store.tables.values()), default=0)
            else:
                dim = stores[0].tables[ask.table].schema.dim
        except (KeyError, *_NOT_CHOSEN):
            return Size.SMALL  # an error, and as such soon made
        numbers, json = keys * dim, ask.codec.writes == "json"
        if json and numbers > STREAMED_NUMBERS:
            return Size.STREAMED
        # What is packed may be more than it looks, and rows that are not in memory are waited for by a thread.
        warm = all(store.warm for store in stores)
        if ask.encoding or not warm or numbers > (_SMALL_JSON if json else _SMALL_BINARY):
            return Size.LARGE
        return Size.SMALL

    def answer(self, ask: Ask, body: bytes) -> Answer:
        """Answer on the thread that calls; never raises."""
        try:
            version = None if self._by_body(ask) else self._version(ask)
            body = decode_body(body, ask.encoding, self.body_limit)
            if version is None:
                version = self.catalog.choose(tables_asked(body, frame=ask.codec.reads == "frame"))
            if self._by_table(ask):  # the body told which, or models came and went since `authorize`
                self.observer.authorize_model(ask.headers, version.model)
            return self._answer(version, ask, body)
        except Exception as error:
            return error_answer(error)

    def prepare(self, ask: Ask | Inference, head: bytes, holes: Holes = ()) -> PreparedLookup | None:
        """Return what answers `ask` from the bytes of its requests, as long as it is valid, or None: nothing does.

        Args:
            ask: what the head asks for.
            head: the head, with the empty line that ends it.
            holes: what in `head` may be another in each request.
        """
        if isinstance(ask, Inference):
            return prepare(self.catalog, self.settings, self.observer, ask, head, holes)
        frame = ask.kind == "tables"
        if ask.encoding or (ask.codec != FRAMES if frame else "frame" in (ask.codec.reads, ask.codec.writes)):
            return None
        epoch = self.catalog.epoch  # before what is looked at in it
        if self._by_body(ask) or self.authorize(ask) is not None:
            return None
        try:
            version = self._version(ask)
        except _NOT_CHOSEN:
            return None
        if not version.store.warm:
            return None
        row, binary = ask.kind == "row", ask.codec.reads == "binary"
        missing = ask.missing or ("error" if row else self.settings.missing)
        if frame:
            return prepare_frame(epoch, self.settings, self.observer, ask.headers, version, missing, head, holes)
        stored = version.store.tables.get(ask.table)
        tally = self.observer.tally(Tallied("http", ask.kind, ask.table, version.model))
        if tally is None or stored is None or stored.table is None or stored.schema.dim > MOST_NUMBERS:
            return None
        return PreparedLookup(
            epoch,
            What.LOOKUP,
            head,
            holes,
            [(ask.table.encode(), stored.table, tally, None if row else version.recent.get(ask.table))],
            row or binary,
            ask.codec.writes == "binary",
            MISSING.index(missing),
            1 if row else self.settings.max_keys,
            MOST_NUMBERS if row else min(MOST_NUMBERS, self.settings.max_values),
            version.number,
            MADE,
        )

    def spin(self, loop: asyncio.AbstractEventLoop) -> Spin | None:
        """Return what keeps `loop` from sleeping for a while after a lookup, or None: nothing does."""
        if self._spin is None or self._spin[0] is not loop:
            self._spin = loop, make_spin(self.settings, self.observer, loop)
        return self._spin[1]

    async def answer_in_thread(self, ask: Ask, body: bytes) -> Answer:
        """Answer on a thread of the pool, or that there are too many lookups just now; never raises."""
        if self.running >= self.settings.max_concurrent:
            return error_answer(
                RequestError(
                    429,
                    "too_busy",
                    f"{self.running} lookups are being worked on, which is the most at a time; try again",
                    {"Retry-After": "1"},
                )
            )
        self.running += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self.answer, ask, body)
        except RuntimeError as error:  # no thread can be started
            return error_answer(error)
        finally:
            self.running -= 1

    async def blocks_of(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the blocks of an answer, each made on a thread; a reader who is slow holds up nobody."""
        assert answer.blocks is not None
        blocks: Iterator[bytes] = answer.blocks
        loop = asyncio.get_running_loop()
        while (block := await loop.run_in_executor(self._threads, next, blocks, None)) is not None:
            yield block

    def authorize(self, ask: Ask) -> Answer | None:
        """Return an error where the observer lets nobody in, or where it cannot be told which model is asked.

        None lets in. Several tables are asked for later.
        """
        tables = () if ask.kind == "tables" else (ask.table,)
        try:
            model = None
            if ask.model is not None or self._by_table(ask):
                self.observer.authorize(ask.headers, ())  # who may ask nothing is told nothing of models
                if self._by_body(ask):
                    return None
                export = ask.headers.get(EXPORT_HEADER)
                by_export = export and self.catalog.of_export(export, ask.model).model
                model = by_export or self.catalog.model_of(tables, ask.model)
            self.observer.authorize_model(ask.headers, model)
            self.observer.authorize(ask.headers, tables)
        except (RequestError, *_NOT_CHOSEN) as error:
            return error_answer(error)
        return None

    def tell(
        self,
        ask: Ask | None,
        answer: Answer,
        *,
        began: float,
        bytes_in: int,
        client: tuple[str, int] | None,
        short: bool,
        request_id: str = "",
    ) -> None:
        """Tell the observer of an answer; `began` is of `time.perf_counter`."""
        self.observer.on_answer(
            Answered(
                ask.kind if ask else "",
                answer.status,
                answer.code,
                answer.counts,
                time.perf_counter() - began,
                bytes_in,
                len(answer.body or b""),
                client,
                ask.headers if ask else {},
                short,
                "http",
                request_id,
            )
        )

    def close(self) -> None:
        """Let the threads end; what they have begun they do not wait for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _by_table(self, ask: Ask) -> bool:
        """Whether the table tells which model is asked."""
        return ask.model is None and len(self.catalog.names()) > 1

    def _by_body(self, ask: Ask) -> bool:
        """Whether the tables that the body names tell which model is asked."""
        return ask.kind == "tables" and self._by_table(ask) and EXPORT_HEADER not in ask.headers

    def _version(self, ask: Ask) -> ServedVersion:
        if export := ask.headers.get(EXPORT_HEADER):
            return self.catalog.of_export(export, ask.model)
        return self.catalog.choose(() if ask.kind == "tables" else (ask.table,), ask.model)

    def _answer(self, version: ServedVersion, ask: Ask, body: bytes) -> Answer:
        if ask.kind == "lookup":
            return answer_lookup(version, ask.table, body, ask.codec, ask.missing, self.settings)
        if ask.kind == "row":
            return answer_row(version, ask.table, ask.key, ask.codec, ask.missing, self.settings)

        def authorize(tables: list[str]) -> None:
            self.observer.authorize(ask.headers, tables)

        return answer_tables(version, body, ask.codec, ask.missing, self.settings, authorize)


def error_answer(error: Exception) -> Answer:
    """Return the answer to a request that failed with `error`; what is no fault of the request goes to the log."""
    if isinstance(error, RequestError):
        answer = Answer(error.status, JSON, error_body(error.code, error.message), error.headers)
        answer.code = error.code
        return answer
    if isinstance(error, NoVersionError):
        return error_answer(RequestError(503, "not_ready", str(error), {"Retry-After": "1"}))
    if isinstance(error, OtherExportError):
        return error_answer(RequestError(503, "other_export", str(error)))
    if isinstance(error, AmbiguousTableError):
        return error_answer(RequestError(400, "ambiguous_table", str(error)))
    if code := _UNKNOWN.get(type(error)):
        return error_answer(RequestError(404, code, str(error)))
    _log.error("a lookup failed: %s", error, exc_info=None if isinstance(error, KvtoolsError) else error)
    return error_answer(RequestError(500, "internal", f"{type(error).__name__}; the server's log says more"))


def error_body(code: str, message: str) -> bytes:
    """Return the JSON of an error of our own interface."""
    document = {"error": {"code": code, "message": message}}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
