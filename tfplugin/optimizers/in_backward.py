"""`apply_in_backward`: the optimizer's step as part of the backward pass."""

from __future__ import annotations

import copy
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.trackable import autotrackable, data_structures
from tensorflow.python.training import optimizer as v1_optimizer

from tfplugin import backward_updates, ranks, scaled_loss, step_record
from tfplugin.kv_variable import KvVariable
from tfplugin.optimizers import fused, generic_update
from tfplugin.optimizers.fused_rules import FusedRule, fused_rule_of
from tfplugin.optimizers.hyperparameters import Step, given, number
from tfplugin.optimizers.wrapper import OptimizerWrapper
from tfplugin.partitioned_kv_variable import PartitionedKvVariable
from tfplugin.placement import refuse_copies


class BackwardUpdates(autotrackable.AutoTrackable):
    """What `apply_in_backward` returns. Put it into a ``tf.train.Checkpoint`` to keep the step counts.

    Attributes:
      steps: the count of each part, tf.int64.
    """

    def __init__(self, parts: list[_PartUpdate]) -> None:
        self._parts = data_structures.NoDependency(parts)
        self.steps = [part.step for part in parts]

    def undo(self) -> None:
        """Gives lookups their ordinary gradients back. Functions and graphs that are there switch back, too, when they
        are traced or built anew."""
        for part in self._parts:
            part.undo()


class _PartUpdate:
    """The update of one table."""

    def __init__(self, variable: KvVariable, optimizer: Any) -> None:
        self._variable = variable
        self._optimizer = optimizer
        rule = fused_rule_of(_prepared(optimizer))
        if isinstance(rule, str):
            raise ValueError(f"apply_in_backward of '{variable.name}': {rule}. Take one of tfplugin.optimizers.")
        self.rule = rule.name
        own = isinstance(optimizer, v1_optimizer.Optimizer)
        self._optimizer_name = optimizer.get_name() if own else type(optimizer).__name__
        with tf_ops.init_scope():
            local = variable.name.removesuffix(":0").replace("/", "_")
            # A file of Keras may have brought the rows with their slots, and the steps so far.
            steps = variable.__dict__.pop("_steps_in_backward", 0)
            self.step = tf.Variable(steps, trainable=False, dtype=tf.int64, name=f"{local}_steps_in_backward")
        self.token = backward_updates.register(self)

    def __call__(self, keys: tf.Tensor, gradients: tf.Tensor, positions: tf.Tensor | None) -> tf.IndexedSlices:
        """Updates rows; returns the gradient that is left to apply: none, once the update has been made."""
        variable = self._variable
        refuse_copies(variable.name, what="updated")
        _refuse_one_rank_alone(variable)
        if not step_record.note_backward_update(variable):
            # A step of Keras that scales its loss: the rows stay as they are, and the step ends in an error.
            return self._nothing()
        scaler = scaled_loss.scaler_of_this_pass()
        if scaler is not None:
            raise ValueError(
                f"Key-value variable '{variable.name}' is updated in the backward pass, and would get the gradients of "
                f"a loss that {scaler} has scaled, which nothing has scaled back. Take the gradients of the loss "
                "itself; or, after undo() of what tfplugin.apply_in_backward returned, hand those of the table to "
                f"{variable._optimizer_wrapper}(LossScaleOptimizer(optimizer)).apply_gradients."
            )
        with tf.name_scope("update_in_backward"):
            optimizer = _prepared(self._optimizer)
            rule = fused_rule_of(optimizer)
            assert isinstance(rule, FusedRule)
            dtype = fused.compute_dtype(variable.dtype)
            step = Step(dtype, number(self.step) + 1, coefficients=_coefficients(optimizer, dtype))
            updated = fused.FusedStep(self._optimizer).apply(
                rule,
                variable,
                variable.slot_prefix(self._optimizer, self._optimizer_name),
                keys,
                generic_update.fitting(variable, gradients),
                step=step,
                weight_decay=_weight_decay(optimizer, variable),
                positions=positions,
            )
            with tf.control_dependencies([updated] if updated is not None else []):
                counted = self.step.assign_add(1, read_value=False)
            with tf.control_dependencies([counted] if counted is not None else []):
                return self._nothing()

    def _nothing(self) -> tf.IndexedSlices:
        variable = self._variable
        return tf.IndexedSlices(
            tf.identity(tf.zeros([0, variable.dim], variable.dtype)), tf.zeros([0], variable.key_dtype)
        )

    def undo(self) -> None:
        backward_updates.forget(self.token)
        if self._variable._in_backward is self:
            self._variable._in_backward = None


def _refuse_one_rank_alone(variable: KvVariable) -> None:
    """Raises ValueError where Horovod has several ranks, each with all rows: it would average after the update."""
    size = ranks.horovod_size()
    if size > 1 and variable.ranks == 1:
        raise ValueError(
            f"Key-value variable '{variable.name}' is updated in the backward pass, and so by the gradients of this "
            f"rank alone: Horovod averages those of its {size} ranks later, and the tables of the ranks would drift "
            "apart. Undo what tfplugin.apply_in_backward returned, and hand the gradients of an "
            "hvd.DistributedGradientTape to tfplugin.OptimizerWrapper(optimizer).apply_gradients; or spread the table "
            "over the ranks: tfplugin.sok.DynamicVariable, whose lookups bring a row's gradients of all ranks together."
        )


def _prepared(optimizer: Any) -> Any:
    """A copy of a `tf.compat.v1.train` optimizer that has read its hyperparameters, for the current graph."""
    if not isinstance(optimizer, v1_optimizer.Optimizer):
        return optimizer
    optimizer = copy.copy(optimizer)
    optimizer._prepare()
    return optimizer


def _coefficients(optimizer: Any, dtype: tf.DType) -> dict[str, tf.Tensor]:
    if not hasattr(optimizer, "_fallback_apply_state"):
        return {}
    with tf_ops.init_scope():
        optimizer._create_hypers()
    found: dict[str, tf.Tensor] = optimizer._fallback_apply_state("", dtype)
    return found


def _weight_decay(optimizer: Any, variable: KvVariable) -> Any:
    decay = getattr(optimizer, "weight_decay", None)
    if not decay or not hasattr(optimizer, "_use_weight_decay") or not optimizer._use_weight_decay(variable):
        return 0.0
    return given(decay)


def _check(variable: Any, optimizer: Any) -> Any:
    """The optimizer that does the update."""
    if not isinstance(variable, (KvVariable, PartitionedKvVariable)):
        raise TypeError(f"apply_in_backward wants a key-value variable, got {type(variable).__name__}.")
    what = f"apply_in_backward of '{variable.name}'"
    core = optimizer._core if isinstance(optimizer, OptimizerWrapper) else optimizer
    wrapped = optimizer.optimizer if isinstance(optimizer, OptimizerWrapper) else optimizer
    if not hasattr(core, "apply_gradients"):
        raise ValueError(f"{what}: {type(core).__name__} is not an optimizer.")
    if wrapped is not core or hasattr(core, "inner_optimizer"):
        raise ValueError(
            f"{what}: a loss-scaling optimizer sees gradients before they are applied; give its inner one."
        )
    parts = list(variable) if isinstance(variable, PartitionedKvVariable) else [variable]
    for part in parts:
        if part._in_backward is not None:
            raise ValueError(f"{what}: it has an optimizer in its backward pass already; undo() that first.")
        if part.constraint is not None:
            raise ValueError(f"{what}: the variable has a constraint, which comes after a step and not within.")
    clips = ("clipnorm", "clipvalue", "global_clipnorm", "_clipnorm", "_clipvalue", "_global_clipnorm")
    for name in (*clips, "gradient_transformers", "use_ema", "gradient_accumulation_steps"):
        if getattr(core, name, None):
            raise ValueError(f"{what}: {type(core).__name__} has {name}, which needs the whole gradient.")
    if getattr(core, "loss_scale_factor", None):
        raise ValueError(
            f"{what}: {type(core).__name__} has loss_scale_factor, by which it divides gradients before it applies "
            "them, and these are applied as they come. Leave it out, and take the gradients of the loss itself."
        )
    if not fused.options_of(core).fused:
        raise ValueError(f"{what}: an update in the backward pass is fused; leave fused=False out.")
    rate = getattr(core, "_hyper", {}).get("learning_rate")
    if hasattr(core, "_create_all_weights") and (
        callable(rate) or getattr(core, "_initial_decay", 0) or type(core).__name__ == "Nadam"
    ):
        raise ValueError(
            f"{what}: schedules of tf_keras.optimizers.legacy count steps of their own; use another optimizer."
        )
    return core


def apply_in_backward(variable: Any, optimizer: Any) -> BackwardUpdates:
    """Has the gradient of each lookup of `variable` update its rows at once.

    From here on the backward pass through a lookup is a step: no gradient of the table is built up, kept and handed on.
    It works under any loop that takes gradients, in eager mode, functions and graphs (where the variable has to be
    among those that the gradient is taken of). The gradient that arrives is an empty `tf.IndexedSlices`, and every
    optimizer that gets it leaves the variable alone.

    What follows from that: gradients are applied as they are, without clipping or loss scaling; each lookup in a pass
    is a step of its own, as two lookups of one batch are two; a pass through a lookup is a step whether or not its
    result is asked for. A step of Keras's ``fit`` or ``train_on_batch`` whose optimizer scales the loss, as under the
    policy ``mixed_float16``, is a ValueError that leaves the rows as they are; so is, in a loop of your own, the
    gradient of a loss that an optimizer of Keras has scaled, where it is taken of that loss itself. Call this before
    functions are traced and graphs are built.

    Args:
      variable: a key-value variable, or a partitioned one.
      optimizer: one that `explain` calls fused: of `tfplugin.optimizers`, ``tf.compat.v1.train``, Keras 3 or tf_keras,
        or a `tfplugin.OptimizerWrapper` of such. Its hyperparameters are read at each step. The steps are counted per
        variable, not by the optimizer; schedules are given that count.

    Returns:
      An object with ``undo()``, and with the counts, for checkpoints.

    Raises:
      TypeError: not a key-value variable.
      ValueError: an optimizer that is not fused, or that clips or scales.

    Example:
      >>> updates = tfplugin.apply_in_backward(table, tfplugin.optimizers.Adagrad(0.1))
      >>> with tf.GradientTape() as tape:
      ...     loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)
      >>> _ = tape.gradient(loss, table)      # the rows have moved
    """
    core = _check(variable, optimizer)
    parts = list(variable) if isinstance(variable, PartitionedKvVariable) else [variable]
    updates = [_PartUpdate(part, core) for part in parts]
    for part, update in zip(parts, updates, strict=True):
        part._in_backward = update
    return BackwardUpdates(updates)
