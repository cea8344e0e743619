"""Checkpoints and tables as Python has mappings; as libraries take Arrow streams; and what is copied on the way."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow
import pytest

import kvtools
from kvtools.array_table import ArrayTable
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, UnknownKeyError, UnknownTableError, UsageError
from kvtools.migrate import write_tables
from kvtools.split import PartTable


def a_table(rows: int = 1000, dim: int = 8, value_dtype: Any = np.float32, **others: Any) -> ArrayTable:
    rng = np.random.default_rng(0)
    keys = rng.permutation(rows) - 10
    values = rng.normal(size=(rows, dim)).astype(value_dtype)
    slots = {"Adam.m": rng.normal(size=(rows, dim)).astype(np.float32)}
    return ArrayTable("emb", keys, values, **{"slots": slots, "freqs": rng.integers(0, 9, rows, np.uint32), **others})


def test_a_checkpoint_is_a_mapping_of_tables(sample_path: Path) -> None:
    checkpoint = kvtools.open(sample_path)
    assert len(checkpoint) == 3 and list(checkpoint) == ["ads/emb", "empty_emb", "user_emb"]
    assert "user_emb" in checkpoint and "user" not in checkpoint and 5 not in checkpoint
    assert checkpoint["user_emb"] is checkpoint.table("user_emb")
    with pytest.raises(KeyError, match="no such table") as caught:
        checkpoint["user"]
    assert isinstance(caught.value, UnknownTableError) and str(caught.value).startswith("opening table 'user'")
    assert bool(Checkpoint("m", "memory", {}))


def test_names_are_listed_before_they_are_loaded() -> None:
    listed = "import kvtools; assert {*kvtools.__all__} <= {*dir(kvtools)}, dir(kvtools)"
    subprocess.run([sys.executable, "-c", listed], check=True)


def test_an_empty_path_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="got an empty path"):
        kvtools.open("")
    with pytest.raises(UsageError, match="got an empty path"):
        write_tables([a_table(3)], "", "parquet", options=WriteOptions(force=True))
    assert tmp_path.is_dir() and not [*tmp_path.iterdir()]


def test_a_table_is_a_mapping_of_keys(sample_path: Path, sample_values: dict[str, dict[int, np.ndarray]]) -> None:
    checkpoint = kvtools.open(sample_path)
    for name, rows in sample_values.items():
        table = checkpoint[name]
        assert len(table) == len(rows) and bool(table)
        keys = list(rows)
        for key in keys:
            assert key in table and np.int64(key) in table
            np.testing.assert_array_equal(table[key], rows[key])
            np.testing.assert_array_equal(table.get(key), rows[key])
        absent = 123456
        assert absent not in table and "17" not in table and 1.5 not in table and 2**70 not in table
        assert table.get(absent) is None and table.get(absent, "x") == "x"
        values, found = table.get([absent, *keys, absent])
        assert found.tolist() == [False, *[True] * len(keys), False]
        assert not values[0].any() and values.shape == (len(keys) + 2, table.dim)
        for at, key in enumerate(keys, 1):
            np.testing.assert_array_equal(values[at], rows[key])
        if keys:
            np.testing.assert_array_equal(table[keys[::-1]], np.stack([rows[key] for key in keys[::-1]]))
        with pytest.raises(KeyError, match="have no row: 123456"):
            table[absent]
        with pytest.raises(UnknownKeyError, match=f"1 of {len(keys) + 1} have no row"):
            table[[*keys, absent]]


def test_what_keys_without_rows_get() -> None:
    table = a_table(dim=2)
    assert table.get([5000], -1).values.tolist() == [[-1, -1]]
    assert table.get([5000], [1, 2]).values.tolist() == [[1, 2]]
    assert table.get([]).values.shape == (0, 2) and table[[]].shape == (0, 2)
    with pytest.raises(UsageError, match=r"default of shape \[3\], expected a number, or \[2\]"):
        table.get([5], [1, 2, 3])
    assert table.get([5, 5], 0).found.tolist() == [True, True]


@pytest.mark.parametrize("keys", ["5", 1.5, [1.5], [[1, 2]], {"a": 1}, True, [None], slice(3)], ids=str)
def test_what_is_no_key(keys: Any) -> None:
    with pytest.raises(UsageError, match="looking up keys in table 'emb': got"):
        a_table()[keys]


def test_keys_of_64_bits() -> None:
    table = ArrayTable("emb", np.array([0, 2**64 - 1], np.uint64), np.float32([[1], [2]]))
    assert table[2**64 - 1].tolist() == [2] and table[[2**64 - 1, 0]].tolist() == [[2], [1]]
    assert 2**64 - 1 in table and -1 not in table and table.get(-1) is None
    with pytest.raises(UsageError, match="expected what uint64 holds"):
        table[[2**64 - 1, -1]]


@pytest.mark.parametrize("keys", [[[1], [2, 3]], {5}, (number for number in [5])], ids=["ragged", "set", "generator"])
def test_keys_that_are_no_array_are_named(keys: Any) -> None:
    with pytest.raises(
        UsageError, match=r"got (list|set|generator) '.*, expected an integer, or a list or array \[n\]"
    ):
        a_table(5).get(keys)


def test_strings_are_told_how_they_become_keys() -> None:
    with pytest.raises(UsageError, match=r"kvtools\.string_keys"):
        a_table(5).get(["wine"])


@pytest.mark.parametrize(
    ("value_dtype", "default"),
    [(np.int64, 1.5), (np.int8, 300), (np.int8, float("nan")), (np.float16, 1e6), (bool, 2), (np.float32, "x")],
)
def test_a_default_that_values_do_not_hold_is_refused(value_dtype: Any, default: Any) -> None:
    with pytest.raises(UsageError, match="got default="):
        a_table(5, value_dtype=value_dtype).get([99], default=default)


@pytest.mark.parametrize("dialect", ["memory", "arrow", "parquet", "tfplugin", "npz", "snapshot", "hdf5"])
def test_rows_that_there_are_not_are_not_taken(dialect: str, tmp_path: Path) -> None:
    table: Any = ArrayTable("emb", np.arange(6), np.ones((6, 2), np.float32), part_rows=[4, 2])
    if dialect != "memory":
        write_tables([table], tmp_path / "tables", dialect)
        table = kvtools.open(tmp_path / "tables")["emb"]
    assert len(table.take([5, 0])) == 2 and len(table.take([])) == 0
    for rows, said in (
        ([0, 6], "got row 6, and it has 6 rows"),
        ([-1], "got row -1"),
        (np.arange(6) < 2, r"got bool\[6\].*numpy.flatnonzero"),
        ([1.7], "got float64"),
        ([[1]], "expected row numbers"),
        (3, "expected row numbers"),
    ):
        with pytest.raises(UsageError, match=said):
            table.take(rows)


def test_views_give_no_rows_of_others() -> None:
    part = PartTable(ArrayTable("emb", np.arange(6), np.ones((6, 2), np.float32), part_rows=[4, 2]), 1)
    assert part.take(np.array([1])).keys.tolist() == [5]
    for row in (-1, 2):
        with pytest.raises(UsageError, match="it has 2 rows"):
            part.take(np.array([row]))


@pytest.mark.parametrize(
    "which", [{"rows": -1}, {"rows": 0}, {"part": -1}, {"part": 1}, {"columns": ["values"]}], ids=str
)
def test_chunks_that_there_cannot_be(which: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="reading table 'emb': got"):
        a_table(5).chunks(**which)


def test_one_name_is_no_list_of_names(sample_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected a list of names: \['user_emb'\]"):
        kvtools.open(sample_path).select("user_emb")
    with pytest.raises(UsageError, match=r"expected a list: \['values'\]"):
        a_table(5).to_numpy("values")


@pytest.mark.parametrize("dialect", ["arrow", "parquet", "deeprec", "sok", "npz", "tfra_files"])
def test_rows_of_two_files_are_never_mixed(dialect: str, tmp_path: Path) -> None:
    path = tmp_path / "tables"
    rows = {"slots": {}, "freqs": None, "part_rows": [600, 400]}
    write_tables([a_table(**rows)], path, dialect)
    table = next(iter(kvtools.open(path).tables.values()))
    unread = next(iter(kvtools.open(path).tables.values()))
    old = {key: table[key] for key in (table.take([0]).keys[0], table.take([999]).keys[0])}
    chunks = table.chunks(rows=100)
    head = next(chunks)
    other = a_table(**rows)
    newer = ArrayTable("emb", other._chunk.keys, other._chunk.values + 1, part_rows=[600, 400])
    write_tables([newer], path, dialect, options=WriteOptions(force=True))
    # Either the file is open still, or that it is another one is told.
    with contextlib.suppress(BadInputError):
        for chunk in [head, *chunks]:
            np.testing.assert_array_less(np.abs(chunk.values - a_table(**rows)[chunk.keys]), 1e-6)
    for key, row in old.items():
        with contextlib.suppress(BadInputError):
            np.testing.assert_array_equal(table[key], row)
    for read in (lambda: unread.take([0]), lambda: [*unread.chunks()], lambda: unread.get([*old])):
        with pytest.raises(BadInputError, match="changed since it was opened; open it again"):
            read()


@pytest.mark.parametrize("dialect", ["deeprec", "hdf5", "npz", "sok", "tfra_files"])
def test_a_file_that_was_written_over_is_an_error_and_ends_no_process(dialect: str, tmp_path: Path) -> None:
    """Rows that are taken have no checksum, and a map of a file that is cut gives a signal."""
    write_tables([a_table(slots={}, freqs=None)], tmp_path / "tables", dialect)
    table = next(iter(kvtools.open(tmp_path / "tables").tables.values()))
    table.take(np.arange(1000))
    for file in [path for path in tmp_path.rglob("*") if path.is_file()]:
        file.write_bytes(b"")
    with pytest.raises(BadInputError, match="changed since it was opened; open it again"):
        table.take(np.arange(1000))


@pytest.mark.parametrize("dialect", ["tfplugin", "parquet", "arrow", "hdf5", "npz", "snapshot", "tfra_files"])
def test_a_table_is_read_by_threads_and_where_it_is_unpickled(dialect: str, tmp_path: Path) -> None:
    source = a_table(slots={}, freqs=None)
    write_tables([source], tmp_path / "tables", dialect)
    table = next(iter(kvtools.open(tmp_path / "tables").tables.values()))
    again = pickle.loads(pickle.dumps(table))

    def right(one: Any) -> bool:
        taken = one.take(np.arange(0, 1000, 7))
        return all(
            np.array_equal(chunk.values, source[chunk.keys]) for chunk in (*one.chunks(rows=301), taken)
        ) and np.array_equal(one.get(np.arange(50))[0], source.get(np.arange(50))[0])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, [table, again] * 4))


def test_a_table_is_not_taken_for_a_list_of_rows() -> None:
    table = a_table()
    with pytest.raises(TypeError):
        iter(table)
    with pytest.raises(TypeError, match="see to_numpy"):
        np.asarray(table)


def test_what_is_shown_at_a_prompt_and_in_a_notebook(sample_path: Path) -> None:
    checkpoint = kvtools.open(sample_path)
    assert repr(checkpoint["ads/emb"]) == (
        "<table 'ads/emb': 11 rows of 4 float32 by int64, 3 parts, with Adam.m, Adam.v, freq, version>"
    )
    lines = repr(checkpoint).splitlines()
    assert lines[0].startswith("<tfplugin checkpoint '") and lines[0].endswith("': 3 tables")
    assert lines[1].strip() == repr(checkpoint["ads/emb"])[1:-1]
    assert "<td>ads/emb</td><td>11</td><td>4</td>" in checkpoint._repr_html_()
    html = checkpoint["ads/emb"]._repr_html_()
    assert html.count("<tr>") == 6 and "<th>Adam.m</th>" in html and "<p>...</p>" in html
    many = Checkpoint("<b>", "memory", {f"t{n}": a_table(2) for n in range(30)}, broken={"bad": CorruptFileError("x")})
    assert "and 10 more" in repr(many) and "1 cannot be read: bad" in repr(many)
    assert "&lt;b&gt;" in many._repr_html_() and "and 10 more" in many._repr_html_()


def test_a_notebook_shows_a_damaged_table_as_damaged() -> None:
    class Damaged(ArrayTable):
        def read_part(self, *arguments: Any) -> Any:
            raise CorruptFileError("checksum <mismatch>")

    table = Damaged("emb", np.arange(2), np.zeros((2, 1), np.float32))
    assert "checksum &lt;mismatch&gt;" in table._repr_html_()


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", ml_dtypes.bfloat16, "int8", "int64", "bool"], ids=str
)
def test_libraries_take_a_table_as_it_is(dtype: Any) -> None:
    duckdb, polars, pandas = (pytest.importorskip(name) for name in ("duckdb", "polars", "pandas"))
    table = a_table(300, 3, dtype, part_rows=(100, 200))
    whole = table.to_numpy()
    wide = whole.values.astype(np.float32) if np.dtype(dtype).itemsize == 2 else whole.values
    arrow = pyarrow.table(table)
    assert arrow.column_names == ["key", "value", "Adam.m", "freq"]
    assert np.array_equal(np.array(arrow["value"].to_pylist(), wide.dtype), wide)
    frame = polars.DataFrame(table)
    assert frame["key"].to_list() == whole.keys.tolist()
    assert np.array_equal(np.array(frame["value"].to_list(), wide.dtype), wide)
    total = duckdb.sql('select sum(freq), count(*), max(key) from "table"').fetchall()
    assert total == [(int(whole.freqs.sum()), 300, int(whole.keys.max()))]
    taken = pandas.DataFrame.from_arrow(table) if hasattr(pandas.DataFrame, "from_arrow") else arrow.to_pandas()
    assert taken["key"].tolist() == whole.keys.tolist()
    assert np.array_equal(np.stack(taken["value"].tolist()), wide)


def test_vectors_are_one_column_of_pandas_and_are_not_copied() -> None:
    table = a_table(dim=4)
    frame = table.to_pandas()
    assert list(frame.columns) == ["key", "value", "slot_Adam.m", "freq"]
    assert frame["value"][3].tolist() == table.to_numpy().values[3].tolist()
    assert np.shares_memory(frame["value"][3], table.to_numpy().values)
    assert list(table.to_pandas(vectors="columns").columns)[:3] == ["key", "value_0", "value_1"]


def test_what_lies_in_memory_is_not_copied_on_its_way_to_arrow() -> None:
    table = a_table(100_000, 16)
    own = table.to_numpy()
    assert own.values is not None
    address = own.values.__array_interface__["data"][0]
    first = pyarrow.RecordBatchReader.from_stream(table).read_next_batch()
    assert first.column(1).flatten().buffers()[1].address == address
    assert first.column(0).buffers()[1].address == own.keys.__array_interface__["data"][0]
    assert table.to_arrow()["value"].chunk(0).flatten().buffers()[1].address == address
    batch = next(Checkpoint("m", "memory", {"emb": table}).sql("select value from emb").batches())
    assert batch.num_rows


def test_a_table_of_one_part_is_read_to_where_it_stays(tmp_path: Path) -> None:
    table = a_table(200_000, 16)
    write_tables([table], tmp_path / "a.ckpt", "tfplugin")
    opened = kvtools.open(tmp_path / "a.ckpt")["emb"]
    opened.to_numpy(limit=1)
    tracemalloc.start()
    whole = opened.to_numpy()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    size = sum(column.nbytes for column in (whole.keys, whole.values, whole.slots["Adam.m"], whole.freqs))
    assert most < 1.1 * size
    np.testing.assert_array_equal(whole.values, table.to_numpy().values)
    assert len(opened.to_numpy(limit=10)) == 10
