"""`tf.train.CheckpointOptions(enable_async=True)`: a checkpoint holds what was there when it was asked for."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin

KEYS = np.arange(100)
OPTIMIZERS = {
    "v1": lambda: tf.compat.v1.train.AdamOptimizer(0.1),
    "tfplugin": lambda: tfplugin.optimizers.Adam(0.1),
    "keras": lambda: tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(0.1)),
    "keras, not fused": lambda: tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(0.01, momentum=0.9), fused=False),
    "tf_keras": lambda: tfplugin.OptimizerWrapper(tf_keras.optimizers.Adam(0.1)),
    "legacy": lambda: tfplugin.OptimizerWrapper(tf_keras.optimizers.legacy.Adam(0.1)),
}


def _step(table, dense, optimizer):
    parts = list(table) if isinstance(table, tfplugin.PartitionedKvVariable) else [table]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum((tf.nn.embedding_lookup(table, KEYS) * dense) ** 2)
    variables = [*parts, dense]
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_from_each_of_two(make, rows_of, partitioner, name, tmp_path, caplog):
    def made():
        return make(partitioner=partitioner, initializer=0.5), tf.Variable(tf.ones([4])), OPTIMIZERS[name]()

    def checkpoint(table, dense, optimizer):
        return tf.train.Checkpoint(table=table, dense=dense, optimizer=optimizer)

    trained = made()
    _step(*trained)
    saver, options, paths, expected = checkpoint(*trained), tf.train.CheckpointOptions(enable_async=True), [], []
    with caplog.at_level(logging.WARNING):
        for i in range(2):
            trained[0].remove(KEYS[:10])
            _step(*trained)
            paths.append(saver.save(str(tmp_path / f"c{i}"), options=options))
            _step(*trained)  # while the checkpoint is being written
            expected.append((rows_of(trained[0], KEYS), trained[1].numpy()))
        saver.sync()
    assert not [record for record in caplog.records if "KvVariable" in record.getMessage()]
    for path, (rows, dense) in zip(paths, expected, strict=True):
        restored = made()
        checkpoint(*restored).restore(path)
        _step(*restored)
        np.testing.assert_array_equal(rows_of(restored[0], KEYS), rows)
        np.testing.assert_array_equal(restored[1].numpy(), dense)


def test_the_copy_has_stamps_and_scores(make, rows_of, tmp_path):
    table = make(max_capacity=50, eviction="custom", initializer=1.0)
    table.sparse_read(KEYS[:50])
    table.set_scores(KEYS[:50], KEYS[:50][::-1])
    table.upsert(KEYS[:5], np.ones([5, 4], np.float32))
    table.upsert(KEYS[:5], np.ones([5, 4], np.float32))
    saver = tf.train.Checkpoint(table=table)
    path = saver.save(str(tmp_path / "c"), options=tf.train.CheckpointOptions(enable_async=True))
    saver.sync()
    at_once = tf.train.Checkpoint(table=table).save(str(tmp_path / "d"))

    def tensors(prefix):
        reader = tf.train.load_checkpoint(prefix)
        names = [name for name in reader.get_variable_to_dtype_map() if name.startswith("table/")]
        order = np.argsort(reader.get_tensor("table/.ATTRIBUTES/kv-keys"))
        return {name: v if np.ndim(v := reader.get_tensor(name)) == 0 else v[order] for name in names}

    copied, direct = tensors(path), tensors(at_once)
    assert copied.keys() == direct.keys() >= {"table/.ATTRIBUTES/kv-scores", "table/.ATTRIBUTES/kv-freqs"}
    for name, value in direct.items():
        np.testing.assert_array_equal(copied[name], value, err_msg=name)
