"""A chain of a full checkpoint and increments is, row for row, the full checkpoint in its last member's place."""

from __future__ import annotations

import dataclasses
import json
import pickle
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from kvtools import chain, chain_fold
from kvtools.chain_check import report_chain, verify_chain
from kvtools.chain_fold import apply_increments, merge_chain, open_chain
from kvtools.chain_increment import write_increment
from kvtools.chain_place import is_chain
from kvtools.chain_reader import open_member, removed_keys
from kvtools.dialects.bundle import Bundle, BundleWriter
from kvtools.dialects.chunk import ALL_COLUMNS
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import ExtraSchema
from kvtools.diff import compare_tables
from kvtools.errors import BadInputError, KvtoolsError, UsageError
from kvtools.server.store import TableStore
from kvtools.table_view import TableView

from .chain_files import ChainWriter, Rows, dense, row, rows_of, table_of

FIRST: Rows = {1: row(1), 2: row(2), -3: row(3), 4: row(4)}
SECOND: Rows = {1: row(1), 2: row(20, score=9), -3: row(3), 7: row(7)}  # 4 went, 7 came, 2 changed
THIRD: Rows = {1: row(1, freq=2), 2: row(20, score=9), 4: row(44), 9: row(9)}  # -3 and 7 went, 4 came again


def three(folder: Path, parts: int = 1) -> ChainWriter:
    writer = ChainWriter(folder)
    writer.full({"emb": table_of(FIRST, parts=parts)}, bias=1)
    writer.delta({"emb": table_of(SECOND, parts=parts)}, bias=2)
    writer.delta({"emb": table_of(THIRD, parts=parts, pending={11: 2})}, bias=3)
    return writer


@pytest.mark.parametrize("parts", [1, 3])
def test_a_chain_is_the_full_checkpoint_in_its_last_members_place(tmp_path: Path, parts: int) -> None:
    three(tmp_path, parts)
    assert is_chain(tmp_path)
    table = open_checkpoint(tmp_path).table("emb")
    assert rows_of(table) == THIRD
    assert (table.parts, table.rows) == (parts, 4)
    assert table.extra("filtered_keys").tolist() == [11]
    keys = np.concatenate([chunk.keys for chunk in table.chunks()])
    taken = table.take(np.array([3, 0, 2]), ALL_COLUMNS)
    assert taken.keys.tolist() == keys[[3, 0, 2]].tolist()
    assert rows_of(pickle.loads(pickle.dumps(table))) == THIRD
    assert rows_of(open_chain(tmp_path, until=2).table("emb")) == SECOND
    (bias,) = open_checkpoint(tmp_path).read_variable("bias")
    assert bias.tolist() == [3, 6]


@pytest.mark.parametrize("parts", [1, 3])
def test_a_merged_chain_has_all_that_training_saves(tmp_path: Path, parts: int) -> None:
    three(tmp_path, parts)
    account, (merged,) = merge_chain(tmp_path, tmp_path / "out")
    assert account.lossless and merged.rows == 4
    expected, bundle = ChainWriter(tmp_path, name="whole"), Bundle(tmp_path / "out")
    trained = expected.full({"emb": table_of(THIRD, parts=parts, pending={11: 2})}, bias=3)
    whole = Bundle(trained)
    assert bundle.entries.keys() == whole.entries.keys()
    for name, entry in whole.entries.items():
        if name.endswith("-kvmeta"):
            assert json.loads(bundle.strings(name)[0]) == json.loads(whole.strings(name)[0])
        elif entry.dtype != 7:
            assert bundle.tensor(name).shape == whole.tensor(name).shape
    assert rows_of(open_checkpoint(tmp_path / "out").table("emb")) == THIRD
    assert compare_tables(open_checkpoint(tmp_path / "out").table("emb"), open_checkpoint(trained).table("emb")).same
    record = chain.record_of(chain.Member(3, "full", tmp_path / "out"))
    assert record is not None and record.previous == chain.Previous(3, chain.fingerprint(tmp_path / "ckpt-3.delta"))
    prefixes = {name.removesuffix("-kvmeta") for name in whole.entries if name.endswith("-kvmeta")}
    assert sum(record.tables[x].rows for x in prefixes) == 4


def test_a_merged_chain_may_be_a_member_of_it(tmp_path: Path) -> None:
    writer = three(tmp_path)
    for name in ("ckpt-2", "ckpt-4", "ckpt-3.delta", "other.delta-4.delta"):
        with pytest.raises(UsageError, match="it is the full checkpoint 3; call it"):
            merge_chain(tmp_path, tmp_path / name)
    merge_chain(tmp_path, tmp_path / "ckpt-3")
    assert [member.prefix.name for member in chain.newest_chain(tmp_path)] == ["ckpt-3"]
    writer.delta({"emb": table_of(FIRST)})
    assert [member.prefix.name for member in chain.newest_chain(tmp_path)] == ["ckpt-3", "ckpt-4.delta"]
    assert rows_of(open_checkpoint(tmp_path).table("emb")) == FIRST


def test_parts_may_differ_within_a_chain(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path)
    writer.full({"emb": table_of(FIRST, parts=3)})
    writer.delta({"emb": table_of(SECOND, parts=3)})
    writer.delta({"emb": table_of(THIRD, parts=2)})
    table = open_checkpoint(tmp_path).table("emb")
    assert table.parts == 2
    rows = rows_of(table)
    assert {key: found[:4] for key, found in rows.items()} == {key: one[:4] for key, one in THIRD.items()}
    for part in range(2):
        assert all(key % 2 == part for chunk in table.chunks(part=part) for key in chunk.keys.tolist())
    keys = np.concatenate([chunk.keys for chunk in table.chunks()])
    assert table.take(np.arange(4)).keys.tolist() == keys.tolist()
    account, _ = merge_chain(tmp_path, tmp_path / "out")
    assert account.losses and "eviction scores of emb" in account.losses[0]
    assert rows_of(open_checkpoint(tmp_path / "out").table("emb")).keys() == THIRD.keys()


def test_applying_increments_gives_what_folding_gives_and_goes_on_from_there(tmp_path: Path) -> None:
    three(tmp_path)
    deltas = [tmp_path / "ckpt-2.delta", tmp_path / "ckpt-3.delta"]
    apply_increments(tmp_path / "ckpt-1", deltas[:1], tmp_path / "two")
    assert rows_of(open_checkpoint(tmp_path / "two").table("emb")) == SECOND
    apply_increments(tmp_path / "two", deltas[1:], tmp_path / "three")
    assert rows_of(open_checkpoint(tmp_path / "three").table("emb")) == THIRD


@pytest.mark.parametrize(
    ("increments", "reason", "message"),
    [
        ([3], "gap", "member 3 and 2 is missing"),
        ([2, 2], "duplicate", "name each increment once"),
        ([3, 2], "gap", "nothing was written"),
        ([2, 3, 2], "disorder", "3 was applied already"),
    ],
)
def test_what_does_not_follow_is_refused(tmp_path: Path, increments: list[int], reason: str, message: str) -> None:
    three(tmp_path)
    with pytest.raises(chain.ChainError, match=message) as caught:
        apply_increments(tmp_path / "ckpt-1", [tmp_path / f"ckpt-{n}.delta" for n in increments], tmp_path / "out")
    assert caught.value.reason == reason
    assert not list(tmp_path.glob("out*"))


def test_an_increment_of_another_run_or_table_is_refused(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    three(tmp_path / "a")
    other = ChainWriter(tmp_path / "b", of="other")
    other.full({"emb": table_of(FIRST)})
    other.delta({"emb": table_of(SECOND)})
    with pytest.raises(chain.ChainError, match="is of another chain") as caught:
        apply_increments(tmp_path / "a" / "ckpt-1", [tmp_path / "b" / "ckpt-2.delta"], tmp_path / "out")
    assert caught.value.reason == "other-chain"
    twin = ChainWriter(tmp_path / "c")
    twin.full({"emb": table_of(SECOND)})
    twin.delta({"emb": table_of(THIRD)})
    with pytest.raises(chain.ChainError, match="made after another checkpoint") as caught:
        apply_increments(tmp_path / "a" / "ckpt-1", [tmp_path / "c" / "ckpt-2.delta"], tmp_path / "out")
    assert caught.value.reason == "fingerprint"
    with pytest.raises(BadInputError, match="is no increment but whole"):
        apply_increments(tmp_path / "a" / "ckpt-1", [tmp_path / "c" / "ckpt-1"], tmp_path / "out")
    with pytest.raises(BadInputError, match="is an increment itself"):
        apply_increments(tmp_path / "a" / "ckpt-2.delta", [tmp_path / "a" / "ckpt-3.delta"], tmp_path / "out")


def test_an_increment_alone_is_no_checkpoint(tmp_path: Path) -> None:
    three(tmp_path)
    with pytest.raises(BadInputError, match=r"it is an increment of a chain.*kvtools merge"):
        open_checkpoint(tmp_path / "ckpt-2.delta")
    with pytest.raises(BadInputError, match="it is an increment of a chain"):
        open_checkpoint(tmp_path / "ckpt-2.delta", OpenOptions(lenient=True))
    (tmp_path / "alone").mkdir()
    for file in tmp_path.glob("ckpt-2.delta.*"):
        shutil.copy(file, tmp_path / "alone" / file.name.replace("ckpt-2", "tuesday"))
    for path in (tmp_path / "alone", tmp_path / "alone" / "tuesday.delta"):
        with pytest.raises(BadInputError, match=r"kvtools apply BASE '.*tuesday\.delta' OUT"):
            open_checkpoint(path)
    member = chain.members(tmp_path)[1]
    table = open_member(member).table("emb")
    assert sorted(rows_of(table)) == [2, 7]
    assert removed_keys(table).tolist() == [4]
    record = chain.record_of(member)
    assert record is not None and record.tables == {"emb": chain.TableCounts(2, 1, 1)}


def test_a_gap_in_a_folder_is_named_and_nothing_is_taken(tmp_path: Path) -> None:
    three(tmp_path)
    for file in tmp_path.glob("ckpt-2.delta.*"):
        file.unlink()
    with pytest.raises(chain.ChainError, match="gap: increment 2 is missing") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.reason == "gap"


def test_the_difference_of_two_checkpoints_applies_to_the_first(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path)
    first = writer.full({"emb": table_of(FIRST, parts=2)}, bias=1)
    second = writer.full({"emb": table_of(SECOND, parts=2, pending={5: 1})}, bias=2)
    account, (changes,), record = write_increment(first, second, tmp_path / "step.delta")
    assert account.lossless
    assert dataclasses.astuple(changes) == ("emb", 1, 1, 1, 2)
    assert (record.sequence, record.full, record.kind) == (2, 1, "delta")
    apply_increments(first, [tmp_path / "step.delta"], tmp_path / "out")
    table = open_checkpoint(tmp_path / "out").table("emb")
    assert rows_of(table) == SECOND
    assert table.extra("filtered_keys").tolist() == [5]
    with pytest.raises(UsageError, match="its number is 2"):
        write_increment(first, second, tmp_path / "ckpt-9.delta")
    with pytest.raises(chain.ChainError, match="applied already"):
        apply_increments(second, [tmp_path / "step.delta"], tmp_path / "no")


def test_an_increment_extends_a_chain(tmp_path: Path) -> None:
    three(tmp_path)
    other = ChainWriter(tmp_path, name="later").full({"emb": table_of(FIRST)}, bias=9)
    write_increment(tmp_path, other, tmp_path / "ckpt-4.delta")
    assert rows_of(open_checkpoint(tmp_path).table("emb")) == FIRST


def test_differences_of_single_bits_are_changes(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path)
    zero: Rows = {1: ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 1, 1, 1), 2: row(2)}
    first = writer.full({"emb": table_of(zero)})
    second = writer.full({"emb": table_of({**zero, 1: ((-0.0, 0.0, 0.0), (0.0, 0.0, 0.0), 1, 1, 1)})})
    third = writer.full({"emb": table_of({**zero, 2: row(2, score=6)})})
    assert write_increment(first, second, tmp_path / "a.delta")[1][0].changed == 1
    assert write_increment(first, third, tmp_path / "b.delta")[1][0].changed == 1
    assert write_increment(first, first, tmp_path / "c.delta")[1][0].changed == 0


def test_no_increment_leads_to_other_tables_slots_or_dialects(tmp_path: Path) -> None:
    writer = ChainWriter(tmp_path)
    one = writer.full({"emb": table_of(FIRST)})
    two = writer.full({"emb": table_of(FIRST), "user": table_of(FIRST, name="user")})
    with pytest.raises(BadInputError, match="table 'user' is in one of"):
        write_increment(one, two, tmp_path / "x.delta")


def test_random_chains_give_the_state_after_their_last_increment(tmp_path: Path) -> None:
    for seed in range(6):
        folder, rng = tmp_path / str(seed), random.Random(seed)
        folder.mkdir()
        writer, state = ChainWriter(folder), {key: row(key) for key in range(-5, 6)}
        parts = rng.choice([1, 2])
        writer.full({"emb": table_of(state, parts=parts)})
        for step in range(1, 5):
            for key in rng.sample(range(-8, 9), 6):
                if rng.random() < 0.4:
                    state.pop(key, None)
                else:
                    state[key] = row(rng.random(), rng.randrange(99), step, rng.randrange(99))
            state = dict(rng.sample(list(state.items()), len(state)))  # rows lie anywhere
            rounded = {
                k: (tuple(np.float32(v).tolist()), tuple(np.float32(s).tolist()), *r) for k, (v, s, *r) in state.items()
            }
            writer.delta({"emb": table_of(state, parts=parts)})
            if rng.random() < 0.3:
                writer.full({"emb": table_of(state, parts=parts)}, same_moment=True)
            assert (
                rows_of(open_checkpoint(folder, OpenOptions(memory=rng.choice([500, 1 << 30]))).table("emb")) == rounded
            )


def test_the_tables_of_a_chain_cannot_vanish(tmp_path: Path) -> None:
    three(tmp_path)
    with pytest.raises(KvtoolsError, match="no such table"):
        open_checkpoint(tmp_path).table("other")
    assert dense(1).variables[0].name == "bias"


def test_a_chain_is_served_as_its_newest_state(tmp_path: Path) -> None:
    writer = three(tmp_path)
    store = TableStore(tmp_path, cache=tmp_path / "cache")
    _, found = store.table("emb").lookup(np.array([4, 7, 9]))
    assert found.tolist() == [True, False, True]
    writer.delta({"emb": table_of(SECOND)})
    _, found = TableStore(tmp_path, cache=tmp_path / "cache").table("emb").lookup(np.array([4, 7, 9]))
    assert found.tolist() == [False, True, False]
    with pytest.raises(BadInputError, match="it is an increment of a chain"):
        TableStore(tmp_path / "ckpt-2.delta", cache=tmp_path / "cache")


def test_filters_and_policies_of_parts_and_steps_stay(tmp_path: Path) -> None:
    def table(rows: Rows, mark: int) -> TableReader:
        found = table_of(rows, parts=2)
        filters = {f"admission_filter_{part}": np.full(5, mark + part, np.uint8) for part in range(2)}
        records = found.schema.metadata["part_records"]
        for part, record in enumerate(records):
            record["policies"] |= {"versions": "steps", "step": mark, "max_capacity": 10 + part}
        return TableView(
            WithExtras(found, filters),
            dataclasses.replace(
                found.schema,
                version_unit="steps",
                extras=(*found.schema.extras, *(ExtraSchema(name, "uint8", (5,)) for name in filters)),
            ),
        )

    writer = ChainWriter(tmp_path)
    writer.full({"emb": table(FIRST, 1)})
    writer.delta({"emb": table(SECOND, 3)})
    folded = open_checkpoint(tmp_path).table("emb")
    assert folded.schema.version_unit == "steps"
    assert [folded.extra(f"admission_filter_{part}").tolist() for part in range(2)] == [[3] * 5, [4] * 5]
    account, _ = merge_chain(tmp_path, tmp_path / "out")
    assert account.lossless
    bundle = Bundle(tmp_path / "out")
    assert bundle.tensor("emb/part_1-pending_filter").read().tolist() == [4] * 5
    records = [json.loads(bundle.strings(f"emb/part_{part}-kvmeta")[0]) for part in range(2)]
    assert [record["policies"]["max_capacity"] for record in records] == [10, 11]
    assert {record["policies"]["step"] for record in records} == {3}
    account, _ = merge_chain(tmp_path, tmp_path / "one", parts=1)
    losses = " ".join(account.tables[0].losses)
    assert "admission filters: the source does not record" in losses and "eviction scores" in losses
    assert rows_of(open_checkpoint(tmp_path / "one").table("emb")).keys() == SECOND.keys()


class WithExtras(TableView):
    """A table with more extra arrays."""

    def __init__(self, source: TableReader, extras: Mapping[str, np.ndarray]) -> None:
        super().__init__(source, source.schema)
        self._more = extras

    def extra(self, name: str) -> np.ndarray:
        return self._more[name] if name in self._more else self.source.extra(name)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [("cut", "damaged"), ("no-record", "other-chain"), ("renamed", "disorder"), ("twice", "duplicate")],
)
def test_what_is_wrong_with_a_member_is_named(tmp_path: Path, damage: str, reason: str) -> None:
    three(tmp_path)
    index, data = tmp_path / "ckpt-3.delta.index", tmp_path / "ckpt-3.delta.data-00000-of-00001"
    if damage == "cut":
        data.write_bytes(data.read_bytes()[:-9])
    elif damage == "no-record":
        with BundleWriter(tmp_path / "ckpt-3.delta") as writer:
            writer.array("x", np.zeros(1))
    else:
        for file in (index, data):
            shutil.copy(file, tmp_path / file.name.replace("-3", "-4" if damage == "renamed" else "-03"))
    with pytest.raises(BadInputError) as caught:
        open_checkpoint(tmp_path)
    assert getattr(caught.value, "reason", "damaged") == reason
    report = report_chain(tmp_path)
    assert report.reason == reason and report.members[0].rows == 4
    found = verify_chain(tmp_path).findings
    assert found[0].severity == "error" and found[0].check == f"chain-{reason}"


def test_a_member_that_training_removes_meanwhile_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = three(tmp_path)

    def remove_and_open(member: chain.Member, options: OpenOptions) -> Checkpoint:
        if not list(tmp_path.glob("ckpt-4.*")):
            writer.full({"emb": table_of(FIRST)})
            for old in tmp_path.glob("ckpt-[123].*"):
                old.unlink()
        return open_member(member, options)

    monkeypatch.setattr(chain_fold, "open_member", remove_and_open)
    assert rows_of(open_chain(tmp_path).table("emb")) == FIRST
