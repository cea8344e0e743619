"""Exported models outside of TensorFlow's sessions: compiled by XLA, as TFLite and as ONNX, with the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
from kvtools.clip import Clip, Criteria
from kvtools.clip_policy import Policy
from kvtools.dialects.detect import open_checkpoint
from kvtools.export import export_saved_model
from kvtools.export_model import export_model
from kvtools.onnx_bitcast import HANDLERS

DIM, KNOWN = 4, 500
SPECS = {
    "users": tf.TensorSpec([None, 3], tf.int64, "users"),
    "item": tf.TensorSpec([None], tf.int32, "item"),
    "splits": tf.TensorSpec([None], tf.int64, "splits"),
}


class Model(tf.Module):
    """Two tables, one of int32 keys in parts, rows of several ids summed, bags of ids, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        random = np.random.default_rng(0)
        parts = tf.compat.v1.fixed_size_partitioner(2)
        self.user = tfplugin.get_kv_variable("user", embedding_dim=DIM)
        self.item = tfplugin.get_kv_variable("item", embedding_dim=3, key_dtype=tf.int32, partitioner=parts)
        self.empty = tfplugin.get_kv_variable("empty", embedding_dim=2)
        self.user.upsert(np.arange(KNOWN) * 2**33 - 5, random.standard_normal((KNOWN, DIM)).astype(np.float32))
        self.item.upsert(np.arange(KNOWN, dtype=np.int32) - 5, random.standard_normal((KNOWN, 3)).astype(np.float32))
        self.weights = tf.Variable(random.standard_normal((DIM + 3, 2)).astype(np.float32))

    @tf.function(input_signature=list(SPECS.values()))
    def scores(self, users: Any, item: Any, splits: Any) -> Any:
        user, rows = tf.nn.embedding_lookup(self.user, users), tf.nn.embedding_lookup(self.item, item)
        x = tf.concat([tf.reduce_sum(user, 1), rows], 1)
        none = tf.nn.embedding_lookup(self.empty, users[:, 0])
        bags = tf.RaggedTensor.from_row_splits(tf.reshape(users, [-1]), splits, validate=False)
        pooled = {
            f"y_{combiner}": tf.nn.embedding_lookup_sparse(self.user, ids, None, combiner=combiner)
            for combiner, ids in (("sum", bags), ("sqrtn", bags), ("mean", tf.RaggedTensor.from_tensor(users)))
        }
        return {"users_rows": user, "item_rows": rows, "none": none, "y": tf.sigmoid(x @ self.weights), **pooled}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model (`source`), and its exports by each index."""
    folder = tmp_path_factory.mktemp("runtimes")
    model = Model()
    tf.saved_model.save(model, str(folder / "source"), signatures=model.scores)
    for index in ("hash", "perfect"):
        export_model(open_checkpoint(str(folder / "source")), folder / index, index=index)
    return folder


def request(seed: int) -> dict[str, np.ndarray]:
    """Keys that are there, keys that are not, and keys that come twice."""
    random = np.random.default_rng(seed)
    return {
        "users": np.where(random.random((40, 3)) < 0.7, random.integers(0, KNOWN, (40, 3)) * 2**33 - 5, 7),
        "item": random.integers(-50, KNOWN + 50, 40).astype(np.int32),
        # Bags of many ids and of none, also the first and the last ones.
        "splits": np.concatenate([[0, 0], np.sort(random.integers(0, 120, 30)), [120, 120, 120]]),
    }


def answers(folder: Path, fed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
    return {name: tensor.numpy() for name, tensor in signature(**{k: tf.constant(v) for k, v in fed.items()}).items()}


def assert_same(got: dict[str, Any], expected: dict[str, np.ndarray]) -> None:
    """Rows to the bit; each runtime has its own kernels of dense layers, and adds rows up in its own order."""
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        found = np.asarray(got[name])
        if name.startswith("y"):
            np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-6)
        else:
            assert (found.dtype, found.shape, found.tobytes()) == (values.dtype, values.shape, values.tobytes()), name


@pytest.mark.parametrize("seed", [1, 2])
def test_xla_gives_the_same_rows(folder: Path, seed: int) -> None:
    fed = request(seed)
    model = tf.saved_model.load(str(folder / "perfect"))
    signature = model.signatures["serving_default"]
    compiled = tf.function(lambda **fed: signature(**fed), jit_compile=True)
    assert_same(compiled(**{k: tf.constant(v) for k, v in fed.items()}), answers(folder / "source", fed))


def test_xla_has_no_hash_tables(folder: Path) -> None:
    model = tf.saved_model.load(str(folder / "hash"))
    signature = model.signatures["serving_default"]
    compiled = tf.function(lambda **fed: signature(**fed), jit_compile=True)
    with pytest.raises((tf.errors.InvalidArgumentError, tf.errors.UnimplementedError), match="LookupTableFindV2"):
        compiled(**{k: tf.constant(v) for k, v in request(1).items()})


@pytest.mark.thorough
def test_tflite_takes_it_by_its_builtins(folder: Path) -> None:
    fed = request(3)
    converted = tf.lite.TFLiteConverter.from_saved_model(str(folder / "perfect")).convert()
    with pytest.warns(UserWarning, match="is deprecated"):
        interpreter = tf.lite.Interpreter(model_content=converted)
    assert_same(interpreter.get_signature_runner()(**fed), answers(folder / "source", fed))


@pytest.mark.thorough
def test_tflite_has_no_hash_tables_of_numbers(folder: Path) -> None:
    with pytest.raises(Exception, match="HashTable"):
        tf.lite.TFLiteConverter.from_saved_model(str(folder / "hash")).convert()


@pytest.mark.thorough
def test_onnx_runtime_gives_the_same_rows(folder: Path) -> None:
    import onnxruntime
    import tf2onnx

    fed = request(4)
    model = tf.saved_model.load(str(folder / "perfect"))
    signature = model.signatures["serving_default"]
    specs = list(SPECS.values())
    served = tf.function(
        lambda users, item, splits: signature(users=users, item=item, splits=splits), input_signature=specs
    )
    converted, _ = tf2onnx.convert.from_function(served, input_signature=specs, opset=18, custom_op_handlers=HANDLERS)
    session = onnxruntime.InferenceSession(converted.SerializeToString())
    names = [output.name for output in session.get_outputs()]
    assert_same(dict(zip(names, session.run(None, fed), strict=True)), answers(folder / "source", fed))


@pytest.mark.parametrize("index", ["hash", "perfect"])
def test_a_layer_of_keras_takes_it(folder: Path, index: str) -> None:
    """Keras 3 loads SavedModels in no other way. Its weights are of known shapes, as variables of tables are."""
    layer = tf.keras.layers.TFSMLayer(str(folder / index), call_endpoint="serving_default")
    fed = request(3)
    assert_same(layer.call_endpoint_fn(**fed), answers(folder / index, fed))
    assert not [weight for weight in layer.trainable_weights if "kvtools" in weight.name]


@pytest.mark.parametrize("dtype", [None, "int8"])
@pytest.mark.parametrize("index", ["hash", "perfect"])
def test_variables_of_tables_have_the_shapes_that_are_written(
    folder: Path, tmp_path: Path, index: Any, dtype: Any
) -> None:
    few = Policy.of(Criteria(norms=(Clip("l2", 1.5),)))
    export_saved_model(open_checkpoint(str(folder / "source")), tmp_path / "few", policy=few, index=index, dtype=dtype)
    for model in (folder / index, tmp_path / "few"):
        written = dict(tf.train.list_variables(str(model / "variables" / "variables")))
        layer = tf.keras.layers.TFSMLayer(str(model), call_endpoint="serving_default")
        found = sorted(tuple(weight.shape) for weight in layer.weights if "kvtools" in weight.name)
        tables = sorted(tuple(shape) for name, shape in written.items() if "tables/" in name)
        assert found == tables and len(found) >= 6


@pytest.mark.thorough
def test_tflite_and_onnx_take_safe_lookups(tmp_path: Path) -> None:
    import onnxruntime
    import tf2onnx

    model = tf.Module()
    model.table = tfplugin.get_kv_variable("table", embedding_dim=DIM)
    random = np.random.default_rng(0)
    model.table.upsert(np.arange(50), random.standard_normal((50, DIM)).astype(np.float32))
    specs = [
        tf.TensorSpec([None, 2], tf.int64, "indices"),
        tf.TensorSpec([None], tf.int64, "ids"),
        tf.TensorSpec([None], tf.float32, "weights"),
        tf.TensorSpec([2], tf.int64, "shape"),
    ]

    @tf.function(input_signature=specs)
    def scores(indices: Any, ids: Any, weights: Any, shape: Any) -> Any:
        sparse, weighted = tf.SparseTensor(indices, ids, shape), tf.SparseTensor(indices, weights, shape)
        lookup = tf.nn.safe_embedding_lookup_sparse
        return {
            "y_plain": lookup(model.table, sparse),
            "y_weighted": lookup(model.table, sparse, weighted, combiner="sqrtn", default_id=3),
        }

    model.scores = scores
    tf.saved_model.save(model, str(tmp_path / "source"), signatures=scores)
    export_model(open_checkpoint(str(tmp_path / "source")), tmp_path / "export", index="perfect")
    indices = np.argwhere(random.random((9, 6)) < 0.4)
    indices = indices[~np.isin(indices[:, 0], [2, 8])]  # two are empty
    fed = {
        "indices": indices,
        "ids": random.integers(0, 60, len(indices)),
        "weights": random.normal(0.5, 1, len(indices)).astype(np.float32),
        "shape": np.array([9, 6]),
    }
    expected = answers(tmp_path / "source", fed)
    assert not expected["y_plain"][2].any() and expected["y_weighted"][2].any()
    converted = tf.lite.TFLiteConverter.from_saved_model(str(tmp_path / "export")).convert()
    with pytest.warns(UserWarning, match="is deprecated"):
        interpreter = tf.lite.Interpreter(model_content=converted)
    assert_same(interpreter.get_signature_runner()(**fed), expected)
    loaded = tf.saved_model.load(str(tmp_path / "export"))

    @tf.function(input_signature=specs)
    def served(indices: Any, ids: Any, weights: Any, shape: Any) -> Any:
        return loaded.signatures["serving_default"](indices=indices, ids=ids, weights=weights, shape=shape)

    onnx, _ = tf2onnx.convert.from_function(served, input_signature=specs, opset=18, custom_op_handlers=HANDLERS)
    session = onnxruntime.InferenceSession(onnx.SerializeToString())
    names = [output.name for output in session.get_outputs()]
    assert_same(dict(zip(names, session.run(None, fed), strict=True)), expected)
