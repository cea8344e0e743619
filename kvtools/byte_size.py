"""Sizes as people write them: 512MiB."""

from __future__ import annotations

import re

from kvtools.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])i?)?B?", re.I)


def byte_size(text: str, name: str) -> int:
    """Return the number of bytes that a size means; `name` is what a message calls it.

    Raises:
        UsageError: it is no size, or 0.

    >>> byte_size("1GiB", "--memory"), byte_size("512M", "--memory"), byte_size("4096", "--memory")
    (1073741824, 536870912, 4096)
    """
    found = _SIZE.fullmatch(text.strip())
    if not found or (size := int(float(found[1]) * 1024 ** " KMGT".index((found[2] or " ").upper()))) < 1:
        raise UsageError(f"got {name} {text!r}, expected a size such as 512MiB or 2GiB")
    return size
