"""`kvtools reshard`: another number of parts."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtools.cli.account import print_account
from kvtools.cli.layout import columns, shown
from kvtools.cli.options import AsJson, Output, OutputPath, Partition, Source, SourcePath, Tables, To
from kvtools.cli.progress import progress_bar
from kvtools.migrate import Account
from kvtools.reshard import balance, reshard

_PARTS_SHOWN = 16


def run(
    path: SourcePath,
    out: OutputPath,
    *,
    parts: Annotated[int, typer.Option("--parts", metavar="N", help="How many parts each table gets.")],
    partition: Partition = None,
    to: To = None,
    table: Tables = None,
    output: Output,
    source: Source,
    as_json: AsJson = False,
) -> None:
    """Change the number of parts of tables, for another number of parameter servers or ranks.

    Each row goes to the part that owns its key by the dialect's rule, whatever part it was in. Other
    tables and the dense variables are carried along. OUT appears whole or not at all; it may be PATH
    itself with --force.

    \b
    Examples:
      kvtools reshard model.ckpt-100 resharded/model.ckpt-100 --parts 8
      kvtools reshard model.ckpt-100 model.ckpt-100 --parts 1 --force
      kvtools reshard model.ckpt-100 out/model.ckpt-100 --parts 4 --table user_emb --json
    """
    checkpoint = source.open(path, output.memory)
    options = output.options(partition=partition)
    with progress_bar("resharding") as progress:
        account = reshard(
            checkpoint,
            out,
            parts,
            to=to,
            tables=table or (),
            options=options,
            workers=output.workers,
            progress=progress,
        )
    if not as_json:
        _print_parts(account, table)
    print_account(
        account,
        as_json=as_json,
        planned=output.dry_run,
        balance={done.name: round(balance(done.part_rows), 4) for done in account.tables},
    )


def _print_parts(account: Account, names: list[str] | None) -> None:
    rows = []
    for table in account.tables:
        if names and table.name not in names:
            continue
        listed = " ".join(f"{count:,}" for count in table.part_rows[:_PARTS_SHOWN])
        more = " ..." if len(table.part_rows) > _PARTS_SHOWN else ""
        rows.append([shown(table.name), f"{balance(table.part_rows):.3f}", listed + more])
    print(columns(["table", "largest/mean", "rows per part"], rows, right=frozenset({1})))
    print()
