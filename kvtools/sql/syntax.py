"""What a text of SQL is made of, as DuckDB's own parser reads it, before anything of it is run."""

from __future__ import annotations

import atexit
import functools
import json
import re
import threading
from collections.abc import Iterator
from typing import Any

from kvtools.errors import UsageError
from kvtools.sql.connection import connect, import_duckdb, lock

_THREAD = threading.local()
atexit.register(_THREAD.__dict__.clear)  # before DuckDB itself is gone

Node = dict[str, Any]


def parse(text: str, doing: str, *, before: str = "") -> Node:
    """Return the syntax tree of the one SELECT that a text is, behind `before`, which is none of the caller's.

    Raises:
        UsageError: it is none, or several, or no SQL.
    """
    duckdb = import_duckdb(doing)
    if "\0" in text:
        raise UsageError(f"{doing}: got a NUL character, expected text")
    connection = _connection(doing)
    try:
        # Not as a parameter of the query alone: what it answers for a fault is a row, what it raises are other faults.
        ((answer,),) = connection.execute("select json_serialize_sql(?::varchar)", [before + text]).fetchall()
    except (duckdb.Error, UnicodeEncodeError) as error:
        raise UsageError(f"{doing}: {' '.join(str(error).split())}") from None
    tree = json.loads(answer)
    if tree.get("error"):
        if tree.get("error_type") == "not implemented":
            raise UsageError(f"{doing}: got another statement than SELECT, expected one SELECT: nothing else is run")
        raise UsageError(f"{doing}: {_place(tree, text, len(before))}")
    statements = tree["statements"]
    if len(statements) != 1:
        raise UsageError(f"{doing}: got {len(statements)} statements, expected one SELECT")
    node: Node = statements[0]["node"]
    return node


def _connection(doing: str) -> Any:
    """Return this thread's connection for what is about no table."""
    connection = getattr(_THREAD, "connection", None)
    if connection is None:
        connection = connect(doing, memory=64 << 20)
        lock(connection)
        _THREAD.connection = connection
    return connection


def unstable_function(tree: Node, doing: str) -> str | None:
    """Return a function of a tree that may answer the same question differently in another query: by chance, by the
    clock, by what was asked before; None if there is none."""
    called = [str(node.get("function_name", "")).casefold() for node in nodes(tree) if node.get("class") == "FUNCTION"]
    if not any(name.isidentifier() for name in called):  # operators are functions, too
        return None
    unstable = _unstable_functions(doing)
    return next((name for name in called if name in unstable), None)


@functools.cache
def _unstable_functions(doing: str) -> frozenset[str]:
    """Return the names of DuckDB's functions that are not CONSISTENT, and of the macros that call one."""
    rows = _connection(doing).execute(
        "select function_name, stability, macro_definition from duckdb_functions()"
        " where function_type in ('scalar', 'macro')"
    )
    unstable, macros = set(_CLOCKS), []
    for name, stability, definition in rows.fetchall():
        if stability not in (None, "CONSISTENT") and name != "error":  # which has no answer at all
            unstable.add(name.casefold())
        if definition is not None:
            macros.append((name.casefold(), {*re.findall(r"\w+", definition.casefold())}))
    while more := {name for name, words in macros if name not in unstable and not words.isdisjoint(unstable)}:
        unstable |= more
    return frozenset(unstable)


_CLOCKS = ("current_date", "current_time", "current_timestamp", "localtime", "localtimestamp")
"""What tells the time and is written without brackets."""


def _place(tree: Node, text: str, before: int) -> str:
    """Return what is wrong, and where."""
    message = " ".join(str(tree.get("error_message", "no SQL")).split())
    try:
        position = max(0, int(tree["position"]) - before)
    except (KeyError, ValueError):
        return message
    near = " ".join(text[position : position + 30].split())
    return f"{message} (character {position + 1}: {near!r})" if near else f"{message} (at its end)"


def nodes(tree: Any) -> Iterator[Node]:
    """Yield all nodes of a tree, each before those within it."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield node
            pending.extend(reversed(node.values()))
        elif isinstance(node, list):
            pending.extend(reversed(node))
