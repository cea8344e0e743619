"""Checkpoints: what `tf.compat.v1.train.Saver` and `tf.train.Checkpoint` save and restore, and what TFRA saved."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from trained_graph import KEYS, NAME, PARTITIONERS, ROWS, Graph, by_key

import kvtools
from kvtools.dialects import detect
from kvtools.merge import merge
from tfplugin import dynamic_embedding as de
from tfplugin.dynamic_embedding.checkpoint import from_arrays

v1 = tf.compat.v1
TFRA = Path(__file__).parents[1] / "data" / "tfra"


EXPECTED = {int(key): row.tobytes() for key, row in zip(KEYS, ROWS, strict=True)}


def slots_of(run, table, optimizer):
    return {slot.name: by_key(run(slot.export())) for slot in table.get_slot_variables(optimizer)}


@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 3), (1, 3), (3, 2)])
def test_a_saver_keeps_rows_slots_and_status_over_any_number_of_devices(tmp_path, before, after, partitioner):
    with tf.Graph().as_default():
        saved = Graph(before, **partitioner)
        saved.session.run(saved.table.upsert(KEYS, ROWS))
        for _ in range(3):
            saved.session.run(saved.step)
        path = saved.saver.save(saved.session, str(tmp_path / "m"))
        expected = saved.state()
        saved.session.run(saved.step)
        later = saved.state()
    assert len(expected[0]) == 7 and len(expected[2]) == 4 and len(expected[1]) == 2
    with tf.Graph().as_default():
        restored = Graph(after, **partitioner)
        restored.session.run(restored.table.upsert([99], [[1.0, 2.0]]))
        restored.saver.restore(restored.session, path)
        assert restored.state() == expected
        sizes = restored.session.run([restored.table.size(i) for i in range(after)])
        owner = restored.session.run(restored.table.partition_fn(tf.constant(KEYS), after))
        assert sizes == np.bincount(owner, minlength=after).tolist()
        restored.session.run(restored.step)
        assert restored.state() == later


@pytest.mark.parametrize("devices", [1, 3])
def test_a_saver_takes_a_list_or_a_dictionary_of_variables(tmp_path, devices):
    for name, var_list in ((NAME, lambda v: [v]), ("other/name", lambda v: {"other/name": v})):
        with tf.Graph().as_default(), v1.Session() as session:
            v = de.Variable(dim=2, name=NAME, devices=["/CPU:0"] * devices)
            saver = v1.train.Saver(var_list(v))
            session.run(v.upsert(KEYS, ROWS))
            path = saver.save(session, str(tmp_path / "m"))
            session.run(v.clear())
            saver.restore(session, path)
            assert by_key(session.run(v.export())) == EXPECTED
        table = kvtools.open(path).table(name)
        assert table.schema.dim == 2 and sum(table.schema.part_rows) == len(KEYS)
        assert any(
            n.startswith(f"{name}/part_0-" if devices > 1 else f"{name}-") for n, _ in tf.train.list_variables(path)
        )


def test_a_variable_that_is_no_checkpoint_is_not_saved(tmp_path):
    with tf.Graph().as_default(), v1.Session() as session:
        v = de.Variable(dim=2, name=NAME, checkpoint=False, restrict_policy=de.FrequencyRestrictPolicy)
        w = v1.get_variable("w", [1], use_resource=True)
        session.run([w.initializer, v.upsert(KEYS, ROWS)])
        path = v1.train.Saver().save(session, str(tmp_path / "m"))
    assert [n for n, _ in tf.train.list_variables(path)] == ["w"]
    v = de.Variable(dim=2, name=NAME, checkpoint=False)
    v.upsert(KEYS, ROWS)
    path = tf.train.Checkpoint(v=v, w=tf.Variable(1.0)).save(str(tmp_path / "c"))
    assert not any("-keys" in n for n, _ in tf.train.list_variables(path))


def trained(optimizer, table, steps=3):
    shadow = table.get_trainable_by_name("x")
    for _ in range(steps):
        optimizer.minimize(
            lambda: tf.reduce_sum(de.embedding_lookup(table, tf.constant(KEYS[:4]), name="x")), var_list=[shadow]
        )


OPTIMIZERS = {"Keras 3": tf.keras.optimizers.Adam, "tf_keras": tf_keras.optimizers.Adam}


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 3), (1, 3), (3, 2)])
def test_a_checkpoint_keeps_rows_slots_and_status(tmp_path, before, after, partitioner, make_optimizer):
    def made(devices):
        table = de.Variable(
            dim=2, name=NAME, devices=["/CPU:0"] * devices, restrict_policy=de.FrequencyRestrictPolicy, **partitioner
        )
        optimizer = de.DynamicEmbeddingOptimizer(make_optimizer(0.1))
        return table, optimizer, tf.train.Checkpoint(model=tf.train.Checkpoint(table=table), optimizer=optimizer)

    def state(table, optimizer):
        status = table.restrict_policy.status
        return by_key(table.export()), slots_of(lambda x: x, table, optimizer), by_key(status.export())

    table, optimizer, checkpoint = made(before)
    table.upsert(KEYS, ROWS)
    trained(optimizer, table)
    path = checkpoint.save(str(tmp_path / "c"))
    expected = state(table, optimizer)
    trained(optimizer, table, 1)
    later = state(table, optimizer)

    table, optimizer, checkpoint = made(after)
    table.upsert([99], [[1.0, 2.0]])
    checkpoint.restore(path).assert_existing_objects_matched()
    assert by_key(table.export()) == expected[0] and by_key(table.restrict_policy.status.export()) == expected[2]
    trained(optimizer, table, 1)
    assert state(table, optimizer) == later


@pytest.mark.parametrize("files", [False, True], ids=["in_checkpoint", "to_files"])
@pytest.mark.parametrize("make_optimizer", [*OPTIMIZERS.values(), v1.train.AdamOptimizer], ids=[*OPTIMIZERS, "v1"])
def test_slots_that_were_taken_before_a_restore_are_the_restored_ones(tmp_path, make_optimizer, files):
    creator = de.CuckooHashTableCreator(saver=de.FileSystemSaver()) if files else None
    table = de.Variable(dim=2, name=NAME, devices=["/CPU:0"] * 2, kv_creator=creator)
    first, second = (de.DynamicEmbeddingOptimizer(make_optimizer(0.1)) for _ in range(2))
    trained(first, table)
    of_first = table.get_slot_variables(first)
    expected = [by_key(slot.export()) for slot in of_first]
    path = tf.train.Checkpoint(table=table, optimizer=first).save(str(tmp_path / "c"))

    trained(second, table, 1)
    taken = table.get_slot_variables(second)
    checkpoint = tf.train.Checkpoint(table=table, optimizer=second)
    checkpoint.restore(path)
    assert [by_key(slot.export()) for slot in taken] == expected
    assert [by_key(slot.export()) for slot in table.get_slot_variables(second)] == expected
    with pytest.raises(ValueError, match="another optimizer was restored"):
        of_first[0].export()

    taken[0].upsert(KEYS[:1], ROWS[:1])
    expected[0][int(KEYS[0])] = ROWS[0].tobytes()
    assert [by_key(slot.export()) for slot in taken] == expected
    path = checkpoint.save(str(tmp_path / "again"))
    trained(second, table, 1)
    checkpoint.restore(path)
    assert [by_key(slot.export()) for slot in taken] == expected


def test_a_checkpoint_may_be_restored_before_its_variable_is_made(tmp_path):
    v = de.Variable(dim=2, name=NAME)
    v.upsert(KEYS, ROWS)
    path = tf.train.Checkpoint(v=v).save(str(tmp_path / "c"))
    checkpoint = tf.train.Checkpoint()
    checkpoint.restore(path)
    checkpoint.v = de.Variable(dim=2, name=NAME)
    assert by_key(checkpoint.v.export()) == EXPECTED


@pytest.mark.parametrize("dtype", [tf.int8, tf.int32, tf.int64, tf.bool, tf.bfloat16], ids=lambda d: d.name)
@pytest.mark.parametrize("key_dtype", [tf.int64, tf.int32], ids=lambda d: d.name)
def test_all_dtypes_are_saved(tmp_path, key_dtype, dtype):
    made = [de.Variable(key_dtype, dtype, dim=3, name=NAME, devices=["/CPU:0"] * n) for n in (1, 2)]
    keys = tf.constant([1, -2, 3], key_dtype)
    values = tf.cast([[1, 0, 1], [0, 0, 1], [1, 1, 0]], dtype)
    made[0].upsert(keys, values)
    path = tf.train.Checkpoint(v=made[0]).save(str(tmp_path / "c"))
    tf.train.Checkpoint(v=made[1]).restore(path)
    assert by_key(made[1].export()) == by_key((keys, values))
    (table,) = kvtools.open(path).tables.values()
    assert (table.schema.key_dtype, table.schema.value_dtype) == (key_dtype.name, dtype.name)


IMPORTED = """
import sys
import tensorflow as tf
import tfplugin
v1 = tf.compat.v1
with tf.Graph().as_default(), v1.Session() as session:
    saver = v1.train.import_meta_graph(sys.argv[1] + ".meta")
    saver.restore(session, sys.argv[1])
    print("ROWS", session.run("rows:0").tolist())
"""


@pytest.mark.parametrize("devices", [1, pytest.param(3, marks=pytest.mark.thorough)])
def test_another_process_imports_the_graph_and_restores(tmp_path, devices):
    with tf.Graph().as_default(), v1.Session() as session:
        v = de.Variable(dim=2, name=NAME, devices=["/CPU:0"] * devices)
        tf.identity(de.embedding_lookup(v, tf.constant(KEYS), name="x"), name="rows")
        session.run(v.upsert(KEYS, ROWS))
        path = v1.train.Saver().save(session, str(tmp_path / "m"))
    script = tmp_path / "imported.py"
    script.write_text(IMPORTED)
    done = subprocess.run([sys.executable, "-P", str(script), path], capture_output=True, text=True, check=False)
    assert f"ROWS {ROWS.tolist()}" in done.stdout, done.stderr[-2000:]


# ---- Checkpoints that TFRA wrote ----


@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_name_based_checkpoint_of_tfra_restores_with_its_slots(devices, partitioner):
    expected = np.load(TFRA / "expected_v1_adam.npz")
    path = str(TFRA / "v1_adam" / "model.ckpt-20")
    read = kvtools.open(path).table("tower/ad_emb")
    with tf.Graph().as_default(), v1.Session() as session:
        with v1.variable_scope("tower"):
            v = de.get_variable("ad_emb", dim=8, devices=["/CPU:0"] * devices, **partitioner)
        dense = v1.get_variable("dense_w", expected["dense_w"].shape, use_resource=True)
        rows = de.embedding_lookup(v, tf.constant(expected["keys"][:5]), name="x")
        optimizer = de.DynamicEmbeddingOptimizer(v1.train.AdamOptimizer(0.1))
        step = optimizer.minimize(tf.reduce_sum(rows), var_list=list(v.trainable_store.values()))
        session.run(v1.global_variables_initializer())
        v1.train.Saver([v, dense]).restore(session, path)
        assert by_key(session.run(v.export())) == by_key((expected["keys"], expected["values"]))
        np.testing.assert_array_equal(session.run(dense), expected["dense_w"])
        stored = {}
        for chunk in read.chunks():
            for name, slot in chunk.slots.items():
                stored.setdefault(name, {}).update(by_key((chunk.keys, slot)))
        names = [f"Adam.{slot.slot_name}" for slot in v.get_slot_variables(optimizer)]
        slots = [by_key(session.run(slot.export())) for slot in v.get_slot_variables(optimizer)]
        assert dict(zip(names, slots, strict=True)) == stored and set(names) == {"Adam.m", "Adam.v"}
        # And trains on.
        session.run(step)
        m = session.run(v.get_slot_variables(optimizer)[0].lookup(tf.constant(expected["keys"][:1])))
        before = np.frombuffer(stored["Adam.m"][int(expected["keys"][0])], np.float32)
        np.testing.assert_allclose(m[0], before * 0.9 + 0.1, rtol=1e-5)


@pytest.mark.parametrize("devices", [1, 3])
def test_an_object_based_checkpoint_of_tfra_restores(devices):
    expected = np.load(TFRA / "expected_tf2.npz")
    user = de.Variable(dim=8, name="user_emb", devices=["/CPU:0"] * devices)
    item = de.Variable(dim=16, name="another name", devices=["/CPU:0"] * devices)
    tf.train.Checkpoint(m=tf.train.Checkpoint(user=user, item=item)).restore(str(TFRA / "object" / "ckpt"))
    assert by_key(user.export()) == by_key((expected["user_keys"], expected["user_values"]))
    assert by_key(item.export()) == by_key((expected["item_keys"], expected["item_values"]))


@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
@pytest.mark.parametrize("devices", [1, 3])
def test_a_name_based_checkpoint_of_tfra_restores_eagerly_as_dense_variables_do(devices, partitioner):
    expected = np.load(TFRA / "expected_v1_adam.npz")
    table = de.Variable(dim=8, name="tower/ad_emb", devices=["/CPU:0"] * devices, **partitioner)
    other = de.Variable(dim=8, name="tower/another", devices=["/CPU:0"] * devices, **partitioner)
    dense = tf.Variable(tf.zeros(expected["dense_w"].shape), name="dense_w")
    path = str(TFRA / "v1_adam" / "model.ckpt-20")
    tf.train.Checkpoint(v=table, w=dense).restore(path).assert_consumed()
    assert by_key(table.export()) == by_key((expected["keys"], expected["values"]))
    np.testing.assert_array_equal(dense, expected["dense_w"])
    status = tf.train.Checkpoint(v=table, o=other).restore(path)
    with pytest.raises(AssertionError, match="tower/another"):
        status.assert_existing_objects_matched()


@pytest.mark.parametrize("files", [False, True], ids=["in_checkpoint", "to_files"])
@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 3), (3, 2)])
def test_what_a_saver_saved_restores_eagerly_as_dense_variables_do(tmp_path, before, after, partitioner, files):
    creator = de.CuckooHashTableCreator(saver=de.FileSystemSaver()) if files else None

    def made(devices):
        return de.Variable(dim=2, name=NAME, devices=["/CPU:0"] * devices, kv_creator=creator, **partitioner)

    with tf.Graph().as_default(), v1.Session() as session:
        table = made(before)
        session.run(table.upsert(KEYS, ROWS))
        path = v1.train.Saver([table]).save(session, str(tmp_path / "m"), global_step=3)
    again = made(after)
    again.upsert([99], [[1.0, 2.0]])
    tf.train.Checkpoint(v=again).restore(path).assert_consumed()
    assert by_key(again.export()) == EXPECTED


def test_string_keys_that_a_saver_saved_restore_eagerly(tmp_path):
    with tf.Graph().as_default(), v1.Session() as session:
        table = de.Variable(key_dtype=tf.string, dim=2, name=NAME)
        session.run(v1.global_variables_initializer())
        session.run(table.upsert(["a", "b"], [[1.0, 2.0], [3.0, 4.0]]))
        path = v1.train.Saver([table]).save(session, str(tmp_path / "m"))
    again = de.Variable(key_dtype=tf.string, dim=2, name=NAME)
    tf.train.Checkpoint(v=again).restore(path).assert_consumed()
    keys, rows = again.export()
    assert dict(zip(keys.numpy(), rows.numpy().tolist(), strict=True)) == {b"a": [1.0, 2.0], b"b": [3.0, 4.0]}


def test_rows_of_string_keys_that_are_restored_without_their_strings(tmp_path):
    for name, keys in (("first", ["", "a"]), ("last", ["", "b"])):
        table = de.Variable(key_dtype=tf.string, dim=2, name=NAME)
        table.upsert(keys, [[1.0, 2.0], [3.0, 4.0]])
        tf.train.Checkpoint(v=table).write(str(tmp_path / name))
    first, last = kvtools.open(tmp_path / "first"), kvtools.open(tmp_path / "last")
    account, _ = merge([first, last], tmp_path / "whole")
    assert account.lossless
    again = de.Variable(key_dtype=tf.string, dim=2, name=NAME)
    tf.train.Checkpoint(v=again).read(str(tmp_path / "whole")).assert_consumed()
    keys, rows = again.export()
    assert dict(zip(keys.numpy(), rows.numpy().tolist(), strict=True)) == {
        b"": [1.0, 2.0],
        b"a": [3.0, 4.0],
        b"b": [3.0, 4.0],
    }
    merge([first, dataclasses.replace(last, variables=())], tmp_path / "merged")
    again = de.Variable(key_dtype=tf.string, dim=2, name=NAME)
    tf.train.Checkpoint(v=again).read(str(tmp_path / "merged")).assert_consumed()
    assert again.lookup(["a", "b"]).numpy().tolist() == [[3.0, 4.0], [3.0, 4.0]]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"'scope/emb': rows whose strings are not known.*split"):
        again.export()
    again.upsert(["b"], [[5.0, 6.0]])  # and is known again
    assert sorted(again.export()[0].numpy()) == [b"", b"a", b"b"]


@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
def test_a_checkpoint_of_many_tables_is_opened_once(tmp_path, monkeypatch, eager):
    """Not once for each variable, each time all of its tables."""
    names = [f"of_many_{i}" for i in range(4)]
    tables = [from_arrays(name, {"keys": KEYS, "values": ROWS + i}) for i, name in enumerate(names)]
    kvtools.write_tables(tables, tmp_path / "m", "tfra")
    opened = []
    original = detect.open_checkpoint
    monkeypatch.setattr(detect, "open_checkpoint", lambda *args: opened.append(args) or original(*args))
    with contextlib.nullcontext() if eager else tf.Graph().as_default():
        variables = [de.Variable(dim=2, name=name) for name in names]
        if eager:
            tf.train.Checkpoint(v=variables).restore(str(tmp_path / "m")).assert_consumed()
            exported = [variable.export() for variable in variables]
        else:
            with v1.Session() as session:
                v1.train.Saver(variables).restore(session, str(tmp_path / "m"))
                exported = session.run([variable.export() for variable in variables])
    for i, found in enumerate(exported):
        assert by_key(found) == by_key((KEYS, ROWS + i))
    assert len([path for path, *_ in opened if str(path) == str(tmp_path / "m")]) == 1


def test_files_of_tfra_s_filesystem_saver_restore():
    path = str(TFRA / "filesystem" / "ckpt")
    read = kvtools.open(path).table("fs_emb")
    stored = {}
    for chunk in read.chunks():
        stored.update(by_key((chunk.keys, chunk.values)))
    with tf.Graph().as_default(), v1.Session() as session:
        v = de.Variable(dim=8, name="fs_emb", devices=["/CPU:0"] * 3)
        v1.train.Saver([v]).restore(session, path)
        assert by_key(session.run(v.export())) == stored and len(stored) > 10


def test_restoring_says_what_does_not_fit():
    path = str(TFRA / "v1_adam" / "model.ckpt-20")
    for kwargs, message in (
        ({"name": "tower/ad_emb", "dim": 4}, r"float32\[8\], the variable int64 keys and float32\[4\]"),
        ({"name": "tower/else", "dim": 8}, "has no table of it; it has tower/ad_emb"),
    ):
        with tf.Graph().as_default(), v1.Session() as session:
            v = de.Variable(**kwargs)
            with pytest.raises(Exception, match=message):
                v1.train.Saver([v]).restore(session, path)


# ---- SavedModel ----


@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
@pytest.mark.parametrize("devices", [1, 3])
def test_a_saved_model_reads_and_never_inserts(tmp_path, devices, partitioner):
    class Model(tf.Module):
        def __init__(self):
            super().__init__()
            self.v = de.Variable(dim=2, name=NAME, devices=["/CPU:0"] * devices, initializer=0.5, **partitioner)
            self.shadow = de.shadow_ops.ShadowVariable(self.v, name="s")

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def serve(self, ids):
            return de.embedding_lookup(self.v, ids, name="x") + de.shadow_ops.embedding_lookup(self.shadow, ids)

    model = Model()
    model.v.upsert(KEYS, ROWS)
    ids = tf.constant([7, 100, 5], tf.int64)
    expected = model.serve(ids).numpy()
    tf.saved_model.save(model, str(tmp_path / "model"), signatures=model.serve)
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    for _ in range(2):
        (got,) = loaded.signatures["serving_default"](ids).values()
        np.testing.assert_array_equal(got.numpy(), expected)
        np.testing.assert_array_equal(loaded.serve(ids).numpy(), expected)


@pytest.mark.parametrize("make_optimizer", [tf_keras.optimizers.legacy.Adagrad, tf_keras.optimizers.legacy.Adam])
def test_a_checkpoint_of_shadow_variables_under_a_legacy_optimizer(tmp_path, make_optimizer):
    def made():
        model = tf.Module()
        model.table = de.Variable(dim=2, name=NAME, devices=["/CPU:0"] * 2)
        model.shadow = de.shadow_ops.ShadowVariable(model.table, name="rows")
        optimizer = de.DynamicEmbeddingOptimizer(make_optimizer(0.1))
        return model, optimizer, tf.train.Checkpoint(model=model, optimizer=optimizer)

    def step(model, optimizer):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.shadow_ops.embedding_lookup(model.shadow, tf.constant(KEYS[:4])) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, model.shadow), model.shadow)])
        return by_key(model.table.export()), slots_of(lambda x: x, model.table, optimizer)

    model, optimizer, checkpoint = made()
    model.table.upsert(KEYS, ROWS)
    saved = step(model, optimizer)
    path = checkpoint.save(str(tmp_path / "c"))
    later = step(model, optimizer)
    checkpoint.restore(path).assert_consumed()
    assert (by_key(model.table.export()), slots_of(lambda x: x, model.table, optimizer)) == saved
    model, optimizer, checkpoint = made()
    checkpoint.restore(path)
    assert step(model, optimizer) == later


@pytest.mark.parametrize("files", [False, True], ids=["in_checkpoint", "to_files"])
@pytest.mark.parametrize("partitioner", PARTITIONERS.values(), ids=PARTITIONERS)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 2)])
def test_a_checkpoint_is_restored_in_a_graph(tmp_path, before, after, partitioner, files):
    def made(devices):
        return de.Variable(
            dim=2,
            name=NAME,
            devices=["/CPU:0"] * devices,
            restrict_policy=de.FrequencyRestrictPolicy,
            kv_creator=de.CuckooHashTableCreator(saver=de.FileSystemSaver()) if files else None,
            **partitioner,
        )

    table = made(before)
    table.upsert(KEYS, ROWS)
    table.restrict_policy.apply_update(tf.constant(KEYS[:3]))
    path = tf.train.Checkpoint(v=table).save(str(tmp_path / "c"))
    expected = by_key(table.restrict_policy.status.export())
    with tf.Graph().as_default(), v1.Session() as session:
        again = made(after)
        tf.train.Checkpoint(v=again).restore(path).run_restore_ops(session)
        assert by_key(session.run(again.export())) == EXPECTED
        assert by_key(session.run(again.restrict_policy.status.export())) == expected


class _SavedByTfra(tf.train.Checkpoint):
    """An optimizer of tf_keras as TFRA saves it: its lists have slots of a table before those of a dense variable."""

    def __init__(self, slots, table, dense):
        super().__init__()
        self._variables = [tf.Variable(7, dtype=tf.int64, name="iteration")]
        self._learning_rate = tf.Variable(0.0, name="learning_rate")
        for number, slot in enumerate(slots):
            rows = tf.Variable(tf.zeros([0, 2]), name=f"Adam/{table}/{slot}")
            kept = tf.Variable(tf.fill([3], number + 1.0), name=f"Adam/{slot}/{dense}")
            setattr(self, f"_of_{slot}", [rows, kept])
            of_table = tf.train.Checkpoint()
            of_table._track_trackable(tf.train.Checkpoint(), f"tables_of_{table}/{slot}")
            self._track_trackable(of_table, f"{table}/{slot}")
        for i in range(2):
            self._variables += [getattr(self, f"_of_{slot}")[i] for slot in slots]


@pytest.mark.parametrize("built", [False, True], ids=["before the first step", "after it"])
def test_slots_of_dense_variables_are_found_beside_those_of_tables_in_a_checkpoint_of_tfra(name, tmp_path, built):
    saved = _SavedByTfra(["m", "v"], f"{name}/look", "dense")
    path = tf.train.Checkpoint(optimizer=saved).save(str(tmp_path / "theirs"))
    v, dense = de.Variable(dim=2, name=name), tf.Variable(tf.zeros([3]), name="dense")
    optimizer = de.DynamicEmbeddingOptimizer(tf_keras.optimizers.Adam(0.0))

    def step():
        ids = tf.constant([1], tf.int64)
        loss = lambda: tf.reduce_sum(de.embedding_lookup(v, ids, name="look")) + tf.reduce_sum(dense)  # noqa: E731
        optimizer.minimize(loss, var_list=[v.get_trainable_by_name("look"), dense])

    if built:
        step()
    tf.train.Checkpoint(optimizer=optimizer).restore(path).assert_existing_objects_matched()
    step()
    assert int(optimizer.iterations) == 8
    m, square = (np.asarray(variable) for variable in optimizer.variables[-2:])
    np.testing.assert_allclose(m, [0.9 * 1 + 0.1] * 3, rtol=1e-6)
    np.testing.assert_allclose(square, [0.999 * 2 + 0.001] * 3, rtol=1e-6)
