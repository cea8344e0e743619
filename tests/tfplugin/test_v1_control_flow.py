"""Tables train in graphs with loops and branches as dense variables do, whichever branches are taken.

In TensorFlow 1's control flow, and in that of TensorFlow 2, which graphs of TensorFlow 1 have by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfplugin

v1 = tf.compat.v1


@pytest.fixture(autouse=True, params=[v1.disable_control_flow_v2, v1.enable_control_flow_v2], ids=["v1", "v2"])
def control_flow(request: pytest.FixtureRequest) -> Iterator[None]:
    enabled = v1.control_flow_v2_enabled()
    request.param()
    yield
    (v1.enable_control_flow_v2 if enabled else v1.disable_control_flow_v2)()


Lookup = Callable[[Any], Any]


def in_a_cond(look: Lookup, ids: Any) -> Any:
    return tf.cond(tf.size(ids) > 2, lambda: 2.0 * look(ids + 1), lambda: look(ids))


def in_one_branch(look: Lookup, ids: Any) -> Any:
    return look(ids) + tf.cond(tf.size(ids) > 2, lambda: look(ids + 1), lambda: tf.constant(0.0))


def in_nested_conds(look: Lookup, ids: Any) -> Any:
    inner = lambda: tf.cond(ids[0] > 3, lambda: look(ids), lambda: 3.0 * look(ids + 2))  # noqa: E731
    return tf.cond(tf.size(ids) > 2, inner, lambda: look(ids))


def in_a_loop_and_a_cond(look: Lookup, ids: Any) -> Any:
    body = lambda i, total: (i + 1, total + look(ids + i))  # noqa: E731
    _, total = tf.while_loop(lambda i, _: i < 3, body, [tf.constant(0, tf.int64), tf.constant(0.0)])
    return total + in_a_cond(look, ids)


def in_nested_loops(look: Lookup, ids: Any) -> Any:
    def body(i: Any, total: Any) -> Any:
        inner = lambda j, sum_: (j + 1, sum_ + look(ids + i + j))  # noqa: E731
        return i + 1, tf.while_loop(lambda j, _: j < i, inner, [tf.constant(0, tf.int64), total])[1]

    return tf.while_loop(lambda i, _: i < 3, body, [tf.constant(0, tf.int64), tf.constant(0.0)])[1]


def in_conds_of_a_loop(look: Lookup, ids: Any) -> Any:
    def body(i: Any, total: Any) -> Any:
        return i + 1, total + tf.cond(i > 1, lambda: look(ids + i), lambda: 2.0 * look(ids))

    return tf.while_loop(lambda i, _: i < 4, body, [tf.constant(0, tf.int64), tf.constant(0.0)])[1]


@pytest.mark.parametrize(
    "loss_of", [in_a_cond, in_one_branch, in_nested_conds, in_a_loop_and_a_cond, in_conds_of_a_loop, in_nested_loops]
)
def test_rows_move_as_those_of_a_dense_variable(loss_of: Callable[[Lookup, Any], Any], partitioner: Any) -> None:
    trained = []
    for dense in (True, False):
        with tf.Graph().as_default(), v1.Session() as session:
            ids = v1.placeholder(tf.int64, [None])
            if dense:
                table = v1.get_variable("t", [10, 2], initializer=v1.zeros_initializer(), use_resource=True)
            else:
                zeros = tf.zeros_initializer()
                table = tfplugin.get_kv_variable("t", embedding_dim=2, initializer=zeros, partitioner=partitioner)
            loss = loss_of(lambda keys, table=table: tf.reduce_sum(tf.nn.embedding_lookup(table, keys)), ids)
            step = v1.train.GradientDescentOptimizer(1.0).minimize(loss)
            session.run(v1.global_variables_initializer())
            for fed in ([1, 2], [1, 2, 3], [5, 1, 1]):
                session.run(step, {ids: fed})
            read = table if dense else table.sparse_read(tf.range(10, dtype=tf.int64), training=False)
            trained.append(session.run(read))
    assert np.any(trained[0])
    np.testing.assert_array_equal(trained[1], trained[0])


def in_a_loop(look: Lookup, ids: Any) -> Any:
    body = lambda i, total: (i + 1, total + look(ids[i : i + 1]))  # noqa: E731
    return tf.while_loop(lambda i, _: i < tf.size(ids), body, [tf.constant(0), tf.constant(0.0)])[1]


def in_a_map(look: Lookup, ids: Any) -> Any:
    return tf.reduce_sum(tf.map_fn(lambda key: look(key[None]), ids, fn_output_signature=tf.float32))


@pytest.mark.parametrize(
    ("loss_of", "looked_up"),
    [(in_a_loop, {0}), (in_a_map, {0}), (in_nested_loops, {1, 2, 3})],
    ids=["while_loop", "map_fn", "nested loops"],
)
def test_only_keys_that_were_looked_up_have_gradients(
    loss_of: Callable[[Lookup, Any], Any], looked_up: set[int], partitioner: Any
) -> None:
    """`looked_up`: by how much keys are beyond the ids. A loop may take no turn."""
    with tf.Graph().as_default(), v1.Session() as session:
        ids = v1.placeholder(tf.int64, [None])
        table = tfplugin.get_kv_variable("t", embedding_dim=2, initializer=1.0, partitioner=partitioner)
        loss = loss_of(lambda keys: tf.reduce_sum(tf.nn.embedding_lookup(table, keys)), ids)
        optimizer = v1.train.GradientDescentOptimizer(0.1)
        gradients = optimizer.compute_gradients(loss)
        step = optimizer.apply_gradients(gradients)
        session.run(v1.global_variables_initializer())
        seen: set[int] = set()
        for fed in ([], [5, 7, 5], [0]):
            slices, _ = session.run([[slices for slices, _ in gradients], step], {ids: fed})
            expected = {key + beyond for key in fed for beyond in looked_up}
            assert set(np.concatenate([part.indices for part in slices]).tolist()) == expected
            seen |= expected
            assert sorted(session.run(table.export())[0].tolist()) == sorted(seen)  # each once, in its part
