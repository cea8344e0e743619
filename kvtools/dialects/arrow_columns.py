"""A table as Arrow columns: what Parquet files, Arrow files and `TableReader.to_arrow` have in common.

    key        int64, int32, uint64 or uint32
    value      fixed_size_list<type>[dim]; bfloat16, which Arrow has not, as the float32 of the same number
    slot_<s>   fixed_size_list<type>[width], one for each optimizer slot
    freq, version   integers

No column has nulls. The schema's metadata carry the table's description (`table_record`) under "kvtools". A file of
another program has no such description: which of its columns are keys and values is then told by names and types.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvtools.dialects.chunk import Array, Chunk, Columns
from kvtools.dialects.schema import TableSchema, numpy_dtype
from kvtools.dialects.table_record import table_json
from kvtools.errors import BadInputError, CorruptFileError, MissingDependencyError

DESCRIPTION = b"kvtools"
"""The key of the table's description in the metadata of an Arrow schema."""


_NUMPY_NAMES = {
    **{f"{sign}int{bits}": f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "halffloat": "float16",
    "float": "float32",
    "double": "float64",
}
"""What Arrow calls the types of numbers that both have -> what NumPy calls them."""


@dataclass(frozen=True)
class ColumnMap:
    """Which Arrow columns make the columns of a table: one of lists, or several of numbers, for values and slots."""

    key: str
    value: tuple[str, ...]
    slots: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    freq: str | None = None
    version: str | None = None

    def chosen(self, columns: Columns) -> list[str]:
        """Return the Arrow columns to read."""
        names = [self.key]
        if columns.values:
            names += self.value
        names += [name for slot, its in self.slots.items() if columns.has_slot(slot) for name in its]
        if columns.freqs and self.freq:
            names.append(self.freq)
        if columns.versions and self.version:
            names.append(self.version)
        return list(dict.fromkeys(names))


def import_pyarrow(doing: str) -> Any:
    """Return the module pyarrow; raises `MissingDependencyError` where it is not installed, or cannot be imported."""
    try:
        import pyarrow
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError):  # as from version 25 on with NumPy 1, which pip does not know
            raise MissingDependencyError(
                f"{doing}: Arrow and Parquet need pyarrow, which is installed and cannot be imported: {error}; with"
                " NumPy 1 (TensorFlow 2.16 and 2.17) run `pip install 'pyarrow<25'`"
            ) from error
        raise MissingDependencyError(
            f"{doing}: Arrow and Parquet need pyarrow, which is not installed; run `pip install 'kvtools[formats]'`"
        ) from None
    return pyarrow


@contextlib.contextmanager
def arrow_errors(doing: str) -> Iterator[None]:
    """Turn what pyarrow raises for a damaged file into one of our errors."""
    pyarrow = import_pyarrow(doing)
    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, IndexError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CorruptFileError(f"{doing}: {reason}; the file is truncated or damaged, copy it again") from error


def column_map(schema: TableSchema) -> ColumnMap:
    """Return what the columns of a table are called; slots whose names Arrow cannot take get others."""
    slots: dict[str, tuple[str, ...]] = {}
    taken: set[str] = set()
    for slot in schema.slots:
        wanted = name = "slot_" + slot.name.encode("utf-8", "backslashreplace").decode()
        number = 2
        while name in taken:
            name, number = f"{wanted}_{number}", number + 1
        taken.add(name)
        slots[slot.name] = (name,)
    return ColumnMap(
        "key", ("value",), slots, "freq" if schema.has_freqs else None, "version" if schema.has_versions else None
    )


def arrow_schema(
    schema: TableSchema, columns: Columns, metadata: Mapping[str, str] | None = None, *, describe: bool = True
) -> Any:
    """Return the Arrow schema of these columns of a table, with its description and `metadata`."""
    pyarrow = import_pyarrow("making Arrow columns")
    names = column_map(schema)

    def lists(name: str, dtype: str, width: int) -> Any:
        number = pyarrow.field("element", _arrow_type(pyarrow, dtype), nullable=False)
        return pyarrow.field(name, pyarrow.list_(number, width), nullable=False)

    fields = [pyarrow.field(names.key, _arrow_type(pyarrow, schema.key_dtype), nullable=False)]
    if columns.values:
        fields.append(lists(names.value[0], schema.value_dtype, schema.dim))
    for slot in (slot for slot in schema.slots if columns.has_slot(slot.name)):
        fields.append(lists(names.slots[slot.name][0], slot.dtype, slot.width))
    if columns.freqs and schema.freq_dtype and names.freq:
        fields.append(pyarrow.field(names.freq, _arrow_type(pyarrow, schema.freq_dtype), nullable=False))
    if columns.versions and schema.version_dtype and names.version:
        fields.append(pyarrow.field(names.version, _arrow_type(pyarrow, schema.version_dtype), nullable=False))
    described = {DESCRIPTION.decode(): table_json(schema)} if describe else {}
    return pyarrow.schema(fields, metadata={**described, **(metadata or {})})


def arrow_batch(chunk: Chunk, schema: Any) -> Any:
    """Return a chunk as a record batch of `schema`, without copying what Arrow can hold as it is."""
    pyarrow = import_pyarrow("making Arrow columns")
    columns = [column for column in (chunk.keys, chunk.values, *chunk.slots.values()) if column is not None]
    columns += [column for column in (chunk.freqs, chunk.versions) if column is not None]
    arrays = []
    for column, described in zip(columns, schema, strict=True):
        numbers = np.ascontiguousarray(widened(column)).reshape(-1)
        if column.ndim == 1:
            arrays.append(arrow_numbers(numbers, described.type))
        else:
            flat = arrow_numbers(numbers, described.type.value_type)
            arrays.append(pyarrow.FixedSizeListArray.from_arrays(flat, type=described.type))
    return pyarrow.RecordBatch.from_arrays(arrays, schema=schema)


def arrow_numbers(numbers: Array, kind: Any) -> Any:
    """Return numbers [n], of the type that Arrow calls `kind`, as an Arrow array over their memory.

    `pyarrow.array` does the same, and imports pandas to see whether it was given something of pandas.
    """
    pyarrow = import_pyarrow("making Arrow columns")
    if numbers.dtype == np.bool_ and kind.bit_width == 1:
        bits = pyarrow.py_buffer(np.packbits(numbers, bitorder="little"))
        return pyarrow.Array.from_buffers(kind, len(numbers), [None, bits])
    if kind.bit_width != 8 * numbers.itemsize:
        raise ValueError(f"got {numbers.dtype} numbers, expected {kind}")
    return pyarrow.Array.from_buffers(kind, len(numbers), [None, pyarrow.py_buffer(np.ascontiguousarray(numbers))])


def numpy_numbers(column: Any) -> Array:
    """Return an Arrow array of numbers as NumPy has it, [n], without copying what NumPy can hold as it is.

    Its method `to_numpy` does the same, and imports pandas, which is a third of a second.
    """
    name = str(column.type)
    if column.null_count or name not in _NUMPY_NAMES:
        numbers: Array = column.to_numpy(zero_copy_only=False)
        return numbers
    dtype = np.dtype(_NUMPY_NAMES[name])
    data = column.buffers()[1]
    if data is None or not len(column):
        return np.empty(0, dtype)
    return np.frombuffer(data, dtype, len(column), column.offset * dtype.itemsize)


def empty_chunk(schema: TableSchema, rows: int, columns: Columns) -> Chunk:
    """Return a chunk to be filled."""
    return Chunk(
        keys=np.empty(rows, numpy_dtype(schema.key_dtype)),
        values=np.empty((rows, schema.dim), numpy_dtype(schema.value_dtype)) if columns.values else None,
        slots={
            slot.name: np.empty((rows, slot.width), numpy_dtype(slot.dtype))
            for slot in schema.slots
            if columns.has_slot(slot.name)
        },
        freqs=np.empty(rows, schema.freq_dtype) if columns.freqs and schema.freq_dtype else None,
        versions=np.empty(rows, schema.version_dtype) if columns.versions and schema.version_dtype else None,
    )


def storage_type(kind: Any) -> Any:
    """Return the type that an extension type is stored as, or the type itself."""
    return getattr(kind, "storage_type", kind)


def is_list(kind: Any) -> bool:
    """Tell whether a type is lists of numbers."""
    import pyarrow.types as types

    kind = storage_type(kind)
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return bool(is_list and (types.is_floating(kind.value_type) or types.is_integer(kind.value_type)))


def type_name(kind: Any) -> str:
    """Return the name of a type as NumPy has it."""
    return str(np.dtype(kind.to_pandas_dtype()).name)


def _arrow_type(pyarrow: Any, dtype: str) -> Any:
    return pyarrow.float32() if dtype == "bfloat16" else pyarrow.from_numpy_dtype(np.dtype(dtype))


def widened(column: Array) -> Array:
    """Return bfloat16 numbers as the float32 of the same bits and 16 zeros after them; others as they are."""
    if column.dtype.name != "bfloat16":
        return column
    return (np.ascontiguousarray(column).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _narrowed(numbers: Array, dtype: str, doing: str) -> Array:
    wanted = numpy_dtype(dtype)
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
        if np.any(bits & 0xFFFF):
            raise CorruptFileError(
                f"{doing}: got numbers of more bits than bfloat16 has, expected bfloat16 as the description says; the"
                " values were changed after the file was written"
            )
        return (bits >> 16).astype(np.uint16).view(wanted)
    return numbers if numbers.dtype == wanted else numbers.astype(wanted)


def flat_numbers(column: Any, dtype: str, doing: str) -> Array:
    """Return a column of numbers [n]."""
    if column.null_count:
        raise BadInputError(f"{doing}: got {column.null_count} nulls, expected a number in every row; fill them first")
    return _narrowed(numpy_numbers(column), dtype, doing)


def list_numbers(column: Any, dtype: str, width: int, doing: str) -> Array:
    """Return a column of lists as [n, width]."""
    column = getattr(column, "storage", column)
    if column.null_count:
        raise BadInputError(f"{doing}: got {column.null_count} nulls, expected {width} numbers in every row")
    offsets = getattr(column, "offsets", None)
    if offsets is not None:
        lengths = np.diff(numpy_numbers(offsets))
        if np.any(lengths != width):
            wrong = int(lengths[np.flatnonzero(lengths != width)[0]])
            raise BadInputError(f"{doing}: got a list of {wrong} numbers, expected {width} in every row")
    return flat_numbers(column.flatten(), dtype, doing).reshape(-1, width)
