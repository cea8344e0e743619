"""Calls moved by the thread that wants the answers: sockets that do not block, and one `poll` for all of them."""

from __future__ import annotations

import errno
import math
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Sequence

from kvtools.client.call import Attempt, Call
from kvtools.client.endpoint import Endpoint
from kvtools.client.errors import BadAnswerError, ClientError, with_way_out
from kvtools.client.http_answer import AnswerReader, Request
from kvtools.client.options import Options
from kvtools.client.replicas import Replica

_Buffers = list[memoryview]


class Connection:
    """A connection to a server, by one thread at a time. `advance` goes on as far as it can."""

    def __init__(self, endpoint: Endpoint, tls: ssl.SSLContext | None, max_body: int) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._reader = AnswerReader(max_body)
        self._addresses = deque(
            socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        )
        self._out: _Buffers = []
        self.connected = False
        self.used = False
        self.idle_since = 0.0
        self._socket: socket.socket | ssl.SSLSocket = self._open()

    def fileno(self) -> int:
        """The descriptor to poll."""
        return self._socket.fileno()

    def send(self, request: Request) -> None:
        """Begin with a request."""
        self._reader.reset()
        self._out = [memoryview(piece).cast("B") for piece in request.bytes_for(self._endpoint)]

    @property
    def reader(self) -> AnswerReader:
        """What reads the answer."""
        return self._reader

    @property
    def stale(self) -> bool:
        """Whether a fault means only that the server had closed the connection while it was idle."""
        return self.used and not self._reader.begun

    @property
    def mute(self) -> bool:
        """Whether it has no TLS, and nothing came on it: so does a port that expects TLS."""
        return not self._endpoint.secure and not self._reader.begun

    def advance(self) -> int:
        """Go on; return what to poll for, or 0 when the answer is whole.

        Raises:
            OSError: the connection is lost, or did not come about.
            BadAnswerError: no answer of HTTP came.
        """
        try:
            if not self.connected and not self._connect():
                return select.POLLOUT
            while self._out:
                self._write()
            while True:
                count = self._socket.recv_into(self._reader.buffer())
                if not count:
                    if self._reader.ended():
                        return 0
                    raise ConnectionResetError("the server closed the connection before it had answered")
                if self._reader.received(count):
                    return 0
                if not self._tls:  # A TLS socket may hold more than one read gives.
                    return select.POLLIN
        except (BlockingIOError, ssl.SSLWantReadError):
            return select.POLLOUT if self._out and not self._tls else select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT

    def is_quiet(self) -> bool:
        """Tell whether an idle connection is as it was left: neither closed nor with bytes that nobody asked for."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return not waiting.poll(0)

    def close(self) -> None:
        """Close the connection; may be done twice."""
        self._socket.close()

    def _open(self) -> socket.socket:
        family, kind, protocol, _, address = self._addresses.popleft()
        opened = socket.socket(family, kind, protocol)
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = opened.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            opened.close()
            if self._addresses:
                return self._open()
            raise OSError(code, os.strerror(code))
        return opened

    def _connect(self) -> bool:
        if not isinstance(self._socket, ssl.SSLSocket):
            try:
                self._socket.getpeername()
            except OSError as error:
                code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if not code and error.errno == errno.ENOTCONN:
                    return False
                self._socket.close()
                if not self._addresses:
                    raise OSError(code or error.errno, os.strerror(code or error.errno or 0)) from None
                self._socket = self._open()
                return False
            if self._tls:
                self._socket = self._tls.wrap_socket(
                    self._socket, server_hostname=self._endpoint.host, do_handshake_on_connect=False
                )
        if isinstance(self._socket, ssl.SSLSocket):
            self._socket.do_handshake()
        self.connected = True
        return True

    def _write(self) -> None:
        if isinstance(self._socket, ssl.SSLSocket):
            sent = self._socket.send(self._out[0])
        else:
            sent = self._socket.sendmsg(self._out)
        while self._out and sent >= len(self._out[0]):
            sent -= len(self._out.pop(0))
        if sent:
            self._out[0] = self._out[0][sent:]


class Pool:
    """Idle connections by server; any thread. The one used last is used first, so that what is not needed goes."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._lock = threading.Lock()
        self._idle: dict[Endpoint, list[Connection]] = {}
        self._process = os.getpid()
        self._tls = options.tls
        self._closed = False

    def connection(self, replica: Replica, *, fresh: bool) -> Connection:
        """Return a connection that nobody else has; `fresh`: a new one.

        Where an idle one was lost, another server may be there by now.
        """
        if self._closed:
            raise ClientError("this client is closed; make another")
        if self._process != os.getpid():  # After a fork: the sockets are the parent's, and the lock may be held there.
            self._lock, self._idle, self._process = threading.Lock(), {}, os.getpid()
        endpoint, now = replica.endpoint, time.monotonic()
        while not fresh:
            with self._lock:
                idle = self._idle.get(endpoint)
                found = idle.pop() if idle else None
            if found is None:
                break
            if now - found.idle_since < self._options.idle and found.is_quiet():
                return found
            found.close()
            replica.forget()
        return Connection(endpoint, self.tls() if endpoint.secure else None, self._options.max_answer_bytes)

    def give_back(self, replica: Replica, connection: Connection) -> None:
        """Keep a connection for the next request, or close it."""
        if connection.reader.keep_alive and not self._closed:
            connection.used, connection.idle_since = True, time.monotonic()
            with self._lock:
                idle = self._idle.setdefault(replica.endpoint, [])
                idle.append(connection)
                surplus = idle.pop(0) if len(idle) > self._options.max_idle else None
            if surplus is not None:
                surplus.close()
        else:
            connection.close()
            replica.forget()  # The server may be about to end.

    def tls(self) -> ssl.SSLContext:
        """The context of all connections."""
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls

    def close(self) -> None:
        """Close all idle connections; those in use are closed when they come back."""
        self._closed = True
        with self._lock:
            idle, self._idle = self._idle, {}
        for connections in idle.values():
            for connection in connections:
                connection.close()


class BlockingTransport:
    """Runs calls in the calling thread; any number of threads may."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._pool = Pool(options)

    def run(self, calls: Sequence[Call]) -> None:
        """Return when all calls are done."""
        _Run(calls, self._pool, self._options.at_once).go()

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()


class _Run:
    """Some calls, on their way at once."""

    def __init__(self, calls: Sequence[Call], pool: Pool, at_once: int) -> None:
        self._waiting = deque(calls)
        self._active: list[Call] = []
        self._pool = pool
        self._at_once = at_once
        self._poller = select.poll()
        self._by_fd: dict[int, tuple[Call, Attempt, Connection]] = {}

    def go(self) -> None:
        try:
            while True:
                while self._waiting and len(self._active) < self._at_once:
                    self._active.append(self._waiting.popleft())
                now = time.monotonic()
                for call in self._active:
                    for attempt in call.due(now):
                        self._start(call, attempt)
                    if call.stopped:
                        self._close_stopped(call)
                self._active = [call for call in self._active if not call.done]
                if not self._active and not self._waiting:
                    return
                if not self._active:
                    continue
                wake = min(call.wake for call in self._active)
                if not self._by_fd:
                    time.sleep(max(0.0, min(wake - time.monotonic(), 3600)))
                    continue
                wait = max(0.0, wake - time.monotonic())
                for fd, _ in self._poller.poll(min(math.ceil(wait * 1000), 3_600_000)):
                    self._advance(fd)
        finally:
            for _, _, connection in self._by_fd.values():
                connection.close()

    def _start(self, call: Call, attempt: Attempt) -> None:
        try:
            connection = self._pool.connection(attempt.replica, fresh=attempt.fresh)
        except OSError as error:
            call.failed(attempt, error, time.monotonic())
            call.wake = -math.inf
            return
        attempt.connected = connection.connected
        connection.send(call.request)
        self._by_fd[connection.fileno()] = (call, attempt, connection)
        self._poller.register(connection.fileno(), 0)
        self._advance(connection.fileno())

    def _advance(self, fd: int) -> None:
        entry = self._by_fd.get(fd)
        if entry is None:
            return  # Closed by what happened before it in the same poll.
        call, attempt, connection = entry
        try:
            wanted = connection.advance()
        except (OSError, BadAnswerError) as error:
            self._forget(fd)
            connection.close()
            shown = with_way_out(error, mute=connection.mute) if isinstance(error, OSError) else error
            call.failed(attempt, shown, time.monotonic(), stale=connection.stale)
            call.wake = -math.inf
            return
        attempt.connected = connection.connected
        if wanted:
            if connection.fileno() != fd:  # Another address of the same server.
                self._forget(fd)
                self._by_fd[connection.fileno()] = entry
            self._poller.register(connection.fileno(), wanted)
            return
        self._forget(fd)
        answer = connection.reader.answer
        assert answer is not None
        self._pool.give_back(attempt.replica, connection)
        call.answered(attempt, answer, time.monotonic())
        call.wake = -math.inf
        self._close_stopped(call)

    def _close_stopped(self, call: Call) -> None:
        stopped, call.stopped = call.stopped, []
        for fd, (_, attempt, connection) in list(self._by_fd.items()):
            if attempt in stopped:
                self._forget(fd)
                connection.close()

    def _forget(self, fd: int) -> None:
        del self._by_fd[fd]
        self._poller.unregister(fd)
