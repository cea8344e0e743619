"""Several models, some of whose tables have the same name: no lookup takes one for another."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lookup_servers import fake_server, real_server, rows_of
from requests_to_port import raw
from resp_server import serving
from test_prepared_lookups import Wire, one_table, post, row

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient

from kvtools._snapshot import Writer
from kvtools.client import Client, RefusedError
from kvtools.errors import UsageError
from kvtools.lookup_frame import MEDIA_TYPE as FRAME
from kvtools.lookup_frame import TableKeys, decode_answer, encode_request
from kvtools.server.app import create_app
from kvtools.server.catalog import Catalog, ServedModel, ServedVersion, VersionStatus
from kvtools.server.http_protocol import read_head
from kvtools.server.lookups import Lookups
from kvtools.server.settings import Settings
from kvtools.server.sources import ModelSource
from kvtools.server.store import TableStore
from kvtools.server.telemetry import Telemetry
from kvtools.server.versions import Versions

BODY = {"keys": [3]}
FOR_B = "a-key-for-model-b"


def write(path: Path, tables: dict[str, float]) -> TableStore:
    """Tables of keys 0 to 9, of two numbers a row, which all are that of the table."""
    writer = Writer(str(path), 1 << 20)
    for name, value in tables.items():
        writer.begin_table(name, key_dtype="int64", value_dtype="float32", dim=2, rows=10)
        writer.add_keys(np.arange(10))
        writer.sort_keys()
        writer.add_rows(0, np.full((10, 2), value, np.float32))
        writer.end_table()
    writer.close(json.dumps({"format": "kvtools snapshot", "tables": {}}).encode())
    store = TableStore(path)
    store.populate()
    return store


def model(name: str, store: TableStore, number: int = 1) -> ServedModel:
    version = ServedVersion(name, number, Path(store.path), store)
    return ServedModel(name, (version,), {}, (VersionStatus(number, "AVAILABLE"),))


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    """Model a, version 1: `bias` of 1 and `only_a` of 2; model b, version 7: `bias` of 3 and `only_b` of 4."""
    a = write(tmp_path / "a.kvsnap", {"bias": 1, "only_a": 2})
    b = write(tmp_path / "b.kvsnap", {"bias": 3, "only_b": 4})
    return Catalog([model("a", a), model("b", b, 7)])


@pytest.fixture
def client(catalog: Catalog) -> TestClient:
    return TestClient(create_app(catalog))


def error(answer: Any) -> tuple[int, str, str]:
    said = answer.json()["error"]
    return answer.status_code, said["code"], said["message"]


def test_the_model_is_the_one_that_is_named_or_the_only_one_that_has_the_table(client: TestClient) -> None:
    for table, query, value, version in (
        ("bias", "?model=a", 1, "1"),
        ("bias", "?model=b", 3, "7"),
        ("bias", "?missing=zeros&model=b", 3, "7"),
        ("only_a", "", 2, "1"),
        ("only_b", "", 4, "7"),
        ("only_b", "?model=b&missing=error", 4, "7"),
    ):
        answer = client.post(f"/v1/tables/{table}:lookup{query}", json=BODY)
        assert answer.json() == {"embeddings": [[value, value]], "found": [True]}
        assert answer.headers["x-embedding-version"] == version
        assert client.get(f"/v1/tables/{table}/rows/3{query}").json()["embedding"] == [value, value]
        answer = client.post(f"/v1/tables:lookup{query}", json={"tables": {table: BODY}})
        assert answer.json()["tables"][table]["embeddings"] == [[value, value]]
        frame = encode_request([TableKeys(table, np.array([3]))], None)
        both = {"Content-Type": FRAME, "Accept": FRAME}
        answer = client.post(f"/v1/tables:lookup{query}", content=frame, headers=both)
        (rows,), number = decode_answer(answer.content)
        assert (rows.embeddings.tolist(), number) == ([[value, value]], int(version))


@pytest.mark.parametrize("query", ["", "?missing=zeros"])
def test_a_table_that_several_models_have_is_an_error_that_names_them(client: TestClient, query: str) -> None:
    frame = encode_request([TableKeys("bias", np.array([3]))], None)
    for answer in (
        client.post(f"/v1/tables/bias:lookup{query}", json=BODY),
        client.get(f"/v1/tables/bias/rows/3{query}"),
        client.post(f"/v1/tables:lookup{query}", json={"tables": {"only_a": BODY, "bias": BODY}}),
        client.post(f"/v1/tables:lookup{query}", content=frame, headers={"Content-Type": FRAME}),
        client.post("/v1/tables/bias:nearest", json={"key": "3"}),
        client.get("/v1/tables/bias:rows"),
    ):
        status, code, message = error(answer)
        assert (status, code) == (400, "ambiguous_table")
        assert "'bias' in the models 'a', 'b'" in message and "?model=a" in message


def test_what_is_no_model_or_no_table_of_it(client: TestClient) -> None:
    for path in ("/v1/tables/bias:lookup", "/v1/tables:lookup"):
        status, code, message = error(client.post(f"{path}?model=c", json={"tables": {"bias": BODY}}))
        assert (status, code) == (404, "unknown_model") and "there are 'a', 'b'" in message
    assert error(client.get("/v1/tables?model=c"))[:2] == (404, "unknown_model")
    assert error(client.get("/v1/tables/bias:rows?model=c"))[:2] == (404, "unknown_model")
    assert error(client.post("/v1/tables/only_a:lookup?model=b", json=BODY))[:2] == (404, "unknown_table")
    assert error(client.post("/v1/tables/none:lookup", json=BODY))[:2] == (404, "unknown_table")
    assert error(client.post("/v1/tables/bias:lookup?model=a&model=b", json=BODY))[:2] == (400, "bad_parameter")
    both = {"tables": {"only_a": BODY, "only_b": BODY}}
    status, code, message = error(client.post("/v1/tables:lookup", json=both))
    assert (status, code) == (400, "ambiguous_table")
    assert "'only_a' is of model 'a' and table 'only_b' of model 'b'" in message
    assert error(client.post("/v1/tables:lookup", content=b"{"))[:2] == (400, "bad_json")


def test_the_list_has_the_tables_of_all_models(client: TestClient) -> None:
    listing = client.get("/v1/tables").json()
    assert [(table["model"], table["name"]) for table in listing["tables"]] == [
        ("a", "bias"),
        ("a", "only_a"),
        ("b", "bias"),
        ("b", "only_b"),
    ]
    assert (listing["model"], listing["version"], listing["dialect"]) == (None, None, None)
    assert [(each["model"], each["version"]) for each in listing["models"]] == [("a", 1), ("b", 7)]
    of_b = client.get("/v1/tables?model=b").json()
    assert (of_b["model"], of_b["version"], len(of_b["tables"])) == ("b", 7, 2)
    assert of_b.keys() == listing.keys() - {"models"} and "model" not in of_b["tables"][0]


def test_one_model_is_listed_as_before(tmp_path: Path) -> None:
    client = TestClient(create_app(Catalog([model("m", one_table(tmp_path / "m.kvsnap", 1), 5)])))
    listing = client.get("/v1/tables").json()
    assert list(listing) == ["model", "version", "dialect", "limits", "tables"]
    assert (listing["model"], listing["version"]) == ("m", 5) and "model" not in listing["tables"][0]
    assert client.get("/v1/tables?model=m").json() == listing
    assert client.post("/v1/tables/emb:lookup?model=m", json=BODY).json()["embeddings"] == [[1, 1]]
    assert error(client.post("/v1/tables/emb:lookup?model=n", json=BODY))[:2] == (404, "unknown_model")


def test_the_page_asks_the_model_that_is_named(client: TestClient) -> None:
    assert client.get("/v1/tables/bias:rows?model=b").json()["rows"] == 10
    nearest = client.post("/v1/tables/bias:nearest?model=b", json={"key": "3", "metric": "dot", "count": 1}).json()
    assert nearest["neighbours"][0]["score"] == 18  # 3 * 3 + 3 * 3
    nearest = client.post("/v1/tables/only_b:nearest", json={"key": "3", "metric": "dot", "count": 1}).json()
    assert nearest["neighbours"][0]["score"] == 32


def test_a_model_without_a_version_may_have_the_table(catalog: Catalog, client: TestClient) -> None:
    catalog.publish(ServedModel("c"))
    assert error(client.post("/v1/tables/new:lookup", json=BODY))[:2] == (503, "not_ready")
    assert error(client.post("/v1/tables/new:lookup?model=c", json=BODY))[:2] == (503, "not_ready")
    assert error(client.post("/v1/tables/new:lookup?model=a", json=BODY))[:2] == (404, "unknown_table")
    assert client.get("/v1/tables").json()["models"][2] == {"model": "c", "version": None, "dialect": None}
    with serving(catalog) as server:
        assert raw(server.port, b"GET new:3\r\n").startswith(b"-ERR model 'c' has no version")


def test_a_table_of_several_models_stays_one_while_a_model_has_no_version(catalog: Catalog, client: TestClient) -> None:
    catalog.publish(ServedModel("b"))
    assert error(client.post("/v1/tables/bias:lookup", json=BODY))[:2] == (400, "ambiguous_table")
    assert error(client.post("/v1/tables/only_b:lookup", json=BODY))[:2] == (503, "not_ready")
    assert client.post("/v1/tables/bias:lookup?model=a", json=BODY).json()["embeddings"] == [[1, 1]]
    assert client.post("/v1/tables/only_a:lookup", json=BODY).json()["embeddings"] == [[2, 2]]
    with serving(catalog) as server:
        assert b"'a:bias', 'b:bias'" in raw(server.port, b"GET bias:3\r\n")
        assert raw(server.port, b"GET b:bias:3\r\n").startswith(b"-ERR model 'b' has no version")
        assert raw(server.port, b"GET a:bias:3\r\nGET only_a:3\r\n") == value(1) + value(2)


def test_keys_for_a_model_open_that_one(catalog: Catalog, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[key]]\nname = "b"\nkey = "{FOR_B}"\nmodels = ["b"]\n')
    settings = Settings(api_keys=keys)
    telemetry = Telemetry(catalog, settings)
    client = TestClient(create_app(catalog, settings, lookups=Lookups(catalog, settings, telemetry)))
    key = {"X-API-Key": FOR_B}
    for table, query, status in (
        ("bias", "?model=a", 403),
        ("bias", "?model=b", 200),
        ("only_a", "", 403),
        ("only_b", "", 200),
        ("bias", "", 400),
        ("bias", "?model=c", 404),
    ):
        tables = {"tables": {table: BODY}}
        for headers, expected in ((key, status), ({}, 401)):
            answers = [
                client.post(f"/v1/tables/{table}:lookup{query}", json=BODY, headers=headers),
                client.get(f"/v1/tables/{table}/rows/3{query}", headers=headers),
                client.post(f"/v1/tables:lookup{query}", json=tables, headers=headers),
                client.get(f"/v1/tables/{table}:rows{query}", headers=headers),
            ]
            assert [answer.status_code for answer in answers] == [expected] * 4, (table, query)
    with serving(catalog, observer=telemetry, api_keys=keys) as server:
        hello = b"AUTH " + FOR_B.encode() + b"\r\n"
        for command, reply in (
            (b"HGET a:bias 3", b"-NOPERM"),
            (b"EXISTS only_a:3", b"-NOPERM"),
            (b"HGET b:bias 3", b"$8"),
            (b"EXISTS only_b:3", b":1"),
        ):
            assert raw(server.port, hello + command + b"\r\n").startswith(b"+OK\r\n" + reply)


@pytest.fixture
def wire(catalog: Catalog) -> Iterator[Wire]:
    made = Wire(catalog, Settings(), Telemetry(catalog, Settings()))
    yield made
    made.end()


def test_prepared_lookups_end_when_a_table_becomes_one_of_several(catalog: Catalog, wire: Wire, tmp_path: Path) -> None:
    def ask_again(request: bytes) -> bytes:
        return [wire.ask(request) for _ in range(3)][-1]

    body = json.dumps(BODY).encode()
    for query, number in (("?model=a", b"1"), ("?model=b", b"3"), ("?model=b&missing=error", b"3")):
        expected = b'{"embeddings":[[%b.0,%b.0]],"found":[true]}' % (number, number)
        assert ask_again(post(body, "bias", query)).endswith(expected)
        assert wire.prepared
        assert b'"embedding":[%b.0,%b.0]' % (number, number) in ask_again(row(3, "bias", query))
        assert wire.prepared
    assert b"[[4.0,4.0]]" in ask_again(post(body, "only_b")) and wire.prepared
    assert b'"ambiguous_table"' in ask_again(post(body, "bias")) and not wire.prepared
    assert b'"unknown_model"' in ask_again(post(body, "bias", "?model=c")) and not wire.prepared
    assert b"[[4.0,4.0]]" in ask_again(post(body, "only_b")) and wire.prepared
    catalog.publish(model("c", write(tmp_path / "c.kvsnap", {"only_b": 5}), 2))
    for _ in range(2):
        assert b"HTTP/1.1 400 " in (answer := wire.ask(post(body, "only_b"))) and b"'b', 'c'" in answer
    assert b"[[5.0,5.0]]" in ask_again(post(body, "only_b", "?model=c")) and wire.prepared
    catalog.remove("b")
    assert b"[[5.0,5.0]]" in ask_again(post(body, "only_b")) and b"[[1.0,1.0]]" in ask_again(post(body, "bias"))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("", (None, None)),
        ("?model=b", ("b", None)),
        ("?model=b-1.x&missing=zeros", ("b-1.x", "zeros")),
        ("?missing=zeros", (None, "zeros")),
        ("?", None),
        ("&missing=zeros", None),
        ("?model=", None),
        ("?model=b&", None),
        ("?model=b%20c", None),
        ("?missing=zeros&model=b", None),
    ],
)
def test_what_of_a_model_the_short_way_reads(query: str, expected: tuple[str | None, str | None] | None) -> None:
    head = read_head(row(3, "bias", query))
    assert (head and (head.ask.model, head.ask.missing)) == expected


def value(number: float) -> bytes:
    return b"$8\r\n" + np.full(2, number, "<f4").tobytes() + b"\r\n"


def test_the_redis_protocol(catalog: Catalog, tmp_path: Path) -> None:
    with serving(catalog) as server:
        for command, reply in (
            (b"HGET a:bias 3", value(1)),
            (b"GET b:bias:3", value(3)),
            (b"GET only_a:3", value(2)),
            (b"HGET b:only_b 3", value(4)),
            (b"MGET only_a:3 b:bias:3", b"*2\r\n" + value(2) + value(3)),
            (b"HLEN b:bias", b":10\r\n"),
            (b"DBSIZE", b":40\r\n"),
            (b"SELECT 2\r\nGET 3", b"+OK\r\n" + value(3)),
            (b"SELECT b:bias\r\nGET 3\r\nDBSIZE", b"+OK\r\n" + value(3) + b":10\r\n"),
            (b"GET none:3", b"-ERR there is no table 'none'\r\n"),
        ):
            assert raw(server.port, command + b"\r\n") == reply, command
        for command in (b"HGET bias 3", b"GET bias:3", b"MGET bias:3 only_a:3", b"SELECT bias", b"HLEN bias"):
            reply = raw(server.port, command + b"\r\n")
            assert reply.startswith(b"-ERR there is a table 'bias' in several models"), command
            assert b"'a:bias', 'b:bias'" in reply
        assert b"db2:keys=10,expires=0,avg_ttl=0,table=b:bias" in raw(server.port, b"INFO keyspace\r\n")
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:

            def say(data: bytes) -> bytes:
                connection.sendall(data)
                return connection.recv(4096)

            assert [say(b"GET only_b:3\r\n") for _ in range(3)] == [value(4)] * 3
            catalog.publish(model("c", write(tmp_path / "c.kvsnap", {"only_b": 5, "b:only_b": 6}), 2))
            assert b"several models" in say(b"GET only_b:3\r\n")
            assert b"'b:only_b', 'c:b:only_b'" in say(b"GET b:only_b:3\r\n"), "a table may have such a name"
            assert say(b"GET c:b:only_b:3\r\n") == value(6)
            catalog.remove("b")
            assert say(b"GET only_b:3\r\n") == value(5)


def test_kserve_asks_a_table_that_several_models_have_as_one_of_its_model(catalog: Catalog, client: TestClient) -> None:
    ids = {"inputs": [{"name": "ids", "shape": [1], "datatype": "INT64", "data": [3]}]}
    named = {**ids, "parameters": {"signature_name": "bias"}}
    for url, body, number in (
        ("/v2/models/a/infer", named, 1),
        ("/v2/models/b/infer", named, 3),
        ("/v2/models/only_b/infer", ids, 4),
        ("/v2/models/only_b/versions/7/infer", ids, 4),
    ):
        assert client.post(url, json=body).json()["outputs"][0]["data"] == [number, number]
    for url in ("/v2/models/bias/infer", "/v2/models/bias/versions/7/infer"):
        answer = client.post(url, json=ids)
        assert answer.status_code == 400 and "in the models 'a', 'b'" in answer.json()["error"]
    assert client.get("/v2/models/bias").status_code == 400
    index = client.post("/v2/repository/index", json={}).json()
    assert [entry["name"] for entry in index] == ["a", "only_a", "b", "only_b"]


def test_the_client_names_the_model_it_was_made_with(catalog: Catalog) -> None:
    with real_server(catalog) as url:
        for name, number in (("a", 1), ("b", 3)):
            with Client(url, model=name) as client:
                assert client.lookup("bias", [3])[0].tolist() == [[number, number]]
                assert client.lookup_pooled("bias", [3, 4], [0, 2]).tolist() == [[2 * number, 2 * number]]
                assert client.tables().keys() == {"bias", f"only_{name}"}
        with Client(url) as client:
            for table, number in (("only_a", 2), ("only_b", 4), ("only_a", 2)):
                assert client.lookup(table, [3])[0].tolist() == [[number, number]]
            assert {name: table.model for name, table in client.tables().items()} == {"only_a": "a", "only_b": "b"}
            with pytest.raises(UsageError, match=r"'bias': .* models 'a', 'b'; name one by model="):
                client.lookup("bias", [3])
            with pytest.raises(UsageError, match="'only_a' is of model 'a' and table 'only_b' of model 'b'"):
                client.lookup_many({"only_a": [3], "only_b": [3]})
            catalog.publish(model("c", catalog.version("b").store))
            with pytest.raises(RefusedError, match=r"400: .*'only_b' in the models 'b', 'c'"):
                client.lookup("only_b", [3])
        with Client(url, model="d") as client, pytest.raises(RefusedError, match="no model 'd'; there are 'a'"):
            client.lookup("bias", [3])
    with pytest.raises(UsageError, match="got model=''"):
        Client(url, model="")


def test_a_model_of_any_name_stands_in_the_url_of_the_client() -> None:
    rows = rows_of({"emb": {3: [1.0]}}, 1)
    with fake_server(lambda asked: rows(replace(asked, line=asked.line.replace("?model=a%2Fb%20c", "")))) as server:
        with Client(server.url, model="a/b c") as client:
            assert client.lookup("emb", [3])[0].tolist() == [[1.0]]
        assert server.asked and all("?model=a%2Fb%20c " in asked.line for asked in server.asked)


def test_the_log_tells_of_tables_that_several_models_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Versions, "_settled", lambda self, state, found: True)
    for name in ("a", "b"):
        write(tmp_path / f"{name}.kvsnap", {"bias": 1, f"only_{name}": 2})
    caplog.set_level("WARNING", "kvtools.serve")
    catalog = Catalog()
    a, b = (ModelSource(name, str(tmp_path / f"{name}.kvsnap")) for name in ("a", "b"))
    versions = Versions(catalog, [a], Settings(poll=3600.0))
    versions.load()
    assert not caplog.records and catalog.same_tables() == {}
    versions.go_on()
    try:
        for sources, times in (([a, b], 1), ([a, b], 1), ([a], 1), ([a, b], 2)):
            assert versions.reload(sources).result(60) == {}
            assert caplog.text.count("there is a table 'bias' in the models 'a', 'b'") == times
        assert "?model=a" in caplog.text and "only_a" not in caplog.text
    finally:
        versions.stop()
