"""Clients in Python, from a NumPy array of keys to a NumPy array of rows; a process of its own runs them.

python -m serving.python_clients TASK.json     prints a line of JSON for each figure, and one for each client left out
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from serving.forms import PREDICT_COLUMNS, PREDICT_ROWS, Form
from serving.servers import Ports, cpu_seconds
from serving.tables import NAME, redis_key

Ask = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Task:
    """What is to be measured. `servers` are process and ports, kvtools' first, then that of Redis or None."""

    servers: list[tuple[int, dict[str, int | None]] | None]
    dim: int
    keys: dict[str, str]
    values: str
    connections: list[int]
    seconds: float


@dataclass(frozen=True)
class PythonClient:
    """`connect` opens a connection. `server` 0: kvtools, 1: Redis."""

    name: str
    needs: tuple[str, ...]
    connect: Callable[[Ports, int], Ask]
    server: int = 0


def _kvtools(ports: Ports, _: int) -> Ask:
    from kvtools.client import Client

    client = Client(f"http://127.0.0.1:{ports.http}")
    return lambda keys: client.lookup(NAME, keys)[0]


def _rest(form: Form) -> Callable[[Ports, int], Ask]:
    def connect(ports: Ports, dim: int) -> Ask:
        connection = http.client.HTTPConnection("127.0.0.1", ports.http)

        def ask(keys: np.ndarray) -> np.ndarray:
            body = form.body(keys)
            connection.request("POST", form.path, body, form.all_headers(body))
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            return form.rows(answer.read(), dim)

        return ask

    return connect


def _predict(ports: Ports, _: int) -> Ask:
    import grpc
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    stub = prediction_service_pb2_grpc.PredictionServiceStub(
        grpc.insecure_channel(f"127.0.0.1:{ports.grpc}", options=options)
    )

    def ask(keys: np.ndarray) -> np.ndarray:
        request = predict_pb2.PredictRequest()
        request.model_spec.name = "default"
        request.model_spec.signature_name = NAME
        request.inputs["ids"].CopyFrom(tf.make_tensor_proto(keys))
        rows: np.ndarray = tf.make_ndarray(stub.Predict(request, timeout=60).outputs["embeddings"])
        return rows

    return ask


def _triton(kind: str) -> Callable[[Ports, int], Ask]:
    def connect(ports: Ports, _: int) -> Ask:
        library: Any = importlib.import_module(f"tritonclient.{kind}")
        client = library.InferenceServerClient(f"127.0.0.1:{ports.grpc if kind == 'grpc' else ports.http}")

        def ask(keys: np.ndarray) -> np.ndarray:
            given = library.InferInput("ids", keys.shape, "INT64")
            given.set_data_from_numpy(keys)
            answer = client.infer(NAME, [given], outputs=[library.InferRequestedOutput("embeddings")])
            rows: np.ndarray = answer.as_numpy("embeddings")
            return rows

        return ask

    return connect


def _redis(how: str, port: str) -> Callable[[Ports, int], Ask]:
    def connect(ports: Ports, dim: int) -> Ask:
        import redis

        client = redis.Redis("127.0.0.1", getattr(ports, port))

        def rows(answer: list[bytes]) -> np.ndarray:
            return np.frombuffer(b"".join(answer), np.float32).reshape(-1, dim)

        def by_mget(keys: np.ndarray) -> np.ndarray:
            return rows(client.mget([redis_key(key) for key in keys.tolist()]))

        def by_pipeline(keys: np.ndarray) -> np.ndarray:
            pipeline = client.pipeline(transaction=False)
            for key in keys.tolist():
                pipeline.get(redis_key(key))
            return rows(pipeline.execute())

        return by_mget if how == "mget" else by_pipeline

    return connect


_GRPC = ("grpc", "tensorflow", "tensorflow_serving")
CLIENTS = (
    PythonClient("redis-py and hiredis, MGET: Redis", ("redis", "hiredis"), _redis("mget", "redis"), 1),
    PythonClient("redis-py and hiredis, pipeline of GETs: Redis", ("redis", "hiredis"), _redis("pipeline", "redis"), 1),
    PythonClient("redis-py and hiredis, MGET: kvtools", ("redis", "hiredis"), _redis("mget", "resp")),
    PythonClient("redis-py and hiredis, pipeline of GETs: kvtools", ("redis", "hiredis"), _redis("pipeline", "resp")),
    PythonClient("kvtools.client", (), _kvtools),
    PythonClient("TF Serving gRPC, its stubs", _GRPC, _predict),
    PythonClient("TF Serving REST, rows, http.client", (), _rest(PREDICT_ROWS)),
    PythonClient("TF Serving REST, columns, http.client", (), _rest(PREDICT_COLUMNS)),
    PythonClient("KServe v2 gRPC, tritonclient", ("grpc", "tritonclient"), _triton("grpc")),
    PythonClient("KServe v2 REST, tritonclient", ("tritonclient", "gevent"), _triton("http")),
)
REFERENCE = CLIENTS[0].name


def task(
    servers: list[Any], dim: int, keys: dict[int, Path], values: Path, connections: list[int], seconds: float
) -> str:
    """What the process is told: `keys` are .npy files int64 [requests, keys] by keys a request."""
    told = [None if server is None else (server.process, asdict(server.ports)) for server in servers]
    files = {str(size): str(path) for size, path in keys.items()}
    return json.dumps(asdict(Task(told, dim, files, str(values), connections, seconds)))


def measure(
    connect: Callable[[], Ask], connections: int, batches: np.ndarray, values: np.ndarray, seconds: float, process: int
) -> dict[str, float]:
    """Threads of one connection each, for some seconds. Each makes its own: gevent's cannot change threads."""
    walls: list[list[float]] = [[] for _ in range(connections)]
    barrier = threading.Barrier(connections + 1)
    failed: list[BaseException] = []

    def go(number: int) -> None:
        try:
            ask, times = connect(), walls[number]
            first = batches[number % len(batches)]
            if not np.array_equal(ask(first), values[first]):
                raise AssertionError("other rows than the table's")
            barrier.wait()
            last, at = time.perf_counter() + seconds, number
            while (start := time.perf_counter()) < last:
                ask(batches[at % len(batches)])
                times.append(time.perf_counter() - start)
                at += connections
        except BaseException as problem:  # whoever waits for the figure raises it
            failed.append(problem)
            barrier.abort()

    threads = [threading.Thread(target=go, args=(number,)) for number in range(connections)]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        barrier.wait()
    before, start = cpu_seconds(process), time.perf_counter()
    for thread in threads:
        thread.join()
    took, used = time.perf_counter() - start, cpu_seconds(process) - before
    if failed:
        raise next((problem for problem in failed if not isinstance(problem, threading.BrokenBarrierError)), failed[0])
    times = np.concatenate(walls)
    p50, p99 = np.percentile(times, [50, 99])
    return {
        "per_second": len(times) / took,
        "cpu": used / len(times),
        "p50": float(p50),
        "p99": float(p99),
        "requests": len(times),
    }


def main() -> None:
    """Run all clients that can be."""
    given = json.loads(Path(sys.argv[1]).read_text())
    told = Task(**given)
    values = np.load(told.values, mmap_mode="r")
    keys = {int(size): np.load(path) for size, path in told.keys.items()}
    for client in CLIENTS:
        missing = [name for name in client.needs if importlib.util.find_spec(name) is None]
        server = told.servers[client.server]
        if missing or server is None:
            why = f"no package {', '.join(missing)}" if missing else "no redis-server"
            print(json.dumps({"left_out": f"{client.name}: {why}"}), flush=True)
            continue
        process, ports = server
        connect = functools.partial(client.connect, Ports(**ports), told.dim)
        for size, batches in keys.items():
            for connections in told.connections:
                figures = measure(connect, connections, batches, values, told.seconds, process)
                print(
                    json.dumps({"side": client.name, "keys": size, "connections": connections, **figures}), flush=True
                )


if __name__ == "__main__":
    main()
