"""What `kvtools export --savedmodel --dtype` makes of tables: rows in fewer bits, decoded by stock operations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.array_table import ArrayTable
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.schema import numpy_dtype
from kvtools.errors import BadInputError, CorruptFileError, UsageError
from kvtools.export import export_saved_model
from kvtools.lookup_model.messages import of_type
from kvtools.model_digest import sealed
from kvtools.quantized_rows import QUANTIZED, decode, encode
from kvtools.stock_model.function_body import FunctionBody
from kvtools.stock_model.graph_def import Graph, Node
from kvtools.stock_model.stock_ops import foreign_nodes
from kvtools.stock_model.stored_rows import as_numbers


def answers(tf: Any, model: Any, signature: str, ids: Any) -> np.ndarray:
    return np.asarray(model.signatures[signature](ids=tf.constant(ids, tf.int64))["embeddings"])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


DIMS = (1, 3, 4, 9, 32)


def some_tables(path: Path) -> Checkpoint:
    """Tables of several widths and types, with keys 0 to 39, of which one has a row of zeros."""
    random = np.random.default_rng(0)
    tables = []
    for dim in DIMS:
        values = np.float32(random.normal(size=(40, dim)))
        values[7] = 0
        tables.append(ArrayTable(f"wide/{dim}", np.arange(40), values))
    tables.append(ArrayTable("double", np.arange(40), random.normal(size=(40, 5))))
    tables.append(ArrayTable("half", np.arange(40), np.float16(random.normal(size=(40, 8)))))
    tables.append(ArrayTable("counts", np.arange(40), random.integers(0, 9, (40, 6))))
    return Checkpoint(path, "memory", {table.schema.name: table for table in tables})


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "int4"])
def test_rows_in_fewer_bits_are_decoded_in_the_graph(tf: Any, tmp_path: Path, dtype: str) -> None:
    source = some_tables(tmp_path)
    exports = export_saved_model(source, tmp_path / "out", dtype=dtype, keep_zeros=True, index="hash")
    model = tf.saved_model.load(str(tmp_path / "out"))
    again = open_checkpoint(tmp_path / "out")
    ids = np.array([[3, 7, 39], [40, 3, -1]])
    for export in exports:
        values = source.tables[export.name].to_numpy().values
        assert values is not None
        if export.value_dtype in QUANTIZED:
            expected = decode(encode(np.float32(values), export.value_dtype), export.value_dtype, export.dim)
            assert again.table(export.name).schema.rows_as == export.value_dtype
        else:
            assert export.value_dtype in (dtype, "float32", "int64")
            expected = values.astype(numpy_dtype(export.value_dtype))
        answered = answers(tf, model, export.signature, ids)
        assert answered.dtype == (np.int64 if export.name == "counts" else np.float32)
        wanted = np.where((ids[..., None] >= 0) & (ids[..., None] < 40), expected.astype(answered.dtype)[ids % 40], 0)
        assert answered.tobytes() == wanted.astype(answered.dtype).tobytes()
        table = again.table(export.name)
        read = table.to_numpy().values
        assert read is not None and read.dtype == expected.dtype and read.tobytes() == expected.tobytes()
        some = table.take(np.array([5, 2, 5])).values
        assert some is not None and np.array_equal(some, expected[[5, 2, 5]])
    assert not answers(tf, model, "wide_9", [7]).any()
    told = {export.name: export.notes for export in exports}
    assert "only floating-point numbers become" in told["counts"][0]
    assert list(foreign_nodes((tmp_path / "out" / "saved_model.pb").read_bytes())) == []


def test_only_some_tables_become_smaller(tmp_path: Path) -> None:
    source = some_tables(tmp_path)
    dtypes = {"wide/32": "int4", "half": "int8"}
    exports = {export.name: export for export in export_saved_model(source, tmp_path / "out", dtype=dtypes)}
    stored = {name: export.value_dtype for name, export in exports.items()}
    assert stored == {
        **{f"wide/{dim}": "float32" for dim in DIMS},
        "wide/32": "int4",
        "half": "int8",
        "double": "float64",
        "counts": "int64",
    }
    assert [name for name, export in exports.items() if export.rounding] == ["wide/32", "half"]
    assert not any(export.notes for export in exports.values())


def test_bytes_of_smaller_rows_are_those_of_the_variables(tmp_path: Path) -> None:
    exports = export_saved_model(some_tables(tmp_path), tmp_path / "out", dtype="int4", keep_zeros=True, index="hash")
    again = open_checkpoint(tmp_path / "out")
    for export in exports:
        row = (export.bytes - export.rows * 8) // export.rows  # there is a row of zeros
        assert again.table(export.name).schema.bytes == export.bytes + row
        whole = export.rows * (export.dim * {"double": 8, "half": 2, "counts": 8}.get(export.name, 4) + 8)
        assert export.bytes_saved == whole - export.bytes


@pytest.mark.parametrize(("dtype", "number", "shown"), [("int8", np.nan, "NaN"), ("float16", 1e6, "1e\\+06")])
def test_a_row_that_does_not_fit_is_named_and_nothing_is_written(
    tmp_path: Path, dtype: str, number: float, shown: str
) -> None:
    values = np.ones((4, 8), np.float32)
    values[2, 3] = number
    table = ArrayTable("emb", np.array([5, 6, 77, 8]), values)
    with pytest.raises(BadInputError, match=f"table 'emb' as {dtype}: the row of key 77 has {shown}"):
        export_saved_model(Checkpoint(tmp_path, "memory", {"emb": table}), tmp_path / "out", dtype=dtype)
    assert names(tmp_path) == []


def test_there_is_no_such_type(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="got --dtype int2, expected float32, float16, bfloat16, int8, int4"):
        export_saved_model(some_tables(tmp_path), tmp_path / "out", dtype="int2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows_as": "int2"}, "unknown rows int2"),
        ({"rows_as": "int4"}, "should have 40 rows of 22 uint8"),
        ({"rows_as": None}, "should have 40 rows of 32 float32"),
        ({"value_dtype": "float16"}, "unknown rows int8 of float16"),
        ({"dim": 31}, "should have 40 rows of 37 uint8"),
    ],
)
def test_a_manifest_that_does_not_fit_its_rows(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    source = some_tables(tmp_path)
    export_saved_model(source, tmp_path / "out", tables=["wide/32"], dtype="int8", keep_zeros=True, index="hash")
    path = tmp_path / "out" / "assets.extra" / "kvtools.json"
    manifest = json.loads(path.read_text())
    assert manifest["format"] == 2
    manifest["tables"][0] |= change
    path.write_text(json.dumps(sealed(manifest)))
    with pytest.raises(CorruptFileError, match=message):
        open_checkpoint(tmp_path / "out")


def test_models_of_plain_rows_are_read_by_older_versions(tmp_path: Path) -> None:
    export_saved_model(some_tables(tmp_path), tmp_path / "out", dtype="float16")
    assert json.loads((tmp_path / "out" / "assets.extra" / "kvtools.json").read_text())["format"] == 1


@pytest.mark.parametrize("dtype", QUANTIZED)
@pytest.mark.parametrize("dim", [3, 4, 33])
def test_decoding_compiles_to_the_same_bits(tf: Any, dim: int, dtype: str) -> None:
    """XLA fuses what it likes."""
    values = np.random.default_rng(0).normal(size=(64, dim)).astype(np.float32) * np.float32([[1e-9], [1]] * 32)
    body = FunctionBody("decode")
    body.result(tf.float32.as_datatype_enum, as_numbers(body, body.argument("rows", 4), "float32", dtype, dim))
    nodes = [Node("rows", "Placeholder", [], {"dtype": of_type(4)})]
    for node in body.function().nodes:
        inputs = [source.partition(":")[0] for source in node.inputs]
        nodes.append(Node(node.name, node.op, inputs, node.attributes))
    graph = tf.compat.v1.GraphDef.FromString(Graph(nodes, {}, [], []).encode())

    def imported() -> Any:
        return tf.graph_util.import_graph_def(graph, name="", return_elements=["rows:0", "result_0:0"])

    wrapped = tf.compat.v1.wrap_function(imported, [])
    pruned = wrapped.prune("rows:0", "result_0:0")

    @tf.function(jit_compile=True)
    def compiled(rows: Any) -> Any:
        return pruned(rows)

    decoded = decode(encode(values, dtype), dtype, dim)
    encoded = encode(values, dtype)
    for shape in ((64,), (4, 16), (0,)):
        count = int(np.prod(shape))
        got = compiled(tf.constant(encoded[:count].reshape(*shape, encoded.shape[1])))
        assert got.shape == (*shape, dim) and got.numpy().tobytes() == decoded[:count].tobytes()


@pytest.mark.parametrize("dtype", ["float16", *QUANTIZED])
def test_the_perfect_index_over_smaller_rows_compiles(tf: Any, tmp_path: Path, dtype: str) -> None:
    values = np.random.default_rng(0).normal(size=(500, 9)).astype(np.float32)
    keys = np.random.default_rng(1).permutation(5000)[:500] - 2000
    source = Checkpoint(tmp_path, "memory", {"emb": ArrayTable("emb", keys, values)})
    export_saved_model(source, tmp_path / "out", dtype=dtype, index="perfect")
    model = tf.saved_model.load(str(tmp_path / "out"))
    signature = model.signatures["emb"]
    expected = decode(encode(values, dtype), dtype, 9) if dtype in QUANTIZED else values.astype(np.float16)
    asked = tf.constant(np.concatenate([keys, [9000, -9000]]))
    for ask in (signature, tf.function(lambda ids: signature(ids=ids), jit_compile=True)):
        got = ask(ids=asked) if ask is signature else ask(asked)
        assert got["found"].numpy().tolist() == [True] * 500 + [False] * 2
        assert got["embeddings"].numpy()[:500].tobytes() == expected.astype(np.float32).tobytes()
        assert not got["embeddings"].numpy()[500:].any()
    chunk = open_checkpoint(tmp_path / "out").table("emb").to_numpy()
    rows = dict(zip(chunk.keys.tolist(), np.asarray(chunk.values), strict=True))
    assert all(np.array_equal(rows[key], row) for key, row in zip(keys.tolist(), expected, strict=True))
