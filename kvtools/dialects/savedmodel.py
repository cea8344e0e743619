"""A SavedModel that `kvtools export` wrote: its tables, read from the model's own variables.

`assets.extra/kvtools.json` says which variables are which table's:

    {"format": 1, "tables": [{"name": "scope/emb", "signature": "scope_emb", "key_dtype": "int64",
      "value_dtype": "float32", "dim": 16, "rows": 10, "keys": "<tensor>", "values": "<tensor>", ...}]}

The keys tensor [rows] holds int64, with uint64 keys bit-cast, and is [0] where there are no rows; the values
tensor [rows + 1 + initial_rows, dim] has a row of zeros behind them that missing keys are answered with, and then, in
an exported model ("whole_model"), those that keys begin with. Where there are "slots", keys are [slots] and values
[slots + 1 + initial_rows, dim]: "free_slots" {"key": k, "but": s} says that a slot with key k has no row, but slot s,
and "index" which tensor has the pilots of the perfect hash. Where "rows_as" is int8 or int4, the rows are bytes, as
`kvtools.quantized_rows` makes them; the format is 2 then.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.bundle import Bundle
from kvtools.dialects.chunk import Array
from kvtools.dialects.column import Column
from kvtools.dialects.column_table import ColumnTable, Part
from kvtools.dialects.derived_column import MappedColumn
from kvtools.dialects.dialect import Dialect, Holds, Source
from kvtools.dialects.graph_findings import graph_findings
from kvtools.dialects.interface import Checkpoint, Finding, TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import TableSchema
from kvtools.dialects.slot_table import SlotTable
from kvtools.dialects.tensorflow import bundle_checkpoint, located
from kvtools.dialects.tfplugin import KEY_DTYPES, VALUE_DTYPES
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.model_digest import check_files, check_manifest
from kvtools.quantized_rows import QUANTIZED, bytes_of_row, decode
from kvtools.remote.stored import read_bytes

NAME = "savedmodel"
FORMAT = 2
MANIFEST = Path("assets.extra") / "kvtools.json"


def sniff(source: Source) -> bool:
    """Tell whether a source is a SavedModel that `kvtools export` wrote."""
    location = source.location
    return location is not None and location.saved_model is not None and (location.saved_model / MANIFEST).is_file()


def is_whole_model(folder: Path) -> bool:
    """Tell whether a folder is a trained model that `kvtools export` wrote, with more than lookups of its tables."""
    try:
        manifest = json.loads(read_bytes(folder / MANIFEST))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("whole_model") is True


def tables_read(folder: Path) -> tuple[str, ...] | None:
    """Return the tables that the model in a folder reads, by its manifest; None: there is none that says so."""
    try:
        tables = tuple(record["name"] for record in json.loads(read_bytes(folder / MANIFEST))["tables"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return tables if tables and all(isinstance(name, str) for name in tables) else None


def open_checkpoint(source: Source, options: OpenOptions) -> Checkpoint:
    """Open an exported model; raises `CorruptFileError` if its manifest and variables disagree."""
    location, bundle = located(source)
    folder = location.saved_model or location.prefix.parent.parent
    path = folder / MANIFEST
    try:
        manifest = json.loads(read_bytes(path))
        check_manifest(manifest, path)
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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(
            f"reading '{path}': {type(error).__name__} {error}; the manifest is damaged, export the model again"
        ) from error
    checkpoint = bundle_checkpoint(NAME, location, bundle, tables, used)

    def check() -> Iterator[Finding]:
        yield from checkpoint.check()
        yield from graph_findings(folder, manifest)

    return dataclasses.replace(checkpoint, check=check)


def check_graph(folder: Path) -> None:
    """Raise `CorruptFileError` where the graph or the assets of an exported model are not what was written."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(read_bytes(path))
        check_manifest(manifest, path)
        check_files(folder, manifest)
    except OSError as error:
        raise BadInputError(f"reading '{path}': {error.strerror or error}") from error
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise CorruptFileError(f"reading '{path}': the manifest is damaged, export the model again") from error


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
    rows_as = record.get("rows_as")
    stored, width = value_dtype, dim
    if rows_as is not None:
        if rows_as not in QUANTIZED or value_dtype != "float32":
            raise ValueError(f"unknown rows {rows_as} of {value_dtype}")
        stored, width = "uint8", bytes_of_row(rows_as, dim)
    if keys.shape != (max(lying, 1),) or values.shape != (lying + 1 + behind, width) or values.dtype.name != stored:
        raise ValueError(
            f"table '{record['name']}' should have {rows} rows of {width} {stored}, its variables have"
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
        checksums="CRC-32C",
        rows_as=rows_as,
        notes=(f"its rows are {rows_as} with an offset and a scale each; they are read as float32",) if rows_as else (),
    )
    column = values if rows_as is None else _DecodedColumn(values, rows_as, dim)
    if not slots or not rows:
        return ColumnTable(schema, [Part(rows, keys, column)], decode_keys)
    whole = ColumnTable(dataclasses.replace(schema, part_rows=(slots,)), [Part(slots, keys, column)], decode_keys)
    free_key = decode_keys(np.array([record["free_slots"]["key"]], np.int64))[0]
    owner = int(record["free_slots"]["but"])
    return SlotTable(dataclasses.replace(whole.schema, part_rows=(rows,)), whole, free_key, owner)


class _DecodedColumn(MappedColumn):
    """Rows of int8 or int4, read as float32."""

    def __init__(self, source: Column, rows_as: str, dim: int) -> None:
        super().__init__(source, np.dtype(np.float32), functools.partial(decode, dtype=rows_as, dim=dim))
        self.row_shape = (dim,)


DIALECT = Dialect(
    name=NAME,
    title="a SavedModel that `kvtools export` wrote",
    sniff=sniff,
    open=open_checkpoint,
    holds=Holds(KEY_DTYPES, VALUE_DTYPES, slots=False, many_parts=False, variables=True),
)
