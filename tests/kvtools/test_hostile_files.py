"""Checkpoints from strangers: whatever the bytes, the answer is rows or one of our errors, and soon."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtools.dialects.bundle.index_table import read_table, table_bytes
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError, KvtoolsError
from kvtools.inspect import describe, find_rows

SAMPLE = Path(__file__).parent.parent / "data" / "sample"
INDEX, DATA = "model.ckpt-7.index", "model.ckpt-7.data-00000-of-00001"


def use(folder: Path) -> None:
    """Do all that the tools do with a checkpoint."""
    try:
        checkpoint = open_checkpoint(folder)
        describe(checkpoint)
        find_rows(checkpoint.select([]), [0, -7])
        for table in checkpoint.tables.values():
            for chunk in table.chunks(rows=3):
                assert chunk.values is not None and len(chunk.keys) == len(chunk.values)
    except KvtoolsError:
        pass


def damage(data: bytes, edits: list[tuple[int, int]]) -> bytes:
    damaged = bytearray(data)
    for position, value in edits:
        damaged[position % len(damaged)] = value
    return bytes(damaged)


EDITS = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), min_size=1, max_size=4)


@settings(deadline=None)
@given(edits=EDITS, name=st.sampled_from([INDEX, DATA, "checkpoint"]))
def test_any_file_damaged(edits: list[tuple[int, int]], name: str) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = shutil.copytree(SAMPLE, Path(parent) / "sample")
        (folder / name).write_bytes(damage((folder / name).read_bytes(), edits))
        use(folder)


@settings(deadline=None, max_examples=200)
@given(edits=EDITS, record=st.integers(0, 100))
def test_index_that_lies_under_right_checksums(edits: list[tuple[int, int]], record: int) -> None:
    with tempfile.TemporaryDirectory() as parent:
        folder = shutil.copytree(SAMPLE, Path(parent) / "sample")
        records = sorted(read_table(folder / INDEX).items())
        key, value = records[record % len(records)]
        records[record % len(records)] = (key, damage(value, edits))
        (folder / INDEX).write_bytes(table_bytes(records))
        use(folder)


@settings(deadline=None, max_examples=50)
@given(data=st.binary(max_size=300))
def test_index_of_any_bytes(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a.index").write_bytes(data)
        use(Path(folder))


@pytest.mark.parametrize("field", ["parts", "part", "dim"])
def test_huge_numbers_in_kvmeta(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path, field: str
) -> None:
    tensors = table_tensors(make_sample("emb", rows=3))
    record = json.loads(tensors["emb-kvmeta"])
    tensors["emb-kvmeta"] = json.dumps({**record, "parts": 10**15, field: 10**14})
    with pytest.raises(BadInputError):
        open_checkpoint(save_plain(tmp_path / "a", tensors))
