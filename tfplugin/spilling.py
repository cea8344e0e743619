"""What is said of tables that outgrow their memory, and where their files are on another machine."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

_local = threading.local()


class SpillFolderError(ValueError):
    """A model that is loaded or copied has tables whose spill folder cannot be used here."""


@contextlib.contextmanager
def spill_in(folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Has tables that are made inside keep their files in `folder`, whatever their ``spill=`` says: for models that
    come from another machine, and copies.

    Holds on the calling thread, for tables, layers and configs that have a ``max_memory``; those without have no file.
    What is made so goes on with this folder: what is saved of it names this one.

    Args:
      folder: on a local disk, and there; None: they have all rows in memory, and no ``max_memory``.

    Raises:
      TypeError, ValueError: no path.

    Example:
      >>> with tfplugin.spill_in("/mnt/nvme/spill"):
      ...     model = keras.models.load_model("ctr.keras")
    """
    before = getattr(_local, "folder", ())
    _local.folder = (None if folder is None else _path(folder, "tfplugin.spill_in"),)
    try:
        yield
    finally:
        _local.folder = before


_REFUSED = re.compile(r"Table '[^']*' cannot keep rows in its spill folder '[^']*': [^.]*\.")


@contextlib.contextmanager
def naming_the_way_out(what: str) -> Iterator[None]:
    """Says of a folder that cannot be used what to do about it, where nobody can give a ``spill=``, and no more."""
    try:
        yield
    except SpillFolderError:
        raise
    except Exception as error:
        refused = _REFUSED.search(str(error))
        if refused is None:
            raise
        raise SpillFolderError(
            f"{what}: {refused[0]} Make that folder, or name another, on a local disk: `with "
            "tfplugin.spill_in('/another/folder'):` around this call. In `with tfplugin.spill_in(None):` all rows are "
            "in memory."
        ) from None


def checked_spill(max_memory: Any, spill: Any, what: str) -> tuple[int | None, str | None]:
    """`max_memory` as an int and `spill` as text, or None for both; `what` has them. `spill_in` says where instead.

    Raises:
      ValueError: one without the other; a `max_memory` that is no number of bytes above 0.
      TypeError: a `spill` that is no path.
    """
    if max_memory is None and spill is None:
        return None, None
    if max_memory is None:
        raise ValueError(
            f"{what}: spill={spill!r} says where rows go that memory has no room for, and nothing "
            "says how much memory: give max_memory=, in bytes."
        )
    if isinstance(max_memory, (bool, str)) or int(max_memory) != max_memory or max_memory < 1:
        raise ValueError(f"{what}: max_memory must be a number of bytes, 1 or more; got {max_memory!r}.")
    if spill is None:
        raise ValueError(
            f"{what}: max_memory={max_memory} says how much memory rows take, and nothing says "
            "where the others go: give spill=, a folder on a local disk."
        )
    own = _path(spill, what)
    (folder,) = getattr(_local, "folder", ()) or (own,)
    return (None, None) if folder is None else (int(max_memory), folder)


def _path(folder: Any, what: str) -> str:
    path = os.fsdecode(folder)
    if not path:
        raise ValueError(f"{what}: spill must be a folder on a local disk, got {folder!r}.")
    return path
