"""Slots of optimizers as arrays, and back: for the file of a Keras model, which has arrays only."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfplugin.dynamic_embedding.checkpoint import from_arrays
from tfplugin.dynamic_embedding.partition import owners_of
from tfplugin.dynamic_embedding.sharded_table import ShardedTable
from tfplugin.ops import raw
from tfplugin.saveable import restore_op

_log = logging.getLogger("tfplugin")


def slot_arrays(variable: ShardedTable) -> dict[str, np.ndarray]:
    """``keys`` [n] (of strings their hashes) and each slot [n, width] by name; nothing where there are no slots.

    A table that has not been trained lacks the slots of the others: its rows have what they start from.
    """
    if variable.rows_elsewhere or not variable.parts:
        return {}
    specs = [json.loads(part.slots().numpy()) for part in variable.parts]
    every = {spec["name"]: spec for of_part in specs for spec in of_part}
    if not every:
        return {}
    columns: dict[str, list[np.ndarray]] = {name: [] for name in ("keys", *every)}
    for part, of_part in zip(variable.parts, specs, strict=True):
        ids = raw.kv_table_keys(part.handle, Tkeys=part.key_dtype)
        # With the value, which there always is: rows of keys that have gone meanwhile are left out.
        widths = {"": part.dim, **{spec["name"]: int(spec["width"]) for spec in of_part}}
        read, found = raw.kv_table_read_columns(
            part.handle, ids, dtype=part.dtype, N=len(widths), columns=list(widths), widths=list(widths.values())
        )
        rows = {name: column.numpy()[found.numpy()] for name, column in zip(widths, read, strict=True)}
        rows["keys"] = ids.numpy()[found.numpy()]
        for name, spec in every.items():
            if name not in rows:
                shape = [len(rows["keys"]), int(spec["width"])]
                rows[name] = np.full(shape, spec.get("constant", 0.0), part.dtype.as_numpy_dtype)
        for name, arrays in columns.items():
            arrays.append(rows[name])
    return {name: np.concatenate(arrays) for name, arrays in columns.items()}


def restore_slots(variable: ShardedTable, columns: Mapping[str, np.ndarray]) -> None:
    """Gives rows the slots that `slot_arrays` gave. Rows that are not there are made, with their initial values."""
    if variable.rows_elsewhere or not variable.parts:
        return
    if variable.names is not None and not variable._by_modulo:
        _log.warning("The slots of %r are not loaded: its partitioner wants the strings of the keys.", variable)
        return
    ids = tf.constant(np.asarray(columns["keys"]), variable.parts[0].key_dtype)
    if variable._by_modulo:
        owner = raw.kv_table_partition(ids, parts=variable.shard_num).numpy()
    else:
        owner = owners_of(variable, ids).numpy()
    with tempfile.TemporaryDirectory(prefix="tfplugin-slots-") as folder:
        for i, part in enumerate(variable.parts):
            own = tf.boolean_mask(ids, owner == i)
            others = tf.raw_ops.ListDiff(x=part.export()[0], y=own).out
            arrays = {
                "keys": own.numpy(),
                "values": _rows(variable, i, own).numpy(),
                **{
                    f"slot:{name}": np.asarray(rows)[owner == i].astype(part.dtype.as_numpy_dtype)
                    for name, rows in columns.items()
                    if name != "keys"
                },
            }
            other_rows = _rows(variable, i, others)
            prefix = Path(folder) / f"rows_{i}"
            _write(arrays, prefix)
            restore_op(tf.constant(str(prefix)), part, "rows", "/part_")
            part.upsert(others, other_rows)


def _rows(variable: ShardedTable, index: int, ids: tf.Tensor) -> tf.Tensor:
    part = variable.parts[index]
    rows, _ = raw.kv_table_gather(part.handle, ids, dtype=part.dtype, dim=variable.dim, mode="initial", remember=False)
    return rows


def _write(arrays: Mapping[str, np.ndarray], prefix: Path) -> None:
    import kvtools

    kvtools.write_tables([from_arrays("rows", arrays)], prefix, "tfplugin", parts=1)
