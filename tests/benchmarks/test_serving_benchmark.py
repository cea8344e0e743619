"""The benchmark of the lookup server, on tables so small that nothing it measures means anything."""

import doctest
import json
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


def result_of(run):
    (path,) = run.glob("*.json")
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """What a whole run of serve.py on a small table wrote."""
    for package in ("uvicorn", "uvloop", "httptools"):
        pytest.importorskip(package)
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler for the load generator")
    folder = tmp_path_factory.mktemp("serve")
    command = [sys.executable, str(ROOT / "benchmarks" / "serve.py"), "--tables", "3000x4", "--keys", "1", "200"]
    command += ["--seconds", "0.03", "--rounds", "1", "--connections", "1", "2", "--folder", str(folder)]
    command += ["--only", "load", "redis-benchmark", "open", "split", "python", "process"]
    done = subprocess.run([*command, "--output", str(folder / "results")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "results", done.stderr


@pytest.mark.thorough
def test_every_protocol_of_the_server_is_measured(served):
    result = result_of(served[0])
    (table,) = result["tables"]
    seen = {(one["part"], one["side"], one["keys"], one["connections"]) for one in table["figures"]}
    for side in ("HTTP, binary", "HTTP, JSON", "HTTP, frame", "TF Serving REST, rows", "KServe v2 REST, binary"):
        assert {("load", side, keys, connections) for keys in (1, 200) for connections in (1, 2)} <= seen
    for side in ("kvtools.client", "TF Serving REST, columns, http.client"):
        assert ("python", side, 200, 2) in seen
    assert ("process", "native multi-get", 200, 1) in seen
    assert all(one["keys_per_second"] > 0 and one["p99"] >= one["p50"] > 0 for one in table["figures"])
    assert {(one["side"], one["keys"], one["arrivals"]) for one in table["open"]} >= {
        ("HTTP, binary", 1, "even"),
        ("RESP, MGET", 1, "poisson"),
    }
    assert [one["keys"] for one in table["split"] if one["side"] == "HTTP, binary"] == [0, 1, 200]


@pytest.mark.thorough
def test_lookups_stand_beside_redis(served):
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    (table,) = result_of(served[0])["tables"]
    for one in table["figures"]:
        assert one["part"] == "process" or (one["ratio"] > 0 and one["cpu_ratio"] > 0), one
    page = next(served[0].glob("*-serve.md")).read_text()
    assert "HTTP, binary / Redis MGET, keys/s | 1 key, 2 connections" in page
    assert "HTTP, binary, p99 / p50 | 1 key, 70% load" in page


@pytest.mark.thorough
def test_the_page_of_the_server_has_tables_that_fit(served):
    page = next(served[0].glob("*-serve.md")).read_text()
    for heading in ("1 key a request", "200 keys a request", "At 70% load", "Where the time goes"):
        assert f"\n### {heading}" in page
    for block in page.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.strip().splitlines()}) == 1, block


@pytest.mark.parametrize("name", ["serving.page", "serving.time_split"])
def test_figures_of_the_server_are_read_right(module, name):
    assert doctest.testmod(module(name)).failed == 0


def test_goals_of_the_server_are_judged_both_ways(module):
    page = module("serving.page")
    load = {"part": "load", "keys": 100, "connections": 8, "cpu": 1e-5, "p50": 1.0, "p99": 2.0}
    figures = [
        load | {"side": "Redis MGET", "keys_per_second": 10.0},
        load | {"side": "HTTP, binary", "keys_per_second": 50.0},
        load | {"side": "RESP, MGET", "keys_per_second": 30.0},
    ]
    page.add_ratios(figures)
    tails = [{"side": "HTTP, binary", "keys": 1, "arrivals": "even", "tail": tail} for tail in (2.9, 3.1)]
    judged = page.goals({"figures": figures, "open": tails})
    assert [(one["value"], one["reached"]) for one in judged] == [(5.0, True), (3.0, False), (2.9, True), (3.1, False)]


@pytest.fixture(scope="module")
def load_generator(tmp_path_factory):
    """load.cc, compiled; it takes the arguments of the program and returns what it prints."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    program = tmp_path_factory.mktemp("load") / "load"
    source = ROOT / "benchmarks" / "serving" / "load.cc"
    subprocess.run([compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(source)], check=True)

    def run(*arguments):
        return subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True)

    return run


class Answering:
    """A port that answers each request, which ends in a line feed, with the next of some bytes."""

    def __init__(self, answers):
        self.answers = answers
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        connection, _ = self.listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, connection.makefile("rb") as lines:
            try:
                for number, _ in enumerate(lines):
                    for piece in self.answers[number % len(self.answers)]:
                        connection.sendall(piece)
            except ConnectionError:
                pass


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab\n\r\n"
ANSWERS = {
    "http": [[b"HTTP/1.1 200 OK\r\nContent-", b"Length: 3\r\n\r\na", b"\nc"], [CHUNKED, b"1\r\n\n\r\n0\r\n", b"\r\n"]],
    "resp": [[b"*2\r\n$3\r\na\n", b"c\r\n$-1\r\n"], [b"*2\r\n$0\r\n\r\n:", b"7\r\n"]],
}


@pytest.mark.parametrize("protocol", ["http", "resp"])
@pytest.mark.parametrize("rate", [(), (500, "even"), (500, "poisson")])
def test_the_load_generator_knows_where_answers_end(load_generator, tmp_path, protocol, rate):
    (tmp_path / "requests").write_bytes(b"2\n2 1\n3 1\na\nbb\n")
    server = Answering(ANSWERS[protocol])
    done = load_generator(server.port, tmp_path / "requests", protocol, 1, 0.05, *rate)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["requests"] >= 2 and told["unanswered"] == 0 and 0 < told["p50"] <= told["p99"] <= told["max"]


@pytest.mark.parametrize(
    "protocol, answer", [("http", b"HTTP/1.1 429 Too Many Requests\r\n\r\n"), ("resp", b"-ERR no\r\n")]
)
def test_the_load_generator_takes_no_refusal_for_an_answer(load_generator, tmp_path, protocol, answer):
    (tmp_path / "requests").write_bytes(b"1\n2 1\na\n")
    done = load_generator(Answering([[answer]]).port, tmp_path / "requests", protocol, 1, 0.05)
    assert done.returncode == 1 and answer.decode().split("\r")[0] in done.stderr


def test_a_request_that_waits_for_a_slow_answer_has_begun_when_it_was_due(load_generator, tmp_path):
    """One connection, requests due each ms, answers after 20 ms: without what was due, all would take 20 ms."""
    (tmp_path / "requests").write_bytes(b"1\n2 1\na\n")

    class Slow(Answering):
        def run(self):
            connection, _ = self.listener.accept()
            with connection, connection.makefile("rb") as lines:
                for _ in lines:
                    threading.Event().wait(0.02)
                    try:
                        connection.sendall(b"+OK\r\n")
                    except ConnectionError:
                        return

    done = load_generator(Slow([]).port, tmp_path / "requests", "resp", 1, 0.05, 200, "even")
    told = json.loads(done.stdout)
    assert told["max"] > 0.1 and told["longest_wait"] > 0.1


def test_rows_come_out_of_every_form_as_they_went_in(module):
    forms = module("serving.forms")
    rows = np.float32([[1, -2.5], [3, 0]])
    strings = b"".join(b"$8\r\n%b\r\n" % row.tobytes() for row in rows)
    assert np.array_equal(forms.REDIS_MGET.rows(b"*2\r\n" + strings, 2), rows)
    assert np.array_equal(forms.REDIS_GETS.rows(strings, 2), rows)
    head = b'{"outputs":[{"name":"embeddings","parameters":{"binary_data_size":16}}]}'
    assert np.array_equal(forms.INFER.rows(head + rows.tobytes(), 2), rows)
    body = forms.INFER.body(np.arange(3))
    assert body[int(forms.INFER.all_headers(body)[forms.INFER_HEADER]) :] == np.arange(3).tobytes()
