"""Bar charts of text: in eighths of a character where the output can show them, in `#` where it cannot."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvtools.cli import terminal

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_SHORTEST = 5


def shows_blocks() -> bool:
    """Tell whether standard output can encode the characters that bars are drawn with."""
    try:
        _EIGHTHS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def bar_chart(rows: Sequence[tuple[str, int]], *, blocks: bool, width: int = 40) -> str:
    """Draw a bar for each (label, count), with the count and its share of all.

    What is there gets a bar, however short. On a terminal that is too narrow, bars are shorter than `width`.

    >>> print(bar_chart([("1 .. 2", 3), ("2 .. 4", 1), ("4 .. 8", 0)], blocks=False, width=8))
      1 .. 2  ########  3   75%
      2 .. 4  ###       1   25%
      4 .. 8            0    0%
    """
    total, largest = sum(count for _, count in rows), max((count for _, count in rows), default=0)
    label_width = max((len(label) for label, _ in rows), default=0)
    count_width = len(f"{largest:,}")
    room = terminal.width()
    if room is not None:
        width = max(_SHORTEST, min(width, room - label_width - count_width - len("          >99.9%")))
    lines = []
    for label, count in rows:
        drawn = _bar(count / largest if largest else 0.0, width, blocks)
        lines.append(f"  {label:>{label_width}}  {drawn:<{width}}  {count:>{count_width},}  {percent(count, total):>4}")
    return "\n".join(lines)


def percent(count: int, total: int) -> str:
    """Write a share; what is neither none nor all is not shown as such.

    >>> percent(0, 5), percent(1, 100_000), percent(1, 30), percent(99_999, 100_000), percent(3, 3)
    ('0%', '<0.1%', '3.3%', '>99.9%', '100%')
    """
    share = 100 * count / total if total else 0.0
    if share in (0, 100):
        return f"{share:.0f}%"
    if share < 0.1:
        return "<0.1%"
    if share > 99.9:
        return ">99.9%"
    return f"{share:.0f}%" if 10 <= share < 99.5 else f"{share:.1f}%"


def _bar(share: float, width: int, blocks: bool) -> str:
    if share <= 0:
        return ""
    if not blocks:
        return "#" * max(1, round(share * width))
    eighths = max(1, round(share * width * 8))
    return _EIGHTHS[8] * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
