"""What Parquet and Arrow share: round trips as folders and files, damaged files, choosing the columns of strangers."""

from __future__ import annotations

import errno
import pickle
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import round_trip
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from round_trip import check_same, write, write_and_open

import kvtools
from kvtools.array_table import ArrayTable
from kvtools.dialects import arrow_columns, arrow_output
from kvtools.dialects.chunk import Chunk
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError, OutputError, UsageError
from kvtools.migrate import write_tables

DATA = Path(__file__).parent.parent / "data" / "formats"
FORMATS = ["parquet", "arrow"]
OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("parquet", {}),
    ("parquet", {"compression": "none", "batch_rows": 10}),
    ("parquet", {"compression": "snappy"}),
    ("arrow", {}),
    ("arrow", {"compression": "lz4", "batch_rows": 10}),
    ("arrow", {"compression": "zstd", "compression_level": 3}),
]


def write_stranger(table: pa.Table, path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as file:
            file.write_table(table)


def lists(values: np.ndarray) -> pa.Array:
    return pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(-1)), values.shape[1])


@pytest.mark.thorough
@pytest.mark.parametrize(("dialect", "options"), OPTIONS, ids=str)
def test_every_table_comes_back_to_the_byte(tmp_path: Path, dialect: str, options: dict[str, Any]) -> None:
    tables = [*round_trip.grid(), *(round_trip.table(name) for name in round_trip.NAMES)]
    checkpoint = write_and_open(tables, tmp_path / "out", dialect, **options)
    assert sorted(checkpoint.tables) == sorted(table.schema.name for table in tables)
    for table in tables:
        check_same(checkpoint.table(table.schema.name), table)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dialect=st.sampled_from(FORMATS),
    name=st.text(max_size=30),
    rows=st.integers(0, 40),
    dim=st.integers(1, 9),
    parts=st.integers(1, 4),
    seed=st.integers(0, 99),
    batch_rows=st.integers(1, 50),
)
def test_any_table_comes_back_in_one_file(
    tmp_path: Path, dialect: str, name: str, rows: int, dim: int, parts: int, seed: int, batch_rows: int
) -> None:
    table = round_trip.table(name, rows, dim, parts=parts, seed=seed)
    checkpoint = write_and_open([table], tmp_path / f"a.{dialect}", dialect, batch_rows=batch_rows, force=True)
    check_same(checkpoint.table(name), table)


def test_pandas_is_not_imported(tmp_path: Path, sample_path: Path) -> None:
    """pyarrow does so in several of its functions: a third of a second of each command."""
    program = (
        "import sys; from kvtools.cli.main import main\n"
        "for name in ('arrow', 'parquet'):\n"
        "    assert main(['migrate', 'sample', name, '--to', name, '--table', 'ads/emb', '--verify']) == 0\n"
        "    assert main(['stats', name]) == 0\n"
        "sys.exit('pandas was imported' if 'pandas' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_arrow_numbers_are_those_of_numpy() -> None:
    for dtype in ("int8", "uint16", "int32", "uint64", "float16", "float32", "float64"):
        numbers = np.arange(9).astype(dtype)
        made = arrow_columns.arrow_numbers(numbers, pa.from_numpy_dtype(numbers.dtype))
        assert made.equals(pa.array(numbers))
        for piece in (made, made.slice(2, 5), made.slice(9), pa.nulls(0, made.type)):
            np.testing.assert_array_equal(arrow_columns.numpy_numbers(piece), piece.to_numpy(zero_copy_only=False))
            assert arrow_columns.numpy_numbers(piece).dtype == dtype
    with pytest.raises(ValueError, match="got float32 numbers, expected double"):
        arrow_columns.arrow_numbers(np.zeros(3, np.float32), pa.float64())


@pytest.mark.parametrize("dialect", FORMATS)
@pytest.mark.parametrize("suffix", [True, False])
def test_many_parts_become_few_and_few_become_many(tmp_path: Path, dialect: str, suffix: bool) -> None:
    table = round_trip.table("emb", 500, parts=3)
    expected = rows_by_key(table)
    for parts in (1, 2, 7):
        for memory in (1 << 30, 1 << 10):  # with little memory, batches are written before they are full
            path = tmp_path / f"{parts}-{memory}{f'.{dialect}' if suffix else ''}"
            write_tables([table], path, dialect, parts=parts, options=WriteOptions(memory=memory))
            got = open_checkpoint(path).table("emb")
            assert got.parts == parts
            assert rows_by_key(got) == expected


def rows_by_key(table: Any) -> dict[int, bytes]:
    return {
        int(key): value.tobytes()
        for chunk in table.chunks()
        for key, value in zip(chunk.keys, chunk.values, strict=True)
    }


@pytest.mark.parametrize("dialect", FORMATS)
def test_one_file_holds_one_table(tmp_path: Path, dialect: str) -> None:
    tables = [round_trip.table("a"), round_trip.table("b")]
    with pytest.raises(UsageError, match=r"got 2 tables, expected one .* name a folder"):
        write_tables(tables, tmp_path / f"a.{dialect}", dialect)
    with pytest.raises(UsageError, match="got 0 tables"):
        write_tables([], tmp_path / f"a.{dialect}", dialect)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dialect", FORMATS)
def test_force_replaces_our_folders_only(tmp_path: Path, dialect: str) -> None:
    out = tmp_path / "out"
    write([round_trip.table("a")], out, dialect)
    with pytest.raises(OutputError, match="exists"):
        write([round_trip.table("b")], out, dialect)
    write([round_trip.table("b")], out, dialect, force=True)
    assert list(open_checkpoint(out).tables) == ["b"]
    (out / ".kvtools").unlink()
    with pytest.raises(OutputError, match="does not replace it"):
        write([round_trip.table("c")], out, dialect, force=True)


@pytest.mark.parametrize("dialect", FORMATS)
def test_tables_and_their_shards_are_pickled(tmp_path: Path, dialect: str) -> None:
    table = round_trip.table(parts=3)
    got = write_and_open([table], tmp_path / "a", dialect).table("ads/emb")
    check_same(pickle.loads(pickle.dumps(got)), table)


@pytest.mark.parametrize("name", ["sample.parquet", "sample.arrow", "sample_parquet", "sample_arrow"])
def test_sample_of_this_layout_stays_readable(name: str) -> None:
    check_same(open_checkpoint(DATA / name).table("ads/emb"), round_trip.table("ads/emb", 30, parts=2))


@pytest.mark.parametrize("dialect", FORMATS)
def test_extras_too_large_for_one_file_ask_for_a_folder(
    tmp_path: Path, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtools.dialects.arrow_output._LARGEST_EXTRAS", 100)
    with pytest.raises(BadInputError, match="name a folder"):
        write([round_trip.table(dim=40)], tmp_path / f"a.{dialect}", dialect)
    write([round_trip.table(dim=40)], tmp_path / "a", dialect)


@pytest.mark.parametrize("dialect", FORMATS)
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_a_damaged_byte_is_found_or_changes_nothing(tmp_path: Path, dialect: str, compression: str) -> None:
    table = round_trip.table("emb", 200, parts=2)
    path = tmp_path / f"a.{dialect}"
    write([table], path, dialect, compression=compression, batch_rows=60)
    whole = path.read_bytes()
    values = next(table.chunks(part=0)).values.tobytes()
    spots = sorted(random.Random(0).sample(range(len(whole)), 60))
    if compression == "none":  # in the middle of the columns, beyond doubt
        start = whole.index(values[: 1 << 6])
        spots += [start, start + 20, start + 63]
    found = 0
    for at in spots:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        try:
            got = open_checkpoint(path)
            same = list(got.tables) == ["emb"] and rows_by_key(got.table("emb")) == rows_by_key(table)
        except KvtoolsError:
            found += 1
            continue
        assert same or any("left aside" in note for t in got.tables.values() for note in t.schema.notes)
        assert not start <= at < start + 64 if compression == "none" else True
    assert found > len(spots) // 2


@pytest.mark.parametrize("dialect", FORMATS)
def test_a_file_cut_anywhere_is_an_error(tmp_path: Path, dialect: str) -> None:
    path = tmp_path / f"a.{dialect}"
    write([round_trip.table("emb", 64)], path, dialect)
    whole = path.read_bytes()
    for size in [8, 12, 40, *range(200, len(whole), len(whole) // 13), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(CorruptFileError, match="truncated or damaged"):
            list(open_checkpoint(path).table("emb").chunks())
    path.write_bytes(b"")
    with pytest.raises(BadInputError):
        open_checkpoint(path)


@pytest.mark.parametrize("dialect", FORMATS)
@pytest.mark.parametrize("described", [True, False])
def test_column_names_that_are_no_text_are_an_error(tmp_path: Path, dialect: str, described: bool) -> None:
    path = tmp_path / f"a.{dialect}"
    if described:
        write([round_trip.table("emb", 20)], path, dialect)
    else:
        write_stranger(pa.table({"key": pa.array(KEYS), "version": lists(VALUES)}), path)
    path.write_bytes(path.read_bytes().replace(b"version", b"v\xecrsion"))
    with pytest.raises(CorruptFileError):
        open_checkpoint(path)


@pytest.mark.parametrize("dialect", FORMATS)
def test_files_of_a_table_that_do_not_fit_together(tmp_path: Path, dialect: str) -> None:
    def folder(change: Callable[[Path], None], name: str) -> Path:
        out = tmp_path / name
        write([round_trip.table("emb", 90, parts=3)], out, dialect)
        change(out / "emb")
        return out

    part = f"part-00001.{dialect}"
    missing = folder(lambda emb: (emb / part).unlink(), "missing")
    with pytest.raises(BadInputError, match="part 1 of 3 is missing"):
        open_checkpoint(missing)
    assert list(open_checkpoint(missing, OpenOptions(lenient=True)).broken) == ["emb"]
    twice = folder(lambda emb: shutil.copy(emb / part, emb / f"other.{dialect}"), "twice")
    with pytest.raises(BadInputError, match="part 1 of 3 is there twice"):
        open_checkpoint(twice)

    def mix(emb: Path) -> None:
        write([round_trip.table("emb", 91, parts=3)], tmp_path / "newer", dialect)
        shutil.copy(tmp_path / "newer" / "emb" / part, emb / part)

    with pytest.raises(CorruptFileError, match="of different tables or times"):
        open_checkpoint(folder(mix, "mixed"))
    no_extras = folder(lambda emb: shutil.rmtree(emb / "_extras"), "extras")
    with pytest.raises(BadInputError, match="copy every file"):
        open_checkpoint(no_extras).table("emb").extra("blacklist")


@pytest.mark.parametrize("dialect", FORMATS)
def test_a_file_that_another_program_rewrote_is_read_by_its_columns(tmp_path: Path, dialect: str) -> None:
    table = round_trip.table("emb", 30)
    path = tmp_path / f"emb.{dialect}"
    write([table], path, dialect)
    whole = pq.read_table(path) if dialect == "parquet" else pa.ipc.open_file(str(path)).read_all()
    write_stranger(whole.slice(10), path)  # the description goes along, and is true no longer
    got = open_checkpoint(path).table("emb")
    assert got.rows == 20
    assert got.all_keys().tolist() == table.all_keys()[10:].tolist()
    assert set(got.slots) == {"Adam.m", "beta/power", ""}
    assert got.schema.version_dtype == "int64"
    assert any("left aside" in note for note in got.schema.notes)


RNG = np.random.default_rng(0)
KEYS = RNG.integers(-99, 99, 20)
VALUES = RNG.normal(size=(20, 3)).astype(np.float32)


@pytest.mark.parametrize("dialect", FORMATS)
@pytest.mark.parametrize(
    "columns",
    [
        {"key": pa.array(KEYS), "value": lists(VALUES)},
        {"id": pa.array(KEYS), "other": pa.array(KEYS), "emb": pa.array(VALUES.tolist(), pa.list_(pa.float32()))},
        {
            "n": pa.array(KEYS),
            "v": pa.array(VALUES.tolist(), pa.large_list(pa.float32())),
            "text": pa.array(["a"] * 20),
        },
        {
            "Key": pa.array(KEYS),
            "c1": pa.array(VALUES[:, 1]),
            "c0": pa.array(VALUES[:, 0]),
            "c2": pa.array(VALUES[:, 2]),
        },
        {"key": pa.array(KEYS), "x": pa.array(VALUES[:, 0]), "y": pa.array(VALUES[:, 1]), "z": pa.array(VALUES[:, 2])},
    ],
    ids=lambda columns: "-".join(columns),
)
def test_columns_of_other_programs(tmp_path: Path, dialect: str, columns: dict[str, pa.Array]) -> None:
    write_stranger(pa.table(columns), tmp_path / f"emb.{dialect}")
    table = open_checkpoint(tmp_path / f"emb.{dialect}").table("emb")
    check_same(table, ArrayTable("emb", KEYS, VALUES))
    assert any("keys are column" in note for note in table.schema.notes)
    assert any("values are" in note for note in table.schema.notes)


@pytest.mark.parametrize("dialect", FORMATS)
@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": pa.array(KEYS), "b": pa.array(KEYS), "v": lists(VALUES)}, "which column is the keys"),
        ({"v": lists(VALUES)}, "which column is the keys"),
        (
            {"ID": pa.array(["a"] * 20), "age": pa.array(KEYS), "v": lists(VALUES)},
            "which column is the keys: got ID string",
        ),
        ({"key": pa.array(KEYS), "c0": pa.array(KEYS), "c1": pa.array(VALUES[:, 0])}, "'c0' is int64, .* as 'c1' is"),
        ({"key": pa.array(KEYS), "v": lists(VALUES), "w": lists(VALUES)}, "which column is the values"),
        ({"key": pa.array(KEYS), "text": pa.array(["a"] * 20)}, "there are no values"),
        ({"key": pa.array(KEYS), "value": lists(VALUES.astype(np.uint8))}, "expected lists of float32"),
        ({"key": pa.array([None, *KEYS[1:].tolist()]), "value": lists(VALUES)}, "got 1 nulls"),
        ({"key": pa.array(KEYS), "value": pa.array([None, *VALUES.tolist()[1:]], pa.list_(pa.float32(), 3))}, "nulls"),
        ({"key": pa.array(KEYS), "value": pa.array([[1.0, None]] * 20, pa.list_(pa.float32()))}, "got 20 nulls"),
        (
            {"key": pa.array(KEYS), "value": pa.array([[1.0, 2.0]] * 19 + [[1.0]], pa.list_(pa.float32()))},
            "a list of 1 numbers, expected 2",
        ),
        ({"key": pa.array(KEYS[:0]), "value": pa.array([], pa.list_(pa.float32()))}, "give it with --dim"),
    ],
    ids=range(12),
)
def test_columns_that_make_no_table(tmp_path: Path, dialect: str, columns: dict[str, pa.Array], message: str) -> None:
    write_stranger(pa.table(columns), tmp_path / f"emb.{dialect}")
    with pytest.raises(BadInputError, match=message):
        list(open_checkpoint(tmp_path / f"emb.{dialect}").table("emb").chunks())


@pytest.mark.parametrize("dialect", FORMATS)
def test_counters_slots_and_small_integer_keys_of_strangers(tmp_path: Path, dialect: str) -> None:
    columns = {
        "keys": pa.array(np.arange(20, dtype=np.int16)),
        "values": lists(VALUES),
        "momentum": lists(VALUES * 2),
        "count": pa.array(np.arange(20, dtype=np.uint32)),
        "version": pa.array(KEYS),
        "when": pa.array(["x"] * 20),
    }
    write_stranger(pa.table(columns), tmp_path / f"a.{dialect}")
    table = open_checkpoint(tmp_path / f"a.{dialect}").table("a")
    expected = ArrayTable(
        "a", np.arange(20), VALUES, slots={"momentum": VALUES * 2}, freqs=np.arange(20, dtype=np.uint32), versions=KEYS
    )
    check_same(table, expected)
    plain = pa.table({"id": columns["version"], "x": VALUES[:, 0], "y": VALUES[:, 1], "age": columns["keys"]})
    write_stranger(plain, tmp_path / f"b.{dialect}")
    check_same(open_checkpoint(tmp_path / f"b.{dialect}").table("b"), ArrayTable("b", KEYS, VALUES[:, :2]))
    notes = "; ".join(table.schema.notes)
    assert "int16 and read as int64" in notes and "as slots: momentum" in notes and "left aside: when" in notes


@pytest.mark.parametrize("dialect", FORMATS)
def test_an_empty_table_of_lists_takes_its_width_from_the_options(tmp_path: Path, dialect: str) -> None:
    columns = {"key": pa.array(KEYS[:0]), "value": pa.array([], pa.list_(pa.float32()))}
    write_stranger(pa.table(columns), tmp_path / f"a.{dialect}")
    table = open_checkpoint(tmp_path / f"a.{dialect}", OpenOptions(dim=5)).table("a")
    assert (table.rows, table.dim) == (0, 5)


@pytest.mark.parametrize("dialect", FORMATS)
def test_options_that_contradict_the_columns_are_refused(tmp_path: Path, dialect: str) -> None:
    write_stranger(pa.table({"key": pa.array(KEYS), "value": lists(VALUES)}), tmp_path / f"a.{dialect}")
    for options in (OpenOptions(dim=4), OpenOptions(key_dtype="int32"), OpenOptions(value_dtype="float16")):
        with pytest.raises(UsageError, match="leave the option out"):
            open_checkpoint(tmp_path / f"a.{dialect}", options)


@pytest.mark.parametrize("dialect", FORMATS)
def test_folders_of_other_programs(tmp_path: Path, dialect: str) -> None:
    whole = pa.table({"key": pa.array(KEYS), "value": lists(VALUES)})
    for name in ("item/part-0", "item/part-1", "_ignored/part-0", "user/day=1/data_7", "user/day=2/data_9", "loose"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_stranger(whole, tmp_path / f"{name}.{dialect}")
    tables = open_checkpoint(tmp_path).tables
    assert {name: table.schema.part_rows for name, table in tables.items()} == {
        "loose": (20,),
        "item": (20, 20),
        "user": (20, 20),
    }
    write_stranger(whole.rename_columns(["key", "vector"]), tmp_path / "item" / f"part-1.{dialect}")
    with pytest.raises(BadInputError, match="the same in all files"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("dialect", FORMATS)
def test_a_folder_of_other_things_is_no_table(tmp_path: Path, dialect: str) -> None:
    frame = pa.table({"id": [1, 2], "embedding": lists(np.ones((2, 3), np.float32))})
    (tmp_path / "exports" / "old").mkdir(parents=True)
    write_stranger(frame, tmp_path / "exports" / "old" / f"rows.{dialect}")
    for hidden in (".crc", "_SUCCESS", "_metadata"):
        (tmp_path / "exports" / hidden).touch()
    (table,) = open_checkpoint(tmp_path).select([])
    assert f"its rows are those of 'exports/old/rows.{dialect}'" in table.schema.notes
    for name in ("notes.txt", "model.py"):
        (tmp_path / name).touch()
    with pytest.raises(
        BadInputError, match=rf"'exports/old/rows.{dialect}'\) among others \('model.py', 'notes.txt'\)"
    ) as e:
        open_checkpoint(tmp_path, OpenOptions(lenient=True))
    assert f"say --dialect {dialect}" in str(e.value)
    (table,) = open_checkpoint(tmp_path, OpenOptions(dialect)).select([])
    assert table.rows == 2
    (tmp_path / "ours").mkdir()
    write([round_trip.table("emb")], tmp_path / "ours" / f"x.{dialect}", dialect)
    assert f"its rows are those of 'x.{dialect}'" in open_checkpoint(tmp_path / "ours").table("emb").schema.notes
    write([round_trip.table("emb")], tmp_path / "whole", dialect)
    assert not open_checkpoint(tmp_path / "whole").table("emb").schema.notes


@pytest.mark.parametrize("dialect", FORMATS)
def test_unknown_compressions_and_levels_are_usage_errors(tmp_path: Path, dialect: str) -> None:
    for options in (
        WriteOptions("lzf"),
        WriteOptions("zstd", 99),
        WriteOptions("lz4", 1),
        WriteOptions(compression_level=3),
    ):
        with pytest.raises(UsageError, match="expected"):
            write_tables([round_trip.table()], tmp_path / "a", dialect, options=options)
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_shards_are_written_by_other_processes(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    table = round_trip.table("emb", 500, parts=3)
    with pytest.MonkeyPatch.context() as elsewhere:
        elsewhere.chdir("/")  # Ray would prefer the sources here to the installed package
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        for dialect in ("hdf5", *FORMATS):
            write_tables([table], tmp_path / dialect, dialect, workers=2, engine="ray")
            check_same(open_checkpoint(tmp_path / dialect).table("emb"), table)
        with pytest.raises(UsageError, match="leave --engine out"):
            write_tables([table], tmp_path / "emb.parquet", "parquet", workers=2, engine="ray")
    finally:
        ray.shutdown()


def test_a_checkpoint_with_such_files_beside_it_stays_one(tmp_path: Path, sample_path: Path) -> None:
    for dialect in FORMATS:
        write([round_trip.table("emb")], sample_path / f"emb.{dialect}", dialect)
    assert open_checkpoint(sample_path).dialect == "tfplugin"
    for file in sample_path.glob("*.index"):
        file.unlink()
    (sample_path / "checkpoint").unlink()
    with pytest.raises(BadInputError, match=r"among others \('emb.arrow', 'model.ckpt-7.data-00000-of-00001'\)"):
        open_checkpoint(sample_path)
    for file in ("emb.arrow", "model.ckpt-7.data-00000-of-00001"):
        (sample_path / file).unlink()
    assert open_checkpoint(sample_path).dialect == "parquet"


def test_more_parts_than_files_may_be_open(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(list(Path("/proc/self/fd").iterdir())) + 300
    if limits[1] < few + 500:
        pytest.skip(f"this system allows {limits[1]} open files in all")
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    try:
        table = round_trip.table("emb", 3000, bare=True)
        write_tables([table], tmp_path / "out", "arrow", parts=600)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert rows_by_key(open_checkpoint(tmp_path / "out").table("emb")) == rows_by_key(table)


def test_a_file_that_refuses_rows_tells_all_threads_why(tmp_path: Path) -> None:
    class Full(arrow_output.BatchFile):
        def __init__(self) -> None:
            self.closed = False

        def write(self, batch: Any) -> Any:
            if self.closed:
                raise ValueError("Operation on closed file")
            self.closed = True
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self, contents: str) -> None: ...

    schema = kvtools.table_from_arrays("emb", np.arange(8), np.ones((8, 2), np.float32), parts=2).schema
    form = arrow_output.BatchFormat("Full", ".full", 1, lambda path, schema, options: Full(), WriteOptions())
    table = arrow_output.FileTable(form, str(tmp_path / "a.full"), schema)
    for part in range(2):
        shard = table.shard()
        with pytest.raises(OSError, match="No space left on device"):
            shard.write(part, 0, Chunk(np.arange(4), np.ones((4, 2), np.float32)))
