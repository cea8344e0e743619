"""`kvtools advise`: what would make tables smaller, and what that costs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtools.advise import MAX_ERROR, MAX_LOSS, Advice, Goal, TableAdvice, advise, described
from kvtools.auc import scorer_named
from kvtools.byte_size import byte_size
from kvtools.cli.json_text import dumps
from kvtools.cli.layout import columns, shown, size
from kvtools.cli.options import (
    DEFAULT_MEMORY,
    AsJson,
    DryRun,
    Force,
    Memory,
    Source,
    SourcePath,
    Tables,
    bytes_of,
    check_output_options,
    no_standard_output,
)
from kvtools.cli.progress import progress_bar
from kvtools.cli.simulate import LogColumns, TimeColumn
from kvtools.cli.terminal import display_width, prose, width
from kvtools.clip_policy import version_unit_of
from kvtools.errors import UsageError
from kvtools.id_log import open_log
from kvtools.replace_output import check_free, replace_files

_WORTH_SAYING = 0.2
"""Of lookups: what loses more is tried, told in JSON, and not printed."""


def run(
    path: SourcePath,
    *,
    goal: Annotated[
        str,
        typer.Option("--for", metavar="serving|training", help="Whose bytes: those of an export, or of a checkpoint."),
    ] = "serving",
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="SIZE", help="What all tables together may take.")
    ] = None,
    log: Annotated[
        str | None,
        typer.Option("--log", metavar="LOG", help="Ids that were looked up: Parquet, CSV or .npy; see simulate."),
    ] = None,
    column: LogColumns = None,
    time_column: TimeColumn = None,
    labels: Annotated[
        str | None, typer.Option("--labels", metavar="COLUMN", help="The log's labels, 0 or 1, to tell the AUC.")
    ] = None,
    scorer: Annotated[
        str | None,
        typer.Option("--scorer", metavar="dot|MODULE:FUNCTION", help="What gives an example's rows a score."),
    ] = None,
    max_loss: Annotated[
        float, typer.Option("--max-loss", metavar="SHARE", help="Of a table's lookups so many may miss a row.")
    ] = MAX_LOSS,
    max_error: Annotated[
        float, typer.Option("--max-error", metavar="SHARE", help="How large the relative error of rows may be.")
    ] = MAX_ERROR,
    now: Annotated[
        int | None,
        typer.Option("--now", metavar="WHEN", help="Count ages from here, Unix seconds or a step; the newest row."),
    ] = None,
    version_unit: Annotated[
        str | None,
        typer.Option("--version-unit", metavar="seconds|days|steps", help="What versions count."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Write the policy to FILE.", callback=no_standard_output),
    ] = None,
    details: Annotated[bool, typer.Option("--details", help="List every measure that was tried.")] = False,
    table: Tables = None,
    source: Source,
    memory: Memory = DEFAULT_MEMORY,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Say what would save the most bytes of each table, what it costs, and how to do it.

    Tried are rows seldom looked up, old rows and small ones, rows in fewer bits, and for training admission and expiry.
    What it costs to cut rows is the share of lookups that would miss them: by the rows' frequencies, or by a log of
    ids. What fewer bits cost is the relative error of the numbers. The best that stays within --max-loss and
    --max-error is told, with the command that does it; --output writes the policy which export, clip and training take.

    \b
    Examples:
      kvtools advise model.ckpt-100
      kvtools advise model.ckpt-100 --budget 2GiB --output policy.toml
      kvtools advise model.ckpt-100 --for training --max-loss 0.001 --details
      kvtools advise model.ckpt-100 --log ids.parquet --column user_id=user_emb
      kvtools advise model.ckpt-100 --log ids.parquet --labels clicked --scorer rank:score
    """
    if goal not in ("serving", "training"):
        raise UsageError(f"advising on '{path}': got --for {goal}, expected serving or training")
    aim: Goal = "training" if goal == "training" else "serving"
    check_output_options(output, force=force, dry_run=dry_run)
    if log is None and (column or time_column):
        raise UsageError(f"advising on '{path}': --column and --time-column are of a log; give it with --log")
    if (labels is None) != (scorer is None):
        raise UsageError(f"advising on '{path}': --labels and --scorer go together")
    limit = None if budget is None else byte_size(budget, "--budget")
    unit = version_unit_of(version_unit, "--version-unit")
    score = None if scorer is None else scorer_named(scorer)
    checkpoint = source.open_for(table or [], path, memory)
    if output is not None:
        check_free(output.absolute(), force=force, read=[checkpoint.path, *([] if log is None else [log])])
    types = {name: reader.schema.key_dtype for name, reader in checkpoint.tables.items()}
    opened = None if log is None else open_log(log, time_column=time_column, key_dtypes=types)
    with progress_bar("reading") as progress:
        advice = advise(
            checkpoint,
            tables=table or (),
            goal=aim,
            budget=limit,
            log=opened,
            columns=column or (),
            labels=labels,
            scorer=score,
            max_loss=max_loss,
            max_error=max_error,
            now=now,
            version_unit=unit,
            memory=bytes_of(memory),
            progress=progress,
        )
    if output is not None:
        with replace_files(output, force=force, dry_run=dry_run) as file:
            file.write_text(advice.policy_text(), "utf-8")
    if as_json:
        record = described(advice)
        record |= {"policy": str(output) if output else None, "command": advice.command(str(output or "policy.toml"))}
        print(dumps({**record, "dry_run": dry_run}))
        return
    print_advice(advice, str(path), details=details)
    if output is not None:
        print(f"nothing was written; {output} would be" if dry_run else f"wrote {output}")
    if advice.empty:
        print(prose("nothing to do within this loss and this error; see --max-loss, --max-error and --details"))
        return
    if output is None:
        print("--output policy.toml writes this policy; then do it:")
    print(_in_width(advice.command(str(output or "policy.toml"))))


def print_advice(advice: Advice, path: str, *, details: bool) -> None:
    """Print what to do with each table, the ones that save the most first."""
    lossy = any(table.error for table in advice.tables)
    rows = [
        [
            shown(table.table),
            size(table.bytes),
            ", ".join(_told(table)) or "nothing",
            size(table.bytes_after),
            size(table.bytes_saved),
            _percent(table.loss),
            *([f"{table.error.rms:.2%}" if table.error else ""] if lossy else []),
        ]
        for table in advice.tables
    ]
    if len(rows) > 1:
        saved = advice.bytes - advice.bytes_after
        total = [f"{len(rows)} tables", size(advice.bytes), "", size(advice.bytes_after), size(saved)]
        rows.append([*total, _percent(advice.loss), *([""] if lossy else [])])
    header = ["table", "now", "advice", "after", "saves", "lookups lost", *(["error"] if lossy else [])]
    print(columns(header, rows, right=frozenset({1, 3, 4, 5, 6})))
    if advice.over_budget and advice.budget is not None:
        print(prose(f"budget: {size(advice.budget)}: more rows go for it, the lowest by {advice.compared_by} first"))
    elif advice.budget is not None:
        print(f"budget: {size(advice.budget)}: they fit")
    if advice.auc is not None:
        before, after = advice.auc
        print(f"AUC: {before:.4f} now, {after:.4f} after")
    for note in advice.notes:
        print(prose(note))
    for name in advice.left_out:
        print(prose(f"left out: {shown(name)}: the model looks nothing up in it"))
    for table in advice.tables:
        for note in table.notes:
            print(prose(f"{shown(table.table)}: {note}"))
    if details:
        print()
        _print_measures(advice)


def _in_width(command: str) -> str:
    """Return a command in lines of the terminal's width, as a shell takes them."""
    room = width()
    if room is None or display_width(command) <= room:
        return command
    before, policy, after = command.rpartition(" --policy ")
    return f"{before} \\\n  {policy.strip()} {after}"


def _told(table: TableAdvice) -> list[str]:
    known = {"now", "version-unit"}
    told = []
    for name, value in table.fields.items():
        if name == "admission":
            told.append(f"admission {value['count']}")
        elif name == "dtype":
            told.append(str(value))
        elif name not in known:
            told.append(f"{name} {value}")
    return told


def _print_measures(advice: Advice) -> None:
    rows = [
        [
            shown(table.table),
            measure.line + (" *" if measure.advised else ""),
            f"{measure.rows:,}" if measure.rows else "",
            size(measure.bytes),
            _percent(measure.lookups),
            f"{measure.error.rms:.2%}" if measure.error else "",
            f"{measure.error.mean_cosine:.6f}" if measure.error else "",
        ]
        for table in advice.tables
        for measure in table.measures
        if measure.advised or (measure.lookups or 0) <= _WORTH_SAYING
    ]
    header = ["table", "measure, alone", "rows", "saves", "lookups lost", "error", "cosine"]
    print(columns(header, rows, right=frozenset({2, 3, 4, 5, 6})))
    print(prose("* advised; error and cosine are of the rows, or of a sample of them; admission saves in training"))
    print()


def _percent(share: float | None) -> str:
    if share is None:
        return ""
    return f"{100 * share:.2f}%" if share >= 0.0001 or not share else f"{100 * share:.1g}%"
