"""Make one checkpoint of several: tables of one name become one table, each key once.

Which rows are kept is decided by a join of the keys alone, in bounded memory; the rows are then streamed. Where a key
is in several sources `on_conflict` says what becomes of it:

    last, first  the row of the last, or first, source that has the key
    newest       the row with the largest version, the last of equal ones
    sum, mean    values and slots are added up, or averaged, over the sources, and a sum that their type does not hold
                 is an error; frequencies are added up, as far as their type goes, and the largest version is kept
    error        nothing is written

An increment's "deleted_keys" remove keys of earlier sources. Where one source has a key twice, its last row counts.
Keys that wait for admission go by the same rule, and wait no more where they have a row. What new rows begin with, and
policies, are those of the last source that records them, with "first" of the first; the account says what differs.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvtools.admission_filter import filters_of
from kvtools.cast import rounded
from kvtools.chain_reader import is_increment
from kvtools.dialects.chunk import KEYS, KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import Checkpoint, TableReader, no_such_table
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.dialects.schema import TableSchema, VariableSchema
from kvtools.dialects.writing import WriteOptions
from kvtools.diff import compare_variables
from kvtools.errors import BadInputError, UsageError
from kvtools.joined_table import JoinedTable
from kvtools.key_join import SortedKeys, row_numbers, sorted_buckets
from kvtools.migrate import Account, check_output, output_of, write_tables
from kvtools.row_mask import RowMask
from kvtools.string_hash import string_keys
from kvtools.table_names import matching
from kvtools.table_view import MaskedTable, TableView
from kvtools.top_rows import sortable
from kvtools.waiting_keys import WaitingKeys

OnConflict = Literal["last", "first", "newest", "sum", "mean", "error"]
CHANGED_KEYS = "-sparse_incr_keys"
"""How DeepRec calls the numbers of the rows of a dense variable that an increment changes."""
_KEY_ROWS = 1 << 18


@dataclass(frozen=True)
class Merged:
    """What became of the rows of a table.

    `deleted` are rows that a later source's list of deleted keys removes, `gone` keys of such rows that have no row
    left. Of the other rows `repeated` are those that their own source replaces later, and `conflicts` the keys that
    then have rows in several sources.
    """

    table: str
    sources: tuple[str, ...]
    rows_read: int
    rows: int
    conflicts: int
    repeated: int
    deleted: int
    gone: int


class MergedTable(MaskedTable):
    """The rows of a table, joined of others, that a mask keeps; with `others`, each combined with the rows of its key.

    `others[row]` is another row of the same key, which may have another one in turn; -1 ends the chain.

    A key whose numbers add up to more than their type holds is a `BadInputError` where its row is read; frequencies
    that do stay at the largest of their type, and are counted.
    """

    def __init__(self, source: TableReader, mask: RowMask, *, others: Array | None = None, mean: bool = False) -> None:
        super().__init__(source, mask)
        self._others = others
        self._mean = mean
        self._part_starts = np.cumsum([0, *source.schema.part_rows])
        self._cut_freqs: dict[int, int] = {}  # by part, so that a part that is read again is not counted twice

    @property
    def cut_freqs(self) -> int:
        """How many frequencies of the rows that `read_part` gave so far add up to more than their type holds."""
        return sum(self._cut_freqs.values())

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows kept of one part, combined; see `TableReader.read_part`."""
        if self._others is None:
            yield from super().read_part(part, columns, rows, verify)
            return
        # A part of which no row is kept is read all the same: its rows are added to others by `take`, which checks no
        # checksums.
        at = cut = 0
        for chunk in self.source.read_part(part, columns, rows, verify):
            kept = np.flatnonzero(self.mask.get(part, at, len(chunk)))
            if len(kept):
                combined, over = self._combined(chunk.take(kept), self._part_starts[part] + at + kept, columns)
                cut += over
                yield combined
            at += len(chunk)
        if columns.freqs:
            self._cut_freqs[part] = cut

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy the rows of these numbers, combined; see `TableReader.take`."""
        numbers = self.mask.rows_of(self.row_numbers(rows))
        return self._combined(self.source.take(numbers, columns), numbers, columns)[0]

    def _combined(self, chunk: Chunk, rows: Array, columns: Columns) -> tuple[Chunk, int]:
        """Return the rows with the others of their keys, and how many frequencies were cut."""
        if self._others is None:
            return chunk, 0
        following = self._others[rows]
        at = np.flatnonzero(following >= 0)
        if not len(at) or columns == KEYS:
            return chunk, 0
        total = _Total(self.schema.name, chunk)
        following = following[at]
        while len(at):
            total.add(at, self.source.take(following, columns))
            following = self._others[following]
            at, following = at[following >= 0], following[following >= 0]
        return total.chunk(mean=self._mean), total.cut_freqs


class _Total:
    """Sums of a chunk's rows and other rows of their keys: of numbers that fit their type, or it is an error; counters
    are added up without running over."""

    def __init__(self, table: str, chunk: Chunk) -> None:
        self._table = table
        self._like = chunk
        self._count = np.ones(len(chunk), np.int64)
        self._values = None if chunk.values is None else _widened(chunk.values)
        self._slots = {name: _widened(slot) for name, slot in chunk.slots.items()}
        self._freqs = None if chunk.freqs is None else chunk.freqs.copy()
        self._versions = None if chunk.versions is None else chunk.versions.copy()
        self._cut = np.zeros(len(chunk), np.bool_)

    @property
    def cut_freqs(self) -> int:
        """How many frequencies add up to more than their type holds."""
        return int(np.count_nonzero(self._cut))

    def add(self, at: Array, other: Chunk) -> None:
        """Add rows to those of these numbers, each of which is there once."""
        self._count[at] += 1
        if self._values is not None and other.values is not None:
            self._add("values", self._values, at, other.values)
        for name, slot in self._slots.items():
            self._add(f"slot {name}", slot, at, other.slots[name])
        if self._freqs is not None and other.freqs is not None:
            here, room = self._freqs[at], np.iinfo(self._freqs.dtype).max - np.maximum(other.freqs, 0)
            self._cut[at] |= here > room
            self._freqs[at] = np.minimum(here, room) + other.freqs
        if self._versions is not None and other.versions is not None:
            self._versions[at] = np.maximum(self._versions[at], other.versions)

    def chunk(self, *, mean: bool) -> Chunk:
        """Return the sums, or means, in the types of the rows; raises `BadInputError` for one that does not fit."""
        values, slots = self._values, self._slots
        return dataclasses.replace(
            self._like,
            values=None if values is None else self._narrowed("values", values, self._like.values, mean),
            slots={
                name: self._narrowed(f"slot {name}", slot, self._like.slots[name], mean) for name, slot in slots.items()
            },
            freqs=self._freqs,
            versions=self._versions,
        )

    def _add(self, column: str, total: Array, at: Array, rows: Array) -> None:
        before, more = total[at], rows.astype(total.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            after = before + more
        if total.dtype.kind == "i":
            over = ((before ^ after) & (more ^ after)) < 0  # both have another sign than their sum
        else:
            over = np.isinf(after) & np.isfinite(before) & np.isfinite(more)
        self._check(column, at, over, total.dtype)
        total[at] = after

    def _narrowed(self, column: str, total: Array, like: Array | None, mean: bool) -> Array:
        assert like is not None
        if mean:
            total = total / self._count[:, None]
        result = rounded(total, like.dtype.name)
        over = result != total if total.dtype.kind == "i" else np.isinf(result.astype(total.dtype)) & np.isfinite(total)
        self._check(column, np.arange(len(total)), over, like.dtype)
        return result

    def _check(self, column: str, at: Array, over: Array, dtype: np.dtype[Any]) -> None:
        if not over.any():
            return
        key = self._like.keys[at[np.flatnonzero(over.any(axis=1))[0]]]
        raise BadInputError(
            f"adding up rows of table '{self._table}': the {column} of key {key} add up to a number that {dtype.name}"
            " does not hold; cast to a wider type first, see `kvtools cast`, or choose another rule than sum"
        )


def merge_tables(
    name: str,
    sources: Sequence[TableReader],
    labels: Sequence[str],
    *,
    on_conflict: OnConflict = "last",
    common: bool = False,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
    wait: bool = True,
) -> tuple[MergedTable, Merged]:
    """Return tables as one table `name`, with each key once.

    Args:
        name: the name of the whole.
        sources: the tables, in the order in which later ones replace earlier ones.
        labels: what to call each in an error.
        on_conflict: what becomes of a key that several have.
        common: leave out slots and counters that not all have, instead of refusing.
        memory: bytes to stay within; what needs more goes to temporary files.
        progress: called as keys are read.
        wait: join the keys that wait for admission, too; without, the whole has none.

    Raises:
        BadInputError: the tables do not agree, "newest" without versions, or "error" and a key that several have.
        UsageError: "mean" of whole numbers.

    Example:
        ```python
        base, increment = kvtools.open("full.ckpt").table("emb"), kvtools.open("incr.ckpt").table("emb")
        table, merged = merge_tables("emb", [base, increment], ["full.ckpt", "incr.ckpt"])
        ```
    """
    joined = JoinedTable(name, sources, labels, common=common, first=on_conflict == "first")
    if on_conflict == "newest" and not joined.schema.has_versions:
        raise BadInputError(
            f"merging into table '{name}': not all of its sources have versions; use --on-conflict last"
        )
    if on_conflict == "mean" and joined.value_dtype.kind in "iu":
        raise UsageError(f"merging into table '{name}': its values are whole numbers, which have no mean of their type")
    mask = RowMask(joined.schema.part_rows, memory=memory, kept=True)
    versions = _versions(joined, memory) if on_conflict == "newest" else None
    others = None
    if on_conflict in ("sum", "mean"):
        others = row_numbers(joined.rows, memory=memory)
        others[:] = -1
    counts = np.zeros(4, np.int64)
    deleted = [_deleted_keys(source, joined.key_dtype) for source in joined.sources]
    delete_starts = np.cumsum([0, *map(len, deleted)])
    waiting = WaitingKeys(name, joined.sources if wait else (), labels, on_conflict, joined.key_dtype, deleted)
    total = joined.rows + int(delete_starts[-1])
    for keys, removed in sorted_buckets([_keys(joined, progress), deleted], total, memory=memory):
        bucket = _Bucket(keys.keys, keys.rows, joined.source_of(keys.rows))
        counts[[0, 3]] += bucket.delete(mask, removed, delete_starts)
        counts[1] += bucket.drop_repeated(mask)
        counts[2] += bucket.resolve_conflicts(mask, joined, on_conflict, versions, others)
        if len(waiting):
            waiting.have_rows(bucket.keys, bucket.sources)
    joined.set_waiting(waiting.extras())
    table = MergedTable(joined, mask, others=others, mean=on_conflict == "mean")
    return table, Merged(
        table=name,
        sources=tuple(labels),
        rows_read=joined.rows,
        rows=table.rows,
        conflicts=int(counts[2]),
        repeated=int(counts[1]),
        deleted=int(counts[0]),
        gone=int(counts[3]),
    )


@dataclass
class _Bucket:
    """Rows of joined tables, sorted by key and, within a key, by row; `sources` [n] are those of the rows."""

    keys: Array
    rows: Array
    sources: Array

    def delete(self, mask: RowMask, removed: SortedKeys, starts: Array) -> tuple[int, int]:
        """Drop the rows whose key a later source deletes; return how many there were, and how many keys have no row
        any more."""
        if not len(removed.keys):
            return 0, 0
        at = np.searchsorted(removed.keys, self.keys, side="right") - 1
        found = (at >= 0) & (removed.keys[at] == self.keys)
        by = np.searchsorted(starts, removed.rows[at], side="right") - 1
        drop = found & (self.sources < by)
        dropped = self.keys[drop]
        count = self._drop(mask, drop)
        return count, len(np.setdiff1d(dropped, self.keys))

    def drop_repeated(self, mask: RowMask) -> int:
        """Drop the rows whose key stands again later in their own source, and return how many there were."""
        again = np.zeros(len(self.keys), np.bool_)
        again[:-1] = (self.keys[1:] == self.keys[:-1]) & (self.sources[1:] == self.sources[:-1])
        return self._drop(mask, again)

    def resolve_conflicts(
        self, mask: RowMask, joined: JoinedTable, on_conflict: OnConflict, versions: Array | None, others: Array | None
    ) -> int:
        """Keep one row of each key, and return how many keys had several."""
        same = self.keys[1:] == self.keys[:-1]
        conflicts = int(np.count_nonzero(same & ~np.concatenate([[False], same[:-1]]))) if len(same) else 0
        if not conflicts:
            return 0
        later = np.concatenate([same, [False]])  # the key stands again in a later source
        earlier = np.concatenate([[False], same])
        if on_conflict == "error":
            here = int(np.flatnonzero(later)[0])
            raise BadInputError(
                f"merging into table '{joined.schema.name}': key {self.keys[here]} is in"
                f" {joined.labels[self.sources[here]]} and in {joined.labels[self.sources[here + 1]]}; choose what"
                " becomes of such keys with --on-conflict"
            )
        if on_conflict == "first":
            self._drop(mask, earlier)
        elif on_conflict == "newest" and versions is not None:
            at = np.flatnonzero(earlier | later)
            group = np.cumsum(~earlier[at])
            order = at[np.lexsort((at, versions[self.rows[at]], group))]
            lost = np.zeros(len(self.keys), np.bool_)
            lost[order[:-1]] = self.keys[order[:-1]] == self.keys[order[1:]]
            self._drop(mask, lost)
        else:
            if others is not None:
                others[self.rows[1:][same]] = self.rows[:-1][same]
            self._drop(mask, later)
        return conflicts

    def _drop(self, mask: RowMask, drop: Array) -> int:
        count = int(np.count_nonzero(drop))
        if count:
            mask.clear(self.rows[drop])
            self.keys, self.rows, self.sources = self.keys[~drop], self.rows[~drop], self.sources[~drop]
        return count


def merge(
    checkpoints: Sequence[Checkpoint],
    output: str | os.PathLike[str],
    *,
    on_conflict: OnConflict = "last",
    common: bool = False,
    tables: Sequence[str] = (),
    into: str | None = None,
    parts: int | None = None,
    to: str | None = None,
    options: WriteOptions | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[Account, list[Merged]]:
    """Write one checkpoint of several.

    Tables that are not merged, and dense variables, are taken from the last checkpoint that has them, or from the
    first with `on_conflict` "first"; the account names what others have otherwise. Maps from hashed keys to their
    strings are joined.

    Args:
        checkpoints: what to read, in the order in which later ones replace earlier ones; one will do with `into`.
        output: where to write.
        on_conflict: what becomes of a key that several have.
        common: leave out slots and counters that not all have, instead of refusing.
        tables: which tables to merge; all if empty.
        into: merge all of `tables` into one of this name, instead of each with those of its name.
        parts: how many parts a merged table gets; as many as it has in the first checkpoint if None.
        to: the dialect to write; that of the first checkpoint if None.
        options: what to ask of the writer.
        workers: how many parts to work on at once.
        progress: called as keys are read, and as rows are written.

    Returns:
        The account, and what became of each merged table's rows.

    Raises:
        UsageError: nothing to merge, or a conflict of names.
        BadInputError: the tables do not agree, or see `merge_tables`.
        OutputError: `output` exists, or cannot be written.

    Example:
        ```python
        merge([kvtools.open("full.ckpt"), kvtools.open("increment.ckpt")], "new.ckpt")
        ```
    """
    options = options or WriteOptions()
    to = to or checkpoints[0].dialect
    output = output_of(output, to, checkpoints)
    check_output(output, to, force=options.force)
    _check_changed_rows(checkpoints)
    groups = _groups(checkpoints, tables, into)
    preferred = checkpoints if on_conflict == "first" else checkpoints[::-1]
    graph = next((one for one in preferred if one.bookkeeping and one.dialect == to), None)
    merged: list[Merged] = []
    result: list[TableReader] = []
    wanted: dict[str, int] = {}
    left_out: dict[str, tuple[str, ...]] = {}
    for name, found in groups.items():
        if len(found) == 1 and into is None:
            result.append(found[0][1])
            continue
        within = [f" ('{table.schema.name}')" if into else "" for _, table in found]
        paths = [str(checkpoint.path) for checkpoint, _ in found]
        table, account = merge_tables(
            name,
            [table for _, table in found],
            [f"'{path}'{which}" for path, which in zip(paths, within, strict=True)],
            on_conflict=on_conflict,
            common=common,
            memory=options.memory,
            progress=progress,
        )
        table.schema = _placed(table.schema, found, graph)
        result.append(table)
        merged.append(dataclasses.replace(account, sources=tuple(map("".join, zip(paths, within, strict=True)))))
        wanted[name] = parts or found[0][1].parts
        joined = table.source
        assert isinstance(joined, JoinedTable)
        left_out[name] = (*_not_common(table.schema, [source.schema for _, source in found]), *joined.differences())
    used = {table.schema.name for found in groups.values() for _, table in found}
    for name in dict.fromkeys(name for checkpoint in checkpoints for name in checkpoint.tables):
        if name in used:
            continue
        if name in groups:
            raise UsageError(
                f"merging into '{into}': there is a table of that name that is not merged; add --table {into}"
            )
        owner, *others = (checkpoint for checkpoint in preferred if name in checkpoint.tables)
        result.append(owner.tables[name])
        left_out[name] = tuple(
            f"the rows of '{other.path}': the table is not merged, that of '{owner.path}' was taken" for other in others
        )
    result = _one_in_a_place(result, graph)
    beside, differing = _beside(preferred, graph)
    written = write_tables(
        result,
        output,
        to,
        beside=beside,
        parts=wanted,
        options=options,
        workers=workers,
        progress=progress,
        keys_once=len(result) == len(groups),
    )
    told = tuple(
        dataclasses.replace(table, losses=(*left_out.get(reader.schema.name, ()), *table.losses, *cut_freqs(reader)))
        for table, reader in zip(written.tables, result, strict=True)
    )
    return dataclasses.replace(
        written, tables=told, losses=(*written.losses, *(differing if written.variables else ()))
    ), merged


def cut_freqs(table: TableReader) -> tuple[str, ...]:
    """Say how many frequencies of a merged table, or of one below a view, were cut when it was read."""
    while isinstance(table, TableView) and not isinstance(table, MergedTable):
        table = table.source
    if not isinstance(table, MergedTable) or not table.cut_freqs:
        return ()
    what = f"{table.cut_freqs:,} frequencies add up" if table.cut_freqs > 1 else "1 frequency adds up"
    return (f"{what} to more than {table.schema.freq_dtype} holds: the largest that it has was written",)


def _not_common(schema: TableSchema, sources: Sequence[TableSchema]) -> tuple[str, ...]:
    """Say which slots and counters of tables their whole has not, as not all of them have those."""
    slots = dict.fromkeys(slot.name for source in sources for slot in source.slots if slot not in schema.slots)
    counters = [
        what
        for what, has in (("frequencies", "has_freqs"), ("versions", "has_versions"))
        if not getattr(schema, has) and any(getattr(source, has) for source in sources)
    ]
    told = []
    if any(filters_of(source) for source in sources) and not filters_of(schema):
        told.append("admission filters: the merged tables differ in their admission, or do not record it")
    return (*told, *(f"{what}: not in all of the merged tables" for what in (*(f"slot {s}" for s in slots), *counters)))


def _groups(
    checkpoints: Sequence[Checkpoint], tables: Sequence[str], into: str | None
) -> dict[str, list[tuple[Checkpoint, TableReader]]]:
    """Return, by the name of the whole, the tables to merge and where they are."""
    there = list(dict.fromkeys(name for checkpoint in checkpoints for name in checkpoint.tables))
    names, unmatched = matching(tables, there) if tables else (there, [])
    if unmatched:
        raise no_such_table(unmatched[0], checkpoints[-1].path, there)
    if not names:
        raise BadInputError(f"merging '{checkpoints[0].path}': it has no key-value table; see `kvtools inspect`")
    if into is None and len(checkpoints) < 2:
        raise UsageError("merging: got one checkpoint, expected several, or --into NAME to merge its own tables")
    if into is not None:
        found = [(ckpt, ckpt.tables[name]) for ckpt in checkpoints for name in names if name in ckpt.tables]
        return {into: found}
    return {name: [(ckpt, ckpt.tables[name]) for ckpt in checkpoints if name in ckpt.tables] for name in names}


def _check_changed_rows(checkpoints: Sequence[Checkpoint]) -> None:
    """Raise `BadInputError` where increments of DeepRec have rows that changed of one dense variable: of these a merged
    one would have the last list alone."""
    having: dict[str, Checkpoint] = {}
    for checkpoint in checkpoints:
        for variable in checkpoint.variables:
            name = variable.name.removesuffix(CHANGED_KEYS)
            if name == variable.name:
                continue
            if name in having:
                raise BadInputError(
                    f"merging '{having[name].path}' and '{checkpoint.path}': both are increments with changed rows of"
                    f" the dense variable '{name}'; put them into their full checkpoint, see `kvtools apply`"
                )
            having[name] = checkpoint


def _placed(
    schema: TableSchema, found: Sequence[tuple[Checkpoint, TableReader]], graph: Checkpoint | None
) -> TableSchema:
    """Return the schema of a merged table with the path that it has in the object graph that is written, and without
    the shard that its sources were, if they were several."""
    tables = [table for checkpoint, table in found if checkpoint is graph] + [table for _, table in found]
    shards = [table.schema.metadata.get("shard") for table in tables]
    if any(shard != shards[0] for shard in shards):
        schema = _without(schema, "shard")
    path = next((t.schema.metadata["object_path"] for t in tables if "object_path" in t.schema.metadata), None)
    if path is None:
        return schema
    return dataclasses.replace(schema, metadata={**schema.metadata, "object_path": path})


def _one_in_a_place(tables: Sequence[TableReader], graph: Checkpoint | None) -> list[TableReader]:
    """Return the tables with those by their names alone whose place in the object graph another has: models of one make
    have their tables, whatever these are called, in the same places. The one that `graph` has there keeps it."""
    paths = [table.schema.metadata.get("object_path") for table in tables]
    known = graph.tables if graph else {}
    owners: dict[str | None, TableReader] = {}
    for path, table in zip(paths, tables, strict=True):
        there = known.get(table.schema.name)
        if path not in owners or (there is not None and there.schema.metadata.get("object_path") == path):
            owners[path] = table
    return [
        table if path is None or owners[path] is table else TableView(table, _without(table.schema, "object_path"))
        for path, table in zip(paths, tables, strict=True)
    ]


def _without(schema: TableSchema, record: str) -> TableSchema:
    metadata = {name: value for name, value in schema.metadata.items() if name != record}
    return dataclasses.replace(schema, metadata=metadata)


def _beside(preferred: Sequence[Checkpoint], graph: Checkpoint | None) -> tuple[Checkpoint, list[str]]:
    """Return the dense variables of all checkpoints, each of the first that has it, and the bookkeeping of `graph`; and
    say which others are left out, as they differ.

    The strings of hashed keys are those of all: whose rows come together, their strings do.
    """
    having: dict[str, list[tuple[Checkpoint, VariableSchema]]] = {}
    for checkpoint in preferred:
        for variable in checkpoint.variables:
            having.setdefault(variable.name, []).append((checkpoint, variable))
    joined = _joined_strings(having)
    bookkeeping = {variable.name for checkpoint in preferred for variable in checkpoint.bookkeeping}
    replaced = {id(checkpoint) for checkpoint in preferred if _is_increment(checkpoint)}
    differing: dict[tuple[str, str], list[str]] = {}
    for name, ((owner, variable), *others) in having.items():
        for other, its in [] if name in joined or name in bookkeeping else others:
            if id(other) in replaced:
                continue
            if variable.dtype != its.dtype or not compare_variables(owner, other, variable, its).same:
                differing.setdefault((str(other.path), str(owner.path)), []).append(name)
    readers = {name: checkpoint for name, ((checkpoint, _), *_) in having.items()}
    if graph is not None:
        readers.update({variable.name: graph for variable in graph.bookkeeping})
    variables = {name: variable for name, ((_, variable), *_) in having.items() if name not in bookkeeping}
    variables |= {
        name: dataclasses.replace(variables[name], shape=array.shape, bytes=array.nbytes)
        for name, array in joined.items()
        if name in variables
    }
    beside = dataclasses.replace(
        preferred[0] if graph is None else graph,
        variables=tuple(variables[name] for name in sorted(variables)),
        read_variable=lambda name: iter([joined[name]]) if name in joined else readers[name].read_variable(name),
        bookkeeping=() if graph is None else graph.bookkeeping,
    )
    return beside, [
        f"what '{other}' has of {_counted(names)}: that of '{owner}' differs, and was taken"
        for (other, owner), names in differing.items()
    ]


def _counted(names: Sequence[str]) -> str:
    listed = ", ".join(f"'{name}'" for name in names)
    return f"the dense variable {listed}" if len(names) == 1 else f"{len(names)} dense variables, {listed}"


def _is_increment(checkpoint: Checkpoint) -> bool:
    """Whether all tables are increments: what comes after it replaces what it has."""
    return bool(checkpoint.tables) and all(map(is_increment, checkpoint.tables.values()))


def _joined_strings(having: Mapping[str, Sequence[tuple[Checkpoint, VariableSchema]]]) -> dict[str, Array]:
    """Return the maps from hashes to their strings that several checkpoints have, each as one, by the names of their
    variables: `<map>-keys` and `<map>-values`."""
    joined: dict[str, Array] = {}
    for name, found in having.items():
        strings = f"{name.removesuffix('-keys')}-values"
        pairs = [
            one for one, its in found if its.dtype == "int64" and any(one is of for of, _ in having.get(strings, ()))
        ]
        if not name.endswith("-keys") or len(pairs) < 2 or len(pairs) < len(found):
            continue
        if any(its.dtype != "string" for _, its in having[strings]):
            continue
        keys = [np.concatenate([*one.read_variable(name)]).reshape(-1) for one in pairs]
        texts = [np.concatenate([*one.read_variable(strings)]).reshape(-1) for one in pairs]
        if all(np.array_equal(string_keys(some), hashes) for some, hashes in zip(texts, keys, strict=True)):
            every, first = np.unique(np.concatenate(keys), return_index=True)
            joined[name], joined[strings] = every, np.concatenate(texts)[first]
    return joined


def _keys(joined: JoinedTable, progress: Progress | None) -> Iterator[Array]:
    done = 0
    for chunk in joined.chunks(KEYS, rows=_KEY_ROWS):
        done += len(chunk)
        if progress:
            progress(f"keys of {joined.schema.name}", done, joined.rows)
        yield chunk.keys


def _deleted_keys(source: TableReader, dtype: np.dtype[Any]) -> Array:
    if any(extra.name == "deleted_keys" for extra in source.schema.extras):
        return source.extra("deleted_keys").astype(dtype, copy=False)
    return np.empty(0, dtype)


def _versions(joined: JoinedTable, memory: int) -> Array:
    """Return all versions in an order that uint64 keeps, [rows]."""
    versions = row_numbers(joined.rows, memory=memory).view(np.uint64)
    at = 0
    for chunk in joined.chunks(Columns(versions=True), rows=_KEY_ROWS):
        assert chunk.versions is not None
        versions[at : at + len(chunk)] = sortable(chunk.versions)
        at += len(chunk)
    return versions


def _widened(numbers: Array) -> Array:
    return numbers.astype(np.int64 if numbers.dtype.kind in "iu" else np.float64)
