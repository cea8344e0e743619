"""Changes to the Kerases that are imported, and to others when they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import wrapt

_NAMES = ("keras", "tf_keras")


class KerasHooks:
    """What one part of the plugin changes in Keras 3 and tf_keras.

    Args:
      change: makes the changes to one of them, the module that it is given, and yields what takes each back.
    """

    def __init__(self, change: Callable[[Any], Iterator[Callable[[], None]]]) -> None:
        self._change = change
        self._undo: dict[str, list[Callable[[], None]]] = {}
        self._wanted = False

    def install(self) -> None:
        """Makes the changes, now or when one is imported."""
        self._wanted = True
        for name in _NAMES:
            if name in sys.modules:
                self._imported(sys.modules[name])
            else:
                wrapt.register_post_import_hook(self._imported, name)

    def uninstall(self) -> None:
        """Leaves Keras as it was."""
        self._wanted = False
        while self._undo:
            for undo in self._undo.popitem()[1]:
                undo()

    def _imported(self, keras: Any) -> None:
        if self._wanted and keras.__name__ not in self._undo:
            undo = self._undo[keras.__name__] = []
            undo.extend(self._change(keras))
