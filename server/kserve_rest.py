"""The Open Inference Protocol (KServe v2) over HTTP, with its extension for binary tensors.

    GET  /v2                                  what the server is
    GET  /v2/health/live, /v2/health/ready
    GET  /v2/models/{model}[/versions/{version}][/ready]
    POST /v2/models/{model}[/versions/{version}]/infer

and of Triton's extensions (`triton_extensions.py`)

    GET  /v2/models/{model}[/versions/{version}]/stats, /v2/models/stats
    GET  /v2/models/{model}[/versions/{version}]/config
    POST /v2/repository/index

Protocol: https://github.com/kserve/open-inference-protocol; binary tensors follow the JSON in the body, whose length is
in `Inference-Header-Content-Length`. Values of 16-bit floats go as binary only. An error is `{"error": "..."}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic_core import to_json

from kvtools.server.caller import Caller
from kvtools.server.catalog import Catalog, ServedVersion
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
from kvtools.server.json_tensor import load_json, tensor, text_blocks
from kvtools.server.observer import Observer
from kvtools.server.protocol_error import ProtocolError, invalid
from kvtools.server.protocol_routes import Body, Endpoint, ProtocolRouter, Threads, blocks_response, json_response
from kvtools.server.request_body import decode_ids, read_ids
from kvtools.server.settings import Settings
from kvtools.server.signatures import FROM_INFERENCE, INFERENCE_TYPES, Array, Signature, is_small
from kvtools.server.triton_extensions import (
    REFUSED_PATHS,
    model_configuration,
    model_statistics,
    refusal,
    repository_index,
)

HEADER = "Inference-Header-Content-Length"
_BINARY = "application/octet-stream"
_NAMES = {
    "type": "array",
    "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
}
_SHAPE = {"type": "array", "items": {"type": "integer"}}
_TENSORS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {"name": {"type": "string"}, "datatype": {"enum": list(FROM_INFERENCE)}, "shape": _SHAPE},
    },
}
_INFER = Body(
    {
        "id": "1",
        "parameters": {"signature_name": "user_emb"},
        "inputs": [{"name": "ids", "shape": [2], "datatype": "INT64", "data": [17, -3]}],
    },
    {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": ["string", "null"]},
            "parameters": {"type": "object"},
            "inputs": {"minItems": 1, **_TENSORS},
            "outputs": _NAMES,
        },
    },
)
_INFERRED = Body(
    {
        "model_name": "default",
        "model_version": "1",
        "id": "1",
        "outputs": [{"name": "embeddings", "shape": [2, 2], "datatype": "FP32", "data": [0.25, -0.5, 0.0, 0.0]}],
    },
    {
        "type": "object",
        "required": ["model_name", "model_version", "outputs"],
        "properties": {
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "id": {"type": "string"},
            "outputs": _TENSORS,
        },
    },
)
_METADATA = Body(
    {
        "name": "user_emb",
        "versions": ["1"],
        "platform": "kvtools_table",
        "inputs": [{"name": "ids", "datatype": "INT64", "shape": [-1]}],
        "outputs": [{"name": "embeddings", "datatype": "FP32", "shape": [-1, 16]}],
    },
    {
        "type": "object",
        "required": ["name", "versions", "platform", "inputs", "outputs"],
        "properties": {"name": {"type": "string"}, "inputs": _TENSORS, "outputs": _TENSORS},
    },
)
_CONFIG = Body(
    {
        "name": "user_emb",
        "platform": "kvtools_table",
        "max_batch_size": 0,
        "input": [{"name": "ids", "data_type": "TYPE_INT64", "dims": [-1]}],
        "output": [{"name": "embeddings", "data_type": "TYPE_FP32", "dims": [-1, 16]}],
    },
    {"type": "object", "required": ["name", "platform", "max_batch_size", "input", "output"]},
)
_STATISTICS = Body(
    {
        "model_stats": [
            {
                "name": "user_emb",
                "version": "1",
                "last_inference": 1785585600000,
                "inference_count": 3,
                "execution_count": 3,
                "inference_stats": {"success": {"count": 3, "ns": 120000}, "fail": {"count": 0, "ns": 0}},
                "batch_stats": [],
            }
        ]
    },
    {"type": "object", "required": ["model_stats"], "properties": {"model_stats": {"type": "array"}}},
)
_INDEX = Body({"ready": True}, {"type": "object", "properties": {"ready": {"type": "boolean"}}}, required=False)
_INDEXED = Body(
    [{"name": "user_emb", "version": "1", "state": "READY", "reason": ""}],
    {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name", "version", "state", "reason"],
            "properties": {"state": {"enum": ["READY", "LOADING", "UNLOADING", "UNAVAILABLE"]}},
        },
    },
)


def router(catalog: Catalog, settings: Settings, observer: Observer | None = None) -> ProtocolRouter:
    """Return the routes under `/v2`."""
    routes = ProtocolRouter("KServe v2", observer)
    threads = Threads(settings)
    add_route = routes.answer

    async def server(request: Request, caller: Caller) -> Response:
        return json_response(SERVER)

    async def live(request: Request, caller: Caller) -> Response:
        return json_response({"live": catalog.live})

    async def ready(request: Request, caller: Caller) -> Response:
        is_ready = catalog.ready
        return json_response({"ready": is_ready}, 200 if is_ready else 503)

    def named(request: Request) -> tuple[str, str]:
        return request.path_params["model"], request.path_params.get("version", "")

    async def metadata(request: Request, caller: Caller) -> Response:
        caller.authorize()
        return json_response(model_metadata(catalog, *named(request)))

    async def model_ready(request: Request, caller: Caller) -> Response:
        caller.authorize()
        name, version = named(request)
        is_ready = not find_model(catalog, name, version)[0].away
        return json_response({"name": name, "ready": is_ready}, 200 if is_ready else 503)

    async def infer(request: Request, caller: Caller) -> Response:
        caller.authorize()
        name, version = named(request)
        served, own = find_model(catalog, name, version)
        caller.asks(served)
        header = caller.headers.get(HEADER.lower())
        limit = settings.body_limit
        body = await read_ids(request.receive, caller.headers, limit)
        encoding = caller.headers.get("content-encoding", "")
        return await threads.run(
            lambda: _infer(served, own, name, decode_ids(body, encoding, limit), header, settings, caller),
            small=not encoding and is_small(served, len(body)),  # what is packed may be more than it looks
        )

    async def statistics(request: Request, caller: Caller) -> Response:
        caller.authorize()
        name = request.path_params.get("model", "")
        version = request.path_params.get("version", "")
        stats = await run_in_threadpool(model_statistics, catalog, caller, name, version)
        return json_response({"model_stats": stats})

    async def config(request: Request, caller: Caller) -> Response:
        caller.authorize()
        return json_response(model_configuration(catalog, *named(request)))

    async def index(request: Request, caller: Caller) -> Response:
        caller.authorize()
        limit = settings.body_limit
        body = await read_ids(request.receive, caller.headers, limit)
        body = decode_ids(body, caller.headers.get("content-encoding", ""), limit)
        document = load_json(body) if body else {}
        if not isinstance(document, dict) or not isinstance(document.get("ready", False), bool):
            raise invalid('expected an object, as in {"ready": true}')
        if document.get("repository_name"):
            raise invalid("'repository_name': there is one repository here, which has no name")
        return json_response(repository_index(catalog, ready=document.get("ready", False)))

    def refused(of_grpc: str) -> Endpoint:
        async def refuse(request: Request, caller: Caller) -> Response:
            raise refusal(f"{request.method} {request.url.path}", of_grpc)

        return refuse

    add_route("GET", "/v2", server, summary="What the server is", answer=Body(SERVER))
    add_route("GET", "/v2/health/live", live, summary="Whether the server lives", answer=Body({"live": True}))
    add_route("GET", "/v2/health/ready", ready, summary="Whether every model answers", answer=Body({"ready": True}))
    # A table's name may have slashes, so the longer paths come first.
    for place in ("/versions/{version}", ""):
        path = f"/v2/models/{{model:path}}{place}"
        of = place.partition("{")[2].rstrip("}") or "latest version"
        add_route(
            "POST",
            f"{path}/infer",
            infer,
            kind="infer",
            summary=f"Look ids up, by {of}",
            body=_INFER,
            answer=_INFERRED,
        )
        add_route(
            "GET",
            f"{path}/config",
            config,
            summary=f"Configuration as Triton tells it, by {of}",
            answer=_CONFIG,
        )
        add_route("GET", f"{path}/stats", statistics, summary=f"How often asked, by {of}", answer=_STATISTICS)
        add_route(
            "GET",
            f"{path}/ready",
            model_ready,
            summary=f"Whether a model answers, by {of}",
            answer=Body({"name": "user_emb", "ready": True}),
        )
    add_route("GET", "/v2/models/stats", statistics, summary="How often all models were asked", answer=_STATISTICS)
    add_route(
        "POST", "/v2/repository/index", index, summary="All models and their versions", body=_INDEX, answer=_INDEXED
    )
    for path, of_grpc in REFUSED_PATHS.items():
        for method in ("GET", "POST"):
            add_route(method, f"/v2/{path}", refused(of_grpc))
    for place in ("/versions/{version}", ""):
        of = place.partition("{")[2].rstrip("}") or "latest version"
        path = f"/v2/models/{{model:path}}{place}"
        add_route("GET", path, metadata, summary=f"Inputs and outputs, by {of}", answer=_METADATA)
    return routes


def _infer(
    served: ServedVersion, own: str, name: str, body: bytes, header: str | None, settings: Settings, caller: Caller
) -> Response:
    document, rest = _parts(body, header)
    if document is None:
        signature = signature_named(served, own, {})
        caller.signature = signature.name
        inputs = {_only_input(signature): _raw(signature, rest)}
        requested: list[tuple[str, bool]] = []
        all_binary, request_id = True, None
    else:
        parameters = _parameters(document, "the request")
        signature = signature_named(served, own, parameters)
        caller.signature = signature.name
        all_binary = parameters.get("binary_data_output") is True
        inputs = _inputs(document, rest, settings)
        requested = _outputs(document, all_binary)
        request_id = document.get("id")
        if request_id is not None and not isinstance(request_id, str):
            raise invalid("'id': expected a string")
    answer = run(signature, inputs, [output for output, _ in requested], settings, caller)
    binary = dict(requested) if requested else dict.fromkeys(answer, all_binary)
    return _response(name, served, request_id, answer, binary)


def _parts(body: bytes, header: str | None) -> tuple[dict[str, Any] | None, memoryview]:
    """Split a body into its JSON (None: there is none, all is the values of the one input) and what follows it."""
    length = len(body)
    if header is not None:
        if not header.isascii() or not header.isdigit() or int(header[:19]) > len(body):
            raise invalid(f"{HEADER}: got '{header[:40]}', expected a number of bytes up to the body's {len(body)}")
        length = int(header)
        if length == 0:
            return None, memoryview(body)
    document = load_json(body[:length])
    if not isinstance(document, dict):
        raise invalid("expected an object with a list of inputs")
    return document, memoryview(body)[length:]


def _parameters(holder: dict[str, Any], of: str) -> dict[str, Any]:
    parameters = holder.get("parameters", {})
    if not isinstance(parameters, dict):
        raise invalid(f"'parameters' of {of}: expected an object")
    return parameters


def _inputs(document: dict[str, Any], rest: memoryview, settings: Settings) -> dict[str, Array]:
    inputs = document.get("inputs")
    if not isinstance(inputs, list) or not inputs:
        raise invalid("expected a list of 'inputs'")
    arrays: dict[str, Array] = {}
    place = 0
    for item in inputs:
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str):
            raise invalid("each of 'inputs': expected an object with a name")
        if name in arrays:
            raise invalid(f"input '{name}' is there twice")
        shape = item.get("shape")
        if not isinstance(shape, list):
            raise invalid(f"input '{name}': expected a shape, as in [2, 3]")
        dtype = tensor_type(name, item.get("datatype"))
        sizes = tensor_shape(name, shape, settings)
        parameters = _parameters(item, f"input '{name}'")
        refuse_extensions(parameters)
        size = parameters.get("binary_data_size")
        if size is None:
            if "data" not in item:
                raise invalid(f"input '{name}': expected data, or the parameter binary_data_size")
            if INFERENCE_TYPES[dtype] in ("FP16", "BF16"):
                raise invalid(f"input '{name}': values of {INFERENCE_TYPES[dtype]} are sent as binary only")
            if not isinstance(item["data"], list):
                raise invalid(f"input '{name}': expected data as a list")
            arrays[name] = _from_json(name, item["data"], dtype, sizes)
            continue
        if type(size) is not int or not 0 <= size <= len(rest) - place:
            raise invalid(
                f"input '{name}': got binary_data_size {size!r:.40}, expected at most the {len(rest) - place} bytes"
                f" that follow the JSON; {HEADER} tells where it ends"
            )
        if "data" in item:
            raise invalid(f"input '{name}': expected data or binary_data_size, got both")
        arrays[name] = from_bytes(name, rest[place : place + size], dtype, sizes)
        place += size
    if place != len(rest):
        raise invalid(f"{len(rest) - place} bytes follow the values of the inputs")
    return arrays


def _from_json(name: str, data: list[Any], dtype: Any, shape: list[int]) -> Array:
    try:
        # No dimension at all is one value, which stands in a list here.
        return tensor(data, dtype, flat_shape=shape) if shape else tensor(data, dtype, flat_shape=[1]).reshape(())
    except ProtocolError as error:
        raise invalid(f"input '{name}': {error.message}") from None


def _outputs(document: dict[str, Any], all_binary: bool) -> list[tuple[str, bool]]:
    outputs = document.get("outputs", [])
    if not isinstance(outputs, list):
        raise invalid("expected a list of 'outputs'")
    named = []
    for item in outputs:
        name = item.get("name") if isinstance(item, dict) else None
        if not isinstance(name, str):
            raise invalid("each of 'outputs': expected an object with a name")
        parameters = _parameters(item, f"output '{name}'")
        refuse_extensions(parameters)
        binary = parameters.get("binary_data", all_binary)
        if not isinstance(binary, bool):
            raise invalid(f"output '{name}': parameter 'binary_data': expected true or false")
        named.append((name, binary))
    return named


def _only_input(signature: Signature) -> str:
    if len(signature.inputs) != 1:
        raise invalid(f"{HEADER}: 0 is for models of one input; this one has {', '.join(signature.inputs)}")
    return next(iter(signature.inputs))


def _raw(signature: Signature, data: memoryview) -> Array:
    name = _only_input(signature)
    spec = signature.inputs[name]
    fixed = [size for size in spec.shape or (-1,) if size != -1]
    item = spec.dtype.itemsize
    for size in fixed:
        item *= size
    if len(fixed) + 1 < len(spec.shape or (-1,)) or spec.dtype.kind == "O" or item == 0 or len(data) % item:
        raise invalid(
            f"input '{name}': {len(data)} bytes do not tell its shape; send it with a JSON header and {HEADER}"
        )
    shape = [len(data) // item if size == -1 else size for size in spec.shape or (-1,)]
    return from_bytes(name, data, spec.dtype, shape)


def _response(
    name: str, served: ServedVersion, request_id: str | None, answer: dict[str, Array], binary: dict[str, bool]
) -> Response:
    values: list[bytes] = []
    described: list[tuple[bytes, Array | None]] = []
    numbers = 0
    for output, array in answer.items():
        datatype = INFERENCE_TYPES[array.dtype]
        head: dict[str, Any] = {"name": output, "datatype": datatype, "shape": list(array.shape)}
        if binary[output]:
            values.append(to_bytes(array))
            described.append((to_json({**head, "parameters": {"binary_data_size": len(values[-1])}}), None))
        elif datatype in ("FP16", "BF16"):
            raise invalid(f"output '{output}': values of {datatype} are answered as binary only: set binary_data")
        elif datatype == "BYTES" and not _is_text(array):
            raise ProtocolError(
                "FAILED_PRECONDITION",
                f"output '{output}': a value is not UTF-8, which this protocol has no JSON for: set binary_data",
                status=400,
            )
        else:
            numbers += array.size
            described.append((to_json(head), array))
    about = {"model_name": name, "model_version": str(served.number)}
    if request_id is not None:
        about["id"] = request_id
    blocks = _document(to_json(about), described)
    if not values:
        return blocks_response(blocks, numbers)
    document = b"".join(blocks)
    return Response(b"".join([document, *values]), media_type=_BINARY, headers={HEADER: str(len(document))})


def _is_text(strings: Array) -> bool:
    try:
        for value in strings.flat:
            if isinstance(value, bytes):
                value.decode()
    except UnicodeDecodeError:
        return False
    return True


def _document(about: bytes, outputs: list[tuple[bytes, Array | None]]) -> Iterator[bytes]:
    yield about[:-1] + b',"outputs":['
    for place, (head, array) in enumerate(outputs):
        yield b"," if place else b""
        if array is None:
            yield head
            continue
        yield head[:-1] + b',"data":'
        yield from text_blocks(array.reshape(-1))
        yield b"}"
    yield b"]}"
