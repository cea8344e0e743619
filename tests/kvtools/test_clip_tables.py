"""Choosing rows of tables and writing them, against one row at a time in plain Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools.clip import Age, Clip, Criteria, Top, choose_rows, write_chosen
from kvtools.clip_policy import Policy, choose_all
from kvtools.dialects.chunk import ALL_COLUMNS
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, UsageError
from kvtools.key_list import key_list, read_key_list
from kvtools.table_view import MaskedTable

Save = Callable[..., Path]
Make = Callable[..., Any]
Tensors = Callable[..., dict[str, Any]]
DAY = 86_400


def rows_of(table: TableReader) -> list[tuple[Any, ...]]:
    """The rows in order, the columns as bytes."""
    rows = []
    for chunk in table.chunks(rows=5):
        columns = [chunk.values, *(chunk.slots[name] for name in sorted(chunk.slots)), chunk.freqs, chunk.versions]
        rows += [
            (int(chunk.keys[i]), *(column[i].tobytes() for column in columns if column is not None))
            for i in range(len(chunk))
        ]
    return rows


def chosen_keys(table: TableReader, criteria: Criteria, memory: int = 1 << 20) -> list[int]:
    choice = choose_rows(table, criteria, memory=memory)
    view = MaskedTable(table, choice.mask)
    keys = [int(key) for chunk in view.chunks(rows=3) for key in chunk.keys]
    assert len(keys) == choice.kept == view.rows
    assert view.take(np.arange(len(keys))).keys.tolist() == keys
    return keys


@pytest.fixture
def open_sample(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path
) -> Callable[..., tuple[Any, Checkpoint]]:
    def open_sample(parts: int = 1, change: Callable[[Any], None] = lambda _: None, **options: Any) -> Any:
        sample = make_sample("emb", **options)
        change(sample)
        return sample, open_checkpoint(save_plain(tmp_path / "source", table_tensors(sample, parts)))

    return open_sample


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("key_dtype", ["int64", "int32", "uint64"])
@pytest.mark.parametrize("value_dtype", ["float32", "float16", "bfloat16", "float64"])
def test_what_is_kept_is_kept_whole(
    open_sample: Any, tmp_path: Path, parts: int, key_dtype: str, value_dtype: str
) -> None:
    sample, checkpoint = open_sample(parts, rows=90, key_dtype=key_dtype, value_dtype=value_dtype)
    values = sample.values.astype(np.float64)
    expected = {
        int(key)
        for key, row, freq in zip(sample.keys, values, sample.freqs, strict=True)
        if math.hypot(*row) >= 1.5 and max(map(abs, row)) >= 1 and freq >= 1 << 30
    }
    before = [row for row in rows_of(checkpoint.table("emb")) if row[0] in expected]
    criteria = Criteria(norms=(Clip("l2", 1.5), Clip("abs", 1)), min_freq=1 << 30)
    choices = choose_all(checkpoint, Policy.of(criteria))
    account = write_chosen(checkpoint, choices, tmp_path / "out")
    after = open_checkpoint(tmp_path / "out").table("emb")
    assert rows_of(after) == before and 0 < len(before) < 90
    assert after.parts == parts
    assert account.tables[0].rows_written == len(expected) == choices[0].kept
    assert choices[0].failed["l2"] == sum(math.hypot(*row) < 1.5 for row in values)
    assert choices[0].bytes_saved == choices[0].cut * (sample.keys.itemsize + 8 + 12 * sample.values.itemsize)


def test_empty_table_and_nothing_left(open_sample: Any, tmp_path: Path) -> None:
    for rows, threshold in ((0, 1.0), (9, 1e9)):
        _, checkpoint = open_sample(2, rows=rows)
        choices = choose_all(checkpoint, Policy.of(Criteria(norms=(Clip("abs", threshold),))))
        write_chosen(checkpoint, choices, tmp_path / "out", options=WriteOptions(force=True))
        table = open_checkpoint(tmp_path / "out").table("emb")
        assert (table.rows, table.parts) == (0, 2)


def test_rows_that_are_not_finite_are_kept_and_counted(open_sample: Any) -> None:
    def spoil(sample: Any) -> None:
        sample.values[:] = 0
        sample.values[3, 1] = np.nan
        sample.values[7, 0] = -np.inf

    sample, checkpoint = open_sample(change=spoil)
    table = checkpoint.table("emb")
    for norm in ("abs", "l2"):
        choice = choose_rows(table, Criteria(norms=(Clip(norm, 1),)))
        assert (choice.kept, choice.non_finite) == (2, 2)
        assert set(chosen_keys(table, Criteria(top=Top(2, norm)))) == {int(sample.keys[3]), int(sample.keys[7])}


@pytest.mark.parametrize("by", ["freq", "version", "abs", "l2"])
@pytest.mark.parametrize("memory", [1, 1 << 30])
@settings(max_examples=30)
@given(data=st.data())
def test_the_top_rows_are_exactly_as_many_and_ties_go_by_key(
    save_plain: Save, table_tensors: Tensors, make_sample: Make, tmp_path_factory: Any, by: Any, memory: int, data: Any
) -> None:
    rows = data.draw(st.integers(0, 40))
    parts = data.draw(st.integers(1, 3))
    key_dtype = data.draw(st.sampled_from(["int64", "uint64", "int32"]))
    sample = make_sample("emb", rows=rows, dim=1, key_dtype=key_dtype, slots=())
    few = data.draw(st.lists(st.sampled_from([0, 1, 2, 2**32 - 1]), min_size=rows, max_size=rows))
    sample.freqs = sample.versions = np.array(few, np.uint32)
    sample.values = np.array(few, np.float32)[:, None] * np.float32(-0.5)
    path = save_plain(tmp_path_factory.mktemp("top") / "a", table_tensors(sample, parts))
    table = open_checkpoint(path).table("emb")
    count = data.draw(st.integers(0, rows + 2))
    at_least = data.draw(st.sampled_from([None, 1]))
    candidates = [(-score, int(key)) for score, key in zip(few, sample.keys, strict=True) if score >= (at_least or 0)]
    expected = sorted(key for _, key in sorted(candidates)[:count])
    criteria = Criteria(min_freq=at_least, top=Top(count, by))
    assert sorted(chosen_keys(table, criteria, memory)) == expected


def test_of_equal_keys_with_equal_scores_the_later_rows_stay(open_sample: Any) -> None:
    def repeat(sample: Any) -> None:
        sample.keys = np.tile(np.array([5, 7, 6]), 10)
        sample.freqs[:] = 3

    sample, checkpoint = open_sample(rows=30, change=repeat)
    choice = choose_rows(checkpoint.table("emb"), Criteria(top=Top(13, "freq")))
    kept = choice.mask.rows_of(np.arange(13)).tolist()
    assert kept == sorted([*range(0, 30, 3), 23, 26, 29])
    assert [int(sample.keys[row]) for row in (23, 26, 29)] == [6, 6, 6]


@pytest.mark.parametrize("key_dtype", ["int64", "int32", "uint64"])
@pytest.mark.parametrize("npy", [True, False])
def test_lists_of_keys(open_sample: Any, tmp_path: Path, key_dtype: str, npy: bool) -> None:
    sample, checkpoint = open_sample(3, key_dtype=key_dtype)
    table = checkpoint.table("emb")
    listed = [int(key) for key in sample.keys[::3]]
    file = tmp_path / "keys"
    if npy:
        np.save(tmp_path / "keys.npy", sample.keys[::3])
        file = tmp_path / "keys.npy"
    else:
        file.write_text("\n".join(map(str, [*listed, *listed, -(2**63), 2**64 - 1, 2**40])) + "\r\n\n")
        listed = [key for key in [*listed, -(2**63), 2**64 - 1] if key in sample.keys.tolist()]
    keys = read_key_list(str(file))
    assert set(chosen_keys(table, Criteria(keep_keys=keys))) == set(listed)
    assert set(chosen_keys(table, Criteria(drop_keys=keys))) == set(sample.keys.tolist()) - set(listed)
    assert chosen_keys(table, Criteria(keep_keys=keys, drop_keys=keys)) == []
    assert chosen_keys(table, Criteria(keep_keys=key_list([]))) == []


@pytest.mark.parametrize(
    ("text", "line", "shown"),
    [("1\nx\n", 2, "'x'"), ("1\n\n1.5", 3, "'1.5'"), (str(2**64), 1, f"'{2**64}'"), (f"0\n{-(2**63) - 1}\n", 2, "'-9")],
)
def test_lines_that_are_no_keys_are_named(tmp_path: Path, text: str, line: int, shown: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(BadInputError, match=f"keys': line {line} is {shown}"):
        read_key_list(str(tmp_path / "keys"))


def test_files_that_hold_no_keys_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="No such file"):
        read_key_list(str(tmp_path / "none"))
    np.save(tmp_path / "floats.npy", np.zeros(3))
    with pytest.raises(BadInputError, match="array of float64, expected integers"):
        read_key_list(str(tmp_path / "floats.npy"))
    np.save(tmp_path / "objects.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(BadInputError, match="expected a NumPy array of integers"):
        read_key_list(str(tmp_path / "objects.npy"))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "floats.npy").read_bytes()[:20])
    with pytest.raises(BadInputError, match="expected a NumPy array of integers"):
        read_key_list(str(tmp_path / "cut.npy"))


def test_age_in_seconds(open_sample: Any) -> None:
    now = 1_700_000_000

    def date(sample: Any) -> None:
        sample.versions[:] = now - 10 * DAY - 1
        sample.versions[4:6] = now - 10 * DAY
        sample.versions[6] = 0
        sample.versions[7] = now + 5

    sample, checkpoint = open_sample(change=date)
    choice = choose_rows(checkpoint.table("emb"), Criteria(age=Age(10 * DAY, True, now)))
    assert choice.mask.rows_of(np.arange(choice.kept)).tolist() == [4, 5, 6, 7]
    assert choice.undated == 1
    assert len(sample.keys) - choice.kept == choice.failed["older-than"]


def test_age_in_days_counts_whole_days(open_sample: Any) -> None:
    def date(sample: Any) -> None:
        sample.versions[:] = np.arange(len(sample.versions)) + 1

    _, checkpoint = open_sample(change=date)
    table = checkpoint.table("emb")
    # At noon of day 40, day 29 ended 10.5 days ago and day 30 has ended 9.5 days ago.
    criteria = Criteria(age=Age(10 * DAY, True, 40 * DAY + DAY // 2), version_unit="days")
    choice = choose_rows(table, criteria)
    assert choice.mask.rows_of(np.arange(1)).tolist() == [29]
    assert table.take(np.array([29]), ALL_COLUMNS).versions.tolist() == [30]


@pytest.mark.parametrize("now", [None, 50])
def test_age_in_steps_counts_from_the_largest_version(open_sample: Any, now: int | None) -> None:
    def step(sample: Any) -> None:
        sample.versions[:] = np.arange(len(sample.versions))

    _, checkpoint = open_sample(change=step, rows=50)
    choice = choose_rows(checkpoint.table("emb"), Criteria(age=Age(9, False, now), version_unit="steps"))
    assert choice.kept == (10 if now is None else 9)
    everything = Criteria(age=Age(2**60, False, now), version_unit="steps")
    assert choose_rows(checkpoint.table("emb"), everything).cut == 0


def test_refused(open_sample: Any) -> None:
    def strip(sample: Any) -> None:
        sample.freqs = sample.versions = None

    _, checkpoint = open_sample(change=strip)
    with pytest.raises(BadInputError, match="'emb' by frequencies: it has none; name the tables that have them"):
        choose_all(checkpoint, Policy.of(Criteria(min_freq=1)))
    with pytest.raises(BadInputError, match="by versions: it has none"):
        choose_all(checkpoint, Policy.of(Criteria(top=Top(3, "version"))))
    _, checkpoint = open_sample()
    with pytest.raises(UsageError, match="its versions count seconds, so --older-than is a time"):
        choose_all(checkpoint, Policy.of(Criteria(age=Age(5, False))))
    with pytest.raises(UsageError, match="its versions count steps, so --older-than is a number of steps"):
        choose_all(checkpoint, Policy.of(Criteria(age=Age(5, True), version_unit="steps")))
    with pytest.raises(BadInputError, match="say --version-unit"):
        choose_all(checkpoint, Policy.of(Criteria(age=Age(5, True), version_unit="unknown")))
    with pytest.raises(UsageError, match="expected 0 or more"):
        Criteria(min_freq=-1)
    with pytest.raises(UsageError, match="expected 0 or more"):
        Criteria(top=Top(-1, "freq"))
