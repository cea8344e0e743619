"""Classification and regression: what TensorFlow Serving's `Classify`, `Regress` and their REST forms ask.

A request brings tf.Examples, and the signature takes them as serialized strings, in an input `inputs` [n]. It
classifies where its outputs are `classes` (strings [n, c]), `scores` (float32 [n, c]) or both, and gives values where
its output is `outputs` (float32 [n] or [n, 1]). What the model calls it (its `method_name`) does not matter: what
TensorFlow 2 saves is always called a prediction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from kvtools.server.caller import Caller
from kvtools.server.json_tensor import from_base64, is_base64, row_texts, shown
from kvtools.server.protocol_error import ProtocolError, invalid
from kvtools.server.protos import message
from kvtools.server.settings import Settings
from kvtools.server.signatures import STRING, TYPE_WORDS, Array, Signature, ask, check_inputs

_INPUTS = "inputs"
_CLASSES, _SCORES = "classes", "scores"
_OUTPUTS = "outputs"
_MOST_FLOAT32 = float(np.finfo(np.float32).max) * (1 + 2**-25)  # what is less in size is rounded to a finite number
_Example = message("tensorflow.Example")


def from_json(document: dict[str, Any]) -> list[bytes]:
    """Return the serialized examples of a request, those of `context` in each; raises a `ProtocolError`.

    Example:
        >>> from_json({"examples": [{"id": 7}]})
        [b'\\n\\r\\n\\x0b\\n\\x02id\\x12\\x05\\x1a\\x03\\n\\x01\\x07']
    """
    if "examples" not in document:
        raise invalid("Missing 'examples' key: a list of objects, each with features by name")
    examples = document["examples"]
    if not isinstance(examples, list):
        raise invalid(f"JSON Value: {shown(examples)} Expecting 'examples' value to be an list/array")
    if not examples:
        raise invalid("'examples' value is an empty array")
    context = _example(document["context"]) if "context" in document else b""
    return [context + _example(example) for example in examples]


def _example(value: Any) -> bytes:
    if not isinstance(value, dict):
        raise invalid(f"JSON Value: {shown(value)} Example must be JSON object")
    example = _Example()
    for name, content in value.items():
        feature = example.features.feature[name]
        values = content if isinstance(content, list) else [content]
        if values:
            kind, found = _feature(name, values)
            getattr(feature, kind).value.extend(found)
    return example.SerializeToString()  # type: ignore[no-any-return]


def _feature(name: str, values: list[Any]) -> tuple[str, list[Any]]:
    kinds = {type(value) for value in values}
    if kinds == {float}:
        if any(_MOST_FLOAT32 <= abs(value) < math.inf for value in values):
            raise invalid(f"Feature: {name} has a number that is too large for the type float")
        return "float_list", values
    if kinds <= {int, bool}:
        if not all(-(1 << 63) <= value < 1 << 63 for value in values):
            raise invalid(f"Feature: {name} has a whole number that int64 does not hold")
        return "int64_list", [int(value) for value in values]
    if all(isinstance(value, str) or is_base64(value) for value in values):
        return "bytes_list", [
            value.encode() if isinstance(value, str) else from_base64(value["b64"]) for value in values
        ]
    raise invalid(
        f"Feature: {name} has elements of several types, or of one that no feature has: {shown(values)}; expected whole"
        ' numbers, or numbers that all have a point (1.0), or strings and {"b64": "..."}'
    )


def from_message(given: Any) -> list[bytes]:
    """Return the serialized examples of an `Input`, those of its context in each; raises a `ProtocolError`."""
    kind = given.WhichOneof("kind")
    examples = getattr(given, kind).examples if kind else ()
    if not examples:
        raise invalid("Input is empty.")
    context = given.example_list_with_context.context.SerializeToString()  # b"" of a list without
    return [context + example.SerializeToString() for example in examples]


def classify(signature: Signature, examples: list[bytes], settings: Settings, caller: Caller) -> tuple[Array, Array]:
    """Return labels and scores [n, c] of `examples`: of what the model does not have empty strings, or zeros."""
    names = [name for name in (_CLASSES, _SCORES) if name in signature.outputs]
    if not names or set(signature.outputs) != set(names):
        raise _unfit(signature, "classifies", f"outputs '{_CLASSES}', '{_SCORES}' or both")
    answer = _ask(signature, examples, names, settings, caller)
    shapes = {array.shape for array in answer.values()}
    for name, dtype in ((_CLASSES, STRING), (_SCORES, np.dtype(np.float32))):
        if name in answer:
            _check_type(name, answer[name], dtype)
    shape = next(iter(shapes))
    if len(shapes) != 1 or len(shape) != 2 or shape[0] != len(examples):
        told = " and ".join(f"{name} {list(array.shape)}" for name, array in answer.items())
        raise invalid(f"Expected Tensor shape: [batch_size num_classes] but got {told} of {len(examples)} examples")
    return answer.get(_CLASSES, np.full(shape, b"", STRING)), answer.get(_SCORES, np.zeros(shape, np.float32))


def regress(signature: Signature, examples: list[bytes], settings: Settings, caller: Caller) -> Array:
    """Return the values [n] of `examples`."""
    if list(signature.outputs) != [_OUTPUTS]:
        raise _unfit(signature, "is a regression", f"an output '{_OUTPUTS}'")
    values = _ask(signature, examples, [_OUTPUTS], settings, caller)[_OUTPUTS]
    _check_type(_OUTPUTS, values, np.dtype(np.float32))
    if values.shape not in ((len(examples),), (len(examples), 1)):
        raise invalid(
            "Expected output Tensor shape to be either [batch_size] or [batch_size, 1] but got"
            f" {list(values.shape)} of {len(examples)} examples"
        )
    return values.reshape(-1)


def _ask(
    signature: Signature, examples: list[bytes], outputs: list[str], settings: Settings, caller: Caller
) -> dict[str, Array]:
    given = np.empty(len(examples), STRING)
    given[:] = examples
    if list(signature.inputs) != [_INPUTS] or signature.inputs[_INPUTS].dtype != STRING:
        raise _unfit(signature, "takes tf.Example", f"one input '{_INPUTS}' of strings")
    check_inputs(signature, {_INPUTS: given})
    return ask(signature, {_INPUTS: given}, outputs, settings, caller)


def _unfit(signature: Signature, what: str, expected: str) -> ProtocolError:
    has = f"inputs {list(signature.inputs)} and outputs {list(signature.outputs)}"
    return invalid(f"no signature that {what}: '{signature.name}' has {has}, expected {expected}; Predict asks any")


def _check_type(name: str, array: Array, dtype: np.dtype[Any]) -> None:
    if array.dtype != dtype:
        raise invalid(f"Expected {name} Tensor of {TYPE_WORDS[dtype]}. Got: {TYPE_WORDS[array.dtype]}")


def classes_text(labels: Array, scores: Array) -> Iterable[bytes]:
    """Yield the JSON of a classification: for each example a list of pairs of label and score."""
    yield b'{"results":['
    for place, (names, values) in enumerate(zip(labels, scores, strict=True)):
        pairs = zip(row_texts(names), row_texts(values), strict=True)
        yield (b"," if place else b"") + b"[" + b",".join(b"[" + b",".join(pair) + b"]" for pair in pairs) + b"]"
    yield b"]}"


def fill_classes(labels: Array, scores: Array, result: Any) -> None:
    """Fill a ClassificationResult, whose labels are text."""
    try:
        for names, values in zip(labels, scores, strict=True):
            classes = result.classifications.add().classes
            for name, value in zip(names, values.tolist(), strict=True):
                classes.add(label=name.decode() if isinstance(name, bytes) else str(name), score=value)
    except UnicodeDecodeError:
        raise ProtocolError(
            "FAILED_PRECONDITION", "a label is not UTF-8, which this message needs; ask Predict, which has bytes"
        ) from None
