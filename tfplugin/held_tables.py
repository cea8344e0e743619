"""The tables that the layers of a model hold, as what reads and writes models takes them: each once, in their order."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfplugin import keras_models, keras_training
from tfplugin.kv_variable import KvVariable
from tfplugin.named_tables import name_of
from tfplugin.ops import raw

#: Rows that are written at a time.
_CHUNK = 1 << 16


@dataclasses.dataclass(frozen=True, eq=False)
class HeldTable:
    """A table that layers hold.

    Attributes:
      table: what the layer holds, a variable in one part or many.
      layer: the first one that holds it.
      name: of the table; `names_of` numbers equal ones.
      trainable: whether the table is, and a layer that holds it.
      unnumbered: where Keras made the name, of what is the same in all models of that making; None: the user gave it.
    """

    table: Any
    layer: Any
    name: str
    trainable: bool
    unnumbered: str | None = None

    @property
    def parts(self) -> tuple[Any, ...]:
        """Its parts."""
        return tuple(self.table._kv_parts)

    @property
    def dim(self) -> int:
        """Width of a row."""
        return int(self.parts[0].dim)

    @property
    def key_dtype(self) -> tf.DType:
        """Of the keys."""
        return self.parts[0].key_dtype

    @property
    def dtype(self) -> tf.DType:
        """Of the rows."""
        return self.parts[0].dtype

    @property
    def eager(self) -> bool:
        """Whether its rows can be read at once; those of a table in a graph of TensorFlow 1 take a session."""
        return bool(self.parts[0]._eager)

    def own_optimizer(self) -> Any:
        """The optimizer that its layer has for it; None: that of the model."""
        return keras_training.own_optimizer(self.layer, self.table)

    def rows(self) -> int:
        """Number of rows now; 0 of a table in a graph."""
        # Subclasses of other APIs have properties of these names.
        return sum(int(KvVariable.size(part)) for part in self.parts) if self.eager else 0

    def read(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """All keys [n], ascending, and their rows [n, dim]."""
        exported = [KvVariable.export(part) for part in self.parts]
        keys = np.concatenate([part_keys.numpy() for part_keys, _ in exported])
        rows = np.concatenate([part_rows.numpy() for _, part_rows in exported])
        order = np.argsort(keys, kind="stable")
        return keys[order], rows[order]

    def replace(self, keys: np.ndarray[Any, Any], rows: np.ndarray[Any, Any]) -> None:
        """Leaves these keys and rows and no others. Keys that were there keep their slots."""
        owner = keys % np.array(len(self.parts), keys.dtype)
        for number, part in enumerate(self.parts):
            mine = keys if len(self.parts) == 1 else keys[owner == number]
            values = rows if len(self.parts) == 1 else rows[owner == number]
            there = raw.kv_table_keys(part.handle, Tkeys=part.key_dtype).numpy()
            gone = np.setdiff1d(there, mine)
            for first in range(0, len(gone), _CHUNK):
                KvVariable.remove(part, tf.constant(gone[first : first + _CHUNK], part.key_dtype))
            for first in range(0, len(mine), _CHUNK):
                chunk = slice(first, first + _CHUNK)
                KvVariable.upsert(
                    part, tf.constant(mine[chunk], part.key_dtype), tf.constant(values[chunk], part.dtype)
                )

    def describe(self) -> str:
        """Its name, keys and rows, for messages."""
        return f"'{self.name}' ({self.key_dtype.name} -> {self.dtype.name}[{self.dim}])"


def held_tables(model: Any) -> list[HeldTable]:
    """The tables of the layers of a model, or of a layer, each once. Those whose rows are in a server are left out."""
    layers_of: dict[int, list[Any]] = {}
    made = {layer.name for layer in model._flatten_layers() if _named_by_keras(layer)}
    tables: dict[int, Any] = {}
    seen: dict[int, int] = {}
    for part, table, layer in keras_models.table_holders(model):
        # What stands for a table's rows in a layer has the table's parts.
        table = getattr(table, "params", table)
        if keras_models.is_elsewhere(table):
            continue
        first = seen.setdefault(id(part), id(table))
        tables.setdefault(first, table)
        layers_of.setdefault(first, []).append(layer)
    return [
        HeldTable(
            table,
            layers_of[key][0],
            name_of(table),
            bool(table.trainable) and any(keras_models.is_trained(table._kv_parts[0], one) for one in layers_of[key]),
            _unnumbered(name_of(table), made),
        )
        for key, table in tables.items()
    ]


def _named_by_keras(layer: Any) -> bool:
    """Whether a layer has a name that Keras makes of its class and a number, and nobody is known to have given it."""
    stem = re.sub(r"_\d+$", "", layer.name).replace("_", "").lower()
    return stem == type(layer).__name__.replace("_", "").lower() and not getattr(layer, "_name_was_given", False)


def _unnumbered(name: str, made: set[str]) -> str | None:
    """The name of a table without the numbers of the names of layers in it that Keras `made`; None: there are none."""
    segments = name.split("/")
    if not made.intersection(segments):
        return None
    return "/".join(re.sub(r"_\d+$", "", segment) if segment in made else segment for segment in segments)


def keeps_rows_itself(layer: Any) -> bool:
    """Whether the layer is one of ours whose rows are among its weights, with their keys, and in Keras's files."""
    owner = keras_models.defining_class(type(layer), "save_own_variables")
    return owner is not None and owner.__module__.partition(".")[0] == "tfplugin"


def names_of(held: Sequence[HeldTable]) -> list[str]:
    """Their names, of which equal ones are numbered: ``user``, ``user~1``."""
    names: list[str] = []
    for one in held:
        name, number = one.name, 0
        while name in names:
            number += 1
            name = f"{one.name}~{number}"
        names.append(name)
    return names
