"""GraphDefs whose lists are not as long as the op is wide: refused where the graph is imported, by an error that names
the list. TensorFlow itself checks the number of inputs and outputs only."""

from __future__ import annotations

import copy

import pytest
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tfplugin.ops import raw

assert raw  # loads the ops

INT64, INT32, FLOAT, STRING, RESOURCE = (
    dtype.as_datatype_enum for dtype in (tf.int64, tf.int32, tf.float32, tf.string, tf.resource)
)
TYPES = {"Tkeys": INT64, "dtype": FLOAT, "Tweights": FLOAT, "Tflat": FLOAT}
TABLES = {"H": 3, "T": 2, "parts": [1, 2], "dims": [4, 8]}
POOL = {"combiners": ["sum", "mean"], "outer": [-1, 1], "weighted": [True, False], "S": 1, "W": 1}
POOL_OF_TABLES = {**TYPES, **TABLES, **POOL, "positive": [False, False], "filled": [False, True], "F": 1}
EXCHANGE = {"dtype": FLOAT, "Tweights": FLOAT, "T": 2, "dims": [4, 8], **POOL}
# Attributes, and the dtypes of the inputs.
OPS = {
    "KvTableGatherMany": (
        {"Tkeys": INT64, "dtype": FLOAT, **TABLES, "in_backward": ["", "", ""]},
        [RESOURCE] * 3 + [INT64] * 2,
    ),
    "KvExchangeLookUp": (
        {"Tkeys": INT64, "dtype": FLOAT, **TABLES, "in_backward": ["", "", ""]},
        [RESOURCE] * 3 + [INT64] * 2,
    ),
    "KvExchangeGather": (
        {"Tkeys": INT64, "dtype": FLOAT, **TABLES, "in_backward": ["", "", ""]},
        [RESOURCE] * 3 + [INT64] * 3,
    ),
    "KvTableSplitGradients": ({"Tkeys": INT64, "dtype": FLOAT, **TABLES}, [INT64] * 2 + [FLOAT] * 2 + [INT64] * 2),
    "KvTablePool": (
        {**POOL_OF_TABLES, "in_backward": ["", "", ""]},
        [RESOURCE] * 3 + [INT64] * 4 + [INT64, FLOAT, INT64],
    ),
    "KvTablePoolGradient": (POOL_OF_TABLES, [FLOAT] * 2 + [INT64] * 4 + [INT64, FLOAT, INT64]),
    "KvTablePoolWeightsGradient": (
        POOL_OF_TABLES,
        [RESOURCE] * 3 + [FLOAT] * 4 + [INT64] * 4 + [INT64, FLOAT, INT64],
    ),
    "KvTableReadRows": (
        {"Tkeys": INT64, "dtype": FLOAT, "slots": "[]", "all_slots": "[]", "generation": 1, "widths": [4, 8], "N": 2},
        [RESOURCE, INT64],
    ),
    "KvTableSave": (
        {"N": 2, "tensor_prefixes": ["a", "b"], "names": ["a", "b"], "part": [0, 0], "parts": [1, 1]},
        [STRING, RESOURCE, RESOURCE],
    ),
    "KvTableSaveCut": (
        {"N": 2, "tensor_prefixes": ["a", "b"], "names": ["a", "b"], "part": [0, 0], "parts": [1, 1]},
        [STRING, RESOURCE, RESOURCE, INT64],
    ),
    "KvExchangeRequest": (
        {
            "Tids": ("type", [INT64, INT64]),
            "Tweights": FLOAT,
            "T": 2,
            "S": 1,
            "W": 1,
            "V": 1,
            "rank": 0,
            "ranks": 2,
            "names": ["a", "b"],
            "owners": [-1, 0],
            "rows": [-1, 9],
            "key_dtypes": ("type", [INT64, INT64]),
            "dims": [4, 8],
            "hotness": [-1, 1],
            "outer": [-1, 1],
            "weighted": [True, False],
        },
        [INT64] * 4 + [INT64, FLOAT, INT64],
    ),
    "KvTableReadColumns": (
        {"Tkeys": INT64, "dtype": FLOAT, "N": 2, "columns": ["", "Adam.m"], "widths": [4, 4]},
        [RESOURCE, INT64],
    ),
    "KvExchangeServe": (
        {"Tout": ("type", [INT64, INT64]), "ranks": 2, "local": [True, False]},
        [INT64, INT32],
    ),
    "KvExchangeReply": ({"dtype": FLOAT, "T": 2, "dims": [4, 8]}, [FLOAT, FLOAT, INT64]),
    "KvExchangeTell": ({"Tflat": FLOAT, "E": 1, "T": 2, "dims": [4, 8]}, [FLOAT, INT32, INT64, STRING]),
    "KvExchangeCheck": ({"Tflat": FLOAT, "T": 2, "dims": [4, 8]}, [INT64, INT32, FLOAT, INT32]),
    "KvExchangeReplyGradient": ({"dtype": FLOAT, "T": 2, "dims": [4, 8]}, [FLOAT, INT64]),
    "KvExchangePool": (EXCHANGE, [FLOAT] + [INT64] * 4 + [INT64, FLOAT]),
    "KvExchangePoolGradient": (EXCHANGE, [INT64] + [FLOAT] * 2 + [INT64] * 4 + [INT64, FLOAT]),
    "KvExchangePoolWeightsGradient": (EXCHANGE, [FLOAT] * 5 + [INT64] * 4 + [INT64, FLOAT]),
}
# Lists whose lengths are numbers of inputs or outputs: TensorFlow's own errors.
COUNTED = {("KvExchangeServe", "Tout"), ("KvExchangeRequest", "Tids")}
AT_LEAST_ONE = ("dims", "parts", "widths")


def import_op(op, attributes, inputs):
    graph_def = tf.compat.v1.GraphDef()
    node = graph_def.node.add(name="node", op=op)
    for i, dtype in enumerate(inputs):
        graph_def.node.add(name=f"in{i}", op="Placeholder").attr["dtype"].type = dtype
        node.input.append(f"in{i}")
    for name, value in attributes.items():
        attr = node.attr[name]
        kind, value = value if isinstance(value, tuple) else (None, value)
        if kind == "type":
            attr.list.type.extend(value)
        elif not isinstance(value, list):
            if name in TYPES:
                attr.type = value
            elif isinstance(value, str):
                attr.s = value.encode()
            else:
                attr.i = value
        elif not value:
            attr.list.SetInParent()
        elif isinstance(value[0], bool):
            attr.list.b.extend(value)
        elif isinstance(value[0], str):
            attr.list.s.extend(one.encode() for one in value)
        else:
            attr.list.i.extend(value)
    with tf.Graph().as_default() as graph:
        tf.import_graph_def(graph_def, name="")
        return graph.get_operation_by_name("node")


#: Ops with lists of which none is as long as there are inputs.
NO_TENSORS = {"KvSharedExchangeConnect"}


def test_all_ops_with_lists_are_here():
    found = set()
    for name in dir(raw):
        op = op_def_registry.get("".join(part.capitalize() for part in name.split("_")))
        if op is not None and any(attr.type in ("list(int)", "list(bool)") for attr in op.attr):
            found.add(op.name)
    assert found - NO_TENSORS == set(OPS)


@pytest.mark.parametrize("op", OPS)
def test_lists_of_another_length_are_refused_by_name(op):
    attributes, inputs = OPS[op]
    assert import_op(op, attributes, inputs).type == op
    for name, value in attributes.items():
        tagged = isinstance(value, tuple)
        entries = value[1] if tagged else value
        if not isinstance(entries, list) or (op, name) in COUNTED:
            continue
        wrong = [entries[:-1], entries + entries[:1], entries * 500]
        wrong += [[], entries[:1]] if name != "in_backward" else []
        if name in AT_LEAST_ONE:
            wrong += [[bad, *entries[1:]] for bad in (0, -1, -(2**62), 2**62) if (name, bad) != ("dims", 2**62)]
        if name == "widths":
            wrong = [one for one in wrong if 2**62 not in one]
        if name == "parts" and op in ("KvTableSave", "KvTableSaveCut"):
            wrong = [one for one in wrong if len(one) != 2]
        for bad in wrong:
            crafted = copy.deepcopy(attributes)
            crafted[name] = (value[0], bad) if tagged else bad
            with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=name):
                import_op(op, crafted, inputs)


@pytest.mark.parametrize("op", [op for op in OPS if "outer" in OPS[op][0] and op != "KvExchangeRequest"])
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [("outer", [1, 1], "S is 1"), ("outer", [-1, -1], "S is 1"), ("weighted", [True, True], "W is 1")],
)
def test_lists_that_ask_for_inputs_that_are_not_there(op, name, value, says):
    attributes, inputs = OPS[op]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match=f"{name} asks for . inputs, {says}"):
        import_op(op, {**attributes, name: value}, inputs)


def test_keys_without_a_dimension():
    with tf.Graph().as_default():
        handle = tf.compat.v1.placeholder(tf.resource, [])
        scalar = tf.compat.v1.placeholder(tf.int64, [])
        with pytest.raises(ValueError, match="must be rank 1"):
            raw.kv_table_read_column(handle, scalar, dtype=tf.float32, width=4)
        with pytest.raises(ValueError, match="must be rank 2"):
            raw.kv_exchange_reply([tf.zeros([1, 4])], scalar, dims=[4])


@pytest.mark.parametrize(("alltoall", "shape"), [(raw.kv_shared_alltoall, [None, 5]), (raw.kv_shared_exchange, [None])])
def test_what_is_exchanged_has_rows(alltoall, shape):
    with tf.Graph().as_default():
        splits = tf.compat.v1.placeholder(tf.int32, [2])
        received, received_splits = alltoall(tf.zeros([3, 5]), splits, exchange="x", ranks=2)
        assert received.shape.as_list() == shape and received_splits.shape == [2]
        with pytest.raises(ValueError, match="must be at least rank 1"):
            alltoall(tf.zeros([]), splits, exchange="x", ranks=2)
