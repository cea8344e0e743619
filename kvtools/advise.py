"""What clipping, other types, expiry and admission would save of each table, what they cost, and which are worth it.

Measures are tried one by one, on what a table's rows say of themselves or on a log. The best of them that lose no more
than asked become a policy, and what that saves and costs is counted by the very code of `kvtools export` and `clip`.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvtools.auc import LookedUpRows, Scorer, Scores
from kvtools.clip import Age, Choice, Clip, Criteria
from kvtools.clip_policy import Policy, Rule, budget_order, choose_all
from kvtools.dialects.chunk import KEYS
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.schema import TableSchema, VersionUnit, row_bytes
from kvtools.errors import BadInputError, UsageError
from kvtools.export import choose_for_saved_model
from kvtools.export_model import choose_for_model, has_custom_operations
from kvtools.id_log import IdLog, unused_columns
from kvtools.log_counts import LogCounts, columns_of_tables, count_lookups
from kvtools.narrow_rows import bytes_of_values
from kvtools.policy_text import Entry, pattern_of, policy_text
from kvtools.row_errors import RowError, row_errors
from kvtools.survey_rows import Cut, Survey, norm_thresholds, sample_of, survey_rows
from kvtools.table_names import listed
from kvtools.training_policy import Admission, TrainingPolicy

Goal = Literal["serving", "training"]
"""What bytes are counted: those of an exported SavedModel, or of a checkpoint with its slots and counters."""

MAX_LOSS = 0.01
MAX_ERROR = 0.01
_DAY = 86_400
_ENOUGH = 0.99
"""Of the rows that the best thresholds cut: fewer thresholds that cut so many are as good."""


@dataclass(frozen=True)
class Measure:
    """One thing that could be done to a table: a line of a policy, and the rows and bytes that it alone would save.

    `lookups` is the share of lookups that would miss a row, None where nobody counts; `error` what rows lose. `of`
    says where the bytes would be saved.
    """

    line: str
    of: Literal["rows", "types", "training"]
    rows: int
    bytes: int
    lookups: float | None = None
    error: RowError | None = None
    advised: bool = False


@dataclass(frozen=True)
class TableAdvice:
    """What to do with a table: the fields of its entry in a policy, and what they save and cost together.

    `rows` and `bytes` are those of now, `kept` and `bytes_after` those that stay. Of `lookups` that find a row now
    `lookups_missed` will not; None where nobody counts. Of these, `lookups_of_zeros` find rows of zeros, which an
    export leaves out, as a missing key gives the same: they lose nothing. `counted_by` says whose lookups these are:
    the "log"'s, or those of the checkpoint's frequencies, "freq". `error` is what the rows lose as `dtype`.
    """

    table: str
    rows: int
    bytes: int
    kept: int
    bytes_after: int
    lookups: int | None
    lookups_missed: int | None
    lookups_of_zeros: int
    dtype: str | None
    error: RowError | None
    fields: Mapping[str, Any]
    comments: Mapping[str, str]
    measures: Sequence[Measure] = field(repr=False)
    notes: Sequence[str] = ()
    counted_by: Literal["log", "freq"] | None = None

    @property
    def bytes_saved(self) -> int:
        """The bytes that go."""
        return self.bytes - self.bytes_after

    @property
    def loss(self) -> float | None:
        """The share of lookups that will miss a row that is not zeros; None where nobody counts, or there are none."""
        if not self.lookups or self.lookups_missed is None:
            return None
        return (self.lookups_missed - self.lookups_of_zeros) / self.lookups


@dataclass(frozen=True)
class Advice:
    """What to do with the tables of a checkpoint, those that save the most first.

    `budget` is what was asked for, `over_budget` whether rows must go for it beyond what is advised anyway; then
    `compared_by` says by which column of the checkpoint a budget compares them, a log's lookups are never what it
    goes by. `auc` is that of the log's labels, before and after. `left_out` are tables that the command does not
    write: those that nothing of a whole model looks up. `unused_columns` are those of the log that could be ids, and
    are of no table; `notes` what else there is to know, a sentence each.
    """

    path: str
    goal: Goal
    tables: Sequence[TableAdvice]
    budget: int | None = None
    over_budget: bool = False
    compared_by: str | None = None
    auc: tuple[float, float] | None = None
    whole_model: bool = False
    left_out: Sequence[str] = ()
    unused_columns: Sequence[str] = ()
    notes: Sequence[str] = ()

    @property
    def bytes(self) -> int:
        """Those of all tables."""
        return sum(table.bytes for table in self.tables)

    @property
    def bytes_after(self) -> int:
        """Those that stay."""
        return sum(table.bytes_after for table in self.tables)

    @property
    def loss(self) -> float | None:
        """The share of all lookups that will miss a row; None where no table's are counted, or some by a log and others
        by frequencies: these do not add up."""
        counted = [table for table in self.tables if table.lookups is not None]
        if len({table.counted_by for table in counted}) > 1:
            return None
        lookups = sum(table.lookups or 0 for table in counted)
        lost = sum((table.lookups_missed or 0) - table.lookups_of_zeros for table in counted)
        return lost / lookups if lookups else None

    def policy_text(self) -> str:
        """Return the policy as a TOML file."""
        for_what = "an export" if self.goal == "serving" else "a checkpoint"
        head = [
            f"what `kvtools advise` says of {self.path}, for {for_what}",
            f"{self.bytes:,} bytes become {self.bytes_after:,}",
        ]
        entries = [Entry(table.table, table.fields, table.comments) for table in self.tables if table.fields]
        budget = self.budget if self.over_budget else None
        return policy_text(entries, budget=budget, head=head)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.over_budget and not any(table.fields for table in self.tables)

    def command(self, policy: str) -> str:
        """Return the command that does what the policy says."""
        path, policy = shlex.quote(self.path), shlex.quote(policy)
        if self.goal == "training":
            return f"kvtools clip {path} OUT --policy {policy}"
        return f"kvtools export --savedmodel OUT {path} --policy {policy}"


def advise(
    checkpoint: Checkpoint,
    *,
    tables: Sequence[str] = (),
    goal: Goal = "serving",
    budget: int | None = None,
    log: IdLog | None = None,
    columns: Sequence[str] = (),
    labels: str | None = None,
    scorer: Scorer | None = None,
    max_loss: float = MAX_LOSS,
    max_error: float = MAX_ERROR,
    now: int | None = None,
    version_unit: VersionUnit | None = None,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
) -> Advice:
    """Say what would save the most bytes of each table within a loss.

    Args:
        checkpoint: an opened checkpoint, of any dialect.
        tables: the tables' names; all if empty.
        goal: what bytes are counted, and which command is meant.
        budget: the bytes that all these tables together may have; rows go for it, those of the lowest frequency in the
            checkpoint first, as the command has it, also where there is a log.
        log: ids that were looked up; what tables lose is the share of its lookups that find a row now. Without a log,
            and for tables of which it has none, rows' frequencies count.
        columns: COLUMN=TABLE, for columns of the log whose name is not that of their table.
        labels: the log's column of labels, with a `scorer`.
        scorer: gives a score to each example of the log; see `auc.py`.
        max_loss: the share of a table's lookups that may miss a row.
        max_error: how large the relative error (root mean square) of a table's rows may be.
        now: what ages are counted from, Unix seconds or a step; each table's largest version if None.
        version_unit: what versions count, where the files do not say.
        memory: bytes to stay within when rows are chosen.
        progress: called with (table, rows read, rows).

    Raises:
        BadInputError: there is no table; something in the log is wrong.
        UsageError: a share out of range, labels without a scorer, or a column or table that is not there.

    Example:
        ```python
        advice = advise(kvtools.open("model.ckpt-100"), log=open_log("ids.parquet"))
        print(advice.bytes, advice.bytes_after, advice.loss)
        Path("policy.toml").write_text(advice.policy_text())
        ```
    """
    doing = f"advising on '{checkpoint.path}'"
    for name, share in (("loss", max_loss), ("error", max_error)):
        if not 0 <= share <= 1:
            raise UsageError(f"{doing}: got a largest {name} of {share}, expected 0 to 1, as 0.01 for 1%")
    if (labels is None) != (scorer is None):
        raise UsageError(f"{doing}: labels and a scorer go together")
    if labels is not None and log is None:
        raise UsageError(f"{doing}: labels are a column of a log; give it with --log")
    readers = checkpoint.select(tables)
    if not readers:
        raise BadInputError(f"{doing}: it has no key-value table; see `kvtools inspect`")
    names = [reader.schema.name for reader in readers]
    known = {reader.schema.name: reader for reader in readers}
    counts: dict[str, LogCounts] = {}
    unused: list[str] = []
    said: list[str] = []
    if log is not None:
        if log.of_lookups:
            known = dict(checkpoint.tables)
        counts = count_lookups(log, known, columns, progress=progress)
        if not any(name in names for name in counts):
            raise UsageError(f"{doing}: the log '{log.path}' looks nothing up in {', '.join(names[:8])}")
        used = {*columns_of_tables(log, known, columns), *checkpoint.tables, labels}
        unused = [name for name in log.features if name not in used]
        sentence = unused_columns(log, [name for name in used if name is not None])
        said += [sentence] if sentence else []
    whole_model = goal == "serving" and not tables and has_custom_operations(Path(checkpoint.path))
    plans = [
        _plan(reader, goal, log, counts.get(reader.schema.name), max_loss, max_error, now, version_unit, progress)
        for reader in readers
    ]
    policy = Policy(tuple(plan.rule() for plan in plans))
    choose = _chooser(checkpoint, names, goal, whole_model, memory, progress)
    choices = {choice.table: choice for choice in choose(policy)}
    over = budget is not None and sum(choice.bytes for choice in choices.values()) > budget
    compared_by = None
    if over:
        policy = Policy(policy.rules, budget)
        choices = {choice.table: choice for choice in choose(policy)}
        order = budget_order(policy, [known[name].schema for name in choices])
        compared_by = None if order is None else order.by
    left_out = [name for name in names if name not in choices]
    made = [_advice(plan, choices[plan.schema.name], goal, over) for plan in plans if plan.schema.name in choices]
    auc = None
    if log is not None and labels is not None and scorer is not None:
        dtypes = {plan.schema.name: plan.dtype if goal == "serving" else None for plan in plans}
        auc = _auc(log, known, columns, labels, scorer, choices, counts, dtypes)
    made.sort(key=lambda table: (-table.bytes_saved, -table.bytes, table.table))
    sources = {table.counted_by for table in made if table.lookups is not None}
    if len(sources) > 1:
        by = {source: listed(table.table for table in made if table.counted_by == source) for source in ("log", "freq")}
        said.append(
            f"lookups lost of all tables are not told: those of {by['log']} are counted by the log, those of"
            f" {by['freq']} by the checkpoint's frequencies, which do not add up"
        )
    if over and log is not None:
        said.append(
            f"the budget compares rows by {compared_by} in the checkpoint, as the command does, and not by the log,"
            " which counts what is lost"
        )
    return Advice(str(checkpoint.path), goal, made, budget, over, compared_by, auc, whole_model, left_out, unused, said)


def _not_in(log: IdLog, table: str, *, counted: bool) -> str:
    """Say that a log has nothing of a table, what counts then, and the way out."""
    what = "the log looks nothing up in it" if log.of_lookups else "the log has no column of it"
    instead = (
        "its lookups are counted by the checkpoint's frequencies"
        if counted
        else "what it costs to cut rows is not known"
    )
    way_out = "" if log.of_lookups else f"; --column COLUMN={table} says which it is"
    return f"{what}: {instead}{way_out}"


Chooser = Callable[[Policy], list[Choice]]


def _chooser(
    checkpoint: Checkpoint, names: Sequence[str], goal: Goal, whole_model: bool, memory: int, progress: Progress | None
) -> Chooser:
    """Return what decides which rows stay: what the command does by whom the policy is meant to be taken."""

    def choose(policy: Policy) -> list[Choice]:
        if goal == "training":
            return choose_all(checkpoint, policy, tables=names, memory=memory, progress=progress)
        dtypes = policy.dtypes(names)
        if whole_model:
            return choose_for_model(checkpoint, policy=policy, dtype=dtypes, memory=memory, progress=progress)
        return choose_for_saved_model(
            checkpoint, tables=names, policy=policy, dtype=dtypes, memory=memory, progress=progress
        )

    return choose


# ---- One table


@dataclass
class _Plan:
    """What is found out of a table, and what is to be done with it."""

    reader: TableReader
    survey: Survey
    counts: LogCounts | None
    cut: Cut
    dtype: str | None
    error: RowError | None
    admission: int | None
    unit: VersionUnit
    told_unit: VersionUnit | None
    measures: list[Measure]
    notes: list[str]

    @property
    def schema(self) -> TableSchema:
        return self.reader.schema

    def rule(self) -> Rule:
        cut = self.cut
        age = None if cut.age is None else Age(cut.age, self.unit != "steps", self.survey.now)
        criteria = Criteria(
            norms=() if cut.norm is None else (Clip("l2", cut.norm),),
            min_freq=cut.freq,
            age=age,
            version_unit=self.told_unit if age else None,
        )
        return Rule((pattern_of(self.schema.name),), criteria, self.dtype, self.training)

    @property
    def training(self) -> TrainingPolicy:
        seconds = self.cut.age or 0
        return TrainingPolicy(
            admission=None if self.admission is None else Admission("count", self.admission),
            expire_after_seconds=0 if self.unit == "steps" else seconds,
            expire_after_steps=seconds if self.unit == "steps" else 0,
        )

    def fields(self) -> dict[str, Any]:
        """Return the fields of an entry that says `rule`."""
        cut = self.cut
        told: dict[str, Any] = {"min-freq": cut.freq, "clip-l2": cut.norm}
        if cut.age is not None:
            told["older-than"] = _age(cut.age, self.unit)
            told["now"] = self.survey.now
            told["version-unit"] = self.told_unit
        told["dtype"] = self.dtype
        told["admission"] = None if self.admission is None else {"count": self.admission}
        if cut.age is not None:
            told["expire-after"] = _age(cut.age, self.unit)
        return {name: value for name, value in told.items() if value is not None}


def _plan(
    reader: TableReader,
    goal: Goal,
    log: IdLog | None,
    counts: LogCounts | None,
    max_loss: float,
    max_error: float,
    now: int | None,
    version_unit: VersionUnit | None,
    progress: Progress | None,
) -> _Plan:
    schema = reader.schema
    unit: VersionUnit = version_unit or schema.version_unit
    sample = sample_of(reader)
    survey = survey_rows(
        reader,
        norms=norm_thresholds(sample),
        counts=None if counts is None else counts.of,
        free_zeros=goal == "serving",
        now=now,
        version_unit=version_unit,
        progress=progress,
    )
    notes = []
    if log is not None and counts is None:
        notes.append(_not_in(log, schema.name, counted=bool(survey.lookups)))
    elif survey.lookups is None:
        notes.append("it has no frequencies: what it costs to cut rows is not known; a log tells")
    elif not survey.lookups:
        notes.append("none of its rows was looked up: what it costs to cut rows is not known")
    elif counts is not None and survey.never:
        notes.append(f"the log looks {survey.never:,} of its {survey.rows:,} rows up never")
    if survey.not_finite:
        notes.append(f"{survey.not_finite:,} rows have a NaN or an infinity: int8 and int4 do not hold them")
    if schema.has_versions and unit == "unknown":
        notes.append(
            "nothing says what its versions count, so ages were not tried: --version-unit seconds, days or steps"
        )
    if not survey.lookups:
        survey = dataclasses.replace(survey, lookups=None)
    cuts = survey.cuts()
    cut = _best(cuts, survey, max_loss)
    errors = [error for error in row_errors(sample) if _holds(error.dtype, survey)] if goal == "serving" else []
    if schema.rows_as:
        errors = []
        notes.append(f"its rows are {schema.rows_as} already")
    fitting = [error for error in errors if error.rms <= max_error]
    error = min(fitting, key=lambda each: (each.bytes, each.rms), default=None)
    waited, rare, lookups = survey.waited, survey.rare, survey.lookups
    if counts is not None and counts.lookups:
        frequencies = counts.all()
        waited = {least: int((np.minimum(frequencies, least) - 1).sum()) for least in waited}
        rare = {least: int(np.count_nonzero(frequencies < least)) for least in rare}
        lookups = counts.lookups
    admitted = [least for least in rare if lookups and rare[least] and waited[least] <= max_loss * lookups]
    # Of counts that keep as many keys out, the smallest: it lets those in that come from now on, at no more cost.
    admission = min(admitted, key=lambda least: (-rare[least], least), default=None)
    plan = _Plan(
        reader,
        survey,
        counts,
        cut,
        error.dtype if error else None,
        error,
        admission,
        unit,
        version_unit,
        [],
        notes,
    )
    plan.measures += _measures(plan, cuts, errors, goal, (waited, rare, lookups))
    return plan


def _best(cuts: Sequence[Cut], survey: Survey, max_loss: float) -> Cut:
    """Return the thresholds that cut the most rows within a loss, and the fewest of those that cut about as many."""
    nothing = cuts[0]
    if survey.lookups is None:
        return nothing
    within = [cut for cut in cuts if (cut.lookups or 0) <= max_loss * survey.lookups]
    most = max((cut.rows for cut in within), default=0)
    if not most:
        return nothing
    enough = [cut for cut in within if cut.rows >= _ENOUGH * most]
    return min(enough, key=lambda cut: (cut.criteria, -cut.rows, cut.lookups))


def _holds(dtype: str, survey: Survey) -> bool:
    """Tell whether rows of a type can be made of all rows, not only of those of a sample."""
    if dtype in ("int8", "int4"):
        return not survey.not_finite and survey.largest < 1.6e38
    return survey.largest < (65504.0 if dtype == "float16" else 3.3e38)


def _measures(
    plan: _Plan,
    cuts: Sequence[Cut],
    errors: Sequence[RowError],
    goal: Goal,
    seldom: tuple[Mapping[int, int], Mapping[int, int], int | None],
) -> list[Measure]:
    schema, survey = plan.schema, plan.survey
    size = _row_bytes(schema, goal)
    found = []
    for cut in cuts:
        if cut.criteria != 1:
            continue
        if cut.freq is not None:
            line, advised = f"min-freq = {cut.freq}", cut.freq == plan.cut.freq
        elif cut.age is not None:
            age = _age(cut.age, plan.unit)
            line, advised = f"older-than = {age if isinstance(age, int) else repr(age)}", cut.age == plan.cut.age
        else:
            line, advised = f"clip-l2 = {cut.norm}", cut.norm == plan.cut.norm
        share = None if survey.lookups is None or cut.lookups is None else cut.lookups / survey.lookups
        if cut.rows:
            found.append(Measure(line, "rows", cut.rows, cut.rows * size, share, advised=advised))
    value_bytes = bytes_of_values(schema, None)
    for error in errors:
        saved = survey.rows * (value_bytes - error.bytes)
        line = f"dtype = '{error.dtype}'"
        found.append(Measure(line, "types", 0, saved, None, error, error.dtype == plan.dtype))
    waited, rare, lookups = seldom
    for least, rows in rare.items():
        if rows and lookups:
            line = f"admission = {{ count = {least} }}"
            saved = rows * row_bytes(schema)
            found.append(
                Measure(line, "training", rows, saved, waited[least] / lookups, advised=least == plan.admission)
            )
    return found


def _advice(plan: _Plan, choice: Choice, goal: Goal, over_budget: bool) -> TableAdvice:
    lookups, missed = choice.lookups, choice.lookups_missed
    notes = list(plan.notes)
    if plan.counts is not None:
        lookups, missed = _replayed(plan.reader, choice, plan.counts)
        if over_budget and lookups and choice.lookups and choice.lookups_missed is not None:
            notes.append(
                f"the rows that go have {choice.lookups_missed / choice.lookups:.2%} of the lookups by the checkpoint's"
                f" frequencies, and {missed / lookups:.2%} of the log's"
            )
    fields = plan.fields()
    comments = {}
    for measure in plan.measures:
        name = measure.line.partition(" ")[0]
        if measure.advised:
            cost = ""
            if measure.error is not None:
                cost = f", relative error {measure.error.rms:.2%}"
            elif measure.lookups is not None:
                cost = f", {measure.lookups:.2%} of lookups lost"
            comments[name] = f"alone saves {measure.bytes:,} bytes{cost}"
    if goal == "training" and over_budget and 0 < choice.kept < choice.rows:
        fields |= {"max-capacity": choice.kept, "eviction": "lfu"}
    whole = _row_bytes(plan.schema, goal)
    return TableAdvice(
        plan.schema.name,
        choice.rows,
        choice.rows * whole,
        choice.kept,
        choice.bytes,
        lookups,
        missed,
        plan.survey.lookups_of_zeros if "zeros" in choice.failed else 0,
        plan.dtype,
        plan.error,
        fields,
        comments,
        plan.measures,
        notes,
        None if lookups is None else "freq" if plan.counts is None else "log",
    )


def _replayed(reader: TableReader, choice: Choice, counts: LogCounts) -> tuple[int, int]:
    """Return how many lookups of a log find a row, and how many of them will not where these rows are kept."""
    found = kept = row = 0
    for part in range(reader.parts):
        at = 0
        for chunk in reader.chunks(KEYS, part=part, rows=1 << 18):
            lookups = counts.of(chunk.keys)
            first, last = np.searchsorted(choice.hidden_rows, [row, row + len(chunk)])
            lookups[choice.hidden_rows[first:last] - row] = 0
            found += int(lookups.sum())
            kept += int(lookups[choice.mask.get(part, at, len(chunk))].sum())
            at += len(chunk)
            row += len(chunk)
    return found, found - kept


def _auc(
    log: IdLog,
    known: Mapping[str, TableReader],
    columns: Sequence[str],
    labels: str,
    scorer: Scorer,
    choices: Mapping[str, Choice],
    counts: Mapping[str, LogCounts],
    dtypes: Mapping[str, str | None],
) -> tuple[float, float]:
    table_of = columns_of_tables(log, known, columns)
    rows = {
        table: LookedUpRows(
            known[table], choices[table].mask, choices[table].hidden_rows, dtypes.get(table), counts[table]
        )
        for table in {*table_of.values()}
        if table in choices and table in counts
    }
    used = {column: table for column, table in table_of.items() if table in rows}
    scores = Scores(scorer, rows, used)
    for batch in log.batches(sorted(used), 1 << 14, labels=labels):
        scores.add(batch)
    return scores.auc()


def _row_bytes(schema: TableSchema, goal: Goal) -> int:
    return row_bytes(schema) if goal == "training" else bytes_of_values(schema, None) + 8


def _age(amount: int, unit: VersionUnit) -> str | int:
    """Return an age as a policy has it: days, or a number of steps."""
    return amount if unit == "steps" else f"{amount // _DAY}d"


def described(advice: Advice) -> dict[str, Any]:
    """Return advice as it stands in JSON."""
    return {
        "path": advice.path,
        "for": advice.goal,
        "whole_model": advice.whole_model,
        "bytes": advice.bytes,
        "bytes_after": advice.bytes_after,
        "bytes_saved": advice.bytes - advice.bytes_after,
        "lookups_lost": advice.loss,
        "budget": advice.budget,
        "over_budget": advice.over_budget,
        "compared_by": advice.compared_by,
        "counted_by": sorted({table.counted_by for table in advice.tables if table.counted_by}),
        "unused_columns": list(advice.unused_columns),
        "notes": list(advice.notes),
        "left_out": list(advice.left_out),
        "auc": None if advice.auc is None else {"before": advice.auc[0], "after": advice.auc[1]},
        "tables": [
            {
                **{name: value for name, value in vars(table).items() if name not in ("measures", "comments", "error")},
                "bytes_saved": table.bytes_saved,
                "lookups_lost": table.loss,
                "error": table.error and dataclasses.asdict(table.error),
                "measures": [dataclasses.asdict(measure) for measure in table.measures],
            }
            for table in advice.tables
        ],
    }
