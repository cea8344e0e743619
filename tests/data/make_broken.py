"""Write tests/data/broken: checkpoints with one fault each, in a folder named for the fault.

PYTHONPATH=tests/kvtools python tests/data/make_broken.py

CASES says of each which part of it to open, what the error must say, and whether only reading all of it can tell.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.bundle import Bundle, BundleWriter
from kvtools.dialects.bundle.checksum import extend, masked
from kvtools.dialects.bundle.index_table import read_table, table_bytes
from kvtools.dialects.bundle.records import BundleEntry, decode_entry, encode_entry, slice_key
from kvtools.dialects.bundle.wire import put_bytes, put_fixed32, put_int

DATA = Path(__file__).parent
BROKEN = DATA / "broken"


@dataclass(frozen=True)
class Case:
    """A fault: how to make it in an empty folder, what to open there, and what every message must say."""

    make: Callable[[Path], None]
    says: tuple[str, ...]
    path: str = "model.ckpt"
    found_by: str = "inspect"


CASES: dict[str, Case] = {}

Maker = Callable[[Path], None]


def case(name: str, *says: str, path: str = "model.ckpt", found_by: str = "inspect") -> Callable[[Maker], Maker]:
    """Note a case; `found_by` is "verify" for what cannot be seen without reading rows."""

    def note(make: Maker) -> Maker:
        CASES[name] = Case(make, says, path, found_by)
        return make

    return note


# --- The pieces of a bundle ---


def small_tensors(parts: int = 1) -> dict[str, Any]:
    """A table emb: 6 keys, rows of 2, an Adam slot; and a dense variable."""
    keys = np.array([-3, -1, 0, 4, 5, 2**40], np.int64)
    tensors: dict[str, Any] = {}
    for part in range(parts):
        here = keys[keys % parts == part]
        x = "emb" if parts == 1 else f"emb/part_{part}"
        rows = np.stack([here, here / 2], axis=1).astype(np.float32)
        tensors[f"{x}-keys"] = here
        tensors[f"{x}-values"] = rows
        tensors[f"{x}-slot-Adam.m"] = rows * 2
        tensors[f"{x}-freqs"] = np.ones(len(here), np.uint32)
        tensors[f"{x}-kvmeta"] = meta(part=part, parts=parts)
    tensors["dense"] = np.arange(4, dtype=np.float32)
    return tensors


def meta(**changed: Any) -> str:
    """The description of the table emb."""
    record = {"layout": 1, "name": "emb", "part": 0, "parts": 1, "key_dtype": "int64", "value_dtype": "float32"}
    return json.dumps({**record, "dim": 2, "slots": [{"name": "Adam.m", "width": 2}], **changed})


def write(folder: Path, tensors: dict[str, Any]) -> Path:
    """Write a bundle without padding, so that it stays small."""
    with BundleWriter(folder / "model.ckpt") as writer:
        for name, value in tensors.items():
            if isinstance(value, str | bytes):
                writer.string(name, value.encode() if isinstance(value, str) else value)
            else:
                writer.array(name, np.asarray(value))
    return folder / "model.ckpt"


def changed(**tensors: Any) -> Maker:
    """Write the small checkpoint with some tensors changed; None leaves one out. `__` stands for `-`."""

    def make(folder: Path) -> None:
        new = {name.replace("__", "-").replace("Adam_m", "Adam.m"): value for name, value in tensors.items()}
        write(folder, {name: value for name, value in {**small_tensors(), **new}.items() if value is not None})

    return make


def index_of(folder: Path) -> Path:
    return folder / "model.ckpt.index"


def data_of(folder: Path) -> Path:
    return folder / "model.ckpt.data-00000-of-00001"


def edited_index(edit: Callable[[dict[bytes, bytes]], None]) -> Maker:
    """Write the small checkpoint with an index whose checksums are right and whose records lie."""

    def make(folder: Path) -> None:
        write(folder, small_tensors())
        records = read_table(index_of(folder))
        edit(records)
        index_of(folder).write_bytes(table_bytes(sorted(records.items())))

    return make


def edited_entry(name: bytes, **fields: Any) -> Maker:
    """Write the small checkpoint with some fields of one entry changed."""

    def edit(records: dict[bytes, bytes]) -> None:
        records[name] = encode_entry(dataclasses.replace(decode_entry(records[name]), **fields))

    return edited_index(edit)


def edited_file(edit: Callable[[bytes], bytes], *, data: bool = False) -> Maker:
    """Write the small checkpoint with other bytes in its index, or in its data file."""

    def make(folder: Path) -> None:
        write(folder, small_tensors())
        path = data_of(folder) if data else index_of(folder)
        path.write_bytes(edit(path.read_bytes()))

    return make


def flipped(tensor: str, byte: int = 0) -> Maker:
    """Write the small checkpoint with one bit of a tensor flipped."""

    def make(folder: Path) -> None:
        prefix = write(folder, small_tensors())
        entry = Bundle(prefix).entries[tensor]
        data = bytearray(data_of(folder).read_bytes())
        data[entry.offset + byte] ^= 1
        data_of(folder).write_bytes(data)

    return make


def slices(*extents: tuple[tuple[int, int], ...], stored: int | None = None) -> Maker:
    """Write the small checkpoint with the values in slices; `stored` of them have an entry of their own."""

    def edit(records: dict[bytes, bytes]) -> None:
        entry = decode_entry(records[b"emb-values"])
        record = encode_entry(dataclasses.replace(entry, size=0, offset=0, crc32c=0))
        for number, slice_extents in enumerate(extents):
            record += put_bytes(7, b"".join(put_bytes(1, put_int(1, a) + put_int(2, n)) for a, n in slice_extents))
            start, length = slice_extents[0]
            part = BundleEntry(1, (length, 2), 0, entry.offset + start * 8, length * 8)
            if stored is None or number < stored:
                records[slice_key(b"emb-values", slice_extents)] = encode_entry(part)
        records[b"emb-values"] = record

    return edited_index(edit)


def put(name: str, *says: str, make: Maker, found_by: str = "inspect", path: str = "model.ckpt") -> None:
    """Note a case that one of the makers above makes."""
    case(name, *says, path=path, found_by=found_by)(make)


# --- The index file ---

put("index-empty", "", make=edited_file(lambda data: b""))
put("index-truncated", "", make=edited_file(lambda data: data[:-9]))
put("index-is-text", "", make=edited_file(lambda data: b"this is no index file; " * 8))
put("index-bit-flipped", "", make=edited_file(lambda data: data[:20] + bytes([data[20] ^ 4]) + data[21:]))
put("index-without-middle", "", make=edited_file(lambda data: data[:30] + data[60:]))


def _footer(data: bytes, offset: int, size: int) -> bytes:
    from kvtools.dialects.bundle.wire import put_varint

    handles = b"\0\0" + put_varint(offset) + put_varint(size)
    return data[:-48] + handles.ljust(40, b"\0") + data[-8:]


put("index-block-past-end", "", make=edited_file(lambda data: _footer(data, len(data), 50)))
put("index-block-of-exabytes", "", make=edited_file(lambda data: _footer(data, 0, 2**62)))


def _one_block(contents: bytes, compression: int = 0) -> Callable[[bytes], bytes]:
    """An index file of one block, used both as data block and as index block."""

    def edit(data: bytes) -> bytes:
        stored = contents + bytes([compression])
        file = stored + masked(extend(0, stored)).to_bytes(4, "little") + data[-48:]
        return _footer(file, 0, len(contents))

    return edit


put("index-block-compressed", "", make=edited_file(_one_block(b"\0" * 12, 1)))
put("index-block-claims-restarts", "", make=edited_file(_one_block(b"\0" * 8 + b"\xff" * 4)))
put("index-entry-past-block", "", make=edited_file(_one_block(b"\0\x7f\x7fabc" + b"\0\0\0\0\1\0\0\0")))
put("index-header-missing", "", make=edited_index(lambda records: records.pop(b"") and None))
put("index-header-garbage", "", make=edited_index(lambda records: records.update({b"": b"\xff" * 9})))


def _header(shards: int, endianness: int = 0, min_consumer: int = 0) -> Maker:
    record = put_int(1, shards) + put_int(2, endianness) + put_bytes(3, put_int(1, 1) + put_int(2, min_consumer))
    return edited_index(lambda records: records.update({b"": record}))


put("index-claims-a-billion-data-files", "", make=_header(10**9))
put("index-of-unknown-endianness", "", make=_header(1, endianness=7))
put("index-of-a-later-version", "", make=_header(1, min_consumer=2))

# --- Entries of the index, under right checksums ---

put("entry-garbage", "", make=edited_index(lambda records: records.update({b"emb-keys": b"\x08\xff"})))
put("entry-past-end-of-data", "", make=edited_entry(b"emb-values", offset=10**6))
put("entry-of-exabytes", "", make=edited_entry(b"emb-values", size=2**62, shape=(2**59, 2)))
put("entry-of-more-rows-than-bytes", "", make=edited_entry(b"emb-values", shape=(10**12, 2)))
put("entry-shape-wraps-around", "", make=edited_entry(b"emb-values", shape=(2**32, 2**32)))
put("entry-in-missing-data-file", "", make=edited_entry(b"emb-values", shard=5))
put("entry-of-unknown-type", "", make=edited_entry(b"emb-keys", dtype=99))
put("entry-is-string", "", make=edited_entry(b"emb-values", dtype=7))


def _negative_offset(records: dict[bytes, bytes]) -> None:
    records[b"emb-values"] = put_int(1, 1) + put_int(4, (1 << 64) - 8) + put_int(5, 8) + put_fixed32(6, 0)


put("entry-before-start-of-data", "", make=edited_index(_negative_offset))
put("slice-missing", "", make=slices(((0, 3), (0, -1)), ((3, 3), (0, -1)), stored=1))
put("slices-leave-out-rows", "", make=slices(((0, 2), (0, -1)), ((3, 3), (0, -1))))
put("slices-repeat-rows", "", make=slices(((0, 4), (0, -1)), ((3, 3), (0, -1))))
put("slices-of-columns", "", make=slices(((0, 6), (0, 1)), ((0, 6), (1, 1))))
put("slice-of-negative-rows", "", make=slices(((0, 6), (0, -1)), ((8, -4), (0, -1))))
put("tensors-overlap", "", make=edited_entry(b"emb-slot-Adam.m", offset=64), found_by="verify")

# --- Data files ---

put("data-truncated", "", make=edited_file(lambda data: data[:-40], data=True))
put("data-empty", "", make=edited_file(lambda data: b"", data=True))
put("data-bit-flipped-in-values", "", make=flipped("emb-values", 17), found_by="verify")
put("data-bit-flipped-in-keys", "", make=flipped("emb-keys", 3), found_by="verify")
put("data-bit-flipped-in-slot", "", make=flipped("emb-slot-Adam.m"), found_by="verify")
put("data-bit-flipped-in-dense-variable", "", make=flipped("dense"), found_by="verify")
put("data-bit-flipped-in-description", "", make=flipped("emb-kvmeta", 30))


@case("data-missing", "")
def _(folder: Path) -> None:
    write(folder, small_tensors())
    data_of(folder).unlink()


@case("index-missing", "")
def _(folder: Path) -> None:
    write(folder, small_tensors())
    index_of(folder).unlink()


def _strings(edit: Callable[[bytes], bytes], shape: tuple[int, ...] = ()) -> Maker:
    """Change the bytes of the description, with a checksum that is right."""

    def make(folder: Path) -> None:
        prefix = write(folder, small_tensors())
        entry = Bundle(prefix).entries["emb-kvmeta"]
        data = data_of(folder).read_bytes()
        stored = edit(data[entry.offset : entry.offset + entry.size])
        data_of(folder).write_bytes(data + stored)
        records = read_table(index_of(folder))
        new = dataclasses.replace(
            entry, offset=len(data), size=len(stored), crc32c=masked(extend(0, stored)), shape=shape
        )
        records[b"emb-kvmeta"] = encode_entry(new)
        index_of(folder).write_bytes(table_bytes(sorted(records.items())))

    return make


put("strings-longer-than-their-bytes", "", make=_strings(lambda data: b"\xff\xff\xff\xff\x0f" + data[1:]))
put("strings-a-trillion-of-them", "", make=_strings(lambda data: data, shape=(10**12,)))

# --- The description of a table ---

put("description-not-json", "", make=changed(emb__kvmeta="{layout: 1"))
put("description-of-deep-nesting", "", make=changed(emb__kvmeta="[" * 100_000))
put("description-is-a-list", "", make=changed(emb__kvmeta="[1]"))
put("description-of-a-later-layout", "", make=changed(emb__kvmeta=meta(layout=2)))
put("description-of-negative-width", "", make=changed(emb__kvmeta=meta(dim=-2)))
put("description-of-another-width", "", make=changed(emb__kvmeta=meta(dim=3)))
put("description-of-huge-width", "", make=changed(emb__kvmeta=meta(dim=2**62)))
put("description-of-float-keys", "", make=changed(emb__kvmeta=meta(key_dtype="float32")))
put("description-of-other-keys", "", make=changed(emb__kvmeta=meta(key_dtype="int32")))
put("description-of-a-quadrillion-parts", "", make=changed(emb__kvmeta=meta(parts=10**15)))
put("description-of-a-part-beyond-parts", "", make=changed(emb__kvmeta=meta(part=4)))
put("description-of-a-slot-without-name", "", make=changed(emb__kvmeta=meta(slots=[{"width": 2}])))
put("description-without-name", "", make=changed(emb__kvmeta=meta(name="")))

# --- Columns of a table ---

put("keys-missing", "", make=changed(emb__keys=None))
put("values-missing", "", make=changed(emb__values=None))
put("slot-missing", "", make=changed(**{"emb__slot__Adam_m": None}))
put("values-of-fewer-rows", "", make=changed(emb__values=np.ones((5, 2), np.float32)))
put("values-of-one-dimension", "", make=changed(emb__values=np.ones(6, np.float32)))
put("keys-of-two-dimensions", "", make=changed(emb__keys=np.ones((6, 1), np.int64)))
put("keys-scalar", "", make=changed(emb__keys=np.int64(3)))
put("freqs-of-another-type", "", make=changed(emb__freqs=np.ones(6, np.float32)))
put("freqs-of-fewer-rows", "", make=changed(emb__freqs=np.ones(5, np.uint32)))


@case("part-missing", "")
def _(folder: Path) -> None:
    write(folder, {name: value for name, value in small_tensors(3).items() if "part_1" not in name})


@case("part-twice", "")
def _(folder: Path) -> None:
    tensors = small_tensors(2)
    write(folder, {**tensors, "emb/part_1-kvmeta": tensors["emb/part_0-kvmeta"]})


@case("parts-of-different-widths", "")
def _(folder: Path) -> None:
    tensors = {**small_tensors(2), "emb/part_1-kvmeta": meta(part=1, parts=2, dim=1)}
    write(folder, tensors)


# --- Rows ---

put(
    "keys-twice",
    "",
    make=changed(emb__keys=np.array([7, 1, 7, 2, 1, 7], np.int64)),
    found_by="verify",
)
put(
    "values-not-finite",
    "",
    make=changed(emb__values=np.array([[1, 2], [np.nan, 0], [0, 0], [0, np.inf], [0, 0], [0, 0]], np.float32)),
    found_by="verify",
)
put(
    "slot-not-finite",
    "",
    make=changed(**{"emb__slot__Adam_m": np.full((6, 2), -np.inf, np.float32)}),
    found_by="verify",
)


@case("keys-in-the-wrong-part", "", found_by="verify")
def _(folder: Path) -> None:
    tensors = small_tensors(2)
    for column in ("keys", "values", "slot-Adam.m", "freqs"):
        one, two = f"emb/part_0-{column}", f"emb/part_1-{column}"
        tensors[one], tensors[two] = tensors[two], tensors[one]
    write(folder, tensors)


# --- Folders ---


@case("folder-of-nothing", "", path=".")
def _(folder: Path) -> None:
    (folder / "notes.txt").write_text("no checkpoint here\n")


@case("folder-names-a-missing-checkpoint", "", path=".")
def _(folder: Path) -> None:
    write(folder, small_tensors())
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-999"\n')


@case("folder-names-no-checkpoint", "", path=".")
def _(folder: Path) -> None:
    write(folder, small_tensors())
    (folder / "checkpoint").write_text("\x00\xff garbage {{{\n")


def main() -> None:
    """Write every case anew."""
    shutil.rmtree(BROKEN, ignore_errors=True)
    for name, one in CASES.items():
        folder = BROKEN / name
        folder.mkdir(parents=True)
        one.make(folder)


if __name__ == "__main__":
    main()
