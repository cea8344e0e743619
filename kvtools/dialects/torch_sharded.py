"""Folders of `torch.distributed.checkpoint`: a pickle `.metadata` that says which bytes of which `.distcp` file hold
which block of which tensor; each block is an archive of its own (`torch_archive.py`). See `docs/dialects/torch.md`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.dialects.column import Column
from kvtools.dialects.grid_column import Block, GridColumn
from kvtools.dialects.schema import numpy_dtype
from kvtools.dialects.tensor_pickle import Known, Record, load, record_of
from kvtools.dialects.torch_archive import DTYPES, Tensor, read_archive, refusal
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.remote.stored import read_bytes

METADATA = ".metadata"
SUFFIX = ".distcp"
_CLASSES = "torch.distributed.checkpoint."
_OTHERS = (
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
    "pathlib.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.PosixPath",
    "pathlib._local.WindowsPath",
)


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor whose blocks lie in several files, or in several places of one; see `torch_archive.Tensor`."""

    dtype: str | None
    said_dtype: str
    shape: tuple[int, ...]
    blocks: tuple[ShardBlock, ...]

    def column(self, name: str) -> GridColumn:
        """Return the tensor's rows; raises `CorruptFileError` if blocks leave a gap or overlap."""
        assert self.dtype is not None
        dtype, shape = numpy_dtype(self.dtype), self.shape or (1,)
        blocks = []
        for block in self.blocks:
            offsets, sizes = block.offsets or (0,), block.sizes or (1,)
            if any(offsets[2:]) or sizes[2:] != shape[2:]:
                raise CorruptFileError(
                    f"opening '{name}': a shard has shape {list(sizes)} at {list(offsets)}, of a tensor of"
                    f" {list(shape)}: only rows and the numbers of a row can be sharded"
                )
            if len(shape) > 2 and (offsets[1] or sizes[1] != shape[1]):
                raise CorruptFileError(f"opening '{name}': its rows, of {list(shape[1:])}, are cut; write it unsharded")
            start, width = (offsets[1], sizes[1]) if len(shape) == 2 else (0, 1)
            column = ShardColumn(block, dtype, sizes[0], tuple(sizes[1:]), name)
            blocks.append(Block(offsets[0], start, sizes[0], width, column))
        try:
            return GridColumn(name, dtype, shape[0], tuple(shape[1:]), blocks)
        except ValueError as error:
            raise CorruptFileError(f"opening '{name}': {error}; the checkpoint is damaged, copy it again") from error


@dataclass(frozen=True)
class ShardBlock:
    """Where a block begins in its tensor, its shape, and the bytes of a file that are its archive."""

    path: Path
    start: int
    size: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class ShardColumn:
    """The rows of one block; its archive is opened when the first of them is asked for."""

    def __init__(self, block: ShardBlock, dtype: np.dtype[Any], rows: int, row_shape: tuple[int, ...], name: str):
        self.name = name
        self.dtype = dtype
        self.rows = rows
        self.row_shape = row_shape
        self._block = block

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield all rows; see `Column.chunks`."""
        return self._column.chunks(chunk_rows, verify=verify)

    def take(self, rows: Array) -> Array:
        """Copy rows; see `Column.take`."""
        return self._column.take(rows)

    def read(self) -> Array:
        """Return all rows; see `Column.read`."""
        return self._column.read()

    @functools.cached_property
    def _column(self) -> Column:
        block = self._block
        tensor = read_archive(block.path, block.start, block.size)
        if not isinstance(tensor, Tensor) or tensor.dtype != self.dtype.name or tensor.shape != block.sizes:
            got = f"{tensor.said_dtype} {list(tensor.shape)}" if isinstance(tensor, Tensor) else "no tensor"
            raise CorruptFileError(
                f"opening the shard of '{self.name}' at byte {block.start} of '{block.path}': got {got}, expected"
                f" {self.dtype.name} {list(block.sizes)}; the checkpoint is damaged, copy it again"
            )
        return tensor.column(f"{block.path}:{self.name}")


def read_sharded(folder: Path) -> dict[tuple[str, ...], ShardedTensor]:
    """Return the tensors of a folder by where they stood in what was saved, as in ("model", "emb.weight").

    Raises:
        BadInputError: a file is missing, or was written by an extension that kvtools does not know.
        CorruptFileError: `.metadata` is damaged, or contradicts the files' sizes.
    """
    path = folder / METADATA
    doing = f"opening '{path}'"
    try:
        data = read_bytes(path)
    except OSError as error:
        raise BadInputError(f"{doing}: {error.strerror or error}; copy every file of the checkpoint") from error

    def corrupt(what: str) -> CorruptFileError:
        return CorruptFileError(f"{doing}: {what}; the file is damaged, copy it again")

    metadata = load(data, doing, _known, refusal)
    described = metadata.get("state_dict_metadata") if isinstance(metadata, Record) else None
    stored = metadata.get("storage_data") if isinstance(metadata, Record) else None
    if not isinstance(described, dict) or not isinstance(stored, dict):
        raise corrupt("it says of no tensor where it is")
    places = metadata.get("planner_data")
    blocks = _blocks(folder, stored, corrupt)
    tensors: dict[tuple[str, ...], ShardedTensor] = {}
    for name, tensor in described.items():
        if not isinstance(name, str) or not isinstance(tensor, Record):
            raise corrupt("it describes what is no tensor")
        if not tensor.name.endswith("TensorStorageMetadata"):
            continue
        shape, chunks = tensor.get("size"), tensor.get("chunks")
        if not _are_sizes(shape) or not isinstance(chunks, list):
            raise corrupt(f"tensor '{name}' has no shape, or no list of shards")
        said = _dtype(tensor.get("properties"))
        found = []
        for chunk in chunks:
            offsets: Any = chunk.get("offsets") if isinstance(chunk, Record) else None
            sizes: Any = chunk.get("sizes") if isinstance(chunk, Record) else None
            if not _are_sizes(offsets) or not _are_sizes(sizes) or not len(offsets) == len(sizes) == len(shape):
                raise corrupt(f"a shard of tensor '{name}' has no place or shape")
            if (name, offsets) not in blocks:
                raise corrupt(f"it does not say where the shard of '{name}' at {list(offsets)} is")
            where, start, size = blocks[name, offsets]
            found.append(ShardBlock(where, start, size, offsets, sizes))
        place = places.get(name) if isinstance(places, dict) else None
        keys = tuple(map(str, place)) if isinstance(place, tuple) and place else (name,)
        tensors[keys] = ShardedTensor(DTYPES.get(said), said, shape, tuple(found))
    return tensors


def _blocks(folder: Path, stored: Mapping[Any, Any], corrupt: Any) -> dict[tuple[str, Any], tuple[Path, int, int]]:
    """Return file, first byte and length of each block, by its tensor and place, having seen that they are there."""
    sizes: dict[str, int] = {}
    blocks = {}
    for index, info in stored.items():
        if not isinstance(index, Record) or not isinstance(info, Record):
            raise corrupt("it says where something is that is no shard")
        name, offsets = index.get("fqn"), index.get("offset")
        if offsets is None:
            continue  # an object that is no tensor
        if not isinstance(offsets, tuple):
            raise corrupt("a shard's place is no list of sizes")
        file, start, size = info.get("relative_path"), info.get("offset"), info.get("length")
        if not isinstance(file, str) or not isinstance(name, str) or not _are_sizes((start, size, *offsets)):
            raise corrupt("it does not say where a shard is")
        if Path(file).name != file or file in ("", ".", ".."):
            raise corrupt(f"a shard lies in '{file[:80]}', expected a file of the folder itself")
        if info.get("transform_descriptors"):
            raise BadInputError(
                f"opening '{folder}': its shards were transformed ({info.get('transform_descriptors')!s:.80}), as"
                " compressed ones are, expected plain ones; write it without extensions"
            )
        if file not in sizes:
            try:
                sizes[file] = (folder / file).stat().st_size
            except OSError as error:
                raise BadInputError(
                    f"opening '{folder / file}': {error.strerror or error}; copy every file of the checkpoint"
                ) from error
        if start + size > sizes[file]:
            raise CorruptFileError(
                f"opening '{folder / file}': got {sizes[file]} bytes, expected {start + size} or more; the file is"
                " truncated, copy it again"
            )
        blocks[name, offsets] = folder / file, start, size
    return blocks


def _dtype(properties: Any) -> str:
    """Return what a tensor's type is called: properties are pickled as a tuple, or by name."""
    state = properties.state if isinstance(properties, Record) else None
    dtype = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    return dtype.name.rpartition(".")[2] if isinstance(dtype, Known) else "unknown"


def _are_sizes(sizes: Any) -> bool:
    return isinstance(sizes, tuple) and all(isinstance(size, int) and 0 <= size < 1 << 62 for size in sizes)


def _known(name: str) -> Known | None:
    if name == "torch.Size":
        return Known(name, lambda sizes=(): tuple(sizes))
    if name.startswith("torch.") and name.count(".") == 1:
        return Known(name)
    return record_of(name) if name.startswith(_CLASSES) or name in _OTHERS else None
