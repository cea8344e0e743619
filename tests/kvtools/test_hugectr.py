"""HugeCTR's folders of `key`, `emb_vector` and `slot_id`: written as HugeCTR does, by hand, and held to their sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtools
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.hugectr import DIALECT
from kvtools.dialects.options import OpenOptions
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError, UsageError
from kvtools.fit import fit
from kvtools.migrate import write_tables

Make = Callable[..., Any]
Same = Callable[..., None]
KEYS = np.array([7, -1, 2**62, 0, 5], np.int64)
ROWS = np.arange(20, dtype=np.float32).reshape(5, 4)
SLOT_IDS = np.array([3, 0, 25, 3, 1], np.uint64)


def save(folder: Path, *, localized: bool = False) -> Path:
    """Make a folder as `Model.save_params_to_files` does."""
    folder.mkdir(parents=True)
    KEYS.tofile(folder / "key")
    ROWS.tofile(folder / "emb_vector")
    if localized:
        SLOT_IDS.tofile(folder / "slot_id")
    return folder


def test_a_folder_is_a_table(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path / "wdl0_sparse_2000.model"))
    assert checkpoint.dialect == "hugectr"
    table = checkpoint.table("wdl0_sparse_2000.model")
    (chunk,) = table.chunks()
    np.testing.assert_array_equal(chunk.keys, KEYS)
    np.testing.assert_array_equal(chunk.values, ROWS)
    assert (table.slots, table.schema.notes, table.schema.bytes) == ((), (), 120)


@pytest.mark.parametrize("file", ["key", "emb_vector", "slot_id"])
def test_a_file_means_its_folder(tmp_path: Path, file: str) -> None:
    save(tmp_path / "a", localized=True)
    assert list(open_checkpoint(tmp_path / "a" / file).tables) == ["a"]


def test_several_folders_and_dense_models_beside_them(tmp_path: Path) -> None:
    save(tmp_path / "wdl0_sparse_2000.model")
    save(tmp_path / "wdl1_sparse_2000.model", localized=True)
    save(tmp_path / "more" / "deep")
    (tmp_path / "wdl_dense_2000.model").write_bytes(bytes(100))
    (tmp_path / "wdl1_opt_sparse_2000.model").write_bytes(bytes(100))
    tables = open_checkpoint(tmp_path).tables
    assert list(tables) == ["more/deep", "wdl0_sparse_2000.model", "wdl1_sparse_2000.model"]
    assert tables["wdl0_sparse_2000.model"].schema.notes == ()
    states, slot = tables["wdl1_sparse_2000.model"].schema.notes
    assert "'wdl1_opt_sparse_2000.model' are left out" in states and "slot_id" in slot


def test_slot_ids_are_a_slot_and_move_along(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path / "a", localized=True))
    np.testing.assert_array_equal(checkpoint.table("a").to_numpy().slots["slot_id"][:, 0], SLOT_IDS.astype(np.int64))
    assert write_tables(checkpoint.select([]), tmp_path / "b.parquet", "parquet").lossless
    back = open_checkpoint(tmp_path / "b.parquet")
    assert write_tables(back.select([]), tmp_path / "c", "hugectr").lossless
    for file in ("key", "emb_vector", "slot_id"):
        assert (tmp_path / "c" / "a" / file).read_bytes() == (tmp_path / "a" / file).read_bytes()


@pytest.mark.parametrize(("rows", "dim"), [(50, 4), (1, 1), (7, 129)])
def test_round_trip(tmp_path: Path, make_table: Make, same_rows: Same, rows: int, dim: int) -> None:
    tables = [make_table("emb", rows, dim, slots=(), parts=min(3, rows)), make_table("ads/emb", rows, dim, slots=())]
    assert write_tables(tables, tmp_path / "out", "hugectr", verify=True).lossless
    checkpoint = open_checkpoint(tmp_path / "out")
    assert checkpoint.dialect == "hugectr"
    for table in tables:
        same_rows(checkpoint.table(table.name), table, rows=3)
        assert (tmp_path / "out" / table.name / "key").read_bytes() == table.keys.tobytes()
        assert (tmp_path / "out" / table.name / "emb_vector").read_bytes() == table.values.tobytes()


def test_an_empty_table_has_no_width(tmp_path: Path, make_table: Make) -> None:
    account = write_tables([make_table("emb", rows=0, slots=())], tmp_path / "out", "hugectr")
    assert "width 4" in account.tables[0].losses[0]
    assert open_checkpoint(tmp_path / "out", OpenOptions(dim=4)).table("emb").dim == 4
    assert "--dim says another" in open_checkpoint(tmp_path / "out").table("emb").schema.notes[0]


def test_what_it_cannot_hold_is_named(make_table: Make) -> None:
    fitted = fit(make_table("emb", value_dtype="float16", freq_dtype="uint32", parts=2).schema, DIALECT)
    assert fitted.losses[0] == "slot Adam.m: the dialect has a place for slot_id of 1 int64 only"
    assert fitted.losses[-1].startswith("frequencies:")
    assert (fitted.schema.value_dtype, fitted.schema.parts, fitted.schema.slots) == ("float32", 1, ())


class TestRefused:
    """Every way in which the files can contradict each other."""

    @pytest.mark.parametrize("sizes", [(39, 80, None), (40, 79, None), (40, 84, None), (0, 4, None), (40, 0, None)])
    def test_keys_and_rows_of_sizes_that_do_not_fit(self, tmp_path: Path, sizes: tuple[int, int, None]) -> None:
        (tmp_path / "key").write_bytes(bytes(sizes[0]))
        (tmp_path / "emb_vector").write_bytes(bytes(sizes[1]))
        with pytest.raises(CorruptFileError, match=f"'key' has {sizes[0]} bytes and 'emb_vector' has {sizes[1]} bytes"):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize("size", [0, 39, 41, 48])
    def test_slot_ids_of_another_number(self, tmp_path: Path, size: int) -> None:
        (save(tmp_path / "a") / "slot_id").write_bytes(bytes(size))
        with pytest.raises(CorruptFileError, match="expected 8 bytes for each of 5 keys"):
            open_checkpoint(tmp_path / "a")

    def test_no_keys(self, tmp_path: Path) -> None:
        save(tmp_path / "a")
        (save(tmp_path / "b") / "key").unlink()
        with pytest.raises(BadInputError, match="no 'key' beside 'emb_vector'"):
            open_checkpoint(tmp_path)
        opened = open_checkpoint(tmp_path, OpenOptions(lenient=True))
        assert (list(opened.tables), list(opened.broken)) == (["a"], ["b"])

    def test_a_width_that_contradicts_the_sizes(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="rows of 4, got --dim 5"):
            open_checkpoint(save(tmp_path / "a"), OpenOptions(dim=5))

    @pytest.mark.parametrize("name", ["..", "a/../b", "a//b", "/a", "key", "a/emb_vector", ".hidden", "x" * 300])
    def test_names_that_are_no_folders(self, tmp_path: Path, name: str) -> None:
        table = kvtools.table_from_arrays(name, KEYS, ROWS)
        with pytest.raises(KvtoolsError, match="rename"):
            write_tables([table], tmp_path / "out", "hugectr")
        assert list(tmp_path.iterdir()) == []
