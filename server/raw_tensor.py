"""Tensors as protocols send them: their raw little-endian values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvtools.server.protocol_error import invalid
from kvtools.server.signatures import Array


def raw_array(
    name: str, data: bytes | memoryview, dtype: np.dtype[Any], shape: list[int], *, of: str, where: str = ""
) -> Array:
    """Return the array [shape] of `data`, without a copy; a bool is a byte, and true unless it is 0.

    Raises a `ProtocolError` if it has another length: for the input `name`, in `where`, of a type that is called `of`.

    Example:
        >>> raw_array("ids", b"\\x07\\x00", np.dtype("<i2"), [1], of="INT16")
        array([7], dtype=int16)
    """
    expected = math.prod(shape) * dtype.itemsize
    if len(data) != expected:
        raise invalid(f"input '{name}': got {len(data)} bytes{where}, expected {expected}: shape {shape} of {of}")
    if dtype == np.bool_:
        flags: Array = (np.frombuffer(data, np.uint8) != 0).reshape(shape)
        return flags
    return np.frombuffer(data, dtype).reshape(shape)
