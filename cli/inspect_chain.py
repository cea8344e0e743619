"""What `kvtools inspect` shows of a chain: its members, and the tables of its newest full checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtools.chain_check import ChainReport, report_chain
from kvtools.chain_place import chain_at
from kvtools.cli.layout import columns, shown, size, told_time
from kvtools.cli.options import Source, sorted_tables
from kvtools.cli.terminal import prose, styled
from kvtools.inspect import describe, describe_table


def look_into(
    path: str, source: Source, tables: Sequence[str], sort: str | None = None
) -> tuple[ChainReport, dict[str, Any] | None]:
    """Return the report of a chain, and the description of its newest full checkpoint that can be read, if any."""
    chain = report_chain(path)
    newest = next((member for member in reversed(chain.members) if member.kind == "full" and not member.error), None)
    if newest is None:
        return chain, None
    full = source.open(str(chain_at(path).folder / newest.member), lenient=True)
    return chain, {
        **describe(full),
        "tables": [describe_table(reader.schema) for reader in sorted_tables(full.select(tables), sort)],
    }


def print_chain(report: ChainReport) -> None:
    """Print the members of a chain, and what is wrong with it."""
    taken = [member for member in report.members if member.taken]
    print(f"{report.path} (chain '{shown(report.name)}', {len(report.members)} members)")
    print()
    print(
        columns(
            ["", "number", "member", "kind", "rows", "born", "removed", "bytes", "step", "time"],
            [
                [
                    "*" if member.taken else "",
                    str(member.number),
                    shown(member.member),
                    member.kind,
                    "?" if member.error else f"{member.rows:,}",
                    f"{member.born:,}" if member.kind == "delta" else "-",
                    f"{member.removed:,}" if member.kind == "delta" else "-",
                    size(member.bytes),
                    "-" if member.step is None else f"{member.step:,}",
                    "-" if member.time is None else told_time(member.time),
                ]
                for member in report.members
            ],
            right=frozenset({1, 4, 5, 6, 7, 8}),
            spare=(1, 5, 6, 8, 9),
        )
    )
    for member in report.members:
        if member.error:
            line = prose(f"unreadable: {shown(member.member)}: {shown(member.error)}")
            print(styled("unreadable:", "red") + line.removeprefix("unreadable:"))
    if taken:
        total = sum(member.bytes for member in taken)
        newest = f"{taken[0].member} and {len(taken) - 1} increments, {size(total)}"
        print("\n" + prose(f"* the newest whole chain: {newest}"))
