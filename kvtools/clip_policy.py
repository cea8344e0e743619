"""What holds for which table: what a command line says of all tables, or a file says of each.

    budget = "2GiB"                # of all tables together: their keys and rows
    by = "freq"                    # what the budget compares rows by

    [[tables]]
    name = ["ads/*", "user_emb"]   # patterns; the first entry that matches a table holds for it
    clip-abs = 1e-6
    min-freq = 2
    where = "norm > 0.01 or freq > 100"        # as `kvtools sql` has it; drop-where cuts the rows that meet it

    [[tables]]
    name = "*"
    older-than = "30d"
    top-k = 1_000_000
    by = "l2"
    keep-keys = "hot.txt"          # beside this file
    dtype = "int8"                 # what its rows become where they are looked up: of `kvtools export` and `cast`

An entry may also say what training does with the rows of its tables (`training_policy.py`). A table that no entry
matches is kept whole, but for what the budget cuts.
"""

from __future__ import annotations

import dataclasses
import datetime
import difflib
import fnmatch
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from kvtools.budget import keep_within
from kvtools.byte_size import byte_size
from kvtools.clip import Age, By, Choice, Clip, Criteria, Top, account_of, check_columns, choose_rows
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import Progress
from kvtools.dialects.schema import TableSchema, VersionUnit, row_bytes
from kvtools.errors import BadInputError, UsageError
from kvtools.key_list import read_key_list, read_keys_to_keep
from kvtools.narrow_rows import DTYPES
from kvtools.remote.stored import read_bytes
from kvtools.row_filter import condition_of
from kvtools.training_policy import FIELDS as TRAINING_FIELDS
from kvtools.training_policy import TrainingPolicy

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_OF_TABLE: dict[str, tuple[type, ...]] = {
    "name": (str, list),
    "clip-abs": (int, float),
    "clip-l2": (int, float),
    "min-freq": (int,),
    "where": (str,),
    "drop-where": (str,),
    "older-than": (str, int),
    "now": (str, int),
    "top-k": (int,),
    "by": (str,),
    "keep-keys": (str,),
    "drop-keys": (str,),
    "version-unit": (str,),
    "dtype": (str,),
    **TRAINING_FIELDS,
}
_OF_ALL: dict[str, tuple[type, ...]] = {"budget": (str, int), "by": (str,), "tables": (list,)}


@dataclass(frozen=True)
class Rule:
    """What holds for the tables whose name matches one of `patterns` (as file names do in a shell).

    `criteria` are what their rows must pass, `dtype` what these become where they are looked up, None for what they
    are, and `training` what is done with them in training.
    """

    patterns: tuple[str, ...]
    criteria: Criteria
    dtype: str | None = None
    training: TrainingPolicy = field(default_factory=TrainingPolicy)

    def matches(self, table: str) -> bool:
        """Tell whether this is a rule for `table`."""
        return any(fnmatch.fnmatchcase(table, pattern) for pattern in self.patterns)


@dataclass(frozen=True)
class Policy:
    """Which criteria hold for which table, the first rule that matches; and how many bytes all may have.

    `budget` is in bytes; `by` is what rows are compared by then: the frequency where all tables have them, else the
    Euclidean norm, if None.

    Raises:
        UsageError: `by` is given and no budget, or the budget is negative.

    Example:
        >>> policy = Policy((Rule(("ads/*",), Criteria(min_freq=2)),))
        >>> policy.criteria("ads/emb").min_freq, policy.criteria("user").min_freq
        (2, None)
    """

    rules: tuple[Rule, ...] = ()
    budget: int | None = None
    by: By | None = None

    def __post_init__(self) -> None:
        if self.budget is not None and self.budget < 0:
            raise UsageError(f"clipping to a budget: got {self.budget} bytes, expected 0 or more")
        if self.by is not None and self.budget is None:
            raise UsageError(f"clipping: got by {self.by} for all tables and no budget, expected both or neither")

    @classmethod
    def of(cls, criteria: Criteria, *, budget: int | None = None, by: By | None = None) -> Policy:
        """Return the policy that has the same criteria for every table."""
        return cls((Rule(("*",), criteria),), budget, by)

    def criteria(self, table: str) -> Criteria:
        """Return what holds for a table."""
        return self.rule(table).criteria

    def rule(self, table: str) -> Rule:
        """Return the rule that holds for a table; one that says nothing where none does."""
        return next((rule for rule in self.rules if rule.matches(table)), Rule((), Criteria()))

    def dtypes(self, tables: Sequence[str]) -> dict[str, str]:
        """Return what the rows of these tables become, by name, where that is said; see `narrow_rows.Dtypes`."""
        return {table: dtype for table in tables if (dtype := self.rule(table).dtype)}

    def training(self, table: str) -> TrainingPolicy:
        """Return what training does with the rows of a table."""
        return self.rule(table).training

    @property
    def empty(self) -> bool:
        """Whether nothing would be cut; types and training cut nothing."""
        return self.budget is None and all(rule.criteria.empty for rule in self.rules)

    def unmatched(self, tables: Sequence[str]) -> list[str]:
        """Return the patterns that match none of `tables`: misspelt, most likely."""
        patterns = [pattern for rule in self.rules for pattern in rule.patterns if pattern != "*"]
        return [pattern for pattern in patterns if not any(fnmatch.fnmatchcase(table, pattern) for table in tables)]


@dataclass(frozen=True)
class BudgetOrder:
    """By what a budget of so many bytes compares rows; `without_freqs` names tables for which it is not frequencies.

    It is empty where the policy says `by` itself.
    """

    bytes: int
    by: By
    without_freqs: tuple[str, ...] = ()


def budget_order(policy: Policy, tables: Sequence[TableSchema]) -> BudgetOrder | None:
    """Return by what the budget of a policy compares the rows of these tables; None where it has no budget.

    >>> tables = [TableSchema("emb", "npz", "int64", "float32", 4, (9,))]
    >>> budget_order(Policy(budget=100), tables)
    BudgetOrder(bytes=100, by='l2', without_freqs=('emb',))
    """
    if policy.budget is None:
        return None
    if policy.by is not None:
        return BudgetOrder(policy.budget, policy.by)
    without = tuple(schema.name for schema in tables if not schema.has_freqs)
    return BudgetOrder(policy.budget, "l2" if without else "freq", without)


def choose_all(
    checkpoint: Checkpoint,
    policy: Policy,
    *,
    tables: Sequence[str] = (),
    distinct: bool = False,
    zeros: Callable[[TableReader], bool] = lambda _: False,
    size: Callable[[TableSchema], int] = row_bytes,
    memory: int = 1 << 30,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Choice]:
    """Decide which rows of these tables of a checkpoint are kept, all tables if `tables` is empty.

    Args:
        checkpoint: an opened checkpoint, of any dialect.
        policy: what rows must pass.
        tables: the tables' names.
        distinct: leave out rows whose key a later one has again, before all else.
        zeros: tells of a table whether rows of zeros alone are left out, whatever the policy says.
        size: the bytes that a row of a table takes where it goes, its key included; a budget counts these.
        memory: bytes to stay within; what needs more goes to temporary files.
        workers: how many parts to read at once.
        progress: called as rows are read.

    Raises:
        BadInputError: there is no table; or one has no frequencies or versions to go by.
        UsageError: two criteria cannot hold together.

    Example:
        ```python
        checkpoint = kvtools.open("model.ckpt-100")
        choices = choose_all(checkpoint, Policy.of(Criteria(min_freq=2), budget=2 << 30))
        print([(choice.table, choice.kept, choice.lookups_missed) for choice in choices])
        ```
    """
    chosen = checkpoint.select(tables)
    if not chosen:
        raise BadInputError(f"clipping '{checkpoint.path}': it has no key-value table; see `kvtools inspect`")
    order = budget_order(policy, [table.schema for table in chosen])
    by = None if order is None else order.by
    for table in chosen:  # before any row is read
        check_columns(table.schema, policy.criteria(table.schema.name))
        policy.criteria(table.schema.name).columns_of(table)
        if by is not None:
            check_columns(table.schema, Criteria(top=Top(0, by)))
    choices = [
        choose_rows(
            table,
            dataclasses.replace(policy.criteria(table.schema.name), zeros=zeros(table)),
            distinct=distinct,
            score=by,
            size=size(table.schema),
            memory=memory,
            workers=workers,
            progress=progress,
        )
        for table in chosen
    ]
    if policy.budget is None or by is None:
        return choices
    scores = [choice.scores for choice in choices if choice.scores is not None]
    masks, sizes = [choice.mask for choice in choices], [choice.row_bytes for choice in choices]
    cut = keep_within(chosen, masks, scores, sizes, policy.budget, memory=memory)
    return [
        _after_budget(choice, account_of(table, choice.mask, choice.hidden_rows, choice.row_bytes), rows)
        for table, choice, rows in zip(chosen, choices, cut, strict=True)
    ]


def _after_budget(before: Choice, after: Choice, cut: int) -> Choice:
    return dataclasses.replace(
        after, failed={**before.failed, "budget": cut}, non_finite=before.non_finite, undated=before.undated
    )


# ---- What is written of a policy


def read_policy(path: str) -> Policy:
    """Read a policy from a TOML file; see the top of this file.

    Raises:
        BadInputError: the file cannot be read, or is no TOML.
        UsageError: something in it is no part of a policy; the message names it and what is expected.
    """
    doing = f"reading the policy '{path}'"
    try:
        told = tomllib.loads(read_bytes(path).decode("utf-8"))
    except OSError as error:
        raise BadInputError(f"{doing}: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInputError(f"{doing}: it is no TOML: {error}") from error
    _check(told, _OF_ALL, doing)
    rules = []
    for number, entry in enumerate(told.get("tables", []), 1):
        whose = f"{doing}: entry {number} of tables"
        if not isinstance(entry, dict):
            raise UsageError(f"{whose}: got {entry!r}, expected [[tables]] with a name")
        _check(entry, _OF_TABLE, whose)
        rules.append(_rule(entry, whose, Path(path).parent))
    if "tables" not in told and "budget" not in told:
        raise UsageError(
            f"{doing}: it has neither a budget nor [[tables]], so nothing would be cut; for that say tables = []"
        )
    try:
        budget = None if "budget" not in told else byte_size(str(told["budget"]), "budget")
        return Policy(tuple(rules), budget, by_of(told["by"], "by") if "by" in told else None)
    except UsageError as error:
        raise UsageError(f"{doing}: {error}") from None


def _rule(entry: dict[str, Any], whose: str, folder: Path) -> Rule:
    patterns = entry.get("name", [])
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise UsageError(f'{whose}: it has no name, expected a pattern such as name = "ads/*", or a list of them')
    readers = {"keep-keys": read_keys_to_keep, "drop-keys": read_key_list}
    lists = {key: read(str(folder / entry[key])) if key in entry else None for key, read in readers.items()}
    try:
        criteria = Criteria(
            norms=norms_of(entry.get("clip-abs"), entry.get("clip-l2")),
            min_freq=entry.get("min-freq"),
            age=age_of(_text(entry.get("older-than")), _text(entry.get("now")), "older-than", "now"),
            keep_keys=lists["keep-keys"],
            drop_keys=lists["drop-keys"],
            top=top_of(entry.get("top-k"), entry.get("by"), "top-k", "by"),
            version_unit=version_unit_of(entry.get("version-unit"), "version-unit"),
            where=condition_of(entry.get("where")),
            drop_where=condition_of(entry.get("drop-where")),
        )
    except UsageError as error:
        raise UsageError(f"{whose}: {error}") from None
    dtype = entry.get("dtype")
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"{whose}: got dtype = '{dtype}', expected {', '.join(DTYPES)}")
    return Rule(tuple(patterns), criteria, dtype, TrainingPolicy.of(entry, whose))


def _check(told: dict[str, Any], known: dict[str, tuple[type, ...]], whose: str) -> None:
    for key, value in told.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            meant = f"; did you mean {near[0]}?" if near else f", expected {', '.join(known)}"
            raise UsageError(f"{whose}: got {key}, which is no part of it{meant}")
        if not isinstance(value, known[key]) or (isinstance(value, bool) and bool not in known[key]):
            kinds = {str: "a string", int: "a whole number", float: "a number", list: "a list"}
            kinds |= {bool: "true or false", dict: "a table such as { count = 3 }"}
            expected = " or ".join(kinds[kind] for kind in known[key] if not (kind is int and float in known[key]))
            raise UsageError(f"{whose}: got {key} = {value!r}, expected {expected}")


def _text(value: str | int | None) -> str | None:
    return None if value is None else str(value)


def norms_of(clip_abs: float | None, clip_l2: float | None) -> tuple[Clip, ...]:
    """Return the thresholds that are given."""
    norms = [] if clip_abs is None else [Clip("abs", clip_abs)]
    return tuple(norms if clip_l2 is None else [*norms, Clip("l2", clip_l2)])


def age_of(older_than: str | None, now: str | None, age_name: str, now_name: str) -> Age | None:
    """Return the age that "30d", "12h" or a number of steps is; the names are what a message calls them.

    Raises:
        UsageError: it is no age, or `now` is no moment.

    >>> age_of("30d", "1000", "--older-than", "--now")
    Age(amount=2592000, timed=True, now=1000)
    """
    if older_than is None:
        if now is not None:
            raise UsageError(f"clipping by age: got {now_name} without {age_name}, expected both or neither")
        return None
    found = re.fullmatch(r"(\d{1,18})([smhdw]?)", older_than)
    if not found:
        raise UsageError(
            f"clipping by age: got {age_name} {older_than!r}, expected a time such as 30d, 12h or 90m,"
            " or a number of steps"
        )
    timed = bool(found[2])
    return Age(int(found[1]) * _UNITS.get(found[2], 1), timed, None if now is None else _moment(now, timed, now_name))


def _moment(now: str, timed: bool, name: str) -> int:
    if re.fullmatch(r"\d{1,18}", now):
        return int(now)
    try:
        if not timed:
            raise ValueError
        moment = datetime.datetime.fromisoformat(now)
    except ValueError:
        expected = "a date such as 2024-05-31, or Unix seconds" if timed else "a step"
        raise UsageError(f"clipping by age: got {name} {now!r}, expected {expected}") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.timezone.utc)
    return int(moment.timestamp())


def top_of(rows: int | None, by: str | None, top_name: str, by_name: str) -> Top | None:
    """Return how many rows to keep and by what; raises `UsageError` for one without the other, or an unknown `by`."""
    if rows is None and by is None:
        return None
    if rows is None or by is None:
        raise UsageError(f"clipping: {top_name} K and {by_name} {'|'.join(get_args(By))} go together")
    return Top(rows, by_of(by, by_name))


def by_of(by: str, name: str) -> By:
    """Return what rows are compared by; raises `UsageError` if it is unknown."""
    if by not in get_args(By):
        raise UsageError(f"clipping: got {name} {by!r}, expected freq, l2, abs or version")
    return by  # type: ignore[return-value]


def version_unit_of(unit: str | None, name: str) -> VersionUnit | None:
    """Return what versions count; raises `UsageError` if it is unknown."""
    if unit is not None and unit not in ("seconds", "days", "steps"):
        raise UsageError(f"got {name} {unit!r}, expected seconds, days or steps")
    return unit  # type: ignore[return-value]
