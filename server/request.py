"""From the bytes of a lookup request to an array of keys, and everything that can be wrong with them."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

BINARY = "application/octet-stream"
_KEY_BYTES_IN_JSON = 32


class RequestError(Exception):
    """A request that cannot be answered: `status` of HTTP, a `code` for programs and a message for people."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message


def body_limit(max_keys: int) -> int:
    """Return how many bytes a request of `max_keys` keys may take, generously spaced JSON included."""
    return max_keys * _KEY_BYTES_IN_JSON + 1024


def parse_keys(body: bytes, *, binary: bool, key_dtype: str, limits: np.iinfo[Any], max_keys: int) -> npt.NDArray[Any]:
    """Return the keys [n] that a request asks for, in the table's key type.

    A binary body is little-endian int64 (for a uint64 table: its bits); any other is JSON, `{"keys": [17,
    -3]}`. Raises `RequestError` for anything else.
    """
    if binary:
        if len(body) % 8:
            raise RequestError(
                400, "bad_body", f"got {len(body)} bytes, expected little-endian int64 keys of 8 bytes each"
            )
        _check_count(len(body) // 8, max_keys)
        stored = np.frombuffer(body, "<i8").astype(np.int64, copy=False)
        if key_dtype == "uint64":
            return stored.view(np.uint64)
        if len(stored) and not (limits.min <= stored.min() and stored.max() <= limits.max):
            _out_of_range(key_dtype, limits)
        return stored.astype(key_dtype, copy=False)
    keys = _json_keys(body)
    _check_count(len(keys), max_keys)
    if not set(map(type, keys)) <= {int}:
        wrong = next(key for key in keys if type(key) is not int)
        raise RequestError(
            400,
            "bad_key",
            f"got key {json.dumps(wrong)[:60]}, expected integers; this table has {key_dtype} keys",
        )
    if keys and not (limits.min <= min(keys) and max(keys) <= limits.max):
        _out_of_range(key_dtype, limits)
    return np.array(keys, key_dtype)


def _json_keys(body: bytes) -> list[Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(
            400, "bad_json", f'the body is no JSON ({str(error)[:120]}); expected {{"keys": [17, -3]}}'
        ) from error
    keys = document.get("keys") if isinstance(document, dict) else None
    if not isinstance(keys, list):
        raise RequestError(400, "bad_body", 'expected an object with a list of keys, as in {"keys": [17, -3]}')
    return keys


def _check_count(count: int, max_keys: int) -> None:
    if count > max_keys:
        raise RequestError(
            413, "too_many_keys", f"got {count} keys, expected at most {max_keys}; send several requests"
        )


def _out_of_range(key_dtype: str, limits: np.iinfo[Any]) -> NoReturn:
    raise RequestError(400, "bad_key", f"got a key out of range, expected {key_dtype}: {limits.min} to {limits.max}")
