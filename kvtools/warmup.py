"""Requests that a server answers as it loads a SavedModel, before any other: `assets.extra/tf_serving_warmup_requests`.

TensorFlow Serving builds and places parts of a graph as it first runs them; so the first requests would be slow. The
file is a TFRecord file of `PredictionLog` messages, of 1,000 records at most: a `predict_log`, or a `classify_log` or
`regress_log`, whose request has tf.Examples. TensorFlow Serving loads no model that refuses one of them. Nothing here
needs TensorFlow, or tensorflow-serving-api.

Formats: https://www.tensorflow.org/tfx/serving/saved_model_warmup, tensorflow_serving/apis/prediction_log.proto, and of
requests as JSON https://www.tensorflow.org/tfx/serving/api_rest.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from kvtools.dialects.bundle.dtypes import STRING, dtype_name, dtype_number, number_named, numpy_dtype
from kvtools.dialects.bundle.wire import WireError
from kvtools.dialects.chunk import Array
from kvtools.errors import BadInputError, UsageError
from kvtools.lookup_model.messages import entry, message, shape
from kvtools.model_requests import IdSource, InputSpec, Request, requests
from kvtools.remote.stored import open_binary
from kvtools.stock_model.fields import Field, entries, last, messages, number_in, numbers, split, text
from kvtools.tfrecord import framed, is_tfrecord, read_records

WARMUP_FILE = Path("assets.extra") / "tf_serving_warmup_requests"
MOST_RECORDS = 1000
"""What TensorFlow Serving takes."""
DEFAULT_SIGNATURE = "serving_default"
_PREDICT_LOG, _REQUEST, _SPEC, _INPUTS, _SIGNATURE_NAME = 6, 1, 1, 2, 3
_EXAMPLES_LOGS, _EXAMPLES_INPUT = (2, 3), "inputs"  # of classifications and regressions
_INPUT, _LIST, _LIST_WITH_CONTEXT, _LISTED, _CONTEXT = 2, 1, 2, 1, 2

Signatures = Mapping[str, Sequence[InputSpec]]
Refusal = Callable[[str, Request], str]
"""What a model says against a request to a signature; empty: nothing."""


@dataclass(frozen=True)
class WarmupRequest:
    """A request: the signature, its inputs, and what a message calls it."""

    signature: str
    inputs: Request
    called: str = ""


# ---- Records -----------------------------------------------------------------------------------------------------


def prediction_log(request: WarmupRequest) -> bytes:
    """Return a request as a `PredictionLog`."""
    spec = message((_SIGNATURE_NAME, request.signature))
    inputs = [(_INPUTS, entry(name, _tensor(array))) for name, array in request.inputs.items()]
    predict = message((_SPEC, spec), *inputs)
    return message((_PREDICT_LOG, message((_REQUEST, predict))))


def _tensor(array: Array) -> bytes:
    if array.dtype == object:
        return message((1, STRING), (2, shape(*array.shape)), *((8, value) for value in array.reshape(-1)))
    return message((1, dtype_number(array.dtype)), (2, shape(*array.shape)), (4, array.tobytes()))


def write_requests(file: Path, records: Sequence[bytes]) -> None:
    """Write records of `prediction_log` as a file."""
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"".join(framed(record) for record in records))


# ---- Random requests -----------------------------------------------------------------------------------------------


def random_requests(
    signatures: Signatures, count: int, ids: Callable[[str], IdSource], refusal: Refusal | None = None
) -> tuple[list[bytes], list[str]]:
    """Make requests for each signature in turn.

    Args:
        signatures: the inputs of each.
        count: how many requests to make of each; there are no more than `MOST_RECORDS` in all.
        ids: gives integers for the inputs of a signature.
        refusal: asks the model; a request that it refuses is made otherwise, or left out.

    Returns:
        The records, and what there is to say of them.
    """
    check_count(count)
    ways: dict[str, int] = {}
    notes = []
    for name, inputs in signatures.items():
        way, note = _way(name, inputs, ids(name), refusal)
        notes += [note] if note else []
        if way is not None:
            ways[name] = way
    records: list[bytes] = []
    for _ in range(count):
        for name, way in ways.items():
            if len(records) < MOST_RECORDS:
                made = list(requests(signatures[name], ids(name)))[way]
                records.append(prediction_log(WarmupRequest(name, made)))
    if len(ways) * count > MOST_RECORDS:
        notes.append(
            f"{MOST_RECORDS:,} requests for {len(ways):,} signatures, and not {count} of each: TensorFlow Serving takes"
            " no more"
        )
    return records, notes


def check_count(count: int) -> None:
    """Raise `UsageError` for a number of requests that no server takes."""
    if not 1 <= count <= MOST_RECORDS:
        raise UsageError(
            f"got --warmup {count}, expected 1 to {MOST_RECORDS} requests, which TensorFlow Serving takes,"
            " or a file of them"
        )


def _way(name: str, inputs: Sequence[InputSpec], ids: IdSource, refusal: Refusal | None) -> tuple[int | None, str]:
    """Return in which of the ways of `requests` the inputs belong together, and what to say of it."""
    if refusal is not None:
        said = ""
        for way, request in enumerate(requests(inputs, ids)):
            said = refusal(name, request)
            if not said:
                return way, ""
        return None, f"signature '{name}' is not warmed up: the model refuses random requests ({said})"
    there = {one.name: one for one in inputs}
    ragged = []
    for one in inputs:
        second, third = there.get(f"{one.name}_1"), there.get(f"{one.name}_2")
        if second is None or second.shape is None or len(second.shape) != 1 or one.shape is None:
            continue
        if third is not None and len(one.shape) == 2 and one.dtype == third.dtype == "int64":
            return 0, ""
        if third is None and len(one.shape) == 1 and second.dtype in ("int32", "int64"):
            ragged.append(f"'{one.name}' and '{second.name}'")
    if not ragged:
        return 2, ""
    return 1, f"signature '{name}': {ragged[0]} were taken for a ragged tensor; --check asks the model"


# ---- Requests of a file --------------------------------------------------------------------------------------------


class RequestFile:
    """Requests in a file: bodies of TensorFlow Serving's REST interface, a line each, or a file in its own format.

    Raises:
        BadInputError: there is no such file, or it is neither.
        CorruptFileError: a record is damaged.

    Example:
        ```python
        # {"signature_name": "serving_default", "instances": [{"user": 17, "item": 5}]}
        records = RequestFile(Path("requests.jsonl")).records(signatures)
        ```
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with open_binary(path) as file:
                start = file.read(4096)
        except OSError as error:
            raise BadInputError(f"reading '{path}': {error.strerror or error}") from error
        self._logs: list[bytes] = []
        self._bodies: list[tuple[int, Any]] = []
        if is_tfrecord(start):
            self._logs = list(read_records(path))
        elif start.lstrip()[:1] == b"{":
            self._bodies = list(self._lines())
        else:
            raise BadInputError(
                f"reading '{path}': expected requests of TensorFlow Serving's REST interface, a JSON object in each"
                " line, or a TFRecord file of PredictionLog"
            )
        count = len(self._logs) + len(self._bodies)
        if count > MOST_RECORDS:
            raise BadInputError(
                f"reading '{path}': it has {count:,} requests, and TensorFlow Serving takes {MOST_RECORDS:,}; leave"
                " some out"
            )

    def _lines(self) -> Iterator[tuple[int, Any]]:
        with open_binary(self._path) as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    body = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise BadInputError(f"reading '{self._path}': line {number}: {error}") from None
                if not isinstance(body, dict):
                    raise BadInputError(f"reading '{self._path}': line {number}: expected an object")
                yield number, body

    def records(self, signatures: Signatures, refusal: Refusal | None = None) -> list[bytes]:
        """Return the records to write, each compared with the signature that it asks.

        Raises:
            BadInputError: one fits no signature, or the model refuses it; the message names line or record.
        """
        records = []
        for number, body in self._bodies:
            request = self._checked(f"line {number}", rest_request, body, signatures)
            self._ask(request, f"line {number}", refusal)
            records.append(prediction_log(request))
        for number, log in enumerate(self._logs, 1):
            request = self._checked(f"record {number}", logged_request, log, signatures)
            self._ask(request, f"record {number}", refusal)
            records.append(log)
        return records

    def requests(self, signatures: Signatures) -> list[WarmupRequest]:
        """Return the requests, each compared with the signature that it asks; raises `BadInputError` as `records`."""
        return [
            *(self._checked(f"line {number}", rest_request, body, signatures) for number, body in self._bodies),
            *(
                self._checked(f"record {number}", logged_request, log, signatures)
                for number, log in enumerate(self._logs, 1)
            ),
        ]

    def _checked(
        self, where: str, read: Callable[[Any, Signatures], WarmupRequest], given: Any, signatures: Signatures
    ) -> WarmupRequest:
        try:
            return read(given, signatures)
        except ValueError as error:
            raise BadInputError(f"reading '{self._path}': {where}: {error}") from None

    def _ask(self, request: WarmupRequest, where: str, refusal: Refusal | None) -> None:
        said = refusal(request.signature, request.inputs) if refusal else ""
        if said:
            raise BadInputError(f"reading '{self._path}': {where}: the model refuses it: {said}")


def rest_request(body: Mapping[str, Any], signatures: Signatures) -> WarmupRequest:
    """Return what a body of TensorFlow Serving's REST interface asks; raises `ValueError` if it fits no signature."""
    name = body.get("signature_name", DEFAULT_SIGNATURE)
    specs = _specs(name, signatures)
    if ("instances" in body) == ("inputs" in body):
        raise ValueError("expected 'instances' or 'inputs', one of them")
    if "inputs" in body:
        given = body["inputs"]
        values = given if _is_object(given) else {only.name: given for only in _only(specs)}
    else:
        rows = body["instances"]
        if not isinstance(rows, list) or not rows:
            raise ValueError("'instances' should be a list, not empty")
        if _is_object(rows[0]):
            if not all(_is_object(row) and row.keys() == rows[0].keys() for row in rows):
                raise ValueError("the objects of 'instances' should have the same members")
            values = {member: [row[member] for row in rows] for member in rows[0]}
        else:
            values = {only.name: rows for only in _only(specs)}
    _check_names(values, specs)
    return WarmupRequest(name, {spec.name: _fitting(spec, _array(spec, values[spec.name])) for spec in specs})


def logged_request(log: bytes, signatures: Signatures) -> WarmupRequest:
    """Return what a `PredictionLog` asks; raises `ValueError` if it has no such request, or one that does not fit."""
    try:
        fields = split(log)
        kind = next((one for one in (_PREDICT_LOG, *_EXAMPLES_LOGS) if messages(fields, one)), None)
        if kind is None:
            raise ValueError("expected a PredictionLog with a predict_log, classify_log or regress_log")
        request = split(last(split(last(fields, kind)), _REQUEST))
        name = text(last(split(last(request, _SPEC)), _SIGNATURE_NAME)) or DEFAULT_SIGNATURE
        specs = _specs(name, signatures)
        if kind in _EXAMPLES_LOGS:
            examples = _examples(split(last(request, _INPUT)))
            _check_names({_EXAMPLES_INPUT: examples}, specs)
            return WarmupRequest(name, {_EXAMPLES_INPUT: _fitting(specs[0], examples)})
        given = dict(entries(request, _INPUTS))
        _check_names(given, specs)
        return WarmupRequest(name, {spec.name: _fitting(spec, _tensor_array(spec, given[spec.name])) for spec in specs})
    except WireError as error:
        raise ValueError(f"got malformed bytes ({error})") from None


def _examples(given: list[Field]) -> Array:
    """Return the serialized examples of an `Input`, those of its context in each."""
    kind = _LIST_WITH_CONTEXT if messages(given, _LIST_WITH_CONTEXT) else _LIST
    listed = split(last(given, kind))
    context = last(listed, _CONTEXT) if kind == _LIST_WITH_CONTEXT else b""
    examples = [context + example for example in messages(listed, _LISTED)]
    if not examples:
        raise ValueError("it has no examples")
    array = np.empty(len(examples), object)
    array[:] = examples
    return array


def _specs(name: Any, signatures: Signatures) -> Sequence[InputSpec]:
    if name not in signatures:
        there = ", ".join(f"'{one}'" for one in list(signatures)[:20])
        raise ValueError(f"there is no signature {name!r}, but {there}")
    return signatures[name]


def _only(specs: Sequence[InputSpec]) -> Sequence[InputSpec]:
    if len(specs) != 1:
        raise ValueError(f"expected an object of the inputs {', '.join(spec.name for spec in specs)}")
    return specs


def _check_names(given: Mapping[str, Any], specs: Sequence[InputSpec]) -> None:
    if given.keys() != {spec.name for spec in specs}:
        raise ValueError(
            f"got the inputs {', '.join(sorted(given)) or 'of nothing'}, the signature takes"
            f" {', '.join(sorted(spec.name for spec in specs))}"
        )


def _is_object(value: Any) -> bool:
    return isinstance(value, dict) and value.keys() != {"b64"}


def _array(spec: InputSpec, value: Any) -> Array:
    """Return nested lists as an array; strings may be `{"b64": "..."}`."""
    if spec.dtype == "string":
        sizes, level = [], [value]
        while level and isinstance(level[0], list):
            sizes.append(len(level[0]))
            if not all(isinstance(one, list) and len(one) == sizes[-1] for one in level):
                raise ValueError(f"input '{spec.name}': its lists should be of one length")
            level = [item for one in level for item in one]
        array = np.empty(len(level), object)
        array[:] = [_string(spec, one) for one in level]
        return array.reshape(sizes)
    dtype = numpy_dtype(number_named(spec.dtype))
    if dtype is None:
        raise ValueError(f"input '{spec.name}': JSON has no {spec.dtype}")
    try:
        array = np.array(value)
        if array.size and not _is_of(array, dtype):
            raise ValueError(f"got {array.dtype}")
        if array.size and dtype.kind in "iu" and np.any(array.astype(dtype) != array):
            raise ValueError("a number is too large")
        return array.astype(dtype)
    except (ValueError, TypeError, OverflowError) as error:
        raise ValueError(f"input '{spec.name}': expected {spec.dtype}: {error}") from None


def _is_of(array: Array, dtype: np.dtype[Any]) -> bool:
    if dtype.kind == "b" or array.dtype.kind == "b":
        return array.dtype.kind == dtype.kind
    return array.dtype.kind in ("iu" if dtype.kind in "iu" else "iuf")


def _string(spec: InputSpec, value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise ValueError(f"input '{spec.name}': a string has half a surrogate pair, which is no text") from None
    if isinstance(value, dict) and isinstance(value.get("b64"), str):
        try:
            return base64.b64decode(value["b64"], validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f"input '{spec.name}': a string is no base64") from None
    raise ValueError(f"input '{spec.name}': expected strings")


_LISTS = {5: "<f4", 6: "<f8"}
_NUMBERS = {
    "int32": 7,
    "int16": 7,
    "int8": 7,
    "uint8": 7,
    "uint16": 7,
    "int64": 10,
    "bool": 11,
    "uint32": 16,
    "uint64": 17,
}


def _tensor_array(spec: InputSpec, encoded: bytes) -> Array:
    """Return the array of a TensorProto of the input's type: raw bytes, or a list whose last value goes on."""
    fields = split(encoded)
    name = dtype_name(number_in(fields, 1))
    if name != spec.dtype:
        raise ValueError(f"input '{spec.name}': expected {spec.dtype}, got {name}")
    sizes = [number_in(split(dim), 1) for dim in messages(split(last(fields, 2)), 2)]
    count = int(np.prod([float(size) for size in sizes]))
    if count > 1 << 28:
        raise ValueError(f"input '{spec.name}': a tensor of shape {sizes}")
    if spec.dtype == "string":
        values = np.array([*messages(fields, 8)][:count] or [b""], object)
    else:
        values = _values(spec.dtype, fields, last(fields, 4), count)
    if not last(fields, 4):
        values = values[:count]
    if 0 < len(values) < count and not last(fields, 4):
        values = np.concatenate([values, np.repeat(values[-1:], count - len(values))])
    if len(values) != count:
        raise ValueError(f"input '{spec.name}': {len(values)} values for shape {sizes}")
    return values.reshape(sizes)


def _values(name: str, fields: Any, content: bytes, count: int) -> Array:
    dtype = numpy_dtype(number_named(name))
    if dtype is None:
        raise ValueError(f"tensors of {name} are not supported")
    if content:
        if len(content) % dtype.itemsize:
            raise ValueError(f"{len(content)} bytes of {name}")
        return np.frombuffer(content, dtype)
    if name in ("float16", "bfloat16"):
        halves = np.array(numbers(fields, 13)[:count] or [0], np.uint64).astype(np.uint16)
        return halves.view(np.float16 if name == "float16" else ml_dtypes.bfloat16)
    if name in ("float32", "float64"):
        kind = 5 if name == "float32" else 6
        stored = b"".join(value for field, _, value in fields if field == kind and isinstance(value, bytes))
        return np.frombuffer(stored, _LISTS[kind]).astype(dtype) if stored else np.zeros(1, dtype)
    return np.array(numbers(fields, _NUMBERS[name])[:count] or [0], np.uint64).astype(dtype)


def _fitting(spec: InputSpec, array: Array) -> Array:
    if spec.shape is not None and (
        len(spec.shape) != array.ndim
        or any(size not in (-1, got) for size, got in zip(spec.shape, array.shape, strict=True))
    ):
        raise ValueError(f"input '{spec.name}': expected shape {list(spec.shape)}, got {list(array.shape)}")
    return array
