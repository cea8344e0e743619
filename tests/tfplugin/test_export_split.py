"""A trained model exported in two halves: the rows of its tables, and a dense part that is given them."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import split_ranker as ranker
import tensorflow as tf
from split_ranker import PLAIN, SIGNATURES, asked, request, same

import tfplugin
from kvtools import export_split as export_split_module
from kvtools.cli.main import main
from kvtools.client import SplitModel
from kvtools.clip import Clip, Criteria
from kvtools.clip_policy import Policy
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError, CheckFailedError, CorruptFileError, OutputError, UsageError
from kvtools.export_model import ModelExport
from kvtools.export_split import export_split
from kvtools.snapshot import Snapshot
from kvtools.stock_model.fields import messages, split
from kvtools.stock_model.meta_graph import MetaGraph
from kvtools.stock_model.stock_ops import foreign_nodes


def halved(source: Path, output: Path, **options: Any) -> ModelExport:
    return export_split(open_checkpoint(str(source)), output, **options)


def answered(model: SplitModel, dense: Any, name: str, fed: dict[str, Any]) -> dict[str, np.ndarray]:
    """What a client does by hand: ids, rows of the snapshot, the dense part."""
    signature, snapshot = model.signature(name), Snapshot(model.snapshot)
    ids = {}
    if signature.needs_ids:
        assert signature.ids_signature is not None
        ids = asked(dense, signature.ids_signature, {key: fed[key] for key in signature.ids_inputs})
    rows = [
        snapshot.table(lookup.table.name).lookup(keys)
        for lookup, keys in zip(signature.lookups, signature.keys(fed, ids), strict=True)
    ]
    return asked(dense, name, signature.dense_request(fed, rows))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, as it was saved (`source`), and its halves (`halves`)."""
    folder = tmp_path_factory.mktemp("model")
    ranker.save(folder).rename(folder / "source")
    halved(folder / "source", folder / "halves")
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path) -> Any:
    return tf.saved_model.load(str(folder / "source"))


@pytest.fixture(scope="module")
def dense(folder: Path) -> Any:
    return tf.saved_model.load(str(folder / "halves" / "dense"))


@pytest.fixture(scope="module")
def model(folder: Path) -> SplitModel:
    return SplitModel.read(folder / "halves")


@pytest.mark.parametrize("signature", SIGNATURES)
def test_answers_are_the_models(trained: Any, dense: Any, model: SplitModel, signature: str) -> None:
    random = np.random.default_rng(1)
    for _ in range(5):
        fed = request(signature, random)
        assert same(asked(trained, signature, fed), answered(model, dense, signature, fed))


def test_the_dense_part_is_of_stock_operations_and_has_no_rows(folder: Path) -> None:
    dense = folder / "halves" / "dense"
    encoded = (dense / "saved_model.pb").read_bytes()
    assert not list(foreign_nodes(encoded))
    (graph,) = messages(split(encoded), 2)
    nodes = [node for _, node in MetaGraph.decode(graph).graph.all_nodes()]
    assert not [node.name for node in nodes if "kvtools/table" in node.name]
    assert [variable.shape for variable in open_checkpoint(str(dense)).variables] == [(7, 2)]
    assert (dense / "variables" / "variables.data-00000-of-00001").stat().st_size < 100
    assert [file.name for file in (dense / "assets").iterdir()] == ["words_0.txt"]


def test_the_manifest_says_which_ids_of_which_table_feed_which_input(model: SplitModel) -> None:
    signature = model.signature()
    told = {one.table.name: (one.ids_input, one.rows, one.found, one.dtype) for one in signature.lookups}
    assert told == {
        "user": ("user_id", "user_rows", None, "float32"),
        "item": ("item_id", "item_rows", None, "float32"),
    }
    assert {one.name: (one.dtype, one.shape) for one in signature.inputs} == {
        "item_id": ("int32", (-1,)),
        "price": ("float32", (-1,)),
        "unused": ("int64", (-1,)),
        "user_id": ("int64", (-1,)),
    }
    assert signature.dense_inputs == ("price",)
    assert {name for name in SIGNATURES if not model.signature(name).needs_ids} == {*PLAIN, "nothing"}
    half = [one for one in model.signature("many").lookups if one.table.name == "half"]
    # Equal ids are looked up once, and those that each part is asked about by themselves. Halves come as float32.
    assert [(one.ids_input, one.rows, one.found, one.dtype) for one in half] == [
        ("half", "half_rows", None, "float32"),
        (None, None, "half_found_2", "float32"),
        (None, None, "half_found_3", "float32"),
    ]
    words = model.signature("words")
    assert [one.table.name for one in words.lookups] == ["user", "user", "item"]
    assert len({one.rows for one in words.lookups}) == 3
    assert model.signature("nothing").lookups == ()
    assert model.tables["half"].value_dtype == "float16"


def test_strings_stay_with_who_computes_ids(model: SplitModel) -> None:
    words = model.signature("words")
    assert words.ids_inputs == ("item", "word")
    assert words.dense_inputs == ()


def test_ids_of_another_type_are_looked_up_or_refused(model: SplitModel) -> None:
    signature = model.signature()
    keys = signature.keys({"user_id": [1, 2], "item_id": np.array([3], np.int64)})
    assert [one.dtype for one in keys] == [np.int32, np.int64] or [one.dtype for one in keys] == [np.int64, np.int32]
    for wrong in ({"user_id": [1], "item_id": [1 << 40]}, {"user_id": [1.5], "item_id": [1]}, {"user_id": [1]}):
        with pytest.raises(UsageError, match=r"signature 'serving_default': table '(user|item)': got"):
            signature.keys(wrong)
    with pytest.raises(UsageError, match="got no ids 'user_ids', which are no input as it is"):
        model.signature("words").keys({"word": [b"a"], "item": [1]})
    with pytest.raises(UsageError, match="the model has 'begun'"):
        model.signature("other")


@pytest.mark.parametrize(
    ("signature", "why"),
    [
        (
            "branch",
            r"table 'user' \(node '.*' of function '.*'\) cannot be cut out: it is in a condition or loop, 'cond'",
        ),
        ("chained", r"table 'item' \(.*\) cannot be cut out: its ids are computed from rows of table 'user'"),
    ],
)
def test_a_lookup_that_cannot_be_cut_out_is_named(signature: str, why: str, tmp_path: Path) -> None:
    source = ranker.save(tmp_path, 0, signature, names=("serving_default",))
    with pytest.raises(BadInputError, match=why) as error:
        halved(source, tmp_path / "halves")
    assert "--savedmodel" in str(error.value)
    assert not (tmp_path / "halves").exists()


def graph_model(path: Path, *, conditional: bool) -> None:
    """A model of TensorFlow 1, in one graph."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        ids = tf.compat.v1.placeholder(tf.int64, [None, 2], "ids")
        words = tf.compat.v1.placeholder(tf.string, [None], "words")
        parts = tf.compat.v1.fixed_size_partitioner(2)
        with tf.compat.v1.variable_scope("scope"):
            user = tfplugin.get_kv_variable("user", embedding_dim=4)
            word = tfplugin.get_kv_variable("word", embedding_dim=4, partitioner=parts)
            weights = tf.compat.v1.get_variable("w", [4, 1])
        hashed = tf.strings.to_hash_bucket_fast(words, 20)

        def score(training: bool) -> Any:
            rows = tf.reduce_sum(tf.nn.embedding_lookup(user, ids), 1) + tf.nn.embedding_lookup(word, hashed)
            if conditional and not training:
                rows += tf.cond(tf.size(ids) > 2, lambda: tf.nn.embedding_lookup(word, ids[:, 0]), lambda: 0 * rows)
            # Who waits for something made of rows is no part of what ids are computed of.
            with tf.control_dependencies([tf.debugging.assert_all_finite(rows, "rows")]):
                other = tf.identity(hashed)
            return rows @ weights, tf.nn.embedding_lookup(user, other)

        step = tf.compat.v1.train.AdamOptimizer(0.1).minimize(tf.reduce_sum(score(True)[0] ** 2))
        with tfplugin.inference_mode():
            served, other = score(False)
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(3):
            session.run(step, {ids: np.arange(20).reshape(10, 2), words: np.array([b"%d" % i for i in range(10)])})
        inputs, outputs = {"ids": ids, "words": words}, {"y": served, "other": other}
        tf.compat.v1.saved_model.simple_save(session, str(path), inputs, outputs)


def in_session(folder: Path, signature: str, fed: dict[str, Any]) -> dict[str, np.ndarray]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        definition = tf.compat.v1.saved_model.load(session, ["serve"], str(folder)).signature_def[signature]
        inputs = {definition.inputs[key].name: value for key, value in fed.items()}
        return session.run({key: info.name for key, info in definition.outputs.items()}, inputs)


def test_a_graph_of_tensorflow_1(tmp_path: Path) -> None:
    graph_model(tmp_path / "source", conditional=False)
    halved(tmp_path / "source", tmp_path / "halves")
    model = SplitModel.read(tmp_path / "halves")
    signature = model.signature()
    fed = {"ids": np.array([[1, 77], [19, 1], [-1, 5]]), "words": np.array([b"3", b"x", b"3"], object)}
    expected = in_session(tmp_path / "source", "serving_default", fed)
    assert signature.ids_signature is not None
    ids = in_session(model.dense, signature.ids_signature, {key: fed[key] for key in signature.ids_inputs})
    snapshot = Snapshot(model.snapshot)
    rows = [
        snapshot.table(lookup.table.name).lookup(keys)
        for lookup, keys in zip(signature.lookups, signature.keys(fed, ids), strict=True)
    ]
    inputs = signature.dense_request(fed, rows)
    assert same(expected, in_session(model.dense, "serving_default", inputs))
    assert same(expected, asked(tf.saved_model.load(str(model.dense)), "serving_default", inputs))


@pytest.mark.parametrize("control_flow", ["v2", "v1"])
@pytest.mark.every_case
def test_a_condition_in_a_graph_of_tensorflow_1(control_flow: str, tmp_path: Path) -> None:
    enabled = tf.compat.v1.control_flow_v2_enabled()
    (tf.compat.v1.enable_control_flow_v2 if control_flow == "v2" else tf.compat.v1.disable_control_flow_v2)()
    try:
        graph_model(tmp_path / "source", conditional=True)
    finally:
        (tf.compat.v1.enable_control_flow_v2 if enabled else tf.compat.v1.disable_control_flow_v2)()
    with pytest.raises(BadInputError, match=r"table 'scope/word' .* cannot be cut out: it is in a condition or loop"):
        halved(tmp_path / "source", tmp_path / "halves")


@pytest.mark.parametrize("how", ["export", "save"])
def test_a_model_of_keras(how: str, tmp_path: Path) -> None:
    inputs = tf.keras.Input([3], dtype="int64", name="ids")
    layer = tfplugin.dynamic_embedding.keras.layers.Embedding(4, name="rows")
    outputs = tf.keras.layers.Dense(2)(tf.keras.layers.Flatten()(layer(inputs)))
    keras = tf.keras.Model(inputs, outputs)
    keras.compile(tfplugin.dynamic_embedding.DynamicEmbeddingOptimizer(tf.keras.optimizers.Adam()), "mse")
    keras.fit(np.arange(30).reshape(10, 3), np.ones((10, 2)), verbose=0)
    if how == "export":
        keras.export(str(tmp_path / "source"), verbose=False)
    else:
        tf.saved_model.save(keras, str(tmp_path / "source"))
    halved(tmp_path / "source", tmp_path / "halves")
    model = SplitModel.read(tmp_path / "halves")
    source, dense = (tf.saved_model.load(str(path)) for path in (tmp_path / "source", model.dense))
    fed = {model.signature().inputs[0].name: np.array([[1, 2, 3], [29, 30, -1]])}
    assert same(asked(source, "serving_default", fed), answered(model, dense, "serving_default", fed))


def test_two_models_in_one_process_share_nothing(folder: Path, dense: Any, model: SplitModel, tmp_path: Path) -> None:
    halved(ranker.save(tmp_path, 1), tmp_path / "halves")
    other, random = SplitModel.read(tmp_path / "halves"), np.random.default_rng(2)
    other_dense = tf.saved_model.load(str(other.dense))
    for path, own, part in ((folder / "source", model, dense), (tmp_path / "source-1", other, other_dense)):
        trained = tf.saved_model.load(str(path))
        for signature in ("serving_default", "words"):
            fed = request(signature, random)
            assert same(asked(trained, signature, fed), answered(own, part, signature, fed))


def test_cut_rows_are_those_of_missing_keys(folder: Path, trained: Any, tmp_path: Path) -> None:
    policy = Policy.of(Criteria(norms=(Clip("l2", 1.5),)))
    export = halved(folder / "source", tmp_path / "halves", policy=policy, check=2)
    model = SplitModel.read(tmp_path / "halves")
    dense = tf.saved_model.load(str(model.dense))
    cut = {table.name: table.cut for table in export.tables}
    assert cut["user"] > 0
    fed = {"user": np.arange(-5, 40), "item": np.zeros(45, np.int32), "half": np.ones(45, np.uint64)}
    whole, clipped = asked(trained, "many", fed), answered(model, dense, "many", fed)
    small = np.linalg.norm(whole["a"].astype(np.float64), axis=1) < 1.5
    assert cut["user"] == small.sum()
    assert np.array_equal(clipped["a"], np.where(small[:, None], 0, whole["a"]))
    assert clipped["sizes"][0] == 45 - cut["user"]
    assert clipped["sizes"][1] == 25 - cut["item"]
    assert "values that new keys begin with" in export.warnings[0]


def test_rows_of_another_type(folder: Path, trained: Any, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    halved(folder / "source", tmp_path / "models" / "7", dtype="int8", check=2)
    model = SplitModel.read(tmp_path / "models" / "7")
    fed = request("serving_default", np.random.default_rng(3))
    dense = tf.saved_model.load(str(model.dense))
    expected, got = asked(trained, "serving_default", fed), answered(model, dense, "serving_default", fed)
    assert 0 < np.abs(expected["click"] - got["click"]).max() < 0.05


def test_a_wrong_half_fails_the_check(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = export_split_module.write_variable

    def wrong(writer: Any, variable: Any, chunks: Any) -> None:
        write(writer, variable, (chunk * 2 if chunk.dtype == np.float32 else chunk for chunk in chunks))

    monkeypatch.setattr(export_split_module, "write_variable", wrong)
    with pytest.raises(CheckFailedError, match="serving_default: click: values differ"):
        halved(folder / "source", tmp_path / "halves", check=2)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_what_was_there(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(folder / "halves", tmp_path / "halves")
    before = (tmp_path / "halves" / "split.json").read_text()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_split_module, "write_variable", full)
    with pytest.raises(OutputError, match="No space left on device"):
        halved(folder / "source", tmp_path / "halves", force=True)
    assert (tmp_path / "halves" / "split.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["halves"]


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = str(folder / "source"), tmp_path / "halves"
    assert main(["export", source, "--split", str(output), "--clip-l2", "1.5", "--dry-run"]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert not output.exists()
    assert main(["export", source, "--split", str(output), "--check", "2"]) == 0
    printed = capsys.readouterr().out
    assert "checked: words: 2 requests, 2 outputs each: the same to the bit" in printed
    assert printed.endswith(f"wrote {output}\n")
    assert main(["export", source, "--split", str(output)]) == 1
    assert "it exists already" in capsys.readouterr().err
    assert main(["export", source, "--split", str(output), "--force", "--json", "--dtype", "bfloat16"]) == 0
    assert json.loads(capsys.readouterr().out)["split"] == str(output)
    assert main(["inspect", str(output), "--json"]) == 0
    assert {table["name"]: table["value_dtype"] for table in json.loads(capsys.readouterr().out)["tables"]} == {
        "code": "int64",
        "drawn": "bfloat16",
        "exact": "bfloat16",
        "half": "bfloat16",
        "item": "bfloat16",
        "user": "bfloat16",
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--split", "a", "--snapshot", "b"], "--snapshot OUT or --split OUT, one of them"),
        (["--split", "a", "--table", "user"], "got --split and --table user, expected the whole model"),
    ],
)
def test_options_that_make_no_sense(
    folder: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(folder / "source"), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_tables_alone_are_no_model_in_two_halves(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = str(folder / "halves" / "tables.kvsnap")
    assert main(["export", snapshot, "--split", str(tmp_path / "halves")]) == 2
    assert "is no trained SavedModel with lookups" in capsys.readouterr().err


def _flip(file: Path, place: float = 0.5) -> None:
    content = bytearray(file.read_bytes())
    content[int(len(content) * place)] ^= 4
    file.write_bytes(content)


def test_verify_and_inspect_count_the_dense_half(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    halves = str(folder / "halves")
    dense = open_checkpoint(str(folder / "halves" / "dense")).variables
    assert main(["verify", halves]) == 0
    assert f"{len(dense)} dense variable" in capsys.readouterr().out.replace("\n", " ")
    assert main(["inspect", halves, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {one["name"] for one in shown["variables"]} == {one.name for one in dense}


@pytest.mark.parametrize(
    "what", ["variables/variables.data-00000-of-00001", "variables/variables.index", "saved_model.pb"]
)
def test_damage_in_the_dense_half_is_an_error(
    folder: Path, tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    halves = shutil.copytree(folder / "halves", tmp_path / "halves")
    _flip(halves / "dense" / what)
    assert main(["verify", str(halves)]) == 3
    assert what.rpartition("/")[2].partition(".data")[0] in capsys.readouterr().out
    assert len(open_checkpoint(str(halves)).tables["user"]) > 0, "the tables can be read"


def test_a_flipped_bit_of_graph_or_manifest_is_never_served(folder: Path, tmp_path: Path) -> None:
    from kvtools.server.split_store import open_split

    for number, place in enumerate((0.1, 0.5, 0.9)):
        halves = shutil.copytree(folder / "halves", tmp_path / f"graph{number}")
        _flip(halves / "dense" / "saved_model.pb", place)
        with pytest.raises(CorruptFileError, match=r"saved_model.pb': it is not what was written: SHA-256 mismatch"):
            open_split(halves)
    halves = shutil.copytree(folder / "halves", tmp_path / "manifest")
    manifest = (halves / "split.json").read_text()
    (halves / "split.json").write_text(manifest.replace('"dim": 4', '"dim": 5', 1).replace('"rows": ', '"rows": 1', 1))
    with pytest.raises(CorruptFileError, match="it is not what was written: SHA-256 mismatch"):
        open_split(halves)


def test_halves_without_digests_are_served_and_verify_says_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvtools.server.split_store import open_split

    halves = shutil.copytree(folder / "halves", tmp_path / "halves")
    manifest = json.loads((halves / "split.json").read_text())
    del manifest["files"], manifest["digest"]
    (halves / "split.json").write_text(json.dumps(manifest))
    open_split(halves)
    assert main(["verify", str(halves)]) == 0
    assert "cannot be checked: it was exported before kvtools wrote digests" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize("damage", ["not JSON", '{"format": 1}', '{"format": 1, "tables": 3}'])
def test_a_damaged_manifest(damage: str, tmp_path: Path) -> None:
    (tmp_path / "split.json").write_text(damage)
    with pytest.raises(CorruptFileError, match="the manifest is damaged"):
        SplitModel.read(tmp_path)


def test_a_manifest_of_a_later_kvtools(tmp_path: Path) -> None:
    (tmp_path / "split.json").write_text('{"format": 2}')
    with pytest.raises(BadInputError, match="got format 2, expected at most 1; update kvtools"):
        SplitModel.read(tmp_path)
    with pytest.raises(BadInputError, match="No such file"):
        SplitModel.read(tmp_path / "other")
