"""NumPy archives: what is written opens in NumPy, what NumPy and strangers write opens here, damage is found."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools.array_table import ArrayTable
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.npz import DIALECT
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, UsageError
from kvtools.fit import fit
from kvtools.migrate import write_tables

Make = Callable[..., Any]
Same = Callable[..., None]
DEFLATE = WriteOptions(compression="deflate")


@pytest.mark.parametrize("compression", ["none", "deflate"])
@pytest.mark.parametrize("key_dtype", ["int32", "int64", "uint32", "uint64"])
@pytest.mark.parametrize("value_dtype", ["float16", "float32", "float64", "bfloat16", "int8"])
def test_round_trip(
    tmp_path: Path, make_table: Make, same_rows: Same, key_dtype: str, value_dtype: str, compression: str
) -> None:
    tables = [
        make_table("scope/emb", 50, 4, key_dtype, value_dtype, freq_dtype="uint32", version_dtype="int64", parts=3),
        make_table("wide", 3, 129, key_dtype, value_dtype, slots=("a.b",), slot_width=1),
        make_table("empty", 0, 2, key_dtype, value_dtype),
    ]
    path = tmp_path / "out.npz"
    account = write_tables(tables, path, "npz", options=WriteOptions(compression=compression))
    assert account.lossless
    checkpoint = open_checkpoint(path)
    assert (checkpoint.dialect, checkpoint.variables) == ("npz", ())
    for table in tables:
        same_rows(checkpoint.table(table.name), table, rows=3)
        assert checkpoint.table(table.name).dim == table.values.shape[1]
    assert checkpoint.table("scope/emb").schema.version_unit == "steps"


@pytest.mark.parametrize("options", [WriteOptions(), DEFLATE])
def test_numpy_opens_what_was_written(tmp_path: Path, make_table: Make, options: WriteOptions) -> None:
    table = make_table("scope/emb", rows=1000, dim=8, freq_dtype="uint32")
    write_tables([table], tmp_path / "out.npz", "npz", options=options)
    with np.load(tmp_path / "out.npz", allow_pickle=False) as archive:
        np.testing.assert_array_equal(archive["scope/emb.keys"], table.keys)
        np.testing.assert_array_equal(archive["scope/emb.values"], table.values)
        np.testing.assert_array_equal(archive["scope/emb.slot.Adam.m"], table.slot_arrays["Adam.m"])
        np.testing.assert_array_equal(archive["scope/emb.freqs"], table.freqs)
        (record,) = json.loads(archive["kvtools"].item())["tables"]
        assert record["columns"]["values"] == "scope/emb.values"
    with zipfile.ZipFile(tmp_path / "out.npz") as archive:
        assert archive.testzip() is None


def test_bfloat16_is_uint16_to_numpy(tmp_path: Path, make_table: Make) -> None:
    table = make_table("emb", value_dtype="bfloat16", slots=())
    write_tables([table], tmp_path / "out.npz", "npz")
    with np.load(tmp_path / "out.npz") as archive:
        np.testing.assert_array_equal(archive["emb.values"], table.values.view(np.uint16))


def test_stored_rows_are_aligned_and_can_be_mapped(tmp_path: Path, make_table: Make) -> None:
    write_tables([make_table("emb", dim=3), make_table("b", dim=5)], tmp_path / "out.npz", "npz")
    data = (tmp_path / "out.npz").read_bytes()
    with zipfile.ZipFile(tmp_path / "out.npz") as archive:
        for info in archive.infolist():
            name_bytes, extra_bytes = struct.unpack_from("<2H", data, info.header_offset + 26)
            assert (info.header_offset + 30 + name_bytes + extra_bytes) % 64 == 0


def test_two_runs_write_the_same_bytes(tmp_path: Path, make_table: Make) -> None:
    for name in ("a", "b"):
        write_tables([make_table("emb", rows=500, parts=3)], tmp_path / f"{name}.npz", "npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_extras_and_metadata_come_along(tmp_path: Path, make_table: Make) -> None:
    extras = {"initial_values": np.ones((5, 4), np.float32), "deleted_keys": np.array([7, -1])}
    metadata = {"initializer": {"kind": "constant", "a": 0.5}}
    table = make_table("emb", extras=extras, metadata=metadata)
    for options in (WriteOptions(force=True), WriteOptions(force=True, compression="deflate", compression_level=1)):
        assert write_tables([table], tmp_path / "out.npz", "npz", options=options).lossless
        got = open_checkpoint(tmp_path / "out.npz").table("emb")
        assert got.schema.metadata == metadata
        for name, array in extras.items():
            np.testing.assert_array_equal(got.extra(name), array)


@settings(max_examples=25, deadline=None)
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40),
    dim=st.integers(1, 5),
    name=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    deflate=st.booleans(),
    chunk=st.integers(1, 50),
)
def test_any_keys_and_any_name(
    tmp_path_factory: pytest.TempPathFactory,
    keys: list[int],
    dim: int,
    name: str,
    deflate: bool,
    chunk: int,
) -> None:
    values = np.random.default_rng(0).normal(size=(len(keys), dim)).astype(np.float32)
    table = ArrayTable(name, np.array(keys, np.int64), values)
    path = tmp_path_factory.mktemp("npz") / "out.npz"
    write_tables([table], path, "npz", options=DEFLATE if deflate else WriteOptions())
    got = open_checkpoint(path).table(name)
    assert [key for c in got.chunks(rows=chunk) for key in c.keys.tolist()] == keys
    assert got.take(np.arange(len(keys))).values.tobytes() == values.tobytes()


class TestStrangers:
    """Archives that other programs wrote."""

    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    @pytest.mark.parametrize(
        ("keys", "values", "table"),
        [
            ("keys", "values", "model"),
            ("user.keys", "user.values", "user"),
            ("user_ids", "user_embeddings", "user"),
            ("a/b/key", "a/b/weight", "a/b"),
            ("IDs", "Embedding", "model"),
        ],
    )
    def test_arrays_by_their_names(
        self, tmp_path: Path, save: Callable[..., None], keys: str, values: str, table: str
    ) -> None:
        arrays = {keys: np.array([5, -1, 2**63 - 1]), values: np.arange(6.0).reshape(3, 2), "bias": np.ones(3)}
        save(tmp_path / "model.npz", scale=np.float32(2), **arrays)
        checkpoint = open_checkpoint(tmp_path / "model.npz")
        assert list(checkpoint.tables) == [table]
        (chunk,) = checkpoint.table(table).chunks()
        np.testing.assert_array_equal(chunk.keys, arrays[keys])
        np.testing.assert_array_equal(chunk.values, arrays[values])
        assert f"'{keys}'" in checkpoint.table(table).schema.notes[0]
        assert {v.name: v.shape for v in checkpoint.variables} == {"bias": (3,), "scale": ()}
        (scale,) = checkpoint.read_variable("scale")
        assert scale.shape == () and scale == 2

    def test_counters_by_their_names(self, tmp_path: Path) -> None:
        keys, values = np.arange(3), np.ones((3, 2), np.float32)
        np.savez(tmp_path / "a.npz", keys=keys, values=values, freqs=np.array([1, 2, 3]), versions=np.ones(2))
        table = open_checkpoint(tmp_path / "a.npz").table("a")
        assert (table.schema.freq_dtype, table.schema.version_dtype) == ("int64", None)
        assert "'versions' was left out" in table.schema.notes[-1]

    def test_slots_by_their_names(self, tmp_path: Path, make_table: Make, same_rows: Same) -> None:
        """As in what kvtools wrote, once NumPy has saved it again, without the description."""
        source = make_table("scope/emb", rows=20, dim=4, slots=("Adam.m", "accum"), slot_width=1)
        write_tables([source], tmp_path / "a.npz", "npz")
        with np.load(tmp_path / "a.npz") as archive:
            arrays = {name: archive[name] for name in archive.files if name != "kvtools"}
        np.savez(tmp_path / "b.npz", **arrays, **{"scope/emb.slot.short": np.ones((19, 4))})
        checkpoint = open_checkpoint(tmp_path / "b.npz")
        same_rows(checkpoint.table("scope/emb"), source, rows=7)
        assert "by their names: Adam.m, accum" in checkpoint.table("scope/emb").schema.notes[-1]
        assert [variable.name for variable in checkpoint.variables] == ["scope/emb.slot.short"]

    def test_a_matrix_is_looked_up_by_row_number(self, tmp_path: Path) -> None:
        matrix = np.arange(12, dtype=np.float32).reshape(4, 3)
        np.savez(tmp_path / "a.npz", emb=matrix, bias=np.ones(3))
        table = open_checkpoint(tmp_path / "a.npz").table("emb")
        (chunk,) = table.chunks()
        assert (chunk.keys.tolist(), table.take(np.array([2, 0])).keys.tolist()) == ([0, 1, 2, 3], [2, 0])
        np.testing.assert_array_equal(chunk.values, matrix)
        assert "row numbers" in table.schema.notes[0]

    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_the_other_byte_order(self, tmp_path: Path, save: Callable[..., None]) -> None:
        save(tmp_path / "a.npz", keys=np.array([1, 2], ">i8"), values=np.array([[1.5], [2.5]], ">f4"))
        table = open_checkpoint(tmp_path / "a.npz").table("a")
        (chunk,) = table.chunks()
        assert (table.schema.key_dtype, chunk.keys.dtype, chunk.values.dtype.name) == ("int64", np.int64, "float32")
        assert (chunk.keys.tolist(), chunk.values.tolist()) == ([1, 2], [[1.5], [2.5]])
        assert table.take(np.array([1])).values.tolist() == [[2.5]]

    def test_small_keys_become_int32(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "a.npz", keys=np.array([1, 255], np.uint8), values=np.ones((2, 1)))
        assert open_checkpoint(tmp_path / "a.npz").table("a").all_keys().tolist() == [1, 255]

    @pytest.mark.parametrize(
        ("arrays", "match"),
        [
            ({"keys": np.ones(2), "values": np.ones((2, 1))}, r"'keys' is float64 \[2\], expected integers"),
            ({"keys": np.arange(4).reshape(2, 2), "values": np.ones((2, 1))}, r"'keys' is int64 \[2, 2\]"),
            ({"keys": np.arange(2), "values": np.ones(2)}, r"'values' is float64 \[2\], expected numbers"),
            ({"keys": np.arange(2), "values": np.ones((2, 1, 3))}, r"'values' is float64 \[2, 1, 3\]"),
            ({"keys": np.arange(2), "values": np.ones((3, 2))}, "2 keys and 'values' 3 rows"),
            ({"keys": np.arange(2), "values": np.asfortranarray(np.ones((2, 3)))}, "column by column"),
            ({"keys": np.array(["x", "y"]), "values": np.ones((2, 1))}, "'keys.npy' .* of type <U1"),
            ({"ids": np.array(["x", "y"], object), "values": np.ones((2, 1))}, "'ids.npy' .* of type object"),
            ({"a": np.array([{}])}, "of type object"),
            ({"a": np.zeros(2, [("x", "i4")])}, "of type"),
            ({"a": np.ones(3)}, r"none of its arrays \(a\)"),
            ({}, "there are none"),
        ],
    )
    def test_arrays_that_are_no_table(self, tmp_path: Path, arrays: dict[str, Any], match: str) -> None:
        np.savez(tmp_path / "a.npz", **arrays)
        with pytest.raises(BadInputError, match=match):
            open_checkpoint(tmp_path / "a.npz")

    @pytest.mark.parametrize("options", [{"key_dtype": "int32"}, {"value_dtype": "float16"}, {"dim": 3}])
    def test_options_that_contradict(self, tmp_path: Path, options: dict[str, Any]) -> None:
        np.savez(tmp_path / "a.npz", keys=np.arange(2), values=np.ones((2, 1)))
        with pytest.raises(UsageError, match="leave the option out"):
            open_checkpoint(tmp_path / "a.npz", OpenOptions(**options))


class TestRefused:
    """Archives that are damaged, or lie."""

    @pytest.fixture(params=["none", "deflate"])
    def archive(self, request: pytest.FixtureRequest, tmp_path: Path, make_table: Make) -> Path:
        path = tmp_path / "out.npz"
        options = WriteOptions(compression=request.param)
        write_tables([make_table("emb", rows=2000, dim=8)], path, "npz", options=options)
        return path

    def read_all(self, path: Path) -> None:
        for table in open_checkpoint(path).tables.values():
            for _ in table.chunks(rows=100):
                pass

    def test_any_flipped_byte_of_the_rows_is_found(self, archive: Path) -> None:
        whole = archive.read_bytes()
        with zipfile.ZipFile(archive) as opened:
            members = [(i.header_offset, i.compress_size) for i in opened.infolist() if i.filename != "kvtools.npy"]
        for offset, size in members:
            name_bytes, extra_bytes = struct.unpack_from("<2H", whole, offset + 26)
            begin = offset + 30 + name_bytes + extra_bytes
            for at in (begin + 200, begin + size // 2, begin + size - 9):  # the last bits of a stream may mean nothing
                damaged = bytearray(whole)
                damaged[at] ^= 4
                archive.write_bytes(bytes(damaged))
                with pytest.raises(CorruptFileError, match="emb"):
                    self.read_all(archive)

    def test_any_flipped_byte_of_the_directory_is_found_or_harmless(self, archive: Path) -> None:
        whole = archive.read_bytes()
        before = open_checkpoint(archive).table("emb").schema
        with zipfile.ZipFile(archive) as opened:
            begin = opened.start_dir
        for at in range(begin, len(whole)):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            archive.write_bytes(damaged)
            with contextlib.suppress(BadInputError):
                assert open_checkpoint(archive).table("emb").schema == before, at

    @pytest.mark.parametrize("keep", [0, 3, 100, 0.5, 0.99, -1])
    def test_truncated(self, archive: Path, keep: float) -> None:
        data = archive.read_bytes()
        archive.write_bytes(data[: int(keep) if isinstance(keep, int) else int(len(data) * keep)])
        with pytest.raises(CorruptFileError, match="damaged"):
            self.read_all(archive)

    def test_no_archive_at_all(self, tmp_path: Path) -> None:
        (tmp_path / "a.npz").write_text("keys: 1 2 3")
        with pytest.raises(CorruptFileError, match=r"a\.npz"):
            open_checkpoint(tmp_path / "a.npz")

    @pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    @pytest.mark.parametrize("shape", [(2**62,), (10**6, 10**6), (1,), (-1,), (2**70,)])
    def test_a_header_that_lies_about_its_shape(self, tmp_path: Path, shape: tuple[int, ...], method: int) -> None:
        header = io.BytesIO()
        record = {"descr": "<i8", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(header, record)
        with zipfile.ZipFile(tmp_path / "a.npz", "w", method) as archive:
            archive.writestr("keys.npy", header.getvalue() + bytes(64))
            archive.writestr("values.npy", header.getvalue() + bytes(64))
        tracemalloc.start()
        with pytest.raises(BadInputError):
            self.read_all(tmp_path / "a.npz")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
        tracemalloc.stop()

    @pytest.mark.parametrize(
        "text", [b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff\xff", b"\x93NUMPY\x03\x00ab", b"x" * 99]
    )
    def test_a_member_that_is_no_array(self, tmp_path: Path, text: bytes) -> None:
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            archive.writestr("keys.npy", text)
        with pytest.raises(BadInputError, match=r"keys\.npy"):
            open_checkpoint(tmp_path / "a.npz")

    @pytest.mark.filterwarnings("ignore:Duplicate name")
    def test_an_array_that_is_there_twice(self, tmp_path: Path) -> None:
        buffer = io.BytesIO()
        np.save(buffer, np.arange(3))
        with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
            for _ in range(2):
                archive.writestr("keys.npy", buffer.getvalue())
        with pytest.raises(CorruptFileError, match="'keys' is there twice"):
            open_checkpoint(tmp_path / "a.npz")

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"format": 2}, "got format 2, expected at most 1; update kvtools"),
            ({"format": "x"}, 'a description of format "x"'),
            ({"tables": {}}, "expected format 1 and a list of objects"),
            ({"tables": [5]}, "expected format 1 and a list of objects"),
        ],
    )
    def test_a_senseless_description(self, tmp_path: Path, change: dict[str, Any], match: str) -> None:
        text = np.array(json.dumps({"format": 1, "tables": [], **change}).encode())
        np.savez(tmp_path / "a.npz", kvtools=text)
        with pytest.raises(BadInputError, match=match):
            open_checkpoint(tmp_path / "a.npz")

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("name", 5),
            ("dim", 0),
            ("dim", 3),
            ("part_rows", [-1]),
            ("part_rows", [51]),
            ("part_rows", [25, 25]),
            ("part_rows", True),
            ("layout", 0),
            ("key_dtype", "float32"),
            ("key_dtype", "int32"),
            ("value_dtype", ["float32"]),
            ("slots", None),
            ("slots", [{"name": "m"}]),
            ("slots", [{"name": "m", "width": 4, "dtype": "object"}]),
            ("slots", [{"name": "other", "width": 4, "dtype": "float32"}]),
            ("freq_dtype", "uint32"),
            ("freq_dtype", "no"),
            ("version_unit", "years"),
            ("extras", [{"name": "x", "dtype": "int64", "shape": [-1]}]),
            ("metadata", []),
            ("columns", None),
            ("columns", {"keys": "nothing"}),
        ],
    )
    def test_a_description_that_contradicts(self, tmp_path: Path, make_table: Make, field: str, value: Any) -> None:
        write_tables([make_table("emb", rows=50)], tmp_path / "a.npz", "npz")
        with np.load(tmp_path / "a.npz") as archive:
            arrays = dict(archive)
        description = json.loads(arrays["kvtools"].item())
        description["tables"][0][field] = value
        del description["checksum"]
        arrays["kvtools"] = np.array(json.dumps(description).encode())
        np.savez(tmp_path / "b.npz", **arrays)
        with pytest.raises(CorruptFileError, match="write it again"):
            open_checkpoint(tmp_path / "b.npz")
        assert len(open_checkpoint(tmp_path / "b.npz", OpenOptions(lenient=True)).broken) == 1


@pytest.mark.parametrize(
    "options",
    [
        WriteOptions(compression="zstd"),
        WriteOptions(compression_level=3),
        WriteOptions(compression="deflate", compression_level=10),
    ],
)
def test_options_that_the_writer_has_not(tmp_path: Path, make_table: Make, options: WriteOptions) -> None:
    with pytest.raises(UsageError, match="--compression"):
        write_tables([make_table("emb")], tmp_path / "out.npz", "npz", options=options)


def test_names_that_become_one_are_refused(tmp_path: Path, make_table: Make) -> None:
    tables = [make_table("a", slots=("b.values",)), make_table("a.slot.b", slots=())]
    with pytest.raises(BadInputError, match=r"two arrays would be called 'a\.slot\.b\.values'"):
        write_tables(tables, tmp_path / "out.npz", "npz")
    assert list(tmp_path.iterdir()) == []


def test_what_it_holds(make_table: Make) -> None:
    fitted = fit(make_table("emb", freq_dtype="uint16", version_dtype="uint64", parts=3).schema, DIALECT)
    assert fitted.losses == () and [change.split(" ")[0] for change in fitted.changes] == ["3"]


@pytest.mark.parametrize("options", [WriteOptions(), DEFLATE])
def test_memory_does_not_grow_with_the_table(tmp_path: Path, options: WriteOptions) -> None:
    rows = 1 << 15
    values = np.broadcast_to(np.float32(1.5), (rows, 256))
    table = ArrayTable("emb", np.arange(rows), values)
    path = tmp_path / "out.npz"
    tracemalloc.start()
    write_tables([table], path, "npz", options=options, workers=1)
    got = open_checkpoint(path).table("emb")
    assert sum(len(chunk) for chunk in got.chunks()) == rows
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20 < values.nbytes
