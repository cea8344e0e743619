"""Which table, part and slot a variable of TFPlus or DeepRec is: both say it by the variable's name alone.

scope/emb                  a table of one part, made without a partitioner
scope/emb/Adam             its slot
scope/emb/part_1           part 1 of a partitioned table
scope/emb/part_1/Adam_1    the slot of that part
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtools.dialects.column import Column
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.schema import TableSchema
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError

_PART = re.compile(r"(?P<table>.+)/part_(?P<part>0|[1-9]\d{0,5})(?:/(?P<slot>.+))?", re.S)


@dataclass(frozen=True)
class Shape:
    """What a variable's keys and values look like, as far as it helps to tell slots from tables."""

    rows: int
    width: int
    key_dtype: str


class Variable(Protocol):
    """A variable that was opened."""

    @property
    def keys(self) -> Column:
        """Its keys."""
        ...

    @property
    def values(self) -> Column:
        """Its rows."""
        ...


@dataclass
class TableNames:
    """The variables of one table: `parts[part][slot]`, slot "" being the table itself.

    `partitioned` tells whether its parts are called `part_<i>`, be it one part only.
    """

    name: str
    partitioned: bool
    parts: dict[int, dict[str, str]] = field(default_factory=dict)

    @property
    def slots(self) -> list[str]:
        """The slots that any part has, in order of their names."""
        return sorted({slot for variables in self.parts.values() for slot in variables if slot})

    def in_order(self, doing: str) -> list[dict[str, str]]:
        """Return the variables of part 0, 1, ... by slot; raises `BadInputError` if a part is missing."""
        missing = next((part for part in range(len(self.parts)) if "" not in self.parts.get(part, {})), None)
        if missing is not None:
            raise BadInputError(
                f"{doing}: got parts {sorted(self.parts)[:20]}, part {missing} is missing; the checkpoint was written"
                " in part, write it again"
            )
        return [self.parts[part] for part in range(len(self.parts))]


def tables_of(variables: Mapping[str, Shape]) -> list[TableNames]:
    """Put variables together to tables.

    A variable below a part of a table is a slot. One that is below a table without parts may be a table too: it is a
    slot if its rows are as wide as the table's, or several times as wide, and its own name is written like an
    optimizer's (`Adam_1`), or it has exactly as many rows.

    >>> small = Shape(10, 4, "int64")
    >>> [(t.name, t.parts) for t in tables_of({"emb/part_0": small, "emb/part_0/Adam": small})]
    [('emb', {0: {'': 'emb/part_0', 'Adam': 'emb/part_0/Adam'}})]
    """
    tables: dict[tuple[str, bool], TableNames] = {}
    single: list[str] = []
    partitioned = {found["table"] for found in map(_PART.fullmatch, variables) if found and not found["slot"]}
    for variable in sorted(variables):
        found = _PART.fullmatch(variable)
        if found and found["table"] in partitioned:
            table = tables.setdefault((found["table"], True), TableNames(found["table"], True))
            table.parts.setdefault(int(found["part"]), {})[found["slot"] or ""] = variable
        else:
            single.append(variable)
    for variable in single:  # sorted: a table comes before what is below it
        owner = _owner(variable, variables, tables)
        if owner is None:
            tables[variable, False] = TableNames(variable, False, {0: {"": variable}})
        else:
            owner.parts[0][variable.removeprefix(f"{owner.name}/")] = variable
    return list(tables.values())


def _owner(
    variable: str, variables: Mapping[str, Shape], tables: Mapping[tuple[str, bool], TableNames]
) -> TableNames | None:
    """Return the table that a variable is a slot of, the longest name first; None if it is a table."""
    own = variables[variable]
    end = variable.rfind("/")
    while end > 0:
        table = tables.get((variable[:end], False))
        if table is not None:
            of = variables[table.name]
            like_an_optimizer = variable[end + 1 :][:1].isupper()
            fits = own.key_dtype == of.key_dtype and of.width > 0 and own.width > 0 and own.width % of.width == 0
            if fits and (like_an_optimizer or own.rows == of.rows):
                return table
        end = variable.rfind("/", 0, end)
    return None


@dataclass(frozen=True)
class Opened:
    """Tables by name, what kept other tables from being opened, and the tensors that all of them are made of."""

    tables: dict[str, TableReader]
    tensors: set[str]
    broken: dict[str, KvtoolsError]


def open_tables(
    path: object,
    variables: Mapping[str, Shape],
    options: OpenOptions,
    open_table: Callable[[TableNames], tuple[TableReader, set[str]]],
    tensors_of: Callable[[str], Iterable[str]],
) -> Opened:
    """Open the tables that these variables of a bundle at `path` make; errors are kept if `options.lenient`.

    `tensors_of(variable)` are the tensors that there are of a variable, be it one that cannot be opened.
    """
    opened = Opened({}, set(), {})
    for names in tables_of(variables):
        try:
            if names.name in opened.tables:
                raise BadInputError(
                    f"opening table '{names.name}' of '{path}': it is there with parts and without; the checkpoint is a"
                    " mixture of two, write it again"
                )
            table, tensors = open_table(names)
        except KvtoolsError as error:
            if not options.lenient:
                raise
            opened.broken[names.name] = error
            for variable in [variable for slots in names.parts.values() for variable in slots.values()]:
                opened.tensors.update(tensors_of(variable))
            continue
        opened.tables[names.name] = table
        opened.tensors.update(tensors)
    return opened


def check_alike(doing: str, slot: str, parts: Sequence[Mapping[str, Variable]]) -> None:
    """Raise `CorruptFileError` unless all parts have `slot` ("" for the table itself), in the same types and width."""
    what = f"slot '{slot}'" if slot else "the table"
    lacking = next((part for part, variables in enumerate(parts) if slot not in variables), None)
    if lacking is not None:
        raise CorruptFileError(
            f"{doing}: part {lacking} lacks {what}, other parts have it; the checkpoint was written in part, write it"
            " again"
        )
    key_dtype, first = parts[0][""].keys.dtype, parts[0][slot].values
    for part, variables in enumerate(parts):
        keys, values = variables[slot].keys, variables[slot].values
        if keys.dtype != key_dtype or values.dtype != first.dtype or values.row_shape != first.row_shape:
            raise CorruptFileError(
                f"{doing}: {what} has {keys.dtype} keys and {values.dtype} rows of {list(values.row_shape)} in part"
                f" {part}, expected {key_dtype} keys and {first.dtype} rows of {list(first.row_shape)} as elsewhere;"
                " the parts are of different checkpoints, write it again"
            )


def variable_name(schema: TableSchema, part: int, slot: str = "") -> str:
    """Return how the variable of a part of a table, or of its slot, is called when it is written.

    A table of one part has no `part_0` in its names unless its metadata says that it is "partitioned".
    """
    partitioned = schema.parts > 1 or schema.metadata.get("partitioned")
    name = f"{schema.name}/part_{part}" if partitioned else schema.name
    return f"{name}/{slot}" if slot else name
