"""Rows that go by policies: on demand, beside training, on save; by steps, seconds, norm, frequency and rank."""

import json
import time

import numpy as np
import pytest
import tensorflow as tf

import tfplugin
from tfplugin.ops import raw
from tfplugin.policies import (
    ExpireAfterSeconds,
    ExpireAfterSteps,
    ExpireBelowFrequency,
    ExpireBelowNorm,
    KeepTop,
)

v1 = tf.compat.v1


def fixed(parts):
    return None if parts is None else v1.fixed_size_partitioner(parts)


def keys_of(variable):
    return sorted(variable.export()[0].numpy().tolist())


def sgd():
    return tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))


def train(variable, optimizer, keys):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, keys))
    parts = list(variable._kv_parts)
    optimizer.apply_gradients(zip(tape.gradient(loss, parts), parts, strict=True))


def written_ago(variable, seconds):
    """Imports key s with a stamp of s seconds ago."""
    seconds = np.asarray(seconds)
    now = int(time.time())
    for p, part in enumerate(variable._kv_parts):
        own = seconds[seconds % len(variable._kv_parts) == p]
        raw.kv_table_import(
            part.handle,
            tf.constant(own, tf.int64),
            tf.ones([len(own), variable.dim]),
            tf.ones([len(own)], tf.uint32),
            tf.constant(now - own, tf.uint32),
        )


def test_a_row_that_n_steps_did_not_write_is_gone(make, partitioner):
    v = make(dim=2, initializer=0.5, partitioner=partitioner, expiry=ExpireAfterSteps(3))
    optimizer = sgd()
    train(v, optimizer, [1, 2, 3, 4])
    for _ in range(2):
        train(v, optimizer, [1])
    assert int(v.step()) == 3
    assert v.contains([1, 2]).numpy().tolist() == [True, True]
    np.testing.assert_array_equal(v.sparse_read([2], training=False), [[-0.5, -0.5]])
    train(v, optimizer, [1])
    assert v.contains([1, 2, 3]).numpy().tolist() == [True, False, False]
    np.testing.assert_array_equal(v.sparse_read([2], training=False), [[0.0, 0.0]])
    assert v.stamps([1, 2])[1].numpy().tolist() == [4, 0]
    np.testing.assert_array_equal(v.sparse_read([2]), [[0.5, 0.5]])  # a new row
    assert keys_of(v) == [1, 2]  # exports have no rows that lookups do not give
    assert int(v.size()) == 2 and int(v.expired_rows()) == 3


@pytest.fixture
def in_host_memory() -> None:
    """Asked when a test runs: to list the devices is to start them, and other tests set them up first."""
    if tf.config.list_logical_devices("GPU"):
        pytest.skip("tables on a GPU evict by score alone")


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("eviction", ["lru", "lfu", "custom"])
@pytest.mark.usefixtures("in_host_memory")
def test_expired_rows_make_room_before_rows_that_are_there(make, eviction, saves, tmp_path):
    v = make(dim=2, max_capacity=8, eviction=eviction, expiry=ExpireAfterSteps(4))
    optimizer = sgd()
    for _ in range(5):
        train(v, optimizer, [1, 2, 3, 4])
    if eviction == "custom":
        v.set_scores([1, 2, 3, 4], [9, 9, 9, 9])
    for key in range(10, 30):
        train(v, optimizer, [key])
        if saves:  # which lets expired rows go
            tf.train.Checkpoint(table=v).write(str(tmp_path / "saved"))
        assert v.contains(list(range(max(10, key - 3), key + 1))).numpy().all()
    train(v, optimizer, [40, 41, 42, 43])
    train(v, optimizer, [50, 51, 52, 53])
    assert keys_of(v) == [40, 41, 42, 43, 50, 51, 52, 53]
    assert int(v.evicted_rows()) + int(v.expired_rows()) == 24


@pytest.mark.usefixtures("in_host_memory")
def test_expired_rows_are_not_told_of_as_evicted(make):
    v = make(dim=1, max_capacity=4, initializer=0.5, expiry=ExpireAfterSteps(2))
    v.upsert([1, 2], [[1.0], [2.0]])
    for keys in [3, 4], [4], [4]:
        train(v, sgd(), keys)
    _, keys, rows = v.sparse_read_and_evict([5, 6, 7])
    assert int(v.size()) == 4 and (keys.shape, rows.shape) == ((0,), (0, 1))
    _, keys, rows = v.sparse_read_and_evict([8])
    assert keys.numpy().tolist() == [4] and rows.numpy().tolist() == [[-2.5]]


def test_a_row_is_trained_that_was_there_for_the_lookup_of_the_step(make):
    v = make(dim=1, initializer=0.0, expiry=ExpireAfterSteps(1))
    fused, generic = sgd(), tfplugin.OptimizerWrapper(Ours())
    for optimizer in (fused, generic, fused, generic):
        train(v, optimizer, [1])
    assert v.sparse_read([1], training=False).numpy().tolist() == [[-4.0]]
    assert int(v.step()) == 4


class Ours(tf.keras.optimizers.SGD):
    """Of a class that has no fused rule."""

    def __init__(self):
        super().__init__(1.0)


def test_the_step_is_set_and_does_not_go_back(make, partitioner):
    v = make(dim=1, partitioner=partitioner, expiry=ExpireAfterSteps(10))
    v.sparse_read([1, 2])
    assert int(v.set_step(9)) == 9
    assert v.contains([1, 2]).numpy().all()
    assert int(v.set_step(tf.constant(10))) == 10
    assert not v.contains([1, 2]).numpy().any()
    with pytest.raises(tf.errors.InvalidArgumentError, match="Step 4 is before step 10"):
        v.set_step(4)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a step is 0 or more"):
        v.set_step(-1)
    assert int(v.step()) == 10
    plain = make(name="plain")
    with pytest.raises(tf.errors.FailedPreconditionError, match="counts no steps"):
        plain.set_step(3)
    with pytest.raises(tf.errors.FailedPreconditionError, match="ExpireAfterSteps"):
        plain.step()


def test_rows_past_their_seconds_are_not_answered(make, partitioner):
    v = make(dim=2, partitioner=partitioner, expiry=[ExpireAfterSeconds(100)])
    written_ago(v, [0, 40, 90, 101, 300])
    assert v.contains([0, 40, 90, 101, 300]).numpy().tolist() == [True, True, True, False, False]
    left = int(v.size())  # on a CPU what has expired is there until it is collected
    assert int(v.evict(ExpireAfterSeconds(80))) == left - 2
    assert keys_of(v) == [0, 40]


def test_policies_on_demand(make, partitioner):
    v = make(dim=2, initializer=0.0, partitioner=partitioner)
    keys = np.arange(40)
    v.upsert(keys, np.repeat(keys[:, None], 2, 1).astype(np.float32))
    v.upsert(keys[:10], np.repeat(keys[:10, None], 2, 1).astype(np.float32))
    assert int(v.evict(ExpireBelowNorm(7.0))) == 5
    assert int(v.evict(ExpireBelowFrequency(2))) == 30
    assert keys_of(v) == [5, 6, 7, 8, 9]
    assert int(v.evict(KeepTop(2, by="norm"))) == 3
    assert keys_of(v) == [8, 9]
    assert int(v.evict(KeepTop(2))) == 0
    assert int(v.evict(ExpireAfterSeconds(1000))) == 0
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"'v.*in seconds, not in steps"):
        v.evict(ExpireAfterSteps(3))


@pytest.mark.parametrize("by", ["frequency", "version", "norm"])
def test_the_top_of_all_parts_together_stays(by):
    v = tfplugin.get_kv_variable("v", 1, partitioner=fixed(3))
    rng = np.random.default_rng(7)
    keys = rng.choice(10_000, 500, replace=False) * 3 + rng.integers(0, 2, 500)  # parts of unlike size
    stats = rng.integers(0, 6, (2, 500))
    for p, part in enumerate(v):
        own = keys % 3 == p
        raw.kv_table_import(
            part.handle,
            tf.constant(keys[own]),
            tf.constant(stats[0][own, None], tf.float32),
            tf.constant(stats[0][own], tf.uint32),
            tf.constant(stats[1][own], tf.uint32),
        )
    rank = {"frequency": (stats[0], stats[1]), "version": (stats[1], stats[0]), "norm": (stats[0],)}[by]
    top = np.lexsort((keys, *rank[::-1]))[-123:]
    evict = tf.function(lambda: v.evict(KeepTop(123, by=by)))
    assert int(evict()) == 500 - 123
    assert keys_of(v) == sorted(keys[top].tolist())
    assert int(evict()) == 0


def test_expiry_goes_on_beside_training_in_functions(make, partitioner):
    v = make(
        dim=1,
        partitioner=partitioner,
        expiry=[ExpireAfterSteps(5), ExpireBelowNorm(0.5)],
        expire_every=2,
        initializer=1.0,
    )
    optimizer = sgd()
    step = tf.function(lambda: train(v, optimizer, [1]))
    v.upsert([2, 3], [[9.0], [0.1]])
    last = time.monotonic() + 60
    while int(v.size()) > 1 and time.monotonic() < last:
        step()
    assert int(v.size()) == 1 and v.contains([1]).numpy().all()


def test_the_top_rows_are_left_beside_training_in_about_the_updates_that_were_said(make):
    v = make(dim=1, expiry=KeepTop(50), expire_every=5, initializer=1.0)
    optimizer = sgd()
    train(v, optimizer, [1])
    # Of the pause expiry may take its share: what is counted here are updates, not time. If another process has the
    # processor in the middle of a slice, that is taken off the next ones: then there has to be more time.
    for pause in (0.02, 0.2, 2.0):
        v.upsert(np.arange(2000), tf.ones([2000, 1]))
        updates = 0
        while int(v.size()) > 60 and updates <= 40:  # a round is under way when the rows come
            train(v, optimizer, [1])
            time.sleep(pause)
            updates += 1
        if updates <= 40:
            break
    assert updates <= 40
    assert v.contains([1]).numpy().all()


def test_expiry_goes_on_beside_training_in_sessions(session):
    v = tfplugin.get_kv_variable("v", 1, initializer=1.0, expiry=ExpireAfterSteps(2), expire_every=1)
    keys = v1.placeholder(tf.int64, [None])
    loss = tf.reduce_sum(tf.nn.embedding_lookup(v, keys))
    update = v1.train.AdagradOptimizer(0.1).minimize(loss)
    session.run(v1.global_variables_initializer())
    size = v.size()
    session.run(update, {keys: range(100)})
    last = time.monotonic() + 60
    while session.run(size) > 1 and time.monotonic() < last:
        session.run(update, {keys: [1]})
    assert session.run(size) == 1
    evict = v.evict(KeepTop(3))
    session.run(update, {keys: range(10)})
    assert session.run(evict) == 7


def test_expiry_goes_on_beside_keras_fit():
    if tf.config.list_logical_devices("GPU"):
        pytest.skip("the tests of Keras models say on which devices fit trains tables")

    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.table = tfplugin.get_kv_variable("v", 2, expiry=ExpireAfterSteps(3), expire_every=1)
            self.score = tf.keras.layers.Dense(1)

        def call(self, ids):
            return self.score(tf.nn.embedding_lookup(self.table, ids))

    model = Model()
    tfplugin.apply_in_backward(model.table, tfplugin.optimizers.SGD(0.1))
    model.compile("sgd", "mse")
    ids = np.repeat(np.arange(40), 8)
    model.fit(ids, np.ones(len(ids)), batch_size=8, shuffle=False, verbose=0)
    last = time.monotonic() + 60
    while int(model.table.size()) > 1 and time.monotonic() < last:
        model.fit(np.zeros(80, np.int64), np.ones(80), batch_size=8, verbose=0)
    assert keys_of(model.table) == [0]
    assert int(model.table.size()) == 1


@pytest.mark.parametrize("on_save", [False, True])
def test_what_is_saved_has_no_expired_rows_and_with_expire_on_save_none_that_a_policy_names(
    make, tmp_path, partitioner, on_save
):
    told = {"expiry": [ExpireAfterSeconds(100), ExpireBelowNorm(1.0)], "expire_on_save": on_save}
    v = make(dim=2, partitioner=partitioner, **told)
    written_ago(v, [1, 2, 150, 151])
    v.upsert([3, 4], np.full([2, 2], 0.1, np.float32))
    path = tf.train.Checkpoint(v=v).save(str(tmp_path / "c"))
    saved = np.concatenate(
        [tf.train.load_variable(path, name) for name, _ in tf.train.list_variables(path) if name.endswith("-keys")]
    )
    assert sorted(saved.tolist()) == ([1, 2] if on_save else [1, 2, 3, 4])
    other = make(dim=2, name="w", partitioner=partitioner, **told)
    tf.train.Checkpoint(v=other).restore(path).assert_consumed()
    assert keys_of(other) == sorted(saved.tolist())


def test_a_v1_saver_expires_on_save(session, tmp_path):
    v = tfplugin.get_kv_variable("v", 1, expiry=KeepTop(2, by="norm"), expire_on_save=True)
    fill = v.upsert([1, 2, 3], [[1.0], [2.0], [3.0]])
    saver = v1.train.Saver()
    session.run(v1.global_variables_initializer())
    session.run(fill)
    path = saver.save(session, str(tmp_path / "c"))
    assert sorted(tf.train.load_variable(path, "v-keys").tolist()) == [2, 3]
    assert session.run(v.size()) == 2


@pytest.mark.parametrize(("saved_parts", "parts"), [(None, None), (3, 2), (None, 2)])
def test_steps_survive_a_checkpoint_and_other_numbers_of_parts(tmp_path, saved_parts, parts):
    v = tfplugin.get_kv_variable("v", 1, partitioner=fixed(saved_parts), expiry=ExpireAfterSteps(5))
    optimizer = sgd()
    train(v, optimizer, [1, 2, 3])
    for _ in range(3):
        train(v, optimizer, [9])
    path = tf.train.Checkpoint(v=v).save(str(tmp_path / "c"))
    meta = [json.loads(tf.train.load_variable(path, n)) for n, _ in tf.train.list_variables(path) if "kvmeta" in n]
    assert all(m["policies"]["versions"] == "steps" and m["policies"]["step"] == 4 for m in meta)
    assert meta[0]["policies"]["expiry"] == [{"policy": "after_steps", "steps": 5}]
    w = tfplugin.get_kv_variable("w", 1, partitioner=fixed(parts), expiry=ExpireAfterSteps(5))
    tf.train.Checkpoint(v=w).restore(path).assert_consumed()
    assert int(w.step()) == 4
    assert w.stamps([1, 9])[1].numpy().tolist() == [1, 4]
    train(w, optimizer, [9])
    assert w.contains([1, 2, 3]).numpy().all()
    train(w, optimizer, [9])
    assert not w.contains([1, 2, 3]).numpy().any()


def test_stamps_of_the_other_unit_begin_anew(make, tmp_path):
    by_seconds, by_steps = make(dim=1, name="a"), make(dim=1, name="b", expiry=ExpireAfterSteps(5))
    written_ago(by_seconds, [50])
    by_steps.set_step(70)
    by_steps.upsert([50], [[1.0]])
    a = tf.train.Checkpoint(v=by_seconds).save(str(tmp_path / "a"))
    b = tf.train.Checkpoint(v=by_steps).save(str(tmp_path / "b"))
    now_by_steps = make(dim=1, name="c", expiry=ExpireAfterSteps(5))
    tf.train.Checkpoint(v=now_by_steps).restore(a)
    assert now_by_steps.stamps([50])[1].numpy().tolist() == [0]
    now_by_seconds = make(dim=1, name="d", expiry=ExpireAfterSeconds(40))
    tf.train.Checkpoint(v=now_by_seconds).restore(b)
    assert now_by_seconds.contains([50]).numpy().all()
    plain = make(dim=1, name="e")
    tf.train.Checkpoint(v=plain).restore(b)
    assert abs(int(plain.stamps([50])[1][0]) - time.time()) < 100
    with pytest.raises(tf.errors.FailedPreconditionError, match="stamps rows with steps"):
        by_steps.export_since(0.0)


def test_rows_of_lower_epochs_go_first(make, partitioner):
    v = make(dim=1, partitioner=partitioner, max_capacity=4, eviction="epoch_lru")
    v.sparse_read([0, 2])
    v.set_epoch(1)
    v.sparse_read([4, 6])
    v.set_epoch(tf.constant(2))
    v.sparse_read([8, 10])
    assert set(keys_of(v)) >= {8, 10}
    assert not {0, 2} & set(keys_of(v)) or partitioner is not None
    lru = make(name="lru", max_capacity=4)
    with pytest.raises(tf.errors.FailedPreconditionError, match="keeps LRU scores"):
        lru.set_epoch(1)
    assert v.export_since(0.0)[0].shape[0] == int(v.size())


def test_epochs_survive_a_checkpoint(make, tmp_path):
    v = make(dim=1, max_capacity=3, eviction="epoch_lfu")
    v.set_epoch(5)
    v.sparse_read([1])
    path = tf.train.Checkpoint(v=v).save(str(tmp_path / "c"))
    w = make(dim=1, name="w", max_capacity=3, eviction="epoch_lfu")
    tf.train.Checkpoint(v=w).restore(path)
    w.set_epoch(4)
    w.sparse_read([2, 3])
    w.sparse_read([4])
    assert 1 in keys_of(w)


def test_a_saved_model_gives_rows_as_they_were_saved(tmp_path, make):
    class Served(tf.Module):
        def __init__(self):
            super().__init__()
            self.table = make(dim=1, expiry=ExpireAfterSteps(2))

        @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
        def serve(self, ids):
            return {"rows": tf.nn.embedding_lookup(self.table, ids)}

    model = Served()
    train(model.table, sgd(), [1])
    tf.saved_model.save(model, str(tmp_path / "m"), signatures={"serving_default": model.serve})
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    assert loaded.table.policies == model.table.policies
    for _ in range(4):
        assert loaded.signatures["serving_default"](tf.constant([1], tf.int64))["rows"].numpy().any()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"expiry": [ExpireAfterSteps(3), ExpireAfterSeconds(3)]}, "contradict each other: a row has one stamp"),
        ({"expiry": [KeepTop(3), KeepTop(4, by="norm")]}, "contradict each other: give one of them"),
        ({"expiry": KeepTop(30), "max_capacity": 30}, "keeps no fewer rows than max_capacity=30"),
        ({"expire_every": 5}, "expire_every=5 says when rows go, and nothing says which"),
        ({"expire_on_save": True}, "expire_on_save=True says when rows go"),
        ({"expiry": KeepTop(3), "expire_every": -1}, "expire_every must be a number of updates.*got -1"),
    ],
)
def test_policies_that_contradict_each_other_are_refused(make, told, said):
    with pytest.raises(ValueError, match=f"'v'.*{said}"):
        make(**told)


def test_what_is_no_policy_is_refused(make):
    for policy, bad in (
        (ExpireAfterSteps, 0),
        (ExpireAfterSteps, -1),
        (ExpireAfterSeconds, 1.5),
        (ExpireAfterSeconds, 2**32),
        (ExpireBelowNorm, -0.1),
        (ExpireBelowNorm, float("nan")),
        (ExpireBelowFrequency, True),
        (KeepTop, 0),
    ):
        with pytest.raises(ValueError, match=f"{policy.__name__}.*got "):
            policy(bad)
    with pytest.raises(ValueError, match="by must be"):
        KeepTop(3, by="luck")
    with pytest.raises(TypeError, match=r"'v'.*expiry must be of"):
        make(expiry=3)
    with pytest.raises(TypeError, match="the policy must be one of"):
        make().evict("all")
    with tf.Graph().as_default(), v1.variable_scope("s", reuse=v1.AUTO_REUSE):
        partitioned = {"embedding_dim": 1, "partitioner": fixed(2), "expiry": KeepTop(5)}
        v = tfplugin.get_kv_variable("v", **partitioned)
        assert tfplugin.get_kv_variable("v", **partitioned) is v
        with pytest.raises(ValueError, match="specified policies"):
            tfplugin.get_kv_variable("v", embedding_dim=1, expiry=KeepTop(50))


def test_a_training_lookup_that_a_capacity_has_no_room_for_is_refused(make, partitioner):
    v = make(dim=1, partitioner=partitioner, max_capacity=12)
    v.sparse_read([7, 8])
    keys = tf.range(0, 300, 3, dtype=tf.int64)
    many = {
        "lookup": lambda: v.sparse_read(keys),
        "pooled": lambda: tfplugin.lookup_many([v], [tf.RaggedTensor.from_tensor(keys[None])], combiners="sum"),
    }
    for look_up in many.values():
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"(?s)'v.*different keys.*max_capacity of several"):
            look_up()
        assert keys_of(v) == [7, 8]
    v.sparse_read(tf.zeros([100], tf.int64))  # one key
    assert int(v.size()) == 3
    v.sparse_read(keys, training=False)
    if partitioner is None:
        assert v.sparse_read_and_evict(keys)[1].shape == [100 + 2 - 12]  # 0 was there


@pytest.mark.parametrize("policy", [ExpireAfterSteps(10), KeepTop(20_000, by="version")], ids=["age", "top"])
def test_a_table_does_not_grow_for_as_long_as_keys_come_and_go(make, policy):
    new, every, steps = 4096, 20, 300
    v = make(dim=1, expiry=policy, expire_every=every)
    optimizer = tfplugin.optimizers.SGD(0.1)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.nn.l2_loss(v.sparse_read(ids))
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])
        return v.size()

    sizes = [int(step(tf.range(new, dtype=tf.int64) + n * new)) for n in range(steps)]
    alive = 10 * new if isinstance(policy, ExpireAfterSteps) else 20_000
    # What is born in a round of `every` steps waits for the end of the next one, however little time there is for
    # more; by time alone it was a million.
    assert max(sizes) <= alive + 2.5 * every * new, max(sizes)
