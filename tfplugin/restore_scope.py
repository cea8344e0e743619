"""What variables that are restored together read once, such as a checkpoint of many tables in another layout."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")
_lock = threading.RLock()
_restoring = 0
_kept: dict[Hashable, Any] = {}


@contextlib.contextmanager
def restoring() -> Iterator[None]:
    """While variables are restored, in this thread and by ops in others."""
    global _restoring
    with _lock:
        _restoring += 1
    try:
        yield
    finally:
        with _lock:
            _restoring -= 1
            if not _restoring:
                _kept.clear()


def once(key: Hashable, make: Callable[[], T]) -> T:
    """What `make` gives, kept under the key until no call restores any more; without such a call it is not kept."""
    with _lock:
        if not _restoring:
            return make()
        if key not in _kept:
            _kept[key] = make()
        kept: T = _kept[key]
        return kept


def restore(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Replaces ``tf.compat.v1.train.Saver.restore``, and is in that of `tf.train.Checkpoint`."""
    with restoring():
        return original(*args, **kwargs)
