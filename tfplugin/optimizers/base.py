"""What the classes of `tfplugin.optimizers` share."""

from __future__ import annotations

import gc
import inspect
import math
import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.training import optimizer as v1_optimizer

from tfplugin.kv_variable import KvVariable
from tfplugin.ops import raw
from tfplugin.optimizers.argument_names import takes_other_names
from tfplugin.optimizers.fused import Options, compute_dtype
from tfplugin.optimizers.fused_rules import FusedRule
from tfplugin.optimizers.generic_update import stands_for_table
from tfplugin.optimizers.hyperparameters import Number, Step, given, number, pack
from tfplugin.optimizers.reference_variables import update_reference_variable
from tfplugin.partitioned_kv_variable import flat_variables

# What a hyperparameter may be, in words and as a test.
ANY = ("a finite number", lambda x: True)
POSITIVE = ("more than 0", lambda x: x > 0)
NON_NEGATIVE = ("0 or more", lambda x: x >= 0)
NON_POSITIVE = ("0 or less", lambda x: x <= 0)
FRACTION = ("at least 0 and less than 1", lambda x: 0 <= x < 1)
UNIT = ("0 to 1", lambda x: 0 <= x <= 1)


class FusedOptimizer(v1_optimizer.Optimizer):
    """An optimizer that the table engine runs: on key-value variables, and on dense variables by the same code.

    Works in graphs (``minimize(loss, global_step)``), eagerly and in functions (``apply_gradients``, ``minimize`` of a
    function). Rows without a gradient stay as they are. State is saved by ``tf.compat.v1.train.Saver`` and, eagerly,
    by ``tf.train.Checkpoint(optimizer=...)``.

    The arguments that all classes have:

    Args:
      learning_rate: a number, Tensor, tf.Variable or function without arguments; or a schedule: a function of the
        step, such as those of Keras. A schedule is given the ``global_step`` of `apply_gradients`, or else
        `iterations`.
      weight_decay: decoupled: w -= learning_rate * weight_decay * w comes before the update of a row.
      skip_nonfinite: leave a row alone whose gradient has a NaN or an infinity, and count it
        (``variable.skipped_updates()``). By default such a gradient is applied.
      stochastic_rounding: of float16 and bfloat16 variables.
      name: the prefix of slots, in tables and in checkpoints.

    ``beta1``, ``beta2``, ``use_nesterov`` and ``use_locking`` (without effect) are taken as well, as
    ``tf.compat.v1.train`` and TFPlus call them.

    Raises:
      ValueError: a number out of its range. Tensors are checked at each step, by the op.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = takes_other_names(cls.__init__)  # type: ignore[method-assign]

    def __init__(
        self,
        rule: str,
        slots: tuple[tuple[str, float], ...],
        learning_rate: Any,
        weight_decay: Any,
        skip_nonfinite: bool,
        stochastic_rounding: bool,
        name: str,
    ) -> None:
        super().__init__(use_locking=True, name=name)
        self._rule = rule
        self._rule_slots = slots
        #: What dense variables get instead: a rule, its slots, and the hyperparameters that it does not have.
        self._dense: tuple[str, tuple[tuple[str, float], ...], tuple[str, ...]] | None = None
        self._learning_rate = learning_rate
        self._hyperparameters: dict[str, Any] = {}
        self._set("weight_decay", weight_decay, NON_NEGATIVE)
        self._check_if_number("learning_rate", learning_rate, self._rates)
        #: Graphs, of functions among them, in which the learning rate is what it was when they were built.
        self._built_with_rate: list[weakref.ref[tf.Graph]] = []
        self.kv_options = Options(skip_nonfinite=skip_nonfinite, stochastic_rounding=stochastic_rounding)
        self._global_step: Any = None
        self._of_this_step: dict[Any, Mapping[str, Number]] = {}

    # ---- What a class says of itself ---------------------------------------------------------------------------------

    def rule(self) -> str:
        """The table engine's name for the update."""
        return self._rule

    def slots(self) -> tuple[tuple[str, float], ...]:
        """Names of slots, in the order of the rule, and what they start from."""
        return self._rule_slots

    def rule_of(self, variable: Any) -> str:
        """The table engine's name for the update of `variable`."""
        return self.rule() if self._dense is None or stands_for_table(variable) else self._dense[0]

    def _slots_of(self, variable: Any) -> tuple[tuple[str, float], ...]:
        return self.slots() if self._dense is None or stands_for_table(variable) else self._dense[1]

    def _derived(self, values: dict[str, Number], step: Number) -> dict[str, Number]:
        """Hyperparameters that depend on others or on the number of the step, from 1."""
        return {}

    #: Whether the rule sees the gradient of a dense variable as that of one row.
    _whole = False

    #: What the learning rate may be.
    _rates: Any = ANY

    def _set(self, name: str, value: Any, allowed: Any) -> None:
        """Notes a hyperparameter of the rule."""
        self._check_if_number(name, value, allowed)
        self._hyperparameters[name] = value

    def _plain_when_dense(
        self, rule: str, slots: Sequence[str], without: tuple[str, ...], regularize_dense: bool
    ) -> None:
        """Dense variables get `rule`, which has these of the slots and not the hyperparameters in `without`."""
        if not regularize_dense:
            self._dense = rule, tuple(slot for slot in self._rule_slots if slot[0] in slots), without

    def _set_lambdas(self, l1: Any, l2: Any, l21: Any) -> None:
        """Notes the penalties of the sparse group lasso, which the learning rate multiplies."""
        if _takes_step(self._learning_rate) and not all(isinstance(x, (int, float)) and x == 0 for x in (l1, l21)):
            warnings.warn(
                f"{type(self).__name__}: l1 and l21 count per unit of learning rate, while a row keeps the sum of all "
                "its steps. As a schedule lowers the rate, the penalties go with it, and rows that were zero come "
                "back. Take a learning rate that stays, or GroupFtrl, whose penalties do not depend on it.",
                stacklevel=4,
            )
        for name, value in (("l1", l1), ("l2", l2), ("l21", l21)):
            self._set(name, value, NON_NEGATIVE)

    def _start(self, name: str, value: Any) -> float:
        """What an accumulator starts from."""
        self._check_if_number(name, value, NON_NEGATIVE)
        return float(value)

    def _check_if_number(self, name: str, value: Any, allowed: Any) -> None:
        """Checks what is known by now: a Tensor or a function may give anything."""
        if value is None or isinstance(value, (str, bytes, list, tuple, dict)):
            raise ValueError(f"{type(self).__name__}: {name} must be a number, got {value!r}.")
        if isinstance(value, (int, float, np.generic)):
            self._check(name, value, allowed)

    def _check(self, name: str, value: Any, allowed: Any) -> None:
        words, test = allowed
        if not math.isfinite(value) or not test(value):
            raise ValueError(f"{type(self).__name__}: {name} must be {words}, got {value!r}.")

    # ---- Public ------------------------------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> Any:
        """As it was given. Assigning a number assigns to a variable, if it is one.

        Raises:
          ValueError: assigning in the place of anything but a variable, where a function or graph has been built with
            it, which would go on with what it was.
        """
        return self._learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self._check_if_number("learning_rate", value, self._rates)
        if isinstance(self._learning_rate, tf.Variable) and not isinstance(value, tf.Variable) and not callable(value):
            self._learning_rate.assign(value)
            return
        if any(graph() is not None for graph in self._built_with_rate):
            gc.collect()  # of graphs that nobody can run
        if any(graph() is not None for graph in self._built_with_rate):
            raise ValueError(
                f"{type(self).__name__}: a tf.function or a graph has been built with the learning rate "
                f"{self._learning_rate!r}, and would go on with it. Give the optimizer a variable, "
                "learning_rate=tf.Variable(0.1), and assign to that."
            )
        self._learning_rate = value

    @property
    def iterations(self) -> tf.Variable:
        """Steps so far: a tf.int64 variable."""
        with tf_ops.init_scope():
            graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
            found = self._get_non_slot_variable("iterations", graph=graph)
            if found is None:
                self._maybe_initialize_trackable()
                initial: Any = tf.constant(0, tf.int64)
                if graph is None:
                    restored = self._preload_simple_restoration(name="iterations")
                    initial = initial if restored is None else restored
                found = tf.compat.v1.Variable(initial, trainable=False, use_resource=True, name="iterations")
                self._handle_deferred_dependencies(name="iterations", trackable=found)
                self._non_slot_dict["iterations", graph] = found
            return found

    def compute_gradients(self, loss: Any, var_list: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As of ``tf.compat.v1.train.Optimizer``. Of a function `loss`, key-value variables may be listed, too."""
        flat = flat_variables(var_list)
        if not callable(loss) or flat is None:
            return super().compute_gradients(loss, flat, *args, **kwargs)
        with tf.GradientTape() as tape:
            tape.watch([v for v in flat if not isinstance(v, KvVariable)])
            value = loss()
        return list(zip(tape.gradient(value, flat), flat, strict=True))

    def apply_gradients(
        self, grads_and_vars: Any, global_step: Any = None, name: str | None = None, **kwargs: Any
    ) -> Any:
        """One step. Variables may be key-value ones, dense ones, and those of Keras layers."""
        pairs = [(g, v.value if isinstance(getattr(v, "value", None), tf.Variable) else v) for g, v in grads_and_vars]
        self._global_step = global_step
        try:
            return super().apply_gradients(pairs, global_step, name, **kwargs)
        finally:
            self._global_step = None
            self._of_this_step.clear()

    # ---- Hyperparameters ---------------------------------------------------------------------------------------------

    def as_fused_rule(self) -> FusedRule:
        """For `tfplugin.optimizers.fused_rules`."""
        return FusedRule(self.rule(), self.slots(), self._values)

    def _values(self, step: Step) -> Mapping[str, Number]:
        if step.number is not None:
            return self._values_at(step.number)
        place = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        if place not in self._of_this_step:
            self._of_this_step[place] = self._values_at(number(self.iterations) + 1)
        return self._of_this_step[place]

    def _values_at(self, step: Number) -> Mapping[str, Number]:
        rate = self._learning_rate
        if not tf.executing_eagerly():
            self._built_with_rate.append(weakref.ref(tf.compat.v1.get_default_graph()))
        if callable(rate) and not tf.is_tensor(rate) and not isinstance(rate, tf.Variable):
            rate = rate(self._count(step)) if _takes_step(rate) else rate()
        values = {"learning_rate": given(rate)}
        values |= {name: given(value) for name, value in self._hyperparameters.items()}
        return values | self._derived(values, step)

    def _count(self, step: Number) -> Any:
        """What a schedule is given: steps before this one."""
        if self._global_step is not None:
            return tf.convert_to_tensor(self._global_step)
        return int(step - 1) if isinstance(step, float) else tf.cast(step - 1, tf.int64)

    # ---- What tf.compat.v1.train.Optimizer asks for ------------------------------------------------------------------

    def _prepare(self) -> None:
        self._of_this_step = {}

    def _create_slots(self, var_list: Sequence[Any]) -> None:
        _ = self.iterations
        for v in var_list:
            for name, start in self._slots_of(v):
                initializer = tf.compat.v1.constant_initializer(start)
                self._get_or_make_slot_with_initializer(v, initializer, v.shape, v.dtype.base_dtype, name, self._name)

    def _apply_to_variable(self, gradient: tf.Tensor, variable: Any, indices: tf.Tensor | None) -> Any:
        slots = [self.get_slot(variable, name) for name, _ in self._slots_of(variable)]
        return self._apply_to_handles([variable.handle, *(slot.handle for slot in slots)], gradient, variable, indices)

    def _apply_to_handles(
        self, handles: Sequence[tf.Tensor], gradient: tf.Tensor, variable: Any, indices: tf.Tensor | None
    ) -> Any:
        """Updates resource variables: `variable`, or what has its value, and its slots."""
        values = dict(self._values(Step(compute_dtype(variable.dtype.base_dtype))))
        if self._dense is not None and not stands_for_table(variable):
            values = {name: value for name, value in values.items() if name not in self._dense[2]}
        if self.kv_options.stochastic_rounding:
            values["seed"] = number(self.iterations)  # which is saved, so that a restored run goes on drawing
        names, hyperparameters = pack(values)
        return raw.kv_apply_dense(
            handles,
            tf.zeros([0], tf.int64) if indices is None else indices,
            tf.cast(gradient, variable.dtype.base_dtype),
            hyperparameters,
            variable=variable.name,
            optimizer=self.rule_of(variable),
            names=names,
            sparse=indices is not None,
            whole=self._whole and not stands_for_table(variable),
            skip_nonfinite=self.kv_options.skip_nonfinite,
            stochastic_rounding=self.kv_options.stochastic_rounding,
        )

    def _resource_apply_dense(self, grad: tf.Tensor, handle: Any) -> Any:
        return self._apply_to_variable(grad, handle, None)

    def _resource_apply_sparse_duplicate_indices(self, grad: tf.Tensor, handle: Any, indices: tf.Tensor) -> Any:
        return self._apply_to_variable(grad, handle, indices)

    # Reference variables of TensorFlow 1.

    def _apply_dense(self, grad: tf.Tensor, var: Any) -> Any:
        slots = [self.get_slot(var, name) for name, _ in self._slots_of(var)]
        return update_reference_variable(
            [var, *slots], None, lambda handles, _: self._apply_to_handles(handles, grad, var, None)
        )

    def _apply_sparse_duplicate_indices(self, grad: tf.IndexedSlices, var: Any) -> Any:
        slots = [self.get_slot(var, name) for name, _ in self._slots_of(var)]
        return update_reference_variable(
            [var, *slots],
            grad.indices,
            lambda handles, places: self._apply_to_handles(handles, grad.values, var, places),
        )

    def _finish(self, update_ops: Sequence[Any], name_scope: str) -> Any:
        updates = [op for op in update_ops if op is not None]
        with tf.control_dependencies([] if tf.executing_eagerly() else updates):
            counted = self.iterations.assign_add(1, read_value=False)
        return tf.group(*updates, *([] if counted is None else [counted]), name=name_scope)


def _takes_step(schedule: Any) -> bool:
    """Whether a function wants an argument."""
    try:
        parameters = inspect.signature(schedule).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
