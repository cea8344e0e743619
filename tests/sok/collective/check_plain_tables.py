"""Plain tables on several ranks: each rank has all rows, which Horovod keeps equal as it does dense variables."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin
import tfplugin.sok as sok

KEYS = [3, -1, 2**40, 5]


def _keys(rank: int) -> list[int]:
    """Of this rank: two that all have, the first of them twice, and one of its own."""
    return [*KEYS[:2], KEYS[0], KEYS[2 + rank % 2]]


def _taped(table: Any, rank: int) -> tuple[tf.Tensor, tf.GradientTape]:
    with tf.GradientTape() as tape:
        loss = (rank + 1.0) * tf.reduce_sum(tf.nn.embedding_lookup(table, _keys(rank)))
    return loss, tape


@pytest.mark.parametrize("partitioner", [None, tf.compat.v1.fixed_size_partitioner(2)])
def test_an_update_in_the_backward_pass_of_each_rank_alone_is_an_error(
    hvd: Any, rank: int, size: int, gather: Callable[[Any], list[Any]], partitioner: Any
) -> None:
    table = tfplugin.get_kv_variable(f"alone_{partitioner is None}", 2, initializer=0.0, partitioner=partitioner)
    parts = table.as_list() if partitioner else [table]
    updates = tfplugin.apply_in_backward(table, tfplugin.optimizers.SGD(1.0))
    loss, tape = _taped(table, rank)
    with pytest.raises(ValueError, match=r"'alone_.* by the gradients of this rank alone: .* tfplugin.sok.Dynamic"):
        hvd.DistributedGradientTape(tape).gradient(loss, parts)
    assert not table.sparse_read(KEYS, training=False).numpy().any()

    updates.undo()  # the way out that the error names
    loss, tape = _taped(table, rank)
    gradients = hvd.DistributedGradientTape(tape).gradient(loss, parts)
    tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(1.0)).apply_gradients(zip(gradients, parts, strict=True))
    expected = np.zeros([len(KEYS)])
    for one in range(size):
        for key in _keys(one):
            expected[KEYS.index(key)] -= (one + 1.0) / size
    rows = table.sparse_read(KEYS, training=False).numpy()
    np.testing.assert_allclose(rows, np.stack([expected, expected], 1), rtol=1e-6)
    assert all((others == rows).all() for others in gather(rows))


@pytest.mark.parametrize("policy", ["max_capacity", "enter_threshold", None])
def test_rows_that_each_rank_decides_on_are_warned_of_once(
    hvd: Any, rank: int, policy: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    table = tfplugin.get_kv_variable(f"decides_{policy}", 2, **({policy: 5} if policy else {}))
    optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
    for _ in range(2):
        loss, tape = _taped(table, rank)
        optimizer.apply_gradients([(hvd.DistributedGradientTape(tape).gradient(loss, [table])[0], table)])
    told = [message for message in caplog.messages if "rows of the ranks will differ" in message]
    what = "max_capacity" if policy == "max_capacity" else "admission"
    assert [f"'decides_{policy}:0'" in one and what in one for one in told] == [True] * (policy is not None)


def test_a_table_that_is_spread_over_the_ranks_is_updated_in_the_backward_pass(rank: int, size: int) -> None:
    sok.init()
    table = sok.DynamicVariable(2, "zeros", name="spread")
    tfplugin.apply_in_backward(table, tfplugin.optimizers.SGD(1.0))
    with tf.GradientTape() as tape:
        rows = sok.all2all_dense_embedding(table, tf.constant(_keys(rank), tf.int64))
        loss = (rank + 1.0) * tf.reduce_sum(rows)
    tape.gradient(loss, table)
    expected = np.zeros([len(KEYS)])
    for one in range(size):
        for key in _keys(one):
            expected[KEYS.index(key)] -= one + 1.0
    after = sok.all2all_dense_embedding(table, tf.constant(KEYS, tf.int64), training=False)
    np.testing.assert_allclose(after, np.stack([expected, expected], 1), rtol=1e-6)


@pytest.mark.parametrize(("parts", "inplace"), [(None, False), (None, True), (2, False)])
def test_a_broadcast_of_a_table_is_an_error(hvd: Any, parts: int | None, inplace: bool) -> None:
    partitioner = parts and tf.compat.v1.fixed_size_partitioner(parts)
    table = tfplugin.get_kv_variable(f"sent_{parts}_{inplace}", 2, partitioner=partitioner)
    with pytest.raises(ValueError, match=r"Horovod broadcasts dense variables, and key-value variable 'sent_"):
        hvd.broadcast_variables([tf.Variable(1.0), table], 0, inplace=inplace)
    hvd.broadcast_variables([tf.Variable(1.0)], 0, inplace=inplace)


@pytest.mark.parametrize(("parts", "inplace"), [(None, False), (None, True), (2, False)])
def test_a_broadcast_tells_of_tables_that_the_root_alone_has_rows_of(
    hvd: Any, rank: int, parts: int | None, inplace: bool, caplog: pytest.LogCaptureFixture
) -> None:
    partitioner = parts and tf.compat.v1.fixed_size_partitioner(parts)
    table, also = (
        tfplugin.get_kv_variable(f"{what}_{parts}_{inplace}", 2, partitioner=partitioner)
        for what in ("restored", "empty")
    )
    assert int(also.size()) == 0

    def told() -> list[str]:
        caplog.clear()
        hvd.broadcast_variables([tf.Variable(float(rank))], 0, inplace=inplace)
        return [one for one in caplog.messages if "leave tables out" in one and f"_{parts}_{inplace}" in one]

    if rank == 0:
        table.upsert(KEYS, np.ones([len(KEYS), 2], np.float32))
    said = f"Key-value variable 'restored_{parts}_{inplace}{'' if parts else ':0'}' has 4 rows on rank 0, which"
    assert [one.startswith(said) for one in told()] == [True] * (rank > 0)
    table.upsert(KEYS, np.ones([len(KEYS), 2], np.float32))
    assert not told()


def test_a_broadcast_of_a_graph_leaves_tables_out_and_tells_so_too(
    hvd: Any, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    with tf.Graph().as_default():
        table = tfplugin.get_kv_variable("of_graph", 2, partitioner=tf.compat.v1.fixed_size_partitioner(2))
        dense = tf.compat.v1.get_variable("dense_of_graph", initializer=float(rank), use_resource=True)
        upsert = table.upsert(KEYS, np.ones([len(KEYS), 2], np.float32))
        broadcast = hvd.broadcast_global_variables(0)
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            if rank == 0:
                session.run(upsert)
            session.run(broadcast)
            assert session.run(dense) == 0.0
            assert session.run(table.size()) == (0 if rank else len(KEYS))
        told = [one for one in caplog.messages if "'of_graph' has 4 rows on rank 0" in one]
        assert len(told) == (rank > 0)


@pytest.mark.parametrize("name", ["keras", "tf_keras"])
def test_an_elastic_state_that_would_lack_rows_is_an_error(hvd: Any, name: str) -> None:
    keras = importlib.import_module(name)
    layers = importlib.import_module(f"tfplugin.{name}")
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layers.Embedding(2, combiner="sum", name="kept")])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"TensorFlowKerasState: model 'seq.*'kept:0', whose rows .* tf.train.Checkp"):
        hvd.elastic.TensorFlowKerasState(model)
    dense = tf_keras.Sequential([tf_keras.Input((3,)), tf_keras.layers.Dense(1)])
    dense.compile("sgd", "mse")
    hvd.elastic.TensorFlowKerasState(dense)


def test_an_adasum_that_adds_nothing_up_is_an_error(hvd: Any) -> None:
    with tf.Graph().as_default():
        table = tf.compat.v1.get_kv_variable("adasum", 2)
        optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(1.0), op=hvd.Adasum)
        with pytest.raises(
            ValueError, match=r"'adasum(:0)?' would be updated by the gradients of this rank alone, .*Average"
        ):
            optimizer.minimize(tf.reduce_sum(tf.nn.embedding_lookup(table, KEYS)))
