"""/metrics: what is counted, in a form that Prometheus' own parser reads, over all workers."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
from fastapi.testclient import TestClient
from prometheus_client import parser

from kvtools.server.answer import TableCount
from kvtools.server.app import create_app
from kvtools.server.catalog import Catalog, static_catalog
from kvtools.server.lookups import Lookups
from kvtools.server.metrics import BOUNDS, Counts, Metrics
from kvtools.server.observer import Answered, Tallied
from kvtools.server.settings import Settings
from kvtools.server.telemetry import Telemetry

SAMPLE = Path(__file__).parent.parent / "data" / "sample"

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


@pytest.fixture
def client() -> TestClient:
    catalog = static_catalog(SAMPLE)
    settings = Settings()
    return TestClient(create_app(catalog, settings, lookups=Lookups(catalog, settings, Telemetry(catalog, settings))))


def test_lookups_are_counted_by_table_protocol_and_status(client: TestClient) -> None:
    client.post("/v1/tables/ads/emb:lookup", json={"keys": [42, -7, 99]})
    client.post("/v1/tables/ads/emb:lookup", json={"keys": [99]})
    client.post("/v1/tables:lookup", json={"tables": {"ads/emb": {"keys": [42]}, "user_emb": {"keys": [9]}}})
    client.post("/v1/tables/ads/emb:lookup", content=b"{")
    answer = client.get("/metrics")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = parsed(answer.text)
    assert value(samples, "kvtools_requests_total", protocol="http", api="lookup", status="200") == 2
    assert value(samples, "kvtools_requests_total", protocol="http", api="lookup", status="400") == 1
    assert value(samples, "kvtools_keys_total", table="ads/emb", model="default") == 5
    assert value(samples, "kvtools_keys_found_total", table="ads/emb", model="default") == 3
    assert value(samples, "kvtools_keys_missing_total", table="ads/emb", model="default") == 2
    timed = {"protocol": "http", "api": "lookup", "table": "ads/emb", "model": "default"}
    assert value(samples, "kvtools_request_seconds_count", **timed) == 2
    assert value(samples, "kvtools_request_seconds_bucket", **timed, le="+Inf") == 2
    assert 0 < value(samples, "kvtools_request_seconds_sum", **timed) < 60
    several = {"protocol": "http", "api": "tables", "table": "*", "model": "default"}
    assert value(samples, "kvtools_request_seconds_count", **several) == 1
    assert value(samples, "kvtools_table_rows", model="default", table="ads/emb") > 0
    assert value(samples, "kvtools_model_version", model="default") == 1
    assert value(samples, "kvtools_ready") == 1


def test_head_is_counted_once_and_health_checks_never(client: TestClient) -> None:
    assert client.head("/v1/tables/ads/emb/rows/42").status_code == 200
    assert client.head("/v1/tables/ads/emb/rows/99").status_code == 404
    for check in ("/livez", "/readyz", "/v2/health/live", "/v2/health/ready"):
        assert client.get(check).status_code == 200
    samples = parsed(client.get("/metrics").text)
    counted = {key: number for key, number in samples.items() if key[0] == "kvtools_requests_total"}
    assert value(samples, "kvtools_requests_total", protocol="http", api="row", status="200") == 1
    assert value(samples, "kvtools_requests_total", protocol="http", api="row", status="404") == 1
    assert sum(counted.values()) == 2, counted


def test_predictions_are_counted_under_tensorflow_servings_names(client: TestClient) -> None:
    path = "/v1/models/default:predict"
    client.post(path, json={"signature_name": "user_emb", "inputs": {"ids": [9]}})
    client.post(path, json={"signature_name": "absent", "inputs": {"ids": [9]}})
    client.post("/v1/models/absent:predict", json={"inputs": {"ids": [9]}})
    text = client.get("/monitoring/prometheus/metrics").text
    # Its counters have no "_total", which the parser would add.
    assert ':tensorflow:serving:request_count{model_name="default",status="OK"} 1\n' in text
    assert ':tensorflow:serving:request_count{model_name="default",status="INVALID_ARGUMENT"} 1\n' in text
    samples = parsed(text)
    labels = {"model_name": "default", "API": "Predict", "entrypoint": "REST"}
    assert value(samples, ":tensorflow:serving:request_latency_count", **labels) == 1
    bounds = [dict(key[1]).get("le") for key in samples if key[0] == ":tensorflow:serving:request_latency_bucket"]
    assert bounds[:3] == ["10", "18", "32.4"] and len(bounds) == 34
    assert "absent" not in client.get("/metrics").text


def test_names_that_clients_make_up_are_no_labels(client: TestClient) -> None:
    before = len(client.get("/metrics").text.splitlines())
    for number in range(50):
        client.post(f"/v1/tables/evil{number}:lookup", json={"keys": [1]})
        client.post(f"/v1/models/evil{number}:predict", json={"inputs": [1]})
        client.post(f"/v2/models/evil{number}/infer", json={"inputs": []})
        client.get(f"/evil{number}")
    text = client.get("/metrics").text
    assert "evil" not in text
    assert len(text.splitlines()) < before + 100


def test_labels_are_escaped() -> None:
    counts = Counts()
    table = 'a"b\\c\nd'
    counts.count(Answered("lookup", 200, "", (TableCount(table, 3, 1, "m"),), 0.5, 1, 2, None, {}, True))
    metrics = Metrics(static_catalog(SAMPLE))
    metrics.counts.add(counts)
    assert value(parsed(metrics.text()), "kvtools_keys_total", table=table, model="m") == 3


def test_a_time_falls_into_the_bucket_of_its_bound() -> None:
    counts = Counts()
    for seconds in (BOUNDS[3], BOUNDS[3] * 1.01, 99.0):
        counts.count(Answered("lookup", 200, "", (), seconds, 0, 0, None, {}, True))
    buckets = counts.seconds["http", "lookup", "", ""]
    assert (buckets[3], buckets[4], buckets[len(BOUNDS)]) == (1, 1, 1)


def test_workers_are_added_up_and_a_dead_ones_counts_are_taken_over(tmp_path: Path) -> None:
    catalog = static_catalog(SAMPLE)
    answered = Answered("lookup", 200, "", (TableCount("ads/emb", 3, 1, "default"),), 0.5, 1, 2, None, {}, True)
    counts = Counts()
    counts.count(answered)
    dead = subprocess.Popen(["true"])
    dead.wait()
    for pid in (dead.pid, os.getppid()):
        (tmp_path / f"metrics-{pid}.json").write_text(json.dumps(counts.to_json()))
    metrics = Metrics(catalog, tmp_path)
    metrics.counts.count(answered)
    metrics.publish()
    samples = parsed(metrics.text())
    of = {"table": "ads/emb", "model": "default"}
    assert value(samples, "kvtools_keys_total", **of) == 9
    assert value(samples, "kvtools_workers") == 2
    assert value(samples, "kvtools_request_seconds_count", protocol="http", api="lookup", **of) == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        f"metrics-{pid}.json" for pid in (os.getpid(), os.getppid())
    )


@pytest.mark.parametrize("workers", [1, 2])
def test_versions_that_went_leave_nothing_behind_but_their_sums(tmp_path: Path, workers: int) -> None:
    catalog = static_catalog(SAMPLE)
    metrics = Metrics(catalog, tmp_path if workers > 1 else None)
    seen = []
    for number in range(1, 6):
        last = catalog.version()
        catalog.publish(dataclasses.replace(catalog.model(), versions=(dataclasses.replace(last, number=number),)))
        of = Tallied("http", "predict", "ads/emb", "default", number, "ads_emb")
        metrics.tally(of)
        answered = Answered("predict", 200, "", (TableCount("ads/emb", 3, 1, "default"),), 0.5, 1, 2, None, {}, True)
        metrics.counts.count(dataclasses.replace(answered, model="default", version=number, signature="ads_emb"))
        metrics.publish()
        assert metrics.inferences()["default", number, "ads_emb"].answers == 1
        seen.append((len(metrics._tallies), len(metrics.counts.inferences), len(metrics.counts.last_inferences)))
    assert seen[2:] == [(2, 2, 2)] * 3, "the one that is served, and the one before it"
    samples = parsed(metrics.text())
    assert value(samples, "kvtools_requests_total", protocol="http", api="predict", status="200") == 5
    assert value(samples, "kvtools_keys_total", table="ads/emb", model="default") == 15


def test_versions_are_those_of_all_workers(tmp_path: Path) -> None:
    catalog = static_catalog(SAMPLE)
    catalog.publish(dataclasses.replace(catalog.model(), loads=3, failures=1))
    dead = subprocess.Popen(["true"])
    dead.wait()
    other = Counts()
    other.versions = {"default": [5, 2], "gone": [1, 0]}
    (tmp_path / f"metrics-{dead.pid}.json").write_text(json.dumps(other.to_json()))  # another worker's, or taken over
    metrics = Metrics(catalog, tmp_path)
    for more in (0, 0, 2):
        catalog.publish(dataclasses.replace(catalog.model(), loads=3 + more))
        metrics.publish()
        samples = parsed(metrics.text())
        assert value(samples, "kvtools_versions_loaded_total", model="default") == 8 + more
        assert value(samples, "kvtools_versions_failed_total", model="default") == 3
        assert value(samples, "kvtools_versions_loaded_total", model="gone") == 1
    catalog.publish(dataclasses.replace(catalog.model(), loads=1, failures=0))
    samples = parsed(metrics.text())
    assert value(samples, "kvtools_versions_loaded_total", model="default") == 11, "another model of the name"


def test_one_answer_has_all_workers_counts_a_killed_one_included(
    tmp_path: Path, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    server = serve(SAMPLE, "--workers", "2")
    url = f"http://127.0.0.1:{server.port}"

    def until(keys: int) -> None:
        last = time.monotonic() + 60
        while True:
            with urllib.request.urlopen(f"{url}/metrics") as answer:
                samples = parsed(answer.read().decode())
            counted = samples.get(("kvtools_keys_total", (("model", "default"), ("table", "ads/emb"))), 0)
            if counted == keys and value(samples, "kvtools_workers") == 2:
                return
            assert counted <= keys and time.monotonic() < last, counted
            time.sleep(0.05)

    for _ in range(20):  # each on a connection of its own, so both workers get some
        urllib.request.urlopen(f"{url}/v1/tables/ads/emb/rows/42").close()
    until(20)
    last = time.monotonic() + 60
    while (
        sum(  # the last second of a killed worker would be lost
            keys[0]
            for path in tmp_path.glob("kvtools-serve-*/metrics-*.json")
            for _, keys in json.loads(path.read_text())["keys"]
        )
        < 20
    ):
        assert time.monotonic() < last
        time.sleep(0.05)
    pid = server.process.pid
    os.kill(int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]), signal.SIGKILL)
    last = time.monotonic() + 60
    while "another begins" not in server.stderr():
        assert time.monotonic() < last
        time.sleep(0.05)
    until(20)


def test_counts_that_cannot_be_shared_are_told_once_and_end_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        telemetry = Telemetry(Catalog(), Settings(shared=tmp_path))
        for _ in range(3):
            telemetry.tick()
        assert not list(tmp_path.iterdir())
    assert caplog.text.count(f"'{tmp_path}': No space left on device") == 1
    telemetry.tick()
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
