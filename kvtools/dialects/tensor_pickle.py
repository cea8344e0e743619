"""Read a pickle without running anything that it names.

A pickle is a program: `pickle.load` calls whatever it names, with arguments of its choice. Here nothing is imported and
nothing is called but what the caller lists, by name; any other name is refused with an error that says it. Opcodes are
taken apart by `pickletools`, which allocates no more than the bytes there are; what they do is below, for those that
state dicts and descriptions of checkpoints are made of. Keys of dicts are texts, numbers or objects of ours, so that
nothing nested is ever hashed; the memo is a dict, so a large index takes no memory.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvtools.errors import BadInputError, CorruptFileError


@dataclass(frozen=True)
class Known:
    """Something that a pickle may name: what it is called there, and what makes an object of its arguments.

    `make` is None where the name itself is the object, as `torch.float32`.
    """

    name: str
    make: Callable[..., Any] | None = None


@dataclass(eq=False)
class Record:
    """An object of a class of which only what the pickle says of it matters; compared and hashed by identity."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def get(self, name: str) -> Any:
        """Return an attribute; None if there is none."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def record_of(name: str) -> Known:
    """Return the class `name` as something whose objects are records."""
    return Known(name, lambda *arguments: Record(name, arguments))


class _Mark:
    """What MARK leaves on the stack."""


_MARK = _Mark()
_NUMBERS = frozenset(["INT", "LONG", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "FLOAT", "BINFLOAT"])
_TEXTS = frozenset(["UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINSTRING", "SHORT_BINSTRING"])
_BYTES = frozenset(["BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"])
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def load(
    data: bytes,
    doing: str,
    known: Callable[[str], Known | None],
    refusal: Callable[[str], str],
    persistent: Callable[[Any], Any] | None = None,
) -> Any:
    """Return the object that a pickle describes.

    Args:
        data: the pickle.
        doing: how messages begin.
        known: returns what a name ("module.attribute") stands for; None refuses it.
        refusal: returns the rest of the sentence that refuses a name.
        persistent: returns the object of a persistent id; there are none if it is left out.

    Raises:
        BadInputError: the pickle names something that is not known.
        CorruptFileError: it is no pickle, or uses what tensors do not need.

    >>> import pickle
    >>> load(pickle.dumps({"a": [1, 2.5]}), "reading", lambda name: None, str)
    {'a': [1, 2.5]}
    """
    machine = _Machine(doing, known, refusal, persistent)
    try:
        return machine.run(data)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, StopIteration) as error:
        reason = str(error)[:200] or type(error).__name__
        raise CorruptFileError(f"{doing}: {reason}; the file is damaged, copy it again") from error


class _Machine:
    def __init__(
        self,
        doing: str,
        known: Callable[[str], Known | None],
        refusal: Callable[[str], str],
        persistent: Callable[[Any], Any] | None,
    ) -> None:
        self._doing = doing
        self._known = known
        self._refusal = refusal
        self._persistent = persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self, data: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(data):
            name = opcode.name
            if name == "STOP":
                return self._pop()
            self._step(name, argument)
        raise ValueError("it has no end")

    def _step(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in ("PROTO", "FRAME"):
            return
        if name in _NUMBERS or name in _TEXTS or name in _BYTES:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            stack.append(_MARK)
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack.append(tuple(reversed([self._pop() for _ in range(count)])))
        elif name == "TUPLE":
            stack.append(tuple(self._marked()))
        elif name in ("EMPTY_LIST", "EMPTY_SET"):
            stack.append([])
        elif name in ("LIST", "FROZENSET"):
            stack.append(self._marked())
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "DICT":
            stack.append(self._filled({}, self._marked()))
        elif name == "APPEND":
            item = self._pop()
            self._top(list).append(item)
        elif name in ("APPENDS", "ADDITEMS"):
            items = self._marked()
            self._top(list).extend(items)
        elif name == "SETITEM":
            value, key = self._pop(), self._pop()
            self._filled(self._top(dict), [key, value])
        elif name == "SETITEMS":
            items = self._marked()
            self._filled(self._top(dict), items)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self._memo[int(argument)] = self._top(object)
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = self._top(object)
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self._memo[int(argument)])
        elif name == "GLOBAL":
            stack.append(self._named(argument.replace(" ", ".", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = self._pop(), self._pop()
            if not isinstance(attribute, str) or not isinstance(module, str):
                raise ValueError("it names something by what is no text")
            stack.append(self._named(f"{module}.{attribute}"))
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, what = self._pop(), self._pop()
            if not isinstance(what, Known) or what.make is None or not isinstance(arguments, tuple):
                raise ValueError(f"it calls what cannot be called ({_short(what)})")
            stack.append(what.make(*arguments))
        elif name == "BUILD":
            state, made = self._pop(), self._top(object)
            if isinstance(made, Record):
                made.state = state
        elif name == "BINPERSID" and self._persistent is not None:
            stack.append(self._persistent(self._pop()))
        elif name == "POP":
            self._pop()
        else:
            raise ValueError(f"it has an instruction that no state dict needs, {name}")

    def _named(self, name: str) -> Any:
        known = self._known(name)
        if known is None:
            raise BadInputError(f"{self._doing}: it names '{name[:200]}', {self._refusal(name)}")
        return known

    def _pop(self) -> Any:
        item = self._stack.pop()
        if item is _MARK:
            raise ValueError("its stack is out of order")
        return item

    def _top(self, kind: type) -> Any:
        item = self._stack[-1]
        if item is _MARK or not isinstance(item, kind):
            raise ValueError(f"it fills {_short(item)}, expected a {kind.__name__}")
        return item

    def _marked(self) -> list[Any]:
        """Take what lies above the last mark, and the mark."""
        stack = self._stack
        start = len(stack) - 1
        while stack[start] is not _MARK:
            start -= 1
            if start < 0:
                raise ValueError("its stack is out of order")
        items = stack[start + 1 :]
        del stack[start:]
        return items

    @staticmethod
    def _filled(target: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
        if len(items) % 2:
            raise ValueError("it has a key without a value")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if key is not None and not isinstance(key, str | int | float | Record):
                raise ValueError(f"it has {_short(key)} as a key")
            target[key] = value
        return target


def _short(value: Any) -> str:
    if isinstance(value, Known | Record):
        return value.name[:80]
    return f"a {type(value).__name__}"
