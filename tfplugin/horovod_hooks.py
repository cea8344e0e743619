"""What Horovod would do in silence to key-value variables, whose rows it leaves as they are on each rank, is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
import wrapt

from tfplugin import ranks
from tfplugin.keras_models import quoted, table_holders, table_name
from tfplugin.kv_variable import KvVariable
from tfplugin.ops import raw
from tfplugin.wrapped_method import wrap_method

_log = logging.getLogger("tfplugin")
_installed = False


def install() -> None:
    """Has Horovod look for tables in what it broadcasts and commits, from when it is imported; for good."""
    global _installed
    if not _installed:
        _installed = True
        wrapt.register_post_import_hook(_imported, "horovod.tensorflow")


def _imported(horovod: Any) -> None:
    wrap_broadcasts(horovod.functions, _refuse_broadcast, _tell_of_rows_of_the_root_alone)
    wrap_method(horovod, "_global_variables", _dense_global_variables)
    wrap_method(horovod.elastic.TensorFlowKerasState, "__init__", _refuse_state)
    wrap_method(horovod._DistributedAdasumOptimizer, "apply_gradients", _refuse_adasum)


def wrap_broadcasts(
    functions: Any, check: Callable[[Iterable[Any]], None], beside: Callable[[Any, int, Any], Any] = lambda *_: None
) -> None:
    """Has Horovod's broadcasts of variables give them to `check` first.

    Args:
      functions: the module ``horovod.tensorflow.functions``.
      check: raises where they must not be broadcast.
      beside: is called before each broadcast, with `functions`, the root's rank and the set of processes; gives an op
        to run beside it, or None.
    """

    def checking(make: Callable[..., Any]) -> Any:
        broadcast = make()

        def checked(variables: Any, root_rank: int, process_set: Any) -> Any:
            # In place they come in lists, one for each device.
            variables = [list(one) if isinstance(one, list) else one for one in variables]
            check(one for some in variables for one in (some if isinstance(some, list) else [some]))
            # Without variables nothing is sent: the states of elastic runs call it on a rank that has come, alone.
            told = beside(functions, root_rank, process_set) if variables else None
            done = broadcast(variables, root_rank, process_set)
            return done if told is None else tf.group(done, told)

        return checked

    wrap_method(functions, "_make_broadcast_group_fn", checking)
    wrap_method(functions, "_make_inplace_broadcast_group_fn", checking)


def _tell_of_rows_of_the_root_alone(functions: Any, root_rank: int, process_set: Any) -> Any:
    """Says in the log which tables have rows on the root, and none here: those of a checkpoint that it alone restored.

    In a graph it gives the op that says so.
    """
    if ranks.horovod_size() < 2 or ranks.is_elastic():
        return None
    if tf.executing_eagerly():
        here = {name: sum(int(_size(part)) for part in parts) for name, parts in _tables(None).items()}
        there = functions.broadcast_object(here, root_rank, name="tfplugin.tables", process_set=process_set)
        _tell(here, there, root_rank)
        return None
    graph = tf.compat.v1.get_default_graph()
    tables = {} if graph.building_function else _tables(graph)
    if not tables:
        return None
    sizes = tf.stack([tf.add_n([_size(part) for part in parts]) for parts in tables.values()])
    of_root = functions.broadcast(sizes, root_rank, name="tfplugin.tables", process_set=process_set)

    def tell(here: np.ndarray, there: np.ndarray) -> np.ndarray:
        _tell(dict(zip(tables, here, strict=True)), dict(zip(tables, there, strict=True)), root_rank)
        return np.int64(0)  # type: ignore[return-value]

    return tf.numpy_function(tell, [sizes, of_root], tf.int64).op


def _tables(graph: Any) -> dict[str, list[KvVariable]]:
    """The parts of tables that each rank has for itself, of a graph or of eager mode, by the names of the tables."""
    tables: dict[str, list[KvVariable]] = {}
    for part in list(KvVariable.living):
        if part.ranks == 1 and (part._eager if graph is None else not part._eager and part.graph is graph):
            tables.setdefault(table_name(part, part), []).append(part)
    return dict(sorted(tables.items()))  # the same order on all ranks


def _size(part: KvVariable) -> Any:
    if part._eager:
        return raw.kv_table_size(part.handle)
    with tf.device(part.handle.device), tf.compat.v1.colocate_with(None, ignore_existing=True):
        there = raw.kv_table_is_initialized(part.handle)
        return tf.cond(there, lambda: raw.kv_table_size(part.handle), lambda: tf.constant(0, tf.int64))


def _tell(here: Mapping[str, Any], there: Mapping[str, Any], root_rank: int) -> None:
    for name, rows in there.items():
        if rows and not here.get(name, rows):
            _log.warning(
                "Key-value variable '%s' has %d rows on rank %d, which broadcasts dense variables, and none on this "
                "rank: Horovod's broadcasts leave tables out. Restore its checkpoint, or write its rows, on each rank.",
                *(name, rows, root_rank),
            )


def _refuse_broadcast(variables: Iterable[Any]) -> None:
    for variable in variables:
        if hasattr(variable, "_kv_parts"):
            raise ValueError(
                f"Horovod broadcasts dense variables, and key-value variable '{table_name(variable, variable)}' is "
                "none. Leave it out, as model.variables and hvd.broadcast_global_variables do: new keys begin alike on "
                "all ranks. What is restored, or written, is restored or written on every rank."
            )


def _dense_global_variables(original: Callable[[], list[Any]]) -> list[Any]:
    """What ``hvd.broadcast_global_variables`` and its hook broadcast."""
    return [one for one in original() if not isinstance(one, KvVariable) or one.ranks > 1]


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
