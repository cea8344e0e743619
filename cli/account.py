"""What a command that wrote tables says at its end."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvtools.cli.json_text import dumps
from kvtools.cli.layout import columns, shown, size, total
from kvtools.cli.shared_options import shared
from kvtools.cli.terminal import prose
from kvtools.migrate import Account


def print_account(account: Account, *, as_json: bool, planned: bool = False, whole: bool = True, **more: Any) -> None:
    """Print an account: a table of what was written, then what was left out, changed and checked; or as JSON.

    With `planned` it is one of what would be done, of a dry run. Without `whole` the tables were
    parts of the source's, so that nothing is said of all of it.
    """
    if as_json:
        told = {"dry_run": True} if planned else {}
        print(dumps({**dataclasses.asdict(account), "lossless": account.lossless, **told, **more}))
        return
    counts = ["rows"] if planned else ["rows read", "rows written"]
    print(
        columns(
            ["table", *counts, "parts", "bytes"],
            [
                [
                    shown(table.name),
                    *([] if planned else [f"{table.rows_read:,}"]),
                    f"{table.rows_written:,}",
                    str(table.parts),
                    size(table.bytes),
                ]
                for table in account.tables
            ],
            right=frozenset({1, 2, 3, 4}),
        )
    )
    together = total(
        len(account.tables),
        sum(table.rows_written for table in account.tables),
        sum(table.bytes for table in account.tables),
    )
    if together:
        print(together)
    left_out = "would be left out" if planned else "left out"
    if account.variables:
        print(f"{account.variables} dense variable{'s' if account.variables > 1 else ''}")
    tell = print if planned else tell_left_out
    for loss in account.losses:
        tell(prose(f"{left_out}: {loss}"))
    print_of_tables(
        left_out, [(line, table.name) for table in account.tables for line in table.losses], len(account.tables), tell
    )
    for kind, lines in (
        ("changed", [(line, table.name) for table in account.tables for line in table.changes]),
        ("checked", [(line, table.name) for table in account.tables for line in table.checks]),
        ("note", [(line, table.name) for table in account.tables for line in table.notes]),
    ):
        print_of_tables(kind, lines, len(account.tables))
    for note in account.notes:
        print(prose(f"note: {note}"))
    if account.lossless and whole and not account.notes:
        print("nothing left out")
    print(f"{'would write' if planned else 'wrote'} {account.output} ({account.dialect})")


def tell_left_out(line: str) -> None:
    """Print what was left out of an output: a warning, which `--quiet` does not drop."""
    if shared().quiet:
        print(f"kvtools: {line}", file=sys.stderr)
    else:
        print(line)


def print_of_tables(
    kind: str, lines: Sequence[tuple[str, str]], tables: int, tell: Callable[[str], None] = print
) -> None:
    """Print what is said of tables, (line, table) each, the same of several tables once; `tables` is how many are."""
    for line in dict.fromkeys(line for line, _ in lines):
        names = [shown(name) for said, name in lines if said == line]
        whose = "all tables" if len(names) == tables > 1 else ", ".join(names)
        tell(prose(f"{kind}: {whose}: {line}"))
