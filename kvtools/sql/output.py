"""The answer to a query as a file: Parquet, comma-separated values or JSON lines, whole or not at all."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvtools.csv_rows import csv_header as header_line
from kvtools.csv_rows import csv_lines
from kvtools.dialects.arrow_columns import numpy_numbers
from kvtools.errors import UsageError
from kvtools.json_numbers import json_numbers, json_ready
from kvtools.replace_output import replace_files
from kvtools.sql.result import QueryResult

_ROW_GROUP_BYTES = 64 << 20


def check_format(target: Path) -> None:
    """Raise `UsageError` where the name of a file does not tell which of the formats it is to be of."""
    if target.suffix.lower() not in _WRITERS:
        raise UsageError(
            f"writing '{target}': its name does not tell the format, expected one that ends with {', '.join(_WRITERS)}"
        )


def write_result(
    result: QueryResult, target: Path, *, force: bool = False, dry_run: bool = False, wide_as_text: bool = False
) -> int:
    """Write the answer to a query to a file, of the format that its name says, and return how many rows it has.

    With `dry_run` all is done but the file stays away.

    Parquet keeps types: vectors are fixed_size_list. In comma-separated values a vector is a column for each number,
    `value.0`, `value.1`, ..., and NULL is nothing. JSON lines have an object for each row. NaN and infinities are
    written "NaN", "Infinity" and "-Infinity" in both. Columns of the same name are numbered. With `wide_as_text`
    integers of 64 bits and more are strings in JSON lines.

    Raises:
        UsageError: the name tells no format, or a column has a type that the format has not.
        OutputError: the file exists and may not be replaced, or the disk refuses it.
        KvtoolsError: whatever the query fails with; the file is not there then.
    """
    check_format(target)
    with replace_files(target, force=force, dry_run=dry_run) as staging, staging.open("wb") as file:
        write = _WRITERS[target.suffix.lower()]
        if write is _write_json_lines:
            return _write_json_lines(result, file, wide_as_text=wide_as_text)
        return write(result, file)


def column_labels(result: QueryResult) -> list[str]:
    """Return the names of the columns of an answer, those that come again numbered.

    >>> from types import SimpleNamespace
    >>> column_labels(SimpleNamespace(column_names=["key", "norm", "key"]))
    ['key', 'norm', 'key_2']
    """
    taken: set[str] = set()
    labels = []
    for name in result.column_names:
        label, number = name, 2
        while label in taken:
            label, number = f"{name}_{number}", number + 1
        taken.add(label)
        labels.append(label)
    return labels


def json_columns(batch: Any, *, wide_as_text: bool = False) -> list[list[Any]]:
    """Return the columns of a record batch as lists of what JSON has; with `wide_as_text` integers of 64 bits and more,
    which JavaScript and others round, are strings."""
    return [
        [_wide_as_text(value, column.type) for value in column.to_pylist()]
        if wide_as_text and _has_wide(column.type)
        else _json_column(column)
        for column in batch.columns
    ]


def _is_wide(kind: Any) -> bool:
    """Whether a type is of integers that a float64 does not hold; DuckDB's of 128 bits come as decimals."""
    import pyarrow.types as types

    return bool((types.is_integer(kind) and kind.bit_width >= 64) or (types.is_decimal(kind) and kind.scale == 0))


def _has_wide(kind: Any) -> bool:
    """Whether a type has such integers in it."""
    return _is_wide(kind) or any(_has_wide(kind.field(at).type) for at in range(kind.num_fields))


def _wide_as_text(value: Any, kind: Any) -> Any:
    """Return a value of a type as JSON has it, with strings for integers of 64 bits and more, however deep."""
    import pyarrow.types as types

    if value is None:
        return None
    if _is_wide(kind):
        return str(int(value))
    if types.is_map(kind):
        return [[_wide_as_text(name, kind.key_type), _wide_as_text(each, kind.item_type)] for name, each in value]
    if types.is_struct(kind):
        return {str(name): _wide_as_text(each, kind.field(name).type) for name, each in value.items()}
    if types.is_nested(kind) and kind.num_fields == 1:
        return [_wide_as_text(each, kind.value_type) for each in value]
    return _json_value(value)


def _json_column(column: Any) -> list[Any]:
    import pyarrow.types as types

    kind = column.type
    if (types.is_integer(kind) or types.is_floating(kind)) and not column.null_count:
        numbers: list[Any] = json_numbers(numpy_numbers(column))
        return numbers
    if types.is_fixed_size_list(kind) and types.is_floating(kind.value_type) and not column.null_count:
        flat = column.flatten()
        if not flat.null_count and len(column):
            rows: list[Any] = json_numbers(numpy_numbers(flat).reshape(len(column), -1))
            return rows
    return [_json_value(value) for value in column.to_pylist()]


def _json_value(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return json_ready(value)
    if isinstance(value, list | tuple):
        return [_json_value(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _json_value(each) for name, each in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    as_tuple = getattr(value, "as_tuple", None)  # a decimal, as of a sum of int64
    if as_tuple is not None:
        return int(value) if as_tuple().exponent >= 0 else float(value)
    return str(value)


def _write_parquet(result: QueryResult, file: BinaryIO) -> int:
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema(
        [field.with_name(label) for field, label in zip(result.schema, column_labels(result), strict=True)]
    )
    rows = held = 0
    waiting: list[Any] = []
    try:
        with parquet.ParquetWriter(file, schema, compression="zstd") as writer:

            def flush() -> None:
                nonlocal held
                if waiting:
                    writer.write_table(pyarrow.Table.from_batches(waiting, schema=schema))
                waiting.clear()
                held = 0

            for batch in result.batches():
                waiting.append(pyarrow.RecordBatch.from_arrays(batch.columns, schema=schema))
                rows += len(batch)
                held += batch.nbytes
                if held >= _ROW_GROUP_BYTES:
                    flush()
            flush()
    except pyarrow.ArrowNotImplementedError as error:
        raise UsageError(f"writing Parquet: {error}; cast that column, or write .jsonl") from error
    return rows


def _write_json_lines(result: QueryResult, file: BinaryIO, *, wide_as_text: bool = False) -> int:
    labels, rows = column_labels(result), 0
    for batch in result.batches():
        file.write("".join(f"{line}\n" for line in json_lines(batch, labels, wide_as_text=wide_as_text)).encode())
        rows += len(batch)
    return rows


def json_lines(
    batch: Any, labels: list[str], dumps: Callable[[Any], str] = json.dumps, *, wide_as_text: bool = False
) -> Iterator[str]:
    """Yield the rows of a record batch, each a JSON object of its columns under these names; see `json_columns`."""
    for row in zip(*json_columns(batch, wide_as_text=wide_as_text), strict=True):
        yield dumps(dict(zip(labels, row, strict=True)))


def _write_csv(result: QueryResult, file: BinaryIO) -> int:
    rows = 0
    file.write(csv_header(result).encode())
    for batch in result.batches():
        file.write(csv_rows(batch))
        rows += len(batch)
    return rows


def csv_header(result: QueryResult) -> str:
    """Return the first line of an answer as comma-separated values."""
    names: list[str] = []
    for label, field in zip(column_labels(result), result.schema, strict=True):
        width = _width(field.type)
        names += [label] if width is None else [f"{label}.{number}" for number in range(width)]
    return header_line(names) + "\n"


def csv_rows(batch: Any) -> bytes:
    """Return the rows of a record batch as comma-separated values."""
    columns = [number for column in batch.columns for number in _numbers_of(column)]
    if columns and all(_is_plain(column) for column in columns):
        return b"".join(csv_lines([numpy_numbers(column) for column in columns]))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(zip(*(_texts(column) for column in columns), strict=True))
    return text.getvalue().encode()


def _width(kind: Any) -> int | None:
    """Return how many columns of comma-separated values a type takes, None where it is no vector."""
    import pyarrow.types as types

    return int(kind.list_size) if types.is_fixed_size_list(kind) and not types.is_nested(kind.value_type) else None


def _numbers_of(column: Any) -> Iterator[Any]:
    """Yield a column of vectors as columns of numbers, any other as it is."""
    import pyarrow
    import pyarrow.compute as compute

    width = _width(column.type)
    if width is None:
        yield column
        return
    # Numbers are there for rows that are NULL, too, and for those before the first of a slice.
    flat = column.values.slice(column.offset * width, len(column) * width)
    for at in range(width):
        numbers = flat.take(pyarrow.array(np.arange(at, len(flat), width)))
        yield compute.if_else(column.is_valid(), numbers, None) if column.null_count else numbers


def _is_plain(column: Any) -> bool:
    """Whether a column is numbers, one in each row."""
    import pyarrow.types as types

    return not column.null_count and bool(types.is_floating(column.type) or types.is_integer(column.type))


def _texts(column: Any) -> list[str | None]:
    """Return the cells of a column, None for NULL."""
    import pyarrow.types as types

    kind = column.type
    if types.is_floating(kind) or types.is_integer(kind):
        valid = column.is_valid().to_pylist()
        texts = b"".join(csv_lines([numpy_numbers(column.fill_null(0))])).decode().splitlines()
        return [text if there else None for text, there in zip(texts, valid, strict=True)]
    if types.is_boolean(kind):
        return [None if value is None else str(value).lower() for value in column.to_pylist()]
    values = [_json_value(value) for value in column.to_pylist()]
    return [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]


_WRITERS: dict[str, Callable[[QueryResult, BinaryIO], int]] = {
    ".parquet": _write_parquet,
    ".csv": _write_csv,
    ".jsonl": _write_json_lines,
    ".ndjson": _write_json_lines,
}
"""What writes a file, by how its name ends."""
