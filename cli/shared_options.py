"""The options of every command: `--quiet`, `--color` and `--string-keys`, before the command's name or after it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from kvtools.errors import UsageError

COLORS = ("auto", "always", "never")
_WITH_VALUE = ("--color",)
"""Those that take the word behind them."""


@dataclass
class Shared:
    """What these options say in this run."""

    quiet: bool = False
    color: str = "auto"
    string_keys: bool = False


_shared = Shared()


def shared() -> Shared:
    """Return what was asked for."""
    return _shared


@contextlib.contextmanager
def own_options() -> Iterator[Shared]:
    """Begin anew with what is usual, and go back to what was said before at the end: for one command line."""
    global _shared
    before, _shared = _shared, Shared()
    try:
        yield _shared
    finally:
        _shared = before


def _be_quiet(value: bool) -> bool:
    _shared.quiet |= value
    return value


def _write_strings(value: bool) -> bool:
    _shared.string_keys |= value
    return value


def _set_color(value: str | None) -> str | None:
    if value is not None:
        if value not in COLORS:
            raise UsageError(f"got --color {value}, expected {', '.join(COLORS)}")
        _shared.color = value
    return value


Quiet = Annotated[
    bool,
    typer.Option(
        "-q",
        "--quiet",
        help="Say nothing of progress, of what was written or of what was checked; errors and warnings are told.",
        callback=_be_quiet,
        is_eager=True,
    ),
]
Color = Annotated[
    str | None,
    typer.Option(
        "--color",
        metavar="|".join(COLORS),
        help="Colours: auto is on terminals, unless NO_COLOR is set.",
        callback=_set_color,
        is_eager=True,
    ),
]
StringKeys = Annotated[
    bool,
    typer.Option(
        "--string-keys",
        help="In JSON, write keys as strings: JavaScript and jq round large numbers.",
        callback=_write_strings,
        is_eager=True,
    ),
]


def with_shared_options(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command`, as `with_single_options` gives it, with these options; it does not see them itself."""
    parameters = list(inspect.signature(command).parameters.values())
    more = {"quiet": (Quiet, False), "color": (Color, None)}
    if any(parameter.name in ("as_json", "json_lines") for parameter in parameters):
        more = {"string_keys": (StringKeys, False), **more}
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in more.items()
    ]

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name in more:
            values.pop(name)
        command(**values)

    run.__signature__ = inspect.Signature([*parameters, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*parameters, *added]}
    return run


def command_of(arguments: Sequence[str]) -> str | None:
    """Return the command's name: the first word that is neither an option nor the value of one.

    >>> command_of(["--color", "never", "-q", "inspect", "a"])
    'inspect'
    """
    value = False
    for argument in arguments:
        if not value and not argument.startswith("-"):
            return argument
        value = argument in _WITH_VALUE
    return None


def is_quiet(arguments: Sequence[str]) -> bool:
    """Tell from the words whether nothing is to be said of what is done: `--quiet`, and no answer asked for beside.

    >>> is_quiet(["clip", "a", "b", "-q"]), is_quiet(["clip", "a", "b", "-q", "--json"])
    (True, False)
    """
    words = set(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    return bool({"-q", "--quiet"} & words) and not {"--json", "--dry-run", "-h", "--help"} & words
