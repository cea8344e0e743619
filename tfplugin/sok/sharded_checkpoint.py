"""How static variables spread over ranks, and what optimizers keep for them, stand in TensorFlow's checkpoints.

A checkpoint holds the whole, [rows, dim], as it would for a ``tf.Variable`` of that shape. Each rank restores its own
rows of it, which this module tells TensorFlow how to do; `sok.Checkpoint` saves.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.saved_model import registration

from kvtools.dialects.bundle.reader import Bundle
from tfplugin.optimizers import late_variables
from tfplugin.saveable import not_by_one_rank
from tfplugin.sok.distributed_variable import ShardedVariable

#: How TensorFlow calls the saver that is registered below.
SAVER = "tfplugin.ShardedVariable"
#: What a checkpoint calls the value of a variable.
VALUE = "VARIABLE_VALUE"

_CHUNK_BYTES = 16 << 20


class _Slots:
    """Which variables hold what an optimizer keeps for the local rows of which static variable."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[weakref.ref[Any], weakref.ref[ShardedVariable]]] = {}
        self.making = threading.local()

    def note(self, slot: Any, variable: ShardedVariable) -> None:
        """`slot` is one of `variable`."""
        for held in (slot, getattr(slot, "_value", None)):  # a Keras variable and that of TensorFlow in it
            if held is not None:
                gone = weakref.finalize(held, self._by_id.pop, id(held), None)
                gone.atexit = False
                self._by_id[id(held)] = (weakref.ref(held), weakref.ref(variable))

    def variable_of(self, slot: Any) -> ShardedVariable | None:
        """The static variable that something is a slot of."""
        known = self._by_id.get(id(slot))
        if known is not None and known[0]() is slot:
            return known[1]()
        variable: ShardedVariable | None = getattr(self.making, "variable", None)
        if variable is not None and hasattr(slot, "assign") and getattr(slot, "shape", None) == variable.shape:
            self.note(slot, variable)
            return variable
        return None

    @contextlib.contextmanager
    def made_for(self, variable: ShardedVariable) -> Iterator[None]:
        """While a slot is made: it is restored before its maker has it."""
        self.making.variable = variable
        try:
            yield
        finally:
            self.making.variable = None


_slots = _Slots()


def whole_of(obj: Any) -> ShardedVariable | None:
    """The variable spread over ranks that something is the local rows of, or a slot of them."""
    if isinstance(obj, ShardedVariable):
        return obj if obj.num_gpus > 1 else None
    return _slots.variable_of(obj)


def spread(obj: Any) -> ShardedVariable:
    """As `whole_of`, of what is known to be one of these."""
    variable = whole_of(obj)
    if variable is None:
        raise TypeError(f"{obj!r} is not spread over ranks")
    return variable


def note_slots(slots: Mapping[str, Any], variable: ShardedVariable) -> None:
    """These hold what an optimizer keeps for the local rows of `variable`."""
    if variable.num_gpus > 1:
        for slot in slots.values():
            _slots.note(slot, variable)


def watch(optimizer: Any) -> None:
    """Notes the slots that an optimizer makes from here on, so that they restore as they are made.

    Args:
      optimizer: the one that updates variables, without wrappers.
    """
    if vars(optimizer).get("_kv_slots_watched"):
        return
    if hasattr(optimizer, "_create_all_weights"):  # tf_keras.optimizers.legacy
        _watch_legacy(optimizer)
    elif hasattr(optimizer, "add_variable_from_reference"):
        late_variables.accept(optimizer)
        made = optimizer._kv_slots
        stock = made._stock

        def make(variable: Any, *args: Any, **kwargs: Any) -> Any:
            if not _is_spread(variable):
                return stock(variable, *args, **kwargs)
            with _slots.made_for(variable):
                slot = stock(variable, *args, **kwargs)
            _slots.note(slot, variable)
            return slot

        made._stock = make
    else:
        return
    object.__setattr__(optimizer, "_kv_slots_watched", True)


def _watch_legacy(optimizer: Any) -> None:
    add, create_or_restore = optimizer.add_slot, optimizer._create_or_restore_slot_variable

    def add_slot(var: Any, slot_name: str, *args: Any, **kwargs: Any) -> Any:
        if not _is_spread(var):
            return add(var, slot_name, *args, **kwargs)
        with _slots.made_for(var):
            slot = add(var, slot_name, *args, **kwargs)
        _slots.note(slot, var)
        return slot

    def create_or_restore_slot_variable(
        slot_variable_position: Any, slot_name: str, variable: Any, *args: Any, **kwargs: Any
    ) -> Any:
        # It would be made from the checkpoint's value, of the whole.
        key = variable._unique_id if _is_spread(variable) else None
        if key is not None and slot_name not in optimizer._slots.get(key, {}):
            add_slot(variable, slot_name)
        return create_or_restore(slot_variable_position, slot_name, variable, *args, **kwargs)

    object.__setattr__(optimizer, "add_slot", add_slot)
    object.__setattr__(optimizer, "_create_or_restore_slot_variable", create_or_restore_slot_variable)


def _is_spread(variable: Any) -> bool:
    return isinstance(variable, ShardedVariable) and variable.num_gpus > 1


# ---- What TensorFlow calls ------------------------------------------------------------------------------------------


def _save(trackables: Mapping[str, Any], file_prefix: tf.Tensor) -> list[tf.Tensor]:
    name, obj = next(iter(trackables.items()))
    raise not_by_one_rank(f"'{getattr(obj, 'name', name)}'", spread(obj).num_gpus)


def _restore(trackables: Mapping[str, Any], merged_prefix: tf.Tensor) -> None:
    bundle = Bundle(Path(tf.get_static_value(merged_prefix).decode()))
    for name, obj in trackables.items():
        variable = spread(obj)
        obj.assign(own_rows(bundle, name, obj, variable))


def own_rows(bundle: Bundle, name: str, obj: Any, variable: ShardedVariable) -> tf.Tensor:
    """This rank's rows of a tensor of the whole.

    Raises:
      ValueError: the tensor is of another shape or dtype.
    """
    tensor, dtype = bundle.tensor(name), tf.as_dtype(obj.dtype)
    shape = (tensor.rows, *tensor.row_shape)
    if shape != variable.global_shape or tensor.dtype != dtype.as_numpy_dtype:
        raise ValueError(
            f"'{obj.name}' is {dtype.name} {list(variable.global_shape)} over all ranks, the checkpoint's '{name}' is "
            f"{tensor.dtype.name} {list(shape)}: make the variable as it was when saved."
        )
    mine = variable.global_rows()
    rows = np.empty((len(mine), shape[1]), tensor.dtype)
    if len(mine):
        at_once = max(1, _CHUNK_BYTES // (shape[1] * tensor.dtype.itemsize))
        first = 0
        for chunk in tensor.chunks(at_once):
            begin, end = np.searchsorted(mine, [first, first + len(chunk)])
            rows[begin:end] = chunk[mine[begin:end] - first]
            first += len(chunk)
    return tf.constant(rows, dtype)


registration.register_checkpoint_saver(
    package="tfplugin",
    name="ShardedVariable",
    predicate=lambda obj: whole_of(obj) is not None,
    save_fn=_save,
    restore_fn=_restore,
    strict_predicate_restore=False,
)
