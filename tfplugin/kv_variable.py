"""The key-value variable: an embedding table that grows a row for each key it meets."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import variable_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import gen_resource_variable_ops
from tensorflow.python.trackable import base as trackable
from tensorflow.python.util import dispatch, object_identity

from tfplugin import (
    async_save,
    float32_lookups,
    initializers,
    placement,
    saveable,
    slot_binding,
    step_record,
    table_handle,
    training_mode,
)
from tfplugin.eviction import checked_capacity, microseconds, scores_tensor
from tfplugin.initializers import KvInitializer
from tfplugin.keys import keys_to_tensor
from tfplugin.not_dense import NotDense
from tfplugin.ops import raw
from tfplugin.own_keys import own_keys
from tfplugin.placement import on_device_of
from tfplugin.policies import Policies
from tfplugin.row_counts import RowCounts
from tfplugin.row_expiry import RowExpiry
from tfplugin.row_slots import RowSlots
from tfplugin.scatter import Scatter
from tfplugin.slots import SlotSpec, slots_json
from tfplugin.spilling import checked_spill, naming_the_way_out

VALUE_DTYPES = (tf.float32, tf.float16, tf.bfloat16, tf.float64)


@dispatch.register_dispatchable_type
class KvVariable(RowCounts, RowExpiry, Scatter, NotDense, trackable.Trackable):
    """One embedding table, or one part of a partitioned one: key -> row of ``dim`` values.

    Made by `get_kv_variable`. Works wherever TensorFlow takes a resource variable: ``tf.nn.embedding_lookup`` and its
    sparse forms, ``tf.gather``, gradients, optimizers, ``tf.compat.v1.train.Saver``, ``tf.train.Checkpoint`` and
    SavedModel.

    Attributes:
      name: ``scope/name:0``.
      key_dtype: tf.int64, tf.int32 or tf.uint64.
      dtype: tf.float32, tf.float16, tf.bfloat16 or tf.float64.
      dim: width of a row.
      shape: [None, dim].
      part, parts: which part of how many this is; (0, 1) when not partitioned.
      parts_beside: how many of these are on its device: they share out the locks that one table would have.
      max_capacity: the most rows that a batch leaves behind; 0: any number.
      eviction: which rows go first: ``"lru"``, ``"lfu"``, ``"custom"``, ``"epoch_lru"`` or ``"epoch_lfu"``.
      max_hbm: bytes of a GPU's memory that rows may take; None: no bound.
      max_memory: bytes of memory that rows may take, the others being in a file in the folder `spill`; None: no bound.
      spill: that folder.
      policies: which keys get a row, and which rows go; see `tfplugin.policies`.
      trainable, regularizer, constraint: as for ``tf.Variable``; the two functions see the rows of a batch.

    Example:
      >>> v = tfplugin.get_kv_variable("user", embedding_dim=8)
      >>> rows = tf.nn.embedding_lookup(v, [3, -1, 3])     # [3, 8]
      >>> int(v.size())
      2
    """

    _should_act_as_resource_variable = True
    # Optimizers reach for the graph element of a variable in graph mode; a table has none, its handle is the target.
    _in_graph_mode = False
    #: Those that there are, of eager mode and of all graphs.
    living: ClassVar[weakref.WeakSet[KvVariable]] = weakref.WeakSet()
    #: Processes that each have an object like this one for a part of one table; see `tfplugin.sok`.
    ranks = 1
    #: The rank that holds it all; None where the ranks share the keys, or where there is one.
    owner: int | None = None
    #: False in a process whose part is empty because another one has all keys.
    holds_rows = True
    #: Whether the optimizer of a model of Keras trains it where a layer holds it; see `keras_training`.
    _trained_by_keras = True
    #: For who looks it up where no optimizer updates it.
    _how_to_train = (
        "Make it an attribute of a layer of the model, and it is; or have its lookups update it in the backward pass, "
        "by tfplugin.apply_in_backward(table, optimizer) before the first step; or give the model a train_step that "
        "hands the gradients of model.trainable_weights and of the table to "
        "tfplugin.OptimizerWrapper(optimizer).apply_gradients. If it is not to be trained: trainable=False."
    )

    def __init__(
        self,
        name: str,
        embedding_dim: int,
        key_dtype: Any = tf.int64,
        value_dtype: Any = tf.float32,
        initializer: KvInitializer | None = None,
        *,
        regularizer: Any = None,
        trainable: bool = True,
        constraint: Any = None,
        capacity_hint: int = 0,
        max_capacity: int = 0,
        eviction: str = "lru",
        max_hbm: int | None = None,
        max_memory: int | None = None,
        spill: str | os.PathLike[str] | None = None,
        policies: Policies | None = None,
        part: int = 0,
        parts: int = 1,
        parts_beside: int = 1,
        partitioned_name: str | None = None,
        read_only: bool = False,
        starts_initialized: bool = False,
    ) -> None:
        placement.refuse_copies(name)
        self._name = name
        self.key_dtype = tf.as_dtype(key_dtype)
        self.dtype = tf.as_dtype(value_dtype)
        self.dim = int(embedding_dim)
        self.trainable = trainable
        self.regularizer = regularizer
        self.constraint = constraint
        self.capacity_hint = int(capacity_hint)
        self.max_capacity = checked_capacity(max_capacity, eviction, name)
        self.eviction = eviction
        if max_hbm is not None and max_hbm < 0:
            raise ValueError(f"Key-value variable '{name}': max_hbm must be 0 or more bytes, got {max_hbm}.")
        self.max_hbm = max_hbm
        self.max_memory, self.spill = checked_spill(max_memory, spill, f"Key-value variable '{name}'")
        self.policies = policies or Policies()
        self.part = part
        self.parts = parts
        self.parts_beside = parts_beside
        #: The name of the whole variable, of which this may be a part.
        self.partitioned_name = partitioned_name
        #: What the parts of a table have in common.
        self._table = object()
        #: Whether there have been lookups, pooled or regularized ones, whose gradients are summed over ids; optimizers
        #: of Keras then clip the gradient of each row as a whole.
        self._clipped_whole = False
        self.kv_initializer = initializer or initializers.default(self.dtype)
        self._read_only = read_only
        #: In a graph: whether the table is there, empty, in every session, so that nobody has to run `initializer`.
        self._starts_initialized = starts_initialized

        with tf_ops.init_scope():
            self._eager = context.executing_eagerly()
            self._row_slots = RowSlots(self._eager)
            #: Prefixes of the slots of optimizers that have taken steps, for the log.
            self._optimizers_seen: list[str] = []
            #: The update that the gradient of a lookup makes at once; see `apply_in_backward`.
            self._in_backward: Any = None
            #: The optimizer that its layer in a model of Keras was given, which updates it in the place of the model's.
            self._optimizer_of_layer: Any = None
            self._graph_key = tf_ops.get_default_graph()._graph_key
            if self._eager:
                # The scope's device. Where it names none TensorFlow takes a GPU if there is one; a table stays with the
                # CPU, which has the memory, unless it is told to go there.
                device = placement.table_device(context.context().device_name)
                with tf.device("CPU:0"), tf.device(device) if device else contextlib.nullcontext():
                    self._handle = self._make_handle(anonymous=True)
                table_handle.describe(self._handle, self.dim, self.dtype)
                #: The process that has the rows, as TensorFlow names it.
                self._task = placement.task_of(self._handle.device)
                self._unique_id = f"{name}_{tf_ops.uid()}"
                self._shared_name = self._unique_id
                self.initialize()
                self._initializer_op = None
            else:
                with tf.name_scope(""):
                    rows = self.capacity_hint or -(-placement.NOMINAL_ROWS // parts)
                    with placement.like_a_variable(name, self.dtype, rows, self.dim) as probe:
                        self._handle = self._make_handle(anonymous=False)
                        # Never run. A MetaGraph's import wants a ReadVariableOp for each variable in it.
                        self._snapshot = gen_resource_variable_ops.read_variable_op(
                            probe, self.dtype, name=f"{self._handle.op.name}/Read/ReadVariableOp"
                        )
                    self._unique_id = self._handle.op.name
                    self._shared_name = self._handle.op.name
                    with (
                        tf.name_scope(self._handle.op.name + "/"),
                        tf_ops.colocate_with(None, ignore_existing=True),
                        tf_ops.device(self._handle.device),
                    ):
                        self._initializer_op = self.initialize()
        self.living.add(self)

    # ---- Making ----------------------------------------------------------------------------------------------------

    def _make_handle(self, *, anonymous: bool) -> tf.Tensor:
        return raw.kv_table_handle(
            anonymous=anonymous,
            variable=self._name,
            key_dtype=self.key_dtype,
            dtype=self.dtype,
            shape=[None, self.dim],
            dim=self.dim,
            capacity_hint=self.capacity_hint,
            # What serves a model never inserts, and so never evicts.
            max_capacity=0 if self._read_only else self.max_capacity,
            eviction=self.eviction,
            max_hbm=-1 if self.max_hbm is None else self.max_hbm,
            # A model's folder may not be there where it is served.
            max_memory=0 if self._read_only else self.max_memory or 0,
            spill="" if self._read_only else self.spill or "",
            parts_beside=self.parts_beside,
            policies=self.policies.to_json(),
            read_only=self._read_only,
            initial=self.kv_initializer.to_json() if self._starts_initialized and not anonymous else "",
            initial_rows=self.kv_initializer.known_rows if self._starts_initialized and not anonymous else b"",
            name=self._name,
        )

    def initialize(self) -> tf.Operation | None:
        """(Re)starts the table empty. Runs at once in eager mode; gives the op in a graph."""
        init = self.kv_initializer
        rows = init.rows() if init.rows is not None else tf.constant(np.zeros([0, self.dim], self.dtype.as_numpy_dtype))
        return raw.kv_table_initialize(self._handle, rows, initializer=init.to_json())

    # ---- What TensorFlow asks of a variable -------------------------------------------------------------------------

    @property
    def handle(self) -> tf.Tensor:
        """The resource tensor of the table."""
        return self._handle

    @property
    def name(self) -> str:
        """``scope/name:0``."""
        return f"{self._shared_name if not self._eager else self._name}:0"

    @property
    def op(self) -> tf.Operation:
        """The handle's op (graph mode)."""
        return self._handle.op  # an AttributeError in eager mode, which `NotDense` explains

    @property
    def graph(self) -> tf.Graph:
        """The graph that holds the table."""
        return self._handle.graph

    @property
    def device(self) -> str:
        """Where the table lives."""
        self._check_asks_for_device(sys._getframe(1))
        return self._handle.device

    @property
    def initializer(self) -> tf.Operation | None:
        """The op that starts the table empty (graph mode)."""
        return self._initializer_op

    @property
    def shape(self) -> tf.TensorShape:
        """[None, dim]."""
        return tf.TensorShape([None, self.dim])

    def get_shape(self) -> tf.TensorShape:
        """[None, dim]."""
        return self.shape

    @property
    def _kv_parts(self) -> tuple[KvVariable, ...]:
        """The tables that make it up: itself."""
        return (self,)

    @property
    def synchronization(self) -> tf.VariableSynchronization:
        """As a plain variable has it."""
        return tf.VariableSynchronization.AUTO

    @property
    def aggregation(self) -> tf.VariableAggregation:
        """As a plain variable has it."""
        return tf.VariableAggregation.NONE

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """Scalar bool: whether the table has been initialized or restored."""
        return raw.kv_table_is_initialized(self._handle, name=name)

    def to_proto(self, export_scope: str | None = None) -> variable_pb2.VariableDef | None:
        """For MetaGraphs: without it TensorFlow drops the whole collection of variables."""
        if self._eager:
            raise RuntimeError("to_proto is for graph mode.")
        if export_scope is not None and not self._handle.name.startswith(export_scope):
            return None
        proto = variable_pb2.VariableDef()
        proto.variable_name = tf_ops.strip_name_scope(self._handle.name, export_scope)
        proto.initial_value_name = proto.variable_name
        proto.initializer_name = tf_ops.strip_name_scope(self._initializer_op.name, export_scope)
        proto.snapshot_name = tf_ops.strip_name_scope(self._snapshot.name, export_scope)
        proto.is_resource = True
        proto.trainable = self.trainable
        return proto

    def _as_graph_element(self) -> tf.Tensor:
        return self._handle

    def ref(self) -> object_identity.Reference:
        """A hashable reference, as ``tf.Variable.ref`` gives it."""
        return object_identity.Reference(self)

    def __repr__(self) -> str:
        return f"<tfplugin.KvVariable '{self.name}' {self.key_dtype.name} -> {self.dtype.name}[{self.dim}]" + (
            f", part {self.part} of {self.parts}>" if self.parts > 1 else ">"
        )

    # ---- Keys ------------------------------------------------------------------------------------------------------

    def keys_tensor(self, keys: Any) -> tf.Tensor:
        """Keys as a Tensor of `key_dtype`, any shape.

        Raises:
          TypeError: keys of a dtype that does not fit: floats, strings, or wider integers than the table's.
        """
        return keys_to_tensor(keys, self.key_dtype, self._name)

    # ---- Lookups ---------------------------------------------------------------------------------------------------

    @tf.autograph.experimental.do_not_convert
    def sparse_read(
        self,
        indices: Any,
        name: str | None = None,
        *,
        training: bool | None = None,
        missing: str = "zeros",
        admission: float = 1.0,
        output_dtype: Any = None,
    ) -> tf.Tensor:
        """Rows of keys.

        Args:
          indices: keys, any shape. Duplicates are fine.
          name: of the op.
          training: True inserts missing keys with their initial value, False inserts nothing. Default: True unless
            inside `inference_mode` or a SavedModel signature.
          missing: what inference gives for a missing key: ``"zeros"`` or ``"initial"`` (its initial value).
          admission: the probability that training inserts a missing key, drawn once for each lookup and key: the more
            often a key comes, the sooner it is in. A key that is not admitted gives zeros and gets no gradient.
          output_dtype: of the rows; default: that of the variable. tf.float32 has rows of float16 and bfloat16 widened
            as they are read, as ``tf.cast`` of them would; their gradient is of float32 then, too, and reaches the
            optimizer's sums without having been rounded to 16 bits. Not of a variable on a GPU.

        Returns:
          Tensor of shape indices.shape + [dim].

        Raises:
          TypeError: keys of a dtype that does not fit.
          ValueError: `missing` or `admission` out of range; an `output_dtype` that the variable cannot give.
          tf.errors.FailedPreconditionError: the variable is not initialized.

        Example:
          >>> v = tfplugin.get_kv_variable("user", embedding_dim=8, value_dtype=tf.float16)
          >>> v.sparse_read([3, -1], output_dtype=tf.float32).dtype
          tf.float32
        """
        if missing not in ("zeros", "initial"):
            raise ValueError(f"sparse_read of '{self._name}': missing must be 'zeros' or 'initial', got {missing!r}")
        train = training_mode.is_training(training)
        keys = keys_to_tensor(indices, self.key_dtype, self._name)
        output_dtype = checked_output_dtype(output_dtype, [self], self._name)
        float32_lookups.note([self], output_dtype)
        step_record.note_lookup(self, train)
        with on_device_of(self):
            rows, _ = raw.kv_table_gather(
                self._handle,
                keys,
                dtype=output_dtype,
                dim=self.dim,
                mode="train" if train else missing,
                remember=train and self.trainable,
                in_backward=self._backward_token,
                name=name,
                **admission_attr(admission, self._name),
            )
        self._regularize(rows, train)
        return rows

    def _regularize(self, rows: tf.Tensor, train: bool) -> None:
        if train and self.regularizer is not None and not context.executing_eagerly():
            tf_ops.add_to_collection(tf.compat.v1.GraphKeys.REGULARIZATION_LOSSES, self.regularizer(rows))

    gather = sparse_read

    def sparse_read_and_evict(
        self, keys: Any, name: str | None = None, *, training: bool | None = None, admission: float = 1.0
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Rows of keys, as `sparse_read` gives them, and what this batch evicts from a table with a `max_capacity`.

        Args:
          keys, name, training, admission: as for `sparse_read`.

        Returns:
          Rows, keys.shape + [dim], with a gradient; the evicted keys [E], the first to go first; their rows [E, dim].

        Example:
          >>> v = tfplugin.get_kv_variable("recent", embedding_dim=4, max_capacity=2)
          >>> _ = v.sparse_read([1, 2])
          >>> rows, evicted_keys, evicted_rows = v.sparse_read_and_evict([3])
          >>> evicted_keys.numpy()
          array([1])
        """
        keys = keys_to_tensor(keys, self.key_dtype, self._name)
        if not training_mode.is_training(training):
            rows = self.sparse_read(keys, name, training=False)
            return rows, tf.zeros([0], self.key_dtype), tf.constant(np.zeros([0, self.dim], self.dtype.as_numpy_dtype))
        step_record.note_lookup(self, True)
        with on_device_of(self):
            rows, _, evicted_keys, evicted_rows = raw.kv_table_gather_evict(
                self._handle,
                keys,
                dtype=self.dtype,
                dim=self.dim,
                remember=self.trainable,
                in_backward=self._backward_token,
                name=name,
                **admission_attr(admission, self._name),
            )
        self._regularize(rows, True)
        return rows, evicted_keys, evicted_rows

    @property
    def _backward_token(self) -> str:
        return self._in_backward.token if self._in_backward is not None else ""

    def _op_device(self) -> str | None:
        device: str = self._handle.device
        return None if self._eager and "GPU" not in device else device

    def contains(self, keys: Any, name: str | None = None) -> tf.Tensor:
        """Whether each key is there: bool, shape of keys."""
        return raw.kv_table_contains(self._handle, self.keys_tensor(keys), name=name)

    def stamps(self, keys: Any, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Frequency (updates so far) and version (Unix time of the last write) of keys: uint32, shape of keys.

        With `ExpireAfterSteps` the version is the step of the last write.
        """
        freqs, versions = raw.kv_table_stamps(self._handle, self.keys_tensor(keys), name=name)
        return freqs, versions

    def zeroed(self, keys: Any, name: str | None = None) -> tf.Tensor:
        """Whether an optimizer's group penalty has zeroed the row of each key: bool, shape of keys."""
        return raw.kv_table_zeroed(self._handle, self.keys_tensor(keys), name=name)

    def zeroed_rows(self, name: str | None = None) -> tf.Tensor:
        """How many rows a group penalty has zeroed: scalar int64. A clipped export leaves them out."""
        return raw.kv_table_update_counts(self._handle, name=name).zeroed_rows

    def skipped_updates(self, name: str | None = None) -> tf.Tensor:
        """How many row updates ``skip_nonfinite`` has left out since the table was initialized: scalar int64."""
        return raw.kv_table_update_counts(self._handle, name=name).skipped_updates

    def evicted_rows(self, name: str | None = None) -> tf.Tensor:
        """How many rows were evicted since the table was initialized, to keep its ``max_capacity``: scalar int64."""
        return raw.kv_table_update_counts(self._handle, name=name).evicted_rows

    def expired_rows(self, name: str | None = None) -> tf.Tensor:
        """How many rows have gone by policies of expiry since the table was initialized: scalar int64."""
        return raw.kv_table_update_counts(self._handle, name=name).expired_rows

    def size(self, name: str | None = None) -> tf.Tensor:
        """Number of rows: scalar int64."""
        return raw.kv_table_size(self._handle, name=name)

    def memory(self, name: str | None = None) -> tf.Tensor:
        """[rows, row bytes, index bytes, column bytes, slack bytes, rows in the file, bytes of the file]: int64.

        The last two are of a variable with a `max_memory`, whose row bytes are those in memory.
        """
        return raw.kv_table_memory(self._handle, name=name)

    # ---- Writes ----------------------------------------------------------------------------------------------------

    def upsert(self, keys: Any, rows: Any, name: str | None = None) -> tf.Operation | None:
        """Writes rows, inserting keys that are not there. Of equal keys the last wins.

        Args:
          keys: any shape.
          rows: keys.shape + [dim].
          name: of the op.

        Raises:
          tf.errors.InvalidArgumentError: rows of another shape; a key that belongs to another part of the variable
            that this is a part of.
        """
        return self._upsert(own_keys(self, self.keys_tensor(keys), "upsert"), rows, name)

    def _upsert(self, keys: tf.Tensor, rows: Any, name: str | None = None) -> tf.Operation | None:
        placement.refuse_repeated_write(self.name)
        return raw.kv_table_upsert(self._handle, keys, tf.convert_to_tensor(rows, self.dtype), name=name)

    def accumulate(self, keys: Any, deltas: Any, name: str | None = None) -> tf.Operation | None:
        """Adds to rows, once for each occurrence of a key; a missing key starts from its initial value.

        Raises:
          tf.errors.InvalidArgumentError: as for `upsert`.
        """
        return self._accumulate(own_keys(self, self.keys_tensor(keys), "accumulate"), deltas, name)

    def _accumulate(self, keys: tf.Tensor, deltas: Any, name: str | None = None) -> tf.Operation | None:
        placement.refuse_repeated_write(self.name)
        return raw.kv_table_accumulate(self._handle, keys, tf.convert_to_tensor(deltas, self.dtype), name=name)

    def remove(self, keys: Any, name: str | None = None) -> tf.Tensor:
        """Removes keys with their slots; absent ones are ignored. Returns how many were there: scalar int64."""
        return raw.kv_table_remove(self._handle, self.keys_tensor(keys), name=name)

    def clear(self, name: str | None = None) -> tf.Operation | None:
        """Removes all rows."""
        return raw.kv_table_clear(self._handle, name=name)

    def export(self, slot: str | None = None, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and their rows [N, dim]; with `slot` (``"Adam.m"``) that slot's rows. In no particular order."""
        keys, rows, _, _ = raw.kv_table_export(
            self._handle,
            Tkeys=self.key_dtype,
            dtype=self.dtype,
            column=slot or "",
            width=self.slot_width(slot) if slot else self.dim,
            name=name,
        )
        return keys, rows

    def export_since(self, unix_time: Any, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Keys [N] and rows [N, dim] touched at `unix_time` (seconds since 1970, scalar) or later, in no order.

        A table that evicts by ``"lru"`` knows the microsecond in which training last looked a row up or changed it, one
        that does by ``"lfu"`` the second; other tables the second in which it was last written (inserted or updated):
        rows of the second that `unix_time` is in are among the result.
        """
        return raw.kv_table_export_since(
            self._handle,
            microseconds(unix_time, self._name),
            Tkeys=self.key_dtype,
            dtype=self.dtype,
            dim=self.dim,
            name=name,
        )

    def set_scores(self, keys: Any, scores: Any, name: str | None = None) -> tf.Tensor:
        """Sets what ``"custom"`` eviction goes by: the row of the lowest score goes first. A new row has 0.

        Args:
          keys: any shape. Those that are not there are ignored; of equal ones the last wins.
          scores: keys.shape, integers of 0 or more (below 2**64).
          name: of the op.

        Returns:
          How many of the keys are there: scalar int64.

        Raises:
          tf.errors.FailedPreconditionError: the variable is not bounded, or makes its scores itself.
          tf.errors.InvalidArgumentError: a negative score, or not one for each key.
        """
        return raw.kv_table_set_scores(self._handle, self.keys_tensor(keys), scores_tensor(scores), name=name)

    # ---- Slots -----------------------------------------------------------------------------------------------------

    def slots(self) -> tf.Tensor:
        """The slots that rows have now, as JSON: scalar string."""
        return raw.kv_table_slots(self._handle)

    def slot_names(self) -> set[str]:
        """The names of the slots that rows have now (eager mode)."""
        return {slot["name"] for slot in json.loads(self.slots().numpy())}

    def reset_slots(self, name: str | None = None) -> tf.Operation | None:
        """Takes out what optimizers keep in the rows: the next step of each starts its moments and accumulators anew.

        What ``tf.compat.v1.variables_initializer(optimizer.variables())``, or zeros for `optimizer.variables`, is for
        dense variables. Values, frequencies, versions and the order of evictions stay.

        Returns:
          The op (graph mode).

        Example:
          >>> table = tf.get_kv_variable("ad", embedding_dim=4)
          >>> ...  # training
          >>> table.reset_slots()
        """
        return raw.kv_table_drop_slots(self._handle, name=name)

    def slot_width(self, slot: str) -> int:
        """Elements of a slot: `dim` unless its optimizer said otherwise."""
        return self._row_slots.width(slot) or self.dim

    def slot_prefix(self, optimizer: Any, name: str) -> str:
        """The name under which an optimizer's slots are kept, unique among the live optimizers of this variable."""
        return slot_binding.prefix_of(self, optimizer, name)

    def slots_of(self, optimizer: Any) -> tuple[SlotSpec, ...] | None:
        """The slots that an optimizer keeps in the rows; None of one that keeps none, or has not said so yet."""
        return slot_binding.current(self, optimizer)

    def attach_slots(self, optimizer: Any, specs: Sequence[SlotSpec]) -> None:
        """Notes what an optimizer keeps beside each row. The table itself is changed by the next `read_rows`."""
        self._row_slots.of[optimizer] = tuple(specs)
        self._row_slots.update(slot_binding.unclaimed(self, optimizer, specs))

    def read_rows(self, keys: tf.Tensor, optimizer: Any, specs: Sequence[SlotSpec]) -> list[tf.Tensor]:
        """Values and slots of keys [n], for an optimizer's step: [n, dim] and [n, width] for each of `specs`.

        Gives the rows the slots that they lack. Slots of optimizers that are gone are dropped from the table.
        """
        self.attach_slots(optimizer, specs)
        columns = raw.kv_table_read_rows(
            self._handle,
            keys,
            dtype=self.dtype,
            slots=slots_json(specs),
            **self._row_slots.attributes(),
            widths=[self.dim, *(spec.width for spec in specs)],
            N=1 + len(specs),
        )
        self._note_step(columns[0].op if not context.executing_eagerly() else None)
        return columns

    def _note_step(self, op: tf.Operation | None) -> None:
        """Tells the slots of an op of the table's graph."""
        if not self._eager and op is not None and op.graph is self._handle.graph:
            self._row_slots.note_step(op)

    def write_rows(
        self, keys: tf.Tensor, columns: Sequence[tf.Tensor], specs: Sequence[SlotSpec], *, rewrites: bool = False
    ) -> Any:
        """Writes what `read_rows` read, and counts an update for each key. Returns the op (graph mode).

        With `rewrites` it counts none, and leaves keys without a row out: what goes by uses of rows goes on as before.
        """
        return raw.kv_table_write_rows(self._handle, keys, list(columns), slots=slots_json(specs), rewrites=rewrites)

    def apply_update(
        self,
        keys: tf.Tensor,
        gradients: tf.Tensor,
        optimizer: Any,
        specs: Sequence[SlotSpec],
        rule: str,
        names: Sequence[str],
        hyperparameters: Sequence[tf.Tensor],
        *,
        positions: tf.Tensor | None = None,
        places: tf.Tensor | None = None,
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
    ) -> tf.Operation | None:
        """One training step in one op: each key's row, value and slots, moves once by the sum of its gradients.

        Args:
          keys: [n], any order, duplicates included. Those that are not there are inserted.
          gradients: [n, dim], of the variable's dtype; float32 for rows of 16 bits, too: see `takes_float32`.
          optimizer: whose slots these are.
          specs: the slots of the rule, in its order.
          rule: the table engine's name for the update.
          names, hyperparameters: the elements of the tensors, one after the other, have these names.
          positions: [n], what the lookup of these keys remembered.
          places: [n], which of more gradients are those of the keys. Not on a GPU.
          skip_nonfinite: leave rows alone whose gradient has a NaN or an infinity, and count them.
          stochastic_rounding: of 16-bit rows.

        Returns:
          The op (graph mode).
        """
        self.attach_slots(optimizer, specs)
        with tf_ops.colocate_with(None, ignore_existing=True), tf_ops.device(self._op_device()):
            op = raw.kv_table_apply(
                self._handle,
                keys,
                tf.constant([], tf.int64) if positions is None else positions,
                gradients,
                list(hyperparameters),
                [] if places is None else [places],
                optimizer=rule,
                names=list(names),
                slots=slots_json(specs),
                **self._row_slots.attributes(),
                skip_nonfinite=skip_nonfinite,
                stochastic_rounding=stochastic_rounding,
            )
        self._note_step(op)
        return op

    # ---- SavedModel ------------------------------------------------------------------------------------------------

    def _export_to_saved_model_graph(
        self, object_map: Any, tensor_map: Any, options: Any = None, **kwargs: Any
    ) -> list[tf.Tensor]:
        # A server that runs the graph without Python gets a table that lookups never grow.
        copy = KvVariable(
            self._name,
            self.dim,
            self.key_dtype,
            self.dtype,
            KvInitializer("constant") if self.kv_initializer.rows is not None else self.kv_initializer,
            trainable=self.trainable,
            max_capacity=self.max_capacity,
            eviction=self.eviction,
            policies=self.policies,
            part=self.part,
            parts=self.parts,
            partitioned_name=self.partitioned_name,
            read_only=True,
        )
        object_map[self] = copy
        # Functions of the model capture our handle, the saver's functions the copy's.
        tensor_map[self._handle] = copy.handle
        tensor_map[copy.handle] = copy.handle
        return [self._handle]

    def _write_object_proto(self, proto: Any, options: Any) -> None:
        # An empty user object; the registered class makes it again from `_serialize_to_proto`.
        proto.user_object.identifier = "tfplugin.KvVariable"

    def describe(self) -> str:
        """What must be the same on all ranks."""
        mode = "distributed" if self.owner is None else f"localized:{self.owner}"
        return f"'{self.name}' (dynamic, {self.key_dtype.name} -> {self.dtype.name}[{self.dim}], {mode})"

    def config_json(self) -> str:
        """What it takes to make this variable again."""
        return json.dumps(
            {
                "name": self._name,
                "dim": self.dim,
                "key_dtype": self.key_dtype.name,
                "value_dtype": self.dtype.name,
                "part": self.part,
                "parts": self.parts,
                "partitioned_name": self.partitioned_name,
                "trainable": self.trainable,
                "max_capacity": self.max_capacity,
                "eviction": self.eviction,
                "policies": self.policies.to_json(),
            }
        )

    # What a v1 Saver asks for. Checkpoints of objects ask `checkpoint`.

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        own = self._name if self._eager else self._shared_name
        return {trackable.VARIABLE_VALUE_KEY: lambda name=None, **kwargs: saveable.KvSaveable(self, name or own)}

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        """For asynchronous checkpoints."""
        async_save.take(self, object_map)

    def __deepcopy__(self, memo: Any) -> KvVariable:
        """A variable of its own with the same rows and slots; what `apply_in_backward` has it do stays behind.

        Raises:
          NotImplementedError: a variable of a graph, whose rows are in a session; or of several ranks.
        """
        if not self._eager or not tf.executing_eagerly() or type(self) is not KvVariable:
            raise NotImplementedError(
                f"Key-value variable '{self.name}' cannot be deep-copied, as it is one of a graph or of several ranks: "
                "save and restore it instead."
            )
        what = f"Copying key-value variable '{self.name}'"
        with naming_the_way_out(what), tf.device(self._handle.device):
            copied = KvVariable(
                self._name,
                self.dim,
                self.key_dtype,
                self.dtype,
                self.kv_initializer,
                regularizer=self.regularizer,
                trainable=self.trainable,
                constraint=self.constraint,
                capacity_hint=self.capacity_hint,
                max_capacity=self.max_capacity,
                eviction=self.eviction,
                max_hbm=self.max_hbm,
                max_memory=self.max_memory,
                spill=self.spill,
                policies=self.policies,
                part=self.part,
                parts=self.parts,
                parts_beside=self.parts_beside,
                partitioned_name=self.partitioned_name,
                read_only=self._read_only,
            )
        saveable.copy_rows(self, copied)
        memo[id(self)] = copied
        return copied


def takes_float32(variable: KvVariable) -> bool:
    """Whether rows of 16 bits can be looked up as float32, and updated by gradients of float32: not on a GPU."""
    return variable.dtype in (tf.float16, tf.bfloat16) and "GPU" not in variable.handle.device


def checked_output_dtype(dtype: Any, parts: Sequence[KvVariable], name: str) -> tf.DType:
    """What a lookup of the `parts` of the variable `name` gives for `output_dtype`. Raises ValueError if it cannot."""
    own = parts[0].dtype
    wanted = own if dtype is None else tf.as_dtype(dtype)
    if wanted == own:
        return own
    what = f"Lookup of key-value variable '{name}' of {own.name} with output_dtype={wanted.name}"
    if wanted != tf.float32 or own not in (tf.float16, tf.bfloat16):
        raise ValueError(
            f"{what}: only rows of float16 and bfloat16 can be widened, and only to float32. Leave output_dtype out, "
            f"and tf.cast the rows to {wanted.name}."
        )
    if not all(takes_float32(part) for part in parts):
        raise ValueError(
            f"{what}: on a GPU rows come as they are. Leave output_dtype out, and tf.cast the rows to float32."
        )
    return wanted


def refuse_dense_value(value: Any, *args: Any, **kwargs: Any) -> tf.Tensor:
    """What TensorFlow converts a variable to a tensor by: raises TypeError."""
    raise TypeError(
        f"Key-value variable '{value.name}' has no dense value: it holds a row for each key it has met. Look rows up "
        "with tf.nn.embedding_lookup, or take all of them with export(). tf.train.ExponentialMovingAverage averages "
        "dense variables only: leave it out of its list."
    )


tf.register_tensor_conversion_function(KvVariable, refuse_dense_value)


def admission_attr(admission: float, name: str) -> dict[str, float]:
    """The attribute of a lookup that admits keys with a probability; none where all are."""
    if admission == 1.0:
        return {}
    if not 0.0 <= admission <= 1.0:
        raise ValueError(f"Lookup of key-value variable '{name}': admission must be 0 to 1, got {admission!r}.")
    return {"admission": float(admission)}
