"""Which rows to leave out, as `kvtools clip` and `kvtools export` take it."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvtools.byte_size import byte_size
from kvtools.cli.layout import columns, shown, size
from kvtools.cli.terminal import prose
from kvtools.clip import Choice, Criteria
from kvtools.clip_policy import (
    BudgetOrder,
    Policy,
    age_of,
    by_of,
    norms_of,
    read_policy,
    top_of,
    version_unit_of,
)
from kvtools.errors import UsageError
from kvtools.key_list import read_key_list, read_keys_to_keep
from kvtools.row_filter import condition_of

_NAMES_SHOWN = 5


@dataclass(frozen=True)
class Clipping:
    """What both commands have; the thresholds of norms and the lists of keys go by names of the command's own."""

    min_freq: Annotated[
        int | None, typer.Option("--min-freq", metavar="N", help="Cut rows seen fewer than N times.")
    ] = None
    older_than: Annotated[
        str | None,
        typer.Option("--older-than", metavar="AGE", help="Cut rows last written so long ago: 30d, 12h, or N steps."),
    ] = None
    now: Annotated[
        str | None,
        typer.Option("--now", metavar="WHEN", help="Count the age from here: 2024-05-31, Unix seconds, or a step."),
    ] = None
    where: Annotated[
        str | None,
        typer.Option(
            "--where", metavar="EXPRESSION", help="Keep only rows that meet this, as in 'freq >= 3 or norm > 0.1'."
        ),
    ] = None
    drop_where: Annotated[
        str | None,
        typer.Option(
            "--drop-where", metavar="EXPRESSION", help="Cut rows that meet this, as in 'freq < 3 and norm < 0.01'."
        ),
    ] = None
    top_k: Annotated[
        int | None, typer.Option("--top-k", metavar="K", help="Of what is left keep the K rows highest by --by.")
    ] = None
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget", metavar="SIZE", help="Of what is left, in all tables, keep what fits, the best by --by."
        ),
    ] = None
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="freq|l2|abs|version",
            help="What --top-k and --budget compare; for --budget freq where all tables have it, else l2.",
        ),
    ] = None
    version_unit: Annotated[
        str | None,
        typer.Option("--version-unit", metavar="seconds|days|steps", help="What versions count."),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option("--policy", metavar="FILE", help="Thresholds by table, in TOML; in place of the options above."),
    ] = None

    def policy_of(
        self,
        path: str,
        clip_abs: float | None,
        clip_l2: float | None,
        keep_keys: str | None,
        drop_keys: str | None,
        names: tuple[str, str],
    ) -> Policy:
        """Return what all of these say; `names` are those of the options `keep_keys` and `drop_keys`.

        Raises:
            UsageError: options do not go together, or make no sense.
        """
        if keep_keys == drop_keys == "-":
            raise UsageError(f"clipping '{path}': got {names[0]} - and {names[1]} -, expected one of them")
        budget = None if self.budget is None else byte_size(self.budget, "--budget")
        by = None if self.by is None else by_of(self.by, "--by")
        criteria = Criteria(
            norms=norms_of(clip_abs, clip_l2),
            min_freq=self.min_freq,
            age=age_of(self.older_than, self.now, "--older-than", "--now"),
            keep_keys=None if keep_keys is None else read_keys_to_keep(keep_keys),
            drop_keys=None if drop_keys is None else read_key_list(drop_keys),
            top=top_of(self.top_k, by if self.top_k is not None or budget is None else None, "--top-k", "--by"),
            version_unit=version_unit_of(self.version_unit, "--version-unit"),
            where=condition_of(self.where),
            drop_where=condition_of(self.drop_where),
        )
        if self.policy is None:
            return Policy.of(criteria, budget=budget, by=None if budget is None else by)
        if criteria != Criteria():
            raise UsageError(
                f"clipping '{path}': got --policy and thresholds beside it; write those into the file, under a"
                ' [[tables]] with name = "*"'
            )
        policy = read_policy(self.policy)
        if budget is not None and policy.budget is not None:
            raise UsageError(f"clipping '{path}': got --budget, and a budget in '{self.policy}'; expected one of them")
        return Policy(policy.rules, policy.budget if budget is None else budget, by or policy.by)


def warn_unmatched(policy: Policy, tables: Sequence[str], file: str | None) -> None:
    """Say which names of a policy no table has."""
    for pattern in policy.unmatched(tables):
        print(f"kvtools: warning: '{pattern}' in '{file}' matches no table; see `kvtools inspect`", file=sys.stderr)


def print_choices(choices: Sequence[Choice]) -> None:
    """Print what is kept and cut of each table, and why."""
    counted = any(choice.lookups for choice in choices)
    print(
        columns(
            ["table", "rows", "cut", "kept", "bytes kept", "bytes saved", *(["lookups missed"] if counted else [])],
            [
                [
                    shown(choice.table),
                    f"{choice.rows:,}",
                    f"{choice.cut:,}",
                    f"{choice.kept:,}",
                    size(choice.bytes),
                    size(choice.bytes_saved),
                    *([share_missed(choice.lookups, choice.lookups_missed)] if counted else []),
                ]
                for choice in choices
            ],
            right=frozenset(range(1, 7)),
        )
    )
    if len(choices) > 1:
        rows, cut = (sum(getattr(choice, what) for choice in choices) for what in ("rows", "cut"))
        saved = size(sum(choice.bytes_saved for choice in choices))
        print(prose(f"{len(choices):,} tables, {rows:,} rows, {cut:,} cut, {saved} saved"))
    for choice in choices:
        name = shown(choice.table)
        print_cut(choice.table, choice.failed)
        if choice.non_finite:
            print(prose(f"kept: {name}: {choice.non_finite:,} rows with NaN or infinity, whatever their norm"))
        if choice.undated:
            print(prose(f"kept: {name}: {choice.undated:,} rows with version 0, which is no time"))


def print_budget(order: BudgetOrder | None) -> None:
    """Print by what a budget compared rows, and which tables had no frequencies, where there was a budget."""
    if order is None:
        return
    by = "freq, per byte" if order.by == "freq" else order.by
    names = [shown(name) for name in order.without_freqs]
    if len(names) > _NAMES_SHOWN:
        names[_NAMES_SHOWN:] = [f"{len(names) - _NAMES_SHOWN:,} more"]
    why = f", as there are no frequencies in {', '.join(names)}; --by and --table choose otherwise" if names else ""
    print(prose(f"budget: rows were compared by {by}{why}"))
    print(prose("budget: keys and rows are counted as they are written, the index and the header of a file are not"))


def describe_budget(order: BudgetOrder | None) -> dict[str, Any]:
    """Return what `print_budget` prints as it stands in JSON, beside the tables."""
    if order is None:
        return {}
    return {"budget": {"bytes": order.bytes, "by": order.by, "without_frequencies": list(order.without_freqs)}}


def print_cut(table: str, failed: Mapping[str, int]) -> None:
    """Print why rows of a table are cut, where any are."""
    reasons = [f"{count:,} fail {criterion}" for criterion, count in failed.items() if count]
    if reasons:
        several = "; a row may fail several" if len(reasons) > 1 else ""
        print(prose(f"cut: {shown(table)}: {', '.join(reasons)}{several}"))


def share_missed(lookups: int | None, missed: int | None) -> str:
    """Return the share of lookups, by the rows' frequencies, that would miss a row that is cut; "" where none counts.

    A share that is not 0 is not shown as 0.
    """
    if not lookups or missed is None:
        return ""
    share = 100 * missed / lookups
    return f"{share:.2f}%" if share >= 0.01 or not share else f"{share:.1g}%"


def describe(choice: Choice) -> dict[str, Any]:
    """Return a choice as it stands in JSON."""
    return {
        "table": choice.table,
        "rows": choice.rows,
        "kept": choice.kept,
        "cut": choice.cut,
        "bytes": choice.bytes,
        "bytes_saved": choice.bytes_saved,
        "failed": dict(choice.failed),
        "non_finite": choice.non_finite,
        "undated": choice.undated,
        "lookups": choice.lookups,
        "lookups_missed": choice.lookups_missed,
    }
