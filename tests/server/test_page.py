"""The page at `/`: what it asks of the server beside NumPy, and the page itself in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient

from kvtools.array_table import ArrayTable
from kvtools.migrate import write_tables
from kvtools.server import page_api
from kvtools.server.app import create_app
from kvtools.server.catalog import static_catalog
from kvtools.server.settings import Settings

LONG = "a/very/long/name/" + "x" * 150
BIG = np.array([2**64 - 1, 2**63 + 1, 2**53 + 1], np.uint64)

ODD = np.array(
    [[1e30, 0, 0], [1e-30, 1e-30, 0], [np.nan, 1, 0], [np.inf, -np.inf, 2], [0, 0, 0], [3e30, 4e30, 0]], np.float32
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = np.random.default_rng(7)
    keys = generator.choice(10**9, 3000, replace=False).astype(np.int64) - 5 * 10**8
    keys[0] = 17
    rows = generator.standard_normal((3000, 16)).astype(np.float32)
    rows *= generator.gamma(4, 0.25, (3000, 1)).astype(np.float32)
    rows[1] = 2 * rows[0]  # the nearest by cosine
    rows[2] = np.nan
    rows[3] = 0
    tables = [
        ArrayTable("user_emb", keys, rows, freqs=generator.zipf(1.7, 3000).clip(max=5000).astype(np.int64)),
        ArrayTable("empty", np.empty(0, np.int64), np.empty((0, 4), np.float32)),
        ArrayTable(LONG, np.arange(5), np.ones((5, 3), np.float32)),
        ArrayTable("odd", np.arange(6), ODD),
        ArrayTable("unsigned", BIG, np.eye(3, 4, dtype=np.float32)),
    ]
    path = tmp_path_factory.mktemp("page") / "model.kvsnap"
    write_tables(tables, path, "snapshot")
    return path


@pytest.fixture(scope="module")
def client(model: Path) -> TestClient:
    return TestClient(create_app(static_catalog(model)))


@pytest.mark.parametrize("metric", ["cosine", "dot"])
@pytest.mark.parametrize("block", [1 << 19, 160])
def test_neighbours_are_those_of_numpy(
    model: Path, client: TestClient, metric: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_api, "_BLOCK_NUMBERS", block)
    table = static_catalog(model).version().store.table("user_emb").table
    keys, rows, _, _ = table.read(0, table.rows)
    wanted = rows[list(keys).index(17)]
    with np.errstate(all="ignore"):
        scores = rows @ wanted
        if metric == "cosine":
            scores = scores / np.linalg.norm(rows, axis=1) / np.linalg.norm(wanted)
    scores[np.isnan(scores) | (keys == 17)] = -np.inf
    best = np.argsort(-scores)[:10]
    answer = client.post("/v1/tables/user_emb:nearest", json={"key": "17", "metric": metric}).json()
    assert (answer["rows"], answer["scanned"]) == (3000, 3000)
    assert [each["key"] for each in answer["neighbours"]] == [str(key) for key in keys[best]]
    np.testing.assert_allclose([each["score"] for each in answer["neighbours"]], scores[best], rtol=1e-5)


def test_a_large_table_is_read_in_part(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_api, "_BLOCK_NUMBERS", 16 * 10)
    monkeypatch.setattr(page_api, "_MOST_ROWS", 300)
    answer = client.post("/v1/tables/user_emb:nearest", json={"key": "17", "count": 100}).json()
    assert answer["scanned"] == 300 and len(answer["neighbours"]) == 100
    assert len({each["key"] for each in answer["neighbours"]}) == 100
    assert client.get("/v1/tables/user_emb:rows").json()["sampled"] == 300


def test_rows_are_described_as_numpy_has_them(model: Path, client: TestClient) -> None:
    table = static_catalog(model).version().store.table("user_emb").table
    _, rows, freqs, _ = table.read(0, table.rows)
    answer = client.get("/v1/tables/user_emb:rows?bins=5").json()
    norms = np.linalg.norm(rows, axis=1).astype(np.float64)
    counts, edges = np.histogram(norms[np.isfinite(norms)], 5)
    assert answer["norms"]["counts"] == counts.tolist()
    np.testing.assert_allclose(answer["norms"]["edges"], edges, rtol=1e-6)
    assert answer["frequencies"]["counts"] == np.histogram(freqs, 5)[0].tolist()
    assert len(answer["keys"]) == 12


def test_neighbours_of_large_and_small_rows_and_none_of_what_has_no_direction(client: TestClient) -> None:
    found = client.post("/v1/tables/odd:nearest", json={"key": "0"}).json()["neighbours"]
    assert [each["key"] for each in found] == ["1", "5"]
    np.testing.assert_allclose([each["score"] for each in found], [0.5**0.5, 0.6], rtol=1e-6)
    for key, reason in (("2", "has NaN or infinity"), ("3", "has NaN or infinity"), ("4", "is zeros, which have no")):
        none = client.post("/v1/tables/odd:nearest", json={"key": key}).json()
        assert none["neighbours"] == [] and f"the row of key {key} {reason}" in none["reason"]
    assert client.post("/v1/tables/odd:nearest", json={"key": "4", "metric": "dot"}).json()["neighbours"]
    edges = client.get("/v1/tables/odd:rows?bins=1").json()["norms"]["edges"]
    np.testing.assert_allclose(edges, [0, 5e30], rtol=1e-6)


def test_no_rows_long_names_and_keys_of_64_bits(client: TestClient) -> None:
    empty = client.get("/v1/tables/empty:rows").json()
    assert (empty["rows"], empty["keys"], empty["norms"]) == (0, [], {"edges": [], "counts": []})
    assert client.post("/v1/tables/empty:nearest", json={"key": "1"}).status_code == 404
    assert client.get(f"/v1/tables/{LONG}:rows").json()["rows"] == 5
    found = client.post("/v1/tables/unsigned:nearest", json={"key": str(2**64 - 1), "metric": "dot"}).json()
    assert {each["key"] for each in found["neighbours"]} == {str(2**63 + 1), str(2**53 + 1)}
    for key, status in (("-1", 400), (str(2**64), 400), (str(2**53), 404), ("x", 400), ("1e3", 400)):
        assert client.post("/v1/tables/unsigned:nearest", json={"key": key}).status_code == status, key
    assert client.get("/v1/tables/absent:rows").status_code == 404


def test_without_the_page_there_is_none_of_it(model: Path) -> None:
    client = TestClient(create_app(static_catalog(model), Settings(page=False)))
    assert client.get("/").status_code == 404
    assert client.post("/v1/tables/user_emb:nearest", json={"key": "17"}).status_code in (404, 405)


def test_the_page_is_three_files_and_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["content-security-policy"].startswith("default-src 'self'")
    files = re.findall(r'(?:src|href)="(page/[^"]+)"', page.text)
    assert files == ["page/page.css", "page/page.js"]
    texts = [page.text, *(client.get(f"/{name}").text for name in files)]
    for text in texts:
        assert not re.search(r"(https?:)?//[\w-]+\.\w", text.replace("http://www.w3.org/2000/svg", ""))
    assert client.get("/page/../app.py").status_code == 404


def browse(url: str, folder: Path, *arguments: str) -> str:
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}"]
    command += ["--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"]
    done = subprocess.run([*command, *arguments, url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium; apt-get install chromium")
def test_a_browser_shows_tables_rows_and_neighbours(model: Path, serve: Callable[..., Any], tmp_path: Path) -> None:
    server = serve(model)
    address = f"http://127.0.0.1:{server.port}/"

    def shown(fragment: str) -> str:
        return browse(f"{address}#{fragment}", tmp_path / "browser", "--virtual-time-budget=3000", "--dump-dom")

    document = shown("table=user_emb&keys=17,4000000000&near=17")
    assert 'data-shown="#table=user_emb' in document
    assert re.search(r'id="error"[^>]* hidden', document)
    assert ">model default, version 1</p>" in document
    for name in ("user_emb", "empty", LONG, "unsigned"):
        assert f"<button>{name}</button>" in document
    assert len(re.findall(r'class="row"', document)) == 1 and "no row" in document
    assert len(re.findall(r"<rect", document)) == 16 + 24 + 24
    assert len(re.findall(r"<li>", document)) == 10 and "of all 3,000 rows" in document
    assert 'class="state' in document and '<b id="requests-rate">' in document

    document = shown(f"table=unsigned&keys={2**64 - 1},{2**53 + 1}&near={2**64 - 1}&metric=dot")
    assert re.search(r'id="error"[^>]* hidden', document) and "no row" not in document
    for key in BIG:
        assert f">{key}</button>" in document

    document = shown("table=empty&keys=1")
    assert "it has no rows" in document and "no row</span>" in document
    document = shown(f"table={quote(LONG)}&keys=3&near=1.5")
    assert 'class="row"' in document and "1.5 is no key" in document


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no chromium; apt-get install chromium")
def test_a_browser_shows_what_is_no_number(model: Path, serve: Callable[..., Any], tmp_path: Path) -> None:
    server = serve(model)
    address = f"http://127.0.0.1:{server.port}/#table=odd&keys=2,3,5&near=4"
    document = browse(address, tmp_path / "browser", "--virtual-time-budget=3000", "--dump-dom")
    assert document.count('class="nan"') == 1 and "1 of 3 not finite" in document and "2 of 3 not finite" in document
    assert "norm 5.0000e+30" in document and "the row of key 4 is zeros, which have no direction" in document
    assert "Warning" not in server.stderr()
