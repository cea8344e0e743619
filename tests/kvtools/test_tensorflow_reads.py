"""TensorFlow's own reader opens every bundle that kvtools writes, and finds in it what was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtools
from kvtools.dialects.bundle import Bundle
from kvtools.dialects.detect import dialects, open_checkpoint
from kvtools.migrate import write_tables

BUNDLES = [name for name, dialect in dialects().items() if dialect.write is not None and dialect.output == "prefix"]


@pytest.mark.parametrize("sliced", [1, 3])
@pytest.mark.parametrize("name", [name for name in BUNDLES if dialects()[name].holds.variables])
def test_every_tensor_is_read_by_tensorflow(
    tf: Any, save: Any, table_tensors: Any, make_sample: Any, tmp_path: Path, name: str, sliced: int
) -> None:
    """Tables, dense variables and strings, from a checkpoint whose tensors are whole or in slices."""
    sample = make_sample("emb", rows=60, dim=4)
    limits = np.iinfo(np.int32).max  # what every engine's counters hold
    sample.freqs, sample.versions = sample.freqs % limits, sample.versions % limits
    words = np.array([b"one", b"\x00\xff" * 200], object)
    dense = {
        "dense/kernel": np.arange(12, dtype=np.float32).reshape(4, 3),
        "half": np.arange(5, dtype=np.float16),
        "flags": np.array([True, False, True]),
        "words": words,
        "global_step": np.int64(7),
        "empty": np.zeros((0, 3), np.float32),
    }
    source = save(tmp_path / "source", {**table_tensors(sample, 3), **dense}, slices=sliced)
    checkpoint = open_checkpoint(source)
    account = write_tables(checkpoint.select([]), tmp_path / "out", name, beside=checkpoint, verify=True)
    assert account.variables == len(dense)
    reader = tf.train.load_checkpoint(str(tmp_path / "out"))
    bundle = Bundle(tmp_path / "out")
    assert set(reader.get_variable_to_shape_map()) == set(bundle.entries)
    for tensor, entry in bundle.entries.items():
        got = reader.get_tensor(tensor)
        assert np.shape(got) == entry.shape
        if tensor in dense:
            assert np.array_equal(got, dense[tensor])
        elif entry.dtype != 7:
            assert np.asarray(got).tobytes() == bundle.tensor(tensor).read().tobytes()


@pytest.mark.parametrize("name", BUNDLES)
def test_a_table_of_arrays_is_read_by_tensorflow(tf: Any, tmp_path: Path, name: str) -> None:
    table = kvtools.table_from_arrays("emb", np.arange(50), np.ones((50, 8), np.float32), parts=3)
    write_tables([table], tmp_path / "out", name)
    reader = tf.train.load_checkpoint(str(tmp_path / "out"))
    shapes = reader.get_variable_to_shape_map()
    assert shapes and all(np.shape(reader.get_tensor(tensor)) == tuple(shape) for tensor, shape in shapes.items())
