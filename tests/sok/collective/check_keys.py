"""Any key, on any number of ranks: extreme and negative ones, duplicates, shards and batches without any."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin
import tfplugin.sok as sok
from tfplugin.sok.optimizer_slots import slots_of

MIXED = {
    "int64": [-(2**63), -(2**63) + 1, 2**63 - 2, 2**63 - 1, *range(-7, 8), 2**40, -(2**40)],
    "uint64": [2**64 - 1, 2**64 - 2, 2**63, 2**63 + 1, 2**63 - 1, *range(8), 2**40],
    "int32": [-(2**31), -(2**31) + 1, 2**31 - 2, 2**31 - 1, *range(-7, 8)],
}
STATIC = ("distributed", "localized")
DYNAMIC = ("hbm", "hybrid")


@pytest.fixture(scope="module", autouse=True)
def _sok_started() -> None:
    sok.init()


def _variable(kind: str, rows: int, size: int) -> Any:
    """Every row starts as [0.25, 0.25]."""
    if kind in DYNAMIC:
        return sok.DynamicVariable(2, "0.25", kind)
    mode = "distributed" if kind == "distributed" else f"localized:{size - 1}"
    return sok.Variable(np.full([rows, 2], 0.25), dtype=tf.float32, mode=mode)


def _ragged(lists: list[list[int]]) -> tf.RaggedTensor:
    return tf.ragged.constant(lists, tf.int64, ragged_rank=1)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("key_type", MIXED)
def test_every_key_has_a_row_of_its_own(key_type: str, traced: bool, rank: int, size: int) -> None:
    keys = np.array(MIXED[key_type], key_type)
    of_key = np.arange(2.0 * len(keys), dtype=np.float32).reshape(-1, 2)
    v, optimizer = sok.DynamicVariable(2, "zeros", key_type=key_type), sok.SGD(1.0)
    held = np.array([int(key) % size == rank for key in keys])  # Python's remainder: never negative
    sok.assign(v, keys[held], of_key[held])
    # Every rank asks for keys of its own choice, with duplicates: the same key on several ranks, too.
    asked = [np.random.default_rng(r).integers(len(keys), size=40) for r in range(size)]
    ids = tf.RaggedTensor.from_row_lengths(tf.constant(keys[asked[rank]]), [0, 15, 1, 24])

    def step() -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            pooled = sok.lookup_sparse(v, ids, combiners="sum")
            loss = tf.reduce_sum(pooled)
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])
        return pooled, sok.all2all_dense_embedding(v, tf.constant(keys))

    pooled, after = (tf.function(step) if traced else step)()
    bounds = [(0, 0), (0, 15), (15, 16), (16, 40)]
    np.testing.assert_array_equal(pooled, [of_key[asked[rank][a:b]].sum(0) for a, b in bounds])
    occurrences = np.bincount(np.concatenate(asked), minlength=len(keys))
    np.testing.assert_array_equal(after, of_key - occurrences[:, None])
    assert sorted(sok.export(v)[0].numpy().tolist()) == sorted(keys[held].tolist())


@pytest.mark.parametrize("kind", [*STATIC, *DYNAMIC])
def test_a_rank_may_own_no_key(kind: str, rank: int, size: int) -> None:
    v = _variable(kind, 10 * size, size)
    ids = _ragged([[0, size, size], [], [2 * size]])  # rank 0 owns all of them, unless it is localized
    with tf.GradientTape() as tape:
        pooled = sok.lookup_sparse(v, ids, combiners="sum")
        loss = tf.reduce_sum(pooled)
    np.testing.assert_array_equal(pooled, [[0.75, 0.75], [0, 0], [0.25, 0.25]])
    sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.5)).apply_gradients([(tape.gradient(loss, v), v)])
    after = sok.all2all_dense_embedding(v, tf.constant([0, size, 2 * size], tf.int64))
    expected = 0.25 - 0.5 * size * np.array([[1.0, 1], [2, 2], [1, 1]])
    np.testing.assert_allclose(after, expected, rtol=1e-6)
    if kind in DYNAMIC:
        np.testing.assert_array_equal(v.size, [3 if rank == 0 else 0, 2])


@pytest.mark.parametrize("kind", [*STATIC, *DYNAMIC])
@pytest.mark.parametrize("without", ["samples", "ids"])
def test_a_rank_may_have_an_empty_batch(without: str, kind: str, rank: int, size: int) -> None:
    v = _variable(kind, 5, size)
    lists = [[1, 2, 1], [3]] if rank > 0 else [] if without == "samples" else [[], [], []]
    ids = _ragged(lists)
    with tf.GradientTape() as tape:
        pooled = sok.lookup_sparse(v, ids, combiners="mean")
        loss = tf.reduce_sum(pooled)
    expected = np.full([2, 2], 0.25) if rank > 0 else np.zeros([len(lists), 2])
    np.testing.assert_array_equal(pooled, expected)
    sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0)).apply_gradients([(tape.gradient(loss, v), v)])
    after = sok.all2all_dense_embedding(v, tf.constant([1, 2, 3], tf.int64), training=False)
    if size > 1:
        trained = 0.25 - (size - 1) * np.array([2 / 3, 1 / 3, 1])
        np.testing.assert_allclose(after, np.repeat(trained[:, None], 2, 1), rtol=1e-5)


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("kind", [*STATIC, *DYNAMIC])
def test_empty_samples_are_exactly_zero(kind: str, combiner: str, weighted: bool, size: int) -> None:
    v = _variable(kind, 5, size)
    ids = _ragged([[], [1, 2], [], [], [4], []])
    sparse = ids.to_sparse()
    weights = tf.SparseTensor(sparse.indices, [0.5, 2.0, 3.0], sparse.dense_shape) if weighted else None
    rows = sok.lookup_sparse(v, sparse, weights, combiners=combiner).numpy()
    assert rows.shape == (6, 2)
    np.testing.assert_array_equal(rows[[0, 2, 3, 5]], 0.0)
    assert (rows[[1, 4]] > 0.2).all()


@pytest.mark.parametrize("kind", [*STATIC, *DYNAMIC])
def test_plain_lookups_equal_tf_gather(kind: str, rank: int, size: int) -> None:
    rows = np.random.default_rng(5).normal(size=[9, 3]).astype(np.float32)
    if kind in DYNAMIC:
        v = sok.DynamicVariable(3, "zeros", kind)
        held = np.arange(rank, 9, size)
        sok.assign(v, held, rows[held])
    else:
        v = sok.Variable(rows, mode="distributed" if kind == "distributed" else "localized:0")
    of_ranks = [np.random.default_rng(r).integers(9, size=[4, 2, 3]) for r in range(size)]
    ids = tf.constant(of_ranks[rank], tf.int64)
    with tf.GradientTape() as tape:
        found = sok.all2all_dense_embedding(v, ids)
        loss = tf.nn.l2_loss(found)
    assert found.shape == (4, 2, 3, 3)
    np.testing.assert_array_equal(found, tf.gather(rows, ids))
    ragged = tf.RaggedTensor.from_row_lengths(tf.reshape(ids, [-1]), [0, 20, 4])
    np.testing.assert_array_equal(
        sok.all2all_dense_embedding(v, ragged).flat_values, tf.gather(rows, ragged.flat_values)
    )
    sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1)).apply_gradients([(tape.gradient(loss, v), v)])
    counts = np.bincount(np.concatenate(of_ranks, axis=None), minlength=9)[:, None]
    after = sok.all2all_dense_embedding(v, tf.range(9, dtype=tf.int64))
    np.testing.assert_allclose(after, rows - 0.1 * counts * rows, atol=1e-6)


@pytest.mark.parametrize("initializer", ["13", "random", "normal"])
@pytest.mark.parametrize("var_type", DYNAMIC)
def test_rows_never_trained_keep_their_first_value(var_type: str, initializer: str) -> None:
    v = sok.DynamicVariable(4, initializer, var_type)
    keys = tf.range(-6, 6, dtype=tf.int64)
    first = sok.all2all_dense_embedding(v, keys).numpy()
    assert (first == 13).all() if initializer == "13" else len(np.unique(first)) > 40
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(v, _ragged([[0, 1], [-6]]), combiners="sum"))
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])
    after = sok.all2all_dense_embedding(v, keys).numpy()
    trained = np.isin(keys, [0, 1, -6])
    np.testing.assert_array_equal(after[~trained], first[~trained])
    assert (np.abs(after[trained] - first[trained]) > 0.2).all()


@pytest.mark.parametrize("kind", [*STATIC, *DYNAMIC])
def test_dense_variables_are_reduced_by_horovod_beside_those_of_sok(kind: str, hvd: Any, rank: int, size: int) -> None:
    kernel = np.array([[1.0], [-2.0]], np.float32)
    v, dense = _variable(kind, 6, size), tf.Variable(kernel)
    lists = [[[r, r + 1], [5]] for r in range(size)]
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.nn.l2_loss(sok.lookup_sparse(v, _ragged(lists[rank]), combiners="sum") @ dense)
    ours, others = sok.filter_variables([v, dense])
    reduced = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    gradients = [*tape.gradient(loss, ours), *reduced.gradient(loss, others)]
    optimizer.apply_gradients(zip(gradients, [*ours, *others], strict=True))

    table, alone = tf.Variable(np.full([6, 2], 0.25, np.float32)), tf.Variable(kernel)
    every = _ragged([sample for share in lists for sample in share])
    with tf.GradientTape() as tape:
        loss = tf.nn.l2_loss(tf.nn.embedding_lookup_sparse(table, every, None, combiner="sum") @ alone)
    gradients = [tf.convert_to_tensor(gradient) for gradient in tape.gradient(loss, [table, alone])]
    tf.keras.optimizers.SGD(0.1).apply_gradients(zip(gradients, [table, alone], strict=True))
    np.testing.assert_allclose(dense, alone, atol=1e-6)
    np.testing.assert_allclose(sok.all2all_dense_embedding(v, tf.range(6, dtype=tf.int64)), table, atol=1e-6)


@pytest.mark.parametrize("optimizers", [tf_keras.optimizers, tf_keras.optimizers.legacy], ids=["tf_keras", "legacy"])
def test_a_distributed_optimizer_of_horovod_updates_the_dense_part(
    optimizers: Any, hvd: Any, rank: int, size: int
) -> None:
    v, dense = sok.DynamicVariable(2, "ones"), tf.Variable([2.0, -1.0])
    of_rows, of_dense = sok.OptimizerWrapper(optimizers.SGD(0.5)), hvd.DistributedOptimizer(optimizers.SGD(0.5))
    with pytest.raises(TypeError, match="DistributedOptimizer would average"):
        sok.OptimizerWrapper(of_dense)

    @tf.function
    def step() -> None:
        with tf.GradientTape(persistent=True) as tape:
            pooled = sok.lookup_sparse(v, tf.ragged.constant([[rank, 7]], tf.int64), combiners="sum")
            loss = (rank + 1.0) * tf.reduce_sum(pooled * dense)
        of_rows.apply_gradients([(tape.gradient(loss, v), v)])
        of_dense.minimize(loss, [dense], tape=tape)

    step()
    got = dense, sok.all2all_dense_embedding(v, tf.constant([0, 7], tf.int64))
    for array, expected in zip(got, _after_one_step(size), strict=True):
        np.testing.assert_allclose(array, expected, atol=1e-6)


@pytest.mark.parametrize("optimizers", [tf.keras.optimizers, tf_keras.optimizers], ids=["Keras 3", "tf_keras"])
def test_a_table_that_each_rank_has_whole_gets_averaged_gradients_or_an_error(
    optimizers: Any, hvd: Any, rank: int, size: int
) -> None:
    table = tfplugin.get_kv_variable("whole", 1, initializer=0.0)
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0))

    def loss() -> tf.Tensor:
        return tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([rank, 7], tf.int64)))

    with tf.GradientTape() as tape:
        value = loss()
    pairs = [(tape.gradient(value, table), table)]
    for apply in (optimizer.apply_gradients, tfplugin.OptimizerWrapper(optimizer).apply_gradients):
        with pytest.raises(ValueError, match=r"'whole:0'.*this rank alone.*hvd.DistributedGradientTape"):
            apply(pairs)
    assert not table.sparse_read([0, 1, 7], training=False).numpy().any()
    if hasattr(optimizer, "minimize"):  # tf_keras
        optimizer.minimize(loss, [table])
    else:  # what the error says
        with tf.GradientTape() as tape:
            value = loss()
        gradients = hvd.DistributedGradientTape(tape).gradient(value, [table])
        tfplugin.OptimizerWrapper(optimizers.SGD(1.0)).apply_gradients([(gradients[0], table)])
    found = table.sparse_read([*range(size), 7], training=False).numpy()[:, 0]
    np.testing.assert_allclose(found, [*[-1 / size] * size, -1.0], rtol=1e-6)


def test_a_distributed_optimizer_of_horovod_updates_the_dense_part_of_a_graph(hvd: Any, rank: int, size: int) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        v, dense = sok.DynamicVariable(2, "ones", name="v"), tf.compat.v1.get_variable("dense", initializer=[2.0, -1.0])
        pooled = sok.lookup_sparse(v, tf.ragged.constant([[rank, 7]], tf.int64), combiners="sum")
        loss = (rank + 1.0) * tf.reduce_sum(pooled * dense)
        sgd = tf.compat.v1.train.GradientDescentOptimizer(0.5)
        steps = [
            sok.OptimizerWrapper(sgd).apply_gradients([(tf.gradients(loss, v)[0], v)]),
            hvd.DistributedOptimizer(sgd).minimize(loss, var_list=[dense]),
        ]
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(steps)
        rows = sok.all2all_dense_embedding(v, tf.constant([0, 7], tf.int64))
        got = session.run([dense, rows])
    for array, expected in zip(got, _after_one_step(size), strict=True):
        np.testing.assert_allclose(array, expected, atol=1e-6)


def _with_other_rows(kind: str, rank: int, size: int) -> tuple[Any, tf.Variable, tf.Tensor, tf.GradientTape]:
    """A variable of sok, a dense one, what was computed of both, and the tape that has seen it."""
    v, dense = _variable(kind, 2 * size, size), tf.Variable([2.0, -1.0])
    with tf.GradientTape() as tape:
        pooled = sok.lookup_sparse(v, _ragged([[rank, 2 * size - 1]]), combiners="sum")
        loss = tf.reduce_sum(pooled * dense)
    return v, dense, loss, tape


@pytest.mark.parametrize("kind", [*STATIC, "hbm"])
def test_horovod_does_not_mix_up_rows_in_silence(kind: str, hvd: Any, rank: int, size: int) -> None:
    v, dense, loss, tape = _with_other_rows(kind, rank, size)
    for in_place in (False, True):
        with pytest.raises(ValueError, match="has other rows on each rank, and a broadcast would"):
            hvd.broadcast_variables([dense, v], 0, inplace=in_place)
    with pytest.raises(ValueError, match=r"add up the gradients .*register_local_source"):
        hvd.DistributedGradientTape(tape).gradient(loss, [v, dense])
    hvd.broadcast_variables(sok.filter_variables([dense, v])[1], 0)

    with tf.Graph().as_default():
        v, dense = _variable(kind, 2 * size, size), tf.compat.v1.get_variable("dense", initializer=[2.0, -1.0])
        with pytest.raises(ValueError, match="has other rows on each rank"):
            hvd.broadcast_global_variables(0)
        loss = tf.reduce_sum(sok.lookup_sparse(v, _ragged([[rank, 2]]), combiners="sum") * dense)
        with pytest.raises(ValueError, match=r"add up the gradients .*register_local_var"):
            hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.5)).minimize(loss)


@pytest.mark.parametrize("kind", [*STATIC, "hbm"])
def test_sums_of_horovod_are_sums_of_rows_too(
    kind: str, hvd: Any, rank: int, size: int, gather: Callable[[Any], list[Any]]
) -> None:
    v, dense, loss, tape = _with_other_rows(kind, rank, size)
    with pytest.raises(ValueError, match=r"trained by the mean over the ranks, .* scale_local_gradients=False"):
        hvd.DistributedGradientTape(tape, op=hvd.Sum).register_local_source(v)
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum, scale_local_gradients=False)
    tape.register_local_source(v)
    of_rows, of_dense = tape.gradient(loss, [v, dense])
    np.testing.assert_allclose(of_dense, [0.5 * size] * 2)
    of_all = sum(gather(tf.reduce_sum(of_rows.values, 0).numpy()))
    np.testing.assert_allclose(of_all, np.array([2.0, -1.0]) * 2 * size)


@pytest.mark.parametrize(
    ("optimizers", "wrap"),
    [
        (tf.keras.optimizers, sok.OptimizerWrapper),
        (tf_keras.optimizers, sok.OptimizerWrapper),
        (tf_keras.optimizers.legacy, sok.OptimizerWrapper),
        (tf_keras.optimizers, lambda optimizer: optimizer),
        (tf_keras.optimizers.legacy, lambda optimizer: optimizer),
        (tf.compat.v1.train, lambda optimizer: optimizer),
    ],
    ids=["keras", "tf_keras", "legacy", "tf_keras without a wrapper", "legacy without a wrapper", "v1"],
)
def test_slots_of_rows_are_not_broadcast_in_silence(
    optimizers: Any, wrap: Callable[[Any], Any], hvd: Any, rank: int, size: int
) -> None:
    v, dense, loss, tape = _with_other_rows("distributed", rank, size)
    made = getattr(optimizers, "SGD", None) or optimizers.MomentumOptimizer
    made = made(0.5, momentum=0.9)
    wrap(made).apply_gradients(zip(tape.gradient(loss, [v, dense]), [v, dense], strict=True))
    slot = slots_of(made, v)["momentum"]
    with pytest.raises(ValueError, match=f"of an optimizer for '{v.name}', has other rows on each rank"):
        hvd.broadcast_variables([getattr(slot, "_value", slot)], 0)
    of_dense = slots_of(made, dense)["momentum"]
    hvd.broadcast_variables([getattr(of_dense, "_value", of_dense)], 0)


@pytest.mark.parametrize("optimizers", [tf_keras.optimizers, tf_keras.optimizers.legacy], ids=["tf_keras", "legacy"])
def test_fit_of_tf_keras_trains_a_static_variable_that_horovod_knows(
    optimizers: Any, hvd: Any, rank: int, size: int
) -> None:
    import horovod.tensorflow.keras

    class Rows(tf_keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = _variable("distributed", 4, size)

        def call(self, ids: tf.Tensor) -> tf.Tensor:
            return sok.lookup_sparse(self.table, tf.RaggedTensor.from_tensor(ids), combiners="sum")

    ids = np.random.default_rng(0).integers(4, size=(2 * size, 3))
    model = tf_keras.Sequential([Rows(), tf_keras.layers.Dense(1, kernel_initializer="ones")])
    model(ids)
    optimizer = horovod.tensorflow.keras.DistributedOptimizer(optimizers.SGD(0.1))
    optimizer.register_local_var(model.layers[0].table)
    model.compile(optimizer, "mse")
    model.fit(ids[rank::size], np.zeros([2, 1]), batch_size=2, verbose=0)

    alone = tf.Variable(np.full([4, 2], 0.25, np.float32))
    dense = tf_keras.layers.Dense(1, kernel_initializer="ones")
    dense.build([None, 2])
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(dense(tf.reduce_sum(tf.nn.embedding_lookup(alone, ids), 1)) ** 2)
    variables = [alone, *dense.trainable_variables]
    optimizers.SGD(0.1).apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    np.testing.assert_allclose(model.layers[0].table, alone[rank::size], atol=1e-6)
    np.testing.assert_allclose(model.layers[1].kernel, dense.kernel, atol=1e-6)


def _after_one_step(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The dense variable, whose gradients are averaged, and the rows of 0 and 7, whose gradients are summed."""
    numbers = np.arange(1.0, size + 1)
    dense = np.array([2.0, -1.0])
    return dense - 0.5 * numbers.mean() * 2, 1 - 0.5 * np.array([[1.0], [numbers.sum()]]) * dense


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("key_dtype", [tf.int64, tf.int32, tf.uint64], ids=lambda dtype: dtype.name)
def test_a_full_vocabulary_is_an_error_on_every_rank(key_dtype: tf.DType, traced: bool, rank: int, size: int) -> None:
    layer = sok.All2AllDenseEmbedding(4, 2, 1, 1, dynamic_input=True, key_dtype=key_dtype, embedding_initializer="ones")
    call = tf.function(layer.call, input_signature=[tf.TensorSpec([None], key_dtype)]) if traced else layer.call
    of_last = [size - 1 + size * number for number in range(6)]  # all of the last rank
    call(tf.constant([*of_last[:3], *of_last[:3]], key_dtype))
    call(tf.constant(of_last[:4] if rank == 0 else [], key_dtype))  # exactly full
    begin = "" if traced else r"^'[\w/:]+' "
    for asking in (0, size - 1):
        keys = of_last if rank == asking else of_last[:2]
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=rf"{begin}may have 4 rows .*rank {size - 1} would have 2 more"
        ):
            call(tf.constant(keys, key_dtype))
    assert sorted(layer.variable.indices.numpy().tolist()) == (of_last[:4] if rank == size - 1 else [])
    np.testing.assert_array_equal(call(tf.constant(of_last[:4], key_dtype)), np.ones([4, 2]))  # goes on
    rows = layer.call(tf.constant(of_last, key_dtype), training=False)
    np.testing.assert_array_equal(rows, np.repeat([[1.0, 1.0], [0.0, 0.0]], [4, 2], axis=0))
