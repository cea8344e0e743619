"""A line for each request, ids that come back, and errors that show nothing of this host."""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports

pytest.importorskip("fastapi")
from kvtools.errors import BadInputError
from kvtools.server.access_keys import AccessKey, AccessKeys
from kvtools.server.access_log import AccessLog
from kvtools.server.answer import TableCount
from kvtools.server.catalog import static_catalog
from kvtools.server.observer import Answered
from kvtools.server.settings import Settings
from kvtools.server.telemetry import Telemetry

SAMPLE = Path(__file__).parent.parent / "data" / "sample"
KEY = "a-key-that-nobody-should-see"


def ask(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, str, bytes]:
    """Return status, the request's id, and the body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.getheader("X-Request-Id", ""), answer.read()
    finally:
        connection.close()


def until(lines: Callable[[], list[Any]], count: int) -> list[Any]:
    last = time.monotonic() + 60
    while len(found := lines()) < count:
        assert time.monotonic() < last, found
        time.sleep(0.01)
    return found


def test_every_request_has_a_line_and_an_id(
    tmp_path: Path, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "access.jsonl"
    monkeypatch.setenv("KVTOOLS_SERVE_API_KEY", KEY)
    server = serve(SAMPLE, "--access-log", path)

    def lines() -> list[Any]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    key = {"Authorization": f"Bearer {KEY}"}
    lookup = "/v1/tables/ads/emb:lookup"
    assert ask(server.port, "POST", lookup, b'{"keys": [42, 99]}', X_Request_Id="job-17", **key)[:2] == (200, "job-17")
    made = ask(server.port, "POST", lookup, b'{"keys": [42]}', X_API_Key="wrong", X_Request_Id="two words")
    assert made[0] == 401 and made[1] not in ("", "two words")
    listed = ask(server.port, "GET", "/v1/tables?secret=1", **key)
    assert listed[0] == 200 and listed[1] not in ("", made[1])
    predict = b'{"signature_name": "user_emb", "inputs": {"ids": [9]}}'
    assert ask(server.port, "POST", "/v1/models/default:predict", predict, X_Request_Id="p", **key)[:2] == (200, "p")
    assert ask(server.port, "GET", "/no/such", X_Request_Id="n", **key)[:2] == (404, "n")
    assert ask(server.port, "GET", "/v1/models/none", **key)[0] == 404
    assert ask(server.port, "HEAD", "/v1/tables/ads/emb/rows/42", **key)[0] == 200
    first, second, third, fourth, fifth, sixth, seventh = until(lines, 7)
    assert first.pop("ms") >= 0 and first.pop("time").endswith("Z") and first.pop("bytes_out") > 20
    assert first == {
        "id": "job-17",
        "client": "127.0.0.1",
        "key": "environment",
        "protocol": "http",
        "api": "lookup",
        "model": "default",
        "tables": ["ads/emb"],
        "keys": 2,
        "missing": 1,
        "status": 200,
        "bytes_in": 18,
    }
    assert (second["id"], second["status"], second["code"]) == (made[1], 401, "unauthorized") and "key" not in second
    assert (third["id"], third["path"], third["status"]) == (listed[1], "/v1/tables", 200)
    assert (fourth["api"], fourth["model"], fourth["tables"]) == ("predict", "default", ["user_emb"])
    assert (fifth["status"], fifth["code"], fifth["path"]) == (404, "not_found", "/no/such")
    assert (sixth["status"], sixth["code"], sixth["path"]) == (404, "not_found", "/v1/models/none")
    assert (seventh["api"], seventh["keys"], seventh["bytes_out"]) == ("row", 1, 0)
    assert KEY not in path.read_text() and KEY not in server.stderr()

    path.rename(tmp_path / "old.jsonl")  # as logrotate does
    server.process.send_signal(signal.SIGHUP)
    last = time.monotonic() + 60
    while not path.exists():  # the file begins with the next line
        assert ask(server.port, "GET", "/v1/tables", **key)[0] == 200 and time.monotonic() < last
    assert until(lines, 1)[0]["path"] == "/v1/tables"


def test_no_error_shows_a_path_of_the_host(tmp_path: Path, serve: Callable[..., Any], write_version: Any) -> None:
    pytest.importorskip("grpc")
    grpc_port, resp_port = free_ports(2)
    folder = tmp_path / "versions"
    write_version(folder, 1)
    (folder / "2.kvsnap").write_bytes((folder / "1.kvsnap").read_bytes()[:-5000])
    server = serve(folder, "--poll", "0.05", "--grpc-port", grpc_port, "--resp-port", resp_port)
    last = time.monotonic() + 60
    while b"damaged" not in ask(server.port, "GET", "/v1/models/default")[2]:  # version 2 is told of by then
        assert time.monotonic() < last
        time.sleep(0.02)

    def answers() -> list[bytes]:
        lookup, predict, infer = "/v1/tables/emb:lookup", "/v1/models/default:predict", "/v2/models/emb/infer"
        inputs = {"inputs": [{"name": "ids", "datatype": "INT64", "shape": [1], "data": [1]}]}
        requests: list[tuple[str, str, bytes]] = [
            ("POST", lookup, b"{"),
            ("POST", lookup, b'{"keys": [1]}'),
            ("POST", lookup, b'{"keys": [1.5]}'),
            ("POST", lookup, b'{"keys": [1], "missing": "default"}'),
            ("POST", "/v1/tables/no:lookup", b'{"keys": [1]}'),
            ("POST", "/v1/tables:lookup", b'{"tables": {"emb": {"keys": [1]}, "no": {"keys": [1]}}}'),
            ("GET", "/v1/tables", b""),
            ("GET", "/v1/tables/emb/rows/1", b""),
            ("GET", "/v1/tables/emb/rows/9999", b""),
            ("GET", "/no/such", b""),
            ("DELETE", "/v1/tables", b""),
            ("GET", "/readyz", b""),
            ("GET", "/warmz", b""),
            ("GET", "/metrics", b""),
            ("POST", "/admin/look", b""),
            ("GET", "/v1/models/default", b""),
            ("GET", "/v1/models/default/metadata", b""),
            ("GET", "/v1/models/default/versions/2", b""),
            ("GET", "/v1/models/no", b""),
            ("POST", predict, b'{"instances": [1]}'),
            ("POST", predict, b'{"instances": ["x"]}'),
            ("POST", "/v1/models/default/versions/2:predict", b'{"instances": [1]}'),
            ("GET", "/v2/models/emb", b""),
            ("POST", infer, json.dumps(inputs).encode()),
            ("POST", infer, b"{}"),
            ("GET", "/v2/models/no", b""),
        ]
        found = [ask(server.port, *request)[2] for request in requests]
        with socket.create_connection(("127.0.0.1", server.port), 30) as raw:
            raw.sendall(b"NO HTTP\r\n\r\n")
            found.append(raw.recv(4096))
        with socket.create_connection(("127.0.0.1", resp_port), 30) as raw:
            for command in (b"GET emb:1", b"GET no:1", b"GET emb:x", b"INFO", b"FLUSHALL", b"MGET emb:1 no:2"):
                raw.sendall(command + b"\r\n")
                found.append(raw.recv(4096))
        import grpc

        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            for method, request in (
                ("/tensorflow.serving.PredictionService/Predict", b"\x0a\x09\x0a\x07default"),
                ("/tensorflow.serving.ModelService/GetModelStatus", b"\x0a\x09\x0a\x07default"),
                ("/tensorflow.serving.ModelService/HandleReloadConfigRequest", b""),
                ("/inference.GRPCInferenceService/ModelInfer", b"\x0a\x03emb"),
                ("/inference.GRPCInferenceService/ModelInfer", b"\xff"),
            ):
                try:
                    found.append(channel.unary_unary(method)(request, timeout=30))
                except grpc.RpcError as error:
                    found.append(str(error.details()).encode())
        return found

    before = answers()
    os.truncate(folder / "1.kvsnap", 4096)  # no lookup can be answered from here on
    after = answers()
    # A lookup finds it, or the server's own look at its folder does before.
    assert any(b"file_changed" in answer or b"has no version that can be served" in answer for answer in after)
    for answer in before + after:
        for name in (tmp_path.name, "site-packages", "Traceback"):
            assert name.encode() not in answer, answer


def test_a_log_that_cannot_be_opened_is_an_error_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"opening the access log .*No such file"):
        AccessLog(str(tmp_path / "absent" / "access.jsonl"))


def test_a_full_disk_loses_lines_and_no_answers(caplog: pytest.LogCaptureFixture) -> None:
    log = AccessLog("/dev/full")
    answered = Answered("lookup", 200, "", (TableCount("t", 1, 0),), 0.1, 1, 1, None, {}, True)
    for _ in range(3):
        log.add(answered)
    log.close()
    assert log.dropped == 3
    assert caplog.text.count("the access log '/dev/full' cannot be written: No space left") == 1


def test_lines_go_on_after_one_that_cannot_be_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(AccessKeys):
        def find(self, headers: Any) -> Any:
            raise RuntimeError("a fault of ours")

    keys = [AccessKey("ranker", hashlib.sha256(KEY.encode()).digest())]
    log = AccessLog(str(tmp_path / "log"))
    answered = Answered("lookup", 200, "", (TableCount("t", 1, 0),), 0.1, 1, 1, None, {"x-api-key": KEY}, True)
    log.add(answered, Faulty(keys))
    until(lambda: [1] * log.dropped, 1)
    log.add(answered, AccessKeys(keys))
    log.close()
    assert json.loads((tmp_path / "log").read_text())["key"] == "ranker"
    assert "a fault of ours" in caplog.text and "1 lines of the access log were left out" in caplog.text


def test_a_line_has_the_name_that_the_key_had_when_it_was_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, path = tmp_path / "keys.toml", tmp_path / "log"
    entry = '[[key]]\nname = "{}"\nkey = "{}"\n'
    file.write_text(entry.format("ranker", KEY))
    written = threading.Event()
    plain = AccessLog._write
    monkeypatch.setattr(AccessLog, "_write", lambda self, lines: written.wait(60) and plain(self, lines))
    telemetry = Telemetry(static_catalog(SAMPLE), Settings(api_keys=file, access_log=str(path)))
    answered = Answered("lookup", 200, "", (TableCount("t", 1, 0),), 0.1, 1, 1, None, {"x-api-key": KEY}, True)
    telemetry.on_answer(answered)  # its line holds up the others
    telemetry.on_answer(answered)
    file.write_text(entry.format("another", KEY[::-1]))
    telemetry.reload()
    telemetry.on_answer(answered)
    written.set()
    telemetry.close()
    assert [json.loads(line).get("key") for line in path.read_text().splitlines()] == ["ranker", "ranker", None]


def test_lines_go_on_whole_when_there_is_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = AccessLog(str(tmp_path / "log"))
    answered = Answered("lookup", 200, "", (TableCount("t", 1, 0),), 0.1, 1, 1, None, {}, True)
    lines = [log._line(1.0, answered, None) for _ in range(3)]
    write = os.write
    room = [len(lines[0]) + 10]

    def little(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(fd, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(os, "write", little)
    log._write(b"".join(lines))
    log._write(b"".join(lines))
    room[0] = 1 << 20
    log._write(lines[0])
    room[0] = 10
    log._write(lines[1])
    (tmp_path / "log").rename(tmp_path / "old")
    log._open_again()
    room[0] = 1 << 20
    log._write(lines[2])
    monkeypatch.undo()
    log.close()
    assert (tmp_path / "log").read_bytes() == lines[2], "nothing is cut in the new file"
    kept = (tmp_path / "old").read_bytes().splitlines(keepends=True)
    assert kept == [lines[0], lines[0][:10] + b"\n", lines[0], lines[1][:10]], "the one that was cut stands alone"
    assert log.dropped == 6
    assert "the access log is written again" in caplog.text
