"""`kvtools serve --follow` in a process of its own, by every protocol, while a chain grows."""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from chain_writer import ChainWriter
from requests_to_port import get_json

from kvtools.lookup_frame import MEDIA_TYPE, TableKeys, decode_answer, encode_request

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
OCTETS = "application/octet-stream"
ASKED = np.arange(-3, 90)
Answer = tuple[npt.NDArray[Any], npt.NDArray[Any] | None]


def until(condition: Callable[[], bool], what: str) -> None:
    last = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < last, f"never: {what}"
        time.sleep(0.01)


class Caller:
    """One client of each protocol, on connections that stay."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.port = int(told["url"].rpartition(":")[2])
        self.told = told
        self.connections: dict[str, http.client.HTTPConnection] = {}

    def post(self, path: str, body: bytes, **headers: str) -> bytes:
        connection = self.connections.setdefault(
            path + str(headers), http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        )
        connection.request("POST", path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        data = answer.read()
        assert answer.status == 200, (answer.status, data[:300])
        return data

    def json(self, table: str, keys: npt.NDArray[Any]) -> Answer:
        answer = json.loads(self.post(f"/v1/tables/{table}:lookup", json.dumps({"keys": keys.tolist()}).encode()))
        return np.array(answer["embeddings"], np.float32), np.array(answer["found"], bool)

    def binary(self, table: str, keys: npt.NDArray[Any]) -> Answer:
        data = self.post(f"/v1/tables/{table}:lookup", keys.astype("<i8").tobytes(), Content_Type=OCTETS, Accept=OCTETS)
        return np.frombuffer(data, "<f4").reshape(len(keys), -1), None

    def frame(self, table: str, keys: npt.NDArray[Any]) -> Answer:
        body = encode_request([TableKeys(table, keys), TableKeys("also", keys[:3])])
        (rows, _) = decode_answer(self.post("/v1/tables:lookup", body, Content_Type=MEDIA_TYPE, Accept=MEDIA_TYPE))[0]
        return rows.embeddings, rows.found

    def predict(self, table: str, keys: npt.NDArray[Any]) -> Answer:
        body = json.dumps({"signature_name": table, "inputs": {"ids": keys.tolist()}}).encode()
        outputs = json.loads(self.post("/v1/models/default:predict", body, Content_Type="application/json"))["outputs"]
        values = outputs["embeddings"] if isinstance(outputs, dict) else outputs
        return np.array(values, np.float32), np.array(outputs["found"], bool) if isinstance(outputs, dict) else None

    def infer(self, table: str, keys: npt.NDArray[Any]) -> Answer:
        ids = {"name": "ids", "datatype": "INT64", "shape": [len(keys)], "data": keys.tolist()}
        body = json.dumps({"inputs": [ids]}).encode()
        outputs = json.loads(self.post(f"/v2/models/{table}/infer", body, Content_Type="application/json"))["outputs"]
        named = {output["name"]: output for output in outputs}
        values = np.array(named["embeddings"]["data"], np.float32).reshape(named["embeddings"]["shape"])
        return values, np.array(named["found"]["data"], bool)

    def grpc(self, table: str, keys: npt.NDArray[Any]) -> Answer:
        client = pytest.importorskip("tritonclient.grpc")
        if not hasattr(self, "triton"):
            self.triton = client.InferenceServerClient(f"127.0.0.1:{self.told['grpc_port']}")
        ids = client.InferInput("ids", [len(keys)], "INT64")
        ids.set_data_from_numpy(keys.astype(np.int64))
        result = self.triton.infer(table, [ids])
        return result.as_numpy("embeddings"), result.as_numpy("found")

    def tensorflow_grpc(self, table: str, keys: npt.NDArray[Any]) -> Answer:
        grpc = pytest.importorskip("grpc")
        from kvtools.server.protos import message

        if not hasattr(self, "channel"):
            self.channel = grpc.insecure_channel(f"127.0.0.1:{self.told['grpc_port']}")
        ids = {
            "dtype": 9,
            "tensor_shape": {"dim": [{"size": len(keys)}]},
            "tensor_content": keys.astype("<i8").tobytes(),
        }
        spec = {"name": "default", "signature_name": table}
        request = message("tensorflow.serving.PredictRequest")(model_spec=spec, inputs={"ids": ids})
        call = self.channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        answer = message("tensorflow.serving.PredictResponse").FromString(call(request.SerializeToString(), timeout=60))
        rows, found = answer.outputs["embeddings"], answer.outputs["found"]
        values = np.frombuffer(rows.tensor_content, "<f4").reshape([dim.size for dim in rows.tensor_shape.dim])
        return values, np.array(found.bool_val, bool) if found.bool_val else np.frombuffer(found.tensor_content, bool)

    def resp(self, table: str, keys: npt.NDArray[Any]) -> Answer:
        if not hasattr(self, "redis"):
            self.redis = socket.create_connection(("127.0.0.1", self.told["resp_port"]), timeout=60)
            self.replies = self.redis.makefile("rb")
        names = [f"{table}:{key}".encode() for key in keys]
        parts = [b"*%d\r\n$4\r\nMGET\r\n" % (len(names) + 1)] + [b"$%d\r\n%s\r\n" % (len(n), n) for n in names]
        self.redis.sendall(b"".join(parts))
        assert self.replies.readline() == b"*%d\r\n" % len(keys)
        rows, found = [], []
        for _ in keys:
            length = int(self.replies.readline()[1:])
            found.append(length >= 0)
            rows.append(self.replies.read(length + 2)[:-2] if length >= 0 else b"")
        width = max((len(row) for row in rows), default=0)
        return np.frombuffer(b"".join(row or bytes(width) for row in rows), "<f4").reshape(len(keys), -1), np.array(
            found
        )

    def nearest(self) -> set[str]:
        answer = json.loads(self.post("/v1/tables/emb:nearest", b'{"key": "5", "metric": "dot", "count": 100}'))
        return {one["key"] for one in answer["neighbours"]} | {"5"}


def begun(tmp_path: Path) -> ChainWriter:
    writer = ChainWriter(tmp_path / "run", {"emb": 3, "also": 2})
    writer.put("emb", range(60), 1)
    writer.put("also", range(60), 1)
    writer.full()
    return writer


def grow(writer: ChainWriter) -> None:
    number = writer.number + 1
    writer.put("emb", [5, *range(number * 3 % 40, number * 3 % 40 + 30)], number)
    writer.remove("emb", range(number * 7 % 60 + 6, number * 7 % 60 + 12))
    writer.put("also", range(number), number)
    writer.increment()


@pytest.mark.thorough
def test_every_protocol_answers_each_increment(serve: Callable[..., Any], tmp_path: Path) -> None:
    writer = begun(tmp_path)
    server = serve("--follow", writer.folder, "--json", "--grpc-port", 0, "--resp-port", 0)
    caller = Caller(json.loads(server.line))
    ways = (caller.json, caller.binary, caller.frame, caller.predict, caller.infer, caller.grpc, caller.resp)
    ways += (caller.tensorflow_grpc,)
    for _ in range(12):
        grow(writer)
        until(lambda: get_json(caller.port, "/v1/tables")[1]["version"] == writer.number, "the increment is served")
        expected, there = writer.expected("emb", ASKED)
        for way in ways * 2:  # the second time what was prepared answers
            values, found = way("emb", ASKED)
            assert values.astype(np.float32).tobytes() == expected.tobytes(), way.__name__
            assert found is None or found.astype(bool).tobytes() == there.tobytes(), way.__name__
        assert caller.nearest() == {str(key) for key in writer.rows["emb"]}
    listing = get_json(caller.port, "/v1/tables")[1]
    assert listing["follow"]["sequence"] == 13 and listing["follow"]["refused"] == {}
    assert {table["name"]: table["rows"] for table in listing["tables"]}["emb"] == len(writer.rows["emb"])
    assert "Traceback" not in server.stderr()


class Mixed(threading.Thread):
    """Asks two tables in one request until told to stop; both must be of the version that the answer says."""

    def __init__(self, port: int, stop: threading.Event) -> None:
        super().__init__()
        self._port, self._stop_asking = port, stop
        self.failures: list[Any] = []
        self.seen: list[int] = []

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        keys = np.arange(64)
        body = encode_request([TableKeys("emb", keys), TableKeys("also", keys)])
        headers = {"Content-Type": MEDIA_TYPE, "Accept": MEDIA_TYPE}
        while not self._stop_asking.is_set():
            try:
                connection.request("POST", "/v1/tables:lookup", body, headers)
                answer = connection.getresponse()
                data = answer.read()
                if answer.status != 200:
                    raise OSError(f"{answer.status} {data[:200]!r}")
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(error)
                return
            rows = decode_answer(data)[0]
            version = int(answer.headers["X-Embedding-Version"])
            for table in rows:
                expected = (np.arange(table.embeddings.shape[1]) + version + (keys[:, None] % 1000) / 7).astype(
                    np.float32
                )
                if table.embeddings.tobytes() != expected.tobytes():
                    self.failures.append(("rows of another version than", version, table.embeddings[0]))
            if not self.seen or self.seen[-1] != version:
                self.seen.append(version)
        connection.close()


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
def test_no_request_mixes_versions_and_a_killed_server_goes_on(
    serve: Callable[..., Any], tmp_path: Path, workers: int
) -> None:
    writer = ChainWriter(tmp_path / "run", {"emb": 3, "also": 2})

    def all_rows() -> None:
        for table in writer.dims:
            writer.put(table, range(64), writer.number + 1)

    all_rows()
    writer.full()
    for killed in range(3):
        server = serve("--follow", writer.folder, "--json", "--workers", workers, "--poll", "0.05")
        port = int(json.loads(server.line)["url"].rpartition(":")[2])
        stop = threading.Event()
        askers = [Mixed(port, stop) for _ in range(3)]
        for asker in askers:
            asker.start()
        try:
            for number in range(6):
                all_rows()
                if number == 3:
                    writer.put("emb", [1000 + killed], 1)
                    writer.remove("emb", [999 + killed])
                writer.increment()
                if number == 4:
                    writer.full(beside=True)
                until(
                    lambda askers=askers: all(asker.failures or asker.seen[-1:] == [writer.number] for asker in askers),
                    f"{writer.number} on every connection",
                )
        finally:
            stop.set()
            for asker in askers:
                asker.join()
        assert not [asker.failures for asker in askers if asker.failures]
        assert all(asker.seen == sorted(asker.seen) for asker in askers)
        server.process.send_signal(signal.SIGKILL)
        server.process.wait()
        all_rows()
        writer.increment()  # while nobody serves


@pytest.mark.thorough
def test_one_that_waits_and_one_that_is_refused(serve: Callable[..., Any], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    server = serve("--follow", folder, "--wait", "--json")
    port = int(json.loads(server.line)["url"].rpartition(":")[2])
    assert get_json(port, "/readyz")[0] == 503
    aside = ChainWriter(tmp_path / "aside", {"emb": 3})
    aside.put("emb", [1], 1)
    aside.full()
    for file in sorted(aside.folder.glob("ckpt-1.*")):
        shutil.copy(file, folder / file.name)
    until(lambda: get_json(port, "/readyz")[0] == 200, "the first full is served")
    aside.put("emb", [1], 2)
    aside.increment(chain="other")
    for file in sorted(aside.folder.glob("ckpt-2.*")):
        shutil.copy(file, folder / file.name)
    until(lambda: "refused (other-chain)" in server.stderr(), "it is told")
    listing = get_json(port, "/v1/tables")[1]
    assert listing["version"] == 1 and listing["follow"]["refused"] == {"other-chain": 1}
    assert str(folder) not in listing["follow"]["trouble"]
    assert get_json(port, "/v1/tables/emb/rows/1")[1]["embedding"][0] == pytest.approx(1 + 1 / 7)
