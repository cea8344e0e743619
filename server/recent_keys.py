"""A sample of the keys asked for lately, to bring their rows into memory in the next version before it is served."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_OF_A_REQUEST = 64


class RecentKeys:
    """The last keys noted, up to `size` of them, from any number of threads.

    Takes no lock: two threads that write at once may lose a sample to each other, which does no harm.

    Example:
        >>> recent = RecentKeys()
        >>> recent.note(np.array([7, -3, 7]))
        >>> recent.keys().tolist()
        [-3, 7]
    """

    def __init__(self, size: int = 1 << 16) -> None:
        self._keys = np.zeros(size, np.int64)
        self._written = 0

    def note(self, keys: npt.NDArray[Any]) -> None:
        """Remember up to 64 of `keys` [n], int64 or the bits of uint64."""
        step = max(1, len(keys) // _OF_A_REQUEST)
        some = keys[::step][:_OF_A_REQUEST]
        start = self._written % len(self._keys)
        some = some[: len(self._keys) - start]
        self._keys[start : start + len(some)] = some.view(np.int64) if some.dtype == np.uint64 else some
        self._written += len(some)

    def keys(self) -> npt.NDArray[np.int64]:
        """Return the distinct keys that are remembered, ascending."""
        return np.unique(self._keys[: min(self._written, len(self._keys))])
