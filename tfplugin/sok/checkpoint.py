"""`sok.Checkpoint`: `tf.train.Checkpoint` for models whose embeddings are spread over ranks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.checkpoint import functional_saver
from tensorflow.python.ops import gen_io_ops
from tensorflow.python.trackable import base as trackable

from kvtools.dialects.bundle.reader import Bundle
from tfplugin import checkpoint as tables
from tfplugin import ranks
from tfplugin.kv_variable import KvVariable
from tfplugin.ops import raw
from tfplugin.optimizers.wrapper import OptimizerWrapper
from tfplugin.ranks import step
from tfplugin.saveable import REGISTERED_SAVER
from tfplugin.sok import sharded_checkpoint
from tfplugin.sok.distributed_variable import ShardedVariable, held_rows
from tfplugin.sok.optimizer_slots import core_of, slots_of
from tfplugin.sok.pending_rows import PendingRows
from tfplugin.sok.row_files import owned, require_eager
from tfplugin.sok.shared_folder import put_in_place, shared_scratch


class Checkpoint(tf.train.Checkpoint):
    """A `tf.train.Checkpoint` that all ranks save and restore together, as one checkpoint of the whole model.

    It holds the rows of every rank, and the dense variables of rank 0. Any number of ranks restores it, also a
    ``tf.train.Checkpoint`` on one, where a static variable is a ``tf.Variable`` of the whole shape; ``kvtools`` opens
    it. Every rank calls each method, with the same path, which is on a filesystem that all ranks share. A
    checkpoint of that name stays as it was unless everything has been written by everyone. Eager mode only.

    Args:
      root, **kwargs: what to save, as for ``tf.train.Checkpoint``, the same on all ranks. On several ranks no iterator
        of `tf.data`, which each rank has another of: a ValueError.

    Example:
      >>> checkpoint = sok.Checkpoint(model=model, optimizer=optimizer)
      >>> path = checkpoint.save("run/model")     # on every rank
      >>> checkpoint.restore(path)                # on every rank of any number
    """

    def _write(self, file_prefix: str, options: tf.train.CheckpointOptions | None = None) -> str:
        if ranks.size() == 1:
            path: str = super()._write(file_prefix, options)
            return path
        prefix = Path(os.fspath(file_prefix))
        doing = f"sok.Checkpoint: saving '{prefix}'"
        with step(doing):
            require_eager("sok.Checkpoint")
            if options is not None and options.experimental_enable_async_checkpoint:
                raise ValueError(
                    "sok.Checkpoint saves all ranks together: experimental_enable_async_checkpoint is not for it."
                )
            _refuse_iterators(self, doing)
            _watch_optimizers(self)
            parts = _Parts(self._saver, doing)
        ranks.check_same([prefix.name, *parts.described()], doing, "objects")
        with shared_scratch(prefix.parent, doing) as scratch:
            with step(doing):
                shards = parts.write_own(scratch)
            shards = [shard for of_rank in ranks.current().allgather(shards) for shard in of_rank]
            with step(doing):
                if ranks.rank() == 0:
                    shards += parts.write_common(scratch, options)
                    _merge(scratch, [str(scratch / shard) for shard in shards], prefix)
        # One after the other, as they may write to one file.
        for rank in range(ranks.size()):
            with step(doing):
                if rank == ranks.rank():
                    _call_back(options, str(prefix))
        return str(prefix)

    def read(self, save_path: Any, options: tf.train.CheckpointOptions | None = None) -> Any:
        """Restores, as ``tf.train.Checkpoint.read`` does, on all ranks.

        Raises:
          kvtools.errors.BadInputError, kvtools.errors.CorruptFileError: a file is missing, or too short.
          ValueError: the ranks restore different checkpoints, or some of them none.
          RankError: another rank failed.
        """
        if ranks.size() == 1:
            if save_path is not None and "://" not in os.fspath(save_path):
                Bundle(Path(os.fspath(save_path)))
            return super().read(save_path, options)
        doing = f"sok.Checkpoint: restoring '{save_path}'"
        _check_same_checkpoint(save_path, doing)
        if save_path is None:
            return super().read(save_path, options)
        with step(doing):
            require_eager("sok.Checkpoint")
            Bundle(Path(os.fspath(save_path)))  # is there, and whole, before any rank changes anything
            _refuse_iterators(self, doing)
            _watch_optimizers(self)
        with step(doing):
            status = super().read(save_path, options)
        return status


class CheckpointManager(tf.train.CheckpointManager):
    """A `tf.train.CheckpointManager` of a `Checkpoint`, on all ranks: rank 0 records, and deletes, for all.

    Example:
      >>> manager = sok.CheckpointManager(checkpoint, "run", max_to_keep=3)
      >>> checkpoint.restore(manager.latest_checkpoint)
      >>> manager.save()                          # on every rank
    """

    def __init__(self, checkpoint: Checkpoint, directory: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"sok.CheckpointManager wants a sok.Checkpoint, got {type(checkpoint).__name__}.")
        with step(f"sok.CheckpointManager of '{directory}'"):
            super().__init__(checkpoint, directory, *args, **kwargs)
        # What rank 0 has found there: it may be saving again before another rank looks.
        found = ranks.current().allgather((self._latest_checkpoint, self._maybe_delete, self._last_preserved_timestamp))
        self._latest_checkpoint, self._maybe_delete, self._last_preserved_timestamp = found[0]

    def _record_state(self) -> None:
        if ranks.rank() == 0:
            super()._record_state()

    def _sweep(self) -> None:
        if ranks.rank() == 0:
            super()._sweep()
        elif self._max_to_keep:
            while len(self._maybe_delete) > self._max_to_keep:
                self._maybe_delete.popitem(last=False)


class _Parts:
    """What there is to save, and who does it: its own rows each rank, all that is not spread out rank 0.

    Args:
      saver: TensorFlow's, of the checkpoint.
      doing: for messages.
    """

    def __init__(self, saver: Any, doing: str) -> None:
        tensors, _, registered, graph = saver._gather_serialized_tensors()
        spread = registered.get(REGISTERED_SAVER, {})
        self._dynamic: dict[str, KvVariable] = {
            name: v for name, v in spread.items() if isinstance(v, KvVariable) and v.ranks > 1
        }
        for name in self._dynamic:
            del spread[name]
        self._static: dict[str, Any] = {}
        for name, obj in registered.pop(sharded_checkpoint.SAVER, {}).items():
            self._static[f"{name}/.ATTRIBUTES/{sharded_checkpoint.VALUE}"] = obj
        _as_plain_variables(graph)
        with tf.device("CPU:0"):
            tensors[None][trackable.OBJECT_GRAPH_PROTO_KEY] = tf.constant(graph.SerializeToString(), tf.string)
        self._tensors = tensors
        self._pending = PendingRows(saver, tensors)
        self._registered = {name: objects for name, objects in registered.items() if objects}
        for variable in self._dynamic.values():
            _check_no_strays(variable, doing)

    def described(self) -> list[str]:
        """What must be the same on all ranks."""
        tables_ = [f"{name}: {v.describe()}" for name, v in self._dynamic.items()]
        wholes = [f"{name}: {sharded_checkpoint.spread(obj).describe()}" for name, obj in self._static.items()]
        return sorted([*tables_, *wholes, *self._pending.described()])

    def write_own(self, scratch: Path) -> list[str]:
        """Writes this rank's rows. Returns the bundles that it made."""
        for number, obj in enumerate(self._static.values()):
            rows = tf.convert_to_tensor(obj).numpy()
            with (scratch / f"static-{number}-{ranks.rank()}").open("wb") as file:
                file.write(memoryview(np.ascontiguousarray(rows)).cast("B") if rows.size else b"")
                os.fsync(file.fileno())
        self._pending.write_own(scratch)
        named = []
        for name, variable in self._dynamic.items():
            if variable.owner is None:
                named.append((f"{tables.object_prefix(name)}_part_{ranks.rank()}", variable))
            elif variable.owner == ranks.rank():
                named.append((tables.object_prefix(name), variable))
        if not named:
            return []
        written = tables.save_ops(tf.constant(str(scratch / f"tables-{ranks.rank()}")), named)
        return [Path(shard.numpy().decode()).name for shard in written]

    def write_common(self, scratch: Path, options: tf.train.CheckpointOptions | None) -> list[str]:
        """Writes static variables, one at a time, and all that is not spread out. Returns the bundles that it made."""
        shards = []
        for number, (name, obj) in enumerate(self._static.items()):
            variable = sharded_checkpoint.spread(obj)
            whole = _whole(scratch, number, variable, tf.as_dtype(obj.dtype))
            shards.append(f"whole-{number}")
            tf.raw_ops.SaveV2(
                prefix=str(scratch / shards[-1]), tensor_names=[name], shape_and_slices=[""], tensors=[whole]
            )
        self._pending.take_all(scratch)
        functional_saver.MultiDeviceSaver(self._tensors, self._registered).save(
            str(scratch / "common"), options=options or tf.train.CheckpointOptions()
        )
        return [*shards, "common"]


def _whole(scratch: Path, number: int, variable: ShardedVariable, dtype: tf.DType) -> tf.Tensor:
    """A static variable, or a slot of one, from the rows that the ranks have written."""
    rows, dim = variable.global_shape
    whole = np.empty((rows, dim), dtype.as_numpy_dtype)
    for rank in range(ranks.size()):
        held = held_rows(rows, variable.owner, rank, ranks.size())
        path = scratch / f"static-{number}-{rank}"
        part = np.frombuffer(path.read_bytes(), whole.dtype)
        if part.size != len(held) * dim:
            raise RuntimeError(
                f"rank {rank} wrote {part.size} numbers of '{variable.name}', expected {len(held) * dim}"
            )
        whole[held] = part.reshape(-1, dim)
        path.unlink()
    return tf.constant(whole, dtype)


def _as_plain_variables(graph: Any) -> None:
    """Has the object graph say of static variables what it would if each were a `tf.Variable` of the whole."""
    for node in graph.nodes:
        if node.registered_saver.name == sharded_checkpoint.SAVER:
            key = f"{node.registered_saver.object_name}/.ATTRIBUTES/{sharded_checkpoint.VALUE}"
            node.ClearField("registered_saver")
            node.attributes.add(name=sharded_checkpoint.VALUE, checkpoint_key=key)


def _check_no_strays(variable: KvVariable, doing: str) -> None:
    """Raises where this rank holds keys that are not its own, which would be saved twice, or on the wrong rank."""
    keys = raw.kv_table_keys(variable.handle, Tkeys=variable.key_dtype).numpy()
    stray = keys[~owned(variable, keys)]
    if len(stray):
        raise ValueError(
            f"{doing}: rank {ranks.rank()} holds {len(stray)} rows of '{variable.name}' whose keys belong to other "
            f"ranks ({stray[0]}, for one). tf.nn.embedding_lookup makes rows on the rank that calls it: look up with "
            "sok.lookup_sparse, or in tfplugin.inference_mode(); remove these with variable.remove(keys), or save with "
            "sok.dump, which writes each key once."
        )


def _merge(scratch: Path, shards: Sequence[str], prefix: Path) -> None:
    merged = scratch / "merged"
    gen_io_ops.merge_v2_checkpoints(tf.constant(shards), tf.constant(str(merged)), delete_old_dirs=False)
    found = sorted(scratch.glob("merged.data-*"))
    for path in (*found, Path(f"{merged}.index")):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    # The index last: without it there is no checkpoint.
    files = [(path, prefix.parent / path.name.replace("merged", prefix.name, 1)) for path in found]
    files.append((Path(f"{merged}.index"), Path(f"{prefix}.index")))
    targets = {target for _, target in files}
    outdated = [path for path in prefix.parent.iterdir() if _is_data_of(path, prefix.name) and path not in targets]
    put_in_place(scratch, files, outdated)


def _is_data_of(path: Path, name: str) -> bool:
    return path.name.startswith(f"{name}.data-") and "-of-" in path.name


def _check_same_checkpoint(save_path: Any, doing: str) -> None:
    """Raises on all ranks where one has found another checkpoint than others, or none: it may see files late."""
    said = ranks.current().allgather(None if save_path is None else str(save_path))
    with step(doing):
        if len({path and Path(path).name for path in said}) > 1:
            told = ", ".join(f"rank {rank}: {path or 'none'}" for rank, path in enumerate(said))
            raise ValueError(
                f"{doing}: every rank must restore the same checkpoint ({told}); sok.CheckpointManager gives all ranks "
                "what rank 0 finds."
            )


def _call_back(options: tf.train.CheckpointOptions | None, path: str) -> None:
    for callback in (options.experimental_write_callbacks if options else None) or []:
        callback(path) if inspect.signature(callback).parameters else callback()


def _objects(checkpoint: tf.train.Checkpoint) -> list[Any]:
    """What a checkpoint holds, and what that holds."""
    objects: list[Any] = tf.train.TrackableView(checkpoint._saver._graph_view.root).descendants()
    return objects + [ref.ref for ref in checkpoint._saver._graph_view.attached_dependencies or []]


def _refuse_iterators(checkpoint: tf.train.Checkpoint, doing: str) -> None:
    """Raises for an iterator of `tf.data`: rank 0's would be that of all ranks, which then read the data of rank 0."""
    if any(isinstance(obj, tf.data.Iterator) for obj in _objects(checkpoint)):
        raise ValueError(
            f"{doing}: of an iterator of tf.data it would keep the place, and the share of the data, of rank 0 alone. "
            "Have each rank keep its own in a tf.train.Checkpoint of another name, such as f'run/input-{sok.rank()}', "
            "or skip the batches of the steps that were made."
        )


def _watch_optimizers(checkpoint: tf.train.Checkpoint) -> None:
    """Finds the optimizers of a checkpoint, and notes what they keep, and will keep, for static variables."""
    objects = _objects(checkpoint)
    static = [obj for obj in objects if isinstance(obj, ShardedVariable)]
    for obj in objects:
        if isinstance(obj, (OptimizerWrapper, KvVariable)) or not hasattr(obj, "apply_gradients"):
            continue
        core = core_of(obj)
        if not static and not any(isinstance(v, ShardedVariable) for v in getattr(core, "_trainable_variables", ())):
            continue
        sharded_checkpoint.watch(core)
        for variable in static:
            sharded_checkpoint.note_slots(slots_of(core, variable), variable)
