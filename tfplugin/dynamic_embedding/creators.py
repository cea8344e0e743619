"""What makes the tables of a variable: the ``kv_creator`` argument."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfplugin.dynamic_embedding.file_system_saver import DynamicEmbeddingSaver
from tfplugin.dynamic_embedding.string_values import StringValueTable
from tfplugin.dynamic_embedding.table import CuckooHashTable


class KVCreator:
    """Makes the tables of a variable, one for each device. Subclasses say of which kind.

    Args:
      config: of the kind of table.
      saver: what saves the tables beside a checkpoint, where they are not saved in it: a `FileSystemSaver`.

    Raises:
      TypeError: the saver is none.
    """

    def __init__(self, config: Any = None, saver: DynamicEmbeddingSaver | None = None) -> None:
        if saver is not None and not isinstance(saver, DynamicEmbeddingSaver):
            raise TypeError(f"{type(self).__name__}: saver must be a DynamicEmbeddingSaver, got {saver!r}.")
        self.config = config
        self.saver = saver

    def create(
        self,
        key_dtype: Any = None,
        value_dtype: Any = None,
        default_value: Any = None,
        name: str | None = None,
        checkpoint: bool | None = None,
        init_size: int | None = None,
        config: Any = None,
        device: str | None = None,
        shard_saveable_object_fn: Any = None,
        **part: Any,
    ) -> Any:
        """A table; see `CuckooHashTable` for the arguments."""
        raise NotImplementedError(f"{type(self).__name__} has no create method.")


class EngineTableCreator(KVCreator):
    """Makes tables of the table engine, and notes in `_made` what the last one was made with."""

    _made: Mapping[str, Any] = {}

    def get_config(self) -> dict[str, Any]:
        """What the last table was made with.

        Raises:
          RuntimeError: not in eager mode.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(f"{type(self).__name__}.get_config is for eager mode.")
        return dict(self._made)


class CuckooHashTableConfig:
    """Has no options."""


class CuckooHashTableCreator(EngineTableCreator):
    """Makes tables in host memory that grow as they need: the default.

    Example:
      >>> v = de.get_variable("user", dim=4, kv_creator=de.CuckooHashTableCreator())
    """

    def create(
        self,
        key_dtype: Any = None,
        value_dtype: Any = None,
        default_value: Any = None,
        name: str | None = None,
        checkpoint: bool | None = None,
        init_size: int | None = 0,
        config: Any = None,
        device: str | None = None,
        shard_saveable_object_fn: Any = None,
        **part: Any,
    ) -> CuckooHashTable | StringValueTable:
        """A table; see `CuckooHashTable` for the arguments."""
        self._made = {
            "key_dtype": key_dtype,
            "value_dtype": value_dtype,
            "name": name,
            "checkpoint": checkpoint,
            "init_size": init_size,
            "config": config,
            "device": device,
        }
        if value_dtype == tf.string:
            return StringValueTable(default_value, name or "CuckooHashTable", bool(checkpoint), device or "")
        return CuckooHashTable(
            key_dtype,
            value_dtype,
            default_value,
            name or "CuckooHashTable",
            bool(checkpoint),
            init_size or 0,
            config,
            device or "",
            shard_saveable_object_fn,
            **part,
        )
