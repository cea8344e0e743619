"""The compiled ops and their gradients."""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.framework import ops as tf_ops

from tfplugin import library

#: Python wrappers of the ops in ``kernels/tensorflow/ops.cc``.
raw = library.load()


@tf_ops.RegisterGradient("KvTableGather")
def _gather_gradient(op: tf.Operation, grad: tf.Tensor) -> list[tf.IndexedSlices | None]:
    """The gradient of a lookup: one slice per key looked up, duplicates included."""
    keys = op.inputs[1]
    dim = op.get_attr("dim")
    return [tf.IndexedSlices(tf.reshape(grad, [-1, dim]), tf.reshape(keys, [-1]), dense_shape=None), None]


for _name in (
    "KvTableHandle",
    "KvTableInitialize",
    "KvTableIsInitialized",
    "KvTableSize",
    "KvTableMemory",
    "KvTableClear",
    "KvTableSlots",
    "KvTableContains",
    "KvTableStamps",
    "KvTableUpsert",
    "KvTableAccumulate",
    "KvTableRemove",
    "KvTableApply",
    "KvApplyDense",
    "KvTableZeroed",
    "KvTableUpdateCounts",
    "KvTableReadRows",
    "KvTableWriteRows",
    "KvTableStepVariable",
    "KvTableAssignStepVariable",
    "KvTableExport",
    "KvTableImport",
    "KvTablePartition",
    "KvTableSave",
    "KvTableRestore",
):
    tf_ops.NotDifferentiable(_name)
