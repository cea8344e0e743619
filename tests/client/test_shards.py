"""Tables spread over several servers by key: real servers of what `kvtools split` writes, and wrong ones."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lookup_servers import fake_server, real_server, rows_of
from test_client import Waiting

from kvtools.client import Client, UnavailableError, WrongShardError
from kvtools.dialects.detect import open_checkpoint
from kvtools.merge import merge
from kvtools.migrate import write_tables
from kvtools.reshard import reshard
from kvtools.server.catalog import static_catalog
from kvtools.server.store import TableStore
from kvtools.split import By, split

SHARDS = 3
RULE = "floor_mod"


@pytest.fixture(params=[Client, Waiting], ids=["threads", "asyncio"])
def make_client(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    with contextlib.ExitStack() as stack:
        yield lambda *servers, **options: stack.enter_context(request.param(*servers, **options))


@pytest.fixture(scope="module")
def samples(make_sample: Any) -> dict[str, Any]:
    return {
        "emb": make_sample("emb", rows=200, dim=3),
        "ads/emb": make_sample("ads/emb", rows=100, dim=5, key_dtype="uint64", slots=()),
    }


@pytest.fixture(scope="module")
def pieces(
    samples: dict[str, Any], save_plain: Any, table_tensors: Any, tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    folder = tmp_path_factory.mktemp("shards")
    tensors = {name: value for sample in samples.values() for name, value in table_tensors(sample).items()}
    source = open_checkpoint(save_plain(folder / "whole", tensors))
    return [Path(account.output) for account in split(source, folder / "pieces", By("mod", SHARDS))]


@pytest.fixture(scope="module")
def urls(pieces: list[Path]) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(real_server(static_catalog(TableStore(piece)), max_keys=50)) for piece in pieces]


def shard(number: int, *, said: bool = True, version: int = 1, **limits: int) -> Any:
    """Answers of one of two shards: keys 0 to 99, whose rows are themselves."""
    rows = {key: [float(key)] for key in range(number, 100, 2)}
    described = {"rule": RULE, "number": number, "of": 2} if said else None
    return rows_of({"a": rows}, 1, version=version, shard=described, **limits)


def closing(answers: Any) -> Any:
    """The same answers, after each of which the server closes the connection."""

    def answer(asked: Any) -> bytes:
        head, end, body = answers(asked).partition(b"\r\n\r\n")
        return head + b"\r\nConnection: close" + end + body

    return answer


def test_keys_go_to_their_shards_and_rows_come_in_order(
    make_client: Any, urls: list[str], samples: dict[str, Any]
) -> None:
    client = make_client(shards=urls)
    rng = np.random.default_rng(0)
    asked = {name: rng.permutation(np.append(sample.keys, sample.keys[:7])) for name, sample in samples.items()}
    for name, (embeddings, found) in client.lookup_many(asked).items():
        rows = samples[name].rows()
        assert found.all()
        assert np.array_equal(embeddings, np.stack([rows[int(key)] for key in asked[name]]))
    tables = client.tables()
    assert {name: (table.rows, table.shard) for name, table in tables.items()} == {
        "emb": (200, None),
        "ads/emb": (100, None),
    }
    embeddings, found = client.lookup("emb", [[123456789, samples["emb"].keys[0]]])
    assert found.tolist() == [[False, True]] and not embeddings[0, 0].any()
    assert client.lookup("emb", [])[0].shape == (0, 3)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_bags_are_pooled_over_shards(
    urls: list[str], samples: dict[str, Any], combiner: str, pieces: list[Path]
) -> None:
    sample = samples["emb"]
    splits, weights = [0, 20, 20, 45], np.linspace(0.5, 2, 45, dtype=np.float32)
    merge([open_checkpoint(piece) for piece in pieces], (whole := pieces[0].parent / f"merged-{combiner}"))
    with (
        real_server(static_catalog(TableStore(whole))) as url,
        Client(url) as one,
        Client(shards=urls) as many,
    ):
        expected = one.lookup_pooled("emb", sample.keys[:45], splits, combiner=combiner, weights=weights)
        pooled = many.lookup_pooled("emb", sample.keys[:45], splits, combiner=combiner, weights=weights)
    assert np.allclose(pooled, expected, rtol=1e-5, atol=1e-6)


def test_shards_in_another_order_or_number_are_refused(make_client: Any, urls: list[str]) -> None:
    with pytest.raises(
        WrongShardError, match=r"it has shard 2 of 3 .*expected shard 1 of 3 .*see the order of shards="
    ):
        make_client(shards=[urls[0], urls[2], urls[1]]).lookup("emb", [1, 2, 3])
    with pytest.raises(WrongShardError, match=r"it has shard 0 of 3 .*expected shard 0 of 2"):
        make_client(shards=urls[:2]).lookup("emb", [1, 2, 3])


def test_one_shard_is_not_taken_for_the_whole(make_client: Any, urls: list[str]) -> None:
    for servers in (urls, urls[1]):  # as replicas of one another, and one alone
        with pytest.raises(
            WrongShardError, match=r"the server has shard \d of 3 .* name them all, in order, by shards="
        ):
            make_client(servers).lookup("emb", [1])


def test_a_wrong_replica_is_found_when_it_is_first_used(make_client: Any) -> None:
    def shard(number: int) -> Any:
        return rows_of(
            {"a": {key: [float(key)] for key in range(number, 100, 2)}},
            1,
            shard={"rule": RULE, "number": number, "of": 2},
        )

    with fake_server(shard(0)) as zero, fake_server(shard(1)) as one, fake_server(shard(1)) as wrong:
        client = make_client(shards=[[zero.url, wrong.url], one.url])
        with pytest.raises(WrongShardError, match=rf"asking {wrong.url}: it has shard 1 of 2 .*expected shard 0 of 2"):
            for _ in range(3):
                client.lookup("a", np.arange(100))


def test_servers_that_do_not_say_which_shard_they_have_are_found_out_by_their_rows(make_client: Any) -> None:
    with fake_server(shard(0, said=False)) as zero, fake_server(shard(1, said=False)) as one:
        client = make_client(shards=[zero.url, one.url])
        assert client.lookup("a", np.arange(100))[1].all()
        for _ in range(20):
            assert not client.lookup("a", [1000, 1001])[1].any()  # Nobody has these.
            assert client.lookup("a", [1, 2])[1].all()
        assert len(zero.asked) < 50  # It is not looked at again and again.
        with pytest.raises(WrongShardError, match=rf"asking {one.url}: it has no row of .* keys of shard 0"):
            make_client(shards=[one.url, zero.url]).lookup("a", np.arange(100))


def test_shards_of_tables_that_differ_are_refused(make_client: Any) -> None:
    other = rows_of({"a": {1: [1.0, 2.0]}}, 2)
    with fake_server(shard(0, said=False)) as zero, fake_server(other) as one:
        client = make_client(shards=[zero.url, one.url])
        with pytest.raises(WrongShardError, match="'a' is int64 -> 1 float32 in one and int64 -> 2 float32 in another"):
            client.lookup("a", [0])


def test_a_shard_that_is_down_is_an_error_or_missing_rows(make_client: Any) -> None:
    def shard(number: int) -> Any:
        return rows_of(
            {"a": {key: [float(key)] for key in range(number, 10, 2)}},
            1,
            shard={"rule": RULE, "number": number, "of": 2},
        )

    with fake_server(shard(0)) as zero, fake_server(shard(1)) as one:
        strict = make_client(shards=[zero.url, one.url], backoff=0.001)
        tolerant = make_client(shards=[zero.url, one.url], backoff=0.001, shard_down="missing")
        later = make_client(shards=[zero.url, one.url], backoff=0.001, shard_down="missing")
        for client in (strict, tolerant):
            assert client.lookup("a", np.arange(10))[1].all()
        one.answers = lambda asked: None
        with pytest.raises(UnavailableError, match=rf"asking shard 1 of 2 \({one.url}\) for 5 keys of table 'a': "):
            strict.lookup("a", np.arange(10))
        with pytest.raises(UnavailableError, match=rf"asking shard 1 of 2 \({one.url}\) for /v1/tables: "):
            strict.tables()
        assert strict.lookup("a", [0, 2])[1].all()
        for client in (tolerant, later):
            embeddings, found = client.lookup("a", np.arange(10))
            assert found.tolist() == [True, False] * 5
            assert embeddings[:, 0].tolist() == [0, 0, 2, 0, 4, 0, 6, 0, 8, 0]
        one.answers = shard(1)
        assert tolerant.lookup("a", np.arange(10))[1].all()


def test_the_parts_of_a_resharded_table_are_its_shards(
    make_client: Any, samples: dict[str, Any], pieces: list[Path], tmp_path: Path
) -> None:
    merge([open_checkpoint(piece) for piece in pieces], tmp_path / "whole")
    reshard(open_checkpoint(tmp_path / "whole"), tmp_path / "four", 4)
    parts = split(open_checkpoint(tmp_path / "four"), tmp_path / "parts", By("part"))
    with contextlib.ExitStack() as stack:
        urls = [stack.enter_context(real_server(static_catalog(TableStore(part.output)))) for part in parts]
        sample = samples["emb"]
        embeddings, found = make_client(shards=urls).lookup("emb", sample.keys)
        assert found.all() and np.array_equal(embeddings, sample.values)


@pytest.mark.parametrize("dialect", ["tfplugin", "snapshot", "safetensors"])
def test_a_shard_knows_its_number_in_other_forms_too(pieces: list[Path], tmp_path: Path, dialect: str) -> None:
    if dialect == "safetensors":
        pytest.importorskip("safetensors")
    path = tmp_path / {"tfplugin": "x", "snapshot": "x.kvsnap", "safetensors": "x.safetensors"}[dialect]
    write_tables(list(open_checkpoint(pieces[1]).tables.values()), path, dialect)
    with real_server(static_catalog(TableStore(path))) as url, Client(url) as client:
        shard = client.tables()["emb"].shard
        assert shard is not None and (shard.number, shard.of, shard.rule) == (1, SHARDS, RULE)


def test_what_is_merged_is_no_shard_any_more(pieces: list[Path], tmp_path: Path) -> None:
    merge([open_checkpoint(piece) for piece in pieces], tmp_path / "whole")
    assert "shard" not in open_checkpoint(tmp_path / "whole").table("emb").schema.metadata
    merge([open_checkpoint(pieces[0]), open_checkpoint(pieces[0])], tmp_path / "same")
    assert open_checkpoint(tmp_path / "same").table("emb").schema.metadata["shard"]["number"] == 0


def test_a_server_that_becomes_another_shard_is_found(make_client: Any) -> None:
    """By a restart, seen as a lost or a closed connection, and by a version."""
    with fake_server(shard(0)) as zero, fake_server(shard(1)) as one:
        for how in ("lost", "closed", "version"):
            zero.answers = shard(0)
            client = make_client(shards=[zero.url, one.url], backoff=0.001)
            assert client.lookup("a", np.arange(10))[1].all()
            if how == "lost":
                zero.end_connections()
            elif how == "closed":
                zero.answers = closing(shard(0))
                assert client.lookup("a", np.arange(10))[1].all()
            zero.answers = shard(1, version=2 if how == "version" else 1)
            with pytest.raises(
                WrongShardError, match=rf"asking {zero.url}: it has shard 1 of 2 .*expected shard 0 of 2"
            ):
                client.lookup("a", np.arange(10))


def test_a_server_that_becomes_one_shard_of_several_is_no_server_of_the_whole(make_client: Any) -> None:
    with fake_server(rows_of({"a": {key: [0.0] for key in range(10)}}, 1)) as fake:
        client = make_client(fake.url)
        assert client.lookup("a", np.arange(10))[1].all()
        asked = len(fake.asked)
        assert client.lookup("a", np.arange(10))[1].all() and len(fake.asked) == asked + 1
        fake.answers = shard(1, version=2)
        for lookup in (client.lookup, lambda table, keys: client.lookup_pooled(table, keys, [0, 10])):
            with pytest.raises(WrongShardError, match=r"the server has shard 1 of 2"):
                lookup("a", np.arange(10))


def test_a_hedge_is_not_answered_by_another_shard(make_client: Any) -> None:
    free = threading.Event()
    right = shard(0)

    def slow(asked: Any) -> bytes | None:
        if asked.line.startswith("POST"):
            free.wait(20)
        return right(asked)

    with fake_server(slow) as zero, fake_server(shard(1)) as wrong, fake_server(shard(1)) as one:
        client = make_client(shards=[[zero.url, wrong.url], one.url], hedge=0.01, timeout=15)
        with pytest.raises(WrongShardError, match=rf"asking {wrong.url}: it has shard 1 of 2"):
            for _ in range(3):
                client.lookup("a", np.arange(10))
        free.set()


def test_a_shard_that_hangs_leaves_time_for_the_rows_of_others() -> None:
    free = threading.Event()
    hung, right = (shard(number, max_keys=10) for number in range(2))

    def silent(asked: Any) -> bytes | None:
        if asked.line.startswith("POST"):
            free.wait(20)
        return hung(asked)

    # What closes its connections is looked at again after each answer.
    with fake_server(silent) as zero, fake_server(closing(right)) as one:
        with Client(shards=[zero.url, one.url], shard_down="missing", timeout=2, at_once=4) as client:
            rows, found = client.lookup("a", np.arange(100))
        free.set()
    odd = np.arange(100) % 2 == 1
    assert found.tolist() == odd.tolist() and rows[:, 0].tolist() == (np.arange(100) * odd).tolist()


def test_rows_of_a_server_that_is_lost_before_it_says_what_it_has_are_not_used(make_client: Any) -> None:
    silent = threading.Event()

    def answers(asked: Any) -> bytes | None:
        return None if asked.line.startswith("GET") and silent.is_set() else shard(1)(asked)

    with fake_server(shard(0)) as zero, fake_server(answers) as wrong, fake_server(shard(1)) as one:
        client = make_client(shards=[[zero.url, wrong.url], one.url], backoff=0.001, rest=60)
        client.tables()
        silent.set()
        for _ in range(4):
            assert client.lookup("a", np.arange(10))[1].all()
        assert wrong.lookups  # It was asked, and could not say which shard it has.
