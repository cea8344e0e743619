"""What an error of TensorFlow says went wrong, without the places in a graph that it writes around it."""

from __future__ import annotations

import re

from kvtools.errors import one_line

_BEFORE = re.compile(
    r"\s*(?:Graph execution error:\s*)?"
    r"(?:Detected at node [^\n]* defined at \(most recent call last\):\n.*?^Node: [^\n]*\n\s*)*"
    r"(?:\d+ root error\(s\) found\.\s*\(0\) [A-Z_]+: )?"
    r"(?:\{\{function_node [^}]*\}\} )?",
    re.DOTALL | re.MULTILINE,
)
_AFTER = re.compile(r"\[\[\{\{(?:function_)?node ")


def reason(error: Exception) -> str:
    r"""Return what went wrong, in one line.

    >>> place = "Detected at node 'a' defined at (most recent call last):\nNode: 'a'\n"
    >>> reason(ValueError(f"Graph execution error:\n\n{place}7 is not in [0, 2)\n\t [[{{{{node a}}}}]]"))
    '7 is not in [0, 2)'
    """
    if isinstance(error, UnicodeDecodeError):  # a message that quotes bytes: TensorFlow fails to make text of it
        text = error.object.decode(errors="backslashreplace")
    else:
        text = str(getattr(error, "message", None) or error)
    return one_line(_AFTER.split(_BEFORE.sub("", text, count=1), maxsplit=1)[0])
