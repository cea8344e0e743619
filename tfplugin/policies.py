"""Which keys a table gives a row to, and which rows go: the arguments `enter_threshold`, `admission`, `padding_key`,
`expiry`, `expire_every` and `expire_on_save` of variables."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import tensorflow as tf

__all__ = [
    "BloomAdmission",
    "CountAdmission",
    "ExpireAfterSeconds",
    "ExpireAfterSteps",
    "ExpireBelowFrequency",
    "ExpireBelowNorm",
    "KeepTop",
    "ProbabilityAdmission",
]

#: What a lookup gives for a key that is not admitted yet.
BELOW = ("initial", "zeros")

#: The largest threshold of a filter, whose cells are a byte or two.
MOST_IN_FILTER = 65535


def _threshold(value: Any, what: str) -> int:
    if isinstance(value, bool) or not _is_whole(value) or not 0 <= value < 2**32:
        raise ValueError(f"{what}: enter_threshold must be a number of lookups, 0 or more; got {value!r}.")
    return int(value)


def _is_whole(value: Any) -> bool:
    try:
        return int(value) == value
    except (TypeError, ValueError, OverflowError):
        return False


def _check_below(below: Any, what: str) -> None:
    if below not in BELOW:
        raise ValueError(f"{what}: below must be one of {BELOW}, got {below!r}.")


@dataclasses.dataclass(frozen=True)
class CountAdmission:
    """A key gets its row with its `enter_threshold`-th training lookup. Keys that wait are counted one by one.

    A key that waits takes some 40 bytes. Every occurrence of a key in a batch counts; a batch that brings it to
    the threshold gives it its row. A key whose row has gone (removed, evicted, expired) starts from zero.

    Attributes:
      enter_threshold: 0 and 1 admit every key at once.
      below: what training gives for a key that waits: ``"initial"``, the value that its row will start from, or
        ``"zeros"``.

    Raises:
      ValueError: a negative threshold, or one that is no whole number; an unknown `below`.

    Example:
      >>> v = tfplugin.get_kv_variable("ad", embedding_dim=4, admission=tfplugin.policies.CountAdmission(2))
      >>> _ = v.sparse_read([7])
      >>> int(v.size())
      0
      >>> _ = v.sparse_read([7])
      >>> int(v.size())
      1
    """

    enter_threshold: int
    below: str = "initial"

    def __post_init__(self) -> None:
        object.__setattr__(self, "enter_threshold", _threshold(self.enter_threshold, "CountAdmission"))
        _check_below(self.below, "CountAdmission")

    def fields(self) -> dict[str, Any]:
        """What the op's attribute and a checkpoint's ``kvmeta`` say of it."""
        return {"kind": "count", "enter_threshold": self.enter_threshold, "below": self.below}


@dataclasses.dataclass(frozen=True)
class BloomAdmission:
    """As `CountAdmission`, with the counts of waiting keys in a counting Bloom filter: its memory does not grow.

    A count in the filter is never too low, so no key waits longer than it should. With up to `capacity` different keys
    in it, a count is too high with a probability of at most `error`, and the key is then admitted too early.
    The filter forgets nothing: a key whose row has gone is admitted at once when it comes back. It takes ``1.44 *
    log2(1 / error)`` cells for each key of the capacity, of one byte up to a threshold of 255, and of two beyond. Each
    part of a partitioned variable has a filter for the whole capacity: so it does not matter how many parts restore it.

    Attributes:
      enter_threshold: up to 65,535; 0 and 1 admit every key at once.
      capacity: how many different keys are expected to be counted.
      error: between 0 and 1.
      below: as for `CountAdmission`.

    Raises:
      ValueError: a number out of range.

    See Bonomi et al., "An Improved Construction for Counting Bloom Filters" (2006), and Estan and Varghese, "New
    Directions in Traffic Measurement" (2002), for the conservative update.
    """

    enter_threshold: int
    capacity: int
    error: float = 0.01
    below: str = "initial"

    def __post_init__(self) -> None:
        what = "BloomAdmission"
        object.__setattr__(self, "enter_threshold", _threshold(self.enter_threshold, what))
        if self.enter_threshold > MOST_IN_FILTER:
            raise ValueError(
                f"{what}: enter_threshold must be at most {MOST_IN_FILTER}, which its cells hold; got "
                f"{self.enter_threshold}. CountAdmission takes larger ones."
            )
        if isinstance(self.capacity, bool) or not _is_whole(self.capacity) or not 1 <= self.capacity <= 2**36:
            raise ValueError(f"{what}: capacity must be a number of keys, 1 to 2**36; got {self.capacity!r}.")
        object.__setattr__(self, "capacity", int(self.capacity))
        if isinstance(self.error, bool) or not isinstance(self.error, (int, float)) or not 1e-9 <= self.error < 1:
            raise ValueError(f"{what}: error must be a probability from 1e-9 to below 1, got {self.error!r}.")
        _check_below(self.below, what)

    def fields(self) -> dict[str, Any]:
        """What the op's attribute and a checkpoint's ``kvmeta`` say of it."""
        return {
            "kind": "bloom",
            "enter_threshold": self.enter_threshold,
            "capacity": self.capacity,
            "error": float(self.error),
            "below": self.below,
        }


@dataclasses.dataclass(frozen=True)
class ProbabilityAdmission:
    """A key that is missing gets its row with probability `p` each time it is looked up. Nothing is counted.

    It is drawn once for each lookup and key, so a key that comes n times is in with ``1 - (1 - p) ** n``.

    Attributes:
      p: 0 to 1; 1 admits every key at once.
      below: as for `CountAdmission`.

    Raises:
      ValueError: `p` is no probability; an unknown `below`.
    """

    p: float
    below: str = "initial"

    def __post_init__(self) -> None:
        if isinstance(self.p, bool) or not isinstance(self.p, (int, float)) or not 0 <= self.p <= 1:
            raise ValueError(f"ProbabilityAdmission: p must be a probability, 0 to 1; got {self.p!r}.")
        _check_below(self.below, "ProbabilityAdmission")

    def fields(self) -> dict[str, Any]:
        """What the op's attribute and a checkpoint's ``kvmeta`` say of it."""
        return {"kind": "probability", "p": float(self.p), "below": self.below}


#: The arguments of variables and layers that say what `resolve` takes.
POLICY_ARGUMENTS = ("enter_threshold", "admission", "padding_key", "expiry", "expire_every", "expire_on_save")

Admission = CountAdmission | BloomAdmission | ProbabilityAdmission

_ADMISSIONS: dict[str, type[Any]] = {
    "count": CountAdmission,
    "bloom": BloomAdmission,
    "probability": ProbabilityAdmission,
}


def _count(value: Any, what: str, of: str) -> int:
    if isinstance(value, bool) or not _is_whole(value) or not 1 <= value < 2**32:
        raise ValueError(f"{what} must be a number of {of}, 1 to 4294967295; got {value!r}.")
    return int(value)


@dataclasses.dataclass(frozen=True)
class ExpireAfterSteps:
    """A row goes that `steps` steps in a row did not write.

    A step is an update of the variable by an optimizer; `KvVariable.set_step` sets the number of them. As a policy of
    a variable it is a hard bound: the row is there for the lookups of these steps, and for none after, whether it has
    been collected or not. The versions of such a variable are steps, not seconds.

    Attributes:
      steps: 1 or more.

    Raises:
      ValueError: not a number of steps.
    """

    steps: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", _count(self.steps, "ExpireAfterSteps: steps", "updates"))

    def fields(self) -> dict[str, Any]:
        """What ops and a checkpoint's ``kvmeta`` say of it."""
        return {"policy": "after_steps", "steps": self.steps}


@dataclasses.dataclass(frozen=True)
class ExpireAfterSeconds:
    """A row goes when it was last written `seconds` ago: inserted, updated by an optimizer, or written otherwise.

    As a policy of a variable it is a hard bound: no lookup gives a row of this age, whether it has been collected or
    not. Stamps are whole seconds: so it may go up to a second early, and never late.

    Attributes:
      seconds: whole, 1 or more.

    Raises:
      ValueError: not a number of seconds.
    """

    seconds: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", _count(self.seconds, "ExpireAfterSeconds: seconds", "whole seconds"))

    def fields(self) -> dict[str, Any]:
        """What ops and a checkpoint's ``kvmeta`` say of it."""
        return {"policy": "after_seconds", "seconds": self.seconds}


@dataclasses.dataclass(frozen=True)
class ExpireBelowNorm:
    """A row goes whose value has an L2 norm below `l2` (its slots do not count). A value with a NaN is below no norm.

    Attributes:
      l2: above 0.

    Raises:
      ValueError: not a finite number above 0.
    """

    l2: float

    def __post_init__(self) -> None:
        if isinstance(self.l2, bool) or not isinstance(self.l2, (int, float)) or not 0 < self.l2 < math.inf:
            raise ValueError(f"ExpireBelowNorm: l2 must be a number above 0, got {self.l2!r}.")
        object.__setattr__(self, "l2", float(self.l2))

    def fields(self) -> dict[str, Any]:
        """What ops and a checkpoint's ``kvmeta`` say of it."""
        return {"policy": "below_norm", "norm": self.l2}


@dataclasses.dataclass(frozen=True)
class ExpireBelowFrequency:
    """A row goes that was updated fewer than `updates` times (`KvVariable.stamps` tells). So do rows that are just new:
    have it happen seldom, on demand or with a large `expire_every`.

    Attributes:
      updates: 1 or more.

    Raises:
      ValueError: not a number of updates.
    """

    updates: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "updates", _count(self.updates, "ExpireBelowFrequency: updates", "updates"))

    def fields(self) -> dict[str, Any]:
        """What ops and a checkpoint's ``kvmeta`` say of it."""
        return {"policy": "below_frequency", "frequency": self.updates}


@dataclasses.dataclass(frozen=True)
class KeepTop:
    """All rows go but the top ones.

    Of rows of one frequency those written last stay, of rows written at the same time the more frequent, and of rows
    that are equal in that those with the larger keys (as unsigned numbers). With a partitioner `rows` is for all parts
    together: on demand that is exact, and beside training and on save each part keeps its share, rounded up.

    Attributes:
      rows: how many stay, 1 or more.
      by: ``"frequency"``, ``"version"`` (written last) or ``"norm"`` (L2, of the value).

    Raises:
      ValueError: not a number of rows; an unknown `by`.
    """

    rows: int
    by: str = "frequency"

    def __post_init__(self) -> None:
        if isinstance(self.rows, bool) or not _is_whole(self.rows) or not 1 <= self.rows < 2**62:
            raise ValueError(f"KeepTop: rows must be a number of rows, 1 or more; got {self.rows!r}.")
        object.__setattr__(self, "rows", int(self.rows))
        if self.by not in ("frequency", "version", "norm"):
            raise ValueError(f"KeepTop: by must be 'frequency', 'version' or 'norm', got {self.by!r}.")

    def fields(self) -> dict[str, Any]:
        """What ops and a checkpoint's ``kvmeta`` say of it."""
        return {"policy": "keep_top", "rows": self.rows, "by": self.by}


EvictionPolicy = ExpireAfterSteps | ExpireAfterSeconds | ExpireBelowNorm | ExpireBelowFrequency | KeepTop

EVICTION_POLICIES: tuple[type[Any], ...] = (
    ExpireAfterSteps,
    ExpireAfterSeconds,
    ExpireBelowNorm,
    ExpireBelowFrequency,
    KeepTop,
)


def _eviction_from(fields: dict[str, Any]) -> EvictionPolicy:
    kind, number = fields["policy"], {key: value for key, value in fields.items() if key != "policy"}
    if kind == "keep_top":
        return KeepTop(**number)
    (value,) = number.values()
    made: dict[str, Any] = {
        "after_steps": ExpireAfterSteps,
        "after_seconds": ExpireAfterSeconds,
        "below_norm": ExpireBelowNorm,
        "below_frequency": ExpireBelowFrequency,
    }
    return made[kind](value)


@dataclasses.dataclass(frozen=True)
class Policies:
    """What a variable was told about the life of its rows, beside its capacity.

    Attributes:
      admission: which keys get a row; None: all.
      admits_on: ``"lookup"``: training lookups count; ``"update"``: updates do, of tables whose lookups insert nothing.
      padding_key: the key that never gets a row; None: there is none.
      expiry: which rows go.
      expire_every: in about how many updates the policies come round once, beside training; 0: never.
      expire_on_save: whether saves evict first.
    """

    admission: Admission | None = None
    admits_on: str = "lookup"
    padding_key: int | None = None
    expiry: tuple[EvictionPolicy, ...] = ()
    expire_every: int = 0
    expire_on_save: bool = False

    @property
    def counts_steps(self) -> bool:
        """Whether the versions of rows are steps."""
        return any(isinstance(policy, ExpireAfterSteps) for policy in self.expiry)

    def to_json(self) -> str:
        """The form that ops and checkpoints carry: an object; nothing where there is no policy."""
        said: dict[str, Any] = {}
        if self.admission is not None:
            said["admission"] = self.admission.fields()
            if self.admits_on != "lookup":
                said["admission"]["on"] = self.admits_on
        if self.padding_key is not None:
            said["padding_key"] = self.padding_key
        if self.expiry:
            said["expiry"] = [policy.fields() for policy in self.expiry]
            said["expire_every"] = self.expire_every
            said["expire_on_save"] = self.expire_on_save
        return json.dumps(said) if said else ""

    def of_part(self, parts: int) -> Policies:
        """Those of one of so many parts: its share of the rows that are kept."""
        shares = tuple(
            KeepTop(-(-policy.rows // parts), policy.by) if isinstance(policy, KeepTop) else policy
            for policy in self.expiry
        )
        return dataclasses.replace(self, expiry=shares)

    @classmethod
    def from_json(cls, text: str | bytes) -> Policies:
        """What `to_json` gave."""
        said = json.loads(text) if text else {}
        admission, on = None, "lookup"
        if "admission" in said:
            fields = dict(said["admission"])
            on = fields.pop("on", on)
            admission = _ADMISSIONS[fields.pop("kind")](**fields)
        expiry = tuple(_eviction_from(fields) for fields in said.get("expiry", ()))
        return cls(
            admission,
            on,
            said.get("padding_key"),
            expiry,
            said.get("expire_every", 0),
            said.get("expire_on_save", False),
        )


def resolve(
    name: str,
    key_dtype: tf.DType,
    *,
    enter_threshold: Any = 0,
    admission: Any = None,
    padding_key: Any = None,
    expiry: Any = None,
    expire_every: Any = 0,
    expire_on_save: Any = False,
    max_capacity: int = 0,
) -> Policies:
    """The policies that the arguments of a variable ask for.

    Raises:
      ValueError: a threshold that is none; both a threshold and an `admission`; a padding key that is no key; policies
        of `expiry` that contradict each other or `max_capacity`; when to expire without what, or the other way round.
      TypeError: `admission` or `expiry` is none of the classes here.
    """
    what = f"Key-value variable '{name}'"
    threshold = _threshold(enter_threshold, what)
    if admission is not None and not isinstance(admission, tuple(_ADMISSIONS.values())):
        kinds = ", ".join(kind.__name__ for kind in _ADMISSIONS.values())
        raise TypeError(f"{what}: admission must be one of tfplugin.policies' {kinds}; got {admission!r}.")
    if admission is not None and threshold:
        raise ValueError(
            f"{what}: enter_threshold={threshold} and admission={admission} both say which keys get a row: give one. "
            "(enter_threshold=n is admission=tfplugin.policies.CountAdmission(n).)"
        )
    if threshold > 1:
        admission = CountAdmission(threshold)
    if _admits_all(admission):
        admission = None
    if padding_key is not None:
        least, most = key_dtype.min, key_dtype.max
        if isinstance(padding_key, bool) or not _is_whole(padding_key) or not least <= padding_key <= most:
            raise ValueError(f"{what}: padding_key must be one of its {key_dtype.name} keys, got {padding_key!r}.")
        padding_key = int(padding_key)
    told = _expiry(what, expiry, expire_every, expire_on_save, max_capacity)
    return Policies(admission, padding_key=padding_key, **told)


def _expiry(what: str, expiry: Any, every: Any, on_save: Any, max_capacity: int) -> dict[str, Any]:
    given = () if expiry is None else tuple(expiry) if isinstance(expiry, (list, tuple)) else (expiry,)
    for policy in given:
        if not isinstance(policy, EVICTION_POLICIES):
            kinds = ", ".join(kind.__name__ for kind in EVICTION_POLICIES)
            raise TypeError(f"{what}: expiry must be of tfplugin.policies' {kinds}; got {policy!r}.")
    for i, policy in enumerate(given):
        for other in given[:i]:
            if type(policy) is type(other):
                raise ValueError(f"{what}: {other} and {policy} contradict each other: give one of them.")
            if {type(policy), type(other)} == {ExpireAfterSteps, ExpireAfterSeconds}:
                raise ValueError(
                    f"{what}: {other} and {policy} contradict each other: a row has one stamp, a step or a second. "
                    "Give one of them."
                )
        if isinstance(policy, KeepTop) and 0 < max_capacity <= policy.rows:
            raise ValueError(
                f"{what}: {policy} keeps no fewer rows than max_capacity={max_capacity} allows: give one of them, or "
                "keep fewer rows."
            )
    if isinstance(every, bool) or not _is_whole(every) or not 0 <= every < 2**62:
        raise ValueError(f"{what}: expire_every must be a number of updates, or 0 for never; got {every!r}.")
    if not isinstance(on_save, bool):
        raise TypeError(f"{what}: expire_on_save must be True or False, got {on_save!r}.")
    if (every or on_save) and not given:
        when = "expire_on_save=True" if on_save else f"expire_every={every}"
        raise ValueError(
            f"{what}: {when} says when rows go, and nothing says which: give expiry=, such as "
            "tfplugin.policies.ExpireAfterSeconds(86400)."
        )
    return {"expiry": given, "expire_every": int(every), "expire_on_save": on_save}


def _admits_all(admission: Admission | None) -> bool:
    if isinstance(admission, ProbabilityAdmission):
        return admission.p == 1
    return admission is None or admission.enter_threshold <= 1
