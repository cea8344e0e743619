from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.array_table import ArrayTable
from kvtools.cast import CastTable, cast, rounded
from kvtools.cast_rows import cast_rows
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.schema import numpy_dtype
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, UsageError
from kvtools.migrate import write_tables

Save = Callable[..., Path]
Make = Callable[..., Any]
Tensors = Callable[..., dict[str, Any]]
FLOATS = ["float32", "float16", "bfloat16", "float64"]


def nearest_even(number: float, dtype: str) -> float:
    """The number of a 16-bit type nearest to `number`, by exact arithmetic over all numbers of the type."""
    first_infinite = {"float16": 0x7C00, "bfloat16": 0x7F80}[dtype]
    every = np.arange(first_infinite, dtype=np.uint16).view(numpy_dtype(dtype)).astype(np.float64)
    size = abs(Fraction(number))
    at = int(np.searchsorted(every, abs(number)))
    if at == len(every):
        # What lies half a step beyond the largest number and further is infinite.
        limit = Fraction(every[-1]) + (Fraction(every[-1]) - Fraction(every[-2])) / 2
        result = float(every[-1]) if size < limit else float("inf")
    else:
        around = [i for i in (at - 1, at) if i >= 0]
        best = min(around, key=lambda i: (abs(Fraction(every[i]) - size), i % 2))
        result = float(every[best])
    return -result if number < 0 else result


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@given(number=st.floats(allow_nan=False, allow_infinity=False), nudge=st.integers(-2, 2), tie=st.booleans())
def test_float64_is_rounded_once_to_nearest_even(dtype: str, number: float, nudge: int, tie: bool) -> None:
    if tie:  # half way between two numbers of the type, or next to it: where rounding twice goes wrong
        with np.errstate(over="ignore"):
            low = np.float64(number).astype(np.float32).astype(numpy_dtype(dtype))
        high = (low.view(np.uint16) + np.uint16(1)).view(numpy_dtype(dtype))
        number = (float(low) + float(high)) / 2
        for _ in range(abs(nudge)):
            number = float(np.nextafter(number, np.inf if nudge > 0 else -np.inf))
    if np.isfinite(number):
        assert float(rounded(np.array([number]), dtype)[0]) == nearest_even(number, dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_numbers_that_are_not_finite_stay(dtype: str) -> None:
    for source in FLOATS:
        numbers = np.array([np.nan, np.inf, -np.inf, -0.0]).astype(numpy_dtype(source))
        after = rounded(numbers, dtype).astype(np.float64)
        assert np.isnan(after[0]) and after[1:3].tolist() == [np.inf, -np.inf] and np.signbit(after[3])


@pytest.mark.parametrize("after", FLOATS)
@pytest.mark.parametrize("before", FLOATS)
@pytest.mark.parametrize("parts", [1, 3])
def test_values_and_slots_follow(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path, before: str, after: str, parts: int
) -> None:
    sample = make_sample("emb", value_dtype=before, rows=60, dim=5)
    scale = {"float64": 1e300, "float32": 1e38, "bfloat16": 1e38, "float16": 6e4}[before]
    sample.values[2] = np.array([scale, -scale, 1e-7, np.nan, np.inf]).astype(sample.values.dtype)
    tensors = table_tensors(sample, parts) | {"emb-init": sample.values[3:6]}
    if parts > 1:
        init = tensors.pop("emb-init")
        tensors |= {f"emb/part_{part}-init": init for part in range(parts)}
    path = save_plain(tmp_path / "a", tensors)
    account, costs = cast(open_checkpoint(path), tmp_path / "b", value_dtype=after)
    table = open_checkpoint(tmp_path / "b").table("emb")
    assert table.schema.value_dtype == after and {slot.dtype for slot in table.schema.slots} == {after}
    rows = {int(key): i for i, key in enumerate(sample.keys)}
    with np.errstate(over="ignore"):
        values = sample.values.astype(np.float64).astype(numpy_dtype(after))
        slots = {name: slot.astype(np.float64).astype(numpy_dtype(after)) for name, slot in sample.slots.items()}
    seen = 0
    for chunk in table.chunks(rows=7):
        at = [rows[int(key)] for key in chunk.keys]
        seen += len(at)
        np.testing.assert_array_equal(chunk.values.astype(np.float64), values[at].astype(np.float64))
        for name, slot in chunk.slots.items():
            np.testing.assert_array_equal(slot.astype(np.float64), slots[name][at].astype(np.float64))
        assert np.array_equal(chunk.freqs, sample.freqs[at])
    assert seen == len(sample.keys) == account.tables[0].rows_written
    assert table.extra("initial_values").dtype == numpy_dtype(after)
    if before == after:
        assert costs["emb"] == []
        return
    cost = costs["emb"][0]
    assert (cost.column, cost.was, cost.became) == ("values", before, after)
    exact, became = sample.values.astype(np.float64), values.astype(np.float64)
    finite = np.isfinite(exact) & np.isfinite(became)
    assert cost.max_error == pytest.approx(np.abs(exact[finite] - became[finite]).max(), rel=1e-6)
    assert cost.overflowed == np.count_nonzero(np.isfinite(exact) & np.isinf(became))
    assert cost.vanished == np.count_nonzero((exact != 0) & (became == 0))


def test_what_new_rows_begin_with_is_told_where_it_is_lost(tmp_path: Path) -> None:
    table = ArrayTable(
        "emb",
        np.arange(3),
        np.ones((3, 2), np.float32),
        slots={"acc": np.ones((3, 2), np.float32), "m": np.ones((3, 2), np.float32)},
        extras={"initial_values": np.float32([[1e6, 1e-9], [1, 0]])},
        metadata={
            "initializer": {"kind": "constant", "a": 1e-10},
            "slots": {"acc": {"init": "constant", "constant": 1e-10}, "m": {"init": "constant", "constant": 0.5}},
        },
    )
    source = tmp_path / "a"
    write_tables([table], str(source), "tfplugin")
    _, costs = cast(open_checkpoint(source), tmp_path / "b", value_dtype="float16")
    told = {cost.column: (cost.overflowed, cost.vanished) for cost in costs["emb"]}
    assert told == {
        "values": (0, 0),
        "slot acc": (0, 0),
        "slot m": (0, 0),
        "initial values": (1, 1),
        "initial values of slot acc": (0, 1),
    }
    _, costs = cast(open_checkpoint(source), tmp_path / "c", value_dtype="bfloat16")
    assert all(not cost.column.startswith("initial") for cost in costs["emb"]), "it has the range of float32"


@pytest.mark.parametrize("before", ["int64", "int32", "uint64"])
@pytest.mark.parametrize("after", ["int64", "int32", "uint64"])
def test_keys(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path, before: str, after: str
) -> None:
    sample = make_sample("emb", rows=40, key_dtype=before)
    limits = np.iinfo(after)
    outside = [int(key) for key in sample.keys if not limits.min <= int(key) <= limits.max]
    path = save_plain(tmp_path / "a", table_tensors(sample, 3))
    if outside:
        with pytest.raises(BadInputError, match=r"table 'emb': key -?\d+ does not fit") as error:
            cast(open_checkpoint(path), tmp_path / "b", key_dtype=after)
        assert any(f"key {key} " in str(error.value) for key in outside)
        assert not (tmp_path / "b.index").exists()
        inside = np.array([int(key) not in outside for key in sample.keys])
        sample.keys, sample.values, sample.slots = sample.keys[inside], sample.values[inside], {}
        sample.freqs, sample.versions = sample.freqs[inside], sample.versions[inside]
        path = save_plain(tmp_path / "a", table_tensors(sample, 3))
    cast(open_checkpoint(path), tmp_path / "b", key_dtype=after)
    table = open_checkpoint(tmp_path / "b").table("emb")
    assert table.schema.key_dtype == after
    for part in range(3):
        for chunk in table.chunks(part=part):
            assert all(int(key) % 3 == part for key in chunk.keys)
    assert sorted(table.all_keys().tolist()) == sorted(sample.keys.tolist())


def test_other_tables_stay_and_in_place(sample_path: Path) -> None:
    prefix = sample_path / "model.ckpt-7"
    cast(
        open_checkpoint(prefix),
        prefix,
        value_dtype="float16",
        tables=["user_emb"],
        options=WriteOptions(force=True),
    )
    tables = open_checkpoint(prefix).tables
    assert {name: table.schema.value_dtype for name, table in tables.items()} == {
        "ads/emb": "float32",
        "empty_emb": "float64",
        "user_emb": "float16",
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_account_tells_what_the_numbers_lost(tmp_path: Path, dtype: str) -> None:
    rows = np.float32([[1, 2], [65536.1, -1e5], [1e-10, 1e38]])
    write_tables([ArrayTable("even", np.arange(2), rows[:1].repeat(2, axis=0))], str(tmp_path / "exact"), "tfplugin")
    account, _ = cast(open_checkpoint(tmp_path / "exact"), tmp_path / "b", value_dtype=dtype)
    assert account.lossless, "these are as they were"
    write_tables([ArrayTable("emb", np.arange(3), rows)], str(tmp_path / "a"), "tfplugin")
    account, _ = cast(open_checkpoint(tmp_path / "a"), tmp_path / "c", value_dtype=dtype)
    after = np.concatenate([chunk.values for chunk in open_checkpoint(tmp_path / "c").table("emb").chunks()])
    infinite, zero = np.count_nonzero(np.isinf(after)), np.count_nonzero(after == 0)
    assert (infinite, zero) == ((3, 1) if dtype == "float16" else (0, 0))
    lost = [f"the exact numbers: they are rounded to {dtype}"]
    lost += ["3 numbers, which became infinite", "1 number, which became zero"] * (dtype == "float16")
    assert account.tables[0].losses == tuple(lost) and not account.lossless
    account, *_ = cast_rows(open_checkpoint(tmp_path / "a"), tmp_path / "d", "bfloat16")
    assert account.tables[0].losses == ("the exact numbers: they are rounded to bfloat16",)


def test_a_whole_number_that_does_not_fit_is_named(tmp_path: Path) -> None:
    values = np.array([[1, 2], [3, -300], [500, 7]], np.int32)
    write_tables([ArrayTable("emb", np.array([5, -7, 9]), values)], str(tmp_path / "a"), "tfplugin")
    with pytest.raises(BadInputError, match=r"table 'emb': values of key -7: -300 does not fit int8, expected -128 to"):
        cast(open_checkpoint(tmp_path / "a"), tmp_path / "b", value_dtype="int8")
    assert [file.name for file in tmp_path.glob("b*")] == []


@pytest.mark.parametrize("dtype", ["int8", "int64", "float16", "bfloat16", "float32"])
def test_bool_rows_are_0_and_1(tmp_path: Path, dtype: str) -> None:
    """As the error of a dialect that has no bool advises."""
    values = np.array([[True, False], [False, True]])
    write_tables([ArrayTable("emb", np.array([5, -7]), values)], str(tmp_path / "a"), "tfplugin")
    account, _ = cast(open_checkpoint(tmp_path / "a"), tmp_path / "b", value_dtype=dtype)
    chunk = open_checkpoint(tmp_path / "b").table("emb").to_numpy()
    assert account.lossless and chunk.values.dtype.name == dtype
    assert chunk.values.tolist() == [[1, 0], [0, 1]]


def test_a_part_that_is_read_twice_counts_once(sample_path: Path) -> None:
    table = CastTable(open_checkpoint(sample_path).table("ads/emb"), value_dtype="float16")
    values = []
    for _ in range(2):
        values.append(np.concatenate([chunk.values for chunk in table.chunks(rows=2)]))
    assert table.cost[0].overflowed == 0 and np.array_equal(*values)
    assert np.array_equal(table.take(np.arange(11)).values, values[0])


def test_refused(sample_path: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(sample_path)
    for options, message in (
        ({}, "nothing says to which type"),
        ({"value_dtype": "float8"}, "got type 'float8' for values, expected one of float64"),
        ({"value_dtype": "int8"}, "which is no cast"),
        ({"key_dtype": "float32"}, "got key type 'float32', expected int64"),
    ):
        with pytest.raises(UsageError, match=message):
            cast(checkpoint, tmp_path / "b", **options)
    with pytest.raises(BadInputError, match=r"slot Adam\.m is float32, expected float16.*--to hdf5"):
        cast(checkpoint, tmp_path / "b", value_dtype="float16", slot_dtype="float32")
    cast(checkpoint, tmp_path / "two.h5", value_dtype="float16", slot_dtype="float32", to="hdf5")
    assert list(tmp_path.glob("b*")) == []
