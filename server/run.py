"""Run the HTTP server until it is told to stop."""

from __future__ import annotations

import socket
import sys

from kvtools.dialects.options import OpenOptions
from kvtools.errors import BadInputError, MissingDependencyError, one_line
from kvtools.server.settings import Settings


def serve(path: str, options: OpenOptions, settings: Settings) -> None:
    """Answer lookups from the tables at `path` until interrupted.

    Prints one line when it is ready. Raises `MissingDependencyError` without the packages of
    `kvtools[serve]`, and `BadInputError` if the path cannot be read or the address cannot be had.
    """
    try:
        import fastapi  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise MissingDependencyError(
            f"serving '{path}': a package is missing ({one_line(str(error))}); run `pip install 'kvtools[serve]'`"
        ) from error
    from kvtools.server.app import create_app
    from kvtools.server.catalog import static_catalog
    from kvtools.server.store import TableStore

    host, port = settings.host, settings.port
    store = TableStore(path, options=options)
    with _listen(host, port) as listener:
        app = create_app(static_catalog(store), settings)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
        for name, table in store.tables.items():
            if table.duplicates:
                print(
                    f"kvtools: warning: table '{name}': {table.duplicates} rows are hidden by a later row of their key",
                    file=sys.stderr,
                )
        rows = sum(table.schema.rows for table in store.tables.values())
        shown = f"[{host}]" if ":" in host else host
        print(
            f"serving {len(store.tables)} tables, {rows} rows of {store.path} at"
            f" http://{shown}:{listener.getsockname()[1]} (interactive documentation at /docs)",
            flush=True,
        )
        server.run(sockets=[listener])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY then only
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(1024)
    except OSError as error:
        raise BadInputError(
            f"listening on {host}:{port}: {error.strerror or error}; name another --host or --port"
        ) from error
    return listener
