"""Where a path may be a URL: the local path to go on with. Imports nothing of a store before it is given a URL."""

from __future__ import annotations

import importlib
import os
from typing import Any

from kvtools.errors import UsageError
from kvtools.remote.shown import shown
from kvtools.remote.url import is_remote


def local_path(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return a path as it is, and of a URL of a store the path that stands for it: see `mirror.mirrored`.

    Raises:
        UsageError: the path is empty, or as for `mirrored`.
        MissingDependencyError, BadInputError: see `mirrored`.

    >>> local_path("model.ckpt")
    'model.ckpt'
    """
    text = os.fspath(path)
    if not text:  # to the system it would be the working folder
        raise UsageError("got an empty path, expected a file or folder, . for this one: is a variable not set?")
    if "://" not in text or not is_remote(text):
        return path
    mirror: Any = importlib.import_module("kvtools.remote.mirror")
    return str(mirror.mirrored(text))


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path as it is told and written down: that of a store as its URL."""
    return shown(os.fspath(path))
