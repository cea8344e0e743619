"""What the variables of sok have in common: ranks share them out, or one of them has all."""

from __future__ import annotations

from tfplugin import ranks
from tfplugin.placement import name_of, strategy_in_scope


class ModelParallel:
    """A variable of which each rank has some rows. What makes `filter_variables` and Keras's layers know it."""

    name: str
    trainable: bool


def owner_of_mode(mode: str | None, what: str) -> int | None:
    """The rank that holds a variable of this `mode`; None where all ranks share it.

    Raises:
      ValueError: not ``None``, ``"distributed"`` or ``"localized:#"``, or a rank that there is not.
    """
    if mode is None or mode == "distributed":
        return None
    prefix, colon, number = str(mode).partition(":")
    if prefix != "localized" or not colon or not number.isdigit():
        raise ValueError(
            f"{what}: mode must be 'distributed' or 'localized:#' with the number of a rank, got {mode!r}."
        )
    owner, size = int(number), ranks.size()
    if owner >= size:
        there_are = "only rank 0" if size == 1 else f"ranks 0 to {size - 1}"
        raise ValueError(f"{what}: mode {mode!r} names rank {owner}, but there are {there_are}.")
    return owner


def refuse_strategies(what: str) -> None:
    """Raises ValueError in the scope, or a step, of a `tf.distribute` strategy, which has workers of its own.

    ``tf.distribute.OneDeviceStrategy`` changes nothing and may be there. `what` cannot be done, for the message.
    """
    strategy = strategy_in_scope()  # no walrus: AutoGraph, which knows none, warns of one in a step
    if strategy is not None:
        raise ValueError(
            f"{what} under {name_of(strategy)}: what shares the rows of sok are ranks, processes that horovodrun "
            "starts. Leave the strategy out, or take tf.distribute.OneDeviceStrategy."
        )
