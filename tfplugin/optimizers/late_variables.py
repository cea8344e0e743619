"""Lets a Keras optimizer meet variables later than at its first step.

A Keras 3 or tf_keras optimizer refuses variables that it was not built with. Programs that keep embeddings apart apply
one optimizer to them and to the rest of the model in two calls, so that in neither are all of them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable.base import Trackable

from tfplugin.optimizers.generic_update import StepVariable, one_row_shown
from tfplugin.wrapped_method import weak_method

_Key = tuple[int, str]


class _Place:
    """Stands for a slot where an optimizer is asked only where it puts which."""

    def __init__(self, key: _Key) -> None:
        self.key = key


class _Slots:
    """The slots that an optimizer has made, by variable and name. It gets them again when it asks again."""

    def __init__(self, optimizer: Any) -> None:
        self._stock = weak_method(optimizer.add_variable_from_reference)
        self._made: dict[_Key, tuple[Any, Any]] = {}
        self._only_asks = False
        # What the optimizer has already: its lists of slots, and the number in them of each variable.
        self._lists = {name: list(value) for name, value in vars(optimizer).items() if isinstance(value, list)}
        self._numbers = dict(getattr(optimizer, "_index_dict", getattr(optimizer, "_trainable_variables_indices", {})))

    def __call__(self, variable: Any = None, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        variable = kwargs.pop("reference_variable", kwargs.pop("model_variable", variable))
        name = kwargs.pop("name", kwargs.pop("variable_name", name)) or "var"
        key = (id(variable), name)
        if self._only_asks:
            return _Place(key)
        if key not in self._made:
            # With the variable, so that its id stays its own.
            self._made[key] = (variable, self._stock(variable, name, *args, **kwargs))
        return self._made[key][1]

    def remember(self, variable: Any, name: str, slot: Any) -> None:
        """Notes a slot that was made elsewhere."""
        self._made[id(variable), name] = (variable, slot)

    def of(self, variable: Any) -> dict[str, Any]:
        """The slots of a variable, by name."""
        return {name: slot for (_, name), (owner, slot) in self._made.items() if owner is variable}

    def find(self, optimizer: Any, build: Callable[[Any], Any], variable: Any) -> None:
        """Notes the slots that an optimizer made for a variable before this object came: its lists hold them."""
        number = self._numbers.get(optimizer._var_key(variable))
        if number is None:
            return
        self._only_asks = True
        try:
            build([variable])
        finally:
            self._only_asks = False
        for name, slots in self._lists.items():
            for place in getattr(optimizer, name):
                if isinstance(place, _Place) and number < len(slots):
                    self._made[place.key] = (variable, slots[number])


def accept(optimizer: Any) -> None:
    """Has this optimizer take new variables at any step, also where it is called directly. Its slots stay."""
    if "_kv_slots" in vars(optimizer) or not hasattr(optimizer, "add_variable_from_reference"):
        return
    slots = _Slots(optimizer)
    held, stock_build = weakref.ref(optimizer), weak_method(optimizer.build)
    known: list[Any] = []
    object.__setattr__(optimizer, "_kv_slots", slots)
    object.__setattr__(optimizer, "add_variable_from_reference", slots)

    def build(variables: Sequence[Any]) -> None:
        _set_built(held(), False)
        with one_row_shown(variables), _state_kept(held()):
            stock_build(variables)
        _set_built(held(), True)

    def extend(variables: Sequence[Any]) -> None:
        ids = {id(variable) for variable in known}
        new = [variable for variable in variables if id(variable) not in ids]
        if not new:
            return
        with tf.init_scope():
            for variable in new:
                slots.find(held(), build, variable)
            # Dense variables first, as `OptimizerWrapper` has them: their places name them in checkpoints.
            known.extend(new)
            known.sort(key=lambda variable: isinstance(variable, StepVariable))
            build(list(known))

    extend.keeps_update = True  # type: ignore[attr-defined]  # for `fused_rule_of`
    if hasattr(optimizer, "_check_variables_are_known"):  # Keras 3
        object.__setattr__(optimizer, "_check_variables_are_known", extend)
    else:
        object.__setattr__(optimizer, "build", extend)


@contextlib.contextmanager
def _state_kept(optimizer: Any) -> Iterator[None]:
    """Keeps, while an optimizer is built again, what it has beside slots: the product of momenta of Nadam.

    ``build`` makes it anew. The new one would start over, and in a checkpoint be a second one.
    """
    kept = {name: value for name, value in vars(optimizer).items() if _is_variable(value) or type(value) is int}
    tracker = getattr(optimizer, "_tracker", None)  # of Keras 3: lists each variable that becomes an attribute
    if tracker is not None:
        track = tracker.track
        tracker.track = lambda value: value if _is_variable(value) else track(value)
    try:
        yield
    finally:
        if tracker is not None:
            del tracker.track
        for name, value in kept.items():
            if getattr(optimizer, name) is not value:
                setattr(optimizer, name, value)


def _is_variable(value: Any) -> bool:
    """Of TensorFlow or of Keras 3."""
    return isinstance(value, tf.Variable) or (isinstance(value, Trackable) and hasattr(value, "assign"))


def _set_built(optimizer: Any, built: bool) -> None:
    for attribute in ("built", "_built"):
        if hasattr(optimizer, attribute):
            setattr(optimizer, attribute, built)
