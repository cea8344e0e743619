"""How the keys of a request come and how its rows go: as JSON, as plain binary, or as a frame.

JSON has no NaN and no infinity: such values are the strings "NaN", "Infinity" and "-Infinity"; the binary forms have
their bits. A number is written in as few digits as tell it from its neighbours: as a float64 for a table of float64, as
an integer for one of integers, and as a float32 for any other, which has float16 and bfloat16 exactly.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvtools import _snapshot
from kvtools.lookup_frame import MEDIA_TYPE as FRAME
from kvtools.lookup_frame import TableRows
from kvtools.server.request import BINARY

JSON = "application/json"
Form = Literal["json", "binary", "frame"]
_FORMS: dict[str, Form] = {JSON: "json", BINARY: "binary", FRAME: "frame"}
_AS_THEY_ARE = {np.dtype(name) for name in ("float32", "float64", "int8", "int32", "int64", "bool")}
_MOST_INT64 = np.iinfo(np.int64).max
# What is written at once, so that an answer of any size takes little memory and leaves others their turn.
_NUMBERS_AT_ONCE = 65536


@dataclass(frozen=True)
class Codec:
    """The form of a request and that of its answer. "binary" is int64 keys, or float32 rows, and nothing else."""

    reads: Form
    writes: Form


@lru_cache(256)
def choose_codec(content_type: str, accept: str) -> Codec:
    """Return what two headers ask for. Keys are JSON unless Content-Type is one of the binary types; rows are
    JSON unless Accept prefers one of these.

    >>> choose_codec("application/octet-stream", "*/*")
    Codec(reads='binary', writes='json')
    """
    reads = _FORMS.get(content_type.partition(";")[0].strip().lower(), "json")
    weights = dict.fromkeys(_FORMS, 0.0)
    for item in accept.split(","):
        media, *parameters = (part.strip().lower() for part in item.split(";"))
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    weight = float(parameter[2:])
                except ValueError:
                    weight = 0.0
        if media in weights:
            weights[media] = weight
    best = max(weights, key=lambda media: weights[media])  # JSON, the first, where they are even
    return Codec(reads, _FORMS[best])


def json_numbers(values: npt.NDArray[Any]) -> bytes:
    """Return rows `values` [n, dim] of any table's or model's type as JSON, without brackets around all of them."""
    if values.dtype == np.uint64 and values.size and values.max() > _MOST_INT64:
        return json.dumps(values.tolist(), separators=(",", ":"))[1:-1].encode()
    if values.dtype not in _AS_THEY_ARE:
        values = values.astype(np.int64 if values.dtype.kind in "iu" else np.float32)
    return _snapshot.json_rows(np.ascontiguousarray(values))


def json_table(rows: TableRows) -> Iterator[bytes]:
    """Yield the answer of one table as JSON, in blocks."""
    values = rows.embeddings
    step = max(1, _NUMBERS_AT_ONCE // max(1, values.shape[1]))
    yield b'{"embeddings":['
    for start in range(0, len(values), step):
        yield (b"," if start else b"") + json_numbers(values[start : start + step])
    if rows.found is None:
        yield b'],"missing":%d}' % rows.missing
    else:
        yield b'],"found":[' + _snapshot.json_flags(rows.found) + b"]}"


def json_tables(names: list[str], answers: list[TableRows]) -> Iterator[bytes]:
    """Yield the answers of several tables as JSON, in blocks."""
    yield b'{"tables":{'
    for number, (name, rows) in enumerate(zip(names, answers, strict=True)):
        yield (b"," if number else b"") + json.dumps(name).encode() + b":"
        yield from json_table(rows)
    yield b"}}"


def json_row(key: int, values: npt.NDArray[Any]) -> bytes:
    """Return the answer of one key, `values` [1, dim], as JSON."""
    return b'{"key":%d,"embedding":%s}' % (key, json_numbers(values))


def binary_rows(values: npt.NDArray[Any]) -> bytes:
    """Return rows of any table's type as little-endian float32."""
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinity, as it would anywhere
        return values.astype("<f4", copy=False).tobytes()
