"""Graphs whose variables are frozen into constants: a table is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from tfplugin.kv_variable import KvVariable


def refuse_tables_of_graph(original: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> None:
    """What is to be frozen of a graph, `_ConverterData`.

    Raises:
      ValueError: a table is among it.
    """
    original(data, *args, **kwargs)
    for node in data.graph_def.node:
        if node.op == "KvTableHandle" and data._should_convert(node.name):
            _refuse(node.name)


def refuse_tables_of_function(original: Callable[..., Any], data: Any, func: Any, *args: Any, **kwargs: Any) -> None:
    """What is to be frozen of a function, `_FunctionConverterData`.

    Raises:
      ValueError: a table is among it.
    """
    for variable in func.graph.variables:
        if isinstance(variable, KvVariable):
            _refuse(variable.name)
    original(data, func, *args, **kwargs)


def _refuse(name: str) -> NoReturn:
    raise ValueError(
        f"Key-value variable '{name}' cannot be frozen into a constant: it holds a row for each key it has met. "
        "tfplugin.export_saved_model writes the model in stock operations, which any TensorFlow serves; what it writes "
        "with index='perfect' can be frozen."
    )
