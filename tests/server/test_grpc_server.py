"""The gRPC port, spoken to with bytes: what is answered, and how what is wrong is refused."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")
pytest.importorskip("grpc_health")
pytest.importorskip("grpc_reflection")
import grpc

from kvtools.errors import BadInputError, KvtoolsError, MissingDependencyError
from kvtools.server.catalog import Catalog, ServedModel, static_catalog
from kvtools.server.grpc_server import GrpcServer, start
from kvtools.server.grpc_services import one_message
from kvtools.server.observer import Observer
from kvtools.server.protos import POOL, message
from kvtools.server.settings import Settings
from kvtools.server.sources import ModelSource
from kvtools.server.version_policy import VersionPolicy

SAMPLE = Path(__file__).parent.parent / "data" / "sample"
PREDICT = "/tensorflow.serving.PredictionService/Predict"
METADATA = "/tensorflow.serving.PredictionService/GetModelMetadata"
STATUS = "/tensorflow.serving.ModelService/GetModelStatus"
RELOAD = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"
INFER = "/inference.GRPCInferenceService/ModelInfer"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
SEVEN = [2.0, 2.125, 2.25, 2.375]  # the row of key -7 in ads/emb
REQUESTS = {
    PREDICT: message("tensorflow.serving.PredictRequest"),
    METADATA: message("tensorflow.serving.GetModelMetadataRequest"),
    STATUS: message("tensorflow.serving.GetModelStatusRequest"),
    RELOAD: message("tensorflow.serving.ReloadConfigRequest"),
    INFER: message("inference.ModelInferRequest"),
}
ANSWERS = {
    PREDICT: message("tensorflow.serving.PredictResponse"),
    METADATA: message("tensorflow.serving.GetModelMetadataResponse"),
    STATUS: message("tensorflow.serving.GetModelStatusResponse"),
    RELOAD: message("tensorflow.serving.ReloadConfigResponse"),
    INFER: message("inference.ModelInferResponse"),
}


@pytest.fixture(scope="module")
def catalog() -> Catalog:
    return static_catalog(SAMPLE)


@pytest.fixture(scope="module")
def server(catalog: Catalog) -> Iterator[GrpcServer]:
    server = start(catalog, Settings(grpc_port=0, max_keys=1000, max_values=2000))
    yield server
    server.stop(0)


@pytest.fixture(scope="module")
def channel(server: GrpcServer) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel


def send(channel: Any, method: str, data: bytes) -> bytes:
    return channel.unary_unary(method)(data, timeout=30)  # type: ignore[no-any-return]


def ask(channel: Any, method: str, **fields: Any) -> Any:
    return ANSWERS[method].FromString(send(channel, method, REQUESTS[method](**fields).SerializeToString()))


def refused(channel: Any, method: str, data: bytes | None = None, **fields: Any) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        send(channel, method, REQUESTS[method](**fields).SerializeToString() if data is None else data)
    return caught.value.code().name, caught.value.details()


def model(signature: str = "ads_emb", **fields: Any) -> dict[str, Any]:
    return {"name": "default", "signature_name": signature, **fields}


def tensor(dtype: int = 9, shape: Any = (2,), **fields: Any) -> dict[str, Any]:
    return {"dtype": dtype, "tensor_shape": {"dim": [{"size": size} for size in shape]}, **fields}


def rows(tensor: Any) -> Any:
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    return np.frombuffer(tensor.tensor_content, "<f4").reshape(shape).tolist()


@pytest.mark.parametrize(
    "ids",
    [
        tensor(tensor_content=np.array([-7, 99]).tobytes()),
        tensor(int64_val=[-7, 99]),
        tensor(int64_val=[-7, 99, 5]),  # as TensorFlow: what is too much is left aside
    ],
)
def test_predict(channel: Any, ids: dict[str, Any]) -> None:
    answer = ask(channel, PREDICT, model_spec=model(), inputs={"ids": ids})
    assert rows(answer.outputs["embeddings"]) == [SEVEN, [0] * 4]
    assert sorted(answer.outputs) == ["embeddings", "found"]
    spec = answer.model_spec
    assert (spec.name, spec.signature_name, spec.version.value) == ("default", "ads_emb", 1)
    answer = ask(channel, PREDICT, model_spec=model(), inputs={"ids": ids}, output_filter=["found"])
    found = answer.outputs["found"]
    assert (found.dtype, found.tensor_content, len(answer.outputs)) == (10, b"\1\0", 1)
    answer = ask(
        channel,
        PREDICT,
        model_spec={"name": "default"},
        inputs={"ads_emb_ids": ids, "empty_emb_ids": tensor(shape=[0]), "user_emb_ids": ids},
    )
    assert rows(answer.outputs["ads_emb_embeddings"]) == [SEVEN, [0] * 4]
    assert answer.outputs["user_emb_found"].tensor_content == b"\0\0" and len(answer.outputs) == 6


def test_the_last_value_stands_for_those_that_follow_and_none_for_zeros(channel: Any) -> None:
    answer = ask(channel, PREDICT, model_spec=model(), inputs={"ids": tensor(shape=[2, 2], int64_val=[0, -7])})
    assert rows(answer.outputs["embeddings"])[1] == [SEVEN, SEVEN]
    zero = rows(
        ask(channel, PREDICT, model_spec=model(), inputs={"ids": tensor(shape=[1], int64_val=[0])}).outputs[
            "embeddings"
        ]
    )
    answer = ask(channel, PREDICT, model_spec=model(), inputs={"ids": tensor(shape=[3])})
    assert rows(answer.outputs["embeddings"]) == zero * 3
    answer = ask(channel, PREDICT, model_spec=model(), inputs={"ids": tensor(shape=[], int64_val=[-7])})
    assert rows(answer.outputs["embeddings"]) == SEVEN
    answer = ask(channel, PREDICT, model_spec=model(), inputs={"ids": tensor(shape=[0])})
    assert [dim.size for dim in answer.outputs["embeddings"].tensor_shape.dim] == [0, 4]


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({}, "INVALID_ARGUMENT", "Missing ModelSpec"),
        ({"model_spec": {}}, "INVALID_ARGUMENT", "ModelSpec has no name specified."),
        ({"model_spec": {"name": "x"}}, "NOT_FOUND", "Servable not found for request: Latest(x)"),
        (
            {"model_spec": model(version={"value": 9})},
            "NOT_FOUND",
            "Servable not found for request: Specific(default, 9)",
        ),
        ({"model_spec": model(version={"value": -1})}, "NOT_FOUND", "Specific(default, -1)"),
        ({"model_spec": model(version_label="x")}, "INVALID_ARGUMENT", "Unrecognized servable version label: x"),
        ({"model_spec": model("")}, "INVALID_ARGUMENT", "Missing but required: {ads_emb_ids,empty_emb_ids"),
        ({"model_spec": model("x")}, "FAILED_PRECONDITION", '"x" not found'),
        ({"model_spec": model()}, "INVALID_ARGUMENT", "Missing but required: {ids}"),
        ({"inputs": {"id": tensor()}}, "INVALID_ARGUMENT", "Sent extra: {id}"),
        ({"inputs": {"ids": tensor(1)}}, "INVALID_ARGUMENT", "expected int64, got float"),
        ({"inputs": {"ids": tensor(3)}}, "INVALID_ARGUMENT", "expected int64, got int32"),
        ({"inputs": {"ids": tensor(23)}}, "INVALID_ARGUMENT", "expected int64, got uint64"),
        ({"inputs": {"ids": tensor(7, string_val=[b"a"])}}, "INVALID_ARGUMENT", "expected int64, got string"),
        ({"inputs": {"ids": tensor(0)}}, "INVALID_ARGUMENT", "tensors of type DT_INVALID are not supported"),
        ({"inputs": {"ids": tensor(21)}}, "INVALID_ARGUMENT", "tensors of type DT_VARIANT are not supported"),
        ({"inputs": {"ids": tensor(77)}}, "INVALID_ARGUMENT", "tensors of type 77 are not supported"),
        ({"inputs": {"ids": tensor(shape=[-1])}}, "INVALID_ARGUMENT", "no shape of a tensor"),
        ({"inputs": {"ids": tensor(shape=[1] * 40)}}, "INVALID_ARGUMENT", "no shape of a tensor"),
        ({"inputs": {"ids": tensor(shape=[2**62, 2**62, 0])}}, "INVALID_ARGUMENT", "expected at most 2000"),
        ({"inputs": {"ids": tensor(shape=[2**40])}}, "INVALID_ARGUMENT", "expected at most 2000"),
        ({"inputs": {"ids": tensor(shape=[600])}}, "INVALID_ARGUMENT", "at most 2000 numbers"),
        ({"inputs": {"ids": tensor(shape=[1001])}}, "INVALID_ARGUMENT", "at most 1000"),
        ({"inputs": {"ids": tensor(tensor_content=b"12345678")}}, "INVALID_ARGUMENT", "got 8 bytes of tensor_content"),
        ({"inputs": {"ids": {"dtype": 9, "tensor_shape": {"unknown_rank": True}}}}, "INVALID_ARGUMENT", "no shape"),
        ({"inputs": {"ids": tensor()}, "output_filter": ["x"]}, "INVALID_ARGUMENT", "output tensor alias not found"),
    ],
)
def test_predict_refuses(channel: Any, fields: dict[str, Any], code: str, text: str) -> None:
    got, details = refused(channel, PREDICT, **{"model_spec": model(), **fields} if fields else {})
    assert got == code and text in details, details


def test_metadata_and_status(channel: Any) -> None:
    answer = ask(channel, METADATA, model_spec={"name": "default"}, metadata_field=["signature_def"])
    assert answer.model_spec.version.value == 1
    packed = answer.metadata["signature_def"]
    assert packed.type_url.endswith("/tensorflow.serving.SignatureDefMap")
    signatures = message("tensorflow.serving.SignatureDefMap").FromString(packed.value).signature_def
    assert sorted(signatures) == ["ads_emb", "empty_emb", "serving_default", "user_emb"]
    assert signatures["ads_emb"].inputs["ids"].tensor_shape.unknown_rank
    status = ask(channel, STATUS, model_spec={"name": "default"}).model_version_status
    assert [(each.version, each.state, each.status.error_code) for each in status] == [(1, 30, 0)]
    for fields, code in [
        ({}, "INVALID_ARGUMENT"),
        ({"model_spec": {"name": "x"}}, "NOT_FOUND"),
        ({"model_spec": {"name": "default", "version": {"value": 4}}}, "NOT_FOUND"),
    ]:
        assert refused(channel, STATUS, **fields)[0] == code
    assert refused(channel, METADATA, model_spec={"name": "default"})[0] == "INVALID_ARGUMENT"
    assert refused(channel, METADATA, model_spec={"name": "default"}, metadata_field=["x"]) == (
        "INVALID_ARGUMENT",
        "Metadata field x is not supported",
    )


@pytest.mark.parametrize("method", [*REQUESTS, "/inference.GRPCInferenceService/ModelReady"])
def test_no_bytes_are_an_internal_error(channel: Any, method: str) -> None:
    rng = random.Random(0)
    whole = REQUESTS[PREDICT](
        model_spec=model(), inputs={"ids": tensor(int64_val=[1, 2])}, output_filter=["found"]
    ).SerializeToString()
    bodies = [b"", b"\xff" * 9, b"\x0a\x05abc", b"\x0a\x02\xc3\x28", whole[:-3]]
    for _ in range(40):
        mutated = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        bodies.append(bytes(mutated))
    for body in bodies:
        try:
            send(channel, method, body)
        except grpc.RpcError as error:
            assert error.code().name in (
                "INVALID_ARGUMENT",
                "NOT_FOUND",
                "FAILED_PRECONDITION",
                "UNIMPLEMENTED",
                "PERMISSION_DENIED",
            ), (body, error)
            assert error.details()


@pytest.mark.parametrize("body", [b"\xff" * 9, b"\x0a\x05abc", b"\x0a\x02\xc3\x28"])
def test_health_and_reflection_refuse_what_is_no_message(channel: Any, caplog: Any, body: bytes) -> None:
    with pytest.raises(grpc.RpcError) as single:
        channel.unary_unary("/grpc.health.v1.Health/Check")(body, timeout=30)
    with pytest.raises(grpc.RpcError) as stream:
        list(channel.unary_stream("/grpc.health.v1.Health/Watch")(body, timeout=30))
    with pytest.raises(grpc.RpcError) as conversation:
        list(channel.stream_stream(REFLECTION)(iter([body]), timeout=30))
    assert {error.value.code().name for error in (single, stream, conversation)} == {"INVALID_ARGUMENT"}
    assert not caplog.records


def hold_up(
    server: GrpcServer, monkeypatch: pytest.MonkeyPatch, *, on_the_loop: bool
) -> tuple[threading.Semaphore, threading.Event]:
    """Have requests of STATUS, once they have begun, wait for an event: on the loop, or each in a thread."""
    begun, go_on = threading.Semaphore(0), threading.Event()
    method = server._methods[STATUS]

    def wait(data: bytes, caller: Any) -> bytes:
        begun.release()
        go_on.wait(60)
        return method(data, caller)

    monkeypatch.setitem(server._methods, STATUS, wait)
    monkeypatch.setattr(server, "_is_small", lambda data: on_the_loop)
    return begun, go_on


def test_a_request_in_hand_is_answered_at_the_end(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(catalog, Settings(grpc_port=0))
    begun, go_on = hold_up(server, monkeypatch, on_the_loop=False)
    request = REQUESTS[STATUS](model_spec={"name": "default"}).SerializeToString()
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        answer = channel.unary_unary(STATUS).future(request, timeout=60)
        assert begun.acquire(timeout=60)
        ending = threading.Thread(target=server.stop, args=(60,))
        ending.start()
        with pytest.raises(grpc.RpcError), grpc.insecure_channel(f"127.0.0.1:{server.port}") as other:
            while True:  # until it takes no more
                other.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=60)
        go_on.set()
        assert ANSWERS[STATUS].FromString(answer.result()).model_version_status
        ending.join(60)
        assert not ending.is_alive()


def test_a_request_that_nobody_waits_for_is_told_and_takes_its_thread_until_it_is_done(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = Observer()
    server = start(catalog, Settings(grpc_port=0, max_concurrent=2), observer)
    begun, go_on = hold_up(server, monkeypatch, on_the_loop=False)
    request = REQUESTS[STATUS](model_spec={"name": "default"}).SerializeToString()
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        late, gone = (channel.unary_unary(STATUS).future(request, timeout=limit) for limit in (0.3, 60))
        assert begun.acquire(timeout=60) and begun.acquire(timeout=60)
        gone.cancel()
        assert late.exception().code().name == "DEADLINE_EXCEEDED"
        while sum(observer.requests.values()) < 2:
            time.sleep(0.001)
        assert set(observer.requests) <= {499, 504}
        assert refused(channel, STATUS, request)[0] == "RESOURCE_EXHAUSTED"
        go_on.set()
        while server._running:
            time.sleep(0.001)
        assert send(channel, STATUS, request)
    server.stop(0)


def test_streams_end_with_the_server(catalog: Catalog) -> None:
    server = start(catalog, Settings(grpc_port=0))
    with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        watched = iter(channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=60))
        open_end = threading.Event()
        conversation = channel.stream_stream(REFLECTION)(iter(open_end.wait, None), timeout=60)
        assert next(watched) == b"\x08\x01", "it answers"
        server.stop(grace=3600)  # returns at once
        assert list(watched) == [b"\x08\x02"], "it answers no more"
        assert list(conversation) == []
        open_end.set()


@pytest.mark.parametrize("held_up", [0.5, pytest.param(35, marks=pytest.mark.thorough)])  # gRPC's own limit is 30 s
def test_a_burst_is_answered_whole(held_up: float, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(catalog, Settings(grpc_port=0))
    begun, go_on = hold_up(server, monkeypatch, on_the_loop=True)  # while the others come in
    request = REQUESTS[STATUS](model_spec={"name": "default"}).SerializeToString()
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection each
    with contextlib.ExitStack() as stack:
        channels = [grpc.insecure_channel(f"127.0.0.1:{server.port}", options) for _ in range(4)]
        for channel in channels:
            stack.enter_context(channel)
        answers = [channel.unary_unary(STATUS).future(request, timeout=99) for channel in channels for _ in range(1000)]
        assert begun.acquire(timeout=60)
        time.sleep(held_up)
        go_on.set()
        for answer in answers:
            assert ANSWERS[STATUS].FromString(answer.result()).model_version_status
    server.stop(0)


def test_time_in_which_nobody_looked_does_not_count_against_a_message() -> None:
    async def asked() -> bytes:
        come = asyncio.Event()

        async def requests() -> AsyncIterator[bytes]:
            await come.wait()
            yield b"a message"

        request = asyncio.create_task(one_message(requests(), SimpleNamespace(abort=abort), limit=0.1))
        await asyncio.sleep(0)  # it has begun
        time.sleep(1)  # and the loop is held up
        asyncio.get_running_loop().call_later(0.01, come.set)
        return await request

    async def abort(*of: Any) -> None:
        raise AssertionError(of)

    assert asyncio.run(asked()) == b"a message"


def half_sent(*streams: int) -> bytes:
    """What begins a connection and calls of Predict with 4 bytes of a message of 4,096."""
    head = b"".join(
        b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
        for name, value in (
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", PREDICT.encode()),
            (b":authority", b"a"),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
        )
    )
    half = b"\0\0\0\x10\0" + b"1234"
    frames = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    for number in streams:
        stream = number.to_bytes(4, "big")
        frames += len(head).to_bytes(3, "big") + b"\1\4" + stream + head  # HEADERS, END_HEADERS
        frames += len(half).to_bytes(3, "big") + b"\0\0" + stream + half  # DATA
    return frames


def test_an_answer_that_nobody_takes_any_more_is_no_traceback(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    server = start(catalog, Settings(grpc_port=0))
    monkeypatch.setitem(server._methods, PREDICT, lambda data, caller: bytes(1 << 20))
    rest = b"\0\x0f\xfc\0\1\0\0\0\1" + bytes(4092)  # DATA, END_STREAM
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(half_sent(1) + rest)
        received = 0
        while received < 60_000:  # as much of an answer as is sent without being asked for more
            received += len(connection.recv(4096))
    server.stop(5)
    assert not caplog.records


def test_half_open_streams_hold_up_nobody(catalog: Catalog) -> None:
    server = start(catalog, Settings(grpc_port=0))
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            connection.sendall(half_sent(*range(1, 600, 2)))
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            for _ in range(20):
                assert ask(channel, STATUS, model_spec={"name": "default"}).model_version_status
        server.stop(grace=0.05)


def test_half_a_message_is_waited_for_as_long_as_half_a_body(catalog: Catalog) -> None:
    server = start(catalog, Settings(grpc_port=0, body_timeout=0.05))
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(half_sent(1))
            received = b""
            while b"the message was not there after 0.05 s" not in received:
                received += (data := connection.recv(4096))
                assert data, received
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            assert ask(channel, STATUS, model_spec={"name": "default"}).model_version_status
            assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30) == b"\x08\x01"
    finally:
        server.stop(0)


def test_the_port_lives_on_where_the_health_cannot_be_told(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr("kvtools.server.grpc_server._HEALTH_EVERY", 0.001)
    server = start(catalog, Settings(grpc_port=0))
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "ready", property(lambda self: 1 / 0))
            last = time.monotonic() + 60
            while caplog.text.count("ZeroDivisionError") < 2:
                assert time.monotonic() < last and server._thread.is_alive()
                time.sleep(0.001)
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            assert ask(channel, STATUS, model_spec={"name": "default"}).model_version_status
    finally:
        server.stop(0)


def test_connections_are_counted(catalog: Catalog) -> None:
    server = start(catalog, Settings(grpc_port=0, max_connections=2))
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
    address = ("127.0.0.1", server.port)
    try:
        with socket.create_connection(address, timeout=30) as one, socket.create_connection(address, timeout=30) as two:
            for connection in (one, two):
                connection.sendall(preface)
                assert connection.recv(100)
            with socket.create_connection(address, timeout=30) as third, contextlib.suppress(ConnectionError):
                assert third.recv(100) == b"", "it is hung up on"
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            assert check(b"", timeout=60, wait_for_ready=True) == b"\x08\x01", "there is room again"
    finally:
        server.stop(0)


def test_an_idle_connection_is_closed(catalog: Catalog) -> None:
    server = start(catalog, Settings(grpc_port=0, keep_alive=0.2))
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0")
            while connection.recv(4096):
                pass
    finally:
        server.stop(0)


def test_unknown_methods_are_unimplemented(channel: Any) -> None:
    assert refused(channel, "/tensorflow.serving.PredictionService/Nothing", b"")[0] == "UNIMPLEMENTED"


def test_a_table_takes_no_examples(channel: Any) -> None:
    asked = {"model_spec": model("ads_emb"), "input": {"example_list": {"examples": [{}]}}}
    for method, request in (("Classify", "ClassificationRequest"), ("Regress", "RegressionRequest")):
        data = message(f"tensorflow.serving.{request}")(**asked).SerializeToString()
        code, said = refused(channel, f"/tensorflow.serving.PredictionService/{method}", data)
        assert code == "INVALID_ARGUMENT" and "'ads_emb' has inputs ['ids']" in said


def test_a_message_that_is_too_large_is_refused(channel: Any) -> None:
    ids = tensor(shape=[400_000], tensor_content=bytes(3_200_000))
    assert refused(channel, PREDICT, model_spec=model(), inputs={"ids": ids})[0] == "RESOURCE_EXHAUSTED"


def contents(**lists: Any) -> dict[str, Any]:
    return {"name": "ids", "datatype": "INT64", "shape": [2], "contents": lists}


RAW = {"name": "ids", "datatype": "INT64", "shape": [2]}


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": [contents(int64_contents=[-7, 99])]},
        {"inputs": [RAW], "raw_input_contents": [np.array([-7, 99]).tobytes()]},
    ],
)
def test_infer(channel: Any, fields: dict[str, Any]) -> None:
    answer = ask(channel, INFER, model_name="ads/emb", id="x", **fields)
    assert (answer.model_name, answer.model_version, answer.id) == ("ads/emb", "1", "x")
    assert [(o.name, o.datatype, list(o.shape)) for o in answer.outputs] == [
        ("embeddings", "FP32", [2, 4]),
        ("found", "BOOL", [2]),
    ]
    assert np.frombuffer(answer.raw_output_contents[0], "<f4").tolist() == [*SEVEN, 0, 0, 0, 0]
    assert answer.raw_output_contents[1] == b"\1\0"
    answer = ask(
        channel,
        INFER,
        model_name="default",
        model_version="1",
        parameters={"signature_name": {"string_param": "ads_emb"}},
        outputs=[{"name": "found"}],
        **fields,
    )
    assert list(answer.raw_output_contents) == [b"\1\0"]


@pytest.mark.parametrize(
    ("fields", "code", "text"),
    [
        ({"model_name": "x"}, "NOT_FOUND", "'x' is not found"),
        ({"model_version": "7"}, "NOT_FOUND", "version 7 is not found"),
        ({}, "INVALID_ARGUMENT", "Missing but required: {ids}"),
        ({"inputs": [contents()]}, "INVALID_ARGUMENT", "got 0 values in int64_contents"),
        ({"inputs": [RAW, RAW], "raw_input_contents": [bytes(16)]}, "INVALID_ARGUMENT", "expected one for each of 2"),
        ({"inputs": [RAW], "raw_input_contents": [bytes(15)]}, "INVALID_ARGUMENT", "got 15 bytes, expected 16"),
        ({"inputs": [contents()], "raw_input_contents": [bytes(16)]}, "INVALID_ARGUMENT", "must not be there"),
        ({"inputs": [{**RAW, "datatype": "FP16"}]}, "INVALID_ARGUMENT", "in raw_input_contents only"),
        ({"inputs": [{**RAW, "shape": [-2]}]}, "INVALID_ARGUMENT", "a shape of sizes from 0"),
        ({"inputs": [{**RAW, "datatype": "x"}]}, "INVALID_ARGUMENT", "got datatype 'x'"),
        ({"inputs": [{**RAW, "shape": [1 << 39]}]}, "INVALID_ARGUMENT", "expected at most 2000 values"),
    ],
)
def test_infer_refuses(channel: Any, fields: dict[str, Any], code: str, text: str) -> None:
    got, details = refused(channel, INFER, **{"model_name": "ads/emb", **fields})
    assert got == code and text in details, details


def test_a_model_whose_versions_are_gone_is_not_found() -> None:
    catalog = static_catalog(SAMPLE)
    left = start(catalog, Settings(grpc_port=0))
    try:
        with grpc.insecure_channel(f"127.0.0.1:{left.port}") as channel:
            ask(channel, PREDICT, model_spec=model(), inputs={"ids": tensor(int64_val=[0, 1])})
            catalog.publish(ServedModel("default", ()))
            for method, fields in (
                (PREDICT, {"model_spec": model(), "inputs": {"ids": tensor(int64_val=[0, 1])}}),
                (METADATA, {"model_spec": {"name": "default"}, "metadata_field": ["signature_def"]}),
            ):
                assert refused(channel, method, **fields) == (
                    "NOT_FOUND",
                    "Servable not found for request: Latest(default)",
                )
            assert refused(channel, STATUS, model_spec={"name": "default"})[0] == "NOT_FOUND"
            assert refused(channel, INFER, model_name="default")[0] == "NOT_FOUND"
    finally:
        left.stop(0)


def test_health_and_reflection(channel: Any, catalog: Catalog, server: GrpcServer) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    health = health_pb2_grpc.HealthStub(channel)
    for service in ("", "tensorflow.serving.PredictionService", "inference.GRPCInferenceService"):
        assert health.Check(health_pb2.HealthCheckRequest(service=service)).status == 1
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="x"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="tensorflow.serving.PredictionService"),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="grpc.health.v1.Health"),
    ]
    services, ours, health_file = reflection.ServerReflectionInfo(iter(asked))
    assert {service.name for service in services.list_services_response.service} == {
        "tensorflow.serving.PredictionService",
        "tensorflow.serving.ModelService",
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    assert len(ours.file_descriptor_response.file_descriptor_proto) >= 1
    assert len(health_file.file_descriptor_response.file_descriptor_proto) == 1


def test_health_follows_the_catalog(sample_path: Path) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    catalog = static_catalog(sample_path)
    server = start(catalog, Settings(grpc_port=0))
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            watched = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
            assert next(watched).status == 1
            catalog.draining = True
            assert next(watched).status == 2
    finally:
        server.stop(0)


def test_a_port_that_is_taken_is_named(server: GrpcServer, catalog: Catalog) -> None:
    with pytest.raises(BadInputError, match=f"127.0.0.1:{server.port} for gRPC: Address already in use"):
        start(catalog, Settings(grpc_port=server.port))


def config(**changes: Any) -> dict[str, Any]:
    entry = {"name": "ranker", "base_path": "/models/ranker", "model_platform": "tensorflow", **changes}
    return {"config": {"model_config_list": {"config": [entry]}}}


def test_reload(sample_path: Path) -> None:
    catalog = static_catalog(sample_path)
    taken: list[list[ModelSource]] = []

    def reload(sources: list[ModelSource]) -> Future[dict[str, str]]:
        taken.append(sources)
        done: Future[dict[str, str]] = Future()
        done.set_result({"ranker": "no version"} if "none" in sources[0].path else {})
        return done

    catalog.changes = SimpleNamespace(reload=reload)  # type: ignore[assignment]
    catalog.publish(ServedModel("ranker"))
    server = start(catalog, Settings(grpc_port=0, admin=True))
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            answer = ask(channel, RELOAD, **config())
            assert (answer.status.error_code, answer.status.error_message) == (0, "")
            assert taken.pop() == [ModelSource("ranker", "/models/ranker", VersionPolicy(), {})]
            ask(channel, RELOAD, **config(model_version_policy={"specific": {"versions": [7, 3]}}))
            assert taken.pop()[0].policy == VersionPolicy("specific", numbers=(3, 7))
            ask(channel, RELOAD, **config(model_version_policy={"latest": {"num_versions": 2}}))
            assert taken.pop()[0].policy == VersionPolicy("latest", 2)
            ask(channel, RELOAD, **config(model_version_policy={"all": {}}))
            assert taken.pop()[0].policy == VersionPolicy("all")
            ask(channel, RELOAD, **config(name="other", version_labels={"stable": 4}))
            assert taken.pop()[0].labels == {"stable": 4}
            for fields, code, text in [
                ({}, "INVALID_ARGUMENT", "Only ModelConfigList"),
                (config(name=""), "INVALID_ARGUMENT", "has no name"),
                (config(name="a/b"), "INVALID_ARGUMENT", "model 'a/b': expected a name of letters, digits"),
                (config(base_path=""), "INVALID_ARGUMENT", "no base_path"),
                (config(model_platform="torch"), "INVALID_ARGUMENT", "unsupported platform torch"),
                (config(logging_config=b"\x0a\x00"), "UNIMPLEMENTED", "logging_config"),
                (config(model_version_policy={"specific": {}}), "INVALID_ARGUMENT", "needs version numbers"),
                (config(version_labels={"stable": 4}), "FAILED_PRECONDITION", "assign label to version 4"),
                (config(base_path="/none"), "UNKNOWN", "model ranker cannot be served: no version"),
                (
                    {"config": {"model_config_list": {"config": [{"name": "a", "base_path": "/a"}] * 2}}},
                    "INVALID_ARGUMENT",
                    "Illegal to list model a multiple times",
                ),
            ]:
                got, details = refused(channel, RELOAD, **fields)
                assert got == code and text in details, details
    finally:
        server.stop(0)


def test_models_are_not_changed_by_requests_unless_that_is_allowed(channel: Any) -> None:
    for fields in (config(), {}):
        code, details = refused(channel, RELOAD, **fields)
        assert code == "PERMISSION_DENIED" and "start the server with --admin" in details


def test_messages_are_in_a_pool_of_their_own() -> None:
    from google.protobuf import descriptor_pool

    assert POOL is not descriptor_pool.Default()
    for kind in REQUESTS.values():
        assert kind.DESCRIPTOR.file.pool is POOL


def test_what_is_no_grpc_is_hung_up_on(sample_path: Path) -> None:
    server = start(static_catalog(sample_path), Settings(grpc_port=0, header_timeout=0.2))
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings_frame = b"\0\0\0\4\0\0\0\0\0"
    headers_cut_off = b"\0\0\x20\1\4\0\0\0\1" + b"\xff" * 32
    try:
        for data in (
            b"",
            b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01",
            preface[:10],
            preface,
            preface + settings_frame + headers_cut_off,
        ):
            with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
                connection.sendall(data)
                while connection.recv(4096):
                    pass  # until the server closes, which it does
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            assert ask(channel, STATUS, model_spec={"name": "default"}).model_version_status
    finally:
        server.stop(0)


def test_ids_may_have_the_type_of_the_tables_keys(
    save_plain: Any, make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    tables = {
        "small": make_sample("small", rows=8, dim=2, key_dtype="int32"),
        "big": make_sample("big", rows=8, dim=2, key_dtype="uint64"),
    }
    tensors: dict[str, Any] = {}
    for sample in tables.values():
        tensors |= table_tensors(sample)
    server = start(static_catalog(save_plain(tmp_path / "a", tensors)), Settings(grpc_port=0))
    try:
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            for name, fields in {
                "small": {"dtype": 3, "int_val": tables["small"].keys.tolist()},
                "big": {"dtype": 23, "uint64_val": tables["big"].keys.tolist()},
            }.items():
                ids = {**fields, "tensor_shape": {"dim": [{"size": 8}]}}
                answer = ask(channel, PREDICT, model_spec=model(name), inputs={"ids": ids})
                assert rows(answer.outputs["embeddings"]) == tables[name].values.tolist()
            given = {"name": "ids", "datatype": "UINT64", "shape": [8]}
            keys = tables["big"].keys
            for item, raw in (
                ({**given, "contents": {"uint64_contents": keys.tolist()}}, []),
                (given, [keys.tobytes()]),
            ):
                answer = ask(channel, INFER, model_name="big", inputs=[item], raw_input_contents=raw)
                assert answer.raw_output_contents[0] == tables["big"].values.tobytes()
    finally:
        server.stop(0)


def test_without_its_packages_the_extra_is_named(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc_health.v1", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'kvtools\[grpc\]'"):
        start(catalog, Settings(grpc_port=0))


def test_a_module_of_ours_that_cannot_be_imported_is_no_missing_package(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvtools.server.grpc_services", None)
    with pytest.raises(KvtoolsError, match=r"itself .*kvtools\.server\.grpc_services.*install kvtools anew") as told:
        start(catalog, Settings(grpc_port=0))
    assert "pip" not in str(told.value)
