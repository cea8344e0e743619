"""`tfplugin.export_saved_model`: stock TensorFlow gives the model's answers, and training does not notice."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.core.protobuf import saved_model_pb2

import tfplugin
from kvtools.clip import Clip, Criteria
from kvtools.clip_policy import Policy, Rule
from kvtools.dialects.bundle import BundleWriter
from kvtools.errors import BadInputError, OutputError, UsageError
from kvtools.stock_model.stock_ops import foreign_nodes
from tfplugin import ranks

v1 = tf.compat.v1
IDS = tf.TensorSpec([None], tf.int64, "ids")


def answers(folder: Path, **inputs: Any) -> dict[str, np.ndarray]:
    assert not list(foreign_nodes((folder / "saved_model.pb").read_bytes()))
    signature = tf.saved_model.load(str(folder)).signatures["serving_default"]
    specs = signature.structured_input_signature[1]
    fed = {name: tf.constant(value, specs[name].dtype) for name, value in inputs.items()}
    return {name: tensor.numpy() for name, tensor in signature(**fed).items()}


class Scores(tf.Module):
    """A table in parts, a dense variable, and words looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = tfplugin.get_kv_variable("user", embedding_dim=2, partitioner=v1.fixed_size_partitioner(2))
        self.table.upsert(np.arange(9), np.arange(18, dtype=np.float32).reshape(9, 2) + 1)
        self.scale = tf.Variable(2.0)
        words = tf.lookup.KeyValueTensorInitializer(["a", "b"], tf.constant([1, 2], tf.int64))
        self.words = tf.lookup.StaticHashTable(words, -1)

    @tf.function(input_signature=[IDS])
    def serve(self, ids: Any) -> Any:
        return {"scores": tf.reduce_sum(tf.nn.embedding_lookup(self.table, ids), -1) * self.scale}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "words")])
    def by_word(self, words: Any) -> Any:
        return {"rows": tf.nn.embedding_lookup(self.table, self.words.lookup(words))}


# ---- Modules and functions ----


def test_a_module_with_its_signatures(tmp_path: Path) -> None:
    model = Scores()
    signatures = {"serving_default": model.serve, "by_word": model.by_word}
    export = tfplugin.export_saved_model(model, tmp_path / "1", signatures=signatures, check=2, warmup=3)
    assert answers(tmp_path / "1", ids=[0, 8, 99])["scores"].tolist() == [6, 70, 0]
    assert {(one.signature, one.different, one.refused) for one in export.checks} == {
        ("serving_default", (), ""),
        ("by_word", (), ""),
    }
    assert (tmp_path / "1" / "assets.extra" / "tf_serving_warmup_requests").is_file()
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


def test_the_manifest_names_the_model_and_no_folder_that_is_gone(tmp_path: Path) -> None:
    model = Scores()
    tfplugin.export_saved_model(model, tmp_path / "new" / "models" / "1", signatures=model.serve)
    manifest = json.loads((tmp_path / "new" / "models" / "1" / "assets.extra" / "kvtools.json").read_text())
    assert manifest["source"] == "Scores 'scores'"


def test_a_function_brings_along_what_it_uses(tmp_path: Path) -> None:
    model = Scores()
    table, scale, words = model.table, model.scale, model.words

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "words")])
    def closure(words_: Any) -> Any:
        return {"y": tf.nn.embedding_lookup(table, words.lookup(words_)) * scale}

    tfplugin.export_saved_model(closure, tmp_path / "closure")
    assert answers(tmp_path / "closure", words=[b"b", b"z"])["y"].tolist() == [[10, 12], [0, 0]]
    tfplugin.export_saved_model(model.by_word, str(tmp_path / "method"))
    assert answers(tmp_path / "method", words=[b"b", b"z"])["rows"].tolist() == [[5, 6], [0, 0]]
    concrete = tf.function(lambda ids: {"y": tf.nn.embedding_lookup(table, ids)}).get_concrete_function(IDS)
    tfplugin.export_saved_model(concrete, tmp_path / "concrete")
    assert answers(tmp_path / "concrete", ids=[1, 404])["y"].tolist() == [[3, 4], [0, 0]]
    assert int(table.size()) == 9


def test_a_function_that_trains_goes_on_training(tmp_path: Path) -> None:
    """What is traced to be saved is not what the function, or one that it calls, runs afterwards."""
    table = tfplugin.get_kv_variable("t", embedding_dim=2)
    inner = tf.function(lambda ids: tf.nn.embedding_lookup(table, ids))
    outer = tf.function(lambda ids: {"y": inner(ids)}, input_signature=[IDS])
    table.upsert([1], [[1.0, 2.0]])
    tfplugin.export_saved_model(outer, tmp_path / "1")
    outer(tf.constant([7], tf.int64))
    assert table.contains([7]).numpy().all()


def test_clipped_rows_are_answered_with_zeros(tmp_path: Path) -> None:
    model = Scores()
    clip = Criteria(norms=(Clip("l2", 10.0),))
    for name, given in (("criteria", clip), ("policy", Policy((Rule("us*", clip),)))):
        export = tfplugin.export_saved_model(model, tmp_path / name, signatures=model.serve, clip=given)
        assert [(table.name, table.rows, table.cut) for table in export.tables] == [("user", 6, 3)]
        assert answers(tmp_path / name, ids=[2, 3])["scores"].tolist() == [0, 30]


def test_rows_may_be_narrower(tmp_path: Path) -> None:
    model = Scores()
    export = tfplugin.export_saved_model(model, tmp_path / "1", signatures=model.serve, dtype="float16", check=2)
    assert [table.value_dtype for table in export.tables] == ["float16"]
    np.testing.assert_allclose(answers(tmp_path / "1", ids=[0, 8])["scores"], [6, 70], rtol=0.02)
    with pytest.raises(UsageError, match=r'got dtype="int3", expected float'):
        tfplugin.export_saved_model(model, tmp_path / "2", signatures=model.serve, dtype="int3")
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


# ---- Keras ----


def trained(keras: Any, export: Callable[[Any], Any] | None) -> tuple[Any, Any]:
    """A model of three inputs in a dictionary after two epochs, `export` between them; its table."""
    tf.keras.utils.set_random_seed(1)

    class Rows(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="rows")
            self.table = tfplugin.get_kv_variable("emb", embedding_dim=4, partitioner=v1.fixed_size_partitioner(2))

        def call(self, ids: Any) -> Any:
            return tf.nn.embedding_lookup(self.table, ids)

    rows = Rows()
    inputs = {
        "user": keras.Input([2], dtype="int64", name="user"),
        "word": keras.Input([1], dtype="string", name="word"),
    }
    words = keras.layers.StringLookup(vocabulary=["a", "b"], name="words")(inputs["word"])
    both = keras.layers.Flatten()(keras.layers.Concatenate(axis=1)([rows(inputs["user"]), rows(words)]))
    model = keras.Model(inputs, keras.layers.Dense(1)(both))
    tfplugin.apply_in_backward(rows.table, keras.optimizers.Adam(0.1))
    model.compile(keras.optimizers.Adam(0.1), "mse")
    data = {"user": np.arange(40).reshape(20, 2), "word": np.array([["a"], ["b"]] * 10)}
    data = {"user": tf.constant(data["user"]), "word": tf.constant(data["word"].tolist())}
    for epoch in range(2):
        model.fit(data, np.ones((20, 1), np.float32), verbose=0, batch_size=10, shuffle=False)
        if epoch == 0 and export:
            export(model)
    return model, rows.table


def state(model: Any, table: Any) -> list[Any]:
    columns = [*table.export(), *(table.export(slot)[1] for slot in sorted(table[0].slot_names()))]
    order = np.argsort(columns[0].numpy())
    dense = [np.asarray(weight) for weight in (*model.weights, *_of(model.optimizer.variables))]
    return [column.numpy()[order].tobytes() for column in columns] + [array.tobytes() for array in dense]


def _of(variables: Any) -> Any:
    return variables() if callable(variables) else variables


@pytest.mark.parametrize(
    "keras", [pytest.param(tf.keras, id="Keras 3"), pytest.param(tf_keras, id="tf_keras", marks=pytest.mark.thorough)]
)
def test_a_keras_model_between_two_epochs(keras: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"user": tf.constant([[1, 2], [3, 99]], tf.int64), "word": tf.constant([["a"], ["zz"]])}
    expected = []

    def export(model: Any) -> None:
        tfplugin.export_saved_model(model, tmp_path / "1", check=2)
        expected.append(model.predict(asked, verbose=0))

    model, table = trained(keras, export)
    assert capsys.readouterr().out == ""
    (got,) = answers(tmp_path / "1", **{name: value.numpy() for name, value in asked.items()}).values()
    np.testing.assert_allclose(got, expected[0], rtol=1e-6)
    assert np.any(model.predict(asked, verbose=0) != expected[0])
    assert state(model, table) == state(*trained(keras, None))


def test_a_keras_model_with_a_signature_of_its_own(tmp_path: Path) -> None:
    model, _ = trained(tf.keras, None)
    specs = [tf.TensorSpec([None, 2], tf.int64, "user"), tf.TensorSpec([None, 1], tf.string, "word")]
    serve = tf.function(
        lambda user, word: {"p": tf.sigmoid(model({"user": user, "word": word}))}, input_signature=specs
    )
    tfplugin.export_saved_model(model, tmp_path / "1", signatures=serve)
    got = answers(tmp_path / "1", user=[[1, 2]], word=[[b"b"]])["p"]
    asked = {"user": tf.constant([[1, 2]], tf.int64), "word": tf.constant([["b"]])}
    np.testing.assert_allclose(got, tf.sigmoid(model.predict(asked, verbose=0)), rtol=1e-6)


def test_a_subclassed_model_is_told_what_its_inputs_are(tmp_path: Path) -> None:
    class Rows(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table = tfplugin.get_kv_variable("emb", embedding_dim=2)

        def call(self, ids: Any) -> Any:
            return tf.nn.embedding_lookup(self.table, ids["user"] if isinstance(ids, dict) else ids)

    model = Rows()
    expected = model(np.arange(6).reshape(2, 3))
    spec = [tf.keras.InputSpec(shape=(None, 3), dtype="int64")]
    tfplugin.export_saved_model(model, tmp_path / "1", input_signature=spec)
    signature = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"]
    (got,) = signature(tf.constant(np.arange(6).reshape(2, 3))).values()
    assert got.numpy().tobytes() == expected.numpy().tobytes()
    # Keras 3 takes the inputs for floats where it is not told.
    with pytest.raises(
        TypeError, match=r"input_signature=\[keras.InputSpec\(shape=\(None, 3\), dtype='int64'\)\]; or name"
    ):
        tfplugin.export_saved_model(model, tmp_path / "2")
    model = Rows()
    expected = model({"user": np.arange(6).reshape(2, 3)})
    with pytest.raises(TypeError) as refused:
        tfplugin.export_saved_model(model, tmp_path / "2")
    told = str(refused.value).partition("input_signature=")[2].partition("; or")[0]
    assert told == "[{'user': keras.InputSpec(shape=(None, 3), dtype='int64', name='user')}]"
    advised = eval(told, {"keras": tf.keras})
    tfplugin.export_saved_model(model, tmp_path / "2", input_signature=advised)
    (got,) = answers(tmp_path / "2", user=np.arange(6).reshape(2, 3)).values()
    assert got.tobytes() == expected.numpy().tobytes()
    with pytest.raises(TypeError, match="input_signature is for a Keras model without signatures"):
        tfplugin.export_saved_model(tf.Module(), tmp_path / "3", input_signature=spec)


def test_the_towers_of_a_model_of_a_class_of_ones_own(tmp_path: Path) -> None:
    class Towers(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.users, self.items = (tfplugin.keras.Embedding(4, name=name) for name in ("users", "items"))

        def call(self, ids, training=None):
            users, items = self.users(ids["user"], training=training), self.items(ids["item"], training=training)
            return tf.reduce_sum(users * items, -1)

        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, "user")])
        def user(self, user):
            return {"vector": self.users(user, training=False)}

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64, "item")])
        def item(self, item):
            return {"vector": self.items(item, training=False)}

    model = Towers()
    model({"user": tf.constant(["ann", "bob"]), "item": tf.constant([17, -3])}, training=True)
    export = tfplugin.export_saved_model(
        model, tmp_path / "1", signatures={"user": model.user, "item": model.item}, check=2
    )
    assert sorted(table.name for table in export.tables) == ["items", "users"]
    served = tf.saved_model.load(str(tmp_path / "1")).signatures
    assert sorted(served) == ["item", "user"]
    np.testing.assert_array_equal(served["user"](user=tf.constant(["bob"]))["vector"], model.user(["bob"])["vector"])


def test_inputs_of_a_dictionary_are_named_by_their_keys(tmp_path: Path) -> None:
    class Pair(tf.keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.user = tfplugin.get_kv_variable("user", embedding_dim=2)
            self.item = tfplugin.get_kv_variable("item", embedding_dim=2)

        def call(self, ids: Any) -> Any:
            return tf.nn.embedding_lookup(self.user, ids["user"]) - tf.nn.embedding_lookup(self.item, ids["item"])

    model = Pair()
    ids = {"user": np.array([1, 2]), "item": np.array([3, 4])}
    expected = model(ids).numpy()
    without_names = [tf.keras.InputSpec(shape=(None,), dtype="int64"), tf.TensorSpec([None], tf.int64)]
    for number, spec in enumerate(without_names):
        path = tmp_path / str(number)
        tfplugin.export_saved_model(model, path, input_signature=[{"user": spec, "item": spec}])
        assert spec.name is None
        (got,) = answers(path, **ids).values()
        assert got.tobytes() == expected.tobytes()


# ---- Sessions ----


class Trainer:
    """A graph of TensorFlow 1 that trains, and what is served of it."""

    def __init__(self, device: str | None = None) -> None:
        self.graph = tf.Graph()
        with self.graph.as_default(), v1.device(device):
            self.ids = v1.placeholder(tf.int64, [None], "ids")
            table = tfplugin.get_kv_variable("emb", embedding_dim=2, partitioner=v1.fixed_size_partitioner(2))
            weights = v1.get_variable("w", [2, 1], initializer=v1.ones_initializer())
            self.trained = tf.nn.embedding_lookup(table, self.ids) @ weights
            loss = tf.reduce_sum((self.trained - 1.0) ** 2)
            step = v1.train.get_or_create_global_step()
            self.step = v1.train.AdamOptimizer(0.1).minimize(loss, global_step=step)
            with tfplugin.inference_mode():
                self.served = tf.nn.embedding_lookup(table, self.ids) @ weights
            self.state = [*table.export(), table.export("Adam.m")[1], weights, step]

    def train(self, session: Any) -> None:
        session.run(self.step, {self.ids: np.arange(10)})


def test_a_session_between_two_steps(tmp_path: Path) -> None:
    states = []
    for exports in (True, False):
        trainer = Trainer()
        with trainer.graph.as_default(), v1.Session() as session:
            session.run(v1.global_variables_initializer())
            trainer.train(session)
            if exports:
                tfplugin.export_saved_model(
                    session, tmp_path / "1", inputs={"ids": trainer.ids}, outputs={"y": trainer.served}, check=2
                )
                expected = session.run(trainer.served, {trainer.ids: [3, 99]})
            trainer.train(session)
            keys, *rest = session.run(trainer.state)
            order = np.argsort(keys)
            states.append([part[order].tobytes() for part in rest[:2]] + [part.tobytes() for part in rest[2:]])
    assert states[0] == states[1]
    assert answers(tmp_path / "1", ids=[3, 99])["y"].tobytes() == expected.tobytes()


def test_a_monitored_session_exports_again_and_again(tmp_path: Path) -> None:
    """Its graph is finalized, and grows by the first export only."""
    trainer = Trainer()
    signatures = {"serving_default": ({"ids": trainer.ids}, {"y": trainer.served})}
    with trainer.graph.as_default(), v1.train.MonitoredSession() as session:
        operations = []
        for number in range(3):
            trainer.train(session)
            tfplugin.export_saved_model(session, tmp_path / str(number), signatures=signatures)
            operations.append(len(session.graph.get_operations()))
        assert session.graph.finalized
        assert operations[0] == operations[1] == operations[2]
        expected = session.run(trainer.served, {trainer.ids: [3]})
    assert answers(tmp_path / "2", ids=[3])["y"].tobytes() == expected.tobytes()
    assert np.any(answers(tmp_path / "0", ids=[3])["y"] != expected)


def test_a_graph_of_a_cluster_is_served_on_any_machine(tmp_path: Path) -> None:
    """Its nodes are on jobs and tasks that no server has."""
    server = tf.distribute.Server({"ps": ["localhost:0"]})
    trainer = Trainer("/job:ps/task:0")
    with trainer.graph.as_default(), v1.device("/job:ps/task:0/device:CPU:0"):
        more = tf.identity(trainer.served, "more")
    with trainer.graph.as_default(), v1.Session(server.target) as session:
        session.run(v1.global_variables_initializer())
        trainer.train(session)
        tfplugin.export_saved_model(session, tmp_path / "1", inputs={"ids": trainer.ids}, outputs={"y": more}, check=2)
        expected = session.run(more, {trainer.ids: [3, 99]})
    assert answers(tmp_path / "1", ids=[3, 99])["y"].tobytes() == expected.tobytes()
    model = saved_model_pb2.SavedModel.FromString((tmp_path / "1" / "saved_model.pb").read_bytes())
    devices = {node.name: node.device for node in model.meta_graphs[0].graph_def.node}
    assert devices["more"] == "/device:CPU:0" and not any("job" in device for device in devices.values())


def test_a_graph_that_only_trains_is_served_read_only_and_fed(tmp_path: Path) -> None:
    trainer = Trainer()
    with trainer.graph.as_default():
        noisy = v1.placeholder(tf.bool, [], "noisy")
        scored = trainer.trained + tf.cond(noisy, lambda: tf.random.normal([]), lambda: tf.constant(0.0))
    with trainer.graph.as_default(), v1.train.MonitoredSession() as session:
        trainer.train(session)
        asked = {"inputs": {"ids": trainer.ids}, "outputs": {"y": scored}, "feed": {noisy: False}}
        export = tfplugin.export_saved_model(session, tmp_path / "1", **asked, read_only=True, check=2)
        expected = session.run(trainer.served, {trainer.ids: [3, 99]})
        trainer.train(session)
        with pytest.raises(BadInputError, match="it inserts"):
            tfplugin.export_saved_model(session, tmp_path / "2", **asked)
    assert [table.rows for table in export.tables] == [10]
    assert answers(tmp_path / "1", ids=[3, 99])["y"].tobytes() == expected.tobytes()
    with pytest.raises(TypeError, match="feed and read_only are for a session"):
        tfplugin.export_saved_model(Scores(), tmp_path / "2", read_only=True)
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


def test_a_placeholder_that_nothing_gives_is_told(tmp_path: Path) -> None:
    trainer = Trainer()
    with trainer.graph.as_default(), v1.Session() as session:
        with tf.name_scope("scope"):
            training = v1.placeholder(tf.bool, [], "training")
        scale, bias = v1.placeholder(tf.float32, [], "scale"), v1.placeholder(tf.float32, [None, 1], "bias")
        batch = v1.data.make_one_shot_iterator(tf.data.Dataset.from_tensors(1.0)).get_next()
        default = v1.placeholder_with_default(1.0, [])
        served = default * tf.cond(training, lambda: trainer.served * 2, lambda: trainer.served)
        with tf.control_dependencies([scale]):
            ordered = tf.identity(trainer.served)
        session.run(v1.global_variables_initializer())

        def told(output: Any, given: Any = None, **options: Any) -> str:
            asked = {"ids": trainer.ids, **(given or {})}
            with pytest.raises(BadInputError) as refused:
                tfplugin.export_saved_model(session, tmp_path / "1", inputs=asked, outputs={"y": output}, **options)
            assert list(tmp_path.iterdir()) == []
            return str(refused.value)

        of_training = "an output depends on placeholder 'scope/training', which is no input: add 'scope/training:0' to"
        way_out = (
            " inputs, as in inputs={'training': tensor}, or give it a value, as in feed={'scope/training:0': False}"
        )
        assert told(served).endswith(of_training + way_out)
        assert "'scale', which is no input" in told(served * scale, feed={training: False})
        assert "'scale', which is no input" in told(ordered)
        assert told(trainer.served + bias).endswith("inputs={'bias': tensor}")
        assert "depends on operation 'IteratorGetNext', node" in told(trainer.served * batch)
        signatures = {"other": ({"ids": trainer.ids}, {"y": served})}
        with pytest.raises(BadInputError, match=r"add 'scope/training:0' to the inputs of signature 'other'$"):
            tfplugin.export_saved_model(session, tmp_path / "1", signatures=signatures)
        outputs = {"y": served * scale}
        fed = {"inputs": {"ids": trainer.ids}, "outputs": outputs, "feed": {"scope/training": False, scale: 3}}
        tfplugin.export_saved_model(session, tmp_path / "fed", **fed)
        given = {"ids": trainer.ids, "training": training, "scale": scale}
        tfplugin.export_saved_model(session, tmp_path / "given", inputs=given, outputs=outputs)
        expected = session.run(served, {trainer.ids: [3], training: False})
    assert answers(tmp_path / "fed", ids=[3])["y"].tolist() == (expected * 3).tolist()
    assert answers(tmp_path / "given", ids=[3], training=False, scale=3)["y"].tolist() == (expected * 3).tolist()


def test_a_session_that_would_insert_while_it_serves_is_refused(tmp_path: Path) -> None:
    trainer = Trainer()
    with trainer.graph.as_default(), v1.Session() as session:
        session.run(v1.global_variables_initializer())
        told = r"the Session: operation 'KvTable.* cannot be rewritten: it inserts .* read_only=True answers .*zeros$"
        with pytest.raises(BadInputError, match=told):
            tfplugin.export_saved_model(
                session, tmp_path / "1", inputs={"ids": trainer.ids}, outputs={"y": trainer.trained}
            )
        with pytest.raises(ValueError, match="say what is served: inputs="):
            tfplugin.export_saved_model(session, tmp_path / "1", inputs={"ids": trainer.ids})
        with pytest.raises(ValueError, match="'y' is no tensor of the session's graph"):
            tfplugin.export_saved_model(session, tmp_path / "1", inputs={}, outputs={"y": np.zeros(2)})
    assert list(tmp_path.iterdir()) == []


# ---- What cannot be ----


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    model = Scores()
    unbuilt = tf.keras.Sequential([tf.keras.layers.Dense(1)], name="dense")
    path = tmp_path / "1"
    with pytest.raises(ValueError, match="Sequential 'dense' was never built"):
        tfplugin.export_saved_model(unbuilt, path)
    with pytest.raises(ValueError, match="has no input_signature"):
        tfplugin.export_saved_model(tf.function(lambda ids: tf.nn.embedding_lookup(model.table, ids)), path)
    with pytest.raises(ValueError, match="has no signature that could be served"):
        tfplugin.export_saved_model(tf.Module(), path)
    with pytest.raises(TypeError, match=r"takes a Keras model, a tf.Module, a tf.function or a session"):
        tfplugin.export_saved_model(lambda ids: ids, path)
    with pytest.raises(TypeError, match="inputs and outputs are the tensors of a session"):
        tfplugin.export_saved_model(model, path, inputs={})
    with pytest.raises(TypeError, match="no option 'clips'; there are policy"):
        tfplugin.export_saved_model(model, path, signatures=model.serve, clips=3)
    with pytest.raises(UsageError, match="clipping by l2: got threshold nan"):
        tfplugin.export_saved_model(model, path, signatures=model.serve, clip=Criteria(norms=(Clip("l2", np.nan),)))
    with pytest.raises(UsageError, match="got check=-1, expected how many requests to compare"):
        tfplugin.export_saved_model(model, path, signatures=model.serve, check=-1)
    with pytest.raises(UsageError, match="got warmup=-3, expected 1 to 1000 requests"):
        tfplugin.export_saved_model(model, path, signatures=model.serve, warmup=-3)
    with pytest.raises(BadInputError, match="none': No such file"):
        tfplugin.export_saved_model(model, path, signatures=model.serve, warmup=tmp_path / "none")
    dense = tf.Module()
    dense.f = tf.function(lambda ids: ids + 1, input_signature=[IDS])
    with pytest.raises(BadInputError, match="exporting Module 'module': it has no key-value table"):
        tfplugin.export_saved_model(dense, path, signatures=dense.f)
    assert list(tmp_path.iterdir()) == []
    path.mkdir()
    (path / "saved_model.pb").write_text("old")
    with pytest.raises(OutputError, match=r"it exists already; name another place, or say force=True to replace it$"):
        tfplugin.export_saved_model(model, path, signatures=model.serve)
    assert (path / "saved_model.pb").read_text() == "old"
    tfplugin.export_saved_model(model, path, signatures=model.serve, force=True)
    assert answers(path, ids=[0])["scores"].tolist() == [6]


@pytest.mark.parametrize("limit", [1000, 10_000], ids=["saving", "exporting"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, limit: int) -> None:
    model = Scores()
    model.table.upsert(np.arange(200), np.ones((200, 2)))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "saved_model.pb").write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(OutputError, match=r"writing '.*/1': .*nothing was changed there, make room"):
            tfplugin.export_saved_model(model, tmp_path / "1", signatures=model.serve, force=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "1" / "saved_model.pb").read_text() == "old"
    assert [path.name for path in tmp_path.rglob("*")] == ["1", "saved_model.pb"]


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(BundleWriter, "close", interrupt)
    model = Scores()
    with pytest.raises(KeyboardInterrupt):
        tfplugin.export_saved_model(model, tmp_path / "1", signatures=model.serve)
    assert list(tmp_path.iterdir()) == []


def test_one_rank_writes_and_only_where_it_has_all_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(ranks.SingleRank):
        rank, size = 1, 2

    monkeypatch.setattr(ranks, "_current", Two())
    model = Scores()
    with pytest.raises(ValueError, match=r"on rank 1, and one process writes a model: call it on rank 0 only"):
        tfplugin.export_saved_model(model, tmp_path / "1", signatures=model.serve)
    monkeypatch.setattr(Two, "rank", 0)
    tfplugin.export_saved_model(model, tmp_path / "1", signatures=model.serve)
    monkeypatch.setattr(type(model.table[0]), "ranks", 2)
    for one, given in ((model, {"signatures": model.serve}), (model.serve, {})):
        with pytest.raises(ValueError, match=r"spread over 2 ranks .* Save it with sok.Checkpoint on all ranks; then"):
            tfplugin.export_saved_model(one, tmp_path / "2", **given)
    assert [entry.name for entry in tmp_path.iterdir()] == ["1"]


@pytest.mark.parametrize(("kind", "padding"), [("ragged", None), ("ragged", 0), ("sparse", None), ("", None)])
def test_a_ragged_or_sparse_input_that_is_exported_as_a_dense_one_is_told(tmp_path, caplog, kind, padding):
    ids = tf.keras.Input((None,), dtype="int64", name="history", **({kind: True} if kind else {}))
    rows = tfplugin.keras.Embedding(4, combiner="mean", name="item", padding_id=padding, initializer="uniform")
    model = tf.keras.Model(ids, tf.keras.layers.Dense(1)(rows(ids)))
    ragged = tf.ragged.constant([[7, 8], [9]], dtype=tf.int64)
    model(ragged.to_sparse() if kind == "sparse" else ragged, training=True)
    with caplog.at_level("WARNING", "tfplugin"):
        tfplugin.export_saved_model(model, tmp_path / "model")
    which = f"is {kind} in the model" if kind else "the model was called on ragged ids for"
    told = [record.getMessage() for record in caplog.records if f"'history', which {which}" in record.getMessage()]
    served = tf.saved_model.load(str(tmp_path / "model")).signatures["serving_default"]
    (answer,) = served(history=tf.constant([[7, 8], [9, 0]], tf.int64)).values()
    given = ragged.to_sparse() if kind == "sparse" else ragged
    same = np.allclose(answer.numpy(), model(given).numpy(), atol=1e-6)
    # What is told is what happens.
    assert (len(told), same) == ((1, False) if padding is None else (0, True))
    assert padding is not None or ("padding_id" in told[0] and "'item" in told[0])
