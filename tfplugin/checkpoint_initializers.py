"""`tf.compat.v1.train.init_from_checkpoint`, and its `warm_start` on top of it: tables begin with rows of a checkpoint.

TensorFlow finds variables in its own store, in which tables are not, and each in one tensor of the checkpoint, which a
table is not in. Rows come where tables are initialized, as by `tfplugin.warm_start`, without slots, as those of dense
variables do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfplugin.get_kv_variable import tables_of_graph
from tfplugin.named_tables import name_of, newest_in, no_table
from tfplugin.warm_start import fill_parts


def init_from_checkpoint(original: Callable[..., Any], checkpoint: Any, assignment_map: Any) -> None:
    """Replaces ``checkpoint_utils._init_from_checkpoint``.

    Raises:
      ValueError: the checkpoint has no such table, or one of other rows; says which, and what there is.
    """
    pairs = list(assignment_map.items() if isinstance(assignment_map, Mapping) else assignment_map)
    wanted: dict[int, tuple[Any, str]] = {}  # of a part that is named twice the last counts, as of any variable
    others = []
    for there, here in pairs:
        found = list(_parts(there, here))
        wanted |= {id(part): (part, name) for part, name in found}
        if not found or (isinstance(here, str) and here not in tables_of_graph()):
            others.append((there, here))  # a scope has dense variables, too
    if wanted:
        _initialize(newest_in(checkpoint), list(wanted.values()))
    if others or not pairs:
        original(checkpoint, others)


def _parts(there: str, here: Any) -> Iterator[tuple[Any, str]]:
    """The parts of tables that a pair of the map means, each with the name in the checkpoint."""
    if isinstance(here, str):
        tables = tables_of_graph()
        if here in tables:
            yield from ((part, there) for part in tables[here]._kv_parts)
            return
        scope = here[: here.rindex("/") + 1] if "/" in here else ""
        if not there.endswith("/") or here not in (scope, "/"):
            return
        prefix = "" if there == "/" else there
        for name, table in tables.items():
            if here == "/" or name.startswith(scope):
                full = prefix + (name if here == "/" else name[len(scope) :])
                yield from ((part, full) for part in table._kv_parts)
    else:
        for one in here if isinstance(here, (list, tuple)) else [here]:
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
