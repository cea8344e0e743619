"""What TFRA documents, for every pair of dtypes that its tables have, against a dictionary and NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfplugin import dynamic_embedding as de

FLOATS = ["float16", "bfloat16", "float32", "float64"]
PAIRS = (
    [("int64", v) for v in [*FLOATS, "int8", "int32", "int64", "string"]]
    + [("int32", v) for v in ["bfloat16", "float32", "float64", "int32"]]
    + [("string", v) for v in [*FLOATS, "int8", "int32", "int64", "bool"]]
)
TRAINED = [(k, v) for k, v in PAIRS if v in FLOATS]
DIM = 3


def array_of(dtype: str) -> Any:
    return object if dtype == "string" else tf.as_dtype(dtype).as_numpy_dtype


def keys_of(dtype: str) -> np.ndarray:
    """Keys at the ends of their range, around zero, and those that other tables reserve."""
    if dtype == "string":
        return np.array([b"", b"\0", b"a", b"b", b"ab", "ключ".encode(), b"x" * 200, b"0", b"-1", b"\xff"], object)
    ends = np.iinfo(dtype)
    near = [ends.min, ends.min + 1, ends.max, ends.max - 1, 0, -1, 1, -7, 8, 12345]
    return np.array(near, dtype)


def values_of(dtype: str, rng: np.random.Generator, rows: int) -> np.ndarray:
    if dtype == "string":
        return np.array([[b"%d" % n for n in row] for row in rng.integers(0, 99, [rows, DIM])], object).reshape(-1, DIM)
    if dtype == "bool":
        return rng.integers(0, 2, [rows, DIM]).astype(bool)
    return rng.integers(-60, 60, [rows, DIM]).astype(array_of(dtype))


class Held:
    """What a variable ought to hold."""

    def __init__(self, initial: Any) -> None:
        self.rows: dict[Any, list[Any]] = {}
        self.initial = [initial] * DIM

    def upsert(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.rows |= dict(zip(keys.tolist(), values.tolist(), strict=True))

    def accum(self, keys: np.ndarray, old: np.ndarray, new: np.ndarray, exists: np.ndarray) -> None:
        for key, before, after, there in zip(keys.tolist(), old, new, exists.tolist(), strict=True):
            if there and key in self.rows:
                held = np.array(self.rows[key], new.dtype)
                self.rows[key] = (held + (after - before)).tolist()
            elif not there and key not in self.rows:
                self.rows[key] = after.tolist()

    def remove(self, keys: np.ndarray) -> None:
        for key in keys.tolist():
            self.rows.pop(key, None)

    def lookup(self, keys: np.ndarray) -> tuple[list[Any], list[bool]]:
        flat = keys.reshape(-1).tolist()
        rows = np.empty([len(flat), DIM], object)
        for i, key in enumerate(flat):
            rows[i] = self.rows.get(key, self.initial)
        found = np.array([key in self.rows for key in flat], bool)
        return rows.reshape([*keys.shape, DIM]).tolist(), found.reshape(keys.shape).tolist()


@pytest.mark.parametrize(("key_dtype", "value_dtype"), PAIRS, ids=lambda d: d)
def test_reads_and_writes(mode, name, devices, key_dtype, value_dtype):
    initial = {"string": "none", "bool": True}.get(value_dtype, 2)
    v = de.Variable(
        tf.as_dtype(key_dtype), tf.as_dtype(value_dtype), DIM, devices=devices, name=name, initializer=initial
    )
    held = Held(initial.encode() if isinstance(initial, str) else initial)
    rng = np.random.default_rng(len(devices))
    keys = keys_of(key_dtype)

    def check() -> None:
        asked = rng.choice(keys, [3, 4])
        rows, exists = mode(lambda k: v.lookup(k, return_exists=True), asked)
        expected, there = held.lookup(asked)
        assert rows.tolist() == expected and exists.tolist() == there
        exported, values = mode(lambda: v.export())
        assert dict(zip(exported.tolist(), values.tolist(), strict=True)) == held.rows
        assert len(exported) == len(held.rows) == int(mode(lambda: v.size()))
        assert sum(int(mode(lambda i=i: v.size(i))) for i in range(len(devices))) == len(held.rows)

    check()
    # Some keys come twice: the last value stays.
    written = rng.choice(keys[:6], 8)
    values = values_of(value_dtype, rng, 8)
    mode(lambda k, r: v.upsert(k, r), written, values)
    held.upsert(written, values)
    check()
    if value_dtype not in ("string", "bool"):
        # Each key once: those that are there and those that are not, told right and told wrong.
        added, exists = rng.permutation(keys), rng.integers(0, 2, len(keys)).astype(bool)
        old, new = (values_of(value_dtype, rng, len(keys)) // 2 for _ in range(2))
        mode(lambda *a: v.accum(*a), added, old, new, exists)
        held.accum(added, old, new, exists)
        check()
    gone = keys[2:8]
    mode(lambda k: v.remove(k), gone)
    held.remove(gone)
    check()
    # Nothing at all.
    none = keys[:0]
    mode(lambda k, r: v.upsert(k, r), none, values_of(value_dtype, rng, 0))
    mode(lambda k: v.remove(k), none)
    assert mode(lambda k: v.lookup(k), none).shape == (0, DIM)
    check()
    mode(lambda: v.clear())
    held.rows.clear()
    check()


@pytest.mark.parametrize(("key_dtype", "value_dtype"), TRAINED, ids=lambda d: d)
def test_a_step_inserts_what_was_looked_up_and_a_lookup_nothing(mode, name, devices, key_dtype, value_dtype):
    keys = keys_of(key_dtype)
    v = de.Variable(
        tf.as_dtype(key_dtype),
        tf.as_dtype(value_dtype),
        DIM,
        devices=devices,
        name=name,
        initializer=1.0,
        restrict_policy=de.FrequencyRestrictPolicy,
    )
    optimizer = de.DynamicEmbeddingOptimizer(tf.compat.v1.train.MomentumOptimizer(0.5, 0.5))
    # The gradient of the first key is zero, and the second comes twice.
    ids = keys[[0, 1, 1, 2]]
    factors = np.array([[0], [1], [2], [4]]).astype(array_of(value_dtype))

    def loss(k: tf.Tensor, f: tf.Tensor) -> tuple[tf.Tensor, Any]:
        rows, trainable = de.embedding_lookup(v, k, name="x", return_trainable=True)
        return tf.reduce_sum(rows * f), trainable

    def forward(k: tf.Tensor, f: tf.Tensor) -> tf.Tensor:
        return loss(k, f)[0]

    assert float(mode(forward, ids, factors)) == 7 * DIM
    assert int(mode(lambda: v.size())) == 0

    if mode.name == "graph":
        total, trainable = loss(tf.constant(ids), tf.constant(factors))
        step = optimizer.minimize(total, var_list=[trainable])
        mode.session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(2):
            mode.session.run(step)
    else:
        shadow = v.get_trainable_by_name("x")

        def step(k: tf.Tensor, f: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                total = forward(k, f)
            gradient = tape.gradient(total, shadow)
            optimizer.apply_gradients([(gradient, shadow)])
            return total

        run = tf.function(step) if mode.name == "function" else step
        for _ in range(2):
            run(tf.constant(ids), tf.constant(factors))

    # Two steps of momentum in NumPy: the moving sum is g, then 1.5 g.
    expected = {ids[0]: 1.0, ids[1]: 1 - 0.5 * 3 * 2.5, ids[3]: 1 - 0.5 * 4 * 2.5}
    exported, rows = mode(lambda: v.export())
    assert dict(zip(exported.tolist(), rows.tolist(), strict=True)) == {k: [x] * DIM for k, x in expected.items()}
    (slot,) = v.get_slot_variables(optimizer)
    moved = dict(zip(*[column.tolist() for column in mode(lambda: slot.export())], strict=True))
    assert moved == {ids[0]: [0] * DIM, ids[1]: [4.5] * DIM, ids[3]: [6] * DIM}
    counts = dict(zip(*[column.tolist() for column in mode(lambda: v.restrict_policy.status.export())], strict=True))
    assert counts == {key: [2] for key in expected}

    # Each table keeps its share, one row, with its slot and its count.
    sizes = [int(mode(lambda i=i: v.size(i))) for i in range(len(devices))]
    mode(lambda: v.restrict(num_reserved=len(devices), trigger=2))
    assert [int(mode(lambda i=i: v.size(i))) for i in range(len(devices))] == [min(1, size) for size in sizes]
    left = set(mode(lambda: v.export())[0].tolist())
    assert left <= set(expected)
    assert set(mode(lambda: slot.export())[0].tolist()) == left
    assert set(mode(lambda: v.restrict_policy.status.export())[0].tolist()) == left
