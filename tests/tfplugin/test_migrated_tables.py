"""Tables that kvtools wrote, from whatever they were before, restore into variables that train on."""

import json
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import kvtools
import tfplugin  # noqa: F401  makes tf.get_kv_variable
from kvtools.merge import merge
from kvtools.split import By, split
from tfplugin.policies import ExpireAfterSeconds, ExpireAfterSteps

v1 = tf.compat.v1
DATA = Path(__file__).resolve().parents[1] / "data"
KEYS = np.array([-(2**63), -7, 0, 3, 5, 9, 2**40, 2**63 - 1])
ABSENT = np.array([11, 12, -1])


def table(name="emb", **more):
    rng = np.random.default_rng(1)
    values = rng.normal(size=(len(KEYS), 4)).astype(np.float32)
    return kvtools.table_from_arrays(name, KEYS, values, **more), values


def variable(parts=None, initializer=None):
    partitioner = v1.fixed_size_partitioner(parts) if parts else None
    return tf.get_kv_variable("emb", 4, initializer=initializer, partitioner=partitioner)


@pytest.mark.parametrize("parts", [None, 1, 3])
@pytest.mark.parametrize("written", [1, 4])
@pytest.mark.parametrize("initialized", [True, False])
def test_a_table_without_counters_or_initializer_keeps_the_variable_s_own(tmp_path, parts, written, initialized):
    source, values = table()
    kvtools.write_tables([source], tmp_path / "m", "tfplugin", parts=written)
    names = dict(tf.train.list_variables(str(tmp_path / "m")))
    assert not any(name.endswith(("-freqs", "-versions", "-init")) for name in names)
    with tf.Graph().as_default(), v1.Session() as session:
        emb = variable(parts, initializer=v1.constant_initializer(0.5))
        rows = tf.nn.embedding_lookup(emb, tf.constant(KEYS))
        new = tf.nn.embedding_lookup(emb, tf.constant(ABSENT))
        if initialized:
            session.run(v1.global_variables_initializer())
        v1.train.Saver().restore(session, str(tmp_path / "m"))
        assert session.run(rows).tobytes() == values.tobytes()
        assert (session.run(new) == 0.5).all()
        saved = v1.train.Saver().save(session, str(tmp_path / "again"))
    again = kvtools.open(saved).table("emb")
    initializer = again.schema.metadata["initializer"]
    assert (initializer["kind"], initializer["a"]) == ("constant", 0.5)
    freqs = {int(k): int(f) for chunk in again.chunks() for k, f in zip(chunk.keys, chunk.freqs, strict=True)}
    assert freqs.keys() == set(KEYS.tolist()) | set(ABSENT.tolist())


def test_a_variable_with_rows_to_draw_has_to_have_drawn_them(tmp_path):
    source, values = table()
    kvtools.write_tables([source], tmp_path / "m", "tfplugin")
    with tf.Graph().as_default(), v1.Session() as session:
        emb = variable(initializer=lambda shape, dtype: tf.random.uniform(shape, dtype=dtype))
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"has rows to draw.*run its initializer"):
            v1.train.Saver().restore(session, str(tmp_path / "m"))
        session.run(v1.global_variables_initializer())
        drawn = session.run(tf.nn.embedding_lookup(emb, tf.constant(ABSENT)))
        v1.train.Saver().restore(session, str(tmp_path / "m"))
        assert session.run(tf.nn.embedding_lookup(emb, tf.constant(KEYS))).tobytes() == values.tobytes()
        assert session.run(tf.nn.embedding_lookup(emb, tf.constant(ABSENT))).tobytes() == drawn.tobytes()


@pytest.mark.parametrize("unit", ["steps", "unknown"])
@pytest.mark.parametrize(
    "expiry", [None, ExpireAfterSeconds(90 * 86400), ExpireAfterSteps(1000)], ids=["none", "seconds", "steps"]
)
def test_versions_that_are_steps_are_no_seconds(tmp_path, expiry, unit):
    """Rows of an engine that stamps them with steps, or with nobody knows what, stay, and age from the restore on."""
    source, _ = table(versions=np.arange(8, dtype=np.uint32) + 984, version_unit=unit)
    kvtools.write_tables([source], tmp_path / "m", "tfplugin", parts=2)
    assert kvtools.open(tmp_path / "m").table("emb").schema.version_unit == "steps"
    before = int(time.time())
    with tf.Graph().as_default(), v1.Session() as session:
        emb = tf.get_kv_variable("emb", 4, expiry=expiry, partitioner=v1.fixed_size_partitioner(3))
        v1.train.Saver().restore(session, str(tmp_path / "m"))
        assert session.run(emb.contains(KEYS)).all()
        saved = v1.train.Saver().save(session, str(tmp_path / "again"))
    again = kvtools.open(saved).table("emb")
    versions = np.concatenate([chunk.versions for chunk in again.chunks()])
    if isinstance(expiry, ExpireAfterSteps):
        assert again.schema.version_unit == "steps"
        assert versions.tolist() == [0] * 8
    else:
        assert again.schema.version_unit == "seconds"
        assert before - 2 <= versions.min() <= versions.max() <= time.time() + 2


def test_counters_come_along(tmp_path):
    freqs, versions = np.arange(8) * 3, np.arange(8, dtype=np.uint32) + 1_700_000_000
    source, _ = table(freqs=freqs, versions=versions, version_unit="seconds")
    kvtools.write_tables([source], tmp_path / "m", "tfplugin", parts=2)
    with tf.Graph().as_default(), v1.Session() as session:
        variable(3)
        v1.train.Saver().restore(session, str(tmp_path / "m"))
        saved = v1.train.Saver().save(session, str(tmp_path / "again"))
    for chunk in kvtools.open(saved).table("emb").chunks():
        at = np.searchsorted(KEYS, chunk.keys)
        assert np.array_equal(chunk.freqs, freqs[at]) and np.array_equal(chunk.versions, versions[at])


def train(emb):
    placeholder = v1.placeholder(tf.int64, [None])
    loss = tf.reduce_sum(tf.nn.embedding_lookup(emb, placeholder) ** 2)
    return placeholder, v1.train.AdamOptimizer(0.1).minimize(loss)


@pytest.mark.parametrize("parts", [None, 2])
def test_slots_come_along_and_training_goes_on_from_them(tmp_path, parts):
    """Training, a move through arrays and another number of parts, and training give what training alone gives."""
    batches = [KEYS[[0, 1, 2]], KEYS[[2, 3]], KEYS[[1, 1, 6]], KEYS]

    def run(session, model, ids_of):
        for ids in ids_of:
            session.run(model[1], {model[0]: ids})

    with tf.Graph().as_default(), v1.Session() as session:
        emb = variable(parts)
        model = train(emb)
        session.run(v1.global_variables_initializer())
        run(session, model, batches)
        path = v1.train.Saver().save(session, str(tmp_path / "m"))
        run(session, model, batches)
        expected = session.run(tf.nn.embedding_lookup(emb, tf.constant(KEYS)))
    checkpoint = kvtools.open(path)
    kvtools.write_tables(
        checkpoint.select([]), tmp_path / "moved", "tfplugin", beside=checkpoint, parts=3, verify=True, strict=True
    )
    with tf.Graph().as_default(), v1.Session() as session:
        emb = variable(5)
        model = train(emb)
        v1.train.Saver().restore(session, str(tmp_path / "moved"))
        run(session, model, batches)
        got = session.run(tf.nn.embedding_lookup(emb, tf.constant(KEYS)))
    assert got.tobytes() == expected.tobytes()


def test_initial_rows_of_a_table_in_parts_come_along(tmp_path):
    with tf.Graph().as_default(), v1.Session() as session:
        emb = variable(2, initializer=lambda shape, dtype: tf.random.uniform(shape, dtype=dtype))
        session.run(v1.global_variables_initializer())
        before = session.run(tf.nn.embedding_lookup(emb, tf.constant(ABSENT)))
        path = v1.train.Saver().save(session, str(tmp_path / "m"))
    checkpoint = kvtools.open(path)
    kvtools.write_tables(checkpoint.select([]), tmp_path / "moved", "tfplugin", parts=3)
    with tf.Graph().as_default(), v1.Session() as session:
        emb = variable(4)
        v1.train.Saver().restore(session, str(tmp_path / "moved"))
        session.run([part.clear() for part in emb])
        assert session.run(tf.nn.embedding_lookup(emb, tf.constant(ABSENT))).tobytes() == before.tobytes()


def test_bfloat16_rows(tmp_path):
    values = np.arange(32).reshape(8, 4).astype(ml_dtypes.bfloat16)
    kvtools.write_tables([kvtools.table_from_arrays("emb", KEYS, values)], tmp_path / "m", "tfplugin")
    with tf.Graph().as_default(), v1.Session() as session:
        emb = tf.get_kv_variable("emb", 4, value_dtype=tf.bfloat16)
        v1.train.Saver().restore(session, str(tmp_path / "m"))
        assert session.run(tf.nn.embedding_lookup(emb, tf.constant(KEYS))).tobytes() == values.tobytes()


def test_a_record_without_an_initializer_is_what_the_page_says(tmp_path):
    source, _ = table()
    kvtools.write_tables([source], tmp_path / "m", "tfplugin")
    record = json.loads(tf.train.load_checkpoint(str(tmp_path / "m")).get_tensor("emb-kvmeta"))
    assert "initializer" not in record and record["layout"] == 1


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("tfra/v1_adam", "tower/ad_emb"),
        ("tfplus", "test/kv_embedding"),
        ("deeprec", "user_id_embedding"),
        ("sok", "emb_0"),
    ],
)
def test_tables_of_other_engines_restore_and_train_on(tmp_path, engine, name):
    source = kvtools.open(DATA / engine)
    kvtools.write_tables(source.select([]), tmp_path / "m", "tfplugin", beside=source, parts=2, verify=True)
    chunk = source.table(name).to_numpy()
    moved = kvtools.open(tmp_path / "m").table(name)
    assert sorted(moved.all_keys().tolist()) == sorted(chunk.keys.tolist())
    adam = {"Adam.m", "Adam.v"} <= set(moved.slots)
    with tf.Graph().as_default(), v1.Session() as session:
        emb = tf.get_kv_variable("emb", moved.dim, initializer=v1.constant_initializer(0.0))
        ids = v1.placeholder(tf.int64, [None])
        rows = tf.nn.embedding_lookup(emb, ids)
        step = v1.train.AdamOptimizer(0.1).minimize(tf.reduce_sum(rows**2))
        session.run(v1.global_variables_initializer())
        v1.train.Saver({name: emb}).restore(session, str(tmp_path / "m"))
        assert session.run(rows, {ids: chunk.keys}).tobytes() == chunk.values.tobytes()
        session.run(step, {ids: chunk.keys})
        after = session.run(rows, {ids: chunk.keys})
        saved = v1.train.Saver({name: emb}).save(session, str(tmp_path / "after"))
    assert np.isfinite(after).all() and not np.array_equal(after, chunk.values)
    if adam:
        # The step went on from the moments that the other engine left.
        again = kvtools.open(saved).table(name).to_numpy()
        order, before = np.argsort(again.keys), np.argsort(chunk.keys)
        gradient = 2 * chunk.values[before]
        expected = 0.9 * chunk.slots["Adam.m"][before] + 0.1 * gradient
        np.testing.assert_allclose(again.slots["Adam.m"][order], expected, rtol=1e-5, atol=1e-7)


def write_model(path, seed, keys, *, nested=False, **more):
    """Writes a checkpoint by objects: a table at `emb` (`tower/emb`) and a dense variable. Returns the table's rows."""
    rows = np.random.default_rng(seed).normal(size=(len(keys), 4)).astype(np.float32)
    emb = tf.get_kv_variable("emb", 4)
    emb.upsert(tf.constant(keys), tf.constant(rows))
    objects = {"tower": tf.train.Checkpoint(emb=emb)} if nested else {"emb": emb}
    tf.train.Checkpoint(**objects, dense=tf.Variable(float(seed)), **more).write(str(path))
    return dict(zip(keys.tolist(), rows, strict=True))


def assert_restores(path, expected, dense, *, nested=False):
    emb, there = tf.get_kv_variable("emb", 4, initializer=v1.constant_initializer(0.25)), tf.Variable(0.0)
    objects = {"tower": tf.train.Checkpoint(emb=emb)} if nested else {"emb": emb}
    status = tf.train.Checkpoint(**objects, dense=there).read(str(path))
    status.assert_existing_objects_matched()
    assert int(emb.size()) == len(expected)
    keys = np.array(list(expected))
    found = tf.nn.embedding_lookup(emb, tf.constant(keys)).numpy()
    assert found.tobytes() == np.stack(list(expected.values())).tobytes()
    assert float(there) == dense


@pytest.mark.parametrize("on_conflict", ["last", "first"])
@pytest.mark.parametrize("by_name", ["base", "delta", "neither"])
def test_a_merge_with_a_delta_restores_by_objects(tmp_path, by_name, on_conflict):
    """Whichever of the two has the object graph, all is there but dense weights that both have, as the account says."""
    sources = {}
    for seed, (role, keys) in enumerate({"base": KEYS[:6], "delta": KEYS[4:]}.items(), 1):
        sources[role] = write_model(tmp_path / role, seed, keys)
        if role == by_name:
            rows = np.stack(list(sources[role].values()))
            counts = np.ones(len(keys), np.uint32)
            counted = kvtools.table_from_arrays(
                "emb", keys, rows, freqs=counts, versions=counts, version_unit="seconds"
            )
            kvtools.write_tables([counted], tmp_path / f"{role}-by-name", "tfplugin")
    opened = [kvtools.open(tmp_path / (f"{role}-by-name" if role == by_name else role)) for role in sources]
    account, merged = merge(opened, tmp_path / "out", on_conflict=on_conflict)
    left_out, taken = ("base", "delta") if on_conflict == "last" else ("delta", "base")
    told = f"what '{tmp_path / left_out}' has of the dense variable 'dense/.ATTRIBUTES/VARIABLE_VALUE': that of"
    expected_losses = [f"{told} '{tmp_path / taken}' differs, and was taken"] * (by_name == "neither")
    assert list(account.losses) == expected_losses and merged[0].conflicts == 2
    assert account.lossless == (not expected_losses)
    first, last = sources.values()
    expected = {**first, **last} if on_conflict == "last" else {**last, **first}
    dense = {"base": 2.0, "delta": 1.0, "neither": 2.0 if on_conflict == "last" else 1.0}[by_name]
    assert_restores(tmp_path / "out", expected, dense)


def test_a_merge_of_objects_at_different_paths_restores_where_its_graph_says(tmp_path):
    base = write_model(tmp_path / "base", 1, KEYS[:6])
    delta = write_model(tmp_path / "delta", 2, KEYS[4:], nested=True)
    merge([kvtools.open(tmp_path / "base"), kvtools.open(tmp_path / "delta")], tmp_path / "out")
    assert_restores(tmp_path / "out", {**base, **delta}, 2.0, nested=True)


def test_a_table_without_a_path_beside_an_object_graph_is_told(tmp_path):
    write_model(tmp_path / "base", 1, KEYS[:6])
    kvtools.write_tables([table("user")[0]], tmp_path / "more", "tfplugin")
    account, _ = merge([kvtools.open(tmp_path / "base"), kvtools.open(tmp_path / "more")], tmp_path / "out")
    said = {one.name: [line for line in one.changes if "tf.train.Checkpoint" in line] for one in account.tables}
    assert [len(said[name]) for name in ("emb", "user")] == [0, 1]


def test_a_piece_of_a_checkpoint_by_objects_restores_by_objects(tmp_path):
    rows = write_model(tmp_path / "model", 1, KEYS)
    split(kvtools.open(tmp_path / "model"), tmp_path / "{}", By("mod", 2))
    for number in range(2):
        own = {key: row for key, row in rows.items() if key % 2 == number}
        emb = tf.get_kv_variable("emb", 4)
        tf.train.Checkpoint(emb=emb).read(str(tmp_path / f"mod-{number}-of-2")).assert_existing_objects_matched()
        assert int(emb.size()) == len(own)
        assert (
            tf.nn.embedding_lookup(emb, tf.constant(list(own))).numpy().tobytes() == np.stack([*own.values()]).tobytes()
        )


def test_initial_values_of_another_engine_are_those_of_new_rows(tmp_path):
    """What the account says of initial values is what new rows are: those of part 0, in all parts."""
    checkpoint = kvtools.open(DATA / "tfplus")
    account = kvtools.write_tables(checkpoint.select([]), tmp_path / "m", "tfplugin")
    assert "initial values of parts 1, 2: new rows of all parts start from those of one" in account.tables[0].losses
    initial = checkpoint.table("test/kv_embedding").extra("initial_values")
    known = set(checkpoint.table("test/kv_embedding").all_keys().tolist())
    new = np.array([key for key in range(10**9, 10**9 + 60) if key not in known])
    with tf.Graph().as_default(), v1.Session() as session, v1.variable_scope("test"):
        partitioner = v1.fixed_size_partitioner(3)
        emb = tf.get_kv_variable("kv_embedding", 8, partitioner=partitioner)
        v1.train.Saver().restore(session, str(tmp_path / "m"))
        rows = session.run(tf.nn.embedding_lookup(emb, tf.constant(new)))
    assert {row.tobytes() for row in rows} <= {row.tobytes() for row in initial}
    assert len({row.tobytes() for row in rows}) > 1
