from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.dialects.bundle import Bundle
from kvtools.dialects.bundle.records import (
    BundleEntry,
    BundleHeader,
    decode_entry,
    decode_header,
    encode_entry,
    encode_header,
    slice_key,
)
from kvtools.dialects.bundle.wire import WireError

INT64 = st.integers(-(2**63), 2**63 - 1)


@given(st.integers(0, 2**31), st.lists(st.integers(0, 2**40)), st.integers(0, 2**60), st.integers(0, 2**32 - 1))
def test_entry_round_trip(shard: int, shape: list[int], offset: int, crc: int) -> None:
    entry = BundleEntry(9, tuple(shape), shard, offset, 77, crc)
    assert decode_entry(encode_entry(entry)) == entry


def test_header_round_trip() -> None:
    header = BundleHeader(shards=12)
    assert decode_header(encode_header(header)) == header


@given(INT64, INT64)
def test_slice_keys_sort_as_their_starts(a: int, b: int) -> None:
    keys = [slice_key(b"t", ((start, 1),)) for start in (a, b)]
    assert (keys[0] < keys[1]) == (a < b)


@given(st.binary(max_size=6), st.binary(max_size=6))
def test_slice_keys_sort_as_their_names(a: bytes, b: bytes) -> None:
    assert (slice_key(a, ()) < slice_key(b, ())) == (a < b)


def test_slice_keys_are_those_of_tensorflow(tf: Any, tmp_path: Path) -> None:
    """Starts of every encoded length; a key that differs by a bit is not found and `nbytes` fails."""
    starts = [0, 1, 63, 64, 8191, 8192, 2**20 - 1, 2**20, 2**27, 2**34, 2**41, 2**48, 2**55, 2**61]
    name = "odd\x01\xffname"
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "a"),
        tensor_names=[name.encode("utf-8")] * len(starts),
        shape_and_slices=[f"{2**62} 1 {start},1:-" for start in starts],
        tensors=[tf.zeros([1, 1])] * len(starts),
    )
    assert Bundle(tmp_path / "a").nbytes(name) == 4 * len(starts)


@pytest.mark.parametrize(
    "record",
    [
        b"\x12\x02\x18\x01",  # a shape of unknown rank
        b"\x20" + b"\xff" * 9 + b"\x01",  # a negative offset
        b"\x08",  # cut off
        b"\x12\x0d\x12\x0b\x08" + b"\xff" * 9 + b"\x01",  # a negative dimension
        b"\x0a\x01a",  # bytes where a number belongs
    ],
)
def test_malformed_entries_are_refused(record: bytes) -> None:
    with pytest.raises(WireError):
        decode_entry(record)


def test_ml_dtypes_have_numbers() -> None:
    from kvtools.dialects.bundle.dtypes import dtype_number, numpy_dtype

    for name in ("float32", "float16", "bfloat16", "float64", "int64", "int32", "uint64", "uint32"):
        number = next(n for n in range(1, 30) if (d := numpy_dtype(n)) is not None and d.name == name)
        dtype = numpy_dtype(number)
        assert dtype is not None and dtype_number(np.dtype(dtype)) == number
