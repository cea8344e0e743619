"""`restore_tables`: some tables of a checkpoint, and nothing else of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from kvtools.chain import newest_chain
from kvtools.chain_place import chain_at, is_chain
from kvtools.dialects.location import refuse_keras_archive
from tfplugin import slot_binding
from tfplugin.named_tables import name_of, names_there, newest_in, no_such, whole_of
from tfplugin.row_counts import row_count
from tfplugin.saveable import check_whole, restore_op

_META = "-kvmeta"
_KV = ".ATTRIBUTES/kv"


def restore_tables(checkpoint: Any, tables: Any, names: Mapping[Any, str] | None = None) -> Any:
    """Restores tables from a checkpoint of `tf.compat.v1.train.Saver` or `tf.train.Checkpoint`, and nothing else of it.

    Each gets what the checkpoint has of it, in place of what it holds: rows, slots, counts, times, and what new rows
    start from. Other tables, dense variables and optimizers stay as they are. A table that was saved in any number of
    parts goes into any other.

    Args:
      checkpoint: its path, as ``save`` gave it; or its folder, of which the latest is taken: of that of a
        `CheckpointManager` the newest full and the increments after it.
      tables: a variable, or a list of them; a layer, a model or a `tf.Module`, for all that it holds; or a dictionary
        from variables to their names in the checkpoint.
      names: what tables are called there, by their names here, where that differs. A name there is that of the
        variable, or its path in the object graph of a `tf.train.Checkpoint` (``model/user_emb``).

    Returns:
      By name how many rows came and are in the table, in eager mode; in a graph the op that restores. Where others did
      not fit into a ``max_capacity``, expired, or have the ``padding_key``, the log says how many.

    Raises:
      ValueError: no table of that name; the nearest are named.
      kvtools.errors.BadInputError: a file of Keras, which says how to get at the checkpoint in it.
      kvtools.chain.ChainError: a member of the chain is missing, or another one; nothing was restored.
      tf.errors.InvalidArgumentError: rows of another width or type.
      tf.errors.DataLossError: the checkpoint is damaged. The table is as it was.

    Example:
      >>> tfplugin.restore_tables("model.ckpt-100", [user])
      {'user': 20000}
      >>> tfplugin.restore_tables("model.ckpt-100", {user: "old/user"})
      {'user': 20000}
    """
    path = newest_in(checkpoint)
    members = _members_of(path)
    known = _tables_of(members[0])
    restored: dict[str, Any] = {}
    ops = []
    for table, there in names_there(tables, names):
        if there not in known:
            message = no_such("table", there, known)
            raise ValueError(f"restore_tables: '{name_of(table)}' from checkpoint '{path}': {message}")
        base, infix = known[there]
        check_whole(table)
        for part in table._kv_parts:
            ops.append(restore_op(tf.constant(members), part, base, infix))
            # Optimizers that came along with the table in an earlier restore keep to their slots.
            slot_binding.restored(part, getattr(table, "_update_uid", -1))
        if tf.executing_eagerly():
            restored[name_of(table)] = int(row_count(table))
    return restored if tf.executing_eagerly() else tf.group(*ops, name="restore_tables")


def _members_of(path: str) -> list[str]:
    """What a checkpoint is restored from: itself, or the newest full of a chain and the increments after it."""
    if not is_chain(path):
        return [path]
    place = chain_at(path)
    members = [str(member.prefix) for member in newest_chain(place.folder, place.name)]
    return members or [path]


def _tables_of(path: str) -> dict[str, tuple[str, str]]:
    """What the tensors of each table begin with, and what stands before the number of a part, by each of its names."""
    refuse_keras_archive(Path(path))
    reader = tf.train.load_checkpoint(path)
    metas: dict[tuple[str, str], str] = {}
    for tensor in sorted(reader.get_variable_to_shape_map()):
        if tensor.endswith(_META):
            whole = whole_of(tensor.removesuffix(_META))
            metas.setdefault((whole, "_part_" if whole.endswith(_KV) else "/part_"), tensor)
    known: dict[str, tuple[str, str]] = {}
    called: dict[str, list[tuple[str, str]]] = {}
    for table, meta in metas.items():
        known[table[0]] = table
        if table[1] == "_part_":
            known[table[0].removesuffix(_KV).removesuffix("/")] = table
            called.setdefault(str(json.loads(reader.get_tensor(meta)).get("name")), []).append(table)
    # By the variable's name where it says which one is meant.
    for name, those in called.items():
        if len(those) == 1:
            known.setdefault(name, those[0])
    return known
