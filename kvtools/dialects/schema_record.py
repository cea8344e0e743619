"""A table's schema as JSON: how kvtools' own layouts in other containers (npz, safetensors, Redis) describe a table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from kvtools.dialects.dialect import Holds
from kvtools.dialects.interface import ExtraSchema, OpenOptions, SlotSchema, TableSchema, row_bytes
from kvtools.errors import BadInputError, CorruptFileError, UsageError

FORMAT = 1
KEY_DTYPES = ("int64", "int32", "uint64", "uint32")
VALUE_DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "int32", "int64", "bool")
COUNTER_DTYPES = ("int64", "uint32", "uint64", "int32", "uint16")
_UNITS = ("seconds", "days", "steps", "unknown")

OWN_HOLDS = Holds(
    key_dtypes=KEY_DTYPES,
    value_dtypes=VALUE_DTYPES,
    freq_dtypes=COUNTER_DTYPES,
    version_dtypes=COUNTER_DTYPES,
    many_parts=False,
    extras=frozenset(
        {"initial_values", "blacklist", "filtered_keys", "filtered_freqs", "filtered_versions", "deleted_keys"}
    ),
    metadata=frozenset({"initializer", "slots"}),
)
"""What such a layout holds: every column of every type, in one part."""


def schema_record(schema: TableSchema, **places: Any) -> dict[str, Any]:
    """Return the description of a table, with what the container adds to say where the rows are.

    >>> schema_record(TableSchema("emb", "npz", "int64", "float32", 4, (7,)), columns={})["rows"]
    7
    """
    return {
        "name": schema.name,
        "key_dtype": schema.key_dtype,
        "value_dtype": schema.value_dtype,
        "dim": schema.dim,
        "rows": schema.rows,
        "slots": [{"name": slot.name, "width": slot.width, "dtype": slot.dtype} for slot in schema.slots],
        "freq_dtype": schema.freq_dtype,
        "version_dtype": schema.version_dtype,
        "version_unit": schema.version_unit,
        "extras": [{"name": e.name, "dtype": e.dtype, "shape": list(e.shape)} for e in schema.extras],
        "metadata": dict(schema.metadata),
        **places,
    }


def encode_description(tables: Sequence[Mapping[str, Any]], **others: Any) -> str:
    """Return the JSON that describes a whole container: its tables, and what else the container needs."""
    return json.dumps({"format": FORMAT, "tables": list(tables), **others}, separators=(",", ":"))


def decode_description(text: str | bytes, doing: str) -> dict[str, Any]:
    """Return what `encode_description` wrote.

    Raises:
        BadInputError: a later format than this kvtools knows.
        CorruptFileError: it is no such description.
    """
    try:
        description = json.loads(text)
        if not isinstance(description, dict) or not is_count(description.get("format")):
            raise ValueError("it is no object with a format")
        if not isinstance(description.get("tables"), list) or not all(
            isinstance(record, dict) for record in description["tables"]
        ):
            raise ValueError("it has no list of tables")
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(
            f"{doing}: got a damaged description of its tables ({error}), expected the JSON that kvtools writes; write"
            " it again"
        ) from error
    if description["format"] > FORMAT:
        raise BadInputError(f"{doing}: got format {description['format']}, expected at most {FORMAT}; update kvtools")
    return description


def decode_schema(record: Mapping[str, Any], dialect: str, doing: str) -> TableSchema:
    """Return the schema that `schema_record` described; raises `CorruptFileError` naming the field that is wrong."""

    def wrong(name: str, expected: str) -> CorruptFileError:
        got = json.dumps(record.get(name))[:80]
        return CorruptFileError(
            f"{doing}: field '{name}' of a table's description is {got}, expected {expected}; write it again"
        )

    def checked(name: str, known: Sequence[str | None]) -> Any:
        value = record.get(name)
        if not (value is None or isinstance(value, str)) or value not in known:
            raise wrong(name, " or ".join(map(str, known)))
        return value

    name, dim, rows = record.get("name"), record.get("dim"), record.get("rows")
    if not isinstance(name, str):
        raise wrong("name", "a text")
    if not is_count(dim) or dim < 1:
        raise wrong("dim", "a positive number")
    if not is_count(rows):
        raise wrong("rows", "a number")
    try:
        slots = tuple(SlotSchema(slot["name"], slot["width"], slot["dtype"]) for slot in record["slots"])
        assert all(isinstance(s.name, str) and is_count(s.width) and s.dtype in VALUE_DTYPES for s in slots)
        assert len({slot.name for slot in slots}) == len(slots)
    except (AssertionError, KeyError, TypeError):
        raise wrong("slots", "objects of different names, each with a width and a dtype") from None
    try:
        extras = tuple(ExtraSchema(e["name"], e["dtype"], tuple(e["shape"])) for e in record["extras"])
        assert all(isinstance(e.name, str) and all(map(is_count, e.shape)) for e in extras)
        assert all(e.dtype in KEY_DTYPES + VALUE_DTYPES + COUNTER_DTYPES for e in extras)
    except (AssertionError, KeyError, TypeError):
        raise wrong("extras", "objects with a name, a dtype and a shape") from None
    metadata = record.get("metadata")
    if not isinstance(metadata, dict):
        raise wrong("metadata", "an object")
    schema = TableSchema(
        name=name,
        dialect=dialect,
        key_dtype=checked("key_dtype", KEY_DTYPES),
        value_dtype=checked("value_dtype", VALUE_DTYPES),
        dim=dim,
        part_rows=(rows,),
        slots=slots,
        freq_dtype=checked("freq_dtype", (None, *COUNTER_DTYPES)),
        version_dtype=checked("version_dtype", (None, *COUNTER_DTYPES)),
        version_unit=checked("version_unit", _UNITS),
        extras=extras,
        metadata=metadata,
    )
    return dataclasses.replace(schema, bytes=rows * row_bytes(schema))


def check_options(schema: TableSchema, options: OpenOptions, doing: str) -> None:
    """Raise `UsageError` where the options contradict what the format records."""
    for option, wanted, got in (
        ("--key-dtype", options.key_dtype, schema.key_dtype),
        ("--value-dtype", options.value_dtype, schema.value_dtype),
        ("--dim", options.dim, schema.dim),
    ):
        if wanted is not None and wanted != got:
            raise UsageError(f"{doing}: got {option} {wanted}, it says {got}; leave the option out")


def is_count(value: Any) -> TypeGuard[int]:
    """Tell whether a value of JSON is a whole number, 0 or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
