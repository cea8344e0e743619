"""TensorFlow Serving's gRPC services: PredictionService and ModelService.

Protocol: tensorflow_serving/apis of https://github.com/tensorflow/serving.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from kvtools.server.caller import Caller
from kvtools.server.catalog import Catalog, ServedVersion
from kvtools.server.examples import classify, fill_classes, from_message, regress
from kvtools.server.model_status import model_statuses
from kvtools.server.protocol_error import ProtocolError, invalid, of_request
from kvtools.server.protos import DATA_TYPES, message
from kvtools.server.request import RequestError
from kvtools.server.settings import Settings
from kvtools.server.signatures import (
    DEFAULT,
    TENSORFLOW_TYPES,
    Array,
    Signature,
    TensorSpec,
    ask,
    check_inputs,
    chosen_outputs,
    defaults_of,
    listed,
    served_version,
    signature_of,
)
from kvtools.server.sources import MODEL_NAME, ModelSource
from kvtools.server.tensor_proto import decode, encode
from kvtools.server.version_policy import VersionPolicy

Method = Callable[[bytes, Caller], bytes]
_PREDICTION = "/tensorflow.serving.PredictionService"
_MODEL = "/tensorflow.serving.ModelService"
RELOAD = f"{_MODEL}/HandleReloadConfigRequest"  # waits until models are loaded
_SIGNATURE_DEF = "signature_def"
_CODES: dict[str, int] = {
    value.name: value.number
    for value in message("tensorflow.serving.StatusProto").DESCRIPTOR.fields[0].enum_type.values
}
_STATES: dict[str, int] = {
    value.name: value.number
    for value in message("tensorflow.serving.ModelVersionStatus").DESCRIPTOR.enum_types[0].values
}
_CLASSIFY, _REGRESS = "tensorflow/serving/classify", "tensorflow/serving/regress"
_PLATFORMS = ("", "tensorflow")

_PredictRequest = message("tensorflow.serving.PredictRequest")
_PredictResponse = message("tensorflow.serving.PredictResponse")
_ClassificationRequest = message("tensorflow.serving.ClassificationRequest")
_ClassificationResponse = message("tensorflow.serving.ClassificationResponse")
_RegressionRequest = message("tensorflow.serving.RegressionRequest")
_RegressionResponse = message("tensorflow.serving.RegressionResponse")
_MultiRequest = message("tensorflow.serving.MultiInferenceRequest")
_MultiResponse = message("tensorflow.serving.MultiInferenceResponse")
_MetadataRequest = message("tensorflow.serving.GetModelMetadataRequest")
_MetadataResponse = message("tensorflow.serving.GetModelMetadataResponse")
_SignatureDefMap = message("tensorflow.serving.SignatureDefMap")
_StatusRequest = message("tensorflow.serving.GetModelStatusRequest")
_StatusResponse = message("tensorflow.serving.GetModelStatusResponse")
_ReloadRequest = message("tensorflow.serving.ReloadConfigRequest")
_ReloadResponse = message("tensorflow.serving.ReloadConfigResponse")


def parse(kind: Any, data: bytes) -> Any:
    """Parse a message; raises a `ProtocolError` if it is none of its kind."""
    from google.protobuf.message import DecodeError

    try:
        return kind.FromString(data)
    except (DecodeError, UnicodeDecodeError, ValueError):
        raise invalid(f"the request is no {kind.DESCRIPTOR.full_name}") from None


def methods(catalog: Catalog, settings: Settings) -> dict[str, Method]:
    """Return the methods by their full names, from the bytes of a request to those of its answer."""

    def predict(data: bytes, caller: Caller) -> bytes:
        caller.authorize()
        request = parse(_PredictRequest, data)
        if not request.HasField("model_spec"):
            raise invalid("Missing ModelSpec")
        spec = request.model_spec
        served = _served(catalog, spec)
        caller.asks(served)
        signature = signature_of(served, spec.signature_name, code="FAILED_PRECONDITION")
        caller.signature = signature.name
        outputs = chosen_outputs(signature, list(request.output_filter))
        inputs = {name: decode(name, tensor, limit=settings.max_values) for name, tensor in request.inputs.items()}
        answer = ask(signature, check_inputs(signature, inputs), outputs, settings, caller)
        response = _PredictResponse()
        for name, array in answer.items():
            encode(array, response.outputs[name])
        _name(response.model_spec, served, spec.signature_name or DEFAULT)
        return response.SerializeToString()  # type: ignore[no-any-return]

    def asked(spec: Any, caller: Caller) -> tuple[ServedVersion, Signature]:
        served = _served(catalog, spec)
        return served, of_version(served, spec, caller)

    def of_version(served: ServedVersion, spec: Any, caller: Caller) -> Signature:
        caller.asks(served)
        signature = signature_of(served, spec.signature_name)
        caller.signature = signature.name
        return signature

    def classification(data: bytes, caller: Caller) -> bytes:
        caller.authorize()
        request = parse(_ClassificationRequest, data)
        served, signature = asked(request.model_spec, caller)
        response = _ClassificationResponse()
        fill_classes(*classify(signature, from_message(request.input), settings, caller), response.result)
        _name(response.model_spec, served, request.model_spec.signature_name or DEFAULT)
        return response.SerializeToString()  # type: ignore[no-any-return]

    def regression(data: bytes, caller: Caller) -> bytes:
        caller.authorize()
        request = parse(_RegressionRequest, data)
        served, signature = asked(request.model_spec, caller)
        response = _RegressionResponse()
        _fill_values(regress(signature, from_message(request.input), settings, caller), response.result)
        _name(response.model_spec, served, request.model_spec.signature_name or DEFAULT)
        return response.SerializeToString()  # type: ignore[no-any-return]

    def multi_inference(data: bytes, caller: Caller) -> bytes:
        caller.authorize()
        request = parse(_MultiRequest, data)
        if not request.tasks:
            raise invalid("Inference request has no tasks")
        if len({task.model_spec.name for task in request.tasks}) > 1:
            raise invalid("All ModelSpecs in a MultiInferenceRequest must access the same model name.")
        examples = from_message(request.input)
        response = _MultiResponse()
        # Tasks that name the same version get the same one, also where another one comes meanwhile.
        versions: dict[Any, ServedVersion] = {}
        for task in request.tasks:
            spec = task.model_spec
            choice = spec.WhichOneof("version_choice"), spec.version.value, spec.version_label
            served = versions.get(choice) or versions.setdefault(choice, _served(catalog, spec))
            signature = of_version(served, spec, caller)
            result = response.results.add()
            if task.method_name == _CLASSIFY:
                fill_classes(*classify(signature, examples, settings, caller), result.classification_result)
            elif task.method_name == _REGRESS:
                _fill_values(regress(signature, examples, settings, caller), result.regression_result)
            else:
                raise ProtocolError("UNIMPLEMENTED", f"Unsupported signature method_name: {task.method_name[:80]}")
            _name(result.model_spec, served, task.model_spec.signature_name or DEFAULT)
        return response.SerializeToString()  # type: ignore[no-any-return]

    def metadata(data: bytes, caller: Caller) -> bytes:
        caller.authorize()
        request = parse(_MetadataRequest, data)
        if not request.HasField("model_spec"):
            raise invalid("Missing ModelSpec")
        if not request.metadata_field:
            raise invalid("GetModelMetadataRequest must specify at least one metadata_field")
        for field in request.metadata_field:
            if field != _SIGNATURE_DEF:
                raise invalid(f"Metadata field {field} is not supported")
        served = _served(catalog, request.model_spec)
        response = _MetadataResponse()
        _name(response.model_spec, served, "")
        packed = response.metadata[_SIGNATURE_DEF]
        packed.type_url = "type.googleapis.com/tensorflow.serving.SignatureDefMap"
        packed.value = signature_def_map(served)
        return response.SerializeToString()  # type: ignore[no-any-return]

    def status(data: bytes, caller: Caller) -> bytes:
        caller.authorize()
        request = parse(_StatusRequest, data)
        if not request.HasField("model_spec"):
            raise invalid("Missing ModelSpec")
        spec = request.model_spec
        choice = spec.WhichOneof("version_choice")
        statuses = model_statuses(
            catalog,
            spec.name,
            number=spec.version.value if choice == "version" else None,
            label=spec.version_label if choice == "version_label" else None,
        )
        response = _StatusResponse()
        for each in statuses:
            entry = response.model_version_status.add(version=each.number, state=_STATES[each.state])
            entry.status.error_code = _CODES.get(each.error_code, _CODES["UNKNOWN"])
            entry.status.error_message = each.error_message
        return response.SerializeToString()  # type: ignore[no-any-return]

    def reload(data: bytes, caller: Caller) -> bytes:
        caller.changes()
        if not settings.admin:
            raise ProtocolError(
                "PERMISSION_DENIED",
                "models are not changed by requests here; start the server with --admin to allow it",
            )
        request = parse(_ReloadRequest, data)
        _reload(catalog, settings, model_sources(request.config))
        response = _ReloadResponse()
        response.status.error_code = _CODES["OK"]
        for name in request.metric_names:
            response.metric.add(name=name).int64_value_increase = 0
        return response.SerializeToString()  # type: ignore[no-any-return]

    return {
        f"{_PREDICTION}/Predict": predict,
        f"{_PREDICTION}/GetModelMetadata": metadata,
        f"{_MODEL}/GetModelStatus": status,
        RELOAD: reload,
        f"{_PREDICTION}/Classify": classification,
        f"{_PREDICTION}/Regress": regression,
        f"{_PREDICTION}/MultiInference": multi_inference,
    }


def _served(catalog: Catalog, spec: Any) -> ServedVersion:
    if not spec.name:
        raise invalid("ModelSpec has no name specified.")
    choice = spec.WhichOneof("version_choice")
    return served_version(
        catalog,
        spec.name,
        number=spec.version.value if choice == "version" else None,
        label=spec.version_label if choice == "version_label" else None,
    )


def _fill_values(values: Array, result: Any) -> None:
    for value in values.tolist():
        result.regressions.add(value=value)


def _name(spec: Any, served: ServedVersion, signature: str) -> None:
    spec.name = served.model
    spec.signature_name = signature
    spec.version.value = served.number


def signature_def_map(served: ServedVersion) -> bytes:
    """Return the signatures of a version as the bytes of a SignatureDefMap."""
    definitions = _SignatureDefMap()
    for name, signature in listed(served).items():
        definition = definitions.signature_def[name]
        definition.method_name = signature.method_name
        for specs, infos in ((signature.inputs, definition.inputs), (signature.outputs, definition.outputs)):
            for key, spec in specs.items():
                _tensor_info(spec, infos[key])
        for key, array in defaults_of(signature).items():
            encode(array, definition.defaults[key])
    return definitions.SerializeToString()  # type: ignore[no-any-return]


def _tensor_info(spec: TensorSpec, info: Any) -> None:
    info.name = spec.tensor
    info.dtype = DATA_TYPES[TENSORFLOW_TYPES[spec.dtype]]
    if spec.shape is None:
        info.tensor_shape.unknown_rank = True
        return
    info.tensor_shape.SetInParent()
    for size in spec.shape:
        info.tensor_shape.dim.add().size = size


def model_sources(config: Any) -> list[ModelSource]:
    """Return what a ModelServerConfig says is to be served; raises a `ProtocolError` for what cannot be done here."""
    if config.WhichOneof("config") != "model_config_list":
        raise invalid(
            "ServerModelConfig type not supported by HandleReloadConfigRequest. Only ModelConfigList is currently"
            " supported"
        )
    sources: list[ModelSource] = []
    for model in config.model_config_list.config:
        if not model.name:
            raise invalid("a ModelConfig has no name")
        if not MODEL_NAME.fullmatch(model.name):
            raise invalid(f"model {model.name[:200]!r}: expected a name of letters, digits and any of _ . -")
        if any(source.name == model.name for source in sources):
            raise invalid(f"Illegal to list model {model.name} multiple times in config list")
        if not model.base_path:
            raise invalid(f"model {model.name}: its ModelConfig has no base_path")
        if model.model_platform not in _PLATFORMS:
            raise invalid(f"Model {model.name} requests unsupported platform {model.model_platform}")
        if model.logging_config:
            raise ProtocolError("UNIMPLEMENTED", f"model {model.name}: logging_config: requests are not logged here")
        for label, number in model.version_labels.items():
            if not label or number < 0:
                raise invalid(f"model {model.name}: label '{label}' of version {number}")
        sources.append(ModelSource(model.name, model.base_path, _policy(model), dict(model.version_labels)))
    return sources


def _policy(model: Any) -> VersionPolicy:
    policy = model.model_version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return VersionPolicy("all")
    if choice == "specific":
        numbers = tuple(sorted(set(policy.specific.versions)))
        if not numbers or numbers[0] < 0:
            raise invalid(f"model {model.name}: the policy 'specific' needs version numbers")
        return VersionPolicy("specific", numbers=numbers)
    return VersionPolicy("latest", policy.latest.num_versions or 1)


def _reload(catalog: Catalog, settings: Settings, sources: list[ModelSource]) -> None:
    if catalog.changes is None:
        raise ProtocolError(
            "FAILED_PRECONDITION", "this server serves one model as it was at start; start it on folders"
        )
    for source in sources:
        for label, number in source.labels.items():
            available = source.name in catalog.names() and any(
                version.number == number for version in catalog.versions(source.name)
            )
            if source.name in catalog.names() and not available:
                raise ProtocolError(
                    "FAILED_PRECONDITION",
                    f"Request to assign label to version {number} of model {source.name}, which is not currently"
                    f" available for inference (label '{label}')",
                )
    try:
        failed = catalog.changes.reload(sources).result(timeout=settings.grace)
    except RequestError as error:
        raise of_request(error) from None
    except FutureTimeoutError:
        raise ProtocolError(
            "DEADLINE_EXCEEDED", "the new models are still being loaded; GetModelStatus tells how far they are"
        ) from None
    if failed:
        name, reason = next(iter(failed.items()))
        named = {source.name for source in sources}
        kept = [other for other in catalog.names() if other not in named and other not in catalog.follows]
        still = f"; {', '.join(kept)}, which the list leaves out, is still served" if kept else ""
        raise ProtocolError("UNKNOWN", f"model {name} cannot be served: {reason}{still}")
