"""`HvdAllToAllEmbedding`: an embedding over all ranks of Horovod."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfplugin import ranks
from tfplugin.dynamic_embedding.keras.layers.rank_part import RankPartCreator
from tfplugin.dynamic_embedding.shadow_ops import serving
from tfplugin.sok.all2all_dense_embedding import all2all_dense_embedding
from tfplugin.sok.exchange_table import ExchangeTable


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
        if mpi_size not in (None, 1, world.size):
            raise ValueError(
                f"{type(self).__name__}: mpi_size must be the number of ranks, {world.size}, 1 for a table that each "
                f"rank has for itself, or None, got {mpi_size!r}."
            )
        size = world.size if mpi_size is None else mpi_size
        if size > 1:
            kwargs["kv_creator"] = RankPartCreator(kwargs.get("kv_creator"), world.rank, size)
        super().__init__(*args, with_unique=with_unique, **kwargs)
        self.with_secondary_unique = bool(with_secondary_unique)
        self.mpi_size = mpi_size
        self.batch_size = batch_size
        self._table: ExchangeTable | None = None
        if size == 1:
            return
        params = self.params  # type: ignore[has-type]
        if params.parts[0].ranks != size:
            raise ValueError(
                f"{type(self).__name__} '{self.name}': this rank has a variable '{params.name}' for itself: "  # type: ignore[attr-defined]
                "give the layer another name."
            )
        if params.key_dtype not in (tf.int64, tf.int32, tf.uint64):
            raise TypeError(
                f"{type(self).__name__} '{self.name}': keys that travel between ranks are int64, int32 or uint64, got "  # type: ignore[attr-defined]
                f"{params.key_dtype.name}: hash strings with tf.strings.to_hash_bucket_strong."
            )
        self._table = ExchangeTable(
            params,
            params.name,
            -1,
            -1,
            params.parts[0].key_dtype,
            params.value_dtype,
            params.dim,
            read=lambda keys: self.shadow.rows_of(keys),  # type: ignore[attr-defined]
        )

    def _rows(self, ids: Any) -> Any:
        if self._table is None or serving():
            return super()._rows(ids)  # type: ignore[misc]
        return all2all_dense_embedding(self._table, ids, training=False, name=self.name)  # type: ignore[attr-defined]

    def get_config(self) -> dict[str, Any]:
        """What it takes to make the layer again."""
        config = super().get_config()  # type: ignore[misc]
        if isinstance(config["kv_creator"], RankPartCreator):
            config["kv_creator"] = config["kv_creator"].of
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
