"""Keys that a user gives: words of a command line, a text file or a `.npy` file. All commands read them here."""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.errors import BadInputError, UsageError
from kvtools.remote.stored import open_binary

_BLOCK = 1 << 22
_LONGEST_KEY = 40
_LONGEST_LINE = 1 << 16
_NPY = b"\x93NUMPY"
_ZIP = b"PK\x03\x04"
_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_COMMENT = re.compile(rb"#[^\r\n]*")
_INTEGER = re.compile(rb"[+-]?[0-9]+")
_NAME = re.compile(r"[^\W\d][^,;\t]*")
_KEY_COLUMNS = ("key", "keys")
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
    plain = [_bytes(word) for word in words]
    array = np.array(plain, "S") if plain else np.empty(0, np.int64)
    if (array.view(np.uint8) == ord("_")).any():  # 1_000 is a number of Python's, and nobody's key
        raise _no_integers(plain, source)
    for dtype in (np.int64, np.uint64):
        if dtype is np.uint64 and (array.view(np.uint8) == ord("-")).any():
            break  # NumPy 1 makes 2**64 - 1 of -1
        try:
            return array.astype(dtype)
        except OverflowError:
            continue
        except ValueError:
            raise _no_integers(plain, source) from None
    return np.array([int(word) for word in plain], object)


def _bytes(word: str | bytes) -> bytes:
    return word.encode("utf-8", "surrogateescape") if isinstance(word, str) else word


def _no_integers(words: Sequence[bytes], source: str) -> BadInputError:
    wrong = next(word for word in words if not is_integer(word)).decode("utf-8", "replace")
    return BadInputError(f"reading keys from {source}: got {wrong!r}, expected integers")


def keys_from(words: Sequence[str], file: str | None, stdin: BinaryIO | None = None) -> Array:
    """Return the keys that are given as words, and those of a file, in this order; see `key_blocks`.

    Raises:
        UsageError: a word is no key.
        BadInputError: the file cannot be read, or something in it is no key.
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
    try:
        return keys_of_words(words, "the arguments")
    except BadInputError as error:
        hint = "; the key of a string: kvtools hash STRING" if any(map(str.isalpha, "".join(words))) else ""
        raise UsageError(f"{error}{hint}") from None


def check_range(word: str, doing: str) -> None:
    """Raise `UsageError`, which begins with `doing`, if a word is a whole number beyond 64 bits."""
    digits = word.lstrip("+-").lstrip("0")
    if digits.isascii() and digits.isdecimal() and (len(digits) > 20 or not _SMALLEST <= int(word) <= _LARGEST):
        more = "..." if len(word) > _LONGEST_KEY else ""
        raise UsageError(f"{doing}{more}, expected 64-bit integers, {_SMALLEST} to {_LARGEST}")


def key_blocks(path: str, stdin: BinaryIO | None = None) -> Iterator[Array]:
    """Yield the keys of a file, [n] at a time, in their order; the path "-" is standard input.

    A file is text with spaces, commas or lines between its keys, or an array [n] of integers of NumPy's `.npy`. In
    text, `#` begins a comment, and the first line may be a header. Under a header of several columns, with commas,
    semicolons, tabs or spaces between, keys are the column called `key`.

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
    if rest.startswith(_ZIP):
        raise BadInputError(
            f"reading keys from {source}: it is a zip archive, as .npz is, expected text or .npy; write its keys alone:"
            " np.save('keys.npy', keys)"
        )
    if rest.startswith(_UTF16):
        raise BadInputError(f"reading keys from {source}: it is in UTF-16, expected UTF-8: `iconv -f UTF-16`")
    rest = rest.removeprefix(_BOM)
    line, header = 1, None
    while True:
        block = file.read(_BLOCK)
        text = rest + block
        if b"\0" in text:
            raise BadInputError(f"reading keys from {source}: it is binary, expected text or .npy")
        end = _whole_part(text) if block else len(text)
        if len(text) - end > _LONGEST_LINE:
            raise BadInputError(f"reading keys from {source}: line {line} is too long, expected 64-bit integers")
        part = _COMMENT.sub(b"", text[:end]) if b"#" in text else text[:end]
        if header is None and part.strip():
            header, part = _header(part, source)
        if header is not None and len(header.columns) > 1:
            yield _parse_column(part, header, line, source)
        else:
            yield _parse(part.replace(b",", b" "), line, source)
        line += text[:end].count(b"\n")
        rest = text[end:]
        if not block:
            return


def _whole_part(text: bytes) -> int:
    """Return how much of a text ends with a whole line, or, of one long line, with a whole word."""
    end = text.rfind(b"\n") + 1
    if end:
        return end
    comment = text.find(b"#")
    return max(text.rfind(space, 0, None if comment < 0 else comment) for space in (b",", b" ", b"\t")) + 1


@dataclass(frozen=True)
class _Header:
    """The columns of a text, none if it has no header, and what stands between them: None for spaces."""

    columns: tuple[str, ...] = ()
    separator: str | None = None

    @property
    def key(self) -> int:
        """Which column has the keys."""
        return next(i for i, name in enumerate(self.columns) if name in _KEY_COLUMNS)


def _header(text: bytes, source: str) -> tuple[_Header, bytes]:
    """Return the header that a text begins with, and the text without it, an empty line in its place."""
    start = len(text) - len(text.lstrip())
    end = next((at for at in range(start, len(text)) if text[at] in b"\r\n"), len(text))
    first = text[start:end].decode("utf-8", "replace").strip()
    separator = next((character for character in ",;\t" if character in first), None)
    names = tuple(name.strip().strip('"').lower() for name in first.split(separator))
    if not _NAME.fullmatch(names[0]):
        return _Header(), text
    if separator is None and not {*names} & {*_KEY_COLUMNS}:
        names = (first,)  # a name of several words
    header = _Header(names, separator)
    if len(names) > 1 and not {*names} & {*_KEY_COLUMNS}:
        raise BadInputError(
            f"reading keys from {source}: got a header of {len(names)} columns, {first[:60]!r}, expected one called key"
        )
    return header, text[:start] + text[end:]


def _parse_column(text: bytes, header: _Header, line: int, source: str) -> Array:
    lines = text.decode("utf-8", "replace").split("\n")
    cells = [_cells(one, header.separator)[header.key : header.key + 1] for one in lines]
    words = [cell[0].strip() if cell else "" for cell in cells]
    if all(word or not one.strip() for word, one in zip(words, lines, strict=True)):
        try:
            keys = keys_of_words([word for word in words if word], source)
            if keys.dtype != object or all(_SMALLEST <= key <= _LARGEST for key in keys.tolist()):
                return keys
        except BadInputError:
            pass
    for number, (word, one) in enumerate(zip(words, lines, strict=True), line):
        if one.strip() and not (word and is_integer(word) and _SMALLEST <= int(word) <= _LARGEST):
            raise BadInputError(
                f"reading keys from {source}: line {number} is {one.strip()[:40]!r}, expected a 64-bit integer in"
                f" column {header.key + 1}"
            )
    raise AssertionError("no cell is wrong")


def _cells(line: str, separator: str | None) -> list[str]:
    if '"' in line:
        return next(csv.reader([line], delimiter=separator or " "), [])
    return line.split(separator)


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
            if not is_integer(word) or not _SMALLEST <= int(word) <= _LARGEST:
                raise BadInputError(
                    f"reading keys from {source}: line {number} is {words_of_line[:40].decode(errors='replace')!r},"
                    " expected 64-bit integers"
                )
    raise AssertionError("no word is wrong")


def is_integer(word: str | bytes) -> bool:
    """Tell whether a word is a whole number in ASCII: not `1_000`, which Python takes for one."""
    return len(word) <= _LONGEST_KEY and _INTEGER.fullmatch(_bytes(word)) is not None


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
