"""`DEHvdBroadcastGlobalVariablesCallback`: the ranks start from the dense variables of one, as a callback of Keras."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfplugin import ranks
from tfplugin.dynamic_embedding.trainable import TrainableWrapper
from tfplugin.kv_variable import KvVariable


class _Broadcast:
    """What the callback does beside a Callback."""

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done = False
        self._local: list[Any] = []
        listed = isinstance(local_variables, Sequence)
        for variable in local_variables if listed else [local_variables]:
            if variable is not None:
                self.register_local_var(variable)

    def register_local_var(self, var: Any) -> None:
        """Leaves a variable to each rank."""
        self._local.append(var)

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        """After the first batch, when the optimizer has its variables, too."""
        del batch, logs
        if self.broadcast_done:
            return
        self.broadcast_done = True
        if ranks.found().size == 1:
            return
        model = self.model  # type: ignore[attr-defined]
        variables = {
            id(v): v
            for v in [*model.variables, *model.optimizer.variables]
            if not isinstance(v, (TrainableWrapper, KvVariable)) and not any(v is local for local in self._local)
        }
        hvd = importlib.import_module("horovod.tensorflow")
        with tf.device(self.device or None):
            # A variable of Keras 3 has one of TensorFlow in it.
            hvd.broadcast_variables([getattr(v, "_value", v) for v in variables.values()], root_rank=self.root_rank)


def broadcast_of(keras: Any, module: str) -> Any:
    """The callback for ``tf.keras`` (either kind) or ``tf_keras``. `module` is where it will be found."""
    return type(
        "DEHvdBroadcastGlobalVariablesCallback",
        (_Broadcast, keras.callbacks.Callback),
        {"__doc__": _DOC, "__module__": module},
    )


_DOC = """Gives all ranks the dense variables of one, and of its optimizer, after the first batch.

    Rows of embedding layers stay where they are. On one rank it does nothing.

    Args:
      root_rank: whose variables.
      device: where they are sent from.
      local_variables: one or several, which each rank keeps.

    Example:
      >>> model.fit(ids, targets, callbacks=[de.keras.callbacks.DEHvdBroadcastGlobalVariablesCallback()])
    """
