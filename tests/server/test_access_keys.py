"""Who may ask: files of keys, and every protocol's way of refusing."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient

from kvtools.errors import BadInputError
from kvtools.server.access_keys import AccessKeys, read_access_keys
from kvtools.server.app import create_app
from kvtools.server.catalog import Catalog, ServedModel, static_catalog
from kvtools.server.lookups import Lookups
from kvtools.server.request import RequestError
from kvtools.server.settings import Settings
from kvtools.server.telemetry import Telemetry

SAMPLE = Path(__file__).parent.parent / "data" / "sample"
ALL, ADS, OTHER = "key-for-everything", "key-for-ads-alone", "key-for-another-model"
LOOKUP = "/v1/tables/ads/emb:lookup"
BODY = {"keys": [42]}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(
        f"""
        [[key]]
        name = "all"
        sha256 = "{hashlib.sha256(ALL.encode()).hexdigest()}"
        admin = true
        [[key]]
        name = "ads"
        key = "{ADS}"
        tables = ["ads/*"]
        [[key]]
        name = "other"
        key = "{OTHER}"
        models = ["other"]
        """
    )
    return path


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return static_catalog(SAMPLE)


@pytest.fixture(scope="module")
def client(key_file: Path, catalog: Catalog) -> TestClient:
    settings = Settings(api_keys=key_file, admin=True)
    return TestClient(create_app(catalog, settings, lookups=Lookups(catalog, settings, Telemetry(catalog, settings))))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_key_for_what_is_not_served_is_told(tmp_path: Path, catalog: Catalog, caplog: Any) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        f"""
        [[key]]
        name = "typo"
        key = "{ADS}"
        tables = ["ads/*", "user_embb"]
        models = ["default", "other"]
        """
    )
    telemetry = Telemetry(catalog, Settings(api_keys=path))
    telemetry.check_keys()
    there = ", ".join(f"'{name}'" for name in sorted(catalog.version().store.tables))
    assert caplog.messages == [
        f"key 'typo' is for table 'user_embb', which is not served; there is {there}",
        "key 'typo' is for model 'other', which is not served; there is 'default'",
    ]
    Telemetry(Catalog([ServedModel("ctr")]), Settings(api_keys=path)).check_keys()
    assert len(caplog.messages) == 2, "no version yet: its tables are not known"


def test_a_lookup_needs_a_key_that_opens_the_table(client: TestClient) -> None:
    refused = client.post(LOOKUP, json=BODY)
    assert refused.status_code == 401
    assert refused.headers["www-authenticate"] == "Bearer"
    assert refused.json()["error"]["code"] == "unauthorized"
    assert client.post(LOOKUP, json=BODY, headers=bearer("wrong")).status_code == 401
    assert client.post(LOOKUP, json=BODY, headers=bearer(ADS)).status_code == 200
    assert client.post(LOOKUP, json=BODY, headers={"X-API-Key": ADS}).status_code == 200
    other = client.post("/v1/tables/user_emb:lookup", json=BODY, headers=bearer(ADS))
    assert (other.status_code, other.json()["error"]["code"]) == (403, "forbidden")
    assert "user_emb" in other.json()["error"]["message"]
    assert client.get("/v1/tables/user_emb/rows/9", headers=bearer(ADS)).status_code == 403
    several = {"tables": {"ads/emb": BODY, "user_emb": BODY}}
    assert client.post("/v1/tables:lookup", json=several, headers=bearer(ADS)).status_code == 403
    assert client.post("/v1/tables:lookup", json=several, headers=bearer(ALL)).status_code == 200
    model = client.post(LOOKUP, json=BODY, headers=bearer(OTHER))
    assert model.status_code == 403 and "model 'default'" in model.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/metrics", "/v1/tables", "/v1/models/default", "/v2/models/default", "/no/such"])
def test_everything_else_needs_any_key(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 401
    assert client.get(path, headers=bearer(ADS)).status_code in (200, 400, 404)


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/healthz", "/v2/health/live", "/docs", "/openapi.json"])
def test_health_checks_and_documents_need_none(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 200


def test_changes_need_a_key_for_administration(client: TestClient) -> None:
    path = "/admin/models/default/labels/stable"
    assert client.put(path, json={"version": 1}).status_code == 401
    refused = client.put(path, json={"version": 1}, headers=bearer(ADS))
    assert refused.status_code == 403 and "administration" in refused.json()["error"]["message"]
    assert "cannot be changed" in client.put(path, json={"version": 1}, headers=bearer(ALL)).text  # a static catalog


def test_protocols_of_others_refuse_in_their_own_form(client: TestClient) -> None:
    predict = {"signature_name": "user_emb", "inputs": {"ids": [9]}}
    refused = client.post("/v1/models/default:predict", json=predict)
    assert refused.status_code == 401 and isinstance(refused.json()["error"], str)
    refused = client.post("/v1/models/default:predict", json=predict, headers=bearer(ADS))
    assert refused.status_code == 403 and "user_emb" in refused.json()["error"]
    refused = client.post("/v1/models/default:predict", json=predict, headers=bearer(OTHER))
    assert refused.status_code == 403 and "model 'default'" in refused.json()["error"]
    assert client.post("/v1/models/default:predict", json=predict, headers=bearer(ALL)).status_code == 200
    assert client.post("/v2/models/user_emb/infer", json={"inputs": []}).status_code == 401


def test_grpc_reads_the_key_from_the_metadata(key_file: Path, catalog: Catalog) -> None:
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("tensorflow_serving")
    from google.protobuf.message_factory import GetMessageClass

    from kvtools.server.grpc_server import start
    from kvtools.server.protos import POOL

    settings = Settings(grpc_port=0, api_keys=key_file)
    server = start(catalog, settings, Telemetry(catalog, settings))
    request = GetMessageClass(POOL.FindMessageTypeByName("tensorflow.serving.PredictRequest"))()
    request.model_spec.name, request.model_spec.signature_name = "default", "user_emb"
    request.inputs["ids"].dtype = 9
    request.inputs["ids"].tensor_shape.dim.add().size = 1
    request.inputs["ids"].int64_val.append(9)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")

            def code(key: str) -> Any:
                try:
                    metadata = (("x-api-key", key),) if key else ()
                    return call.with_call(request.SerializeToString(), metadata=metadata)[1].code()
                except grpc.RpcError as error:
                    return error.code()

            assert code("") is grpc.StatusCode.UNAUTHENTICATED
            assert code("wrong-and-long-enough") is grpc.StatusCode.UNAUTHENTICATED
            assert code(ADS) is grpc.StatusCode.PERMISSION_DENIED
            assert code(OTHER) is grpc.StatusCode.PERMISSION_DENIED
            assert code(ALL) is grpc.StatusCode.OK
    finally:
        server.stop(0)


def test_the_redis_protocol_takes_the_key_by_auth(key_file: Path, catalog: Catalog) -> None:
    from kvtools.server import resp

    async def talk() -> list[bytes]:
        settings = Settings(resp_port=0, api_keys=key_file)
        server = await resp.start(catalog, settings, observer=Telemetry(catalog, settings))
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        replies = []
        for line in ("PING", "GET user_emb:9", "DBSIZE", "AUTH wrong", f"AUTH {ADS}", "GET user_emb:9"):
            writer.write(line.encode() + b"\r\n")
            replies.append(await reader.readline())
        writer.write(b"GET ads/emb:42\r\n")
        replies.append(await reader.readline())
        writer.close()
        await server.close()
        return replies

    ping, without, size, wrong, right, closed, row = asyncio.run(talk())
    assert ping == b"+PONG\r\n" and right == b"+OK\r\n" and row.startswith(b"$")
    assert without.startswith(b"-NOAUTH ") and size.startswith(b"-NOAUTH ")
    assert wrong.startswith(b"-WRONGPASS ") and closed.startswith(b"-NOPERM ")


BAD_FILES = {
    "no file": None,
    "no toml": "[[key]\n",
    "nothing": "",
    "something else": "keys = 1\n",
    "a table": '[key]\nname = "a"\n',
    "no name": '[[key]]\nkey = "0123456789abcdef"\n',
    "no key": '[[key]]\nname = "a"\n',
    "both": f'[[key]]\nname = "a"\nkey = "0123456789abcdef"\nsha256 = "{"0" * 64}"\n',
    "short": '[[key]]\nname = "a"\nkey = "secret"\n',
    "bad digest": '[[key]]\nname = "a"\nsha256 = "secret"\n',
    "typo": '[[key]]\nname = "a"\nkey = "0123456789abcdef"\ntable = ["x"]\n',
    "tables": '[[key]]\nname = "a"\nkey = "0123456789abcdef"\ntables = "x"\n',
    "admin": '[[key]]\nname = "a"\nkey = "0123456789abcdef"\nadmin = "no"\n',
    "names": '[[key]]\nname = "a"\nkey = "0123456789abcdef"\n[[key]]\nname = "a"\nkey = "another-secret-key"\n',
    "same keys": '[[key]]\nname = "a"\nkey = "0123456789abcdef"\n[[key]]\nname = "b"\nkey = "0123456789abcdef"\n',
}


@pytest.mark.parametrize("text", BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_an_error_that_shows_no_key(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "keys.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInputError, match=r"keys\.toml") as raised:
        read_access_keys(path)
    for secret in ("0123456789abcdef", "secret"):
        assert secret not in str(raised.value)


def test_the_environment_has_a_key_for_all_tables_and_no_administration(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_access_keys(None) is None
    # A secret that is not there lets nobody in, rather than everybody.
    for name, value in (("_KEY", ""), ("_KEY", " " * 16), ("_KEY", f"{ALL}\n"), ("_KEYS", "")):
        with monkeypatch.context() as patch, pytest.raises(BadInputError, match=f"_API{name}: .* unset it"):
            patch.setenv(f"KVTOOLS_SERVE_API{name}", value)
            read_access_keys(None)
    monkeypatch.setenv("KVTOOLS_SERVE_API_KEY", ALL)
    keys = read_access_keys(None)
    assert isinstance(keys, AccessKeys)
    headers = {"authorization": f"bearer {ALL}"}
    keys.authorize(headers, ["anything"])
    with pytest.raises(RequestError, match="not for administration"):
        keys.authorize(headers, admin=True)
    with pytest.raises(RequestError, match="not known"):
        keys.authorize({"authorization": "Basic dTpw"})
