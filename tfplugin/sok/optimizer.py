"""`sok.OptimizerWrapper` and `sok.SGD`: optimizers for variables of sok and others, in one list or in two."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin import optimizers
from tfplugin.sok.distributed_variable import ShardedVariable


class OptimizerWrapper(optimizers.OptimizerWrapper):
    """Lets an optimizer update `DynamicVariable` s, `Variable` s and dense variables.

    Every rank updates the rows that it holds. Gradients of dense variables are this rank's own: reduce them first, with
    ``hvd.DistributedGradientTape`` or ``hvd.allreduce``. The variables may come in one call or in several. Each call
    counts as a step of the optimizer: where that matters, as it does for Adam, give all variables to one call.

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

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Applies gradients; equal rows in the gradient of a `Variable` are summed first.

        Keras optimizers would take each occurrence of a row for a step of its own.
        """
        pairs = [(_summed(g) if isinstance(v, ShardedVariable) else g, v) for g, v in grads_and_vars]
        return super().apply_gradients(pairs, *args, **kwargs)


def _summed(gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
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
