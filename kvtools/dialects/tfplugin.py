"""Our own checkpoint layout: per part of a variable `X-keys`, `X-values`, ..., and `X-kvmeta`, a JSON
description.

The layout is specified in `docs/checkpoint-layout.md`; this file reads and writes version 1 of it.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from kvtools.chain import member_of
from kvtools.dialects.bundle import Bundle, BundleTensor, BundleWriter
from kvtools.dialects.bundle_column import bundle_column
from kvtools.dialects.bundle_output import BundleCheckpointWriter, BundleTableWriter
from kvtools.dialects.chunk import Array
from kvtools.dialects.column import Column
from kvtools.dialects.column_table import ColumnTable, Part
from kvtools.dialects.derived_column import ConcatenatedColumn
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.object_graph import OBJECT_GRAPH, extend_object_graph
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import (
    ADMISSION_FILTER,
    ROW_EXTRAS,
    ExtraSchema,
    SlotSchema,
    TableSchema,
    VariableSchema,
    VersionUnit,
    numpy_dtype,
)
from kvtools.dialects.tensorflow import bundle_checkpoint, located
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError
from kvtools.partition import owners

NAME = "tfplugin"
LAYOUT = 1
_SAVER = "tfplugin.KvVariable"
"""The name under which tfplugin registers what saves and restores its variables in a `tf.train.Checkpoint`."""

KEY_DTYPES = ("int64", "int32", "uint64")
SLOT_DTYPES = ("float32", "float16", "bfloat16", "float64")
VALUE_DTYPES = (*SLOT_DTYPES, "int8", "int32", "int64", "bool")

PART_RECORDS = "part_records"
"""In the metadata of a table that is written as training would write it: the `kvmeta` of each part. All that they say
stays, and so does what is a part's own (scores, filters of admission)."""
RECORD_TENSOR = "_KVTOOLS_CHAIN"
"""The tensor that has the record of a member of a chain; see `kvtools.chain`."""

_META = "-kvmeta"
_SLOT = "-slot-"
_RANKS = {"eviction_scores_": "-scores", "eviction_orders_": "-orders"}
_REMOVED = "-removed"
_PENDING = {"filtered_keys": "-pending_keys", "filtered_freqs": "-pending_counts"}
_FILTER = "-pending_filter"
_OF_PART = {**_RANKS, ADMISSION_FILTER: _FILTER}
"""What the names of extras begin with that are of one part, which follows, and stay with it."""
_COUNTERS = ("uint32",)
_PART_FIELDS = frozenset({"layout", "name", "part", "parts", "key_dtype", "value_dtype", "dim", "slots"})
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
    delta: bool
    record: dict[str, Any] = field(compare=False)


def sniff(source: Source) -> bool:
    """Tell whether a source is a bundle with a table in this layout."""
    return source.bundle is not None and any(name.endswith(_META) for name in source.bundle.entries)


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the tables and variables of a bundle in this layout.

    Raises:
        BadInputError: a layout version above 1, a part that is missing, or an increment (`OpenOptions.increments`).
        CorruptFileError: a malformed `kvmeta`, or columns that do not fit together.
    """
    location, bundle = located(source)
    groups: dict[str, list[PartMeta]] = {}
    tables: dict[str, TableReader] = {}
    broken: dict[str, KvtoolsError] = {}
    used: set[str] = set()
    slot_tensors = _slot_tensors(bundle)
    for tensor in bundle.entries:
        if tensor.endswith(_META):
            try:
                meta = _read_meta(bundle, tensor.removesuffix(_META))
                groups.setdefault(_variable_prefix(meta), []).append(meta)
            except KvtoolsError as error:
                if not options.lenient:
                    raise
                broken[tensor.removesuffix(_META)] = error
                used |= _tensors_of(bundle, tensor.removesuffix(_META), slot_tensors)
    if not options.increments and any(meta.delta for metas in groups.values() for meta in metas):
        folder = bundle.prefix.parent
        advice = f"name the chain's folder, '{folder}', or fold it first: kvtools merge '{folder}' OUT"
        if member_of(bundle.prefix) is None:  # nobody finds it in its folder
            advice = f"put it into the checkpoint that it belongs to: kvtools apply BASE '{bundle.prefix}' OUT"
        raise BadInputError(
            f"opening '{bundle.prefix}': it is an increment of a chain, which has only the rows that changed; {advice}"
        )
    used |= {RECORD_TENSOR} & bundle.entries.keys()  # of this file in this chain: nothing that is written has it
    names = _table_names(groups)
    for base, metas in groups.items():
        try:
            in_order = sorted(metas, key=lambda meta: meta.part)
            table, tensors = _open_table(bundle, names[base], in_order, slot_tensors)
        except KvtoolsError as error:
            if not options.lenient:
                raise
            broken[names[base]] = error
            for meta in metas:
                used |= _tensors_of(bundle, meta.prefix, slot_tensors)
            continue
        tables[table.schema.name] = table
        used |= tensors
    return bundle_checkpoint(NAME, location, bundle, tables, used, broken)


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
        raise fail("value_dtype", f"one of {', '.join(VALUE_DTYPES)}")
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
    delta = record.get("delta", False)
    if not isinstance(delta, bool):
        raise fail("delta", "true or false")
    return PartMeta(prefix, name, part, parts, key_dtype, value_dtype, dim, tuple(widths.items()), delta, record)


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


def _slot_tensors(bundle: Bundle) -> dict[str, list[str]]:
    """Return the tensors that may be slots, by the prefix of the part that they would be of."""
    found: dict[str, list[str]] = {}
    for name, entry in bundle.entries.items():
        if len(entry.shape) == 2:
            for match in re.finditer(_SLOT, name):  # a slot's name, or a part's, may have it too
                found.setdefault(name[: match.start()], []).append(name)
    return found


def _tensors_of(bundle: Bundle, prefix: str, slot_tensors: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the tensors that there are of a part, be it one that cannot be opened."""
    suffixes = (
        "-keys",
        "-values",
        "-freqs",
        "-versions",
        "-init",
        *_RANKS.values(),
        _REMOVED,
        *_PENDING.values(),
        _FILTER,
    )
    names = {prefix + suffix for suffix in (_META, *suffixes)}
    return {name for name in names if name in bundle} | set(slot_tensors.get(prefix, ()))


def _open_table(
    bundle: Bundle, name: str, metas: list[PartMeta], slot_tensors: Mapping[str, Sequence[str]]
) -> tuple[KvTable, set[str]]:
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
        for name_of in ("parts", "key_dtype", "value_dtype", "dim", "slots", "delta"):
            if getattr(meta, name_of) != getattr(first, name_of):
                raise CorruptFileError(
                    f"{doing}: part {meta.part} has {name_of} {getattr(meta, name_of)}, part 0 has"
                    f" {getattr(first, name_of)}; the parts are of different checkpoints, write it again"
                )
    parts: list[Part] = []
    slot_schemas: list[tuple[SlotSchema, ...]] = []
    used: set[str] = set()
    for meta in metas:
        part, tensors = _open_part(bundle, doing, meta, slot_tensors.get(meta.prefix, ()))
        parts.append(part)
        used |= tensors
        slot_schemas.append(tuple(SlotSchema(slot, t.row_shape[0], t.dtype.name) for slot, t in part.slots.items()))
        if slot_schemas[-1] != slot_schemas[0]:
            raise CorruptFileError(
                f"{doing}: part {meta.part} has slots {[s.name for s in slot_schemas[-1]]}, part 0 has"
                f" {[s.name for s in slot_schemas[0]]}; the parts are of different checkpoints, write it"
                " again"
            )
    # A restore gives all parts the initial values of the largest.
    initial = f"{max(zip(metas, parts, strict=True), key=lambda pair: pair[1].rows)[0].prefix}-init"
    extras: dict[str, Column] = {"initial_values": bundle.tensor(initial)} if initial in bundle else {}
    for meta, part in zip(metas, parts, strict=True):
        for extra, suffix in _RANKS.items():
            if meta.prefix + suffix in bundle:
                extras[f"{extra}{meta.part}"] = _ranks(bundle, doing, meta, suffix, part.rows)
                used.add(meta.prefix + suffix)
        if meta.prefix + _FILTER in bundle:
            extras[f"{ADMISSION_FILTER}{meta.part}"] = bundle_column(bundle, doing, meta.prefix + _FILTER, ("uint8",))
            used.add(meta.prefix + _FILTER)
    lists = {"deleted_keys": (_REMOVED, first.key_dtype)} if first.delta else {}
    lists |= {"filtered_keys": (_PENDING["filtered_keys"], first.key_dtype)}
    lists |= {"filtered_freqs": (_PENDING["filtered_freqs"], "uint32")}
    for extra, (suffix, dtype) in lists.items():
        of_list = [meta.prefix + suffix for meta in metas if meta.prefix + suffix in bundle]
        if of_list or extra == "deleted_keys":
            of_parts = [bundle_column(bundle, doing, meta.prefix + suffix, (dtype,)) for meta in metas]
            extras[extra] = of_parts[0] if len(of_parts) == 1 else ConcatenatedColumn(of_parts)
            used.update(of_list)
    pending = [extras[name].rows for name in _PENDING if name in extras]
    if pending and pending != [pending[0]] * 2:
        raise CorruptFileError(
            f"{doing}: it has {pending} keys and counts that wait for admission, expected as many of one as of the"
            " other; the checkpoint was written in part, write it again"
        )
    metadata = {key: first.record[key] for key in first.record.keys() - _PART_FIELDS}
    drawn = [meta.record["draws"] for meta in metas if _is_count(meta.record.get("draws"))]
    if drawn:
        metadata["draws"] = max(drawn)  # as a restore into another number of parts takes them
    if isinstance(policies := metadata.get("policies"), dict):
        metadata["policies"] = {**policies, **_latest(metas)}
    if metadata.pop("delta", False):
        metadata["increment"] = True
    metadata["slots"] = {slot["name"]: slot for slot in first.record.get("slots", [])}
    found = _OBJECT_PREFIX.match(first.prefix)
    if found:
        metadata["object_path"] = found["path"] or ""
    schema = TableSchema(
        name=name,
        dialect=NAME,
        key_dtype=first.key_dtype,
        value_dtype=first.value_dtype,
        dim=first.dim,
        part_rows=tuple(part.rows for part in parts),
        slots=slot_schemas[0],
        freq_dtype="uint32" if all(part.freqs is not None for part in parts) else None,
        version_dtype="uint32" if all(part.versions is not None for part in parts) else None,
        version_unit=_version_unit(first.record),
        partition="floor_mod",
        extras=tuple(ExtraSchema(extra, t.dtype.name, (t.rows, *t.row_shape)) for extra, t in extras.items()),
        metadata=metadata,
        notes=("an increment: only the rows that changed since the member before",) if first.delta else (),
        bytes=sum(bundle.nbytes(tensor) for tensor in used),
    )
    table = KvTable(schema, parts, extras=extras)
    table.records = tuple(meta.record for meta in metas)
    return table, used


class KvTable(ColumnTable):
    """A table in this layout; `records` is what the `kvmeta` of each part says."""

    records: tuple[Mapping[str, Any], ...] = ()


def part_records(table: TableReader) -> list[Mapping[str, Any]]:
    """Return the `kvmeta` of each part of a table in this layout; none of any other table."""
    return list(table.records) if isinstance(table, KvTable) else []


def _latest(metas: Sequence[PartMeta]) -> dict[str, int]:
    """Return the largest step and epoch that parts record, as a restore into another number of parts takes them."""
    policies = [told for meta in metas if isinstance(told := meta.record.get("policies"), dict)]
    numbers = {name: [told[name] for told in policies if _is_count(told.get(name))] for name in ("step", "epoch")}
    return {name: max(found) for name, found in numbers.items() if found}


def _version_unit(record: Mapping[str, Any]) -> VersionUnit:
    """Return what a variable's versions count: a table that expires rows by steps says so."""
    policies = record.get("policies")
    of_policies = policies.get("versions") if isinstance(policies, dict) else None
    return "steps" if "steps" in (of_policies, record.get("versions")) else "seconds"


def _ranks(bundle: Bundle, doing: str, meta: PartMeta, suffix: str, rows: int) -> BundleTensor:
    """Return the scores of a part that has a capacity, or the orders of equal ones: a variable that restores it goes by
    them, nothing else does."""
    tensor = bundle.tensor(meta.prefix + suffix)
    if tensor.dtype.name != "uint64" or tensor.shape != (rows,):
        raise CorruptFileError(
            f"{doing}: tensor '{tensor.name}' is {tensor.dtype.name} {list(tensor.shape)}, expected uint64 [{rows}],"
            " one for each key; the checkpoint was written in part, write it again"
        )
    return tensor


def _open_part(bundle: Bundle, doing: str, meta: PartMeta, slot_tensors: Sequence[str]) -> tuple[Part, set[str]]:
    used = {meta.prefix + _META}

    def column(suffix: str, dtypes: tuple[str, ...], width: int | None, rows: int | None) -> BundleTensor:
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

    keys = column("-keys", (meta.key_dtype,), None, None)
    values = column("-values", (meta.value_dtype,), meta.dim, keys.rows)
    slot_dtypes = tuple({*SLOT_DTYPES, meta.value_dtype})
    slots = {slot: column(_SLOT + slot, slot_dtypes, width, keys.rows) for slot, width in meta.slots}
    # A slot that kvmeta does not name is shown and carried along all the same.
    for name in slot_tensors:
        slot = name.removeprefix(meta.prefix + _SLOT)
        if slot not in slots:
            slots[slot] = column(_SLOT + slot, slot_dtypes, bundle.entries[name].shape[1], keys.rows)
    if meta.prefix + "-init" in bundle:
        used.add(meta.prefix + "-init")
    part = Part(keys.rows, keys, values, slots, optional("-freqs", keys.rows), optional("-versions", keys.rows))
    return part, used


class Writer(BundleCheckpointWriter):
    """Writes the layout, name-based, or object-based where a table comes with an "object_path".

    TensorFlow restores what the object graph names, and nothing else: a table with a path is in the graph, whether the
    one that is carried along has it or not.
    """

    def __init__(self, staging: str, options: WriteOptions) -> None:
        super().__init__(staging, options)
        self._savers: dict[str, str] = {}
        self._variables: list[str] = []
        self._graph: bytes | None = None

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> BundleTableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        table = _TableWriter(self.bundle, schema)
        if "object_path" in schema.metadata:
            self._savers[schema.metadata["object_path"]] = _SAVER
        key_dtype, value_dtype = numpy_dtype(schema.key_dtype), numpy_dtype(schema.value_dtype)
        for part, rows in enumerate(schema.part_rows):
            prefix = part_prefix(schema, part)
            self.bundle.string(prefix + _META, _meta_record(schema, part))
            table.column(part, "keys", f"{prefix}-keys", key_dtype, (rows,))
            table.column(part, "values", f"{prefix}-values", value_dtype, (rows, schema.dim))
            if schema.has_freqs:
                table.column(part, "freqs", f"{prefix}-freqs", np.dtype(np.uint32), (rows,))
            if schema.has_versions:
                table.column(part, "versions", f"{prefix}-versions", np.dtype(np.uint32), (rows,))
            for slot in schema.slots:
                tensor = f"{prefix}{_SLOT}{slot.name}"
                table.column(part, f"slot:{slot.name}", tensor, numpy_dtype(slot.dtype), (rows, slot.width))
            table.place_extra("initial_values", f"{prefix}-init")
        return table

    def variable(self, schema: VariableSchema, chunks: Iterable[Array]) -> None:
        """Write a dense variable; keep the object graph until all are known."""
        if schema.name == OBJECT_GRAPH:
            self._graph = b"".join(bytes(text) for array in chunks for text in array.reshape(-1))
            return
        super().variable(schema, chunks)
        if "/.ATTRIBUTES/" in schema.name:
            self._variables.append(schema.name)

    def close(self) -> None:
        """Write the object graph, where there is one or a table needs it, and the index."""
        if self._graph is not None or self._savers:
            graph = extend_object_graph(self._graph or b"", self._variables, savers=self._savers)
            self.bundle.string(OBJECT_GRAPH, graph)
        super().close()


class _TableWriter(BundleTableWriter):
    """One table being written: lists of keys go to the parts that own the keys, what is a part's own to that part."""

    def __init__(self, bundle: BundleWriter, schema: TableSchema) -> None:
        super().__init__(bundle)
        self._schema = schema
        self._pending_keys: Array | None = None
        self._pending_counts: Array | None = None
        names = {extra.name for extra in schema.extras}
        if schema.metadata.get("increment") and "deleted_keys" not in names:
            self._list(_REMOVED, np.empty(0, schema.key_dtype), None)

    def extra(self, name: str, array: Array) -> None:
        """Write an extra array."""
        kind = next((start for start in _OF_PART if name.startswith(start)), None)
        if kind is not None:
            prefix = part_prefix(self._schema, int(name.removeprefix(kind)))
            self.bundle.array(prefix + _OF_PART[kind], array)
        elif name == "deleted_keys":
            self._list(_REMOVED, self._as_keys(name, array), None)
        elif name == "filtered_keys":
            self._pending_keys = self._as_keys(name, array)
        elif name == "filtered_freqs":
            self._pending_counts = np.clip(array.astype(np.int64), 0, 2**32 - 1).astype(np.uint32)
        else:
            super().extra(name, array)

    def close(self) -> None:
        """End the table: keys that wait for admission, and their counts, were both given by now."""
        if self._pending_keys is not None and self._pending_counts is not None:
            self._list(_PENDING["filtered_keys"], self._pending_keys, None)
            self._list(_PENDING["filtered_freqs"], self._pending_keys, self._pending_counts)
        super().close()

    def _as_keys(self, name: str, array: Array) -> Array:
        keys = array.astype(self._schema.key_dtype, copy=False)
        if not np.array_equal(keys, array):
            raise BadInputError(
                f"writing table '{self._schema.name}' as {NAME}: its {name.replace('_', ' ')} do not fit"
                f" {self._schema.key_dtype}; write it with the keys' own type"
            )
        return keys

    def _list(self, suffix: str, keys: Array, numbers: Array | None) -> None:
        schema = self._schema
        owner = owners(keys, schema.parts, "floor_mod")
        written = keys if numbers is None else numbers
        for part in range(schema.parts):
            self.bundle.array(part_prefix(schema, part) + suffix, written[owner == part])


def part_prefix(schema: TableSchema, part: int) -> str:
    """Return what the names of the tensors of a part begin with."""
    path = schema.metadata.get("object_path")
    if path is not None:
        kv = f"{path}/.ATTRIBUTES/kv" if path else ".ATTRIBUTES/kv"
        return kv if schema.parts == 1 else f"{kv}_part_{part}"
    return schema.name if schema.parts == 1 else f"{schema.name}/part_{part}"


def _meta_record(schema: TableSchema, part: int) -> bytes:
    known = schema.metadata.get("slots", {})
    zero = {"init": "constant", "constant": 0.0}
    records = schema.metadata.get(PART_RECORDS, ())
    record: dict[str, Any] = dict(records[part]) if part < len(records) else {}
    record.pop("delta", None)
    record |= {
        "layout": LAYOUT,
        "name": schema.name if not records else record.get("name", schema.name),
        "part": part,
        "parts": schema.parts,
        "key_dtype": schema.key_dtype,
        "value_dtype": schema.value_dtype,
        "dim": schema.dim,
        "slots": [
            {**zero, **known.get(slot.name, {}), "name": slot.name, "width": slot.width} for slot in schema.slots
        ],
    }
    if "initializer" in schema.metadata:
        record["initializer"] = schema.metadata["initializer"]
    elif any(extra.name == "initial_values" for extra in schema.extras):
        record["initializer"] = {"kind": "rows"}  # without it, a restore does not look at them
    if "draws" in schema.metadata and not records:
        record["draws"] = schema.metadata["draws"]
    if "policies" in schema.metadata and not records:
        record["policies"] = schema.metadata["policies"]
    if "shard" in schema.metadata:
        record["shard"] = schema.metadata["shard"]
    if schema.has_versions and schema.version_unit == "steps" and not records:
        record["versions"] = "steps"
    if schema.metadata.get("increment") or any(extra.name == "deleted_keys" for extra in schema.extras):
        record["delta"] = True
    return json.dumps(record).encode()


DIALECT = Dialect(
    name=NAME,
    title="kvtools' own layout, of tfplugin: TensorFlow bundle, name-based or object-based",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="prefix",
    holds=Holds(
        key_dtypes=KEY_DTYPES,
        value_dtypes=VALUE_DTYPES,
        slot_dtype_is_value=True,
        freq_dtypes=("uint32",),
        version_dtypes=("uint32",),
        version_units=("seconds", "steps", "unknown"),
        unknown_versions_are="steps",  # a restore begins the ages of such rows anew; as seconds, they would be of 1970
        partition="floor_mod",
        extras=frozenset(
            {"initial_values", "deleted_keys", *_PENDING, f"{ADMISSION_FILTER}<part>", f"{ROW_EXTRAS[0]}<part>"}
        ),
        metadata=frozenset(
            {"initializer", "slots", "draws", "policies", "object_path", "shard", "increment", PART_RECORDS}
        ),
        variables=True,
    ),
)
