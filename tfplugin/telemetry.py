"""How tables do: rows, memory, births, evictions, hits, hot keys, norms; for people, and for TensorBoard."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

from tfplugin.named_tables import name_of, tables_in
from tfplugin.ops import raw

v1 = tf.compat.v1

HOT_KEYS = 20
NAN_KEYS = 20
#: Upper ends of the buckets of norms: TensorBoard's own, growing by a tenth.
NORM_LIMITS = tuple(np.concatenate([[0.0], 1e-9 * 1.1 ** np.arange(420)]))


@dataclasses.dataclass(frozen=True)
class TableSummary:
    """What `summary` tells of a table, of all its parts together. What is not known is None.

    Attributes:
      name: of the variable.
      rows: there now.
      bytes: in memory; the sum of the next four.
      row_bytes: of rows: values and slots.
      index_bytes, column_bytes: of the index; of keys, frequencies and versions.
      slack_bytes: of rows that are gone, and of memory taken and not used yet.
      file_rows, file_bytes: of the rows, those in the file of a table with a `max_memory`; what it takes on the disk.
      lookups: keys that training lookups have asked for so far, duplicates included.
      births: rows that these have made.
      held_back: keys, duplicates included, that these did not find and that admission did not let in, or that are the
        padding key.
      hits: the share of `lookups` that found a row, as a padding key never does; None before the first.
      evictions: rows that have gone to keep a `max_capacity`.
      expired: rows that have gone by policies of expiry, on their own, by `evict` or before a save.
      zeroed_rows: rows there that a group penalty has made zeros.
      skipped_updates: updates left out because a gradient was not finite.

    All but the name count from when the table was initialized or restored. Lookups of tables in a GPU's memory are not
    counted.
    """

    name: str
    rows: int
    bytes: int
    row_bytes: int
    index_bytes: int
    column_bytes: int
    slack_bytes: int
    file_rows: int
    file_bytes: int
    lookups: int | None
    births: int | None
    held_back: int | None
    hits: float | None
    evictions: int
    expired: int
    zeroed_rows: int
    skipped_updates: int


@dataclasses.dataclass(frozen=True)
class RowSurvey:
    """What `survey` tells of a table's rows.

    Attributes:
      name: of the variable.
      rows: that were read.
      hot_keys, hot_frequencies: the keys of the highest frequencies, the most frequent first: [H].
      norm_buckets: how many rows have an L2 norm up to each of `NORM_LIMITS`, and more: [len(NORM_LIMITS) + 1] int64.
      norm_sum, norm_squares, norm_least, norm_greatest: of the norms of rows that are finite.
      nan_rows: rows with a value that is no number, or infinite.
      nan_keys: some of their keys.
    """

    name: str
    rows: int
    hot_keys: np.ndarray[Any, Any]
    hot_frequencies: np.ndarray[Any, Any]
    norm_buckets: np.ndarray[Any, Any]
    norm_sum: float
    norm_squares: float
    norm_least: float
    norm_greatest: float
    nan_rows: int
    nan_keys: np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class GradientNorms:
    """L2 norms of the gradients that a table has got in fused updates since they were last asked for.

    Attributes:
      steps: updates; those of parts count one by one.
      mean, greatest: norm of all rows of an update.
      greatest_row: of one row, before those of equal keys are added up.
      nonfinite_rows: rows of gradients with a value that is no number, or infinite. They are in no norm.
    """

    steps: int
    mean: float
    greatest: float
    greatest_row: float
    nonfinite_rows: int


def summary(table: Any, session: v1.Session | None = None) -> TableSummary:
    """How a table does, in named numbers. It reads counters and costs microseconds.

    Args:
      table: a key-value variable, in one part or many.
      session: of a variable of a graph.

    Raises:
      TypeError: no key-value variable.
      ValueError: a variable of a graph, without a session.

    Example:
      >>> v = tfplugin.get_kv_variable("user", embedding_dim=8)
      >>> _ = tf.nn.embedding_lookup(v, [3, -1, 3])
      >>> tfplugin.summary(v).births, tfplugin.summary(v).hits
      (2, 0.3333333333333333)
    """
    read = _run(table, "summary", _counts, session)
    memory = np.sum([np.asarray(of_part[0]) for of_part in read], axis=0)
    lookups = [np.asarray(of_part[1]) for of_part in read]
    known = all((counts >= 0).all() for counts in lookups)
    keys, born, held_back = (int(count) for count in np.sum(lookups, axis=0)) if known else (None, None, None)
    zeroed, skipped, evicted, expired = (int(sum(int(of_part[2][i]) for of_part in read)) for i in range(4))
    hits = None
    if keys:
        assert born is not None and held_back is not None
        hits = (keys - born - held_back) / keys
    return TableSummary(
        name=name_of(table),
        rows=int(memory[0]),
        bytes=int(memory[1:5].sum()),
        row_bytes=int(memory[1]),
        index_bytes=int(memory[2]),
        column_bytes=int(memory[3]),
        slack_bytes=int(memory[4]),
        file_rows=int(memory[5]),
        file_bytes=int(memory[6]),
        lookups=keys,
        births=born,
        held_back=held_back,
        hits=hits,
        evictions=evicted,
        expired=expired,
        zeroed_rows=zeroed,
        skipped_updates=skipped,
    )


def survey(table: Any, session: v1.Session | None = None, *, hot: int = HOT_KEYS, nan: int = NAN_KEYS) -> RowSurvey:
    """Reads all rows of a table once: hot keys, norms, and rows that are not finite. Training goes on beside it.

    Args:
      table: a key-value variable, in one part or many.
      session: of a variable of a graph.
      hot: how many hot keys to tell.
      nan: how many keys of rows that are not finite.

    Raises:
      TypeError: no key-value variable.
      ValueError: a variable of a graph, without a session; a negative number.
    """
    if hot < 0 or nan < 0:
        raise ValueError(f"survey: hot and nan are numbers of keys, got {hot!r} and {nan!r}.")
    read = _run(table, "survey", _rows, session, hot, nan)
    keys, frequencies, buckets, moments, nan_rows, nan_keys = zip(*read, strict=True)
    keys, frequencies = np.concatenate(keys), np.concatenate(frequencies)
    order = np.lexsort([keys, -frequencies.astype(np.int64)])[:hot]
    moments = np.array(moments)
    counts = np.sum(buckets, axis=0)
    finite = int(counts.sum())
    return RowSurvey(
        name=name_of(table),
        rows=finite + int(np.sum(nan_rows)),
        hot_keys=keys[order],
        hot_frequencies=frequencies[order],
        norm_buckets=counts,
        norm_sum=float(moments[:, 0].sum()),
        norm_squares=float(moments[:, 1].sum()),
        norm_least=float(moments[:, 2].min()) if finite else 0.0,
        norm_greatest=float(moments[:, 3].max()),
        nan_rows=int(np.sum(nan_rows)),
        nan_keys=np.concatenate(nan_keys)[:nan],
    )


def watch_gradients(table: Any, session: v1.Session | None = None, *, on: bool = True) -> None:
    """Has fused updates of a table measure their gradients from now on, for `gradient_norms`; or no longer.

    It costs a pass over the gradients of each update.

    Raises:
      TypeError: no key-value variable.
      ValueError: a variable of a graph, without a session.
      tf.errors.FailedPreconditionError: a table in a GPU's memory.
    """
    _run(table, "watch_gradients", _watch, session, on)


def gradient_norms(table: Any, session: v1.Session | None = None) -> GradientNorms | None:
    """What `watch_gradients` has measured since the last call; None where there was no fused update."""
    taken = np.array(_run(table, "gradient_norms", _norms, session))
    steps = int(taken[:, 0].sum())
    if steps == 0:
        return None
    return GradientNorms(steps, taken[:, 1].sum() / steps, taken[:, 2].max(), taken[:, 3].max(), int(taken[:, 4].sum()))


def _counts(part: Any) -> Any:
    return part.memory(), raw.kv_table_lookup_counts(part.handle), tuple(raw.kv_table_update_counts(part.handle))


def _rows(part: Any, hot: int, nan: int) -> Any:
    limits = tf.constant(NORM_LIMITS, tf.float64)
    return tuple(raw.kv_table_survey(part.handle, limits, Tkeys=part.key_dtype, most_hot=hot, most_nan=nan))


def _watch(part: Any, on: bool) -> Any:
    return raw.kv_table_watch_gradients(part.handle, on=on)


def _norms(part: Any) -> Any:
    return raw.kv_table_gradient_norms(part.handle)


def _make_ops(table: Any, hot: int) -> None:
    """In a graph: makes what a `TableWriter` runs, before the graph is finalized."""
    for make, arguments in ((_counts, ()), (_rows, (hot, NAN_KEYS)), (_watch, (True,)), (_norms, ())):
        _ops(table, make, *arguments)


def _ops(table: Any, make: Callable[..., Any], *arguments: Any) -> Any:
    """The ops for each part of a table in a graph, made once."""
    first = table._kv_parts[0]
    made = first.__dict__.setdefault("_telemetry_ops", {})
    if (make, arguments) not in made:
        with first.graph.as_default(), tf_ops.control_dependencies(None), tf.name_scope(""):
            made[make, arguments] = [make(part, *arguments) for part in table._kv_parts]
    return made[make, arguments]


def _run(table: Any, what: str, make: Callable[..., Any], session: v1.Session | None, *arguments: Any) -> list[Any]:
    """What the ops for each part give: at once in eager mode, else by the session."""
    if not hasattr(type(table), "_kv_parts"):
        raise TypeError(f"{what} wants a key-value variable, got {type(table).__name__}.")
    if table._kv_parts[0]._eager:
        with tf_ops.init_scope():
            made = [make(part, *arguments) for part in table._kv_parts]
        return [tf.nest.map_structure(lambda t: None if t is None else t.numpy(), of_part) for of_part in made]
    if session is None:
        raise ValueError(f"{what} of '{name_of(table)}', a variable of a graph: give the session=.")
    told: list[Any] = session.run(_ops(table, make, *arguments))
    return told


# ---- TensorBoard ----


class TableWriter:
    """Writes what tables tell into a folder of TensorBoard, as scalars, histograms and texts.

    Args:
      log_dir: where TensorBoard looks.
      tables: key-value variables; or a layer, a model or a `tf.Module`, and lists of them.
      hot: how many hot keys to write, 0 for none.

    Raises:
      ValueError: there is no key-value variable in `tables`.
    """

    def __init__(self, log_dir: Any, tables: Any, *, hot: int = HOT_KEYS) -> None:
        self.tables = tables_in(tables)
        self._hot = hot
        with tf.Graph().as_default():  # TensorFlow has it for graphs alone
            self._file = v1.summary.FileWriter(str(log_dir))

    def watch_gradients(self, session: v1.Session | None = None) -> None:
        """Has the tables measure their gradients, those on GPUs left out."""
        for table in self.tables:
            if "GPU" not in (table._kv_parts[0].device or ""):
                watch_gradients(table, session)

    def write_counts(self, step: int, session: v1.Session | None = None) -> None:
        """Writes `summary` and `gradient_norms` of each table."""
        for table in self.tables:
            told = dataclasses.asdict(summary(table, session))
            name = told.pop("name")
            values = [self._scalar(f"{name}/{field}", value) for field, value in told.items() if value is not None]
            norms = gradient_norms(table, session)
            if norms is not None:
                values += [
                    self._scalar(f"{name}/gradient_norm_mean", norms.mean),
                    self._scalar(f"{name}/gradient_norm_greatest", norms.greatest),
                    self._scalar(f"{name}/gradient_norm_greatest_row", norms.greatest_row),
                    self._scalar(f"{name}/gradient_rows_not_finite", norms.nonfinite_rows),
                ]
            self._write(step, values)

    def write_rows(self, step: int, session: v1.Session | None = None) -> None:
        """Writes `survey` of each table: reads all rows."""
        for table in self.tables:
            told = survey(table, session, hot=self._hot)
            histogram = v1.HistogramProto(
                min=told.norm_least,
                max=told.norm_greatest,
                num=float(told.norm_buckets.sum()),
                sum=told.norm_sum,
                sum_squares=told.norm_squares,
                bucket_limit=[*NORM_LIMITS, np.finfo(np.float64).max],
                bucket=told.norm_buckets.astype(np.float64),
            )
            values = [
                v1.Summary.Value(tag=f"{told.name}/row_norms", histo=histogram),
                self._scalar(f"{told.name}/rows_not_finite", told.nan_rows),
            ]
            if len(told.hot_keys):
                lines = [f"| {key} | {count} |" for key, count in zip(told.hot_keys, told.hot_frequencies, strict=True)]
                values.append(_text(f"{told.name}/hot_keys", "\n".join(["| key | frequency |", "|---|---|", *lines])))
            if told.nan_rows:
                values.append(_text(f"{told.name}/keys_not_finite", ", ".join(map(str, told.nan_keys))))
            self._write(step, values)

    def close(self) -> None:
        """Writes what is left."""
        self._file.close()

    @staticmethod
    def _scalar(tag: str, value: float) -> v1.Summary.Value:
        return v1.Summary.Value(tag=tag, simple_value=float(value))

    def _write(self, step: int, values: list[v1.Summary.Value]) -> None:
        self._file.add_event(v1.Event(wall_time=time.time(), step=step, summary=v1.Summary(value=values)))
        self._file.flush()


def _text(tag: str, markdown: str) -> v1.Summary.Value:
    metadata = v1.SummaryMetadata(plugin_data=v1.SummaryMetadata.PluginData(plugin_name="text"))
    return v1.Summary.Value(tag=tag, tensor=tf.make_tensor_proto([markdown], tf.string), metadata=metadata)


class _WritesBetweenBatches:
    """What the callback does beside a Callback."""

    _supports_tf_logs = True

    def __init__(self, log_dir: Any, tables: Any = None, *, every: int = 100, hot: int = HOT_KEYS) -> None:
        super().__init__()
        if every < 1:
            raise ValueError(f"TablesInTensorBoard: every is a number of batches, got {every!r}.")
        self._log_dir = log_dir
        self._tables = tables
        self._every = every
        self._hot = hot
        self._steps = 0
        self._writer: TableWriter | None = None

    def _open(self) -> TableWriter:
        # A model may get its tables with its first batch.
        if self._writer is None:
            tables = self.model if self._tables is None else self._tables  # type: ignore[attr-defined]
            self._writer = TableWriter(self._log_dir, tables, hot=self._hot)
            self._writer.watch_gradients()
        return self._writer

    def on_train_begin(self, logs: Any = None) -> None:
        """Begins to measure gradients, where the tables are there."""
        del logs
        if self._tables is not None or getattr(self.model, "built", False):  # type: ignore[attr-defined]
            self._open()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Writes counts when it is their turn."""
        del batch, logs
        self._steps += 1
        writer = self._open()
        if self._steps % self._every == 0:
            writer.write_counts(self._steps)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Writes counts and rows."""
        del epoch, logs
        self._open().write_counts(self._steps)
        self._open().write_rows(self._steps)

    def on_train_end(self, logs: Any = None) -> None:
        """Closes the file."""
        del logs
        if self._writer is not None:
            for table in self._writer.tables:
                watch_gradients(table, on=False)
            self._writer.close()
            self._writer = None


@functools.cache
def _callback_class(keras: Any) -> Any:
    return type("TablesInTensorBoard", (_WritesBetweenBatches, keras.callbacks.Callback), {"__module__": __name__})


def tensorboard_callback(
    log_dir: Any, tables: Any = None, *, every: int = 100, hot: int = HOT_KEYS, keras: Any = None
) -> Any:
    """A callback of Keras that writes what tables tell into a folder of TensorBoard.

    Every `every` batches, and at the end of an epoch: the numbers of `summary`, and the norms of the gradients of fused
    updates. At the end of an epoch also what `survey` finds: hot keys, a histogram of norms of rows, and the keys of
    rows that are not finite. TensorBoard itself is not needed to write.

    Args:
      log_dir: where TensorBoard looks.
      tables: key-value variables or what holds them; default: the model that is trained.
      every: batches between two writings.
      hot: how many hot keys to write.
      keras: the Keras of the model, such as ``tf_keras``; default: ``tf.keras``.

    Raises:
      ValueError: `every` below 1; a model without a key-value variable (when it trains).

    Example:
      >>> model.fit(data, callbacks=[tfplugin.tensorboard_callback("logs", every=50)])
    """
    return _callback_class(keras or tf.keras)(log_dir, tables, every=every, hot=hot)


class TensorBoardHook(v1.train.SessionRunHook):
    """Writes what tables tell into a folder of TensorBoard, in a monitored session.

    Args:
      log_dir: where TensorBoard looks.
      tables: key-value variables, or what holds them.
      every_steps: runs of the session between two writings of `summary` and of gradient norms.
      rows_every_steps: between two of `survey`, which reads all rows; 0: at the end only.
      hot: how many hot keys to write.

    The step is the global step where the graph has one, else the runs of the session.

    Raises:
      ValueError: a number of steps that is none; no key-value variable in `tables`.
    """

    def __init__(
        self, log_dir: Any, tables: Any, every_steps: int = 100, rows_every_steps: int = 0, hot: int = HOT_KEYS
    ) -> None:
        if every_steps < 1 or rows_every_steps < 0:
            raise ValueError(
                f"TensorBoardHook: every_steps is 1 or more and rows_every_steps 0 or more, got {every_steps!r} and "
                f"{rows_every_steps!r}."
            )
        tables_in(tables)
        self._log_dir = log_dir
        self._tables = tables
        self._every = every_steps
        self._rows_every = rows_every_steps
        self._hot = hot
        self._runs = 0

    def begin(self) -> None:
        """Makes the ops, while the graph can take some."""
        self._writer = TableWriter(self._log_dir, self._tables, hot=self._hot)
        self._step = v1.train.get_global_step()
        for table in self._writer.tables:
            _make_ops(table, self._hot)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Begins to measure gradients."""
        del coord
        self._writer.watch_gradients(session)

    def after_run(self, run_context: Any, run_values: Any) -> None:
        """Writes when it is time."""
        del run_values
        self._runs += 1
        if self._runs % self._every == 0:
            self._writer.write_counts(self._now(run_context.session), run_context.session)
        if self._rows_every and self._runs % self._rows_every == 0:
            self._writer.write_rows(self._now(run_context.session), run_context.session)

    def end(self, session: Any) -> None:
        """Writes once more, and closes the file."""
        self._writer.write_counts(self._now(session), session)
        self._writer.write_rows(self._now(session), session)
        self._writer.close()

    def _now(self, session: Any) -> int:
        return self._runs if self._step is None else int(session.run(self._step))
