"""Our own checkpoint layout: per part of a variable `X-keys`, `X-values`, ..., and `X-kvmeta`, a JSON
description.

The layout is specified in `docs/checkpoint-layout.md`; this file reads version 1 of it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, TypeGuard

from kvtools.dialects.bundle import Bundle, BundleTensor
from kvtools.dialects.bundle_table import BundlePart, BundleTable
from kvtools.dialects.interface import Checkpoint, SlotSchema, TableReader, TableSchema
from kvtools.dialects.location import Location
from kvtools.dialects.tensorflow import dense_variables
from kvtools.errors import BadInputError, CorruptFileError

DIALECT = "tfplugin"
LAYOUT = 1
KEY_DTYPES = frozenset({"int64", "int32", "uint64"})
VALUE_DTYPES = frozenset({"float32", "float16", "bfloat16", "float64"})

_META = "-kvmeta"
_SLOT = "-slot-"
_COUNTERS = frozenset({"uint32"})
_OBJECT_PREFIX = re.compile(r"^(?:(?P<path>.*)/)?\.ATTRIBUTES/kv(?:_part_\d+)?$", re.S)


@dataclass(frozen=True)
class PartMeta:
    """The `kvmeta` of one part, as far as the offline tools need it."""

    prefix: str
    name: str
    part: int
    parts: int
    key_dtype: str
    value_dtype: str
    dim: int
    slots: tuple[tuple[str, int], ...]


def sniff(bundle: Bundle) -> bool:
    """Tell whether a bundle holds a table in this layout."""
    return any(name.endswith(_META) for name in bundle.entries)


def open_checkpoint(location: Location, bundle: Bundle) -> Checkpoint:
    """Open the tables and variables of a bundle in this layout.

    Raises:
        BadInputError: a layout version above 1, or a part that is missing.
        CorruptFileError: a malformed `kvmeta`, or columns that do not fit together.
    """
    groups: dict[str, list[PartMeta]] = {}
    for tensor in bundle.entries:
        if tensor.endswith(_META):
            meta = _read_meta(bundle, tensor.removesuffix(_META))
            groups.setdefault(_variable_prefix(meta), []).append(meta)
    names = _table_names(groups)
    tables: dict[str, TableReader] = {}
    used: set[str] = set()
    for base, metas in groups.items():
        table, tensors = _open_table(bundle, names[base], sorted(metas, key=lambda meta: meta.part))
        tables[table.schema.name] = table
        used |= tensors
    return Checkpoint(
        location.saved_model or location.prefix,
        DIALECT,
        dict(sorted(tables.items())),
        dense_variables(bundle, used),
    )


def _read_meta(bundle: Bundle, prefix: str) -> PartMeta:
    tensor = prefix + _META
    doing = f"reading tensor '{tensor}' of '{bundle.prefix}'"
    strings = bundle.strings(tensor)
    try:
        record = json.loads(strings[0]) if len(strings) == 1 else None
        if not isinstance(record, dict):
            raise ValueError("it is not one JSON object")
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(
            f"{doing}: got malformed JSON ({error}), expected the description of a table; write the checkpoint again"
        ) from error
    layout = record.get("layout")
    if not _is_count(layout) or layout < 1:
        raise CorruptFileError(f"{doing}: got layout {layout!r}, expected {LAYOUT}; write the checkpoint again")
    if layout > LAYOUT:
        raise BadInputError(f"{doing}: got layout {layout}, expected at most {LAYOUT}; update kvtools")

    def fail(field: str, expected: str) -> CorruptFileError:
        got = json.dumps(record.get(field))[:80]
        return CorruptFileError(f"{doing}: field '{field}' is {got}, expected {expected}; write the checkpoint again")

    name, part, parts, dim = (
        record.get("name"),
        record.get("part", 0),
        record.get("parts", 1),
        record.get("dim"),
    )
    key_dtype, value_dtype = record.get("key_dtype"), record.get("value_dtype")
    if not isinstance(name, str) or not name:
        raise fail("name", "the variable's name")
    if not _is_count(parts) or parts < 1:
        raise fail("parts", "a positive number")
    if not _is_count(part) or part >= parts:
        raise fail("part", f"a number below {parts}")
    if not _is_count(dim) or dim < 1:
        raise fail("dim", "a positive number")
    if not isinstance(key_dtype, str) or key_dtype not in KEY_DTYPES:
        raise fail("key_dtype", "int64, int32 or uint64")
    if not isinstance(value_dtype, str) or value_dtype not in VALUE_DTYPES:
        raise fail("value_dtype", "float32, float16, bfloat16 or float64")
    slots = record.get("slots", [])
    if not isinstance(slots, list):
        raise fail("slots", "a list")
    widths: dict[str, int] = {}
    for slot in slots:
        if not isinstance(slot, dict) or not isinstance(slot.get("name"), str):
            raise fail("slots", "a list of objects with a name and a width")
        width = slot.get("width", dim)
        if not _is_count(width) or width < 1 or slot["name"] in widths:
            raise fail("slots", "different names, each with a positive width")
        widths[slot["name"]] = width
    return PartMeta(prefix, name, part, parts, key_dtype, value_dtype, dim, tuple(widths.items()))


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _variable_prefix(meta: PartMeta) -> str:
    """Return what the prefixes of all parts of a variable have in common."""
    if _OBJECT_PREFIX.match(meta.prefix):
        return meta.prefix.removesuffix(f"_part_{meta.part}")
    if meta.prefix == meta.name:
        return meta.prefix
    return meta.prefix.removesuffix(f"/part_{meta.part}")


def _table_names(groups: dict[str, list[PartMeta]]) -> dict[str, str]:
    """Name each table by its variable, or by its path in the object graph where two share a name."""
    names = {}
    for base, metas in groups.items():
        names[base] = metas[0].name if _OBJECT_PREFIX.match(base) else base
    counts = Counter(names.values())
    for base, name in names.items():
        found = _OBJECT_PREFIX.match(base)
        if found and counts[name] > 1:
            names[base] = found["path"] or base
    return names


def _open_table(bundle: Bundle, name: str, metas: list[PartMeta]) -> tuple[BundleTable, set[str]]:
    first = metas[0]
    doing = f"opening table '{name}' of '{bundle.prefix}'"
    numbers = [meta.part for meta in metas]
    if numbers != list(range(len(numbers))) or len(numbers) != first.parts:
        there = set(numbers)
        missing = next((part for part in range(first.parts) if part not in there), None)
        fault = f"part {missing} is missing" if missing is not None else "one is there twice"
        raise BadInputError(
            f"{doing}: got parts {numbers[:20]} of {first.parts}, {fault}; the checkpoint was written in"
            " part, write it again"
        )
    for meta in metas[1:]:
        for field in ("parts", "key_dtype", "value_dtype", "dim", "slots"):
            if getattr(meta, field) != getattr(first, field):
                raise CorruptFileError(
                    f"{doing}: part {meta.part} has {field} {getattr(meta, field)}, part 0 has"
                    f" {getattr(first, field)}; the parts are of different checkpoints, write it again"
                )
    parts: list[BundlePart] = []
    slot_schemas: list[tuple[SlotSchema, ...]] = []
    used: set[str] = set()
    for meta in metas:
        part, tensors = _open_part(bundle, doing, meta)
        parts.append(part)
        used |= tensors
        slot_schemas.append(tuple(SlotSchema(slot, t.row_shape[0], t.dtype.name) for slot, t in part.slots.items()))
        if slot_schemas[-1] != slot_schemas[0]:
            raise CorruptFileError(
                f"{doing}: part {meta.part} has slots {[s.name for s in slot_schemas[-1]]}, part 0 has"
                f" {[s.name for s in slot_schemas[0]]}; the parts are of different checkpoints, write it"
                " again"
            )
    schema = TableSchema(
        name=name,
        dialect=DIALECT,
        key_dtype=first.key_dtype,
        value_dtype=first.value_dtype,
        dim=first.dim,
        rows=sum(part.rows for part in parts),
        parts=first.parts,
        slots=slot_schemas[0],
        has_freqs=all(part.freqs is not None for part in parts),
        has_versions=all(part.versions is not None for part in parts),
        bytes=sum(bundle.nbytes(tensor) for tensor in used),
    )
    return BundleTable(schema, parts), used


def _open_part(bundle: Bundle, doing: str, meta: PartMeta) -> tuple[BundlePart, set[str]]:
    used = {meta.prefix + _META}

    def column(suffix: str, dtypes: frozenset[str], width: int | None, rows: int | None) -> BundleTensor:
        tensor = bundle.tensor(meta.prefix + suffix)
        row_shape = () if width is None else (width,)
        if tensor.dtype.name not in dtypes:
            raise CorruptFileError(
                f"{doing}: tensor '{tensor.name}' is of type {tensor.dtype.name}, expected"
                f" {' or '.join(sorted(dtypes))}; write the checkpoint again"
            )
        if not tensor.shape or tensor.row_shape != row_shape or (rows is not None and tensor.rows != rows):
            expected = ["rows" if rows is None else rows, *row_shape]
            raise CorruptFileError(
                f"{doing}: tensor '{tensor.name}' has shape {list(tensor.shape)}, expected {expected} as"
                " its keys and kvmeta say; the checkpoint was written in part, write it again"
            )
        used.add(tensor.name)
        return tensor

    def optional(suffix: str, rows: int) -> BundleTensor | None:
        return column(suffix, _COUNTERS, None, rows) if meta.prefix + suffix in bundle else None

    keys = column("-keys", frozenset({meta.key_dtype}), None, None)
    values = column("-values", frozenset({meta.value_dtype}), meta.dim, keys.rows)
    slots = {slot: column(_SLOT + slot, VALUE_DTYPES, width, keys.rows) for slot, width in meta.slots}
    # A slot that kvmeta does not name is shown and carried along all the same.
    for name, entry in bundle.entries.items():
        if name.startswith(meta.prefix + _SLOT) and name not in used and len(entry.shape) == 2:
            slot = name.removeprefix(meta.prefix + _SLOT)
            slots[slot] = column(_SLOT + slot, VALUE_DTYPES, entry.shape[1], keys.rows)
    if meta.prefix + "-init" in bundle:
        used.add(meta.prefix + "-init")
    part = BundlePart(keys.rows, keys, values, slots, optional("-freqs", keys.rows), optional("-versions", keys.rows))
    return part, used
