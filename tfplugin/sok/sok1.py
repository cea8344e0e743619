"""The names of SparseOperationKit 1 that SparseOperationKit 2 has not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfplugin import ranks
from tfplugin.sok.initialize import init
from tfplugin.sok.optimizer import OptimizerWrapper
from tfplugin.sok.variables import split_embedding_variable_from_others

#: Where each Keras has its optimizers' `apply_gradients`.
_OPTIMIZERS = (
    ("keras.src.optimizers.base_optimizer", "BaseOptimizer"),
    ("tf_keras.src.optimizers.optimizer", "Optimizer"),
    ("tf_keras.src.optimizers.legacy.optimizer_v2", "OptimizerV2"),
    ("tf_keras.src.mixed_precision.loss_scale_optimizer", "LossScaleOptimizer"),
    ("tf_keras.src.mixed_precision.loss_scale_optimizer", "LossScaleOptimizerV3"),
)


def Init(**kwargs: Any) -> tf.Tensor:
    """Finds out which rank this process is, as `init` does.

    Args:
      **kwargs: ``global_batch_size``, and what else `sok.Init` of SparseOperationKit 1 takes, without effect: lookups
        take batches of any size, and initial values depend on the key and on the variable's name and seed.

    Returns:
      ``b"OK"``: a scalar string, which a session can run.

    Raises:
      RuntimeError: inside the scope of a ``tf.distribute.Strategy``; ``hvd.init()`` has not been called.
    """
    if tf.distribute.has_strategy():
        raise RuntimeError(
            "sok.Init: a tf.distribute.Strategy is not supported. Ranks are processes here: start them with "
            "horovodrun, call hvd.init() in each, and sok.Init() outside of a strategy's scope."
        )
    init("horovod" if ranks.launched_ranks() > 1 or "horovod.tensorflow" in sys.modules else "single")
    return tf.constant("OK")


class OptimizerScope:
    """Inside it, optimizers of Keras update variables of sok as if `OptimizerWrapper` was around them.

    Args:
      trainable_variables: a list or tuple with the variables.

    Raises:
      RuntimeError: not a list or tuple.

    Example:
      >>> embeddings, others = sok.split_embedding_variable_from_others(model.trainable_variables)
      >>> with sok.OptimizerScope(embeddings):
      ...     embedding_optimizer.apply_gradients(zip(embedding_gradients, embeddings))
    """

    def __init__(self, trainable_variables: Any) -> None:
        if not isinstance(trainable_variables, (list, tuple)):
            raise RuntimeError(
                f"sok.OptimizerScope wants a list or tuple of variables, got {type(trainable_variables).__name__}."
            )
        self._ours = {id(v) for v in split_embedding_variable_from_others(trainable_variables)[0]}
        self._stock: dict[type, Any] = {}
        self._in_wrapper = False

    def __enter__(self) -> OptimizerScope:
        for module, name in _OPTIMIZERS:
            owner = getattr(sys.modules.get(module), name, None)
            if owner is not None:
                self._stock[owner] = vars(owner)["apply_gradients"]
                owner.apply_gradients = self._instead_of(self._stock[owner])
        return self

    def __exit__(self, *exception: Any) -> None:
        while self._stock:
            owner, stock = self._stock.popitem()
            owner.apply_gradients = stock  # type: ignore[attr-defined]

    def _instead_of(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def apply_gradients(optimizer: Any, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
            pairs = list(grads_and_vars)
            # The wrapper calls its optimizer, which comes here again.
            if self._in_wrapper or not any(id(v) in self._ours for _, v in pairs):
                return stock(optimizer, pairs, *args, **kwargs)
            wrapper = vars(optimizer).get("_sok_wrapper")
            if wrapper is None:
                wrapper = OptimizerWrapper(optimizer)
                object.__setattr__(optimizer, "_sok_wrapper", wrapper)
            self._in_wrapper = True
            try:
                return wrapper.apply_gradients(pairs, *args, **kwargs)
            finally:
                self._in_wrapper = False

        return apply_gradients
