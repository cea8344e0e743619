"""`Variable` against a dictionary: reads, writes, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfplugin import dynamic_embedding as de
from tfplugin import tfra

KEYS = np.array([0, -1, 7, -(2**63), 2**63 - 1, 5])
OTHERS = np.array([[1, 7], [-2, 0]])

KEY_DTYPES = [tf.int64, tf.int32]
FLOATS = [tf.float32, tf.float64, tf.float16, tf.bfloat16]
INTEGERS = [tf.int8, tf.int32, tf.int64]


def rows(keys, dim=2, dtype=tf.float32):
    values = (np.arange(keys.size * dim) % 100 - 3).reshape((*keys.shape, dim))
    return values.astype(dtype.as_numpy_dtype)


def test_both_ways_of_importing_are_the_same():
    assert tfra.dynamic_embedding is de


def test_a_lookup_gives_initial_values_for_missing_keys_and_inserts_nothing(mode, name, devices):
    v = de.Variable(dim=2, name=name, devices=devices, initializer=0.25)
    mode(lambda k, r: v.upsert(k, r), KEYS, rows(KEYS))
    held = dict(zip(KEYS.tolist(), rows(KEYS).tolist(), strict=True))
    found, exists = mode(lambda k: v.lookup(k, return_exists=True), OTHERS)
    assert found.tolist() == [[held.get(int(k), [0.25, 0.25]) for k in row] for row in OTHERS]
    assert exists.tolist() == [[int(k) in held for k in row] for row in OTHERS]
    assert mode(lambda k: v.lookup(k), OTHERS).tolist() == found.tolist()
    assert int(mode(lambda: v.size())) == len(KEYS)


def test_arrays_and_lengths_name_the_way_out(name):
    v = de.Variable(dim=2, name=name)
    told = rf"'{name}' has no dense value to make an array of: .*export\(\).* lookup\("
    for make_array in (np.asarray, np.sum, lambda v: np.array([v, v])):
        with pytest.raises(TypeError, match=told):
            make_array(v)
    with pytest.raises(TypeError, match=rf"'{name}' has no fixed length: size\(\) says"):
        len(v)
    assert v and tf.function(lambda v: v.lookup([1]))(v).shape == (1, 2)


def test_writes_follow_a_dictionary(mode, name, devices, rows_of):
    v = de.Variable(dim=2, name=name, devices=devices)
    held = {}
    rng = np.random.default_rng(0)
    for _ in range(3):
        keys = rng.integers(-20, 20, 15)
        new = rng.normal(size=(15, 2)).astype(np.float32)
        mode(lambda k, r: v.upsert(k, r), keys, new)
        held |= dict(zip(keys.tolist(), new.tolist(), strict=True))
        gone = rng.integers(-20, 25, 6)
        mode(lambda k: v.remove(k), gone)
        for key in gone.tolist():
            held.pop(key, None)
        assert rows_of(mode, v) == held
        sizes = [int(mode(lambda i=i: v.size(i))) for i in range(len(devices))]
        expected = [sum(key % len(devices) == i for key in held) for i in range(len(devices))]
        assert sizes == expected and int(mode(lambda: v.size())) == len(held)
    mode(lambda: v.clear())
    assert rows_of(mode, v) == {} and int(mode(lambda: v.size())) == 0


def test_accum_adds_or_inserts_and_drops_the_mixed_cases(mode, name, devices, rows_of):
    v = de.Variable(dim=2, name=name, devices=devices, initializer=9.0)
    mode(lambda k, r: v.upsert(k, r), np.array([1, 2]), np.array([[1, 1], [2, 2]], np.float32))
    keys = np.array([1, 2, 3, 4])
    exists = np.array([True, False, True, False])
    old = np.full((4, 2), 0.5, np.float32)
    new = np.array([[1, 2], [3, 4], [5, 6], [7, 8]], np.float32)
    mode(lambda *a: v.accum(*a), keys, old, new, exists)
    assert rows_of(mode, v) == {1: [1.5, 2.5], 2: [2, 2], 4: [7, 8]}


@pytest.mark.parametrize("key_dtype", KEY_DTYPES, ids=lambda d: d.name)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=lambda d: d.name)
def test_dtypes(name, devices, key_dtype, dtype):
    v = de.Variable(key_dtype, dtype, dim=3, devices=devices, name=name, initializer=2)
    keys = np.array([3, -7, 0, 100], key_dtype.as_numpy_dtype)
    values = rows(keys, 3, dtype)
    v.upsert(tf.constant(keys), tf.constant(values))
    found, exists = v.lookup(tf.constant([-7, 8], key_dtype), return_exists=True)
    assert found.dtype == dtype and exists.numpy().tolist() == [True, False]
    np.testing.assert_array_equal(found.numpy(), [values[1], np.full(3, 2, values.dtype)])
    exported = dict(zip(v.export()[0].numpy().tolist(), v.export()[1].numpy().tolist(), strict=True))
    assert exported == dict(zip(keys.tolist(), values.tolist(), strict=True))
    v.accum(tf.constant(keys[:1]), tf.constant(values[:1]), tf.constant(values[:1] + values.dtype.type(3)), [True])
    np.testing.assert_array_equal(v.lookup(tf.constant(keys[:1])).numpy(), values[:1] + values.dtype.type(3))


def test_bools(name, devices):
    v = de.Variable(value_dtype=tf.bool, dim=2, devices=devices, name=name, initializer=True)
    v.upsert([1, 2], [[True, False], [False, False]])
    assert v.lookup([1, 2, 3]).numpy().tolist() == [[True, False], [False, False], [True, True]]


def test_integers_beyond_the_float_range_are_exact(name):
    big = 2**63 - 1
    v = de.Variable(value_dtype=tf.int64, dim=1, name=name, initializer=big)
    v.upsert([1], [[-(2**63)]])
    assert v.lookup([1, 2]).numpy().tolist() == [[-(2**63)], [big]]


@pytest.mark.parametrize(
    ("initializer", "expected"),
    [
        (None, [0, 0, 0]),
        (1.5, [1.5] * 3),
        (np.array([1, 2, 3], np.float32), [1, 2, 3]),
        ([[1.0, 2.0, 3.0]], [1, 2, 3]),
        (np.array([4.0, 5.0]), [4, 4, 4]),
        (tf.ones_initializer(), [1, 1, 1]),
        (tf.compat.v1.constant_initializer(2.5), [2.5] * 3),
        (tf.keras.initializers.Constant(3.5), [3.5] * 3),
    ],
)
def test_initial_values(mode, name, devices, initializer, expected):
    v = de.Variable(dim=3, name=name, devices=devices, initializer=initializer)
    assert mode(lambda k: v.lookup(k), np.array([5, -9])).tolist() == [expected, expected]


@pytest.mark.parametrize(
    ("dtype", "initializer", "expected"),
    [
        (tf.int32, 0.1, 0),
        (tf.int8, -2.7, -2),
        (tf.int64, tf.keras.initializers.Constant(3.5), 3),
        (tf.bool, 0.1, True),
        (tf.int32, np.array([1.5, 2.5]), [1, 2]),
    ],
    ids=["int32", "int8", "int64", "bool", "array"],
)
def test_initial_values_of_integers_drop_the_fraction(name, dtype, initializer, expected):
    v = de.Variable(value_dtype=dtype, dim=2, name=name, initializer=initializer)
    assert v.lookup([7]).numpy().tolist() == np.broadcast_to(expected, (1, 2)).tolist()


def test_an_initial_value_may_be_a_tensor_of_the_graph(session, name):
    v = de.Variable(dim=2, name=name, initializer=tf.constant([1.0, 2.0]) * 2)
    assert session.run(v.lookup(tf.constant([1], tf.int64))).tolist() == [[2, 4]]


def test_random_initial_values_are_a_function_of_the_key(mode, name, devices):
    for i, initializer in enumerate(
        (tf.keras.initializers.RandomNormal(0.0, 1.0), tf.keras.initializers.GlorotUniform(), "uniform")
    ):
        v = de.Variable(dim=4, name=f"{name}_{i}", devices=devices, initializer=initializer)
        keys = np.arange(50)
        first = mode(lambda k, v=v: v.lookup(k), keys)
        assert (mode(lambda k, v=v: v.lookup(k), keys[::-1].copy())[::-1] == first).all()
        assert len(np.unique(first[:, 0])) > 40 and np.abs(first).max() < 6


def test_an_array_of_float64_is_rounded_but_not_a_tensor(name):
    v = de.Variable(dim=1, name=name)
    v.upsert([1], np.array([[1.5]]))
    with pytest.raises(TypeError, match="float32 values, got float64"):
        v.upsert([1], tf.constant([[1.5]], tf.float64))


@pytest.mark.parametrize("keys", [tf.constant([1]), tf.constant([1.0]), np.array([1], np.int32), ["a"], [1.5]])
@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_keys_of_another_dtype_are_a_type_error_and_a_value_error(name, devices, keys, error):
    v = de.Variable(dim=1, name=name, devices=devices)
    one = tf.constant([[1.0]])
    for call in (
        lambda: v.lookup(keys),
        lambda: v.upsert(keys, one),
        lambda: v.remove(keys),
        lambda: v.accum(keys, one, one, [True]),
    ):
        with pytest.raises(error, match=name):
            call()


@pytest.mark.parametrize("error", [TypeError, ValueError])
def test_values_of_another_dtype_are_a_type_error_and_a_value_error(mode, name, devices, error):
    v = de.Variable(dim=1, name=name, devices=devices)
    one, wrong = tf.constant([[1.0]]), tf.constant([[1]])
    key = tf.constant([1], tf.int64)
    for call in (
        lambda: v.upsert(key, wrong),
        lambda: v.accum(key, wrong, one, [True]),
        lambda: v.accum(key, one, wrong, [True]),
    ):
        with pytest.raises(error, match="float32 values, got int32"):
            call()


@pytest.mark.parametrize("values", [(3, 4), (6, 1), (1, 2), (2, 3), (2,)], ids=str)
def test_rows_of_another_shape_are_an_error(mode, name, devices, values):
    v = de.Variable(dim=2, name=name, devices=devices)
    keys, rows_of_another_shape = np.arange(3), np.ones(values, np.float32)
    for write in (
        lambda: v.upsert(keys, rows_of_another_shape),
        lambda: v.accum(keys, rows_of_another_shape, rows_of_another_shape, np.ones(3, bool)),
    ):
        # Known at once, or when the op runs.
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)):
            mode(write)
    assert mode(v.size) == 0
    mode(lambda: v.upsert(keys.reshape([3, 1]), np.ones([3, 1, 2], np.float32)))
    assert mode(v.size) == 3


@pytest.mark.parametrize("dtypes", [(tf.float32, tf.float32), (tf.int64, tf.complex64), (tf.int16, tf.float32)])
def test_dtypes_that_tables_do_not_have_are_a_type_error(name, dtypes):
    with pytest.raises(TypeError, match=f"'{name}': {dtypes[0].name} keys with {dtypes[1].name} values"):
        de.Variable(*dtypes, name=name)


def test_removing_absent_keys_is_ignored(mode, name, devices):
    v = de.Variable(dim=1, name=name, devices=devices)
    mode(lambda k: v.remove(k), np.array([1, 2, 3]))
    assert int(mode(lambda: v.size())) == 0


def test_a_partitioner_says_which_table_owns_a_key(mode, name, rows_of):
    seen = []

    def by_tens(keys, n):
        seen.append(n)
        return tf.cast(keys // 10 % n, tf.int32)

    v = de.Variable(dim=1, name=name, devices=["/CPU:0"] * 3, partitioner=by_tens, initializer=-1)
    keys = np.array([1, 2, 11, 25, 39])
    mode(lambda k, r: v.upsert(k, r), keys, keys.astype(np.float32)[:, None])
    assert [int(mode(lambda i=i: v.size(i))) for i in range(3)] == [3, 1, 1]
    assert set(seen) == {3}
    found, exists = mode(lambda k: v.lookup(k, return_exists=True), np.array([[25, 3], [1, 11]]))
    assert found.tolist() == [[[25], [-1]], [[1], [11]]] and exists.tolist() == [[True, False], [True, True]]
    mode(lambda k: v.remove(k), np.array([2, 25]))
    assert rows_of(mode, v) == {1: [1], 11: [11], 39: [39]}


def test_the_default_partitioner_is_floor_mod():
    assert de.variable.default_partition_fn(tf.constant([-1, 4, 3], tf.int64), 3).numpy().tolist() == [2, 1, 0]
    assert de.variable.default_partition_fn(tf.constant([-1, 4]), 1).numpy().tolist() == [0, 0]
    strings = tf.constant(["a", "b"])
    expected = tf.strings.to_hash_bucket_fast(strings, 5)
    assert (de.variable.default_partition_fn(strings, 5).numpy() == expected.numpy()).all()


def test_tables_are_one_for_each_device_and_have_methods_of_their_own(name, devices):
    v = de.Variable(dim=2, name=name, devices=devices)
    assert len(v.tables) == len(devices) and v.devices == devices and v.shard_num == len(devices)
    table = v.tables[0]
    table.insert(tf.constant([0, 3], tf.int64), tf.ones([2, 2]))
    assert table.size().numpy() == 2 == v.size(0).numpy()
    assert table.lookup([0, 6], dynamic_default_values=tf.constant(5.0)).numpy().tolist() == [[1, 1], [5, 5]]
    table.remove([3])
    assert table.export()[0].numpy().tolist() == [0]
    table.clear()
    assert v.size().numpy() == 0


def test_the_constructor_s_arguments_are_attributes(name):
    v = de.Variable(dim=2, name=name, trainable=False, checkpoint=False, init_size=100, bp_v2=True)
    assert (v.trainable, v.checkpoint, v.init_size, v.bp_v2, v.name, v.dim) == (False, False, 100, True, name, 2)
    assert v.key_dtype == tf.int64 and v.value_dtype == tf.float32 and v.restrict_policy is None
    assert isinstance(v.kv_creator, de.CuckooHashTableCreator) and v.trainable_store == {}


def test_a_creator_makes_the_tables(name):
    made = []

    class Creator(de.CuckooHashTableCreator):
        def create(self, *args, **kwargs):
            made.append(super().create(*args, **kwargs))
            return made[-1]

    v = de.Variable(dim=2, name=name, devices=["/CPU:0"] * 2, kv_creator=Creator())
    assert v.tables == made
    assert v.kv_creator.get_config()["key_dtype"] == tf.int64
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="eager mode"):
        v.kv_creator.get_config()


def test_the_initial_size_comes_from_the_argument_or_the_environment(name, monkeypatch):
    def room(i, **kwargs):
        return [table.kv.capacity_hint for table in de.Variable(name=f"{name}_{i}", **kwargs).tables]

    assert room(0) == [8192] and room(1, init_size=300, devices=["/CPU:0"] * 3) == [100] * 3
    monkeypatch.setenv("TF_HASHTABLE_INIT_SIZE", "1000")
    assert room(2) == [1000] and room(3, init_size=300) == [300]


# ---- get_variable ----


def test_get_variable_gives_the_same_variable_again_in_eager_mode(name):
    v = de.get_variable(name, dim=2)
    assert de.get_variable(name, dim=2) is v
    with pytest.raises(ValueError, match=f"{name} exists with dim 2, wanted 3"):
        de.get_variable(name, dim=3)
    with pytest.raises(ValueError, match="exists with value_dtype float32, wanted float64"):
        de.get_variable(name, dim=2, value_dtype=tf.float64)


def test_get_variable_follows_variable_scopes(session, name):
    with tf.compat.v1.variable_scope("tower"):
        v = de.get_variable(name, dim=2)
        assert v.name == f"tower/{name}"
        with pytest.raises(ValueError, match=r"already exists\..*reuse"):
            de.get_variable(name, dim=2)
        assert de.get_variable(f"{name}_short", short_file_name=True).name == f"{name}_short"
    for reuse in (True, tf.compat.v1.AUTO_REUSE):
        with tf.compat.v1.variable_scope("tower", reuse=reuse):
            assert de.get_variable(name, dim=2) is v


def test_get_variable_inside_a_function_makes_it_once(name):
    @tf.function
    def lookup(ids):
        return de.get_variable(name, dim=2, initializer=1.0).lookup(ids)

    assert lookup(tf.constant([1], tf.int64)).numpy().tolist() == [[1, 1]]
    assert lookup(tf.constant([1, 2], tf.int64)).numpy().shape == (2, 2)
    assert de.get_variable(name, dim=2).size().numpy() == 0


def test_a_session_needs_no_initializer_and_initializers_clear_nothing(session, name, devices):
    v = de.get_variable(name, dim=1, devices=devices, initializer=np.array([7.0]))
    session.run(v.upsert(tf.constant([1], tf.int64), [[2.0]]))
    session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
    assert session.run(v.lookup(tf.constant([1, 2], tf.int64))).tolist() == [[2], [7]]


def test_a_strategy_that_copies_variables_is_refused(name):
    with (
        tf.distribute.MirroredStrategy(["/CPU:0"]).scope(),
        pytest.raises(ValueError, match=f"'{name}' cannot be made under MirroredStrategy.*Horovod"),
    ):
        de.Variable(dim=2, name=name)
    with tf.distribute.OneDeviceStrategy("/CPU:0").scope():
        assert int(de.Variable(dim=2, name=name).size()) == 0


def test_the_functions_that_tfra_has_for_gpus_are_those_of_tensorflow():
    parts = de.data_flow.dynamic_partition(tf.constant([1.0, 2.0, 3.0]), tf.constant([0, 1, 0]), 2)
    assert [part.numpy().tolist() for part in parts] == [[1, 3], [2]]
    stitched = de.data_flow.dynamic_stitch([tf.constant([0, 2]), tf.constant([1])], parts, use_fast=False)
    assert stitched.numpy().tolist() == [1, 2, 3]
    sparse = tf.sparse.from_dense([[1, 0], [0, 0]])
    filled, empty = de.math.sparse_fill_empty_rows(sparse, 7)
    assert filled.values.numpy().tolist() == [1, 7] and empty.numpy().tolist() == [False, True]
    assert de.math.sparse_reshape(sparse, [4]).dense_shape.numpy().tolist() == [4]
    rows = tf.constant([[1.0], [2.0], [3.0]])
    summed = de.math.sparse_segment_sum(rows, tf.constant([0, 2]), tf.constant([0, 2]), num_segments=3)
    assert summed.numpy().tolist() == [[1], [0], [3]]
    assert de.ragged_embedding_ops.safe_embedding_lookup_sparse is de.safe_embedding_lookup_sparse


OWNERS = {
    "beyond": (lambda keys, tables: tf.cast(keys, tf.int32) + 1, r"number from 0 to 1 for each key, got 2 for key .*1"),
    "negative": (lambda keys, tables: -tf.cast(keys, tf.int32), r"from 0 to 1 for each key, got -1 for key .*1"),
    "too few": (lambda keys, tables: tf.zeros([1], tf.int32), "from 0 to 1 for each key, got 1 for 2 keys"),
}


@pytest.mark.parametrize("wrong", OWNERS)
def test_a_partitioner_out_of_range_is_told(name, mode, wrong):
    partitioner, told = OWNERS[wrong]
    v = de.Variable(dim=1, name=name, devices=["/CPU:0"] * 2, partitioner=partitioner)
    told = told if mode.name == "eager" else r"The partitioner of .* must give a number from 0 to 1 for each key, got"
    for call in (v.lookup, lambda keys: v.upsert(keys, tf.ones([2, 1]))):
        with pytest.raises(tf.errors.InvalidArgumentError, match=told):
            mode(call, np.array([0, 1]))


def test_a_partitioner_gives_whole_numbers(name):
    v = de.Variable(dim=1, name=name, devices=["/CPU:0"] * 2, partitioner=lambda keys, tables: tf.ones([2]) / 2)
    with pytest.raises(TypeError, match="must give a number from 0 to 1 for each key, got float32"):
        v.lookup(np.array([0, 1]))
