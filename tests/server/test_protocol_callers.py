"""Who watches and guards lookups does so in the protocols of others, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("grpc_health")
import grpc
import numpy as np
from fastapi.testclient import TestClient

from kvtools.array_table import ArrayTable
from kvtools.server.answer import TableCount
from kvtools.server.app import create_app
from kvtools.server.catalog import Catalog, ServedModel, ServedVersion, static_catalog
from kvtools.server.grpc_server import start
from kvtools.server.lookups import Lookups
from kvtools.server.observer import Answered, Observer
from kvtools.server.protocol_error import ProtocolError
from kvtools.server.protos import message
from kvtools.server.request import RequestError
from kvtools.server.settings import Settings
from kvtools.server.signatures import is_small, signature_of

PREDICT = {"signature_name": "ads_emb", "instances": [-7, 99]}
INFER = {"inputs": [{"name": "ids", "shape": [2], "datatype": "INT64", "data": [-7, 99]}]}


class Guard(Observer):
    """Lets "all" do everything, and "ads" look up ads/emb."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Answered] = []

    def authorize(self, headers: Mapping[str, str], tables: Iterable[str]) -> None:
        key = headers.get("authorization", "").removeprefix("Bearer ")
        if key not in ("all", "ads"):
            raise RequestError(401, "no_key", "a key is needed", {"WWW-Authenticate": "Bearer"})
        if key == "ads" and not set(tables) <= {"ads/emb"}:
            raise RequestError(403, "forbidden", "the key is not for this table")

    def on_answer(self, answered: Answered) -> None:
        self.answers.append(answered)


def test_rest(sample_path: Path) -> None:
    guard, catalog = Guard(), static_catalog(sample_path)
    client = TestClient(create_app(catalog, lookups=Lookups(catalog, Settings(), guard)))

    def ask(key: str, method: str, url: str, body: Any = None) -> int:
        answer = client.request(method, url, json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code < 400 or list(answer.json()) == ["error"]
        assert (answer.status_code == 401) == ("www-authenticate" in answer.headers)
        return answer.status_code

    for url, body, kind in (
        ("/v1/models/default:predict", PREDICT, "predict"),
        ("/v2/models/ads/emb/infer", INFER, "infer"),
    ):
        assert [ask(key, "POST", url, body) for key in ("all", "ads", "", "other")] == [200, 200, 401, 401]
        told = guard.answers[-4]
        assert (told.kind, told.status, told.code, told.counts) == (
            kind,
            200,
            "",
            (TableCount("ads/emb", 2, 1, "default"),),
        )
        assert told.bytes_in > 20 and told.bytes_out > 20 and told.seconds > 0 and told.client
        assert (guard.answers[-1].status, guard.answers[-1].code) == (401, "unauthenticated")
    assert ask("ads", "POST", "/v1/models/default:predict", {**PREDICT, "signature_name": "user_emb"}) == 403
    all_tables = {"inputs": {"ads_emb_ids": [-7], "empty_emb_ids": [], "user_emb_ids": []}}
    assert [ask(key, "POST", "/v1/models/default:predict", all_tables) for key in ("all", "ads")] == [200, 403]
    assert TableCount("ads/emb", 1, 0, "default") in guard.answers[-2].counts
    assert ask("ads", "POST", "/v2/models/user_emb/infer", INFER) == 403
    for url in ("/v1/models/default", "/v1/models/default/metadata", "/v2/models/ads/emb", "/v2/models/ads/emb/ready"):
        assert [ask(key, "GET", url) for key in ("ads", "")] == [200, 401]
    for url in ("/v2", "/v2/health/live", "/v2/health/ready"):
        assert ask("", "GET", url) == 200


def test_grpc(sample_path: Path) -> None:
    guard = Guard()
    server = start(static_catalog(sample_path), Settings(grpc_port=0), guard)
    tensor = {"dtype": 9, "tensor_shape": {"dim": [{"size": 2}]}, "int64_val": [-7, 99]}
    predict = message("tensorflow.serving.PredictRequest")
    raw = {"name": "ids", "datatype": "INT64", "shape": [2], "contents": {"int64_contents": [-7, 99]}}
    infer = message("inference.ModelInferRequest")
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:

            def ask(key: str, method: str, request: Any) -> str:
                call = channel.unary_unary(method)
                try:
                    call(request.SerializeToString(), metadata=[("authorization", f"Bearer {key}")], timeout=30)
                except grpc.RpcError as error:
                    return str(error.code().name)
                return "OK"

            def of(table: str) -> list[tuple[str, Any]]:
                spec = {"name": "default", "signature_name": table}
                return [
                    ("/tensorflow.serving.PredictionService/Predict", predict(model_spec=spec, inputs={"ids": tensor})),
                    ("/inference.GRPCInferenceService/ModelInfer", infer(model_name=table, inputs=[raw])),
                ]

            for method, request in of("ads_emb"):
                got = [ask(key, method, request) for key in ("all", "ads", "")]
                assert got == ["OK", "OK", "UNAUTHENTICATED"]
                told = guard.answers[-3]
                assert (
                    told.counts == (TableCount("ads/emb", 2, 1, "default"),)
                    and told.client
                    and told.client[0] == "127.0.0.1"
                )
                assert told.kind in method.lower()
            for method, request in of("user_emb"):
                assert ask("ads", method, request) == "PERMISSION_DENIED"
            assert (
                ask("", "/inference.GRPCInferenceService/ServerLive", message("inference.ServerLiveRequest")()) == "OK"
            )
    finally:
        server.stop(0)


class Away:
    """A table whose rows lie elsewhere, and elsewhere is not there."""

    table = None
    schema = ArrayTable("emb", np.arange(3), np.zeros((3, 2), np.float32)).schema

    def lookup(self, keys: np.ndarray) -> Any:
        if not len(keys):
            return np.zeros((0, 2), np.float32), np.zeros(0, bool)
        raise RequestError(503, "backend_unavailable", "Redis cannot be asked; try again", {"Retry-After": "1"})


class AwayStore:
    warm = False
    tables: Any = MappingProxyType({"emb": Away()})


def test_rows_that_cannot_be_had_now_are_unavailable() -> None:
    store: Any = AwayStore()
    version = ServedVersion("default", 1, Path(), store)
    assert not is_small(version, 10)  # what is waited for is asked by a thread
    catalog = Catalog([ServedModel("default", (version,))])
    client = TestClient(create_app(catalog))
    for url, body in (
        ("/v1/models/default:predict", {"instances": [1]}),
        ("/v2/models/default/infer", {"inputs": [{"name": "ids", "shape": [1], "datatype": "INT64", "data": [1]}]}),
    ):
        answer = client.post(url, json=body)
        assert (answer.status_code, answer.json()) == (503, {"error": "Redis cannot be asked; try again"})
        assert answer.headers["retry-after"] == "1"
    with pytest.raises(ProtocolError) as caught:
        signature_of(version, "").run({"ids": np.array([1])}, ["embeddings"], Settings())
    assert caught.value.code == "UNAVAILABLE"
