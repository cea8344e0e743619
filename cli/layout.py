"""Plain text for a terminal or a pipe: aligned columns that are never cut off, and sizes that people read."""

from __future__ import annotations

import datetime
from collections.abc import Sequence


def columns(header: Sequence[str], rows: Sequence[Sequence[str]], *, right: frozenset[int] = frozenset()) -> str:
    """Align `rows` under `header`; the columns numbered in `right` are aligned to the right.

    >>> print(columns(["table", "rows"], [["emb", "10"], ["user", "7"]], right=frozenset({1})))
    table  rows
    emb      10
    user      7
    """
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def size(count: int) -> str:
    """Write a number of bytes.

    >>> size(512), size(1536), size(3 << 30)
    ('512 B', '1.5 KiB', '3.0 GiB')
    """
    if count < 1024:
        return f"{count} B"
    amount = float(count)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        amount /= 1024
        if amount < 1024 or unit == "TiB":
            break
    return f"{amount:.1f} {unit}"


def shown(name: str) -> str:
    """Return a name as it can be printed anywhere, on one line.

    >>> shown("a" + chr(10) + "b")
    'a\\\\nb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def told_time(seconds: float) -> str:
    """Write a moment, in the time of the machine.

    >>> len(told_time(0.0))
    19
    """
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
