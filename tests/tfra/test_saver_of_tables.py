"""A ``tf.compat.v1.train.Saver`` of tables and slot tables, as programs for TFRA give them to it."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from trained_graph import KEYS, ROWS, Graph, by_key

from tfplugin import dynamic_embedding as de

v1 = tf.compat.v1


def tables_of(graph, what):
    slots = [table for slot in graph.table.get_slot_variables(graph.optimizer) for table in slot.tables]
    return {
        "tables": graph.table.tables,
        "slots": slots,
        "both": [*slots, *graph.table.tables],
        "all": v1.global_variables() + graph.table.tables,
    }[what]


def tensors(path):
    return {name: shape for name, shape in tf.train.list_variables(path)}


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("what", ["tables", "both", "all"])
def test_tables_are_saved_under_the_names_of_tfra_and_restored(tmp_path, devices, what):
    with tf.Graph().as_default():
        graph = Graph(devices)
        saver = v1.train.Saver(tables_of(graph, what))
        graph.session.run(graph.table.upsert(KEYS, ROWS))
        for _ in range(2):
            graph.session.run(graph.step)
        path = saver.save(graph.session, str(tmp_path / "m"))
        rows, slots, *_ = graph.state()
        saved = tensors(path)
        for i in range(devices):
            base = f"scope_emb_mht_{i + 1}of{devices}"
            (count,) = saved[f"{base}-keys"]
            assert saved[f"{base}-values"] == [count, 2]
            assert (f"scope_emb_Adam_m_mht_{i + 1}of{devices}-keys" in saved) == (what == "both")
        assert ("dense" in saved) == (what == "all")
        graph.session.run([graph.step, graph.table.upsert([99], [[1.0, 2.0]]), graph.table.remove(KEYS[5:])])
        saver.restore(graph.session, path)
        after, slots_after, *_ = graph.state()
        assert after == rows
        assert (slots_after == slots) == (what == "both")


def test_slots_alone_are_saved_and_restored(tmp_path):
    with tf.Graph().as_default():
        graph = Graph(2)
        saver = v1.train.Saver(tables_of(graph, "slots"))
        graph.session.run(graph.step)
        path = saver.save(graph.session, str(tmp_path / "m"))
        slots = graph.slots()
        graph.session.run(graph.step)
        rows = graph.state()[0]
        assert graph.slots() != slots
        saver.restore(graph.session, path)
        assert graph.slots() == slots and graph.state()[0] == rows


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("given", ["list", "dictionary", "list with the variable"])
def test_slot_variables_save_their_tables(tmp_path, devices, given):
    with tf.Graph().as_default():
        graph = Graph(devices)
        variables = graph.table.get_slot_variables(graph.optimizer)
        if given == "dictionary":
            saver = v1.train.Saver({f"slot{i}": slot for i, slot in enumerate(variables)})
        else:
            saver = v1.train.Saver([*variables, graph.table] if given == "list with the variable" else variables)
        graph.session.run(graph.step)
        path = saver.save(graph.session, str(tmp_path / "m"))
        assert (f"scope_emb_Adam_m_mht_1of{devices}-keys" in tensors(path)) == (given != "dictionary")
        slots = graph.slots()
        graph.session.run(graph.step)
        assert graph.slots() != slots
        saver.restore(graph.session, path)
        assert graph.slots() == slots


@pytest.mark.parametrize(("before", "after"), [(1, 1), (3, 2)])
def test_tables_are_restored_from_a_saver_of_the_variable_and_the_other_way_round(tmp_path, before, after):
    with tf.Graph().as_default():
        graph = Graph(before)
        graph.session.run(graph.table.upsert(KEYS, ROWS))
        graph.session.run(graph.step)
        rows, slots, *_ = graph.state()
        variable = v1.train.Saver([graph.table]).save(graph.session, str(tmp_path / "variable"))
        tables = v1.train.Saver(tables_of(graph, "both")).save(graph.session, str(tmp_path / "tables"))
    for path, given in ((variable, lambda g: tables_of(g, "both")), (tables, lambda g: [g.table])):
        with tf.Graph().as_default():
            graph = Graph(after)
            v1.train.Saver(given(graph)).restore(graph.session, path)
            assert graph.state()[:2] == (rows, slots)


@pytest.mark.parametrize("key_dtype", [tf.int64, tf.string], ids=lambda d: d.name)
@pytest.mark.parametrize("value_dtype", [tf.int32, tf.string], ids=lambda d: d.name)
def test_strings_and_integers_are_saved(session, tmp_path, name, key_dtype, value_dtype):
    if (key_dtype, value_dtype) == (tf.string, tf.string):
        pytest.skip("there are none")
    keys = np.array([1, 2, 3]).astype(bytes if key_dtype == tf.string else np.int64)
    values = np.array([[4, 5], [6, 7], [8, 9]]).astype(bytes if value_dtype == tf.string else np.int32)
    v = de.Variable(key_dtype, value_dtype, dim=2, name=name)
    saver = v1.train.Saver(v.tables)
    session.run(v.upsert(keys, values))
    path = saver.save(session, str(tmp_path / "m"))
    session.run(v.upsert(keys[:1], values[1:2]))
    session.run(v.remove(keys[1:]))
    saver.restore(session, path)
    assert by_value(session.run(v.export())) == by_value((keys, values))


def by_value(exported):
    keys, rows = exported
    return dict(zip(np.asarray(keys).tolist(), np.asarray(rows).tolist(), strict=True))


def test_tables_that_go_to_files_do_so_in_a_saver_of_tables(session, tmp_path, name):
    v = de.Variable(dim=2, name=name, kv_creator=de.CuckooHashTableCreator(saver=de.FileSystemSaver()))
    saver = v1.train.Saver(v.tables)
    session.run(v.upsert(KEYS, ROWS))
    path = saver.save(session, str(tmp_path / "m"))
    assert (tmp_path / "TFRADynamicEmbedding" / f"{name}_mht_1of1_rank0_size1-keys").exists()
    session.run(v.clear())
    saver.restore(session, path)
    assert by_key(session.run(v.export())) == by_key((KEYS, ROWS))


@pytest.mark.parametrize("with_variable", [False, True])
def test_slot_variables_of_tables_that_go_to_files_do_so(tmp_path, with_variable):
    with tf.Graph().as_default():
        graph = Graph(2, kv_creator=de.CuckooHashTableCreator(saver=de.FileSystemSaver()))
        slots = graph.table.get_slot_variables(graph.optimizer)
        saver = v1.train.Saver([*slots, graph.table] if with_variable else slots)
        graph.session.run(graph.step)
        path = saver.save(graph.session, str(tmp_path / "m"))
        before = graph.slots()
        graph.session.run(graph.step)
        saver.restore(graph.session, path)
        assert graph.slots() == before


def test_a_checkpoint_without_the_table_is_told(session, tmp_path, name):
    w = v1.get_variable("w", [1], use_resource=True)
    session.run(w.initializer)
    path = v1.train.Saver([w]).save(session, str(tmp_path / "m"))
    v = de.Variable(dim=2, name=name)
    with pytest.raises(tf.errors.OpError, match=f"variable '{name}'.*has no rows of it"):
        v1.train.Saver(v.tables).restore(session, path)


def test_a_table_in_a_checkpoint_of_objects_is_restored(tmp_path, name):
    v = de.Variable(dim=2, name=name, devices=["/CPU:0"] * 2)
    v.upsert(KEYS, ROWS)
    path = tf.train.Checkpoint(a=v.tables[0], b=v.tables[1]).save(str(tmp_path / "c"))
    v.clear()
    v.upsert([99], [[1.0, 2.0]])
    tf.train.Checkpoint(a=v.tables[0], b=v.tables[1]).restore(path).assert_existing_objects_matched()
    assert by_key(v.export()) == by_key((KEYS, ROWS))
