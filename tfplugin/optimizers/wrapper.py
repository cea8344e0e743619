"""`OptimizerWrapper`: Keras 3 and tf_keras optimizers on key-value variables."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.trackable import autotrackable
from tensorflow.python.training import optimizer as v1_optimizer

from tfplugin.kv_variable import KvVariable, PartitionedKvVariable
from tfplugin.optimizers import step_rows

# These take norms or factors over all rows of a matrix; the rows of a step are not that matrix.
_COUPLES_ROWS = {"Adafactor", "Lamb", "Muon"}


class OptimizerWrapper(autotrackable.AutoTrackable):
    """Lets an optimizer update key-value variables and dense variables in one `apply_gradients`.

    The optimizer's own update runs on the rows that the step touched, with their slots; the others stay as they are.
    ``tf.compat.v1.train`` optimizers need no wrapper and work with one. Attributes that are not here are the
    optimizer's own (``learning_rate``, ``iterations``).

    Args:
      optimizer: of ``tf.keras.optimizers``, ``tf_keras.optimizers``, ``tf_keras.optimizers.legacy`` or
        ``tf.compat.v1.train``.

    Raises:
      TypeError: not an optimizer.
      ValueError: an optimizer that couples the rows of a matrix (Adafactor, Lamb, Muon), or one with moving averages
        or gradient accumulation over all rows.

    Example:
      >>> opt = tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(1e-3))
      >>> with tf.GradientTape() as tape:
      ...     loss = tf.reduce_sum(tf.nn.embedding_lookup(v, ids))
      >>> opt.apply_gradients(zip(tape.gradient(loss, [v]), [v]))
    """

    def __init__(self, optimizer: Any) -> None:
        if isinstance(optimizer, OptimizerWrapper):
            optimizer = optimizer.optimizer
        if not hasattr(optimizer, "apply_gradients"):
            raise TypeError(f"OptimizerWrapper wants an optimizer, got {type(optimizer).__name__}.")
        self.optimizer = optimizer
        self._lock = threading.RLock()
        self._updates: weakref.WeakKeyDictionary[KvVariable, step_rows.RowUpdate] = weakref.WeakKeyDictionary()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "learning_rate":
            self.optimizer.learning_rate = value
        else:
            super().__setattr__(name, value)

    # ---- Public ----------------------------------------------------------------------------------------------------

    def minimize(
        self, loss: Any, var_list: Sequence[Any] | None = None, tape: tf.GradientTape | None = None, **kwargs: Any
    ) -> Any:
        """One step: gradients of `loss` (a function, or a Tensor with its `tape`), then `apply_gradients`.

        `var_list` defaults to the trainable variables that the loss touched.
        """
        if isinstance(self.optimizer, v1_optimizer.Optimizer) and not callable(loss):
            return self.optimizer.minimize(loss, var_list=_flat(var_list), **kwargs)
        if callable(loss):
            with tf.GradientTape() as tape:
                value = loss()
        elif tape is not None:
            value = loss
        elif not tf.executing_eagerly() and not tf_ops.inside_function():
            variables = _flat(var_list) or tf.compat.v1.trainable_variables()
            return self.apply_gradients(zip(tf.gradients(loss, variables), variables, strict=True), **kwargs)
        else:
            raise ValueError("minimize: pass a function that computes the loss, or a Tensor and its tape=.")
        variables = _flat(var_list() if callable(var_list) else var_list)
        if variables is None:
            variables = list(tape.watched_variables())
        return self.apply_gradients(zip(tape.gradient(value, variables), variables, strict=True), **kwargs)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies gradients to a list of variables, key-value ones and others."""
        pairs = list(grads_and_vars)
        if isinstance(self.optimizer, v1_optimizer.Optimizer) or not step_rows.any_key_value(pairs):
            return self.optimizer.apply_gradients(pairs, *args, **kwargs)
        self._check_supported()
        with self._lock:
            self._build(pairs)
            updates, replaced = [], []
            for g, v in pairs:
                if not isinstance(v, KvVariable):
                    replaced.append((g, v))
                elif g is not None:
                    updates.append(self._updates[v])
                    replaced.append((updates[-1].read(self.optimizer, g), updates[-1].value))
            try:
                applied = self.optimizer.apply_gradients(replaced, *args, **kwargs)
                graph_op = isinstance(applied, (tf.Operation, tf.Tensor)) and not tf.executing_eagerly()
                with tf.control_dependencies([applied] if graph_op else []):
                    written = [update.write() for update in updates]
            finally:
                for update in updates:
                    update.unbind()
        if graph_op and not tf_ops.inside_function():
            return tf.group(applied, *[op for op in written if op is not None])
        return applied

    # ---- Slots -----------------------------------------------------------------------------------------------------

    def _check_supported(self) -> None:
        optimizer = self.optimizer
        couples = [cls.__name__ for cls in type(optimizer).__mro__ if cls.__name__ in _COUPLES_ROWS]
        if couples:
            raise ValueError(
                f"{couples[0]} couples the rows of a matrix, so it cannot update the rows of a key-value variable that "
                "a step touched. Use an optimizer that treats elements alone, such as Adam."
            )
        for attribute, what in (
            ("use_ema", "a moving average of all rows (use_ema)"),
            ("gradient_accumulation_steps", "gradient accumulation over all rows"),
            ("inner_optimizer", "loss scaling around another optimizer; scale the loss yourself"),
        ):
            if getattr(optimizer, attribute, None):
                raise ValueError(f"{type(optimizer).__name__}: key-value variables do not support {what}.")

    def _build(self, pairs: list[tuple[Any, Any]]) -> None:
        """Has the optimizer make its slots; those of key-value variables are noted instead."""
        optimizer = self.optimizer
        variables = []
        for _, v in pairs:
            if isinstance(v, KvVariable):
                if v not in self._updates:
                    # Not its name: Keras numbers the optimizers of a process, and a restart must find the same slots.
                    prefix = v.slot_prefix(optimizer, type(optimizer).__name__)
                    self._updates[v] = step_rows.RowUpdate(v, prefix)
                v = self._updates[v].value
            variables.append(v)
        # Dense variables first: their places in the optimizer's lists, which name them in checkpoints, must not depend
        # on the number of parts.
        variables.sort(key=lambda v: isinstance(v, step_rows.StepVariable))
        with self._slots_noted(), tf_ops.init_scope():
            if hasattr(optimizer, "_create_all_weights"):  # tf_keras.optimizers.legacy
                optimizer._create_all_weights(variables)
            elif not getattr(optimizer, "built", False) and not getattr(optimizer, "_built", False):
                if hasattr(optimizer, "_check_variables_are_known"):  # Keras 3
                    with tf.name_scope(optimizer.name):
                        optimizer.build(variables)
                else:
                    optimizer.build(variables)

    @contextlib.contextmanager
    def _slots_noted(self) -> Iterator[None]:
        optimizer = self.optimizer
        by_value = {id(update.value): update for update in self._updates.values()}

        def constant(initializer: Any, slot: str) -> float:
            what = f"Slot '{slot}' of {type(optimizer).__name__}"
            if isinstance(initializer, str):
                if initializer not in ("zeros", "ones"):
                    raise ValueError(f"{what} starts from '{initializer}'; key-value slots start from a constant.")
                return float(initializer == "ones")
            if callable(initializer):
                return step_rows.constant_of(lambda: initializer([1, 1], tf.float32), what)
            return 0.0 if initializer is None else step_rows.constant_of(initializer, what)

        def wrap(method: str, read: Any) -> None:
            stock = getattr(optimizer, method)

            def noted(*args: Any, **kwargs: Any) -> Any:
                reference, slot, initializer = read(*args, **kwargs)
                update = by_value.get(id(reference))
                if update is None:
                    return stock(*args, **kwargs)
                made = update.add_slot(slot, constant(initializer, slot))
                if method == "add_slot":
                    optimizer._slots.setdefault(reference._unique_id, {})[slot] = made
                return made

            object.__setattr__(optimizer, method, noted)
            wrapped.append(method)

        wrapped: list[str] = []
        if hasattr(optimizer, "_create_all_weights"):
            wrap("add_slot", lambda var, slot_name, initializer="zeros", shape=None: (var, slot_name, initializer))
        elif hasattr(optimizer, "_check_variables_are_known"):
            wrap(
                "add_variable_from_reference",
                lambda reference_variable, name=None, initializer="zeros": (
                    reference_variable,
                    name or "var",
                    initializer,
                ),
            )
        else:
            wrap(
                "add_variable_from_reference",
                lambda model_variable, variable_name, shape=None, initial_value=None: (
                    model_variable,
                    variable_name,
                    initial_value,
                ),
            )
        # Some compute a slot's initial value from the shape of its variable: show them one row.
        for update in self._updates.values():
            update.value._shape = tf.TensorShape([1, update.variable.dim])
        try:
            yield
        finally:
            for update in self._updates.values():
                update.value._shape = tf.TensorShape([None, update.variable.dim])
            for method in wrapped:
                object.__delattr__(optimizer, method)


def _flat(variables: Sequence[Any] | None) -> list[Any] | None:
    """Partitioned variables as their parts."""
    if variables is None:
        return None
    return [part for v in variables for part in (v if isinstance(v, PartitionedKvVariable) else [v])]
