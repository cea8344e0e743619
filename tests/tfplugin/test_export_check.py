"""What `kvtools export --check` asks, and that it never says more than it compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
import tfplugin.keras
from kvtools import check_model as check_module
from kvtools.cli.main import main
from kvtools.clip import Clip, Criteria
from kvtools.clip_policy import Policy
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import CheckFailedError
from kvtools.export_model import export_model
from kvtools.export_split import export_split
from kvtools.key_list import key_list
from kvtools.model_requests import MixedIds, serving_graph, signature_inputs
from kvtools.tfrecord import read_records
from kvtools.warmup import WARMUP_FILE, logged_request

ALL_CUT = Policy.of(Criteria(norms=(Clip("l2", 100),)))
CITIES = [b"Oslo", b"Lima", b"Rome"]


class Model(tf.Module):
    """`ids` takes keys, `words` computes them of strings, `picky` takes one request alone."""

    def __init__(self) -> None:
        super().__init__()
        self.user = tfplugin.get_kv_variable("user", embedding_dim=4)
        self.city = tfplugin.get_kv_variable("city", embedding_dim=4)
        random = np.random.default_rng(0)
        self.user.upsert(np.arange(300) * 7 + 10**6, tf.constant(random.standard_normal((300, 4)), tf.float32))
        cities = tf.strings.to_hash_bucket_fast(CITIES, 1 << 40)
        self.city.upsert(cities, tf.constant(random.standard_normal((3, 4)), tf.float32))

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def ids(self, ids: Any) -> Any:
        return {"rows": tf.nn.embedding_lookup(self.user, ids)}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def words(self, city: Any) -> Any:
        return {"rows": tf.nn.embedding_lookup(self.city, tf.strings.to_hash_bucket_fast(city, 1 << 40))}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def picky(self, ids: Any) -> Any:
        with tf.control_dependencies([tf.debugging.assert_equal(ids, tf.constant([10**6], tf.int64))]):
            return {"rows": tf.nn.embedding_lookup(self.user, ids)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model as it was saved with each signature alone, and with all."""
    folder, model = tmp_path_factory.mktemp("model"), Model()
    names = ("ids", "words", "picky")
    for name in names:
        tf.saved_model.save(model, str(folder / name), signatures={name: getattr(model, name)})
    tf.saved_model.save(model, str(folder / "all"), signatures={name: getattr(model, name) for name in names})
    return folder


def requests(path: Path, **inputs: Any) -> Path:
    (signature, values), *_ = inputs.items()
    names = {"ids": "ids", "words": "city", "picky": "ids"}
    path.write_text(json.dumps({"signature_name": signature, "inputs": {names[signature]: values}}) + "\n")
    return path


def test_keys_that_were_cut_are_asked_for(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", str(folder / "ids"), "--savedmodel", str(tmp_path / "out"), "--check", "3"]
    assert main([*arguments, "--clip-l2", "100"]) == 0
    printed = capsys.readouterr()
    assert "values differ" in printed.out and "as rows were cut" in printed.out
    assert "to the bit" not in printed.out and "not compared" not in printed.out


def test_one_cut_key_of_many_is_drawn(folder: Path, tmp_path: Path) -> None:
    source = open_checkpoint(str(folder / "all"))
    keys = source.tables["user"].all_keys()
    export_model(source, tmp_path / "out", policy=Policy.of(Criteria(drop_keys=key_list(keys[:1]))))
    ids = MixedIds(source, open_checkpoint(str(tmp_path / "out")), np.random.default_rng(0))
    drawn = ids.draw("int64", 300)
    assert keys[0] in drawn and np.isin(drawn, keys[1:]).any() and not np.isin(drawn, keys).all()


def test_the_halves_are_asked_for_cut_keys_too(folder: Path, tmp_path: Path) -> None:
    (one,) = export_split(open_checkpoint(str(folder / "ids")), tmp_path / "out", policy=ALL_CUT, check=2).checks
    assert one.differing


@pytest.mark.parametrize("options", [[], ["--clip-l2", "100"], ["--dtype", "int4"], ["--index", "perfect"]])
def test_rows_that_no_request_found_are_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    arguments = ["export", str(folder / "words"), "--savedmodel", str(tmp_path / "out"), "--check", "2", *options]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "not compared: table 'city'" in printed.out
    assert "the same to the bit\n" not in printed.out
    if not options:
        assert "outputs each: the same to the bit, and none from a row of 'city', 'user'\n" in printed.out
    assert "no answer came from a row of table 'city'" in printed.err and "--warmup FILE" in printed.err
    assert main([*arguments, "--force", "--json"]) == 0
    assert "city" in json.loads(capsys.readouterr().out)["not_compared"]


def test_the_halves_tell_of_rows_that_no_request_found(folder: Path, tmp_path: Path) -> None:
    export = export_split(open_checkpoint(str(folder / "all")), tmp_path / "out", check=2)
    assert export.not_compared == ["city"]
    assert any("signature 'picky' was not compared" in warning for warning in export.warnings)
    assert all("with --savedmodel and --warmup FILE" in warning for warning in export.warnings)


@pytest.mark.parametrize("options", [["--dtype", "int4"], ["--clip-l2", "100"]])
def test_requests_of_a_file_are_compared(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    file = requests(tmp_path / "requests.jsonl", words=[city.decode() for city in CITIES])
    arguments = ["export", str(folder / "all"), "--savedmodel", str(tmp_path / "out"), "--check", "2", "--json"]
    assert main([*arguments, *options, "--warmup", str(file)]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    told = {one["signature"]: one for one in report["checks"]}
    assert told["words"]["requests"] == 3 and told["words"]["differing"] and report["not_compared"] == []
    assert "signature 'picky' was not compared" in printed.err


def test_a_check_that_compared_nothing_fails(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = folder / "picky", tmp_path / "out"
    assert main(["export", str(source), "--savedmodel", str(output), "--check", "2"]) == 3
    assert "took none of the requests" in (said := capsys.readouterr().err) and "--warmup FILE" in said
    for export, options in ((export_model, {"dtype": "int8"}), (export_split, {})):
        with pytest.raises(CheckFailedError, match="so nothing was written"):
            export(open_checkpoint(str(source)), output, check=2, **options)
    assert not list(tmp_path.iterdir())
    file = requests(tmp_path / "requests.jsonl", picky=[10**6])
    arguments = ["export", str(source), "--savedmodel", str(output), "--check", "2", "--warmup", str(file)]
    assert main(arguments) == 0
    assert "checked: picky: 1 requests, 1 outputs each: the same to the bit" in capsys.readouterr().out


CHECK = "from kvtools.check_model import _tensorflow; _tensorflow()"
SERVE = "from pathlib import Path; from kvtools.server.saved_models import _import_tensorflow as i; i(Path('model'))"


@pytest.mark.parametrize("program", [CHECK, SERVE])
@pytest.mark.parametrize("fails", [False, True])
def test_tensorflow_is_imported_quietly_unless_it_fails(tmp_path: Path, program: str, fails: bool) -> None:
    noisy = f"import os\nos.write(2, b'noise')\nif {fails}:\n    import not_there\n"
    (tmp_path / "tensorflow.py").write_text(noisy)
    (tmp_path / "tfplugin.py").write_text("")
    program = f"import sys; sys.path.insert(0, '.'); {program}; import os; os.write(2, b'after')"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode != 0) == fails
    if fails:
        assert "noise" in done.stderr and "No module named 'not_there'" in done.stderr
    else:
        assert done.stderr == "after"


@pytest.fixture(scope="module")
def normalized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that TensorFlow computes in another order where it knows the shape of rows, as it does in an export."""
    layers = tf.keras.layers
    model = tf.keras.Sequential(
        [
            tf.keras.Input((5,), dtype="int64", name="ids"),
            tfplugin.keras.Embedding(8, name="item"),
            layers.LayerNormalization(),
        ]
    )
    random = np.random.default_rng(0)
    model.get_layer("item").table.upsert(np.arange(10), random.standard_normal((10, 8)).astype(np.float32))
    model.layers[-1].set_weights([random.standard_normal(8), random.standard_normal(8)])
    folder = tmp_path_factory.mktemp("normalized") / "trained"
    model.export(str(folder), verbose=False)
    return folder


@pytest.mark.parametrize("how", [["--savedmodel"], ["--split"], ["--savedmodel", "--dtype", "bfloat16"]])
def test_graphs_that_tensorflow_reorders_are_compared_as_written(
    normalized: Path, how: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, *rest = how
    before = tf.config.optimizer.get_experimental_options()
    assert main(["export", str(normalized), output, str(tmp_path / "out"), *rest, "--check", "10", "--json"]) == 0
    checks = {one["signature"]: one for one in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["serving_default"]["requests"] == 10
    if not rest and checks["serving_default"]["differing"]:
        assert checks["serving_default"]["reordered"] and checks["serving_default"]["largest"] < 1e-5
    assert {**tf.config.optimizer.get_experimental_options(), "disable_meta_optimizer": False} == {
        **before,
        "disable_meta_optimizer": False,
    }


def test_what_is_told_of_graphs_that_tensorflow_reorders(
    normalized: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(normalized), "--savedmodel", str(tmp_path / "out"), "--check", "10"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "the same to the bit" in told and "as rows were" not in told
    if "reorders" in told:
        assert "as TensorFlow's optimizer reorders them" in told and "values differ, by up to" in told


def test_rows_that_are_wrong_fail_however_graphs_run(
    normalized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = check_module._run_objects
    monkeypatch.setattr(
        check_module,
        "_run_objects",
        lambda folder: (
            lambda name: (
                lambda request: (
                    {key: one + 1e-6 for key, one in answers(folder)(name)(request).items()}
                    if "out" in str(folder)
                    else answers(folder)(name)(request)
                )
            )
        ),
    )
    assert main(["export", str(normalized), "--savedmodel", str(tmp_path / "out"), "--check", "2"]) != 0
    assert "answers otherwise than the model" in capsys.readouterr().err and not (tmp_path / "out").exists()


class Parsed(tf.Module):
    """Takes tf.Examples: of a batch, of a function within a function, and of a graph as TensorFlow 1 wrote them."""

    def __init__(self) -> None:
        super().__init__()
        self.user = tfplugin.get_kv_variable("user", embedding_dim=4)
        self.user.upsert(tf.range(300, dtype=tf.int64) - 100, tf.random.stateless_normal([300, 4], [1, 2]))

    def score(self, features: Any) -> Any:
        bag, weights = features["bag"], features["weights"]
        pooled = tf.nn.embedding_lookup_sparse(self.user, bag, weights, combiner="sum")
        words = tf.cast(tf.strings.length(features["word"]), tf.float32)[:, None]
        sums = tf.reduce_sum(features["x"], 1, keepdims=True)
        rows = tf.nn.embedding_lookup(self.user, features["user"])
        pooled = tf.pad(pooled, [[0, tf.shape(rows)[0] - tf.shape(pooled)[0]], [0, 0]])
        return {"rows": rows + pooled * sums + words}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def batch(self, examples: Any) -> Any:
        parse = tf.function(lambda given: tf.io.parse_example(tf.identity(given), {**FEATURES, "list": RAGGED}))
        features = parse(tf.reshape(examples, [-1]))
        return {
            **self.score(features),
            "lists": tf.reduce_sum(tf.nn.embedding_lookup(self.user, features["list"].values)),
        }

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def older(self, examples: Any) -> Any:
        empty = tf.zeros([0], tf.string)
        parsed = tf.raw_ops.ParseExample(
            serialized=examples,
            names=empty,
            sparse_keys=["bag", "weights"],
            dense_keys=["user", "word", "x"],
            dense_defaults=[tf.zeros([0], tf.int64), empty, tf.zeros([0])],
            sparse_types=[tf.int64, tf.float32],
            dense_shapes=[[], [], [2]],
        )
        sparse = zip(parsed.sparse_indices, parsed.sparse_values, parsed.sparse_shapes, strict=True)
        bag, weights = (tf.SparseTensor(*parts) for parts in sparse)
        user, word, x = parsed.dense_values
        return self.score({"bag": bag, "weights": weights, "user": user, "word": word, "x": x})

    @tf.function(input_signature=[tf.TensorSpec([], tf.string)])
    def single(self, example: Any) -> Any:
        features = tf.cond(
            tf.strings.length(example) > 0,
            lambda: tf.io.parse_single_example(example, {"user": FEATURES["user"]}),
            lambda: {"user": tf.constant(-1, tf.int64)},
        )
        return {"row": tf.nn.embedding_lookup(self.user, features["user"])}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string)])
    def mapped(self, examples: Any) -> Any:
        users = tf.map_fn(lambda one: self.single(one)["row"], examples, fn_output_signature=tf.float32)
        return {"rows": users}


FEATURES = {
    "user": tf.io.FixedLenFeature([], tf.int64),
    "word": tf.io.FixedLenFeature([], tf.string),
    "x": tf.io.FixedLenFeature([2], tf.float32),
    "bag": tf.io.VarLenFeature(tf.int64),
    "weights": tf.io.VarLenFeature(tf.float32),
}
RAGGED = tf.io.RaggedFeature(tf.int64)


def test_examples_are_made_of_the_features_that_a_model_parses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Parsed()
    names = ("batch", "mapped", "older", "single")
    tf.saved_model.save(model, str(tmp_path / "model"), signatures={name: getattr(model, name) for name in names})
    arguments = ["export", str(tmp_path / "model"), "--savedmodel", str(tmp_path / "out"), "--warmup", "3", "--json"]
    assert main([*arguments, "--check", "4"]) == 0
    report = json.loads(capsys.readouterr().out)
    told = {one["signature"]: one for one in report["checks"]}
    assert [(told[name]["requests"], told[name]["differing"]) for name in names] == [(4, 0)] * 4
    assert not report.get("not_compared")
    # Without --check nobody asks the model: what is written must fit by itself.
    assert main([*arguments, "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["warmup"]["requests"] == 12
    exported = tf.saved_model.load(str(tmp_path / "out"))
    found = 0
    signatures = signature_inputs(serving_graph(tmp_path / "out"))
    for record in read_records(tmp_path / "out" / WARMUP_FILE):
        request = logged_request(record, signatures)
        answers = exported.signatures[request.signature](**{n: tf.constant(v) for n, v in request.inputs.items()})
        found += any(np.any(answer.numpy()) for answer in answers.values())
    assert found == 12
