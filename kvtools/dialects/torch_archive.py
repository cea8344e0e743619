"""What `torch.save` writes, read without PyTorch: a zip file of `data.pkl`, which describes tensors, and their bytes.

Every member lies under a folder of one name: `data.pkl`, `data/<n>` for each storage, `byteorder`, `version`. All are
stored as they are, so a tensor is a run of the file, or a view of one. See `docs/dialects/torch.md`. Format:
https://docs.pytorch.org/docs/stable/notes/serialization.html
"""

from __future__ import annotations

import functools
import io
import math
import os
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.dialects.column import CheckedColumn, Column, RawColumn
from kvtools.dialects.named_columns import ConvertedColumn
from kvtools.dialects.raw_output import crc32
from kvtools.dialects.schema import numpy_dtype
from kvtools.dialects.tensor_pickle import Known, load
from kvtools.dialects.zip_archive import data_offset, opened, zip_errors
from kvtools.errors import BadInputError
from kvtools.remote.stored import for_library, open_binary

_SUFFIXES = (".pt", ".pth", ".bin")
PICKLE = "data.pkl"
DTYPES = {
    "float32": "float32",
    "float": "float32",
    "float64": "float64",
    "double": "float64",
    "float16": "float16",
    "half": "float16",
    "bfloat16": "bfloat16",
    "uint8": "uint8",
    "int8": "int8",
    "int16": "int16",
    "short": "int16",
    "int32": "int32",
    "int": "int32",
    "int64": "int64",
    "long": "int64",
    "bool": "bool",
    "uint16": "uint16",
    "uint32": "uint32",
    "uint64": "uint64",
    "complex64": "complex64",
    "cfloat": "complex64",
    "complex128": "complex128",
    "cdouble": "complex128",
}
"""What PyTorch's types are called in NumPy; others are known by name only."""

STORAGES = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "ByteStorage": "uint8",
    "CharStorage": "int8",
    "ShortStorage": "int16",
    "IntStorage": "int32",
    "LongStorage": "int64",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
    "UntypedStorage": "",
}
_OTHER_STORAGES = ("QInt8Storage", "QUInt8Storage", "QInt32Storage", "QUInt4x2Storage", "QUInt2x4Storage")
_OTHER_DTYPES = (
    *("complex32", "chalf", "qint8", "quint8", "qint32", "quint4x2", "quint2x4"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_LONGEST_PICKLE = 1 << 30
_SAVE_SO = "save the model's state dict by itself, torch.save(model.state_dict(), path)"
_SHARDED = (
    "which stands for a tensor that is sharded over ranks, and this file has the shards of one only; save all with"
    " torch.distributed.checkpoint.save, whose folders are read"
)


@dataclass(frozen=True)
class Storage:
    """A run of numbers in a file; `dtype` is "" where only the tensors on it know their type, None for types that
    NumPy lacks. `crc` is None where the archive has no checksums."""

    path: Path
    dtype: str | None
    offset: int
    size: int
    crc: int | None
    native: bool


@dataclass(frozen=True)
class Tensor:
    """A tensor: a view of a storage, of `shape` and `stride` in numbers, from number `start` on."""

    storage: Storage
    dtype: str | None
    said_dtype: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """Whether rows lie one after the other."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return math.prod(self.shape) == 0
            expected *= size
        return True

    @property
    def whole(self) -> bool:
        """Whether its rows are all that the storage has, in order."""
        return (
            self.contiguous
            and self.dtype is not None
            and math.prod(self.shape) * numpy_dtype(self.dtype).itemsize == self.storage.size
        )

    def column(self, name: str) -> Column:
        """Return the tensor's rows; a scalar is one row. Only for a `dtype`."""
        assert self.dtype is not None
        dtype = numpy_dtype(self.dtype)
        stored = dtype if self.storage.native else dtype.newbyteorder()
        rows, row_shape = (self.shape[0], self.shape[1:]) if self.shape else (1, ())
        path, offset = self.storage.path, self.storage.offset + self.start * dtype.itemsize
        column: Column
        if not self.contiguous:
            column = StridedColumn(self, stored, name)
        elif self.storage.crc is not None and self.whole:
            column = CheckedColumn(
                path,
                stored,
                row_shape,
                offset=offset,
                rows=rows,
                name=name,
                checksum=crc32,
                expected=self.storage.crc,
            )
        else:
            column = RawColumn(path, stored, row_shape, offset=offset, rows=rows)
            column.name = name
        if not self.storage.native:
            column = ConvertedColumn(column, dtype, functools.partial(_as_native, dtype=dtype))
        return column


class StridedColumn:
    """A tensor whose numbers do not lie one after the other: some columns of a wider matrix, or one transposed."""

    def __init__(self, tensor: Tensor, dtype: np.dtype[Any], name: str) -> None:
        self.name = name
        self.dtype = dtype
        self.rows, self.row_shape = tensor.shape[0], tensor.shape[1:]
        self._tensor = tensor
        numbers = tensor.storage.size // dtype.itemsize
        self._storage = RawColumn(tensor.storage.path, dtype, (), offset=tensor.storage.offset, rows=numbers)

    def chunks(self, chunk_rows: int, *, verify: bool = True) -> Iterator[Array]:
        """Yield copies of all rows in order; there is nothing to verify."""
        view = self.read()
        for start in range(0, self.rows, chunk_rows):
            yield view[start : start + chunk_rows].copy()

    def take(self, rows: Array) -> Array:
        """Copy the rows of these numbers."""
        taken: Array = self.read()[rows]
        return taken

    def read(self) -> Array:
        """Return all rows as a read-only view of the mapped file."""
        strides = tuple(stride * self.dtype.itemsize for stride in self._tensor.stride)
        # The tensor was found to lie inside its storage when it was described.
        return np.lib.stride_tricks.as_strided(
            self._storage.read()[self._tensor.start :], self._tensor.shape, strides, writeable=False
        )


class _Part(io.RawIOBase):
    """Some bytes of a file as a file: an archive inside another file."""

    def __init__(self, file: IO[bytes], start: int, size: int) -> None:
        self._file = file
        self._start = start
        self._size = size
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError(22, "it begins before its start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        self._file.seek(self._start + self._at)
        data = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def is_archive(path: Path) -> bool:
    """Tell whether a file is what `torch.save` writes: by its table of contents, or its name if that is cut off."""
    try:
        with open_binary(path) as file:
            if file.read(4) != b"PK\x03\x04":
                return False
        with zipfile.ZipFile(for_library(path)) as archive:
            return any(name.count("/") == 1 and name.endswith(f"/{PICKLE}") for name in archive.namelist())
    except zipfile.BadZipFile:
        return path.suffix in _SUFFIXES
    except (OSError, ValueError, NotImplementedError):
        return False


def is_from_before_zip(path: Path) -> bool:
    """Tell whether a file is what `torch.save` wrote before PyTorch 1.6, by its first bytes: a pickled number."""
    try:
        with open_binary(path) as file:
            return file.read(14) == b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19"
    except OSError:
        return False


def read_archive(path: Path, start: int = 0, size: int | None = None) -> Any:
    """Return the object that was saved, in which each tensor is a `Tensor`, of a file or of some bytes of it.

    Raises:
        BadInputError: the file cannot be read, or its pickle names what no state dict needs.
        CorruptFileError: the archive or its pickle is damaged, or contradicts the sizes of its members.
    """
    doing = f"opening '{path}'" if size is None else f"opening the tensor at byte {start} of '{path}'"
    with zip_errors(doing), open_binary(path) as file:
        size = path.stat().st_size - start if size is None else size
        with opened(_Part(file, start, size)) as archive:
            members = {info.filename: info for info in archive.infolist()}
            top = next((name.removesuffix(PICKLE) for name in members if name.endswith(f"/{PICKLE}")), None)
            if top is None:
                raise zipfile.BadZipFile(f"it has no '{PICKLE}'")
            if f"{top}constants.pkl" in members:
                raise BadInputError(f"{doing}: it is a TorchScript program, expected a state dict; {_SAVE_SO}")
            for info in members.values():
                if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                    raise BadInputError(
                        f"{doing}: member '{info.filename[:80]}' is compressed or encrypted, expected one stored as it"
                        " is; save it again with torch.save"
                    )
                if not 0 <= info.header_offset <= size or info.file_size != info.compress_size or info.file_size > size:
                    raise zipfile.BadZipFile(f"member '{info.filename[:80]}' lies outside the file")
            order = members.get(f"{top}byteorder")
            if order is not None and order.file_size > 16:
                raise zipfile.BadZipFile("its 'byteorder' is neither 'little' nor 'big'")
            byteorder = b"little" if order is None else _content(file, order, path, start, doing)
            if byteorder not in (b"little", b"big"):
                raise zipfile.BadZipFile("its 'byteorder' is neither 'little' nor 'big'")
            described = members[f"{top}{PICKLE}"]
            if described.file_size > _LONGEST_PICKLE:
                raise zipfile.BadZipFile(f"its '{PICKLE}' has {described.file_size} bytes")
            data = _content(file, described, path, start, doing)
            # Where torch.save was told to write no checksums, all are zeros.
            checked = any(info.CRC for info in members.values())
            if checked and crc32(0, data) != described.CRC:
                raise zipfile.BadZipFile(f"checksum mismatch in '{PICKLE}'")
            storages: dict[tuple[str, str], Storage] = {}

            def storage(identity: Any) -> Storage:
                kind, what, key, *_ = identity
                if kind != "storage" or not isinstance(what, Known) or not isinstance(key, str):
                    raise ValueError("it has a persistent id that is no storage")
                name = what.name.rpartition(".")[2]
                if (name, key) not in storages:
                    info = members[f"{top}data/{key}"]
                    storages[name, key] = Storage(
                        path,
                        STORAGES.get(name),
                        data_offset(path, info, doing, start),
                        info.file_size,
                        info.CRC if checked else None,
                        byteorder.decode() == _HERE,
                    )
                    if storages[name, key].offset + info.file_size > start + size:
                        raise zipfile.BadZipFile(f"storage '{key[:80]}' ends past the end of the file")
                return storages[name, key]

            return load(data, doing, _KNOWN.get, refusal, storage)


def read_extra(path: Path, name: str) -> bytes | None:
    """Return a member that PyTorch does not look at, by its name under the archive's folder; None if there is none.

    Raises:
        BadInputError: the file cannot be read.
        CorruptFileError: the archive is damaged.
    """
    with zip_errors(f"opening '{path}'"), opened(for_library(path)) as archive:
        found = next((info for info in archive.infolist() if info.filename.partition("/")[2] == name), None)
        if found is None or found.compress_type != zipfile.ZIP_STORED or found.file_size > path.stat().st_size:
            return None
        return archive.read(found)


_HERE = "little" if np.dtype(np.int32).newbyteorder("=") == np.dtype("<i4") else "big"


def refusal(name: str) -> str:
    """Return why a pickle may not name something, and what to do, as the rest of a sentence."""
    if "_shard." in name or name.endswith(("_rebuild_wrapper_subclass", ".DTensor")):
        return _SHARDED
    return (
        "which no state dict needs: it would be run by torch.load, and is not run here;"
        f" if you trust the file, {_SAVE_SO}"
    )


def _content(file: IO[bytes], info: zipfile.ZipInfo, path: Path, start: int, doing: str) -> bytes:
    file.seek(data_offset(path, info, doing, start))
    data = file.read(info.file_size)
    if len(data) < info.file_size:
        raise zipfile.BadZipFile(f"member '{info.filename[:80]}' ends past the end of the file")
    return data


def _as_native(stored: Array, dtype: np.dtype[Any]) -> Array:
    return stored.astype(dtype)


def _tensor(
    storage: Any, start: Any, shape: Any, stride: Any, said: str | None = None, dtype: str | None = None
) -> Tensor:
    """Return the tensor, having seen that it lies inside its storage, and repeats none of its numbers."""
    sizes = (start, *shape, *stride)
    if not isinstance(storage, Storage) or len(shape) != len(stride):
        raise ValueError("it has a tensor without a storage, a shape or strides")
    if not all(isinstance(size, int) and 0 <= size < 1 << 62 for size in sizes):
        raise ValueError(f"it has a tensor of shape {_few(shape)} and strides {_few(stride)}")
    dtype = dtype if said else storage.dtype
    tensor = Tensor(storage, dtype, said or storage.dtype or "unknown", start, tuple(shape), tuple(stride))
    if dtype:
        itemsize = numpy_dtype(dtype).itemsize
        held, numbers = storage.size // itemsize, math.prod(shape)
        last = start + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
        if numbers and (last >= held or numbers > held):
            raise ValueError(
                f"it has a tensor of shape {_few(shape)} and strides {_few(stride)} from number {start} on, in a"
                f" storage of {held}"
            )
    return tensor


def _few(sizes: Any) -> str:
    return "[" + ", ".join(f"{size!s:.20}" for size in sizes[:4]) + (", ...]" if len(sizes) > 4 else "]")


def _rebuild_tensor(storage: Any, start: Any, shape: Any, stride: Any, *_: Any) -> Tensor:
    return _tensor(storage, start, shape, stride)


def _rebuild_tensor_of(
    storage: Any, start: Any, shape: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
) -> Tensor:
    if not isinstance(dtype, Known):
        raise ValueError("it has a tensor without a type")
    said = dtype.name.rpartition(".")[2]
    return _tensor(storage, start, shape, stride, said, DTYPES.get(said))


def _rebuild_from_type(make: Any, kind: Any, arguments: Any, state: Any) -> Any:
    if not isinstance(make, Known) or make.make is None or not isinstance(arguments, tuple):
        raise ValueError("it has a tensor of no kind")
    return make.make(*arguments)


def _ordered(*items: Any) -> dict[Any, Any]:
    pairs = list(items[0]) if items else []
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str | int) for pair in pairs):
        raise ValueError("it has an OrderedDict of no pairs")
    return {key: value for key, value in pairs}


def _nothing(*_: Any) -> None:
    """Stand in for an object that is of no use without PyTorch."""


_KNOWN: dict[str, Known] = {
    one.name: one
    for one in (
        Known("torch._utils._rebuild_tensor_v2", _rebuild_tensor),
        Known("torch._utils._rebuild_tensor_v3", _rebuild_tensor_of),
        Known("torch._utils._rebuild_tensor", _rebuild_tensor),
        Known("torch._utils._rebuild_parameter", lambda data, *_: data),
        Known("torch._utils._rebuild_parameter_with_state", lambda data, *_: data),
        Known("torch._tensor._rebuild_from_type_v2", _rebuild_from_type),
        Known("torch.nn.parameter.Parameter"),
        Known("torch.nn.parameter.Buffer"),
        Known("torch.Tensor"),
        Known("torch.Size", lambda sizes=(): tuple(sizes)),
        Known("torch.device", _nothing),
        Known("torch.serialization._get_layout", _nothing),
        Known("collections.OrderedDict", _ordered),
        Known("collections.Counter", _nothing),
        Known("collections.defaultdict", lambda *_: {}),
        Known("__builtin__.set", _nothing),
        Known("builtins.set", _nothing),
        Known("__builtin__.dict"),
        Known("builtins.dict"),
        Known("__builtin__.list"),
        Known("builtins.list"),
        Known("__builtin__.int"),
        Known("builtins.int"),
        Known("builtins.complex", _nothing),
        Known("builtins.bytearray", _nothing),
        Known("_codecs.encode", _nothing),
        *(Known(f"torch.{name}") for name in (*STORAGES, *_OTHER_STORAGES)),
        Known("torch.storage.UntypedStorage"),
        *(Known(f"torch.{name}") for name in (*DTYPES, *_OTHER_DTYPES)),
    )
}
"""All that a pickle of a state dict may name."""
