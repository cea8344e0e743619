"""Options that commands declare together: a parameter of a command that is a dataclass of options.

Typer knows single parameters only. `with_single_options` gives it a function that has the fields of such a dataclass in
place of the parameter, and makes the dataclass of them for the command.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable
from typing import Any


def with_single_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` as Typer takes it: each parameter that is a dataclass is its fields, in their place.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Point:
    ...     x: int = 0
    ...     y: int = 0
    >>> def show(name: str, *, point: Point, loud: bool = False) -> None:
    ...     print(name, point, loud)
    >>> single = with_single_options(show)
    >>> list(inspect.signature(single).parameters)
    ['name', 'x', 'y', 'loud']
    >>> single(name="p", x=1, y=2, loud=True)
    p Point(x=1, y=2) True
    """
    # Not typing.get_type_hints: Python 3.10 wraps the hint of what is None by default, and Typer sees no option there.
    hints = inspect.get_annotations(command, eval_str=True)
    groups: dict[str, type[Any]] = {}
    single: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            types = typing.get_type_hints(kind, include_extras=True)
            single += [_parameter(field.name, field.default, types[field.name]) for field in dataclasses.fields(kind)]
        else:
            single.append(_parameter(parameter.name, parameter.default, kind))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
        command(**values)

    run.__signature__ = inspect.Signature(single)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in single}
    return run


def _parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
