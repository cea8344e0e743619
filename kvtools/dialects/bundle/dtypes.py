"""TensorFlow's numbers for data types, as a checkpoint index stores them.

Format: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/framework/types.proto
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

_NAMES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    7: "string",
    8: "complex64",
    9: "int64",
    10: "bool",
    11: "qint8",
    12: "quint8",
    13: "qint32",
    14: "bfloat16",
    15: "qint16",
    16: "quint16",
    17: "uint16",
    18: "complex128",
    19: "float16",
    20: "resource",
    21: "variant",
    22: "uint32",
    23: "uint64",
    24: "float8_e5m2",
    25: "float8_e4m3fn",
    29: "int4",
    30: "uint4",
}
_NUMBERS = {name: number for number, name in _NAMES.items()}
_NUMPY: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
_NATIVE = frozenset(
    [
        "float32",
        "float64",
        "float16",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
        "complex64",
        "complex128",
    ]
)

STRING = 7


def dtype_name(number: int) -> str:
    """Return the name of TensorFlow's data type `number`; a number that is not known gives `dtype<number>`.

    >>> dtype_name(14)
    'bfloat16'
    """
    return _NAMES.get(number, f"dtype{number}")


def numpy_dtype(number: int) -> np.dtype[Any] | None:
    """Return the NumPy type of TensorFlow's data type `number`, or None where there is none (strings,
    resources).

    >>> numpy_dtype(1)
    dtype('float32')
    """
    name = dtype_name(number)
    if name in _NUMPY:
        return _NUMPY[name]
    return np.dtype(name) if name in _NATIVE else None


def number_named(name: str) -> int:
    """Return the number of the type called `name`, of those that NumPy has not, too.

    >>> number_named("resource")
    20
    """
    return _NUMBERS[name]


def dtype_number(dtype: np.dtype[Any]) -> int:
    """Return TensorFlow's number for a NumPy type; raises `KeyError` for one that TensorFlow has not.

    >>> dtype_number(np.dtype("int64"))
    9
    """
    return _NUMBERS[dtype.name]
