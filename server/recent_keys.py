"""A sample of the keys asked for lately, to bring their rows into memory in the next version before it is served."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools import _snapshot


class RecentKeys(_snapshot.RecentKeys):
    """The last keys noted, up to `size` of them, from any number of threads.

    Who answers many lookups notes the keys of those that are `due`, one in 16. In C++ that is done on the way, where
    this is handed to what answers.

    Example:
        >>> recent = RecentKeys()
        >>> recent.note(np.array([7, -3, 7]))
        >>> recent.keys().tolist()
        [-3, 7]
    """

    def __init__(self, size: int = 1 << 16) -> None:
        super().__init__(size)

    def note(self, keys: npt.NDArray[Any]) -> None:
        """Remember up to 64 of `keys` [n], integers or the bits of uint64, from all over them."""
        self.add(np.ascontiguousarray(keys.view(np.int64) if keys.dtype == np.uint64 else keys, np.int64))

    def keys(self) -> npt.NDArray[np.int64]:
        """Return the distinct keys that are remembered, ascending."""
        noted = np.sort(self.noted())  # np.unique imports numpy.ma: 20 ms in which nobody is answered
        return noted[np.append(True, noted[1:] != noted[:-1])] if len(noted) else noted
