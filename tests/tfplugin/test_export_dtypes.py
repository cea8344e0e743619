"""Whole models exported with rows in fewer bits: every way of looking rows up answers as those rows do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
from kvtools.check_model import check_model
from kvtools.cli.main import main
from kvtools.clip import Clip, Criteria
from kvtools.clip_policy import Policy
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError, CheckFailedError
from kvtools.export_model import ModelExport, export_model
from kvtools.lookup_model.messages import of_type
from kvtools.quantized_rows import decode, encode
from kvtools.server.saved_models import SavedModelStore, open_store
from kvtools.stock_model import stored_rows
from kvtools.stock_model.stock_ops import foreign_nodes
from tfplugin import dynamic_embedding as de

DTYPES = ("float16", "bfloat16", "int8", "int4")
IDS = tf.TensorSpec([None], tf.int64)
RANDOM = np.random.default_rng(0)


def fill(variable: Any, keys: Any) -> None:
    """Give a variable rows of random numbers."""
    rows = RANDOM.standard_normal((len(keys), variable.dim))
    variable.upsert(tf.constant(keys, variable.key_dtype), tf.constant(rows, variable.dtype))


class Model(tf.Module):
    """A signature for each way in which rows are looked up."""

    def __init__(self) -> None:
        super().__init__()
        parts = tf.compat.v1.fixed_size_partitioner(3)
        chosen = np.arange(28, dtype=np.float32).reshape(4, 7) / 10
        self.user = tfplugin.get_kv_variable("user", embedding_dim=16)
        self.item = tfplugin.get_kv_variable("item", embedding_dim=9, partitioner=parts, key_dtype=tf.int32)
        self.half = tfplugin.get_kv_variable("half", embedding_dim=32, value_dtype=tf.float16)
        self.double = tfplugin.get_kv_variable("double", embedding_dim=5, value_dtype=tf.float64)
        self.wide = tfplugin.get_kv_variable("wide", embedding_dim=1)
        self.drawn = de.get_variable("drawn", dim=5, initializer=tf.keras.initializers.RandomUniform(-1, 1))
        self.constant = de.get_variable("constant", dim=6, initializer=0.01)
        self.chosen = tfplugin.get_kv_variable(
            "chosen",
            embedding_dim=7,
            initializer=lambda shape, dtype=None: tf.tile(tf.constant(chosen), [shape[0] // 4, 1]),
        )
        for variable in (self.user, self.item, self.half, self.double, self.wide, self.chosen):
            fill(variable, np.arange(40))
        for variable in (self.drawn, self.constant):
            variable.upsert(np.arange(9), RANDOM.standard_normal((9, variable.dim)).astype(np.float32))

    @tf.function(input_signature=[IDS])
    def plain(self, ids: Any) -> Any:
        a, b = tfplugin.lookup_many([self.user, self.item], [ids, tf.cast(ids, tf.int32)])
        return {
            "user": tf.nn.embedding_lookup(self.user, ids),
            "item": tf.nn.embedding_lookup(self.item, tf.cast(ids, tf.int32)),
            "half": tf.gather(self.half, ids),
            "double": tf.gather(self.double, ids),
            "wide": tf.gather(self.wide, ids),
            "many": tf.concat([a, b], 1),
            "found": self.user.contains(ids),
        }

    @tf.function(input_signature=[tf.SparseTensorSpec([None, None], tf.int64)])
    def pooled(self, ids: Any) -> Any:
        items = tf.SparseTensor(ids.indices, tf.cast(ids.values, tf.int32), ids.dense_shape)
        return {
            "mean": tf.nn.embedding_lookup_sparse(self.user, ids, None, combiner="mean"),
            "safe": tf.nn.safe_embedding_lookup_sparse(self.user, ids, combiner="sqrtn"),
            "filled": tf.nn.safe_embedding_lookup_sparse(self.half, ids, combiner="sum", default_id=3),
            "item": tf.nn.embedding_lookup_sparse(self.item, items, None, combiner="sum"),
            "drawn": de.embedding_lookup_sparse(self.drawn, ids, None, name="pooled"),
        }

    @tf.function(input_signature=[IDS])
    def begun(self, ids: Any) -> Any:
        return {
            "drawn": de.embedding_lookup(self.drawn, ids, name="begun"),
            "constant": self.constant.lookup(ids),
            "chosen": self.chosen.sparse_read(ids, training=False, missing="initial"),
            "initial": self.user.sparse_read(ids, training=False, missing="initial"),
        }


SIGNATURES = ("plain", "pooled", "begun")


def request(signature: str, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Keys that are there, keys that are not, and keys that come twice."""
    if signature != "pooled":
        return {"ids": random.integers(-9, 60, 12)}
    sizes = random.integers(1, 4, 6)
    places = np.array([(row, column) for row in range(6) for column in range(sizes[row])], np.int64)
    return {"ids": places, "ids_1": random.integers(-9, 60, len(places)), "ids_2": np.array([6, 4], np.int64)}


def answers(model: Any, signature: str, fed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    function = model.signatures[signature]
    return {key: tensor.numpy() for key, tensor in function(**{k: tf.constant(v) for k, v in fed.items()}).items()}


def exported(source: Path, output: Path, **options: Any) -> ModelExport:
    return export_model(open_checkpoint(str(source)), output, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, as it was saved (`source`), and its exports."""
    folder = tmp_path_factory.mktemp("model")
    module = Model()
    tf.saved_model.save(module, str(folder / "source"), signatures={name: getattr(module, name) for name in SIGNATURES})
    for dtype in DTYPES:
        exported(folder / "source", folder / dtype, dtype=dtype)
    return folder


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, Any]:
    return {name: tf.saved_model.load(str(folder / name)) for name in ("source", *DTYPES)}


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype in ("int8", "int4"):
        return decode(encode(np.float32(values), dtype), dtype, values.shape[1])
    return values.astype(tf.as_dtype(dtype).as_numpy_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_what_the_type_holds_and_zeros_where_there_are_none(
    folder: Path, models: dict[str, Any], dtype: str
) -> None:
    source, export = (open_checkpoint(str(folder / name)) for name in ("source", dtype))
    for name, table in source.tables.items():
        kept = export.tables[name]
        before, after = table.to_numpy(), kept.to_numpy()
        assert before.values is not None and after.values is not None
        order, other = np.argsort(before.keys), np.argsort(after.keys)
        assert np.array_equal(before.keys[order], after.keys[other])
        narrow = kept.schema.rows_as or kept.schema.value_dtype
        assert narrow in (dtype, table.schema.value_dtype)
        expected = rounded(before.values, narrow)
        assert np.array_equal(after.values[other], expected[order])
    user = export.tables["user"].to_numpy()
    assert user.values is not None
    rows = dict(zip(user.keys.tolist(), np.float32(user.values), strict=True))
    asked = np.array([1, 2, 77, -5, 1, 1000])
    got = answers(models[dtype], "plain", {"ids": asked})["user"]
    assert np.array_equal(got, np.stack([rows.get(key, np.zeros(16, np.float32)) for key in asked.tolist()]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("signature", SIGNATURES)
def test_every_lookup_answers_nearly_as_the_model(models: dict[str, Any], signature: str, dtype: str) -> None:
    random = np.random.default_rng(1)
    # Sums of up to three rows, each off by half a step of about 5 / 15 at most.
    allowed = {"float16": 0.01, "bfloat16": 0.05, "int8": 0.05, "int4": 0.7}[dtype]
    differ = 0
    for _ in range(3):
        fed = request(signature, random)
        expected, got = answers(models["source"], signature, fed), answers(models[dtype], signature, fed)
        assert expected.keys() == got.keys()
        for name, array in expected.items():
            assert got[name].dtype == array.dtype and got[name].shape == array.shape
            assert np.abs(np.float64(got[name]) - np.float64(array)).max(initial=0) <= allowed
            differ += int((got[name] != array).sum())
    assert differ


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operation_is_stock_tensorflows(folder: Path, dtype: str) -> None:
    assert not list(foreign_nodes((folder / dtype / "saved_model.pb").read_bytes()))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_key_that_is_not_there_begins_as_in_the_model(models: dict[str, Any], dtype: str) -> None:
    """Drawn rows are computed, and rows of one number are exact."""
    fed = {"ids": np.arange(100, 140)}
    expected, got = answers(models["source"], "begun", fed), answers(models[dtype], "begun", fed)
    for name in ("drawn", "constant", "initial"):
        assert np.array_equal(got[name], expected[name])
    narrow = rounded(expected["chosen"], dtype)
    assert np.array_equal(got["chosen"], narrow)


class Small(tf.Module):
    """One table, and answers that are its rows, and sums of them."""

    def __init__(self) -> None:
        super().__init__()
        self.user = tfplugin.get_kv_variable("user", embedding_dim=16)
        fill(self.user, np.arange(100))

    @tf.function(input_signature=[IDS])
    def look_up(self, ids: Any) -> Any:
        rows = tf.nn.embedding_lookup(self.user, ids)
        return {"rows": rows, "sum": tf.reduce_sum(rows, 1), "ids": ids}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "source"
    module = Small()
    tf.saved_model.save(module, str(folder), signatures=module.look_up)
    return folder


def test_the_check_says_by_how_much_answers_differ(small: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = ["export", str(small), "--savedmodel", str(tmp_path / "out"), "--dtype", "int8", "--check", "20"]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert "values differ, by up to 0.0" in told and "as rows were rounded" in told
    assert "mean cosine" in told and "int8" in told
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not list((tmp_path / "out").glob("check-*"))
    assert main([*arguments, "--force", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (table,), (check,) = report["tables"], report["checks"]
    assert table["value_dtype"] == "int8" and 0 < check["largest"] < 0.5
    assert table["rounding"].keys() == {"max_error", "mean_error", "mean_cosine", "least_cosine"}
    assert 0 < table["rounding"]["mean_error"] < table["rounding"]["max_error"] < check["largest"] * 1.01
    assert 0.9999 < table["rounding"]["least_cosine"] <= table["rounding"]["mean_cosine"] < 1


def test_the_check_fails_where_rounding_explains_too_little(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that decodes otherwise than the rows were encoded, by one part in a thousand."""
    decoded = stored_rows.as_numbers

    def wrong(body: Any, stored: str, value_dtype: str, rows_as: str, dim: int) -> str:
        numbers = decoded(body, stored, value_dtype, rows_as, dim)
        if not rows_as:
            return numbers
        return body.op("Mul", [numbers, body.constant(1.001, np.float32)], "z", T=of_type(1))

    monkeypatch.setattr("kvtools.stock_model.rows.as_numbers", wrong)
    with pytest.raises(
        CheckFailedError, match="otherwise than its rows would as plain numbers, so nothing was written"
    ):
        exported(small, tmp_path / "out", dtype="int8", check=5)
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float16", "int4"])
def test_the_perfect_index_answers_as_the_other(folder: Path, tmp_path: Path, dtype: str) -> None:
    """The check compares it with plain numbers behind a hash table, to the bit."""
    export = exported(folder / "source", tmp_path / "out", dtype=dtype, index="perfect", check=5)
    assert {check.signature for check in export.checks} == set(SIGNATURES)
    assert all(check.requests and check.largest > 0 for check in export.checks)


def test_cut_and_rounded(small: Path, tmp_path: Path, capsys: Any) -> None:
    arguments = ["export", str(small), "--savedmodel", str(tmp_path / "out"), "--dtype", "int4", "--check", "9"]
    assert main([*arguments, "--clip-l2", "4"]) == 0
    told = capsys.readouterr().out
    assert "as rows were cut and rounded" in told or "as rows were rounded" in told
    export = exported(small, tmp_path / "again", dtype="int4", policy=Policy.of(Criteria(norms=(Clip("l2", 4),))))
    assert export.tables[0].cut > 0 and open_checkpoint(str(tmp_path / "again")).tables["user"].schema.rows_as == "int4"


def test_commands_read_the_rows_as_floats(small: Path, tmp_path: Path, capsys: Any) -> None:
    exported(small, tmp_path / "out", dtype="int8")
    out = str(tmp_path / "out")
    chunk = open_checkpoint(out).tables["user"].to_numpy()
    values = chunk.values
    assert values is not None
    assert main(["inspect", out]) == 0
    assert "int8 with an offset and a scale" in capsys.readouterr().out
    assert main(["get", out, "7", "--table", "user"]) == 0
    assert f"{values[chunk.keys.tolist().index(7), 0]:.6g}" in capsys.readouterr().out
    assert main(["stats", out]) == 0
    assert main(["verify", out]) == 0
    assert main(["diff", out, str(small), "--atol", "0.1", "--table", "user"]) == 3  # it has no frequencies
    assert "user 100 100 0 0 0 100" in " ".join(capsys.readouterr().out.split())
    assert main(["migrate", out, str(tmp_path / "t.npz"), "--to", "npz"]) == 0
    assert main(["clip", out, str(tmp_path / "c.kvsnap"), "--l2", "1", "--to", "snapshot"]) == 0
    again = open_checkpoint(str(tmp_path / "t.npz")).tables["user"].to_numpy().values
    assert again is not None and np.array_equal(again, values)


def test_the_server_runs_its_signature_and_serves_its_tables(small: Path, tmp_path: Path) -> None:
    exported(small, tmp_path / "out", dtype="int4")
    store = open_store(tmp_path / "out")
    assert isinstance(store, SavedModelStore)
    values = open_checkpoint(str(tmp_path / "out")).tables["user"].to_numpy()
    assert values.values is not None
    assert set(store.signatures) == {"serving_default"}


def test_a_row_that_keys_begin_with_that_does_not_fit(tmp_path: Path) -> None:
    module = tf.Module()
    rows = np.float32([[1, 2, 3, 4], [1, np.nan, 3, 4]])
    module.table = tfplugin.get_kv_variable(
        "begun", embedding_dim=4, initializer=lambda shape, dtype=None: tf.tile(tf.constant(rows), [shape[0] // 2, 1])
    )
    fill(module.table, [1, 2])

    @tf.function(input_signature=[IDS])
    def look_up(ids: Any) -> Any:
        return {"y": module.table.sparse_read(ids, training=False, missing="initial")}

    tf.saved_model.save(module, str(tmp_path / "source"), signatures=look_up)
    with pytest.raises(BadInputError, match="table 'begun' as int8: a row that keys begin with has NaN"):
        exported(tmp_path / "source", tmp_path / "out", dtype="int8")
    exported(tmp_path / "source", tmp_path / "out", dtype="float16")
    assert check_model(open_checkpoint(str(tmp_path / "source")), open_checkpoint(str(tmp_path / "out")), 2)
