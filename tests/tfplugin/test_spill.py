"""Variables that keep few of their rows in memory: as any others, and what is wrong with a disk is said."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin
import tfplugin.keras
import tfplugin.tf_keras

DIM, KEYS = 4, 3000
#: Memory for some 500 rows with two slots.
FEW = 500 * (DIM * 4 * 3 + 20)

OPTIMIZERS = {
    "sgd": lambda: tf.keras.optimizers.SGD(0.1),
    "adam": lambda: tf.keras.optimizers.Adam(0.1),
    "adagrad": lambda: tf.keras.optimizers.Adagrad(0.1),
    "ftrl": lambda: tf.keras.optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "not fused": lambda: tf.keras.optimizers.Nadam(0.1),
}


def contents(table):
    """Rows by key."""
    keys, rows = table.export()
    return dict(zip(keys.numpy().tolist(), map(tuple, rows.numpy().tolist()), strict=True))


def trained(tables, optimizers, steps, seed=0):
    """The same steps of all tables."""
    for number in range(steps):
        random = np.random.default_rng([seed, number])
        ids = tf.constant(random.zipf(1.2, 400) % KEYS)
        targets = tf.constant(random.normal(size=[400, DIM]).astype(np.float32))
        for table, optimizer in zip(tables, optimizers, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((tf.nn.embedding_lookup(table, ids) - targets) ** 2)
            parts = [*table] if isinstance(table, tfplugin.PartitionedKvVariable) else [table]
            optimizer.apply_gradients(zip(tape.gradient(loss, parts), parts, strict=True))


def few(tmp_path, **told):
    return {"max_memory": FEW, "spill": tmp_path, **told}


def fill(table):
    keys = np.arange(KEYS)
    table.upsert(keys, np.outer(keys, np.ones(DIM)).astype(np.float32))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_gives_what_it_gives_in_memory(name, tmp_path):
    spilled = tf.get_kv_variable("s", DIM, initializer=0.5, **few(tmp_path))
    memory = tf.get_kv_variable("m", DIM, initializer=0.5)
    fill(spilled), fill(memory)
    optimizers = [tfplugin.OptimizerWrapper(OPTIMIZERS[name]()) for _ in range(2)]
    trained([spilled, memory], optimizers, 12)
    assert contents(spilled) == contents(memory)
    rows, row_bytes, *_, in_file, file_bytes = spilled.memory().numpy().tolist()
    assert rows == KEYS and in_file > KEYS / 2 and row_bytes <= FEW and file_bytes > 0
    assert memory.memory().numpy()[5:].tolist() == [0, 0]
    assert list(tmp_path.iterdir()) == []  # the file has no name


@pytest.mark.parametrize("parts", [None, 3])
@pytest.mark.parametrize("restored_spills", [True, False])
def test_a_checkpoint_has_all_rows_and_slots(parts, restored_spills, tmp_path):
    partitioner = tf.compat.v1.fixed_size_partitioner(parts) if parts else None
    spilled = tf.get_kv_variable("t", DIM, initializer=0.5, partitioner=partitioner, **few(tmp_path))
    fill(spilled)
    optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    trained([spilled], [optimizer], 4)
    saved = tf.train.Checkpoint(table=spilled, optimizer=optimizer).save(str(tmp_path / "checkpoint"))
    told = few(tmp_path) if restored_spills else {}
    other = tf.get_kv_variable("t", DIM, initializer=0.5, **told)
    its_optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
    tf.train.Checkpoint(table=other, optimizer=its_optimizer).restore(saved)
    assert contents(other) == contents(spilled)
    trained([spilled, other], [optimizer, its_optimizer], 3, seed=1)  # the slots were there
    assert contents(other) == contents(spilled)
    assert (other.memory().numpy()[5] > KEYS / 2) == restored_spills


def test_a_graph_has_them_too(tmp_path):
    with tf.Graph().as_default():
        table = tf.compat.v1.get_kv_variable("t", DIM, initializer=0.5, **few(tmp_path))
        rows = tf.nn.embedding_lookup(table, tf.range(KEYS, dtype=tf.int64))
        train = tf.compat.v1.train.AdagradOptimizer(0.1).minimize(tf.reduce_sum(rows**2))
        saver = tf.compat.v1.train.Saver()
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run([train, train])
            trained_rows = session.run(rows)
            assert session.run(table.memory())[5] > KEYS / 2
            path = saver.save(session, str(tmp_path / "model"))
        with tf.compat.v1.Session() as session:
            saver.restore(session, path)
            np.testing.assert_array_equal(session.run(rows), trained_rows)
            assert session.run(table.memory())[5] > KEYS / 2


def test_a_layer_and_a_collection_of_keras_have_them(tmp_path):
    layer = tfplugin.keras.Embedding(DIM, combiner="sum", name="one", max_memory=FEW, spill=str(tmp_path))
    model = tf.keras.Sequential([tf.keras.Input((None,), dtype="int64"), layer, tf.keras.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(np.random.default_rng(0).integers(0, KEYS, [2000, 3]), np.ones([2000, 1]), batch_size=500, verbose=0)
    assert layer.table.memory().numpy()[5] > 100
    config = layer.get_config()
    assert (config["max_memory"], config["spill"]) == (FEW, str(tmp_path))
    table = tfplugin.keras.TableConfig("many", embedding_dim=DIM, max_memory=FEW, spill=str(tmp_path))
    again = tfplugin.keras.TableConfig.from_config(table.get_config())
    assert (again.max_memory, again.spill) == (FEW, str(tmp_path))
    with pytest.raises(ValueError, match=r"Layer 'two'.*give spill="):
        tfplugin.keras.Embedding(DIM, name="two", max_memory=FEW)


def test_what_serves_a_model_needs_no_folder(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    module = tf.Module()
    module.table = tf.get_kv_variable("t", DIM, initializer=0.5, **few(folder))
    fill(module.table)
    module.lookup = tf.function(
        lambda ids: tf.nn.embedding_lookup(module.table, ids), input_signature=[tf.TensorSpec([None], tf.int64)]
    )
    tf.saved_model.save(module, str(tmp_path / "model"), signatures=module.lookup)
    keys = tf.constant([1, 2999], tf.int64)
    expected = module.lookup(keys).numpy()
    folder.rename(tmp_path / "gone")
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.lookup(keys).numpy(), expected)


@pytest.mark.parametrize(
    "told, message",
    [
        ({"max_memory": FEW}, "'bad': max_memory=.*give spill="),
        ({"spill": "/tmp"}, "'bad': spill=.*give max_memory="),
        ({"max_memory": 0, "spill": "/tmp"}, "'bad': max_memory must be a number of bytes"),
        ({"max_memory": "1G", "spill": "/tmp"}, "'bad': max_memory must be a number of bytes"),
        ({"max_memory": 2.5, "spill": "/tmp"}, "'bad': max_memory must be a number of bytes"),
        ({"max_memory": FEW, "spill": ""}, "'bad': spill must be a folder"),
    ],
)
def test_what_cannot_be_is_said(told, message):
    with pytest.raises(ValueError, match=message):
        tf.get_kv_variable("bad", DIM, **told)


@pytest.mark.parametrize(
    "spill, message",
    [
        ("/not/there", "No such file or directory. Make the folder"),
        (__file__, "Not a directory. Name a folder on a local disk in spill=, not a file"),
        ("/proc", "in which this process may write"),
    ],
)
def test_a_folder_that_cannot_be_used_is_named(spill, message):
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        tf.get_kv_variable("bad", DIM, max_memory=FEW, spill=spill)
    assert f"Table 'bad' cannot keep rows in its spill folder '{spill}': " in str(caught.value)
    assert message in str(caught.value)


def test_memory_for_too_few_rows_is_told(tmp_path):
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"max_memory of 100 bytes .* need max_memory=576 at least"
    ):
        tf.get_kv_variable("bad", DIM, max_memory=100, spill=tmp_path)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", folder], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {made.stderr}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # a table may still have its file there


def test_a_full_disk_is_named_and_loses_nothing(small_disk, tmp_path):
    table = tf.get_kv_variable("big", DIM, max_memory=20_000, spill=small_disk)
    written: dict[int, float] = {}
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        for begin in range(0, 1_000_000, 1000):
            keys = np.arange(begin, begin + 1000)
            table.upsert(keys, np.full([1000, DIM], begin, np.float32))
            written |= dict.fromkeys(keys.tolist(), float(begin))
    for part in (f"'{small_disk}'", "Table 'big'", "No space left on device", "Nothing is lost", "max_memory"):
        assert part in str(caught.value), part
    assert len(written) > 20_000
    held = contents(table)  # and a part of the batch that was refused
    assert {key: held[key][0] for key in written} == written
    # The way out that the message names.
    saved = tf.train.Checkpoint(table=table).save(str(tmp_path / "checkpoint"))
    larger = tf.get_kv_variable("big", DIM, max_memory=20_000, spill=tmp_path)
    tf.train.Checkpoint(table=larger).restore(saved)
    assert contents(larger) == held
    # Or: there is room again.
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk], check=True)
    some = list(written)[:2000]
    table.accumulate(some, np.ones([2000, DIM], np.float32))
    held = contents(table)
    assert all(held[key][0] == written[key] + 1 for key in some)


def test_a_process_that_is_killed_leaves_nothing(tmp_path):
    script = (
        "import os, signal, numpy as np\n"
        "from kvtools._kvtable import Table\n"
        f"table = Table('int64', 'float32', 4, max_memory=20000, spill={str(tmp_path)!r}, name='t')\n"
        "table.upsert(np.arange(5000), np.ones([5000, 4], np.float32))\n"
        "assert table.memory()['spilled_rows'] > 4000\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=False)
    assert ended.returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_memory_of_the_process_stays_where_it_was_bounded(tmp_path):
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    bound = 8 << 20
    table = tf.get_kv_variable("t", 64, max_memory=bound, spill=tmp_path)
    values = np.ones([10_000, 64], np.float32)
    table.upsert(np.arange(50_000, 60_000), values)
    before = resident()
    for begin in range(100_000, 500_000, 10_000):  # 100 MB of rows
        table.upsert(np.arange(begin, begin + 10_000), values)
    beside = int(table.memory().numpy()[2:4].sum())  # index and columns
    assert resident() - before < bound + beside + (16 << 20)


# ---- Models on a machine that has not the folder ----


def spilled_model(keras, layers, folder):
    layer = layers.Embedding(DIM, name="ad", combiner="sum", max_memory=FEW, spill=str(folder))
    model = keras.Sequential([keras.Input((2,), dtype="int64"), layer])
    model.compile("adam", "mse")
    model.fit(np.arange(KEYS).reshape(-1, 2), np.ones((KEYS // 2, DIM)), batch_size=300, verbose=0)
    return model


def loaded(keras, path):
    return keras.models.load_model(path)


KERASES = pytest.mark.parametrize(
    ("keras", "layers", "suffix"),
    [(keras, tfplugin.keras, ".keras"), (tf_keras, tfplugin.tf_keras, ".keras"), (tf_keras, tfplugin.tf_keras, ".h5")],
    ids=["keras", "tf_keras", "h5"],
)


@KERASES
@pytest.mark.parametrize("load", [loaded, lambda keras, path: pickle.loads(path.with_suffix(".pickle").read_bytes())])
def test_a_model_without_its_folder_says_so_in_a_line_and_takes_another(keras, layers, suffix, load, tmp_path):
    gone, other, path = tmp_path / "gone", tmp_path / "other", tmp_path / f"m{suffix}"
    gone.mkdir()
    other.mkdir()
    model = spilled_model(keras, layers, gone)
    model.save(path)
    path.with_suffix(".pickle").write_bytes(pickle.dumps(model))
    rows = contents(model.get_layer("ad").table)
    gone.rmdir()
    with pytest.raises(ValueError, match="'ad' cannot keep rows in its spill folder") as caught:
        load(keras, path)
    assert len(str(caught.value)) < 700 and f"'{gone}': No such file or directory. " in str(caught.value)
    assert "with tfplugin.spill_in('/another/folder'):" in str(caught.value)
    for folder in (other, None):
        with tfplugin.spill_in(folder):
            again = load(keras, path)
        table = again.get_layer("ad").table
        assert contents(table) == rows
        assert (table.spill, table.max_memory) == ((str(other), FEW) if folder else (None, None))
        assert (int(table.memory()[-2]) > 1000) == (folder is not None)
        assert again.get_layer("ad").get_config()["spill"] == table.spill
        again.save(tmp_path / f"again{suffix}")
        loaded(keras, tmp_path / f"again{suffix}")


def test_a_copy_without_its_folder_says_so_and_takes_another(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    table = tf.get_kv_variable("ad", DIM, max_memory=FEW, spill=gone)
    fill(table)
    model = spilled_model(keras, tfplugin.keras, gone)
    gone.rmdir()
    for what, held in ((table, lambda copied: copied), (model, lambda copied: copied.get_layer("ad").table)):
        with pytest.raises(ValueError, match=r"tfplugin\.spill_in"):
            copy.deepcopy(what)
        with tfplugin.spill_in(tmp_path):
            copied = copy.deepcopy(what)
        assert held(copied).spill == str(tmp_path)
        assert contents(held(copied)) == contents(held(what))


def test_a_folder_for_all_is_that_of_tables_with_a_bound_on_this_thread(tmp_path):
    with tfplugin.spill_in(tmp_path):
        assert tf.get_kv_variable("a", DIM).spill is None
        assert tf.get_kv_variable("b", DIM, max_memory=FEW, spill="/gone").spill == str(tmp_path)
        with tfplugin.spill_in(None):
            assert tf.get_kv_variable("c", DIM, max_memory=FEW, spill="/gone").max_memory is None
        with pytest.raises(ValueError, match="give spill="):
            tf.get_kv_variable("d", DIM, max_memory=FEW)
    with pytest.raises(tf.errors.InvalidArgumentError, match="'/gone'"):
        tf.get_kv_variable("e", DIM, max_memory=FEW, spill="/gone")
    for wrong in ("", 3):
        with pytest.raises((ValueError, TypeError)), tfplugin.spill_in(wrong):
            pass
