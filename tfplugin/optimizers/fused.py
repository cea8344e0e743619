"""One optimizer's steps on key-value variables as single ops of the table engine."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context

from tfplugin.kv_variable import KvVariable
from tfplugin.optimizers import fused_rules_keras as _fused_rules_keras  # noqa: F401 - registers
from tfplugin.optimizers import fused_rules_legacy as _fused_rules_legacy  # noqa: F401 - registers
from tfplugin.optimizers import fused_rules_v1 as _fused_rules_v1  # noqa: F401 - registers
from tfplugin.optimizers.fused_rules import FusedRule, fused_rule_of
from tfplugin.optimizers.hyperparameters import Step, pack
from tfplugin.row_handles import recall, recall_whole
from tfplugin.slots import SlotSpec


@dataclasses.dataclass(frozen=True)
class Options:
    """What a user says about how an optimizer updates key-value variables.

    Attributes:
      fused: False runs TensorFlow's own ops on the rows of a step, whatever the optimizer.
      skip_nonfinite: leave a row alone whose gradient has a NaN or an infinity, and count it.
      stochastic_rounding: of float16 and bfloat16 rows.
      slot_names: what tables call slots that the optimizer calls otherwise.
    """

    fused: bool = True
    skip_nonfinite: bool = False
    stochastic_rounding: bool = False
    slot_names: Mapping[str, str] = dataclasses.field(default_factory=dict)


_options: weakref.WeakKeyDictionary[Any, Options] = weakref.WeakKeyDictionary()


def set_options(optimizer: Any, options: Options) -> None:
    """Says how `optimizer` updates key-value variables from here on."""
    _options[optimizer] = options


def said_of(optimizer: Any) -> Options | None:
    """What `set_options` has said of `optimizer`; None if nothing."""
    return _options.get(optimizer)


def options_of(optimizer: Any) -> Options:
    """What was said of `optimizer`."""
    return _options.get(optimizer) or getattr(optimizer, "kv_options", None) or Options()


def plan(optimizer: Any, variable: KvVariable) -> FusedRule | str:
    """What a step of `optimizer` on `variable` is to the engine, or why it runs as TensorFlow ops instead."""
    if not options_of(optimizer).fused:
        return "fused=False"
    if variable.constraint is not None:
        return "the variable has a constraint"
    rule = fused_rule_of(optimizer)
    names = options_of(optimizer).slot_names
    if not names or isinstance(rule, str):
        return rule
    return dataclasses.replace(rule, slots=tuple((names.get(slot, slot), start) for slot, start in rule.slots))


def check_options(optimizer: Any, plans: Mapping[KvVariable, FusedRule | str]) -> None:
    """Raises ValueError where what was said of `optimizer` is for fused updates alone, and a table has another one."""
    said = options_of(optimizer)
    own = getattr(optimizer, "kv_options", None) or Options()  # theirs see to it in any update
    for variable, reason in plans.items():
        if not isinstance(reason, str):
            continue
        narrow = variable.dtype in (tf.float16, tf.bfloat16)
        for option, lost in (
            ("stochastic_rounding", narrow and said.stochastic_rounding and not own.stochastic_rounding),
            ("skip_nonfinite", said.skip_nonfinite and not own.skip_nonfinite),
        ):
            if lost:
                raise ValueError(
                    f"OptimizerWrapper({type(optimizer).__name__}, {option}=True): the rows of key-value variable "
                    f"'{variable.name}' are updated by the optimizer's own ops, which have no such option: {reason}. "
                    f"Leave {option} out, or have the update fused: by an optimizer that the table engine knows, "
                    "without fused=False, of a variable without a constraint. tfplugin.explain says which are."
                )


def slot_specs(rule: FusedRule, variable: KvVariable, prefix: str) -> list[SlotSpec]:
    """The slots of `rule` in the rows of `variable`."""
    exact = compute_dtype(variable.dtype) == tf.float64
    return [
        SlotSpec(
            f"{prefix}.{name.replace('/', '_')}", variable.dim, "constant", start if exact else float(np.float32(start))
        )
        for name, start in rule.slots
    ]


def compute_dtype(dtype: tf.DType) -> tf.DType:
    """What updates of rows of `dtype` are computed in."""
    return tf.float64 if dtype == tf.float64 else tf.float32


class FusedStep:
    """One `apply_gradients` of one optimizer. Hyperparameters are computed once for each dtype."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._packed: dict[Any, tuple[list[str], list[tf.Tensor]]] = {}

    def apply(
        self,
        rule: FusedRule,
        variable: KvVariable,
        prefix: str,
        keys: tf.Tensor,
        gradients: tf.Tensor,
        *,
        step: Step | None = None,
        weight_decay: Any = 0.0,
        positions: tf.Tensor | None = None,
    ) -> tf.Operation | None:
        """Runs the update. `gradients` are [n, dim], `keys` [n] with duplicates."""
        step = step or Step(compute_dtype(variable.dtype))
        place = None if context.executing_eagerly() else tf.compat.v1.get_default_graph()
        decays = not (isinstance(weight_decay, float) and weight_decay == 0)
        packed = self._packed.get((step.dtype, place, decays))
        if packed is None:
            values = dict(rule.hyperparameters(step))
            if decays:
                values["weight_decay"] = weight_decay
            packed = self._packed[step.dtype, place, decays] = pack(values)
        names, tensors = packed
        options = options_of(self._optimizer)
        specs = slot_specs(rule, variable, prefix)
        note_switch(variable, self._optimizer, prefix, specs)
        if positions is None:
            positions = recall(keys)
        places = None
        whole = recall_whole(gradients, keys)
        if whole is not None and "GPU" not in variable.handle.device:
            keys, positions, places, gradients = whole.keys, whole.positions, whole.places, whole.gradients
        return variable.apply_update(
            keys,
            gradients,
            self._optimizer,
            specs,
            rule.name,
            names,
            tensors,
            positions=positions,
            places=places,
            skip_nonfinite=options.skip_nonfinite,
            stochastic_rounding=options.stochastic_rounding,
        )


_log = logging.getLogger("tfplugin")


def note_switch(variable: KvVariable, optimizer: Any, prefix: str, specs: list[SlotSpec]) -> None:
    """Says once in the log that an optimizer starts with fresh slots where others trained before."""
    if prefix in variable._optimizers_seen:
        return
    before = [name for name in variable._optimizers_seen if name != prefix]
    held: set[str] = set()
    if variable._eager:
        with tf.init_scope():
            held = variable.slot_names()
    variable._optimizers_seen.append(prefix)
    before += sorted({name.split(".")[0] for name in held} - {prefix, *before})
    known = {spec.name for spec in specs}
    fresh = [spec.name for spec in specs if spec.name not in held]
    others = sorted(name for name in held - known if name.partition(".")[0] == prefix)
    if others and fresh and not before:  # as of a file, by other names
        _log.warning(
            "Key-value variable '%s': its rows have slots %s, which %s does not know and drops; its own (%s) start"
            " fresh. tfplugin.warm_start takes slots={name here: name in the file}.",
            variable.name,
            ", ".join(others),
            prefix,
            ", ".join(fresh),
        )
    if before and fresh and variable._eager:
        _log.warning(
            "Key-value variable '%s': optimizer switched from %s to %s, whose slots (%s) start fresh.",
            variable.name,
            ", ".join(before),
            prefix,
            ", ".join(fresh),
        )
