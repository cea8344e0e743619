"""`kvtools rename`: other names for tables, slots and variables."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated

import typer

from kvtools.cli.account import print_account
from kvtools.cli.layout import shown
from kvtools.cli.options import AsJson, Output, OutputPath, Source, SourcePath, To
from kvtools.cli.progress import progress_bar
from kvtools.errors import UsageError
from kvtools.rename import Renames, rename


def run(
    path: SourcePath,
    out: OutputPath,
    *,
    table: Annotated[
        list[str] | None, typer.Option("--table", metavar="OLD=NEW", help="Rename a table; may be repeated.")
    ] = None,
    slot: Annotated[
        list[str] | None,
        typer.Option("--slot", metavar="OLD=NEW", help="Rename a slot of every table that has it; may be repeated."),
    ] = None,
    split_slot: Annotated[
        list[str] | None,
        typer.Option("--split-slot", metavar="OLD=A,B", help="Cut a slot into slots of equal width; may be repeated."),
    ] = None,
    join_slots: Annotated[
        list[str] | None,
        typer.Option("--join-slots", metavar="A,B=NEW", help="Put slots side by side as one; may be repeated."),
    ] = None,
    variable: Annotated[
        list[str] | None,
        typer.Option("--variable", metavar="OLD=NEW", help="Rename a dense variable; may be repeated."),
    ] = None,
    regex: Annotated[
        bool,
        typer.Option("--regex", help=r"OLD are regular expressions that match whole names; NEW may have \1."),
    ] = False,
    strip_prefix: Annotated[
        str, typer.Option("--strip-prefix", metavar="TEXT", help="Take this off the tables' names.")
    ] = "",
    add_prefix: Annotated[
        str, typer.Option("--add-prefix", metavar="TEXT", help="Put this before the tables' names.")
    ] = "",
    to: To = None,
    output: Output,
    source: Source,
    as_json: AsJson = False,
) -> None:
    """Change the names of tables, optimizer slots and dense variables; the rows stay as they are.

    Engines keep the same state in slots of different widths: --split-slot cuts one, --join-slots makes one.

    A name that nothing has, and one that two would have, are errors. OUT appears whole or not at all; it
    may be PATH itself with --force.

    \b
    Examples:
      kvtools rename model.ckpt-100 new/model.ckpt-100 --table user_emb=users
      kvtools rename model.ckpt-100 new.ckpt-100 --add-prefix tower/ --slot Adam.m=m --slot Adam.v=v
      kvtools rename model.ckpt-100 new.ckpt-100 --regex --table '(.*)_emb=emb/\\1'
      kvtools rename model.ckpt-100 model.ckpt-100 --variable dense/kernel=top/kernel --force
      kvtools rename model.ckpt-100 new.ckpt-100 --join-slots Adam.m,Adam.v=Adam
    """
    checkpoint = source.open(path, output.memory)
    slots = {name for reader in checkpoint.tables.values() for name in reader.slots}
    renames = Renames(
        tables=_pairs("--table", table, checkpoint.tables),
        slots=_pairs("--slot", slot, slots),
        variables=_pairs("--variable", variable, {dense.name for dense in checkpoint.variables}),
        strip_prefix=strip_prefix,
        add_prefix=add_prefix,
        regex=regex,
        split=tuple((old, tuple(new.split(","))) for old, new in _pairs("--split-slot", split_slot, slots)),
        join=tuple((tuple(old.split(",")), new) for old, new in _pairs("--join-slots", join_slots, ())),
    )
    options = output.options()
    with progress_bar("renaming") as progress:
        account, renamed = rename(
            checkpoint, out, renames, to=to, options=options, workers=output.workers, progress=progress
        )
    if not as_json:
        for old, new in renamed.items():
            print(f"{shown(old)} -> {shown(new)}")
        print()
    print_account(account, as_json=as_json, planned=output.dry_run, renamed=renamed)


def _pairs(option: str, texts: Sequence[str] | None, known: Collection[str]) -> tuple[tuple[str, str], ...]:
    """Split OLD=NEW where OLD is a name that there is, since names may have a `=` too; else at the first."""
    pairs = []
    for text in texts or ():
        places = [place for place, character in enumerate(text) if character == "="]
        if not places:
            raise UsageError(f"renaming: got {option} {text!r}, expected OLD=NEW")
        place = next((place for place in places if text[:place] in known), places[0])
        pairs.append((text[:place], text[place + 1 :]))
    return tuple(pairs)
