"""A sample of the keys asked for lately, to bring their rows into memory in the next version before it is served."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

_OF_A_REQUEST = 64
_ONE_IN = 16
_MASK = (1 << 64) - 1
_LONGEST_JSON = 8192


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
        self._requests = 0

    def due(self) -> bool:
        """Tell, of each request, whether it is one whose keys are to be remembered."""
        self._requests += 1
        return self._requests % _ONE_IN == 0

    def note_body(self, body: bytes, *, binary: bool) -> None:
        """Remember keys of one in 16 bodies: little-endian int64, or JSON with a list of `keys` that has been answered.

        JSON of over 8 KiB is left alone: reading it would take longer than the lookup did.
        """
        if not self.due():
            return
        if binary:
            self.note(np.frombuffer(body, "<i8"))
        elif len(body) <= _LONGEST_JSON:
            keys = json.loads(body)["keys"][:_OF_A_REQUEST]
            if keys and type(keys[0]) is int:  # pooled keys are lists
                self.note(np.array([key & _MASK for key in keys], np.uint64))

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
