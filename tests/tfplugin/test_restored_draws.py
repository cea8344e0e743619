"""Random draws of training, stochastic rounding and admission by probability, go on from a save where they stopped."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfplugin
import tfplugin.dynamic_embedding
import tfplugin.keras
from kvtools.chain_fold import merge_chain
from kvtools.dialects.bundle import Bundle
from kvtools.dialects.detect import open_checkpoint
from kvtools.reshard import reshard
from tfplugin.policies import ProbabilityAdmission

v1 = tf.compat.v1
KEYS = np.arange(20)
STEPS = 12
CUT = 5


class Job:
    """A process that trains: a table of bfloat16 rows and a dense variable, rounded at random."""

    def __init__(self, parts: int = 1, make: Callable[[], Any] | None = None) -> None:
        partitioner = v1.fixed_size_partitioner(parts) if parts > 1 else None
        self.table = tf.get_kv_variable(
            "t", embedding_dim=8, value_dtype=tf.bfloat16, initializer=1.0, partitioner=partitioner
        )
        self.dense = tf.Variable(tf.ones([4, 8], tf.bfloat16))
        self.optimizer = (make or (lambda: tfplugin.optimizers.Adam(1e-3, stochastic_rounding=True)))()
        self.checkpoint = tf.train.Checkpoint(table=self.table, dense=self.dense, optimizer=self.optimizer)

    def train(self, steps: range) -> None:
        variables = [*self.table] if isinstance(self.table, tfplugin.PartitionedKvVariable) else [self.table]
        if isinstance(self.optimizer, tfplugin.optimizers.Adam):
            variables.append(self.dense)
        for step in steps:
            with tf.GradientTape() as tape:
                rows = self.table.sparse_read(KEYS[step % 3 :], output_dtype=tf.float32)
                loss = tf.reduce_sum(rows) + tf.reduce_sum(tf.cast(self.dense, tf.float32))
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def rows(self) -> np.ndarray:
        rows = self.table.sparse_read(KEYS, training=False, output_dtype=tf.float32).numpy()
        return np.concatenate([rows, np.float32(self.dense.numpy())])


def by_checkpoint(job: Job, folder: Path, parts: int) -> Job:
    again = Job(parts)
    again.checkpoint.restore(job.checkpoint.write(str(folder / "a")))
    return again


def by_an_asynchronous_checkpoint(job: Job, folder: Path, parts: int) -> Job:
    path = job.checkpoint.save(str(folder / "a"), tf.train.CheckpointOptions(enable_async=True))
    job.checkpoint.sync()
    again = Job(parts)
    again.checkpoint.restore(path)
    return again


def by_a_chain(job: Job, folder: Path, parts: int) -> Job:
    """Of a full that is older than the draws, and an increment."""
    manager = tfplugin.CheckpointManager(job.checkpoint, folder, delta_every=0.0)
    manager.save()
    job.train(range(CUT - 1, CUT))
    manager.save()
    manager.close()
    assert [path.name for path in sorted(folder.glob("*.delta.index"))] == ["ckpt-2.delta.index"]
    again = Job(parts)
    manager = tfplugin.CheckpointManager(again.checkpoint, folder, delta_every=0.0)
    manager.restore_or_initialize()
    manager.close()
    return again


def by_a_folded_chain(job: Job, folder: Path, parts: int) -> Job:
    by_a_chain(job, folder, parts)
    merge_chain(folder, folder / "whole")
    again = Job(parts)
    again.checkpoint.restore(str(folder / "whole"))
    return again


def by_reshard(job: Job, folder: Path, parts: int) -> Job:
    reshard(open_checkpoint(job.checkpoint.write(str(folder / "a"))), folder / "b", 3)
    again = Job(parts)
    again.checkpoint.restore(str(folder / "b"))
    return again


WAYS = [by_checkpoint, by_an_asynchronous_checkpoint, by_a_chain, by_a_folded_chain, by_reshard]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("parts", "then"), [(1, 1), (2, 2), (2, 3)])
def test_a_run_that_is_restored_rounds_as_one_that_was_not_cut(way, parts, then, tmp_path):
    uncut, cut = Job(parts), Job(parts)
    uncut.train(range(STEPS))
    cut.train(range(CUT - (way in (by_a_chain, by_a_folded_chain))))
    again = way(cut, tmp_path, then)
    again.train(range(CUT, STEPS))
    np.testing.assert_array_equal(again.rows(), uncut.rows())


def test_a_saver_brings_the_draws(tmp_path):
    def run(session: Any, steps: int) -> None:
        for _ in range(steps):
            session.run("step")

    def build() -> Any:
        table = tf.get_kv_variable("t", embedding_dim=8, value_dtype=tf.bfloat16, initializer=1.0)
        loss = tf.reduce_sum(table.sparse_read(KEYS, output_dtype=tf.float32))
        tfplugin.optimizers.SGD(1e-3, stochastic_rounding=True).minimize(loss, name="step")
        return table.sparse_read(KEYS, training=False, output_dtype=tf.float32)

    found = []
    for cut in (None, CUT):
        with tf.Graph().as_default(), v1.Session() as session:
            rows = build()
            saver = v1.train.Saver()
            session.run(v1.global_variables_initializer())
            run(session, cut or STEPS)
            path = saver.save(session, str(tmp_path / "a"))
            if cut is None:
                found.append(session.run(rows))
    with tf.Graph().as_default(), v1.Session() as session:
        rows = build()
        v1.train.Saver().restore(session, path)
        run(session, STEPS - CUT)
        np.testing.assert_array_equal(session.run(rows), found[0])


def test_weights_of_keras_bring_the_draws(tmp_path):
    def build() -> Any:
        optimizer = tfplugin.optimizers.Adam(1e-3, stochastic_rounding=True)
        table = tfplugin.keras.Embedding(
            8, name="item", combiner="sum", dtype="bfloat16", initializer=1.0, optimizer=optimizer
        )
        model = keras.Sequential([keras.Input((2,), dtype="int64"), table])
        model.compile("sgd", lambda y, rows: tf.reduce_sum(tf.cast(rows, tf.float32)))
        return model

    def train(model: Any, steps: int) -> None:
        for _ in range(steps):
            model.train_on_batch(KEYS.reshape(10, 2), np.zeros((10, 8)))

    model, again = build(), build()
    train(model, CUT)
    model.save_weights(tmp_path / "m.weights.h5")
    train(again, 1)
    again.load_weights(tmp_path / "m.weights.h5")
    for one in (model, again):
        train(one, STEPS - CUT)
    rows = [one.layers[0].table.sparse_read(KEYS, training=False, output_dtype=tf.float32) for one in (model, again)]
    np.testing.assert_array_equal(*rows)


@pytest.mark.parametrize("how", ["file", "deepcopy"])
def test_a_copy_of_a_model_of_keras_admits_the_keys_that_the_model_admits(how, tmp_path):
    table = tfplugin.keras.Embedding(8, name="item", combiner="sum", admission=ProbabilityAdmission(0.1))
    model = keras.Sequential([keras.Input((2,), dtype="int64"), table])
    model.compile("adam", "mse")
    ids = np.arange(300).reshape(150, 2)
    model.fit(ids, np.zeros((150, 8)), batch_size=150, epochs=3, verbose=0)
    model.save(tmp_path / "m.keras")
    again = copy.deepcopy(model) if how == "deepcopy" else keras.models.load_model(tmp_path / "m.keras")
    keys = []
    for one in (model, again):
        one.fit(ids, np.zeros((150, 8)), batch_size=150, epochs=3, verbose=0)
        keys.append(np.sort(one.layers[0].table.export()[0].numpy()))
    assert 60 < len(keys[0]) < 250
    np.testing.assert_array_equal(*keys)


def test_jobs_of_one_step_each_add_up_to_what_a_long_one_moves(tmp_path):
    def job() -> tuple[Any, Any]:
        table = tf.get_kv_variable("t", embedding_dim=64, value_dtype=tf.bfloat16, initializer=1.0)
        return table, tfplugin.optimizers.SGD(1e-4, stochastic_rounding=True)

    table, optimizer = job()
    for _ in range(200):
        path = tf.train.Checkpoint(table=table).write(str(tmp_path / "a"))
        table, optimizer = job()
        tf.train.Checkpoint(table=table).restore(path)
        optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([20, 64]), tf.constant(KEYS)), table)])
    rows = table.sparse_read(KEYS, training=False, output_dtype=tf.float32).numpy()
    assert abs(rows.mean() - 0.98) < 0.002
    assert (rows == 1).mean() < 0.05


def kvmeta(prefix: Any) -> list[dict[str, Any]]:
    bundle = Bundle(Path(prefix))
    return [json.loads(bundle.strings(name)[0]) for name in bundle.entries if name.endswith("-kvmeta")]


def test_what_draws_nothing_says_nothing_of_it_and_goes_on_with_its_own(tmp_path):
    job = Job(make=lambda: tfplugin.OptimizerWrapper(keras.optimizers.Adam(1e-3)))
    job.train(range(2))
    path = job.checkpoint.write(str(tmp_path / "a"))
    assert all("draws" not in meta for meta in kvmeta(path))
    drawn = Job()
    drawn.train(range(3))
    tf.train.Checkpoint(table=drawn.table).restore(path)
    [meta] = kvmeta(tf.train.Checkpoint(table=drawn.table).write(str(tmp_path / "b")))
    assert meta["draws"] == 3


def test_a_run_that_is_restored_admits_the_keys_that_one_that_was_not_cut_admits(partitioner, tmp_path):
    def job() -> Any:
        admission = ProbabilityAdmission(0.1)
        return tf.get_kv_variable("t", embedding_dim=2, admission=admission, partitioner=partitioner)

    def look_up(table: Any) -> None:
        for _ in range(3):
            table.sparse_read(np.arange(300))
            table.sparse_read(np.arange(300), training=False)  # draws nothing

    uncut, cut, again = job(), job(), job()
    for table in (uncut, uncut, cut):
        look_up(table)
    tf.train.Checkpoint(table=again).restore(tf.train.Checkpoint(table=cut).write(str(tmp_path / "a")))
    look_up(again)
    keys = [np.sort(table.export()[0].numpy()) for table in (uncut, again)]
    assert 60 < len(keys[0]) < 250
    np.testing.assert_array_equal(*keys)


def test_updates_that_admit_keys_draw_on_from_a_checkpoint(tmp_path):
    def job() -> tuple[Any, Any]:
        variable = tfplugin.dynamic_embedding.get_variable("t", dim=2, admission=ProbabilityAdmission(0.1))
        return variable, tfplugin.dynamic_embedding.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1))

    def update(variable: Any, optimizer: Any) -> None:
        for _ in range(3):
            with tf.GradientTape() as tape:
                rows, shadow = tfplugin.dynamic_embedding.embedding_lookup(
                    variable, tf.range(300, dtype=tf.int64), name=f"look_up_{id(variable)}", return_trainable=True
                )
                loss = tf.reduce_sum(rows)
            optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])

    uncut, cut, again = job(), job(), job()
    for one in (uncut, uncut, cut):
        update(*one)
    tf.train.Checkpoint(table=again[0]).restore(tf.train.Checkpoint(table=cut[0]).write(str(tmp_path / "a")))
    update(*again)
    keys = [np.sort(variable.export()[0].numpy()) for variable, _ in (uncut, again)]
    assert 60 < len(keys[0]) < 250
    np.testing.assert_array_equal(*keys)
