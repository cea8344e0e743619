"""`kvtools split`: several checkpoints of one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated

import typer

from kvtools.cli.account import tell_left_out
from kvtools.cli.json_text import dumps
from kvtools.cli.layout import columns, shown, size
from kvtools.cli.options import (
    AsJson,
    Output,
    Source,
    SourcePath,
    Tables,
    To,
    no_standard_output,
)
from kvtools.cli.progress import progress_bar
from kvtools.cli.terminal import prose
from kvtools.errors import UsageError
from kvtools.key_list import read_key_list
from kvtools.migrate import Account
from kvtools.row_filter import condition_of
from kvtools.shown_tables import counted
from kvtools.split import By, split


def run(
    path: SourcePath,
    out: Annotated[
        str,
        typer.Argument(
            metavar="OUT",
            help="A folder, or a name with {} in it for each piece's name.",
            callback=no_standard_output,
        ),
    ],
    *,
    by: Annotated[
        str | None, typer.Option("--by", metavar="table|part|mod:N", help="A piece per table, part, or key modulo N.")
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", metavar="N", help="Pieces of at most N rows of each table.")
    ] = None,
    keys_file: Annotated[
        str | None,
        typer.Option(
            "--keys-file",
            metavar="FILE",
            help="Two pieces: the keys listed, and the rest; a key per line, or .npy; - is stdin.",
        ),
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            metavar="EXPRESSION",
            help="Two pieces: rows that meet this, as in 'freq >= 3', and the rest.",
        ),
    ] = None,
    to: To = None,
    table: Tables = None,
    output: Output,
    source: Source,
    as_json: AsJson = False,
) -> None:
    """Make several checkpoints of one; each appears whole or not at all. They hold tables, no dense variables.

    Pieces are called

    \b
      --by table     as the table, / as in a URL: ads%2Femb
      --by part      part-00000-of-00003, ...
      --by mod:4     mod-0-of-4, ...: keys of floor-mod 0, ...
      --rows N       rows-00000-of-00007, ...
      --keys-file    listed, rest
      --where        matching, rest

    With OUT shards they are shards/mod-0-of-4, ...; with OUT 'shards/{}.ckpt', shards/mod-0-of-4.ckpt, ...
    `kvtools merge` puts them together again.

    \b
    Examples:
      kvtools split model.ckpt-100 tables --by table
      kvtools split model.ckpt-100 'shards/{}.ckpt-100' --by mod:4 --table user_emb
      kvtools split model.ckpt-100 pieces --rows 1000000
      kvtools split model.ckpt-100 'users-{}.ckpt' --keys-file vip.txt
      kvtools split model.ckpt-100 'hot-{}.ckpt' --where 'freq >= 100'
    """
    checkpoint = source.open_for(table or [], path, output.memory)
    how = _by(by, rows, keys_file, where)
    options = output.options()
    with progress_bar("writing") as progress:
        accounts = split(
            checkpoint, out, how, to=to, tables=table or (), options=options, workers=output.workers, progress=progress
        )
    if as_json:
        print(
            dumps(
                {
                    "path": str(checkpoint.path),
                    "outputs": [{**dataclasses.asdict(one), "lossless": one.lossless} for one in accounts],
                    "lossless": not checkpoint.variables and all(one.lossless for one in accounts),
                    "variables_left_out": len(checkpoint.variables),
                    **({"dry_run": True} if output.dry_run else {}),
                }
            )
        )
    else:
        _print_accounts(accounts, planned=output.dry_run)
        if checkpoint.variables:
            print(
                prose(f"left out: {counted(len(checkpoint.variables), 'dense variable')}; no piece has dense variables")
            )


def _by(by: str | None, rows: int | None, keys_file: str | None, where: str | None) -> By:
    given = [option for option in (by, rows, keys_file, where) if option is not None]
    if len(given) != 1:
        raise UsageError(f"splitting: got {len(given)} of --by, --rows, --keys-file and --where, expected one")
    if where is not None:
        return By("where", where=condition_of(where))
    if rows is not None:
        return By("rows", rows)
    if keys_file is not None:
        return By("keys", keys=read_key_list(keys_file))
    if by == "table":
        return By("table")
    if by == "part":
        return By("part")
    found = re.fullmatch(r"mod:(\d{1,9})", by or "")
    if not found:
        raise UsageError(f"splitting: got --by {by!r}, expected table, part or mod:N such as mod:4")
    return By("mod", int(found[1]))


def _print_accounts(accounts: Sequence[Account], *, planned: bool) -> None:
    print(
        columns(
            ["piece", "table", "rows", "parts", "bytes"],
            [
                [
                    shown(account.output),
                    shown(table.name),
                    f"{table.rows_written:,}",
                    str(table.parts),
                    size(table.bytes),
                ]
                for account in accounts
                for table in account.tables
            ],
            right=frozenset({2, 3, 4}),
        )
    )
    losses = [line for account in accounts for table in account.tables for line in table.losses]
    for line in dict.fromkeys(losses):
        (print if planned else tell_left_out)(prose(f"left out: {line}"))
    for line in dict.fromkeys(line for account in accounts for table in account.tables for line in table.changes):
        print(prose(f"changed: {line}"))
    for line in dict.fromkeys(line for account in accounts for table in account.tables for line in table.notes):
        print(prose(f"note: {line}"))
    print(f"{'would write' if planned else 'wrote'} {counted(len(accounts), 'checkpoint')} ({accounts[0].dialect})")
