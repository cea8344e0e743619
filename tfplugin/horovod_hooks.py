"""Errors where Horovod would leave the rows of key-value variables as they are on each rank, without a word."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import wrapt

from tfplugin import ranks
from tfplugin.keras_models import quoted, table_holders, table_name
from tfplugin.wrapped_method import wrap_method

_installed = False


def install() -> None:
    """Has Horovod look for tables in what it broadcasts and commits, from when it is imported; for good."""
    global _installed
    if not _installed:
        _installed = True
        wrapt.register_post_import_hook(_imported, "horovod.tensorflow")


def _imported(horovod: Any) -> None:
    wrap_broadcasts(horovod.functions, _refuse_broadcast)
    wrap_method(horovod.elastic.TensorFlowKerasState, "__init__", _refuse_state)
    wrap_method(horovod._DistributedAdasumOptimizer, "apply_gradients", _refuse_adasum)


def wrap_broadcasts(functions: Any, check: Callable[[Iterable[Any]], None]) -> None:
    """Has Horovod's broadcasts of variables give them to `check` first.

    Args:
      functions: the module ``horovod.tensorflow.functions``.
      check: raises where they must not be broadcast.
    """

    def checking(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        broadcast = make(*args, **kwargs)

        def checked(variables: Any, *args: Any, **kwargs: Any) -> Any:
            variables = list(variables)
            check(variables)
            return broadcast(variables, *args, **kwargs)

        return checked

    def checking_in_place(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        broadcast = make(*args, **kwargs)

        def checked(lists: Any, *args: Any, **kwargs: Any) -> Any:
            lists = [list(variables) for variables in lists]
            check(variable for variables in lists for variable in variables)
            return broadcast(lists, *args, **kwargs)

        return checked

    wrap_method(functions, "_make_broadcast_group_fn", checking)
    wrap_method(functions, "_make_inplace_broadcast_group_fn", checking_in_place)


def _refuse_broadcast(variables: Iterable[Any]) -> None:
    for variable in variables:
        if hasattr(variable, "_kv_parts"):
            raise ValueError(
                f"Horovod broadcasts dense variables, and key-value variable '{table_name(variable, variable)}' is "
                "none. Leave it out, as model.variables does; in a graph give hvd.broadcast_variables [v for v in "
                "tf.compat.v1.global_variables() if not isinstance(v, tfplugin.KvVariable)]. New keys begin alike on "
                "all ranks. What is restored, or written, is restored or written on every rank."
            )


def _refuse_state(original: Callable[..., None], state: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    tables = {table_name(part, table) for part, table, _ in table_holders(model)}
    if tables:
        raise ValueError(
            f"{type(state).__name__}: model '{model.name}' has key-value variable {quoted(tables)}, whose rows Horovod "
            "would neither put back to the last commit nor give to new ranks. Take hvd.elastic.TensorFlowState("
            "variables=[]), and a tf.train.Checkpoint that rank 0 saves before state.commit() and every rank restores "
            "where the function that hvd.elastic.run runs begins."
        )
    original(state, model, *args, **kwargs)


def _refuse_adasum(original: Callable[..., Any], optimizer: Any, pairs: Any, *args: Any, **kwargs: Any) -> Any:
    """``apply_gradients`` of what ``hvd.DistributedOptimizer(op=hvd.Adasum)`` makes of an optimizer of TensorFlow 1."""
    pairs = list(pairs)
    table = next((v for _, v in pairs if hasattr(v, "_kv_parts")), None)
    if table is not None and ranks.horovod_size() > 1:
        raise ValueError(
            f"Key-value variable '{table_name(table, table)}' would be updated by the gradients of this rank alone, "
            "and so would dense variables: with op=hvd.Adasum an hvd.DistributedOptimizer hands gradients on as they "
            "are. Take op=hvd.Average or hvd.Sum."
        )
    return original(optimizer, pairs, *args, **kwargs)
