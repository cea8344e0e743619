"""The rows of a table as DuckDB asks for them: some columns, of the rows that a filter leaves, as record batches.

- Of a filter on keys, frequencies, versions and parts, what it says of them is looked at first. A part that it rules
  out is not read. Where the table's rows can be had one by one (`TableReader.direct`), only those columns are read of
  the others, and of the rest only the rows that are left: these are not checked against checksums, which are of whole
  columns. Where most rows are left, or rows cannot be had one by one, all is read in order, and checked.
- Parts are read by several threads, at most `_LANES` at once. Their batches come in turns: so the order of rows is
  the same in every run, and that of the table where it has one part.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow

from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import Progress
from kvtools.dialects.schema import row_bytes
from kvtools.sql.columns import QueryColumn, arrow_column, arrow_type, column_numbers, stored_columns
from kvtools.sql.pushdown import Necessary

_LANES = 4
_AHEAD = 2
"""How many batches of a lane wait for DuckDB."""
_BATCH_BYTES = 4 << 20
_BATCH_ROWS = 1 << 16
_WINDOW_ROWS = 1 << 18
"""How many rows are judged at once by columns of a few bytes."""
_MOST_PICKED = 0.25
"""Where a larger share of the first rows of a part is left by a filter, rows are not picked one by one."""
_WAIT = 0.05
_Window = tuple[int, Array, int]
_CHEAP = frozenset({"key", "freq", "version", "part"})


@dataclass
class Work:
    """What the scans of one query have in common: when they end, what failed, who is told of what is read."""

    progress: Progress | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    failure: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    done: dict[str, int] = field(default_factory=dict)

    def read(self, table: TableReader, name: str, rows: int) -> None:
        """Note that `rows` more rows of a table were looked at."""
        if self.progress is None:
            return
        with self.lock:
            self.done[name] = min(self.done.get(name, 0) + rows, table.rows)
            self.progress(name, self.done[name], table.rows)


class Scan:
    """One pass over a table.

    Args:
        table: the table.
        name: what it is called.
        columns: all its columns by the names that `chosen` and the filter have for them.
        chosen: the columns to give, in order.
        filter: an expression of pyarrow that rows must meet, or None.
        work: what all scans of the query have in common.
    """

    def __init__(
        self,
        table: TableReader,
        name: str,
        columns: dict[str, QueryColumn],
        chosen: Sequence[str],
        filter: Any,
        work: Work,
    ) -> None:
        self._table, self._name, self._work = table, name, work
        self._columns = columns
        self._chosen = list(chosen)
        self._filter = filter
        cheap = [name for name, column in columns.items() if column.kind in _CHEAP]
        self._necessary = None if filter is None else Necessary(filter, cheap)
        about = columns if self._necessary is None else self._necessary.mentioned & columns.keys()
        self._judged = [] if filter is None else list(about or columns)
        self.schema = pyarrow.schema(
            [pyarrow.field(name, arrow_type(columns[name]), nullable=False) for name in self._chosen]
        )
        self._needed = stored_columns(
            (columns[name] for name in {*self._chosen, *self._judged}), some_slots=table.picks_slots
        )

    def reader(self) -> Any:
        """Return the batches as a `pyarrow.RecordBatchReader`; nothing is read before the first is asked for."""
        return pyarrow.RecordBatchReader.from_batches(self.schema, self._told())

    def _told(self) -> Iterator[Any]:
        """Yield the batches; what fails is kept, as DuckDB makes a text of it."""
        try:
            parts = self._parts()
            lanes = [parts[lane::_LANES] for lane in range(min(_LANES, len(parts)))]
            yield from _in_turns([_batches_of(self._part, lane) for lane in lanes], self._work)
        except GeneratorExit:
            raise
        except BaseException as error:
            if self._work.failure is None:
                self._work.failure = error
            raise

    def _parts(self) -> list[int]:
        """Return the parts that may have rows for the filter."""
        numbers = [number for number, rows in enumerate(self._table.schema.part_rows) if rows]
        part = next((name for name, column in self._columns.items() if column.kind == "part"), None)
        if self._necessary is None or part is None:
            return numbers
        mask = self._necessary.mask({part: np.array(numbers, np.int32)})
        left = numbers if mask is None else [number for number, may in zip(numbers, mask, strict=True) if may]
        self._work.read(self._table, self._name, sum(self._table.schema.part_rows[n] for n in {*numbers} - {*left}))
        return left

    def _part(self, part: int) -> Iterator[Any]:
        """Yield the batches of one part."""
        rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // row_bytes(self._table.schema, self._needed)))
        if self._picks():
            windows = self._windows(part)
            first = next(windows, None)
            if first is not None and len(first[1]) <= _MOST_PICKED * first[2]:
                yield from self._picked(part, first, windows, rows)
                return
            windows.close()
        for chunk in self._table.read_part(part, self._needed, rows, True):
            self._work.read(self._table, self._name, len(chunk))
            yield from self._judge(chunk)

    def _picks(self) -> bool:
        """Whether rows are worth to be had one by one: what judges them is little of what they are."""
        if self._necessary is None or not self._necessary.names or not self._table.direct:
            return False
        judged = stored_columns(self._columns[name] for name in self._necessary.names)
        size = self._table.schema
        return row_bytes(size, self._needed) >= 2 * row_bytes(size, judged)

    def _windows(self, part: int) -> Generator[_Window, None, None]:
        """Yield windows: the number of the first row in the table, which rows of it are left, how many it has."""
        assert self._necessary is not None
        columns = stored_columns(self._columns[name] for name in self._necessary.names)
        start = sum(self._table.schema.part_rows[:part])
        for chunk in self._table.read_part(part, columns, _WINDOW_ROWS, True):
            mask = self._necessary.mask(self._cheap(chunk))
            yield start, np.arange(len(chunk)) if mask is None else np.flatnonzero(mask), len(chunk)
            start += len(chunk)

    def _picked(self, part: int, first: _Window, windows: Iterator[_Window], most: int) -> Iterator[Any]:
        window: _Window | None = first
        while window is not None:
            start, left, rows = window
            for at in range(0, len(left), most):
                chunk = self._table.take(start + left[at : at + most], self._needed)
                yield from self._judge(_of_part(chunk, part), judged=True)
            self._work.read(self._table, self._name, rows)
            window = next(windows, None)

    def _cheap(self, chunk: Chunk) -> dict[str, Array]:
        assert self._necessary is not None
        return {name: column_numbers(chunk, self._columns[name]) for name in self._necessary.names}

    def _judge(self, chunk: Chunk, *, judged: bool = False) -> Iterator[Any]:
        """Yield the batch of the rows of a chunk that meet the filter; `judged` where what is necessary is known."""
        if self._necessary is not None:
            if not judged and (mask := self._necessary.mask(self._cheap(chunk))) is not None and not mask.all():
                chunk = chunk.take(np.flatnonzero(mask))
            if not len(chunk):
                return
        columns: dict[str, Array] = {}
        if self._necessary is not None and not self._necessary.exact:
            columns = {name: column_numbers(chunk, self._columns[name]) for name in self._judged}
            left = self._left(columns, len(chunk))
            if not len(left):
                return
            if len(left) < len(chunk):
                chunk = chunk.take(left)
                columns = {name: column[left] for name, column in columns.items()}
        arrays = [
            arrow_column(columns[name] if name in columns else column_numbers(chunk, self._columns[name]), field.type)
            for name, field in zip(self._chosen, self.schema, strict=True)
        ]
        yield pyarrow.RecordBatch.from_arrays(arrays, schema=self.schema)

    def _left(self, columns: dict[str, Array], rows: int) -> Array:
        """Return the numbers of the rows that meet the filter."""
        arrays = [arrow_column(column, arrow_type(self._columns[name])) for name, column in columns.items()]
        arrays.append(pyarrow.array(np.arange(rows)))
        table = pyarrow.Table.from_arrays(arrays, names=[*columns, _NUMBER])
        numbers: Array = table.filter(self._filter).column(_NUMBER).to_numpy()
        return numbers


_NUMBER = "number"


def _of_part(chunk: Chunk, part: int) -> Chunk:
    return chunk if chunk.part == part else Chunk(**{**chunk.__dict__, "part": part})


def _batches_of(read: Callable[[int], Iterator[Any]], parts: Sequence[int]) -> Iterator[Any]:
    for part in parts:
        yield from read(part)


def _in_turns(lanes: Sequence[Iterator[Any]], work: Work) -> Iterator[Any]:
    """Yield one item of each iterator in turn, until all have ended; each is asked in a thread of its own.

    Ends early, having ended the threads, where nobody takes more, and where `work.stop` is set.
    """
    over = threading.Event()
    queues: list[queue.Queue[tuple[bool, Any]]] = [queue.Queue(_AHEAD) for _ in lanes]
    threads = [
        threading.Thread(target=_fill, args=(lane, ready, work.stop, over), name="kvtools-scan", daemon=True)
        for lane, ready in zip(lanes, queues, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        while queues:
            for ready in list(queues):
                there, item = _next(ready, work.stop)
                if there:
                    yield item
                    continue
                if isinstance(item, BaseException):
                    raise item
                queues.remove(ready)
                if work.stop.is_set():
                    return
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _fill(
    items: Iterator[Any], ready: queue.Queue[tuple[bool, Any]], stop: threading.Event, over: threading.Event
) -> None:
    def put(item: tuple[bool, Any]) -> bool:
        while not (stop.is_set() or over.is_set()):
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=_WAIT)
                return True
        return False

    try:
        for item in items:
            if not put((True, item)):
                return
        put((False, None))
    except BaseException as error:
        put((False, error))


def _next(ready: queue.Queue[tuple[bool, Any]], stop: threading.Event) -> tuple[bool, Any]:
    while not stop.is_set():
        with contextlib.suppress(queue.Empty):
            return ready.get(timeout=_WAIT)
    return False, None
