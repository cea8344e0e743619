"""Keys as a set, to keep or to cut rows by."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtools.dialects.chunk import Array
from kvtools.errors import BadInputError, UsageError
from kvtools.key_file import key_blocks


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
    """Return a list of these integers; raises `OverflowError` for one of more than 64 bits, `UsageError` for none.

    >>> len(key_list([5, 7, 5]))
    2
    """
    # NumPy would make floats of integers that no one type of its own holds.
    array = keys if isinstance(keys, np.ndarray) else np.array(keys, object)
    if array.dtype == object:  # Python's own integers, of both kinds
        try:
            numbers = [operator.index(key) for key in array.tolist()]
        except TypeError as error:
            raise UsageError(f"listing keys: {error}, expected integers [n]") from error
        top = np.iinfo(np.int64).max
        signed = np.array([number for number in numbers if number <= top], np.int64)
        return KeyList(np.unique(signed), np.unique(np.array([n for n in numbers if n > top], np.uint64)))
    if array.dtype == np.uint64:
        small = array <= np.uint64(np.iinfo(np.int64).max)
        return KeyList(np.unique(array[small].astype(np.int64)), np.unique(array[~small]))
    if array.dtype.kind not in "iu" and len(array):
        raise UsageError(f"listing keys: got {array.dtype}{list(array.shape)}, expected integers [n]")
    return KeyList(np.unique(array.astype(np.int64)), np.empty(0, np.uint64))


def read_key_list(path: str) -> KeyList:
    """Read a list of keys from a file; see `kvtools.key_file.key_blocks`. It is held in memory, 8 bytes a key.

    Raises:
        BadInputError: the file is missing, or something in it is no 64-bit integer.
    """
    blocks = [key_list(keys) for keys in key_blocks(path)]
    signed = np.concatenate([np.empty(0, np.int64), *(block.signed for block in blocks)])
    above = np.concatenate([np.empty(0, np.uint64), *(block.above for block in blocks)])
    return KeyList(np.unique(signed), np.unique(above))


def read_keys_to_keep(path: str) -> KeyList:
    """Read a list of the only keys to keep, as `read_key_list` does.

    Raises:
        BadInputError: as for `read_key_list`, and where no key is listed: an empty pipe is no wish to keep nothing.
    """
    keys = read_key_list(path)
    if not len(keys):
        source = "standard input" if path == "-" else f"'{path}'"
        raise BadInputError(
            f"reading keys to keep from {source}: there is none, so every row would be cut; list those to keep, or"
            " cut all rows with a top-k of 0"
        )
    return keys


def _in_sorted(keys: Array, table: Array) -> npt.NDArray[np.bool_]:
    if not len(table):
        return np.zeros(len(keys), np.bool_)
    at = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    found: npt.NDArray[np.bool_] = table[at] == keys
    return found
