"""Checkpoints of TensorFlow Recommenders Addons: the tables of `tfra.dynamic_embedding` in a TensorFlow bundle.

    name-based      [scope/]<name with / as _>_mht_<i>of<n>-keys, -values     i from 1; tf.compat.v1.train.Saver
    object-based    <path>/tables_of_<name>/<i>/.ATTRIBUTES/table-keys, ...   i from 0; tf.train.Checkpoint, SavedModel

Every optimizer slot is a table of its own with keys and an order of its own, and so is the status of a restrict
policy: `tfra_names.py` finds out whose they are. Specified in `docs/dialects/tfra.md`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from kvtools.dialects.bundle import Bundle
from kvtools.dialects.bundle.dtypes import dtype_name
from kvtools.dialects.bundle_output import BundleCheckpointWriter, BundleTableWriter, plain_columns
from kvtools.dialects.chunk import Array, Chunk, Columns
from kvtools.dialects.column import Column
from kvtools.dialects.column_table import ColumnTable, KeyedColumn, KeyedSlotsTable, Part
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.object_graph import OBJECT_GRAPH, extend_object_graph, full_names
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import SlotSchema, TableSchema, VariableSchema, numpy_dtype
from kvtools.dialects.tensorflow import bundle_checkpoint, located
from kvtools.dialects.tfra_names import Role, SavedTable, assign_roles, initial_of, of_path, of_scope, optimizers_of
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError
from kvtools.partition import owners
from kvtools.status_names import KINDS, status_tables

NAME = "tfra"
KEY_DTYPES = ("int64", "int32")
VALUE_DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "int8")
_PAIRS = {"int64": VALUE_DTYPES, "int32": ("float32", "float64", "bfloat16", "int32")}
"""The values that TFRA's own tables can hold under keys of each type."""

MARKERS = ("-shard_upsert_restore", "-prev_global_shard_num")
"""What a bundle holds in place of a table that FileSystemSaver saved beside it."""

_BY_NAME = re.compile(r"(?P<place>.+)_mht_(?P<i>\d{1,6})of(?P<n>\d{1,6})-(?P<what>keys|values)", re.S)
_BY_PATH = re.compile(
    r"(?P<place>(?:.*/)?tables_of_[^/]+)/(?P<i>\d{1,6})/\.ATTRIBUTES/table-(?P<what>keys|values)", re.S
)
RECORD = "_kvtools_tfra"
"""A string tensor that kvtools writes where TFRA's names do not tell whose slot a table is, or what it is called."""

_SAMPLE_PARTS, _SAMPLE_ROWS = 8, 256


@dataclass
class StoredTable:
    """A table as it was saved, opened: the columns of each part, or, for strings, only what is known of them.

    `keys` and `values` are empty where rows cannot be read; the schema's facts are there all the same. `routed` is
    False where parts own keys by another rule than that of one process.
    """

    saved: SavedTable
    key_dtype: str
    value_dtype: str
    dim: int
    part_rows: tuple[int, ...]
    keys: list[Column] = field(default_factory=list)
    values: list[Column] = field(default_factory=list)
    bytes: int = 0
    notes: tuple[str, ...] = ()
    routed: bool = True

    @property
    def readable(self) -> bool:
        """Whether rows can be read."""
        return self.key_dtype in KEY_DTYPES and self.value_dtype in VALUE_DTYPES


@dataclass
class _Tensors:
    """The tensors of a table by part, from 0, and how many parts their names say that there are."""

    keys: dict[int, str] = field(default_factory=dict)
    values: dict[int, str] = field(default_factory=dict)
    counts: set[int] = field(default_factory=set)

    def add(self, what: str, part: int, tensor: str) -> None:
        """Add "keys" or "values"."""
        (self.keys if what == "keys" else self.values)[part] = tensor


def sniff(source: Source) -> bool:
    """Tell whether a source is a bundle with a table of TFRA's."""
    if source.bundle is None:
        return False
    entries = source.bundle.entries
    return any(_BY_NAME.fullmatch(name) or _BY_PATH.fullmatch(name) for name in entries)


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the tables of a bundle, each with its slots and status, and the dense variables beside them.

    Raises:
        BadInputError: a part is missing.
        CorruptFileError: columns do not fit together.
        UsageError: an option contradicts what the bundle records.
    """
    location, bundle = located(source)
    stored, used, broken = stored_tables(bundle, options)
    tables = join_tables(NAME, stored, options, broken, recorded_columns(bundle))
    return bundle_checkpoint(NAME, location, bundle, tables, used, broken)


def recorded_columns(bundle: Bundle) -> dict[str, tuple[str, str]]:
    """Return what a bundle that kvtools wrote records of its tables: name and column, by place."""
    if RECORD not in bundle:
        return {}
    doing = f"reading tensor '{RECORD}' of '{bundle.prefix}'"
    strings = bundle.strings(RECORD)
    try:
        record = json.loads(strings[0]) if len(strings) == 1 else None
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not all(
        isinstance(entry, list) and len(entry) == 2 and all(isinstance(text, str) for text in entry)
        for entry in record.values()
    ):
        raise CorruptFileError(f"{doing}: got no JSON object of names by place; write the checkpoint again")
    return {place: (entry[0], entry[1]) for place, entry in record.items()}


def stored_tables(bundle: Bundle, options: OpenOptions) -> tuple[list[StoredTable], set[str], dict[str, KvtoolsError]]:
    """Return the saved tables of a bundle, the tensors that they are made of, and what could not be opened."""
    groups: dict[SavedTable, _Tensors] = {}
    used: set[str] = set()
    for tensor in bundle.entries:
        by_name = _BY_NAME.fullmatch(tensor)
        by_path = None if by_name else _BY_PATH.fullmatch(tensor)
        if by_name:
            group = groups.setdefault(of_scope(by_name["place"]), _Tensors())
            group.add(by_name["what"], int(by_name["i"]) - 1, tensor)
            group.counts.add(int(by_name["n"]))
        elif by_path:
            group = groups.setdefault(of_path(by_path["place"]), _Tensors())
            group.add(by_path["what"], int(by_path["i"]), tensor)
        elif tensor != RECORD and not tensor.endswith(MARKERS):
            continue
        used.add(tensor)
    stored: list[StoredTable] = []
    broken: dict[str, KvtoolsError] = {}
    optimizers = _optimizers(bundle) if any(saved.tracked for saved in groups) else {}
    for saved, found in groups.items():
        try:
            named = dataclasses.replace(saved, optimizer=optimizers.get(saved.name, ""))
            stored.append(_open_stored(bundle, named, found))
        except KvtoolsError as error:
            if not options.lenient:
                raise
            broken[saved.name] = error
    return stored, used, broken


def _optimizers(bundle: Bundle) -> dict[str, str]:
    """Return whose slots tables are, by name, as far as an object graph says so."""
    found: dict[str, str] = {}
    with contextlib.suppress(KvtoolsError):  # A graph that is damaged leaves the tables as they are.
        for graph in bundle.strings(OBJECT_GRAPH) if OBJECT_GRAPH in bundle else ():
            found |= optimizers_of(full_names(graph))
    return found


def _open_stored(bundle: Bundle, saved: SavedTable, found: _Tensors) -> StoredTable:
    doing = f"opening table '{saved.name}' of '{bundle.prefix}'"
    numbers = sorted(found.keys.keys() | found.values.keys())
    if len(found.counts) > 1:
        raise BadInputError(
            f"{doing}: its tensors say that it has {' and '.join(map(str, sorted(found.counts)))} parts, expected one"
            " number; two checkpoints were mixed, write it again"
        )
    parts = next(iter(found.counts), numbers[-1] + 1)
    if numbers != list(range(parts)):
        missing = next((number for number in range(parts) if number not in numbers), None)
        fault = f"part {missing} is missing" if missing is not None else f"one of them is beyond {parts}"
        raise BadInputError(
            f"{doing}: got {len(numbers)} of {parts} parts, {fault}; the checkpoint was written in part, write it again"
        )
    for what, column in (("keys", found.keys), ("values", found.values)):
        lacking = next((number for number in numbers if number not in column), None)
        if lacking is not None:
            raise BadInputError(
                f"{doing}: part {lacking} has no {what}; the checkpoint was written in part, write it again"
            )
    tensors = [(found.keys[number], found.values[number]) for number in numbers]
    shapes, facts = [], set()
    for key_tensor, value_tensor in tensors:
        keys, values = bundle.entries[key_tensor], bundle.entries[value_tensor]
        if len(keys.shape) != 1 or len(values.shape) != 2 or keys.shape[0] != values.shape[0]:
            raise CorruptFileError(
                f"{doing}: '{key_tensor}' has shape {list(keys.shape)} and '{value_tensor}' {list(values.shape)},"
                " expected [rows] and [rows, dim]; the checkpoint was written in part, write it again"
            )
        shapes.append(keys.shape[0])
        facts.add((dtype_name(keys.dtype), dtype_name(values.dtype), values.shape[1]))
    if len(facts) > 1:
        told = " and ".join(f"{key}, {value} [{dim}]" for key, value, dim in sorted(facts))
        raise CorruptFileError(
            f"{doing}: its parts are of different types or widths, {told}; write the checkpoint again"
        )
    key_dtype, value_dtype, dim = facts.pop()
    table = StoredTable(saved, key_dtype, value_dtype, dim, tuple(shapes))
    table.bytes = sum(bundle.nbytes(tensor) for pair in tensors for tensor in pair)
    if table.readable:
        table.keys = [bundle.tensor(key_tensor) for key_tensor, _ in tensors]
        table.values = [bundle.tensor(value_tensor) for _, value_tensor in tensors]
        if dim < 1:
            raise CorruptFileError(f"{doing}: its rows are {dim} wide, expected 1 or more; write the checkpoint again")
    return table


def join_tables(
    dialect: str,
    stored: Sequence[StoredTable],
    options: OpenOptions,
    broken: dict[str, KvtoolsError],
    recorded: Mapping[str, tuple[str, str]],
) -> dict[str, TableReader]:
    """Return the tables by name, slots and status joined to the tables that they belong to.

    `recorded` are the names and columns that are written down, by place; the others are told by TFRA's names.
    """
    for table in stored:
        name, column = recorded.get(table.saved.place, (table.saved.name, ""))
        if column == "values":
            table.saved = dataclasses.replace(table.saved, name=name)
    by_place = {table.saved.place: table for table in stored}
    roles = _roles(stored, recorded)
    names = _table_names([table.saved for table in stored if table.saved.place not in roles])
    tables: dict[str, TableReader] = {}
    for place, name in names.items():
        joined = {role_place: role for role_place, role in roles.items() if role.owner == place}
        try:
            tables[name] = _table(dialect, name, by_place[place], joined, by_place, options)
        except KvtoolsError as error:
            if not options.lenient:
                raise
            broken[name] = error
    return tables


def _roles(stored: Sequence[StoredTable], recorded: Mapping[str, tuple[str, str]]) -> dict[str, Role]:
    """Return which tables are slots or status of which others, by place."""
    by_place = {table.saved.place: table for table in stored}

    def alike(owner: SavedTable, other: SavedTable, kind: str) -> bool:
        one, two = by_place[owner.place], by_place[other.place]
        if not one.readable or not two.readable or one.key_dtype != two.key_dtype:
            return False
        if kind == "slot":
            return one.value_dtype == two.value_dtype and (one.dim == two.dim or not sum(one.part_rows + two.part_rows))
        return two.value_dtype == "int32" and two.dim == 1

    inferred = assign_roles([table.saved for table in stored], alike)
    roles = {place: role for place, role in inferred.items() if place not in recorded}
    owners_of = {name: place for place, (name, column) in recorded.items() if column == "values" and place in by_place}
    for place, (name, column) in recorded.items():
        owner = owners_of.get(name)
        if column == "values" or owner is None or place not in by_place:
            continue
        kind: Literal["slot", "freqs", "versions"]
        kind = "freqs" if column == "freqs" else "versions" if column == "versions" else "slot"
        if alike(by_place[owner].saved, by_place[place].saved, kind):
            roles[place] = Role(owner, kind, column.removeprefix("slot:") if kind == "slot" else "")
    return roles


def names_tell(stored: Sequence[StoredTable], recorded: Mapping[str, tuple[str, str]]) -> bool:
    """Tell whether a reader finds the recorded names and columns without the record."""
    roles = _roles(stored, {})
    names = _table_names([table.saved for table in stored if table.saved.place not in roles])
    for place, (name, column) in recorded.items():
        role = roles.get(place)
        if role is None:
            found = (names[place], "values")
        else:
            found = (names.get(role.owner, ""), f"slot:{role.slot}" if role.kind == "slot" else role.kind)
        if found != (name, column):
            return False
    return True


def _table_names(tables: Sequence[SavedTable]) -> dict[str, str]:
    """Name each table, by place; where two share a name, by their places."""
    counts: dict[str, int] = {}
    for table in tables:
        counts[table.name] = counts.get(table.name, 0) + 1
    return {table.place: table.name if counts[table.name] == 1 else table.place for table in tables}


def _table(
    dialect: str,
    name: str,
    table: StoredTable,
    roles: Mapping[str, Role],
    by_place: Mapping[str, StoredTable],
    options: OpenOptions,
) -> TableReader:
    notes = list(table.notes)
    keyed: dict[str, KeyedColumn] = {}
    slots: list[SlotSchema] = []
    places = {"": table.saved.place}
    for place, role in sorted(roles.items(), key=lambda item: item[1].slot):
        other = by_place[place]
        if role.kind == "slot":
            keyed[f"slot:{role.slot}"] = KeyedColumn(other.keys, other.values, "warning", initial_of(role.slot))
            slots.append(SlotSchema(role.slot, table.dim, other.value_dtype))
            places[f"slot:{role.slot}"] = place
        else:
            keyed[role.kind] = KeyedColumn(other.keys, [FlatColumn(values) for values in other.values], "info")
            places[role.kind] = place
    if any(role.guessed for role in roles.values()):
        notes.append("the optimizer's name is not recorded: its slots are named by what they are called")
    partition = None
    if table.readable and table.routed and len(table.keys) > 1:
        partition = _partition_rule(table.keys)
        if partition is None:
            notes.append("the parts do not hold their keys by a rule of TFRA's own: a partitioner of the user's")
    schema = TableSchema(
        name=name,
        dialect=dialect,
        key_dtype=table.key_dtype,
        value_dtype=table.value_dtype,
        dim=table.dim,
        part_rows=table.part_rows,
        slots=tuple(slots),
        freq_dtype="int32" if "freqs" in keyed else None,
        version_dtype="int32" if "versions" in keyed else None,
        version_unit="seconds" if "versions" in keyed else "unknown",
        partition=partition,
        metadata={"tfra": {"table": name, "places": places}},
        notes=tuple(notes),
        bytes=table.bytes + sum(by_place[place].bytes for place in roles),
    )
    if not table.readable:
        return UnreadableTable(schema)
    parts = [
        Part(rows, keys, values) for rows, keys, values in zip(table.part_rows, table.keys, table.values, strict=True)
    ]
    if not keyed:
        return ColumnTable(schema, parts)
    return KeyedSlotsTable(schema, parts, keyed, memory=options.memory)


def _partition_rule(keys: Sequence[Column]) -> str | None:
    """Tell from some keys of some parts by which rule parts own keys; None if by neither of TFRA's two.

    CUDA builds of TFRA take the low 31 bits of int64 keys first, others do not.
    """
    right = {"floor_mod": 0, "low_31_bits": 0}
    sampled = 0
    small = True
    for part in range(0, len(keys), max(1, len(keys) // _SAMPLE_PARTS)):
        rows = np.unique(np.linspace(0, keys[part].rows, _SAMPLE_ROWS, endpoint=False).astype(np.int64))
        sample = keys[part].take(rows) if keys[part].rows else np.empty(0, keys[part].dtype)
        sampled += len(sample)
        small = small and bool(((sample >= 0) & (sample < 1 << 31)).all())
        for rule in right:
            right[rule] += int(np.count_nonzero(owners(sample, len(keys), rule) == part))
    # Two rules that tell the same parts may not for another number of parts: then TFRA's usual one is meant.
    usual = "floor_mod" if small or keys[0].dtype != np.int64 else "low_31_bits"
    best = max(right, key=lambda rule: (right[rule], rule == usual))
    return best if right[best] >= 0.9 * sampled else None


class FlatColumn:
    """A column of one-number rows [n, 1] as a column of numbers [n]."""

    def __init__(self, column: Column) -> None:
        self._column = column
        self.name, self.dtype, self.rows = column.name, column.dtype, column.rows
        self.row_shape: tuple[int, ...] = ()

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield copies of all rows; see `Column.chunks`."""
        return (rows.reshape(-1) for rows in self._column.chunks(chunk_rows, verify=verify))

    def take(self, rows: Array) -> Array:
        """Copy the rows of these numbers."""
        return self._column.take(rows).reshape(-1)

    def read(self) -> Array:
        """Return all rows."""
        return self._column.read().reshape(-1)


class UnreadableTable(TableReader):
    """A table of strings: it can be listed, and its rows cannot be had as NumPy columns of numbers."""

    def __init__(self, schema: TableSchema) -> None:
        self.schema = schema

    @property
    def key_dtype(self) -> np.dtype[Any]:
        """Refuse; see `read_part`."""
        if self.schema.key_dtype in KEY_DTYPES:
            return numpy_dtype(self.schema.key_dtype)
        raise self._refusal()

    @property
    def value_dtype(self) -> np.dtype[Any]:
        """Refuse; see `read_part`."""
        raise self._refusal()

    def chunk_rows(self, columns: Columns = Columns()) -> int:  # noqa: B008  frozen
        """Refuse; see `read_part`."""
        raise self._refusal()

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Raise `BadInputError`: rows of strings cannot be read."""
        raise self._refusal()

    def take(self, rows: Array, columns: Columns = Columns()) -> Chunk:  # noqa: B008  frozen
        """Raise `BadInputError`: rows of strings cannot be read."""
        raise self._refusal()

    def _refusal(self) -> BadInputError:
        schema = self.schema
        return BadInputError(
            f"reading table '{schema.name}': its keys are {schema.key_dtype} and its values {schema.value_dtype},"
            f" expected keys of {' or '.join(KEY_DTYPES)} and values that are numbers; hash the strings to int64 in"
            " TFRA and save that table, or name the other tables with --table"
        )


class Writer(BundleCheckpointWriter):
    """Writes name-based tables, or object-based where a table comes from such a checkpoint of TFRA's."""

    def __init__(self, staging: str, options: WriteOptions) -> None:
        super().__init__(staging, options)
        self._places = Places()
        self._by_path: list[str] = []
        self._record: dict[str, tuple[str, str]] = {}
        self._stored: list[StoredTable] = []
        self._graph = False

    def plan(self, schemas: Sequence[TableSchema]) -> None:
        """Note which tables are status of which; see `CheckpointWriter.plan`."""
        self._places = Places(schema.name for schema in schemas)

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> BundleTableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        check_types(schema)
        table = BundleTableWriter(self.bundle, table_columns)
        for column, place in self._places.of(schema).items():
            dtype, width = column_type(schema, column)
            saved = of_path(place) if _is_path(place) else of_scope(place)
            self._stored.append(StoredTable(saved, schema.key_dtype, dtype.name, width, schema.part_rows))
            self._record[place] = (schema.name, column)
            for part, rows in enumerate(schema.part_rows):
                keys_tensor, values_tensor = _tensors(place, part, schema.parts)
                table.column(part, "keys", keys_tensor, numpy_dtype(schema.key_dtype), (rows,))
                table.column(part, column, values_tensor, dtype, (rows, width))
                if _is_path(place):
                    self._by_path.append(keys_tensor.removesuffix("-keys"))
        return table

    def variable(self, schema: VariableSchema, chunks: Iterable[Array]) -> None:
        """Write a dense variable, or the object graph with the parts that tables have now."""
        if schema.name == OBJECT_GRAPH:
            graph = b"".join(bytes(text) for array in chunks for text in array.reshape(-1))
            self.bundle.string(OBJECT_GRAPH, extend_object_graph(graph, self._by_path))
            self._graph = True
            return
        super().variable(schema, chunks)
        if "/.ATTRIBUTES/" in schema.name:
            self._by_path.append(schema.name)

    def close(self) -> None:
        """Write the object graph if it is still to be written, and the index."""
        if not names_tell(self._stored, self._record):
            self.bundle.string(RECORD, json.dumps(self._record).encode())
        if self._by_path and not self._graph:
            self.bundle.string(OBJECT_GRAPH, extend_object_graph(b"", self._by_path))
        super().close()


def partition_rule(source: TableSchema) -> str:
    """Return by which rule TFRA will look for the keys of a table: the source's if it is TFRA's, else the usual one."""
    if source.key_dtype == "int32":
        return "floor_mod"
    if source.dialect.startswith(NAME) and source.partition:
        return source.partition
    return "low_31_bits"


def check_types(schema: TableSchema) -> None:
    """Raise `BadInputError` where TFRA has no table of these types."""
    doing = f"writing table '{schema.name}' as {schema.dialect}"
    if schema.value_dtype not in _PAIRS[schema.key_dtype]:
        raise BadInputError(
            f"{doing}: its values are {schema.value_dtype}, expected {' or '.join(_PAIRS[schema.key_dtype])} under"
            f" {schema.key_dtype} keys, as TFRA's tables are; cast it first, see `kvtools cast`"
        )
    for slot in schema.slots:
        if slot.dtype != schema.value_dtype:
            raise BadInputError(
                f"{doing}: slot {slot.name} is {slot.dtype}, expected {schema.value_dtype} as the values are; cast it"
                " first, see `kvtools cast`"
            )


def table_columns(chunk: Chunk) -> Mapping[str, Array]:
    """Return the columns of a chunk as TFRA's tables hold them: all but the keys have rows."""
    columns = dict(plain_columns(chunk))
    for name in ("freqs", "versions"):
        if name in columns:
            columns[name] = columns[name].reshape(-1, 1)
    return columns


def column_type(schema: TableSchema, column: str) -> tuple[np.dtype[Any], int]:
    """Return the type and width of a column that `table_columns` gives."""
    if column in ("freqs", "versions"):
        return np.dtype(np.int32), 1
    return numpy_dtype(schema.value_dtype), schema.dim


class Places:
    """Gives each table, slot and status the place that TFRA would; numbers name scopes as TensorFlow does."""

    def __init__(self, tables: Iterable[str] = ()) -> None:
        self._scopes: dict[str, int] = {}
        self._status_of = status_tables(tables)

    def of(self, schema: TableSchema) -> dict[str, str]:
        """Return the place of each column of a table: "values", "slot:<name>", "freqs", "versions"."""
        recorded = schema.metadata.get("tfra", {})
        known = recorded.get("places", {}) if recorded.get("table") == schema.name else {}
        name = schema.name
        base = name.replace("/", "_")
        if name in self._status_of:
            owner, kind = self._status_of[name]
            return {"values": known.get("") or self._status(owner, kind)}
        places = {"values": known.get("") or f"{name}/{base}"}
        self._scopes.setdefault(places["values"].split("/")[0], 1)
        for slot in schema.slots:
            column = f"slot:{slot.name}"
            op, _, short = slot.name.replace("/", "_").rpartition(".")
            full = "_".join(filter(None, (base, op, short)))
            places[column] = known.get(column) or f"{self._scope(short)}/{full}"
        within = ""
        for kind, column in KINDS.items():
            if schema.has_freqs if column == "freqs" else schema.has_versions:
                place = self._status(name, kind, within)
                places[column] = known.get(column) or place
                within = place.rpartition(f"/{kind}/")[0]
        return places

    def _status(self, owner: str, kind: str, within: str = "") -> str:
        """Return the place of a table's status. `within` is the scope, a new one if empty."""
        scope = owner.rpartition("/")[0]
        within = within or self._scope(f"{scope}/{scope}/status" if scope else "status")
        full = f"{scope}/{within}/{owner}/{kind}" if scope else f"{within}/{owner}/{kind}"
        return f"{within}/{kind}/{full.replace('/', '_')}"

    def _scope(self, scope: str) -> str:
        """Return a name scope as TensorFlow makes it unique: m, m_1, m_2, ..."""
        used = self._scopes.get(scope, 0)
        self._scopes[scope] = used + 1
        return f"{scope}_{used}" if used else scope


def _is_path(place: str) -> bool:
    return place.split("/")[-1].startswith("tables_of_")


def _tensors(place: str, part: int, parts: int) -> tuple[str, str]:
    prefix = f"{place}/{part}/.ATTRIBUTES/table" if _is_path(place) else f"{place}_mht_{part + 1}of{parts}"
    return f"{prefix}-keys", f"{prefix}-values"


DIALECT = Dialect(
    name=NAME,
    title="TensorFlow Recommenders Addons: TensorFlow bundle, name-based or object-based",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="prefix",
    holds=Holds(
        key_dtypes=KEY_DTYPES,
        value_dtypes=VALUE_DTYPES,
        slot_width_is_dim=True,
        slot_dtype_is_value=True,
        freq_dtypes=("int32",),
        version_dtypes=("int32",),
        version_units=("seconds",),
        partition=partition_rule,
        metadata=frozenset({"tfra"}),
        status_tables=True,
        variables=True,
    ),
)
