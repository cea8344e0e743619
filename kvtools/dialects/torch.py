"""State dicts of PyTorch, TorchRec and FBGEMM, as `torch.save` and `torch.distributed.checkpoint` write them.

PyTorch is not needed, and no class that a file names is imported or run (`tensor_pickle.py`). A table is a matrix whose
keys are its row numbers; `docs/dialects/torch.md` says which are tables, and where optimizer states are found.
"""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.bundle.checksum import ZIP
from kvtools.dialects.bundle.writer import Region
from kvtools.dialects.chunk import Array
from kvtools.dialects.column import Column
from kvtools.dialects.dense_tables import are_row_numbers, dense_names, tables_among
from kvtools.dialects.dialect import Dialect, Source
from kvtools.dialects.grid_column import GridColumn
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.named_columns import (
    HOLDS_WITH_VARIABLES,
    WITHOUT_VARIABLES,
    Container,
    column_names,
    column_shapes,
    describe_tables,
    described_tables,
    inferred_tables,
    is_matrix,
    names_in,
    read_description,
    variable_chunks,
    variables_of,
)
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.raw_output import RawTableWriter
from kvtools.dialects.schema import TableSchema, VariableSchema, numpy_dtype
from kvtools.dialects.table_record import VALUE_DTYPES, json_object
from kvtools.dialects.torch_archive import STORAGES, Tensor, is_archive, is_from_before_zip, read_archive, read_extra
from kvtools.dialects.torch_sharded import METADATA, SUFFIX, ShardedTensor, read_sharded
from kvtools.dialects.weight_map import weight_map
from kvtools.dialects.writing import CheckpointWriter, TableWriter, WriteOptions
from kvtools.dialects.zip_archive import Archive, Member
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.remote.stored import read_bytes

NAME = "torch"
_INDEX = "pytorch_model.bin.index.json"
_DESCRIPTION = "extra/kvtools.json"
_DEEPEST = 32
_MOST = 200_000
_STATE = "state"  # what an optimizer's state dict calls its tensors, by parameter
_FLAT = ("dev", "uvm", "uvm", "host")  # FBGEMM: where a table lies, by its placement

Place = tuple[str, ...]
"""Where something stood in what was saved: the keys of the dicts around it."""


def sniff(source: Source) -> bool:
    """Tell whether a source is what `torch.save` or `torch.distributed.checkpoint` writes."""
    if source.is_url:
        return False
    if source.path.is_file():
        if source.path.name == METADATA or source.path.suffix == SUFFIX:
            return (source.path.parent / METADATA).is_file()
        return is_archive(source.path) or is_from_before_zip(source.path)
    names = source.names
    return _INDEX in names or (METADATA in names and any(name.endswith(SUFFIX) for name in names))


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open a file or folder.

    Raises:
        BadInputError: nothing in it is a table, a file is missing, or its pickle names what no state dict needs.
        CorruptFileError: it is damaged.
        UsageError: an option contradicts it.
    """
    path = source.path.parent if source.path.name == METADATA or source.path.suffix == SUFFIX else source.path
    doing = f"opening '{path}'"
    description: bytes | None = None
    names_of: dict[Place, list[str]] = {}
    tensors: Mapping[Place, Tensor | ShardedTensor]
    if path.is_dir() and not (path / _INDEX).is_file():
        tensors = read_sharded(path)
    elif path.is_dir():
        tensors = _tensors_of_files(path)
    else:
        if is_from_before_zip(path):
            raise BadInputError(
                f"{doing}: it is in the layout of PyTorch before 1.6, expected a zip file; load it with PyTorch and"
                " save it again with torch.save"
            )
        tensors, names_of = _flattened(read_archive(path), doing)
        description = read_extra(path, _DESCRIPTION)
    named = {".".join(place): (place, tensor) for place, tensor in tensors.items()}
    if len(named) != len(tensors):
        raise CorruptFileError(f"{doing}: two of its tensors have one name; save them under different names")
    columns: dict[str, Column] = {}
    unknown: list[VariableSchema] = []
    for name, (_, tensor) in named.items():
        if tensor.dtype is None:
            unknown.append(VariableSchema(name, tensor.said_dtype, tensor.shape, 0))
        else:
            columns[name] = tensor.column(f"{path}:{name}")
    shapes = {name: tensor.shape for name, (_, tensor) in named.items()}
    container = Container(path, NAME, options, _checksums(tensors.values()))
    if description is not None:
        record = read_description(description, doing)
        tables, broken = described_tables(record["tables"], columns, container)
        used = names_in(record["tables"])
    else:
        flat = _fbgemm_tables(named, columns, doing)
        columns |= flat.tables
        slots = _slots(named, columns, names_of)
        optimizer = {name for name, (place, _) in named.items() if _STATE in place} | flat.tensors
        candidates = {name: column for name, column in columns.items() if name not in optimizer}

        def matrices(among: Iterable[str]) -> Sequence[str]:
            return [name for name in among if name in flat.tables] or tables_among(list(among))

        tables, used = inferred_tables(candidates, container, matrices, {**slots.columns, **flat.slots})
        used |= {name for table in tables for name in slots.tensors.get(table, ())}
        if flat.tables.keys() & tables.keys():
            used |= flat.tensors
        broken = {}
        if not tables:
            raise BadInputError(
                f"{doing}: none of its tensors ({_few(list(named))}) can be a table, expected a matrix of numbers; name"
                " the file or folder that has the embeddings"
            )

    def read_variable(name: str) -> Iterator[Array]:
        if name not in columns:
            raise BadInputError(
                f"reading tensor '{name}' of '{path}': its type is {named[name][1].said_dtype}, expected one that NumPy"
                " has; leave it out, or save it as one of them"
            )
        return variable_chunks(columns, shapes, name)

    beside = {name: column for name, column in columns.items() if name in named}
    return Checkpoint(
        path,
        NAME,
        dict(sorted(tables.items())),
        variables=(*variables_of(beside, shapes, used), *unknown),
        read_variable=read_variable,
        broken=broken,
    )


def _few(names: Sequence[str]) -> str:
    if not names:
        return "there are none"
    return ", ".join(name[:80] for name in names[:8]) + (", ..." if len(names) > 8 else "")


def _checksums(tensors: Iterable[Tensor | ShardedTensor]) -> str | None:
    """Return what the rows are checked against: the archive's CRC-32, if it has them and no tensor is a piece."""
    checked = all(isinstance(one, Tensor) and one.whole and one.storage.crc is not None for one in tensors)
    return "CRC-32" if checked else None


def _tensors_of_files(folder: Path) -> dict[Place, Tensor]:
    """Return the tensors of a model that was saved in several files, with an index of them."""
    path = folder / _INDEX
    doing = f"opening '{path}'"
    try:
        text = read_bytes(path)
    except OSError as error:
        raise BadInputError(f"{doing}: {error.strerror or error}") from error
    files = weight_map(json_object(text, doing), doing)
    found: dict[Place, Tensor] = {}
    for file in dict.fromkeys(files.values()):
        if not (folder / file).is_file():
            raise BadInputError(f"{doing}: there is no '{file}'; copy every file that it names")
        tensors, _ = _flattened(read_archive(folder / file), f"opening '{folder / file}'")
        found |= {place: tensor for place, tensor in tensors.items() if files.get(".".join(place)) == file}
    missing = [name for name in files if (name,) not in found]
    if missing:
        raise CorruptFileError(
            f"{doing}: '{files[missing[0]]}' has no tensor '{missing[0][:200]}'; the files are not of one model, copy"
            " them again"
        )
    return found


def _flattened(saved: Any, doing: str) -> tuple[dict[Place, Tensor], dict[Place, list[str]]]:
    """Return the tensors in nested dicts, and by its place the parameters of each optimizer that says their names."""
    if isinstance(saved, Tensor):
        return {("tensor",): saved}, {}
    tensors: dict[Place, Tensor] = {}
    names_of: dict[Place, list[str]] = {}
    left: deque[tuple[Place, dict[Any, Any]]] = deque([((), saved)] if isinstance(saved, dict) else [])
    seen = 0
    while left:
        place, items = left.popleft()
        for key, item in items.items():
            seen += 1
            if seen > _MOST or len(place) > _DEEPEST:
                raise CorruptFileError(f"{doing}: its dicts have more than {_MOST} items, or are nested too deep")
            here = (*place, str(key))
            if isinstance(item, Tensor):
                tensors[here] = item
            elif isinstance(item, dict):
                left.append((here, item))
            elif key == "param_groups" and isinstance(item, list):
                names_of[place] = _parameter_names(item)
    return tensors, names_of


def _parameter_names(groups: list[Any]) -> list[str]:
    """Return the names of parameters 0, 1, ... as PyTorch's optimizers number them, where they were told names."""
    names: list[str] = []
    for group in groups:
        said = group.get("param_names") if isinstance(group, dict) else None
        if not isinstance(said, list) or group.get("params") != list(range(len(names), len(names) + len(said))):
            return []
        names += map(str, said)
    return names


@dataclass(frozen=True)
class _Slots:
    """Slots by table and name; and the tensors that they are made of, by table."""

    columns: Mapping[str, Mapping[str, Column]]
    tensors: Mapping[str, list[str]]


class _Folded:
    """A vector as rows: [rows * across] as [rows, across], each block of `rows` numbers becoming a column."""

    def __init__(self, column: Column, rows: int) -> None:
        self._column = column
        self.name = column.name
        self.dtype = column.dtype
        self.rows = rows
        self.row_shape = (column.rows // rows,)

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield all rows; see `Column.chunks`."""
        if self.row_shape == (1,):
            yield from (chunk.reshape(-1, 1) for chunk in self._column.chunks(chunk_rows, verify=verify))
            return
        for start in range(0, self.rows, chunk_rows):
            yield self.take(np.arange(start, min(start + chunk_rows, self.rows)))

    def take(self, rows: Array) -> Array:
        """Copy rows; see `Column.take`."""
        return np.stack([self._column.take(rows + n * self.rows) for n in range(self.row_shape[0])], axis=1)

    def read(self) -> Array:
        """Return all rows."""
        return self.take(np.arange(self.rows))


def _slots(
    named: Mapping[str, tuple[Place, Any]], columns: Mapping[str, Column], names_of: Mapping[Place, list[str]]
) -> _Slots:
    """Return the slots that optimizers keep for matrices: tensors at (..., "state", parameter, name)."""
    ends: dict[str, list[str]] = {}
    for name, (place, _) in named.items():
        if _STATE not in place and name in columns and is_matrix(columns[name]):
            for start in range(len(name.split("."))):
                ends.setdefault(".".join(name.split(".")[start:]), []).append(name)
    found: dict[str, dict[str, Column]] = {}
    tensors: dict[str, list[str]] = {}
    for name, (place, _) in named.items():
        if len(place) < 3 or place[-3] != _STATE or name not in columns:
            continue
        parameter, slot = place[-2:]
        if parameter.isdecimal() and len(parameter) < 10:
            numbered = names_of.get(place[:-3], [])
            parameter = numbered[int(parameter)] if int(parameter) < len(numbered) else ""
        owners = ends.get(parameter, [])
        if len(owners) != 1:  # no table, or which of several is nobody's to guess
            continue
        column = _as_slot(columns[name], columns[owners[0]])
        if column is None:
            continue
        table = parameter.split(".")[-2] if "." in parameter else parameter
        found.setdefault(owners[0], {})[slot.removeprefix(f"{table}.")] = column
        tensors.setdefault(owners[0], []).append(name)
    return _Slots(found, tensors)


def _as_slot(column: Column, table: Column) -> Column | None:
    """Return an optimizer's tensor as rows beside the table's; None if it is none: a step count, for example."""
    if column.dtype.name not in VALUE_DTYPES or not table.rows:
        return None
    if column.rows == table.rows and is_matrix(column):
        return column
    # One number for each row; and one for each row and block, where the table's rows are cut into several.
    across = table.across if isinstance(table, GridColumn) else 1
    if not column.row_shape and column.rows in (table.rows, table.rows * across):
        return _Folded(column, table.rows)
    return None


@dataclass(frozen=True)
class _Flat:
    """Tables that FBGEMM keeps in one flat tensor, their slots, and all tensors that say so."""

    tables: dict[str, Column]
    slots: dict[str, dict[str, Column]]
    tensors: set[str]


def _fbgemm_tables(named: Mapping[str, tuple[Place, Any]], columns: Mapping[str, Column], doing: str) -> _Flat:
    """Return the tables of table-batched operators: `weights_offsets` says where in `weights_host`, ... each begins."""
    flat = _Flat({}, {}, set())
    for name in named:
        prefix = name.removesuffix("weights_offsets")
        needed = ("weights_placements", "D_offsets", "rows_per_table")
        if prefix == name or not all(f"{prefix}{other}" in columns for other in needed):
            continue
        widths = np.diff(columns[f"{prefix}D_offsets"].read().reshape(-1)).tolist()
        rows = columns[f"{prefix}rows_per_table"].read().reshape(-1).tolist()
        states = [
            other.removeprefix(prefix).removesuffix("_offsets")
            for other in named
            if other.startswith(prefix) and other.endswith("_offsets") and f"{other[:-8]}_placements" in columns
        ]
        places = {state: _flat_places(named, columns, prefix, state) for state in states}
        if not len(widths) == len(rows) == len(places["weights"]) or any(n < 0 for n in [*widths, *rows]):
            raise CorruptFileError(f"{doing}: '{name}' and '{prefix}D_offsets' are of other numbers of tables")
        tables: dict[Any, str] = {}
        for number, (dim, count, place) in enumerate(zip(widths, rows, places["weights"], strict=True)):
            if place in tables or not dim or not count:
                continue  # several features may share a table
            table = tables[place] = f"{prefix}table_{len(tables)}"
            flat.tables[table] = _cut(named, place, count, dim, f"{doing}: table '{table}'")
            for state in states:
                at = places[state][number] if len(places[state]) == len(rows) else None
                if state == "weights" or place is None or at is None:
                    continue
                # A number for each number of the weights, or one for each row.
                wide = math.prod(named[at[0]][1].shape) == math.prod(named[place[0]][1].shape)
                column = _cut(named, at, count, dim if wide else 1, f"{doing}: table '{table}'")
                flat.slots.setdefault(table, {})[state] = column
        flat.tensors.update(other for other in named if other.startswith(prefix))
    return flat


def _flat_places(
    named: Mapping[str, Any], columns: Mapping[str, Column], prefix: str, state: str
) -> list[tuple[str, int] | None]:
    """Return for each table the flat tensor of a state and the number at which its rows begin there."""
    offsets = columns[f"{prefix}{state}_offsets"].read().reshape(-1).tolist()
    placements = columns[f"{prefix}{state}_placements"].read().reshape(-1).tolist()
    found: list[tuple[str, int] | None] = []
    for offset, placement in zip(offsets, placements, strict=False):
        name = f"{prefix}{state}_{_FLAT[placement] if 0 <= placement < len(_FLAT) else ''}"
        found.append((name, offset) if name in named else None)
    return found


def _cut(named: Mapping[str, tuple[Place, Any]], place: Any, rows: int, dim: int, doing: str) -> Column:
    """Return some rows of a flat tensor; raises `CorruptFileError` where it has not as many."""
    name, start = place or ("", 0)
    tensor = named[name][1] if name else None
    if not isinstance(tensor, Tensor) or tensor.dtype is None or not tensor.contiguous:
        raise BadInputError(f"{doing}: its rows are not in one flat tensor of the same file; save the operator's state")
    if start < 0 or start + rows * dim > math.prod(tensor.shape):
        raise CorruptFileError(
            f"{doing}: {rows} rows of {dim} from number {start} on, in '{name}' of {math.prod(tensor.shape)}; the file"
            " is damaged, copy it again"
        )
    cut = Tensor(tensor.storage, tensor.dtype, tensor.said_dtype, tensor.start + start, (rows, dim), (dim, 1))
    return cut.column(f"{tensor.storage.path}:{name}")


# Writing.

_TOP = "archive"
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items() if dtype}
_WITHOUT_STORAGE = ("uint16", "uint32", "uint64")  # newer than storages of one type


@dataclass(frozen=True)
class _Written:
    """A tensor that was written, as storage number `key`."""

    key: int
    dtype: str
    shape: tuple[int, ...]


class _Tables(RawTableWriter):
    """A table whose columns are storages of the archive."""

    def __init__(self, archive: Archive, regions: Mapping[str, Region], members: Mapping[str, Member]) -> None:
        super().__init__(regions, ZIP)
        self._archive = archive
        self._members = members

    def close(self) -> None:
        """Write the members' headers; raises `ValueError` if rows are missing."""
        super().close()
        for name, member in self._members.items():
            self._archive.end(member, self.checksums[name])


class Writer(CheckpointWriter):
    """Writes a file for `torch.load`: a dict of tensors, and, where PyTorch does not look, what kvtools says of them.

    A table whose keys are 0, 1, ... in this order is one tensor of its name, any other one of keys beside its values.
    """

    def __init__(self, staging: str, options: WriteOptions) -> None:
        self._archive = Archive(Path(staging), "")
        self._tensors: dict[str, _Written] = {}
        self._schemas: list[TableSchema] = []
        self._dense: set[str] = set()

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> TableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        if are_row_numbers(schema, keys()):
            self._dense.add(schema.name)
        self._schemas.append(schema)
        names = self._names(schema)
        regions, members = {}, {}
        for place, (dtype, shape) in column_shapes(schema).items():
            name = names[place]
            if name is not None:
                members[name] = member = self._begin(name, dtype, shape, f"writing table '{schema.name}' as {NAME}")
                path, kind = str(self._archive.path), numpy_dtype(dtype)
                regions[place] = Region(name, path, member.data, shape[0], shape[1:], kind)
        return _Tables(self._archive, regions, members)

    def variable(self, schema: VariableSchema, chunks: Iterable[Array]) -> None:
        """Write a dense variable as a tensor of its name."""
        doing = f"writing dense variable '{schema.name}' as {NAME}"
        if schema.dtype not in _STORAGE_OF and schema.dtype not in _WITHOUT_STORAGE:
            raise BadInputError(
                f"{doing}: it is {schema.dtype}, expected one of {', '.join(_STORAGE_OF)}; {WITHOUT_VARIABLES}"
            )
        member = self._begin(schema.name, schema.dtype, schema.shape, doing)
        at, crc = member.data, 0
        for chunk in chunks:
            data = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
            self._archive.write(data.tobytes(), at)
            at, crc = at + len(data), zlib.crc32(data.data, crc)
        if at != member.data + member.size:
            raise ValueError(f"{doing}: got {at - member.data} bytes, expected {member.size}")
        self._archive.end(member, crc)

    def close(self) -> None:
        """Write what the tensors are, and the directory."""
        description = describe_tables(self._schemas, self._names).encode()
        pickled = _pickled(self._tensors)
        members = {"byteorder": b"little", "version": b"3\n", _DESCRIPTION: description, "data.pkl": pickled}
        for name, data in members.items():
            member = self._archive.begin(f"{_TOP}/{name}", zipfile.ZIP_STORED, len(data), len(data))
            self._archive.write(data, member.data)
            self._archive.end(member, zlib.crc32(data))
        self._archive.close()

    def abort(self) -> None:
        """Close the file."""
        self._archive.abort()

    def _names(self, schema: TableSchema) -> Mapping[str, str | None]:
        return dense_names(schema) if schema.name in self._dense else column_names(schema)

    def _begin(self, name: str, dtype: str, shape: tuple[int, ...], doing: str) -> Member:
        if name in self._tensors:
            raise BadInputError(f"{doing}: two tensors would be called '{name}'; rename a table, see `kvtools rename`")
        if dtype not in _STORAGE_OF and dtype not in _WITHOUT_STORAGE:
            raise BadInputError(
                f"{doing}: tensor '{name}' is {dtype}, expected one of {', '.join(_STORAGE_OF)}; leave it out, or write"
                " another dialect"
            )
        self._tensors[name] = written = _Written(len(self._tensors), dtype, shape)
        size = numpy_dtype(dtype).itemsize * math.prod(shape)
        return self._archive.begin(f"{_TOP}/data/{written.key}", zipfile.ZIP_STORED, size, size)


def _pickled(tensors: Mapping[str, _Written]) -> bytes:
    """Return the pickle, protocol 2, of a dict of tensors, as `torch.save` would write it."""

    def text(value: str) -> bytes:
        data = value.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data

    def number(value: int) -> bytes:
        if value < 1 << 31:
            return b"J" + struct.pack("<i", value)
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        return b"\x8a" + bytes([len(data)]) + data

    def numbers(values: Iterable[int]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    pieces = [b"\x80\x02}("]
    for name, tensor in tensors.items():
        count, new = math.prod(tensor.shape), tensor.dtype in _WITHOUT_STORAGE
        strides = [math.prod(tensor.shape[n + 1 :]) for n in range(len(tensor.shape))]
        size = count * numpy_dtype(tensor.dtype).itemsize if new else count
        storage = b"ctorch.storage\nUntypedStorage\n" if new else f"ctorch\n{_STORAGE_OF[tensor.dtype]}\n".encode()
        make = b"_rebuild_tensor_v3" if new else b"_rebuild_tensor_v2"
        pieces += [text(name), b"ctorch._utils\n", make, b"\n((", text("storage"), storage, text(str(tensor.key))]
        pieces += [text("cpu"), number(size), b"tQ", number(0), numbers(tensor.shape), numbers(strides)]
        pieces += [b"\x89ccollections\nOrderedDict\n)R", f"ctorch\n{tensor.dtype}\n".encode() if new else b"", b"tR"]
    return b"".join([*pieces, b"u."])


DIALECT = Dialect(
    name=NAME,
    title="a state dict of PyTorch, TorchRec or FBGEMM: torch.save (.pt, .pth, .bin) or torch.distributed.checkpoint",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="file",
    suffixes=(".pt", ".pth"),
    holds=HOLDS_WITH_VARIABLES,
)
