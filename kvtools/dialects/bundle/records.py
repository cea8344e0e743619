"""What an index file's values say: the bundle's header, and one entry per tensor or per slice of a tensor.

    header (key "")   1 number of data shards, 2 endianness (0 little, 1 big), 3 version {1 producer, 2 min_consumer}
    entry             1 dtype, 2 shape {2 dim {1 size}, 3 unknown_rank}, 3 shard, 4 offset, 5 size,
                      6 masked crc32c (fixed32), 7 slices {1 extent {1 start, 2 length}}

A tensor that is stored in slices has an entry with field 7 and no bytes of its own, and one entry per slice
under a key made of the tensor's name and the slice's extents in an order-preserving code (`slice_key`).
Format: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/protobuf/tensor_bundle.proto
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from kvtools.dialects.bundle.wire import (
    WireError,
    as_bytes,
    as_int,
    put_bytes,
    put_fixed32,
    put_int,
    read_fields,
)

HEADER_KEY = b""

Extent = tuple[int, int]
"""Start and length along one dimension; length -1 stands for the whole dimension."""


@dataclass(frozen=True)
class BundleHeader:
    """The record under the empty key: how many data files there are, and in which byte order."""

    shards: int = 1
    big_endian: bool = False
    producer: int = 1
    min_consumer: int = 0


@dataclass(frozen=True)
class BundleEntry:
    """Where one tensor, or one slice of one, lies: `size` bytes at `offset` of data file number `shard`."""

    dtype: int
    shape: tuple[int, ...]
    shard: int = 0
    offset: int = 0
    size: int = 0
    crc32c: int = 0
    slices: tuple[tuple[Extent, ...], ...] = ()


def decode_header(data: bytes) -> BundleHeader:
    """Decode the header record; raises `WireError` if it is malformed."""
    shards, endianness, producer, min_consumer = 0, 0, 0, 0
    for field, value in read_fields(data):
        if field == 1:
            shards = as_int(value)
        elif field == 2:
            endianness = as_int(value)
        elif field == 3:
            for version_field, version in read_fields(as_bytes(value)):
                if version_field == 1:
                    producer = as_int(version)
                elif version_field == 2:
                    min_consumer = as_int(version)
    if not 0 <= shards <= 1_000_000:
        raise WireError(f"the header claims {shards} data files")
    if endianness not in (0, 1):
        raise WireError(f"the header has unknown endianness {endianness}")
    return BundleHeader(shards, endianness == 1, producer, min_consumer)


def encode_header(header: BundleHeader) -> bytes:
    """Encode the header record."""
    version = put_int(1, header.producer) + put_int(2, header.min_consumer)
    return put_int(1, header.shards) + put_int(2, int(header.big_endian)) + put_bytes(3, version)


def decode_entry(data: bytes, *, with_shape: bool = True) -> BundleEntry:
    """Decode an entry record, its shape only on request; raises `WireError` if it is malformed."""
    dtype = shard = offset = size = crc32c = 0
    shape: tuple[int, ...] = ()
    slices: list[tuple[Extent, ...]] = []
    for field, value in read_fields(data):
        if field == 1:
            dtype = as_int(value)
        elif field == 2:
            shape = _decode_shape(as_bytes(value)) if with_shape else ()
        elif field == 3:
            shard = as_int(value)
        elif field == 4:
            offset = as_int(value)
        elif field == 5:
            size = as_int(value)
        elif field == 6:
            crc32c = as_int(value)
        elif field == 7:
            slices.append(_decode_slice(as_bytes(value)))
    if min(shard, offset, size) < 0:
        raise WireError(f"an entry has data file {shard}, offset {offset} and size {size}")
    return BundleEntry(dtype, shape, shard, offset, size, crc32c, tuple(slices))


def encode_entry(entry: BundleEntry) -> bytes:
    """Encode an entry record of a tensor that is stored whole."""
    shape = b"".join(put_bytes(2, put_int(1, size)) for size in entry.shape)
    return (
        put_int(1, entry.dtype)
        + put_bytes(2, shape)
        + put_int(3, entry.shard)
        + put_int(4, entry.offset)
        + put_int(5, entry.size)
        + put_fixed32(6, entry.crc32c)
    )


def _decode_shape(data: bytes) -> tuple[int, ...]:
    sizes = []
    for field, value in read_fields(data):
        if field == 2:
            size = 0
            for dim_field, dim_value in read_fields(as_bytes(value)):
                if dim_field == 1:
                    size = as_int(dim_value)
            if size < 0:
                raise WireError(f"an entry has a dimension of size {size}")
            sizes.append(size)
        elif field == 3 and as_int(value):
            raise WireError("an entry has a shape of unknown rank")
    return tuple(sizes)


def _decode_slice(data: bytes) -> tuple[Extent, ...]:
    extents = []
    for field, value in read_fields(data):
        if field == 1:
            start, length = 0, -1
            for extent_field, number in read_fields(as_bytes(value)):
                if extent_field == 1:
                    start = as_int(number)
                elif extent_field == 2:
                    length = as_int(number)
            extents.append((start, length))
    return tuple(extents)


def slice_key(name: bytes, extents: tuple[Extent, ...]) -> bytes:
    r"""Return the index key of one slice of tensor `name`.

    The parts of the key are a zero, the name, the rank, and start and length for each dimension, each in a
    code that sorts as the number or string does.

    >>> slice_key(b"emb", ((0, 5), (0, -1)))
    b'\x00emb\x00\x01\x01\x02\x80\x85\x80\x7f'
    """
    key = _slice_key_start(name, len(extents))
    for start, length in extents:
        key += _ordered_signed(start) + _ordered_signed(length)
    return key


@functools.lru_cache(maxsize=256)
def _slice_key_start(name: bytes, rank: int) -> bytes:
    return _ordered_unsigned(0) + _ordered_string(name) + _ordered_unsigned(rank)


def _ordered_unsigned(value: int) -> bytes:
    """One byte that counts the number's bytes, then those bytes, most significant first."""
    size = (value.bit_length() + 7) // 8
    return bytes([size]) + value.to_bytes(size, "big")


def _ordered_string(value: bytes) -> bytes:
    """The bytes, with 00 written as 00 FF and FF as FF 00, ended by 00 01."""
    escaped = re.sub(rb"[\x00\xff]", lambda byte: b"\x00\xff" if byte[0] == b"\x00" else b"\xff\x00", value)
    return escaped + b"\x00\x01"


@functools.lru_cache(maxsize=4096)
def _ordered_signed(value: int) -> bytes:
    """Two's complement in the fewest bytes n that leave 7n bits for the number, its top n bits flipped."""
    size = 1
    while not -(1 << 7 * size - 1) <= value < 1 << 7 * size - 1:
        size += 1
    bits = 8 * size
    flip = ((1 << size) - 1) << (bits - size)
    return ((value & (1 << bits) - 1) ^ flip).to_bytes(size, "big")
