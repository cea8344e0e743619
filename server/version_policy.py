"""Which versions of a model are served, of those that there are: as TensorFlow Serving's `ServableVersionPolicy`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from kvtools.errors import UsageError

_LATEST = re.compile(r"latest(?:[ :]\s*(\d+))?")
_NUMBERS = re.compile(r"\d+(\s*,\s*\d+)*")


@dataclass(frozen=True)
class VersionPolicy:
    """`latest`: the `count` highest numbers; `specific`: `numbers`; `all`.

    Example:
        >>> VersionPolicy.parse("latest 2")
        VersionPolicy(kind='latest', count=2, numbers=())
        >>> VersionPolicy.parse("3,7").choose([1, 3, 7], lambda number: number != 7)
        [3]
    """

    kind: Literal["latest", "specific", "all"] = "latest"
    count: int = 1
    numbers: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> VersionPolicy:
        """Return the policy that `latest`, `latest N`, `all` or a list of numbers means; raises `UsageError`."""
        text = text.strip()
        if text == "all":
            return cls("all")
        if latest := _LATEST.fullmatch(text):
            count = int(latest[1] or 1)
            if count >= 1:
                return cls("latest", count)
        elif _NUMBERS.fullmatch(text):
            return cls("specific", numbers=tuple(sorted({int(number) for number in text.split(",")})))
        raise UsageError(f"got versions {text!r}, expected 'latest N', 'all' or numbers such as 3,7")

    def choose(self, numbers: Iterable[int], usable: Callable[[int], bool]) -> list[int]:
        """Return which of `numbers` to serve, the highest first; `usable` is asked for one only when it is its turn.

        So where the newest cannot be used, the next one takes its place, and none is tried that is not needed.
        """
        chosen: list[int] = []
        for number in sorted(numbers, reverse=True):
            if self.kind == "specific" and number not in self.numbers:
                continue
            if self.kind == "latest" and len(chosen) == self.count:
                break
            if usable(number):
                chosen.append(number)
        return chosen
