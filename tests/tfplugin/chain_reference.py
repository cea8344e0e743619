"""What is in the members of a chain, in plain Python: read by TensorFlow's reader, folded with dictionaries."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import tensorflow as tf

#: By key: name of the column -> bytes.
Rows = dict[int, dict[str, bytes]]

_PART = re.compile(r"(_part_|/part_)\d+$")


def tables_in(prefix: str) -> dict[str, tuple[Rows, set[int]]]:
    """By table, parts together: the rows in a checkpoint, and the keys that it says are gone."""
    reader = tf.train.load_checkpoint(prefix)
    names = reader.get_variable_to_shape_map()
    found: dict[str, tuple[Rows, set[int]]] = {}
    for meta in sorted(name for name in names if name.endswith("-kvmeta")):
        x = meta.removesuffix("-kvmeta")
        kvmeta = json.loads(reader.get_tensor(meta))
        rows, removed = found.setdefault(_PART.sub("", x), ({}, set()))
        columns = ["values", "freqs", "versions", *(f"slot-{slot['name']}" for slot in kvmeta["slots"])]
        columns += ["scores"] if f"{x}-scores" in names else []
        arrays = {column: np.ascontiguousarray(_bits(reader.get_tensor(f"{x}-{column}"))) for column in columns}
        keys = reader.get_tensor(f"{x}-keys").tolist()
        assert all(len(array) == len(keys) for array in arrays.values())
        assert not set(keys) & set(rows), "a key is there twice"
        for i, key in enumerate(keys):
            rows[key] = {column: array[i].tobytes() for column, array in arrays.items()}
        if kvmeta.get("delta"):
            removed.update(reader.get_tensor(f"{x}-removed").tolist())
            assert not removed & set(keys), "a key is there and gone"
    return found


def _bits(array: Any) -> np.ndarray:
    return array if array.dtype.kind in "fiu" else array.view(np.uint16)


def folded(prefixes: list[str]) -> dict[str, Rows]:
    """The rows that a full and the increments after it make."""
    found: dict[str, Rows] = {}
    for prefix in prefixes:
        for table, (rows, removed) in tables_in(prefix).items():
            held = found.setdefault(table, {})
            for key in removed:
                held.pop(key, None)
            held.update(rows)
    return found


def dense_in(prefix: str) -> dict[str, bytes]:
    """What a checkpoint has beside tables, but for what counts checkpoints and describes objects."""
    reader = tf.train.load_checkpoint(prefix)
    kept = {}
    for name in reader.get_variable_to_shape_map():
        if "/kv" not in name and not name.startswith(("_", "save_counter")) and "-" not in name:
            kept[name] = np.asarray(reader.get_tensor(name)).tobytes()
    return kept
