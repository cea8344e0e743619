"""Lookups of a head that was seen before: the same answers as without, until what is served changes, or to whom."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from resp_server import serving
from test_answer import TABLES, Reference
from test_http_protocol import Running, read_all

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httptools")
import uvicorn

from kvtools import _snapshot
from kvtools.server.catalog import Catalog, ServedModel, ServedVersion, static_catalog
from kvtools.server.http_protocol import LookupProtocol, make_protocol
from kvtools.server.lookups import Lookups
from kvtools.server.metrics import Metrics
from kvtools.server.observer import Observer
from kvtools.server.recent_keys import RecentKeys
from kvtools.server.resp import RespProtocol
from kvtools.server.settings import Settings
from kvtools.server.store import TableStore
from kvtools.server.telemetry import Telemetry

BINARY = "application/octet-stream"
SECRET = "a-key-of-some-length"


class Wire:
    """A transport that keeps what is written, and a connection on it. `full_after` bytes it asks for a pause."""

    def __init__(self, catalog: Catalog, settings: Settings, observer: Observer, full_after: int = 1 << 30) -> None:
        self.lookups = Lookups(catalog, settings, observer)
        config = uvicorn.Config(None, lifespan="off", ws="none", log_level="critical", access_log=False)  # type: ignore[arg-type]
        config.load()
        state = uvicorn.Server(config).server_state
        state.default_headers = [(b"date", b"now"), (b"server", b"test")]
        self.loop = asyncio.new_event_loop()
        self.written = b""
        self.full_after = full_after
        self.protocol: LookupProtocol = make_protocol(self.lookups)(config, state, {}, self.loop)
        self.protocol.connection_made(self)  # type: ignore[arg-type]

    def write(self, data: bytes) -> None:
        self.written += data
        if len(self.written) >= self.full_after:
            self.protocol.pause_writing()

    def get_extra_info(self, name: str) -> None:
        return None

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def ask(self, data: bytes) -> bytes:
        """What is answered to `data`; ids that are made read as `made`."""
        self.written = b""
        self.protocol.data_received(data)
        return re.sub(rb"(x-request-id: )[0-9a-f]{12}-[0-9a-f]+(?=\r\n)", rb"\1made", self.written)

    @property
    def prepared(self) -> bool:
        """Whether what was asked last was answered in C++."""
        return self.protocol._prepared is not None and self.protocol._prepared.valid

    def close(self) -> None:
        pass

    def end(self) -> None:
        self.protocol.connection_lost(None)
        self.lookups.close()
        self.loop.close()


@pytest.fixture
def wire() -> Iterator[Callable[..., Wire]]:
    made: list[Wire] = []

    def make(catalog: Catalog, observer: Observer | None = None, full_after: int = 1 << 30, **settings: Any) -> Wire:
        chosen = Settings(**settings)
        made.append(Wire(catalog, chosen, observer or Telemetry(catalog, chosen), full_after))
        return made[-1]

    yield make
    for each in made:
        each.end()


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    return [Reference(*types) for types in TABLES]


@pytest.fixture(scope="module")
def catalog(references: list[Reference], tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    path = tmp_path_factory.mktemp("snapshot") / "all.kvsnap"
    writer = _snapshot.Writer(str(path), 1 << 20)
    for reference in references:
        reference.write(writer)
    writer.close(json.dumps({"format": "kvtools snapshot", "tables": {}}).encode())
    return static_catalog(warm(path), number=5)


def warm(path: Path) -> TableStore:
    store = TableStore(path)
    store.populate()
    return store


def one_table(path: Path, value: float, rows: int = 10) -> TableStore:
    """A table `emb` of 2 numbers a row, which all are `value`, of the keys from 0 on."""
    writer = _snapshot.Writer(str(path), 1 << 20)
    writer.begin_table("emb", key_dtype="int64", value_dtype="float32", dim=2, rows=rows)
    writer.add_keys(np.arange(rows))
    writer.sort_keys()
    writer.add_rows(0, np.full((rows, 2), value, np.float32))
    writer.end_table()
    writer.close(json.dumps({"format": "kvtools snapshot", "tables": {}}).encode())
    return warm(path)


def post(body: bytes, table: str = "emb", query: str = "", **headers: str) -> bytes:
    fields = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"POST /v1/tables/{table}:lookup{query} HTTP/1.1\r\nHost: a\r\n{fields}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def octets(*keys: int, **headers: str) -> bytes:
    return post(np.array(keys, "<i8").tobytes(), Content_Type=BINARY, Accept=BINARY, **headers)


def row(key: int | str, table: str = "emb", query: str = "", **headers: str) -> bytes:
    fields = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"GET /v1/tables/{table}/rows/{key}{query} HTTP/1.1\r\nHost: a\r\n{fields}\r\n".encode()


def requests_of(reference: Reference) -> Iterator[bytes]:
    """Every form of a lookup, as it may come to one table."""
    keys = [int(key) for key in reference.keys]
    absent = 2
    bits = [key if key < 2**63 else key - 2**64 for key in keys]
    lists = [[], [keys[0]], [absent], [keys[1], absent, keys[1], keys[5]]]
    for query in ("", "?missing=zeros", "?missing=default", "?missing=error"):
        for accept in (BINARY, "*/*"):
            for some in ([], [bits[0]], [absent], [bits[1], absent, bits[1], bits[5]], [2**40], [-1]):
                body = np.array(some, "<i8").tobytes()
                yield post(body, reference.name, query, Content_Type=BINARY, Accept=accept)
            for few in lists:
                yield post(json.dumps({"keys": few}).encode(), reference.name, query, Accept=accept)
            for key in (keys[0], keys[1], absent, "-0", "007", -1, 2**31, 2**63, 2**64, "9" * 20, "9" * 21):
                yield row(key, reference.name, query, Accept=accept)
    pooled: list[dict[str, Any]] = [
        {"keys": [[keys[0], absent], []], "combiner": "mean"},
        {"keys": [[keys[0]], [keys[1]]], "combiner": "sum", "weights": [[2], [0.5]]},
        {"keys": [keys[0]], "missing": "error"},
        {"keys": keys[:3], "missing": "default"},
        {"keys": [[absent]], "combiner": "sqrtn", "missing": "error"},
        {"keys": ["a"]},
        {"keys": [0] * 51},
        {"keys": [0] * 45},
    ]
    yield from (post(json.dumps(body).encode(), reference.name) for body in pooled)
    yield post(b"{", reference.name)
    yield post(b"1234567", reference.name, Content_Type=BINARY)
    yield post(b"{}", reference.name + "/none")


@pytest.mark.parametrize("number", range(len(TABLES)), ids=["/".join(types) for types in TABLES])
def test_answers_are_those_of_a_head_that_is_new(
    catalog: Catalog, references: list[Reference], wire: Callable[..., Wire], number: int
) -> None:
    limits: dict[str, Any] = {"max_keys": 50, "max_values": 120}
    usual, short = wire(catalog, Observer(), **limits), wire(catalog, **limits)
    prepared = 0
    for request in requests_of(references[number]):
        if request.startswith(b"GET") and len(re.findall(rb"\d{21}", request)):
            continue  # of the usual way, which needs an application
        expected = usual.ask(request)
        assert not usual.prepared
        assert [short.ask(request) for _ in range(3)] == [expected] * 3, request
        prepared += short.prepared and expected.startswith(b"HTTP/1.1 200 ")
    assert prepared > 50


def test_requests_in_one_segment_and_in_pieces(catalog: Catalog, wire: Callable[..., Wire]) -> None:
    table = "int64/float32"
    mixed = [
        post(b'{"keys": [2, 3]}', table),
        post(bytes(8), table, Content_Type=BINARY, Accept=BINARY),
        post(bytes(8), table, Content_Type=BINARY, Accept=BINARY),
        row(2, table, "?missing=zeros"),
        row(333, table, "?missing=zeros"),
        post(b'{"keys": "x"}', table),
        post(b"1234567", table, Content_Type=BINARY, Accept=BINARY),
        post(b'{"keys": [4, 3]}', table, X_Request_Id="mine"),
    ]
    usual, short = wire(catalog, Observer()), wire(catalog)
    expected = b"".join(usual.ask(request) for request in mixed)
    assert expected.count(b"HTTP/1.1 200") == 6 and expected.count(b"x-request-id: mine") == 1
    whole = b"".join(mixed)
    assert short.ask(whole) == short.ask(whole) == expected
    cuts, start = [0], 0
    for request in mixed:  # within bodies: a head that is not whole goes the usual way
        if request.startswith(b"POST"):
            head = request.index(b"\r\n\r\n") + 4
            cuts += [start + head, start + (head + len(request)) // 2]
        start += len(request)
    for _ in range(2):
        assert b"".join(short.ask(whole[a:b]) for a, b in pairwise([*cuts, start])) == expected


def test_a_client_that_does_not_read_stops_what_follows(tmp_path: Path, wire: Callable[..., Wire]) -> None:
    catalog = static_catalog(one_table(tmp_path / "a.kvsnap", 1))
    request = octets(*range(400))
    usual = wire(catalog, Observer())
    expected = usual.ask(request)
    short = wire(catalog, full_after=100_000)
    for _ in range(2):
        short.ask(request)
    many = 100
    got = short.ask(many * request)
    assert short.prepared and 100_000 <= len(got) < 200_000 and expected * (len(got) // len(expected)) == got
    for _ in range(many):
        if short.protocol._stalled is None:
            break
        got += short.ask(b"")
        short.written = b""
        short.protocol.resume_writing()
        got += re.sub(rb"(x-request-id: )[0-9a-f]{12}-[0-9a-f]+(?=\r\n)", rb"\1made", short.written)
    assert got == expected * many


def test_a_client_that_reads_late_gets_every_answer_in_order() -> None:
    with Running(Settings()) as server:
        server.lookups.observer = Telemetry(server.lookups.catalog, server.lookups.settings)
        some, more = post(bytes(8 * 400), "ads/emb", Content_Type=BINARY, Accept=BINARY), row(-7, "ads/emb")
        with server.connect() as connection:
            connection.sendall(row(-7, "ads/emb") + some + row(-7, "ads/emb", Connection="close"))
            once = read_all(connection)
        with server.connect() as connection:
            asked = 4 * more + 1500 * (some + more) + row(-7, "ads/emb", Connection="close")
            sender = threading.Thread(target=connection.sendall, args=(asked,))
            sender.start()
            sender.join(0.2)
            received = read_all(connection)
            sender.join()
    changing = re.compile(rb"(?:date|x-request-id): [^\r]*\r\n")
    expected, place = changing.sub(b"", once), [m.start() for m in re.finditer(b"HTTP/1.1 ", changing.sub(b"", once))]
    one, two, last = expected[: place[1]], expected[place[1] : place[2]], expected[place[2] :]
    assert changing.sub(b"", received) == 4 * one + 1500 * (two + one) + last
    assert len(set(re.findall(rb"x-request-id: ([^\r]*)", received))) == 4 + 3000 + 1


def test_after_a_swap_rows_are_of_the_new_version_and_the_old_one_is_let_go(
    tmp_path: Path, wire: Callable[..., Wire]
) -> None:
    store = one_table(tmp_path / "1.kvsnap", 1)
    catalog = static_catalog(store)
    old = weakref.ref(store)
    short = wire(catalog)
    first = [short.ask(octets(3)) for _ in range(3)][-1]
    assert short.prepared and np.frombuffer(first[-8:], "<f4").tolist() == [1, 1]
    with serving(catalog, observer=Telemetry(catalog, Settings())) as server:
        client = Client(server.port)
        assert [client.value(b"GET emb:3\r\n") for _ in range(3)] == [1, 1, 1]
        version = ServedVersion("default", 2, tmp_path, one_table(tmp_path / "2.kvsnap", 2), {"emb": RecentKeys()})
        catalog.publish(ServedModel("default", (version,)))
        del store
        gc.collect()
        assert old() is None, "no connection keeps it, though nothing was asked since"
        for _ in range(3):
            answer = short.ask(octets(3))
            assert b"x-embedding-version: 2\r\n" in answer and np.frombuffer(answer[-8:], "<f4").tolist() == [2, 2]
            assert client.value(b"GET emb:3\r\n") == 2
        assert short.prepared
        catalog.publish(ServedModel("default", ()))
        assert short.ask(octets(3)).startswith(b"HTTP/1.1 503 ")
        assert client.ask(b"GET emb:3\r\n").startswith(b"-ERR model 'default' has no version")
        catalog.publish(ServedModel("default", (version,)))
        assert short.ask(octets(3)).startswith(b"HTTP/1.1 200 ") and client.value(b"GET emb:3\r\n") == 2
        client.close()


def test_what_is_prepared_while_a_version_is_published_is_of_no_use(
    tmp_path: Path, wire: Callable[..., Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    catalog = static_catalog(one_table(tmp_path / "1.kvsnap", 1))
    version = ServedVersion("default", 2, tmp_path, one_table(tmp_path / "2.kvsnap", 2), {"emb": RecentKeys()})
    short = wire(catalog)
    short.ask(octets(3))
    plain = Catalog.version

    def slow(self: Catalog) -> ServedVersion:
        taken = plain(self)
        monkeypatch.undo()
        catalog.publish(ServedModel("default", (version,)))
        return taken

    monkeypatch.setattr(Catalog, "version", slow)
    for _ in range(2):
        assert np.frombuffer(short.ask(octets(3))[-8:], "<f4").tolist() == [2, 2]


def test_a_key_that_is_taken_away_opens_nothing_any_more(tmp_path: Path, wire: Callable[..., Wire]) -> None:
    keys = tmp_path / "keys.toml"
    entry = '[[key]]\nname = "{}"\nkey = "{}"\ntables = ["{}"]\n'
    other = entry.format("other", "another-secret-key", "emb")
    keys.write_text(other + entry.format("mine", SECRET, "emb"))
    catalog = static_catalog(one_table(tmp_path / "1.kvsnap", 1))
    observer = Telemetry(catalog, Settings(api_keys=keys))
    short = wire(catalog, observer)
    asked, hello = octets(3, Authorization=f"Bearer {SECRET}"), f"AUTH {SECRET}\r\n".encode()
    with serving(catalog, observer=observer) as server:
        client = Client(server.port)
        assert client.ask(b"GET emb:3\r\n").startswith(b"-NOAUTH")
        assert client.ask(hello) == b"+OK\r\n"
        for _ in range(3):
            assert short.ask(asked).startswith(b"HTTP/1.1 200 ") and client.value(b"GET emb:3\r\n") == 1
            assert short.ask(octets(3)).startswith(b"HTTP/1.1 401 ")
        assert client.ask(b"RESET\r\n") == b"+RESET\r\n"
        assert client.ask(b"GET emb:3\r\n").startswith(b"-NOAUTH")
        assert client.ask(hello) == b"+OK\r\n" and client.value(b"GET emb:3\r\n") == 1
        keys.write_text(other + entry.format("mine", SECRET, "else"))
        observer.reload()
        assert short.ask(asked).startswith(b"HTTP/1.1 403 ") and client.ask(b"GET emb:3\r\n").startswith(b"-NOPERM")
        keys.write_text(other)
        observer.reload()
        assert short.ask(asked).startswith(b"HTTP/1.1 401 ") and client.ask(b"GET emb:3\r\n").startswith(b"-NOAUTH")
        client.close()


def test_a_table_that_is_selected_is_the_one_that_is_looked_up(tmp_path: Path) -> None:
    path = tmp_path / "two.kvsnap"
    writer = _snapshot.Writer(str(path), 1 << 20)
    for name, value in (("a", 1), ("b", 2)):
        writer.begin_table(name, key_dtype="int64", value_dtype="float32", dim=2, rows=1)
        writer.add_keys(np.array([3]))
        writer.sort_keys()
        writer.add_rows(0, np.full((1, 2), value, np.float32))
        writer.end_table()
    writer.close(json.dumps({"format": "kvtools snapshot", "tables": {}}).encode())
    catalog = static_catalog(warm(path))
    with serving(catalog, observer=Telemetry(catalog, Settings())) as server:
        client = Client(server.port)
        for _ in range(2):
            for number, value in ((0, 1), (1, 2), (0, 1)):
                assert client.ask(b"SELECT %d\r\n" % number) == b"+OK\r\n"
                assert [client.value(b"GET 3\r\n") for _ in range(2)] == [value, value]
            assert client.ask(b"GET 4\r\n") == b"$-1\r\n"
            assert client.ask(b"HELLO 3\r\n").startswith(b"%") and client.ask(b"GET 4\r\n") == b"_\r\n"
            assert client.ask(b"HELLO 2\r\n").startswith(b"*") and client.ask(b"GET 4\r\n") == b"$-1\r\n"
        client.close()


def test_counts_are_exact_over_both_ways_and_all_workers(tmp_path: Path, wire: Callable[..., Wire]) -> None:
    catalog = static_catalog(one_table(tmp_path / "1.kvsnap", 1))
    shared = tmp_path / "shared"
    shared.mkdir()
    short = wire(catalog, shared=shared)
    observer = short.lookups.observer
    assert isinstance(observer, Telemetry)
    asked = [octets(3), octets(3, 99, 3), row(3), row(99), octets(*range(3000)), octets(1, X_Request_Id="x")]
    for times in range(1, 8):
        for request in asked:
            short.ask(request)
        text = observer.metrics()
        assert f'kvtools_requests_total{{protocol="http",api="lookup",status="200"}} {4 * times}\n' in text
        assert f'kvtools_requests_total{{protocol="http",api="row",status="200"}} {times}\n' in text
        assert f'kvtools_requests_total{{protocol="http",api="row",status="404"}} {times}\n' in text
        assert (
            f'kvtools_request_seconds_count{{protocol="http",api="lookup",table="emb",model="default"}} {4 * times}\n'
            in text
        )
        assert f'kvtools_keys_total{{table="emb",model="default"}} {(1 + 3 + 1 + 3000 + 1) * times}\n' in text
        assert f'kvtools_keys_missing_total{{table="emb",model="default"}} {(1 + 2990) * times}\n' in text
        assert f'kvtools_request_bytes_total{{protocol="http"}} {8 * (1 + 3 + 3000 + 1) * times}\n' in text
    observer.tick()
    (shared / f"metrics-{observer._counted._file.stem[8:]}.json").rename(shared / "metrics-1.json")  # type: ignore[union-attr]
    assert f'kvtools_keys_total{{table="emb",model="default"}} {3006 * 7}\n' in Metrics(catalog, shared).text(), (
        "another worker"
    )


def test_a_pipeline_of_the_redis_protocol_is_one_request_to_the_counts(tmp_path: Path) -> None:
    catalog = static_catalog(one_table(tmp_path / "1.kvsnap", 1))
    observer = Telemetry(catalog, Settings())
    with serving(catalog, observer=observer) as server:
        client = Client(server.port)
        for times in range(1, 4):
            client.ask(b"GET emb:3\r\nMGET emb:1 emb:99\r\n")
            text = observer.metrics()
            assert f'kvtools_requests_total{{protocol="resp",api="resp",status="200"}} {times}\n' in text
            assert f'kvtools_keys_total{{table="emb",model="default"}} {3 * times}\n' in text
            assert f'kvtools_keys_missing_total{{table="emb",model="default"}} {times}\n' in text
        client.close()


def test_replies_of_a_long_pipeline_come_in_order(tmp_path: Path) -> None:
    catalog = static_catalog(one_table(tmp_path / "1.kvsnap", 1))
    with serving(catalog, observer=Telemetry(catalog, Settings())) as server:
        client = Client(server.port)
        row_of = b"$8\r\n" + np.ones(2, "<f4").tobytes() + b"\r\n"
        pipeline = b"PING\r\n" + 9000 * b"GET emb:3\r\nGET emb:99\r\n" + b"GET emb:x\r\nGET emb:3\r\nQUIT\r\n"
        fault = b"-ERR got key 'x', expected an integer, as in table:17\r\n"
        for _ in range(2):
            client.socket.sendall(pipeline)
            expected = b"+PONG\r\n" + 9000 * (row_of + b"$-1\r\n") + fault + row_of + b"+OK\r\n"
            assert client.read_all() == expected
            client = Client(server.port)
            client.value(b"GET emb:3\r\n")
        client.close()


def test_where_there_is_an_access_log_each_lookup_has_a_line(tmp_path: Path, wire: Callable[..., Wire]) -> None:
    catalog = static_catalog(one_table(tmp_path / "1.kvsnap", 1))
    log = tmp_path / "log"
    short = wire(catalog, access_log=str(log))
    for _ in range(5):
        assert short.ask(octets(3)).startswith(b"HTTP/1.1 200 ")
    assert not short.prepared
    assert isinstance(short.lookups.observer, Telemetry)
    short.lookups.observer.close()
    assert len({json.loads(line)["id"] for line in log.read_text().splitlines()}) == 5


def test_some_of_the_keys_are_remembered_and_ids_differ(tmp_path: Path, wire: Callable[..., Wire]) -> None:
    catalog = static_catalog(one_table(tmp_path / "1.kvsnap", 1))
    short = wire(catalog)
    ids = set()
    for _ in range(40):
        short.ask(octets(3, -2))
        short.ask(octets(2**40, 7))
        ids |= set(re.findall(rb"x-request-id: (\S+)", short.written))
        short.ask(octets(3, -2))
        ids |= set(re.findall(rb"x-request-id: (\S+)", short.written))
    assert len(ids) == 80
    assert catalog.version().recent["emb"].keys().tolist() == [-2, 3, 7, 2**40]


class Client:
    """A connection of the Redis protocol."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)

    def ask(self, commands: bytes) -> bytes:
        """What comes in answer; a command after it tells where that ends."""
        self.socket.sendall(commands + b"ECHO the-end-of-it\r\n")
        received = b""
        while not received.endswith(b"$13\r\nthe-end-of-it\r\n"):
            received += self.socket.recv(65536)
        return received.removesuffix(b"$13\r\nthe-end-of-it\r\n")

    def value(self, command: bytes) -> float:
        """The first number of a row."""
        return float(np.frombuffer(self.ask(command)[4:8], "<f4")[0])

    def read_all(self) -> bytes:
        received = b""
        while chunk := self.socket.recv(1 << 20):
            received += chunk
        self.close()
        return received

    def close(self) -> None:
        self.socket.close()


COMMANDS = [
    b"GET emb:3\r\n",
    b"MGET emb:3 emb:99 emb:0\r\n",
    b"*3\r\n$4\r\nMGET\r\n$5\r\nemb:1\r\n$6\r\nemb:77\r\n",
    b"HGET emb 3\r\n",
    b"HMGET emb 3 -3 5\r\n",
    b"hmget emb 1\r\n",
    b"*2\r\n$3\r\nGET\r\n$1\r\n3\r\n",
    b"GET small:3\r\n",
    b"MGET emb:3 small:4\r\n",
    b"MGET small:2147483647 small:2147483648\r\n",
    b"GET none:3\r\n",
    b"GET emb:x\r\n",
    b"GET\r\n",
    b"MGET emb:99999999999999999999\r\n",
    b"MGET " + b"emb:3 " * 51 + b"\r\n",
    b"MGET " + b"emb:3 " * 45 + b"\r\n",
    b"SELECT 1\r\n",
    b"SELECT emb\r\n",
    b"PING\r\n",
    b"\r\n",
    b"HELLO 3\r\n",
    b"HELLO 2\r\n",
    b"EXISTS emb:3 emb:99\r\n",
    b"NONE\r\n",
]


@pytest.fixture(scope="module")
def both_ways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int, Telemetry]]:
    """Two ports of the Redis protocol: where each lookup is told of, none is answered by the reader alone."""
    path = tmp_path_factory.mktemp("resp") / "two.kvsnap"
    writer = _snapshot.Writer(str(path), 1 << 20)
    for name, key_dtype in (("emb", "int64"), ("small", "int32")):
        writer.begin_table(name, key_dtype=key_dtype, value_dtype="float32", dim=2, rows=10)
        writer.add_keys(np.arange(10).astype(key_dtype))
        writer.sort_keys()
        writer.add_rows(0, np.arange(20, dtype=np.float32).reshape(10, 2))
        writer.end_table()
    writer.close(json.dumps({"format": "kvtools snapshot", "tables": {}}).encode())
    catalog = static_catalog(warm(path))
    telemetry = Telemetry(catalog, Settings())
    with (
        serving(catalog, observer=Observer(), max_keys=50, max_values=80) as plain,
        serving(catalog, observer=telemetry, max_keys=50, max_values=80) as short,
    ):
        yield plain.port, short.port, telemetry


@given(st.lists(st.sampled_from(COMMANDS), max_size=12), st.lists(st.integers(1, 60), max_size=12))
@settings(max_examples=60, deadline=None)
def test_replies_are_the_same_whatever_answers_and_wherever_they_are_cut(
    both_ways: tuple[int, int, Telemetry], commands: list[bytes], cuts: list[int]
) -> None:
    data = b"GET emb:3\r\n" * 2 + b"".join(commands) + b"QUIT\r\n"
    replies = []
    for port in both_ways[:2]:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            at = 0
            for size in [*cuts, len(data)]:
                connection.sendall(data[at : at + size])
                at += size
            received = b""
            while chunk := connection.recv(65536):
                received += chunk
            replies.append(received)
    assert replies[0] == replies[1] and replies[0].endswith(b"+OK\r\n")


def test_lookups_of_a_table_that_a_connection_has_looked_up_do_not_come_to_python(
    both_ways: tuple[int, int, Telemetry], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(both_ways[1])
    client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    row_of = b"$8\r\n" + np.array([6, 7], "<f4").tobytes() + b"\r\n"

    def ask(command: bytes, size: int) -> bytes:
        client.socket.sendall(command)
        received = b""
        while len(received) < size:
            received += client.socket.recv(65536)
        return received

    assert ask(b"GET emb:3\r\n", 14) == row_of
    monkeypatch.setattr(RespProtocol, "_go", None)
    monkeypatch.setattr(RespProtocol, "_received", None)
    for _ in range(3):
        assert ask(b"GET emb:3\r\n" * 2, 28) == row_of * 2
        assert ask(b"MGET" + b" emb:3" * 40 + b"\r\n", 5 + 14 * 40) == b"*40\r\n" + row_of * 40
    monkeypatch.undo()
    client.close()
