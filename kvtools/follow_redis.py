"""Keeps the tables in a Redis as new as a chain of checkpoints: `kvtools follow CHAIN --to redis://host/0`.

What is written is the layout of `docs/dialects/redis.md`, keys and values only: it is for lookups, and slots would take
several times the memory. A full checkpoint is written as `kvtools migrate` writes it, under a new generation of keys
that counts when all are there. An increment is one transaction: its rows, the keys that went, how many rows there are
then, and how far the chain has been applied (the key `<prefix>:follow`); so a run that was killed goes on exactly where
it was. In a cluster, which has no transactions over several nodes, that key is written last: an increment that was cut
short is applied again, which gives the same.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.chain import ChainError
from kvtools.chain_reader import open_member
from kvtools.dialects.chunk import KEYS_AND_VALUES, Array, Chunk, Columns
from kvtools.dialects.interface import TableReader
from kvtools.dialects.redis_layout import TableKeys, as_fields, as_rows, bucket_of, read_meta, rows_lost
from kvtools.dialects.redis_server import LOAD_WRITE, WRITE, batches, connect, place_of, redis_errors, run, script
from kvtools.dialects.schema import DEFAULT_ROW, TableSchema, numpy_dtype
from kvtools.dialects.table_record import json_object, table_schema
from kvtools.dialects.writing import WriteOptions
from kvtools.errors import KvtoolsError, OutputError
from kvtools.follow import ChainWalk, Position, Step
from kvtools.increment import Increment, read_increment
from kvtools.migrate import write_tables

_KEY = "follow"
# How many of these fields, of equal length, a hash has.
_COUNT = script("""
local fields, length, found = ARGV[1], tonumber(ARGV[2]), 0
for i = 1, #fields, length do
  found = found + redis.call('HEXISTS', KEYS[1], string.sub(fields, i, i + length - 1))
end
return found
""")


@dataclass(frozen=True)
class Applied:
    """A member that was applied: its name, rows that were written, keys that went, and when its moment was."""

    name: str
    rows: int
    removed: int
    moment: float


class RedisFollower:
    """Applies the chain in `folder` to the Redis at `url`, from where a run before has come to.

    Args:
        folder: of the chain.
        url: as `kvtools migrate` takes it.
        force: begin anew from the newest full, whatever is there.
        on_refused: told of each member that cannot be applied, once.

    Raises:
        OutputError: there are tables already, of somebody else's.
        BadInputError: Redis cannot be reached.
        UsageError: the URL makes no sense.
        MissingDependencyError: redis-py is not installed.

    Example:
        ```python
        follower = RedisFollower(Path("run"), "redis://cache/0")
        while (applied := follower.step()) is not None:
            print(applied.name)
        ```
    """

    def __init__(
        self,
        folder: Path,
        url: str,
        *,
        force: bool = False,
        on_refused: Callable[[ChainError], None] = lambda error: None,
    ) -> None:
        self.walk = ChainWalk(folder, on_refused=on_refused)
        self._url = url
        self._place = place_of(url)
        self._doing = f"following '{folder}' in '{self._place.shown}'"
        self._client = connect(self._place)
        self._cluster = type(self._client).__name__ == "RedisCluster"
        self._cut_short = False  # in a cluster: some of an increment may be there
        self._meta_key, self._key = self._place.key("meta"), self._place.key(_KEY)
        self._begin(force)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def step(self) -> Applied | None:
        """Apply what comes next in the chain; None where there is nothing, or it is refused.

        Raises:
            OutputError: Redis does not take it; it may be tried again.
            BadInputError: the chain's folder cannot be read.
        """
        step = self.walk.next()
        if step is None:
            return None
        if step.member.kind != "full" and self._do([("GET", self._meta_key)]) == [None]:
            # Redis began again without its data: as at the start, where nothing is there.
            self.walk = replace(self.walk, position=None, trouble="", behind=None, gone="")
            return self.step()
        try:
            if step.member.kind == "full":
                tables: list[TableReader] = [_ValuesOnly(table) for table in open_member(step.member).tables.values()]
                applied = self._write_full(step, tables)
            else:
                assert step.record is not None
                increment = read_increment(step.member, step.record, step.fingerprint, KEYS_AND_VALUES)
                applied = self._apply(increment, step.position)
        except OutputError:
            raise
        except KvtoolsError as error:
            self.walk.refuse(step.member, error)
            return None
        self.walk.took(step)
        return applied

    def _begin(self, force: bool) -> None:
        """Take up what a run before has left, or see that nothing of anybody else's is there."""
        if force:
            return
        meta, said = self._do([("GET", self._meta_key), ("GET", self._key)])
        state = None if said is None else json_object(said, self._doing)
        if meta is None or (state is not None and state.get("sequence") is None):
            return  # nothing is there, or a full that was not written to its end
        described = read_meta(meta, self._doing)
        generation = described["generation"]
        if state is None or state.get("generation") != generation:
            raise OutputError(
                f"{self._doing}: there are tables that no chain was followed with; name another prefix, as in"
                " ?prefix=new, or add --force to replace them"
            )
        self.walk.resume(
            Position(state["chain"], state["sequence"], frozenset(state["fingerprints"]), float(state["time"]))
        )
        if self._cluster:
            self._count_again(meta)
            return
        for record in described["tables"]:
            schema = table_schema(json.dumps(record), "redis", self._doing)
            self._expect_whole(schema, TableKeys(record["key"], record["buckets"]))

    def _write_full(self, step: Step, tables: list[TableReader]) -> Applied:
        self._do([("SET", self._key, json.dumps({"sequence": None}))])
        write_tables(tables, self._url, "redis", options=WriteOptions(force=True))
        (meta,) = self._do([("GET", self._meta_key)])
        generation = read_meta(meta, self._doing)["generation"]
        self._do([("SET", self._key, self._state(step.position, generation))])
        return Applied(step.member.prefix.name, sum(table.rows for table in tables), 0, step.position.time)

    def _state(self, position: Position, generation: str) -> str:
        return json.dumps(
            {
                "chain": position.chain,
                "sequence": position.sequence,
                "fingerprints": sorted(position.follows),
                "time": position.time,
                "generation": generation,
            }
        )

    def _apply(self, increment: Increment, position: Position) -> Applied:
        assert self.walk.position is not None
        with redis_errors(self._doing, OutputError), self._client.pipeline(transaction=not self._cluster) as pipeline:
            from redis.exceptions import WatchError

            if self._cluster:
                meta, said = self._do([("GET", self._meta_key), ("GET", self._key)])
                if self._cut_short and meta is not None:
                    meta = self._count_again(meta)
            else:
                pipeline.watch(self._meta_key, self._key)
                meta, said = pipeline.get(self._meta_key), pipeline.get(self._key)
            state = json_object(said or b"{}", self._doing)
            described = read_meta(meta or b"{}", self._doing) if meta is not None else {}
            if state.get("sequence") != self.walk.position.sequence or state.get("generation") != described.get(
                "generation"
            ):
                raise OutputError(
                    f"{self._doing}: something else has written there meanwhile: another `kvtools follow`, or"
                    " `kvtools migrate`; end it, or name another prefix"
                )
            watch = (lambda names: None) if self._cluster else (lambda names: pipeline.watch(*names))
            commands = list(self._commands(increment, described, watch))
            ends = [
                ("SET", self._meta_key, json.dumps(described)),
                ("SET", self._key, self._state(position, described["generation"])),
            ]
            if self._cluster:
                self._cut_short = True
                self._do(commands)
                for command in ends:  # how far it has come when all the rest is there
                    self._do([command])
                self._cut_short = False
            else:
                pipeline.multi()
                for command in [LOAD_WRITE, *commands, *ends]:
                    pipeline.execute_command(*command)
                try:
                    for reply in pipeline.execute(raise_on_error=False):
                        if isinstance(reply, Exception):
                            raise reply
                except WatchError as error:
                    raise OutputError(
                        f"{self._doing}: something else wrote there at the same moment; it is tried again"
                    ) from error
        rows = sum(len(changes.rows) for changes in increment.tables.values())
        removed = sum(len(changes.removed) for changes in increment.tables.values())
        return Applied(increment.member.prefix.name, rows, removed, position.time)

    def _commands(
        self, increment: Increment, described: dict[str, Any], watch: Callable[[list[str]], Any]
    ) -> Iterator[tuple[Any, ...]]:
        """Yield what writes an increment, and note in `described` how many rows there are then.

        `watch` is given the buckets before they are looked at.
        """
        records = {record["name"]: record for record in described["tables"]}
        for name, changes in increment.tables.items():
            if name not in records:
                raise ChainError(f"'{increment.member.prefix}' has a table '{name}', which is not there", "other-table")
            record = records[name]
            schema = table_schema(json.dumps(record), "redis", self._doing)
            _check_fits(schema, changes.schema)
            where = TableKeys(record["key"], record["buckets"])
            values = changes.rows.values
            assert values is not None
            rows = np.concatenate([as_rows(changes.rows.keys), as_rows(values)], axis=1)
            width = numpy_dtype(schema.key_dtype).itemsize
            written = list(_by_bucket(changes.rows.keys, rows, where.buckets))
            gone = list(_by_bucket(changes.removed, as_rows(changes.removed), where.buckets))
            touched = sorted({where.values(bucket) for bucket, _ in (*written, *gone)})
            if touched:
                watch(touched)
                # A bucket that Redis has evicted would be there again, with the rows of this increment only.
                if not all(self._do([("EXISTS", name) for name in touched])):
                    self._expect_whole(schema, where)
            there = self._there(where, [(b, some[:, :width]) for b, some in written], width)
            went = self._there(where, gone, width)
            record["part_rows"] = [schema.rows + len(rows) - there - went]
            for bucket, some in written:
                yield "EVALSHA", WRITE, 1, where.values(bucket), some.tobytes(), width, rows.shape[1] - width
            for bucket, some in gone:
                yield "HDEL", where.values(bucket), *as_fields(some)

    def _there(self, where: TableKeys, runs: list[tuple[int, Array]], width: int) -> int:
        """Return how many of these keys Redis has."""
        found = 0
        for batch in batches(len(runs)):
            some = runs[batch.start : batch.stop]
            found += sum(self._do([("EVALSHA", _COUNT, 1, where.values(b), keys.tobytes(), width) for b, keys in some]))
        return found

    def _expect_whole(self, schema: TableSchema, where: TableKeys) -> None:
        """Raise `OutputError` unless Redis has all rows of a table."""
        if (held := sum(self._do(where.lengths()))) != schema.rows:
            raise OutputError(f"{self._doing}: {rows_lost(schema.name, held, schema.rows)}, by --force")

    def _count_again(self, meta: bytes) -> bytes:
        """Count the rows: those of an increment that was cut short are there, and were not counted. Returns what is
        noted then."""
        described = read_meta(meta, self._doing)
        for record in described["tables"]:
            record["part_rows"] = [sum(self._do(TableKeys(record["key"], record["buckets"]).lengths()))]
        counted = json.dumps(described).encode()
        self._do([("SET", self._meta_key, counted)])
        return counted

    def _do(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        return run(self._client, commands, self._doing, OutputError)


class _ValuesOnly(TableReader):
    """A table without slots, frequencies and versions."""

    def __init__(self, table: TableReader) -> None:
        self._table = table
        self.schema = replace(
            table.schema,
            slots=(),
            freq_dtype=None,
            version_dtype=None,
            extras=tuple(extra for extra in table.schema.extras if extra.name == DEFAULT_ROW),
        )

    def read_part(self, part: int, columns: Columns, rows: int, verify: bool) -> Iterator[Chunk]:
        """Yield the rows; see `TableReader.read_part`."""
        return self._table.read_part(part, Columns(values=columns.values), rows, verify)

    def take(self, rows: Array, columns: Columns = KEYS_AND_VALUES) -> Chunk:
        """Copy rows; see `TableReader.take`."""
        return self._table.take(rows, Columns(values=columns.values))

    def extra(self, name: str) -> Array:
        """Return an extra array; see `TableReader.extra`."""
        return self._table.extra(name)


def _check_fits(mine: TableSchema, theirs: TableSchema) -> None:
    for what in ("key_dtype", "value_dtype", "dim"):
        if (got := getattr(theirs, what)) != (expected := getattr(mine, what)):
            raise ChainError(
                f"table '{mine.name}': the increment has {what} {got}, expected {expected}; what is there stays until"
                " there is a newer full",
                "other-table",
            )


def _by_bucket(keys: Array, rows: Array, buckets: int) -> Iterator[tuple[int, Array]]:
    """Yield each bucket that has some of `keys` [n], with their `rows`, uint8 [n, bytes]."""
    if not len(keys):
        return
    where = bucket_of(keys, buckets)
    order = np.argsort(where, kind="stable")
    where, rows = where[order], rows[order]
    cuts = [0, *(np.flatnonzero(np.diff(where)) + 1).tolist(), len(where)]
    for a, b in itertools.pairwise(cuts):
        yield int(where[a]), rows[a:b]
