"""Tables of HDF5 files that other programs wrote, told by the names and shapes of datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.dialects.column_table import ColumnTable, Part
from kvtools.dialects.hdf5_file import NAME, DatasetColumn, HDF5File, child_of
from kvtools.dialects.interface import TableReader
from kvtools.dialects.schema import SlotSchema, TableSchema
from kvtools.dialects.table_record import (
    COUNTER_DTYPES,
    KEY_DTYPES,
    VALUE_DTYPES,
)
from kvtools.errors import BadInputError

KEY_NAMES = ("keys", "key", "ids", "id")
VALUE_NAMES = ("values", "value", "embeddings", "embedding", "vectors", "weights")
_FREQS = ("freqs", "freq", "frequencies", "counts", "count")
_VERSIONS = ("versions", "version")
NEEDED = (
    "a kvtools HDF5 file has an attribute 'kvtools' and a group 'tables'; of others kvtools reads groups with a"
    f" dataset of integer keys [n] ({', '.join(KEY_NAMES)}) beside one of values [n, dim] ({', '.join(VALUE_NAMES)})"
)


def open_stranger(file: HDF5File, group: Any) -> TableReader:
    """Open a group of another program's file that has keys and values."""
    doing = f"opening group '{group.name}' of '{file.path}' as a table"
    keys, values = pick(group, KEY_NAMES), pick(group, VALUE_NAMES)
    notes = [f"keys are dataset '{keys.name}', values dataset '{values.name}', by their names and shapes"]
    key_column, decode = DatasetColumn(file, keys), None
    rows = key_column.rows
    if keys.dtype.kind not in "iu" or key_column.shape not in ((rows,), (rows, 1)):
        raise BadInputError(
            f"{doing}: '{keys.name}' is {keys.dtype} {list(keys.shape)}, expected integers of shape [n]; {NEEDED}"
        )
    key_dtype = key_column.dtype.name
    if key_dtype not in KEY_DTYPES:
        notes.append(f"keys are stored as {key_dtype} and read as int64")
        key_dtype = "int64"
    if key_dtype != key_column.dtype.name or key_column.row_shape:

        def decode(stored: Array) -> Array:
            return stored.reshape(-1).astype(key_dtype, copy=False)

    value_column = DatasetColumn(file, values)
    dim = int(np.prod(value_column.row_shape, dtype=np.int64))
    if value_column.dtype.name not in VALUE_DTYPES or len(value_column.row_shape) != 1 or not dim:
        raise BadInputError(
            f"{doing}: '{values.name}' is {values.dtype} {list(values.shape)}, expected [n, dim] of"
            f" {' or '.join(VALUE_DTYPES)}"
        )
    if value_column.rows != rows:
        raise BadInputError(
            f"{doing}: '{keys.name}' has {rows} rows and '{values.name}' {value_column.rows}, expected as many; they do"
            " not belong together"
        )

    def counter(names: Sequence[str]) -> DatasetColumn | None:
        found = pick(group, names)
        return DatasetColumn(file, found) if found and _is_counter(found, rows) else None

    freqs, versions = counter(_FREQS), counter(_VERSIONS)
    taken = {column.name for column in (key_column, value_column, freqs, versions) if column}
    slots: dict[str, DatasetColumn] = {}
    left = []
    for name in group:
        dataset = child_of(group, name)
        if not isinstance(dataset, file.h5py.Dataset) or dataset.name in taken:
            continue
        shape: tuple[int, ...] = tuple(dataset.shape or ())
        if len(shape) == 2 and shape[0] == rows and 0 not in shape[1:] and dataset.dtype.name in VALUE_DTYPES:
            slots[name] = DatasetColumn(file, dataset)
        else:
            left.append(name)
    if slots:
        notes.append(f"datasets of a row per key are read as slots: {', '.join(slots)}")
    if left:
        notes.append(f"datasets left aside: {', '.join(left)}")
    schema = TableSchema(
        name=group.name.strip("/") or file.path.stem,
        dialect=NAME,
        key_dtype=key_dtype,
        value_dtype=value_column.dtype.name,
        dim=dim,
        part_rows=(rows,),
        slots=tuple(SlotSchema(name, slot.row_shape[0], slot.dtype.name) for name, slot in slots.items()),
        freq_dtype=freqs.dtype.name if freqs else None,
        version_dtype=versions.dtype.name if versions else None,
        checksums="Fletcher-32" if keys.fletcher32 and values.fletcher32 else None,
        notes=tuple(notes),
        bytes=sum(
            column.size for column in (key_column, value_column, freqs, versions, *slots.values()) if column is not None
        ),
    )
    return ColumnTable(schema, [Part(rows, key_column, value_column, slots, freqs, versions)], decode)


def pick(group: Any, names: Sequence[str]) -> Any:
    """Return the first dataset of a group that is called so, or None."""
    for name in names:
        dataset = child_of(group, name)
        if hasattr(dataset, "chunks") and dataset.shape:
            return dataset
    return None


def _is_counter(dataset: Any, rows: int) -> bool:
    return dataset.shape == (rows,) and dataset.dtype.name in COUNTER_DTYPES
