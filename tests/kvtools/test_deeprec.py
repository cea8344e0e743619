"""The dialect of DeepRec."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools.array_table import table_from_arrays
from kvtools.dialects.bundle import Bundle
from kvtools.dialects.chunk import ALL_COLUMNS
from kvtools.dialects.deeprec import BucketShard
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.merge import merge
from kvtools.migrate import write_tables
from kvtools.partition import owners
from kvtools.repair import repair
from kvtools.row_mask import RowMask
from kvtools.table_view import MaskedTable

Make = Callable[..., Any]
Save = Callable[..., Path]
Tensors = dict[str, np.ndarray]

SAMPLE = Path(__file__).parents[1] / "data" / "deeprec"
NINE = {
    "keys",
    "values",
    "freqs",
    "versions",
    "keys_filtered",
    "freqs_filtered",
    "versions_filtered",
    "partition_offset",
    "partition_filter_offset",
}


def offsets_of(keys: np.ndarray) -> np.ndarray:
    return np.append(0, np.cumsum(np.bincount(keys % 1000, minlength=1000))).astype(np.int32)


def variable(
    name: str,
    keys: list[int],
    *,
    dim: int = 4,
    factor: float = 1.0,
    filtered: list[int] | None = None,
    counters: bool = True,
    key_dtype: str = "int64",
) -> Tensors:
    """The tensors of one variable as DeepRec saves it; frequencies and versions are made from the keys."""
    stored = np.array(sorted(keys, key=lambda key: key % 1000), key_dtype)
    seen = np.array(sorted(filtered or [], key=lambda key: key % 1000), key_dtype)
    none = np.empty(0, np.int64)
    tensors = {
        "keys": stored,
        "values": rows_of(stored, dim, factor),
        "freqs": freqs_of(stored) if counters else none,
        "versions": versions_of(stored) if counters else none,
        "keys_filtered": seen,
        "freqs_filtered": freqs_of(seen),
        "versions_filtered": versions_of(seen) if counters else none,
        "partition_offset": offsets_of(stored),
        "partition_filter_offset": offsets_of(seen),
    }
    return {f"{name}-{suffix}": array for suffix, array in tensors.items()}


def freqs_of(keys: np.ndarray) -> np.ndarray:
    return (keys & 255).astype(np.int64)


def versions_of(keys: np.ndarray) -> np.ndarray:
    return (keys & 1023).astype(np.int64) * 7


def rows_of(keys: np.ndarray, dim: int = 4, factor: float = 1.0) -> np.ndarray:
    return (factor * (keys.astype(np.float64) % 97)[:, None] + np.arange(dim)).astype(np.float32)


def only_table(path: Path, **options: Any) -> TableReader:
    checkpoint = open_checkpoint(path, OpenOptions(**options))
    assert checkpoint.dialect == "deeprec"
    (table,) = checkpoint.tables.values()
    return table


def tensors_of(path: Path) -> Tensors:
    bundle = Bundle(path)
    return {name: bundle.tensor(name).read() for name in bundle.entries}


def check_buckets(tensors: Tensors, name: str, keys: str = "keys", offset: str = "partition_offset") -> None:
    """What DeepRec's restore takes for granted."""
    stored, offsets = tensors[f"{name}-{keys}"], tensors[f"{name}-{offset}"]
    assert (offsets.dtype, offsets.shape) == (np.int32, (1001,))
    assert (offsets[0], offsets[-1]) == (0, len(stored))
    for bucket in range(1000):
        assert (stored[offsets[bucket] : offsets[bucket + 1]] % 1000 == bucket).all()


def test_sample_in_the_published_layout() -> None:
    expected = np.load(SAMPLE / "expected.npz")
    order = np.argsort(expected["keys"])
    table = only_table(SAMPLE)
    schema = table.schema
    assert (schema.name, schema.part_rows, schema.dim) == ("user_id_embedding", (293, 307), 16)
    assert [(slot.name, slot.width, slot.dtype) for slot in schema.slots] == [("Adagrad", 16, "float32")]
    assert (schema.freq_dtype, schema.version_dtype, schema.version_unit) == ("int64", "int64", "steps")
    assert (schema.partition, schema.extras) == ("mod_1000", ())
    chunks = list(table.chunks(rows=7))
    keys = np.concatenate([chunk.keys for chunk in chunks])
    back = np.argsort(keys)
    np.testing.assert_array_equal(keys[back], expected["keys"][order])
    for name in ("values", "freqs", "versions"):
        column = np.concatenate([getattr(chunk, name) for chunk in chunks])
        np.testing.assert_array_equal(column[back], expected[name][order])
    raw = tensors_of(SAMPLE / "model.ckpt-1200")
    slots = np.concatenate([chunk.slots["Adagrad"] for chunk in chunks])
    np.testing.assert_array_equal(
        slots, np.concatenate([raw[f"user_id_embedding/part_{part}/Adagrad-values"] for part in range(2)])
    )
    for chunk in chunks:
        np.testing.assert_array_equal(owners(chunk.keys, 2, "mod_1000"), chunk.part)
    assert list(table.check()) == []


def test_sample_written_again_has_the_same_tensors(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(SAMPLE)
    account = write_tables(list(checkpoint.tables.values()), tmp_path / "out", "deeprec", beside=checkpoint)
    assert account.lossless
    before, after = tensors_of(SAMPLE / "model.ckpt-1200"), tensors_of(tmp_path / "out")
    assert set(before) == set(after)
    for name in before:
        assert before[name].dtype == after[name].dtype
        np.testing.assert_array_equal(before[name], after[name], err_msg=name)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("key_dtype", ["int64", "int32"])
@pytest.mark.parametrize("value_dtype", ["float32", "float16", "bfloat16", "float64"])
def test_dtypes_and_parts(
    make_table: Make, same_rows: Make, tmp_path: Path, parts: int, key_dtype: str, value_dtype: str
) -> None:
    table = make_table(
        rows=300, key_dtype=key_dtype, value_dtype=value_dtype, freq_dtype="int64", version_dtype="int64"
    )
    write_tables([table], tmp_path / "out", "deeprec", parts=parts)
    same_rows(only_table(tmp_path / "out"), table, rows=7, any_order=True)


KEYS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9), unique=True, max_size=40)


@settings(max_examples=40, deadline=None)
@given(KEYS, st.integers(1, 7), st.booleans(), st.booleans(), st.booleans(), st.integers(0, 2**32))
def test_round_trip(
    tmp_path_factory: pytest.TempPathFactory,
    make_table: Make,
    same_rows: Make,
    keys: list[int],
    parts: int,
    freqs: bool,
    versions: bool,
    slots: bool,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("round")
    table = make_table(
        own_keys=np.array(keys, np.int64),
        rows=len(keys),
        slots=("Adam", "Adam_1") if slots else (),
        freq_dtype="int64" if freqs else None,
        version_dtype="int64" if versions else None,
        seed=seed,
    )
    assert write_tables([table], folder / "out", "deeprec", parts=parts).lossless
    got = only_table(folder / "out")
    assert got.schema.parts == parts
    assert {finding.check for finding in got.check()} == ({"negative-keys"} if min(keys, default=0) < 0 else set())
    if keys:
        same_rows(got, table, any_order=True)
    assert got.schema.rows == len(keys)


@pytest.mark.parametrize("memory", [1, 100_000, 1 << 30])
@pytest.mark.parametrize("parts", [1, 3, 70])
def test_rows_stand_in_buckets_whatever_the_buffer(
    make_table: Make, same_rows: Make, tmp_path: Path, parts: int, memory: int
) -> None:
    rows = 100 if memory == 1 else 5000
    table = make_table(rows=rows, freq_dtype="int64", slots=("Adam", "Adam_1"), parts=4)
    write_tables([table], tmp_path / "out", "deeprec", parts=parts, options=WriteOptions(memory=memory))
    tensors = tensors_of(tmp_path / "out")
    for part in range(parts):
        name = "scope/emb" if parts == 1 else f"scope/emb/part_{part}"
        for slot in ("", "/Adam", "/Adam_1"):
            check_buckets(tensors, name + slot)
            np.testing.assert_array_equal(tensors[f"{name}{slot}-keys"], tensors[f"{name}-keys"])
            np.testing.assert_array_equal(tensors[f"{name}{slot}-freqs"], tensors[f"{name}-freqs"])
        np.testing.assert_array_equal(owners(tensors[f"{name}-keys"], parts, "mod_1000"), part)
    same_rows(only_table(tmp_path / "out"), table, any_order=True)


def test_rows_of_a_bucket_keep_their_order(make_table: Make, tmp_path: Path) -> None:
    table = make_table(own_keys=np.random.default_rng(0).permutation(600) * 1000 + 7, rows=600, slots=())
    write_tables([table], tmp_path / "out", "deeprec")
    np.testing.assert_array_equal(tensors_of(tmp_path / "out")["scope/emb-keys"], table.keys)


def test_tensors_that_a_restore_asks_for(make_table: Make, tmp_path: Path) -> None:
    write_tables([make_table(slots=("Adam",))], tmp_path / "out", "deeprec", parts=2)
    tensors = tensors_of(tmp_path / "out")
    names = [f"scope/emb/part_{part}{slot}" for part in range(2) for slot in ("", "/Adam")]
    assert set(tensors) == {f"{name}-{suffix}" for name in names for suffix in NINE}
    for name in names:
        for counter in ("freqs", "versions", "freqs_filtered", "versions_filtered"):
            assert (tensors[f"{name}-{counter}"].dtype, tensors[f"{name}-{counter}"].shape) == (np.int64, (0,))
        assert tensors[f"{name}-keys_filtered"].dtype == np.int64


@pytest.mark.parametrize("parts", [1, 3])
def test_tensorflow_reads_what_was_written(tf: Any, make_table: Make, tmp_path: Path, parts: int) -> None:
    table = make_table(slots=("Adam",), freq_dtype="int64")
    write_tables([table], tmp_path / "out", "deeprec", parts=parts)
    reader = tf.train.load_checkpoint(str(tmp_path / "out"))
    ours = tensors_of(tmp_path / "out")
    assert set(reader.get_variable_to_shape_map()) == set(ours)
    for name, array in ours.items():
        np.testing.assert_array_equal(reader.get_tensor(name), array)


def test_filtered_keys_go_to_their_parts_and_buckets(save_plain: Save, tmp_path: Path) -> None:
    seen = [[2, 2004, 4, 1004], [1, 5, 3001]]
    tensors = variable("emb/part_0", [6, 8], filtered=seen[0]) | variable("emb/part_1", [7], filtered=seen[1])
    for part in range(2):
        tensors |= variable(f"emb/part_{part}/Adam", [[6, 8], [7]][part], filtered=seen[part])
    table = only_table(save_plain(tmp_path / "a", tensors))
    assert [(extra.name, extra.dtype, extra.shape) for extra in table.schema.extras] == [
        ("filtered_keys", "int64", (7,)),
        ("filtered_freqs", "int64", (7,)),
        ("filtered_versions", "int64", (7,)),
    ]
    keys = table.extra("filtered_keys")
    assert sorted(keys.tolist()) == sorted([*seen[0], *seen[1]])
    np.testing.assert_array_equal(table.extra("filtered_freqs"), freqs_of(keys))
    write_tables([table], tmp_path / "out", "deeprec", parts=3)
    after = tensors_of(tmp_path / "out")
    together = []
    for part in range(3):
        for slot in ("", "/Adam"):
            name = f"emb/part_{part}{slot}"
            check_buckets(after, name, "keys_filtered", "partition_filter_offset")
            there = after[f"{name}-keys_filtered"]
            np.testing.assert_array_equal(owners(there, 3, "mod_1000"), part)
            np.testing.assert_array_equal(after[f"{name}-freqs_filtered"], freqs_of(there))
            np.testing.assert_array_equal(after[f"{name}-versions_filtered"], versions_of(there))
        together += there.tolist()
    assert sorted(together) == sorted(keys.tolist())
    assert list(only_table(tmp_path / "out").check()) == []


def test_counters_that_were_not_kept_are_none(save_plain: Save, tmp_path: Path) -> None:
    tensors = variable("emb", [6, 8], filtered=[1], counters=False)
    table = only_table(save_plain(tmp_path / "a", tensors))
    assert (table.schema.freq_dtype, table.schema.version_dtype) == (None, None)
    assert [extra.name for extra in table.schema.extras] == ["filtered_keys", "filtered_freqs"]
    (chunk,) = table.chunks()
    assert (chunk.freqs, chunk.versions) == (None, None)


def increment(name: str, keys: list[int]) -> Tensors:
    full = variable(name, keys)
    named = {
        "keys": "sparse_incr_keys",
        "values": "sparse_incr_values",
        "freqs": "sparse_incr_freqs",
        "versions": "sparse_incr_versions",
        "partition_offset": "incr_partition_offset",
    }
    return {f"{name}-{new}": full[f"{name}-{old}"] for old, new in named.items()}


def test_increment(save_plain: Save, tmp_path: Path) -> None:
    tensors = increment("emb/part_0", [6, 8]) | increment("emb/part_0/Adam", [6, 8])
    tensors |= increment("emb/part_1", [7]) | increment("emb/part_1/Adam", [7])
    rows = {"w-sparse_incr_keys": np.array([3]), "w-sparse_incr_values": np.zeros((1, 2), np.float32)}
    checkpoint = open_checkpoint(save_plain(tmp_path / "a", tensors | rows))
    assert checkpoint.dialect == "deeprec"
    assert [variable.name for variable in checkpoint.variables] == sorted(rows)
    table = checkpoint.table("emb")
    assert (table.schema.part_rows, table.slots, table.schema.metadata) == ((2, 1), ("Adam",), {"increment": True})
    assert list(table.check()) == []
    account = write_tables([table], tmp_path / "out", "deeprec", beside=checkpoint)
    assert account.lossless
    after = tensors_of(tmp_path / "out")
    assert set(after) == set(tensors | rows)
    for name, array in tensors.items():
        np.testing.assert_array_equal(after[name], array, err_msg=name)


def test_saved_before_there_were_buckets(save_plain: Save, tmp_path: Path) -> None:
    tensors = {
        name: array
        for name, array in variable("emb", [6, 1008, 8]).items()
        if name.split("-")[1] in ("keys", "values", "versions")
    }
    table = only_table(save_plain(tmp_path / "a", tensors))
    assert (table.schema.rows, table.schema.freq_dtype, table.schema.version_dtype) == (3, None, "int64")
    assert any("no buckets" in note for note in table.schema.notes)
    assert list(table.check()) == []


def test_slot_keys_that_differ_are_errors(save_plain: Save, tmp_path: Path) -> None:
    """Saved while other workers trained, w, m and v have the keys of three moments; DeepRec's restore leaves the
    memory of the slots that are not there as it is."""
    tensors = variable("emb/part_0", [2, 4]) | variable("emb/part_0/Adam", [2, 4, 6])
    tensors |= variable("emb/part_0/Adam_1", [4, 6, 8])
    table = only_table(save_plain(tmp_path / "a", tensors))
    findings = list(table.check())
    assert [(finding.severity, finding.check) for finding in findings] == [("error", "slot-keys")] * 3
    assert "slot Adam has 1 rows whose keys the table has not" in findings[0].message
    assert "slot Adam_1 has no row for 1 of 2 keys (2)" in findings[1].message
    (chunk,) = table.chunks()
    np.testing.assert_array_equal(chunk.slots["Adam"], rows_of(np.array([2, 4])))
    np.testing.assert_array_equal(chunk.slots["Adam_1"], [[0, 0, 0, 0], rows_of(np.array([4]))[0]])
    for read_by_key in (False, True):
        table = only_table(tmp_path / "a")
        if read_by_key:
            table.take(np.arange(2), ALL_COLUMNS)
        account = write_tables([table], tmp_path / "mended", "deeprec", options=WriteOptions(force=True))
        (said,) = account.tables
        surplus = "rows whose keys the table has not, or has twice"
        assert said.losses == (f"slot Adam has 1 {surplus}", f"slot Adam_1 has 2 {surplus}")
        assert said.changes == ("slot Adam_1 has no row for 1 of 2 keys (2); they became zeros",)
        assert not account.lossless
        mended = only_table(tmp_path / "mended")
        assert list(mended.check()) == []
        np.testing.assert_array_equal(mended.to_numpy().slots["Adam_1"][mended.all_keys() == 2], [[0, 0, 0, 0]])
        assert write_tables([mended], tmp_path / "again", "deeprec", options=WriteOptions(force=True)).lossless


def test_slots_that_are_not_written_are_not_matched(save_plain: Save, tmp_path: Path) -> None:
    tensors = variable("emb/part_0", [2, 4]) | variable("emb/part_0/Adam", [4, 6])
    table = only_table(save_plain(tmp_path / "a", tensors))
    (said,) = write_tables([table], tmp_path / "out", "snapshot").tables
    assert not any("rows whose keys" in line for line in (*said.losses, *said.changes))
    assert any("optimizer slots" in line for line in said.losses)


def test_slot_keys_of_a_clipped_and_of_a_merged_table(save_plain: Save, tmp_path: Path) -> None:
    tensors = variable("emb/part_0", [2, 4]) | variable("emb/part_0/Adam", [2, 4, 6])
    first = open_checkpoint(save_plain(tmp_path / "a", tensors))
    second = open_checkpoint(save_plain(tmp_path / "b", variable("emb/part_0", [8]) | variable("emb/part_0/Adam", [8])))
    surplus = "slot Adam has 1 rows whose keys the table has not, or has twice"
    mask = RowMask((2,), memory=1 << 20)
    mask.put(0, 0, np.array([True, False]))
    clipped = write_tables([MaskedTable(first.table("emb"), mask)], tmp_path / "clipped", "deeprec")
    assert surplus in clipped.tables[0].losses
    merged, _ = merge([first, second], tmp_path / "merged", to="deeprec")
    (line,) = [line for line in merged.tables[0].losses if surplus in line]
    assert str(tmp_path / "a") in line
    (mended,) = repair(first, tmp_path / "repaired").account.tables
    assert not any(surplus in line for line in mended.losses)


def lie(**arrays: Any) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.update({f"emb/part_1-{suffix}": array for suffix, array in arrays.items()})


GOOD = offsets_of(np.array([1, 3]))


@pytest.mark.parametrize(
    ("change", "check", "message"),
    [
        (lie(partition_offset=GOOD + 1), "partition-offset", "begins with 1, expected 0"),
        (lie(partition_offset=np.minimum(GOOD, 1)), "partition-offset", "ends with 1, expected 2"),
        (
            lie(partition_offset=np.where(np.arange(1001) == 500, 0, GOOD).astype(np.int32)),
            "partition-offset",
            "falls from 2 to 0 at bucket 499",
        ),
        (lie(partition_offset=offsets_of(np.array([1, 5]))), "wrong-bucket", r"1 keys of 'emb/part_1-keys' \(3\)"),
        (lie(keys=np.array([3, 1])), "wrong-bucket", r"2 keys of 'emb/part_1-keys' \(3, 1\)"),
        (lie(partition_filter_offset=GOOD), "partition-offset", "ends with 2, expected 0"),
    ],
)
def test_offsets_that_lie_are_errors(
    save_plain: Save, tmp_path: Path, change: Callable[[Tensors], Any], check: str, message: str
) -> None:
    tensors = variable("emb/part_0", [0, 2]) | variable("emb/part_1", [1, 3])
    change(tensors)
    table = only_table(save_plain(tmp_path / "a", tensors))
    (finding,) = table.check()
    assert (finding.severity, finding.check, finding.table) == ("error", check, "emb")
    assert re.search(message, finding.message)
    _, second = table.chunks()
    assert sorted(second.keys.tolist()) == [1, 3]


def test_offsets_of_a_slot_are_checked(save_plain: Save, tmp_path: Path) -> None:
    tensors = variable("emb/part_0", [0, 2]) | variable("emb/part_0/Adam", [0, 2])
    tensors["emb/part_0/Adam-partition_offset"] = GOOD
    (finding,) = only_table(save_plain(tmp_path / "a", tensors)).check()
    assert "'emb/part_0/Adam-keys'" in finding.message


def test_keys_below_zero_are_a_warning(save_plain: Save, tmp_path: Path) -> None:
    (finding,) = only_table(save_plain(tmp_path / "a", variable("emb", [-1000, 5]))).check()
    assert (finding.severity, finding.check) == ("warning", "negative-keys")


def test_rows_on_the_ssd_tier_are_an_error(save_plain: Save, tmp_path: Path) -> None:
    path = save_plain(tmp_path / "a", variable("scope/emb/part_0", [5]))
    Path(f"{path}-scope_emb_part_0-ssd_record.index").write_bytes(b"")
    table = only_table(path)
    (finding,) = table.check()
    assert (finding.severity, finding.check) == ("error", "ssd-tier")
    assert any("SSD" in note for note in table.schema.notes)


def broken() -> Tensors:
    tensors: Tensors = {}
    for part in range(3):
        tensors |= variable(f"emb/part_{part}", [part, part + 3]) | variable(f"emb/part_{part}/Adam", [part, part + 3])
    return tensors


def without(prefix: str) -> Callable[[Tensors], Any]:
    def change(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.startswith(prefix)]:
            del tensors[name]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("emb/part_1-"), "part 1 is missing"),
        (without("emb/part_1/Adam-"), "part 1 lacks slot 'Adam'"),
        (without("emb/part_1-freqs"), "part 1 has no freqs, other parts have"),
        (lie(versions=np.empty(0, np.int64)), "part 1 has no versions, other parts have"),
        (lie(freqs=np.zeros(3, np.int64)), r"shape \[3\], expected \[2\]"),
        (lie(freqs=np.zeros(2, np.int32)), "of type int32, expected int64"),
        (lie(values=np.zeros((1, 4), np.float32)), r"shape \[1, 4\], expected \[2, any\]"),
        (lie(values=np.zeros((2, 5), np.float32)), r"rows of \[5\] in part 1"),
        (lie(values=np.zeros((2, 4), np.int64)), "of type int64"),
        (lie(values=np.zeros(2, np.float32)), r"shape \[2\]"),
        (lie(keys=np.zeros(2, np.uint64)), "of type uint64"),
        (lie(keys=np.zeros(2, np.int32), keys_filtered=np.zeros(0, np.int32)), "int32 keys"),
        (lie(partition_offset=np.zeros(1000, np.int32)), r"shape \[1000\], expected \[1001\]"),
        (lie(partition_offset=np.zeros(1001, np.int64)), "of type int64, expected int32"),
        (
            lie(keys_filtered=np.zeros(2, np.int64), freqs_filtered=np.zeros(1, np.int64)),
            r"shape \[1\], expected \[2\]",
        ),
        (lambda tensors: tensors.update(variable("emb", [7])), "with parts and without"),
    ],
)
def test_broken_checkpoints_are_named(
    save_plain: Save, tmp_path: Path, change: Callable[[Tensors], Any], message: str
) -> None:
    tensors = broken()
    change(tensors)
    path = save_plain(tmp_path / "a", tensors | variable("good", [1]))
    with pytest.raises(BadInputError, match=message) as caught:
        open_checkpoint(path)
    assert "emb" in str(caught.value)
    checkpoint = open_checkpoint(path, OpenOptions(lenient=True))
    assert set(checkpoint.tables) <= {"good", "emb"}
    assert "good" in checkpoint.tables
    assert "emb" in checkpoint.broken


def test_damaged_rows_are_told(save_plain: Save, tmp_path: Path) -> None:
    tensors = variable("emb/part_0", [2, 4, 6]) | variable("emb/part_0/Adam", [2, 4, 6], factor=2)
    path = save_plain(tmp_path / "a", tensors)
    data = Path(f"{path}.data-00000-of-00001")
    content = bytearray(data.read_bytes())
    content[bytes(content).index(tensors["emb/part_0/Adam-values"].tobytes())] ^= 1
    data.write_bytes(content)
    with pytest.raises(CorruptFileError, match="emb/part_0/Adam-values"):
        list(only_table(path).chunks())


def test_wide_slots_and_uint64_keys_are_named(make_table: Make, tmp_path: Path) -> None:
    table = make_table(slots=("GroupAdam",), slot_width=12)
    account = write_tables([table], tmp_path / "wide", "deeprec")
    assert "12 wide" in account.tables[0].losses[0]
    with pytest.raises(BadInputError, match="does not fit int64"):
        write_tables([make_table(key_dtype="uint64")], tmp_path / "uint64", "deeprec")
    assert not list(tmp_path.glob("uint64*"))


def test_source_that_changes_while_it_is_read_is_refused(make_table: Make, tmp_path: Path) -> None:
    table = make_table(own_keys=np.arange(20), rows=20, slots=())
    real, calls = table.read_part, []

    def changing(*args: Any) -> Any:
        calls.append(args)
        for chunk in real(*args):
            yield type(chunk)(chunk.keys + len(calls), chunk.values)

    table.read_part = changing
    with pytest.raises(BadInputError, match="changed while it was read"):
        write_tables([table], tmp_path / "out", "deeprec")
    assert not list(tmp_path.iterdir())


def test_a_shard_holds_nothing_of_parts_that_are_not_its_own(tmp_path: Path) -> None:
    """A table of a thousand parts is written in as many shards: time and memory would grow with their square."""
    starts = np.zeros((300, 1001), np.int64)
    tracemalloc.start()
    try:
        shards = [BucketShard("emb", str(tmp_path / "data"), {}, starts, 1 << 20) for _ in range(50)]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1 << 20 and len(shards) == 50  # of one part: 8 KB each


def test_memory_does_not_grow_with_the_table(make_table: Make, save_plain: Save, tmp_path: Path) -> None:
    rows, rng = 500_000, np.random.default_rng(0)
    keys = rng.permutation(rows)
    tensors = {f"emb/part_0-{name}": array for name, array in of_keys(keys, 1).items()}
    tensors |= {f"emb/part_0/Adam-{name}": array for name, array in of_keys(rng.permutation(rows), 2).items()}
    path = save_plain(tmp_path / "a", tensors)
    size = sum(array.nbytes for array in tensors.values())
    del tensors
    tracemalloc.start()
    try:
        table = only_table(path, memory=1 << 20)
        tracemalloc.reset_peak()
        write_tables([table], tmp_path / "out", "deeprec", parts=2, options=WriteOptions(memory=1 << 20), workers=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20 < size / 1.5
    got = only_table(tmp_path / "out")
    for chunk in got.chunks():
        np.testing.assert_array_equal(chunk.slots["Adam"], rows_of(chunk.keys, 8, 2))
    assert list(got.check()) == []


def of_keys(keys: np.ndarray, factor: float) -> Tensors:
    order = np.argsort(keys % 1000, kind="stable")
    none = np.empty(0, np.int64)
    return {
        "keys": keys[order],
        "values": rows_of(keys[order], 8, factor),
        "freqs": none,
        "versions": none,
        "partition_offset": offsets_of(keys),
    }


def test_a_table_may_have_a_name_that_no_file_has(tmp_path: Path) -> None:
    name = "n" * 300
    write_tables([table_from_arrays(name, [1, 2], np.ones((2, 3), np.float32))], tmp_path / "m", "deeprec")
    assert list(open_checkpoint(tmp_path / "m").tables) == [name]
