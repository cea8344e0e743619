"""Rows over a snapshot: every lookup gives what a dict gives to which the same changes were made."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chain_writer import ChainWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools.chain import ChainError, members
from kvtools.errors import CorruptFileError
from kvtools.follow import Position
from kvtools.increment import read_increment, read_record
from kvtools.server.fold import folds_of, make_fold, only_one
from kvtools.server.followed_store import FollowedStore
from kvtools.server.page_api import describe_rows, find_nearest
from kvtools.server.store import TableStore

KEYS = st.sampled_from([0, 1, 2, 3, -1, -(2**63), 2**63 - 1, 2**62 + 5, *range(10, 40)])
STEPS = st.lists(
    st.tuples(st.lists(KEYS, max_size=12), st.lists(KEYS, max_size=8), st.booleans()), min_size=1, max_size=8
)
ASKED = np.array([0, 1, 2, 3, -1, -(2**63), 2**63 - 1, 2**62 + 5, 77, -5, *range(10, 40)])


def begun(writer: ChainWriter, cache: Path) -> FollowedStore:
    prefix = writer.full()
    return FollowedStore(TableStore(prefix, cache=cache), 1, 1, writer.folder, "")


def after(store: FollowedStore, prefix: Path) -> FollowedStore:
    (member,) = [member for member in members(prefix.parent) if member.prefix == prefix]
    record, mark = read_record(member)
    assert record is not None
    return store.with_increment(read_increment(member, record, mark))


def assert_is(store: FollowedStore, writer: ChainWriter, asked: np.ndarray[Any, Any] = ASKED) -> None:
    for name, table in store.tables.items():
        expected, there = writer.expected(name, asked)
        values, found = table.lookup(asked.astype(writer.key_dtype))
        assert values.tobytes() == expected.tobytes() and found.tobytes() == there.tobytes()
        assert table.schema.rows == table.table.rows == len(writer.rows[name])
        assert table.schema.bytes == store.base.tables[name].schema.bytes + table.table.level_bytes
        places = table.table.find(asked)
        assert ((places >= 0) == there).all()
        keys, rows, _, _ = table.table.take(places[there])
        assert keys.tolist() == asked[there].tolist() and rows.tobytes() == expected[there].tobytes()


@settings(max_examples=40, deadline=None)
@given(begin=st.lists(KEYS, max_size=30), steps=STEPS, number=st.integers(0, 10**6))
def test_a_store_after_any_increments_and_folds_is_the_dict(
    begin: list[int], steps: list[Any], number: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("chain")
    writer = ChainWriter(folder / "run", {"emb": 3}, slot=False)
    writer.put("emb", begin, 0.5)
    store = begun(writer, folder / "cache")
    for put, gone, fold in steps:
        writer.put("emb", put, number + writer.number)
        writer.remove("emb", gone)
        writer.put("emb", gone[:2], -writer.number)  # went and came again
        before = store, {key: row.copy() for key, row in writer.rows["emb"].items()}
        store = after(store, writer.increment())
        assert_is(store, writer)
        assert before[0].sequence == store.sequence - 1
        if fold:
            made = make_fold(
                store, Position(None, store.sequence, frozenset(), 0), folder / "cache", folder, lambda: True
            )
            assert made is not None
            base = made.open()
            assert base.verify()
            folded = store.on(base, store.sequence)
            assert_is(folded, writer)
            assert folded.rows_over == 0 and len(base.tables["emb"].table.find(ASKED)) == len(ASKED)
            store = folded if number % 2 else store.on(base, store.sequence)


def test_levels_stay_few_and_the_newest_counts(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path / "run", {"emb": 2})
    writer.put("emb", range(1000), 1)
    store = begun(writer, tmp_path / "cache")
    for number in range(60):
        writer.put("emb", range(number * 7, number * 7 + 40), number)
        writer.remove("emb", range(number * 3, number * 3 + 5))
        store = after(store, writer.increment())
    assert_is(store, writer, np.arange(-5, 1100))
    assert store.followed["emb"].table.levels <= 6
    assert store.rows_over < 60 * 45
    # A level that a fold under way will replace is left as it is.
    writer.put("emb", range(2000), 5)
    apart = store.with_increment(_read(writer.increment()), kept_apart=store.sequence)
    assert [each.upto for each in apart.followed["emb"].over][1:] == [each.upto for each in store.followed["emb"].over]
    assert_is(apart, writer, np.arange(2100))


def _read(prefix: Path) -> Any:
    (member,) = [member for member in members(prefix.parent) if member.prefix == prefix]
    record, mark = read_record(member)
    assert record is not None
    return read_increment(member, record, mark)


@pytest.mark.parametrize(("key_dtype", "value_dtype"), [("uint64", "float16"), ("int32", "float64"), ("int64", "int8")])
def test_every_type_and_parts(key_dtype: str, value_dtype: str, tmp_path: Path) -> None:
    writer = ChainWriter(
        tmp_path / "run", {"a": 2, "b": 5}, parts=3, key_dtype=key_dtype, value_dtype=value_dtype, slot=False
    )
    writer.put("a", range(50), 1)
    writer.put("b", range(20, 60), 2)
    store = begun(writer, tmp_path / "cache")
    writer.put("a", range(40, 70), 3)
    writer.remove("a", range(10))
    first = store
    store = after(store, writer.increment())
    asked = np.arange(80).astype(key_dtype)
    assert_is(store, writer, asked)
    assert store.tables["b"] is first.tables["b"]  # nothing of it changed


def test_pooled_rows_are_those_of_the_keys(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path / "run", {"emb": 4}, slot=False)
    writer.put("emb", range(300), 1)
    store = begun(writer, tmp_path / "cache")
    writer.put("emb", range(100, 200), 2)
    writer.remove("emb", range(50, 60))
    store = after(store, writer.increment())
    rng = np.random.default_rng(1)
    keys = rng.integers(0, 320, 500)
    splits = np.array([0, 0, 3, 200, 201, 500])
    table = store.tables["emb"].table
    values, found = writer.expected("emb", keys)
    for combiner, weights in itertools.product(("sum", "mean"), (None, rng.random(500).astype(np.float32))):
        pooled, missing = table.pool(keys, splits, combiner, weights=weights)
        share = np.ones(500, np.float32) if weights is None else weights
        for bag, (a, b) in enumerate(itertools.pairwise(splits)):
            total = np.zeros(4, np.float64)
            for i in range(a, b):
                total += share[i] * values[i].astype(np.float64)
            divisor = share[a:b].sum() if combiner == "mean" and b > a else 1
            np.testing.assert_allclose(pooled[bag], total / divisor, rtol=1e-5)
        assert missing == np.count_nonzero(~found)


def test_the_page_looks_at_rows_that_are_there(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path / "run", {"emb": 2}, slot=False)
    writer.put("emb", range(100), 1)
    store = begun(writer, tmp_path / "cache")
    writer.remove("emb", range(90))
    writer.put("emb", [200, 95], 7)
    store = after(store, writer.increment())
    told = describe_rows(store.tables["emb"], 5)
    assert (told["rows"], told["sampled"]) == (11, 11) and sorted(map(int, told["keys"])) == [*range(90, 100), 200]
    near = find_nearest(store.tables["emb"], "200", "dot", 20)
    assert (near["scanned"], near["rows"]) == (11, 11)
    assert sorted(int(one["key"]) for one in near["neighbours"]) == list(range(90, 100))


def test_an_increment_of_another_table_changes_nothing(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path / "run", {"emb": 2, "also": 3})
    writer.put("emb", range(10), 1)
    store = begun(writer, tmp_path / "cache")
    for other in ({"emb": 2, "also": 4}, {"emb": 2, "also": 3, "new": 1}):
        wrong = ChainWriter(tmp_path / f"wrong{len(other)}{other['also']}", other)
        wrong.put("emb", range(10), 9)
        wrong.full()
        wrong.put("emb", range(10), 99)
        with pytest.raises(ChainError, match=r"also|new"):
            after(store, wrong.increment())
    assert_is(store, writer)


def test_a_damaged_file_is_not_folded(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path / "run", {"emb": 2}, slot=False)
    writer.put("emb", range(5000), 1)
    store = begun(writer, tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob("*.kvsnap")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    damaged = tmp_path / "damaged.kvsnap"
    damaged.write_bytes(data)
    base = TableStore(damaged)
    base.verify_on_use()
    with pytest.raises(CorruptFileError, match="checksum"):
        make_fold(store.on(base, 0), Position(None, 1, frozenset(), 0), tmp_path / "cache", tmp_path, lambda: True)
    assert folds_of(tmp_path / "cache", tmp_path) == []
    assert not list((tmp_path / "cache").glob(".*"))


def test_one_process_folds_at_a_time_and_a_fold_can_be_ended(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path / "run", {"emb": 2}, slot=False)
    writer.put("emb", range(100), 1)
    store = begun(writer, tmp_path / "cache")
    with only_one(tmp_path / "cache", tmp_path) as mine:
        assert mine
        with only_one(tmp_path / "cache", tmp_path) as other:
            assert not other
    stop = threading.Event()
    stop.set()
    at = Position("c", 1, frozenset(["f"]), 2.5)
    assert make_fold(store, at, tmp_path / "cache", tmp_path, lambda: not stop.is_set()) is None
    assert folds_of(tmp_path / "cache", tmp_path) == []
    fold = make_fold(store, at, tmp_path / "cache", tmp_path, lambda: True)
    assert fold is not None and folds_of(tmp_path / "cache", tmp_path) == [fold]
