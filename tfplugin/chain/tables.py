"""The tables of a member of a chain: their cuts, and the ops that take, write and give them up."""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

import kvtools
from kvtools.chain import Member, Record, TableCounts
from tfplugin.named_tables import whole_of
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


def why_not_followed(
    member: Member, record: Record, tables: Mapping[str, Any], went: Mapping[str, tuple[int, int]]
) -> str:
    """Why no increment can follow a member that these tables were just restored from; '' where one can.

    The rows that a restore leaves out are in the chain, and no increment would say that they went.

    Args:
      member: the newest of the chain.
      record: its own.
      tables: by what their tensors begin with.
      went: by the same, how many rows went as expired or beyond the capacity while the members were read, among them
        such as a later member has again; and how many rows there are now.
    """
    for whole in dict.fromkeys(whole_of(prefix) for prefix, (rows, _) in went.items() if rows):
        parts = [prefix for prefix in tables if whole_of(prefix) == whole]
        left = _rows_in_chain(member, whole) - sum(went[prefix][1] for prefix in parts)
        if left:
            return (
                f"'{tables[parts[0]].name}': the restore left out {left} rows of the chain that have expired, or are "
                "beyond its max_capacity"
            )
    whole_tables = {whole_of(prefix): variable for prefix, variable in tables.items()}
    reader = tf.train.load_checkpoint(str(member.prefix))
    for prefix in record.tables:
        variable = whole_tables.get(whole_of(prefix))
        if variable is None:
            return f"there is no table any longer of which the chain has '{prefix}'"
        said = json.loads(reader.get_tensor(f"{prefix}-kvmeta")).get("policies", {})
        if (said.get("versions") == "steps") != variable.policies.counts_steps:
            return f"'{variable.name}': its versions are {'steps' if variable.policies.counts_steps else 'seconds'} now"
        padding = variable.policies.padding_key
        if padding is not None and said.get("padding_key") != padding:
            return f"'{variable.name}': its padding_key is {padding} now, of which the chain may have a row"
    return ""


def _rows_in_chain(member: Member, whole: str) -> int:
    """How many rows a table has in the chain of a member, by what the tensors of the whole table begin with."""
    place = member.prefix
    if member.kind == "delta":  # by the name of its chain, in the folder
        place = place.parent / place.name.removesuffix(".delta").rpartition("-")[0]
    for there, table in kvtools.open(place).tables.items():
        if whole in (there, f"{table.schema.metadata.get('object_path')}/.ATTRIBUTES/kv"):
            return int(table.rows)
    return 0
