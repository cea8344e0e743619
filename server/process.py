"""One process that serves: it loads, then listens, answers until it is told to end, and lets requests in hand finish.

It ends by SIGTERM or SIGINT: no connection is accepted any more, idle ones are closed, and requests in hand get
`settings.grace` seconds. What has not ended by then (a request that is only half sent, a client that does not read) is
cut off. The exit status is 0 all the same; a second signal, later than `SAME_SIGNAL`, ends the process at once, with
its status.
SIGHUP has it look for new versions, and read access keys and the certificate anew; where it comes because the terminal
was closed, it ends the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from kvtools.dialects.options import OpenOptions
from kvtools.errors import KvtoolsError
from kvtools.server.allocator import keep_freed_memory
from kvtools.server.catalog import Catalog
from kvtools.server.descriptors import make_room
from kvtools.server.follower import Follower
from kvtools.server.http_protocol import make_protocol, try_connection
from kvtools.server.late_app import App, LateApp
from kvtools.server.lookups import Lookups
from kvtools.server.settings import SAME_SIGNAL, Settings
from kvtools.server.sources import ModelSource, SharedSources
from kvtools.server.telemetry import Telemetry
from kvtools.server.terminal import has_terminal
from kvtools.server.tls import load_certificate, not_of_today, tls_context
from kvtools.server.versions import Versions

if TYPE_CHECKING:
    from kvtools.server.grpc_server import GrpcServer
    from kvtools.server.resp import RespServer

log = logging.getLogger("kvtools.serve")

_BACKLOG = 1024
_TICK = 1.0  # how often workers tell each other what they have counted, in s
# How long a lookup may wait for Python code of another thread, such as one that loads a version, in s.
_SWITCH_INTERVAL = 0.0005
_TLS_CLOSE = 1.0  # how long a TLS connection that is closed waits until its client has closed it, too, in s
_AFTER_GRACE = 2.0  # for what cannot be cut off, such as a lookup in a thread, in s


def run_process(
    sources: Sequence[ModelSource],
    settings: Settings,
    options: OpenOptions | None,
    listener: socket.socket,
    *,
    on_ready: Callable[[dict[str, Any]], None],
    supervisor: int | None = None,
) -> None:
    """Serve `sources` on `listener`, which is bound and not listened on yet, until told to end.

    `on_ready` is called as soon as requests are answered, with what is served, JSON-ready. `supervisor` is the read end
    of a pipe that the supervisor holds open: a worker ends when it is closed, and by SIGTERM only, since Ctrl-C reaches
    the supervisor, too. Raises what `Versions.start` does.
    """
    keep_freed_memory()
    ports = 1 + (settings.grpc_port is not None) + (settings.resp_port is not None)
    room = make_room(settings.max_connections, ports)
    if room < settings.max_connections:
        each = " to each port" if ports > 1 else ""
        wanted = f"{settings.max_connections:,}"
        line = f"descriptors suffice for {room:,} connections{each}, not for {wanted}; see ulimit -n"
        if settings.shared is None or SharedSources(settings.shared).says_first(line):
            log.warning("%s", line)
        settings = dataclasses.replace(settings, max_connections=room)
    sys.setswitchinterval(_SWITCH_INTERVAL)
    catalog = Catalog()
    versions = Versions(catalog, sources, settings, options)
    signal.signal(signal.SIGHUP, lambda number, frame: versions.look_soon())
    tls = tls_context(settings)
    telemetry = Telemetry(catalog, settings)
    versions.load()
    shared = None if settings.shared is None else SharedSources(settings.shared)
    followers = [Follower(catalog, name, Path(path), settings, options, shared) for name, path in settings.follow]
    for follower in followers:
        follower.load()
    telemetry.check_keys()
    try:
        server = _Server(catalog, settings, versions, followers, telemetry, tls, on_ready, supervisor)
        server.run(sockets=[listener])
    finally:
        versions.stop()
        for follower in followers:
            follower.stop()
        telemetry.close()
    if supervisor is None:
        log.info("ended")


class _Server(uvicorn.Server):
    def __init__(
        self,
        catalog: Catalog,
        settings: Settings,
        versions: Versions,
        followers: Sequence[Follower],
        telemetry: Telemetry,
        tls: ssl.SSLContext | None,
        on_ready: Callable[[dict[str, Any]], None],
        supervisor: int | None,
    ) -> None:
        lookups = Lookups(catalog, settings, telemetry)
        self._lookups = lookups
        self._app = LateApp(catalog, lambda: _make_app(catalog, settings, lookups))
        super().__init__(
            uvicorn.Config(
                self._app,
                http=make_protocol(lookups),
                loop="uvloop",
                log_config=None,  # its lines are written like ours
                log_level="warning",
                access_log=False,
                lifespan="off",
                ws="none",
                backlog=_BACKLOG,
                timeout_graceful_shutdown=settings.grace,  # type: ignore[arg-type]  # fractions do
            )
        )
        if tls is not None:
            # uvicorn makes a context of its own of file names; this one is shared with the Redis port.
            self.config.load()
            self.config.ssl = tls
        self._tls = tls
        self._telemetry = telemetry
        self._catalog = catalog
        self._settings = settings
        self._grpc: GrpcServer | None = None
        self._resp: RespServer | None = None
        self._lookups = lookups
        self._versions = versions
        self._followers = followers
        self._on_ready = on_ready
        self._supervisor = supervisor
        self._had_terminal = supervisor is None and has_terminal()
        self._told_to_end = 0.0  # by `time.monotonic`

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `startup`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        try_connection(self._lookups, loop)
        loop.add_signal_handler(signal.SIGTERM, self._end, signal.SIGTERM)
        loop.add_signal_handler(signal.SIGHUP, self._hang_up)
        if self._supervisor is None:
            loop.add_signal_handler(signal.SIGINT, self._end, signal.SIGINT)
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            loop.add_reader(self._supervisor, self._orphaned)
        if self._tls is not None and (sys.version_info >= (3, 11) or type(loop).__module__ != "asyncio.unix_events"):
            # A client that does not look at its idle connection never says that it closes, too.
            closing = functools.partial(loop.create_server, ssl_shutdown_timeout=_TLS_CLOSE)
            loop.create_server = closing  # type: ignore[method-assign]
        if self._settings.grpc_port is not None:
            from kvtools.server import grpc_server

            self._grpc = grpc_server.start(self._catalog, self._settings, self._lookups.observer)
        if self._settings.resp_port is not None:
            from kvtools.server import resp

            self._resp = await resp.start(self._catalog, self._settings, observer=self._telemetry, tls=self._tls)
        await super().startup(sockets)
        self._tick()
        ports = {name: port.port for name, port in (("grpc_port", self._grpc), ("resp_port", self._resp)) if port}
        self._app.begin()
        self._on_ready({**_described(self._catalog), **ports})
        self._versions.go_on()  # now: what was told is what was loaded
        for follower in self._followers:
            follower.go_on()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._catalog.draining = True
        grace = self._settings.grace
        last = threading.Timer(grace + _AFTER_GRACE, _give_up)
        last.daemon = True
        last.start()
        ends = [super().shutdown(sockets)]
        if self._grpc:
            ends.append(asyncio.to_thread(self._grpc.stop, grace))
        if self._resp:
            ends.append(self._resp.close())
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*ends), grace + _AFTER_GRACE / 2)

    def _end(self, number: int) -> None:
        if self.should_exit:
            # The supervisor kills its workers at the second one that it gets itself.
            if self._supervisor is not None or time.monotonic() < self._told_to_end + SAME_SIGNAL:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self._supervisor is None:  # which says so for all
            log.info("got %s: ending; requests in hand get %g s", signal.Signals(number).name, self._settings.grace)
        self._told_to_end = time.monotonic()
        self.should_exit = True

    def _hang_up(self) -> None:
        if self._had_terminal and not has_terminal():
            self._end(signal.SIGHUP)  # it was closed
        else:
            self._versions.look_soon()
            for follower in self._followers:
                follower.look_soon()
        self._telemetry.reload()
        if self._tls is not None and self._settings.tls_cert and self._settings.tls_key:
            try:
                load_certificate(self._tls, self._settings.tls_cert, self._settings.tls_key)
                if self._grpc:
                    self._grpc.load_certificate(self._settings.tls_cert, self._settings.tls_key)
                log.info("the certificate was read anew")
                if problem := not_of_today(self._settings.tls_cert, self._settings.tls_key):
                    log.warning("%s", problem)
            except KvtoolsError as error:
                log.error("%s; the certificate stays as it is", error)

    def _tick(self) -> None:
        asyncio.get_running_loop().call_later(_TICK, self._tick)  # first: whatever fails, it goes on
        self._telemetry.tick()

    def _orphaned(self) -> None:
        assert self._supervisor is not None
        asyncio.get_running_loop().remove_reader(self._supervisor)
        self._supervisor = None
        log.error("the supervisor is gone; this worker ends")
        self.should_exit = True


def _make_app(catalog: Catalog, settings: Settings, lookups: Lookups) -> App:
    from kvtools.server.app import create_app

    return create_app(catalog, settings, lookups=lookups)


def _give_up() -> None:
    log.error("a request did not end %g s after the time of grace; ending without it", _AFTER_GRACE)
    os._exit(0)


def _described(catalog: Catalog) -> dict[str, Any]:
    return {
        "models": [
            {
                "name": name,
                "version": version.number,
                "versions": [each.number for each in catalog.versions(name)],
                "path": str(version.store.path),
                "tables": len(version.store.tables),
                "rows": sum(table.schema.rows for table in version.store.tables.values()),
            }
            for name in catalog.names()
            for version in catalog.versions(name)[-1:]
        ],
        "waiting": [name for name in catalog.names() if not catalog.versions(name)],
    }
