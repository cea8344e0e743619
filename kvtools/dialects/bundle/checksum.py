"""CRC-32C as TensorFlow stores it: masked, so that a checksum of data that holds checksums stays a good one.

Format: the "masked crc32c" of the LevelDB log format,
https://github.com/google/leveldb/blob/main/doc/log_format.md, over the Castagnoli polynomial (RFC 3720,
appendix B.4).
"""

from __future__ import annotations

from typing import Any

import google_crc32c

_MASK_DELTA = 0xA282EAD8


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
