"""Lookups for clients that speak only Redis: `MGET user_emb:17 user_emb:-3`, `HMGET user_emb 17 -3`.

A value is the row's numbers in the table's own type, little-endian; a key without a row gives null. Commands are read,
and rows written, in C++ (`kernels/src/serving/resp.h`), as many commands at once as have come. Tables that a connection
has looked up once are known to its reader, which is armed then: what comes goes to it first, and it answers lookups of
them from segment to socket without Python, until what is served changes, or to whom, or something else comes. What is
not a lookup is answered in `resp_commands.py`. Large lookups run in a thread of their own; a connection waits for its
answer before it goes on, so replies come in the order of the commands.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

from kvtools._snapshot import Epoch, RespReader, RespTables, Spin
from kvtools.errors import BadInputError, KvtoolsError
from kvtools.server.answer import TableCount
from kvtools.server.catalog import Catalog
from kvtools.server.observer import Answered, Observer, Tallied
from kvtools.server.request import RequestError
from kvtools.server.resp_commands import RespCommands, error, refusal
from kvtools.server.resp_tables import RespTable, Tables, answer_command
from kvtools.server.settings import Settings
from kvtools.server.spinning import make_spin
from kvtools.server.store import lookup_errors

_log = logging.getLogger("kvtools.server")
_LONGEST_WORD = 4096
_BYTES_PER_KEY = 256
_LEAST_BYTES = 1 << 20
_THREADS = 4
_SWEEP = 1.0
_MOST_REFUSED = 16  # connections beyond the limit that are waited for to read why, and to close
_DROPPED_BYTES = 4 << 20  # of a client that is still sending: closed at once, it might never see the error


class RespProtocol(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: RespServer) -> None:
        settings = server.settings
        self._server = server
        self._reader = RespReader(settings.max_keys, server.max_bytes, _LONGEST_WORD)
        self._commands = RespCommands(server.tables, server.count, server.next_id(), settings.max_keys, server.observer)
        self._transport: asyncio.Transport | None = None
        self._held = False  # a lookup is in a thread
        self._full = False  # the client does not read
        self._ended = False  # nothing more is answered
        self._ending = False  # nothing more comes
        self._dropped = 0
        self._known: RespTables | None = None  # what the reader may answer by itself
        self._peer: tuple[str, int] | None = None
        self._partial_since: float | None = None
        # uvloop keeps what it finds here, so that it is called without Python in between.
        self.data_received = self._reader.received  # type: ignore[method-assign]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take the connection, unless there are too many; see `asyncio.Protocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        peer = transport.get_extra_info("peername")
        self._peer = peer[:2] if peer else None
        own = transport.get_extra_info("socket")
        descriptor = -1 if own is None or transport.get_extra_info("sslcontext") is not None else own.fileno()
        self._reader.begin(self._received, self._go, self._transport, descriptor, self._server.spin)
        if not self._server.add(self):
            self._end(error("max number of clients reached"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection; see `asyncio.Protocol`."""
        self._ended = True
        self._reader.end()
        self._server.remove(self)

    def _received(self, data: bytes) -> None:
        """Answer what is whole, of bytes that the reader does not answer by itself."""
        if self._ended:
            self._dropped += len(data)
            if self._dropped > _DROPPED_BYTES and self._transport is not None:
                self._transport.close()
            return
        self._reader.feed(data)
        if not self._held and not self._full:
            self._go()

    def eof_received(self) -> bool:
        """Answer what has come, then close; see `asyncio.Protocol`."""
        self._ending = True
        return self._held or self._full

    def pause_writing(self) -> None:
        """Read no more before the client does; see `asyncio.Protocol`."""
        self._full = True
        self._reader.disarm()
        assert self._transport is not None
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on; see `asyncio.Protocol`."""
        self._full = False
        assert self._transport is not None
        if not self._held and not self._ended:
            self._transport.resume_reading()
            self._go()

    def check_time(self, now: float, limit: float) -> None:
        """End the connection if a command is half sent for too long, or a client sends on after the end."""
        if self._partial_since is None or self._held or now - self._partial_since <= limit:
            return
        if self._ended and self._transport is not None:
            self._transport.close()
        else:
            self._end(error(f"a command was not whole within {limit:g} s"))

    def drop(self) -> None:
        """Close the connection now; see `asyncio.Transport.abort`."""
        self._server.remove(self)
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        """Close the connection as soon as what is under way is answered."""
        if not self._held:
            self._end(b"")
        else:
            self._ended = True

    def _end(self, last: bytes) -> None:
        """Send a last reply, and close when the client does, or soon after."""
        self._ended = True
        self._reader.disarm()
        assert self._transport is not None
        if last and not self._transport.can_write_eof():  # TLS has no half-closed connections.
            self._transport.write(last)
            last = b""
        if not last:
            self._transport.close()
            return
        self._partial_since = self._server.now()
        self._transport.write(last)
        self._transport.write_eof()

    def _go(self, item: tuple[Any, ...] | None = ("more",)) -> None:
        """Answer all commands that are whole, as far as the client reads.

        `item` was read and is not answered: as `RespReader.run` returns it.
        """
        transport, reader = self._transport, self._reader
        assert transport is not None
        while item is not None and not self._ended:
            if item[0] == "more":
                if self._full:
                    break
                replies, item = reader.run(self._known, self._commands.resp3)
                if replies:
                    transport.write(replies)
                continue
            kind = item[0]
            if kind == "lookup":
                if not self._look_up(*item[1:]):
                    return
            elif kind == "command":
                begun = time.perf_counter()
                said = self._commands.headers, self._commands.selected
                reply = self._commands.answer(item[1])
                transport.write(reply)
                self._tell_command(begun, reply)
                if said != (self._commands.headers, self._commands.selected):
                    self._known = None
                if self._commands.quit:
                    self._end(b"")
            elif kind == "refused":
                transport.write(error(item[1]))
            else:
                self._end(error(item[1]))
            item = ("more",)
        if self._ended:
            return
        if self._ending and not self._full:
            self._end(b"")
            return
        if reader.partial:
            if self._partial_since is None:
                self._partial_since = self._server.now()
            return
        self._partial_since = None
        # Only where nothing is in hand. Whatever changes that, `_received` apart, disarms first.
        if self._known is not None and self._known.valid and not (self._full or self._ending):
            reader.arm(self._known, self._commands.resp3)

    def _look_up(self, name: bytes, keys: int, low: int, high: int) -> bool:
        """Answer a lookup; return False if a thread does, which then goes on."""
        begun = time.perf_counter()
        commands, tables, epoch = self._commands, self._server.tables, self._server.catalog.epoch
        assert self._transport is not None
        try:
            table = tables.get(name, commands.selected)
            self._server.observer.authorize_model(commands.headers, table.model)
            self._server.observer.authorize(commands.headers, (table.name,))
        except (KvtoolsError, RequestError) as problem:
            replies = refusal(problem) * len(self._reader.commands())
            self._transport.write(replies)
            status, code = (400, "refused")
            if isinstance(problem, RequestError):
                status, code = problem.status, problem.code
            self._tell("resp", status, code, (), begun, len(replies))
            return True
        if table.recent is not None and table.recent.due():
            table.recent.note(self._reader.keys())
        plain = low >= table.low and high <= table.high and table.native is not None
        # Rows that are not in memory are waited for by a thread.
        if keys <= table.at_once and tables.warm():
            self._know(epoch, name, table)
            self._reply(table, begun, answer_lookup(table, self._reader, keys, commands.resp3, plain, 0))
            return True
        most = self._server.settings.max_values // max(1, table.stored.schema.dim)
        work = functools.partial(answer_lookup, table, self._reader, keys, commands.resp3, plain and keys <= most, most)
        self._held = True
        self._transport.pause_reading()
        self._server.in_thread(work, functools.partial(self._resume, table, begun))
        return False

    def _know(self, epoch: Epoch, name: bytes, table: RespTable) -> None:
        """Have the reader answer lookups of a table by itself, which this connection may look up."""
        tally = self._server.observer.tally(Tallied("resp", "resp", table.name, table.served))
        if tally is None or table.native is None:
            return
        if self._known is None or not self._known.valid:
            self._known = RespTables(epoch)
        self._known.add(name, table.native, table.low, table.high, table.at_once, tally, table.recent)

    def _reply(self, table: RespTable, begun: float, replies: Replies) -> None:
        assert self._transport is not None
        self._transport.write(replies.data)
        counts = (TableCount(table.name, replies.keys, replies.missing, table.served),) if replies.keys else ()
        self._tell("resp", replies.status, replies.code, counts, begun, len(replies.data))

    def _tell_command(self, begun: float, reply: bytes) -> None:
        """Tell of a command that was not let in, or that looked keys up; of others nobody is told."""
        commands = self._commands
        if commands.refused is not None:
            kind = "resp" if commands.looks_up else ""
            self._tell(kind, commands.refused.status, commands.refused.code, (), begun, len(reply))
        elif commands.counts:
            self._tell("resp", 200, "", tuple(commands.counts), begun, len(reply))

    def _tell(
        self, kind: str, status: int, code: str, counts: tuple[TableCount, ...], begun: float, bytes_out: int
    ) -> None:
        self._server.observer.on_answer(
            Answered(
                kind,
                status,
                code,
                counts,
                time.perf_counter() - begun,
                0,
                bytes_out,
                self._peer,
                self._commands.headers,
                True,
                "resp",
            )
        )

    def _resume(self, table: RespTable, begun: float, replies: Replies) -> None:
        self._held = False
        assert self._transport is not None
        if self._transport.is_closing():
            return
        self._reply(table, begun, replies)
        if self._ended:
            self._transport.close()
        elif not self._full:
            self._transport.resume_reading()
            self._go()


class Replies(NamedTuple):
    """The replies to commands: `keys` were looked up, of which `missing` have no row.

    `status` and `code` are those of HTTP: of the first command that was refused, or 200 and "".
    """

    data: bytes
    keys: int
    missing: int
    status: int = 200
    code: str = ""


def answer_lookup(table: RespTable, reader: RespReader, keys: int, resp3: bool, plain: bool, most: int) -> Replies:
    """Return the replies to the commands of the last lookup of `reader`, which has `keys` keys.

    `plain`: all keys are in range, few enough, and of a compiled table; otherwise each command is looked at by itself,
    and may have `most` keys (0: any number).
    """
    try:
        if plain:
            assert table.native is not None
            with lookup_errors(table.stored):
                data, missing = reader.answer(table.native, resp3)
            return Replies(data, keys, missing)
        replies: list[bytes] = []
        every = reader.keys()
        start, missing, refused = 0, 0, 0
        for count, single, lowest, highest in reader.commands():
            stop = start + count
            if lowest < table.low or highest > table.high:
                wrong = lowest if lowest < table.low else highest
                expected = f"{table.stored.schema.key_dtype}: {table.low} to {table.high}"
                replies.append(error(f"got key {wrong}, expected {expected}"))
                refused += count
            elif most and count > most:
                dim = table.stored.schema.dim
                replies.append(error(f"got {count} keys of {dim} numbers, expected at most {most * dim}"))
                refused += count
            else:
                reply, absent = answer_command(table.stored, every[start:stop], single, resp3)
                replies.append(reply)
                missing += absent
            start = stop
        answered = b"".join(replies), keys - refused, missing
        return Replies(*answered, 400, "refused") if refused else Replies(*answered)
    except RequestError as problem:  # A backend that does not answer, a file that is damaged or was cut.
        return Replies(refusal(problem) * len(reader.commands()), 0, 0, problem.status, problem.code)
    except Exception as problem:
        known = isinstance(problem, KvtoolsError)
        _log.error("a lookup of the Redis protocol failed: %s", problem, exc_info=None if known else problem)
        said = error(f"internal: {type(problem).__name__}; the server's log says more")
        return Replies(said * len(reader.commands()), 0, 0, 500, "internal")


class RespServer:
    """The port, and what its connections share."""

    def __init__(self, catalog: Catalog, settings: Settings, observer: Observer) -> None:
        self.settings = settings
        self.observer = observer
        self.catalog = catalog
        self.tables = Tables(catalog, settings.max_values)
        self.max_bytes = max(_LEAST_BYTES, settings.max_body_bytes or settings.max_keys * _BYTES_PER_KEY)
        self._connections: set[RespProtocol] = set()
        self._refused: dict[RespProtocol, None] = {}  # one too many, and told so; they are to close; the oldest first
        self._made = 0
        self.spin: Spin | None = None
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="resp")
        self._listener: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._listener is not None
        return int(self._listener.sockets[0].getsockname()[1])

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None) -> None:
        """Listen from now on; raises `BadInputError` if the address cannot be had."""
        loop = asyncio.get_running_loop()
        self.spin = make_spin(self.settings, self.observer, loop)  # before there is who would miss it
        try:
            self._listener = await loop.create_server(
                lambda: RespProtocol(self), host, port, reuse_port=self.settings.workers > 1, backlog=1024, ssl=tls
            )
        except OSError as problem:
            raise BadInputError(
                f"listening on {host}:{port}: {problem.strerror or problem}; name another --resp-port"
            ) from problem
        self._sweeper = loop.call_later(_SWEEP, self._sweep)

    async def close(self) -> None:
        """Take no more connections, and close those there are when what is under way on them is answered."""
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.end()
        for connection in list(self._refused):
            connection.drop()
        await asyncio.get_running_loop().run_in_executor(None, self._threads.shutdown)

    def add(self, connection: RespProtocol) -> bool:
        """Count a connection; False: there are too many."""
        if len(self._connections) >= self.settings.max_connections:
            if len(self._refused) >= _MOST_REFUSED:
                next(iter(self._refused)).drop()
            self._refused[connection] = None
            return False
        self._connections.add(connection)
        return True

    def remove(self, connection: RespProtocol) -> None:
        """Note that a connection is gone."""
        self._connections.discard(connection)
        self._refused.pop(connection, None)

    def count(self) -> int:
        """How many connections there are."""
        return len(self._connections)

    def next_id(self) -> int:
        """The number of a new connection."""
        self._made += 1
        return self._made

    def now(self) -> float:
        """The time, as the limits count it."""
        return asyncio.get_running_loop().time()

    def in_thread(self, work: Callable[[], Replies], then: Callable[[Replies], None]) -> None:
        """Do work in a thread, and call `then` with what it returns."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        future.add_done_callback(lambda done: None if done.cancelled() else then(done.result()))

    def _sweep(self) -> None:
        self._sweeper = asyncio.get_running_loop().call_later(_SWEEP, self._sweep)  # first: whatever fails, it goes on
        now = self.now()
        for connection in [*self._connections, *self._refused]:
            connection.check_time(now, self.settings.body_timeout)


async def start(
    catalog: Catalog, settings: Settings, *, observer: Observer | None = None, tls: ssl.SSLContext | None = None
) -> RespServer:
    """Answer the Redis protocol at `settings.resp_port` (0: any free port) from what `catalog` serves.

    `observer` is asked before lookups, and told after; what a client gives by AUTH is a bearer's key to it. Returns
    what has the `port`, and `close()`. Raises `BadInputError` if the address cannot be had.

    Example:
        ```python
        resp = await start(static_catalog("exported"), Settings(resp_port=6379))
        ...
        await resp.close()
        ```
    """
    server = RespServer(catalog, settings, observer or Observer())
    await server.listen(settings.host, settings.resp_port or 0, tls)
    return server
