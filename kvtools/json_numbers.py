"""Numbers as JSON: standard JSON has no NaN or infinity, so they are written as strings.

The three names are those of protocol buffers' JSON, https://protobuf.dev/programming-guides/json/.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt


def json_numbers(values: npt.NDArray[Any]) -> Any:
    """Return `values` (any shape and real type) as nested lists, non-finite ones as "NaN", "Infinity",
    "-Infinity".

    >>> json_numbers(np.array([[1.5, np.nan], [np.inf, -np.inf]], np.float32))
    [[1.5, 'NaN'], ['Infinity', '-Infinity']]
    """
    if values.dtype.kind in "iub":
        return values.tolist()
    if values.dtype.kind != "f":
        values = values.astype(np.float32)  # bfloat16 is no float to NumPy; float32 holds it exactly
    if np.isfinite(values).all():
        return values.tolist()
    return _named(values.tolist())


def json_ready(value: Any) -> Any:
    """Return a value made of dicts, lists, tuples, numbers and strings with its non-finite numbers named.

    >>> json_ready({"a": (1, float("inf"))})
    {'a': [1, 'Infinity']}
    """
    if isinstance(value, dict):
        return {name: json_ready(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_ready(item) for item in value]
    return _named(value) if isinstance(value, float) else value


def _named(value: Any) -> Any:
    if isinstance(value, list):
        return [_named(item) for item in value]
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
