"""What tables are restored from: a checkpoint, or for an increment of a chain the members that it goes back to.

TensorFlow restores objects from one checkpoint, some of them only when they are made. So a `CheckpointManager` restores
its newest increment, which has all dense variables, and tables find the rest of the chain here. Increments in other
folders stay what they are, and the op that reads them refuses them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from kvtools.chain import chain_to, member_of

_folders: set[Path] = set()
#: By the newest increment that was asked for, and when it was written: the prefixes of the full and the increments.
_latest: tuple[tuple[str, int], list[bytes]] | None = None


def note_folder(folder: Path) -> None:
    """Says that increments in `folder` are restored with what they go back to."""
    _folders.add(folder.resolve())


def with_what_it_goes_back_to(prefix: Any) -> Any:
    """`prefix`, or for an increment in a folder of a `CheckpointManager` all that it needs, [full, increment, ...].

    Args:
      prefix: a scalar string tensor. Only eager ones are looked at.

    Raises:
      kvtools.chain.ChainError: a member that it needs is missing, or another one.
    """
    global _latest
    if not hasattr(prefix, "numpy") or prefix.shape.rank != 0:
        return prefix
    text = os.fsdecode(prefix.numpy())
    member = member_of(text)
    if member is None or member.kind == "full" or member.prefix.parent.resolve() not in _folders:
        return prefix
    try:
        key = (text, member.index.stat().st_mtime_ns)
    except OSError:
        return prefix  # the op says what is missing
    if _latest is None or _latest[0] != key:
        _latest = key, [os.fsencode(one.prefix) for one in chain_to(member)]
    return tf.constant(_latest[1])
