"""Clients that others wrote, unmodified, against real ports: TensorFlow Serving's stubs and Triton's clients. What they
get is what stock TensorFlow computes from the exported SavedModel, and what the checkpoint holds, bit for bit."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

pytest.importorskip("grpc")
pytest.importorskip("uvicorn")
pytest.importorskip("tensorflow_serving.apis")
pytest.importorskip("tritonclient.grpc")
pytest.importorskip("tritonclient.http")
pytest.importorskip("grpc_health")
import grpc
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from serving_processes import Ports, serving

from kvtools.array_table import ArrayTable
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.schema import numpy_dtype
from kvtools.dialects.tfplugin import KEY_DTYPES, VALUE_DTYPES
from kvtools.export import export_saved_model
from kvtools.migrate import write_tables

TABLES = [f"{key}_of_{value}" for key in KEY_DTYPES for value in VALUE_DTYPES]
ROWS, DIM = 40, 3


@dataclass
class Served:
    ports: Ports
    saved_model: Any
    tables: dict[str, ArrayTable]
    values: dict[str, tuple[np.ndarray, np.ndarray]]


def draw(key_dtype: str, value_dtype: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    limits = np.iinfo(key_dtype)
    keys = np.unique(rng.integers(limits.min, limits.max, ROWS, dtype=key_dtype, endpoint=True))
    keys[:3] = limits.min, limits.max, 7
    dtype = numpy_dtype(value_dtype)
    bits = rng.integers(0, 256, (len(keys), DIM * dtype.itemsize), np.uint8)
    values = np.ascontiguousarray(bits).view(dtype)  # any bits at all: NaN, infinities, denormal numbers
    if value_dtype == "bool":
        values = bits % 2 == 1
    if value_dtype == "float16":
        values[np.isnan(values)] = np.nan  # NumPy and TensorFlow widen NaNs that signal differently
    return keys, values


@pytest.fixture(scope="module")
def served(tf: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    values = {}
    for seed, name in enumerate(TABLES):
        key_dtype, _, value_dtype = name.partition("_of_")
        values[name] = draw(key_dtype, value_dtype, seed)
    tables = {name: ArrayTable(name, *arrays) for name, arrays in values.items()}
    write_tables(list(tables.values()), str(folder / "checkpoint"), "tfplugin")
    export_saved_model(open_checkpoint(folder / "checkpoint"), folder / "exported")
    model = tf.saved_model.load(str(folder / "exported"))
    with serving(folder / "checkpoint", "--cache", str(folder / "cache")) as ports:
        yield Served(ports, model, tables, values)


def asked(served: Served, table: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Ids as int64 [2, n], half of them there; what TensorFlow answers; what the checkpoint holds; what is found."""
    keys, values = served.values[table]
    bits = keys.view(np.int64) if keys.dtype == np.uint64 else keys.astype(np.int64)
    absent = np.setdiff1d(np.arange(1000, 1000 + 2 * ROWS), bits)[: len(bits)]
    ids = np.stack([bits, absent])
    import tensorflow as tf

    expected = np.asarray(served.saved_model.signatures[table](ids=tf.constant(ids))["embeddings"])
    plain = np.zeros((2, len(bits), DIM), expected.dtype)
    plain[0] = values.astype(expected.dtype)
    found = np.zeros(ids.shape, bool)
    found[0] = True
    return ids, expected, plain, found


def same_bits(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Compare bit for bit: of a NaN that was widened, what a conversion may change (it becomes quiet) too."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), what
    assert got.tobytes() == expected.tobytes(), what


def as_json_has_it(array: np.ndarray) -> np.ndarray:
    """JSON has one NaN."""
    return np.where(np.isnan(array), np.array(np.nan, array.dtype), array) if array.dtype.kind == "f" else array


@pytest.mark.parametrize("table", TABLES)
def test_every_protocol_answers_alike(served: Served, table: str) -> None:
    ids, expected, plain, found = asked(served, table)
    same_bits(plain, expected, "the checkpoint, and TensorFlow on the exported model")
    same_bits(predict_by_grpc(served.ports, table, ids), expected, "PredictionService.Predict")
    rows, columns = predict_by_rest(served.ports, table, ids, expected.dtype)
    same_bits(as_json_has_it(rows), as_json_has_it(expected), "REST, by rows")
    same_bits(as_json_has_it(columns), as_json_has_it(expected), "REST, by columns")
    for name, infer in (("grpc", infer_by_grpc), ("http", infer_by_http), ("json", infer_by_http_json)):
        got, got_found = infer(served.ports, table, ids)
        if name == "json":
            got = as_json_has_it(got)
        same_bits(got, as_json_has_it(expected) if name == "json" else expected, f"KServe v2, {name}")
        same_bits(got_found, found, f"KServe v2, {name}: found")


def predict_by_grpc(ports: Ports, table: str, ids: np.ndarray) -> np.ndarray:
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{ports.grpc}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        request = predict_pb2.PredictRequest()
        request.model_spec.name = "default"
        request.model_spec.signature_name = table
        request.inputs["ids"].CopyFrom(tf.make_tensor_proto(ids))
        answer = stub.Predict(request, timeout=60)
        assert answer.model_spec.version.value == 1
        return tf.make_ndarray(answer.outputs["embeddings"])  # type: ignore[no-any-return]


def predict_by_rest(ports: Ports, table: str, ids: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    def post(body: Any) -> Any:
        url = f"http://127.0.0.1:{ports.http}/v1/models/default:predict"
        data = json.dumps({"signature_name": table, **body}).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
            return json.load(answer)

    rows = post({"instances": [{"ids": row} for row in ids.tolist()]})["predictions"]
    columns = post({"inputs": {"ids": ids.tolist()}})["outputs"]["embeddings"]
    return np.array([row["embeddings"] for row in rows], dtype), np.array(columns, dtype)


def infer_by_grpc(ports: Ports, table: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    with triton_grpc.InferenceServerClient(f"127.0.0.1:{ports.grpc}") as client:
        given = triton_grpc.InferInput("ids", ids.shape, "INT64")
        given.set_data_from_numpy(ids)
        answer = client.infer(table, [given], request_id="7")
        assert answer.get_response().id == "7"
        return answer.as_numpy("embeddings"), answer.as_numpy("found")


def infer_by_http(ports: Ports, table: str, ids: np.ndarray, binary: bool = True) -> tuple[np.ndarray, np.ndarray]:
    with triton_http.InferenceServerClient(f"127.0.0.1:{ports.http}") as client:
        given = triton_http.InferInput("ids", ids.shape, "INT64")
        given.set_data_from_numpy(ids, binary_data=binary)
        wanted = [triton_http.InferRequestedOutput(name, binary_data=binary) for name in ("embeddings", "found")]
        answer = client.infer(table, [given], outputs=wanted, request_id="7")
        assert answer.get_response()["id"] == "7"
        return answer.as_numpy("embeddings"), answer.as_numpy("found")


def infer_by_http_json(ports: Ports, table: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return infer_by_http(ports, table, ids, binary=False)


def test_the_signatures_are_those_of_the_exported_model(served: Served) -> None:
    import tensorflow as tf
    from tensorflow_serving.apis import get_model_metadata_pb2, prediction_service_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{served.ports.grpc}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        request = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
        request.model_spec.name = "default"
        packed = stub.GetModelMetadata(request, timeout=60).metadata["signature_def"]
    definitions = get_model_metadata_pb2.SignatureDefMap()
    assert packed.Unpack(definitions)
    assert set(definitions.signature_def) == set(served.saved_model.signatures) == {*TABLES, "serving_default"}
    for name, definition in definitions.signature_def.items():
        function = served.saved_model.signatures[name]
        for got, wanted in (
            (definition.inputs, function.structured_input_signature[1]),
            (definition.outputs, function.structured_outputs),
        ):
            assert {tensor: tf.as_dtype(info.dtype) for tensor, info in got.items()} == {
                tensor: spec.dtype for tensor, spec in wanted.items()
            }
        assert all(info.tensor_shape.unknown_rank for info in definition.inputs.values())


def test_model_status_by_tensorflow_servings_stub(served: Served) -> None:
    from tensorflow_serving.apis import get_model_status_pb2, model_service_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{served.ports.grpc}") as channel:
        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = "default"
        (status,) = model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus(request).model_version_status
    assert (status.version, status.state) == (1, get_model_status_pb2.ModelVersionStatus.AVAILABLE)


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_tritons_clients_find_their_way(served: Served, kind: str) -> None:
    library = triton_grpc if kind == "grpc" else triton_http
    port = served.ports.grpc if kind == "grpc" else served.ports.http
    with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
        assert client.is_server_live() and client.is_server_ready()
        assert client.is_model_ready(TABLES[0]) and client.is_model_ready("default", "1")
        assert not client.is_model_ready("nothing")
        about = client.get_server_metadata()
        metadata = client.get_model_metadata(TABLES[0])
        if kind == "grpc":
            assert about.name == "kvtools" and metadata.outputs[0].shape == [-1, DIM]
        else:
            assert about["name"] == "kvtools" and metadata["outputs"][0]["shape"] == [-1, DIM]
        given = library.InferInput("ids", [1], "FP32")
        given.set_data_from_numpy(np.zeros(1, np.float32))
        with pytest.raises(library.InferenceServerException, match="expected int64, got float"):
            client.infer(TABLES[0], [given])


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_tritons_clients_are_told_of_models(served: Served, kind: str) -> None:
    library: Any = triton_grpc if kind == "grpc" else triton_http
    port = served.ports.grpc if kind == "grpc" else served.ports.http
    as_json = {"as_json": True} if kind == "grpc" else {}
    with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
        index = client.get_model_repository_index(**as_json)
        entries = index["models"] if kind == "grpc" else index
        assert {(each["name"], each["version"], each["state"]) for each in entries} == {
            (name, "1", "READY") for name in ("default", *TABLES)
        }
        for entry in entries[1:]:
            assert client.is_model_ready(entry["name"], entry["version"])
        config = client.get_model_config("int32_of_float64", **as_json)
        config = config["config"] if kind == "grpc" else config
        assert config.get("max_batch_size", 0) == 0
        assert [(each["name"], each["data_type"]) for each in config["input"]] == [("ids", "TYPE_INT64")]
        assert [(each["name"], each["data_type"], list(map(int, each["dims"]))) for each in config["output"]] == [
            ("embeddings", "TYPE_FP64", [-1, DIM]),
            ("found", "TYPE_BOOL", [-1]),
        ]

        def counted(name: str) -> tuple[int, int, int]:
            (told,) = client.get_inference_statistics(name, **as_json)["model_stats"]
            assert (told["name"], told["version"]) == (name, "1")
            times = told["inference_stats"]
            success, fail = (int(times[which].get("count", 0)) for which in ("success", "fail"))
            assert success == int(told.get("inference_count", 0)) == int(told.get("execution_count", 0))
            if success:
                assert abs(int(told["last_inference"]) / 1000 - time.time()) < 3600
                assert 0 < int(times["success"]["ns"]) < 3600 * 10**9
            return success, fail, int(times["fail"].get("ns", 0))

        name, other = "int64_of_int8", "int32_of_int8"
        (answers, errors, lost), of_other, (of_all, _, _) = counted(name), counted(other), counted("default")
        with triton_http.InferenceServerClient(f"127.0.0.1:{served.ports.http}") as asking:
            given = triton_http.InferInput("ids", [2], "INT64")
            given.set_data_from_numpy(np.array([1, 7]))
            for _ in range(3):
                asking.infer(name, [given])
            given = triton_http.InferInput("ids", [1], "FP32")
            given.set_data_from_numpy(np.zeros(1, np.float32))
            with pytest.raises(triton_http.InferenceServerException, match="expected int64"):
                asking.infer(name, [given])
        assert counted(name)[:2] == (answers + 3, errors + 1) and counted(name)[2] > lost
        assert (counted(other), counted("default")[0]) == (of_other, of_all + 3)
        every = client.get_inference_statistics(**as_json)["model_stats"]
        assert {each["name"] for each in every} == {"default", *TABLES}


@pytest.mark.parametrize("kind", ["grpc", "http"])
def test_what_triton_has_and_this_server_has_not_is_refused_by_name(served: Served, kind: str) -> None:
    library: Any = triton_grpc if kind == "grpc" else triton_http
    port = served.ports.grpc if kind == "grpc" else served.ports.http
    with library.InferenceServerClient(f"127.0.0.1:{port}") as client:
        for call, arguments, reason in (
            ("load_model", ("default",), "HandleReloadConfigRequest"),
            ("unload_model", ("default",), "HandleReloadConfigRequest"),
            ("get_system_shared_memory_status", (), "shared memory is not there"),
            ("register_system_shared_memory", ("a", "/a", 8), "shared memory is not there"),
            ("unregister_cuda_shared_memory", (), "shared memory is not there"),
            ("get_trace_settings", (), "requests are not traced"),
            ("get_trace_settings", ("default",), "requests are not traced"),
            ("update_log_settings", ({"log_info": True},), "options of `kvtools serve`"),
        ):
            with pytest.raises(library.InferenceServerException, match=reason):
                getattr(client, call)(*arguments)
        for call in ("get_inference_statistics", "get_model_config"):
            with pytest.raises(library.InferenceServerException, match="unknown model: 'nothing'"):
                getattr(client, call)("nothing")


def test_packed_bodies_from_tritons_client(served: Served) -> None:
    ids = np.arange(20)
    with triton_http.InferenceServerClient(f"127.0.0.1:{served.ports.http}") as client:
        given = triton_http.InferInput("ids", ids.shape, "INT64")
        given.set_data_from_numpy(ids)
        plain = client.infer(TABLES[0], [given])
        for packing in ("gzip", "deflate"):
            packed = client.infer(
                TABLES[0], [given], request_compression_algorithm=packing, response_compression_algorithm=packing
            )
            assert packed.as_numpy("embeddings").tobytes() == plain.as_numpy("embeddings").tobytes()
