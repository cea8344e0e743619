"""A model folder in Hugging Face's layout: safetensors files, and an index of which has which tensor.

`model.safetensors.index.json` has `weight_map`, the file of each tensor; a small model is `model.safetensors` alone. A
table is a matrix whose keys are its row numbers; see `docs/dialects/huggingface.md`. Layout:
https://huggingface.co/docs/transformers/big_models
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.bundle.writer import Region, write_fully
from kvtools.dialects.chunk import Array
from kvtools.dialects.column import Column
from kvtools.dialects.dense_tables import are_row_numbers, dense_names, tables_among
from kvtools.dialects.dialect import Dialect, Source
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
    names_in,
    read_description,
    variable_chunks,
    variables_of,
)
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.raw_output import RawTableWriter
from kvtools.dialects.safetensors import (
    Tensor,
    check_dtype,
    checksums_of,
    header_bytes,
    open_columns,
    placed,
    read_header,
)
from kvtools.dialects.schema import TableSchema, VariableSchema, numpy_dtype
from kvtools.dialects.table_record import json_object
from kvtools.dialects.weight_map import weight_map
from kvtools.dialects.writing import CheckpointWriter, TableWriter, WriteOptions
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.remote.stored import read_bytes
from kvtools.replace_output import sync

NAME = "huggingface"
INDEX = "model.safetensors.index.json"

_FILE = ".safetensors"
_INDEX = f"{_FILE}.index.json"
_DESCRIPTION = "kvtools"
_METADATA = {"format": "pt"}  # what readers look for in each file


def sniff(source: Source) -> bool:
    """Tell whether a source is a folder with safetensors files in it, or an index of such files."""
    if source.is_url:
        return False
    if source.path.is_file():
        return source.path.name.endswith(_INDEX)
    return any(name.endswith((_FILE, _INDEX)) for name in source.names)


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open the tables of a model: those that kvtools described, else the matrices that are called as tables are.

    Raises:
        BadInputError: nothing in it is a table, a file is missing, or which files are meant is not to be told.
        CorruptFileError: the index or a file is damaged, or they contradict each other.
        UsageError: an option contradicts the files.
    """
    folder = source.path.parent if source.path.is_file() else source.path
    doing = f"opening '{folder}'"
    index = _index(source)
    description: str | bytes | None = None
    tensors: dict[str, tuple[Path, Tensor, int]] = {}
    if index is None:
        path = _only_file(folder, source.names)
        found, metadata, start = read_header(path)
        tensors = {name: (path, tensor, start) for name, tensor in found.items()}
        description = metadata.get(_DESCRIPTION)
    else:
        record = _read_index(index)
        files = weight_map(record, f"opening '{index}'")
        tensors = _tensors_of(index, files)
        said = record.get("metadata")
        description = said.get(_DESCRIPTION) if isinstance(said, dict) else None
    described = read_description(description, doing) if isinstance(description, str) else {"tables": []}
    checksums = checksums_of(described, doing)
    columns: dict[str, Column] = {}
    unknown: list[VariableSchema] = []
    by_file: dict[tuple[Path, int], dict[str, Tensor]] = {}
    for name, (path, tensor, start) in tensors.items():
        by_file.setdefault((path, start), {})[name] = tensor
    for (path, start), own in by_file.items():
        more, others = open_columns(path, own, start, checksums)
        columns |= more
        unknown += others
    container = Container(folder, NAME, options, "CRC-32C" if tensors and tensors.keys() <= checksums.keys() else None)
    if isinstance(description, str):
        tables, broken = described_tables(described["tables"], columns, container)
        used = names_in(described["tables"])
    else:
        tables, used = inferred_tables(columns, container, tables_among)
        broken = {}
        if not tables:
            raise BadInputError(
                f"{doing}: none of its {len(tensors)} tensors can be a table, expected a matrix of numbers"
            )
    shapes = {name: tensor.shape for name, (_, tensor, _) in tensors.items()}

    def read_variable(name: str) -> Iterator[Array]:
        if name not in columns:
            raise BadInputError(
                f"reading tensor '{name}' of '{folder}': its type is {tensors[name][1].code}, which NumPy has not;"
                " leave it out, or save it as another"
            )
        return variable_chunks(columns, shapes, name)

    return Checkpoint(
        folder,
        NAME,
        dict(sorted(tables.items())),
        variables=(*variables_of(columns, shapes, used), *unknown),
        read_variable=read_variable,
        broken=broken,
    )


def _index(source: Source) -> Path | None:
    """Return the index that is meant; None if there is none, and one file is the model."""
    if source.path.is_file():
        return source.path
    found = [name for name in source.names if name.endswith(_INDEX)]
    if INDEX in found or len(found) == 1:
        return source.path / (INDEX if INDEX in found else found[0])
    if found:
        raise BadInputError(
            f"opening '{source.path}': it has {len(found)} indexes ({', '.join(found[:4])}), and none is '{INDEX}';"
            " name one of them"
        )
    return None


def _only_file(folder: Path, names: tuple[str, ...]) -> Path:
    files = [name for name in names if name.endswith(_FILE)]
    if f"model{_FILE}" in files or len(files) == 1:
        return folder / (f"model{_FILE}" if f"model{_FILE}" in files else files[0])
    raise BadInputError(
        f"opening '{folder}': it has {len(files)} safetensors files ({', '.join(files[:4])}) and no '{INDEX}' that says"
        " what they are; copy the index too, or name one of the files"
    )


def _read_index(path: Path) -> dict[str, Any]:
    try:
        return json_object(read_bytes(path), f"opening '{path}'")
    except OSError as error:
        raise BadInputError(f"opening '{path}': {error.strerror or error}") from error


def _tensors_of(index: Path, files: Mapping[str, str]) -> dict[str, tuple[Path, Tensor, int]]:
    """Return file, entry and first byte of the file's tensors for each tensor of an index."""
    headers = {}
    for file in dict.fromkeys(files.values()):
        if not (index.parent / file).is_file():
            raise BadInputError(f"opening '{index}': there is no '{file}'; copy every file that it names")
        headers[file] = read_header(index.parent / file)
    tensors = {}
    for name, file in files.items():
        found, _, start = headers[file]
        if name not in found:
            raise CorruptFileError(
                f"opening '{index}': '{file}' has no tensor '{name[:200]}'; the files are not of one model, copy them"
                " again"
            )
        tensors[name] = (index.parent / file, found[name], start)
    return tensors


@dataclass
class _File:
    """A file being written: the tensors of one table, or all dense variables."""

    path: Path
    tensors: dict[str, Tensor]


class Writer(CheckpointWriter):
    """Writes a folder: a file for each table, one for all dense variables, and the index, which comes last.

    A table whose keys are 0, 1, ... in this order is one tensor of its name, any other one of keys beside its values.
    """

    def __init__(self, staging: str, options: WriteOptions) -> None:
        self._folder = Path(staging)
        self._files: list[_File] = []
        self._schemas: list[TableSchema] = []
        self._dense: set[str] = set()
        self._tables: list[RawTableWriter] = []
        self._variables: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._taken: set[str] = set()

    def table(self, schema: TableSchema, keys: Callable[[], Iterator[tuple[int, Array]]]) -> TableWriter:
        """Start a table; see `CheckpointWriter.table`."""
        doing = f"writing table '{schema.name}' as {NAME}"
        if are_row_numbers(schema, keys()):
            self._dense.add(schema.name)
        self._schemas.append(schema)
        names, shapes = self._names(schema), {}
        for place, (dtype, shape) in column_shapes(schema).items():
            name = names[place]
            if name is not None:
                self._claim(name, doing)
                check_dtype(dtype, f"{doing}: its {place}")
                shapes[name] = dtype, shape
        tensors, size = placed(shapes)
        file = _File(self._folder / f"{len(self._files)}.tables", tensors)
        header = header_bytes(tensors, _METADATA, file.path.name)
        with file.path.open("xb") as output:
            output.write(header)
            output.truncate(len(header) + size)
        self._files.append(file)
        regions = {}
        for place, (dtype, shape) in column_shapes(schema).items():
            name = names[place]
            if name is not None:
                offset = len(header) + tensors[name].offset
                regions[place] = Region(name, str(file.path), offset, shape[0], shape[1:], numpy_dtype(dtype))
        self._tables.append(RawTableWriter(regions))
        return self._tables[-1]

    def variable(self, schema: VariableSchema, chunks: Iterable[Array]) -> None:
        """Write a dense variable to a file of its own, until all are known."""
        doing = f"writing dense variable '{schema.name}' as {NAME}"
        self._claim(schema.name, doing)
        check_dtype(schema.dtype, f"{doing}: it", WITHOUT_VARIABLES)
        path, at = self._folder / f"{len(self._variables)}.variable", 0
        with path.open("xb") as file:
            for chunk in chunks:
                data = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8)
                write_fully(file.fileno(), data, at)
                at += len(data)
        size = numpy_dtype(schema.dtype).itemsize * math.prod(schema.shape)
        if at != size:
            raise ValueError(f"{doing}: got {at} bytes, expected {size}")
        self._variables[schema.name] = schema.dtype, schema.shape

    def close(self) -> None:
        """Put the variables together, give the files their names, and write the index."""
        self._join_variables()
        files, total = {}, 0
        for number, file in enumerate(self._files, 1):
            name = f"model-{number:05d}-of-{len(self._files):05d}{_FILE}"
            sync(file.path)
            file.path.rename(self._folder / name)
            files.update(dict.fromkeys(file.tensors, name))
            total += sum(tensor.size for tensor in file.tensors.values())
        checksums = {name: crc for table in self._tables for name, crc in table.checksums.items()}
        crc32c = {name: f"{checksums[name]:08x}" for name in sorted(checksums)}
        description = describe_tables(self._schemas, self._names, crc32c=crc32c)
        index = {
            "metadata": {"total_size": total, _DESCRIPTION: description},
            "weight_map": dict(sorted(files.items())),
        }
        path = self._folder / INDEX
        path.write_text(json.dumps(index, indent=2) + "\n")
        sync(path)

    def _join_variables(self) -> None:
        if not self._variables:
            return
        tensors, _ = placed(self._variables)
        file = _File(self._folder / f"{len(self._files)}.tables", tensors)
        numbers = {name: number for number, name in enumerate(self._variables)}
        with file.path.open("xb") as output:
            output.write(header_bytes(tensors, _METADATA, file.path.name))
            for name in tensors:  # in the order of their places
                path = self._folder / f"{numbers[name]}.variable"
                with path.open("rb") as data:
                    shutil.copyfileobj(data, output, 1 << 20)
                path.unlink()
        self._files.append(file)

    def _names(self, schema: TableSchema) -> Mapping[str, str | None]:
        return dense_names(schema) if schema.name in self._dense else column_names(schema)

    def _claim(self, name: str, doing: str) -> None:
        if name in self._taken or name == "__metadata__":
            raise BadInputError(f"{doing}: two tensors would be called '{name}'; rename a table, see `kvtools rename`")
        self._taken.add(name)


DIALECT = Dialect(
    name=NAME,
    title="a Hugging Face folder: model.safetensors, or several files and model.safetensors.index.json",
    sniff=sniff,
    open=open_checkpoint,
    write=Writer,
    output="folder",
    holds=HOLDS_WITH_VARIABLES,
)
