"""Doctests as code in the reference: griffe asks for `Examples:`, and our docstrings say `Example:`."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^Example:(?=\n+\s+>>>)", re.MULTILINE)


class ExamplesOfDoctest(griffe.Extension):
    """Lets the parser of docstrings know that a section is one of doctests."""

    def on_object(self, *, obj: Any, loader: Any, **kwargs: Any) -> None:
        """Called when an object has been read."""
        if obj.docstring is not None:
            obj.docstring.value = _DOCTEST.sub("Examples:", obj.docstring.value)
