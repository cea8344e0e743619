"""Dumps of SparseOperationKit 2: read to the bit, written so that they read the same, and refused where they lie."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools import table_from_arrays
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.sok import DIALECT, flat_name
from kvtools.errors import BadInputError, CorruptFileError, OutputError, UsageError
from kvtools.fit import fit
from kvtools.migrate import write_tables

DATA = Path(__file__).parents[1] / "data"
Make = Callable[..., Any]
Same = Callable[..., None]
HEADER = 296


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    """A copy of the dump kept in the repository."""
    return shutil.copytree(DATA / "sok", tmp_path / "dump")


def set_bytes(path: Path, offset: int, data: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[offset : offset + len(data)] = data
    path.write_bytes(bytes(content))


def test_sample_kept_in_the_repository(dump: Path) -> None:
    expected = np.load(DATA / "sok-expected.npz")
    checkpoint = open_checkpoint(dump)
    assert (checkpoint.dialect, list(checkpoint.tables), checkpoint.variables) == ("sok", ["emb_0"], ())
    table = checkpoint.table("emb_0")
    assert (table.schema.key_dtype, table.schema.value_dtype, table.dim, table.rows) == ("int64", "float32", 4, 600)
    for rows in (7, 10_000):
        chunks = list(table.chunks(rows=rows))
        for name, column in (
            ("keys", [chunk.keys for chunk in chunks]),
            ("values", [chunk.values for chunk in chunks]),
            ("m", [chunk.slots["Adam.m"] for chunk in chunks]),
            ("v", [chunk.slots["Adam.v"] for chunk in chunks]),
        ):
            np.testing.assert_array_equal(np.concatenate(column), expected[name])
    taken = table.take(np.array([599, 0, 0]))
    np.testing.assert_array_equal(taken.values, expected["values"][[599, 0, 0]])


def test_one_file_of_a_dump_means_the_dump(dump: Path) -> None:
    for name in ("emb_0-key", "emb_0-weight", "emb_0-Adam-m"):
        assert list(open_checkpoint(dump / name).tables) == ["emb_0"]


def test_written_again_it_is_the_same_bytes_but_for_the_name(dump: Path, tmp_path: Path) -> None:
    write_tables(open_checkpoint(dump).select([]), tmp_path / "out", "sok")
    for file in dump.iterdir():
        written = (tmp_path / "out" / file.name).read_bytes()
        assert written[:256] == b"emb_0".rjust(256)
        assert written[256:] == file.read_bytes()[256:]


@pytest.mark.parametrize("key_dtype", ["int32", "int64", "uint32", "uint64"])
@pytest.mark.parametrize("value_dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize(("rows", "dim"), [(50, 4), (1, 1), (7, 129)])
def test_round_trip(
    tmp_path: Path, make_table: Make, same_rows: Same, key_dtype: str, value_dtype: str, rows: int, dim: int
) -> None:
    table = make_table("scope/emb:0", rows, dim, key_dtype, value_dtype, parts=min(3, rows))
    account = write_tables([table], tmp_path / "out", "sok")
    assert account.lossless and account.tables[0].parts == 1
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        ".kvtools",
        "scope_emb_0-key",
        "scope_emb_0-weight",
        "scope_emb_0-Adam-m",
        "scope_emb_0-Adam-v",
    }
    same_rows(open_checkpoint(tmp_path / "out").table("scope/emb:0"), table, rows=3)


@given(name=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=60))
def test_flat_names_never_name_another_folder(name: str) -> None:
    flat = flat_name(name)
    assert "/" not in flat and "-" not in flat and len(flat) == len(name)


def test_empty_table_loses_its_width_and_says_so(tmp_path: Path, make_table: Make) -> None:
    table = make_table("emb", rows=0, dim=4)
    account = write_tables([table], tmp_path / "out", "sok")
    assert not account.lossless and "width 4" in account.tables[0].losses[0]
    got = open_checkpoint(tmp_path / "out").table("emb")
    assert (got.rows, got.dim, list(got.chunks())) == (0, 1, [])
    assert "--dim" in got.schema.notes[0]
    assert open_checkpoint(tmp_path / "out", OpenOptions(dim=4)).table("emb").dim == 4


def test_many_tables_and_other_files_beside(tmp_path: Path, make_table: Make, same_rows: Same) -> None:
    tables = [make_table(f"emb_{number}:0", seed=number, slots=()) for number in range(3)]
    write_tables(tables, tmp_path / "out", "sok")
    (tmp_path / "out" / "meta_info").write_text("")
    (tmp_path / "out" / "read-me.txt").write_text("dumped on Monday")
    checkpoint = open_checkpoint(tmp_path / "out")
    assert list(checkpoint.tables) == ["emb_0:0", "emb_1:0", "emb_2:0"]
    for table in tables:
        same_rows(checkpoint.table(table.name), table)


def test_names_that_become_one_are_refused(tmp_path: Path, make_table: Make) -> None:
    with pytest.raises(BadInputError, match=r"'a\.b'.*'a_b-\.\.\.', as those of table 'a/b'.*kvtools rename"):
        write_tables([make_table("a/b"), make_table("a.b")], tmp_path / "out", "sok")
    assert not (tmp_path / "out").exists()


def test_a_name_longer_than_a_file_name_is_refused(tmp_path: Path, make_table: Make) -> None:
    with pytest.raises(OutputError, match="rename the table"):
        write_tables([make_table("x" * 300)], tmp_path / "out", "sok")


@pytest.mark.parametrize("slot", ["key", "weight", "a/b.c", "a-b", "Adam." + "m" * 33])
def test_slot_names_without_a_place_are_refused(tmp_path: Path, make_table: Make, slot: str) -> None:
    with pytest.raises(BadInputError, match="has no place in the format"):
        write_tables([make_table("emb", slots=(slot,))], tmp_path / "out", "sok")


@pytest.mark.parametrize("slot", ["Adam.m", "Adam.m-hat", "a-b.c", "m", "Ftrl.linear.1"])
def test_slot_names_are_read_as_they_were_written(tmp_path: Path, make_table: Make, slot: str) -> None:
    write_tables([make_table("emb", slots=(slot,))], tmp_path / "out", "sok")
    assert open_checkpoint(tmp_path / "out").table("emb").slots == (slot,)


def test_what_the_format_cannot_hold_is_named(make_table: Make) -> None:
    table = make_table(
        "emb", value_dtype="bfloat16", slot_width=1, freq_dtype="uint32", version_dtype="uint32", parts=2
    )
    fitted = fit(table.schema, DIALECT)
    assert [loss.split(":")[0] for loss in fitted.losses] == ["slot Adam.m", "slot Adam.v", "frequencies", "versions"]
    assert fitted.schema.value_dtype == "float32" and fitted.schema.parts == 1


def test_a_name_in_the_header_that_is_another_file_s_is_not_believed(dump: Path) -> None:
    set_bytes(dump / "emb_0-key", 0, b"other".rjust(256))
    assert list(open_checkpoint(dump).tables) == ["emb_0"]
    set_bytes(dump / "emb_0-key", 0, b"emb:0".rjust(256))
    assert list(open_checkpoint(dump).tables) == ["emb:0"]


def test_state_of_fewer_rows_is_left_out_and_told(dump: Path) -> None:
    path = dump / "emb_0-Adam-v"
    path.write_bytes(path.read_bytes()[: HEADER + 16 * 590])
    table = open_checkpoint(dump).table("emb_0")
    assert table.slots == ("Adam.m",)
    assert any("590 rows for 600 keys" in note for note in table.schema.notes)
    (finding,) = table.check()
    assert (finding.severity, finding.check) == ("error", "slot-rows")


class TestRefused:
    """Every way in which the files of a dump can contradict themselves or each other."""

    @pytest.mark.parametrize("name", ["emb_0-key", "emb_0-weight", "emb_0-Adam-m"])
    @pytest.mark.parametrize("size", [0, 1, 295])
    def test_shorter_than_a_header(self, dump: Path, name: str, size: int) -> None:
        (dump / name).write_bytes((dump / name).read_bytes()[:size])
        with pytest.raises(CorruptFileError, match=f"'emb_0'.*{name}' has {size} bytes, expected a header of 296"):
            open_checkpoint(dump)

    @pytest.mark.parametrize("name", ["emb_0-key", "emb_0-weight", "emb_0-Adam-m"])
    def test_cut_within_a_number(self, dump: Path, name: str) -> None:
        (dump / name).write_bytes((dump / name).read_bytes()[:-1])
        with pytest.raises(CorruptFileError, match="after its header, expected a multiple of"):
            open_checkpoint(dump)

    @pytest.mark.parametrize(("name", "cut"), [("emb_0-key", 8), ("emb_0-weight", 4), ("emb_0-weight", 9600)])
    def test_sizes_that_contradict(self, dump: Path, name: str, cut: int) -> None:
        (dump / name).write_bytes((dump / name).read_bytes()[:-cut])
        with pytest.raises(CorruptFileError, match="expected the same number for each key"):
            open_checkpoint(dump)

    @pytest.mark.parametrize("size", [HEADER + 9600 + 16, HEADER + 9600 - 4])
    def test_state_of_a_senseless_size(self, dump: Path, size: int) -> None:
        path = dump / "emb_0-Adam-m"
        path.write_bytes((path.read_bytes() + bytes(16))[:size])
        with pytest.raises(CorruptFileError, match=r"expected 2400 for 600 rows of 4"):
            open_checkpoint(dump)

    @pytest.mark.parametrize("name", ["emb_0-key", "emb_0-weight"])
    def test_missing_file(self, dump: Path, name: str) -> None:
        (dump / name).unlink()
        with pytest.raises(BadInputError, match=f"no '{name}'; copy every file"):
            open_checkpoint(dump)

    @pytest.mark.parametrize(
        ("name", "kind"), [("emb_0-key", 1), ("emb_0-weight", 0), ("emb_0-Adam-m", 7), ("emb_0-Adam-m", 2**32 - 1)]
    )
    def test_wrong_kind(self, dump: Path, name: str, kind: int) -> None:
        set_bytes(dump / name, 256, kind.to_bytes(4, "big"))
        with pytest.raises(CorruptFileError, match=f"{name}' says kind {kind}"):
            open_checkpoint(dump)

    @pytest.mark.parametrize(
        ("name", "number"), [("emb_0-key", 5), ("emb_0-key", 7), ("emb_0-weight", 1), ("emb_0-Adam-m", 2**31)]
    )
    def test_wrong_type(self, dump: Path, name: str, number: int) -> None:
        set_bytes(dump / name, 292, number.to_bytes(4, "big"))
        with pytest.raises(CorruptFileError, match=f"{name}' says .*expected"):
            open_checkpoint(dump)

    def test_broken_table_is_left_out_where_asked_for(self, dump: Path, tmp_path: Path, make_table: Make) -> None:
        write_tables([make_table("good")], tmp_path / "good", "sok")
        for file in (tmp_path / "good").iterdir():
            shutil.copy(file, dump)
        (dump / "emb_0-weight").unlink()
        checkpoint = open_checkpoint(dump, OpenOptions(lenient=True))
        assert (list(checkpoint.tables), list(checkpoint.broken)) == (["good"], ["emb_0"])

    @pytest.mark.parametrize("options", [{"key_dtype": "int32"}, {"value_dtype": "float64"}, {"dim": 5}])
    def test_options_that_contradict(self, dump: Path, options: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match="leave the option out"):
            open_checkpoint(dump, OpenOptions(**options))


@pytest.mark.parametrize("slot", ["keys", "values"])
def test_a_slot_whose_file_would_be_taken_for_one_of_tfra_is_refused(slot: str, tmp_path: Path) -> None:
    values = np.ones((1, 2), np.float32)
    table = table_from_arrays("t", np.array([1]), values, slots={slot: values})
    with pytest.raises(BadInputError, match="has no place in the format"):
        write_tables([table], tmp_path / "dump", "sok")
    assert not list(tmp_path.iterdir())


def test_slots_that_others_called_keys_and_values_make_no_files_of_tfra(tmp_path: Path) -> None:
    rows = np.arange(4, dtype=np.float32).reshape(2, 2)
    slots = {"a": rows + 10, "b": rows + 20}
    write_tables([table_from_arrays("emb", [7, -1], rows, slots=slots)], tmp_path / "dump", "sok")
    for slot, name in (("a", "keys"), ("b", "values")):
        (tmp_path / "dump" / f"emb-{slot}").rename(tmp_path / "dump" / f"emb-{name}")
    checkpoint = open_checkpoint(tmp_path / "dump")
    (chunk,) = checkpoint.table("emb").chunks()
    assert checkpoint.dialect == "sok" and chunk.keys.tolist() == [7, -1] and np.array_equal(chunk.values, rows)


def test_a_disk_that_is_full_asks_for_no_other_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvtools.dialects.sok.create_column", full)
    with pytest.raises(OutputError, match="No space left on device; nothing was changed there, make room"):
        write_tables([table_from_arrays("t", [1], np.ones((1, 2), np.float32))], tmp_path / "dump", "sok")
    assert not list(tmp_path.iterdir())
