"""Which slots the rows of a table have, and of which optimizer each is."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2

from tfplugin.slots import SlotSpec, slots_json


class RowSlots:
    """What optimizers keep in the rows of one table, in the order in which they came.

    An optimizer is gone when its object is. In a graph its ops outlive it, and it stays as long as they do.

    Args:
      eager: whether the table is of eager mode.

    Attributes:
      of: the slots of each optimizer.
      prefix_of: what their names begin with; see `slot_binding`.
      every: those of all optimizers; None before the first.
      generation: how often `every` has changed.
    """

    def __init__(self, eager: bool) -> None:
        by_optimizer = weakref.WeakKeyDictionary if eager else dict
        self.of: MutableMapping[Any, tuple[SlotSpec, ...]] = by_optimizer()
        self.prefix_of: MutableMapping[Any, str] = by_optimizer()
        self.every: tuple[SlotSpec, ...] | None = None
        self.generation = 0
        self._steps: list[tf.Operation] = []

    def update(self, unclaimed: tuple[SlotSpec, ...]) -> None:
        """Has the rows get the slots in `of`, and keep those that nobody has claimed: by the next step."""
        every = tuple(spec for of_optimizer in self.of.values() for spec in of_optimizer) + unclaimed
        if every != self.every:
            self.replace(every)

    def replace(self, every: tuple[SlotSpec, ...]) -> None:
        """Has the rows have these slots, by the next step."""
        self.every = every
        self.generation += 1
        # A graph's steps run in any order, the first of them on a table that was just restored with the slots of all:
        # each has to know the optimizers that came after it.
        for op in self._steps:
            op._set_attr("all_slots", attr_value_pb2.AttrValue(s=slots_json(every).encode()))
            op._set_attr("generation", attr_value_pb2.AttrValue(i=self.generation))

    def note_step(self, op: tf.Operation) -> None:
        """Keeps an op of a graph's step, whose attributes `update` has to keep up to date."""
        self._steps.append(op)

    def attributes(self) -> dict[str, Any]:
        """What the op of a step is told of all slots."""
        assert self.every is not None
        return {"all_slots": slots_json(self.every), "generation": self.generation}

    def width(self, name: str) -> int | None:
        """Elements of a slot; None where no optimizer has said."""
        widths = (spec.width for of_optimizer in self.of.values() for spec in of_optimizer if spec.name == name)
        return next(widths, None)
