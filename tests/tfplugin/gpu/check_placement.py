"""Where tables go, and that checkpoints go between CPU and GPU. Run by `test_gpu.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tables_on_gpu
import tensorflow as tf

import tfplugin
from tfplugin import kv_variable, placement

v1 = tf.compat.v1


@pytest.fixture(autouse=True)
def as_users_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "table_device", tables_on_gpu.wanted_device)


def make(device: str, name: str = "v", **kwargs: object) -> kv_variable.KvVariable:
    with tf.device(device):
        return tfplugin.get_kv_variable(
            name, embedding_dim=4, initializer=tf.keras.initializers.RandomNormal(seed=3), **kwargs
        )


def test_a_table_is_on_the_gpu_where_the_scope_says_so() -> None:
    assert make("/GPU:0").handle.device.endswith("GPU:0")
    assert make("/CPU:0").handle.device.endswith("CPU:0")


def test_without_a_scope_it_is_on_the_cpu_wherever_tensorflow_would_put_a_variable() -> None:
    with tf.device(None):
        table = tfplugin.get_kv_variable("v", embedding_dim=4)
        assert table.handle.device.endswith("CPU:0")
        assert tf.nn.embedding_lookup(table, [1]).device.endswith("CPU:0")
    with tables_on_gpu.plain_graph().as_default(), v1.Session() as session:
        table = tfplugin.get_kv_variable("v", embedding_dim=4)
        rows = tf.nn.embedding_lookup(table, [1, 2])
        metadata = v1.RunMetadata()
        session.run(v1.global_variables_initializer())
        session.run(rows, options=v1.RunOptions(output_partition_graphs=True), run_metadata=metadata)
        placed = {n.op: n.device for graph in metadata.partition_graphs for n in graph.node if n.op.startswith("Kv")}
        assert placed and all(device.endswith("CPU:0") for device in placed.values())


def test_the_same_rows_as_on_the_cpu() -> None:
    keys = tf.constant([[5, -1, 2**63 - 1], [-(2**63), 5, 0]], tf.int64)
    rows = [tf.nn.embedding_lookup(make(device), keys).numpy() for device in ("/CPU:0", "/GPU:0")]
    np.testing.assert_array_equal(*rows)


def test_rows_of_16_bits_are_looked_up_and_trained_as_they_are() -> None:
    """On a GPU: float32 is refused for lookups, and gradients of float32 are rounded before the update."""
    table = make("/GPU:0", "far", value_dtype=tf.float16)
    with pytest.raises(ValueError, match=r"'far' of float16 with output_dtype=float32: on a GPU .*tf.cast the rows"):
        table.sparse_read([1], output_dtype=tf.float32)
    before = tf.cast(table.sparse_read([1]), tf.float32)
    gradient = tf.IndexedSlices(tf.fill([1, 4], 0.5), tf.constant([1], tf.int64))
    tfplugin.optimizers.SGD(1.0).apply_gradients([(gradient, table)])
    np.testing.assert_allclose(tf.cast(table.sparse_read([1]), tf.float32), before - 0.5, atol=1e-3)


@pytest.mark.parametrize(("first", "second"), [("/CPU:0", "/GPU:0"), ("/GPU:0", "/CPU:0"), ("/GPU:0", "/GPU:0")])
def test_a_checkpoint_goes_from_one_to_the_other_and_trains_on(first: str, second: str, tmp_path: Path) -> None:
    keys = np.array([3, -7, 3, 11], np.int64)

    def step(table: kv_variable.KvVariable, optimizer: v1.train.Optimizer) -> tf.Operation:
        with tf.device("/CPU:0"):
            loss = tf.reduce_sum(tf.nn.embedding_lookup(table, keys) ** 2)
            return optimizer.minimize(loss, var_list=[table])

    def run(device: str, steps: int, restore: str | None) -> tuple[np.ndarray, str]:
        with tf.Graph().as_default(), v1.Session() as session:
            table = make(device, max_capacity=100)
            train = step(table, v1.train.AdamOptimizer(0.1))
            session.run(v1.global_variables_initializer())
            saver = v1.train.Saver()
            if restore is not None:
                saver.restore(session, restore)
            for _ in range(steps):
                session.run(train)
            found, rows = session.run(table.export())
            path = saver.save(session, str(tmp_path / f"{device[1:4]}-{steps}-{restore is None}"))
        order = np.argsort(found)
        return rows[order], path

    _, saved = run(first, 2, None)
    rows, _ = run(second, 3, saved)
    np.testing.assert_array_equal(rows, run("/CPU:0", 3, run("/CPU:0", 2, None)[1])[0])


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "slices"])
@pytest.mark.parametrize("name", ["SGD", "Adam", "GroupAdam", "Lamb", "Ftrl"])
def test_ordinary_variables_are_updated_as_on_the_cpu(name: str, sparse: bool) -> None:
    """Rows that are cut, rows that are not, and what goes by way of the host."""
    rng = np.random.default_rng(5)

    def trained(device: str, shape: tuple[int, ...], dtype: tf.DType, draws: list[np.ndarray]) -> np.ndarray:
        with tf.device(device):
            variable = tf.Variable(tf.cast(draws[0], dtype))
        assert variable.device.endswith(device)
        optimizer = getattr(tfplugin.optimizers, name)(0.1)
        for gradient in draws[1:]:
            part = tf.cast(gradient, dtype)
            if sparse:
                part = tf.IndexedSlices(tf.concat([part, part], 0), tf.constant([*range(shape[0])] * 2, tf.int64))
            optimizer.apply_gradients([(part, variable)])
        return tf.cast(variable, tf.float64).numpy()

    for shape in [(7,), (3, 70), (40, 5, 2), (2, 0), (1, 70000), *([] if sparse else [()])]:
        for dtype in (tf.float32, tf.float16):
            draws = [rng.normal(size=shape) for _ in range(3)]
            rows = [trained(device, shape, dtype, draws) for device in ("CPU:0", "GPU:0")]
            np.testing.assert_array_equal(*rows, err_msg=f"{shape} {dtype}")
