"""A model in two halves, served: whole by one server, or its dense part here and its rows from others."""

from __future__ import annotations

import gc
import json
import re
import shutil
import sys
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import split_ranker as ranker
import tensorflow as tf
from split_ranker import SIGNATURES, asked, request, same

pytest.importorskip("grpc")
pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient
from lookup_servers import certificate, fake_server, http, real_server
from serving_processes import serving

from kvtools.cli.main import main
from kvtools.client import (
    AsyncClient,
    Client,
    ClientError,
    SplitModel,
    UnavailableError,
    WrongExportError,
    fetch_rows,
    fetch_rows_async,
)
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError, UsageError
from kvtools.export_split import export_split
from kvtools.server.app import create_app
from kvtools.server.caller import Caller
from kvtools.server.catalog import Catalog, ServedModel, ServedVersion, VersionStatus, static_catalog
from kvtools.server.kserve_grpc import methods as kserve_methods
from kvtools.server.observer import Observer
from kvtools.server.protocol_error import ProtocolError
from kvtools.server.protos import message
from kvtools.server.recent_keys import RecentKeys
from kvtools.server.settings import Settings
from kvtools.server.signatures import signatures
from kvtools.server.split_store import DenseStore, SplitStore, open_split
from kvtools.server.store import TableStore

ROOT = Path(__file__).resolve().parents[2]
ASKED = tuple(name for name in SIGNATURES if name not in ("words", "many"))
"""Signatures whose answers are compared through JSON: no strings, no uint64."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, `source-N`, and their halves, `N`: other rows, and another dense part."""
    folder = tmp_path_factory.mktemp("models")
    for number in (1, 2):
        export_split(open_checkpoint(str(ranker.save(folder, number))), folder / str(number))
    return folder


@pytest.fixture(scope="module")
def trained(models: Path) -> dict[int, Any]:
    return {number: tf.saved_model.load(str(models / f"source-{number}")) for number in (1, 2)}


def served(*stores: Any, name: str = "default") -> Catalog:
    versions = tuple(
        ServedVersion(name, at + 1, Path(store.path), store, {table: RecentKeys() for table in store.tables})
        for at, store in enumerate(stores)
    )
    return Catalog([ServedModel(name, versions, {}, tuple(VersionStatus(v.number, "AVAILABLE") for v in versions))])


def run(store: Any, signature: str, fed: dict[str, Any]) -> dict[str, np.ndarray]:
    signatures = store.model_signatures({}) if isinstance(store, SplitStore) else store.signatures
    one = signatures[signature]
    return one.run(fed, list(one.outputs), Settings())


def matches(expected: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> bool:
    return same(expected, {key: np.asarray(array) for key, array in got.items()})


@pytest.fixture(scope="module")
def store(models: Path) -> SplitStore:
    store = open_split(models / "1")
    assert isinstance(store, SplitStore)
    return store


@pytest.mark.parametrize("signature", SIGNATURES)
def test_a_server_answers_as_the_model(store: SplitStore, trained: dict[int, Any], signature: str) -> None:
    random = np.random.default_rng(1)
    for _ in range(3):
        fed = request(signature, random)
        assert matches(asked(trained[1], signature, fed), run(store, signature, fed))


@pytest.fixture(scope="module")
def client(store: SplitStore) -> Iterator[TestClient]:
    with TestClient(create_app(served(store), Settings()), raise_server_exceptions=False) as client:
        yield client


def test_every_protocol_has_the_model_and_its_tables(
    client: TestClient, trained: dict[int, Any], store: SplitStore
) -> None:
    fed = request("serving_default", np.random.default_rng(2))
    expected = asked(trained[1], "serving_default", fed)["click"]
    inputs = {key: value.tolist() for key, value in fed.items()}
    answer = client.post("/v1/models/default:predict", json={"inputs": inputs})
    assert answer.status_code == 200, answer.text
    assert np.float32(answer.json()["outputs"]).tobytes() == expected.tobytes()
    rows = client.post("/v1/models/default:predict", json={"signature_name": "item", "instances": [{"ids": 3}]})
    (row,) = rows.json()["predictions"]
    assert row == {
        "embeddings": client.post("/v1/tables/item:lookup", json={"keys": [3]}).json()["embeddings"][0],
        "found": True,
    }
    metadata = client.get("/v1/models/default/metadata").json()["metadata"]["signature_def"]["signature_def"]
    assert set(metadata) == {*SIGNATURES, "user", "item", "half", "drawn", "code", "exact"}
    assert set(metadata["serving_default"]["inputs"]) == {"user_id", "item_id", "price", "unused"}
    types = {"int64": "INT64", "int32": "INT32", "float32": "FP32"}
    tensors = [
        {"name": key, "shape": [*value.shape], "datatype": types[value.dtype.name], "data": value.tolist()}
        for key, value in fed.items()
    ]
    answer = client.post("/v2/models/default/infer", json={"inputs": tensors})
    assert answer.status_code == 200, answer.text
    (output,) = answer.json()["outputs"]
    assert np.float32(output["data"]).reshape(output["shape"]).tobytes() == expected.tobytes()
    listing = client.get("/v1/tables").json()
    assert listing["export"] == store.export
    assert [table["name"] for table in listing["tables"]] == ["code", "drawn", "exact", "half", "item", "user"]


def test_what_is_wrong_with_a_request_is_told(client: TestClient) -> None:
    inputs = {"user_id": [1], "item_id": [1], "price": [0.5]}
    answer = client.post("/v1/models/default:predict", json={"inputs": inputs})
    assert answer.status_code == 400
    assert "unused" in answer.json()["error"]
    answer = client.post("/v1/models/default:predict", json={"signature_name": "none", "inputs": inputs})
    assert "not found in signature def" in answer.json()["error"]


def test_without_tensorflow_the_tables_are_served_and_predict_says_why(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    store = open_split(models / "1")
    with TestClient(create_app(served(store), Settings())) as client:
        assert client.post("/v1/tables/user:lookup", json={"keys": [3]}).json()["found"] == [True]
        assert "serving_default" in client.get("/v1/models/default/metadata").text
        inputs = {"user_id": [1], "item_id": [1], "price": [0.5], "unused": [1]}
        answer = client.post("/v1/models/default:predict", json={"inputs": inputs})
    assert answer.status_code == 503
    said = "the dense part of this model is run by TensorFlow, which is not installed where it is served"
    assert answer.json()["error"] == f"{said}; its tables can be looked up"


def test_halves_that_do_not_belong_together_are_refused(models: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(models / "1", mixed)
    shutil.copy(models / "2" / "tables.kvsnap", mixed / "tables.kvsnap")
    with pytest.raises(BadInputError, match=r"'tables\.kvsnap' is not the snapshot that was exported with the rest"):
        SplitStore(mixed)


def test_discarding_a_version_keeps_the_snapshot(store: SplitStore, models: Path) -> None:
    assert not store.discard()
    assert (models / "1" / "tables.kvsnap").is_file()


def test_a_version_goes_when_the_last_reader_lets_go(models: Path) -> None:
    version = served(SplitStore(models / "1")).version()
    known = signatures(version)
    known["serving_default"].run(request("serving_default", np.random.default_rng(0)), ["click"], Settings())
    store = weakref.ref(version.store)
    del version, known
    gc.collect()
    assert store() is None


# ---- Rows from other machines ----


@pytest.fixture(scope="module")
def rows(models: Path) -> Iterator[str]:
    """The tables of both models, as two versions of one."""
    with real_server(served(*(TableStore(models / str(n) / "tables.kvsnap") for n in (1, 2)))) as url:
        yield url


@pytest.mark.parametrize("number", [1, 2])
def test_a_dense_part_with_rows_of_its_own_export(
    models: Path, trained: dict[int, Any], rows: str, number: int
) -> None:
    dense = open_split(models / str(number), [[rows]])
    assert isinstance(dense, DenseStore)
    assert dense.tables == {}
    random = np.random.default_rng(3)
    for signature in SIGNATURES:
        fed = request(signature, random)
        assert matches(asked(trained[number], signature, fed), run(dense, signature, fed))


def test_rows_from_shards(models: Path, trained: dict[int, Any], tmp_path: Path) -> None:
    assert main(["split", str(models / "1" / "tables.kvsnap"), str(tmp_path / "{}.kvsnap"), "--by", "mod:2"]) == 0
    shards = [TableStore(tmp_path / f"mod-{shard}-of-2.kvsnap") for shard in (0, 1)]
    with real_server(served(shards[0])) as first, real_server(served(shards[1])) as second:
        dense = DenseStore(models / "1", [[first], [second]])
        random = np.random.default_rng(4)
        for signature in SIGNATURES:
            fed = request(signature, random)
            assert matches(asked(trained[1], signature, fed), run(dense, signature, fed))


def test_a_replica_of_the_rows_that_hangs_costs_no_answer(models: Path, trained: dict[int, Any], rows: str) -> None:
    free = threading.Event()

    def hangs(asked: Any) -> bytes | None:
        if asked.line.startswith("POST"):
            free.wait(60)
            return None
        with urllib.request.urlopen(urllib.request.Request(rows + "/v1/tables", headers=asked.headers)) as answer:
            return http(200, answer.read())

    with fake_server(hangs) as hung:
        dense = DenseStore(models / "1", [[hung.url, rows]])
        fed = request("serving_default", np.random.default_rng(8))
        for _ in range(2):
            assert matches(asked(trained[1], "serving_default", fed), run(dense, "serving_default", fed))
        assert hung.lookups
        free.set()


def test_rows_of_another_export_are_never_taken(models: Path) -> None:
    stores = [TableStore(models / str(number) / "tables.kvsnap") for number in (1, 2)]
    catalog = served(stores[0])
    with real_server(catalog) as url:
        dense = DenseStore(models / "1", [[url]])
        fed = request("serving_default", np.random.default_rng(5))
        run(dense, "serving_default", fed)
        catalog.publish(served(stores[1]).model("default"))  # under the same number
        with pytest.raises(ProtocolError, match="no version that is served has them") as error:
            run(dense, "serving_default", fed)
        assert error.value.status == 503
        with pytest.raises(UnavailableError, match="no version that is served has them"):
            DenseStore(models / "1", [[url]])
        catalog.publish(served(*stores).model("default"))
        run(dense, "serving_default", fed)


def test_servers_of_other_rows_are_found_at_the_start(models: Path, tmp_path: Path) -> None:
    assert main(["split", str(models / "1" / "tables.kvsnap"), str(tmp_path / "{}.kvsnap"), "--by", "mod:2"]) == 0
    shards = [TableStore(tmp_path / f"mod-{shard}-of-2.kvsnap") for shard in (0, 1)]
    with (
        real_server(served(shards[0])) as first,
        real_server(served(shards[1])) as second,
        real_server(served(TableStore(models / "1" / "tables.kvsnap"))) as whole,
        real_server(served(TableStore(models / "2" / "tables.kvsnap"))) as other,
    ):
        for rows_from, message in (
            ([[first]], "has shard 0 of 2"),
            ([[second], [first]], "expected shard 0 of 2"),
            ([[first], [second, first.replace("localhost", "127.0.0.1")]], "expected shard 1 of 2"),
            ([[whole, second]], "has shard 1 of 2"),
            ([[other]], "no version that is served has them"),
        ):
            with pytest.raises(ClientError, match=message):
                DenseStore(models / "1", rows_from)


def test_rows_behind_a_certificate_of_ones_own(
    models: Path, trained: dict[int, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = certificate(tmp_path)
    way_out = "name its certificate authority by --rows-from-ca FILE, or in SSL_CERT_FILE"
    fed = request("serving_default", np.random.default_rng(7))
    expected = asked(trained[1], "serving_default", fed)
    with real_server(served(TableStore(models / "1" / "tables.kvsnap")), tls=(cert, key)) as url:
        with pytest.raises(UnavailableError, match=f"self-signed certificate; {way_out}"):
            DenseStore(models / "1", [[url]])
        dense = DenseStore(models / "1", [[url]], Path(cert))
        assert matches(expected, run(dense, "serving_default", fed))
        monkeypatch.setenv("SSL_CERT_FILE", cert)
        assert matches(expected, run(DenseStore(models / "1", [[url]]), "serving_default", fed))
        monkeypatch.delenv("SSL_CERT_FILE")
        with serving(models / "1", "--rows-from", url, "--rows-from-ca", cert) as ports:
            inputs = {key: value.tolist() for key, value in fed.items()}
            body = json.dumps({"inputs": inputs}).encode()
            place = f"http://127.0.0.1:{ports.http}/v1/models/default:predict"
            with urllib.request.urlopen(place, body, timeout=60) as answer:
                assert np.float32(json.load(answer)["outputs"]).tobytes() == expected["click"].tobytes()


def test_a_server_without_its_rows_is_not_ready(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtools.server.split_store._WATCH_EVERY", 0.02)
    stores = [TableStore(models / str(number) / "tables.kvsnap") for number in (1, 2)]
    rows = served(stores[0])
    with real_server(rows) as url:
        catalog = served(DenseStore(models / "1", [[url]]))

        def ready(wanted: bool) -> None:
            last = time.monotonic() + 60
            while catalog.ready != wanted:
                assert time.monotonic() < last
                time.sleep(0.01)
            client = TestClient(create_app(catalog, Settings()))
            answers = [client.get(path) for path in ("/readyz", "/v2/health/ready", "/v2/models/default/ready")]
            assert {answer.status_code for answer in answers} == {200 if wanted else 503}
            methods = kserve_methods(catalog, Settings())
            for name, request in (("ServerReady", {}), ("ModelReady", {"name": "default"})):
                asked = message(f"inference.{name}Request")(**request).SerializeToString()
                told = methods[f"/inference.GRPCInferenceService/{name}"](asked, Caller(Observer(), {}))
                assert message(f"inference.{name}Response").FromString(told).ready == wanted

        ready(True)
        rows.publish(served(stores[1]).model("default"))  # another export took the place
        ready(False)
        assert "no version that is served has them" in catalog.unready()
        rows.publish(served(stores[0]).model("default"))
        ready(True)
    ready(False)


def test_a_server_of_tables_without_an_export_is_refused(models: Path) -> None:
    export = SplitModel.read(models / "1").export
    with (
        real_server(static_catalog(TableStore(ROOT / "tests" / "data" / "sample"))) as url,
        Client(url, export=export) as client,
        pytest.raises(UnavailableError, match="no version that is served has them"),
    ):
        client.tables()


def test_an_older_server_is_refused(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SplitModel.read(models / "1")
    monkeypatch.setattr("kvtools.server.tables_api.EXPORT_HEADER", "x-not-known")
    monkeypatch.setattr("kvtools.server.lookups.EXPORT_HEADER", "x-not-known")
    store = TableStore(models / "2" / "tables.kvsnap")
    with (
        real_server(served(store)) as url,
        Client(url, export=model.export) as client,
        pytest.raises(WrongExportError, match="does not say that its rows are of export"),
    ):
        client.lookup("user", [1])


@pytest.mark.parametrize("name", ["serving_default", "words", "many", "begun", "wide"])
def test_a_client_fetches_the_rows_of_all_tables(models: Path, trained: dict[int, Any], rows: str, name: str) -> None:
    model = SplitModel.read(models / "2")
    dense, signature = tf.saved_model.load(str(model.dense)), model.signature(name)
    fed = request(name, np.random.default_rng(6))
    ids = None
    if signature.needs_ids:
        assert signature.ids_signature is not None
        ids = asked(dense, signature.ids_signature, {key: fed[key] for key in signature.ids_inputs})
    with Client(rows, export=model.export) as client:
        inputs = fetch_rows(client, signature, fed, ids)
    assert same(asked(trained[2], name, fed), asked(dense, name, inputs))


def test_a_client_on_an_event_loop(models: Path, rows: str) -> None:
    import asyncio

    model = SplitModel.read(models / "2")
    fed = request("serving_default", np.random.default_rng(7))

    async def fetched() -> dict[str, Any]:
        async with AsyncClient(rows, export=model.export) as client:
            return await fetch_rows_async(client, model.signature(), fed)

    with Client(rows, export=model.export) as client:
        expected = fetch_rows(client, model.signature(), fed)
    got = asyncio.run(fetched())
    assert same(expected, got)


def test_a_client_for_another_export_or_for_none_is_refused(models: Path, rows: str) -> None:
    model, fed = SplitModel.read(models / "2"), request("serving_default", np.random.default_rng(8))
    for export in (None, SplitModel.read(models / "1").export):
        with Client(rows, export=export) as client, pytest.raises(UsageError, match=r"export=model\.export"):
            fetch_rows(client, model.signature(), fed)


def test_the_example_of_the_page_runs(models: Path, trained: dict[int, Any], rows: str) -> None:
    page = (ROOT / "docs" / "client.md").read_text()
    blocks = re.findall(r"^```python no-run\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (example,) = (block for block in blocks if "fetch_rows" in block)
    assert len(example.splitlines()) <= 20
    example = example.replace("models/7", str(models / "2")).replace("http://rows.example:8501", rows)
    names: dict[str, Any] = {}
    exec(compile(example, "client.md", "exec"), names)
    assert same(asked(trained[2], "serving_default", names["request"]), {"click": names["answer"]["click"].numpy()})


# ---- Processes ----


def predict(port: int, inputs: dict[str, Any]) -> Any:
    body = json.dumps({"inputs": inputs}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models/default:predict", body, 30) as answer:
        return np.float32(json.load(answer)["outputs"])


@pytest.mark.thorough
def test_a_process_serves_both_halves_through_every_protocol(models: Path, trained: dict[int, Any]) -> None:
    import grpc

    from kvtools.server.protos import message
    from kvtools.server.tensor_proto import decode, encode

    fed = request("serving_default", np.random.default_rng(9))
    expected = asked(trained[1], "serving_default", fed)["click"]
    with serving(models / "1") as ports:
        assert predict(ports.http, {key: value.tolist() for key, value in fed.items()}).tobytes() == expected.tobytes()
        with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
            request_type, response_type = (
                message(f"tensorflow.serving.Predict{what}") for what in ("Request", "Response")
            )
            asking = request_type(model_spec={"name": "default"})
            for key, value in fed.items():
                encode(value, asking.inputs[key])
            method = "/tensorflow.serving.PredictionService/Predict"
            answer = channel.unary_unary(method)(asking.SerializeToString(), timeout=30)
            got = decode("click", response_type.FromString(answer).outputs["click"], limit=1 << 20)
            assert got.tobytes() == expected.tobytes()


def waited_for(model: int, seen: list[int | None]) -> None:
    """Wait until the last answer is that of a model."""
    last = time.monotonic() + 60
    while not seen or seen[-1] != model:
        assert time.monotonic() < last, "the version is not served"
        time.sleep(0.01)


@pytest.mark.thorough
@pytest.mark.parametrize("elsewhere", [False, True], ids=["both halves", "rows elsewhere"])
@pytest.mark.every_case
def test_a_swap_under_load_never_mixes_halves(
    models: Path, trained: dict[int, Any], tmp_path: Path, elsewhere: bool
) -> None:
    for name in ("whole", "tables"):
        (tmp_path / name).mkdir()
    shutil.copytree(models / "1", tmp_path / "whole" / "1")
    for number in (1, 2):
        shutil.copy(models / str(number) / "tables.kvsnap", tmp_path / "tables" / f"{number}.kvsnap")
    fed = request("serving_default", np.random.default_rng(10))
    inputs = {key: value.tolist() for key, value in fed.items()}
    expected = {asked(trained[n], "serving_default", fed)["click"].tobytes(): n for n in (1, 2)}
    assert len(expected) == 2
    seen: list[int | None] = []
    with serving(tmp_path / "tables", "--versions", "latest 2") as of_rows:
        options = ["--rows-from", f"http://127.0.0.1:{of_rows.http}"] if elsewhere else []
        with serving(tmp_path / "whole", "--poll", "0.1", *options) as ports:
            done = threading.Event()

            def load() -> None:
                while not done.is_set():
                    seen.append(expected.get(predict(ports.http, inputs).tobytes()))

            threads = [threading.Thread(target=load) for _ in range(3)]
            for thread in threads:
                thread.start()
            try:
                waited_for(1, seen)
                for version, model in ((2, 2), (3, 1), (4, 2)):
                    shutil.copytree(models / str(model), tmp_path / "whole" / ".new")
                    (tmp_path / "whole" / ".new").rename(tmp_path / "whole" / str(version))
                    waited_for(model, seen)
            finally:
                done.set()
                for thread in threads:
                    thread.join()
    assert set(seen) == {1, 2}
