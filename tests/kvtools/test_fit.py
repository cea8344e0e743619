"""What a dialect cannot hold is named, and what it can hold in another form is exact."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvtools import table_from_arrays, write_tables
from kvtools.dialects.chunk import Chunk
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.dialect import Dialect, Holds
from kvtools.dialects.schema import ExtraSchema, SlotSchema, TableSchema
from kvtools.errors import BadInputError
from kvtools.fit import fit

SOURCE = TableSchema(
    name="emb",
    dialect="source",
    key_dtype="int64",
    value_dtype="float32",
    dim=2,
    part_rows=(3, 4),
    slots=(SlotSchema("Adam.m", 2, "float32"), SlotSchema("wide", 6, "float32")),
    freq_dtype="uint32",
    version_dtype="uint32",
    version_unit="seconds",
    partition="floor_mod",
    extras=(ExtraSchema("initial_values", "float32", (5, 2)), ExtraSchema("blacklist", "int64", (0,))),
    metadata={"initializer": {"kind": "constant"}, "object_path": "m/emb"},
)


def target(**holds: Any) -> Dialect:
    everything = {
        "key_dtypes": ("int64",),
        "value_dtypes": ("float32",),
        "freq_dtypes": ("uint32",),
        "version_dtypes": ("uint32",),
        "extras": frozenset({"initial_values", "blacklist"}),
        "metadata": frozenset({"initializer", "object_path"}),
    }
    return Dialect(
        "target", "a target", lambda source: False, lambda source, options: None, holds=Holds(**{**everything, **holds})
    )


def source(**changes: Any) -> TableSchema:
    return dataclasses.replace(SOURCE, **changes)


def test_everything_held_is_lossless() -> None:
    fitted = fit(SOURCE, target())
    assert fitted.losses == () and fitted.changes == ()
    assert fitted.schema.part_rows == (3, 4) and fitted.schema.slots == SOURCE.slots
    assert fitted.schema.metadata == {"initializer": {"kind": "constant"}}  # a path belongs to its own dialect


@pytest.mark.parametrize(
    ("holds", "loss"),
    [
        ({"slots": False}, "optimizer slots Adam.m, wide: the dialect has none"),
        ({"slot_width_is_dim": True}, "slot wide: it is 6 wide, the dialect's slots are as wide as the value"),
        ({"freq_dtypes": ()}, "frequencies: the dialect has none"),
        ({"version_dtypes": ()}, "versions: the dialect has none"),
        ({"version_units": ("days",)}, "the time of day of versions: the dialect counts days"),
        ({"version_units": ("steps",)}, "versions: they count seconds, the dialect's count steps"),
        ({"extras": frozenset()}, "initial values [5, 2]: the dialect has no place for them"),
        ({"metadata": frozenset()}, "the initializer of new rows: the dialect does not record it"),
    ],
)
def test_a_loss_is_named(holds: dict[str, Any], loss: str) -> None:
    assert fit(SOURCE, target(**holds)).losses == (loss,)


@pytest.mark.parametrize(
    ("inits", "losses"),
    [
        (None, ("initial values of slot Adam.m: no more than one number is kept of them",)),
        (
            frozenset({"constant"}),
            (
                "initial values of slot wide: a copy of the value, which the dialect does not record",
                "initial values of slot Adam.m: no more than one number is kept of them",
            ),
        ),
        (
            frozenset(),
            (
                "initial values of slot Adam.v, 0.5: the dialect does not record them",
                "initial values of slot wide: a copy of the value, which the dialect does not record",
                "initial values of slot Adam.m: no more than one number is kept of them",
            ),
        ),
    ],
)
def test_how_slots_of_new_rows_begin_is_kept_or_named(inits: frozenset[str] | None, losses: tuple[str, ...]) -> None:
    described = {
        "zero": {"init": "constant", "constant": 0.0},
        "Adam.v": {"init": "constant", "constant": 0.5},
        "wide": {"init": "copy_value"},
        "Adam.m": {"init": "rows"},
        "gone": {"init": "copy_value"},  # of a slot that is not there: nothing is lost with it
        "broken": "no object",
    }
    names = ("zero", "Adam.v", "wide", "Adam.m")
    table = source(
        slots=tuple(SlotSchema(name, 2, "float32") for name in names),
        metadata={"slots": described, "initializer": {"kind": "constant"}},
    )
    holds = {} if inits is None else {"slot_inits": inits}
    for names_of_slots in (frozenset({"slots", "initializer"}), None):
        assert fit(table, target(metadata=names_of_slots, **holds)).losses == losses
    kept = fit(table, target(metadata=None, **holds)).schema.metadata.get("slots", {})
    held = {"constant", "copy_value"} if inits is None else inits
    assert {name for name in kept if name in names} == {
        name
        for name in names
        if described[name]["init"] in held  # type: ignore[index]
    }


def test_a_wider_type_is_a_change_and_exact() -> None:
    fitted = fit(source(key_dtype="int32", value_dtype="bfloat16", slots=()), target())
    assert fitted.losses == ()
    assert fitted.changes == (
        "keys were int32, are int64",
        "its value was bfloat16, is float32, which holds it exactly",
    )
    values = np.array([[1.5, -3e38], [np.inf, 0]], ml_dtypes.bfloat16)
    chunk = fitted.convert(Chunk(np.array([-1, 2], np.int32), values))
    assert chunk.keys.dtype == np.int64 and chunk.values is not None
    np.testing.assert_array_equal(chunk.values, values.astype(np.float32))


def test_a_type_that_would_lose_numbers_is_refused() -> None:
    with pytest.raises(
        BadInputError, match="its value is float64, expected float32; cast it first, see `kvtools cast`"
    ):
        fit(source(value_dtype="float64"), target())


def test_unsigned_keys_go_into_signed_ones_only_where_they_fit() -> None:
    fitted = fit(source(key_dtype="uint64"), target())
    assert fitted.keys(np.array([2**63 - 1], np.uint64)).tolist() == [2**63 - 1]
    with pytest.raises(BadInputError, match=f"key {2**64 - 1} does not fit int64"):
        fitted.keys(np.array([5, 2**64 - 1], np.uint64))


def test_counts_saturate_and_versions_change_their_unit() -> None:
    fitted = fit(SOURCE, target(freq_dtypes=("uint16",), version_dtypes=("uint16",), version_units=("days",)))
    assert fitted.losses == ("the time of day of versions: the dialect counts days",)  # counts are known row by row
    slots = {slot.name: np.zeros((2, slot.width), np.float32) for slot in SOURCE.slots}
    counts = np.array([7, 2**32 - 1], np.uint32)
    seconds = np.array([86_399, 86_400 * 20_000 + 5], np.uint32)
    rows = Chunk(np.arange(2), np.zeros((2, 2), np.float32), slots, counts, seconds)
    assert fitted.cut_freqs(rows) == 1
    chunk = fitted.convert(rows)
    assert chunk.freqs is not None and chunk.freqs.dtype == np.uint16 and chunk.freqs.tolist() == [7, 65535]
    assert chunk.versions is not None and chunk.versions.tolist() == [0, 20_000]
    back = fit(source(version_unit="days"), target(version_units=("seconds",)))
    days = back.convert(
        Chunk(np.arange(1), np.zeros((1, 2), np.float32), slots, counts[:1], np.array([20_000], np.uint16))
    )
    assert days.versions is not None and days.versions.tolist() == [86_400 * 20_000]
    with pytest.raises(BadInputError, match="version 5616000000 does not fit uint32"):
        back.convert(
            Chunk(np.arange(1), np.zeros((1, 2), np.float32), slots, counts[:1], np.array([65_000], np.uint16))
        )


def test_one_part_where_there_are_no_parts() -> None:
    fitted = fit(SOURCE, target(many_parts=False))
    assert fitted.schema.part_rows == (7,) and fitted.changes == ("2 parts became one, the dialect has no parts",)
    assert fit(SOURCE, target(), parts=3).schema.part_rows == (7, 0, 0)


@pytest.mark.parametrize(("dialect", "unit"), [("tfplugin", "steps"), ("deeprec", "steps")])
def test_versions_of_an_unknown_unit_are_told_as_what_they_are_read_as(dialect: str, unit: str, tmp_path: Path) -> None:
    table = table_from_arrays("t", np.array([1]), np.ones((1, 2), np.float32), versions=np.array([7], np.uint32))
    account = write_tables([table], tmp_path / "t.ckpt", dialect)
    (change,) = (line for line in account.tables[0].changes if "versions" in line)
    assert change.startswith(f"versions, which do not say what they count, are taken for {unit}")
    assert "see `kvtools migrate --version-unit`" in change
    assert open_checkpoint(tmp_path / "t.ckpt").tables["t"].schema.version_unit == unit


@pytest.mark.parametrize("dialect", ["tfplus", "deeprec"])
def test_a_slot_whose_columns_would_be_called_as_those_of_the_table_is_refused(dialect: str, tmp_path: Path) -> None:
    values = np.ones((1, 2), np.float32)
    table = table_from_arrays("t", np.array([1]), values, slots={"": values})
    with pytest.raises(BadInputError, match=r"two columns would be called 't.*-keys'; rename"):
        write_tables([table], tmp_path / "t.ckpt", dialect)
    assert not list(tmp_path.iterdir())
