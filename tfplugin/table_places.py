"""Whether a checkpoint has the same table at a place of the object graph, another one, or none.

`tf.train.Checkpoint` knows objects by their places, and the place of a layer in a functional or sequential model of
Keras is a number, `model/_operations/3/table`. Where layers come, go or change places, another table lies there, whose
rows would fit, or none. Tables have names, and checkpoints record them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfplugin.named_tables import name_of, whole_of

_META = "-kvmeta"
_KV = "/.ATTRIBUTES/kv"
#: What Keras calls layers that nobody has named: other numbers in each process.
_UNNAMED = re.compile(r"embedding(_\d+)?")


def misplaced(prefix: str, tables: Mapping[str, Any]) -> str:
    """Which of the tables a restore would give the rows of another one, or none, though the checkpoint has its own.

    One whose name the checkpoint does not have is new, or has another name now, and is no fault.

    Args:
      prefix: of the checkpoint.
      tables: by what their tensors begin with, whole or in parts.

    Returns:
      A sentence; '' where there is none.
    """
    reader = tf.train.load_checkpoint(prefix)
    shapes = reader.get_variable_to_shape_map()
    found = {whole_of(tensor.removesuffix(_META)): tensor for tensor in shapes if tensor.endswith(_META)}
    found = {place: tensor for place, tensor in found.items() if place.endswith(_KV)}  # a Saver's go by their names

    def name_at(place: str) -> str | None:
        return json.loads(reader.get_tensor(found[place])).get("name") if place in found else None

    here = {whole_of(place): name_of(table) for place, table in tables.items()}
    others = {place: name for place, name in here.items() if name_at(place) != name and not _UNNAMED.fullmatch(name)}
    places = {name_at(place): place for place in found} if others else {}
    for place, name in others.items():
        if name in places and here.get(places[name]) != name:
            there = f"table '{name_at(place)}'" if place in found else "none"
            return (
                f"table '{name}' is at '{place.removesuffix(_KV)}', where the checkpoint has {there}, and it has "
                f"'{name}' at '{places[name].removesuffix(_KV)}': layers came, went or changed places"
            )
    return ""


def renamed(prefix: str, tables: Mapping[str, Any]) -> str:
    """Which tables a restore gives no rows, where it leaves out rows of others: it may be that they have new names.

    Args:
      prefix: of the checkpoint.
      tables: by what their tensors begin with, whole or in parts.

    Returns:
      A sentence; '' where there is none.
    """
    shapes = tf.train.load_checkpoint(prefix).get_variable_to_shape_map()
    found = {whole_of(tensor.removesuffix(_META)) for tensor in shapes if tensor.endswith(_META)}
    here = {whole_of(place): name_of(table) for place, table in tables.items()}
    new = sorted(repr(name) for place, name in here.items() if place not in found)
    left = sorted(repr(place.removesuffix(_KV)) for place in found if place.endswith(_KV) and place not in here)
    if not new or not left:
        return ""
    return f"there are no rows at the places of {_some(new)}, and nothing takes those of {_some(left)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
