"""Who came and went in a chain: per member the rows that were born, changed and removed; and the life of one key.

The keys of all members are joined in bounded memory (`kvtools.key_join`); what happened to a key is then told from the
order of the members that name it. No values are read for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvtools import chain
from kvtools.chain_reader import open_member, removed_keys
from kvtools.dialects.chunk import ALL_COLUMNS, KEYS, Array
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import DEFAULT_MEMORY, OpenOptions, Progress
from kvtools.dialects.tfplugin import part_prefix
from kvtools.get import rows_of_keys
from kvtools.key_join import sorted_buckets
from kvtools.row_norms import row_norms

_KEY_ROWS = 1 << 18
_BORN, _CHANGED, _REMOVED = range(3)


@dataclass(frozen=True)
class TableLog:
    """What a member did to a table: of a full checkpoint, `rows` alone; of an increment, how many rows were born and
    changed, how many keys were removed, and the first few of each. `recorded_born` is how many were born by the record,
    which counts keys that went and came again between two members, too."""

    table: str
    rows: int
    born: int = 0
    changed: int = 0
    removed: int = 0
    born_keys: tuple[int, ...] = ()
    changed_keys: tuple[int, ...] = ()
    removed_keys: tuple[int, ...] = ()
    recorded_born: int | None = None


@dataclass(frozen=True)
class MemberLog:
    """A member of a chain, and what it did to each table."""

    member: str
    number: int
    kind: chain.Kind
    step: int | None
    time: float | None
    tables: tuple[TableLog, ...] = ()


@dataclass(frozen=True)
class KeyEvent:
    """What became of a key in a member: it is "there" in a full checkpoint, "born", "changed" or "removed" in an
    increment. The row as it is then, as its first numbers and norm, unless it was removed."""

    member: str
    number: int
    table: str
    what: str
    freq: int | None = None
    version: int | None = None
    l2: float | None = None
    value: tuple[float, ...] = field(default_factory=tuple)


def log_chain(
    members: Sequence[chain.Member],
    *,
    tables: Sequence[str] = (),
    few: int = 0,
    options: OpenOptions | None = None,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
) -> list[MemberLog]:
    """Return what each member of a whole chain did.

    Args:
        members: a full checkpoint and the increments after it, as `kvtools.chain.newest_chain` gives them.
        tables: of these tables alone; of all if empty.
        few: how many keys to name of each kind.
        options: how to open the members.
        memory: bytes to stay within; what needs more goes to temporary files.
        progress: called as keys are read.

    Raises:
        UnknownTableError: there is no table of a name in `tables`.
        BadInputError, CorruptFileError: a member is damaged.
    """
    opened = [open_member(member, options) for member in members]
    of_member: list[list[TableLog]] = [[] for _ in members]
    for name in _chosen(opened[0], tables):
        having = [number for number, one in enumerate(opened) if name in one.tables]
        logs = _table_log(name, [opened[number].table(name) for number in having], few, memory, progress)
        for number, log in zip(having, logs, strict=True):
            of_member[number].append(log)
    found = []
    for member, one, logs in zip(members, opened, of_member, strict=True):
        record = chain.record_of(member)
        if record is not None and member.kind == "delta":
            logs[:] = [_with_record(log, one.table(log.table), record) for log in logs]
        step, time = (None, None) if record is None else (record.step, record.time)
        found.append(MemberLog(member.prefix.name, member.number, member.kind, step, time, tuple(logs)))
    return found


def _with_record(log: TableLog, table: TableReader, record: chain.Record) -> TableLog:
    prefixes = [part_prefix(table.schema, part) for part in range(table.parts)]
    if not all(prefix in record.tables for prefix in prefixes):
        return log
    return replace(log, recorded_born=sum(record.tables[prefix].born for prefix in prefixes))


def _chosen(first: Checkpoint, names: Sequence[str]) -> list[str]:
    return [table.schema.name for table in first.select(names)]


def _table_log(
    name: str, sources: Sequence[TableReader], few: int, memory: int, progress: Progress | None
) -> list[TableLog]:
    first_rows = np.cumsum([0, *(source.rows for source in sources)])
    gone = [removed_keys(source) for source in sources]
    first_gone = np.cumsum([0, *map(len, gone)])
    counts = np.zeros((len(sources), 3), np.int64)
    named: list[list[list[int]]] = [[[], [], []] for _ in sources]
    total = int(first_rows[-1] + first_gone[-1])
    for rows, removed in sorted_buckets([_keys(name, sources, progress), gone], total, memory=memory):
        keys = np.concatenate([rows.keys, removed.keys])
        source = np.concatenate(
            [
                np.searchsorted(first_rows, rows.rows, side="right") - 1,
                np.searchsorted(first_gone, removed.rows, side="right") - 1,
            ]
        )
        there = np.concatenate([np.ones(len(rows.keys), np.bool_), np.zeros(len(removed.keys), np.bool_)])
        order = np.lexsort((there, source, keys))  # an increment removes before it puts in
        keys, source, there = keys[order], source[order], there[order]
        before = np.zeros(len(keys), np.bool_)
        before[1:] = (keys[1:] == keys[:-1]) & there[:-1]
        for kind, happened in ((_BORN, there & ~before), (_CHANGED, there & before), (_REMOVED, before & ~there)):
            counts[:, kind] += np.bincount(source[happened], minlength=len(sources))
            for number in range(1, len(sources)):
                wanted = few - len(named[number][kind])
                if wanted > 0:
                    named[number][kind] += keys[happened & (source == number)][:wanted].tolist()
    logs = [TableLog(name, sources[0].rows)]
    for number, reader in enumerate(sources[1:], 1):
        keys_of = tuple(tuple(some) for some in named[number])
        logs.append(TableLog(name, reader.rows, *counts[number].tolist(), *keys_of))
    return logs


def _keys(name: str, sources: Sequence[TableReader], progress: Progress | None) -> Iterator[Array]:
    done, total = 0, sum(source.rows for source in sources)
    for source in sources:
        for chunk in source.chunks(KEYS, rows=_KEY_ROWS):
            done += len(chunk)
            if progress:
                progress(name, done, total)
            yield chunk.keys


def life_of(
    members: Sequence[chain.Member],
    key: int,
    *,
    tables: Sequence[str] = (),
    options: OpenOptions | None = None,
    progress: Progress | None = None,
) -> list[KeyEvent]:
    """Return what became of one key in each table, in the order of the members; [] where no member has it.

    Arguments and errors are those of `log_chain`.
    """
    opened = [open_member(member, options) for member in members]
    events: list[KeyEvent] = []
    for name in _chosen(opened[0], tables):
        alive = False
        for member, one in zip(members, opened, strict=True):
            if name not in one.tables:
                continue
            event, alive = _event(member, one.table(name), key, alive, progress)
            if event is not None:
                events.append(event)
    return events


def _event(
    member: chain.Member, table: TableReader, key: int, alive: bool, progress: Progress | None
) -> tuple[KeyEvent | None, bool]:
    name = table.schema.name
    (row,) = rows_of_keys(table, np.array([key], object), progress=progress).tolist()
    if row < 0:
        limits = np.iinfo(table.key_dtype)
        gone = limits.min <= key <= limits.max and bool((removed_keys(table) == table.key_dtype.type(key)).any())
        if gone and alive:
            return KeyEvent(member.prefix.name, member.number, name, "removed"), False
        return None, alive
    chunk = table.take(np.array([row]), ALL_COLUMNS)
    assert chunk.values is not None
    what = "there" if member.kind == "full" else "changed" if alive else "born"
    event = KeyEvent(
        member.prefix.name,
        member.number,
        name,
        what,
        None if chunk.freqs is None else int(chunk.freqs[0]),
        None if chunk.versions is None else int(chunk.versions[0]),
        float(row_norms(chunk.values, "l2")[0]),
        tuple(float(number) for number in chunk.values[0]),
    )
    return event, True
