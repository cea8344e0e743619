"""The examples that the API pages give for 2 GPUs: on 2 ranks they give what the pages say, each in its own words."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import tensorflow as tf

from tfplugin.sok import experiment as sok


@pytest.fixture(scope="module", autouse=True)
def _sok_started() -> None:
    """As on the pages; where there is no Horovod, only its lines are left out."""
    if sys.modules.get("horovod", True) is not None:
        import horovod.tensorflow as hvd

        hvd.init()
    sok.init()


def test_a_distributed_variable_has_every_other_row(rank: int, size: int) -> None:
    v = sok.Variable(np.arange(4 * 3).reshape(4, 3), dtype=tf.float32)
    if size == 2:
        assert v.shape == (2, 3)
        of_gpu = [[[0, 1, 2], [6, 7, 8]], [[3, 4, 5], [9, 10, 11]]]
        np.testing.assert_array_equal(v, of_gpu[rank])
    np.testing.assert_array_equal(v, np.arange(4 * 3).reshape(4, 3)[rank::size])


def test_a_localized_variable_is_on_one_rank(rank: int) -> None:
    v = sok.Variable(np.arange(5 * 3).reshape(5, 3), dtype=tf.float32, mode="localized:0")
    assert v.shape == ((5, 3) if rank == 0 else (0, 3))
    np.testing.assert_array_equal(v, np.arange(5 * 3).reshape(5, 3) if rank == 0 else np.zeros([0, 3]))


def test_lookup_sparse_of_two_variables_with_their_hotness() -> None:
    v1 = sok.Variable(np.arange(17 * 3).reshape(17, 3), dtype=tf.float32)
    v2 = sok.Variable(np.arange(7 * 5).reshape(7, 5), dtype=tf.float32)
    indices1 = tf.SparseTensor(
        indices=[[0, 0], [0, 1], [1, 0], [1, 1], [1, 2]], values=[1, 1, 3, 4, 5], dense_shape=[2, 3]
    )
    indices2 = tf.SparseTensor(indices=[[0, 0], [1, 0], [1, 1]], values=[1, 2, 3], dense_shape=[2, 2])
    embeddings = sok.lookup_sparse([v1, v2], [indices1, indices2], hotness=[3, 2], combiners=["sum", "sum"])
    np.testing.assert_array_equal(embeddings[0], [[6, 8, 10], [36, 39, 42]])
    np.testing.assert_array_equal(embeddings[1], [[5, 6, 7, 8, 9], [25, 27, 29, 31, 33]])
    by_position = sok.lookup_sparse([v1, v2], [indices1, indices2], [3, 2], ["sum", "sum"])
    for one, other in zip(embeddings, by_position, strict=True):
        np.testing.assert_array_equal(one, other)


def test_dynamic_variable_has_rows_as_keys_come() -> None:
    v = sok.DynamicVariable(dimension=3, initializer="13")
    assert v.shape.as_list() == [None, 3]
    np.testing.assert_array_equal(v.size, [0, 3])
    indices = tf.convert_to_tensor([0, 1, 2**40], dtype=tf.int64)
    embedding = tf.nn.embedding_lookup(v, indices)
    np.testing.assert_array_equal(embedding, np.full([3, 3], 13.0))
    assert v.shape.as_list() == [None, 3]
    np.testing.assert_array_equal(v.size, [3, 3])


def test_optimizer_wrapper_updates_a_dynamic_variable() -> None:
    v = sok.DynamicVariable(dimension=3, initializer="13")
    indices = tf.convert_to_tensor([0, 1, 2**40], dtype=tf.int64)
    with tf.GradientTape() as tape:
        embedding = tf.nn.embedding_lookup(v, indices)
        loss = tf.reduce_sum(embedding)
    grads = tape.gradient(loss, [v])
    optimizer = tf.keras.optimizers.SGD(learning_rate=1.0)
    optimizer = sok.OptimizerWrapper(optimizer)
    optimizer.apply_gradients(zip(grads, [v]))  # noqa: B905 - as on the page
    embedding = tf.nn.embedding_lookup(v, indices)
    np.testing.assert_array_equal(embedding, np.full([3, 3], 12.0))


@pytest.mark.parametrize("use_hashtable", [True, False])
@pytest.mark.parametrize("dynamic_input", [False, True])
def test_all2all_dense_embedding_in_a_train_step(
    dynamic_input: bool, use_hashtable: bool, rank: int, size: int
) -> None:
    initializer = tf.keras.initializers.RandomUniform(seed=7)
    max_vocabulary_size_per_gpu, embedding_vec_size, slot_num, nnz_per_slot = 32, 4, 2, 3
    emb_layer = sok.All2AllDenseEmbedding(
        max_vocabulary_size_per_gpu,
        embedding_vec_size,
        slot_num,
        nnz_per_slot,
        dynamic_input=dynamic_input,
        use_hashtable=use_hashtable,
        embedding_initializer=initializer,
    )
    shape = [12] if dynamic_input else [2, slot_num, nnz_per_slot]
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(learning_rate=1.0))

    @tf.function
    def _train_step(inputs: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            if dynamic_input:  # "unique->lookup->gather pattern can be used"
                unique, which = tf.unique(inputs)
                emb_vectors = tf.gather(emb_layer(unique), which)
            else:
                emb_vectors = emb_layer(inputs)
            loss = tf.reduce_sum(emb_vectors)
        grads = tape.gradient(loss, [emb_layer.variable])
        optimizer.apply_gradients(zip(grads, [emb_layer.variable]))  # noqa: B905
        return emb_vectors

    of_ranks = [np.random.default_rng(r).integers(32 * size, size=shape) for r in range(size)]
    inputs = tf.constant(of_ranks[rank], tf.int64)
    before, after = _train_step(inputs).numpy(), _train_step(inputs).numpy()
    assert before.shape == (*shape, embedding_vec_size)
    assert (np.abs(before) <= 0.05).all() and len(np.unique(before)) > 4
    occurrences = np.bincount(np.concatenate(of_ranks, axis=None), minlength=32 * size)
    np.testing.assert_allclose(after, before - occurrences[of_ranks[rank]][..., None], atol=1e-6)
