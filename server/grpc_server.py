"""The gRPC port: TensorFlow Serving's services, the Open Inference Protocol's, health (grpc.health.v1), reflection.

It has a thread and an event loop of its own (`grpc.aio`: 1.2 to 1.8 times the requests of gRPC's pool of threads, from
1 to 10,000 ids). What is small is answered on the loop, the rest by threads, at most `settings.max_concurrent` at a
time. Requests are parsed in the handlers, not by gRPC, so that one that is no message gets INVALID_ARGUMENT.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from kvtools.errors import BadInputError, KvtoolsError, MissingDependencyError, one_line
from kvtools.server.caller import Caller
from kvtools.server.catalog import Catalog
from kvtools.server.observer import Answered, Observer
from kvtools.server.protocol_error import HTTP_STATUSES, ProtocolError
from kvtools.server.request_ids import HEADER, request_id
from kvtools.server.settings import Settings
from kvtools.server.signatures import numbers_at_once

if TYPE_CHECKING:
    from kvtools.server.grpc_services import Health

_LOG = logging.getLogger("kvtools.serve")
_HEALTH_EVERY = 1.0  # how often the state that Watch tells is looked at, in s
_HEADROOM = 1 << 20  # of a message: names and shapes beside the ids
_SMALL = 131_072  # bytes of a request times numbers of a row: a fraction of a millisecond
_MOST_STREAMS = 1024  # requests of a connection at a time; those beyond wait at the client, or some are refused
_NO_LIMIT = 2**31 - 1
_MOST_WAIT = 24 * 3600  # s; whoever asks has a deadline of its own
_MOST_DETAILS = 4096  # characters of an error: it goes as a header
_KINDS = {
    "/tensorflow.serving.PredictionService/Predict": "predict",
    "/tensorflow.serving.PredictionService/Classify": "classify",
    "/tensorflow.serving.PredictionService/Regress": "regress",
    "/inference.GRPCInferenceService/ModelInfer": "infer",
}

Method = Callable[[bytes, Caller], bytes]


def _is_news(record: logging.LogRecord) -> bool:
    """Tell whether grpcio has more to say than that a client was gone when its answer was to be sent."""
    return record.exc_info is None or getattr(record.exc_info[0], "__name__", "") != "ExecuteBatchError"


def start(catalog: Catalog, settings: Settings, observer: Observer | None = None) -> GrpcServer:
    """Listen on `settings.host`:`settings.grpc_port` (0: any free port) and answer from what `catalog` serves.

    Raises `MissingDependencyError` without the packages of `kvtools[grpc]`, `BadInputError` if the address cannot
    be had, and `KvtoolsError` where a module of kvtools itself cannot be imported.

    `observer` is asked before requests, with their metadata as headers, and told after: on the event loop that `start`
    is called on, if there is one.

    Example:
        ```python
        server = start(static_catalog("exported"), Settings(grpc_port=8500))
        ...
        server.stop(grace=30)
        ```
    """
    try:
        return GrpcServer(catalog, settings, observer or Observer())
    except ImportError as error:
        if (error.name or "").partition(".")[0] == "kvtools":
            raise KvtoolsError(
                f"serving gRPC: kvtools itself is not whole ({one_line(str(error))}); install kvtools anew"
            ) from error
        raise MissingDependencyError(
            f"serving gRPC: a package is missing ({one_line(str(error))}); run `pip install 'kvtools[grpc]'`"
        ) from error


class GrpcServer:
    """A gRPC server that runs until `stop`; `port` is where."""

    def __init__(self, catalog: Catalog, settings: Settings, observer: Observer) -> None:
        from kvtools.server import kserve_grpc, tensorflow_grpc

        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what is wrong is told by us; heeded at gRPC's first import
        logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)
        self._catalog = catalog
        self._settings = settings
        self._observer = observer
        try:
            self._home: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._home = None
        self._methods = {**tensorflow_grpc.methods(catalog, settings), **kserve_grpc.methods(catalog, settings)}
        self._waits = {tensorflow_grpc.RELOAD}
        self._running = 0
        self._counting = threading.Lock()
        self._threads = ThreadPoolExecutor(settings.max_concurrent, "grpc")
        self._grace: float | None = None
        self._certificate: Any = None
        self._certificate_used: Any = None
        started: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="grpc", daemon=True)
        self._thread.start()
        self.port = started.result()

    def load_certificate(self, certificate: Path, key: Path) -> None:
        """Use these files, which belong together, from the next connection on. For any thread."""
        import grpc

        pair = (key.read_bytes(), certificate.read_bytes())
        self._certificate = grpc.ssl_server_certificate_configuration([pair])

    def _changed_certificate(self) -> Any:
        """Return what gRPC, which asks at each handshake, is to use from now on; None: what it has."""
        if self._certificate is self._certificate_used:
            return None
        self._certificate_used = self._certificate
        return self._certificate_used

    def stop(self, grace: float | None = None) -> None:
        """Take no new requests, let those in hand go on for `grace` seconds, then end."""
        self._grace = grace
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()
        self._threads.shutdown(wait=False)

    def _run(self, started: Future[int]) -> None:
        try:
            import uvloop

            self._loop = uvloop.new_event_loop()
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(self._serve(started))
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(self, started: Future[int]) -> None:
        import grpc

        from kvtools.server import grpc_services

        settings = self._settings
        self._ending = asyncio.Event()
        server = grpc.aio.server(
            handlers=[_handlers(self._methods, self._answer, settings.body_timeout)],
            options=[
                ("grpc.so_reuseport", int(settings.workers > 1)),
                ("grpc.max_receive_message_length", settings.body_limit + _HEADROOM),
                ("grpc.max_send_message_length", -1),
                ("grpc.server_handshake_timeout_ms", int(settings.header_timeout * 1000)),
                ("grpc.max_allowed_incoming_connections", settings.max_connections),
                ("grpc.max_concurrent_streams", _MOST_STREAMS),
                # Of more than 1,000 that wait for the loop gRPC would cancel some, by chance.
                ("grpc.server.max_pending_requests", _NO_LIMIT),
                ("grpc.server.max_pending_requests_hard_limit", _NO_LIMIT),
                # And those that have waited for half a minute.
                ("grpc.server_max_unrequested_time_in_server", _MOST_WAIT),
                ("grpc.max_connection_idle_ms", int(settings.keep_alive * 1000)),
            ],
        )
        health = grpc_services.add_services(server, settings.body_timeout)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{host}:{settings.grpc_port or 0}"
        try:
            if settings.tls_cert is not None and settings.tls_key is not None:
                self.load_certificate(settings.tls_cert, settings.tls_key)
                self._certificate_used = self._certificate
                credentials = grpc.dynamic_ssl_server_credentials(self._certificate, self._changed_certificate)
                port = server.add_secure_port(address, credentials)
            else:
                port = server.add_insecure_port(address)
        except RuntimeError:
            port = 0
        if port == 0:
            why = _why_not(settings.host, settings.grpc_port or 0)
            raise BadInputError(f"listening on {address} for gRPC: {why}; name another --grpc-port")

        await health.tell(self._catalog.ready)
        await server.start()
        started.set_result(port)
        while not self._ending.is_set():
            try:
                await asyncio.wait_for(self._ending.wait(), _HEALTH_EVERY)
            except (TimeoutError, asyncio.TimeoutError):
                await self._tell_health(health)
        await health.end()
        await server.stop(self._grace)

    async def _tell_health(self, health: Health) -> None:
        try:
            await health.tell(self._catalog.ready)
        except Exception:  # a fault of ours shall not end the port
            _LOG.exception("telling the health of gRPC failed")

    async def _answer(self, name: str, data: bytes, context: Any) -> bytes:
        import grpc

        headers = _headers(context)
        name_of_request = request_id(headers)
        context.set_trailing_metadata(((HEADER, name_of_request),))
        caller = Caller(self._observer, headers, _address(context.peer()), protocol="grpc", request_id=name_of_request)
        try:
            answer = await self._worked_out(name, data, caller)
            self._tell(caller.told(_KINDS.get(name, ""), 200, "", len(data), len(answer)))
            return answer
        except ProtocolError as error:
            code, text = error.code, error.message
        except asyncio.CancelledError:  # the client went away, or its deadline is over: nobody gets an answer
            left = context.time_remaining()
            code = "CANCELLED" if left is None or left > 0 else "DEADLINE_EXCEEDED"
            self._tell(caller.told(_KINDS.get(name, ""), HTTP_STATUSES[code], code.lower(), len(data), 0))
            raise
        except Exception as error:
            _LOG.error("answering %s: %s", name, error, exc_info=None if isinstance(error, KvtoolsError) else error)
            code, text = "INTERNAL", f"{type(error).__name__}; the server's log says more"
        context.set_code(getattr(grpc.StatusCode, code))
        context.set_details(text[:_MOST_DETAILS])
        self._tell(caller.told(_KINDS.get(name, ""), HTTP_STATUSES.get(code, 500), code.lower(), len(data), 0))
        return b""

    async def _worked_out(self, name: str, data: bytes, caller: Caller) -> bytes:
        method = self._methods[name]
        if name not in self._waits and self._is_small(data):
            return method(data, caller)
        if self._running >= self._settings.max_concurrent:
            raise ProtocolError(
                "RESOURCE_EXHAUSTED", f"{self._running} requests are being worked on, which is the most at a time"
            )
        work = self._threads.submit(method, data, caller)
        with self._counting:
            self._running += 1
        work.add_done_callback(self._count_done)
        return await asyncio.wrap_future(work)

    def _count_done(self, work: Future[bytes]) -> None:
        # In the thread that did it: a request whose client is gone takes its thread until then.
        with self._counting:
            self._running -= 1

    def _tell(self, answered: Answered) -> None:
        if self._home is None:
            self._observer.on_answer(answered)
        elif not self._home.is_closed():
            self._home.call_soon_threadsafe(self._observer.on_answer, answered)

    def _is_small(self, data: bytes) -> bool:
        versions = [version for name in self._catalog.names() for version in self._catalog.versions(name)]
        widest = [numbers_at_once(version) for version in versions]
        return all(widest) and len(data) * max(widest, default=1) <= _SMALL


def _why_not(host: str, port: int) -> str:
    """Return why an address cannot be listened on, which gRPC does not tell."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return "the address cannot be had"
    except OSError as error:
        return error.strerror or str(error)


def _headers(context: Any) -> dict[str, str]:
    return {name: value for name, value in context.invocation_metadata() or () if isinstance(value, str)}


def _address(peer: str) -> tuple[str, int] | None:
    """Return what gRPC calls `ipv4:127.0.0.1:4711` as an address."""
    kind, _, address = peer.partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return unquote(host).strip("[]"), int(port)


def _handlers(methods: dict[str, Method], answer: Callable[[str, bytes, Any], Awaitable[bytes]], limit: float) -> Any:
    import grpc

    from kvtools.server.grpc_services import one_message

    def handler(name: str) -> Any:
        # Of one message as the client has it, of a stream here: so we have a say in how long that takes.
        async def of_method(requests: AsyncIterator[bytes], context: Any) -> bytes:
            return await answer(name, await one_message(requests, context, limit), context)

        return grpc.stream_unary_rpc_method_handler(of_method)  # no serializers: bytes go in and out

    by_name = {name: handler(name) for name in methods}

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return by_name.get(details.method)

    return Handlers()
