"""Exports made here, opened by a TensorFlow 2.16 that has nothing else: the answers of the training process."""

from __future__ import annotations

import os
import runpy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin
from kvtools.dialects.chunk import KEYS
from kvtools.dialects.detect import open_checkpoint
from kvtools.export import export_saved_model
from kvtools.export_model import export_model
from kvtools.meta_file import trained_graph
from kvtools.stock_model.stock_ops import foreign_nodes
from tfplugin import sok

pytestmark = pytest.mark.thorough

TESTS = Path(__file__).resolve().parents[1]
MODELS = runpy.run_path(str(TESTS / "tfplugin" / "test_export_model.py"))
GRAPHS = runpy.run_path(str(TESTS / "tfplugin" / "test_export_meta.py"))
SIGNATURES, request, answers = (MODELS[name] for name in ("SIGNATURES", "request", "answers"))

Requests = list[tuple[str, dict[str, np.ndarray]]]
Answers = list[dict[str, np.ndarray]]
#: What a dense layer makes of rows; two versions of TensorFlow have different kernels. All else is the same to the bit.
DENSE = {"y", "click", "output_0", "dense", "dense_1", "dense_2", "dense_3"}
#: Requests of a kind come in so many batches.
BATCHES, BATCH = 10, 1000


def ids(random: np.random.Generator, count: int, known: int = 40) -> np.ndarray:
    """Keys that are there, keys that are not, and keys that come twice."""
    return np.where(
        random.random(count) < 0.7, random.integers(0, known, count), random.integers(-(2**62), 2**62, count)
    )


def loaded_answers(folder: Path, requests: Requests) -> Answers:
    """What the trained model answers here."""
    model = tf.saved_model.load(str(folder))
    return [answers(model, signature, fed) for signature, fed in requests]


def everything(folder: Path) -> tuple[Requests, Answers]:
    """A signature for each way in which a model looks rows up; a request asks for 8 samples."""
    vocabulary = folder / "words.txt"
    vocabulary.write_text("a\nb\nc\n")
    module = MODELS["Everything"](vocabulary)
    tf.saved_model.save(module, str(folder / "source"), {name: getattr(module, name) for name in SIGNATURES})
    random = np.random.default_rng(0)
    requests = [(name, request(name, random)) for name in SIGNATURES for _ in range(BATCHES * BATCH // 8 // 5 + 1)]
    return requests, loaded_answers(folder / "source", requests)


def keras(library: Any, how: str) -> Callable[[Path], tuple[Requests, Answers]]:
    def build(folder: Path) -> tuple[Requests, Answers]:
        model = MODELS["keras_model"](library, None if how == "export" else 2)
        if how == "export":
            model.export(str(folder / "source"), **({"verbose": False} if library is tf.keras else {}))
        else:
            model.save(str(folder / "source"), save_format="tf")
        random = np.random.default_rng(1)
        signature = tf.saved_model.load(str(folder / "source")).signatures["serving_default"]
        (name,) = signature.structured_input_signature[1]
        requests = [("serving_default", {name: ids(random, 3 * BATCH).reshape(-1, 3)}) for _ in range(BATCHES)]
        return requests, loaded_answers(folder / "source", requests)

    return build


def graph(folder: Path) -> tuple[Requests, Answers]:
    """A graph of TensorFlow 1."""
    MODELS["graph_model"](folder / "source")
    random = np.random.default_rng(2)
    requests = [("serving_default", {"ids": ids(random, BATCH)}) for _ in range(BATCHES)]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(folder / "source"))
        signature = meta.signature_def["serving_default"]
        given, asked = signature.inputs["ids"].name, {"y": signature.outputs["y"].name}
        return requests, [session.run(asked, {given: fed["ids"]}) for _, fed in requests]


def lookups_of_sok(folder: Path) -> tuple[Requests, Answers]:
    """`sok.lookup_sparse` on one rank."""
    module = tf.Module()
    module.a = sok.DynamicVariable(dimension=4, initializer="13")
    module.b = sok.DynamicVariable(dimension=2)
    for variable in (module.a, module.b):
        MODELS["fill"](variable, np.arange(40))

    @tf.function(input_signature=[tf.RaggedTensorSpec([None, None], tf.int64)])
    def look_up(ragged: Any) -> Any:
        found = sok.lookup_sparse([module.a, module.b], [ragged, ragged], combiners=["sum", "mean"], hotness=[4, 4])
        return {str(number): rows for number, rows in enumerate(found)}

    tf.saved_model.save(module, str(folder / "source"), look_up)
    random, requests = np.random.default_rng(3), []
    for _ in range(BATCHES):
        splits = np.concatenate([[0], np.cumsum(random.integers(0, 4, BATCH))])
        requests.append(("serving_default", {"ragged": ids(random, splits[-1]), "ragged_1": splits}))
    return requests, loaded_answers(folder / "source", requests)


def newer_attributes(folder: Path) -> tuple[Requests, Answers]:
    """Operations that have got attributes since, in a graph that says all of them."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        given = tf.compat.v1.placeholder(tf.int64, [None], "ids")
        table = tfplugin.get_kv_variable("emb", embedding_dim=4)
        with tfplugin.inference_mode():
            rows = tf.nn.embedding_lookup(table, given)
        places = tf.range(tf.size(given))[:, None]
        scattered = tf.cond(
            tf.size(given) > 0, lambda: tf.scatter_nd(places, tf.gather_nd(rows, places), tf.shape(rows)), lambda: rows
        )
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(table.upsert(tf.range(40, dtype=tf.int64), np.random.default_rng(4).normal(size=(40, 4))))
        tf.compat.v1.saved_model.simple_save(session, str(folder / "source"), {"ids": given}, {"rows": scattered})
        random = np.random.default_rng(5)
        requests = [("serving_default", {"ids": ids(random, BATCH)}) for _ in range(BATCHES)]
        return requests, [{"rows": session.run(scattered, {given: fed["ids"]})} for _, fed in requests]


KINDS = {
    "every lookup": everything,
    "Keras 3": keras(tf.keras, "export"),
    "tf_keras": keras(tf_keras, "export"),
    "tf_keras, saved": keras(tf_keras, "save"),
    "graph": graph,
    "sok": lookups_of_sok,
    "newer attributes": newer_attributes,
}


@pytest.fixture(scope="module")
def asked(
    ask: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Requests, Answers, Answers]]:
    """What each model was asked, what it answered, and what its export answers in TensorFlow 2.16."""
    folder = tmp_path_factory.mktemp("exports")
    built: dict[str, tuple[Requests, Answers]] = {}
    paths: dict[str, str] = {}
    for kind, build in KINDS.items():
        at = folder / kind.replace(" ", "_").replace(",", "")
        at.mkdir()
        built[kind] = build(at)
        exported = export_model(open_checkpoint(str(at / "source")), at / "export")
        assert exported.warnings == []
        paths[kind] = str(at / "export")
    for kind, build in (("graph of a checkpoint", of_checkpoint), ("tables", tables)):
        at = folder / build.__name__
        at.mkdir()
        built[kind], paths[kind] = build(at), str(at / "export")
    older = ask({paths[kind]: requests for kind, (requests, _) in built.items()}, "2.16")
    return {kind: (requests, expected, older[paths[kind]]) for kind, (requests, expected) in built.items()}


def of_checkpoint(folder: Path) -> tuple[Requests, Answers]:
    """A checkpoint of TensorFlow 1 and its graph."""
    prefix = GRAPHS["train"](folder)
    wanted = GRAPHS["Wanted"](inputs=GRAPHS["INPUTS"], outputs=GRAPHS["OUTPUTS"])
    checkpoint = open_checkpoint(str(prefix))
    export_model(checkpoint, folder / "export", graph=trained_graph(checkpoint, wanted))
    random = np.random.default_rng(6)
    fed = [GRAPHS["request"](random) for _ in range(BATCHES * BATCH // 32 + 1)]
    return [("serving_default", one) for one in fed], GRAPHS["trained_answers"](prefix, fed)


def tables(folder: Path) -> tuple[Requests, Answers]:
    """The tables of a checkpoint: each signature of the export, as this process answers it."""
    checkpoint = open_checkpoint(str(TESTS / "data" / "sample"))
    export_saved_model(checkpoint, folder / "export")
    known = np.concatenate([chunk.keys for table in checkpoint.tables.values() for chunk in table.chunks(KEYS)])
    random, requests = np.random.default_rng(7), []
    for name, function in tf.saved_model.load(str(folder / "export")).signatures.items():
        for _ in range(BATCHES):
            given = {key: random.choice(known, BATCH) for key in function.structured_input_signature[1]}
            requests.append(
                (name, {key: np.where(random.random(BATCH) < 0.7, one, -one) for key, one in given.items()})
            )
    return requests, loaded_answers(folder / "export", requests)


def test_saved_model_cli_runs_tables(ask: Any, python_of_tfra: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(TESTS / "data" / "sample"))
    export_saved_model(checkpoint, tmp_path / "export")
    assert not list(foreign_nodes((tmp_path / "export" / "saved_model.pb").read_bytes()))
    ids = np.array([1, 2, 99, 10**15])
    np.save(tmp_path / "ids.npy", ids)
    arguments = ["run", "--dir", str(tmp_path / "export"), "--tag_set", "serve", "--signature_def", "ads_emb"]
    arguments += ["--inputs", f"ids={tmp_path / 'ids.npy'}", "--outdir", str(tmp_path / "outputs")]
    cli = "import sys; from tensorflow.python.tools.saved_model_cli import main; sys.argv[0] = 'cli'; main()"
    subprocess.run([python_of_tfra, "-c", cli, *arguments], check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    (expected,) = loaded_answers(tmp_path / "export", [("ads_emb", {"ids": ids})])
    for name, values in expected.items():
        assert np.array_equal(np.load(tmp_path / "outputs" / f"{name}.npy"), values)


@pytest.mark.parametrize("kind", [*KINDS, "graph of a checkpoint", "tables"])
def test_tensorflow_2_16_answers_as_the_training_process(asked: Any, kind: str) -> None:
    requests, expected, got = asked[kind]
    assert len(requests) == len(expected) == len(got)
    for wanted, found in zip(expected, got, strict=True):
        assert wanted.keys() == found.keys()
        for output, array in wanted.items():
            assert (array.dtype, array.shape) == (found[output].dtype, found[output].shape)
            if output in DENSE:
                np.testing.assert_allclose(found[output], array, rtol=1e-5, atol=1e-6)
            else:
                assert array.tobytes() == found[output].tobytes(), output
