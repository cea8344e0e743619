"""What stands at a path: who opens a pipe to look at it may wait for ever."""

from __future__ import annotations

import os
import stat

FOLDER = "a folder"
_KINDS = {
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
    stat.S_IFDIR: FOLDER,
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def file_kind(path: str | os.PathLike[str]) -> str | None:
    """Return what is there, or behind a link there; None for a file, and where nothing can be looked at.

    >>> file_kind("/dev/null"), file_kind("/etc"), file_kind("/etc/hosts"), file_kind("no/such/file")
    ('a device', 'a folder', None, None)
    """
    try:
        return _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))  # noqa: PTH116  (a path of any type)
    except (OSError, ValueError):
        return None
