"""URLs as messages show them: without what gives access."""

from __future__ import annotations

import re

_USER = re.compile(r"([a-zA-Z][\w+.-]*://)[^\s'\"?]*@")
_OPTION = re.compile(r"([?&]\w*password=)[^&\s'\"]*")


def without_password(text: str) -> str:
    """Return a path, a URL or a message with URLs without the users and passwords in them.

    >>> without_password("redis://user:secret@cache:6379/0")
    'redis://cache:6379/0'
    >>> without_password("opening 'redis://cache/0?db=1&password=secret': refused")
    "opening 'redis://cache/0?db=1&password=***': refused"
    """
    return _OPTION.sub(r"\1***", _USER.sub(r"\1", text)) if "://" in text else text
