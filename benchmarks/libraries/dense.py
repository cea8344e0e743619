"""Stock TensorFlow: a dense `tf.Variable` whose rows are numbered, and `tf.gather`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import tensorflow as tf

v1 = tf.compat.v1


class Library:
    """The calls that a user of dense variables makes. What `kv` and `tfra` offer, too."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def versions(self) -> dict[str, str]:
        """Of the packages that are measured."""
        return {"tensorflow": tf.version.VERSION, "numpy": version("numpy")}

    @contextlib.contextmanager
    def session(self, graph: tf.Graph) -> Iterator[v1.Session]:
        """A session with the worker's number of threads. Not made the default one: several may be open at a time."""
        threads = {"intra_op_parallelism_threads": self.threads, "inter_op_parallelism_threads": self.threads}
        session = v1.Session(graph=graph, config=v1.ConfigProto(**threads))
        try:
            yield session
        finally:
            session.close()

    def table(self, name: str, rows: int, dim: int, initializer: Any, parts: int = 1) -> Any:
        """A table that can hold `rows` rows, in graph mode or eager mode."""
        assert parts == 1
        if tf.executing_eagerly():
            assert isinstance(initializer, float)
            return tf.Variable(tf.fill([rows, dim], initializer))
        if isinstance(initializer, float):
            initializer = v1.constant_initializer(initializer)
        return v1.get_variable(name, [rows, dim], initializer=initializer, use_resource=True)

    def ids(self, ids: tf.Tensor, rows: int) -> tf.Tensor:
        """Hashed ids as keys of a table of `rows` rows: here by remainder, so that some share a row."""
        return tf.math.floormod(ids, rows)

    def fill(self, table: Any, ids: tf.Tensor) -> tf.Operation | None:
        """Makes rows for ids, where that is not done by making the table."""
        return None

    def lookup(self, table: Any, ids: tf.Tensor, training: bool) -> tf.Tensor:
        """Rows of ids, without a gradient."""
        return tf.gather(table, ids)

    def trainable_lookup(self, table: Any, ids: tf.Tensor, unique: bool) -> tf.Tensor:
        """Rows of ids, for an optimizer. `unique`: no id occurs twice."""
        return tf.gather(table, ids)

    def pooled(self, table: Any, sparse_ids: tf.SparseTensor) -> tuple[tf.Tensor, Any]:
        """Means of the rows of ids, and what to take the gradient by."""
        return tf.nn.embedding_lookup_sparse(table, sparse_ids, None, combiner="mean"), table

    def optimizer(self, optimizer: v1.train.Optimizer) -> Any:
        """The optimizer that a user of the library would call."""
        return optimizer

    # ---- Models of Keras ---------------------------------------------------------------------------------------------

    def keras_embedding(self, rows: int, dim: int) -> Any:
        """A layer from ids to rows of `dim`."""
        keras = tf.keras

        class Hashed(keras.layers.Layer):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                super().__init__()
                self.embedding = keras.layers.Embedding(rows, dim)

            def call(self, ids: tf.Tensor) -> tf.Tensor:
                return self.embedding(tf.math.floormod(ids, rows))

        return Hashed()

    def keras_optimizer(self, optimizer: Any) -> Any:
        """What a model with such a layer is compiled with."""
        return optimizer
