"""Reading and writing with checksums, against google-crc32c."""

from __future__ import annotations

import os
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from kvtools import _checked_io

RUN = 4096  # bytes that the checksum does side by side, three times; of what is left as many
SHORT_RUN = 64
PIECE = 256 * 1024  # bytes that are read or written at once


@pytest.mark.parametrize(
    "size",
    [
        *(0, 1, 7, 8, 9),
        *(3 * SHORT_RUN - 1, 3 * SHORT_RUN, 3 * SHORT_RUN + 9, 6 * SHORT_RUN),
        *(3 * RUN - 1, 3 * RUN, 3 * RUN + 9, 3 * (RUN + SHORT_RUN) + 1),
        *(PIECE - 1, PIECE, 2 * PIECE + 12345),
    ],
)
@pytest.mark.parametrize("start", [0, 1, 5])
def test_bytes_and_checksums_there_and_back(tmp_path: Path, size: int, start: int) -> None:
    bytes_ = np.random.default_rng(size).integers(0, 256, size + start, np.uint8)[start:]
    expected = google_crc32c.extend(google_crc32c.extend(0, b"before"), bytes_.tobytes())
    file = os.open(tmp_path / "a", os.O_RDWR | os.O_CREAT)
    try:
        crc = google_crc32c.extend(0, b"before")
        assert _checked_io.write(file, bytes_, 3, crc) == expected
        back = np.empty(size, np.uint8)
        assert _checked_io.read(file, back, 3, crc) == (size, expected)
        assert _checked_io.read(file, back, 3, 77, False) == (size, 77)
        np.testing.assert_array_equal(back, bytes_)
    finally:
        os.close(file)


def test_the_end_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    file = os.open(tmp_path / "a", os.O_RDONLY)
    data = np.zeros(10, np.uint8)
    assert _checked_io.read(file, data, 2) == (3, google_crc32c.value(b"345"))
    assert data[:4].tobytes() == b"345\0"
    with pytest.raises(OSError, match="Bad file descriptor"):
        _checked_io.write(file, data, 0)
    os.close(file)
    with pytest.raises(OSError, match="Bad file descriptor"):
        _checked_io.read(file, data, 0)
