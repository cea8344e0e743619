from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.dialects.chunk import ALL_COLUMNS, KEYS, Chunk, Columns
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, OutputError, UsageError
from kvtools.key_list import key_list
from kvtools.merge import merge
from kvtools.split import By, PartTable, RunTable, piece_names, split

Save = Callable[..., Path]
Make = Callable[..., Any]
Tensors = Callable[..., dict[str, Any]]


def rows_of(table: TableReader) -> list[tuple[bytes, ...]]:
    rows = []
    for chunk in table.chunks(rows=5):
        columns = [chunk.keys, chunk.values, *(chunk.slots[name] for name in sorted(chunk.slots))]
        columns += [chunk.freqs, chunk.versions]
        rows += [tuple(column[i].tobytes() for column in columns if column is not None) for i in range(len(chunk))]
    return rows


def keys_of(path: Path, table: str = "emb") -> list[int]:
    return [int(key) for key in open_checkpoint(path).table(table).all_keys()]


@pytest.fixture
def source(save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path) -> Checkpoint:
    one, two = make_sample("emb", rows=50), make_sample("other", rows=7, key_dtype="uint64", slots=())
    tensors = table_tensors(one, 3) | table_tensors(two) | {"w": np.zeros(3)}
    return open_checkpoint(save_plain(tmp_path / "source", tensors))


@pytest.mark.parametrize(
    "by",
    [By("part"), By("mod", 1), By("mod", 4), By("keys", keys=key_list([0, 1, -1])), By("rows", 9), By("rows", 999)],
    ids=lambda by: f"{by.kind}-{by.number}",
)
def test_the_pieces_merged_again_are_the_whole(source: Checkpoint, tmp_path: Path, by: By) -> None:
    accounts = split(source, tmp_path / "pieces", by)
    names = piece_names(list(source.tables.values()), by)
    assert [Path(account.output).name for account in accounts] == names
    pieces = [open_checkpoint(account.output) for account in accounts]
    assert all(piece.variables == () for piece in pieces)
    for name, table in source.tables.items():
        rows = [row for piece in pieces if name in piece.tables for row in rows_of(piece.table(name))]
        assert sorted(rows) == sorted(rows_of(table))
    if len(pieces) > 1:
        merge(pieces, tmp_path / "whole", on_conflict="error", parts=3)
        whole = open_checkpoint(tmp_path / "whole")
        for name, table in source.tables.items():
            assert sorted(rows_of(whole.table(name))) == sorted(rows_of(table))


def test_by_table(source: Checkpoint, tmp_path: Path) -> None:
    split(source, tmp_path / "{}.ckpt", By("table"))
    assert list(open_checkpoint(tmp_path / "emb.ckpt").tables) == ["emb"]
    assert rows_of(open_checkpoint(tmp_path / "emb.ckpt").table("emb")) == rows_of(source.table("emb"))
    assert open_checkpoint(tmp_path / "other.ckpt").table("other").rows == 7


@pytest.mark.parametrize(
    ("to", "names", "of_each_table"),
    [
        ("hdf5", ["mod-0-of-2.h5", "mod-1-of-2.h5"], ["emb.h5", "other.h5"]),
        ("npz", ["mod-0-of-2.npz", "mod-1-of-2.npz"], ["emb.npz", "other.npz"]),
        ("parquet", ["mod-0-of-2", "mod-1-of-2"], ["emb.parquet", "other.parquet"]),
    ],
)
def test_pieces_in_a_folder_are_called_as_their_dialect_has_it(
    source: Checkpoint, tmp_path: Path, to: str, names: list[str], of_each_table: list[str]
) -> None:
    accounts = split(source, tmp_path / "pieces", By("mod", 2), to=to)
    assert [Path(account.output).name for account in accounts] == names
    pieces = [open_checkpoint(account.output) for account in accounts]
    assert [sum(piece.table(name).rows for piece in pieces) for name in source.tables] == [50, 7]
    accounts = split(source, tmp_path / "tables", By("table"), to=to)
    assert [Path(account.output).name for account in accounts] == of_each_table


def test_each_piece_has_what_it_is_called(source: Checkpoint, tmp_path: Path) -> None:
    everything = keys_of(tmp_path / "source")
    split(source, tmp_path / "a", By("mod", 4), tables=["emb"])
    for number in range(4):
        assert sorted(keys_of(tmp_path / "a" / f"mod-{number}-of-4")) == sorted(
            k for k in everything if k % 4 == number
        )
    split(source, tmp_path / "a", By("keys", keys=key_list([0, -1, 12345])), tables=["emb"])
    assert sorted(keys_of(tmp_path / "a/listed")) == [-1, 0]
    assert len(keys_of(tmp_path / "a/rest")) == 48
    split(source, tmp_path / "none", By("keys", keys=key_list([])), tables=["emb"])
    assert keys_of(tmp_path / "none/listed") == [] and len(keys_of(tmp_path / "none/rest")) == 50
    split(source, tmp_path / "a", By("rows", 20), tables=["emb"])
    assert [len(keys_of(tmp_path / f"a/rows-{i:05d}-of-00003")) for i in range(3)] == [20, 20, 10]
    split(source, tmp_path / "a", By("part"), tables=["emb"])
    for part in range(3):
        piece = open_checkpoint(tmp_path / f"a/part-{part:05d}-of-00003").table("emb")
        assert piece.parts == 1 and all(int(key) % 3 == part for key in piece.all_keys())


@pytest.mark.parametrize(("start", "stop"), [(0, 0), (0, 50), (3, 4), (15, 40), (40, 90)])
def test_runs_and_parts_of_a_table(source: Checkpoint, start: int, stop: int) -> None:
    table = source.table("emb")
    run = RunTable(table, start, stop)
    expected = rows_of(table)[start:stop]
    assert rows_of(run) == expected and run.rows == len(expected)
    if expected:
        assert np.array_equal(run.take(np.array([0]), ALL_COLUMNS).keys, table.all_keys()[start : start + 1])
    parts = [PartTable(table, part) for part in range(3)]
    assert [row for part in parts for row in rows_of(part)] == rows_of(table)
    assert np.array_equal(parts[1].take(np.array([2, 0])).keys, parts[1].all_keys()[[2, 0]])


def test_lists_of_keys_go_with_the_first_piece(tmp_path: Path) -> None:
    table = ArrayTable(
        "emb",
        np.arange(10),
        np.ones((10, 2), np.float32),
        extras={"deleted_keys": np.array([1]), "initial_values": np.ones((3, 2), np.float32)},
    )
    accounts = split(Checkpoint(tmp_path, "hdf5", {"emb": table}), tmp_path / "{}.h5", By("mod", 2))
    first, second = (open_checkpoint(account.output).table("emb") for account in accounts)
    assert {extra.name for extra in first.schema.extras} == {"deleted_keys", "initial_values"}
    assert {extra.name for extra in second.schema.extras} == {"initial_values"}


def test_damage_is_found_when_rows_are_split(source: Checkpoint, tmp_path: Path) -> None:
    from kvtools.dialects.bundle import Bundle

    bundle = Bundle(tmp_path / "source")
    entry = bundle.entries["emb/part_2-values"]
    data = bytearray(bundle.data_path(0).read_bytes())
    data[entry.offset + entry.size - 1] ^= 1
    bundle.data_path(0).write_bytes(bytes(data))
    with pytest.raises(CorruptFileError, match="checksum mismatch"):
        split(open_checkpoint(tmp_path / "source"), tmp_path / "a", By("rows", 10))
    assert not (tmp_path / "a").exists()


def test_refused(source: Checkpoint, sample_path: Path, tmp_path: Path) -> None:
    for kind in ("mod", "rows"):
        with pytest.raises(UsageError, match="got 0, expected 1 or more"):
            By(kind, 0)
    with pytest.raises(UsageError, match="a list of keys"):
        By("keys")
    split(source, tmp_path / "a", By("table"))
    with pytest.raises(OutputError, match="exists"):
        split(source, tmp_path / "a", By("table"))
    split(source, tmp_path / "a", By("table"), options=WriteOptions(force=True))
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is no folder"):
        split(source, tmp_path / "file", By("table"))
    with pytest.raises(UsageError, match="a URL is no folder"):
        split(source, "redis://localhost/0", By("table"))
    with pytest.raises(BadInputError, match="no key-value table"):
        split(dataclasses.replace(source, tables={}), tmp_path / "b", By("table"))


class Changing:
    """A condition that is another each time it is asked."""

    asked = 0

    def columns_of(self, table: TableReader) -> Columns:
        return KEYS

    def mask(self, chunk: Chunk) -> Any:
        self.asked += 1
        return np.random.default_rng(self.asked).random(len(chunk)) < 0.5


def test_rows_are_in_one_piece_each_whatever_a_condition_says(source: Checkpoint, tmp_path: Path) -> None:
    split(source, tmp_path / "{}", By("where", where=Changing()))
    matching, rest = keys_of(tmp_path / "matching"), keys_of(tmp_path / "rest")
    assert sorted(matching + rest) == sorted(source.table("emb").all_keys().tolist()) and matching and rest


def test_pieces_that_are_not_the_table_are_told_before_the_last_is_written(
    source: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtools.split.owners", lambda keys, number, rule: np.full(len(keys), 9))
    with pytest.raises(BadInputError, match=r"table 'other' has 7 rows, and its pieces 0: it changed"):
        split(source, tmp_path / "{}", By("mod", 2), tables=["other", "emb"])
    assert not (tmp_path / "mod-1-of-2.index").exists()
