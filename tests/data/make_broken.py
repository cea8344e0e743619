"""Write tests/data/broken: checkpoints with one fault each, in a folder named for the fault.

python tests/data/make_broken.py

CASES says of each which part of it to open and what `kvtools verify` must say.
"""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
import zipfile
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
    """A fault: how to make it in an empty folder, what to open there, and what the messages must say."""

    make: Callable[[Path], None]
    says: tuple[str, ...]
    path: str = "model.ckpt"
    status: int = 3


CASES: dict[str, Case] = {}

Maker = Callable[[Path], None]


def case(name: str, *says: str, path: str = "model.ckpt", status: int = 3) -> Callable[[Maker], Maker]:
    """Note a case that the function below makes."""

    def note(make: Maker) -> Maker:
        CASES[name] = Case(make, says, path, status)
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


def put(name: str, *says: str, make: Maker, path: str = "model.ckpt", status: int = 3) -> None:
    """Note a case that one of the makers above makes."""
    case(name, *says, path=path, status=status)(make)


# --- The index file ---

put("index-empty", "got 0 bytes, expected at least 48", make=edited_file(lambda data: b""))
put("index-truncated", "got magic number 0x0000000000000000 at its end", make=edited_file(lambda data: data[:-9]))
put("index-is-text", "is no TensorFlow checkpoint index", make=edited_file(lambda data: b"this is no index file; " * 8))
put(
    "index-bit-flipped",
    "checksum mismatch in the block at byte 0",
    make=edited_file(lambda data: data[:20] + bytes([data[20] ^ 4]) + data[21:]),
)
put(
    "index-without-middle",
    "checksum mismatch in the block at byte 202",
    make=edited_file(lambda data: data[:30] + data[60:]),
)


def _footer(data: bytes, offset: int, size: int) -> bytes:
    from kvtools.dialects.bundle.wire import put_varint

    handles = b"\0\0" + put_varint(offset) + put_varint(size)
    return data[:-48] + handles.ljust(40, b"\0") + data[-8:]


put(
    "index-block-past-end",
    "a block ends at byte 334 of 279",
    make=edited_file(lambda data: _footer(data, len(data), 50)),
)
put(
    "index-block-of-exabytes",
    "a block ends at byte 4611686018427387909 of 279",
    make=edited_file(lambda data: _footer(data, 0, 2**62)),
)


def _one_block(contents: bytes, compression: int = 0) -> Callable[[bytes], bytes]:
    """An index file of one block, used both as data block and as index block."""

    def edit(data: bytes) -> bytes:
        stored = contents + bytes([compression])
        file = stored + masked(extend(0, stored)).to_bytes(4, "little") + data[-48:]
        return _footer(file, 0, len(contents))

    return edit


put(
    "index-block-compressed",
    "the block at byte 0 is compressed with snappy",
    make=edited_file(_one_block(b"\0" * 12, 1)),
)
put(
    "index-block-claims-restarts",
    "a block of 12 bytes claims 4294967295 restarts",
    make=edited_file(_one_block(b"\0" * 8 + b"\xff" * 4)),
)
put(
    "index-entry-past-block",
    "an entry runs past the end of its block",
    make=edited_file(_one_block(b"\0\x7f\x7fabc" + b"\0\0\0\0\1\0\0\0")),
)
put(
    "index-header-missing",
    "an entry lies in data file 0 of 0",
    make=edited_index(lambda records: records.pop(b"") and None),
)
put(
    "index-header-garbage",
    "a number runs past the end of its record",
    make=edited_index(lambda records: records.update({b"": b"\xff" * 9})),
)


def _header(shards: int, endianness: int = 0, min_consumer: int = 0) -> Maker:
    record = put_int(1, shards) + put_int(2, endianness) + put_bytes(3, put_int(1, 1) + put_int(2, min_consumer))
    return edited_index(lambda records: records.update({b"": record}))


put("index-claims-a-billion-data-files", "the header claims 1000000000 data files", make=_header(10**9))
put("index-of-unknown-endianness", "unknown endianness 7", make=_header(1, endianness=7))
put("index-of-a-later-version", "asks for a reader of version 2", "update kvtools", make=_header(1, min_consumer=2))

# --- Entries of the index, under right checksums ---

put(
    "entry-garbage",
    "a number runs past the end of its record",
    make=edited_index(lambda records: records.update({b"emb-keys": b"\x08\xff"})),
)
put(
    "entry-past-end-of-data",
    "is truncated: got 400 bytes, expected at least 1000048",
    make=edited_entry(b"emb-values", offset=10**6),
)
put(
    "entry-of-exabytes",
    "is truncated: got 400 bytes, expected at least 4611686018427387968",
    make=edited_entry(b"emb-values", size=2**62, shape=(2**59, 2)),
)
put(
    "entry-of-more-rows-than-bytes",
    "'emb-values'",
    "got 48 bytes for 1000000000000 rows",
    make=edited_entry(b"emb-values", shape=(10**12, 2)),
)
put(
    "entry-shape-wraps-around",
    "'emb-values'",
    "got 48 bytes for 4294967296 rows",
    make=edited_entry(b"emb-values", shape=(2**32, 2**32)),
)
put("entry-in-missing-data-file", "an entry lies in data file 5 of 1", make=edited_entry(b"emb-values", shard=5))
put(
    "entry-of-unknown-type",
    "'emb-keys'",
    "got type dtype99, expected numbers",
    make=edited_entry(b"emb-keys", dtype=99),
)
put("entry-is-string", "'emb-values'", "got type string, expected numbers", make=edited_entry(b"emb-values", dtype=7))


def _negative_offset(records: dict[bytes, bytes]) -> None:
    records[b"emb-values"] = put_int(1, 1) + put_int(4, (1 << 64) - 8) + put_int(5, 8) + put_fixed32(6, 0)


put("entry-before-start-of-data", "offset -8 and size 8", make=edited_index(_negative_offset))
put(
    "slice-missing",
    "'emb-values'",
    "its slice 3,3:- has no entry",
    make=slices(((0, 3), (0, -1)), ((3, 3), (0, -1)), stored=1),
)
put(
    "slices-leave-out-rows",
    "leave out or repeat rows between 2 and 3 of 6",
    make=slices(((0, 2), (0, -1)), ((3, 3), (0, -1))),
)
put(
    "slices-repeat-rows",
    "leave out or repeat rows between 3 and 4 of 6",
    make=slices(((0, 4), (0, -1)), ((3, 3), (0, -1))),
)
put(
    "slices-of-columns",
    "got slice 0,6:0,1 of shape [6, 2], expected slices of whole rows",
    make=slices(((0, 6), (0, 1)), ((0, 6), (1, 1))),
)
put("slice-of-negative-rows", "offset 128 and size -32", make=slices(((0, 6), (0, -1)), ((8, -4), (0, -1))))
put(
    "tensors-overlap",
    "'emb-values' begins at byte 64, inside 'emb-slot-Adam.m', which ends at 112",
    make=edited_entry(b"emb-slot-Adam.m", offset=64),
)

# --- Data files ---

put(
    "data-truncated",
    "is truncated: got 360 bytes, expected at least 400",
    make=edited_file(lambda data: data[:-40], data=True),
)
put("data-empty", "is truncated: got 0 bytes, expected at least 400", make=edited_file(lambda data: b"", data=True))
put(
    "data-bit-flipped-in-values", "'emb-values'", "checksum mismatch in bytes 64 to 112", make=flipped("emb-values", 17)
)
put("data-bit-flipped-in-keys", "'emb-keys'", "checksum mismatch in bytes 0 to 48", make=flipped("emb-keys", 3))
put("data-bit-flipped-in-slot", "'emb-slot-Adam.m'", "checksum mismatch", make=flipped("emb-slot-Adam.m"))
put("data-bit-flipped-in-dense-variable", "'dense'", "checksum mismatch", make=flipped("dense"))
put("data-bit-flipped-in-description", "'emb-kvmeta'", "checksum mismatch", make=flipped("emb-kvmeta", 30))


@case("data-missing", "is missing, expected 400 bytes; copy every file")
def _(folder: Path) -> None:
    write(folder, small_tensors())
    data_of(folder).unlink()


@case("index-missing", "but no 'model.ckpt.index'; copy the index file too")
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


put(
    "strings-longer-than-their-bytes",
    "its strings take 4294967304 bytes of 162",
    make=_strings(lambda data: b"\xff\xff\xff\xff\x0f" + data[1:]),
)
put(
    "strings-a-trillion-of-them",
    "it claims 1000000000000 strings in 158 bytes",
    make=_strings(lambda data: data, shape=(10**12,)),
)

# --- The description of a table ---

put("description-not-json", "'emb-kvmeta'", "got malformed JSON", make=changed(emb__kvmeta="{layout: 1"))
put(
    "description-of-deep-nesting",
    "'emb-kvmeta'",
    "got malformed JSON",
    make=changed(emb__kvmeta="[" * 20_000),
)
put("description-is-a-list", "it is not one JSON object", make=changed(emb__kvmeta="[1]"))
put(
    "description-of-a-later-layout",
    "got layout 2, expected at most 1; update kvtools",
    make=changed(emb__kvmeta=meta(layout=2)),
)
put(
    "description-of-negative-width",
    "field 'dim' is -2, expected a positive number",
    make=changed(emb__kvmeta=meta(dim=-2)),
)
put(
    "description-of-another-width",
    "'emb-values' has shape [6, 2], expected [6, 3]",
    make=changed(emb__kvmeta=meta(dim=3)),
)
put(
    "description-of-huge-width",
    "'emb-values' has shape [6, 2], expected [6, 4611686018427387904]",
    make=changed(emb__kvmeta=meta(dim=2**62)),
)
put(
    "description-of-float-keys", "field 'key_dtype' is \"float32\"", make=changed(emb__kvmeta=meta(key_dtype="float32"))
)
put(
    "description-of-other-keys",
    "'emb-keys' is of type int64, expected int32",
    make=changed(emb__kvmeta=meta(key_dtype="int32")),
)
put(
    "description-of-a-quadrillion-parts",
    "got parts [0] of 1000000000000000, part 1 is missing",
    make=changed(emb__kvmeta=meta(parts=10**15)),
)
put(
    "description-of-a-part-beyond-parts",
    "field 'part' is 4, expected a number below 1",
    make=changed(emb__kvmeta=meta(part=4)),
)
put("description-of-a-slot-without-name", "field 'slots' is", make=changed(emb__kvmeta=meta(slots=[{"width": 2}])))
put("description-without-name", "field 'name' is", make=changed(emb__kvmeta=meta(name="")))

# --- Columns of a table ---

put("keys-missing", "'emb-keys'", "no such tensor", make=changed(emb__keys=None))
put("values-missing", "'emb-values'", "no such tensor", make=changed(emb__values=None))
put("slot-missing", "'emb-slot-Adam.m'", "no such tensor", make=changed(**{"emb__slot__Adam_m": None}))
put(
    "values-of-fewer-rows",
    "'emb-values' has shape [5, 2], expected [6, 2]",
    make=changed(emb__values=np.ones((5, 2), np.float32)),
)
put(
    "values-of-one-dimension",
    "'emb-values' has shape [6], expected [6, 2]",
    make=changed(emb__values=np.ones(6, np.float32)),
)
put(
    "keys-of-two-dimensions",
    "'emb-keys' has shape [6, 1], expected ['rows']",
    make=changed(emb__keys=np.ones((6, 1), np.int64)),
)
put("keys-scalar", "'emb-keys' has shape [], expected ['rows']", make=changed(emb__keys=np.int64(3)))
put(
    "freqs-of-another-type",
    "'emb-freqs' is of type float32, expected uint32",
    make=changed(emb__freqs=np.ones(6, np.float32)),
)
put("freqs-of-fewer-rows", "'emb-freqs' has shape [5], expected [6]", make=changed(emb__freqs=np.ones(5, np.uint32)))


@case("part-missing", "got parts [0, 2] of 3, part 1 is missing")
def _(folder: Path) -> None:
    write(folder, {name: value for name, value in small_tensors(3).items() if "part_1" not in name})


@case("part-twice", "got parts [0] of 2, part 1 is missing")
def _(folder: Path) -> None:
    tensors = small_tensors(2)
    write(folder, {**tensors, "emb/part_1-kvmeta": tensors["emb/part_0-kvmeta"]})


@case("parts-of-different-widths", "part 1 has dim 1, part 0 has 2")
def _(folder: Path) -> None:
    tensors = {**small_tensors(2), "emb/part_1-kvmeta": meta(part=1, parts=2, dim=1)}
    write(folder, tensors)


# --- Rows ---

put(
    "keys-twice",
    "3 rows repeat a key of an earlier row (keys 1, 7)",
    make=changed(emb__keys=np.array([7, 1, 7, 2, 1, 7], np.int64)),
)
put(
    "values-not-finite",
    "values: NaN or infinity in 2 rows (keys -1, 4)",
    make=changed(emb__values=np.array([[1, 2], [np.nan, 0], [0, 0], [0, np.inf], [0, 0], [0, 0]], np.float32)),
)
put(
    "slot-not-finite",
    "slot Adam.m: NaN or infinity in 6 rows (keys -3, -1, 0, 4, 5, ...)",
    make=changed(**{"emb__slot__Adam_m": np.full((6, 2), -np.inf, np.float32)}),
)


@case("keys-in-the-wrong-part", "6 rows (keys -3, -1, 5, 0, 4, ...) in another part")
def _(folder: Path) -> None:
    tensors = small_tensors(2)
    for column in ("keys", "values", "slot-Adam.m", "freqs"):
        one, two = f"emb/part_0-{column}", f"emb/part_1-{column}"
        tensors[one], tensors[two] = tensors[two], tensors[one]
    write(folder, tensors)


# --- Folders ---


@case("folder-of-nothing", "no '*.index' file, no 'checkpoint' file and no 'saved_model.pb'", path=".")
def _(folder: Path) -> None:
    (folder / "notes.txt").write_text("no checkpoint here\n")


@case("folder-names-a-missing-checkpoint", "its 'checkpoint' file names 'model.ckpt-999'", path=".")
def _(folder: Path) -> None:
    write(folder, small_tensors())
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt-999"\n')


@case("folder-names-no-checkpoint", "it names no model_checkpoint_path", path=".")
def _(folder: Path) -> None:
    write(folder, small_tensors())
    (folder / "checkpoint").write_text("\x00\xff garbage {{{\n")


# --- TFPlus ---


def tfplus(**tensors: Any) -> Maker:
    """Write a table emb with a slot in TFPlus' layout; `v_` begins a column of the value, `s_` one of the slot."""

    def make(folder: Path) -> None:
        keys = np.arange(6, dtype=np.int64)
        columns = {
            "keys": keys,
            "values": np.ones((6, 2), np.float32),
            "init_table": np.zeros((3, 2), np.float32),
            "blacklist": np.zeros(0, np.int64),
            "freq_keys": keys,
            "freq_values": np.ones(6, np.uint16),
        }
        slot = {**columns, "values": np.ones((6, 6), np.float32), "init_table": np.zeros((3, 6), np.float32)}
        named = {f"v_{name}": value for name, value in columns.items()}
        named.update({f"s_{name}": value for name, value in slot.items()})
        named.update(tensors)
        prefixes = {"v": "emb:0-", "s": "emb/GroupAdam:0-"}
        write(folder, {prefixes[name[0]] + name[2:]: value for name, value in named.items() if value is not None})

    return make


put(
    "tfplus-values-of-fewer-rows",
    "'emb:0-values' has shape [5, 2], expected [6, any]",
    make=tfplus(v_values=np.ones((5, 2), np.float32)),
)
put("tfplus-keys-of-floats", "'emb:0-keys' is of type float32", make=tfplus(v_keys=np.ones(6, np.float32)))
put(
    "tfplus-slot-of-other-keys",
    "slot GroupAdam has no row for 2 of 6 keys (0, 1)",
    "slot GroupAdam has 2 rows whose keys the table has not",
    make=tfplus(s_keys=np.arange(2, 8)),
    status=0,
)
put(
    "tfplus-slot-of-fewer-rows",
    "slot GroupAdam has no row for 2 of 6 keys (4, 5)",
    make=tfplus(s_keys=np.arange(4), s_values=np.ones((4, 6), np.float32)),
    status=0,
)
put(
    "tfplus-freqs-of-other-keys",
    "freqs has no row for 3 of 6 keys (0, 1, 2)",
    make=tfplus(v_freq_keys=np.arange(3, 9)),
    status=0,
)
put(
    "tfplus-freqs-of-fewer-rows",
    "have 6 and 5 rows, expected as many of one as of the other",
    make=tfplus(v_freq_values=np.ones(5, np.uint16)),
)
put(
    "tfplus-initial-rows-of-another-width",
    "'emb:0-init_table' has shape [3, 5], expected [any, 2]",
    make=tfplus(v_init_table=np.zeros((3, 5), np.float32)),
)


@case("tfplus-part-missing", "got parts [0, 2], part 1 is missing")
def _(folder: Path) -> None:
    tensors = {}
    for part in (0, 2):
        tensors[f"emb/part_{part}:0-keys"] = np.array([part], np.int64)
        tensors[f"emb/part_{part}:0-values"] = np.ones((1, 2), np.float32)
    write(folder, tensors)


# --- DeepRec ---


def deeprec(**tensors: Any) -> Maker:
    """Write a table emb with a slot in DeepRec's layout; `v_` begins a column of the value, `s_` one of the slot."""

    def make(folder: Path) -> None:
        keys = np.arange(6, dtype=np.int64)
        columns = {
            "keys": keys,
            "values": np.ones((6, 2), np.float32),
            "freqs": np.ones(6, np.int64),
            "versions": np.ones(6, np.int64),
            "partition_offset": np.minimum(np.arange(1001), 6).astype(np.int32),
        }
        named = {f"{kind}_{name}": value for kind in "vs" for name, value in columns.items()}
        named.update(tensors)
        prefixes = {"v": "emb-", "s": "emb/Adagrad-"}
        write(folder, {prefixes[name[0]] + name[2:]: value for name, value in named.items() if value is not None})

    return make


put(
    "deeprec-values-of-fewer-rows",
    "'emb-values' has shape [5, 2], expected [6, any]",
    make=deeprec(v_values=np.ones((5, 2), np.float32)),
)
put(
    "deeprec-freqs-of-fewer-rows", "'emb-freqs' has shape [5], expected [6]", make=deeprec(v_freqs=np.ones(5, np.int64))
)
put(
    "deeprec-offsets-of-another-length",
    "'emb-partition_offset' has shape [1000], expected [1001]",
    make=deeprec(v_partition_offset=np.zeros(1000, np.int32)),
)
put(
    "deeprec-offsets-that-fall",
    "'emb-partition_offset' begins with 1000, expected 0",
    make=deeprec(v_partition_offset=np.arange(1001, dtype=np.int32)[::-1].copy()),
)
put(
    "deeprec-offsets-past-the-rows",
    "'emb-partition_offset' ends with 1000, expected 6",
    make=deeprec(v_partition_offset=np.arange(1001, dtype=np.int32)),
)
put(
    "deeprec-slot-of-other-keys",
    "slot Adagrad has no row for 2 of 6 keys (0, 1)",
    "slot Adagrad has 2 rows whose keys the table has not",
    make=deeprec(s_keys=np.arange(2, 8)),
)
put(
    "deeprec-keys-in-another-bucket",
    "6 keys of 'emb-keys' (5, 4, 3, 2, 1, ...) are in another bucket",
    make=deeprec(v_keys=np.arange(6)[::-1].copy()),
)

# --- SparseOperationKit ---


ROWS = 12


def sok(name: str, edit: Callable[[bytes], bytes | None]) -> Maker:
    """Copy the first rows of the dump of tests/data/sok with one file changed, or left out."""

    def make(folder: Path) -> None:
        for path in sorted((DATA / "sok").iterdir()):
            data = path.read_bytes()
            data = data[: 296 + ROWS * (8 if path.name.endswith("-key") else 16)]
            new = edit(data) if path.name == name else data
            if new is not None:
                (folder / path.name).write_bytes(new)

    return make


put(
    "sok-header-truncated",
    "has 100 bytes, expected a header of 296",
    make=sok("emb_0-key", lambda data: data[:100]),
    path=".",
)
put(
    "sok-keys-truncated",
    "has 93 bytes after its header, expected a multiple of 8",
    make=sok("emb_0-key", lambda data: data[:-3]),
    path=".",
)
put(
    "sok-keys-of-fewer-rows",
    "'emb_0-weight' holds 48 float32 for 11 keys",
    make=sok("emb_0-key", lambda data: data[:-8]),
    path=".",
)
put(
    "sok-weights-truncated",
    "'emb_0-weight' holds 47 float32 for 12 keys",
    make=sok("emb_0-weight", lambda data: data[:-4]),
    path=".",
)
put(
    "sok-weights-empty",
    "'emb_0-weight' holds 0 float32 for 12 keys",
    make=sok("emb_0-weight", lambda data: data[:296]),
    path=".",
)
put(
    "sok-weights-missing",
    "there is no 'emb_0-weight'; copy every file",
    make=sok("emb_0-weight", lambda data: None),
    path=".",
)
put("sok-keys-missing", "there is no 'emb_0-key'; copy every file", make=sok("emb_0-key", lambda data: None), path=".")
put(
    "sok-slot-of-fewer-rows",
    "slot Adam.m was left out: 'emb_0-Adam-m' holds 4 rows for 12 keys",
    make=sok("emb_0-Adam-m", lambda data: data[: 296 + 64]),
    path=".",
)
put(
    "sok-header-of-unknown-type",
    "says type 99, expected int64",
    make=sok("emb_0-key", lambda data: data[:295] + b"\x63" + data[296:]),
    path=".",
)
put(
    "sok-header-of-another-kind",
    "says kind 0, expected 1 (embeddings)",
    make=sok("emb_0-weight", lambda data: data[:259] + b"\0" + data[260:]),
    path=".",
)

# --- HDF5 ---


def hdf5(edit: Callable[[Any], None]) -> Maker:
    """Write the small table as HDF5, then change it with h5py."""

    def make(folder: Path) -> None:
        import h5py

        from kvtools.dialects.detect import open_checkpoint
        from kvtools.migrate import write_tables

        tables = open_checkpoint(write(folder, small_tensors())).select([])
        write_tables(tables, folder / "tables.h5", "hdf5")
        for path in folder.glob("model.ckpt*"):
            path.unlink()
        with h5py.File(folder / "tables.h5", "r+") as file:
            edit(file)

    return make


def hdf5_bytes(edit: Callable[[bytes], bytes]) -> Maker:
    """Write the small table as HDF5, then change the file's bytes."""

    def make(folder: Path) -> None:
        hdf5(lambda file: None)(folder)
        path = folder / "tables.h5"
        path.write_bytes(edit(path.read_bytes()))

    return make


def _replace(group: str, name: str, array: Any) -> Callable[[Any], None]:
    def edit(file: Any) -> None:
        del file[group][name]
        file[group][name] = array

    return edit


def _sparse(file: Any) -> None:
    """A dataset that claims terabytes and has no bytes in the file."""
    part = file["tables/emb/part_0"]
    del part["keys"], part["values"]
    part.create_dataset("keys", (2**38,), "<i8", chunks=(2**16,))
    part.create_dataset("values", (2**38, 2), "<f4", chunks=(2**15, 2))


def _linked(file: Any) -> None:
    import h5py

    part = file["tables/emb/part_0"]
    del part["values"]
    part["values"] = h5py.ExternalLink("/etc/hostname", "/values")


def _looped(file: Any) -> None:
    import h5py

    del file["tables/emb/part_0"]
    file["tables/emb/part_0"] = h5py.SoftLink("/tables/emb/part_0")


PART = "tables/emb/part_0"
put(
    "hdf5-truncated",
    "the file is truncated or damaged, copy it again",
    make=hdf5_bytes(lambda data: data[: len(data) // 2]),
    path="tables.h5",
)
put("hdf5-empty", "this file is none of a checkpoint's", make=hdf5_bytes(lambda data: b""), path="tables.h5")
put(
    "hdf5-is-text",
    "this file is none of a checkpoint's",
    make=hdf5_bytes(lambda data: b"this is no HDF5\n" * 40),
    path="tables.h5",
)
put(
    "hdf5-bytes-zeroed",
    "the file is damaged, copy it again",
    make=hdf5_bytes(lambda data: data[:64] + bytes(64) + data[128:]),
    path="tables.h5",
)
put(
    "hdf5-keys-missing",
    "got no dataset '/tables/emb/part_0/keys'",
    make=hdf5(lambda file: file[PART].pop("keys")),
    path="tables.h5",
)
put(
    "hdf5-part-missing",
    "got no group 'part_0', expected 1 parts",
    make=hdf5(lambda file: file["tables/emb"].pop("part_0")),
    path="tables.h5",
)
put(
    "hdf5-values-of-fewer-rows",
    "float32 [5, 2], expected float32 [6, 2]",
    make=hdf5(_replace(PART, "values", np.ones((5, 2), "f4"))),
    path="tables.h5",
)
put(
    "hdf5-values-of-another-type",
    "int32 [6, 2], expected float32 [6, 2]",
    make=hdf5(_replace(PART, "values", np.ones((6, 2), "i4"))),
    path="tables.h5",
)
put(
    "hdf5-keys-are-strings",
    "/keys' of object [6], expected int64 [6]",
    make=hdf5(_replace(PART, "keys", ["a"] * 6)),
    path="tables.h5",
)
put(
    "hdf5-values-changed",
    "/values'",
    "checksum mismatch",
    make=hdf5(lambda file: file[PART]["values"].write_direct(np.zeros((6, 2), "f4"))),
    path="tables.h5",
)
put(
    "hdf5-description-not-json",
    "its description is malformed (Expecting property name",
    make=hdf5(lambda file: file["tables/emb"].attrs.update(kvtools=np.bytes_("{"))),
    path="tables.h5",
)
put(
    "hdf5-description-is-a-number",
    "its description is malformed (it is no JSON object)",
    make=hdf5(lambda file: file["tables/emb"].attrs.update(kvtools=3)),
    path="tables.h5",
)
put(
    "hdf5-layout-of-later-version",
    "got HDF5 layout 9, expected 1; update kvtools",
    make=hdf5(lambda file: file.attrs.update(kvtools=np.bytes_('{"layout": 9}'))),
    path="tables.h5",
)
put("hdf5-claims-terabytes", "/keys' of int64 [274877906944], expected int64 [6]", make=hdf5(_sparse), path="tables.h5")
put("hdf5-links-outside", "got no dataset '/tables/emb/part_0/values'", make=hdf5(_linked), path="tables.h5")
put("hdf5-links-in-a-circle", "reading table 'emb'", "the file is damaged", make=hdf5(_looped), path="tables.h5")


def _foreign(file: Any) -> None:
    """Arrays that somebody else wrote, which claim terabytes."""
    import h5py

    del file["tables"], file.attrs["kvtools"]
    assert isinstance(file, h5py.File)
    file.create_dataset("emb/keys", (2**38,), "<i8", chunks=(2**16,))
    file.create_dataset("emb/values", (2**37, 2), "<f4", chunks=(2**15, 2))


put(
    "hdf5-of-others-written-in-part",
    "'/emb/keys'",
    "got 0 chunks of rows, expected 4194304",
    make=hdf5(_foreign),
    path="tables.h5",
)

# --- NumPy archives ---


def archive(edit: Callable[[dict[str, bytes]], None]) -> Maker:
    """Write the small table's keys and values as an archive, with some members changed."""

    def make(folder: Path) -> None:
        tensors = small_tensors()
        members = {f"emb.{name}.npy": npy(tensors[f"emb-{name}"]) for name in ("keys", "values")}
        edit(members)
        with zipfile.ZipFile(folder / "tables.npz", "w") as file:
            for name, data in members.items():
                file.writestr(zipfile.ZipInfo(name), data)

    return make


def npy(array: Any, **options: Any) -> bytes:
    """Return an array as the bytes of a .npy file."""
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def archive_bytes(edit: Callable[[bytes], bytes]) -> Maker:
    """Write the archive, then change the file's bytes."""

    def make(folder: Path) -> None:
        archive(lambda members: None)(folder)
        path = folder / "tables.npz"
        path.write_bytes(edit(path.read_bytes()))

    return make


def member(name: str, data: Any) -> Maker:
    """Write the archive with one member of other bytes."""
    return archive(lambda members: members.update({f"emb.{name}.npy": data}))


HUGE = npy(np.ones((6, 2), np.float32)).replace(b"(6, 2), }" + b" " * 12, b"(99999999999, 2), }  ")

put(
    "npz-truncated",
    "File is not a zip file; the archive is damaged",
    make=archive_bytes(lambda data: data[:-40]),
    path="tables.npz",
)
put(
    "npz-is-text",
    "File is not a zip file; the archive is damaged",
    make=archive_bytes(lambda data: b"PK, and this is no archive " * 9),
    path="tables.npz",
)
put(
    "npz-bit-flipped",
    "Bad CRC-32 for file 'emb.values.npy'",
    make=archive_bytes(lambda data: data.replace(b"\0\0\x80\x40", b"\0\0\x81\x40")),
    path="tables.npz",
)
put(
    "npz-claims-terabytes",
    "it has 176 bytes, expected 800000000120 for float32 [99999999999, 2]",
    make=member("values", HUGE),
    path="tables.npz",
)
put(
    "npz-values-of-fewer-rows",
    "'emb.keys' has 6 keys and 'emb.values' 5 rows",
    make=member("values", npy(np.ones((5, 2), np.float32))),
    path="tables.npz",
)
put(
    "npz-values-truncated",
    "it has 168 bytes, expected 176 for float32 [6, 2]",
    make=member("values", npy(np.ones((6, 2), np.float32))[:-8]),
    path="tables.npz",
)
put(
    "npz-keys-are-pickled",
    "'emb.keys.npy'",
    "it is of type object, expected plain numbers; save it without objects",
    make=member("keys", npy(np.array([1, None]), allow_pickle=True)),
    path="tables.npz",
)
put(
    "npz-header-garbage",
    "'emb.keys.npy'",
    "the archive is damaged",
    make=member("keys", b"\x93NUMPY\1\0\xff\xff{"),
    path="tables.npz",
)

# --- safetensors ---


def safetensors(header: Any, data: bytes = bytes(96)) -> Maker:
    """Write a file of this header, as JSON or as bytes, and this data."""

    def make(folder: Path) -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        (folder / "tables.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)

    return make


def tensor(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    """Return what a header says of a tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


KEYS = tensor("I64", [6], 0, 48)
ST = "tables.safetensors"
put(
    "safetensors-header-of-exabytes",
    "got a header of 9223372036854775807 bytes",
    make=lambda folder: (folder / ST).write_bytes(b"\xff" * 7 + b"\x7f{}") and None,
    path=ST,
)
put(
    "safetensors-header-not-json",
    "got no JSON object of different names (Expecting value",
    make=safetensors(b'{"emb.keys": '),
    path=ST,
)
put(
    "safetensors-header-of-deep-nesting",
    "got no JSON object of different names",
    make=safetensors(b'{"a":' * 10_000),
    path=ST,
)
put("safetensors-header-is-a-list", "it is no object", make=safetensors([]), path=ST)
put(
    "safetensors-past-end",
    "got tensor 'emb.values' of 9552 bytes, expected 48",
    make=safetensors({"emb.keys": KEYS, "emb.values": tensor("F32", [6, 2], 48, 9600)}),
    path=ST,
)
put(
    "safetensors-overlapping",
    "got tensor 'emb.values' at byte 40, which overlaps the tensor before it",
    make=safetensors({"emb.keys": KEYS, "emb.values": tensor("F32", [6, 2], 40, 88)}),
    path=ST,
)
put(
    "safetensors-of-another-size",
    "of 48 bytes, expected 8796093022208 for F32",
    make=safetensors({"emb.keys": KEYS, "emb.values": tensor("F32", [2**40, 2], 48, 96)}),
    path=ST,
)
put(
    "safetensors-of-unknown-type",
    "none of its tensors (emb.keys) can be a table",
    make=safetensors({"emb.keys": tensor("Q9", [6], 0, 48)}, bytes(48)),
    path=ST,
)
put(
    "safetensors-of-negative-shape",
    "of shape [-6, -2], expected a list of sizes",
    make=safetensors({"emb.keys": KEYS, "emb.values": tensor("F32", [-6, -2], 48, 96)}),
    path=ST,
)
put(
    "safetensors-of-fewer-rows",
    "'emb.keys' has 6 keys and 'emb.values' 4 rows",
    make=safetensors({"emb.keys": KEYS, "emb.values": tensor("F32", [4, 3], 48, 96)}),
    path=ST,
)


# --- TensorFlow Recommenders Addons ---


def tfra(**tensors: Any) -> Maker:
    """Write a name-based table of two parts with Adam's m; `k0`: keys of the first part, `mv1`: m's second rows."""

    def make(folder: Path) -> None:
        all_tensors: dict[str, Any] = {}
        for slot, prefix in (("", "emb/emb"), ("m", "m/emb_Adam_m")):
            for part in range(2):
                keys = np.arange(part, 6, 2, dtype=np.int64)
                rows = np.ones((3, 2), np.float32)
                name = f"{prefix}_mht_{part + 1}of2"
                all_tensors[f"{name}-keys"] = tensors.get(f"{slot}k{part}", keys)
                all_tensors[f"{name}-values"] = tensors.get(f"{slot}v{part}", rows)
        write(folder, {name: value for name, value in all_tensors.items() if value is not None})

    return make


put(
    "tfra-values-of-fewer-rows",
    "has shape [3] and 'emb/emb_mht_1of2-values' [2, 2]",
    make=tfra(v0=np.ones((2, 2), np.float32)),
)
put(
    "tfra-part-missing",
    "opening table 'emb'",
    "got 1 of 2 parts, part 1 is missing",
    make=tfra(k1=None, v1=None, mk1=None, mv1=None),
)
put(
    "tfra-keys-in-the-wrong-part",
    "whether keys are in the right part is not checked",
    status=0,
    make=tfra(k0=np.arange(1, 7, 2), k1=np.arange(0, 6, 2)),
)
put(
    "tfra-key-in-two-parts",
    "1 row repeats a key of an earlier row (key 1)",
    make=tfra(k0=np.array([0, 2, 1]), k1=np.array([1, 3, 5])),
)
put(
    "tfra-parts-of-different-widths",
    "its parts are of different types or widths",
    make=tfra(v1=np.ones((3, 4), np.float32)),
)
put(
    "tfra-slot-of-other-keys",
    "slot Adam.m has no row for 1 of 6 keys (4)",
    status=0,
    make=tfra(mk0=np.array([0, 2, 8])),
)


def tfra_files(edit: Callable[[dict[str, bytes]], None]) -> Maker:
    """Copy the first rows of tests/data/tfra/filesystem, with some files changed."""

    def make(folder: Path) -> None:
        source = DATA / "tfra" / "filesystem"
        files = {
            str(path.relative_to(source)): path.read_bytes() for path in sorted(source.rglob("*")) if path.is_file()
        }
        for name, data in files.items():
            if name.endswith(("-keys", "-values")):
                files[name] = data[: 8 * 8 if name.endswith("-keys") else 8 * 32]
        edit(files)
        for name, data in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(data)

    return make


FS = "TFRADynamicEmbedding/fs_emb_mht_1of2_rank0_size1"
put(
    "tfra-files-keys-truncated",
    "has 61 bytes, expected a multiple of 8",
    make=tfra_files(lambda f: f.update({f"{FS}-keys": f[f"{FS}-keys"][:-3]})),
    path="TFRADynamicEmbedding",
)
put(
    "tfra-files-values-truncated",
    "has 253 bytes for 8 int64 keys",
    make=tfra_files(lambda f: f.update({f"{FS}-values": f[f"{FS}-values"][:-3]})),
    path="TFRADynamicEmbedding",
)
put(
    "tfra-files-values-missing",
    "and no file of its values; copy every file",
    make=tfra_files(lambda f: f.pop(f"{FS}-values") and None),
    path="TFRADynamicEmbedding",
)
put(
    "tfra-files-part-missing",
    "got the files of 1 of 2 shards",
    "is missing; copy every file",
    make=tfra_files(lambda f: [f.pop(f"{FS}-{kind}") for kind in ("keys", "values")] and None),
    path="TFRADynamicEmbedding",
)

# --- Parquet and Arrow ---


def copied(name: str, edit: Callable[[bytes], bytes]) -> Maker:
    """Copy a file of tests/data/formats with its bytes changed."""

    def make(folder: Path) -> None:
        (folder / name).write_bytes(edit((DATA / "formats" / name).read_bytes()))

    return make


def parquet(columns: dict[str, Any]) -> Maker:
    """Write a Parquet file as anybody does, with these columns."""

    def make(folder: Path) -> None:
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table(columns), folder / "table.parquet", compression="none")

    return make


def arrow(edit: Callable[[bytes], bytes]) -> Maker:
    """Write an Arrow file as anybody does, with its bytes changed."""

    def make(folder: Path) -> None:
        import pyarrow

        table = pyarrow.table({"key": [1, 2], "value": [[1.0], [2.0]]})
        with pyarrow.ipc.new_file(folder / "table.arrow", table.schema) as file:
            file.write_table(table)
        path = folder / "table.arrow"
        path.write_bytes(edit(path.read_bytes()))

    return make


PQ, AR = "sample.parquet", "sample.arrow"
put(
    "parquet-truncated",
    "as Parquet",
    "the file is truncated or damaged",
    make=copied(PQ, lambda data: data[:-100]),
    path=PQ,
)
put(
    "parquet-footer-of-gigabytes",
    "as Parquet",
    "the file is truncated or damaged",
    make=copied(PQ, lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1"),
    path=PQ,
)
put(
    "parquet-footer-zeroed",
    "as Parquet",
    "the file is truncated or damaged",
    make=copied(PQ, lambda data: data[:-200] + bytes(192) + data[-8:]),
    path=PQ,
)
put(
    "parquet-bytes-changed",
    "reading table 'ads/emb'",
    "CRC checksum verification failed",
    make=copied(PQ, lambda data: data[:1200] + b"\x55" * 8 + data[1208:]),
    path=PQ,
)
put(
    "parquet-without-keys",
    "it cannot be told which column is the keys",
    make=parquet({"id": ["a", "b"], "value": [[1.0], [2.0]]}),
    path="table.parquet",
)
put(
    "parquet-keys-are-null",
    "column 'key': got 1 nulls",
    make=parquet({"key": [1, None], "value": [[1.0], [2.0]]}),
    path="table.parquet",
)
put(
    "parquet-rows-of-different-widths",
    "got a list of 2 numbers, expected 1 in every row",
    make=parquet({"key": [1, 2], "value": [[1.0], [2.0, 3.0]]}),
    path="table.parquet",
)
put(
    "parquet-values-are-null",
    "column 'value': got 1 nulls",
    make=parquet({"key": [1, 2], "value": [[1.0], None]}),
    path="table.parquet",
)
put(
    "arrow-truncated",
    "as Arrow",
    "the file is truncated or damaged",
    make=copied(AR, lambda data: data[:-100]),
    path=AR,
)
put(
    "arrow-footer-of-gigabytes",
    "as Arrow",
    "the file is truncated or damaged",
    make=copied(AR, lambda data: data[:-10] + b"\xff\xff\xff\x7fARROW1"),
    path=AR,
)
put(
    "arrow-bytes-changed",
    "checksum mismatch: got",
    make=copied(AR, lambda data: data[:3400] + b"\x55" * 8 + data[3408:]),
    path=AR,
)
put(
    "arrow-names-no-text",
    "as Arrow",
    "can't decode byte 0xc1",
    make=arrow(lambda data: data.replace(b"value", b"val\xc1e")),
    path="table.arrow",
)

# --- What the fuzzer found ---


def _tables_dataset(file: Any) -> None:
    del file["tables"]
    file["tables"] = np.zeros(3)


def _rename_rule(attributes: Any) -> None:
    attributes["kvtools"] = np.bytes_(attributes["kvtools"].replace(b'"floor_mod"', b'"emb"'))


put(
    "hdf5-description-of-variable-length",
    "attribute 'kvtools' of '/tables/emb' is of variable length",
    make=hdf5(lambda file: file["tables/emb"].attrs.update(kvtools="{}")),
    path="tables.h5",
)
put(
    "npz-header-open-bracket",
    "'emb.keys.npy'",
    "the archive is damaged",
    make=member("keys", b"\x93NUMPY\1\0\x10\0{'descr': (       "),
    path="tables.npz",
)
put(
    "npz-name-of-other-bytes",
    "'emb.keys.npy'",
    "the archive is damaged",
    make=archive_bytes(lambda data: data[:30] + b"\xff" + data[31:]),
    path="tables.npz",
)
put(
    "hdf5-tables-are-a-dataset",
    "'/tables' is a dataset",
    make=hdf5(_tables_dataset),
    path="tables.h5",
)
put(
    "hdf5-unknown-rule-of-parts",
    "field 'partition' of its description is \"emb\"",
    make=hdf5(lambda file: _rename_rule(file["tables/emb"].attrs)),
    path="tables.h5",
)


def main() -> None:
    """Write every case anew."""
    shutil.rmtree(BROKEN, ignore_errors=True)
    for name, one in CASES.items():
        folder = BROKEN / name
        folder.mkdir(parents=True)
        one.make(folder)


if __name__ == "__main__":
    main()
