"""`tfplugin.restore_tables`: some tables of a checkpoint, the rest untouched."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
import tfplugin.keras
from kvtools.chain import ChainError
from kvtools.errors import BadInputError

v1 = tf.compat.v1
KEYS = np.arange(40)


def _made(parts=None):
    partitioner = parts and v1.fixed_size_partitioner(parts)
    return {name: tf.get_kv_variable(name, 4, partitioner=partitioner) for name in ("user", "item")}


def _trained(tables):
    optimizer = tfplugin.optimizers.Adam(0.1)
    for number, table in enumerate(tables.values()):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.nn.embedding_lookup(table, KEYS) - number) ** 2)
        parts = list(table._kv_parts)
        optimizer.apply_gradients(zip(tape.gradient(loss, parts), parts, strict=True))
    return optimizer


@pytest.fixture(params=[1, 3])
def path(request, tmp_path):
    """An object-based checkpoint of two trained tables in some parts, and a dense variable."""
    tables = _made(None if request.param == 1 else request.param)
    _trained(tables)
    holder = tf.Module()
    holder.tables, holder.dense = tables, tf.Variable(7.0)
    return tf.train.Checkpoint(model=holder).save(str(tmp_path / "c"))


@pytest.mark.parametrize("name", [None, "user", "model/tables/user"])
def test_only_the_named_table_is_restored_with_its_slots(path, rows_of, name):
    source = _made()
    tf.train.Checkpoint(model=tf.train.Checkpoint(tables=source)).restore(path).expect_partial()
    tables = _made(2)
    tables["user"].upsert([999], np.ones([1, 4], np.float32))
    tables["item"].upsert([999], np.ones([1, 4], np.float32))
    found = tfplugin.restore_tables(path, tables["user"] if name is None else {tables["user"]: name})
    assert found == {"user": 40}
    assert not tables["user"].contains([999]).numpy().any()  # in place of what it held
    assert int(tables["item"].size()) == 1 and tables["item"].contains([999]).numpy().all()
    np.testing.assert_array_equal(rows_of(tables["user"], KEYS), rows_of(source["user"], KEYS))
    (slot, _) = sorted(source["user"].slot_names())
    np.testing.assert_array_equal(rows_of(tables["user"], KEYS, slot), rows_of(source["user"], KEYS, slot))


def test_by_name_from_one_table_into_another(path, rows_of):
    tables = _made()
    assert tfplugin.restore_tables(path, [tables["item"]], {"item": "user"}) == {"item": 40}
    same = _made()
    tfplugin.restore_tables(path, same)
    np.testing.assert_array_equal(rows_of(tables["item"], KEYS), rows_of(same["user"], KEYS))


def test_training_goes_on_exactly_where_it_was(tmp_path, rows_of):
    tables = _made()
    optimizer = _trained(tables)
    path = tf.train.Checkpoint(tables=tables).save(str(tmp_path / "c"))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(tables["user"], KEYS) ** 2)
        optimizer.apply_gradients([(tape.gradient(loss, tables["user"]), tables["user"])])

    before = rows_of(tables["user"], KEYS, "Adam.v"), rows_of(tables["user"], KEYS, "Adam.m")
    step()
    tfplugin.restore_tables(path, tables["user"])
    for slot, expected in zip(("Adam.v", "Adam.m"), before, strict=True):
        np.testing.assert_array_equal(rows_of(tables["user"], KEYS, slot), expected)
    step()
    assert tables["user"].slot_names() == {"Adam.m", "Adam.v"}
    assert (rows_of(tables["user"], KEYS, "Adam.v") > 0).any()


@pytest.mark.parametrize("parts", [None, 3])
def test_checkpoints_of_a_saver_in_a_graph(tmp_path, parts):
    with tf.Graph().as_default(), v1.Session() as session:
        tables = _made(parts)
        rows = {name: tf.nn.embedding_lookup(table, KEYS) for name, table in tables.items()}
        session.run(v1.global_variables_initializer())
        session.run(rows)
        path = v1.train.Saver().save(session, str(tmp_path / "c"))
        expected = session.run(rows["user"])
    with tf.Graph().as_default(), v1.Session() as session:
        tables = _made()
        restore = tfplugin.restore_tables(path, tables["user"])
        session.run(v1.global_variables_initializer())
        session.run(restore)
        with tfplugin.inference_mode():
            found = session.run(tf.nn.embedding_lookup(tables["user"], KEYS))
        np.testing.assert_array_equal(found, expected)
        assert session.run(tables["item"].size()) == 0


def test_a_table_that_is_not_there_is_told_with_those_that_are_like_it(path):
    table = tf.get_kv_variable("users", 4)
    with pytest.raises(ValueError, match=r"no table 'users'; the nearest: 'user'.*There are \[.*'item'"):
        tfplugin.restore_tables(path, table)
    with pytest.raises(ValueError, match="no key-value variable 'usr'; the nearest: 'users'"):
        tfplugin.restore_tables(path, table, {"usr": "user"})
    with pytest.raises(ValueError, match="has no key-value variable"):
        tfplugin.restore_tables(path, tf.Module())
    assert int(table.size()) == 0


def test_of_a_file_of_keras_it_says_how_to_get_at_the_checkpoint(tmp_path):
    ids = tf.keras.Input((), dtype="int64")
    model = tf.keras.Model(ids, tfplugin.keras.Embedding(4, name="user")(ids))
    model.save(tmp_path / "m.keras")
    with pytest.raises(BadInputError, match=r"m\.keras.* file of Keras.*unzip .*kv_tables/tables"):
        tfplugin.restore_tables(tmp_path / "m.keras", model)


def test_rows_of_another_width_are_an_error_and_change_nothing(path):
    table = tf.get_kv_variable("user", 5)
    table.upsert([1], np.ones([1, 5], np.float32))
    with pytest.raises(tf.errors.InvalidArgumentError, match="rows of dim 4, key-value variable 'user' has dim 5"):
        tfplugin.restore_tables(path, table)
    assert int(table.size()) == 1


@pytest.mark.parametrize("parts", [None, 3])
@pytest.mark.parametrize("graph", [False, True])
def test_of_the_folder_of_a_chain_the_increments_come_too(tmp_path, rows_of, parts, graph):
    tables = _made()
    optimizer = _trained(tables)
    trained = tables["user"]
    checkpoint = tf.train.Checkpoint(**tables, optimizer=optimizer)
    manager = tfplugin.CheckpointManager(checkpoint, tmp_path, delta_every=0.0, full_every=3600.0)
    manager.save()
    for n in range(2):
        trained.upsert([5, 100 + n], np.full([2, 4], n, np.float32))
        trained.remove([n])
        manager.save()
    expected = {int(key): row for key, row in zip(*map(np.asarray, trained.export()), strict=True)}
    assert len(expected) == 40
    for path in (tmp_path, tmp_path / "ckpt"):
        with tf.Graph().as_default() if graph else contextlib.nullcontext():
            table = _made(parts)["user"]
            restored = tfplugin.restore_tables(path, table)
            exported = table.export()
            if graph:
                with v1.Session() as session:
                    session.run(v1.global_variables_initializer())
                    session.run(restored)
                    exported = session.run(exported)
            else:
                assert restored == {"user": 40}
                np.testing.assert_array_equal(rows_of(table, KEYS[2:], "Adam.v"), rows_of(trained, KEYS[2:], "Adam.v"))
        found = {int(key): row for key, row in zip(*map(np.asarray, exported), strict=True)}
        assert found.keys() == expected.keys()
        assert all((found[key] == expected[key]).all() for key in found)


def test_a_chain_that_has_lost_a_member_is_an_error_and_changes_nothing(tmp_path):
    trained = tf.get_kv_variable("user", 4)
    manager = tfplugin.CheckpointManager(
        tf.train.Checkpoint(user=trained), tmp_path, delta_every=0.0, full_every=3600.0
    )
    for n in range(3):
        trained.upsert([n], np.ones([1, 4], np.float32))
        manager.save()
    (tmp_path / "ckpt-2.delta.index").unlink()
    table = tf.get_kv_variable("user", 4)
    with pytest.raises(ChainError, match="gap: increment 2 is missing"):
        tfplugin.restore_tables(tmp_path, table)
    assert int(table.size()) == 0
