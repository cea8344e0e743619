"""The compiled library can be loaded into any process, at any time."""

from __future__ import annotations

import struct
from pathlib import Path

from kvtools import _snapshot

_PT_DYNAMIC, _DT_FLAGS, _DF_STATIC_TLS = 2, 30, 0x10


def flags_of(library: Path) -> int:
    """DT_FLAGS of a 64-bit little-endian ELF file."""
    data = library.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    (start,) = struct.unpack_from("<Q", data, 32)
    size, count = struct.unpack_from("<HH", data, 54)
    for place in range(start, start + size * count, size):
        kind, _, offset, _, _, length = struct.unpack_from("<IIQQQQ", data, place)
        if kind == _PT_DYNAMIC:
            entries = struct.iter_unpack("<qQ", data[offset : offset + length])
            return next((value for tag, value in entries if tag == _DT_FLAGS), 0)
    raise AssertionError("no dynamic section")


def test_no_static_room_is_needed_for_what_threads_keep() -> None:
    # With CUDA's runtime linked in there would be too little of it: "cannot allocate memory in static TLS block".
    folder = Path(_snapshot.__file__).parent
    for library in (folder / "libkvtable.so", Path(_snapshot.__file__)):
        assert not flags_of(library.resolve()) & _DF_STATIC_TLS, library
