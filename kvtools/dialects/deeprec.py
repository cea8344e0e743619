"""DeepRec: embedding variables as tensors `X-keys`, `X-values`, ... whose rows stand in 1,000 buckets, each optimizer
slot a variable of its own.

The layout is specified in `docs/dialects/deeprec.md`.
"""

from __future__ import annotations

import errno
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvtools.dialects.bundle import Bundle, BundleTensor, BundleWriter, Region, RegionWriter
from kvtools.dialects.bundle.dtypes import dtype_name
from kvtools.dialects.bundle_column import bundle_column
from kvtools.dialects.bundle_output import BundleCheckpointWriter, BundleTableWriter, plain_columns
from kvtools.dialects.chunk import Array, Chunk, Columns
from kvtools.dialects.column import Column
from kvtools.dialects.column_table import KeyedColumn, KeyedSlotsTable, Part
from kvtools.dialects.derived_column import ConcatenatedColumn
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.interface import Checkpoint, Finding
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.part_names import Shape, TableNames, check_alike, open_tables, variable_name
from kvtools.dialects.schema import ExtraSchema, SlotSchema, TableSchema, numpy_dtype
from kvtools.dialects.tensorflow import bundle_checkpoint, located
from kvtools.dialects.writing import ShardWriter, WriteOptions
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.partition import owners

NAME = "deeprec"
KEY_DTYPES = ("int64", "int32")
VALUE_DTYPES = ("float32", "float16", "bfloat16", "float64")
BUCKETS = 1000

_KEY_ROWS = 1 << 18
_FEW = 5
_LARGEST_OFFSET = 2**31 - 1


@dataclass(frozen=True)
class Suffixes:
    """How the tensors of a variable end, in a full checkpoint or in an increment."""

    keys: str
    values: str
    freqs: str
    versions: str
    offsets: str


FULL = Suffixes("-keys", "-values", "-freqs", "-versions", "-partition_offset")
INCREMENT = Suffixes(
    "-sparse_incr_keys",
    "-sparse_incr_values",
    "-sparse_incr_freqs",
    "-sparse_incr_versions",
    "-incr_partition_offset",
)
_FILTER_OFFSETS = "-partition_filter_offset"
_FILTERED = {
    "filtered_keys": "-keys_filtered",
    "filtered_freqs": "-freqs_filtered",
    "filtered_versions": "-versions_filtered",
}


def sniff(source: Source) -> bool:
    """Tell whether a source is a bundle with an embedding variable of DeepRec."""
    return source.bundle is not None and any(_variables(source.bundle, suffixes) for suffixes in (FULL, INCREMENT))


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the tables and variables of a bundle that DeepRec wrote, in full or as an increment.

    Raises:
        BadInputError: a part is missing.
        CorruptFileError: columns that do not fit together.
    """
    location, bundle = located(source)
    suffixes = FULL if _variables(bundle, FULL) else INCREMENT
    shapes = {}
    for variable in _variables(bundle, suffixes):
        keys, values = bundle.entries[variable + suffixes.keys], bundle.entries[variable + suffixes.values]
        width = values.shape[1] if len(values.shape) == 2 else 0
        shapes[variable] = Shape(keys.shape[0] if keys.shape else 0, width, dtype_name(keys.dtype))
    open_table = functools.partial(_open_table, bundle, suffixes, options)
    tensors_of = functools.partial(_tensors_of, bundle, suffixes)
    opened = open_tables(bundle.prefix, shapes, options, open_table, tensors_of)
    return bundle_checkpoint(NAME, location, bundle, opened.tables, opened.tensors, opened.broken)


def _variables(bundle: Bundle, suffixes: Suffixes) -> list[str]:
    """Return the embedding variables of a bundle: those with offsets of buckets, or with versions as they were saved
    before there were buckets."""
    found = []
    for tensor in bundle.entries:
        variable = tensor.removesuffix(suffixes.keys)
        if tensor.endswith(suffixes.keys) and variable + suffixes.values in bundle:
            old = suffixes is FULL and variable + suffixes.versions in bundle and f"{variable}-kvmeta" not in bundle
            if old or variable + suffixes.offsets in bundle:
                found.append(variable)
    return found


@dataclass(frozen=True)
class _Variable:
    """The tensors of one variable, a part of a table or of a slot; None for those that were not saved.

    DeepRec saves frequencies and versions that it does not keep as tensors of no rows: they are None here.
    """

    keys: BundleTensor
    values: BundleTensor
    freqs: BundleTensor | None
    versions: BundleTensor | None
    offsets: BundleTensor | None
    filter_offsets: BundleTensor | None
    filtered: Mapping[str, BundleTensor]
    tensors: frozenset[str]


def _tensors_of(bundle: Bundle, suffixes: Suffixes, variable: str) -> frozenset[str]:
    every = [*vars(suffixes).values(), *([_FILTER_OFFSETS, *_FILTERED.values()] if suffixes is FULL else [])]
    return frozenset(variable + suffix for suffix in every if variable + suffix in bundle)


def _open_variable(bundle: Bundle, doing: str, variable: str, suffixes: Suffixes) -> _Variable:
    keys = bundle_column(bundle, doing, variable + suffixes.keys, KEY_DTYPES)
    values = bundle_column(bundle, doing, variable + suffixes.values, VALUE_DTYPES, (None,), keys.rows)

    def counters(name: str, rows: int) -> BundleTensor | None:
        if name not in bundle:
            return None
        kept = bundle.entries[name].shape != (0,)
        column = bundle_column(bundle, doing, name, ("int64",), (), rows if kept else None)
        return column if kept or rows == 0 else None

    def offsets(name: str) -> BundleTensor | None:
        return bundle_column(bundle, doing, name, ("int32",), (), BUCKETS + 1) if name in bundle else None

    filtered: dict[str, BundleTensor] = {}
    if suffixes is FULL and f"{variable}-keys_filtered" in bundle:
        filtered["filtered_keys"] = bundle_column(bundle, doing, f"{variable}-keys_filtered", (keys.dtype.name,))
        for name in ("filtered_freqs", "filtered_versions"):
            column = counters(variable + _FILTERED[name], filtered["filtered_keys"].rows)
            if column is not None:
                filtered[name] = column
    return _Variable(
        keys=keys,
        values=values,
        freqs=counters(variable + suffixes.freqs, keys.rows),
        versions=counters(variable + suffixes.versions, keys.rows),
        offsets=offsets(variable + suffixes.offsets),
        filter_offsets=offsets(variable + _FILTER_OFFSETS) if suffixes is FULL else None,
        filtered=filtered,
        tensors=_tensors_of(bundle, suffixes, variable),
    )


def _open_table(
    bundle: Bundle, suffixes: Suffixes, options: OpenOptions, names: TableNames
) -> tuple[DeepRecTable, set[str]]:
    doing = f"opening table '{names.name}' of '{bundle.prefix}'"
    by_part = [
        {slot: _open_variable(bundle, doing, variable, suffixes) for slot, variable in variables.items()}
        for variables in names.in_order(doing)
    ]
    own = [variables[""] for variables in by_part]
    first = own[0]
    for slot in ["", *names.slots]:
        check_alike(doing, slot, by_part)
    slots = [(slot, [variables[slot] for variables in by_part]) for slot in names.slots]
    has_freqs, has_versions = (_has(doing, what, own) for what in ("freqs", "versions"))
    extras = _extras(own)
    ssd = [variable for part in names.parts.values() for variable in part.values() if _on_ssd(bundle, variable)]
    metadata: dict[str, Any] = {}
    if names.partitioned and len(own) == 1:
        metadata["partitioned"] = True
    if suffixes is INCREMENT:
        metadata["increment"] = True
    used = {tensor for variables in by_part for variable in variables.values() for tensor in variable.tensors}
    schema = TableSchema(
        name=names.name,
        dialect=NAME,
        key_dtype=first.keys.dtype.name,
        value_dtype=first.values.dtype.name,
        dim=first.values.row_shape[0],
        part_rows=tuple(variable.keys.rows for variable in own),
        slots=tuple(SlotSchema(name, of[0].values.row_shape[0], of[0].values.dtype.name) for name, of in slots),
        freq_dtype="int64" if has_freqs else None,
        version_dtype="int64" if has_versions else None,
        version_unit="steps" if has_versions else "unknown",
        partition="mod_1000",
        extras=tuple(ExtraSchema(name, column.dtype.name, (column.rows,)) for name, column in extras.items()),
        metadata=metadata,
        notes=_notes(names, own, suffixes, ssd),
        bytes=sum(bundle.nbytes(tensor) for tensor in used),
    )
    parts = [
        Part(
            variable.keys.rows,
            variable.keys,
            variable.values,
            freqs=variable.freqs if has_freqs else None,
            versions=variable.versions if has_versions else None,
        )
        for variable in own
    ]
    keyed = {
        f"slot:{slot}": KeyedColumn([v.keys for v in of], [v.values for v in of], severity="error")
        for slot, of in slots
    }
    table = DeepRecTable(schema, parts, keyed, memory=options.memory, extras=extras)
    table.variables = tuple(variable for variables in by_part for variable in variables.values())
    table.on_ssd = tuple(ssd)
    return table, used


def _has(doing: str, what: str, own: Sequence[_Variable]) -> bool:
    """Tell whether a table has frequencies or versions; raises `CorruptFileError` where only some parts have them."""
    missing = [part for part, variable in enumerate(own) if getattr(variable, what) is None]
    filled = [variable for variable in own if variable.keys.rows and getattr(variable, what) is not None]
    if missing and filled:
        raise CorruptFileError(
            f"{doing}: part {missing[0]} has no {what}, other parts have; the parts are of different checkpoints,"
            " write it again"
        )
    return not missing


def _extras(own: Sequence[_Variable]) -> dict[str, Column]:
    extras: dict[str, Column] = {}
    if any("filtered_keys" in variable.filtered and variable.filtered["filtered_keys"].rows for variable in own):
        for name in _FILTERED:
            columns = [variable.filtered[name] for variable in own if name in variable.filtered]
            if len(columns) == len(own):
                extras[name] = ConcatenatedColumn(columns)
    return extras


def _notes(names: TableNames, own: Sequence[_Variable], suffixes: Suffixes, on_ssd: Sequence[str]) -> tuple[str, ...]:
    notes = []
    if names.slots and not names.partitioned:
        notes.append(f"{', '.join(names.slots)}: taken for slots by their names, {names.name}/<slot>")
    if suffixes is INCREMENT:
        notes.append("an increment: only the rows that changed since the full checkpoint before")
    if any(variable.offsets is None for variable in own):
        notes.append("saved by an old DeepRec: rows are in no buckets")
    if on_ssd:
        notes.append("rows on the SSD tier are in files of their own, which are not read")
    return tuple(notes)


def _on_ssd(bundle: Bundle, variable: str) -> bool:
    """Tell whether rows of a variable lie in the files of the SSD tier beside the bundle."""
    try:
        return Path(f"{bundle.prefix}-{variable.replace('/', '_')}-ssd_record.index").exists()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False  # no file is called so


class DeepRecTable(KeyedSlotsTable):
    """A table of DeepRec, its slots joined by key."""

    variables: tuple[_Variable, ...] = ()
    on_ssd: tuple[str, ...] = ()

    def check(self) -> Iterator[Finding]:
        """Yield slots whose keys differ, offsets that disagree with the keys, and what DeepRec would not restore."""

        def finding(severity: Any, check: str, message: str) -> Finding:
            return Finding(severity, check, self.schema.name, message)

        for name in self.on_ssd:
            yield finding(
                "error",
                "ssd-tier",
                f"rows of '{name}' on the SSD tier are in '...-ssd_record' and '...-emb_files', which kvtools does"
                " not read; save with storage in DRAM to have all rows",
            )
        yield from super().check()
        for variable in self.variables:
            lists = [(variable.keys, variable.offsets)]
            if "filtered_keys" in variable.filtered:
                lists.append((variable.filtered["filtered_keys"], variable.filter_offsets))
            for keys, offsets in lists:
                if offsets is None:
                    continue
                fault = _offset_fault(offsets.read(), keys.rows)
                if fault:
                    yield finding(
                        "error",
                        "partition-offset",
                        f"'{offsets.name}' {fault}; DeepRec would restore wrong rows, write the checkpoint again",
                    )
                    continue
                wrong, few = _in_wrong_bucket(keys, offsets.read())
                if wrong:
                    yield finding(
                        "error",
                        "wrong-bucket",
                        f"{wrong} keys of '{keys.name}' ({few}) are in another bucket than key % {BUCKETS} says;"
                        " DeepRec leaves them out when it restores a variable with parts",
                    )
        below = sum(
            int(np.count_nonzero(chunk.keys < 0)) for chunk in self.chunks(Columns(), rows=_KEY_ROWS, verify=False)
        )
        if below:
            yield finding(
                "warning",
                "negative-keys",
                f"{below} keys are below 0; DeepRec leaves such keys out when it saves, and when it restores a"
                " variable with parts",
            )


def _offset_fault(offsets: Array, rows: int) -> str:
    """Return what is wrong with the offsets of buckets [1001], "" if nothing."""
    if offsets[0] != 0:
        return f"begins with {offsets[0]}, expected 0"
    if (np.diff(offsets.astype(np.int64)) < 0).any():
        bucket = int(np.flatnonzero(np.diff(offsets.astype(np.int64)) < 0)[0])
        return f"falls from {offsets[bucket]} to {offsets[bucket + 1]} at bucket {bucket}"
    return f"ends with {offsets[-1]}, expected {rows}, the rows that there are" if offsets[-1] != rows else ""


def _in_wrong_bucket(keys: Column, offsets: Array) -> tuple[int, str]:
    """Count the keys that stand in another bucket than their own; return the first few too."""
    few: list[int] = []
    wrong = start = 0
    for chunk in keys.chunks(_KEY_ROWS, verify=False):
        rows = np.arange(start, start + len(chunk))
        bucket = np.searchsorted(offsets, rows, side="right") - 1
        bad = np.flatnonzero(bucket != buckets_of(chunk))
        few += chunk[bad[: _FEW - len(few)]].tolist()
        wrong += len(bad)
        start += len(chunk)
    return wrong, ", ".join(map(str, few)) + ", ..." * (wrong > len(few))


def buckets_of(keys: Array) -> npt.NDArray[np.int64]:
    """Return the bucket of each key [n]: key floor-mod 1000.

    >>> buckets_of(np.array([1234, -1, 2])).tolist()
    [234, 999, 2]
    """
    return owners(keys, BUCKETS, "floor_mod")


class BucketShard(ShardWriter):
    """Writes the rows of whole parts, bucket by bucket, from a buffer of at most `memory` bytes.

    `starts[part]` [1001] says where the buckets of a part begin. A run of rows is written for each bucket when the
    buffer is full, so the larger the buffer, the fewer and longer the runs.
    """

    def __init__(
        self,
        table: str,
        path: str,
        regions: Mapping[tuple[int, str], list[Region]],
        starts: npt.NDArray[np.int64],
        memory: int,
    ) -> None:
        self.memory = memory
        self._table = table
        self._path = path
        self._regions = regions
        self._starts = starts
        # Of the parts that have come so far, in that order: where the next row of each bucket goes, [1000].
        self._at: dict[int, npt.NDArray[np.int64]] = {}
        self._number: dict[int, int] = {}
        self._buffer: dict[str, Array] = {}
        self._sorted: Array = np.empty(0, np.uint8)
        self._bucket: Array = np.empty(0, np.uint16)  # number of the part * 1000 + bucket of the rows in the buffer
        self._rows = 0
        self._writer: RegionWriter | None = None

    def write(self, part: int, start: int, chunk: Chunk) -> None:
        """Take a chunk; see `ShardWriter.write`."""
        columns = plain_columns(chunk)
        if not self._buffer:
            self._allocate(columns)
        if part not in self._at:
            self._number[part] = len(self._at)
            self._at[part] = self._starts[part, :-1].copy()
        done = 0
        while done < len(chunk):
            n = min(len(chunk) - done, len(self._bucket) - self._rows)
            to, rows = slice(self._rows, self._rows + n), slice(done, done + n)
            for name, column in columns.items():
                self._buffer[name][to] = column[rows]
            self._bucket[to] = buckets_of(chunk.keys[rows]) + self._number[part] * BUCKETS
            self._rows += n
            done += n
            if self._rows == len(self._bucket):
                self._flush()

    def finish(self) -> Any:
        """Write what is left; return what was written, for `BundleTableWriter.absorb`."""
        self._flush()
        if any(not np.array_equal(at, self._starts[part, 1:]) for part, at in self._at.items()):
            self._raise_changed()
        self._buffer, self._sorted = {}, np.empty(0, np.uint8)
        writer, self._writer = self._writer, None
        return writer.finish() if writer else {}

    def _allocate(self, columns: Mapping[str, Array]) -> None:
        widths = [column.itemsize * math.prod(column.shape[1:]) for column in columns.values()]
        # Each row also takes its bucket, and its place in the order that they are sorted into.
        capacity = max(1, min(self.memory // (sum(widths) + max(widths) + 32), int(self._starts[:, -1].sum())))
        self._buffer = {name: np.empty((capacity, *rows.shape[1:]), rows.dtype) for name, rows in columns.items()}
        self._sorted = np.empty(capacity * max(widths), np.uint8)
        # Of 16 bits where they suffice: those are sorted by radix.
        self._bucket = np.empty(capacity, np.uint16 if self._starts.shape[0] * BUCKETS <= 1 << 16 else np.uint32)

    def _flush(self) -> None:
        n = self._rows
        if n == 0:
            return
        self._rows = 0
        if self._writer is None:
            self._writer = RegionWriter(self._path)
        order = np.argsort(self._bucket[:n], kind="stable")
        by_part = np.bincount(self._bucket[:n], minlength=len(self._at) * BUCKETS).reshape(-1, BUCKETS)
        counts = {part: own for part, own in zip(self._at, by_part, strict=True) if own.any()}
        if any((self._at[part] + own > self._starts[part, 1:]).any() for part, own in counts.items()):
            self._raise_changed()
        ends = np.cumsum(by_part.sum(axis=1))
        runs = {part: _runs(self._at[part], own) for part, own in counts.items()}
        for name, column in self._buffer.items():
            size = n * column.itemsize * math.prod(column.shape[1:])
            rows = self._sorted[:size].view(column.dtype).reshape(n, *column.shape[1:])
            np.take(column[:n], order, axis=0, out=rows, mode="clip")
            for part, of_part in runs.items():
                end = ends[self._number[part]]
                own = rows[end - counts[part].sum() : end]
                for region in self._regions[part, name]:
                    for to, first, last in of_part:
                        self._writer.write(region, to, own[first:last])
        for part, own in counts.items():
            self._at[part] += own

    def _raise_changed(self) -> None:
        raise BadInputError(
            f"writing table '{self._table}' as {NAME}: its rows are not those that were counted before; the source"
            " changed while it was read, try again"
        )


def _runs(at: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Return where rows sorted by bucket go, as (row of the part, first, last + 1), adjacent buckets as one run.

    >>> _runs(np.array([0, 5, 7]), np.array([5, 1, 2]))
    [(0, 0, 6), (7, 6, 8)]
    """
    filled = np.flatnonzero(counts)
    if not len(filled):
        return []
    ends = np.cumsum(counts)[filled]
    begins, to = ends - counts[filled], at[filled]
    new = np.ones(len(filled), bool)
    new[1:] = to[:-1] + counts[filled][:-1] != to[1:]
    first = np.flatnonzero(new)
    last = np.append(first[1:], len(filled)) - 1
    return list(zip(to[first].tolist(), begins[first].tolist(), ends[last].tolist(), strict=True))


class DeepRecTableWriter(BundleTableWriter):
    """One table of DeepRec being written: the same keys, frequencies and versions for the table and its slots."""

    random_access: ClassVar[bool] = False  # where a row goes depends on all rows of its bucket before it

    def __init__(
        self, bundle: BundleWriter, schema: TableSchema, keys: Iterator[tuple[int, Array]], memory: int
    ) -> None:
        super().__init__(bundle)
        self._schema = schema
        self._memory = memory
        self._filtered: dict[str, Array] = {}
        counts = np.zeros((schema.parts, BUCKETS), np.int64)
        for part, some in keys:
            counts[part] += np.bincount(buckets_of(some), minlength=BUCKETS)
        self._starts = np.zeros((schema.parts, BUCKETS + 1), np.int64)
        np.cumsum(counts, axis=1, out=self._starts[:, 1:])
        self._shards: list[BucketShard] = []
        suffixes = INCREMENT if schema.metadata.get("increment") else FULL
        for part, rows in enumerate(schema.part_rows):
            if rows > _LARGEST_OFFSET:
                raise BadInputError(
                    f"writing table '{schema.name}' as {NAME}: part {part} has {rows} rows, expected at most"
                    f" {_LARGEST_OFFSET}, the largest offset that DeepRec holds; write more parts"
                )
            if self._starts[part, -1] != rows:
                raise BadInputError(
                    f"writing table '{schema.name}' as {NAME}: part {part} has {self._starts[part, -1]} keys, expected"
                    f" {rows}; the source changed while it was read, try again"
                )
            self._variable(part, "", schema.dim, schema.value_dtype, suffixes)
            for slot in schema.slots:
                self._variable(part, slot.name, slot.width, slot.dtype, suffixes)

    def _variable(self, part: int, slot: str, width: int, dtype: str, suffixes: Suffixes) -> None:
        schema, name, rows = self._schema, variable_name(self._schema, part, slot), self._schema.part_rows[part]
        self.column(part, "keys", name + suffixes.keys, numpy_dtype(schema.key_dtype), (rows,))
        values = f"slot:{slot}" if slot else "values"
        self.column(part, values, name + suffixes.values, numpy_dtype(dtype), (rows, width))
        for column, suffix, there in (
            ("freqs", suffixes.freqs, schema.has_freqs),
            ("versions", suffixes.versions, schema.has_versions),
        ):
            if there:
                self.column(part, column, name + suffix, np.dtype(np.int64), (rows,))
            else:  # as DeepRec saves what it does not keep
                self.bundle.array(name + suffix, np.empty(0, np.int64))
        self.bundle.array(name + suffixes.offsets, self._starts[part].astype(np.int32))

    def shard(self) -> BucketShard:
        """Return a writer for one task; those that are written at once share the memory."""
        self._shards.append(BucketShard(self._schema.name, self.bundle.data_path, self._regions, self._starts, 0))
        processors = os.cpu_count() or 1
        for shard in self._shards if len(self._shards) <= processors else self._shards[-1:]:
            shard.memory = self._memory // 2 // min(len(self._shards), processors)
        return self._shards[-1]

    def extra(self, name: str, array: Array) -> None:
        """Take a list of filtered keys, or of their frequencies or versions; they are written when all are there."""
        self._filtered[name] = array

    def close(self) -> None:
        """End the table."""
        if self._schema.metadata.get("increment"):
            return
        schema = self._schema
        given = self._filtered.get("filtered_keys", np.empty(0, schema.key_dtype))
        keys = given.astype(schema.key_dtype, copy=False)
        if not np.array_equal(keys, given):
            raise BadInputError(
                f"writing table '{schema.name}' as {NAME}: its filtered keys do not fit {schema.key_dtype}"
            )
        owner, bucket = owners(keys, schema.parts, "mod_1000"), buckets_of(keys)
        for part in range(schema.parts):
            here = np.flatnonzero(owner == part)
            here = here[np.argsort(bucket[here], kind="stable")]
            offsets = np.append(0, np.cumsum(np.bincount(bucket[here], minlength=BUCKETS))).astype(np.int32)
            for slot in ["", *(slot.name for slot in schema.slots)]:
                variable = variable_name(schema, part, slot)
                self.bundle.array(variable + _FILTERED["filtered_keys"], keys[here])
                for name in ("filtered_freqs", "filtered_versions"):
                    column = self._filtered.get(name)
                    rows = np.empty(0, np.int64) if column is None else column[here].astype(np.int64, copy=False)
                    self.bundle.array(variable + _FILTERED[name], rows)
                self.bundle.array(variable + _FILTER_OFFSETS, offsets)


class Writer(BundleCheckpointWriter):
    """Writes what DeepRec restores: rows in order of their buckets, slots with the keys of their table."""

    def __init__(self, staging: str, options: WriteOptions) -> None:
        super().__init__(staging, options)
        self._memory = options.memory

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> DeepRecTableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        return DeepRecTableWriter(self.bundle, schema, keys(), self._memory)


DIALECT = Dialect(
    name=NAME,
    title="a checkpoint of DeepRec: TensorFlow bundle, embedding variables",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="prefix",
    holds=Holds(
        key_dtypes=KEY_DTYPES,
        value_dtypes=VALUE_DTYPES,
        slot_width_is_dim=True,
        freq_dtypes=("int64",),
        version_dtypes=("int64",),
        version_units=("steps", "unknown"),
        unknown_versions_are="steps",
        partition="mod_1000",
        extras=frozenset(_FILTERED),
        metadata=frozenset({"partitioned", "increment"}),
        variables=True,
    ),
)
