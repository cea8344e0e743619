"""Which dialect a path is in: the most telling mark first, a plain TensorFlow checkpoint last."""

from __future__ import annotations

import os
from pathlib import Path

from kvtools.dialects import savedmodel, tensorflow, tfplugin
from kvtools.dialects.bundle import Bundle
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.location import locate


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open the checkpoint that `path` means, whatever its dialect, reading no more than its index.

    Args:
        path: a checkpoint prefix, one of its files, a checkpoint folder or a SavedModel folder.

    Raises:
        BadInputError: there is no checkpoint, or one of its files is missing, truncated or damaged.

    Example:
        >>> open_checkpoint("no/such/model.ckpt")
        Traceback (most recent call last):
        kvtools.errors.BadInputError: looking for a checkpoint at 'no/such/model.ckpt': ...
    """
    location = locate(Path(path))
    bundle = Bundle(location.prefix)
    if savedmodel.sniff(location):
        return savedmodel.open_checkpoint(location, bundle)
    if tfplugin.sniff(bundle):
        return tfplugin.open_checkpoint(location, bundle)
    return tensorflow.open_checkpoint(location, bundle)
