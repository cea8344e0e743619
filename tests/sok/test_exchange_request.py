"""The message in which a rank asks for rows, read back with NumPy."""

import itertools

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")
raw = pytest.importorskip("tfplugin.ops").raw

DIMS = [4, 16]


def request(ids, ranks, lookup=""):
    """The message, its split by rank, and the places of each table's ids."""
    count = len(ids)
    message, splits, places = raw.kv_exchange_request(
        [tf.constant(one) for one in ids],
        [tf.constant([0, len(one)], tf.int64) for one in ids],
        [],
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
        lookup=lookup,
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
        counts, keys = part[4 : 4 + len(ids)], part[4 + len(ids) :]
        assert len(keys) == counts.sum()
        for t, of_table in enumerate(np.split(keys, np.cumsum(counts)[:-1])):
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


def test_a_text_of_what_is_looked_up_travels_until_it_is_known():
    ids = [np.arange(5), np.arange(3)]
    text = "a lookup\n'one' (dim 4)\n'two' (dim 16)"
    message, splits, _ = request(ids, 2, text)
    bytes_ = message[3]
    assert message[6:].tobytes()[:bytes_].decode() == text and splits[0] == 4 + 2 + -(-bytes_ // 8) + 3 + 2
    # What another rank sends: the same keys under the same hash.
    keys, counts = serve(message[: splits[0]], splits[0], splits[0])
    assert counts.tolist() == [[3, 2]] * 2 and [key.tolist() for key in keys] == [[0, 2, 4] * 2, [0, 2] * 2]
    again, _, _ = request(ids, 2, text)
    assert again[2] == message[2] and again[3] == 0


def serve(message, *splits):
    """What a rank makes of messages: the same one of each rank, or those of all."""
    messages = np.tile(message, len(splits)) if len(message) == splits[0] else message
    keys, counts = raw.kv_exchange_serve(
        messages, np.array(splits, np.int32), Tout=[tf.int64, tf.int64], ranks=len(splits), local=[False, False]
    )
    return [key.numpy() for key in keys], counts.numpy()


def test_ranks_that_look_up_something_else_are_told_what():
    ids = [np.arange(5), np.arange(3)]
    first, splits, _ = request(ids, 2, "a lookup\n'same'\n'mine' (dim 4)")
    other, others, _ = request(ids, 2, "a lookup\n'same'\n'theirs' (dim 8)")
    shorter, less, _ = request(ids, 2, "a lookup\n'same'")
    mine = first[: splits[0]]
    for theirs, length, difference in (
        (other, others[0], "rank 0 has 'mine' .dim 4., rank 1 has 'theirs' .dim 8.. All ranks must look up the same"),
        (shorter, less[0], "rank 0 has 'mine' .dim 4., rank 1 has only 1 table"),
    ):
        for _ in range(2):  # also where the text is known, and does not come again
            with pytest.raises(tf.errors.InvalidArgumentError, match=difference):
                serve(np.concatenate([mine, theirs[:length]]), splits[0], length)


@pytest.mark.parametrize(
    ("word", "value", "message"),
    [
        (0, 10**9, "error text is longer"),
        (0, -1, "error text is longer"),
        (1, 10**9, "more tables"),
        (1, -1, "more tables"),
        (3, 10**9, "the text in it is longer"),
        (3, -8, "the text in it is longer"),
        (4, 10**9, "other than the number of keys"),
        (4, -1, "number of keys is negative"),
        (5, 1, "other than the number of keys"),
    ],
)
def test_a_damaged_message_is_told(word, value, message):
    good, splits, _ = request([np.arange(5), np.arange(3)], 2)
    own = good[: splits[0]].copy()
    own[word] = value
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        serve(own, splits[0], splits[0])


def test_a_message_of_another_number_of_tables_is_told():
    good, splits, _ = request([np.arange(5)], 2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="of 1 tables, expected 2"):
        serve(good[: splits[0]], splits[0], splits[0])


@pytest.mark.parametrize(
    ("flat", "rows"),
    [(tf.float16, tf.float64), (tf.float64, tf.float32), (tf.bfloat16, tf.float16)],
)
def test_rows_that_do_not_travel_in_a_type_are_told(flat, rows):
    with pytest.raises(tf.errors.InvalidArgumentError, match="do not travel"):
        raw.kv_exchange_reply([tf.ones([2, 4], rows)], tf.constant([[2]], tf.int64), dims=[4], Tflat=flat)


@pytest.mark.parametrize("wire", [tf.float16, tf.bfloat16])
@pytest.mark.parametrize("dim", [1, 4, 19])
def test_rows_travel_in_16_bits_rounded_once(wire, dim):
    """As TensorFlow rounds: replies and their gradient to the bit, pooled rows and gradients as sums of such."""
    rng = np.random.default_rng(dim)
    rows = tf.constant(rng.normal(size=[5, dim]).astype(np.float32))
    counts = tf.constant([[2], [3]], tf.int64)
    rounded = tf.cast(rows, wire)
    flat, splits = raw.kv_exchange_reply([rows], counts, dims=[dim], Tflat=wire)
    assert splits.numpy().tolist() == [2 * dim, 3 * dim]
    np.testing.assert_array_equal(tf.bitcast(flat, tf.uint16), tf.bitcast(tf.reshape(rounded, [-1]), tf.uint16))
    (back,) = raw.kv_exchange_reply_gradient(flat, counts, dtype=tf.float32, T=1, dims=[dim])
    np.testing.assert_array_equal(back, tf.cast(rounded, tf.float32))

    places = tf.constant([3, 0, 0, 4], tf.int64) * dim
    how = {"dims": [dim], "outer": [-1], "weighted": [False], "combiners": ["mean"]}
    segments = tf.constant([0, 1, 4], tf.int64)
    (pooled,) = raw.kv_exchange_pool(flat, [places], [segments], [], [], dtype=tf.float32, **how)
    wide = tf.cast(rounded, tf.float32).numpy()
    np.testing.assert_allclose(pooled, [wide[3], (wide[0] + wide[0] + wide[4]) / 3], rtol=1e-6)

    gradient = tf.constant(rng.normal(size=[2, dim]).astype(np.float32))
    of_rows = raw.kv_exchange_pool_gradient(
        tf.size(flat, out_type=tf.int64), [gradient], [places], [segments], [], [], Tflat=wire, **how
    )
    third = gradient[1] / 3
    expected = tf.cast(tf.stack([third + third, third * 0, third * 0, gradient[0], third]), wire)
    found = tf.reshape(of_rows, [5, dim])
    np.testing.assert_allclose(tf.cast(found, tf.float32), tf.cast(expected, tf.float32), rtol=2**-7)


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
        dtype=dtype,
        combiners=[combiner],
        dims=[4],
        outer=[-1],
        weighted=[False],
    )
    divisor = {"sum": 1, "mean": 2, "sqrtn": np.sqrt(2)}[combiner]
    wide = rows.numpy().astype(np.float64)
    expected = np.stack([wide[1], np.zeros(4), (wide[0] + wide[2]) / divisor, wide[2]])
    np.testing.assert_allclose(pooled.numpy(), expected, rtol=2e-3 if dtype == tf.float16 else 1e-6)


@pytest.mark.parametrize("dim", [1, 2, 3, 4, 7, 8, 12, 16, 17, 24, 33, 64, 100, 128])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16, tf.bfloat16, tf.float64])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_and_gradients_of_any_width_are_summed_at_their_places(dim, dtype, weighted):
    """Two tables in one buffer, bags with many ids of a row, and none; beside NumPy."""
    rng = np.random.default_rng(dim)
    widths, rows_of = [dim, 3], [40, 11]
    compute = np.float64 if dtype == tf.float64 else np.float32
    rows = [tf.cast(rng.normal(size=[n, width]), dtype) for n, width in zip(rows_of, widths, strict=True)]
    flat = tf.concat([tf.reshape(one, [-1]) for one in rows], 0)
    numbers = [rng.integers(0, n, 600) for n in rows_of]
    places = [tf.constant(numbers[0] * dim), tf.constant(40 * dim + numbers[1] * 3)]
    splits = np.sort(np.concatenate([[0, 0, 600], rng.integers(0, 601, 9)]))
    weights = [rng.uniform(0.5, 2.0, 600).astype(compute) if weighted else np.ones(600, compute) for _ in widths]
    inputs = [tf.constant(splits)] * 2, [], [tf.constant(one) for one in weights] if weighted else []
    how = {"dims": widths, "outer": [-1, -1], "weighted": [weighted] * 2, "combiners": ["sum", "mean"]}
    pooled = raw.kv_exchange_pool(flat, places, *inputs, dtype=dtype, **how)
    gradients = [tf.cast(rng.normal(size=one.shape), dtype) for one in pooled]
    found = raw.kv_exchange_pool_gradient(
        tf.size(flat, out_type=tf.int64), gradients, places, *inputs, Tflat=dtype, **how
    )

    expected = []
    for t, (one, number, weight) in enumerate(zip(rows, numbers, weights, strict=True)):
        of_rows = np.zeros(one.shape)
        for bag, (begin, end) in enumerate(itertools.pairwise(splits)):
            ids, share = number[begin:end], weight[begin:end].astype(np.float64)
            divisor = share.sum() if t and end > begin else 1.0
            wanted = (tf.cast(one, tf.float64).numpy()[ids] * share[:, None]).sum(axis=0) / divisor
            tolerance = 2.0**-6 if dtype.size == 2 else 1e-4
            np.testing.assert_allclose(tf.cast(pooled[t][bag], tf.float64), wanted, rtol=tolerance, atol=tolerance)
            np.add.at(of_rows, ids, share[:, None] / divisor * tf.cast(gradients[t][bag], tf.float64).numpy())
        expected.append(of_rows.reshape(-1))
    tolerance = 2.0**-6 if dtype.size == 2 else 1e-4
    np.testing.assert_allclose(tf.cast(found, tf.float64), np.concatenate(expected), rtol=tolerance, atol=tolerance)


def test_a_variant_of_something_else_is_told():
    other = tf.reshape(tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=-1, element_dtype=tf.float32), [1])
    how = {"dims": [1], "outer": [-1], "weighted": [False], "combiners": ["sum"]}
    no_ids = [tf.zeros([0], tf.int64)], [tf.constant([0], tf.int64)], [], []
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected what KvSharedExchange gives"):
        raw.kv_exchange_pool(other, *no_ids, dtype=tf.float32, **how)
    with pytest.raises(tf.errors.InvalidArgumentError, match="expected what KvSharedExchange gives"):
        raw.kv_shared_exchange_size(other)


def test_an_exchange_of_ranks_that_are_not_connected_is_told():
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"among 2 ranks.*has 0: call sok.init\(\)"):
        raw.kv_shared_alltoall(tf.zeros([2]), [1, 1], exchange="lonely", ranks=2)
