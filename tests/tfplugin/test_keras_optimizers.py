"""`OptimizerWrapper`: Keras 3 and tf_keras optimizers move a key's row as they move the row of a dense variable."""

from __future__ import annotations

import copy
import gc

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin
from tfplugin import dynamic_embedding as de
from tfplugin.optimizers import accumulated_rows

KEYS = np.array([0, -1, 3, 10**15, -7, 8])
INITIAL = np.random.default_rng(1).normal(size=(len(KEYS), 4))
STEPS = 8

k3, new, legacy = tf.keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy
OPTIMIZERS = {
    "SGD": lambda: k3.SGD(0.1),
    "momentum": lambda: k3.SGD(0.1, momentum=0.9),
    "Nesterov": lambda: k3.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: k3.Adam(0.01),
    "AMSGrad": lambda: k3.Adam(0.01, amsgrad=True),
    "AdamW": lambda: k3.AdamW(0.01, weight_decay=0.1),
    "Adagrad": lambda: k3.Adagrad(0.1, initial_accumulator_value=0.3),
    "Adadelta": lambda: k3.Adadelta(1.0),
    "RMSprop": lambda: k3.RMSprop(0.01, momentum=0.5, centered=True),
    "Adamax": lambda: k3.Adamax(0.01),
    "Nadam": lambda: k3.Nadam(0.01),
    "Ftrl": lambda: k3.Ftrl(0.1, l1_regularization_strength=0.02, l2_regularization_strength=0.01),
    "Lion": lambda: k3.Lion(0.01),
    "weight decay": lambda: k3.SGD(0.1, weight_decay=0.1),
    "schedule": lambda: k3.Adam(k3.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "clipnorm": lambda: k3.SGD(0.1, clipnorm=0.5),
    "global_clipnorm": lambda: k3.SGD(0.1, global_clipnorm=0.5),
    "clipvalue": lambda: k3.SGD(0.1, clipvalue=0.2),
    "tf_keras SGD": lambda: new.SGD(0.1, momentum=0.9, nesterov=True),
    "tf_keras Adam": lambda: new.Adam(0.01, amsgrad=True),
    "tf_keras AdamW": lambda: new.AdamW(0.01, weight_decay=0.1),
    "tf_keras Adagrad": lambda: new.Adagrad(0.1, initial_accumulator_value=0.3),
    "tf_keras Adadelta": lambda: new.Adadelta(1.0),
    "tf_keras Adamax": lambda: new.Adamax(0.01),
    "tf_keras Lion": lambda: new.Lion(0.01),
    "tf_keras weight decay": lambda: new.SGD(0.1, weight_decay=0.1),
    "tf_keras RMSprop": lambda: new.RMSprop(0.01, momentum=0.5, centered=True),
    "tf_keras Ftrl": lambda: new.Ftrl(0.1, l1_regularization_strength=0.02),
    "tf_keras global_clipnorm": lambda: new.SGD(0.1, global_clipnorm=0.5),
    "legacy SGD": lambda: legacy.SGD(0.1, momentum=0.9),
    "legacy Adam": lambda: legacy.Adam(0.01, amsgrad=True),
    "legacy Adagrad": lambda: legacy.Adagrad(0.1, initial_accumulator_value=0.3),
    "legacy RMSprop": lambda: legacy.RMSprop(0.01, momentum=0.5, centered=True),
    "legacy plain RMSprop": lambda: legacy.RMSprop(0.01),
    "legacy Adadelta": lambda: legacy.Adadelta(1.0),
    "legacy Adamax": lambda: legacy.Adamax(0.01),
    "legacy Nadam": lambda: legacy.Nadam(0.01),
    "legacy Ftrl": lambda: legacy.Ftrl(0.1, l1_regularization_strength=0.02),
    "legacy clipnorm": lambda: legacy.SGD(0.1, clipnorm=0.5),
}


def _batches():
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        ids = rng.permutation(np.concatenate([np.arange(len(KEYS)), rng.integers(0, len(KEYS), 4)]))
        yield tf.constant(ids), tf.constant(rng.normal(size=(len(ids), 4)))


@pytest.mark.parametrize(
    ("function", "fused"), [(False, "auto"), (True, "auto"), (True, False)], ids=["eager", "function", "generic"]
)
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_parity_beside_a_dense_variable_and_another_table(make, rows_of, make_optimizer, function, fused):
    # A float64 table: what float32 rounds differently in a dense kernel is no matter here.
    table = make(name="t", value_dtype=tf.float64)
    other = make(name="u", dim=2, value_dtype=tf.float64, initializer=1.0)
    table.upsert(KEYS, INITIAL)
    stock, other_rows = tf.Variable(INITIAL), tf.Variable(np.ones([len(KEYS), 2]))
    weights = [tf.Variable(np.ones([4])) for _ in range(2)]
    optimizers = make_optimizer(), tfplugin.OptimizerWrapper(make_optimizer(), fused=fused)

    def loss_of(rows, narrow, weight, factor):
        return tf.reduce_sum(tf.sin(rows) * factor * weight) + tf.reduce_sum(narrow**2)

    def step(ids, factor):
        keys = tf.gather(KEYS, ids)
        with tf.GradientTape(persistent=True) as tape:
            dense_loss = loss_of(tf.gather(stock, ids), tf.gather(other_rows, ids), weights[0], factor)
            rows = tf.nn.embedding_lookup(table, keys), tf.nn.embedding_lookup(other, keys)
            loss = loss_of(*rows, weights[1], factor)
        dense = [stock, weights[0], other_rows]
        # Dense gradients: a sparse one is applied to each occurrence of an id by some stock optimizers.
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(dense_loss, dense)]
        optimizers[0].apply_gradients(zip(gradients, dense, strict=True))
        kv = [table, weights[1], other]
        optimizers[1].apply_gradients(zip(tape.gradient(loss, kv), kv, strict=True))

    run = tf.function(step) if function else step
    for ids, factor in _batches():
        run(ids, factor)
    for got, expected in (
        (rows_of(table, KEYS), stock),
        (rows_of(other, KEYS), other_rows),
        (weights[1], weights[0]),
    ):
        expected = expected.numpy()
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
    assert np.abs(stock.numpy() - INITIAL).max() > 1e-3
    assert int(optimizers[1].iterations) == STEPS
    ways = [way.split(":")[0] for way in optimizers[1].explain().to_dict().values()]
    assert ways == ["fused" if fused else "generic", "TensorFlow's own update", "fused" if fused else "generic"]


@pytest.mark.parametrize("make_optimizer", [OPTIMIZERS["Adam"], OPTIMIZERS["tf_keras Adam"], OPTIMIZERS["legacy Adam"]])
def test_parts_move_as_the_whole(make, rows_of, make_optimizer):
    tables = [make(name="t", value_dtype=tf.float64), make(name="t", value_dtype=tf.float64, partitioner=_three)]
    for table in tables:
        table.upsert(KEYS, INITIAL)
        optimizer = tfplugin.OptimizerWrapper(make_optimizer())
        for ids, factor in _batches():
            keys = tf.gather(KEYS, ids)
            optimizer.minimize(lambda: tf.reduce_sum(tf.sin(tf.nn.embedding_lookup(table, keys)) * factor), [table])  # noqa: B023
    np.testing.assert_allclose(rows_of(tables[1], KEYS), rows_of(tables[0], KEYS), rtol=1e-9)


_three = tf.compat.v1.fixed_size_partitioner(3)


@pytest.mark.parametrize("make_optimizer", [lambda: k3.SGD(0.5), lambda: new.SGD(0.5), lambda: legacy.SGD(0.5)])
def test_minimize_with_a_function_or_a_tape(make, rows_of, make_optimizer):
    table, weight = make(dim=1, initializer=1.0), tf.Variable([1.0])
    optimizer = tfplugin.OptimizerWrapper(make_optimizer())

    def loss():
        return tf.reduce_sum(tf.nn.embedding_lookup(table, [5]) * weight)

    optimizer.minimize(loss)
    assert rows_of(table, [5]).tolist() == [[0.5]]
    assert weight.numpy().tolist() == [0.5]
    with tf.GradientTape() as tape:
        value = loss()
    optimizer.minimize(value, [table, weight], tape=tape)
    assert rows_of(table, [5]).tolist() == [[0.25]]
    assert int(optimizer.iterations) == 2
    with pytest.raises(ValueError, match="its tape="):
        optimizer.minimize(value, [table])


def test_the_wrapper_of_a_v1_optimizer_is_the_optimizer(make, rows_of):
    table = make(dim=1, initializer=1.0)
    optimizer = tfplugin.OptimizerWrapper(tf.compat.v1.train.GradientDescentOptimizer(0.5))
    optimizer.minimize(lambda: tf.reduce_sum(tf.nn.embedding_lookup(table, [5])), [table])
    assert rows_of(table, [5]).tolist() == [[0.5]]


def test_learning_rate_is_the_optimizers_own(make, rows_of):
    table = make(dim=1, initializer=1.0)
    optimizer = tfplugin.OptimizerWrapper(k3.SGD(0.5))
    optimizer.learning_rate = 0.25
    assert float(optimizer.learning_rate) == 0.25
    optimizer.minimize(lambda: tf.reduce_sum(tf.nn.embedding_lookup(table, [5])), [table])
    assert rows_of(table, [5]).tolist() == [[0.75]]


@pytest.mark.parametrize(
    ("optimizer", "name", "value", "expected"),
    [
        (k3.SGD(1.0), "clipvalue", 0.25, 0.75),
        (new.SGD(0.5), "weight_decay", 1.0, 0.0),
        (legacy.SGD(1.0), "lr", 0.5, 0.5),
    ],
    ids=["clipvalue", "weight_decay", "lr"],
)
def test_what_is_assigned_to_the_wrapper_is_the_optimizers_own(make, rows_of, optimizer, name, value, expected):
    table, wrapper = make(dim=1, initializer=1.0), tfplugin.OptimizerWrapper(optimizer)
    setattr(wrapper, name, value)
    wrapper.apply_gradients([(tf.IndexedSlices(tf.ones([1, 1]), tf.constant([1], tf.int64)), table)])
    assert rows_of(table, [1]).tolist() == [[expected]]


def test_the_constraint_holds_after_each_step(make, rows_of):
    for name, optimizer in (("a", k3.SGD(1.0)), ("b", new.SGD(1.0)), ("c", legacy.SGD(1.0))):
        table = make(dim=1, name=name, initializer=1.0, constraint=lambda rows: tf.maximum(rows, 0.25))
        tfplugin.OptimizerWrapper(optimizer).minimize(
            lambda table=table: tf.reduce_sum(tf.nn.embedding_lookup(table, [5])), [table]
        )
        assert rows_of(table, [5]).tolist() == [[0.25]], name


def test_a_table_without_a_gradient_stays(make):
    table, idle = make(name="a", initializer=1.0), make(name="b", initializer=1.0)
    optimizer = tfplugin.OptimizerWrapper(k3.Adam(0.1))
    gradient = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([5], tf.int64))
    with pytest.warns(UserWarning, match="Gradients do not exist for key-value variable 'b:0'"):
        optimizer.apply_gradients([(gradient, table), (None, idle)])
    optimizer.apply_gradients([(gradient, table), (gradient, idle)])
    assert [int(v.size()) for v in (table, idle)] == [1, 1]


@pytest.mark.parametrize("make_optimizer", [k3.Adam, new.Adam, legacy.Adam])
@pytest.mark.filterwarnings("ignore:Gradients do not exist")
def test_no_gradient_at_all_is_an_error(make, make_optimizer):
    table, dense = make(name="a", initializer=1.0), tf.Variable([1.0])
    for variables in ([table], [table, dense]):
        with pytest.raises(ValueError, match=r"No gradients provided for any variable: \['a:0'"):
            tfplugin.OptimizerWrapper(make_optimizer()).apply_gradients([(None, v) for v in variables])


def test_retraced_functions_share_slots(make, rows_of):
    """One optimizer, two traces: ids of another dtype trace anew."""
    table = make(dim=1, initializer=0.0)
    optimizer = tfplugin.OptimizerWrapper(k3.SGD(1.0, momentum=1.0))

    @tf.function
    def step(ids):
        optimizer.minimize(lambda: tf.reduce_sum(tf.nn.embedding_lookup(table, ids)), [table])

    step(tf.constant([5], tf.int64))
    step(tf.constant([5], tf.int32))
    step(tf.constant([5], tf.int64))
    assert rows_of(table, [5]).tolist() == [[-6]]


def test_two_optimizers_take_turns_in_eager_mode_and_functions(make, rows_of):
    table = make(dim=1, initializer=0.0)
    gradient = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([5], tf.int64))
    first, second = (tfplugin.OptimizerWrapper(k3.Adagrad(0.1, initial_accumulator_value=0.0)) for _ in range(2))
    steps = [tf.function(lambda o=o: o.apply_gradients([(gradient, table)])) for o in (first, second)]
    for _ in range(2):
        steps[0]()
        steps[1]()
    first.apply_gradients([(gradient, table)])
    steps[1]()
    assert rows_of(table, [5], "Adagrad.accumulator").tolist() == [[3]]
    assert rows_of(table, [5], "Adagrad_1.accumulator").tolist() == [[3]]


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("optimizer", [lambda: k3.RMSprop(), lambda: new.RMSprop(), lambda: k3.Lion(use_ema=True)])
def test_a_batch_without_ids_by_the_optimizers_own_ops(make, optimizer, traced):
    table, wrapper = make(), tfplugin.OptimizerWrapper(optimizer(), fused=False)

    def step():
        nothing = tf.IndexedSlices(tf.zeros([0, 4]), tf.zeros([0], tf.int64))
        wrapper.apply_gradients([(nothing, table)])

    (tf.function(step) if traced else step)()
    assert int(table.size()) == 0
    assert int(wrapper.iterations) == 1


def test_refused_optimizers(make):
    table = make()
    gradient = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([5], tf.int64))
    for optimizer, why in (
        (k3.Adafactor(), "couples the rows"),
        (k3.Muon(), "couples the rows"),
        (k3.SGD(0.1, use_ema=True, gradient_accumulation_steps=2), "use_ema.*gradient_accumulation_steps.*not both"),
        (k3.LossScaleOptimizer(k3.Adafactor()), "couples the rows"),
    ):
        with pytest.raises(ValueError, match=why):
            tfplugin.OptimizerWrapper(optimizer).apply_gradients([(gradient, table)])
    with pytest.raises(ValueError, match=r"Lamb couples the rows.*fused=False"):
        tfplugin.OptimizerWrapper(k3.Lamb(), fused=False).apply_gradients([(gradient, table)])
    assert int(table.size()) == 0
    with pytest.raises(TypeError, match="wants an optimizer"):
        tfplugin.OptimizerWrapper("adam")


@pytest.mark.parametrize("optimizers", [k3, new], ids=["keras3", "tf_keras"])
def test_moving_averages_take_the_place_of_rows_in_the_end(make, rows_of, optimizers):
    # Averages of rows that began as ones: what two ways of summing differ by is told by these, not by what is left.
    close = {"rtol": 1e-6, "atol": 2.0**-22}
    table, dense = make(initializer=1.0), tf.Variable(tf.ones([3, 4]))
    wrapper = tfplugin.OptimizerWrapper(optimizers.SGD(0.5, use_ema=True, ema_momentum=0.75))
    plain = optimizers.SGD(0.5, use_ema=True, ema_momentum=0.75)
    for step in range(3):
        gradient = tf.IndexedSlices(tf.random.normal([3, 4], seed=step), tf.constant([0, 1, 2], tf.int64))
        wrapper.apply_gradients([(gradient, table)])
        plain.apply_gradients([(gradient.values, dense)])
    np.testing.assert_allclose(rows_of(table, [0, 1, 2]), dense.numpy(), **close)
    table.upsert([9], [[5.0] * 4])  # which no step has touched
    wrapper.finalize_variable_values([])
    plain.finalize_variable_values([dense])
    np.testing.assert_allclose(rows_of(table, [0, 1, 2]), dense.numpy(), **close)
    assert rows_of(table, [9]).tolist() == [[5.0] * 4]


def test_gradients_are_gathered_over_steps(make, rows_of):
    table = make(initializer=1.0, dim=1)
    wrapper = tfplugin.OptimizerWrapper(k3.SGD(1.0, gradient_accumulation_steps=2))
    for keys, values in (([1, 2], [1.0, 2.0]), ([2, 3], [4.0, 8.0]), ([1], [1.0])):
        gradient = tf.IndexedSlices(tf.constant(values)[:, None], tf.constant(keys, tf.int64))
        wrapper.apply_gradients([(gradient, table)])
    assert rows_of(table, [1, 2, 3]).ravel().tolist() == [0.5, -2.0, -3.0]


def _gather(table, wrapper, values):
    for value in values:
        gradient = tf.IndexedSlices(tf.fill([1, 1], value), tf.constant([5], tf.int64))
        wrapper.apply_gradients([(gradient, table)])


CLIPPING = {
    "keras3": lambda: k3.SGD(1.0, clipnorm=0.5),
    "keras3, scaled": lambda: k3.SGD(1.0, clipnorm=0.5, loss_scale_factor=8.0),
    "keras3, scaled dynamically": lambda: k3.LossScaleOptimizer(k3.SGD(1.0, clipnorm=0.5)),
    "keras3, gathering": lambda: k3.SGD(1.0, clipnorm=0.5, gradient_accumulation_steps=2),
    "tf_keras": lambda: new.SGD(1.0, clipnorm=0.5),
    "legacy": lambda: legacy.SGD(1.0, clipnorm=0.5),
}


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("optimizer", CLIPPING)
def test_a_table_in_parts_is_clipped_to_the_norm_of_the_whole(make, rows_of, optimizer, traced):
    rows = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)

    def moved(name, partitioner=None):
        tables = [make(initializer=0.0, name=f"{name}_{i}", partitioner=partitioner) for i in range(2)]
        dense = tf.Variable([3.0, 4.0])
        wrapper = tfplugin.OptimizerWrapper(CLIPPING[optimizer]())

        def step():
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(dense) + sum(
                    tf.reduce_sum(tf.nn.embedding_lookup(table, np.arange(6)) * rows * (i + 1))
                    for i, table in enumerate(tables)
                )
                loss = wrapper.scale_loss(loss) if hasattr(wrapper, "scale_loss") else loss
            # A variable without a gradient in between, which optimizers leave out.
            variables = [*_parts(tables[0]), idle, dense, *_parts(tables[1])]
            wrapper.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        idle = tf.Variable(1.0)
        step = tf.function(step) if traced else step
        for _ in range(2):
            step()
        return [dense.numpy(), *(rows_of(table, np.arange(6)) for table in tables)]

    whole = moved("whole")
    steps = 1 if "gathering" in optimizer else 2
    for table in whole[1:]:
        np.testing.assert_allclose(np.linalg.norm(table), 0.5 * steps, rtol=1e-5)
    for ours, expected in zip(moved("parts", tf.compat.v1.fixed_size_partitioner(3)), whole, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5)


def _parts(table):
    return list(getattr(table, "_kv_parts", [table]))


@pytest.mark.parametrize("module", [k3, new], ids=["keras3", "tf_keras"])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_tables_of_several_dtypes_are_clipped_to_one_norm(module, traced):
    full, half = (
        tf.get_kv_variable(name, embedding_dim=2, value_dtype=dtype, initializer=tf.zeros_initializer())
        for name, dtype in (("full", tf.float32), ("half", tf.bfloat16))
    )
    gradients = [
        tf.IndexedSlices(tf.constant(rows, table.dtype), tf.constant([7], tf.int64))
        for rows, table in (([[3.0, 0.0]], full), ([[0.0, 4.0]], half))
    ]
    optimizer = module.SGD(1.0, global_clipnorm=1.0)
    step = tf.function(optimizer.apply_gradients) if traced else optimizer.apply_gradients
    step(list(zip(gradients, [full, half], strict=True)))
    np.testing.assert_allclose(full.sparse_read([7]), [[-0.6, 0.0]], rtol=1e-5)
    np.testing.assert_allclose(tf.cast(half.sparse_read([7]), tf.float32), [[0.0, -0.8]], rtol=4e-3)


def test_parts_of_two_tables_of_one_name_are_clipped_apart(make, rows_of):
    first = make(initializer=0.0, partitioner=tf.compat.v1.fixed_size_partitioner(2))
    second = copy.deepcopy(first)
    assert first.name == second.name
    gradients = [_row(part.part, value) for value, table in ((3.0, first), (4.0, second)) for part in _parts(table)]
    parts = [*_parts(first), *_parts(second)]
    tfplugin.OptimizerWrapper(k3.SGD(1.0, clipnorm=1.0)).apply_gradients(zip(gradients, parts, strict=True))
    for table in (first, second):
        np.testing.assert_allclose(np.linalg.norm(rows_of(table, [0, 1])), 1.0, rtol=1e-6)


def _row(key, value):
    return tf.IndexedSlices(tf.fill([1, 4], value), tf.constant([key], tf.int64))


@pytest.mark.parametrize("fused", ["auto", False])
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_gradients_of_rows_of_16_bits_are_gathered_in_float32(make, rows_of, dtype, fused):
    table = make(initializer=0.0, dim=1, value_dtype=dtype)
    wrapper = tfplugin.OptimizerWrapper(k3.SGD(64.0, gradient_accumulation_steps=64), fused=fused)
    # None of them is more than half the distance from 1 to the next number of the dtype; together they are.
    least = 2.0**-9 if dtype == tf.bfloat16 else 2.0**-12
    values = [1.0] + [least] * 62 + [2 * least]
    _gather(table, wrapper, values)
    assert rows_of(table, [5]).item() == -sum(values)


def test_gathered_sums_that_were_saved_in_16_bits_are_restored(make, rows_of, tmp_path, monkeypatch):
    def made(name):
        table = make(initializer=0.0, dim=1, value_dtype=tf.bfloat16, name=name)
        wrapper = tfplugin.OptimizerWrapper(k3.SGD(3.0, gradient_accumulation_steps=3))
        return table, wrapper, tf.train.Checkpoint(table=table, optimizer=wrapper.optimizer)

    with monkeypatch.context() as patch:
        patch.setattr(accumulated_rows, "compute_dtype", lambda dtype: dtype)
        table, wrapper, checkpoint = made("sums")
        _gather(table, wrapper, [1.0, 2.0])
        path = checkpoint.save(str(tmp_path / "ckpt"))
    assert tf.bfloat16 in {dtype for name, dtype in _dtypes(path) if "kv_accumulated" in name}
    del table, wrapper, checkpoint
    for begun in (False, True):
        table, wrapper, checkpoint = made("sums")
        if begun:
            _gather(table, wrapper, [8.0])
        status = checkpoint.restore(path)
        _gather(table, wrapper, [2.0**-9])
        status.assert_consumed()
        assert rows_of(table, [5]).item() == -3.0  # of 3.002, which the row rounds once
        _gather(table, wrapper, [1.0, 1.0])
        assert checkpoint.save(str(tmp_path / "again"))
        del table, wrapper, checkpoint, status


@pytest.mark.parametrize("begun", [False, True], ids=["before steps", "after steps"])
@pytest.mark.parametrize("saved, restored", [(1, 3), (3, 1), (2, 5), (5, 2)])
def test_gathered_sums_go_into_the_parts_that_gathered_them_alone(make, rows_of, tmp_path, saved, restored, begun):
    def made(parts):
        partitioner = tf.compat.v1.fixed_size_partitioner(parts) if parts > 1 else None
        table = make(initializer=0.0, dim=1, name="sums", partitioner=partitioner)
        wrapper = tfplugin.OptimizerWrapper(k3.SGD(1.0, gradient_accumulation_steps=2))
        return table, wrapper, tf.train.Checkpoint(table=table, optimizer=wrapper.optimizer)

    def step(table, wrapper):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, np.arange(8)))
        wrapper.apply_gradients(zip(tape.gradient(loss, _parts(table)), _parts(table), strict=True))

    table, wrapper, checkpoint = made(saved)
    step(table, wrapper)
    between = checkpoint.save(str(tmp_path / "between"))
    step(table, wrapper)
    after = checkpoint.save(str(tmp_path / "after"))
    del table, wrapper, checkpoint
    for parts, path, steps in ((saved, between, 1), (restored, between, 0), (restored, after, 2), (saved, between, 1)):
        table, wrapper, checkpoint = made(parts)
        if begun:
            step(table, wrapper)
        if steps:
            checkpoint.restore(path).expect_partial()
            for _ in range(steps):
                step(table, wrapper)
            np.testing.assert_array_equal(rows_of(table, np.arange(8)), np.full((8, 1), -float(steps)))
        else:
            with pytest.raises(ValueError, match=f"'sums' are waiting .* in {saved} parts?, and it has {parts} here"):
                checkpoint.restore(path)
                step(table, wrapper)
        del table, wrapper, checkpoint


def _dtypes(path):
    reader = tf.train.load_checkpoint(path)
    return reader.get_variable_to_dtype_map().items()


def test_slots_go_with_their_optimizer(make):
    table = make(initializer=1.0)
    gradient = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([5], tf.int64))
    optimizer = tfplugin.OptimizerWrapper(k3.Adam())
    optimizer.apply_gradients([(gradient, table)])
    assert b"Adam" in table.slots().numpy()
    del optimizer
    gc.collect()
    tfplugin.OptimizerWrapper(k3.SGD()).apply_gradients([(gradient, table)])
    assert table.slots().numpy() == b"[]"


@pytest.mark.parametrize("wrap", [tfplugin.OptimizerWrapper, de.DynamicEmbeddingOptimizer], ids=["wrapper", "de"])
def test_a_legacy_optimizer_wrapped_in_eager_mode_works_in_a_graph(wrap):
    optimizer = wrap(tf_keras.optimizers.legacy.SGD(0.5))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        dense = tf.compat.v1.get_variable("w", initializer=tf.ones([2]), use_resource=True)
        step = optimizer.apply_gradients([(tf.ones([2]), dense)])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(step)
        np.testing.assert_array_equal(session.run(dense), [0.5, 0.5])


def test_a_keras_that_asks_each_variable_whether_its_gradient_takes_its_place():
    """As Keras 3.3 to 3.7 do, with which TensorFlow 2.16 to 2.18 were released."""

    class EarlierAdam(k3.Adam):
        def _overwrite_variables_directly_with_gradients(self, grads, variables):
            assert not any(variable.overwrite_with_gradient for variable in variables)
            return grads, variables

    table = tfplugin.get_kv_variable("asked", embedding_dim=2, initializer=1.0)
    table.upsert([7], [[1.0, 1.0]])
    gradient = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([7], tf.int64))
    tfplugin.OptimizerWrapper(EarlierAdam(0.1)).apply_gradients([(gradient, table)])
    np.testing.assert_allclose(table.sparse_read([7]), [[0.9, 0.9]], rtol=1e-5)
