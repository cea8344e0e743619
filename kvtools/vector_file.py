"""Vectors that a user gives: a text file with a line of numbers for each, or a `.npy` file."""

from __future__ import annotations

import io
from typing import BinaryIO

import numpy as np

from kvtools.dialects.chunk import Array
from kvtools.errors import BadInputError
from kvtools.remote.stored import read_bytes

_NPY = b"\x93NUMPY"


def read_vectors(path: str, stdin: BinaryIO | None = None) -> Array:
    """Return the vectors of a file [q, dim]: numbers with spaces, tabs or commas between, a line for each vector, or an
    array [dim] or [q, dim] as .npy; `-` is standard input.

    Raises:
        BadInputError: the file cannot be read, or holds no such thing; the message names the line.
    """
    doing = f"reading vectors from '{path}'"
    if path == "-" and stdin is not None:
        data = stdin.read()
    else:
        try:
            data = read_bytes(path)
        except OSError as error:
            raise BadInputError(f"{doing}: {error.strerror or error}") from error
    vectors = _of_npy(data, doing) if data.startswith(_NPY) else _of_text(data, doing)
    if not vectors.size:
        raise BadInputError(f"{doing}: got no numbers, expected a line of them for each vector")
    return vectors


def _of_npy(data: bytes, doing: str) -> Array:
    try:
        array = np.load(io.BytesIO(data), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise BadInputError(f"{doing}: it is no .npy file: {error}") from error
    if array.ndim not in (1, 2) or array.dtype.kind not in "fiu":
        raise BadInputError(
            f"{doing}: got {array.dtype} of shape {list(array.shape)}, expected numbers of shape [dim] or [q, dim]"
        )
    return np.atleast_2d(array)


def _of_text(data: bytes, doing: str) -> Array:
    try:
        lines = data.decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise BadInputError(f"{doing}: it is neither text nor .npy: {error}") from error
    vectors: list[list[float]] = []
    for number, line in enumerate(lines, 1):
        words = line.replace(",", " ").strip(" []\t").split()
        if not words:
            continue
        try:
            vectors.append([float(word) for word in words])
        except ValueError:
            raise BadInputError(f"{doing}: line {number}: got {line[:60]!r}, expected numbers") from None
        if len(words) != len(vectors[0]):
            raise BadInputError(
                f"{doing}: line {number}: got {len(words)} numbers, expected {len(vectors[0])} as in the first one"
            )
    return np.array(vectors, np.float64).reshape(len(vectors), -1 if vectors else 0)
