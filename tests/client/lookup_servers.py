"""Servers for clients to ask: the real one in a thread, and one that does as a test wants it."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from kvtools.client.pooling import pool
from kvtools.lookup_frame import TableRows, decode_request, encode_answer
from kvtools.server.app import create_app
from kvtools.server.catalog import Catalog
from kvtools.server.http_protocol import make_protocol
from kvtools.server.lookups import Lookups
from kvtools.server.observer import Observer
from kvtools.server.settings import Settings


@contextlib.contextmanager
def real_server(
    catalog: Catalog, *, observer: Observer | None = None, tls: tuple[str, str] | None = None, **settings: Any
) -> Iterator[str]:
    """`kvtools serve` over a catalog; yields its URL."""
    chosen = Settings(**settings)
    lookups = Lookups(catalog, chosen, observer)
    files: dict[str, Any] = {} if tls is None else {"ssl_certfile": tls[0], "ssl_keyfile": tls[1]}
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(
            create_app(catalog, chosen, lookups=lookups),
            http=make_protocol(lookups),
            lifespan="off",
            log_level="warning",
            timeout_graceful_shutdown=1,
            **files,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        try:
            yield f"{'http' if tls is None else 'https'}://localhost:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)
            lookups.close()


@contextlib.contextmanager
def server_process(path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`kvtools serve` in a process of its own, which a test may stop or kill; yields it and its URL."""
    command = [sys.executable, "-m", "kvtools.cli.main", "serve", str(path), "--port", "0", "--json", *options]
    # Not in the repository's folder, whose sources would be imported in place of what is installed.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=path.parent
    ) as process:
        try:
            assert process.stdout is not None
            yield process, json.loads(process.stdout.readline())["url"]
        finally:
            process.kill()


@contextlib.contextmanager
def relay(port: int, at_bytes: int, then: Callable[[], object]) -> Iterator[str]:
    """Carries bytes to a server and back, and calls `then` once when it has got `at_bytes` of an answer to a POST."""

    def carry(client: socket.socket) -> None:
        with client, socket.socket() as server, contextlib.suppress(OSError):
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)  # so that most of an answer is not sent yet
            server.connect(("127.0.0.1", port))
            waiting, received, posted = select.poll(), 0, False
            for one in (client, server):
                waiting.register(one, select.POLLIN)
            while True:
                for ready, _ in waiting.poll():
                    source, target = (client, server) if ready == client.fileno() else (server, client)
                    data = source.recv(65536)
                    if not data:
                        return
                    if source is client:
                        received, posted = 0, posted or data.startswith(b"POST ")
                    elif posted and received < at_bytes <= received + len(data):
                        then()
                    received += len(data) * (source is server)
                    target.sendall(data)

    def accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=carry, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


@dataclass(frozen=True)
class Asked:
    """A request as the server got it."""

    line: str
    headers: dict[str, str]
    body: bytes


Answers = Callable[[Asked], bytes | None]


@dataclass
class FakeServer:
    """Answers each request by what `answers` returns for it; None closes the connection without a word."""

    answers: Answers
    port: int = 0
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    open_now: set[socket.socket] = field(default_factory=set)

    def end_connections(self) -> None:
        """Close all connections, as a server does that ends."""
        for connection in list(self.open_now):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self.open_now.clear()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def lookups(self) -> list[Asked]:
        return [one for one in self.asked if one.line.startswith("POST ")]


@contextlib.contextmanager
def fake_server(answers: Answers) -> Iterator[FakeServer]:
    fake = FakeServer(answers)

    def converse(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as stream:
            while line := stream.readline().decode().strip():
                headers = {}
                while header := stream.readline().decode().strip():
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                asked = Asked(line, headers, stream.read(int(headers.get("content-length", 0))))
                fake.asked.append(asked)
                answer = fake.answers(asked)
                if answer is None:
                    connection.shutdown(socket.SHUT_RDWR)
                    return
                connection.sendall(answer)
                if b"connection: close" in answer.partition(b"\r\n\r\n")[0].lower():
                    return

    def accept(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                fake.open_now.add(connection)
                fake.connections += 1
                threading.Thread(target=converse, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        fake.port = listener.getsockname()[1]
        thread = threading.Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        try:
            yield fake
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            fake.end_connections()
            thread.join(10)


def http(status: int, body: bytes = b"", **headers: str) -> bytes:
    """An answer of HTTP."""
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


def refusal(status: int, code: str, message: str, **headers: str) -> bytes:
    """An error as `kvtools serve` gives it."""
    return http(status, f'{{"error": {{"code": "{code}", "message": "{message}"}}}}'.encode(), **headers)


def rows_of(
    tables: Mapping[str, Mapping[int, Any]],
    dim: int,
    *,
    version: int = 1,
    shard: Any = None,
    key_dtype: str = "int64",
    value_dtype: str = "float32",
    **limits: int,
) -> Answers:
    """What answers for these rows, as a server would."""

    def answer(asked: Asked) -> bytes:
        if asked.line.startswith("GET /v1/tables "):
            listed = [
                {
                    "name": name,
                    "key_dtype": key_dtype,
                    "value_dtype": value_dtype,
                    "dim": dim,
                    "rows": len(rows),
                    "shard": shard,
                }
                for name, rows in tables.items()
            ]
            said = {"version": version, "tables": listed, "limits": limits}
            return http(200, json.dumps(said).encode(), Content_Type="application/json")
        lookups, _ = decode_request(asked.body)
        if "max_keys" in limits and sum(len(one.keys) for one in lookups) > limits["max_keys"]:
            return refusal(413, "too_many_keys", "too many")
        found = []
        for one in lookups:
            rows = tables[one.table]
            keys = one.keys.view(np.uint64 if key_dtype == "uint64" else np.int64).tolist()
            there = np.array([key in rows for key in keys], np.bool_)
            values = np.array([rows.get(key, [0.0] * dim) for key in keys], value_dtype).reshape(-1, dim)
            if one.combiner is not None:
                assert one.row_splits is not None
                pooled = pool(values, one.row_splits, one.combiner, one.weights)
                found.append(TableRows(pooled, None, int((~there).sum())))
                continue
            found.append(TableRows(values, there, int((~there).sum())))
        frame = encode_answer(found, version, [one.own_type for one in lookups])
        return http(200, frame, Content_Type="application/x-kvtools-lookup")

    return answer


def certificate(folder: Any) -> tuple[str, str]:
    """A certificate for localhost that signs itself, and its key: file names."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", cert),
        ],
        check=True,
        capture_output=True,
    )
    ssl.create_default_context(cafile=cert)  # It can be read.
    return str(cert), str(key)
