from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from kvtools.server.app import create_app
from kvtools.server.catalog import Catalog, static_catalog
from kvtools.server.settings import Settings
from kvtools.server.sources import ModelSource
from kvtools.server.version_policy import VersionPolicy
from kvtools.server.versions import Versions


@pytest.fixture
def client(write_version: Callable[..., Path], tmp_path: Path) -> TestClient:
    for number in (6, 7):
        write_version(tmp_path / "m", number)
    catalog, settings = Catalog(), Settings(admin=True)
    Versions(catalog, [ModelSource("ctr", str(tmp_path / "m"), VersionPolicy("all"))], settings).load()
    return TestClient(create_app(catalog, settings), raise_server_exceptions=False)


def test_labels(client: TestClient) -> None:
    assert client.put("/admin/models/ctr/labels/stable", json={"version": 6}).json() == {"stable": 6}
    assert client.put("/admin/models/ctr/labels/canary", json={"version": 7}).json() == {"stable": 6, "canary": 7}
    assert client.delete("/admin/models/ctr/labels/stable").json() == {"canary": 7}
    assert client.post("/admin/look").status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("ctr/labels/stable", {"version": 8}, 404, "unknown_version"),
        ("cvr/labels/stable", {"version": 7}, 404, "unknown_model"),
        ("ctr/labels/stable", {"version": "new"}, 400, "bad_request"),
        ("ctr/labels/stable", {}, 400, "bad_request"),
    ],
)
def test_what_cannot_be_labelled(client: TestClient, path: str, body: object, status: int, code: str) -> None:
    answer = client.put(f"/admin/models/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


def test_a_label_that_is_not_there_cannot_be_taken_away(client: TestClient) -> None:
    for path, code in (("ctr/labels/stable", "unknown_version"), ("cvr/labels/stable", "unknown_model")):
        answer = client.delete(f"/admin/models/{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, code)
    client.put("/admin/models/ctr/labels/stable", json={"version": 6})
    assert client.delete("/admin/models/ctr/labels/stable").json() == {}
    assert "no label 'stable'" in client.delete("/admin/models/ctr/labels/stable").json()["error"]["message"]


def test_a_body_is_json_whatever_its_type_is_said_to_be(client: TestClient) -> None:
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d says
    assert client.put("/admin/models/ctr/labels/a", content=b'{"version": 6}', headers=form).json() == {"a": 6}
    assert client.put("/admin/models/ctr/labels/b", content=b'{"version": 7}').json() == {"a": 6, "b": 7}


@pytest.mark.parametrize("settings", [Settings(), Settings(admin=True)])
def test_changes_are_off_unless_asked_for(sample_path: Path, settings: Settings) -> None:
    client = TestClient(create_app(static_catalog(sample_path), settings))
    answer = client.put("/admin/models/default/labels/stable", json={"version": 1})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    for body in (b"version=1", b"", b"{}", bytes(10_000_000)):  # nothing of it is looked at
        answer = client.put("/admin/models/default/labels/stable", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
    assert client.delete("/admin/models/default/labels/stable").status_code == 403
