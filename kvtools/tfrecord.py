"""TFRecord files: records of bytes, one after the other.

    record := length (uint64), masked crc32c of it (4 bytes), data, masked crc32c of the data (4 bytes)

Format: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from kvtools.dialects.bundle.checksum import extend, masked
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.remote.stored import open_binary

_HEAD = struct.Struct("<QI")
_TAIL = struct.Struct("<I")


def framed(data: bytes) -> bytes:
    r"""Return a record as it stands in a file.

    >>> framed(b"ab")[:8]
    b'\x02\x00\x00\x00\x00\x00\x00\x00'
    """
    length = struct.pack("<Q", len(data))
    return length + _TAIL.pack(masked(extend(0, length))) + data + _TAIL.pack(masked(extend(0, data)))


def is_tfrecord(start: bytes) -> bool:
    """Tell whether these bytes, the first twelve at least, begin a TFRecord file.

    >>> is_tfrecord(framed(b"ab")), is_tfrecord(b'{"instances": [1]}')
    (True, False)
    """
    if len(start) < _HEAD.size:
        return False
    return bool(_HEAD.unpack_from(start)[1] == masked(extend(0, start[:8])))


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file, each compared with its checksums.

    Raises:
        BadInputError: there is no such file.
        CorruptFileError: a record contradicts its checksum, or is cut; the message names it, from 1.
    """
    number = 1
    try:
        size = path.stat().st_size
        with open_binary(path) as file:
            while head := file.read(_HEAD.size):
                fault = CorruptFileError(f"reading '{path}': record {number} is damaged or cut; write the file again")
                if len(head) < _HEAD.size or not is_tfrecord(head):
                    raise fault
                length = _HEAD.unpack(head)[0]
                if length + _TAIL.size > size - file.tell():
                    raise fault
                data, tail = file.read(length), file.read(_TAIL.size)
                if len(tail) < _TAIL.size or _TAIL.unpack(tail)[0] != masked(extend(0, data)):
                    raise fault
                yield data
                number += 1
    except OSError as error:
        raise BadInputError(f"reading '{path}': {error.strerror or error}") from error
