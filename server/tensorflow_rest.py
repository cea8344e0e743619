"""TensorFlow Serving's REST interface: predictions, status and metadata of models.

    POST /v1/models/{model}[/versions/{version}|/labels/{label}]:predict, :classify, :regress
    GET  /v1/models/{model}[/versions/{version}|/labels/{label}][/metadata]

The forms of requests and answers are those of https://www.tensorflow.org/tfx/serving/api_rest; an error is
`{"error": "..."}`. Beyond it, `output_filter` in a request names the outputs to answer with, as gRPC's field of that
name does; without it all outputs are answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
from fastapi import Request, Response
from pydantic_core import to_json

from kvtools.server.caller import Caller
from kvtools.server.catalog import Catalog, ServedVersion
from kvtools.server.examples import classes_text, classify, from_json, regress
from kvtools.server.json_tensor import is_base64, load_json, row_texts, shown, tensor, text_blocks
from kvtools.server.model_status import model_statuses
from kvtools.server.observer import Observer
from kvtools.server.protocol_error import ProtocolError, invalid
from kvtools.server.protocol_routes import (
    Body,
    Endpoint,
    ProtocolRouter,
    Threads,
    blocks_response,
    json_response,
    version_number,
)
from kvtools.server.request_body import decode_ids, read_ids
from kvtools.server.settings import Settings
from kvtools.server.signatures import (
    TENSORFLOW_TYPES,
    Array,
    Signature,
    TensorSpec,
    ask,
    check_inputs,
    chosen_outputs,
    defaults_of,
    is_small,
    listed,
    served_version,
    signature_of,
)

_NUMBERS_AT_ONCE = 65536
_Inference = Callable[[ServedVersion, dict[str, Any], Settings, Caller], Response]
_PREDICT = Body(
    {"signature_name": "user_emb", "instances": [17, -3]},
    {
        "type": "object",
        "properties": {
            "signature_name": {"type": "string"},
            "instances": {"type": "array", "minItems": 1, "description": "A value, or an object of inputs, a row."},
            "inputs": {"description": "All rows of the one input, or an object of inputs."},
            "output_filter": {"type": "array", "items": {"type": "string"}},
        },
        "oneOf": [{"required": ["instances"]}, {"required": ["inputs"]}],
    },
)
_PREDICTED = Body(
    {"predictions": [{"embeddings": [0.25, -0.5], "found": True}, {"embeddings": [0.0, 0.0], "found": False}]},
    {
        "type": "object",
        "properties": {"predictions": {"type": "array"}, "outputs": {}},
        "oneOf": [{"required": ["predictions"]}, {"required": ["outputs"]}],
    },
)
_EXAMPLES = Body(
    {"signature_name": "ctr", "context": {"user": 17}, "examples": [{"item": 5, "tags": ["a", "b"]}, {"item": 9}]},
    {
        "type": "object",
        "properties": {
            "signature_name": {"type": "string"},
            "context": {"type": "object", "description": "Features that all examples have."},
            "examples": {"type": "array", "minItems": 1, "items": {"type": "object"}},
        },
        "required": ["examples"],
    },
)
_RESULTS = {"type": "object", "required": ["results"], "properties": {"results": {"type": "array"}}}
_CLASSIFIED = Body({"results": [[["no", 0.75], ["yes", 0.25]], [["no", 0.5], ["yes", 0.5]]]}, _RESULTS)
_REGRESSED = Body({"results": [0.25, -0.5]}, _RESULTS)
_STATUS = Body(
    {
        "model_version_status": [
            {"version": "1", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        ]
    },
    {
        "type": "object",
        "required": ["model_version_status"],
        "properties": {
            "model_version_status": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["version", "state", "status"],
                    "properties": {
                        "version": {"type": "string"},
                        "state": {"enum": ["START", "LOADING", "AVAILABLE", "UNLOADING", "END"]},
                        "status": {
                            "type": "object",
                            "required": ["error_code", "error_message"],
                            "properties": {"error_code": {"type": "string"}, "error_message": {"type": "string"}},
                        },
                    },
                },
            }
        },
    },
)
_METADATA = Body(
    {"model_spec": {"name": "default", "signature_name": "", "version": "1"}, "metadata": {}},
    {"type": "object", "required": ["model_spec", "metadata"]},
)


def router(catalog: Catalog, settings: Settings, observer: Observer | None = None) -> ProtocolRouter:
    """Return the routes under `/v1/models`."""
    routes = ProtocolRouter("TensorFlow Serving", observer)
    threads = Threads(settings)
    add_route = routes.answer

    def named(request: Request) -> dict[str, Any]:
        parts = request.path_params
        if ":" in parts["model"]:
            raise invalid(f"Malformed request: {request.method} {request.url.path}")
        return {
            "model": parts["model"],
            "number": version_number(parts.get("version")),
            "label": parts.get("label"),
        }

    def asked(request: Request) -> ServedVersion:
        return served_version(catalog, **named(request))

    def inference(work: _Inference, *, ever_small: bool = False) -> Endpoint:
        async def answer(request: Request, caller: Caller) -> Response:
            caller.authorize()
            served = asked(request)
            caller.asks(served)
            limit = settings.body_limit
            body = await read_ids(request.receive, caller.headers, limit)
            encoding = caller.headers.get("content-encoding", "")
            return await threads.run(
                lambda: work(served, _document(decode_ids(body, encoding, limit)), settings, caller),
                # What is packed may be more than it looks.
                small=ever_small and not encoding and is_small(served, len(body)),
            )

        return answer

    async def status(request: Request, caller: Caller) -> Response:
        caller.authorize()
        statuses = model_statuses(catalog, **named(request))
        return json_response(
            {
                "model_version_status": [
                    {
                        "version": str(status.number),
                        "state": status.state,
                        "status": {"error_code": status.error_code, "error_message": status.error_message},
                    }
                    for status in statuses
                ]
            }
        )

    async def metadata(request: Request, caller: Caller) -> Response:
        caller.authorize()
        return json_response(_metadata(asked(request)))

    async def malformed(request: Request, caller: Caller) -> Response:
        if request.method == "GET" and request.url.path.rstrip("/") == "/v1/models":
            raise invalid("Missing model name in request.")
        raise invalid(f"Malformed request: {request.method} {request.url.path}")

    for place in ("", "/versions/{version}", "/labels/{label}"):
        path = f"/v1/models/{{model}}{place}"
        of = place.partition("{")[2].rstrip("}") or "latest version"
        add_route(
            "POST",
            f"{path}:predict",
            inference(_predict, ever_small=True),
            kind="predict",
            summary=f"Predict, by {of}",
            body=_PREDICT,
            answer=_PREDICTED,
        )
        for method, work, answer in (("classify", _classify, _CLASSIFIED), ("regress", _regress, _REGRESSED)):
            add_route(
                "POST",
                f"{path}:{method}",
                inference(work),
                kind=method,
                summary=f"{method.capitalize()} examples, by {of}",
                body=_EXAMPLES,
                answer=answer,
            )
        add_route(
            "GET",
            f"{path}/metadata",
            metadata,
            summary=f"Signatures, by {of}",
            answer=_METADATA,
        )
        summary = f"Status, by {of}" if place else "Status of all versions"
        add_route("GET", path, status, summary=summary, answer=_STATUS)
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        add_route(method, "/v1/models", malformed)
        add_route(method, "/v1/models/{rest:path}", malformed)
    return routes


def _document(body: bytes) -> dict[str, Any]:
    document = load_json(body)
    if not isinstance(document, dict):
        raise invalid(f"JSON Value: {shown(document)} Is not object")
    return document


def _signature(served: ServedVersion, document: dict[str, Any], caller: Caller) -> Signature:
    name = document.get("signature_name", "")
    if not isinstance(name, str):
        raise invalid(
            f"JSON Value: {shown(document)} not formatted correctly. 'signature_name' key must be a string value."
        )
    signature = signature_of(served, name)
    caller.signature = signature.name
    return signature


def _classify(served: ServedVersion, document: dict[str, Any], settings: Settings, caller: Caller) -> Response:
    signature = _signature(served, document, caller)
    labels, scores = classify(signature, from_json(document), settings, caller)
    return blocks_response(classes_text(labels, scores), scores.size)


def _regress(served: ServedVersion, document: dict[str, Any], settings: Settings, caller: Caller) -> Response:
    signature = _signature(served, document, caller)
    values = regress(signature, from_json(document), settings, caller)
    return blocks_response(chain([b'{"results":'], text_blocks(values), [b"}"]), values.size)


def _predict(served: ServedVersion, document: dict[str, Any], settings: Settings, caller: Caller) -> Response:
    signature = _signature(served, document, caller)
    by_rows = "instances" in document
    if by_rows and "inputs" in document:
        raise invalid(
            f"JSON Value: {shown(document)} Not formatted correctly expecting only one of 'inputs' or 'instances'"
            " keys to exist"
        )
    if by_rows:
        inputs = _from_instances(signature, document["instances"])
    elif "inputs" in document:
        inputs = _from_inputs(signature, document["inputs"])
    else:
        raise invalid("Missing 'inputs' or 'instances' key")
    wanted = document.get("output_filter", [])
    if not isinstance(wanted, list) or not all(isinstance(output, str) for output in wanted):
        raise invalid("'output_filter' key must be a list of strings")
    outputs = chosen_outputs(signature, wanted)
    answer = ask(signature, check_inputs(signature, inputs), outputs, settings, caller)
    numbers = sum(array.size for array in answer.values())
    return blocks_response(_rows(answer) if by_rows else _columns(answer), numbers)


def _from_inputs(signature: Signature, value: Any) -> dict[str, Array]:
    if isinstance(value, dict) and not is_base64(value):
        missing = [name for name in signature.inputs if name not in value and name not in defaults_of(signature)]
        if missing:
            raise invalid(f"Missing named input: {missing[0]} in 'inputs' object.")
        for name in value:
            if name not in signature.inputs:
                raise invalid(
                    f"'inputs' object has no use for: {name[:80]}; the signature takes {list(signature.inputs)}"
                )
        return {name: _tensor(signature, name, item) for name, item in value.items()}
    if len(signature.inputs) != 1:
        raise invalid(
            "inputs is a plain value/list, but expecting an object as multiple input tensors required as per"
            " tensorinfo_map"
        )
    name = next(iter(signature.inputs))
    return {name: _tensor(signature, name, value)}


def _from_instances(signature: Signature, instances: Any) -> dict[str, Array]:
    if not isinstance(instances, list):
        raise invalid(f"JSON Value: {shown(instances)} Expecting 'instances' to be an list/array")
    if not instances:
        raise invalid("No values in 'instances' array; 'inputs' may be empty")
    if not _is_object(instances[0]):
        if len(signature.inputs) != 1:
            raise invalid(
                "instances is a plain list, but expecting list of objects as multiple input tensors required as per"
                " tensorinfo_map"
            )
        for place, item in enumerate(instances):
            if _is_object(item):
                raise invalid(f"Expecting value/list but got object at item {place} of input list")
        name = next(iter(signature.inputs))
        return {name: _tensor(signature, name, instances)}
    # Those that may be left out are left out of all rows, or of none.
    names = signature.inputs.keys() - (defaults_of(signature).keys() - instances[0].keys())
    for place, item in enumerate(instances):
        if not _is_object(item):
            raise invalid(f"Expecting object but got list at item {place} of input list")
        if item.keys() != names:
            raise invalid(
                f"Failed to process element: {place} of 'instances' list. JSON object: {shown(item)} keys must be equal"
                f" to: {','.join(sorted(names))}"
            )
    return {name: _tensor(signature, name, [item[name] for item in instances]) for name in names}


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and not is_base64(value)


def _tensor(signature: Signature, name: str, value: Any) -> Array:
    try:
        return tensor(value, signature.inputs[name].dtype)
    except ProtocolError:
        # Ids of a table of uint64 keys may be written as what they are, beside their bits.
        if not signature.takes(name, np.dtype(np.uint64)):
            raise
        return tensor(value, np.dtype(np.uint64))


def _rows(answer: Mapping[str, Array]) -> Iterable[bytes]:
    sizes = {array.shape[:1] for array in answer.values()}
    if len(sizes) != 1 or () in sizes:
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in answer.items())
        raise invalid(f"the outputs have no first dimension in common ({shapes}); ask with 'inputs' for columns")
    if len(answer) == 1:
        return chain([b'{"predictions":'], _text(*next(iter(answer.items()))), [b"}"])
    return chain([b'{"predictions":['], _objects(answer, next(iter(sizes))[0]), [b"]}"])


def _objects(answer: Mapping[str, Array], rows: int) -> Iterator[bytes]:
    heads = [(b"," if place else b"{") + to_json(name) + b":" for place, name in enumerate(answer)]
    numbers = sum(array[:1].size for array in answer.values())
    step = max(1, _NUMBERS_AT_ONCE // max(1, numbers))
    for start in range(0, rows, step):
        columns = [
            [head + text for text in row_texts(array[start : start + step], as_bytes=_is_bytes(name))]
            for head, (name, array) in zip(heads, answer.items(), strict=True)
        ]
        yield (b"," if start else b"") + b"},".join(map(b"".join, zip(*columns, strict=True))) + b"}"


def _columns(answer: Mapping[str, Array]) -> Iterable[bytes]:
    if len(answer) == 1:
        return chain([b'{"outputs":'], _text(*next(iter(answer.items()))), [b"}"])
    columns = (
        chain([(b"," if place else b"") + to_json(name) + b":"], _text(name, array))
        for place, (name, array) in enumerate(answer.items())
    )
    return chain([b'{"outputs":{'], chain.from_iterable(columns), [b"}}"])


def _text(name: str, array: Array) -> Iterator[bytes]:
    return text_blocks(array, as_bytes=_is_bytes(name))


def _is_bytes(name: str) -> bool:
    return name.endswith("_bytes")


def _metadata(served: ServedVersion) -> dict[str, Any]:
    definitions = {
        name: {
            "inputs": {key: _tensor_info(spec) for key, spec in signature.inputs.items()},
            "outputs": {key: _tensor_info(spec) for key, spec in signature.outputs.items()},
            "method_name": signature.method_name,
            "defaults": _as_json(defaults_of(signature)),
        }
        for name, signature in listed(served).items()
    }
    return {
        "model_spec": {"name": served.model, "signature_name": "", "version": str(served.number)},
        "metadata": {"signature_def": {"signature_def": definitions}},
    }


def _as_json(arrays: Mapping[str, Array]) -> dict[str, Any]:
    if not arrays:  # so it is with tables, which need no protobuf
        return {}
    from kvtools.server.tensor_proto import as_json

    return {name: as_json(array) for name, array in arrays.items()}


def _tensor_info(spec: TensorSpec) -> dict[str, Any]:
    return {
        "dtype": TENSORFLOW_TYPES[spec.dtype],
        "tensor_shape": {
            "dim": [{"size": str(size), "name": ""} for size in spec.shape or ()],
            "unknown_rank": spec.shape is None,
        },
        "name": spec.tensor,
    }
