"""One thread at a time has its methods in the place of an optimizer's."""

from __future__ import annotations

import threading
import weakref
from typing import Any

_locks: weakref.WeakKeyDictionary[Any, threading.RLock] = weakref.WeakKeyDictionary()
_making = threading.Lock()


def patch_lock(optimizer: Any) -> threading.RLock:
    """The lock to hold from when methods of `optimizer` are replaced until they are back."""
    with _making:
        return _locks.setdefault(optimizer, threading.RLock())
