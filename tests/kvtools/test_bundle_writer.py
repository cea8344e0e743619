"""Bundles written in pieces, in any order, from any process, as TensorFlow reads them."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.dialects.bundle import Bundle, BundleWriter, RegionWriter
from kvtools.dialects.bundle.checksum import combine, extend, of_runs


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=5))
def test_checksums_of_runs_combine(data: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    runs = [data[a:b] for a, b in itertools.pairwise(bounds)]
    assert of_runs((extend(0, run), len(run)) for run in runs) == extend(0, data)


def test_checksums_of_long_runs_combine() -> None:
    zeros = bytes(1 << 20)
    crc = expected = extend(0, b"a")
    for _ in range(12):
        crc = combine(crc, extend(0, zeros), len(zeros))
        expected = extend(expected, zeros)
    assert crc == expected


def test_tensorflow_reads_regions_filled_in_any_order(tf: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(1000, 3)).astype(np.float32)
    keys = rng.integers(-(2**63), 2**63 - 1, 1000)
    cuts = [0, 1, 10, 11, 500, 1000]
    runs = rng.permutation(list(itertools.pairwise(cuts)))
    with BundleWriter(tmp_path / "a") as writer:
        regions = pickle.loads(
            pickle.dumps(
                [
                    writer.reserve("values", values.dtype, values.shape),
                    writer.reserve("empty", np.dtype(np.int32), (0, 7)),
                    writer.reserve("keys", keys.dtype, keys.shape),
                ]
            )
        )
        for some in (runs[:2], runs[2:]):
            shard = RegionWriter(regions[0].path)
            for start, stop in some:
                shard.write(regions[2], start, keys[start:stop])
                shard.write(regions[0], start, values[start:stop])
            writer.absorb(shard.finish())
        writer.array("scalar", np.float64(2.5))
        writer.strings("names", [b"a", b"", b"\xff" * 300], (3, 1))
        writer.begin("appended", np.dtype(np.int16), (2,))
        writer.append(np.ones((2, 2), np.int16))
        writer.append(np.zeros((1, 2), np.int16))
        writer.end()
    reader = tf.train.load_checkpoint(str(tmp_path / "a"))
    np.testing.assert_array_equal(reader.get_tensor("values"), values)
    np.testing.assert_array_equal(reader.get_tensor("keys"), keys)
    assert reader.get_tensor("empty").shape == (0, 7) and reader.get_tensor("scalar") == 2.5
    assert reader.get_tensor("names").tolist() == [[b"a"], [b""], [b"\xff" * 300]]
    assert reader.get_tensor("appended").tolist() == [[1, 1], [1, 1], [0, 0]]
    np.testing.assert_array_equal(np.concatenate(list(Bundle(tmp_path / "a").tensor("values").chunks(7))), values)


@pytest.mark.parametrize(
    ("runs", "missing"),
    [([], 0), ([(0, 2)], 2), ([(1, 4)], 0), ([(0, 2), (3, 4)], 2), ([(0, 3), (2, 4)], 3)],
)
def test_rows_that_were_not_written_once_each_make_no_checkpoint(
    tmp_path: Path, runs: list[tuple[int, int]], missing: int
) -> None:
    writer = BundleWriter(tmp_path / "a")
    region = writer.reserve("keys", np.dtype(np.int64), (4,))
    shard = RegionWriter(region.path)
    for start, stop in runs:
        shard.write(region, start, np.arange(start, stop))
    writer.absorb(shard.finish())
    with pytest.raises(ValueError, match=f"rows {missing} on of 4 were not written once each"):
        writer.close()
    assert not (tmp_path / "a.index").exists()


def test_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="expected 2 float32 rows of shape"),
        BundleWriter(tmp_path / "a") as writer,
    ):
        region = writer.reserve("values", np.dtype(np.float32), (2, 3))
        RegionWriter(region.path).write(region, 1, np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="tensor 'x' is written twice"), BundleWriter(tmp_path / "b") as writer:
        writer.reserve("x", np.dtype(np.float32), (0,))
        writer.reserve("x", np.dtype(np.float32), (0,))
