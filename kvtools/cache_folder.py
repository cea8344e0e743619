"""Where compiled things are kept between runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder: ``$KVTOOLS_CACHE_DIR``, else one in the virtual environment, else ``~/.cache/kvtools``.

    It may not exist yet.

    >>> cache_folder().is_absolute()
    True
    """
    override = os.environ.get("KVTOOLS_CACHE_DIR")
    if override:
        return Path(override).absolute()
    if sys.prefix != sys.base_prefix and os.access(sys.prefix, os.W_OK):
        return _of_environment()
    return Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache") / "kvtools"


def others_cache_folders() -> list[Path]:
    """Return folders of others that may have what is wanted, and are not written: that of a virtual environment which
    somebody else made. None if ``$KVTOOLS_CACHE_DIR`` says where to look."""
    if os.environ.get("KVTOOLS_CACHE_DIR") or sys.prefix == sys.base_prefix or os.access(sys.prefix, os.W_OK):
        return []
    return [_of_environment()]


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # a user whom the system does not know, as in containers, and no $HOME
        return Path("/")  # which is what Docker gives such a user


def _of_environment() -> Path:
    return Path(sys.prefix) / "var" / "cache" / "kvtools"
