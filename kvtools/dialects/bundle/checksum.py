"""CRC-32C as TensorFlow stores it: masked, so that a checksum of data that holds checksums stays a good one.

Format: the "masked crc32c" of the LevelDB log format,
https://github.com/google/leveldb/blob/main/doc/log_format.md, over the Castagnoli polynomial (RFC 3720,
appendix B.4).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import google_crc32c

_MASK_DELTA = 0xA282EAD8
CASTAGNOLI = 0x82F63B78  # the polynomial of CRC-32C, bits reversed
ZIP = 0xEDB88320  # that of zlib's and zip's CRC-32


def extend(crc: int, data: Any) -> int:
    """Continue the CRC-32C `crc` over `data`, any C-contiguous read-only buffer or array; start from 0.

    >>> hex(extend(0, b"123456789"))
    '0xe3069283'
    """
    return int(google_crc32c.extend(crc, data))


def masked(crc: int) -> int:
    """Return the form of `crc` that is written to disk.

    >>> hex(masked(0))
    '0xa282ead8'
    """
    return ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF


def combine(first: int, second: int, second_bytes: int, polynomial: int = CASTAGNOLI) -> int:
    """Return the CRC of two runs of bytes, one after the other, from theirs and the second's length.

    Appending n zero bytes is a linear map of the 32 bits over GF(2); it is put together from those of 1, 2, 4, ...
    bytes. Method: Mark Adler, zlib's `crc32_combine`.

    >>> hex(combine(extend(0, b"12345"), extend(0, b"6789"), 4))
    '0xe3069283'
    >>> import zlib
    >>> combine(zlib.crc32(b"12345"), zlib.crc32(b"6789"), 4, ZIP) == zlib.crc32(b"123456789")
    True
    """
    power = 0
    while second_bytes:
        if second_bytes & 1:
            first = _times(_zero_bytes(power, polynomial), first)
        second_bytes >>= 1
        power += 1
    return first ^ second


def of_runs(runs: Iterable[tuple[int, int]], polynomial: int = CASTAGNOLI) -> int:
    """Return the CRC of runs of bytes one after the other, each given as (checksum, length).

    >>> hex(of_runs([(extend(0, b"123"), 3), (extend(0, b"456"), 3), (extend(0, b"789"), 3)]))
    '0xe3069283'
    """
    crc = 0
    for run, size in runs:
        crc = combine(crc, run, size, polynomial)
    return crc


_Matrix = tuple[int, ...]


@functools.lru_cache(maxsize=128)
def _zero_bytes(power: int, polynomial: int) -> _Matrix:
    """Return the map that appends 2^power zero bytes, as its 32 columns."""
    if power > 0:
        half = _zero_bytes(power - 1, polynomial)
        return tuple(_times(half, column) for column in half)
    columns = []
    for bit in range(32):
        crc = 1 << bit
        for _ in range(8):
            crc = crc >> 1 ^ (polynomial if crc & 1 else 0)
        columns.append(crc)
    return tuple(columns)


def _times(matrix: _Matrix, vector: int) -> int:
    result = 0
    for column in matrix:
        if not vector:
            break
        if vector & 1:
            result ^= column
        vector >>= 1
    return result
