"""The JSON description of a table that the layouts of kvtools' own carry: HDF5, Parquet and Arrow.

{"layout": 1, "name": "ads/emb", "key_dtype": "int64", "value_dtype": "float32", "dim": 16,
 "part_rows": [11, 9], "slots": [{"name": "Adam.m", "width": 16, "dtype": "float32"}],
 "freq_dtype": "uint32", "version_dtype": "uint32", "version_unit": "seconds", "partition": "floor_mod",
 "extras": [{"name": "initial_values", "dtype": "float32", "shape": [100, 16]}], "metadata": {}}
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, TypeGuard, get_args

from kvtools.dialects.schema import ExtraSchema, SlotSchema, TableSchema, VersionUnit, numpy_dtype, row_bytes
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.partition import RULES

LAYOUT = 1
KEY_DTYPES = ("int64", "int32", "uint64", "uint32")
VALUE_DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "int32", "int64")
COUNTER_DTYPES = ("uint32", "int64", "uint64", "int32", "uint16", "int16", "uint8", "int8")
ARRAY_DTYPES = frozenset(
    [*VALUE_DTYPES, *COUNTER_DTYPES, "bool", "complex64", "complex128", "float8_e5m2", "float8_e4m3fn"]
)

_LONGEST_ROW = 1 << 31


def table_json(schema: TableSchema) -> str:
    """Return the description of a table, in ASCII."""
    record = {
        "layout": LAYOUT,
        "name": schema.name,
        "key_dtype": schema.key_dtype,
        "value_dtype": schema.value_dtype,
        "dim": schema.dim,
        "part_rows": list(schema.part_rows),
        "slots": [dataclasses.asdict(slot) for slot in schema.slots],
        "freq_dtype": schema.freq_dtype,
        "version_dtype": schema.version_dtype,
        "version_unit": schema.version_unit,
        "partition": schema.partition,
        "extras": [dataclasses.asdict(extra) for extra in schema.extras],
        "metadata": dict(schema.metadata),
    }
    return json.dumps(record)


def table_schema(text: str | bytes, dialect: str, doing: str) -> TableSchema:
    """Return the table that a description tells of; `doing` begins the messages.

    Raises:
        BadInputError: a layout of a later kvtools.
        CorruptFileError: it is no such description.
    """
    record = json_object(text, doing)
    layout = record.get("layout")
    if is_count(layout) and layout > LAYOUT:
        raise BadInputError(f"{doing}: got layout {layout}, expected at most {LAYOUT}; update kvtools")

    def field(name: str, holds: bool, expected: str) -> Any:
        if not holds or name not in record:
            got = json.dumps(record.get(name))[:80]
            raise CorruptFileError(
                f"{doing}: field '{name}' of its description is {got}, expected {expected}; write it again"
            )
        return record.get(name)

    def dtype(name: str, among: tuple[str, ...]) -> Any:
        return field(name, record.get(name) in among, " or ".join(among))

    def counter(name: str) -> Any:
        return field(name, record.get(name) in (None, *COUNTER_DTYPES), f"null or {' or '.join(COUNTER_DTYPES)}")

    field("layout", layout == LAYOUT, str(LAYOUT))
    part_rows = record.get("part_rows")
    slots, extras = record.get("slots"), record.get("extras")
    counts = isinstance(part_rows, list) and len(part_rows) > 0 and all(is_count(rows) for rows in part_rows)
    slots_hold = isinstance(slots, list) and all(_is_slot(slot) for slot in slots)
    extras_hold = isinstance(extras, list) and all(_is_extra(extra) for extra in extras)
    partition = record.get("partition")
    schema = TableSchema(
        name=field("name", isinstance(record.get("name"), str), "the table's name"),
        dialect=dialect,
        key_dtype=dtype("key_dtype", KEY_DTYPES),
        value_dtype=dtype("value_dtype", VALUE_DTYPES),
        dim=field("dim", is_count(record.get("dim")) and 0 < record["dim"] < _LONGEST_ROW, "a positive number"),
        part_rows=tuple(field("part_rows", counts, "the rows of each part")),
        slots=tuple(SlotSchema(**slot) for slot in field("slots", slots_hold, "slots with a name, width and dtype")),
        freq_dtype=counter("freq_dtype"),
        version_dtype=counter("version_dtype"),
        version_unit=dtype("version_unit", get_args(VersionUnit)),
        partition=field("partition", partition in (None, *RULES), f"null or one of {', '.join(RULES)}"),
        extras=tuple(
            ExtraSchema(extra["name"], extra["dtype"], tuple(extra["shape"]))
            for extra in field("extras", extras_hold, "arrays with a name, dtype and shape")
        ),
        metadata=field("metadata", isinstance(record.get("metadata"), dict), "an object"),
    )
    for kind in (schema.slots, schema.extras):
        names = [one.name for one in kind]
        if len(set(names)) < len(names):
            raise CorruptFileError(f"{doing}: two of its slots or extras have one name; write it again")
    size = schema.rows * row_bytes(schema) + sum(extra_bytes(extra) for extra in schema.extras)
    return dataclasses.replace(schema, bytes=size)


def extra_bytes(extra: ExtraSchema) -> int:
    """Return how many bytes an extra array takes."""
    return math.prod(extra.shape) * numpy_dtype(extra.dtype).itemsize


def json_object(text: str | bytes, doing: str) -> dict[str, Any]:
    """Return the JSON object that `text` is; raises `CorruptFileError` if it is none."""
    try:
        record = json.loads(text)
        if not isinstance(record, dict):
            raise ValueError("it is no JSON object")
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(
            f"{doing}: its description is malformed ({error}); the file is damaged, copy it again"
        ) from error
    return record


def is_count(value: Any) -> TypeGuard[int]:
    """Tell whether a number of JSON can be a length."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _is_slot(slot: Any) -> bool:
    return (
        isinstance(slot, dict)
        and slot.keys() == {"name", "width", "dtype"}
        and isinstance(slot["name"], str)
        and is_count(slot["width"])
        and 0 < slot["width"] < _LONGEST_ROW
        and slot["dtype"] in VALUE_DTYPES
    )


def _is_extra(extra: Any) -> bool:
    return (
        isinstance(extra, dict)
        and extra.keys() == {"name", "dtype", "shape"}
        and isinstance(extra["name"], str)
        and isinstance(extra["dtype"], str)
        and extra["dtype"] in ARRAY_DTYPES
        and isinstance(extra["shape"], list)
        and all(is_count(size) for size in extra["shape"])
    )
