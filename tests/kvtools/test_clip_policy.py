"""Policies: what holds for which table, what fits into a budget, and what a file may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.array_table import ArrayTable
from kvtools.clip import Age, Clip, Criteria, Top
from kvtools.clip_policy import Policy, Rule, choose_all, read_policy
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.errors import BadInputError, UsageError
from kvtools.table_view import MaskedTable


def checkpoint_of(*tables: TableReader) -> Checkpoint:
    return Checkpoint(Path("model"), "memory", {table.schema.name: table for table in tables})


def kept_keys(checkpoint: Checkpoint, policy: Policy, **options: Any) -> dict[str, list[int]]:
    choices = choose_all(checkpoint, policy, **options)
    kept = {}
    for choice in choices:
        view = MaskedTable(checkpoint.tables[choice.table], choice.mask)
        kept[choice.table] = [int(key) for chunk in view.chunks(rows=3) for key in chunk.keys]
        assert len(kept[choice.table]) == choice.kept
    return kept


def table(name: str, keys: Any, dim: int = 2, **columns: Any) -> ArrayTable:
    keys = np.asarray(keys, np.int64)
    return ArrayTable(name, keys, np.arange(1, len(keys) * dim + 1, dtype=np.float32).reshape(-1, dim), **columns)


def test_the_first_rule_that_matches_holds_for_a_table() -> None:
    checkpoint = checkpoint_of(*(table(name, [1, 2, 3]) for name in ("ads/a", "ads/b", "user", "item")))
    policy = Policy(
        (
            Rule(("ads/b",), Criteria()),
            Rule(("ads/*", "item"), Criteria(norms=(Clip("abs", 3),))),
            Rule(("*",), Criteria(norms=(Clip("abs", 5),))),
        )
    )
    assert kept_keys(checkpoint, policy) == {"ads/a": [2, 3], "ads/b": [1, 2, 3], "user": [3], "item": [2, 3]}
    assert policy.unmatched([*checkpoint.tables]) == []
    assert policy.unmatched(["ads/a"]) == ["ads/b", "item"]


@st.composite
def tables_with_freqs(draw: Any) -> list[tuple[int, list[int]]]:
    return draw(
        st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(-5, 30), max_size=12)), min_size=1, max_size=3)
    )


@given(sizes=tables_with_freqs(), budget=st.integers(0, 900))
def test_a_budget_keeps_what_is_looked_up_most_per_byte(sizes: list[tuple[int, list[int]]], budget: int) -> None:
    tables = [
        table(f"t{number}", np.arange(len(freqs))[::-1], dim, freqs=np.array(freqs, np.int64))
        for number, (dim, freqs) in enumerate(sizes)
    ]
    checkpoint = checkpoint_of(*tables)
    kept = kept_keys(checkpoint, Policy(budget=budget), size=lambda schema: 8 + 4 * schema.dim, memory=1 << 20)

    # Plain Python: the best first, until the next would not fit; ties by table and key.
    rows = [
        (-max(freq, 0) / (8 + 4 * dim), number, len(freqs) - 1 - row, 8 + 4 * dim)
        for number, (dim, freqs) in enumerate(sizes)
        for row, freq in enumerate(freqs)
    ]
    expected: dict[str, list[int]] = {f"t{number}": [] for number in range(len(sizes))}
    room = budget
    if sum(size for *_, size in rows) <= budget:
        room, full = budget, set()
    scores = sorted({score for score, *_ in rows})
    for score in scores:
        same = sorted((number, key, size) for at, number, key, size in rows if at == score)
        fits_all = sum(size for *_, size in same) <= room
        full = set()
        for number, key, size in same:
            if number in full or size > room:
                full.add(number)
                continue
            expected[f"t{number}"].append(key)
            room -= size
        if not fits_all:
            break
    assert {name: sorted(keys) for name, keys in kept.items()} == {k: sorted(v) for k, v in expected.items()}


def test_a_budget_goes_by_norm_where_a_table_has_no_frequencies() -> None:
    checkpoint = checkpoint_of(table("a", [1, 2, 3], freqs=np.array([9, 1, 1])), table("b", [7, 8]))
    size = {"size": lambda schema: 10}
    assert kept_keys(checkpoint, Policy(budget=39), **size) == {"a": [2, 3], "b": [8]}
    assert kept_keys(checkpoint, Policy(budget=39, by="l2"), **size) == {"a": [2, 3], "b": [8]}
    with pytest.raises(BadInputError, match="table 'b' by frequencies: it has none"):
        choose_all(checkpoint, Policy(budget=39, by="freq"))
    assert kept_keys(checkpoint, Policy(budget=0), **size) == {"a": [], "b": []}


def test_a_budget_counts_what_the_thresholds_left() -> None:
    source = table("a", range(10), freqs=np.arange(10))
    policy = Policy.of(Criteria(norms=(Clip("abs", 6),), top=Top(6, "l2")), budget=35, by="freq")
    (choice,) = choose_all(checkpoint_of(source), policy, size=lambda schema: 10)
    assert (choice.kept, choice.bytes, choice.bytes_saved) == (3, 30, 70)
    assert dict(choice.failed) == {"max-abs": 2, "top-k": 2, "budget": 3}
    assert (choice.lookups, choice.lookups_missed) == (45, sum(range(7)))


def test_lookups_missed_counts_no_row_that_a_later_one_hides() -> None:
    keys, freqs = [5, 6, 5, 7], np.array([100, 2**62, 3, 2**62], np.int64)
    source = table("a", keys, freqs=freqs)
    policy = Policy.of(Criteria(norms=(Clip("abs", 5),)))
    (choice,) = choose_all(checkpoint_of(source), policy, distinct=True)
    assert (choice.rows, choice.kept, choice.hidden) == (3, 2, 1)
    assert (choice.lookups, choice.lookups_missed) == (2**63 + 3, 2**62)
    (all_rows,) = choose_all(checkpoint_of(source), Policy())
    assert (all_rows.rows, all_rows.kept, all_rows.lookups_missed) == (4, 4, 0)


@pytest.mark.parametrize("keys, kept", [([5, 6, 5, 7, 5], [7, 5]), ([5, 6, 8, 7, 9], [8, 7, 9])])
def test_a_large_table_is_read_while_keys_that_are_there_twice_are_sought(
    keys: list[int], kept: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint_of(table("a", keys, freqs=np.arange(5)))
    policy = Policy.of(Criteria(norms=(Clip("abs", 6),)))
    (expected,) = choose_all(source, policy, distinct=True)
    monkeypatch.setattr("kvtools.clip._KEY_ROWS", 2)
    (choice,) = choose_all(source, policy, distinct=True)
    for field in ("rows", "kept", "failed", "hidden", "lookups", "lookups_missed"):
        assert getattr(choice, field) == getattr(expected, field)
    assert kept_keys(source, policy, distinct=True) == {"a": kept}


def test_rows_of_zeros_are_no_rows_of_nan_or_minus_zero_that_are_kept_or_cut() -> None:
    values = np.float32([[0, 0], [0, -0.0], [np.nan, 0], [0, 1e-45]])
    source = ArrayTable("a", np.arange(4), values)
    (choice,) = choose_all(checkpoint_of(source), Policy(), zeros=lambda _: True)
    assert kept_keys(checkpoint_of(source), Policy(), zeros=lambda _: True) == {"a": [2, 3]}
    assert dict(choice.failed) == {"zeros": 2}


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "hot.txt").write_text("5 7")
    path = tmp_path / "policy.toml"
    path.write_text(
        """
        budget = "2MiB"
        by = "l2"
        [[tables]]
        name = ["ads/*", "user"]
        clip-abs = 1e-6
        min-freq = 2
        keep-keys = "hot.txt"
        [[tables]]
        name = "never cut"
        [[tables]]
        name = "*"
        clip-l2 = 1
        older-than = "30d"
        now = 1000
        top-k = 9
        by = "version"
        version-unit = "seconds"
        """
    )
    policy = read_policy(str(path))
    assert (policy.budget, policy.by) == (2 << 20, "l2")
    first = policy.criteria("ads/x")
    assert first.norms == (Clip("abs", 1e-6),) and first.min_freq == 2 and first.keep_keys is not None
    assert first.keep_keys.contains(np.array([5, 6, 7])).tolist() == [True, False, True]
    assert policy.criteria("never cut") == Criteria()
    assert policy.criteria("x") == Criteria(
        norms=(Clip("l2", 1.0),), age=Age(30 * 86400, True, 1000), top=Top(9, "version"), version_unit="seconds"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither a budget nor"),
        ("budget = ", "it is no TOML"),
        ("budget = 'much'", "got budget 'much', expected a size"),
        ("budget = true", "got budget = True, expected a string or a whole number"),
        ("buget = '1GiB'", "got buget, which is no part of it; did you mean budget"),
        ("by = 'freq'\n[[tables]]\nname='a'", "got by freq for all tables and no budget"),
        ("tables = 3", "got tables = 3, expected a list"),
        ("tables = [3]", "entry 1 of tables: got 3"),
        ("[[tables]]\nmin-freq = 1", "entry 1 of tables: it has no name"),
        ("[[tables]]\nname = ''", "entry 1 of tables: it has no name"),
        ("[[tables]]\nname = [1]", "entry 1 of tables: it has no name"),
        (
            "[[tables]]\nname='a'\n[[tables]]\nname='b'\nmin-freq = 1.5",
            "entry 2 of tables: got min-freq = 1.5, expected",
        ),
        ("[[tables]]\nname='a'\nclip_abs = 1", "did you mean clip-abs"),
        ("[[tables]]\nname='a'\nclip-abs = nan", "got threshold nan"),
        ("[[tables]]\nname='a'\nclip-abs = -1", "got threshold -1"),
        ("[[tables]]\nname='a'\nmin-freq = -1", "got -1, expected 0 or more"),
        ("[[tables]]\nname='a'\ntop-k = 5", "top-k K and by freq"),
        ("[[tables]]\nname='a'\ntop-k = 5\nby = 'luck'", "got by 'luck'"),
        ("[[tables]]\nname='a'\nolder-than = 'long'", "got older-than 'long'"),
        ("[[tables]]\nname='a'\nnow = '2024-05-31'", "got now without older-than"),
        ("[[tables]]\nname='a'\nkeep-keys = 'none.txt'", "reading keys from '.*none.txt': No such file"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises((BadInputError, UsageError), match=message) as raised:
        read_policy(str(path))
    if "keys" not in message:
        assert str(path) in str(raised.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"reading the policy '.*no\.toml': No such file"):
        read_policy(str(tmp_path / "no.toml"))
