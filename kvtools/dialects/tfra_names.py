"""How TFRA names what it saves: which saved tables are slots or status of which variable, and what slots are called.

TFRA keeps a separate table for each optimizer slot and for the status of a restrict policy. Nothing says so but the
names, in which "/" has become "_":

    tower/ad_emb/tower_ad_emb                       variable "tower/ad_emb"
    m/tower_ad_emb_Adam_m                           its slot "m", of optimizer "Adam"
    status/frequency/status_tower_ad_emb_frequency  its status, of FrequencyRestrictPolicy

Source: https://github.com/tensorflow/recommenders-addons, dynamic_embedding_optimizer.py (`create_slots`) and
restrict_policies.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvtools.dialects.object_graph import unescape

SLOTS = frozenset(
    {
        *("m", "v", "vhat", "u", "momentum", "velocity", "rms", "mg", "average_gradient"),
        *("accum", "accumulator", "linear", "accum_update", "accum_grad", "accum_var"),
        *("accumulated_grad", "accumulated_delta_var", "gradient_accumulator", "ma", "slow"),
    }
)
"""The slots of TensorFlow's and Keras' optimizers; a table is taken for a slot of another name only where more says
so than that name."""

_OPTIMIZER = re.compile("(?i:adam|adagrad|ftrl|rmsprop|momentum|adadelta|sgd|lamb(?!da))|(Lazy|Group)[A-Z]")
"""What an optimizer's name has in it. A user's lookup may be called "group_id" or "lambda"."""
_LOOKUP = "-shadow"
"""What the lookup of TFRA's Keras layers ends in."""

_KERAS_OPTIMIZERS = frozenset(
    {"Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD"}
)
_OF_SLOTS = (
    ({"m", "v"}, "Adam"),
    ({"m", "u"}, "Adamax"),
    ({"accumulator", "linear"}, "Ftrl"),
    ({"accum", "linear"}, "Ftrl"),
    ({"accumulator"}, "Adagrad"),
    ({"accum", "accum_update"}, "Adadelta"),
    ({"accum_grad", "accum_var"}, "Adadelta"),
    ({"accumulated_grad", "accumulated_delta_var"}, "Adadelta"),
    ({"rms"}, "RMSprop"),
    ({"velocity"}, "RMSprop"),
    ({"momentum"}, "Momentum"),
    ({"m"}, "SGD"),
)
_NUMBERED = re.compile(r"_\d+$")
_STATUS: tuple[tuple[str, Literal["freqs", "versions"]], ...] = (("frequency", "freqs"), ("timestamp", "versions"))


@dataclass(frozen=True)
class SavedTable:
    """A table as it was saved, before anybody knows what it is.

    `place` is where it is, unique in its checkpoint: the tensor name or path up to the part. `base` is the variable's
    name with "/" as "_". `name` is the name itself: as TFRA saved it, or the best guess from where it stands.
    `scope` is the last component of its name scope, "" if there is none. `tracked` tells that an object graph has it
    under its own name, as it has slots and status but no variable of a user. `optimizer` is whose slot the object graph
    says that it is.
    """

    place: str
    base: str
    name: str
    scope: str = ""
    tracked: bool = False
    optimizer: str = ""


@dataclass(frozen=True)
class Role:
    """What a saved table is to a variable: a slot called `slot`, or its "freqs" or "versions".

    `guessed` tells that the optimizer's name is not in the files.
    """

    owner: str
    kind: Literal["slot", "freqs", "versions"]
    slot: str = ""
    guessed: bool = False


def of_scope(place: str) -> SavedTable:
    """Describe a name-based table by the name before `_mht_`: `[scope/]<name with / as _>`.

    >>> of_scope("tower/ad_emb/tower_ad_emb").name
    'tower/ad_emb'
    >>> of_scope("emb_1/b_emb").name
    'b/emb'
    >>> of_scope("m/tower_ad_emb_Adam_m").name
    'tower_ad_emb_Adam/m'
    """
    *scopes, base = place.split("/")
    scope = scopes[-1] if scopes else ""
    return SavedTable(place, base, _name(scopes, base), scope)


def of_path(place: str) -> SavedTable:
    """Describe an object-based table by its path, up to the part: `<path>/tables_of_<name>`.

    >>> of_path("optimizer/emb.Slook.Sm/tables_of_emb.Slook.Sm").name
    'emb/look/m'
    """
    *path, last = place.split("/")
    escaped = last.removeprefix("tables_of_")
    name = unescape(escaped)
    return SavedTable(place, name.replace("/", "_"), name, "", "/" in name and bool(path) and path[-1] == escaped)


def optimizers_of(full_names: Iterable[str]) -> dict[str, str]:
    """Return Keras' optimizers by the names of their slots, of the full names in an object graph.

    An optimizer has the rows of the last step in its lists, beside the slots of dense variables.

    >>> optimizers_of(["AdamW/emb/look/m", "AdamW/m/dense/kernel", "dense/kernel"])
    {'emb/look/m': 'AdamW', 'm/dense/kernel': 'AdamW'}
    """
    found = {}
    for full_name in full_names:
        first, _, name = full_name.partition("/")
        optimizer = _NUMBERED.sub("", first)
        if optimizer in _KERAS_OPTIMIZERS:
            found[name] = optimizer
    return found


def of_file(base: str) -> SavedTable:
    """Describe a table of which there is a file: no more than the name with "/" as "_"."""
    return SavedTable(base, base, base)


def assign_roles(tables: Sequence[SavedTable], alike: Callable[[SavedTable, SavedTable, str], bool]) -> dict[str, Role]:
    """Find out which tables are slots or status of which others, by place; what is in no role is a table of its own.

    Args:
        tables: all saved tables.
        alike: tells whether a table can be another's "slot", "freqs" or "versions" by its parts, type and width.
    """
    by_base: dict[str, list[SavedTable]] = {}
    for table in tables:
        by_base.setdefault(table.base, []).append(table)
    found: dict[str, tuple[SavedTable, Literal["slot", "freqs", "versions"], str, str]] = {}
    for table in tables:
        status = _status(table, by_base, alike)
        if status is not None:
            found[table.place] = (status[0], status[1], "", "")
    for table in tables:
        if table.place in found:
            continue
        for owner in _owners(table, by_base):
            split = _split(table, owner) if owner.place not in found and alike(owner, table, "slot") else None
            if split:
                found[table.place] = (owner, "slot", *split)
                break
    # A slot's slot would be a user's own variable that looks like one: only variables own slots.
    found = {place: role for place, role in found.items() if role[0].place not in found}
    return _labelled(found, {table.place: table.optimizer for table in tables})


def initial_of(slot: str) -> float:
    """Return what a slot's rows start from, by its name: the default of its optimizer, which no file records.

    >>> initial_of("Adagrad.accumulator"), initial_of("Adam.m")
    (0.1, 0.0)
    """
    op, _, name = slot.rpartition(".")
    if name in ("accum", "accumulator") and any(known in op.lower() for known in ("adagrad", "ftrl")):
        return 0.1
    return 1.0 if (op, name) == ("RMSProp", "rms") else 0.0  # RMSprop, of Keras, starts from zeros


def _name(scopes: Sequence[str], base: str) -> str:
    """Return `base` with "/" where the scopes that end it say so."""
    for first in range(len(scopes)):
        for components in (list(scopes[first:]), [_NUMBERED.sub("", scope) for scope in scopes[first:]]):
            tail = "_".join(components)
            if base == tail:
                return "/".join(components)
            if base.endswith(f"_{tail}"):
                return "/".join([base.removesuffix(f"_{tail}"), *components])
    return base


def _owners(table: SavedTable, by_base: Mapping[str, Sequence[SavedTable]]) -> Iterable[SavedTable]:
    """Yield the tables whose name begins this one's, the longest first; none where two share that name."""
    ends = [match.start() for match in re.finditer("_", table.base)]
    for end in reversed(ends):
        there = by_base.get(table.base[:end], ())
        if len(there) == 1:
            yield there[0]


def _split(table: SavedTable, owner: SavedTable) -> tuple[str, str] | None:
    """Return the optimizer's (or lookup's) name and the slot's of a table that begins like `owner`, or None."""
    rest = table.base[len(owner.base) + 1 :]
    if table.tracked:
        if not table.name.startswith(f"{owner.name}/"):
            return None
        op, _, slot = table.name[len(owner.name) + 1 :].rpartition("/")
        return op, slot
    scopes = [table.scope, _NUMBERED.sub("", table.scope)] if table.scope else []
    for slot in [*scopes, *sorted(SLOTS, key=len, reverse=True)]:
        if rest == slot or rest.endswith(f"_{slot}"):
            op = rest.removesuffix(slot).removesuffix("_")
            if slot in SLOTS or _is_optimizer(op):
                return op, slot
    if not scopes:
        op, _, slot = rest.partition("_")
        if slot and _is_optimizer(op):
            return op, slot
    return None


def _is_optimizer(op: str) -> bool:
    return not op.endswith(_LOOKUP) and _OPTIMIZER.search(op) is not None


def status_of(base: str, bases: Container[str]) -> tuple[str, Literal["freqs", "versions"]] | None:
    """Return whose status a table of this base is by its name, and which; None if it is none of `bases`'.

    >>> status_of("deep_deep_status_1_emb_frequency", {"emb"})
    ('emb', 'freqs')
    """
    for suffix, kind in _STATUS:
        if not base.endswith(f"_{suffix}"):
            continue
        rest = base.removesuffix(f"_{suffix}")
        for start in [0, *(match.end() for match in re.finditer("_", rest))]:
            if rest[start:] in bases and (not start or re.search(r"(^|_)status_(\d+_)?$", rest[:start])):
                return rest[start:], kind
    return None


def _status(
    table: SavedTable,
    by_base: Mapping[str, Sequence[SavedTable]],
    alike: Callable[[SavedTable, SavedTable, str], bool],
) -> tuple[SavedTable, Literal["freqs", "versions"]] | None:
    found = status_of(table.base, by_base)
    there = by_base[found[0]] if found else ()
    return (there[0], found[1]) if found and len(there) == 1 and alike(there[0], table, found[1]) else None


def _labelled(
    found: Mapping[str, tuple[SavedTable, Literal["slot", "freqs", "versions"], str, str]],
    optimizers: Mapping[str, str],
) -> dict[str, Role]:
    groups: dict[tuple[str, str], set[str]] = {}
    for owner, _, op, slot in found.values():
        groups.setdefault((owner.place, op), set()).add(slot)
    roles: dict[str, Role] = {}
    taken: set[tuple[str, str]] = set()
    for place, (owner, kind, op, slot) in sorted(found.items()):
        if kind != "slot":
            if (owner.place, kind) not in taken:
                taken.add((owner.place, kind))
                roles[place] = Role(owner.place, kind)
            continue
        known = optimizers[place] or (op if _is_optimizer(op.split("/")[-1]) else None)
        label = f"{known or optimizer_of(groups[owner.place, op]) or op or 'optimizer'}.{slot}"
        if (owner.place, label) in taken:
            label = f"{op or 'optimizer'}.{slot}"
        if (owner.place, label) in taken:
            continue
        taken.add((owner.place, label))
        roles[place] = Role(owner.place, "slot", label, known is None)
    return roles


def optimizer_of(slots: set[str]) -> str | None:
    """Return the optimizer that has slots of these names, None if it is not one of TensorFlow's or Keras'.

    >>> optimizer_of({"m", "v", "vhat"})
    'Adam'
    """
    return next((name for needed, name in _OF_SLOTS if needed <= slots), None)
