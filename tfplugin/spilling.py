"""What is said of tables that outgrow their memory."""

from __future__ import annotations

import os
from typing import Any


def checked_spill(max_memory: Any, spill: Any, what: str) -> tuple[int | None, str | None]:
    """`max_memory` as an int and `spill` as text, or None for both; `what` has them.

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
    folder = os.fsdecode(spill)
    if not folder:
        raise ValueError(f"{what}: spill must be a folder on a local disk, got {spill!r}.")
    return int(max_memory), folder
