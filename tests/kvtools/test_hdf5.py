"""HDF5: what we wrote and read again, what h5py makes of it, what h5py and others wrote, and damaged files."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pandas as pd
import pytest
import round_trip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from round_trip import check_same, same_bytes, write_and_open

from kvtools.array_table import ArrayTable
from kvtools.dialects.detect import dialect_named, open_checkpoint
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import VariableSchema, numpy_dtype
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError, OutputError, UsageError
from kvtools.migrate import write_tables
from kvtools.verify import verify

COMPRESSIONS = [{}, {"compression": "gzip"}, {"compression": "lzf"}, {"compression": "gzip", "batch_rows": 10}]
DATA = Path(__file__).parent.parent / "data"


@pytest.mark.thorough
@pytest.mark.parametrize("options", COMPRESSIONS, ids=str)
def test_every_table_comes_back_to_the_byte(tmp_path: Path, options: dict[str, object]) -> None:
    tables = [*round_trip.grid(), *(round_trip.table(name) for name in round_trip.NAMES)]
    checkpoint = write_and_open(tables, tmp_path / "a.h5", "hdf5", **options)
    assert list(checkpoint.tables) == [table.schema.name for table in tables]
    for table in tables:
        check_same(checkpoint.table(table.schema.name), table)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.text(max_size=30),
    rows=st.integers(0, 40),
    dim=st.integers(1, 9),
    parts=st.integers(1, 4),
    seed=st.integers(0, 99),
    compression=st.sampled_from(["none", "gzip", "lzf"]),
    batch_rows=st.integers(1, 50),
)
def test_any_table_comes_back(
    tmp_path: Path, name: str, rows: int, dim: int, parts: int, seed: int, compression: str, batch_rows: int
) -> None:
    table = round_trip.table(name, rows, dim, parts=parts, seed=seed)
    options = {"compression": compression, "batch_rows": batch_rows, "force": True}
    check_same(write_and_open([table], tmp_path / "a.h5", "hdf5", **options).table(name), table)


def test_many_parts_become_few_and_few_become_many(tmp_path: Path) -> None:
    table = round_trip.table("emb", 500, parts=3)
    expected = {int(key): value.tobytes() for key, value in zip(table.all_keys(), all_values(table), strict=True)}
    for compression in ("none", "gzip"):
        for parts in (1, 2, 7):
            path = tmp_path / f"{compression}-{parts}.h5"
            write_tables([table], path, "hdf5", parts=parts, options=WriteOptions(compression))
            got = open_checkpoint(path).table("emb")
            assert (got.parts, got.schema.partition) == (parts, "mod_1000")
            pairs = zip(got.all_keys(), all_values(got), strict=True)
            assert {int(key): value.tobytes() for key, value in pairs} == expected


def all_values(table: object) -> np.ndarray:
    return np.concatenate([chunk.values for chunk in table.chunks()])  # type: ignore[attr-defined]


def test_variables_of_all_types_come_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    types = ["float32", "bfloat16", "float8_e5m2", "float8_e4m3fn", "complex64", "uint8", "int16", "int64"]
    arrays = {f"x/{dtype}": rng.integers(0, 256, (70, 48), np.uint8).view(numpy_dtype(dtype)) for dtype in types}
    arrays |= {
        "flags": np.array([True, False, True]),
        "global_step": np.array(7),
        "none": np.zeros((0, 3), np.float32),
        "flat": np.zeros((3, 0), np.float32),
        "": np.float32([[1]]),
        "words": np.array([[b"a", b""], [b"\xff\x00 nul", "ü".encode()]], object),
        "plain": np.array([b"a", b"", b"\xfe"], object),
        "word": np.array(b"one", object),
    }

    def read(name: str) -> Iterator[np.ndarray]:
        array = arrays[name]
        yield from [array[:1], array[1:]] if array.ndim and array.dtype != object else [array]

    beside = Checkpoint(tmp_path, "test", {}, tuple(schema_of(name, array) for name, array in arrays.items()), read)
    account = write_tables([], tmp_path / "a.h5", "hdf5", beside=beside)
    assert account.variables == len(arrays) and account.lossless
    checkpoint = open_checkpoint(tmp_path / "a.h5")
    assert {v.name: (v.dtype, v.shape) for v in checkpoint.variables} == {
        v.name: (v.dtype, v.shape) for v in beside.variables
    }
    for name, array in arrays.items():
        pieces = list(checkpoint.read_variable(name))
        got = np.concatenate([array[:0], *pieces]) if array.ndim else pieces[0]
        if array.dtype == object:
            assert got.tolist() == array.tolist()
        else:
            assert same_bytes(got, array)


def schema_of(name: str, array: np.ndarray) -> VariableSchema:
    return VariableSchema(name, "string" if array.dtype == object else array.dtype.name, array.shape, array.nbytes)


def test_h5py_reads_what_we_wrote(tmp_path: Path) -> None:
    table = round_trip.table("ads/emb", 20, value_dtype="bfloat16", parts=3)
    for options in COMPRESSIONS:
        write_and_open([table], tmp_path / "a.h5", "hdf5", force=True, **options)
        with h5py.File(tmp_path / "a.h5") as file:
            group = file["tables/ads%2Femb"]
            record = json.loads(group.attrs["kvtools"])
            parts = [group[f"part_{number}"] for number in range(len(record["part_rows"]))]
            values = np.concatenate([part["values"][:] for part in parts]).view(ml_dtypes.bfloat16)
            assert same_bytes(np.concatenate([part["keys"][:] for part in parts]), table.all_keys())
            assert same_bytes(values, all_values(table))
            assert same_bytes(parts[2]["slots/beta%2Fpower"][:], next(table.chunks(part=2)).slots["beta/power"])
            assert parts[0]["values"].attrs["dtype"] == "bfloat16"


def test_sample_file_of_this_layout_stays_readable() -> None:
    checkpoint = open_checkpoint(DATA / "formats" / "sample.h5")
    check_same(checkpoint.table("ads/emb"), round_trip.table("ads/emb", 30, parts=2))


def test_what_the_rows_were_checked_against_is_told(tmp_path: Path) -> None:
    for dialect, checksums in (("hdf5", "CRC-32C"), ("arrow", "CRC-32C"), ("parquet", "CRC-32")):
        got = write_and_open([round_trip.table()], tmp_path / dialect, dialect).table("ads/emb")
        assert got.schema.checksums == checksums
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["keys"], file["values"] = np.arange(3), np.zeros((3, 2))
    assert open_checkpoint(tmp_path / "a.h5").table("a").schema.checksums is None


def test_tables_are_pickled(tmp_path: Path) -> None:
    table = round_trip.table()
    got = write_and_open([table], tmp_path / "a.h5", "hdf5").table("ads/emb")
    check_same(pickle.loads(pickle.dumps(got)), table)


def test_groups_that_somebody_else_wrote(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.integers(0, 99, 60), rng.normal(size=(60, 5)).astype(np.float32)
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=512) as file:
        file["keys"], file["values"] = keys, values
        group = file.create_group("deep/item")
        group["ids"] = keys.astype(np.uint16)[:, None]
        group.create_dataset("embeddings", data=values.astype(">f8"), chunks=(7, 2), compression="gzip")
        group["counts"] = np.arange(60, dtype=np.uint32)
        group["m"] = values[:, :2]
        group["remark"] = "by hand"
        file["again"] = h5py.SoftLink("/deep/item")
    tables = open_checkpoint(tmp_path / "a.h5").tables
    assert list(tables) == ["a", "deep/item"]
    check_same(tables["a"], ArrayTable("a", keys, values))
    expected = ArrayTable(
        "deep/item",
        keys,
        values.astype(np.float64),
        slots={"m": values[:, :2].copy()},
        freqs=np.arange(60, dtype=np.uint32),
    )
    check_same(tables["deep/item"], expected)
    notes = " ".join(tables["deep/item"].schema.notes)
    assert "read as int64" in notes and "remark" in notes and "as slots: m" in notes


@pytest.mark.parametrize(
    ("datasets", "message"),
    [
        ({"x": np.zeros(3)}, "got no table in it"),
        ({"keys": np.zeros(3), "values": np.zeros((3, 2))}, "expected integers"),
        ({"keys": np.arange(3), "values": np.zeros(3)}, r"expected \[n, dim\]"),
        ({"keys": np.arange(3), "values": np.zeros((3, 0))}, r"expected \[n, dim\]"),
        ({"keys": np.arange(3), "values": np.zeros((4, 2))}, "3 rows and .* 4, expected as many"),
        ({"keys": np.arange(3), "values": np.zeros((3, 2), np.int16)}, "int16"),
        ({"keys": np.arange(3), "values": np.array([b"abc"] * 3)}, "expected"),
    ],
)
def test_files_without_a_proper_table_are_told_apart(
    tmp_path: Path, datasets: dict[str, np.ndarray], message: str
) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, array in datasets.items():
            file[name] = array
    with pytest.raises(BadInputError, match=message):
        open_checkpoint(tmp_path / "a.h5")


def test_a_file_of_pandas_is_told_what_is_needed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:  # the layout of DataFrame.to_hdf
        file["df/axis0"], file["df/block0_values"] = np.array([b"a", b"b"]), np.zeros((3, 2))
    with pytest.raises(BadInputError, match="beside one of values"):
        open_checkpoint(tmp_path / "a.h5")
    assert pd.DataFrame is not None


def test_options_that_contradict_the_file_are_refused(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["keys"], file["values"] = np.arange(3), np.zeros((3, 2))
    with pytest.raises(UsageError, match="leave the option out"):
        open_checkpoint(tmp_path / "a.h5", OpenOptions(dim=3))


@pytest.mark.parametrize("compression", ["none", "gzip", "lzf"])
def test_any_damaged_byte_of_the_columns_is_found(tmp_path: Path, compression: str) -> None:
    table = round_trip.table("emb", 64, parts=2)
    path = tmp_path / "a.h5"
    write_and_open([table], path, "hdf5", compression=compression)
    whole = path.read_bytes()
    places = []
    with h5py.File(path) as file:
        for part in (0, 1):
            for name in ("keys", "values", "freqs", "versions", "slots/Adam.m"):
                dataset = file[f"tables/emb/part_{part}/{name}"]
                if compression == "none":
                    places.append((dataset.id.get_offset(), dataset.id.get_storage_size()))
                else:
                    chunk = dataset.id.get_chunk_info(0)
                    places.append((chunk.byte_offset, chunk.size))
    for offset, size in places:
        for at in (offset, offset + size // 2, offset + size - 1):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            with pytest.raises(CorruptFileError, match="the file is damaged"):
                list(open_checkpoint(path).table("emb").chunks())


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_file_cut_anywhere_is_an_error(tmp_path: Path, compression: str) -> None:
    path = tmp_path / "a.h5"
    write_and_open([round_trip.table("emb", 64)], path, "hdf5", compression=compression)
    whole = path.read_bytes()
    for size in [0, 1, 8, 40, 100, *range(200, len(whole), len(whole) // 17), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(KvtoolsError):
            list(open_checkpoint(path).table("emb").chunks())


def edit(path: Path) -> h5py.File:
    return h5py.File(path, "r+", libver=("v110", "v110"))


def test_columns_that_contradict_the_description(tmp_path: Path) -> None:
    write_and_open([round_trip.table("emb", 9)], tmp_path / "a.h5", "hdf5")
    whole = (tmp_path / "a.h5").read_bytes()
    paths = (tmp_path / f"{number}.h5" for number in itertools.count())

    def broken(change: str, message: str) -> None:
        path = next(paths)
        path.write_bytes(whole)
        with edit(path) as file:
            group = file["tables/emb"]
            part = group["part_0"]
            record = json.loads(group.attrs["kvtools"])
            exec(change, {"file": file, "group": group, "part": part, "record": record, "np": np, "h5py": h5py})
            group.attrs["kvtools"] = np.bytes_(json.dumps(record))
        with pytest.raises(BadInputError, match=message):
            open_checkpoint(path)
        lenient = open_checkpoint(path, OpenOptions(lenient=True))
        assert not lenient.tables and len(lenient.broken) == 1

    broken("del part['values']", "got no dataset '/tables/emb/part_0/values'")
    broken("del part['slots/Adam.m']", "got no dataset .*Adam.m")
    broken("del group['part_0']", "got no group 'part_0'")
    broken("del part['keys']; part['keys'] = np.arange(8)", r"int64 \[8\], expected int64 \[9\]")
    broken("del part['freqs']; part['freqs'] = np.zeros(9)", "expected uint32")
    broken("del part['freqs']; part.create_group('freqs')", "got no dataset")
    broken("record['part_rows'] = [9, 3]", "got no group 'part_1'")
    broken("record['part_rows'] = [2**62]", "expected")
    broken("record['key_dtype'] = 'float32'", "field 'key_dtype'")
    broken("record['slots'] = [1]", "field 'slots'")
    broken("record['extras'][0]['dtype'] = ['x']", "field 'extras'")
    broken("record['layout'] = 2", "update kvtools")
    broken("del record['dim']", "field 'dim'")
    broken("part['values'].attrs['crc32c'] = 'x'", "of variable length")
    huge = "part.create_dataset('keys', (2**40,), 'i8', chunks=(2**20,)); record['part_rows'] = [2**40]"
    broken(f"del part['keys']; {huge}", "expected|written in part")
    path = next(paths)
    path.write_bytes(whole)
    with edit(path) as file:
        file.attrs["kvtools"] = np.bytes_(json.dumps({"layout": 2}))
    with pytest.raises(BadInputError, match="update kvtools"):
        open_checkpoint(path)


def test_rows_in_other_files_are_not_followed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["keys"] = np.arange(4)
        file.create_dataset("values", (4, 2), "f4", external=[(os.devnull, 0, h5py.h5f.UNLIMITED)])
    with pytest.raises(BadInputError, match="lie in other files"):
        open_checkpoint(tmp_path / "a.h5")


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_external_links_are_not_followed(tmp_path: Path, compression: str | None) -> None:
    for name in ("mine", "secret"):
        write_tables([round_trip.table(bare=True)], tmp_path / f"{name}.h5", "hdf5", options=WriteOptions(compression))
    with h5py.File(tmp_path / "mine.h5", "r+") as file:
        (part,) = next(iter(file["tables"].values())).values()
        del part["values"]
        part["values"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), part.name + "/values")
    with pytest.raises(BadInputError, match="lie in other files"):
        open_checkpoint(tmp_path / "mine.h5").table("ads/emb").to_numpy()


def test_huge_hdf5_chunks_are_refused_before_they_are_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("keys", data=np.arange(1 << 14), chunks=(1 << 14,))
        file["values"] = np.zeros((1 << 14, 1))
    with pytest.raises(BadInputError, match="give more, or `h5repack`"):
        open_checkpoint(tmp_path / "a.h5", OpenOptions(memory=1 << 16))


def test_unknown_compressions_and_levels_are_usage_errors(tmp_path: Path) -> None:
    table = round_trip.table()
    for options in (WriteOptions("zstd"), WriteOptions("gzip", 11), WriteOptions(compression_level=3)):
        with pytest.raises(UsageError, match="for HDF5"):
            write_tables([table], tmp_path / "a.h5", "hdf5", options=options)
    assert not list(tmp_path.iterdir())


def test_an_output_that_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"mine")
    with pytest.raises(OutputError, match="exists"):
        write_tables([round_trip.table()], tmp_path / "a.h5", "hdf5")
    assert (tmp_path / "a.h5").read_bytes() == b"mine"


def test_heap_of_strings_that_would_never_end(tmp_path: Path) -> None:
    """The HDF5 library walks for ever through free space of 0 bytes; neither an attribute nor a variable lets it."""
    path = tmp_path / "a.h5"
    variable = VariableSchema("s", "string", (2,), 6)
    with dialect_named("hdf5").write(str(path), WriteOptions()) as writer:
        writer.variable(variable, iter([np.array([b"one", b"two"], object)]))
    assert [one.tolist() for one in open_checkpoint(path).read_variable("s")] == [[b"one", b"two"]]
    data = path.read_bytes()
    heap = data.index(b"GCOL")
    path.write_bytes(data[: heap + 16] + bytes(64) + data[heap + 80 :])
    with pytest.raises(CorruptFileError, match="heap at byte"):
        list(open_checkpoint(path).read_variable("s"))
    with h5py.File(path, "r+") as file:
        file.attrs["kvtools"] = "{}"
    with pytest.raises(CorruptFileError, match="of variable length"):
        open_checkpoint(path)


def read_all(path: Path) -> list[object]:
    """All that a file holds, each number by its bytes."""
    checkpoint = open_checkpoint(path)
    told: list[object] = []
    for name, table in checkpoint.tables.items():
        rows = [chunk for part in range(table.parts) for chunk in table.chunks(part=part)]
        told += [name, table.schema.key_dtype, table.schema.value_dtype, table.schema.part_rows]
        told += [(c.keys.tobytes(), c.values.tobytes()) for c in rows]  # type: ignore[union-attr]
    for variable in checkpoint.variables:
        told += [variable, *(array.tobytes() for array in checkpoint.read_variable(variable.name))]
    return told


@pytest.mark.parametrize("step", [41, pytest.param(7, marks=pytest.mark.thorough)])
def test_a_flipped_bit_of_groups_and_headers_is_found_or_harms_nothing(tmp_path: Path, step: int) -> None:
    tables = [ArrayTable(n, np.arange(9), np.ones((9, 2), np.float32), part_rows=(4, 5)) for n in ("aa", "bb")]
    weights = np.ones((3, 2), np.float32)
    beside = Checkpoint(tmp_path, "test", {}, (schema_of("w", weights),), lambda name: iter([weights]))
    path = tmp_path / "a.h5"
    write_tables(tables, path, "hdf5", beside=beside)
    sound, expected = path.read_bytes(), read_all(path)
    headers = [at for at in range(len(sound)) if sound[at : at + 4] == b"OHDR"]
    assert len(headers) > 10
    flips = {(at, 3) for at in [*headers, *(header + 30 for header in headers)]}  # each object's, and more
    flips |= {(at, at % 8) for at in range(0, len(sound), step)}
    found = 0
    for at, bit in sorted(flips):
        damaged = bytearray(sound)
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        try:
            findings = verify(str(path)).findings
            got = read_all(path)
        except KvtoolsError:
            found += 1
            continue
        assert any(one.severity == "error" for one in findings) or got == expected, (at, bit)
    assert found > 2 * len(headers) - 5


def test_a_table_or_variable_whose_link_is_gone_is_missed(tmp_path: Path) -> None:
    tables = [ArrayTable(n, np.arange(9), np.ones((9, 2), np.float32)) for n in ("aa", "bb")]
    weights = np.ones((3, 2), np.float32)
    beside = Checkpoint(tmp_path, "test", {}, (schema_of("w", weights),), lambda name: iter([weights]))
    for gone, got in (("tables/bb", "1 tables, expected 2"), ("tables", "0 tables"), ("variables", "0 variables")):
        path = tmp_path / f"{gone.replace('/', '-')}.h5"
        write_tables(tables, path, "hdf5", beside=beside)
        with h5py.File(path, "r+") as file:
            del file[gone]
        with pytest.raises(CorruptFileError, match=f"got {got}"):
            open_checkpoint(path)
        with h5py.File(path, "r+") as file:
            file.attrs["kvtools"] = np.bytes_('{"layout": 1}')  # as files of old say it
        assert list(open_checkpoint(path).tables) == {"tables/bb": ["aa"], "tables": []}.get(gone, ["aa", "bb"])


def test_a_damaged_object_in_the_file_of_another_program_is_told(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w", libver="v110") as file:
        for name in ("one", "two"):
            file[f"{name}/keys"], file[f"{name}/values"] = np.arange(3), np.zeros((3, 2))
            file[f"{name}/freqs"] = np.arange(3, dtype=np.uint32)
        places = [h5py.h5o.get_info(file[name].id).addr for name in ("two", "two/freqs")]
    sound = path.read_bytes()
    for place, name in zip(places, ("two", "freqs"), strict=True):
        damaged = bytearray(sound)
        damaged[place + 8] ^= 4
        path.write_bytes(damaged)
        with pytest.raises(CorruptFileError, match=name):
            open_checkpoint(path)
        checkpoint = open_checkpoint(path, OpenOptions(lenient=True))
        assert list(checkpoint.tables) == ["one"] and "/two" in checkpoint.broken
