"""Putting a function of ours around one of another library's."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any


def wrap_method(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    """Has calls of ``owner.name`` go to ``replacement(original, *args, **kwargs)``. `owner` is a class or a module.

    A class must have the method itself: one that it inherits is wrapped where it is defined.

    Returns:
      A function that puts the original back.
    """
    original = vars(owner)[name]

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(owner, name, wrapper)
    return lambda: setattr(owner, name, original)


def wrap_property(owner: type, name: str, replacement: Callable[..., Any]) -> Callable[[], None]:
    """Has the property ``owner.name`` give ``replacement(getter, self)``. Otherwise as `wrap_method`."""
    original = vars(owner)[name]
    getter = original.fget
    setattr(owner, name, property(lambda self: replacement(getter, self), doc=original.__doc__))
    return lambda: setattr(owner, name, original)


def wrap_setter(cls: type, name: str, replacement: Callable[..., None]) -> Callable[[], None]:
    """Has setting the property `name` of a class, or of that it has it of, call ``replacement(setter, self, value)``.
    Otherwise as `wrap_method`.
    """
    owner = defining_class(cls, name)
    assert owner is not None
    original = vars(owner)[name]
    setter = original.fset
    setattr(owner, name, original.setter(lambda self, value: replacement(setter, self, value)))
    return lambda: setattr(owner, name, original)


def defining_class(cls: type, name: str) -> type | None:
    """The class among `cls` and its bases that a method of it is defined in; None where there is no such method."""
    return next((base for base in cls.__mro__ if name in vars(base)), None)


def weak_method(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a method of an object that this does not keep: one that holds itself lives on until a collection."""
    reference = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        return reference()(*args, **kwargs)  # type: ignore[misc]  # who calls has the object

    return call


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Has calls of ``owner.name`` go to `replacement` for a while. `owner` is an object, of which it is one alone."""
    own = vars(owner).get(name)
    object.__setattr__(owner, name, replacement)
    try:
        yield
    finally:
        if own is None:
            object.__delattr__(owner, name)
        else:
            object.__setattr__(owner, name, own)
