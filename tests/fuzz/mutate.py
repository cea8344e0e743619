"""Small changes to the files of a checkpoint: to their bytes, and, past the checksums, to what the bytes mean.

A checkpoint is a dict from file names to bytes. Every mutation takes it and a random generator, and changes it in
place; one that does not apply (a JSON edit where there is no JSON) raises `NotHereError`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import random
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtools.dialects.bundle.checksum import extend, masked
from kvtools.dialects.bundle.index_table import read_table, table_bytes
from kvtools.dialects.bundle.records import HEADER_KEY, decode_entry, encode_entry
from kvtools.dialects.bundle.wire import put_bytes, put_int, put_varint

Files = dict[str, bytes]

NUMBERS = [0, 1, 2, 7, 127, 128, 255, 256, 65535, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1]
NUMBERS += [2**63, 2**64 - 1, -1, -2, -8, -(2**31), -(2**63)]
JSON_VALUES = [None, True, -1, 0, 1, 3, 10**6, 2**31, 2**53, 2**63, 2**64, 10**30, -(2**63), 1.5, 1e308, float("nan")]
JSON_VALUES += [
    "",
    "emb",
    "int64",
    "float32",
    "bfloat16",
    "F64",
    "\x00",
    "é",
    "a" * 300,
    "../x",
    [],
    [[]],
    {},
    [-1],
    [2**40],
]


class NotHereError(Exception):
    """The mutation does not apply to these files."""


def mutate(files: Files, rng: random.Random) -> list[str]:
    """Change the files in one to three ways, and return what was done."""
    done: list[str] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        for _ in range(8):
            mutation = rng.choices(MUTATIONS, WEIGHTS)[0]
            before = dict(files)
            try:
                mutation(files, rng)
            except Exception:  # it does not apply here, or what it would change is broken already
                files.clear()
                files.update(before)
                continue
            done.append(mutation.__name__)
            break
    return done


# --- Bytes ---


def _pick(files: Files, rng: random.Random) -> tuple[str, bytearray]:
    names = sorted(name for name, data in files.items() if data)
    if not names:
        raise NotHereError
    name = rng.choice(names)
    return name, bytearray(files[name])


def flip_bits(files: Files, rng: random.Random) -> None:
    name, data = _pick(files, rng)
    for _ in range(rng.randint(1, 4)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    files[name] = bytes(data)


def set_bytes(files: Files, rng: random.Random) -> None:
    name, data = _pick(files, rng)
    at = rng.randrange(len(data))
    for offset in range(at, min(len(data), at + rng.choice([1, 2, 4, 8, 64]))):
        data[offset] = rng.choice([0, 0xFF, rng.randrange(256)])
    files[name] = bytes(data)


def set_number(files: Files, rng: random.Random) -> None:
    name, data = _pick(files, rng)
    size = rng.choice([1, 2, 4, 8])
    number = rng.choice(NUMBERS) % (1 << 8 * size)
    encoded = rng.choice([number.to_bytes(size, "little"), number.to_bytes(size, "big"), put_varint(number)])
    # The ends of a file are where formats keep their sizes.
    at = rng.choice(
        [rng.randrange(len(data)), rng.randrange(min(64, len(data))), max(0, len(data) - rng.randrange(1, 64))]
    )
    data[at : at + len(encoded)] = encoded
    files[name] = bytes(data)


def truncate(files: Files, rng: random.Random) -> None:
    name, data = _pick(files, rng)
    files[name] = bytes(data[: rng.choice([rng.randrange(len(data)), len(data) - 1, len(data) - rng.randint(1, 64)])])


def grow(files: Files, rng: random.Random) -> None:
    name, data = _pick(files, rng)
    files[name] = bytes(data) + bytes(rng.randrange(256) for _ in range(rng.choice([1, 3, 8, 100])))


def move_range(files: Files, rng: random.Random) -> None:
    """Leave out, repeat or copy a run of bytes, from this file or another."""
    name, data = _pick(files, rng)
    _, source = _pick(files, rng)
    start = rng.randrange(len(source))
    run = source[start : start + rng.choice([1, 4, 8, 16, 100, 1000])]
    at = rng.randrange(len(data))
    kind = rng.randrange(3)
    data[at : at + (0 if kind == 0 else len(run))] = b"" if kind == 1 else run
    files[name] = bytes(data)


def drop_file(files: Files, rng: random.Random) -> None:
    name, _ = _pick(files, rng)
    if len(files) < 2 or rng.random() < 0.3:
        files[name] = b""
    else:
        del files[name]


def swap_files(files: Files, rng: random.Random) -> None:
    if len(files) < 2:
        raise NotHereError
    one, two = rng.sample(sorted(files), 2)
    files[one], files[two] = files[two], files[one]


def change_digits(files: Files, rng: random.Random) -> None:
    """Write another number where digits stand, as they do in the JSON that many formats hold."""
    name, data = _pick(files, rng)
    found = list(re.finditer(rb"-?\d+", bytes(data)))
    if not found:
        raise NotHereError
    match = rng.choice(found)
    number = str(rng.choice(NUMBERS)).encode()
    if rng.random() < 0.5:  # of the same length, so that nothing else moves
        number = number[: len(match[0])].rjust(len(match[0]), b"1")
    data[match.start() : match.end()] = number
    files[name] = bytes(data)


# --- JSON ---


def change_json(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one thing in it changed, left out, or repeated."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        value = dict(value)
        name = rng.choice(sorted(value))
        kind = rng.random()
        if kind < 0.15:
            del value[name]
        elif kind < 0.25:
            value[rng.choice(["", "x", "keys", name + "2"])] = value.pop(name)
        else:
            value[name] = change_json(value[name], rng)
        return value
    if isinstance(value, list) and value and rng.random() < 0.8:
        value = list(value)
        at = rng.randrange(len(value))
        kind = rng.random()
        if kind < 0.2:
            del value[at]
        elif kind < 0.4:
            value.insert(at, value[at])
        else:
            value[at] = change_json(value[at], rng)
        return value
    return rng.choice(JSON_VALUES)


def edit_json_text(files: Files, rng: random.Random) -> None:
    """Change one JSON object that stands anywhere in a file; the bytes after it move if they must."""
    name, data = _pick(files, rng)
    starts = [match.start() for match in re.finditer(rb'\{"', bytes(data))]
    rng.shuffle(starts)
    for start in starts[:8]:
        with contextlib.suppress(ValueError, RecursionError):
            text = bytes(data[start:]).decode("latin-1")
            value, end = json.JSONDecoder().raw_decode(text)
            new = json.dumps(change_json(value, rng)).encode()
            if len(new) <= end:
                new = new.ljust(end)
            data[start : start + end] = new
            files[name] = bytes(data)
            return
    raise NotHereError


# --- TensorFlow bundles ---


def _index(files: Files, rng: random.Random, folder: Path) -> tuple[str, dict[bytes, bytes]]:
    names = sorted(name for name in files if name.endswith(".index"))
    if not names:
        raise NotHereError
    name = rng.choice(names)
    path = folder / "mutate.index"
    path.write_bytes(files[name])
    return name, read_table(path)


def edit_index(files: Files, rng: random.Random) -> None:
    """Change a record of a bundle's index, under checksums that are right."""
    name, records = _index(files, rng, SCRATCH)
    key = rng.choice(sorted(records))
    kind = rng.random()
    if key == HEADER_KEY and kind < 0.7:
        numbers = [rng.choice(NUMBERS) % 2**64 for _ in range(3)]
        records[key] = put_int(1, numbers[0]) + put_int(2, numbers[1] % 4) + put_bytes(3, put_int(2, numbers[2]))
    elif kind < 0.1:
        del records[key]
    elif kind < 0.2:
        records[rng.choice(sorted(records)) + rng.choice([b"", b"-keys", b"-values", b"-kvmeta"])] = records[key]
    elif kind < 0.4:
        record = bytearray(records[key]) or bytearray(b"\0")
        record[rng.randrange(len(record))] = rng.randrange(256)
        records[key] = bytes(record)
    else:
        entry = decode_entry(records[key])
        field = rng.choice(["dtype", "shape", "shape", "offset", "size", "shard"])
        number = rng.choice(NUMBERS) % 2**64
        value: Any = number
        if field == "shape":
            shape = list(entry.shape) or [1]
            shape[rng.randrange(len(shape))] = number
            value = tuple(rng.choice([shape, shape[:-1], [*shape, 1], [0, *shape], shape[::-1]]))
        elif field == "dtype":
            value = rng.choice([1, 2, 3, 7, 9, 14, 17, 19, 22, 23, 99])
        records[key] = encode_entry(dataclasses.replace(entry, **{field: value}))
    files[name] = table_bytes(sorted(records.items()))


def edit_tensor(files: Files, rng: random.Random) -> None:
    """Change the bytes of a tensor, or the JSON in it, and give it the checksum that it then has."""
    name, records = _index(files, rng, SCRATCH)
    entries = {key: decode_entry(record) for key, record in records.items() if key and key[0]}
    key = rng.choice(sorted(key for key, entry in entries.items() if entry.size and not entry.slices))
    entry = entries[key]
    prefix = name.removesuffix(".index")
    shard = next(n for n in sorted(files) if n.startswith(f"{prefix}.data-{entry.shard:05d}-of-"))
    data = bytearray(files[shard])
    tensor = bytearray(data[entry.offset : entry.offset + entry.size])
    if entry.dtype == 7 and rng.random() < 0.8 and not entry.shape:
        start = tensor.index(b"{")
        value = json.loads(bytes(tensor[start:]))
        text = json.dumps(change_json(value, rng)).encode()
        length = len(text).to_bytes(4, "little")
        crc = extend(0, length)
        check = masked(crc).to_bytes(4, "little")
        tensor = bytearray(put_varint(len(text)) + check + text)
        entry = dataclasses.replace(entry, crc32c=masked(extend(extend(crc, check), text)))
    else:
        for _ in range(rng.randint(1, 3)):
            number = rng.choice(NUMBERS) % 2**64
            size = rng.choice([1, 4, 8])
            at = rng.randrange(len(tensor)) // size * size
            tensor[at : at + size] = number.to_bytes(8, "little")[:size]
        tensor = tensor[: entry.size]
        entry = dataclasses.replace(entry, crc32c=masked(extend(0, bytes(tensor))))
    records[key] = encode_entry(dataclasses.replace(entry, offset=len(data), size=len(tensor)))
    files[shard] = bytes(data + tensor)
    files[name] = table_bytes(sorted(records.items()))


# --- safetensors, NumPy archives, HDF5 ---


def edit_safetensors(files: Files, rng: random.Random) -> None:
    """Change the header of a safetensors file as JSON."""
    name = _named(files, rng, ".safetensors")
    data = files[name]
    size = int.from_bytes(data[:8], "little")
    text = json.dumps(change_json(json.loads(data[8 : 8 + size]), rng)).encode()
    files[name] = len(text).to_bytes(8, "little") + text + data[8 + size :]


def edit_archive(files: Files, rng: random.Random) -> None:
    """Change a member of an archive, under a checksum that is right."""
    name = _named(files, rng, (".npz", ".pt"))
    with zipfile.ZipFile(io.BytesIO(files[name])) as file:
        members = {info.filename: file.read(info) for info in file.infolist()}
    kind = rng.random()
    if kind < 0.8:
        rng.choice([flip_bits, set_bytes, set_number, truncate, change_digits, edit_json_text])(members, rng)
    elif kind < 0.9:
        swap_files(members, rng)
    else:
        drop_file(members, rng)
    out = io.BytesIO()
    method = zipfile.ZIP_STORED if name.endswith(".pt") else rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
    with zipfile.ZipFile(out, "w", method) as file:
        for member, content in members.items():
            file.writestr(member, content)
    files[name] = out.getvalue()


def edit_hdf5(files: Files, rng: random.Random) -> None:
    """Change an attribute, a dataset or a link with h5py."""
    import h5py
    import numpy as np

    name = _named(files, rng, ".h5")
    path = SCRATCH / "mutate.h5"
    path.write_bytes(files[name])
    with h5py.File(path, "r+") as file:
        objects: list[str] = []
        file.visit(objects.append)
        where = rng.choice(["/", *objects])
        here = file[where]
        if here.attrs and rng.random() < 0.5:
            attribute = rng.choice(sorted(here.attrs))
            value = here.attrs[attribute]
            if isinstance(value, bytes) and value.startswith(b"{"):
                here.attrs[attribute] = np.bytes_(json.dumps(change_json(json.loads(value), rng)))
            elif rng.random() < 0.3:
                del here.attrs[attribute]
            else:
                here.attrs[attribute] = rng.choice([np.float64(1.5), np.int64(-1), "x", b"\xff", np.arange(3), ""])
        elif where != "/":
            kind = rng.random()
            del file[where]
            if kind < 0.6:
                shape = tuple(rng.choice([0, 1, 3, 10, 20]) for _ in range(rng.randrange(4)))
                dtype = rng.choice(["<i8", ">i8", "<f4", "<u2", "<f2", "S3", "?", "<c8", "<u4", h5py.string_dtype()])
                file[where] = np.zeros(shape, dtype) if isinstance(dtype, str) else ["a"]
            elif kind < 0.7:
                file[where] = h5py.SoftLink(rng.choice(["/", where, "/nowhere", *objects]))
            elif kind < 0.8:
                file.create_group(where)
            elif kind < 0.9:
                file.create_dataset(where, (2**36,), rng.choice(["<i8", "<f4"]), chunks=(2**14,))
    files[name] = path.read_bytes()


def _named(files: Files, rng: random.Random, suffix: str | tuple[str, ...]) -> str:
    names = sorted(name for name in files if name.endswith(suffix))
    if not names:
        raise NotHereError
    return rng.choice(names)


SCRATCH = Path()
"""A folder for mutations that need a file; set by whoever mutates."""

MUTATIONS: list[Callable[[Files, random.Random], None]]
WEIGHTS: list[int]
MUTATIONS, WEIGHTS = map(  # type: ignore[assignment]
    list,
    zip(
        (flip_bits, 3),
        (set_bytes, 2),
        (set_number, 3),
        (truncate, 1),
        (grow, 1),
        (move_range, 2),
        (drop_file, 1),
        (swap_files, 1),
        (change_digits, 2),
        (edit_json_text, 3),
        (edit_index, 8),
        (edit_tensor, 8),
        (edit_safetensors, 12),
        (edit_archive, 12),
        (edit_hdf5, 12),
        strict=True,
    ),
)
