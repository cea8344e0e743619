"""Tables of which each rank of Horovod has a part."""

from __future__ import annotations

from typing import Any

from tfplugin.dynamic_embedding.creators import CuckooHashTableCreator, KVCreator


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
