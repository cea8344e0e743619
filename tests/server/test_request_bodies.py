"""Bodies with a Content-Encoding, on every route that takes a body: all of them is read, or they are an error."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from kvtools.server.app import create_app
from kvtools.server.catalog import Catalog
from kvtools.server.request import RequestError, decode_body
from kvtools.server.settings import Settings
from kvtools.server.sources import ModelSource
from kvtools.server.versions import Versions

LIMIT = Settings(max_keys=100).body_limit
TENSOR = {"name": "ids", "shape": [2], "datatype": "INT64", "data": [3, 4]}
ROUTES = {
    "lookup": ("POST", "/v1/tables/emb:lookup", {"keys": [3, 4]}),
    "lookup of several tables": ("POST", "/v1/tables:lookup", {"tables": {"emb": {"keys": [3, 4]}}}),
    "nearest": ("POST", "/v1/tables/emb:nearest", {"key": "3"}),
    "predict": ("POST", "/v1/models/ctr:predict", {"instances": [3, 4]}),
    "predict, by version": ("POST", "/v1/models/ctr/versions/6:predict", {"inputs": [3, 4]}),
    "infer": ("POST", "/v2/models/emb/infer", {"inputs": [TENSOR]}),
    "infer, by version": ("POST", "/v2/models/ctr/versions/6/infer", {"inputs": [TENSOR]}),
    "index": ("POST", "/v2/repository/index", {"ready": True}),
    "label": ("PUT", "/admin/models/ctr/labels/stable", {"version": 6}),
}


@pytest.fixture
def client(write_version: Callable[..., Path], tmp_path: Path) -> TestClient:
    write_version(tmp_path / "m", 6)
    catalog, settings = Catalog(), Settings(admin=True, max_keys=100)
    Versions(catalog, [ModelSource("ctr", str(tmp_path / "m"))], settings).load()
    return TestClient(create_app(catalog, settings), raise_server_exceptions=False)


@pytest.mark.parametrize("route", ROUTES)
def test_all_of_a_packed_body_is_read(client: TestClient, route: str) -> None:
    method, url, document = ROUTES[route]
    body = json.dumps(document).encode()

    def send(data: bytes, encoding: str = "gzip", form: str = "application/json") -> Any:
        return client.request(method, url, content=data, headers={"Content-Encoding": encoding, "Content-Type": form})

    plain = send(body, "identity")
    assert plain.status_code == 200
    whole, members = gzip.compress(body), [gzip.compress(bytes([byte])) for byte in body]
    for data, encoding in (
        (whole, "gzip"),
        (whole, "X-GZIP"),
        (gzip.compress(body[:7]) + gzip.compress(body[7:]), "gzip"),
        (b"".join([*members, gzip.compress(b"")]), "gzip"),
        (zlib.compress(body), "deflate"),
    ):
        assert send(data, encoding).json() == plain.json()
        assert send(data, encoding, "application/x-www-form-urlencoded").json() == plain.json()  # as curl -d says
    for data, encoding, status in (
        (whole[:-1], "gzip", 400),
        (whole + members[0][:-1], "gzip", 400),
        (whole + b"\n", "gzip", 400),
        (whole + whole, "gzip", 400),  # two documents are no JSON
        (zlib.compress(body) + b"\n", "deflate", 400),
        (body, "gzip", 400),
        (b"", "gzip", 400),
        (gzip.compress(bytes(50 * LIMIT)), "gzip", 413),
        (whole + gzip.compress(b" " * LIMIT), "gzip", 413),
        (bytes(LIMIT + 1), "identity", 413),
        (whole, "br", 415),
    ):
        answer = send(data, encoding)
        assert answer.status_code == status, (data[:20], answer.text)
        assert answer.json()["error"]


def test_a_body_of_many_small_members_takes_no_time_but_that_of_its_bytes() -> None:
    assert decode_body(gzip.compress(b"") * 200_000 + gzip.compress(b"x"), "gzip", 10) == b"x"
    with pytest.raises(RequestError, match="over 10 bytes"):
        decode_body(gzip.compress(b"x") * 200_000, "gzip", 10)
