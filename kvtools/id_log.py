"""Logs of the ids that a model looked up: read a batch of examples at a time, never whole.

    Parquet, CSV (or TSV)   a row for each example: a column for each feature, of integers or (Parquet) lists; or
                            where there are columns `table` and `key`, a row for each lookup
    .npy                    integers [n] or [n, k]: a row for each example, all of one table; or an array whose
                            fields are columns

A folder is the Parquet files in it, by name. A row without an id (a null, an empty cell) looks nothing up. Times are
Unix seconds or Arrow timestamps, in the column `timestamp` or `time` unless another is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.dialects.arrow_columns import import_pyarrow
from kvtools.dialects.chunk import Array
from kvtools.errors import BadInputError, KvtoolsError, UsageError
from kvtools.file_kind import file_kind
from kvtools.remote.stored import keep_below
from kvtools.table_names import near

TABLE, KEY = "table", "key"
"""The columns of a log with a row for each lookup."""

TIMES = ("timestamp", "time")
ARRAY = "ids"
"""What the one column of an array without fields is called."""

_ROWS_AT_ONCE = 1 << 16
_CSV_BLOCK = 1 << 22
_LAST_SECOND = 2**32
_LISTS = ("List(", "LargeList(", "FixedSizeList(", "ListView(", "LargeListView(")


@dataclass(frozen=True)
class Ids:
    """The ids of one feature in some examples: integers [n] in order, and how many each has; one each if None."""

    keys: Array
    lengths: Array | None = None

    def __len__(self) -> int:
        """How many examples these are."""
        return len(self.keys if self.lengths is None else self.lengths)


@dataclass(frozen=True)
class LogBatch:
    """Some examples of a log, one after the other: `ids` by feature (a column; of a log of lookups, a table).

    `seconds` is the Unix time of the last of them that has the largest, None where the log has no times. `labels` [n]
    are there where they were asked for.
    """

    examples: int
    ids: Mapping[str, Ids]
    seconds: float | None = None
    labels: Array | None = None


@dataclass
class _Rows:
    """Rows as they were read: `ids` by feature, times and labels [n]."""

    count: int
    ids: dict[str, Ids]
    times: Array | None
    labels: Array | None


@dataclass
class IdLog:
    """A log that was opened; `features` are the names of the columns that can be ids, empty of a log of lookups.

    `others` are the other columns, and what they hold. `share_read` is how much was read, from 0 to 1; `backwards`
    counts batches of times before the `latest` one.
    """

    path: str
    features: tuple[str, ...]
    others: Mapping[str, str] = field(default_factory=dict)
    time_column: str | None = None
    of_lookups: bool = False
    share_read: float = 0.0
    backwards: int = 0
    latest: float = -math.inf

    def feature(self, name: str) -> str:
        """Return the name of a column that has ids.

        Raises:
            UsageError: there is no such column, or it holds something else.
        """
        if name in self.features:
            return name
        doing = f"reading the log '{self.path}'"
        if name in self.others:
            raise UsageError(f"{doing}: {self.why_no_ids(name)}")
        known = [*self.features, *self.others]
        raise UsageError(f"{doing}: it has no column '{name}', but {_listed(known)}{near(name, known)}")

    def why_no_ids(self, name: str) -> str:
        """Say why a column that is there holds no ids, and what to do."""
        kind = self.others[name]
        if kind in ("float", "double", "halffloat"):
            return (
                f"column '{name}' holds floats ({kind}), and ids are whole numbers; where it has empty cells, some"
                " program wrote NaN for them: write it again as nullable integers (Int64 in pandas); of a CSV, ids of"
                " 2^63 and more count as floats: write them as Parquet (uint64)"
            )
        if kind in ("string", "large_string", "string_view", "binary", "large_binary"):
            return (
                f"column '{name}' holds {kind}s, and ids are whole numbers; write the keys that training makes of them:"
                " kvtools.string_keys(column) gives those of strings"
            )
        return f"column '{name}' holds {kind}, expected whole numbers, or lists of them"

    def batches(self, features: Sequence[str], examples: int, *, labels: str | None = None) -> Iterator[LogBatch]:
        """Yield the log, so many examples at a time.

        Args:
            features: which columns to read; of a log of lookups none: those of all tables come.
            examples: of each batch but the last.
            labels: the column of labels, 0 or 1 (or true and false), if they are wanted.

        Raises:
            BadInputError: the log has no rows, or something in it is no id, time or label.
        """
        if labels is not None and self.of_lookups:
            raise UsageError(f"reading the log '{self.path}': labels go with examples, and its rows are lookups")
        self.share_read, self.backwards, self.latest = 0.0, 0, -math.inf
        left: _Rows | None = None
        any_row = False
        for read in self._rows(tuple(features), labels):
            any_row = any_row or read.count > 0
            rows = read if left is None else _joined(left, read)
            offsets = {
                name: None if ids.lengths is None else np.concatenate([[0], np.cumsum(ids.lengths)])
                for name, ids in rows.ids.items()
            }
            whole = rows.count // examples * examples
            for start in range(0, whole, examples):
                batch = _cut(rows, offsets, start, start + examples)
                self._note(batch)
                yield batch
            left = _as_rows(_cut(rows, offsets, whole, rows.count), rows, whole)
        if not any_row:
            raise BadInputError(f"reading the log '{self.path}': it has no rows")
        if left is not None and left.count:
            batch = LogBatch(left.count, left.ids, _last(left.times), left.labels)
            self._note(batch)
            yield batch
        self.share_read = 1.0

    def _note(self, batch: LogBatch) -> None:
        if batch.seconds is not None:
            self.backwards += batch.seconds < self.latest
            self.latest = max(self.latest, batch.seconds)

    def _rows(self, features: tuple[str, ...], labels: str | None) -> Iterator[_Rows]:
        raise NotImplementedError


def open_log(path: str, *, time_column: str | None = None, key_dtypes: Mapping[str, str] | None = None) -> IdLog:
    """Open a log of ids; what kind it is, its name says.

    Args:
        path: a Parquet, CSV, TSV or .npy file, or a folder of Parquet files.
        time_column: the column of times; `timestamp` or `time`, if there is one, if None.
        key_dtypes: the integer type of columns of a CSV file, where it is known.

    Raises:
        BadInputError: there is no such file, or it is none of these, or damaged.
        UsageError: there is no such column of times.
        MissingDependencyError: pyarrow is needed, and not installed.
    """
    doing = f"reading the log '{path}'"
    place = Path(path)
    if not place.exists():
        raise BadInputError(f"{doing}: there is no such file")
    keep_below(place)
    if place.is_dir():
        files = sorted(place.glob("*.parquet"))
        if not files:
            raise BadInputError(f"{doing}: the folder has no file *.parquet")
        return _ParquetLog.open(path, files, time_column)
    if (kind := file_kind(place)) is not None:
        raise BadInputError(f"{doing}: it is {kind}, expected a file, as it is read several times")
    with place.open("rb") as file:
        magic = file.read(6)
    if magic == b"\x93NUMPY":
        return _ArrayLog.open(path, time_column)
    if magic[:4] == b"PAR1":
        return _ParquetLog.open(path, [place], time_column)
    name = place.name.lower().removesuffix(".gz")
    if not name.endswith((".csv", ".tsv", ".txt")):
        raise BadInputError(f"{doing}: it is no Parquet file and no .npy file; a text file is called .csv or .tsv")
    return _TextLog.open_text(path, time_column, key_dtypes or {})


# ---- Columns


def _joined(first: _Rows, second: _Rows) -> _Rows:
    def both(one: Array | None, other: Array | None) -> Array | None:
        return None if one is None or other is None else np.concatenate([one, other])

    ids = {}
    for name in {**first.ids, **second.ids}:
        pieces = [
            rows.ids.get(name, Ids(np.empty(0, np.int64), np.zeros(rows.count, np.int64))) for rows in (first, second)
        ]
        keys = [piece.keys for piece in pieces if len(piece.keys)]
        lengths = None
        if any(piece.lengths is not None for piece in pieces):
            lengths = np.concatenate(
                [np.ones(len(piece), np.int64) if piece.lengths is None else piece.lengths for piece in pieces]
            )
        ids[name] = Ids(np.concatenate(keys) if keys else pieces[0].keys, lengths)
    return _Rows(first.count + second.count, ids, both(first.times, second.times), both(first.labels, second.labels))


def _cut(rows: _Rows, offsets: Mapping[str, Array | None], start: int, end: int) -> LogBatch:
    ids = {}
    for name, column in rows.ids.items():
        at = offsets[name]
        if at is None or column.lengths is None:
            ids[name] = Ids(column.keys[start:end])
        else:
            ids[name] = Ids(column.keys[at[start] : at[end]], column.lengths[start:end])
    times = None if rows.times is None else rows.times[start:end]
    return LogBatch(end - start, ids, _last(times), None if rows.labels is None else rows.labels[start:end])


def _as_rows(batch: LogBatch, rows: _Rows, start: int) -> _Rows:
    times = None if rows.times is None else rows.times[start:].copy()
    copies = {
        name: Ids(ids.keys.copy(), None if ids.lengths is None else ids.lengths.copy())
        for name, ids in batch.ids.items()
    }
    return _Rows(batch.examples, copies, times, None if batch.labels is None else batch.labels.copy())


def _last(times: Array | None) -> float | None:
    return float(times.max()) if times is not None and len(times) else None


def _checked_times(times: Array, doing: str, column: str) -> Array:
    if times.dtype.kind == "f" and not np.isfinite(times).all():
        raise BadInputError(f"{doing}: column '{column}' has a time that is no number")
    times = times.astype(np.float64)
    if len(times) and not (times.min() >= 0 and times.max() < _LAST_SECOND):
        wrong = times.max() if times.max() >= _LAST_SECOND else times.min()
        raise BadInputError(
            f"{doing}: column '{column}' has the time {wrong:.0f}, expected Unix seconds; milliseconds and the"
            f" like are to"
            " be Arrow timestamps"
        )
    return times


def _checked_labels(labels: Array, doing: str, column: str) -> Array:
    labels = labels.astype(np.float64)
    if not np.isin(labels, (0.0, 1.0)).all():
        wrong = labels[~np.isin(labels, (0.0, 1.0))][0]
        raise BadInputError(f"{doing}: column '{column}' has the label {wrong:g}, expected 0 or 1")
    return labels.astype(np.bool_)


def _time_column(known: Sequence[str], wanted: str | None, doing: str) -> str | None:
    if wanted is None:
        return next((name for name in TIMES if name in known), None)
    if wanted not in known:
        raise UsageError(f"{doing}: it has no column '{wanted}' of times, but {_listed(known)}{near(wanted, known)}")
    return wanted


def _listed(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:most])
    return (shown or "none") + (f" and {len(names) - most} more" if len(names) > most else "")


# ---- Arrow: Parquet and CSV


class _ArrowLog(IdLog):
    """What Parquet and CSV have in common: record batches."""

    def _record_batches(self, columns: list[str]) -> Iterator[Any]:
        raise NotImplementedError

    @classmethod
    def _of(cls, path: str, schema: Any, time_column: str | None, **more: Any) -> Any:
        names = list(schema.names)
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise BadInputError(f"reading the log '{path}': two of its columns are called '{twice}'")
        doing = f"reading the log '{path}'"
        time = _time_column(names, time_column, doing)
        lookups = TABLE in names and KEY in names
        features, others = [], {}
        for column in schema:
            if column.name == time:
                continue
            if _has_ids(column.type):
                features.append(column.name)
            else:
                others[column.name] = str(column.type)
        log = cls(path, tuple(features), others, time, lookups, **more)
        if lookups:
            log.feature(KEY)
            if TABLE in features:
                raise BadInputError(f"{doing}: column '{TABLE}' holds numbers, expected the names of tables")
            log.features = ()
        return log

    def _rows(self, features: tuple[str, ...], labels: str | None) -> Iterator[_Rows]:
        pyarrow = import_pyarrow(f"reading the log '{self.path}'")
        doing = f"reading the log '{self.path}'"
        wanted = [TABLE, KEY] if self.of_lookups else list(features)
        wanted += [name for name in (self.time_column, labels) if name is not None and name not in wanted]
        try:
            for batch in self._record_batches(wanted):
                columns = dict(zip(batch.schema.names, batch.columns, strict=True))
                times = None
                if self.time_column is not None:
                    times = _arrow_times(pyarrow, columns[self.time_column], doing, self.time_column)
                marks = None if labels is None else _arrow_labels(pyarrow, columns[labels], doing, labels)
                if self.of_lookups:
                    ids = _of_tables(columns[TABLE], columns[KEY], doing)
                else:
                    ids = {name: _arrow_ids(columns[name]) for name in features}
                yield _Rows(batch.num_rows, ids, times, marks)
        except (pyarrow.ArrowException, OSError) as error:
            raise BadInputError(f"{doing}: {str(error).splitlines()[0]}") from error


def _has_ids(kind: Any) -> bool:
    if str(type(kind).__name__).startswith(("List", "LargeList", "FixedSizeList")):
        kind = kind.value_type
    # A column of nulls alone looks nothing up.
    return str(kind) in ("null", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


def _arrow_ids(column: Any) -> Ids:
    if not hasattr(column, "flatten") or not hasattr(column.type, "value_type"):
        if str(column.type) == "null":
            return Ids(np.empty(0, np.int64), np.zeros(len(column), np.int64))
        if not column.null_count:
            return Ids(column.to_numpy(zero_copy_only=False))
        lengths = column.is_valid().to_numpy(zero_copy_only=False).astype(np.int64)
        return Ids(column.drop_null().to_numpy(zero_copy_only=False), lengths)
    import pyarrow.compute as compute

    keys = column.flatten()  # without those of null lists
    lengths = compute.fill_null(compute.list_value_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    if keys.null_count:
        there = keys.is_valid().to_numpy(zero_copy_only=False)
        owners = np.repeat(np.arange(len(lengths)), lengths)
        lengths = np.bincount(owners[there], minlength=len(lengths)).astype(np.int64)
        keys = keys.drop_null()
    return Ids(keys.to_numpy(zero_copy_only=False), lengths)


def _of_tables(tables: Any, keys: Any, doing: str) -> dict[str, Ids]:
    names = tables if hasattr(tables, "dictionary") else tables.dictionary_encode()
    if names.null_count or keys.null_count:
        raise BadInputError(f"{doing}: a row has no {TABLE if names.null_count else KEY}")
    codes = names.indices.to_numpy(zero_copy_only=False)
    numbers = keys.to_numpy(zero_copy_only=False)
    ids = {}
    for code, name in enumerate(names.dictionary.to_pylist()):
        of_table = codes == code
        ids[str(name)] = Ids(numbers[of_table], of_table.astype(np.int64))
    return ids


def _arrow_times(pyarrow: Any, column: Any, doing: str, name: str) -> Array:
    if column.null_count:
        raise BadInputError(f"{doing}: column '{name}' has rows without a time")
    if pyarrow.types.is_timestamp(column.type) or pyarrow.types.is_date(column.type):
        micros = column.cast(pyarrow.timestamp("us")).cast(pyarrow.int64())
        return _checked_times(micros.to_numpy(zero_copy_only=False) / 1e6, doing, name)
    if not (pyarrow.types.is_integer(column.type) or pyarrow.types.is_floating(column.type)):
        raise BadInputError(f"{doing}: column '{name}' holds {column.type}, expected Unix seconds or timestamps")
    return _checked_times(column.to_numpy(zero_copy_only=False), doing, name)


def _arrow_labels(pyarrow: Any, column: Any, doing: str, name: str) -> Array:
    kind = column.type
    known = pyarrow.types
    if column.null_count or not (known.is_boolean(kind) or known.is_integer(kind) or known.is_floating(kind)):
        what = "rows without a label" if column.null_count else str(kind)
        raise BadInputError(f"{doing}: column '{name}' holds {what}, expected 0 or 1")
    return _checked_labels(column.to_numpy(zero_copy_only=False), doing, name)


class _ParquetLog(_ArrowLog):
    files: list[Path]

    @classmethod
    def open(cls, path: str, files: list[Path], time_column: str | None) -> _ParquetLog:
        doing = f"reading the log '{path}'"
        pyarrow = import_pyarrow(doing)
        import pyarrow.parquet as parquet

        try:
            schema = parquet.read_schema(files[0])
        except (pyarrow.ArrowException, OSError) as error:
            raise BadInputError(f"{doing}: '{files[0].name}': {str(error).splitlines()[0]}") from error
        log: _ParquetLog = cls._of(path, schema, time_column)
        log.files = files
        return log

    def _record_batches(self, columns: list[str]) -> Iterator[Any]:
        import pyarrow.parquet as parquet

        for number, path in enumerate(self.files):
            with parquet.ParquetFile(path) as file:
                missing = [name for name in columns if name not in file.schema_arrow.names]
                if missing:
                    raise BadInputError(f"reading the log '{self.path}': '{path.name}' has no column '{missing[0]}'")
                rows, done = max(1, file.metadata.num_rows), 0
                for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns):
                    done += batch.num_rows
                    self.share_read = (number + done / rows) / len(self.files)
                    yield batch.select(columns)


class _TextLog(_ArrowLog):
    key_types: Mapping[str, str]

    @classmethod
    def open_text(cls, path: str, time_column: str | None, key_dtypes: Mapping[str, str]) -> _TextLog:
        doing = f"reading the log '{path}'"
        pyarrow = import_pyarrow(doing)
        if Path(path).stat().st_size == 0:
            raise BadInputError(f"{doing}: it is empty; its first line names the columns")
        try:
            with _open_text(pyarrow, path, {}) as reader:
                schema = reader.schema
                for name in key_dtypes:
                    index = schema.get_field_index(name)
                    if index >= 0 and key_dtypes[name] == "uint64" and str(schema.field(index).type) == "double":
                        schema = schema.set(index, pyarrow.field(name, pyarrow.uint64()))
        except (pyarrow.ArrowException, OSError) as error:
            raise BadInputError(f"{doing}: {str(error).splitlines()[0]}") from error
        log: _TextLog = cls._of(path, schema, time_column)
        log.key_types = {column.name: column.type for column in schema}
        return log

    def _record_batches(self, columns: list[str]) -> Iterator[Any]:
        import pyarrow

        size = max(1, Path(self.path).stat().st_size)
        types = {name: self.key_types[name] for name in columns}
        with Path(self.path).open("rb") as raw:
            packed = self.path.lower().endswith(".gz")
            stream = pyarrow.CompressedInputStream(raw, "gzip") if packed else raw
            with _open_text(pyarrow, stream, types, self.path) as reader:
                for batch in reader:
                    self.share_read = min(1.0, raw.tell() / size)
                    yield batch


def _open_text(pyarrow: Any, source: Any, types: Mapping[str, Any], path: str | None = None) -> Any:
    from pyarrow import csv

    name = str(path or source).lower().removesuffix(".gz")
    return csv.open_csv(
        source,
        read_options=csv.ReadOptions(block_size=_CSV_BLOCK),
        parse_options=csv.ParseOptions(delimiter="\t" if name.endswith(".tsv") else ","),
        # "NaN" is a float, and no way to say that there is no id.
        convert_options=csv.ConvertOptions(
            include_columns=list(types) or None, column_types=dict(types), null_values=[""], strings_can_be_null=False
        ),
    )


# ---- NumPy


class _ArrayLog(IdLog):
    array: Array

    @classmethod
    def open(cls, path: str, time_column: str | None) -> _ArrayLog:
        doing = f"reading the log '{path}'"
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError) as error:
            raise BadInputError(f"{doing}: {error}") from error
        names = array.dtype.names or (ARRAY,)
        time = _time_column(names if array.dtype.names else (), time_column, doing)
        features, others = [], {}
        for name in names:
            kind = array.dtype.fields[name][0] if array.dtype.fields else array.dtype
            if name == time:
                continue
            base = kind.base
            if base.kind in "iu":
                features.append(name)
            else:
                others[name] = {"float64": "double", "float32": "float", "float16": "halffloat"}.get(
                    base.name, base.name
                )
        if array.ndim not in ((1,) if array.dtype.names else (1, 2)):
            raise BadInputError(f"{doing}: it has {array.ndim} dimensions, expected integers [n] or [n, k]")
        log = cls(path, tuple(features), others, time)
        log.array = array
        if not array.dtype.names and not features:
            log.feature(ARRAY)  # raises what the array holds
        return log

    def _rows(self, features: tuple[str, ...], labels: str | None) -> Iterator[_Rows]:
        doing = f"reading the log '{self.path}'"
        for start in range(0, len(self.array), _ROWS_AT_ONCE):
            rows = np.array(self.array[start : start + _ROWS_AT_ONCE])
            ids = {}
            for name in features:
                column = rows[name] if rows.dtype.names else rows
                lengths = None if column.ndim == 1 else np.full(len(column), column.shape[1], np.int64)
                ids[name] = Ids(np.ascontiguousarray(column).reshape(-1), lengths)
            times = (
                None if self.time_column is None else _checked_times(rows[self.time_column], doing, self.time_column)
            )
            marks = None
            if labels is not None:
                if not rows.dtype.names or labels not in rows.dtype.names:
                    raise UsageError(f"{doing}: it has no column '{labels}' of labels")
                marks = _checked_labels(rows[labels], doing, labels)
            self.share_read = min(1.0, (start + len(rows)) / max(1, len(self.array)))
            yield _Rows(len(rows), ids, times, marks)


# ---- Which table


def features_of_tables(log: IdLog, wanted: Sequence[str], tables: Sequence[str] | None) -> dict[str, str]:
    """Return, by column of a log of examples, whose ids it has.

    Args:
        log: the log.
        wanted: COLUMN=TABLE each; a column that is not named here has the ids of the table of its name.
        tables: the tables there are; any name if None.

    Raises:
        UsageError: a column or a table that there is not.
    """
    found: dict[str, str] = {}
    for text in wanted:
        column, equals, table = text.partition("=")
        if not (column and equals and table):
            raise UsageError(f"reading the log '{log.path}': got --column {text}, expected COLUMN=TABLE")
        if log.of_lookups:
            raise UsageError(
                f"reading the log '{log.path}': got --column {text}, and its rows say themselves which table they"
                f" are of"
            )
        check_table(log, table, tables)
        found[log.feature(column)] = table
    if tables is not None:
        found |= {name: name for name in log.features if name in tables and name not in found}
    return found


def unused_columns(log: IdLog, used: Iterable[str], why: str = "no table has that name") -> str | None:
    """Say which columns of whole numbers are of no table, and how they would be of one; None where there are none.

    >>> unused_columns(IdLog("log.csv", ("user", "item")), ["user"])
    "the log's column 'item' is not used: no table has that name; --column item=TABLE says whose ids it has"
    """
    taken = {*used}
    left = [name for name in log.features if name not in taken]
    if not left:
        return None
    what = f"column {_listed(left)} is" if len(left) == 1 else f"columns {_listed(left)} are"
    return f"the log's {what} not used: {why}; --column {left[0]}=TABLE says whose ids it has"


def check_table(log: IdLog, table: str, tables: Sequence[str] | None) -> None:
    """Raise `UsageError` where there is no such table; it names those that are near."""
    if tables is None or table in tables:
        return
    known = f"{_listed(list(tables))}{near(table, tables)}"
    raise UsageError(f"reading the log '{log.path}': there is no table '{table}', but {known}")


def as_keys(ids: Array, dtype: np.dtype[Any], doing: str) -> Array:
    """Return ids as keys of a table's type.

    Raises:
        KvtoolsError: an id that is no key of this type.
    """
    if ids.dtype == dtype:
        return np.ascontiguousarray(ids)
    limits = np.iinfo(dtype)
    if len(ids) and not (int(ids.min()) >= limits.min and int(ids.max()) <= limits.max):
        wrong = int(ids.min()) if int(ids.min()) < limits.min else int(ids.max())
        raise BadInputError(f"{doing}: id {wrong} is no {dtype} key, expected {limits.min} to {limits.max}")
    return np.ascontiguousarray(ids.astype(dtype))


__all__ = [
    "ARRAY",
    "IdLog",
    "Ids",
    "KvtoolsError",
    "LogBatch",
    "as_keys",
    "features_of_tables",
    "open_log",
    "unused_columns",
]
