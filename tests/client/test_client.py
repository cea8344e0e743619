"""Both clients, against the real server and against servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import multiprocessing
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lookup_servers import certificate, fake_server, http, real_server, refusal, rows_of

from kvtools.array_table import ArrayTable
from kvtools.client import (
    AsyncClient,
    BadAnswerError,
    Client,
    ClientError,
    RefusedError,
    TimeLimitError,
    UnavailableError,
)
from kvtools.dialects.interface import Checkpoint
from kvtools.errors import UnknownTableError, UsageError
from kvtools.export_snapshot import export_snapshot
from kvtools.lookup_frame import decode_request
from kvtools.server.catalog import static_catalog
from kvtools.server.observer import Observer
from kvtools.server.request import RequestError
from kvtools.server.store import TableStore

SAMPLE = Path(__file__).parent.parent / "data" / "sample"


class Waiting:
    """An `AsyncClient` with the methods of `Client`, on a loop of its own."""

    new_loop: Callable[[], Any] = staticmethod(asyncio.new_event_loop)

    def __init__(self, *servers: Any, **options: Any) -> None:
        self.client = AsyncClient(*servers, **options)
        self._loop = self.new_loop()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.client, name)
        return lambda *args, **named: self._loop.run_until_complete(method(*args, **named))

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()


class WaitingOnUvloop(Waiting):
    @staticmethod
    def new_loop() -> Any:
        return pytest.importorskip("uvloop").new_event_loop()


@pytest.fixture(params=[Client, Waiting, WaitingOnUvloop], ids=["threads", "asyncio", "uvloop"])
def make_client(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    with contextlib.ExitStack() as stack:
        yield lambda *servers, **options: stack.enter_context(request.param(*servers, **options))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with real_server(static_catalog(TableStore(SAMPLE)), max_keys=100) as running:
        yield running


def test_rows_are_those_of_the_checkpoint(
    make_client: Any, url: str, sample_values: dict[str, dict[int, np.ndarray]]
) -> None:
    client = make_client(url)
    for table, rows in sample_values.items():
        keys = [*rows, 12345]
        embeddings, found = client.lookup(table, keys)
        assert embeddings.dtype == (np.float64 if table == "empty_emb" else np.float32) and found.dtype == np.bool_
        assert found.tolist() == [True] * len(rows) + [False]
        assert np.array_equal(
            embeddings[:-1], np.array(list(rows.values()), np.float32).reshape(len(rows), embeddings.shape[1])
        )
        assert not embeddings[-1].any()


WIDE = {
    "float64": np.array([[1 / 3, -1e300], [0.1, 5e-324]]),
    "int64": np.array([[2**63 - 1, -(2**63)], [2**24 + 1, 7]]),
    "int32": np.array([[2**31 - 1, -(2**31)], [2**24 + 1, 7]], np.int32),
}


@pytest.fixture(scope="module")
def wide_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of tables whose rows float32 does not hold, and one of float16."""
    tables = {name: ArrayTable(name, np.array([3, -5]), values) for name, values in WIDE.items()}
    half = ArrayTable("half", np.array([3, -5]), np.float16([[1 / 3, 2], [3, 4]]))
    path = tmp_path_factory.mktemp("wide") / "wide.kvsnap"
    export_snapshot(Checkpoint("memory", "memory", {**tables, "half": half}), path)
    with real_server(static_catalog(TableStore(path)), max_keys=100) as running:
        yield running


@pytest.mark.parametrize("dtype", WIDE)
def test_rows_that_float32_does_not_hold_come_as_they_are(make_client: Any, wide_url: str, dtype: str) -> None:
    client = make_client(wide_url)
    rows, found = client.lookup(dtype, [[-5, 3], [99, 3]])
    assert rows.dtype == dtype and found.tolist() == [[True, True], [False, True]]
    values = WIDE[dtype]
    assert rows.tobytes() == np.array([[values[1], values[0]], [np.zeros_like(values[0]), values[0]]]).tobytes()
    answers = client.lookup_many({dtype: [3] * 101, "half": [3]})  # more than the server takes at once
    assert answers[dtype][0].tobytes() == values[[0] * 101].tobytes()
    assert answers["half"][0].tolist() == np.float32(np.float16([[1 / 3, 2]])).tolist()
    nothing, _ = client.lookup(dtype, [])
    assert nothing.dtype == dtype and nothing.shape == (0, 2)
    sums = client.lookup_pooled(dtype, [3, -5], [0, 1, 2])
    assert sums.dtype == np.float32


def test_a_new_version_may_have_another_type_of_rows(make_client: Any) -> None:
    large = 2**24 + 1
    floats, whole = {"a": {1: [1.5]}}, {"a": {1: [large]}}
    with fake_server(rows_of(floats, 1)) as fake:
        client = make_client(fake.url)
        assert client.lookup("a", [1])[0].tolist() == [[1.5]]
        fake.answers = rows_of(whole, 1, version=2, value_dtype="int64")
        assert client.lookup("a", [1])[0].tolist() == [[large]]
        fake.answers = rows_of(floats, 1, version=3)
        assert client.lookup("a", [1])[0].tolist() == [[1.5]]


def test_keys_may_have_any_shape_and_number(
    make_client: Any, url: str, sample_values: dict[str, dict[int, np.ndarray]]
) -> None:
    client, rows = make_client(url), sample_values["ads/emb"]
    every = np.random.default_rng(0).choice([*rows, 99], (25, 3, 7))  # more than the server takes at once
    embeddings, found = client.lookup("ads/emb", every)
    assert embeddings.shape == (25, 3, 7, 4) and found.shape == (25, 3, 7)
    expected = np.array([rows.get(key, np.zeros(4)) for key in every.reshape(-1).tolist()], np.float32)
    assert np.array_equal(embeddings.reshape(-1, 4), expected)
    assert np.array_equal(found, every != 99)
    for nothing in ([], np.empty((0, 3), np.int32)):
        embeddings, found = client.lookup("ads/emb", nothing)
        assert embeddings.shape == (*np.shape(nothing), 4) and found.shape == np.shape(nothing)
    assert client.lookup("ads/emb", -7)[0].shape == (4,)
    embeddings[...] = 1  # They are the caller's.


def test_several_tables_go_in_one_request(
    make_client: Any, url: str, sample_values: dict[str, dict[int, np.ndarray]]
) -> None:
    answers = make_client(url).lookup_many({"ads/emb": [[-7, 99]], "user_emb": np.array([9], np.int8), "empty_emb": []})
    assert list(answers) == ["ads/emb", "user_emb", "empty_emb"]
    assert answers["ads/emb"][0].shape == (1, 2, 4) and answers["ads/emb"][1].tolist() == [[True, False]]
    assert np.array_equal(answers["user_emb"][0][0], sample_values["user_emb"][9])
    assert answers["empty_emb"][0].shape == (0, 2)
    with fake_server(rows_of({"a": {1: [1.0]}, "b": {2: [2.0]}}, 1)) as fake:
        client = make_client(fake.url)
        both = client.lookup_many({"a": [1], "b": [2]})
        assert (both["a"][0].tolist(), both["b"][0].tolist()) == ([[1.0]], [[2.0]])
        assert len(fake.lookups) == 1


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_bags(
    make_client: Any,
    url: str,
    sample_values: dict[str, dict[int, np.ndarray]],
    combiner: str,
    weighted: bool,
) -> None:
    rows = sample_values["ads/emb"]
    rng = np.random.default_rng(1)
    for sizes in ([2, 0, 3, 1], [40, 0, 90, 20]):  # the second: more than the server takes at once
        splits = np.cumsum([0, *sizes])
        keys = rng.choice([*rows, 99], splits[-1])
        weights = rng.random(len(keys)).astype(np.float32) if weighted else None
        pooled = make_client(url).lookup_pooled("ads/emb", keys, splits, combiner=combiner, weights=weights)
        scale = np.ones(len(keys)) if weights is None else weights.astype(np.float64)
        for bag, (start, stop) in enumerate(itertools.pairwise(splits)):
            values = [
                rows.get(key, np.zeros(4)) * by
                for key, by in zip(keys[start:stop].tolist(), scale[start:stop], strict=True)
            ]
            expected = np.sum(values, axis=0) if values else np.zeros(4)
            if values and combiner == "mean":
                expected = expected / scale[start:stop].sum()
            if values and combiner == "sqrtn":
                expected = expected / np.sqrt((scale[start:stop] ** 2).sum())
            assert np.allclose(pooled[bag], expected, rtol=1e-5, atol=1e-6)


def test_what_missing_keys_give(make_client: Any, url: str) -> None:
    client = make_client(url)
    assert not client.lookup("ads/emb", [99], missing="zeros")[0].any()
    with pytest.raises(RefusedError, match="99") as refused:
        client.lookup("ads/emb", [-7, 99], missing="error")
    assert (refused.value.status, refused.value.code) == (404, "missing_keys")


def test_another_word_for_missing_keys_is_named(make_client: Any, url: str) -> None:
    client = make_client(url)
    for call in (
        lambda: client.lookup("user_emb", [1], missing="zero"),
        lambda: client.lookup_pooled("user_emb", [1], [0, 1], missing="zero"),
    ):
        with pytest.raises(UsageError, match="missing='zero', expected one of zeros, default, error"):
            call()


def test_tables_are_described(make_client: Any, url: str) -> None:
    tables = make_client(url).tables()
    assert list(tables) == ["ads/emb", "empty_emb", "user_emb"]
    ads = tables["ads/emb"]
    assert (ads.key_dtype, ads.value_dtype, ads.dim, ads.rows, ads.shard) == ("int64", "float32", 4, 11, None)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([1, 1.5], "got key 1.5, expected integers"),
        (np.array([1.5]), "got keys of type float64, expected integers"),
        ([True], "got keys of type bool"),
        (["wine"], r"got keys of type <U4, expected integers \(int64\); of strings: kvtools.string_keys"),
        (np.array(["wine"], object), r"got key 'wine', expected integers \(int64\); of strings: kvtools.string_keys"),
        ([None], "got key None"),
        ([2**63], "got key 9223372036854775808, expected int64"),
        ([-(2**63) - 1], "got key -9223372036854775809, expected int64"),
        (np.array([2**64 - 1], np.uint64), "got key 18446744073709551615, expected int64"),
    ],
)
def test_wrong_keys_are_named_before_they_are_sent(make_client: Any, url: str, keys: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        make_client(url).lookup("ads/emb", keys)


def test_keys_of_uint64_tables(make_client: Any, url: str) -> None:
    client = make_client(url)
    for keys in ([2**64 - 1, 0], [np.uint64(2**64 - 1), 0], [np.uint64(2**64 - 1), np.int64(0)]):
        assert client.lookup("empty_emb", keys)[1].tolist() == [False, False]
    mixed = np.array([np.int64(42), 42, np.uint8(99)], object)
    assert client.lookup("ads/emb", mixed)[1].tolist() == [True, True, False]
    with pytest.raises(UsageError, match="got key -1, expected uint64"):
        make_client(url).lookup("empty_emb", [-1])


def test_an_unknown_table_is_an_error_that_names_the_others(make_client: Any, url: str) -> None:
    with pytest.raises(UnknownTableError, match="'nope': the server has 'ads/emb', 'empty_emb', 'user_emb'"):
        make_client(url).lookup("nope", [1])


def test_wrong_bags_are_named(make_client: Any, url: str) -> None:
    client = make_client(url)
    for splits, said in (
        ([0, 3], "ascend from 0"),
        ([0, 2, 1, 2], "ascend"),
        ([[0, 2]], "expected integers"),
        ([], "got"),
    ):
        with pytest.raises(UsageError, match=said):
            client.lookup_pooled("ads/emb", [1, 2], splits)
    with pytest.raises(UsageError, match="got 1 weights"):
        client.lookup_pooled("ads/emb", [1, 2], [0, 2], weights=[1.0])
    for several in (1, 200):  # the server takes 100 at once: of more keys, rows are pooled by the client
        for weight in (np.nan, np.inf, 1e39):
            with pytest.raises(UsageError, match="got a weight that is no finite number"):
                client.lookup_pooled("ads/emb", [1] * several, [0, several], weights=[weight] * several)
    with pytest.raises(UsageError, match="combiner='max'"):
        client.lookup_pooled("ads/emb", [1, 2], [0, 2], combiner="max")


def test_one_connection_serves_many_requests(make_client: Any) -> None:
    with fake_server(rows_of({"a": {1: [1.0]}}, 1)) as fake:
        client = make_client(fake.url)
        for _ in range(20):
            client.lookup("a", [1])
        assert fake.connections == 1


def test_a_connection_that_the_server_closed_is_made_anew_without_an_error(make_client: Any) -> None:
    answers = rows_of({"a": {1: [1.0]}}, 1)

    def once_per_connection(asked: Any) -> bytes | None:
        # The second request of each connection is not answered.
        fake.answers = close
        return answers(asked)

    def close(asked: Any) -> None:
        fake.answers = once_per_connection

    with fake_server(once_per_connection) as fake:
        client = make_client(fake.url, retries=0)
        for _ in range(4):
            assert client.lookup("a", [1])[1].all()


def test_errors_of_the_server_come_with_its_words(make_client: Any) -> None:
    listing = rows_of({"a": {1: [1.0]}}, 1)

    def broken(asked: Any) -> bytes | None:
        return listing(asked) if asked.line.startswith("GET") else refusal(500, "internal", "the disk is gone")

    with fake_server(broken) as fake:
        with pytest.raises(RefusedError, match=f"asking {fake.url}: 500: the disk is gone") as refused:
            make_client(fake.url).lookup("a", [1])
        assert (refused.value.status, refused.value.code) == (500, "internal")
        assert len(fake.lookups) == 1  # It is not asked again.


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server_is_asked_again(make_client: Any, status: int) -> None:
    answers, busy = rows_of({"a": {1: [1.0]}}, 1), [2]

    def at_times(asked: Any) -> bytes | None:
        if asked.line.startswith("POST") and busy[0]:
            busy[0] -= 1
            return refusal(status, "too_busy", "try again", Retry_After="0")
        return answers(asked)

    with fake_server(at_times) as fake:
        client = make_client(fake.url, backoff=0.001)
        assert client.lookup("a", [1])[1].all() and len(fake.lookups) == 3
        busy[0] = 99
        with pytest.raises(UnavailableError, match=f"said {status}: .*try again"):
            client.lookup("a", [1])


def test_replicas_take_over(make_client: Any) -> None:
    rows = {"a": {1: [1.0]}}
    with fake_server(rows_of(rows, 1)) as one, fake_server(rows_of(rows, 1)) as two:
        client = make_client([one.url, two.url], backoff=0.001)
        for _ in range(6):
            assert client.lookup("a", [1])[1].all()
        assert len(one.lookups) == len(two.lookups) == 3
        one.answers = lambda asked: None
        for _ in range(6):
            assert client.lookup("a", [1])[1].all()
        assert len(two.lookups) >= 8


def test_a_slow_replica_is_hedged(make_client: Any) -> None:
    rows = rows_of({"a": {1: [1.0]}}, 1)
    free = threading.Event()

    def slow(asked: Any) -> bytes | None:
        if asked.line.startswith("POST"):
            free.wait(20)
        return rows(asked)

    with fake_server(slow) as one, fake_server(rows) as two:
        client = make_client([one.url, two.url], hedge=0.01, timeout=15)
        for _ in range(4):
            assert client.lookup("a", [1])[1].all()
        assert one.lookups and len(two.lookups) == 4
        free.set()


def test_hedging_needs_no_answer_of_a_replica_that_holds_some_requests_back() -> None:
    rows = rows_of({"a": {1: [1.0]}}, 1)
    free, held = threading.Event(), threading.Semaphore(0)
    asked_of_one = itertools.count()

    def sometimes_silent(asked: Any) -> bytes | None:
        if asked.line.startswith("POST") and next(asked_of_one) % 20 == 0:
            held.release()
            assert free.wait(60)
        return rows(asked)

    def look_up(client: Client, calls: int) -> None:
        for _ in range(calls):
            assert client.lookup("a", [1])[1].all()

    with fake_server(sometimes_silent) as one, fake_server(rows) as two, ThreadPoolExecutor(4) as pool:
        with Client([one.url, two.url], hedge=0.05, timeout=60) as client:
            for done in [pool.submit(look_up, client, 100) for _ in range(4)]:
                done.result(60)  # though the first request that came to the first replica is held until all are done
        assert held.acquire(timeout=60)
        asked_of_one = itertools.count()
        with Client([one.url], timeout=60) as client:  # without hedging, whoever is held waits
            waits = pool.submit(look_up, client, 1)
            assert held.acquire(timeout=60)
            assert not waits.done()
            free.set()
            waits.result(60)


def test_nobody_there(make_client: Any) -> None:
    with fake_server(lambda asked: None) as fake:
        gone = fake.url
    client = make_client(gone, backoff=0.001)
    with pytest.raises(UnavailableError, match=f"asking {gone} for /v1/tables: {gone}: .*refused"):
        client.lookup("a", [1])
    with pytest.raises(UnavailableError, match="no-such-host"):
        make_client("http://no-such-host.invalid:1", retries=0).tables()


def test_a_server_that_does_not_answer_in_time(make_client: Any) -> None:
    free = threading.Event()

    def silent(asked: Any) -> None:
        free.wait(20)

    with fake_server(silent) as fake:
        with pytest.raises(TimeLimitError, match=r"no answer within 0.05 s; raise timeout="):
            make_client(fake.url, timeout=0.05).tables()
        free.set()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "expected an answer of HTTP"),
        (http(200, b"{}", Content_Type="application/json"), "not one of kvtools serve"),
        (http(200, b"<html>", Content_Type="text/html"), "not one of kvtools serve"),
    ],
)
def test_servers_of_other_kinds_are_told_apart(make_client: Any, answer: bytes, said: str) -> None:
    with fake_server(lambda asked: answer) as fake, pytest.raises(ClientError, match=said):
        make_client(fake.url, retries=0).tables()
    page = http(404, b"<html>nothing</html>")
    with fake_server(lambda asked: page) as fake, pytest.raises(RefusedError, match="404: <html>nothing"):
        make_client(fake.url).tables()


def test_answers_to_another_question_are_refused(make_client: Any) -> None:
    rows, other = rows_of({"a": {1: [1.0]}}, 1), rows_of({"a": {1: [1.0, 2.0]}}, 2)

    def changed(asked: Any) -> bytes | None:
        return rows(asked) if asked.line.startswith("GET") else other(asked)

    with fake_server(changed) as fake:
        client = make_client(fake.url)
        with pytest.raises(BadAnswerError, match=r"got rows float32\[1, 2\] of table 'a', expected float32\[1, 1\]"):
            client.lookup("a", [1])
        fake.answers = other
        assert client.lookup("a", [1])[0].tolist() == [[1.0, 2.0]]  # It looks again.
        fake.answers = lambda asked: http(200, b"KVA1", Content_Type="application/x-kvtools-lookup")
        with pytest.raises(BadAnswerError, match="cut off"):
            client.lookup("a", [1])


def test_a_server_that_takes_less_than_it_says_gets_smaller_requests(make_client: Any) -> None:
    rows = {key: [float(key)] for key in range(100)}
    listing, strict = rows_of({"a": rows}, 1), rows_of({"a": rows}, 1, max_keys=9)

    def answers(asked: Any) -> bytes | None:
        return listing(asked) if asked.line.startswith("GET") else strict(asked)

    with fake_server(answers) as fake:
        embeddings, found = make_client(fake.url, max_keys=64).lookup("a", np.arange(100))
        assert embeddings[:, 0].tolist() == list(range(100)) and found.all()


def test_pieces_of_one_lookup_are_of_one_version(make_client: Any) -> None:
    def version(number: int) -> Any:
        return rows_of({"a": {key: [float(number)] for key in range(100)}}, 1, version=number, max_keys=10)

    with fake_server(version(1)) as one, fake_server(version(2)) as two:
        client = make_client([one.url, two.url])
        for _ in range(3):
            embeddings, _ = client.lookup("a", np.arange(100))
            assert set(embeddings[:, 0].tolist()) == {2.0}


def test_a_new_version_may_have_other_keys_and_another_dim(make_client: Any) -> None:
    def unsigned(version: int) -> Any:
        return rows_of({"a": {1: [1.0], 2**64 - 5: [2.0]}}, 1, version=version, key_dtype="uint64")

    with fake_server(unsigned(1)) as fake:
        client = make_client(fake.url)
        assert client.lookup("a", [2**64 - 5])[0].tolist() == [[2.0]]
        fake.answers = rows_of({"a": {1: [3.0], -5: [4.0]}}, 1, version=2)
        with pytest.raises(UsageError, match="got key 18446744073709551611, expected int64"):
            client.lookup("a", [2**64 - 5])  # whose bits are those of -5
        fake.answers = unsigned(3)
        assert client.lookup_pooled("a", [2**64 - 5], [0, 1]).tolist() == [[2.0]]
        fake.answers = rows_of({"a": {1: [5.0, 6.0], -5: [7.0, 8.0]}}, 2, version=4)
        assert client.lookup("a", [-5, 1])[0].tolist() == [[7.0, 8.0], [5.0, 6.0]]
        fake.answers = rows_of({"a": {1: [9.0]}}, 1, version=5)
        assert client.lookup_pooled("a", [1], [0, 1]).tolist() == [[9.0]]


def test_models_have_versions_of_their_own(make_client: Any) -> None:
    of = {"a": rows_of({"a": {1: [1.0]}}, 1, version=3), "b": rows_of({"b": {1: [2.0]}}, 1, version=8)}
    tables = [{"key_dtype": "int64", "value_dtype": "float32", "dim": 1, "rows": 1, "name": one} for one in of]
    models = [{"model": "of a", "version": 3}, {"model": "of b", "version": 8}, {"model": "loading", "version": None}]
    listed = [{**table, "model": f"of {table['name']}"} for table in tables]
    listing = http(200, json.dumps({"model": None, "version": None, "models": models, "tables": listed}).encode())

    def answers(asked: Any) -> bytes | None:
        return listing if asked.line.startswith("GET") else of[decode_request(asked.body)[0][0].table](asked)

    with fake_server(answers) as fake:
        client = make_client(fake.url)
        for _ in range(3):
            assert [client.lookup(table, [1])[0].tolist() for table in of] == [[[1.0]], [[2.0]]]
        assert len(fake.asked) - len(fake.lookups) == 1  # the tables are asked for once, not at every change of tables


def test_lists_of_several_lengths_are_no_keys(make_client: Any, url: str) -> None:
    client = make_client(url)
    with pytest.raises(UsageError, match=r"table 'ads/emb': got keys in lists of several lengths.* see lookup_pooled"):
        client.lookup("ads/emb", [[1, 2], [3]])
    with pytest.raises(UsageError, match="got keys in lists of several lengths"):
        client.lookup_pooled("ads/emb", [[1, 2], [3]], [0, 2])
    with pytest.raises(UsageError, match="got row_splits that are no array"):
        client.lookup_pooled("ads/emb", [1, 2], [[0], [1, 2]])
    for weights in ([[1], [1, 2]], ["x", 1], [None, {}]):
        with pytest.raises(UsageError, match="got weights that are no array of numbers"):
            client.lookup_pooled("ads/emb", [1, 2], [0, 2], weights=weights)


def test_access_keys(make_client: Any) -> None:
    class Guard(Observer):
        def authorize(self, headers: Any, tables: Any) -> None:
            if headers.get("authorization") != "Bearer secret":
                raise RequestError(401, "no_key", "an access key is needed")

    with real_server(static_catalog(TableStore(SAMPLE)), observer=Guard()) as url:
        assert make_client(url, api_key="secret").lookup("ads/emb", [-7])[1].all()
        with pytest.raises(RefusedError, match="401: an access key is needed; give api_key= to the client"):
            make_client(url).lookup("ads/emb", [-7])
        with pytest.raises(RefusedError, match=r"401: an access key is needed$"):
            make_client(url, api_key="another").lookup("ads/emb", [-7])


def test_tls(make_client: Any, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with real_server(static_catalog(TableStore(SAMPLE)), tls=(cert, key)) as url:
        client = make_client(url, ca_file=cert)
        keys = np.full(50_000, -7)
        embeddings, found = client.lookup("ads/emb", keys)
        assert found.all() and (embeddings == embeddings[0]).all()
        with pytest.raises(
            UnavailableError, match="self-signed certificate; name its certificate authority by ca_file="
        ):
            make_client(url, retries=0).lookup("ads/emb", [-7])
        with pytest.raises(UnavailableError, match="if this port speaks TLS, name it by https://"):
            make_client(url.replace("https", "http"), retries=0).lookup("ads/emb", [-7])
    said = pytest.raises(UnavailableError, match="it does not speak TLS; name it by http://")
    with real_server(static_catalog(TableStore(SAMPLE))) as url, said:
        make_client(url.replace("http", "https"), retries=0).tables()


def test_a_file_of_certificates_that_cannot_be_read_is_told_when_the_client_is_made(
    make_client: Any, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=r"reading ca_file='.*nope\.pem': No such file"):
        make_client("https://localhost:1", ca_file=str(tmp_path / "nope.pem"))
    (tmp_path / "empty.pem").write_text("nothing")
    with pytest.raises(UsageError, match=r"ca_file='.*empty\.pem' has no certificate in PEM"):
        make_client("https://localhost:1", ca_file=tmp_path / "empty.pem")


def test_a_closed_client_says_so(make_client: Any, url: str) -> None:
    client = make_client(url)
    client.lookup("ads/emb", [-7])
    client.close()
    with pytest.raises(ClientError, match="closed"):
        client.lookup("ads/emb", [-7])


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: Client(), "either servers or shards"),
        (lambda: Client("http://a", shards=["http://b"]), "either servers or shards"),
        (lambda: Client([]), "a shard without a server"),
        (lambda: Client(["http://a:1", "http://a:1/"]), "'http://a:1' is named twice"),
        (lambda: Client("ftp://a"), "expected http://host:8501"),
        (lambda: Client("localhost:8501"), "expected http://host:8501"),
        (lambda: Client("http://me:secret@a"), "give api_key="),
        (lambda: Client("http://a/?x=1"), "has a query"),
        (lambda: Client("http://a:99999"), "expected http://host:8501"),
        (lambda: Client("http://a/b c"), "characters that no URL may have"),
        (lambda: Client(shards="http://a"), "one string as shards="),
    ],
)
def test_wrong_places_are_named(made: Callable[[], Client], said: str) -> None:
    with pytest.raises(UsageError, match=said) as error:
        made()
    assert "secret" not in str(error.value)


def test_many_threads_share_a_client(url: str, sample_values: dict[str, dict[int, np.ndarray]]) -> None:
    rows, wrong = sample_values["ads/emb"], []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            keys = rng.choice([*rows, 99], 20)
            embeddings, found = client.lookup("ads/emb", keys)
            expected = np.array([rows.get(key, np.zeros(4)) for key in keys.tolist()], np.float32)
            if not (np.array_equal(embeddings, expected) and np.array_equal(found, keys != 99)):
                wrong.append(seed)

    with Client(url) as client:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_a_forked_process_has_connections_of_its_own() -> None:
    with fake_server(rows_of({"a": {1: [1.0]}}, 1)) as fake, Client(fake.url) as client:
        client.lookup("a", [1])
        process = multiprocessing.get_context("fork").Process(target=client.lookup, args=("a", [1]))
        process.start()
        process.join(30)
        assert process.exitcode == 0
        client.lookup("a", [1])
        assert fake.connections == 2


def test_many_tasks_share_a_client_and_a_cancelled_one_leaves_nothing(url: str) -> None:
    async def go() -> None:
        async with AsyncClient(url) as client:
            answers = await asyncio.gather(*(client.lookup("ads/emb", [-7, 99]) for _ in range(50)))
            assert all(found.tolist() == [True, False] for _, found in answers)
            task = asyncio.create_task(client.lookup("ads/emb", np.zeros(5000, np.int64)))
            await asyncio.sleep(0.001)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            assert (await client.lookup("ads/emb", [-7]))[1].all()
            assert all(replica.under_way == 0 for shard in client._session.shards for replica in shard.all)

    asyncio.run(go())


def test_it_needs_neither_tensorflow_nor_a_server_package(tmp_path: Path) -> None:
    code = (
        "import sys, kvtools.client\n"
        "wrong = {'tensorflow', 'fastapi', 'uvicorn', 'httpx', 'redis', 'kvtools._snapshot'} & set(sys.modules)\n"
        "assert not wrong, wrong"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_misspelt_option_is_named(kind: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"^{kind.__name__}\(\) has no option max_retries=; did you mean retries=\? It has"
    ):
        kind("http://a", max_retries=3)
    with pytest.raises(TypeError, match=r"no option url=; the URL comes first, as in \w+\('http://host:8501'\)\. It"):
        kind(url="http://127.0.0.1:1")
    with pytest.raises(TypeError, match=r"has no option zzz= It has shards, timeout, "):
        kind("http://a", zzz=3)
