"""What a dense variable has and a key-value variable has not: errors that say what to use."""

from __future__ import annotations

import sys
from typing import Any

_WRAP = (
    "Keras optimizers know dense variables only. Wrap this one, and give the wrapper key-value and dense variables "
    "together: tfplugin.OptimizerWrapper(optimizer).apply_gradients(...)"
)
_WRITES = (
    "to replace rows use upsert(keys, rows), to add to them accumulate(keys, deltas), to subtract accumulate(keys, "
    "-deltas); for anything else read them with sparse_read(keys, training=False), change them and upsert them"
)
_ALL_ROWS = "it holds a row for each key it has met: take all of them with export(), or some with sparse_read(keys)"
_INSTEAD = {
    "op": "in eager mode there is none. tf.train.ExponentialMovingAverage, which asks for it, averages dense variables "
    "only: leave key-value variables out of its list",
    **dict.fromkeys(("value", "read_value", "numpy", "eval", "initial_value", "initialized_value"), _ALL_ROWS),
    "_distribute_strategy": _WRAP,
    **dict.fromkeys(("assign", "assign_add", "assign_sub"), _WRITES),
    **dict.fromkeys(
        [f"scatter_{what}" for what in ("update", "add", "sub", "mul", "div", "min", "max")]
        + [f"scatter_nd_{what}" for what in ("update", "add", "sub", "min", "max")]
        + ["batch_scatter_update"],
        _WRITES,
    ),
}


class NotDense:
    """Says what to use in the place of methods that other variables have. They are absent to ``hasattr``."""

    name: Any

    @property
    def _unique_id(self) -> str:
        # The first thing that a Keras optimizer asks of a variable; in its place, some error from within would follow.
        caller = str(sys._getframe(1).f_globals.get("__name__"))
        if caller.startswith(("keras.src.", "tf_keras.src.optimizers.optimizer")):
            raise TypeError(f"Key-value variable '{self.name}' in the step of a Keras optimizer: {_WRAP}.")
        try:
            return str(self.__dict__["_unique_id"])
        except KeyError:
            raise AttributeError("_unique_id") from None

    @_unique_id.setter
    def _unique_id(self, value: str) -> None:
        self.__dict__["_unique_id"] = value

    @property
    def _lazy_read(self) -> Any:
        # The first thing that tf.compat.v1.scatter_update and its kin ask of a variable.
        raise TypeError(
            f"tf.compat.v1.scatter_update, scatter_add and their kin do not work on key-value variable '{self.name}': "
            f"{_WRITES}."
        )

    def __getattr__(self, attribute: str) -> Any:
        instead = _INSTEAD.get(attribute)
        if instead is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{attribute}'")
        raise AttributeError(f"Key-value variable '{self.name}' has no '{attribute}': {instead}.")
