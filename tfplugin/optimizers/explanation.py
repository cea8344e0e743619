"""`explain`: which way each variable of an optimizer is updated, and why."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

from tfplugin import step_record
from tfplugin.kv_variable import KvVariable
from tfplugin.optimizers import fused
from tfplugin.optimizers.inner_optimizer import innermost
from tfplugin.partitioned_kv_variable import flat_variables


class Explanation:
    """How an optimizer updates its variables. Prints as a table.

    Example:
      >>> print(tfplugin.explain(optimizer, [table, weights]))
      ad          fused: adam
      dense/w:0   TensorFlow's own update
    """

    def __init__(self, ways: dict[str, str]) -> None:
        self._ways = ways

    def to_dict(self) -> dict[str, str]:
        """Variable name -> ``"fused: <rule>"``, ``"generic: <reason>"`` or what happens to a dense variable.

        Of a table whose layer in a model of Keras has an optimizer of its own: ``"by the optimizer of its layer: "``,
        and the way of that.
        """
        return dict(self._ways)

    def __str__(self) -> str:
        width = max((len(name) for name in self._ways), default=0)
        return "\n".join(f"{name.ljust(width)}   {way}" for name, way in self._ways.items()) or "no variables yet"

    __repr__ = __str__


_seen: weakref.WeakKeyDictionary[Any, dict[int, tuple[weakref.ref[Any] | None, str]]] = weakref.WeakKeyDictionary()


def _of_keras(optimizer: Any) -> bool:
    """Whether it is an optimizer of Keras, which leaves a table to the optimizer that its layer was given."""
    return any(cls.__module__.partition(".")[0] in ("keras", "tf_keras") for cls in type(optimizer).__mro__)


def _way(optimizer: Any, variable: Any) -> str:
    if not isinstance(variable, KvVariable):
        return (
            f"fused: {optimizer.rule_of(variable)}"
            if hasattr(optimizer, "as_fused_rule")
            else "TensorFlow's own update"
        )
    if variable._in_backward is not None:
        return f"in the backward pass: {variable._in_backward.rule}"
    plan = fused.plan(optimizer, variable)
    return f"generic: {plan}" if isinstance(plan, str) else f"fused: {plan.name}"


def note(optimizer: Any, pairs: Iterable[tuple[Any, Any]]) -> None:
    """Remembers the variables of a step, for `explain` without a list of them, and for the record of the step."""
    seen = _seen.setdefault(optimizer, {})
    for _, variable in pairs:
        step_record.note_update(variable)
        if id(variable) not in seen:
            try:
                reference = weakref.ref(variable)
            except TypeError:
                reference = None
            seen[id(variable)] = (reference, str(getattr(variable, "name", variable)))


def explain(optimizer: Any, variables: Sequence[Any] | None = None) -> Explanation:
    """Says for each variable whether `optimizer` updates it by one fused op of the table engine or otherwise, and why.

    Args:
      optimizer: of ``tf.compat.v1.train`` or `tfplugin.optimizers`, or a `tfplugin.OptimizerWrapper`.
      variables: key-value variables, partitioned ones, and others; the default are those of the steps so far.

    Returns:
      An object that prints as a table; ``to_dict()`` gives it by name.

    Example:
      >>> tfplugin.explain(tf.compat.v1.train.AdamOptimizer(), [table]).to_dict()
      {'ad:0': 'fused: adam'}
    """
    if hasattr(optimizer, "explain"):
        explanation: Explanation = optimizer.explain(variables)
        return explanation
    return explained(optimizer, variables, by_layers=_of_keras(optimizer))


def explained(optimizer: Any, variables: Sequence[Any] | None, *, by_layers: bool) -> Explanation:
    """The same; `by_layers`: tables whose layers have optimizers of their own are left to those."""
    optimizer = innermost(optimizer)
    if variables is None:
        found = [reference() for reference, _ in _seen.get(optimizer, {}).values() if reference is not None]
        variables = [variable for variable in found if variable is not None]
    ways = {}
    for v in flat_variables(variables):
        own = getattr(v, "_optimizer_of_layer", None) if by_layers else None
        if own is None or innermost(own) is optimizer:
            ways[str(v.name)] = _way(optimizer, v)
        else:
            ways[str(v.name)] = f"by the optimizer of its layer: {_way(innermost(own), v)}"
    return Explanation(ways)
