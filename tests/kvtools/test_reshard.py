from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.dialects.bundle import Bundle
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import TableReader
from kvtools.dialects.tfplugin import DIALECT
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, OutputError, UnknownTableError, UsageError
from kvtools.fit import fit
from kvtools.migrate import _count_rows, _routed
from kvtools.partition import owners
from kvtools.reshard import reshard

Save = Callable[..., Path]
Make = Callable[..., Any]
Tensors = Callable[..., dict[str, Any]]


def part_rows(table: TableReader, part: int) -> list[tuple[bytes, ...]]:
    """The rows of a part, every column as bytes, sorted."""
    rows = []
    for chunk in table.chunks(part=part, rows=7):
        columns = [chunk.keys, chunk.values, *(chunk.slots[name] for name in sorted(chunk.slots))]
        columns += [chunk.freqs, chunk.versions]
        rows += [tuple(column[i].tobytes() for column in columns if column is not None) for i in range(len(chunk))]
    return sorted(rows)


def expected_rows(sample: Any, parts: int, part: int) -> list[tuple[bytes, ...]]:
    columns = [sample.keys, sample.values, *(sample.slots[name] for name in sorted(sample.slots))]
    columns += [sample.freqs, sample.versions]
    here = [i for i, key in enumerate(sample.keys) if int(key) % parts == part]
    return sorted(tuple(column[i].tobytes() for column in columns) for i in here)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (4, 1), (3, 5), (5, 3), (2, 300)])
@pytest.mark.parametrize("key_dtype", ["int64", "int32", "uint64"])
def test_each_row_goes_to_the_part_that_owns_its_key(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path, before: int, after: int, key_dtype: str
) -> None:
    sample = make_sample("emb", key_dtype=key_dtype, rows=80)
    path = save_plain(tmp_path / "a", table_tensors(sample, before))
    account = reshard(open_checkpoint(path), tmp_path / "b", after)
    table = open_checkpoint(tmp_path / "b").table("emb")
    assert table.schema.parts == after == account.tables[0].parts
    assert table.schema.part_rows == account.tables[0].part_rows
    for part in range(after):
        assert part_rows(table, part) == expected_rows(sample, after, part)
    assert table.schema.metadata["initializer"]["kind"] == "constant"


def test_rows_that_stand_in_a_wrong_part_are_put_right(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path
) -> None:
    sample = make_sample("emb", rows=50)
    tensors = table_tensors(sample, 2)
    names = [
        name.replace("part_0", "part_1") if "part_0" in name else name.replace("part_1", "part_0") for name in tensors
    ]
    swapped = {
        name: tensors[name] if name.endswith("kvmeta") else value
        for name, value in zip(names, tensors.values(), strict=True)
    }
    path = save_plain(tmp_path / "a", swapped)
    reshard(open_checkpoint(path), tmp_path / "b", 2)
    table = open_checkpoint(tmp_path / "b").table("emb")
    assert [part_rows(table, part) for part in (0, 1)] == [expected_rows(sample, 2, part) for part in (0, 1)]


def test_equal_keys_keep_their_order(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path
) -> None:
    sample = make_sample("emb", rows=30)
    sample.keys = np.tile(np.array([5, 7, 6]), 10)
    path = save_plain(tmp_path / "a", table_tensors(sample))
    reshard(open_checkpoint(path), tmp_path / "b", 3)
    table = open_checkpoint(tmp_path / "b").table("emb")
    for part in range(3):
        (chunk,) = table.chunks(part=part)
        here = owners(sample.keys, 3, "floor_mod") == part
        assert np.array_equal(chunk.values, sample.values[here])


def test_other_tables_and_variables_are_carried_along(sample_path: Path, tmp_path: Path) -> None:
    before = open_checkpoint(sample_path)
    reshard(before, tmp_path / "b", 4, tables=["user_emb"])
    after = open_checkpoint(tmp_path / "b")
    assert [(name, table.schema.parts) for name, table in after.tables.items()] == [
        ("ads/emb", 3),
        ("empty_emb", 1),
        ("user_emb", 4),
    ]
    assert after.variables == before.variables
    for variable in before.variables:
        for was, now in zip(before.read_variable(variable.name), after.read_variable(variable.name), strict=True):
            assert np.array_equal(was, now)


def test_every_part_gets_the_initial_rows(
    save_plain: Save, make_sample: Make, table_tensors: Tensors, tmp_path: Path
) -> None:
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    path = save_plain(tmp_path / "a", table_tensors(make_sample("emb")) | {"emb-init": rows})
    reshard(open_checkpoint(path), tmp_path / "b", 2)
    bundle = Bundle(tmp_path / "b")
    for part in range(2):
        assert np.array_equal(bundle.tensor(f"emb/part_{part}-init").read(), rows)
    assert np.array_equal(open_checkpoint(tmp_path / "b").table("emb").extra("initial_values"), rows)


def test_in_place(sample_path: Path) -> None:
    prefix = sample_path / "model.ckpt-7"
    before = part_rows(open_checkpoint(prefix).table("user_emb"), 0)
    reshard(open_checkpoint(prefix), prefix, 2, options=WriteOptions(force=True))
    table = open_checkpoint(prefix).table("user_emb")
    assert sorted(part_rows(table, 0) + part_rows(table, 1)) == before
    assert sorted(file.name for file in sample_path.iterdir()) == [
        "checkpoint",
        "model.ckpt-7.data-00000-of-00001",
        "model.ckpt-7.index",
    ]


def test_refused(sample_path: Path, save_plain: Save, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(sample_path)
    with pytest.raises(UsageError, match="got 0 parts, expected 1 or more"):
        reshard(checkpoint, tmp_path / "b", 0)
    with pytest.raises(OutputError, match="exists"):
        reshard(checkpoint, sample_path / "model.ckpt-7", 2)
    with pytest.raises(UnknownTableError, match="no such table"):
        reshard(checkpoint, tmp_path / "b", 2, tables=["nothing"])
    with pytest.raises(UsageError, match=r"does not write it; choose --to from .*tfplugin"):
        reshard(checkpoint, tmp_path / "b", 2, to="tensorflow")
    plain = open_checkpoint(save_plain(tmp_path / "plain", {"w": np.zeros(3)}))
    with pytest.raises(BadInputError, match="no key-value table"):
        reshard(plain, tmp_path / "b", 2)
    assert not (tmp_path / "b.index").exists()


def test_many_parts_into_many_take_nothing_for_each_pair() -> None:
    keys = np.arange(1000) * 997
    source = ArrayTable("emb", keys, np.zeros((1000, 1), np.float32), part_rows=(5,) * 200)
    fitted = fit(source.schema, DIALECT, parts=100_000)
    tracemalloc.start()
    counts = _count_rows(source, fitted, 100_000, "floor_mod", 1)
    chunks = [chunk for part in range(200) for chunk in source.chunks(part=part)]
    routed = [list(_routed(chunk, 100_000, "floor_mod", {})) for chunk in chunks]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [list(of_part) for of_part in counts] == [[target for target, _ in pieces] for pieces in routed]
    assert sum(sum(of_part.values()) for of_part in counts) == 1000
    assert peak < 8 << 20, "200 x 100,000 counts are 160 MB"
