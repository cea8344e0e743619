"""`tf.compat.v1.train.init_from_checkpoint`, and its `warm_start` on top of it: tables begin with rows of a checkpoint.

TensorFlow finds variables in its own store, in which tables are not, and each in one tensor of the checkpoint, which a
table is not in. Rows come where tables are initialized, as by `tfplugin.warm_start`, without slots, as those of dense
variables do. Tables of `tfra.dynamic_embedding` have no initializer in a graph: they are refused by name, and told in
the log where a scope has them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfplugin.get_kv_variable import tables_of_graph
from tfplugin.named_tables import name_of, newest_in, no_table, whole_of
from tfplugin.saveable import KvSaveable
from tfplugin.warm_start import fill_parts

_log = logging.getLogger("tfplugin")


def init_from_checkpoint(original: Callable[..., Any], checkpoint: Any, assignment_map: Any) -> None:
    """Replaces ``checkpoint_utils._init_from_checkpoint``.

    Raises:
      ValueError: the checkpoint has no such table, or one of other rows; says which, and what there is. A table of
        `tfra.dynamic_embedding` in a graph.
    """
    pairs = list(assignment_map.items() if isinstance(assignment_map, Mapping) else assignment_map)
    tables: dict[str, list[Any]] = {}
    if not tf.executing_eagerly():
        tables = _tables()
        _tell_of_dynamic(checkpoint, pairs)
    wanted: dict[int, tuple[Any, str]] = {}  # of a part that is named twice the last counts, as of any variable
    others = []
    for there, here in pairs:
        found = list(_parts(there, here, tables))
        wanted |= {id(part): (part, name) for part, name in found}
        if not found or (isinstance(here, str) and here not in tables):
            others.append((there, here))  # a scope has dense variables, too
    if wanted:
        _initialize(newest_in(checkpoint), list(wanted.values()))
    if others or not pairs:
        original(checkpoint, others)


def _tables() -> dict[str, list[Any]]:
    """The parts of tables that the default graph initializes, by the tables' names.

    Those of `tf.get_kv_variable`, and others among the graph's variables.
    """
    tables = {name: list(table._kv_parts) for name, table in tables_of_graph().items()}
    known = {id(part) for parts in tables.values() for part in parts}
    for variable in tf.compat.v1.global_variables():
        if hasattr(type(variable), "_kv_parts") and id(variable) not in known:
            tables.setdefault(name_of(variable), []).extend(variable._kv_parts)
    return tables


def _tell_of_dynamic(checkpoint: Any, pairs: Sequence[tuple[str, Any]]) -> None:
    """Says of tables of the graph without an initializer that none fills them."""
    saveables = tf.compat.v1.get_collection(tf.compat.v1.GraphKeys.SAVEABLE_OBJECTS)
    names = {
        whole_of(one.tensor_prefix)
        for one in saveables
        if isinstance(one, KvSaveable) and one.variable._starts_initialized
    }

    def told(name: str) -> str:
        return (
            f"init_from_checkpoint: dynamic embedding variable '{name}' has no initializer that could give it rows of "
            f"checkpoint '{checkpoint}': run tfplugin.dynamic_embedding.warm_start('{checkpoint}', ...) in the session"
        )

    in_scopes: dict[str, str] = {}
    for there, here in pairs:
        if not isinstance(here, str):
            for one in _each(here):
                if any(part._starts_initialized for part in getattr(one, "_kv_parts", ())):
                    raise ValueError(f"{told(name_of(one))}, and leave it out of the map.")
        elif here in names:
            raise ValueError(f"{told(here)}, and leave it out of the map.")
        else:
            in_scopes |= dict(_in_scope(there, here, names))
    if in_scopes:
        import kvtools

        known = kvtools.open(newest_in(checkpoint)).tables
        for name in sorted(name for name, full in in_scopes.items() if full in known):
            _log.warning("%s.", told(name))


def _each(here: Any) -> Sequence[Any]:
    """The variables that a map names by themselves: one, or the parts of one."""
    return here if isinstance(here, (list, tuple)) else [here]


def _in_scope(there: str, here: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Which of `names` a pair of scopes means, each with the name in the checkpoint."""
    scope = here[: here.rindex("/") + 1] if "/" in here else ""
    if not there.endswith("/") or here not in (scope, "/"):
        return
    prefix = "" if there == "/" else there
    for name in names:
        if here == "/" or name.startswith(scope):
            yield name, prefix + (name if here == "/" else name[len(scope) :])


def _parts(there: str, here: Any, tables: Mapping[str, Sequence[Any]]) -> Iterator[tuple[Any, str]]:
    """The parts of tables that a pair of the map means, each with the name in the checkpoint."""
    if isinstance(here, str):
        if here in tables:
            yield from ((part, there) for part in tables[here])
            return
        for name, full in _in_scope(there, here, tables):
            yield from ((part, full) for part in tables[name])
    else:
        for one in _each(here):
            if hasattr(type(one), "_kv_parts"):
                yield from ((part, there) for part in one._kv_parts)


def _initialize(path: str, wanted: Sequence[tuple[Any, str]]) -> None:
    import kvtools

    opened = kvtools.open(path)
    for part, there in wanted:
        # TensorFlow's warm_start names a part of a variable as it is called itself.
        whole = there if there in opened.tables else there.removesuffix(f"/part_{part.part}")
        if whole not in opened.tables:
            message = no_table(there, opened, part.dim)
            raise ValueError(f"init_from_checkpoint: '{name_of(part)}' from checkpoint '{path}': {message}")
        if tf.executing_eagerly():
            part.initialize()
            fill_parts(part, path, opened.tables[whole])
            continue
        with part.graph.as_default(), tf.name_scope(""), tf.name_scope(f"{part.handle.op.name}/"):
            with tf.device(part.device or None):
                emptied = part.initialize()
            with tf.control_dependencies([emptied]):
                part._initializer_op = fill_parts(part, path, opened.tables[whole]).op
