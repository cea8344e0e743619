"""A checkpoint of TensorFlow 1 and its graph, exported: stock operations only, and the training session's answers."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
from kvtools.cli.main import main
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.export_model import ModelExport, export_model
from kvtools.export_split import export_split
from kvtools.meta_file import trained_graph
from kvtools.stock_model.fields import entries, messages, split
from kvtools.stock_model.meta_graph import MetaGraph
from kvtools.stock_model.stock_ops import foreign_nodes
from kvtools.stock_model.training_graph import Wanted
from tfplugin import dynamic_embedding as de
from tfplugin import sok

v1 = tf.compat.v1
WORDS = ["a", "b", "c"]
INPUTS = {"ids": "batch:0", "dense": "batch:1", "word": "word", "training": "training"}
OUTPUTS = {"click": "click", "pooled": "pooled:0", "many": "many:0", "looped": "looped:0", "others": "others:0"}


def partitioned(parts: int) -> Any:
    return v1.fixed_size_partitioner(parts)


def build(vocabulary: Path) -> tuple[Any, Any]:
    """A graph that trains and one that serves beside it, of an iterator's batch; return what trains and what fills."""
    records = {"ids": np.arange(64, dtype=np.int64).reshape(16, 4), "dense": np.ones([16, 3], np.float32)}
    dataset = tf.data.Dataset.from_tensor_slices((records["ids"], records["dense"])).repeat().batch(8)
    batch = v1.data.make_one_shot_iterator(dataset).get_next(name="batch")
    ids, dense = batch
    word = v1.placeholder(tf.string, [None], "word")
    training = v1.placeholder(tf.bool, [], "training")
    rate = v1.placeholder_with_default(0.0, [], "rate")
    with v1.variable_scope("scope"):
        whole = tfplugin.get_kv_variable("emb", embedding_dim=4)
        parts = tfplugin.get_kv_variable("parts", embedding_dim=2, partitioner=partitioned(3))
        weights = v1.get_variable("w", [6, 2], use_resource=False)
        split_up = v1.get_variable("split", [10, 2], partitioner=partitioned(3), use_resource=False)
        scale = v1.get_variable("scale", [2], initializer=v1.ones_initializer(), use_resource=True)
        words = v1.get_variable("words", [6, 2], partitioner=partitioned(2), use_resource=True)
    unused = v1.get_variable("unused", [3])
    moving = v1.get_variable("moving", [2], trainable=False, use_resource=False)
    drawn = de.get_variable("drawn", dim=2, initializer=0.25)
    dynamic = sok.DynamicVariable(dimension=2, initializer="0.5", name="dynamic")
    index = tf.lookup.TextFileIndex
    table = tf.lookup.StaticVocabularyTable(
        tf.lookup.TextFileInitializer(str(vocabulary), tf.string, index.WHOLE_LINE, tf.int64, index.LINE_NUMBER), 3
    )
    known = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(WORDS, [7.0, 8.0, 9.0]), 0.0)

    def scores() -> Any:
        found = tf.identity(tf.nn.embedding_lookup(whole, ids), name="found")
        rows = tf.concat([found, tf.nn.embedding_lookup(parts, ids)], -1)
        hidden = tf.reduce_sum(rows, 1) @ weights * scale
        normed = tf.cond(training, lambda: hidden - tf.reduce_mean(hidden, 0), lambda: hidden - moving)
        return tf.nn.dropout(normed, rate=rate) + tf.reduce_sum(dense, 1, keepdims=True)

    with tf.name_scope("train"):
        logits = scores() + tf.reduce_sum(tf.nn.embedding_lookup(split_up, ids % 10)) + tf.reduce_sum(words) + unused[0]
        step = v1.train.AdamOptimizer(0.05).minimize(tf.reduce_mean((logits - 1.0) ** 2))
    with tfplugin.inference_mode():
        flat = tf.reshape(ids, [-1])
        by_word = tf.nn.embedding_lookup(words, table.lookup(word))
        click = scores() + by_word + tf.expand_dims(known.lookup(word), 1)
        tf.sigmoid(click + tf.reduce_sum(tf.nn.embedding_lookup(split_up, ids % 10), 1), name="click")
        sparse = tf.sparse.from_dense(ids)
        pooled = [
            tf.nn.embedding_lookup_sparse(whole, sparse, None, combiner="mean"),
            tf.nn.safe_embedding_lookup_sparse(parts, sparse, combiner="sqrtn"),
        ]
        tf.concat(pooled, 1, name="pooled")
        a, b = tfplugin.lookup_many([whole, parts], [ids, flat])
        tf.concat([tf.reshape(a, [-1, 4]), b], 1, name="many")

        def body(i: Any, total: Any) -> Any:
            picked = tf.cond(
                i % 2 > 0,
                lambda: tf.nn.embedding_lookup(whole, flat + i)[:, :2],
                lambda: tf.nn.embedding_lookup(parts, flat),
            )
            return i + 1, total + picked

        _, total = tf.while_loop(lambda i, _: i < 3, body, [tf.constant(0, tf.int64), tf.zeros([tf.size(flat), 2])])
        tf.identity(total, name="looped")
        served = sok.lookup_sparse(dynamic, tf.RaggedTensor.from_tensor(ids), combiners="sum")
        tf.concat([served, de.embedding_lookup(drawn, ids[:, 0], name="served")], 1, name="others")
    rows = np.random.default_rng(0).standard_normal((20, 2)).astype(np.float32)
    return step, [table.upsert(np.arange(20), rows) for table in (dynamic, drawn)]


def train(folder: Path, control_flow: str = "v2", steps: int = 3) -> Path:
    """Train, and save a checkpoint with its graph; return its prefix."""
    vocabulary = folder / "words.txt"
    vocabulary.write_text("".join(f"{word}\n" for word in WORDS))
    enabled = v1.control_flow_v2_enabled()
    (v1.enable_control_flow_v2 if control_flow == "v2" else v1.disable_control_flow_v2)()
    try:
        with tf.Graph().as_default(), v1.Session() as session:
            step, fill = build(vocabulary)
            saver = v1.train.Saver()
            session.run([v1.global_variables_initializer(), v1.tables_initializer()])
            session.run(fill)
            for _ in range(steps):
                session.run(step, {"training:0": True})
            saver.save(session, str(folder / "model.ckpt"), global_step=100)
    finally:
        (v1.enable_control_flow_v2 if enabled else v1.disable_control_flow_v2)()
    return folder / "model.ckpt-100"


def exported(prefix: Path, output: Path, wanted: Wanted, **options: Any) -> ModelExport:
    checkpoint = open_checkpoint(str(prefix))
    return export_model(checkpoint, output, graph=trained_graph(checkpoint, wanted), **options)


def test_in_two_halves(prefix: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(prefix))
    outputs = {name: tensor for name, tensor in OUTPUTS.items() if name != "looped"}
    graph = trained_graph(checkpoint, Wanted(inputs=INPUTS, outputs=outputs))
    (checked,) = export_split(checkpoint, tmp_path / "halves", graph=graph, check=3).checks
    assert (checked.requests, checked.outputs, checked.different) == (3, 4, ())
    whole = trained_graph(checkpoint, Wanted(inputs=INPUTS, outputs=OUTPUTS))
    with pytest.raises(BadInputError, match="cannot be cut out: it is in a condition or loop"):
        export_split(checkpoint, tmp_path / "looped", graph=whole)


def request(random: np.random.Generator) -> dict[str, np.ndarray]:
    """Keys that are there, keys that are not, and keys that come twice."""
    ids = random.integers(-5, 80, (8, 4))
    ids[:, 3] = ids[:, 0]
    return {
        "ids": ids,
        "dense": random.standard_normal((8, 3)).astype(np.float32),
        "word": random.choice(np.array([b"a", b"b", b"zz"], object), 8),
        "training": np.array(random.integers(0, 2), np.bool_),
    }


def trained_answers(prefix: Path, requests: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    """The answers of a training session that is restored."""
    with tf.Graph().as_default() as graph, v1.Session() as session:
        v1.train.import_meta_graph(f"{prefix}.meta").restore(session, str(prefix))
        session.run(v1.tables_initializer())
        fetched = {name: graph.get_tensor_by_name(f"{tensor.removesuffix(':0')}:0") for name, tensor in OUTPUTS.items()}
        return [
            session.run(fetched, {(INPUTS[n] if ":" in INPUTS[n] else f"{INPUTS[n]}:0"): v for n, v in one.items()})
            for one in requests
        ]


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(x.dtype == b[k].dtype and x.tobytes() == b[k].tobytes() for k, x in a.items())


_STOCK_ONLY = """
import pickle, sys
import tensorflow as tf
folder, requests = pickle.load(open(sys.argv[1], "rb"))
answers = {}
function = tf.saved_model.load(folder).signatures["serving_default"]
specs = function.structured_input_signature[1]
answers["function"] = []
for one in requests:
    got = function(**{key: tf.constant(value, specs[key].dtype) for key, value in one.items()})
    answers["function"].append({key: tensor.numpy() for key, tensor in got.items()})
with tf.Graph().as_default(), tf.compat.v1.Session() as session:
    signature = tf.compat.v1.saved_model.load(session, ["serve"], folder).signature_def["serving_default"]
    outputs = {key: info.name for key, info in signature.outputs.items()}
    answers["session"] = []
    for one in requests:
        answers["session"].append(session.run(outputs, {signature.inputs[key].name: v for key, v in one.items()}))
assert not any(name.startswith(("tfplugin", "kvtools")) for name in sys.modules)
pickle.dump(answers, open(sys.argv[2], "wb"))
"""


def stock_answers(folder: Path, export: Path, requests: list[dict[str, Any]]) -> dict[str, list[dict[str, np.ndarray]]]:
    """The answers of a process that has stock TensorFlow only: of a session, and of a function."""
    (folder / "requests").write_bytes(pickle.dumps((str(export), requests)))
    arguments = [sys.executable, "-c", _STOCK_ONLY, str(folder / "requests"), str(folder / "answers")]
    subprocess.run(arguments, check=True, cwd=folder, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    return pickle.loads((folder / "answers").read_bytes())


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def export(prefix: Path) -> Path:
    output = prefix.parent / "export"
    exported(prefix, output, Wanted(inputs=INPUTS, outputs=OUTPUTS))
    return output


def test_answers_are_the_training_sessions(prefix: Path, export: Path) -> None:
    requests = [request(np.random.default_rng(seed)) for seed in range(10)]
    got = session_answers(export, "serving_default", requests)
    assert all(same(a, b) for a, b in zip(trained_answers(prefix, requests), got, strict=True))


@pytest.mark.thorough
def test_a_process_with_stock_tensorflow_only(prefix: Path, export: Path) -> None:
    random = np.random.default_rng(1)
    requests = [request(random) for _ in range(int(os.environ.get("REQUESTS", "300")))]
    expected = trained_answers(prefix, requests)
    got = stock_answers(prefix.parent, export, requests)
    for answers in got.values():
        assert all(same(a, b) for a, b in zip(expected, answers, strict=True))


def session_answers(export: Path, signature: str, requests: list[dict[str, Any]]) -> list[dict[str, np.ndarray]]:
    with tf.Graph().as_default(), v1.Session() as session:
        one = v1.saved_model.load(session, ["serve"], str(export)).signature_def[signature]
        outputs = {key: info.name for key, info in one.outputs.items()}
        return [session.run(outputs, {one.inputs[key].name: v for key, v in fed.items()}) for fed in requests]


def test_what_is_left_is_what_the_outputs_need(prefix: Path, export: Path, tmp_path: Path) -> None:
    encoded = (export / "saved_model.pb").read_bytes()
    assert not list(foreign_nodes(encoded))
    (meta,) = (MetaGraph.decode(data) for data in messages(split(encoded), 2))
    operations = [node.op for _, node in meta.graph.all_nodes()]
    assert not [op for op in operations if op.startswith(("Kv", "Iterator", "OneShot", "ApplyAdam", "ResourceApply"))]
    assert not [node.name for node in meta.graph.nodes if "Adam" in node.name or node.name.startswith("train/")]
    assert [file.name for file in (export / "assets").iterdir()] == ["words.txt"]
    dense = {variable.name for variable in open_checkpoint(str(export)).variables}
    assert dense == {"moving", "scope/scale", "scope/split", "scope/w", "scope/words"}
    (told,) = exported(prefix, tmp_path / "click", Wanted(inputs=INPUTS, outputs={"y": "many"})).left_out[-1:]
    assert told.endswith("nothing that is served uses them")


@pytest.mark.thorough
def test_loops_and_conditions_of_version_1(tmp_path: Path) -> None:
    prefix = train(tmp_path, control_flow="v1")
    exported(prefix, tmp_path / "export", Wanted(inputs=INPUTS, outputs=OUTPUTS))
    (meta,) = (MetaGraph.decode(m) for m in messages(split((tmp_path / "export/saved_model.pb").read_bytes()), 2))
    assert {"Enter", "Exit", "NextIteration", "Switch", "Merge"} <= {node.op for node in meta.graph.nodes}
    requests = [request(np.random.default_rng(seed)) for seed in range(5)]
    got = session_answers(tmp_path / "export", "serving_default", requests)
    assert all(same(a, b) for a, b in zip(trained_answers(prefix, requests), got, strict=True))
    served = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"]
    specs = served.structured_input_signature[1]
    for fed, expected in zip(requests, got, strict=True):
        answer = served(**{key: tf.constant(value, specs[key].dtype) for key, value in fed.items()})
        assert same({key: tensor.numpy() for key, tensor in answer.items()}, expected)
    inside = next(node.name for node in meta.graph.nodes if node.op == "NextIteration")
    assert f"tensor '{inside}' is inside a loop" in refusal(prefix, inputs=INPUTS, outputs={"y": inside})


@pytest.mark.thorough
def test_saved_model_cli_runs_it(export: Path, prefix: Path, tmp_path: Path) -> None:
    run = "import sys; from tensorflow.python.tools.saved_model_cli import main; sys.argv[0] = 'cli'; main()"
    fed = request(np.random.default_rng(3)) | {"word": np.array([b"a"] * 8)}
    arguments = ["run", "--dir", str(export), "--tag_set", "serve", "--signature_def", "serving_default", "--inputs"]
    for name, value in fed.items():
        np.save(tmp_path / f"{name}.npy", value)
    arguments += [";".join(f"{name}={tmp_path / name}.npy" for name in fed), "--outdir", str(tmp_path / "outputs")]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", run, *arguments], check=True, env=environment)
    got = {file.stem: np.load(file) for file in (tmp_path / "outputs").glob("*.npy")}
    assert same(trained_answers(prefix, [fed])[0], got)


def test_the_command_takes_tensors_and_compares(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "export",
        str(prefix),
        "--savedmodel",
        str(tmp_path / "out"),
        "--check",
        "3",
        "--feed",
        "training=false",
    ]
    for name in ("ids", "dense", "word"):
        arguments += ["--input", f"{name}={INPUTS[name]}"]
    for name, tensor in OUTPUTS.items():
        arguments += ["--output", f"{name}={tensor}"]
    assert main([*arguments, "--dry-run", "--json"]) == 0
    assert {one["table"] for one in json.loads(capsys.readouterr().out)["tables"]} >= {"scope/emb", "scope/parts"}
    assert not (tmp_path / "out").exists()
    assert main(arguments) == 0
    assert "serving_default: 3 requests, 5 outputs each: the same to the bit" in capsys.readouterr().out
    assert "training" not in session_signature(tmp_path / "out")


def session_signature(export: Path) -> set[str]:
    (meta,) = (MetaGraph.decode(data) for data in messages(split((export / "saved_model.pb").read_bytes()), 2))
    return {key for key, _ in entries(split(meta.signatures["serving_default"]), 1)}


def test_the_python_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> Any:
        ids, training = v1.placeholder(tf.int64, [None], "batch"), v1.placeholder(tf.bool, [], "training")
        table = tfplugin.get_kv_variable("emb", embedding_dim=2)
        with tfplugin.inference_mode():
            rows = tf.nn.embedding_lookup(table, ids)
        tf.identity(tf.cond(training, lambda: rows + 1, lambda: rows), name="click")

    for file in small(tmp_path, build).parent.glob("model.ckpt*"):
        file.rename(tmp_path / file.name.replace("model.ckpt", "model.ckpt-100"))
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (block,) = (one for one in blocks if "trained_graph(" in one)
    exec(compile(block, "docs/export.md", "exec"), {})
    (got,) = session_answers(tmp_path / "models/1", "serving_default", [{"ids": np.array([1, 2])}])
    assert got["click"].tolist() == [[0, 0], [0, 0]]


# ---- Signatures of the graph, and savers of all kinds ----


def small(folder: Path, build: Any, **saver: Any) -> Path:
    """Save a graph of few nodes that `build` makes: it returns what the saver saves, None for all."""
    with tf.Graph().as_default(), v1.Session() as session:
        saved = build()
        session.run(v1.global_variables_initializer())
        session.run(v1.get_collection("fill"))
        v1.train.Saver(saved, **saver).save(session, str(folder / "model.ckpt"))
    return folder / "model.ckpt"


def test_a_signature_of_the_graph(prefix: Path, tmp_path: Path) -> None:
    meta = v1.MetaGraphDef.FromString(Path(f"{prefix}.meta").read_bytes())
    with tf.Graph().as_default() as graph:
        v1.train.import_meta_graph(meta)
        by = graph.get_tensor_by_name
        one = v1.saved_model.predict_signature_def({"ids": by("batch:0")}, {"many": by("many:0")})
    meta.signature_def["lookup"].CopyFrom(one)
    file = tmp_path / "other.meta"
    file.write_bytes(meta.SerializeToString())
    arguments = ["export", str(prefix), "--savedmodel", str(tmp_path / "out"), "--meta", str(file)]
    assert main([*arguments, "--signature", "lookup", "--check", "2"]) == 0
    requests = [{"ids": request(np.random.default_rng(4))["ids"]}]
    for signature in ("lookup", "serving_default"):
        (got,) = session_answers(tmp_path / "out", signature, requests)
        assert got["many"].shape == (32, 6)
    wanted = Wanted(signature="no")
    with pytest.raises(BadInputError, match=r"there is no signature 'no' in the graph; it has 'lookup'"):
        trained_graph(open_checkpoint(str(prefix)), wanted, file)
    with pytest.raises(BadInputError, match=r"has no signature: say --input NAME=TENSOR and --output"):
        trained_graph(open_checkpoint(str(prefix)), wanted)


def test_a_sparse_placeholder_is_three_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> Any:
        ids = v1.sparse_placeholder(tf.int64, [None, None], "sp")
        table = tfplugin.get_kv_variable("emb", embedding_dim=2)
        v1.add_to_collection("fill", table.upsert(np.arange(20), np.arange(40, dtype=np.float32).reshape(20, 2)))
        with tfplugin.inference_mode():
            tf.identity(tf.nn.embedding_lookup_sparse(table, ids, None, combiner="mean"), name="y")

    arguments = ["export", str(small(tmp_path, build)), "--savedmodel", str(tmp_path / "out"), "--output", "y=y"]
    for name, tensor in (("sp", "sp/indices"), ("sp_1", "sp/values"), ("sp_2", "sp/shape")):
        arguments += ["--input", f"{name}={tensor}"]
    assert main([*arguments, "--check", "5"]) == 0
    assert "serving_default: 5 requests, 1 outputs each: the same to the bit" in capsys.readouterr().out
    fed = {"sp": np.array([[0, 0], [0, 1], [2, 0]]), "sp_1": np.array([3, 5, 99]), "sp_2": np.array([3, 2])}
    (got,) = session_answers(tmp_path / "out", "serving_default", [fed])
    assert got["y"].tolist() == [[8, 9], [0, 0], [0, 0]]


def test_an_input_that_no_output_needs_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def build() -> Any:
        ids, v = v1.placeholder(tf.int64, [None], "ids"), v1.placeholder(tf.float32, [None], "extra")
        tf.negative(v, name="made")
        table = tfplugin.get_kv_variable("emb", embedding_dim=2)
        v1.add_to_collection("fill", table.upsert([1, 2], [[1.0, 2.0], [3.0, 4.0]]))
        with tfplugin.inference_mode():
            tf.identity(tf.nn.embedding_lookup(table, ids), name="y")

    arguments = ["export", str(small(tmp_path, build)), "--savedmodel", str(tmp_path / "out"), "--output", "y=y"]
    for name, tensor in (("ids", "ids"), ("extra", "extra:0"), ("made", "made")):
        arguments += ["--input", f"{name}={tensor}"]
    assert main([*arguments, "--check", "2"]) == 0
    assert "serving_default: 2 requests, 1 outputs each: the same to the bit" in capsys.readouterr().out
    fed = {"ids": np.array([2, 7]), "extra": np.zeros(1, np.float32), "made": np.zeros(1, np.float32)}
    (got,) = session_answers(tmp_path / "out", "serving_default", [fed])
    assert got["y"].tolist() == [[3, 4], [0, 0]]


@pytest.mark.parametrize("resource", [False, True])
@pytest.mark.parametrize("saver", ["renamed", "sharded", "none"])
@pytest.mark.every_case
def test_variables_are_restored_as_the_saver_says(resource: bool, saver: str, tmp_path: Path) -> None:
    def build() -> Any:
        x = v1.placeholder(tf.float32, [None, 3], "x")
        w = v1.get_variable("w", [3, 2], use_resource=resource)
        with tf.device("/cpu:0"):
            b = v1.get_variable("b", [2], initializer=v1.ones_initializer(), use_resource=resource)
        half = tf.identity(x @ w, name="half")
        tf.identity(half + b, name="y")
        return {"kernel": w, "b": b} if saver == "renamed" else None

    prefix = small(tmp_path, build, sharded=saver == "sharded")
    if saver == "none":
        meta = v1.MetaGraphDef.FromString(Path(f"{prefix}.meta").read_bytes())
        meta.ClearField("saver_def")
        Path(f"{prefix}.meta").write_bytes(meta.SerializeToString())
    exported(
        prefix,
        tmp_path / "export",
        Wanted(inputs={"x": "x"}, outputs={"y": "y", "w": "w"} if not resource else {"y": "y"}),
    )
    (meta_graph,) = (MetaGraph.decode(m) for m in messages(split((tmp_path / "export/saved_model.pb").read_bytes()), 2))
    assert not [node.name for node in meta_graph.graph.nodes if messages(node.rest, 4)]  # devices of who trained
    reader = tf.train.load_checkpoint(str(prefix))
    w, x = reader.get_tensor("kernel" if saver == "renamed" else "w"), np.float32([[1, 2, 3], [4, 5, 6]])
    loaded = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"]
    for got in (*session_answers(tmp_path / "export", "serving_default", [{"x": x}]), loaded(x=tf.constant(x))):
        np.testing.assert_allclose(got["y"], x @ w + 1, rtol=1e-5, atol=1e-5)
        assert resource or np.array_equal(got["w"], w)
    exported(prefix, tmp_path / "rest", Wanted(inputs={"half": "half"}, outputs={"y": "y"}))
    (got,) = session_answers(tmp_path / "rest", "serving_default", [{"half": x @ w}])
    assert np.array_equal(got["y"], x @ w + 1)
    assert [variable.name for variable in open_checkpoint(str(tmp_path / "rest")).variables] == ["b"]


# ---- What cannot be ----


def refusal(prefix: Path, **wanted: Any) -> str:
    checkpoint, output = open_checkpoint(str(prefix)), prefix.parent / "refused"
    with pytest.raises(BadInputError) as error:
        export_model(checkpoint, output, graph=trained_graph(checkpoint, Wanted(**wanted)))
    assert not output.exists()
    assert not [entry for entry in prefix.parent.iterdir() if "kvtools" in entry.name]
    return str(error.value)


def test_names_that_the_graph_has_not_are_told_with_those_near(prefix: Path) -> None:
    told = refusal(prefix, inputs=INPUTS, outputs={"y": "clik"})
    assert "there is no tensor 'clik' in the graph; near it are 'click'" in told
    assert "its placeholders are 'word', 'training', 'rate'" in told
    assert "node 'batch' (IteratorGetNext) has 2 outputs" in refusal(prefix, inputs={"x": "batch:2"}, outputs=OUTPUTS)
    assert "'batch:x' is no name of a tensor" in refusal(prefix, inputs={"x": "batch:x"}, outputs=OUTPUTS)
    assert "is a resource, which no request holds" in refusal(prefix, inputs={"x": "scope/scale"}, outputs=OUTPUTS)


def test_what_is_no_input_is_named(prefix: Path) -> None:
    inputs = {name: tensor for name, tensor in INPUTS.items() if name != "training"}
    told = refusal(prefix, inputs=inputs, outputs=OUTPUTS)
    assert "placeholder 'training', which is no input: add --input NAME=training:0, or" in told
    inputs = {name: tensor for name, tensor in INPUTS.items() if name != "dense"}
    told = refusal(prefix, inputs=inputs, outputs=OUTPUTS)
    assert "'IteratorGetNext' (node 'batch'), which reads what is trained with" in told
    assert "'training' is of type bool: '3' is no value of it" in refusal(
        prefix, inputs=INPUTS, outputs=OUTPUTS, values={"training": "3"}
    )


def test_sparse_training_data_is_named_by_its_tensors(tmp_path: Path) -> None:
    """The iterator gives it as a variant, which no request holds."""
    with tf.Graph().as_default(), v1.Session() as session:
        table = tfplugin.get_kv_variable("emb", embedding_dim=2)
        data = tf.data.Dataset.from_tensors({"dense": [1.0], "sparse": tf.sparse.from_dense([[1, 2]])})
        batch = v1.data.make_one_shot_iterator(data).get_next(name="batch")
        ids = tf.cast(batch["sparse"], tf.int64)
        with tfplugin.inference_mode():
            tf.add(tf.nn.embedding_lookup_sparse(table, ids, None), batch["dense"], name="y")
        session.run(v1.global_variables_initializer())
        path = Path(v1.train.Saver().save(session, str(tmp_path / "model")))
    told = refusal(path, inputs={"x": "batch:0"}, outputs={"y": "y"})
    sparse = ["DeserializeSparse:0", "DeserializeSparse:1", "DeserializeSparse:2"]
    assert told.endswith("name what it gives as inputs, of 'batch:0', " + ", ".join(f"'{one}'" for one in sparse))
    inputs = {"x": "batch:0", "ids": sparse[0], "ids_1": sparse[1], "ids_2": sparse[2]}
    checkpoint = open_checkpoint(str(path))
    export_model(checkpoint, tmp_path / "1", graph=trained_graph(checkpoint, Wanted(inputs=inputs, outputs={"y": "y"})))


def test_a_graph_that_inserts_while_it_serves_is_refused(prefix: Path) -> None:
    told = refusal(prefix, inputs=INPUTS, outputs={"logits": "train/add_2"}, values={"rate": "0.5"})
    assert "it inserts missing keys into table 'scope/" in told
    assert "tfplugin.inference_mode()" in told


def test_lookups_that_insert_become_read_only_where_that_is_asked_for(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the graph that trained: keys that are there have their rows, and others zeros."""
    arguments = ["export", str(prefix.parent), "--savedmodel", str(tmp_path / "out"), "--read-only", "--check", "2"]
    arguments += ["--input", "ids=batch:0", "--output", "rows=train/found"]
    assert main(arguments) == 0
    assert "2 requests, 1 outputs each: the same to the bit" in capsys.readouterr().out
    table = open_checkpoint(str(prefix)).table("scope/emb")
    keys, missing = table.all_keys()[:3], np.array([10**9])
    (got,) = session_answers(tmp_path / "out", "serving_default", [{"ids": np.concatenate([keys, missing])[None]}])
    assert got["rows"][0].tolist() == [*table.take(np.arange(3)).values.tolist(), [0.0] * 4]


def test_an_operation_that_cannot_be_rewritten_is_named(tmp_path: Path) -> None:
    def build() -> Any:
        ids = v1.placeholder(tf.int64, [None], "ids")
        table = tfplugin.get_kv_variable("emb", embedding_dim=2)
        tf.cast(table.stamps(ids)[0], tf.float32, name="y")
        tf.identity(tf.py_function(lambda x: x, [ids], tf.int64), name="python")

    prefix = small(tmp_path, build)
    told = refusal(prefix, inputs={"ids": "ids"}, outputs={"y": "y"})
    assert "operation 'KvTableStamps'" in told
    assert "those that can be rewritten are BatchKvVariableGatherOrZerosV2," in told
    assert "runs Python" in refusal(prefix, inputs={"ids": "ids"}, outputs={"y": "python"})


def test_variables_and_tables_that_nothing_fills_are_named(tmp_path: Path) -> None:
    def build() -> Any:
        x = v1.placeholder(tf.float32, [None], "x")
        saved = v1.get_variable("saved", [], use_resource=False)
        local = v1.get_variable("local", [], use_resource=False, collections=[v1.GraphKeys.LOCAL_VARIABLES])
        tf.identity(x + saved + local, name="y")
        words = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [1.0]), 0.0)
        tf.identity(words.lookup(tf.as_string(x)), name="z")
        v1.get_default_graph().clear_collection(v1.GraphKeys.TABLE_INITIALIZERS)

    prefix = small(tmp_path, build)
    told = refusal(prefix, inputs={"x": "x"}, outputs={"y": "y"})
    assert "needs variable 'local', which the checkpoint has not" in told
    assert "needs lookup table 'hash_table" in refusal(prefix, inputs={"x": "x"}, outputs={"z": "z"})
    meta = Path(f"{prefix}.meta")
    meta.write_bytes(meta.read_bytes().replace(b"saved", b"saveD"))
    assert "needs variable 'saveD', which" in refusal(prefix, inputs={"x": "x", "l": "local/read"}, outputs={"y": "y"})


def test_a_file_of_words_that_is_gone_is_named(prefix: Path, tmp_path: Path) -> None:
    words = prefix.parent / "words.txt"
    words.rename(tmp_path / "words.txt")
    try:
        assert "words.txt', which is not there" in refusal(prefix, inputs=INPUTS, outputs=OUTPUTS)
    finally:
        (tmp_path / "words.txt").rename(words)


def test_a_meta_that_is_none(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, wanted = open_checkpoint(str(prefix)), Wanted(inputs=INPUTS, outputs=OUTPUTS)
    file, whole = tmp_path / "x.meta", Path(f"{prefix}.meta").read_bytes()
    with pytest.raises(BadInputError, match=r"x.meta': there is no such file"):
        trained_graph(checkpoint, wanted, file)
    for data, told in (
        (whole[: len(whole) // 2], "malformed bytes"),
        (b"", "no graph in it"),
        (b"meta_info_def {}", "is text"),
    ):
        file.write_bytes(data)
        with pytest.raises(BadInputError, match=told):
            trained_graph(checkpoint, wanted, file)
    assert isinstance(CorruptFileError("x"), BadInputError)


def test_options_that_contradict_each_other(prefix: Path, tmp_path: Path, export: Path) -> None:
    arguments = ["export", str(prefix), "--savedmodel", str(tmp_path / "out")]
    for more in (
        ["--signature", "x", "--input", "a=b"],
        ["--input", "a=b"],
        ["--output", "ab"],
        ["--output", "a=b", "--output", "a=c"],
        ["--output", "a=b", "--table", "scope/emb"],
    ):
        assert main([*arguments, *more]) == 2
    assert main(["export", str(export), "--savedmodel", str(tmp_path / "out"), "--output", "a=b"]) == 2
    assert main(["export", str(prefix), "--snapshot", str(tmp_path / "out"), "--output", "a=b"]) == 2
    assert not (tmp_path / "out").exists()
