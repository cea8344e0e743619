"""The messages of TensorFlow Serving's and of the Open Inference Protocol's gRPC, without their packages.

They are described here by the facts that the wire needs (names, numbers and types of fields) and built in a
descriptor pool of their own: a process that imports TensorFlow, or `tensorflow_serving`, has messages of the
same names in protobuf's default pool, and the two never meet. Messages leave out fields that this server has
no use for; protobuf keeps what it does not know.

A message is a tuple of lines, `TYPE NAME NUMBER`, where TYPE is a scalar, `map<SCALAR,TYPE>`, a full name
(leading dot) or a name in the same file; `repeated` and `oneof GROUP` stand in front. A nested message or
enumeration is a mapping.

Sources of the facts: tensorflow/core/framework/{types,tensor_shape,tensor}.proto, tensorflow/core/example/*.proto,
tensorflow/core/protobuf/{meta_graph,error_codes}.proto, tensorflow_serving/{apis,config}/*.proto and
https://github.com/kserve/open-inference-protocol (open_inference_grpc.proto), and for Triton's extensions
https://github.com/triton-inference-server/common/tree/main/protobuf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from google.protobuf import any_pb2, descriptor_pb2, descriptor_pool, message_factory, wrappers_pb2

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "double": _Field.TYPE_DOUBLE,
    "float": _Field.TYPE_FLOAT,
    "int64": _Field.TYPE_INT64,
    "uint64": _Field.TYPE_UINT64,
    "int32": _Field.TYPE_INT32,
    "uint32": _Field.TYPE_UINT32,
    "bool": _Field.TYPE_BOOL,
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
}


@dataclass(frozen=True)
class _File:
    package: str
    imports: tuple[str, ...] = ()
    enums: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    messages: Mapping[str, Any] = field(default_factory=dict)
    services: Mapping[str, Mapping[str, tuple[str, str]]] = field(default_factory=dict)


_TENSORFLOW = _File(
    package="tensorflow",
    enums={
        "DataType": {
            "DT_INVALID": 0,
            "DT_FLOAT": 1,
            "DT_DOUBLE": 2,
            "DT_INT32": 3,
            "DT_UINT8": 4,
            "DT_INT16": 5,
            "DT_INT8": 6,
            "DT_STRING": 7,
            "DT_COMPLEX64": 8,
            "DT_INT64": 9,
            "DT_BOOL": 10,
            "DT_BFLOAT16": 14,
            "DT_UINT16": 17,
            "DT_COMPLEX128": 18,
            "DT_HALF": 19,
            "DT_RESOURCE": 20,
            "DT_VARIANT": 21,
            "DT_UINT32": 22,
            "DT_UINT64": 23,
        }
    },
    messages={
        "TensorShapeProto": (
            "repeated Dim dim 2",
            "bool unknown_rank 3",
            {"Dim": ("int64 size 1", "string name 2")},
        ),
        "TensorProto": (
            "DataType dtype 1",
            "TensorShapeProto tensor_shape 2",
            "int32 version_number 3",
            "bytes tensor_content 4",
            "repeated float float_val 5",
            "repeated double double_val 6",
            "repeated int32 int_val 7",
            "repeated bytes string_val 8",
            "repeated float scomplex_val 9",
            "repeated int64 int64_val 10",
            "repeated bool bool_val 11",
            "repeated double dcomplex_val 12",
            "repeated int32 half_val 13",
            "repeated uint32 uint32_val 16",
            "repeated uint64 uint64_val 17",
        ),
        "TensorInfo": (
            "oneof encoding string name 1",
            "DataType dtype 2",
            "TensorShapeProto tensor_shape 3",
        ),
        "SignatureDef": (
            "map<string,TensorInfo> inputs 1",
            "map<string,TensorInfo> outputs 2",
            "string method_name 3",
            "map<string,TensorProto> defaults 4",
        ),
        "BytesList": ("repeated bytes value 1",),
        "FloatList": ("repeated float value 1",),
        "Int64List": ("repeated int64 value 1",),
        "Feature": (
            "oneof kind BytesList bytes_list 1",
            "oneof kind FloatList float_list 2",
            "oneof kind Int64List int64_list 3",
        ),
        "Features": ("map<string,Feature> feature 1",),
        "Example": ("Features features 1",),
    },
)
_TENSORFLOW_ERRORS = _File(
    package="tensorflow.error",
    enums={
        "Code": {
            "OK": 0,
            "CANCELLED": 1,
            "UNKNOWN": 2,
            "INVALID_ARGUMENT": 3,
            "DEADLINE_EXCEEDED": 4,
            "NOT_FOUND": 5,
            "ALREADY_EXISTS": 6,
            "PERMISSION_DENIED": 7,
            "RESOURCE_EXHAUSTED": 8,
            "FAILED_PRECONDITION": 9,
            "ABORTED": 10,
            "OUT_OF_RANGE": 11,
            "UNIMPLEMENTED": 12,
            "INTERNAL": 13,
            "UNAVAILABLE": 14,
            "DATA_LOSS": 15,
            "UNAUTHENTICATED": 16,
        }
    },
)
_TENSORFLOW_SERVING = _File(
    package="tensorflow.serving",
    imports=(
        "kvtools/tensorflow.proto",
        "kvtools/tensorflow.error.proto",
        any_pb2.DESCRIPTOR.name,
        wrappers_pb2.DESCRIPTOR.name,
    ),
    messages={
        "ModelSpec": (
            "string name 1",
            "oneof version_choice .google.protobuf.Int64Value version 2",
            "string signature_name 3",
            "oneof version_choice string version_label 4",
        ),
        "PredictRequest": (
            "ModelSpec model_spec 1",
            "map<string,.tensorflow.TensorProto> inputs 2",
            "repeated string output_filter 3",
        ),
        "PredictResponse": (
            "map<string,.tensorflow.TensorProto> outputs 1",
            "ModelSpec model_spec 2",
        ),
        "ExampleList": ("repeated .tensorflow.Example examples 1",),
        "ExampleListWithContext": (
            "repeated .tensorflow.Example examples 1",
            ".tensorflow.Example context 2",
        ),
        "Input": (
            "oneof kind ExampleList example_list 1",
            "oneof kind ExampleListWithContext example_list_with_context 2",
        ),
        "Class": ("string label 1", "float score 2"),
        "Classifications": ("repeated Class classes 1",),
        "ClassificationResult": ("repeated Classifications classifications 1",),
        "ClassificationRequest": ("ModelSpec model_spec 1", "Input input 2"),
        "ClassificationResponse": ("ClassificationResult result 1", "ModelSpec model_spec 2"),
        "Regression": ("float value 1",),
        "RegressionResult": ("repeated Regression regressions 1",),
        "RegressionRequest": ("ModelSpec model_spec 1", "Input input 2"),
        "RegressionResponse": ("RegressionResult result 1", "ModelSpec model_spec 2"),
        "InferenceTask": ("ModelSpec model_spec 1", "string method_name 2"),
        "InferenceResult": (
            "ModelSpec model_spec 1",
            "oneof result ClassificationResult classification_result 2",
            "oneof result RegressionResult regression_result 3",
        ),
        "MultiInferenceRequest": ("repeated InferenceTask tasks 1", "Input input 2"),
        "MultiInferenceResponse": ("repeated InferenceResult results 1",),
        "SignatureDefMap": ("map<string,.tensorflow.SignatureDef> signature_def 1",),
        "GetModelMetadataRequest": ("ModelSpec model_spec 1", "repeated string metadata_field 2"),
        "GetModelMetadataResponse": (
            "ModelSpec model_spec 1",
            "map<string,.google.protobuf.Any> metadata 2",
        ),
        "StatusProto": (".tensorflow.error.Code error_code 1", "string error_message 2"),
        "GetModelStatusRequest": ("ModelSpec model_spec 1",),
        "ModelVersionStatus": (
            "int64 version 1",
            "State state 2",
            "StatusProto status 3",
            {
                "State": {
                    "UNKNOWN": 0,
                    "START": 10,
                    "LOADING": 20,
                    "AVAILABLE": 30,
                    "UNLOADING": 40,
                    "END": 50,
                }
            },
        ),
        "GetModelStatusResponse": ("repeated ModelVersionStatus model_version_status 1",),
        "FileSystemStoragePathSourceConfig": (
            {
                "ServableVersionPolicy": (
                    "oneof policy_choice Latest latest 100",
                    "oneof policy_choice All all 101",
                    "oneof policy_choice Specific specific 102",
                    {
                        "Latest": ("uint32 num_versions 1",),
                        "All": (),
                        "Specific": ("repeated int64 versions 1",),
                    },
                )
            },
        ),
        "ModelConfig": (
            "string name 1",
            "string base_path 2",
            "int32 model_type 3",
            "string model_platform 4",
            "bytes logging_config 6",
            "FileSystemStoragePathSourceConfig.ServableVersionPolicy model_version_policy 7",
            "map<string,int64> version_labels 8",
        ),
        "ModelConfigList": ("repeated ModelConfig config 1",),
        "ModelServerConfig": (
            "oneof config ModelConfigList model_config_list 1",
            "oneof config .google.protobuf.Any custom_model_config 2",
        ),
        "ReloadConfigRequest": ("ModelServerConfig config 1", "repeated string metric_names 2"),
        "Metric": ("string name 1", "oneof value_increase int64 int64_value_increase 2"),
        "ReloadConfigResponse": ("StatusProto status 1", "repeated Metric metric 2"),
    },
    services={
        "PredictionService": {
            "Classify": ("ClassificationRequest", "ClassificationResponse"),
            "Regress": ("RegressionRequest", "RegressionResponse"),
            "MultiInference": ("MultiInferenceRequest", "MultiInferenceResponse"),
            "Predict": ("PredictRequest", "PredictResponse"),
            "GetModelMetadata": ("GetModelMetadataRequest", "GetModelMetadataResponse"),
        },
        "ModelService": {
            "GetModelStatus": ("GetModelStatusRequest", "GetModelStatusResponse"),
            "HandleReloadConfigRequest": ("ReloadConfigRequest", "ReloadConfigResponse"),
        },
    },
)
INFERENCE_METHODS = (
    "ServerLive",
    "ServerReady",
    "ModelReady",
    "ServerMetadata",
    "ModelMetadata",
    "ModelInfer",
    "ModelConfig",
    "ModelStatistics",
    "RepositoryIndex",
)
_INFERENCE = _File(
    package="inference",
    enums={
        "DataType": {
            "TYPE_INVALID": 0,
            "TYPE_BOOL": 1,
            "TYPE_UINT8": 2,
            "TYPE_UINT16": 3,
            "TYPE_UINT32": 4,
            "TYPE_UINT64": 5,
            "TYPE_INT8": 6,
            "TYPE_INT16": 7,
            "TYPE_INT32": 8,
            "TYPE_INT64": 9,
            "TYPE_FP16": 10,
            "TYPE_FP32": 11,
            "TYPE_FP64": 12,
            "TYPE_STRING": 13,
            "TYPE_BF16": 14,
        }
    },
    messages={
        "ServerLiveRequest": (),
        "ServerLiveResponse": ("bool live 1",),
        "ServerReadyRequest": (),
        "ServerReadyResponse": ("bool ready 1",),
        "ModelReadyRequest": ("string name 1", "string version 2"),
        "ModelReadyResponse": ("bool ready 1",),
        "ServerMetadataRequest": (),
        "ServerMetadataResponse": ("string name 1", "string version 2", "repeated string extensions 3"),
        "ModelMetadataRequest": ("string name 1", "string version 2"),
        "ModelMetadataResponse": (
            "string name 1",
            "repeated string versions 2",
            "string platform 3",
            "repeated TensorMetadata inputs 4",
            "repeated TensorMetadata outputs 5",
            "map<string,string> properties 6",
            {"TensorMetadata": ("string name 1", "string datatype 2", "repeated int64 shape 3")},
        ),
        "InferParameter": (
            "oneof parameter_choice bool bool_param 1",
            "oneof parameter_choice int64 int64_param 2",
            "oneof parameter_choice string string_param 3",
            "oneof parameter_choice double double_param 4",
            "oneof parameter_choice uint64 uint64_param 5",
        ),
        "InferTensorContents": (
            "repeated bool bool_contents 1",
            "repeated int32 int_contents 2",
            "repeated int64 int64_contents 3",
            "repeated uint32 uint_contents 4",
            "repeated uint64 uint64_contents 5",
            "repeated float fp32_contents 6",
            "repeated double fp64_contents 7",
            "repeated bytes bytes_contents 8",
        ),
        "ModelInferRequest": (
            "string model_name 1",
            "string model_version 2",
            "string id 3",
            "map<string,InferParameter> parameters 4",
            "repeated InferInputTensor inputs 5",
            "repeated InferRequestedOutputTensor outputs 6",
            "repeated bytes raw_input_contents 7",
            {
                "InferInputTensor": (
                    "string name 1",
                    "string datatype 2",
                    "repeated int64 shape 3",
                    "map<string,InferParameter> parameters 4",
                    "InferTensorContents contents 5",
                ),
                "InferRequestedOutputTensor": ("string name 1", "map<string,InferParameter> parameters 2"),
            },
        ),
        "ModelInferResponse": (
            "string model_name 1",
            "string model_version 2",
            "string id 3",
            "map<string,InferParameter> parameters 4",
            "repeated InferOutputTensor outputs 5",
            "repeated bytes raw_output_contents 6",
            {
                "InferOutputTensor": (
                    "string name 1",
                    "string datatype 2",
                    "repeated int64 shape 3",
                    "map<string,InferParameter> parameters 4",
                    "InferTensorContents contents 5",
                )
            },
        ),
        "ModelConfigRequest": ("string name 1", "string version 2"),
        "ModelInput": ("string name 1", "DataType data_type 2", "repeated int64 dims 4"),
        "ModelOutput": ("string name 1", "DataType data_type 2", "repeated int64 dims 3"),
        "ModelConfig": (
            "string name 1",
            "string platform 2",
            "int32 max_batch_size 4",
            "repeated ModelInput input 5",
            "repeated ModelOutput output 6",
        ),
        "ModelConfigResponse": ("ModelConfig config 1",),
        "ModelStatisticsRequest": ("string name 1", "string version 2"),
        "StatisticDuration": ("uint64 count 1", "uint64 ns 2"),
        "InferStatistics": ("StatisticDuration success 1", "StatisticDuration fail 2"),
        "InferBatchStatistics": ("uint64 batch_size 1",),
        "ModelStatistics": (
            "string name 1",
            "string version 2",
            "uint64 last_inference 3",
            "uint64 inference_count 4",
            "uint64 execution_count 5",
            "InferStatistics inference_stats 6",
            "repeated InferBatchStatistics batch_stats 7",
        ),
        "ModelStatisticsResponse": ("repeated ModelStatistics model_stats 1",),
        "RepositoryIndexRequest": ("string repository_name 1", "bool ready 2"),
        "RepositoryIndexResponse": (
            "repeated ModelIndex models 1",
            {"ModelIndex": ("string name 1", "string version 2", "string state 3", "string reason 4")},
        ),
    },
    services={
        "GRPCInferenceService": {method: (f"{method}Request", f"{method}Response") for method in INFERENCE_METHODS}
    },
)
SERVICES = tuple(f"{f.package}.{name}" for f in (_TENSORFLOW_SERVING, _INFERENCE) for name in f.services)


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


class _Builder:
    """Turns the lines of one file into descriptors."""

    def __init__(self, file: _File) -> None:
        self._package = file.package
        self._kinds: dict[str, str] = {}
        for name in file.enums:
            self._kinds[f".{file.package}.{name}"] = "enum"
        for name, lines in file.messages.items():
            self._note(f".{file.package}.{name}", lines)
        self.proto = descriptor_pb2.FileDescriptorProto(
            name=f"kvtools/{file.package}.proto",
            package=file.package,
            syntax="proto3",
            dependency=list(file.imports),
        )
        for name, values in file.enums.items():
            self._enum(self.proto.enum_type.add(), name, values)
        for name, lines in file.messages.items():
            self._message(self.proto.message_type.add(), f".{file.package}.{name}", lines)
        for name, methods in file.services.items():
            service = self.proto.service.add(name=name)
            for method, (request, response) in methods.items():
                service.method.add(
                    name=method,
                    input_type=f".{file.package}.{request}",
                    output_type=f".{file.package}.{response}",
                )

    def _note(self, scope: str, lines: tuple[Any, ...]) -> None:
        self._kinds[scope] = "message"
        for nested in lines:
            for name, inner in nested.items() if isinstance(nested, dict) else ():
                if isinstance(inner, dict):
                    self._kinds[f"{scope}.{name}"] = "enum"
                else:
                    self._note(f"{scope}.{name}", inner)

    def _enum(self, enum: Any, name: str, values: Mapping[str, int]) -> None:
        enum.name = name
        for value, number in values.items():
            enum.value.add(name=value, number=number)

    def _message(self, message: Any, scope: str, lines: tuple[Any, ...]) -> None:
        message.name = scope.rpartition(".")[2]
        groups: list[str] = []
        for line in lines:
            if isinstance(line, dict):
                for name, inner in line.items():
                    if isinstance(inner, dict):
                        self._enum(message.enum_type.add(), name, inner)
                    else:
                        self._message(message.nested_type.add(), f"{scope}.{name}", inner)
                continue
            *words, kind, name, number = line.split()
            new = message.field.add(name=name, number=int(number), label=_Field.LABEL_OPTIONAL)
            if words == ["repeated"]:
                new.label = _Field.LABEL_REPEATED
            elif words:
                group = words[1]
                if group not in groups:
                    groups.append(group)
                    message.oneof_decl.add(name=group)
                new.oneof_index = groups.index(group)
            if kind.startswith("map<"):
                key, value = kind[4:-1].split(",")
                entry = message.nested_type.add(name=f"{_camel(name)}Entry")
                entry.options.map_entry = True
                self._type(entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL), scope, key)
                self._type(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), scope, value)
                new.label, new.type, new.type_name = (
                    _Field.LABEL_REPEATED,
                    _Field.TYPE_MESSAGE,
                    f"{scope}.{entry.name}",
                )
            else:
                self._type(new, scope, kind)

    def _type(self, new: Any, scope: str, kind: str) -> None:
        if kind in _SCALARS:
            new.type = _SCALARS[kind]
            return
        full = kind
        if not kind.startswith("."):
            full = next(name for name in (f"{scope}.{kind}", f".{self._package}.{kind}") if name in self._kinds)
        enum = self._kinds.get(full) == "enum" or full == ".tensorflow.error.Code"
        new.type = _Field.TYPE_ENUM if enum else _Field.TYPE_MESSAGE
        new.type_name = full


def _build() -> Any:
    pool = descriptor_pool.DescriptorPool()
    for known in (any_pb2, wrappers_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    for file in (_TENSORFLOW, _TENSORFLOW_ERRORS, _TENSORFLOW_SERVING, _INFERENCE):
        pool.AddSerializedFile(_Builder(file).proto.SerializeToString())
    return pool


POOL: Any = _build()


def message(name: str) -> Any:
    """Return the class of the message `name`, as `tensorflow.serving.PredictRequest`."""
    return message_factory.GetMessageClass(POOL.FindMessageTypeByName(name))


TensorProto = message("tensorflow.TensorProto")
DATA_TYPES: dict[str, int] = dict(_TENSORFLOW.enums["DataType"])
