"""Saving and restoring dynamic embedding variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tfplugin.checkpoint import KvSaveable

if TYPE_CHECKING:
    from tfplugin.dynamic_embedding.variable import Variable


def saveables(variable: Variable, name: str | None = None) -> list[KvSaveable]:
    """What a `tf.compat.v1.train.Saver` saves and restores, one for each table."""
    whole = name or variable.name
    if variable._one is not None:
        return [KvSaveable(variable._one, whole)]
    return [KvSaveable(part, f"{whole}/part_{i}") for i, part in enumerate(variable.parts)]


def saveables_by_name(variable: Variable) -> dict[str, Callable[..., KvSaveable]]:
    """The same as a Saver asks for them: functions of the name that its dictionary gives."""

    def make(i: int) -> Callable[..., KvSaveable]:
        def saveable(name: str | None = None, **kwargs: Any) -> KvSaveable:
            whole = name.removesuffix(f"_part_{i}") if name and variable._one is None else name
            return saveables(variable, whole)[i]

        return saveable

    return {f"part_{i}" if variable._one is None else "": make(i) for i in range(variable.shard_num)}
