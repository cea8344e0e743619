"""`OptimizerWrapper`: Keras 3 and tf_keras optimizers on key-value variables."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.trackable import autotrackable
from tensorflow.python.training import optimizer as v1_optimizer

from tfplugin import ranks
from tfplugin.kv_variable import KvVariable
from tfplugin.optimizers import (
    explanation,
    generic_update,
    late_variables,
    parameter_servers,
    part_clipping,
    row_averages,
)
from tfplugin.optimizers import fused as fusing
from tfplugin.optimizers.accumulated_rows import AccumulatedRows
from tfplugin.optimizers.agreed_step import agreed_step, spread_variables
from tfplugin.optimizers.hyperparameters import Step, given
from tfplugin.optimizers.inner_optimizer import innermost
from tfplugin.optimizers.patch_lock import patch_lock
from tfplugin.partitioned_kv_variable import flat_variables
from tfplugin.placement import refuse_copies
from tfplugin.wrapped_method import replaced

_log = logging.getLogger("tfplugin")

#: Tables that `_warn_of_what_one_rank_decides` has told of.
_warned: weakref.WeakSet[KvVariable] = weakref.WeakSet()


class OptimizerWrapper(autotrackable.AutoTrackable):
    """Lets an optimizer update key-value variables and dense variables in one `apply_gradients`.

    Where the table engine knows the optimizer, a key-value variable is updated by one fused op; otherwise the
    optimizer's own update runs on the rows that the step touched, with their slots. `explain` says which. Rows that a
    step does not touch stay as they are. The variables need not come all at once: the optimizer may be given others in
    another call, through the wrapper or directly. ``tf.compat.v1.train`` optimizers and those of `tfplugin.optimizers`
    need no wrapper and work with one. Attributes that are not here are the optimizer's own, to read and to assign
    (``learning_rate``, ``weight_decay``, ``iterations``).

    Args:
      optimizer: of ``tf.keras.optimizers``, ``tf_keras.optimizers``, ``tf_keras.optimizers.legacy`` or
        ``tf.compat.v1.train``, also inside a loss-scaling optimizer.
      fused: ``"auto"``, or False to run the optimizer's own update in any case.
      skip_nonfinite: leave a row alone whose gradient has a NaN or an infinity, and count it
        (``variable.skipped_updates()``). By default such a gradient is applied, as TensorFlow does.
      stochastic_rounding: of float16 and bfloat16 rows, whose small updates are lost otherwise.

    Raises:
      TypeError: not an optimizer.
      ValueError: an option that there is not; in `apply_gradients`, an optimizer that couples the rows of a matrix
        (Adafactor, Muon; Lamb where it cannot be fused), one with both moving averages and gradient accumulation, and
        `skip_nonfinite` or `stochastic_rounding` of rows whose update is not fused.

    Example:
      >>> opt = tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(1e-3))
      >>> with tf.GradientTape() as tape:
      ...     loss = tf.reduce_sum(tf.nn.embedding_lookup(v, ids))
      >>> opt.apply_gradients(zip(tape.gradient(loss, [v]), [v]))
      >>> print(opt.explain())
      v:0   fused: adam
    """

    def __init__(
        self,
        optimizer: Any,
        fused: str | bool = "auto",
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
    ) -> None:
        if isinstance(optimizer, OptimizerWrapper):
            optimizer = optimizer.optimizer
        if not hasattr(optimizer, "apply_gradients"):
            raise TypeError(f"OptimizerWrapper wants an optimizer, got {type(optimizer).__name__}.")
        if fused not in ("auto", False):
            raise ValueError(f"OptimizerWrapper: fused must be 'auto' or False, got {fused!r}.")
        self.optimizer = optimizer
        self._updates: weakref.WeakKeyDictionary[KvVariable, generic_update.RowUpdate] = weakref.WeakKeyDictionary()
        own = getattr(self._core, "kv_options", None)
        if own is not None and fused is False:
            raise ValueError(f"OptimizerWrapper: {type(self._core).__name__} has no update but the fused one.")
        if own is not None:
            skip_nonfinite |= own.skip_nonfinite
            stochastic_rounding |= own.stochastic_rounding
        late_variables.accept(self._core)
        fusing.set_options(self._core, fusing.Options(fused == "auto", skip_nonfinite, stochastic_rounding))

    @property
    def _core(self) -> Any:
        return innermost(self.optimizer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        ours = name.startswith("_") or name == "optimizer" or hasattr(type(self), name)
        if not ours and hasattr(self.optimizer, name):
            setattr(self.optimizer, name, value)
        else:
            super().__setattr__(name, value)

    # ---- Public ----------------------------------------------------------------------------------------------------

    def minimize(self, loss: Any, var_list: Any = None, tape: tf.GradientTape | None = None, **kwargs: Any) -> Any:
        """One step: gradients of `loss` (a function, or a Tensor with its `tape`), then `apply_gradients`.

        `var_list`, variables or one, defaults to the trainable variables that the loss touched.
        """
        if isinstance(self.optimizer, v1_optimizer.Optimizer) and not callable(loss):
            return self.optimizer.minimize(loss, var_list=flat_variables(var_list), **kwargs)
        if callable(loss):
            with tf.GradientTape() as tape:
                value = self._scaled(loss())
        elif tape is not None:
            with tape:
                value = self._scaled(loss)
        elif not tf.executing_eagerly() and not tf_ops.inside_function():
            variables = flat_variables(var_list) or tf.compat.v1.trainable_variables()
            return self.apply_gradients(zip(tf.gradients(loss, variables), variables, strict=True), **kwargs)
        else:
            raise ValueError("minimize: pass a function that computes the loss, or a Tensor and its tape=.")
        variables = flat_variables(var_list() if callable(var_list) else var_list)
        if variables is None:
            variables = list(tape.watched_variables())
        gradients = tape.gradient(value, variables)
        if hasattr(self.optimizer, "get_unscaled_gradients"):  # tf_keras; Keras 3 does it itself
            gradients = self.optimizer.get_unscaled_gradients(gradients)
        return self.apply_gradients(zip(gradients, variables, strict=True), **kwargs)

    def _scaled(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss as a loss-scaling optimizer wants it."""
        for scale in ("get_scaled_loss", "scale_loss"):
            if hasattr(self.optimizer, scale):
                scaled: tf.Tensor = getattr(self.optimizer, scale)(loss)
                return scaled
        return loss

    def explain(self, variables: Sequence[Any] | None = None) -> explanation.Explanation:
        """Which variables are updated by one fused op, which by the optimizer's own ops, and why; see `explain`.

        `variables` default to those of the steps so far.
        """
        return explanation.explained(self._core, variables, by_layers=False)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies gradients to a list of variables, key-value ones and others.

        A table whose gradient is None stays as it is, with a warning; where all of them are None, that is a ValueError.
        """
        pairs = list(grads_and_vars)
        warn_of_missing(pairs)
        return self._apply(self.optimizer.apply_gradients, pairs, *args, **kwargs)

    @tf.autograph.experimental.do_not_convert  # half the time of a first trace; Keras' own do the same
    def _apply(
        self,
        apply: Callable[..., Any],
        grads_and_vars: Any,
        *args: Any,
        sum_before_clipping: bool = True,
        **kwargs: Any,
    ) -> Any:
        """`apply_gradients` by way of `apply`, the optimizer's own.

        `sum_before_clipping`: clip the gradient of each row as a whole; else, as Keras does with the gradient of a
        dense ``Embedding``, that of each id of a batch by itself. A table with lookups whose gradients are sums over
        some ids is clipped by whole rows in any case: the result must not depend on how ids are grouped into lookups.
        """
        pairs = parameter_servers.without_tables(grads_and_vars)
        apply = self._agreed(apply, spread_variables(pairs))
        if isinstance(self.optimizer, v1_optimizer.Optimizer):
            return apply(pairs, *args, **kwargs)
        if not generic_update.any_key_value(pairs):
            with row_averages.apart(self._core):
                return apply(pairs, *args, **kwargs)
        pairs = _once(pairs)
        if all(gradient is None for gradient, _ in pairs):
            raise ValueError(f"No gradients provided for any variable: {[v.name for _, v in pairs]}.")
        _refuse_what_horovod_left(self._core, pairs)
        _warn_of_what_one_rank_decides([v for _, v in pairs if isinstance(v, KvVariable)])
        for _, v in pairs:
            if isinstance(v, KvVariable):
                refuse_copies(v.name, what="updated")
        plans = {v: fusing.plan(self._core, v) for _, v in pairs if isinstance(v, KvVariable)}
        check_supported(self._core, plans)
        explanation.note(self._core, pairs)
        with patch_lock(self._core):
            self._build(pairs)
            swapped = []
            for g, v in pairs:
                if not isinstance(v, KvVariable):
                    swapped.append((g, v))
                elif g is not None:
                    update = self._updates[v]
                    update.keys, rows = generic_update.row_gradient(v, g)
                    update.unique = (sum_before_clipping or v._clipped_whole) and self._clips()
                    if update.unique:  # clipping has to see the gradient of each row as a whole
                        update.keys, rows = generic_update.sum_equal_keys(update.keys, rows)
                    if update.accumulated is not None:
                        update.accumulated.came = update.keys
                    update.stand_for_table()
                    swapped.append((rows, update.value))
            try:
                with self._updates_intercepted(plans, [v for g, v in swapped if g is not None]):
                    return apply(swapped, *args, **kwargs)
            finally:
                for update in self._updates.values():
                    update.unbind()
                    if update.accumulated is not None:
                        update.accumulated.came = None

    def _agreed(self, apply: Callable[..., Any], spread: Sequence[Any]) -> Callable[..., Any]:
        """`apply` as a step that all ranks take alike, where they share variables."""
        if not spread:
            return apply

        def apply_alike(pairs: Any, *args: Any, **kwargs: Any) -> Any:
            stand_ins = [
                self._updates[v].value if isinstance(v, KvVariable) and v in self._updates else v for v in spread
            ]
            with agreed_step(self.optimizer, spread, stand_ins, pairs):
                return apply(pairs, *args, **kwargs)

        return apply_alike

    # ---- Updates ---------------------------------------------------------------------------------------------------

    def _clips(self) -> bool:
        core = self._core
        names = ("clipnorm", "clipvalue", "global_clipnorm", "_clipnorm", "_clipvalue", "_global_clipnorm")
        return any(getattr(core, name, None) for name in (*names, "gradient_transformers"))

    @contextlib.contextmanager
    def _updates_intercepted(self, plans: dict[KvVariable, Any], updated: Sequence[Any]) -> Iterator[None]:
        """Has the optimizer's update of a table's rows go our way. All else it does is its own.

        `updated` are the variables that it is given gradients of, in their order.

        The rows are read and written within the update, so that an optimizer that skips a step, as one that scales
        the loss does, skips them, too.
        """
        core = self._core
        by_value = {id(update.value): update for update in self._updates.values()}
        step = fusing.FusedStep(core)
        patches = contextlib.ExitStack()

        def replace(method: str, ours: Any) -> None:
            patches.enter_context(replaced(core, method, ours))

        def table_of(variable: Any) -> Any:
            update = by_value.get(id(variable))
            return None if update is None else update.variable._table

        if getattr(core, "clipnorm", None) and len({v._table for v in plans}) < len(plans):
            self._clip_parts_as_wholes(replace, table_of, updated)
        if getattr(core, "global_clipnorm", None) and hasattr(core, "_clip_gradients"):
            clip = core._clip_gradients
            replace("_clip_gradients", lambda gradients: part_clipping.clipped_in_one_dtype(gradients, clip))

        decay = getattr(core, "_apply_weight_decay", None)
        uses_decay = getattr(core, "_use_weight_decay", None)

        def decays(variable: Any) -> bool:
            update = by_value.get(id(variable))
            return bool(uses_decay(variable if update is None else update.variable))

        def apply_to_rows(update: generic_update.RowUpdate, rows: tf.Tensor, stock: Any, **about: Any) -> Any:
            variable = update.variable
            if variable._in_backward is not None:  # has been updated; the empty gradient carries that
                return None if tf.executing_eagerly() else tf.group(rows)
            if update.averages is not None:
                return update.averages.around(update.keys, lambda: move_rows(update, rows, stock, **about))
            return move_rows(update, rows, stock, **about)

        def move_rows(update: generic_update.RowUpdate, rows: tf.Tensor, stock: Any, **about: Any) -> Any:
            variable = update.variable
            plan = plans[variable]
            if isinstance(plan, str):
                decay_first = (lambda: decay([update.value])) if decay is not None else None
                return update.run_stock(core, rows, stock, decay_first)
            weight_decay = 0.0
            if decay is not None and getattr(core, "weight_decay", None) and decays(update.value):
                weight_decay = given(core.weight_decay)
            about_step = Step(fusing.compute_dtype(variable.dtype), **about)
            rows = generic_update.fitting(variable, rows)
            return step.apply(
                plan, variable, update.prefix, update.keys, rows, step=about_step, weight_decay=weight_decay
            )

        if hasattr(core, "_create_all_weights"):  # tf_keras.optimizers.legacy
            dense = core._resource_apply_dense

            def coefficients(variable: KvVariable, apply_state: Any) -> Any:
                dtype = fusing.compute_dtype(variable.dtype)
                update = self._updates[variable]
                if dtype == variable.dtype and apply_state:
                    return apply_state[update.value.device, dtype]
                return core._fallback_apply_state(update.value.device, dtype)

            def resource_apply_dense(grad: tf.Tensor, var: Any, apply_state: Any = None) -> Any:
                update = by_value.get(id(var))
                if update is None:
                    return dense(grad, var, apply_state=apply_state)
                about = {}
                if not isinstance(plans[update.variable], str):
                    about["coefficients"] = coefficients(update.variable, apply_state)
                return apply_to_rows(update, grad, lambda rows: dense(rows, var, apply_state=apply_state), **about)

            def resource_apply_dense_without_state(grad: tf.Tensor, var: Any) -> Any:
                update = by_value.get(id(var))
                return dense(grad, var) if update is None else apply_to_rows(update, grad, lambda g: dense(g, var))

            takes_state = "apply_state" in inspect.signature(dense).parameters
            replace(
                "_resource_apply_dense", resource_apply_dense if takes_state else resource_apply_dense_without_state
            )
        else:
            stock_update = core.update_step

            def update_step(gradient: tf.Tensor, variable: Any, *learning_rate: Any) -> Any:
                update = by_value.get(id(variable))
                if update is None:
                    return stock_update(gradient, variable, *learning_rate)
                about = {"learning_rate": learning_rate[0]} if learning_rate else {}
                return apply_to_rows(update, gradient, lambda g: stock_update(g, variable, *learning_rate), **about)

            replace("update_step", update_step)
            if uses_decay is not None:
                replace("_use_weight_decay", decays)
                replace("_apply_weight_decay", lambda vs: decay([v for v in vs if id(v) not in by_value]))
            if getattr(core, "gradient_accumulation_steps", None):
                increment = core._backend_increment_gradient_accumulators

                def gather(gradients: Any, accumulators: Any) -> None:
                    dense = []
                    for gradient, accumulator in zip(gradients, accumulators, strict=True):
                        if isinstance(accumulator, AccumulatedRows):
                            accumulator.gather(gradient)
                        else:
                            dense.append((gradient, accumulator))
                    if dense:
                        increment(*zip(*dense, strict=True))

                replace("_backend_increment_gradient_accumulators", gather)
            patches.enter_context(row_averages.apart(core))
            if hasattr(core, "_update_step_xla"):
                compiled = core._update_step_xla

                def update_step_xla(gradient: tf.Tensor, variable: Any, key: Any) -> Any:
                    if id(variable) in by_value:
                        return core._update_step(gradient, variable)
                    return compiled(gradient, variable, key)

                replace("_update_step_xla", update_step_xla)
        with patches:
            yield

    def _clip_parts_as_wholes(
        self, replace: Callable[[str, Any], None], table_of: Callable[[Any], Any], updated: Sequence[Any]
    ) -> None:
        """Has ``clipnorm`` be that of a table, whatever its number of parts."""
        core = self._core
        if hasattr(core, "_create_all_weights"):  # tf_keras.optimizers.legacy
            clip_pairs = core._clipnorm_fn

            def clip_of_legacy(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
                gradients, variables = zip(*pairs, strict=True)
                clipped = part_clipping.clipped_as_wholes(
                    gradients,
                    [table_of(v) for v in variables],
                    lambda whole: [gradient for gradient, _ in clip_pairs([(one, None) for one in whole])],
                )
                return list(zip(clipped, variables, strict=True))

            replace("_clipnorm_fn", clip_of_legacy)
            return
        stock, given = core._clip_gradients, list(updated)
        if hasattr(core, "_backend_apply_gradients"):  # Keras 3, which may have left some out by now
            apply = core._backend_apply_gradients

            def apply_noted(gradients: Any, variables: Any) -> Any:
                given[:] = variables
                return apply(gradients, variables)

            replace("_backend_apply_gradients", apply_noted)
        replace(
            "_clip_gradients",
            lambda gradients: part_clipping.clipped_as_wholes(gradients, [table_of(v) for v in given], stock),
        )

    # ---- Slots -----------------------------------------------------------------------------------------------------

    def _build(self, pairs: list[tuple[Any, Any]]) -> None:
        """Has the optimizer make its slots; those of key-value variables are noted instead."""
        optimizer, core = self.optimizer, self._core
        variables = []
        for _, v in pairs:
            if isinstance(v, KvVariable):
                # Not its name: Keras numbers the optimizers of a process, and a restart must find the same slots.
                prefix = v.slot_prefix(core, type(core).__name__)
                if v not in self._updates:
                    self._updates[v] = generic_update.RowUpdate(v, prefix)
                self._updates[v].rename(prefix)
                v = self._updates[v].value
            variables.append(v)
        # Dense variables first: their places in the optimizer's lists, which name them in checkpoints, must not depend
        # on the number of parts.
        variables.sort(key=lambda v: isinstance(v, generic_update.StepVariable))
        with self._slots_noted(), tf_ops.init_scope():
            if hasattr(core, "_create_all_weights"):  # tf_keras.optimizers.legacy
                core._create_all_weights(variables)
            elif not hasattr(core, "_check_variables_are_known"):  # tf_keras
                core.build(variables)
            elif getattr(optimizer, "built", False):
                core._check_variables_are_known(variables)
            else:
                with tf.name_scope(optimizer.name):
                    optimizer.build(variables)

    def know(self, parts: Sequence[KvVariable]) -> None:
        """Has an optimizer of Keras 3 that was built make the slots of these before a step."""
        weights = [v for v in self._core._trainable_variables if not generic_update.stands_for_table(v)]
        with patch_lock(self._core):
            self._build([(None, v) for v in (*weights, *parts)])

    def _averages(self, update: generic_update.RowUpdate) -> row_averages.RowAverages:
        if update.averages is None:
            update.averages = row_averages.RowAverages(update, self._core)
            row_averages.note(self._core, update.averages)
        return update.averages

    @contextlib.contextmanager
    def _slots_noted(self) -> Iterator[None]:
        optimizer = self._core
        by_value = {id(update.value): update for update in self._updates.values()}
        names = fusing.options_of(optimizer).slot_names

        def constant(initializer: Any, slot: str) -> float:
            what = f"Slot '{slot}' of {type(optimizer).__name__}"
            if isinstance(initializer, str):
                if initializer not in ("zeros", "ones"):
                    raise ValueError(f"{what} starts from '{initializer}'; key-value slots start from a constant.")
                return float(initializer == "ones")
            if callable(initializer):
                return generic_update.constant_of(lambda: initializer([1, 1], tf.float32), what)
            return 0.0 if initializer is None else generic_update.constant_of(initializer, what)

        def wrap(method: str, read: Any) -> None:
            stock = getattr(optimizer, method)

            def noted(*args: Any, **kwargs: Any) -> Any:
                reference, slot, initializer = read(*args, **kwargs)
                update = by_value.get(id(reference))
                if update is None:
                    return stock(*args, **kwargs)
                if slot == "gradient_accumulator":
                    made = update.accumulated = update.accumulated or AccumulatedRows(update, optimizer)
                elif slot == "average" and getattr(optimizer, "use_ema", False):
                    made = self._averages(update).place
                else:
                    made = update.add_slot(names.get(slot, slot), constant(initializer, slot))
                if method == "add_slot":
                    optimizer._slots.setdefault(reference._unique_id, {})[slot] = made
                else:
                    optimizer._kv_slots.remember(reference, slot, made)
                return made

            before[method] = vars(optimizer).get(method)
            object.__setattr__(optimizer, method, noted)

        before: dict[str, Any] = {}
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
        try:
            with generic_update.one_row_shown([update.value for update in self._updates.values()]):
                yield
        finally:
            for method, own in before.items():
                if own is None:
                    object.__delattr__(optimizer, method)
                else:
                    object.__setattr__(optimizer, method, own)


#: Optimizers of Keras 3 that treat elements alone, and yet are not for the rows of a step.
_NOT_OF_ROWS = {
    "MultiOptimizer": "it tells by the paths of Keras's weights which optimizer has which, and a table is none of them",
    "ScheduleFreeAdamW": "it averages all weights over all steps, and rows would lack those that do not touch them",
}


def check_supported(core: Any, plans: Mapping[KvVariable, Any]) -> None:
    """Raises ValueError for an optimizer that cannot update a table. `plans`: what `fused.plan` says for each."""
    names = _names(core)
    for name, why in _NOT_OF_ROWS.items():
        if name in names:
            raise ValueError(
                f"{name} cannot update a key-value variable: {why}. Give the layer that holds it an optimizer of its "
                f"own, as in tfplugin.keras.Embedding(dim, optimizer='adam'); {name} then has the other weights."
            )
    reason = next((plan for plan in plans.values() if isinstance(plan, str)), None)
    couples = generic_update.couples_rows(core) or (reason and "Lamb" in names and "Lamb")
    if couples:
        raise ValueError(
            f"{couples} couples the rows of a matrix, so its own update cannot run on the rows of a key-value "
            f"variable that a step touched ({reason}). Use an optimizer that treats elements alone, such as Adam."
        )
    fusing.check_options(core, plans)
    if not getattr(core, "gradient_accumulation_steps", None):
        return
    if getattr(core, "use_ema", None):
        raise ValueError(
            f"{type(core).__name__}: key-value variables have moving averages (use_ema) or gradient accumulation "
            "(gradient_accumulation_steps), not both: the averages of all rows would move on in steps that touch none."
        )
    increment = getattr(core, "_backend_increment_gradient_accumulators", None)
    if increment is None or len(inspect.signature(increment).parameters) != 2:
        raise ValueError(
            f"{type(core).__name__}: gradient_accumulation_steps of key-value variables needs a newer Keras 3."
        )


def wrapper_of(optimizer: Any) -> OptimizerWrapper:
    """The wrapper by which a model's optimizer updates tables, with the options that one of its user's own has set."""
    if isinstance(optimizer, OptimizerWrapper):
        return optimizer
    wrapper = vars(optimizer).get("_kv_wrapper")
    if wrapper is None:
        options = fusing.said_of(innermost(optimizer))
        wrapper = OptimizerWrapper(optimizer)
        if options is not None:
            fusing.set_options(wrapper._core, options)
        # Past what Keras makes of attributes: it is no part of the optimizer.
        object.__setattr__(optimizer, "_kv_wrapper", wrapper)
    return wrapper


def _once(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Pairs without those of a table that came before: ``[*layer.trainable_variables, layer.table]`` has it twice."""
    gradients: dict[int, Any] = {}
    once = []
    for gradient, variable in pairs:
        if isinstance(variable, KvVariable):
            if id(variable) in gradients:
                if gradient is not gradients[id(variable)]:
                    raise ValueError(
                        f"apply_gradients: {variable.name} comes twice, with two gradients. Take the gradient of the "
                        "sum of the losses, or apply them one after the other."
                    )
                continue
            gradients[id(variable)] = gradient
        once.append((gradient, variable))
    return once


def _names(optimizer: Any) -> list[str]:
    return [cls.__name__ for cls in type(optimizer).__mro__]


def warn_of_missing(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Says of which tables the loss has no gradient, as Keras does of weights."""
    missing = {v.partitioned_name or v.name for gradient, v in pairs if gradient is None and isinstance(v, KvVariable)}
    if missing:
        names = ", ".join(f"'{name}'" for name in sorted(missing))
        warnings.warn(f"Gradients do not exist for key-value variable {names} when minimizing the loss.", stacklevel=3)


def _warn_of_what_one_rank_decides(tables: Sequence[KvVariable]) -> None:
    """Warns, once, of tables that Horovod is to keep equal on all ranks, and that each rank gives other rows to."""
    size = ranks.horovod_size()
    if size < 2:
        return
    for table in tables:
        if table.ranks > 1 or table in _warned or not (table.max_capacity or table.policies.admission):
            continue
        _warned.add(table)
        _log.warning(
            "Key-value variable '%s': each of Horovod's %d ranks has the whole table, and its %s goes by the ids that "
            "a rank looks up itself, so that the rows of the ranks will differ. Spread it over the ranks, with "
            "tfplugin.sok.DynamicVariable, or leave that out.",
            table.name,
            size,
            "max_capacity" if table.max_capacity else "admission",
        )


def _refuse_what_horovod_left(optimizer: Any, pairs: list[tuple[Any, Any]]) -> None:
    """Raises ValueError for an ``hvd.DistributedOptimizer`` that has averaged nothing before it applies.

    It averages in ``minimize`` of tf_keras, which ``fit`` calls; not in ``apply_gradients``, nor with Keras 3.
    """
    if getattr(optimizer, "_aggregated_gradients", True) or optimizer.process_set.size() == 1:
        return
    name = next(v.name for _, v in pairs if isinstance(v, KvVariable))
    raise ValueError(
        f"Key-value variable '{name}' would be updated by the gradients of this rank alone, and so would dense "
        "variables: an hvd.DistributedOptimizer averages gradients in minimize and fit of tf_keras, not in "
        "apply_gradients, nor with Keras 3. Train in a loop of your own, by a plain optimizer and the gradients of an "
        "hvd.DistributedGradientTape."
    )
