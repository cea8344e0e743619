"""`HvdAllToAllEmbedding`: an embedding over all ranks of Horovod."""

from __future__ import annotations

from typing import Any

from tfplugin import ranks
from tfplugin.dynamic_embedding.hvd_variable import check_size, spread, spread_lookup
from tfplugin.dynamic_embedding.rank_part import RankPartCreator


class HvdAllToAllLayer:
    """What `HvdAllToAllEmbedding` is beside an `Embedding`."""

    def __init__(
        self,
        with_unique: bool = True,
        with_secondary_unique: bool = True,
        mpi_size: int | None = None,
        batch_size: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        world = ranks.found()
        check_size(mpi_size, type(self).__name__)
        size = world.size if mpi_size is None else mpi_size
        if size > 1:
            kwargs["kv_creator"] = RankPartCreator(kwargs.get("kv_creator"), world.rank, size)
        super().__init__(*args, with_unique=with_unique, **kwargs)
        self.with_secondary_unique = bool(with_secondary_unique)
        self.mpi_size = mpi_size
        self.batch_size = batch_size
        params = self.params  # type: ignore[has-type]
        if size > 1 and params.parts[0].ranks != size:
            raise ValueError(
                f"{type(self).__name__} '{self.name}': this rank has a variable '{params.name}' for itself: "  # type: ignore[attr-defined]
                "give the layer another name."
            )
        self._table = spread(self.shadow, mpi_size, f"{type(self).__name__} '{self.name}'")  # type: ignore[attr-defined]

    def _rows(self, ids: Any) -> Any:
        if self._table is None:
            return super()._rows(ids)  # type: ignore[misc]
        return spread_lookup(self._table, self.shadow, ids, self.name)  # type: ignore[attr-defined]

    def get_config(self) -> dict[str, Any]:
        """What it takes to make the layer again."""
        config = super().get_config()  # type: ignore[misc]
        mine = {
            "with_secondary_unique": self.with_secondary_unique,
            "mpi_size": self.mpi_size,
            "batch_size": self.batch_size,
        }
        return {**config, **mine}

    def save_own_variables(self, store: Any) -> None:
        """As of `Embedding`, where there is one rank.

        Raises:
          ValueError: there are several.
        """
        if self._table is not None:
            raise ValueError(
                f"Layer '{self.name}' has its rows on {ranks.size()} ranks, and this rank would save its own only: "  # type: ignore[attr-defined]
                "save with de.keras.models.de_hvd_save_model, or with sok.Checkpoint, on all ranks."
            )
        super().save_own_variables(store)  # type: ignore[misc]
