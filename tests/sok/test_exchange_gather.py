"""Rows looked up straight into the buffer of an exchange, beside those of a lookup that are put there afterwards."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
tfplugin = pytest.importorskip("tfplugin")
sok = pytest.importorskip("tfplugin.sok")

from tfplugin.fused_lookup import gather_for_ranks, gather_many  # noqa: E402
from tfplugin.lookup import parts_of  # noqa: E402
from tfplugin.ops import raw  # noqa: E402

COUNTS = np.array([[5, 0, 700], [0, 0, 1], [3000, 2, 40]])  # ranks, tables


def tables_of(kind, dtype):
    """Three tables with some rows, and none in the second; each call gives equal ones."""
    options = {"bounded": {"var_type": "hybrid", "max_capacity": 6000}, "admission": {"enter_threshold": 2}}
    made = []
    for name, dim in (("one", 3), ("two", 1), ("three", 130)):
        table = sok.DynamicVariable(
            dim, "random", dtype=dtype, name=name, **({"var_type": "hbm"} | options.get(kind, {}))
        )
        if name != "two":
            keys = np.arange(0, 4000, 3)
            sok.assign(table, keys, tf.cast(np.random.default_rng(dim).normal(size=[len(keys), dim]), dtype))
        made.append(table)
    return made


def keys_of():
    rng = np.random.default_rng(1)
    return [tf.constant(rng.integers(-100, 4000, n)) for n in COUNTS.sum(axis=0)]


@pytest.mark.parametrize("kind", ["plain", "bounded", "admission"])
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(
    ("dtype", "flat"),
    [
        (tf.float32, tf.float32),
        (tf.float32, tf.float16),
        (tf.float32, tf.bfloat16),
        (tf.bfloat16, tf.bfloat16),
        (tf.float64, tf.float64),
    ],
)
def test_rows_and_gradients_are_those_of_a_lookup_and_a_reply(kind, train, dtype, flat):
    results = []
    for at_once in (True, False):
        tables, keys = tables_of(kind, dtype), keys_of()
        parts = [parts_of(table) for table in tables]
        for _ in range(2):  # the second time what was inserted is there
            with tf.GradientTape() as tape:
                if at_once:
                    buffer, splits = gather_for_ranks(parts, keys, tf.constant(COUNTS), train, Tflat=flat)
                else:
                    rows = gather_many(parts, keys, train)
                    buffer, splits = raw.kv_exchange_reply(rows, tf.constant(COUNTS), dims=[3, 1, 130], Tflat=flat)
                loss = tf.reduce_sum(tf.cast(buffer, tf.float64) * np.linspace(0.1, 1, buffer.shape[0]))
            gradients = tape.gradient(loss, tables) if train else []
            results.append(
                [buffer, splits]
                + [part for gradient in gradients for part in (gradient.indices, gradient.values)]
                + [part for table in tables for part in sorted_rows(table)]
            )
    for one, other in zip(results[:2], results[2:], strict=True):
        for mine, theirs in zip(one, other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def sorted_rows(table):
    keys, rows = sok.export(table)
    order = np.argsort(keys.numpy())
    return keys.numpy()[order], tf.cast(rows, tf.float64).numpy()[order]


def test_counts_of_other_keys_are_an_error():
    tables = tables_of("plain", tf.float32)
    keys = keys_of()
    with pytest.raises(tf.errors.InvalidArgumentError, match="keys of table 0, and counts of others"):
        gather_for_ranks([parts_of(table) for table in tables], [keys[0][:-1], *keys[1:]], tf.constant(COUNTS), True)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"expected \[ranks, 3\]"):
        gather_for_ranks([parts_of(table) for table in tables], keys, tf.constant(COUNTS[:, :2]), True)


@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.float64])
def test_an_error_is_told_from_rows_of_its_size(dtype):
    travel = {"T": 1, "dims": [1]}
    for count in range(1, 40):
        counts, asked = [[count], [count]], np.array([0, 1, 7, 0, count] + [0] * count, np.int64)
        rows, row_splits = tf.ones([2 * count], dtype), [count, count]

        told, splits = raw.kv_exchange_tell(rows, row_splits, counts, [b"", b"\x08no room for it"], **travel)
        assert count not in splits.numpy()
        with pytest.raises(
            tf.errors.ResourceExhaustedError,
            match=r"failed on 2 of 2 ranks.* rank 0: no room .* rank 1: no room for it",
        ):
            raw.kv_exchange_check(np.tile(asked, 2), [len(asked)] * 2, told, splits, **travel)

        told, splits = raw.kv_exchange_tell(rows, row_splits, counts, [b""], **travel)
        assert told.numpy().tolist() == [1.0] * 2 * count and splits.numpy().tolist() == row_splits
        raw.kv_exchange_check(np.tile(asked, 2), [len(asked)] * 2, told, splits, **travel)


def test_what_is_neither_rows_nor_an_error_is_named():
    asked = np.array([0, 1, 7, 0, 3, 1, 2, 3], np.int64)
    for came in ([], [0.0] * 9, [np.nan] * 9):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"rank 0: it sent .* bytes that are neither rows"):
            raw.kv_exchange_check(asked, [len(asked)], tf.constant(came, tf.float32), [len(came)], T=1, dims=[1])
    with pytest.raises(tf.errors.InvalidArgumentError, match="more than there is"):
        raw.kv_exchange_check(asked, [len(asked)], tf.zeros([2]), [3], T=1, dims=[1])
