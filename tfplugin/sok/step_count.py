"""A count of steps that belongs to a wrapper, and not to the optimizer inside it.

An optimizer of one part of a model through `sok.OptimizerWrapper`, and of the rest directly, takes two calls for a
batch. Each of the two counts its own: Adam's bias correction and schedules go by that.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.trackable import base as trackable
from tensorflow.python.training import optimizer as v1_optimizer

#: What checkpoints call the count, below the optimizer.
NAME = "sok_steps"


class StepCount:
    """The count of steps that an optimizer takes through wrappers. Get it by `step_count_of`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._steps: Any = None  # of a Keras optimizer
        self._non_slots = _NonSlotVariables()  # of one of tf.compat.v1.train: a count, or powers of betas

    @contextlib.contextmanager
    def counting(self, optimizer: Any) -> Iterator[None]:
        """While `optimizer` takes a step: it counts here."""
        ours = self._of_v1(optimizer) if isinstance(optimizer, v1_optimizer.Optimizer) else self._of_keras(optimizer)
        with self._lock:
            before = {name: vars(optimizer).get(name, _ABSENT) for name in ours}
            for name, value in ours.items():
                object.__setattr__(optimizer, name, value)
            try:
                yield
            finally:
                for name, value in before.items():
                    if value is _ABSENT:
                        object.__delattr__(optimizer, name)
                    else:
                        object.__setattr__(optimizer, name, value)

    def _of_v1(self, optimizer: Any) -> dict[str, Any]:
        if not self._non_slots.has_owner:
            self._non_slots.has_owner = True
            optimizer._track_trackable(self._non_slots, NAME, overwrite=True)
        return {
            "_non_slot_dict": self._non_slots.variables,
            # By these it restores what it makes; there is a count of its own by the same name.
            "_handle_deferred_dependencies": self._non_slots._handle_deferred_dependencies,
            "_preload_simple_restoration": self._non_slots._preload_simple_restoration,
        }

    def _of_keras(self, optimizer: Any) -> dict[str, Any]:
        if self._steps is None:
            # Not before the first step: what is made in eager mode cannot be used in a graph.
            with tf_ops.init_scope():
                made = optimizer.iterations
                if hasattr(made, "_value") and not isinstance(made, tf.Variable):  # of Keras 3
                    self._steps = type(made)(0, dtype=made.dtype, trainable=False, name=NAME)
                else:
                    self._steps = tf.Variable(0, dtype=made.dtype, trainable=False, name=NAME)
                optimizer._track_trackable(self._steps, NAME, overwrite=True)
        return {"_iterations": self._steps}


_ABSENT = object()


def step_count_of(optimizer: Any) -> StepCount:
    """The count of the steps that this optimizer takes through wrappers: one, however many wrappers there are."""
    count = vars(optimizer).get("_sok_step_count")
    if count is None:
        count = StepCount()
        object.__setattr__(optimizer, "_sok_step_count", count)
    found: StepCount = count
    return found


class _NonSlotVariables(trackable.Trackable):
    """What an optimizer of ``tf.compat.v1.train`` keeps that is of no variable, as a node of checkpoints."""

    def __init__(self) -> None:
        self.variables: dict[tuple[str, Any], Any] = {}
        self.has_owner = False

    def _here(self) -> dict[str, Any]:
        graph = None if tf.executing_eagerly() else tf_ops.get_default_graph()
        return {name: variable for (name, of_graph), variable in self.variables.items() if of_graph is graph}

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        return {**self._here(), **super()._trackable_children(save_type, **kwargs)}

    def _lookup_dependency(self, name: str, cached_dependencies: Any = None) -> Any:
        found = super()._lookup_dependency(name, cached_dependencies)
        return self._here().get(name) if found is None else found
