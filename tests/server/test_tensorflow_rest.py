"""TensorFlow Serving's REST interface, in its own words."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
import anyio.to_thread
from fastapi import Response
from fastapi.concurrency import run_in_threadpool
from fastapi.testclient import TestClient

from kvtools.server.app import create_app
from kvtools.server.catalog import Catalog, ServedModel, ServedVersion, VersionStatus, static_catalog
from kvtools.server.protocol_error import ProtocolError
from kvtools.server.protocol_routes import Threads, error_response
from kvtools.server.settings import Settings
from kvtools.server.store import TableStore

PREDICT = "/v1/models/default:predict"
SEVEN = [2.0, 2.125, 2.25, 2.375]  # the row of key -7 in ads/emb
ZEROS = [0.0] * 4
BOTH, NEITHER = {"embeddings": SEVEN, "found": True}, {"embeddings": ZEROS, "found": False}
ROWS = {"output_filter": ["embeddings"]}


def client_of(catalog: Catalog, **settings: Any) -> TestClient:
    return TestClient(create_app(catalog, Settings(**settings)), raise_server_exceptions=False)


@pytest.fixture
def client(sample_path: Path) -> TestClient:
    return client_of(static_catalog(sample_path))


@pytest.mark.parametrize(
    ("asked", "answered"),
    [
        ({"instances": [-7, 99]}, {"predictions": [BOTH, NEITHER]}),
        (
            {"instances": [[-7], [99]]},
            {"predictions": [{"embeddings": [SEVEN], "found": [True]}, {"embeddings": [ZEROS], "found": [False]}]},
        ),
        ({"instances": [{"ids": -7}, {"ids": 99}]}, {"predictions": [BOTH, NEITHER]}),
        (
            {"instances": [{"ids": [-7, 99]}]},
            {"predictions": [{"embeddings": [SEVEN, ZEROS], "found": [True, False]}]},
        ),
        ({"instances": [[-7], [99]], **ROWS}, {"predictions": [[SEVEN], [ZEROS]]}),
        ({"inputs": [-7, 99]}, {"outputs": {"embeddings": [SEVEN, ZEROS], "found": [True, False]}}),
        ({"inputs": {"ids": [[-7], [99]]}, **ROWS}, {"outputs": [[SEVEN], [ZEROS]]}),
        ({"inputs": -7}, {"outputs": {"embeddings": SEVEN, "found": True}}),
        ({"inputs": []}, {"outputs": {"embeddings": [], "found": []}}),
        ({"inputs": {"ids": [[], []]}}, {"outputs": {"embeddings": [[], []], "found": [[], []]}}),
        (
            {"instances": [-7, 99], "output_filter": ["embeddings", "found"]},
            {"predictions": [BOTH, NEITHER]},
        ),
        ({"inputs": [-7, 99], "output_filter": ["found"]}, {"outputs": [True, False]}),
    ],
)
@pytest.mark.parametrize("signature", ["ads_emb", "ads/emb"])
def test_rows_and_columns(client: TestClient, signature: str, asked: dict[str, Any], answered: dict[str, Any]) -> None:
    answer = client.post(PREDICT, json={"signature_name": signature, **asked})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == answered


def test_numbers_are_written_with_a_point_and_as_short_as_they_can_be(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    sample = make_sample("emb", rows=2, dim=4)
    sample.values[0] = [1, np.nan, np.inf, -np.inf]
    sample.values[1] = [0.1, 1 / 3, 1e-30, 16777216]
    catalog = static_catalog(save_plain(tmp_path / "a", table_tensors(sample)))
    answer = client_of(catalog).post(PREDICT, json={"instances": sample.keys.tolist(), **ROWS})
    assert answer.text == ('{"predictions":[[1.0,NaN,Infinity,-Infinity],[0.1,0.33333334,1e-30,16777216.0]]}')


def test_any_key_of_64_bits_may_be_asked_of_any_table(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    small = make_sample("small", rows=3, dim=1, key_dtype="int32")
    big = make_sample("big", rows=3, dim=1, key_dtype="uint64")
    small.values[:, 0], big.values[:, 0] = [1, 2, 3], [1, 2, 3]
    client = client_of(static_catalog(save_plain(tmp_path / "a", {**table_tensors(small), **table_tensors(big)})))

    def ask(signature: str, ids: list[int]) -> Any:
        answer = client.post(PREDICT, json={"signature_name": signature, "inputs": ids, **ROWS})
        return answer.json().get("outputs", answer.status_code)

    assert small.keys.tolist() == [-(2**31), 2**31 - 1, 0] and big.keys.tolist() == [0, 2**64 - 1, 1]
    assert ask("small", [0, 2**32, -(2**31), 2**31]) == [[3], [0], [1], [0]]  # 2**32 is not 0
    assert ask("big", [2**64 - 1, 0]) == [[2], [1]] == ask("big", [-1, 0])  # as it is, or its bits
    assert ask("big", [2**64 - 1, -1]) == 400
    assert ask("small", [2**63]) == 400


def test_versions_and_labels(sample_path: Path) -> None:
    store = TableStore(sample_path)
    versions = tuple(ServedVersion("ranker", number, sample_path, store) for number in (3, 7))
    statuses = (
        VersionStatus(3, "AVAILABLE"),
        VersionStatus(7, "AVAILABLE"),
        VersionStatus(9, "END", "INVALID_ARGUMENT", "its header is damaged"),
    )
    client = client_of(Catalog([ServedModel("ranker", versions, {"stable": 3}, statuses)]))
    body = {"signature_name": "ads_emb", "instances": [-7], **ROWS}
    for place in ("", "/versions/3", "/versions/7", "/labels/stable"):
        assert client.post(f"/v1/models/ranker{place}:predict", json=body).json() == {"predictions": [SEVEN]}
    spec = client.get("/v1/models/ranker/labels/stable/metadata").json()["model_spec"]
    assert spec == {"name": "ranker", "signature_name": "", "version": "3"}

    def told(place: str) -> Any:
        answer = client.get(f"/v1/models/ranker{place}").json()
        return [
            (v["version"], v["state"], v["status"]["error_code"], v["status"]["error_message"])
            for v in answer["model_version_status"]
        ]

    assert told("/versions/9") == [("9", "END", "INVALID_ARGUMENT", "its header is damaged")]
    assert told("/labels/stable") == [("3", "AVAILABLE", "OK", "")]
    assert [version for version, *_ in told("")] == ["3", "7", "9"]
    for url, status, message in [
        ("/v1/models/ranker/versions/9:predict", 404, "Servable not found for request: Specific(ranker, 9)"),
        ("/v1/models/half:predict", 404, "Servable not found for request: Latest(half)"),
        ("/v1/models/ranker/labels/canary:predict", 400, "Unrecognized servable version label: canary"),
    ]:
        answer = client.post(url, json=body)
        assert (answer.status_code, answer.json()) == (status, {"error": message})
    answer = client.get("/v1/models/half")
    assert (answer.status_code, answer.json()) == (404, {"error": "Could not find any versions of model half"})
    answer = client.get("/v1/models/ranker/versions/8")
    assert (answer.status_code, answer.json()) == (404, {"error": "Could not find version 8 of model ranker"})


def test_status_and_metadata_have_the_forms_of_tensorflow_serving(client: TestClient) -> None:
    assert client.get("/v1/models/default").json() == {
        "model_version_status": [
            {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        ]
    }
    metadata = client.get("/v1/models/default/metadata").json()
    assert metadata["model_spec"] == {"name": "default", "signature_name": "", "version": "1"}
    definitions = metadata["metadata"]["signature_def"]["signature_def"]
    assert sorted(definitions) == ["ads_emb", "empty_emb", "serving_default", "user_emb"]
    any_shape = {"dim": [], "unknown_rank": True}
    assert definitions["ads_emb"] == {
        "inputs": {"ids": {"dtype": "DT_INT64", "tensor_shape": any_shape, "name": "ads_emb_ids:0"}},
        "outputs": {
            "embeddings": {"dtype": "DT_FLOAT", "tensor_shape": any_shape, "name": "ads_emb_embeddings:0"},
            "found": {"dtype": "DT_BOOL", "tensor_shape": any_shape, "name": "ads_emb_found:0"},
        },
        "method_name": "tensorflow/serving/predict",
        "defaults": {},
    }


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "JSON Parse error: The document is empty"),
        (b"instances = [1, 2]", "JSON Parse error: "),
        (b"\xff\xfe\x00", "JSON Parse error: "),
        (b"[" * 50_000, "JSON Parse error: "),
        (b'{"instances": ' + b"[" * 5000 + b"]" * 5000 + b"}", ""),
        (b'{"instances": ' + b"[" * 40 + b"1" + b"]" * 40 + b"}", "unexpected level"),
        (b'{"inputs": ' + b"9" * 5000 + b"}", "JSON Parse error: "),
        (b"[1]", "Is not object"),
        (b'{"signature_name": "ads_emb"}', "Missing 'inputs' or 'instances' key"),
        (b'{"instances": [1], "inputs": [1]}', "only one of 'inputs' or 'instances'"),
        (b'{"instances": 1}', "Expecting 'instances' to be an list/array"),
        (b'{"instances": []}', "No values in 'instances' array"),
        (b'{"instances": ["x"]}', 'JSON Value: "x" Type: String is not of expected type: int64'),
        (b'{"instances": [1.0]}', "JSON Value: 1.0 Type: Number is not of expected type: int64"),
        (b'{"instances": [true]}', "is not of expected type: int64"),
        (b'{"instances": [null]}', "JSON Value: null Type: Null is not of expected type: int64"),
        (b'{"instances": [9223372036854775808]}', "is not of expected type: int64"),
        (b'{"instances": [NaN]}', "is not of expected type: int64"),
        (b'{"instances": [[1], 2]}', "incorrect level"),
        (b'{"instances": [1, [2]]}', "unexpected level"),
        (b'{"instances": [[1], [2, 3]]}', "unexpected size: 2 at level: 1 expected size: 1"),
        (b'{"inputs": [1], "inputs": [2]}', 'got member "inputs" twice in an object, expected it once'),
        (b'{"instances": [{"ids": 1, "ids": 2}]}', 'got member "ids" twice in an object, expected it once'),
        (b'{"instances": [' + b'{"ids": 1},' * 99 + b'{"ids": 1, "ids": 2}]}', 'got member "ids" twice in an object'),
        (b'{"instances": [{"ids": 1}, 2]}', "Expecting object but got list at item 1"),
        (b'{"instances": [1, {"ids": 1}]}', "Expecting value/list but got object at item 1"),
        (b'{"instances": [{"id": 1}]}', "keys must be equal to: ids"),
        (b'{"instances": [{"b64": "AA=="}]}', "is not of expected type: int64"),
        (b'{"inputs": {"id": 1}}', "Missing named input: ids in 'inputs' object."),
        (b'{"inputs": {"ids": 1, "more": 2}}', "no use for: more"),
        (b'{"inputs": 1, "signature_name": 7}', "'signature_name' key must be a string value."),
        (b'{"inputs": 1, "signature_name": "x"}', 'Serving signature name: "x" not found in signature def'),
        (b'{"inputs": 1, "output_filter": "found"}', "'output_filter' key must be a list of strings"),
        (b'{"inputs": 1, "output_filter": ["x"]}', "output tensor alias not found in signature: x"),
        (b'{"inputs": 1, "output_filter": ["found", "found"]}', "duplicate output tensor alias: found"),
        (b'{"instances": "' + b"\xc3\x28" + b'"}', "JSON Parse error: "),
    ],
)
def test_a_wrong_body_is_told_what_is_wrong_with_it(client: TestClient, body: bytes, message: str) -> None:
    if b"signature_name" not in body and body.startswith(b'{"'):
        body = b'{"signature_name": "ads_emb", ' + body[1:]
    answer = client.post(PREDICT, content=body)
    assert answer.status_code == 400, answer.text
    assert list(answer.json()) == ["error"] and message in answer.json()["error"]
    assert len(answer.text) < 2000


@pytest.mark.parametrize(
    ("method", "url", "status", "message"),
    [
        ("GET", "/v1/models", 400, "Missing model name in request."),
        ("POST", "/v1/models", 400, "Malformed request: POST /v1/models"),
        ("GET", "/v1/models/debug/model_name", 400, "Malformed request"),
        ("GET", "/v1/models/default:predict", 400, "Malformed request"),
        ("POST", "/v1/models/default/version/50:predict", 400, "Malformed request"),
        ("POST", "/v1/models/default/metadata", 400, "Malformed request"),
        ("PUT", PREDICT, 400, "Malformed request: PUT"),
        ("POST", "/v1/models/default/versions/HELLO:predict", 400, "Failed to convert version: HELLO to numeric."),
        ("POST", f"/v1/models/default/versions/{2**64 - 1}:predict", 400, "Failed to convert version"),
        ("POST", "/v1/models/default:classify", 400, "JSON Parse error: The document is empty"),
        ("POST", "/v1/models/default/versions/1:regress", 400, "JSON Parse error: The document is empty"),
        ("POST", "/v1/models/half:classify", 404, "Servable not found"),
    ],
)
def test_wrong_paths(client: TestClient, method: str, url: str, status: int, message: str) -> None:
    answer = client.request(method, url)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert message in answer.json()["error"]


def test_the_default_signature_of_many_tables_looks_up_in_all_of_them(client: TestClient) -> None:
    definitions = client.get("/v1/models/default/metadata").json()["metadata"]["signature_def"]["signature_def"]
    default = definitions["serving_default"]
    assert list(default["inputs"]) == ["ads_emb_ids", "empty_emb_ids", "user_emb_ids"]
    assert list(default["outputs"])[:2] == ["ads_emb_embeddings", "ads_emb_found"] and len(default["outputs"]) == 6
    ids: dict[str, list[int]] = {"ads_emb_ids": [-7, 99], "empty_emb_ids": [1], "user_emb_ids": []}
    outputs = client.post(PREDICT, json={"inputs": ids}).json()["outputs"]
    assert (outputs["ads_emb_embeddings"], outputs["ads_emb_found"]) == ([SEVEN, ZEROS], [True, False])
    assert (outputs["empty_emb_found"], outputs["user_emb_embeddings"]) == ([False], [])
    one = {"ads_emb_ids": -7, "empty_emb_ids": 1, "user_emb_ids": 99}
    answer = client.post(PREDICT, json={"signature_name": "serving_default", "instances": [one]})
    assert answer.json()["predictions"][0]["ads_emb_embeddings"] == SEVEN
    answer = client.post(PREDICT, json={"inputs": [1]})
    assert answer.status_code == 400 and "multiple input tensors" in answer.json()["error"]
    answer = client.post(PREDICT, json={"signature_name": "x", "inputs": [1]})
    assert '"ads_emb", "empty_emb", "user_emb", "serving_default"' in answer.json()["error"]


def test_the_limits_hold_for_the_ids_of_all_tables_together(sample_path: Path) -> None:
    client = client_of(static_catalog(sample_path), max_keys=5, max_values=24)

    def ask(ads: int, users: int) -> int:
        ids = {"ads_emb_ids": [1] * ads, "empty_emb_ids": [], "user_emb_ids": [1] * users}
        return client.post(PREDICT, json={"inputs": ids}).status_code

    assert (ask(4, 1), ask(4, 2), ask(5, 1), ask(0, 3), ask(1, 3)) == (200, 413, 413, 200, 413)


def test_limits(sample_path: Path) -> None:
    client = client_of(static_catalog(sample_path), max_keys=5, max_values=16)
    ask = lambda n: client.post(PREDICT, json={"signature_name": "ads_emb", "inputs": [1] * n})  # noqa: E731
    assert ask(4).status_code == 200
    assert (ask(5).status_code, "at most 16 numbers" in ask(5).text) == (413, True)
    assert (ask(6).status_code, "at most 5" in ask(6).text) == (413, True)
    answer = client.post(PREDICT, content=b" " * 10_000)
    assert (answer.status_code, "send fewer ids" in answer.json()["error"]) == (413, True)


def test_bodies_may_be_packed_and_are_held_to_the_limit_unpacked(sample_path: Path) -> None:
    client = client_of(static_catalog(sample_path), max_keys=5)
    body = json.dumps({"signature_name": "ads_emb", "instances": [-7], **ROWS}).encode()

    def send(data: bytes, encoding: str) -> tuple[int, Any]:
        answer = client.post(PREDICT, content=data, headers={"Content-Encoding": encoding})
        return answer.status_code, answer.json().get("predictions") or answer.json()["error"]

    assert send(gzip.compress(body), "gzip") == send(zlib.compress(body), "deflate") == (200, [SEVEN])
    assert send(gzip.compress(b" " * 5_000_000), "gzip")[0] == 413
    assert send(gzip.compress(body)[:-9], "gzip")[0] == 400
    assert send(body, "gzip")[0] == 400
    assert send(body, "br") == (415, "got Content-Encoding 'br', expected gzip, deflate or none")


def test_a_missing_key_may_be_an_error(sample_path: Path) -> None:
    client = client_of(static_catalog(sample_path), missing="error")
    answer = client.post(PREDICT, json={"signature_name": "ads_emb", "instances": [-7, 99]})
    assert (answer.status_code, answer.json()) == (404, {"error": "table 'ads/emb' has no row for key 99"})


def test_an_answer_of_many_numbers_is_sent_while_it_is_made(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    sample = make_sample("emb", rows=700, dim=400)
    client = client_of(static_catalog(save_plain(tmp_path / "a", table_tensors(sample))))
    ids = sample.keys.tolist()
    rows = client.post(PREDICT, json={"instances": ids})
    assert "content-length" not in rows.headers and all(row["found"] for row in rows.json()["predictions"])
    got = np.array([row["embeddings"] for row in rows.json()["predictions"]], np.float32)
    assert got.tobytes() == sample.values.tobytes()
    for shape in ((700,), (1, 700), (2, 350), (700, 1)):
        nested = np.array(ids).reshape(shape).tolist()
        answer = client.post(PREDICT, json={"inputs": nested, **ROWS})
        assert "content-length" not in answer.headers
        got = np.array(answer.json()["outputs"], np.float32)
        assert got.shape == (*shape, 400) and got.tobytes() == sample.values.tobytes()
    item = {"name": "ids", "shape": [700], "datatype": "INT64", "data": ids}
    answer = client.post("/v2/models/emb/infer", json={"inputs": [item]})
    assert "content-length" not in answer.headers
    assert np.array(answer.json()["outputs"][0]["data"], np.float32).tobytes() == sample.values.tobytes()


def test_a_request_that_the_end_of_the_server_cuts_off_is_told_to_come_again() -> None:
    threads = Threads(Settings())
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> Response:
        begun.set()
        assert go_on.wait(30)
        return Response(b"late")

    async def ask() -> None:
        task = asyncio.create_task(threads.run(wait, small=False))
        assert await asyncio.to_thread(begun.wait, 30)
        task.cancel()  # as uvicorn does when the time of grace is over
        with pytest.raises(ProtocolError, match="the server ends") as caught:
            await task
        refusal = error_response(caught.value)
        assert (refusal.status_code, refusal.headers["retry-after"]) == (503, "1")
        go_on.set()

    asyncio.run(ask())


def test_requests_beyond_what_is_worked_on_at_a_time_are_told_to_come_again() -> None:
    threads = Threads(Settings(max_concurrent=1))
    go_on = threading.Event()

    def wait() -> Response:
        assert go_on.wait(30)
        return Response(b"large")

    async def ask() -> None:
        first = asyncio.create_task(threads.run(wait, small=False))
        await asyncio.sleep(0)
        with pytest.raises(ProtocolError, match="the most at a time") as caught:
            await threads.run(wait, small=False)
        refusal = error_response(caught.value)
        assert (refusal.status_code, refusal.headers["retry-after"]) == (429, "1")
        small = await threads.run(lambda: Response(b"small"), small=True)  # what takes no thread needs no place
        assert small.body == b"small"
        anyio.to_thread.current_default_thread_limiter().total_tokens = 1
        assert await run_in_threadpool(lambda: "metrics") == "metrics"  # they have threads of their own
        go_on.set()
        assert (await first).body == b"large"

    asyncio.run(ask())
