"""What happens to those who ask while something goes wrong: a worker killed, the end, files cut, a disk full."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from requests_to_port import get_json, refuses
from version_files import DIM, expected_rows, write_checkpoint, write_snapshot

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
OCTETS = "application/octet-stream"
LOOKUP = "/v1/tables/emb:lookup"
PREDICT = "/tensorflow.serving.PredictionService/Predict"


def until(condition: Callable[[], bool], what: str) -> None:
    last = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < last, f"never: {what}"
        time.sleep(0.01)


def children(pid: int) -> set[int]:
    return {int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


class Client(threading.Thread):
    """Asks for rows until told to stop; over one connection, or a new one each time. Breaks are counted, not fatal."""

    def __init__(self, port: int, *, keep: bool = True, until_broken: bool = False) -> None:
        super().__init__(daemon=True)
        self._port, self._keep, self._until_broken = port, keep, until_broken
        self.going = True
        self.answers = 0
        self.breaks = 0
        self.refused = 0
        self.statuses: dict[int, int] = {}
        self.wrong: list[Any] = []

    def run(self) -> None:
        rng = np.random.default_rng(0)
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        while self.going:
            keys = rng.integers(0, 200, 100)
            try:
                connection.request("POST", LOOKUP, keys.astype("<i8").tobytes(), {"Content-Type": OCTETS})
                answer = connection.getresponse()
                body = answer.read()
            except ConnectionRefusedError:
                self.refused += 1
                if self._until_broken:
                    return
                time.sleep(0.01)
                continue
            except (ConnectionError, http.client.RemoteDisconnected):
                self.breaks += 1
                connection.close()
                if self._until_broken:
                    return
                continue
            except (OSError, http.client.HTTPException) as error:
                self.wrong.append(error)  # half an answer, or none in a minute
                return
            self.answers += 1
            self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
            if answer.status == 200:
                document = json.loads(body)
                version = int(document["embeddings"][0][0]) // 1000
                if not np.array_equal(np.float32(document["embeddings"]), expected_rows(version, keys)):
                    self.wrong.append((version, document))
            elif json.loads(body)["error"]["message"].startswith("/"):
                self.wrong.append(body)
            if not self._keep:
                connection.close()
        connection.close()

    def answered(self, more: int = 20) -> Callable[[], bool]:
        """A condition: so many more answers have come."""
        goal = self.answers + more
        return lambda: self.answers >= goal or bool(self.wrong)


@pytest.mark.thorough
def test_a_worker_killed_under_load_breaks_what_it_had_in_hand_and_nothing_else(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    write_snapshot(tmp_path / "m", 1)
    server = serve(tmp_path / "m", "--workers", "2")
    clients = [Client(server.port, keep=number % 2 == 0) for number in range(6)]
    for client in clients:
        client.start()
    for client in clients:
        until(client.answered(), "answers")
    before = children(server.process.pid)
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    for client in clients:
        until(client.answered(), "answers of the other worker, and of the new one")
    until(lambda: len(children(server.process.pid) - {victim}) == 2, "a new worker")
    for client in clients:
        until(client.answered(), "answers after that")
        client.going = False
    for client in clients:
        client.join()
        assert not client.wrong and not client.refused
        assert client.breaks <= 1, "one connection was broken at most"
        assert client.statuses.keys() == {200}
    assert "ended by SIGKILL" in server.stderr() and "Traceback" not in server.stderr()


@pytest.mark.thorough
@pytest.mark.parametrize("workers", [1, 2])
def test_the_end_in_mid_load(serve: Callable[..., Any], tmp_path: Path, workers: int) -> None:
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("grpc_health")
    from kvtools.server.protos import message

    write_snapshot(tmp_path / "m", 1)
    server = serve(tmp_path / "m", "--workers", workers, "--grpc-port", "0", "--json", "--grace", "60")
    clients = [Client(server.port, keep=number % 2 == 0, until_broken=True) for number in range(4)]
    channel = grpc.insecure_channel(f"127.0.0.1:{json.loads(server.line)['grpc_port']}")
    keys = np.arange(100)
    tensor = {"dtype": 9, "tensor_shape": {"dim": [{"size": 100}]}, "tensor_content": keys.astype("<i8").tobytes()}
    request = message("tensorflow.serving.PredictRequest")(
        model_spec={"name": "default", "signature_name": "emb"}, inputs={"ids": tensor}
    ).SerializeToString()
    codes: list[Any] = []

    def predict() -> None:
        while True:
            try:
                answer = channel.unary_unary(PREDICT)(request, timeout=60)
            except grpc.RpcError as error:
                codes.append(error.code())
                return
            rows = message("tensorflow.serving.PredictResponse").FromString(answer).outputs["embeddings"]
            if rows.tensor_content != expected_rows(1, keys).tobytes():
                codes.append("wrong rows")
                return

    predicting = threading.Thread(target=predict, daemon=True)
    predicting.start()
    watched = iter(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=60))
    next(watched)
    idle = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    asked = json.dumps({"keys": list(range(200)) * 250}).encode()
    long = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    long.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
    long.sendall(b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (LOOKUP.encode(), len(asked)) + asked)
    received = long.recv(100)
    for client in clients:
        client.start()
    for client in clients:
        until(client.answered(), "answers")
    server.process.send_signal(signal.SIGTERM)
    assert idle.recv(100) == b"", "who has asked nothing is let go at once"
    predicting.join(60)
    # One that comes in this very moment is not begun: another server may be asked.
    assert [code.name for code in codes] in (["UNAVAILABLE"], ["CANCELLED"])
    assert list(watched) == [b"\x08\x02"], "who watches the health is told"
    assert server.process.poll() is None, "an answer is still being read"
    while chunk := long.recv(1 << 20):
        received += chunk
    assert received.startswith(b"HTTP/1.1 200") and received.count(b"[") == 50_002, "to its end"
    assert server.process.wait(60) == 0
    for client in clients:
        client.join(60)
        assert not client.wrong and client.statuses.keys() == {200}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=60)
    assert "Traceback" not in server.stderr()
    channel.close()
    idle.close()
    long.close()


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal(serve: Callable[..., Any], tmp_path: Path, workers: int, number: signal.Signals) -> None:
    write_snapshot(tmp_path / "m", 1)
    server = serve(tmp_path / "m", "--workers", workers, "--grace", "600")
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as half:
        half.sendall(b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{" % LOOKUP.encode())
        assert get_json(server.port, "/livez")[0] == 200
        before = children(server.process.pid)
        server.process.send_signal(number)

        until(lambda: refuses(server.port), "it does not accept")
        status = None
        while status is None:  # one that comes soon after the first is the same one
            server.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = server.process.wait(0.1)
        assert status in (-number, 128 + number)
        until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in before), "the workers are gone")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_signal_that_is_sent_twice_is_one(serve: Callable[..., Any], tmp_path: Path, workers: int) -> None:
    write_snapshot(tmp_path / "m", 1)
    server = serve(tmp_path / "m", "--workers", workers, "--grace", "600")
    body = b'{"keys": [1]}'
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as half:
        half.sendall(b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n{" % (LOOKUP.encode(), len(body)))
        assert get_json(server.port, "/livez")[0] == 200
        for _ in range(10):  # as `timeout` does: to the process, and to its group
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.002)
        until(lambda: refuses(server.port), "it does not accept")
        half.sendall(body[1:])
        assert half.recv(1000).startswith(b"HTTP/1.1 200")
    assert server.process.wait(60) == 0


def test_a_signal_to_all_processes_at_once_loses_no_request(serve: Callable[..., Any], tmp_path: Path) -> None:
    write_snapshot(tmp_path / "m", 1)
    server = serve(tmp_path / "m", "--workers", 2)
    body = b'{"keys": [1]}'
    half, *idle = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(9)]
    half.sendall(b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n{" % (LOOKUP.encode(), len(body)))
    for connection in idle:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: a\r\n\r\n")
        while not connection.recv(1000).endswith(b"}"):
            pass
    workers = children(server.process.pid)
    server.process.send_signal(signal.SIGTERM)
    for connection in idle:
        assert connection.recv(1000) == b"", "both workers have heard of it"
        connection.close()
    for worker in workers:  # as systemd and `kill -- -GROUP` do
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGTERM)
    time.sleep(0.1)
    half.sendall(body[1:])
    assert half.recv(1000).startswith(b"HTTP/1.1 200")
    half.close()
    assert server.process.wait(60) == 0


def test_a_served_file_that_is_cut_gives_errors_and_never_wrong_rows(serve: Callable[..., Any], tmp_path: Path) -> None:
    write_snapshot(tmp_path / "m", 1)
    served = write_snapshot(tmp_path / "m", 2)
    server = serve(tmp_path / "m", "--versions", "all")  # no --poll: the first lookup that notices has it look
    client = Client(server.port)
    client.start()
    until(client.answered(), "answers")
    with served.open("r+b") as file:
        file.truncate(4096)
    until(lambda: any(status != 200 for status in client.statuses) or bool(client.wrong), "an error")
    until(lambda: get_json(server.port, "/v1/tables")[1].get("version") == 1, "the version before takes its place")
    until(client.answered(), "answers")
    client.going = False
    client.join()
    assert not client.wrong and not client.breaks and client.statuses.keys() == {200, 503}
    assert server.process.poll() is None and "Traceback" not in server.stderr()


def test_the_only_file_is_cut_and_written_again(serve: Callable[..., Any], tmp_path: Path) -> None:
    """No --poll and no SIGHUP: every protocol says that it is unavailable, and answers again by itself."""
    grpc = pytest.importorskip("grpc")
    pytest.importorskip("grpc_health")
    from kvtools.server.protos import message

    served = write_snapshot(tmp_path, 2)
    server = serve(served, "--grpc-port", "0", "--resp-port", "0", "--json")
    told = json.loads(server.line)
    client = Client(server.port)
    client.start()
    until(client.answered(), "answers")
    with served.open("r+b") as file:
        file.truncate(4096)
    until(lambda: get_json(server.port, "/readyz")[0] == 503, "it is not ready")
    until(lambda: client.statuses.get(503, 0) > 0 or bool(client.wrong), "an error")
    asked = message("tensorflow.serving.PredictRequest")(
        model_spec={"name": "default", "signature_name": "emb"},
        inputs={"ids": {"dtype": 9, "tensor_shape": {"dim": [{"size": 1}]}, "int64_val": [150]}},
    ).SerializeToString()
    with grpc.insecure_channel(f"127.0.0.1:{told['grpc_port']}") as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(PREDICT)(asked, timeout=60)
    assert caught.value.code().name in ("UNAVAILABLE", "NOT_FOUND") and str(tmp_path) not in caught.value.details()
    with socket.create_connection(("127.0.0.1", told["resp_port"]), timeout=60) as redis:
        redis.sendall(b"GET emb:150\r\n")
        assert redis.recv(1000).startswith(b"-ERR")
    until(
        lambda: get_json(server.port, "/readyz")[1]["error"]["message"].startswith("model 'default' has no version"),
        "cut",
    )
    write_snapshot(tmp_path, 2, says=7)
    until(lambda: get_json(server.port, "/readyz")[0] == 200, "it is loaded anew")
    before = client.statuses[200]
    until(lambda: client.statuses[200] > before or bool(client.wrong), "answers")
    client.going = False
    client.join()
    assert not client.wrong and not client.breaks and client.statuses.keys() == {200, 503}
    assert server.stderr().count("was cut or written over since it was opened") <= 2, "not one line for each request"
    assert server.process.poll() is None and "Traceback" not in server.stderr()


def test_a_disk_that_is_full_keeps_what_is_served_and_is_tried_again(serve: Callable[..., Any], tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk's."""
    write_checkpoint(tmp_path / "m", 1)
    log = tmp_path / "access.jsonl"
    server = serve(tmp_path / "m", "--poll", "0.05", "--access-log", log)
    limits = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (4096, limits[1]))
    made = set((tmp_path / "cache").iterdir())
    write_checkpoint(tmp_path / "m", 2)
    client = Client(server.port)
    client.start()

    def state() -> dict[str, Any]:
        statuses = get_json(server.port, "/v1/models/default")[1]["model_version_status"]
        return next((each for each in statuses if each["version"] == "2"), {"status": {}})

    told: list[dict[str, Any]] = []  # the last is read once: between two tries, nothing is wrong

    def has_failed() -> bool:
        told.append(state()["status"])
        return bool(told[-1].get("error_code") == "UNAVAILABLE")

    until(has_failed, "it says that there is no space")
    message = told[-1]["error_message"]
    assert "File too large" in message and "make room" in message and str(tmp_path) not in message
    assert str(tmp_path / "cache") in server.stderr(), "the log has the path"
    # Between two tries, that is: each makes a file that it takes away again.
    until(
        lambda: {path for path in (tmp_path / "cache").iterdir() if path.suffix != ".lock"} <= made, "nothing half made"
    )
    until(lambda: log.stat().st_size == 4096, "no line fits any more")
    until(client.answered(), "answers go on")
    resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, limits)
    until(lambda: state().get("state") == "AVAILABLE", "there is room again")
    until(lambda: log.stat().st_size > 4096, "lines are written again")
    client.going = False
    client.join()
    assert not client.wrong and not client.breaks and client.statuses.keys() == {200}
    server.process.terminate()
    assert server.process.wait(60) == 0
    said = server.stderr()
    assert f"the access log '{log}' cannot be written: File too large" in said
    assert "lines of the access log were left out" in said and "Traceback" not in said
    wrong = []
    for line in log.read_text().splitlines():
        try:
            json.loads(line)
        except ValueError:
            wrong.append(line)
    assert len(wrong) <= 1, "only the line that was cut is no JSON"


def anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


@pytest.mark.thorough
def test_ten_thousand_requests_of_the_largest_kind_take_no_memory(serve: Callable[..., Any], tmp_path: Path) -> None:
    write_snapshot(tmp_path / "m", 1)
    server = serve(tmp_path / "m")
    keys = np.arange(65_536) % 250
    bodies = (
        (keys.astype("<i8").tobytes(), {"Content-Type": OCTETS, "Accept": OCTETS}, 65_536 * DIM * 4, 10_000),
        (json.dumps({"keys": keys.tolist()}).encode(), {}, 0, 200),
    )
    for body, headers, length, count in bodies:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)

        def ask(body: bytes = body, headers: Any = headers, length: int = length, to: Any = connection) -> None:
            to.request("POST", LOOKUP, body, headers)
            answer = to.getresponse()
            got = len(answer.read())
            assert answer.status == 200 and length in (0, got)

        for _ in range(count // 20):
            ask()
        before = anonymous_bytes(server.process.pid)
        for _ in range(count):
            ask()
        grown = anonymous_bytes(server.process.pid) - before
        print(f"{count} requests of {len(body)} bytes: {before / 1e6:.1f} MB, and {grown / 1e6:+.1f} MB")
        assert grown < 8 << 20
        connection.close()
