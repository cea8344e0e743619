"""Calls moved by an event loop: asyncio's, or one that takes its place, such as uvloop's."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from kvtools.client.call import Attempt, Call
from kvtools.client.endpoint import Endpoint
from kvtools.client.errors import BadAnswerError, ClientError, with_way_out
from kvtools.client.http_answer import Answer, AnswerReader, Request
from kvtools.client.options import Options


class Connection(asyncio.BufferedProtocol):
    """A connection to a server: one request at a time. Bytes of an answer go where they stay."""

    def __init__(self, endpoint: Endpoint, max_body: int) -> None:
        self._endpoint = endpoint
        self._reader = AnswerReader(max_body)
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._spare = bytearray(1)
        self.used = False
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        """Whether another request may be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def keep_alive(self) -> bool:
        """Whether the server keeps the connection."""
        return self._reader.keep_alive and self.usable

    @property
    def stale(self) -> bool:
        """Whether a fault means only that the server had closed the connection while it was idle."""
        return self.used and not self._reader.begun

    @property
    def mute(self) -> bool:
        """Whether it has no TLS, and nothing came on it: so does a port that expects TLS."""
        return not self._endpoint.secure and not self._reader.begun

    def send(self, request: Request) -> asyncio.Future[Answer]:
        """Send a request; return what will be its answer."""
        assert self._transport is not None
        self._reader.reset()
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.writelines(request.bytes_for(self._endpoint))
        return self._answer

    def close(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport; see `asyncio.BaseProtocol`."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        """Return where the next bytes go; see `asyncio.BufferedProtocol`."""
        return self._spare if self._answer is None else self._reader.buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Take bytes; see `asyncio.BufferedProtocol`."""
        if self._answer is None:
            self.close()  # Nobody asked for these: the next answer would be another's.
            return
        try:
            whole = self._reader.received(nbytes)
        except BadAnswerError as error:
            self._fail(error)
            self.close()
            return
        if whole:
            self._succeed()

    def eof_received(self) -> None:
        """Close, since the server did; see `asyncio.BaseProtocol`."""
        if self._answer is not None and self._reader.ended():
            self._succeed()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what is under way; see `asyncio.BaseProtocol`."""
        self._fail(exc or ConnectionResetError("the server closed the connection before it had answered"))

    def _succeed(self) -> None:
        future, self._answer = self._answer, None
        assert future is not None and self._reader.answer is not None
        if not future.done():
            future.set_result(self._reader.answer)

    def _fail(self, error: Exception) -> None:
        future, self._answer = self._answer, None
        if future is not None and not future.done():
            future.set_exception(error)


@dataclass(eq=False)
class _Exchange:
    """An attempt that is under way: `waiting` ends with its answer, and first of all connects where need be."""

    attempt: Attempt
    waiting: asyncio.Future[Answer]
    connection: Connection | None


class AsyncTransport:
    """Runs calls on the running event loop; all calls of a transport go on one loop."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._idle: dict[Endpoint, list[Connection]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tls = options.tls
        self._closed = False

    async def run(self, calls: Sequence[Call]) -> None:
        """Return when all calls are done."""
        if self._closed:
            raise ClientError("this client is closed; make another")
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._idle, self._loop = {}, loop  # Connections belong to the loop that made them.
        if len(calls) == 1:
            await self._run(calls[0])
            return
        turn = asyncio.Semaphore(self._options.at_once)

        async def in_turn(call: Call) -> None:
            async with turn:
                await self._run(call)

        tasks = [loop.create_task(in_turn(call)) for call in calls]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        """Close all idle connections."""
        self._closed = True
        idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    async def _run(self, call: Call) -> None:
        exchanges: dict[asyncio.Future[Answer], _Exchange] = {}
        try:
            while True:
                now = time.monotonic()
                for attempt in call.due(now):
                    exchange = self._begin(attempt, call.request)
                    exchanges[exchange.waiting] = exchange
                self._drop_stopped(call, exchanges)
                if call.done:
                    return
                wait = max(0.0, call.wake - now)
                if not exchanges:
                    await asyncio.sleep(wait)
                    continue
                done, _ = await asyncio.wait(exchanges, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    self._end(call, exchanges.pop(future))
        finally:
            if not call.done:
                call.refuse(ClientError("the call was cancelled"), time.monotonic())
            self._drop_stopped(call, exchanges)

    def _begin(self, attempt: Attempt, request: Request) -> _Exchange:
        endpoint = attempt.replica.endpoint
        idle = self._idle.get(endpoint, [])
        while idle and not attempt.fresh:
            connection = idle.pop()
            if connection.usable and time.monotonic() - connection.idle_since < self._options.idle:
                attempt.connected = True
                return _Exchange(attempt, connection.send(request), connection)
            connection.close()
            attempt.replica.forget()
        exchange = _Exchange(attempt, asyncio.get_running_loop().create_future(), None)
        exchange.waiting = asyncio.ensure_future(self._connect_and_send(exchange, request))
        return exchange

    async def _connect_and_send(self, exchange: _Exchange, request: Request) -> Answer:
        endpoint = exchange.attempt.replica.endpoint
        if endpoint.secure and self._tls is None:
            self._tls = ssl.create_default_context()
        connection = Connection(endpoint, self._options.max_answer_bytes)
        exchange.connection = connection
        await asyncio.get_running_loop().create_connection(
            lambda: connection, endpoint.host, endpoint.port, ssl=self._tls if endpoint.secure else None
        )
        exchange.attempt.connected = True
        return await connection.send(request)

    def _end(self, call: Call, exchange: _Exchange) -> None:
        now = time.monotonic()
        connection = exchange.connection
        try:
            answer = exchange.waiting.result()
        except (OSError, BadAnswerError) as error:
            shown: Exception = error
            if isinstance(error, ssl.SSLError):
                shown = with_way_out(error)
            elif isinstance(error, OSError) and not isinstance(error, socket.gaierror) and error.errno:
                shown = OSError(error.errno, os.strerror(error.errno))  # asyncio has words of its own.
            if connection is not None and isinstance(shown, ConnectionResetError):
                shown = with_way_out(shown, mute=connection.mute)
            if connection is not None:
                connection.close()
            call.failed(exchange.attempt, shown, now, stale=connection is not None and connection.stale)
            return
        assert connection is not None
        if connection.keep_alive and not self._closed:
            connection.used, connection.idle_since = True, now
            idle = self._idle.setdefault(exchange.attempt.replica.endpoint, [])
            idle.append(connection)
            if len(idle) > self._options.max_idle:
                idle.pop(0).close()
        else:
            connection.close()
            exchange.attempt.replica.forget()  # The server may be about to end.
        call.answered(exchange.attempt, answer, now)

    def _drop_stopped(self, call: Call, exchanges: dict[asyncio.Future[Answer], _Exchange]) -> None:
        stopped, call.stopped = call.stopped, []
        for future, exchange in list(exchanges.items()):
            if exchange.attempt in stopped:
                del exchanges[future]
                future.cancel()
                if exchange.connection is not None:
                    exchange.connection.close()
