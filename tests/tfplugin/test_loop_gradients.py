"""Lookups in loops and branches of functions train their table as those of a dense variable train it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfplugin

ROWS = np.random.default_rng(0).uniform(0.5, 1.5, (12, 2)).astype(np.float32)
IDS = tf.constant([1, 2, 2, 4], tf.int64)
ZERO = tf.constant(0, tf.int64)

Lookup = Callable[[Any], Any]


def in_a_loop(look: Lookup, ids: Any, turns: int = 3) -> Any:
    body = lambda i, total: (i + 1, 0.5 * total + tf.reduce_sum(look(ids + i) ** 2))  # noqa: E731
    return tf.while_loop(lambda i, _: i < turns, body, [ZERO, tf.constant(1.0)])[1]


def in_no_turn(look: Lookup, ids: Any) -> Any:
    return in_a_loop(look, ids, turns=0)


def in_a_loop_and_outside(look: Lookup, ids: Any) -> Any:
    return 10 * in_a_loop(look, ids) + tf.reduce_sum(look(ids) ** 3)


def in_a_map(look: Lookup, ids: Any) -> Any:
    return tf.reduce_sum(tf.map_fn(lambda key: look(key[None])[0] ** 2, ids, fn_output_signature=tf.float32))


def in_a_vectorized_map(look: Lookup, ids: Any) -> Any:
    return tf.reduce_sum(tf.vectorized_map(lambda key: look(key[None])[0] ** 2, ids))


def in_a_scan(look: Lookup, ids: Any) -> Any:
    return tf.reduce_sum(tf.scan(lambda a, key: 0.5 * a + look(key[None])[0] ** 2, ids, initializer=tf.zeros([2])))


def in_nested_loops(look: Lookup, ids: Any) -> Any:
    def body(i: Any, total: Any) -> Any:
        inner = lambda j, sum_: (j + 1, 0.5 * sum_ + tf.reduce_sum(look(ids + i + j) ** 2))  # noqa: E731
        total = tf.while_loop(lambda j, _: j <= i, inner, [ZERO, total])[1]
        return i + 1, total + tf.reduce_sum(3 * look(ids))

    return tf.while_loop(lambda i, _: i < 3, body, [ZERO, tf.constant(1.0)])[1]


def in_a_growing_loop(look: Lookup, ids: Any) -> Any:
    shapes = [tf.TensorShape([]), tf.TensorShape([None, 2])]
    body = lambda i, rows: (i + 1, tf.concat([rows, look(ids + i) * tf.reduce_mean(rows)], 0))  # noqa: E731
    return tf.reduce_sum(tf.while_loop(lambda i, _: i < 3, body, [ZERO, look(ids)], shape_invariants=shapes)[1])


def in_one_branch(look: Lookup, ids: Any) -> Any:
    return tf.cond(tf.size(ids) > 1, lambda: tf.reduce_sum(look(ids) ** 2), lambda: tf.constant(0.0))


def in_the_other_branch(look: Lookup, ids: Any) -> Any:
    return tf.cond(tf.size(ids) > 100, lambda: tf.reduce_sum(look(ids)), lambda: tf.constant(0.0))


def in_both_branches(look: Lookup, ids: Any) -> Any:
    return tf.cond(tf.size(ids) > 1, lambda: tf.reduce_sum(look(ids) ** 2), lambda: tf.reduce_sum(look(ids + 1)))


def in_one_branch_and_outside(look: Lookup, ids: Any) -> Any:
    return in_one_branch(look, ids) + tf.reduce_sum(look(ids + 1) ** 3)


def in_one_of_three(look: Lookup, ids: Any) -> Any:
    branches = [lambda: tf.constant(0.0), lambda: tf.reduce_sum(look(ids) ** 2), lambda: tf.constant(1.0)]
    return tf.switch_case(tf.cast(ids[0] % 3, tf.int32), branches)


def in_a_branch_of_a_loop(look: Lookup, ids: Any) -> Any:
    def body(i: Any, total: Any) -> Any:
        return i + 1, total + tf.cond(i > 0, lambda: total * tf.reduce_sum(look(ids + i) ** 2), lambda: 0.0)

    return tf.while_loop(lambda i, _: i < 3, body, [ZERO, tf.constant(0.1)])[1]


def in_a_loop_of_a_branch(look: Lookup, ids: Any) -> Any:
    return tf.cond(tf.size(ids) > 1, lambda: in_a_loop(look, ids), lambda: in_a_branch_of_a_loop(look, ids))


def in_a_function_of_a_loop(look: Lookup, ids: Any) -> Any:
    function = tf.function(lambda i: tf.reduce_sum(look(ids + i) ** 2))
    return tf.while_loop(lambda i, _: i < 3, lambda i, s: (i + 1, 0.5 * s + function(i)), [ZERO, tf.constant(1.0)])[1]


def in_a_loop_of_a_function(look: Lookup, ids: Any) -> Any:
    return 2 * tf.function(lambda ids: in_a_loop(look, ids))(ids)


CONSTRUCTS = [
    *(in_a_loop, in_no_turn, in_a_loop_and_outside, in_a_map, in_a_vectorized_map, in_a_scan, in_nested_loops),
    *(in_a_growing_loop, in_one_branch, in_the_other_branch, in_both_branches, in_one_branch_and_outside),
    *(in_one_of_three, in_a_branch_of_a_loop, in_a_loop_of_a_branch, in_a_function_of_a_loop, in_a_loop_of_a_function),
]


def bags(ids: Any) -> tf.SparseTensor:
    """Two ids in each."""
    count = tf.size(ids, tf.int64)
    where = tf.stack([tf.repeat(tf.range(count), 2), tf.tile(tf.range(2, dtype=tf.int64), [count])], 1)
    return tf.SparseTensor(where, tf.reshape(tf.stack([ids, ids + 1], 1), [-1]), tf.stack([count, 2]))


def plain(variable: Any, ids: Any) -> Any:
    return tf.nn.embedding_lookup(variable, ids)


def clipped(variable: Any, ids: Any) -> Any:
    return tf.nn.embedding_lookup(variable, ids, max_norm=1.2)


def pooled(variable: Any, ids: Any) -> Any:
    return tf.nn.embedding_lookup_sparse(variable, bags(ids), None, combiner="mean")


def weighted(variable: Any, ids: Any) -> Any:
    weights = tf.sparse.map_values(lambda keys: 0.1 * tf.cast(keys, tf.float32), bags(ids))
    return tf.nn.embedding_lookup_sparse(variable, bags(ids), weights, combiner="sum")


def many(variable: Any, ids: Any) -> Any:
    if isinstance(variable, tf.Variable):
        return plain(variable, ids) + 2 * plain(variable, ids + 1)
    first, second = tfplugin.lookup_many([variable, variable], [ids, ids + 1])
    return first + 2 * second


def many_pooled(variable: Any, ids: Any) -> Any:
    if isinstance(variable, tf.Variable):
        return pooled(variable, ids) + 2 * pooled(variable, ids + 1)
    first, second = tfplugin.lookup_many([variable, variable], [bags(ids), bags(ids + 1)], combiners="mean")
    return first + 2 * second


def table(parts: int = 1, key_dtype: tf.DType = tf.int64, **options: Any) -> Any:
    partitioner = tf.compat.v1.fixed_size_partitioner(parts) if parts > 1 else None
    made = tfplugin.get_kv_variable("t", 2, key_dtype=key_dtype, partitioner=partitioner, **options)
    made.upsert(tf.cast(tf.range(len(ROWS)), key_dtype), tf.cast(ROWS, made.dtype))
    return made


def parts_of(variable: Any) -> list[Any]:
    return variable.as_list() if isinstance(variable, tfplugin.PartitionedKvVariable) else [variable]


def as_dense(gradients: Any) -> np.ndarray:
    dense = np.zeros_like(ROWS)
    for one in tf.nest.flatten(gradients):
        if isinstance(one, tf.IndexedSlices):
            np.add.at(dense, one.indices.numpy().astype(int), tf.cast(one.values, tf.float32).numpy())
        elif one is not None:
            dense += one
    return dense


def gradient(loss_of: Callable[[Lookup, Any], Any], look: Callable[[Any, Any], Any], variable: Any) -> np.ndarray:
    @tf.function
    def of(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(lambda keys: look(variable, keys), ids)
        return tape.gradient(loss, parts_of(variable))

    return as_dense(of(IDS))


def check(loss_of: Callable[[Lookup, Any], Any], look: Callable[[Any, Any], Any], variable: Any) -> None:
    wanted = gradient(loss_of, look, tf.Variable(ROWS))
    np.testing.assert_allclose(gradient(loss_of, look, variable), wanted, rtol=1e-5, atol=1e-6)
    assert np.any(wanted) or loss_of in (in_no_turn, in_the_other_branch)


@pytest.mark.parametrize("loss_of", CONSTRUCTS)
def test_gradients_are_those_of_a_dense_variable(loss_of: Any) -> None:
    check(loss_of, plain, table())


@pytest.mark.parametrize("look", [clipped, pooled, weighted, many, many_pooled])
@pytest.mark.parametrize("parts", [1, 3])
def test_all_lookups_have_gradients_in_loops_and_branches(look: Any, parts: int) -> None:
    check(in_a_loop_and_outside, look, table(parts))
    check(in_a_branch_of_a_loop, look, table(parts))


@pytest.mark.thorough
@pytest.mark.parametrize("look", [plain, clipped, pooled, weighted, many, many_pooled])
@pytest.mark.parametrize("loss_of", CONSTRUCTS)
def test_gradients_of_all_lookups_in_all_constructs(loss_of: Any, look: Any) -> None:
    check(loss_of, look, table(3))


@pytest.mark.parametrize("key_dtype", [tf.int32, tf.uint64])
@pytest.mark.parametrize("loss_of", [in_a_loop_and_outside, in_one_branch, in_both_branches, in_a_branch_of_a_loop])
def test_keys_of_other_dtypes(loss_of: Any, key_dtype: tf.DType) -> None:
    wanted = gradient(loss_of, plain, tf.Variable(ROWS))
    got = gradient(loss_of, lambda t, ids: plain(t, tf.cast(ids, key_dtype)), table(key_dtype=key_dtype))
    np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("loss_of", [in_a_loop_and_outside, in_one_branch_and_outside])
def test_a_tape_outside_of_the_function(loss_of: Any) -> None:
    found = []
    for variable in (table(), tf.Variable(ROWS)):
        function = tf.function(lambda ids, v=variable: loss_of(lambda keys: plain(v, keys), ids))
        with tf.GradientTape() as tape:
            loss = function(IDS)
        found.append(as_dense(tape.gradient(loss, variable)))
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.parametrize("wide_inside", [True, False])
@pytest.mark.parametrize("loss_of", [in_a_loop_and_outside, in_one_branch_and_outside])
def test_rows_of_16_bits_looked_up_in_two_dtypes(loss_of: Any, wide_inside: bool) -> None:
    half, order = table(value_dtype=tf.bfloat16), []

    def look(variable: Any, ids: Any) -> Any:
        order.append(len(order))
        wide = (len(order) == 1) == wide_inside  # the first lookup is that inside
        return tf.cast(variable.sparse_read(ids, output_dtype=tf.float32 if wide else None), tf.float32)

    wanted = gradient(loss_of, plain, tf.Variable(tf.cast(tf.cast(ROWS, tf.bfloat16), tf.float32)))
    np.testing.assert_allclose(gradient(loss_of, look, half), wanted, rtol=0.02)
    assert len(order) == 2


def test_the_gradient_of_a_loop_grows_by_what_a_turn_adds() -> None:
    # Slices put together in each turn would be copied each time.
    variable = table()

    @tf.function
    def of(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = in_a_map(lambda keys: plain(variable, keys), ids)
        return tape.gradient(loss, variable)

    graph = of.get_concrete_function(IDS).graph
    loops = [op for op in graph.get_operations() if op.type in ("While", "StatelessWhile") and "grad" in op.name]
    assert len(loops) == 1
    types = {op.type for op in loops[0]._body_graph.get_operations()}
    assert "TensorListPushBack" in types
    assert not {"ConcatV2", "AddN"} & types


def test_no_gradient_of_a_table_that_is_not_trained() -> None:
    fixed, weight = table(trainable=False), tf.Variable(1.0)

    @tf.function
    def of(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = weight * in_a_loop_and_outside(lambda keys: plain(fixed, keys), ids)
        return tape.gradient(loss, [weight, fixed])

    of_weight, of_table = of(IDS)
    assert of_weight != 0.0
    assert of_table is None


def test_a_dense_variable_and_a_table_in_one_loop() -> None:
    dense, variable = tf.Variable(ROWS), table()

    @tf.function
    def of(ids: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = in_a_loop_and_outside(lambda keys: plain(variable, keys) * plain(dense, keys), ids)
        return tape.gradient(loss, [dense, variable])

    of_dense, of_table = of(IDS)
    np.testing.assert_allclose(as_dense(of_dense), as_dense(of_table), rtol=1e-5)
    assert np.any(as_dense(of_table))


@pytest.mark.parametrize("parts", [1, 2])
def test_updates_in_the_backward_pass_of_a_loop_and_a_branch(parts: int) -> None:
    moved = []
    for in_backward in (True, False):
        variable, weight = table(parts), tf.Variable(2.0)
        if in_backward:
            updates = tfplugin.apply_in_backward(variable, tfplugin.optimizers.SGD(0.1))
        optimizer = tfplugin.optimizers.SGD(0.1)

        @tf.function
        def step(
            ids: Any,
            weight: Any = weight,
            variable: Any = variable,
            optimizer: Any = optimizer,
            in_backward: Any = in_backward,
        ) -> None:
            with tf.GradientTape() as tape:
                rows = tf.map_fn(lambda key: plain(variable, key), ids, fn_output_signature=tf.float32)
                other = tf.cond(ids[0] > 1, lambda: tf.reduce_sum(plain(variable, ids + 4)), lambda: 0.0)
                loss = weight * (tf.reduce_sum(rows) + other)
            gradients = tape.gradient(loss, [weight, *parts_of(variable)])
            if not in_backward:
                optimizer.apply_gradients(zip(gradients[1:], parts_of(variable), strict=True))

        for first in (1, 2):
            step(IDS + first - 1)
        moved.append(variable.sparse_read(tf.range(len(ROWS), dtype=tf.int64), training=False).numpy())
    np.testing.assert_allclose(*moved, rtol=1e-5)
    assert np.any(moved[0] != ROWS)
    assert int(updates.steps[0]) > 2
