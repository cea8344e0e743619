"""Tables of which each rank of Horovod has a part."""

from __future__ import annotations

from typing import Any

from tfplugin.dynamic_embedding.creators import CuckooHashTableCreator, KVCreator
from tfplugin.dynamic_embedding.sharded_table import ShardedTable


def be_part(variable: ShardedTable, rank: int, ranks: int) -> None:
    """Makes the one table of a variable, which has no rows yet, and that of its status, the ones of this rank.

    Raises:
      ValueError: it has several tables.
    """
    if variable.shard_num != 1 or not variable.parts:
        raise ValueError(f"{variable!r} is to be spread over {ranks} ranks: it has one table on each, got several.")
    table = variable.parts[0]
    table.ranks, table.part, table.parts = ranks, rank, ranks
    status = None if variable.restrict_policy is None else variable.restrict_policy.status
    if isinstance(status, ShardedTable):
        be_part(status, rank, ranks)


class RankPartCreator(KVCreator):
    """Makes the table of this rank: that of the keys with key floor-mod `ranks` == `rank`.

    Args:
      of: what makes a table; default: tables in host memory.
      rank: number of this process.
      ranks: how many there are.
    """

    def __init__(self, of: KVCreator | None, rank: int, ranks: int) -> None:
        self.of = of or CuckooHashTableCreator()
        super().__init__(self.of.config, self.of.saver)
        self._rank, self._ranks = rank, ranks
        self.one_table = getattr(self.of, "one_table", False)
        if hasattr(self.of, "key_names"):
            self.key_names = self.of.key_names

    def for_status(self) -> RankPartCreator:
        """What makes the table of a restrict policy, which lies where the rows do."""
        return RankPartCreator(None, self._rank, self._ranks)

    def create(self, *args: Any, **kwargs: Any) -> Any:
        """As of the creator that this one has."""
        if kwargs.get("parts", 1) > 1:
            raise ValueError("A layer whose rows are spread over ranks has one device on each, got several devices.")
        table = self.of.create(*args, **{**kwargs, "part": self._rank, "parts": self._ranks, "whole": None})
        table.kv.ranks = self._ranks
        return table
