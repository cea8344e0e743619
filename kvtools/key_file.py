"""Keys that a user gives: words of a command line, a text file or a `.npy` file. All commands read them here."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.errors import BadInputError, UsageError
from kvtools.remote.stored import open_binary

_BLOCK = 1 << 22
_LONGEST_KEY = 40
_NPY = b"\x93NUMPY"
_SMALLEST, _LARGEST = -(2**63), 2**64 - 1


def keys_of_words(words: Sequence[str | bytes], source: str) -> Array:
    """Return the keys [n] that words spell: int64 where all fit, else uint64, else Python integers.

    Args:
        words: a number each.
        source: where they are from, for messages.

    Raises:
        BadInputError: a word is no integer, or has more digits than any key.

    >>> keys_of_words(["5", "-7"], "example").tolist()
    [5, -7]
    """
    longest = max(words, key=len, default="")
    if len(longest) > _LONGEST_KEY:
        raise BadInputError(f"reading keys from {source}: got {longest[:40]!r}..., expected 64-bit integers")
    array = np.array(words, "S") if len(words) else np.empty(0, np.int64)
    for dtype in (np.int64, np.uint64):
        try:
            return array.astype(dtype)
        except OverflowError:
            continue
        except ValueError:
            wrong = next(word for word in words if not _is_integer(word))
            shown = wrong.decode("utf-8", "replace") if isinstance(wrong, bytes) else wrong
            raise BadInputError(f"reading keys from {source}: got {shown!r}, expected integers") from None
    return np.array([int(word) for word in words], object)


def keys_from(words: Sequence[str], file: str | None, stdin: BinaryIO | None = None) -> Array:
    """Return the keys that are given as words, and those of a file, in this order; see `key_blocks`.

    Raises:
        BadInputError: the file cannot be read, or something is no key.
    """
    found: list[Array] = []
    if words:
        found.append(_keys_of_arguments([key for word in words for key in word.split(",") if key]))
    if file is not None:
        found += key_blocks(file, stdin)
    if len({keys.dtype for keys in found}) > 1:
        found = [keys.astype(object) for keys in found]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _keys_of_arguments(words: Sequence[str]) -> Array:
    for word in words:
        check_range(word, f"reading keys from the arguments: got {word[:_LONGEST_KEY]}")
    return keys_of_words(words, "the arguments")


def check_range(word: str, doing: str) -> None:
    """Raise `UsageError`, which begins with `doing`, if a word is a whole number beyond 64 bits."""
    digits = word.lstrip("+-").lstrip("0")
    if digits.isascii() and digits.isdecimal() and (len(digits) > 20 or not _SMALLEST <= int(word) <= _LARGEST):
        more = "..." if len(word) > _LONGEST_KEY else ""
        raise UsageError(f"{doing}{more}, expected 64-bit integers, {_SMALLEST} to {_LARGEST}")


def key_blocks(path: str, stdin: BinaryIO | None = None) -> Iterator[Array]:
    """Yield the keys of a file, [n] at a time, in their order; the path "-" is standard input.

    A file is text with spaces, commas or lines between its keys, or an array [n] of integers of NumPy's `.npy`.

    Raises:
        BadInputError: the file cannot be read, or something in it is no 64-bit integer; the message names its line.
    """
    if path == "-":
        yield from read_keys(stdin or sys.stdin.buffer, "standard input")
        return
    try:
        with open_binary(path) as file:
            yield from read_keys(file, f"'{path}'")
    except OSError as error:
        raise BadInputError(f"reading keys from '{path}': {error.strerror or error}") from error


def read_keys(file: BinaryIO, source: str) -> Iterator[Array]:
    """Yield the keys of an open file; see `key_blocks`.

    >>> [keys.tolist() for keys in read_keys(io.BytesIO(b"5, -7"), "example")]
    [[5, -7]]
    """
    rest = file.read(len(_NPY))
    if rest == _NPY:
        yield _read_npy(rest + file.read(), source)
        return
    line = 1
    while True:
        block = file.read(_BLOCK)
        text = (rest + block).replace(b",", b" ")
        end = max(text.rfind(space) for space in (b"\n", b" ", b"\t")) + 1 if block else len(text)
        if len(text) - end > 1 << 16:
            raise BadInputError(f"reading keys from {source}: line {line} is too long, expected 64-bit integers")
        yield _parse(text[:end], line, source)
        line += text[:end].count(b"\n")
        rest = text[end:]
        if not block:
            return


def _parse(text: bytes, line: int, source: str) -> Array:
    words = text.split()
    try:
        keys = keys_of_words(words, source)
        if keys.dtype != object or all(_SMALLEST <= key <= _LARGEST for key in keys.tolist()):
            return keys
    except BadInputError:
        pass
    for number, words_of_line in enumerate(text.split(b"\n"), line):
        for word in words_of_line.split():
            if not _is_integer(word) or not _SMALLEST <= int(word) <= _LARGEST:
                raise BadInputError(
                    f"reading keys from {source}: line {number} is {words_of_line[:40].decode(errors='replace')!r},"
                    " expected 64-bit integers"
                )
    raise AssertionError("no word is wrong")


def _is_integer(word: str | bytes) -> bool:
    try:
        int(word)
    except ValueError:
        return False
    return len(word) <= _LONGEST_KEY


def _read_npy(data: bytes, source: str) -> Array:
    try:
        array: Array = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, EOFError, OSError, MemoryError) as error:
        raise BadInputError(f"reading keys from {source}: {error}; expected a NumPy array of integers") from error
    if array.dtype.kind not in "iu":
        raise BadInputError(f"reading keys from {source}: got an array of {array.dtype}, expected integers")
    if array.ndim != 1:
        raise BadInputError(f"reading keys from {source}: got an array {list(array.shape)}, expected integers [n]")
    return array
