"""Graphs of TFPlus, DeepRec and TFRA exported without these: NumPy says what the answers are, TensorFlow gives them.

The graphs are made of stock operations and then given the nodes of the other engine, by its published definitions.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

import tfplugin
from kvtools.array_table import ArrayTable
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError
from kvtools.export_model import export_model, has_custom_operations
from kvtools.meta_file import trained_graph
from kvtools.migrate import write_tables
from kvtools.stock_model.stock_ops import foreign_nodes
from kvtools.stock_model.training_graph import Wanted

v1 = tf.compat.v1
DIM = 3
KEYS = np.arange(0, 4000, 7)
VALUES = np.random.default_rng(0).standard_normal((len(KEYS), DIM)).astype(np.float32)
INT64, FLOAT, RESOURCE_SHAPE = 9, 1, tf.TensorShape([DIM]).as_proto()


def node(graph: Any, op: str, name: str, inputs: list[str], **attributes: Any) -> Any:
    """Add a node of another engine; attributes are types, numbers and texts."""
    added = graph.node.add(op=op, name=name, input=inputs)
    for key, value in attributes.items():
        attribute = added.attr[key]
        if key in ("dtype", "Tkeys", "Tindices", "key_dtype", "value_dtype", "Tin", "Tout", "T", "counter_type"):
            attribute.type = value
        elif isinstance(value, float):
            attribute.f = value
        elif isinstance(value, int):
            attribute.i = value
        else:
            attribute.shape.CopyFrom(value)
    return added


def constant(graph: Any, name: str, value: Any) -> str:
    proto = tf.make_tensor_proto(value)
    added = graph.node.add(op="Const", name=name)
    added.attr["value"].tensor.CopyFrom(proto)
    added.attr["dtype"].type = proto.dtype
    return name


def tfplus(graph: Any, part: str, at: int, ids: str, gather: str = "KvVariableGatherOrZerosV2") -> str:
    """The nodes of a part: its handle, its lookup in the place of `rows_<at>`; return what restores it."""
    node(graph, "KvVariable", f"handle_{at}", [], key_dtype=INT64, value_dtype=FLOAT, value_shape=RESOURCE_SHAPE)
    node(graph, gather, f"rows_{at}", [f"handle_{at}", ids], dtype=FLOAT, Tindices=INT64)
    names = [f"{part}:0-{column}" for column in ("keys", "values", "init_table", "blacklist", "freq_keys")]
    constant(graph, f"names_{at}", [*names, f"{part}:0-freq_values"])
    constant(graph, f"slices_{at}", [""] * 6)
    read = graph.node.add(op="RestoreV2", name=f"read_{at}", input=["save/Const", f"names_{at}", f"slices_{at}"])
    read.attr["dtypes"].list.type.extend([INT64, FLOAT, FLOAT, INT64, INT64, 17])
    tensors = [f"read_{at}", *(f"read_{at}:{number}" for number in range(1, 6))]
    node(graph, "KvVariableImport", f"import_{at}", [f"handle_{at}", *tensors], Tin=INT64, Tout=FLOAT, first_n=6)
    drawn = constant(graph, f"drawn_{at}", np.zeros((2, DIM), np.float32))
    node(graph, "InitKvVariableV2", f"begin_{at}", [f"handle_{at}", drawn, f"^import_{at}"], T=FLOAT)
    return f"begin_{at}"


def deeprec(graph: Any, part: str, at: int, ids: str, *, otherwise: float = 0.0, version: int = 3) -> str:
    """The same of DeepRec, whose missing keys are answered with `otherwise`."""
    kinds = {"Tkeys": INT64, "dtype": FLOAT, "shape": RESOURCE_SHAPE}
    node(graph, "KvVarHandleOp", f"handle_{at}", [], **kinds)
    default, empty = constant(graph, f"default_{at}", np.float32(1)), constant(graph, f"empty_{at}", np.int64(-1))
    node(graph, "KvResourceGather", f"rows_{at}", [f"handle_{at}", ids, default], Tkeys=INT64, dtype=FLOAT)
    value, name = constant(graph, f"value_{at}", np.zeros((4, DIM), np.float32)), constant(graph, f"name_{at}", part)
    said = {**kinds, "default_value_no_permission": otherwise, "filter_freq": 2, "counter_type": INT64}
    handles = [f"handle_{at}", f"handle_{at}"]
    if version == 2:
        node(graph, "KvResourceImportV2", f"import_{at}", ["save/Const", *handles, value, name, empty], **said)
    else:
        node(graph, "InitializeKvVariableV2Op", f"begin_{at}", [*handles, value, empty], **said)
        node(graph, "KvResourceImportV3", f"import_{at}", ["save/Const", handles[0], name, empty], **kinds)
    return f"import_{at}"


ROUTES = {"tfplus": lambda ids, parts: ids % parts, "deeprec": lambda ids, parts: ids % 1000 % parts}


def trained(folder: Path, kind: str, parts: int, nodes: Callable[..., str], **table: Any) -> Path:
    """A checkpoint with its `.meta`, of `y = rows @ w`, the rows from a table of `parts` parts."""
    with tf.Graph().as_default(), v1.Session() as session:
        ids = v1.placeholder(tf.int64, [None], "ids")
        owners = tf.cast(ROUTES[kind](ids, parts), tf.int32)
        of_parts = tf.dynamic_partition(ids, owners, parts)
        places = tf.dynamic_partition(tf.range(tf.size(ids)), owners, parts)
        rows = [v1.placeholder(tf.float32, [None, DIM], f"rows_{part}") for part in range(parts)]
        w = v1.get_variable("w", [DIM, 2], use_resource=False)
        tf.identity(tf.identity(tf.dynamic_stitch(places, rows), name="rows") @ w, name="y")
        session.run(v1.global_variables_initializer())
        saver = v1.train.Saver()
        saver.save(session, str(folder / "dense"), write_meta_graph=False)
        meta = v1.MetaGraphDef.FromString(saver.export_meta_graph().SerializeToString())
        names = [tensor.name.removesuffix(":0") for tensor in of_parts]
    graph = meta.graph_def
    there = [one for one in graph.node if not one.name.startswith("rows_")]
    del graph.node[:]
    graph.node.extend(there)
    restored = next(one for one in graph.node if one.name == "save/restore_all")
    for part in range(parts):
        name = f"scope/emb/part_{part}" if parts > 1 else "scope/emb"
        restored.input.append(f"^{nodes(graph, name, part, names[part])}")
    (folder / "model.ckpt.meta").write_bytes(meta.SerializeToString())
    source = ArrayTable("scope/emb", KEYS, VALUES, **table)
    write_tables([source], folder / "model.ckpt", kind, beside=open_checkpoint(str(folder / "dense")), parts=parts)
    return folder / "model.ckpt"


def saved_model(prefix: Path) -> Path:
    """The same as a SavedModel, as a `SavedModelBuilder` writes it."""
    meta = v1.MetaGraphDef.FromString(Path(f"{prefix}.meta").read_bytes())
    meta.meta_info_def.tags.append("serve")
    signature = meta.signature_def["serving_default"]
    signature.inputs["ids"].name, signature.inputs["ids"].dtype = "ids:0", INT64
    signature.inputs["ids"].tensor_shape.dim.add(size=-1)
    for name in ("y", "rows"):
        signature.outputs[name].name, signature.outputs[name].dtype = f"{name}:0", FLOAT
        signature.outputs[name].tensor_shape.unknown_rank = True
    signature.method_name = "tensorflow/serving/predict"
    folder = prefix.parent / "saved"
    (folder / "variables").mkdir(parents=True)
    (folder / "saved_model.pb").write_bytes(
        saved_model_pb2.SavedModel(saved_model_schema_version=1, meta_graphs=[meta]).SerializeToString()
    )
    for file in prefix.parent.glob("model.ckpt.*"):
        if not file.name.endswith(".meta"):
            shutil.copy(file, folder / "variables" / file.name.replace("model.ckpt", "variables"))
    return folder


WANTED = Wanted(inputs={"ids": "ids"}, outputs={"y": "y", "rows": "rows"})


def check_both(prefix: Path, missing: float = 0.0) -> None:
    """Export the checkpoint with its graph, and the SavedModel; compare both with NumPy."""
    checkpoint, model = open_checkpoint(str(prefix)), saved_model(prefix)
    export_model(checkpoint, prefix.parent / "a", graph=trained_graph(checkpoint, WANTED))
    assert has_custom_operations(model)
    export_model(open_checkpoint(str(model)), prefix.parent / "b")
    w = next(checkpoint.read_variable("w"))
    random = np.random.default_rng(1)
    for name in "ab":
        assert not list(foreign_nodes((prefix.parent / name / "saved_model.pb").read_bytes()))
        served = tf.saved_model.load(str(prefix.parent / name)).signatures["serving_default"]
        for _ in range(20):
            ids = random.choice(np.concatenate([KEYS, np.arange(-2000, 6000), KEYS]), 40)
            rows = np.full((len(ids), DIM), missing, np.float32)
            there = np.isin(ids, KEYS)
            rows[there] = VALUES[np.searchsorted(KEYS, ids[there])]
            got = {key: value.numpy() for key, value in served(ids=tf.constant(ids)).items()}
            assert got["rows"].tobytes() == rows.tobytes()
            assert np.array_equal(got["y"], (tf.constant(rows) @ w).numpy())


@pytest.mark.parametrize("parts", [1, 3])
def test_lookups_of_tfplus(parts: int, tmp_path: Path) -> None:
    check_both(trained(tmp_path, "tfplus", parts, tfplus))


@pytest.mark.parametrize(("parts", "version"), [(1, 3), (3, 3), (3, 2)])
@pytest.mark.every_case
def test_lookups_of_deeprec(parts: int, version: int, tmp_path: Path) -> None:
    def nodes(*arguments: Any) -> str:
        return deeprec(*arguments, version=version)

    check_both(trained(tmp_path, "deeprec", parts, nodes))


def test_missing_keys_of_deeprec_are_answered_as_the_variable_says(tmp_path: Path) -> None:
    """Those that a filter has not admitted, too: they are in the checkpoint, without rows."""

    def nodes(*arguments: Any) -> str:
        return deeprec(*arguments, otherwise=0.25)

    waiting = {"filtered_keys": np.array([1, 2, 3]), "filtered_freqs": np.array([1, 1, 1])}
    check_both(trained(tmp_path, "deeprec", 2, nodes, extras=waiting, partition="mod_1000"), missing=0.25)


def test_a_partition_that_was_changed_since(tmp_path: Path) -> None:
    """The graph has three parts, the checkpoint two: DeepRec restores such, and so does the export."""
    prefix = trained(tmp_path, "deeprec", 3, deeprec)
    table = ArrayTable("scope/emb", KEYS, VALUES)
    for file in tmp_path.glob("model.ckpt.*"):
        if file.suffix != ".meta":
            file.unlink()
    write_tables([table], prefix, "deeprec", beside=open_checkpoint(str(tmp_path / "dense")), parts=2)
    check_both(prefix)


def test_a_lookup_that_inserts_is_refused(tmp_path: Path) -> None:
    def nodes(*arguments: Any) -> str:
        return tfplus(*arguments, gather="KvVariableGatherOrInsertV2")

    checkpoint = open_checkpoint(str(trained(tmp_path, "tfplus", 1, nodes)))
    with pytest.raises(BadInputError, match=r"'KvVariableGatherOrInsertV2' .* inserts missing keys .* for prediction"):
        export_model(checkpoint, tmp_path / "export", graph=trained_graph(checkpoint, WANTED))
    assert not (tmp_path / "export").exists()
    read_only = trained_graph(checkpoint, dataclasses.replace(WANTED, read_only=True))
    export_model(checkpoint, tmp_path / "export", graph=read_only)
    served = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"]
    assert served(ids=tf.constant([7, 8], tf.int64))["rows"].numpy().tolist() == [VALUES[1].tolist(), [0.0] * DIM]


def test_an_operation_that_is_not_known_is_named_with_the_list(tmp_path: Path) -> None:
    def nodes(*arguments: Any) -> str:
        return tfplus(*arguments, gather="KvVariableGatherV2")

    checkpoint = open_checkpoint(str(trained(tmp_path, "tfplus", 1, nodes)))
    with pytest.raises(BadInputError, match=r"'KvVariableGatherV2' .* rewritten are .*, KvVariableGatherOrZerosV2"):
        export_model(checkpoint, tmp_path / "export", graph=trained_graph(checkpoint, WANTED))


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"extras": {"blacklist": KEYS[:2]}}, r"2 keys of table 'scope/emb', such as 0, are in its blacklist"),
        ({"metadata": {"increment": True}}, r"table 'scope/emb' is an increment"),
    ],
)
def test_what_is_no_whole_table_is_refused(table: dict[str, Any], told: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(trained(tmp_path, "tfplus", 1, tfplus, **table)))
    with pytest.raises(BadInputError, match=told):
        export_model(checkpoint, tmp_path / "export", graph=trained_graph(checkpoint, WANTED))


def test_operations_of_tfra_on_gpus(tmp_path: Path) -> None:
    """A TFRA that is built for GPUs has operations of its own for some of TensorFlow's, which it names alike."""
    module = tf.Module()
    module.table = tfplugin.get_kv_variable("emb", embedding_dim=DIM)
    module.table.upsert(KEYS, VALUES)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def look_up(ids: Any) -> Any:
        rows = tf.nn.embedding_lookup(module.table, ids)
        count = tf.size(ids)
        places, segments = tf.range(count - 1, -1, -1), tf.range(count) // 3
        owners = count % 2 * tf.ones_like(segments)
        parts = tf.dynamic_partition(rows, owners, 2)
        return {
            "sums": tf.sparse.segment_sum(rows, places, segments),
            "more": tf.sparse.segment_sum(rows, places, segments, num_segments=tf.constant(30, tf.int64)),
            "stitched": tf.dynamic_stitch(tf.dynamic_partition(places, owners, 2), parts),
        }

    source = tmp_path / "source"
    tf.saved_model.save(module, str(source), look_up)
    ids = tf.constant(np.random.default_rng(2).choice(np.arange(6000), 20))
    expected = tf.saved_model.load(str(source)).signatures["serving_default"](ids=ids)
    model = saved_model_pb2.SavedModel.FromString((source / "saved_model.pb").read_bytes())
    renamed = 0
    for function in model.meta_graphs[0].graph_def.library.function:
        for one in function.node_def:
            if one.op in ("SparseSegmentSum", "SparseSegmentSumWithNumSegments", "DynamicStitch", "DynamicPartition"):
                one.op, renamed = f"TFRA>{one.op}", renamed + 1
    assert renamed == 5
    (source / "saved_model.pb").write_bytes(model.SerializeToString())
    export_model(open_checkpoint(str(source)), tmp_path / "export")
    got = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"](ids=ids)
    assert {name: rows.numpy().tobytes() for name, rows in got.items()} == {
        name: rows.numpy().tobytes() for name, rows in expected.items()
    }
