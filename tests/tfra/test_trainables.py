"""What stands for the rows of a lookup: its name, and what a program reads and writes through it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from tfplugin import dynamic_embedding as de

v1 = tf.compat.v1


def sparse_ids():
    return tf.SparseTensor([[0, 0], [0, 1], [2, 0]], tf.constant([3, 5, 3], tf.int64), [3, 2])


INNER = {
    "embedding_lookup_sparse": "x/embedding_lookup",
    "safe_embedding_lookup_sparse": "x/embedding_lookup_sparse/embedding_lookup",
}


def pooled(v, how, ids):
    return (
        de.embedding_lookup_sparse(v, ids, None, name="x")
        if how == "embedding_lookup_sparse"
        else (de.safe_embedding_lookup_sparse(v, ids, name="x"))
    )


# ---- Names ----


@pytest.mark.parametrize("how", INNER)
@pytest.mark.parametrize("ragged", [False, True], ids=["sparse", "ragged"])
@pytest.mark.parametrize("function", [False, True], ids=["eager", "function"])
def test_the_trainable_of_a_pooled_lookup_is_known_by_the_inner_one(name, devices, how, ragged, function):
    v = de.Variable(dim=2, name=name, devices=devices)
    ids = tf.RaggedTensor.from_sparse(sparse_ids()) if ragged else sparse_ids()
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.SGD(1.0))

    def loss():
        return tf.reduce_sum(pooled(v, how, ids))

    shadow = v.get_trainable_by_name(INNER[how])
    optimizer.minimize(tf.function(loss) if function else loss, var_list=[shadow])
    assert dict(zip(v.export()[0].numpy(), v.export()[1].numpy().tolist(), strict=True)) == {
        3: [-1.5, -1.5],
        5: [-0.5, -0.5],
    }
    assert list(v.trainable_store) == [INNER[how]] and v.get_trainable_by_name(INNER[how]) is shadow


def test_names_in_a_graph_are_those_of_tfra(session, name):
    v, w = (de.Variable(dim=2, name=f"{name}_{i}") for i in range(2))
    ids = tf.constant([1, 2], tf.int64)
    names = []
    for params in (v, w):
        with v1.variable_scope("test", reuse=v1.AUTO_REUSE), v1.variable_scope("q"):
            _, single = de.embedding_lookup(params, ids, name="emb", return_trainable=True)
            _, sparse = de.embedding_lookup_sparse(params, sparse_ids(), None, name="sp", return_trainable=True)
            _, safe = de.safe_embedding_lookup_sparse(params, sparse_ids(), name="safe", return_trainable=True)
        names.append([single.name, sparse.name, safe.name])
        assert list(params.trainable_store.values()) == [single, sparse, safe]
    long = "safe/embedding_lookup_sparse/embedding_lookup"
    labels = ["emb", "sp/embedding_lookup", long]
    assert names[0] == [f"test/q/{label}/{label}:0" for label in labels]
    assert names[1] == [f"{before.removesuffix(':0')}_1:0" for before in names[0]]
    assert list(v.trainable_store) == labels


def test_tables_have_the_names_of_tfra(session):
    with v1.variable_scope("test"):
        v = de.get_variable("p", devices=["/CPU:0"] * 2)
    assert [table.name for table in v.tables] == ["test_p_mht_1of2", "test_p_mht_2of2"]


@pytest.mark.parametrize("kind", ["Keras 3", "v1"])
def test_a_step_without_the_lookup_that_was_waited_for_is_told(name, kind):
    v = de.Variable(dim=2, name=name)
    optimizer = tf.keras.optimizers.SGD(1.0) if kind == "Keras 3" else v1.train.GradientDescentOptimizer(1.0)
    optimizer = de.DynamicEmbeddingOptimizer(optimizer)
    shadows = [v.get_trainable_by_name("x"), v.get_trainable_by_name("x/embedding_lookup")]
    with pytest.raises(ValueError, match=r"'x:0'.*there was none\. The lookups .* are named 'x/embedding_lookup'"):
        optimizer.minimize(lambda: tf.reduce_sum(pooled(v, "embedding_lookup_sparse", sparse_ids())), var_list=shadows)


def test_a_variable_has_a_lookup_of_its_own(name, devices):
    v = de.Variable(dim=2, name=name, devices=devices, initializer=1.0)
    rows, trainable = v.embedding_lookup(tf.constant([[1, 2]], tf.int64), "x", max_norm=1.0)
    assert rows.shape == (1, 2, 2) and abs(float(tf.norm(rows[0, 0])) - 1) < 1e-6
    assert v.trainable_store == {"x/embedding_lookup": trainable}


# ---- Rows ----


def test_a_session_gives_the_rows_of_a_wrapper(session, name, devices):
    v = de.Variable(dim=2, name=name, devices=devices, initializer=1.0)
    _, trainable = de.embedding_lookup(v, tf.constant([3, 4], tf.int64), return_trainable=True)
    write = v.upsert([4], [[2.0, 3.0]])
    assert trainable.prefetch_values() is trainable.prefetch_values()
    before = trainable.prefetch_values()
    assert trainable.prefetch_values(update=True) is not before
    v1.get_default_graph().finalize()
    session.run(write)
    assert session.run(trainable).tolist() == [[1, 1], [2, 3]] == session.run(trainable.prefetch_values()).tolist()


def test_update_op_inserts_the_ids_and_counts_them(mode, name, devices):
    v = de.Variable(dim=2, name=name, devices=devices, initializer=2.0, restrict_policy=de.FrequencyRestrictPolicy)
    mode(lambda: v.upsert(tf.constant([1], tf.int64), tf.constant([[7.0, 8.0]])))

    def insert(ids):
        return de.embedding_lookup(v, ids, name="x", return_trainable=True)[1].update_op()

    if mode.name == "function":
        pytest.skip("a tf.function tells a shadow no ids")
    mode(insert, np.array([0, 1, 2, 0]))
    keys, rows = mode(lambda: v.export())
    assert dict(zip(keys.tolist(), rows.tolist(), strict=True)) == {0: [2, 2], 1: [7, 8], 2: [2, 2]}
    keys, counts = mode(lambda: v.restrict_policy.status.export())
    assert dict(zip(keys.tolist(), counts.tolist(), strict=True)) == {0: [1], 1: [1], 2: [1]}


def test_the_size_of_a_finalized_graph_can_be_asked_for(session, name, devices):
    v = de.Variable(dim=2, name=name, devices=devices)
    write, size = v.upsert([1, 2], [[1.0, 2.0], [3.0, 4.0]]), v.size()
    with tf.control_dependencies([v.remove([1])]):
        after = v.size()
    assert v.size() is size and after is not size
    v1.get_default_graph().finalize()
    assert session.run(v.size()) == 0
    session.run(write)
    assert session.run(v.size()) == 2
    assert session.run(after) == 1


# ---- Over ranks; on several of them see tests/sok/collective/check_de_keras.py ----


def test_on_one_rank_a_hvd_variable_is_its_shadow(name):
    v = de.Variable(dim=2, name=name)
    shadow = de.shadow_ops.ShadowVariable(v, name="x")
    spread = de.shadow_ops.HvdVariable("spread", shadow, 2, mpi_size=1)
    optimizer = de.DynamicEmbeddingOptimizer(tf.keras.optimizers.SGD(1.0))
    ids = tf.constant([[1, 2]], tf.int64)
    optimizer.minimize(lambda: tf.reduce_sum(spread.embedding_lookup(ids)[0]), var_list=[shadow])
    rows, trained = spread.embedding_lookup(ids)
    assert trained is shadow and rows.numpy().tolist() == [[[-1, -1], [-1, -1]]]
    assert de.embedding_lookup(spread, ids, name="y").numpy().tolist() == rows.numpy().tolist()
    assert de.safe_embedding_lookup_sparse(spread, sparse_ids(), name="y").numpy().tolist()[1] == [0, 0]
    with pytest.raises(ValueError, match="HvdVariable 'no': mpi_size must be the number of ranks, 1"):
        de.shadow_ops.HvdVariable("no", shadow, 2, mpi_size=3)
    with pytest.raises(TypeError, match="shadow must be a ShadowVariable"):
        de.shadow_ops.HvdVariable("no", v, 2)
