"""Lookups by the Redis protocol: with redis-py, redis-cli and redis-benchmark, and with bytes that none of them
sends."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis_processes import Server as RedisServer
from resp_server import serving
from version_files import write_snapshot

from kvtools._snapshot import RespReader
from kvtools.array_table import ArrayTable
from kvtools.client import BadAnswerError, Client
from kvtools.dialects.writing import WriteOptions
from kvtools.migrate import write_tables
from kvtools.quantized_rows import decode, encode
from kvtools.server.catalog import static_catalog
from kvtools.server.observer import Answered, Observer
from kvtools.server.request import RequestError
from kvtools.server.resp import RespServer
from kvtools.server.store import TableStore

redis = pytest.importorskip("redis", reason="redis-py is not installed")

SAMPLE = Path(__file__).parent.parent / "data" / "sample"


@pytest.fixture
def users(sample_values: dict[str, dict[int, np.ndarray]]) -> dict[int, np.ndarray]:
    """The rows of user_emb in its own type."""
    return {key: row.astype(ml_dtypes.bfloat16) for key, row in sample_values["user_emb"].items()}


@pytest.fixture(scope="module")
def server() -> Iterator[RespServer]:
    with serving(static_catalog(TableStore(SAMPLE)), max_keys=1000) as running:
        yield running


def exchange(port: int, data: bytes, *, end: bool = True) -> bytes:
    """Send bytes and return all that comes until the server closes, or has answered what was whole."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(data)
        if end:
            connection.shutdown(socket.SHUT_WR)
        received = b""
        while chunk := connection.recv(65536):
            received += chunk
        return received


def command(*words: object) -> bytes:
    encoded = [word if isinstance(word, bytes) else str(word).encode() for word in words]
    return b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)


def bulk(row: np.ndarray) -> bytes:
    data = row.tobytes()
    return b"$%d\r\n%b\r\n" % (len(data), data)


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("parser", ["hiredis", "python"])
def test_redis_py(
    server: RespServer,
    sample_values: dict[str, dict[int, np.ndarray]],
    users: dict[int, np.ndarray],
    protocol: int,
    parser: str,
) -> None:
    if parser == "hiredis":
        pytest.importorskip("hiredis")
        parser_class = redis.connection._HiredisParser
    else:
        parser_class = redis._parsers._RESP3Parser if protocol == 3 else redis._parsers._RESP2Parser
    pool = redis.ConnectionPool(port=server.port, protocol=protocol, parser_class=parser_class)
    with redis.Redis(connection_pool=pool) as client:
        ads = sample_values["ads/emb"]
        assert client.ping()
        assert client.get("ads/emb:-7") == ads[-7].astype("<f4").tobytes()
        assert client.get("ads/emb:99") is None
        found = client.mget([f"ads/emb:{key}" for key in (2**63 - 1, 99, -7)])
        assert [row and np.frombuffer(row, "<f4").tolist() for row in found] == [
            ads[2**63 - 1].tolist(),
            None,
            ads[-7].tolist(),
        ]
        assert client.hmget("user_emb", [9, 4]) == [users[9].tobytes(), None]
        assert client.hget("user_emb", "9") == users[9].tobytes()
        assert client.mget("ads/emb:-7", "user_emb:9", "user_emb:5555") == [ads[-7].tobytes(), users[9].tobytes(), None]
        assert client.exists("ads/emb:-7", "ads/emb:99", "user_emb:9") == 2
        assert client.hexists("ads/emb", "-7")
        assert (client.hlen("ads/emb"), client.dbsize()) == (11, 16)
        assert client.info()["kvtools_version"]
        assert client.client_id() > 0 and client.echo("hello") == b"hello"
        pipeline = client.pipeline(transaction=False)
        for key in (0, -7, 99):
            pipeline.get(f"ads/emb:{key}")
        pipeline.echo("between").mget(["user_emb:9"])
        rows = [ads[0].tobytes(), ads[-7].tobytes(), None]
        assert pipeline.execute() == [*rows, b"between", [users[9].tobytes()]]


def test_a_database_is_a_table(server: RespServer, users: dict[int, np.ndarray]) -> None:
    with redis.Redis(port=server.port, db=2) as client:
        assert client.mget(9, 4) == [users[9].tobytes(), None]
        assert client.get("ads/emb:-7") is not None
        assert client.dbsize() == 5
    with (
        redis.Redis(port=server.port, db=3) as client,
        pytest.raises(redis.RedisError, match="DB index is out of range; there are tables 0 to 2, by name"),
    ):
        client.ping()
    assert exchange(server.port, b"SELECT user_emb\r\nGET 9\r\n") == b"+OK\r\n" + bulk(users[9])


def test_keys_without_a_table(
    server: RespServer, save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    said = exchange(server.port, command("GET", 9))
    assert said.startswith(b"-ERR the key names no table; write table:17, or SELECT a table (0: ads/emb, 1: empty_emb")
    sample = make_sample("emb", rows=5)
    store = TableStore(save_plain(tmp_path / "one", table_tensors(sample)))
    with serving(static_catalog(store)) as alone:  # The only one needs no name.
        assert exchange(alone.port, command("GET", sample.keys[0])) == bulk(sample.values[0])


@pytest.mark.parametrize("key_dtype", ["int64", "int32", "uint64"])
@pytest.mark.parametrize("value_dtype", ["float32", "float16", "bfloat16", "float64", "int8"])
def test_rows_are_the_tables_bytes(
    save_plain: Callable[..., Path],
    make_sample: Any,
    table_tensors: Any,
    tmp_path: Path,
    key_dtype: str,
    value_dtype: str,
) -> None:
    sample = make_sample("a:b", rows=20, dim=3, key_dtype=key_dtype, value_dtype=value_dtype, slots=())
    store = TableStore(save_plain(tmp_path / "a", table_tensors(sample)))
    limits = np.iinfo(key_dtype)
    with serving(static_catalog(store)) as running:
        asked = command("MGET", *(f"a:b:{key}" for key in sample.keys))
        assert exchange(running.port, asked) == b"*20\r\n" + b"".join(map(bulk, sample.values))
        for wrong in (limits.min - 1, limits.max + 1):
            said = exchange(running.port, command("GET", f"a:b:{wrong}") + command("GET", f"a:b:{limits.max}"))
            expected = (
                b"expected an integer"
                if abs(wrong) > 2**63 and wrong != 2**64 - 1
                else b"expected %b: " % key_dtype.encode()
            )
            assert said.startswith(b"-ERR got key ") and expected in said.splitlines()[0], said
            assert said.endswith(
                bulk(sample.values[sample.keys.tolist().index(limits.max)])
            )  # The next one is answered.


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rows_in_fewer_bits_are_float32_here(tmp_path: Path, dtype: str) -> None:
    values = np.random.default_rng(0).normal(size=(9, 7)).astype(np.float32)
    table = ArrayTable("emb", np.arange(9), values)
    write_tables([table], tmp_path / "a.kvsnap", "snapshot", options=WriteOptions(rows_as={"emb": dtype}))
    with serving(static_catalog(TableStore(tmp_path / "a.kvsnap"))) as running:
        asked = command("MGET", *(f"emb:{key}" for key in range(9)))
        expected = decode(encode(values, dtype), dtype, 7)
        assert exchange(running.port, asked) == b"*9\r\n" + b"".join(map(bulk, expected))


def test_redis_cli(server: RespServer) -> None:
    program = shutil.which("redis-cli")
    if program is None:
        pytest.skip("redis-cli is not installed")
    for protocol in ("-2", "-3"):
        line = [program, "-p", str(server.port), protocol, "--raw", "HLEN", "ads/emb"]
        assert subprocess.run(line, capture_output=True, check=True, timeout=30).stdout == b"11\n"
    # Without a command it asks for the commands' documentation first.
    said = subprocess.run(
        [program, "-p", str(server.port)], input=b"PING\nGET ads/emb:99\n", capture_output=True, check=True, timeout=30
    )
    assert said.stdout.split() == [b"PONG"]


def test_redis_benchmark(server: RespServer) -> None:
    program = shutil.which("redis-benchmark")
    if program is None:
        pytest.skip("redis-benchmark is not installed")
    line = [
        program,
        "-p",
        str(server.port),
        "-n",
        "2000",
        "-c",
        "8",
        "-P",
        "4",
        "-q",
        "MGET",
        "ads/emb:-7",
        "ads/emb:99",
    ]
    said = subprocess.run(line, capture_output=True, check=True, timeout=60)
    assert b"requests per second" in said.stdout and b"rror" not in said.stdout + said.stderr


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"*1048577\r\n", b"-ERR Protocol error: invalid multibulk length\r\n"),
        (b"*99999999999999999999999\r\n", b"-ERR Protocol error: invalid multibulk length\r\n"),
        (b"*x\r\n", b"-ERR Protocol error: invalid multibulk length\r\n"),
        (b"*" + b"1" * 100, b"-ERR Protocol error: too big mbulk count string\r\n"),
        (b"*2\r\n$3\r\nGET\r\n$536870912\r\n", b"-ERR Protocol error: invalid bulk length\r\n"),
        (b"*2\r\n$3\r\nGET\r\n$-1\r\n", b"-ERR Protocol error: invalid bulk length\r\n"),
        (b"*2\r\n$3\r\nGET\r\n$" + b"9" * 100, b"-ERR Protocol error: too big bulk count string\r\n"),
        (b"*1\r\n*1\r\n*1\r\n", b"-ERR Protocol error: expected '$', got '*'\r\n"),
        (b"*2\r\n$3\r\nGET\r\n$2\r\n1234\r\n", b"-ERR Protocol error: a bulk string is longer than it says\r\n"),
        (b"a" * 70_000, b"-ERR Protocol error: too big inline request\r\n"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n", b"-ERR unknown command "),
        (
            b"*1000\r\n" + b"$4096\r\n" + b"x" * 4096 + b"\r\n" + (b"$4096\r\n" + b"1" * 4096 + b"\r\n") * 999,
            b"-ERR Protocol error: a command of over 1048576 bytes",
        ),
    ],
    ids=["words", "huge", "nan", "endless", "bulk", "negative", "digits", "deep", "lie", "line", "tls", "memory"],
)
def test_hostile_bytes_end_the_connection_with_an_error(server: RespServer, data: bytes, answer: bytes) -> None:
    said = exchange(server.port, command("PING") + data)
    assert said.startswith(b"+PONG\r\n" + answer)
    assert exchange(server.port, b"PING\r\n") == b"+PONG\r\n"


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        (command("GET"), b"-ERR wrong number of arguments for 'get' command\r\n"),
        (command("GET", "ads/emb:1", "ads/emb:2"), b"-ERR wrong number of arguments for 'get' command\r\n"),
        (command("HMGET", "ads/emb"), b"-ERR wrong number of arguments for 'hmget' command\r\n"),
        (
            command("MGET", *["ads/emb:1"] * 1001),
            b"-ERR got 1001 keys, expected at most 1000; send several commands\r\n",
        ),
        (command("GET", "ads/emb:1.5"), b"-ERR got key '1.5', expected an integer, as in table:17\r\n"),
        (command("GET", "ads/emb:"), b"-ERR got key '', expected an integer, as in table:17\r\n"),
        (command("GET", b"ads/emb:\xff\r\n"), b"-ERR got key '???', expected an integer, as in table:17\r\n"),
        (command("GET", "nope:1"), b"-ERR there is no table 'nope'\r\n"),
        (command("MGET", "nope:1", "ads/emb:1"), b"-ERR there is no table 'nope'\r\n"),
        (command("MGET", "ads/emb:x", "user_emb:1"), b"-ERR got key 'x', expected an integer, as in table:17\r\n"),
        (command("HGET", "nope", "1"), b"-ERR there is no table 'nope'\r\n"),
        (command("SET", "ads/emb:1", "x"), b"-ERR unknown command 'SET'; rows are read by GET, MGET, HGET and HMGET"),
        (command("HELLO", 4), b"-NOPROTO unsupported protocol version\r\n"),
        (command("CONFIG", "SET", "save", ""), b"-ERR nothing can be set here"),
        (command("CLIENT", "REPLY", "OFF"), b"-ERR unknown subcommand 'REPLY'. Try CLIENT HELP.\r\n"),
    ],
)
def test_wrong_commands_are_answered_and_the_connection_stays(server: RespServer, asked: bytes, answer: bytes) -> None:
    said = exchange(server.port, asked + command("PING"))
    assert said.startswith(answer) and said.endswith(b"\r\n+PONG\r\n") and said.count(b"\r\n") == 2


def test_quit_answers_and_closes(server: RespServer) -> None:
    assert exchange(server.port, command("QUIT") + command("PING"), end=False) == b"+OK\r\n"


def test_empty_commands_are_passed_over(server: RespServer) -> None:
    assert exchange(server.port, b"\r\n*0\r\n*-1\r\n   \r\nPING\r\n") == b"+PONG\r\n"


def test_too_many_connections_are_told_so(sample_path: Path) -> None:
    with (
        serving(static_catalog(TableStore(sample_path)), max_connections=1) as running,
        socket.create_connection(("127.0.0.1", running.port), timeout=30) as first,
    ):
        first.sendall(b"PING\r\n")
        assert first.recv(100) == b"+PONG\r\n"
        assert exchange(running.port, b"", end=False) == b"-ERR max number of clients reached\r\n"


def test_those_that_are_too_many_do_not_stay(sample_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtools.server.resp._MOST_REFUSED", 2)
    with (
        serving(static_catalog(TableStore(sample_path)), max_connections=1) as running,
        contextlib.ExitStack() as stack,
    ):
        late = []
        for place in range(5):
            connection = socket.create_connection(("127.0.0.1", running.port), timeout=30)
            stack.enter_context(connection)
            if place == 0:
                connection.sendall(b"PING\r\n")
                assert connection.recv(100) == b"+PONG\r\n"
            else:
                assert connection.recv(100) == b"-ERR max number of clients reached\r\n"
                late.append(connection)
        for connection in late[:2]:  # the server has let go of them, though they are open here
            with pytest.raises(ConnectionError):
                for _ in range(1000):
                    connection.sendall(b"PING\r\n")
                    time.sleep(0.001)


def test_a_half_sent_command_does_not_hold_a_connection_for_ever(sample_path: Path) -> None:
    with serving(static_catalog(TableStore(sample_path)), body_timeout=0.01) as running:
        said = exchange(running.port, b"PING\r\n*2\r\n$3\r\nGET\r\n", end=False)
        assert said == b"+PONG\r\n-ERR a command was not whole within 0.01 s\r\n"


def test_time_is_kept_after_a_connection_that_fails(sample_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def check_time(self, now: float, limit: float) -> None:
            running.remove(self)  # type: ignore[arg-type]
            raise RuntimeError("the handler is closed")

        def end(self) -> None: ...

    monkeypatch.setattr("kvtools.server.resp._SWEEP", 0.01)
    with serving(static_catalog(TableStore(sample_path)), body_timeout=0.01) as running:
        failing = Failing()
        running._connections.add(failing)  # type: ignore[arg-type]
        while failing in running._connections:
            time.sleep(0.001)
        said = exchange(running.port, b"*2\r\n$3\r\nGET\r\n", end=False)
        assert said == b"-ERR a command was not whole within 0.01 s\r\n"


def test_a_client_that_does_not_read_is_not_read_from(sample_path: Path) -> None:
    keys = 1000
    asked = command("MGET", *["user_emb:9"] * keys)
    with (
        serving(static_catalog(TableStore(sample_path))) as running,
        socket.create_connection(("127.0.0.1", running.port), timeout=30) as connection,
    ):
        connection.setblocking(False)
        sent = 0
        with pytest.raises(BlockingIOError):  # The kernel's buffers are full, and nobody takes from them.
            while True:
                sent += connection.send(asked[sent % len(asked) :])
                assert sent < 200 << 20
        connection.setblocking(True)
        # What was whole is answered, as soon as it is read.
        expected = len(b"*%d\r\n" % keys) + keys * len(b"$16\r\n" + b"x" * 16 + b"\r\n")
        received = 0
        while received < expected * (sent // len(asked)):
            chunk = connection.recv(1 << 20)
            assert chunk
            received += len(chunk)


def test_large_lookups_keep_the_order_of_replies(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    sample = make_sample("emb", rows=2000, dim=64, slots=())
    with serving(static_catalog(TableStore(save_plain(tmp_path / "a", table_tensors(sample))))) as running:
        large = command("MGET", *(f"emb:{key}" for key in sample.keys))  # in a thread
        asked = command("ECHO", "a") + large + command("ECHO", "b") + large + command("GET", f"emb:{sample.keys[3]}")
        rows = b"*2000\r\n" + b"".join(map(bulk, sample.values))
        assert exchange(running.port, asked) == (b"$1\r\na\r\n" + rows + b"$1\r\nb\r\n" + rows + bulk(sample.values[3]))


def test_too_many_numbers_are_refused_one_command_at_a_time(sample_path: Path) -> None:
    with serving(static_catalog(TableStore(sample_path)), max_values=8) as running:
        said = exchange(running.port, command("HMGET", "ads/emb", 1, 2, 3) + command("HMGET", "ads/emb", 99))
        assert said == b"-ERR got 3 keys of 4 numbers, expected at most 8\r\n*1\r\n$-1\r\n"


def test_keys_are_asked_for_as_the_observer_wants_it(sample_path: Path) -> None:
    class Guard(Observer):
        def authorize(self, headers: Mapping[str, str], tables: Iterable[str]) -> None:
            if headers.get("authorization") != "Bearer secret":
                raise RequestError(401, "no_key", "an access key is needed")
            if "user_emb" in tables:
                raise RequestError(403, "forbidden", "this key does not open the table")

    guard = Guard()
    with serving(static_catalog(TableStore(sample_path)), observer=guard) as running:
        asked, row = command("GET", "ads/emb:99"), b"$-1\r\n"
        refused = b"-NOAUTH Authentication required.\r\n"
        unknown = b"-WRONGPASS invalid username-password pair or user is disabled.\r\n"
        assert exchange(running.port, asked + command("AUTH", "wrong") + asked) == refused + unknown + refused
        assert exchange(running.port, command("AUTH", "secret") + asked) == b"+OK\r\n" + row
        assert exchange(running.port, command("AUTH", "default", "secret") + asked) == b"+OK\r\n" + row
        hello = command("HELLO", 2, "AUTH", "default", "secret", "SETNAME", "me")
        assert exchange(running.port, hello + asked).endswith(row)
        said = exchange(running.port, command("AUTH", "secret") + command("MGET", "ads/emb:-7", "user_emb:9"))
        assert said == b"+OK\r\n-NOPERM this key does not open the table\r\n"
        assert guard.keys["ads/emb"] == 3 and guard.missing["ads/emb"] == 3


class Watch(Observer):
    """Lets in who has the key, to other tables than user_emb, and keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, int, str, dict[str, tuple[int, int]]]] = []

    def authorize(self, headers: Mapping[str, str], tables: Iterable[str]) -> None:
        if headers.get("authorization") != "Bearer secret":
            raise RequestError(401, "unauthorized", "a key is needed")
        if "user_emb" in tables:
            raise RequestError(403, "forbidden", "the key is not for table 'user_emb'")

    def on_answer(self, answered: Answered) -> None:
        counts = {count.table: (count.keys, count.missing) for count in answered.counts}
        self.told.append((answered.kind, answered.status, answered.code, counts))


def test_what_is_refused_is_told_of(sample_path: Path) -> None:
    watch = Watch()
    with serving(static_catalog(TableStore(sample_path)), observer=watch) as running:
        for asked, told in (
            ([command("GET", "ads/emb:99")], [("resp", 401, "unauthorized", {})]),
            ([command("MGET", "ads/emb:9", "user_emb:9")], [("resp", 401, "unauthorized", {})]),
            ([command("DBSIZE")], [("", 401, "unauthorized", {})]),
            ([command("AUTH", "wrong")], [("", 401, "unauthorized", {})]),
            ([command("HELLO", 3, "AUTH", "default", "wrong")], [("", 401, "unauthorized", {})]),
            ([command("PING"), command("AUTH", "secret")], []),
            ([command("AUTH", "secret"), command("HMGET", "user_emb", 9)], [("resp", 403, "forbidden", {})]),
            ([command("AUTH", "secret"), command("GET", "none:9")], [("resp", 400, "refused", {})]),
            (
                [command("AUTH", "secret"), command("MGET", "ads/emb:-7", "ads/emb:99", "empty_emb:1")],
                [("resp", 200, "", {"ads/emb": (2, 1), "empty_emb": (1, 1)})],
            ),
        ):
            watch.told.clear()
            exchange(running.port, b"".join(asked))
            assert watch.told == told, asked


def test_keys_of_commands_that_are_refused_count_as_nothing(tmp_path: Path) -> None:
    rows = ArrayTable("small", np.arange(3, dtype=np.int32), np.zeros((3, 2), np.float32))
    write_tables([rows], tmp_path / "small.kvsnap", "snapshot")
    watch = Observer()
    with serving(static_catalog(TableStore(tmp_path / "small.kvsnap")), observer=watch) as running:
        exchange(running.port, command("HMGET", "small", 1 << 40, 1) + command("HMGET", "small", 1, 2, 99))
    assert (watch.requests, watch.keys, watch.missing) == ({400: 1}, {"small": 3}, {"small": 1})


def test_a_command_for_several_tables_is_answered_from_one_version(tmp_path: Path) -> None:
    for number in (1, 2):
        tables = [ArrayTable(name, np.arange(3), np.full((3, 1), number, np.float32)) for name in ("a", "b")]
        write_tables(tables, tmp_path / f"{number}.kvsnap", "snapshot")
    catalog = static_catalog(TableStore(tmp_path / "1.kvsnap"))
    after = static_catalog(TableStore(tmp_path / "2.kvsnap")).model("default")

    class Swap(Observer):
        def authorize(self, headers: Mapping[str, str], tables: Iterable[str]) -> None:
            if "a" in tables:  # a version comes in the middle of the command
                catalog.publish(after)

    with serving(catalog, observer=Swap()) as running:
        both = [exchange(running.port, command("MGET", "a:0", "b:0")) for _ in range(2)]
    assert both == [b"*2\r\n" + bulk(np.full(1, number, np.float32)) * 2 for number in (1, 2)]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of Redis's own server, which has nothing in it."""
    process = RedisServer(tmp_path_factory.mktemp("redis"))
    try:
        yield process.port
    finally:
        process.stop()


@pytest.mark.parametrize(
    ("words", "ours"),
    [
        ("GET", ""),
        ("MGET", ""),
        ("HGET a", ""),
        ("HMGET a", ""),
        ("PING a b", ""),
        ("ECHO", ""),
        ("SELECT", ""),
        ("SELECT 99", "; there are tables 0 to 2, by name"),
        ("SELECT -1", "; there are tables 0 to 2, by name"),
        ("HELLO 4", ""),
        ("HELLO x", ""),
        ("HELLO 3 AUTH x", ""),
        ("HELLO 3 SETNAME", ""),
        ("HELLO 2 FOO", ""),
        ("HELLO 2 SETNAME \x01", ""),
        ("AUTH", ""),
        ("AUTH x", ""),
        ("AUTH a b c", ""),
        ("CLIENT", ""),
        ("CLIENT FOO", ""),
        ("CLIENT SETNAME", ""),
        ("CLIENT SETNAME \x01", ""),
        ("CLIENT GETNAME x", ""),
        ("CLIENT ID x", ""),
        ("COMMAND FOO", ""),
        ("COMMAND COUNT x", ""),
        ("COMMAND INFO nope", ""),
        ("CONFIG", ""),
        ("CONFIG FOO", ""),
        ("CONFIG GET", ""),
        ("INFO nope", ""),
        ("DBSIZE x", ""),
        ("EXISTS", ""),
        ("HLEN", ""),
        ("PING hey", ""),
        ("CLIENT GETNAME", ""),
        ("RESET", ""),
        ("QUIT", ""),
    ],
)
def test_replies_are_in_the_words_of_redis(server: RespServer, stock: int, words: str, ours: str) -> None:
    asked = command(*words.split(" "))
    expected = exchange(stock, asked)
    assert exchange(server.port, asked) == (expected.replace(b"\r\n", ours.encode() + b"\r\n") if ours else expected)


def test_errors_of_access_are_in_the_words_of_redis(sample_path: Path, tmp_path: Path) -> None:
    stock = RedisServer(tmp_path, password="secret")
    with contextlib.ExitStack() as stack:
        stack.callback(stock.stop)
        running = stack.enter_context(serving(static_catalog(TableStore(sample_path)), observer=Watch()))
        for words in (
            ["GET", "ads/emb:99"],
            ["MGET", "ads/emb:99", "empty_emb:1"],
            ["DBSIZE"],
            ["INFO"],
            ["AUTH", "wrong"],
            ["AUTH", "default", "wrong"],
            ["HELLO", 3, "AUTH", "default", "wrong"],
            ["AUTH", "secret"],
        ):
            assert exchange(running.port, command(*words)) == exchange(stock.port, command(*words)), words
        for protocol in (2, 3):
            once: dict[str, Any] = {"protocol": protocol, "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0)}
            for password in (None, "wrong"):
                said = []
                for port in (running.port, stock.port):
                    with redis.Redis(port=port, password=password, **once) as client:
                        with pytest.raises(redis.AuthenticationError) as caught:
                            client.get("ads/emb:99")
                        said.append((type(caught.value), str(caught.value)))
                # Redis refuses HELLO, too, where no password is given; here it needs no key.
                assert said[0] == said[1] if password else said[0][0] is said[1][0]
            with redis.Redis(port=running.port, password="secret", **once) as client:
                assert client.get("ads/emb:99") is None


WORDS = st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=5)


@given(st.lists(WORDS, max_size=5), st.lists(st.integers(1, 40), max_size=30))
def test_any_cut_of_the_bytes_gives_the_same_commands(commands: list[list[bytes]], cuts: list[int]) -> None:
    data = b"".join(command(*words) for words in commands)
    reader, taken, at = RespReader(100, 1 << 20, 100), [], 0
    for size in [*cuts, len(data)]:
        reader.feed(data[at : at + size])
        at += size
        while (item := reader.next()) is not None:
            taken.append(item[1] if item[0] == "command" else item)
    for words, item in zip(commands, taken, strict=True):
        if words[0].upper() in (b"GET", b"MGET", b"HGET", b"HMGET"):
            assert item[0] in ("lookup", "refused")
        else:
            assert item == words
    assert not reader.partial


def test_rows_of_a_damaged_file_are_an_error(tmp_path: Path) -> None:
    path = write_snapshot(tmp_path, 1)
    content = bytearray(path.read_bytes())
    content[3 * 4096] ^= 1
    path.write_bytes(content)
    store = TableStore(path)
    store.verify_on_use()
    with serving(static_catalog(store), max_keys=1000) as running:
        answer = exchange(running.port, command("GET", "emb:1") + command("MGET", "emb:1", "emb:999") + b"PING\r\n")
    *refused, pong = answer.splitlines()
    assert len(refused) == 2 and pong == b"+PONG"
    assert all(line.startswith(b"-") and b"table 'emb', its rows from byte 0 on" in line for line in refused)
    assert str(tmp_path).encode() not in answer


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_or_refused(data: bytes) -> None:
    reader = RespReader(100, 1 << 20, 100)
    reader.feed(data)
    for _ in range(len(data) + 1):
        item = reader.next()
        if item is None or item[0] == "broken":
            return
    raise AssertionError("it does not end")


@given(st.lists(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=6), min_size=1, max_size=6))
def test_lookups_that_stand_together_are_one(commands: list[list[int]]) -> None:
    reader = RespReader(100, 1 << 20, 100)
    reader.feed(b"".join(command("HMGET", "t", *keys) for keys in commands))
    kind, table, count, low, high = reader.next()
    everything = [key for one in commands for key in one]
    assert (kind, table, count) == ("lookup", b"t", len(everything))
    assert reader.keys().view(np.uint64).tolist() == [key % 2**64 for key in everything]
    assert (low, high) == (min(0, *everything, 0), max(0, *everything, 0))
    assert [one[0] for one in reader.commands()] == [len(one) for one in commands]


def test_a_client_of_the_other_protocol_is_told_at_once(server: RespServer) -> None:
    said = "this is no kvtools server but one that speaks the Redis protocol; check the port of the URL"
    client = Client(f"http://127.0.0.1:{server.port}", timeout=60)
    with client, pytest.raises(BadAnswerError, match=said):
        client.lookup("user_emb", [1])
