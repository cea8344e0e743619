from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools import table_from_arrays
from kvtools.cli.main import main
from kvtools.dialects.chunk import ALL_COLUMNS
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.migrate import write_tables

SavePlain = Callable[..., Path]
TFRA = Path(__file__).parents[1] / "data" / "tfra"
KEYS = np.arange(12) * 7 - 5
VALUES = np.arange(36, dtype=np.float32).reshape(12, 3)


def read(table: TableReader) -> dict[int, tuple[float, ...]]:
    found: dict[int, tuple[float, ...]] = {}
    for chunk in table.chunks(ALL_COLUMNS):
        assert chunk.values is not None
        found |= {int(key): tuple(row) for key, row in zip(chunk.keys, chunk.values.tolist(), strict=True)}
    return found


def write(folder: Path, stem: str, keys: np.ndarray = KEYS, values: np.ndarray = VALUES) -> Path:
    folder.mkdir(exist_ok=True)
    keys.tofile(folder / f"{stem}-keys")
    values.tofile(folder / f"{stem}-values")
    return folder


EXPECTED = {int(key): tuple(row) for key, row in zip(KEYS, VALUES.tolist(), strict=True)}


@pytest.mark.parametrize("path", ["filesystem", "filesystem/ckpt", "filesystem/TFRADynamicEmbedding"])
def test_the_folder_may_be_named_or_the_checkpoint_beside_it(path: str) -> None:
    expected = np.load(TFRA / "expected_tf2.npz")
    checkpoint = open_checkpoint(TFRA / path)
    assert checkpoint.dialect == "tfra_files" and not checkpoint.variables
    table = checkpoint.table("fs_emb")
    assert (table.schema.part_rows, table.dim) == ((240, 260), 8)
    assert "keys are taken as int64" in table.schema.notes[0]
    rows = zip(expected["fs_keys"], expected["fs_values"].tolist(), strict=True)
    assert read(table) == {int(key): tuple(row) for key, row in rows}


def test_the_folder_of_the_checkpoints_step_comes_first(tmp_path: Path) -> None:
    for name in ("ckpt.index", "ckpt.data-00000-of-00001"):
        shutil.copy(TFRA / "filesystem" / name, tmp_path / name.replace("ckpt", "ckpt-7"))
    with pytest.raises(BadInputError, match="no folder 'TFRADynamicEmbedding'"):
        open_checkpoint(tmp_path / "ckpt-7")
    write(tmp_path / "TFRADynamicEmbedding", "fs_emb_mht_1of1_rank0_size1", values=VALUES + 1)
    assert read(open_checkpoint(tmp_path / "ckpt-7").table("fs_emb")) != EXPECTED
    write(tmp_path / "TFRADynamicEmbedding-7", "fs_emb_mht_1of1_rank0_size1")
    assert read(open_checkpoint(tmp_path / "ckpt-7").table("fs_emb")) == EXPECTED


REWRITES = {
    "migrate": ("--to", "tfra_files", "--verify"),
    "reshard": ("--parts", "3"),
    "rename": ("--table", "fs_emb=renamed"),
    "cast": ("--to-value-dtype", "float64"),
    "repair": (),
}


@pytest.mark.parametrize("command", REWRITES)
def test_a_folder_with_a_checkpoint_beside_it_is_written_anew_without_that(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [command, str(TFRA / "filesystem"), str(tmp_path / "out"), *REWRITES[command], "--json"]
    for more in (["--dry-run"], []):
        assert main([*arguments, *more]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told["lossless"] and any("object graph" in note for note in told["notes"])
    (table,) = open_checkpoint(tmp_path / "out").tables.values()
    assert read(table) == read(open_checkpoint(TFRA / "filesystem").table("fs_emb"))


@pytest.mark.parametrize("stem", ["a_b_mht_1of1_rank0_size1", "a_b_mht_1of1", "a_b"])
def test_names_of_ranks_of_tables_and_of_a_users_own_are_known(stem: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "folder", stem))
    assert read(checkpoint.table("a_b")) == EXPECTED


def test_shards_come_by_process_then_device(tmp_path: Path) -> None:
    for rank in (1, 0):
        for device in (2, 1):
            number = rank * 2 + device - 1
            stem = f"e_mht_{device}of2_rank{rank}_size2"
            write(tmp_path / "folder", stem, KEYS[number::4], VALUES[number::4])
    table = open_checkpoint(tmp_path / "folder").table("e")
    assert read(table) == EXPECTED
    assert [next(table.chunks(part=part)).keys[0] for part in range(4)] == KEYS[:4].tolist()


def test_slots_and_status_are_told_by_their_names(tmp_path: Path) -> None:
    order = np.random.default_rng(0).permutation(len(KEYS))
    folder = write(tmp_path / "folder", "emb_mht_1of1_rank0_size1")
    write(folder, "emb_DynamicEmbedding_emb-shadow_m_mht_1of1_rank0_size1", KEYS[order], VALUES[order] * 2)
    write(folder, "emb_DynamicEmbedding_emb-shadow_v_mht_1of1_rank0_size1", KEYS[order], VALUES[order] * 3)
    counts = np.arange(12, dtype=np.int32)[:, None]
    write(folder, "status_emb_frequency_mht_1of1_rank0_size1", KEYS[order], counts[order])
    write(folder, "emb_2_mht_1of1_rank0_size1")
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint.tables) == ["emb", "emb_2"]
    (chunk,) = checkpoint.table("emb").chunks()
    assert chunk.keys.tolist() == KEYS.tolist()
    np.testing.assert_array_equal(chunk.slots["Adam.m"], VALUES * 2)
    np.testing.assert_array_equal(chunk.slots["Adam.v"], VALUES * 3)
    assert chunk.freqs is not None and chunk.freqs.tolist() == counts[:, 0].tolist()


def test_types_are_as_the_options_say(tmp_path: Path) -> None:
    halves = write(tmp_path / "h", "e_mht_1of1", KEYS.astype(np.int32), VALUES.astype(np.float16))
    options = OpenOptions(key_dtype="int32", value_dtype="float16", dim=3)
    table = open_checkpoint(halves, options).table("e")
    assert (table.dim, table.schema.notes) == (3, ())
    assert read(table) == EXPECTED
    with pytest.raises(CorruptFileError, match="give another --dim"):
        open_checkpoint(halves, OpenOptions(key_dtype="int32", value_dtype="float16", dim=2))
    # Twelve of both types could as well be six of the types that are assumed; eleven could not.
    assert open_checkpoint(halves).table("e").rows == 6
    odd = write(tmp_path / "odd", "e_mht_1of1", KEYS[:11].astype(np.int32), VALUES[:11].astype(np.float16))
    with pytest.raises(CorruptFileError, match="--key-dtype"):
        open_checkpoint(odd)
    with pytest.raises(BadInputError, match="uint8 and values of float32 were asked for"):
        open_checkpoint(halves, OpenOptions(key_dtype="uint8"))


def test_an_empty_table_has_the_width_that_is_said(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", "e_mht_1of1", KEYS[:0], VALUES[:0])
    table = open_checkpoint(folder).table("e")
    assert (table.rows, table.dim) == (0, 1) and "1 is assumed" in table.schema.notes[-1]
    assert open_checkpoint(folder, OpenOptions(dim=9)).table("e").dim == 9


def test_the_width_of_an_empty_table_is_recorded_and_not_called_lost(tmp_path: Path) -> None:
    account = write_tables([table_from_arrays("e", KEYS[:0], VALUES[:0], parts=2)], tmp_path / "out", "tfra_files")
    assert account.lossless and not account.tables[0].losses
    assert open_checkpoint(tmp_path / "out").table("e").dim == VALUES.shape[1]


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a device is missing": (
        lambda folder: [path.unlink() for path in folder.glob("e_mht_2of3*")],
        "got the files of 2 of 3 shards, device 2 of 3 of process 0 is missing",
    ),
    "values are missing": (lambda f: (f / "e_mht_2of3_rank0_size1-values").unlink(), "no file of its values"),
    "keys are missing": (lambda f: (f / "e_mht_2of3_rank0_size1-keys").unlink(), "no file of its keys"),
    "two saves are mixed": (lambda f: write(f, "e_mht_1of1_rank0_size1"), "expected those of one save"),
    "keys are cut": (
        lambda f: (f / "e_mht_1of3_rank0_size1-keys").write_bytes(b"123"),
        "has 3 bytes, expected a multiple of 8",
    ),
    "values are cut": (
        lambda f: (f / "e_mht_1of3_rank0_size1-values").write_bytes(b"12345"),
        "has 5 bytes for 4 int64 keys, expected a multiple of 16",
    ),
    "widths differ": (
        lambda f: (f / "e_mht_1of3_rank0_size1-values").write_bytes(bytes(4 * 4 * 5)),
        "rows are 5 wide in .* and 3 wide in",
    ),
    "values without keys": (lambda f: (f / "e_mht_1of3_rank0_size1-keys").write_bytes(b""), "for 0 int64 keys"),
    "keys without values": (lambda f: (f / "e_mht_1of3_rank0_size1-values").write_bytes(b""), "has 0 bytes"),
    "a million shards": (
        lambda f: [p.rename(f / p.name.replace("3_rank0_size1", "999999_rank0_size999999")) for p in list(f.iterdir())],
        "got the files of 3 of 999998000001 shards, device 4 of 999999 of process 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused_and_told(case: str, tmp_path: Path) -> None:
    change, message = BROKEN[case]
    folder = tmp_path / "folder"
    for device in range(3):
        write(folder, f"e_mht_{device + 1}of3_rank0_size1", KEYS[device::3], VALUES[device::3])
    change(folder)
    with pytest.raises((BadInputError, CorruptFileError), match=message):
        open_checkpoint(folder)
    write(folder, "good_mht_1of1")
    checkpoint = open_checkpoint(folder, OpenOptions(lenient=True))
    assert list(checkpoint.tables) == ["good"] and list(checkpoint.broken) == ["e"]


def strings(*texts: bytes) -> np.ndarray:
    """As TensorFlow has strings in memory: short ones within 24 bytes, others by pointer."""
    records = b""
    for text in texts:
        if len(text) < 23:
            records += bytes([len(text) << 2]) + text.ljust(23, b"\0")
        else:
            records += np.array([len(text) << 2 | 1, len(text) + 13, 0x7F0055667788], np.uint64).tobytes()
    return np.frombuffer(records, np.uint8)


def test_strings_are_refused_and_numbers_are_not(tmp_path: Path) -> None:
    folder = write(tmp_path / "s", "e_mht_1of1", strings(b"hello", b"x" * 40, b"y"), VALUES[:3])
    with pytest.raises(BadInputError, match="its keys are strings"):
        open_checkpoint(folder)
    assert open_checkpoint(folder, OpenOptions(key_dtype="int64")).table("e").rows == 9
    numbers = write(tmp_path / "n", "e_mht_1of1", np.array([0x4104, 0, 3]), VALUES[:3])
    assert open_checkpoint(numbers).table("e").rows == 3
    with pytest.raises(BadInputError, match="its keys are strings"):
        open_checkpoint(numbers, OpenOptions(key_dtype="string"))


def test_markers_give_the_names_that_files_do_not(tmp_path: Path, save_plain: SavePlain) -> None:
    path = save_plain(
        tmp_path / "ckpt",
        {
            "m/tables_of_deep.Semb/0/.ATTRIBUTES/table-shard_upsert_restore": np.array(True),
            "wide/emb/wide_emb_mht_1of1-shard_upsert_restore": np.array(True),
            "wide/emb-prev_global_shard_num": np.array(1, np.int32),
            "in_it/in_it_mht_1of1-keys": KEYS,
            "in_it/in_it_mht_1of1-values": VALUES,
            "dense": VALUES,
        },
    )
    for stem in ("deep_emb", "wide_emb"):
        write(tmp_path / "TFRADynamicEmbedding", f"{stem}_mht_1of1_rank0_size1")
    checkpoint = open_checkpoint(path)
    assert list(checkpoint.tables) == ["deep/emb", "in_it", "wide/emb"]
    assert [variable.name for variable in checkpoint.variables] == ["dense"]
    assert all(read(table) == EXPECTED for table in checkpoint.tables.values())


def test_a_damaged_record_is_told(tmp_path: Path) -> None:
    folder = write(tmp_path / "folder", "e_mht_1of1")
    entry = '{"table": "a/e", "column": "values", "key_dtype": "int64", "value_dtype": "float32", "dim": %s}'
    (folder / "kvtools.json").write_text('{"tables": {"e": ' + entry % 3 + "}}")
    assert read(open_checkpoint(folder).table("a/e")) == EXPECTED
    # What is asked for comes before what is recorded.
    assert open_checkpoint(folder, OpenOptions(value_dtype="float16")).table("a/e").dim == 6
    entries = ("1", '{"table": "e"}', entry % "[]", entry % 0)
    for damaged in ("{", "[]", *('{"tables": {"e": ' + one + "}}" for one in entries)):
        (folder / "kvtools.json").write_text(damaged)
        with pytest.raises(CorruptFileError, match=r"kvtools.json': .*; remove it"):
            open_checkpoint(folder)
    (folder / "kvtools.json").write_text('{"tables": {"e": ' + entry % 4 + "}}")
    with pytest.raises(CorruptFileError, match="give another --dim"):
        open_checkpoint(folder)


def test_tables_whose_names_make_the_same_files_are_refused(tmp_path: Path) -> None:
    one, two = (table_from_arrays(name, KEYS, VALUES) for name in ("a/b", "a_b"))
    with pytest.raises(BadInputError, match="its name makes files 'a_b'"):
        write_tables([one, two], tmp_path / "out", "tfra_files")
    assert not (tmp_path / "out").exists()
    with pytest.raises(BadInputError, match="too long"):
        write_tables([table_from_arrays("x" * 300, KEYS, VALUES)], tmp_path / "out", "tfra_files")


def test_a_name_with_a_line_break_is_read_again(tmp_path: Path) -> None:
    table = table_from_arrays("a\nb", KEYS, VALUES)
    write_tables([table], tmp_path / "files.ckpt", "tfra_files", verify=True)
    again = open_checkpoint(tmp_path / "files.ckpt")
    assert list(again.tables) == ["a\nb"] and read(again.tables["a\nb"]) == read(table)
