"""One training step: distinct keys updated once, whatever the batch, wherever the rows were remembered."""

import ml_dtypes
import numpy as np
import pytest

from kvtools._kvtable import Table

SGD = {"learning_rate": 0.5}
NO_POSITION = np.uint64(2**64 - 1)


def adam(step: int) -> dict[str, float]:
    return {"learning_rate": 0.1, "beta_1_power": 0.9**step, "beta_2_power": 0.999**step}


def adam_table(dim: int, **options) -> Table:
    return Table("int64", "float32", dim, slots=[("m", dim), ("v", dim)], **options)


@pytest.mark.parametrize("n", [0, 1, 3, 200, 50_000])
def test_gradients_of_equal_keys_are_summed_and_applied_once(n):
    rng = np.random.default_rng(n)
    keys = rng.integers(-(n // 3) - 1, n // 3 + 1, n)
    gradients = rng.integers(-9, 9, (n, 4)).astype(np.float32)
    table = Table("int64", "float32", 4, initializer=1.0, threads=2)
    unique, inverse = np.unique(keys, return_inverse=True)
    assert table.apply("sgd", keys, gradients, SGD, version=9) == (len(unique), 0)
    expected = np.zeros((len(unique), 4), np.float32)
    np.add.at(expected, inverse, gradients)
    np.testing.assert_array_equal(table.gather(unique), 1 - 0.5 * expected)
    freqs, versions = table.gather_stamps(unique)
    assert (freqs == 1).all()  # one update, however often the key occurred
    assert (versions == 9).all()
    assert len(table) == len(unique)


def test_duplicates_are_summed_in_the_order_of_the_batch():
    gradients = np.array([[1e8], [1.0], [-1e8], [1.0]], np.float32)
    table = Table("int64", "float32", 1)
    table.apply("sgd", np.zeros(4, np.int64), gradients, {"learning_rate": 1.0})
    total = np.float32(0)
    for gradient in gradients[:, 0]:
        total = np.float32(total + gradient)
    assert table.gather(np.zeros(1, np.int64))[0, 0] == -total


def test_every_key_and_value_dtype(key_dtype, value_dtype, make_keys):
    keys = make_keys(300)
    batch = np.concatenate([keys, keys[:100]])
    gradients = np.ones((len(batch), 3), value_dtype)
    table = Table(key_dtype, value_dtype, 3, initializer=2.0)
    assert table.apply("sgd", batch, gradients, SGD) == (300, 0)
    expected = np.full((300, 3), 1.5, value_dtype)
    expected[:100] = 1.0
    np.testing.assert_array_equal(table.gather(keys), expected)


def test_sixteen_bit_gradients_are_summed_in_float32():
    n = 1000
    table = Table("int64", ml_dtypes.bfloat16, 1)
    gradients = np.full((n, 1), 1.0, ml_dtypes.bfloat16)
    table.apply("sgd", np.zeros(n, np.int64), gradients, {"learning_rate": 1.0})
    assert table.gather(np.zeros(1, np.int64))[0, 0] == ml_dtypes.bfloat16(-1000.0)  # 256 if summed in bfloat16


def test_a_missing_key_starts_from_its_initial_value_and_slots():
    dim = 5
    initializer = {"kind": "uniform", "low": -1.0, "high": 1.0, "seed": 3}
    table, looked_up = adam_table(dim, initializer=initializer), adam_table(dim, initializer=initializer)
    keys = np.arange(100)
    looked_up.gather_or_insert(keys)
    gradients = np.random.default_rng(0).normal(size=(100, dim)).astype(np.float32)
    for each in (table, looked_up):
        each.apply("adam", keys, gradients, adam(1), slots=["m", "v"])
    for a, b in zip(
        table.gather_columns(keys, ["value", "m", "v"]),
        looked_up.gather_columns(keys, ["value", "m", "v"]),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_slots_are_found_by_name_wherever_they_lie():
    dim = 3
    plain = adam_table(dim)
    other = Table("int64", "float32", dim, slots=[("v", dim), ("extra", 2, "constant", 7.0), ("m", dim)])
    rng = np.random.default_rng(0)
    for step in range(1, 5):
        keys = rng.integers(0, 50, 80)
        gradients = rng.normal(size=(80, dim)).astype(np.float32)
        for table in (plain, other):
            table.apply("adam", keys, gradients, adam(step), slots=["m", "v"])
    keys = np.arange(50)
    for column in ("value", "m", "v"):
        np.testing.assert_array_equal(*(table.gather_columns(keys, [column])[0] for table in (plain, other)))
    assert (other.gather_columns(keys, ["extra"])[0] == 7.0).all()


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_nothing(threads):
    rng = np.random.default_rng(1)
    reference, table = adam_table(7, threads=1, shards=1), adam_table(7, threads=threads, shards=64)
    for step in range(1, 4):
        keys = rng.zipf(1.2, 30_000) % 5000
        gradients = rng.normal(size=(30_000, 7)).astype(np.float32)
        for each in (reference, table):
            each.apply("adam", keys, gradients, adam(step), slots=["m", "v"])
    keys = np.arange(5000)
    np.testing.assert_array_equal(reference.gather(keys), table.gather(keys))


# ---- Remembered positions: with one shard, rows are numbered in the order of insertion ----


def remembered(n: int) -> tuple[Table, np.ndarray, np.ndarray]:
    table = Table("int64", "float32", 2, shards=1, threads=1)
    keys = np.random.default_rng(n).permutation(n) - n // 2
    table.gather_or_insert(keys)
    return table, keys, np.arange(n, dtype=np.uint64)


def check_applied(table: Table, keys: np.ndarray) -> None:
    np.testing.assert_array_equal(table.gather(keys), np.full((len(keys), 2), -0.5, np.float32))


def test_remembered_rows_are_updated():
    table, keys, positions = remembered(3000)
    table.apply("sgd", keys, np.ones((3000, 2), np.float32), SGD, positions=positions)
    check_applied(table, keys)


@pytest.mark.parametrize("wrong", ["shuffled", "none", "beyond", "other shard"])
def test_wrong_positions_change_nothing(wrong):
    table, keys, positions = remembered(3000)
    positions = {
        "shuffled": positions[::-1].copy(),
        "none": np.full(3000, NO_POSITION),
        "beyond": positions + np.uint64(3000),
        "other shard": positions | np.uint64(5 << 32),
    }[wrong]
    table.apply("sgd", keys, np.ones((3000, 2), np.float32), SGD, positions=positions)
    check_applied(table, keys)
    assert len(table) == 3000


@pytest.mark.parametrize("gone", ["removed", "removed and reused", "cleared", "cleared and refilled", "relaid"])
def test_positions_outlive_what_happens_to_their_rows(gone):
    table, keys, positions = remembered(3000)
    if gone.startswith("removed"):
        table.remove(keys[::2].copy())
    elif gone.startswith("cleared"):
        table.clear()
    else:
        table.ensure_slots([("m", 2)])
    if gone.endswith("reused"):
        table.gather_or_insert(np.arange(10_000, 11_500))
    elif gone.endswith("refilled"):
        table.gather_or_insert(keys[::-1].copy())
    others = len(table)
    table.apply("sgd", keys, np.ones((3000, 2), np.float32), SGD, positions=positions)
    check_applied(table, keys)
    if gone == "removed and reused":
        assert len(table) == others + 1500
        assert (table.gather(np.arange(10_000, 11_500)) == 0).all()
    else:
        assert len(table) == 3000


# ---- What cannot be applied ----


def test_gradients_that_are_not_finite_are_applied_as_arithmetic_has_it():
    table = Table("int64", "float32", 2)
    assert table.apply("sgd", np.array([1, 2]), np.array([[np.nan, 1], [np.inf, 2]], np.float32), SGD) == (2, 0)
    np.testing.assert_array_equal(table.gather(np.array([1, 2])), [[np.nan, -0.5], [-np.inf, -1]])
    assert table.skipped_updates == 0


@pytest.mark.parametrize("value_dtype", [np.float32, ml_dtypes.bfloat16])
def test_rows_with_gradients_that_are_not_finite_can_be_left_alone_and_counted(value_dtype):
    table = Table("int64", value_dtype, 2)
    keys = np.array([1, 2, 3, 2, 4, 4])
    gradients = np.array([[1, 1], [np.inf, 1], [2, np.nan], [-np.inf, 1], [1, 1], [1, 1]], value_dtype)
    assert table.apply("sgd", keys, gradients, SGD, skip_nonfinite=True) == (2, 2)
    assert table.skipped_updates == 2
    np.testing.assert_array_equal(table.contains(np.array([1, 2, 3, 4])), [True, False, False, True])
    np.testing.assert_array_equal(table.gather(np.array([1, 4])), np.array([[-0.5, -0.5], [-1, -1]], value_dtype))


@pytest.mark.parametrize(
    ("optimizer", "slots", "hyperparameters", "message"),
    [
        ("adma", [], SGD, "no optimizer 'adma'"),
        ("sgd", [], {}, "needs the hyperparameter 'learning_rate'"),
        ("sgd", [], {"learning_rate": 0.1, "rate": 1}, "no hyperparameter 'rate'"),
        ("sgd", [], {"learning_rate": np.nan}, "learning_rate = nan; expected a finite number"),
        ("sgd", [], {"learning_rate": 0.1, "weight_decay": -1}, "weight_decay = -1"),
        ("sgd", ["m"], SGD, "keeps 0 slots"),
        ("adam", ["m"], adam(1), "keeps 2 slots"),
        ("adam", ["m", "narrow"], adam(1), "2 elements wide"),
        ("adam", ["m", "m2"], adam(1), "no column 'm2'"),
        ("adam", ["m", "v"], adam(1) | {"beta_1": 1.0}, "beta_1 = 1.*; expected at least 0 and less than 1"),
    ],
)
def test_an_impossible_step_says_why_and_changes_nothing(optimizer, slots, hyperparameters, message):
    table = Table("int64", "float32", 3, slots=[("m", 3), ("v", 3), ("narrow", 2)])
    table.gather_or_insert(np.arange(5))
    with pytest.raises((ValueError, RuntimeError), match=message):
        table.apply(optimizer, np.arange(10), np.ones((10, 3), np.float32), hyperparameters, slots=slots)
    assert len(table) == 5
    assert (table.gather_stamps(np.arange(10))[0] == 0).all()
    assert (table.gather(np.arange(10)) == 0).all()


def test_gradients_of_another_shape_or_dtype_are_refused():
    table = Table("int64", "float32", 3)
    with pytest.raises(ValueError, match=r"gradients.*\(10, 3\)"):
        table.apply("sgd", np.arange(10), np.ones((10, 4), np.float32), SGD)
    with pytest.raises((TypeError, ValueError), match="gradients"):
        table.apply("sgd", np.arange(10), np.ones((10, 3), np.float64), SGD)
    assert len(table) == 0


# ---- Marks of zeroed rows ----


def test_rows_imported_as_zeros_are_marked_until_they_are_written():
    table = Table("int64", "float32", 2)
    keys = np.arange(200)
    values = np.zeros((200, 2), np.float32)
    values[::2, 1] = 1
    table.import_rows(keys, {0: values})
    np.testing.assert_array_equal(table.zeroed(keys), keys % 2 == 1)
    assert table.zeroed_rows == 100
    table.apply("sgd", keys[:20].copy(), np.ones((20, 2), np.float32), SGD)
    assert table.zeroed_rows == 90
    table.remove(keys[20:40].copy())
    assert table.zeroed_rows == 80
    assert not table.zeroed(np.array([21, 1000]))[0]
    table.clear()
    assert table.zeroed_rows == 0


def test_a_step_costs_memory_for_its_batch_only():
    table = adam_table(8, threads=1)
    table.gather_or_insert(np.arange(300_000))
    before = table.memory()
    keys = np.random.default_rng(0).integers(0, 300_000, 4096)
    table.apply("adam", keys, np.ones((4096, 8), np.float32), adam(1), slots=["m", "v"])
    assert table.memory() == before
    assert before["row_bytes"] == 300_000 * 8 * 4 * 3  # value and two slots, and not a byte more
