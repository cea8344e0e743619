"""`Embedding`: a table as a layer."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin.embedding_layers.built_by_shape import as_ids
from tfplugin.embedding_layers.keras_inputs import refuse_other_keras
from tfplugin.embedding_layers.layer_ids import check_dtype, lookup_of, mask_of, output_shape, padding_of
from tfplugin.embedding_layers.layer_tables import TableOptions
from tfplugin.embedding_layers.penalties import add_penalty
from tfplugin.embedding_layers.read_rows import cast, read, read_regularized, trains

#: Arguments of Keras's own Embedding, and what they are here.
_OF_KERAS = {
    "input_dim": "leave it out: a table has no vocabulary; max_capacity bounds its rows",
    "output_dim": "it is dim",
    "input_length": "leave it out",
    "embeddings_initializer": "it is initializer",
    "embeddings_regularizer": "it is regularizer",
    "embeddings_constraint": "it is constraint",
    "weights": "write rows with layer.table.upsert(keys, rows)",
}


class EmbeddingLayer:
    """What `Embedding` is beside a Layer."""

    #: The Keras of the layer.
    _keras: Any = None
    #: Of Keras 3: the class of the operation that masks padding in functional models.
    _mask_operation: Any = None

    def __init__(
        self,
        dim: Any = None,  # with a default, so that whoever says output_dim in its place is told
        combiner: str | None = None,
        mask_zero: bool = False,
        padding_id: Any = None,
        initializer: Any = "uniform",
        regularizer: Any = None,
        constraint: Any = None,
        max_capacity: int | None = None,
        eviction: str | None = None,
        admission: Any = None,
        max_hbm: int | None = None,
        key_dtype: Any = "int64",
        dtype: Any = None,
        optimizer: Any = None,
        name: str | None = None,
        *,
        expiry: Any = None,
        expire_every: int = 0,
        expire_on_save: bool = False,
        max_memory: int | None = None,
        spill: str | None = None,
        capacity_hint: int = 0,
        parts: int | None = None,
        trainable: bool = True,
        **kwargs: Any,
    ) -> None:
        for argument in sorted(_OF_KERAS.keys() & kwargs.keys()):
            raise TypeError(f"{type(self).__name__} has no argument {argument}: {_OF_KERAS[argument]}.")
        # Ids are not cast to the dtype of the rows.
        super().__init__(name=name, trainable=trainable, dtype=dtype, autocast=False, **kwargs)  # type: ignore[call-arg]
        what = f"Layer '{self.name}'"  # type: ignore[has-type]
        #: Whether the name, which is the table's, too, is the user's and not one that Keras made.
        self._name_was_given = name is not None
        self.options = TableOptions(
            dim,
            combiner,
            mask_zero,
            padding_id,
            initializer,
            regularizer,
            constraint,
            max_capacity,
            eviction,
            admission,
            expiry,
            expire_every,
            expire_on_save,
            max_hbm,
            max_memory,
            spill,
            capacity_hint,
            parts,
            key_dtype,
            optimizer,
        ).resolved(self._keras, what)
        #: A Keras optimizer is saved with the layer.
        self.optimizer = self.options.optimizer
        self.table = self.options.make(self.name, self.variable_dtype, what)  # type: ignore[attr-defined]
        self.supports_masking = self.options.mask_zero and combiner is None
        self.supports_jit = False  # Keras 3: XLA has no tables

    # ---- What it is --------------------------------------------------------------------------------------------------

    @property
    def dim(self) -> int:
        """Width of a row."""
        return self.options.dim

    @property
    def combiner(self) -> str | None:
        """How the rows of a sample become one; None: they do not."""
        return self.options.combiner

    @property
    def mask_zero(self) -> bool:
        """Whether padding is masked."""
        return self.options.mask_zero

    @property
    def embeddings(self) -> Any:
        """Not there: a table has no dense value."""
        raise AttributeError(
            f"Layer '{self.name}' has no embeddings: its rows lie in its attribute table. "  # type: ignore[attr-defined]
            "table.export() gives them with their keys, table.upsert(keys, rows) writes some."
        )

    def table_optimizer(self, table: Any) -> Any:
        """The optimizer that updates the table in ``fit`` instead of the model's; None: the model's does."""
        del table
        return self.optimizer

    @property
    def regularized_tables(self) -> list[Any]:
        """The tables whose rows a regularizer looks at in each call."""
        return [] if self.options.regularizer is None else [self.table]

    @property
    def _reading(self) -> Any:
        return self.options.reading(f"Layer '{self.name}'", self.table)  # type: ignore[attr-defined]

    # ---- Calls -------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of any layer."""
        refuse_other_keras(self, args, kwargs)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def call(self, inputs: Any, weights: Any = None, training: Any = None) -> Any:
        """Rows of ids.

        Args:
          inputs: ids: a tensor, RaggedTensor or SparseTensor, of integers or strings.
          weights: for a combiner, of the same kind and shape: floating-point numbers that rows are multiplied by.
          training: whether keys that are missing get rows; Keras says so in ``fit``. Default: whether a gradient tape
            records the call.
        """
        return self._rows(inputs, weights, training)

    @tf.autograph.experimental.do_not_convert
    def _rows(self, ids: Any, weights: Any, training: Any) -> Any:
        train = trains(self, training)
        lookup = lookup_of(as_ids(ids, self._reading), weights, self._reading)
        if self.options.regularizer is None:
            (rows,) = read([lookup], train)
        else:
            rows, penalty = read_regularized(lookup, self.options.regularizer, train)
            add_penalty(self, penalty)
        return cast(rows, self.compute_dtype)  # type: ignore[attr-defined]

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Which ids are not padding, where there are a mask and no combiner."""
        del mask
        if not self.supports_masking:
            return None
        inputs = as_ids(inputs, self._reading)
        padding = padding_of(inputs.dtype, self._reading)
        if type(inputs).__name__ == "KerasTensor":  # of Keras 3
            return None if getattr(inputs, "ragged", False) else self._mask_operation(padding)(inputs)
        return mask_of(inputs, padding)

    def compute_output_shape(self, input_shape: Any) -> Any:
        """[..., dim] for ids of shape [...]; with a combiner without the last dimension of the ids."""
        shape = output_shape(input_shape, self._reading)
        return tf.TensorShape(shape) if isinstance(input_shape, tf.TensorShape) else shape

    def compute_output_spec(self, inputs: Any, weights: Any = None, training: Any = None) -> Any:
        """What Keras 3 has of the output before there is any."""
        del weights, training
        return output_spec(self._keras, inputs, self._reading, self.compute_dtype)  # type: ignore[attr-defined]

    # ---- Making it again ---------------------------------------------------------------------------------------------

    def get_config(self) -> dict[str, Any]:
        """What it takes to make the layer again, without its rows."""
        config = super().get_config()  # type: ignore[misc]
        return {**config, **self.options.config(self._keras, f"Layer '{self.name}'")}  # type: ignore[attr-defined]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The layer that `get_config` told of."""
        layer = super().from_config(config)  # type: ignore[misc]
        layer._name_was_given = None  # a config has a name in any case
        return layer


class PaddingMask:
    """What the operation is, beside an Operation of Keras 3, that masks padding in a functional model."""

    _keras: Any = None

    def __init__(self, padding: Any, name: str | None = None) -> None:
        super().__init__(name=name)  # type: ignore[call-arg]
        self.padding = padding

    def call(self, ids: Any) -> Any:
        """Which ids are not padding."""
        return mask_of(ids, self.padding)

    def compute_output_spec(self, ids: Any) -> Any:
        """The same as a KerasTensor."""
        return self._keras.KerasTensor(ids.shape, "bool")

    def get_config(self) -> dict[str, Any]:
        """What it takes to make the operation again."""
        return {"padding": self.padding, "name": self.name}  # type: ignore[attr-defined]


class NotIds(TypeError, NotImplementedError):
    """The input of a model of Keras 3 is of a dtype that is none of ids.

    Also a NotImplementedError, by which `Sequential` knows that it has to wait for real input: one without an `Input`
    takes the input for float32.
    """


def output_spec(keras: Any, inputs: Any, reading: Any, dtype: Any) -> Any:
    """The KerasTensor of Keras 3 of what is looked up for the ids `inputs`, another one."""
    check_dtype(inputs.dtype, reading, NotIds)
    shape = output_shape(inputs.shape, reading)
    # Of ragged ids the innermost dimension is pooled.
    ragged = getattr(inputs, "ragged", False) and (reading.combiner is None or len(shape) > 2)
    return keras.KerasTensor(shape, dtype, **({"ragged": True} if ragged else {}))
