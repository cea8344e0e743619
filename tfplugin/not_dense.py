"""What a dense variable has and a key-value variable has not: errors that say what to use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.client import session

_WRAP = (
    "Keras optimizers know dense variables only. Wrap this one, and give the wrapper key-value and dense variables "
    "together: {wrapper}(optimizer).apply_gradients(...)"
)
_WRITES = (
    "to replace rows use upsert(keys, rows), to add to them accumulate(keys, deltas), to subtract accumulate(keys, "
    "-deltas); for anything else read them with sparse_read(keys, training=False), change them and upsert them"
)
_ALL_ROWS = "it holds a row for each key it has met: take all of them with export(), or some with sparse_read(keys)"
_AVERAGES = (
    "give the parts, [*variable]. tf.train.ExponentialMovingAverage, which asks for it, averages dense variables only: "
    "leave key-value variables out of its list"
)
_INSTEAD = {
    "op": f"there is none in eager mode, nor of a variable in parts: where an op is asked for, {_AVERAGES}",
    "ref": f"there is none of a variable in parts: where a reference is asked for, {_AVERAGES}",
    **dict.fromkeys(("value", "read_value", "numpy", "eval", "initial_value", "initialized_value"), _ALL_ROWS),
    "path": "that is of Keras 3's own variables: tell variables by their name",
    "_distribute_strategy": _WRAP,
    **dict.fromkeys(("assign", "assign_add", "assign_sub"), _WRITES),
    **dict.fromkeys(
        [f"scatter_nd_{what}" for what in ("update", "add", "sub", "min", "max")] + ["batch_scatter_update"],
        _WRITES,
    ),
}


#: Where a Keras optimizer takes a variable that it is to update, or looks for what it keeps for it. It asks for the
#: same elsewhere, too, and rightly: where it excludes variables from weight decay.
_KERAS_STEP = (
    *("build", "_build_index_dict", "_check_variables_are_known", "_get_variable_index"),
    *("update_step", "_update_step"),
)


def _in_a_keras_step(asks: FrameType) -> bool:
    """Whether `asks`, who wants to know which variable it is, is a Keras optimizer about to update a table.

    That is the first thing it wants to know. Without an error there, some other one would follow from within.
    """
    module = str(asks.f_globals.get("__name__"))
    if not module.startswith(("keras.src.", "tf_keras.src.optimizers.optimizer")):
        return False
    caller: FrameType | None = asks
    while caller is not None and caller.f_code.co_name == "_var_key":
        caller = caller.f_back
    return caller is not None and caller.f_code.co_name in _KERAS_STEP


def _in_a_legacy_step(asks: FrameType) -> bool:
    """Whether `asks`, who wants to know a device, is an optimizer of `tf_keras.optimizers.legacy` about to take a step.

    One that keeps nothing for a variable, as SGD, asks for nothing else before it hands the table to TensorFlow's op.
    """
    module = str(asks.f_globals.get("__name__"))
    return module.startswith("tf_keras.src.optimizers.legacy.") and asks.f_code.co_name == "_prepare"


class NoArray:
    """What NumPy and `len` make nothing of. It is true nevertheless."""

    name: Any
    #: What to do with rows.
    _all_rows = _ALL_ROWS

    @property
    def __array_interface__(self) -> NoReturn:
        # NumPy asks for it before it takes parts for a sequence. What has an `__array__` is a tensor to `tf.function`.
        raise TypeError(f"Key-value variable '{self.name}' has no dense value to make an array of: {self._all_rows}.")

    def __len__(self) -> int:
        raise TypeError(f"Key-value variable '{self.name}' has no fixed length: size() says how many rows it has.")

    def __bool__(self) -> bool:
        return True


class NotDense(NoArray):
    """Says what to use in the place of methods that other variables have. They are absent to ``hasattr``."""

    #: What has a Keras optimizer update it.
    _optimizer_wrapper = "tfplugin.OptimizerWrapper"

    def _refuse_step(self) -> NoReturn:
        wrap = _WRAP.format(wrapper=self._optimizer_wrapper)
        raise TypeError(f"Key-value variable '{self.name}' in the step of a Keras optimizer: {wrap}.")

    def _check_asks_for_device(self, asks: FrameType) -> None:
        """Raises TypeError where the device of a table is asked for by what cannot update it."""
        if _in_a_legacy_step(asks):
            self._refuse_step()

    @property
    def _unique_id(self) -> str:
        if _in_a_keras_step(sys._getframe(1)):
            self._refuse_step()
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
            f"its own methods of these names do; or {_WRITES}."
        )

    def __getitem__(self, keys: Any) -> Any:
        raise TypeError(
            f"Key-value variable '{self.name}' has no positions to take rows by: look rows up by their keys with "
            "tf.nn.embedding_lookup(variable, keys), or take all of them with export()."
        )

    def __copy__(self) -> Any:
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            f"Key-value variable '{self.name}' cannot be pickled. Pickle the model or layer of Keras 3 that holds it, "
            "or its rows, [column.numpy() for column in variable.export()], which upsert takes; or save it by "
            "tf.train.Checkpoint, with its slots. copy.deepcopy copies it."
        )

    def __getattr__(self, attribute: str) -> Any:
        instead = _INSTEAD.get(attribute)
        if instead is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{attribute}'")
        instead = instead.format(wrapper=self._optimizer_wrapper)
        raise AttributeError(f"Key-value variable '{self.name}' has no '{attribute}': {instead}.")


def _refuse_arithmetic(variable: Any, *others: Any) -> NoReturn:
    raise TypeError(
        f"Key-value variable '{variable.name}' has no dense value to compute with: {_ALL_ROWS}. A penalty of "
        "the rows of a step is the regularizer of the variable, or of the layer that holds it."
    )


for _operator in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    setattr(NotDense, f"__{_operator}__", _refuse_arithmetic)
    setattr(NotDense, f"__r{_operator}__", _refuse_arithmetic)
NotDense.__neg__ = NotDense.__abs__ = _refuse_arithmetic  # type: ignore[attr-defined]


def _refuse_fetch(variable: Any, *_: Any) -> NoReturn:
    raise TypeError(
        f"Key-value variable '{variable.name}' has no dense value for a session to fetch or to be fed: {_ALL_ROWS}, "
        "and run these."
    )


# Without this a session gives the bytes of the table's handle.
session.register_session_run_conversion_functions(NotDense, _refuse_fetch, _refuse_fetch, _refuse_fetch)


def refuse_jacobian(
    original: Callable[..., Any], tape: Any, target: Any, source: Any, *args: Any, **kwargs: Any
) -> Any:
    """``jacobian`` and ``batch_jacobian`` of a tape, which have a place for each number of what they are taken by."""
    for variable in tf.nest.flatten(source):
        if isinstance(variable, NotDense):
            raise TypeError(
                f"Key-value variable '{variable.name}' has no Jacobian: it has no number of rows. Take that by rows "
                "that were looked up: rows = tf.nn.embedding_lookup(variable, ids); tape.watch(rows); ...; "
                "tape.jacobian(target, rows)."
            )
    return original(tape, target, source, *args, **kwargs)
