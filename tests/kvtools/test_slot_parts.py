"""Slots that are cut into several, and put together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.dialects.chunk import ALL_COLUMNS, Columns
from kvtools.dialects.detect import dialect_named, open_checkpoint
from kvtools.errors import BadInputError
from kvtools.lossless import with_tables
from kvtools.migrate import write_tables
from kvtools.rename import Renames, rename
from kvtools.slot_parts import with_other_slots

SAMPLE = Path(__file__).parents[1] / "data" / "tfplus"
THIRDS = ("GroupAdam.m", "GroupAdam.v", "GroupAdam.z")


def test_a_slot_of_tfplus_becomes_three_and_one_again(tmp_path: Path) -> None:
    before = open_checkpoint(SAMPLE)
    account, done = rename(before, tmp_path / "ours", Renames(split=(("GroupAdam", THIRDS),)), to="tfplugin")
    # The three parts of the sample drew initial rows of their own, and so did its slot; no row loses anything.
    (written,) = account.tables
    assert account.losses == ()
    assert written.losses == (
        "initial values of parts 1, 2: new rows of all parts start from those of one",
        *(f"initial values of slot {name}: no more than one number is kept of them" for name in THIRDS),
    )
    assert done == {"slot GroupAdam": "GroupAdam.m, GroupAdam.v, GroupAdam.z"}
    table = open_checkpoint(tmp_path / "ours").table("test/kv_embedding")
    assert [(slot.name, slot.width) for slot in table.schema.slots] == [(name, 8) for name in THIRDS]
    for old, new in zip(before.table("test/kv_embedding").chunks(), table.chunks(), strict=True):
        np.testing.assert_array_equal(old.slots["GroupAdam"], np.hstack([new.slots[name] for name in THIRDS]))
    rename(open_checkpoint(tmp_path / "ours"), tmp_path / "back", Renames(join=((THIRDS, "GroupAdam"),)), to="tfplus")
    back = open_checkpoint(tmp_path / "back").table("test/kv_embedding")
    for old, new in zip(before.table("test/kv_embedding").chunks(), back.chunks(), strict=True):
        assert old.keys.tobytes() == new.keys.tobytes()
        assert old.slots["GroupAdam"].tobytes() == new.slots["GroupAdam"].tobytes()


def test_rows_that_are_taken_and_columns_that_are_not_read() -> None:
    checkpoint = with_other_slots(open_checkpoint(SAMPLE), [("GroupAdam", THIRDS)])
    table = checkpoint.table("test/kv_embedding")
    whole = open_checkpoint(SAMPLE).table("test/kv_embedding").take(np.array([3, 500]), ALL_COLUMNS)
    taken = table.take(np.array([3, 500]), ALL_COLUMNS)
    np.testing.assert_array_equal(taken.slots["GroupAdam.v"], whole.slots["GroupAdam"][:, 8:16])
    assert table.take(np.array([3]), Columns(values=True)).slots == {}


def test_what_new_rows_hold_goes_along(make_table: Callable[..., Any], tmp_path: Path) -> None:
    described = {"S": {"name": "S", "init": "constant", "constant": 0.5}}
    table = make_table(slots=("S", "T"), metadata={"slots": described})
    write_tables([table], tmp_path / "a", "tfplugin")
    rename(open_checkpoint(tmp_path / "a"), tmp_path / "b", Renames(split=(("S", ("S.a", "S.b")),)))
    schema = open_checkpoint(tmp_path / "b").table("scope/emb").schema
    assert [(slot.name, slot.width) for slot in schema.slots] == [("S.a", 2), ("S.b", 2), ("T", 4)]
    assert [schema.metadata["slots"][slot]["constant"] for slot in ("S.a", "S.b", "T")] == [0.5, 0.5, 0.0]


@pytest.mark.parametrize(("constants", "lost"), [((0.5, 0.5), ()), ((0.5, 0.25), ("S",))])
def test_slots_that_begin_differently_lose_that_side_by_side(
    make_table: Callable[..., Any], tmp_path: Path, constants: tuple[float, float], lost: tuple[str, ...]
) -> None:
    described = {
        name: {"name": name, "init": "constant", "constant": constant}
        for name, constant in zip(("S.a", "S.b"), constants, strict=True)
    }
    write_tables([make_table(slots=("S.a", "S.b"), metadata={"slots": described})], tmp_path / "a", "tfplugin")
    account, _ = rename(open_checkpoint(tmp_path / "a"), tmp_path / "b", Renames(join=((("S.a", "S.b"), "S"),)))
    message = "initial values of slot {}: no more than one number is kept of them"
    assert account.tables[0].losses == tuple(map(message.format, lost))


def test_pieces_of_a_slot_that_begins_as_the_value_begin_as_pieces_of_it(
    make_table: Callable[..., Any], tmp_path: Path
) -> None:
    described = {"S": {"name": "S", "init": "copy_value"}}
    write_tables([make_table(slots=("S",), metadata={"slots": described})], tmp_path / "a", "tfplugin")
    account, _ = rename(open_checkpoint(tmp_path / "a"), tmp_path / "b", Renames(split=(("S", ("a", "b")),)))
    assert account.tables[0].losses == tuple(
        f"initial values of slot {name}: no more than one number is kept of them" for name in ("a", "b")
    )


@pytest.mark.parametrize("target", [name for name, dialect in with_tables().items() if dialect.write])
@pytest.mark.parametrize(
    "begins",
    [{"init": "constant", "constant": 0.5}, {"init": "constant", "constant": 0.0}, {"init": "copy_value"}],
    ids=["half", "zero", "copy"],
)
def test_how_slots_of_new_rows_begin_is_read_back_or_named(
    make_table: Callable[..., Any], tmp_path: Path, target: str, begins: dict[str, Any]
) -> None:
    dialect = dialect_named(target)
    if dialect.output == "url" or not dialect.holds.slots or dialect.holds.only_slots is not None:
        pytest.skip("nothing is written to a disk, or no slot of that name is")
    table = make_table(slots=("m",), metadata={"slots": {"m": {"name": "m", **begins}}})
    out = tmp_path / f"out{dialect.suffixes[0] if dialect.suffixes else ''}"
    account = write_tables([table], out, target)
    (after,) = open_checkpoint(out).tables.values()
    record = after.schema.metadata.get("slots", {}).get("m", {"init": "constant", "constant": 0.0})
    arrived = {name: record.get(name) for name in begins} == begins
    named = [loss for loss in account.tables[0].losses if loss.startswith("initial values of slot m")]
    assert arrived != bool(named), (record, named)
    assert arrived or begins != {"init": "constant", "constant": 0.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"split": [("Adam", ("a", "b"))]}, "no table has slot 'Adam'; there are 'GroupAdam'"),
        ({"split": [("GroupAdam", ("a",) * 2)]}, "expected different ones"),
        ({"split": [("GroupAdam", ("a", ""))]}, "expected different ones"),
        ({"split": [("GroupAdam", tuple("abcde"))]}, "is 24 wide, expected a multiple of 5"),
        ({"join": [(("GroupAdam", "Adam"), "a")]}, "no table has slot 'GroupAdam' and 'Adam'"),
        ({"split": [("GroupAdam", ("a", "b"))], "join": [(("a", "a"), "c")]}, "different slots of one type"),
        ({"split": [("GroupAdam", ("a", "b", "c"))], "join": [(("a", "b"), "c")]}, "has a slot 'c' already"),
    ],
)
def test_changes_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        with_other_slots(open_checkpoint(SAMPLE), **changes)
