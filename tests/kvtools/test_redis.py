"""Tables in a real Redis server: laid out for lookups, appearing whole or not at all, and in a cluster."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import free_ports

from kvtools.array_table import ArrayTable
from kvtools.dialects.chunk import ALL_COLUMNS, Chunk, Columns
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.redis import DIALECT
from kvtools.dialects.redis_layout import bucket_count, bucket_of
from kvtools.dialects.redis_server import place_of
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, OutputError, UsageError
from kvtools.fit import fit
from kvtools.migrate import write_tables

redis = pytest.importorskip("redis", reason="redis-py is not installed")
BINARY = shutil.which("redis-server")
pytestmark = pytest.mark.skipif(BINARY is None, reason="redis-server is not installed")

Make = Callable[..., Any]
Same = Callable[..., None]
Start = Callable[..., tuple[int, str]]
FORCE = WriteOptions(force=True)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start servers; each ends with the module. Returns the port and the path of the socket."""
    servers: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str) -> tuple[int, str]:
        folder = tmp_path_factory.mktemp("r")
        [port], path = free_ports(1), f"{folder}/s"
        command = [str(BINARY), "--port", str(port), "--bind", "127.0.0.1", "--unixsocket", path, "--dir", str(folder)]
        command += ["--save", "", "--appendonly", "no", *arguments]
        servers.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
        wait_until(lambda: contact(path), f"redis-server at {path} answers")
        return port, path

    yield run
    for server in servers:
        server.terminate()
    for server in servers:
        server.wait()


def contact(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(path) == 0


def wait_until(happens: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, f"waited for: {what}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def server(start: Start) -> tuple[int, str]:
    return start()


@pytest.fixture
def url(server: tuple[int, str]) -> str:
    """An empty database of its own."""
    client = redis.Redis(port=server[0])
    client.flushall()
    client.config_set("maxmemory", 0)
    client.close()
    return f"redis://127.0.0.1:{server[0]}/0"


@pytest.fixture
def client(server: tuple[int, str], url: str) -> Iterator[Any]:
    with redis.Redis(port=server[0]) as client:
        yield client


@pytest.mark.parametrize("key_dtype", ["int32", "int64", "uint32", "uint64"])
@pytest.mark.parametrize("value_dtype", ["float16", "bfloat16", "float32", "float64", "int8"])
def test_round_trip(url: str, make_table: Make, same_rows: Same, key_dtype: str, value_dtype: str) -> None:
    tables = [
        make_table("scope/emb", 53, 3, key_dtype, value_dtype, freq_dtype="uint32", version_dtype="int64", parts=3),
        make_table("wide", 3, 129, key_dtype, value_dtype, slots=("a.b",), slot_width=1),
        make_table("bare", 7, 1, key_dtype, value_dtype, slots=()),
        make_table("empty", 0, 2, key_dtype, value_dtype),
    ]
    account = write_tables(tables, url, "redis", verify=True)
    assert account.lossless
    checkpoint = open_checkpoint(url)
    assert (checkpoint.dialect, checkpoint.path, list(checkpoint.tables)) == ("redis", url, sorted(checkpoint.tables))
    for table in tables:
        same_rows(checkpoint.table(table.name), table, rows=3, any_order=True)
        assert checkpoint.table(table.name).dim == table.values.shape[1]
        assert list(checkpoint.table(table.name).check()) == []


def test_many_buckets(url: str, client: Any, same_rows: Same, make_table: Make) -> None:
    table = make_table("emb", rows=5000, dim=500, freq_dtype="uint32", parts=4, seed=3)
    write_tables([table], url, "redis", options=WriteOptions(batch_rows=700), workers=2)
    got = open_checkpoint(url).table("emb")
    assert bucket_count(got.schema) == 32
    same_rows(got, table, any_order=True)
    for rows in (1000, 4999):
        assert [len(chunk) <= rows for chunk in got.chunks(Columns(), rows=rows)].count(False) == 0
    meta = json.loads(client.get("kvtools:meta"))
    (record,) = meta["tables"]
    assert sum(client.hlen(f"{{{record['key']}:{bucket}}}") for bucket in range(32)) == 5000


def test_a_lookup_is_one_hmget(url: str, client: Any, make_table: Make) -> None:
    """What docs/dialects/redis.md says, done with nothing of ours."""
    table = make_table("emb", rows=3000, dim=100)
    write_tables([table], url, "redis")
    record = json.loads(client.get("kvtools:meta"))["tables"][0]
    assert record["buckets"] > 1

    def bucket(key: int) -> int:
        x, limit = key % 2**64, 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % limit
        x = (x ^ x >> 27) * 0x94D049BB133111EB % limit
        return int((x ^ x >> 31) % record["buckets"])

    for row in (0, 1, 2, 3, 4, 2999):
        key = int(table.keys[row])
        (value,) = client.hmget(f"{{{record['key']}:{bucket(key)}}}", [struct.pack("<q", key)])
        assert struct.unpack("<100f", value) == tuple(table.values[row].tolist())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1), st.integers(0, 20))
def test_bucket_is_the_same_function_in_plain_numbers(keys: list[int], bits: int) -> None:
    def plain(key: int) -> int:
        x = key % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return (x ^ x >> 31) % 2**bits

    expected = [plain(key) for key in keys]
    assert bucket_of(np.array(keys, np.int64), 1 << bits).tolist() == expected
    assert bucket_of(np.array(keys, np.int64).view(np.uint64), 1 << bits).tolist() == expected
    small = [key for key in keys if -(2**31) <= key < 2**31]
    assert bucket_of(np.array(small, np.int32), 1 << bits).tolist() == [plain(key) for key in small]


def test_extras_and_metadata_come_along(url: str, make_table: Make) -> None:
    extras = {
        "initial_values": np.arange(3 << 18, dtype=np.float64).reshape(-1, 4),
        "deleted_keys": np.zeros(0, np.int64),
    }
    metadata = {"initializer": {"kind": "constant", "a": 0.5}}
    assert write_tables([make_table("emb", extras=extras, metadata=metadata)], url, "redis").lossless
    got = open_checkpoint(url).table("emb")
    assert got.schema.metadata == metadata
    for name, array in extras.items():
        np.testing.assert_array_equal(got.extra(name), array)


def test_unix_socket_database_and_prefix(server: tuple[int, str], url: str, make_table: Make, same_rows: Same) -> None:
    tables = {
        f"unix://{server[1]}": make_table("a", seed=1),
        f"unix://{server[1]}?db=3": make_table("b", seed=2),
        f"unix://{server[1]}?prefix=other": make_table("c", seed=3),
    }
    for place, table in tables.items():
        write_tables([table], place, "redis")
    for place, table in tables.items():
        assert list(open_checkpoint(place).tables) == [table.name]
        same_rows(open_checkpoint(place).table(table.name), table, any_order=True)
    assert list(open_checkpoint(f"{url[:-1]}3").tables) == ["b"]


def test_what_it_holds(make_table: Make) -> None:
    fitted = fit(make_table("emb", freq_dtype="uint16", version_dtype="uint64", parts=3).schema, DIALECT)
    assert fitted.losses == () and [change.split(" ")[0] for change in fitted.changes] == ["3"]


def test_memory_does_not_grow_with_the_table(url: str) -> None:
    rows = 1 << 16
    values = np.broadcast_to(np.float32(1.5), (rows, 256))
    tracemalloc.start()
    write_tables([ArrayTable("emb", np.arange(rows), values)], url, "redis", options=WriteOptions(batch_rows=4096))
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    assert sum(len(chunk) for chunk in open_checkpoint(url).table("emb").chunks()) == rows
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(written, read) < 32 << 20 < values.nbytes


class Failing(TableReader):
    """A table whose reading fails after some rows."""

    def __init__(self, table: ArrayTable) -> None:
        self._table = table
        self.schema = table.schema

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        yield next(self._table.read_part(part, columns, 10, verify))
        raise CorruptFileError("reading 'source': it is damaged; copy it again")

    def take(self, rows: Any, columns: Columns = ALL_COLUMNS) -> Chunk:
        return self._table.take(rows, columns)


class TestReplacing:
    """Tables appear when all of them are there; what was there before stays until then."""

    def test_tables_are_not_replaced_without_force(self, url: str, make_table: Make) -> None:
        write_tables([make_table("a")], url, "redis")
        with pytest.raises(OutputError, match=r"there are tables already; name another prefix.*--force"):
            write_tables([make_table("b")], url, "redis")
        assert list(open_checkpoint(url).tables) == ["a"]

    def test_force_leaves_nothing_of_the_old(self, url: str, client: Any, make_table: Make, same_rows: Same) -> None:
        old = make_table("old", rows=3000, dim=100, extras={"initial_values": np.ones((3, 2), np.float32)})
        write_tables([old, make_table("b")], url, "redis")
        client.set("mine", "stays")
        new = make_table("new", seed=1)
        write_tables([new], url, "redis", options=FORCE)
        same_rows(open_checkpoint(url).table("new"), new, any_order=True)
        generation = json.loads(client.get("kvtools:meta"))["generation"]
        base = f"{{kvtools:{generation}:0:0}}"
        assert sorted(key.decode() for key in client.scan_iter()) == sorted(
            ["kvtools:meta", "kvtools:generations", "mine", base, f"{base}:state"]
        )

    def test_a_failed_run_leaves_the_old_tables_and_nothing_else(
        self, url: str, client: Any, make_table: Make, same_rows: Same
    ) -> None:
        old = make_table("old")
        write_tables([old], url, "redis")
        before = set(client.keys())
        with pytest.raises(CorruptFileError, match="reading 'source'"):
            write_tables([make_table("a"), Failing(make_table("b"))], url, "redis", options=FORCE)
        assert set(client.keys()) == before
        same_rows(open_checkpoint(url).table("old"), old, any_order=True)

    def test_a_killed_run_is_cleaned_up_by_the_next(self, url: str, client: Any, make_table: Make) -> None:
        writer = DIALECT.write(url, WriteOptions())
        table = make_table("lost", rows=3000, dim=100)
        shard = writer.table(table.schema, lambda: iter(())).shard()
        shard.write(0, 0, table.take(np.arange(3000), ALL_COLUMNS))
        shard.finish()
        writer._ended.set()  # as if its process had ended: the lock names one that there is not
        dead = subprocess.Popen(["true"])
        dead.wait()
        client.set("kvtools:lock", json.dumps({"host": socket.gethostname(), "pid": dead.pid}), ex=60)
        assert client.get("kvtools:meta") is None and len(client.keys()) > 4
        write_tables([make_table("new")], url, "redis")
        assert list(open_checkpoint(url).tables) == ["new"]
        assert len(client.keys()) == 4

    def test_two_runs_do_not_write_at_once(self, url: str, client: Any, make_table: Make) -> None:
        writer = DIALECT.write(url, WriteOptions())
        with pytest.raises(OutputError, match=rf"process {os.getpid()} of host .* is writing there"):
            write_tables([make_table("a")], url, "redis", options=FORCE)
        writer.abort()
        write_tables([make_table("a")], url, "redis")

    def test_a_run_whose_place_was_taken_does_not_write(self, url: str, client: Any, make_table: Make) -> None:
        writer = DIALECT.write(url, WriteOptions())
        client.set("kvtools:lock", json.dumps({"host": "elsewhere", "pid": 1}))
        with pytest.raises(OutputError, match="another run took over"):
            writer.close()
        writer.abort()
        assert client.get("kvtools:lock") is not None
        with pytest.raises(
            OutputError, match=r"process 1 of host elsewhere is writing there; wait until it has ended, or 60"
        ):
            DIALECT.write(url, WriteOptions())

    def test_a_run_keeps_its_own_lock_and_nobody_elses(
        self, url: str, client: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        writer = DIALECT.write(url, WriteOptions())
        for lock, kept in ((writer._mine, True), (json.dumps({"host": "elsewhere", "pid": 1}), False)):
            client.set("kvtools:lock", lock, ex=5)
            turns = iter([False, True])
            with monkeypatch.context() as patched:
                patched.setattr(writer, "_ended", SimpleNamespace(wait=lambda _, turns=turns: next(turns)))
                writer._keep_lock()
            assert (client.ttl("kvtools:lock") > 5) == kept
        writer.abort()

    def test_keys_that_are_there_twice_are_refused(self, url: str, client: Any) -> None:
        table = ArrayTable("emb", np.array([1, 2, 1, 1]), np.ones((4, 2), np.float32))
        with pytest.raises(BadInputError, match=r"2 of 4 rows have the key of another row.*kvtools verify"):
            write_tables([table], url, "redis")
        assert client.keys() == []

    def test_another_program_s_key_is_not_overwritten(self, url: str, client: Any, make_table: Make) -> None:
        client.lpush("kvtools:meta", "x")
        with pytest.raises(OutputError, match=r"WRONGTYPE.*name another prefix"):
            write_tables([make_table("a")], url, "redis", options=FORCE)
        assert client.keys() == [b"kvtools:meta"]

    @pytest.mark.parametrize("text", ["{", "[5]", '[{"key": "a"}]', "7", "[" * 100_000])
    def test_damaged_list_of_generations(self, url: str, client: Any, make_table: Make, text: str) -> None:
        client.hset("kvtools:generations", "00000000", text)
        with pytest.raises(OutputError, match="key 'kvtools:generations' is damaged"):
            write_tables([make_table("a")], url, "redis")
        assert client.keys() == [b"kvtools:generations"]

    @pytest.mark.parametrize("text", ["{", "[]", '{"host": 5, "pid": "x"}'])
    def test_a_lock_of_somebody_else_s(self, url: str, client: Any, make_table: Make, text: str) -> None:
        client.set("kvtools:lock", text)
        with pytest.raises(OutputError, match="is writing there; wait"):
            write_tables([make_table("a")], url, "redis")

    def test_damaged_meta_is_replaced_by_force_only(self, url: str, client: Any, make_table: Make) -> None:
        client.set("kvtools:meta", "{")
        with pytest.raises(CorruptFileError):
            write_tables([make_table("a")], url, "redis")
        write_tables([make_table("a")], url, "redis", options=FORCE)
        assert list(open_checkpoint(url).tables) == ["a"]


class TestRefused:
    """What a server, or what lies in it, can be that is no use."""

    def test_nothing_there(self, url: str) -> None:
        with pytest.raises(BadInputError, match="there is no key 'kvtools:meta', so no tables of kvtools"):
            open_checkpoint(url)

    def test_nobody_listens(self, make_table: Make) -> None:
        url = f"redis://127.0.0.1:{free_ports(1)[0]}/0"
        for act in (lambda: open_checkpoint(url), lambda: write_tables([make_table("a")], url, "redis")):
            with pytest.raises(BadInputError, match=f"connecting to '{url}'.*check that the server runs"):
                act()

    def test_socket_that_is_not_there(self, tmp_path: Path) -> None:
        with pytest.raises(BadInputError, match="check that the server runs"):
            open_checkpoint(f"unix://{tmp_path}/no")

    def test_password(self, start: Start, make_table: Make) -> None:
        port, _ = start("--requirepass", "secret")
        for user in ("", ":wrong@"):
            with pytest.raises(BadInputError, match=r"put user:password@ before the host") as caught:
                open_checkpoint(f"redis://{user}127.0.0.1:{port}")
            assert "wrong" not in str(caught.value).replace("WRONGPASS", "")
        url = f"redis://:secret@127.0.0.1:{port}"
        account = write_tables([make_table("a")], url, "redis")
        checkpoint = open_checkpoint(url)
        assert list(checkpoint.tables) == ["a"] and "secret" not in str(checkpoint.path) + str(account)

    def test_a_user_who_may_not(self, start: Start, make_table: Make) -> None:
        port, _ = start()
        with redis.Redis(port=port) as client:
            client.execute_command("ACL", "SETUSER", "reader", "on", ">p", "~*", "+@read", "+ping")
        with pytest.raises(BadInputError, match="name a user who may run the command"):
            open_checkpoint(f"redis://reader:p@127.0.0.1:{port}")

    @pytest.mark.parametrize(
        ("text", "match"),
        [
            ("redis://localhost:x/0", "expected redis://host:port/database"),
            ("redis://localhost:99999999/0", "expected redis://host:port/database"),
            ("redis://localhost/abc", "got database 'abc', expected a number"),
            ("redis://localhost/0?prefix=", "got prefix ''"),
            ("redis://localhost/0?prefix={a}", "expected a name without braces"),
        ],
    )
    def test_urls_that_make_no_sense(self, text: str, match: str) -> None:
        with pytest.raises(UsageError, match=match):
            open_checkpoint(text)

    def test_an_option_that_there_is_not(self, url: str) -> None:
        with pytest.raises(UsageError, match="leave the option out of the URL"):
            open_checkpoint(f"{url}?colour=red")

    def test_passwords_are_not_shown(self) -> None:
        assert place_of("rediss://u:p@h:1/2?prefix=x&ssl_cert_reqs=none").shown == "rediss://h:1/2?prefix=x"

    def test_options_that_contradict(self, url: str, make_table: Make) -> None:
        write_tables([make_table("a")], url, "redis")
        with pytest.raises(UsageError, match="leave the option out"):
            open_checkpoint(url, OpenOptions(dim=5))

    def test_memory_of_the_server(self, url: str, client: Any, make_table: Make) -> None:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (1 << 20))
        with pytest.raises(OutputError, match=r"out of memory.*raise its maxmemory"):
            write_tables([make_table("a", rows=20000, dim=64)], url, "redis")
        client.config_set("maxmemory", 0)
        assert client.keys() == []

    def test_rows_that_were_removed_before(self, url: str, client: Any, make_table: Make) -> None:
        write_tables([make_table("a")], url, "redis")
        (key,) = client.keys("{kvtools:*:0:0}")
        client.hdel(key, client.hkeys(key)[0])
        with pytest.raises(CorruptFileError, match="got 49 rows, expected 50"):
            list(open_checkpoint(url).table("a").chunks())

    def test_a_table_that_is_replaced_while_it_is_read(self, url: str, make_table: Make) -> None:
        write_tables([make_table("a", rows=3000, dim=100)], url, "redis")
        table = open_checkpoint(url).table("a")
        chunks = table.chunks(rows=100)
        next(chunks)
        write_tables([make_table("a", seed=1)], url, "redis", options=FORCE)
        with pytest.raises(CorruptFileError, match="rows came or went while it was read"):
            list(chunks)
        with pytest.raises(CorruptFileError, match="rows came or went"):
            table.take(np.array([0]))

    def test_a_row_that_vanishes_between_its_key_and_its_value(self, url: str, client: Any, make_table: Make) -> None:
        write_tables([make_table("a", slots=())], url, "redis")
        table = open_checkpoint(url).table("a")
        (key,) = client.keys("{kvtools:*:0:0}")
        keys = np.array([table.all_keys()[0]])
        client.hdel(key, keys.tobytes())
        with pytest.raises(CorruptFileError, match="a row vanished while it was read"):
            table._chunk(keys, np.array([0]), ALL_COLUMNS)  # type: ignore[attr-defined]

    @pytest.mark.parametrize(("field", "value"), [(b"short", b"x" * 16), (None, b"x")])
    def test_what_something_else_wrote(
        self, url: str, client: Any, make_table: Make, field: bytes | None, value: bytes
    ) -> None:
        write_tables([make_table("a")], url, "redis")
        (key,) = client.keys("{kvtools:*:0:0}")
        old = client.hkeys(key)[0]
        client.hdel(key, old)
        client.hset(key, field or old, value)
        table = open_checkpoint(url).table("a")
        with pytest.raises(CorruptFileError, match="something else wrote there"):
            list(table.chunks())

    def test_keys_where_no_lookup_finds_them(self, url: str, client: Any, make_table: Make) -> None:
        write_tables([make_table("a", rows=3000, dim=100, slots=())], url, "redis")
        first, second, *_ = sorted(client.keys("{kvtools:*:0:*}"))
        field = client.hkeys(first)[0]
        client.hset(second, field, client.hget(first, field))
        client.hdel(first, field)
        (finding,) = open_checkpoint(url).table("a").check()
        assert (finding.severity, finding.check) == ("error", "wrong-bucket") and "1 keys" in finding.message

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"format": 2}, "got format 2, expected at most 1; update kvtools"),
            ({"format": "x"}, "meta key is damaged"),
            ({"tables": {}}, "meta key is damaged"),
            ({"generation": 5}, "meta key is damaged"),
            ({"buckets": 3}, "expected a power of two"),
            ({"buckets": 2**60}, "expected a power of two"),
            ({"buckets": 0}, "expected a power of two"),
            ({"key": None}, "has no key"),
            ({"part_rows": [25, 25]}, "many parts"),
            ({"dim": 0}, "field 'dim'"),
        ],
    )
    def test_damaged_meta(self, url: str, client: Any, make_table: Make, change: dict[str, Any], match: str) -> None:
        write_tables([make_table("a")], url, "redis")
        meta = json.loads(client.get("kvtools:meta"))
        (meta if change.keys() <= {"format", "tables", "generation"} else meta["tables"][0]).update(change)
        client.set("kvtools:meta", json.dumps(meta))
        with pytest.raises(BadInputError, match=match):
            open_checkpoint(url)

    def test_broken_table_is_left_out_where_asked_for(self, url: str, client: Any, make_table: Make) -> None:
        write_tables([make_table("a"), make_table("b")], url, "redis")
        meta = json.loads(client.get("kvtools:meta"))
        meta["tables"][0]["dim"] = -1
        client.set("kvtools:meta", json.dumps(meta))
        checkpoint = open_checkpoint(url, OpenOptions(lenient=True))
        assert (list(checkpoint.tables), list(checkpoint.broken)) == (["b"], ["a"])


@pytest.fixture(scope="module")
def ports(start: Start) -> list[int]:
    """A cluster of three nodes that share the slots."""
    ports = [start("--cluster-enabled", "yes", "--cluster-node-timeout", "5000")[0] for _ in range(3)]
    nodes = [redis.Redis(port=port) for port in ports]
    for number, node in enumerate(nodes):
        node.execute_command("CLUSTER", "ADDSLOTSRANGE", 16384 * number // 3, 16384 * (number + 1) // 3 - 1)
        node.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        node.execute_command("CLUSTER", "MEET", "127.0.0.1", ports[0])

    def agreed() -> bool:
        states = [bytes(node.execute_command("CLUSTER", "INFO")) for node in nodes]
        return all(b"cluster_state:ok" in state and b"cluster_known_nodes:3" in state for state in states)

    wait_until(agreed, "the cluster is one")
    for node in nodes:
        node.close()
    return ports


class TestCluster:
    """Three nodes that share the slots."""

    @pytest.mark.parametrize("scheme", ["redis", "redis+cluster"])
    def test_round_trip(self, ports: list[int], make_table: Make, same_rows: Same, scheme: str) -> None:
        url = f"{scheme}://127.0.0.1:{ports[1]}"
        tables = [make_table("a", rows=5000, dim=100, freq_dtype="uint32", parts=2), make_table("b", seed=1)]
        write_tables(tables, url, "redis", options=FORCE, verify=True)
        checkpoint = open_checkpoint(url)
        for table in tables:
            same_rows(checkpoint.table(table.name), table, any_order=True)
        held = []
        for port in ports:
            with redis.Redis(port=port) as node:
                held.append(node.dbsize())
        assert min(held) > 0
        write_tables([make_table("c", rows=0)], url, "redis", options=FORCE)
        assert list(open_checkpoint(f"redis://127.0.0.1:{ports[2]}").tables) == ["c"]
        for port in ports:
            with redis.Redis(port=port) as node:
                assert not [key for key in node.scan_iter() if key.startswith(b"{")]

    def test_other_databases_are_refused(self, ports: list[int]) -> None:
        with pytest.raises(BadInputError, match="connecting to"):
            open_checkpoint(f"redis://127.0.0.1:{ports[0]}/1")


@pytest.mark.thorough
def test_a_password_is_in_no_message(start: Start, make_table: Make, tmp_path: Path) -> None:
    """Whatever fails, and wherever the URL has it."""
    port, _ = start("--requirepass", "s3cret")
    source = tmp_path / "source.npz"
    write_tables([make_table("emb", 5, 2)], source, "npz")
    kvtools = str(Path(sys.executable).with_name("kvtools"))
    told = ""
    for url in (
        f"redis://:s3cret@127.0.0.1:{port}/0",
        f"redis://127.0.0.1:{port}/0?password=s3cret&prefix=other",
        f"redis://:s3cret-that-is-wrong@127.0.0.1:{port}/0",
        f"redis://:s3cret@127.0.0.1:{port}/0?prefix=a{{b",
        f"redis://:s3cret/unquoted@127.0.0.1:{port}/0",
        f"redis://:s3cret@127.0.0.1:{free_ports(1)[0]}/0",
        "redis://:s3cret@[::1/0",
    ):
        for command in (["verify", url], ["migrate", str(source), url], ["migrate", str(source), url, "--to", "npz"]):
            done = subprocess.run([kvtools, *command], capture_output=True, text=True, check=False)
            told += done.stdout + done.stderr
        with contextlib.suppress(BadInputError, UsageError):
            open_checkpoint(url)
    assert "npz is written to a path" in told and "there are no" not in told
    assert "s3cret" not in told
    with pytest.raises(BadInputError, match="put user:password@ before the host"):
        open_checkpoint(f"redis://:wrong@127.0.0.1:{port}/0")
