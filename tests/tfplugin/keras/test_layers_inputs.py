"""Ids of every kind in `Embedding`, beside Keras's own layer and NumPy."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
import tf_keras

import tfplugin

DIM = 4
ROWS = np.random.default_rng(0).normal(size=(12, DIM)).astype(np.float32)
#: Samples of different lengths, one of them empty; and a weight for each id.
BAGS = [[3, 1, 3], [], [7], [0, 11]]
WEIGHTS = [[0.5, 2.0, 1.0], [], [3.0], [1.5, 0.25]]


@pytest.fixture
def embedding(layers):
    """Makes layers whose ids below 12 have rows."""

    def embedding(combiner=None, dim=DIM, **options):
        layer = layers.Embedding(dim, combiner, **options)
        keys = np.setdiff1d(np.arange(len(ROWS)), [options.get("padding_id", -1)])
        layer.table.upsert(keys, ROWS[keys])
        return layer

    return embedding


def _pooled(bags, combiner, weights=None):
    pooled = []
    for i, bag in enumerate(bags):
        w = np.array(weights[i] if weights else np.ones(len(bag)), np.float64)
        total = (w[:, None] * ROWS[np.array(bag, int)]).sum(0) if len(bag) else np.zeros(DIM)
        divisor = {"sum": 1.0, "mean": w.sum(), "sqrtn": np.sqrt((w * w).sum())}[combiner]
        pooled.append(total / divisor if len(bag) else total)
    return np.stack(pooled).astype(np.float32)


def _ragged(values, dtype=tf.int64):
    return tf.ragged.constant(values, dtype=dtype)


def _sparse(values, dtype=tf.int64):
    ragged = _ragged(values, dtype)
    indices = [[i, j] for i, bag in enumerate(values) for j in range(len(bag))]
    return tf.SparseTensor(indices, ragged.flat_values, [len(values), 3])


def _alike(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 2)])
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8"])
def test_dense_ids(both_kerases, embedding, shape, dtype):
    ids = np.random.default_rng(1).integers(0, len(ROWS), shape).astype(dtype)
    stock = both_kerases.layers.Embedding(len(ROWS), DIM)
    stock.build((None, None))
    stock.set_weights([ROWS])
    layer = embedding()
    _alike(layer(ids), stock(ids.astype("int64")))
    assert layer.compute_output_shape((None, *shape[1:])) == (None, *shape[1:], DIM)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_combiners(embedding, combiner, weighted):
    layer = embedding(combiner)
    weights = WEIGHTS if weighted else None
    expected = _pooled(BAGS, combiner, weights)
    for kind in (_ragged, _sparse):
        _alike(layer(kind(BAGS), weights=kind(WEIGHTS, tf.float32) if weighted else None), expected)
    ids = np.array([[3, 1, 3], [7, 0, 11]])
    numbers = np.array([[0.5, 2.0, 1.0], [3.0, 1.5, 0.25]], np.float32)
    expected = _pooled(ids, combiner, numbers.tolist() if weighted else None)
    _alike(layer(ids, weights=numbers if weighted else None), expected)
    of_more = layer(ids[np.newaxis], weights=numbers[np.newaxis] if weighted else None)
    _alike(of_more, expected[np.newaxis])
    if combiner == "mean":
        _alike(layer(tf.constant([3, 1])), ROWS[[3, 1]])  # one for each sample
    assert layer.compute_output_shape((None, 5)) == (None, DIM)
    assert layer.compute_output_shape((None, 2, 5)) == (None, 2, DIM)


def test_ragged_and_sparse_ids_without_a_combiner(embedding):
    layer = embedding()
    rows = layer(_ragged(BAGS))
    assert isinstance(rows, tf.RaggedTensor)
    np.testing.assert_array_equal(rows.flat_values, ROWS[[3, 1, 3, 7, 0, 11]])
    dense = layer(_sparse(BAGS)).numpy()
    assert dense.shape == (4, 3, DIM)
    np.testing.assert_array_equal(dense[0], ROWS[[3, 1, 3]])
    assert not dense[1].any() and not dense[3, 2].any()


def test_the_innermost_dimension_of_more_is_pooled(embedding):
    layer = embedding("mean")
    nested = tf.ragged.constant([[[3, 1], []], [[7]]], dtype=tf.int64)
    pooled = layer(nested)
    assert pooled.shape.as_list() == [2, None, DIM]
    _alike(pooled.flat_values, _pooled([[3, 1], [], [7]], "mean"))
    uniform = tf.RaggedTensor.from_row_splits(tf.constant([[3, 1], [7, 0]], tf.int64), [0, 1, 2])
    _alike(layer(uniform).flat_values, _pooled([[3, 1], [7, 0]], "mean"))
    sparse = tf.SparseTensor([[0, 0, 1], [0, 1, 0], [1, 1, 0]], tf.constant([3, 1, 7], tf.int64), [2, 2, 2])
    _alike(tf.reshape(layer(sparse), [-1, DIM]), _pooled([[3], [1], [], [7]], "mean"))


@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
@pytest.mark.parametrize("options", [{"mask_zero": True}, {"padding_id": 7}, {"padding_id": 7, "mask_zero": True}])
def test_a_combiner_leaves_the_padding_out(embedding, options, kind):
    layer = embedding("mean", **options)
    padding = options.get("padding_id", 0)
    bags = [[3, 0, 7], [7, 7, 0], [padding] * 3]
    ids = {"dense": np.array, "ragged": _ragged, "sparse": _sparse}[kind](bags)
    _alike(layer(ids, training=True), _pooled([[i for i in bag if i != padding] for bag in bags], "mean"))


def test_padding_without_a_combiner(both_kerases, layers):
    layer = layers.Embedding(DIM, padding_id=-1, mask_zero=True, initializer=1.0)
    ids = tf.constant([[5, -1], [0, 5]], tf.int64)
    rows = layer(ids, training=True)
    np.testing.assert_array_equal(rows[:, :, 0], [[1, 0], [1, 1]])
    np.testing.assert_array_equal(layer.compute_mask(ids), [[True, False], [True, True]])
    assert int(layer.table.size()) == 2
    assert layers.Embedding(DIM, padding_id=-1).compute_mask(ids) is None


def test_masks_go_on_to_other_layers(both_kerases, embedding):
    keras, ids = both_kerases, np.array([[3, 1, 0, 0], [7, 0, 2, 5]])
    stock = keras.layers.Embedding(len(ROWS), DIM, mask_zero=True)
    lstm = keras.layers.LSTM(3)
    predictions = []
    for layer in (embedding(mask_zero=True), stock):
        inputs = keras.Input((None,), dtype="int64")
        model = keras.Model(inputs, lstm(layer(inputs)))
        if layer is stock:
            stock.set_weights([ROWS])
        predictions.append(model.predict(ids, verbose=0))
        again = keras.models.clone_model(model)
        assert again.predict(ids, verbose=0).shape == (2, 3)
    _alike(*predictions)
    sparse = tf.sparse.from_dense(tf.constant([[3, 1, 0]], tf.int64))
    np.testing.assert_array_equal(embedding(mask_zero=True).compute_mask(sparse), [[True, True, False]])
    assert embedding(mask_zero=True).compute_mask(_ragged(BAGS)) is None
    assert embedding("sum", mask_zero=True).compute_mask(tf.constant(ids)) is None


def test_strings_are_hashed_as_stated(both_kerases, layers):
    layer = layers.Embedding(DIM, key_dtype="string", mask_zero=True)
    words = tf.constant([["ad", ""], ["größe", "ad"]])
    rows = layer(words, training=True)
    np.testing.assert_array_equal(rows[0, 0], rows[1, 1])
    expected = tf.strings.to_hash_bucket_fast(["ad", "", "größe"], 1726 * 5342931457063200).numpy()
    assert sorted(layer.table.export()[0].numpy()) == sorted(expected)
    assert expected[0] == 6182169512875231448  # on every machine, in every version
    np.testing.assert_array_equal(layer.compute_mask(words), [[True, False], [True, True]])
    padded = layers.Embedding(DIM, "sum", key_dtype="string", padding_id="none", initializer=1.0)
    np.testing.assert_array_equal(padded(tf.constant([["ad", "none"]]), training=True), np.ones((1, DIM)))
    with pytest.raises(TypeError, match=r"string keys, got ids of int64: convert them with tf\.strings\.as_string"):
        layer(tf.constant([[1, 2]], tf.int64))
    # Where keys are int64, too.
    np.testing.assert_array_equal(layers.Embedding(DIM, initializer=1.0)(words, training=True)[0, 0], np.ones(DIM))
    with pytest.raises(TypeError, match="strings need int64 keys"):
        layers.Embedding(DIM, key_dtype="int32")(words)
    with pytest.raises(TypeError, match="has padding_id=5, got ids of string"):
        layers.Embedding(DIM, "sum", padding_id=5)(words)
    # Also where the layer gives a row for each id.
    with pytest.raises(TypeError, match="has padding_id=5, got ids of string"):
        layers.Embedding(DIM, padding_id=5)(words)
    for ids in (tf.constant([1]), both_kerases.Input((2,), dtype="int64")):
        with pytest.raises(TypeError, match="has padding_id='x', got ids of int"):
            layers.Embedding(DIM, padding_id="x")(ids)


def test_inputs_of_functional_models(both_kerases, embedding):
    keras = both_kerases
    kinds = [(_sparse, {"sparse": True})]
    if "ragged" in inspect.signature(keras.Input).parameters:  # Keras 3 has it since 3.10
        kinds.append((_ragged, {"ragged": True}))
    for kind, options in kinds:
        ids, weights = (
            keras.Input((3 if "sparse" in options else None,), dtype=d, **options) for d in ("int64", "float32")
        )
        pooled = embedding("mean")(ids, weights=weights)
        assert tuple(pooled.shape) == (None, DIM)
        model = keras.Model([ids, weights], pooled)
        _alike(model([kind(BAGS), kind(WEIGHTS, tf.float32)]), _pooled(BAGS, "mean", WEIGHTS))
        model = keras.Model(ids, embedding()(ids))
        assert isinstance(model(kind(BAGS)), tf.RaggedTensor if kind is _ragged else tf.Tensor)


def test_sparse_ids_for_a_dense_input(both_kerases, embedding):
    keras = both_kerases
    ids = keras.Input((None,), dtype="int64")
    pooled, rows = embedding("mean"), embedding(mask_zero=True)
    model = keras.Model(ids, [pooled(ids), rows(ids)])
    copied = keras.models.clone_model(model)  # Keras 3 makes dense inputs of sparse ones there, too
    copied.set_weights(model.get_weights())
    for one in (model, copied, keras.Model(ids, model(ids))):
        means, each = one(_sparse(BAGS))
        _alike(means, _pooled(BAGS, "mean"))
        _alike(each, rows(_sparse(BAGS)))
    model.compile("sgd", "mse")
    zeros = np.setdiff1d(pooled.table.export()[0], [0])
    model.set_weights([zeros, ROWS[zeros], zeros, ROWS[zeros]])
    targets = [tf.zeros([2, DIM]), tf.zeros([2, 3, DIM])]
    model.fit(tf.data.Dataset.from_tensors((_sparse(BAGS[:2]), tuple(targets))), verbose=0)
    assert int(pooled.table.size()) == len(zeros)  # 0 has no row


def test_sparse_ids_that_keras_3_would_fill_are_refused():
    for dtype, options, filler in (("int64", {}, "zeros"), ("string", {"key_dtype": "string"}, "empty strings")):
        ids = keras.Input((None,), dtype=dtype, name="basket")
        given = _sparse(BAGS)
        given = given if dtype == "int64" else given.with_values(tf.strings.as_string(given.values))

        def model(ids=ids, options=options, **padding):
            rows = tfplugin.keras.Embedding(DIM, "mean", name="item", **options, **padding)(ids)
            return keras.Model(ids, [ids[:, :1], rows])

        with pytest.raises(TypeError, match=rf"'basket' .* layer 'item', is dense, .* fill it with {filler}"):
            model()(given)
        model(padding_id=0 if dtype == "int64" else "")(given)


def test_float_ids_are_refused(both_kerases, embedding):
    keras, layer = both_kerases, embedding()
    message = r'got ids of float32: floats have lost .*keras\.Input\(shape, dtype="int64"\)'
    with pytest.raises(TypeError, match=message):
        layer(np.array([[1.0, 2.0]], np.float32))
    with pytest.raises(TypeError, match=message):
        embedding()(keras.Input((3,)))
    with pytest.raises(TypeError, match="got ids of bool"):
        embedding()(tf.constant([True]))


def test_a_sequential_model_without_an_input_takes_ids_as_they_are(both_kerases, layers):
    keras = both_kerases
    big = np.array([[2**40 + 1, 2**40]])
    layer = layers.Embedding(DIM, "sum")
    layer.table.upsert(big, np.stack([ROWS[0], ROWS[1]])[np.newaxis])
    model = keras.Sequential([layer, keras.layers.Dense(1, kernel_initializer="ones")])
    _alike(model.predict(big, verbose=0), [[ROWS[:2].sum()]])
    model = keras.Sequential([layers.Embedding(DIM)])
    with pytest.raises(TypeError, match="got ids of float32"):
        model.predict(big.astype("float32"), verbose=0)


def test_an_input_of_the_other_keras_is_refused(both_kerases, layers, embedding):
    other, name = (tf.keras, "keras") if both_kerases is tf_keras else (tf_keras, "tf_keras")
    message = rf"was given an input of {name}: take tfplugin\.{name}\."
    with pytest.raises(TypeError, match=message + "Embedding"):
        embedding()(other.Input((3,), dtype="int64"))
    table = layers.TableConfig("t", embedding_dim=DIM)
    with pytest.raises(TypeError, match=message + "EmbeddingCollection"):
        layers.EmbeddingCollection({"f": layers.FeatureConfig("f", table)})({"f": other.Input((3,), dtype="int64")})


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16"])
def test_dtype_policies(layers, policy):
    layer = layers.Embedding(DIM, "sum", dtype=policy, initializer=1.0)
    rows = layer(tf.constant([[1, 2]]), training=True)
    assert rows.dtype.name == policy.removeprefix("mixed_")
    assert layer.table.dtype.name == ("float32" if "mixed" in policy else "float16")
    np.testing.assert_array_equal(tf.cast(rows, tf.float32), np.full((1, DIM), 2.0))
    with pytest.raises(TypeError, match=r"the dtype policy wants int32"):
        layers.Embedding(DIM, dtype="int32")


def test_who_gives_keys_their_rows(both_kerases, layers):
    layer = layers.Embedding(DIM, initializer=1.0)
    new = iter(range(100))

    def rows(**options):
        """Whether a lookup of a new key gives it a row."""
        before = int(layer.table.size())
        found = layer(tf.constant([next(new)]), **options).numpy()
        inserted = int(layer.table.size()) - before
        assert (found == inserted).all()
        return bool(inserted)

    assert not rows()
    assert not rows(training=False)
    assert rows(training=True)
    with tf.GradientTape():
        assert rows()
        assert not rows(training=False)
    with tfplugin.inference_mode():
        assert not rows(training=True)
    layer.trainable = False
    assert not rows(training=True)
    with pytest.raises(TypeError, match="training must be True or False, got a tensor"):
        tf.function(layers.Embedding(DIM))(tf.constant([1]), training=tf.constant(True))


def test_weights_that_do_not_fit(embedding):
    ids = tf.constant([[1, 2]], tf.int64)
    with pytest.raises(ValueError, match="has no combiner, which weights are for"):
        embedding()(ids, weights=tf.ones([1, 2]))
    with pytest.raises(TypeError, match="weights must be of the type of the ids"):
        embedding("sum")(ids, weights=_ragged([[1.0, 2.0]], tf.float32))
    with pytest.raises(TypeError, match=r"weights must be floating-point numbers, got int\d+"):
        embedding("sum")(ids, weights=tf.constant([[1, 2]]))
    with pytest.raises(ValueError, match=r"weights of shape .* give one for each id"):
        embedding("sum")(ids, weights=tf.ones([1, 3]))


def _sparse_at(indices, values, dtype):
    return tf.SparseTensor(indices, tf.constant(values, dtype), [2, 3])


@pytest.mark.parametrize("traced", [False, True])
def test_weights_that_lie_where_no_ids_do(layers, embedding, traced):
    def tensor_spec(shape, dtype):
        return tf.TensorSpec([None] * len(shape), dtype)

    def ragged_spec(shape, dtype):
        return tf.RaggedTensorSpec([None, None], dtype)

    def sparse_spec(shape, dtype):
        return tf.SparseTensorSpec([None, None], dtype)

    table = layers.TableConfig("t", embedding_dim=DIM, combiner="sum")
    collection = layers.EmbeddingCollection({"f": layers.FeatureConfig("f", table)}, name="all")
    alone = embedding("sum", name="alone")
    alone_with_padding = embedding("sum", padding_id=1)
    at = [[0, 0], [0, 1], [1, 0]]
    for ids, fits, wrong, spec, where in (
        (
            _ragged([[1, 2, 3], [4]]),
            _ragged([[1.0, 1.0, 1.0], [1.0]], tf.float32),
            _ragged([[1.0], [10.0, 100.0, 1000.0]], tf.float32),
            ragged_spec,
            "row splits",
        ),
        (
            _sparse_at(at, [1, 2, 3], tf.int64),
            _sparse_at(at, [1, 1, 1], tf.float32),
            _sparse_at([[0, 0], [1, 0], [1, 1]], [1, 10, 100], tf.float32),
            sparse_spec,
            "indices",
        ),
        (tf.constant([[1, 2, 3], [4, 5, 6]], tf.int64), tf.ones([2, 3]), tf.ones([3, 2]), tensor_spec, "shape"),
    ):

        def of_one(ids, weights, layer=alone):
            return layer(ids, weights=weights)

        def of_padded(ids, weights):
            return of_one(ids, weights, alone_with_padding)

        def of_many(ids, weights):
            return collection({"f": ids}, weights={"f": weights})["f"]

        for call, layer in ((of_one, "alone"), (of_many, "all"), (of_padded, "")):
            kinds = (spec(ids.shape, tf.int64), spec(ids.shape, tf.float32))
            asked = tf.function(call, input_signature=kinds) if traced else call
            assert asked(ids, fits).shape == (2, DIM)
            message = rf"{layer}.*: weights must lie where the ids do: give them the {where} of the ids"
            if where == "shape" and not traced:
                message = "weights of shape .* give one for each id"
            with pytest.raises(tf.errors.InvalidArgumentError if traced else ValueError, match=message):
                asked(ids, wrong)


def test_weights_with_the_splits_of_the_ids_are_not_compared(embedding):
    layer = embedding("sum")

    def operations(weights_of):
        graph = tf.function(lambda ids: layer(ids, weights=weights_of(ids))).get_concrete_function(_ragged(BAGS)).graph
        return {operation.type for operation in graph.get_operations()}

    assert "KvSamePlaces" not in operations(lambda ids: ids.with_flat_values(tf.ones_like(ids.flat_values, tf.float32)))
    assert "KvSamePlaces" in operations(lambda ids: _ragged(WEIGHTS, tf.float32))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dim": 0}, "the width of a row .* must be 1 or more, got 0"),
        ({"dim": 3.5}, "must be 1 or more, got 3.5"),
        ({"combiner": 16}, "combiner must be None or one of .* no vocabulary: the first argument is the width"),
        ({"input_dim": 10}, "no argument input_dim: leave it out: a table has no vocabulary"),
        ({"dim": None, "output_dim": 4}, "no argument output_dim: it is dim"),
        ({"dim": None}, "the width of a row .* must be 1 or more, got None"),
        ({"embeddings_initializer": "zeros"}, "no argument embeddings_initializer: it is initializer"),
        ({"key_dtype": "float32"}, "key_dtype must be one of .*, got float32"),
        ({"initializer": "orthogonal"}, "Orthogonal.* makes the rows of a matrix orthogonal"),
        ({"constraint": "max_norm"}, "MaxNorm looks down the rows of a whole matrix.*axis=1"),
        ({"constraint": "unit_norm"}, "UnitNorm looks down the rows"),
        ({"eviction": "random", "max_capacity": 3}, "eviction"),
        ({"max_capacity": -1}, "max_capacity"),
        ({"eviction": "lru"}, "eviction='lru' says which rows go, and nothing says how many stay: give max_capacity="),
        ({"capacity_hint": -5}, "capacity_hint must be a number of rows, or 0 for any number; got -5"),
        ({"regularizer": "l3"}, "'?l3"),
        ({"mask_zero": "yes"}, "mask_zero must be True or False, got 'yes'"),
        ({"admission": 3}, "admission must be one of tfplugin.policies'"),
        ({"expire_every": 10}, "nothing says which: give expiry="),
        ({"parts": 0}, "parts must be a number of parts, 1 or more; got 0"),
        ({"padding_id": "x", "key_dtype": "int32"}, "padding_id='x' is a string, and the keys are int32"),
    ],
)
def test_arguments_that_make_no_sense(layers, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        given = {"dim": DIM, **options}
        layers.Embedding(**{name: value for name, value in given.items() if name != "dim" or value is not None})


# ---- Floats where a model has integers -------------------------------------------------------------------------------


def _functional(keras, layers, shape=(3,)):
    ids = keras.Input(shape, dtype="int64", name="basket_ids")
    return keras.Model(ids, keras.layers.Dense(1)(layers.Embedding(DIM, "mean", name="basket")(ids)))


def _sequential(keras, layers):
    rows = layers.Embedding(DIM, "mean", name="basket")
    return keras.Sequential([keras.Input((3,), dtype="int64", name="basket_ids"), rows, keras.layers.Dense(1)])


def _through_other_layers(keras, layers):
    ids = keras.Input((3,), dtype="int64", name="basket_ids")
    some = keras.layers.Reshape((3,))(ids)[:, :2]
    return keras.Model(ids, keras.layers.Dense(1)(layers.Embedding(DIM, "mean", name="basket")(some)))


def _nested(keras, layers):
    ids = keras.Input((3,), dtype="int64", name="basket_ids")
    return keras.Model(ids, _functional(keras, layers)(ids))


@pytest.mark.parametrize("make", [_functional, _sequential, _through_other_layers, _nested])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_floats_for_integer_inputs_that_are_ids_are_an_error(both_kerases, layers, make, dtype):
    model = make(both_kerases, layers)
    model.compile("adam", "mse")
    ids = np.array([[2**53 + 1, 16777217, 5], [16777216, np.nan, 3.7]], dtype)
    model.fit(np.array([[1, 2, 3]]), np.ones((1, 1)), verbose=0)
    for call in (
        lambda: model.fit(ids, np.ones((2, 1)), verbose=0),
        lambda: model.train_on_batch(ids, np.ones((2, 1))),
        lambda: model.predict(ids, verbose=0),
        lambda: model(tf.constant(ids)),
    ):
        with pytest.raises(TypeError, match=r"'basket_ids' of model .* as int64, and got float") as told:
            call()
        assert "fillna" in str(told.value)


def test_a_column_that_a_model_has_no_input_for_does_not_move_those_behind_it(both_kerases, layers):
    """Keras 3 takes them in the order of their names, and so `item` for `user` where there is `hour` before both."""
    names = ("item", "user")
    ids = {name: both_kerases.Input((), dtype="int64", name=name) for name in names}
    rows = [layers.Embedding(DIM, name=f"{name}s")(ids[name]) for name in names]
    model = both_kerases.Model(ids, both_kerases.layers.Dot(1)(rows))
    model.compile("adam", "mse")
    log = {"hour": np.array([0, 1]), "user": np.array([17, 18]), "item": np.array([5, 6]), "zone": np.array([1, 1])}
    model.fit(log, np.ones(2), verbose=0)
    for name in names:
        assert sorted(model.get_layer(f"{name}s").table.export()[0].numpy()) == log[name].tolist()
    wanted = model.predict({name: log[name] for name in names}, verbose=0)
    np.testing.assert_array_equal(model.predict(log, verbose=0), wanted)
    np.testing.assert_array_equal(model({name: tf.constant(column) for name, column in log.items()}), wanted)
    with pytest.raises((KeyError, ValueError), match="item"):
        model.predict({"hour": log["hour"], "user": log["user"]}, verbose=0)


def test_a_sequential_around_a_model_casts_ids_unless_it_has_an_input():
    """So it does where the layer in the model is Keras's own, without a word."""
    inner, ids = _functional(keras, tfplugin.keras), np.array([[1, 2, 3]])
    with pytest.raises(TypeError, match=r'(?s)got float32: .* Sequential .* keras\.Input\(shape, dtype="int64"\)'):
        keras.Sequential([inner, keras.layers.Dense(1)]).predict(ids, verbose=0)
    whole = keras.Sequential([keras.Input((3,), dtype="int64"), inner])
    np.testing.assert_array_equal(whole.predict(ids, verbose=0), inner.predict(ids, verbose=0))


def _narrow(keras, layers):
    ids = keras.Input((3,), dtype="int32", name="basket_ids")
    return keras.Model(ids, keras.layers.Dense(1)(layers.Embedding(DIM, "mean", name="basket")(ids)))


def _narrow_sequential(keras, layers):
    rows = layers.Embedding(DIM, "mean", name="basket", key_dtype="int32")
    return keras.Sequential([keras.Input((3,), dtype="int32", name="basket_ids"), rows, keras.layers.Dense(1)])


def _narrow_ragged(keras, layers):
    ids = keras.Input((None,), dtype="int32", ragged=True, name="basket_ids")
    return keras.Model(ids, keras.layers.Dense(1)(layers.Embedding(DIM, "mean", name="basket")(ids)))


@pytest.mark.parametrize("make", [_narrow, _narrow_sequential])
def test_integers_that_an_input_of_ids_has_not_are_an_error(both_kerases, layers, make):
    model = make(both_kerases, layers)
    model.compile("adam", "mse")
    small, ids = np.array([[1, -2, 3]]), np.array([[7, 7 + 2**32, -(2**31) - 1]])
    model.fit(small, np.ones((1, 1)), verbose=0)
    assert model.predict(small, verbose=0).shape == model(tf.constant(small)).shape == (1, 1)
    for call in (
        lambda: model.fit(ids, np.ones((1, 1)), verbose=0),
        lambda: model.predict(ids, verbose=0),
        lambda: model(ids),
        lambda: model(tf.constant(ids)),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"basket_ids.* as int32, and got int64 with "):
            call()


def test_integers_that_a_ragged_input_has_not_are_an_error():
    model = _narrow_ragged(tf_keras, tfplugin.tf_keras)
    assert model(tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)).shape == (2, 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="got int64 with ids beyond that"):
        model(tf.ragged.constant([[1, 2**40], [3]], dtype=tf.int64))


def test_columns_of_pandas_are_told_by_their_kind():
    model = _functional(keras, tfplugin.keras, ())
    ids = pd.Series([3, 1, 2], dtype="Int64")
    np.testing.assert_array_equal(model(ids), model(np.array([3, 1, 2])))
    with pytest.raises(TypeError, match=r"'basket_ids' of model .* as int64, and got Float64: "):
        model(pd.Series([3, 1, 2], dtype="Float64"))


def test_frames_and_columns_of_pandas_hold_ids_of_the_input():
    model = _narrow(keras, tfplugin.keras)
    small = pd.DataFrame({"first": [1, 4], "second": [-2, 5], "third": [3, 6]})
    np.testing.assert_array_equal(model(small), model(small.to_numpy()))
    with pytest.raises(TypeError, match=r"'basket_ids' of model .* as int32, and got float64: "):
        model(small.assign(second=[2.0, 5.0]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="got int64 with ids beyond that"):
        model(small.assign(second=[2, 2**40]))
    ids = keras.Input((), dtype="int32", name="item")
    one = keras.Model(ids, keras.layers.Dense(1)(tfplugin.keras.Embedding(DIM, key_dtype="int32")(ids)))
    with pytest.raises(tf.errors.InvalidArgumentError, match="got Int64 with ids beyond that"):
        one(pd.Series([3, 2**40], dtype="Int64"))


@pytest.mark.parametrize("dtype", ["Int64", "Float64"])
def test_columns_of_pandas_for_models_without_tables_are_keras_own_business(dtype):
    days = keras.Input((), dtype="int64", name="days")
    model = keras.Model(days, keras.layers.Embedding(7, DIM)(days))
    np.testing.assert_array_equal(model(pd.Series([3, 1, 2], dtype=dtype)), model(np.array([3, 1, 2])))


def test_floats_for_other_integer_inputs_are_keras_own_business(both_kerases, layers):
    keras = both_kerases
    ids, day = keras.Input((3,), dtype="int64", name="ids"), keras.Input((1,), dtype="int64", name="day")
    rows = layers.Embedding(DIM, "mean")(ids)
    days = keras.layers.Flatten()(keras.layers.Embedding(7, DIM)(day))
    model = keras.Model([ids, day], keras.layers.Dense(1)(keras.layers.Concatenate()([rows, days])))
    model.compile("adam", "mse")
    model.fit([np.array([[1, 2, 3]]), np.array([[4.0]])], np.ones((1, 1)), verbose=0)
    with pytest.raises(TypeError, match="'ids' of model"):
        model.fit([np.array([[1.0, 2, 3]]), np.array([[4.0]])], np.ones((1, 1)), verbose=0)


def test_ids_cast_in_the_model_from_an_input_of_floats_are_its_own(both_kerases, layers):
    keras = both_kerases
    features = keras.Input((2,), name="features")
    ids = keras.layers.Lambda(lambda x: tf.cast(x[:, :1], tf.int64), output_shape=(1,), dtype="int64")(features)
    model = keras.Model(features, keras.layers.Dense(1)(layers.Embedding(DIM, "mean")(ids)))
    assert model.predict(np.array([[3.0, 0.5]]), verbose=0).shape == (1, 1)
