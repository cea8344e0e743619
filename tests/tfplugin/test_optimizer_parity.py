"""`tf.compat.v1.train` optimizers move a key's row as they move the row of a dense variable.

Each step touches every row, some of them twice, because an optimizer with momentum moves all rows of a dense variable.
"""

from __future__ import annotations

import time

import numpy as np
import pytest
import tensorflow as tf

import tfplugin

v1 = tf.compat.v1
train = v1.train
KEYS = np.array([0, -1, 3, 10**15, -7, 8, 2, 11])
STEPS = 100

OPTIMIZERS = {
    "GradientDescent": lambda: train.GradientDescentOptimizer(0.1),
    "Momentum": lambda: train.MomentumOptimizer(0.1, 0.9),
    "Nesterov": lambda: train.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "Adagrad": lambda: train.AdagradOptimizer(0.1, initial_accumulator_value=0.3),
    "Adam": lambda: train.AdamOptimizer(0.01),
    "Ftrl": lambda: train.FtrlOptimizer(0.1, l1_regularization_strength=0.02, l2_regularization_strength=0.01),
    "Ftrl with shrinkage": lambda: train.FtrlOptimizer(
        0.1, learning_rate_power=-0.4, beta=0.1, l2_shrinkage_regularization_strength=0.01
    ),
    "RMSProp": lambda: train.RMSPropOptimizer(0.01),
    "centered RMSProp": lambda: train.RMSPropOptimizer(0.01, centered=True),
    "RMSProp with momentum": lambda: train.RMSPropOptimizer(0.01, momentum=0.9),
    "ProximalAdagrad": lambda: train.ProximalAdagradOptimizer(
        0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.01
    ),
    "ProximalGradientDescent": lambda: train.ProximalGradientDescentOptimizer(0.1, l1_regularization_strength=0.01),
    "Adadelta": lambda: train.AdadeltaOptimizer(1.0),
    "AdagradDA": lambda: train.AdagradDAOptimizer(
        0.1, train.get_or_create_global_step(), l1_regularization_strength=0.01
    ),
}


def _batches(steps=STEPS):
    """Positions of ids with duplicates, and the factor of each row in the loss."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        ids = rng.permutation(np.concatenate([np.arange(len(KEYS)), rng.integers(0, len(KEYS), 6)]))
        yield ids, rng.normal(size=(len(ids), 4))


def _close(got, expected, tolerance=1e-9):
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance * np.abs(expected).max())


INITIAL = np.random.default_rng(1).normal(size=(len(KEYS), 4))


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_graph_mode(session, make_optimizer):
    positions = v1.placeholder(tf.int64, [None])
    factors = v1.placeholder(tf.float64, [None, 4])
    keys = tf.gather(tf.constant(KEYS), positions)
    dense = v1.get_variable("dense", initializer=INITIAL, use_resource=True)
    tables = [
        v1.get_kv_variable("single", 4, value_dtype=tf.float64),
        v1.get_kv_variable("parts", 4, value_dtype=tf.float64, partitioner=v1.fixed_size_partitioner(3)),
        v1.get_kv_variable("generic", 4, value_dtype=tf.float64),
    ]

    def loss(params, ids):
        rows = tf.nn.embedding_lookup(params, ids)
        return tf.reduce_sum(tf.sin(rows) * factors)

    # One optimizer each, so that what it counts per step moves once for each of them.
    steps = [make_optimizer().minimize(loss(dense, positions), var_list=[dense])]
    for table, fused in zip(tables, ("auto", "auto", False), strict=True):
        parts = list(table) if isinstance(table, tfplugin.PartitionedKvVariable) else [table]
        optimizer = tfplugin.OptimizerWrapper(make_optimizer(), fused=fused)
        steps.append(optimizer.minimize(loss(table, keys), var_list=parts))
        assert {way.split(":")[0] for way in optimizer.explain().to_dict().values()} == {
            "generic" if fused is False else "fused"
        }
    session.run(v1.global_variables_initializer())
    session.run([table.upsert(KEYS, INITIAL) for table in tables])
    for ids, factor in _batches():
        session.run(steps, {positions: ids, factors: factor})
    expected = session.run(dense)
    assert np.abs(expected - INITIAL).max() > 1e-3
    for table in tables:
        _close(session.run(table.sparse_read(KEYS, training=False)), expected)


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("name", ["Momentum", "Adam", "Ftrl", "RMSProp"])
def test_eager_mode_and_functions(make, partitioner, rows_of, name, function):
    dense = tf.Variable(INITIAL)
    table = make(name="t", value_dtype=tf.float64, partitioner=partitioner)
    table.upsert(KEYS, INITIAL)
    parts = list(table) if isinstance(table, tfplugin.PartitionedKvVariable) else [table]
    optimizers = OPTIMIZERS[name](), OPTIMIZERS[name]()

    def step(ids, factor):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(tf.sin(tf.nn.embedding_lookup(dense, ids)) * factor)
            kv_loss = tf.reduce_sum(tf.sin(tf.nn.embedding_lookup(table, tf.gather(KEYS, ids))) * factor)
        optimizers[0].apply_gradients([(tape.gradient(loss, dense), dense)])
        optimizers[1].apply_gradients(zip(tape.gradient(kv_loss, parts), parts, strict=True))

    run = tf.function(step) if function else step
    for ids, factor in _batches(20):
        run(tf.constant(ids), tf.constant(factor))
    _close(rows_of(table, KEYS), dense.numpy())


@pytest.mark.parametrize("fused", ["auto", False])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_float_dtypes(make, rows_of, dtype, fused):
    """To the rounding of the dtype. Fused, 16-bit rows move as the same rows of float32 do."""
    computed = tf.float32 if fused else dtype
    dense = tf.Variable(tf.cast(tf.cast(INITIAL, dtype), computed))
    table = make(name="t", value_dtype=dtype)
    table.upsert(KEYS, tf.cast(INITIAL, dtype))
    optimizers = train.AdamOptimizer(0.01), tfplugin.OptimizerWrapper(train.AdamOptimizer(0.01), fused=fused)
    for _ in range(10):
        optimizers[0].apply_gradients([(tf.ones([len(KEYS), 4], computed), dense)])
        gradient = tf.IndexedSlices(tf.ones([len(KEYS), 4], dtype), tf.constant(KEYS))
        optimizers[1].apply_gradients([(gradient, table)])
    got = rows_of(table, KEYS)
    expected = tf.cast(dense, tf.float64)
    tolerance = {tf.float32: 1e-6, tf.float16: 2e-3, tf.bfloat16: 2e-2}[dtype]
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def test_a_row_that_a_step_does_not_touch_stays(make, rows_of):
    table = make(initializer=1.0)
    optimizer = train.MomentumOptimizer(0.1, 0.9)
    for _ in range(3):
        optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([1, 4]), tf.constant([5], tf.int64)), table)])
    before = rows_of(table, [5])
    optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([1, 4]), tf.constant([6], tf.int64)), table)])
    np.testing.assert_array_equal(rows_of(table, [5]), before)


def test_gradients_of_equal_keys_are_summed_first(make, rows_of):
    table, other = make(name="a", initializer=0.0), make(name="b", initializer=0.0)
    twice = tf.IndexedSlices(tf.ones([2, 4]), tf.constant([5, 5], tf.int64))
    once = tf.IndexedSlices(tf.fill([1, 4], 2.0), tf.constant([5], tf.int64))
    train.AdagradOptimizer(0.1).apply_gradients([(twice, table)])
    train.AdagradOptimizer(0.1).apply_gradients([(once, other)])
    np.testing.assert_array_equal(rows_of(table, [5]), rows_of(other, [5]))


def test_the_global_step_and_beta_powers_advance_once_beside_dense_variables(session, partitioner):
    table = v1.get_kv_variable("t", embedding_dim=4, partitioner=partitioner)
    other = v1.get_kv_variable("u", embedding_dim=4)
    dense = v1.get_variable("w", [4], use_resource=True)
    step = train.get_or_create_global_step()
    ids = tf.constant([1, 2, 3], tf.int64)
    loss = tf.reduce_sum((tf.nn.embedding_lookup(table, ids) + tf.nn.embedding_lookup(other, ids)) * dense)
    optimizer = train.AdamOptimizer(0.1, beta1=0.5, beta2=0.25)
    op = optimizer.minimize(loss, global_step=step)
    session.run(v1.global_variables_initializer())
    for _ in range(3):
        session.run(op)
    assert session.run(step) == 3
    assert session.run(optimizer._get_beta_accumulators()) == (0.5**4, 0.25**4)
    freqs, _ = session.run(other.stamps(ids))
    assert freqs.tolist() == [3, 3, 3]


def test_minimize_finds_all_parts_and_dense_variables(session, partitioner):
    table = v1.get_kv_variable("t", embedding_dim=4, partitioner=partitioner, initializer=1.0)
    frozen = v1.get_kv_variable("frozen", embedding_dim=4, trainable=False, initializer=1.0)
    dense = v1.get_variable("w", initializer=tf.ones([4]), use_resource=True)
    ids = tf.constant([1, 2, 3], tf.int64)
    rows, still = tf.nn.embedding_lookup(table, ids), tf.nn.embedding_lookup(frozen, ids)
    op = train.GradientDescentOptimizer(0.5).minimize(tf.reduce_sum((rows + still) * dense))
    session.run(v1.global_variables_initializer())
    session.run(op)
    np.testing.assert_array_equal(session.run(rows), np.full([3, 4], 0.5))
    np.testing.assert_array_equal(session.run(still), np.ones([3, 4]))
    assert session.run(dense)[0] == 1 - 0.5 * 6


def test_gradients_clipped_by_global_norm(session, partitioner):
    table = v1.get_kv_variable("t", embedding_dim=1, partitioner=partitioner, initializer=0.0)
    rows = tf.nn.embedding_lookup(table, tf.constant([1, 2, 3], tf.int64))
    optimizer = train.GradientDescentOptimizer(1.0)
    gradients, variables = zip(*optimizer.compute_gradients(tf.reduce_sum(rows * [[2.0], [3.0], [6.0]])), strict=True)
    clipped, norm = tf.clip_by_global_norm(gradients, 1.0)
    op = optimizer.apply_gradients(zip(clipped, variables, strict=True))
    session.run(v1.global_variables_initializer())
    assert session.run([norm, op])[0] == pytest.approx(7)
    np.testing.assert_allclose(session.run(table.sparse_read([1, 2, 3]))[:, 0], [-2 / 7, -3 / 7, -6 / 7], rtol=1e-6)


def test_the_constraint_holds_after_each_step(make, rows_of, session):
    table = v1.get_kv_variable("t", embedding_dim=2, initializer=1.0, constraint=lambda rows: tf.maximum(rows, 0.25))
    rows = tf.nn.embedding_lookup(table, tf.constant([1, 2], tf.int64))
    op = train.GradientDescentOptimizer(1.0).minimize(tf.reduce_sum(rows * [[1.0], [0.5]]))
    session.run(v1.global_variables_initializer())
    session.run(op)
    np.testing.assert_array_equal(session.run(table.sparse_read([1, 2])), [[0.25] * 2, [0.5] * 2])


def test_two_optimizers_take_turns_without_losing_slots(session):
    """Each of the steps is built before or after the other optimizer is known."""
    table = v1.get_kv_variable("t", embedding_dim=2, initializer=1.0)
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([1], tf.int64)))
    momentum = train.MomentumOptimizer(0.0, 1.0).minimize(loss)
    adagrad = train.AdagradOptimizer(0.0, initial_accumulator_value=1.0).minimize(loss)
    session.run(v1.global_variables_initializer())
    for _ in range(3):
        session.run(momentum)
        session.run(adagrad)
    assert session.run(table.export("Momentum.momentum"))[1].tolist() == [[3, 3]]
    assert session.run(table.export("Adagrad.accumulator"))[1].tolist() == [[4, 4]]


def test_two_optimizers_of_one_kind_keep_slots_of_their_own(session):
    table = v1.get_kv_variable("t", embedding_dim=2, initializer=1.0)
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([1], tf.int64)))
    first, second = (train.MomentumOptimizer(0.0, 1.0).minimize(loss) for _ in range(2))
    session.run(v1.global_variables_initializer())
    for op in (first, first, second):
        session.run(op)
    assert session.run(table.export("Momentum.momentum"))[1].tolist() == [[2, 2]]
    assert session.run(table.export("Momentum_1.momentum"))[1].tolist() == [[1, 1]]


def test_turns_resume_from_a_checkpoint_whichever_comes_first(tmp_path):
    def build():
        table = v1.get_kv_variable("t", embedding_dim=2, initializer=1.0)
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([1], tf.int64)))
        momentum = train.MomentumOptimizer(0.0, 1.0).minimize(loss)
        adagrad = train.AdagradOptimizer(0.0, initial_accumulator_value=1.0).minimize(loss)
        return table, momentum, adagrad, train.Saver()

    with tf.Graph().as_default(), v1.Session() as session:
        _, momentum, adagrad, saver = build()
        session.run(v1.global_variables_initializer())
        session.run(momentum)
        session.run(adagrad)
        saver.save(session, str(tmp_path / "model"))
    with tf.Graph().as_default(), v1.Session() as session:
        table, momentum, adagrad, saver = build()
        saver.restore(session, str(tmp_path / "model"))
        session.run(momentum)
        session.run(adagrad)
        assert session.run(table.export("Momentum.momentum"))[1].tolist() == [[2, 2]]
        assert session.run(table.export("Adagrad.accumulator"))[1].tolist() == [[3, 3]]


# The token queue's thread is cut off when the session closes.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_sync_replicas_optimizer_averages_table_gradients():
    with tf.Graph().as_default():
        table = v1.get_kv_variable("t", embedding_dim=2, initializer=1.0)
        rows = tf.nn.embedding_lookup(table, tf.constant([-1, 5, 5], tf.int64))
        step = train.get_or_create_global_step()
        optimizer = train.SyncReplicasOptimizer(train.GradientDescentOptimizer(0.25), 1, total_num_replicas=1)
        op = optimizer.minimize(tf.reduce_sum(rows), global_step=step)
        after = table.sparse_read(tf.constant([-1, 5], tf.int64), training=False)
        hook = optimizer.make_session_run_hook(is_chief=True)
        with train.MonitoredSession(hooks=[hook], stop_grace_period_secs=1) as session:
            session.run(op)
            deadline = time.monotonic() + 60
            while (
                session.run(step) < 1 and time.monotonic() < deadline
            ):  # the first token is free: the update may follow
                time.sleep(0.01)
            np.testing.assert_array_equal(session.run(after), [[0.75] * 2, [0.5] * 2])


def test_moving_averages_say_that_a_table_has_no_dense_value(session):
    table = v1.get_kv_variable("t", embedding_dim=2)
    with pytest.raises(TypeError, match=r"has no dense value.*ExponentialMovingAverage averages dense variables only"):
        train.ExponentialMovingAverage(0.9).apply([table])


def test_moving_averages_say_so_in_eager_mode_too(make):
    with pytest.raises(AttributeError, match="ExponentialMovingAverage, which asks for it, averages dense variables"):
        train.ExponentialMovingAverage(0.9).apply([tf.Variable(1.0), make()])


def test_a_loss_without_a_table_moves_the_rest(make):
    optimizer, table, dense = train.AdamOptimizer(0.1), make(), tf.Variable(1.0)
    optimizer.minimize(lambda: dense**2 + tf.stop_gradient(tf.reduce_sum(table.sparse_read([1]))))
    assert float(dense) < 1
    np.testing.assert_array_equal(table.stamps([1])[0].numpy(), [0])
    optimizer.minimize(lambda: dense**2 + tf.reduce_sum(table.sparse_read([1])))
    np.testing.assert_array_equal(table.stamps([1])[0].numpy(), [1])


def test_a_loss_without_a_table_moves_the_rest_in_a_graph(make, session):
    optimizer, table, dense = train.AdamOptimizer(0.1), make(), v1.get_variable("w", initializer=1.0, use_resource=True)
    step = optimizer.minimize(dense**2, var_list=[dense, table])
    both = optimizer.minimize(dense**2 + tf.reduce_sum(tf.nn.embedding_lookup(table, [1])), var_list=[dense, table])
    session.run(v1.global_variables_initializer())
    session.run(step)
    assert session.run([dense < 1, table.size()]) == [True, 0]
    session.run(both)
    assert session.run(table.size()) == 1


@pytest.mark.parametrize("constraint", [None, tf.identity], ids=["fused", "generic"])
def test_a_table_that_is_listed_twice_moves_twice(make, rows_of, constraint):
    table, dense = make(initializer=1.0, constraint=constraint), tf.Variable(tf.ones([1, 4]))
    for variable, keys in ((table, ([3], [3, 5])), (dense, ([0], [0, 0]))):
        rows = [tf.IndexedSlices(tf.fill([len(k), 4], 0.5), tf.constant(k, tf.int64)) for k in keys]
        train.GradientDescentOptimizer(1.0).apply_gradients([(rows[0], variable), (rows[1], variable)])
    np.testing.assert_array_equal(rows_of(table, [3, 5]), [[0.0] * 4, [0.5] * 4])
    np.testing.assert_array_equal(dense.numpy(), [[-0.5] * 4])


def test_no_gradient_at_all_is_tensorflows_own_error(make):
    table = make()
    with pytest.raises(ValueError, match="No gradients provided for any variable"):
        train.AdamOptimizer(0.1).minimize(lambda: tf.stop_gradient(tf.reduce_sum(table.sparse_read([1]))))


def test_a_strategy_of_one_device_changes_nothing(make):
    found = []
    for strategy in (tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy("/cpu:0")):
        with strategy.scope():
            table, dense, optimizer = make(initializer=1.0), tf.Variable(tf.ones([1, 4])), train.AdamOptimizer(0.1)

        def step(table=table, dense=dense, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [5, 7, 5]) ** 2 * dense)
            variables = [table, dense]
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        for _ in range(2):
            strategy.run(tf.function(step))
        found.append([table.sparse_read([5, 7], training=False).numpy(), dense.numpy()])
    assert np.all(found[0][0] < 1.0)
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
