"""Both ways of a lookup through a real socket, and requests that no client library would send."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httptools")
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvtools.lookup_frame import TableKeys, decode_answer, encode_request
from kvtools.server import lookups as lookups_module
from kvtools.server.app import create_app
from kvtools.server.catalog import static_catalog
from kvtools.server.http_protocol import make_protocol, read_head
from kvtools.server.lookups import Lookups
from kvtools.server.observer import Answered, Observer
from kvtools.server.run import _bind
from kvtools.server.settings import Settings
from kvtools.server.store import TableStore

SAMPLE = Path(__file__).parent.parent / "data" / "sample"
BINARY = "application/octet-stream"
FRAME = "application/x-kvtools-lookup"
LOOKUP = "POST /v1/tables/ads/emb:lookup"


class Seen(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Answered] = []

    def on_answer(self, answered: Answered) -> None:
        super().on_answer(answered)
        self.answers.append(answered)


class Running:
    """A server in a thread of this process; `usual` has one without the short way."""

    def __init__(self, settings: Settings, *, usual: bool = False, path: Path = SAMPLE) -> None:
        self.seen = Seen()
        catalog = static_catalog(TableStore(path))
        self.lookups = Lookups(catalog, settings, self.seen)
        app = create_app(catalog, settings, lookups=self.lookups)
        self.http = HttpToolsProtocol if usual else make_protocol(self.lookups)
        self.config = uvicorn.Config(
            app, http=self.http, lifespan="off", ws="none", log_level="critical", access_log=False
        )
        self.server = uvicorn.Server(self.config)
        self.listener = _bind("127.0.0.1", 0, shared=False)
        self.port: int = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self.server.run, args=([self.listener],))

    def __enter__(self) -> Running:
        self.listener.listen()
        self.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.server.should_exit = True
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.lookups.close()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def ask(self, *parts: bytes) -> bytes:
        """Send `parts`, each in a segment of its own, and read to the end; ids that are made read as `made`."""
        with self.connect() as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for part in parts:
                connection.sendall(part)
            return re.sub(rb"(x-request-id: )[0-9a-f]{12}-[0-9a-f]+(?=\r\n)", rb"\1made", read_all(connection))


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with Running(Settings(max_keys=100, max_values=300)) as server:
        yield server


@pytest.fixture(scope="module")
def usual() -> Iterator[Running]:
    with Running(Settings(max_keys=100, max_values=300), usual=True) as server:
        yield server


def read_all(connection: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while chunk := connection.recv(1 << 20):
            received += chunk
    return received


def message(line: str, body: bytes | None = None, *, version: str = "1.1", **headers: str) -> bytes:
    """A request; `Accept_Encoding="x"` is a header `Accept-Encoding`."""
    fields = {"Host": "a", **{name.replace("_", "-"): value for name, value in headers.items()}}
    if body is not None and "Transfer-Encoding" not in fields:
        fields.setdefault("Content-Length", str(len(body)))
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{line} HTTP/{version}\r\n{head}\r\n".encode() + (body or b"")


Response = tuple[int, dict[str, str], bytes]


def responses(received: bytes) -> list[Response]:
    """Status, headers and body of each answer in what came from one connection."""
    found = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        line, *fields = head.decode().split("\r\n")
        headers = dict(field.split(": ", 1) for field in fields)
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while True:
                size, _, received = received.partition(b"\r\n")
                body += received[: int(size, 16)]
                received = received[int(size, 16) + 2 :]
                if not int(size, 16):
                    break
        else:
            length = int(headers.get("content-length", 0))
            body, received = received[:length], received[length:]
        headers.pop("date", None)
        found.append((int(line.split()[1]), headers, body))
    return found


KEYS = np.array([-7, 3, 2**63 - 1], "<i8")
PARTS = [
    TableKeys("ads/emb", KEYS),
    TableKeys("user_emb", np.array([9, 8, 9]), "mean", np.array([0, 2, 2, 3]), np.array([1, 2, 3], np.float32)),
]
#: name: (request, whether it takes the short way)
CORPUS: dict[str, tuple[bytes, bool]] = {
    "json": (message(LOOKUP, b'{"keys": [-7, 3, 0, -7]}'), True),
    "no keys": (message(LOOKUP, b'{"keys": []}'), True),
    "binary": (message(LOOKUP, KEYS.tobytes(), Content_Type=BINARY, Accept=BINARY), True),
    "binary to json": (message(LOOKUP, KEYS.tobytes(), Content_Type=BINARY, Accept="*/*"), True),
    "json to binary": (message(LOOKUP, b'{"keys":[1]}', Accept=f"{BINARY}, application/json;q=0.5"), True),
    "empty binary": (message(LOOKUP, b"", Content_Type=BINARY, Accept=BINARY), True),
    "pooled": (message(LOOKUP, b'{"keys": [[-7, 0], [], [99]], "combiner": "mean"}'), True),
    "missing in the body": (message(LOOKUP, b'{"keys": [99], "missing": "error"}'), True),
    "missing in the url": (message(f"{LOOKUP}?missing=error", b'{"keys": [99, 98]}'), True),
    "no such missing": (message(f"{LOOKUP}?missing=x", b'{"keys": [99]}'), False),
    "no such parameter": (message(f"{LOOKUP}?mising=error", b'{"keys": [99]}'), False),
    "no default": (message(f"{LOOKUP}?missing=default", b'{"keys": [99]}'), True),
    "several tables": (
        message(
            "POST /v1/tables:lookup",
            b'{"tables": {"ads/emb": {"keys": [-7]}, "user_emb": {"keys": [[9]], "combiner": "sum"}}}',
        ),
        True,
    ),
    "frame": (message("POST /v1/tables:lookup", encode_request(PARTS), Content_Type=FRAME, Accept=FRAME), True),
    "frame to json": (message("POST /v1/tables:lookup", encode_request(PARTS), Content_Type=FRAME), True),
    "no frame": (message("POST /v1/tables:lookup", b"KVQ1", Content_Type=FRAME), True),
    "frame for one table": (message(LOOKUP, encode_request(PARTS), Content_Type=FRAME), True),
    "binary for several": (message("POST /v1/tables:lookup", b"", Content_Type=BINARY), True),
    "unknown of several": (message("POST /v1/tables:lookup", b'{"tables": {"x": {"keys": []}}}'), True),
    "row": (message("GET /v1/tables/ads/emb/rows/-7"), True),
    "binary row": (message("GET /v1/tables/ads/emb/rows/-7", Accept=BINARY), True),
    "missing row": (message("GET /v1/tables/ads/emb/rows/99"), True),
    "missing row as zeros": (message("GET /v1/tables/ads/emb/rows/99?missing=zeros"), True),
    "row out of range": (message("GET /v1/tables/user_emb/rows/99999999999"), True),
    "no key": (message("GET /v1/tables/ads/emb/rows/x"), False),
    "unknown table": (message("POST /v1/tables/nope:lookup", b"{}"), True),
    "no table": (message("POST /v1/tables/:lookup", b"{}"), True),
    "no json": (message(LOOKUP, b"{"), True),
    "no keys at all": (message(LOOKUP, b"{}"), True),
    "unknown member": (message(LOOKUP, b'{"keys": [1], "combinr": "sum"}'), True),
    "text key": (message(LOOKUP, b'{"keys": ["1"]}'), True),
    "too many keys": (message(LOOKUP, b'{"keys": [1' + b",1" * 100 + b"]}"), True),
    "too many values": (message(LOOKUP, b'{"keys": [1' + b",1" * 99 + b"]}"), True),
    "too large": (message(LOOKUP, b" " * 6000), False),
    "escaped url": (message("POST /v1/tables/ads%2Femb:lookup", b'{"keys": [0]}'), False),
    "query": (message(f"{LOOKUP}?a=b", b'{"keys": [0]}'), False),
    "gzip": (message(LOOKUP, gzip.compress(b'{"keys": [0]}'), Content_Encoding="gzip"), False),
    "gzip bomb": (message(LOOKUP, gzip.compress(bytes(1 << 22)), Content_Encoding="gzip"), False),
    "gzip that is none": (message(LOOKUP, b'{"keys": [0]}', Content_Encoding="gzip"), False),
    "gzip cut off": (message(LOOKUP, gzip.compress(b'{"keys": [0]}')[:-9], Content_Encoding="gzip"), False),
    "deflate": (message(LOOKUP, b"x", Content_Encoding="deflate"), False),
    "chunked": (
        message(LOOKUP, b'5\r\n{"key\r\n9\r\ns": [-7]}\r\n0\r\n\r\n', Transfer_Encoding="chunked"),
        False,
    ),
    "expect": (message(LOOKUP, b'{"keys": [0]}', Expect="100-continue"), False),
    "two lengths": (message(LOOKUP, b'{"keys": [0]}', Content_length="13"), False),
    "get": (message("GET /v1/tables/ads/emb:lookup"), False),
    "list": (message("GET /v1/tables"), False),
    "head of list": (message("HEAD /v1/tables"), False),
    "head of row": (message("HEAD /v1/tables/ads/emb/rows/-7"), False),
    "head of a lookup": (message("HEAD /v1/tables/ads/emb:lookup"), False),
}


@pytest.mark.parametrize("name", CORPUS)
def test_both_ways_give_the_same_answer(running: Running, usual: Running, name: str) -> None:
    data, short = CORPUS[name]
    last = message("GET /healthz", Connection="close")
    running.seen.answers.clear()
    answer = running.ask(data + last)
    told = [answered.short for answered in running.seen.answers if answered.kind]
    assert told == ([short] if told else [])  # nobody is told of what is no lookup
    if short:
        assert told
    if name == "two lengths":  # no HTTP, of which uvicorn says so in its own words
        assert responses(answer)[0][0] == responses(usual.ask(data + last))[0][0] == 400
    else:
        assert without_dates(answer) == without_dates(usual.ask(data + last))


def test_who_sends_what_is_no_http_is_named_in_the_log(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    assert running.ask(b"GET / HTTP/9.x\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    (line,) = [record.getMessage() for record in caplog.records if "HTTP" in record.getMessage()]
    assert re.fullmatch(r"127\.0\.0\.1:\d+ sent what is no HTTP that this server reads: .*version.*", line), line


def without_dates(received: bytes) -> list[bytes]:
    return [line for line in received.split(b"\r\n") if not line.startswith(b"date: ")]


@pytest.mark.parametrize("name", [name for name, (_, short) in CORPUS.items() if short])
def test_a_lookup_in_any_two_segments_has_its_answer(running: Running, name: str) -> None:
    data = CORPUS[name][0]
    last = message("GET /healthz", Connection="close")
    expected = responses(running.ask(data + last))
    body = data.find(b"\r\n\r\n") + 4
    for cut in {1, body - 2, body, (body + len(data)) // 2, len(data) - 1}:
        assert responses(running.ask(data[:cut], data[cut:], last)) == expected


def test_requests_may_come_all_at_once(running: Running) -> None:
    wanted = [name for name in CORPUS if not name.startswith(("head", "expect", "two lengths"))] * 3
    data = b"".join(CORPUS[name][0] for name in wanted) + message("GET /healthz", Connection="close")
    got = responses(running.ask(data))
    single = {
        name: responses(running.ask(CORPUS[name][0] + message("GET /healthz", Connection="close")))[0]
        for name in wanted
    }
    assert len(got) == len(wanted) + 1
    for name, answer in zip(wanted, got, strict=False):
        assert answer == single[name], name


def test_http_1_0_and_close_are_kept(running: Running) -> None:
    body = b'{"keys": [0]}'
    for data in (message(LOOKUP, body, version="1.0"), message(LOOKUP, body, Connection="close")):
        ((status, headers, answer),) = responses(running.ask(data))
        assert (status, headers["connection"]) == (200, "close") and json.loads(answer)["found"] == [True]


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
def test_an_offer_to_go_over_to_another_protocol_is_not_taken(running: Running, protocol: str) -> None:
    offer = {"Connection": "Upgrade, HTTP2-Settings", "Upgrade": protocol, "HTTP2-Settings": "AAMAAABkAAQAoAAA"}
    chunks = b"8\r\n" + KEYS.tobytes()[:8] + b"\r\n10\r\n" + KEYS.tobytes()[8:] + b"\r\n0\r\n\r\n"
    octets = {"Content_Type": BINARY, "Accept": BINARY}
    whole = [message(LOOKUP, KEYS.tobytes(), **octets), message(LOOKUP, chunks, Transfer_Encoding="chunked", **octets)]
    offering = [message(LOOKUP, KEYS.tobytes(), **octets, **offer)]
    offering.append(message(LOOKUP, chunks, Transfer_Encoding="chunked", **octets, **offer))
    last = [message("GET /healthz", Connection=f"close{more}", Upgrade=protocol) for more in ("", ", Upgrade")]
    expected = responses(running.ask(b"".join(whole), last[0]))
    assert [status for status, _, _ in expected] == [200] * 3 and expected[0][1]["x-embedding-shape"] == "3,4"
    sent = b"".join([*offering, last[1]])
    for cut in range(1, len(sent), 13):
        assert responses(running.ask(sent[:cut], sent[cut:])) == expected, cut
    assert responses(running.ask(message("CONNECT /", Connection="close") + sent))[0][0] == 400


def test_a_client_is_told_to_go_on_or_not_to_send_at_all(running: Running) -> None:
    with running.connect() as connection:
        connection.sendall(message(LOOKUP, None, Expect="100-continue", Content_Length="13"))
        assert connection.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b'{"keys": [0]}')
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.sendall(message(LOOKUP, None, Expect="100-continue", Content_Length="1000000"))
        assert connection.recv(1000).startswith(b"HTTP/1.1 413")


def test_small_answers_do_not_wait_for_acknowledgements(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio sets TCP_NODELAY only where a socket says that it is of TCP."""
    set_for: list[int] = []
    with Running(Settings()) as server:
        protocol: Any = server.http
        made = protocol.connection_made

        def connection_made(self: Any, transport: asyncio.Transport) -> None:
            accepted = transport.get_extra_info("socket")
            set_for.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            made(self, transport)

        monkeypatch.setattr(protocol, "connection_made", connection_made)
        assert server.ask(message("GET /healthz", Connection="close")).startswith(b"HTTP/1.1 200")
    assert set_for == [1]


@pytest.mark.parametrize("accept", [BINARY, "application/json"])
def test_a_large_lookup_is_done_by_a_thread(running: Running, monkeypatch: pytest.MonkeyPatch, accept: str) -> None:
    monkeypatch.setattr(lookups_module, "_SMALL_BINARY", 8)
    monkeypatch.setattr(lookups_module, "_SMALL_JSON", 8)
    threads = set()
    answer_lookup = lookups_module.answer_lookup

    def note(*arguments: Any) -> Any:
        threads.add(threading.current_thread().name.partition("_")[0])
        return answer_lookup(*arguments)

    monkeypatch.setattr(lookups_module, "answer_lookup", note)
    data = message(LOOKUP, b'{"keys": [-7, 3, 0]}', Accept=accept)
    first, second, _ = responses(running.ask(data + data + message("GET /healthz", Connection="close")))
    assert first == second and first[0] == 200 and threads == {"lookup"}
    assert [answered.short for answered in running.seen.answers[-2:]] == [True, True]


@pytest.mark.parametrize("path", ["", "?missing=zer%6Fs"], ids=["short", "usual"])
def test_a_client_that_sends_no_more_has_its_answers(
    running: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(lookups_module, "_SMALL_JSON", 0)
    answer_lookup, ended = lookups_module.answer_lookup, threading.Event()

    def wait(*arguments: Any) -> Any:
        ended.wait(60)
        return answer_lookup(*arguments)

    monkeypatch.setattr(lookups_module, "answer_lookup", wait)
    with running.connect() as connection:
        connection.sendall(message(LOOKUP + path, b'{"keys": [0]}') * 3)
        connection.shutdown(socket.SHUT_WR)
        assert running.ask(message("GET /healthz", Connection="close"))  # the end has been seen
        ended.set()
        assert [status for status, _, _ in responses(read_all(connection))] == [200] * 3


def test_large_json_is_sent_in_blocks(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    data = message(LOOKUP, json.dumps({"keys": [-7, 3, 0] * 20}).encode(), Connection="close")
    ((status, _, whole),) = responses(running.ask(data))
    monkeypatch.setattr(lookups_module, "STREAMED_NUMBERS", 100)
    monkeypatch.setattr("kvtools.server.answer.STREAMED_NUMBERS", 100)
    monkeypatch.setattr("kvtools.server.codecs._NUMBERS_AT_ONCE", 20)
    ((status, headers, body),) = responses(running.ask(data))
    assert (status, headers["transfer-encoding"], body) == (200, "chunked", whole)
    old = running.ask(message(LOOKUP, json.dumps({"keys": [-7, 3, 0] * 20}).encode(), version="1.0"))
    ((status, headers, body),) = responses(old)
    assert "transfer-encoding" not in headers and body == whole


def test_too_many_lookups_at_a_time_are_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookups_module, "_SMALL_JSON", 0)
    entered, go_on = threading.Event(), threading.Event()
    answer_lookup = lookups_module.answer_lookup

    def wait(*arguments: Any) -> Any:
        entered.set()
        go_on.wait(60)
        return answer_lookup(*arguments)

    monkeypatch.setattr(lookups_module, "answer_lookup", wait)
    data = message(LOOKUP, b'{"keys": [0]}')
    with Running(Settings(max_concurrent=1)) as server, server.connect() as first:
        first.sendall(data)
        assert entered.wait(60)
        for late in (data, data[:-1]):  # the short way, and the usual one
            with server.connect() as second:
                second.sendall(late)
                second.sendall(data[len(late) :])
                ((status, headers, body),) = responses(second.recv(10_000))
            assert (status, headers["retry-after"]) == (429, "1")
            assert json.loads(body)["error"]["code"] == "too_busy"
        go_on.set()
        assert first.recv(10_000).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "data",
    [b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", message("GET /", **{"a b": "c"})],
    ids=["tls", "version", "header"],
)
def test_what_is_no_http_has_an_error_like_others(running: Running, data: bytes) -> None:
    running.seen.answers.clear()
    ((status, headers, body),) = responses(running.ask(data))
    assert (status, headers["connection"], headers["content-type"]) == (400, "close", "application/json")
    assert json.loads(body)["error"]["code"] == "bad_request"
    assert [(answered.status, answered.kind) for answered in running.seen.answers] == [(400, "")]


def test_a_head_has_a_limit(running: Running) -> None:
    with running.connect() as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                connection.sendall(b"a: " + b"b" * 1000 + b"\r\n")
        received = read_all(connection)
    assert received == b"" or responses(received)[0][0] == 431  # sending on may break the connection before it is read
    assert running.seen.answers[-1].code == "head_too_large"


INFER = b'{"inputs": [{"name": "ids", "shape": [1], "datatype": "INT64", "data": [0]}]}'


@pytest.mark.parametrize(
    "large",
    [
        message("GET /healthz", Connection="close", Cookie="c" * 70_000),
        message("GET /healthz", Connection="close", **{f"a{number}": "b" * 90 for number in range(700)}),
        message("GET /healthz?" + "q" * 70_000, Connection="close"),
        message(LOOKUP, b'{"keys": [0]}', Connection="close", Cookie="c" * 70_000),
        message("POST /v2/models/ads/emb/infer", INFER, Connection="close", Cookie="c" * 70_000),
        message(LOOKUP, b'{"keys": [0]}', Cookie="c" * 70_000),
    ],
    ids=["header", "headers", "url", "lookup", "infer", "short way"],
)
def test_a_head_has_a_limit_also_where_it_comes_whole(running: Running, large: bytes) -> None:
    for before in (b"", message(LOOKUP, b'{"keys": [0]}')):  # what came before it is answered
        *first, (status, headers, body) = responses(running.ask(before + large))
        assert [answer[0] for answer in first] == [200] * bool(before)
        assert (status, headers["connection"]) == (431, "close")
        assert json.loads(body)["error"]["code"] == "head_too_large"
    small = large.replace(b"c" * 70_000, b"c" * 65_000).replace(b"q" * 70_000, b"q" * 65_000).replace(b"b" * 90, b"b")
    small = small.replace(b"Host: a\r\n", b"Host: a\r\nConnection: close\r\n") if b"close" not in small else small
    assert responses(running.ask(small))[0][0] == 200


HEAD = message(LOOKUP, None, Content_Length="100")
HEALTH = message("GET /healthz", Connection="close")
KEPT = message("GET /healthz")


@pytest.mark.parametrize(
    ("settings", "data", "code"),
    [
        ({"header_timeout": 0.05}, HEAD[:-4], "timeout"),
        ({"header_timeout": 0.05}, b"G", "timeout"),
        ({"body_timeout": 0.05}, HEAD + b"1234", "timeout"),
        ({"body_timeout": 0.05}, message(LOOKUP, b"5\r\n1", Transfer_Encoding="chunked"), "timeout"),
        ({"keep_alive": 0.05}, b"", ""),
        ({"keep_alive": 0.05}, message(LOOKUP, b'{"keys": [0]}'), "answer"),
        ({"keep_alive": 0.05}, message("GET /healthz"), "answer"),
    ],
    ids=["head", "first byte", "body", "chunks", "nothing", "after a lookup", "after another"],
)
def test_what_takes_too_long_is_ended(settings: dict[str, float], data: bytes, code: str) -> None:
    with Running(Settings(**settings)) as server:  # type: ignore[arg-type]
        with server.connect() as connection:
            connection.sendall(data)
            got = responses(read_all(connection))
        if code == "timeout":
            ((status, headers, body),) = got
            assert (status, headers["connection"], json.loads(body)["error"]["code"]) == (408, "close", "timeout")
        else:
            assert [status for status, _, _ in got] == ([200] if code else [])


def test_hundreds_of_half_sent_requests_do_not_hold_up_others(running: Running) -> None:
    with contextlib.ExitStack() as stack:
        for number in range(200):
            connection = stack.enter_context(running.connect())
            connection.sendall((HEAD + b"12")[: 10 + number])
        data = message(LOOKUP, b'{"keys": [0]}', Connection="close")
        assert responses(running.ask(data))[0][0] == 200


def test_beyond_the_limit_of_connections_there_is_a_503_and_probes_are_answered() -> None:
    data = message(LOOKUP, b'{"keys": [0]}')
    with Running(Settings(max_connections=2)) as server, server.connect() as one, server.connect() as two:
        for connection in (one, two):
            connection.sendall(data)
            assert connection.recv(10_000).startswith(b"HTTP/1.1 200")
        ((status, headers, body),) = responses(server.ask(data))
        assert (status, headers["connection"], headers["retry-after"]) == (503, "close", "1")
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        ((status, headers, _),) = responses(server.ask(message("GET /livez")))
        assert (status, headers["connection"]) == (200, "close")
        one.sendall(data)
        assert one.recv(10_000).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_is_cut_off() -> None:
    data = message(LOOKUP, json.dumps({"keys": [0] * 20_000}).encode(), Accept=BINARY)
    with Running(Settings(body_timeout=0.2)) as server, server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(60)
        with contextlib.suppress(ConnectionError):
            while True:  # until the server has let go of the connection
                connection.sendall(data)
        assert server.seen.requests[200] >= 1


@pytest.mark.parametrize("path", ["", "?missing=zer%6Fs"], ids=["short", "usual"])
def test_a_client_that_sends_before_it_reads_has_all_answers(path: str) -> None:
    count = 300  # answers of 32 kB: more than sockets hold
    keys = np.where(np.arange(2000) % 3 == 0, -7, 3).astype("<i8")
    data = message(LOOKUP + path, keys.tobytes(), Content_Type=BINARY, Accept=BINARY)
    with Running(Settings()) as server, server.connect() as connection:
        reader = connection.dup()
        sender = threading.Thread(target=lambda: connection.sendall(data * count + HEALTH))
        sender.start()
        sender.join(0.3)  # it gets stuck, or all is sent
        got = responses(read_all(reader))
        sender.join(60)
        reader.close()
    assert [status for status, _, _ in got] == [200] * (count + 1)
    assert len({body for _, _, body in got}) == 2


def test_a_head_that_begins_behind_large_requests_is_no_large_head() -> None:
    """A segment of over 64 KiB that ends in the middle of a head, whose few bytes alone are the head's."""
    data = message(LOOKUP + "?missing=zer%6Fs", b"\0" * 16_000, Content_Type=BINARY, Accept=BINARY)
    received: list[bytes] = []
    with Running(Settings()) as server, server.connect() as connection:
        reader = threading.Thread(target=lambda: received.append(read_all(connection)))
        reader.start()
        for turn in range(30):  # the window grows: some come in one segment
            connection.sendall(data * 6 + KEPT[:20])
            last = time.monotonic() + 60
            while len(server.seen.answers) < 6 * (turn + 1) and reader.is_alive() and time.monotonic() < last:
                time.sleep(0.002)
            connection.sendall((KEPT if turn < 29 else HEALTH)[20:])
        reader.join(60)
    assert [status for status, _, _ in responses(received[0])] == [200] * (30 * 7)


def test_the_server_ends_with_half_sent_requests_about() -> None:
    with contextlib.ExitStack() as stack, Running(Settings()) as server:
        server.config.timeout_graceful_shutdown = 1
        for data in (b"", HEAD[:20], HEAD + b"1", message(LOOKUP, b"5\r\n1", Transfer_Encoding="chunked")):
            stack.enter_context(server.connect()).sendall(data)
        assert server.ask(message("GET /healthz", Connection="close"))


@pytest.mark.parametrize(
    "head",
    [
        message(LOOKUP, b"", version="1.0"),
        message(LOOKUP, b"", Connection="close"),
        message(LOOKUP, b"", Transfer_Encoding="chunked"),
        message(LOOKUP, b"", Expect="100-continue"),
        message(LOOKUP, b"", Content_Encoding="gzip"),
        message(LOOKUP, b"", Upgrade="h2c"),
        message(LOOKUP, b"", Content_length="0"),
        message(LOOKUP, b"", Content_Length="+1"),
        message(LOOKUP, b"", Content_Length="1, 1"),
        message(LOOKUP),
        message(LOOKUP + " ", b""),
        message(LOOKUP.replace("ads", "a%2F"), b""),
        message(LOOKUP, b"").replace(b"Host: a", b"Host : a"),
        message(LOOKUP, b"").replace(b"Host: a", b"Host: a\r\n b"),
        message(LOOKUP, b"").replace(b"Host: a", b"Host: \xff"),
        message(LOOKUP, b"").replace(b"Host: a", b"Host: a\nb: c"),
        message("GET /v1/tables/x/rows/1", b""),
        message("POST /v1/tables", b""),
    ],
)
def test_what_is_doubtful_goes_the_usual_way(head: bytes) -> None:
    assert read_head(head) is None


def test_the_frame_of_the_corpus_is_right(running: Running, sample_values: dict[str, dict[int, np.ndarray]]) -> None:
    body = responses(running.ask(CORPUS["frame"][0] + message("GET /healthz", Connection="close")))[0][2]
    (plain, pooled), version = decode_answer(body)
    assert version == 1 and plain.found is not None and plain.found.tolist() == [True, False, True]
    ads, user = sample_values["ads/emb"], sample_values["user_emb"]
    assert np.array_equal(plain.embeddings, np.stack([ads[-7], np.zeros(4), ads[2**63 - 1]]))
    row = np.asarray(user[9], np.float32)
    other = np.asarray(user.get(8, np.zeros(8)), np.float32)
    expected = np.stack([(row + 2 * other) / np.float32(3), np.zeros(8, np.float32), row])
    assert np.array_equal(pooled.embeddings, expected) and pooled.found is None


def test_an_observer_may_refuse(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(headers: Any, tables: Any) -> None:
        if headers.get("x-api-key") != "open" and "ads/emb" in tables:
            raise lookups_module.RequestError(401, "unauthorized", "no key")

    monkeypatch.setattr(running.seen, "authorize", refuse)
    data = message(LOOKUP, b'{"keys": [0]}', Connection="close")
    several = message("POST /v1/tables:lookup", b'{"tables": {"ads/emb": {"keys": [0]}}}')
    last = message("GET /healthz", Connection="close")
    for refused in (data, message(LOOKUP, b'{"keys": [0]}') + last, several + last):
        assert responses(running.ask(refused))[0][0] == 401
    assert responses(running.ask(message(LOOKUP, b'{"keys": [0]}', X_API_Key="open") + last))[0][0] == 200


def test_settings_may_make_missing_keys_an_error(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.lookups, "settings", replace(running.lookups.settings, missing="error"))
    data = message(LOOKUP, json.dumps({"keys": [0, *range(90, 102)]}).encode(), Connection="close")
    ((status, _, body),) = responses(running.ask(data))
    assert status == 404
    assert json.loads(body)["error"] == {
        "code": "missing_keys",
        "message": "table 'ads/emb' has no row of 90, 91, 92, 93, 94, 95, 96, 97, 98, 99 and 2 more",
    }
