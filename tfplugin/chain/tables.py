"""The tables of a member of a chain: their cuts, and the ops that take, write and give them up."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from kvtools.chain import TableCounts
from tfplugin.ops import raw
from tfplugin.saveable import check_whole

#: A moment of a table: which table of this process it is, and the number of its version. Opaque.
Mark = tuple[int, int]
#: In place of a mark: since ever, all rows.
ALL: Mark = (-1, -1)


@dataclasses.dataclass(frozen=True)
class Moment:
    """All that a member has, as of one moment.

    Attributes:
      is_full: whether it has all rows, or those that changed.
      cuts: by what a part's tensors begin with, the number under which the table keeps the rows.
      marks: by the same, where the next increment begins.
      dense: names, slices and values of everything else.
      step: of training, if it is known.
      time: Unix time in seconds.
    """

    is_full: bool
    cuts: Mapping[str, int]
    marks: Mapping[str, Mark]
    dense: Sequence[tuple[str, str, Any]]
    step: int | None
    time: float


def checked(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables by what their tensors begin with.

    Raises:
      ValueError: one cannot be in a chain; says which, and what to do.
    """
    for variable in tables.values():
        if getattr(variable, "ranks", 1) > 1:
            raise ValueError(
                f"tfplugin.CheckpointManager: '{variable.name}' is spread over {variable.ranks} ranks, and a chain is "
                "written by one process: save it with sok.CheckpointManager on all ranks, whole each time."
            )
        check_whole(variable)
    return dict(tables)


def by_device(tables: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Tables by the device that they are on."""
    groups: dict[str, dict[str, Any]] = collections.OrderedDict()
    for prefix, variable in tables.items():
        groups.setdefault(variable.device or "", {})[prefix] = variable
    yield from groups.items()


def cut(variable: Any, since: Any) -> Any:
    """Has a table keep its rows, or those that changed since a mark, as they are now. Gives its number and the mark."""
    with tf.device(variable.device or None):
        return raw.kv_table_cut(variable.handle, since)


def save_cuts(shard: Any, tables: Mapping[str, Any], cuts: Any) -> Any:
    """Writes what tables of one device keep: a shard of a bundle. Gives rows, removed and born of each."""
    device = next(iter(tables.values())).device
    with tf.device(device or None):
        return raw.kv_table_save_cut(
            shard,
            [variable.handle for variable in tables.values()],
            cuts,
            tensor_prefixes=list(tables),
            names=[variable.partitioned_name or variable._name for variable in tables.values()],
            part=[variable.part for variable in tables.values()],
            parts=[variable.parts for variable in tables.values()],
        )


def counted(tables: Mapping[str, Any], counts: Any) -> dict[str, TableCounts]:
    """What `save_cuts` has given, by table."""
    rows, removed, born = counts
    return {x: TableCounts(int(rows[i]), int(removed[i]), int(born[i])) for i, x in enumerate(tables)}
