"""Frames, and lookups in the protocols of others, of a head that was seen before: the same answers as without."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_http_protocol import Running

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("httptools")

from kvtools import _snapshot
from kvtools.lookup_frame import MEDIA_TYPE, TableKeys, encode_request
from kvtools.server.app import create_app
from kvtools.server.settings import Settings
from kvtools.server.telemetry import Telemetry

SPECIAL = [[1.5, np.nan], [np.inf, -np.inf], [0.1, -0.0]]
PREDICT, INFER = "/v1/models/default:predict", "/v2/models/default/infer"
TABLES = {
    "ads/emb": ("int64", "float32", [3, -7, 2**62]),
    "big": ("uint64", "float16", [3, 2**63 + 5, 7]),
    "small": ("int32", "float32", [3, -7, 2**31 - 1]),
    "whole": ("int64", "int64", [3, 4, 5]),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("snapshot") / "all.kvsnap"
    writer = _snapshot.Writer(str(path), 1 << 20)
    for name, (key_dtype, value_dtype, keys) in TABLES.items():
        writer.begin_table(name, key_dtype=key_dtype, value_dtype=value_dtype, dim=2, rows=3)
        writer.add_keys(np.array(keys, key_dtype))
        writer.sort_keys()
        values = np.array([[1, 2], [3, 4], [5, 6]] if value_dtype == "int64" else SPECIAL)
        writer.add_rows(0, values.astype(value_dtype))
        writer.end_table()
    writer.close(json.dumps({"format": "kvtools snapshot", "tables": {}}).encode())
    return path


class Server(Running):
    """With counters; `prepares` as `kvtools serve` does it, or every request in the usual way."""

    def __init__(self, path: Path, *, prepares: bool, **settings: Any) -> None:
        chosen = Settings(**settings)
        super().__init__(chosen, usual=not prepares, path=path)
        self.lookups.catalog.version().store.populate()
        self.telemetry = Telemetry(self.lookups.catalog, chosen)
        self.lookups.observer = self.telemetry
        self.config.app = create_app(self.lookups.catalog, chosen, lookups=self.lookups)

    def answered(self) -> int:
        """How many answers were given in C++."""
        return sum(tally.counts()[0] for tally in self.telemetry._counted._tallies.values())


@pytest.fixture(scope="module")
def servers(path: Path) -> Iterator[tuple[Server, Server]]:
    limits = {"max_keys": 6, "max_values": 100}
    with Server(path, prepares=False, **limits) as usual, Server(path, prepares=True, **limits) as short:
        yield usual, short


class Client:
    """One connection that is kept."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self, request: bytes) -> bytes:
        """The response; times, and ids that are made, read as `made`."""
        self.socket.sendall(request)
        received = b""
        while b"\r\n\r\n" not in received:
            received += self.socket.recv(65536)
        head, _, body = received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        while len(body) < int(length[1]):
            body += self.socket.recv(65536)
        head = re.sub(rb"(\r\nx-request-id: )[0-9a-f]{12}-[0-9a-f]+", rb"\1made", head)
        return re.sub(rb"(\r\ndate: )[^\r]*", rb"\1made", head) + b"\r\n\r\n" + body

    def close(self) -> None:
        self.socket.close()


def post(path: str, body: bytes, **headers: str) -> bytes:
    fields = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\nHost: a\r\n{fields}Content-Length: {len(body)}\r\n\r\n".encode() + body


def compare(servers: tuple[Server, Server], requests: list[bytes]) -> list[bool]:
    """Ask all of both servers thrice; which of them were answered in C++ the last time."""
    usual, short = (Client(server.port) for server in servers)
    prepared = []
    for request in requests:
        expected = usual.ask(request)
        for _ in range(3):
            before = servers[1].answered()
            assert short.ask(request) == expected, request
        prepared.append(servers[1].answered() > before)
        assert prepared[-1] <= expected.startswith(b"HTTP/1.1 200 ")
    usual.close()
    short.close()
    return prepared


def instances(ids: Any, signature: str = "ads_emb") -> dict[str, Any]:
    return {"signature_name": signature, "instances": ids}


PREDICTS: list[tuple[Any, bool]] = [
    (instances([3]), True),
    (instances([3, 99, -7, 3]), True),
    (instances([{"ids": 3}, {"ids": 4}]), True),
    (instances([3, 3, 3, 3, 3, 3]), True),
    ({"signature_name": "ads/emb", "inputs": [3, -7]}, True),
    ({"inputs": {"ids": [3, 2**62]}, "signature_name": "ads_emb"}, True),
    (instances([3, 2**62 + 1], "big"), True),
    (instances([3, -7], "small"), True),
    *(
        ({"signature_name": "ads_emb", form: [3, 99], "output_filter": outputs}, True)
        for form in ("instances", "inputs")
        for outputs in ([], ["found"], ["embeddings"], ["found", "embeddings"])
    ),
    # What only Python answers, or refuses.
    (instances([2**63 + 5, 3], "big"), False),
    (instances([2**31], "small"), False),
    (instances([3], "whole"), False),
    (instances([[3, 4]]), False),
    (instances([]), False),
    (instances([1] * 7), False),
    (instances(["x"]), False),
    (instances([1.0]), False),
    (instances([True]), False),
    (instances([2**64]), False),
    (instances([{"ids": [3]}]), False),
    (instances([{"ids": 3, "more": 1}]), False),
    (instances([3], "none"), False),
    (instances(3), False),
    ({"instances": [3]}, False),
    ({"signature_name": "ads_emb", "inputs": []}, False),
    ({"signature_name": "ads_emb", "inputs": 3}, False),
    ({"signature_name": "ads_emb", "inputs": [3], "instances": [3]}, False),
    ({"signature_name": "ads_emb", "inputs": [3], "output_filter": ["none"]}, False),
    ({"signature_name": "ads_emb", "inputs": [3], "output_filter": ["found", "found"]}, False),
    ({"signature_name": "ads_emb", "inputs": [3], "output_filter": "found"}, False),
    ({"signature_name": 3, "inputs": [3]}, False),
    ([], False),
]


def test_predictions_are_those_of_the_usual_way(servers: tuple[Server, Server]) -> None:
    bodies = [json.dumps(document).encode() for document, _ in PREDICTS]
    bodies += [b"", b"{", b'{"instances": [3]}\x00', b'{"signature_name": "ads\\u005femb", "instances": [3]}']
    wanted = [prepared for _, prepared in PREDICTS] + [False] * 4
    assert compare(servers, [post(PREDICT, body) for body in bodies]) == wanted
    few = json.dumps(instances([3])).encode()
    versioned = "/v1/models/default/versions/{}:predict"
    paths = [versioned.format(1), versioned.format(2), versioned.format("01"), "/v1/models/no:predict"]
    paths += ["/v1/models/default/labels/no:predict", "/v1/models/default:predict?x=1"]
    assert compare(servers, [post(path, few) for path in paths]) == [True, False, True, False, False, False]


def infer(shape: list[int], data: Any = None, raw: bytes = b"", **more: Any) -> tuple[dict[str, Any], bytes]:
    given: dict[str, Any] = {"name": "ids", "shape": shape, "datatype": more.pop("datatype", "INT64")}
    given |= {"data": data} if data is not None else {"parameters": {"binary_data_size": len(raw)}}
    more["parameters"] = {"signature_name": "ads_emb", **more.pop("parameters", {})}
    return {"inputs": [given], **more}, raw


BITS = np.array([3, 99], "<i8").tobytes()
BINARY_ROWS = [{"name": "embeddings", "parameters": {"binary_data": True}}]
INFERS: list[tuple[tuple[dict[str, Any], bytes], bool]] = [
    (infer([2], [3, 99]), True),
    (infer([2], raw=BITS), True),
    (infer([2], raw=BITS, outputs=BINARY_ROWS, id="7"), True),
    (infer([1, 2], raw=BITS, outputs=[{"name": "found"}, *BINARY_ROWS]), True),
    (infer([2, 1], [-7, 3], parameters={"binary_data_output": True}), True),
    (infer([2], [-7, 3], parameters={"binary_data_output": True}, outputs=[{"name": "embeddings"}]), True),
    (infer([1], [3], parameters={"signature_name": "small"}), True),
    (infer([1], [3], outputs=[]), True),
    (infer([1], [3], id="a b/c"), True),
    # What only Python answers, or refuses.
    (infer([1], [3], id="\u00e9"), False),
    (infer([1], [3], id='"'), False),
    (infer([1], [3], id=3), False),
    (infer([1], [3], parameters={"signature_name": "whole"}), False),
    (infer([1], [3], parameters={"more": 1}), False),
    (infer([1], [2**31], parameters={"signature_name": "small"}), False),
    (infer([1], [3], datatype="UINT64", parameters={"signature_name": "big"}), False),
    (infer([1], [3], datatype="FP32"), False),
    (infer([], [3]), False),
    (infer([0], []), False),
    (infer([3], [3, 99]), False),
    (infer([2, 2], [[3, 99], [3, 99]]), False),
    (infer([7], [3] * 7), False),
    (infer([2**40], [3]), False),
    (infer([2], raw=BITS[:-1]), False),
    (infer([2], raw=BITS, outputs=BINARY_ROWS * 2), False),
    (infer([2], raw=BITS, outputs=[{"name": "none"}]), False),
    (infer([2], [3, 99], outputs=[{"name": "embeddings", "parameters": {"classification": 1}}]), False),
    (({"inputs": []}, b""), False),
    (({"inputs": infer([1], [3])[0]["inputs"]}, b""), False),
]


def test_inferences_are_those_of_the_usual_way(servers: tuple[Server, Server]) -> None:
    requests = []
    for (document, raw), _ in INFERS:
        text = json.dumps(document, ensure_ascii=False).encode()
        headers = {"Inference-Header-Content-Length": str(len(text))} if raw else {}
        requests.append(post(INFER, text + raw, **headers))
    assert compare(servers, requests) == [prepared for _, prepared in INFERS]
    text = json.dumps({"inputs": infer([1], [3])[0]["inputs"]}).encode()
    assert compare(servers, [post(f"/v2/models/{model}/infer", text) for model in ("small", "ads_emb", "no")]) == [
        True,
        True,
        False,
    ]
    odd = [post("/v2/models/small/infer", BITS, Inference_Header_Content_Length="0")]
    odd += [post(INFER, text, Inference_Header_Content_Length=length) for length in ("x", "9999", "-1")]
    assert compare(servers, odd) == [False] * 4


def frame(*tables: TableKeys, **headers: str) -> bytes:
    body = encode_request(tables)
    return post("/v1/tables:lookup", body, Content_Type=MEDIA_TYPE, Accept=MEDIA_TYPE, **headers)


def test_frames_are_those_of_the_usual_way(servers: tuple[Server, Server]) -> None:
    one, other = TableKeys("ads/emb", np.array([3, 99])), TableKeys("small", np.array([-7, 5]))
    pooled = TableKeys("ads/emb", np.array([3, 99]), "mean", np.array([0, 1, 2]))
    many = TableKeys("ads/emb", np.array([3] * 7))
    requests = [frame(one), frame(one, other), frame(one, one), frame(pooled, other), frame()]
    requests += [frame(many), frame(TableKeys("no", np.array([3]))), frame(TableKeys("small", np.array([2**31])))]
    requests += [post("/v1/tables:lookup", b"KVQ1", Content_Type=MEDIA_TYPE, Accept=MEDIA_TYPE)]
    assert compare(servers, requests) == [True] * 4 + [False] * 5


def test_ids_and_traces_do_not_take_the_usual_way(servers: tuple[Server, Server]) -> None:
    body = json.dumps(instances([3])).encode()
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    client = Client(servers[1].port)
    for _ in range(2):  # the first ones of their shape
        client.ask(post(PREDICT, body, x_request_id="a", traceparent=trace))
    before = servers[1].answered()
    for number in range(5):
        ids = [3] * (number + 1)
        request = post(
            PREDICT, json.dumps(instances(ids)).encode(), x_request_id=f"job-{number}", traceparent=trace + str(number)
        )
        assert f"\r\nx-request-id: job-{number}\r\n".encode() in client.ask(request)
    assert servers[1].answered() == before + 5
    for bad in ("two words", "a" * 129, "\u00e9"):
        request = post(PREDICT, body, x_request_id=bad, traceparent=trace)
        assert b"\r\nx-request-id: made\r\n" in client.ask(request.replace("\u00e9".encode(), b"\xe9"))
    assert servers[1].answered() == before + 5
    client.close()


def test_counts_are_those_of_the_usual_way(path: Path) -> None:
    texts = []
    names = ("kvtools_keys", "kvtools_requests_total", "kvtools_request_seconds_count", "kvtools_request_bytes")
    names += (":tensorflow:serving:request_count", ":tensorflow:serving:request_latency_count")
    for prepares in (False, True):
        with Server(path, prepares=prepares) as server:
            client = Client(server.port)
            one = TableKeys("ads/emb", np.array([3, 99]))
            for _ in range(4):
                client.ask(post(PREDICT, json.dumps(instances([3, 99, 98])).encode()))
                client.ask(
                    post("/v2/models/small/infer", json.dumps({"inputs": infer([1], [3])[0]["inputs"]}).encode())
                )
                client.ask(frame(one))
                client.ask(frame(one, TableKeys("small", np.array([3]))))
            client.close()
            assert server.answered() == (3 + 3 + 7 if prepares else 0), "all but the first of a shape"
            lines = server.telemetry.metrics().splitlines()
            texts.append([line for line in lines if line.startswith(names)])
            asked = server.telemetry.inferences()
            assert {of: counted.answers for of, counted in asked.items()} == {
                ("default", 1, "ads_emb"): 4,
                ("default", 1, "small"): 4,
            }
            assert all(counted.last > 1.7e12 and counted.answers_ns > 0 for counted in asked.values())
    assert texts[0] == texts[1] and len(texts[0]) > 10


def test_a_key_for_one_table_opens_no_other(path: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[[key]]\nname = "a"\nkey = "a-key-of-some-length"\ntables = ["ads/emb"]\n')
    with Server(path, prepares=True, api_keys=keys) as server:
        client = Client(server.port)
        mine = {"Authorization": "Bearer a-key-of-some-length"}
        for _ in range(3):
            for signature, status in (("ads_emb", b"200"), ("small", b"403")):
                body = json.dumps(instances([3], signature)).encode()
                assert client.ask(post(PREDICT, body, **mine))[9:12] == status
                assert client.ask(post(PREDICT, body))[9:12] == b"401"
            for table, status in (("ads/emb", b"200"), ("small", b"403")):
                assert client.ask(frame(TableKeys(table, np.array([3])), **mine))[9:12] == status
        client.close()
        assert server.answered() == 2 + 2


def test_a_loop_that_spins_is_called_until_nothing_was_answered_for_a_while() -> None:
    calls: list[Any] = []
    spin = _snapshot.Spin(1e6, calls.append)
    spin.turn()
    assert not calls, "nothing was answered yet"
    spin.touch()
    spin.touch()
    assert len(calls) == 1
    calls[-1]()
    assert len(calls) == 2
    short = _snapshot.Spin(0, calls.append)
    short.touch()
    calls[-1]()
    assert len(calls) == 3, "it sleeps"
    short.touch()
    assert len(calls) == 4


def test_a_bounded_loop_looks_in_vain_for_a_twentieth_of_the_time_at_most() -> None:
    calls: list[Any] = []
    spin = _snapshot.Spin(100e-6, calls.append, True)
    now = 1000.0
    for _ in range(2000):  # each comes when it has given up
        spin.touch(now)
        if calls:
            calls.clear()
            spin.turn(now + 50e-6)
            spin.turn(now + 101e-6)
            calls.clear()
        now += 400e-6
    assert spin.found == 0
    assert 0.04 * 0.8 < spin.vain < 0.06 * 0.8 + 0.01


def test_a_bounded_loop_that_finds_something_each_time_goes_on_looking() -> None:
    calls: list[Any] = []
    spin = _snapshot.Spin(60.0, calls.append, True)
    spin.touch(1000.0)
    assert not calls, "not even once for a minute"
    spin = _snapshot.Spin(100e-6, calls.append, True)
    for i in range(1000):
        now = 2000.0 + i
        spin.touch(now)
        assert len(calls) == 1
        calls.clear()
        spin.turn(now + 50e-6)
        spin.arrive(now + 90e-6)
    assert spin.found == pytest.approx(1000 * 90e-6)
    assert spin.vain == 0


@pytest.mark.parametrize("seconds", [0.001, None, 0])
def test_a_server_that_spins_answers_and_counts_how_long(path: Path, seconds: float | None) -> None:
    with Server(path, prepares=True, spin=seconds) as server:
        client = Client(server.port)
        body = json.dumps(instances([3])).encode()
        assert len({client.ask(post(PREDICT, body)) for _ in range(20)}) == 1
        client.close()
        lines = server.telemetry.metrics().splitlines()
        spent = [float(line.split()[-1]) for line in lines if line.startswith("kvtools_spin_seconds_total")]
        assert (len(spent), sum(spent) > 0) == ((0, False) if seconds == 0 else (2, True))
