"""What a step of training looks up and what it updates: how a table that nobody updates is found.

A table is read by lookups, of which TensorFlow tells gradient tapes and functions as it does of any trainable variable.
It is updated by optimizers of ours only. One that is read to be trained, and that none of these has in its list, stays
as it is.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tensorflow.python.eager import context
from tensorflow.python.eager import record as eager_record
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import control_flow_util, resource_variable_ops

_now = threading.local()


class StepRecord:
    """The tables of a step, or of the trace of one. Tables are told apart by their parts, which are what is updated.

    Attributes:
      looked_up: the parts of all tables that were looked up, by id, and the object that each was looked up through.
      loss_scaler: the optimizer that has scaled a loss of the step, if one has.
      penalized: the parts of tables of which a regularizer has been told what the step looks up, by id.
    """

    def __init__(self) -> None:
        self.looked_up: dict[int, tuple[Any, Any]] = {}
        self._to_train: set[int] = set()
        self._updates: collections.Counter[int] = collections.Counter()
        self._scaled: dict[int, tuple[Any, Any]] = {}
        self.loss_scaler: Any = None
        self.penalized: set[int] = set()

    def note_lookup(self, table: Any, train: bool) -> None:
        """Notes a lookup that inserts keys (`train`), or does not."""
        for part in table._kv_parts:
            self.looked_up.setdefault(id(part), (part, table))
            if train and table.trainable:
                self._to_train.add(id(part))

    def note_update(self, table: Any) -> None:
        """Notes that an optimizer has the table in its list."""
        self._updates.update(id(part) for part in table._kv_parts)

    def note_backward_update(self, part: Any) -> bool:
        """Notes that a backward pass reaches a table that it updates; returns whether it may, as no loss is scaled."""
        self.note_update(part)
        if self.loss_scaler is not None:
            self._scaled[id(part)] = (part, part)
        return self.loss_scaler is None

    def note_accesses(self, variables: Any) -> None:
        """Notes what TensorFlow says has been read: also by functions that were traced before, in which we saw none."""
        for table in variables:
            for part in getattr(table, "_kv_parts", ()):
                if id(part) not in self.looked_up:
                    self.note_lookup(table, train=True)

    def updates(self) -> collections.Counter[int]:
        """How often each part was in the list of an optimizer, by id."""
        return self._updates.copy()

    def left_out(self) -> list[tuple[Any, Any]]:
        """Parts looked up to be trained that are in no optimizer's list, each with what it was looked up through."""
        return [self.looked_up[key] for key in self.looked_up if key in self._to_train and not self._updates[key]]

    def scaled(self) -> list[tuple[Any, Any]]:
        """Parts whose updates in the backward pass got the gradients of a scaled loss, as `left_out` gives them."""
        if self.loss_scaler is None:
            return []
        # One whose gradient was traced before, in a function that the step calls, has noted nothing.
        before = [(part, table) for part, table in self.left_out() if getattr(part, "_in_backward", None) is not None]
        return [*self._scaled.values(), *before]


@contextlib.contextmanager
def recording() -> Iterator[StepRecord]:
    """Records lookups and updates on the calling thread, those of an outer recording left out."""
    before = getattr(_now, "step", None)
    _now.step = step = StepRecord()
    try:
        with eager_record.VariableWatcher() as watcher:
            yield step
    finally:
        _now.step = before
    step.note_accesses(watcher.watched_variables())


def current() -> StepRecord | None:
    """The record of the calling thread, if there is one."""
    step: StepRecord | None = getattr(_now, "step", None)
    return step


def note_lookup(table: Any, train: bool) -> None:
    """Tells tapes, functions and the record that there is one of a lookup of `table`.

    Raises:
      ValueError: in a function that XLA is to compile.
    """
    if not context.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf_ops.get_default_graph()):
        raise ValueError(
            f"Key-value variable '{table.name}' is looked up in a function with jit_compile=True, and XLA cannot "
            "compile lookups of tables. Look it up outside, and give the rows to that function. In a model of Keras "
            "have a layer hold it before the model is compiled: jit_compile=True then compiles what is dense."
        )
    if table.trainable:
        resource_variable_ops.variable_accessed(table)
    step = current()
    if step is not None:
        step.note_lookup(table, train)


def note_update(table: Any) -> None:
    """Tells the record, if there is one, that `table` gets an update or could get one."""
    step = current()
    if step is not None and hasattr(table, "_kv_parts"):
        step.note_update(table)


def note_backward_update(part: Any) -> bool:
    """Tells the record, if there is one, that a backward pass is to update `part`; returns whether it may."""
    step = current()
    return step is None or step.note_backward_update(part)


def note_scaled_loss(optimizer: Any) -> None:
    """Tells the record, if there is one, that the loss of the step is scaled."""
    step = current()
    if step is not None:
        step.loss_scaler = optimizer


def note_penalty(table: Any) -> None:
    """Tells the record, if there is one, that a regularizer looks at rows of `table`."""
    step = current()
    if step is not None:
        step.penalized.update(id(part) for part in table._kv_parts)
