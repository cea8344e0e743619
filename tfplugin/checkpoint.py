"""Saving and restoring key-value variables: `tf.compat.v1.train.Saver`, `tf.train.Checkpoint`, SavedModel.

The layout is specified in docs/checkpoint-layout.md; the ops write and read it. What is here tells TensorFlow's three
mechanisms to call them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from google.protobuf import struct_pb2
from tensorflow.python.ops import gen_io_ops
from tensorflow.python.saved_model import registration
from tensorflow.python.training import saver as saver_lib
from tensorflow.python.training.saving import saveable_object

from kvtools.chain_place import is_chain
from tfplugin import graph_import, graph_restore, restore_scope, slot_binding
from tfplugin.async_save import TableAtMoment
from tfplugin.kv_variable import KvVariable
from tfplugin.partitioned_kv_variable import PartitionedKvVariable, put_together
from tfplugin.policies import Policies
from tfplugin.saveable import REGISTERED_SAVER, KvSaveable, check_whole, restore_op, save_cuts, save_ops
from tfplugin.table_places import misplaced

_log = logging.getLogger("tfplugin")

# ---- Name-based: tf.compat.v1.train.Saver --------------------------------------------------------


class BesideSaveable(saveable_object.SaveableObject):
    """What a Saver's list has for rows that it reads and writes itself. Its specs go into the checkpoint.

    Attributes:
      rows: the object whose rows they are: of one object they are restored one after the other.
    """

    rows: Any = None

    def save_beside(self, filename: tf.Tensor) -> Any:
        """Writes what goes beside the checkpoint. Returns the op (graph mode)."""
        raise NotImplementedError(type(self).__name__)

    def restore_op(self, filename: tf.Tensor) -> Any:
        """Restores the rows. Returns the op (graph mode)."""
        raise NotImplementedError(type(self).__name__)

    def is_in(self, path: str, names: Collection[str]) -> bool:
        """Whether a checkpoint, whose tensors have these names, or what lies beside it has the rows."""
        del path
        return all(spec.name in names for spec in self.specs)


def add_save_ops(original: Callable[..., Any], builder: Any, filename: Any, saveables: Sequence[Any]) -> Any:
    """`BaseSaverBuilder._AddSaveOps`: key-value variables as shards of their own, merged with the rest."""
    if not saveables:
        raise ValueError(
            "Nothing in the Saver's list has anything to save. Tables in Redis have not: their rows stay in the "
            "server, and need no Saver."
        )
    refused = graph_import.refuse_saver(saveables)
    refused = refuse_shards(saveables) if refused is None else refused
    if refused is not None:
        with tf.control_dependencies([refused]):
            return tf.identity(filename)
    written = [saveable.save_beside(filename) for saveable in saveables if isinstance(saveable, BesideSaveable)]
    with tf.control_dependencies([op for op in written if op is not None]):
        return _add_bundle_ops(original, builder, filename, saveables)


def refuse_shards(saveables: Sequence[Any]) -> tf.Operation | None:
    """An op that fails in the place of what saves the rows of one rank alone; None if each variable is here as a whole.

    `MonitoredTrainingSession` makes a Saver also where it is not to save.
    """
    tables = [saveable.variable for saveable in saveables if isinstance(saveable, KvSaveable)]
    try:
        for variable in [*tables, *graph_import.variables_of(saveables)]:
            check_whole(variable)
    except ValueError as error:
        if tf.executing_eagerly():
            raise
        return tf.raw_ops.Assert(condition=False, data=[str(error)], summarize=-1)
    return None


def _add_bundle_ops(original: Callable[..., Any], builder: Any, filename: Any, saveables: Sequence[Any]) -> Any:
    tables = [saveable for saveable in saveables if isinstance(saveable, KvSaveable)]
    if not tables:
        return original(builder, filename, saveables)
    if builder._write_version != saver_lib.saver_pb2.SaverDef.V2:
        raise ValueError("Key-value variables are saved in TensorFlow's V2 checkpoint format only: write_version=V2.")
    dense = [saveable for saveable in saveables if not isinstance(saveable, KvSaveable)]
    filename = tf.convert_to_tensor(filename)
    scratch = tf.strings.join([filename, "_kvtmp"])
    shards = save_ops(
        tf.strings.join([scratch, "/tables"]), [(saveable.tensor_prefix, saveable.variable) for saveable in tables]
    )
    if dense:
        # After the tables, whose op makes the folder.
        with tf.control_dependencies([] if tf.executing_eagerly() else list(shards)):
            shards.append(original(builder, tf.strings.join([scratch, "/dense"]), dense))
    merge = gen_io_ops.merge_v2_checkpoints(tf.stack(shards), filename, delete_old_dirs=True)
    with tf.control_dependencies([merge] if merge is not None else []):
        return tf.identity(filename)


def add_restore_ops(
    original: Callable[..., Any],
    builder: Any,
    filename: Any,
    saveables: Sequence[Any],
    restore_sequentially: bool,
    reshape: bool,
    preferred_shard: int = -1,
    name: str = "restore_all",
) -> Any:
    """`BaseSaverBuilder._AddRestoreOps`: key-value variables read their own keys from however many parts there are."""
    if (refused := graph_import.refuse_saver(saveables)) is not None:
        return refused
    tables = [saveable for saveable in saveables if isinstance(saveable, (KvSaveable, BesideSaveable))]
    dense = [saveable for saveable in saveables if not isinstance(saveable, (KvSaveable, BesideSaveable))]
    if not tables:
        return original(builder, filename, saveables, restore_sequentially, reshape, preferred_shard, name)
    restored = []
    if dense:
        restored.append(
            original(builder, filename, dense, restore_sequentially, reshape, preferred_shard, f"{name}_dense")
        )
    latest: dict[int, Any] = {}
    for saveable in tables:
        before = latest.get(id(saveable.rows)) if saveable.rows is not None else None
        with tf.control_dependencies([] if before is None else [before]):
            latest[id(saveable.rows)] = saveable.restore_op(filename)
        restored.append(latest[id(saveable.rows)])
    return tf.group(*[op for op in restored if op is not None], name=name)


def slices_of_savers(original: Callable[..., Any], names_to_saveables: Mapping[str, Any]) -> Any:
    """`validate_and_slice_inputs`: a list of all parts of a key-value variable is the variable, as one of slices is."""
    return original({name: _whole(name, given) for name, given in names_to_saveables.items()})


def _whole(name: str, given: Any) -> Any:
    if not isinstance(given, (list, tuple)) or not any(isinstance(part, KvVariable) for part in given):
        return given
    parts = [part for part in given if isinstance(part, KvVariable)]
    wholes = list(put_together(parts))
    if len(wholes) != 1 or len(wholes[0]) != len(given):
        raise ValueError(
            f"What a Saver is to have as '{name}' is a list with {parts[0]!r} that is not all parts of one key-value "
            "variable: give the variable, as get_kv_variable gave it, or the list of its parts, [*variable]."
        )
    return wholes[0]


# ---- Object-based: tf.train.Checkpoint and SavedModel ----


def _is_saved_object(obj: Any) -> bool:
    return isinstance(obj, (KvVariable, PartitionedKvVariable, TableAtMoment))


def wholes(trackables: Mapping[str, Any]) -> dict[str, Any]:
    """Parts of a partitioned variable are saved by the whole, so that they restore into any other number of parts."""
    wholes = [obj for obj in trackables.values() if isinstance(obj, PartitionedKvVariable)]
    parts = {id(part) for whole in wholes for part in whole}
    return {path: obj for path, obj in trackables.items() if id(obj) not in parts}


def object_prefix(path: str) -> str:
    """What the tensors of the object at `path` begin with."""
    return f"{path}/.ATTRIBUTES/kv"


def _save(trackables: Mapping[str, Any], file_prefix: tf.Tensor) -> list[tf.Tensor]:
    variables: list[tuple[str, KvVariable]] = []
    cuts: list[tuple[str, KvVariable, tf.Tensor, tf.Tensor]] = []
    shards: list[tf.Tensor] = []
    for path, saved in wholes(trackables).items():
        obj = saved.table if isinstance(saved, TableAtMoment) else saved
        check_whole(obj)
        if isinstance(obj, KvVariable) and obj.partitioned_name is not None:
            raise ValueError(
                f"'{tf.compat.as_str(path)}' is a part of key-value variable '{obj.partitioned_name}', and parts are "
                "saved by the whole, which restores into any number of parts: have the checkpoint, the layer or the "
                "module hold what get_kv_variable gave, not its parts alone."
            )
        if isinstance(saved, TableAtMoment):
            prefix = object_prefix(path)
            prefixes = [prefix] if obj is obj._kv_parts[0] else [f"{prefix}_part_{i}" for i in range(len(obj))]
            taken = zip(prefixes, obj._kv_parts, saved.taken(), strict=True)
            cuts += [(tensor_prefix, part, handle, cut) for tensor_prefix, part, (handle, cut) in taken]
        elif id(obj) in _elsewhere:
            shards += _renamed(file_prefix, object_prefix(path), _elsewhere[id(obj)])
        elif isinstance(obj, PartitionedKvVariable):
            variables += [(f"{object_prefix(path)}_part_{i}", part) for i, part in enumerate(obj)]
        else:
            variables.append((object_prefix(path), obj))
    return shards + save_ops(file_prefix, variables) + save_cuts(file_prefix, cuts)


#: Bundles with the parts of variables, whose tensors begin "rows", by the id of the variable: what is saved of it.
_elsewhere: dict[int, list[str]] = {}


@contextlib.contextmanager
def saved_elsewhere(bundles: Mapping[int, list[str]]) -> Iterator[None]:
    """While variables (their ids) are saved by taking over bundles, one for each part, which others have written."""
    _elsewhere.update(bundles)
    try:
        yield
    finally:
        for variable in bundles:
            del _elsewhere[variable]


def restore_of_chain(original: Callable[..., Any], saver: Any, save_path: Any, *args: Any, **kwargs: Any) -> Any:
    """`TrackableSaver.restore`: says what to do with the folder of a chain, of which TensorFlow finds no file."""
    if isinstance(save_path, (str, os.PathLike)) and is_chain(save_path):
        raise ValueError(
            f"'{os.fspath(save_path)}' is the folder of a chain, of a full checkpoint and increments after it: "
            "restore it by tfplugin.CheckpointManager(checkpoint, folder).restore_or_initialize(), or some of its "
            "tables by tfplugin.restore_tables; `kvtools merge` makes one checkpoint of it."
        )
    return restore_scope.restore(original, saver, save_path, *args, **kwargs)


def saver_of_objects(original: Callable[..., Any], checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
    """`saver_from_object_based_checkpoint`: says what to do with a checkpoint of objects that a Saver is to restore."""
    try:
        return original(checkpoint_path, *args, **kwargs)
    except tf.errors.NotFoundError as error:
        if "-values" not in error.message:
            raise
        raise tf.errors.NotFoundError(
            None,
            None,
            f"{error.message}\n\n'{checkpoint_path}' is a checkpoint of objects, which has key-value variables under "
            "the names of attributes and not of variables, so that a Saver does not find them: restore the objects, "
            "tf.train.Checkpoint(attribute=variable).restore(path).run_restore_ops(session), or the tables alone, "
            "session.run(tfplugin.restore_tables(path, {variable: 'attribute'})); `kvtools inspect` lists the names.",
        ) from error


def is_saved_elsewhere(variable: Any) -> bool:
    """Whether what is saved of a variable now is what others have written."""
    return id(variable) in _elsewhere


def _renamed(file_prefix: tf.Tensor, prefix: str, bundles: Sequence[str]) -> list[tf.Tensor]:
    """Writes each bundle again, as a part of the object whose tensors begin with `prefix`. Returns the shards."""
    shards = []
    for i, bundle in enumerate(bundles):
        dtypes = tf.train.load_checkpoint(bundle).get_variable_to_dtype_map()
        names = sorted(dtypes)
        shard = tf.strings.join([file_prefix, f"-{tf.compat.as_str(prefix).replace('/', '_')}-part-{i}"])
        tensors = tf.raw_ops.RestoreV2(
            prefix=bundle, tensor_names=names, shape_and_slices=[""] * len(names), dtypes=[dtypes[n] for n in names]
        )
        renamed = [f"{prefix}_part_{i}{name.removeprefix('rows')}" for name in names]
        saved = tf.raw_ops.SaveV2(
            prefix=shard, tensor_names=renamed, shape_and_slices=[""] * len(names), tensors=tensors
        )
        with tf.control_dependencies([saved] if saved is not None else []):
            shards.append(tf.identity(shard))
    return shards


def _restore(trackables: Mapping[str, Any], merged_prefix: tf.Tensor) -> None:
    objects = wholes(trackables)
    if tf.executing_eagerly():
        prefix = tf.compat.as_str(merged_prefix.numpy())
        wrong = misplaced(prefix, {object_prefix(tf.compat.as_str(path)): obj for path, obj in objects.items()})
        if wrong:
            _log.warning(
                "Restoring '%s': %s. It gets the rows of the other one, as tf.train.Checkpoint knows objects by their "
                "places; tfplugin.restore_tables restores tables by their names.",
                *(prefix, wrong),
            )
    for path, obj in objects.items():
        for part in obj if isinstance(obj, PartitionedKvVariable) else [obj]:
            if part.holds_rows:
                graph_restore.note(restore_op(merged_prefix, part, object_prefix(path), "_part_"))
                slot_binding.restored(part, obj._update_uid)
            else:
                graph_restore.note(part.clear())


def _packed(obj: Any) -> struct_pb2.Struct:
    message = struct_pb2.Struct()
    message["config"] = obj.config_json() if isinstance(obj, KvVariable) else json.dumps({"name": obj.name})
    return message


def _unpacked(proto: Any) -> dict[str, Any]:
    message = struct_pb2.Struct()
    proto.Unpack(message)
    return dict(json.loads(message["config"]))


def _deserialize_variable(cls: Any, proto: Any, **kwargs: Any) -> KvVariable:
    config = _unpacked(proto)
    return KvVariable(
        config["name"],
        config["dim"],
        config["key_dtype"],
        config["value_dtype"],
        trainable=config["trainable"],
        # Models of earlier versions say nothing of bounds and policies.
        max_capacity=config.get("max_capacity", 0),
        eviction=config.get("eviction", "lru"),
        policies=Policies.from_json(config.get("policies", "")),
        part=config["part"],
        parts=config["parts"],
        parts_beside=config["parts"],  # those of a model are on the device of who loads it
        partitioned_name=config["partitioned_name"],
    )


def _deserialize_partitioned(cls: Any, proto: Any, dependencies: Mapping[str, Any], **kwargs: Any) -> Any:
    parts = sorted(
        ((int(name.removeprefix("part_")), part) for name, part in dependencies.items() if name.startswith("part_")),
        key=lambda item: item[0],
    )
    return PartitionedKvVariable(_unpacked(proto)["name"], [part for _, part in parts])


@functools.cache
def register() -> None:
    """Tells TensorFlow how to save, restore and re-create the two classes. Done once per process, which may reload."""
    for cls, deserialize in ((KvVariable, _deserialize_variable), (PartitionedKvVariable, _deserialize_partitioned)):
        cls._serialize_to_proto = lambda self, **kwargs: _packed(self)  # type: ignore[attr-defined]
        cls._deserialize_from_proto = classmethod(deserialize)  # type: ignore[attr-defined]
        registration.register_serializable(package="tfplugin")(cls)
    registration.register_checkpoint_saver(
        package=REGISTERED_SAVER.partition(".")[0],
        name=REGISTERED_SAVER.partition(".")[2],
        predicate=_is_saved_object,
        save_fn=_save,
        restore_fn=_restore,
        strict_predicate_restore=False,
    )
