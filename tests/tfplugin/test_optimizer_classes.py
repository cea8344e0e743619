"""`tfplugin.optimizers`: the same update for key-value and dense variables, in graphs, eagerly and in functions."""

from __future__ import annotations

import inspect
import itertools

import numpy as np
import pytest
import tensorflow as tf

import tfplugin

v1 = tf.compat.v1
k3 = tf.keras.optimizers
ours = tfplugin.optimizers
KEYS = np.array([0, -1, 3, 2**62, -7, 8])
INITIAL = np.random.default_rng(1).normal(size=(len(KEYS), 4))

CLASSES = [
    cls
    for cls in (getattr(ours, name) for name in ours.__all__)
    if inspect.isclass(cls) and issubclass(cls, ours.FusedOptimizer) and cls is not ours.FusedOptimizer
]

#: ours -> the optimizer of Keras 3 that computes the same.
AS_KERAS = {
    "SGD": (lambda: ours.SGD(0.1), lambda: k3.SGD(0.1)),
    "momentum": (lambda: ours.SGD(0.1, 0.9), lambda: k3.SGD(0.1, 0.9)),
    "Nesterov": (lambda: ours.SGD(0.1, 0.9, True), lambda: k3.SGD(0.1, 0.9, True)),
    "Adagrad": (lambda: ours.Adagrad(0.1), lambda: k3.Adagrad(0.1)),
    "Adam": (lambda: ours.Adam(0.01), lambda: k3.Adam(0.01)),
    "amsgrad": (lambda: ours.Adam(0.01, amsgrad=True), lambda: k3.Adam(0.01, amsgrad=True)),
    "AMSGrad": (lambda: ours.AMSGrad(0.01), lambda: k3.Adam(0.01, amsgrad=True)),
    "AdamW": (lambda: ours.AdamW(0.01), lambda: k3.AdamW(0.01)),
    "RMSprop": (lambda: ours.RMSprop(0.01), lambda: k3.RMSprop(0.01)),
    "centered RMSprop": (
        lambda: ours.RMSprop(0.01, momentum=0.5, centered=True),
        lambda: k3.RMSprop(0.01, momentum=0.5, centered=True),
    ),
    "Adadelta": (lambda: ours.Adadelta(1.0), lambda: k3.Adadelta(1.0)),
    "Adamax": (lambda: ours.Adamax(0.01), lambda: k3.Adamax(0.01)),
    "Nadam": (lambda: ours.Nadam(0.01), lambda: k3.Nadam(0.01)),
    "Ftrl": (
        lambda: ours.Ftrl(0.1, l1_regularization_strength=0.01, beta=0.1),
        lambda: k3.Ftrl(0.1, l1_regularization_strength=0.01, beta=0.1),
    ),
    "Lion": (lambda: ours.Lion(0.01), lambda: k3.Lion(0.01)),
    "Lamb": (lambda: ours.Lamb(0.01), lambda: k3.Lamb(0.01)),
    "schedule": (
        lambda: ours.SGD(k3.schedules.ExponentialDecay(0.1, 2, 0.5)),
        lambda: k3.SGD(k3.schedules.ExponentialDecay(0.1, 2, 0.5)),
    ),
}


def _penalizing_dense(cls, *args):
    """An optimizer that treats dense variables as it does tables."""
    asked = "regularize_dense" in inspect.signature(cls).parameters
    return cls(*args, **({"regularize_dense": True} if asked else {}))


def _batches(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        ids = rng.permutation(np.concatenate([np.arange(len(KEYS)), rng.integers(0, len(KEYS), 4)]))
        yield tf.constant(ids), tf.constant(rng.normal(size=(len(ids), 4)))


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("name", AS_KERAS)
def test_dense_variables_move_as_under_keras(name, function):
    make_ours, make_keras = AS_KERAS[name]
    mine, theirs = tf.Variable(INITIAL), tf.Variable(INITIAL)
    optimizers = make_ours(), make_keras()

    def step(ids, factor):
        for optimizer, variable in zip(optimizers, (mine, theirs), strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.sin(tf.gather(variable, ids)) * factor)
            gradient = tf.convert_to_tensor(tape.gradient(loss, variable))
            optimizer.apply_gradients([(gradient, variable)])

    run = tf.function(step) if function else step
    for ids, factor in _batches(20):
        run(ids, factor)
    # Keras rounds some hyperparameters to float32.
    np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)
    assert int(optimizers[0].iterations) == 20


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_rows_of_a_table_move_as_rows_of_a_dense_variable(make, rows_of, partitioner, cls, function):
    """Both by slices, of which some are of equal keys. The key-value variable may have parts."""
    table = make(name="t", value_dtype=tf.float64, partitioner=partitioner)
    table.upsert(KEYS, INITIAL)
    dense = tf.Variable(INITIAL)
    parts = list(table) if partitioner else [table]
    optimizer = _penalizing_dense(cls)

    def step(ids, factor):
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(tf.sin(tf.nn.embedding_lookup(table, tf.gather(KEYS, ids))) * factor)
            loss += tf.reduce_sum(tf.sin(tf.gather(dense, ids)) * factor)
        variables = [*parts, dense]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    run = tf.function(step) if function else step
    for ids, factor in _batches(6):
        run(ids, factor)
    np.testing.assert_allclose(rows_of(table, KEYS), dense.numpy(), rtol=1e-12, atol=1e-12)
    assert np.abs(dense.numpy() - INITIAL).max() > 1e-7
    assert set(tfplugin.explain(optimizer).to_dict().values()) == {f"fused: {optimizer.rule()}"}


@pytest.mark.parametrize("cls", [ours.Adam, ours.GroupFtrl, ours.Nadam])
def test_a_graph_moves_rows_as_eager_code_does(make, rows_of, cls):
    gradient = np.random.default_rng(3).normal(size=(3, 4))
    table, optimizer = make(name="t", value_dtype=tf.float64, initializer=1.0), cls(0.1)
    weights = tf.Variable(np.ones([2, 2]))
    for _ in range(3):
        slices = tf.IndexedSlices(tf.constant(gradient), tf.constant([1, 2, 2], tf.int64))
        optimizer.apply_gradients([(slices, table), (tf.ones([2, 2], tf.float64), weights)])
    expected = rows_of(table, [1, 2]), weights.numpy()
    with tf.Graph().as_default(), v1.Session() as session:
        table = v1.get_kv_variable("t", 4, value_dtype=tf.float64, initializer=1.0)
        weights = v1.get_variable("w", initializer=np.ones([2, 2]), use_resource=True)
        rows = tf.nn.embedding_lookup(table, tf.constant([1, 2, 2], tf.int64))
        count = v1.train.get_or_create_global_step()
        step = cls(0.1).minimize(tf.reduce_sum(rows * gradient) + tf.reduce_sum(weights), global_step=count)
        session.run(v1.global_variables_initializer())
        for _ in range(3):
            session.run(step)
        assert session.run(count) == 3
        np.testing.assert_allclose(session.run(table.sparse_read([1, 2])), expected[0], rtol=1e-12)
        np.testing.assert_allclose(session.run(weights), expected[1], rtol=1e-12)


def test_minimize_takes_functions_and_tables(make, rows_of, partitioner):
    table, weight = make(dim=1, initializer=1.0, partitioner=partitioner), tf.Variable([1.0])
    optimizer = ours.SGD(0.5)

    def loss():
        return tf.reduce_sum(tf.nn.embedding_lookup(table, [5]) * weight)

    optimizer.minimize(loss, var_list=[table, weight])
    optimizer.minimize(loss)
    assert rows_of(table, [5]).tolist() == [[0.25]]
    assert weight.numpy().tolist() == [0.25]
    # One variable, not in a list.
    optimizer.minimize(loss, var_list=table)
    tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(0.5)).minimize(loss, table)
    tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(0.5)).minimize(loss, weight)
    assert rows_of(table, [5]).tolist() == [[0.0]]
    assert weight.numpy().tolist() == [0.25]


def test_learning_rates_of_every_kind(make, rows_of):
    step = _one_step(make, rows_of)
    variable = tf.Variable(0.5)
    for rate in (0.5, tf.constant(0.5), variable, lambda: 0.5, lambda count: 0.5 + 0 * float(count)):
        assert step(ours.SGD(rate)) == 0.5
    optimizer = ours.SGD(variable)
    optimizer.learning_rate = 0.25
    assert variable.numpy() == 0.25
    assert step(optimizer) == 0.75
    optimizer.learning_rate = 1.0
    assert step(optimizer) == 0.0


def test_penalties_that_a_schedule_lowers_are_a_warning(recwarn):
    schedule = k3.schedules.CosineDecay(0.1, 10)
    ours.GroupAdam(schedule)
    ours.GroupAdam(0.1, l21_regularization_strength=0.1)
    ours.GroupFtrl(schedule, l21_regularization_strength=0.1)
    assert not recwarn
    with pytest.warns(UserWarning, match="GroupAdam: l1 and l21 count per unit of learning rate.*come back"):
        ours.GroupAdam(schedule, l21_regularization_strength=0.1)


@pytest.mark.parametrize("cls", [ours.SGD, ours.GroupAdam])
def test_a_learning_rate_that_a_function_was_traced_with_is_not_lost_in_silence(make, cls):
    table, optimizer = make(name="t"), cls(0.5)

    @tf.function
    def step():
        optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([1, 4]), tf.constant([5], tf.int64)), table)])

    optimizer.learning_rate = 0.25
    step()
    with pytest.raises(ValueError, match=r"built with the learning rate 0\.25, and would go on with it.*tf\.Variable"):
        optimizer.learning_rate = 0.125
    assert optimizer.learning_rate == 0.25


def test_a_variable_s_learning_rate_changes_what_was_traced(make, rows_of):
    table, optimizer = make(name="t", dim=1, initializer=1.0), ours.SGD(tf.Variable(0.5))

    @tf.function
    def step():
        optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([1, 1]), tf.constant([5], tf.int64)), table)])

    step()
    optimizer.learning_rate = 0.25
    step()
    assert rows_of(table, [5]).tolist() == [[0.25]]


def _one_step(make, rows_of):
    names = itertools.count()

    def step(optimizer, **kwargs):
        table = make(dim=1, name=f"t{next(names)}", initializer=1.0)
        gradient = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([5], tf.int64))
        optimizer.apply_gradients([(gradient, table)], **kwargs)
        return float(rows_of(table, [5])[0, 0])

    return step


def test_a_schedule_is_given_the_global_step_or_else_iterations(make, rows_of):
    step = _one_step(make, rows_of)
    optimizer = ours.SGD(lambda count: tf.where(tf.equal(count, 1), 0.25, 0.5))
    assert [step(optimizer) for _ in range(3)] == [0.5, 0.75, 0.5]
    assert step(optimizer, global_step=tf.Variable(1, dtype=tf.int64)) == 0.75


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ours.Adam(beta_1=1.0), r"Adam: beta_1 must be at least 0 and less than 1, got 1.0"),
        (lambda: ours.Adam(float("nan")), "Adam: learning_rate must be a finite number, got nan"),
        (lambda: ours.SGD(0.1, momentum=-0.1), "SGD: momentum must be 0 to 1"),
        (lambda: ours.Ftrl(0.1, learning_rate_power=0.5), "Ftrl: learning_rate_power must be 0 or less"),
        (lambda: ours.GroupAdam(l21_regularization_strength=-1.0), "GroupAdam: l21 must be 0 or more"),
        (lambda: ours.Adagrad(initial_accumulator_value=-1.0), "initial_accumulator_value must be 0 or more"),
        (lambda: ours.RectifiedAdam(warmup_proportion=2), "RectifiedAdam: warmup_proportion must be 0 to 1, got 2"),
        (lambda: ours.RectifiedAdam(total_steps=-1), "RectifiedAdam: total_steps must be 0 or more"),
        (lambda: ours.AdamW(weight_decay=float("inf")), "weight_decay must be 0 or more, got inf"),
        (lambda: ours.Adam(np.float32("nan")), "learning_rate must be a finite number, got .*nan"),
        (lambda: ours.Adam("0.1"), "Adam: learning_rate must be a number, got '0.1'"),
        (lambda: ours.Adam(None), "Adam: learning_rate must be a number, got None"),
        (lambda: ours.GroupAdam(l21_regularization_strength="1"), "GroupAdam: l21 must be a number, got '1'"),
        (lambda: ours.GroupAdam(l21_regularization_strength=np.float32(-1)), "GroupAdam: l21 must be 0 or more"),
        (lambda: ours.Ftrl(0.0), "Ftrl: learning_rate must be more than 0, got 0.0"),
        (lambda: ours.GroupFtrl(-0.1), "GroupFtrl: learning_rate must be more than 0"),
    ],
)
def test_numbers_out_of_range(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_tensors_out_of_range_leave_all_as_it_was(make):
    table, dense = make(name="emb"), tf.Variable(np.ones([2, 4]))
    optimizer = ours.Adam(beta_2=tf.constant(2.0))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"'emb'.*beta_2 = 2"):
        optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([1, 4]), tf.constant([5], tf.int64)), table)])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"'Variable:0'.*beta_2 = 2"):
        optimizer.apply_gradients([(tf.ones([2, 4], tf.float64), dense)])
    assert int(table.size()) == 0
    assert (dense.numpy() == 1).all()
    assert int(optimizer.iterations) == 0


def test_dense_gradients_that_do_not_fit():
    dense = tf.Variable(np.ones([2, 4]), name="w")
    for gradient, message in (
        (tf.ones([2, 3]), r"'w:0' wants a gradient of shape \[2,4\], got \[2,3\]"),
        (tf.IndexedSlices(tf.ones([1, 4]), tf.constant([2])), "'w:0' has 2 rows, got index 2"),
        (tf.IndexedSlices(tf.ones([1, 4]), tf.constant([-1])), "'w:0' has 2 rows, got index -1"),
        (tf.IndexedSlices(tf.ones([1, 3]), tf.constant([0])), r"wants a gradient of shape \[1,4\]"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            ours.Adagrad(0.1).apply_gradients([(gradient, dense)])
    assert (dense.numpy() == 1).all()


def test_a_value_that_was_read_before_the_step_stays():
    for sparse in (False, True):
        dense = tf.Variable(np.ones([2, 4]))
        before = dense.read_value()
        gradient = tf.IndexedSlices(tf.ones([1, 4], tf.float64), tf.constant([0])) if sparse else tf.ones([2, 4])
        optimizer = ours.SGD(1.0)
        for _ in range(2):
            optimizer.apply_gradients([(gradient, dense)])
        assert (before.numpy() == 1).all()
        assert (dense.numpy()[0] == -1).all()


def test_16_bit_dense_variables_sum_slices_in_float32():
    dense = tf.Variable(tf.zeros([1, 2], tf.bfloat16))
    gradient = tf.IndexedSlices(tf.fill([512, 2], tf.constant(1.0, tf.bfloat16)), tf.zeros([512], tf.int32))
    ours.SGD(1.0).apply_gradients([(gradient, dense)])
    assert tf.cast(dense, tf.float32).numpy().tolist() == [[-512, -512]]


def _graph_step(make_optimizer, use_resource, sparse, steps=3):
    """A dense variable and a table after some steps of a session."""
    with tf.Graph().as_default(), v1.Session() as session:
        table = v1.get_kv_variable("t", 4, initializer=1.0)
        dense = v1.get_variable("w", initializer=tf.reshape(tf.range(12.0), [3, 4]) / 12, use_resource=use_resource)
        rows = tf.nn.embedding_lookup(table, tf.constant([5, 6, 5], tf.int64))
        used = tf.gather(dense, [2, 0, 2]) if sparse else dense
        step = make_optimizer().minimize(tf.reduce_sum(rows * used**2))
        session.run(v1.global_variables_initializer())
        for _ in range(steps):
            session.run(step)
        return session.run([dense, table.sparse_read([5, 6])])


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "slices"])
@pytest.mark.parametrize("cls", [*CLASSES, v1.train.AdamOptimizer, v1.train.FtrlOptimizer], ids=lambda c: c.__name__)
def test_reference_variables_move_as_resource_variables_do(cls, sparse):
    for got, expected in zip(
        _graph_step(lambda: cls(0.1), False, sparse), _graph_step(lambda: cls(0.1), True, sparse), strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-7)


def test_arguments_by_their_other_names():
    adam = ours.GroupAdam(
        0.1, initial_accumulator_value=0.0, beta1=0.8, beta2=0.9, use_locking=True, accum_name=None, linear_name=None
    )
    assert (adam._hyperparameters["beta_1"], adam._hyperparameters["beta_2"]) == (0.8, 0.9)
    ours.SparseGroupFtrl(0.1, -0.5, 0.1, 0.0, 0.0, 0.0, use_locking=False, accum_name=None, linear_name=None)
    assert ours.SGD(0.1, 0.9, use_nesterov=True, use_locking=False)._hyperparameters["nesterov"] == 1.0
    for cls in CLASSES:
        cls(0.1, use_locking=True)
    with pytest.raises(TypeError, match="got both beta_1 and beta1, which are one"):
        ours.Adam(0.1, 0.9, beta1=0.9)
    with pytest.raises(ValueError, match="GroupAdam: version must be 4, got 2"):
        ours.GroupAdam(0.1, version=2)
    with pytest.raises(ValueError, match="accum_name and linear_name must be None"):
        ours.GroupFtrl(0.1, accum_name="a")
    with pytest.raises(TypeError, match="unexpected keyword argument 'beta3'"):
        ours.Adam(0.1, beta3=0.9)


def rectified_adam(w, gradients, lr, beta_1=0.9, beta_2=0.9, epsilon=1e-7, threshold=4.0, **options):
    """In plain NumPy, of float64."""
    m, v, most = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        rate = lr / (1 + options.get("decay", 0) * t)
        if total := options.get("total_steps", 0):
            warmup, low = total * options["warmup_proportion"], options["min_lr"]
            falling = max(total - warmup, 1)
            slope = (low - rate) / falling
            rate = rate * t / warmup if t <= warmup else rate + slope * min(t - warmup, falling)
        m, v = beta_1 * m + (1 - beta_1) * g, beta_2 * v + (1 - beta_2) * g**2
        most = np.maximum(most, v)
        first = (beta_1 * m + (1 - beta_1) * g if options.get("use_nesterov") else m) / (1 - beta_1**t)
        second = (most if options.get("amsgrad") else v) / (1 - beta_2**t)
        longest = 2 / (1 - beta_2) - 1
        length = longest - 2 * t * beta_2**t / (1 - beta_2**t)
        update = first
        if length >= threshold:
            r = np.sqrt((length - 4) / (longest - 4) * (length - 2) / (longest - 2) * longest / length)
            update = r * first / (np.sqrt(second) + epsilon)
        w = w - rate * (update + options.get("weight_decay", 0) * w)
    return w


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"amsgrad": True},
        {"use_nesterov": True},
        {"decay": 0.1, "weight_decay": 0.1},
        {"total_steps": 8, "warmup_proportion": 0.25, "min_lr": 1e-3},
        {"total_steps": 8, "warmup_proportion": 0.0, "min_lr": 1e-3},
        {
            "amsgrad": True,
            "use_nesterov": True,
            "total_steps": 8,
            "warmup_proportion": 0.5,
            "min_lr": 0.0,
            "decay": 0.1,
        },
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_rectified_adam_against_numpy(make, rows_of, options, function):
    table, dense = make(dim=4, value_dtype=tf.float64, initializer=1.0), tf.Variable(np.ones([2, 4]))
    optimizer = ours.RectifiedAdam(0.05, beta_2=0.9, sma_threshold=4.0, **options)
    gradients = np.random.default_rng(0).normal(size=(12, 2, 4))

    def step(gradient):
        optimizer.apply_gradients(
            [(tf.IndexedSlices(gradient, tf.constant([1, 2], tf.int64)), table), (gradient, dense)]
        )

    step = tf.function(step) if function else step
    for gradient in gradients:
        step(tf.constant(gradient))
    expected = rectified_adam(np.ones([2, 4]), gradients, 0.05, **options)
    np.testing.assert_allclose(rows_of(table, [1, 2]), expected, rtol=1e-9)
    np.testing.assert_allclose(dense.numpy(), expected, rtol=1e-9)


def test_state_goes_through_a_checkpoint(make, rows_of, tmp_path):
    gradient = tf.IndexedSlices(tf.ones([1, 4]), tf.constant([5], tf.int64))

    def trained(steps, path=None):
        table, dense, optimizer = make(name="t", initializer=1.0), tf.Variable(tf.ones([2, 2])), ours.Adam(0.1)
        saved = tf.train.Checkpoint(table=table, dense=dense, optimizer=optimizer)
        if path is not None:
            saved.restore(path)
        for _ in range(steps):
            optimizer.apply_gradients([(gradient, table), (tf.ones([2, 2]), dense)])
        return table, dense, optimizer, saved

    *_, saved = trained(3)
    resumed, straight = trained(2, saved.save(str(tmp_path / "c"))), trained(5)
    assert int(resumed[2].iterations) == 5
    np.testing.assert_array_equal(rows_of(resumed[0], [5]), rows_of(straight[0], [5]))
    np.testing.assert_array_equal(resumed[1].numpy(), straight[1].numpy())


def test_state_goes_through_a_saver(tmp_path):
    def trained(steps, path=None):
        with tf.Graph().as_default(), v1.Session() as session:
            table = v1.get_kv_variable("t", 4, initializer=1.0)
            dense = v1.get_variable("w", initializer=tf.ones([4]), use_resource=True)
            rows = tf.nn.embedding_lookup(table, tf.constant([5], tf.int64))
            optimizer = ours.Adam(0.1)
            step = optimizer.minimize(tf.reduce_sum(rows * dense))
            saver = v1.train.Saver()
            if path is None:
                session.run(v1.global_variables_initializer())
            else:
                saver.restore(session, path)
            for _ in range(steps):
                session.run(step)
            saved = saver.save(session, str(tmp_path / "model"))
            return saved, *session.run([table.sparse_read([5]), dense, optimizer.iterations])

    path, *_ = trained(3)
    resumed = trained(2, path)
    straight = trained(5)
    for got, expected in zip(resumed[1:], straight[1:], strict=True):
        np.testing.assert_array_equal(got, expected)


def test_a_wrapper_and_a_constraint(make, rows_of):
    gradient = tf.IndexedSlices(tf.fill([2, 2], np.nan), tf.constant([1, 2], tf.int64))
    table = make(dim=2, name="a")
    tfplugin.OptimizerWrapper(ours.Adam(skip_nonfinite=True)).apply_gradients([(gradient, table)])
    assert int(table.skipped_updates()) == 2
    with pytest.raises(ValueError, match="Lamb has no update but the fused one"):
        tfplugin.OptimizerWrapper(ours.Lamb(), fused=False)
    gradient = tf.IndexedSlices(tf.constant([[1.0, 2.0], [3.0, 1.0]]), tf.constant([1, 2], tf.int64))
    free = make(dim=2, name="b", initializer=1.0)
    bound = make(dim=2, name="c", initializer=1.0, constraint=lambda rows: tf.maximum(rows, 0.95))
    for variable in (free, bound):
        ours.Lamb(0.1).apply_gradients([(gradient, variable)])
    np.testing.assert_allclose(rows_of(bound, [1, 2]), np.maximum(rows_of(free, [1, 2]), 0.95), rtol=1e-6)


def test_variables_of_keras_layers(make):
    table, layer = make(name="t"), tf.keras.layers.Dense(1)
    optimizer = ours.Adam(0.1)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.nn.embedding_lookup(table, [1, 2])))
    before = layer.kernel.numpy()
    variables = [table, *layer.trainable_variables]
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    assert (layer.kernel.numpy() != before).all()


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("optimizer", [tfplugin.optimizers.SGD, tf.compat.v1.train.GradientDescentOptimizer])
def test_variables_in_the_place_of_the_global_step(make, optimizer, listed):
    table = make(name="misplaced")
    before = tf.nn.embedding_lookup(table, [1]).numpy()
    with pytest.raises(TypeError, match=r"second one of minimize .* is global_step.*var_list="):
        optimizer(0.1).minimize(lambda: tf.reduce_sum(tf.nn.embedding_lookup(table, [1])), [table] if listed else table)
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [1]), before)


def test_each_class_says_what_it_does():
    for cls in CLASSES:
        doc = inspect.getdoc(cls)
        assert "Example:" in doc and "Args:" in doc and f"{cls.__name__}(" in doc, cls
        assert len(cls().slots()) == len({name for name, _ in cls().slots()}), cls
