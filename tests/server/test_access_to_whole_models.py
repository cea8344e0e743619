"""A key for some tables opens the whole models that read no other table, in every protocol."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc")
pytest.importorskip("fastapi")
pytest.importorskip("httpx")
from fastapi.testclient import TestClient

from kvtools.cli.main import main
from kvtools.server import kserve_grpc, tensorflow_grpc
from kvtools.server.app import create_app
from kvtools.server.caller import Caller
from kvtools.server.catalog import Catalog, ServedModel, ServedVersion, VersionStatus
from kvtools.server.lookups import Lookups
from kvtools.server.protocol_error import ProtocolError
from kvtools.server.protos import message
from kvtools.server.saved_models import SavedModelStore, open_store
from kvtools.server.settings import Settings
from kvtools.server.telemetry import Telemetry

TRAINED = Path(__file__).parents[1] / "data" / "tfra" / "savedmodel"
KEYS = {
    "all": "",
    "owner": 'tables = ["serve_emb"]',
    "other": 'tables = ["item_emb"]',
    "nothing": "tables = []",
    "named": 'tables = []\nmodels = ["stranger"]',
    "pattern": 'tables = ["*"]',
}
OPENS = {"ctr": {"all", "owner", "pattern"}, "stranger": {"all", "named", "pattern"}}
pytestmark = pytest.mark.usefixtures("tf")


def secret(name: str) -> str:
    return f"a-long-key-of-{name}"


@pytest.fixture(scope="module")
def catalog(tf: Any, tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """`ctr`, which reads `serve_emb` and says so, and `stranger`, of which nobody knows what it reads."""
    folder = tmp_path_factory.mktemp("models")
    assert main(["export", str(TRAINED), "--savedmodel", str(folder / "ctr")]) == 0
    module = tf.Module()
    twice = tf.function(lambda ids: {"twice": 2 * ids}, input_signature=[tf.TensorSpec([None], tf.int64, name="ids")])
    tf.saved_model.save(module, str(folder / "stranger"), {"serving_default": twice})
    models = []
    for name in OPENS:
        store = open_store(folder / name)
        assert isinstance(store, SavedModelStore)
        version = ServedVersion(name, 1, folder / name, store)  # type: ignore[arg-type]
        models.append(ServedModel(name, (version,), {}, (VersionStatus(1, "AVAILABLE"),)))
    return Catalog(models)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text("".join(f'[[key]]\nname = "{name}"\nkey = "{secret(name)}"\n{KEYS[name]}\n' for name in KEYS))
    return Settings(api_keys=file)


def rest(catalog: Catalog, settings: Settings, name: str, model: str, protocol: str) -> str:
    observer = Telemetry(catalog, settings)
    client = TestClient(create_app(catalog, settings, lookups=Lookups(catalog, settings, observer)))
    ids = {"name": "ids", "datatype": "INT64", "shape": [1], "data": [7]}
    path, body = {
        "predict": (f"/v1/models/{model}:predict", {"instances": [7]}),
        "infer": (f"/v2/models/{model}/infer", {"inputs": [ids]}),
    }[protocol]
    answer = client.post(path, json=body, headers={"X-API-Key": secret(name)})
    assert answer.status_code in (200, 403)
    return "" if answer.status_code == 200 else answer.json()["error"]


def grpc(catalog: Catalog, settings: Settings, name: str, model: str, protocol: str) -> str:
    caller = Caller(Telemetry(catalog, settings), {"x-api-key": secret(name)}, protocol="grpc")
    ids = {"dtype": 9, "tensor_shape": {"dim": [{"size": 1}]}, "int64_val": [7]}
    raw = {"name": "ids", "datatype": "INT64", "shape": [1], "contents": {"int64_contents": [7]}}
    methods, path, request = {
        "predict": (
            tensorflow_grpc.methods,
            "/tensorflow.serving.PredictionService/Predict",
            message("tensorflow.serving.PredictRequest")(model_spec={"name": model}, inputs={"ids": ids}),
        ),
        "infer": (
            kserve_grpc.methods,
            "/inference.GRPCInferenceService/ModelInfer",
            message("inference.ModelInferRequest")(model_name=model, inputs=[raw]),
        ),
    }[protocol]
    try:
        assert methods(catalog, settings)[path](request.SerializeToString(), caller)
    except ProtocolError as error:
        assert error.code == "PERMISSION_DENIED"
        return error.message
    return ""


@pytest.mark.parametrize("protocol", ["predict", "infer"])
@pytest.mark.parametrize("asked", [rest, grpc])
def test_a_key_needs_the_tables_that_a_whole_model_reads(
    catalog: Catalog, settings: Settings, asked: Any, protocol: str
) -> None:
    said = {model: {name: asked(catalog, settings, name, model, protocol) for name in KEYS} for model in OPENS}
    assert {model: {name for name, error in of.items() if not error} for model, of in said.items()} == OPENS
    for name in ("other", "nothing"):
        assert said["ctr"][name] == f"the key '{name}' is not for table 'serve_emb'"
    for name in ("owner", "other", "nothing"):
        assert said["stranger"][name].startswith(f"the key '{name}' is for some tables only, and which tables model")
        assert 'give the key models = ["stranger"]' in said["stranger"][name]
    assert asked(catalog, settings, "named", "ctr", protocol) == "the key 'named' is not for model 'ctr'"


@pytest.mark.parametrize("protocol", ["predict", "infer"])
def test_what_is_asked_of_a_whole_model_is_counted_and_logged_under_its_name(
    catalog: Catalog, settings: Settings, protocol: str, tmp_path: Path
) -> None:
    settings = dataclasses.replace(settings, access_log=str(tmp_path / "log"))
    observer = Telemetry(catalog, settings)
    client = TestClient(create_app(catalog, settings, lookups=Lookups(catalog, settings, observer)))
    path = {"predict": "/v1/models/ctr:predict", "infer": "/v2/models/ctr/infer"}[protocol]
    ids = {"name": "ids", "datatype": "INT64", "shape": [1], "data": [7]}
    body = {"predict": {"instances": [7]}, "infer": {"inputs": [ids]}}[protocol]
    asked = [("all", body, 200), ("all", {"inputs": "none"}, 400), ("other", body, 403)]
    for name, sent, status in asked:
        assert client.post(path, json=sent, headers={"X-API-Key": secret(name)}).status_code == status
    metrics = client.get("/metrics", headers={"X-API-Key": secret("all")}).text
    labels = f'{{protocol="http",api="{protocol}",table="",model="ctr"}}'
    assert f"kvtools_request_seconds_count{labels} 3\n" in metrics
    observer.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["key"], line["model"], line["status"]) for line in lines if line.get("api") == protocol] == [
        (name, "ctr", status) for name, _, status in asked
    ]


def test_a_key_that_opens_nothing_is_told(
    catalog: Catalog, settings: Settings, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    Telemetry(catalog, settings).check_keys()
    assert caplog.messages == [
        "key 'other' is for table 'item_emb', which is not served; there is 'serve_emb'",
        "key 'nothing' opens nothing: its list of tables is empty; leave it out to open all",
    ]
    caplog.clear()
    file = tmp_path / "keys.toml"
    file.write_text(
        f'[[key]]\nname = "idle"\nkey = "{secret("idle")}"\nmodels = []\n'
        f'[[key]]\nname = "wrong"\nkey = "{secret("wrong")}"\ntables = []\nmodels = ["ctr"]\n'
        f'[[key]]\nname = "operator"\nkey = "{secret("operator")}"\nadmin = true\ntables = []\nmodels = []\n'
    )
    Telemetry(catalog, Settings(api_keys=file)).check_keys()
    assert caplog.messages == [
        "key 'idle' opens nothing: its list of models is empty; leave it out to open all",
        "key 'wrong' opens nothing: its list of tables is empty; leave it out to open all",
    ]
