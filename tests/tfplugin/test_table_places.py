"""Tables at other places of a `tf.train.Checkpoint` than they were saved at: no rows of another table in silence."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
import tfplugin.keras

keras = tf.keras


def tables(names: str, parts: int = 1) -> list[tf.Variable]:
    partitioner = tf.compat.v1.fixed_size_partitioner(parts) if parts > 1 else None
    return [tf.get_kv_variable(name, 2, partitioner=partitioner) for name in names]


def filled(names: str, parts: int = 1) -> list[tf.Variable]:
    made = tables(names, parts)
    for number, table in enumerate(made):
        table.upsert([number], tf.ones([1, 2]))
    return made


def keys(table: tf.Variable) -> list[int]:
    return sorted(table.export()[0].numpy().tolist())


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("now", ["ba", "b", "cab"])
def test_a_chain_gives_no_table_the_rows_of_another(now, parts, tmp_path):
    manager = tfplugin.CheckpointManager(tf.train.Checkpoint(all=filled("ab", parts)), tmp_path / "run")
    manager.save()
    manager.close()
    made = tables(now)
    manager = tfplugin.CheckpointManager(tf.train.Checkpoint(all=made), tmp_path / "run")
    with pytest.raises(
        ValueError, match=r"table '\w' is at 'all/\d', where the checkpoint has table '\w'.*by their names"
    ):
        manager.restore_or_initialize()
    assert [keys(table) for table in made] == [[]] * len(now)
    known = [table for table in made if not table.name.startswith("c")]
    tfplugin.restore_tables(tmp_path / "run", known)
    assert {table.name: keys(table) for table in known} == {table.name: ["ab".index(table.name[0])] for table in known}


def test_a_chain_does_not_leave_a_table_empty_whose_rows_it_has_elsewhere(tmp_path):
    """As those of a collection of a functional model, before which another input came."""
    manager = tfplugin.CheckpointManager(tf.train.Checkpoint(all=[*filled("a"), tf.Variable(1.0)]), tmp_path / "run")
    manager.save()
    manager.close()
    made = tables("a")
    manager = tfplugin.CheckpointManager(tf.train.Checkpoint(all=[tf.Variable(0.0), *made]), tmp_path / "run")
    with pytest.raises(ValueError, match=r"'a' is at 'all/1', where the checkpoint has none, and .* 'a' at 'all/0'"):
        manager.restore_or_initialize()
    again = tables("aa")
    manager = tfplugin.CheckpointManager(tf.train.Checkpoint(all=again[:1], more=again[1:]), tmp_path / "run")
    manager.restore_or_initialize()
    assert [keys(table) for table in again] == [[0], []]


@pytest.mark.parametrize("by_name", [False, True])
def test_a_chain_tells_of_weights_that_a_new_layer_has_moved(by_name, tmp_path, caplog):
    def made(features):
        ids = {name: keras.Input((), dtype="int64", name=name) for name in features}
        rows = [tfplugin.keras.Embedding(2, name=f"{name}s")(ids[name]) for name in features]
        score = keras.layers.Dense(1, name="score")(keras.layers.Add(name="sum")([*rows, *rows[:1]]))
        model = keras.Model(ids, score)
        held = {f"{name}s": model.get_layer(f"{name}s").table for name in features}
        layers = {"layers": {layer.name: layer for layer in model.layers}} if by_name else {}
        return model, tf.train.Checkpoint(model=model, tables=held, **layers)

    model, checkpoint = made(["item", "user"])
    model.get_layer("score").set_weights([np.float32([[1], [2]]), np.float32([3])])
    with contextlib.closing(tfplugin.CheckpointManager(checkpoint, tmp_path / "run")) as manager:
        manager.save()
    model, checkpoint = made(["item", "user"])
    tfplugin.CheckpointManager(checkpoint, tmp_path / "run").restore_or_initialize()
    assert model.get_layer("score").get_weights()[1] == 3 and not caplog.text
    model, checkpoint = made(["campaign", "item", "user"])
    tfplugin.CheckpointManager(checkpoint, tmp_path / "run").restore_or_initialize()
    assert (model.get_layer("score").get_weights()[1] == 3) == by_name
    told = "has no values for the variables score/kernel, score/bias, which stay as they are" in caplog.text
    assert told != by_name


@pytest.mark.parametrize("now", ["ab", "cd", "bc"])
def test_tables_at_their_places_and_those_of_new_names_are_restored(now, tmp_path, caplog):
    path = tf.train.Checkpoint(all=filled("ab" if now != "bc" else "ax")).save(str(tmp_path / "ckpt"))
    made = tables(now)
    tf.train.Checkpoint(all=made).restore(path).assert_existing_objects_matched()
    assert [keys(table) for table in made] == [[0], [1]] and not caplog.text


def test_a_plain_restore_tells_of_it(tmp_path, caplog):
    path = tf.train.Checkpoint(all=filled("ab")).save(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(all=tables("ba")).restore(path)
    assert "table 'b' is at 'all/0', where the checkpoint has table 'a', and it has 'b' at 'all/1'" in caplog.text


def test_layers_without_names_are_known_by_their_places(tmp_path, caplog):
    path = tf.train.Checkpoint(all=[tf.get_kv_variable(f"embedding{n}", 2) for n in ("", "_1")]).save(
        str(tmp_path / "c")
    )
    tf.train.Checkpoint(all=[tf.get_kv_variable(f"embedding_{n}", 2) for n in (1, 2)]).restore(path)
    assert not caplog.text


def test_tables_that_a_checkpoint_holds_by_name_stay_with_their_layers(tmp_path):
    def made(names):
        ids = keras.Input((2,), dtype="int64")
        layers = {name: tfplugin.keras.Embedding(2, combiner="sum", name=name) for name in names}
        rows = keras.layers.Add()([layer(ids) for layer in layers.values()])
        model = keras.Model(ids, keras.layers.Dense(1)(rows))
        model.compile("adam", "mse")
        held = {name: layer.table for name, layer in layers.items()}
        return model, held, tfplugin.CheckpointManager(tf.train.Checkpoint(model=model, tables=held), tmp_path / "run")

    model, held, manager = made(["a", "b"])
    model.train_on_batch(np.array([[1, 2]]), np.ones([1, 1]))
    held["b"].upsert([7], tf.ones([1, 2]))
    manager.save()
    manager.close()
    model, held, manager = made(["c", "b", "a"])
    manager.restore_or_initialize()
    assert {name: keys(table) for name, table in held.items()} == {"a": [1, 2], "b": [1, 2, 7], "c": []}
    model.train_on_batch(np.array([[1, 3]]), np.ones([1, 1]))
    manager.save()
    assert {name: keys(table) for name, table in held.items()} == {"a": [1, 2, 3], "b": [1, 2, 3, 7], "c": [1, 3]}
