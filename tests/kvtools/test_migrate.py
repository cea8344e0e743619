from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtools
from kvtools.array_table import ArrayTable
from kvtools.dialects.bundle import reader
from kvtools.dialects.bundle_output import plain_columns
from kvtools.dialects.chunk import Chunk, Columns
from kvtools.dialects.detect import dialect_for, dialect_named, open_checkpoint, writable_dialects
from kvtools.dialects.dialect import Dialect
from kvtools.dialects.interface import TableReader
from kvtools.dialects.object_graph import OBJECT_GRAPH
from kvtools.dialects.schema import TableSchema, VariableSchema
from kvtools.dialects.tfplugin import DIALECT, Writer
from kvtools.dialects.writing import WriteOptions
from kvtools.diff import compare_tables
from kvtools.errors import BadInputError, CheckFailedError, CorruptFileError, OutputError, ScratchError, UsageError
from kvtools.migrate import write_tables
from kvtools.partition import owners
from kvtools.row_mask import RowMask
from kvtools.table_view import MaskedTable, TableView


def table(name: str = "emb", n: int = 20, *, parts: int = 1, **more: Any) -> TableReader:
    return kvtools.table_from_arrays(
        name,
        np.arange(-n // 2, n - n // 2),
        np.arange(3 * n, dtype=np.float32).reshape(n, 3),
        slots={"Adam.m": np.ones((n, 3), np.float32)},
        parts=parts,
        **more,
    )


def holding(**changes: Any) -> Dialect:
    """The layout of tfplugin, as if it held less."""
    return dataclasses.replace(DIALECT, holds=dataclasses.replace(DIALECT.holds, **changes))


def test_rows_that_a_view_keeps_are_not_called_all_of_the_source(tmp_path: Path, sample_path: Path) -> None:
    table = open_checkpoint(sample_path).table("ads/emb")
    mask = RowMask(table.schema.part_rows, memory=1 << 20, kept=True)
    mask.clear(np.array([0, 3]))
    account = write_tables([MaskedTable(table, mask)], tmp_path / "out", "tfplugin")
    assert account.tables[0].checks[0] == "as many rows read and written as are kept of the source"
    dry = write_tables([MaskedTable(table, mask)], tmp_path / "dry", "tfplugin", options=WriteOptions(dry_run=True))
    assert dry.tables[0].checks[0] == "as many rows read as are kept of the source"


def test_an_object_graph_that_does_not_go_along_is_told(tmp_path: Path, sample_path: Path) -> None:
    checkpoint = open_checkpoint(sample_path)
    graph = VariableSchema(OBJECT_GRAPH, "string", (), 8)
    with_graph = dataclasses.replace(
        checkpoint, bookkeeping=(graph,), read_variable=lambda name: iter([np.array(b"\x0a\x00", object)])
    )
    no_variables = dataclasses.replace(with_graph, variables=())
    for to, told in (("hdf5", 1), ("tfplugin", 0)):
        account = write_tables(checkpoint.select([]), tmp_path / to, to, beside=no_variables)
        assert account.lossless and len(account.notes) == told


def test_the_account_says_what_was_done(tmp_path: Path, sample_path: Path) -> None:
    checkpoint = open_checkpoint(sample_path)
    account = write_tables(checkpoint.select([]), tmp_path / "out", "tfplugin", beside=checkpoint)
    assert account.lossless and account.variables == 2
    assert [(one.name, one.rows_read, one.rows_written, one.parts) for one in account.tables] == [
        ("ads/emb", 11, 11, 3),
        ("empty_emb", 0, 0, 1),
        ("user_emb", 5, 5, 1),
    ]
    assert account.tables[0].checks == (
        "as many rows read and written as the source says it has",
        "CRC-32C of every column read",
    )
    written = open_checkpoint(tmp_path / "out")
    assert written.variables == checkpoint.variables
    assert all(compare_tables(one, written.table(one.schema.name)).same for one in checkpoint.tables.values())


@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("workers", [1, 4])
def test_parts_are_those_of_the_rule(tmp_path: Path, sample_path: Path, parts: int, workers: int) -> None:
    tables = open_checkpoint(sample_path).select([])
    account = write_tables(tables, tmp_path / "out", "tfplugin", parts=parts, workers=workers, verify=True)
    assert all(
        one.parts == parts and "every row read again and compared with the source, by key" in one.checks
        for one in account.tables
    )
    for written in open_checkpoint(tmp_path / "out").tables.values():
        assert written.parts == parts
        for part in range(parts):
            assert all((owners(chunk.keys, parts, "floor_mod") == part).all() for chunk in written.chunks(part=part))


def test_strict_refuses_what_would_be_lost(tmp_path: Path, sample_path: Path) -> None:
    checkpoint = open_checkpoint(sample_path)
    target = holding(slots=False, freq_dtypes=(), variables=False)
    for dry_run in (True, False):
        options = WriteOptions(dry_run=dry_run)
        with pytest.raises(CheckFailedError) as raised:
            write_tables(
                checkpoint.select(["ads/emb"]),
                tmp_path / "out",
                target,
                beside=checkpoint,
                options=options,
                strict=True,
            )
        message = str(raised.value)
        assert "2 dense variables, 32 bytes" in message
        assert "table 'ads/emb': optimizer slots Adam.m, Adam.v" in message and "frequencies" in message
    assert [file.name for file in tmp_path.iterdir()] == ["sample"]


@pytest.mark.parametrize("rows", [0, 5])
def test_a_dry_run_tells_what_goes_by_another_name(tmp_path: Path, rows: int) -> None:
    keys, values = np.arange(rows), np.ones((rows, 4), np.float32)
    one = ArrayTable("emb", keys, values, slots={"Adam": values, "rowwise": values[:, :1]})
    below = ArrayTable("emb/item", keys[:2], values[:2])  # its rows alone tell that it is no slot of 'emb'
    tables, told = [one, below][: 1 + bool(rows)], []
    for dry_run in (True, False):
        account = write_tables(tables, tmp_path / "out", "tfplus", options=WriteOptions(dry_run=dry_run))
        told.append([(table.changes, table.losses) for table in account.tables])
    assert told[0] == told[1]
    assert told[0][0][0][0].startswith("slots rowwise go by other names there, or are tables of their own")
    for dry_run in (True, False):
        with pytest.raises(BadInputError, match="it would read it back under another name; nothing was written"):
            write_tables(
                [ArrayTable("emb/part_0", keys, values)],
                tmp_path / "other",
                "tfplus",
                options=WriteOptions(dry_run=dry_run),
            )


def test_a_dry_run_refuses_a_dense_variable_of_a_type_that_the_dialect_has_not(
    tmp_path: Path, sample_path: Path
) -> None:
    variable = VariableSchema("word", "string", (), 1)
    words = lambda _: iter([np.array(b"a", object)])  # noqa: E731
    beside = dataclasses.replace(
        open_checkpoint(sample_path), variables=(variable,), bookkeeping=(), read_variable=words
    )
    for dry_run in (True, False):
        options = WriteOptions(dry_run=dry_run)
        for to in ("torch", "huggingface"):
            said = (
                f"writing dense variable 'word' as {to}: it is string.*or the tables alone, `kvtools migrate .*--table"
            )
            with pytest.raises(BadInputError, match=said):
                write_tables([table()], tmp_path / "out", to, beside=beside, options=options)
        write_tables([table()], tmp_path / f"out{dry_run}.h5", "hdf5", beside=beside, options=options)


def test_frequencies_that_a_type_cuts_are_counted(tmp_path: Path) -> None:
    freqs = np.arange(20) * 1000
    within = write_tables([table(freqs=freqs)], tmp_path / "a", "tfplugin")
    assert within.lossless and within.tables[0].changes == ("frequencies were int64, are uint32",)
    freqs[3], freqs[5] = -1, 2**32
    cut = write_tables([table(freqs=freqs)], tmp_path / "b", "tfplugin", verify=True)
    assert cut.tables[0].losses == ("2 frequencies outside uint32 were written as the nearest that it has",)
    (chunk,) = open_checkpoint(tmp_path / "b").table("emb").chunks()
    assert chunk.freqs is not None and chunk.freqs[[3, 5]].tolist() == [0, 2**32 - 1]
    with pytest.raises(CheckFailedError, match="2 frequencies outside uint32"):
        write_tables([table(freqs=freqs)], tmp_path / "c", "tfplugin", strict=True)
    assert not list(tmp_path.glob("c*"))


REPEATED = "3 rows whose keys stand again in a later row: all go along, and most readers take the last one; "


@pytest.mark.parametrize("memory", [1 << 30, 64])
@pytest.mark.parametrize("parts", [1, 3])
def test_rows_of_a_key_that_comes_again_are_counted(tmp_path: Path, parts: int, memory: int) -> None:
    keys = np.array([7, 1, 7, 2, 1, 7])
    source = ArrayTable("emb", keys, np.arange(6, dtype=np.float32)[:, None], part_rows=(4, 2))
    for dry_run in (True, False):
        options = WriteOptions(dry_run=dry_run, memory=memory)
        account = write_tables([source], tmp_path / "a", "tfplugin", parts=parts, options=options)
        (told,) = account.tables
        assert (told.repeated_keys, told.rows_written, account.lossless) == (3, 6, True)
        assert len(told.notes) == 1 and told.notes[0].startswith(REPEATED)
    again = write_tables(open_checkpoint(tmp_path / "a").select([]), tmp_path / "b.kvsnap", "snapshot")
    assert again.tables[0].repeated_keys == 3 and not again.tables[0].notes and again.tables[0].losses
    once = write_tables(open_checkpoint(tmp_path / "b.kvsnap").select([]), tmp_path / "c", "tfplugin")
    assert once.tables[0].repeated_keys == 0 and not once.tables[0].notes
    rows = kvtools.open(tmp_path / "c").table("emb").to_numpy()
    assert rows.values is not None
    assert dict(zip(rows.keys.tolist(), rows.values[:, 0].tolist(), strict=True)) == {7: 5.0, 2: 3.0, 1: 4.0}


def test_without_room_to_look_for_keys_that_come_again_the_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> int:
        raise ScratchError("writing temporary files in '/tmp': No space left on device; make room there")

    monkeypatch.setattr("kvtools.migrate.count_repeated", full)
    account = write_tables([table()], tmp_path / "a", "tfplugin")
    assert (
        "is not known: writing temporary files" in account.tables[0].notes[0] and account.tables[0].rows_written == 20
    )


def test_versions_of_days_become_seconds(tmp_path: Path) -> None:
    source = table(versions=np.full(20, 19_000, np.int32), version_unit="days")
    account = write_tables([source], tmp_path / "a", "tfplugin", verify=True)
    assert account.tables[0].changes == ("versions were days, are seconds",)
    (chunk,) = open_checkpoint(tmp_path / "a").table("emb").chunks()
    assert chunk.versions is not None and set(chunk.versions.tolist()) == {19_000 * 86_400}


@pytest.mark.parametrize("day", [24_856, 2**64 // 86_400])
def test_days_whose_seconds_do_not_fit_are_an_error(tmp_path: Path, day: int) -> None:
    """Also where they would not fit 64 bits."""
    with pytest.raises(BadInputError, match=f"version {day * 86_400} does not fit int32"):
        write_tables([table(n=2, versions=np.array([1, day]), version_unit="days")], tmp_path / "a", "tfra")


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_key_that_does_not_fit_is_named_and_nothing_is_written(tmp_path: Path, workers: int, parts: int) -> None:
    keys = np.array([1, 2, 2**31, 5])
    source = kvtools.table_from_arrays("emb", keys, np.zeros((4, 1), np.float32), parts=parts)
    with pytest.raises(BadInputError, match=r"table 'emb'.* key 2147483648 does not fit int32, expected -2147483648"):
        write_tables([source], tmp_path / "a", holding(key_dtypes=("int32",)), workers=workers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dialect", ["tfra_files", "tfplugin", "parquet"])
@pytest.mark.parametrize(
    "values", [None, np.ones((2, 2), np.float32), np.ones((3, 1), np.float32)], ids=["none", "few", "narrow"]
)
def test_columns_of_a_reader_are_of_the_rows_of_its_keys(tmp_path: Path, dialect: str, values: Any) -> None:
    class Reader(TableView):
        def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
            yield Chunk(np.arange(3), values)

    whole = kvtools.table_from_arrays("emb", np.arange(3), np.ones((3, 2), np.float32))
    with pytest.raises(BadInputError, match=r"reading table 'emb': got values .* with 3 keys, expected \[3, 2\]"):
        write_tables([Reader(whole, whole.schema)], tmp_path / "a", dialect)
    assert not [*tmp_path.iterdir()]


def test_usage(tmp_path: Path, sample_path: Path) -> None:
    one = table()
    with pytest.raises(UsageError, match="two tables are called 'emb'; rename one"):
        write_tables([one, table()], tmp_path / "a", "tfplugin")
    with pytest.raises(UsageError, match="got 0 parts"):
        write_tables([one], tmp_path / "a", "tfplugin", parts=0)
    with pytest.raises(UsageError, match=r"reads savedmodel and does not write it; choose --to from .*tfplugin"):
        write_tables([one], tmp_path / "a", "savedmodel")
    with pytest.raises(UsageError, match="there is none; expected one of"):
        write_tables([one], tmp_path / "a", "nope")
    with pytest.raises(UsageError, match="got 0 workers"):
        write_tables([one], tmp_path / "a", "tfplugin", workers=0)
    with pytest.raises(
        UsageError, match=r"got something for table 'enb', expected one of those written: 'emb'; did you"
    ):
        write_tables([one], tmp_path / "a", "tfplugin", parts={"enb": 2})
    with pytest.raises(UsageError, match="got something for table 'enb'"):
        write_tables([one], tmp_path / "a", "snapshot", options=WriteOptions(rows_as={"enb": "int8"}))
    for no_tables in (one, {"emb": one}, kvtools.open(sample_path), [one, one.take([0])]):
        with pytest.raises(UsageError, match=r"expected a list of tables; those of a checkpoint are checkpoint.select"):
            write_tables(no_tables, tmp_path / "a", "tfplugin")  # type: ignore[arg-type]
    for options in ({"batch_rows": 0}, {"memory": -1}):
        with pytest.raises(UsageError, match="making options of a writer: got"):
            WriteOptions(**options)
    with pytest.raises(OutputError, match="is no folder"):
        write_tables([one], sample_path / "model.ckpt-7.index" / "a", "tfplugin")
    assert [file.name for file in tmp_path.iterdir()] == ["sample"]
    assert write_tables([one], tmp_path / "a", "tfplugin", parts=np.int64(2)).tables[0].parts == 2  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["model.ckpt-7", "tables", "a.b/c", "x.zip", "ftp://host/a"])
def test_a_name_that_tells_no_dialect(name: str) -> None:
    with pytest.raises(UsageError, match=r"its name does not tell the dialect; say --to one of .*tfplugin"):
        dialect_for(name)


class Liar(Writer):
    """Writes a value that it was not given."""

    def table(self, schema: Any, keys: Any) -> Any:
        writer = super().table(schema, keys)
        writer._encode = lambda chunk: _lie(chunk)
        return writer


def _lie(chunk: Chunk) -> dict[str, np.ndarray]:
    columns = dict(plain_columns(chunk))
    columns["values"] = columns["values"].copy()
    columns["values"][-1, -1] += 1
    return columns


def test_verify_finds_a_row_that_differs_and_puts_nothing_in_place(tmp_path: Path) -> None:
    with pytest.raises(CheckFailedError, match=r"verifying table 'emb'.*: 1 rows differ.*nothing was put there"):
        write_tables([table()], tmp_path / "a", dataclasses.replace(DIALECT, write=Liar), verify=True)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_source_leaves_the_old_output(tmp_path: Path, sample_path: Path) -> None:
    write_tables([table()], tmp_path / "out", "tfplugin")
    before = {file.name: file.read_bytes() for file in tmp_path.glob("out*")}
    data = sample_path / "model.ckpt-7.data-00000-of-00001"
    damaged = bytearray(data.read_bytes())
    damaged[700] ^= 1
    data.write_bytes(bytes(damaged))
    with pytest.raises(CorruptFileError, match="checksum mismatch"):
        checkpoint = open_checkpoint(sample_path)
        write_tables(
            checkpoint.select([]), tmp_path / "out", "tfplugin", beside=checkpoint, options=WriteOptions(force=True)
        )
    assert {file.name: file.read_bytes() for file in tmp_path.glob("out*")} == before
    assert not list(tmp_path.glob(".out*"))


SLOW = """
import os, sys, time
from kvtools.dialects.column_table import ColumnTable
read = ColumnTable.read_part
def slowly(self, part, columns, rows, verify):
    for chunk in read(self, part, columns, 1, verify):
        if columns.values:
            os.write(1, b"reading\\n")
            time.sleep(float(sys.argv[1]))
        yield chunk
ColumnTable.read_part = slowly
from kvtools.cli.main import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def begin(tmp_path: Path, sample_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `kvtools migrate sample out`, slowed down, and returns when it has begun to read."""
    started = []

    def start(pause: float, *more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", SLOW, str(pause), "migrate", "sample", "out", "--to", "tfplugin", *more],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "reading\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


Begin = Callable[..., "subprocess.Popen[str]"]


def test_a_killed_run_leaves_nothing_that_the_next_one_minds(tmp_path: Path, begin: Begin) -> None:
    process = begin(60)
    leftovers = list(tmp_path.glob(".out.kvtools-*"))
    assert len(leftovers) == 1 and not list(tmp_path.glob("out*"))
    process.kill()
    process.communicate()
    assert list(tmp_path.glob(".out.kvtools-*")) == leftovers and not list(tmp_path.glob("out*"))
    done = subprocess.run(
        [sys.executable, "-m", "kvtools.cli.main", "migrate", "sample", "out", "--to", "tfplugin"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.data-00000-of-00001", "out.index", "sample"]
    assert list(open_checkpoint(tmp_path / "out").tables) == ["ads/emb", "empty_emb", "user_emb"]


def test_a_run_beside_another_to_the_same_place_leaves_its_files_alone(tmp_path: Path, begin: Begin) -> None:
    begin(60)
    write_tables([table()], tmp_path / "out", "tfplugin")
    assert len(list(tmp_path.glob(".out.kvtools-*"))) == 1


def test_a_name_that_would_be_read_back_as_another_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"table 'emb/part_0'.* under another name; nothing was written, rename it"):
        write_tables([table("emb/part_0")], tmp_path / "a", "tfplus")
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_an_engine_writes_otherwise_is_told(tmp_path: Path) -> None:
    class Flattening(Writer):
        def table(self, schema: TableSchema, keys: Any) -> Any:
            return super().table(dataclasses.replace(schema, name=schema.name.replace("/", "_")), keys)

    flat = dataclasses.replace(DIALECT, write=Flattening)
    account = write_tables([table("scope/emb")], tmp_path / "a", flat, verify=True)
    assert account.tables[0].changes == ("its name is 'scope_emb' there: the dialect has no '/' in names",)
    assert list(kvtools.open(tmp_path / "a").tables) == ["scope_emb"]


def test_slots_that_would_be_read_back_as_tables_are_no_fault_of_the_disk(tmp_path: Path) -> None:
    source = kvtools.table_from_arrays(
        "emb", np.arange(3), np.ones((3, 2), np.float32), slots={"Adam.v": np.ones((3, 1), np.float32)}
    )
    assert "slots Adam.v go by other names" in write_tables([source], tmp_path / "a", "tfplus").tables[0].changes[-1]
    with pytest.raises(CheckFailedError, match=r"slots Adam\.v would not be read back.*rename them first"):
        write_tables([source], tmp_path / "b", "tfplus", verify=True)
    assert not list(tmp_path.glob("b*"))


def test_initial_rows_are_of_the_type_of_the_values(tmp_path: Path) -> None:
    rows = np.arange(6, dtype=np.int8).reshape(2, 3)
    source = kvtools.table_from_arrays("emb", np.arange(2), rows, extras={"initial_values": rows})
    write_tables([source], tmp_path / "a", "tfplugin", verify=True)
    written = kvtools.open(tmp_path / "a").table("emb")
    assert written.value_dtype == written.extra("initial_values").dtype == np.int8
    assert np.array_equal(written.extra("initial_values"), rows)


FOLDERS = {"hdf5": "a.h5", "npz": "a.npz", "safetensors": "a.safetensors"}


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    "dialect", [name for name in writable_dialects() if dialect_named(name).output != "url"], ids=str
)
def test_what_was_written_is_opened_once_however_many_tables_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dialect: str, verify: bool
) -> None:
    opened: list[Any] = []

    def counted(path: Any, options: Any) -> Any:
        opened.append(path)
        return open_checkpoint(path, options)

    monkeypatch.setattr("kvtools.migrate.open_checkpoint", counted)
    tables = [table(f"emb_{number}") for number in range(12)]
    account = write_tables(tables, tmp_path / FOLDERS.get(dialect, "a"), dialect, parts=2, verify=verify)
    assert len(account.tables) == 12 and len(opened) == 1
    assert all(any("by key" in check for check in said.checks) == verify for said in account.tables)


def test_files_of_a_bundle_are_opened_once_however_many_parts_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    indexes: list[Path] = []
    read = reader.read_table
    monkeypatch.setattr(reader, "read_table", lambda path: indexes.append(path) or read(path))
    write_tables([table()], tmp_path / "a", "deeprec", parts=40)
    assert len(indexes) == 1


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "bool"])
def test_slots_of_whole_numbers_are_read_back(tmp_path: Path, dtype: str) -> None:
    values = np.arange(12).reshape(4, 3).astype(dtype)
    table = ArrayTable("a", np.arange(4), values, slots={"Adam.m": values[::-1]})
    assert write_tables([table], tmp_path / "m", "tfplugin", verify=True).lossless
    assert compare_tables(table, open_checkpoint(tmp_path / "m").table("a")).same


@pytest.mark.parametrize("options", [WriteOptions(compression="zstd"), WriteOptions(compression_level=3)])
def test_a_dialect_that_compresses_nothing_says_so(tmp_path: Path, options: WriteOptions) -> None:
    table = ArrayTable("emb", np.arange(2), np.ones((2, 2), np.float32))
    with pytest.raises(UsageError, match=r"writing tfplugin: got --compression.* it compresses nothing"):
        write_tables([table], tmp_path / "m.ckpt", "tfplugin", options=options)
    assert not [*tmp_path.iterdir()]
