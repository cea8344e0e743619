"""An id for every request, by which an answer, a line of the access log and the client's own log are the same one."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping

from kvtools._snapshot import RequestIds

HEADER = "x-request-id"
_TAKEN = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


MADE = RequestIds(secrets.token_hex(6))
"""Makes the ids of this process."""
os.register_at_fork(after_in_child=lambda: MADE.begin(secrets.token_hex(6)))  # Workers are forks.


def request_id(headers: Mapping[str, str]) -> str:
    """Return the id that a client gave (letters, digits and `.:/+=@_-`, at most 128), or one that is made.

    >>> request_id({"x-request-id": "job-17"})
    'job-17'
    """
    given = headers.get(HEADER)
    if given is not None and _TAKEN.fullmatch(given):
        return given
    return MADE.next()
