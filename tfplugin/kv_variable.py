"""The key-value variable: an embedding table that grows a row for each key it meets."""

from __future__ import annotations

import contextlib
import json
import math
import re
import weakref
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2, variable_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import device as tf_device
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import gen_resource_variable_ops
from tensorflow.python.trackable import base as trackable
from tensorflow.python.util import dispatch, object_identity

from tfplugin import library, mode, step_record
from tfplugin.fused_lookup import can_fuse, gather_many, on_device_of
from tfplugin.initializers import KvInitializer
from tfplugin.ops import raw
from tfplugin.slots import SlotSpec, slots_json

#: What a bounded table goes by when it evicts.
EVICTIONS = ("lru", "lfu", "custom")
KEY_DTYPES = (tf.int64, tf.int32, tf.uint64)
VALUE_DTYPES = (tf.float32, tf.float16, tf.bfloat16, tf.float64)


def table_device(device: str | None) -> str:
    """Where a table goes that is wanted on `device`: to a GPU if it is named and can have tables, else to a CPU."""
    spec = tf_device.DeviceSpec.from_string(device or "")
    if spec.device_type in (None, "CPU") or (spec.device_type == "GPU" and library.has_gpu_tables()):
        return spec.to_string()
    return cpu_device(device)


def cpu_device(device: str | None) -> str:
    """The CPU of the task that `device` names."""
    spec = tf_device.DeviceSpec.from_string(device or "")
    if spec.device_type in (None, "CPU"):
        return spec.to_string()
    return spec.replace(device_type="CPU", device_index=0).to_string()


@dispatch.register_dispatchable_type
class KvVariable(trackable.Trackable):
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
      max_capacity: the most rows that a batch leaves behind; 0: any number.
      eviction: which rows go first: ``"lru"``, ``"lfu"`` or ``"custom"``.
      max_hbm: bytes of a GPU's memory that rows may take; None: no bound.
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
    #: Processes that each have an object like this one for a part of one table; see `tfplugin.sok`.
    ranks = 1
    #: The rank that holds it all; None where the ranks share the keys, or where there is one.
    owner: int | None = None
    #: False in a process whose part is empty because another one has all keys.
    holds_rows = True
    #: For who looks it up where no optimizer updates it.
    _how_to_train = (
        "Have its lookups update it in the backward pass, by tfplugin.apply_in_backward(table, optimizer) before the first "
        "step; or give the model a train_step that hands the gradients of model.trainable_weights and of the table to "
        "tfplugin.OptimizerWrapper(optimizer).apply_gradients. If it is not to be trained, make it with trainable=False."
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
        part: int = 0,
        parts: int = 1,
        partitioned_name: str | None = None,
        read_only: bool = False,
        starts_initialized: bool = False,
    ) -> None:
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
        self.part = part
        self.parts = parts
        #: The name of the whole variable, of which this may be a part.
        self.partitioned_name = partitioned_name
        self.kv_initializer = initializer or KvInitializer("uniform", -0.05, 0.05, 0)
        self._read_only = read_only
        #: In a graph: whether the table is there, empty, in every session, so that nobody has to run `initializer`.
        self._starts_initialized = starts_initialized

        with tf_ops.init_scope():
            self._eager = context.executing_eagerly()
            # What optimizers keep in the rows, in the order in which they came; see `attach_slots`. An optimizer is
            # gone when its object is; in a graph its ops outlive it, and it stays as long as they do.
            by_optimizer = weakref.WeakKeyDictionary if self._eager else dict
            self._slots_of: MutableMapping[Any, tuple[SlotSpec, ...]] = by_optimizer()
            self._slot_prefix_of: MutableMapping[Any, str] = by_optimizer()
            self._all_slots: tuple[SlotSpec, ...] | None = None
            self._slots_generation = 0
            self._row_reads: list[tf.Operation] = []
            #: Prefixes of the slots of optimizers that have taken steps, for the log.
            self._optimizers_seen: list[str] = []
            #: The update that the gradient of a lookup makes at once; see `apply_in_backward`.
            self._in_backward: Any = None
            self._graph_key = tf_ops.get_default_graph()._graph_key
            if self._eager:
                # The scope's device. Where it names none TensorFlow takes a GPU if there is one; a table stays with the
                # CPU, which has the memory, unless it is told to go there.
                device = table_device(context.context().device_name)
                with tf.device("CPU:0"), tf.device(device) if device else contextlib.nullcontext():
                    self._handle = self._make_handle(anonymous=True)
                self._unique_id = f"{name}_{tf_ops.uid()}"
                self._shared_name = self._unique_id
                self.initialize()
                self._initializer_op = None
            else:
                with tf.name_scope(""):
                    with self._placed(name) as probe:
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

    # ---- Making ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _placed(self, name: str) -> Iterator[tf.Tensor]:
        """Puts the table where a variable would go. Gives the op that was asked.

        Device functions such as ``replica_device_setter`` look at the type of the op they place: ask them by an op
        of the type they know.
        """
        probe = gen_resource_variable_ops.var_handle_op(
            dtype=self.dtype, shape=[0, self.dim], shared_name=f"{name}/placement", name=f"{name}/placement"
        )
        # After the probe: to ignore colocation is to ignore device functions, too.
        with tf_ops.colocate_with(None, ignore_existing=True), tf_ops.device(table_device(probe.device)):
            yield probe

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
        return self._handle.op

    @property
    def graph(self) -> tf.Graph:
        """The graph that holds the table."""
        return self._handle.graph

    @property
    def device(self) -> str:
        """Where the table lives."""
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

        Returns:
          Tensor of shape indices.shape + [dim].

        Raises:
          TypeError: keys of a dtype that does not fit.
          ValueError: `missing` or `admission` out of range.
          tf.errors.FailedPreconditionError: the variable is not initialized.
        """
        if missing not in ("zeros", "initial"):
            raise ValueError(f"sparse_read of '{self._name}': missing must be 'zeros' or 'initial', got {missing!r}")
        train = mode.training(training)
        keys = keys_to_tensor(indices, self.key_dtype, self._name)
        step_record.note_lookup(self, train)
        with on_device_of(self):
            rows, _ = raw.kv_table_gather(
                self._handle,
                keys,
                dtype=self.dtype,
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
        if not mode.training(training):
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
        """Frequency (updates so far) and version (Unix time of the last write) of keys: uint32, shape of keys."""
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
        """How many rows the table has evicted since it was initialized: scalar int64."""
        return raw.kv_table_update_counts(self._handle, name=name).evicted_rows

    def size(self, name: str | None = None) -> tf.Tensor:
        """Number of rows: scalar int64."""
        return raw.kv_table_size(self._handle, name=name)

    def memory(self, name: str | None = None) -> tf.Tensor:
        """[rows, row bytes, index bytes, column bytes, slack bytes]: int64."""
        return raw.kv_table_memory(self._handle, name=name)

    # ---- Writes ----------------------------------------------------------------------------------------------------

    def upsert(self, keys: Any, rows: Any, name: str | None = None) -> tf.Operation | None:
        """Writes rows, inserting keys that are not there. Of equal keys the last wins.

        Args:
          keys: any shape.
          rows: keys.shape + [dim].
          name: of the op.
        """
        keys = self.keys_tensor(keys)
        return raw.kv_table_upsert(self._handle, keys, tf.convert_to_tensor(rows, self.dtype), name=name)

    def accumulate(self, keys: Any, deltas: Any, name: str | None = None) -> tf.Operation | None:
        """Adds to rows, once for each occurrence of a key; a missing key starts from its initial value."""
        keys = self.keys_tensor(keys)
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
            _microseconds(unix_time, self._name),
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

    def slot_width(self, slot: str) -> int:
        """Elements of a slot: `dim` unless its optimizer said otherwise."""
        for specs in self._slots_of.values():
            for spec in specs:
                if spec.name == slot:
                    return spec.width
        return self.dim

    def slot_prefix(self, optimizer: Any, name: str) -> str:
        """The name under which an optimizer's slots are kept, unique among the live optimizers of this variable."""
        prefix = self._slot_prefix_of.get(optimizer)
        if prefix is None:
            base = re.sub(r"[./\s]", "_", name) or "Optimizer"
            taken = set(self._slot_prefix_of.values())
            prefix, number = base, 0
            while prefix in taken:
                number += 1
                prefix = f"{base}_{number}"
            self._slot_prefix_of[optimizer] = prefix
        return prefix

    def attach_slots(self, optimizer: Any, specs: Sequence[SlotSpec]) -> None:
        """Notes what an optimizer keeps beside each row. The table itself is changed by the next `read_rows`."""
        self._slots_of[optimizer] = tuple(specs)
        every = tuple(spec for specs_ in self._slots_of.values() for spec in specs_)
        if every == self._all_slots:
            return
        self._all_slots = every
        self._slots_generation += 1
        # A graph's steps run in any order, the first of them on a table that was just restored with the slots of all:
        # each has to know the optimizers that came after it.
        for op in self._row_reads:
            op._set_attr("all_slots", attr_value_pb2.AttrValue(s=slots_json(every).encode()))
            op._set_attr("generation", attr_value_pb2.AttrValue(i=self._slots_generation))

    def read_rows(self, keys: tf.Tensor, optimizer: Any, specs: Sequence[SlotSpec]) -> list[tf.Tensor]:
        """Values and slots of keys [n], for an optimizer's step: [n, dim] and [n, width] for each of `specs`.

        Gives the rows the slots that they lack. Slots of optimizers that are gone are dropped from the table.
        """
        self.attach_slots(optimizer, specs)
        assert self._all_slots is not None
        columns = raw.kv_table_read_rows(
            self._handle,
            keys,
            dtype=self.dtype,
            slots=slots_json(specs),
            all_slots=slots_json(self._all_slots),
            generation=self._slots_generation,
            widths=[self.dim, *(spec.width for spec in specs)],
            N=1 + len(specs),
        )
        self._note_step(columns[0].op if not context.executing_eagerly() else None)
        return columns

    def _note_step(self, op: tf.Operation | None) -> None:
        """Keeps an op whose attributes `attach_slots` has to keep up to date."""
        if not self._eager and op is not None and op.graph is self._handle.graph:
            self._row_reads.append(op)

    def write_rows(self, keys: tf.Tensor, columns: Sequence[tf.Tensor], specs: Sequence[SlotSpec]) -> Any:
        """Writes what `read_rows` read, and counts an update for each key. Returns the op (graph mode)."""
        return raw.kv_table_write_rows(self._handle, keys, list(columns), slots=slots_json(specs))

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
        skip_nonfinite: bool = False,
        stochastic_rounding: bool = False,
    ) -> tf.Operation | None:
        """One training step in one op: each key's row, value and slots, moves once by the sum of its gradients.

        Args:
          keys: [n], any order, duplicates included. Those that are not there are inserted.
          gradients: [n, dim], of the variable's dtype.
          optimizer: whose slots these are.
          specs: the slots of the rule, in its order.
          rule: the table engine's name for the update.
          names, hyperparameters: the elements of the tensors, one after the other, have these names.
          positions: [n], what the lookup of these keys remembered.
          skip_nonfinite: leave rows alone whose gradient has a NaN or an infinity, and count them.
          stochastic_rounding: of 16-bit rows.

        Returns:
          The op (graph mode).
        """
        self.attach_slots(optimizer, specs)
        assert self._all_slots is not None
        with tf_ops.colocate_with(None, ignore_existing=True), tf_ops.device(self._op_device()):
            op = raw.kv_table_apply(
                self._handle,
                keys,
                tf.constant([], tf.int64) if positions is None else positions,
                gradients,
                list(hyperparameters),
                optimizer=rule,
                names=list(names),
                slots=slots_json(specs),
                all_slots=slots_json(self._all_slots),
                generation=self._slots_generation,
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
            }
        )

    # A v1 Saver asks the first of these. The second is for a part inside a SavedModel: the whole saves it.

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        from tfplugin import checkpoint

        return checkpoint.name_based_saveables(self)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {}

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        return None

    def __deepcopy__(self, memo: Any) -> KvVariable:
        raise NotImplementedError("A KvVariable cannot be deep-copied: save and restore it instead.")


@dispatch.register_dispatchable_type
class PartitionedKvVariable(trackable.Trackable):
    """A key-value variable in parts: ``name/part_i`` holds the keys with key floor-mod parts == i.

    Iterates over its parts. Everything that takes a `KvVariable` takes it.
    """

    def __init__(self, name: str, parts: Sequence[KvVariable]) -> None:
        self._name = name
        self._parts = list(parts)

    @property
    def name(self) -> str:
        """The name of the whole."""
        return self._name

    @property
    def key_dtype(self) -> tf.DType:
        """Of the keys."""
        return self._parts[0].key_dtype

    @property
    def dtype(self) -> tf.DType:
        """Of the values."""
        return self._parts[0].dtype

    @property
    def dim(self) -> int:
        """Width of a row."""
        return self._parts[0].dim

    @property
    def shape(self) -> tf.TensorShape:
        """[None, dim]."""
        return self._parts[0].shape

    def get_shape(self) -> tf.TensorShape:
        """[None, dim]."""
        return self.shape

    @property
    def _kv_parts(self) -> tuple[KvVariable, ...]:
        """The parts."""
        return tuple(self._parts)

    @property
    def trainable(self) -> bool:
        """Whether the parts are trainable."""
        return self._parts[0].trainable

    @property
    def max_capacity(self) -> int:
        """The most rows that a batch leaves behind in all parts together; 0: any number."""
        return sum(part.max_capacity for part in self._parts)

    @property
    def eviction(self) -> str:
        """Which rows of a part go first."""
        return self._parts[0].eviction

    @property
    def initializer(self) -> tf.Operation | None:
        """The op that starts all parts empty (graph mode)."""
        return tf.group(*[part.initializer for part in self._parts]) if not self._parts[0]._eager else None

    def __iter__(self) -> Iterator[KvVariable]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, index: int) -> KvVariable:
        return self._parts[index]

    def as_list(self) -> list[KvVariable]:
        """The parts."""
        return list(self._parts)

    def __repr__(self) -> str:
        return (
            f"<tfplugin.PartitionedKvVariable '{self._name}' {self.key_dtype.name} -> {self.dtype.name}[{self.dim}], "
            f"{len(self._parts)} parts>"
        )

    def _owned(self, keys: Any) -> tuple[tf.Tensor, list[tf.Tensor], list[tf.Tensor]]:
        """Keys as a tensor, then per part: the flat positions of its keys, and the keys."""
        keys = keys_to_tensor(keys, self.key_dtype, self._name)
        flat = tf.reshape(keys, [-1])
        count = len(self._parts)
        owner = raw.kv_table_partition(flat, parts=count)
        positions = tf.dynamic_partition(tf.range(tf.size(flat)), owner, count)
        return keys, positions, tf.dynamic_partition(flat, owner, count)

    @tf.autograph.experimental.do_not_convert
    def sparse_read(
        self,
        indices: Any,
        name: str | None = None,
        *,
        training: bool | None = None,
        missing: str = "zeros",
        admission: float = 1.0,
    ) -> tf.Tensor:
        """Rows of keys, each from the part that owns it; as `KvVariable.sparse_read`."""
        if len(self._parts) == 1:
            return self._parts[0].sparse_read(indices, name, training=training, missing=missing, admission=admission)
        if missing not in ("zeros", "initial"):
            raise ValueError(f"sparse_read of '{self._name}': missing must be 'zeros' or 'initial', got {missing!r}")
        train = mode.training(training)
        if admission == 1.0 and can_fuse(self._parts, train):
            keys = keys_to_tensor(indices, self.key_dtype, self._name)
            return gather_many([self._parts], [keys], train, missing, name)[0]
        with tf.name_scope(name or "kv_lookup"):
            keys, positions, part_keys = self._owned(indices)
            rows = [
                part.sparse_read(owned, training=train, missing=missing, admission=admission)
                for part, owned in zip(self._parts, part_keys, strict=True)
            ]
            return self._stitched(keys, positions, rows)

    gather = sparse_read

    def _stitched(self, keys: tf.Tensor, positions: Sequence[tf.Tensor], rows: Sequence[tf.Tensor]) -> tf.Tensor:
        """The parts' rows in the order of `keys`."""
        stitched = tf.dynamic_stitch(list(positions), list(rows))
        out = tf.reshape(stitched, tf.concat([tf.shape(keys), [self.dim]], 0))
        out.set_shape(keys.shape.concatenate([self.dim]))
        return out

    def sparse_read_and_evict(
        self, keys: Any, name: str | None = None, *, training: bool | None = None, admission: float = 1.0
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """As `KvVariable.sparse_read_and_evict`; what the parts evict comes part after part."""
        with tf.name_scope(name or "kv_lookup"):
            keys, positions, part_keys = self._owned(keys)
            read = [
                part.sparse_read_and_evict(owned, training=training, admission=admission)
                for part, owned in zip(self._parts, part_keys, strict=True)
            ]
            rows, evicted_keys, evicted_rows = zip(*read, strict=True)
            return self._stitched(keys, positions, rows), tf.concat(evicted_keys, 0), tf.concat(evicted_rows, 0)

    def evicted_rows(self) -> tf.Tensor:
        """As `KvVariable.evicted_rows`, of all parts."""
        return tf.add_n([part.evicted_rows() for part in self._parts])

    def export_since(self, unix_time: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """As `KvVariable.export_since`, part after part."""
        exported = [part.export_since(unix_time) for part in self._parts]
        return tf.concat([keys for keys, _ in exported], 0), tf.concat([rows for _, rows in exported], 0)

    def set_scores(self, keys: Any, scores: Any) -> tf.Tensor:
        """As `KvVariable.set_scores`."""
        _, positions, part_keys = self._owned(keys)
        flat = tf.reshape(scores_tensor(scores), [-1])
        return tf.add_n(
            [
                part.set_scores(owned, tf.gather(flat, where))
                for part, where, owned in zip(self._parts, positions, part_keys, strict=True)
            ]
        )

    def size(self, name: str | None = None) -> tf.Tensor:
        """Number of rows in all parts: scalar int64."""
        return tf.add_n([part.size() for part in self._parts], name=name)

    def contains(self, keys: Any) -> tf.Tensor:
        """Whether each key is there: bool, shape of keys."""
        keys, positions, part_keys = self._owned(keys)
        found = [part.contains(owned) for part, owned in zip(self._parts, part_keys, strict=True)]
        return tf.reshape(tf.dynamic_stitch(positions, found), tf.shape(keys))

    def stamps(self, keys: Any) -> tuple[tf.Tensor, tf.Tensor]:
        """Frequency and version of keys; as `KvVariable.stamps`."""
        keys, positions, part_keys = self._owned(keys)
        stamps = [part.stamps(owned) for part, owned in zip(self._parts, part_keys, strict=True)]
        freqs, versions = (
            tf.reshape(tf.dynamic_stitch(positions, list(column)), tf.shape(keys))
            for column in zip(*stamps, strict=True)
        )
        return freqs, versions

    def zeroed(self, keys: Any) -> tf.Tensor:
        """Whether a group penalty has zeroed the row of each key: bool, shape of keys."""
        keys, positions, part_keys = self._owned(keys)
        zeroed = [part.zeroed(owned) for part, owned in zip(self._parts, part_keys, strict=True)]
        return tf.reshape(tf.dynamic_stitch(positions, zeroed), tf.shape(keys))

    def zeroed_rows(self) -> tf.Tensor:
        """How many rows of all parts a group penalty has zeroed: scalar int64."""
        return tf.add_n([part.zeroed_rows() for part in self._parts])

    def skipped_updates(self) -> tf.Tensor:
        """As `KvVariable.skipped_updates`, of all parts."""
        return tf.add_n([part.skipped_updates() for part in self._parts])

    def memory(self) -> tf.Tensor:
        """As `KvVariable.memory`, of all parts."""
        return tf.add_n([part.memory() for part in self._parts])

    def upsert(self, keys: Any, rows: Any) -> tf.Operation | None:
        """Writes rows, inserting keys that are not there; as `KvVariable.upsert`."""
        return self._write("upsert", keys, rows)

    def accumulate(self, keys: Any, deltas: Any) -> tf.Operation | None:
        """Adds to rows; as `KvVariable.accumulate`."""
        return self._write("accumulate", keys, deltas)

    def _write(self, method: str, keys: Any, rows: Any) -> tf.Operation | None:
        keys, positions, part_keys = self._owned(keys)
        rows = tf.convert_to_tensor(rows, self.dtype)
        wanted = keys.shape.concatenate([self.dim])
        flat = tf.TensorShape([keys.shape.num_elements(), self.dim])
        if not (rows.shape.is_compatible_with(wanted) or rows.shape.is_compatible_with(flat)):
            raise ValueError(
                f"{method} of key-value variable '{self._name}' wants rows of shape {wanted} for keys of shape "
                f"{keys.shape}, got {rows.shape}."
            )
        rows = tf.reshape(rows, [-1, self.dim])
        return tf.group(
            *[
                getattr(part, method)(owned, tf.gather(rows, where))
                for part, where, owned in zip(self._parts, positions, part_keys, strict=True)
            ]
        )

    def remove(self, keys: Any) -> tf.Tensor:
        """Removes keys; returns how many were there: scalar int64."""
        _, _, part_keys = self._owned(keys)
        return tf.add_n([part.remove(owned) for part, owned in zip(self._parts, part_keys, strict=True)])

    def clear(self) -> tf.Operation | None:
        """Removes all rows."""
        return tf.group(*[part.clear() for part in self._parts])

    def export(self, slot: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """All keys [N] and their rows [N, dim], part after part."""
        exported = [part.export(slot) for part in self._parts]
        return tf.concat([keys for keys, _ in exported], 0), tf.concat([rows for _, rows in exported], 0)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        from tfplugin import checkpoint

        return checkpoint.name_based_saveables(self)

    # In a checkpoint the parts are saved together, so that they restore into any other number; in a SavedModel each
    # is an object of its own, because functions capture its handle.
    def _trackable_children(self, save_type: str = trackable.SaveType.CHECKPOINT, **kwargs: Any) -> dict[str, Any]:
        children = dict(super()._trackable_children(save_type, **kwargs))
        if save_type == trackable.SaveType.SAVEDMODEL:
            children.update({f"part_{i}": part for i, part in enumerate(self._parts)})
        return children

    def _export_to_saved_model_graph(self, object_map: Any, tensor_map: Any, **kwargs: Any) -> list[tf.Tensor]:
        # Parts have been mapped before: they are dependencies, see `_deserialization_dependencies`.
        object_map[self] = PartitionedKvVariable(self._name, [object_map[part] for part in self._parts])
        return []

    def _deserialization_dependencies(self, children: dict[str, Any]) -> dict[str, Any]:
        return {f"part_{i}": part for i, part in enumerate(self._parts)}


def _no_dense_value(value: KvVariable | PartitionedKvVariable, *args: Any, **kwargs: Any) -> tf.Tensor:
    raise TypeError(
        f"Key-value variable '{value.name}' has no dense value: it holds a row for each key it has met. Look rows up "
        "with tf.nn.embedding_lookup, or take all of them with export()."
    )


tf.register_tensor_conversion_function((KvVariable, PartitionedKvVariable), _no_dense_value)


def checked_capacity(max_capacity: Any, eviction: Any, name: str) -> int:
    """`max_capacity` as an int.

    Raises:
      ValueError: it is not a number of 0 or more, or `eviction` is none of `EVICTIONS`.
    """
    if isinstance(max_capacity, bool) or int(max_capacity) != max_capacity or max_capacity < 0:
        raise ValueError(
            f"Key-value variable '{name}': max_capacity must be a number of rows, or 0 for any number; got "
            f"{max_capacity!r}."
        )
    if eviction not in EVICTIONS:
        raise ValueError(f"Key-value variable '{name}': eviction must be one of {EVICTIONS}, got {eviction!r}.")
    return int(max_capacity)


def admission_attr(admission: float, name: str) -> dict[str, float]:
    """The attribute of a lookup that admits keys with a probability; none where all are."""
    if admission == 1.0:
        return {}
    if not 0.0 <= admission <= 1.0:
        raise ValueError(f"Lookup of key-value variable '{name}': admission must be 0 to 1, got {admission!r}.")
    return {"admission": float(admission)}


def scores_tensor(scores: Any) -> tf.Tensor:
    """Scores as a Tensor of int64 or uint64."""
    scores = scores if tf.is_tensor(scores) else tf.convert_to_tensor(np.asarray(scores))
    if scores.dtype in (tf.int64, tf.uint64):
        return scores
    if not scores.dtype.is_integer and scores.shape.num_elements() != 0:
        raise TypeError(f"set_scores: scores must be integers, got {scores.dtype.name}.")
    return tf.cast(scores, tf.int64)


def _microseconds(unix_time: Any, name: str) -> tf.Tensor:
    if tf.is_tensor(unix_time):
        return tf.cast(tf.floor(tf.cast(unix_time, tf.float64) * 1e6), tf.int64)
    if isinstance(unix_time, bool) or not math.isfinite(unix_time):
        raise ValueError(
            f"export_since of key-value variable '{name}': the time must be seconds since 1970, got {unix_time!r}."
        )
    return tf.constant(min(max(0, math.floor(unix_time * 1e6)), 2**63 - 1), tf.int64)


def keys_to_tensor(keys: Any, key_dtype: tf.DType, name: str) -> tf.Tensor:
    """Keys as a Tensor of `key_dtype`: integers that are not tensors yet, and int32 where the keys are int64."""
    if isinstance(keys, tf_ops.EagerTensor) and keys.dtype == key_dtype:
        return keys
    if isinstance(keys, (tf.SparseTensor, tf.compat.v1.SparseTensorValue, tf.RaggedTensor)):
        raise TypeError(
            f"Key-value variable '{name}' takes ids as a dense tensor here, got a {type(keys).__name__}: pass it to "
            "tf.nn.embedding_lookup_sparse, or pass its values."
        )
    if not tf.is_tensor(keys):
        dtype = getattr(keys, "dtype", None)
        if dtype is None:
            try:
                numbers = np.asarray(keys) if key_dtype == tf.int32 else None
                if numbers is not None and numbers.dtype.kind in "iu" and (numbers != numbers.astype(np.int32)).any():
                    raise OverflowError("out of the range of int32")
                return tf.convert_to_tensor(keys, key_dtype)
            except (TypeError, ValueError, OverflowError) as error:
                raise TypeError(
                    f"Key-value variable '{name}' has {key_dtype.name} keys: {keys!r:.80} does not convert ({error})."
                ) from error
        keys = tf.convert_to_tensor(keys)
    if keys.dtype == key_dtype:
        return keys
    if keys.dtype == tf.int32 and key_dtype == tf.int64:
        return tf.cast(keys, tf.int64)
    raise TypeError(
        f"Key-value variable '{name}' has {key_dtype.name} keys, got ids of {keys.dtype.name}: "
        f"cast them with tf.cast(ids, tf.{key_dtype.name})"
        + (" after hashing (tf.strings.to_hash_bucket_fast)." if keys.dtype == tf.string else ".")
    )
