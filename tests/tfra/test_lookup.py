"""Lookups, single and pooled, against NumPy: values, gradients, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfplugin import dynamic_embedding as de

KEYS = np.arange(-4, 6)
ROWS = np.random.default_rng(0).normal(size=(len(KEYS), 3)).astype(np.float32)
BY_KEY = dict(zip(KEYS.tolist(), ROWS, strict=True))
INITIAL = np.full(3, 0.5, np.float32)


def row(key, max_norm=None):
    found = BY_KEY.get(int(key), INITIAL)
    norm = np.linalg.norm(found)
    return found if max_norm is None or norm <= max_norm else found * (max_norm / norm)


def rows(keys, max_norm=None):
    keys = np.asarray(keys)
    return np.array([row(key, max_norm) for key in keys.ravel()], np.float32).reshape((*keys.shape, 3))


def filled(mode, name, devices, **kwargs):
    v = de.Variable(dim=3, devices=devices, name=name, initializer=0.5, **kwargs)
    mode(lambda k, r: v.upsert(k, r), KEYS, ROWS)
    return v


IDS = np.array([[1, 7], [1, -4]])
LOOKUPS = {"embedding_lookup": de.embedding_lookup, "embedding_lookup_unique": de.embedding_lookup_unique}


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_single_lookups(mode, name, devices, lookup, max_norm):
    v = filled(mode, name, devices)
    got = mode(lambda ids: lookup(v, ids, name="x", max_norm=max_norm), IDS)
    np.testing.assert_allclose(got, rows(IDS, max_norm), rtol=1e-6)
    assert int(mode(lambda: v.size())) == len(KEYS)


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_ragged_ids_give_ragged_rows(mode, name, devices, lookup):
    v = filled(mode, name, devices)

    def looked_up(flat):
        found, trainable = lookup(
            v, tf.RaggedTensor.from_row_splits(flat, [0, 2, 2, 3]), name="x", return_trainable=True
        )
        assert isinstance(found, tf.RaggedTensor) and isinstance(trainable, de.TrainableWrapper)
        return found.flat_values, found.row_splits

    flat, splits = mode(looked_up, np.array([1, 7, -4]))
    np.testing.assert_array_equal(flat, rows([1, 7, -4]))
    assert splits.tolist() == [0, 2, 2, 3]


SPARSE = {  # row -> [(id, weight)]; row 2 has none
    0: [(1, 2.0), (7, 0.5), (1, 1.0)],
    1: [(-4, 3.0)],
    3: [(2, 1.5), (5, 0.25)],
}
FLAT_IDS = np.array([key for entries in SPARSE.values() for key, _ in entries])
FLAT_WEIGHTS = np.array([weight for entries in SPARSE.values() for _, weight in entries], np.float32)
INDICES = np.array([[r, c] for r, entries in SPARSE.items() for c in range(len(entries))])


def sparse(values):
    return tf.SparseTensor(INDICES, values, [4, 3])


def ragged(values):
    return tf.RaggedTensor.from_value_rowids(values, INDICES[:, 0], nrows=4)


def pooled(combiner, weighted, max_norm=None, entries=SPARSE):
    out = np.zeros((4, 3), np.float32)
    for r, pairs in entries.items():
        weights = np.array([w if weighted else 1.0 for _, w in pairs], np.float32)
        total = (rows([k for k, _ in pairs], max_norm) * weights[:, None]).sum(0)
        divisor = {"sum": 1.0, "mean": weights.sum(), "sqrtn": np.sqrt((weights**2).sum())}[combiner]
        out[r] = total / divisor if pairs else 0
    return out


@pytest.mark.parametrize("form", [sparse, ragged])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("lookup", [de.embedding_lookup_sparse, de.safe_embedding_lookup_sparse])
def test_pooled_lookups(mode, name, devices, lookup, combiner, max_norm, weighted, form):
    v = filled(mode, name, devices)

    def looked_up(ids, weights):
        return lookup(v, form(ids), form(weights) if weighted else None, combiner=combiner, max_norm=max_norm, name="x")

    got = mode(looked_up, FLAT_IDS, FLAT_WEIGHTS)
    np.testing.assert_allclose(got, pooled(combiner, weighted, max_norm), rtol=1e-5, atol=1e-6)
    assert int(mode(lambda: v.size())) == len(KEYS)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_safe_lookups_leave_out_ids_without_positive_weight_and_fill_empty_rows(mode, name, devices, combiner):
    v = filled(mode, name, devices)
    entries = {0: [(1, 2.0), (7, 0.0), (2, -1.0)], 1: [(-4, -3.0)], 3: [(5, 1.0)]}
    ids = np.array([k for pairs in entries.values() for k, _ in pairs])
    weights = np.array([w for pairs in entries.values() for _, w in pairs], np.float32)
    at = np.array([[r, c] for r, pairs in entries.items() for c in range(len(pairs))])
    kept = entries if combiner == "sum" else {r: [(k, w) for k, w in p if w > 0] for r, p in entries.items()}
    for default_id in (None, 3):
        got = mode(
            lambda i, w, default_id=default_id: de.safe_embedding_lookup_sparse(
                v,
                tf.SparseTensor(at, i, [4, 3]),
                tf.SparseTensor(at, w, [4, 3]),
                combiner=combiner,
                default_id=default_id,
                name="x",
            ),
            ids,
            weights,
        )
        expected = pooled(combiner, True, entries=kept)
        if default_id is not None:
            for empty in set(range(4)) - {r for r, pairs in kept.items() if pairs}:
                expected[empty] = row(default_id)
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_safe_lookups_combine_the_last_dimension(mode, name, devices):
    v = filled(mode, name, devices)
    dense = np.array([[[1, 2], [3, 0]], [[0, 0], [4, 5]]])
    got = mode(
        lambda d: de.safe_embedding_lookup_sparse(v, tf.sparse.from_dense(d), combiner="sum", name="x"),
        dense,
    )
    expected = [[rows([1, 2]).sum(0), rows([3]).sum(0)], [np.zeros(3), rows([4, 5]).sum(0)]]
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_an_empty_row_trains_no_key(name, devices):
    v = de.Variable(dim=2, devices=devices, name=name)
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.SGD(1.0))
    ids = tf.SparseTensor([[1, 0]], tf.constant([5], tf.int64), [3, 1])
    optimizer.minimize(
        lambda: tf.reduce_sum(de.safe_embedding_lookup_sparse(v, ids, name="x")),
        var_list=[v.get_trainable_by_name("x/embedding_lookup_sparse/embedding_lookup")],
    )
    assert v.export()[0].numpy().tolist() == [5]


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_pooled_rows_of_sparse_16_bit_values_are_float32(name, dtype):
    v = de.Variable(dim=2, value_dtype=dtype, name=name, initializer=1.5)
    ids = tf.sparse.from_dense(tf.constant([[1, 2]], tf.int64))
    assert de.embedding_lookup_sparse(v, ids, None, name="x").dtype == tf.float32
    assert de.safe_embedding_lookup_sparse(v, ids, name="x").dtype == tf.float32
    assert de.embedding_lookup_sparse(v, tf.RaggedTensor.from_sparse(ids), None, name="x").dtype == dtype


# ---- Gradients ----


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("how", ["single", "unique", "ragged", "sparse", "safe"])
def test_gradients_are_those_of_tensorflow_on_a_dense_variable(name, devices, how, max_norm, function):
    v = de.Variable(dim=3, devices=devices, name=name, value_dtype=tf.float64)
    dense = tf.Variable(ROWS.astype(np.float64))
    v.upsert(KEYS, ROWS.astype(np.float64))
    ids = np.array([[1, 1], [2, -4]])
    sparse_ids = tf.SparseTensor([[0, 0], [0, 1], [2, 0]], tf.constant([1, 5, 1], tf.int64), [3, 2])
    weights = tf.SparseTensor([[0, 0], [0, 1], [2, 0]], tf.constant([1.0, 2.0, 0.5], tf.float64), [3, 2])

    def shifted(s):
        return tf.SparseTensor(s.indices, s.values + 4, s.dense_shape)

    def loss(params, ids, sparse_ids, lookup, lookup_sparse, safe):
        more = {"max_norm": max_norm}
        if how == "ragged":
            return tf.reduce_sum(tf.sin(lookup(params, tf.RaggedTensor.from_tensor(ids), **more).flat_values))
        if how == "sparse":
            return tf.reduce_sum(tf.sin(lookup_sparse(params, sparse_ids, weights, combiner="mean", **more)))
        if how == "safe":
            return tf.reduce_sum(tf.sin(safe(params, sparse_ids, weights, combiner="sqrtn", **more)))
        return tf.reduce_sum(tf.sin(lookup(params, ids, **more)))

    def named(lookup):
        return lambda *args, **kwargs: lookup(*args, name="x", **kwargs)

    ours = (
        named(de.embedding_lookup_unique if how == "unique" else de.embedding_lookup),
        named(de.embedding_lookup_sparse),
        named(de.safe_embedding_lookup_sparse),
    )
    stock = (tf.nn.embedding_lookup, tf.nn.embedding_lookup_sparse, tf.nn.safe_embedding_lookup_sparse)

    def run():
        return loss(v, tf.constant(ids), sparse_ids, *ours)

    run = tf.function(run) if function else run
    for _ in range(2):
        with tf.GradientTape() as tape:
            value = run()
        inner = {"sparse": "/embedding_lookup", "safe": "/embedding_lookup_sparse/embedding_lookup"}.get(how, "")
        gradient = tape.gradient(value, v.get_trainable_by_name(f"x{inner}"))
    with tf.GradientTape() as tape:
        expected_value = loss(dense, tf.constant(ids + 4), shifted(sparse_ids), *stock)
    expected = tf.convert_to_tensor(tape.gradient(expected_value, dense)).numpy()
    np.testing.assert_allclose(value.numpy(), expected_value.numpy(), rtol=1e-9)
    got = np.zeros_like(expected)
    np.add.at(got, gradient.indices.numpy() + 4, gradient.values.numpy())
    np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-9)


def test_symbolic_gradients_go_to_the_wrapper(session, name, devices):
    v = de.Variable(dim=2, devices=devices, name=name)
    found, trainable = de.embedding_lookup(v, tf.constant([3, 4], tf.int64), return_trainable=True)
    (gradient,) = tf.gradients(tf.reduce_sum(found * [[1.0, 2.0], [3.0, 4.0]]), [trainable])
    indices, values = session.run([gradient.indices, gradient.values])
    assert indices.tolist() == [3, 4] and values.tolist() == [[1, 2], [3, 4]]
    assert session.run(trainable.ids).tolist() == [3, 4]
    assert session.run(trainable.read_value()).tolist() == [[0, 0], [0, 0]]


# ---- Trainables ----


def test_return_trainable_gives_a_wrapper_in_a_graph_and_a_shadow_elsewhere(name):
    with tf.Graph().as_default():
        v = de.Variable(dim=2, name=name)
        _, trainable = de.embedding_lookup(v, tf.constant([1], tf.int64), name="x", return_trainable=True)
        assert type(trainable) is de.TrainableWrapper and v.trainable_store == {"x": trainable}
    v = de.Variable(dim=2, name=name)
    _, trainable = de.embedding_lookup(v, tf.constant([1], tf.int64), name="x", return_trainable=True)
    assert type(trainable) is de.shadow_ops.ShadowVariable and v.trainable_store == {"x": trainable}
    assert trainable.params is v and isinstance(trainable, tf.Variable)
    assert trainable.ids.numpy().tolist() == [1] and trainable.read_value().numpy().shape == (1, 2)
    assert v.get_trainable_by_name("x") is trainable is v.get_eager_trainable_by_name("x")


def test_a_getter_binds_at_the_first_lookup_of_its_name(name):
    v = de.Variable(dim=2, name=name)
    shadow = v.get_trainable_by_name("x")
    assert isinstance(shadow, de.shadow_ops.ShadowVariable) and shadow.ids.shape == [0]
    de.embedding_lookup(v, tf.constant([1, 2], tf.int64), name="x")
    assert v.get_trainable_by_name("x") is shadow and shadow.ids.numpy().tolist() == [1, 2]


def test_getters_want_a_string_and_eager_mode(session, name):
    v = de.Variable(dim=2, name=name)
    for getter in (v.get_trainable_by_name, v.get_eager_trainable_by_name):
        with pytest.raises(RuntimeError, match="eager mode"):
            getter("x")
        with pytest.raises(TypeError, match="must be a string"):
            getter(3)


def test_a_function_gets_its_trainable_by_name(name):
    v = de.Variable(dim=2, name=name)
    got = []

    @tf.function
    def lookup(ids):
        rows = de.embedding_lookup(v, ids, name="x")
        got.append(v.get_trainable_by_name("x"))
        return rows

    lookup(tf.constant([1], tf.int64))
    assert got[0] is v.get_trainable_by_name("x")


def test_eager_lookups_want_a_name(name):
    v = de.Variable(dim=2, name=name)
    for lookup in LOOKUPS.values():
        with pytest.raises(ValueError, match="wants a name in eager mode"):
            lookup(v, tf.constant([1], tf.int64))
    assert tf.function(lambda: de.embedding_lookup(v, tf.constant([1], tf.int64)))().shape == (1, 2)


@pytest.mark.parametrize("ids", [tf.constant([1]), np.array([1], np.int32), tf.constant(["a"]), tf.constant([1.0])])
def test_ids_of_another_dtype_are_a_type_error(name, ids):
    v = de.Variable(dim=2, name=name)
    for lookup in LOOKUPS.values():
        with pytest.raises(TypeError, match="int64 keys, got ids of"):
            lookup(v, ids, name="x")


def test_params_are_one_variable(name):
    v = de.Variable(dim=2, name=name)
    ids = tf.constant([1], tf.int64)
    assert de.embedding_lookup([v], ids, name="x").shape == (1, 2)
    with pytest.raises(ValueError, match="params must be one variable, got 2"):
        de.embedding_lookup([v, v], ids, name="x")
    with pytest.raises(TypeError, match=r"must be a dynamic_embedding\.Variable, got int"):
        de.embedding_lookup(3, ids, name="x")


def test_pooled_lookups_refuse_other_forms(name):
    v = de.Variable(dim=2, name=name)
    ids = tf.sparse.from_dense(tf.constant([[1]], tf.int64))
    for lookup in (de.embedding_lookup_sparse, de.safe_embedding_lookup_sparse):
        with pytest.raises(ValueError, match="combiner must be one of"):
            lookup(v, ids, None, combiner="max", name="x")
        with pytest.raises(TypeError, match="must be a SparseTensor or a RaggedTensor"):
            lookup(v, tf.constant([[1]], tf.int64), None, name="x")
        with pytest.raises(TypeError, match="sp_weights must be of the type of sp_ids"):
            lookup(v, ids, tf.constant([[1.0]]), name="x")
        with pytest.raises(TypeError, match="int64 keys, got ids of int32"):
            lookup(v, tf.cast(ids, tf.int32), None, name="x")
    with pytest.raises(TypeError, match="dtype of the values"):
        de.safe_embedding_lookup_sparse(v, ids, tf.cast(ids, tf.float64), name="x")
    with pytest.raises(ValueError, match="got None"):
        de.safe_embedding_lookup_sparse(None, ids, name="x")


# ---- shadow_ops ----


@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_shadow_lookups(name, devices, function):
    v = de.Variable(dim=3, devices=devices, name=name, initializer=0.5)
    v.upsert(KEYS, ROWS)
    shadow = de.shadow_ops.ShadowVariable(v, name="s", max_norm=1.0)
    assert v.trainable_store["s"] is shadow
    plain, unique = de.shadow_ops.embedding_lookup, de.shadow_ops.embedding_lookup_unique

    def looked_up(ids):
        ragged_ids = tf.RaggedTensor.from_tensor(ids)
        return (
            plain(shadow, ids),
            unique(shadow, ids, 3),
            unique(shadow, ids, 3, with_unique=False),
            unique(shadow, ragged_ids, 3).to_tensor(),
            de.embedding_lookup_sparse(shadow, tf.sparse.from_dense(ids), None, combiner="sum"),
        )

    *singles, pooled_rows = (tf.function(looked_up) if function else looked_up)(tf.constant(IDS))
    for got in singles:
        np.testing.assert_allclose(got.numpy(), rows(IDS, 1.0), rtol=1e-6)
    np.testing.assert_allclose(pooled_rows.numpy(), rows(IDS, 1.0).sum(1), rtol=1e-5)


def test_a_shadow_is_trained(name, devices):
    v = de.Variable(dim=2, devices=devices, name=name)
    ids, exists = (
        tf.Variable(x, shape=tf.TensorShape(None)) for x in (tf.zeros([0], tf.int64), tf.zeros([0], tf.bool))
    )
    shadow = de.shadow_ops.ShadowVariable(v, name="s", ids=ids, exists=exists)
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.SGD(1.0))

    @tf.function
    def step(keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.shadow_ops.embedding_lookup(shadow, keys))
        optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])

    step(tf.constant([1, 2], tf.int64))
    step(tf.constant([2, 3], tf.int64))
    assert ids.numpy().tolist() == [2, 3] and exists.numpy().tolist() == [True, False]
    assert v.lookup([1, 2, 3]).numpy().tolist() == [[-1, -1], [-2, -2], [-1, -1]]


def test_shadows_refuse(name):
    v = de.Variable(dim=2, name=name)
    with pytest.raises(TypeError, match="params must be a Variable"):
        de.shadow_ops.ShadowVariable(3)
    with pytest.raises(TypeError, match="ids must be a resource variable"):
        de.shadow_ops.ShadowVariable(v, ids=tf.constant([1]))
    with pytest.raises(TypeError, match="distribute_strategy must be"):
        de.shadow_ops.ShadowVariable(v, distribute_strategy="mirrored")
    with pytest.raises(ValueError, match="ids are of int32"):
        de.shadow_ops.embedding_lookup(de.shadow_ops.ShadowVariable(v), tf.constant([1]))
    with tf.Graph().as_default(), pytest.raises(NotImplementedError, match="eager mode"):
        de.shadow_ops.ShadowVariable(v)


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_a_lookup_in_a_loop_or_a_branch_of_a_graph_names_the_way_out(name, devices, lookup):
    with tf.Graph().as_default():
        v = de.get_variable(name, dim=2, devices=devices)
        ids = tf.constant([1, 2], tf.int64)
        for within in (
            lambda: tf.cond(ids[0] > 0, lambda: lookup(v, ids, name="a"), lambda: tf.ones([2, 2])),
            lambda: tf.map_fn(lambda one: lookup(v, one), ids, fn_output_signature=tf.float32),
        ):
            with pytest.raises(NotImplementedError, match=r"of a graph: .* Look the rows up before"):
                within()


@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
def test_sparse_ids_are_for_the_pooled_lookups(name, devices, lookup):
    v = de.Variable(dim=2, devices=devices, name=name)
    with pytest.raises(TypeError, match="embedding_lookup_sparse"):
        lookup(v, tf.sparse.from_dense(tf.constant([[1]], tf.int64)), name="x")


@pytest.mark.parametrize("max_norm", [None, 1.0])
@pytest.mark.parametrize("combiner", ["sum", "mean"])
@pytest.mark.parametrize("look_up", [de.embedding_lookup_sparse, de.safe_embedding_lookup_sparse])
def test_another_number_of_weights_than_of_ids_is_an_error(mode, name, devices, look_up, combiner, max_norm):
    """Also where TensorFlow's own ops would take a single weight for all ids."""
    v = filled(mode, name, devices)

    def looked_up(values):
        ids = tf.SparseTensor([[0, 0], [1, 0]], values, [2, 2])
        weights = tf.SparseTensor([[0, 0]], tf.cast(values[:1], tf.float32), [2, 2])
        return look_up(v, ids, weights, combiner=combiner, max_norm=max_norm, name="x")

    with pytest.raises(tf.errors.InvalidArgumentError, match="weights"):
        mode(looked_up, np.array([1, 2]))


# ---- Modes ----


def test_modes():
    assert de.get_model_mode() == "train"
    de.enable_inference_mode()
    assert de.get_model_mode() == "inference" == de.ModelMode.CURRENT_SETTING
    de.enable_train_mode()
    assert de.get_model_mode() == de.ModelMode.TRAIN


def test_inference_mode_reads_and_gives_no_gradient(name, devices):
    v = de.Variable(dim=2, devices=devices, name=name, initializer=0.5)
    de.enable_inference_mode()
    with tf.GradientTape() as tape:
        found, shadow = de.embedding_lookup(v, tf.constant([1], tf.int64), name="x", return_trainable=True)
        ids = tf.sparse.from_dense(tf.constant([[1]], tf.int64))
        loss = tf.reduce_sum(found) + tf.reduce_sum(de.embedding_lookup_sparse(v, ids, None, name="x"))
    assert found.numpy().tolist() == [[0.5, 0.5]] and loss.numpy() == 2
    assert tape.gradient(loss, shadow) is None


def test_trainable_wrapper_filter(name):
    v = de.Variable(dim=2, name=name)
    shadow, dense = v.get_trainable_by_name("x"), tf.Variable(1.0)
    assert de.trainable_wrapper_filter([dense, shadow]) == ((dense,), (shadow,))
    pairs = [(1, dense), (2, shadow)]
    split = de.trainable_wrapper_filter(pairs, lambda pair: isinstance(pair[1], de.TrainableWrapper))
    assert split == (((1, dense),), ((2, shadow),))
