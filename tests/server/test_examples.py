"""`:classify`, `:regress`, and gRPC's `Classify`, `Regress` and `MultiInference`, of a model that takes tf.Example."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")
pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from kvtools.server import tensorflow_grpc
from kvtools.server.app import create_app
from kvtools.server.caller import Caller
from kvtools.server.catalog import Catalog, ServedModel, ServedVersion, VersionStatus
from kvtools.server.examples import from_json
from kvtools.server.lookups import Lookups
from kvtools.server.protocol_error import ProtocolError
from kvtools.server.protos import message
from kvtools.server.saved_models import open_store
from kvtools.server.settings import Settings
from kvtools.server.telemetry import Telemetry

pytestmark = pytest.mark.usefixtures("tf")
EXAMPLES = [{"id": 7, "word": "red", "x": [0.5, 1.5]}, {"id": [-(1 << 60)], "word": {"b64": "6Q=="}}, {"word": []}]


@pytest.fixture(scope="module")
def folder(tf: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Signatures of a graph: scores [n, 2] of id and x, labels that have the word, a value [n, 1]."""
    folder = tmp_path_factory.mktemp("examples") / "model"
    v1 = tf.compat.v1
    saved = v1.saved_model
    with tf.Graph().as_default(), v1.Session() as session:
        examples = v1.placeholder(tf.string, [None])
        features = v1.io.parse_example(
            examples,
            {
                "id": tf.io.FixedLenFeature([], tf.int64, default_value=-1),
                "word": tf.io.FixedLenFeature([], tf.string, default_value="none"),
                "x": tf.io.FixedLenFeature([2], tf.float32, default_value=[0.1, np.inf]),
            },
        )
        scores = features["x"] + tf.cast(features["id"] % 10, tf.float32)[:, None]
        labels = tf.stack([features["word"], tf.strings.as_string(features["id"])], 1)
        values = tf.reduce_sum(scores, 1, keepdims=True)
        ids = v1.placeholder(tf.int64, [None])
        signatures = {
            "serving_default": saved.classification_signature_def(examples, labels, scores),
            "labels": saved.classification_signature_def(examples, labels, None),
            "scores": saved.predict_signature_def({"inputs": examples}, {"scores": scores}),
            "values": saved.regression_signature_def(examples, values),
            "flat": saved.predict_signature_def({"inputs": examples}, {"outputs": values[:, 0]}),
            "wide": saved.predict_signature_def({"inputs": examples}, {"outputs": scores}),
            "total": saved.predict_signature_def({"inputs": examples}, {"scores": tf.reduce_sum(scores)}),
            "ids": saved.predict_signature_def({"inputs": ids}, {"outputs": tf.cast(ids, tf.float32)}),
            "named": saved.predict_signature_def({"examples": examples}, {"outputs": values}),
        }
        builder = saved.Builder(str(folder))
        builder.add_meta_graph_and_variables(session, ["serve"], signatures)
        builder.save()
    return folder


@pytest.fixture(scope="module")
def catalog(folder: Path) -> Catalog:
    version = ServedVersion("ctr", 4, folder, open_store(folder))
    return Catalog([ServedModel("ctr", (version,), {"stable": 4}, (VersionStatus(4, "AVAILABLE"),))])


@pytest.fixture(scope="module")
def client(catalog: Catalog) -> Iterator[TestClient]:
    settings = Settings()
    app = create_app(catalog, settings, lookups=Lookups(catalog, settings, Telemetry(catalog, settings)))
    with TestClient(app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="module")
def expected(tf: Any, folder: Path) -> dict[str, Any]:
    """What TensorFlow gives for EXAMPLES, made by its own tf.train.Example."""
    features = tf.train.Feature
    made = []
    for example in EXAMPLES:
        named = {}
        if "id" in example:
            id_ = example["id"] if isinstance(example["id"], int) else example["id"][0]
            named["id"] = features(int64_list=tf.train.Int64List(value=[id_]))
        if word := example["word"]:
            data = word.encode() if isinstance(word, str) else base64.b64decode(word["b64"])
            named["word"] = features(bytes_list=tf.train.BytesList(value=[data]))
        if "x" in example:
            named["x"] = features(float_list=tf.train.FloatList(value=example["x"]))
        made.append(tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString())
    signatures = tf.saved_model.load(str(folder)).signatures
    given = tf.constant(made)
    both = signatures["serving_default"](inputs=given)
    return {
        "given": made,
        "classes": both["classes"].numpy(),
        "scores": both["scores"].numpy(),
        "values": signatures["values"](inputs=given)["outputs"].numpy()[:, 0],
    }


def rest(client: TestClient, verb: str, signature: str = "", at: str = "", **body: Any) -> Any:
    if signature:
        body["signature_name"] = signature
    answer = client.post(f"/v1/models/ctr{at}:{verb}", content=json.dumps(body))
    return answer.json()["results"] if answer.status_code == 200 else (answer.status_code, answer.json()["error"])


def test_rest_gives_what_tensorflow_gives(client: TestClient, expected: dict[str, Any]) -> None:
    def text(label: bytes) -> Any:
        return {"b64": "6Q=="} if label == b"\xe9" else label.decode()

    results = rest(client, "classify", examples=EXAMPLES)
    assert [[label for label, _ in one] for one in results] == [
        [text(label) for label in of] for of in expected["classes"]
    ]
    assert np.array_equal(np.array([[score for _, score in one] for one in results], np.float32), expected["scores"])
    assert rest(client, "classify", at="/versions/4", examples=EXAMPLES) == results
    assert rest(client, "classify", "scores", at="/labels/stable", examples=EXAMPLES) == [
        [["", score] for _, score in one] for one in results
    ]
    assert rest(client, "classify", "labels", examples=EXAMPLES) == [
        [[label, 0.0] for label, _ in one] for one in results
    ]
    for signature in ("values", "flat"):
        values = rest(client, "regress", signature, examples=EXAMPLES)
        assert np.array_equal(np.array(values, np.float32), expected["values"])
    metrics = client.get("/metrics").text
    assert 'kvtools_requests_total{protocol="http",api="regress",status="200"}' in metrics
    assert ':tensorflow:serving:request_count{model_name="ctr",status="OK"}' in metrics


def test_the_context_is_in_every_example(client: TestClient) -> None:
    results = rest(client, "regress", "values", context={"x": [1.0, 2.0], "id": 3}, examples=[{}, {"id": 4}])
    assert results == [9.0, 11.0]
    assert rest(client, "regress", "values", examples=[{"x": [float("nan"), 1.0]}, {"x": [1.0, -float("inf")]}])[1] == (
        -float("inf")
    )


def test_whole_numbers_and_truths_are_int64_and_others_floats() -> None:
    example = message("tensorflow.Example").FromString(
        from_json({"examples": [{"a": [1, True], "b": 1e3, "c": ["é", {"b64": "AA=="}], "d": []}]})[0]
    )
    features = example.features.feature
    assert list(features["a"].int64_list.value) == [1, 1] and list(features["b"].float_list.value) == [1000.0]
    assert list(features["c"].bytes_list.value) == ["é".encode(), b"\0"] and features["d"].WhichOneof("kind") is None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "Missing 'examples' key"),
        ({"examples": {}}, "Expecting 'examples' value to be an list/array"),
        ({"examples": []}, "'examples' value is an empty array"),
        ({"examples": ["x"]}, "Example must be JSON object"),
        ({"examples": [{}], "context": 7}, "Example must be JSON object"),
        ({"examples": [{"id": [1, 2.5]}]}, "Feature: id has elements of several types"),
        (
            {"examples": [{"id": None}]},
            "or of one that no feature has: [null]",
        ),
        ({"examples": [{"id": [[1]]}]}, "of one that no feature has: [[1]]"),
        ({"examples": [{"id": {"b64": "%"}}]}, "Unable to base64 decode"),
        ({"examples": [{"id": 1 << 63}]}, "Feature: id has a whole number that int64 does not hold"),
        ({"examples": [{"x": [1e39, 0.0]}]}, "Feature: x has a number that is too large for the type float"),
        ({"examples": [{"id": 1.0}]}, "Data types don't match. Data type: float but expected type: int64"),
        ({"examples": [{}], "signature_name": "values"}, "no signature that classifies: 'values' has"),
        (
            {"examples": [{}], "signature_name": "total"},
            "[batch_size num_classes] but got scores []",
        ),
        ({"examples": [{}], "signature_name": "none"}, 'Serving signature name: "none" not found'),
    ],
)
def test_a_wrong_classification_is_told(client: TestClient, body: dict[str, Any], said: str) -> None:
    status, error = rest(client, "classify", **body)
    assert status == 400 and said in error


@pytest.mark.parametrize(
    ("signature", "said"),
    [
        ("serving_default", "no signature that is a regression"),
        ("wide", "to be either [batch_size] or [batch_size, 1] but got [1, 2] of 1 examples"),
        ("ids", "no signature that takes tf.Example: 'ids' has inputs ['inputs']"),
        ("named", "expected one input 'inputs' of strings"),
    ],
)
def test_a_signature_of_another_kind_is_told(client: TestClient, signature: str, said: str) -> None:
    status, error = rest(client, "regress", signature, examples=[{}])
    assert status == 400 and said in error


def grpc(catalog: Catalog, method: str, kind: str, answers: str, **fields: Any) -> Any:
    request = message(f"tensorflow.serving.{kind}")(**fields).SerializeToString()
    answer = tensorflow_grpc.methods(catalog, Settings())[f"/tensorflow.serving.PredictionService/{method}"](
        request, Caller()
    )
    return message(f"tensorflow.serving.{answers}").FromString(answer)


def test_grpc_gives_what_tensorflow_gives(catalog: Catalog, expected: dict[str, Any]) -> None:
    example = message("tensorflow.Example")
    given = {"example_list": {"examples": [example.FromString(data) for data in expected["given"]]}}

    def spec(signature: str) -> dict[str, str]:
        return {"name": "ctr", "signature_name": signature}

    def classify(signature: str) -> Any:
        names = ("Classify", "ClassificationRequest", "ClassificationResponse")
        return grpc(catalog, *names, model_spec=spec(signature), input=given)

    def scores(result: Any) -> Any:
        return np.array([[one.score for one in of.classes] for of in result.classifications], np.float32)

    names = ("Regress", "RegressionRequest", "RegressionResponse")
    answer = grpc(catalog, *names, model_spec=spec("values"), input=given)
    assert np.array_equal(np.array([one.value for one in answer.result.regressions], np.float32), expected["values"])
    assert (answer.model_spec.name, answer.model_spec.version.value) == ("ctr", 4)
    answer = classify("scores")
    assert np.array_equal(scores(answer.result), expected["scores"]) and answer.model_spec.signature_name == "scores"
    with pytest.raises(ProtocolError, match="a label is not UTF-8") as error:
        classify("")
    assert error.value.code == "FAILED_PRECONDITION"
    given["example_list"]["examples"].pop(1)
    answer = classify("")
    labels = [[one.label.encode() for one in of.classes] for of in answer.result.classifications]
    assert labels == expected["classes"][[0, 2]].tolist() and answer.model_spec.signature_name == "serving_default"

    tasks = [
        {"model_spec": spec("scores"), "method_name": "tensorflow/serving/classify"},
        {"model_spec": spec("flat"), "method_name": "tensorflow/serving/regress"},
    ]
    names = ("MultiInference", "MultiInferenceRequest", "MultiInferenceResponse")
    both = grpc(catalog, *names, tasks=tasks, input=given).results
    assert np.array_equal(scores(both[0].classification_result), expected["scores"][[0, 2]])
    assert [one.value for one in both[1].regression_result.regressions] == expected["values"][[0, 2]].tolist()
    assert [one.model_spec.signature_name for one in both] == ["scores", "flat"]
    listed = given["example_list"]["examples"]
    context = {"features": {"feature": {"x": {"float_list": {"value": [1.0, 2.0]}}}}}
    with_context = {"example_list_with_context": {"examples": listed, "context": context}}
    names = ("Regress", "RegressionRequest", "RegressionResponse")
    answer = grpc(catalog, *names, model_spec=spec("values"), input=with_context)
    assert answer.result.regressions[1].value == 1.0 + 2.0 + 2 * 9

    for fields, said in (
        ({}, "Inference request has no tasks"),
        ({"tasks": tasks, "input": {}}, "Input is empty."),
        ({"tasks": [*tasks, {"model_spec": {"name": "cvr"}}], "input": given}, "must access the same model name"),
        (
            {"tasks": [{**tasks[0], "method_name": "predict"}], "input": given},
            "signature method_name: predict",
        ),
    ):
        with pytest.raises(ProtocolError, match=said):
            grpc(catalog, "MultiInference", "MultiInferenceRequest", "MultiInferenceResponse", **fields)


def test_tasks_are_answered_from_one_version(
    catalog: Catalog, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = catalog.version("ctr").store
    four, five = (ServedModel("ctr", (ServedVersion("ctr", n, Path("m"), store),), {}, ()) for n in (4, 5))
    served, regress = Catalog([four]), tensorflow_grpc.regress

    def regress_and_swap(*given: Any) -> Any:
        served.publish(five)
        return regress(*given)

    monkeypatch.setattr(tensorflow_grpc, "regress", regress_and_swap)
    example = message("tensorflow.Example").FromString(expected["given"][0])
    task = {
        "model_spec": {"name": "ctr", "signature_name": "values"},
        "method_name": "tensorflow/serving/regress",
    }
    names = ("MultiInference", "MultiInferenceRequest", "MultiInferenceResponse")
    answer = grpc(served, *names, tasks=[task, task], input={"example_list": {"examples": [example]}})
    assert [one.model_spec.version.value for one in answer.results] == [4, 4]
    assert served.version("ctr").number == 5


def test_the_messages_are_those_of_tensorflow_serving() -> None:
    """Names, numbers and types of the fields, also those that reflection tells."""
    apis = pytest.importorskip("tensorflow_serving.apis")
    assert apis
    from tensorflow_serving.apis import classification_pb2, inference_pb2, input_pb2, regression_pb2

    for module in (classification_pb2, inference_pb2, input_pb2, regression_pb2):
        for name, descriptor in module.DESCRIPTOR.message_types_by_name.items():
            ours = message(f"tensorflow.serving.{name}").DESCRIPTOR
            assert {field.name: _facts(field) for field in ours.fields} == {
                field.name: _facts(field) for field in descriptor.fields
            }


def _facts(field: Any) -> tuple[Any, ...]:
    of = field.message_type.full_name if field.message_type else ""
    return field.number, field.type, of, field.containing_oneof.name if field.containing_oneof else ""
