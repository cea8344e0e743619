"""What an optimizer keeps for a variable, whichever optimizer it is, under the names that dumps give it."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
from tensorflow.python.training import optimizer as v1_optimizer

from tfplugin.kv_variable import KvVariable
from tfplugin.ops import raw
from tfplugin.optimizers import fused, late_variables
from tfplugin.optimizers.inner_optimizer import innermost
from tfplugin.optimizers.wrapper import OptimizerWrapper
from tfplugin.slots import SlotSpec

#: The optimizers that SparseOperationKit dumps. It takes the last one whose name is in that of the class, which makes
#: Adamax and AdamW "Adam".
SOK_OPTIMIZERS = ("SGD", "Adamax", "Adadelta", "Adagrad", "Ftrl", "Adam")

#: Slot names of Keras 3 and tf_keras -> those of tf_keras.optimizers.legacy, which dumps have.
_SLOT_NAMES = {
    "SGD": {"m": "momentum"},
    "Adam": {"momentum": "m", "velocity": "v", "velocity_hat": "vhat", "norm": "v", "u": "v"},
    "Adadelta": {"accumulated_grad": "accum_grad", "accumulated_delta_var": "accum_var"},
}


@dataclasses.dataclass(frozen=True)
class TableSlot:
    """A slot of a key-value variable: a column of its rows."""

    variable: KvVariable
    slot: str
    optimizer: Any

    @property
    def spec(self) -> SlotSpec:
        """By the name that it has now: a restore may give it another."""
        specs = table_specs(self.optimizer, self.variable)
        return next(spec for spec in specs if spec.name.partition(".")[2] == self.slot)

    @property
    def name(self) -> str:
        """``variable:0/Optimizer.slot``."""
        return f"{self.variable.name}/{self.spec.name}"

    @property
    def dtype(self) -> tf.DType:
        """That of the rows."""
        return self.variable.dtype

    def read(self, keys: tf.Tensor) -> tf.Tensor:
        """The slot's rows of keys [n], which it does not insert: [n, width]."""
        spec = self.spec
        with self._made():
            return raw.kv_table_read_column(
                self.variable.handle, keys, dtype=self.dtype, column=spec.name, width=spec.width
            )

    def export(self) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] of this rank and the slot's rows [N, width], each of one moment, in no particular order."""
        with self._made():
            return self.variable.export(self.spec.name)

    def _made(self) -> Any:
        """Has the table have the column: no step makes it on a rank that got no rows."""
        optimizer, none = core_of(self.optimizer), tf.zeros([0], self.variable.key_dtype)
        made = self.variable.read_rows(none, optimizer, table_specs(optimizer, self.variable))
        return tf.control_dependencies([] if tf.executing_eagerly() else made)

    def assign(self, keys: tf.Tensor, rows: Any) -> Any:
        """Writes the slot's rows [n, width] of keys [n] on this rank; a missing key gets a row. In a graph an op."""
        specs = table_specs(self.optimizer, self.variable)
        columns = list(self.variable.read_rows(keys, core_of(self.optimizer), specs))
        columns[1 + specs.index(self.spec)] = tf.convert_to_tensor(rows, self.dtype)
        return self.variable.write_rows(keys, columns, specs)


def core_of(optimizer: Any) -> Any:
    """The optimizer that updates variables, inside wrappers, those that scale the loss and those of Horovod."""
    while True:
        if isinstance(optimizer, OptimizerWrapper):
            optimizer = optimizer.optimizer
            continue
        inner = innermost(optimizer)
        if inner is optimizer and isinstance(inner, v1_optimizer.Optimizer):
            inner = getattr(optimizer, "_optimizer", optimizer)  # hvd.DistributedOptimizer
        if inner is optimizer:
            return optimizer
        optimizer = inner


def file_name(optimizer: Any) -> str:
    """What dumps call an optimizer: the name that SparseOperationKit knows, else that of its class."""
    name = type(core_of(optimizer)).__name__
    known = [one for one in SOK_OPTIMIZERS if one in name]
    return known[-1] if known else name


def slots_of(optimizer: Any, variable: Any) -> dict[str, Any]:
    """What `optimizer` keeps for `variable`, by the names that dumps have (``"m"``, ``"v"``, ``"accumulator"``).

    For a key-value variable a `TableSlot` each, also before the optimizer's first step. For another variable the
    optimizer's own variables; nothing before they are made.

    Example:
      >>> slots_of(tf_keras.optimizers.legacy.Adam(), static_variable)
      {'m': <tf.Variable ...>, 'v': <tf.Variable ...>}
    """
    core = core_of(optimizer)
    names = _SLOT_NAMES.get(file_name(core), {})
    if isinstance(variable, KvVariable):
        found: dict[str, Any] = {
            slot: TableSlot(variable, slot, core)
            for slot in (spec.name.partition(".")[2] for spec in table_specs(core, variable))
        }
    elif hasattr(core, "get_slot_names"):
        held = {
            name: core.get_slot(variable, name) for name in core.get_slot_names() if _has_slot(core, variable, name)
        }
        found = {name: slot for name, slot in held.items() if slot is not None}
    else:
        found = _keras_slots(core, variable)
    return {names.get(name, name): slot for name, slot in found.items()}


def _has_slot(core: Any, variable: Any, name: str) -> bool:
    slots = getattr(core, "_slots", {})
    if isinstance(core, v1_optimizer.Optimizer):
        return True
    return name in slots.get(getattr(variable, "_unique_id", None), {})


def table_specs(optimizer: Any, variable: KvVariable) -> tuple[SlotSpec, ...]:
    """The slots that `optimizer` keeps in the rows of `variable`, in its order; noted if it has taken no step yet."""
    core = core_of(optimizer)
    specs = variable.slots_of(core)
    if specs is not None:
        return specs
    own_name = core.get_name() if isinstance(core, v1_optimizer.Optimizer) else type(core).__name__
    prefix = variable.slot_prefix(core, own_name)
    plan = fused.plan(core, variable)
    if not isinstance(plan, str):
        specs = tuple(fused.slot_specs(plan, variable, prefix))
    else:
        specs = _specs_of_stock_update(core, variable, prefix)
    variable.attach_slots(core, specs)
    return specs


def _specs_of_stock_update(core: Any, variable: KvVariable, prefix: str) -> tuple[SlotSpec, ...]:
    """The slots of an optimizer whose own update runs on the rows, found by having a copy of it make them.

    The optimizer itself is left alone: a Keras one learns its variables once, and they are not all known here.
    """
    if not hasattr(core, "get_config"):
        raise ValueError(
            f"{type(core).__name__} has kept nothing for '{variable.name}' yet, and what it would keep is known only "
            "after its first step: take one step first."
        )
    copy = OptimizerWrapper(type(core).from_config(core.get_config()), fused=False)
    copy._build([(None, variable)])
    specs = copy._updates[variable].specs
    variable._row_slots.prefix_of.pop(copy._core, None)
    return tuple(dataclasses.replace(spec, name=f"{prefix}.{spec.name.partition('.')[2]}") for spec in specs)


def _keras_slots(core: Any, variable: Any) -> dict[str, Any]:
    """What an optimizer of Keras 3 or tf_keras keeps for a variable: its place in each list that has one for each."""
    made = getattr(core, "_kv_slots", None)  # see tfplugin.optimizers.late_variables
    slots = {} if made is None else made.of(variable)
    if slots or not is_built(core):
        return slots
    indices = getattr(core, "_trainable_variables_indices", None)  # Keras 3
    if indices is None:
        indices = core._index_dict
    place = indices.get(core._var_key(variable))
    if place is None:
        return {}
    owned = {id(one) for one in _listed_variables(core)}
    for attribute in vars(core).values():
        if not isinstance(attribute, (list, tuple)) or len(attribute) != len(indices):
            continue
        slot = attribute[place]
        if id(slot) in owned and tuple(getattr(slot, "shape", ())) == tuple(variable.shape):
            slots[_keras_slot_name(slot, variable)] = slot
    return slots


def _listed_variables(core: Any) -> list[Any]:
    # The property of Keras 3 unwraps nothing, that of tf_keras may be a method.
    listed = core._variables if hasattr(core, "_variables") else core.variables
    return list(listed() if callable(listed) else listed)


def _keras_slot_name(slot: Any, variable: Any) -> str:
    """``momentum`` of ``emb_0_momentum`` (Keras 3), ``momentum/emb`` or ``SGD/momentum/emb`` (tf_keras)."""
    name = str(slot.name)
    reference = getattr(variable, "path", None) or str(variable.name)
    for prefix in (reference.replace("/", "_") + "_", reference.replace("/", "_").replace(":", "_") + "_"):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name.partition(":")[0].removesuffix(f"/{reference.partition(':')[0]}").rpartition("/")[2]


def is_built(optimizer: Any) -> bool:
    """Whether a Keras optimizer has made its variables."""
    core = core_of(optimizer)
    return bool(getattr(core, "built", False) or getattr(core, "_built", False))


def make_slots(optimizer: Any, variables: list[Any]) -> None:
    """Has an optimizer make what it keeps for static variables, where it has not yet."""
    core = core_of(optimizer)
    if not variables:
        return
    if hasattr(core, "_create_all_weights"):  # tf_keras.optimizers.legacy
        core._create_all_weights(variables)
    elif isinstance(core, v1_optimizer.Optimizer):
        core._create_slots(variables)
    else:
        # Others may come later, see there.
        late_variables.accept(core)
        if is_built(core) and hasattr(core, "_check_variables_are_known"):  # Keras 3
            core._check_variables_are_known(variables)
        else:
            core.build(variables)
