"""Updates that the gradients of lookups make at once, by the tokens that lookup ops carry; see `apply_in_backward`."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

_updates: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(update: Any) -> str:
    """A token for `update`, a function of keys [n], gradients [n, dim] and positions [n] or None."""
    token = f"update_{next(_numbers)}"
    _updates[token] = update
    return token


def find(token: str) -> Any:
    """The update behind a token, or None: there is no token, or the update has been undone."""
    return _updates.get(token) if token else None


def forget(token: str) -> None:
    """Undoes `register`."""
    _updates.pop(token, None)
