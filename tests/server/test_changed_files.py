"""A served file that is written over in its place: what every protocol answers, until it is loaded anew."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from version_files import write_snapshot

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient

from kvtools.server.app import create_app
from kvtools.server.catalog import Catalog, static_catalog
from kvtools.server.protocol_error import ProtocolError
from kvtools.server.request import RequestError
from kvtools.server.resp_tables import answer_command
from kvtools.server.settings import Settings
from kvtools.server.signatures import signature_of

FRAME = "application/x-kvtools-lookup"


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    served, other = write_snapshot(tmp_path / "m", 1), write_snapshot(tmp_path / "other", 2)
    catalog = static_catalog(served)
    assert catalog.ready
    shutil.copyfile(other, served)
    yield catalog


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/tables/emb:lookup", {"keys": [1]}),
        ("/v1/tables/emb:lookup", {"keys": [[1, 2]], "combiner": "sum"}),
        ("/v1/tables:lookup", {"tables": {"emb": {"keys": [1]}}}),
        ("/v1/tables/emb:nearest", {"key": "1"}),
        ("/v1/models/default:predict", {"instances": [1]}),
        ("/v2/models/default/infer", {"inputs": [{"name": "ids", "shape": [1], "datatype": "INT64", "data": [1]}]}),
    ],
)
def test_lookups_over_http_are_to_be_tried_again(
    catalog: Catalog, caplog: pytest.LogCaptureFixture, path: str, body: Any
) -> None:
    client = TestClient(create_app(catalog), raise_server_exceptions=False)
    for _ in range(3):
        answer = client.post(path, json=body)
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        error = answer.json()["error"]
        assert "it is loaded anew, try again" in (error if isinstance(error, str) else error["message"])
        assert isinstance(error, str) or error["code"] == "file_changed"
    assert len(caplog.messages) == 1, "one line, not one for each request"


def test_a_row_and_what_rows_are_like(catalog: Catalog) -> None:
    client = TestClient(create_app(catalog), raise_server_exceptions=False)
    for path in ("/v1/tables/emb/rows/1", "/v1/tables/emb:rows"):
        answer = client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "file_changed")


def test_the_redis_protocol_and_grpc_say_so_too(catalog: Catalog) -> None:
    version = catalog.version()
    with pytest.raises(RequestError, match="it is loaded anew"):
        answer_command(version.store.table("emb"), np.array([1]), True, False)
    with pytest.raises(ProtocolError) as caught:
        signature_of(version, "").run({"ids": np.array([1])}, ["embeddings"], Settings())
    assert caught.value.code == "UNAVAILABLE"


def test_it_is_not_ready_before_any_lookup_has_noticed(catalog: Catalog) -> None:
    client = TestClient(create_app(catalog), raise_server_exceptions=False)
    for path in ("/readyz", "/warmz"):
        answer = client.get(path)
        assert answer.status_code == 503 and "was cut or written over" in answer.json()["error"]["message"]
    assert client.get("/livez").status_code == 200
