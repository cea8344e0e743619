"""Which optimizer has which of the slots in a variable's rows.

Slots are named ``<prefix>.<slot>``, and the prefix is the optimizer's: its name, with a number where another live
optimizer of the variable has that name. In eager mode a checkpoint that is restored brings slots whose names say
nothing of objects. So the optimizer that is restored along with the variable gets them, even where an older one is
alive and has had the name until then (a notebook's cell run twice). An optimizer whose prefix has a number notes that
in its checkpoints.

Slots of an optimizer that is gone are nobody's: the next one of that name starts with fresh ones (eager mode), as it
does with those of dense variables. Whether the old object is gone must not depend on when Python collects garbage.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import re
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable import base as trackable

from tfplugin.ops import raw
from tfplugin.slots import SlotSpec

_log = logging.getLogger("tfplugin")

_CHILD = "kv_slot_names"


class _Prefixes(tf.train.experimental.PythonState):
    """In an optimizer's checkpoint: its prefix in each variable where that is not its plain name."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def serialize(self) -> str:
        return json.dumps(self.of, sort_keys=True)

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        """For asynchronous checkpoints: it is on the CPU."""

    def deserialize(self, string_value: Any) -> None:
        self.of = dict(json.loads(tf.compat.as_str(string_value)))


class _Binding:
    """What is known of the slots of a variable, and of its last restore if there was one."""

    def __init__(self) -> None:
        self.uid = -1  # of the last restore
        self.bound: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # optimizer -> restore
        self.bases: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # optimizer -> its name
        self.in_functions: set[str] = set()  # prefixes that traced functions have
        self.unclaimed: tuple[SlotSpec, ...] = ()  # slots that came and have not been asked for yet
        # Since then:
        self.had: set[str] = set()  # prefixes that an optimizer has or had
        self.attached = False  # whether one has said what it keeps, as its first step does


_bindings: weakref.WeakKeyDictionary[Any, _Binding] = weakref.WeakKeyDictionary()

_collected_for: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers for whose sake garbage was collected


def prefix_of(variable: Any, optimizer: Any, name: str) -> str:
    """The prefix of an optimizer's slots in `variable`, unique among the live optimizers of the variable."""
    base = re.sub(r"[./\s]", "_", name) or "Optimizer"
    prefixes = variable._row_slots.prefix_of
    if not variable._eager:
        if optimizer not in prefixes:
            prefixes[optimizer] = _free(prefixes, base)
        return str(prefixes[optimizer])
    state = _bindings.setdefault(variable, _Binding())
    state.bases[optimizer] = base
    if state.uid >= 0 and state.bound.get(optimizer) != state.uid and state.uid in _restores_of(optimizer, variable):
        _rebind(variable, optimizer, base, state)
    prefix = prefixes.get(optimizer)
    if prefix is None:
        if base in prefixes.values() and optimizer not in _collected_for:
            # The one that has the name may have been replaced, and wait for the collector: models are full of cycles.
            _collected_for.add(optimizer)
            gc.collect()
        prefix = _free(prefixes, base)
        if prefix in state.had or state.attached:
            _start_fresh(variable, prefix, state)
        prefixes[optimizer] = prefix
        state.had.add(prefix)
        _note(variable, optimizer, prefix, base)
    if not tf.executing_eagerly():
        state.in_functions.add(prefix)
    return str(prefix)


def current(variable: Any, optimizer: Any) -> tuple[SlotSpec, ...] | None:
    """The slots that an optimizer has said it keeps in the rows of `variable`, by the names that they have now.

    A restore may have given them others since the optimizer's last step. None of one that has said nothing, or whose
    slots went to another one that was restored.
    """
    state = _bindings.get(variable)
    if state is not None and optimizer in variable._row_slots.of and optimizer in state.bases:
        prefix_of(variable, optimizer, state.bases[optimizer])
    found: tuple[SlotSpec, ...] | None = variable._row_slots.of.get(optimizer)
    return found


def slots_there(variable: Any) -> tuple[SlotSpec, ...]:
    """The slots that the rows of `variable` have now (eager mode)."""
    return tuple(SlotSpec(**slot) for slot in json.loads(variable.slots().numpy()))


def prefix_in_use(variable: Any, optimizer: Any) -> str | None:
    """The prefix of the slots that an optimizer has in `variable`; None where it has none."""
    found = variable._row_slots.prefix_of.get(optimizer) if optimizer is not None else None
    return None if found is None else str(found)


def take_over(variable: Any, optimizer: Any, prefix: str) -> None:
    """Gives an optimizer the slots of a prefix, which a file brought, also where another one had that prefix."""
    if variable._row_slots.prefix_of.get(optimizer) != prefix:
        _give(variable, optimizer, prefix)
        _note(variable, optimizer, prefix, type(optimizer).__name__)


def restored(variable: Any, uid: int) -> None:
    """Says that a checkpoint has filled the rows of `variable`. `uid` is TensorFlow's number of the restore."""
    if not variable._eager or not tf.executing_eagerly():
        return
    state = _bindings.setdefault(variable, _Binding())
    state.uid = uid
    state.unclaimed = slots_there(variable)
    state.had.clear()
    state.attached = False
    held = {name.partition(".")[0] for name in variable.slot_names()}
    lost = sorted(prefix for prefix in state.in_functions - held if _has_slots(variable, prefix))
    if held and lost:
        _log.warning(
            "Key-value variable '%s': functions were traced with the slots of %s, and the restored rows have those of "
            "%s: in those functions the slots start fresh. Trace (take the first step) after restoring.",
            variable.name,
            ", ".join(lost),
            ", ".join(sorted(held)),
        )


def unclaimed(variable: Any, optimizer: Any, specs: Sequence[SlotSpec]) -> tuple[SlotSpec, ...]:
    """Slots that a step of `optimizer`, which has `specs`, leaves to optimizers that have not taken one yet.

    Of one that was restored with the table and finds its own slots there. Any other is a change of optimizers, and
    what nobody has is dropped.
    """
    state = _bindings.get(variable)
    if state is None:
        return ()
    state.attached = True
    if not state.unclaimed:
        return ()
    found = not specs or not {spec.name for spec in specs}.isdisjoint({slot.name for slot in state.unclaimed})
    if not found or state.uid not in _restores_of(optimizer, variable):
        state.unclaimed = ()
    claimed = {spec.name for every in variable._row_slots.of.values() for spec in every}
    return tuple(slot for slot in state.unclaimed if slot.name not in claimed)


def drop_slots(variable: Any, prefix: str | None = None) -> tuple[SlotSpec, ...]:
    """Takes slots out of the rows of `variable`, those of one prefix, or all: which they were."""
    with tf.init_scope():
        there = slots_there(variable)
        others = tuple(slot for slot in there if prefix is not None and slot.name.partition(".")[0] != prefix)
        if len(others) == len(there):
            return ()
        variable._row_slots.replace(others)
        raw.kv_table_read_rows(
            variable.handle,
            tf.zeros([0], variable.key_dtype),
            dtype=variable.dtype,
            slots="[]",
            **variable._row_slots.attributes(),
            widths=[variable.dim],
            N=1,
        )
    return tuple(slot for slot in there if slot not in others)


def _start_fresh(variable: Any, prefix: str, state: _Binding) -> None:
    """Drops the slots of an optimizer that is gone, which the next one of its name is not to find."""
    dropped = drop_slots(variable, prefix)
    if not dropped:
        return
    state.unclaimed = tuple(slot for slot in state.unclaimed if slot not in dropped)
    _log.warning(
        "Key-value variable '%s': a new optimizer takes the place of one that is gone, and its slots (%s) start fresh.",
        variable.name,
        ", ".join(slot.name for slot in dropped),
    )


def _has_slots(variable: Any, prefix: str) -> bool:
    return any(spec.name.partition(".")[0] == prefix for specs in variable._row_slots.of.values() for spec in specs)


def _free(prefixes: Any, base: str) -> str:
    taken = set(prefixes.values())
    prefix, number = base, 0
    while prefix in taken:
        number += 1
        prefix = f"{base}_{number}"
    return prefix


def _rebind(variable: Any, optimizer: Any, base: str, state: _Binding) -> None:
    """Gives an optimizer the slots that it was restored with, unless another one that was, too, has them."""
    prefixes = variable._row_slots.prefix_of
    wanted = _saved_prefix(variable, optimizer, state.uid) or base
    state.bound[optimizer] = state.uid
    if any(p == wanted and o is not optimizer and state.bound.get(o) == state.uid for o, p in prefixes.items()):
        return
    _give(variable, optimizer, wanted)
    _note(variable, optimizer, wanted, base)


def _give(variable: Any, optimizer: Any, prefix: str) -> None:
    """Has the slots of an optimizer named by `prefix`, which another one has no longer."""
    prefixes, held = variable._row_slots.prefix_of, variable._row_slots.of
    for other, taken in list(prefixes.items()):
        if taken == prefix and other is not optimizer:
            del prefixes[other]
            held.pop(other, None)
    prefixes[optimizer] = prefix
    _bindings.setdefault(variable, _Binding()).had.add(prefix)
    if optimizer in held:
        held[optimizer] = tuple(
            dataclasses.replace(spec, name=f"{prefix}.{spec.name.partition('.')[2]}") for spec in held[optimizer]
        )


def _restores_of(optimizer: Any, variable: Any) -> set[int]:
    """The last restore of an optimizer, or of the step count that `apply_in_backward` keeps instead."""
    objects = [optimizer]
    if variable._in_backward is not None:
        objects.append(variable._in_backward.step)
    return {getattr(owner, "_self_update_uid", -1) for owner in objects}


def _key(variable: Any) -> str:
    return variable.partitioned_name or variable._name


def _note(variable: Any, optimizer: Any, prefix: str, base: str) -> None:
    if not isinstance(optimizer, trackable.Trackable):
        return
    noted = _noted(optimizer) if prefix == base else _prefixes(optimizer)
    if noted is not None:
        noted.of.pop(_key(variable), None)
        if prefix != base:
            noted.of[_key(variable)] = prefix


def _noted(optimizer: Any) -> _Prefixes | None:
    """The optimizer's note, if it has one."""
    optimizer._maybe_initialize_trackable()
    found: _Prefixes | None = optimizer._lookup_dependency(_CHILD)
    return found


def _prefixes(optimizer: Any) -> _Prefixes:
    """The optimizer's note, made and filled from what it has been restored from."""
    found = _noted(optimizer)
    if found is None:
        found = _Prefixes()
        optimizer._track_trackable(found, _CHILD)
        optimizer._handle_deferred_dependencies(_CHILD, found)
    return found


def _saved_prefix(variable: Any, optimizer: Any, uid: int) -> str | None:
    """What the checkpoint of restore `uid` says of the optimizer's prefix."""
    if not isinstance(optimizer, trackable.Trackable):
        return None
    if _noted(optimizer) is None and _CHILD not in optimizer._self_unconditional_deferred_dependencies:
        return None
    note = _prefixes(optimizer)
    return note.of.get(_key(variable)) if note._self_update_uid == uid else None
