"""`kvtools explore`: look around in tables, on a page or in a terminal."""

from __future__ import annotations

import dataclasses
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from kvtools.cli.json_text import dumps
from kvtools.cli.options import (
    DEFAULT_MEMORY,
    AsJson,
    DryRun,
    Force,
    Memory,
    Source,
    SourcePath,
    Tables,
    Workers,
    bytes_of,
    check_readable,
    no_standard_output,
)
from kvtools.cli.progress import progress_bar
from kvtools.clip_policy import version_unit_of
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.schema import VersionUnit
from kvtools.errors import MissingDependencyError, UsageError
from kvtools.explore.command import ClipSource
from kvtools.explore.explore import largest_first, title_of, write_page
from kvtools.explore.page import page_details
from kvtools.explore.survey import survey_tables

_PAGE = "explore.html"


def run(
    path: SourcePath,
    *,
    output: Annotated[
        Path,
        typer.Option("--output", metavar="OUT", help=f"The page to write; {_PAGE} here.", callback=no_standard_output),
    ] = Path(_PAGE),
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    terminal: Annotated[bool, typer.Option("--terminal", help="Explore in this terminal; write no page.")] = False,
    table: Tables = None,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="What stands above.")] = None,
    points: Annotated[
        int, typer.Option("--points", metavar="N", help="Rows of the sample of a large table, on the page.")
    ] = 1000,
    version_unit: Annotated[
        str | None,
        typer.Option(
            "--version-unit", metavar="seconds|days|steps", help="What versions count, where the files do not say."
        ),
    ] = None,
    force: Force = False,
    dry_run: DryRun = False,
    as_json: AsJson = False,
    source: Source,
    memory: Memory = DEFAULT_MEMORY,
    workers: Workers = None,
) -> None:
    """Look around in tables: what thresholds would save, hot keys, neighbours, a picture of a sample.

    The page is one file that needs no network. Its sliders are percentiles of each table's frequencies, norms and ages;
    what they cut and save together is told at once, to the row, and a button copies the `kvtools clip` command that
    does it. --terminal has the same by keys: Tab, arrows, c to copy.

    \b
    Examples:
      kvtools explore model.ckpt-100
      kvtools explore model.ckpt-100 --output tables.html --table user_emb
      kvtools explore model.ckpt-100 --table 'user*' --terminal
    """
    if points < 0 or points > 5000:
        raise UsageError(f"exploring '{path}': got --points {points}, expected 0 to 5000")
    if terminal and (open_it or as_json or dry_run):
        other = "--open" if open_it else "--json" if as_json else "--dry-run"
        raise UsageError(f"exploring '{path}': got --terminal and {other}, which is about a page; expected one of them")
    unit = version_unit_of(version_unit, "--version-unit")
    checkpoint = source.open(path, memory, lenient=True)
    check_readable(checkpoint, table or [])
    clipped = ClipSource.of(path, checkpoint.dialect, _options(source, version_unit))
    if terminal:
        _explore_here(checkpoint, clipped, table or [], title, unit, bytes_of(memory), workers)
    else:
        with progress_bar("reading") as progress:
            written = write_page(
                checkpoint,
                output,
                source=clipped,
                tables=table or [],
                title=title,
                points=points,
                version_unit=unit,
                memory=bytes_of(memory),
                workers=workers,
                force=force,
                dry_run=dry_run,
                progress=progress,
            )
        if as_json:
            record = {"path": str(checkpoint.path), "html": str(output), "bytes": written.bytes}
            print(dumps(record | {"tables": list(written.tables)} | ({"dry_run": True} if dry_run else {})))
        else:
            print(f"{'would write' if dry_run else 'wrote'} {output}")
        if open_it and not dry_run and not webbrowser.open(output.absolute().as_uri()):
            print(f"kvtools: warning: no browser was found; open {output.absolute()} yourself", file=sys.stderr)
    check_readable(checkpoint, table or [], any_table=True)


def _options(source: Source, version_unit: str | None) -> list[str]:
    """Return the options that say how to read the source, and what its versions count, as they were given."""
    given = {
        "--dialect": source.dialect,
        "--key-dtype": source.key_dtype,
        "--value-dtype": source.value_dtype,
        "--dim": source.dim,
        "--version-unit": version_unit,
    }
    return [word for option, value in given.items() if value is not None for word in (option, str(value))]


def _explore_here(
    checkpoint: Checkpoint,
    source: ClipSource,
    tables: list[str],
    title: str | None,
    unit: VersionUnit | None,
    memory: int,
    workers: int | None,
) -> None:
    """Explore in this terminal; print the command that was copied, if one was."""
    try:
        from kvtools.explore.terminal import Explorer
    except ImportError:
        raise MissingDependencyError(
            "exploring in a terminal: Textual is not installed; run `pip install 'kvtools[explore]'`, or leave"
            " --terminal out for a page"
        ) from None
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(f"exploring '{checkpoint.path}': got --terminal, and this is none; leave it out for a page")
    readers = largest_first(checkpoint.select(tables))
    details = [dataclasses.replace(detail, points=0, neighbours=0, hot=20) for detail in page_details(len(readers))]
    with progress_bar("reading") as progress:
        surveys = list(
            survey_tables(readers, details, version_unit=unit, memory=memory, workers=workers, progress=progress)
        )
    copied = Explorer(readers, surveys, source, title or title_of(checkpoint)).run()
    if copied:
        print(copied)
