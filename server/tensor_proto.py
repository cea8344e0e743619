"""TensorFlow's TensorProto to NumPy and back.

A tensor's values are its raw bytes (`tensor_content`), or a list of its type (`int64_val` and its like) in which the
last value stands for all that follow, and no value for zeros. Values in the list of another type, which TensorFlow
takes for zeros, too, are an error. Answers are raw bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvtools.server.protocol_error import ProtocolError, invalid
from kvtools.server.protos import DATA_TYPES, TensorProto
from kvtools.server.raw_tensor import raw_array
from kvtools.server.signatures import FROM_TENSORFLOW, STRING, TENSORFLOW_TYPES, TYPE_WORDS, Array

_NAMES = {number: name for name, number in DATA_TYPES.items()}
_LISTS = {
    "float32": "float_val",
    "float64": "double_val",
    "int32": "int_val",
    "int16": "int_val",
    "int8": "int_val",
    "uint8": "int_val",
    "uint16": "int_val",
    "uint32": "uint32_val",
    "int64": "int64_val",
    "uint64": "uint64_val",
    "bool": "bool_val",
    "object": "string_val",
    "float16": "half_val",
    "bfloat16": "half_val",
}
_ALL_LISTS = sorted(field.name for field in TensorProto.DESCRIPTOR.fields if field.name.endswith("_val"))


def decode(name: str, proto: Any, *, limit: int) -> Array:
    """Return the array of a TensorProto, of at most `limit` elements; raises a `ProtocolError` if it is none."""
    type_name = _NAMES.get(proto.dtype, str(proto.dtype))
    dtype = FROM_TENSORFLOW.get(type_name)
    if dtype is None:
        raise invalid(f"input '{name}': tensors of type {type_name} are not supported")
    if proto.tensor_shape.unknown_rank:
        raise invalid(f"input '{name}': the tensor has no shape")
    shape = [dim.size for dim in proto.tensor_shape.dim]
    if any(size < 0 for size in shape) or len(shape) > 32:
        raise invalid(f"input '{name}': {shape[:40]} is no shape of a tensor")
    count = math.prod(shape)
    if count > limit or any(size > 1 << 40 for size in shape):
        raise ProtocolError(
            "INVALID_ARGUMENT",
            f"input '{name}': got shape {shape}, expected at most {limit} elements; send several requests",
            status=413,
        )
    content = proto.tensor_content
    if content:
        if dtype == STRING:
            raise invalid(f"input '{name}': strings are read from string_val, not from tensor_content")
        return raw_array(name, content, dtype, shape, of=str(dtype), where=" of tensor_content")
    return _from_list(name, proto, dtype, count).reshape(shape)


def _from_list(name: str, proto: Any, dtype: np.dtype[Any], count: int) -> Array:
    if _LISTS[dtype.name] == "half_val":
        values = _narrow(name, np.array(proto.half_val[:count], np.int64), np.dtype(np.uint16)).view(dtype)
    elif dtype == STRING:
        values = np.empty(min(count, len(proto.string_val)), STRING)
        values[:] = proto.string_val[:count]
    else:
        # The type of the list is said: of large and small numbers NumPy would make floats.
        wide = np.dtype(np.int64) if _LISTS[dtype.name] == "int_val" else dtype
        values = _narrow(name, np.array(getattr(proto, _LISTS[dtype.name])[:count], wide), dtype)
    if len(values) == count:
        return values
    if not len(values):
        listed = _LISTS[dtype.name]
        others = [other for other in _ALL_LISTS if other != listed and len(getattr(proto, other))]
        if others:
            raise invalid(
                f"input '{name}': got values in {others[0]}, those of {TYPE_WORDS[dtype]} are sent in {listed}"
            )
    last: Any = values[-1] if len(values) else (b"" if dtype == STRING else 0)
    whole = np.full(count, last, dtype)
    whole[: len(values)] = values
    return whole


def _narrow(name: str, values: Array, dtype: np.dtype[Any]) -> Array:
    if not len(values):
        return np.empty(0, dtype)
    if dtype.kind in "iu" and dtype.itemsize < 4:
        limits = np.iinfo(dtype)
        if values.min() < limits.min or values.max() > limits.max:
            raise invalid(f"input '{name}': a value does not fit {dtype}")
    return values.astype(dtype, copy=False)


def encode(array: Array, proto: Any) -> None:
    """Fill a TensorProto with `array`."""
    proto.dtype = DATA_TYPES[TENSORFLOW_TYPES[array.dtype]]
    dims = proto.tensor_shape.dim
    proto.tensor_shape.SetInParent()
    for size in array.shape:
        dims.add().size = size
    if array.dtype == STRING:
        proto.string_val.extend(value if isinstance(value, bytes) else str(value).encode() for value in array.flat)
    else:
        proto.tensor_content = array.tobytes()


def as_json(array: Array) -> dict[str, Any]:
    """Return the TensorProto of `array` as JSON has messages."""
    from google.protobuf.json_format import MessageToDict

    proto = TensorProto()
    encode(array, proto)
    return MessageToDict(proto, preserving_proto_field_name=True)  # type: ignore[no-any-return]
