"""What the policies of training would do to a log of ids: rows, memory and hits over time, before a run uses them.

The log is fed to the table engine itself, with rows of one number: a batch is looked up as training does it, and
updated as an optimizer does it. So evictions, admission and ages are those of training, to the row. Memory is that
of a table with rows as wide as training's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvtools._kvtable import Table
from kvtools.clip_policy import Policy
from kvtools.dialects.chunk import Array
from kvtools.dialects.options import Progress
from kvtools.dialects.schema import TableSchema, numpy_dtype
from kvtools.errors import UsageError
from kvtools.id_log import ARRAY, IdLog, LogBatch, as_keys, check_table, features_of_tables, unused_columns
from kvtools.table_names import is_pattern, listed, matching, near
from kvtools.training_policy import FIELDS, KEEP_BY, TrainingPolicy

_MOST_MOMENTS = 128
_NO_ROW = np.uint64(2**64 - 1)
_MICROSECONDS = 1_000_000


@dataclass(frozen=True)
class RowSize:
    """What a row of a table is in training: its key's type, and the bytes of its value and slots, None if not known."""

    key_dtype: str | None = None
    bytes: int | None = None

    @classmethod
    def of(cls, schema: TableSchema) -> RowSize:
        """Return that of a table of a checkpoint; slots have the type of the values, as in training."""
        numbers = schema.dim + sum(slot.width for slot in schema.slots)
        return cls(schema.key_dtype, numbers * numpy_dtype(schema.value_dtype).itemsize)


@dataclass(frozen=True)
class Moment:
    """What a table was like after a step, and what it did since the moment before.

    `lookups`, `hits` (they found a row), `hits_without` (they would have found one, were there no policies), `evicted`
    and `expired` count since then; `rows`, `waiting` (keys that are counted, and have no row), `memory_bytes`
    (what the table takes in training: rows, their index and what the policies keep beside them, more than the rows take
    in a file; None where the width of a row is not known) are of this moment.
    """

    step: int
    examples: int
    seconds: float | None
    lookups: int
    hits: int
    hits_without: int
    rows: int
    memory_bytes: int | None
    waiting: int
    evicted: int
    expired: int

    def after(self, earlier: Moment) -> Moment:
        """Return this moment, with what was counted up to the one before counted along."""
        return replace(
            self,
            lookups=self.lookups + earlier.lookups,
            hits=self.hits + earlier.hits,
            hits_without=self.hits_without + earlier.hits_without,
            evicted=self.evicted + earlier.evicted,
            expired=self.expired + earlier.expired,
        )

    @property
    def hit_rate(self) -> float | None:
        """The share of lookups that found a row; None where there were none."""
        return self.hits / self.lookups if self.lookups else None


@dataclass(frozen=True)
class TableRun:
    """What became of a table: `keys` are how many different ones the log has; of rows and memory also the most
    there was.

    `stale` rows of those at the end are past their age: no lookup finds them, and nothing has collected them yet.
    """

    table: str
    training: TrainingPolicy
    steps: int
    lookups: int
    hits: int
    hits_without: int
    keys: int
    rows: int
    most_rows: int
    memory_bytes: int | None
    most_memory_bytes: int | None
    waiting: int
    evicted: int
    expired: int
    stale: int
    moments: Sequence[Moment] = field(repr=False)

    @property
    def hit_rate(self) -> float | None:
        """The share of lookups that found a row; None where there were none."""
        return self.hits / self.lookups if self.lookups else None

    @property
    def hit_rate_without(self) -> float | None:
        """The share of lookups that would have found a row without any policy."""
        return self.hits_without / self.lookups if self.lookups else None


@dataclass(frozen=True)
class Simulation:
    """What became of all tables, and what of the policies was not replayed, a sentence each."""

    tables: Sequence[TableRun]
    steps: int
    examples: int
    notes: Sequence[str] = ()


class SimulatedTable:
    """One table in training: give it the ids of one step after the other.

    Args:
        name: of the table, for messages.
        training: its policies.
        row: what its rows are in training.
        clock: uint64 [1], the microseconds since 1970, which the caller sets before each step; None where the log has
            no times.
        save_every: steps from save to save; 0: nothing is saved.

    Raises:
        UsageError: a policy that needs what no log has.

    Example:
        >>> table = SimulatedTable("user", TrainingPolicy(max_capacity=2, eviction="lru"))
        >>> for ids in ([1, 2], [2, 3], [1]):
        ...     table.step(np.array(ids))
        >>> table.table.contains(np.array([1, 2, 3])).tolist(), table.hits
        ([True, False, True], 1)
    """

    def __init__(
        self,
        name: str,
        training: TrainingPolicy,
        row: RowSize = RowSize("int64"),
        *,
        clock: Array | None = None,
        save_every: int = 0,
    ) -> None:
        doing = f"simulating table '{name}'"
        if training.eviction == "custom":
            raise UsageError(f"{doing}: eviction = 'custom' goes by scores that training sets, and a log has none")
        if training.expire_after_seconds and clock is None:
            raise UsageError(
                f"{doing}: expire-after = '{training.expire_after_seconds}s' needs times, and the log has none; name"
                " its column by --time-column, or say expire-after as a number of steps"
            )
        self.name, self.training, self.row, self.doing = name, training, row, doing
        self._key_dtype = numpy_dtype(row.key_dtype or "int64")
        limits = np.iinfo(self._key_dtype)
        if training.padding_key is not None and not limits.min <= training.padding_key <= limits.max:
            raise UsageError(
                f"{doing}: got padding-key = {training.padding_key}, expected a key of {self._key_dtype}, {limits.min}"
                f" to {limits.max}; --like names a checkpoint whose keys are of another type"
            )
        timed = training.expire_after_seconds > 0
        self.table = Table(
            self._key_dtype,
            "float32",
            1,
            initializer=0.0,
            max_capacity=training.max_capacity,
            eviction=training.eviction or "lru",  # type: ignore[arg-type]
            max_age=training.expire_after_seconds or training.expire_after_steps,
            age_unit="seconds" if timed else "steps",
            clock=np.ones(1, np.uint64) if clock is None else clock,
            admission=training.admission.fields() if training.admission else None,
            padding_key=training.padding_key,
        )
        self._all = Table(self._key_dtype, "float16", 1, initializer=0.0, padding_key=training.padding_key)
        self._clock = clock
        self._save_every = save_every
        self._room = 0
        self.steps = self.lookups = self.hits = self.hits_without = self.most_rows = 0
        self.most_memory_bytes: int | None = None

    @property
    def keys(self) -> int:
        """How many different keys came."""
        return len(self._all)

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.table)

    @property
    def memory_bytes(self) -> int | None:
        """The memory that the table would take in training, what it keeps beside its rows included."""
        if self.row.bytes is None:
            return None
        memory = self.table.memory()
        beside = memory["index_bytes"] + memory["column_bytes"] + self.table.admission_bytes
        return memory["rows"] * self.row.bytes + beside

    def step(self, ids: Array) -> None:
        """Look ids [n] up, and update their rows, as a step of training does.

        Raises:
            UsageError: more different ids than the capacity, which training refuses.
            BadInputError: an id that is no key.
        """
        keys = as_keys(np.asarray(ids), self._key_dtype, self.doing)
        self._check_fits(keys)
        n = len(keys)
        self._grow(n)
        rows, inserted, positions = self._rows[:n], self._inserted[:n], self._positions[:n]
        # Without times each step is a second of its own: rows are in the order in which they were written.
        version = self.steps if self._clock is None else int(self._clock[0]) // _MICROSECONDS
        # The seeds of a variable: one for each lookup, and none for an update that rounds to the nearest.
        self.table.gather_or_insert(
            keys, version=version, seed=self.steps, out=rows, inserted=inserted, positions=positions
        )
        missed = np.count_nonzero(inserted) + np.count_nonzero(positions == _NO_ROW)
        self.table.apply(
            "sgd", keys, self._gradients[:n], {"learning_rate": 0.0}, positions=positions, frequency=1, version=version
        )
        self._all.gather_or_insert(keys, out=self._narrow[:n], inserted=inserted, positions=positions)
        new = np.count_nonzero(inserted) + np.count_nonzero(positions == _NO_ROW)
        self.steps += 1
        self.lookups += n
        self.hits += n - int(missed)
        self.hits_without += n - int(new)
        self.most_rows = max(self.most_rows, len(self.table))
        self._expire()

    def collect(self) -> int:
        """Remove the rows that are past their age, and return how many there were."""
        if self.training.expire_after_steps:
            return self.table.evict("after_steps", self.training.expire_after_steps)
        if self.training.expire_after_seconds:
            return self.table.evict("after_seconds", self.training.expire_after_seconds)
        return 0

    def _expire(self) -> None:
        told = self.training
        due = told.expire_every and self.steps % told.expire_every == 0
        saved = told.expire_on_save and self._save_every and self.steps % self._save_every == 0
        if not (due or saved):
            return
        self.collect()
        if told.expire_below_freq:
            self.table.evict("below_frequency", told.expire_below_freq)
        if told.keep_top and told.keep_top_by != "norm":
            self.table.evict("keep_top", told.keep_top, by=KEEP_BY[told.keep_top_by])  # type: ignore[arg-type]

    def _check_fits(self, keys: Array) -> None:
        most = self.training.max_capacity
        if not most or len(keys) <= most or self.training.admission is not None:
            return
        different = len(np.unique(keys))
        if different > most:
            raise UsageError(
                f"{self.doing}: step {self.steps} looks {different} different ids up, and max-capacity = {most}:"
                f" training"
                " refuses such a batch; make it several batches' worth, or lower --batch-size"
            )

    def _grow(self, n: int) -> None:
        if n <= self._room:
            return
        self._room = max(n, 2 * self._room)
        self._rows, self._gradients = np.empty((self._room, 1), np.float32), np.zeros((self._room, 1), np.float32)
        self._narrow = np.empty((self._room, 1), np.float16)
        self._inserted, self._positions = np.empty(self._room, np.bool_), np.empty(self._room, np.uint64)


class _Course:
    """The moments of a table, at most so many: where there are more, two become one."""

    def __init__(self, table: SimulatedTable) -> None:
        self.table = table
        self.every = 1
        self.moments: list[Moment] = []
        self._since = (0, 0, 0, 0, 0)
        self._steps = 0

    def after_step(self, step: int, batch: LogBatch, examples: int) -> None:
        self._steps += 1
        if self._steps % self.every:
            return
        self._note(step, batch.seconds, examples)
        if len(self.moments) < _MOST_MOMENTS:
            return
        self.moments = [later.after(earlier) for earlier, later in zip(*[iter(self.moments)] * 2, strict=True)]
        self.every *= 2

    def end(self, step: int, seconds: float | None, examples: int) -> None:
        if self._steps % self.every:
            self._note(step, seconds, examples)

    def _note(self, step: int, seconds: float | None, examples: int) -> None:
        table = self.table
        now = (table.lookups, table.hits, table.hits_without, table.table.evicted_rows, table.table.expired_rows)
        lookups, hits, hits_without, evicted, expired = (
            after - before for after, before in zip(now, self._since, strict=True)
        )
        self._since = now
        size = table.memory_bytes
        if size is not None:
            table.most_memory_bytes = max(size, table.most_memory_bytes or 0)
        waiting = table.table.waiting_keys
        rows = table.rows
        self.moments.append(
            Moment(step, examples, seconds, lookups, hits, hits_without, rows, size, waiting, evicted, expired)
        )

    def run(self) -> TableRun:
        table = self.table
        evicted, expired, waiting = (
            table.table.evicted_rows,
            table.table.expired_rows,
            table.table.waiting_keys,
        )
        rows, size = table.rows, table.memory_bytes
        return TableRun(
            table.name,
            table.training,
            table.steps,
            table.lookups,
            table.hits,
            table.hits_without,
            table.keys,
            rows,
            table.most_rows,
            size,
            None if size is None else max(size, table.most_memory_bytes or 0),
            waiting,
            evicted,
            expired,
            table.collect(),
            self.moments,
        )


def simulate(
    policy: Policy,
    log: IdLog,
    *,
    columns: Sequence[str] = (),
    rows: Mapping[str, RowSize] | RowSize | None = None,
    batch_size: int = 1024,
    save_every: int = 0,
    progress: Progress | None = None,
) -> Simulation:
    """Replay a log through the policies of training, batch by batch.

    Args:
        policy: what training is told of each table; tables of which it says nothing are left out.
        log: from `id_log.open_log`.
        columns: COLUMN=TABLE, for columns whose name is not that of their table.
        rows: what rows are in training, by table (then there are no others), or of all.
        batch_size: examples of a step; of a log of lookups, lookups.
        save_every: steps from save to save, for expire-on-save.
        progress: called with (the log, percent read, 100).

    Raises:
        UsageError: no table of the log has a policy, a table that the policy names has no column, a column or table is
            not there, or training would refuse a batch.
        BadInputError: something in the log is no id, or it is empty.

    Example:
        ```python
        run = simulate(read_policy("policy.toml"), open_log("ids.parquet"), rows=RowSize("int64", 256))
        print([(table.table, table.rows, table.hit_rate) for table in run.tables])
        ```
    """
    if batch_size < 1:
        raise UsageError(f"simulating: got a batch of {batch_size} examples, expected 1 or more")
    known = [*rows] if isinstance(rows, Mapping) else None
    replayed = _replayed(policy, log, columns, known)
    table_of = replayed.table_of
    clock = None if log.time_column is None else np.ones(1, np.uint64)
    courses: dict[str, _Course | None] = {}

    def course_of(table: str, ids: Array) -> _Course | None:
        if table not in courses:
            check_table(log, table, known)
            training = policy.training(table)
            row = rows.get(table, RowSize()) if isinstance(rows, Mapping) else rows or RowSize()
            if row.key_dtype is None:
                row = replace(row, key_dtype="uint64" if ids.dtype == np.uint64 else "int64")
            made = None
            if not training.empty:
                made = _Course(SimulatedTable(table, training, row, clock=clock, save_every=save_every))
            courses[table] = made
        return courses[table]

    step = examples = 0
    latest: float | None = None
    for batch in log.batches(sorted(table_of), batch_size):
        if clock is not None and batch.seconds is not None:
            latest = max(batch.seconds, latest or 0.0)
            clock[0] = int(latest * _MICROSECONDS)
        of_table: dict[str, list[Array]] = {}
        for column, ids in batch.ids.items():
            of_table.setdefault(table_of.get(column, column), []).append(ids.keys)
        step += 1
        examples += batch.examples
        for table, arrays in of_table.items():
            course = course_of(table, arrays[0])
            if course is not None:
                course.table.step(arrays[0] if len(arrays) == 1 else np.concatenate(arrays))
                course.after_step(step, batch, examples)
        if progress:
            progress(log.path, int(100 * log.share_read), 100)
    runs = []
    for course in courses.values():
        if course is not None:
            course.end(step, latest, examples)
            runs.append(course.run())
    if not runs:
        raise _no_policy(policy, log, list(courses))
    notes = [*replayed.notes, *(_not_looked_up(policy, courses) if log.of_lookups else ())]
    return Simulation(runs, step, examples, [*notes, *_notes(runs, log, save_every)])


def _not_looked_up(policy: Policy, tables: Iterable[str]) -> list[str]:
    """Say of which tables that a policy names a log of lookups has none."""
    there = [*tables]
    return [
        f"not replayed: {name}: the log looks nothing up in it, but in {listed(there)}{near(name, there)}"
        for name in _named(policy)
        if name not in there and not policy.training(name).empty
    ]


@dataclass(frozen=True)
class _Replayed:
    """Which columns of a log are replayed, by column whose ids it has, and a sentence each on what is left out."""

    table_of: dict[str, str]
    notes: list[str]


def _replayed(policy: Policy, log: IdLog, columns: Sequence[str], known: Sequence[str] | None) -> _Replayed:
    """Return the columns of the tables that have a policy; nothing of a log of lookups, which says so by itself.

    Raises:
        UsageError: a column that is not there, a table without a policy, or a policy without a column.
    """
    found = features_of_tables(log, columns, known)
    if log.of_lookups:
        return _Replayed({}, [])
    for table in found.values() if columns and known is None else ():
        if policy.training(table).empty:
            raise _no_policy(policy, log, [table])
    named = [name for name in _named(policy) if not policy.training(name).empty]
    whole_array = log.features == (ARRAY,)
    if whole_array and not found:
        of = named if known is None else [*known]
        if len(of) != 1:
            raise UsageError(
                f"simulating: the log '{log.path}' is an array of ids, and nothing says of which table; say --column"
                f" {ARRAY}=TABLE"
            )
        found = {ARRAY: of[0]}
    if known is None:
        found |= {name: name for name in log.features if name not in found and not policy.training(name).empty}
    used = [*found] if known is None else [*found, *known]
    chosen = {column: table for column, table in found.items() if not policy.training(table).empty}
    notes = []
    for table in (name for name in named if known is None or name in known):
        if table in chosen.values():
            continue
        if not whole_array:
            raise _no_column(log, table, [name for name in log.features if name not in used])
        notes.append(f"not replayed: {table}: the log is an array of the ids of {next(iter(found.values()))} alone")
    if not chosen:
        told = [table for table in known or () if not policy.training(table).empty]
        if told and log.features and not found:
            raise UsageError(
                f"simulating the log '{log.path}': none of its columns ({listed(log.features)}) has the name of a table"
                f" that has a policy ({listed(told)}); --column {log.features[0]}={told[0]} says whose ids it has"
            )
        raise _no_policy(policy, log, list(found.values()) or list(log.features))
    without = [
        table
        for table in known or ()
        if table not in chosen.values() and table not in named and not policy.training(table).empty
    ]
    if without:
        way_out = f"; --column COLUMN={without[0]} says which it is"
        notes.append(f"not replayed: {listed(without)}: the log has no column of that name{way_out}")
    for rule in policy.rules if known is None else ():
        for pattern in rule.patterns:
            if is_pattern(pattern) and not rule.training.empty and not matching([pattern], chosen.values())[0]:
                notes.append(f"not replayed: '{pattern}': it matches no column of the log; see --column")
    why = "the policy has no entry of that name" if known is None else "no table has that name"
    unused = unused_columns(log, used, why)
    return _Replayed(chosen, [*notes, unused] if unused else notes)


def _named(policy: Policy) -> list[str]:
    """Return the tables that a policy has by name, and not by a pattern."""
    return [name for rule in policy.rules for name in rule.patterns if not is_pattern(name)]


def _no_column(log: IdLog, table: str, unused: Sequence[str]) -> UsageError:
    if table in log.others:
        return UsageError(f"reading the log '{log.path}': {log.why_no_ids(table)}")
    there = f", but {listed(log.features)}" if log.features else ""
    guess = near(table, log.features)
    column = unused[0] if len(unused) == 1 else "COLUMN"
    return UsageError(
        f"simulating the log '{log.path}': it has no column '{table}'{there}{guess}{' The' if guess else '; the'}"
        f" policy has an entry for this table: --column {column}={table} says which column has its ids; or take"
        " the entry out"
    )


def _no_policy(policy: Policy, log: IdLog, tables: Sequence[str]) -> UsageError:
    if not tables and log.others:
        return UsageError(f"reading the log '{log.path}': {log.why_no_ids(next(iter(log.others)))}")
    doing = f"simulating the log '{log.path}'"
    if not tables:
        return UsageError(f"{doing}: it has no column of ids, which are whole numbers or lists of them")
    fields = f"the fields are {', '.join(FIELDS)}"
    without = [name for name in tables if not policy.rule(name).patterns]
    there = [pattern for rule in policy.rules if not rule.training.empty for pattern in rule.patterns]
    if without and there:
        return UsageError(
            f"{doing}: the policy has no entry for {'a table' if len(without) == 1 else 'tables'} {listed(without)},"
            f" but for {listed(there)}{near(without[0], there)}"
        )
    return UsageError(f"{doing}: the policy says nothing of training for its tables ({listed(tables)}); {fields}")


def _notes(runs: Sequence[TableRun], log: IdLog, save_every: int) -> list[str]:
    notes = []
    for run in runs:
        told, name = run.training, run.table
        if told.expire_below_norm:
            notes.append(
                f"not replayed: {name}: expire-below-norm: a log has ids, and no values; so rows are at most so many"
            )
        if told.keep_top and told.keep_top_by == "norm":
            notes.append(
                f"not replayed: {name}: keep-top by norm: a log has ids, and no values; so rows are at most so many"
            )
        if told.expire_on_save and not save_every:
            notes.append(
                f"not replayed: {name}: expire-on-save: nothing says how often training saves; see --save-every"
            )
        if told.eviction in ("epoch_lru", "epoch_lfu"):
            notes.append(f"replayed: {name}: {told.eviction}, the whole log as one epoch")
        if (
            told.expires
            and not (told.expire_every or told.expire_on_save)
            and (told.expire_below_freq or told.keep_top)
        ):
            notes.append(
                f"not replayed: {name}: rows that are to go by frequency or rank: nothing says when; see expire-every"
            )
    if 0 <= log.latest <= 1:
        notes.append(
            f"column '{log.time_column}' of the log has no time but 0 and 1: is it one of labels? Nothing ages in a"
            " second"
        )
    if log.backwards:
        notes.append(
            f"the log is not in order of time: in {log.backwards:,} batches it goes back; the clock stood still"
            f" for them"
        )
    return notes


def described(run: TableRun) -> dict[str, Any]:
    """Return what became of a table as it stands in JSON."""
    return {
        "table": run.table,
        "policy": run.training.described(),
        "steps": run.steps,
        "lookups": run.lookups,
        "hits": run.hits,
        "hit_rate": run.hit_rate,
        "hits_without": run.hits_without,
        "hit_rate_without": run.hit_rate_without,
        "distinct_keys": run.keys,
        "rows": run.rows,
        "most_rows": run.most_rows,
        "memory_bytes": run.memory_bytes,
        "most_memory_bytes": run.most_memory_bytes,
        "waiting": run.waiting,
        "evicted": run.evicted,
        "expired": run.expired,
        "stale": run.stale,
        "moments": [moment_record(moment) for moment in run.moments],
    }


def moment_record(moment: Moment) -> dict[str, Any]:
    """Return a moment by the names of its fields, and its hit rate."""
    return {**moment.__dict__, "hit_rate": moment.hit_rate}
