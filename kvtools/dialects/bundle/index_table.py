"""The `.index` file of a bundle: a sorted string table in LevelDB's format, from key bytes to value bytes.

    file    := block* footer
    footer  := handle(metaindex) handle(index) zeros up to 40 bytes, magic (8 bytes, little-endian)
    handle  := varint offset, varint size
    block   := contents (size bytes), compression (1 byte: 0 none, 1 snappy), masked crc32c of both (4 bytes)
    contents:= entry* restart* restart_count           (restarts and their count: 4 bytes each, little-endian)
    entry   := varint shared, varint unshared, varint value_size, unshared key bytes, value bytes

Keys are sorted; `shared` counts the bytes that a key has in common with the one before. The index block maps
a last key to the handle of each data block. Format:
https://github.com/google/leveldb/blob/main/doc/table_format.md
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvtools.dialects.bundle.checksum import extend, masked
from kvtools.dialects.bundle.wire import WireError, put_varint, read_varint
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.remote.stored import read_bytes

_MAGIC = 0xDB4775248B80FB57
_FOOTER_BYTES = 48
_BLOCK_TRAILER_BYTES = 5
_BLOCK_BYTES = 256 * 1024
_RESTART_EVERY = 16


def read_table(path: Path) -> dict[bytes, bytes]:
    """Read a whole index file into a dict, in key order, checking the checksum of every block.

    Raises `BadInputError` if the file is missing, no index file or snappy-compressed, and `CorruptFileError`
    if it is damaged.
    """
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        raise BadInputError(
            f"reading checkpoint index '{path}': no such file; name a checkpoint prefix, or the folder that holds it"
        ) from None
    except OSError as error:
        raise BadInputError(f"reading checkpoint index '{path}': {error.strerror or error}") from error
    if len(data) < _FOOTER_BYTES:
        raise CorruptFileError(
            f"reading checkpoint index '{path}': got {len(data)} bytes, expected at least {_FOOTER_BYTES};"
            " the file is truncated, copy it again"
        )
    (magic,) = struct.unpack_from("<Q", data, len(data) - 8)
    if magic != _MAGIC:
        raise CorruptFileError(
            f"reading checkpoint index '{path}': got magic number {magic:#018x} at its end, expected"
            f" {_MAGIC:#018x}; the file is truncated or is no TensorFlow checkpoint index"
        )
    try:
        footer = memoryview(data)[-_FOOTER_BYTES:]
        _, position = read_varint(footer, 0)
        _, position = read_varint(footer, position)
        index_offset, position = read_varint(footer, position)
        index_size, _ = read_varint(footer, position)
        entries: dict[bytes, bytes] = {}
        for _, handle in _block_entries(_block(path, data, index_offset, index_size)):
            offset, position = read_varint(handle, 0)
            size, _ = read_varint(handle, position)
            entries.update(_block_entries(_block(path, data, offset, size)))
    except (WireError, struct.error) as error:
        raise CorruptFileError(
            f"reading checkpoint index '{path}': {error}; the file is damaged, copy it again from its source"
        ) from error
    return entries


def _block(path: Path, data: bytes, offset: int, size: int) -> bytes:
    end = offset + size
    if end + _BLOCK_TRAILER_BYTES > len(data):
        raise WireError(f"a block ends at byte {end + _BLOCK_TRAILER_BYTES} of {len(data)}")
    (stored,) = struct.unpack_from("<I", data, end + 1)
    computed = masked(extend(0, data[offset : end + 1]))
    if stored != computed:
        raise CorruptFileError(
            f"reading checkpoint index '{path}': checksum mismatch in the block at byte {offset}:"
            f" got {computed:#010x}, expected {stored:#010x}; the file is damaged, copy it again from its"
            " source"
        )
    if data[end] == 1:
        raise BadInputError(
            f"reading checkpoint index '{path}': the block at byte {offset} is compressed with snappy,"
            " expected none; write the checkpoint again with TensorFlow's Saver, which does not compress"
        )
    if data[end] != 0:
        raise WireError(f"the block at byte {offset} has unknown compression {data[end]}")
    return data[offset:end]


def _block_entries(contents: bytes) -> Iterator[tuple[bytes, bytes]]:
    if len(contents) < 4:
        raise WireError(f"a block of {len(contents)} bytes is too short")
    (restarts,) = struct.unpack_from("<I", contents, len(contents) - 4)
    end = len(contents) - 4 - 4 * restarts
    if end < 0:
        raise WireError(f"a block of {len(contents)} bytes claims {restarts} restarts")
    position, key = 0, b""
    while position < end:
        shared, position = read_varint(contents, position)
        unshared, position = read_varint(contents, position)
        value_size, position = read_varint(contents, position)
        value_at = position + unshared
        if shared > len(key) or value_at + value_size > end:
            raise WireError(f"an entry runs past the end of its block at byte {position}")
        key = key[:shared] + contents[position:value_at]
        position = value_at + value_size
        yield key, contents[value_at:position]


def table_bytes(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the bytes of an index file that holds `entries`, which must come sorted by key, each key once.

    >>> len(table_bytes([(b"a", b"1"), (b"ab", b"2")]))
    104
    """
    file = bytearray()
    index: list[tuple[bytes, bytes]] = []
    pending: list[tuple[bytes, bytes]] = []
    pending_bytes = 0

    def flush() -> None:
        nonlocal pending_bytes
        if pending:
            index.append((pending[-1][0], _append_block(file, pending)))
            pending.clear()
            pending_bytes = 0

    for key, value in entries:
        pending.append((key, value))
        pending_bytes += len(key) + len(value)
        if pending_bytes >= _BLOCK_BYTES:
            flush()
    flush()
    metaindex_handle = _append_block(file, [])
    index_handle = _append_block(file, index)
    footer = (metaindex_handle + index_handle).ljust(_FOOTER_BYTES - 8, b"\0") + struct.pack("<Q", _MAGIC)
    return bytes(file + footer)


def _append_block(file: bytearray, entries: list[tuple[bytes, bytes]]) -> bytes:
    contents = bytearray()
    restarts = []
    previous = b""
    for number, (key, value) in enumerate(entries):
        shared = 0
        if number % _RESTART_EVERY == 0:
            restarts.append(len(contents))
        else:
            limit = min(len(previous), len(key))
            while shared < limit and previous[shared] == key[shared]:
                shared += 1
        contents += put_varint(shared) + put_varint(len(key) - shared) + put_varint(len(value))
        contents += key[shared:] + value
        previous = key
    restarts = restarts or [0]
    contents += struct.pack(f"<{len(restarts)}I", *restarts) + struct.pack("<I", len(restarts))
    handle = put_varint(len(file)) + put_varint(len(contents))
    stored = bytes(contents) + b"\0"
    file += stored + struct.pack("<I", masked(extend(0, stored)))
    return handle
