"""A checkpoint of TensorFlow 1 and its graph, exported: stock operations only, and the training session's answers."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
from kvtools.cli.main import main
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError, CorruptFileError, UsageError
from kvtools.export_model import ModelExport, export_model
from kvtools.meta_file import trained_graph
from kvtools.stock_model.fields import messages, split
from kvtools.stock_model.meta_graph import MetaGraph
from kvtools.stock_model.stock_ops import foreign_nodes
from kvtools.stock_model.training_graph import Wanted
from tfplugin import dynamic_embedding as de
from tfplugin import sok

v1 = tf.compat.v1
WORDS = ["a", "b", "c"]
INPUTS = {"ids": "batch:0", "dense": "batch:1", "word": "word", "training": "training"}
OUTPUTS = {"click": "click", "pooled": "pooled:0", "many": "many:0", "looped": "looped:0", "others": "others:0"}


def partitioned(parts: int) -> Any:
    return v1.fixed_size_partitioner(parts)


def build(vocabulary: Path) -> tuple[Any, Any]:
    """A graph that trains and one that serves beside it, of an iterator's batch; return (training step, initializers)."""
    records = {"ids": np.arange(64, dtype=np.int64).reshape(16, 4), "dense": np.ones([16, 3], np.float32)}
    dataset = tf.data.Dataset.from_tensor_slices((records["ids"], records["dense"])).repeat().batch(8)
    batch = v1.data.make_one_shot_iterator(dataset).get_next(name="batch")
    ids, dense = batch
    word = v1.placeholder(tf.string, [None], "word")
    training = v1.placeholder(tf.bool, [], "training")
    rate = v1.placeholder_with_default(0.0, [], "rate")
    with v1.variable_scope("scope"):
        whole = tfplugin.get_kv_variable("emb", embedding_dim=4)
        parts = tfplugin.get_kv_variable("parts", embedding_dim=2, partitioner=partitioned(3))
        weights = v1.get_variable("w", [6, 2], use_resource=False)
        split_up = v1.get_variable("split", [10, 2], partitioner=partitioned(3), use_resource=False)
        scale = v1.get_variable("scale", [2], initializer=v1.ones_initializer(), use_resource=True)
        words = v1.get_variable("words", [6, 2], partitioner=partitioned(2), use_resource=True)
    unused = v1.get_variable("unused", [3])
    moving = v1.get_variable("moving", [2], trainable=False, use_resource=False)
    drawn = de.get_variable("drawn", dim=2, initializer=0.25)
    dynamic = sok.DynamicVariable(dimension=2, initializer="0.5", name="dynamic")
    table = tf.lookup.StaticVocabularyTable(
        tf.lookup.TextFileInitializer(
            str(vocabulary), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
        ),
        3,
    )
    known = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(WORDS, [7.0, 8.0, 9.0]), 0.0)

    def scores() -> Any:
        rows = tf.concat([tf.nn.embedding_lookup(whole, ids), tf.nn.embedding_lookup(parts, ids)], -1)
        hidden = tf.reduce_sum(rows, 1) @ weights * scale
        normed = tf.cond(training, lambda: hidden - tf.reduce_mean(hidden, 0), lambda: hidden - moving)
        return tf.nn.dropout(normed, rate=rate) + tf.reduce_sum(dense, 1, keepdims=True)

    with tf.name_scope("train"):
        logits = scores() + tf.reduce_sum(tf.nn.embedding_lookup(split_up, ids % 10)) + tf.reduce_sum(words) + unused[0]
        step = v1.train.AdamOptimizer(0.05).minimize(tf.reduce_mean((logits - 1.0) ** 2))
    with tfplugin.inference_mode():
        flat = tf.reshape(ids, [-1])
        by_word = tf.nn.embedding_lookup(words, table.lookup(word))
        click = scores() + by_word + tf.expand_dims(known.lookup(word), 1)
        tf.sigmoid(click + tf.reduce_sum(tf.nn.embedding_lookup(split_up, ids % 10), 1), name="click")
        sparse = tf.sparse.from_dense(ids)
        pooled = [
            tf.nn.embedding_lookup_sparse(whole, sparse, None, combiner="mean"),
            tf.nn.safe_embedding_lookup_sparse(parts, sparse, combiner="sqrtn"),
        ]
        tf.concat(pooled, 1, name="pooled")
        a, b = tfplugin.lookup_many([whole, parts], [ids, flat])
        tf.concat([tf.reshape(a, [-1, 4]), b], 1, name="many")

        def body(i: Any, total: Any) -> Any:
            picked = tf.cond(
                i % 2 > 0, lambda: tf.nn.embedding_lookup(whole, flat + i)[:, :2], lambda: tf.nn.embedding_lookup(parts, flat)
            )
            return i + 1, total + picked

        _, total = tf.while_loop(lambda i, _: i < 3, body, [tf.constant(0, tf.int64), tf.zeros([tf.size(flat), 2])])
        tf.identity(total, name="looped")
        served = sok.lookup_sparse(dynamic, tf.RaggedTensor.from_tensor(ids), combiners="sum")
        tf.concat([served, de.embedding_lookup(drawn, ids[:, 0], name="served")], 1, name="others")
    rows = np.random.default_rng(0).standard_normal((20, 2)).astype(np.float32)
    return step, [table.upsert(np.arange(20), rows) for table in (dynamic, drawn)]


def train(folder: Path, control_flow: str = "v2", steps: int = 3) -> Path:
    """Train, and save a checkpoint with its graph; return its prefix."""
    vocabulary = folder / "words.txt"
    vocabulary.write_text("".join(f"{word}\n" for word in WORDS))
    enabled = v1.control_flow_v2_enabled()
    (v1.enable_control_flow_v2 if control_flow == "v2" else v1.disable_control_flow_v2)()
    try:
        with tf.Graph().as_default(), v1.Session() as session:
            step, fill = build(vocabulary)
            saver = v1.train.Saver()
            session.run([v1.global_variables_initializer(), v1.tables_initializer()])
            session.run(fill)
            for _ in range(steps):
                session.run(step, {"training:0": True})
            saver.save(session, str(folder / "model.ckpt"), global_step=100)
    finally:
        (v1.enable_control_flow_v2 if enabled else v1.disable_control_flow_v2)()
    return folder / "model.ckpt-100"


def exported(prefix: Path, output: Path, wanted: Wanted, **options: Any) -> ModelExport:
    checkpoint = open_checkpoint(str(prefix))
    return export_model(checkpoint, output, graph=trained_graph(checkpoint, wanted), **options)


def request(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Keys that are there, keys that are not, and keys that come twice."""
    ids = random.integers(-5, 80, (8, 4))
    ids[:, 3] = ids[:, 0]
    return {
        "ids": ids,
        "dense": random.standard_normal((8, 3)).astype(np.float32),
        "word": random.choice(np.array([b"a", b"b", b"zz"], object), 8),
        "training": np.array(random.integers(0, 2), np.bool_),
    }


def trained_answers(prefix: Path, requests: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    """The answers of a training session that is restored."""
    with tf.Graph().as_default() as graph, v1.Session() as session:
        v1.train.import_meta_graph(f"{prefix}.meta").restore(session, str(prefix))
        session.run(v1.tables_initializer())
        fetched = {name: graph.get_tensor_by_name(f"{tensor.removesuffix(':0')}:0") for name, tensor in OUTPUTS.items()}
        return [
            session.run(fetched, {(INPUTS[n] if ":" in INPUTS[n] else f"{INPUTS[n]}:0"): v for n, v in one.items()})
            for one in requests
        ]


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(x.dtype == b[k].dtype and x.tobytes() == b[k].tobytes() for k, x in a.items())


_STOCK_ONLY = """
import pickle, sys
import tensorflow as tf
folder, requests = pickle.load(open(sys.argv[1], "rb"))
answers = {}
function = tf.saved_model.load(folder).signatures["serving_default"]
specs = function.structured_input_signature[1]
answers["function"] = [
    {key: tensor.numpy() for key, tensor in function(**{k: tf.constant(v, specs[k].dtype) for k, v in one.items()}).items()}
    for one in requests
]
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    signature = tf.compat.v1.saved_model.load(session, ["serve"], folder).signature_def["serving_default"]
    outputs = {key: info.name for key, info in signature.outputs.items()}
    answers["session"] = [session.run(outputs, {signature.inputs[k].name: v for k, v in one.items()}) for one in requests]
assert not any(name.startswith(("tfplugin", "kvtools")) for name in sys.modules)
pickle.dump(answers, open(sys.argv[2], "wb"))
"""


def stock_answers(folder: Path, export: Path, requests: list[dict[str, Any]]) -> dict[str, list[dict[str, np.ndarray]]]:
    """The answers of a process that has stock TensorFlow only: of a session, and of a function."""
    (folder / "requests").write_bytes(pickle.dumps((str(export), requests)))
    arguments = [sys.executable, "-c", _STOCK_ONLY, str(folder / "requests"), str(folder / "answers")]
    subprocess.run(arguments, check=True, cwd=folder, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    return pickle.loads((folder / "answers").read_bytes())


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def export(prefix: Path) -> Path:
    output = prefix.parent / "export"
    exported(prefix, output, Wanted(inputs=INPUTS, outputs=OUTPUTS))
    return output


def test_answers_are_the_training_sessions(prefix: Path, export: Path) -> None:
    random = np.random.default_rng(1)
    requests = [request(random) for _ in range(20)]
    expected = trained_answers(prefix, requests)
    got = stock_answers(prefix.parent, export, requests)
    for answers in got.values():
        assert all(same(a, b) for a, b in zip(expected, answers, strict=True))
