"""What a command that wrote tables says at its end."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from kvtools.cli.layout import columns, shown, size

from kvtools.migrate import Account


def print_account(account: Account, *, as_json: bool, **more: Any) -> None:
    """Print an account: a table of what was written, then what was left out, changed and checked; or as JSON."""
    if as_json:
        print(json.dumps({**dataclasses.asdict(account), "lossless": account.lossless, **more}))
        return
    print(
        columns(
            ["table", "rows read", "rows written", "parts", "bytes"],
            [
                [
                    shown(table.name),
                    f"{table.rows_read:,}",
                    f"{table.rows_written:,}",
                    str(table.parts),
                    size(table.bytes),
                ]
                for table in account.tables
            ],
            right=frozenset({1, 2, 3, 4}),
        )
    )
    if account.variables:
        print(f"{account.variables} dense variables")
    for loss in account.losses:
        print(f"left out: {loss}")
    for table in account.tables:
        for kind, lines in (("left out", table.losses), ("changed", table.changes), ("checked", table.checks)):
            for line in lines:
                print(f"{kind}: {shown(table.name)}: {line}")
    print(f"wrote {account.output} ({account.dialect})")
