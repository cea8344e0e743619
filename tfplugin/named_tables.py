"""Which tables are meant, by the objects that hold them, and what they are called in a checkpoint."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from kvtools.chain_place import is_chain

_VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"
_PART = re.compile(r"((?<=\.ATTRIBUTES/kv)_|/)part_\d+$")


def whole_of(prefix: str) -> str:
    """What the tensors of a table as a whole begin with, of what those of a part begin with.

    >>> whole_of("x/.ATTRIBUTES/kv_part_0"), whole_of("scope/x/part_0"), whole_of("scope/x")
    ('x/.ATTRIBUTES/kv', 'scope/x', 'scope/x')
    """
    return _PART.sub("", prefix)


def tables_in(value: Any) -> list[Any]:
    """The key-value variables in `value`, each once: itself, or what a list, a dictionary, a layer, a model or a
    `tf.Module` holds.

    Raises:
      ValueError: there are none.
    """
    found = {id(table): table for table in _tables(value)}
    if not found:
        raise ValueError(
            f"{value!r} has no key-value variable: give variables that tf.get_kv_variable or a layer has made, or what "
            "holds them. A model of Keras has its tables once it is built."
        )
    return list(found.values())


def _tables(value: Any) -> Iterator[Any]:
    if hasattr(type(value), "_kv_parts"):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tables(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tables(one)
    elif isinstance(value, tf.__internal__.tracking.Trackable):
        for one in tf.train.TrackableView(value).descendants():
            if hasattr(type(one), "_kv_parts"):
                yield one


def name_of(table: Any) -> str:
    """What a table is called: the name that it was made with, in its scope."""
    if getattr(table, "partitioned_name", None) is not None:
        return str(table.partitioned_name)
    return str(getattr(table, "_name", None) or table.name).removesuffix(":0")


def names_there(tables: Any, names: Mapping[Any, str | None] | None) -> list[tuple[Any, str]]:
    """Tables, each with its name in the checkpoint.

    Args:
      tables: as of `tables_in`; or a dictionary whose keys are variables, and whose values their names there.
      names: names there by names here, or by variables; None leaves a table out.

    Raises:
      ValueError: a name in `names` that no table has.
    """
    names = dict(names or {})
    if isinstance(tables, Mapping) and all(hasattr(type(key), "_kv_parts") for key in tables):
        names |= dict(tables)
        tables = list(tables)
    chosen = tables_in(tables)
    by_object = {id(key): name for key, name in names.items() if not isinstance(key, str)}
    by_name = {key: name for key, name in names.items() if isinstance(key, str)}
    unknown = sorted(set(by_name) - {name_of(table) for table in chosen})
    if unknown:
        raise ValueError(no_such("key-value variable", unknown[0], map(name_of, chosen)))
    pairs = []
    for table in chosen:
        there = by_object.get(id(table), by_name.get(name_of(table), name_of(table)))
        if there is not None:
            pairs.append((table, str(there)))
    return pairs


def no_such(what: str, name: str, names: Iterable[str]) -> str:
    """A message: no `what` has this name; those that are alike, and all there are, up to twenty."""
    all_names = sorted(set(names))
    near = difflib.get_close_matches(name, all_names, n=3, cutoff=0.5)
    nearest = f"; the nearest: {', '.join(map(repr, near))}" if near else ""
    listed = ", ".join(map(repr, all_names[:20])) + (", ..." if len(all_names) > 20 else "")
    return f"no {what} '{name}'{nearest}. There are [{listed}]."


def newest_in(path: Any) -> str:
    """The checkpoint that a path names: itself, also if it is a chain's; or the latest one of a folder that has a
    `checkpoint` file."""
    name = str(path)
    if Path(name).is_dir() and not is_chain(name):
        return tf.train.latest_checkpoint(name) or name
    return name


def no_table(name: str, checkpoint: Any, dim: int) -> str:
    """A message: a checkpoint that `kvtools.open` opened has no such table; and, up to three, which of its dense
    variables have rows of `dim` numbers, with what puts these into a table."""
    message = no_such("table", name, checkpoint.tables)
    dense = [one for one in checkpoint.variables if len(one.shape) == 2 and one.shape[1] == dim]
    if not dense:
        return message
    wanted_first = sorted(dense, key=lambda one: name not in (one.name, one.name.removesuffix(_VALUE)))
    listed = ", ".join(f"'{one.name}' {[*one.shape]}" for one in wanted_first[:3]) + (", ..." if len(dense) > 3 else "")
    return (
        f"{message} Dense variables with rows of {dim}: {listed}. Row i of one becomes that of key i by "
        "table.upsert(range(n), tf.train.load_variable(checkpoint, name))."
    )
