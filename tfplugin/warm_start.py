"""`warm_start`: a model begins with the rows of another one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfplugin.named_tables import name_of, names_there, newest_in, no_such, no_table
from tfplugin.ops import raw
from tfplugin.row_counts import row_count
from tfplugin.rows_left_out import RowsLeftOut, own_rows
from tfplugin.slots import SlotSpec, slots_json

if TYPE_CHECKING:
    from kvtools.dialects.chunk import Chunk
    from kvtools.dialects.interface import TableReader

_CHUNK_BYTES = 8 << 20
_MOST_FREQUENT = np.iinfo(np.uint32).max


def warm_start(
    checkpoint: Any,
    tables: Any,
    names: Mapping[Any, str | None] | None = None,
    *,
    slots: bool | Mapping[str, str] = False,
    cast: bool = False,
    dialect: str | None = None,
) -> dict[str, Any]:
    """Begins with the rows of another model's tables. Keys that it has not start from the initializer, as ever.

    Unlike a restore it takes what the variables here are as given: their initializers, parts, policies and devices.
    Rows that they hold already stay, unless the checkpoint has the key. Rows keep their counts and count as touched
    now.

    Args:
      checkpoint: of any engine that kvtools reads: a path, as of `kvtools.open`; or the folder of checkpoints of
        TensorFlow, of which the latest is taken, or of a `CheckpointManager`: the newest full with its increments.
      tables: a variable, or a list of them; a layer, a model (built) or a `tf.Module`, for all that it holds; or a
        dictionary from variables to their names in the checkpoint.
      names: what tables are called there (``kvtools inspect`` lists them), by their names here, where that differs.
        None leaves a table out.
      slots: whether optimizer slots come along: True for all, by their names; or their names there by those here:
        ``{"Adam.momentum": "Adam.m"}``. An optimizer takes up slots of its names and widths, and drops others.
      cast: convert keys and values of another type. What does not fit is an error.
      dialect: of the checkpoint; found out if None.

    Returns:
      How many rows came and are in the table, by name: numbers in eager mode. Where others did not fit into a
      ``max_capacity``, expired, or have the ``padding_key``, the log says how many. In a graph tensors, and who runs
      them fills the tables: after the initializers, or in ``tf.compat.v1.train.Scaffold(init_fn=...)``, which is run
      where there is no checkpoint to go on from.

    Raises:
      ValueError: no table of that name, the nearest are named; rows of another width, or of another type without
        `cast`; a number that the type here does not hold; a slot that is not there.
      kvtools.errors.KvtoolsError: the checkpoint cannot be read, or is damaged. A table that was empty is empty again.

    Example:
      >>> tfplugin.warm_start("other/model.ckpt-100", [user, item], {"user": "old/user_embedding"})
      {'user': 20000, 'item': 314}
    """
    import kvtools

    path = newest_in(checkpoint)
    opened = kvtools.open(path, dialect)
    sources = []
    for table, there in names_there(tables, names):
        if there not in opened.tables:
            message = no_table(there, opened, table._kv_parts[0].dim)
            way_out = f"To leave it out: names={{'{name_of(table)}': None}}."
            raise ValueError(f"warm_start: '{name_of(table)}' from checkpoint '{path}': {message} {way_out}")
        sources.append((table, _Source(path, name_of(table), opened.tables[there], table, slots, cast)))
    fill = _fill_now if tf.executing_eagerly() else _fill_in_graph
    return {name_of(table): fill(table, source) for table, source in sources}


def fill_parts(table: Any, path: str, reader: TableReader) -> Any:
    """Gives a variable, or a part of one, the rows of a table of a checkpoint that are its own, without slots.

    Returns how many came: at once in eager mode; a tensor in a graph, and who runs it fills the table.
    """
    source = _Source(path, name_of(table), reader, table, False, False)
    return (_fill_now if tf.executing_eagerly() else _fill_in_graph)(table, source)


@dataclass(frozen=True)
class _Rows:
    """Rows as the ops want them: keys [n], freqs [n], and the value [n, dim] with the slots [n, width]."""

    keys: np.ndarray
    freqs: np.ndarray
    columns: tuple[np.ndarray, ...]


class _Source:
    """A table of a checkpoint, in the types of a variable here."""

    def __init__(
        self, path: str, name: str, reader: TableReader, table: Any, slots: bool | Mapping[str, str], cast: bool
    ) -> None:
        self._doing = f"warm_start: table '{reader.schema.name}' of checkpoint '{path}'"
        self._reader = reader
        part = table._kv_parts[0]
        self.left_out = RowsLeftOut(self._doing, name, table, self.all_keys)
        self.key_dtype, self.dtype, self.dim = part.key_dtype, part.dtype, part.dim
        if reader.dim != self.dim:
            raise ValueError(
                f"{self._doing} has rows of dim {reader.dim}, key-value variable '{name}' has dim {self.dim}: build it "
                f"with embedding_dim={reader.dim}, or leave it out, by names={{'{name}': None}}."
            )
        wanted = (("keys", reader.schema.key_dtype, self.key_dtype), ("values", reader.schema.value_dtype, self.dtype))
        for what, there, here in wanted:
            if there != here.name and not cast:
                raise ValueError(
                    f"{self._doing} has {what} of {there}, key-value variable '{name}' of {here.name}: "
                    "tfplugin.warm_start(..., cast=True) converts them."
                )
        self._slots = self._chosen(slots)
        widths = {slot.name: slot.width for slot in reader.schema.slots}
        self.specs = tuple(SlotSpec(here, widths[there]) for here, there in self._slots.items())
        row_bytes = 12 + self.dtype.size * (self.dim + sum(spec.width for spec in self.specs))
        self._chunk_rows = max(1, _CHUNK_BYTES // row_bytes)

    def _chosen(self, slots: bool | Mapping[str, str]) -> dict[str, str]:
        """Slots there by those here."""
        there = self._reader.slots
        if not isinstance(slots, Mapping):
            return {name: name for name in there} if slots else {}
        for name in slots.values():
            if name not in there:
                raise ValueError(f"{self._doing}: {no_such('slot', name, there)}")
        return dict(slots)

    @property
    def widths(self) -> list[int]:
        """Of the columns."""
        return [self.dim, *(spec.width for spec in self.specs)]

    def chunks(self) -> Iterator[_Rows]:
        """All rows, a chunk at a time."""
        from kvtools.dialects.chunk import Columns

        columns = Columns(values=True, slots=bool(self.specs), freqs=True)
        for chunk in self._reader.chunks(columns, rows=self._chunk_rows):
            yield self._converted(chunk)

    def all_keys(self) -> Iterator[np.ndarray]:
        """All keys, a chunk at a time."""
        from kvtools.dialects.chunk import KEYS

        for chunk in self._reader.chunks(KEYS, rows=self._chunk_rows):
            yield self._keys(chunk.keys)

    def _converted(self, chunk: Chunk) -> _Rows:
        freqs = np.zeros(len(chunk), np.uint32) if chunk.freqs is None else chunk.freqs
        columns = [("values", chunk.values), *((f"slot {there}", chunk.slots[there]) for there in self._slots.values())]
        return _Rows(
            self._keys(chunk.keys),
            np.clip(freqs if freqs.dtype.itemsize > 4 else freqs.astype(np.int64), 0, _MOST_FREQUENT).astype(np.uint32),
            tuple(self._numbers(what, column) for what, column in columns),
        )

    def _keys(self, keys: np.ndarray) -> np.ndarray:
        wanted = np.iinfo(self.key_dtype.as_numpy_dtype)
        if keys.dtype != wanted.dtype and len(keys):
            low, high = int(keys.min()), int(keys.max())
            if low < wanted.min or high > wanted.max:
                key = low if low < wanted.min else high
                raise ValueError(f"{self._doing} has key {key}, which {wanted.dtype} does not hold.")
        return np.ascontiguousarray(keys, wanted.dtype)

    def _numbers(self, what: str, column: Any) -> np.ndarray:
        from kvtools.cast import rounded

        wanted = self.dtype.as_numpy_dtype
        if column.dtype == wanted:
            return np.ascontiguousarray(column)
        became = rounded(column, self.dtype.name)
        if not np.isfinite(became[np.isfinite(column)].astype(np.float64)).all():
            raise ValueError(f"{self._doing}: {what} have numbers that {self.dtype.name} does not hold.")
        return became


def _import(part: Any, specs: Sequence[SlotSpec], keys: Any, freqs: Any, columns: Sequence[Any]) -> Any:
    with tf.device(part.device or None):
        return raw.kv_table_import_columns(part.handle, keys, freqs, list(columns), slots=slots_json(specs))


def _fill_now(table: Any, source: _Source) -> int:
    parts = [part for part in table._kv_parts if part.holds_rows]
    empty = [part for part in parts if int(row_count(part)) == 0]
    rows = 0
    try:
        for chunk in source.chunks():
            for part in parts:
                own = own_rows(part, chunk.keys)
                keys = chunk.keys[own]
                _import(part, source.specs, keys, chunk.freqs[own], [column[own] for column in chunk.columns])
                rows += len(keys)
    except BaseException:
        for part in empty:
            part.clear()
        raise
    return source.left_out.count_now() if source.left_out.any else rows


def _fill_in_graph(table: Any, source: _Source) -> tf.Tensor:
    """A tensor that fills a table when it is run, and says how many rows came."""
    with tf.name_scope("warm_start"):
        parts = [part for part in table._kv_parts if part.holds_rows]
        if not parts:
            return tf.constant(0, tf.int64)
        given = tf.add_n([_fill_part(part, source) for part in parts])
        if not source.left_out.any:
            return given
        with tf.control_dependencies([given]):
            return source.left_out.count_in_graph()


class _Stream:
    """The rows of one part, a chunk at each call, from the first one on after `begin`."""

    def __init__(self, part: Any, source: _Source) -> None:
        self._part, self._source = part, source
        self._chunks: Iterator[_Rows] = iter(())

    def begin(self) -> np.ndarray:
        self._chunks = self._source.chunks()
        return np.bool_(True)  # type: ignore[return-value]

    def next(self) -> list[np.ndarray]:
        """Whether there is more, keys, freqs and columns; 16-bit numbers as their bits, for not all are NumPy's."""
        chunk = next(self._chunks, None)
        if chunk is None:
            keys, freqs = np.empty(0, self._source.key_dtype.as_numpy_dtype), np.empty(0, np.uint32)
            columns = [np.empty([0, width], self._source.dtype.as_numpy_dtype) for width in self._source.widths]
        else:
            own = own_rows(self._part, chunk.keys)
            keys, freqs, columns = chunk.keys[own], chunk.freqs[own], [column[own] for column in chunk.columns]
        if self._source.dtype.size == 2:
            columns = [column.view(np.int16) for column in columns]
        return [np.bool_(chunk is not None), keys, freqs, *columns]  # type: ignore[list-item]


def _fill_part(part: Any, source: _Source) -> tf.Tensor:
    stream = _Stream(part, source)
    passed = tf.int16 if source.dtype.size == 2 else source.dtype
    types = [tf.bool, source.key_dtype, tf.uint32, *[passed] * len(source.widths)]

    def body(_: Any, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        more, keys, freqs, *columns = tf.numpy_function(stream.next, [], types)
        for tensor, shape in zip(
            (more, keys, freqs, *columns), ([], [None], [None], *([None, w] for w in source.widths)), strict=True
        ):
            tensor.set_shape(shape)
        if passed != source.dtype:
            columns = [tf.bitcast(column, source.dtype) for column in columns]
        imported = _import(part, source.specs, keys, freqs, columns)
        with tf.control_dependencies([imported]):
            return tf.identity(more), rows + tf.size(keys, tf.int64)

    begun = tf.numpy_function(stream.begin, [], tf.bool)
    begun.set_shape([])
    _, rows = tf.while_loop(lambda more, _: more, body, [begun, tf.constant(0, tf.int64)], parallel_iterations=1)
    return rows
