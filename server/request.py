"""From the bytes of a lookup request to keys, and everything that can be wrong with them.

The C++ reader (`kvtools._snapshot.read_json_lookup`) takes the JSON that clients write. What it does not take is read
again here, by Python's own parser: this file says what is a lookup, and what is wrong with one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from kvtools import _snapshot
from kvtools.lookup_frame import COMBINERS, MISSING, FrameError, TableKeys, decode_request

BINARY = "application/octet-stream"
_MEMBERS = ("keys", "row_splits", "combiner", "weights", "missing")
_EXAMPLE = '{"keys": [17, -3]}'
# zlib's names for the headers of codings, with windows of any size.
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}
_PIECE = 4096


class RequestError(Exception):
    """A request that cannot be answered: `status` of HTTP, a `code` for programs and a message for people.

    `headers` go with the answer.
    """

    def __init__(self, status: int, code: str, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = dict(headers or {})


def way_out(what: str) -> str:
    """Return what to do about a body that is too large, of keys or ids."""
    return f"send fewer {what} a request, or have the server take more: --max-body-bytes"


def body_too_large(limit: int) -> RequestError:
    """Return the error for a body of more than `limit` bytes."""
    return RequestError(413, "body_too_large", f"the body is over {limit} bytes; {way_out('keys')}")


def decode_body(body: bytes, encoding: str, limit: int) -> bytes:
    """Return a body as it was before its `Content-Encoding`: "gzip", "deflate", or "" or "identity" for none.

    All members of a gzip body are decoded, and no byte of it may be left over. Raises `RequestError`: 415 for another
    coding, 413 if what comes out is over `limit` bytes.
    """
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding not in _WINDOWS:
        raise RequestError(
            415,
            "unsupported_encoding",
            f"got Content-Encoding '{encoding[:40]}', expected gzip, deflate or none",
            {"Accept-Encoding": "gzip, deflate"},
        )
    decoded, at = bytearray(), 0
    while at < len(body) or not at:
        inflater = zlib.decompressobj(_WINDOWS[encoding])
        while not inflater.eof:
            # What follows a member is copied by zlib: in pieces, or a body of many small members would take for ever.
            piece = body[at : at + _PIECE]
            if not piece:
                raise RequestError(400, "bad_body", f"the body's {encoding} is cut off")
            at += len(piece)
            try:
                decoded += inflater.decompress(piece, limit + 1 - len(decoded))
            except zlib.error as error:
                raise RequestError(400, "bad_body", f"the body is no {encoding}: {error}") from error
            if len(decoded) > limit:
                raise body_too_large(limit)
        at -= len(inflater.unused_data)
        if encoding == "deflate" and at < len(body):
            raise RequestError(400, "bad_body", f"{len(body) - at} bytes follow the end of the body's deflate")
    return bytes(decoded)


def parse_lookup(
    body: bytes, table: str, *, binary: bool, key_dtype: str, max_keys: int
) -> tuple[TableKeys, str | None]:
    """Read the lookup of one table, plain or pooled, and what it says that missing keys get, None if nothing.

    JSON is an object of `keys` (a list of integers, or of lists of them, a bag each), `row_splits` (where keys are a
    flat list: bag b has the keys [row_splits[b], row_splits[b + 1])), `combiner` ("sum", "mean", "sqrtn"; of bags),
    `weights` (numbers in the form of the keys) and `missing` ("zeros", "default", "error"). Keys come back as
    64-bit patterns. Raises `RequestError`.
    """
    if binary:
        if len(body) % 8:
            raise RequestError(
                400, "bad_body", f"got {len(body)} bytes, expected little-endian int64 keys of 8 bytes each"
            )
        check_count(len(body) // 8, max_keys)
        return TableKeys(table, np.frombuffer(body, "<i8").astype(np.int64, copy=False)), None
    taken = _snapshot.read_json_lookup(body, key_dtype, max_keys)
    if taken is not None:
        keys, row_splits, combiner, weights, missing = taken
        return TableKeys(table, keys, combiner, row_splits, weights), missing
    document = _json_object(body)
    return _lookup_of(document, table, key_dtype, max_keys), _missing_of(document)


def parse_tables(
    body: bytes, *, frame: bool, key_dtypes: Mapping[str, str], max_keys: int
) -> tuple[list[TableKeys], str | None]:
    """Read a lookup of several tables: a frame, or JSON as in `{"tables": {"user": {"keys": [17]}, "item": {...}}}`.

    `key_dtypes` has the key type of each table there is. Raises `RequestError`.
    """
    if frame:
        try:
            lookups, missing = decode_request(body)
        except FrameError as error:
            raise RequestError(400, "bad_frame", f"{error}; docs/serve.md has the form of a frame") from error
        for lookup in lookups:
            _dtype_of(lookup.table, key_dtypes)
            if lookup.row_splits is not None:
                _check_splits(lookup.row_splits, len(lookup.keys))
            if lookup.weights is not None and not np.isfinite(lookup.weights).all():
                raise RequestError(400, "bad_weights", "got a weight that is no finite number")
    else:
        document = _json_object(body)
        if unknown := document.keys() - {"tables", "missing"}:
            raise _unknown_member(min(unknown), ("tables", "missing"))
        tables = document.get("tables")
        if not isinstance(tables, dict):
            raise RequestError(
                400, "bad_body", 'expected an object with lookups by table, as in {"tables": {"user": {"keys": [17]}}}'
            )
        missing = _missing_of(document)
        lookups = []
        for name, member in tables.items():
            key_dtype = _dtype_of(name, key_dtypes)
            if not isinstance(member, dict):
                raise RequestError(400, "bad_body", f"table '{name[:60]}': expected an object, as in {_EXAMPLE}")
            if "missing" in member:
                raise RequestError(400, "bad_body", "'missing' is said once for all tables, beside 'tables'")
            lookups.append(_lookup_of(member, name, key_dtype, max_keys))
    check_count(sum(max(len(lookup.keys), lookup.bags) for lookup in lookups), max_keys)
    return lookups, missing


def tables_asked(body: bytes, *, frame: bool) -> list[str]:
    """Return the names of the tables that a lookup of several is for; none where `parse_tables` will refuse it."""
    try:
        tables = [lookup.table for lookup in decode_request(body)[0]] if frame else json.loads(body)["tables"]
    except (ValueError, RecursionError, LookupError, TypeError):
        return []
    return list(tables) if isinstance(tables, list if frame else dict) else []


def table_keys(patterns: npt.NDArray[np.int64], key_dtype: str, limits: np.iinfo[Any]) -> npt.NDArray[Any]:
    """Return keys [n] in a table's type from their 64-bit patterns; raises `RequestError` where one is out of range."""
    if key_dtype == "uint64":
        return patterns.view(np.uint64)
    if key_dtype == "int32" and len(patterns) and not (limits.min <= patterns.min() and patterns.max() <= limits.max):
        _out_of_range(int(patterns[(patterns < limits.min) | (patterns > limits.max)][0]), key_dtype)
    return patterns.astype(key_dtype, copy=False)


def parse_key(text: str, key_dtype: str) -> npt.NDArray[np.int64]:
    """Return the key of a URL as the one 64-bit pattern [1] that it is; raises `RequestError`."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= 20):
        raise RequestError(
            400, "bad_key", f"got key '{text[:60]}', expected an integer; this table has {key_dtype} keys"
        )
    return _patterns([int(text)], key_dtype)


def check_count(count: int, max_keys: int) -> None:
    """Raise `RequestError` for more than `max_keys` keys, or bags of keys."""
    if count > max_keys:
        raise RequestError(
            413, "too_many_keys", f"got {count} keys, expected at most {max_keys}; send several requests"
        )


def _lookup_of(document: dict[str, Any], table: str, key_dtype: str, max_keys: int) -> TableKeys:
    if unknown := document.keys() - set(_MEMBERS):
        raise _unknown_member(min(unknown), _MEMBERS)
    keys, splits = document.get("keys"), document.get("row_splits")
    if not isinstance(keys, list):
        raise RequestError(400, "bad_body", f"expected an object with a list of keys, as in {_EXAMPLE}")
    combiner, weights = document.get("combiner"), document.get("weights")
    if "combiner" in document and combiner not in COMBINERS:
        raise RequestError(
            400, "bad_combiner", f"got combiner {_shown(combiner)}, expected one of {', '.join(COMBINERS)}"
        )
    # No keys and a combiner: no bags, whose rows are none.
    nested = (bool(keys) or (combiner is not None and "row_splits" not in document)) and all(
        type(bag) is list for bag in keys
    )
    if combiner is not None and not nested and "row_splits" not in document and any(type(bag) is list for bag in keys):
        wrong = next(key for key in keys if type(key) is not list)
        raise RequestError(
            400, "bad_key", f"got {_shown(wrong)} beside keys in lists, expected lists alone, as in [[1, 2], [3]]"
        )
    if nested or "row_splits" in document:
        check_count(len(keys), max_keys)
        if nested and "row_splits" in document:
            raise RequestError(400, "bad_body", "got row_splits beside keys in lists; expected one or the other")
        if combiner is None:
            code = "bad_key" if nested else "bad_combiner"
            raise RequestError(400, code, f"got bags of keys and no combiner, expected one of {', '.join(COMBINERS)}")
        row_splits = _ends(keys) if nested else _row_splits(splits, len(keys), max_keys)
        flat = [key for bag in keys for key in bag] if nested else keys
        patterns = _checked_patterns(flat, key_dtype, max_keys)
        return TableKeys(table, patterns, combiner, row_splits, _weights(document, weights, keys, nested, len(flat)))
    patterns = _checked_patterns(keys, key_dtype, max_keys)
    for member in ("combiner", "weights"):
        if member in document:
            raise RequestError(
                400, f"bad_{member}", f"got {member} for keys one by one; expected bags: keys in lists, or row_splits"
            )
    return TableKeys(table, patterns)


def _checked_patterns(keys: list[Any], key_dtype: str, max_keys: int) -> npt.NDArray[np.int64]:
    check_count(len(keys), max_keys)
    if not set(map(type, keys)) <= {int}:
        wrong = next(key for key in keys if type(key) is not int)
        raise RequestError(
            400, "bad_key", f"got key {_shown(wrong)}, expected integers; this table has {key_dtype} keys"
        )
    return _patterns(keys, key_dtype)


def _patterns(keys: list[int], key_dtype: str) -> npt.NDArray[np.int64]:
    limits = np.iinfo(key_dtype)
    if keys and not (limits.min <= min(keys) and max(keys) <= limits.max):
        _out_of_range(next(key for key in keys if not limits.min <= key <= limits.max), key_dtype)
    narrow = np.array(keys, key_dtype)
    return narrow.view(np.int64) if key_dtype == "uint64" else narrow.astype(np.int64, copy=False)


def _ends(bags: list[list[Any]]) -> npt.NDArray[np.int64]:
    ends = np.zeros(len(bags) + 1, np.int64)
    np.cumsum([len(bag) for bag in bags], out=ends[1:])
    return ends


def _row_splits(splits: Any, keys: int, max_keys: int) -> npt.NDArray[np.int64]:
    if not isinstance(splits, list) or not set(map(type, splits)) <= {int}:
        raise RequestError(400, "bad_row_splits", "expected row_splits to be a list of integers, as in [0, 2, 3]")
    check_count(len(splits) - 1, max_keys)
    if any(split < 0 or split > keys for split in splits):
        raise RequestError(400, "bad_row_splits", f"got a row split that is not within 0 to {keys}, the number of keys")
    array = np.array(splits, np.int64)
    _check_splits(array, keys)
    return array


def _check_splits(splits: npt.NDArray[np.int64], keys: int) -> None:
    if not len(splits) or splits[0] != 0 or splits[-1] != keys or (splits[1:] < splits[:-1]).any():
        raise RequestError(
            400, "bad_row_splits", f"expected row_splits to rise from 0 to {keys}, the number of keys, as in [0, 2, 3]"
        )


def _weights(
    document: dict[str, Any], weights: Any, keys: list[Any], nested: bool, count: int
) -> npt.NDArray[np.float32] | None:
    if "weights" not in document:
        return None
    flat = weights
    if nested and isinstance(weights, list):
        if [len(bag) if type(bag) is list else -1 for bag in weights] != [len(bag) for bag in keys]:
            raise RequestError(400, "bad_weights", "expected weights in lists of the lengths of the lists of keys")
        flat = [weight for bag in weights for weight in bag]
    if not isinstance(flat, list) or len(flat) != count or not set(map(type, flat)) <= {int, float}:
        raise RequestError(400, "bad_weights", f"expected {count} weights, numbers, in the form of the keys")
    try:
        with np.errstate(over="ignore"):
            array = np.array(flat, np.float64).astype(np.float32)
    except OverflowError:
        array = np.array([np.inf], np.float32)
    if not np.isfinite(array).all():
        raise RequestError(400, "bad_weights", "got a weight that is no finite number")
    return array


def _missing_of(document: dict[str, Any]) -> str | None:
    if "missing" not in document:
        return None
    return checked_missing(document["missing"])


def checked_missing(missing: Any) -> str:
    """Return what a request says that missing keys get; raises `RequestError` if there is no such thing."""
    if missing not in MISSING:
        raise RequestError(400, "bad_missing", f"got missing {_shown(missing)}, expected one of {', '.join(MISSING)}")
    return str(missing)


def _dtype_of(table: str, key_dtypes: Mapping[str, str]) -> str:
    try:
        return key_dtypes[table]
    except KeyError:
        raise unknown_table(table) from None


def unknown_table(table: str) -> RequestError:
    """Return the error for a table that is not there."""
    return RequestError(404, "unknown_table", f"there is no table '{table[:200]}'; GET /v1/tables lists the tables")


def _unknown_member(name: str, expected: tuple[str, ...]) -> RequestError:
    return RequestError(400, "bad_body", f"got a member {_shown(name)}, expected {', '.join(expected)}")


class TwiceError(ValueError):
    """A member stands twice in an object of JSON, of which a parser takes one and drops the other."""


def members_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, for `json.loads`.

    >>> members_once([("keys", [1]), ("keys", [2])])
    Traceback (most recent call last):
        ...
    kvtools.server.request.TwiceError: got member "keys" twice in an object, expected it once
    """
    members = dict(pairs)
    if len(members) != len(pairs):
        names = set()
        for name, _ in pairs:
            if name in names:
                raise TwiceError(f"got member {_shown(name)} twice in an object, expected it once")
            names.add(name)
    return members


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body, object_pairs_hook=members_once)
    except TwiceError as error:
        raise RequestError(400, "bad_body", str(error)) from None
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "bad_json", f"the body is no JSON ({str(error)[:120]}); expected {_EXAMPLE}") from error
    if not isinstance(document, dict):
        raise RequestError(400, "bad_body", f"expected an object with a list of keys, as in {_EXAMPLE}")
    return document


def _shown(value: Any) -> str:
    return json.dumps(value)[:60]


def _out_of_range(key: int, key_dtype: str) -> NoReturn:
    limits = np.iinfo(key_dtype)
    raise RequestError(
        400, "bad_key", f"got key {_shown(key)}, out of range, expected {key_dtype}: {limits.min} to {limits.max}"
    )
