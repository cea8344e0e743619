"""What Triton's extensions of the Open Inference Protocol tell of models: the index, statistics, and configuration.

Each is told as far as it is known, the same over REST and gRPC. What Triton has beyond them (loading models, shared
memory, tracing, logging, streams) is refused by name.

https://github.com/triton-inference-server/server/tree/main/docs/protocol
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtools.server.caller import Caller
from kvtools.server.catalog import Catalog, ServedVersion
from kvtools.server.inference_protocol import find_model, model_metadata
from kvtools.server.observer import Inferences
from kvtools.server.protocol_error import ProtocolError
from kvtools.server.signatures import DEFAULT, listed, signature_of

_STATES = {"AVAILABLE": "READY", "START": "LOADING", "LOADING": "LOADING", "UNLOADING": "UNLOADING"}
_TYPES = {"BYTES": "TYPE_STRING"}  # others are the protocol's, behind TYPE_

#: What is refused, by the method of `GRPCInferenceService` and by how its paths begin or end under `/v2/`.
_REFUSED = {
    ("RepositoryModelLoad", "RepositoryModelUnload"): "models are loaded by what `kvtools serve` is started with and"
    " watches (--poll), or by TensorFlow Serving's HandleReloadConfigRequest",
    (
        "SystemSharedMemoryStatus",
        "SystemSharedMemoryRegister",
        "SystemSharedMemoryUnregister",
        "CudaSharedMemoryStatus",
        "CudaSharedMemoryRegister",
        "CudaSharedMemoryUnregister",
    ): "shared memory is not there: send the values",
    ("TraceSetting",): "requests are not traced; --access-log writes a line for each",
    ("LogSettings",): "logs are set by the options of `kvtools serve`",
    ("ModelStreamInfer",): "streams are not there: ask by ModelInfer",
}
REFUSED = {method: reason for methods, reason in _REFUSED.items() for method in methods}
#: The same of REST: paths under `/v2/`, and the method of gRPC whose reason is theirs.
REFUSED_PATHS = {
    "repository/models/{model:path}/load": "RepositoryModelLoad",
    "repository/models/{model:path}/unload": "RepositoryModelUnload",
    "systemsharedmemory/{rest:path}": "SystemSharedMemoryStatus",
    "cudasharedmemory/{rest:path}": "CudaSharedMemoryStatus",
    "trace/setting": "TraceSetting",
    "models/{model:path}/trace/setting": "TraceSetting",
    "logging": "LogSettings",
}


def refusal(what: str, method: str) -> ProtocolError:
    """Return the error for `what`, a call of Triton's that is not there."""
    return ProtocolError("UNIMPLEMENTED", f"{what}: {REFUSED[method]}")


def repository_index(catalog: Catalog, *, ready: bool = False) -> list[dict[str, str]]:
    """Return the versions of all models, and of the tables that are models of their own; `ready`: those that answer."""
    entries = []
    for model in catalog.names():
        for status in catalog.status(model):
            state = _STATES.get(status.state, "UNAVAILABLE")
            if state == "READY" or not ready:
                entries.append(
                    {
                        "name": model,
                        "version": str(status.number),
                        "state": state,
                        "reason": status.error_message,
                    }
                )
        for served in catalog.versions(model):
            entries += [
                {"name": name, "version": str(served.number), "state": "READY", "reason": ""}
                for name in _own_names(catalog, served)
            ]
    return entries


def model_statistics(catalog: Catalog, caller: Caller, name: str, version: str) -> list[dict[str, Any]]:
    """Return how often models were asked, and how long it took, by name and version ('': all of them).

    Counted are requests in this protocol and TensorFlow Serving's, since the start. Raises a `ProtocolError`.
    """
    counted = caller.observer.inferences()
    if counted is None:
        raise ProtocolError("UNAVAILABLE", "this server keeps no statistics")
    if name:
        found, own = find_model(catalog, name, version)
        versions = [found] if version else catalog.versions(found.model)
        return [_statistics(name, served, own, counted) for served in versions]
    every = []
    for model in catalog.names():
        for served in catalog.versions(model):
            every.append(_statistics(model, served, "", counted))
            every += [_statistics(each, served, each, counted) for each in _own_names(catalog, served)]
    return every


def _own_names(catalog: Catalog, served: ServedVersion) -> list[str]:
    """Return under which names the signatures of a version are models of their own."""
    names = []
    for name in listed(served):
        if name != DEFAULT and name not in catalog.names():
            found, _ = find_model(catalog, name, str(served.number))
            if found.model == served.model:
                names.append(name)
    return names


def _statistics(
    name: str, served: ServedVersion, own: str, counted: Mapping[tuple[str, int, str], Inferences]
) -> dict[str, Any]:
    signature = signature_of(served, own).name if own else ""
    total = Inferences()
    for (model, number, asked), each in counted.items():
        if (model, number) == (served.model, served.number) and (not own or asked == signature):
            total.add(each)
    return {
        "name": name,
        "version": str(served.number),
        "last_inference": total.last,
        "inference_count": total.answers,
        "execution_count": total.answers,
        "inference_stats": {
            "success": {"count": total.answers, "ns": total.answers_ns},
            "fail": {"count": total.errors, "ns": total.errors_ns},
        },
        "batch_stats": [],
    }


def model_configuration(catalog: Catalog, name: str, version: str) -> dict[str, Any]:
    """Return what Triton's clients want to know of a model's configuration; raises a `ProtocolError`."""
    metadata = model_metadata(catalog, name, version)

    def tensors(described: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {
                "name": each["name"],
                "data_type": _TYPES.get(each["datatype"], f"TYPE_{each['datatype']}"),
                "dims": each["shape"],
            }
            for each in described
        ]

    return {
        "name": name,
        "platform": metadata["platform"],
        "max_batch_size": 0,  # requests are not put together, and shapes are as they are said
        "input": tensors(metadata["inputs"]),
        "output": tensors(metadata["outputs"]),
    }
