"""`DynamicEmbeddingOptimizer`: any optimizer of TensorFlow or Keras on dynamic embedding variables."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.training import optimizer as v1_optimizer

from tfplugin import row_handles
from tfplugin.dynamic_embedding import hkv_table, tfra_optimizers
from tfplugin.dynamic_embedding.slot_arrays import restore_slots, slot_arrays
from tfplugin.dynamic_embedding.slot_variable import SlotVariable, slot_variables
from tfplugin.dynamic_embedding.trainable import TrainableWrapper
from tfplugin.dynamic_embedding.variable import Variable
from tfplugin.ops import raw
from tfplugin.optimizers import fused as fusing
from tfplugin.optimizers.inner_optimizer import innermost
from tfplugin.optimizers.wrapper import OptimizerWrapper
from tfplugin.wrapped_method import weak_method

Pairs = list[tuple[Any, Any]]


# ---- From gradients of lookups to gradients of tables ----


def _slices(gradient: Any, trainable: TrainableWrapper) -> tf.IndexedSlices:
    """Keys and rows of a gradient, which may also come dense, a row for each of the trainable's ids."""
    if isinstance(gradient, tf.IndexedSlices):
        return gradient
    params = trainable.params
    rows = tf.reshape(tf.convert_to_tensor(gradient, params.value_dtype), [-1, params.dim])
    return tf.IndexedSlices(rows, tf.reshape(params.keys_tensor(trainable.ids), [-1]))


def _joined(slices: Sequence[tf.IndexedSlices]) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor | None]:
    """Keys, rows, and where the keys lie if that is known, of all lookups of one variable."""
    where = [row_handles.recall(one.indices) for one in slices]
    if len(slices) == 1:
        return slices[0].indices, slices[0].values, where[0]
    keys = tf.concat([one.indices for one in slices], 0)
    rows = tf.concat([one.values for one in slices], 0)
    return keys, rows, None if any(one is None for one in where) else tf.concat(where, 0)


def _part_gradients(
    params: Variable, keys: tf.Tensor, rows: tf.Tensor, where: tf.Tensor | None
) -> list[tf.IndexedSlices]:
    """The gradient of each table."""
    if params._one is not None:
        if where is not None and row_handles.recall(keys) is None:
            row_handles.remember(keys, where)
        return [tf.IndexedSlices(rows, keys)]
    if params._by_modulo and params.names is None:
        tables = params.shard_num
        split = raw.kv_table_split_gradients(
            [keys],
            [rows],
            [tf.zeros([0], tf.int64) if where is None else where],
            H=tables,
            parts=[tables],
            dims=[params.dim],
        )
        found = list(zip(*split, strict=True))
    else:
        columns = (rows,) if where is None else (rows, where)
        split = [[keys, *columns, None]] if params.shard_num == 1 else params.split(keys, *columns)
        found = [(part_keys, columns[0], columns[1] if where is not None else None) for part_keys, *columns, _ in split]
    slices = []
    for table, (part_keys, part_rows, part_where) in zip(params.tables, found, strict=True):
        part_keys = part_keys if params.names is None else table.ids(part_keys)
        if where is not None:
            row_handles.remember(part_keys, part_where)
        slices.append(tf.IndexedSlices(part_rows, part_keys))
    return slices


def _check_looked_up(pairs: Pairs) -> None:
    """Raises ValueError for what `get_trainable_by_name` gave under a name that no lookup has."""
    for gradient, variable in pairs:
        if gradient is None and isinstance(variable, TrainableWrapper) and variable.awaited:
            store = variable.params.trainable_store
            names = sorted(name for name, other in store.items() if not other.awaited)
            raise ValueError(
                f"{variable!r} is not trained: get_trainable_by_name has it waiting for a lookup of that name, and "
                f"there was none. The lookups of the variable are named {', '.join(map(repr, names)) or 'nothing yet'}."
            )


def table_gradients(grads_and_vars: Iterable[tuple[Any, Any]]) -> tuple[Pairs, list[tuple[Variable, tf.Tensor]]]:
    """Gradients in which tables stand for trainables, and the keys that each variable is updated at.

    All lookups of a variable are one update, in which the gradients of equal keys are summed.
    """
    pairs: Pairs = []
    of_variable: dict[int, tuple[int, Variable, list[tf.IndexedSlices]]] = {}
    for gradient, variable in grads_and_vars:
        if not isinstance(variable, TrainableWrapper):
            pairs.append((gradient, variable))
            continue
        params = variable.params
        if not params.trainable:
            continue
        if id(params) not in of_variable:
            of_variable[id(params)] = (len(pairs), params, [])
            pairs += [(None, part) for part in params.parts]
        if gradient is not None:
            of_variable[id(params)][2].append(_slices(gradient, variable))
    touched = []
    for at, params, slices in of_variable.values():
        if slices:
            keys, rows, where = _joined(slices)
            for i, gradient in enumerate(_part_gradients(params, keys, rows, where)):
                pairs[at + i] = (gradient, params.parts[i])
            touched.append((params, keys))
    return pairs, touched


def _after_update(touched: Sequence[tuple[Variable, tf.Tensor]], core: Any) -> list[Any]:
    """Notes the names of new string keys, scores in bounded tables, and what restrict policies keep of all keys.

    Returns ops (graph mode).
    """
    noted = []
    for params, keys in touched:
        policy = params.restrict_policy
        noted += hkv_table.note_updates(params, keys)
        if params.names is not None:
            noted.append(params.names.note(params.tables[0].ids(keys), keys))
        if policy is not None:
            policy.track_slots(list(slot_variables(params, core)))
            noted.append(policy.apply_update(tf.unique(keys)[0]))
    return [op for op in noted if op is not None]


# ---- The optimizers ----

_MOMENTS = {"momentum": "m", "velocity": "v", "velocity_hat": "vhat"}
#: What tables call the slots of Keras 3's optimizers: as tf_keras and TFRA's checkpoints do.
_KERAS_3_SLOTS = {
    "Adam": _MOMENTS,
    "Nadam": _MOMENTS,
    "Lamb": _MOMENTS,
    "SGD": {"momentum": "m"},
    "Lion": {"momentum": "m"},
}


def _summed_over_ranks(pairs: Pairs) -> Pairs:
    """Gradients of dense variables summed over Horovod's ranks."""
    try:
        hvd = importlib.import_module("horovod.tensorflow")
    except ImportError as error:
        raise ValueError(
            f"DynamicEmbeddingOptimizer(synchronous=True) needs Horovod ({error}): kvtools setup-horovod builds it."
        ) from error
    if hvd.size() == 1:
        return pairs
    return [(g if g is None or isinstance(v, TrainableWrapper) else hvd.allreduce(g, op=hvd.Sum), v) for g, v in pairs]


def _over_ranks(pairs: Pairs, synchronous: bool | None) -> Pairs:
    """Gradients as they are applied on each of Horovod's ranks, where tables are spread over them.

    Warns where nobody has said what becomes of dense variables, of which each rank has its own gradient.
    """
    if synchronous:
        return _summed_over_ranks(pairs)
    tables = [part for _, v in pairs if isinstance(v, TrainableWrapper) for part in v.params.parts]
    if synchronous is None and any(part.ranks > 1 for part in tables):
        dense = [v for gradient, v in pairs if gradient is not None and not isinstance(v, TrainableWrapper)]
        if dense:
            warnings.warn(
                f"DynamicEmbeddingOptimizer: '{getattr(dense[0], 'path', dense[0].name)}' and {len(dense) - 1} more "
                "dense variables are updated by the gradients of this rank alone, and will differ between the ranks: "
                "make the optimizer with DynamicEmbeddingOptimizer(optimizer, synchronous=True), which sums these "
                "gradients over the ranks, as those of rows are; or with synchronous=False where they come reduced, or "
                "where each rank is to have dense variables of its own.",
                stacklevel=2,
            )
    return pairs


class _Trains:
    """What an optimizer is given beside its own methods: it takes trainables where it takes variables."""

    _de_synchronous: bool | None = None

    def get_slot(self, var: Any, *args: Any, **kwargs: Any) -> Any:
        """As of the optimizer; of a trainable, a `SlotVariable`."""
        if not isinstance(var, TrainableWrapper):
            return super().get_slot(var, *args, **kwargs)  # type: ignore[misc]
        name = args[0] if args else kwargs.get("name", kwargs.get("slot_name"))
        return next((slot for slot in _slots(self, var.params) if slot.slot_name == name), None)

    def _create_or_restore_slot_variable(
        self, slot_variable_position: Any, slot_name: str, variable: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """What checkpoints have of slots of a trainable is not restored by this way: they lie in the table."""
        if not isinstance(variable, TrainableWrapper):
            return super()._create_or_restore_slot_variable(  # type: ignore[misc]
                slot_variable_position, slot_name, variable, *args, **kwargs
            )
        # TFRA's have a dense variable without rows, ours name the slot and nothing in it.
        return None if slot_variable_position.is_simple_variable() else self.get_slot(variable, slot_name)


def _slots(optimizer: Any, params: Variable) -> list[SlotVariable]:
    return list(slot_variables(params, innermost(optimizer)))


class _TrainsV1(_Trains):
    """For ``tf.compat.v1.train`` optimizers, and those of `tfplugin.optimizers`."""

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        pairs = list(grads_and_vars)
        if not any(isinstance(v, TrainableWrapper) for _, v in pairs):
            return super().apply_gradients(pairs, global_step, name)  # type: ignore[misc]
        _check_looked_up(pairs)
        pairs, touched = table_gradients(_over_ranks(pairs, self._de_synchronous))
        applied = super().apply_gradients(pairs, global_step, name)  # type: ignore[misc]
        ordered = [applied] if applied is not None and not tf.executing_eagerly() else []
        with tf.control_dependencies(ordered):
            noted = _after_update(touched, innermost(self))
        if not noted or tf.executing_eagerly():
            return applied
        return tf.group(applied, *noted)


class _TablesWrapper(OptimizerWrapper):
    """Applies gradients of trainables for a Keras optimizer, which holds this object and is not held by it."""

    def __init__(self, optimizer: Any) -> None:
        object.__setattr__(self, "_self_setattr_tracking", False)
        super().__init__(optimizer)

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self._held()

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        object.__setattr__(self, "_held", weakref.ref(optimizer))

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        pairs = _over_ranks(pairs, self.optimizer._de_synchronous)
        if all(gradient is None for gradient, _ in pairs):
            names = ", ".join(str(variable.name) for _, variable in pairs)
            raise ValueError(
                f"No gradients provided for any variable: {names}. The loss has to be made of lookups of them."
            )
        _check_looked_up(pairs)
        _note_tables(self._core, (variable for _, variable in pairs))
        pairs, touched = table_gradients(pairs)
        applied = super().apply_gradients(pairs, *args, **kwargs)
        graph = not tf.executing_eagerly() and not tf_ops.inside_function()
        ordered = [applied] if graph and isinstance(applied, (tf.Operation, tf.Tensor)) else []
        with tf.control_dependencies(ordered):
            noted = _after_update(touched, self._core)
        return tf.group(applied, *noted) if graph and noted else applied


class _TrainsKeras(_Trains):
    """For optimizers of Keras 3 and tf_keras."""

    _de_wrapper: _TablesWrapper

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        pairs = list(grads_and_vars)
        if not any(isinstance(v, TrainableWrapper) for _, v in pairs):
            return super().apply_gradients(pairs, *args, **kwargs)  # type: ignore[misc]
        return self._de_wrapper.apply_gradients(pairs, *args, **kwargs)

    def minimize(self, loss: Any, var_list: Any = None, tape: Any = None, **kwargs: Any) -> Any:
        """One step: gradients of `loss` (a function, or a Tensor with its `tape`), then `apply_gradients`."""
        return self._de_wrapper.minimize(loss, var_list, tape, **kwargs)

    def finalize_variable_values(self, var_list: Any) -> None:
        """As of the optimizer, by which ``fit`` ends: with ``use_ema`` weights and rows become their averages."""
        dense = [variable for variable in var_list if not isinstance(variable, TrainableWrapper)]
        super().finalize_variable_values(dense)  # type: ignore[misc]

    # ---- In checkpoints of TFRA --------------------------------------------------------------------------------------

    def _kv_about_to_be_restored(self, position: Any) -> None:
        tfra_optimizers.leave_out_tables(position)

    # ---- In the file of a model --------------------------------------------------------------------------------------

    def save_own_variables(self, store: Any) -> None:
        """As of the optimizer; and its slots of tables."""
        super().save_own_variables(store)  # type: ignore[misc]
        for number, params in enumerate(_tables_of(self)):
            for name, column in slot_arrays(params).items():
                # HDF5 has no bfloat16, of which float32 holds every value.
                narrow = column.dtype == tf.bfloat16.as_numpy_dtype
                store[f"table{number}:{name}"] = column.astype(np.float32) if narrow else column

    def load_own_variables(self, store: Any) -> None:
        """As of the optimizer; and its slots of tables."""
        own = {name: store[name] for name in store.keys() if not name.startswith("table")}  # noqa: SIM118
        super().load_own_variables(own)  # type: ignore[misc]
        for number, params in enumerate(_tables_of(self)):
            prefix = f"table{number}:"
            names = [name for name in store.keys() if name.startswith(prefix)]  # noqa: SIM118
            if names:
                restore_slots(params, {name.removeprefix(prefix): np.asarray(store[name]) for name in names})

    def get_config(self) -> dict[str, Any]:
        """As of the optimizer, and what `DynamicEmbeddingOptimizer` was given."""
        given = {"synchronous": self._de_synchronous, "bp_v2": self._bp_v2}  # type: ignore[attr-defined]
        told = {name: value for name, value in given.items() if value or (name, value) == ("synchronous", False)}
        return {**super().get_config(), **told}  # type: ignore[misc]

    @classmethod
    def from_config(cls, config: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Makes the optimizer again, which trains tables, too."""
        stock = dict(config)
        given = {"synchronous": stock.pop("synchronous", None), "bp_v2": stock.pop("bp_v2", False)}
        return DynamicEmbeddingOptimizer(cls._de_stock.from_config(stock, *args, **kwargs), **given)  # type: ignore[attr-defined]


class _TrainsKeras3(_TrainsKeras):
    """For those of Keras 3."""

    @property
    def loss_scale_factor(self) -> Any:
        """As of the optimizer."""
        # The LossScaleOptimizer that `compile` puts around this one under mixed_float16 sets it when it is made, which
        # reads it first; in no other way do we learn of that one. The gradients of tables come to it: it has to know
        # tables, too.
        frame = sys._getframe(1)
        while frame is not None and frame.f_code.co_name in ("__setattr__", "__init__"):
            outer = frame.f_locals.get("self")
            if outer is not self and vars(outer).get("inner_optimizer") is self:
                DynamicEmbeddingOptimizer(outer, self._bp_v2, self._de_synchronous)  # type: ignore[attr-defined]
                break
            frame = frame.f_back  # type: ignore[assignment]
        return vars(self).get("loss_scale_factor")

    @loss_scale_factor.setter
    def loss_scale_factor(self, value: Any) -> None:
        vars(self)["loss_scale_factor"] = value


def _note_tables(optimizer: Any, variables: Iterable[Any]) -> None:
    """Notes the variables behind trainables, in the order in which a model has them."""
    noted = vars(optimizer).setdefault("_de_tables", {})
    for variable in variables:
        if isinstance(variable, TrainableWrapper):
            noted.setdefault(id(variable.params), variable.params)


def _tables_of(optimizer: Any) -> list[Variable]:
    """Those; none of an optimizer that has another one inside."""
    return list(vars(optimizer).get("_de_tables", {}).values())


_classes: dict[tuple[type, type], type] = {}


def _with_methods(optimizer: Any, methods: type, attributes: dict[str, Any]) -> Any:
    """Makes the class of this one object a subclass that has `methods` before its own; of the same name."""
    optimizer.__class__ = _class_with(type(optimizer), methods)
    for name, value in attributes.items():
        object.__setattr__(optimizer, name, value)
    return optimizer


def _class_with(cls: type, methods: type) -> type:
    """That subclass. Keras finds those of its own optimizers again when it reads the file of a model."""
    made = _classes.get((cls, methods))
    if made is None:
        about = {"__module__": cls.__module__, "__doc__": cls.__doc__, "_de_stock": cls}
        made = _classes[cls, methods] = type(cls.__name__, (methods, cls), about)
        root = next((m for c in cls.__mro__ if (m := c.__module__.split(".")[0]) in ("keras", "tf_keras")), None)
        if root is not None:
            name = cls.__name__ if cls.__module__.startswith(f"{root}.") else f"{cls.__module__}.{cls.__qualname__}"
            # tf_keras has a second Adam, and a second of most others.
            name = f"legacy.{name}" if ".legacy." in cls.__module__ else name
            package = "tfplugin.dynamic_embedding"
            importlib.import_module(root).utils.register_keras_serializable(package, name)(made)
    return made


def register_optimizers(keras: Any) -> None:
    """Has `keras`, ``tf.keras`` or ``tf_keras``, know its optimizers with our methods in the files of models."""
    optimizers = [cls for cls in vars(keras.optimizers).values() if isinstance(cls, type)]
    for cls in optimizers:
        if issubclass(cls, keras.optimizers.Optimizer) and cls is not keras.optimizers.Optimizer:
            _class_with(cls, _methods_for(cls))


def _methods_for(cls: type) -> type:
    return _TrainsKeras3 if hasattr(cls, "_check_variables_are_known") else _TrainsKeras


def _build_without_trainables(optimizer: Any) -> None:
    """Has an optimizer make no slots for trainables when Keras builds it for a model: the tables have them."""
    if not hasattr(optimizer, "build") or "_de_built" in vars(optimizer):  # tf_keras.optimizers.legacy; once
        return
    object.__setattr__(optimizer, "_de_built", True)
    stock = optimizer.build if "build" in vars(optimizer) else weak_method(optimizer.build)

    held = weakref.ref(optimizer)

    def build(variables: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        _note_tables(innermost(held()), variables)
        return stock([v for v in variables if not isinstance(v, TrainableWrapper)], *args, **kwargs)

    build.keeps_update = True  # type: ignore[attr-defined]  # for `fused_rule_of`
    object.__setattr__(optimizer, "build", build)


def DynamicEmbeddingOptimizer(self: Any, bp_v2: bool = False, synchronous: bool | None = None, **kwargs: Any) -> Any:
    """Lets an optimizer train what `embedding_lookup` returns with ``return_trainable=True``, and shadow variables.

    Applying a gradient inserts all keys that were looked up, those whose gradient is zero included, and updates each
    once. Where the table engine knows the optimizer it is one fused op; see `tfplugin.explain`.

    Args:
      self: of ``tf.compat.v1.train``, ``tf_keras.optimizers``, ``tf.keras.optimizers`` (Keras 3) or
        `tfplugin.optimizers`.
      bp_v2: accepted; see `Variable`.
      synchronous: True: gradients of dense variables are summed over Horovod's ranks before they are applied, as those
        of rows are; False: they are applied as they come. Default: as False, with a warning where tables are spread
        over several ranks, since dense variables differ between these from then on.
      kwargs: not used.

    Returns:
      The same optimizer, which has `minimize` and `apply_gradients`, Keras 3's too.

    Raises:
      TypeError: not an optimizer.

    Example:
      >>> optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam(1e-3))
      >>> optimizer.minimize(lambda: loss(ids), var_list=[params.get_eager_trainable_by_name("user")])
    """
    del kwargs
    optimizer = self.optimizer if isinstance(self, OptimizerWrapper) else self
    synchronous = None if synchronous is None else bool(synchronous)
    attributes: dict[str, Any] = {"_de_synchronous": synchronous, "_bp_v2": bool(bp_v2)}
    if isinstance(optimizer, _Trains):
        for name, value in attributes.items():
            object.__setattr__(optimizer, name, value)
        return optimizer
    if isinstance(optimizer, v1_optimizer.Optimizer):
        return _with_methods(optimizer, _TrainsV1, attributes)
    if (
        isinstance(optimizer, type)
        or not hasattr(optimizer, "apply_gradients")
        # Not hasattr: it has an optimizer of tf_keras.optimizers.legacy make its hyperparameters, eagerly perhaps.
        or "learning_rate" not in dir(optimizer)
    ):
        raise TypeError(f"DynamicEmbeddingOptimizer wants an optimizer, got {type(self).__name__}.")
    wrapper: Callable[..., Any] = _TablesWrapper
    optimizer = _with_methods(optimizer, _methods_for(type(optimizer)), attributes)
    object.__setattr__(optimizer, "_de_wrapper", wrapper(optimizer))
    core = innermost(optimizer)
    names = next((_KERAS_3_SLOTS[cls.__name__] for cls in type(core).__mro__ if cls.__name__ in _KERAS_3_SLOTS), {})
    _build_without_trainables(core)
    if optimizer is not core and hasattr(core, "_check_variables_are_known"):
        _build_without_trainables(optimizer)
    if hasattr(core, "_check_variables_are_known"):  # Keras 3
        fusing.set_options(core, dataclasses.replace(fusing.options_of(core), slot_names=names))
    return optimizer
