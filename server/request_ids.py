"""An id for every request, by which an answer, a line of the access log and the client's own log are the same one."""

from __future__ import annotations

import itertools
import os
import re
import secrets
from collections.abc import Mapping

HEADER = "x-request-id"
_TAKEN = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class _Made:
    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.prefix = secrets.token_hex(6)
        self.numbers = itertools.count(1)


_made = _Made()
os.register_at_fork(after_in_child=_made.begin)  # Workers are forks, and make ids of their own.


def request_id(headers: Mapping[str, str]) -> str:
    """Return the id that a client gave (letters, digits and `.:/+=@_-`, at most 128), or one that is made.

    >>> request_id({"x-request-id": "job-17"})
    'job-17'
    """
    given = headers.get(HEADER)
    if given is not None and _TAKEN.fullmatch(given):
        return given
    return f"{_made.prefix}-{next(_made.numbers):x}"
