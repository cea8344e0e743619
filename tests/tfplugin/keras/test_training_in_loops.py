"""`fit` trains tables that a model looks up in loops and branches as it trains dense ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

BATCH = np.array([[1, 2, 3], [2, 3, 4], [1, 1, 5]])


def in_a_while_loop(lookup: Any, ids: Any) -> Any:
    shapes = [tf.TensorShape([]), tf.TensorShape([None, 2])]
    body = lambda i, total: (i + 1, 0.5 * total + lookup(ids[:, i : i + 1]) ** 2)  # noqa: E731
    return tf.while_loop(lambda i, _: i < 3, body, [0, tf.zeros([tf.shape(ids)[0], 2])], shape_invariants=shapes)[1]


def in_a_map(lookup: Any, ids: Any) -> Any:
    return tf.map_fn(lambda row: lookup(row[None])[0] ** 2, ids, fn_output_signature=tf.float32)


def in_a_vectorized_map(lookup: Any, ids: Any) -> Any:
    return tf.vectorized_map(lambda row: lookup(row[None])[0] ** 2, ids)


def in_one_branch(lookup: Any, ids: Any) -> Any:
    return tf.cond(tf.reduce_sum(ids) > 0, lambda: lookup(ids), lambda: tf.zeros([tf.shape(ids)[0], 2]))


def in_a_branch_not_taken(lookup: Any, ids: Any) -> Any:
    return lookup(ids) + tf.cond(tf.reduce_sum(ids) < 0, lambda: lookup(ids), lambda: tf.zeros([tf.shape(ids)[0], 2]))


def model_around(keras: Any, embedding: Any, of: Any, ids: np.ndarray) -> Any:
    """A model that looks ids up in `embedding`, by the function `of`, which is given the sum of each row's."""

    class Around(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = embedding

        def build(self, shape: Any) -> None:
            embedding.build((None, 1))
            super().build(shape)

        def call(self, ids: Any) -> Any:
            def lookup(ids: Any) -> Any:
                rows = self.embedding(ids)
                return rows if rows.shape.rank == 2 else tf.reduce_sum(rows, 1)

            return of(lookup, ids)

    layers = [keras.Input(ids.shape[1:], dtype="int64"), Around(), keras.layers.Dense(1, kernel_initializer="ones")]
    return keras.Sequential(layers)


def rnn_around(keras: Any, embedding: Any, of: Any, ids: np.ndarray) -> Any:
    """A model of an RNN, whose cell looks ids up in `embedding`."""

    class Cell(keras.layers.Layer):
        state_size = 2

        def __init__(self) -> None:
            super().__init__()
            self.embedding = embedding

        def build(self, shape: Any) -> None:
            embedding.build((None, 1))
            super().build(shape)

        def call(self, ids: Any, states: Any) -> Any:
            rows = self.embedding(tf.cast(ids, tf.int64))
            state = 0.5 * states[0] + (rows if rows.shape.rank == 2 else rows[:, 0])
            return state, [state]

    assert of is None
    rnn, dense = keras.layers.RNN(Cell()), keras.layers.Dense(1, kernel_initializer="ones")
    return keras.Sequential([keras.Input((ids.shape[1], 1)), rnn, dense])


def rows_after_fit(keras: Any, build: Any, embedding: Any, of: Any) -> np.ndarray:
    model = build(keras, embedding, of, BATCH)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    ids = BATCH[:, :, None] if of is None else BATCH
    model.fit(ids, np.zeros((len(BATCH), 1)), epochs=2, batch_size=len(BATCH), verbose=0)
    if hasattr(embedding, "table"):
        return np.asarray(embedding.table.sparse_read(np.arange(1, 6), training=False))
    return np.asarray(embedding.get_weights()[0][1:6])


def check(keras: Any, layer: Any, build: Any, of: Any) -> None:
    ours = rows_after_fit(keras, build, layer, of)
    dense = rows_after_fit(keras, build, keras.layers.Embedding(10, 2, embeddings_initializer="ones"), of)
    np.testing.assert_allclose(ours, dense, rtol=1e-6)
    assert np.all(dense != 1.0)


@pytest.mark.parametrize("of", [in_a_while_loop, in_a_map, in_a_vectorized_map, in_one_branch, in_a_branch_not_taken])
def test_a_layer_in_a_loop_or_a_branch(both_kerases: Any, layers: Any, of: Any) -> None:
    check(both_kerases, layers.Embedding(2, initializer=1.0), model_around, of)


@pytest.mark.parametrize("parts", [None, 2])
def test_a_layer_with_a_combiner_in_a_loop(both_kerases: Any, layers: Any, parts: int | None) -> None:
    layer = layers.Embedding(2, initializer=1.0, combiner="sum", parts=parts)
    check(both_kerases, layer, model_around, in_a_while_loop)


def test_the_cell_of_an_rnn(both_kerases: Any, layers: Any) -> None:
    check(both_kerases, layers.Embedding(2, initializer=1.0), rnn_around, None)


def test_a_collection_in_a_loop(both_kerases: Any, layers: Any) -> None:
    features = {
        name: layers.FeatureConfig(
            name, layers.TableConfig(f"table_{name}", embedding_dim=2, initializer=1.0, combiner="sum")
        )
        for name in ("a", "b")
    }
    collection = layers.EmbeddingCollection(features)

    class Both(both_kerases.layers.Layer):
        """One looked up in the loop, the other outside."""

        def __init__(self) -> None:
            super().__init__()
            self.collection = collection

        def build(self, shape: Any) -> None:
            super().build(shape)

        def call(self, ids: Any) -> Any:
            rows = self.collection({"a": ids, "b": ids})
            lookup = lambda ids: self.collection({"a": ids, "b": ids})["a"]  # noqa: E731
            return in_a_while_loop(lookup, ids) + rows["b"]

    keras = both_kerases
    model = keras.Sequential(
        [keras.Input((3,), dtype="int64"), Both(), keras.layers.Dense(1, kernel_initializer="ones")]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse")
    model.fit(BATCH, np.zeros((3, 1)), batch_size=3, verbose=0)

    a, b = (tf.Variable(tf.ones([10, 2])) for _ in range(2))
    with tf.GradientTape() as tape:
        inside = in_a_while_loop(lambda ids: tf.reduce_sum(tf.gather(a, ids), 1), BATCH)
        outputs = tf.reduce_sum(inside + tf.reduce_sum(tf.gather(b, BATCH), 1), 1)
        loss = tf.reduce_mean(outputs**2)
    for table, dense, gradient in zip(collection.tables.values(), (a, b), tape.gradient(loss, [a, b]), strict=True):
        dense.assign_sub(0.01 * tf.convert_to_tensor(gradient))
        rows = table.sparse_read(np.arange(1, 6), training=False)
        np.testing.assert_allclose(rows, dense[1:6], rtol=1e-5)
        assert np.all(rows != 1.0)
