"""JSON to tensors and back, as TensorFlow Serving writes and reads them.

A tensor is nested lists, every list of a level as long as the first. Floating-point numbers have a point or an
exponent, and NaN, Infinity and -Infinity are tokens of their own, which Python's `json` reads. A string that is not
text is `{"b64": "..."}`, both ways; answers have it for all of an output whose name ends in `_bytes`, and for what is
not UTF-8 in any other, where TensorFlow Serving writes bytes that are no JSON.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from pydantic_core import to_json

from kvtools.server.codecs import json_numbers
from kvtools.server.protocol_error import invalid
from kvtools.server.request import TwiceError, members_once
from kvtools.server.signatures import BFLOAT16, STRING, TYPE_WORDS, Array

_KINDS = {
    dict: "Object",
    list: "Array",
    str: "String",
    bool: "Bool",
    int: "Number",
    float: "Number",
    type(None): "Null",
}
_NUMBERS_AT_ONCE = 65536
_LOOKED_AT = 64  # objects of a body, each by itself
_MOST_DIMENSIONS = 32
# Numbers that float64 does not hold have an exponent of three digits at least, or 309 digits; looked for where all
# digits are zeros, which takes a fraction of the time that JSON does.
_ZEROS = bytes.maketrans(b"E123456789", b"e000000000")
_LARGE_EXPONENT = re.compile(rb"e\+?000")
_MANY_DIGITS = b"0" * 309
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_SURROGATE = re.compile(rb"\xed[\xa0-\xbf]")


def load_json(body: bytes) -> Any:
    """Parse a body; raises a `ProtocolError` if it is no JSON, or has a number that float64 does not hold, as 1e400, or
    a string that is no text, with half a surrogate pair in it."""
    if not body:
        raise invalid("JSON Parse error: The document is empty")
    try:
        zeros = body.translate(_ZEROS)
        may_be_too_large = _LARGE_EXPONENT.search(zeros) is not None or _MANY_DIGITS in zeros
        document = _members_once(body, _finite if may_be_too_large else None)
    except TwiceError as error:
        raise invalid(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"JSON Parse error: {str(error)[:120]}") from None
    if _ESCAPED_SURROGATE.search(body) is not None or (b"\xed" in body and _SURROGATE.search(body) is not None):
        _check_text(document)
    return document


def _check_text(document: Any) -> None:
    """Raise a `ProtocolError` for the first string, a name or a value, with half a surrogate pair in it."""
    stack = [("", document)]
    while stack:
        place, value = stack.pop()
        inner: list[tuple[str, Any]] = []
        if isinstance(value, str):
            if not _is_text(value):
                raise invalid(
                    f"JSON Parse error: half a surrogate pair in the string {shown(value)}{place and f' at {place}'},"
                    ' which is no text; send bytes of any kind as {"b64": "..."}'
                )
        elif isinstance(value, list):
            # All strings of a list at once, where it is of nothing else.
            if set(map(type, value)) != {str} or not _is_text("".join(value)):
                inner = [(f"{place}[{at}]", one) for at, one in enumerate(value) if isinstance(one, str | list | dict)]
        elif isinstance(value, dict):
            for name, one in value.items():
                inner += [(place, name), (f"{place}.{name}".lstrip("."), one)]
        stack += reversed(inner)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _members_once(body: bytes, parse_float: Callable[[str], float] | None) -> Any:
    """Parse a body; raises `TwiceError` for a member that comes twice.

    An object that is looked at costs three times what one costs that is not, so of many they are only counted.
    """
    look = functools.partial(json.loads, body, parse_float=parse_float, object_pairs_hook=members_once)
    if body.count(b"{") <= _LOOKED_AT:
        return look()
    document = json.loads(body, parse_float=parse_float)
    # A colon for each member, unless there are some in strings.
    return document if body.count(b":") == _count_members(document) else look()


def _count_members(document: Any) -> int:
    """Count the members of a document and of the objects in it, as far down as requests usually have them."""
    if not isinstance(document, dict):
        return 0
    count = len(document)
    for value in document.values():
        if isinstance(value, dict):
            count += len(value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            count += sum(len(one) for one in value if isinstance(one, dict))
    return count


def _finite(number: str) -> float:
    value = float(number)
    if math.isinf(value):  # which has a word of its own
        raise ValueError(f"number {number[:40]} is too large")
    return value


def shown(value: Any) -> str:
    """Return a value as JSON, cut to what fits an error message."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = "..."
    return text if len(text) <= 256 else text[:256] + "..."


def tensor(value: Any, dtype: np.dtype[Any], *, flat_shape: list[int] | None = None) -> Array:
    """Return the array of `dtype` that nested lists are; raises a `ProtocolError` if they are none.

    `flat_shape` is the shape that the lists stand for: they are nested like it, or one flat list.

    Example:
        >>> tensor([[1, 2], [3, 4]], np.dtype(np.int64)).shape
        (2, 2)
    """
    shape: list[int] = []
    level: list[Any] = [value]
    while level and isinstance(level[0], list):
        size = len(level[0])
        for item in level:
            if type(item) is not list:
                raise invalid(
                    f"JSON Value: {shown(item)} found at incorrect level: {len(shape) + 1} in the JSON DOM."
                    f" Expected a list of {size}"
                )
            if len(item) != size:
                raise invalid(
                    f"Encountered list at unexpected size: {len(item)} at level: {len(shape)} expected size: {size}"
                )
        shape.append(size)
        if len(shape) > _MOST_DIMENSIONS:
            raise invalid(f"Encountered list at unexpected level: {len(shape)} expected < {_MOST_DIMENSIONS}")
        level = list(chain.from_iterable(level))
    values = _values(level, dtype, len(shape))
    if flat_shape is None or shape == flat_shape:
        return values.reshape(shape)
    if len(shape) == 1 and len(values) == math.prod(flat_shape):
        return values.reshape(flat_shape)
    raise invalid(
        f"got data of shape {shape}, expected {flat_shape}, or its {math.prod(flat_shape)} values in one list"
    )


def _values(values: list[Any], dtype: np.dtype[Any], level: int) -> Array:
    kinds = set(map(type, values))
    if list in kinds:
        raise invalid(f"Encountered list at unexpected level: {level} expected < {level}")
    if dtype == STRING:
        array = np.empty(len(values), STRING)
        array[:] = [_bytes(value) for value in values]
        return array
    allowed = {bool} if dtype == np.bool_ else {int} if dtype.kind in "iu" else {int, float}
    if not kinds <= allowed:
        _refuse(next(value for value in values if type(value) not in allowed), dtype)
    if dtype.kind in "iu" and values:
        limits = np.iinfo(dtype)
        for extreme in (min(values), max(values)):
            if not limits.min <= extreme <= limits.max:
                _refuse(extreme, dtype)
    try:
        with np.errstate(over="ignore"):
            array = np.array(values, np.float64).astype(dtype) if dtype == BFLOAT16 else np.array(values, dtype)
        infinite = np.isinf(array) if dtype.kind not in "iub" else np.zeros(0, bool)
        became_infinite = bool(infinite.any()) and not np.array_equal(infinite, np.isinf(values))
    except OverflowError:
        became_infinite = True
    if became_infinite:
        raise invalid(f"JSON Value: a number is too large for the type {TYPE_WORDS[dtype]}")
    return array


def _refuse(value: Any, dtype: np.dtype[Any]) -> None:
    raise invalid(
        f"JSON Value: {shown(value)} Type: {_KINDS.get(type(value), 'Value')} is not of expected type:"
        f" {TYPE_WORDS[dtype]}"
    )


def is_base64(value: Any) -> bool:
    """Tell whether a value is a string in base64: `{"b64": "..."}`."""
    return isinstance(value, dict) and value.keys() == {"b64"} and isinstance(value["b64"], str)


def from_base64(text: str) -> bytes:
    """Return the bytes of a string in base64, which may be without padding and with white space; raises a
    `ProtocolError`.

    >>> from_base64("AP8"), from_base64("AP8=\\n")
    (b'\\x00\\xff', b'\\x00\\xff')
    """
    text = "".join(text.split())
    try:
        return base64.b64decode(text if "=" in text else text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise invalid("Unable to base64 decode") from None


def _bytes(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, dict):
        if not is_base64(value):
            raise invalid(f"JSON Value: {shown(value)} not formatted correctly for base64 data")
        return from_base64(value["b64"])
    _refuse(value, STRING)
    raise AssertionError


def text_blocks(array: Array, *, as_bytes: bool = False) -> Iterator[bytes]:
    """Yield an array as nested lists in JSON, in blocks, so that an answer of any size leaves others their turn.

    Example:
        >>> b"".join(text_blocks(np.array([[0.1, np.nan]], np.float32)))
        b'[[0.1,NaN]]'
        >>> b"".join(text_blocks(np.array([b"a", b"\\xff"], object)))
        b'["a",{"b64":"/w=="}]'
    """
    if array.dtype == STRING:
        yield _strings_text(array, as_bytes)
    elif array.ndim == 0:
        yield _numbers(array.reshape(1, 1))[1:-1]
    elif array.ndim == 1:
        yield b"["
        for start in range(0, len(array), _NUMBERS_AT_ONCE):
            yield b"," if start else b""
            yield _numbers(array[start : start + _NUMBERS_AT_ONCE].reshape(1, -1))[1:-1]
        yield b"]"
    else:
        rows = max(1, _NUMBERS_AT_ONCE // max(1, math.prod(array.shape[1:])))
        before = b"["
        for start in range(0, len(array), rows):
            block = array[start : start + rows]
            yield before
            yield _numbers(block) if array.ndim == 2 else b",".join(row_texts(block))
            before = b","
        yield b"]" if len(array) else b"[]"


def row_texts(array: Array, *, as_bytes: bool = False) -> list[bytes]:
    """Return the elements of an array along its first dimension, each as JSON.

    Example:
        >>> row_texts(np.array([[0.1, 2], [3, np.inf]], np.float32)), row_texts(np.array([True, False]))
        ([b'[0.1,2.0]', b'[3.0,Infinity]'], [b'true', b'false'])
    """
    if array.dtype != STRING and len(array):
        if array.ndim == 1:
            return _numbers(array.reshape(1, -1))[1:-1].split(b",")
        if array.ndim == 2:
            return [b"[" + text + b"]" for text in _numbers(array)[1:-1].split(b"],[")]
    # An ellipsis, since an element of an array of strings is no array.
    return [b"".join(text_blocks(array[i, ...], as_bytes=as_bytes)) for i in range(len(array))]


def _numbers(rows: Array) -> bytes:
    """Return rows [n, dim] as JSON without brackets around all of them; NaN and infinities are words, not strings."""
    text = json_numbers(rows)
    if rows.dtype.kind in "iub" or b'"' not in text:
        return text
    return text.replace(b'"', b"")


def _strings_text(array: Array, as_bytes: bool) -> bytes:
    if array.ndim == 0:
        return _strings_text(array.reshape(1), as_bytes)[1:-1]
    flat = np.empty(array.size, STRING)
    flat[:] = [_string(value, as_bytes) for value in array.flat]
    return to_json(flat.reshape(array.shape).tolist())


def _string(value: Any, as_bytes: bool) -> Any:
    data = value if isinstance(value, bytes) else str(value).encode()
    if not as_bytes:
        with contextlib.suppress(UnicodeDecodeError):
            return data.decode()
    return {"b64": base64.b64encode(data).decode()}
