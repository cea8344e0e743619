"""What tapes and forward accumulators make of tables: a tape watches one that it is told to watch, and derivatives in
forward mode go past tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import tape as eager_tape

from tfplugin.kv_variable import KvVariable
from tfplugin.partitioned_kv_variable import PartitionedKvVariable
from tfplugin.slices_of_rows import NoDenseForm


def is_table(value: Any) -> bool:
    """Whether it is a table that gradients are taken of by itself, in parts or whole."""
    return isinstance(value, (KvVariable, PartitionedKvVariable))


def watch(original: Callable[..., None], tape: Any, tensor: Any) -> None:
    """``GradientTape.watch``, of whatever is among tables; of these it knows nothing."""
    watched = tf.nest.flatten(tensor)
    for table in filter(is_table, watched):
        for part in table._kv_parts:
            eager_tape.watch_variable(tape._tape, part)
    original(tape, [one for one in watched if not is_table(one)])


def refuse_tangents(original: Callable[..., None], accumulator: Any, primals: Any, tangents: Any) -> None:
    """``ForwardAccumulator._watch``, which wants a number for each of what it watches.

    Raises:
      TypeError: a table is among it.
    """
    for table in filter(is_table, tf.nest.flatten(primals)):
        raise TypeError(
            f"Key-value variable '{table.name}' has no tangent: it has no number of rows. Look its rows up before, and "
            "give them: rows = tf.nn.embedding_lookup(variable, ids); tf.autodiff.ForwardAccumulator(rows, tangents)."
        )
    original(accumulator, primals, tangents)


def refuse_tables(original: Callable[..., Any], functions: Any, *args: Any) -> Any:
    """``_build_functions_for_outputs``, the derivatives of a `tf.function`, which are dense in forward mode.

    Raises:
      TypeError: they are asked for in forward mode, and the function looks a table up.
    """
    try:
        return original(functions, *args)
    except NoDenseForm as error:
        raise TypeError(
            f"Function '{functions._func_graph.name}' looks a key-value variable up, and was called within a "
            "tf.autodiff.ForwardAccumulator, which has no place for gradients of tables there. Make the accumulator in "
            "the function, or look rows up before and give them to the function as an argument."
        ) from error
