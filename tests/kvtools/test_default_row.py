"""The row of keys without one, in snapshots of tables all of whose rows begin alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.default_row import with_default_row
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint
from kvtools.export_snapshot import export_snapshot
from kvtools.migrate import write_tables
from kvtools.server.store import TableStore
from kvtools.snapshot import Snapshot

KEYS = np.arange(3)


def table(initializer: Any, dtype: Any = np.float32, **columns: Any) -> ArrayTable:
    metadata = {} if initializer is None else {"initializer": initializer}
    return ArrayTable("a/b", KEYS, np.ones((3, 2), dtype), metadata=metadata, **columns)


def default_row(reader: Any) -> Any:
    extras = [extra.name for extra in reader.schema.extras]
    return reader.extra("default_row").tolist() if "default_row" in extras else None


@pytest.mark.parametrize(
    ("initializer", "row"),
    [
        ({"kind": "constant", "a": 0.1}, [float(np.float32(0.1))] * 2),
        ({"kind": "constant"}, [0, 0]),
        ({"kind": "uniform", "a": 0.0, "b": 0.0}, None),
        ({"kind": "rows"}, None),
        ({"kind": "constant", "a": "x"}, None),
        ("zeros", None),
        (None, None),
    ],
)
def test_only_a_constant_tells_how_a_row_begins(initializer: Any, row: Any) -> None:
    assert default_row(with_default_row(table(initializer))) == row


def test_an_integer_table_has_the_constants_that_it_can_hold() -> None:
    assert default_row(with_default_row(table({"kind": "constant", "a": -3.0}, np.int8))) == [-3, -3]
    assert default_row(with_default_row(table({"kind": "constant", "a": 0.5}, np.int8))) is None


def test_a_default_row_that_is_there_stays() -> None:
    its_own = table({"kind": "constant", "a": 5.0}, extras={"default_row": np.float32([1, 2])})
    assert default_row(with_default_row(its_own)) == [1, 2]


@pytest.mark.parametrize("dtype", [None, "float16", "int8"])
def test_it_goes_along_in_any_type(tmp_path: Path, dtype: str | None) -> None:
    source = with_default_row(table({"kind": "constant", "a": 0.25}))
    out = tmp_path / "a.kvsnap"
    export_snapshot(Checkpoint(tmp_path, "memory", {"a/b": source}), out, dtype=dtype)
    assert Snapshot(out).table("a/b").native.default_row.tolist() == [0.25, 0.25]


def test_every_way_to_a_snapshot_writes_it(tmp_path: Path) -> None:
    source = table({"kind": "constant", "a": 0.25})
    write_tables([source], tmp_path / "source.npz", "npz")
    checkpoint = open_checkpoint(tmp_path / "source.npz")
    write_tables(checkpoint.select([]), tmp_path / "migrated.kvsnap", "snapshot", verify=True)
    export_snapshot(checkpoint, tmp_path / "exported.kvsnap")
    served = TableStore(tmp_path / "source.npz", cache=tmp_path / "cache").snapshot
    found = [Snapshot(tmp_path / "migrated.kvsnap"), Snapshot(tmp_path / "exported.kvsnap"), served]
    assert [one.table("a/b").native.default_row.tolist() for one in found] == [[0.25, 0.25]] * 3
    assert len({one.fingerprint for one in found}) == 1


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_it_is_the_row_that_training_gives_a_new_key(tf: Any, tmp_path: Path, dtype: str) -> None:
    pytest.importorskip("tfplugin")
    constant = 0.1 + 2**-12
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        initializer = tf.compat.v1.constant_initializer(constant)
        variable = tf.compat.v1.get_kv_variable("emb", 2, tf.int64, getattr(tf, dtype), initializer)
        session.run(tf.compat.v1.global_variables_initializer())
        (trained,) = session.run(tf.nn.embedding_lookup(variable, tf.constant([7], tf.int64)))
        path = tf.compat.v1.train.Saver().save(session, str(tmp_path / "model"))
    (reader,) = open_checkpoint(path).select([])
    assert with_default_row(reader).extra("default_row").tobytes() == trained.tobytes()
