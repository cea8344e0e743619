"""`tf.compat.v1.train.Optimizer.apply_gradients` on key-value variables."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.training import optimizer as optimizer_lib

from tfplugin.kv_variable import KvVariable
from tfplugin.optimizers import explanation, fused, generic_update, parameter_servers
from tfplugin.optimizers.patch_lock import patch_lock
from tfplugin.partitioned_kv_variable import PartitionedKvVariable
from tfplugin.placement import refuse_copies

# Their dense updates do not cast the learning rate to the dtype of the variable; the sparse ones do.
_FLOAT32_WHEN_DENSE = (tf.compat.v1.train.ProximalAdagradOptimizer, tf.compat.v1.train.ProximalGradientDescentOptimizer)


class _Template:
    """A key-value variable as one row, for an optimizer to say which slots it wants."""

    _should_act_as_resource_variable = True
    _in_graph_mode = False
    stands_for_table = True

    def __init__(self, variable: KvVariable, update: generic_update.RowUpdate | None) -> None:
        self.update = update
        self.name = variable.name
        self.dtype = variable.dtype
        self.handle = variable.handle
        self.device = variable.device
        self.shape = tf.TensorShape([1, variable.dim])
        self._unique_id = variable._unique_id
        self._shared_name = variable._shared_name
        self._distribute_strategy = tf.distribute.get_strategy()  # wanted under tf.distribute.OneDeviceStrategy
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
        return var.update.add_slot(slot_name, constant) if var.update else var

    def zeros_slot(var: Any, slot_name: str, op_name: str) -> Any:
        return note(var, slot_name, 0.0)

    def get_or_make_slot(var: Any, val: Any, slot_name: str, op_name: str) -> Any:
        return note(var, slot_name, generic_update.constant_of(val, f"Slot '{slot_name}' of {optimizer.get_name()}"))

    def get_or_make_slot_with_initializer(
        var: Any, initializer: Any, shape: Any, dtype: Any, slot_name: str, op_name: str
    ) -> Any:
        def value() -> tf.Tensor:
            return initializer(shape=tf.TensorShape(shape).as_list(), dtype=dtype)

        return note(var, slot_name, generic_update.constant_of(value, f"Slot '{slot_name}' of {optimizer.get_name()}"))

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
    if isinstance(global_step, (list, tuple, KvVariable, PartitionedKvVariable)):
        raise TypeError(
            f"{type(optimizer).__name__} is one of tf.compat.v1.train, or has their arguments: the second one of "
            "minimize and apply_gradients is global_step. Pass the variables to train by name: minimize(loss, "
            "var_list=[table])."
        )
    pairs = list(grads_and_vars)
    for _, v in pairs:
        if hasattr(v, "refuse_plain_optimizer"):
            v.refuse_plain_optimizer()
    if not generic_update.any_key_value(pairs):
        return original(optimizer, pairs, global_step, name, **kwargs)
    pairs = parameter_servers.without_tables(pairs)
    for _, v in pairs:
        if isinstance(v, KvVariable):
            refuse_copies(v.name, what="updated")
    with patch_lock(optimizer):
        return _apply(original, optimizer, pairs, global_step, name, **kwargs)


def _apply(
    original: Callable[..., Any],
    optimizer: Any,
    pairs: list[tuple[Any, Any]],
    global_step: Any,
    name: Any,
    **kwargs: Any,
) -> Any:
    explanation.note(optimizer, pairs)
    plans = {v: fused.plan(optimizer, v) for g, v in pairs if g is not None and isinstance(v, KvVariable)}
    if not plans:  # The loss has not met a table.
        return original(optimizer, pairs, global_step, name, **kwargs)
    for v, plan in plans.items():
        coupling = generic_update.couples_rows(optimizer)
        if coupling and isinstance(plan, str):
            raise ValueError(
                f"{coupling} couples the rows of a matrix: it cannot update key-value variable '{v.name}'."
            )
    fused.check_options(optimizer, plans)
    replaced: list[tuple[Any, Any]] = []
    updates: list[generic_update.RowUpdate] = []
    templates: list[_Template] = []
    for g, v in pairs:
        if not isinstance(v, KvVariable):
            replaced.append((g, v))
            continue
        if g is None:
            continue
        keys, rows = generic_update.row_gradient(v, g)
        if v._in_backward is not None or not isinstance(plans[v], str):
            templates.append(_Template(v, None))
            replaced.append((tf.IndexedSlices(rows, keys), v))
            continue
        update = generic_update.RowUpdate(v, v.slot_prefix(optimizer, optimizer.get_name()))
        update.keys = keys
        update.stand_for_table()
        updates.append(update)
        templates.append(_Template(v, update))
        if isinstance(optimizer, _FLOAT32_WHEN_DENSE) and v.dtype != tf.float32:
            rows = tf.IndexedSlices(rows, keys)
        replaced.append((rows, update.value))
    if updates or not _prepared(optimizer):
        _wanted_slots(optimizer, templates)

    ours = _methods(optimizer, plans, updates)
    before = {name: vars(optimizer)[name] for name in ours if name in vars(optimizer)}
    for name_, method in ours.items():
        object.__setattr__(optimizer, name_, method)
    try:
        return original(optimizer, replaced, global_step, name, **kwargs)
    finally:
        for name_ in ours:
            object.__delattr__(optimizer, name_)
        for name_, method in before.items():
            object.__setattr__(optimizer, name_, method)
        for update in updates:
            update.unbind()


@contextlib.contextmanager
def _slots_in_place(optimizer: Any, update: generic_update.RowUpdate) -> Iterator[None]:
    """While the optimizer finds the slots of the rows that are bound where it looks for those of a variable."""
    key = optimizer_lib._var_key(update.value)  # in a graph, the op behind it: the rows'
    names = [spec.name.removeprefix(f"{update.prefix}.") for spec in update.specs]
    for name, slot in zip(names, update.slots, strict=True):
        optimizer._slot_dict(name)[key] = slot
    try:
        yield
    finally:
        for name in names:
            optimizer._slot_dict(name).pop(key, None)


def _methods(
    optimizer: Any, plans: dict[KvVariable, Any], updates: list[generic_update.RowUpdate]
) -> dict[str, Callable[..., Any]]:
    """What takes the place of an optimizer's methods during a step: tables and their rows are updated our way."""
    create_slots, apply_dense = optimizer._create_slots, optimizer._resource_apply_dense
    apply_sparse = optimizer._resource_apply_sparse_duplicate_indices
    of_value = {id(update.value): update for update in updates}
    step = fused.FusedStep(optimizer)

    def create_other_slots(variables: list[Any]) -> None:
        others = [v for v in variables if not isinstance(v, (generic_update.StepVariable, KvVariable))]
        if others:
            create_slots(others)

    def run_stock(update: generic_update.RowUpdate, gradient: tf.Tensor, stock: Callable[[tf.Tensor], Any]) -> Any:
        def move(summed: tf.Tensor) -> Any:
            with _slots_in_place(optimizer, update):
                return stock(summed)

        return update.run_stock(optimizer, gradient, move)

    def apply_to_all_rows(gradient: tf.Tensor, variable: Any) -> Any:
        update = of_value.get(id(variable))
        if update is None:
            return apply_dense(gradient, variable)
        return run_stock(update, gradient, lambda g: apply_dense(g, variable))

    def apply_to_rows(rows: tf.Tensor, variable: Any, keys: tf.Tensor) -> Any:
        update = of_value.get(id(variable))
        if update is not None:
            return run_stock(update, rows, lambda g: apply_sparse(g, variable, tf.range(tf.shape(g)[0])))
        if not isinstance(variable, KvVariable):
            return apply_sparse(rows, variable, keys)
        if variable._in_backward is not None:  # has been updated; the empty gradient carries that
            return tf.group(rows)
        prefix = variable.slot_prefix(optimizer, optimizer.get_name())
        return step.apply(plans[variable], variable, prefix, keys, rows)

    return {
        "_create_slots": create_other_slots,
        "_resource_apply_dense": apply_to_all_rows,
        "_resource_apply_sparse_duplicate_indices": apply_to_rows,
    }


#: Optimizers that have made what they keep beside slots (beta powers), and in which graphs; None is eager mode.
_made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _prepared(optimizer: Any) -> bool:
    """Whether `_wanted_slots` has run here before; from here on it counts as having."""
    with tf_ops.init_scope():
        place = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()._graph_key
    places = _made.setdefault(optimizer, set())
    done = place in places
    places.add(place)
    return done
