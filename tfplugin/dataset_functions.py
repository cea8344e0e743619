"""Lookups in functions of `tf.data`: `Dataset.map` and the like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tfplugin import step_record, training_mode
from tfplugin.keras_models import quoted, table_name


def refuse_lookups_that_train(
    original: Callable[..., Any], wrapper: Any, func: Any, transformation_name: str, *args: Any, **kwargs: Any
) -> None:
    """``StructuredFunctionWrapper.__init__``, which traces what a dataset is to do with its elements.

    Raises:
      ValueError: it looks a table up that nothing in it updates, by a lookup that says nothing of training.
    """
    with step_record.recording() as step:
        original(wrapper, func, transformation_name, *args, **kwargs)
    graph = getattr(wrapper._function, "graph", None)  # legacy functions have none
    untrained = step.left_out()
    if graph is not None and untrained and training_mode.inserts(graph):
        names = quoted(table_name(part, table) for part, table in untrained)
        in_loop = ""
        if transformation_name == "Dataset.scan()":  # which AutoGraph makes of loops
            in_loop = (
                " Of a loop over a dataset in a tf.function: have an optimizer update the table in the loop, or loop "
                "over iter(dataset), out of which gradients come."
            )
        raise ValueError(
            f"A function of {transformation_name} looks up key-value variable {names}: keys would be given rows there, "
            "as the dataset runs ahead, and no step would train them, since gradients do not reach into a dataset. "
            f"Look it up in the step. To read the rows that are there, call {transformation_name} inside "
            f"tfplugin.inference_mode(), or give the lookup training=False.{in_loop}"
        )
