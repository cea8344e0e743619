"""A `tf.Module` that holds tables: they are among its trainable variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfplugin.keras_training import asked_by_a_library
from tfplugin.tapes import is_table


def trainable_variables(getter: Callable[[Any], tuple[Any, ...]], module: Any) -> tuple[Any, ...]:
    """``Module.trainable_variables``: to code that is not TensorFlow's or Keras's, with the parts of tables behind."""
    variables = getter(module)
    if asked_by_a_library():
        return variables
    tables = module._flatten(predicate=is_table)
    parts = {id(part): part for table in tables for part in table._kv_parts if part.trainable}
    return (*variables, *parts.values())
