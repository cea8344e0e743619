"""URLs as messages show them: without what gives access."""

from __future__ import annotations

import re

_USER = re.compile(
    r"((?!(?:s3a?|gs|gcs|oss|hdfs|memory|file)://[^/\s'\"?:@]*(?:[/\s'\"?]|$))[a-zA-Z][\w+.-]*://)[^\s'\"?]*@"
)
"""In a bucket with no colon and no at sign, an at sign further on is of a name."""
_OPTION = re.compile(r"(?i)([?&][\w-]*(?:password|signature|credential|token|secret|sig|accesskeyid)=)[^&\s'\"]*")


def without_password(text: str) -> str:
    """Return a path, a URL or a message with URLs without the users and passwords in them.

    >>> without_password("redis://user:secret@cache:6379/0")
    'redis://cache:6379/0'
    >>> without_password("opening 'redis://cache/0?db=1&password=secret': refused")
    "opening 'redis://cache/0?db=1&password=***': refused"
    """
    return _OPTION.sub(r"\1***", _USER.sub(r"\1", text)) if "://" in text else text
