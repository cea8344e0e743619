"""`Embedding`: a dynamic embedding variable as a layer of Keras 3 or tf_keras.

The classes here do what the layer of every Keras does; `layers_of` joins them to a Layer.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable import base as trackable

from tfplugin.dynamic_embedding import restrict_policies, shadow_ops
from tfplugin.dynamic_embedding.get_variable import get_variable, unused_name
from tfplugin.dynamic_embedding.keras.layers.creator_config import creator_config, made_of_config
from tfplugin.dynamic_embedding.keras.layers.table_rows import TableRows, keys_of, table_rows
from tfplugin.dynamic_embedding.partition import default_partition_fn
from tfplugin.embedding_layers.layer_ids import scattered
from tfplugin.keys import refuse_keras_input
from tfplugin.policies import POLICY_ARGUMENTS, Policies

_POLICIES = {
    cls.__name__: cls for cls in (restrict_policies.FrequencyRestrictPolicy, restrict_policies.TimestampRestrictPolicy)
}
#: Arguments that may be functions or objects. (Initializers know themselves how they are made again.)
_SERIALIZED = ("combiner", "kv_creator", "partitioner", "restrict_policy", "slot_map_fn")


class LayerRows(shadow_ops.ShadowVariable):
    """What optimizers train of a layer: frozen where the layer is, and of as many rows as the variable has."""

    #: Keras 3 asks its weights for it.
    regularizer = None

    def __init__(self, *, layer: Any, **kwargs: Any) -> None:
        self._layer = weakref.ref(layer)
        super().__init__(**kwargs)

    @property
    def path(self) -> str:
        """What Keras 3 calls it."""
        layer = self._layer()
        return f"{self.name if layer is None else layer.name}/rows"

    @property
    def trainable(self) -> bool:
        """Whether the variable and the layer are."""
        layer = self._layer()
        return bool(self._trainable) and (layer is None or bool(layer.trainable))

    @property
    def shape(self) -> tf.TensorShape:
        """[rows, dim] in eager mode, so that a model can count its parameters; else [None, dim]."""
        rows = int(self.params.size()) if tf.executing_eagerly() else None
        return _RowsShape([rows, self.params.dim])

    # As a weight it is all rows of the table.

    def numpy(self) -> TableRows:
        """All rows [n, dim], with their keys: what ``get_weights`` gives, and ``set_weights`` takes."""
        keys, rows = self.params.export()
        return table_rows(keys.numpy(), rows.numpy())

    def _dense_var_to_tensor(self, dtype: Any = None, name: str | None = None, as_ref: bool = False) -> tf.Tensor:
        del name, as_ref
        rows = self.params.export()[1]
        return rows if dtype is None or rows.dtype == dtype else NotImplemented

    def assign(
        self, value: Any, use_locking: bool | None = None, name: str | None = None, read_value: bool = True
    ) -> None:
        """Replaces all rows by those that `numpy` gave, also of another layer. Those that stay keep their slots.

        Raises:
          TypeError: an array that knows no keys.
        """
        del use_locking, name, read_value
        keys = keys_of(value)
        if keys is None:
            raise TypeError(
                f"{self!r} takes what get_weights gives of a table, which knows the keys of its rows, and no other "
                "array: write rows with its params.upsert(keys, rows)."
            )
        rows = tf.cast(tf.constant(np.asarray(value)), self.params.value_dtype)
        self.params.replace(tf.constant(keys, self.params.key_dtype), rows)

    def _trackable_children(self, save_type: str = trackable.SaveType.CHECKPOINT, **kwargs: Any) -> dict[str, Any]:
        children = dict(super()._trackable_children(save_type, **kwargs))
        if save_type == trackable.SaveType.SAVEDMODEL:
            # What `export` of Keras 3 writes has the weights of a model, and not its layers.
            children["params"] = self.params
        return children


class _RowsShape(tf.TensorShape):
    """The shape of all rows of a table: any number of them goes in."""

    def __eq__(self, other: Any) -> bool:
        try:
            return bool(tf.TensorShape([None, *self[1:]]).is_compatible_with(tf.TensorShape(other)))
        except (TypeError, ValueError):
            return False

    def __ne__(self, other: Any) -> bool:
        return not self == other

    __hash__ = tf.TensorShape.__hash__

    def is_compatible_with(self, other: Any) -> bool:
        """Whether rows of that shape go in."""
        return self == other


class EmbeddingLayer:
    """What `Embedding` is beside a Layer."""

    #: The Keras of the layer.
    _keras: Any = None

    def __init__(
        self,
        embedding_size: int,
        key_dtype: Any = tf.int64,
        value_dtype: Any = tf.float32,
        combiner: Any = "sum",
        initializer: Any = None,
        devices: Any = None,
        name: str | None = "DynamicEmbeddingLayer",
        with_unique: bool = True,
        short_file_name: bool = False,
        **kwargs: Any,
    ) -> None:
        try:
            embedding_size = int(embedding_size)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{type(self).__name__} '{name}': embedding_size must be a number, got {embedding_size!r}."
            ) from error
        value_dtype = tf.as_dtype(value_dtype)
        trainable = bool(kwargs.pop("trainable", True))
        max_norm = kwargs.pop("max_norm", None)
        keep_distribution = bool(kwargs.pop("keep_distribution", False))
        strategy = kwargs.pop("distribute_strategy", None)
        own_rows = bool(kwargs.pop("own_rows", False))
        of_variable = {
            "key_dtype": key_dtype,
            "value_dtype": value_dtype,
            "dim": embedding_size,
            "devices": devices,
            "partitioner": kwargs.pop("partitioner", None) or default_partition_fn,
            "shared_name": "layer_embedding_variable",
            "initializer": self._initializer(initializer),
            "trainable": trainable,
            "checkpoint": kwargs.pop("checkpoint", True),
            "init_size": kwargs.pop("init_capacity", None) or 0,
            "kv_creator": kwargs.pop("kv_creator", None),
            "restrict_policy": self._policy(kwargs.pop("restrict_policy", None)),
            "bp_v2": kwargs.pop("bp_v2", False),
            "short_file_name": short_file_name,
            **{what: kwargs.pop(what) for what in POLICY_ARGUMENTS if what in kwargs},
            "policies": Policies.from_json(policies) if (policies := kwargs.pop("policies", None)) else None,
        }
        kwargs.pop("dtype", None)  # is that of the values
        super().__init__(name=name, trainable=trainable, dtype=value_dtype.name, **kwargs)  # type: ignore[call-arg]
        self.embedding_size = embedding_size
        self.combiner = combiner
        self.max_norm = max_norm
        self.keep_distribution = keep_distribution
        self.with_unique = bool(with_unique)
        self.distribute_strategy = strategy
        self.supports_jit = False  # Keras 3: XLA has no tables
        # All that name a table in Redis share its rows.
        own_rows = own_rows and not getattr(of_variable["kv_creator"], "one_table", False)
        variable_name = f"{name}-parameter" if name else "EmbeddingParameter"
        self.params = get_variable(unused_name(variable_name) if own_rows else variable_name, **of_variable)
        self.shadow = LayerRows(
            layer=self,
            params=self.params,
            name=f"{name}-shadow" if name else "ShadowVariable",
            max_norm=max_norm,
            trainable=trainable,
            distribute_strategy=strategy,
        )

    def _initializer(self, given: Any) -> Any:
        initializers = self._keras.initializers
        if given is None:
            return initializers.RandomNormal()
        return initializers.deserialize(given) if isinstance(given, dict) else given

    def _policy(self, given: Any) -> Any:
        return _POLICIES.get(given, given) if isinstance(given, str) else given

    def call(self, ids: Any) -> Any:
        """Rows of ids, ids.shape + [embedding_size], ragged where ids are. Inserts nothing: training does.

        Of a SparseTensor it is dense, with zeros where there is no id.

        Raises:
          ValueError: ids of another dtype than the keys.
        """
        refuse_keras_input(ids, f"Layer '{self.name}'")  # type: ignore[attr-defined]
        if isinstance(ids, tf.SparseTensor):
            return scattered(ids, self._rows(ids.values), self.embedding_size)
        return self._rows(ids)

    def _rows(self, ids: Any) -> Any:
        return shadow_ops.embedding_lookup_unique(self.shadow, ids, self.embedding_size, self.with_unique)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Adds the width of a row."""
        return (*tuple(input_shape), self.embedding_size)

    # ---- Making it again ---------------------------------------------------------------------------------------------

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """A layer of this config. Its rows are its own: they are not those of a layer of this name that there is. Only
        rows in Redis are shared by all that name them.

        Raises:
          TypeError, ValueError: as of Keras, for a function that the file names and nothing registers, and for a lambda
            in its safe mode.
        """
        return cls(**{"own_rows": True, **{what: cls._made_again(what, given) for what, given in config.items()}})

    @classmethod
    def _made_again(cls, what: str, given: Any) -> Any:
        """An argument as it was given: a file of Keras has a function, or an object of the user's, as a dictionary."""
        if what in _SERIALIZED and isinstance(given, dict) and "class_name" in given:
            return cls._keras.utils.deserialize_keras_object(given)
        return made_of_config(given, cls._keras.utils.deserialize_keras_object) if what == "kv_creator" else given

    def get_config(self) -> dict[str, Any]:
        """What it takes to make the layer again: plain data, but for functions and objects that were given."""
        policy = self.params.restrict_policy
        policy = None if policy is None else type(policy)
        return {
            "embedding_size": self.embedding_size,
            "key_dtype": self.params.key_dtype.name,
            "value_dtype": self.params.value_dtype.name,
            "combiner": self.combiner,
            "initializer": self._initializer_config(),
            "devices": self.params.devices if self.keep_distribution else None,
            "name": self.name,  # type: ignore[attr-defined]
            "with_unique": self.with_unique,
            "short_file_name": self.params.short_file_name,
            "trainable": bool(self.trainable),  # type: ignore[attr-defined]
            "bp_v2": self.params.bp_v2,
            "restrict_policy": policy.__name__ if policy in _POLICIES.values() else policy,
            "init_capacity": self.params.init_size,
            "partitioner": None if self.params.partition_fn is default_partition_fn else self.params.partition_fn,
            "kv_creator": creator_config(self.params.kv_creator, self.keep_distribution),
            "max_norm": self.max_norm,
            "keep_distribution": self.keep_distribution,
            "policies": self.params.policies.to_json() or None,
        }

    def _initializer_config(self) -> Any:
        given = self.params.initializer
        if given is None or isinstance(given, (bool, int, float, str)):
            return given
        if isinstance(given, np.ndarray) or tf.is_tensor(given):
            return np.asarray(given).tolist()
        return self._keras.initializers.serialize(given)

    # ---- The .keras and .weights.h5 files of Keras -------------------------------------------------------------------

    def save_own_variables(self, store: Any) -> None:
        """Writes all rows, but those in Redis, which stay there. Slots of optimizers are with the optimizer."""
        if self.params.rows_elsewhere:
            return
        keys, values = self.params.export()
        if self.params.key_dtype == tf.string:
            # HDF5 would take a zero byte for the end of a string.
            store["key_lengths"] = tf.strings.length(keys).numpy()
            store["keys"] = np.frombuffer(b"".join(keys.numpy().tolist()), np.uint8)
        else:
            store["keys"] = keys.numpy()
        store["values"] = _storable(values.numpy())

    def load_own_variables(self, store: Any) -> None:
        """Replaces all rows by those of a file. One that was saved of a table in Redis has none.

        Raises:
          ValueError: its rows are of another width, or it has none for a table that is not in Redis.
        """
        if "values" not in store:
            if self.params.rows_elsewhere:
                return
            raise ValueError(
                f"Layer '{self.name}' has its rows in memory, and the file has none: it was saved of a table in "  # type: ignore[attr-defined]
                "Redis, where they stayed. Make the layer with that RedisTableCreator as its kv_creator."
            )
        values = np.asarray(store["values"])
        if values.ndim != 2 or values.shape[1] != self.params.dim:
            raise ValueError(
                f"Layer '{self.name}' has rows of {self.params.dim} elements, the file some of shape "  # type: ignore[attr-defined]
                f"{values.shape[1:]}: make the layer with the embedding_size that was saved."
            )
        keys = np.asarray(store["keys"])
        if self.params.key_dtype == tf.string:
            ends = np.cumsum([0, *np.asarray(store["key_lengths"])])
            found = keys.tobytes()
            keys = np.array([found[a:b] for a, b in itertools.pairwise(ends)], object)
        rows = tf.cast(tf.constant(values), self.params.value_dtype)
        self.params.replace(tf.constant(keys, self.params.key_dtype), rows)


def _storable(values: np.ndarray) -> np.ndarray:
    """HDF5 has no bfloat16, of which float32 holds every value."""
    return values.astype(np.float32) if values.dtype == tf.bfloat16.as_numpy_dtype else values
