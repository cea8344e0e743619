"""A model with a signature for each way in which its halves may be cut."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import tfplugin
from tfplugin import dynamic_embedding as de

IDS = tf.TensorSpec([None], tf.int64)
SIGNATURES = ("serving_default", "words", "pooled", "many", "begun", "widened", "wide", "nothing")
PLAIN = ("serving_default", "begun", "widened", "wide")
"""Signatures whose ids are inputs as they are."""


class Ranker(tf.Module):
    """`number` makes models of different rows and of different dense parts."""

    def __init__(self, vocabulary: Path, number: int = 0) -> None:
        super().__init__()
        random = np.random.default_rng(number)
        parts = tf.compat.v1.fixed_size_partitioner
        self.user = tfplugin.get_kv_variable("user", embedding_dim=4)
        self.item = tfplugin.get_kv_variable("item", embedding_dim=3, partitioner=parts(3), key_dtype=tf.int32)
        self.half = tfplugin.get_kv_variable(
            "half", embedding_dim=3, key_dtype=tf.uint64, value_dtype=tf.float16, partitioner=parts(2)
        )
        self.drawn = de.get_variable("drawn", dim=5, initializer=tf.keras.initializers.RandomUniform(-1, 1))
        self.weights = tf.Variable(tf.constant(random.standard_normal((7, 2)), tf.float32))
        index = tf.lookup.TextFileIndex
        self.words_table = tf.lookup.StaticVocabularyTable(
            tf.lookup.TextFileInitializer(str(vocabulary), tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER),
            3,
        )
        self.code = de.get_variable("code", dim=2, value_dtype=tf.int64, initializer=0)
        self.code.upsert(np.arange(20), random.integers(2**60, 2**63, (20, 2)))
        self.exact = tfplugin.get_kv_variable("exact", embedding_dim=2, value_dtype=tf.float64)
        self.exact.upsert(np.arange(20), random.standard_normal((20, 2)))
        tables = {
            self.user: np.arange(-5, 40),
            self.item: np.arange(-5, 20),
            self.half: np.array([1, 2, 2**63 + 5], np.uint64),
        }
        for table, keys in tables.items():
            rows = random.standard_normal((len(keys), table.dim))
            table.upsert(tf.constant(keys, table.key_dtype), tf.constant(rows, table.dtype))
        self.drawn.upsert(np.arange(9), random.standard_normal((9, 5)).astype(np.float32))

    @tf.function(
        input_signature=[IDS, tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.float32, "price"), IDS]
    )
    def serving_default(self, user_id: Any, item_id: Any, price: Any, unused: Any) -> Any:
        a, b = tf.nn.embedding_lookup(self.user, user_id), tf.nn.embedding_lookup(self.item, item_id)
        return {"click": tf.sigmoid(tf.concat([a, b], 1) @ self.weights) * price[:, tf.newaxis]}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string), IDS])
    def words(self, word: Any, item: Any) -> Any:
        by_word = tf.nn.embedding_lookup(self.user, self.words_table.lookup(word))
        hashed = tf.nn.embedding_lookup(self.user, tf.strings.to_hash_bucket_fast(word, 30))
        tf.debugging.assert_all_finite(by_word, "rows")
        return {"sum": by_word + hashed, "item": tf.nn.embedding_lookup(self.item, tf.cast(item, tf.int32))}

    @tf.function(
        input_signature=[tf.SparseTensorSpec([None, None], tf.int64), tf.RaggedTensorSpec([None, None], tf.int32)]
    )
    def pooled(self, sparse: Any, ragged: Any) -> Any:
        safe = tf.nn.safe_embedding_lookup_sparse
        return {
            "mean": tf.nn.embedding_lookup_sparse(self.user, sparse, None, combiner="mean"),
            "filled": safe(self.user, sparse, combiner="sqrtn", default_id=3),
            "sum": tf.nn.embedding_lookup_sparse(self.item, ragged, None, combiner="sum"),
            "begun": de.embedding_lookup_sparse(self.drawn, sparse, None, name="pooled"),
        }

    @tf.function(input_signature=[IDS, tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.uint64)])
    def many(self, user: Any, item: Any, half: Any) -> Any:
        a, b = tfplugin.lookup_many([self.user, self.item], [user, item])
        return {
            "a": a,
            "b": b,
            "half": tf.gather(self.half, half),
            "half_found": self.half.contains(half),
            "half_part": self.half[1].sparse_read(half),
            "sizes": tf.stack([self.user.size(), self.item.size(), self.item[1].size()]),
        }

    @tf.function(input_signature=[IDS])
    def begun(self, ids: Any) -> Any:
        rows, there = self.drawn.lookup(ids, return_exists=True)
        return {"rows": rows, "there": there, "initial": self.user.sparse_read(ids, training=False, missing="initial")}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int32)])
    def widened(self, ids: Any) -> Any:
        return {"y": tf.nn.embedding_lookup(self.user, tf.cast(ids, tf.int64))}

    @tf.function(input_signature=[IDS])
    def wide(self, ids: Any) -> Any:
        """Rows that float32 does not hold."""
        code, exact = self.code.lookup(ids), tf.nn.embedding_lookup(self.exact, ids)
        return {"code": code, "exact": exact, "sum": code + 1}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.float32)])
    def nothing(self, x: Any) -> Any:
        return {"y": x * self.weights[0, 0]}

    @tf.function(input_signature=[IDS])
    def branch(self, ids: Any) -> Any:
        many = tf.size(ids) > 2
        return {"y": tf.cond(many, lambda: tf.nn.embedding_lookup(self.user, ids), lambda: tf.zeros([1, 4]))}

    @tf.function(input_signature=[IDS])
    def chained(self, ids: Any) -> Any:
        first = tf.nn.embedding_lookup(self.user, ids)
        return {"y": tf.nn.embedding_lookup(self.item, tf.cast(first[:, 0] * 10, tf.int32))}


def save(folder: Path, number: int = 0, *others: str, names: tuple[str, ...] = SIGNATURES) -> Path:
    """Save a model with the signatures `names` and `others`."""
    vocabulary = folder / f"words_{number}.txt"
    vocabulary.write_text("a\nb\nc\n" if number % 2 == 0 else "c\nb\na\n")
    module = Ranker(vocabulary, number)
    path = folder / "-".join(["source", str(number), *others])
    tf.saved_model.save(module, str(path), signatures={name: getattr(module, name) for name in (*names, *others)})
    return path


def request(signature: str, random: np.random.Generator, n: int = 8) -> dict[str, np.ndarray]:
    """Keys that are there, keys that are not, and keys that come twice."""

    def ids(dtype: type, count: int = n) -> np.ndarray:
        drawn = random.integers(-9, 50, count)
        return np.concatenate([drawn, drawn[:2]])[:count].astype(dtype)

    if signature == "serving_default":
        price = random.standard_normal(n).astype(np.float32)
        return {"user_id": ids(np.int64), "item_id": ids(np.int32), "price": price, "unused": ids(np.int64)}
    if signature == "words":
        return {"word": random.choice(np.array([b"a", b"b", b"zz", b"?"], object), n), "item": ids(np.int64)}
    if signature == "many":
        half = random.choice(np.array([1, 2, 3, 2**63 + 5, 2**63 + 6], np.uint64), n)
        return {"user": ids(np.int64), "item": ids(np.int32), "half": half}
    if signature == "nothing":
        return {"x": random.standard_normal(n).astype(np.float32)}
    if signature != "pooled":
        return {"ids": ids(np.int32 if signature == "widened" else np.int64)}
    sizes = random.integers(0, 4, n)
    sizes[0] = 3
    places = np.array([(row, column) for row in range(n) for column in range(sizes[row])], np.int64)
    return {
        "sparse": places,
        "sparse_1": ids(np.int64, len(places)),
        "sparse_2": np.array([n, 4], np.int64),
        "ragged": ids(np.int32, len(places)),
        "ragged_1": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
    }


def asked(model: Any, signature: str, fed: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return what a loaded model answers."""
    function = model.signatures[signature]
    specs = function.structured_input_signature[1]
    inputs = {key: tf.constant(value, specs[key].dtype) for key, value in fed.items()}
    return {key: tensor.numpy() for key, tensor in function(**inputs).items()}


def same(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> bool:
    """Tell whether two answers are the same to the bit."""
    return a.keys() == b.keys() and all(
        x.dtype == b[key].dtype and x.shape == b[key].shape and x.tobytes() == b[key].tobytes() for key, x in a.items()
    )
