"""What everything else on ranks stands on: Horovod exchanges between ranks what it is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf


def _exchange(hvd: Any, rows: tf.Tensor, splits: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return hvd.alltoall(rows, splits=splits, name="rows")


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
def test_rows_arrive_in_the_order_of_the_ranks(hvd: Any, rank: int, size: int, traced: bool) -> None:
    splits = np.arange(1, size + 1, dtype=np.int32)  # row i of rank r to rank d says (r, d, i)
    rows = np.array([(rank, to, i) for to in range(size) for i in range(splits[to])], np.float32)
    exchange = tf.function(_exchange) if traced else _exchange
    got, received = exchange(hvd, tf.constant(rows), tf.constant(splits))
    expected = [(source, rank, i) for source in range(size) for i in range(rank + 1)]
    np.testing.assert_array_equal(got, np.array(expected, np.float32))
    np.testing.assert_array_equal(received, np.full(size, rank + 1))


def test_a_rank_may_send_nothing(hvd: Any, rank: int, size: int) -> None:
    splits = np.zeros(size, np.int32)
    splits[0] = rank  # rank 0 sends nothing at all
    got, received = hvd.alltoall(tf.fill([rank, 2], float(rank)), splits=tf.constant(splits))
    expected = [source for source in range(size) for _ in range(source)] if rank == 0 else []
    np.testing.assert_array_equal(got, np.repeat(np.array(expected, np.float32)[:, None], 2, 1))
    np.testing.assert_array_equal(received, np.arange(size) if rank == 0 else np.zeros(size))


def test_an_exchange_has_a_gradient(hvd: Any, rank: int, size: int) -> None:
    rows = tf.Variable(tf.ones([size, 2]))
    with tf.GradientTape() as tape:
        got, _ = hvd.alltoall(rows, splits=tf.ones([size], tf.int32))
        loss = tf.reduce_sum(got) * float(rank + 1)
    # Row d went to rank d, whose loss weighs it by d + 1.
    np.testing.assert_array_equal(tape.gradient(loss, rows), np.repeat(np.arange(1.0, size + 1)[:, None], 2, 1))


def test_ranks_share_a_folder_and_gather(
    rank: int, size: int, gather: Callable[[Any], list[Any]], shared_path: Any
) -> None:
    (shared_path / f"of-{rank}").touch()
    assert gather(rank) == list(range(size))
    assert sorted(path.name for path in shared_path.iterdir()) == [f"of-{r}" for r in range(size)]


def test_a_single_rank_has_no_horovod(size: int) -> None:
    if size > 1:
        pytest.skip("for a single rank")
    with pytest.raises(ImportError):
        import horovod.tensorflow  # noqa: F401
