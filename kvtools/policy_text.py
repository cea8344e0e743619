"""A policy written as a TOML file, which `clip_policy.read_policy` reads."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True)
class Entry:
    """What a policy says of one table: its name as it is, no pattern; `fields`, and a comment to each of some."""

    table: str
    fields: Mapping[str, Any]
    comments: Mapping[str, str] = field(default_factory=dict)


def policy_text(
    entries: Sequence[Entry], *, budget: str | int | None = None, by: str | None = None, head: Sequence[str] = ()
) -> str:
    """Return a policy file; `head` are lines of comment at its top. Where it says nothing, it says that.

    >>> print(policy_text([Entry("a[1]", {"min-freq": 2, "admission": {"count": 2}}, {"min-freq": "saves 1 KiB"})]))
    [[tables]]
    name = "a[[]1]"
    min-freq = 2  # saves 1 KiB
    admission = { count = 2 }
    <BLANKLINE>
    """
    lines = [f"# {_one_line(line)}" for line in head]
    lines += [f"budget = {_value(budget)}"] if budget is not None else []
    lines += [f"by = {_value(by)}"] if by is not None else []
    for entry in entries:
        lines += ["", "[[tables]]"] if lines else ["[[tables]]"]
        lines.append(f"name = {_value(pattern_of(entry.table))}")
        for name, value in entry.fields.items():
            comment = f"  # {_one_line(entry.comments[name])}" if name in entry.comments else ""
            lines.append(f"{name} = {_value(value)}{comment}")
    if not entries and budget is None:
        lines.append("tables = []")
    return "\n".join(lines) + "\n"


def pattern_of(table: str) -> str:
    """Return the pattern that matches a table of this name alone.

    >>> pattern_of("user*"), pattern_of("a[1]")
    ('user[*]', 'a[[]1]')
    """
    return re.sub(r"([*?[])", r"[\1]", table)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(name)} = {_value(each)}" for name, each in value.items())
        return f"{{ {inner} }}"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"[{', '.join(_value(each) for each in value)}]"
    return f'"{"".join(_escaped(letter) for letter in str(value))}"'


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _value(name)


def _escaped(letter: str) -> str:
    if letter in '"\\':
        return f"\\{letter}"
    return letter if letter.isprintable() else f"\\U{ord(letter):08x}"


def _one_line(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
