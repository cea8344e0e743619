"""The index in an exported model: of whatever kind, it finds the rows of keys that are there, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvtools
from kvtools.dialects.bundle import Bundle, BundleWriter
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError, CorruptFileError, UsageError
from kvtools.export import export_saved_model
from kvtools.indexed_rows import INDEXES, slot_order
from kvtools.model_digest import sealed
from kvtools.perfect_hash import perfect_hash
from kvtools.slot_order import SlotOrderWriter
from kvtools.stock_model.fields import messages, split
from kvtools.stock_model.meta_graph import MetaGraph

pytestmark = pytest.mark.usefixtures("tf")
KEYS = {
    "extreme": np.array([0, 1, -1, 2**63 - 1, -(2**63), 2**32, -(2**32), 2**31, 7]),
    "one": np.array([-5]),
    "zero": np.array([0]),
    "none": np.array([], np.int64),
    "many": np.unique(np.random.default_rng(3).integers(-(2**63), 2**63 - 1, 5_000)),
    "uint64": np.array([0, 2**64 - 1, 2**63, 5], np.uint64),
    "int32": np.array([0, 2**31 - 1, -(2**31), -9], np.int32),
}


def as_ids(keys: np.ndarray) -> np.ndarray:
    return keys.view(np.int64) if keys.dtype == np.uint64 else keys.astype(np.int64)


def not_there(keys: np.ndarray) -> np.ndarray:
    """Ids that are no keys, near those that are and far from them."""
    ids = as_ids(keys)
    asked = np.concatenate([ids + 1, ids ^ (1 << 40), -ids, np.arange(-20, 20), [2**63 - 1, -(2**63)]])
    return np.setdiff1d(asked, ids)


@pytest.fixture(scope="module")
def values() -> dict[str, np.ndarray]:
    random = np.random.default_rng(4)
    return {name: random.standard_normal((len(keys), 3)).astype(np.float32) for name, keys in KEYS.items()}


@pytest.fixture(scope="module")
def folders(values: dict[str, np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of all these tables by each kind of index."""
    folder = tmp_path_factory.mktemp("exports")
    tables = [kvtools.table_from_arrays(name, keys, values[name]) for name, keys in KEYS.items()]
    kvtools.write_tables(tables, folder / "checkpoint", "tfplugin")
    for index in INDEXES:
        export_saved_model(open_checkpoint(folder / "checkpoint"), folder / index, index=index)
    return {index: folder / index for index in INDEXES}


@pytest.mark.parametrize("index", INDEXES)
def test_rows_are_those_of_the_keys(
    tf: Any, folders: dict[str, Path], values: dict[str, np.ndarray], index: str
) -> None:
    model = tf.saved_model.load(str(folders[index]))
    for name, keys in KEYS.items():
        there, missing = as_ids(keys), not_there(keys)
        got = model.signatures[name](ids=tf.constant(np.concatenate([there, missing])[:, None], tf.int64))
        assert got["found"].numpy()[:, 0].tolist() == [True] * len(there) + [False] * len(missing)
        rows = got["embeddings"].numpy()[:, 0]
        np.testing.assert_array_equal(rows[: len(there)], values[name])
        assert not rows[len(there) :].any()
        assert model.signatures[name](ids=tf.constant(0, tf.int64))["found"].shape == []


def test_the_slots_in_the_graph_are_those_of_numpy(tf: Any, folders: dict[str, Path]) -> None:
    """Row i of the values is in the slot that `PerfectHash` says."""
    bundle = Bundle(folders["perfect"] / "variables" / "variables")
    for number, (_, keys) in enumerate(sorted(KEYS.items())):
        stored = bundle.tensor(f"tables/{number}/keys/.ATTRIBUTES/VARIABLE_VALUE").read()
        found = perfect_hash(as_ids(keys))
        np.testing.assert_array_equal(stored[found.slots_of(as_ids(keys))], as_ids(keys))
        pilots = bundle.tensor(f"tables/{number}/index/.ATTRIBUTES/VARIABLE_VALUE").read()
        np.testing.assert_array_equal(pilots, found.pilots)


def test_the_perfect_index_is_compiled_by_xla(tf: Any, folders: dict[str, Path], values: dict[str, np.ndarray]) -> None:
    model = tf.saved_model.load(str(folders["perfect"]))
    for name in ("extreme", "many", "none"):
        ids = np.concatenate([as_ids(KEYS[name]), not_there(KEYS[name])[:50]])
        look_up = tf.function(lambda ids, name=name: model.signatures[name](ids=ids), jit_compile=True, autograph=False)
        expected = model.signatures[name](ids=tf.constant(ids))
        got = look_up(tf.constant(ids))
        for output in ("embeddings", "found"):
            np.testing.assert_array_equal(got[output], expected[output])


@pytest.mark.parametrize("index", INDEXES)
def test_a_session_of_tensorflow_1(
    tf: Any, folders: dict[str, Path], values: dict[str, np.ndarray], index: str
) -> None:
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(folders[index]))
        signature = meta.signature_def["serving_default"]
        feed = {signature.inputs[f"{name}_ids"].name: as_ids(keys) for name, keys in KEYS.items()}
        got = session.run({key: info.name for key, info in signature.outputs.items()}, feed)
    for name, rows in values.items():
        np.testing.assert_array_equal(got[f"{name}_embeddings"], rows)
        assert got[f"{name}_found"].all()


def test_nothing_is_built_when_a_perfect_index_is_loaded(folders: dict[str, Path]) -> None:
    def operations(index: str) -> set[str]:
        (data,) = messages(split((folders[index] / "saved_model.pb").read_bytes()), 2)
        return {node.op for _, node in MetaGraph.decode(data).graph.all_nodes()}

    tables = {"HashTableV2", "LookupTableFindV2", "InitializeTableV2"}
    assert tables <= operations("hash") and not tables & operations("perfect")
    # What converters to smaller runtimes do not know of int64.
    assert not {"RightShift", "BitwiseXor", "BitwiseAnd", "FloorDiv"} & operations("perfect")


@pytest.mark.parametrize("index", INDEXES)
def test_an_export_is_read_back(folders: dict[str, Path], values: dict[str, np.ndarray], index: str) -> None:
    checkpoint = open_checkpoint(folders[index])
    assert checkpoint.variables == ()
    for name, keys in KEYS.items():
        table = checkpoint.table(name)
        assert (table.rows, table.key_dtype) == (len(keys), keys.dtype)
        read = [chunk for chunk in table.chunks(rows=700)]
        got = {key: row for chunk in read for key, row in zip(chunk.keys.tolist(), chunk.values.tolist(), strict=True)}
        assert got == dict(zip(keys.tolist(), values[name].tolist(), strict=True))
        every_third = np.arange(0, len(keys), 3)
        taken = table.take(every_third)
        np.testing.assert_array_equal(taken.keys, table.all_keys()[every_third])
        assert all(got[key] == row for key, row in zip(taken.keys.tolist(), taken.values.tolist(), strict=True))


def test_an_export_of_an_export(
    tf: Any, folders: dict[str, Path], values: dict[str, np.ndarray], tmp_path: Path
) -> None:
    export_saved_model(open_checkpoint(folders["perfect"]), tmp_path / "again", index="hash")
    model = tf.saved_model.load(str(tmp_path / "again"))
    got = model.signatures["many"](ids=tf.constant(KEYS["many"]))["embeddings"]
    np.testing.assert_array_equal(got, values["many"])


def test_free_slots_that_a_manifest_tells_wrong(folders: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(folders["perfect"])
    export_saved_model(checkpoint, tmp_path / "out", tables=["many"], index="perfect")
    path = tmp_path / "out" / "assets.extra" / "kvtools.json"
    manifest = json.loads(path.read_text())
    manifest["tables"][0]["free_slots"]["key"] += 1
    path.write_text(json.dumps(sealed(manifest)))
    with pytest.raises(CorruptFileError, match="keys in its slots, expected"):
        list(open_checkpoint(tmp_path / "out").table("many").chunks())


@pytest.mark.parametrize("memory", [0, 100 * 12, 300 * 12, 899 * 12, 1 << 20])
@pytest.mark.parametrize("group_bytes", [1, 12, 100, 1 << 20])
def test_rows_that_come_in_any_order_are_written_in_that_of_their_places(
    tmp_path: Path, group_bytes: int, memory: int
) -> None:
    random = np.random.default_rng(5)
    places = random.permutation(900)[:800]
    rows = random.standard_normal((800, 3)).astype(np.float32)
    behind = np.float32([[0, 0, 0], [7, 8, 9]])
    expected = np.zeros((902, 3), np.float32)
    expected[places], expected[900:] = rows, behind
    with BundleWriter(tmp_path / "ckpt") as bundle:
        bundle.array("before", np.arange(3))
        sizes = {"group_bytes": group_bytes, "memory": memory}
        with SlotOrderWriter(bundle, "rows", rows.dtype, (3,), 900, behind, **sizes) as writer:
            for start in range(0, 800, 130):
                writer.put(places[start : start + 130], rows[start : start + 130])
        bundle.array("after", np.arange(4))
        with SlotOrderWriter(bundle, "again", rows.dtype, (3,), 900, behind, most_turns=4, **sizes) as writer:
            assert writer.turns == {300 * 12: 3, 899 * 12: 2}.get(memory, 1)
            for _ in range(writer.turns):
                for start in range(0, 800, 130):
                    writer.put(places[start : start + 130], rows[start : start + 130])
                writer.end_turn()
    read = Bundle(tmp_path / "ckpt")
    np.testing.assert_array_equal(read.tensor("rows").read(), expected)
    np.testing.assert_array_equal(read.tensor("again").read(), expected)
    assert read.tensor("after").read().tolist() == [0, 1, 2, 3]
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith("ckpt")]


def test_there_is_no_such_index(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="got index 'b-tree', expected one of hash, perfect"):
        export_saved_model(open_checkpoint(folders["hash"]), tmp_path / "out", index="b-tree")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_table_that_changes_while_it_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = kvtools.table_from_arrays("emb", np.arange(10), np.ones((10, 2), np.float32))
    kvtools.write_tables([table], tmp_path / "checkpoint", "tfplugin")
    before = slot_order(np.arange(100, 110))
    monkeypatch.setattr("kvtools.export.slot_order", lambda keys: before)
    with pytest.raises(BadInputError, match="table 'emb': it has other keys than when its index was made"):
        export_saved_model(open_checkpoint(tmp_path / "checkpoint"), tmp_path / "out", index="perfect")
    assert not (tmp_path / "out").exists()
