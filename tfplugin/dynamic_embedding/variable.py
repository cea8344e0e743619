"""`Variable`: a table from key to embedding row over a list of devices."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.trackable import base as trackable
from tensorflow.python.training import optimizer as v1_optimizer

from tfplugin.dynamic_embedding import checkpoint as saved_variables
from tfplugin.dynamic_embedding import file_system_saver
from tfplugin.dynamic_embedding.creators import CuckooHashTableCreator, EngineTableCreator, KVCreator
from tfplugin.dynamic_embedding.embedding_lookup import embedding_lookup
from tfplugin.dynamic_embedding.partition import default_partition_fn
from tfplugin.dynamic_embedding.restrict_policies import RestrictPolicy
from tfplugin.dynamic_embedding.saves_files import VariableFiles
from tfplugin.dynamic_embedding.shadow_variable import shadow_of
from tfplugin.dynamic_embedding.sharded_table import ShardedTable
from tfplugin.dynamic_embedding.slot_variable import slot_variables
from tfplugin.dynamic_embedding.tfra_names import status_names
from tfplugin.kv_variable import KvVariable
from tfplugin.not_dense import NoArray
from tfplugin.optimizers.inner_optimizer import innermost
from tfplugin.partitioned_kv_variable import PartitionedKvVariable
from tfplugin.placement import name_of, strategy_in_scope
from tfplugin.policies import Admission, EvictionPolicy, Policies, resolve
from tfplugin.row_expiry import evict_rows

_log = logging.getLogger("tfplugin")


class Variable(VariableFiles, ShardedTable, NoArray):
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
      enter_threshold, admission, padding_key: which keys get a row, as for `tfplugin.get_kv_variable`. What counts is
        updates here, as it is these that insert: a key gets its row, and its first update, with the
        `enter_threshold`-th one.
      expiry, expire_every, expire_on_save: which rows go, and when, as for `tfplugin.get_kv_variable`; `KeepTop` is for
        each table.
      policies: all of these as one object.

    Raises:
      TypeError: dtypes that tables do not have; a `restrict_policy` that is no subclass of `RestrictPolicy`.
      ValueError: a `dim` below 1; a `tf.distribute` strategy of several replicas; policies that are out of range, or
        of a table that cannot have them: of strings, or in Redis.

    Example:
      >>> v = de.Variable(dim=2, name="user", initializer=0.5)
      >>> v.upsert(tf.constant([7], tf.int64), tf.constant([[1.0, 2.0]]))
      >>> v.lookup(tf.constant([7, 8], tf.int64)).numpy()
      array([[1. , 2. ],
             [0.5, 0.5]], dtype=float32)
    """

    _all_rows = NoArray._all_rows.replace("sparse_read", "lookup")

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
        *,
        enter_threshold: int = 0,
        admission: Admission | None = None,
        padding_key: int | None = None,
        expiry: EvictionPolicy | Sequence[EvictionPolicy] | None = None,
        expire_every: int = 0,
        expire_on_save: bool = False,
        policies: Policies | None = None,
    ) -> None:
        if (strategy := strategy_in_scope()) is not None:
            raise ValueError(
                f"Dynamic embedding variable '{name}' cannot be made under {name_of(strategy)}, which would keep "
                "copies of it apart. Train on several processes with Horovod (keras.layers.HvdAllToAllEmbedding), or "
                "with sessions on parameter servers (devices=[...])."
            )
        if isinstance(dim, bool) or int(dim) < 1:
            raise ValueError(f"Dynamic embedding variable '{name}': dim must be 1 or more, got {dim!r}.")
        if restrict_policy is not None and not (
            isinstance(restrict_policy, type) and issubclass(restrict_policy, RestrictPolicy)
        ):
            raise TypeError(
                f"Dynamic embedding variable '{name}': restrict_policy must be a subclass of RestrictPolicy (the "
                f"class, not an object), got {restrict_policy!r}."
            )
        kv_creator = kv_creator or CuckooHashTableCreator()
        super().__init__(
            key_dtype,
            value_dtype,
            dim,
            devices,
            partitioner,
            name,
            initializer,
            checkpoint,
            init_size,
            kv_creator,
            table_policies(
                name,
                key_dtype,
                value_dtype,
                kv_creator,
                policies,
                enter_threshold=enter_threshold,
                admission=admission,
                padding_key=padding_key,
                expiry=expiry,
                expire_every=expire_every,
                expire_on_save=expire_on_save,
            ),
        )
        #: Which keys get a row, and which rows go.
        self.policies = self.parts[0].policies if self.parts else Policies()
        self.shared_name = shared_name or f"shared_name.{name}"
        self.trainable = bool(trainable)
        self.bp_v2 = bool(bp_v2)
        self.short_file_name = bool(short_file_name)
        for i, table in enumerate(self.tables):
            table.read_other = functools.partial(saved_variables.read_column, self, i)
            if file_system_saver.saver_of(self) is not None:
                table.saved_beside = functools.partial(saved_variables.saveables, self)
        with tf_ops.init_scope():
            if self.checkpoint:
                self._be_saved()
            if restrict_policy is not None:
                self.restrict_policy = restrict_policy(self)
            status = None if self.restrict_policy is None else self.restrict_policy.status
            if isinstance(status, trackable.Trackable):
                self._track_trackable(status, getattr(status, "name", "status"), overwrite=True)

    def _be_saved(self) -> None:
        if not tf.executing_eagerly():
            # Nobody lists these tables among their variables: a Saver of everything finds them here.
            for saveable in saved_variables.saveables(self):
                tf.compat.v1.add_to_collection(tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS, saveable)
        if not self.parts:
            for i, table in enumerate(self._tables):
                self._track_trackable(table, f"part_{i}", overwrite=True)
        elif self._by_modulo and file_system_saver.saver_of(self) is None:
            self._track_trackable(self._whole(), "table", overwrite=True)
        if self.names is not None:
            self._track_trackable(self.names, "names", overwrite=True)

    def like(self, name: str, value_dtype: tf.DType, dim: int) -> Variable:
        """A variable of the same keys, for what is counted of each: where this one is saved, so is that."""
        creator = self.kv_creator
        return Variable(
            key_dtype=self.key_dtype,
            value_dtype=value_dtype,
            dim=dim,
            devices=self.devices,
            partitioner=self.partition_fn,
            name=name,
            trainable=False,
            checkpoint=self.checkpoint,
            init_size=self.init_size,
            # On the rank that has a row, too.
            kv_creator=creator.for_status()
            if hasattr(creator, "for_status")
            else CuckooHashTableCreator(saver=getattr(creator, "saver", None)),
        )

    def _whole(self) -> KvVariable | PartitionedKvVariable:
        """All tables, where the engine's rule shares keys out."""
        return self.parts[0] if self.shard_num == 1 else PartitionedKvVariable(self.name, self.parts)

    def __repr__(self) -> str:
        return (
            f"<dynamic_embedding.Variable '{self.name}' {self.key_dtype.name} -> "
            f"{self.value_dtype.name}[{self.dim}], {self.shard_num} tables>"
        )

    def restrict(self, num_reserved: int, **kwargs: Any) -> Any:
        """Removes rows by the rule of `restrict_policy`, from the variable, its slots and the policy's status.

        Args:
          num_reserved: how many rows to keep.
          kwargs: what the policy takes besides, such as ``trigger``.

        Returns:
          What the policy's ``apply_restriction`` returns; None without a policy.
        """
        if self.restrict_policy is None:
            _log.warning("restrict of %r does nothing: it has no restrict_policy.", self)
            return None
        return self.restrict_policy.apply_restriction(num_reserved, **kwargs)

    def evict(self, policy: EvictionPolicy) -> tf.Tensor:
        """Removes the rows that a policy names, slots and all, and those that have expired.

        Args:
          policy: one of `tfplugin.policies`' `ExpireAfterSteps`, `ExpireAfterSeconds`, `ExpireBelowNorm`,
            `ExpireBelowFrequency` and `KeepTop`, which keeps the top rows of all tables together.

        Returns:
          How many rows went: scalar int64. In a graph they go when it is run.

        Raises:
          TypeError: `policy` is none of these.
          ValueError: tables of strings, or in Redis, whose rows stay until they are removed.
          tf.errors.FailedPreconditionError: an age in steps of tables that do not count steps, or the other way round.

        Example:
          >>> v = de.Variable(dim=1, name="ad")
          >>> v.upsert([1, 2], [[0.5], [3.0]])
          >>> int(v.evict(tfplugin.policies.KeepTop(1, by="norm")))
          1
        """
        if self.value_dtype == tf.string or self.names is not None or self.rows_elsewhere or not self.parts:
            raise ValueError(
                f"evict of {self!r}: tables of strings, and tables in Redis, expire no rows. Take remove(keys), or "
                "restrict(num_reserved) with a restrict_policy."
            )
        return evict_rows(self._kv_parts, policy, f"dynamic embedding variable '{self.name}'")

    # ---- Lookups for training ----------------------------------------------------------------------------------------

    def embedding_lookup(self, ids: Any, name: str | None = None, max_norm: Any = None) -> Any:
        """Rows of ids, and what an optimizer trains: as of `embedding_lookup` under ``<name>/embedding_lookup``."""
        inner = None if name is None else f"{name}/embedding_lookup"
        return embedding_lookup(self, ids, name=inner, max_norm=max_norm, return_trainable=True)

    # ---- Training ----------------------------------------------------------------------------------------------------

    def get_slot_variables(self, optimizer: Any) -> list[Any]:
        """The slots that an optimizer keeps for this variable, each as a variable of its own; none before it trained.

        Raises:
          TypeError: not an optimizer.
        """
        core = innermost(getattr(optimizer, "optimizer", optimizer))
        if not isinstance(core, v1_optimizer.Optimizer) and not hasattr(core, "apply_gradients"):
            raise TypeError(f"get_slot_variables wants an optimizer, got {type(optimizer).__name__}.")
        return list(slot_variables(self, core))

    def get_trainable_by_name(self, name: str) -> Any:
        """What an optimizer trains for the lookups of this name. Before the first of them, it waits for it.

        Args:
          name: as it is given to `embedding_lookup`. Of an `embedding_lookup_sparse` of name x it is
            ``x/embedding_lookup``, of a `safe_embedding_lookup_sparse` ``x/embedding_lookup_sparse/embedding_lookup``.
            A step of an optimizer in which there has still been no lookup of that name is an error.

        Returns:
          A `ShadowVariable`.

        Raises:
          TypeError: the name is not a string.
          RuntimeError: not in eager mode, nor in a function that eager code calls.

        Example:
          >>> optimizer.minimize(lambda: loss(ids), var_list=[params.get_trainable_by_name("user_embedding")])
        """
        if not isinstance(name, str):
            raise TypeError(f"get_trainable_by_name of {self!r}: the name must be a string, got {name!r}.")
        with tf_ops.init_scope():
            if not tf.executing_eagerly():
                raise RuntimeError(
                    f"get_trainable_by_name of {self!r} is for eager mode. In a graph, take what embedding_lookup "
                    "returns with return_trainable=True, or look into trainable_store."
                )
        return shadow_of(self, name, awaited=True)

    get_eager_trainable_by_name = get_trainable_by_name

    # ---- Checkpoints -------------------------------------------------------------------------------------------------

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return {} if self.rows_elsewhere else saved_variables.saveables_by_name(self)

    def _tfra_files(self) -> str:
        return "" if self.status_of is None else status_names(self.name)

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        found = super()._lookup_dependency(name, *args, **kwargs)
        status = None if found is not None or self.restrict_policy is None else self.restrict_policy.status
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


def table_policies(
    name: str,
    key_dtype: Any,
    value_dtype: Any,
    kv_creator: Any,
    policies: Policies | None = None,
    **asked_for: Any,
) -> Policies | None:
    """The policies of a variable's tables, where updates count; None where there are none. `asked_for`: what `resolve`
    takes.

    Raises:
      ValueError: policies that are out of range, or that such tables cannot have.
    """
    key_dtype = tf.as_dtype(key_dtype)
    if policies is None:
        asked = resolve(name, tf.int64 if key_dtype == tf.string else key_dtype, **asked_for)
        policies = dataclasses.replace(asked, admits_on="update" if asked.admission else "lookup")
    if policies == Policies():
        return None
    what = f"Dynamic embedding variable '{name}'"
    if tf.string in (key_dtype, tf.as_dtype(value_dtype)):
        raise ValueError(f"{what}: tables of strings have no policies: hash the keys (tf.strings.to_hash_bucket_fast).")
    if not isinstance(kv_creator, EngineTableCreator):
        raise ValueError(
            f"{what}: the tables of a {type(kv_creator).__name__} admit every key and expire none: leave "
            "enter_threshold, admission, padding_key and expiry out, or take a CuckooHashTableCreator."
        )
    if policies.admission is not None and policies.admission.below != "initial":
        raise ValueError(
            f"{what}: lookups give initial values for keys that have no row: below must be 'initial', got "
            f"{policies.admission.below!r}."
        )
    return policies
