"""Where a lookup found its rows, told to the optimizer that updates them.

A training lookup of the op ``KvTableGather`` can give, beside the rows, where each lies (``shard << 32 | row``, -1 for
none). The gradient function ties these positions to the ``indices`` tensor of the `tf.IndexedSlices` that it makes, as
an attribute of the Python object. Whoever gets that very tensor, also after ``tf.clip_by_norm`` and its kin, which keep
the indices and replace the values, can spare itself the search for the keys. A position is a hint: the table checks it
against the key in the row, and searches where it does not hold.

The gradient of a part of a variable is a copy of some rows of the whole variable's gradient. Graphs have tied to it
where in the whole these are: who takes the rows from there does without the copy, which is then never made.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

_ATTRIBUTE = "_kv_positions"
_IN_WHOLE = "_kv_in_whole"


@dataclasses.dataclass(frozen=True)
class InWhole:
    """The gradient of a part in that of the whole variable, whose ``gradients[places[i]]`` is that of ``keys[i]``."""

    keys: tf.Tensor
    positions: tf.Tensor
    places: tf.Tensor
    gradients: tf.Tensor


def remember(indices: tf.Tensor, positions: tf.Tensor) -> None:
    """Ties `positions`, int64 [n], to `indices` [n]: a tensor that nobody else uses as ids of another table."""
    setattr(indices, _ATTRIBUTE, positions)


def recall(indices: tf.Tensor) -> tf.Tensor | None:
    """The positions tied to `indices`, or None: none were, or they are of another graph and cannot be used here.

    Where a graph joins the gradients of several lookups of one table, those of the parts are joined.
    """
    positions = getattr(indices, _ATTRIBUTE, None)
    eager = isinstance(indices, tf_ops.EagerTensor)
    if positions is None:
        return None if eager else _of_joined(indices)
    if eager != isinstance(positions, tf_ops.EagerTensor) or (not eager and positions.graph is not indices.graph):
        return None
    return positions


def _of_joined(indices: tf.Tensor) -> tf.Tensor | None:
    """The positions of the tensors that `indices` is the concatenation of; None if that is not so, or none has any."""
    if getattr(getattr(indices, "op", None), "type", None) != "ConcatV2":
        return None
    parts = list(indices.op.inputs)[:-1]  # the last one is the axis
    found = [recall(part) for part in parts]
    if all(positions is None for positions in found):
        return None
    return tf.concat(
        [
            tf.fill(tf.shape(part), tf.constant(-1, tf.int64)) if positions is None else positions
            for part, positions in zip(parts, found, strict=True)
        ],
        0,
    )


def remember_whole(rows: tf.Tensor, keys: tf.Tensor, whole: InWhole) -> None:
    """Ties to the gradient of a part, `rows` [n, dim] of `keys` [n], where in the whole it is."""
    setattr(rows, _IN_WHOLE, (keys, whole))


def recall_whole(rows: tf.Tensor, keys: tf.Tensor) -> InWhole | None:
    """Where `rows` are in the gradient of a whole variable; None if they, or their keys, are not what was tied."""
    of, whole = getattr(_behind_gates(rows), _IN_WHOLE, (None, None))
    return whole if of is keys else None


def _behind_gates(rows: tf.Tensor) -> tf.Tensor:
    """What `rows` are the same as, and wait for nothing else. `tf.gradients` makes such of ops with several, and
    `tf.custom_gradient`, which Keras 3 uses, of all.
    """
    if isinstance(rows, tf_ops.EagerTensor):
        return rows
    source, awaited = rows, []
    while source.op.type in ("Identity", "IdentityN"):
        awaited += source.op.control_inputs
        source = source.op.inputs[source.value_index]
    while awaited:
        op = awaited.pop()
        if op.type == "NoOp":
            awaited += op.control_inputs
        elif op is not source.op:
            return rows
    return source
