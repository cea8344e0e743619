"""What is saved of a graph of TensorFlow 1 in a chain: the variables of a `tf.compat.v1.train.Saver`, in sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import gen_io_ops
from tensorflow.python.training import saver as saver_lib
from tensorflow.python.training.saving import saveable_object_util

from kvtools.chain import RECORD_TENSOR, Member, Record, TableCounts
from tfplugin.chain.tables import ALL, Mark, Moment, by_device, checked, counted, cut, save_cuts, why_not_followed
from tfplugin.checkpoint import BesideSaveable
from tfplugin.ops import raw
from tfplugin.row_counts import row_count
from tfplugin.saveable import KvSaveable
from tfplugin.session_model import unfinalized

v1 = tf.compat.v1


class SaverModel:
    """The variables of a Saver as a chain saves and restores them. Its ops are added to the graph once.

    Args:
      saver: whose variables.
      increments: whether there will be any.
      max_removed: how many removed keys tables remember.
    """

    def __init__(self, saver: Any, increments: bool, max_removed: int) -> None:
        saveables = _saveables(saver)
        self._tables: dict[str, Any] = {}
        self._increments = increments
        dense = []
        for saveable in saveables:
            if isinstance(saveable, BesideSaveable):
                raise ValueError(
                    f"tfplugin.CheckpointManager: '{saveable.name}' goes to files beside the checkpoint, which is no "
                    "part of a chain: leave it out of the Saver's var_list and save it with a Saver of its own."
                )
            if isinstance(saveable, KvSaveable):
                self._tables[saveable.tensor_prefix] = saveable.variable
            else:
                dense.append(saveable)
        checked(self._tables)
        graphs = {saveable.op.graph for saveable in saveables if hasattr(saveable.op, "graph")}
        graph = graphs.pop() if graphs else tf.compat.v1.get_default_graph()
        with (
            graph.as_default(),
            unfinalized(graph),
            tf.name_scope("kv_chain/"),
            v1.device(None),
            graph.control_dependencies(None),
        ):
            self._build(saveables, dense, max_removed)
            step = v1.train.get_global_step(graph)
            self._step = None if step is None else tf.identity(step)

    def _build(self, saveables: Sequence[Any], dense: Sequence[Any], max_removed: int) -> None:
        self._mark, self._known, self._cut, self._track, self._drop, self._forget = {}, {}, {}, [], {}, {}
        self._went = {}
        self._number = v1.placeholder(tf.int64, [])
        for prefix, variable in self._tables.items():
            mark = self._mark[prefix] = v1.placeholder(tf.int64, [2])
            with tf.device(variable.device or None):
                self._known[prefix] = raw.kv_table_changes_known(variable.handle, mark)
                self._track.append(raw.kv_table_track_changes(variable.handle, max_removed=max_removed))
                self._drop[prefix] = raw.kv_table_drop_cut(variable.handle, self._number)
                self._went[prefix] = variable.expired_rows() + variable.evicted_rows(), row_count(variable)
                self._forget[prefix] = raw.kv_table_forget_changes(variable.handle, mark)
            self._cut[prefix] = cut(variable, mark)
        self._groups = [group for _, group in by_device(self._tables)]
        self._prefix = v1.placeholder(tf.string, [])
        self._cuts = [v1.placeholder(tf.int64, [len(group)]) for group in self._groups]
        self._saves = [
            save_cuts(self._prefix, group, cuts) for group, cuts in zip(self._groups, self._cuts, strict=True)
        ]
        specs = [spec for saveable in dense for spec in saveable.specs if spec.tensor is not None]
        self._specs = [(spec.name, spec.slice_spec) for spec in specs]
        self._read = [spec.tensor for spec in specs]
        # What a session gives of a variable that is no resource may be the variable's own memory.
        self._alias = [tensor.dtype._is_ref_dtype for tensor in self._read]
        with tf.device("CPU:0"):
            self._given = [v1.placeholder(tensor.dtype.base_dtype, tensor.shape) for tensor in self._read]
            self._record = v1.placeholder(tf.string, [])
            self._save_dense = tf.raw_ops.SaveV2(
                prefix=self._prefix,
                tensor_names=[*(name for name, _ in self._specs), RECORD_TENSOR],
                shape_and_slices=[*(piece for _, piece in self._specs), ""],
                tensors=[*self._given, self._record],
            )
            self._shards = v1.placeholder(tf.string, [None])
            self._merge = gen_io_ops.merge_v2_checkpoints(self._shards, self._prefix, delete_old_dirs=False)
        self._members = v1.placeholder(tf.string, [None])
        restored = []
        if dense:
            restored.append(saver_lib.BulkSaverBuilder()._AddRestoreOps(self._members[-1], dense, False, False))
        tables = [saveable for saveable in saveables if isinstance(saveable, KvSaveable)]
        self._restore = tf.group(*restored, *(saveable.restore_members(self._members) for saveable in tables))

    def look(self, session: Any, number: int) -> None:
        """Nothing to do: the graph has what there is."""

    def why_no_increment(self, session: Any, marks: Mapping[str, Mark]) -> str:
        """Why an increment since these marks cannot be had; '' where it can."""
        if set(marks) != set(self._tables):
            return "there are other tables than before"
        for prefix, why in session.run(self._known, self._feed(marks)).items():
            if why:
                return f"'{self._tables[prefix].name}': {why.decode()}"
        return ""

    def begin(self, session: Any) -> None:
        """Has tables note what changes from now on."""
        if self._increments:
            session.run(self._track)

    def moment(self, session: Any, since: Mapping[str, Mark] | None, step: int | None) -> Moment:
        """All that there is now; since marks, the rows that changed."""
        marks = dict.fromkeys(self._tables, ALL) if since is None else since
        feed = self._feed(marks)
        cuts: dict[str, Any] = {}
        others = dict(self._cut)
        try:
            # Cuts of tables whose rows expire may fail, and then those that there are are given up.
            for prefix in [prefix for prefix, table in self._tables.items() if table.policies.expiry]:
                cuts[prefix] = session.run(others.pop(prefix), feed)
            of_others, dense = session.run((others, self._read), feed)
        except BaseException:
            self.give_up(session, {prefix: int(number) for prefix, (number, _) in cuts.items()})
            raise
        cuts |= of_others
        values = [np.array(value) if alias else value for value, alias in zip(dense, self._alias, strict=True)]
        return Moment(
            since is None,
            {prefix: int(number) for prefix, (number, _) in cuts.items()},
            {prefix: (int(at[0]), int(at[1])) for prefix, (_, at) in cuts.items()},
            [(name, piece, value) for (name, piece), value in zip(self._specs, values, strict=True)],
            step,
            time.time(),
        )

    def give_up(self, session: Any, cuts: Mapping[str, int]) -> None:
        """Drops what is not going to be written."""
        for prefix, number in cuts.items():
            _run_here(session, self._drop[prefix], {self._number: number})

    def writer(self, session: Any) -> Callable[[Moment, str, Callable[[dict[str, TableCounts]], str]], None]:
        """What writes a moment, from whatever thread: given it, a prefix, and what makes the record of the counts."""
        return lambda moment, prefix, record: self._write(session, moment, prefix, record)

    def _write(
        self, session: Any, moment: Moment, prefix: str, record: Callable[[dict[str, TableCounts]], str]
    ) -> None:
        counts: dict[str, TableCounts] = {}
        left = dict(moment.cuts)
        shards = []
        try:
            for number, (group, cuts, save) in enumerate(zip(self._groups, self._cuts, self._saves, strict=True)):
                shards.append(f"{prefix}-tables-{number}")
                feed = {self._prefix: shards[-1], cuts: [left.pop(x) for x in group]}
                counts |= counted(group, _run_here(session, save, feed))
        finally:
            self.give_up(session, left)
        shards.append(f"{prefix}-dense")
        feed = {given: value for given, (_, _, value) in zip(self._given, moment.dense, strict=True)}
        _run_here(session, self._save_dense, {self._prefix: shards[-1], self._record: record(counts), **feed})
        _run_here(session, self._merge, {self._shards: shards, self._prefix: prefix})

    def forget(self, session: Any, marks: Mapping[str, Mark]) -> None:
        """Tables need not know any longer what changed before these marks."""
        known = {prefix: mark for prefix, mark in marks.items() if mark != ALL}
        if known:
            _run_here(session, [self._forget[prefix] for prefix in known], self._feed(known))

    def restore(self, session: Any, members: Sequence[str]) -> None:
        """Restores the last of the members."""
        session.run(self._restore, {self._members: list(members)})

    def why_not_followed(self, session: Any, member: Member, record: Record) -> str:
        """Why no increment can follow the member that was just restored; '' where one can."""
        went = {x: (int(rows), int(left)) for x, (rows, left) in session.run(self._went).items()}
        return why_not_followed(member, record, self._tables, went)

    def awaits_more(self) -> bool:
        """A graph has all that it restores."""
        return False

    def step(self, session: Any) -> int | None:
        """The global step, if the graph has one."""
        return None if self._step is None else int(session.run(self._step))

    def _feed(self, marks: Mapping[str, Mark]) -> dict[Any, Mark]:
        return {self._mark[prefix]: mark for prefix, mark in marks.items()}

    @staticmethod
    def session(given: Any) -> Any:
        """The session itself, by which ops run without the hooks for steps of training; by default the default one."""
        found = given or v1.get_default_session()
        if found is None:
            raise ValueError(
                "tfplugin.CheckpointManager of a Saver needs a session: say session=, or make one the default."
            )
        return found._tf_sess() if hasattr(found, "_tf_sess") else found


def _saveables(saver: Any) -> list[Any]:
    if not saver._is_built:
        saver.build()
    if not saver._var_list:
        raise ValueError(
            "tfplugin.CheckpointManager: this Saver came with a graph that was imported, and does not know which "
            "variables it has: make one, tf.compat.v1.train.Saver(variables)."
        )
    given = saver._var_list
    named = given if isinstance(given, dict) else saveable_object_util.op_list_to_dict(given)
    return list(saveable_object_util.validate_and_slice_inputs(named))


def _run_here(session: Any, fetches: Any, feed: Mapping[Any, Any]) -> Any:
    """Runs ops on the calling thread: steps that wait for a cut to be written may have all threads of the session."""
    return session.run(fetches, feed, options=v1.RunOptions(inter_op_thread_pool=-1))
