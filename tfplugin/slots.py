"""Optimizer slots of a key-value variable: what lies beside the value in each row."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class SlotSpec:
    """One slot.

    Attributes:
      name: ``<optimizer>.<slot>``, as in ``Adam.m``.
      width: elements per row.
      init: ``constant`` or ``copy_value`` (the row's value at the time).
      constant: what each element starts from.
    """

    name: str
    width: int
    init: str = "constant"
    constant: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The form of docs/checkpoint-layout.md."""
        out: dict[str, Any] = {"name": self.name, "width": self.width, "init": self.init}
        if self.init == "constant":
            out["constant"] = self.constant
        return out


def slots_json(specs: Sequence[SlotSpec]) -> str:
    """The form that ops take."""
    return _slots_json(tuple(specs))


@functools.lru_cache(maxsize=1024)
def _slots_json(specs: tuple[SlotSpec, ...]) -> str:
    return json.dumps([spec.to_dict() for spec in specs])
