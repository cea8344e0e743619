"""Pooled lookups in one op give what TensorFlow's give on a dense variable, and so do their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
from tfplugin.ops import raw

V1 = tf.compat.v1
COMBINERS = ("sum", "mean", "sqrtn")
KEY_DTYPES = {
    tf.int64: [2**63 - 1, -(2**63), -1, 0, 1, 7, -7, 12, 40],
    tf.int32: [2**31 - 1, -(2**31), -1, 0, 1, 7, -7, 12, 40],
    tf.uint64: [2**63, 2**64 - 1, 2**63 - 1, 0, 1, 7, 3, 12, 40],
}


def _parts(variable):
    return list(variable) if isinstance(variable, tfplugin.PartitionedKvVariable) else [variable]


def _make(make, parts, dim, **kwargs):
    return make(dim=dim, name="pooled", partitioner=parts and V1.fixed_size_partitioner(parts), **kwargs)


class Case:
    """Ids over a few keys with duplicates and empty rows, and the same ids as numbers of rows of a dense variable."""

    def __init__(self, keys, key_dtype, batch=40, longest=6, weighted=False, seed=0, low=-1.0):
        random = np.random.default_rng(seed)
        lengths = random.integers(0, longest + 1, batch)
        self.batch, n = batch, int(lengths.sum())
        rows = np.repeat(np.arange(batch), lengths)
        columns = np.concatenate([np.arange(length) for length in lengths]) if n else np.zeros(0)
        indices = np.stack([rows, columns], 1).astype(np.int64)
        numbers = random.integers(0, len(keys), n)
        self.keys = tf.constant(keys, key_dtype)
        shape = [batch, longest]
        self.ids = tf.SparseTensor(indices, tf.gather(self.keys, numbers), shape)
        self.dense_ids = tf.SparseTensor(indices, numbers, shape)
        weights = random.uniform(low, 2.0, n).astype(np.float32)
        weights[::5] = 0
        self.weights = tf.SparseTensor(indices, weights, shape) if weighted else None

    def ragged(self, sparse):
        return sparse and tf.RaggedTensor.from_value_rowids(sparse.values, sparse.indices[:, 0], self.batch)


def _summed(gradients, keys):
    """[len(keys), dim]: the gradient of each key. Checks that each comes once."""
    rows = {}
    for gradient in gradients:
        for key, row in zip(gradient.indices.numpy().tolist(), np.asarray(gradient.values, np.float64), strict=True):
            assert key not in rows
            rows[key] = row
    absent = np.zeros(gradients[0].values.shape[1])
    return np.stack([rows.get(key, absent) for key in keys.numpy().tolist()])


def _close(got, expected, dtype=tf.float32):
    tolerance = {tf.float16: 4e-3, tf.bfloat16: 3e-2}.get(dtype, 2e-5)
    got, expected = (np.asarray(tf.cast(value, tf.float64)) for value in (got, expected))
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def _check(variable, case, lookup, combiner, ids, weights, dtype=tf.float32):
    """Rows, gradient of the table and gradient of the weights, against the stock op on a dense variable."""
    random = np.random.default_rng(1)
    wide = tf.float64 if dtype == tf.float64 else tf.float32
    values = tf.cast(tf.constant(random.normal(size=(len(case.keys), variable.dim))), dtype)
    variable.upsert(case.keys, values)
    dense = tf.Variable(tf.cast(values, wide))
    upstream = tf.cast(tf.constant(random.normal(size=(case.batch, variable.dim))), dtype)
    watched = [] if case.weights is None else [case.weights.values]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(watched)
        got = lookup(variable, ids, weights(case.weights), combiner=combiner)
        reference_weights = case.weights and case.weights.with_values(tf.cast(case.weights.values, wide))
        expected = lookup(dense, case.dense_ids, reference_weights, combiner=combiner)
    assert got.dtype == dtype
    _close(got, expected, dtype)
    gradients = tape.gradient(got, _parts(variable), upstream)
    reference = tape.gradient(expected, dense, tf.cast(upstream, wide))
    _close(_summed(gradients, case.keys), tf.convert_to_tensor(reference), dtype)
    if watched:
        _close(
            tape.gradient(got, watched[0], upstream),
            tf.convert_to_tensor(tape.gradient(expected, watched[0], tf.cast(upstream, wide))),
            dtype,
        )


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("parts", [None, 3, 5])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("safe", [False, True], ids=["", "safe"])
def test_rows_and_gradients(make, combiner, parts, weighted, safe):
    lookup = tf.nn.safe_embedding_lookup_sparse if safe else tf.nn.embedding_lookup_sparse
    # Weights that sum to something tiny would compare nothing but rounding.
    low = -1.0 if combiner == "sum" or safe else 0.5
    case = Case(KEY_DTYPES[tf.int64], tf.int64, weighted=weighted, low=low)
    for kind in (lambda sparse: sparse, case.ragged):
        _check(_make(make, parts, 16), case, lookup, combiner, kind(case.ids), kind)


@pytest.mark.parametrize("dim", [1, 7, 64, 129])
@pytest.mark.parametrize("key_dtype", KEY_DTYPES, ids=lambda d: d.name)
def test_dims_and_key_dtypes(make, dim, key_dtype):
    case = Case(KEY_DTYPES[key_dtype], key_dtype, weighted=True, low=0.5, seed=dim)
    for parts in (None, 3):
        variable = _make(make, parts, dim, key_dtype=key_dtype)
        _check(variable, case, tf.nn.embedding_lookup_sparse, "mean", case.ids, lambda w: w)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64], ids=lambda d: d.name)
def test_value_dtypes(make, dtype):
    for combiner in COMBINERS:
        for weighted in (False, True):
            case = Case(KEY_DTYPES[tf.int64], tf.int64, weighted=weighted, low=0.5)
            variable = _make(make, 3, 7, value_dtype=dtype)
            _check(variable, case, tf.nn.embedding_lookup_sparse, combiner, case.ids, lambda w: w, dtype)


def test_sixteen_bit_rows_are_added_in_float32(make):
    variable = make(dim=1, value_dtype=tf.float16, initializer=1.0)
    ids = tf.RaggedTensor.from_row_lengths(tf.range(5000, dtype=tf.int64), [5000])
    with tf.GradientTape() as tape:
        total = tf.nn.embedding_lookup_sparse(variable, ids, None, combiner="sum")
    # In float16 a sum of ones ends at 2048.
    assert float(total[0, 0]) == 5000
    same = tf.RaggedTensor.from_row_lengths(tf.zeros([5000], tf.int64), tf.ones([5000], tf.int64))
    with tf.GradientTape() as tape:
        total = tf.nn.embedding_lookup_sparse(variable, same, None, combiner="sum")
    assert float(tape.gradient(total, variable).values[0, 0]) == 5000


@pytest.mark.parametrize("parts", [None, 3])
def test_many_ids_are_added_up_the_same_way_each_time(make, parts):
    random = np.random.default_rng(3)
    lengths = random.integers(0, 12, 20_000)
    n = int(lengths.sum())
    keys = (random.zipf(1.2, n) % 5000) - 2500
    weights = random.uniform(0.1, 1.0, n).astype(np.float32)
    ids, w = (tf.RaggedTensor.from_row_lengths(values, lengths) for values in (keys, weights))
    variable = _make(make, parts, 4)
    upstream = random.normal(size=(20_000, 4)).astype(np.float32)
    runs = []
    for _ in range(3):
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup_sparse(variable, ids, w, combiner="sqrtn")
        runs.append([rows, *tf.nest.flatten(tape.gradient(rows, _parts(variable), upstream), expand_composites=True)])
    for run in runs[1:]:
        for a, b in zip(runs[0], run, strict=True):
            np.testing.assert_array_equal(a, b)
    # And the sums are right.
    rows_of = np.asarray(variable.sparse_read(keys))
    row = np.repeat(np.arange(20_000), lengths)
    norm = np.sqrt(np.bincount(row, weights.astype(np.float64) ** 2, 20_000))[:, None]
    total = np.zeros((20_000, 4))
    np.add.at(total, row, rows_of * weights[:, None].astype(np.float64))
    np.testing.assert_allclose(runs[0][0], np.divide(total, norm, where=norm > 0, out=total), rtol=2e-5, atol=1e-6)
    expected = np.zeros((5000, 4))
    np.add.at(expected, keys + 2500, (weights[:, None] / norm[row]) * upstream[row])
    gradients = [tf.IndexedSlices(v, i) for v, i in zip(runs[0][1::2], runs[0][2::2], strict=True)]
    np.testing.assert_allclose(
        _summed(gradients, tf.range(-2500, 2500, dtype=tf.int64)), expected, rtol=1e-4, atol=1e-4
    )


def test_ids_of_a_row_need_not_lie_together(make, partitioner):
    variable = make(dim=3, partitioner=partitioner)
    variable.upsert(np.arange(6), np.eye(6, 3) + np.arange(6)[:, None])
    order = [3, 0, 5, 1, 4, 2]
    sorted_ids = tf.SparseTensor([[0, 0], [0, 1], [1, 0], [3, 0], [3, 1], [3, 2]], tf.range(6, dtype=tf.int64), [4, 3])
    mixed = tf.SparseTensor(tf.gather(sorted_ids.indices, order), tf.gather(sorted_ids.values, order), [4, 3])
    weights = mixed.with_values(tf.gather([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], order))
    sorted_weights = sorted_ids.with_values([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    for combiner in COMBINERS:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([weights.values, sorted_weights.values])
            got = tf.nn.embedding_lookup_sparse(variable, mixed, weights, combiner=combiner) ** 2
            expected = tf.nn.embedding_lookup_sparse(variable, sorted_ids, sorted_weights, combiner=combiner) ** 2
        np.testing.assert_allclose(got, expected, rtol=1e-5)
        np.testing.assert_allclose(
            tape.gradient(got, weights.values),
            tf.gather(tape.gradient(expected, sorted_weights.values), order),
            rtol=1e-4,
            atol=1e-5,
        )


def test_no_rows_no_ids_and_nothing_but_empty_rows(make, partitioner):
    variable = make(dim=3, partitioner=partitioner)
    for batch in (0, 4):
        empty = tf.SparseTensor(tf.zeros([0, 2], tf.int64), tf.zeros([0], tf.int64), [batch, 2])
        for lookup in (tf.nn.embedding_lookup_sparse, tf.nn.safe_embedding_lookup_sparse):
            with tf.GradientTape() as tape:
                rows = lookup(variable, empty, None)
            np.testing.assert_array_equal(rows, np.zeros([batch, 3]))
            assert all(g.indices.shape == (0,) for g in tape.gradient(rows, _parts(variable)))
    assert int(variable.size()) == 0


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_the_default_id_gets_the_gradient_of_empty_rows(make, partitioner, weighted):
    variable = make(dim=2, partitioner=partitioner, initializer=1.0)
    ids = tf.SparseTensor([[0, 0], [2, 0], [2, 1]], tf.constant([3, 3, 8], tf.int64), [4, 2])
    weights = ids.with_values([2.0, -1.0, 4.0]) if weighted else None
    with tf.GradientTape() as tape:
        rows = tf.nn.safe_embedding_lookup_sparse(variable, ids, weights, default_id=8)
    gradients = tape.gradient(rows, _parts(variable), tf.constant([[1.0] * 2, [10.0] * 2, [100.0] * 2, [1000.0] * 2]))
    np.testing.assert_array_equal(rows, np.ones([4, 2]))
    # Row 2 is of 8 alone where the weight of 3 is not positive; rows 1 and 3 are empty.
    expected = [[1.0] * 2, [1110.0] * 2] if weighted else [[51.0] * 2, [1060.0] * 2]
    np.testing.assert_array_equal(_summed(gradients, tf.constant([3, 8])), expected)


def test_a_second_derivative(make, partitioner):
    variable = make(dim=2, partitioner=partitioner, initializer=3.0)
    ids = tf.RaggedTensor.from_row_lengths(tf.constant([1, 2, 5], tf.int64), [2, 1])
    weights = tf.constant([2.0, 1.0, 4.0])
    dense = tf.Variable(tf.fill([6, 2], 3.0))

    def norm_of_gradient(target, variables):
        with tf.GradientTape() as outer:
            outer.watch(weights)
            with tf.GradientTape() as inner:
                w = tf.RaggedTensor.from_row_splits(weights, ids.row_splits)
                loss = tf.reduce_sum(tf.nn.embedding_lookup_sparse(target, ids, w, combiner="sum") ** 3)
            norm = tf.add_n([tf.reduce_sum(g.values) for g in inner.gradient(loss, variables)])
        return outer.gradient(norm, [*variables, weights])

    *got, of_weights = norm_of_gradient(variable, _parts(variable))
    expected, expected_of_weights = norm_of_gradient(dense, [dense])
    np.testing.assert_allclose(of_weights, expected_of_weights, rtol=1e-5)
    summed = sum(np.asarray(tf.math.unsorted_segment_sum(g.values, g.indices, 6)) for g in got)
    np.testing.assert_allclose(summed, tf.convert_to_tensor(expected), rtol=1e-5)


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("safe", [False, True], ids=["plain", "safe"])
def test_second_derivatives_by_weights(make, partitioner, combiner, traced, safe):
    """By weights, rows and what is behind, of the gradient by the weights, beside TensorFlow's on a dense variable."""
    pooled = tf.nn.safe_embedding_lookup_sparse if safe else tf.nn.embedding_lookup_sparse
    variable = make(dim=2, partitioner=partitioner)
    numbers = np.random.default_rng(3).normal(size=[6, 2]).astype(np.float32)
    variable.upsert(np.arange(6), numbers)
    dense = tf.Variable(numbers)
    ids = tf.RaggedTensor.from_row_lengths(tf.constant([1, 2, 5, 1, 0], tf.int64), [2, 0, 3])
    weights = tf.constant([2.0, 1.0, 4.0, 0.5, -3.0 if safe else 3.0])  # left out, if safe and no sum
    factors = tf.constant([2.0, 0.5])

    def second(target, variables):
        with tf.GradientTape() as outer:
            outer.watch([weights, factors])
            with tf.GradientTape() as inner:
                inner.watch(weights)
                loss = tf.reduce_sum(pooled(target, ids, ids.with_values(weights), combiner=combiner) ** 3 * factors)
            loss = tf.nn.l2_loss(inner.gradient(loss, weights))
        return outer.gradient(loss, [*variables, weights, factors])

    def stock(target, ids, weights):
        weights = tf.where(weights > 0, weights, 0) if safe and combiner != "sum" else weights
        rows = tf.gather(target, ids.values) * weights[:, None]
        total = tf.math.unsorted_segment_sum(rows, ids.value_rowids(), 3)
        power = {"sum": tf.zeros_like(weights), "mean": weights, "sqrtn": weights**2}[combiner]
        divisor = tf.math.unsorted_segment_sum(power, ids.value_rowids(), 3)
        divisor = {"sum": 1.0, "mean": divisor, "sqrtn": tf.sqrt(tf.maximum(divisor, 1e-9))}[combiner]
        return total if combiner == "sum" else tf.math.divide_no_nan(total, divisor[:, None])

    with tf.GradientTape() as outer:
        outer.watch([weights, factors])
        with tf.GradientTape() as inner:
            inner.watch(weights)
            loss = tf.reduce_sum(stock(dense, ids, weights) ** 3 * factors)
        loss = tf.nn.l2_loss(inner.gradient(loss, weights))
    expected, *expected_of_others = outer.gradient(loss, [dense, weights, factors])
    *got, of_weights, of_factors = (tf.function(second, autograph=False) if traced else second)(
        variable, _parts(variable)
    )
    for one, expected_one in zip([of_weights, of_factors], expected_of_others, strict=True):
        np.testing.assert_allclose(one, expected_one, rtol=1e-4, atol=1e-3)
    summed = sum(np.asarray(tf.math.unsorted_segment_sum(g.values, g.indices, 6)) for g in got)
    np.testing.assert_allclose(summed, tf.convert_to_tensor(expected), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_second_derivatives_of_rows_of_no_weight(make, combiner):
    """Are numbers: what was divided by 0 is a constant."""
    variable = make(dim=2, initializer=3.0)
    ids = tf.RaggedTensor.from_row_lengths(tf.constant([1, 2, 5, 1], tf.int64), [2, 0, 2])
    weights, factors = tf.constant([0.0, 0.0, 4.0, 0.5]), tf.constant([2.0, 0.5])
    with tf.GradientTape() as outer:
        outer.watch([weights, factors])
        with tf.GradientTape() as inner:
            inner.watch(weights)
            pooled = tf.nn.embedding_lookup_sparse(variable, ids, ids.with_values(weights), combiner=combiner)
            loss = tf.reduce_sum(pooled**2 * factors)
        loss = tf.nn.l2_loss(inner.gradient(loss, weights))
    of_rows, *others = outer.gradient(loss, [variable, weights, factors])
    for one in (of_rows.values, *others):
        assert np.isfinite(one).all()
    if combiner != "sum":
        np.testing.assert_array_equal(others[0][:2], [0.0, 0.0])


def test_the_weights_gradient_is_made_only_when_asked_for(make):
    variable = make()
    case = Case(KEY_DTYPES[tf.int64], tf.int64, weighted=True)

    def step(watch):
        weights = tf.SparseTensor(case.ids.indices, tf.identity(case.weights.values), case.ids.dense_shape)
        with tf.GradientTape() as tape:
            if watch:
                tape.watch(weights.values)
            rows = tf.nn.embedding_lookup_sparse(variable, case.ids, weights)
        return tape.gradient(rows, weights.values if watch else variable)

    def ops(watch):
        graph = tf.function(step).get_concrete_function(watch).graph
        return {op.type for op in graph.get_operations()}

    assert "KvTablePoolWeightsGradient" not in ops(False)
    assert "KvTablePoolWeightsGradient" in ops(True)


def test_graph_mode_trains_table_and_weights_in_one_step(session, partitioner):
    table = V1.get_kv_variable("t", embedding_dim=2, partitioner=partitioner, initializer=2.0)
    scale = V1.get_variable("scale", initializer=[1.0, 3.0], use_resource=True)
    ids = tf.SparseTensor([[0, 0], [0, 1]], tf.constant([1, -1], tf.int64), [1, 2])
    rows = V1.nn.embedding_lookup_sparse(table, ids, tf.SparseTensor(ids.indices, scale, [1, 2]), combiner="sum")
    step = V1.train.GradientDescentOptimizer(0.25).minimize(tf.reduce_sum(rows))
    session.run(V1.global_variables_initializer())
    for _ in range(20):
        session.run([part.clear() for part in _parts(table)])
        session.run(scale.initializer)
        session.run(step)
        # The weights' gradient is of the rows before the update: 2 + 2 each.
        np.testing.assert_array_equal(session.run(scale), [0.0, 2.0])
        np.testing.assert_array_equal(session.run(table.sparse_read([1, -1]))[:, 0], [1.75, 1.25])


def test_a_pooled_lookup_is_one_op(make, partitioner):
    variable = make(partitioner=partitioner)

    @tf.function(input_signature=[tf.SparseTensorSpec([None, None], tf.int64)])
    def lookup(ids):
        with tf.GradientTape() as tape:
            rows = tf.nn.safe_embedding_lookup_sparse(variable, ids)
        return rows, tape.gradient(rows, _parts(variable))

    types = {op.type for op in lookup.get_concrete_function().graph.get_operations()}
    assert {"KvTablePool", "KvTablePoolGradient"} <= types
    assert not types & {"Unique", "DynamicPartition", "UnsortedSegmentSum", "KvTableGather", "KvTableGatherMany"}


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
def test_a_regularizer_sees_the_rows_of_a_training_lookup(eager):
    graph = tf.Graph()
    with graph.as_default() if not eager else tf.init_scope():
        table = V1.get_kv_variable("t", embedding_dim=2, initializer=3.0, regularizer=tf.reduce_sum)
        ids = tf.RaggedTensor.from_row_lengths(tf.constant([1, 1, 5], tf.int64), [3])
        tf.nn.embedding_lookup_sparse(table, ids, None)
        with tfplugin.inference_mode():
            tf.nn.embedding_lookup_sparse(table, ids, None)
        losses = V1.get_collection(V1.GraphKeys.REGULARIZATION_LOSSES)
        if eager:
            assert losses == []
            return
        with V1.Session() as session:
            session.run(V1.global_variables_initializer())
            assert session.run(losses) == [12.0]


def test_inference_inserts_nothing_and_gives_zeros(make, partitioner):
    variable = make(dim=2, partitioner=partitioner, initializer=1.0)
    variable.upsert([1], [[4.0, 4.0]])
    ids = tf.RaggedTensor.from_row_lengths(tf.constant([1, 2, 3], tf.int64), [2, 1])
    with tfplugin.inference_mode():
        rows = tf.nn.embedding_lookup_sparse(variable, ids, None, combiner="sum")
    np.testing.assert_array_equal(rows, [[4, 4], [0, 0]])
    assert int(variable.size()) == 1


def test_a_saved_model_pools_and_never_inserts(make, partitioner, tmp_path):
    model = tf.Module()
    model.table = make(dim=2, partitioner=partitioner, initializer=1.0)
    model.table.upsert([1, 2], [[1.0, 1.0], [3.0, 3.0]])

    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.int64, ragged_rank=1)])
    def serve(ids):
        return tf.nn.safe_embedding_lookup_sparse(model.table, ids, combiner="mean")

    model.serve = serve
    tf.saved_model.save(model, str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    ids = tf.ragged.constant([[1, 2], [], [77]], tf.int64, row_splits_dtype=tf.int64)
    for _ in range(2):
        np.testing.assert_array_equal(loaded.serve(ids), [[2, 2], [0, 0], [0, 0]])
    assert int(loaded.table.size()) == 2


def test_shapes_are_known_as_far_as_the_ids_tell(make):
    variable = make(dim=3)

    @tf.function(
        input_signature=[
            tf.SparseTensorSpec([None, None], tf.int64),
            tf.RaggedTensorSpec([5, None], tf.int64),
            tf.SparseTensorSpec([None, None, None], tf.int64),
        ]
    )
    def shapes(sparse, ragged, cube):
        seen.extend(
            [
                tf.nn.embedding_lookup_sparse(variable, sparse, None).shape.as_list(),
                tf.nn.embedding_lookup_sparse(variable, ragged, None).shape.as_list(),
                tf.nn.safe_embedding_lookup_sparse(variable, cube, None).shape.as_list(),
            ]
        )

    seen: list[list[int | None]] = []
    shapes.get_concrete_function()
    assert seen == [[None, 3], [5, 3], [None, None, 3]]


def test_bad_ids_are_refused_by_name(make):
    variable = make(name="pooled", dim=2)
    keys = tf.constant([1, 2], tf.int64)
    outside = tf.SparseTensor([[0, 0], [7, 0]], keys, [2, 1])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"id 1 is in row \[7\], and there are 2 rows"):
        tf.nn.embedding_lookup_sparse(variable, outside, None)
    weights = tf.SparseTensor([[0, 0]], [1.0], [2, 1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="got 2 ids and 1 weights"):
        tf.nn.embedding_lookup_sparse(variable, tf.SparseTensor([[0, 0], [1, 0]], keys, [2, 1]), weights)
    splits = tf.RaggedTensor.from_row_splits(keys, tf.constant([0, 9, 2], tf.int64), validate=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="row splits of 2 ids run from 0 to 2"):
        tf.nn.embedding_lookup_sparse(variable, splits, None)
    assert int(variable.size()) == 0
    attrs = {"parts": [1], "dims": [2], "outer": [-1], "weighted": [False], "positive": [False], "filled": [False]}
    with pytest.raises(tf.errors.InvalidArgumentError, match="combiner must be sum, mean or sqrtn, got 'max'"):
        lists = ([variable.handle], [keys], [tf.constant([0, 2], tf.int64)], [], [], [])
        raw.kv_table_pool(*lists, dtype=tf.float32, combiners=["max"], **attrs)
