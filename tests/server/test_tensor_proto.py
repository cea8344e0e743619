"""TensorProto beside TensorFlow's own reading and writing of it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("google.protobuf")
from kvtools.server.protocol_error import ProtocolError
from kvtools.server.protos import TensorProto
from kvtools.server.signatures import STRING, TENSORFLOW_TYPES
from kvtools.server.tensor_proto import decode, encode

DTYPES = list(TENSORFLOW_TYPES)
LISTS = {
    "float32": "float_val",
    "float64": "double_val",
    "int64": "int64_val",
    "uint64": "uint64_val",
    "uint32": "uint32_val",
    "bool": "bool_val",
    "object": "string_val",
    "float16": "half_val",
    "bfloat16": "half_val",
}


def draw(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
    rng = np.random.default_rng(0)
    if dtype == STRING:
        array = np.empty(shape, object)
        array.flat[:] = [rng.bytes(index % 4) for index in range(array.size)]
        return array
    if dtype == np.dtype(np.bool_):
        return rng.integers(0, 2, shape).astype(bool)
    bits = rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)
    array = bits.view(dtype)
    if dtype.kind not in "iu":
        array[np.isnan(array)] = 1
    return array


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_as_tensorflow_does(tf: Any, dtype: np.dtype[Any]) -> None:
    array = draw(dtype, (3, 2))
    listed = tf.make_tensor_proto(array[:1, :1].tolist(), dtype, (1, 1))  # one value goes as a list
    got = decode("x", TensorProto.FromString(listed.SerializeToString()), limit=1)
    assert got.dtype == dtype and got.tolist() == array[:1, :1].tolist()
    theirs = tf.make_tensor_proto(array)
    got = decode("x", TensorProto.FromString(theirs.SerializeToString()), limit=6)
    assert got.dtype == dtype and got.shape == (3, 2)
    assert got.tolist() == array.tolist()
    ours = TensorProto()
    encode(array, ours)
    back = tf.make_ndarray(type(theirs).FromString(ours.SerializeToString()))
    assert back.dtype == dtype and back.tolist() == array.tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_list_that_is_short_is_filled_up_with_its_last_value(tf: Any, dtype: np.dtype[Any]) -> None:
    """TensorFlow has every tensor of one value so, and one of zeros without any."""
    value = draw(dtype, (1, 3))[0, 1]
    theirs = tf.make_tensor_proto(value, dtype, [2, 2])
    assert not theirs.tensor_content
    got = decode("x", TensorProto.FromString(theirs.SerializeToString()), limit=4)
    assert got.tolist() == tf.make_ndarray(theirs).tolist() == np.full((2, 2), value, dtype).tolist()
    theirs.ClearField(LISTS.get(dtype.name, "int_val"))
    got = decode("x", TensorProto.FromString(theirs.SerializeToString()), limit=4)
    assert got.tolist() == np.full((2, 2), b"" if dtype == STRING else 0, dtype).tolist()


@pytest.mark.parametrize(
    ("proto", "message"),
    [
        (TensorProto(dtype=9, int_val=[17]), "got values in int_val, those of int64 are sent in int64_val"),
        (TensorProto(dtype=3, int64_val=[17]), "got values in int64_val, those of int32 are sent in int_val"),
        (TensorProto(dtype=1, double_val=[0.5]), "got values in double_val, those of float are sent in float_val"),
        (TensorProto(dtype=19, float_val=[0.5]), "got values in float_val, those of half are sent in half_val"),
        (TensorProto(dtype=7, int_val=[1]), "got values in int_val, those of string are sent in string_val"),
    ],
)
def test_values_in_the_list_of_another_type_are_no_zeros(proto: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        decode("x", proto, limit=4)


def test_values_that_do_not_fit_their_type() -> None:
    for number, value in ((6, 128), (4, -1), (17, 65536), (5, 1 << 20)):
        proto = TensorProto(dtype=number, int_val=[value])
        with pytest.raises(ProtocolError, match="does not fit"):
            decode("x", proto, limit=4)
    proto = TensorProto(dtype=19, half_val=[70000])
    with pytest.raises(ProtocolError, match="does not fit"):
        decode("x", proto, limit=4)
    assert decode("x", TensorProto(dtype=14, half_val=[0x3F80]), limit=1) == np.ones((), ml_dtypes.bfloat16)
