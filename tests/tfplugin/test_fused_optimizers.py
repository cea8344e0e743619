"""Fused updates: one op per step and table does what the stock optimizer does to the rows that the step touched."""

from __future__ import annotations

import json
import logging

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin

v1 = tf.compat.v1
train = v1.train
k3, new, legacy = tf.keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy
KEYS = np.array([0, -1, 3, 2**62, -7, 8, -(2**63), 2**63 - 1])
STEPS = 100

STOCK = {
    "v1 GradientDescent": lambda: train.GradientDescentOptimizer(0.1),
    "v1 Momentum": lambda: train.MomentumOptimizer(0.01, 0.9, use_nesterov=True),
    "v1 Adagrad": lambda: train.AdagradOptimizer(0.1),
    "v1 Adam": lambda: train.AdamOptimizer(0.01),
    "v1 RMSProp": lambda: train.RMSPropOptimizer(0.01, momentum=0.5),
    "v1 Adadelta": lambda: train.AdadeltaOptimizer(1.0),
    "v1 Ftrl": lambda: train.FtrlOptimizer(0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.01),
    "Keras SGD": lambda: k3.SGD(0.01, momentum=0.9),
    "Keras Adam": lambda: k3.Adam(0.01),
    "Keras AMSGrad": lambda: k3.Adam(0.01, amsgrad=True),
    "Keras AdamW": lambda: k3.AdamW(0.01),
    "Keras Adagrad": lambda: k3.Adagrad(0.1),
    "Keras Adadelta": lambda: k3.Adadelta(1.0),
    "Keras Adamax": lambda: k3.Adamax(0.01),
    "Keras Nadam": lambda: k3.Nadam(0.01),
    "Keras RMSprop": lambda: k3.RMSprop(0.01),
    "Keras Ftrl": lambda: k3.Ftrl(0.1, l1_regularization_strength=0.01),
    "tf_keras SGD": lambda: new.SGD(0.01, momentum=0.9),
    "tf_keras Adam": lambda: new.Adam(0.01),
    "tf_keras Adagrad": lambda: new.Adagrad(0.1),
    "tf_keras RMSprop": lambda: new.RMSprop(0.01, momentum=0.5),
    "tf_keras Adamax": lambda: new.Adamax(0.01),
    "tf_keras Nadam": lambda: new.Nadam(0.01),
    "tf_keras Ftrl": lambda: new.Ftrl(0.1, l1_regularization_strength=0.01),
    "legacy Adam": lambda: legacy.Adam(0.01),
}
DIMS = (1, 7, 8, 16, 64, 100, 129)


@pytest.mark.parametrize("name", STOCK)
def test_hundred_steps_in_float32(make, rows_of, name):
    """To 1e-5, fused and not. Every row is touched, some twice; all dims in one step, one optimizer for all.

    Gradients do not depend on rows: rounding would add up.
    """
    # tf_keras's Nadam counts wrongly in functions, and takes its time without.
    eager = name == "tf_keras Nadam"
    dims = (8, 129) if eager else DIMS
    rng = np.random.default_rng(2)
    initial = {dim: rng.normal(size=(len(KEYS), dim)).astype(np.float32) for dim in dims}
    dense, dense_optimizer = [tf.Variable(initial[dim]) for dim in dims], STOCK[name]()
    tables = {fused: [make(dim=dim, name=f"{fused}_{dim}") for dim in dims] for fused in ("auto", False)}
    for of_all_dims in tables.values():
        for table, dim in zip(of_all_dims, dims, strict=True):
            table.upsert(KEYS, initial[dim])
    optimizers = {fused: tfplugin.OptimizerWrapper(STOCK[name](), fused=fused) for fused in tables}

    def step(ids, keys, *rows):
        gradients = [tf.math.unsorted_segment_sum(r, ids, len(KEYS)) for r in rows]
        dense_optimizer.apply_gradients(zip(gradients, dense, strict=True))
        for fused, optimizer in optimizers.items():
            slices = [tf.IndexedSlices(r, keys) for r in rows]
            optimizer.apply_gradients(zip(slices, tables[fused], strict=True))

    run = step if eager else tf.function(step)
    for _ in range(STEPS):
        ids = rng.permutation(np.concatenate([np.arange(len(KEYS)), rng.integers(0, len(KEYS), 6)]))
        factors = [tf.constant(rng.normal(size=(len(ids), dim)), tf.float32) for dim in dims]
        run(tf.constant(ids), tf.constant(KEYS[ids]), *factors)
    for fused, of_all_dims in tables.items():
        for table, expected in zip(of_all_dims, dense, strict=True):
            expected = expected.numpy()
            bound = 1e-5 * np.abs(expected).max()
            np.testing.assert_allclose(rows_of(table, KEYS), expected, rtol=1e-5, atol=bound, err_msg=f"{fused=}")


def _slices(keys, rows):
    return tf.IndexedSlices(tf.constant(rows), tf.constant(keys, tf.int64))


def _slot_list(table):
    return json.loads(table.slots().numpy())


@pytest.mark.parametrize("name", STOCK)
def test_slots_are_named_as_the_generic_update_names_them(make, name):
    slots = []
    for fused in ("auto", False):
        table = make(name=f"t{fused}")
        tfplugin.OptimizerWrapper(STOCK[name](), fused=fused).apply_gradients(
            [(_slices([1], np.ones([1, 4], np.float32)), table)]
        )
        slots.append(sorted(json.dumps(slot) for slot in _slot_list(table)))
    assert slots[0] == slots[1]


@pytest.mark.parametrize("make_optimizer", [STOCK["v1 Adam"], STOCK["Keras Adam"], STOCK["legacy Adam"]])
@pytest.mark.parametrize("first", ["auto", False])
def test_a_checkpoint_of_one_way_goes_on_in_the_other(make, rows_of, tmp_path, make_optimizer, first):
    gradient = _slices([1, 2, 2], np.arange(12, dtype=np.float32).reshape(3, 4))

    def trained(fused, steps, path=None):
        table = make(name="t", initializer=1.0)
        optimizer = tfplugin.OptimizerWrapper(make_optimizer(), fused=fused)
        saved = tf.train.Checkpoint(table=table, optimizer=optimizer.optimizer)
        if path is not None:
            saved.restore(path)
        for _ in range(steps):
            optimizer.apply_gradients([(gradient, table)])
        return table, saved

    _, saved = trained(first, 3)
    resumed, _ = trained(False if first else "auto", 3, saved.save(str(tmp_path / "c")))
    straight, _ = trained(first, 6)
    np.testing.assert_allclose(rows_of(resumed, [1, 2]), rows_of(straight, [1, 2]), rtol=1e-5)


def test_a_graphs_step_is_one_gather_and_one_update(session):
    table = v1.get_kv_variable("t", embedding_dim=4)
    rows = tf.nn.embedding_lookup(table, tf.constant([1, 2], tf.int64))
    step = train.AdamOptimizer().minimize(tf.reduce_sum(rows))
    ops, stack = set(), [step]
    while stack:
        op = stack.pop()
        if op not in ops:
            ops.add(op)
            stack += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    types = [op.type for op in ops if op.type.startswith("KvTable")]
    assert sorted(types) == ["KvTableApply", "KvTableGather", "KvTableHandle"]
    assert not [op for op in ops if op.type in ("Unique", "UniqueV2", "UnsortedSegmentSum")]
    # The update begins at the positions that the lookup remembered.
    update = next(op for op in ops if op.type == "KvTableApply")
    assert update.inputs[2].op.inputs[0].op.type == "KvTableGather"


def test_explain_says_which_way_and_why(make):
    plain, bound = make(name="plain"), make(name="bound", constraint=lambda rows: rows)
    dense = tf.Variable([1.0])

    class MyAdam(k3.Adam):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate)

    class Renamed(k3.Adam):
        pass

    def of(optimizer, **options):
        return tfplugin.OptimizerWrapper(optimizer, **options).explain([plain]).to_dict()["plain:0"]

    wrapper = tfplugin.OptimizerWrapper(k3.Adam())
    assert str(wrapper.explain()) == "no variables yet"
    gradient = _slices([1], np.ones([1, 4], np.float32))
    wrapper.apply_gradients([(gradient, plain), (gradient, bound), (tf.ones([1]), dense)])
    assert wrapper.explain().to_dict() == {
        "plain:0": "fused: adam",
        "bound:0": "generic: the variable has a constraint",
        dense.name: "TensorFlow's own update",
    }
    assert "plain:0      fused: adam\n" in str(wrapper.explain())
    assert of(k3.Adam(), fused=False) == "generic: fused=False"
    assert of(MyAdam()) == "generic: MyAdam has a update_step of its own"
    assert of(Renamed()) == "fused: adam"
    assert of(k3.Adafactor()) == "generic: no fused kernel for Adafactor"
    scaled = train.experimental.MixedPrecisionLossScaleOptimizer(train.AdamOptimizer(), 2.0)
    assert tfplugin.explain(scaled, [plain]).to_dict() == {"plain:0": "fused: adam"}
    assert tfplugin.explain(train.FtrlOptimizer(0.1), [plain]).to_dict() == {"plain:0": "fused: ftrl"}
    with pytest.raises(ValueError, match="fused must be 'auto' or False"):
        tfplugin.OptimizerWrapper(k3.Adam(), fused=True)


def test_a_subclass_with_its_own_update_runs_it(make, rows_of):
    class Half(train.GradientDescentOptimizer):
        def _resource_apply_dense(self, grad, handle):
            return super()._resource_apply_dense(grad / 2, handle)

    table = make(initializer=1.0)
    optimizer = Half(1.0)
    optimizer.apply_gradients([(_slices([1], np.ones([1, 4], np.float32)), table)])
    assert rows_of(table, [1])[0, 0] == 0.5
    assert tfplugin.explain(optimizer).to_dict() == {"v:0": "generic: Half has a _resource_apply_dense of its own"}


def test_weight_decay_leaves_out_what_is_excluded(make, rows_of):
    for make_optimizer in (lambda: k3.SGD(0.5, weight_decay=0.5), lambda: new.SGD(0.5, weight_decay=0.5)):
        for fused in ("auto", False):
            decayed, spared, by_name = (make(name=n, initializer=1.0, dim=1) for n in ("a", "b", "spare_me"))
            optimizer = make_optimizer()
            if isinstance(optimizer, k3.Optimizer):
                optimizer.exclude_from_weight_decay([spared], ["spare_me"])
            else:
                optimizer._exclude_from_weight_decay = [spared._unique_id]
                optimizer._exclude_from_weight_decay_names = ["spare_me"]
            gradient = _slices([1], np.ones([1, 1], np.float32))
            wrapper = tfplugin.OptimizerWrapper(optimizer, fused=fused)
            wrapper.apply_gradients([(gradient, v) for v in (decayed, spared, by_name)])
            got = [float(rows_of(v, [1])[0, 0]) for v in (decayed, spared, by_name)]
            assert got == [0.25, 0.5, 0.5], (optimizer, fused)


@pytest.mark.parametrize("keras", [k3, new], ids=["keras3", "tf_keras"])
def test_weight_decay_leaves_out_a_partitioned_variable(make, rows_of, keras):
    table = make(partitioner=tf.compat.v1.fixed_size_partitioner(2), initializer=1.0, dim=1)
    optimizer = keras.SGD(0.5, weight_decay=0.5)
    optimizer.exclude_from_weight_decay([table])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2]))
    optimizer.apply_gradients(zip(tape.gradient(loss, list(table)), table, strict=True))
    assert rows_of(table, [1, 2]).tolist() == [[0.5], [0.5]]


@pytest.mark.parametrize("keras", [k3, new, new.legacy], ids=["keras3", "tf_keras", "legacy"])
def test_ftrl_names_a_learning_rate_of_zero(make, keras):
    table = make()
    with pytest.raises(tf.errors.InvalidArgumentError, match="learning_rate = 0; expected more than 0"):
        keras.Ftrl(0.0, beta=0.1).apply_gradients([(_slices([1], np.ones([1, 4], np.float32)), table)])
    assert int(table.size()) == 0


def test_lamb_takes_its_norms_per_row(make, rows_of):
    table = make(dim=2, initializer=1.0)
    table.upsert([1, 2], [[3.0, 4.0], [0.3, 0.4]])
    tfplugin.OptimizerWrapper(k3.Lamb(0.1)).apply_gradients([(_slices([1, 2], np.ones([2, 2], np.float32)), table)])
    for key, row in ((1, [3.0, 4.0]), (2, [0.3, 0.4])):
        alone = tf.Variable([row])
        k3.Lamb(0.1).apply_gradients([(tf.ones([1, 2]), alone)])
        np.testing.assert_allclose(rows_of(table, [key]), alone.numpy(), rtol=1e-5)


def test_slots_cost_their_bytes(make):
    table = make(dim=16)
    table.upsert(np.arange(1000), np.zeros([1000, 16], np.float32))
    for name, slots in (("Keras AMSGrad", 3), ("Keras SGD", 1)):
        before = int(table.memory()[1]) // 1000 // 64
        optimizer = tfplugin.OptimizerWrapper(STOCK[name]())
        optimizer.apply_gradients([(_slices([1], np.ones([1, 16], np.float32)), table)])
        assert before == 1
        assert int(table.memory()[1]) == 1000 * 16 * 4 * (1 + slots)
        del optimizer
        tfplugin.OptimizerWrapper(k3.SGD()).apply_gradients([(_slices([1], np.ones([1, 16], np.float32)), table)])


@pytest.mark.parametrize("fused", ["auto", False])
@pytest.mark.parametrize("make_optimizer", [lambda: train.GradientDescentOptimizer(1.0), lambda: k3.SGD(1.0)])
def test_clipped_gradients(make, rows_of, make_optimizer, fused):
    gradient = tf.IndexedSlices(tf.constant([[3.0], [4.0]]), tf.constant([1, 2], tf.int64), dense_shape=[3, 1])
    for clip, expected in (
        (lambda g: tf.clip_by_global_norm([g], 1.0)[0][0], [-0.6, -0.8]),
        (lambda g: tf.clip_by_norm(g, 2.5), [-1.5, -2.0]),
        (lambda g: tf.IndexedSlices(tf.clip_by_value(g.values, -3.5, 3.5), g.indices), [-3.0, -3.5]),
    ):
        table = make(dim=1, initializer=0.0)
        tfplugin.OptimizerWrapper(make_optimizer(), fused=fused).apply_gradients([(clip(gradient), table)])
        np.testing.assert_allclose(rows_of(table, [1, 2])[:, 0], expected, rtol=1e-6)


def test_keras_clips_the_sum_of_a_rows_gradients(make, rows_of):
    gradient = _slices([1, 1], np.array([[3.0, 0.0], [0.0, 4.0]], np.float32))
    for optimizer in (k3.SGD(1.0, clipnorm=1.0), new.SGD(1.0, clipnorm=1.0), legacy.SGD(1.0, clipnorm=1.0)):
        table = make(dim=2, initializer=0.0)
        tfplugin.OptimizerWrapper(optimizer).apply_gradients([(gradient, table)])
        np.testing.assert_allclose(rows_of(table, [1]), [[-0.6, -0.8]], rtol=1e-6)


def test_gradients_that_are_not_finite(make, rows_of):
    bad = np.array([[1.0, np.nan], [1.0, 1.0], [np.inf, 1.0], [-np.inf, 1.0]], np.float32)
    for make_optimizer in (lambda: train.AdagradOptimizer(0.1), lambda: k3.Adagrad(0.1)):
        table, skipping = make(name="a", dim=2, initializer=1.0), make(name="b", dim=2, initializer=1.0)
        tfplugin.OptimizerWrapper(make_optimizer()).apply_gradients([(_slices([1, 2, 3, 3], bad), table)])
        assert np.isnan(rows_of(table, [1, 2, 3])).any(1).tolist() == [True, False, True]
        assert int(table.skipped_updates()) == 0
        optimizer = tfplugin.OptimizerWrapper(make_optimizer(), skip_nonfinite=True)
        skipping.upsert([1], [[1.0, 1.0]])
        optimizer.apply_gradients([(_slices([1, 2, 3, 3], bad), skipping)])
        assert rows_of(skipping, [1]).tolist() == [[1.0, 1.0]]
        assert (rows_of(skipping, [2]) != 1).all()
        assert skipping.contains([1, 2, 3]).numpy().tolist() == [True, True, False]
        assert int(skipping.skipped_updates()) == 2
        freqs, _ = skipping.stamps([1, 2, 3])
        assert freqs.numpy().tolist() == [1, 1, 0]


def test_stochastic_rounding_keeps_small_updates_on_average(make, rows_of):
    keys = np.arange(2000)
    gradient = _slices(keys, np.full([2000, 4], 2.0**-10, np.float32))
    for rounding in (False, True):
        table = make(value_dtype=tf.bfloat16, initializer=1.0)
        optimizer = tfplugin.OptimizerWrapper(train.GradientDescentOptimizer(1.0), stochastic_rounding=rounding)
        for _ in range(4):
            optimizer.apply_gradients([(gradient, table)])
        mean = rows_of(table, keys).mean()
        assert mean == 1 if not rounding else mean == pytest.approx(1 - 2.0**-8, abs=2e-4)


@pytest.mark.parametrize("option", ["stochastic_rounding", "skip_nonfinite"])
@pytest.mark.parametrize("make_optimizer", [lambda: train.GradientDescentOptimizer(1.0), lambda: k3.SGD(1.0)])
def test_options_of_fused_updates_alone(make, rows_of, make_optimizer, option):
    gradient = _slices([1], np.ones([1, 4], np.float32))
    plain = make(name="plain", value_dtype=tf.bfloat16, initializer=1.0)
    bounded = make(name="bounded", value_dtype=tf.bfloat16, initializer=1.0, constraint=tf.keras.constraints.NonNeg())
    for table, fused, why in ((plain, False, "fused=False"), (bounded, "auto", "the variable has a constraint")):
        optimizer = tfplugin.OptimizerWrapper(make_optimizer(), fused=fused, **{option: True})
        with pytest.raises(
            ValueError, match=f"{option}=True.*'{table.name}' are .* no such option: {why}.*Leave {option}"
        ):
            optimizer.apply_gradients([(gradient, table)])
        assert int(table.size()) == 0
        # The way out.
        tfplugin.OptimizerWrapper(make_optimizer(), fused=fused).apply_gradients([(gradient, table)])
        assert rows_of(table, [1]).tolist() == [[0.0] * 4]
    wide = make(name="wide", initializer=1.0)
    optimizer = tfplugin.OptimizerWrapper(make_optimizer(), fused=False, stochastic_rounding=True)
    optimizer.apply_gradients([(gradient, wide)])  # nothing is rounded
    assert rows_of(wide, [1]).tolist() == [[0.0] * 4]


@pytest.mark.parametrize("wrap", [lambda one: one, tfplugin.OptimizerWrapper])
def test_our_optimizers_round_at_random_rows_with_a_constraint_too(make, rows_of, wrap):
    keys = np.arange(2000)
    table = make(value_dtype=tf.bfloat16, initializer=1.0, constraint=tf.keras.constraints.NonNeg())
    optimizer = wrap(tfplugin.optimizers.SGD(1.0, stochastic_rounding=True, skip_nonfinite=True))
    for _ in range(4):
        optimizer.apply_gradients([(_slices(keys, np.full([2000, 4], 2.0**-10, np.float32)), table)])
    assert rows_of(table, keys).mean() == pytest.approx(1 - 2.0**-8, abs=2e-4)
    before = rows_of(table, [1])
    optimizer.apply_gradients([(_slices([1], np.full([1, 4], np.nan, np.float32)), table)])
    assert (rows_of(table, [1]) == before).all()


def test_bad_input_changes_nothing(make, rows_of):
    table = make(name="emb", initializer=1.0)
    good = _slices([1], np.ones([1, 4], np.float32))
    train.GradientDescentOptimizer(0.5).apply_gradients([(good, table)])
    before, slots = rows_of(table, [1]), _slot_list(table)

    adam = train.AdamOptimizer()

    @tf.function(input_signature=[tf.TensorSpec(None, tf.float32), tf.TensorSpec([None], tf.int64)])
    def update(rows, keys):
        adam.apply_gradients([(tf.IndexedSlices(rows, keys), table)])

    for rows, keys in ((tf.ones([1, 5]), [1]), (tf.ones([2, 4]), [1]), (tf.ones([4]), [1]), (tf.ones([1, 3]), [1])):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"'emb' wants gradients of shape \[\d,4\] .*got"):
            update(rows, tf.constant(keys, tf.int64))
    with pytest.raises(TypeError, match="'emb' has int64 keys, got ids of float32"):
        train.AdamOptimizer().apply_gradients([(tf.IndexedSlices(tf.ones([1, 4]), tf.constant([1.0])), table)])
    for optimizer, message in (
        (train.AdamOptimizer(beta1=1.5), "beta_1 = 1.5.*at least 0 and less than 1"),
        (train.AdamOptimizer(float("nan")), "learning_rate = .*nan.*finite"),
        (train.AdamOptimizer(epsilon=-1.0), "epsilon = -1.*0 or more"),
        (tfplugin.OptimizerWrapper(k3.RMSprop(rho=2.0)), "rho = 2"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=f"'emb'.*{message}"):
            optimizer.apply_gradients([(good, table)])
    assert rows_of(table, [1]).tolist() == before.tolist()
    assert int(table.size()) == 1
    assert _slot_list(table) == slots


def test_a_switch_of_optimizers_is_logged_once(make, caplog):
    table = make(name="emb")
    gradient = _slices([1], np.ones([1, 4], np.float32))
    with caplog.at_level(logging.INFO, "tfplugin"):
        first, second = train.MomentumOptimizer(0.1, 0.9), tfplugin.OptimizerWrapper(k3.Adam())
        first.apply_gradients([(gradient, table)])
        assert not caplog.records
        for _ in range(3):
            second.apply_gradients([(gradient, table)])
            first.apply_gradients([(gradient, table)])
    assert [record.getMessage() for record in caplog.records] == [
        "Key-value variable 'emb:0': optimizer switched from Momentum to Adam, whose slots (Adam.momentum, "
        "Adam.velocity) start fresh."
    ]


def test_an_optimizer_that_goes_on_after_a_restore_is_no_switch(make, tmp_path, caplog):
    gradient = _slices([1], np.ones([1, 4], np.float32))
    table = make(name="emb")
    train.AdagradOptimizer(0.1).apply_gradients([(gradient, table)])
    path = tf.train.Checkpoint(t=table).save(str(tmp_path / "c"))
    with caplog.at_level(logging.INFO, "tfplugin"):
        for optimizer, logged in ((train.AdagradOptimizer(0.1), 0), (train.AdamOptimizer(0.1), 1)):
            table = make(name="emb")
            tf.train.Checkpoint(t=table).restore(path)
            optimizer.apply_gradients([(gradient, table)])
            assert len(caplog.records) == logged


def test_no_gradients_at_all(make):
    table = make()
    for optimizer in (train.AdamOptimizer(), tfplugin.OptimizerWrapper(k3.Adam())):
        optimizer.apply_gradients([(_slices(np.zeros([0]), np.zeros([0, 4], np.float32)), table)])
    assert int(table.size()) == 0
