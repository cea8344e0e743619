"""Write tables whose columns are tensors of a bundle: what the writers of all bundle dialects share.

A dialect says which tensors a part has and how a chunk becomes their rows:

    class Writer(BundleCheckpointWriter):
        def table(self, schema, keys):
            table = BundleTableWriter(self.bundle, encode)      # encode(chunk) -> {column: rows}
            for part, rows in enumerate(schema.part_rows):
                table.column(part, "keys", f"{x}-keys", dtype, (rows,))
            return table

A column may go to several tensors (the same keys, say, to a table and to its slots' tables).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvtools.dialects.bundle.reader import Bundle
from kvtools.dialects.bundle.writer import BundleWriter, Region, RegionWriter, Runs
from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.schema import VariableSchema
from kvtools.dialects.writing import CheckpointWriter, ShardWriter, TableWriter, WriteOptions
from kvtools.errors import BadInputError

Encode = Callable[[Chunk], Mapping[str, Array]]
"""From a chunk to the rows of each column by name; a function of a module, so that it can be pickled."""


def plain_columns(chunk: Chunk) -> Mapping[str, Array]:
    """Return the columns of a chunk as they are: "keys", "values", "freqs", "versions", "slot:<name>"."""
    columns = {"keys": chunk.keys}
    for name, column in (("values", chunk.values), ("freqs", chunk.freqs), ("versions", chunk.versions)):
        if column is not None:
            columns[name] = column
    columns.update({f"slot:{name}": slot for name, slot in chunk.slots.items()})
    return columns


class BundleShard(ShardWriter):
    """Writes rows of a table to the regions of its tensors."""

    def __init__(self, path: str, regions: Mapping[tuple[int, str], list[Region]], encode: Encode) -> None:
        self._path = path
        self._regions = regions
        self._encode = encode
        self._writer: RegionWriter | None = None

    def write(self, part: int, start: int, chunk: Chunk) -> None:
        """Write a chunk; see `ShardWriter.write`."""
        if self._writer is None:
            self._writer = RegionWriter(self._path)
        for column, rows in self._encode(chunk).items():
            for region in self._regions[part, column]:
                self._writer.write(region, start, rows)

    def finish(self) -> dict[str, Runs]:
        """Return what was written, for `BundleTableWriter.absorb`."""
        writer, self._writer = self._writer, None
        return writer.finish() if writer else {}


class BundleTableWriter(TableWriter):
    """One table of a bundle being written; rows may come in any order, from any process."""

    random_access: ClassVar[bool] = True
    distributable: ClassVar[bool] = True

    def __init__(self, bundle: BundleWriter, encode: Encode = plain_columns) -> None:
        self.bundle = bundle
        self._encode = encode
        self._regions: dict[tuple[int, str], list[Region]] = {}
        self._extras: dict[str, list[str]] = {}

    def column(self, part: int, column: str, tensor: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Send a column of a part to a tensor of this shape [rows, ...], beside where it goes already."""
        if self.bundle.has(tensor):
            raise BadInputError(
                f"writing '{self.bundle.prefix.name}': two columns would be called '{tensor}'; rename a slot or a"
                " table, see `kvtools rename`"
            )
        self._regions.setdefault((part, column), []).append(self.bundle.reserve(tensor, dtype, shape))

    def place_extra(self, name: str, tensor: str) -> None:
        """Say which tensor an extra array goes to, beside where it goes already."""
        self._extras.setdefault(name, []).append(tensor)

    def shard(self) -> ShardWriter:
        """Return a writer for one task."""
        return BundleShard(self.bundle.data_path, self._regions, self._encode)

    def absorb(self, result: Any) -> None:
        """Take over what a shard wrote."""
        self.bundle.absorb(result)

    def extra(self, name: str, array: Array) -> None:
        """Write an extra array."""
        for tensor in self._extras[name]:
            self.bundle.array(tensor, array)

    def close(self) -> None:
        """End the table; the bundle checks that all its rows were written when it is closed."""


class BundleCheckpointWriter(CheckpointWriter):
    """A bundle being written at prefix `staging`."""

    def __init__(self, staging: str, options: WriteOptions) -> None:
        self.bundle = BundleWriter(Path(staging))

    def variable(self, schema: VariableSchema, chunks: Iterable[Array]) -> None:
        """Write a dense variable, or a tensor of TensorFlow's own bookkeeping."""
        write_variable(self.bundle, schema, chunks)

    def close(self) -> None:
        """Write the index; raises `ValueError` if rows are missing."""
        self.bundle.close()

    def abort(self) -> None:
        """Close the data file."""
        self.bundle.abort()


def write_variable(writer: BundleWriter, schema: VariableSchema, chunks: Iterable[Array]) -> None:
    """Write a dense variable to a bundle; its rows as `variable_chunks` gives them."""
    if not schema.shape or schema.dtype == "string":
        for array in chunks:
            if schema.dtype == "string":
                writer.strings(schema.name, list(array.reshape(-1)), schema.shape)
            else:
                writer.array(schema.name, array)
        return
    begun = False
    for rows in chunks:
        if not begun:
            writer.begin(schema.name, rows.dtype, schema.shape[1:])
            begun = True
        writer.append(rows)
    if not begun:
        writer.array(schema.name, np.empty(schema.shape, schema.dtype))
        return
    writer.end()


def variable_chunks(bundle: Bundle, name: str) -> Iterator[Array]:
    """Yield a dense tensor's rows in chunks, checked; a scalar whole, strings as one object array of bytes."""
    entry = bundle.entries[name]
    if entry.dtype == 7:
        found = bundle.strings(name)  # first: it fails where the shape claims more strings than there are bytes
        strings = np.empty(entry.shape, object)
        strings.reshape(-1)[:] = found
        yield strings
        return
    tensor = bundle.tensor(name)
    rows = max(1, (2 << 20) // max(1, tensor.row_bytes))
    for chunk in tensor.chunks(rows):
        yield chunk.reshape(()) if not tensor.shape else chunk
