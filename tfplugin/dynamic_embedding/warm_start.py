"""`warm_start`: rows from another model's checkpoint, before training begins."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfplugin.dynamic_embedding import checkpoint
from tfplugin.dynamic_embedding.get_variable import variables_by_name
from tfplugin.dynamic_embedding.variable import Variable


class GraphKeys:
    """Names of collections that `warm_start` looks into, beside the variables of `get_variable`."""

    DYNAMIC_EMBEDDING_VARIABLES = "dynamic_embedding_variables"
    TRAINABLE_DYNAMIC_EMBEDDING_VARIABLES = "trainable_dynamic_embedding_variables"


def _known() -> list[Variable]:
    """The variables that `get_variable` made here, and those that the collection has."""
    known = dict(variables_by_name())
    known |= {v.name: v for v in tf.compat.v1.get_collection(GraphKeys.DYNAMIC_EMBEDDING_VARIABLES)}
    return list(known.values())


def _chosen(wanted: Any) -> list[Variable]:
    if wanted is None or isinstance(wanted, str):
        return [v for v in _known() if wanted is None or re.match(wanted, v.name)]
    if isinstance(wanted, Sequence) and all(isinstance(v, Variable) for v in wanted):
        return list(wanted)
    if isinstance(wanted, Sequence) and all(isinstance(v, str) for v in wanted):
        return [v for v in _known() if any(re.match(pattern, v.name) for pattern in wanted)]
    raise ValueError(
        "warm_start: vars_to_warm_start must be a regular expression, a list of them or a list of dynamic embedding "
        f"variables, got {wanted!r}."
    )


def warm_start(
    ckpt_to_initialize_from: Any,
    vars_to_warm_start: Any = ".*",
    var_name_to_prev_var_name: Mapping[str, str] | None = None,
) -> Any:
    """Replaces the rows of variables by those in a checkpoint of another model, this project's or TFRA's.

    Slots of optimizers start fresh.

    Args:
      ckpt_to_initialize_from: a checkpoint of `tf.compat.v1.train.Saver`, or a folder, whose latest one is taken.
      vars_to_warm_start: which variables: a regular expression, which names have to begin with, a list of such, or a
        list of `Variable`. Names are those of `get_variable`. Default: all.
      var_name_to_prev_var_name: what variables are called in the checkpoint, by their names here.

    Returns:
      The op (graph mode).

    Raises:
      ValueError: there is no checkpoint, or `vars_to_warm_start` is something else.
      TypeError: a variable with strings, or in Redis.

    Example:
      >>> de.warm_start("old_model", "user.*", {"user/embedding": "embedding"})
    """
    path = str(ckpt_to_initialize_from)
    if Path(path).is_dir():
        found = tf.train.latest_checkpoint(path)
        if found is None:
            raise ValueError(f"warm_start: the folder '{path}' has no checkpoint.")
        path = found
    previous = var_name_to_prev_var_name or {}
    done = [_start(v, previous.get(v.name) or v.name, path) for v in _chosen(vars_to_warm_start)]
    return None if tf.executing_eagerly() else tf.group(*done)


def _start(variable: Variable, name: str, path: str) -> Any:
    if variable.names is not None or not variable.parts:
        raise TypeError(f"warm_start: {variable!r} has strings, and starts from numbers only: restore it by a Saver.")
    if variable.rows_elsewhere:
        raise TypeError(f"warm_start: the rows of {variable!r} are not in this process: upsert them.")
    filename = tf.constant(path)
    restored = [checkpoint.TableSaveable(variable, i, name).restore_op(filename) for i in range(len(variable.parts))]
    graph = not tf.executing_eagerly()
    started = []
    # Slots came along. Rows that are written anew have none.
    with tf.control_dependencies(restored if graph else []):
        for part in variable.parts:
            keys, rows = part.export()
            with tf.control_dependencies([keys, rows] if graph else []):
                cleared = part.clear()
            with tf.control_dependencies([cleared] if graph else []):
                started.append(part.upsert(keys, rows))
    return tf.group(*started) if graph else None


class WarmStartHook(tf.compat.v1.train.SessionRunHook):
    """Has `warm_start` run when a session is made, as of `tf.compat.v1.train.MonitoredSession`.

    Args:
      ckpt_to_initialize_from, vars_to_warm_start, var_name_to_prev_var_name: as of `warm_start`.

    Example:
      >>> with tf.compat.v1.train.MonitoredSession(hooks=[de.WarmStartHook("old_model", ".*")]) as session:
      ...     session.run(step)
    """

    def __init__(
        self,
        ckpt_to_initialize_from: Any,
        vars_to_warm_start: Any = ".*",
        var_name_to_prev_var_name: Mapping[str, str] | None = None,
    ) -> None:
        self._arguments = (ckpt_to_initialize_from, vars_to_warm_start, var_name_to_prev_var_name)

    def begin(self) -> None:
        """Makes the op."""
        self._op = warm_start(*self._arguments)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it."""
        session.run(self._op)
