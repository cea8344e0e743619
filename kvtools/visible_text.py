"""Names as they can be shown: no character of a name is invisible, turns the text around, or becomes HTML."""

from __future__ import annotations

import html


def visible(text: str) -> str:
    """Return a text on one line, with escapes for what cannot be seen as what it is.

    >>> visible("a" + chr(10) + "b" + chr(0x202E))
    'a\\\\nb\\\\u202e'
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def html_text(text: str) -> str:
    """Return a text, made visible, as it stands in HTML and in the value of an attribute.

    >>> html_text("<b>")
    '&lt;b&gt;'
    """
    return html.escape(visible(text))
