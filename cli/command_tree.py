"""All commands with their options and arguments, as the parser has them: for completion and manual pages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtools.dialects.detect import dialects

_CHOICE = re.compile(r"[a-z][a-z0-9_-]*")
_NO_FILE = frozenset(
    {
        "N",
        "K",
        "S",
        "X",
        "R",
        "D",
        "T",
        "SIZE",
        "AGE",
        "WHEN",
        "NAME",
        "NAMES",
        "SECONDS",
        "MICROSECONDS",
        "PORT",
        "TEXT",
    }
    | {"URL", "EXPRESSION", "QUERY", "SQL", "INTEGER", "FLOAT"}
)
"""What stands for a value that is no name of a file."""
_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")


@dataclass(frozen=True)
class Option:
    """An option: its names, what stands for its value (None for a flag), and its help."""

    names: tuple[str, ...]
    metavar: str | None
    help: str

    @property
    def values(self) -> tuple[str, ...]:
        """Return the values that it may have, where these are few and known."""
        if self.metavar is None:
            return ()
        if self.metavar == "DIALECT" or any(name.startswith("--dialect") for name in self.names):
            return tuple(sorted(dialects()))
        if "--dtype" in self.names:
            return _DTYPES
        if "|" in self.metavar:
            return tuple(word for word in self.metavar.split("|") if _CHOICE.fullmatch(word))
        return ()

    @property
    def is_table(self) -> bool:
        """Whether its value is the name of a table."""
        return "--table" in self.names

    @property
    def is_file(self) -> bool:
        """Whether its value may be the name of a file or a folder."""
        return self.metavar is not None and not self.values and not self.is_table and self.metavar not in _NO_FILE


@dataclass(frozen=True)
class Command:
    """A command: what it is about in a line, its text, its arguments (as the usage line has them) and its options."""

    name: str
    summary: str
    text: str
    arguments: tuple[tuple[str, str], ...]
    options: tuple[Option, ...]


def command_tree() -> tuple[Command, Mapping[str, Command]]:
    """Return `kvtools` itself and its commands by name; loads the modules of all of them."""
    from typer.main import get_command

    from kvtools.cli.main import COMMANDS, build_app

    group: Any = get_command(build_app(*COMMANDS))
    summary = group.help.strip().splitlines()[0].rstrip(".")
    top = _described("kvtools", summary, group, ())
    return top, {name: _described(name, COMMANDS[name], group.commands[name], top.options) for name in COMMANDS}


def _described(name: str, summary: str, command: Any, before: Sequence[Option]) -> Command:
    arguments, options = [], []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            metavar = parameter.metavar or parameter.name.upper()
            optional = not parameter.required and not metavar.startswith("[")
            arguments.append((f"[{metavar}]" if optional else metavar, getattr(parameter, "help", None) or ""))
        elif not parameter.hidden:
            names = tuple([*parameter.opts, *parameter.secondary_opts])
            metavar = None if parameter.is_flag else parameter.metavar or parameter.type.name.upper()
            options.append(Option(names, metavar, parameter.help or ""))
    options.append(Option(("-h", "--help"), None, "Show this message and exit."))
    return Command(name, summary, command.help or "", tuple(arguments), tuple(options))
