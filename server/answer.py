"""The one core, from the bytes of a request to the bytes of its answer: parse, look up, encode.

Nothing here knows of sockets or of FastAPI. Each function may be called from any thread, and raises `RequestError` for
what is wrong with the request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools import _snapshot
from kvtools.client.pooling import pool
from kvtools.lookup_frame import MEDIA_TYPE as FRAME
from kvtools.lookup_frame import MISSING, TableKeys, TableRows, decode_request, encode_answer
from kvtools.server import codecs
from kvtools.server.catalog import ServedVersion
from kvtools.server.codecs import JSON, Codec
from kvtools.server.request import (
    BINARY,
    RequestError,
    parse_key,
    parse_lookup,
    parse_tables,
    table_keys,
    unknown_table,
)
from kvtools.server.settings import Settings
from kvtools.server.store import StoredTable, lookup_errors

# JSON of more numbers than this is made and sent block by block.
STREAMED_NUMBERS = 262_144
_NAMED_KEYS = 10
FRAMES = Codec("frame", "frame")


@dataclass(frozen=True, slots=True)
class TableCount:
    """How many keys were looked up in a table of a model, and how many of them have no row."""

    table: str
    keys: int
    missing: int
    model: str = ""


@dataclass(slots=True)
class Answer:
    """An answer before it becomes HTTP: `body`, or where that is None, `blocks` of it, made as they are asked for."""

    status: int
    media_type: str
    body: bytes | None
    headers: dict[str, str] = field(default_factory=dict)
    blocks: Iterator[bytes] | None = None
    counts: tuple[TableCount, ...] = ()
    code: str = ""  # of an error


def answer_lookup(
    version: ServedVersion, table: str, body: bytes, codec: Codec, missing: str | None, settings: Settings
) -> Answer:
    """Answer a lookup in one table, plain or pooled.

    `missing` is what a key without a row gets ("zeros", "default", "error"), where the body does not say it; None: what
    the settings say.
    """
    stored = _stored(version, table)
    if codec.reads == "frame" or codec.writes == "frame":
        raise RequestError(
            415, "unsupported_media", "frames are for POST /v1/tables:lookup, which takes one table, too"
        )
    binary = codec.reads == "binary"
    done = (
        None
        if stored.table is None
        else _snapshot.answer(
            stored.table,
            body,
            binary,
            codec.writes == "binary",
            MISSING.index(missing or settings.missing),
            settings.max_keys,
            settings.max_values if codec.writes == "binary" else min(settings.max_values, STREAMED_NUMBERS),
            version.recent.get(table),
        )
    )
    if done is not None:
        return _done(version, table, stored, codec, *done)
    lookup, said = parse_lookup(
        body, table, binary=binary, key_dtype=stored.schema.key_dtype, max_keys=settings.max_keys
    )
    _check_values([(lookup, stored)], settings)
    version.note(table, lookup.keys)
    rows = _look_up(stored, lookup, said or missing or settings.missing)
    headers = {"X-Embedding-Version": str(version.number)}
    counts = (TableCount(table, len(lookup.keys), rows.missing, version.model),)
    if codec.writes == "binary":
        count, dim = rows.embeddings.shape
        headers |= {"X-Embedding-Shape": f"{count},{dim}", "X-Embedding-Missing": str(rows.missing)}
        return Answer(200, BINARY, codecs.binary_rows(rows.embeddings), headers, counts=counts)
    return _json_answer(codecs.json_table(rows), rows.embeddings.size, headers, counts)


def answer_tables(
    version: ServedVersion,
    body: bytes,
    codec: Codec,
    missing: str | None,
    settings: Settings,
    authorize: Callable[[list[str]], None] = lambda tables: None,
) -> Answer:
    """Answer a lookup in several tables at once; see `answer_lookup`. `authorize` gets their names, and may raise."""
    if "binary" in (codec.reads, codec.writes):
        raise RequestError(415, "unsupported_media", f"the binary form of several tables is {FRAME}, not {BINARY}")
    tables = version.store.tables
    if codec == FRAMES:
        done = _answer_frame(version, body, missing, settings, authorize)
        if done is not None:
            return done
    lookups, said = parse_tables(
        body,
        frame=codec.reads == "frame",
        key_dtypes=_KeyTypes(tables),
        max_keys=settings.max_keys,
    )
    names = [lookup.table for lookup in lookups]
    authorize(names)
    wanted = [(lookup, tables[lookup.table]) for lookup in lookups]
    _check_values(wanted, settings)
    for lookup in lookups:
        version.note(lookup.table, lookup.keys)
    how = said or missing or settings.missing
    answers = [_look_up(stored, lookup, how) for lookup, stored in wanted]
    headers = {"X-Embedding-Version": str(version.number)}
    counts = tuple(
        TableCount(lookup.table, len(lookup.keys), rows.missing, version.model)
        for lookup, rows in zip(lookups, answers, strict=True)
    )
    if codec.writes == "frame":
        frame = encode_answer(answers, version.number, [lookup.own_type for lookup in lookups])
        return Answer(200, FRAME, frame, headers, counts=counts)
    if len(set(names)) < len(names):
        raise RequestError(400, "bad_body", "a table comes twice, which JSON cannot answer; ask for a frame")
    numbers = sum(rows.embeddings.size for rows in answers)
    return _json_answer(codecs.json_tables(names, answers), numbers, headers, counts)


def answer_row(
    version: ServedVersion, table: str, key: str, codec: Codec, missing: str | None, settings: Settings
) -> Answer:
    """Answer with the row of one key; a missing one is an error unless `missing` says otherwise."""
    stored = _stored(version, table)
    pattern = parse_key(key, stored.schema.key_dtype)
    rows = _look_up(stored, TableKeys(table, pattern), missing or "error")
    headers = {"X-Embedding-Version": str(version.number)}
    counts = (TableCount(table, 1, rows.missing, version.model),)
    if codec.writes == "binary":
        headers |= {"X-Embedding-Shape": f"1,{rows.embeddings.shape[1]}", "X-Embedding-Missing": str(rows.missing)}
        return Answer(200, BINARY, codecs.binary_rows(rows.embeddings), headers, counts=counts)
    return Answer(200, JSON, codecs.json_row(int(key), rows.embeddings), headers, counts=counts)


def _answer_frame(
    version: ServedVersion,
    body: bytes,
    missing: str | None,
    settings: Settings,
    authorize: Callable[[list[str]], None],
) -> Answer | None:
    names = _snapshot.frame_tables(body)
    if names is None:
        return None
    try:
        tables = [version.store.tables[name].table for name in names]
    except KeyError:
        return None
    if None in tables:  # rows that come from elsewhere
        return None
    authorize(names)
    how = MISSING.index(missing or settings.missing)
    done = _snapshot.answer_frame(tables, body, how, settings.max_keys, settings.max_values, version.number)
    if done is None:
        return None
    frame, counted = done
    if names and (recent := version.recent.get(names[0])) and recent.due():
        for lookup in decode_request(body)[0]:
            version.note(lookup.table, lookup.keys)
    headers = {"X-Embedding-Version": str(version.number)}
    counts = tuple(TableCount(name, *count, version.model) for name, count in zip(names, counted, strict=True))
    return Answer(200, FRAME, frame, headers, counts=counts)


def _done(
    version: ServedVersion,
    table: str,
    stored: StoredTable,
    codec: Codec,
    body: bytes,
    keys: int,
    rows: int,
    missing: int,
) -> Answer:
    headers = {"X-Embedding-Version": str(version.number)}
    counts = (TableCount(table, keys, missing, version.model),)
    if codec.writes == "json":
        return Answer(200, JSON, body, headers, counts=counts)
    headers["X-Embedding-Shape"] = f"{rows},{stored.schema.dim}"
    headers["X-Embedding-Missing"] = str(missing)
    return Answer(200, BINARY, body, headers, counts=counts)


def _look_up(stored: StoredTable, lookup: TableKeys, how: str) -> TableRows:
    keys = table_keys(lookup.keys, stored.schema.key_dtype, stored.key_limits)
    default = _default_row(stored, lookup.table) if how == "default" else None
    if lookup.combiner is None or lookup.row_splits is None:
        values, found = stored.lookup(keys)
        missing = len(found) - int(np.count_nonzero(found))
        if missing and how == "error":
            raise _missing_keys(lookup.table, keys[~found])
        if missing and default is not None:
            values[~found] = default
        return TableRows(values, found, missing)
    if stored.table is None:  # Rows that come from elsewhere are pooled here.
        values, found = stored.lookup(keys)
        pooled, missing = pool(values, lookup.row_splits, lookup.combiner, lookup.weights), int((~found).sum())
        if missing and how == "error":
            raise _missing_keys(lookup.table, keys[~found])
        return TableRows(pooled, None, missing)
    with lookup_errors(stored):
        pooled, missing = stored.table.pool(
            np.ascontiguousarray(keys),
            np.ascontiguousarray(lookup.row_splits),
            lookup.combiner,
            weights=lookup.weights,
            missing=None if default is None else default.astype(np.float32),
        )
    if missing and how == "error":
        raise _missing_keys(lookup.table, keys[~stored.lookup(keys)[1]])
    return TableRows(pooled, None, missing)


def _default_row(stored: StoredTable, table: str) -> npt.NDArray[Any]:
    row = None if stored.table is None else stored.table.default_row
    if row is None:
        raise RequestError(
            400, "no_default_row", f"table '{table}' has no default row; expected missing 'zeros' or 'error'"
        )
    return row


def _missing_keys(table: str, keys: npt.NDArray[Any]) -> RequestError:
    first = ", ".join(str(key) for key in keys[:_NAMED_KEYS].tolist())
    more = "" if len(keys) <= _NAMED_KEYS else f" and {len(keys) - _NAMED_KEYS} more"
    return RequestError(404, "missing_keys", f"table '{table}' has no row of {first}{more}")


def _stored(version: ServedVersion, table: str) -> StoredTable:
    try:
        return version.store.tables[table]
    except KeyError:
        raise unknown_table(table) from None


def _check_values(wanted: list[tuple[TableKeys, StoredTable]], settings: Settings) -> None:
    numbers = sum(max(len(lookup.keys), lookup.bags) * stored.schema.dim for lookup, stored in wanted)
    if numbers > settings.max_values:
        keys = sum(max(len(lookup.keys), lookup.bags) for lookup, _ in wanted)
        most = max(1, settings.max_values * keys // numbers)
        raise RequestError(
            413,
            "too_many_values",
            f"{keys} keys are {numbers} numbers, expected at most {settings.max_values};"
            f" send several requests of at most {most} keys",
        )


def _json_answer(
    blocks: Iterator[bytes], numbers: int, headers: dict[str, str], counts: tuple[TableCount, ...]
) -> Answer:
    if numbers > STREAMED_NUMBERS:
        return Answer(200, JSON, None, headers, blocks, counts)
    return Answer(200, JSON, b"".join(blocks), headers, counts=counts)


class _KeyTypes(dict[str, str]):
    """The key type of each of `tables`, read as it is asked for."""

    def __init__(self, tables: dict[str, StoredTable]) -> None:
        super().__init__()
        self._tables = tables

    def __missing__(self, name: str) -> str:
        return self._tables[name].schema.key_dtype
