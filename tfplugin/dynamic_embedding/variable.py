"""`Variable`: a table from key to embedding row over a list of devices."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.trackable import base as trackable
from tensorflow.python.training import optimizer as v1_optimizer

from tfplugin.dynamic_embedding.creators import CuckooHashTableCreator, KVCreator
from tfplugin.dynamic_embedding.initial_values import initial_values
from tfplugin.dynamic_embedding.partition import default_partition_fn
from tfplugin.dynamic_embedding.saves_files import VariableFiles
from tfplugin.dynamic_embedding.string_keys import HASHES, KeyNames
from tfplugin.dynamic_embedding.table import check_dtypes
from tfplugin.kv_variable import KvVariable
from tfplugin.ops import raw
from tfplugin.optimizers.known import innermost
from tfplugin.partitioned_kv_variable import PartitionedKvVariable

_log = logging.getLogger("tfplugin")


class Variable(VariableFiles, trackable.Trackable):
    """An embedding table that grows a row for each key that an optimizer trains: key -> row of `dim` values.

    A lookup never inserts: a missing key gives its initial value, and `DynamicEmbeddingOptimizer` inserts it when it
    applies the gradient. Slots of optimizers lie beside the values and come and go with them.

    Args:
      key_dtype: tf.int64, tf.int32 or tf.uint64; tf.string: tables hold 63-bit hashes, and the strings beside them.
      value_dtype: tf.float32, float64, float16 or bfloat16; where nothing is trained int8, int32, int64 or bool; with
        int64 keys also tf.string.
      dim: width of a row.
      devices: one table is made on each; default ``["/CPU:0"]``. Tables are in the host memory of the device.
      partitioner: function of (keys, number of tables) that gives the table of each key, int32.
      shared_name: not used.
      name: of the variable.
      initializer: what a missing key gives: a number, an array or an initializer; default 0. Random ones are functions
        of the key: the same key gives the same row.
      trainable: whether optimizers train it.
      checkpoint: whether it is saved.
      init_size: rows to make room for in all tables together; default ``$TF_HASHTABLE_INIT_SIZE``, or 8192, in each.
      kv_creator: what makes the tables.
      restrict_policy: a subclass of `RestrictPolicy`: what `restrict` goes by.
      bp_v2: accepted. An update always changes the row as it is when the update comes, so that none is lost.
      short_file_name: `get_variable` leaves the variable scope out of the name, and slots the optimizer out of theirs.

    Raises:
      TypeError: dtypes that tables do not have; a `restrict_policy` that is no subclass of `RestrictPolicy`.
      ValueError: a `dim` below 1; a `tf.distribute` strategy of several replicas.

    Example:
      >>> v = de.Variable(dim=2, name="user", initializer=0.5)
      >>> v.upsert(tf.constant([7], tf.int64), tf.constant([[1.0, 2.0]]))
      >>> v.lookup(tf.constant([7, 8], tf.int64)).numpy()
      array([[1. , 2. ],
             [0.5, 0.5]], dtype=float32)
    """

    def __init__(
        self,
        key_dtype: Any = tf.int64,
        value_dtype: Any = tf.float32,
        dim: int = 1,
        devices: Any = None,
        partitioner: Callable[[Any, int], tf.Tensor] = default_partition_fn,
        shared_name: str | None = None,
        name: str = "DynamicEmbedding_Variable",
        initializer: Any = None,
        trainable: bool = True,
        checkpoint: bool = True,
        init_size: int = 0,
        kv_creator: KVCreator | None = None,
        restrict_policy: Any = None,
        bp_v2: bool = False,
        short_file_name: bool = False,
    ) -> None:
        # Here, because policies keep their status in a variable.
        from tfplugin.dynamic_embedding.restrict_policies import RestrictPolicy

        strategy = tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
        if strategy is not None and not isinstance(strategy, tf.distribute.OneDeviceStrategy):
            raise ValueError(
                f"Dynamic embedding variable '{name}' cannot be made under {type(strategy).__name__}, which would keep "
                "copies of it apart. Train on several processes with Horovod (keras.layers.HvdAllToAllEmbedding), or "
                "with sessions on parameter servers (devices=[...])."
            )
        if isinstance(dim, bool) or int(dim) < 1:
            raise ValueError(f"Dynamic embedding variable '{name}': dim must be 1 or more, got {dim!r}.")
        self.key_dtype = tf.as_dtype(key_dtype)
        self.value_dtype = tf.as_dtype(value_dtype)
        self.dim = int(dim)
        self.kv_creator = kv_creator or CuckooHashTableCreator()
        self.devices = list(devices) if isinstance(devices, (list, tuple)) and devices else [devices or "/CPU:0"]
        if getattr(self.kv_creator, "one_table", False):
            self.devices = self.devices[:1]
        self.shard_num = len(self.devices)
        self.partition_fn = partitioner
        self.name = name
        self.shared_name = shared_name or f"shared_name.{name}"
        self.initializer = initializer
        self.trainable = bool(trainable)
        self.checkpoint = bool(checkpoint)
        self.init_size = int(init_size)
        self.bp_v2 = bool(bp_v2)
        self.short_file_name = bool(short_file_name)
        self._trainable_store: dict[str, Any] = {}
        self._restrict_policy: Any = None
        #: The variable of which this one is the status.
        self.status_of: Variable | None = None
        if restrict_policy is not None and not (
            isinstance(restrict_policy, type) and issubclass(restrict_policy, RestrictPolicy)
        ):
            raise TypeError(
                f"Dynamic embedding variable '{name}': restrict_policy must be a subclass of RestrictPolicy (the "
                f"class, not an object), got {restrict_policy!r}."
            )
        check_dtypes(self.key_dtype, self.value_dtype, name)
        #: Whether keys go to tables by the rule that the table engine itself has.
        self._by_modulo = self.shard_num == 1 or partitioner is default_partition_fn
        if self.key_dtype == tf.string and HASHES % self.shard_num:
            self._by_modulo = False
        if self.value_dtype == tf.string:
            values: Any = np.broadcast_to(np.asarray("" if initializer is None else initializer, object), [self.dim])
        else:
            values = initial_values(initializer, name, self.dim, self.value_dtype)
        with tf_ops.init_scope():
            key_names = getattr(self.kv_creator, "key_names", KeyNames)
            self.names = key_names(name, self.checkpoint) if self.key_dtype == tf.string else None
            self._tables = [
                self.kv_creator.create(
                    self.key_dtype,
                    self.value_dtype,
                    values,
                    name if self.shard_num == 1 else f"{name}/part_{i}",
                    self.checkpoint,
                    self.init_size // self.shard_num,
                    self.kv_creator.config,
                    device,
                    **({"part": i, "parts": self.shard_num, "whole": name} if self._by_modulo else {}),
                    **({} if self.names is None else {"names": self.names}),
                )
                for i, device in enumerate(self.devices)
            ]
            for i, table in enumerate(self._tables):
                table.file_name = f"{name.replace('/', '_')}_mht_{i + 1}of{self.shard_num}"
            #: The rows as key-value variables: what lookups and optimizers train.
            self.parts: list[KvVariable] = [table.kv for table in self._tables if table.kv is not None]
            self._one = self.parts[0] if self.parts and self.shard_num == 1 and self.names is None else None
            #: Whether one op looks up in all tables.
            one_place = bool(self.parts) and (self.parts[0]._eager or len({part.device for part in self.parts}) == 1)
            self._many = self._by_modulo and self.names is None and one_place
            #: Whether the rows are in no table of the engine, and so in no checkpoint.
            self.rows_elsewhere = any(getattr(table, "rows_elsewhere", False) for table in self._tables)
            if self.rows_elsewhere:
                self._one, self._many, self.checkpoint = None, False, False
            if self.checkpoint:
                self._be_saved()
            if restrict_policy is not None:
                self._restrict_policy = restrict_policy(self)
            status = None if self._restrict_policy is None else self._restrict_policy.status
            if isinstance(status, trackable.Trackable):
                self._track_trackable(status, getattr(status, "name", "status"), overwrite=True)

    def _be_saved(self) -> None:
        from tfplugin.dynamic_embedding import checkpoint

        if not tf.executing_eagerly():
            # Nobody lists these tables among their variables: a Saver of everything finds them here.
            for saveable in checkpoint.saveables(self):
                tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS, saveable)
        if not self.parts:
            for i, table in enumerate(self._tables):
                self._track_trackable(table, f"part_{i}", overwrite=True)
        elif self._by_modulo and checkpoint.file_system_saver.saver_of(self) is None:
            self._track_trackable(self._whole(), "table", overwrite=True)
        if self.names is not None:
            self._track_trackable(self.names, "names", overwrite=True)

    def _whole(self) -> KvVariable | PartitionedKvVariable:
        """All tables, where the engine's rule shares keys out."""
        return self.parts[0] if self.shard_num == 1 else PartitionedKvVariable(self.name, self.parts)

    # ---- Properties --------------------------------------------------------------------------------------------------

    @property
    def tables(self) -> list[Any]:
        """The tables, one for each device."""
        return self._tables

    @property
    def _kv_parts(self) -> tuple[KvVariable, ...]:
        return tuple(self.parts)

    @property
    def trainable_store(self) -> dict[str, Any]:
        """What lookups have made that optimizers can train, by the name of the lookup."""
        return self._trainable_store

    @property
    def restrict_policy(self) -> Any:
        """The policy that `restrict` goes by, or None."""
        return self._restrict_policy

    def __repr__(self) -> str:
        return (
            f"<dynamic_embedding.Variable '{self.name}' {self.key_dtype.name} -> "
            f"{self.value_dtype.name}[{self.dim}], {self.shard_num} tables>"
        )

    # ---- Arguments ---------------------------------------------------------------------------------------------------

    def keys_tensor(self, keys: Any) -> tf.Tensor:
        """Keys as a Tensor of `key_dtype`, any shape.

        Raises:
          TypeError: a tensor or array of another dtype.
        """
        dtype = getattr(keys, "dtype", None)
        if dtype is None:
            try:
                return tf.convert_to_tensor(keys, self.key_dtype)
            except (TypeError, ValueError) as error:
                raise TypeError(f"{self!r} does not take {keys!r:.80} as keys: {error}") from error
        if tf.as_dtype(dtype) != self.key_dtype:
            raise TypeError(f"{self!r} takes {self.key_dtype.name} keys, got {tf.as_dtype(dtype).name}: cast them.")
        return tf.convert_to_tensor(keys)

    def values_tensor(self, values: Any) -> tf.Tensor:
        """Rows as a Tensor of `value_dtype`, any shape.

        Raises:
          TypeError: a tensor or array of another dtype; an array of floats is rounded to floats.
        """
        dtype = getattr(values, "dtype", None)
        if isinstance(values, np.ndarray) and values.dtype.kind in "OSU":
            dtype = None
        if dtype is None or (isinstance(values, np.ndarray) and values.dtype == float and self.value_dtype.is_floating):
            try:
                return tf.convert_to_tensor(values, self.value_dtype)
            except (TypeError, ValueError) as error:
                raise TypeError(f"{self!r} does not take {values!r:.80} as values: {error}") from error
        if tf.as_dtype(dtype) != self.value_dtype:
            raise TypeError(f"{self!r} takes {self.value_dtype.name} values, got {tf.as_dtype(dtype).name}: cast them.")
        return tf.convert_to_tensor(values)

    def split(self, keys: tf.Tensor, *columns: tf.Tensor) -> list[list[tf.Tensor]]:
        """For each table its keys, its share of each column, and the places of both in the flat batch.

        Args:
          keys: any shape.
          columns: keys.shape + anything, or flat.
        """
        keys = tf.reshape(keys, [-1])
        owner = tf.reshape(tf.cast(self.partition_fn(keys, self.shard_num), tf.int32), [-1])
        places = tf.range(tf.size(keys))
        split = [tf.dynamic_partition(column, owner, self.shard_num) for column in (keys, *columns, places)]
        return [list(part) for part in zip(*split, strict=True)]

    # ---- Reads -------------------------------------------------------------------------------------------------------

    def gather(self, keys: tf.Tensor, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Rows of keys, keys.shape + [dim], initial values where they are missing; and where each lies in its table, -1
        where it is missing.
        """
        if self.shard_num == 1:
            return self._tables[0].gather(keys, name)
        if self._many:
            with tf_ops.device(self.parts[0]._op_device()):
                rows, positions = raw.kv_table_gather_many(
                    [part.handle for part in self.parts],
                    [keys],
                    dtype=self.value_dtype,
                    parts=[self.shard_num],
                    dims=[self.dim],
                    mode="initial",
                    remember=True,
                    name=name,
                )
            return rows[0], positions[0]
        with tf.name_scope(name or "lookup"):
            read = []
            places = []
            for table, (part_keys, part_places) in zip(self._tables, self.split(keys), strict=True):
                read.append(table.gather(part_keys))
                places.append(part_places)
            rows = tf.dynamic_stitch(places, [part_rows for part_rows, _ in read])
            positions = tf.dynamic_stitch(places, [part_positions for _, part_positions in read])
            rows = tf.reshape(rows, tf.concat([tf.shape(keys), [self.dim]], 0))
            rows.set_shape(keys.shape.concatenate([self.dim]))
            return rows, tf.reshape(positions, tf.shape(keys))

    @tf.autograph.experimental.do_not_convert
    def lookup(self, keys: Any, return_exists: bool = False, name: str | None = None) -> Any:
        """Rows of keys; the initial value of those that are missing. Inserts nothing.

        Args:
          keys: any shape, of `key_dtype`.
          return_exists: whether to return also which keys are there.
          name: of the op.

        Returns:
          Rows, keys.shape + [dim]; with `return_exists` also a bool tensor, keys.shape.

        Raises:
          TypeError: keys of another dtype.
        """
        rows, positions = self.gather(self.keys_tensor(keys), name)
        return (rows, positions >= 0) if return_exists else rows

    @tf.autograph.experimental.do_not_convert
    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and their rows [N, dim], table after table, in no particular order."""
        exported = [table.export(name=name) for table in self._tables]
        if len(exported) == 1:
            return exported[0]
        return tf.concat([keys for keys, _ in exported], 0), tf.concat([rows for _, rows in exported], 0)

    @tf.autograph.experimental.do_not_convert
    def export_keys_and_scores(self, split_size: int, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and what eviction goes by, int64 [N], of tables that an `HkvHashTableCreator` made.

        Args:
          split_size: see `HkvHashTable.export_keys_and_scores`.
          name: of the op.

        Raises:
          TypeError: the tables are others.
          ValueError: `split_size` is no number of 1 or more.
        """
        if not all(hasattr(table, "export_keys_and_scores") for table in self._tables):
            raise TypeError(f"{self!r} has no scores: give it kv_creator=HkvHashTableCreator(...).")
        exported = [table.export_keys_and_scores(split_size, name=name) for table in self._tables]
        return tf.concat([keys for keys, _ in exported], 0), tf.concat([scores for _, scores in exported], 0)

    def size(self, index: int | None = None, name: str | None = None) -> tf.Tensor:
        """Number of rows, of all tables or of table `index`: scalar int64."""
        if index is not None:
            return self._tables[index].size(name=name)
        return tf.add_n([table.size() for table in self._tables], name=name)

    # ---- Writes ------------------------------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def upsert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Writes rows, inserting keys that are not there. Of equal keys the last wins.

        Args:
          keys: any shape.
          values: keys.shape + [dim].
          name: of the op.

        Returns:
          The op (graph mode).

        Raises:
          TypeError: keys or values of another dtype.
        """
        keys, values = self.keys_tensor(keys), self.values_tensor(values)
        if len(self._tables) == 1:
            return self._tables[0].insert(keys, values, name=name)
        with tf.name_scope(name or "upsert"):
            rows = tf.reshape(values, [-1, self.dim])
            parts = zip(self._tables, self.split(keys, rows), strict=True)
            return _group([table.insert(part_keys, part_rows) for table, (part_keys, part_rows, _) in parts])

    @tf.autograph.experimental.do_not_convert
    def accum(self, keys: Any, old_values: Any, new_values: Any, exists: Any, name: str | None = None) -> Any:
        """Adds ``new_values - old_values`` to keys that are there, or inserts `new_values` for keys that are not.

        `exists` says which of both was true when the old values were read. Where it does not hold any more, the key is
        left alone.

        Args:
          keys: any shape.
          old_values, new_values: keys.shape + [dim].
          exists: bool, keys.shape.
          name: of the op.

        Returns:
          The op (graph mode).

        Raises:
          TypeError: keys or values of another dtype.
        """
        if self.value_dtype in (tf.string, tf.bool):
            raise TypeError(f"{self!r} has {self.value_dtype.name} values: accum adds numbers.")
        keys = tf.reshape(self.keys_tensor(keys), [-1])
        old_rows = tf.reshape(self.values_tensor(old_values), [-1, self.dim])
        new_rows = tf.reshape(self.values_tensor(new_values), [-1, self.dim])
        exists = tf.reshape(tf.convert_to_tensor(exists, tf.bool), [-1])
        with tf.name_scope(name or "accum"):
            rows = tf.where(exists[:, tf.newaxis], new_rows - old_rows, new_rows)
            if len(self._tables) == 1:
                return self._tables[0].accum(keys, rows, exists)
            return _group(
                [
                    table.accum(part_keys, part_rows, part_exists)
                    for table, (part_keys, part_rows, part_exists, _) in zip(
                        self._tables, self.split(keys, rows, exists), strict=True
                    )
                ]
            )

    @tf.autograph.experimental.do_not_convert
    def remove(self, keys: Any, name: str | None = None) -> Any:
        """Removes keys with their slots. Absent ones are ignored.

        Args:
          keys: any shape.
          name: of the op.

        Returns:
          The op (graph mode).

        Raises:
          TypeError: keys of another dtype.
        """
        keys = self.keys_tensor(keys)
        if len(self._tables) == 1:
            return self._tables[0].remove(keys, name=name)
        with tf.name_scope(name or "remove"):
            parts = zip(self._tables, self.split(keys), strict=True)
            return _group([table.remove(part_keys) for table, (part_keys, _) in parts])

    def clear(self, name: str | None = None) -> Any:
        """Removes all rows. Returns the op (graph mode)."""
        return _group([table.clear(name=name) for table in self._tables])

    def restrict(self, num_reserved: int, **kwargs: Any) -> Any:
        """Removes rows by the rule of `restrict_policy`, from the variable, its slots and the policy's status.

        Args:
          num_reserved: how many rows to keep.
          kwargs: what the policy takes besides, such as ``trigger``.

        Returns:
          What the policy's ``apply_restriction`` returns; None without a policy.
        """
        if self._restrict_policy is None:
            _log.warning("restrict of %r does nothing: it has no restrict_policy.", self)
            return None
        return self._restrict_policy.apply_restriction(num_reserved, **kwargs)

    # ---- Training ----------------------------------------------------------------------------------------------------

    def get_slot_variables(self, optimizer: Any) -> list[Any]:
        """The slots that an optimizer keeps for this variable, each as a variable of its own; none before it trained.

        Raises:
          TypeError: not an optimizer.
        """
        from tfplugin.dynamic_embedding.slot_variable import slot_variables

        core = innermost(getattr(optimizer, "optimizer", optimizer))
        if not isinstance(core, v1_optimizer.Optimizer) and not hasattr(core, "apply_gradients"):
            raise TypeError(f"get_slot_variables wants an optimizer, got {type(optimizer).__name__}.")
        return list(slot_variables(self, core))

    def get_trainable_by_name(self, name: str) -> Any:
        """What an optimizer trains for the lookups of this name. Before the first of them, it waits for it.

        Args:
          name: as it is given to `embedding_lookup`.

        Returns:
          A `ShadowVariable`.

        Raises:
          TypeError: the name is not a string.
          RuntimeError: not in eager mode, nor in a function that eager code calls.

        Example:
          >>> optimizer.minimize(lambda: loss(ids), var_list=[params.get_trainable_by_name("user_embedding")])
        """
        from tfplugin.dynamic_embedding.shadow_ops import shadow_of

        if not isinstance(name, str):
            raise TypeError(f"get_trainable_by_name of {self!r}: the name must be a string, got {name!r}.")
        with tf_ops.init_scope():
            if not tf.executing_eagerly():
                raise RuntimeError(
                    f"get_trainable_by_name of {self!r} is for eager mode. In a graph, take what embedding_lookup "
                    "returns with return_trainable=True, or look into trainable_store."
                )
        return shadow_of(self, name)

    get_eager_trainable_by_name = get_trainable_by_name

    # ---- Checkpoints -------------------------------------------------------------------------------------------------

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        from tfplugin.dynamic_embedding import checkpoint

        return {} if self.rows_elsewhere else checkpoint.saveables_by_name(self)

    def _tfra_files(self) -> str:
        if self.status_of is None:
            return ""
        kind, base = self.name.rpartition("/")[2], re.escape(self.status_of.name.replace("/", "_"))
        return rf"(?:(?:.+_)?status(?:_\d+)?_)?{base}_{kind}"

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        found = super()._lookup_dependency(name, *args, **kwargs)
        status = None if found is not None or self._restrict_policy is None else self._restrict_policy.status
        # TFRA calls it by the name scopes that there were.
        if isinstance(status, Variable) and name != status.name and name.endswith(("/frequency", "/timestamp")):
            return status
        return found

    def _trackable_children(self, save_type: str = trackable.SaveType.CHECKPOINT, **kwargs: Any) -> dict[str, Any]:
        children = dict(super()._trackable_children(save_type, **kwargs))
        if save_type == trackable.SaveType.SAVEDMODEL and "table" not in children:
            # Functions of the model hold the tables, whether they are saved or not. A model has no files beside it.
            if self.checkpoint and self._by_modulo and self.parts:
                children["table"] = self._whole()
            children.update({f"part_{i}": part for i, part in enumerate(self.parts)})
        return children

    def __deepcopy__(self, memo: Any) -> Variable:
        raise NotImplementedError(f"{self!r} cannot be deep-copied: save and restore it instead.")


def _group(ops: Sequence[Any]) -> Any:
    made = [op for op in ops if op is not None]
    return tf.group(*made) if made else None
