"""SavedModels rewritten without TensorFlow: their messages, a model of TFRA's, and graphs that are damaged."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtools.dialects.bundle.dtypes import number_named
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError, KvtoolsError
from kvtools.export_model import export_model, has_custom_operations
from kvtools.export_split import export_split
from kvtools.lookup_model.messages import INT64, entry, message, of_shapes, of_types, shape
from kvtools.meta_file import trained_graph
from kvtools.snapshot import Snapshot
from kvtools.split_manifest import SplitModel
from kvtools.stock_model.attributes import Attributes, expanded_shapes, expanded_types, moved_numbers
from kvtools.stock_model.fields import join, last, messages, split, without
from kvtools.stock_model.graph_def import Function, Node
from kvtools.stock_model.meta_graph import MetaGraph
from kvtools.stock_model.rewrite import Rewriter, in_order
from kvtools.stock_model.stock_ops import foreign_nodes, is_stock
from kvtools.stock_model.training_graph import Wanted

TFRA = Path(__file__).parents[1] / "data" / "tfra"


def meta_graph(folder: Path) -> bytes:
    return messages(split((folder / "saved_model.pb").read_bytes()), 2)[0]


def test_a_graph_that_is_read_and_written_is_the_same() -> None:
    data = meta_graph(TFRA / "savedmodel")
    once = MetaGraph.decode(data)
    again = MetaGraph.decode(once.encode())
    assert (once.graph, once.signatures, once.collections, once.saver, once.objects) == (
        again.graph,
        again.signatures,
        again.collections,
        again.saver,
        again.objects,
    )
    for encoded in messages(split(last(split(last(split(data), 2)), 2)), 1):
        assert Function.decode(Function.decode(encoded).encode()) == Function.decode(encoded)


@given(st.lists(st.tuples(st.integers(1, 500), st.one_of(st.integers(0, 2**64 - 1), st.binary(max_size=300)))))
def test_fields_come_back_as_they_were(fields: list[tuple[int, int | bytes]]) -> None:
    data = message(*fields)
    assert [(number, value) for number, _, value in split(data)] == fields
    assert join(split(data)) == data


def test_fixed_numbers_stay_what_they_are() -> None:
    data = b"\x25\x00\x00\x80\x3f" + b"\x31" + bytes(range(8))
    assert join(split(data)) == data


def test_lists_in_which_some_entries_become_several_or_none() -> None:
    types = Attributes({"T": expanded_types(of_types([1, 20, 9, 3]), {1: 3, 3: 0}, 20)})
    assert types.types("T") == [1, 20, 20, 20, 9]
    shapes = expanded_shapes(of_shapes([shape(2), shape()]), {1: 2}, shape())
    assert Attributes({"s": shapes}).shapes("s") == [shape(2), shape(), shape()]
    assert expanded_shapes(of_shapes([]), {0: 1}, shape()) == of_shapes([])
    packed = message((1, message((3, b"\x00\x02"))))
    assert Attributes({"n": moved_numbers(packed, lambda number: [number, number + 5])}).numbers("n") == [0, 5, 2, 7]


def test_nodes_come_after_their_inputs() -> None:
    def node(name: str, op: str, *inputs: str) -> Node:
        return Node(name, op, list(inputs), {})

    # A loop of TensorFlow 1: what closes it comes last.
    loop = [
        node("next", "NextIteration", "body"),
        node("body", "AddV2", "merge", "one"),
        node("merge", "Merge", "enter", "next"),
        node("enter", "Enter", "start"),
        node("one", "Const", "^merge"),
        node("start", "Const"),
    ]
    order = [node.name for node in in_order(loop)]
    assert order.index("start") < order.index("enter") < order.index("merge") < order.index("one")
    assert order.index("one") < order.index("body") < order.index("next")
    assert sorted(order) == sorted(node.name for node in loop)


def test_stock_functions_stay_as_they_are() -> None:
    """A model with nothing of ours in it: each function, its name and all, is what it was."""
    graph = MetaGraph.decode(meta_graph(TFRA / "savedmodel")).graph
    plain = {
        name: function
        for name, function in graph.library.items()
        if all(is_stock(node.op) and not node.functions() for node in function.nodes)
    }
    rewriter = Rewriter(plain, is_stock)
    for name in plain:
        assert rewriter.function(name, {}).name == name
    assert plain
    for name, function in rewriter.functions.items():
        assert sorted(node.name for node in function.nodes) == sorted(node.name for node in plain[name].nodes)
        assert function.results == plain[name].results


def test_a_model_of_tfra_without_tfra(tf: Any, tmp_path: Path) -> None:
    assert has_custom_operations(TFRA / "savedmodel")
    exported = export_model(open_checkpoint(str(TFRA / "savedmodel")), tmp_path / "export")
    assert [(table.name, table.rows) for table in exported.tables] == [("serve_emb", 59)]
    assert exported.left_out == []
    assert not list(foreign_nodes((tmp_path / "export" / "saved_model.pb").read_bytes()))
    expected = np.load(TFRA / "expected_tf2.npz")
    keys, values = expected["serve_keys"], expected["serve_values"]
    model = tf.saved_model.load(str(tmp_path / "export"))
    served = model.signatures["serving_default"]
    assert served(ids=tf.constant(keys))["emb"].numpy().tobytes() == values.tobytes()
    assert served(ids=tf.constant([keys[3], 10**15, keys[3]]))["emb"].numpy().tolist() == [
        values[3].tolist(),
        [0.0] * 4,
        values[3].tolist(),
    ]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / "export"))
        signature = meta.signature_def["serving_default"]
        got = session.run(signature.outputs["emb"].name, {signature.inputs["ids"].name: keys})
    assert got.tobytes() == values.tobytes()


def test_a_model_of_tfra_in_two_halves(tf: Any, tmp_path: Path) -> None:
    export_split(open_checkpoint(str(TFRA / "savedmodel")), tmp_path / "halves")
    halves = SplitModel.read(tmp_path / "halves")
    signature, expected = halves.signature(), np.load(TFRA / "expected_tf2.npz")
    keys = np.append(expected["serve_keys"], 10**15)
    (wanted,) = signature.keys({"ids": keys})
    rows = Snapshot(halves.snapshot).table("serve_emb").lookup(wanted)
    dense = tf.saved_model.load(str(halves.dense)).signatures["serving_default"]
    fed = {name: tf.constant(array) for name, array in signature.dense_request({"ids": keys}, [rows]).items()}
    assert not list(foreign_nodes((halves.dense / "saved_model.pb").read_bytes()))
    got = dense(**fed)["emb"].numpy()
    assert got[:-1].tobytes() == expected["serve_values"].tobytes()
    assert not got[-1].any()


def graph_of_tfra(folder: Path) -> None:
    """A SavedModel of the graph that TFRA trained in TensorFlow 1: two tables, their optimizer's, and a dense layer."""

    def tensor(name: str, dtype: int, *sizes: int) -> bytes:
        return message((1, name), (2, dtype), (3, shape(*sizes)))

    meta = MetaGraph.decode((TFRA / "graph" / "v1_adam.meta").read_bytes())
    inputs = entry("ids", tensor("Placeholder:0", INT64, -1))
    outputs = entry("scores", tensor("MatMul:0", number_named("float32"), -1, 1))
    meta.signatures["serving_default"] = message((1, inputs), (2, outputs), (3, "tensorflow/serving/predict"))
    info = last(meta.fields, 1) + message((4, "serve"))
    meta.fields = [(1, 2, info), *without(meta.fields, 1)]
    folder.mkdir()
    (folder / "saved_model.pb").write_bytes(message((1, 1), (2, meta.encode())))
    (folder / "variables").mkdir()
    for kind in ("index", "data-00000-of-00001"):
        shutil.copy(TFRA / "v1_adam" / f"model.ckpt-20.{kind}", folder / "variables" / f"variables.{kind}")


def test_a_graph_of_tfra_without_tfra(tf: Any, tmp_path: Path) -> None:
    graph_of_tfra(tmp_path / "source")
    exported = export_model(open_checkpoint(str(tmp_path / "source")), tmp_path / "export")
    assert [(table.name, table.rows) for table in exported.tables] == [("tower/ad_emb", 500)]
    assert not list(foreign_nodes((tmp_path / "export" / "saved_model.pb").read_bytes()))
    expected = np.load(TFRA / "expected_v1_adam.npz")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / "export"))
        signature = meta.signature_def["serving_default"]
        ids = np.concatenate([expected["keys"], [10**15, expected["keys"][7]]])
        got = session.run(signature.outputs["scores"].name, {signature.inputs["ids"].name: ids})
        there = {operation.name for operation in session.graph.get_operations()}
        missing = session.run("tower/Fill:0")
        with pytest.raises(tf.errors.InvalidArgumentError, match="was exported to be served"):
            session.run(meta.saver_def.save_tensor_name, {meta.saver_def.filename_tensor_name: str(tmp_path / "saved")})
    rows = np.concatenate([expected["values"], missing.reshape(-1, 8)[:1], expected["values"][7:8]])
    assert np.allclose(got, rows @ expected["dense_w"], rtol=1e-5, atol=1e-6)
    assert not [name for name in there if name.startswith("gradients/")]


def test_a_checkpoint_of_tfra_and_its_graph(tf: Any, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(TFRA / "v1_adam"))
    wanted = Wanted(inputs={"ids": "Placeholder"}, outputs={"scores": "MatMul", "rows": "embedding_lookup/Reshape"})
    graph = trained_graph(checkpoint, wanted, TFRA / "graph" / "v1_adam.meta")
    exported = export_model(checkpoint, tmp_path / "export", graph=graph)
    assert [(table.name, table.rows) for table in exported.tables] == [("tower/ad_emb", 500)]
    assert not list(foreign_nodes((tmp_path / "export" / "saved_model.pb").read_bytes()))
    expected = np.load(TFRA / "expected_v1_adam.npz")
    served = tf.saved_model.load(str(tmp_path / "export")).signatures["serving_default"]
    got = served(ids=tf.constant(expected["keys"]))
    assert got["rows"].numpy().tobytes() == expected["values"].tobytes()
    assert np.allclose(got["scores"], expected["values"] @ expected["dense_w"], rtol=1e-5, atol=1e-6)


def test_damaged_graphs_are_told(tmp_path: Path) -> None:
    """Whatever a graph says, it is exported, or refused by an error of kvtools'."""
    folder = tmp_path / "model"
    shutil.copytree(TFRA / "savedmodel", folder)
    file = folder / "saved_model.pb"
    file.chmod(0o644)
    folder.chmod(0o755)
    data, randoms = file.read_bytes(), random.Random(7)
    refused = 0
    for _ in range(40):
        damaged = bytearray(data)
        if randoms.random() < 0.3:
            del damaged[randoms.randrange(len(damaged)) :]
        else:
            for _ in range(randoms.choice([1, 3, 20])):
                damaged[randoms.randrange(len(damaged))] = randoms.randrange(256)
        file.write_bytes(damaged)
        try:
            if has_custom_operations(folder):
                export_model(open_checkpoint(str(folder)), tmp_path / "export", force=True)
        except KvtoolsError:
            refused += 1
    assert 5 < refused < 40


def test_damaged_graphs_of_checkpoints_are_told(tmp_path: Path) -> None:
    checkpoint, file = open_checkpoint(str(TFRA / "v1_adam")), tmp_path / "damaged.meta"
    data, randoms = (TFRA / "graph" / "v1_adam.meta").read_bytes(), random.Random(7)
    wanted = Wanted(inputs={"ids": "Placeholder"}, outputs={"scores": "MatMul"})
    refused = 0
    for _ in range(40):
        damaged = bytearray(data)
        for _ in range(randoms.choice([1, 3])):
            at = randoms.randrange(len(damaged))
            damaged[at : at + randoms.choice([1, 1, 7])] = bytes([randoms.randrange(256)])
        file.write_bytes(damaged)
        try:
            export_model(checkpoint, tmp_path / "export", force=True, graph=trained_graph(checkpoint, wanted, file))
        except KvtoolsError:
            refused += 1
    assert 5 < refused < 40


def test_a_graph_that_restores_no_table(tmp_path: Path) -> None:
    """Its variables are those of another model."""
    folder = tmp_path / "model"
    shutil.copytree(TFRA / "savedmodel", folder)
    folder.chmod(0o755)
    (folder / "saved_model.pb").chmod(0o644)
    data = (folder / "saved_model.pb").read_bytes()
    (folder / "saved_model.pb").write_bytes(data.replace(b"tables_of_serve_emb", b"tables_of_other_emb"))
    with pytest.raises(BadInputError, match="restores none of the 1 tables"):
        export_model(open_checkpoint(str(folder)), tmp_path / "export")
