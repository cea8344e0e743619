"""Whole models: a SavedModel that TensorFlow runs, asked through every protocol."""

from __future__ import annotations

import base64
import gc
import json
import re
import shutil
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("grpc")
pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from kvtools.errors import BadInputError, MissingDependencyError
from kvtools.server import kserve_grpc, saved_models, tensorflow_grpc
from kvtools.server.app import create_app
from kvtools.server.caller import Caller
from kvtools.server.catalog import Catalog, ServedModel, ServedVersion, VersionStatus, static_catalog
from kvtools.server.kserve_rest import HEADER
from kvtools.server.protocol_error import ProtocolError
from kvtools.server.protos import message
from kvtools.server.saved_models import SavedModelStore, open_store
from kvtools.server.settings import Settings
from kvtools.server.signatures import signature_of
from kvtools.server.sources import ModelSource
from kvtools.server.store import TableStore
from kvtools.server.versions import Versions
from kvtools.warmup import WARMUP_FILE, WarmupRequest, prediction_log, write_requests

IDS = {"name": "ids", "shape": [1], "datatype": "INT64", "data": [-7]}
pytestmark = pytest.mark.usefixtures("tf")


@pytest.fixture(scope="module")
def folder(tf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`serving_default`: x [n, 2] -> scores [n, 1], twice; `words`: text [n] -> upper, raw_bytes; `word`; `half`."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    module = tf.Module()
    module.weights = tf.Variable([[2.0], [3.0]])

    @tf.function(input_signature=[tf.TensorSpec([None, 2], tf.float32, name="x")])
    def scores(x: Any) -> Any:
        return {"scores": x @ module.weights, "twice": 2.0 * x}

    @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="text")])
    def words(text: Any) -> Any:
        return {"upper": tf.strings.upper(text), "raw_bytes": text}

    @tf.function(
        input_signature=[
            tf.TensorSpec([None], tf.bfloat16, name="a"),
            tf.TensorSpec([], tf.bool, name="negative"),
        ]
    )
    def half(a: Any, negative: Any) -> Any:
        tf.debugging.assert_less(tf.size(a), 5, "too many")
        return {"b": tf.where(negative, -a, a)}

    word = tf.function(lambda text: {"same": tf.identity(text)}, [tf.TensorSpec([], tf.string, name="text")])
    signatures = {"serving_default": scores, "word": word.get_concrete_function(), "words": words, "half": half}
    tf.saved_model.save(module, str(folder), signatures)
    return folder


@pytest.fixture(scope="module")
def catalog(folder: Path) -> Catalog:
    store = open_store(folder)
    assert isinstance(store, SavedModelStore)
    version = ServedVersion("ranker", 4, folder, store)  # type: ignore[arg-type]
    return Catalog([ServedModel("ranker", (version,), {}, (VersionStatus(4, "AVAILABLE"),))])


@pytest.fixture(scope="module")
def client(catalog: Catalog) -> Iterator[TestClient]:
    with TestClient(create_app(catalog, Settings()), raise_server_exceptions=False) as client:
        yield client


def predict(client: TestClient, **body: Any) -> Any:
    answer = client.post("/v1/models/ranker:predict", json=body)
    return answer.json() if answer.status_code == 200 else (answer.status_code, answer.json()["error"])


def test_rows_and_columns(client: TestClient) -> None:
    assert predict(client, instances=[[1, 2], [3.5, 4]]) == {
        "predictions": [{"scores": [8.0], "twice": [2.0, 4.0]}, {"scores": [19.0], "twice": [7.0, 8.0]}]
    }
    assert predict(client, inputs={"x": [[1, 2]]}) == {"outputs": {"scores": [[8.0]], "twice": [[2.0, 4.0]]}}
    assert predict(client, inputs=[[1, 2]], output_filter=["scores"]) == {"outputs": [[8.0]]}
    assert predict(client, signature_name="half", inputs={"a": [1.5, 2], "negative": True}) == {"outputs": [-1.5, -2.0]}


def test_strings_and_bytes(client: TestClient) -> None:
    answer = predict(client, signature_name="words", instances=["hé", {"b64": "AP8="}])
    assert answer["predictions"][0] == {"upper": "Hé", "raw_bytes": {"b64": "aMOp"}}
    assert answer["predictions"][1]["raw_bytes"] == {"b64": "AP8="}
    for written in ("aMOp/w==", "aMOp/w", "aMOp\r\n/w==\n"):  # as TensorFlow Serving reads it
        raw = predict(client, signature_name="words", inputs=[{"b64": written}], output_filter=["raw_bytes"])
        assert raw == {"outputs": [{"b64": "aMOp/w=="}]}
    for wrong in ("%", "aMOp/w=", "aMOp/", "aMOp_w=="):
        assert predict(client, signature_name="words", instances=[{"b64": wrong}]) == (400, "Unable to base64 decode")


def test_a_string_may_be_a_scalar(catalog: Catalog, client: TestClient) -> None:
    assert predict(client, signature_name="word", inputs="hé") == {"outputs": "hé"}
    assert predict(client, signature_name="word", inputs={"text": {"b64": "YQAA"}}) == {"outputs": "a\0\0"}
    text = {"name": "text", "datatype": "BYTES", "shape": [], "data": ["a\0"]}
    document = {"inputs": [text], "parameters": {"signature_name": "word"}}
    assert client.post("/v2/models/ranker/infer", json=document).json()["outputs"] == [{**text, "name": "same"}]
    request = message("tensorflow.serving.PredictRequest")(
        model_spec={"name": "ranker", "signature_name": "word"}, inputs={"text": {"dtype": 7, "string_val": [b"a\0"]}}
    )
    data = tensorflow_grpc.methods(catalog, Settings())["/tensorflow.serving.PredictionService/Predict"](
        request.SerializeToString(), Caller()
    )
    assert message("tensorflow.serving.PredictResponse").FromString(data).outputs["same"].string_val == [b"a\0"]


@pytest.mark.parametrize("half", [b"\\ud800", b"\\uDC00x", b"\xed\xa0\x80"])
def test_half_a_surrogate_pair_is_no_text(client: TestClient, half: bytes) -> None:
    def check(url: str, body: bytes, place: str) -> None:
        answer = client.post(url, content=body)
        told = rf'half a surrogate pair in the string "bc\\ud.*" at {re.escape(place)}, which is no text'
        assert answer.status_code == 400 and re.search(told, answer.json()["error"]), answer.text

    string = b'"bc' + half + b'"'
    v1, v2 = "/v1/models/ranker:predict", "/v2/models/ranker/infer"
    check(v1, b'{"signature_name": "words", "inputs": {"text": ["a", ' + string + b"]}}", "inputs.text[1]")
    check(v1, b'{"signature_name": "words", "instances": ["\\ud83d\\ude00", ' + string + b"]}", "instances[1]")
    check(v1, b'{"signature_name": ' + string + b', "instances": ["a"]}', "signature_name")
    check(v1, b'{"signature_name": "words", "instances": [{' + string + b': "a"}]}', "instances[0]")
    tensor = b'"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ['
    check(v2, b'{"parameters": {"signature_name": "words"}, ' + tensor + string + b"]}]}", "inputs[0].data[0]")
    check(v2, b'{"id": ' + string + b", " + tensor + b'"a"]}]}', "id")


def test_what_is_no_text_is_told_from_other_bytes(client: TestClient) -> None:
    texts = [b"\xff!", b"\xfe!", "é".encode(), b"", b"\xed\xa0\x80"]  # the last one: half a surrogate pair
    sent = [{"b64": base64.b64encode(text).decode()} for text in texts]

    def read(values: list[Any]) -> list[bytes]:
        return [value.encode() if isinstance(value, str) else base64.b64decode(value["b64"]) for value in values]

    rows = predict(client, signature_name="words", instances=sent)["predictions"]
    assert read([row["upper"] for row in rows]) == texts
    columns = predict(client, signature_name="words", inputs={"text": sent}, output_filter=["upper"])["outputs"]
    assert read(columns) == texts and columns[2:4] == ["é", ""]
    back = predict(client, signature_name="words", inputs={"text": columns}, output_filter=["upper"])["outputs"]
    assert back == columns, "an answer is taken as an input"


def test_v2_refuses_to_tell_in_json_what_is_no_text(client: TestClient) -> None:
    raw = b"\2\0\0\0\xff!"
    head: dict[str, Any] = {
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(raw)}}],
        "parameters": {"signature_name": "words"},
        "outputs": [{"name": "upper"}],
    }
    for binary in (False, True):
        head["outputs"][0]["parameters"] = {"binary_data": binary}
        text = json.dumps(head).encode()
        answer = client.post("/v2/models/ranker/infer", content=text + raw, headers={HEADER: str(len(text))})
        if binary:
            assert answer.content[int(answer.headers[HEADER]) :] == raw
        else:
            assert answer.status_code == 400
            assert answer.json()["error"] == (
                "output 'upper': a value is not UTF-8, which this protocol has no JSON for: set binary_data"
            )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"instances": [[1, 2, 3]]}, "input 'x': expected shape [-1, 2], got [1, 3]"),
        ({"instances": [["a", 2]]}, 'JSON Value: "a" Type: String is not of expected type: float'),
        ({"inputs": {"x": [[1, 2]]}, "signature_name": "y"}, '"half", "serving_default", "word", "words"'),
        ({"inputs": {"a": [1, 2, 3, 4, 5], "negative": False}, "signature_name": "half"}, "too many"),
        ({"inputs": {"a": [1]}, "signature_name": "half"}, "Missing named input: negative"),
        ({"inputs": [1], "signature_name": "half"}, "expecting an object"),
        ({"instances": [1], "signature_name": "half"}, "expecting list of objects"),
        ({"inputs": [[10**400, 1]]}, "too large"),
    ],
)
def test_what_is_wrong_is_told(client: TestClient, body: dict[str, Any], message: str) -> None:
    status, error = predict(client, **body)
    assert status == 400 and message in error


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1e39", "9" * 400 + ".0"])
def test_a_number_that_would_become_infinite_is_refused(client: TestClient, number: str) -> None:
    answer = client.post("/v1/models/ranker:predict", content=f'{{"instances": [[{number}, 2.0]]}}')
    assert answer.status_code == 400 and "too large" in answer.json()["error"]


def test_infinity_has_a_word_of_its_own(client: TestClient) -> None:
    assert client.post("/v1/models/ranker:predict", content='{"instances": [[Infinity, 2.0]]}').status_code == 200


def test_metadata_is_the_models_own(client: TestClient) -> None:
    metadata = client.get("/v1/models/ranker/metadata").json()
    assert metadata["model_spec"] == {"name": "ranker", "signature_name": "", "version": "4"}
    definitions = metadata["metadata"]["signature_def"]["signature_def"]
    assert sorted(definitions) == ["half", "serving_default", "word", "words"]
    assert definitions["serving_default"]["inputs"] == {
        "x": {
            "dtype": "DT_FLOAT",
            "tensor_shape": {"dim": [{"size": "-1", "name": ""}, {"size": "2", "name": ""}], "unknown_rank": False},
            "name": "serving_default_x:0",
        }
    }
    v2 = client.get("/v2/models/ranker").json()
    assert v2["platform"] == "tensorflow_savedmodel"
    assert v2["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]


def test_grpc_and_v2_give_what_tensorflow_gives(tf: Any, catalog: Catalog, client: TestClient, folder: Path) -> None:
    x = np.random.default_rng(0).normal(size=(5, 2)).astype(np.float32)
    expected = tf.saved_model.load(str(folder)).signatures["serving_default"](x=tf.constant(x))["scores"].numpy()
    dims = [{"size": size} for size in x.shape]
    request = message("tensorflow.serving.PredictRequest")(
        model_spec={"name": "ranker"},
        inputs={"x": {"dtype": 1, "tensor_shape": {"dim": dims}, "float_val": x.ravel().tolist()}},
        output_filter=["scores"],
    )
    methods = tensorflow_grpc.methods(catalog, Settings())
    data = methods["/tensorflow.serving.PredictionService/Predict"](request.SerializeToString(), Caller())
    answer = message("tensorflow.serving.PredictResponse").FromString(data)
    assert answer.outputs["scores"].tensor_content == expected.tobytes()
    infer = message("inference.ModelInferRequest")(
        model_name="ranker",
        inputs=[{"name": "x", "datatype": "FP32", "shape": x.shape}],
        raw_input_contents=[x.tobytes()],
    )
    data = kserve_grpc.methods(catalog, Settings())["/inference.GRPCInferenceService/ModelInfer"](
        infer.SerializeToString(), Caller()
    )
    assert message("inference.ModelInferResponse").FromString(data).raw_output_contents[0] == expected.tobytes()
    item = {"name": "x", "datatype": "FP32", "shape": [5, 2], "data": x.tolist()}
    outputs = client.post("/v2/models/ranker/infer", json={"inputs": [item]}).json()["outputs"]
    assert np.array(outputs[0]["data"], np.float32).tobytes() == expected.tobytes()


def test_v2_has_sixteen_bit_floats_as_binary_and_strings_both_ways(client: TestClient) -> None:
    head = (
        b'{"inputs": [{"name": "a", "datatype": "BF16", "shape": [2], "parameters": {"binary_data_size": 4}},'
        b' {"name": "negative", "datatype": "BOOL", "shape": [], "data": [true]}],'
        b' "parameters": {"signature_name": "half", "binary_data_output": true}}'
    )
    values = b"\x80\x3f\x00\x40"  # 1, 2
    answer = client.post("/v2/models/ranker/infer", content=head + values, headers={HEADER: str(len(head))})
    assert answer.content[int(answer.headers[HEADER]) :] == b"\x80\xbf\x00\xc0"
    as_json = head.replace(b', "binary_data_output": true', b"")
    answer = client.post("/v2/models/ranker/infer", content=as_json + values, headers={HEADER: str(len(as_json))})
    assert (answer.status_code, "BF16 are answered as binary only" in answer.text) == (400, True)
    text = {"name": "text", "datatype": "BYTES", "shape": [2], "data": ["a", "é"]}
    document = {"inputs": [text], "parameters": {"signature_name": "words"}, "outputs": [{"name": "upper"}]}
    assert client.post("/v2/models/ranker/infer", json=document).json()["outputs"][0]["data"] == ["A", "é"]
    document["outputs"] = [{"name": "raw_bytes", "parameters": {"binary_data": True}}]
    answer = client.post("/v2/models/ranker/infer", json=document)
    assert answer.content[int(answer.headers[HEADER]) :] == b"\1\0\0\0a\2\0\0\0\xc3\xa9"


def test_tables_are_served_without_tensorflow(
    sample_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kvtools.dialects.detect import open_checkpoint
    from kvtools.export import export_saved_model

    export_saved_model(open_checkpoint(sample_path), tmp_path / "exported")
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    store = open_store(tmp_path / "exported")
    assert isinstance(store, TableStore) and sorted(store.tables) == ["ads/emb", "empty_emb", "user_emb"]
    client = TestClient(create_app(static_catalog(store), Settings()))
    answer = client.post("/v1/models/default:predict", json={"signature_name": "ads_emb", "instances": [-7]})
    assert answer.json() == {"predictions": [{"embeddings": [2.0, 2.125, 2.25, 2.375], "found": True}]}
    with pytest.raises(MissingDependencyError, match=r"kvtools\[tensorflow\]"):
        open_store(folder)


def test_errors_of_operations_say_what_is_wrong_and_not_where_in_the_graph(tf: Any, tmp_path: Path) -> None:
    tf1 = tf.compat.v1
    with tf1.Graph().as_default(), tf1.Session() as session:
        ids, examples = tf1.placeholder(tf.int64, [None], "ids"), tf1.placeholder(tf.string, [None], "examples")
        parsed = tf1.parse_example(examples, {"a": tf1.FixedLenFeature([1], tf.float32)})["a"]
        signature = tf1.saved_model.predict_signature_def
        builder = tf1.saved_model.Builder(str(tmp_path / "model"))
        signatures = {
            "rows": signature({"ids": ids}, {"rows": tf1.gather([1.0, 2.0], ids)}),
            "parsed": signature({"examples": examples}, {"a": parsed}),
            "sum": signature({"ids": ids}, {"sum": tf.function(lambda x: x[:2] + x)(ids)}),
        }
        builder.add_meta_graph_and_variables(session, ["serve"], signatures)
        builder.save()
    store = open_store(tmp_path / "model")
    with pytest.raises(ProtocolError) as told:
        store.signatures["rows"].run({"ids": np.array([7])}, ["rows"], Settings())
    assert str(told.value) == "indices[0] = 7 is not in [0, 2)"
    with pytest.raises(ProtocolError, match=r"^Incompatible shapes: \[2\] vs. \[3\]$"):
        store.signatures["sum"].run({"ids": np.arange(3)}, ["sum"], Settings())
    with pytest.raises(ProtocolError, match=r"^Could not parse example input, value: '\\xff'$"):
        store.signatures["parsed"].run({"examples": np.array([b"\xff"], object)}, ["a"], Settings())


def test_inputs_that_have_values_of_their_own_may_be_left_out(tf: Any, tmp_path: Path) -> None:
    three = tf.constant(3.0)

    class Module(tf.Module):  # type: ignore[misc]
        @tf.function(
            input_signature=[tf.TensorSpec([None], tf.float32, name="x"), tf.TensorSpec([], tf.float32, name="scale")]
        )
        def scaled(self, x: Any, scale: Any = three) -> Any:
            return {"y": x * scale}

    module = Module()
    tf.saved_model.save(module, str(tmp_path / "model"), {"serving_default": module.scaled})
    version = ServedVersion("ranker", 1, tmp_path / "model", open_store(tmp_path / "model"))
    catalog = Catalog([ServedModel("ranker", (version,), {}, (VersionStatus(1, "AVAILABLE"),))])
    client = TestClient(create_app(catalog, Settings()))
    assert predict(client, inputs={"x": [1, 2]}) == {"outputs": [3.0, 6.0]}
    assert predict(client, inputs={"x": [1, 2], "scale": 5}) == {"outputs": [5.0, 10.0]}
    assert predict(client, instances=[{"x": 1}, {"x": 2}]) == {"predictions": [3.0, 6.0]}
    assert predict(client, inputs={"scale": 5}) == (400, "Missing named input: x in 'inputs' object.")
    assert predict(client, instances=[{"x": 1}, {"x": 2, "scale": 5}])[1].endswith("keys must be equal to: x")
    inputs = [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1]}]
    assert client.post("/v2/models/ranker/infer", json={"inputs": inputs}).json()["outputs"][0]["data"] == [3.0]
    request = message("tensorflow.serving.PredictRequest")(
        model_spec={"name": "ranker"}, inputs={"x": {"dtype": 1, "tensor_shape": {"dim": [{"size": 1}]}}}
    )
    request.inputs["x"].float_val.append(2)
    methods = tensorflow_grpc.methods(catalog, Settings())
    data = methods["/tensorflow.serving.PredictionService/Predict"](request.SerializeToString(), Caller())
    answer = message("tensorflow.serving.PredictResponse").FromString(data)
    assert np.frombuffer(answer.outputs["y"].tensor_content, np.float32).tolist() == [6.0]
    told = client.get("/v1/models/ranker/metadata").json()["metadata"]["signature_def"]["signature_def"]
    assert told["serving_default"]["defaults"] == {
        "scale": {"dtype": "DT_FLOAT", "tensor_shape": {}, "tensor_content": "AABAQA=="}
    }
    described = message("tensorflow.serving.SignatureDefMap").FromString(tensorflow_grpc.signature_def_map(version))
    assert described.signature_def["serving_default"].defaults["scale"].tensor_content == np.float32(3).tobytes()


def test_a_model_that_tensorflow_cannot_load(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"\xff\xff not a model")
    with pytest.raises(BadInputError, match="with TensorFlow"):
        open_store(tmp_path)


def test_what_tensorflow_cannot_load_is_told_without_paths(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtools.server.versions._SETTLED_WITHOUT_POLL", 0.0)  # the files here are whole
    shutil.copytree(folder, tmp_path / "sm" / "3")
    catalog = Catalog()
    versions = Versions(catalog, [ModelSource("sm", str(tmp_path / "sm"))], Settings())
    versions.load()
    shutil.copytree(folder, tmp_path / "sm" / "5")
    (tmp_path / "sm" / "5" / "saved_model.pb").write_bytes(b"\xff\xff not a model")
    versions.look()
    (status,) = [status for status in catalog.status("sm") if status.number == 5]
    assert status.error_code == "INVALID_ARGUMENT" and "with TensorFlow" in status.error_message
    assert str(tmp_path) not in status.error_message and "sm/5" not in status.error_message


def test_variables_that_loading_gives_no_value_are_told_before_a_request_meets_them(
    tf: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # tf.saved_model.save writes each variable of Keras 3 twice, and its restore reads one, which no function does.
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1, name="score")])
    model.plain = tf.function(lambda x: {"y": 2.0 * x}, [tf.TensorSpec([None], tf.float32, name="x")])
    model.rows = tf.function(lambda x: {"y": model(x)}, [tf.TensorSpec([None, 2], tf.float32, name="x")])
    tf.saved_model.save(model, str(tmp_path / "none"), signatures={"rows": model.rows})
    tf.saved_model.save(model, str(tmp_path / "some"), signatures={"rows": model.rows, "plain": model.plain})
    says = (
        r"signature 'rows' reads 2 variables that loading gives no value \('sequential.*/score/bias', .*model\.export"
    )
    with pytest.raises(BadInputError, match=says):
        open_store(tmp_path / "none")
    store = open_store(tmp_path / "some")
    assert re.search(says + r".*; 1 of 2 signatures will fail", caplog.text)
    answer = store.signatures["plain"].run({"x": np.float32([3])}, ["y"], Settings())
    assert answer["y"].tolist() == [6.0]
    model.export(str(tmp_path / "exported"), verbose=False)
    assert "serve" in open_store(tmp_path / "exported").signatures


@pytest.mark.parametrize(
    ("left_out", "missing"),
    [
        (["variables"], "variables.index"),
        (["variables.index"], "variables.index"),
        (["variables.data-00000-of-00001"], "variables.data"),
        (["variables", "fingerprint.pb", "assets"], "variables.index"),
    ],
)
def test_a_model_that_is_half_copied_does_not_start_tensorflow(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, left_out: list[str], missing: str
) -> None:
    half = shutil.copytree(folder, tmp_path / "4", ignore=shutil.ignore_patterns(*left_out))
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    with pytest.raises(BadInputError, match=f"it has no 'variables/{missing}'"):
        open_store(half)


def test_a_model_without_variables_needs_none(tf: Any, tmp_path: Path) -> None:
    tf1 = tf.compat.v1
    with tf.Graph().as_default(), tf1.Session() as session:
        x = tf1.placeholder(tf.float32, [None], name="x")
        tf1.saved_model.simple_save(session, str(tmp_path / "frozen"), {"x": x}, {"y": x + 1.0})
    assert not (tmp_path / "frozen" / "variables" / "variables.index").exists()
    store = open_store(tmp_path / "frozen")
    answer = store.signatures["serving_default"].run({"x": np.float32([1, 2])}, ["y"], Settings())
    assert answer["y"].tolist() == [2, 3]


def test_an_error_of_an_operation_has_its_code(catalog: Catalog) -> None:
    store: Any = catalog.version().store
    inputs = {"a": np.zeros(5, store.signatures["half"].inputs["a"].dtype), "negative": np.array(True)}
    with pytest.raises(ProtocolError) as caught:
        store.signatures["half"].run(inputs, ["b"], Settings())
    assert (caught.value.code, caught.value.status) == ("INVALID_ARGUMENT", 400)


def test_versions_of_whole_models_come_and_go(
    folder: Path,
    sample_path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By HandleReloadConfigRequest, as TensorFlow Serving's clients change what is served."""
    monkeypatch.setattr("kvtools.server.versions._SETTLED_WITHOUT_POLL", 0.0)  # the files here are whole
    for number in (3, 4):
        shutil.copytree(folder, tmp_path / "ranker" / str(number))
    catalog = Catalog()
    settings = Settings(admin=True)
    versions = Versions(catalog, [ModelSource("ranker", str(tmp_path / "ranker"))], settings)
    versions.start()
    try:
        client = TestClient(create_app(catalog, settings), raise_server_exceptions=False)
        assert client.get("/v1/models/ranker/metadata").json()["model_spec"]["version"] == "4"
        assert client.post("/v1/tables:lookup", json={"tables": {"x": {"keys": [1]}}}).status_code == 404
        old = weakref.ref(catalog.version("ranker").store)
        policy = {"specific": {"versions": [3]}}
        configs = [
            {"name": "ranker", "base_path": str(tmp_path / "ranker"), "model_version_policy": policy},
            {"name": "emb", "base_path": str(sample_path)},
        ]
        request = message("tensorflow.serving.ReloadConfigRequest")(config={"model_config_list": {"config": configs}})
        with caplog.at_level("INFO", "kvtools.serve"):
            tensorflow_grpc.methods(catalog, settings)[tensorflow_grpc.RELOAD](request.SerializeToString(), Caller())
        assert "model 'ranker': version 3 is served: the whole model, after" in caplog.text
        assert client.get("/v1/models/ranker/metadata").json()["model_spec"]["version"] == "3"
        answer = client.post("/v1/models/ranker:predict", json={"inputs": [[1, 2]], "output_filter": ["scores"]})
        assert answer.json() == {"outputs": [[8.0]]}
        answer = client.post("/v2/models/ads/emb/infer", json={"inputs": [IDS], "outputs": [{"name": "found"}]})
        assert answer.json()["outputs"][0]["data"] == [True]
        del answer
        assert old() is None, "the version before is held on to"
    finally:
        versions.stop()


# ---- Warm-up requests ----


def warm(folder: Path, *records: bytes) -> Path:
    write_requests(folder / WARMUP_FILE, records)
    return folder


def test_the_graph_of_a_model_that_was_let_go_is_gone_once_the_next_is_loaded(folder: Path) -> None:
    gc.disable()
    try:
        store = SavedModelStore(folder)
        graph = weakref.ref(store.signatures["serving_default"].graph._session.graph)
        del store
        assert graph() is not None, "its objects hold one another"
        SavedModelStore(folder)
        assert graph() is None
    finally:
        gc.enable()


def test_warm_up_requests_are_answered_and_bad_ones_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    fetch = saved_models._Graph.fetch

    def noted(self: Any, outputs: Any, inputs: Any, arrays: Any) -> Any:
        asked.append(arrays)
        return fetch(self, outputs, inputs, arrays)

    monkeypatch.setattr(saved_models._Graph, "fetch", noted)
    half = {"a": np.zeros(5, ml_dtypes.bfloat16), "negative": np.array(True)}
    records = [
        prediction_log(WarmupRequest("serving_default", {"x": np.float32([[1, 2]])})),
        prediction_log(WarmupRequest("none", {"x": np.float32([[1, 2]])})),
        prediction_log(WarmupRequest("half", half)),  # too many
        b"\xff",
        prediction_log(WarmupRequest("words", {"text": np.array([b"a"], object)})),
    ]
    model = warm(shutil.copytree(folder, tmp_path / "5"), *records)
    with caplog.at_level("INFO", "kvtools.serve"):
        open_store(model)
    assert len(asked) == 3 and asked[0][0].tolist() == [[1, 2]] and asked[2][0].tolist() == [b"a"]
    told = [record.message.partition("5': ")[2] for record in caplog.records]
    known = "'half', 'serving_default', 'word', 'words'"
    assert told[0] == f"warm-up request 2 is left out: there is no signature 'none', but {known}"
    assert told[1].startswith("warm-up request 3 is left out: ") and "too many" in told[1]
    assert told[2].startswith("warm-up request 4 is left out: got malformed bytes")
    assert told[3] == "warmed up by 2 requests"
    caplog.clear()
    file = model / WARMUP_FILE
    file.write_bytes(file.read_bytes()[:-1])
    open_store(model)
    assert "its warm-up requests end early" in caplog.text and "record 5 is damaged or cut" in caplog.text


@pytest.mark.parametrize("first", [True, False], ids=["first version", "next version"])
def test_a_version_is_warm_before_it_is_available(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    monkeypatch.setattr("kvtools.server.versions._SETTLED_WITHOUT_POLL", 0.0)  # the files here are whole
    models, catalog = tmp_path / "ranker", Catalog()
    versions = Versions(catalog, [ModelSource("ranker", str(models))], Settings())
    if not first:
        shutil.copytree(folder, models / "1")
        versions.load()
    warm(
        shutil.copytree(folder, models / "2"),
        prediction_log(WarmupRequest("words", {"text": np.array([b"a"], object)})),
    )
    states = []
    run = saved_models.ModelSignature.run

    def noted(*arguments: Any) -> Any:
        states.append({status.number: status.state for status in catalog.status("ranker")})
        return run(*arguments)

    monkeypatch.setattr(saved_models.ModelSignature, "run", noted)
    (versions.load if first else versions.look)()
    assert states == [{2: "LOADING"} if first else {1: "AVAILABLE", 2: "LOADING"}]
    assert catalog.version("ranker").number == 2


def test_a_trained_model_says_how_its_signatures_come_to_be_served(tmp_path: Path) -> None:
    folder = tmp_path / "trained"
    shutil.copytree(Path(__file__).parents[1] / "data" / "tfra" / "savedmodel", folder)
    version = ServedVersion("m", 1, folder, TableStore(folder, cache=tmp_path / "cache"))
    with pytest.raises(ProtocolError, match="served once `kvtools export --savedmodel` wrote it"):
        signature_of(version, "click")
