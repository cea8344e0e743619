"""The keys of strings: what layers and variables of strings have in place of them, without TensorFlow.

A key is the Fingerprint64 of FarmHash, modulo `HASHES`: what `tf.strings.to_hash_bucket_fast(string, HASHES)` gives,
the same on every machine. Strings of a length are hashed at a time, in NumPy, and long ones of as many blocks.

Source: FarmHash (https://github.com/google/farmhash), whose Fingerprint64 is fixed for all time.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools.errors import UsageError

HASHES = 1726 * 5342931457063200
"""Hashes are below this number. It is close to 2**63, and a multiple of every number up to 40: so that the hash modulo
the number of tables is what `tf.strings.to_hash_bucket_fast` gives for that number."""

Words = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]  # [n, length]: strings of one length; of more than 64 bytes, of one number of blocks

_K0, _K1, _K2 = map(np.uint64, (0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F))


def string_keys(strings: Iterable[str | bytes] | npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Return the keys that strings have in tables of strings: int64, of the shape of `strings`.

    Args:
        strings: text, which is hashed as UTF-8, or bytes: a list, an array of Python objects or of NumPy's strings.

    Raises:
        UsageError: `strings` is one string, whose letters would be hashed; an element is neither text nor bytes, or is
            text that UTF-8 lacks (half a surrogate pair).

    Example:
        >>> string_keys(["wine", b"wine", ""]).tolist()
        [6833201401099529939, 6833201401099529939, 1938418459143314063]
    """
    if isinstance(strings, str | bytes):
        raise UsageError(f"got the string {strings!r:.80}, expected a list of strings: [{strings!r:.80}]")
    array = strings if isinstance(strings, np.ndarray) else np.asarray([*strings], object)
    encoded = [_encoded(string) for string in array.reshape(-1).tolist()]
    lengths = np.array([len(string) for string in encoded], np.int64)
    keys = np.empty(len(encoded), np.int64)
    widths = np.where(lengths > 64, -(-lengths // 64) * 64, lengths)  # of long strings those of as many blocks together
    order = np.argsort(widths, kind="stable")
    for places in np.split(order, np.flatnonzero(np.diff(widths[order])) + 1):
        if len(places):
            width = int(widths[places[0]])
            joined = np.frombuffer(b"".join([encoded[place].ljust(width, b"\0") for place in places]), np.uint8)
            hashes = _fingerprints(joined.reshape(len(places), width), lengths[places])
            keys[places] = (hashes % np.uint64(HASHES)).astype(np.int64)
    return keys.reshape(array.shape)


def _encoded(string: Any) -> bytes:
    if isinstance(string, bytes):
        return string
    if not isinstance(string, str):
        raise UsageError(f"got {string!r:.80} among strings, expected text or bytes")
    try:
        return string.encode()
    except UnicodeEncodeError:
        raise UsageError(f"got {string!r:.80} among strings, which is no text: it has half a surrogate pair") from None


def _fingerprints(strings: Bytes, lengths: npt.NDArray[np.int64]) -> Words:
    """Hash strings of one length, or long ones of one number of blocks, filled up to its end."""
    length = strings.shape[1]
    with np.errstate(over="ignore"):  # all arithmetic is modulo 2**64
        if length > 64:
            return _long(strings, lengths)
        if length > 32:
            return _up_to_64(strings, length)
        if length > 16:
            return _up_to_32(strings, length)
        return _up_to_16(strings, length)


def _up_to_16(strings: Bytes, length: int) -> Words:
    factor = _K2 + np.uint64(2 * length)
    if length >= 8:
        a, b = _word(strings, 0) + _K2, _word(strings, length - 8)
        return _mixed(_rotated(b, 37) * factor + a, (_rotated(a, 25) + b) * factor, factor)
    if length >= 4:
        first, last = _half_word(strings, 0), _half_word(strings, length - 4)
        return _mixed(np.uint64(length) + (first << np.uint64(3)), last, factor)
    if length:
        first, middle, last = (strings[:, at].astype(np.uint64) for at in (0, length >> 1, length - 1))
        y, z = first + (middle << np.uint64(8)), np.uint64(length) + (last << np.uint64(2))
        return _folded(y * _K2 ^ z * _K0) * _K2
    return np.full(len(strings), _K2)


def _up_to_32(strings: Bytes, length: int) -> Words:
    factor = _K2 + np.uint64(2 * length)
    a, b = _word(strings, 0) * _K1, _word(strings, 8)
    c, d = _word(strings, length - 8) * factor, _word(strings, length - 16) * _K2
    return _mixed(_rotated(a + b, 43) + _rotated(c, 30) + d, a + _rotated(b + _K2, 18) + c, factor)


def _up_to_64(strings: Bytes, length: int) -> Words:
    factor = _K2 + np.uint64(2 * length)
    a, b = _word(strings, 0) * _K2, _word(strings, 8)
    c, d = _word(strings, length - 8) * factor, _word(strings, length - 16) * _K2
    y = _rotated(a + b, 43) + _rotated(c, 30) + d
    z = _mixed(y, a + _rotated(b + _K2, 18) + c, factor)
    e, f = _word(strings, 16) * factor, _word(strings, 24)
    g, h = (y + _word(strings, length - 32)) * factor, (z + _word(strings, length - 24)) * factor
    return _mixed(_rotated(e + f, 43) + _rotated(g, 30) + h, e + _rotated(f + a, 18) + g, factor)


def _long(strings: Bytes, lengths: npt.NDArray[np.int64]) -> Words:
    """Blocks of 64 bytes one after the other, then the last 64 once more."""
    x, y = (np.full(len(strings), one) for one in (np.uint64(81), np.uint64(81) * _K1 + np.uint64(113)))
    z = _folded(y * _K2 + np.uint64(113)) * _K2
    x = x * _K2 + _word(strings, 0)
    zeros = np.zeros(len(strings), np.uint64)
    v, w = (zeros, zeros), (zeros, zeros)
    for at in range(0, strings.shape[1] - 64, 64):
        x, y, z, v, w = _block(strings, at, x, y, z, v, w, _K1, np.uint64(1))
    factor = _K1 + ((z & np.uint64(255)) << np.uint64(1))
    w_first = w[0] + (lengths.astype(np.uint64) - np.uint64(1) & np.uint64(63))
    v_first = v[0] + w_first
    v, w = (v_first, v[1]), (w_first + v_first, w[1])
    ends = np.take_along_axis(strings, lengths[:, None] + np.arange(-64, 0), 1)
    x, y, z, v, w = _block(ends, 0, x, y, z, v, w, factor, np.uint64(9))
    first = _mixed(v[0], w[0], factor) + _folded(y) * _K0 + z
    return _mixed(first, _mixed(v[1], w[1], factor) + x, factor)


_Pair = tuple[Words, Words]


def _block(
    strings: Bytes,
    at: int,
    x: Words,
    y: Words,
    z: Words,
    v: _Pair,
    w: _Pair,
    factor: Words | np.uint64,
    nine: np.uint64,
) -> tuple[Words, Words, Words, _Pair, _Pair]:
    """Take up the 64 bytes at `at`."""
    words = [_word(strings, at + 8 * number) for number in range(8)]
    x = _rotated(x + y + v[0] + words[1], 37) * factor
    y = _rotated(y + v[1] + words[6], 42) * factor
    x = x ^ w[1] * nine
    y = y + v[0] * nine + words[5]
    z = _rotated(z + w[0], 33) * factor
    v = _pair(words[:4], v[1] * factor, x + w[0])
    w = _pair(words[4:], z + w[1], y + words[2])
    return z, y, x, v, w


def _pair(words: list[Words], a: Words, b: Words) -> _Pair:
    first, second, third, fourth = words
    start = a + first
    end = start + second + third
    return end + fourth, _rotated(b + start + fourth, 21) + _rotated(end, 44) + start


def _mixed(u: Words | np.uint64, v: Words, factor: Words | np.uint64) -> Words:
    return _folded((_folded((u ^ v) * factor) ^ v) * factor) * factor


def _folded(word: Words) -> Words:
    return word ^ word >> np.uint64(47)


def _rotated(word: Words, by: int) -> Words:
    return word >> np.uint64(by) | word << np.uint64(64 - by)


def _word(strings: Bytes, at: int) -> Words:
    found: Words = np.ascontiguousarray(strings[:, at : at + 8]).view("<u8")[:, 0].astype(np.uint64)
    return found


def _half_word(strings: Bytes, at: int) -> Words:
    found: Words = np.ascontiguousarray(strings[:, at : at + 4]).view("<u4")[:, 0].astype(np.uint64)
    return found
