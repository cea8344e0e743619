"""The gRPC port: TensorFlow Serving's services, the Open Inference Protocol's, health (grpc.health.v1), reflection.

Requests are parsed in the handlers, not by gRPC, so that one that is no message gets INVALID_ARGUMENT.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any

from kvtools.errors import BadInputError, KvtoolsError, MissingDependencyError, one_line
from kvtools.server.catalog import Catalog
from kvtools.server.settings import Settings

_LOG = logging.getLogger(__name__)
_HEALTH_EVERY = 1.0  # how often the state that Watch tells is looked at, in s
_HEADROOM = 1 << 20  # of a message: names and shapes beside the ids


def start(catalog: Catalog, settings: Settings) -> GrpcServer:
    """Listen on `settings.host`:`settings.grpc_port` (0: any free port) and answer from what `catalog` serves.

    Raises `MissingDependencyError` without the packages of `kvtools[grpc]`, and `BadInputError` if the address cannot
    be had.
    """
    try:
        return GrpcServer(catalog, settings)
    except ImportError as error:
        raise MissingDependencyError(
            f"serving gRPC: a package is missing ({one_line(str(error))}); run `pip install 'kvtools[grpc]'`"
        ) from error


class GrpcServer:
    """A gRPC server that runs until `stop`."""

    def __init__(self, catalog: Catalog, settings: Settings) -> None:
        import grpc
        from grpc_health.v1 import health, health_pb2, health_pb2_grpc
        from grpc_reflection.v1alpha import reflection, reflection_pb2

        from kvtools.server import kserve_grpc, tensorflow_grpc
        from kvtools.server.protos import POOL, SERVICES
        from kvtools.server.request_body import limit_of

        self._catalog = catalog
        self._health: Any = health.HealthServicer()
        self._serving = health_pb2.HealthCheckResponse.SERVING
        self._not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
        self._services = ("", *SERVICES)
        methods = {**tensorflow_grpc.methods(catalog, settings), **kserve_grpc.methods(catalog, settings)}
        self._server = grpc.server(
            futures.ThreadPoolExecutor(settings.max_concurrent, "grpc"),
            handlers=[_handlers(methods)],
            maximum_concurrent_rpcs=settings.max_concurrent,
            options=[
                ("grpc.so_reuseport", int(settings.workers > 1)),
                ("grpc.max_receive_message_length", limit_of(settings) + _HEADROOM),
                ("grpc.max_send_message_length", -1),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        for module in (health_pb2, reflection_pb2):
            POOL.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server, pool=POOL)
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        address = f"{host}:{settings.grpc_port or 0}"
        try:
            self.port: int = self._server.add_insecure_port(address)
        except RuntimeError:
            self.port = 0
        if self.port == 0:
            raise BadInputError(f"listening on {address} for gRPC: the address cannot be had; name another --grpc-port")
        self._ending = threading.Event()
        self._tell_health()
        self._watch = threading.Thread(target=self._watch_health, name="grpc-health", daemon=True)
        self._server.start()
        self._watch.start()

    def stop(self, grace: float | None = None) -> None:
        """Take no new requests, let those in hand go on for `grace` seconds, then end."""
        self._ending.set()
        self._health.enter_graceful_shutdown()
        self._server.stop(grace).wait()
        self._watch.join()

    def _watch_health(self) -> None:
        while not self._ending.wait(_HEALTH_EVERY):
            self._tell_health()

    def _tell_health(self) -> None:
        state = self._serving if self._catalog.ready else self._not_serving
        for service in self._services:
            self._health.set(service, state)


def _handlers(methods: dict[str, Callable[[bytes], bytes]]) -> Any:
    import grpc

    from kvtools.server.protocol_error import ProtocolError

    def handler(name: str, method: Callable[[bytes], bytes]) -> Any:
        def answer(data: bytes, context: Any) -> bytes:
            try:
                return method(data)
            except ProtocolError as error:
                code, text = getattr(grpc.StatusCode, error.code), error.message
            except KvtoolsError as error:
                _LOG.exception("answering %s", name)
                code, text = grpc.StatusCode.INTERNAL, str(error)
            except Exception as error:
                _LOG.exception("answering %s", name)
                code, text = grpc.StatusCode.INTERNAL, f"{type(error).__name__}; the server's log says more"
            context.set_code(code)
            context.set_details(text[:4096])
            return b""

        # No serializers: bytes go in and out.
        return grpc.unary_unary_rpc_method_handler(answer)

    by_name = {name: handler(name, method) for name, method in methods.items()}

    class Handlers(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return by_name.get(details.method)

    return Handlers()
