from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from kvtools.errors import BadInputError, UnknownTableError
from kvtools.lookup_frame import MEDIA_TYPE as FRAME
from kvtools.lookup_frame import TableKeys, encode_request
from kvtools.server.app import create_app
from kvtools.server.catalog import static_catalog
from kvtools.server.settings import Settings
from kvtools.server.store import TableStore

BINARY = "application/octet-stream"


@pytest.fixture
def client(sample_path: Path) -> TestClient:
    return TestClient(create_app(static_catalog(sample_path), Settings(max_keys=20)), raise_server_exceptions=False)


@pytest.mark.parametrize("url", ["/v1/tables/ads/emb:lookup", "/v1/tables/ads%2Femb:lookup"])
def test_json(client: TestClient, url: str) -> None:
    answer = client.post(url, json={"keys": [-7, 3, 0, -7]})
    assert answer.status_code == 200
    row = [2.0, 2.125, 2.25, 2.375]
    assert answer.json() == {
        "embeddings": [row, [0.0] * 4, [5.0, 5.125, 5.25, 5.375], row],
        "found": [True, False, True, True],
    }


def test_binary_both_ways(client: TestClient, sample_values: dict[str, dict[int, np.ndarray]]) -> None:
    keys = np.array([-7, 3, 2**63 - 1], "<i8")
    answer = client.post(
        "/v1/tables/ads/emb:lookup",
        content=keys.tobytes(),
        headers={"Content-Type": BINARY, "Accept": BINARY},
    )
    assert answer.headers["content-type"] == BINARY
    assert (answer.headers["x-embedding-shape"], answer.headers["x-embedding-missing"]) == ("3,4", "1")
    rows = sample_values["ads/emb"]
    expected = np.stack([rows[-7], np.zeros(4, np.float32), rows[2**63 - 1]])
    assert np.array_equal(np.frombuffer(answer.content, "<f4").reshape(3, 4), expected)


@pytest.mark.parametrize(
    ("accept", "binary"),
    [
        (BINARY, True),
        (f"{BINARY};q=0.9, application/json;q=0.5", True),
        (f"application/json, {BINARY};q=0.5", False),
        (f"{BINARY}, application/json", False),
        ("*/*", False),
        ("text/html", False),
        (f"{BINARY};q=0", False),
        (f"{BINARY};q=x", False),
    ],
)
def test_accept(client: TestClient, accept: str, binary: bool) -> None:
    answer = client.post("/v1/tables/ads/emb:lookup", json={"keys": [0]}, headers={"Accept": accept})
    assert (answer.headers["content-type"] == BINARY) == binary


@pytest.mark.parametrize(
    "path",
    [
        "/v1/tables/ads/emb:lookup?mising=error",
        "/v1/tables:lookup?a=1&missing=zeros",
        "/v1/tables/ads/emb:lookup?missing=error&missing=zeros",
    ],
)
def test_a_parameter_that_is_none_or_comes_twice_is_named(client: TestClient, path: str) -> None:
    answer = client.post(path, json={"keys": [99]})
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "bad_parameter"


def test_no_keys(client: TestClient) -> None:
    assert client.post("/v1/tables/ads/emb:lookup", json={"keys": []}).json() == {
        "embeddings": [],
        "found": [],
    }
    pooled = client.post("/v1/tables/ads/emb:lookup", json={"keys": [], "combiner": "sum"})
    assert (pooled.status_code, pooled.json()) == (200, {"embeddings": [], "missing": 0})
    several = client.post("/v1/tables:lookup", json={"tables": {"ads/emb": {"keys": [], "combiner": "sum"}}})
    assert several.json() == {"tables": {"ads/emb": {"embeddings": [], "missing": 0}}}
    answer = client.post("/v1/tables/ads/emb:lookup", content=b"", headers={"Content-Type": BINARY, "Accept": BINARY})
    assert (answer.headers["x-embedding-shape"], answer.content) == ("0,4", b"")


def test_bfloat16_and_empty_tables(client: TestClient) -> None:
    answer = client.post("/v1/tables/user_emb:lookup", json={"keys": [9]}).json()
    assert answer["embeddings"] == [[4 + i / 8 for i in range(8)]]
    assert client.post("/v1/tables/empty_emb:lookup", json={"keys": [2**64 - 1]}).json() == {
        "embeddings": [[0.0, 0.0]],
        "found": [False],
    }


def test_numbers_that_json_lacks(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    sample = make_sample("emb", rows=3, dim=3)
    sample.values[0] = [np.nan, np.inf, -np.inf]
    client = TestClient(create_app(static_catalog(save_plain(tmp_path / "a", table_tensors(sample)))))
    keys = {"keys": sample.keys[:1].tolist()}
    assert client.post("/v1/tables/emb:lookup", json=keys).json()["embeddings"] == [["NaN", "Infinity", "-Infinity"]]
    answer = client.post("/v1/tables/emb:lookup", json=keys, headers={"Accept": BINARY})
    assert answer.content == sample.values[0].astype("<f4").tobytes()


def test_parts_slices_and_duplicates(
    save: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    sample = make_sample("emb", rows=500, dim=5)
    store = TableStore(save(tmp_path / "a", table_tensors(sample, 5), slices=3, shards=2))
    keys = np.random.default_rng(0).permutation(sample.keys)
    values, found = store.table("emb").lookup(keys)
    rows = sample.rows()
    assert found.all() and np.array_equal(values, np.stack([rows[int(key)] for key in keys]))


def test_a_later_row_of_a_key_wins(
    save_plain: Callable[..., Path], make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    sample = make_sample("emb", rows=20)
    sample.keys[15] = sample.keys[3]
    table = TableStore(save_plain(tmp_path / "a", table_tensors(sample))).table("emb")
    assert table.duplicates == 1
    assert np.array_equal(table.lookup(sample.keys[[3]])[0][0], sample.values[15])


def test_tables_health_and_documentation(client: TestClient) -> None:
    assert client.get("/healthz").json() == {"status": "ok"}
    listing = client.get("/v1/tables").json()
    assert listing["dialect"] == "tfplugin"
    assert [table["name"] for table in listing["tables"]] == ["ads/emb", "empty_emb", "user_emb"]
    operation = client.get("/openapi.json").json()["paths"]["/v1/tables/{table}:lookup"]["post"]
    assert operation["requestBody"]["content"]["application/json"]["example"] == {"keys": [17, -3]}
    assert {"200", "400", "404", "413"} <= operation["responses"].keys()
    assert client.get("/docs").status_code == 200


@pytest.mark.parametrize(
    ("method", "url", "body", "status", "code"),
    [
        ("POST", "/v1/tables/nope:lookup", b"{}", 404, "unknown_table"),
        ("POST", "/v1/tables/:lookup", b"{}", 404, "unknown_table"),
        ("POST", "/v1/tables/ads/emb", b"{}", 404, "not_found"),
        ("GET", "/v1/tables/ads/emb:lookup", b"", 405, "method_not_allowed"),
        ("GET", "/../../etc/passwd", b"", 404, "not_found"),
        ("POST", "/v1/tables/ads/emb:lookup", b"{", 400, "bad_json"),
        ("POST", "/v1/tables/ads/emb:lookup", b'{"keys": ["1"]}', 400, "bad_key"),
        ("POST", "/v1/tables/ads/emb:lookup", b'{"keys": [1' + b",1" * 20 + b"]}", 413, "too_many_keys"),
        ("POST", "/v1/tables/ads/emb:lookup", b" " * 5000, 413, "body_too_large"),
    ],
)
def test_errors(client: TestClient, method: str, url: str, body: bytes, status: int, code: str) -> None:
    answer = client.request(method, url, content=body)
    assert answer.status_code == status
    assert list(answer.json()) == ["error"]
    assert answer.json()["error"]["code"] == code and answer.json()["error"]["message"]


def test_fault_of_ours_is_500_in_the_same_form(sample_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtools.server.lookups.answer_lookup", lambda *arguments: 1 / 0)
    client = TestClient(create_app(static_catalog(sample_path)), raise_server_exceptions=False)
    answer = client.post("/v1/tables/ads/emb:lookup", json={"keys": [1]})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")


def test_store_refuses_what_it_cannot_serve(save_plain: Callable[..., Path], sample_path: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="no key-value table"):
        TableStore(save_plain(tmp_path / "a", {"w": np.zeros(3)}))
    with pytest.raises(UnknownTableError):
        TableStore(sample_path, tables=["nope"])


def test_some_of_the_keys_are_remembered(sample_path: Path) -> None:
    catalog = static_catalog(sample_path)
    client = TestClient(create_app(catalog))
    recent = catalog.version().recent["ads/emb"]
    for _ in range(16):
        client.post("/v1/tables/ads/emb:lookup", json={"keys": [-7, 3]})
    assert recent.keys().tolist() == [-7, 3]
    for _ in range(16):
        body = np.array([5, 2**63 - 1]).tobytes()
        client.post("/v1/tables/ads/emb:lookup", content=body, headers={"Content-Type": BINARY})
    assert recent.keys().tolist() == [-7, 3, 5, 2**63 - 1]
    client.post("/v1/tables:lookup", json={"tables": {"ads/emb": {"keys": [[11], [12]], "combiner": "sum"}}})
    assert recent.keys().tolist() == [-7, 3, 5, 11, 12, 2**63 - 1]
    frame = encode_request([TableKeys("ads/emb", np.array([21, 22]))])
    for _ in range(16):
        answer = client.post("/v1/tables:lookup", content=frame, headers={"Content-Type": FRAME, "Accept": FRAME})
        assert answer.status_code == 200
    assert recent.keys().tolist() == [-7, 3, 5, 11, 12, 21, 22, 2**63 - 1]
