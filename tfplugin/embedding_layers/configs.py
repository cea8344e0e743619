"""`TableConfig` and `FeatureConfig`: what an `EmbeddingCollection` is made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfplugin.embedding_layers.layer_tables import TableOptions

#: Where a table may be asked to be. Both say the same: where the layer is made (``with tf.device``), or on the CPU.
_PLACEMENTS = ("auto", "default_device")


@dataclasses.dataclass
class TableConfigFields:
    """What `TableConfig` is, for any Keras."""

    name: str
    _: dataclasses.KW_ONLY
    embedding_dim: int
    initializer: Any = None
    optimizer: Any = None
    combiner: str | None = "mean"
    placement: str = "auto"
    max_ids_per_partition: int | None = None
    max_unique_ids_per_partition: int | None = None
    vocabulary_size: None = None
    padding_id: Any = None
    regularizer: Any = None
    constraint: Any = None
    max_capacity: int | None = None
    eviction: str | None = None
    admission: Any = None
    expiry: Any = None
    expire_every: int = 0
    expire_on_save: bool = False
    max_hbm: int | None = None
    max_memory: int | None = None
    spill: str | None = None
    capacity_hint: int = 0
    parts: int | None = None
    key_dtype: Any = "int64"

    #: The Keras that names are looked up in.
    _keras = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"TableConfig: name must be the name of the table, got {self.name!r}.")
        what = f"TableConfig '{self.name}'"
        if self.vocabulary_size is not None:
            raise ValueError(
                f"{what}: a table has no vocabulary: leave vocabulary_size={self.vocabulary_size!r} out. Any id has a "
                "row, which training makes when it comes; max_capacity bounds how many there are."
            )
        if self.placement not in _PLACEMENTS:
            raise ValueError(
                f"{what}: placement must be one of {_PLACEMENTS}, got {self.placement!r}: make the layer under "
                "tf.device to have its tables elsewhere."
            )
        if self.initializer is None:
            self.initializer = self._keras.initializers.VarianceScaling(mode="fan_out")  # type: ignore[attr-defined]
        self.options()

    def options(self) -> TableOptions:
        """What the table is made with."""
        fields = {field.name for field in dataclasses.fields(TableOptions)} & vars(self).keys()
        given = {field: getattr(self, field) for field in fields}
        return TableOptions(dim=self.embedding_dim, **given).resolved(self._keras, f"TableConfig '{self.name}'")

    def get_config(self) -> dict[str, Any]:
        """What it takes to make it again: plain data."""
        config = self.options().config(self._keras, f"TableConfig '{self.name}'")
        for inferred in ("dim", "mask_zero"):
            del config[inferred]
        own = ("name", "embedding_dim", "placement", "max_ids_per_partition", "max_unique_ids_per_partition")
        return {**{field: getattr(self, field) for field in own}, **config}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The config that `get_config` told of."""
        return cls(**config)


@dataclasses.dataclass
class FeatureConfigFields:
    """What `FeatureConfig` is, for any Keras."""

    name: str
    table: Any
    input_shape: Sequence[int | None] | None = None
    output_shape: Sequence[int | None] | None = None

    #: The class of tables.
    _table_config = TableConfigFields

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"FeatureConfig: name must be the name of the feature, got {self.name!r}.")
        if not isinstance(self.table, TableConfigFields):
            raise TypeError(
                f"FeatureConfig '{self.name}': table must be a TableConfig of tfplugin, got "
                f"{type(self.table).__module__}.{type(self.table).__name__}."
            )

    def get_config(self) -> dict[str, Any]:
        """What it takes to make it again: plain data."""
        return {
            "name": self.name,
            "table": self.table.get_config(),
            "input_shape": _plain(self.input_shape),
            "output_shape": _plain(self.output_shape),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """The config that `get_config` told of."""
        return cls(**{**config, "table": cls._table_config.from_config(config["table"])})


def _plain(shape: Any) -> list[int | None] | None:
    return None if shape is None else [None if size is None else int(size) for size in shape]
