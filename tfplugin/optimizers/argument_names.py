"""Arguments by the names that `tf.compat.v1.train` and TFPlus have for them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

#: their name -> ours
_SAME = {"beta1": "beta_1", "beta2": "beta_2", "use_nesterov": "nesterov"}
#: Accepted by every class, without effect: updates lock what they change anyway.
_NO_EFFECT = ("use_locking",)


def takes_other_names(init: Callable[..., None]) -> Callable[..., None]:
    """An `__init__` that takes its keyword arguments by those names as well.

    Raises:
      TypeError: when called with an argument under both of its names.
    """
    own = inspect.signature(init).parameters
    same = {theirs: ours for theirs, ours in _SAME.items() if ours in own and theirs not in own}
    dropped = [name for name in _NO_EFFECT if name not in own]
    positions = [name for name in own if name != "self"]

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        for theirs, ours in same.items():
            if theirs in kwargs:
                if ours in kwargs or ours in positions[: len(args)]:
                    raise TypeError(f"{type(self).__name__}: got both {ours} and {theirs}, which are one.")
                kwargs[ours] = kwargs.pop(theirs)
        for name in dropped:
            kwargs.pop(name, None)
        init(self, *args, **kwargs)

    return wrapper
