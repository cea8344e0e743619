"""`HvdAllToAllEmbedding`: an embedding over all ranks of Horovod."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfplugin import ranks
from tfplugin.dynamic_embedding.hvd_variable import check_size, spread, spread_lookup
from tfplugin.dynamic_embedding.rank_part import RankPartCreator


def _check_arguments(layer: str, with_unique: Any, with_secondary_unique: Any, mpi_size: Any, has_width: bool) -> None:
    """In other layers the width comes first; here it comes after all of these, as in TFRA.

    Raises:
      TypeError: one of these looks like something else; there is no width.
    """
    if not (with_unique is None or isinstance(with_unique, (bool, np.bool_)) or with_unique in (0, 1)) or not has_width:
        given = "" if isinstance(with_unique, (bool, np.bool_)) else f", and with_unique is {with_unique!r}"
        missing = "" if has_width else "embedding_size is missing"
        raise TypeError(
            f"{layer}: {missing or 'with_unique must be True or False'}{given}. The positional arguments are "
            "with_unique, with_secondary_unique, mpi_size, batch_size, and only then embedding_size: give the width of "
            f"a row by name, {layer}(embedding_size=8)."
        )
    if not (with_secondary_unique is None or isinstance(with_secondary_unique, (bool, np.bool_))):
        raise TypeError(
            f"{layer}: with_secondary_unique must be True or False, got {with_secondary_unique!r}. Releases of TFRA "
            "that do not have it take mpi_size in its place: give these arguments by name."
        )
    if isinstance(mpi_size, (bool, np.bool_)):
        raise TypeError(f"{layer}: mpi_size must be a number of ranks or None, got {mpi_size!r}.")


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
        has_width = bool(args) or "embedding_size" in kwargs
        _check_arguments(type(self).__name__, with_unique, with_secondary_unique, mpi_size, has_width)
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
