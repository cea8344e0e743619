"""Steps under `tf.distribute.ParameterServerStrategy`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tfplugin import placement
from tfplugin.kv_variable import KvVariable


def without_tables(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Gradients and variables without the tables that the backward pass has updated; all outside of such a strategy.

    TensorFlow has optimizers update variables in a cross-replica context, which has no rows of a worker's batch. So a
    table on parameter servers is updated in the backward pass, by `tfplugin.apply_in_backward`.

    Raises:
      ValueError: a table that is not.
    """
    pairs = list(pairs)
    if not placement.parameter_servers():
        return pairs
    tables = [v for _, v in pairs if isinstance(v, KvVariable)]
    for table in tables:
        if table._in_backward is None:
            name = table.partitioned_name or table.name
            raise ValueError(
                f"Key-value variable '{name}' cannot be updated by apply_gradients under "
                "tf.distribute.ParameterServerStrategy, whose optimizers update variables outside of the worker's "
                "step. Have the backward pass update it: tfplugin.apply_in_backward(table, optimizer), once, before "
                "the step function is traced."
            )
    return [(g, v) for g, v in pairs if not isinstance(v, KvVariable)]
