from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtools.clip import Clip, Criteria
from kvtools.clip_policy import Policy
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import BadInputError, CorruptFileError, OutputError, UnknownTableError
from kvtools.export import export_saved_model, signature_names
from kvtools.migrate import write_tables

Save = Callable[..., Path]

pytestmark = pytest.mark.usefixtures("tf")


def answers(tf: Any, model: Any, signature: str, ids: Any) -> np.ndarray:
    return np.asarray(model.signatures[signature](ids=tf.constant(ids, tf.int64))["embeddings"])


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def as_ids(keys: np.ndarray) -> np.ndarray:
    return keys.view(np.int64) if keys.dtype == np.uint64 else keys.astype(np.int64)


@pytest.mark.parametrize(
    ("key_dtype", "value_dtype", "clip"),
    [
        ("int64", "float32", None),
        ("int64", "float32", Clip("abs", 1.2)),
        ("int32", "float16", Clip("l2", 2.0)),
        ("uint64", "bfloat16", Clip("abs", 1.0)),
        ("int64", "float64", Clip("l2", 1.9)),
    ],
)
def test_answers_are_the_checkpoints_and_zeros_for_cut_keys(
    tf: Any,
    save: Save,
    make_sample: Any,
    table_tensors: Any,
    tmp_path: Path,
    key_dtype: str,
    value_dtype: str,
    clip: Clip | None,
) -> None:
    sample = make_sample(rows=300, key_dtype=key_dtype, value_dtype=value_dtype)
    checkpoint = open_checkpoint(save(tmp_path / "a", table_tensors(sample, 3), slices=2))
    (export,) = export_saved_model(
        checkpoint, tmp_path / "out", policy=Policy.of(Criteria(norms=(clip,) if clip else ()))
    )
    wide = sample.values.astype(np.float64)
    norms = np.abs(wide).max(axis=1) if clip and clip.norm == "abs" else np.sqrt((wide**2).sum(axis=1))
    kept = np.ones(300, bool) if clip is None else norms >= clip.threshold
    assert (export.rows, export.cut) == (kept.sum(), (~kept).sum())
    row_bytes = sample.values.itemsize * 4 + 8
    assert (export.bytes, export.bytes_saved) == (kept.sum() * row_bytes, (~kept).sum() * row_bytes)
    model = tf.saved_model.load(str(tmp_path / "out"))
    got = answers(tf, model, "scope_emb", as_ids(sample.keys))
    answer_dtype = np.float64 if value_dtype == "float64" else np.float32
    expected = np.where(kept[:, None], sample.values.astype(answer_dtype), 0)
    assert got.dtype == answer_dtype
    assert np.array_equal(got, expected)
    assert np.array_equal(answers(tf, model, "serving_default", as_ids(sample.keys)), expected)
    absent = sorted(set(range(1000, 1100)) - set(as_ids(sample.keys).tolist()))
    assert not answers(tf, model, "scope_emb", absent).any()

    # The exported model is itself a checkpoint that the tools open.
    again = open_checkpoint(tmp_path / "out")
    assert again.dialect == "savedmodel" and again.variables == ()
    table = again.table("scope/emb")
    assert (table.schema.key_dtype, table.schema.value_dtype, table.schema.rows) == (
        key_dtype,
        value_dtype,
        kept.sum(),
    )
    rows = {}
    for chunk in table.chunks(rows=50):
        assert chunk.values is not None and chunk.keys.dtype == sample.keys.dtype
        rows.update(zip(chunk.keys.tolist(), chunk.values, strict=True))
    assert rows.keys() == set(sample.keys[kept].tolist())
    assert all(np.array_equal(rows[key], row) for key, row in sample.rows().items() if key in rows)


def test_ids_of_any_shape(tf: Any, sample_path: Path, tmp_path: Path) -> None:
    export_saved_model(open_checkpoint(sample_path), tmp_path / "out")
    model = tf.saved_model.load(str(tmp_path / "out"))
    assert sorted(model.signatures) == ["ads_emb", "empty_emb", "serving_default", "user_emb"]
    assert answers(tf, model, "ads_emb", -7).tolist() == [2, 2.125, 2.25, 2.375]
    assert answers(tf, model, "ads_emb", [[[-7, 99]]]).shape == (1, 1, 2, 4)
    assert answers(tf, model, "ads_emb", np.zeros((0, 3))).shape == (0, 3, 4)
    assert answers(tf, model, "empty_emb", [0, 1, -1]).tolist() == [[0, 0]] * 3


def test_whether_ids_were_found(tf: Any, sample_path: Path, tmp_path: Path) -> None:
    export_saved_model(open_checkpoint(sample_path), tmp_path / "out")
    signatures = tf.saved_model.load(str(tmp_path / "out")).signatures
    found = signatures["ads_emb"](ids=tf.constant([[-7, 99]], tf.int64))["found"]
    assert found.dtype == tf.bool and found.numpy().tolist() == [[True, False]]
    assert signatures["empty_emb"](ids=tf.constant([0, 1], tf.int64))["found"].numpy().tolist() == [False, False]


def test_the_default_signature_of_several_tables_looks_up_in_all(tf: Any, sample_path: Path, tmp_path: Path) -> None:
    export_saved_model(open_checkpoint(sample_path), tmp_path / "out")
    model = tf.saved_model.load(str(tmp_path / "out"))
    ids = {"ads_emb": [[-7, 99]], "empty_emb": [3], "user_emb": 0}
    fed = {f"{name}_ids": tf.constant(each, tf.int64) for name, each in ids.items()}
    got = model.signatures["serving_default"](**fed)
    assert sorted(got) == sorted(f"{name}_{output}" for name in ids for output in ("embeddings", "found"))
    for name, each in ids.items():
        alone = model.signatures[name](ids=tf.constant(each, tf.int64))
        for output in ("embeddings", "found"):
            np.testing.assert_array_equal(got[f"{name}_{output}"], alone[output])


def test_clean_process_with_stock_tensorflow_only(
    save: Save, make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    """Eager and in a Session, two models at once, none of our modules loaded, and stock operations only."""
    paths = []
    for seed in (0, 1):
        sample = make_sample("emb", rows=40, seed=seed)
        checkpoint = open_checkpoint(save(tmp_path / f"c{seed}", table_tensors(sample)))
        paths.append(tmp_path / f"out{seed}")
        export_saved_model(checkpoint, paths[-1])
        np.savez(tmp_path / f"expected{seed}.npz", keys=sample.keys, values=sample.values)
    program = """
import sys
import numpy as np, tensorflow as tf
paths = sys.argv[1:]
models = [tf.saved_model.load(p) for p in paths]
for seed, (path, model) in enumerate(zip(paths, models)):
    expected = np.load(f"{path}/../expected{seed}.npz")
    got = model.signatures["emb"](ids=tf.constant(expected["keys"]))["embeddings"].numpy()
    assert np.array_equal(got, expected["values"])
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], path)
        signature = meta.signature_def["serving_default"]
        feed = {signature.inputs["ids"].name: expected["keys"][None]}
        got = session.run(signature.outputs["embeddings"].name, feed)
        assert np.array_equal(got, expected["values"][None])
        functions = meta.graph_def.library.function
        for node in [*meta.graph_def.node, *(n for f in functions for n in f.node_def)]:
            assert node.ByteSize() < 4096, node.name
assert not [name for name in sys.modules if name.split(".")[0] in ("kvtools", "tfplugin")]
"""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    subprocess.run([sys.executable, "-c", program, *map(str, paths)], check=True, cwd=tmp_path, env=environment)


def as_tensorflow_saves_it(tf: Any, folder: Path, tables: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Save by `tf.saved_model.save` what an export has: per signature keys, and values with zeros at the end."""

    class Index(tf.saved_model.experimental.TrackableResource):  # type: ignore[misc]
        def __init__(self, keys: Any) -> None:
            super().__init__()
            self._keys = keys
            self._eager_handle = self.resource_handle

        def _create_resource(self) -> Any:
            return tf.raw_ops.HashTableV2(key_dtype=tf.int64, value_dtype=tf.int64, shared_name=str(id(self)))

        def _initialize(self) -> None:
            rows = tf.range(tf.size(self._keys, out_type=tf.int64), dtype=tf.int64)
            tf.raw_ops.InitializeTableV2(table_handle=self.resource_handle, keys=self._keys, values=rows)

    model = tf.Module()
    model.tables, signatures = [], {}
    for name, (keys, values) in tables.items():
        table = tf.Module()
        table.keys = tf.Variable(keys, trainable=False, name=f"{name}/keys")
        table.values = tf.Variable(values, trainable=False, name=f"{name}/values")
        table.index = Index(table.keys)

        def lookup(ids: Any, table: Any = table, missing: int = len(keys)) -> Any:
            rows = tf.raw_ops.LookupTableFindV2(
                table_handle=table.index.resource_handle, keys=ids, default_value=tf.constant(missing, tf.int64)
            )
            return {"embeddings": tf.cast(tf.gather(table.values, rows), tf.float32), "found": rows < missing}

        spec = tf.TensorSpec(None, tf.int64, name="ids")
        signatures[name] = tf.function(lookup, input_signature=[spec], autograph=False)
        model.tables.append(table)

    def in_all(*ids: Any) -> Any:
        answers = {}
        for name, each in zip(tables, ids, strict=True):
            answers |= {f"{name}_{key}": answer for key, answer in signatures[name](each).items()}
        return answers

    specs = [tf.TensorSpec(None, tf.int64, name=f"{name}_ids") for name in tables]
    signatures["serving_default"] = tf.function(in_all, input_signature=specs, autograph=False)
    tf.saved_model.save(model, str(folder), signatures=signatures)


def test_a_model_is_like_one_that_tensorflow_saved(tf: Any, make_table: Any, tmp_path: Path) -> None:
    tables = [make_table("_a/b", rows=7, dim=3, value_dtype="bfloat16"), make_table("c", rows=5, dim=2)]
    write_tables(tables, tmp_path / "checkpoint", "tfplugin")
    export_saved_model(open_checkpoint(tmp_path / "checkpoint"), tmp_path / "ours", index="hash")
    as_tensorflow_saves_it(
        tf,
        tmp_path / "theirs",
        {
            # TensorFlow itself saves no signature whose name begins with "_".
            name: (table.keys, np.concatenate([table.values, np.zeros((1, table.dim), table.values.dtype)]))
            for name, table in zip(("a_b", "c"), tables, strict=True)
        },
    )
    ours, theirs = (tf.saved_model.load(str(tmp_path / side)) for side in ("ours", "theirs"))
    assert list(ours.signatures) == ["_a_b", "c", "serving_default"]
    assert list(theirs.signatures) == ["a_b", "c", "serving_default"]
    for number, (name, reference) in enumerate((("_a_b", "a_b"), ("c", "c"))):
        mine, other = ours.signatures[name], theirs.signatures[reference]
        assert mine.structured_input_signature == other.structured_input_signature
        assert mine.structured_outputs == other.structured_outputs
        ids = tf.constant([[*tables[number].keys.tolist(), 12345]], tf.int64)
        for answer in (mine(ids=ids), tf.function(lambda ids, mine=mine: mine(ids=ids))(ids)):
            np.testing.assert_array_equal(answer["embeddings"], other(ids=ids)["embeddings"])
        for variable in ("keys", "values"):
            a, b = (getattr(model.tables[number], variable) for model in (ours, theirs))
            assert (a.dtype, a.shape.as_list(), a.trainable) == (b.dtype, b.shape.as_list(), b.trainable)
            np.testing.assert_array_equal(a.numpy(), b.numpy())
    in_all = [side.signatures["serving_default"] for side in (ours, theirs)]
    keyword = [
        {name.removeprefix("_"): spec.dtype for name, spec in f.structured_input_signature[1].items()} for f in in_all
    ]
    assert keyword[0] == keyword[1] == {"a_b_ids": tf.int64, "c_ids": tf.int64}
    # As a graph: the same inputs and outputs, and a saver that saves what it restored.
    described = {}
    for side in ("ours", "theirs"):
        with tf.compat.v1.Session(graph=tf.Graph()) as session:
            meta = tf.compat.v1.saved_model.load(session, ["serve"], str(tmp_path / side))
            described[side] = {
                name.removeprefix("_"): {
                    of: {
                        key.removeprefix("_"): (one.dtype, str(one.tensor_shape))
                        for key, one in getattr(signature, of).items()
                    }
                    for of in ("inputs", "outputs")
                }
                for name, signature in meta.signature_def.items()
            }
            prefix = str(tmp_path / side / "again")
            saver = meta.saver_def
            session.run(saver.save_tensor_name, {saver.filename_tensor_name: prefix})
        described[side]["saved"] = sorted(tf.train.load_checkpoint(prefix).get_variable_to_shape_map().items())
    assert described["ours"] == described["theirs"]
    # What was loaded is saved again, by TensorFlow.
    tf.saved_model.save(ours, str(tmp_path / "again"), signatures={"c": ours.signatures["c"]})
    np.testing.assert_array_equal(
        answers(tf, tf.saved_model.load(str(tmp_path / "again")), "c", tables[1].keys), tables[1].values
    )


def test_later_rows_of_a_key_win(
    tf: Any, save_plain: Save, make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    sample = make_sample("emb", rows=20)
    sample.keys[15] = sample.keys[3]
    (export,) = export_saved_model(open_checkpoint(save_plain(tmp_path / "a", table_tensors(sample))), tmp_path / "out")
    assert (export.rows, export.duplicates, export.cut) == (19, 1, 0)
    model = tf.saved_model.load(str(tmp_path / "out"))
    assert np.array_equal(answers(tf, model, "emb", sample.keys[[3]])[0], sample.values[15])


def test_rows_that_are_not_finite_are_kept(
    tf: Any, save_plain: Save, make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    sample = make_sample("emb", rows=20)
    sample.values[4, 1] = np.nan
    sample.values[5, 0] = -np.inf
    checkpoint = open_checkpoint(save_plain(tmp_path / "a", table_tensors(sample)))
    (export,) = export_saved_model(checkpoint, tmp_path / "out", policy=Policy.of(Criteria(norms=(Clip("l2", 1e6),))))
    assert (export.rows, export.cut, export.non_finite) == (2, 18, 2)
    got = answers(tf, tf.saved_model.load(str(tmp_path / "out")), "emb", sample.keys[[4, 5]])
    assert np.array_equal(got, sample.values[[4, 5]], equal_nan=True)


def test_everything_cut(tf: Any, sample_path: Path, tmp_path: Path) -> None:
    (export,) = export_saved_model(
        open_checkpoint(sample_path),
        tmp_path / "out",
        tables=["ads/emb"],
        policy=Policy.of(Criteria(norms=(Clip("abs", 1e9),))),
    )
    assert (export.rows, export.cut) == (0, 11)
    assert not answers(tf, tf.saved_model.load(str(tmp_path / "out")), "ads_emb", [0, -7]).any()
    assert open_checkpoint(tmp_path / "out").table("ads/emb").all_keys().tolist() == []


def test_signature_names_are_legal_and_differ() -> None:
    assert signature_names(["a/b", "a_b", "a.b:0", "serving_default", "__saved_model_init_op"]) == {
        "a/b": "a_b",
        "a_b": "a_b_2",
        "a.b:0": "a_b_0",
        "serving_default": "serving_default_2",
        "__saved_model_init_op": "table__saved_model_init_op",
    }
    assert signature_names(["serving_default"]) == {"serving_default": "serving_default"}


def test_manifest(sample_path: Path, tmp_path: Path) -> None:
    export_saved_model(
        open_checkpoint(sample_path),
        tmp_path / "out",
        tables=["user_emb"],
        policy=Policy.of(Criteria(norms=(Clip("l2", 5),))),
    )
    manifest = json.loads((tmp_path / "out" / "assets.extra" / "kvtools.json").read_text())
    assert manifest["tables"][0]["clip"] == {"clip-l2": 5} and manifest["tables"][0]["cut_by"] == {"l2": 1}
    assert manifest["tables"][0]["signature"] == "user_emb"
    assert not (tmp_path / "out" / "fingerprint.pb").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 1, "tables": [{}]}',
        '{"format": 1, "tables": 3}',
        '{"format": "x", "tables": []}',
    ],
)
def test_damaged_manifest(sample_path: Path, tmp_path: Path, text: str) -> None:
    export_saved_model(open_checkpoint(sample_path), tmp_path / "out")
    (tmp_path / "out" / "assets.extra" / "kvtools.json").write_text(text)
    with pytest.raises(CorruptFileError, match=r"kvtools.json.*damaged"):
        open_checkpoint(tmp_path / "out")


def test_saved_model_with_our_variables_inside(
    tf: Any, save: Save, make_sample: Any, table_tensors: Any, tmp_path: Path
) -> None:
    """A SavedModel that training wrote: the object-based layout under variables/."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "saved_model.pb").write_bytes(b"")
    sample = make_sample("emb", rows=12)
    save(tmp_path / "model" / "variables" / "variables", table_tensors(sample, 2, prefix="emb"))
    checkpoint = open_checkpoint(tmp_path / "model")
    assert (checkpoint.dialect, checkpoint.path) == ("tfplugin", tmp_path / "model")
    export_saved_model(checkpoint, tmp_path / "out")
    got = answers(tf, tf.saved_model.load(str(tmp_path / "out")), "emb", sample.keys)
    assert np.array_equal(got, sample.values)


class TestRefusedAndAtomic:
    def test_no_table(self, save_plain: Save, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(save_plain(tmp_path / "a", {"w": np.zeros(3)}))
        with pytest.raises(BadInputError, match="no key-value table"):
            export_saved_model(checkpoint, tmp_path / "out")

    def test_unknown_table(self, sample_path: Path, tmp_path: Path) -> None:
        with pytest.raises(UnknownTableError):
            export_saved_model(open_checkpoint(sample_path), tmp_path / "out", tables=["nope"])

    def test_existing_output_and_force(self, sample_path: Path, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(sample_path)
        export_saved_model(checkpoint, tmp_path / "out", tables=["ads/emb"])
        with pytest.raises(OutputError, match="exists already"):
            export_saved_model(checkpoint, tmp_path / "out")
        assert list(open_checkpoint(tmp_path / "out").tables) == ["ads/emb"]
        # Onto itself: the source is read from the folder that is replaced.
        export_saved_model(
            open_checkpoint(tmp_path / "out"),
            tmp_path / "out",
            force=True,
            policy=Policy.of(Criteria(norms=(Clip("abs", 5),))),
        )
        assert open_checkpoint(tmp_path / "out").table("ads/emb").schema.rows == 7

    def test_damaged_source_leaves_no_output(self, sample_path: Path, tmp_path: Path) -> None:
        from kvtools.dialects.bundle import Bundle

        entry = Bundle(sample_path / "model.ckpt-7").entries["user_emb-values"]
        data = sample_path / "model.ckpt-7.data-00000-of-00001"
        damaged = bytearray(data.read_bytes())
        damaged[entry.offset] ^= 1
        data.write_bytes(bytes(damaged))
        with pytest.raises(CorruptFileError, match="checksum mismatch"):
            export_saved_model(open_checkpoint(sample_path), tmp_path / "out")
        assert names(tmp_path) == ["sample"]

    @pytest.mark.thorough
    def test_full_disk(
        self, save_plain: Save, make_sample: Any, table_tensors: Any, sample_path: Path, tmp_path: Path
    ) -> None:
        """A limit on the size of files stands for the disk's."""
        export_saved_model(open_checkpoint(sample_path), tmp_path / "out")
        before = {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()}
        path = save_plain(tmp_path / "big", table_tensors(make_sample("emb", rows=2000, dim=64, slots=())))
        program = (
            "import resource, sys; from kvtools.cli.main import main\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
            "sys.exit(main(sys.argv[1:]))"
        )
        arguments = ["export", "--savedmodel", str(tmp_path / "out"), "--force", str(path)]
        done = subprocess.run([sys.executable, "-c", program, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1 and "File too large; nothing was changed" in done.stderr
        assert {file: file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()} == before
        assert not list(tmp_path.glob(".out*"))

    @pytest.mark.thorough
    def test_killed_export_leaves_the_old_one(self, sample_path: Path, tmp_path: Path) -> None:
        checkpoint = open_checkpoint(sample_path)
        export_saved_model(checkpoint, tmp_path / "out", tables=["user_emb"])
        program = (
            "import sys, time; from pathlib import Path\n"
            "from kvtools.dialects.detect import open_checkpoint; from kvtools.export import"
            " export_saved_model\ndef progress(*_):\n"
            "  if any(Path(sys.argv[2]).parent.glob('.out*')): print('writing', flush=True); time.sleep(60)\n"
            "export_saved_model(open_checkpoint(sys.argv[1]), Path(sys.argv[2]), force=True,"
            " progress=progress)"
        )
        arguments = [sys.executable, "-c", program, str(sample_path), str(tmp_path / "out")]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, cwd=tmp_path) as process:
            assert process.stdout is not None and process.stdout.readline() == b"writing\n"
            process.send_signal(signal.SIGKILL)
        assert list(open_checkpoint(tmp_path / "out").tables) == ["user_emb"]
        assert list(tmp_path.glob(".out*"))
        started = time.monotonic()
        export_saved_model(checkpoint, tmp_path / "out", force=True)
        assert time.monotonic() - started < 60
        assert names(tmp_path) == ["out", "sample"]
