"""Lists of keys that a user gives: text with a key per line, or a `.npy` file of integers."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from kvtools.dialects.chunk import Array
from kvtools.errors import BadInputError

_BLOCK = 1 << 22
_NPY = b"\x93NUMPY"


@dataclass(frozen=True)
class KeyList:
    """Keys, sorted and each once: those of int64 in `signed`, those above its largest in `above`, uint64."""

    signed: npt.NDArray[np.int64]
    above: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.signed) + len(self.above)

    def contains(self, keys: Array) -> npt.NDArray[np.bool_]:
        """Return which of `keys` [n], any integer type, are in the list, bool [n].

        >>> key_list([-1, 5, 2**64 - 1]).contains(np.array([2**64 - 1, 7, 5], np.uint64)).tolist()
        [True, False, True]
        """
        if keys.dtype != np.uint64:
            return _in_sorted(keys.astype(np.int64, copy=False), self.signed)
        small = keys <= np.uint64(np.iinfo(np.int64).max)
        found = np.empty(len(keys), np.bool_)
        found[small] = _in_sorted(keys[small].astype(np.int64), self.signed)
        found[~small] = _in_sorted(keys[~small], self.above)
        return found


def key_list(keys: Array | Sequence[int]) -> KeyList:
    """Return a list of these integers; raises `OverflowError` for one of more than 64 bits.

    >>> len(key_list([5, 7, 5]))
    2
    """
    # NumPy would make floats of integers that no one type of its own holds.
    array = keys if isinstance(keys, np.ndarray) else np.array(keys, object)
    if array.dtype == object:  # Python's own integers, of both kinds
        numbers = array.tolist()
        top = np.iinfo(np.int64).max
        signed = np.array([number for number in numbers if number <= top], np.int64)
        return KeyList(np.unique(signed), np.unique(np.array([n for n in numbers if n > top], np.uint64)))
    if array.dtype == np.uint64:
        small = array <= np.uint64(np.iinfo(np.int64).max)
        return KeyList(np.unique(array[small].astype(np.int64)), np.unique(array[~small]))
    return KeyList(np.unique(array.astype(np.int64)), np.empty(0, np.uint64))


def read_key_list(path: str) -> KeyList:
    """Read a list of keys: text with one integer per line, or a `.npy` array of integers; `-` is standard input.

    The list is held in memory, 8 bytes a key.

    Raises:
        BadInputError: the file is missing, or a line is no 64-bit integer.
    """
    if path == "-":
        return _read(sys.stdin.buffer, "standard input")
    try:
        with Path(path).open("rb") as file:
            return _read(file, path)
    except OSError as error:
        raise BadInputError(f"reading keys from '{path}': {error.strerror or error}") from error


def _read(file: BinaryIO, name: str) -> KeyList:
    head = file.read(len(_NPY))
    if head == _NPY:
        return _read_npy(head + file.read(), name)
    parts = [np.empty(0, np.int64)]
    above = [np.empty(0, np.uint64)]
    line, rest = 1, head
    while True:
        block = file.read(_BLOCK)
        text = rest + block
        end = text.rfind(b"\n") + 1 if block else len(text)
        if len(text) - end > 1 << 16:
            raise BadInputError(f"reading keys from '{name}': line {line} is too long; expected one integer per line")
        found = _parse(text[:end], line, name)
        parts.append(found.signed)
        above.append(found.above)
        line += text[:end].count(b"\n")
        rest = text[end:]
        if not block:
            return KeyList(np.unique(np.concatenate(parts)), np.unique(np.concatenate(above)))


def _parse(text: bytes, line: int, name: str) -> KeyList:
    try:
        numbers = [int(word) for word in text.split(b"\n") if word.strip()]
        return key_list(np.array(numbers, object))
    except (ValueError, OverflowError):
        for offset, word in enumerate(text.split(b"\n")):
            try:
                if word.strip() and not -(2**63) <= int(word) < 2**64:
                    raise ValueError
            except ValueError:
                raise BadInputError(
                    f"reading keys from '{name}': line {line + offset} is {word[:40].decode(errors='replace')!r},"
                    " expected one 64-bit integer per line"
                ) from None
        raise


def _read_npy(data: bytes, name: str) -> KeyList:
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise BadInputError(f"reading keys from '{name}': {error}; expected a NumPy array of integers") from error
    if array.dtype.kind not in "iu":
        raise BadInputError(f"reading keys from '{name}': got an array of {array.dtype}, expected integers")
    return key_list(array.reshape(-1))


def _in_sorted(keys: Array, table: Array) -> npt.NDArray[np.bool_]:
    if not len(table):
        return np.zeros(len(keys), np.bool_)
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    found: npt.NDArray[np.bool_] = table[at] == keys
    return found
