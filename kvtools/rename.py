"""Give tables, slots and dense variables other names."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvtools.dialects.chunk import KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import Progress
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import BadInputError, UsageError
from kvtools.migrate import Account, write_tables
from kvtools.slot_parts import with_other_slots
from kvtools.table_names import near
from kvtools.table_view import TableView, changed_tables


@dataclass(frozen=True)
class Renames:
    """New names, each as (old, new). With `regex` the old ones are patterns that match a whole name, and the new ones
    may refer to their groups as `\\1`. Prefixes are those of tables, taken off and put on after the other renames.
    `split` and `join` cut slots into several and put several together (`kvtools.slot_parts`), before the renames."""

    tables: tuple[tuple[str, str], ...] = ()
    slots: tuple[tuple[str, str], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    strip_prefix: str = ""
    add_prefix: str = ""
    regex: bool = False
    split: tuple[tuple[str, tuple[str, ...]], ...] = ()
    join: tuple[tuple[tuple[str, ...], str], ...] = ()


class RenamedTable(TableView):
    """A table under another name, with its slots under other names."""

    def __init__(self, source: TableReader, name: str, slots: dict[str, str]) -> None:
        schema = source.schema
        metadata: dict[str, Any] = dict(schema.metadata)
        if isinstance(described := metadata.get("slots"), dict):
            metadata["slots"] = {
                slots.get(slot, slot): {**record, "name": slots.get(slot, slot)} for slot, record in described.items()
            }
        renamed = tuple(dataclasses.replace(slot, name=slots.get(slot.name, slot.name)) for slot in schema.slots)
        super().__init__(source, dataclasses.replace(schema, name=name, slots=renamed, metadata=metadata))
        self._slots = slots

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows of one part; see `TableReader.read_part`."""
        return map(self._renamed, self.source.read_part(part, columns, rows, verify))

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers; see `TableReader.take`."""
        return self._renamed(self.source.take(rows, columns))

    def _renamed(self, chunk: Chunk) -> Chunk:
        slots = {self._slots.get(name, name): slot for name, slot in chunk.slots.items()}
        return dataclasses.replace(chunk, slots=slots)


def rename(
    checkpoint: Checkpoint,
    output: str | os.PathLike[str],
    renames: Renames,
    *,
    to: str | None = None,
    options: WriteOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[Account, dict[str, str]]:
    """Write a checkpoint whose tables, slots and dense variables have other names.

    Args:
        checkpoint: what to read.
        output: where to write it.
        renames: the new names.
        to: the dialect to write; that of `checkpoint` if None.
        options: what to ask of the writer.
        workers: how many parts to work on at once.
        progress: called as rows are written.

    Returns:
        The account, and what was renamed: "table a" to "b", "slot ..." and "variable ...".

    Raises:
        UsageError: a pattern is none, or there is nothing to rename.
        BadInputError: nothing has a name that is to be changed, or two things would have one name.
        OutputError: `output` exists, or cannot be written.

    Example:
        ```python
        rename(kvtools.open("model.ckpt-100"), "new.ckpt-100", Renames(tables=(("emb", "user_emb"),)))
        ```
    """
    doing = f"renaming in '{checkpoint.path}'"
    checkpoint = with_other_slots(checkpoint, renames.split, renames.join)
    tables = _renamed(checkpoint.tables, renames.tables, renames.regex, doing, "table")
    tables = _with_prefixes(tables, renames, doing)
    slot_names = {slot for table in checkpoint.tables.values() for slot in table.slots}
    slots = _renamed(sorted(slot_names), renames.slots, renames.regex, doing, "slot")
    names = [variable.name for variable in checkpoint.variables]
    variables = _renamed(names, renames.variables, renames.regex, doing, "variable")
    done = {
        f"{what} {old}": new
        for what, found in (("table", tables), ("slot", slots), ("variable", variables))
        for old, new in found.items()
        if old != new
    }
    done |= {f"slot {old}": ", ".join(new) for old, new in renames.split}
    done |= {f"slot {', '.join(old)}": new for old, new in renames.join}
    if not done:
        raise UsageError(f"{doing}: no name would change; see `kvtools rename --help`")
    _check_distinct(tables, doing, "tables")
    _check_distinct(variables, doing, "variables")
    for name, table in checkpoint.tables.items():
        _check_distinct({slot: slots[slot] for slot in table.slots}, doing, f"slots of table '{name}'")
    if checkpoint.bookkeeping and any(old != new for old, new in variables.items()):
        raise BadInputError(
            f"{doing}: the checkpoint is object-based, its variables are found by their path in the model;"
            " change the names of the model's attributes instead, or write a name-based checkpoint first"
        )

    def renamed_table(table: TableReader) -> TableReader:
        name = table.schema.name
        return RenamedTable(table, tables[name], {slot: slots[slot] for slot in table.slots})

    account = write_tables(
        changed_tables(checkpoint, [], renamed_table) if checkpoint.tables else [],
        output,
        to or checkpoint.dialect,
        beside=_with_variables(checkpoint, variables),
        options=options,
        workers=workers,
        progress=progress,
    )
    return account, done


def _renamed(
    names: Iterable[str], renames: Sequence[tuple[str, str]], regex: bool, doing: str, what: str
) -> dict[str, str]:
    """Return the new name of each name; each rename must be of use."""
    names = list(names)
    result = {name: name for name in names}
    for old, new in renames:
        change = _by_pattern(old, new, doing) if regex else {old: new}.get
        found = {name: renamed for name in names if (renamed := change(name)) is not None}
        if not found:
            there = ", ".join(f"'{name}'" for name in names[:8]) or "none"
            raise BadInputError(
                f"{doing}: no {what} {'matches' if regex else 'is called'} '{old}'; there are {there}"
                + (f" and {len(names) - 8} more" if len(names) > 8 else "")
                + near(old, names)
            )
        for name, renamed in found.items():
            if not renamed:
                raise BadInputError(f"{doing}: {what} '{name}' would have no name left")
            if result[name] not in (name, renamed):
                raise BadInputError(f"{doing}: {what} '{name}' would become '{result[name]}' and '{renamed}'")
            result[name] = renamed
    return result


def _by_pattern(old: str, new: str, doing: str) -> Callable[[str], str | None]:
    try:
        pattern = re.compile(old)
        pattern.sub(new, "")  # does the new name refer to groups that there are?
    except (re.error, IndexError) as error:
        raise UsageError(f"{doing}: '{old}={new}' is no regular expression and its replacement: {error}") from None

    def change(name: str) -> str | None:
        found = pattern.fullmatch(name)
        return None if found is None else found.expand(new)

    return change


def _with_prefixes(tables: dict[str, str], renames: Renames, doing: str) -> dict[str, str]:
    strip = renames.strip_prefix
    if strip and not any(name.startswith(strip) for name in tables.values()):
        raise BadInputError(f"{doing}: no table's name starts with '{strip}'")
    for old, new in tables.items():
        if strip and new == strip:
            raise BadInputError(f"{doing}: table '{old}' would have no name left without '{strip}'")
    return {old: renames.add_prefix + new.removeprefix(strip) for old, new in tables.items()}


def _check_distinct(names: dict[str, str], doing: str, what: str) -> None:
    seen: dict[str, str] = {}
    for old, new in names.items():
        if new in seen:
            raise BadInputError(f"{doing}: {what} '{seen[new]}' and '{old}' would both be called '{new}'")
        seen[new] = old


def _with_variables(checkpoint: Checkpoint, names: dict[str, str]) -> Checkpoint:
    """Return the checkpoint with its dense variables under these names."""
    old_names = {new: old for old, new in names.items()}
    return dataclasses.replace(
        checkpoint,
        variables=tuple(dataclasses.replace(variable, name=names[variable.name]) for variable in checkpoint.variables),
        read_variable=lambda name: checkpoint.read_variable(old_names.get(name, name)),
    )
