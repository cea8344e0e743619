"""Offline tools for key-value embedding checkpoints: open, check, compare, shrink, move, export and serve them.

`kvtools.open` opens a checkpoint of any engine through one of the dialects (`kvtools.dialects`); the tools work on the
streams of rows that a dialect gives. Nothing here imports TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from typing import Any

    from kvtools.array_table import table_from_arrays
    from kvtools.dialects.interface import Checkpoint
    from kvtools.migrate import write_tables
    from kvtools.string_hash import string_keys

__version__ = "0.1.0"
__all__ = ["open", "string_keys", "table_from_arrays", "write_tables"]

_LOADED_WHEN_USED = {
    "string_keys": "kvtools.string_hash",
    "table_from_arrays": "kvtools.array_table",
    "write_tables": "kvtools.migrate",
}


if not TYPE_CHECKING:  # or checkers of types would take any name for one of these

    def __getattr__(name: str) -> Any:
        if name not in _LOADED_WHEN_USED:
            raise AttributeError(f"module 'kvtools' has no attribute '{name}'")
        import importlib

        return getattr(importlib.import_module(_LOADED_WHEN_USED[name]), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LOADED_WHEN_USED})


def open(
    path: str | os.PathLike[str],
    dialect: str | None = None,
    *,
    key_dtype: str | None = None,
    value_dtype: str | None = None,
    dim: int | None = None,
    memory: int = 1 << 30,
) -> Checkpoint:
    """Open a checkpoint of any dialect; reads no more than its index.

    Args:
        path: a checkpoint prefix, one of its files, its folder, a SavedModel folder, a file or folder of another
            dialect, or a URL such as `s3://bucket/train/model.ckpt` or `redis://localhost/0`; see docs/remote.md.
        dialect: the dialect's name; found out from the content if None.
        key_dtype: the keys' type, where the files do not record it (int64 if None).
        value_dtype: the values' type, where the files do not record it (float32 if None).
        dim: the numbers per value row, where the files do not record it (from the sizes if None).
        memory: how many bytes the readers may hold; what needs more spills to disk.

    Returns:
        A `Checkpoint`. Its `tables` map a name to a table with `key_dtype`, `value_dtype`, `dim`, `rows`, `parts`,
        `slots` (names) and `chunks(rows=...)`, whose chunks have `keys` [n], `values` [n, dim], `slots` (name to
        [n, width]), `freqs` [n] and `versions` [n] (None where the dialect has none).

    Raises:
        kvtools.errors.BadInputError: there is no checkpoint, or one of its files is missing or damaged.

    Example:
        >>> open("no/such/model.ckpt")
        Traceback (most recent call last):
        kvtools.errors.BadInputError: looking for a checkpoint at 'no/such/model.ckpt': ...
    """
    from kvtools.dialects.detect import open_checkpoint
    from kvtools.dialects.options import OpenOptions

    options = OpenOptions(dialect=dialect, key_dtype=key_dtype, value_dtype=value_dtype, dim=dim, memory=memory)
    return open_checkpoint(path, options)
