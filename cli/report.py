"""`kvtools report`: a page of plots about the tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvtools.cli.json_text import dumps
from kvtools.cli.options import (
    DEFAULT_MEMORY,
    AsJson,
    DryRun,
    EngineName,
    Force,
    Memory,
    Source,
    Tables,
    Workers,
    bytes_of,
    check_readable,
    engine_named,
    no_standard_output,
)
from kvtools.cli.progress import progress_bar
from kvtools.report import write_report


def run(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="A checkpoint of any dialect; or several of one model, oldest first."),
    ],
    *,
    html: Annotated[
        Path, typer.Option("--html", metavar="OUT", help="The page to write.", callback=no_standard_output)
    ],
    compare: Annotated[
        str | None, typer.Option("--compare", metavar="OLD", help="A checkpoint since which to tell what changed.")
    ] = None,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="What stands above the page.")] = None,
    table: Tables = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    source: Source,
    memory: Memory = DEFAULT_MEMORY,
    workers: Workers = None,
    engine: EngineName = "local",
) -> None:
    """Write a page about the tables: what they are like, what to do, and the plots that show why.

    The page is one HTML file that needs no network: mail it, print it, keep it beside the checkpoint. It begins with an
    answer, and has the tables by their bytes. Given several checkpoints, it also shows how the tables grew; with
    --compare, which rows came and went, and how norms and frequencies drifted.

    \b
    Examples:
      kvtools report model.ckpt-100 --html report.html
      kvtools report model.ckpt-100 model.ckpt-200 model.ckpt-300 --html growth.html --table user_emb
      kvtools report model.ckpt-200 --compare model.ckpt-100 --html since.html
    """
    where = engine_named(engine)
    opened = [source.open(path, memory, lenient=True) for path in paths]
    # A pattern such as model.ckpt-* names each checkpoint by several of its files.
    checkpoints = list({checkpoint.path: checkpoint for checkpoint in opened}.values())
    check_readable(checkpoints[-1], table or [])
    with progress_bar("reading") as progress:
        size = write_report(
            checkpoints,
            html,
            compare=None if compare is None else source.open(compare, memory, lenient=True),
            source=paths[-1],
            tables=table or [],
            title=title,
            memory=bytes_of(memory),
            workers=workers,
            engine=where,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )
    if as_json:
        names = [reader.schema.name for reader in checkpoints[-1].select(table or [])]
        record = {"path": str(checkpoints[-1].path), "html": str(html), "bytes": size, "tables": names}
        print(dumps(record | ({"dry_run": True} if dry_run else {})))
    else:
        print(f"{'would write' if dry_run else 'wrote'} {html}")
    check_readable(checkpoints[-1], table or [], any_table=True)
