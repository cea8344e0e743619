"""Functions that `tf.saved_model.load` gives: a tape that is open when they are called watches their tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfplugin.kv_variable import KvVariable


def restore_captures(original: Callable[..., Any], function: Any, inputs: Sequence[Any]) -> None:
    """``restore_captures``, which tells a loaded function of the dense variables alone among what it has captured."""
    original(function, inputs)
    tables = [one for one in inputs if isinstance(one, KvVariable) and one.trainable]
    if tables:
        function.set_variables([*function.variables, *tables])
