"""What is wrong with a checkpoint, one fault at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import kvtools
from kvtools.dialects.bundle import BundleWriter
from kvtools.dialects.bundle.index_table import read_table, table_bytes
from kvtools.dialects.bundle.reader import Bundle
from kvtools.dialects.bundle.records import decode_entry, encode_entry
from kvtools.dialects.chunk import KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, Finding, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import SlotSchema, TableSchema
from kvtools.errors import BadInputError, UnknownTableError
from kvtools.verify import check, verify


class ArrayTable(TableReader):
    """A table of plain arrays in parts."""

    def __init__(self, parts: list[Chunk], **schema: Any) -> None:
        first = parts[0]
        assert first.values is not None
        self.part_chunks = parts
        self.findings: list[Finding] = []
        self.schema = TableSchema(
            "emb",
            "arrays",
            first.keys.dtype.name,
            first.values.dtype.name,
            first.values.shape[1],
            tuple(len(part) for part in parts),
            tuple(SlotSchema(name, rows.shape[1], rows.dtype.name) for name, rows in first.slots.items()),
            None if first.freqs is None else first.freqs.dtype.name,
            **schema,
        )

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        whole = self.part_chunks[part]
        for start in range(0, len(whole), rows):
            chunk = whole.take(slice(start, start + rows))
            yield dataclasses.replace(
                chunk,
                values=chunk.values if columns.values else None,
                slots=chunk.slots if columns.slots else {},
                freqs=chunk.freqs if columns.freqs else None,
                part=part,
            )

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        raise NotImplementedError

    def check(self) -> Iterator[Finding]:
        yield from self.findings


def part(keys: Any, values: Any = None, **columns: Any) -> Chunk:
    keys = np.asarray(keys)
    return Chunk(keys, np.ones((len(keys), 2), np.float32) if values is None else np.asarray(values), **columns)


def found(*tables: TableReader, memory: int = 1 << 30) -> list[tuple[str, str, str]]:
    checkpoint = Checkpoint(Path("a"), "arrays", {str(number): table for number, table in enumerate(tables)})
    return [(f.severity, f.check, f.message) for f in check(checkpoint, memory=memory).findings]


def test_sound_checkpoint(sample_path: Path) -> None:
    result = verify(str(sample_path))
    assert result.findings == ()
    assert [(table.name, table.rows, table.parts) for table in result.tables] == [
        ("ads/emb", 11, 3),
        ("empty_emb", 0, 1),
        ("user_emb", 5, 1),
    ]
    assert (result.variables, result.dialect, result.count("error")) == (2, "tfplugin", 0)
    assert result.checks > sum(table.checks for table in result.tables) > 20


@pytest.mark.parametrize("key_dtype", [np.int32, np.int64, np.uint64])
def test_every_key_is_legal(key_dtype: Any) -> None:
    limits = np.iinfo(key_dtype)
    assert found(ArrayTable([part(np.array(sorted({int(limits.min), int(limits.max), 0, 1}), key_dtype))])) == []


@pytest.mark.parametrize("memory", [1 << 30, 1 << 12])
@pytest.mark.parametrize("key_dtype", [np.int64, np.uint64])
def test_keys_that_wait_and_have_a_row(key_dtype: Any, memory: int) -> None:
    keys = np.random.default_rng(1).permutation(5000).astype(key_dtype)

    def findings(waiting: list[int]) -> list[tuple[str, str, str]]:
        extras = {
            "filtered_keys": np.array(waiting, key_dtype),
            "filtered_freqs": np.ones(len(waiting), np.uint32),
        }
        values = np.ones((len(keys), 2), np.float32)
        return found(kvtools.table_from_arrays("emb", keys, values, parts=2, extras=extras), memory=memory)

    assert findings([5000, 6000]) == findings([]) == []
    (one,) = findings([5000, 17, 6000])
    assert one == (
        "warning",
        "waiting-keys",
        "1 key waits for admission and has a row (key 17); a restore drops these counts",
    )
    (several,) = findings([4999, 7, 5001, 17, 3, 2, 0])
    assert several[2].startswith("6 keys wait for admission and have a row (keys 0, 2, 3, 7, 17, ...)")


@pytest.mark.parametrize("memory", [1 << 30, 1 << 12])
def test_keys_that_stand_twice(memory: int) -> None:
    keys = np.arange(5000)
    keys[[100, 4000, 4999]] = [7, 7, -1]
    keys[0] = -1
    (finding,) = found(ArrayTable([part(keys[:3000]), part(keys[3000:])], partition=None), memory=memory)[:1]
    assert finding[:2] == ("error", "duplicate-keys")
    assert finding[2].startswith("3 rows repeat a key of an earlier row (keys -1, 7);")


def test_keys_in_the_wrong_part() -> None:
    table = ArrayTable([part([0, 3, -3, 5]), part([1, -2]), part([2, 4, -1])], partition="floor_mod")
    assert found(table) == [
        (
            "error",
            "misplaced-keys",
            "2 rows (keys 5, 4) in another part than floor_mod of 3 parts says, where lookups do not look: write the"
            " table again, see `kvtools reshard`",
        )
    ]


def test_no_rule_for_parts_is_told() -> None:
    assert [finding[:2] for finding in found(ArrayTable([part([1]), part([2])], partition=None))] == [
        ("info", "partition")
    ]
    assert found(ArrayTable([part([1, 2])], partition=None)) == []


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite(dtype: Any, bad: float) -> None:
    values = np.ones((9, 3), dtype)
    values[[2, 5], [0, 2]] = bad
    slot = np.ones((9, 1), dtype)
    slot[8] = bad
    messages = found(ArrayTable([part(np.arange(9) * 10, values, slots={"Adam.m": slot})]))
    assert [message[:2] for message in messages] == [("error", "non-finite")] * 2
    assert messages[0][2].startswith("slot Adam.m: NaN or infinity in 1 row (key 80);")
    assert messages[1][2].startswith("values: NaN or infinity in 2 rows (keys 20, 50);")


def test_largest_and_smallest_finite_numbers_are_no_fault() -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        limits = ml_dtypes.finfo(dtype)
        row = np.array([limits.max, limits.min, limits.tiny, -limits.tiny, 0.0, -0.0], dtype)
        assert found(ArrayTable([part([1, 2], np.stack([row, row]))])) == []
    assert found(ArrayTable([part([1], np.array([[127, -128]], np.int8))])) == []


def test_denormal_numbers_are_told() -> None:
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        small = np.array([[0, 1], [-ml_dtypes.finfo(dtype).smallest_subnormal, 0]], dtype)
        (finding,) = found(ArrayTable([part([4, 5], small)]))
        assert finding[:2] == ("info", "denormal") and finding[2].endswith("in 1 row (key 5)")


def test_first_keys_are_named_and_the_others_counted() -> None:
    values = np.full((100_000, 8), np.nan, np.float32)
    (finding,) = found(ArrayTable([part(np.arange(100_000), values)]))
    assert finding[2].startswith("values: NaN or infinity in 100,000 rows (keys 0, 1, 2, 3, 4, ...);")


def test_negative_squares_and_counts() -> None:
    ones = np.ones((2, 2), np.float32)
    slots = {"Adam.m": -ones, "Adam.v": np.array([[1, 1], [1, -1]], np.float32), "Momentum.accumulator": -ones}
    messages = found(ArrayTable([part([1, 2], ones, slots=slots, freqs=np.array([-3, 3]))]))
    assert [message[:2] for message in messages] == [("warning", "negative-freqs"), ("warning", "negative-slot")]
    assert "slot Adam.v" in messages[1][2] and "(key 2)" in messages[1][2]


@pytest.mark.filterwarnings("error")  # NumPy's are printed among what the command says
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_a_nan_hides_no_negative_square(dtype: type) -> None:
    slot = np.ones((600, 2), dtype)
    slot[[7, 9, 500], 1] = -1, np.nan, -np.inf
    messages = found(ArrayTable([part(np.arange(600), np.ones((600, 2), dtype), slots={"Adam.v": slot})]))
    assert [message[1] for message in messages] == ["non-finite", "negative-slot"]
    assert "in 2 rows (keys 7, 500)" in messages[1][2]


def test_rows_that_are_not_those_of_the_index() -> None:
    table = ArrayTable([part([1, 2])])
    table.schema = dataclasses.replace(table.schema, part_rows=(3,))
    table.all_keys = lambda verify=True: np.array([1, 2])  # type: ignore[method-assign]
    assert found(table) == [("error", "rows", "part 0 has 2 rows, its index says 3")]


def test_columns_of_different_lengths() -> None:
    table = ArrayTable([part([1, 2], freqs=np.array([1]))])
    (finding,) = found(table)
    assert finding[:2] == ("error", "damaged") and "has 1 rows of freqs beside 2 keys" in finding[2]


def test_what_the_dialect_finds() -> None:
    table = ArrayTable([part([1])])
    table.findings = [Finding("warning", "slot-keys", "emb", "slot m has no row for 3 keys")]
    assert found(table) == [("warning", "slot-keys", "slot m has no row for 3 keys")]


def damage(path: Path, tensor: str, byte: int = 0) -> None:
    """Change one byte of a tensor."""
    bundle = Bundle(path / "model.ckpt-7")
    segment = bundle.tensor(tensor).segments[0]
    data = bytearray(bundle.data_path(segment.shard).read_bytes())
    data[segment.offset + byte] ^= 1
    bundle.data_path(segment.shard).write_bytes(data)


def test_each_damaged_column_is_named(sample_path: Path) -> None:
    damage(sample_path, "ads/emb/part_1-values")
    damage(sample_path, "ads/emb/part_1-slot-Adam.v", 3)
    damage(sample_path, "user_emb-versions")
    damage(sample_path, "dense/kernel")
    result = verify(str(sample_path))
    errors = [finding for finding in result.findings if finding.severity == "error"]
    assert [(finding.check, finding.table) for finding in errors] == [
        ("damaged", "ads/emb"),
        ("damaged", "ads/emb"),
        ("damaged", "user_emb"),
        ("damaged", ""),
    ]
    named = [finding.message.split("'")[1] for finding in errors]
    assert named == ["ads/emb/part_1-values", "ads/emb/part_1-slot-Adam.v", "user_emb-versions", "dense/kernel"]


def test_damaged_keys_are_one_finding(sample_path: Path) -> None:
    damage(sample_path, "user_emb-keys")
    errors = [finding.message for finding in verify(str(sample_path)).findings if finding.severity == "error"]
    assert len(errors) == 1 and "'user_emb-keys'" in errors[0]


def test_one_broken_table_does_not_hide_the_others(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    tensors = {**table_tensors(make_sample("a", rows=3, slots=())), **table_tensors(make_sample("b", rows=4, slots=()))}
    tensors["a-values"] = tensors["a-values"][:2]
    path = str(save_plain(tmp_path / "model", tensors))
    result = verify(path)
    assert [(f.severity, f.check, f.table) for f in result.findings] == [("error", "open", "a")]
    assert [(table.name, table.rows) for table in result.tables] == [("b", 4)]
    assert verify(path, tables=["b"]).findings == ()
    assert verify(path, tables=["a"]).count("error") == 1
    with pytest.raises(UnknownTableError):
        verify(path, tables=["c"])


def test_checkpoint_that_cannot_be_opened_is_one_finding(sample_path: Path) -> None:
    index = sample_path / "model.ckpt-7.index"
    index.write_bytes(index.read_bytes()[:-1])
    result = verify(str(sample_path))
    assert [(f.severity, f.check, f.table) for f in result.findings] == [("error", "open", "")]
    assert result.dialect is None and result.tables == ()
    with pytest.raises(BadInputError, match="looking for a checkpoint"):
        verify(str(sample_path / "nothing-here"))


def test_damaged_initial_values(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    tensors = {**table_tensors(make_sample("a", rows=3, slots=())), "a-init": np.full((2, 4), np.nan, np.float32)}
    prefix = save_plain(tmp_path / "model", tensors)
    (finding,) = verify(str(prefix)).findings
    assert finding.message == f"initial values: 8 numbers are NaN or infinite; `kvtools repair {prefix} OUT` mends it"
    bundle = Bundle(prefix)
    data = bytearray(bundle.data_path(0).read_bytes())
    data[bundle.tensor("a-init").segments[0].offset] ^= 1
    bundle.data_path(0).write_bytes(data)
    (finding,) = verify(str(prefix)).findings
    assert finding.check == "damaged" and "'a-init'" in finding.message


def test_dense_variables_that_are_not_finite(save_plain: Callable[..., Path], tmp_path: Path) -> None:
    prefix = save_plain(tmp_path / "model", {"w": np.array([1, np.inf, np.nan], np.float64)})
    (finding,) = verify(str(prefix)).findings
    assert (finding.severity, finding.check) == ("warning", "non-finite")
    assert finding.message.startswith("dense variable 'w': 2 numbers are NaN or infinite")


def move(prefix: Path, tensor: bytes, offset: int) -> None:
    """Let the index say that a tensor lies elsewhere."""
    index = Path(f"{prefix}.index")
    records = read_table(index)
    entry = decode_entry(records[tensor])
    records[tensor] = encode_entry(dataclasses.replace(entry, offset=offset))
    index.write_bytes(table_bytes(sorted(records.items())))


def test_tensors_that_claim_the_same_bytes(save_plain: Callable[..., Path], tmp_path: Path) -> None:
    tensors = {name: np.arange(4000, dtype=np.int32) for name in ("a", "b", "c")}
    prefix = save_plain(tmp_path / "model", tensors)
    assert verify(str(prefix)).findings == ()
    move(prefix, b"b", 8000)
    findings = {finding.check: finding for finding in verify(str(prefix)).findings}
    assert {check: finding.severity for check, finding in findings.items()} == {
        "overlap": "error",
        "damaged": "error",
        "gap": "info",
    }
    assert "'b' begins at byte 8000, inside 'a', which ends at 16000" in findings["overlap"].message
    assert "'b'" in findings["damaged"].message
    assert "bytes of the data files, in 1 runs, are in no tensor" in findings["gap"].message


def test_ranges_of_a_bundle_with_slices(sample_path: Path) -> None:
    bundle = Bundle(sample_path / "model.ckpt-7")
    names = [r.name for r in bundle.ranges()]
    assert "ads/emb/part_0-values[0,1:-]" in names and "dense/kernel" in names and "ads/emb/part_0-values" not in names
    assert list(bundle.overlaps()) == [] and list(bundle.gaps()) == []
    path = bundle.data_path(0)
    path.write_bytes(path.read_bytes() + b"more")
    ((gap),) = Bundle(sample_path / "model.ckpt-7").gaps()
    assert gap.end - gap.offset == 4


def test_progress_counts_every_row(sample_path: Path) -> None:
    last: dict[str, tuple[int, int]] = {}
    verify(str(sample_path), progress=lambda table, done, total: last.update({table: (done, total)}), workers=2)
    assert last == {"ads/emb": (11, 11), "user_emb": (5, 5)}


def test_reading_again_finds_the_same(sample_path: Path) -> None:
    checkpoint = open_checkpoint(sample_path)
    assert check(checkpoint) == check(checkpoint, workers=1) == check(checkpoint, memory=1)


@pytest.mark.parametrize("dialect", ["deeprec", "hdf5", "npz", "safetensors", "tfplugin", "tfplus", "tfra"])
def test_tensors_of_a_table_that_cannot_be_opened_are_no_dense_variables(tmp_path: Path, dialect: str) -> None:
    """The width that is given fits one of two tables."""
    tables = [
        kvtools.table_from_arrays(
            name, np.arange(6), np.ones((6, width), np.float32), slots={"Adam.m": np.ones((6, width), np.float32)}
        )
        for name, width in (("good", 4), ("bad", 9))
    ]
    path = tmp_path / {"hdf5": "a.h5", "npz": "a.npz", "safetensors": "a.safetensors"}.get(dialect, "a")
    kvtools.write_tables(tables, path, dialect)
    result = verify(str(path), OpenOptions(dim=4))
    assert [table.name for table in result.tables] == ["good"]
    assert [(finding.table, finding.check) for finding in result.findings if finding.severity == "error"] == [
        ("bad", "open")
    ]
    assert result.variables == 0


@pytest.mark.parametrize("damage", ["kvmeta", "values"])
def test_tensors_of_a_damaged_table_are_no_dense_variables(sample_path: Path, tmp_path: Path, damage: str) -> None:
    bundle = Bundle(sample_path / "model.ckpt-7")
    with BundleWriter(tmp_path / "a") as writer:
        for name, entry in bundle.entries.items():
            if entry.dtype == 7:
                text = bundle.strings(name)[0]
                writer.string(name, b"{" if damage == "kvmeta" and name == "user_emb-kvmeta" else text)
            else:
                array = bundle.tensor(name).read()
                cut = damage == "values" and name == "user_emb-values"
                writer.array(name, array[1:] if cut else array.reshape(entry.shape))
    result = verify(str(tmp_path / "a"))
    assert [table.name for table in result.tables] == ["ads/emb", "empty_emb"]
    assert (result.variables, result.count("error")) == (2, 1)
