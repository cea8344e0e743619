"""Tables that stay in a real Redis: looked up there by every protocol, behind a snapshot, and while it is gone."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient
from redis_processes import Cluster, Guarded, Server, wait_until
from resp_server import serving

from kvtools.array_table import ArrayTable
from kvtools.dialects.redis_layout import as_fields, as_rows, bucket_of
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, UsageError
from kvtools.lookup_frame import MEDIA_TYPE as FRAME
from kvtools.lookup_frame import TableKeys, decode_answer, encode_request
from kvtools.migrate import write_tables
from kvtools.server import redis_backend
from kvtools.server.app import create_app
from kvtools.server.catalog import static_catalog
from kvtools.server.redis_backend import RedisStore
from kvtools.server.request import RequestError
from kvtools.server.store import TableStore

DIM = 4
FORCE = WriteOptions(force=True)


def table(name: str, keys: Any, *, plus: float = 0, dim: int = DIM, key_dtype: str = "int64") -> ArrayTable:
    """A table whose rows tell their keys."""
    keys = np.asarray(keys, key_dtype)
    return ArrayTable(name, keys, (keys.astype(np.float32) + plus)[:, None] + np.zeros(dim, np.float32))


def write(url: str, *tables: ArrayTable) -> None:
    write_tables(list(tables), url, "redis", options=FORCE)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    running = Server(tmp_path)
    yield running
    running.stop()


@pytest.fixture
def url(server: Server) -> str:
    return f"redis://127.0.0.1:{server.port}/0"


def expect(store: RedisStore, name: str, keys: Any, rows: Any, found: Any) -> None:
    values, there = store.table(name).lookup(np.asarray(keys, store.table(name).schema.key_dtype))
    assert there.tolist() == list(found)
    assert values[:, 0].tolist() == list(rows) and (values == values[:, :1]).all()


@pytest.mark.parametrize("key_dtype", ["int64", "int32", "uint64"])
def test_rows_are_those_in_redis(url: str, key_dtype: str) -> None:
    limits = np.iinfo(key_dtype)
    keys = np.unique(np.array([limits.min, 0, 5, limits.max, *range(100, 30_000)], key_dtype))
    source = table("emb", keys, dim=64, key_dtype=key_dtype)  # many buckets
    write(url, source)
    store = RedisStore(url)
    asked = np.random.default_rng(0).choice(keys, 3000)
    values, found = store.table("emb").lookup(asked)
    assert found.all() and (values == asked.astype(np.float32)[:, None]).all()
    expect(store, "emb", [50, 5, 50], [0, 5, 0], [False, True, False])
    expect(store, "emb", [], [], [])


def test_every_protocol_looks_up_in_redis(url: str) -> None:
    write(url, table("emb", range(100)), table("two", [7], dim=2))
    catalog = static_catalog(RedisStore(url))  # type: ignore[arg-type]
    with TestClient(create_app(catalog)) as client:
        answer = client.post("/v1/tables/emb:lookup", json={"keys": [3, 999]})
        assert answer.json() == {"embeddings": [[3.0] * DIM, [0.0] * DIM], "found": [True, False]}
        pooled = {"keys": [[1, 2], [], [3, 999]], "combiner": "mean"}
        answer = client.post("/v1/tables/emb:lookup", json=pooled)
        assert [row[0] for row in answer.json()["embeddings"]] == [1.5, 0.0, 1.5]
        both = client.post("/v1/tables:lookup", json={"tables": {"emb": {"keys": [1]}, "two": {"keys": [7]}}}).json()
        assert both["tables"]["two"]["embeddings"] == [[7.0, 7.0]]
        asked = encode_request([TableKeys("emb", np.array([3, 999]))])
        answer = client.post("/v1/tables:lookup", content=asked, headers={"Content-Type": FRAME, "Accept": FRAME})
        ((rows,), _) = decode_answer(answer.content)
        assert rows.embeddings[:, 0].tolist() == [3, 0] and rows.found.tolist() == [True, False]
        assert client.post("/v1/tables/emb:lookup", json={"keys": [999], "missing": "error"}).status_code == 404
        assert client.post("/v1/models/default:predict", json={"instances": []}).status_code < 500
    with serving(catalog) as running:
        import redis

        with redis.Redis(port=running.port) as client:
            assert client.hmget("emb", 3, 999) == [np.full(DIM, 3, np.float32).tobytes(), None]
            assert client.mget("emb:3", "two:7", "two:8")[1:] == [np.full(2, 7, np.float32).tobytes(), None]
            assert client.hget("emb", 3) == np.full(DIM, 3, np.float32).tobytes()


def test_a_snapshot_in_front_is_asked_first(url: str, tmp_path: Path) -> None:
    write(url, table("emb", range(10)))
    write_tables([table("emb", range(5), plus=1000)], tmp_path / "front.kvsnap", "snapshot")
    store = RedisStore(url, front=TableStore(tmp_path / "front.kvsnap"))
    expect(store, "emb", [2, 7, 99, 2], [1002, 7, 0, 1002], [True, True, False, True])


def test_redis_gone_and_back(server: Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_backend, "_RESTS", 3600)
    write(url, table("emb", range(10)))
    write_tables([table("emb", range(5))], tmp_path / "front.kvsnap", "snapshot")
    front = TableStore(tmp_path / "front.kvsnap")
    plain, fronted = RedisStore(url), RedisStore(url, front=front)
    tolerant = RedisStore(url, front=front, missing_while_down=True)
    app = TestClient(create_app(static_catalog(plain)))  # type: ignore[arg-type]
    server.stop()
    with serving(static_catalog(plain)) as resp:  # type: ignore[arg-type]
        for _ in range(3):
            answer = app.post("/v1/tables/emb:lookup", json={"keys": [1]})
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
            assert answer.json()["error"]["code"] == "backend_unavailable"
            assert str(server.port) not in answer.text
        import redis

        with redis.Redis(port=resp.port) as client:
            for ask in (lambda: client.get("emb:1"), lambda: client.execute_command("EXISTS", "emb:1")):
                with pytest.raises(redis.ResponseError, match="Redis, where the rows are"):
                    ask()
        wait_until(lambda: resp.observer.requests == {503: 2}, "both answers are counted")
        assert resp.observer.keys == {}, "nothing was found"
    expect(fronted, "emb", [1, 2], [1, 2], [True, True])
    with pytest.raises(RequestError, match="cannot be asked"):
        fronted.table("emb").lookup(np.array([1, 7]))
    expect(tolerant, "emb", [1, 7], [1, 0], [True, False])
    server.start()
    write(url, table("emb", range(10), plus=0.5))  # It had nothing on disk.
    with pytest.raises(RequestError, match="it did not answer a moment ago"):
        plain.table("emb").lookup(np.array([1]))
    for store in (plain, fronted, tolerant):
        store.backend.rests_until = 0.0  # The hour is over.
    expect(plain, "emb", [1, 7, 99], [1.5, 7.5, 0], [True, True, False])
    expect(fronted, "emb", [1, 7], [1, 7.5], [True, True])
    expect(tolerant, "emb", [1, 7], [1, 7.5], [True, True])


def test_rows_that_redis_has_evicted_are_an_error(server: Server, url: str, caplog: pytest.LogCaptureFixture) -> None:
    keys = np.arange(20_000)
    write(url, table("emb", keys), table("also", [5]))
    store = RedisStore(url)
    layout = store.backend.tables["emb"].layout
    at = bucket_of(keys, layout.buckets)
    lost, held = keys[at == 1], keys[at != 1]
    server.client().delete(layout.values(1))
    for ask in (lost[:1], keys[:50]):
        with pytest.raises(RequestError, match="table 'emb' has lost rows there; try again"):
            store.table("emb").lookup(ask)
    said = f"table 'emb' has {len(held)} of 20000 rows: Redis has evicted keys, see its maxmemory"
    assert caplog.text.count(said) == 1
    expect(store, "emb", held[:20], held[:20], [True] * 20)
    expect(store, "also", [5, 6], [5, 0], [True, False])
    write(url, table("emb", keys, plus=0.5), table("also", [5]))
    expect(store, "emb", lost[:2], lost[:2] + 0.5, [True, True])


def test_tables_that_are_followed_may_be_emptied_and_say_how_many_rows_they_have(
    server: Server, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_backend, "_LOOKS_EVERY", 0.0)
    write(url, table("emb", [1, 2]), table("also", [5]))
    store, client = RedisStore(url), server.client()

    def follow(number: int, **rows: int) -> None:
        described = json.loads(client.get("kvtools:meta"))
        for record in described["tables"]:
            record["part_rows"] = [rows[record["name"]]]
        client.set("kvtools:meta", json.dumps(described))
        client.set("kvtools:follow", json.dumps({"sequence": number}))

    client.delete(store.backend.tables["emb"].layout.values(0))
    follow(1, emb=0, also=1)
    for _ in range(2):
        expect(store, "emb", [1, 2], [0, 0], [False, False])
    assert store.table("emb").schema.rows == 0
    field = as_fields(as_rows(np.array([6])))[0]
    client.hset(store.backend.tables["also"].layout.values(0), field, np.full(DIM, 6, np.float32).tobytes())
    follow(2, emb=0, also=2)
    expect(store, "also", [5, 6], [5, 6], [True, True])
    assert store.table("also").schema.rows == 2
    follow(3, emb=2, also=2)
    with pytest.raises(RequestError, match="table 'emb' has lost rows there"):
        store.table("emb").lookup(np.array([1]))


def test_a_redis_that_refuses_is_not_one_that_does_not_answer(
    server: Server, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = np.arange(20_000)
    write(url, table("emb", keys))
    store, client = RedisStore(url), server.client()
    layout = store.backend.tables["emb"].layout
    at = bucket_of(keys, layout.buckets)
    client.delete(layout.values(0))
    client.set(layout.values(0), "something else")
    for _ in range(2):
        with pytest.raises(RequestError, match="it refuses what it is asked, and the server's log says why"):
            store.table("emb").lookup(keys[at == 0][:1])
        expect(store, "emb", keys[at == 1][:1], keys[at == 1][:1], [True])  # at once
    assert caplog.text.count("the server answered: WRONGTYPE") == 1
    client.config_set("requirepass", "secret")
    for connection in client.client_list():
        if connection["cmd"] != "client|list":
            client.client_kill(connection["addr"])
    with pytest.raises(RequestError, match="it refuses what it is asked"):
        store.table("emb").lookup(keys[at == 1][:1])
    assert "put user:password@ before the host in the URL" in caplog.text


def test_a_table_of_other_types_is_served_again_when_it_is_as_it_was(url: str) -> None:
    write(url, table("emb", range(10)))
    store = RedisStore(url)
    write(url, table("emb", range(10), dim=DIM + 1))
    for _ in range(2):
        with pytest.raises(RequestError, match="table 'emb' is gone or of another type: write it as it was"):
            store.table("emb").lookup(np.array([1]))
    write(url, table("emb", range(12), plus=0.5))
    expect(store, "emb", [1, 11], [1.5, 11.5], [True, True])
    assert store.table("emb").schema.rows == 12


def test_it_is_warm_when_what_is_in_front_is_in_memory(url: str, tmp_path: Path) -> None:
    write(url, table("emb", range(10)))
    write_tables([table("emb", range(5))], tmp_path / "front.kvsnap", "snapshot")
    front = RedisStore(url, front=TableStore(tmp_path / "front.kvsnap"))
    assert TestClient(create_app(static_catalog(RedisStore(url)))).get("/warmz").status_code == 200  # type: ignore[arg-type]
    app = TestClient(create_app(static_catalog(front)))  # type: ignore[arg-type]
    assert app.get("/warmz").status_code == 503
    front.populate()
    assert app.get("/warmz").status_code == 200


def test_a_redis_that_does_not_answer_is_waited_for_once(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(url, table("emb", range(10)))
    store = RedisStore(url)
    times = iter([0.0, 0.0, 1.0, 1.0, 5.0, 5.0, 5.05, 5.06, 5.06])
    monkeypatch.setattr(redis_backend, "time", SimpleNamespace(monotonic=lambda: next(times)))
    tries = []

    def fails(*asked: object, **how: object) -> None:
        tries.append(asked)
        raise BadInputError("it does not answer")

    monkeypatch.setattr(redis_backend, "run", fails)
    with pytest.raises(RequestError, match="it does not answer"):
        store.backend.ask([("PING",)])
    assert len(tries) == 1, "after a second"
    with pytest.raises(RequestError, match="it does not answer"):
        store.backend.ask([("PING",)])
    assert len(tries) == 3, "at once: its connection had been closed"


def until_answered(store: RedisStore) -> None:
    waiting = threading.Event()
    last = time.monotonic() + 60
    while True:
        try:
            store.table("emb").lookup(np.array([1]))
            return
        except RequestError as error:
            assert time.monotonic() < last, f"it never answers again: {error}"
            waiting.wait(0.02)


def test_tables_written_anew_are_found_without_a_gap(url: str) -> None:
    write(url, table("emb", range(100)))
    store = RedisStore(url)
    wrong: list[Any] = []
    done = threading.Event()

    def ask() -> None:
        keys = np.arange(100)
        while not done.is_set():
            values, found = store.table("emb").lookup(keys)
            generations = set((values[:, 0] - keys).tolist())
            if not found.all() or len(generations) != 1:
                wrong.append((found.sum(), generations))

    thread = threading.Thread(target=ask)
    thread.start()
    for version in range(1, 6):
        write(url, table("emb", range(100), plus=version * 1000))
    done.set()
    thread.join()
    assert not wrong
    expect(store, "emb", [3, 1000], [5003, 0], [True, False])


def test_a_lookup_of_many_buckets_has_the_rows_of_one_increment(server: Server, url: str) -> None:
    keys = np.arange(20_000)
    write(url, table("emb", keys))
    client = server.client()
    client.set("kvtools:follow", "{}")  # as `kvtools follow` has it, which changes rows where they are
    store = RedisStore(url)
    layout = store.backend.tables["emb"].layout
    buckets = bucket_of(keys, layout.buckets)
    assert layout.buckets > 2
    done = threading.Event()

    def increments() -> None:
        for number in itertools.cycle(range(1, 4)):
            if done.is_set():
                return
            with client.pipeline(transaction=True) as increment:
                for bucket in range(layout.buckets):
                    row = np.full(DIM, number, np.float32).tobytes()
                    rows = dict.fromkeys(as_fields(as_rows(keys[buckets == bucket])), row)
                    increment.hset(layout.values(bucket), mapping=rows)
                increment.execute()

    thread = threading.Thread(target=increments)
    thread.start()
    try:
        wait_until(lambda: store.table("emb").lookup(keys[:1])[0][0, 0] > 0, "an increment")
        seen = [np.unique(store.table("emb").lookup(keys)[0]).tolist() for _ in range(20)]
    finally:
        done.set()
        thread.join()
    assert {len(numbers) for numbers in seen} == {1}, seen


def test_a_cluster(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        url = f"redis+cluster://127.0.0.1:{cluster.ports[0]}"
        write(url, table("emb", range(30_000), dim=64))
        store = RedisStore(url)
        keys = np.random.default_rng(0).integers(0, 30_000, 2000)
        values, found = store.table("emb").lookup(keys)
        assert found.all() and (values == keys.astype(np.float32)[:, None]).all()
        expect(store, "emb", [-5, 5], [0, 5], [False, True])
    finally:
        cluster.stop()


def test_a_node_of_a_cluster_that_hangs_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_backend, "_SECONDS", 0.5)
    monkeypatch.setattr(redis_backend, "_RESTS", 0.05)
    cluster = Cluster(tmp_path, node_timeout_ms=60_000)  # the others leave it in
    try:
        url = f"redis+cluster://127.0.0.1:{cluster.ports[0]}"
        write(url, table("emb", range(30_000), dim=256))
        store = RedisStore(url)
        keys = np.arange(2000)  # in all buckets, of which each node has some
        assert store.table("emb").lookup(keys)[1].all()
        os.kill(cluster.nodes[1].process.pid, signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(RequestError, match="does not answer"):
            store.table("emb").lookup(keys)
        assert time.monotonic() - began < 4, "each bucket was asked for by itself"
        os.kill(cluster.nodes[1].process.pid, signal.SIGCONT)
        cluster.wait()
        until_answered(store)
        assert store.table("emb").lookup(keys)[1].all()
    finally:
        cluster.stop()


def test_a_slot_that_moves_in_a_cluster(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    try:
        url = f"redis+cluster://127.0.0.1:{cluster.ports[0]}"
        write(url, table("emb", range(3000)))
        store = RedisStore(url)
        keys = np.arange(3000)
        owner, some_rows = next(
            (node, key)
            for node in cluster.nodes
            for key in node.client().keys("*")
            if node.client().type(key) in (b"hash", "hash")
        )
        other = next(node for node in cluster.nodes if node is not owner)
        here, there = owner.client().execute_command, other.client().execute_command
        ids = [ask("CLUSTER", "MYID").decode() for ask in (here, there)]
        slot = here("CLUSTER", "KEYSLOT", some_rows)

        def expect_all() -> None:
            values, found = store.table("emb").lookup(keys)
            assert found.all() and (values == keys.astype(np.float32)[:, None]).all()

        expect_all()
        there("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[0])
        here("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[1])
        expect_all()
        moved = here("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        here("MIGRATE", "127.0.0.1", other.port, "", 0, 5000, "KEYS", *moved)
        expect_all()  # the slot is at one, its rows at the other
        for ask in (there, here):
            ask("CLUSTER", "SETSLOT", slot, "NODE", ids[1])
        expect_all()
    finally:
        cluster.stop()


def test_the_primary_that_a_sentinel_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_backend, "_RESTS", 0.05)
    guarded = Guarded(tmp_path, password="secret")
    try:
        url = f"redis+sentinel://:secret@127.0.0.1:{guarded.sentinel.port}/0?service=master"
        write(url, table("emb", range(10)))
        store = RedisStore(url)
        expect(store, "emb", [3, 99], [3, 0], [True, False])
        first, second = guarded.servers
        wait_until(lambda: second.client().dbsize() == first.client().dbsize(), "the replica has the tables")
        guarded.fail_over()
        wait_until(lambda: guarded.primary() == second.port, "the replica is the primary")
        first.stop()
        until_answered(store)
        expect(store, "emb", [3, 99], [3, 0], [True, False])
        guarded.stop()
        began = time.monotonic()
        with pytest.raises(RequestError, match="does not answer"):
            store.table("emb").lookup(np.arange(3))
        assert time.monotonic() - began < 0.5, "a sentinel that is gone was asked again and again"
    finally:
        guarded.stop()
    with pytest.raises(UsageError, match=r"expected the name of the service, as in \?service="):
        RedisStore("redis+sentinel://localhost:26379/0")


def test_what_cannot_be_is_named(url: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"opening 'redis://.*': .* no key 'kvtools:meta', so it has no tables"):
        RedisStore(url)
    with pytest.raises(BadInputError, match="check that the server runs"):
        RedisStore("redis://127.0.0.1:1/0")
    write(url, table("emb", range(5)))
    for name, other, said in (
        (
            "a",
            table("emb", range(5), dim=3),
            r"before Redis it is int64 -> float32\[3\], in Redis int64 -> float32\[4\]",
        ),
        ("b", table("other", range(5)), "it lacks table 'other'"),
    ):
        write_tables([other], tmp_path / f"{name}.kvsnap", "snapshot")
        with pytest.raises(BadInputError, match=said):
            RedisStore(url, front=TableStore(tmp_path / f"{name}.kvsnap"))


def test_the_command_serves_from_redis(url: str, tmp_path: Path) -> None:
    import json
    import subprocess
    import sys
    import urllib.request

    write(url, table("emb", range(10)))
    write_tables([table("emb", range(5), plus=1000)], tmp_path / "front.kvsnap", "snapshot")
    for paths, row in (([], 2.0), ([str(tmp_path / "front.kvsnap")], 1002.0)):
        command = [sys.executable, "-m", "kvtools.cli.main", "serve", *paths, "--backend", url, "--port", "0", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
            try:
                assert process.stdout is not None
                said = json.loads(process.stdout.readline())
                ask = urllib.request.Request(said["url"] + "/v1/tables/emb:lookup", b'{"keys": [2, 7]}')
                with urllib.request.urlopen(ask, timeout=30) as answer:
                    assert [one[0] for one in json.load(answer)["embeddings"]] == [row, 7.0]
            finally:
                process.terminate()
