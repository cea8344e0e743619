"""What REST and gRPC of the Open Inference Protocol (KServe v2) have in common: models by name, tensors, metadata.

A table is asked as its model with the parameter `signature_name`, or as a model of its own under its name or that of
its signature, unless several models have one of that name. All outputs are answered unless some are named. A tensor of
an unknown number of dimensions, such as `ids`, shows as [-1] in the metadata, where the protocol has no word for it.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvtools import __version__
from kvtools.server.caller import Caller
from kvtools.server.catalog import Catalog, ServedVersion, UnknownModelError, UnknownVersionError
from kvtools.server.protocol_error import ProtocolError, invalid
from kvtools.server.raw_tensor import raw_array
from kvtools.server.settings import Settings
from kvtools.server.signatures import (
    DEFAULT,
    FROM_INFERENCE,
    INFERENCE_TYPES,
    STRING,
    AllTables,
    Array,
    Signature,
    TableSignature,
    TensorSpec,
    ask,
    check_inputs,
    chosen_outputs,
    listed,
    signature_of,
    signatures,
)

SERVER = {
    "name": "kvtools",
    "version": __version__,
    "extensions": ["binary_tensor_data", "model_configuration", "statistics"],
}
_LENGTH = struct.Struct("<I")
_NUMBER = re.compile(r"[0-9]{1,19}", re.ASCII)
_NOT_HERE = {
    "shared_memory_region": "shared memory is not there: send the values",
    "classification": "classification is not there: ask for the output as it is",
    "sequence_id": "sequences are not there: every request stands for itself",
}


def find_model(catalog: Catalog, name: str, version: str) -> tuple[ServedVersion, str]:
    """Return what the model `name` is, and the signature that its name stands for ('' for a model as a whole).

    `version` is a number, a label, or '' for the latest. Raises a `ProtocolError`.
    """
    models = catalog.names()
    if name in models:
        models = [name]
    elif len(models) > 1:
        models = [model for model in models if _has_signature(catalog, model, name)]
        if len(models) > 1:
            there = ", ".join(f"'{model}'" for model in models)
            raise invalid(f"'{name}' is in the models {there}: ask one of them, with parameter signature_name '{name}'")
    for model in models:
        try:
            served = _version(catalog, model, version)
        except (UnknownModelError, UnknownVersionError):
            continue
        if name == model:
            return served, ""
        if name in signatures(served) and name != DEFAULT:
            return served, name
    of = f" version {version}" if version else ""
    raise ProtocolError("NOT_FOUND", f"Request for unknown model: '{name}'{of} is not found")


def _has_signature(catalog: Catalog, model: str, name: str) -> bool:
    try:
        return name != DEFAULT and any(name in signatures(served) for served in catalog.versions(model))
    except UnknownModelError:  # it is gone
        return False


def _version(catalog: Catalog, model: str, version: str) -> ServedVersion:
    if not version:
        return catalog.version(model)
    if _NUMBER.fullmatch(version):
        return catalog.version(model, number=int(version))
    return catalog.version(model, label=version)


def model_metadata(catalog: Catalog, name: str, version: str) -> dict[str, Any]:
    """Return what the protocol tells of a model; raises a `ProtocolError` for one that is several signatures."""
    served, own = find_model(catalog, name, version)
    there = listed(served)
    if not own and DEFAULT not in there:
        some = ", ".join(f"'{signature}'" for signature in list(there)[:20])
        raise ProtocolError(
            "FAILED_PRECONDITION",
            f"model '{name}' has the signatures {some} and none of them by default: ask for one as a model of its own",
        )
    signature = signature_of(served, own)
    return {
        "name": name,
        "versions": [str(each.number) for each in catalog.versions(served.model)],
        "platform": "kvtools_table" if isinstance(signature, (TableSignature, AllTables)) else "tensorflow_savedmodel",
        "inputs": [_tensor_metadata(key, spec) for key, spec in signature.inputs.items()],
        "outputs": [_tensor_metadata(key, spec) for key, spec in signature.outputs.items()],
    }


def _tensor_metadata(name: str, spec: TensorSpec) -> dict[str, Any]:
    shape = [-1] if spec.shape is None else list(spec.shape)
    if spec.shape is None and spec.dim is not None:
        shape.append(spec.dim)
    return {"name": name, "datatype": INFERENCE_TYPES[spec.dtype], "shape": shape}


def signature_named(served: ServedVersion, own: str, parameters: Mapping[str, Any]) -> Signature:
    """Return the signature that a request is for, by its model's name and its parameters."""
    refuse_extensions(parameters)
    named = parameters.get("signature_name", "")
    if not isinstance(named, str):
        raise invalid("parameter 'signature_name': expected a string")
    if own and named and signature_of(served, named) is not signature_of(served, own):
        raise invalid(f"the model is the signature '{own}', and parameter 'signature_name' says '{named}'")
    return signature_of(served, own or named)


def refuse_extensions(parameters: Mapping[str, Any]) -> None:
    """Raise a `ProtocolError` if parameters ask for what is not there."""
    for name, reason in _NOT_HERE.items():
        if parameters.get(name):
            raise ProtocolError("UNIMPLEMENTED", f"parameter '{name}': {reason}", status=400)


def run(
    signature: Signature, inputs: Mapping[str, Array], outputs: Sequence[str], settings: Settings, caller: Caller
) -> dict[str, Array]:
    """Answer with the outputs that are named, or with all; raises a `ProtocolError`."""
    wanted = chosen_outputs(signature, list(outputs))
    return ask(signature, check_inputs(signature, inputs), wanted, settings, caller)


def tensor_type(name: str, datatype: Any) -> np.dtype[Any]:
    """Return the type of an input; raises a `ProtocolError` if the protocol has none of that name."""
    dtype = FROM_INFERENCE.get(datatype) if isinstance(datatype, str) else None
    if dtype is None:
        raise invalid(
            f"input '{name}': got datatype {str(datatype)[:40]!r}, expected one of {', '.join(FROM_INFERENCE)}"
        )
    return dtype


def tensor_shape(name: str, shape: Sequence[Any], settings: Settings) -> list[int]:
    """Return the shape of an input, checked; raises a `ProtocolError`."""
    sizes = list(shape)
    if len(sizes) > 32 or any(type(size) is not int or not 0 <= size < 1 << 40 for size in sizes):
        raise invalid(f"input '{name}': expected a shape of sizes from 0, got {str(sizes)[:80]}")
    if math.prod(sizes) > settings.max_values:
        raise ProtocolError(
            "INVALID_ARGUMENT",
            f"input '{name}': got shape {sizes}, expected at most {settings.max_values} values; send several requests",
            status=413,
        )
    return sizes


def from_bytes(name: str, data: bytes | memoryview, dtype: np.dtype[Any], shape: list[int]) -> Array:
    """Return the array whose raw little-endian values, or strings each behind its length, `data` is."""
    if dtype == STRING:
        return _strings(name, bytes(data), math.prod(shape)).reshape(shape)
    return raw_array(name, data, dtype, shape, of=INFERENCE_TYPES[dtype])


def _strings(name: str, data: bytes, count: int) -> Array:
    strings = []
    place = 0
    while place < len(data):
        end = place + _LENGTH.size
        if end <= len(data):
            start, end = end, end + _LENGTH.unpack_from(data, place)[0]
        if end > len(data):
            raise invalid(f"input '{name}': its last string is cut off")
        strings.append(data[start:end])
        place = end
    if len(strings) != count:
        raise invalid(f"input '{name}': got {len(strings)} strings, expected {count}")
    array = np.empty(count, STRING)
    array[:] = strings
    return array


def to_bytes(array: Array) -> bytes:
    """Return an array's values as raw bytes, strings each behind its length."""
    if array.dtype != STRING:
        return array.tobytes()
    values = [value if isinstance(value, bytes) else str(value).encode() for value in array.flat]
    return b"".join(_LENGTH.pack(len(value)) + value for value in values)
