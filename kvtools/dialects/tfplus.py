"""TFPlus: KvVariables as tensors `<variable>:0-keys`, `<variable>:0-values`, ..., each optimizer slot a variable of its
own.

The layout is specified in `docs/dialects/tfplus.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtools.dialects.bundle import Bundle, BundleTensor, BundleWriter
from kvtools.dialects.bundle.dtypes import dtype_name
from kvtools.dialects.bundle_column import bundle_column
from kvtools.dialects.bundle_output import BundleCheckpointWriter, BundleTableWriter, plain_columns
from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.column import Column
from kvtools.dialects.column_table import KeyedColumn, KeyedSlotsTable, Part
from kvtools.dialects.derived_column import ConcatenatedColumn, MappedColumn
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.interface import Checkpoint, Finding
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.part_names import Shape, TableNames, check_alike, open_tables, variable_name
from kvtools.dialects.schema import (
    INITIAL_VALUES,
    ExtraSchema,
    SlotSchema,
    TableSchema,
    are_initial_values,
    initial_values_of,
    numpy_dtype,
    part_of_initial_values,
)
from kvtools.dialects.tensorflow import bundle_checkpoint, located
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.key_join import match_rows
from kvtools.partition import owners

NAME = "tfplus"
KEY_DTYPES = ("int64", "int32", "uint64")
VALUE_DTYPES = ("float32", "float16", "bfloat16", "float64")

_KEYS = ":0-keys"
_FULL = "need_full_import"
_FREQ_DTYPES = ("uint16", "uint32")
_SUFFIXES = (
    "keys",
    "values",
    "init_table",
    "blacklist",
    "freq_keys",
    "freq_values",
    _FULL,
    "delete_keys",
)
_INITIAL_BYTES = 16 << 20
"""A slot's initial rows are looked at to tell whether they are one number, unless they are larger than this."""


def sniff(source: Source) -> bool:
    """Tell whether a source is a bundle with a KvVariable of TFPlus."""
    bundle = source.bundle
    return bundle is not None and any(
        name.endswith(_KEYS) and f"{name.removesuffix(_KEYS)}:0-values" in bundle for name in bundle.entries
    )


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the tables and variables of a bundle that TFPlus wrote.

    Raises:
        BadInputError: a part is missing.
        CorruptFileError: columns that do not fit together.
    """
    location, bundle = located(source)
    shapes = {}
    for tensor, entry in bundle.entries.items():
        values = bundle.entries.get(f"{tensor.removesuffix(_KEYS)}:0-values")
        if tensor.endswith(_KEYS) and values is not None:
            rows = entry.shape[0] if entry.shape else 0
            width = values.shape[1] if len(values.shape) == 2 else 0
            shapes[tensor.removesuffix(_KEYS)] = Shape(rows, width, dtype_name(entry.dtype))
    open_table = functools.partial(_open_table, bundle, options)
    opened = open_tables(bundle.prefix, shapes, options, open_table, functools.partial(_tensors_of, bundle))
    return bundle_checkpoint(NAME, location, bundle, opened.tables, opened.tensors, opened.broken)


@dataclass(frozen=True)
class _Variable:
    """The tensors of one variable, a part of a table or of a slot; None for those that were not saved."""

    keys: BundleTensor
    values: BundleTensor
    freq_keys: BundleTensor | None
    freq_values: BundleTensor | None
    initial: BundleTensor | None
    blacklist: BundleTensor | None
    delete_keys: BundleTensor | None
    increment: bool
    tensors: frozenset[str]


def _tensors_of(bundle: Bundle, variable: str) -> frozenset[str]:
    names = (f"{variable}:0-{suffix}" for suffix in _SUFFIXES)
    return frozenset(name for name in names if name in bundle)


def _open_variable(bundle: Bundle, doing: str, variable: str) -> _Variable:
    def name(suffix: str) -> str:
        return f"{variable}:0-{suffix}"

    def optional(suffix: str, dtypes: Sequence[str], row_shape: tuple[int, ...] = ()) -> BundleTensor | None:
        return bundle_column(bundle, doing, name(suffix), dtypes, row_shape) if name(suffix) in bundle else None

    keys = bundle_column(bundle, doing, name("keys"), KEY_DTYPES)
    values = bundle_column(bundle, doing, name("values"), VALUE_DTYPES, (None,), keys.rows)
    of_keys = (keys.dtype.name,)
    freq_keys, freq_values = optional("freq_keys", of_keys), optional("freq_values", _FREQ_DTYPES)
    if (freq_keys is None) != (freq_values is None) or (
        freq_keys and freq_values and freq_keys.rows != freq_values.rows
    ):
        sizes = [None if column is None else column.rows for column in (freq_keys, freq_values)]
        raise CorruptFileError(
            f"{doing}: '{name('freq_keys')}' and '{name('freq_values')}' have {sizes[0]} and {sizes[1]} rows, expected"
            " as many of one as of the other; write the checkpoint again"
        )
    full = bundle_column(bundle, doing, name(_FULL), ("bool",), (), 1) if name(_FULL) in bundle else None
    return _Variable(
        keys=keys,
        values=values,
        freq_keys=freq_keys,
        freq_values=freq_values,
        initial=optional("init_table", VALUE_DTYPES, values.row_shape),
        blacklist=optional("blacklist", of_keys),
        delete_keys=optional("delete_keys", of_keys),
        increment=full is not None and not bool(full.read()[0]),
        tensors=_tensors_of(bundle, variable),
    )


def _open_table(bundle: Bundle, options: OpenOptions, names: TableNames) -> tuple[TfplusTable, set[str]]:
    doing = f"opening table '{names.name}' of '{bundle.prefix}'"
    by_part = [
        {slot: _open_variable(bundle, doing, variable) for slot, variable in variables.items()}
        for variables in names.in_order(doing)
    ]
    own = [variables[""] for variables in by_part]
    for slot in ["", *names.slots]:
        check_alike(doing, slot, by_part)
    first = own[0]
    keyed: dict[str, KeyedColumn] = {}
    slots = []
    for slot in names.slots:
        of_slot = [variables[slot] for variables in by_part]
        keyed[f"slot:{slot}"] = KeyedColumn([v.keys for v in of_slot], [v.values for v in of_slot], severity="warning")
        slots.append(SlotSchema(slot, of_slot[0].values.row_shape[0], of_slot[0].values.dtype.name))
    freq_dtype, version_dtype = _add_frequencies(keyed, own)
    extras = _extras(own)
    metadata: dict[str, Any] = {}
    if names.partitioned and len(own) == 1:
        metadata["partitioned"] = True
    if len({variable.increment for variable in own}) > 1:
        raise CorruptFileError(
            f"{doing}: some parts are of an increment, some of a full checkpoint; do not mix the files of two"
        )
    if first.increment:
        metadata["increment"] = True
    records = _slot_records(names.slots, by_part)
    if records:
        metadata["slots"] = records
    used = {tensor for variables in by_part for variable in variables.values() for tensor in variable.tensors}
    schema = TableSchema(
        name=names.name,
        dialect=NAME,
        key_dtype=first.keys.dtype.name,
        value_dtype=first.values.dtype.name,
        dim=first.values.row_shape[0],
        part_rows=tuple(variable.keys.rows for variable in own),
        slots=tuple(slots),
        freq_dtype=freq_dtype,
        version_dtype=version_dtype,
        version_unit="days" if version_dtype else "unknown",
        partition="floor_mod",
        extras=tuple(
            ExtraSchema(extra, column.dtype.name, (column.rows, *column.row_shape)) for extra, column in extras.items()
        ),
        metadata=metadata,
        notes=_notes(names, own, metadata),
        bytes=sum(bundle.nbytes(tensor) for tensor in used),
    )
    parts = [Part(variable.keys.rows, variable.keys, variable.values) for variable in own]
    return TfplusTable(schema, parts, keyed, memory=options.memory, extras=extras), used


def _add_frequencies(keyed: dict[str, KeyedColumn], own: Sequence[_Variable]) -> tuple[str | None, str | None]:
    """Join frequencies, and the days in their upper halves; return the types of both columns."""
    saved = [(variable.freq_keys, variable.freq_values) for variable in own]
    pairs = [(keys, values) for keys, values in saved if keys is not None and values is not None]
    if len(pairs) < len(own) or (not any(keys.rows for keys, _ in pairs) and any(v.keys.rows for v in own)):
        return None, None  # saved for inference: the tensors are not there, or empty
    keys: list[Column] = [keys for keys, _ in pairs]
    counts = [values for _, values in pairs]
    if all(values.dtype == np.uint16 for values in counts):
        keyed["freqs"] = KeyedColumn(keys, counts, severity="info")
        return "uint16", None
    uint16 = np.dtype(np.uint16)
    keyed["freqs"] = KeyedColumn(keys, [MappedColumn(v, uint16, _low_half) for v in counts], severity="info")
    keyed["versions"] = KeyedColumn(keys, [MappedColumn(v, uint16, _high_half) for v in counts], severity="info")
    return "uint16", "uint16"


def _low_half(counts: Array) -> Array:
    return counts.astype(np.uint16)  # the upper bits are cut off


def _high_half(counts: Array) -> Array:
    return (counts.astype(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _extras(own: Sequence[_Variable]) -> dict[str, Column]:
    extras: dict[str, Column] = {}
    first = own[0].initial
    if first is not None and first.rows:
        extras[INITIAL_VALUES] = first
    # Each part draws its own initial rows from the same initializer.
    for part, initial in enumerate(variable.initial for variable in own):
        if not part or initial is None or (first is not None and _alike(first, initial)):
            continue
        if initial.rows or INITIAL_VALUES in extras:
            extras[initial_values_of(part)] = initial
    for name, columns in (
        ("blacklist", [variable.blacklist for variable in own]),
        ("deleted_keys", [variable.delete_keys for variable in own]),
    ):
        there = [column for column in columns if column is not None and column.rows]
        if there:
            extras[name] = there[0] if len(there) == 1 else ConcatenatedColumn(there)
    return extras


def _alike(a: BundleTensor, b: BundleTensor) -> bool:
    """Tell whether two tensors have the same bytes, as the checksums in the index say."""
    runs = [[(run.start, run.stop, run.crc32c) for run in tensor.segments] for tensor in (a, b)]
    return a.shape == b.shape and a.dtype == b.dtype and runs[0] == runs[1]


def _slot_records(slots: Sequence[str], by_part: Sequence[Mapping[str, _Variable]]) -> dict[str, Any]:
    """Return what the rows of each slot begin as, as `docs/checkpoint-layout.md` says it: "constant" where that is one
    number, else "rows", which is only said, not held: `kvtools.fit` names it as left out."""
    records: dict[str, Any] = {}
    for slot in slots:
        initial = [variables[slot].initial for variables in by_part]
        tables = [table for table in initial if table is not None and table.rows]
        if tables:
            number = _one_number(tables)
            begins = {"init": "rows"} if number is None else {"init": "constant", "constant": number}
            records[slot] = {"name": slot, **begins}
    return records


def _one_number(tables: Sequence[BundleTensor]) -> float | None:
    """Return the number that tables of initial rows consist of; None if it is not one, or they are large."""
    first, *others = tables
    numbers = set()
    for table in [first, *(other for other in others if not _alike(first, other))]:
        if table.rows * table.row_bytes > _INITIAL_BYTES:
            return None
        values = table.read().reshape(-1)
        if not (values == values[0]).all():
            return None
        numbers.add(float(values[0]))
    return numbers.pop() if len(numbers) == 1 else None


def _notes(names: TableNames, own: Sequence[_Variable], metadata: Mapping[str, Any]) -> tuple[str, ...]:
    notes = []
    if names.slots and not names.partitioned:
        notes.append(f"{', '.join(names.slots)}: taken for slots by their names, {names.name}/<slot>")
    if len(own) > 1 and own[0].initial is not None and own[0].initial.rows:
        notes.append("every part has initial values of its own, from the same initializer")
    if metadata.get("increment"):
        notes.append("an increment: only the rows that changed since the checkpoint before")
    return tuple(notes)


class TfplusTable(KeyedSlotsTable):
    """A table of TFPlus, its slots and frequencies joined by key."""

    def check(self) -> Iterator[Finding]:
        """Yield slots that lack rows, and keys that are in the table although a list says that they are not."""
        yield from super().check()
        for name, what in (("blacklist", "on the blacklist"), ("deleted_keys", "among the deleted keys")):
            column = self._extras.get(name)
            if column is None:
                continue
            rows = match_rows(column.chunks(1 << 18), self._own_keys(), (column.rows, self.rows), memory=self._memory)
            both = np.flatnonzero(rows >= 0)
            if len(both):
                few = ", ".join(map(str, column.take(both[:5]).tolist())) + ", ..." * (len(both) > 5)
                yield Finding(
                    "error",
                    name.replace("_", "-"),
                    self.schema.name,
                    f"{len(both)} keys have a row and are {what} too ({few}); TFPlus removes them when it restores",
                )


class TfplusTableWriter(BundleTableWriter):
    """One table of TFPlus being written: keys that stand in several lists go to several tensors."""

    def __init__(self, bundle: BundleWriter, schema: TableSchema) -> None:
        # TFPlus saves days together with a mark for increments and the keys that were deleted, or none of the three.
        self._delta = (
            schema.has_versions
            or bool(schema.metadata.get("increment"))
            or "deleted_keys" in {extra.name for extra in schema.extras}
        )
        super().__init__(bundle, functools.partial(_encode, dtype="uint32" if self._delta else "uint16"))
        self._schema = schema
        self._lists = {"blacklist": "blacklist", "deleted_keys": "delete_keys"}
        extras = {extra.name for extra in schema.extras}
        for part, rows in enumerate(schema.part_rows):
            self._variable(part, variable_name(schema, part), "values", schema.dim, schema.value_dtype, rows)
            for slot in schema.slots:
                name = variable_name(schema, part, slot.name)
                self._variable(part, name, f"slot:{slot.name}", slot.width, slot.dtype, rows)
                self._slot_initial(name, slot)
            name = variable_name(schema, part)
            if INITIAL_VALUES not in extras and initial_values_of(part) not in extras:
                self._empty(name, "init_table", schema.value_dtype, schema.dim)
            for extra, suffix in self._lists.items():
                if extra not in extras and (extra != "deleted_keys" or self._delta):
                    self._empty(name, suffix, schema.key_dtype)

    def _variable(self, part: int, name: str, values: str, width: int, dtype: str, rows: int) -> None:
        schema = self._schema
        keys = numpy_dtype(schema.key_dtype)
        self.column(part, "keys", f"{name}:0-keys", keys, (rows,))
        self.column(part, values, f"{name}:0-values", numpy_dtype(dtype), (rows, width))
        counts = np.dtype(np.uint32 if self._delta else np.uint16)
        if schema.has_freqs or schema.has_versions:
            self.column(part, "keys", f"{name}:0-freq_keys", keys, (rows,))
            self.column(part, "counts", f"{name}:0-freq_values", counts, (rows,))
        else:
            self._empty(name, "freq_keys", schema.key_dtype)
            self._empty(name, "freq_values", counts.name)
        if self._delta:
            full = not schema.metadata.get("increment")
            self.bundle.array(f"{name}:0-{_FULL}", np.array([full]))

    def _slot_initial(self, name: str, slot: SlotSchema) -> None:
        record = self._schema.metadata.get("slots", {}).get(slot.name, {})
        if record.get("init") == "constant":
            row = np.full((1, slot.width), record.get("constant", 0.0)).astype(numpy_dtype(slot.dtype))
            self.bundle.array(f"{name}:0-init_table", row)
        else:
            self._empty(name, "init_table", slot.dtype, slot.width)
        self._empty(name, "blacklist", self._schema.key_dtype)
        if self._delta:
            self._empty(name, "delete_keys", self._schema.key_dtype)

    def _empty(self, name: str, suffix: str, dtype: str, *row_shape: int) -> None:
        self.bundle.array(f"{name}:0-{suffix}", np.empty((0, *row_shape), numpy_dtype(dtype)))

    def extra(self, name: str, array: Array) -> None:
        """Write an extra array: initial values to every part, a list of keys to the parts that own them."""
        schema = self._schema
        doing = f"writing table '{schema.name}' as {NAME}"
        if are_initial_values(name):
            if array.shape[1:] != (schema.dim,):
                raise BadInputError(
                    f"{doing}: its initial values are rows of {list(array.shape[1:])}, expected [{schema.dim}]"
                )
            array = array.astype(numpy_dtype(schema.value_dtype), copy=False)
            only = part_of_initial_values(name)
            there = {extra.name for extra in schema.extras}
            for part in range(schema.parts) if only is None else [only]:
                if only is not None or initial_values_of(part) not in there:
                    self.bundle.array(f"{variable_name(schema, part)}:0-init_table", array)
            return
        keys = array.astype(schema.key_dtype)
        if not np.array_equal(keys, array):
            raise BadInputError(f"{doing}: its {name.replace('_', ' ')} do not fit {schema.key_dtype}")
        owner = owners(keys, schema.parts, "floor_mod")
        for part in range(schema.parts):
            tensor = f"{variable_name(schema, part)}:0-{self._lists[name]}"
            self.bundle.array(tensor, keys[owner == part])


def _encode(chunk: Chunk, dtype: str) -> Mapping[str, Array]:
    columns = dict(plain_columns(chunk))
    freqs, versions = columns.pop("freqs", None), columns.pop("versions", None)
    if versions is not None:
        # A row without a frequency counts as seen once, as a row that TFPlus makes does.
        low = np.ones(len(chunk), np.uint32) if freqs is None else freqs.astype(np.uint32)
        columns["counts"] = versions.astype(np.uint32) << np.uint32(16) | low
    elif freqs is not None:
        columns["counts"] = freqs.astype(dtype, copy=False)
    return columns


class Writer(BundleCheckpointWriter):
    """Writes what TFPlus restores: six tensors a variable, eight where rows have days or it is an increment."""

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> TfplusTableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        return TfplusTableWriter(self.bundle, schema)


DIALECT = Dialect(
    name=NAME,
    title="a checkpoint of TFPlus: TensorFlow bundle, KvVariables",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="prefix",
    holds=Holds(
        key_dtypes=KEY_DTYPES,
        value_dtypes=VALUE_DTYPES,
        freq_dtypes=("uint16",),
        version_dtypes=("uint16",),
        version_units=("days",),
        partition="floor_mod",
        extras=frozenset({INITIAL_VALUES, initial_values_of("<part>"), "blacklist", "deleted_keys"}),
        metadata=frozenset({"slots", "partitioned", "increment"}),
        slot_inits=frozenset({"constant"}),
        variables=True,
    ),
)
