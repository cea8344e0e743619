"""The Open Inference Protocol over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from kvtools.server.app import create_app
from kvtools.server.catalog import Catalog, ServedModel, ServedVersion, static_catalog
from kvtools.server.kserve_rest import HEADER
from kvtools.server.settings import Settings
from kvtools.server.store import TableStore

SEVEN = [2.0, 2.125, 2.25, 2.375]  # the row of key -7 in ads/emb
INFER = "/v2/models/ads/emb/infer"
EXTENSIONS = ["binary_tensor_data", "model_configuration", "statistics"]


@pytest.fixture
def client(sample_path: Path) -> TestClient:
    app = create_app(static_catalog(sample_path), Settings(max_keys=100, max_values=1000))
    return TestClient(app, raise_server_exceptions=False)


def ids(data: Any = (-7, 99), **changes: Any) -> dict[str, Any]:
    return {
        "name": "ids",
        "shape": [2],
        "datatype": "INT64",
        "data": list(data) if isinstance(data, tuple) else data,
        **changes,
    }


def binary(client: TestClient, document: Any, *data: bytes, url: str = INFER, header: str | None = None) -> Any:
    head = json.dumps(document).encode()
    return client.post(url, content=head + b"".join(data), headers={HEADER: header or str(len(head))})


def parts(answer: Any) -> tuple[dict[str, Any], bytes]:
    assert answer.status_code == 200, answer.text
    length = int(answer.headers[HEADER])
    return json.loads(answer.content[:length]), answer.content[length:]


def test_all_outputs_unless_some_are_named(client: TestClient) -> None:
    answer = client.post(INFER, json={"id": "a 1", "inputs": [ids()]})
    assert answer.json() == {
        "model_name": "ads/emb",
        "model_version": "1",
        "id": "a 1",
        "outputs": [
            {"name": "embeddings", "datatype": "FP32", "shape": [2, 4], "data": [*SEVEN, 0.0, 0.0, 0.0, 0.0]},
            {"name": "found", "datatype": "BOOL", "shape": [2], "data": [True, False]},
        ],
    }
    answer = client.post(INFER, json={"inputs": [ids()], "outputs": [{"name": "found"}]}).json()
    assert "id" not in answer and [output["name"] for output in answer["outputs"]] == ["found"]


@pytest.mark.parametrize(
    ("url", "parameters"),
    [
        (INFER, {}),
        ("/v2/models/ads%2Femb/infer", {}),
        ("/v2/models/ads_emb/infer", {}),
        ("/v2/models/ads/emb/versions/1/infer", {}),
        ("/v2/models/default/infer", {"signature_name": "ads_emb"}),
        ("/v2/models/default/versions/1/infer", {"signature_name": "ads/emb"}),
    ],
)
def test_a_table_by_its_name_or_as_a_signature_of_its_model(
    client: TestClient, url: str, parameters: dict[str, Any]
) -> None:
    answer = client.post(url, json={"parameters": parameters, "inputs": [ids()]})
    assert answer.json()["outputs"][0]["data"][:4] == SEVEN


@pytest.mark.parametrize(
    ("data", "shape", "expected"),
    [([[-7], [99]], [2, 1], [2, 1, 4]), ([-7, 99], [2, 1], [2, 1, 4]), ([-7], [], [4]), ([], [0], [0, 4])],
)
def test_data_is_nested_or_flat(client: TestClient, data: Any, shape: list[int], expected: list[int]) -> None:
    output = client.post(INFER, json={"inputs": [ids(data, shape=shape)]}).json()["outputs"][0]
    assert output["shape"] == expected and output["data"][:4] == SEVEN[: len(output["data"])]


def test_binary_both_ways(client: TestClient) -> None:
    keys = np.array([-7, 99]).tobytes()
    item = {"name": "ids", "shape": [2], "datatype": "INT64", "parameters": {"binary_data_size": 16}}
    document, rest = parts(binary(client, {"inputs": [item], "parameters": {"binary_data_output": True}}, keys))
    rows, found = document["outputs"]
    assert rows == {
        "name": "embeddings",
        "datatype": "FP32",
        "shape": [2, 4],
        "parameters": {"binary_data_size": 32},
    }
    assert found["parameters"] == {"binary_data_size": 2}
    assert rest == np.array([SEVEN, [0] * 4], "<f4").tobytes() + b"\1\0"
    # Binary in, JSON out; and one output of each kind.
    assert binary(client, {"inputs": [item]}, keys).json()["outputs"][0]["data"][:4] == SEVEN
    outputs = [{"name": "found"}, {"name": "embeddings", "parameters": {"binary_data": True}}]
    document, rest = parts(binary(client, {"inputs": [item], "outputs": outputs}, keys))
    assert document["outputs"][0]["data"] == [True, False] and len(rest) == 32


def test_a_body_of_ids_alone(client: TestClient) -> None:
    answer = client.post(INFER, content=np.array([-7, 99]).tobytes(), headers={HEADER: "0"})
    document, rest = parts(answer)
    assert document["outputs"][0]["shape"] == [2, 4]
    assert rest[:16] == np.array(SEVEN, "<f4").tobytes()
    answer = client.post(INFER, content=b"1234567", headers={HEADER: "0"})
    assert (answer.status_code, "7 bytes do not tell its shape" in answer.text) == (400, True)


def test_what_the_server_and_its_models_are(client: TestClient) -> None:
    about = client.get("/v2").json()
    assert (about["name"], about["extensions"]) == ("kvtools", EXTENSIONS)
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").json() == {"ready": True}
    for url in ("/v2/models/ads/emb/ready", "/v2/models/default/versions/1/ready"):
        assert client.get(url).json()["ready"] is True
    assert client.get("/v2/models/ads/emb").json() == {
        "name": "ads/emb",
        "versions": ["1"],
        "platform": "kvtools_table",
        "inputs": [{"name": "ids", "datatype": "INT64", "shape": [-1]}],
        "outputs": [
            {"name": "embeddings", "datatype": "FP32", "shape": [-1, 4]},
            {"name": "found", "datatype": "BOOL", "shape": [-1]},
        ],
    }
    assert client.get("/v2/models/user_emb/versions/1").json()["outputs"][0]["shape"] == [-1, 8]
    answer = client.get("/v2/models/default")
    assert [tensor["name"] for tensor in answer.json()["inputs"]] == ["ads_emb_ids", "empty_emb_ids", "user_emb_ids"]
    assert answer.json()["outputs"][:2] == [
        {"name": "ads_emb_embeddings", "datatype": "FP32", "shape": [-1, 4]},
        {"name": "ads_emb_found", "datatype": "BOOL", "shape": [-1]},
    ]
    named = [ids() | {"name": tensor["name"]} for tensor in answer.json()["inputs"]]
    outputs = client.post("/v2/models/default/infer", json={"inputs": named}).json()["outputs"]
    assert {output["name"]: output["data"] for output in outputs}["ads_emb_found"] == [True, False]


def test_a_server_without_a_version_is_live_and_not_ready(sample_path: Path) -> None:
    client = TestClient(create_app(Catalog([ServedModel("default")]), Settings()))
    assert client.get("/v2/health/live").status_code == 200
    assert (client.get("/v2/health/ready").status_code, client.get("/v2/health/ready").json()) == (
        503,
        {"ready": False},
    )
    assert client.get("/v2/models/default/ready").status_code == 404
    store = TableStore(sample_path)
    versions = tuple(ServedVersion("default", number, sample_path, store) for number in (2, 5))
    client = TestClient(create_app(Catalog([ServedModel("default", versions, {"old": 2})]), Settings()))
    for version, number in (("2", "2"), ("old", "2"), ("5", "5")):
        answer = client.post(f"/v2/models/ads/emb/versions/{version}/infer", json={"inputs": [ids()]})
        assert answer.json()["model_version"] == number
    assert client.get("/v2/models/ads/emb").json()["versions"] == ["2", "5"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "expected an object with a list of inputs"),
        ({}, "expected a list of 'inputs'"),
        ({"inputs": []}, "expected a list of 'inputs'"),
        ({"inputs": [1]}, "expected an object with a name"),
        ({"inputs": [{"name": 1}]}, "expected an object with a name"),
        ({"inputs": [ids(name="keys")]}, "Missing but required: {ids}"),
        ({"inputs": [ids(), ids()]}, "input 'ids' is there twice"),
        ({"inputs": [ids(shape=2)]}, "expected a shape"),
        ({"inputs": [ids(shape=[-1])]}, "expected a shape of sizes from 0"),
        ({"inputs": [ids(shape=[True])]}, "expected a shape of sizes from 0"),
        ({"inputs": [ids(shape=[2.0])]}, "expected a shape of sizes from 0"),
        ({"inputs": [ids(shape=[1] * 40)]}, "expected a shape of sizes from 0"),
        ({"inputs": [ids(shape=[3])]}, "got data of shape [2], expected [3]"),
        ({"inputs": [ids(datatype="INT65")]}, "got datatype 'INT65', expected one of FP32"),
        ({"inputs": [ids(datatype=None)]}, "got datatype 'None'"),
        ({"inputs": [ids(datatype="FP32", data=[1.5, 2])]}, "input 'ids': expected int64, got float"),
        ({"inputs": [ids(datatype="BF16")]}, "values of BF16 are sent as binary only"),
        ({"inputs": [ids(data=[1, "2"])]}, "is not of expected type: int64"),
        ({"inputs": [ids(data=[1, 2**63])]}, "is not of expected type: int64"),
        ({"inputs": [{"name": "ids", "shape": [2], "datatype": "INT64"}]}, "expected data, or the parameter"),
        ({"inputs": [ids(data=5)]}, "expected data as a list"),
        ({"inputs": [ids(parameters=[])]}, "'parameters' of input 'ids': expected an object"),
        ({"inputs": [ids(parameters={"binary_data_size": 16})]}, "got binary_data_size 16"),
        ({"inputs": [ids(parameters={"binary_data_size": "16"})]}, "got binary_data_size '16'"),
        ({"inputs": [ids(parameters={"binary_data_size": 0})]}, "got both"),
        ({"inputs": [ids(parameters={"shared_memory_region": "x"})]}, "shared memory is not there"),
        ({"inputs": [ids()], "outputs": {}}, "expected a list of 'outputs'"),
        ({"inputs": [ids()], "outputs": [{}]}, "each of 'outputs'"),
        ({"inputs": [ids()], "outputs": [{"name": "x"}]}, "output tensor alias not found in signature: x"),
        ({"inputs": [ids()], "outputs": [{"name": "found", "parameters": {"binary_data": 1}}]}, "true or false"),
        ({"inputs": [ids()], "outputs": [{"name": "found", "parameters": {"classification": 1}}]}, "classification"),
        ({"inputs": [ids()], "parameters": {"signature_name": 1}}, "expected a string"),
        ({"inputs": [ids()], "parameters": {"signature_name": "user_emb"}}, "says 'user_emb'"),
        ({"inputs": [ids()], "parameters": {"sequence_id": 7}}, "sequences are not there"),
        ({"inputs": [ids()], "id": 7}, "'id': expected a string"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong_with_it(client: TestClient, document: Any, message: str) -> None:
    answer = client.post(INFER, json=document)
    assert answer.status_code == 400, answer.text
    assert list(answer.json()) == ["error"] and message in answer.json()["error"]


@pytest.mark.parametrize("header", ["-1", "x", "1e3", "10000", "9" * 30, "٣"])
def test_a_wrong_header_length(client: TestClient, header: str) -> None:
    answer = client.post(INFER, content=b'{"inputs": []}', headers={HEADER: header.encode()})
    assert (answer.status_code, list(answer.json())) == (400, ["error"])


def test_values_are_held_to_their_shape(client: TestClient) -> None:
    item = {"name": "ids", "shape": [2], "datatype": "INT64", "parameters": {"binary_data_size": 8}}
    answer = binary(client, {"inputs": [item]}, bytes(8))
    assert (answer.status_code, "got 8 bytes, expected 16" in answer.text) == (400, True)
    item = {**item, "parameters": {"binary_data_size": 16}}
    answer = binary(client, {"inputs": [item]}, bytes(17))
    assert (answer.status_code, "1 bytes follow" in answer.text) == (400, True)
    answer = binary(client, {"inputs": [{**item, "shape": [1 << 39]}]}, bytes(16))
    assert answer.status_code == 413
    text = {"name": "ids", "shape": [1], "datatype": "BYTES", "parameters": {"binary_data_size": 5}}
    answer = binary(client, {"inputs": [text]}, b"\xff\xff\xff\xffa")
    assert (answer.status_code, "cut off" in answer.text) == (400, True)
    assert client.post(INFER, json={"inputs": [ids([1] * 101, shape=[101])]}).status_code == 413


@pytest.mark.parametrize(
    ("method", "url", "status"),
    [
        ("GET", "/v2/models/none", 404),
        ("POST", "/v2/models/none/infer", 404),
        ("GET", "/v2/models/default/versions/2", 404),
        ("GET", "/v2/models/default/versions/x/ready", 404),
        ("GET", "/v2/models/serving_default", 404),
        ("GET", INFER, 404),
        ("POST", "/v2/health/live", 405),
        ("GET", "/v2/repository", 404),
        ("GET", "/v2/repository/index", 405),
    ],
)
def test_wrong_paths(client: TestClient, method: str, url: str, status: int) -> None:
    answer = client.request(method, url)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert isinstance(answer.json()["error"], str)
