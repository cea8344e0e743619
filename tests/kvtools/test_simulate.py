"""Simulations, against plain Python: rows, hits and what goes, to the row; and what a log or a policy may not say."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools._kvtable import Table
from kvtools.clip import Criteria
from kvtools.clip_policy import Policy, Rule
from kvtools.errors import BadInputError, UsageError
from kvtools.id_log import open_log
from kvtools.simulate import RowSize, SimulatedTable, simulate
from kvtools.training_policy import TrainingPolicy


class Reference:
    """Training of one table as a dict says it: {key: [score, order, count of updates, last step or second]}."""

    def __init__(self, told: TrainingPolicy) -> None:
        self.told = told
        self.rows: dict[int, dict[str, int]] = {}
        self.waiting: Counter[int] = Counter()
        self.seen: set[int] = set()
        self.order = self.step_number = 0
        self.hits = self.hits_without = self.evicted = 0

    def there(self, key: int, now: int) -> bool:
        age = self.told.expire_after_seconds or self.told.expire_after_steps
        return key in self.rows and not (age and now - self.rows[key]["written"] >= age)

    def step(self, ids: list[int], second: int = 0) -> None:
        told = self.told
        timed = not told.expire_after_steps
        now = second if timed else self.step_number
        self.hits += sum(self.there(key, now) for key in ids)
        self.hits_without += sum(key in self.seen for key in ids)
        self.seen |= set(ids)
        missed = [key for key in ids if not self.there(key, now)]
        if told.admission:
            most = told.admission.threshold
            for key in missed:
                self.waiting[key] = min(most, self.waiting[key] + 1)
            missed = [key for key in missed if self.waiting[key] >= most]
        for key in dict.fromkeys(missed):
            freq = self.waiting.pop(key, 0) if told.admission else 0
            self.rows[key] = {"written": now, "freq": freq, "score": 0, "order": 0}
        self.touch(ids, lookup=True)
        # The update: of rows that are there, and of all ids where every key gets a row.
        written = second if timed else self.step_number + 1
        for key in dict.fromkeys(ids):
            if told.admission and not self.there(key, now):
                continue
            row = self.rows.setdefault(key, {"written": 0, "freq": 0, "score": 0, "order": 0})
            row["freq"] += 1
            row["written"] = written
        self.touch(ids, lookup=False)
        self.step_number += 1
        if told.expire_every and self.step_number % told.expire_every == 0:
            self.expire(second if timed else self.step_number)

    def touch(self, ids: list[int], *, lookup: bool) -> None:
        for key in ids:
            if key in self.rows:
                row = self.rows[key]
                self.order += 1
                if self.told.eviction == "lfu":
                    row["score"] = 1 if not row["order"] else row["score"] + lookup
                row["order"] = self.order
        excess = len(self.rows) - self.told.max_capacity if self.told.max_capacity else 0
        if excess > 0:
            by = sorted((row["score"], row["order"], key) for key, row in self.rows.items() if key not in set(ids))
            for *_, key in by[:excess]:
                del self.rows[key]
                self.evicted += 1

    def expire(self, now: int) -> None:
        self.rows = {key: row for key, row in self.rows.items() if self.there(key, now)}
        if self.told.expire_below_freq:
            self.rows = {key: row for key, row in self.rows.items() if row["freq"] >= self.told.expire_below_freq}
        if self.told.keep_top:
            by = "freq" if self.told.keep_top_by == "freq" else "written"
            other = "written" if by == "freq" else "freq"
            best = sorted(self.rows.items(), key=lambda each: (each[1][by], each[1][other], each[0]), reverse=True)
            self.rows = dict(best[: self.told.keep_top])


def keys_of(table: Table) -> list[int]:
    return sorted(int(key) for chunk in table.export([]) for key in chunk[0])


POLICIES: list[dict[str, Any]] = [
    {"max-capacity": 8, "eviction": "lru"},
    {"max-capacity": 8, "eviction": "lfu"},
    {"admission": {"count": 3}},
    {"admission": {"bloom": 2, "capacity": 1000, "error": 1e-9}},
    {"admission": {"count": 2}, "max-capacity": 8, "eviction": "lfu"},
    {"expire-after": 3},
    {"expire-after": 3, "expire-every": 2, "max-capacity": 9},
    {"expire-after": "4s", "expire-every": 1},
    {"expire-below-freq": 2, "expire-every": 5},
    {"keep-top": 5, "expire-every": 3},
    {"keep-top": 5, "keep-top-by": "version", "expire-every": 3, "expire-after": "90s"},
    {"padding-key": 3, "expire-after": 6, "admission": {"count": 2}},
]


@pytest.mark.parametrize("fields", POLICIES, ids=str)
@settings(max_examples=20)
@given(
    batches=st.lists(st.lists(st.integers(0, 20), min_size=1, max_size=7), min_size=1, max_size=25),
    seconds=st.lists(st.integers(0, 3), min_size=25, max_size=25),
)
def test_a_table_has_the_rows_that_plain_python_says(
    fields: dict[str, Any], batches: list[list[int]], seconds: list[int]
) -> None:
    told = TrainingPolicy.of(fields, "policy")
    clock = np.array([1_000_000_000_000_000], np.uint64)
    table, reference = SimulatedTable("t", told, clock=clock), Reference(told)
    for ids, passed in zip(batches, seconds, strict=False):
        clock += np.uint64(passed * 1_000_000)
        kept = [key for key in ids if key != told.padding_key]  # which never hits, and gets no row
        table.step(np.array(ids, np.int64))
        reference.step(kept, int(clock[0]) // 1_000_000)
        now = reference.step_number if told.expire_after_steps else int(clock[0]) // 1_000_000
        live = sorted(key for key in reference.rows if reference.there(key, now))
        held = keys_of(table.table)  # also those that are past their age, until they are collected
        assert held == sorted(reference.rows)
        assert [
            key for key, there in zip(held, table.table.contains(np.array(held, np.int64)), strict=True) if there
        ] == live
        assert (table.hits, table.hits_without) == (reference.hits, reference.hits_without)
        assert table.table.evicted_rows == reference.evicted
    assert table.keys == len(reference.seen)
    if told.admission and told.admission.kind == "count":
        assert table.table.waiting_keys == len(reference.waiting)
    stale = len(reference.rows) - len(live)
    assert table.collect() == stale


def policy_of(**tables: dict[str, Any]) -> Policy:
    return Policy(
        tuple(Rule((name,), Criteria(), None, TrainingPolicy.of(told, name)) for name, told in tables.items())
    )


def write_log(path: Path, **columns: Any) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    table = pyarrow.table(columns)
    if path.suffix == ".csv":
        csv.write_csv(table, path)
    else:
        parquet.write_table(table, path, row_group_size=100)
    return str(path)


def test_bytes_are_those_of_a_table_with_rows_of_that_width(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).zipf(1.3, 5000) % 700
    np.save(tmp_path / "ids.npy", ids)
    run = simulate(
        policy_of(user={"max-capacity": 300}), open_log(str(tmp_path / "ids.npy")), rows=RowSize("int64", 72)
    )
    real = Table("int64", "float32", 6, slots=[("m", 6), ("v", 6)], max_capacity=300)
    for start in range(0, 5000, 1024):
        real.gather_or_insert(ids[start : start + 1024])
        real.apply(
            "sgd",
            ids[start : start + 1024],
            np.zeros((len(ids[start : start + 1024]), 6), np.float32),
            {"learning_rate": 1},
        )
    memory = real.memory()
    (table,) = run.tables
    assert (table.rows, table.keys) == (len(real), len(np.unique(ids)))
    assert table.memory_bytes == memory["row_bytes"] + memory["index_bytes"] + memory["column_bytes"]


@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_columns_steps_and_moments(tmp_path: Path, suffix: str) -> None:
    rng = np.random.default_rng(1)
    users, items, times = rng.integers(0, 60, 1000), rng.integers(0, 30, 1000), np.arange(1000) + 1_700_000_000
    log = write_log(tmp_path / f"log{suffix}", user=users, item_id=items, timestamp=times, clicked=users % 2 == 0)
    policy = policy_of(user={"max-capacity": 40, "eviction": "lfu"}, item={"expire-after": "100s", "expire-every": 1})
    run = simulate(policy, open_log(log), columns=["item_id=item"], batch_size=7)
    by_name = {table.table: table for table in run.tables}
    assert (run.steps, run.examples, set(by_name)) == (143, 1000, {"user", "item"})
    for name, ids in (("user", users), ("item", items)):
        reference = Reference(policy.training(name))
        for start in range(0, 1000, 7):
            reference.step(ids[start : start + 7].tolist(), int(times[min(start + 6, 999)]))
        table = by_name[name]
        assert (table.hits, table.rows, table.lookups) == (reference.hits, len(reference.rows), 1000)
        assert sum(moment.hits for moment in table.moments) == table.hits
        assert sum(moment.lookups for moment in table.moments) == 1000
        assert table.moments[-1].rows == table.rows and table.moments[-1].step == 143
        assert len(table.moments) <= 128
        assert table.evicted == reference.evicted


def test_lists_nulls_and_two_columns_of_a_table(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    watched = pyarrow.array([[1, 2], None, [], [3, None, 1]], pyarrow.list_(pyarrow.int32()))
    log = write_log(tmp_path / "log.parquet", watched=watched, last=pyarrow.array([2, None, 9, 3], pyarrow.int64()))
    run = simulate(
        policy_of(video={"max-capacity": 9}), open_log(log), columns=["watched=video", "last=video"], batch_size=1
    )
    (table,) = run.tables
    assert (table.lookups, table.keys, table.rows, table.hits) == (7, 4, 4, 1)


def test_labels_that_are_taken_for_times_are_told(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.parquet", a=list(range(6)), clicked=[0, 1, 0, 0, 1, 0], day=[0, 1, 2, 3, 4, 5])
    policy = policy_of(a={"expire-after": "30d"})
    notes = simulate(policy, open_log(path, time_column="clicked"), batch_size=2).notes
    assert "column 'clicked' of the log has no time but 0 and 1: is it one of labels" in " ".join(notes)
    assert "labels" not in " ".join(simulate(policy, open_log(path, time_column="day")).notes)


def test_a_log_of_lookups(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.parquet", table=["a", "b", "a", "c", "a"], key=[1, 1, 2, 5, 1])
    run = simulate(policy_of(a={"max-capacity": 9}, b={"max-capacity": 9}), open_log(log), batch_size=2)
    assert {table.table: (table.lookups, table.hits, table.rows) for table in run.tables} == {
        "a": (3, 1, 2),
        "b": (1, 0, 1),
    }
    known = {"a": RowSize("int64", 4), "b": RowSize("int64", 4)}
    with pytest.raises(UsageError, match="there is no table 'c', but 'a', 'b'"):
        simulate(policy_of(a={"max-capacity": 9}), open_log(log), rows=known)


def test_what_is_not_replayed_is_said(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(4))
    told = {"expire-below-norm": 0.5, "expire-on-save": True, "keep-top": 3, "keep-top-by": "norm"}
    run = simulate(policy_of(t=told), open_log(str(tmp_path / "ids.npy")))
    assert [note.split(":")[2].strip() for note in run.notes] == [
        "expire-below-norm",
        "keep-top by norm",
        "expire-on-save",
    ]


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"user": [1.5, 2.0]}, {}, "column 'user' holds floats (double), and ids are whole numbers"),
        ({"user": [1.0, float("nan")]}, {}, "wrote NaN for them"),
        ({"user": ["a", "b"]}, {}, "training makes of them: kvtools.string_keys(column) gives those of strings"),
        ({"usr": [1, 2]}, {}, "it has no column 'user', but 'usr'; did you mean 'usr'?"),
        ({"user": [1, 2]}, {"columns": ["user"]}, "got --column user, expected COLUMN=TABLE"),
        (
            {"user": [1, 2]},
            {"columns": ["user=usr"]},
            "the policy has no entry for a table 'usr', but for 'user'; did you mean",
        ),
        ({"user": [1, 2]}, {"columns": ["item=user"]}, "it has no column 'item', but 'user'"),
        ({"user": [2**40, 2]}, {"rows": {"user": RowSize("int32", 4)}}, "id 1099511627776 is no int32 key"),
        ({"user": [1, 2], "time": [1, 1_700_000_000_000]}, {}, "has the time 1700000000000, expected Unix seconds"),
        ({"user": [1, 2], "time": [1.0, float("nan")]}, {}, "column 'time' has a time that is no number"),
        ({"user": [*range(12)]}, {"batch_size": 12}, "step 0 looks 12 different ids up, and max-capacity = 9"),
        ({"user": [1]}, {"batch_size": 0}, "got a batch of 0 examples"),
    ],
)
@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_bad_logs_and_wrong_names_are_told(
    tmp_path: Path, columns: dict[str, Any], options: dict[str, Any], message: str, suffix: str
) -> None:
    log = write_log(tmp_path / f"log{suffix}", **columns)
    with pytest.raises((UsageError, BadInputError)) as caught:
        simulate(policy_of(user={"max-capacity": 9}), open_log(log), **options)
    assert message in str(caught.value)


def test_unsigned_ids_of_a_csv_are_told(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(f"user\n{2**63}\n7\n")
    with pytest.raises(UsageError, match=r"of a CSV, ids of 2\^63 and more count as floats: write them as Parquet"):
        simulate(policy_of(user={"max-capacity": 9}), open_log(str(tmp_path / "log.csv")))


def test_bad_files_are_told(tmp_path: Path) -> None:
    policy = policy_of(user={"max-capacity": 9})
    empty = write_log(tmp_path / "empty.parquet", user=np.empty(0, np.int64))
    with pytest.raises(BadInputError, match="it has no rows"):
        simulate(policy, open_log(empty))
    for name, content, message in (
        ("none.csv", b"", "it is empty; its first line names the columns"),
        ("head.csv", b"user\n", "it has no rows"),
        ("ids.bin", b"12345678", "it is no Parquet file and no .npy file"),
        ("cut.parquet", b"PAR1PAR1", "cut.parquet'"),
        ("cut.npy", b"\x93NUMPY\x01\x00", "cut.npy'"),
        ("late.csv", b"user\n" + b"1\n" * 3_000_000 + b"1.5\n", "1.5"),
        ("twice.csv", b"user,user\n1,2\n", "two of its columns are called 'user'"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(BadInputError) as caught:
            simulate(policy, open_log(str(tmp_path / name)))
        assert message in str(caught.value), name
    np.save(tmp_path / "floats.npy", np.ones(3))
    with pytest.raises(UsageError, match=r"column 'ids' holds floats \(double\)"):
        open_log(str(tmp_path / "floats.npy"))
    with pytest.raises(BadInputError, match="there is no such file"):
        open_log(str(tmp_path / "gone.npy"))
    (tmp_path / "nothing").mkdir()
    with pytest.raises(BadInputError, match="the folder has no file"):
        open_log(str(tmp_path / "nothing"))
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(BadInputError, match="it is a pipe, expected a file"):
        open_log(str(tmp_path / "pipe.csv"))


def test_policies_that_no_log_can_be_replayed_through() -> None:
    with pytest.raises(UsageError, match="goes by scores that training sets"):
        SimulatedTable("t", TrainingPolicy.of({"max-capacity": 3, "eviction": "custom"}, "p"))
    with pytest.raises(UsageError, match="needs times, and the log has none"):
        SimulatedTable("t", TrainingPolicy.of({"expire-after": "30d"}, "p"))
    with pytest.raises(UsageError, match="got padding-key = 9223372036854775808, expected a key of int64"):
        SimulatedTable("t", TrainingPolicy.of({"padding-key": 2**63}, "p"))


def test_a_pattern_that_no_column_is_for_is_told(tmp_path: Path) -> None:
    policy = policy_of(**{"*": {"max-capacity": 9}})
    with pytest.raises(UsageError, match=r"column 'user' holds floats \(double\)"):
        simulate(policy, open_log(write_log(tmp_path / "floats.parquet", user=[1.5])))
    log = open_log(write_log(tmp_path / "log.parquet", user=[1]))
    with pytest.raises(UsageError, match="--column user=ads/emb says whose ids it has"):
        simulate(policy, log, rows={"ads/emb": RowSize("int64", 4)})


def test_a_table_of_the_policy_without_a_column_is_told(tmp_path: Path) -> None:
    log = open_log(write_log(tmp_path / "log.parquet", user=[1, 2, 1], item=[5, 5, 6]))
    told = {"max-capacity": 9}
    known = {"user": RowSize("int64", 4), "ads/emb": RowSize("int64", 4)}
    both = policy_of(**{"user": told, "ads/emb": told})
    message = "no column 'ads/emb', but 'user', 'item'; the policy has an entry for this table: --column item=ads/emb"
    for rows in (None, known):
        with pytest.raises(UsageError, match=message):
            simulate(both, log, rows=rows)
        run = simulate(both, log, rows=rows, columns=["item=ads/emb"])
        assert {table.table for table in run.tables} == {"user", "ads/emb"} and run.notes == []
    unused = "the log's column 'item' is not used: {}; --column item=TABLE says whose ids it has"
    pattern = policy_of(**{"user": told, "ads/*": told})
    assert simulate(pattern, log, rows=known).notes == [
        "not replayed: 'ads/emb': the log has no column of that name; --column COLUMN=ads/emb says which it is",
        unused.format("no table has that name"),
    ]
    assert simulate(pattern, log).notes == [
        "not replayed: 'ads/*': it matches no column of the log; see --column",
        unused.format("the policy has no entry of that name"),
    ]


def test_a_column_of_a_table_without_an_entry_is_told(tmp_path: Path) -> None:
    log = open_log(write_log(tmp_path / "log.parquet", user=[1, 2], item=[5, 6]))
    policy = policy_of(**{"user": {"max-capacity": 9}, "ads/emb": {"max-capacity": 9}})
    with pytest.raises(UsageError, match="the policy has no entry for a table 'nope', but for 'user', 'ads/emb'"):
        simulate(policy, log, columns=["user=nope"])


def test_a_log_of_lookups_without_a_table_of_the_policy(tmp_path: Path) -> None:
    log = open_log(write_log(tmp_path / "log.parquet", table=["user", "item"], key=[1, 1]))
    run = simulate(policy_of(user={"max-capacity": 9}, itm={"max-capacity": 9}), log)
    assert run.notes == [
        "not replayed: itm: the log looks nothing up in it, but in 'user', 'item'; did you mean 'item'?"
    ]
