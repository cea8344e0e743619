"""What a move from one dialect to another keeps and leaves out, asked of the code that moves (`kvtools.fit`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtools.dialects.detect import dialects
from kvtools.dialects.dialect import Dialect
from kvtools.dialects.schema import ADMISSION_FILTER, ROW_EXTRAS, ExtraSchema, SlotSchema, TableSchema, VersionUnit
from kvtools.errors import BadInputError
from kvtools.fit import fit

_DIM = 8
_EXTRAS = ("initial_values", "blacklist", "filtered_keys", "filtered_freqs", "filtered_versions", "deleted_keys")
_UNITS: tuple[VersionUnit, ...] = ("seconds", "days", "steps", "unknown")


@dataclass(frozen=True)
class Move:
    """What a move from dialect `source` to dialect `target` leaves out of a table that uses all that `source` has.

    `left_out` are whole features; `narrowed` are those that are kept as far as they fit; `refused` are types that are
    not moved until they are cast. All are short, as a table of them shows them.
    """

    source: str
    target: str
    left_out: tuple[str, ...]
    narrowed: tuple[str, ...]
    refused: tuple[str, ...]

    @property
    def lossless(self) -> bool:
        """Whether everything that the source can hold arrives."""
        return not (self.left_out or self.narrowed or self.refused)


def with_tables() -> dict[str, Dialect]:
    """Return the dialects that can hold tables, by name."""
    return {name: dialect for name, dialect in sorted(dialects().items()) if dialect.holds.key_dtypes}


def describe_dialect(dialect: Dialect) -> dict[str, Any]:
    """Return what a dialect is and holds, ready for JSON."""
    holds = {
        name: sorted(value) if isinstance(value, frozenset) else "by table" if callable(value) else value
        for name, value in dataclasses.asdict(dialect.holds).items()
    }
    return {
        "name": dialect.name,
        "title": dialect.title,
        "writes": dialect.write is not None,
        "output": dialect.output,
        "holds": holds,
    }


def move(source: Dialect, target: Dialect) -> Move:
    """Return what moving tables from `source` to `target` leaves out.

    >>> from kvtools.dialects.detect import dialect_named
    >>> move(dialect_named("hdf5"), dialect_named("torch")).lossless
    True
    """
    refused: list[str] = []
    taken = _types(source, target, refused)
    narrowed, left_out = _numbers(source, target)
    if taken is not None:
        left_out = [*_columns(source, target, taken), *left_out]
    if source.holds.variables and not target.holds.variables:
        left_out.append("dense variables")
    # Never from one file into another: they are numbers of rows in the order of this one.
    if source.holds.extras is not None and f"{ROW_EXTRAS[0]}<part>" in source.holds.extras:
        left_out.append("eviction scores")
    return Move(source.name, target.name, tuple(left_out), tuple(narrowed), tuple(refused))


def _table(dialect: Dialect, key_dtype: str, value_dtype: str, **more: Any) -> TableSchema:
    return TableSchema("emb", dialect.name, key_dtype, value_dtype, _DIM, (10,), **more)


def _loses(schema: TableSchema, target: Dialect) -> bool:
    return bool(fit(schema, target).losses)


def _types(source: Dialect, target: Dialect, refused: list[str]) -> tuple[str, str] | None:
    """Note the types that are not taken; return a key and a value type that are, None if there are none."""
    taken = []
    holds = source.holds
    for key in holds.key_dtypes:
        for value in holds.value_dtypes:
            try:
                fit(_table(source, key, value), target)
            except BadInputError:
                continue
            taken.append((key, value))
    keys, values = {key for key, _ in taken}, {value for _, value in taken}
    refused += [f"{key} keys" for key in holds.key_dtypes if key not in keys]
    refused += [f"{value} values" for value in holds.value_dtypes if value not in values]
    return taken[0] if taken else None


def _columns(source: Dialect, target: Dialect, types: tuple[str, str]) -> Iterator[str]:
    """Yield the columns and arrays beside them that are left out."""
    key, value = types
    holds = source.holds
    if holds.only_slots is not None:
        for slot in holds.only_slots:
            try:
                lost = _loses(_table(source, key, value, slots=(slot,)), target)
            except BadInputError:
                yield f"{slot.name} (unless `kvtools cast --to-slot-dtype` makes floats of it first)"
            else:
                if lost:
                    yield slot.name
    elif holds.slots:
        if _loses(_table(source, key, value, slots=(SlotSchema("m", _DIM, value),)), target):
            yield "slots"
        elif not holds.slot_width_is_dim and _loses(
            _table(source, key, value, slots=(SlotSchema("m", 1, value),)), target
        ):
            yield "slots of another width than the value"
        yield from _slot_inits(source, target, types)
    if holds.freq_dtypes and not target.holds.freq_dtypes:
        yield "frequencies"
    if holds.version_dtypes and not target.holds.version_dtypes:
        yield "versions"
    extras = [name for name in _EXTRAS if holds.extras is None or name in holds.extras]
    without = [
        name
        for name in extras
        if _loses(_table(source, key, value, extras=(ExtraSchema(name, value, (5, _DIM)),)), target)
    ]
    yield from (name.replace("_", " ") for name in without)
    filters = f"{ADMISSION_FILTER}<part>"
    with_filter = _table(
        source,
        key,
        value,
        extras=(ExtraSchema(filters.replace("<part>", "0"), "uint8", (64,)),),
        metadata={"policies": {"admission": {"kind": "bloom"}}},
    )
    if (holds.extras is None or filters in holds.extras) and _loses(with_filter, target):
        yield "admission filters"
    if (holds.metadata is None or "initializer" in holds.metadata) and _loses(
        _table(source, key, value, metadata={"initializer": {}}), target
    ):
        yield "the initializer"
    if (holds.metadata is None or "policies" in holds.metadata) and _loses(
        _table(source, key, value, metadata={"policies": {"padding_key": 0}}), target
    ):
        yield "policies (admission, expiry, padding key, the step of versions)"


def _slot_inits(source: Dialect, target: Dialect, types: tuple[str, str]) -> Iterator[str]:
    """Yield the ways in which slots of new rows may begin that are left out."""
    holds = source.holds
    if (
        source.holds.only_slots is not None
        or not target.holds.slots
        or not (holds.metadata is None or "slots" in holds.metadata)
    ):
        return

    def lost(**init: Any) -> bool:
        slots = (SlotSchema("m", _DIM, types[1]),)
        table = _table(source, *types, slots=slots, metadata={"slots": {"m": init}})
        return init["init"] in holds.slot_inits and _loses(table, target)

    if lost(init="constant", constant=0.5):
        yield "initial values of slots"
    elif lost(init="copy_value"):
        yield "slots that begin as the value"


def _numbers(source: Dialect, target: Dialect) -> tuple[list[str], list[str]]:
    """Return the numbers that arrive as far as they fit, and the units of versions that do not arrive."""
    a, b = source.holds, target.holds
    narrowed, left_out = [], []
    wide = [key for key in a.key_dtypes if key not in b.key_dtypes and not _within(key, b.key_dtypes)]
    taken = [key for key in wide if key in ("int64", "uint64") and b.key_dtypes]
    narrowed += [f"{key} keys that {'int64' if 'int64' in b.key_dtypes else b.key_dtypes[0]} has" for key in taken]
    for what, own, theirs in (
        ("frequencies", a.freq_dtypes, b.freq_dtypes),
        ("versions", a.version_dtypes, b.version_dtypes),
    ):
        if theirs and any(not _within(dtype, theirs) for dtype in own):
            widest = max(theirs, key=_largest)
            narrowed.append(f"{what} that {widest} has")
    if a.version_dtypes and b.version_dtypes and b.version_units is not None:
        units = [unit for unit in (a.version_units or _UNITS) if unit not in b.version_units]
        if "days" in units and "seconds" in b.version_units:
            units.remove("days")
        if "seconds" in units and "days" in b.version_units:
            units.remove("seconds")
            narrowed.append("versions without the time of day")
        left_out += [f"versions that count {unit}" for unit in units if unit != "unknown"]
        left_out += ["versions of an unknown unit"] if "unknown" in units else []
    return narrowed, left_out


def _largest(dtype: str) -> int:
    import numpy as np

    return int(np.iinfo(dtype).max)


def _within(dtype: str, others: Sequence[str]) -> bool:
    """Tell whether one of the types holds every number of `dtype`."""
    import numpy as np

    own = np.iinfo(dtype)
    return any(np.iinfo(other).min <= own.min and own.max <= np.iinfo(other).max for other in others)


def moves() -> list[Move]:
    """Return every move that kvtools can make between different dialects, by source and target."""
    known = with_tables().values()
    return [move(a, b) for a in known for b in known if a.name != b.name and b.write is not None]


def page_tables() -> str:
    """Return, in Markdown, what each dialect holds and what each move leaves out: the body of docs/lossless.md."""
    lines = [
        "| dialect | written | keys | values | slots | frequencies | versions | parts | dense variables |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_holds_line(dialect) for dialect in with_tables().values()]
    lines += ["", "| from | to | what arrives |", "|---|---|---|"]
    all_moves = moves()
    for source in dict.fromkeys(one.source for one in all_moves):
        outcomes: dict[str, list[str]] = {}
        for one in all_moves:
            if one.source == source:
                outcomes.setdefault(said(one), []).append(one.target)
        for outcome, targets in sorted(outcomes.items(), key=lambda item: (item[0] != _ALL, item[1])):
            lines.append(f"| {source} | {', '.join(targets)} | {outcome} |")
    return "\n".join(lines) + "\n"


_ALL = "**everything**"


def said(one: Move) -> str:
    """Say in a line what a move does.

    >>> said(Move("a", "b", ("slots",), (), ("float64 values",)))
    'all but slots; cast first: float64 values'
    """
    parts = []
    if one.left_out:
        parts.append(f"all but {', '.join(one.left_out)}")
    if one.narrowed:
        parts.append(f"only {', '.join(one.narrowed)}")
    if one.refused:
        parts.append(f"cast first: {', '.join(one.refused)}")
    return "; ".join(parts) or _ALL


def _holds_line(dialect: Dialect) -> str:
    holds = dialect.holds
    slots = "-"
    if holds.slots:
        slots = "as wide as the value" if holds.slot_width_is_dim else "any width"
    if holds.only_slots is not None:
        slots = ", ".join(slot.name for slot in holds.only_slots)
    units = _UNITS if holds.version_units is None else holds.version_units
    versions = f"{_listed(holds.version_dtypes)} ({', '.join(units)})" if holds.version_dtypes else "-"
    parts = "-"
    if holds.many_parts:
        parts = "by table" if callable(holds.partition) else holds.partition or "any"
    cells = [
        dialect.name,
        "yes" if dialect.write else "-",
        _listed(holds.key_dtypes),
        _listed(holds.value_dtypes),
        slots,
        _listed(holds.freq_dtypes),
        versions,
        parts,
        "yes" if holds.variables else "-",
    ]
    return f"| {' | '.join(cells)} |"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "-"
