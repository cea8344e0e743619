"""Updates of one table by several threads: each counts, whichever way it is made."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import cancellation

import tfplugin
from tfplugin.ops import raw

train = tf.compat.v1.train

THREADS, STEPS, ROWS, BATCH, DIM = 6, 40, 2_000, 1_500, 4


def _in_threads(work):
    """Runs work(thread, keys of each step) in threads; returns how often each key came."""
    keys = np.stack([np.random.default_rng(i).permuted(np.arange(ROWS))[:BATCH] for i in range(THREADS * STEPS)])
    errors = []

    def run(thread):
        try:
            work(thread, keys[thread * STEPS : (thread + 1) * STEPS])
        except Exception as error:  # reported below, by the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return np.bincount(keys.ravel(), minlength=ROWS)


def _unchanged(rows):
    return tf.identity(rows)


def _function_of(table, optimizer):
    """A step that subtracts 1 from each row."""

    @tf.function(input_signature=[tf.TensorSpec([BATCH], tf.int64)])
    def step(keys):
        optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([BATCH, DIM]), keys), table)])

    return step


def _stock(learning_rate):
    return tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(learning_rate), fused=False)


@pytest.mark.parametrize(
    ("make_optimizer", "constraint"),
    [
        (_stock, None),
        (lambda rate: tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(rate)), _unchanged),
        (train.GradientDescentOptimizer, _unchanged),
        (tfplugin.optimizers.SGD, _unchanged),
        (tfplugin.optimizers.SGD, None),
    ],
    ids=["keras, not fused", "keras, constraint", "v1, constraint", "tfplugin, constraint", "fused"],
)
def test_no_update_of_a_function_is_lost(make, rows_of, make_optimizer, constraint):
    table = make(dim=DIM, initializer=0.0, constraint=constraint)
    step = _function_of(table, make_optimizer(1.0))
    step(tf.range(BATCH, dtype=tf.int64))
    table.clear()
    counts = _in_threads(lambda _, batches: [step(tf.constant(keys)) for keys in batches])
    np.testing.assert_array_equal(rows_of(table, np.arange(ROWS)), -np.repeat(counts[:, None], DIM, 1))


def test_no_update_of_a_session_is_lost(session):
    tables = [
        tfplugin.get_kv_variable(name, embedding_dim=DIM, initializer=0.0, constraint=_unchanged) for name in "ab"
    ]
    ids = tf.compat.v1.placeholder(tf.int64, [BATCH])
    slices = tf.IndexedSlices(tf.ones([BATCH, DIM]), ids)
    # In one order here and the other there: nobody waits in a circle.
    steps = [
        train.GradientDescentOptimizer(1.0).apply_gradients([(slices, table) for table in order])
        for order in (tables, tables[::-1])
    ]
    session.run(tf.compat.v1.global_variables_initializer())

    def work(thread, batches):
        for keys in batches:
            session.run(steps[thread % 2], {ids: keys})

    counts = _in_threads(work)
    for table in tables:
        held, rows = session.run(table.export())
        np.testing.assert_array_equal(rows[np.argsort(held)], -np.repeat(counts[:, None], DIM, 1))


def test_no_update_of_eager_steps_is_lost(make, rows_of):
    table = make(dim=DIM, initializer=0.0, constraint=_unchanged)
    shared = train.GradientDescentOptimizer(1.0)  # as are the methods that a step puts in the place of its own
    optimizers = [shared, shared, *(train.GradientDescentOptimizer(1.0) for _ in range(2)), _stock(1.0), _stock(1.0)]

    def work(thread, batches):
        for keys in batches[:10]:
            optimizers[thread].apply_gradients([(tf.IndexedSlices(tf.ones([BATCH, DIM]), tf.constant(keys)), table)])

    _in_threads(work)
    assert rows_of(table, np.arange(ROWS)).sum() == -THREADS * 10 * BATCH * DIM


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_an_update_that_fails_leaves_the_table_to_the_next(make, rows_of, function):
    allowed = tf.Variable(False)

    def constraint(rows):
        with tf.control_dependencies([tf.debugging.Assert(allowed, ["not now"])]):
            return tf.identity(rows)

    table = make(dim=DIM, initializer=0.0, constraint=constraint)
    optimizer = train.GradientDescentOptimizer(1.0)

    def step():
        optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([2, DIM]), tf.constant([1, 2], tf.int64)), table)])

    step = tf.function(step) if function else step
    with pytest.raises(tf.errors.InvalidArgumentError, match="not now") as kept:
        step()
    allowed.assign(True)
    step()
    np.testing.assert_array_equal(rows_of(table, [1, 2]), -1.0)
    assert kept.value is not None  # with its frames, which have what the failed step had


def test_a_step_that_waits_can_be_cancelled(make, rows_of):
    table = make(dim=DIM, initializer=0.0, constraint=_unchanged)
    step = _function_of(table, train.GradientDescentOptimizer(1.0))
    keys = tf.range(BATCH, dtype=tf.int64)
    step(keys)
    lock = raw.kv_table_acquire_update_lock(table.handle)
    manager = cancellation.CancellationManager()
    waiting = manager.get_cancelable_function(step.get_concrete_function())
    errors = []

    def wait():
        try:
            waiting(keys)
        except tf.errors.CancelledError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    manager.start_cancel()
    thread.join()
    assert len(errors) == 1
    del lock
    gc.collect()
    step(keys)
    np.testing.assert_array_equal(rows_of(table, [0, BATCH - 1]), -2.0)
