from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.dialects.chunk import ALL_COLUMNS
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, UsageError
from kvtools.rename import Renames, rename


def test_names_change_and_rows_stay(sample_path: Path, tmp_path: Path) -> None:
    before = open_checkpoint(sample_path)
    renames = Renames(
        tables=(("ads/emb", "user_emb"), ("user_emb", "ads/emb")),  # they trade places
        slots=(("Adam.m", "Adam.v"), ("Adam.v", "first")),
        variables=(("global_step", "step"),),
    )
    account, done = rename(before, tmp_path / "b", renames)
    assert done == {
        "table ads/emb": "user_emb",
        "table user_emb": "ads/emb",
        "slot Adam.m": "Adam.v",
        "slot Adam.v": "first",
        "variable global_step": "step",
    }
    after = open_checkpoint(tmp_path / "b")
    assert account.tables[0].rows_written == 11
    old, new = before.table("ads/emb"), after.table("user_emb")
    assert new.schema.slots == tuple(
        type(slot)({"Adam.m": "Adam.v", "Adam.v": "first"}[slot.name], slot.width, slot.dtype)
        for slot in old.schema.slots
    )
    assert new.schema.metadata["slots"]["first"]["name"] == "first"
    rows = np.arange(11)
    was, now = old.take(rows, ALL_COLUMNS), new.take(rows, ALL_COLUMNS)
    for one, other in (
        (was.keys, now.keys),
        (was.values, now.values),
        (was.slots["Adam.m"], now.slots["Adam.v"]),
        (was.slots["Adam.v"], now.slots["first"]),
        (was.freqs, now.freqs),
        (was.versions, now.versions),
    ):
        assert np.array_equal(one, other)
    assert [variable.name for variable in after.variables] == ["dense/kernel", "step"]
    assert [int(step) for step in after.read_variable("step")] == [7]


def test_patterns_and_prefixes(sample_path: Path, tmp_path: Path) -> None:
    renames = Renames(tables=((r"(\w+)_emb", r"e/\1"),), strip_prefix="e/", add_prefix="x/", regex=True)
    _, done = rename(open_checkpoint(sample_path), tmp_path / "b", renames)
    assert done == {"table ads/emb": "x/ads/emb", "table empty_emb": "x/empty", "table user_emb": "x/user"}
    assert list(open_checkpoint(tmp_path / "b").tables) == ["x/ads/emb", "x/empty", "x/user"]


def test_in_place_and_back(sample_path: Path) -> None:
    prefix = sample_path / "model.ckpt-7"
    before = sorted(open_checkpoint(prefix).tables)
    force = WriteOptions(force=True)
    rename(open_checkpoint(prefix), prefix, Renames(add_prefix="tower/"), options=force)
    assert sorted(open_checkpoint(prefix).tables) == [f"tower/{name}" for name in before]
    rename(open_checkpoint(prefix), prefix, Renames(strip_prefix="tower/"), options=force)
    assert sorted(open_checkpoint(prefix).tables) == before


@pytest.mark.parametrize(
    ("renames", "message"),
    [
        (Renames(), "no name would change"),
        (Renames(tables=(("user_emb", "user_emb"),)), "no name would change"),
        (Renames(tables=(("emb", "x"),)), "no table is called 'emb'; there are 'ads/emb', 'empty_emb', 'user_emb'"),
        (Renames(tables=(("e.b", "x"),), regex=True), r"no table matches 'e\.b'"),
        (Renames(tables=(("(", "x"),), regex=True), "no regular expression"),
        (Renames(tables=((".*", r"\3"),), regex=True), "no regular expression"),
        (Renames(tables=(("user_emb", "ads/emb"),)), "tables 'ads/emb' and 'user_emb' would both be called 'ads/emb'"),
        (Renames(tables=((".*", "x"),), regex=True), "would both be called 'x'"),
        (Renames(tables=(("user_emb", "x"), ("user_emb", "y"))), "would become 'x' and 'y'"),
        (Renames(tables=(("user_emb", ""),)), "would have no name left"),
        (Renames(slots=(("Adam.m", "Adam.v"),)), "slots of table 'ads/emb' 'Adam.m' and 'Adam.v' would both"),
        (Renames(slots=(("m", "v"),)), "no slot is called 'm'; there are 'Adam.m', 'Adam.v'"),
        (Renames(variables=(("w", "v"),)), "no variable is called 'w'"),
        (Renames(variables=(("global_step", "dense/kernel"),)), "would both be called 'dense/kernel'"),
        (Renames(strip_prefix="x"), "no table's name starts with 'x'"),
        (Renames(strip_prefix="user_emb"), "would have no name left"),
    ],
)
def test_refused(sample_path: Path, tmp_path: Path, renames: Renames, message: str) -> None:
    with pytest.raises((BadInputError, UsageError), match=message):
        rename(open_checkpoint(sample_path), tmp_path / "b", renames)
    assert list(tmp_path.glob("b*")) == []


def test_variables_of_an_object_based_checkpoint_keep_their_names(
    save: Callable[..., Path], make_sample: Callable[..., Any], table_tensors: Callable[..., Any], tmp_path: Path
) -> None:
    tensors = table_tensors(make_sample("emb"), prefix="model/user_emb")
    tensors |= {"_CHECKPOINTABLE_OBJECT_GRAPH": b"\x0a\x00", "w/.ATTRIBUTES/VARIABLE_VALUE": np.zeros(3)}
    path = save(tmp_path / "a", tensors)
    with pytest.raises(BadInputError, match="object-based"):
        rename(open_checkpoint(path), tmp_path / "b", Renames(variables=(("w/.ATTRIBUTES/VARIABLE_VALUE", "v"),)))
    rename(open_checkpoint(path), tmp_path / "b", Renames(tables=(("emb", "items"),)))
    after = open_checkpoint(tmp_path / "b")
    assert list(after.tables) == ["items"] and after.bookkeeping
