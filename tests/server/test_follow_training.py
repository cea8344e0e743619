"""What a real training run writes, followed as it comes: the answers are those of the chain folded, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

import tfplugin  # noqa: E402
from kvtools.chain_fold import open_chain  # noqa: E402
from kvtools.server.catalog import Catalog  # noqa: E402
from kvtools.server.follower import Follower  # noqa: E402
from kvtools.server.settings import Settings  # noqa: E402

pytestmark = pytest.mark.thorough


def test_every_member_is_served_as_the_chain_folds(tmp_path: Path) -> None:
    tables = [
        tf.get_kv_variable("user", embedding_dim=4, max_capacity=400),
        tf.get_kv_variable("item", embedding_dim=3, partitioner=tf.compat.v1.fixed_size_partitioner(3)),
    ]
    optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(0.01))
    rng = np.random.default_rng(0)

    def step(ids: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2) for table in tables])
        variables = [tables[0], *tables[1]]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    step(tf.range(300, dtype=tf.int64))
    checkpoint = tf.train.Checkpoint(user=tables[0], item=tables[1], optimizer=optimizer)
    manager = tfplugin.CheckpointManager(checkpoint, tmp_path / "run", full_every=1e6, delta_every=1e6)
    manager.save()
    manager.sync()
    catalog = Catalog()
    follower = Follower(catalog, "default", tmp_path / "run", Settings(cache=tmp_path / "cache"))
    follower.load()
    for number in range(12):
        for _ in range(3):
            step(tf.constant(rng.integers(0, 1500, 64)))
        if number == 5:
            manager = tfplugin.CheckpointManager(checkpoint, tmp_path / "run", full_every=1e6, delta_every=1e6)
            manager.restore_or_initialize()  # another process goes on with the chain
            step(tf.constant(rng.integers(0, 1500, 64)))
        tables[1].remove(rng.integers(0, 1500, 20))
        manager.save()
        manager.sync()
        follower._look()
        assert not follower.status.refused and follower.status.behind is None
        served = catalog.version().store.tables
        folded = open_chain(tmp_path / "run").tables
        assert served.keys() == folded.keys()
        for name, table in folded.items():
            whole = table.to_numpy()
            values, found = served[name].lookup(whole.keys)
            assert whole.values is not None
            assert found.all() and values.tobytes() == whole.values.tobytes()
            assert served[name].table.rows == len(whole.keys)
            absent = np.setdiff1d(np.arange(1600), whole.keys)
            assert not served[name].lookup(absent)[1].any()
    assert catalog.version().number == manager_number(tmp_path / "run") and follower.status.applied >= 6


def manager_number(folder: Path) -> int:
    from kvtools.chain import members

    return members(folder)[-1].number
