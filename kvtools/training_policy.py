"""The life of a table's rows in training, as a policy file says it: which keys get a row, how many there may be, and
which go.

    max-capacity = 1_000_000         # rows; further ones evict others
    eviction = "lfu"                 # lru, lfu, custom, epoch_lru or epoch_lfu
    admission = { count = 3 }        # a row with the third lookup; or { bloom = 3, capacity = 9_000_000, error = 0.01 }
                                     # or { probability = 0.1 }; below = "zeros" in each: what others are given
    padding-key = 0                  # never gets a row
    expire-after = "30d"             # or a number of steps: rows that were not written for so long go
    expire-below-norm = 1e-3
    expire-below-freq = 2
    keep-top = 500_000               # all other rows go
    keep-top-by = "freq"             # or version, or norm
    expire-every = 1000              # in about how many updates these come round
    expire-on-save = true

`tfplugin.policy` makes arguments of variables and layers of it, and `kvtools simulate` replays a log through it. The
fields mean what the arguments of the same name do, and are checked as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvtools.errors import UsageError

EVICTIONS = ("lru", "lfu", "custom", "epoch_lru", "epoch_lfu")
KEEP_BY = {"freq": "frequency", "version": "version", "norm": "norm"}
"""What the rows that stay are chosen by, and what the engine calls that."""

FIELDS: dict[str, tuple[type, ...]] = {
    "max-capacity": (int,),
    "eviction": (str,),
    "admission": (dict,),
    "padding-key": (int,),
    "expire-after": (str, int),
    "expire-below-norm": (int, float),
    "expire-below-freq": (int,),
    "keep-top": (int,),
    "keep-top-by": (str,),
    "expire-every": (int,),
    "expire-on-save": (bool,),
}
"""The names of the fields in a file, and their types."""

_MOST_ROWS = 2**62
_MOST_COUNT = 2**32 - 1
_MOST_IN_FILTER = 65_535
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}


@dataclass(frozen=True)
class Admission:
    """Which keys get a row: with their `threshold`-th lookup ("count", or "bloom" in a filter for `capacity` keys that
    errs with probability `error`), or by chance ("probability", `probability`). `below` is what others are given."""

    kind: str
    threshold: int = 1
    capacity: int = 0
    error: float = 0.01
    probability: float = 1.0
    below: str = "initial"

    def fields(self) -> dict[str, Any]:
        """Return what checkpoints, and the engine, say of it.

        >>> Admission("count", 3).fields()
        {'kind': 'count', 'enter_threshold': 3, 'below': 'initial'}
        """
        told: dict[str, Any] = {"kind": self.kind}
        if self.kind == "probability":
            told["p"] = self.probability
        else:
            told["enter_threshold"] = self.threshold
        if self.kind == "bloom":
            told |= {"capacity": self.capacity, "error": self.error}
        return {**told, "below": self.below}

    def described(self) -> dict[str, Any]:
        """Return what a policy file says of it."""
        told: dict[str, Any] = {self.kind: self.probability if self.kind == "probability" else self.threshold}
        if self.kind == "bloom":
            told |= {"capacity": self.capacity, "error": self.error}
        return told if self.below == "initial" else {**told, "below": self.below}


@dataclass(frozen=True)
class TrainingPolicy:
    """What training is told of the rows of a table; see the top of this file. 0, None and False: nothing.

    Of `expire_after_seconds` and `expire_after_steps` one at most is given.

    Example:
        >>> TrainingPolicy.of({"max-capacity": 100, "expire-after": "2h"}, "policy").described()
        {'max-capacity': 100, 'expire-after': '7200s'}
    """

    max_capacity: int = 0
    eviction: str | None = None
    admission: Admission | None = None
    padding_key: int | None = None
    expire_after_seconds: int = 0
    expire_after_steps: int = 0
    expire_below_norm: float = 0.0
    expire_below_freq: int = 0
    keep_top: int = 0
    keep_top_by: str = field(default="freq")
    expire_every: int = 0
    expire_on_save: bool = False

    @property
    def empty(self) -> bool:
        """Whether training is told nothing."""
        return self == TrainingPolicy()

    @property
    def expires(self) -> bool:
        """Whether rows go by anything but a capacity."""
        ages = self.expire_after_seconds or self.expire_after_steps
        return bool(ages or self.expire_below_norm or self.expire_below_freq or self.keep_top)

    @classmethod
    def of(cls, entry: Mapping[str, Any], whose: str) -> TrainingPolicy:
        """Return what the fields of an entry of a file say; `whose` begins a message.

        Raises:
            UsageError: a number out of range, or fields that contradict each other.
        """

        def number(name: str, least: int, most: int, of: str) -> int:
            value = entry.get(name, 0)
            if name in entry and not least <= value <= most:
                raise UsageError(f"{whose}: got {name} = {value}, expected a number of {of}, {least} to {most}")
            return int(value)

        seconds, steps = _age(entry.get("expire-after"), whose)
        norm = entry.get("expire-below-norm", 0.0)
        if "expire-below-norm" in entry and not 0 < norm < math.inf:
            raise UsageError(f"{whose}: got expire-below-norm = {norm}, expected a number above 0")
        made = cls(
            number("max-capacity", 1, _MOST_ROWS, "rows"),
            _one_of("eviction", entry.get("eviction"), EVICTIONS, whose),
            _admission(entry.get("admission"), whose),
            entry.get("padding-key"),
            seconds,
            steps,
            float(norm),
            number("expire-below-freq", 1, _MOST_COUNT, "updates"),
            number("keep-top", 1, _MOST_ROWS, "rows"),
            _one_of("keep-top-by", entry.get("keep-top-by"), tuple(KEEP_BY), whose) or "freq",
            number("expire-every", 1, _MOST_ROWS, "updates"),
            bool(entry.get("expire-on-save", False)),
        )
        made._check(entry, whose)
        return made

    def _check(self, entry: Mapping[str, Any], whose: str) -> None:
        if self.eviction and not self.max_capacity:
            raise UsageError(
                f"{whose}: got eviction = '{self.eviction}', which says which rows go, and nothing says how many stay;"
                " give max-capacity"
            )
        if "keep-top-by" in entry and not self.keep_top:
            raise UsageError(
                f"{whose}: got keep-top-by = '{self.keep_top_by}' and no keep-top, expected both or neither"
            )
        if 0 < self.max_capacity <= self.keep_top:
            raise UsageError(
                f"{whose}: keep-top = {self.keep_top} keeps no fewer rows than max-capacity = {self.max_capacity}"
                f" allows;"
                " give one of them, or keep fewer"
            )
        if (self.expire_every or self.expire_on_save) and not self.expires:
            name = "expire-every" if self.expire_every else "expire-on-save"
            raise UsageError(f"{whose}: {name} says when rows go, and nothing says which; give expire-after, for one")

    def described(self) -> dict[str, Any]:
        """Return the fields that are given, as a policy file has them."""
        after = f"{self.expire_after_seconds}s" if self.expire_after_seconds else self.expire_after_steps
        told: dict[str, Any] = {
            "max-capacity": self.max_capacity,
            "eviction": self.eviction,
            "admission": self.admission and self.admission.described(),
            "expire-after": after,
            "expire-below-norm": self.expire_below_norm,
            "expire-below-freq": self.expire_below_freq,
            "keep-top": self.keep_top,
            "keep-top-by": self.keep_top_by if self.keep_top else None,
            "expire-every": self.expire_every,
            "expire-on-save": self.expire_on_save,
        }
        given = {name: value for name, value in told.items() if value}
        return given if self.padding_key is None else {**given, "padding-key": self.padding_key}


def _one_of(name: str, value: str | None, known: tuple[str, ...], whose: str) -> str | None:
    if value is not None and value not in known:
        raise UsageError(f"{whose}: got {name} = '{value}', expected {', '.join(known)}")
    return value


def _age(value: str | int | None, whose: str) -> tuple[int, int]:
    """Return an age in seconds, and in steps; one of them is 0."""
    if value is None:
        return 0, 0
    found = re.fullmatch(r"(\d{1,10})([smhdw]?)", str(value))
    amount = int(found[1]) * _SECONDS.get(found[2], 1) if found else 0
    if found is None or not 1 <= amount <= _MOST_COUNT:
        raise UsageError(
            f"{whose}: got expire-after = {value!r}, expected a time such as 30d, 12h or 90m, or a number of steps,"
            " 1 or more"
        )
    return (amount, 0) if found[2] else (0, amount)


def _admission(entry: Mapping[str, Any] | None, whose: str) -> Admission | None:
    if entry is None:
        return None
    whose = f"{whose}: admission"
    kinds = [kind for kind in ("count", "bloom", "probability") if kind in entry]
    if len(kinds) != 1:
        raise UsageError(
            f"{whose}: got {_shown(entry)}, expected one of {{ count = 3 }}, {{ bloom = 3, capacity = 1000000 }} and"
            " { probability = 0.1 }"
        )
    kind = kinds[0]
    known = {kind, "below", *(("capacity", "error") if kind == "bloom" else ())}
    for name in entry:
        if name not in known:
            raise UsageError(f"{whose}: got {name}, which is no part of {kind}, expected {', '.join(sorted(known))}")
    below = _one_of("below", entry.get("below"), ("initial", "zeros"), whose) or "initial"
    value = entry[kind]
    if kind == "probability":
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise UsageError(f"{whose}: got probability = {value!r}, expected a number from 0 to 1")
        return Admission(kind, probability=float(value), below=below)
    most = _MOST_IN_FILTER if kind == "bloom" else _MOST_COUNT - 2
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise UsageError(f"{whose}: got {kind} = {value!r}, expected a number of lookups, 1 to {most}")
    if kind == "count":
        return Admission(kind, value, below=below)
    capacity, error = entry.get("capacity"), entry.get("error", 0.01)
    if isinstance(capacity, bool) or not isinstance(capacity, int) or not 1 <= capacity <= 2**36:
        raise UsageError(f"{whose}: got capacity = {capacity!r}, expected how many keys are counted, 1 to 2**36")
    if isinstance(error, bool) or not isinstance(error, float) or not 1e-9 <= error < 1:
        raise UsageError(f"{whose}: got error = {error!r}, expected a probability from 1e-9 to below 1")
    return Admission(kind, value, capacity, error, below=below)


def _shown(entry: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(f"{name} = {value!r}" for name, value in entry.items()) + " }"
