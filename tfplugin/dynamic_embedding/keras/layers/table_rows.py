"""`TableRows`: what ``get_weights`` gives of a table."""

from __future__ import annotations

from typing import Any

import numpy as np


class TableRows(np.ndarray):
    """All rows of a table, [n, dim], which know their keys, so that ``set_weights`` can put them back.

    Only the array itself and its copies know them: not what is computed from it.

    Attributes:
      keys: [n], or None.
    """

    keys: np.ndarray | None

    def __array_finalize__(self, obj: Any) -> None:
        self.keys = None

    def copy(self, order: Any = "C") -> TableRows:
        """The same rows and keys."""
        del order
        return table_rows(self.keys, np.asarray(self))

    def __copy__(self) -> TableRows:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> TableRows:
        return self.copy()

    def __reduce__(self) -> Any:
        return table_rows, (self.keys, np.array(self, subok=False))


def table_rows(keys: np.ndarray | None, rows: np.ndarray) -> TableRows:
    """A copy of `rows` that knows `keys`."""
    # It owns its elements: NumPy remembers it as the base of arrays that are views of it.
    made = np.ndarray.__new__(TableRows, rows.shape, rows.dtype)
    made[...] = rows
    made.keys = None if keys is None else keys.copy()
    return made


def keys_of(rows: Any) -> np.ndarray | None:
    """The keys of a `TableRows`, also where it comes as a plain array; None where nobody knows them."""
    if not isinstance(rows, TableRows) and isinstance(rows, np.ndarray):
        base = rows.base
        whole = isinstance(base, TableRows) and base.shape == rows.shape and base.strides == rows.strides
        rows = base if whole and base.ctypes.data == rows.ctypes.data else None
    return rows.keys if isinstance(rows, TableRows) else None
