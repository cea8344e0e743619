"""The Open Inference Protocol (KServe v2) over gRPC: `inference.GRPCInferenceService`.

Values come as `raw_input_contents`, or as the typed list of each input; they are answered raw.
Protocol: https://github.com/kserve/open-inference-protocol.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.json_format import ParseDict

from kvtools.server.caller import Caller
from kvtools.server.catalog import Catalog
from kvtools.server.inference_protocol import (
    SERVER,
    find_model,
    from_bytes,
    model_metadata,
    refuse_extensions,
    run,
    signature_named,
    tensor_shape,
    tensor_type,
    to_bytes,
)
from kvtools.server.protocol_error import ProtocolError, invalid
from kvtools.server.protos import INFERENCE_METHODS, message
from kvtools.server.settings import Settings
from kvtools.server.signatures import INFERENCE_TYPES, STRING, Array
from kvtools.server.tensorflow_grpc import Method, parse
from kvtools.server.triton_extensions import (
    REFUSED,
    model_configuration,
    model_statistics,
    refusal,
    repository_index,
)

_SERVICE = "/inference.GRPCInferenceService"
_LISTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def methods(catalog: Catalog, settings: Settings) -> dict[str, Method]:
    """Return the methods by their full names, from the bytes of a request to those of its answer."""
    kinds = {
        name: (message(f"inference.{name}Request"), message(f"inference.{name}Response")) for name in INFERENCE_METHODS
    }

    def live(request: Any, response: Any, caller: Caller) -> None:
        response.live = catalog.live

    def ready(request: Any, response: Any, caller: Caller) -> None:
        response.ready = catalog.ready

    def model_ready(request: Any, response: Any, caller: Caller) -> None:
        caller.authorize()
        try:
            response.ready = not find_model(catalog, request.name, request.version)[0].away
        except ProtocolError:
            if not catalog.names():
                raise
            response.ready = False

    def server_metadata(request: Any, response: Any, caller: Caller) -> None:
        response.name = SERVER["name"]
        response.version = SERVER["version"]
        response.extensions.extend(SERVER["extensions"])

    def metadata(request: Any, response: Any, caller: Caller) -> None:
        caller.authorize()
        found = model_metadata(catalog, request.name, request.version)
        response.name = found["name"]
        response.versions.extend(found["versions"])
        response.platform = found["platform"]
        for place in ("inputs", "outputs"):
            for tensor in found[place]:
                getattr(response, place).add(**tensor)

    def config(request: Any, response: Any, caller: Caller) -> None:
        caller.authorize()
        ParseDict({"config": model_configuration(catalog, request.name, request.version)}, response)

    def statistics(request: Any, response: Any, caller: Caller) -> None:
        caller.authorize()
        ParseDict({"model_stats": model_statistics(catalog, caller, request.name, request.version)}, response)

    def index(request: Any, response: Any, caller: Caller) -> None:
        caller.authorize()
        if request.repository_name:
            raise invalid("'repository_name': there is one repository here, which has no name")
        ParseDict({"models": repository_index(catalog, ready=request.ready)}, response)

    def infer(request: Any, response: Any, caller: Caller) -> None:
        caller.authorize()
        served, own = find_model(catalog, request.model_name, request.model_version)
        caller.asks(served)
        signature = signature_named(served, own, _parameters(request.parameters))
        caller.signature = signature.name
        for output in request.outputs:
            refuse_extensions(_parameters(output.parameters))
        answer = run(
            signature, _inputs(request, settings), [output.name for output in request.outputs], settings, caller
        )
        response.model_name = request.model_name
        response.model_version = str(served.number)
        response.id = request.id
        for name, array in answer.items():
            response.outputs.add(name=name, datatype=INFERENCE_TYPES[array.dtype], shape=array.shape)
            response.raw_output_contents.append(to_bytes(array))

    def method(name: str, fill: Any) -> Method:
        request_kind, response_kind = kinds[name]

        def answer(data: bytes, caller: Caller) -> bytes:
            request = parse(request_kind, data)
            response = response_kind()
            fill(request, response, caller)
            return response.SerializeToString()  # type: ignore[no-any-return]

        return answer

    def refused(name: str) -> Method:
        def answer(data: bytes, caller: Caller) -> bytes:
            raise refusal(name, name)

        return answer

    return {f"{_SERVICE}/{name}": refused(name) for name in REFUSED} | {
        f"{_SERVICE}/{name}": method(name, fill)
        for name, fill in (
            ("ServerLive", live),
            ("ServerReady", ready),
            ("ModelReady", model_ready),
            ("ServerMetadata", server_metadata),
            ("ModelMetadata", metadata),
            ("ModelInfer", infer),
            ("ModelConfig", config),
            ("ModelStatistics", statistics),
            ("RepositoryIndex", index),
        )
    }


def _parameters(parameters: Any) -> dict[str, Any]:
    found = {}
    for name, value in parameters.items():
        choice = value.WhichOneof("parameter_choice")
        found[name] = getattr(value, choice) if choice else None
    return found


def _inputs(request: Any, settings: Settings) -> dict[str, Array]:
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise invalid(f"got {len(raw)} raw_input_contents, expected one for each of {len(request.inputs)} inputs")
    arrays: dict[str, Array] = {}
    for place, item in enumerate(request.inputs):
        name = item.name
        if name in arrays:
            raise invalid(f"input '{name}' is there twice")
        refuse_extensions(_parameters(item.parameters))
        dtype = tensor_type(name, item.datatype)
        shape = tensor_shape(name, item.shape, settings)
        if raw:
            if item.HasField("contents"):
                raise invalid(f"input '{name}': contents must not be there beside raw_input_contents")
            arrays[name] = from_bytes(name, raw[place], dtype, shape)
        else:
            arrays[name] = _from_list(name, item, dtype, shape)
    return arrays


def _from_list(name: str, item: Any, dtype: np.dtype[Any], shape: list[int]) -> Array:
    listed = _LISTS.get(item.datatype)
    if listed is None:
        raise invalid(f"input '{name}': values of {item.datatype} are sent in raw_input_contents only")
    values = getattr(item.contents, listed)
    if len(values) != np.prod(shape, dtype=object):
        raise invalid(f"input '{name}': got {len(values)} values in {listed}, expected shape {shape}")
    if dtype == STRING:
        array = np.empty(len(values), STRING)
        array[:] = list(values)
        return array.reshape(shape)
    if dtype.kind in "iu" and dtype.itemsize < 4 and len(values):
        limits = np.iinfo(dtype)
        if min(values) < limits.min or max(values) > limits.max:
            raise invalid(f"input '{name}': a value does not fit {item.datatype}")
    return np.array(values, dtype).reshape(shape)
