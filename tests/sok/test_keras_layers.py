"""Variables of sok in layers of Keras 3 and tf_keras: listed, told apart, trained, never left untrained in silence."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin
import tfplugin.sok as sok

IDS = tf.ragged.constant([[1, 2], [2]], dtype=tf.int64)


@pytest.fixture(params=[tf.keras, tf_keras], ids=["Keras 3", "tf_keras"])
def keras(request):
    return request.param


def layer_of(keras, **tables):
    """A layer that looks IDS up in what it holds, and sums the rows."""

    class Holder(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            for name, held in tables.items():
                setattr(self, name, held)
            self.dense = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, inputs):
            held = [v for value in tables.values() for v in (value if isinstance(value, list) else [value])]
            return inputs + self.dense(tf.add_n(sok.lookup_sparse(held, [IDS] * len(held))))

    return Holder()


def model_of(keras, **tables):
    return keras.Sequential([layer_of(keras, **tables)])


def test_tables_of_layers_are_listed_and_told_from_others(keras):
    table, in_list, static = (
        sok.DynamicVariable(2, "ones"),
        sok.DynamicVariable(2, "ones"),
        sok.Variable(np.ones([4, 2], np.float32)),
    )
    frozen = sok.DynamicVariable(2, "ones", trainable=False)
    model = model_of(keras, table=table, tables=[in_list], static=static, frozen=frozen)
    model(tf.zeros([2, 1]))
    for listed in (model.trainable_variables, model.layers[0].trainable_variables):
        ours, others = sok.filter_variables(listed)
        assert {id(v) for v in ours} == {id(table), id(in_list), id(static)} and len(ours) == 3
        assert len(others) == 2
    assert {id(v) for v in sok.filter_variables(model)[0]} == {id(table), id(in_list), id(static)}
    model.layers[0].trainable = False
    assert sok.filter_variables(model.trainable_variables) == ([], [])


def test_a_table_is_listed_however_deep_in_containers_it_is(keras):
    table, layer = sok.DynamicVariable(2), keras.layers.Dense(1)
    layer.tables = {"a": [{"b": [{"c": [[[table]]]}]}]}
    assert [v for v in layer.trainable_variables if v is table] == [table]
    in_itself = [[table]]
    in_itself.append(in_itself)
    object.__setattr__(layer, "tables", in_itself)
    assert [v for v in layer.trainable_variables if v is table] == [table]
    assert any(child is table for child in layer._trackable_children().values()) or keras is tf_keras


def test_what_is_listed_trains_as_dense_variables_do(keras):
    table, static = sok.DynamicVariable(2, "ones"), sok.Variable(np.ones([4, 2], np.float32))
    layer = layer_of(keras, table=table, static=static)
    layer(tf.zeros([2, 1]))
    kernel = tf.Variable(layer.dense.get_weights()[0])
    bias = tf.Variable([0.0])
    whole = [tf.Variable(tf.ones([4, 2])) for _ in range(2)]
    optimizer, plain = sok.OptimizerWrapper(keras.optimizers.SGD(0.1)), tf_keras.optimizers.SGD(0.1)
    for _ in range(2):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.zeros([2, 1])) ** 2)
        variables = layer.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        with tf.GradientTape() as tape:
            rows = [tf.stack([(one[1] + one[2]) / 2, one[2]]) for one in whole]
            loss = tf.reduce_sum((tf.add_n(rows) @ kernel + bias) ** 2)
        variables = [*whole, kernel, bias]
        plain.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
    np.testing.assert_allclose(table.sparse_read([1, 2]), whole[0][1:3], 1e-6)
    np.testing.assert_allclose(static[1:3], whole[1][1:3], 1e-6)


def test_a_table_in_a_module_is_found():
    module = tf.Module()
    module.tables, module.bias = {"a": [sok.DynamicVariable(2)]}, tf.Variable(1.0)
    ours, others = sok.filter_variables(module)
    assert ours[0] is module.tables["a"][0] and others[0] is module.bias and len(ours) == len(others) == 1


def test_an_optimizer_of_keras_that_meets_a_table_says_what_to_do(keras):
    table = sok.DynamicVariable(2, "ones", name="alone")
    kinds = [keras.optimizers.SGD, keras.optimizers.Adam]
    if keras is tf_keras:
        kinds += [tf_keras.optimizers.legacy.SGD, tf_keras.optimizers.legacy.Adam]
    for kind in kinds:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1]))
        with pytest.raises(
            (TypeError, AttributeError), match=r"'alone.*know dense.*: sok\.OptimizerWrapper\(optimizer\)"
        ):
            kind(0.1).apply_gradients([(tape.gradient(loss, table), table)])
    assert table.values.numpy().tolist() == [[1, 1]]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_fit_does_not_leave_a_table_untrained_in_silence(keras, optimizer):
    model = model_of(keras, table=sok.DynamicVariable(2, "ones", name="in_fit"))
    model.compile(optimizer, "mse", run_eagerly=True)
    with pytest.raises((ValueError, TypeError), match=r"'in_fit.*sok\.OptimizerWrapper\(optimizer\)"):
        model.fit(np.zeros([2, 1]), np.zeros([2, 1]), batch_size=2, verbose=0)


def test_fit_of_keras_3_does_not_leave_a_static_variable_untrained_in_silence():
    static = sok.Variable(np.ones([4, 2], np.float32), name="static_in_fit")
    model = model_of(tf.keras, static=static)
    model.compile("adam", "mse", run_eagerly=True)
    with pytest.raises(ValueError, match=r"static_in_fit.*sok\.OptimizerWrapper"):
        model.fit(np.zeros([2, 1]), np.zeros([2, 1]), batch_size=2, verbose=0)


def test_fit_runs_a_train_step_of_the_model(keras):
    table, static = sok.DynamicVariable(2, "ones"), sok.Variable(np.ones([4, 2], np.float32))
    optimizer = sok.OptimizerWrapper(keras.optimizers.Adam(0.1))

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.holder = layer_of(keras, table=table, static=static)

        def call(self, inputs):
            return self.holder(inputs)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(self(data[0], training=True) ** 2)
            variables = self.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss}

    model = Model()
    model.compile("adam", "mse", run_eagerly=True)
    model.fit(np.zeros([2, 1], np.float32), np.zeros([2, 1]), batch_size=2, verbose=0)
    assert (table.values.numpy() < 1).all() and (static[1:3].numpy() < 1).all()


@pytest.mark.parametrize("in_list", [False, True], ids=["attribute", "list"])
def test_files_of_keras_3_that_would_lack_rows_of_a_static_variable_are_refused(in_list, tmp_path):
    static = sok.Variable(np.ones([4, 2], np.float32), name="static_in_file")
    model = model_of(tf.keras, static=[static] if in_list else static)
    model(tf.zeros([2, 1]))
    says = r"would lack rows of sok\.Variable 'static_in_file'.*sok\.Checkpoint\(model=model\).*tf\.train\.Checkpoint"
    for write, name in (
        (model.save, "a.keras"),
        (model.save_weights, "a.weights.h5"),
        (model.save, "a.h5"),
    ):
        with pytest.raises(ValueError, match=says):
            write(str(tmp_path / name))
    assert not list(tmp_path.iterdir())


def test_files_of_tf_keras_have_a_static_variable_on_one_rank_and_would_lack_rows_on_two(tmp_path, monkeypatch):
    def made(value):
        static = sok.Variable(np.full([4, 2], value, np.float32), name="static_in_file")
        model = model_of(tf_keras, static=static)
        model(tf.zeros([2, 1]))
        return model, static

    (model, static), (other, restored) = made(3.0), made(1.0)
    model.save_weights(str(tmp_path / "a.weights.h5"))
    other.load_weights(str(tmp_path / "a.weights.h5"))
    assert restored.numpy().tolist() == static.numpy().tolist()
    monkeypatch.setattr(static, "num_gpus", 2)
    for name in ("b.weights.h5", "b.h5", "b.keras"):
        with pytest.raises(ValueError, match=r"would lack rows of sok\.Variable 'static_in_file'"):
            model.save(str(tmp_path / name)) if "weights" not in name else model.save_weights(str(tmp_path / name))


def test_early_stopping_of_keras_3_does_not_leave_a_static_variable_behind():
    static = sok.Variable(np.ones([4, 2], np.float32), name="static_stopped")
    stop = tf.keras.callbacks.EarlyStopping(monitor="loss", restore_best_weights=True)
    model = model_of(tf.keras, static=static)
    model(tf.zeros([2, 1]))
    stop.set_model(model)
    stop.on_train_begin()
    with pytest.raises(ValueError, match=r"sok\.Variable 'static_stopped'.*sok\.Checkpoint"):
        stop.on_epoch_end(0, {"loss": 1.0})
    stop.restore_best_weights = False
    stop.on_epoch_end(0, {"loss": 1.0})


@pytest.mark.parametrize("make", [tf.train.Checkpoint, sok.Checkpoint], ids=["tf.train", "sok"])
@pytest.mark.parametrize("in_list", [False, True], ids=["attribute", "list"])
def test_checkpoints_have_the_static_variables_of_layers(keras, make, in_list, tmp_path):
    def made(value):
        static = sok.Variable(np.full([4, 2], value, np.float32), name="static_saved")
        model = model_of(keras, static=[static] if in_list else static)
        model(tf.zeros([2, 1]))
        return static, model

    path = make(model=made(3.0)[1]).save(str(tmp_path / "a"))
    static, model = made(1.0)
    make(model=model).restore(path)
    assert static.numpy().tolist() == [[3.0, 3.0]] * 4


def test_uninstalling_leaves_keras_as_it_was(keras):
    table = sok.DynamicVariable(2)
    layer = layer_of(keras, table=table)
    tfplugin.uninstall()
    try:
        assert not any(v is table for v in layer.trainable_variables)
    finally:
        tfplugin.install()
    assert any(v is table for v in layer.trainable_variables)


@pytest.mark.parametrize("keras", [tf.keras, tf_keras], ids=["Keras 3", "tf_keras"])
def test_on_one_rank_files_and_weights_have_a_dynamic_variable_of_a_layer(keras, tmp_path):
    def made(name):
        class Rows(keras.layers.Layer):
            def __init__(self):
                super().__init__()
                self.table = sok.DynamicVariable(dimension=4, initializer="0.5", name=name)

            def call(self, ids):
                return tf.reduce_sum(self.table.sparse_read(ids, training=False), axis=1)

        model = keras.Sequential([keras.Input((3,), dtype="int64"), Rows()])
        return model, model.layers[-1].table

    (model, table), (other, loaded) = made("dynamic_in_file"), made("dynamic_in_file")
    table.upsert([1, 2], np.ones([2, 4], np.float32))
    assert model.count_params() == 8
    model.summary(print_fn=lambda *args, **kwargs: None)
    model.save_weights(str(tmp_path / "a.weights.h5"))
    other.load_weights(str(tmp_path / "a.weights.h5"))
    assert loaded.values.numpy().tolist() == [[1] * 4] * 2
    loaded.upsert([3], np.zeros([1, 4], np.float32))
    other.set_weights(model.get_weights())
    assert sorted(loaded.indices.numpy().tolist()) == [1, 2]
