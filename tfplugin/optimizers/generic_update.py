"""The generic update: the rows of one step as dense variables, for an optimizer to update with its own ops.

A step reads value and slots of the keys in its gradient, hands them to the optimizer as resource variables that live
for this step alone, lets it apply its dense update, and writes the rows back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import resource_variable_ops

from tfplugin.kv_variable import KvVariable, takes_float32
from tfplugin.ops import raw
from tfplugin.optimizers.update_lock import locked_updates
from tfplugin.slots import SlotSpec


class StepVariable(resource_variable_ops.BaseResourceVariable):
    """A variable whose storage is bound anew for each step: `rows` of a table, [n, width].

    Optimizers keep variables in lists and dictionaries by identity, so this object stays while what it names changes.
    The binding is per thread.
    """

    stands_for_table = True
    overwrite_with_gradient = False  # Keras 3.3 to 3.7 ask each variable

    def __init__(self, name: str, width: int, dtype: tf.DType) -> None:
        self._bound = threading.local()
        super().__init__(
            handle=None,
            trainable=True,
            shape=tf.TensorShape([None, width]),
            dtype=dtype,
            name=f"{name}:0",
            handle_name=f"{name}:0",
            unique_id=f"{name}_{tf_ops.uid()}",
            in_graph_mode=False,
        )

    @property
    def _handle(self) -> tf.Tensor:
        handle = getattr(self._bound, "handle", None)
        if handle is None:
            raise AttributeError(f"the rows of '{self._handle_name}' are bound only while a step applies gradients")
        return handle

    @_handle.setter
    def _handle(self, handle: tf.Tensor | None) -> None:
        self._bound.handle = handle

    @property
    def _distribute_strategy(self) -> Any:
        """That of the step, as `OneDeviceStrategy`: legacy optimizers of tf_keras update its own variables only."""
        return tf.distribute.get_strategy() if tf.distribute.has_strategy() else None

    @_distribute_strategy.setter
    def _distribute_strategy(self, strategy: Any) -> None:
        """Where any resource variable says which strategy it was made under: this one goes with the step."""

    def assign(
        self, value: Any, use_locking: bool | None = None, name: str | None = None, read_value: bool = True
    ) -> Any:
        """As of any resource variable."""
        self._check_bound()
        op = raw.kv_table_assign_step_variable(self.handle, tf.convert_to_tensor(value, self.dtype), name=name)
        return self._lazy_read(op) if read_value else op

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        """As of any resource variable."""
        self._check_bound()
        return super()._read_variable_op(no_copy)

    def _check_bound(self) -> None:
        """Raises ValueError where there are no rows, as while an optimizer makes its slots."""
        if not getattr(self._bound, "has_rows", False):
            raise ValueError(
                f"'{self.name.partition(':')[0]}' stands for rows of a key-value variable, and has values only while a "
                "step updates them: an optimizer cannot read or assign them otherwise, as to have its slots start from "
                "the values of its variables. Slots of rows start from a constant. Give the layer that holds the "
                "key-value variable an optimizer of its own, as in tfplugin.keras.Embedding(dim, optimizer='adam')."
            )

    # Optimizers track the variables in their lists; this one has nothing to save. The table keeps the rows.

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return {}

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        """For asynchronous checkpoints: there is nothing to copy."""

    def _export_to_saved_model_graph(self, object_map: Any, tensor_map: Any, **kwargs: Any) -> list[tf.Tensor]:
        object_map[self] = self
        return []

    def _write_object_proto(self, proto: Any, options: Any) -> None:
        proto.user_object.identifier = "tfplugin.StepVariable"

    def bind(self, rows: tf.Tensor) -> None:
        """Names `rows` from here on."""
        self._handle = raw.kv_table_step_variable(rows)
        self._bound.has_rows = True

    def unbind(self) -> None:
        """Lets the rows go."""
        self._handle = None
        self._bound.has_rows = False


class RowUpdate:
    """What one optimizer does to one variable: its slots, and the step variables they pass through."""

    def __init__(self, variable: KvVariable, prefix: str) -> None:
        self.variable = variable
        self.prefix = prefix
        self.specs: list[SlotSpec] = []
        name = f"{variable.name.removesuffix(':0')}/{prefix}_rows"
        self.value = StepVariable(name, variable.dim, variable.dtype)
        self.slots: list[StepVariable] = []
        self.keys: tf.Tensor | None = None
        self.unique = False
        #: Where the optimizer gathers gradients over steps, and where it has moving averages.
        self.accumulated: Any = None
        self.averages: Any = None

    def rename(self, prefix: str) -> None:
        """Has the slots lie under another prefix from here on; see `tfplugin.slot_binding`."""
        if prefix == self.prefix:
            return
        self.specs = [
            dataclasses.replace(spec, name=f"{prefix}{spec.name.removeprefix(self.prefix)}") for spec in self.specs
        ]
        self.prefix = prefix

    def add_slot(self, name: str, constant: float) -> StepVariable:
        """A slot named by the optimizer, once."""
        full = f"{self.prefix}.{name.replace('/', '_')}"
        for spec, slot in zip(self.specs, self.slots, strict=True):
            if spec.name == full:
                return slot
        slot = StepVariable(
            f"{self.value._handle_name.removesuffix(':0')}/{name}", self.variable.dim, self.variable.dtype
        )
        self.specs.append(SlotSpec(full, self.variable.dim, "constant", constant))
        self.slots.append(slot)
        return slot

    def bind(self, optimizer: Any) -> None:
        """Binds the rows of `keys`, which are unique."""
        columns = self.variable.read_rows(self.keys, optimizer, self.specs)
        for step_variable, rows in zip((self.value, *self.slots), columns, strict=True):
            step_variable.bind(rows)

    def stand_for_table(self) -> None:
        """Names the table where a device or a colocation is asked for, until `bind` names rows."""
        self.value._handle = self.variable.handle

    def run_stock(self, optimizer: Any, gradients: tf.Tensor, update: Any, decay: Any = None) -> Any:
        """Has `update`, a function of the gradient, move the rows of `keys`. Returns the op (graph mode).

        Equal keys are summed first unless `unique` says that they are. `decay`, if any, comes before; the variable's
        constraint after. From reading the rows to writing them no other such update of the table is under way.
        """
        if not self.unique:
            self.keys, gradients = sum_equal_keys(self.keys, gradients)
        if gradients.shape[0] == 0:  # Keras 3 adds two empty matrices as a matrix and a bias, which they are not
            return None if tf.executing_eagerly() else tf.no_op()
        gradients = tf.cast(gradients, self.variable.dtype)
        with _outside_of_xla(), locked_updates(self.variable, after=gradients) as finish:
            self.bind(optimizer)
            try:
                if decay is not None:
                    decay()
                updated = update(gradients)
                ordered = isinstance(updated, (tf.Operation, tf.Tensor)) and not tf.executing_eagerly()
                with tf.control_dependencies([updated] if ordered else []):
                    constrained = None
                    if self.variable.constraint is not None:
                        constrained = self.value.assign(self.variable.constraint(self.value), read_value=False)
                    with tf.control_dependencies([constrained] if isinstance(constrained, tf.Operation) else []):
                        return finish(self.write())
            finally:
                self.unbind()
                self.stand_for_table()

    def write(self) -> Any:
        """Writes the updated rows back. Returns the op (graph mode)."""
        rows = [step_variable.read_value() for step_variable in (self.value, *self.slots)]
        return self.variable.write_rows(self.keys, rows, self.specs)

    def unbind(self) -> None:
        """Lets this step's rows go."""
        for step_variable in (self.value, *self.slots):
            step_variable.unbind()


@contextlib.contextmanager
def one_row_shown(variables: Sequence[Any]) -> Iterator[None]:
    """Has step variables say that they hold one row: some optimizers compute a slot's initial value from the shape."""
    shapes = [(v, v._shape) for v in variables if isinstance(v, StepVariable)]
    for variable, shape in shapes:
        variable._shape = tf.TensorShape([1, shape[1]])
    try:
        yield
    finally:
        for variable, shape in reversed(shapes):
            variable._shape = shape


def _outside_of_xla() -> contextlib.AbstractContextManager[None]:
    """Where XLA is to compile what it can (`tf.xla.experimental.jit_scope`): not what reads a `StepVariable`."""
    scopes = {} if tf.executing_eagerly() else tf_ops.get_default_graph()._attr_scope_map
    if "_XlaCompile" not in scopes:
        return contextlib.nullcontext()
    scope: contextlib.AbstractContextManager[None] = tf.xla.experimental.jit_scope(compile_ops=False)
    return scope


def row_gradient(variable: KvVariable, gradient: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Keys [n] and rows [n, dim] of a gradient, of dtypes that fit the variable, as they came: with duplicates.

    Raises:
      TypeError: the gradient is not an IndexedSlices, or its indices are not keys of the variable.
      ValueError: its rows are of another width.
    """
    if not isinstance(gradient, tf.IndexedSlices):
        raise TypeError(
            f"The gradient of key-value variable '{variable.name}' must be IndexedSlices (keys and rows), got "
            f"{type(gradient).__name__}: a table has no dense gradient."
        )
    width = gradient.values.shape[-1]
    if gradient.values.shape.rank not in (2, None) or width not in (variable.dim, None):
        raise ValueError(
            f"The gradient of key-value variable '{variable.name}' has rows of shape "
            f"{gradient.values.shape[1:]}, expected ({variable.dim},)."
        )
    return variable.keys_tensor(gradient.indices), fitting(variable, gradient.values)


def fitting(variable: KvVariable, rows: tf.Tensor) -> tf.Tensor:
    """Gradient rows as the variable takes them: of its dtype, or, where it is of 16 bits, of float32 as they came."""
    return rows if rows.dtype == tf.float32 and takes_float32(variable) else tf.cast(rows, variable.dtype)


def sum_equal_keys(keys: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Unique keys, and the sum of the rows of each: of 16 bits it is rounded once."""
    unique, where = tf.unique(keys)
    exact = tf.float32 if rows.dtype in (tf.float16, tf.bfloat16) else rows.dtype
    # Not tf.size, which TensorFlow computes as 0 in a branch of a tf.cond that assigns the keys to a variable.
    sums = tf.math.unsorted_segment_sum(tf.cast(rows, exact), where, tf.shape(unique)[0])
    return unique, tf.cast(sums, rows.dtype)


def stands_for_table(variable: Any) -> bool:
    """Whether what an optimizer sees as a dense variable is rows of a key-value variable."""
    return getattr(variable, "stands_for_table", False)


def any_key_value(grads_and_vars: Sequence[tuple[Any, Any]]) -> bool:
    """Whether any variable in the list is a key-value variable."""
    return any(isinstance(v, KvVariable) for _, v in grads_and_vars)


def constant_of(value: Any, what: str) -> float:
    """The one number a slot starts from: `value` is a number, an array, a Tensor, a variable, or a function of one.

    Raises:
      ValueError: its elements differ, or are known only at run time.
    """
    try:
        if callable(value) and not tf.is_tensor(value):
            with context.eager_mode():
                value = value()
        if isinstance(value, tf.Variable):
            value = value.read_value()
        if not tf.is_tensor(value):
            array = np.asarray(value)
        elif isinstance(value, tf_ops.EagerTensor):
            array = value.numpy()
        else:
            array = tf.get_static_value(value)
            if array is None:
                with tf.compat.v1.Session(graph=value.graph) as session:
                    array = session.run(value)
    except (tf.errors.OpError, RuntimeError) as error:
        raise ValueError(f"{what} starts from a value that is known only at run time: {error}") from error
    flat = array.astype(np.float64).reshape(-1)
    if flat.size == 0 or (flat != flat[0]).any():
        raise ValueError(
            f"{what} starts from values that are not one constant; a key-value variable keeps slots that start from "
            "a constant."
        )
    return float(flat[0])


#: These take norms or factors over all rows of a matrix.
COUPLES_ROWS = ("Adafactor", "Muon")


def couples_rows(optimizer: Any, such: Sequence[str] = COUPLES_ROWS) -> str | None:
    """The name of the class of an optimizer whose update of a row depends on other rows."""
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    return next((name for name in names if name in such), None)
