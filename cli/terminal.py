"""What standard output and standard error are: how wide, and whether they show colours.

A pipe or a file has no width: nothing is wrapped or left out there. Colours go to terminals that have them; `--color`,
`NO_COLOR` (https://no-color.org), `FORCE_COLOR` and `TERM=dumb` say otherwise, in this order.
"""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
import unicodedata
from typing import Any

from kvtools.cli.shared_options import shared

_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33"}
_NARROWEST = 20
_USUAL = 80


def width() -> int | None:
    """Return how many characters a line of standard output has; None where it is no terminal: as many as there are."""
    if not is_terminal(sys.stdout):
        return None
    columns = shutil.get_terminal_size((_USUAL, 24)).columns
    return max(columns, _NARROWEST)


def is_terminal(stream: Any) -> bool:
    """Tell whether somebody looks at a stream."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # closed, or nothing of the kind
        return False


def has_color(stream: Any = None) -> bool:
    """Tell whether a stream, standard output if None, is to have colours."""
    color = shared().color
    if color != "auto":
        return color == "always"
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM", "") != "dumb" and is_terminal(sys.stdout if stream is None else stream)


def can_redraw(stream: Any) -> bool:
    """Tell whether a line that was written to a stream can be written over: a terminal, and no dumb one."""
    return is_terminal(stream) and os.environ.get("TERM", "") != "dumb"


def styled(text: str, style: str, stream: Any = None) -> str:
    """Return a text in a style where the stream, standard output if None, has colours; else as it is.

    Args:
        text: without line ends.
        style: "bold", "dim", "red", "green", "yellow", or several with spaces between.
        stream: where it will be written to.
    """
    if not text or not has_color(stream):
        return text
    return f"\x1b[{';'.join(_CODES[word] for word in style.split())}m{text}\x1b[0m"


def prose(text: str) -> str:
    """Return a line for people in lines of the terminal's width, broken between words; as it is elsewhere.

    Words are never broken, so that paths and numbers can be copied.
    """
    columns = width()
    if columns is None or display_width(text) <= columns:
        return text
    return textwrap.fill(
        text,
        columns,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
        replace_whitespace=False,
    )


def display_width(text: str) -> int:
    """Return how many columns of a terminal a text takes: two for a wide character, none for a mark on another.

    >>> display_width("emb"), display_width("用户")
    (3, 4)
    """
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(one) else 2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text
    )
