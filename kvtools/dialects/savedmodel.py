"""A SavedModel that `kvtools export` wrote: its tables, read from the model's own variables.

`assets.extra/kvtools.json` says which variables are which table's:

    {"format": 1, "tables": [{"name": "scope/emb", "signature": "scope_emb", "key_dtype": "int64",
      "value_dtype": "float32", "dim": 16, "rows": 10, "keys": "<tensor>", "values": "<tensor>", ...}]}

The keys tensor [rows] holds int64, with uint64 keys bit-cast, and is [0] where there are no rows; the values
tensor [rows + 1 + initial_rows, dim] has a row of zeros behind them that missing keys are answered with, and then, in
an exported model ("whole_model"), those that keys begin with. Where there are "slots", keys are [slots] and values
[slots + 1 + initial_rows, dim]: "free_slots" {"key": k, "but": s} says that a slot with key k has no row, but slot s,
and "index" which tensor has the pilots of the perfect hash.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.bundle import Bundle
from kvtools.dialects.chunk import Array
from kvtools.dialects.column_table import ColumnTable, Part
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import TableSchema
from kvtools.dialects.slot_table import SlotTable
from kvtools.dialects.tensorflow import bundle_checkpoint, located
from kvtools.dialects.tfplugin import KEY_DTYPES, VALUE_DTYPES
from kvtools.errors import BadInputError, CorruptFileError

NAME = "savedmodel"
FORMAT = 1
MANIFEST = Path("assets.extra") / "kvtools.json"


def sniff(source: Source) -> bool:
    """Tell whether a source is a SavedModel that `kvtools export` wrote."""
    location = source.location
    return location is not None and location.saved_model is not None and (location.saved_model / MANIFEST).is_file()


def is_whole_model(folder: Path) -> bool:
    """Tell whether a folder is a trained model that `kvtools export` wrote, with more than lookups of its tables."""
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("whole_model") is True


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open an exported model; raises `CorruptFileError` if its manifest and variables disagree."""
    location, bundle = located(source)
    folder = location.saved_model or location.prefix.parent.parent
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
        if manifest["format"] > FORMAT:
            raise BadInputError(
                f"reading '{path}': got format {manifest['format']}, expected at most {FORMAT}; update kvtools"
            )
        tables: dict[str, TableReader] = {}
        used: set[str] = set()
        for record in manifest["tables"]:
            table = _open_table(bundle, record)
            tables[table.schema.name] = table
            used |= {record["keys"], record["values"], *([record["index"]] if "index" in record else [])}
    except OSError as error:
        raise BadInputError(f"reading '{path}': {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptFileError(
            f"reading '{path}': {type(error).__name__} {error}; the manifest is damaged, export the model again"
        ) from error
    return bundle_checkpoint(NAME, location, bundle, tables, used)


def _open_table(bundle: Bundle, record: dict[str, Any]) -> TableReader:
    keys, values = bundle.tensor(record["keys"]), bundle.tensor(record["values"])
    rows, dim = int(record["rows"]), int(record["dim"])
    key_dtype = str(record["key_dtype"])
    value_dtype = str(record["value_dtype"])
    if key_dtype not in KEY_DTYPES or value_dtype not in VALUE_DTYPES:
        raise ValueError(f"unknown types {key_dtype} and {value_dtype}")
    behind = int(record.get("initial_rows", 0))
    slots = int(record.get("slots", 0))
    lying = slots or rows
    if keys.shape != (max(lying, 1),) or values.shape != (lying + 1 + behind, dim) or values.dtype.name != value_dtype:
        raise ValueError(
            f"table '{record['name']}' should have {rows} rows of {dim} {value_dtype}, its variables have"
            f" shapes {list(keys.shape)} and {list(values.shape)}"
        )

    def decode_keys(stored: Array) -> Array:
        return stored.view(np.uint64) if key_dtype == "uint64" else stored.astype(key_dtype, copy=False)

    schema = TableSchema(
        name=str(record["name"]),
        dialect=NAME,
        key_dtype=key_dtype,
        value_dtype=value_dtype,
        dim=dim,
        part_rows=(rows,),
        bytes=bundle.nbytes(keys.name) + bundle.nbytes(values.name),
    )
    if not slots or not rows:
        return ColumnTable(schema, [Part(rows, keys, values)], decode_keys)
    free_key = decode_keys(np.array([record["free_slots"]["key"]], np.int64))[0]
    whole = ColumnTable(dataclasses.replace(schema, part_rows=(slots,)), [Part(slots, keys, values)], decode_keys)
    return SlotTable(
        dataclasses.replace(whole.schema, part_rows=(rows,)), whole, free_key, int(record["free_slots"]["but"])
    )


DIALECT = Dialect(
    name=NAME,
    title="a SavedModel that `kvtools export` wrote",
    sniff=sniff,
    open=open_checkpoint,
    holds=Holds(KEY_DTYPES, VALUE_DTYPES, slots=False, many_parts=False, variables=True),
)
