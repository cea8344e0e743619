"""Questions in SQL to the tables of one or several checkpoints, answered by DuckDB as it reads their rows."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtools.dialects.arrow_columns import import_pyarrow
from kvtools.dialects.interface import Checkpoint, TableReader
from kvtools.dialects.options import DEFAULT_MEMORY, Progress
from kvtools.errors import BadInputError, KvtoolsError, OutputError, UsageError
from kvtools.scratch_array import scratch_room
from kvtools.sql.columns import QueryColumn, near, query_columns, unique_names, written
from kvtools.sql.connection import connect, first_line, import_duckdb, lock, quoted, wider_hint
from kvtools.sql.result import QueryResult
from kvtools.sql.syntax import Node, nodes, parse

MAIN = "main"
"""The schema whose tables need no name before theirs."""

_TAKEN = frozenset({"main", "temp", "system", "memory", "information_schema", "pg_catalog"})
_TABLE_FUNCTIONS = frozenset(
    {"duckdb_functions", "generate_series", "json_each", "json_tree", "range", "repeat", "repeat_row", "unnest"}
)
"""What a FROM may call: what computes. DuckDB's others are about files, itself, or addresses in memory."""

_BATCH_ROWS = 1 << 16
_THREAD_BYTES = 128 << 20
"""What each thread of DuckDB should have: with less, a sort of long rows fails that would spill."""
_READERS = 1 / 4
"""The share of the memory that is for reading tables."""

Sources = Mapping[str, Checkpoint]


def query(
    sources: Checkpoint | Sources,
    text: str,
    *,
    memory: int = DEFAULT_MEMORY,
    threads: int | None = None,
    progress: Progress | None = None,
) -> QueryResult:
    """Ask tables a question in SQL.

    Args:
        sources: a checkpoint, or several by name: table `t` of the one called `old` is `old.t`. That of the name ""
            needs none.
        text: one SELECT, in the SQL of DuckDB. Columns are those of `kvtools.sql.columns`.
        memory: bytes to stay within; what needs more goes to a temporary folder (`TMPDIR`).
        threads: how many threads DuckDB computes with; the processors there are if None.
        progress: called as rows are read, with a table's name, from several threads.

    Returns:
        The answer, which is computed as it is read.

    Raises:
        UsageError: the text is no SELECT, or is about what there is not; or names of checkpoints make no sense.
        MissingDependencyError: duckdb or pyarrow is not installed.

    Example:
        >>> from kvtools.array_table import ArrayTable
        >>> import numpy as np
        >>> table = ArrayTable("emb", np.array([7, -2]), np.float32([[3, 4], [0, 0]]), freqs=np.array([1, 9]))
        >>> query(Checkpoint("", "memory", {"emb": table}), "select key, freq, norm from emb order by freq").rows()
        [(7, 1, 5.0), (-2, 9, 0.0)]
    """
    doing = "asking tables"
    import_duckdb(doing)
    import_pyarrow(doing)
    if not isinstance(text, str):
        raise UsageError(f"{doing}: got {type(text).__name__}, expected the text of a SELECT")
    if threads is not None and threads < 1:
        raise UsageError(f"{doing}: got {threads} threads, expected 1 or more")
    sources = {"": sources} if isinstance(sources, Checkpoint) else sources
    named = _named(sources)
    try:
        tree = parse(text, doing)
    except UsageError as error:
        raise UsageError(f"{error}{_unquoted(text, named)}") from None
    _check_functions(tree, doing)
    return QueryResult(_Asked(named, text, tree, memory, threads, progress, doing))


def _named(sources: Sources) -> dict[str, Checkpoint]:
    """Return checkpoints by the schema that each is to be."""
    named: dict[str, Checkpoint] = {}
    for name, checkpoint in sources.items():
        if not isinstance(checkpoint, Checkpoint):
            raise UsageError(
                f"attaching {name!r}: got {checkpoint!r:.80}, expected a checkpoint, as kvtools.open(path) gives one"
            )
        folded = name.casefold()
        if folded in _TAKEN or "\0" in name or folded in (each.casefold() for each in named):
            raise UsageError(f"attaching '{checkpoint.path}' as {name!r}: that name is taken; give it another")
        named[name or MAIN] = checkpoint
    return named


def _unquoted(text: str, named: dict[str, Checkpoint]) -> str:
    """Return a question for the tables that a text names without the quotes that their names need, "" if none."""
    meant = []
    for schema, checkpoint in named.items():
        for name in unique_names(list(checkpoint.tables)):
            bare = re.compile(rf'(?<![\w"/]){re.escape(name)}(?![\w"/])', re.IGNORECASE)
            if written(name) != name and bare.search(text):
                meant.append(written(name) if schema == MAIN else f"{written(schema)}.{written(name)}")
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def _check_functions(tree: Node, doing: str) -> None:
    """Raise `UsageError` where a FROM calls what does more than compute."""
    for node in nodes(tree):
        if node.get("type") != "TABLE_FUNCTION" or "function" not in node:
            continue
        name = str(node["function"].get("function_name", ""))
        if name.casefold() not in _TABLE_FUNCTIONS:
            raise UsageError(
                f"{doing}: got {name}(...) as a table, expected a table of the checkpoint, or one of"
                f" {', '.join(sorted(_TABLE_FUNCTIONS))}: a query reads nothing else"
            )


class _Asked:
    """A query that runs: DuckDB works on it in a thread of its own, which `close` ends."""

    def __init__(
        self,
        sources: dict[str, Checkpoint],
        text: str,
        tree: Node,
        memory: int,
        threads: int | None,
        progress: Progress | None,
        doing: str,
    ) -> None:
        from kvtools.sql.scan import Work

        self._duckdb = import_duckdb(doing)
        self._doing = doing
        self._text = text
        self._tree = tree
        self._sources = sources
        self._work = Work(progress)
        self._memory = memory
        self._ready: queue.Queue[Any] = queue.Queue(2)
        with scratch_room():
            self._spill = tempfile.TemporaryDirectory(prefix="kvtools-sql-")
        self._finished = False
        self._closing = threading.RLock()
        try:
            self._connection = connect(
                doing,
                memory=int(memory * (1 - _READERS)),
                threads=threads or max(1, min(len(os.sched_getaffinity(0)), memory // _THREAD_BYTES)),
                spill=Path(self._spill.name) / "spilled",
            )
            self._attach()
            lock(self._connection)
            self._relation = self._bound()
            self.column_names = list(self._relation.columns)
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._run, name="kvtools-sql", daemon=True)
        self._thread.start()
        self._schema: Any = None

    @property
    def schema(self) -> Any:
        """The Arrow schema of the answer; waits for its first rows."""
        if self._schema is None:
            try:
                self._schema = self._next()
            except BaseException:
                self.close()
                raise
        return self._schema

    def _attach(self) -> None:
        """Make a view of each table that the text mentions: of the others nothing is asked."""
        from kvtools.sql.dataset import TableDataset

        mentioned = _mentioned(self._tree)
        for schema, checkpoint in self._sources.items():
            for name, fault in checkpoint.broken.items():
                if mentioned is not None and name.casefold() in mentioned:
                    raise fault
            if schema != MAIN:
                self._connection.execute(f"create schema {quoted(schema)}")
            literal = quoted(schema).replace("'", "''")
            self._connection.execute(f"set schema = '{literal}'")
            names = unique_names(list(checkpoint.tables))
            for name, (stored, table) in zip(names, checkpoint.tables.items(), strict=True):
                if mentioned is not None and name.casefold() not in mentioned:
                    continue
                _check_readable(table)
                label = stored if schema == MAIN else f"{schema}.{stored}"
                dataset = TableDataset(table, label, self._work)
                columns = ", ".join(f"{own} as {quoted(c.name)}" for own, c in dataset.columns.items())
                # Not registered under a name of its own, which `show tables` would list.
                self._connection.from_arrow(dataset).project(columns).create_view(name)
        self._connection.execute(f"set schema = '{MAIN}'")

    def _bound(self) -> Any:
        """Return the query as DuckDB understands it, before any row is read."""
        try:
            return self._connection.sql(self._text)
        except self._duckdb.Error as error:
            raise self._told(error) from None

    def _run(self) -> None:
        """Work on the query, in a thread, so that who waits for it can be interrupted."""
        try:
            reader = _reader(self._relation)
            self._put(reader.schema)
            for batch in reader:
                if not self._put(batch):
                    return
            self._put(None)
        except BaseException as error:
            self._put(error)

    def _put(self, item: Any) -> bool:
        while not self._work.stop.is_set():
            try:
                self._ready.put(item, timeout=0.05)
                return True
            except queue.Full:
                continue
        return False

    def _next(self) -> Any:
        """Return what comes next of the schema, the batches, and None at the end; an interrupt gets through."""
        while not self._work.stop.is_set():
            with contextlib.suppress(queue.Empty):
                item = self._ready.get(timeout=0.1)
                if isinstance(item, BaseException):
                    raise self._told(item) from None
                return item
        raise UsageError(f"{self._doing}: the query was ended before its answer was read")

    def batches(self) -> Iterator[Any]:
        """Yield the record batches of the answer, once."""
        try:
            _ = self.schema
            while (batch := self._next()) is not None:
                yield batch
        finally:
            self.close()

    def close(self) -> None:
        """End the query, wherever it is, and leave nothing behind."""
        with self._closing:
            self._close()

    def _close(self) -> None:
        if self._finished:
            return
        self._finished = True
        self._work.stop.set()
        connection = getattr(self, "_connection", None)
        thread = getattr(self, "_thread", None)
        if connection is not None and thread is not None:
            while thread.is_alive():
                connection.interrupt()
                thread.join(0.05)
        self._relation = None
        if connection is not None:
            connection.close()
        self._spill.cleanup()

    def _told(self, error: BaseException) -> BaseException:
        """Return what to raise for what went wrong, whoever it was that failed."""
        failure = self._work.failure
        if failure is not None:
            return failure
        if isinstance(error, KvtoolsError) or not isinstance(error, Exception):
            return error
        message = first_line(error) + wider_hint(error, "key")
        if "No space left" in message or "failed to offload" in message:  # which DuckDB takes for want of memory, too
            return OutputError(
                f"{self._doing}: writing temporary files in '{tempfile.gettempdir()}': No space left on device; make"
                " room there, name another folder by TMPDIR, or say a larger --memory, so that less goes to them"
            )
        if "Out of Memory Error" in message:
            return BadInputError(
                f"{self._doing}: {self._memory:,} bytes are not enough for this query; give it more with --memory, or"
                f" ask for less ({message.partition('Out of Memory Error: ')[2][:120]})"
            )
        if "temp_directory" in message:
            return OutputError(f"{self._doing}: {message}; make room in '{tempfile.gettempdir()}', or set TMPDIR")
        return UsageError(f"{self._doing}: {self._hinted(message)}")

    def _hinted(self, message: str) -> str:
        """Return a message of DuckDB with the names that were meant, where it says that a name is not known."""
        tables = [
            (written(name) if schema == MAIN else f"{written(schema)}.{written(name)}", name)
            for schema, checkpoint in self._sources.items()
            for name in unique_names(list(checkpoint.tables))
        ]
        if unknown := re.match(r'Catalog Error: Table with name "?(.+?)"? does not exist', message):
            name = unknown[1]
            if meant := _unquoted(self._text, self._sources):
                return f"there is no table {name!r}{meant}"
            close = near(name, [each for _, each in tables])
            full = [shown for shown, each in tables if close and written(each) in close]
            hint = f"; did you mean {' or '.join(full)}?" if full else f"; there is {_few([t for t, _ in tables])}"
            return f"there is no table {name!r}{hint}"
        for path in _paths(self._tree):
            dotted = ".".join(path[-2:])
            if len(path) > 1 and path[-2].casefold() in message.casefold():
                match = next((c for c in self._columns() if c.name.casefold() == dotted.casefold()), None)
                if match is not None:
                    return (
                        f"there is no table {path[-2]!r}; a column whose name has dots needs quotes: {written(dotted)}"
                    )
        if unknown := re.search(r'(?:Referenced column|does not have a column named) "(.+?)"', message):
            columns = {column.name for column in self._columns()}
            hint = near(unknown[1], sorted(columns)) or f"; there is {_few([written(c) for c in sorted(columns)])}"
            return f"there is no column {unknown[1]!r}{hint}"
        return message

    def _columns(self) -> list[QueryColumn]:
        """Return the columns of all tables that the text mentions."""
        mentioned = _mentioned(self._tree)
        return [
            column
            for checkpoint in self._sources.values()
            for name, table in zip(unique_names(list(checkpoint.tables)), checkpoint.tables.values(), strict=True)
            if mentioned is None or name.casefold() in mentioned
            for column in query_columns(table.schema)
        ]


def _check_readable(table: TableReader) -> None:
    """Raise what keeps a table from being read as columns of numbers, as strings do."""
    _ = table.key_dtype, table.value_dtype


def _reader(relation: Any) -> Any:
    """Return the answer of a relation as a reader of record batches; DuckDB has changed the name for it."""
    ask = getattr(relation, "to_arrow_reader", None) or relation.fetch_record_batch
    return ask(_BATCH_ROWS)


def _mentioned(tree: Node) -> frozenset[str] | None:
    """Return the names of the tables that a text mentions, lower case; None where it asks which ones there are."""
    names = set()
    for node in nodes(tree):
        kind = node.get("type")
        if kind == "SHOW_REF" or (kind == "TABLE_FUNCTION" and "pragma" in str(node.get("function", ""))):
            return None
        if kind == "BASE_TABLE":
            path = [str(part).casefold() for part in _table_path(node)]
            if not {"information_schema", "pg_catalog"}.isdisjoint(path) or path[-1].startswith(("duckdb_", "sqlite_")):
                return None
            names.add(path[-1])
    return frozenset(names)


def _table_path(node: Node) -> list[str]:
    """Return the name of a table with what stands before it; versions of DuckDB tell it in different ways."""
    qualified = node.get("qualified_name")
    if isinstance(qualified, dict) and qualified.get("path"):
        return [str(part) for part in qualified["path"]]
    return [str(node[part]) for part in ("catalog_name", "schema_name", "table_name") if node.get(part)] or [""]


def _paths(tree: Node) -> Iterator[list[str]]:
    for node in nodes(tree):
        if node.get("class") == "COLUMN_REF":
            yield [str(part) for part in node["column_names"]]


def _few(names: list[str], most: int = 8) -> str:
    shown = ", ".join(names[:most]) or "none"
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
