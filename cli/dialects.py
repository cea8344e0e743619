"""`kvtools dialects`: what kvtools reads and writes, and what each dialect holds."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtools.cli.json_text import dumps
from kvtools.cli.layout import columns
from kvtools.cli.options import AsJson
from kvtools.dialects.detect import dialects
from kvtools.errors import UsageError
from kvtools.lossless import describe_dialect, moves, page_tables, said


def run(
    moved_from: Annotated[
        str | None,
        typer.Option("--from", metavar="DIALECT", help="Show what arrives of this dialect's tables in the others."),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print all of it as the tables of docs/lossless.md.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the dialects: what kvtools reads and writes, what each holds, and what a move between two leaves out.

    \b
    Examples:
      kvtools dialects
      kvtools dialects --from tfplugin
      kvtools dialects --json
    """
    known = dialects()
    if moved_from is not None and moved_from not in known:
        raise UsageError(f"got --from {moved_from!r}, expected one of {', '.join(known)}")
    if markdown:
        print(page_tables(), end="")
        return
    chosen = [one for one in moves() if moved_from in (None, one.source)]
    if as_json:
        records = [
            {"from": one.source, "to": one.target, "lossless": one.lossless, "left_out": one.left_out}
            | {"narrowed": one.narrowed, "refused": one.refused}
            for one in chosen
        ]
        print(dumps({"dialects": [describe_dialect(dialect) for dialect in known.values()], "moves": records}))
    elif moved_from is not None:
        print(columns(["to", "what arrives"], [[one.target, said(one).strip("*")] for one in chosen]))
    else:
        print(
            columns(
                ["dialect", "reads", "writes", "what it is"],
                [
                    [dialect.name, "yes", "yes" if dialect.write else "-", dialect.title]
                    for dialect in sorted(known.values(), key=lambda dialect: dialect.name)
                ],
            )
        )
