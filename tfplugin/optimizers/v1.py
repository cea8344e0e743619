"""`tf.compat.v1.train.Optimizer.apply_gradients` on key-value variables."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.training import optimizer as optimizer_lib

from tfplugin.kv_variable import KvVariable
from tfplugin.optimizers import step_rows

# Their dense updates do not cast the learning rate to the dtype of the variable; the sparse ones do.
_FLOAT32_WHEN_DENSE = (tf.compat.v1.train.ProximalAdagradOptimizer, tf.compat.v1.train.ProximalGradientDescentOptimizer)


class _Template:
    """A key-value variable as one row, for an optimizer to say which slots it wants."""

    _should_act_as_resource_variable = True
    _in_graph_mode = False

    def __init__(self, update: step_rows.RowUpdate) -> None:
        variable = update.variable
        self.update = update
        self.name = variable.name
        self.dtype = variable.dtype
        self.handle = variable.handle
        self.device = variable.device
        self.shape = tf.TensorShape([1, variable.dim])
        self._unique_id = variable._unique_id
        self._shared_name = variable._shared_name
        if not variable._eager:
            self.op = variable.op
            self.graph = variable.graph

    def get_shape(self) -> tf.TensorShape:
        return self.shape


def _wanted_slots(optimizer: Any, templates: list[_Template]) -> None:
    """Runs the optimizer's `_create_slots` on templates, noting slots instead of making variables.

    The copy shares the optimizer's dictionary of other variables (beta powers), so those are made for good.
    """
    recorder = copy.copy(optimizer)
    recorder._slots = {}

    def note(var: Any, slot_name: str, constant: float) -> Any:
        recorder._slot_dict(slot_name)
        return var.update.add_slot(slot_name, constant)

    def zeros_slot(var: Any, slot_name: str, op_name: str) -> Any:
        return note(var, slot_name, 0.0)

    def get_or_make_slot(var: Any, val: Any, slot_name: str, op_name: str) -> Any:
        return note(var, slot_name, step_rows.constant_of(val, f"Slot '{slot_name}' of {optimizer.get_name()}"))

    def get_or_make_slot_with_initializer(
        var: Any, initializer: Any, shape: Any, dtype: Any, slot_name: str, op_name: str
    ) -> Any:
        def value() -> tf.Tensor:
            return initializer(shape=tf.TensorShape(shape).as_list(), dtype=dtype)

        return note(var, slot_name, step_rows.constant_of(value, f"Slot '{slot_name}' of {optimizer.get_name()}"))

    recorder._zeros_slot = zeros_slot
    recorder._get_or_make_slot = get_or_make_slot
    recorder._get_or_make_slot_with_initializer = get_or_make_slot_with_initializer
    with tf_ops.init_scope():
        recorder._create_slots(templates)
    for slot_name in recorder._slots:
        optimizer._slot_dict(slot_name)
    # Its functions refer to it and to the optimizer, which has to go when its last user lets it go: see `attach_slots`.
    recorder.__dict__.clear()


def apply_gradients(
    original: Callable[..., Any],
    optimizer: Any,
    grads_and_vars: Any,
    global_step: Any = None,
    name: str | None = None,
    **kwargs: Any,
) -> Any:
    """Applies gradients to a list in which some variables are key-value variables.

    Those are replaced by the rows of this step; the optimizer's own `apply_gradients` does the rest in one go, so that
    what it keeps per step (beta powers, the global step) moves once.
    """
    pairs = list(grads_and_vars)
    if not step_rows.any_key_value(pairs):
        return original(optimizer, pairs, global_step, name, **kwargs)
    if distribute_lib.has_strategy():
        raise NotImplementedError(
            "Key-value variables under tf.distribute strategies: use Horovod or parameter servers instead."
        )
    updates = [
        step_rows.RowUpdate(v, v.slot_prefix(optimizer, optimizer.get_name()))
        for g, v in pairs
        if g is not None and isinstance(v, KvVariable)
    ]
    if updates:
        _wanted_slots(optimizer, [_Template(update) for update in updates])

    replaced, remaining = [], iter(updates)
    placed: list[tuple[str, Any]] = []
    for g, v in pairs:
        if not isinstance(v, KvVariable):
            replaced.append((g, v))
        elif g is not None:
            update = next(remaining)
            with tf.name_scope("kv_rows"), tf_ops.device(v._op_device()):
                gradient = update.read(optimizer, g)
                if isinstance(optimizer, _FLOAT32_WHEN_DENSE) and v.dtype != tf.float32:
                    gradient = tf.IndexedSlices(gradient, tf.range(tf.size(update.keys)))
                replaced.append((gradient, update.value))
            for spec, slot in zip(update.specs, update.slots, strict=True):
                slot_name = spec.name.removeprefix(f"{update.prefix}.")
                key = optimizer_lib._var_key(update.value)
                optimizer._slot_dict(slot_name)[key] = slot
                placed.append((slot_name, key))

    create_slots, finish = optimizer._create_slots, optimizer._finish

    def create_other_slots(variables: list[Any]) -> None:
        others = [v for v in variables if not isinstance(v, step_rows.StepVariable)]
        if others:
            create_slots(others)

    def finish_with_rows(update_ops: Any, name_scope: str) -> Any:
        with tf.control_dependencies([op for op in update_ops if op is not None] if not tf.executing_eagerly() else []):
            written = []
            for update in updates:
                with tf_ops.device(update.variable._op_device()):
                    written.append(update.write())
        return finish([*update_ops, *(op for op in written if op is not None)], name_scope)

    optimizer._create_slots, optimizer._finish = create_other_slots, finish_with_rows
    try:
        return original(optimizer, replaced, global_step, name, **kwargs)
    finally:
        del optimizer._create_slots, optimizer._finish
        for slot_name, key in placed:
            optimizer._slot_dict(slot_name).pop(key, None)
        for update in updates:
            update.unbind()
