"""The compiled ops and their gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework import ops as tf_ops

from tfplugin import backward_updates, composed_pool, float32_lookups, library, row_handles

#: Python wrappers of the ops in ``kernels/tensorflow/*_ops.cc``.
raw = library.load()


def _slices(
    handle: tf.Tensor, rows: tf.Tensor, keys: tf.Tensor, where: tf.Tensor | None = None, token: str = ""
) -> tf.IndexedSlices:
    rows = float32_lookups.joinable(handle, rows)
    update = backward_updates.find(token)
    if update is not None:
        return update(keys, rows, where)
    if where is not None:
        row_handles.remember(keys, where)
    return tf.IndexedSlices(rows, keys, dense_shape=None)


def _on_the_gpu_of(op: tf.Operation) -> contextlib.AbstractContextManager[Any]:
    """Where a lookup was, if that is a GPU: what takes no table goes to the CPU by itself."""
    device = op.outputs[0].device
    return tf_ops.device(device) if device and "GPU" in device else contextlib.nullcontext()


def _tokens(op: tf.Operation, handles: int) -> list[str]:
    return [tf.compat.as_str(token) for token in op.get_attr("in_backward")] or [""] * handles


@tf_ops.RegisterGradient("KvTableGatherEvict")
@tf_ops.RegisterGradient("KvTableGather")
def _gather_gradient(op: tf.Operation, grad: tf.Tensor, *_: Any) -> list[tf.IndexedSlices | None]:
    """The gradient of a lookup: one slice per key looked up, duplicates included; none for keys not admitted."""
    # Always a new tensor: positions are tied to it, and the ids may be another table's, too.
    keys = tf.reshape(op.inputs[1], [-1])
    where = tf.reshape(op.outputs[1], [-1]) if op.get_attr("remember") else None
    token = tf.compat.as_str(op.get_attr("in_backward"))
    rows = tf.reshape(grad, [-1, op.get_attr("dim")])
    if op.get_attr("admission") != 1.0 and where is not None:
        # An update would insert them.
        there = tf.where(where >= 0)[:, 0]
        rows, keys, where = (tf.gather(tensor, there) for tensor in (rows, keys, where))
    return [_slices(op.inputs[0], rows, keys, where, token), None]


@tf_ops.RegisterGradient("KvTableTrainable")
def _trainable_gradient(op: tf.Operation, grad: tf.Tensor) -> list[tf.IndexedSlices | None]:
    """As of a lookup, all keys in one."""
    keys = tf.reshape(op.inputs[1], [-1])
    read = op.inputs[3]
    # Of ids whose rank is known only when the graph runs, so is the shape of the rows.
    dim = tf.shape(read)[-1] if read.shape.rank is None else read.shape[-1]
    rows = tf.reshape(grad, [-1, dim])
    where = op.inputs[2]
    if where.shape.num_elements() != 0:
        row_handles.remember(keys, tf.reshape(where, [-1]))
    rows = float32_lookups.joinable(op.inputs[0], rows)
    return [tf.IndexedSlices(rows, keys, dense_shape=None), None, None, None]


def split_gradients(
    keys: Sequence[tf.Tensor],
    gradients: Sequence[tf.Tensor],
    positions: Sequence[tf.Tensor],
    parts: Sequence[int],
    dims: Sequence[int],
) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
    """Keys, gradients and positions of each part of each table. A graph has beside them where in the whole they are."""
    split = raw.kv_table_split_gradients(
        list(keys), list(gradients), list(positions), H=sum(parts), parts=parts, dims=dims
    )
    if context.executing_eagerly():
        return tuple(split)
    part_keys, part_rows, _ = split
    inputs, tables = part_keys[0].op.inputs, len(parts)
    first = 0
    for t, count in enumerate(parts):
        if count > 1:
            found = raw.kv_table_split_keys(inputs[t], inputs[2 * tables + t], parts=count)
            for h, columns in enumerate(zip(*found, strict=True), first):
                whole = row_handles.InWhole(*columns, inputs[tables + t])
                row_handles.remember_whole(part_rows[h], part_keys[h], whole)
        first += count
    return tuple(split)


@tf_ops.RegisterGradient("KvExchangeLookUp")
@tf_ops.RegisterGradient("KvTableGatherMany")
def _gather_many_gradient(op: tf.Operation, *grads: tf.Tensor) -> list[tf.IndexedSlices | None]:
    """The same for each part of each table."""
    handles, tables = len(op.inputs) - op.get_attr("T"), op.get_attr("T")
    with _on_the_gpu_of(op):
        keys, rows, where = split_gradients(
            op.inputs[handles:],
            grads[:tables],
            op.outputs[tables : 2 * tables],
            parts=op.get_attr("parts"),
            dims=op.get_attr("dims"),
        )
    remember, tokens = op.get_attr("remember"), _tokens(op, handles)
    slices = [
        _slices(h, r, k, w if remember else None, token)
        for h, r, k, w, token in zip(op.inputs[:handles], rows, keys, where, tokens, strict=True)
    ]
    return [*slices, *[None] * tables]


@tf_ops.RegisterGradient("KvExchangeGather")
def _exchange_gather_gradient(
    op: tf.Operation, grad: tf.Tensor, _: Any, *positions: Any
) -> list[tf.IndexedSlices | None]:
    """The same of rows that lie in the buffer of an exchange. Each table is in one part."""
    tables = op.get_attr("T")
    keys, where = op.inputs[tables : 2 * tables], op.outputs[2:]
    with tf.device("CPU:0"):
        rows = raw.kv_exchange_reply_gradient(
            grad,
            op.inputs[2 * tables],
            dtype=op.get_attr("dtype"),
            Twire=op.get_attr("Tflat"),
            T=tables,
            dims=op.get_attr("dims"),
        )
        # A tensor of this lookup alone, to which positions are tied.
        keys = [tf.identity(one) for one in keys]
    remember, tokens = op.get_attr("remember"), _tokens(op, tables)
    slices = [
        _slices(h, r, k, w if remember else None, token)
        for h, r, k, w, token in zip(op.inputs[:tables], rows, keys, where, tokens, strict=True)
    ]
    return [*slices, *[None] * (tables + 1)]


@tf_ops.RegisterGradient("KvTableSplitGradients")
def _split_gradients_gradient(op: tf.Operation, *grads: tf.Tensor) -> list[tf.Tensor | None]:
    tables, handles = op.get_attr("T"), op.get_attr("H")
    back: list[tf.Tensor | None] = []
    first = handles
    for t, parts in enumerate(op.get_attr("parts")):
        keys = tf.reshape(op.inputs[t], [-1])
        owner = raw.kv_table_partition(keys, parts=parts)
        places = tf.dynamic_partition(tf.range(tf.size(keys)), owner, parts)
        rows = tf.dynamic_stitch(places, list(grads[first : first + parts]))
        back.append(tf.reshape(rows, tf.shape(op.inputs[tables + t])))
        first += parts
    return [*[None] * tables, *back, *[None] * tables]


@tf_ops.RegisterGradient("KvSamePlaces")
def _same_places_gradient(op: tf.Operation, grad: tf.Tensor) -> list[Any]:
    return [grad, *[None] * (len(op.inputs) - 1)]


# ---- Pooled lookups ----

_POOL_LISTS = ("parts", "dims", "combiners", "outer", "weighted", "positive", "filled")


def _pool_attrs(op: tf.Operation) -> dict[str, Any]:
    return {name: op.get_attr(name) for name in _POOL_LISTS}


def _id_inputs(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
    """The inputs that say which ids are pooled: keys, segments, shapes, weights, fill_keys."""
    lists, at = [], 0
    for count in ("T", "T", "S", "W", "F"):
        lists.append(list(inputs[at : at + op.get_attr(count)]))
        at += op.get_attr(count)
    return lists


def _pooled_ids(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> Iterator[composed_pool.PooledIds]:
    """The same, table by table."""
    keys, segments, shapes, weights, fill_keys = (iter(one) for one in _id_inputs(op, inputs))
    for t, outer in enumerate(op.get_attr("outer")):
        yield composed_pool.PooledIds(
            next(keys),
            next(segments),
            None if outer < 0 else next(shapes),
            outer,
            next(weights) if op.get_attr("weighted")[t] else None,
            op.get_attr("positive")[t],
            next(fill_keys) if op.get_attr("filled")[t] else None,
        )


def _depends_on_a_variable(tensors: Sequence[tf.Tensor]) -> bool:
    seen, stack = set(), [tensor.op for tensor in tensors]
    while stack:
        op = stack.pop()
        if op.type in ("VarHandleOp", "Variable", "VariableV2", "KvTableHandle"):
            return True
        for tensor in op.inputs:
            if tensor.op not in seen:
                seen.add(tensor.op)
                stack.append(tensor.op)
    return False


@tf_ops.RegisterGradient("KvTablePool")
def _pool_gradient(op: tf.Operation, *grads: tf.Tensor) -> list[Any]:
    """For each part one slice per key, its gradients summed; and the gradient of the weights, if it is asked for."""
    handles = list(op.inputs[: sum(op.get_attr("parts"))])
    ids = _id_inputs(op, op.inputs[len(handles) :])
    weights, fill_keys = ids[3:]
    attrs = _pool_attrs(op)
    first_weight = len(op.inputs) - len(fill_keys) - len(weights)
    # A tape says which inputs nobody wants the gradient of. A graph does not: there what is not asked for is not run.
    skipped = getattr(op, "skip_input_indices", None) or ()
    of_weights: list[tf.Tensor | None] = [None] * len(weights)
    waits_for: list[tf.Operation] = []
    if any(first_weight + w not in skipped for w in range(len(weights))):
        # Not a loop's or function's placement, but the tables'.
        device = None if context.executing_eagerly() else op.outputs[0].device
        with tf_ops.colocate_with(None, ignore_existing=True), tf_ops.device(device):
            of_weights = raw.kv_table_pool_weights_gradient(
                handles, list(op.outputs), list(grads), *ids, **attrs, mode=op.get_attr("mode")
            )
        graph = None if context.executing_eagerly() else tf_ops.get_default_graph()
        if graph is not None and not graph.building_function and _depends_on_a_variable(weights):
            # It reads rows again, so it must come before the update that the gradient of the rows is for. Eager code
            # and functions keep the order of the program.
            waits_for = [of_weights[0].op]
    with tf.control_dependencies(waits_for), _on_the_gpu_of(op):
        part_keys, part_rows = raw.kv_table_pool_gradient(list(grads), *ids, H=len(handles), **attrs)
    tokens = _tokens(op, len(handles))
    slices = [
        _slices(h, r, k, token=token) for h, r, k, token in zip(handles, part_rows, part_keys, tokens, strict=True)
    ]
    return [*slices, *[None] * (first_weight - len(handles)), *of_weights, *[None] * len(fill_keys)]


@tf_ops.RegisterGradient("KvTablePoolGradient")
def _pool_gradient_gradient(op: tf.Operation, *grads: tf.Tensor) -> list[Any]:
    """Second derivatives: each key's row is pooled again, from the gradient of its sum."""
    tables, handles = op.get_attr("T"), op.get_attr("H")
    skipped = getattr(op, "skip_input_indices", None) or ()
    first_weight = len(op.inputs) - op.get_attr("F") - op.get_attr("W")
    back: list[tf.Tensor] = []
    of_weights: list[tf.Tensor | None] = []
    first = 0
    pooled_ids = _pooled_ids(op, op.inputs[tables:])
    for t, (ids, parts) in enumerate(zip(pooled_ids, op.get_attr("parts"), strict=True)):
        combiner = tf.compat.as_str(op.get_attr("combiners")[t])
        found = tf.concat(list(op.outputs[first : first + parts]), 0)
        rows = tf.concat(list(grads[handles + first : handles + first + parts]), 0)
        first += parts
        with tf.GradientTape() as tape:
            if ids.weights is not None:
                tape.watch(ids.weights)
            bags = composed_pool.bags_of(ids)
            # Found keys are unique, so that number i goes to key i.
            which = tf.unique(tf.concat([found, bags.keys], 0)).idx[tf.size(found) :]
            pooled = composed_pool.pool(rows, which, bags, combiner)
        back.append(pooled)
        if ids.weights is not None:
            wanted = first_weight + len(of_weights) not in skipped
            of_weights.append(tape.gradient(pooled, ids.weights, op.inputs[t]) if wanted else None)
    between = first_weight - tables
    return [*back, *[None] * between, *of_weights, *[None] * op.get_attr("F")]


@tf_ops.RegisterGradient("KvTablePoolWeightsGradient")
def _pool_weights_gradient_gradient(op: tf.Operation, *grads: tf.Tensor) -> list[Any]:
    """Second derivatives. Those by the pooled rows are among those by the tables, whose rows are read again."""
    tables, parts = op.get_attr("T"), op.get_attr("parts")
    handles = list(op.inputs[: sum(parts)])
    gradients = op.inputs[len(handles) + tables : len(handles) + 2 * tables]
    slices: list[Any] = []
    of_gradients: list[tf.Tensor | None] = []
    of_weights: list[tf.Tensor | None] = []
    for t, ids in enumerate(_pooled_ids(op, op.inputs[len(handles) + 2 * tables :])):
        mine = handles[len(slices) : len(slices) + parts[t]]
        if ids.weights is None:
            slices += [None] * len(mine)
            of_gradients.append(None)
            continue
        attrs = {"parts": [parts[t]], "dims": [op.get_attr("dims")[t]]}
        found: list[Any] = []

        def rows_of(
            bags: composed_pool.Bags, mine: Any = mine, attrs: Any = attrs, found: list[Any] = found
        ) -> tf.Tensor:
            dtype = op.get_attr("dtype")
            found += raw.kv_table_gather_many(mine, [bags.keys], dtype=dtype, mode=op.get_attr("mode"), **attrs)
            return found[0][0]

        combiner = tf.compat.as_str(op.get_attr("combiners")[t])
        with _on_the_gpu_of(op):
            bags, by_rows, by_gradient, by_weights = composed_pool.weights_gradient_gradient(
                rows_of, ids, combiner, gradients[t], grads[len(of_weights)]
            )
        # In a graph the rows are read before the update that their gradient is for.
        with tf.control_dependencies([] if context.executing_eagerly() else [found[0][0].op]):
            split = split_gradients([bags.keys], [by_rows], found[1], **attrs)
        slices += [_slices(h, r, k) for h, k, r in zip(mine, *split[:2], strict=True)]
        of_gradients.append(by_gradient)
        of_weights.append(by_weights)
    of_ids = len(op.inputs) - len(handles) - 2 * tables - len(of_weights) - op.get_attr("F")
    return [*slices, *[None] * tables, *of_gradients, *[None] * of_ids, *of_weights, *[None] * op.get_attr("F")]


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
    "KvTableScores",
    "KvTableUpsert",
    "KvTableAccumulate",
    "KvTableRemove",
    "KvTableRemoveOlder",
    "KvTableCombine",
    "KvTableCounts",
    "KvTableIncreaseCounts",
    "KvTableTotals",
    "KvTableApply",
    "KvTableDropSlots",
    "KvApplyDense",
    "KvTableZeroed",
    "KvTableUpdateCounts",
    "KvTableReadRows",
    "KvTableWriteRows",
    "KvTableAcquireUpdateLock",
    "KvTableReleaseUpdateLock",
    "KvTableStepVariable",
    "KvTableAssignStepVariable",
    "KvTableExport",
    "KvTableKeys",
    "KvTableReadColumn",
    "KvTableReadColumns",
    "KvTableImport",
    "KvTablePartition",
    "KvTableSplitKeys",
    "KvTableSave",
    "KvTableRestore",
    "KvTableChangesKnown",
    "KvTableCountRanks",
    "KvTableCut",
    "KvTableDropCut",
    "KvTableEvict",
    "KvTableExportSince",
    "KvTableForgetChanges",
    "KvTableGradientNorms",
    "KvTableImportColumns",
    "KvTableLookupCounts",
    "KvTableSaveCut",
    "KvTableSearchRanks",
    "KvTableSetEpoch",
    "KvTableSetScores",
    "KvTableStep",
    "KvTableSurvey",
    "KvTableTrackChanges",
    "KvTableWatchGradients",
):
    tf_ops.NotDifferentiable(_name)
