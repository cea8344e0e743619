"""What a `policy.toml` says of training, as arguments of variables and layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tfplugin.policies import (
    BloomAdmission,
    CountAdmission,
    EvictionPolicy,
    ExpireAfterSeconds,
    ExpireAfterSteps,
    ExpireBelowFrequency,
    ExpireBelowNorm,
    KeepTop,
    ProbabilityAdmission,
)

if TYPE_CHECKING:
    from kvtools.clip_policy import Policy
    from kvtools.training_policy import Admission, TrainingPolicy


class PolicyFile:
    """A policy file that was read; see `policy`.

    Example:
      >>> told = tfplugin.policy("policy.toml")
      >>> user = tfplugin.get_kv_variable("user", embedding_dim=16, **told.arguments("user"))
    """

    def __init__(self, path: str, policy: Policy) -> None:
        self._path = path
        self._policy = policy

    def arguments(self, table: str) -> dict[str, Any]:
        """The arguments of `get_kv_variable` for a table: `max_capacity`, `eviction`, `admission`, `padding_key`,
        `expiry`, `expire_every` and `expire_on_save`, as far as the file says them.

        Args:
          table: its name, as in the checkpoint. The first entry of the file that matches it holds.

        Raises:
          ValueError: no entry matches it. An entry with ``name = "*"`` at the end matches all tables.
        """
        if not any(rule.matches(table) for rule in self._policy.rules):
            from kvtools.table_names import near

            names = [pattern for rule in self._policy.rules for pattern in rule.patterns]
            raise ValueError(
                f"The policy '{self._path}' has no entry for table '{table}', but for {names}{near(table, names)}"
                ' An entry with name = "*" at the end is for all others.'
            )
        return _arguments(self._policy.training(table))

    def layer_arguments(self, table: str) -> dict[str, Any]:
        """The same for layers and their `TableConfig`, which call the padding key `padding_id`."""
        arguments = self.arguments(table)
        if "padding_key" in arguments:
            arguments["padding_id"] = arguments.pop("padding_key")
        return arguments


def policy(path: Any) -> PolicyFile:
    """Reads what a policy file says of training; what it says of clipping and exports is theirs.

    Args:
      path: of a TOML file, as ``kvtools advise --output`` writes it.

    Returns:
      A `PolicyFile`, whose `arguments` go to `get_kv_variable`, and `layer_arguments` to layers.

    Raises:
      ValueError: the file cannot be read, or something in it is no part of a policy.

    Example:
      >>> told = tfplugin.policy("policy.toml")
      >>> layer = tfplugin.keras.layers.Embedding(16, name="user", **told.layer_arguments("user"))
    """
    from kvtools.clip_policy import read_policy
    from kvtools.errors import KvtoolsError

    try:
        return PolicyFile(str(path), read_policy(str(path)))
    except KvtoolsError as error:
        raise ValueError(str(error)) from None


def _arguments(told: TrainingPolicy) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "max_capacity": told.max_capacity,
        "eviction": told.eviction,
        "admission": None if told.admission is None else _admission(told.admission),
        "expiry": _expiry(told),
        "expire_every": told.expire_every,
        "expire_on_save": told.expire_on_save,
    }
    given = {name: value for name, value in arguments.items() if value}
    return given if told.padding_key is None else {**given, "padding_key": told.padding_key}


def _admission(told: Admission) -> CountAdmission | BloomAdmission | ProbabilityAdmission:
    if told.kind == "count":
        return CountAdmission(told.threshold, told.below)
    if told.kind == "bloom":
        return BloomAdmission(told.threshold, told.capacity, told.error, told.below)
    return ProbabilityAdmission(told.probability, told.below)


def _expiry(told: TrainingPolicy) -> list[EvictionPolicy]:
    from kvtools.training_policy import KEEP_BY

    expiry: list[EvictionPolicy] = []
    if told.expire_after_steps:
        expiry.append(ExpireAfterSteps(told.expire_after_steps))
    if told.expire_after_seconds:
        expiry.append(ExpireAfterSeconds(told.expire_after_seconds))
    if told.expire_below_norm:
        expiry.append(ExpireBelowNorm(told.expire_below_norm))
    if told.expire_below_freq:
        expiry.append(ExpireBelowFrequency(told.expire_below_freq))
    if told.keep_top:
        expiry.append(KeepTop(told.keep_top, KEEP_BY[told.keep_top_by]))
    return expiry
