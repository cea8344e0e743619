"""Variables with string keys: against a dictionary, trained, restricted, saved."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfplugin import dynamic_embedding as de
from tfplugin import string_hash

v1 = tf.compat.v1
KEYS = np.array(["a", "", "user:7", "ключ", "b" * 300])
ROWS = np.arange(10, dtype=np.float32).reshape(5, 2)


def by_key(exported):
    keys, rows = (np.asarray(x) for x in exported)
    assert len(set(keys.tolist())) == len(keys)
    return {key.decode(): row.tolist() for key, row in zip(keys, rows, strict=True)}


EXPECTED = dict(zip(KEYS.tolist(), ROWS.tolist(), strict=True))


def test_reads_and_writes_follow_a_dictionary(mode, name, devices):
    v = de.Variable(tf.string, dim=2, name=name, devices=devices, initializer=0.5)
    mode(lambda k, r: v.upsert(k, r), KEYS, ROWS)
    found, exists = mode(lambda k: v.lookup(k, return_exists=True), np.array([["a", "c"], ["ключ", ""]]))
    assert found.tolist() == [[[0, 1], [0.5, 0.5]], [[6, 7], [2, 3]]]
    assert exists.tolist() == [[True, False], [True, True]]
    assert by_key(mode(lambda: v.export())) == EXPECTED
    owner = np.asarray(mode(lambda k: tf.strings.to_hash_bucket_fast(k, len(devices)), KEYS))
    sizes = [int(mode(lambda i=i: v.size(i))) for i in range(len(devices))]
    assert sizes == np.bincount(owner, minlength=len(devices)).tolist()
    mode(lambda k: v.remove(k), np.array(["a", "never"]))
    mode(
        lambda *args: v.accum(*args),
        np.array(["a", "user:7", "c", "d"]),
        np.zeros((4, 2), np.float32),
        np.ones((4, 2), np.float32),
        np.array([False, True, True, False]),
    )
    now = {**EXPECTED, "a": [1, 1], "user:7": [5, 6], "d": [1, 1]}
    assert by_key(mode(lambda: v.export())) == now
    mode(lambda: v.clear())
    assert int(mode(lambda: v.size())) == 0 and by_key(mode(lambda: v.export())) == {}


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64, tf.int8, tf.int32, tf.int64, tf.bool])
def test_dtypes_of_values(name, dtype):
    v = de.Variable(tf.string, dtype, dim=1, name=name)
    v.upsert(["a", "b"], tf.cast([[1], [0]], dtype))
    assert tf.cast(v.lookup(["b", "a", "c"]), tf.float32).numpy().tolist() == [[0], [1], [0]]


def test_other_keys_are_a_type_error(name, devices):
    v = de.Variable(tf.string, dim=1, name=name, devices=devices)
    for keys in (tf.constant([1]), [1], np.array([1.5])):
        with pytest.raises(TypeError, match=name):
            v.lookup(keys)
        with pytest.raises(TypeError, match=name):
            v.upsert(keys, [[1.0]])


def test_hashes_go_to_the_table_that_the_default_partitioner_says():
    keys = tf.constant([f"key {i}" for i in range(200)])
    for n in range(1, 41):
        buckets = tf.strings.to_hash_bucket_fast(keys, n)
        assert (tf.math.floormod(string_hash.string_keys(keys), n).numpy() == buckets.numpy()).all()


def test_two_keys_of_one_hash_are_an_error(name, monkeypatch):
    monkeypatch.setattr(string_hash, "HASHES", 2)
    v = de.Variable(tf.string, dim=1, name=name)
    with pytest.raises(tf.errors.InvalidArgumentError, match="share a hash"):
        for i in range(3):
            v.upsert([f"key {i}"], [[1.0]])


@pytest.mark.parametrize("how", ["single", "sparse"])
@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_training_follows_the_dense_twin(name, devices, how, function):
    dense = tf.Variable(ROWS)
    v = de.Variable(tf.string, dim=2, name=name, devices=devices)
    v.upsert(KEYS, ROWS)
    stock, wrapped = (tf.keras.optimizers.Adam(0.1) for _ in range(2))
    wrapped = de.DynamicEmbeddingOptimizer(wrapped)
    shadow = v.get_trainable_by_name("x" if how == "single" else "x/embedding_lookup")
    where = np.array([[0, 1], [2, 2], [3, 4]])

    def loss_of(found):
        return tf.reduce_sum(tf.sin(found))

    def step():
        with tf.GradientTape() as tape:
            found = tf.gather(dense, where)
            loss = loss_of(found if how == "single" else tf.reduce_sum(found, 1))
        stock.apply_gradients([(tf.convert_to_tensor(tape.gradient(loss, dense)), dense)])
        with tf.GradientTape() as tape:
            ids = tf.gather(tf.constant(KEYS), where)
            if how == "single":
                found = de.embedding_lookup(v, ids, name="x")
            else:
                ids = tf.RaggedTensor.from_tensor(ids).to_sparse()
                found = de.embedding_lookup_sparse(v, ids, None, combiner="sum", name="x")
            loss = loss_of(found)
        wrapped.apply_gradients([(tape.gradient(loss, shadow), shadow)])

    run = tf.function(step) if function else step
    for _ in range(4):
        run()
    np.testing.assert_allclose(v.lookup(KEYS).numpy(), dense.numpy(), rtol=1e-5, atol=1e-6)


def test_training_in_a_graph_inserts_restricts_and_saves(tmp_path, devices):
    def model(devices):
        v = de.Variable(tf.string, dim=2, name="scope/emb", devices=devices, restrict_policy=de.FrequencyRestrictPolicy)
        ids = v1.placeholder(tf.string, [None])
        optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1))
        step = optimizer.minimize(tf.reduce_sum(de.embedding_lookup(v, ids)))
        return v, ids, step, optimizer

    with tf.Graph().as_default(), v1.Session() as session:
        v, ids, step, optimizer = model(devices)
        session.run(v1.global_variables_initializer())
        for batch in (["a", "b"], ["b", "c", "b"], ["c", "b", "e"]):
            session.run(step, {ids: batch})
        counts = by_key(session.run(v.restrict_policy.status.export()))
        assert counts == {"a": [1], "b": [3], "c": [2], "e": [1]}
        m = v.get_slot_variables(optimizer)[0]
        assert set(by_key(session.run(m.export()))) == set(counts)
        assert session.run(m.lookup(["b"]))[0, 0] > 0
        saved = by_key(session.run(v.export()))
        path = v1.train.Saver().save(session, str(tmp_path / "m"))
        session.run(v.restrict(0, trigger=1))
        assert by_key(session.run(v.export())) == {}
    with tf.Graph().as_default(), v1.Session() as session:
        v, *_ = model(["/CPU:0"] * 2)
        session.run(v1.global_variables_initializer())
        session.run(v.upsert(["z"], [[1.0, 1.0]]))
        v1.train.Saver().restore(session, path)
        assert by_key(session.run(v.export())) == saved
        assert by_key(session.run(v.restrict_policy.status.export())) == counts


def test_restrict_keeps_those_updated_most(name):
    v = de.Variable(tf.string, dim=1, name=name, restrict_policy=de.FrequencyRestrictPolicy)
    v.upsert(["a", "b", "c"], [[1.0], [2.0], [3.0]])
    for keys in (["a", "c"], ["c"]):
        v.restrict_policy.apply_update(tf.constant(keys))
    v.restrict(2)
    assert by_key(v.export()) == {"a": [1], "c": [3]}


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 2), (1, 3)])
def test_checkpoints_keep_the_strings(tmp_path, before, after):
    v, w = (de.Variable(tf.string, dim=2, name="emb", devices=["/CPU:0"] * n) for n in (before, after))
    v.upsert(KEYS, ROWS)
    path = tf.train.Checkpoint(v=v).save(str(tmp_path / "c"))
    tf.train.Checkpoint(v=w).restore(path).assert_existing_objects_matched()
    assert by_key(w.export()) == EXPECTED
    with tf.Graph().as_default(), v1.Session() as session:
        v, w = (de.Variable(tf.string, dim=2, name="emb", devices=["/CPU:0"] * n) for n in (before, after))
        session.run(v.upsert(KEYS, ROWS))
        path = v1.train.Saver({"emb": v}).save(session, str(tmp_path / "m"))
        v1.train.Saver({"emb": w}).restore(session, path)
        assert by_key(session.run(w.export())) == EXPECTED
        other = de.Variable(tf.string, dim=2, name="other")
        session.run(other.upsert(["x"], [[1.0, 2.0]]))
        saver = v1.train.Saver([v, other])
        path = saver.save(session, str(tmp_path / "m"))
        session.run([v.clear(), other.clear()])
        saver.restore(session, path)
        assert by_key(session.run(v.export())) == EXPECTED
        assert by_key(session.run(other.export())) == {"x": [1, 2]}
