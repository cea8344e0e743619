"""A trained model exported whole: stock operations only, and the same answers to the bit."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin
from kvtools.cli.main import main
from kvtools.clip import Clip, Criteria
from kvtools.clip_policy import Policy
from kvtools.dialects.bundle import BundleWriter
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError, CheckFailedError, CorruptFileError, OutputError
from kvtools.export_model import ModelExport, export_model, has_custom_operations
from kvtools.server.saved_models import SavedModelStore, open_store
from kvtools.stock_model.fields import messages, split
from kvtools.stock_model.meta_graph import MetaGraph
from kvtools.stock_model.stock_ops import foreign_nodes, is_stock
from tfplugin import dynamic_embedding as de
from tfplugin import sok

IDS = tf.TensorSpec([None], tf.int64)
RANDOM = np.random.default_rng(0)


def fill(variable: Any, keys: Any) -> None:
    """Give a variable rows of random numbers."""
    rows = RANDOM.standard_normal((len(keys), variable.dim))
    variable.upsert(tf.constant(keys, variable.key_dtype), tf.constant(rows, variable.dtype))


def partitioned(parts: int) -> Any:
    return tf.compat.v1.fixed_size_partitioner(parts)


class Everything(tf.Module):
    """A signature for each way in which a model looks rows up."""

    def __init__(self, vocabulary: Path) -> None:
        super().__init__()
        self.user = tfplugin.get_kv_variable("user", embedding_dim=4)
        self.item = tfplugin.get_kv_variable("item", embedding_dim=3, partitioner=partitioned(3), key_dtype=tf.int32)
        self.half = tfplugin.get_kv_variable(
            "half", embedding_dim=3, key_dtype=tf.uint64, value_dtype=tf.float16, partitioner=partitioned(2)
        )
        self.drawn = de.get_variable("drawn", dim=5, initializer=tf.keras.initializers.RandomUniform(-1, 1))
        self.parted = de.get_variable("parted", dim=2, initializer=0.5, devices=["/CPU:0", "/CPU:0"])
        self.chosen = de.get_variable("chosen", dim=3, initializer=np.float32([1, 2, 3]))
        self.weights = tf.Variable(tf.random.stateless_normal([7, 2], [1, 2]))
        index = tf.lookup.TextFileIndex
        self.words = tf.lookup.StaticVocabularyTable(
            tf.lookup.TextFileInitializer(str(vocabulary), tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER),
            3,
        )
        fill(self.user, np.arange(-5, 40))
        fill(self.item, np.arange(-5, 20))
        fill(self.half, np.array([1, 2, 2**63 + 5], np.uint64))
        for variable in (self.drawn, self.parted, self.chosen):
            variable.upsert(np.arange(9), RANDOM.standard_normal((9, variable.dim)).astype(np.float32))

    @tf.function(input_signature=[IDS, tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.string)])
    def plain(self, user: Any, item: Any, word: Any) -> Any:
        a, b = tf.nn.embedding_lookup(self.user, user), tf.nn.embedding_lookup(self.item, item)
        by_word = tf.nn.embedding_lookup(self.user, self.words.lookup(word))
        return {"y": tf.concat([a, b], 1) @ self.weights, "a": a, "b": b, "w": by_word}

    @tf.function(
        input_signature=[
            tf.SparseTensorSpec([None, None], tf.int64),
            tf.RaggedTensorSpec([None, None], tf.int32),
            tf.SparseTensorSpec([None, None], tf.float32),
        ]
    )
    def pooled(self, sparse: Any, ragged: Any, weights: Any) -> Any:
        safe = tf.nn.safe_embedding_lookup_sparse
        compared = weights
        weights = tf.SparseTensor(sparse.indices, weights.values[: tf.size(sparse.values)], sparse.dense_shape)
        return {
            "mean": tf.nn.embedding_lookup_sparse(self.user, sparse, None, combiner="mean"),
            "weighted": tf.nn.embedding_lookup_sparse(self.user, sparse, weights, combiner="sqrtn"),
            "compared": tf.nn.embedding_lookup_sparse(self.user, sparse, compared, combiner="sum"),
            "filled": safe(self.user, sparse, weights, combiner="mean", default_id=3),
            "default": safe(self.user, sparse, combiner="sqrtn"),
            "sum": tf.nn.embedding_lookup_sparse(self.item, ragged, None, combiner="sum"),
            "begun": de.embedding_lookup_sparse(self.drawn, sparse, None, name="pooled"),
        }

    @tf.function(input_signature=[IDS, tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.uint64)])
    def many(self, user: Any, item: Any, half: Any) -> Any:
        a, b, c = tfplugin.lookup_many([self.user, self.item, self.user], [user, item, user + 1])
        return {
            "a": a,
            "b": b,
            "c": c,
            "half": tf.gather(self.half, half),
            "half_found": self.half.contains(half),
            "half_part": self.half[1].sparse_read(half),
            "found": self.user.contains(user),
            "sizes": tf.stack([self.user.size(), self.item.size(), self.item[1].size()]),
            "part": self.item[1].sparse_read(item),
            "composed": self.item.contains(item),
        }

    @tf.function(input_signature=[IDS, tf.TensorSpec([], tf.int32)])
    def control(self, user: Any, n: Any) -> Any:
        @tf.function
        def inner(ids: Any) -> Any:
            return tf.cond(
                n > 2,
                lambda: tf.nn.embedding_lookup(self.user, ids),
                lambda: tf.nn.embedding_lookup(self.user, -ids) * 2,
            )

        def body(i: Any, total: Any) -> Any:
            return i + 1, total + tf.switch_case(
                i % 2, [lambda: inner(user), lambda: tf.nn.embedding_lookup(self.item, tf.cast(user, tf.int32))[:, :1]]
            )

        _, total = tf.while_loop(lambda i, _: i < n, body, [0, tf.zeros([tf.shape(user)[0], 4])])
        return {"total": total, "inner": inner(user)}

    @tf.function(input_signature=[IDS])
    def begun(self, ids: Any) -> Any:
        rows, there = self.chosen.lookup(ids, return_exists=True)
        return {
            "drawn": de.embedding_lookup(self.drawn, ids, name="begun"),
            "parted": self.parted.lookup(ids),
            "chosen": rows,
            "there": there,
            "initial": self.user.sparse_read(ids, training=False, missing="initial"),
        }

    @tf.function(input_signature=[IDS])
    def train(self, ids: Any) -> Any:
        return self.user.sparse_read(ids, training=True) + tf.cast(self.user.remove(ids), tf.float32)


SIGNATURES = ("plain", "pooled", "many", "control", "begun")


def request(signature: str, random: np.random.Generator) -> dict[str, np.ndarray]:
    """Keys that are there, keys that are not, and keys that come twice."""
    n = 8

    def ids(dtype: type, count: int = n) -> np.ndarray:
        drawn = random.integers(-9, 50, count)
        return np.concatenate([drawn, drawn[:2]])[:count].astype(dtype)

    if signature == "plain":
        return {"user": ids(np.int64), "item": ids(np.int32), "word": random.choice([b"a", b"b", b"zz"], n)}
    if signature == "many":
        half = random.choice(np.array([1, 2, 3, 2**63 + 5, 2**63 + 6], np.uint64), n)
        return {"user": ids(np.int64), "item": ids(np.int32), "half": half}
    if signature == "control":
        return {"user": ids(np.int64), "n": np.array(random.integers(0, 6), np.int32)}
    if signature == "begun":
        return {"ids": ids(np.int64)}
    sizes = random.integers(0, 4, n)
    sizes[0] = 3
    places = np.array([(row, column) for row in range(n) for column in range(sizes[row])], np.int64)
    weights = random.standard_normal(len(places)).astype(np.float32)
    return {
        "sparse": places,
        "sparse_1": ids(np.int64, len(places)),
        "sparse_2": np.array([n, 4], np.int64),
        "ragged": ids(np.int32, len(places)),
        "ragged_1": np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        "weights": places,
        "weights_1": weights,
        "weights_2": np.array([n, 4], np.int64),
    }


def answers(model: Any, signature: str, fed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    function = model.signatures[signature]
    specs = function.structured_input_signature[1]
    return {
        key: tensor.numpy()
        for key, tensor in function(**{k: tf.constant(v, specs[k].dtype) for k, v in fed.items()}).items()
    }


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(
        x.dtype == b[key].dtype and x.shape == b[key].shape and x.tobytes() == b[key].tobytes() for key, x in a.items()
    )


def exported(source: Path, output: Path, **options: Any) -> ModelExport:
    return export_model(open_checkpoint(str(source)), output, **options)


def operations(folder: Path) -> set[str]:
    graphs = messages(split((folder / "saved_model.pb").read_bytes()), 2)
    return {node.op for data in graphs for _, node in MetaGraph.decode(data).graph.all_nodes()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, as it was saved (`source`), and its export."""
    folder = tmp_path_factory.mktemp("model")
    vocabulary = folder / "words.txt"
    vocabulary.write_text("a\nb\nc\n")
    module = Everything(vocabulary)
    signatures = {name: getattr(module, name) for name in SIGNATURES}
    tf.saved_model.save(module, str(folder / "source"), signatures={**signatures, "serving_default": module.plain})
    vocabulary.unlink()
    exported(folder / "source", folder / "export", index="perfect")
    return folder


@pytest.fixture(scope="module")
def models(folder: Path) -> tuple[Any, Any]:
    return tf.saved_model.load(str(folder / "source")), tf.saved_model.load(str(folder / "export"))


@pytest.fixture(scope="module")
def hashed(folder: Path) -> Any:
    """The same model with hash tables."""
    exported(folder / "source", folder / "hashed", index="hash")
    return tf.saved_model.load(str(folder / "hashed"))


@pytest.mark.parametrize("signature", ["many", "begun"])
def test_the_export_is_compiled_by_xla(models: tuple[Any, Any], signature: str) -> None:
    """Parts, sizes, keys that are there, initial rows."""
    source, export = models
    fed = request(signature, np.random.default_rng(8))
    function = export.signatures[signature]
    compiled = tf.function(lambda **inputs: function(**inputs), jit_compile=True, autograph=False)
    specs = function.structured_input_signature[1]
    got = compiled(**{key: tf.constant(value, specs[key].dtype) for key, value in fed.items()})
    # XLA fuses products and sums: what is drawn is compared closely, all else to the bit.
    for key, expected in answers(source, signature, fed).items():
        np.testing.assert_allclose(got[key], expected, rtol=1e-5 if key in ("drawn", "initial") else 0)


@pytest.mark.parametrize("signature", SIGNATURES)
def test_answers_by_hash_tables_are_the_same(models: tuple[Any, Any], hashed: Any, signature: str) -> None:
    fed = request(signature, np.random.default_rng(9))
    assert same(answers(models[0], signature, fed), answers(hashed, signature, fed))


@pytest.mark.parametrize("signature", SIGNATURES)
def test_answers_are_the_models(models: tuple[Any, Any], signature: str) -> None:
    source, export = models
    random = np.random.default_rng(1)
    for _ in range(10):
        fed = request(signature, random)
        assert same(answers(source, signature, fed), answers(export, signature, fed))


def test_weights_at_other_places_are_an_error(models: tuple[Any, Any]) -> None:
    fed = request("pooled", np.random.default_rng(1))
    fed["weights"] = fed["weights"] + [[0, 1]]
    for model in models:
        with pytest.raises(tf.errors.InvalidArgumentError, match="sp_weights must lie where the ids do"):
            answers(model, "pooled", fed)


def test_every_operation_is_stock_tensorflows(folder: Path) -> None:
    ours = {op for op in operations(folder / "source") if op.startswith("Kv")}
    assert {"KvSamePlaces", "KvTableGather", "KvTableGatherMany", "KvTablePool", "KvTablePartition"} <= ours
    assert not list(foreign_nodes((folder / "export" / "saved_model.pb").read_bytes()))
    assert not [op for op in operations(folder / "export") if op.startswith("Kv")]
    assert has_custom_operations(folder / "source")


def test_the_list_of_stock_operations_is_tensorflows() -> None:
    assert all(is_stock(op) for op in dir(tf.raw_ops) if not op.startswith("_") and not op.startswith("Kv"))


def test_what_only_trains_is_left_out_and_named(folder: Path, tmp_path: Path) -> None:
    export = exported(folder / "source", tmp_path / "export")
    (told,) = export.left_out
    assert "train" in told
    assert "KvTableRemove" in told


def test_assets_dense_variables_and_tags_stay(folder: Path) -> None:
    assert [file.name for file in (folder / "export" / "assets").iterdir()] == ["words.txt"]
    source, export = (open_checkpoint(str(folder / name)) for name in ("source", "export"))
    kept = {variable.name for variable in export.variables}
    assert {variable.name for variable in source.variables} <= kept
    assert {name: table.rows for name, table in source.tables.items()} == {
        name: table.rows for name, table in export.tables.items()
    }
    graphs = [MetaGraph.decode(m) for m in messages(split((folder / "export/saved_model.pb").read_bytes()), 2)]
    assert [graph.tags for graph in graphs] == [("serve",)]


def test_the_server_serves_its_signatures(folder: Path) -> None:
    store = open_store(folder / "export")
    assert isinstance(store, SavedModelStore)
    assert set(store.signatures) == {*SIGNATURES, "serving_default"}


@pytest.mark.parametrize("what", ["saved_model.pb", "assets/words.txt", "assets.extra/kvtools.json"])
def test_a_flipped_bit_of_graph_asset_or_manifest_is_found_and_never_served(
    folder: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(folder / "export", tmp_path / "export")
    assert main(["verify", str(model), "--strict"]) == 0
    capsys.readouterr()
    content = bytearray((model / what).read_bytes())
    content[len(content) // 2] ^= 1
    (model / what).write_bytes(content)
    assert main(["verify", str(model)]) == 3
    assert "SHA-256 mismatch" in (told := "".join(capsys.readouterr())) or "the manifest is damaged" in told
    with pytest.raises(CorruptFileError, match=r"SHA-256 mismatch|the manifest is damaged"):
        open_store(model)


def test_a_model_without_digests_is_served_and_verify_says_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(folder / "export", tmp_path / "export")
    file = model / "assets.extra" / "kvtools.json"
    manifest = json.loads(file.read_text())
    del manifest["files"], manifest["digest"]
    file.write_text(json.dumps(manifest))
    assert isinstance(open_store(model), SavedModelStore)
    assert main(["verify", str(model)]) == 0
    assert "cannot be checked: it was exported before kvtools wrote digests" in " ".join(
        capsys.readouterr().out.split()
    )


def answers_of_session(export: Path, name: str, fed: dict[str, Any]) -> dict[str, np.ndarray]:
    """What a model answers in a session, as TensorFlow Serving loads it."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(export))
        signature = meta.signature_def[name]
        inputs = {signature.inputs[key].name: value for key, value in fed.items()}
        return session.run({key: info.name for key, info in signature.outputs.items()}, inputs)


def test_a_session_runs_it(folder: Path) -> None:
    fed = request("control", np.random.default_rng(2))
    got = answers_of_session(folder / "export", "control", fed)
    assert same(got, answers(tf.saved_model.load(str(folder / "source")), "control", fed))


@pytest.mark.thorough
def test_a_loaded_export_can_be_saved_again(folder: Path, models: tuple[Any, Any], tmp_path: Path) -> None:
    tf.saved_model.save(models[1], str(tmp_path / "again"), signatures=models[1].signatures["control"])
    fed = request("control", np.random.default_rng(3))
    again = answers(tf.saved_model.load(str(tmp_path / "again")), "serving_default", fed)
    assert same(again, answers(models[0], "control", fed))


_STOCK_ONLY = """
import pickle, sys
import tensorflow as tf
answered = {}
requests = pickle.load(open(sys.argv[1], "rb"))
for folder, signatures in requests.items():
    model = tf.saved_model.load(folder)
    for name, fed in signatures.items():
        function = model.signatures[name]
        specs = function.structured_input_signature[1]
        inputs = {key: tf.constant(value, specs[key].dtype) for key, value in fed.items()}
        answered[folder, name] = {key: tensor.numpy() for key, tensor in function(**inputs).items()}
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tf.compat.v1.saved_model.load(session, ["serve"], folder)
assert not any(name.startswith(("tfplugin", "kvtools")) for name in sys.modules)
pickle.dump(answered, open(sys.argv[2], "wb"))
"""


@pytest.mark.thorough
def test_a_process_with_stock_tensorflow_only(folder: Path, models: tuple[Any, Any], tmp_path: Path) -> None:
    random = np.random.default_rng(4)
    path = str(folder / "export")
    requests = {path: {signature: request(signature, random) for signature in SIGNATURES}}
    (tmp_path / "requests").write_bytes(pickle.dumps(requests))
    arguments = [sys.executable, "-c", _STOCK_ONLY, str(tmp_path / "requests"), str(tmp_path / "answers")]
    subprocess.run(arguments, check=True, cwd=tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    got = pickle.loads((tmp_path / "answers").read_bytes())
    for (_, signature), found in got.items():
        assert same(answers(models[0], signature, requests[path][signature]), found)


@pytest.mark.thorough
def test_saved_model_cli_runs_it(folder: Path, models: tuple[Any, Any], tmp_path: Path) -> None:
    main = "import sys; from tensorflow.python.tools.saved_model_cli import main; sys.argv[0] = 'cli'; main()"
    arguments = ["run", "--dir", str(folder / "export"), "--tag_set", "serve", "--signature_def", "begun"]
    ids, outputs = np.array([1, 2, 77, -8]), tmp_path / "outputs"
    np.save(tmp_path / "ids.npy", ids)
    arguments += ["--inputs", f"ids={tmp_path / 'ids.npy'}", "--outdir", str(outputs)]
    subprocess.run([sys.executable, "-c", main, *arguments], check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    got = {file.stem: np.load(file) for file in outputs.glob("*.npy")}
    assert same(answers(models[0], "begun", {"ids": ids}), got)


# ---- Initial rows, and other tables ----


def save_and_export(module: Any, function: Any, folder: Path) -> tuple[Any, Any]:
    """Save a module with one signature, and export it; both loaded."""
    tf.saved_model.save(module, str(folder / "source"), signatures=function)
    exported(folder / "source", folder / "export")
    return tf.saved_model.load(str(folder / "source")), tf.saved_model.load(str(folder / "export"))


def test_rows_that_are_widened(tmp_path: Path) -> None:
    module = tf.Module()
    module.tables = [
        tfplugin.get_kv_variable("half", embedding_dim=3, value_dtype=tf.float16),
        tfplugin.get_kv_variable("brain", embedding_dim=2, value_dtype=tf.bfloat16, partitioner=partitioned(2)),
    ]
    for table in module.tables:
        fill(table, np.arange(20))

    @tf.function(input_signature=[IDS])
    def look_up(ids: Any) -> Any:
        read = [table.sparse_read(ids, training=False, output_dtype=tf.float32) for table in module.tables]
        plain = tf.cast(module.tables[0].sparse_read(ids, training=False), tf.float32)
        return {"half": read[0], "brain": read[1], "plain": plain}

    source, export = save_and_export(module, look_up, tmp_path)
    fed = {"ids": np.arange(-3, 25)}
    found = answers(export, "serving_default", fed)
    assert same(answers(source, "serving_default", fed), found)
    assert same({"": found["half"]}, {"": found["plain"]}) and found["brain"].any()


def test_rows_that_keys_begin_with_are_drawn_to_the_bit(tmp_path: Path) -> None:
    initializers = tf.keras.initializers
    module = tf.Module()
    module.tables = [
        tfplugin.get_kv_variable(f"v{number}", embedding_dim=dim, value_dtype=dtype, initializer=initializer)
        for number, (dim, dtype, initializer) in enumerate(
            (dim, dtype, initializer)
            for dim, dtype in ((5, tf.float32), (4, tf.float64), (3, tf.bfloat16))
            for initializer in (
                initializers.RandomUniform(-3, 1),
                initializers.RandomNormal(1, 2),
                initializers.TruncatedNormal(),
                lambda shape, dtype=None: tf.reshape(tf.range(shape[0] * shape[1], dtype=tf.float32), shape),
            )
        )
    ]
    for table in module.tables:
        fill(table, [1, 2])

    @tf.function(input_signature=[IDS])
    def look_up(ids: Any) -> Any:
        rows = [table.sparse_read(ids, training=False, missing="initial") for table in module.tables]
        return {str(number): tf.cast(one, tf.float64) for number, one in enumerate(rows)}

    source, export = save_and_export(module, look_up, tmp_path)
    fed = {"ids": np.concatenate([np.arange(-500, 500), np.random.default_rng(5).integers(-(2**62), 2**62, 500)])}
    assert same(answers(source, "serving_default", fed), answers(export, "serving_default", fed))


def test_lookups_of_sok_on_one_rank(tmp_path: Path) -> None:
    module = tf.Module()
    module.a = sok.DynamicVariable(dimension=4, initializer="13")
    module.b = sok.DynamicVariable(dimension=2, key_type=tf.uint64)
    module.rows = sok.Variable(np.arange(20, dtype=np.float32).reshape(5, 4))
    fill(module.a, np.arange(30))
    fill(module.b, np.arange(30))
    ragged = tf.RaggedTensorSpec([None, None], tf.int64)

    @tf.function(input_signature=[ragged, tf.RaggedTensorSpec([None, None], tf.float32)])
    def look_up(ids: Any, weights: Any) -> Any:
        weights = ids.with_values(weights.values)
        ids_of_b = tf.cast(ids, tf.uint64)
        plain = sok.lookup_sparse([module.a, module.b], [ids, ids_of_b], combiners=["sum", "mean"])
        exchanged = sok.lookup_sparse(
            [module.a, module.b, module.rows],
            [ids, ids_of_b, ids % 5],
            [weights, None, None],
            combiners=["sqrtn", "mean", "sum"],
            hotness=[4, 4, 4],
        )
        return {str(number): rows for number, rows in enumerate([*plain, *exchanged])}

    source, export = save_and_export(module, look_up, tmp_path)
    splits = np.array([0, 3, 3, 4, 8])
    fed = {"ids": np.array([1, 2, 1, 77, 3, 3, 50, 4]), "ids_1": splits}
    fed |= {"weights": RANDOM.standard_normal(8).astype(np.float32), "weights_1": splits}
    assert same(answers(source, "serving_default", fed), answers(export, "serving_default", fed))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"more ids of .* than its hotness, 4"):
        answers(export, "serving_default", {**fed, "ids_1": np.array([0, 5, 5, 5, 8])})


def test_string_keys(tmp_path: Path) -> None:
    module = tf.Module()
    module.table = de.get_variable("words", key_dtype=tf.string, dim=2, initializer=-1.0)
    module.table.upsert(tf.constant(["a", "b"]), np.float32([[1, 2], [3, 4]]))
    spec = tf.TensorSpec([None], tf.string)
    look_up = tf.function(lambda words: {"rows": module.table.lookup(words)}, input_signature=[spec])
    source, export = save_and_export(module, look_up, tmp_path)
    got = answers(export, "serving_default", {"words": np.array([b"b", b"x", b"a"])})
    assert got["rows"].tolist() == [[3, 4], [-1, -1], [1, 2]]
    assert same(answers(source, "serving_default", {"words": np.array([b"b", b"x", b"a"])}), got)


def test_constants_of_functions_that_no_signature_calls(tmp_path: Path) -> None:
    module = tf.Module()
    module.table = tfplugin.get_kv_variable("emb", embedding_dim=2)
    module.table.upsert([1], [[1.0, 2.0]])
    words = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64))
    module.words = tf.lookup.StaticHashTable(words, -1)
    look_up = tf.function(lambda ids: {"rows": tf.nn.embedding_lookup(module.table, ids)}, input_signature=[IDS])
    _, export = save_and_export(module, look_up, tmp_path)
    assert answers(export, "serving_default", {"ids": np.array([1])})["rows"].tolist() == [[1, 2]]


# ---- Models of Keras, and of TensorFlow 1 ----


def keras_model(keras: Any, parts: int | None) -> Any:
    class Rows(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table = tfplugin.get_kv_variable("emb", embedding_dim=4, partitioner=parts and partitioned(parts))
            fill(self.table, np.arange(30))

        def call(self, ids: Any) -> Any:
            return tf.nn.embedding_lookup(self.table, ids)

    inputs = keras.Input([3], dtype="int64")
    outputs = keras.layers.Dense(2)(keras.layers.Flatten()(Rows()(inputs)))
    return keras.Model(inputs, outputs)


@pytest.mark.parametrize(
    ("keras", "how"),
    [
        pytest.param(tf.keras, "export", id="Keras 3, export"),
        pytest.param(tf.keras, "save", id="Keras 3, tf.saved_model.save"),
        pytest.param(tf_keras, "export", id="tf_keras, export", marks=pytest.mark.thorough),
        pytest.param(tf_keras, "format", id="tf_keras, save_format"),
    ],
)
@pytest.mark.every_case
def test_models_of_keras(keras: Any, how: str, tmp_path: Path) -> None:
    model = keras_model(keras, 2)
    source, output = tmp_path / "source", tmp_path / "export"
    if how == "export":
        model.export(str(source), **({"verbose": False} if keras is tf.keras else {}))
    elif how == "save":
        tf.saved_model.save(model, str(source))
    else:
        model.save(str(source), save_format="tf")
    exported(source, output)
    fed = np.array([[1, 2, 3], [29, 30, -1]])
    loaded = tf.saved_model.load(str(output))
    (name,) = loaded.signatures["serving_default"].structured_input_signature[1]
    expected = answers(tf.saved_model.load(str(source)), "serving_default", {name: fed})
    assert same(expected, answers(loaded, "serving_default", {name: fed}))
    assert same(expected, answers_of_session(output, "serving_default", {name: fed}))


def test_an_embedding_layer_of_dynamic_embedding(tmp_path: Path) -> None:
    inputs = tf.keras.Input([3], dtype="int64")
    rows = de.keras.layers.Embedding(4, name="rows")(inputs)
    model = tf.keras.Model(inputs, tf.keras.layers.Dense(2)(tf.keras.layers.Flatten()(rows)))
    model.compile(de.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam()), "mse")
    model.fit(np.arange(30).reshape(10, 3), np.ones((10, 2)), verbose=0)
    model.export(str(tmp_path / "source"), verbose=False)
    exported(tmp_path / "source", tmp_path / "export")
    source, export = (tf.saved_model.load(str(tmp_path / name)) for name in ("source", "export"))
    (name,) = source.signatures["serving_default"].structured_input_signature[1]
    fed = {name: np.array([[1, 2, 3], [29, 30, -1]])}
    assert same(answers(source, "serving_default", fed), answers(export, "serving_default", fed))


def graph_model(path: Path, training: bool = False) -> None:
    """A model of TensorFlow 1 in one graph: what trains it, and what serves it."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ids = tf.compat.v1.placeholder(tf.int64, [None], "ids")
        with tf.compat.v1.variable_scope("scope"):
            whole = tfplugin.get_kv_variable("emb", embedding_dim=4)
            parts = tfplugin.get_kv_variable("parts", embedding_dim=2, partitioner=partitioned(2))
            other = tfplugin.get_kv_variable("other", embedding_dim=2)
            weights = tf.compat.v1.get_variable("w", [6, 1])

        def scores(looped: bool) -> Any:
            rows = tf.concat([tf.nn.embedding_lookup(whole, ids), tf.nn.embedding_lookup(parts, ids)], 1)
            sparse = tf.sparse.from_dense(tf.expand_dims(ids, 1))
            pooled = tf.nn.embedding_lookup_sparse(whole, sparse, None, combiner="sum")
            chosen = tf.cond(
                tf.size(ids) > 2,
                lambda: tf.nn.embedding_lookup(whole, ids + 1),
                lambda: tf.nn.embedding_lookup(whole, ids),
            )
            scored = rows @ weights + tf.reduce_sum(pooled) + tf.reduce_sum(chosen)
            if not looped:
                return scored
            _, total = tf.while_loop(
                lambda i, _: i < 3,
                lambda i, total: (i + 1, total + tf.reduce_sum(tf.nn.embedding_lookup(parts, ids + i))),
                [tf.constant(0, tf.int64), tf.constant(0.0)],
            )
            return scored + total

        trained = scores(looped=False) + tf.reduce_sum(tf.nn.embedding_lookup(other, ids))
        step = tf.compat.v1.train.AdamOptimizer(0.1).minimize(tf.reduce_sum(trained**2))
        with tfplugin.inference_mode():
            served = scores(looped=True)
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(3):
            session.run(step, {ids: np.arange(20)})
        outputs = {"y": trained if training else served}
        tf.compat.v1.saved_model.simple_save(session, str(path), {"ids": ids}, outputs)


@pytest.mark.parametrize("control_flow", ["v2", "v1"])
@pytest.mark.every_case
def test_graphs_of_tensorflow_1(control_flow: str, tmp_path: Path) -> None:
    enabled = tf.compat.v1.control_flow_v2_enabled()
    (tf.compat.v1.enable_control_flow_v2 if control_flow == "v2" else tf.compat.v1.disable_control_flow_v2)()
    try:
        graph_model(tmp_path / "source")
    finally:
        (tf.compat.v1.enable_control_flow_v2 if enabled else tf.compat.v1.disable_control_flow_v2)()
    export = exported(tmp_path / "source", tmp_path / "export")
    assert [table.name for table in export.tables] == ["scope/emb", "scope/parts"]
    # The moments of `w`, and the powers of beta.
    assert export.left_out == [
        "table 'scope/other': nothing that is served uses it",
        "4 dense variables, 56 bytes: nothing that is served uses them",
    ]
    assert [one.name for one in open_checkpoint(tmp_path / "export").variables] == ["scope/w"]
    assert not list(foreign_nodes((tmp_path / "export" / "saved_model.pb").read_bytes()))
    got = []
    for name in ("source", "export"):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            meta = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / name))
            signature = meta.signature_def["serving_default"]
            fed = {signature.inputs["ids"].name: np.array([3, 19, 77, -1, 3])}
            got.append(session.run({"y": signature.outputs["y"].name}, fed))
            if name == "export":
                assert not [op for op in session.graph.get_operations() if "Adam/update" in op.name]
    assert same(*got)
    if control_flow == "v2":  # a loop of version 1 that calls functions does not run in eager code
        loaded = tf.saved_model.load(str(tmp_path / "export"))
        eager = answers(loaded, "serving_default", {"ids": np.array([3, 19, 77, -1, 3])})
        np.testing.assert_allclose(eager["y"], got[0]["y"], rtol=1e-6)


# ---- Rows that are left out ----


def test_cut_rows_read_as_zeros_and_no_others(folder: Path, models: tuple[Any, Any], tmp_path: Path) -> None:
    export = exported(folder / "source", tmp_path / "export", policy=Policy.of(Criteria(norms=(Clip("l2", 1.5),))))
    loaded = tf.saved_model.load(str(tmp_path / "export"))
    fed = {"user": np.arange(-5, 40), "item": np.arange(45) % 25 - 5, "word": np.full(45, b"a")}
    whole, clipped = answers(models[0], "plain", fed), answers(loaded, "plain", fed)
    cut = {table.name: table.cut for table in export.tables}
    for output, table in (("a", "user"), ("b", "item")):
        small = np.linalg.norm(whole[output].astype(np.float64), axis=1) < 1.5
        assert cut[table] == small[: 45 if table == "user" else 25].sum() > 0
        assert np.array_equal(clipped[output], np.where(small[:, None], 0, whole[output]))


def test_rows_of_zeros_stay_where_the_model_can_tell(folder: Path, tmp_path: Path) -> None:
    module = tf.Module()
    module.table = tfplugin.get_kv_variable("emb", embedding_dim=2)
    module.table.upsert([1, 2], [[0.0, 0.0], [1.0, 1.0]])
    module.rows = tf.function(lambda ids: tf.nn.embedding_lookup(module.table, ids), input_signature=[IDS])
    tf.saved_model.save(module, str(tmp_path / "rows"), signatures=module.rows)
    assert exported(tmp_path / "rows", tmp_path / "without").tables[0].rows == 1
    module.there = tf.function(module.table.contains, input_signature=[IDS])
    tf.saved_model.save(module, str(tmp_path / "there"), signatures=module.there)
    assert exported(tmp_path / "there", tmp_path / "with").tables[0].rows == 2


def test_rows_of_zeros_go_where_only_training_can_tell(tmp_path: Path) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ids = tf.compat.v1.placeholder(tf.int64, [None], "ids")
        table = tfplugin.get_kv_variable("emb", embedding_dim=2)
        told = table.size(), table.contains(ids), table.sparse_read(ids, training=False, missing="initial")
        with tfplugin.inference_mode():
            rows = tf.nn.embedding_lookup(table, ids)
        session.run([table.initializer])
        session.run(table.upsert(ids, [[0.0, 0.0], [1.0, 1.0]]), {ids: [1, 2]})
        session.run(told, {ids: [1]})
        tf.compat.v1.saved_model.simple_save(session, str(tmp_path / "source"), {"ids": ids}, {"rows": rows})
    (table,) = exported(tmp_path / "source", tmp_path / "export").tables
    assert (table.rows, table.cut) == (1, 1)


def test_cut_keys_that_begin_anew_are_a_warning(folder: Path, tmp_path: Path) -> None:
    clip = Policy.of(Criteria(norms=(Clip("l2", 100.0),)))
    export = exported(folder / "source", tmp_path / "export", policy=clip)
    warned = {warning.split("'")[1] for warning in export.warnings}
    assert warned == {"user", "drawn", "parted", "chosen"}  # whose initial values the model asks for
    loaded = tf.saved_model.load(str(tmp_path / "export"))
    fed = {"ids": np.array([1, 2, 10**6])}
    begun = answers(loaded, "begun", fed)
    assert begun["chosen"].tolist() == [[1, 2, 3]] * 3
    assert not begun["there"].any()
    assert exported(folder / "source", tmp_path / "whole").warnings == []


# ---- What cannot be ----


def test_a_graph_that_inserts_while_it_serves_is_refused(tmp_path: Path) -> None:
    graph_model(tmp_path / "source", training=True)
    with pytest.raises(
        BadInputError, match=r"'KvTable\w+' \(node '.*'\) cannot be rewritten: it inserts missing keys into table"
    ):
        exported(tmp_path / "source", tmp_path / "export")
    assert [entry.name for entry in tmp_path.iterdir()] == ["source"]


def test_an_operation_that_cannot_be_rewritten_is_named(tmp_path: Path) -> None:
    module = tf.Module()
    module.table = tfplugin.get_kv_variable("emb", embedding_dim=2)
    module.table.upsert([1], [[1.0, 2.0]])
    module.stamps = tf.function(lambda ids: tf.cast(module.table.stamps(ids)[0], tf.int64), input_signature=[IDS])
    tf.saved_model.save(module, str(tmp_path / "source"), signatures=module.stamps)
    with pytest.raises(BadInputError, match=r"'KvTableStamps' \(node '.*' of function '__inference.*'\) cannot"):
        exported(tmp_path / "source", tmp_path / "export")


def test_operations_that_older_tensorflows_have_not_are_a_warning(tmp_path: Path) -> None:
    module = tf.Module()
    module.table = tfplugin.get_kv_variable("emb", embedding_dim=2)
    module.table.upsert([1], [[1.0, 2.0]])

    @tf.function(input_signature=[IDS, tf.TensorSpec([], tf.string)])
    def look_up(ids: Any, image: Any) -> Any:
        return {"rows": tf.nn.embedding_lookup(module.table, ids), "image": tf.raw_ops.DecodeWebP(contents=image)}

    tf.saved_model.save(module, str(tmp_path / "source"), signatures=look_up)
    (warning,) = exported(tmp_path / "source", tmp_path / "export").warnings
    assert warning == (
        "TensorFlow 2.16 has no operation 'DecodeWebP' (node 'DecodeWebP'): a later one is needed where the export is"
        f" served; {tf.__version__} saved the model"
    )


@pytest.mark.parametrize("interrupt", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.every_case
def test_a_full_disk_or_an_interrupt_leaves_the_old_export(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt: BaseException
) -> None:
    output = tmp_path / "export"
    output.mkdir()
    (output / "saved_model.pb").write_bytes(b"old")

    def append(*_: Any) -> None:
        raise interrupt

    monkeypatch.setattr(BundleWriter, "append", append)
    with pytest.raises(OutputError if isinstance(interrupt, OSError) else KeyboardInterrupt):
        exported(folder / "source", output, force=True)
    assert (output / "saved_model.pb").read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["export"]


def test_sources_that_are_no_trained_model_are_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--savedmodel", str(tmp_path / "out")]
    assert main(["export", str(folder / "export"), *arguments]) == 1
    assert "is an exported model already" in capsys.readouterr().err
    shutil.copytree(folder / "source", tmp_path / "damaged")
    (tmp_path / "damaged" / "saved_model.pb").write_bytes(b"\x12\xff\xff\x03")
    assert main(["export", str(tmp_path / "damaged"), *arguments]) == 1
    assert "got malformed bytes" in capsys.readouterr().err
    (tmp_path / "damaged" / "saved_model.pb").rename(tmp_path / "damaged" / "saved_model.pbtxt")
    assert main(["export", str(tmp_path / "damaged"), *arguments]) == 1
    assert "as text" in capsys.readouterr().err
    assert main(["export", str(folder / "source"), *arguments, "--table", "user", "--check", "3"]) == 2
    assert not (tmp_path / "out").exists()


# ---- The comparison ----


def test_a_check_compares_both(folder: Path, tmp_path: Path) -> None:
    checks = exported(folder / "source", tmp_path / "export", check=3).checks
    assert {one.signature: (one.different, one.refused) for one in checks} == {
        name: ((), "") for name in (*SIGNATURES, "serving_default")
    }
    assert all(one.requests == 3 and one.values for one in checks)


def test_a_check_that_fails_writes_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = BundleWriter.append

    def append(self: Any, rows: np.ndarray) -> None:
        begin(self, rows + 1 if rows.dtype == np.float32 and rows.ndim == 2 and len(rows) > 1 else rows)

    monkeypatch.setattr(BundleWriter, "append", append)
    with pytest.raises(CheckFailedError, match="plain: a: values differ by up to"):
        exported(folder / "source", tmp_path / "export", check=2, index="hash")
    assert not list(tmp_path.iterdir())


def test_the_command_takes_a_trained_model_whole(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(folder / "source"), "--savedmodel", str(tmp_path / "export"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["whole_model"] is True
    assert {table["name"] for table in told["tables"]} == {"user", "item", "half", "drawn", "parted", "chosen"}
