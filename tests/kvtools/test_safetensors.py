"""safetensors files: the library opens what is written, what it writes opens here, hostile headers are named errors."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools.array_table import ArrayTable
from kvtools.dialects.detect import dialects, open_checkpoint
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.safetensors import DIALECT, read_header
from kvtools.errors import BadInputError, CorruptFileError, UsageError
from kvtools.fit import fit
from kvtools.migrate import write_tables

library = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
Make = Callable[..., Any]
Same = Callable[..., None]


def file_of(path: Path, header: Any, data: bytes = b"") -> Path:
    """A file with this header, which need not be JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: int, end: int, shape: Any, dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("key_dtype", ["int32", "int64", "uint32", "uint64"])
@pytest.mark.parametrize("value_dtype", ["float16", "float32", "float64", "bfloat16", "int8"])
def test_round_trip(tmp_path: Path, make_table: Make, same_rows: Same, key_dtype: str, value_dtype: str) -> None:
    tables = [
        make_table("scope/emb", 51, 3, key_dtype, value_dtype, freq_dtype="uint16", version_dtype="int64", parts=3),
        make_table("wide", 3, 129, key_dtype, value_dtype, slots=("a.b",), slot_width=1),
        make_table("empty", 0, 2, key_dtype, value_dtype),
    ]
    path = tmp_path / "out.safetensors"
    assert write_tables(tables, path, "safetensors").lossless
    checkpoint = open_checkpoint(path)
    assert (checkpoint.dialect, checkpoint.variables) == ("safetensors", ())
    for table in tables:
        same_rows(checkpoint.table(table.name), table, rows=3)
        assert checkpoint.table(table.name).dim == table.values.shape[1]
        assert checkpoint.table(table.name).schema.checksums == "CRC-32C"
    assert checkpoint.table("scope/emb").schema.version_unit == "steps"


def test_the_library_opens_what_was_written(tmp_path: Path, make_table: Make) -> None:
    tables = [make_table("a", 7, 3, freq_dtype="uint16"), make_table("b", 5, 1, "uint64", "bfloat16")]
    write_tables(tables, tmp_path / "out.safetensors", "safetensors")
    arrays = library.load_file(tmp_path / "out.safetensors")
    for table in tables:
        np.testing.assert_array_equal(arrays[f"{table.name}.keys"], table.keys)
        assert arrays[f"{table.name}.values"].tobytes() == table.values.tobytes()
        assert arrays[f"{table.name}.values"].shape == table.values.shape
        for slot, rows in table.slot_arrays.items():
            assert arrays[f"{table.name}.slot.{slot}"].tobytes() == rows.tobytes()
    np.testing.assert_array_equal(arrays["a.freqs"], tables[0].freqs)


def test_every_tensor_is_aligned_to_its_numbers(tmp_path: Path, make_table: Make) -> None:
    tables = [make_table(name, rows=3, dim=3, value_dtype=t) for name, t in (("a", "int8"), ("b", "float64"))]
    write_tables(tables, tmp_path / "out.safetensors", "safetensors")
    tensors, _, start = read_header(tmp_path / "out.safetensors")
    assert start % 64 == 0
    assert all(tensor.offset % 8 == 0 for tensor in tensors.values() if tensor.code in ("I64", "F64"))


def test_two_runs_write_the_same_bytes(tmp_path: Path, make_table: Make) -> None:
    for name in ("a", "b"):
        write_tables([make_table("emb", rows=500, parts=3)], tmp_path / f"{name}.safetensors", "safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_extras_and_metadata_come_along(tmp_path: Path, make_table: Make) -> None:
    extras = {"initial_values": np.ones((5, 4), np.float32), "deleted_keys": np.array([7, -1])}
    metadata = {"initializer": {"kind": "constant", "a": 0.5}}
    table = make_table("emb", extras=extras, metadata=metadata)
    assert write_tables([table], tmp_path / "out.safetensors", "safetensors").lossless
    got = open_checkpoint(tmp_path / "out.safetensors").table("emb")
    assert got.schema.metadata == metadata
    for name, array in extras.items():
        np.testing.assert_array_equal(got.extra(name), array)


def test_an_array_of_a_type_that_the_format_has_not_is_refused(tmp_path: Path, make_table: Make) -> None:
    table = make_table("emb", extras={"initial_values": np.ones(3, np.complex64)})
    with pytest.raises(BadInputError, match="extra:initial_values is complex64, expected one of"):
        write_tables([table], tmp_path / "out.safetensors", "safetensors")


def test_names_that_become_one_are_refused(tmp_path: Path, make_table: Make) -> None:
    tables = [make_table("a", slots=("b.values",)), make_table("a.slot.b", slots=())]
    with pytest.raises(BadInputError, match=r"two tensors would be called 'a\.slot\.b\.values'"):
        write_tables(tables, tmp_path / "out.safetensors", "safetensors")
    assert list(tmp_path.iterdir()) == []


def test_what_it_holds(make_table: Make) -> None:
    fitted = fit(make_table("emb", freq_dtype="uint16", version_dtype="uint64", parts=3).schema, DIALECT)
    assert fitted.losses == () and [change.split(" ")[0] for change in fitted.changes] == ["3"]


@settings(max_examples=25, deadline=None)
@given(
    keys=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40),
    dim=st.integers(1, 5),
    name=st.text(max_size=20),
    chunk=st.integers(1, 50),
)
def test_any_keys_and_any_name(
    tmp_path_factory: pytest.TempPathFactory, keys: list[int], dim: int, name: str, chunk: int
) -> None:
    values = np.random.default_rng(0).normal(size=(len(keys), dim)).astype(np.float32)
    path = tmp_path_factory.mktemp("safetensors") / "out.safetensors"
    write_tables([ArrayTable(name, np.array(keys, np.int64), values)], path, "safetensors")
    got = open_checkpoint(path).table(name)
    assert [key for c in got.chunks(rows=chunk) for key in c.keys.tolist()] == keys
    assert got.take(np.arange(len(keys))).values.tobytes() == values.tobytes()
    assert len(library.load_file(path)) == 2


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    rows = 1 << 15
    values = np.broadcast_to(np.float32(1.5), (rows, 256))
    path = tmp_path / "out.safetensors"
    tracemalloc.start()
    write_tables([ArrayTable("emb", np.arange(rows), values)], path, "safetensors", workers=1)
    got = open_checkpoint(path).table("emb")
    assert sum(len(chunk) for chunk in got.chunks()) == rows
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20 < values.nbytes


class TestStrangers:
    """Files that other programs wrote."""

    @pytest.mark.parametrize(
        ("keys", "values", "table"),
        [("keys", "values", "model"), ("user.keys", "user.weight", "user"), ("a_ids", "a_embeddings", "a")],
    )
    def test_tensors_by_their_names(self, tmp_path: Path, keys: str, values: str, table: str) -> None:
        arrays = {keys: np.array([5, -1, 2**63 - 1]), values: np.arange(6.0).reshape(3, 2), "bias": np.ones(3)}
        library.save_file({**arrays, "scale": np.array(2.0)}, tmp_path / "model.safetensors", {"format": "np"})
        checkpoint = open_checkpoint(tmp_path / "model.safetensors")
        assert list(checkpoint.tables) == [table]
        (chunk,) = checkpoint.table(table).chunks()
        np.testing.assert_array_equal(chunk.keys, arrays[keys])
        np.testing.assert_array_equal(chunk.values, arrays[values])
        assert f"'{keys}'" in checkpoint.table(table).schema.notes[0]
        assert checkpoint.table(table).schema.checksums is None
        assert {v.name: v.shape for v in checkpoint.variables} == {"bias": (3,), "scale": ()}
        (bias,) = checkpoint.read_variable("bias")
        np.testing.assert_array_equal(bias, np.ones(3))

    def test_a_matrix_is_looked_up_by_row_number(self, tmp_path: Path) -> None:
        matrix = np.arange(12, dtype=np.float16).reshape(4, 3)
        library.save_file({"item.weight": matrix, "bias": np.ones(3)}, tmp_path / "a.safetensors")
        table = open_checkpoint(tmp_path / "a.safetensors").table("item.weight")
        (chunk,) = table.chunks()
        assert (chunk.keys.tolist(), table.take(np.array([2, 0])).keys.tolist()) == ([0, 1, 2, 3], [2, 0])
        np.testing.assert_array_equal(chunk.values, matrix)
        assert "row numbers" in table.schema.notes[0]

    def test_types_that_numpy_has_not_are_listed_and_not_read(self, tmp_path: Path) -> None:
        header = {"emb": entry(0, 8, [2, 1], "F32"), "new": entry(8, 11, [6], "F4")}
        checkpoint = open_checkpoint(file_of(tmp_path / "a.safetensors", header, bytes(11)))
        assert [(v.name, v.dtype, v.bytes) for v in checkpoint.variables] == [("new", "f4", 3)]
        with pytest.raises(BadInputError, match="its type is F4, expected one of BOOL"):
            checkpoint.read_variable("new")

    def test_told_by_its_content_too(self, tmp_path: Path) -> None:
        library.save_file({"emb": np.ones((2, 3))}, tmp_path / "model.bin")
        assert open_checkpoint(tmp_path / "model.bin").dialect == "safetensors"

    def test_nothing_that_could_be_a_table(self, tmp_path: Path) -> None:
        library.save_file({"bias": np.ones(3)}, tmp_path / "a.safetensors")
        with pytest.raises(BadInputError, match=r"none of its tensors \(bias\)"):
            open_checkpoint(tmp_path / "a.safetensors")

    def test_options_that_contradict(self, tmp_path: Path) -> None:
        library.save_file({"keys": np.arange(2), "values": np.ones((2, 1))}, tmp_path / "a.safetensors")
        with pytest.raises(UsageError, match="got --dim 2, it says 1; leave the option out"):
            open_checkpoint(tmp_path / "a.safetensors", OpenOptions(dim=2))


class TestHostileHeaders:
    """Every way in which a header can lie, one by one."""

    @pytest.mark.parametrize("size", range(8))
    def test_shorter_than_a_length(self, tmp_path: Path, size: int) -> None:
        (tmp_path / "a.safetensors").write_bytes(bytes(size))
        with pytest.raises(CorruptFileError, match=f"a file of {size} bytes, expected at least 8"):
            open_checkpoint(tmp_path / "a.safetensors")

    @pytest.mark.parametrize("length", [2**64 - 1, 2**63, 100_000_001])
    def test_header_above_the_formats_limit(self, tmp_path: Path, length: int) -> None:
        (tmp_path / "a.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(CorruptFileError, match="the format's limit"):
            open_checkpoint(tmp_path / "a.safetensors")

    def test_header_longer_than_the_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.safetensors").write_bytes((99_000_000).to_bytes(8, "little") + b"{}")
        dialects()  # the modules of all, which the first test of a process imports
        tracemalloc.start()
        with pytest.raises(CorruptFileError, match="99000000 bytes in a file of 10, expected one that fits"):
            open_checkpoint(tmp_path / "a.safetensors")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()

    @pytest.mark.parametrize(
        "text",
        [
            b"",
            b"{",
            b"[]",
            b"null",
            b"\xff\xfe",
            b"[" * 100_000,
            b'{"a": 1' + b"1" * 5000 + b"}",
            b'{"a": {}, "a": {}}',
            b'{"a": {"dtype": "U8", "dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}',
        ],
    )
    def test_no_json_object(self, tmp_path: Path, text: bytes) -> None:
        with pytest.raises(CorruptFileError, match="no JSON object of different names"):
            open_checkpoint(file_of(tmp_path / "a.safetensors", text))

    @pytest.mark.parametrize("metadata", [[], None, {"a": 1}, {"a": ["b"]}, "x"])
    def test_metadata_that_is_no_map_of_texts(self, tmp_path: Path, metadata: Any) -> None:
        with pytest.raises(CorruptFileError, match="'__metadata__' that is"):
            open_checkpoint(file_of(tmp_path / "a.safetensors", {"__metadata__": metadata}))

    @pytest.mark.parametrize(
        ("tensor", "match"),
        [
            (5, "an object with dtype, shape and data_offsets"),
            ({}, "an object with dtype, shape and data_offsets"),
            ({"dtype": 1, "shape": [], "data_offsets": [0, 1]}, "an object with dtype"),
            ({"dtype": "U8", "shape": 3, "data_offsets": [0, 1]}, "a list of sizes"),
            (entry(0, 1, [-1]), "a list of sizes"),
            (entry(0, 1, [1.0]), "a list of sizes"),
            (entry(0, 1, [True]), "a list of sizes"),
            (entry(0, 1, [2**64]), "a list of sizes"),
            ({"dtype": "U8", "shape": [1], "data_offsets": [0]}, r"data_offsets \[begin, end\]"),
            ({"dtype": "U8", "shape": [1], "data_offsets": None}, r"data_offsets \[begin, end\]"),
            (entry(1, 0, [1]), r"data_offsets \[begin, end\]"),
            (entry(-1, 0, [1]), r"data_offsets \[begin, end\]"),
            (entry(0, 1, [2]), "1 bytes, expected 2 for U8"),
            (entry(0, 1, [2**62, 2**62]), "1 bytes, expected .* for U8"),
            (entry(0, 1, [1] * 70), "1 dimensions|expected"),
            (entry(0, 7, [7], "F32"), "7 bytes, expected 28 for F32"),
        ],
    )
    def test_senseless_tensor(self, tmp_path: Path, tensor: Any, match: str) -> None:
        with pytest.raises(BadInputError, match=match):
            open_checkpoint(file_of(tmp_path / "a.safetensors", {"t": tensor}, bytes(1)))

    @pytest.mark.parametrize(
        ("header", "size", "match"),
        [
            ({"a": entry(0, 2, [2]), "b": entry(1, 3, [2])}, 3, "'b' at byte 1, which overlaps"),
            ({"a": entry(0, 2, [2]), "b": entry(0, 2, [2])}, 2, "overlaps"),
            ({"a": entry(0, 2, [2]), "b": entry(3, 4, [1])}, 4, "'b' at byte 3, which leaves a gap"),
            ({"a": entry(1, 2, [1])}, 2, "'a' at byte 1, which leaves a gap"),
            ({"a": entry(0, 2, [2])}, 1, "ends at byte 2, expected at most 1"),
            ({"a": entry(0, 2**60, [2**60])}, 1, "expected at most 1"),
            ({"a": entry(0, 2, [2])}, 3, "3 bytes of tensors, expected 2"),
            ({}, 1, "1 bytes of tensors, expected 0"),
        ],
    )
    def test_offsets_that_do_not_fit(self, tmp_path: Path, header: Any, size: int, match: str) -> None:
        with pytest.raises(CorruptFileError, match=match):
            open_checkpoint(file_of(tmp_path / "a.safetensors", header, bytes(size)))

    @pytest.mark.parametrize(
        "description", ["", "[]", "{", '{"format": 0, "tables": []}', '{"format": 1, "tables": 1}']
    )
    def test_damaged_description(self, tmp_path: Path, description: str) -> None:
        with pytest.raises(CorruptFileError, match=r"a\.safetensors"):
            open_checkpoint(file_of(tmp_path / "a.safetensors", {"__metadata__": {"kvtools": description}}))

    @pytest.mark.parametrize("dialect", ["safetensors", "huggingface"])
    def test_a_byte_of_the_description_that_changed(self, tmp_path: Path, dialect: str) -> None:
        initializer = {"kind": "constant", "a": 0.12345, "b": 1e-08, "c": float("inf"), "name": '\u00e9\ud800"'}
        table = ArrayTable("emb", np.arange(3), np.ones((3, 2), np.float32), metadata={"initializer": initializer})
        write_tables([table], tmp_path / "a", dialect)
        assert open_checkpoint(tmp_path / "a").table("emb").schema.metadata["initializer"] == initializer
        file = tmp_path / "a" if dialect == "safetensors" else tmp_path / "a" / "model.safetensors.index.json"
        written = file.read_bytes()
        assert written.count(b"0.12345") == 1
        file.write_bytes(written.replace(b"0.12345", b"0.12344"))
        with pytest.raises(CorruptFileError, match="the checksum of its description is"):
            open_checkpoint(tmp_path / "a")

    @pytest.mark.parametrize("checksums", [[], {"a": 1}, {"a": "xyz"}, {"a": None}, "x"])
    def test_senseless_checksums(self, tmp_path: Path, checksums: Any) -> None:
        text = json.dumps({"format": 1, "tables": [], "crc32c": checksums})
        with pytest.raises(CorruptFileError, match="'crc32c' of its description"):
            open_checkpoint(file_of(tmp_path / "a.safetensors", {"__metadata__": {"kvtools": text}}))

    def test_a_later_format(self, tmp_path: Path) -> None:
        text = json.dumps({"format": 2, "tables": []})
        with pytest.raises(BadInputError, match="got format 2, expected at most 1; update kvtools"):
            open_checkpoint(file_of(tmp_path / "a.safetensors", {"__metadata__": {"kvtools": text}}))


def test_any_flipped_byte_of_the_rows_is_found(tmp_path: Path, make_table: Make) -> None:
    path = tmp_path / "out.safetensors"
    write_tables([make_table("emb", rows=20, freq_dtype="uint32")], path, "safetensors")
    whole, (tensors, _, start) = path.read_bytes(), read_header(path)
    for name, tensor in tensors.items():
        for at in (tensor.offset, tensor.offset + tensor.size - 1):
            damaged = bytearray(whole)
            damaged[start + at] ^= 1
            path.write_bytes(bytes(damaged))
            table = open_checkpoint(path).table("emb")
            with pytest.raises(CorruptFileError, match=f"{name}.*checksum mismatch"):
                list(table.chunks(rows=3))
            assert len(list(table.chunks(verify=False))) == 1


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.99, -1])
def test_truncated(tmp_path: Path, make_table: Make, keep: float) -> None:
    path = tmp_path / "out.safetensors"
    write_tables([make_table("emb", rows=200)], path, "safetensors")
    data = path.read_bytes()
    path.write_bytes(data[: int(keep) if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(CorruptFileError, match="damaged, copy it again"):
        open_checkpoint(path)
