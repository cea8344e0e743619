"""What is saved of a `tf.train.Checkpoint` in a chain (eager mode)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gen_io_ops
from tensorflow.python.training.saving import saveable_object

from kvtools.chain import RECORD_TENSOR, Member, Record, TableCounts
from tfplugin import checkpoint as checkpoints
from tfplugin.chain.tables import ALL, Mark, Moment, by_device, checked, counted, cut, save_cuts, why_not_followed
from tfplugin.kv_variable import KvVariable
from tfplugin.ops import raw
from tfplugin.partitioned_kv_variable import PartitionedKvVariable
from tfplugin.row_counts import row_count
from tfplugin.saveable import REGISTERED_SAVER, run_apart
from tfplugin.table_places import misplaced, renamed

_log = logging.getLogger("tfplugin")
_DYNAMIC = "DECustomSaver.Variable"


class CheckpointModel:
    """A `tf.train.Checkpoint` as a chain saves and restores it.

    Args:
      checkpoint: to save.
      increments: whether there will be any.
      max_removed: how many removed keys tables remember.
    """

    def __init__(self, checkpoint: tf.train.Checkpoint, increments: bool, max_removed: int) -> None:
        self._checkpoint = checkpoint
        self._increments = increments
        self._max_removed = max_removed
        self._tables: dict[str, KvVariable] = {}
        self._tensors: Any = None
        #: What TensorFlow says of the restore, until everything in the checkpoint has its object.
        self._restored: Any = None

    def session(self, given: Any) -> None:
        """There is none."""
        if given is not None:
            raise ValueError("tfplugin.CheckpointManager of a tf.train.Checkpoint takes no session.")

    def look(self, session: Any, number: int) -> None:
        """Finds what there is to save now, and numbers the checkpoint."""
        del session
        if not tf.executing_eagerly():
            raise ValueError(
                "tfplugin.CheckpointManager of a tf.train.Checkpoint works in eager mode, outside of functions. In a "
                "graph, give it a tf.compat.v1.train.Saver in place of the checkpoint."
            )
        if number:
            self._checkpoint.save_counter.assign(number)
        tensors, _, registered, _ = self._checkpoint._saver._gather_serialized_tensors()
        self._tensors = tensors
        self._tables = checked(_tables_of(registered))

    def why_no_increment(self, session: Any, marks: Mapping[str, Mark]) -> str:
        """Why an increment since these marks cannot be had; '' where it can."""
        del session
        if set(marks) != set(self._tables):
            return "there are other tables than before"
        for prefix, variable in self._tables.items():
            why = raw.kv_table_changes_known(variable.handle, tf.constant(marks[prefix], tf.int64)).numpy().decode()
            if why:
                return f"'{variable.name}': {why}"
        return ""

    def begin(self, session: Any) -> None:
        """Has tables note what changes from now on."""
        del session
        for variable in self._tables.values():
            if self._increments:
                raw.kv_table_track_changes(variable.handle, max_removed=self._max_removed)

    def moment(self, session: Any, since: Mapping[str, Mark] | None, step: int | None) -> Moment:
        """All that there is now; since marks, the rows that changed."""
        cuts: dict[str, int] = {}
        marks: dict[str, Mark] = {}
        try:
            for prefix, variable in self._tables.items():
                number, at = cut(variable, tf.constant(ALL if since is None else since[prefix], tf.int64))
                cuts[prefix] = int(number)
                first, second = at.numpy().tolist()
                marks[prefix] = (first, second)
            return Moment(since is None, cuts, marks, list(_values(self._tensors)), step, time.time())
        except BaseException:
            self.give_up(session, cuts)
            raise

    def give_up(self, session: Any, cuts: Mapping[str, int]) -> None:
        """Drops what is not going to be written."""
        del session
        for prefix, number in cuts.items():
            raw.kv_table_drop_cut(self._tables[prefix].handle, tf.constant(number, tf.int64))

    def writer(self, session: Any) -> Callable[[Moment, str, Callable[[dict[str, TableCounts]], str]], None]:
        """What writes a moment, from whatever thread: given it, a prefix, and what makes the record of the counts."""
        del session
        tables = dict(self._tables)
        return lambda moment, prefix, record: _write(tables, moment, prefix, record)

    def forget(self, session: Any, marks: Mapping[str, Mark]) -> None:
        """Tables need not know any longer what changed before these marks."""
        del session
        for prefix, mark in marks.items():
            if mark != ALL and prefix in self._tables:
                raw.kv_table_forget_changes(self._tables[prefix].handle, tf.constant(mark, tf.int64))

    def restore(self, session: Any, members: Sequence[str]) -> None:
        """Restores the last of the members.

        Raises:
          ValueError: a table would get the rows of another one, or none where the chain has its own.
        """
        self.look(session, 0)
        wrong = misplaced(members[-1], self._tables)
        if wrong:
            raise ValueError(
                f"tfplugin.CheckpointManager: {wrong}. Nothing was restored, since tf.train.Checkpoint knows tables by "
                "their places: restore them by their names, tfplugin.restore_tables(folder, model), which takes no "
                "dense variables; and have the checkpoint hold them by their names, tf.train.Checkpoint(model=model, "
                "tables={name: table, ...}), so that layers may change places."
            )
        if left := renamed(members[-1], self._tables):
            _log.warning(
                "CheckpointManager: of '%s' %s: if a table has another name now, tfplugin.restore_tables restores it "
                "by the old one, before the next save leaves its rows out",
                members[-1],
                left,
            )
        # What has no object yet, as slots before the first step, is nothing to warn of where the process ends.
        self._restored = self._checkpoint.restore(members[-1]).expect_partial()
        if fresh := _without_values(self._checkpoint, self._restored):
            shown = ", ".join(fresh[:10]) + (f" and {len(fresh) - 10} more" if len(fresh) > 10 else "")
            _log.warning(
                "CheckpointManager: '%s' has no values for the variables %s, which stay as they are: "
                "tf.train.Checkpoint knows those of a functional or sequential model by the places of its layers, and "
                "of others by their attributes. Where layers come and go, have it hold them by their names, "
                "tf.train.Checkpoint(model=model, layers={layer.name: layer for layer in model.layers}), before the "
                "next save",
                members[-1],
                shown,
            )

    def why_not_followed(self, session: Any, member: Member, record: Record) -> str:
        """Why no increment can follow the member that was just restored; '' where one can."""
        del session
        went = {
            x: (int(table.expired_rows()) + int(table.evicted_rows()), int(row_count(table)))
            for x, table in self._tables.items()
        }
        return why_not_followed(member, record, self._tables, went)

    def awaits_more(self) -> bool:
        """Whether objects that are not there yet are to be restored from the members, when they are made."""
        if self._restored is not None:
            try:
                self._restored.assert_consumed()
            except AssertionError:
                return True
            self._restored = None
        return False

    def step(self, session: Any) -> int | None:
        """Of training, where nobody was told."""
        del session
        return None


def _without_values(checkpoint: tf.train.Checkpoint, status: Any) -> list[str]:
    """The dense variables that are there and that a restore gave nothing, by their names."""
    given = {id(one) for one in status._checkpoint.object_by_proto_id.values()}
    return [
        str(getattr(one, "path", None) or one.name)
        for one in tf.train.TrackableView(checkpoint).descendants()
        if hasattr(one, "assign") and hasattr(one, "shape") and not hasattr(type(one), "_kv_parts")
        if id(one) not in given
    ]


def _tables_of(registered: Mapping[str, Mapping[str, Any]]) -> dict[str, KvVariable]:
    tables: dict[str, KvVariable] = {}
    for saver, objects in registered.items():
        if saver == REGISTERED_SAVER:
            for path, obj in checkpoints.wholes(objects).items():
                prefix = checkpoints.object_prefix(tf.compat.as_str(path))
                if isinstance(obj, PartitionedKvVariable):
                    tables |= {f"{prefix}_part_{i}": part for i, part in enumerate(obj)}
                else:
                    tables[prefix] = obj
        elif saver == _DYNAMIC:
            for variable in objects.values():
                _check_dynamic(variable)
        elif objects:
            path = next(iter(objects))
            raise ValueError(
                f"tfplugin.CheckpointManager: '{tf.compat.as_str(path)}' is saved by a saver of its own, '{saver}', "
                "which writes no increments: save it in a tf.train.Checkpoint of its own, or with "
                "sok.CheckpointManager if it is a variable of sok."
            )
    return tables


def _check_dynamic(variable: Any) -> None:
    """Raises for a dynamic embedding variable whose tables are not saved as its child is: as a key-value variable."""
    from tfplugin.dynamic_embedding.file_system_saver import saver_of

    if variable.checkpoint and (not variable._by_modulo or saver_of(variable) is not None):
        why = "goes to files beside the checkpoint" if variable._by_modulo else "shares its keys out by another rule"
        raise ValueError(
            f"tfplugin.CheckpointManager: dynamic embedding variable '{variable.name}' {why}, which is no part of a "
            "chain: make it with the default partitioner and no saver of its own, or save it in a "
            "tf.train.Checkpoint of its own."
        )


def _values(tensors: Mapping[Any, Any]) -> Iterator[tuple[str, str, tf.Tensor]]:
    """Names, slices and values of what is to be saved, read now. Later writes to variables leave them as they are."""
    for named in tensors.values():
        for name, slices in named.items():
            for piece, value in (slices if isinstance(slices, dict) else {"": slices}).items():
                if isinstance(value, saveable_object.SaveSpec):
                    value = value.tensor
                elif callable(value):
                    value = value()
                if value is not None:
                    yield name, piece.strip(), value


def _write(
    tables: Mapping[str, KvVariable],
    moment: Moment,
    prefix: str,
    record: Callable[[dict[str, TableCounts]], str],
) -> None:
    counts: dict[str, TableCounts] = {}
    left = dict(moment.cuts)
    shards = []
    try:
        for number, (_, group) in enumerate(by_device({x: tables[x] for x in moment.cuts})):
            shards.append(f"{prefix}-tables-{number}")
            cuts = tf.constant([left.pop(x) for x in group], tf.int64)  # the op gives them up, whatever happens
            of_group = run_apart(lambda group=group, cuts=cuts: save_cuts(tf.constant(shards[-1]), group, cuts))
            counts |= counted(group, [column.numpy() for column in of_group])
    finally:
        for x, number in left.items():
            raw.kv_table_drop_cut(tables[x].handle, tf.constant(number, tf.int64))
    shards.append(f"{prefix}-dense")
    dense = [*moment.dense, (RECORD_TENSOR, "", tf.constant(record(counts)))]
    run_apart(lambda: _write_dense(dense, shards, prefix))


def _write_dense(dense: Sequence[tuple[str, str, tf.Tensor]], shards: Sequence[str], prefix: str) -> None:
    """Writes the last of the shards, of dense values, and makes one checkpoint of all shards."""
    with tf.device("CPU:0"):
        saved = tf.raw_ops.SaveV2(
            prefix=shards[-1],
            tensor_names=[name for name, _, _ in dense],
            shape_and_slices=[piece for _, piece, _ in dense],
            tensors=[tensor for _, _, tensor in dense],
        )
        with tf.control_dependencies([saved] if saved is not None else []):
            gen_io_ops.merge_v2_checkpoints(tf.constant(list(shards)), tf.constant(prefix), delete_old_dirs=False)
