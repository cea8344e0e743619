"""Plain text for a terminal or a pipe: aligned columns, of which nothing is ever cut off, and sizes that people read.

In a pipe or a file a table has a line for each row, however long. On a terminal it is made as narrow as the terminal
is, by the first of these that suffices:

1. words of a header go below one another;
2. a column that says the same in every row is said once, below the table;
3. cells of text (never of numbers) go on in a further line, after a space, a `/` or a `_`, in three lines at most;
4. of more than two rows, columns that can be spared are left out, and named below the table;
5. each row becomes a block of lines, one for each column.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtools.cli import terminal
from kvtools.shown_tables import counted

if TYPE_CHECKING:
    import numpy.typing as npt

_GAP = 2
_NUMBERS_SHOWN = 8
_MOST_LINES = 3
_FEW = 2
_BREAKS = re.compile(r"[^ /_]*[ /_]+|[^ /_]+")

_Lines = list[str]


def columns(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: frozenset[int] = frozenset(),
    spare: Sequence[int] = (),
) -> str:
    """Align `rows` under `header`.

    Args:
        header: a name for each column.
        rows: a text for each column.
        right: the columns that are aligned to the right, and never broken: numbers.
        spare: columns that many rows are told without where the terminal is narrow, the first one first.

    >>> print(columns(["table", "rows"], [["emb", "10"], ["user", "7"]], right=frozenset({1})))
    table  rows
    emb      10
    user      7
    """
    room = terminal.width()
    shown_columns = list(range(len(header)))
    natural = [max(map(terminal.display_width, column)) for column in _transposed(header, rows)]
    if room is None or _total(natural) <= room:
        return _table([[cell] for cell in header], [[[cell] for cell in row] for row in rows], natural, right)
    narrowest = [
        max([_longest_word(head), *(terminal.display_width(row[i]) for row in rows)]) for i, head in enumerate(header)
    ]
    once: list[int] = []
    if len(rows) > 1:
        same = [i for i in shown_columns[1:] if all(row[i] == rows[0][i] for row in rows)]
        for i in sorted(same, key=lambda i: -narrowest[i]):
            if _total([narrowest[j] for j in shown_columns]) <= room:
                break
            shown_columns.remove(i)
            once.append(i)
    said = "; ".join(f"{header[i] or '?'} {rows[0][i]}" for i in sorted(once) if rows[0][i])
    below = f"\n{terminal.prose(f'all: {said}')}" if said else ""
    widths = _fitted(header, rows, shown_columns, narrowest, right, room)
    if widths is None and len(rows) > _FEW:
        kept = list(shown_columns)
        left = [i for i in spare if i in kept]
        for number, i in enumerate(left, 1):
            kept.remove(i)
            widths = _fitted(header, rows, kept, narrowest, right, room)
            if widths is not None:
                shown_columns = kept
                names = ", ".join(header[i] for i in sorted(left[:number]))
                below += f"\n{terminal.prose(f'not shown: {names}; a wider terminal, a pipe and --json have them')}"
                break
    if widths is None:
        return _blocks(header, rows, shown_columns, room) + below
    heads = [_wrapped(header[i], widths[at]) for at, i in enumerate(shown_columns)]
    cells = [
        [[row[i]] if i in right else _wrapped(row[i], widths[at]) for at, i in enumerate(shown_columns)] for row in rows
    ]
    return _table(heads, cells, widths, frozenset(shown_columns.index(i) for i in right & set(shown_columns))) + below


def _fitted(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    chosen: Sequence[int],
    narrowest: Sequence[int],
    right: frozenset[int],
    room: int,
) -> list[int] | None:
    """Return widths of the chosen columns that fit into `room`, the header's words below one another; None if none do.

    What is left over goes to headers from the left, so that these take few lines.
    """
    widths = [narrowest[i] for i in chosen]
    least = [
        widths[at] if i in right else max(_longest_word(text) for text in [header[i], *(row[i] for row in rows)])
        for at, i in enumerate(chosen)
    ]
    while _total(widths) > room:
        broken = [at for at in range(len(widths)) if widths[at] > least[at]]
        if not broken:
            return None
        widths[max(broken, key=lambda at: widths[at])] -= 1
    for at, i in enumerate(chosen):
        if i not in right and any(len(_wrapped(row[i], widths[at])) > _MOST_LINES for row in rows):
            return None
        widest = widths[at] + room - _total(widths)
        fewest = len(_wrapped(header[i], widest))
        widths[at] = next(w for w in range(widths[at], widest + 1) if len(_wrapped(header[i], w)) == fewest)
    return widths


def _table(
    heads: Sequence[_Lines], cells: Sequence[Sequence[_Lines]], widths: Sequence[int], right: frozenset[int]
) -> str:
    high = max(map(len, heads), default=0)
    top = _lines_of([[""] * (high - len(head)) + head for head in heads], widths, right)
    body = [line for row in cells for line in _lines_of(row, widths, right)]
    return "\n".join([*(terminal.styled(line, "bold") for line in top), *body])


def _lines_of(cells: Sequence[_Lines], widths: Sequence[int], right: frozenset[int]) -> _Lines:
    """Return the lines of one row, whose cells have one line or several."""
    return [
        (" " * _GAP)
        .join(
            _padded(cell[number] if number < len(cell) else "", width, i in right)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        .rstrip()
        for number in range(max(map(len, cells), default=0))
    ]


def _blocks(header: Sequence[str], rows: Sequence[Sequence[str]], chosen: Sequence[int], room: int) -> str:
    """Return the rows as blocks: a line for each column that is not empty, its name before it."""
    label = max(terminal.display_width(header[i]) for i in chosen)
    blocks = []
    for row in rows:
        lines = []
        for i in chosen:
            if row[i].strip():
                name = terminal.styled(header[i], "bold") + " " * (label - terminal.display_width(header[i]))
                first, *more = _wrapped(row[i].strip(), max(room - label - _GAP, 1))
                lines.append(f"{name}{' ' * _GAP}{first}".rstrip())
                lines += [" " * (label + _GAP) + line for line in more]
        blocks.append("\n".join(lines))
    return "\n\n".join(block for block in blocks if block)


def _wrapped(text: str, width: int) -> _Lines:
    """Break a text after spaces, `/` and `_` where it is wider than `width`; what has none of these stays whole.

    >>> _wrapped("tower/user_embedding", 12)
    ['tower/user_', 'embedding']
    """
    if terminal.display_width(text) <= width:
        return [text]
    lines = [""]
    for piece in _BREAKS.findall(text):
        if lines[-1] and terminal.display_width((lines[-1] + piece).rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line.rstrip() for line in lines]


def _longest_word(text: str) -> int:
    return max((terminal.display_width(piece.rstrip()) for piece in _BREAKS.findall(text)), default=0)


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _padded(text: str, width: int, right: bool) -> str:
    space = " " * (width - terminal.display_width(text))
    return space + text if right else text + space


def _transposed(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[list[str]]:
    return [[head, *(row[i] for row in rows)] for i, head in enumerate(header)]


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


def total(tables: int, rows: int, amount: int) -> str:
    """Write what several tables are together, "" for one or none.

    >>> total(3, 1200, 1 << 20)
    '3 tables, 1,200 rows, 1.0 MiB'
    """
    return f"{tables:,} tables, {counted(rows, 'row')}, {size(amount)}" if tables > 1 else ""


def shown(name: str) -> str:
    """Return a name as it can be printed anywhere, on one line.

    >>> shown("a" + chr(10) + "b")
    'a\\\\nb'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def shown_numbers(row: npt.NDArray[Any]) -> str:
    """Return the first 8 numbers of a row as text: integers whole, as they may be ids, and others to 6 digits.

    >>> import numpy as np
    >>> shown_numbers(np.array([0.1, 2])), shown_numbers(np.array([1 << 62, 0]))
    ('0.1 2', '4611686018427387904 0')
    """
    whole = row.dtype.kind in "iub"
    shown = [str(int(value)) if whole else f"{float(value):.6g}" for value in row[:_NUMBERS_SHOWN]]
    return " ".join(shown) + " ..." * (len(row) > _NUMBERS_SHOWN)


def told_time(seconds: float) -> str:
    """Write a moment, in the time of the machine.

    >>> len(told_time(0.0))
    19
    """
    return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
