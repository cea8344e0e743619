"""Pairs of models of Keras that start from the same rows and weights: ours, and one with a dense ``Embedding``.

Both are given the same batches. Optimizers that move every row of a dense ``Embedding`` at each step, whether or not
the step has its id (Adam's moments, weight decay, averages), leave other rows of a table alone: so batches of which
losses and predictions are compared have every id of the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

import tfplugin
from tfplugin import keras_models

#: By the name that a test shows.
KERASES = {"keras3": tf.keras, "tf_keras": tf_keras}

VOCABULARY, LENGTH, DIM = 12, 3, 4


@dataclasses.dataclass
class Pair:
    """Two models of the same layers.

    Attributes:
      ours: with a table.
      dense: with ``Embedding(VOCABULARY, DIM)``.
      table: of ours.
      embedding: the layer of ours that holds it.
    """

    ours: Any
    dense: Any
    table: Any
    embedding: Any

    def compile(self, optimizer: Callable[[], Any], *args: Any, **kwargs: Any) -> Pair:
        """Compiles both, each with an optimizer of its own."""
        for model in self.models:
            model.compile(optimizer(), *(args or ("mse",)), **kwargs)
        return self

    @property
    def models(self) -> tuple[Any, Any]:
        """Ours, then the dense one."""
        return self.ours, self.dense

    def rows(self) -> tuple[np.ndarray, np.ndarray]:
        """The rows of the vocabulary, [VOCABULARY, DIM], of ours and of the dense one. NaN where a key has no row."""
        keys, rows = (column.numpy() for column in self.table.export())
        ours = np.full((VOCABULARY, DIM), np.nan)
        ours[keys] = rows
        return ours, np.asarray(self.dense.get_layer("embedding").get_weights()[0])


def batches(count: int = 4, seed: int = 0, repeated: bool = False) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids [n, LENGTH], labels [n, 1]) of `count` batches, each of which has every id: twice, or once."""
    numbers = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        ids = np.tile(np.arange(VOCABULARY), 2 if repeated else 1)
        numbers.shuffle(ids)
        ids = ids.reshape(-1, LENGTH).astype(np.int64)
        made.append((ids, numbers.normal(size=(len(ids), 1)).astype(np.float32)))
    return made


def held(keras: Any, table: Any, name: str = "embedding", **options: Any) -> Any:
    """A layer of a user's own that looks its table up: [n, LENGTH] -> [n, LENGTH, DIM]."""

    class Held(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__(name=name, **options)
            self.table = table

        def call(self, ids: Any) -> Any:
            return tf.nn.embedding_lookup(self.table, ids)

        def compute_output_shape(self, shape: Any) -> Any:
            return (*shape, table.dim)

    return Held()


def by_hand(keras: Any, **options: Any) -> Any:
    """A layer that holds a `KvVariable`, with `options` of it."""
    return held(keras, tfplugin.get_kv_variable("pair", embedding_dim=DIM, **options))


def model_of(keras: Any, embedding: Any, name: str = "ctr", hidden: int = 0, **inputs: Any) -> Any:
    """A model of [n, LENGTH] ids: the embedding, and dense layers over the rows of an example."""
    ids = keras.Input((LENGTH,), dtype="int64", **inputs)
    values = keras.layers.Flatten()(embedding(ids))
    if hidden:
        values = keras.layers.Dense(hidden, "relu")(values)
    return keras.Model(ids, keras.layers.Dense(1)(values), name=name)


def pair(
    keras: Any,
    embedding: Callable[..., Any] = by_hand,
    build: Callable[..., Any] = model_of,
    initial: float | None = None,
    seed: int = 0,
    dense_options: dict[str, Any] | None = None,
    **options: Any,
) -> Pair:
    """Two models that start from the same rows and weights.

    Args:
      keras: one of `KERASES`.
      embedding: from a Keras and `options` makes the layer of ours.
      build: from a Keras and such a layer, called "embedding", makes a model.
      initial: what all rows start from, none of which are in the table yet. None: from normal numbers of `seed`, which
        have been put into it.
      dense_options: of the dense ``Embedding``.
    """
    numbers = np.random.default_rng(seed)
    rows = numbers.normal(size=(VOCABULARY, DIM)).astype(np.float32)
    if initial is not None:
        rows = np.full_like(rows, initial)
        options.setdefault("initializer", initial)
    layer = embedding(keras, **options)
    ours = build(keras, layer)
    dense = build(keras, keras.layers.Embedding(VOCABULARY, DIM, name="embedding", **(dense_options or {})))
    (table,) = keras_models.held_by(layer)
    if initial is None:
        table.upsert(np.arange(VOCABULARY), rows)
    dense.get_layer("embedding").set_weights([rows])
    mine, others = (
        [one for one in model.layers if one.name != "embedding" and one.get_weights()] for model in (ours, dense)
    )
    for one, other in zip(mine, others, strict=True):
        other.set_weights(one.get_weights())
    return Pair(ours, dense, table, layer)


def assert_alike(models: Pair, ids: Any, bound: float = 1e-5) -> None:
    """That both predict the same, and have the same rows for the whole vocabulary."""
    # As float32: NumPy 1 does not compare bfloat16.
    ours, dense = (np.asarray(model.predict(ids, verbose=0), np.float32) for model in models.models)
    np.testing.assert_allclose(ours, dense, rtol=bound, atol=bound)
    ours, dense = models.rows()
    np.testing.assert_allclose(ours, dense, rtol=bound, atol=bound)


def assert_same_losses(actual: Iterable[float], expected: Iterable[float]) -> None:
    """That two models which hold the same train alike.

    To the last bit they need not: a loaded model of tf_keras runs in a graph, where a matrix product and its bias are
    one operation, which some processors round differently.
    """
    np.testing.assert_allclose(list(actual), list(expected), rtol=1e-5)


def losses(model: Any, data: list[tuple[Any, ...]], **options: Any) -> Iterator[float]:
    """Trains a model by ``train_on_batch``, and gives the loss of each batch."""
    for batch in data:
        model.reset_metrics()
        yield float(np.ravel(model.train_on_batch(*batch, **options))[0])
