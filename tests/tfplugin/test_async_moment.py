"""Asynchronous checkpoints while training goes on: they hold one moment, and what fails is told."""

from __future__ import annotations

import contextlib
import functools
import resource
import threading

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin

ROWS, DIM = 60_000, 16
ASYNC = tf.train.CheckpointOptions(enable_async=True)


class Trained:
    """A table and a dense variable under Adam."""

    def __init__(self, partitioner=None):
        self.table = tf.get_kv_variable("v", DIM, initializer=0.5, partitioner=partitioner)
        self.dense = tf.Variable(tf.ones([DIM]))
        self.optimizer = tfplugin.optimizers.Adam(0.01)

    def step(self, keys, scale=1.0):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.nn.embedding_lookup(self.table, keys) * self.dense - 3.0) ** 2) * scale
        variables = [*self.table._kv_parts, self.dense]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    def checkpoint(self):
        return tf.train.Checkpoint(table=self.table, dense=self.dense, optimizer=self.optimizer)

    def state(self):
        """Every row with its slots and stamps, by key, and the dense variable."""
        keys, values = self.table.export()
        order = np.argsort(keys)
        slots = sorted(set.union(*[part.slot_names() for part in self.table._kv_parts]))
        columns = [np.sort(keys), values.numpy()[order]]
        for slot in slots:
            slot_keys, rows = self.table.export(slot)
            columns.append(rows.numpy()[np.argsort(slot_keys)])
        columns += [np.asarray(stamp) for stamp in self.table.stamps(columns[0])]
        return [*columns, self.dense.numpy()]


def _equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def test_it_holds_the_moment_bit_for_bit_while_threads_train_insert_and_remove(tmp_path, partitioner):
    trained = Trained(partitioner)
    keys = np.random.default_rng(0).permutation(ROWS)
    trained.step(keys)
    trained.step(keys[: ROWS // 2])
    saver = trained.checkpoint()
    paths, expected = [], []
    for save in range(2):
        expected.append(trained.state())
        stop, errors = threading.Event(), []

        def train(seed, stop=stop, errors=errors, save=save):
            rng = np.random.default_rng(seed)
            try:
                with tf.device("CPU:0"):
                    while not stop.is_set():
                        trained.step(rng.integers(0, ROWS, 5000), 1e30)  # what is torn shows as 1e38
                        trained.step(rng.integers(ROWS * (save + 1), ROWS * (save + 2), 500))
                        trained.table.remove(rng.integers(0, ROWS, 50))
            except Exception as error:
                errors.append(error)

        paths.append(saver.save(str(tmp_path / "c"), options=ASYNC))
        threads = [threading.Thread(target=train, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        saver.sync()
        stop.set()
        for thread in threads:
            thread.join()
        assert not errors
    assert not np.array_equal(trained.table.export()[1], expected[1][1])
    for path, state in zip(paths, expected, strict=True):
        restored = Trained(partitioner)
        restored.checkpoint().restore(path).expect_partial()
        _equal(restored.state(), state)


@contextlib.contextmanager
def _files_of_at_most(size):
    """As on a disk that is full, for this process."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("tell", ["sync", "save"])
def test_what_failed_is_told_by_the_next_sync_or_save_and_training_goes_on(tmp_path, tell):
    trained = Trained()
    trained.step(np.arange(ROWS))
    saver = trained.checkpoint()
    first = saver.save(str(tmp_path / "c"), options=ASYNC)
    saver.sync()
    kept = sorted(path.name for path in tmp_path.iterdir())
    with _files_of_at_most(1 << 20):
        saver.save(str(tmp_path / "c"), options=ASYNC)
        for _ in range(3):
            trained.step(np.arange(ROWS))  # nobody waits for what is not saved
        with pytest.raises(tf.errors.OpError, match="File too large"):
            getattr(saver, tell)(*([] if tell == "sync" else [str(tmp_path / "c"), ASYNC]))
    trained.step(np.arange(ROWS))
    # The old one is there and whole, and nothing is left of the other.
    assert tf.train.latest_checkpoint(str(tmp_path)) == first
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == kept
    expected = trained.state()
    path = saver.save(str(tmp_path / "c"), options=ASYNC)
    saver.sync()
    restored = Trained()
    restored.checkpoint().restore(path)
    _equal(restored.state(), expected)


@pytest.mark.parametrize("by", ["checkpoint", "manager"])
def test_saves_that_fail_in_the_background_fail_no_step(tmp_path, by):
    trained = Trained()
    trained.step(np.arange(5000))
    stop, told = threading.Event(), []

    def save():
        if by == "checkpoint":
            saver = trained.checkpoint()
            begin = functools.partial(saver.write, str(tmp_path / "c"), options=ASYNC)
        else:
            saver = tfplugin.CheckpointManager(trained.checkpoint(), str(tmp_path / "chain"))
            begin = saver.save
        while not stop.is_set():
            try:
                begin()
                saver.sync()
                told.append("nothing")
            except (tf.errors.OpError, RuntimeError) as error:
                told.append("File too large" if "File too large" in str(error) else str(error))

    with _files_of_at_most(1 << 16):
        thread = threading.Thread(target=save)
        thread.start()
        try:
            for _ in range(150):
                trained.step(np.arange(5000))
        finally:
            stop.set()
            thread.join()
    assert len(told) > 3 and set(told) == {"File too large"}


def test_a_folder_that_cannot_be_made_holds_up_nobody(tmp_path):
    (tmp_path / "file").write_text("")
    trained = Trained()
    trained.step(np.arange(100))
    saver = trained.checkpoint()
    saver.write(str(tmp_path / "file" / "c"), options=ASYNC)
    with pytest.raises(tf.errors.OpError):
        saver.sync()
    assert not any(moment.cuts for moment in tfplugin.async_save._moments(saver._async_checkpointer()._object_map))
    trained.step(np.arange(100))


def test_model_checkpoint_of_tf_keras_saves_asynchronously(tmp_path):
    class Model(tf_keras.Model):
        def __init__(self):
            super().__init__()
            self.table = tf.get_kv_variable("m", 4)
            self.out = tf_keras.layers.Dense(1)

        def call(self, ids):
            return self.out(tf.nn.embedding_lookup(self.table, ids))

    model = Model()
    model.compile(loss="mse", optimizer="sgd")
    tfplugin.apply_in_backward(model.table, tfplugin.optimizers.Adam(0.1))
    callback = tf_keras.callbacks.ModelCheckpoint(
        str(tmp_path / "w-{epoch}"), save_weights_only=True, options=tf.train.CheckpointOptions(enable_async=True)
    )
    ids = np.arange(64, dtype=np.int64)
    model.fit(ids, np.ones([64, 1], np.float32), epochs=3, batch_size=16, verbose=0, callbacks=[callback])
    model._checkpoint.sync()
    again = Model()
    again.load_weights(str(tmp_path / "w-3")).expect_partial()
    again(ids[:1])
    assert int(again.table.size()) == 64
    found, expected = (tf.nn.embedding_lookup(m.table, ids).numpy() for m in (again, model))
    np.testing.assert_array_equal(found, expected)
