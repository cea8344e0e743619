"""What stands for the rows of one lookup where TensorFlow wants a variable: in gradients and optimizers.

The gradient of a lookup goes to the `handle` of such an object, a tensor of its own that names the same table, so that
each lookup of a variable can be trained or left out by itself. `DynamicEmbeddingOptimizer` takes the gradient from
there to the rows in the table.
"""

from __future__ import annotations

import contextlib
from typing import Any, NoReturn

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops
from tensorflow.python.ops import resource_variable_ops

from tfplugin import step_record
from tfplugin.dynamic_embedding.model_mode import ModelMode
from tfplugin.dynamic_embedding.sharded_table import ShardedTable
from tfplugin.ops import raw


class TrainableWrapper(resource_variable_ops.BaseResourceVariable):
    """The rows of `ids` in `params`, as a variable that optimizers train. Made by `embedding_lookup` in a graph.

    Args:
      params: a `Variable`.
      ids: keys, any shape.
      max_norm: rows of a larger norm are scaled down to it when they are read.
      args: not used.
      kwargs: ``trainable``, ``name`` and ``model_mode``; others are not used.

    Attributes:
      params, ids, max_norm, trainable: as they were given.
      name: as it was given, and ``":0"``.
      dtype, shape: of the rows; [None, dim].
    """

    def __init__(self, params: ShardedTable, ids: Any, max_norm: Any = None, *args: Any, **kwargs: Any) -> None:
        del args
        self.params = params
        self.max_norm = max_norm
        self.model_mode = kwargs.get("model_mode") or ModelMode.CURRENT_SETTING
        self._ids = ids
        name = kwargs.get("name") or "TrainableWrapper"
        trainable = bool(kwargs.get("trainable", True)) and params.trainable and params.value_dtype.is_floating
        if not params.parts:
            raise TypeError(f"{params!r} has values that are not trained: read them with its lookup method.")
        table = params.parts[0]
        with tf_ops.init_scope():
            eager = tf.executing_eagerly()
            with (
                contextlib.nullcontext() if eager else tf.name_scope(f"{name}/"),
                tf_ops.colocate_with(None, ignore_existing=True),
                tf_ops.device(table._op_device()),
            ):
                token = tf.identity(table.handle, name=None if eager else "handle")
                initializer = None if eager else tf.no_op(name="Initializer")
        self._eager = eager
        super().__init__(
            handle=token,
            trainable=trainable,
            shape=tf.TensorShape([None, params.dim]),
            dtype=params.value_dtype,
            name=name,
            handle_name=name,
            unique_id=f"{name}_{tf_ops.uid()}",
            initializer_op=initializer,
            in_graph_mode=False,
        )
        #: Whether somebody has asked for what a lookup trains before there was such a lookup; see `shadow_of`.
        self.awaited = False
        self._prefetched: tf.Tensor | None = None
        if not eager:
            with tf.name_scope(f"{name}/"):
                self.prefetch_values()  # what a session gives for this object, also when the graph is finalized
            keys = [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]
            tf_ops.add_to_collections([*keys, tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES] if trainable else keys, self)

    # ---- Reads -------------------------------------------------------------------------------------------------------

    @property
    def ids(self) -> Any:
        """The keys of the lookup."""
        return self._ids

    def rows_of(self, ids: tf.Tensor, max_norm: Any = None) -> tf.Tensor:
        """Rows of keys, ids.shape + [dim], whose gradient comes here. Rows longer than `max_norm` are scaled down."""
        params = self.params
        if self.trainable and ModelMode.CURRENT_SETTING == ModelMode.TRAIN:
            step_record.note_lookup(self, train=True)
            if params._one is not None:
                with tf_ops.device(self._op_device()):
                    rows, _ = raw.kv_table_gather(
                        self.handle, ids, dtype=self._dtype, dim=params.dim, mode="initial", remember=True
                    )
            else:
                looked_up, positions = params.gather(ids)
                with tf_ops.device(self._op_device()):
                    rows = raw.kv_table_trainable(self.handle, ids, positions, looked_up)
        else:
            rows, _ = params.gather(ids)
        max_norm = self.max_norm if max_norm is None else max_norm
        return rows if max_norm is None else tf.clip_by_norm(rows, max_norm, axes=[-1])

    def read_value(self, do_prefetch: bool = True) -> tf.Tensor:
        """The rows of `ids` as they are now."""
        del do_prefetch
        return self.rows_of(self.params.keys_tensor(self.ids))

    def value(self, do_prefetch: bool = True) -> tf.Tensor:
        """As `read_value`."""
        return self.read_value(do_prefetch)

    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        return self.read_value()

    def numpy(self) -> Any:
        """The rows of `ids` (eager mode)."""
        return self.read_value().numpy()

    def prefetch_values(self, update: bool = False) -> tf.Tensor:
        """The rows of `ids`, without a gradient. A graph has one op for it, unless `update` asks for another."""
        if self._prefetched is None or update or tf.executing_eagerly() or tf_ops.inside_function():
            rows = self.transform(self.params.gather(self.params.keys_tensor(self.ids))[0])
            if tf.executing_eagerly() or tf_ops.inside_function():
                return rows
            self._prefetched = rows
        return self._prefetched

    def update_op(self, v0: Any = None) -> Any:
        """Inserts those of `ids` that are not there, with their initial values, and tells the restrict policy of all.

        An optimizer does both by itself: this is for a program that wants the rows without a gradient.

        Args:
          v0: not used: rows that are there stay as they are.

        Returns:
          The op (graph mode).
        """
        del v0
        params = self.params
        keys = tf.reshape(params.keys_tensor(self.ids), [-1])
        rows, _ = params.gather(keys)
        done = [params.accum(keys, rows, rows, tf.zeros_like(keys, tf.bool))]
        if params.restrict_policy is not None:
            done.append(params.restrict_policy.apply_update(tf.unique(keys)[0]))
        made = [op for op in done if op is not None]
        return None if tf.executing_eagerly() else tf.group(*made)

    def size(self) -> tf.Tensor:
        """Number of rows of `params`."""
        return self.params.size()

    def transform(self, rows: tf.Tensor) -> tf.Tensor:
        """Rows scaled down to `max_norm`."""
        return rows if self.max_norm is None else tf.clip_by_norm(rows, self.max_norm, axes=[-1])

    # ---- What pooled lookups ask of a table; see `tfplugin.fused_lookup` ---------------------------------------------

    _backward_token = ""

    #: See `KvVariable`.
    _how_to_train = (
        "Take a layer of tfplugin.dynamic_embedding.keras.layers, and compile the model with "
        "tfplugin.dynamic_embedding.DynamicEmbeddingOptimizer(optimizer); or give the model a train_step that hands "
        "that optimizer the gradient of what is looked up through."
    )

    @property
    def _kv_parts(self) -> tuple[Any, ...]:
        return self.params._kv_parts

    @property
    def dim(self) -> int:
        """Width of a row."""
        return self.params.dim

    @property
    def key_dtype(self) -> tf.DType:
        """Of the keys."""
        return self.params.key_dtype

    def _op_device(self) -> str | None:
        return None if self._eager else self.handle.device

    # ---- Optimizers that do not know tables --------------------------------------------------------------------------

    def refuse_plain_optimizer(self) -> NoReturn:
        """Raises TypeError: an optimizer as it is would take the rows of a lookup for a matrix."""
        raise TypeError(
            f"{self!r} is trained by an optimizer as it is, which knows no tables: wrap it, as in "
            "tfplugin.dynamic_embedding.DynamicEmbeddingOptimizer(Adam(1e-3)), and compile the model with that, or "
            "apply the gradients by it."
        )

    @property
    def _unique_id(self) -> str:
        # What optimizers of Keras, and in eager mode those of TensorFlow, find the slots of a variable by: wrapped
        # ones are given tables instead.
        self.refuse_plain_optimizer()

    @_unique_id.setter
    def _unique_id(self, value: str) -> None:
        """TensorFlow sets it, and nobody else reads it."""

    # ---- What TensorFlow asks of a variable --------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """As it was given, and ``":0"``."""
        return str(self._handle_name)

    @property
    def op(self) -> tf.Operation:
        """The op of the handle (graph mode)."""
        return self.handle.op

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """Always true."""
        return tf.constant(True, name=name)

    def _as_graph_element(self) -> tf.Tensor:
        return self.prefetch_values()

    def __repr__(self) -> str:
        return f"<dynamic_embedding.{type(self).__name__} '{self.name}' of {self.params!r}>"

    def assign(
        self, value: Any, use_locking: bool | None = None, name: str | None = None, read_value: bool = True
    ) -> Any:
        """Writes the rows of `ids`, inserting those that are not there."""
        del use_locking
        written = self.params.upsert(self.ids, value, name=name)
        return self.read_value() if read_value and tf.executing_eagerly() else written

    # The table keeps the rows, and `params` is what is saved.

    def to_proto(self, export_scope: str | None = None) -> None:
        """Is left out of MetaGraphs."""

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return {}

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {}

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        return None

    def _export_to_saved_model_graph(self, object_map: Any, tensor_map: Any, **kwargs: Any) -> list[tf.Tensor]:
        # Functions that a model serves read the tables themselves. One that was traced to train names this handle.
        table = self.params.parts[0]
        if table not in object_map:
            table._export_to_saved_model_graph(object_map, tensor_map, **kwargs)
        object_map[self] = self
        tensor_map[self.handle] = object_map[table].handle
        return [self.handle]

    def _write_object_proto(self, proto: Any, options: Any) -> None:
        proto.user_object.identifier = "tfplugin.dynamic_embedding.TrainableWrapper"
