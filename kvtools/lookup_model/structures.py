"""Values of struct.proto: how functions are called, and what they take and give."""

from __future__ import annotations

from kvtools.lookup_model.messages import entry, message

NONE = message((1, b""))


def text_value(text: str) -> bytes:
    """Encode a string."""
    return message((13, text))


def tensor_spec(name: str, of_rows: bytes, dtype: int) -> bytes:
    """Encode what a tensor is: its name, shape and type."""
    return message((33, message((1, name), (2, of_rows), (3, dtype))))


def list_value(*values: bytes) -> bytes:
    """Encode a list."""
    return message((51, message(*((1, value) for value in values))))


def tuple_value(*values: bytes) -> bytes:
    """Encode a tuple."""
    return message((52, message(*((1, value) for value in values))))


def dict_value(**fields: bytes) -> bytes:
    """Encode a dictionary."""
    return message((53, message(*((1, entry(key, value)) for key, value in fields.items()))))


def function_spec(*, kwonlyargs: bytes, signature: bytes) -> bytes:
    """Encode how a Python function is called that takes nothing but these keywords."""
    values = {
        "args": list_value(),
        "varargs": NONE,
        "varkw": NONE,
        "defaults": NONE,
        "kwonlyargs": kwonlyargs,
        "kwonlydefaults": NONE,
        "annotations": dict_value(),
    }
    named = message((1, "FullArgSpec"), *((2, entry(key, value)) for key, value in values.items()))
    return message((1, message((54, named))), (5, signature))
