"""Write tables as files of record batches, Parquet or Arrow: a folder per table with a file per part, or one file.

In a folder every part is written by its own shard, in any process. In one file the shards take turns: each batch is of
one part, and the end of the file tells of which.

    OUT/<table>/part-00000<suffix>          OUT<suffix>
    OUT/<table>/_extras/<extra><suffix>
"""

from __future__ import annotations

import base64
import json
import resource
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvtools.dialects.arrow_columns import arrow_batch, arrow_numbers, arrow_schema, import_pyarrow
from kvtools.dialects.bundle.checksum import extend
from kvtools.dialects.chunk import ALL_COLUMNS, Array, Chunk
from kvtools.dialects.safe_name import safe_name
from kvtools.dialects.schema import TableSchema, numpy_dtype, row_bytes
from kvtools.dialects.table_record import is_count, json_object, table_json
from kvtools.dialects.writing import CheckpointWriter, ShardWriter, TableWriter, WriteOptions
from kvtools.errors import BadInputError, CorruptFileError, UsageError

CONTENTS = "kvtools_contents"
"""The key of what the end of a file tells: the part of each of its batches, checksums, extras."""

PART = "kvtools_part"
"""The key, in the metadata of an Arrow schema, of the part that a file holds; a file of all parts has none."""

EXTRAS = "_extras"

_LARGEST_EXTRAS = 64 << 20
_MOST_ROWS = 1 << 20
_MANY_FILES = 256


class BatchFile(ABC):
    """One file being written."""

    @abstractmethod
    def write(self, batch: Any) -> Any:
        """Write a record batch; return what the contents are to tell of it, ready for JSON."""

    @abstractmethod
    def close(self, contents: str) -> None:
        """End the file with its contents, and sync nothing."""


@dataclass(frozen=True)
class BatchFormat:
    """How files of one format are written; it can be pickled. `create(path, schema, options)` starts a file."""

    name: str
    suffix: str
    batch_bytes: int
    create: Callable[[str, Any, WriteOptions], BatchFile]
    options: WriteOptions

    def batch_rows(self, schema: TableSchema) -> int:
        """Return how many rows make a batch: what was asked for, or about `batch_bytes` of them.

        A shard holds a batch about four times over while it gathers, encodes and writes it.
        """
        size = min(self.batch_bytes, self.options.memory // 32)
        return self.options.batch_rows or min(_MOST_ROWS, max(1, size // row_bytes(schema)))


class _Output:
    """A file of some parts of a table: its batches and what its end will tell of them."""

    def __init__(self, form: BatchFormat, path: str, schema: TableSchema, part: int | None) -> None:
        self.arrow_schema = arrow_schema(schema, ALL_COLUMNS, None if part is None else {PART: str(part)})
        self._file = form.create(path, self.arrow_schema, form.options)
        self._batches: list[Any] = []
        self._extras: dict[str, Any] = {}
        self._table_crc = _crc(table_json(schema).encode())
        self._failure: Exception | None = None
        self._lock = threading.Lock()

    def write(self, part: int, batch: Any) -> None:
        with self._lock:
            if self._failure is not None:  # a full disk closes the file, which is no reason to tell
                raise self._failure
            try:
                self._batches.append([part, batch.num_rows, self._file.write(batch)])
            except Exception as error:
                self._failure = error
                raise

    def extra(self, name: str, array: Array) -> None:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._extras[name] = [_crc(data), base64.b64encode(data.data).decode()]

    def close(self) -> None:
        self._file.close(sealed({"batches": self._batches, "extras": self._extras, "table": self._table_crc}))


class _Shard(ShardWriter):
    """Gathers the rows of each part into batches."""

    def __init__(self, schema: TableSchema, batch_rows: int, memory: int) -> None:
        self._schema = schema
        self._batch_rows = batch_rows
        self._memory = memory
        self._held: dict[int, list[Chunk]] = {}
        self._rows: dict[int, int] = {}

    def write(self, part: int, start: int, chunk: Chunk) -> None:
        """Write a chunk; see `ShardWriter.write`."""
        self._held.setdefault(part, []).append(chunk)
        self._rows[part] = self._rows.get(part, 0) + len(chunk)
        if self._rows[part] >= self._batch_rows:
            self._flush(part, whole=True)
        while sum(self._rows.values()) * row_bytes(self._schema) > self._memory:
            self._flush(max(self._rows, key=lambda part: self._rows[part]), whole=False)

    def finish(self) -> Any:
        """Write what is held."""
        for part in list(self._held):
            self._flush(part, whole=False)
        return None

    def _flush(self, part: int, *, whole: bool) -> None:
        chunk = _joined(self._held.pop(part))
        del self._rows[part]
        schema = self._output(part).arrow_schema
        for start in range(0, len(chunk), self._batch_rows):
            piece = chunk.take(slice(start, start + self._batch_rows))
            if whole and len(piece) < self._batch_rows:
                self._held[part], self._rows[part] = [piece.take(np.arange(len(piece)))], len(piece)
            else:
                self._output(part).write(part, arrow_batch(piece, schema))

    def _output(self, part: int) -> _Output:
        raise NotImplementedError


class FolderShard(_Shard):
    """Writes whole parts, each to a file of its own."""

    def __init__(self, form: BatchFormat, folder: str, schema: TableSchema) -> None:
        super().__init__(schema, form.batch_rows(schema), form.options.memory // 4)
        self._form = form
        self._folder = folder
        self._outputs: dict[int, _Output] = {}

    def finish(self) -> list[int]:
        """Finish the files; return the parts that they are."""
        super().finish()
        for output in self._outputs.values():
            output.close()
        return list(self._outputs)

    def _output(self, part: int) -> _Output:
        if part not in self._outputs:
            if len(self._outputs) == _MANY_FILES:
                _allow_more_files()
            path = part_path(self._folder, part, self._form.suffix)
            self._outputs[part] = _Output(self._form, path, self._schema, part)
        return self._outputs[part]


class FolderTable(TableWriter):
    """A table as a folder."""

    distributable: ClassVar[bool] = True

    def __init__(self, form: BatchFormat, folder: Path, schema: TableSchema) -> None:
        self._form = form
        self._folder = folder
        self._schema = schema
        self._written: set[int] = set()
        folder.mkdir()
        if schema.extras:
            (folder / EXTRAS).mkdir()

    def shard(self) -> FolderShard:
        """Return a writer for one task."""
        return FolderShard(self._form, str(self._folder), self._schema)

    def absorb(self, result: Any) -> None:
        """Take over which parts a shard wrote."""
        self._written.update(result)

    def extra(self, name: str, array: Array) -> None:
        """Write an extra array to a file of its own, flat."""
        pyarrow = import_pyarrow("writing extras")
        numbers = stored_extra(np.ascontiguousarray(array).reshape(-1))
        schema = pyarrow.schema([pyarrow.field("element", pyarrow.from_numpy_dtype(numbers.dtype), nullable=False)])
        path = str(self._folder / EXTRAS / f"{safe_name(name)}{self._form.suffix}")
        file = self._form.create(path, schema, self._form.options)
        rows = max(1, self._form.batch_bytes // max(1, numbers.itemsize))
        told = []
        for start in range(0, len(numbers), rows):
            piece = arrow_numbers(numbers[start : start + rows], schema.field(0).type)
            batch = pyarrow.RecordBatch.from_arrays([piece], schema=schema)
            told.append([0, batch.num_rows, file.write(batch)])
        file.close(sealed({"batches": told, "extras": {}, "table": 0}))

    def close(self) -> None:
        """Write the parts without rows."""
        for part in range(self._schema.parts):
            if part not in self._written:
                path = part_path(str(self._folder), part, self._form.suffix)
                _Output(self._form, path, self._schema, part).close()


class FileShard(_Shard):
    """Writes batches of any part to the one file that all shards share."""

    def __init__(self, form: BatchFormat, output: _Output, schema: TableSchema) -> None:
        super().__init__(schema, form.batch_rows(schema), form.options.memory // 4)
        self._shared = output

    def _output(self, part: int) -> _Output:
        return self._shared


class FileTable(TableWriter):
    """A table as one file."""

    def __init__(self, form: BatchFormat, path: str, schema: TableSchema) -> None:
        self._form = form
        self._schema = schema
        self._path = path
        self._output = _Output(form, path, schema, None)
        self._extra_bytes = 0

    def shard(self) -> FileShard:
        """Return a writer for one task."""
        return FileShard(self._form, self._output, self._schema)

    def extra(self, name: str, array: Array) -> None:
        """Keep an extra array for the end of the file."""
        self._extra_bytes += array.nbytes
        if self._extra_bytes > _LARGEST_EXTRAS:
            raise BadInputError(
                f"writing table '{self._schema.name}' as one {self._form.name} file: its {name.replace('_', ' ')} and"
                f" other extras take {self._extra_bytes} bytes, expected at most {_LARGEST_EXTRAS} in one file; name a"
                f" folder as the output, one not ending in {self._form.suffix}"
            )
        self._output.extra(name, array)

    def close(self) -> None:
        """End the file."""
        self._output.close()


class BatchWriter(CheckpointWriter):
    """Tables as files of record batches: in a folder if `staging` is one, else the one table in one file."""

    def __init__(self, staging: str, form: BatchFormat) -> None:
        self._staging = staging
        self._form = form

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> TableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        path = Path(self._staging)
        if path.is_dir():
            return FolderTable(self._form, path / safe_name(schema.name), schema)
        return FileTable(self._form, self._staging, schema)

    def close(self) -> None:
        """Nothing is left: each table has closed its files."""


def _allow_more_files() -> None:
    """Let this process have as many open files as the system allows: rows of all parts come in any order."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def part_path(folder: str, part: int, suffix: str) -> str:
    """Return where the file of a part is."""
    return f"{folder}/part-{part:05d}{suffix}"


def stored_extra(numbers: Array) -> Array:
    """Return the numbers of an extra array as Arrow can hold them: those that it has no type for as their bytes."""
    held = numbers.dtype.kind in "iuf" and not numbers.dtype.name.startswith("float8")
    return numbers if held else numbers.view(np.uint8)


def read_extra(stored: Array, dtype: str, shape: tuple[int, ...], doing: str) -> Array:
    """Return the extra array that `stored_extra` made into these numbers."""
    wanted = numpy_dtype(dtype)
    size = wanted.itemsize
    for length in shape:
        size *= length
    if stored.nbytes != size:
        raise CorruptFileError(f"{doing}: got {stored.nbytes} bytes, expected {size}; the file is damaged")
    return np.ascontiguousarray(stored).view(np.uint8).view(wanted).reshape(shape)


def sealed(record: Mapping[str, Any]) -> str:
    """Return a record as JSON with its own checksum in front."""
    text = json.dumps(record, separators=(",", ":"))
    return f"{_crc(text.encode()):08x}{text}"


@dataclass(frozen=True)
class Contents:
    """What the end of a file tells: `batches` are (part, rows, what the format told), `extras` decoded lazily."""

    batches: tuple[tuple[int, int, Any], ...]
    extras: Mapping[str, tuple[int, str]]
    table_crc: int

    def extra(self, name: str, doing: str) -> Array:
        """Return the bytes of an extra array."""
        try:
            crc, text = self.extras[name]
            data = np.frombuffer(base64.b64decode(text), np.uint8)
        except (KeyError, ValueError) as error:
            raise CorruptFileError(f"{doing}: it is not at the end of the file; the file is damaged") from error
        if _crc(data) != crc:
            raise CorruptFileError(f"{doing}: checksum mismatch; the file is damaged, copy it again")
        return data


def unsealed(text: bytes, doing: str) -> Contents:
    """Return what `sealed` made into this text; raises `CorruptFileError` where its checksum differs."""
    if text[:8] != f"{_crc(text[8:]):08x}".encode():
        raise CorruptFileError(f"{doing}: checksum mismatch in what its end tells; the file is damaged, copy it again")
    record = json_object(text[8:], doing)
    batches, extras, crc = record.get("batches"), record.get("extras"), record.get("table")
    good = isinstance(batches, list) and isinstance(extras, dict) and is_count(crc)
    if not good or not all(
        isinstance(one, list) and len(one) == 3 and is_count(one[0]) and is_count(one[1]) for one in batches or ()
    ):
        raise CorruptFileError(f"{doing}: what its end tells is malformed; the file is damaged, copy it again")
    return Contents(tuple((part, rows, told) for part, rows, told in batches or ()), extras or {}, int(crc or 0))


def check_compression(options: WriteOptions, known: Mapping[str, tuple[int, int] | None], title: str) -> None:
    """Raise `UsageError` unless the format has this compression, and levels for it where one is given."""
    name = options.compression
    if name is not None and name not in known:
        raise UsageError(f"got --compression {name}, expected {' or '.join(known)} for {title}")
    level = options.compression_level
    if level is None:
        return
    levels = known[name] if name else None
    if levels is None:
        raise UsageError(f"got --compression-level {level}, expected none for {name or 'the default'} in {title}")
    if not levels[0] <= level <= levels[1]:
        raise UsageError(f"got --compression-level {level}, expected {levels[0]} to {levels[1]} for {name} in {title}")


def _joined(chunks: list[Chunk]) -> Chunk:
    if len(chunks) == 1:
        return chunks[0]
    first = chunks[0]

    def joined(columns: list[Array | None]) -> Array | None:
        return None if columns[0] is None else np.concatenate([column for column in columns if column is not None])

    return Chunk(
        keys=np.concatenate([chunk.keys for chunk in chunks]),
        values=joined([chunk.values for chunk in chunks]),
        slots={name: np.concatenate([chunk.slots[name] for chunk in chunks]) for name in first.slots},
        freqs=joined([chunk.freqs for chunk in chunks]),
        versions=joined([chunk.versions for chunk in chunks]),
        part=first.part,
    )


def _crc(data: Any) -> int:
    return extend(0, data)
