"""Attributes of nodes: what they say, and lists in which some entries become several."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvtools.lookup_model.messages import message
from kvtools.stock_model.fields import blob, join, last, messages, number_in, numbers, split, text, texts

_LIST, _TEXT, _NUMBER, _FLOAT, _BOOL, _TYPE, _SHAPE, _FUNCTION = 1, 2, 3, 4, 5, 6, 7, 10
_FUNCTIONS_OF_LIST = 9


_T = TypeVar("_T")


class Attributes:
    """The attributes of a node; one that is not there has the default that is given.

    >>> from kvtools.lookup_model.messages import of_number
    >>> Attributes({"dim": of_number(4)}).number("dim", 1)
    4
    """

    def __init__(self, encoded: Mapping[str, bytes]) -> None:
        self._encoded = encoded

    def number(self, name: str, default: int = 0) -> int:
        """Return an integer; negative ones, too."""
        value = number_in(split(self._encoded[name]), _NUMBER) if name in self._encoded else default
        return value - (1 << 64) if value >> 63 else value

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return true or false."""
        return bool(number_in(split(self._encoded[name]), _BOOL)) if name in self._encoded else default

    def real(self, name: str, default: float = 0.0) -> float:
        """Return a number of 32 bits."""
        encoded = last(split(self._encoded.get(name, b"")), _FLOAT)
        return float(struct.unpack("<f", encoded)[0]) if len(encoded) == 4 else default

    def text(self, name: str, default: str = "") -> str:
        """Return a string."""
        return text(last(split(self._encoded[name]), _TEXT)) if name in self._encoded else default

    def type(self, name: str, default: int = 0) -> int:
        """Return the number of a type."""
        return number_in(split(self._encoded[name]), _TYPE) if name in self._encoded else default

    def shape(self, name: str) -> bytes:
        """Return an encoded shape."""
        return last(split(self._encoded.get(name, b"")), _SHAPE)

    def texts(self, name: str) -> list[str]:
        """Return a list of strings."""
        return texts(split(self._list(name)), _TEXT)

    def numbers(self, name: str) -> list[int]:
        """Return a list of integers; negative ones, too."""
        return [n - (1 << 64) if n >> 63 else n for n in numbers(split(self._list(name)), _NUMBER)]

    def booleans(self, name: str) -> list[bool]:
        """Return a list of true and false."""
        return [bool(n) for n in numbers(split(self._list(name)), _BOOL)]

    def types(self, name: str) -> list[int]:
        """Return a list of types' numbers."""
        return numbers(split(self._list(name)), _TYPE)

    def shapes(self, name: str) -> list[bytes]:
        """Return a list of encoded shapes."""
        return messages(split(self._list(name)), _SHAPE)

    def _list(self, name: str) -> bytes:
        return last(split(self._encoded.get(name, b"")), _LIST)


def functions_in(attribute: bytes) -> list[str]:
    """Return the names of the functions that an attribute names."""
    fields = split(attribute)
    found = [text(last(split(value), 1)) for value in messages(fields, _FUNCTION)]
    for listed in messages(fields, _LIST):
        found += [text(last(split(value), 1)) for value in messages(split(listed), _FUNCTIONS_OF_LIST)]
    return found


def with_functions(attribute: bytes, rename: Callable[[str], str]) -> bytes:
    """Return an attribute that names other functions."""

    def renamed(value: int | bytes) -> bytes:
        assert isinstance(value, bytes)
        return join(
            [(n, k, blob(rename(text(v))) if n == 1 and isinstance(v, bytes) else v) for n, k, v in split(value)]
        )

    def changed(number: int, value: int | bytes) -> int | bytes:
        if number == _FUNCTION:
            return renamed(value)
        if number == _LIST and isinstance(value, bytes):
            return join([(n, k, renamed(v) if n == _FUNCTIONS_OF_LIST else v) for n, k, v in split(value)])
        return value

    return join([(number, kind, changed(number, value)) for number, kind, value in split(attribute)])


def expanded_types(attribute: bytes, counts: Mapping[int, int], dtype: int) -> bytes:
    """Return a list of types in which `dtype` takes each of these places so many times."""
    of_list = numbers(split(last(split(attribute), _LIST)), _TYPE)
    return message((1, message(*((_TYPE, one) for one in _expanded(of_list, counts, dtype)))))


def expanded_shapes(attribute: bytes, counts: Mapping[int, int], shape: bytes) -> bytes:
    """Return a list of shapes in which `shape` takes each of these places so many times; an empty list stays so."""
    of_list = messages(split(last(split(attribute), _LIST)), _SHAPE)
    if not of_list:
        return attribute
    return message((1, message(*((_SHAPE, one) for one in _expanded(of_list, counts, shape)))))


def moved_numbers(attribute: bytes, moved: Callable[[int], Sequence[int]]) -> bytes:
    """Return a list of integers in which each has become others."""
    of_list = numbers(split(last(split(attribute), _LIST)), _NUMBER)
    return message((1, message(*((_NUMBER, one) for number in of_list for one in moved(number)))))


def _expanded(of_list: Sequence[_T], counts: Mapping[int, int], into: _T) -> list[_T]:
    return [new for place, old in enumerate(of_list) for new in ([into] * counts[place] if place in counts else [old])]
