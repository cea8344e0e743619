"""Ranks of one machine exchange through memory that they share: as by Horovod's alltoall, in any order of calls."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfplugin.sok as sok
from tfplugin import ranks, shared_exchange
from tfplugin.ops import raw

Gather = Callable[[Any], list[Any]]


@pytest.fixture(autouse=True)
def _of_several_ranks(size: int) -> None:
    sok.init()
    if size == 1:
        pytest.skip("one rank sends nothing")
    if not ranks.current()._shares_memory:
        pytest.skip("the ranks exchange over Horovod")


def _sent(rank: int, to: int, count: int, width: int, dtype: tf.DType) -> np.ndarray:
    """What a rank sends another: other numbers for each pair."""
    numbers = np.random.default_rng([rank, to, count]).integers(0, 100, [count, width])
    return numbers.astype(dtype.as_numpy_dtype)


@pytest.mark.parametrize("count", [0, 1, 1000, 70000])
@pytest.mark.parametrize("dtype", sorted(shared_exchange.DTYPES, key=lambda one: one.name), ids=lambda one: one.name)
def test_what_is_sent_arrives(dtype: tf.DType, count: int, rank: int, size: int) -> None:
    """Also more than is copied at a time, and nothing at all."""
    splits = [count + (to + rank) % 3 for to in range(size)] if count else [0] * size
    rows = np.concatenate([_sent(rank, to, n, 3, dtype) for to, n in enumerate(splits)])
    got, came = ranks.current().alltoall(tf.constant(rows), tf.constant(splits))
    expected = [count + (rank + source) % 3 if count else 0 for source in range(size)]
    np.testing.assert_array_equal(came, expected)
    np.testing.assert_array_equal(
        got, np.concatenate([_sent(source, rank, n, 3, dtype) for source, n in enumerate(expected)])
    )


def test_a_lookup_asks_horovod_for_nothing(size: int) -> None:
    table = sok.DynamicVariable(4, name="asks_nothing")

    @tf.function(autograph=False)
    def step(ids: tf.RaggedTensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.nn.l2_loss(sok.lookup_sparse(table, ids))
        return tape.gradient(loss, table)

    graph = step.get_concrete_function(tf.RaggedTensorSpec([None, None], tf.int64)).graph
    ops = {op.type for op in graph.get_operations()}
    assert {"KvSharedAlltoall", "KvSharedExchange"} <= ops
    assert "HorovodAlltoall" not in ops


def test_exchanges_of_different_names_come_in_any_order(rank: int, size: int, gather: Gather) -> None:
    """Each rank waits for another one of them first, in sessions, which run what they are asked for."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        numbers = [np.full([size], 10.0 * rank + e, np.float32) for e in range(3)]
        sent = [tf.compat.v1.placeholder_with_default(one, [size]) for one in numbers]  # no constant is sent
        got = [
            ranks.current().alltoall(one, tf.ones([size], tf.int32), ranks.exchange_name(f"order_{e}"))[0]
            for e, one in enumerate(sent)
        ]
        for turn in range(20):
            order = np.random.default_rng([rank, turn]).permutation(3)
            found = session.run([got[e] for e in order])
            for e, one in zip(order, found, strict=True):
                np.testing.assert_array_equal(one, [10.0 * source + e for source in range(size)])
    assert gather(True) == [True] * size


def test_a_cancelled_exchange_is_not_taken_for_the_next(rank: int, size: int, gather: Gather) -> None:
    """On rank 0 something else of the step fails while it waits for the others, who get what it had sent."""

    @tf.function(autograph=False)
    def step(number: tf.Tensor, wrong: tf.Tensor) -> tf.Tensor:
        got, _ = ranks.current().alltoall(tf.fill([size], number), tf.ones([size], tf.int32), "cancelled")
        late = tf.numpy_function(lambda: (time.sleep(0.3), np.int32(0))[1], [], tf.int32)
        with tf.control_dependencies([tf.debugging.assert_equal(wrong, late, "it is wrong")]):
            return tf.identity(got)

    expected = [float(source) for source in range(size)]
    np.testing.assert_array_equal(step(tf.constant(float(rank)), tf.constant(0)), expected)
    gather(None)
    if rank == 0:
        with pytest.raises(tf.errors.InvalidArgumentError, match="it is wrong"):
            step(tf.constant(100.0), tf.constant(1))
        gather(None)  # the others have not begun
    else:
        gather(None)
        first = step(tf.constant(100.0 + rank), tf.constant(0))
        np.testing.assert_array_equal(first, [100.0 + source for source in range(size)])
    np.testing.assert_array_equal(
        step(tf.constant(200.0 + rank), tf.constant(0)), [200.0 + source for source in range(size)]
    )
    assert gather(True) == [True] * size


def test_ranks_that_send_different_things_are_told(rank: int, size: int) -> None:
    sent = tf.zeros([size, 2 if rank == 0 else 3])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"sends float rows of .*every rank makes the same calls"):
        ranks.current().alltoall(sent, tf.ones([size], tf.int32), "different")
    for splits, told in (
        ([1] * (size + 1), "splits must be"),
        ([-1] * size, "0 or more"),
        ([2] * size, "and there are"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=told):
            ranks.current().alltoall(tf.zeros([size]), tf.constant(splits), "bad splits")


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("weighted", [False, True])
def test_derivatives_of_derivatives_go_through(weighted: bool, traced: bool, rank: int, size: int) -> None:
    """Of a cube, by the rows, beside stock TensorFlow on all rows."""
    rows = np.random.default_rng(1).normal(size=[12, 3]).astype(np.float32)
    table, mine = sok.DynamicVariable(3, name="derived"), np.arange(rank, 12, size)
    sok.assign(table, mine, rows[mine])
    whole = tf.Variable(rows)
    weights = tf.linspace(0.5, 2.0, 9)

    def ids_of(one: int) -> tf.RaggedTensor:
        return tf.RaggedTensor.from_row_lengths(np.random.default_rng([2, one]).integers(0, 12, 9), [4, 0, 5])

    def second(look_up: Callable[[tf.RaggedTensor], tf.Tensor], ids: tf.RaggedTensor, by: Any) -> Any:
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(look_up(ids) ** 3)
            first = inner.gradient(loss, by)
            # On the ranks there is a row for each key that a rank has asked for.
            loss = tf.nn.l2_loss(first.values if by is table else tf.convert_to_tensor(first))
        return outer.gradient(loss, by)

    def spread(ids: tf.RaggedTensor) -> tf.Tensor:
        return sok.lookup_sparse(table, ids, ids.with_values(weights) if weighted else None, "sum")

    def dense(ids: tf.RaggedTensor) -> tf.Tensor:
        found = tf.gather(whole, ids.values) * (weights[:, None] if weighted else 1.0)
        return tf.math.unsorted_segment_sum(found, ids.value_rowids(), 3)

    found = np.zeros_like(rows)
    slices = (tf.function(second, autograph=False) if traced else second)(spread, ids_of(rank), table)
    np.add.at(found, np.asarray(slices.indices), np.asarray(slices.values))
    expected = sum(np.asarray(tf.convert_to_tensor(second(dense, ids_of(one), whole))) for one in range(size))
    np.testing.assert_allclose(found[mine], expected[mine], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_derivatives_of_derivatives_by_weights(combiner: str, rank: int, size: int) -> None:
    """Of weights by weights, and by rows, beside stock TensorFlow on all rows."""
    numbers = np.random.default_rng(1).normal(size=[12, 3]).astype(np.float32)
    table, mine = sok.DynamicVariable(3, name=f"by_weights_{combiner}"), np.arange(rank, 12, size)
    sok.assign(table, mine, numbers[mine])
    whole, weights = tf.Variable(numbers), tf.linspace(0.5, 2.0, 9)

    def ids_of(one: int) -> tf.RaggedTensor:
        return tf.RaggedTensor.from_row_lengths(np.random.default_rng([2, one]).integers(0, 12, 9), [4, 5])

    def second(look_up: Callable[[tf.RaggedTensor], tf.Tensor], ids: tf.RaggedTensor, variable: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(weights)
            with tf.GradientTape() as inner:
                inner.watch(weights)
                loss = tf.reduce_sum(look_up(ids) ** 3)
            loss = tf.nn.l2_loss(inner.gradient(loss, weights))
        return outer.gradient(loss, [variable, weights])

    def spread(ids: tf.RaggedTensor) -> tf.Tensor:
        return sok.lookup_sparse(table, ids, ids.with_values(weights), combiner)

    def dense(ids: tf.RaggedTensor) -> tf.Tensor:
        total = tf.math.unsorted_segment_sum(tf.gather(whole, ids.values) * weights[:, None], ids.value_rowids(), 2)
        power = tf.math.unsorted_segment_sum(weights if combiner == "mean" else weights**2, ids.value_rowids(), 2)
        return total if combiner == "sum" else total / (power if combiner == "mean" else power**0.5)[:, None]

    slices, of_weights = second(spread, ids_of(rank), table)
    found = np.zeros_like(numbers)
    np.add.at(found, np.asarray(slices.indices), np.asarray(slices.values))
    expected = [second(dense, ids_of(one), whole) for one in range(size)]
    np.testing.assert_allclose(of_weights, expected[rank][1], rtol=1e-4, atol=1e-4)
    of_rows = sum(np.asarray(tf.convert_to_tensor(rows)) for rows, _ in expected)
    np.testing.assert_allclose(found[mine], of_rows[mine], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("nested", [False, True])
def test_gradients_of_a_loop_go_through_however_its_iterations_are_run(nested: bool, rank: int, size: int) -> None:
    """TensorFlow runs those of a gradient side by side. One rank is slow in some of them, so that others are first."""
    table = sok.DynamicVariable(2, "ones", name="in_a_loop")
    numbers = tf.range(1, 7, dtype=tf.int64)

    def slow(grad: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        def wait(grad: np.ndarray, number: int) -> np.ndarray:
            time.sleep(0.02 * ((number + rank * 3) % 4))
            return grad

        return tf.ensure_shape(tf.numpy_function(wait, [grad, number], grad.dtype), grad.shape)

    def of(number: tf.Tensor) -> tf.Tensor:
        @tf.custom_gradient
        def held_up(rows: tf.Tensor) -> Any:
            return tf.identity(rows), lambda grad: slow(grad, number)

        rows = held_up(sok.all2all_dense_embedding(table, number[None]))
        return tf.reduce_sum(rows) * tf.cast(number, tf.float32) * (rank + 1.0)

    def of_several(number: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(tf.map_fn(of, number + tf.constant([0, 10], tf.int64), fn_output_signature=tf.float32))

    @tf.function(autograph=False)
    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.map_fn(of_several if nested else of, numbers, fn_output_signature=tf.float32))
        return tape.gradient(loss, table)

    of_ranks = sum(range(1, size + 1))
    keys = [*range(1, 7), *(range(11, 17) if nested else [])]
    expected = {key: [float(key * of_ranks)] * 2 for key in keys if key % size == rank}
    for _ in range(5):
        slices, found = step(), {}
        for key, row in zip(np.asarray(slices.indices).tolist(), np.asarray(slices.values), strict=True):
            found[key] = found.get(key, 0) + row
        assert {key: row.tolist() for key, row in found.items()} == expected


def test_a_rank_that_may_open_no_more_files_says_so_and_goes_on_once_it_may(
    rank: int, size: int, gather: Gather
) -> None:
    """Memory for more rows than before takes a new file on each rank, of which the last may open none."""
    narrow, wide = (sok.DynamicVariable(dim, "ones", name=f"of_files_{dim}") for dim in (2, 600))
    keys = tf.range(1000, dtype=tf.int64)
    for _ in range(3):
        sok.all2all_dense_embedding(narrow, keys)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == size - 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    error = ""
    try:
        sok.all2all_dense_embedding(wide, keys)
    except tf.errors.ResourceExhaustedError as failure:
        error = failure.message
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        gather(None)  # files come that it may have again
    assert f"rank {size - 1}" in error
    assert "see ulimit -n" in error
    for _ in range(2):
        assert (sok.all2all_dense_embedding(wide, keys).numpy() == 1).all()


@pytest.mark.parametrize("what", ["keys", "gradients"])
def test_a_rank_that_has_no_memory_to_send_from_fails_on_all(what: str, rank: int, size: int, gather: Gather) -> None:
    """The last rank may open no file. (Of rows see above.)"""
    # More than there is in memory that was shared before.
    table = sok.DynamicVariable(3_000 if what == "gradients" else 1, "ones", name=f"no_memory_{what}")
    keys = tf.range(1_000, dtype=tf.int64)
    many = keys if what == "gradients" else tf.range(1_000_000, dtype=tf.int64)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)

    def forbid() -> None:
        if rank == size - 1:
            resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.all2all_dense_embedding(table, many))
            if what == "gradients":
                forbid()
        tape.gradient(loss, table)

    if what == "keys":
        forbid()
    try:
        with pytest.raises(tf.errors.ResourceExhaustedError, match=rf"rank {size - 1}.*see ulimit -n"):
            step()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        gather(None)  # files come that it may have again
    assert (sok.all2all_dense_embedding(table, keys).numpy() == 1).all()


def test_a_rank_that_cannot_map_what_others_send_fails_on_all(
    rank: int, size: int, gather: Gather, tmp_path: Path
) -> None:
    """The last rank, which sends nothing, may open no file for the memory in which the others send."""
    last = rank == size - 1
    rows = 3_000_000  # more than there is in memory that was shared before
    sent = tf.zeros([0 if last else rows, 2])
    splits = tf.constant([0] * (size - 1) + [sent.shape[0]])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    (tmp_path / "files").touch()
    may_open = gather(tmp_path / "files")[-1]
    if last:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        may_open.unlink()
    while may_open.exists():  # nothing is sent before
        time.sleep(0.002)
    told = rf"exchange 'unmapped': rank {size - 1} cannot map what rank 0 sends: it has too many open files"
    try:
        with pytest.raises(tf.errors.ResourceExhaustedError, match=told):
            ranks.current().alltoall(sent, splits, "unmapped")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        gather(None)  # files come that it may have again
    got, came = ranks.current().alltoall(sent, splits, "unmapped")
    assert got.shape == (rows * (size - 1) if last else 0, 2)
    assert sum(came.numpy()) == got.shape[0]


def test_a_fork_of_a_rank_is_told_that_it_has_no_exchange(rank: int, size: int, gather: Gather) -> None:
    table, keys = sok.DynamicVariable(2, "ones", name="forked"), tf.constant([1, 2], tf.int64)
    sok.all2all_dense_embedding(table, keys)
    sent, splits = tf.zeros([size]), tf.ones([size], tf.int32)
    calls: list[Callable[[], Any]] = [
        lambda: sok.all2all_dense_embedding(table, keys),
        lambda: tf.function(lambda: sok.all2all_dense_embedding(table, keys), autograph=False)(),
        lambda: ranks.current().allgather(rank),
        # What was made of the ranks before the fork.
        lambda: raw.kv_shared_alltoall(sent, splits, exchange="forked", ranks=size),
    ]
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        wrong = 1
        try:
            said = [_error_of(call) for call in calls]
            told = f"forked from rank {rank} and has no exchange with the other ranks"
            wrong = 0 if all(told in one for one in said) and ranks.rank() == rank else print(said, flush=True) or 1
        finally:
            os._exit(wrong)
    assert os.waitpid(child, 0)[1] == 0
    assert (sok.all2all_dense_embedding(table, keys).numpy() == 1).all()
    assert gather(True) == [True] * size


def _error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


def test_graphs_that_differ_are_told(rank: int, gather: Gather) -> None:
    """Rank 0 calls a function of its own before the one that looks up, which is named otherwise for that."""
    table, steps = sok.DynamicVariable(2, name="of_graphs"), tf.Variable(0)

    @tf.function(autograph=False)
    def count() -> tf.Tensor:
        return steps.assign_add(1)

    @tf.function(autograph=False)
    def look_up() -> tf.Tensor:
        return sok.all2all_dense_embedding(table, tf.constant([1, 2], tf.int64))

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        if rank == 0:
            count()
        return look_up()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "2")
        _connect_anew()
        with pytest.raises(tf.errors.DeadlineExceededError, match="one call in graphs that differ"):
            step()
    gather(None)
    _connect_anew()
    assert look_up().shape == (2, 2)


def _connect_anew() -> None:
    world = ranks.current()
    world._shares_memory = None
    world.connect()
