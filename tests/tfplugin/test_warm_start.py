"""`tfplugin.warm_start`: rows of another model, of any engine, whose missing keys start from the initializer."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import kvtools
import tfplugin
from tfplugin import dynamic_embedding as de
from tfplugin import sok

v1 = tf.compat.v1
CONSTANT = tf.constant_initializer(0.25)


@pytest.fixture
def other(tmp_path, make_sample, table_tensors, save):
    """A checkpoint of our layout, and its rows by key."""
    sample = make_sample(name="scope/emb", rows=50, dim=4, slots=("Adam.m", "Adam.v"))
    return save(tmp_path / "other", table_tensors(sample, parts=2)), sample


def _rows(table, keys):
    with tfplugin.inference_mode():
        return table.sparse_read(keys, missing="initial").numpy()


@pytest.mark.parametrize("dialect", ["tfplugin", "npz", "safetensors", "hdf5", "parquet"])
def test_rows_of_every_dialect(tmp_path, other, partitioner, dialect):
    path, sample = other
    if dialect != "tfplugin":
        out = tmp_path / f"out.{dialect}"
        kvtools.write_tables(list(kvtools.open(path).tables.values()), out, dialect)
        path = out
    table = tf.get_kv_variable("user", 4, initializer=CONSTANT, partitioner=partitioner)
    table.upsert([12345, 0], np.ones([2, 4], np.float32))
    (name,) = kvtools.open(path).tables
    assert tfplugin.warm_start(path, {table: name}) == {"user": 50}
    np.testing.assert_array_equal(_rows(table, sample.keys), sample.values)
    np.testing.assert_array_equal(_rows(table, [12345, 777]), [[1.0] * 4, [0.25] * 4])
    freqs, versions = table.stamps(sample.keys)
    assert (abs(versions.numpy() - time.time()) < 600).all()  # touched now
    if dialect == "tfplugin":
        np.testing.assert_array_equal(freqs, sample.freqs)
    assert not any(part.slot_names() for part in table._kv_parts)


def test_slots_come_along_where_they_are_asked_for(other, rows_of, caplog):
    path, sample = other
    table = tf.get_kv_variable("user", 4)
    tfplugin.warm_start(path, table, {"user": "scope/emb"}, slots=True)
    assert table.slot_names() == {"Adam.m", "Adam.v"}
    np.testing.assert_array_equal(rows_of(table, sample.keys, "Adam.m"), sample.slots["Adam.m"])
    keras_table = tf.get_kv_variable("keras", 4)
    names = {"Adam.momentum": "Adam.m", "Adam.velocity": "Adam.v"}
    tfplugin.warm_start(path, {keras_table: "scope/emb"}, slots=names)
    # The optimizer takes them up.
    optimizer = tfplugin.OptimizerWrapper(keras.optimizers.Adam(0.0))
    optimizer.apply_gradients([(tf.IndexedSlices(tf.zeros([1, 4]), sample.keys[:1]), keras_table)])
    assert keras_table.slot_names() == set(names)
    np.testing.assert_array_equal(rows_of(keras_table, sample.keys[1:], "Adam.velocity"), sample.slots["Adam.v"][1:])
    # Slots of other names go, and not in silence.
    other_table = tf.get_kv_variable("others", 4)
    tfplugin.warm_start(path, {other_table: "scope/emb"}, slots=True)
    optimizer = tfplugin.OptimizerWrapper(keras.optimizers.Adam(0.0))
    caplog.clear()
    optimizer.apply_gradients([(tf.IndexedSlices(tf.zeros([1, 4]), sample.keys[:1]), other_table)])
    assert other_table.slot_names() == set(names)
    said = "slots Adam.m, Adam.v, which Adam does not know and drops; its own (Adam.momentum, Adam.velocity) start"
    assert said in caplog.text
    with pytest.raises(ValueError, match=r"no slot 'Adam.n'; the nearest: 'Adam"):
        tfplugin.warm_start(path, {keras_table: "scope/emb"}, slots={"x": "Adam.n"})


@pytest.mark.parametrize("value", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("key", ["int64", "int32", "uint64"])
def test_other_types_are_an_error_or_cast_on_request(tmp_path, make_sample, table_tensors, save, key, value):
    sample = make_sample(name="emb", rows=9, dim=4, slots=())
    sample.keys[:] = np.arange(9)
    path = save(tmp_path / "other", table_tensors(sample))
    table = tf.get_kv_variable("emb", 4, key_dtype=key, value_dtype=value)
    if (key, value) != ("int64", "float32"):
        with pytest.raises(ValueError, match=r"tfplugin.warm_start\(..., cast=True\)"):
            tfplugin.warm_start(path, table)
        assert int(table.size()) == 0
    assert tfplugin.warm_start(path, table, cast=True) == {"emb": 9}
    expected = tf.cast(sample.values, value)
    keys, rows = table.export()
    assert keys.dtype == key and rows.dtype == value
    np.testing.assert_array_equal(tf.cast(tf.gather(rows, np.argsort(keys)), "float64"), tf.cast(expected, "float64"))


def test_what_a_type_does_not_hold_is_an_error_and_leaves_an_empty_table(tmp_path, make_sample, table_tensors, save):
    sample = make_sample(name="emb", rows=50, dim=4, slots=())
    sample.values[7, 1] = 1e30
    path = save(tmp_path / "large", table_tensors(sample))
    half = tf.get_kv_variable("emb", 4, value_dtype="float16")
    with pytest.raises(ValueError, match="values have numbers that float16 does not hold"):
        tfplugin.warm_start(path, half, cast=True)
    assert int(half.size()) == 0
    narrow = tf.get_kv_variable("emb", 4, key_dtype="int32")
    with pytest.raises(ValueError, match=r"has key -?9223372036854775808, which int32 does not hold"):
        tfplugin.warm_start(path, narrow, cast=True)


def test_other_dims_and_names_are_errors_that_say_what_there_is(other):
    path, _ = other
    with pytest.raises(ValueError, match=r"rows of dim 4, key-value variable 'user' has dim 8: build it"):
        tfplugin.warm_start(path, {tf.get_kv_variable("user", 8): "scope/emb"})
    with pytest.raises(ValueError, match=r"no table 'emb'; the nearest: 'scope/emb'. There are \['scope/emb'\]"):
        tfplugin.warm_start(path, tf.get_kv_variable("emb", 4))


def test_a_damaged_checkpoint_leaves_an_empty_table(other):
    path, _ = other
    file = next(path.parent.glob(f"{path.name}.data-*"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    table = tf.get_kv_variable("user", 4)
    with pytest.raises(kvtools.errors.KvtoolsError):
        tfplugin.warm_start(path, {table: "scope/emb"}, slots=True)
    assert int(table.size()) == 0


@pytest.mark.parametrize("parts", [None, 3])
def test_in_a_graph_running_the_counts_fills_the_tables(other, parts):
    path, sample = other
    with tf.Graph().as_default(), v1.Session() as session:
        table = tf.get_kv_variable("user", 4, partitioner=parts and v1.fixed_size_partitioner(parts))
        started = tfplugin.warm_start(path, {table: "scope/emb"}, slots=True)
        with tfplugin.inference_mode():
            rows = tf.nn.embedding_lookup(table, sample.keys)
        session.run(v1.global_variables_initializer())
        for _ in range(2):
            assert session.run(started) == {"user": 50}
            np.testing.assert_array_equal(session.run(rows), sample.values)
            session.run(table.clear())


def test_of_16_bits_in_a_graph(tmp_path, make_sample, table_tensors, save):
    sample = make_sample(name="emb", rows=9, dim=4, value_dtype="bfloat16", slots=("Adam.m",))
    path = save(tmp_path / "other", table_tensors(sample))
    with tf.Graph().as_default(), v1.Session() as session:
        table = tf.get_kv_variable("emb", 4, value_dtype=tf.bfloat16)
        started = tfplugin.warm_start(path, table, slots=True)
        session.run(v1.global_variables_initializer())
        session.run(started)
        with tfplugin.inference_mode():
            rows = session.run(tf.nn.embedding_lookup(table, sample.keys))
        np.testing.assert_array_equal(rows.astype(np.float32), sample.values.astype(np.float32))


def test_a_scaffold_starts_warm_where_there_is_no_checkpoint(tmp_path, other):
    path, _ = other
    for expected in (50, 51):
        with tf.Graph().as_default():
            table = tf.get_kv_variable("user", 4)
            started = tfplugin.warm_start(path, {table: "scope/emb"})
            insert, size = tf.nn.embedding_lookup(table, [31415926]), table.size()
            count = v1.train.get_or_create_global_step().assign_add(1)
            scaffold = v1.train.Scaffold(init_fn=lambda _, session, started=started: session.run(started))
            with v1.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path / "run"), scaffold=scaffold, save_checkpoint_steps=1
            ) as session:
                assert session.run(size) == expected
                session.run([insert, count])


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_the_tables_of_a_keras_model_and_of_a_layer(other, library):
    path, sample = other

    class Embedding(library.layers.Layer):
        def __init__(self, name):
            super().__init__(name=name)
            self.table = tf.get_kv_variable(name, 4)

        def call(self, ids):
            return tf.nn.embedding_lookup(self.table, ids)

    user, item = Embedding("user"), Embedding("item")
    inputs = library.Input([], dtype="int64")
    model = library.Model(inputs, user(inputs) + item(inputs))
    assert tfplugin.warm_start(path, model, {"user": "scope/emb", "item": None}) == {"user": 50}
    np.testing.assert_array_equal(_rows(user.table, sample.keys), sample.values)
    assert tfplugin.warm_start(path, item, {"item": "scope/emb"}) == {"item": 50}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("parts", [None, 3])
def test_the_rows_that_are_there_are_told_and_those_that_are_not_are_logged(other, caplog, graph, parts):
    path, sample = other
    padding = int(sample.keys[7])

    def started_with(**limits):
        """What warm_start told, the size of the table, and the log."""
        caplog.clear()
        partitioner = parts and v1.fixed_size_partitioner(parts)
        with tf.Graph().as_default() if graph else contextlib.nullcontext():
            table = tf.get_kv_variable("user", 4, partitioner=partitioner, **limits)
            told, size = tfplugin.warm_start(path, {table: "scope/emb"}), None
            if not graph:
                return told["user"], int(table.size()), caplog.text
            with v1.Session() as session:
                session.run(v1.global_variables_initializer())
                told = session.run(told)
                size = session.run(table.size())
            return told["user"], size, caplog.text

    assert started_with() == (50, 50, "")
    assert started_with(max_capacity=900) == (50, 50, "")
    told, size, log = started_with(padding_key=padding)
    assert told == size == 49
    assert f"49 of its 50 rows are in key-value variable 'user': 1 has its padding_key, {padding}." in log
    told, size, log = started_with(max_capacity=12, padding_key=padding)
    assert told == size == 12
    assert f"12 of its 50 rows are in key-value variable 'user': 1 has its padding_key, {padding}, 37 went by" in log
    assert "max_capacity=12." in log


DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize(
    ("path", "dim", "expected", "columns", "slots"),
    [
        ("tfplus/model.ckpt-1200", 8, "tfplus/expected.npz", ("keys", "values"), {"GroupAdam": "slot"}),
        ("deeprec/model.ckpt-1200", 16, "deeprec/expected.npz", ("keys", "values"), {}),
        ("sok", 4, "sok-expected.npz", ("keys", "values"), {"Adam.m": "m", "Adam.v": "v"}),
        ("tfra/v1_adam", 8, "tfra/expected_v1_adam.npz", ("keys", "values"), {}),
        ("tfra/object", 8, "tfra/expected_tf2.npz", ("user_keys", "user_values"), {}),
        ("tfra/filesystem", 8, "tfra/expected_tf2.npz", ("fs_keys", "fs_values"), {}),
        ("tfra/savedmodel", 4, "tfra/expected_tf2.npz", ("serve_keys", "serve_values"), {}),
    ],
)
def test_files_that_the_peers_have_written(path, dim, expected, columns, slots, partitioner, tmp_path):
    wanted = np.load(DATA / expected)
    keys, values = (wanted[column] for column in columns)
    name = "user_emb" if path == "tfra/object" else next(iter(kvtools.open(DATA / path).tables))
    table = tf.get_kv_variable("here", dim, initializer=CONSTANT, partitioner=partitioner)
    assert tfplugin.warm_start(DATA / path, {table: name}, slots={slot: slot for slot in slots}) == {"here": len(keys)}
    np.testing.assert_array_equal(_rows(table, keys), values)
    (saved,) = kvtools.open(tf.train.Checkpoint(table=table).save(str(tmp_path / "c"))).tables.values()
    came = saved.to_numpy()
    assert set(came.slots) == set(slots)
    for slot, column in slots.items():
        np.testing.assert_array_equal(came.slots[slot][np.argsort(came.keys)], wanted[column][np.argsort(keys)])
    absent = int(keys.max()) + 1
    np.testing.assert_array_equal(_rows(table, [absent]), [[0.25] * dim])


def test_of_the_folder_of_a_chain_the_increments_come_too(tmp_path):
    trained = tf.get_kv_variable("user", 4)
    manager = tfplugin.CheckpointManager(
        tf.train.Checkpoint(user=trained), tmp_path, delta_every=0.0, full_every=3600.0
    )
    trained.upsert([1, 2], np.zeros([2, 4], np.float32))
    manager.save()
    trained.upsert([2, 3], np.ones([2, 4], np.float32))
    trained.remove([1])
    manager.save()
    (name,) = kvtools.open(tmp_path).tables
    for path in (tmp_path, tmp_path / "ckpt"):
        table = tf.get_kv_variable("user", 4)
        assert tfplugin.warm_start(path, {table: name}) == {"user": 2}
        np.testing.assert_array_equal(_rows(table, [2, 3]), np.ones([2, 4]))


# ---- TensorFlow's own init_from_checkpoint and warm_start ------------------------------------------------------------


@pytest.fixture
def trained(tmp_path):
    """A checkpoint of two tables, one in parts, and a dense variable, with slots of Adagrad; and what they hold."""
    ids = np.arange(1, 8)
    with tf.Graph().as_default(), v1.Session() as session:
        with v1.variable_scope("old"):
            halves = v1.fixed_size_partitioner(2)
            tables = tf.get_kv_variable("ads", 4, partitioner=halves), tf.get_kv_variable("users", 4)
            dense = v1.get_variable("w", initializer=2.0)
        rows = [tf.nn.embedding_lookup(table, ids) for table in tables]
        loss = tf.add_n([tf.reduce_sum(one**2) for one in rows]) * dense
        step = v1.train.AdagradOptimizer(0.1).minimize(loss)
        session.run(v1.global_variables_initializer())
        for _ in range(2):
            session.run(step)
        path = v1.train.Saver().save(session, str(tmp_path / "old" / "model.ckpt"))
        return path, ids, *session.run([*rows, dense])


MAPS = {
    "scope": lambda m: {"old/": "new/"},
    "names": lambda m: {"old/ads": "new/ads", "old/users": "new/users", "old/w": "new/w"},
    "variables": lambda m: [("old/ads", m["ads"]), ("old/users", m["users"]), ("old/w", m["w"])],
    "parts": lambda m: {"old/ads": list(m["ads"]._kv_parts), "old/users": m["users"], "old/w": m["w"]},
}


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("parts", [None, 3])
def test_init_from_checkpoint_has_rows_where_tables_are_initialized(trained, kind, parts):
    path, ids, ads, users, w = trained
    with tf.Graph().as_default() as graph, v1.Session() as session:
        with v1.variable_scope("new"):
            partitioner = None if parts is None else v1.fixed_size_partitioner(parts)
            model = {
                "ads": tf.get_kv_variable("ads", 4, partitioner=partitioner),
                "users": tf.get_kv_variable("users", 4),
                "w": v1.get_variable("w", initializer=0.0),
            }
        v1.train.init_from_checkpoint(str(Path(path).parent), MAPS[kind](model))  # the folder, as a path does
        looked_up = [tf.nn.embedding_lookup(model[name], ids) for name in ("ads", "users")]
        step = v1.train.AdagradOptimizer(0.1).minimize(sum(map(tf.reduce_sum, looked_up)))
        sizes = [model["ads"].size(), model["users"].size()]
        start = v1.global_variables_initializer()
        graph.finalize()
        for _ in range(2):  # begins anew each time
            session.run(start)
            assert session.run(sizes) == [7, 7]
            found = session.run([*looked_up, model["w"]])
            for one, expected in zip(found, [ads, users, w], strict=True):
                np.testing.assert_array_equal(one, expected)
            session.run(step)
        # Slots begin anew, as those of dense variables do.
        np.testing.assert_allclose(session.run(looked_up[1]), users - 0.1 / np.sqrt(1.1), rtol=1e-6)


@pytest.mark.parametrize("wanted", [".*", ["old/ads", "old/users", "old/w"]])
def test_warm_start_of_tensorflow(trained, wanted):
    path, ids, ads, users, w = trained
    with tf.Graph().as_default(), v1.Session() as session, v1.variable_scope("old"):
        tables = tf.get_kv_variable("ads", 4, partitioner=v1.fixed_size_partitioner(2)), tf.get_kv_variable("users", 4)
        dense = v1.get_variable("w", initializer=0.0)
        v1.train.warm_start(path, wanted)
        session.run(v1.global_variables_initializer())
        found = session.run([*(tf.nn.embedding_lookup(table, ids) for table in tables), dense])
        for one, expected in zip(found, [ads, users, w], strict=True):
            np.testing.assert_array_equal(one, expected)


def test_init_from_checkpoint_knows_tables_of_sok(trained):
    path, ids, ads, *_ = trained
    for assignment in ({"old/ads": "ads"}, {"old/": "/"}):
        with tf.Graph().as_default(), v1.Session() as session:
            table = sok.DynamicVariable(dimension=4, initializer="ones", name="ads")
            v1.train.init_from_checkpoint(path, assignment)
            rows = table.sparse_read(ids)
            session.run(v1.global_variables_initializer())
            np.testing.assert_array_equal(session.run(rows), ads)


def test_init_from_checkpoint_says_that_tables_of_tfra_get_no_rows(trained, caplog):
    """No initializer fills them: by name they are refused, and where a scope has them the log says so."""
    path, ids, ads, _, w = trained

    def model():
        with v1.variable_scope("new"):
            dense = v1.get_variable("w", initializer=0.0)
            return de.get_variable("ads", dim=4), de.Variable(dim=4, name="others"), dense

    with tf.Graph().as_default(), v1.Session() as session:
        table, _, dense = model()
        v1.train.init_from_checkpoint(path, {"old/": "new/"})
        (told,) = [record.getMessage() for record in caplog.records if "init_from_checkpoint" in record.getMessage()]
        assert told == (
            "init_from_checkpoint: dynamic embedding variable 'new/ads' has no initializer that could give it rows of "
            f"checkpoint '{path}': run tfplugin.dynamic_embedding.warm_start('{path}', ...) in the session."
        )
        fill = de.warm_start(path, [table], {"new/ads": "old/ads"})  # as it says
        session.run(v1.global_variables_initializer())
        session.run(fill)
        np.testing.assert_array_equal(session.run(table.lookup(tf.constant(ids, tf.int64))), ads)
        assert session.run(dense) == w
    for here in (lambda table: "new/ads", lambda table: table, lambda table: [table]):
        refused = pytest.raises(ValueError, match=r"variable 'new/ads' has no initializer .* leave it out of the map")
        with tf.Graph().as_default(), refused:
            v1.train.init_from_checkpoint(path, {"old/ads": here(model()[0])})


def test_init_from_checkpoint_in_eager_mode_replaces_rows(trained):
    path, ids, ads, _, _ = trained
    table = tf.get_kv_variable("t", 4)
    table.upsert([99], np.ones([1, 4], np.float32))
    v1.train.init_from_checkpoint(path, {"old/ads": table})
    np.testing.assert_array_equal(_rows(table, ids), ads)
    assert int(table.size()) == 7


def test_init_from_checkpoint_names_what_is_not_there(trained):
    path, *_ = trained
    with tf.Graph().as_default():
        table = tf.get_kv_variable("user", 4)
        with pytest.raises(
            ValueError, match=r"init_from_checkpoint: 'user' .*no table 'old/user'; the nearest: 'old/users'"
        ):
            v1.train.init_from_checkpoint(path, {"old/": "/"})
        wide = tf.get_kv_variable("wide", 8)
        with pytest.raises(ValueError, match="dim 4, key-value variable 'wide' has dim 8"):
            v1.train.init_from_checkpoint(path, {"old/users": wide})
        del table


def test_a_dense_variable_in_place_of_a_table_is_named_with_what_loads_it(tmp_path):
    """The checkpoint of a model whose embeddings were dense."""
    before = tf.Module()
    before.emb, before.wide = tf.Variable(tf.random.normal([10, 4])), tf.Variable(tf.zeros([3, 5]))
    path = tf.train.Checkpoint(net=before).save(str(tmp_path / "dense"))
    table = tf.get_kv_variable("emb", embedding_dim=4)
    name = "net/emb/.ATTRIBUTES/VARIABLE_VALUE"
    with pytest.raises(ValueError, match=re.escape(f"There are []. Dense variables with rows of 4: '{name}' [10, 4].")):
        tfplugin.warm_start(path, table, {"emb": "net/emb"})
    table.upsert(range(10), tf.train.load_variable(path, name))
    assert (_rows(table, range(10)) == before.emb.numpy()).all()
    with pytest.raises(ValueError, match=r"There are \[\]\. To leave it out: names=\{'other': None\}\.$"):
        tfplugin.warm_start(path, tf.get_kv_variable("other", embedding_dim=7))


def test_init_from_checkpoint_names_the_dense_variable(tmp_path):
    with tf.Graph().as_default(), v1.Session() as session:
        v1.get_variable("emb", [10, 4])
        session.run(v1.global_variables_initializer())
        path = v1.train.Saver().save(session, str(tmp_path / "dense"))
    with tf.Graph().as_default():
        tf.get_kv_variable("emb", embedding_dim=4)
        with pytest.raises(ValueError, match=r"Dense variables with rows of 4: 'emb' \[10, 4\]"):
            v1.train.init_from_checkpoint(path, {"/": "/"})
