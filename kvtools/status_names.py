"""Tables that hold the status of another table's rows: what a restrict policy of dynamic embeddings counts by key."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

KINDS: Mapping[str, str] = {"frequency": "freqs", "timestamp": "versions"}
"""What ends the name of such a table, and the column of the other table that it would be."""


def status_table(name: str, kind: str) -> str:
    """Return how `tfplugin.dynamic_embedding` calls the status of a variable.

    >>> status_table("tower/user", "frequency")
    'status/tower/user/frequency'
    """
    return f"status/{name}/{kind}"


def status_of(name: str) -> tuple[str, str] | None:
    """Return whose status a variable of this name is, and of which kind.

    >>> status_of("status/tower/user/frequency")
    ('tower/user', 'frequency')
    """
    rest, _, kind = name.rpartition("/")
    return (rest.removeprefix("status/"), kind) if kind in KINDS and rest.startswith("status/") else None


def status_tables(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return which tables are status, and of which other one and of which kind.

    >>> status_tables(["user", "status/user/timestamp", "status/item/frequency"])
    {'status/user/timestamp': ('user', 'timestamp')}
    """
    there = list(names)
    found = {status_table(name, kind): (name, kind) for name in there for kind in KINDS}
    return {name: found[name] for name in there if name in found}
