"""A real HTTP port and a real gRPC port over a catalog, for clients that are programs of others."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn

from kvtools.server.app import create_app
from kvtools.server.catalog import Catalog
from kvtools.server.grpc_server import start
from kvtools.server.settings import Settings


@dataclass(frozen=True)
class Ports:
    http: int
    grpc: int


@contextlib.contextmanager
def serving(catalog: Catalog, **settings: Any) -> Iterator[Ports]:
    chosen = Settings(grpc_port=0, **settings)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        http = uvicorn.Server(uvicorn.Config(create_app(catalog, chosen), log_level="warning"))
        thread = threading.Thread(target=http.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not http.started:
            assert thread.is_alive()
            time.sleep(0.01)
        grpc = start(catalog, chosen)
        try:
            yield Ports(listener.getsockname()[1], grpc.port)
        finally:
            grpc.stop(1)
            http.should_exit = True
            thread.join(30)
