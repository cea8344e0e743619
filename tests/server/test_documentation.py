"""/docs stands on files of this machine alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("fastapi_offline")
from fastapi.testclient import TestClient

from kvtools.server import documentation
from kvtools.server.app import create_app
from kvtools.server.catalog import static_catalog

SAMPLE = Path(__file__).parent.parent / "data" / "sample"


def test_the_page_names_no_other_host_and_all_its_files_are_answered() -> None:
    client = TestClient(create_app(static_catalog(SAMPLE)))
    page = client.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert not re.search(r"(https?:)?//[\w.-]+\.\w", page.text)
    assert '"validatorUrl": null' in page.text
    files = re.findall(r"""(?:src|href)="([^"]+)"|url: '([^']+)'""", page.text)
    assert len(files) == 4
    for name in (first or second for first, second in files):
        answer = client.get(f"/{name}")
        assert answer.status_code == 200 and answer.content, name
    style = client.get("/docs/swagger-ui.css").text
    assert not re.search(r"url\(['\"]?(https?:)?//|@import", style)
    assert client.get("/docs/secrets.txt").status_code == 404


def test_without_the_package_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documentation, "find_spec", lambda name: None)
    client = TestClient(create_app(static_catalog(SAMPLE)))
    page = client.get("/docs")
    assert page.status_code == 200 and "kvtools[serve]" in page.text
    assert client.get("/docs/swagger-ui.css").status_code == 404
