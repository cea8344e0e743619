"""Bounded key-value variables: eviction, admission, and what checkpoints keep of them."""

import json
import time

import numpy as np
import pytest
import tensorflow as tf

import kvtools
import tfplugin
from kvtools.verify import verify

v1 = tf.compat.v1


def fixed(parts):
    return None if parts is None else v1.fixed_size_partitioner(parts)


def keys_of(variable):
    return sorted(variable.export()[0].numpy().tolist())


# ---- Lookups ----


def test_the_least_recently_used_rows_go(make):
    v = make(max_capacity=3, initializer=0.5)
    for key in (1, 2, 3):
        v.sparse_read([key])
    tf.nn.embedding_lookup(v, [1])
    v.upsert([4], tf.ones([1, 4]))
    assert keys_of(v) == [1, 3, 4]
    assert int(v.size()) == 3
    assert int(v.evicted_rows()) == 1


def test_the_least_frequently_used_rows_go(make):
    v = make(max_capacity=2, eviction="lfu")
    v.sparse_read([1, 1, 2])
    v.sparse_read([3])
    v.sparse_read([4])
    assert keys_of(v) == [1, 4]


def test_custom_scores_say_which_rows_go(make):
    v = make(max_capacity=3, eviction="custom")
    v.sparse_read([1, 2, 3])
    assert int(v.set_scores([1, 2, 9], [7, 5, 6])) == 2
    v.sparse_read([4])
    assert keys_of(v) == [1, 2, 4]
    v.set_scores([4], np.array([2**64 - 1], np.uint64))
    v.sparse_read([5])
    assert keys_of(v) == [1, 4, 5]


def test_evicted_rows_are_given_back_with_their_values(partitioner):
    v = tfplugin.get_kv_variable("v", 2, max_capacity=6, partitioner=partitioner)
    v.upsert(tf.range(6, dtype=tf.int64), tf.reshape(tf.range(12.0), [6, 2]))
    rows, keys, values = v.sparse_read_and_evict([[6, 7], [8, 9]])
    assert rows.shape == [2, 2, 2]
    assert len(keys) == int(v.evicted_rows()) == 4
    np.testing.assert_array_equal(values, [[2.0 * key, 2.0 * key + 1] for key in keys.numpy()])
    assert set(keys.numpy()) | set(keys_of(v)) == set(range(10))
    np.testing.assert_array_equal(rows, v.sparse_read([[6, 7], [8, 9]], training=False))


def test_a_variable_without_a_bound_evicts_nothing(make):
    v = make()
    _, keys, rows = v.sparse_read_and_evict(tf.range(1000, dtype=tf.int64))
    assert keys.shape == [0] and rows.shape == [0, 4]
    assert int(v.size()) == 1000


def test_inference_evicts_and_touches_nothing(make):
    v = make(max_capacity=2)
    v.sparse_read([1])
    v.sparse_read([2])
    with tfplugin.inference_mode():
        rows, keys, _ = v.sparse_read_and_evict([1, 5])
        v.sparse_read([1])
    assert keys.shape == [0]
    np.testing.assert_array_equal(rows[1], np.zeros(4))
    v.sparse_read([3])
    assert keys_of(v) == [2, 3]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_of_an_evicting_lookup_trains_its_rows(make, partitioner, compiled):
    v = make(dim=2, initializer=1.0, max_capacity=30, partitioner=partitioner)
    parts = [v] if isinstance(v, tfplugin.KvVariable) else list(v)
    optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(0.25))

    def step(ids):
        with tf.GradientTape() as tape:
            rows, keys, _ = v.sparse_read_and_evict(ids)
            loss = tf.reduce_sum(rows)
        optimizer.apply_gradients(zip(tape.gradient(loss, parts), parts, strict=True))
        return keys

    run = tf.function(step) if compiled else step
    assert run(tf.constant([5, 5, 6], tf.int64)).shape == [0]
    np.testing.assert_array_equal(v.sparse_read([5, 6]), [[0.5, 0.5], [0.75, 0.75]])
    for first in range(10, 100, 10):
        run(tf.range(first, first + 10, dtype=tf.int64))
        assert int(v.size()) <= 30
    assert not v.contains([5, 6]).numpy().any()


def test_an_update_of_a_row_that_has_gone_makes_it_anew(make):
    v = make(dim=1, initializer=1.0, max_capacity=1)
    optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(0.5))
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(v.sparse_read([1]))
    v.sparse_read([2])  # takes the row that the lookup remembers
    optimizer.apply_gradients([(tape.gradient(loss, v), v)])
    assert keys_of(v) == [1]
    np.testing.assert_array_equal(v.sparse_read([1]), [[0.5]])


def test_pooled_and_many_lookups_keep_the_rows_of_their_batch(make):
    v, w = make(max_capacity=9000, eviction="lfu", name="v"), make(max_capacity=9000, eviction="lfu", name="w")
    ids = tf.RaggedTensor.from_uniform_row_length(tf.range(9000, dtype=tf.int64), 3)
    for first in (0, 20_000, 40_000):  # each batch finds the table full
        tfplugin.lookup_many([v, w], [ids + first, ids + first], combiners="sum")
        assert keys_of(v) == keys_of(w) == list(range(first, first + 9000))
        tfplugin.lookup_many([v, w], [ids.flat_values + first + 10_000] * 2)
        assert keys_of(v) == keys_of(w) == list(range(first + 10_000, first + 19_000))


def test_graph_sessions(session):
    v = tfplugin.get_kv_variable("v", 2, max_capacity=4, initializer=1.0)
    ids = v1.placeholder(tf.int64, [None])
    rows, keys, values = v.sparse_read_and_evict(ids)
    (gradient,) = tf.gradients(tf.reduce_sum(rows), v)
    train = v1.train.GradientDescentOptimizer(0.5).minimize(tf.reduce_sum(v.sparse_read(ids)))
    size, count = v.size(), v.evicted_rows()
    session.run(v1.global_variables_initializer())
    session.run(rows, {ids: [1, 2, 3, 4]})
    out, gone, went = session.run([gradient.values, keys, values], {ids: [5, 6]})
    assert out.tolist() == [[1, 1], [1, 1]]
    assert gone.tolist() == [1, 2]
    assert went.tolist() == [[1, 1], [1, 1]]
    session.run(train, {ids: [3]})
    session.run(rows, {ids: [7]})
    assert session.run([size, count]) == [4, 3]
    assert session.run(v.contains([3, 4])).tolist() == [True, False]


def test_parts_share_the_capacity_rounded_up():
    v = tfplugin.get_kv_variable("v", 2, max_capacity=10, partitioner=fixed(3))
    assert [part.max_capacity for part in v] == [4, 4, 4]
    for first in range(0, 100, 10):
        v.sparse_read(tf.range(first, first + 10, dtype=tf.int64))
    assert [int(part.size()) for part in v] == [4, 4, 4]
    assert int(v.evicted_rows()) == 88


def test_custom_scores_reach_the_parts():
    v = tfplugin.get_kv_variable("v", 2, max_capacity=6, eviction="custom", partitioner=fixed(3))
    v.sparse_read(tf.range(6, dtype=tf.int64))
    assert int(v.set_scores(tf.range(7, dtype=tf.int64), tf.range(7))) == 6
    v.sparse_read([6])
    assert keys_of(v) == [1, 2, 3, 4, 5, 6]


def test_sharing_a_variable_with_another_bound_is_refused():
    with tf.Graph().as_default(), v1.variable_scope("", reuse=v1.AUTO_REUSE):
        v = tfplugin.get_kv_variable("v", 2, max_capacity=10, partitioner=fixed(3))
        assert tfplugin.get_kv_variable("v", 2) is v
        assert tfplugin.get_kv_variable("v", 2, max_capacity=10) is v
        with pytest.raises(ValueError, match="max_capacity 20"):
            tfplugin.get_kv_variable("v", 2, max_capacity=20)
        with pytest.raises(ValueError, match="lfu"):
            tfplugin.get_kv_variable("v", 2, max_capacity=10, eviction="lfu")


def test_bad_bounds_and_scores(make):
    for bad in (-1, True, 1.5):
        with pytest.raises(ValueError, match="max_capacity"):
            make(max_capacity=bad)
    with pytest.raises(ValueError, match="fifo"):
        make(max_capacity=1, eviction="fifo")
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"'v'.*LRU"):
        make(max_capacity=1).set_scores([1], [1])
    with pytest.raises(tf.errors.FailedPreconditionError, match=r"'v'.*not bounded"):
        make().set_scores([1], [1])
    custom = make(max_capacity=1, eviction="custom")
    with pytest.raises(tf.errors.InvalidArgumentError, match="0 or more, got -3"):
        custom.set_scores([1], [-3])
    with pytest.raises(tf.errors.InvalidArgumentError, match="a score for each key"):
        custom.set_scores([1], [1, 2])
    with pytest.raises(TypeError, match="integers"):
        custom.set_scores([1], [0.5])


# ---- Since a time ----


@pytest.mark.parametrize(
    ("eviction", "touched_by_lookup"), [("lru", True), ("lfu", True), ("custom", False), (None, False)]
)
def test_export_since_gives_what_was_touched(make, partitioner, eviction, touched_by_lookup):
    bound = {} if eviction is None else {"max_capacity": 100, "eviction": eviction}
    v = make(dim=2, initializer=1.0, partitioner=partitioner, **bound)
    v.sparse_read(tf.range(10, dtype=tf.int64))
    time.sleep(1.05 - time.time() % 1)  # well into another second, the finest that some of them know
    since = float(int(time.time()))
    v.sparse_read([1, 2])
    v.accumulate([3], tf.ones([1, 2]))
    v.sparse_read([4], training=False)
    keys, rows = v.export_since(since)
    expected = {1: 1.0, 2: 1.0, 3: 2.0} if touched_by_lookup else {3: 2.0}
    assert {int(k): r.tolist() for k, r in zip(keys, rows.numpy(), strict=True)} == {
        k: [x, x] for k, x in expected.items()
    }
    assert len(v.export_since(0.0)[0]) == 10
    assert v.export_since(since + 1000)[0].shape == [0]


def test_lru_export_since_is_exact_to_a_batch(make):
    v = make(max_capacity=1000)
    v.sparse_read(tf.range(50, dtype=tf.int64))
    since = time.time()
    time.sleep(0.001)
    v.sparse_read([5, 70])
    assert sorted(v.export_since(since)[0].numpy()) == [5, 70]
    assert sorted(v.export_since(tf.constant(since, tf.float64))[0].numpy()) == [5, 70]
    with pytest.raises(ValueError, match="seconds since 1970"):
        v.export_since(float("nan"))


# ---- Admission ----


@pytest.mark.parametrize("compiled", [False, True])
def test_keys_that_are_not_admitted_give_zeros_and_are_not_trained(make, partitioner, compiled):
    v = make(dim=2, initializer=1.0, partitioner=partitioner)
    parts = [v] if isinstance(v, tfplugin.KvVariable) else list(v)
    optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.SGD(0.5))

    def step(ids):
        with tf.GradientTape() as tape:
            rows = v.sparse_read(ids, admission=0.25)
            loss = tf.reduce_sum(rows)
        optimizer.apply_gradients(zip(tape.gradient(loss, parts), parts, strict=True))
        return rows

    run = tf.function(step) if compiled else step
    ids = tf.concat([tf.range(3000, dtype=tf.int64)] * 2, 0)
    rows = run(ids).numpy()
    admitted = rows[:3000, 0] == 1
    np.testing.assert_array_equal(rows[:3000], rows[3000:])
    assert (rows[:3000][~admitted] == 0).all()
    assert 0.2 < admitted.mean() < 0.3
    assert keys_of(v) == np.flatnonzero(admitted).tolist()
    np.testing.assert_array_equal(v.sparse_read(np.flatnonzero(admitted)), np.zeros([admitted.sum(), 2]))
    # A later lookup draws again.
    run(ids)
    assert int(v.size()) > 1.5 * admitted.sum()


def test_admission_of_one_and_zero_and_what_is_neither(make):
    v = make(initializer=1.0)
    assert float(tf.reduce_sum(v.sparse_read([1, 2], admission=0.0))) == 0
    assert float(tf.reduce_sum(v.sparse_read([1, 2], admission=1.0))) == 8
    for bad in (-0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match="admission"):
            v.sparse_read([1], admission=bad)


# ---- Checkpoints ----


def bounded(name, capacity, eviction, parts=None, dim=2):
    return tfplugin.get_kv_variable(
        name, dim, max_capacity=capacity, eviction=eviction, initializer=1.0, partitioner=fixed(parts)
    )


def fill(v):
    for first in range(0, 60, 5):
        v.sparse_read(tf.range(first, first + 15, dtype=tf.int64))
    if v.eviction == "custom":
        v.set_scores(tf.range(80, dtype=tf.int64), (tf.range(80) * 7) % 31)


@pytest.mark.parametrize("eviction", ["lru", "lfu", "custom"])
@pytest.mark.parametrize(("parts", "restored_parts"), [(None, None), (3, 3), (3, None), (2, 3)])
def test_a_checkpoint_carries_the_scores(tmp_path, eviction, parts, restored_parts):
    v = bounded("v", 60, eviction, parts)
    fill(v)
    path = tf.train.Checkpoint(v=v).save(str(tmp_path / "c"))
    columns = {name: shape for name, shape in tf.train.list_variables(path) if name.endswith("kv-scores")}
    assert parts is not None or columns == {"v/.ATTRIBUTES/kv-scores": [int(v.size())]}
    w = bounded("v", 60, eviction, restored_parts)
    tf.train.Checkpoint(v=w).restore(path).assert_consumed()
    assert keys_of(w) == keys_of(v)
    if parts == restored_parts and eviction == "custom":
        # Both evict the same from here on. (Rows of equal score go in the order in which they came, here from a file.)
        for first in range(500, 530, 6):
            ids = tf.range(first, first + 6, dtype=tf.int64)
            v.sparse_read(ids)
            w.sparse_read(ids)
        scores_left = [sorted((key * 7) % 31 for key in keys_of(one) if key < 80) for one in (v, w)]
        assert scores_left[0] == scores_left[1]


def saved_scores(path, prefix="v/.ATTRIBUTES/kv"):
    reader = tf.train.load_checkpoint(path)
    return dict(
        zip(reader.get_tensor(f"{prefix}-keys").tolist(), reader.get_tensor(f"{prefix}-scores").tolist(), strict=True)
    )


@pytest.mark.parametrize("eviction", ["lru", "lfu", "custom"])
def test_a_restore_into_a_smaller_capacity_keeps_the_highest_scores(tmp_path, eviction):
    v = bounded("v", 60, eviction)
    fill(v)
    path = tf.train.Checkpoint(v=v).save(str(tmp_path / "c"))
    scores = saved_scores(path)
    w = bounded("v", 17, eviction)
    tf.train.Checkpoint(v=w).restore(path)
    kept = keys_of(w)
    assert len(kept) == 17
    assert sorted(scores[key] for key in kept) == sorted(scores.values())[-17:]
    # Saved again, they are the same.
    again = saved_scores(tf.train.Checkpoint(v=w).save(str(tmp_path / "d")))
    assert again == {key: scores[key] for key in kept}


def test_kvmeta_records_the_policy_and_unbounded_tables_have_none(tmp_path):
    v, u = bounded("v", 60, "lfu"), tfplugin.get_kv_variable("u", 2)
    fill(v)
    u.sparse_read([1])
    path = tf.train.Checkpoint(v=v, u=u).save(str(tmp_path / "c"))
    reader = tf.train.load_checkpoint(path)
    meta = json.loads(reader.get_tensor("v/.ATTRIBUTES/kv-kvmeta"))
    assert meta["policies"] == {"max_capacity": 60, "eviction": "lfu"}
    assert "policies" not in json.loads(reader.get_tensor("u/.ATTRIBUTES/kv-kvmeta"))
    assert not reader.has_tensor("u/.ATTRIBUTES/kv-scores")


def test_a_checkpoint_without_scores_starts_from_versions_and_frequencies(tmp_path):
    u = tfplugin.get_kv_variable("v", 2, initializer=1.0)
    u.upsert([1, 1, 1, 2], tf.ones([4, 2]))
    u.upsert([3, 3], tf.ones([2, 2]))
    path = tf.train.Checkpoint(v=u).save(str(tmp_path / "c"))
    lru, lfu = bounded("v", 2, "lru"), bounded("v", 2, "lfu")
    tf.train.Checkpoint(v=lru).restore(path)
    tf.train.Checkpoint(v=lfu).restore(path)
    assert keys_of(lfu) == [1, 3]
    versions = tf.train.load_checkpoint(path).get_tensor("v/.ATTRIBUTES/kv-versions")
    again = saved_scores(tf.train.Checkpoint(v=lru).save(str(tmp_path / "d")))
    assert set(again.values()) <= {int(x) * 1_000_000 for x in versions}
    # Another policy's scores mean nothing.
    path = tf.train.Checkpoint(v=lfu).save(str(tmp_path / "e"))
    other = bounded("v", 1, "lru")
    tf.train.Checkpoint(v=other).restore(path)
    assert max(saved_scores(tf.train.Checkpoint(v=other).save(str(tmp_path / "f"))).values()) < 2**52
    # And a variable without a bound takes the rows alone.
    free = tfplugin.get_kv_variable("v", 2)
    tf.train.Checkpoint(v=free).restore(path)
    assert keys_of(free) == [1, 3]


def test_a_v1_saver_carries_the_scores(tmp_path):
    def build(session):
        v = tfplugin.get_kv_variable("v", 2, max_capacity=6, eviction="custom")
        session.run(v1.global_variables_initializer())
        return v

    with tf.Graph().as_default(), v1.Session() as session:
        v = build(session)
        session.run(v.sparse_read([1, 2, 3, 4, 5, 6]))
        session.run(v.set_scores([1, 2, 3, 4, 5, 6], [3, 1, 4, 2, 9, 5]))
        path = v1.train.Saver().save(session, str(tmp_path / "c"))
    with tf.Graph().as_default(), v1.Session() as session:
        v = build(session)
        v1.train.Saver().restore(session, path)
        assert session.run(v.sparse_read_and_evict([7, 8])[1]).tolist() == [2, 4]


def test_the_offline_tools_open_verify_and_migrate_what_a_bounded_variable_saves(tmp_path):
    v = bounded("v", 60, "lru", 3)
    fill(v)
    path = tf.train.Checkpoint(v=v).save(str(tmp_path / "c"))
    source = kvtools.open(path).table("v")
    assert source.schema.metadata["policies"]["eviction"] == "lru"
    assert verify(str(path)).count("error") == 0
    account = kvtools.write_tables([source], tmp_path / "m", "tfplugin")
    assert any("eviction scores" in loss for loss in account.tables[0].losses)
    w = tfplugin.get_kv_variable("v", 2, max_capacity=30, partitioner=fixed(2))
    tf.train.Checkpoint(v=w).restore(str(tmp_path / "m"))
    assert w.size().numpy() <= 30
    assert set(w.export()[0].numpy()) <= set(keys_of(v))


class Served(tf.Module):
    def __init__(self):
        super().__init__()
        self.emb = tfplugin.get_kv_variable("emb", 2, max_capacity=5, initializer=1.0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def serve(self, ids):
        return {"rows": tf.nn.embedding_lookup(self.emb, ids)}


def test_saved_models_of_bounded_variables_load_and_do_not_evict(tmp_path):
    model = Served()
    model.emb.sparse_read([1, 2, 3, 4, 5])
    tf.saved_model.save(model, str(tmp_path / "m"), signatures={"serving_default": model.serve})
    loaded = tf.saved_model.load(str(tmp_path / "m"))
    assert (loaded.emb.max_capacity, loaded.emb.eviction) == (5, "lru")
    rows = loaded.signatures["serving_default"](tf.constant([1, 9], tf.int64))["rows"]
    np.testing.assert_array_equal(rows, [[1, 1], [0, 0]])
    assert keys_of(loaded.emb) == [1, 2, 3, 4, 5]
    loaded.emb.sparse_read([9])  # trained on, it evicts
    assert int(loaded.emb.size()) == 5
    with tf.Graph().as_default(), v1.Session() as session:
        meta = v1.saved_model.load(session, ["serve"], str(tmp_path / "m"))
        signature = meta.signature_def["serving_default"]
        rows = session.run(signature.outputs["rows"].name, {signature.inputs["ids"].name: np.array([5, 9], np.int64)})
        np.testing.assert_array_equal(rows, [[1, 1], [0, 0]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eviction": "lfu"}, "eviction='lfu' says which rows go, and nothing says how many stay: give max_capacity="),
        ({"capacity_hint": -5}, "capacity_hint must be a number of rows, or 0 for any number; got -5"),
    ],
)
def test_bounds_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        tfplugin.get_kv_variable("v", 2, **options)
