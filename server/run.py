"""Run the server until it is told to stop: in this process, or in several under a supervisor."""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvtools.dialects.options import OpenOptions
from kvtools.errors import BadInputError, MissingDependencyError, OutputError
from kvtools.server.settings import Settings
from kvtools.server.sources import ModelSource


def serve(
    sources: Sequence[ModelSource],
    settings: Settings,
    options: OpenOptions | None = None,
    *,
    as_json: bool = False,
    quiet: bool = False,
) -> int:
    """Answer lookups from `sources` until told to end; returns the exit status.

    Prints one line, or one JSON object, when requests are answered; with `quiet`, no line, and warnings alone are
    logged. Raises `MissingDependencyError` without the
    packages of `kvtools[serve]`, and `BadInputError` if a model cannot be read or the address cannot be had.
    """
    # Looked for, not imported: FastAPI is, once the server listens.
    if missing := [name for name in ("fastapi", "uvicorn", "uvloop", "httptools") if find_spec(name) is None]:
        first = sources[0].path if sources else settings.follow[0][1]
        raise MissingDependencyError(
            f"serving '{first}': no package {', '.join(missing)}; run `pip install 'kvtools[serve]'`"
        )
    from kvtools.server.access_keys import read_access_keys
    from kvtools.server.process import run_process
    from kvtools.server.tls import not_of_today, tls_context
    from kvtools.server.workers import Supervisor

    logging.basicConfig(format="%(asctime)s kvtools[%(process)d] %(levelname)s: %(message)s", level=logging.WARNING)
    logging.getLogger("kvtools.serve").setLevel(logging.WARNING if quiet else logging.INFO)
    # What is wrong with them is told before anything is listened on, and once, not by each worker.
    read_access_keys(settings.api_keys)
    tls_context(settings)
    if settings.tls_cert and settings.tls_key and (problem := not_of_today(settings.tls_cert, settings.tls_key)):
        logging.getLogger("kvtools.serve").warning("%s", problem)
    listener = _bind(settings.host, settings.port, shared=False)
    settings = dataclasses.replace(settings, port=listener.getsockname()[1])

    def tell(what: dict[str, Any]) -> None:
        if as_json or not quiet:
            print(json.dumps({"url": _url(settings), **what}) if as_json else _line(settings, what), flush=True)

    if settings.workers == 1:
        with listener:
            run_process(sources, settings, options, listener, on_ready=tell)
        return 0

    # From here on the port is shared, which is refused as long as it is bound for one alone. That one came first: two
    # servers that both share a port would take each other's requests.
    listener.close()

    settings = dataclasses.replace(
        settings,
        grpc_port=_settled(settings.host, settings.grpc_port, "--grpc-port"),
        resp_port=_settled(settings.host, settings.resp_port, "--resp-port"),
    )

    try:
        shared = tempfile.TemporaryDirectory(prefix="kvtools-serve-")
    except OSError as error:
        raise OutputError(
            f"making a folder that {settings.workers} workers share: {error.strerror or error}; name one that can be"
            " written by TMPDIR in the environment, or say --workers 1"
        ) from error
    with shared as folder:
        settings = dataclasses.replace(settings, shared=Path(folder))

        def work(listener: socket.socket, supervisor: int, answers: Callable[[str], None]) -> None:
            def on_ready(what: dict[str, Any]) -> None:
                answers(json.dumps(what))

            run_process(sources, settings, options, listener, on_ready=on_ready, supervisor=supervisor)

        return Supervisor(
            settings.workers,
            settings.grace,
            lambda: _bind(settings.host, settings.port, shared=True),
            work,
            lambda line: tell(json.loads(line)),
            # The first worker needs this once it answers; those forked later have it already.
            lambda: import_module("kvtools.server.app"),
        ).run()


def _settled(host: str, port: int | None, option: str) -> int | None:
    """Return the port that all workers will share: a free one for 0. Raises `BadInputError` if it is taken."""
    if port is None:
        return None
    with _bind(host, port, shared=False, option=option) as free:
        settled: int = free.getsockname()[1]
        return settled


def _bind(host: str, port: int, *, shared: bool, option: str = "--port") -> socket.socket:
    """Return a socket that has the address and does not listen yet: nobody can connect before there are answers."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY then only
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        raise BadInputError(
            f"listening on {host}:{port}: {error.strerror or error}; name another --host or {option}"
        ) from error
    return listener


def _url(settings: Settings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls_cert else 'http'}://{host}:{settings.port}"


def _line(settings: Settings, what: dict[str, Any]) -> str:
    models = what["models"]
    tables, rows = (sum(model[field] for model in models) for field in ("tables", "rows"))
    amount = f"{_counted(tables, 'table')}, {_counted(rows, 'row')}"
    if not models:
        served = "serving no model yet"
    elif len(models) == 1 and not tables:
        served = f"serving the whole model of {models[0]['path']}"
    elif len(models) == 1:
        served = f"serving {amount} of {models[0]['path']}"
    elif not tables:
        served = f"serving {len(models)} whole models"
    else:
        served = f"serving {len(models)} models, {amount}"
    waiting = ", ".join(f"'{name}'" for name in what["waiting"])
    titles = {"grpc_port": "gRPC", "resp_port": "the Redis protocol"}
    others = "".join(f", {title} at port {what[name]}" for name, title in titles.items() if name in what)
    if older := sum(len(model["versions"]) - 1 for model in models):
        served += f", and {_counted(older, 'older version')}"
    if waiting:
        others += f", waiting for a version of {waiting}"
    return f"{served} at {_url(settings)}{others} (interactive documentation at /docs)"


def _counted(number: int, what: str) -> str:
    """Return a number with its noun.

    >>> _counted(1, "table"), _counted(1500000, "row")
    ('1 table', '1,500,000 rows')
    """
    return f"{number:,} {what}{'' if number == 1 else 's'}"
