from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi import FastAPI
from fastapi.testclient import TestClient

from kvtools.server import late_app
from kvtools.server.catalog import Catalog
from kvtools.server.late_app import LateApp


def test_health_is_answered_before_there_is_an_application() -> None:
    app = LateApp(Catalog(), FastAPI)
    client = TestClient(app)
    assert client.get("/livez").json() == {"status": "live"}
    assert client.get("/healthz").json() == {"status": "ok"}
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json() == {"error": {"code": "not_ready", "message": "no model is served yet"}}
    assert client.head("/warmz").status_code == 503


def test_other_requests_wait_for_it() -> None:
    go = threading.Event()

    def make() -> FastAPI:
        assert go.wait(60)
        return FastAPI()

    app = LateApp(Catalog(), make)
    app.begin()
    threading.Timer(0.05, go.set).start()
    assert TestClient(app).get("/openapi.json").status_code == 200
    assert TestClient(app).post("/livez").status_code == 404, "a check is a GET"


def test_serving_begins_without_fastapi(tmp_path: Path) -> None:
    program = (
        "import sys, kvtools.cli.serve, kvtools.server.process, kvtools.server.run; print('fastapi' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "False\n"


def test_it_is_made_as_soon_as_there_are_descriptors_for_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_app, "_AGAIN", 0)
    tries: list[int] = []

    def make() -> FastAPI:
        tries.append(1)
        if len(tries) < 3:
            raise OSError(errno.EMFILE, "Too many open files")
        return FastAPI()

    app = LateApp(Catalog(), make)
    app.begin()
    assert TestClient(app).get("/openapi.json").status_code == 200 and len(tries) == 3


def test_a_request_that_is_cancelled_as_it_waits_takes_no_other_along() -> None:
    app = LateApp(Catalog(), FastAPI)

    async def ask_and_leave() -> None:
        scope = {"type": "http", "method": "GET", "path": "/openapi.json"}
        asked = asyncio.ensure_future(app(scope, None, None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked

    asyncio.run(ask_and_leave())
    app.begin()
    assert TestClient(app).get("/openapi.json").status_code == 200
