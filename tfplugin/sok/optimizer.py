"""`sok.OptimizerWrapper` and `sok.SGD`: optimizers for variables of sok and others, in one list or in two."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin import optimizers
from tfplugin.sok import rowless_variables
from tfplugin.sok.distributed_variable import ShardedVariable
from tfplugin.sok.optimizer_slots import slots_of
from tfplugin.sok.placement import refuse_strategies
from tfplugin.sok.step_count import step_count_of


class OptimizerWrapper(optimizers.OptimizerWrapper):
    """Lets an optimizer update `DynamicVariable` s, `Variable` s and dense variables.

    Every rank updates the rows that it holds. Gradients of dense variables are this rank's own: reduce them first, with
    ``hvd.DistributedGradientTape`` or ``hvd.allreduce``. The variables may come in one call or in several. Each call
    counts as a step: where that matters, as it does for Adam, give all variables to one call. The wrapper counts for
    itself (`iterations`): what the optimizer updates directly, without the wrapper, has the optimizer's own count.

    Args:
      optimizer: of ``tf.keras.optimizers``, ``tf_keras.optimizers`` (also ``legacy``), ``tf.compat.v1.train`` or
        `tfplugin.optimizers`.
      **options: as for `tfplugin.OptimizerWrapper`.

    Raises:
      TypeError: an ``hvd.DistributedOptimizer``: it would average rows that other ranks do not have.

    Example:
      >>> optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(learning_rate=1.0))
      >>> optimizer.apply_gradients(zip(grads, [v]))
    """

    def __init__(self, optimizer: Any, *args: Any, **options: Any) -> None:
        if any(base.__module__.partition(".")[0] == "horovod" for base in type(optimizer).__mro__):
            raise TypeError(
                "sok.OptimizerWrapper: an hvd.DistributedOptimizer would average gradients of rows that other ranks do "
                "not have. Wrap the optimizer itself, and give the hvd.DistributedOptimizer the dense variables only; "
                "or one optimizer for all, with gradients of an hvd.DistributedGradientTape."
            )
        super().__init__(optimizer, *args, **options)

    @property
    def lr(self) -> Any:
        """The learning rate."""
        return self.optimizer.learning_rate if hasattr(self.optimizer, "learning_rate") else self.optimizer.lr

    @property
    def iterations(self) -> Any:
        """How many steps it has taken through the wrapper, where the optimizer counts them."""
        with self._counting():
            return self._core.iterations

    def _counting(self) -> Any:
        return step_count_of(self._core).counting(self._core)

    def get_slot(self, var: Any, name: str) -> Any:
        """What the optimizer keeps for a variable, such as ``"momentum"``, ``"m"`` or ``"accumulator"``.

        Args:
          var: any variable that it trains.
          name: as of an optimizer of ``tf_keras.optimizers.legacy``, whichever optimizer it is.

        Returns:
          Of a `DynamicVariable` a `TableSlot`, which `sok.export` and `sok.assign` take; of another variable the
          variable that holds it.

        Raises:
          KeyError: there is no such slot, or not before the first step; it names those that there are.
        """
        slots = slots_of(self.optimizer, var)
        if name not in slots:
            kept = ", ".join(f"'{slot}'" for slot in slots) or "nothing, or nothing before its first step"
            raise KeyError(f"{type(self._core).__name__} has no slot '{name}' for '{var.name}': it keeps {kept}.")
        return slots[name]

    def minimize(self, *args: Any, **kwargs: Any) -> Any:
        """As of `tfplugin.OptimizerWrapper`."""
        refuse_strategies("sok.OptimizerWrapper cannot take a step")
        with self._counting():
            return super().minimize(*args, **kwargs)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies gradients; equal rows in the gradient of a `Variable` are summed first.

        Keras optimizers would take each occurrence of a row for a step of its own.

        Raises:
          ValueError: in a step of a ``tf.distribute`` strategy other than ``OneDeviceStrategy``.
        """
        refuse_strategies("sok.OptimizerWrapper cannot take a step")
        pairs = [(_of_own_rows(g, v) if isinstance(v, ShardedVariable) else g, v) for g, v in grads_and_vars]
        with self._counting():
            return super().apply_gradients(pairs, *args, **kwargs)

    @tf.autograph.experimental.do_not_convert  # as of the wrapper: AutoGraph cannot take all of what follows
    def _apply(self, apply: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        if any(rowless_variables.has_no_rows(v) for _, v in pairs):
            apply = rowless_variables.passing_over(apply, self._core)
        return super()._apply(apply, pairs, *args, **kwargs)


def _of_own_rows(gradient: Any, variable: ShardedVariable) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if rowless_variables.has_no_rows(variable):
        return rowless_variables.gradient_without_rows(variable)
    rows, where = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, where, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


class SGD(optimizers.SGD):
    """Stochastic gradient descent without momentum: row -= lr * gradient.

    Args:
      lr: the learning rate; see `tfplugin.optimizers.SGD`.
      name: of the optimizer.

    Example:
      >>> optimizer = sok.SGD(lr=0.1)
      >>> optimizer.apply_gradients(zip(grads, [v]))
    """

    def __init__(self, lr: Any, name: str = "SGD") -> None:
        super().__init__(lr, name=name)

    @property
    def lr(self) -> Any:
        """The learning rate; may be assigned."""
        return self.learning_rate

    @lr.setter
    def lr(self, value: Any) -> None:
        self.learning_rate = value
