"""A key-value variable in the list of a `tf.compat.v1.train.Saver`, and the ops that write and read bundles."""

from __future__ import annotations

import collections
import functools
import logging
import tempfile
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.training.saving import saveable_object

from tfplugin import ranks
from tfplugin.chain_members import with_what_it_goes_back_to
from tfplugin.ops import raw
from tfplugin.placement import cpu_device, is_in_this_process

_log = logging.getLogger("tfplugin")

#: Where a checkpoint of objects has a table, it has this name of what saved it.
REGISTERED_SAVER = "tfplugin.KvVariable"


def is_table(node: Any) -> bool:
    """Whether a node of a checkpoint's graph of objects is a key-value variable with its rows."""
    return bool(node.registered_saver.name == REGISTERED_SAVER)


class KvSaveable(saveable_object.SaveableObject):
    """A key-value variable in a Saver's list. The builder methods that `checkpoint` wraps do its work."""

    def __init__(self, variable: Any, tensor_prefix: str) -> None:
        self.variable = self.rows = variable
        self.tensor_prefix = tensor_prefix
        spec = saveable_object.SaveSpec(
            variable.handle, "", f"{tensor_prefix}-values", dtype=tf.resource, device=variable.device
        )
        super().__init__(variable.handle, [spec], tensor_prefix)

    def restore_op(self, filename: tf.Tensor) -> Any:
        """Restores the variable from a checkpoint, whatever number of parts wrote it."""
        return restore_op(filename, self.variable, self.whole_prefix, "/part_")

    @property
    def whole_prefix(self) -> str:
        """What the tensors of the variable begin with that this one is, or is a part of."""
        if self.variable.partitioned_name is None:
            return self.tensor_prefix
        return self.tensor_prefix.removesuffix(f"/part_{self.variable.part}")

    def is_in(self, path: str, names: Collection[str]) -> bool:
        """Whether a checkpoint, whose tensors have these names, has the variable."""
        del path
        whole = self.whole_prefix
        return f"{whole}-values" in names or any(
            name.startswith(f"{whole}/part_") and name.endswith("-values") for name in names
        )

    def restore_members(self, members: tf.Tensor) -> Any:
        """Restores the variable from members of a chain, [full, increment, ...]."""
        return self.restore_op(members)

    def restore(self, restored_tensors: Any, restored_shapes: Any) -> Any:
        """Not reached: `checkpoint.add_restore_ops` and `named_restore` restore."""
        raise RuntimeError(
            f"Key-value variable '{self.variable.name}' cannot be made of a tensor: it is saved and restored while "
            "tfplugin is installed (import tfplugin, or tfplugin.install(), before the Saver is built or restore is "
            "called), and tfplugin.warm_start(checkpoint, variable) reads its rows from a checkpoint of any kind."
        )


def of_part(part: Any, name: str | None = None, **kwargs: Any) -> KvSaveable:
    """That of a part, under the name that a Saver's dictionary gives to the whole variable, or to this part of it."""
    # TensorFlow makes the name of an attribute by an underscore; ours are made by a slash.
    suffix = f"part_{part.part}"
    whole = name.removesuffix(f"_{suffix}") if name else part.partitioned_name
    return KvSaveable(part, f"{whole}/{suffix}")


def save_ops(prefix: tf.Tensor, variables: Sequence[tuple[str, Any]]) -> list[tf.Tensor]:
    """Writes one bundle shard per device, ``prefix-<i>``. Returns the shards' prefixes, to be merged."""
    return _written(prefix, "", [(name, variable, variable.handle, None) for name, variable in variables])


def save_cuts(prefix: tf.Tensor, cuts: Sequence[tuple[str, Any, tf.Tensor, tf.Tensor]]) -> list[tf.Tensor]:
    """The same, ``prefix-cut-<i>``, of exports that have begun: of a variable, by the handle of what is exported and
    the export's number.
    """
    return _written(prefix, "-cut", cuts)


def _written(
    prefix: tf.Tensor, kind: str, tables: Sequence[tuple[str, Any, tf.Tensor, tf.Tensor | None]]
) -> list[tf.Tensor]:
    by_device: dict[str, list[tuple[str, Any, tf.Tensor, tf.Tensor | None]]] = collections.OrderedDict()
    for table in tables:
        by_device.setdefault(table[2].device or "", []).append(table)
    written = []
    for number, (device, group) in enumerate(by_device.items()):
        names, variables, handles, cuts = zip(*group, strict=True)
        with tf.device(cpu_device(device) or None):
            shard = tf.strings.join([prefix, f"{kind}-{number}"])
            numbers = tf.stack(list(cuts)) if kind else None
        described = {
            "tensor_prefixes": list(names),
            "names": [variable.partitioned_name or variable._name for variable in variables],
            "part": [variable.part for variable in variables],
            "parts": [variable.parts for variable in variables],
        }
        with tf.device(device or None):
            if kind:
                cut = functools.partial(raw.kv_table_save_cut, shard, list(handles), numbers, **described)
                save = run_apart(cut).rows
            else:
                save = raw.kv_table_save(shard, list(handles), **described)
        with tf.device(cpu_device(device) or None), tf.control_dependencies([save] if save is not None else []):
            written.append(tf.identity(shard))
    return written


def run_apart(ops: Callable[[], Any]) -> Any:
    """Runs ops of a thread in the background, and gives what they give: in a function, where there is a GPU.

    An eager op that fails by itself aborts those of all threads that are waiting for a tensor from another device just
    then, as a training step on a GPU does: they have one rendezvous. A function has its own.
    """
    if tf.executing_eagerly() and context.context().num_gpus():
        return tf.function(ops, autograph=False)()
    return ops()


def restore_op(prefix: tf.Tensor, variable: Any, tensor_prefix: str, part_infix: str) -> Any:
    """Reads the rows that belong to a variable, or to this part of it, from a checkpoint. Returns the op (graph mode).

    The log says which rows the variable does not take: that of Python at once in eager mode, else TensorFlow's, where
    the table is. (To wait for the answer of one server would have the others restore after it.)

    Args:
      prefix: of the checkpoint; or [k] of a full one of a chain and the increments after it.
      variable: to restore.
      tensor_prefix, part_infix: what the tensors of the variable, and of a part of it, begin with.
    """
    prefix = with_what_it_goes_back_to(prefix)
    here = tf.executing_eagerly() and is_in_this_process(variable.handle.device)
    with tf.device(variable.device or None):
        left_out = raw.kv_table_restore(
            variable.handle,
            prefix,
            tensor_prefix=tensor_prefix,
            part_infix=part_infix,
            part=variable.part,
            parts=variable.parts,
            initializer=variable.kv_initializer.to_json(),
            log=not here,
        )
    if here and (said := tf.compat.as_str(left_out.numpy())):
        _log.warning("%s", said)
    return None if tf.executing_eagerly() else left_out.op


def copy_rows(source: Any, target: Any) -> None:
    """Gives a variable what another one of eager mode holds: rows, slots, counts, times. By a checkpoint that goes."""
    with tempfile.TemporaryDirectory() as folder, tf.init_scope():
        bundle = tf.constant(f"{folder}/copy")
        # All that it holds, also where it is a part of something.
        raw.kv_table_save(bundle, [source.handle], tensor_prefixes=["rows"], names=[source._name], part=[0], parts=[1])
        raw.kv_table_restore(
            target.handle,
            bundle,
            tensor_prefix="rows",
            part_infix="/part_",
            part=0,
            parts=1,
            initializer=target.kv_initializer.to_json(),
            log=False,
        )


def not_by_one_rank(what: str, size: int) -> Exception:
    """What one rank alone is told that saves what it has only a part of."""
    return ValueError(
        f"{what} is spread over {size} ranks, and this rank would save its own rows only: save with sok.Checkpoint "
        "(or sok.dump) on all ranks. Any tf.train.Checkpoint restores what it writes."
    )


def check_whole(variable: Any) -> None:
    """Raises for a variable whose rows are in several processes: one alone cannot save it."""
    if getattr(variable, "ranks", 1) > 1:
        kind = "Key-value variable " if hasattr(type(variable), "_kv_parts") else ""
        raise not_by_one_rank(f"{kind}'{variable.name}'", variable.ranks)
    if (of := getattr(variable, "_slot_of_ranks_rows", None)) is not None:
        raise not_by_one_rank(f"'{variable.name}', of an optimizer for '{of}',", ranks.size())
