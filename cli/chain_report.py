"""A chain as text: its members, one line each."""

from __future__ import annotations

import datetime

from kvtools.chain_check import ChainReport
from kvtools.cli.layout import columns, shown, size


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
        )
    )
    for member in report.members:
        if member.error:
            print(f"unreadable: {shown(member.member)}: {shown(member.error)}")
    if taken:
        total = sum(member.bytes for member in taken)
        print(f"\n* the newest whole chain: {taken[0].member} and {len(taken) - 1} increments, {size(total)}")


def told_time(seconds: float) -> str:
    """Write a moment, in the time of the machine.

    >>> len(told_time(0.0))
    19
    """
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
