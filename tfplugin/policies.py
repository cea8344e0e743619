"""Which keys a table gives a row to: the arguments `enter_threshold`, `admission` and `padding_key` of variables."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import tensorflow as tf

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


Admission = CountAdmission | BloomAdmission | ProbabilityAdmission

_ADMISSIONS: dict[str, type[Any]] = {
    "count": CountAdmission,
    "bloom": BloomAdmission,
    "probability": ProbabilityAdmission,
}


@dataclasses.dataclass(frozen=True)
class Policies:
    """What a variable was told about the life of its rows, beside its capacity.

    Attributes:
      admission: which keys get a row; None: all.
      admits_on: ``"lookup"``: training lookups count; ``"update"``: updates do, of tables whose lookups insert nothing.
      padding_key: the key that never gets a row; None: there is none.
    """

    admission: Admission | None = None
    admits_on: str = "lookup"
    padding_key: int | None = None

    def to_json(self) -> str:
        """The form that ops and checkpoints carry: an object; nothing where there is no policy."""
        said: dict[str, Any] = {}
        if self.admission is not None:
            said["admission"] = self.admission.fields()
            if self.admits_on != "lookup":
                said["admission"]["on"] = self.admits_on
        if self.padding_key is not None:
            said["padding_key"] = self.padding_key
        return json.dumps(said) if said else ""

    @classmethod
    def from_json(cls, text: str | bytes) -> Policies:
        """What `to_json` gave."""
        said = json.loads(text) if text else {}
        admission, on = None, "lookup"
        if "admission" in said:
            fields = dict(said["admission"])
            on = fields.pop("on", on)
            admission = _ADMISSIONS[fields.pop("kind")](**fields)
        return cls(admission, on, said.get("padding_key"))


def resolve(
    name: str,
    key_dtype: tf.DType,
    *,
    enter_threshold: Any = 0,
    admission: Any = None,
    padding_key: Any = None,
) -> Policies:
    """The policies that the arguments of a variable ask for.

    Raises:
      ValueError: a threshold that is none; both a threshold and an `admission`; a padding key that is no key.
      TypeError: `admission` is none of the classes here.
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
    return Policies(admission, padding_key=padding_key)


def _admits_all(admission: Admission | None) -> bool:
    if isinstance(admission, ProbabilityAdmission):
        return admission.p == 1
    return admission is None or admission.enter_threshold <= 1
