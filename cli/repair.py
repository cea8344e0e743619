"""`kvtools repair`: mend what `kvtools verify` finds wrong."""

from __future__ import annotations

import dataclasses
import sys
from typing import Annotated, Any

import typer

from kvtools.cli.account import print_account
from kvtools.cli.layout import columns, shown
from kvtools.cli.options import AsJson, Output, OutputPath, Source, SourcePath, Tables, To
from kvtools.cli.progress import progress_bar
from kvtools.cli.terminal import prose
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import UsageError
from kvtools.field_names import field_of
from kvtools.repair import NanRule, Repair, RepairedTable, Repairs, repair


def run(
    path: SourcePath,
    out: OutputPath,
    *,
    nan: Annotated[
        list[str] | None,
        typer.Option(
            "--nan",
            metavar="drop|zero|default",
            help="Rows with NaN or infinity: drop them (default), or put in zeros, or what a new row begins with;"
            " TABLE=RULE for one table, may be repeated.",
        ),
    ] = None,
    duplicates: Annotated[
        str | None,
        typer.Option(
            "--duplicates",
            metavar="last|first|sum|error",
            help="Of rows of one key keep the last (default), the first, the sum.",
        ),
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="KINDS", help="Of nan, duplicates and orphans, mend these alone.")
    ] = None,
    salvage: Annotated[
        bool, typer.Option("--salvage", help="Of what is damaged keep what is proven good, and name what is lost.")
    ] = False,
    to: To = None,
    table: Tables = None,
    output: Output,
    source: Source,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint without what `kvtools verify` finds wrong with its rows, and say what was done.

    Rows with NaN or infinity, keys that stand twice, slots whose keys are not the table's, rows in a part
    that does not own their key. All else stays as it is, bit for bit. A row is dropped for a NaN before keys
    are compared. OUT appears whole or not at all; it may be PATH itself with --force.

    \b
    Examples:
      kvtools repair model.ckpt-100 mended/model.ckpt-100
      kvtools repair model.ckpt-100 mended/model.ckpt-100 --nan zero --nan user_emb=drop --dry-run
      kvtools repair model.ckpt-100 model.ckpt-100 --only duplicates --duplicates first --force
      kvtools repair damaged.ckpt-100 rescued/model.ckpt-100 --salvage --json
    """
    repairs = _repairs(nan or [], duplicates, only, salvage)
    checkpoint = open_checkpoint(
        path, dataclasses.replace(source.options(output.memory, lenient=True), salvage=salvage)
    )
    with progress_bar("repairing") as progress:
        done = repair(
            checkpoint,
            out,
            repairs,
            to=to,
            tables=table or (),
            options=output.options(),
            workers=output.workers,
            progress=progress,
        )
    if not as_json:
        _print(done)
    for line in _lost(done):
        print(f"kvtools: warning: lost: {line}", file=sys.stderr)
    repaired = [_described(one) for one in done.tables]
    print_account(
        done.account, as_json=as_json, planned=output.dry_run, whole=False, repaired=repaired, lost=_lost(done)
    )


def _described(one: RepairedTable) -> dict[str, Any]:
    return {**dataclasses.asdict(one), "non_finite": {field_of(name): count for name, count in one.non_finite.items()}}


def _repairs(nan: list[str], duplicates: str | None, only: str | None, salvage: bool) -> Repairs:
    of_all: list[NanRule] = [rule for rule in nan if "=" not in rule]  # type: ignore[misc]
    of_tables = tuple((text.rpartition("=")[0], text.rpartition("=")[2]) for text in nan if "=" in text)
    chosen = Repairs().only if only is None else frozenset(kind.strip() for kind in only.split(","))
    for kind, option, given in (("nan", "--nan", bool(nan)), ("duplicates", "--duplicates", duplicates is not None)):
        if given and kind not in chosen:
            raise UsageError(
                f"repairing: {option} says what becomes of {kind}, and --only {only} leaves them as they are"
            )
    return Repairs(
        nan=of_all[-1] if of_all else "drop",
        nan_of=of_tables,  # type: ignore[arg-type]
        duplicates=duplicates or Repairs().duplicates,  # type: ignore[arg-type]
        only=chosen,  # type: ignore[arg-type]
        salvage=salvage,
    )


def _lost(done: Repair) -> list[str]:
    return [*done.lost, *(f"table '{table.table}': {line}" for table in done.tables for line in table.lost)]


def _print(done: Repair) -> None:
    rows = [
        [
            shown(one.table),
            f"{one.rows:,}",
            f"{one.kept:,}",
            f"{one.dropped + one.replaced:,}",
            f"{one.duplicates:,}",
            f"{one.misplaced:,}",
            f"{one.lost_rows:,}",
        ]
        for one in done.tables
    ]
    header = ["table", "rows", "kept", "not finite", "duplicates", "other part", "lost"]
    print(columns(header, rows, right=frozenset(range(1, 7))))
    for one in done.tables:
        for line in _lines(one):
            print(prose(f"repaired: {shown(one.table)}: {line}"))
    for one in done.tables:
        for line in one.notes:
            print(prose(f"note: {shown(one.table)}: {line}"))
    if all(one.sound for one in done.tables) and not done.lost:
        print("nothing to repair")
    print()


def _lines(one: RepairedTable) -> list[str]:
    """Say what was done to a table, a line for each thing."""
    of_columns = ", ".join(f"{count:,} in {shown(column)}" for column, count in one.non_finite.items())
    lines = []
    if one.dropped:
        lines.append(f"{_rows(one.dropped)} with NaN or infinity dropped ({of_columns})")
    if one.replaced:
        lines.append(f"{_rows(one.replaced)} with NaN or infinity filled ({of_columns})")
    lines += [
        f"{name.replace('_', ' ')}: {count:,} numbers that are NaN or infinite are zeros now"
        for name, count in one.extras.items()
    ]
    if one.duplicates:
        lines.append(f"{_rows(one.duplicates)} of a key that stands in another row: each key is there once now")
    if one.misplaced:
        lines.append(f"{_rows(one.misplaced)} put into the part that owns their key")
    if one.banned:
        lines.append(f"{_rows(one.banned)} dropped whose key the table's blacklist has")
    return [*lines, *(shown(line) for line in one.orphans)]


def _rows(count: int) -> str:
    return f"{count:,} row" + "s" * (count != 1)
