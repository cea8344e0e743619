"""tf.train.Checkpoint and SavedModel: object-based round trips of key-value variables."""

import gc
import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
from tfplugin import dynamic_embedding, sok


def fixed(parts):
    return None if parts is None else tf.compat.v1.fixed_size_partitioner(parts)


class Model(tf.Module):
    """Two key-value variables and a dense one under a Keras optimizer."""

    def __init__(self, parts=3):
        super().__init__()
        self.user = tf.get_kv_variable("user", 4)
        self.item = tf.get_kv_variable("item", 4, partitioner=fixed(parts))
        self.w = tf.Variable(tf.ones([4, 1]))
        self.optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))

    def forward(self, ids):
        return (tf.nn.embedding_lookup(self.user, ids) + tf.nn.embedding_lookup(self.item, ids)) @ self.w

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def serve(self, ids):
        return {"score": self.forward(ids)}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def train(self, ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.forward(ids) - 1.0) ** 2)
        parts = [self.item] if isinstance(self.item, tfplugin.KvVariable) else list(self.item)
        variables = [self.user, *parts, self.w]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss


def train(model, seed, steps=5):
    random = np.random.default_rng(seed)
    return [float(model.train(tf.constant(random.integers(-50, 50, 32)))) for _ in range(steps)]


@pytest.mark.parametrize("parts", [3, 5, 1, None])
def test_checkpoint_restores_into_any_number_of_parts_and_trains_on_exactly(tmp_path, parts):
    model = Model(3)
    train(model, 0)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "ckpt"))
    went_on = train(model, 1)

    other = Model(parts)
    status = tf.train.Checkpoint(model=other).restore(path)
    np.testing.assert_allclose(train(other, 1), went_on, rtol=1e-6)
    status.assert_consumed()
    assert int(other.item.size()) == int(model.item.size())


def test_checkpoint_restores_into_a_model_that_has_trained(tmp_path):
    model = Model(3)
    train(model, 0)
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "ckpt"))
    went_on = train(model, 1)
    tf.train.Checkpoint(model=model).restore(path)
    np.testing.assert_allclose(train(model, 1), went_on, rtol=1e-6)


def test_checkpoint_manager_keeps_and_restores_the_latest(tmp_path):
    model = Model()
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), str(tmp_path), max_to_keep=2)
    for seed in range(4):
        train(model, seed, 1)
        manager.save()
    assert len(manager.checkpoints) == 2
    size = int(model.user.size())
    other = Model()
    tf.train.Checkpoint(model=other).restore(tf.train.latest_checkpoint(str(tmp_path)))
    assert int(other.user.size()) == size


def test_saved_model_round_trips_rows_slots_and_parts(tmp_path):
    model = Model(3)
    train(model, 0)
    ids = tf.constant([1, -2, 3, 123456789], tf.int64)
    with tfplugin.inference_mode():
        expected = model.forward(ids).numpy()
    tf.saved_model.save(model, str(tmp_path / "m"), signatures={"serving_default": model.serve})

    loaded = tf.saved_model.load(str(tmp_path / "m"))
    assert isinstance(loaded.user, tfplugin.KvVariable) and isinstance(loaded.item, tfplugin.PartitionedKvVariable)
    size = int(model.user.size())
    assert int(loaded.user.size()) == size and int(loaded.item.size()) == size
    np.testing.assert_array_equal(loaded.signatures["serving_default"](ids)["score"], expected)
    assert int(loaded.user.size()) == size, "a signature inserted a key"
    assert loaded.user.slots().numpy() == model.user.slots().numpy()
    for slot in ("Adam.momentum", "Adam.velocity"):
        for mine, theirs in zip(model.item, loaded.item, strict=True):
            keys, rows = mine.export(slot)
            their_keys, their_rows = theirs.export(slot)
            order, their_order = np.argsort(keys), np.argsort(their_keys)
            np.testing.assert_array_equal(tf.gather(rows, order), tf.gather(their_rows, their_order))


class _Pair(tf.Module):
    """A table in two parts beside a dense variable."""

    def __init__(self) -> None:
        two = tf.compat.v1.fixed_size_partitioner(2)
        self.table = tf.get_kv_variable("pair", embedding_dim=2, initializer=1.0, partitioner=two)
        self.dense = tf.Variable(tf.ones([4, 2]))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def rows(self, ids):
        return tf.nn.embedding_lookup(self.table, ids) ** 2 + tf.nn.embedding_lookup(self.dense, ids) ** 2


def test_a_function_of_a_loaded_model_trains_its_tables(tmp_path):
    pair = _Pair()
    pair.rows(tf.constant([1, 2, 3], tf.int64))
    tf.saved_model.save(pair, str(tmp_path / "m"))

    loaded = tf.saved_model.load(str(tmp_path / "m"))
    optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))
    ids = tf.constant([1, 2, 2], tf.int64)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loaded.rows(ids))
        variables = [*loaded.table, loaded.dense]
        optimizer.apply_gradients(list(zip(tape.gradient(loss, variables), variables, strict=True)))

    step()
    np.testing.assert_allclose(loaded.table.sparse_read([1, 2, 3]), [[0.8, 0.8], [0.6, 0.6], [1.0, 1.0]], rtol=1e-6)
    np.testing.assert_allclose(loaded.dense[1:], [[0.8, 0.8], [0.6, 0.6], [1.0, 1.0]], rtol=1e-6)


def test_two_loads_of_one_saved_model_do_not_share_rows(tmp_path):
    model = Model(None)
    train(model, 0)
    tf.saved_model.save(model, str(tmp_path / "m"))
    first, second = tf.saved_model.load(str(tmp_path / "m")), tf.saved_model.load(str(tmp_path / "m"))
    first.user.clear()
    assert int(first.user.size()) == 0 and int(second.user.size()) == int(model.user.size())


def test_saved_model_serves_from_a_session_and_inserts_nothing(tmp_path):
    model = Model(3)
    train(model, 0)
    ids = [1, -2, 3, 123456789]
    with tfplugin.inference_mode():
        expected = model.forward(tf.constant(ids, tf.int64)).numpy()
    # A signature that was traced for training before the save, too, must not grow the table in a server.
    traced = model.serve.get_concrete_function()
    tf.saved_model.save(model, str(tmp_path / "m"), signatures={"serving_default": traced})
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / "m"))
        signature = meta.signature_def["serving_default"]
        output, feed = signature.outputs["score"].name, signature.inputs["ids"].name
        for _ in range(2):
            np.testing.assert_allclose(session.run(output, {feed: ids}), expected, rtol=1e-6)


def test_saved_model_loads_in_a_process_of_its_own(tmp_path):
    model = Model(3)
    train(model, 0)
    ids = [1, -2, 3]
    with tfplugin.inference_mode():
        expected = model.forward(tf.constant(ids, tf.int64)).numpy()
    tf.saved_model.save(model, str(tmp_path / "m"), signatures={"serving_default": model.serve})
    np.save(tmp_path / "expected.npy", expected)
    script = f"""
    import numpy as np, tensorflow as tf, tfplugin
    loaded = tf.saved_model.load({str(tmp_path / "m")!r})
    got = loaded.signatures["serving_default"](tf.constant({ids}, tf.int64))["score"]
    np.testing.assert_allclose(got, np.load({str(tmp_path / "expected.npy")!r}), rtol=1e-6)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, check=True)


@pytest.mark.parametrize("parts", [None, 3])
def test_a_checkpoint_is_restored_in_a_graph_and_saved_there(tmp_path, parts):
    ids = tf.range(20, dtype=tf.int64)
    table = tf.get_kv_variable("graph", 2, partitioner=fixed(parts))
    for part in [table] if parts is None else table:
        own = ids if parts is None else tf.boolean_mask(ids, ids % 3 == part.part)
        part.upsert(own, tf.cast(tf.stack([own, own + 1], 1), tf.float32))
    path = tf.train.Checkpoint(table=table, w=tf.Variable(7.0)).save(str(tmp_path / "eager"))
    expected = tf.nn.embedding_lookup(table, ids).numpy()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        again = tf.get_kv_variable("graph", 2, partitioner=fixed(parts))
        w = tf.compat.v1.get_variable("w", [], use_resource=True)
        checkpoint = tf.compat.v1.train.Checkpoint(table=again, w=w)
        for _ in range(2):
            checkpoint.restore(path).initialize_or_restore(session)
        found = tf.nn.embedding_lookup(again, tf.range(20, dtype=tf.int64))
        assert session.run(w) == 7.0
        np.testing.assert_array_equal(session.run(found), expected)
        path = checkpoint.save(str(tmp_path / "graph"), session=session)
        tfplugin.uninstall()
        try:
            with pytest.raises(RuntimeError, match=r"in a graph needs .* call tfplugin.install\(\) before"):
                checkpoint.restore(path)
        finally:
            tfplugin.install()
    third = tf.get_kv_variable("graph", 2, partitioner=fixed(parts))
    tf.train.Checkpoint(table=third).restore(path)
    np.testing.assert_array_equal(tf.nn.embedding_lookup(third, ids), expected)


def test_a_save_that_meets_removals_has_the_rows_that_are_there_each_whole(tmp_path):
    # Two chunks of a save, so that rows go between one and the next.
    rows, dim = 120_000, 128
    table = tf.get_kv_variable("removed_from", dim, initializer=0.0)
    optimizer = tf.compat.v1.train.MomentumOptimizer(0.0, 0.9)
    for first in range(0, rows, 20_000):
        keys = tf.range(first, first + 20_000, dtype=tf.int64)
        numbers = tf.tile(tf.cast(keys[:, tf.newaxis] + 1, tf.float32), [1, dim])
        table.upsert(keys, numbers)
        optimizer.apply_gradients([(tf.IndexedSlices(numbers, keys), table)])
    (slot,) = table.slot_names()
    saved = threading.Event()

    def remove():
        for first in range(rows - 100, 0, -100):
            if saved.is_set():
                return
            with tf.device("CPU:0"):  # the keys: a thread has no device of its own
                table.remove(tf.range(first, first + 100, dtype=tf.int64))

    remover = threading.Thread(target=remove)
    before = int(table.size())
    remover.start()
    path = tf.train.Checkpoint(table=table).write(str(tmp_path / "ckpt"))
    saved.set()
    remover.join()
    assert int(table.size()) < before

    reader = tf.train.load_checkpoint(path)
    (prefix,) = (
        name.removesuffix("-kvmeta") for name in reader.get_variable_to_shape_map() if name.endswith("-kvmeta")
    )
    column = {name: reader.get_tensor(f"{prefix}-{name}") for name in ("keys", "values", f"slot-{slot}")}
    assert int(table.size()) <= len(column["keys"]) <= before
    assert len(np.unique(column["keys"])) == len(column["keys"])
    expected = np.repeat(column["keys"][:, np.newaxis] + np.float32(1), dim, 1)
    np.testing.assert_array_equal(column["values"], expected)
    np.testing.assert_array_equal(column[f"slot-{slot}"], expected)

    restored = tf.get_kv_variable("restored_from_it", dim, initializer=0.0)
    tf.train.Checkpoint(table=restored).read(path)
    assert int(restored.size()) == len(column["keys"])
    assert all((stamp.numpy() > 0).all() for stamp in restored.stamps(column["keys"]))


def test_parts_alone_are_not_saved_and_say_so(tmp_path):
    table = tf.get_kv_variable("item", 4, partitioner=fixed(3))
    table.upsert(range(5), np.ones([5, 4]))
    with pytest.raises(ValueError, match=r"a part of key-value variable 'item', and parts are saved by the whole"):
        tf.train.Checkpoint(parts=list(table)).save(str(tmp_path / "alone"))
    path = tf.train.Checkpoint(parts=list(table), table=table).save(str(tmp_path / "both"))
    other = tf.get_kv_variable("item", 4, partitioner=fixed(2))
    tf.train.Checkpoint(parts=list(other), table=other).restore(path).assert_existing_objects_matched()
    assert (other.sparse_read(range(5)) == 1).numpy().all()


def test_rows_of_another_type_say_how_they_can_be_had(tmp_path):
    saved = tfplugin.get_kv_variable("narrow", 2, value_dtype=tf.float16)
    saved.upsert([1, 2], [[1, 2], [3, 4]])
    path = tf.train.Checkpoint(table=saved).save(str(tmp_path / "ckpt"))
    table = tfplugin.get_kv_variable("wide", 2)
    told = r"is half, .*'wide' has float rows: build it with value_dtype=half, .*kvtools cast.*cast=True"
    with pytest.raises(tf.errors.InvalidArgumentError, match=told):
        tf.train.Checkpoint(table=table).restore(path)
    assert tfplugin.warm_start(path, table, {"wide": "narrow"}, cast=True) == {"wide": 2}
    np.testing.assert_array_equal(table.sparse_read([1, 2], training=False), [[1, 2], [3, 4]])


@pytest.mark.parametrize("parts", [None, 3])
@pytest.mark.parametrize("saved", ["de.Variable", "tf.Variable"])
def test_a_table_where_another_kind_of_object_was_saved_is_said_not_to_be_restored(tmp_path, saved, parts):
    if saved == "de.Variable":
        other = dynamic_embedding.Variable(dim=2, name="before")
        other.upsert([1, 2], [[1.0, 2.0], [3.0, 4.0]])
    else:
        other = tf.Variable([[1.0, 2.0], [3.0, 4.0]])
    path = tf.train.Checkpoint(emb=other).save(str(tmp_path / "c"))
    table = tf.get_kv_variable("after", 2, partitioner=fixed(parts))
    status = tf.train.Checkpoint(emb=table).restore(path)
    with pytest.raises(AssertionError, match="KvVariable 'after"):
        status.assert_existing_objects_matched()
    assert int(table.size()) == 0
    if saved == "de.Variable":  # the way out
        assert tfplugin.restore_tables(path, {table: "emb/table"}) == {"after": 2}
        assert table.sparse_read([2]).numpy().tolist() == [[3.0, 4.0]]


def _saved_kinds():
    halves = tf.compat.v1.fixed_size_partitioner(2)
    kept = {
        "whole": tfplugin.get_kv_variable("whole", 2),
        "halves": tfplugin.get_kv_variable("p", 2, partitioner=halves),
    }
    return kept | {
        "dynamic": dynamic_embedding.Variable(dim=2, name="dynamic"),
        "of_sok": sok.DynamicVariable(dimension=2, name="s"),
    }


@pytest.mark.parametrize("left", ["whole", "halves", "dynamic", "of_sok"])
def test_tables_of_a_checkpoint_that_nothing_takes_are_told_as_dense_variables_are(tmp_path, caplog, left):
    kinds = _saved_kinds()
    path = tf.train.Checkpoint(**kinds).save(str(tmp_path / "c"))

    def told(objects, expect_partial=False):
        """What the log says once what was restored is gone."""
        caplog.clear()
        checkpoint = tf.train.Checkpoint(**objects)
        status = checkpoint.restore(path)
        if expect_partial:
            status.expect_partial()
        del status, checkpoint
        gc.collect()
        return [record.getMessage() for record in caplog.records]

    others = {name: table for name, table in kinds.items() if name != left}
    with pytest.raises(
        AssertionError, match=rf"Unresolved object in checkpoint \(root\)\.{left}: a key-value variable"
    ):
        tf.train.Checkpoint(**others).restore(path).assert_consumed()
    gc.collect()
    (message,) = told(others)
    assert message.startswith(
        f"Rows in checkpoint could not be found in the restored object: (root).{left}: a key-value"
    )
    assert "tfplugin.restore_tables(path, {variable: old name})" in message
    assert told(others, expect_partial=True) == []
    # One that is made later takes its rows, as ever.
    assert told(kinds) == []
    late = tf.train.Checkpoint(**others)
    status = late.restore(path)
    setattr(late, left, kinds[left])
    status.assert_consumed()


def test_a_table_with_another_name_gets_its_rows_as_the_warning_says(tmp_path, caplog):
    table = tfplugin.get_kv_variable("old", 2)
    table.upsert([1, 2], np.ones([2, 2], np.float32))
    path = tf.train.Checkpoint(old=table).save(str(tmp_path / "c"))
    new = tfplugin.get_kv_variable("new", 2)
    tf.train.Checkpoint(new=new).restore(path)
    gc.collect()
    assert "(root).old: a key-value variable" in caplog.text
    assert tfplugin.restore_tables(path, {new: "old"}) == {"new": 2}
