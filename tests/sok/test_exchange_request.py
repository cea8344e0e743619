"""The message in which a rank asks for rows, read back with NumPy."""

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
raw = pytest.importorskip("tfplugin.ops").raw

DIMS = [4, 16]


def request(ids, ranks):
    """The message, its split by rank, and the places of each table's ids."""
    count = len(ids)
    message, splits, places = raw.kv_exchange_request(
        [tf.constant(one) for one in ids],
        [tf.constant([0, len(one)], tf.int64) for one in ids],
        [],
        [],
        rank=0,
        ranks=ranks,
        names=[f"table_{t}" for t in range(count)],
        owners=[-1] * count,
        rows=[-1] * count,
        key_dtypes=[tf.as_dtype(one.dtype) for one in ids],
        dims=DIMS[:count],
        hotness=[-1] * count,
        outer=[-1] * count,
        weighted=[False] * count,
    )
    return message.numpy(), splits.numpy(), [one.numpy() for one in places]


# 65,536 ids are one bucket; more are sorted into several.
@pytest.mark.parametrize("size", [0, 1, 1000, 65_536, 65_537, 300_000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint64])
def test_every_id_finds_its_key_on_the_rank_that_owns_it(size, ranks, dtype):
    rng = np.random.default_rng(size + ranks)
    low = 0 if dtype == np.uint64 else -50_000
    ids = [rng.integers(low, 50_000, size).astype(dtype), rng.integers(low, 10, size // 2).astype(dtype)]
    if dtype == np.uint64:
        ids[0][::3] += np.uint64(2**64 - 100_000)
    message, splits, places = request(ids, ranks)
    begins = [{} for _ in ids]  # of each table: at which element the row of a key begins
    element = 0
    for rank, part in enumerate(np.split(message, np.cumsum(splits)[:-1])):
        assert part[0] == 0 and part[1] == len(ids)
        keys = part[2 + len(ids) :]
        assert len(keys) == part[2 : 2 + len(ids)].sum()
        for t, of_table in enumerate(np.split(keys, np.cumsum(part[2 : 2 + len(ids)])[:-1])):
            for key in of_table.view(np.uint64) if dtype == np.uint64 else of_table:
                assert int(key) % ranks == rank
                assert int(key) not in begins[t], "a key is sent once"
                begins[t][int(key)] = element
                element += DIMS[t]
    for t, own in enumerate(ids):
        assert set(begins[t]) == {int(key) for key in own}
        assert places[t].tolist() == [begins[t][int(key)] for key in own]


def test_the_message_depends_on_the_ids_alone():
    ids = [np.random.default_rng(3).integers(0, 20_000, 200_000)]
    first, again = request(ids, 3), request(ids, 3)
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[2][0], again[2][0])


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.float64])
def test_rows_of_one_id_are_that_row_and_others_are_combined(combiner, dtype):
    rows = tf.cast(tf.reshape(tf.range(12), [3, 4]), dtype)
    (pooled,) = raw.kv_exchange_pool(
        tf.reshape(rows, [-1]),
        [tf.constant([4, 0, 8, 8], tf.int64)],
        [tf.constant([0, 1, 1, 3, 4], tf.int64)],
        [],
        [],
        combiners=[combiner],
        dims=[4],
        outer=[-1],
        weighted=[False],
    )
    divisor = {"sum": 1, "mean": 2, "sqrtn": np.sqrt(2)}[combiner]
    wide = rows.numpy().astype(np.float64)
    expected = np.stack([wide[1], np.zeros(4), (wide[0] + wide[2]) / divisor, wide[2]])
    np.testing.assert_allclose(pooled.numpy(), expected, rtol=2e-3 if dtype == tf.float16 else 1e-6)
