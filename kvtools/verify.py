"""Is a checkpoint sound? Reads all of it once, and lists what is wrong.

Every part of every table is one task: its columns are streamed together, which checks the checksums that the format
has, and each chunk is looked at while it is in the processor's cache. Keys are read once more to find repeated ones.
"""

from __future__ import annotations

import dataclasses
import functools
import glob
import re
import shlex
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvtools.chain_reader import is_increment
from kvtools.checksum_file import check_files, read_checksums
from kvtools.dialects.chunk import ALL_COLUMNS, KEYS, Array, Chunk, Columns
from kvtools.dialects.detect import dialect_named, dialects, open_checkpoint
from kvtools.dialects.interface import Checkpoint, Finding, TableReader
from kvtools.dialects.options import OpenOptions, Progress
from kvtools.dialects.schema import ExtraSchema, are_initial_values
from kvtools.engine import Engine, run_all
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError
from kvtools.key_join import sorted_buckets
from kvtools.partition import owners
from kvtools.remote.paths import shown_path
from kvtools.url_password import without_password
from kvtools.waiting_keys import KEYS as WAITING

_KEY_ROWS = 1 << 18
_FEW = 5
_ONE_BY_ONE = (
    KEYS,
    Columns(values=True),
    Columns(slots=True),
    Columns(freqs=True),
    Columns(versions=True),
)
_NEVER_NEGATIVE = re.compile(
    r"(?:^|[./_-])(?:v|vhat|rms)$|(?:^|[./-])(?:accum|accum_update|accumulator|gradient_squared_accumulator)$", re.I
)


@dataclass(frozen=True)
class CheckedTable:
    """A table that was read: its size, and how many checks it went through; of a chain, in which `member`.

    `checksums` says what its bytes were checked against, as in "CRC-32C", None where its format has nothing.
    """

    name: str
    dialect: str
    rows: int
    parts: int
    bytes: int
    checks: int
    member: str | None = None
    checksums: str | None = None


@dataclass(frozen=True)
class CheckedFiles:
    """Files that were compared with checksums beside them: the file of these, how many files and bytes it is of, and
    when it was written, in UTC."""

    path: str
    files: int
    bytes: int
    written: str


@dataclass(frozen=True)
class Verification:
    """What a verification found: errors first, then warnings, then infos.

    `checked_files` says which files were compared with checksums beside them (`kvtools.checksum_file`).
    """

    path: str
    dialect: str | None
    tables: tuple[CheckedTable, ...]
    variables: int
    checks: int
    findings: tuple[Finding, ...]
    checked_files: tuple[CheckedFiles, ...] = ()

    def count(self, severity: Literal["error", "warning", "info"]) -> int:
        """Return how many findings of a severity there are."""
        return sum(finding.severity == severity for finding in self.findings)


def verify(
    path: str,
    options: OpenOptions | None = None,
    *,
    tables: Sequence[str] = (),
    workers: int | None = None,
    engine: Engine = "local",
    progress: Progress | None = None,
    compare_files: bool = True,
) -> Verification:
    """Read a checkpoint from its first byte to its last, and say what is wrong with it.

    Args:
        path: as `kvtools.open` takes it.
        options: how to open it; a table that cannot be opened becomes a finding.
        tables: check these tables alone; all tables, all dense variables and the files' layout if empty.
        workers: parts at once; the processors there are if None.
        engine: where the parts are read; see `kvtools.engine`.
        progress: called as rows are read.
        compare_files: compare the files with the checksums beside them, where there are some and all tables are
            checked.

    Raises:
        BadInputError: there is nothing at `path`.
        UnknownTableError: a name in `tables` is of no table.
        UsageError: the options make no sense.

    Example:
        >>> verify("no/such/model.ckpt")
        Traceback (most recent call last):
        kvtools.errors.BadInputError: looking for a checkpoint at 'no/such/model.ckpt': ...
    """
    options = options or OpenOptions()
    lenient = OpenOptions(
        options.dialect, options.key_dtype, options.value_dtype, options.dim, options.memory, lenient=True
    )
    try:
        checkpoint = open_checkpoint(path, lenient)
    except BadInputError as error:
        if not _is_there(path):
            raise
        findings = [Finding("error", "open", "", str(error))]
        compared = () if tables or "://" in path else _check_files(Path(path), findings)
        checks = 1 + sum(one.files for one in compared)
        return Verification(without_password(path), None, (), 0, checks, tuple(findings), compared)
    return check(
        checkpoint,
        tables=tables,
        memory=options.memory,
        workers=workers,
        engine=engine,
        progress=progress,
        compare_files=compare_files,
    )


def check(
    checkpoint: Checkpoint,
    *,
    tables: Sequence[str] = (),
    memory: int = 1 << 30,
    workers: int | None = None,
    engine: Engine = "local",
    progress: Progress | None = None,
    compare_files: bool = True,
) -> Verification:
    """Check an opened checkpoint; see `verify`."""
    asked = checkpoint.names_of(tables)
    broken = {name: error for name, error in checkpoint.broken.items() if not tables or name in asked}
    names = [name for name in asked if name not in broken]
    readers = checkpoint.select(names) if names or not tables else []
    findings = [Finding("error", "open", name, str(error)) for name, error in broken.items()]
    checked = list(_check_tables(readers, findings, memory, workers, engine, progress))
    checks = len(broken) + sum(table.checks for table in checked)
    variables = 0
    compared: tuple[CheckedFiles, ...] = ()
    if not tables and compare_files and isinstance(checkpoint.path, Path):
        compared = _check_files(checkpoint.path, findings)
        checks += sum(one.files for one in compared)
    if not tables:
        checks += _check_whole(checkpoint, findings)
        for variable in [*checkpoint.variables, *checkpoint.bookkeeping]:
            told = {finding.message for finding in findings}
            findings += (f for f in _check_variable(checkpoint, variable.name) if f.message not in told)
            checks += 1
        variables = len(checkpoint.variables)
    findings = [_with_way_out(finding, checkpoint) for finding in findings]
    rank = {"error": 0, "warning": 1, "info": 2}
    findings.sort(key=lambda finding: rank[finding.severity])
    return Verification(
        path=shown_path(checkpoint.path),
        dialect=checkpoint.dialect,
        tables=tuple(checked),
        variables=variables,
        checks=checks,
        findings=tuple(findings),
        checked_files=compared,
    )


_MENDED = frozenset(
    {"non-finite", "duplicate-keys", "misplaced-keys", "slot-keys", "blacklist", "partition-offset", "wrong-bucket"}
)
"""Checks whose findings `kvtools.repair` mends."""


def _with_way_out(finding: Finding, checkpoint: Checkpoint) -> Finding:
    """Return a finding with the command that mends it, where there is one."""
    table = checkpoint.tables.get(finding.table)
    dialect = dialect_named(checkpoint.dialect) if checkpoint.dialect in dialects() else None
    if table is None or is_increment(table) or dialect is None or dialect.write is None:
        return finding
    if finding.check in _MENDED:
        way_out, options = "mends it", ""
    elif finding.check == "damaged":
        way_out, options = "keeps what is proven good", " --salvage"
    else:
        return finding
    command = f"kvtools repair {shlex.quote(str(checkpoint.path))} OUT{options}"
    return dataclasses.replace(finding, message=f"{finding.message}; `{command}` {way_out}")


def _is_there(path: str) -> bool:
    there = Path(path)
    try:
        return "://" in path or there.exists() or any(there.parent.glob(f"{glob.escape(there.name)}.*"))
    except (OSError, ValueError):
        return False


@dataclass
class _Rows:
    """Rows that a check does not like: how many, and the keys of the first few."""

    count: int = 0
    keys: list[int] = field(default_factory=list)

    def add(self, count: int, keys: Sequence[int]) -> None:
        self.count += count
        self.keys += keys[: _FEW - len(self.keys)]

    def __str__(self) -> str:
        keys = ", ".join(map(str, self.keys)) + (", ..." if self.count > len(self.keys) else "")
        return f"{self.count:,} rows (keys {keys})" if self.count > 1 else f"1 row (key {keys})"


@dataclass
class _PartResult:
    """What one part turned out to be: its rows, the rows found by (check, column), and why it could not be read."""

    rows: int = 0
    found: dict[tuple[str, str], _Rows] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def note(self, check: str, column: str, keys: Array, rows: Array) -> None:
        """Take in rows of a chunk, as a mask [n] of its `keys` [n]."""
        numbers = np.flatnonzero(rows)
        if len(numbers):
            few: list[int] = keys[numbers[:_FEW]].tolist()
            self.found.setdefault((check, column), _Rows()).add(len(numbers), few)


@dataclass(frozen=True)
class _Task:
    """A part to read, or the keys of the whole table to compare, or what the dialect itself checks."""

    reader: TableReader
    what: Literal["part", "repeated", "dialect"]
    part: int = 0
    memory: int = 1 << 30


def _run(task: _Task, progress: Progress | None = None) -> Any:
    if task.what == "part":
        return _check_part(task.reader, task.part, progress)
    try:
        if task.what == "repeated":
            return _repeated_keys(task.reader, task.memory)
        return list(task.reader.check())
    except CorruptFileError as error:
        return [Finding("error", "damaged", task.reader.schema.name, str(error))]
    except KvtoolsError as error:
        return [Finding("error", "unreadable", task.reader.schema.name, str(error))]


def _check_tables(
    readers: Sequence[TableReader],
    findings: list[Finding],
    memory: int,
    workers: int | None,
    engine: Engine,
    progress: Progress | None,
) -> Iterator[CheckedTable]:
    tasks = [
        task
        for reader in readers
        for task in (
            *(_Task(reader, "part", part) for part in range(reader.parts)),
            _Task(reader, "repeated", memory=memory),
            _Task(reader, "dialect"),
        )
    ]
    run = functools.partial(_run, progress=_Sum(progress)) if engine == "local" else _run
    results = run_all(run, tasks, workers=workers, engine=engine)
    for reader in readers:
        schema = reader.schema
        total = _PartResult()
        for part in range(reader.parts):
            result: _PartResult = next(results)
            total.rows += result.rows
            total.faults += result.faults
            for kind, rows in result.found.items():
                total.found.setdefault(kind, _Rows()).add(rows.count, rows.keys)
            if not result.faults and result.rows != schema.part_rows[part]:
                message = f"part {part} has {result.rows} rows, its index says {schema.part_rows[part]}"
                findings.append(Finding("error", "rows", schema.name, message))
        repeated, own = next(results), next(results)
        damaged = list(dict.fromkeys(total.faults))
        findings += [Finding("error", "damaged", schema.name, message) for message in damaged]
        findings += [_describe(schema.name, reader, kind, rows) for kind, rows in sorted(total.found.items())]
        findings += [f for f in (*repeated, *own) if f.message not in damaged]
        findings += _check_extras(reader)
        if schema.parts > 1 and schema.partition is None:
            message = f"whether keys are in the right part is not checked: {schema.dialect} has no rule for it"
            findings.append(Finding("info", "partition", schema.name, message))
        if engine != "local" and progress:
            progress(schema.name, schema.rows, schema.rows)
        yield CheckedTable(
            name=schema.name,
            dialect=schema.dialect,
            rows=total.rows,
            parts=schema.parts,
            bytes=schema.bytes,
            checks=_count_checks(reader),
            checksums=schema.checksums,
        )


class _Sum:
    """Adds up the rows that all threads have read of each table."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._done: dict[str, int] = {}

    def __call__(self, table: str, rows: int, total: int) -> None:
        if self._progress:
            with self._lock:
                self._done[table] = self._done.get(table, 0) + rows
                self._progress(table, self._done[table], total)


def _count_checks(reader: TableReader) -> int:
    """Count the checks of a table: of bytes per column and part, of numbers per column, of keys and of rows."""
    schema = reader.schema
    columns = 2 + len(schema.slots) + schema.has_freqs + schema.has_versions
    numbers = 2 * (1 + len(schema.slots))
    return columns * schema.parts + numbers + len(schema.extras) + 3 + (schema.parts > 1 and bool(schema.partition))


def _check_part(reader: TableReader, part: int, progress: Progress | None) -> _PartResult:
    result = _PartResult()
    try:
        _scan(reader, part, ALL_COLUMNS, result, progress)
        return result
    except KvtoolsError:
        pass
    # One column is damaged: look at each on its own, so that all damage is named and the rest is checked.
    whole = _PartResult()
    for columns in _ONE_BY_ONE:
        result = _PartResult()
        try:
            _scan(reader, part, columns, result, None)
        except KvtoolsError as error:
            whole.faults.append(str(error))
        whole.rows = max(whole.rows, result.rows)
        for kind, rows in result.found.items():
            whole.found.setdefault(kind, rows)
    return whole


def _scan(reader: TableReader, part: int, columns: Columns, result: _PartResult, progress: Progress | None) -> None:
    schema = reader.schema
    rule = schema.partition if schema.parts > 1 else None
    never_negative = {slot.name for slot in schema.slots if _is_never_negative(slot.name)}
    examine = _Examiner()
    for chunk in reader.chunks(columns, part=part):
        _compare_lengths(reader, part, chunk, result)
        result.rows += len(chunk)
        if rule is not None:
            result.note("misplaced-keys", "", chunk.keys, owners(chunk.keys, schema.parts, rule) != part)
        if chunk.values is not None:
            examine(chunk.keys, chunk.values, "values", result)
        for name, slot in chunk.slots.items():
            examine(chunk.keys, slot, f"slot {name}", result)
            if name in never_negative and slot.size:
                with np.errstate(invalid="ignore"):  # which bfloat16 says of a comparison with NaN
                    if not slot.min() >= 0:  # the least of numbers and NaN is NaN
                        result.note("negative-slot", f"slot {name}", chunk.keys, np.any(slot < 0, axis=1))
        if chunk.freqs is not None and chunk.freqs.dtype.kind == "i" and len(chunk) and chunk.freqs.min() < 0:
            result.note("negative-freqs", "freqs", chunk.keys, chunk.freqs < 0)
        if progress:
            progress(schema.name, len(chunk), schema.rows)


def _compare_lengths(reader: TableReader, part: int, chunk: Chunk, result: _PartResult) -> None:
    columns = {"values": chunk.values, "freqs": chunk.freqs, "versions": chunk.versions}
    columns.update({f"slot {name}": slot for name, slot in chunk.slots.items()})
    for name, column in columns.items():
        if column is not None and len(column) != len(chunk):
            raise CorruptFileError(
                f"reading table '{reader.schema.name}': part {part} has {len(column)} rows of {name} beside"
                f" {len(chunk)} keys; write the checkpoint again"
            )


class _Examiner:
    """Finds NaN, infinity and denormal numbers by the bits of their magnitudes, in memory that is used again."""

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.uint8)

    def __call__(self, keys: Array, rows: Array, column: str, result: _PartResult) -> None:
        limits = _magnitudes(rows.dtype)
        if limits is None or rows.size == 0:
            return
        magnitude, infinite, normal = limits
        rows = np.ascontiguousarray(rows, rows.dtype.newbyteorder("="))
        if len(self._scratch) < rows.nbytes:
            self._scratch = np.empty(rows.nbytes, np.uint8)
        bits = self._scratch[: rows.nbytes].view(magnitude.dtype).reshape(rows.shape)
        np.bitwise_and(rows.view(magnitude.dtype), magnitude, out=bits)
        if bits.max() >= infinite:
            result.note("non-finite", column, keys, (bits >= infinite).any(axis=1))
        np.subtract(bits, 1, out=bits)  # zero becomes the largest, so that the smallest is no zero
        if bits.min() < normal - 1:
            result.note("denormal", column, keys, (bits < normal - 1).any(axis=1))


@functools.cache
def _magnitudes(dtype: np.dtype[Any]) -> tuple[Any, int, int] | None:
    """Return a type's mask of all bits but the sign, the bits of infinity, and those of the smallest normal number."""
    exponent_at = {"float16": 10, "bfloat16": 7, "float32": 23, "float64": 52}.get(dtype.name)
    if exponent_at is None:
        return None
    unsigned = np.dtype(f"u{dtype.itemsize}")
    largest = (1 << 8 * dtype.itemsize - 1) - 1
    return unsigned.type(largest), largest >> exponent_at << exponent_at, 1 << exponent_at


def _is_never_negative(slot: str) -> bool:
    """Tell whether a slot of this name holds sums or means of squares.

    >>> [_is_never_negative(name) for name in ("Adam.v", "Ftrl.accum", "Momentum.accumulator", "Adam.m", "move")]
    [True, True, False, False, False]
    """
    return bool(_NEVER_NEGATIVE.search(slot)) and "momentum" not in slot.lower()


def _describe(table: str, reader: TableReader, kind: tuple[str, str], rows: _Rows) -> Finding:
    check, column = kind
    if check == "misplaced-keys":
        message = (
            f"{rows} in another part than {reader.schema.partition} of {reader.parts} parts says, where lookups do not"
            " look: write the table again, see `kvtools reshard`"
        )
        return Finding("error", check, table, message)
    if check == "non-finite":
        message = f"{column}: NaN or infinity in {rows}; go back to a checkpoint before they came, or drop the rows"
        return Finding("error", check, table, message)
    if check == "denormal":
        message = f"{column}: denormal numbers, which are slow on many processors, in {rows}"
        return Finding("info", check, table, message)
    what = "frequencies" if check == "negative-freqs" else f"{column}, of squares by its name:"
    return Finding("warning", check, table, f"{what} negative numbers in {rows}; look at what wrote them")


def _repeated_keys(reader: TableReader, memory: int) -> list[Finding]:
    """Find keys that stand in more than one row, or that have a row and wait for admission all the same."""
    count, repeated = 0, np.empty(0, reader.key_dtype)
    waiting, admitted = _waiting_keys(reader), np.empty(0, reader.key_dtype)
    for keys in _sorted_keys(reader, memory):
        if len(waiting):
            at = np.minimum(np.searchsorted(waiting, keys), len(waiting) - 1)
            admitted = np.union1d(admitted, keys[waiting[at] == keys])
        same = keys[1:] == keys[:-1]
        if same.any():
            count += int(np.count_nonzero(same))
            repeated = np.unique(np.concatenate([repeated, keys[1:][same]]))[: _FEW + 1]
    findings = []
    if len(admitted):
        rows = (
            f"{len(admitted):,} keys wait for admission and have"
            if len(admitted) > 1
            else "1 key waits for admission and has"
        )
        message = f"{rows} a row ({_few_of(admitted)}); a restore drops these counts"
        findings.append(Finding("warning", "waiting-keys", reader.schema.name, message))
    if not count:
        return findings
    few = _few_of(repeated)
    rows = f"{count:,} rows repeat" if count > 1 else "1 row repeats"
    message = f"{rows} a key of an earlier row ({few}); a table keeps one row of a key: merge them, see `kvtools merge`"
    return [*findings, Finding("error", "duplicate-keys", reader.schema.name, message)]


def _few_of(keys: Array) -> str:
    few = "keys " * (len(keys) > 1) or "key "
    return few + ", ".join(map(str, keys[:_FEW].tolist())) + (", ..." if len(keys) > _FEW else "")


def _waiting_keys(reader: TableReader) -> Array:
    """Return the keys that wait for admission, sorted, each once; none where they cannot be read, which is told of all
    extra arrays."""
    try:
        if any(extra.name == WAITING for extra in reader.schema.extras):
            waiting: Array = np.unique(reader.extra(WAITING).astype(reader.key_dtype, copy=False))
            return waiting
    except KvtoolsError:
        pass
    return np.empty(0, reader.key_dtype)


def _sorted_keys(reader: TableReader, memory: int) -> Iterator[Array]:
    """Yield all keys in sorted arrays, equal keys in the same one."""
    if reader.rows * reader.key_dtype.itemsize <= memory // 4:
        keys = reader.all_keys(verify=False)
        keys.sort()
        yield keys
        return
    stream = (chunk.keys for chunk in reader.chunks(KEYS, rows=_KEY_ROWS, verify=False))
    for (bucket,) in sorted_buckets([stream], reader.rows, memory=memory):
        yield bucket.keys


def _check_extras(reader: TableReader) -> Iterator[Finding]:
    for extra in reader.schema.extras:
        try:
            array = reader.extra(extra.name)
        except KvtoolsError as error:
            yield Finding("error", "damaged", reader.schema.name, str(error))
            continue
        yield from _check_extra(reader, extra, array)


def _check_extra(reader: TableReader, extra: ExtraSchema, array: Array) -> Iterator[Finding]:
    what = extra.name.replace("_", " ")
    if are_initial_values(extra.name) and array.ndim == 2 and array.size and array.shape[1] != reader.dim:
        message = f"{what} are {array.shape[1]} wide, expected {reader.dim}, as the rows are"
        yield Finding("error", "extra", reader.schema.name, message)
    bad = _non_finite(array)
    if bad:
        message = f"{what}: {bad:,} numbers are NaN or infinite"
        yield Finding("error", "non-finite", reader.schema.name, message)


def _check_variable(checkpoint: Checkpoint, name: str) -> Iterator[Finding]:
    bad = 0
    try:
        for rows in checkpoint.read_variable(name):
            bad += _non_finite(rows)
    except KvtoolsError as error:
        yield Finding("error", "damaged", "", str(error))
        return
    if bad:
        message = f"dense variable '{name}': {bad:,} numbers are NaN or infinite; right for a mask, wrong for a weight"
        yield Finding("warning", "non-finite", "", message)


def _non_finite(numbers: Array) -> int:
    """Count the numbers that are NaN or infinite; none in a type without them."""
    limits = _magnitudes(numbers.dtype)
    if limits is None or numbers.size == 0:
        return 0
    magnitude, infinite, _ = limits
    bits = np.ascontiguousarray(numbers).view(magnitude.dtype) & magnitude
    return int(np.count_nonzero(bits >= infinite)) if bits.max() >= infinite else 0


def _check_files(path: Path, findings: list[Finding]) -> tuple[CheckedFiles, ...]:
    """Compare the files of a checkpoint with the checksums beside them, if there are some."""
    try:
        known = read_checksums(path)
        if known is None:
            return ()
        findings += check_files(
            path, known, command=f"kvtools verify {shlex.quote(str(path))} --write-checksums --force"
        )
    except KvtoolsError as error:
        findings.append(Finding("warning", "checksum-file", "", str(error)))
        return ()
    return (CheckedFiles(str(known.path), len(known.files), known.bytes, known.date),)


def _check_whole(checkpoint: Checkpoint, findings: list[Finding]) -> int:
    try:
        findings += checkpoint.check()
    except KvtoolsError as error:
        findings.append(Finding("error", "layout", "", str(error)))
    return 1
