"""Files of SparseOperationKit 1, which say nothing of their types: found from the sizes, or asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.sok_legacy import DIALECT
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError, OutputError, UsageError
from kvtools.fit import fit
from kvtools.migrate import write_tables

Make = Callable[..., Any]
Same = Callable[..., None]


def save(folder: Path, name: str, keys: np.ndarray, values: np.ndarray) -> Path:
    keys.tofile(folder / f"{name}_keys.file")
    values.tofile(folder / f"{name}_values.file")
    return folder


@pytest.mark.parametrize("key_dtype", ["int64", "uint32"])
@pytest.mark.parametrize(("rows", "dim"), [(50, 4), (1, 1), (7, 129)])
def test_round_trip(tmp_path: Path, make_table: Make, same_rows: Same, key_dtype: str, rows: int, dim: int) -> None:
    table = make_table("EmbeddingVariable", rows, dim, key_dtype, slots=(), parts=min(3, rows))
    account = write_tables([table], tmp_path / "out", "sok-legacy")
    assert account.lossless
    checkpoint = open_checkpoint(tmp_path / "out", OpenOptions(key_dtype=key_dtype))
    assert checkpoint.dialect == "sok-legacy"
    same_rows(checkpoint.table("EmbeddingVariable"), table, rows=3)


def test_the_files_are_the_plain_bytes(tmp_path: Path, make_table: Make) -> None:
    table = make_table("emb", slots=())
    write_tables([table], tmp_path / "out", "sok-legacy")
    assert (tmp_path / "out" / "emb_keys.file").read_bytes() == table.keys.tobytes()
    assert (tmp_path / "out" / "emb_values.file").read_bytes() == table.values.tobytes()


def test_types_are_told_to_be_assumed(tmp_path: Path) -> None:
    save(tmp_path, "emb", np.arange(10, dtype=np.int64), np.zeros((10, 4), np.float32))
    table = open_checkpoint(tmp_path).table("emb")
    assert (table.schema.key_dtype, table.schema.value_dtype, table.dim, table.rows) == ("int64", "float32", 4, 10)
    assert "keys taken as int64 with rows of 4; uint32 keys with rows of 2 would fit too" in table.schema.notes[0]
    assert "values taken as float32" in table.schema.notes[1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"dim": 2}, ("uint32", "float32", 20, 2)),
        ({"dim": 4}, ("int64", "float32", 10, 4)),
        ({"key_dtype": "uint32"}, ("uint32", "float32", 20, 2)),
        ({"key_dtype": "int32"}, ("int32", "float32", 20, 2)),
        ({"key_dtype": "uint64"}, ("uint64", "float32", 10, 4)),
        ({"value_dtype": "float16"}, ("int64", "float16", 10, 8)),
        ({"value_dtype": "float64", "dim": 1}, ("uint32", "float64", 20, 1)),
    ],
)
def test_options_say_what_the_files_do_not(tmp_path: Path, options: dict[str, Any], expected: tuple[Any, ...]) -> None:
    save(tmp_path, "emb", np.arange(10, dtype=np.int64), np.zeros((10, 4), np.float32))
    table = open_checkpoint(tmp_path, OpenOptions(**options)).table("emb")
    assert (table.schema.key_dtype, table.schema.value_dtype, table.rows, table.dim) == expected


def test_sizes_that_only_one_key_type_fits_decide(tmp_path: Path) -> None:
    keys, values = np.array([1, 2, 2**32 - 1], np.uint32), np.ones((3, 5), np.float32)
    table = open_checkpoint(save(tmp_path, "emb", keys, values)).table("emb")
    (chunk,) = table.chunks()
    assert table.schema.key_dtype == "uint32"
    np.testing.assert_array_equal(chunk.keys, keys)
    np.testing.assert_array_equal(chunk.values, values)


def test_extreme_keys(tmp_path: Path) -> None:
    keys = np.array([-(2**63), 2**63 - 1, 0, -1], np.int64)
    table = open_checkpoint(save(tmp_path, "emb", keys, np.ones((4, 3), np.float32))).table("emb")
    np.testing.assert_array_equal(table.all_keys(), keys)


def test_one_file_means_the_folder_and_all_its_variables(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save(tmp_path, name, np.arange(3), np.zeros((3, 2), np.float32))
    assert list(open_checkpoint(tmp_path / "b_values.file").tables) == ["a", "b"]


def test_empty_variable(tmp_path: Path, make_table: Make) -> None:
    account = write_tables([make_table("emb", rows=0, slots=())], tmp_path / "out", "sok-legacy")
    assert "width 4" in account.tables[0].losses[0]
    assert open_checkpoint(tmp_path / "out", OpenOptions(dim=4)).table("emb").dim == 4
    table = open_checkpoint(tmp_path / "out").table("emb")
    assert (table.rows, table.dim, list(table.chunks())) == (0, 1, [])


def test_what_the_format_cannot_hold_is_named(make_table: Make) -> None:
    fitted = fit(make_table("emb", value_dtype="float16", freq_dtype="uint32", parts=2).schema, DIALECT)
    assert [loss.split(" ")[0] for loss in fitted.losses] == ["optimizer", "frequencies:"]
    assert (fitted.schema.value_dtype, fitted.schema.parts, fitted.schema.slots) == ("float32", 1, ())
    with pytest.raises(BadInputError, match="float64, expected float32; cast it first"):
        fit(make_table("emb", value_dtype="float64", slots=()).schema, DIALECT)


class TestRefused:
    """Every way in which the files can fail to be what they are taken for."""

    @pytest.mark.parametrize(
        ("key_bytes", "value_bytes"), [(8, 0), (0, 16), (24, 40), (7, 28), (12, 11), (8, 2), (3, 12)]
    )
    def test_sizes_that_fit_nothing(self, tmp_path: Path, key_bytes: int, value_bytes: int) -> None:
        (tmp_path / "emb_keys.file").write_bytes(bytes(key_bytes))
        (tmp_path / "emb_values.file").write_bytes(bytes(value_bytes))
        with pytest.raises(CorruptFileError, match=f"'emb_keys.file' has {key_bytes} bytes.*truncated"):
            open_checkpoint(tmp_path)

    @pytest.mark.parametrize(
        "options", [{"dim": 3}, {"dim": -4}, {"key_dtype": "uint32", "dim": 4}, {"value_dtype": "float64", "dim": 8}]
    )
    def test_options_that_contradict_the_sizes(self, tmp_path: Path, options: dict[str, Any]) -> None:
        save(tmp_path, "emb", np.arange(10, dtype=np.int64), np.zeros((10, 4), np.float32))
        with pytest.raises(UsageError, match="change --key-dtype, --value-dtype or --dim"):
            open_checkpoint(tmp_path, OpenOptions(**options))

    @pytest.mark.parametrize("options", [{"key_dtype": "string"}, {"value_dtype": "int7"}])
    def test_types_that_there_are_not(self, tmp_path: Path, options: dict[str, Any]) -> None:
        save(tmp_path, "emb", np.arange(10), np.zeros((10, 4), np.float32))
        with pytest.raises(UsageError, match="expected one of"):
            open_checkpoint(tmp_path, OpenOptions(**options))

    @pytest.mark.parametrize("suffix", ["keys", "values"])
    def test_missing_file(self, tmp_path: Path, suffix: str) -> None:
        save(tmp_path, "emb", np.arange(3), np.zeros((3, 2), np.float32))
        (tmp_path / f"emb_{suffix}.file").unlink()
        with pytest.raises(BadInputError, match=f"no 'emb_{suffix}.file'; copy both files"):
            open_checkpoint(tmp_path)
        assert list(open_checkpoint(tmp_path, OpenOptions(lenient=True)).broken) == ["emb"]

    @pytest.mark.parametrize(("name", "error"), [("scope/emb", UsageError), ("x" * 300, OutputError)])
    def test_names_that_are_no_file_names(
        self, tmp_path: Path, make_table: Make, name: str, error: type[KvtoolsError]
    ) -> None:
        with pytest.raises(error, match="rename"):
            write_tables([make_table(name, slots=())], tmp_path / "out", "sok-legacy")
        assert not (tmp_path / "out").exists()
