"""`kvtools simulate`: replay a log of ids through the policies of training."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from kvtools.cast import FLOATS
from kvtools.cli.bars import shows_blocks
from kvtools.cli.clip_options import warn_unmatched
from kvtools.cli.json_text import dumps
from kvtools.cli.layout import columns, shown, size
from kvtools.cli.options import AsJson, DryRun, Force, check_output_options, no_standard_output
from kvtools.cli.progress import progress_bar
from kvtools.cli.terminal import prose, width
from kvtools.clip_policy import read_policy
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import numpy_dtype
from kvtools.errors import UsageError
from kvtools.id_log import open_log
from kvtools.replace_output import check_free, replace_files
from kvtools.simulate import Moment, RowSize, Simulation, TableRun, described, moment_record, simulate

_BARS = {True: "▁▂▃▄▅▆▇█", False: "12345678"}
_SPARKS = 40

LogPath = Annotated[
    str,
    typer.Argument(metavar="LOG", help="The ids that were looked up: Parquet, CSV or .npy."),
]
LogColumns = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="COLUMN=TABLE",
        help="The column has ids of this table; those of other columns are of the table of their name. Repeatable.",
    ),
]
TimeColumn = Annotated[
    str | None,
    typer.Option("--time-column", metavar="NAME", help="The log's times; timestamp or time, where there is one."),
]


def run(
    policy: Annotated[str, typer.Argument(metavar="POLICY", help="What training is told of its tables, in TOML.")],
    log: LogPath,
    *,
    column: LogColumns = None,
    time_column: TimeColumn = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", metavar="N", help="Examples of a training step; rows of the log.")
    ] = 1024,
    like: Annotated[
        str | None,
        typer.Option("--like", metavar="PATH", help="A checkpoint whose tables' keys and rows are those of training."),
    ] = None,
    dim: Annotated[int | None, typer.Option("--dim", metavar="D", help="Numbers of a row, to tell memory.")] = None,
    slots: Annotated[
        int, typer.Option("--slots", metavar="N", help="Optimizer slots of a row, each as wide as it: Adam has 2.")
    ] = 0,
    value_dtype: Annotated[
        str, typer.Option("--value-dtype", metavar="T", help="What the numbers of a row are.")
    ] = "float32",
    save_every: Annotated[
        int, typer.Option("--save-every", metavar="N", help="Steps from save to save, for expire-on-save.", min=0)
    ] = 0,
    csv_file: Annotated[
        Path | None,
        typer.Option(
            "--csv", metavar="FILE", help="Write the course of each table to FILE.", callback=no_standard_output
        ),
    ] = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Tell what the policies of training would make of a log of ids: rows, memory and hits, before a run uses them.

    Each --batch-size examples are a step: looked up, then updated, by the table engine itself, so that capacity,
    admission and ages do what they do in training, to the row. The hit rate is the share of lookups that find a row;
    beside it stands that of a table without policies. Two policies are compared by two runs.

    A log has a row for each example and a column of ids for each table (of integers, or in Parquet lists of them), or
    columns named table and key; an .npy file has the ids of one table.

    \b
    Examples:
      kvtools simulate policy.toml ids.parquet --like model.ckpt-100
      kvtools simulate policy.toml ids.parquet --dim 16 --slots 2 --batch-size 4096
      kvtools simulate policy.toml ids.csv --column user_id=user_emb --csv course.csv
      kvtools simulate policy.toml ids.npy --json
    """
    check_output_options(csv_file, force=force, dry_run=dry_run, option="--csv")
    told = read_policy(policy)
    if csv_file is not None:
        check_free(csv_file.absolute(), force=force, read=[policy, log])
    rows: dict[str, RowSize] | RowSize | None = None
    if like is not None:
        if dim is not None or slots:
            raise UsageError("simulating: got --like and --dim or --slots, expected one of them")
        rows = {name: RowSize.of(table.schema) for name, table in open_checkpoint(like, OpenOptions()).tables.items()}
        warn_unmatched(told, [*rows], policy)
    elif dim is not None:
        if dim < 1 or slots < 0 or value_dtype not in FLOATS:
            raise UsageError(
                f"simulating: got --dim {dim} --slots {slots} --value-dtype {value_dtype}, expected 1 or more, 0 or"
                f" more"
                f" and one of {', '.join(FLOATS)}"
            )
        rows = RowSize(None, dim * (1 + slots) * numpy_dtype(value_dtype).itemsize)
    with progress_bar("replaying", unit="%") as progress:
        made = simulate(
            told,
            open_log(log, time_column=time_column),
            columns=column or (),
            rows=rows,
            batch_size=batch_size,
            save_every=save_every,
            progress=progress,
        )
    if csv_file is not None:
        _write_course(csv_file, made.tables, force=force, dry_run=dry_run)
    if as_json:
        record = {"policy": policy, "log": log, "batch_size": batch_size, "steps": made.steps}
        tables = [described(table) for table in made.tables]
        print(
            dumps(
                {**record, "examples": made.examples, "tables": tables, "notes": list(made.notes), "dry_run": dry_run}
            )
        )
        return
    print_simulation(made, batch_size)
    if rows is None:
        print(prose("memory: not known, as nothing says how wide rows are; see --like and --dim"))
    if csv_file is not None:
        print(f"nothing was written; {csv_file} would be" if dry_run else f"wrote {csv_file}")


def print_simulation(made: Simulation, batch_size: int) -> None:
    """Print what became of each table, and its course."""
    sized = any(table.memory_bytes is not None for table in made.tables)
    print(
        columns(
            ["table", "lookups", "hit rate", "without", "keys", "rows", "at most", *(["memory"] if sized else [])],
            [
                [
                    shown(table.table),
                    f"{table.lookups:,}",
                    _percent(table.hit_rate),
                    _percent(table.hit_rate_without),
                    f"{table.keys:,}",
                    f"{table.rows:,}",
                    f"{table.most_rows:,}",
                    *([size(table.memory_bytes or 0)] if sized else []),
                ]
                for table in made.tables
            ],
            right=frozenset(range(1, 8)),
        )
    )
    blocks = shows_blocks()
    for table in made.tables:
        name = shown(table.table)
        room = width()
        moments = _resampled(table.moments, _SPARKS if room is None else max(8, min(_SPARKS, room - len(name) - 32)))
        rows = [moment.rows for moment in moments]
        rates = [moment.hit_rate or 0.0 for moment in moments]
        print(f"{name}: rows      {spark(rows, blocks=blocks)}  up to {max(rows, default=0):,}")
        least, most = min(rates, default=0), max(rates, default=0)
        print(f"{name}: hit rate  {spark(rates, blocks=blocks)}  {_percent(least)} to {_percent(most)}")
        told = [
            f"{count:,} {what}"
            for count, what in (
                (table.evicted, "evicted"),
                (table.expired, "expired"),
                (table.stale, "past their age, and not collected"),
                (table.waiting, "keys wait to be admitted"),
            )
            if count
        ]
        if told:
            print(prose(f"{name}: {', '.join(told)}"))
    for note in made.notes:
        print(prose(note))
    print(f"{made.steps:,} steps of {batch_size:,}: {made.examples:,} rows of the log")


def spark(numbers: Sequence[float], *, blocks: bool = True) -> str:
    """Return numbers of 0 and more as a line of bars, the largest the highest; without `blocks` as one of digits.

    >>> spark([0, 1, 2, 4]), spark([0, 1, 2, 4], blocks=False)
    ('▁▃▅█', '1358')
    """
    most = max(numbers, default=0) or 1
    return "".join(_BARS[blocks][min(7, int(8 * max(0.0, number) / most))] for number in numbers)


def _resampled(moments: Sequence[Moment], most: int) -> list[Moment]:
    """Return at most so many moments, each with what was counted since the one before."""
    groups = min(most, len(moments))
    made = []
    for group in range(groups):
        first, last = group * len(moments) // groups, (group + 1) * len(moments) // groups
        moment = moments[first]
        for later in moments[first + 1 : last]:
            moment = later.after(moment)
        made.append(moment)
    return made


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}%"


def _write_course(path: Path, tables: Sequence[TableRun], *, force: bool, dry_run: bool) -> None:
    with (
        replace_files(path, force=force, dry_run=dry_run) as staging,
        staging.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        names = ["table", *Moment.__dataclass_fields__, "hit_rate"]
        writer.writerow(names)
        for table in tables:
            for moment in table.moments:
                record = {"table": table.table, **moment_record(moment)}
                writer.writerow(["" if record[name] is None else record[name] for name in names])


__all__ = ["LogColumns", "LogPath", "TimeColumn", "run", "spark"]
