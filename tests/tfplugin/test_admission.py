"""Which keys get a row: admission by counts, by a filter and by probability, and the padding key."""

import collections
import json
import math

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfplugin
from kvtools.cli.main import main
from tfplugin.policies import BloomAdmission, CountAdmission, Policies, ProbabilityAdmission

v1 = tf.compat.v1


def keys_of(variable):
    return sorted(variable.export()[0].numpy().tolist())


def initial(variable, keys):
    return variable.sparse_read(keys, training=False, missing="initial").numpy()


# ---- Models in plain Python ----


class Counts:
    """`CountAdmission`: keys that wait, and how often they came."""

    def __init__(self, threshold):
        self.threshold, self.waiting, self.rows = threshold, collections.Counter(), {}

    def look_up(self, batch):
        for key in batch:
            if key not in self.rows and self.waiting[key] < self.threshold:
                self.waiting[key] += 1
        for key in batch:
            if key not in self.rows and self.waiting[key] >= self.threshold:
                self.rows[key] = self.waiting.pop(key)

    def increase(self, key, by):
        if key in self.rows:
            self.rows[key] += by
        else:
            self.waiting[key] += by

    def write(self, batch):
        for key in batch:
            self.rows[key] = self.rows.get(key, 0) + 1
            self.waiting.pop(key, None)

    def remove(self, key):
        self.rows.pop(key, None)
        self.waiting.pop(key, None)

    def count(self, key):
        return self.rows.get(key, self.waiting[key])


def mix64(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


class Filter(Counts):
    """`BloomAdmission`: the counts are in cells, of which only the lowest are raised."""

    def __init__(self, threshold, capacity, error):
        super().__init__(threshold)
        self.hashes = max(1, round(-math.log2(error)))
        cells = -self.hashes * capacity / math.log1p(-(error ** (1 / self.hashes)))
        self.cells = [0] * ((math.ceil(cells) + 63) // 64 * 64)

    def places(self, key):
        key %= 2**64
        at, step = mix64(key ^ 0xA0761D6478BD642F), mix64(key ^ 0xE7037ED1A0B428DB) | 1
        return [((at + i * step) % 2**64) * len(self.cells) >> 64 for i in range(self.hashes)]

    def counted(self, key):
        return min(self.cells[place] for place in self.places(key))

    def add(self, key, by):
        to = min(self.counted(key) + by, self.threshold)
        for place in self.places(key):
            self.cells[place] = max(self.cells[place], to)

    def look_up(self, batch):
        missed = [key for key in batch if key not in self.rows]
        for key in missed:
            self.add(key, 1)
        for key in missed:
            if self.counted(key) >= self.threshold:
                self.rows.setdefault(key, self.threshold)

    def increase(self, key, by):
        if key in self.rows:
            self.rows[key] += by
        else:
            self.add(key, by)

    def remove(self, key):
        self.rows.pop(key, None)

    def count(self, key):
        return self.rows[key] if key in self.rows else self.counted(key)


KEYS = st.integers(-4, 8)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("look_up"), st.lists(KEYS, max_size=12)),
        st.tuples(st.just("increase"), st.tuples(KEYS, st.integers(0, 4))),
        st.tuples(st.just("write"), st.lists(KEYS, max_size=3, unique=True)),
        st.tuples(st.just("remove"), KEYS),
        st.tuples(st.just("read"), st.lists(KEYS, max_size=6)),
    ),
    max_size=12,
)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("kind", ["counts", "filter", "crowded filter"])
@settings(max_examples=12, deadline=None)
@given(steps=STEPS, threshold=st.integers(2, 4))
def test_counted_keys_are_those_of_a_model(kind, parts, steps, threshold):
    if parts > 1 and kind == "crowded filter":
        return  # each part has a filter of its own keys
    admission, model = CountAdmission(threshold), Counts(threshold)
    if kind != "counts":
        capacity, error = (1000, 1e-6) if kind == "filter" else (2, 0.3)
        admission, model = BloomAdmission(threshold, capacity, error), Filter(threshold, capacity, error)
    partitioner = v1.fixed_size_partitioner(parts) if parts > 1 else None
    v = tfplugin.get_kv_variable("v", 2, admission=admission, partitioner=partitioner)
    everything = np.arange(-4, 9)
    for what, argument in steps:
        if what == "look_up":
            expected = initial(v, argument)
            np.testing.assert_array_equal(v.sparse_read(argument), expected)
            model.look_up(argument)
        elif what == "increase":
            v.increase_counting([argument[0]], [argument[1]])
            model.increase(*argument)
        elif what == "write":
            v.upsert(argument, initial(v, argument))
            model.write(argument)
        elif what == "remove":
            assert int(v.delete([argument])) == (argument in model.rows)
            model.remove(argument)
        else:
            np.testing.assert_array_equal(
                v.sparse_read(argument, training=False) != 0, np.isin(argument, list(model.rows))[:, None] & [True] * 2
            )
        assert keys_of(v) == sorted(model.rows)
        assert v.get_counting(everything).numpy().tolist() == [model.count(key) for key in everything.tolist()]
    assert int(v.total_count()) == len(set(model.rows) | set(+model.waiting))
    assert int(v.total_freq()) == sum(model.rows.values()) + sum(model.waiting.values())


def test_a_lookup_of_many_threads_counts_each_occurrence_once(partitioner):
    keys = np.random.default_rng(5).integers(0, 20_000, 60_000)
    v = tfplugin.get_kv_variable("v", 2, enter_threshold=4, partitioner=partitioner)
    tf.nn.embedding_lookup(v, keys)
    counts = np.bincount(keys, minlength=20_000)
    assert keys_of(v) == np.flatnonzero(counts >= 4).tolist()
    np.testing.assert_array_equal(v.get_counting(np.arange(20_000)), np.minimum(counts, 4))


def test_a_filter_admits_early_no_more_keys_than_its_error_says():
    capacity, error = 20_000, 0.02
    v = tfplugin.get_kv_variable("v", 1, admission=BloomAdmission(2, capacity, error))
    v.sparse_read(np.arange(capacity))
    early = int(v.size())
    assert early <= capacity * error  # with each key once; on average a filter is half full and errs far less
    v.sparse_read(np.arange(capacity))
    assert int(v.size()) == capacity  # and none waits longer than it should


def test_keys_are_drawn_anew_by_each_lookup(partitioner):
    v = tfplugin.get_kv_variable("v", 2, admission=ProbabilityAdmission(0.25), partitioner=partitioner)
    keys = np.arange(4000)
    for times in range(1, 4):
        rows = v.sparse_read(np.concatenate([keys, keys]))
        np.testing.assert_array_equal(rows[:4000], initial(v, keys))
        assert abs(int(v.size()) / 4000 - (1 - 0.75**times)) < 0.05
    # A key comes twice in a lookup, and is drawn once.
    single = tfplugin.get_kv_variable("w", 2, admission=ProbabilityAdmission(0.5, below="zeros"))
    rows = single.sparse_read(np.concatenate([keys, keys])).numpy()
    np.testing.assert_array_equal(rows[:4000], rows[4000:])
    assert ((rows[:4000] != 0).all(1) == single.contains(keys).numpy()).all()


# ---- Every lookup ----


def pooled(v, ids):
    sparse = tf.SparseTensor([[i, 0] for i in range(len(ids))], tf.constant(ids, v.key_dtype), [len(ids), 1])
    return tf.nn.embedding_lookup_sparse(v, sparse, None, combiner="sum")


LOOKUPS = {
    "embedding_lookup": tf.nn.embedding_lookup,
    "gather": lambda v, ids: tf.gather(v, ids),
    "sparse": pooled,
    "safe": lambda v, ids: tf.nn.safe_embedding_lookup_sparse(
        v, tf.SparseTensor([[i, 0] for i in range(len(ids))], tf.constant(ids, v.key_dtype), [len(ids), 1])
    ),
    "many": lambda v, ids: tfplugin.lookup_many([v, v], [ids[:1], ids[1:]])[0],
    "evicting": lambda v, ids: v.sparse_read_and_evict(ids)[0],
    "traced": lambda v, ids: tf.function(lambda: tf.nn.embedding_lookup(v, ids))(),
}


@pytest.mark.parametrize("below", ["initial", "zeros"])
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_every_lookup_counts(lookup, below, partitioner):
    v = tfplugin.get_kv_variable(
        "v", 2, initializer=0.5, admission=CountAdmission(2, below=below), partitioner=partitioner
    )
    first = LOOKUPS[lookup](v, [1, 2]).numpy()
    assert int(v.size()) == 0
    np.testing.assert_array_equal(first, np.full(first.shape, 0.5 if below == "initial" else 0.0))
    v.upsert([9], [[3.0, 3.0]])
    second = LOOKUPS[lookup](v, [2, 9]).numpy()
    assert keys_of(v) == [2, 9]
    np.testing.assert_array_equal(second[0], [0.5, 0.5])
    assert v.get_counting([1, 2]).numpy().tolist() == [1, 2]


@pytest.mark.parametrize("below", ["initial", "zeros"])
def test_occurrences_in_a_batch_fare_alike(below, partitioner):
    v = tfplugin.get_kv_variable(
        "v", 2, initializer=0.5, admission=CountAdmission(3, below=below), partitioner=partitioner
    )
    waits = 0.5 if below == "initial" else 0.0
    rows = v.sparse_read([5, 6, 5, 6, 5]).numpy()
    np.testing.assert_array_equal(rows[:, 0], [0.5, waits, 0.5, waits, 0.5])


def test_inference_counts_nothing(make):
    v = make(enter_threshold=2)
    for _ in range(3):
        v.sparse_read([1], training=False)
        with tfplugin.inference_mode():
            tf.nn.embedding_lookup(v, [1])
    assert v.get_counting([1]).numpy() == [0]


@pytest.mark.parametrize("key_dtype", [tf.int32, tf.uint64])
def test_keys_of_every_dtype_are_counted(key_dtype):
    keys = [-1, 7] if key_dtype == tf.int32 else [2**64 - 1, 7]
    v = tfplugin.get_kv_variable("v", 2, key_dtype=key_dtype, enter_threshold=2, padding_key=7)
    v.sparse_read(tf.constant(keys, key_dtype))
    assert v.get_counting(tf.constant(keys, key_dtype)).numpy().tolist() == [1, 0]
    v.sparse_read(tf.constant(keys, key_dtype))
    assert keys_of(v) == keys[:1]


def test_bounded_tables_admit_and_evict(make):
    v = make(dim=2, max_capacity=2, enter_threshold=2, initializer=1.0)
    for batch in ([1, 2], [1, 2], [1, 3], [3]):
        v.sparse_read(batch)
    assert keys_of(v) == [1, 3]  # 2 was touched least recently
    v.sparse_read([2])
    assert keys_of(v) == [1, 3]  # whose row has gone, begins anew
    v.sparse_read([2])
    assert keys_of(v) == [2, 3]
    assert v.get_counting([1, 2, 3]).numpy().tolist() == [0, 2, 2]


# ---- Updates ----


def optimizers():
    return {
        "fused": lambda: tf.keras.optimizers.Adagrad(0.5),
        "generic": lambda: type("Unknown", (tf.keras.optimizers.Adagrad,), {})(0.5),
    }


@pytest.mark.parametrize("kind", ["fused", "generic"])
def test_optimizers_and_slots_do_not_see_keys_that_wait(kind, partitioner, rows_of):
    v = tfplugin.get_kv_variable("v", 2, initializer=1.0, enter_threshold=2, partitioner=partitioner)
    free = tfplugin.get_kv_variable("free", 2, initializer=1.0, partitioner=partitioner)
    steps = {variable: tfplugin.OptimizerWrapper(optimizers()[kind]()) for variable in (v, free)}

    def step(variable, ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.embedding_lookup(variable, ids) ** 2)
        parts = list(variable) if partitioner else [variable]
        steps[variable].apply_gradients(zip(tape.gradient(loss, parts), parts, strict=True))

    step(v, [1, 2])
    assert int(v.size()) == 0
    step(v, [1, 3])
    step(free, [1])
    assert keys_of(v) == [1]
    np.testing.assert_array_equal(rows_of(v, [1]), rows_of(free, [1]))
    part = next(part for part in (list(v) if partitioner else [v]) if int(part.size()))
    (slot,) = part.slot_names()
    assert v.export(slot)[0].numpy().tolist() == [1]
    assert v.get_counting([1, 2, 3]).numpy().tolist() == [3, 1, 1]  # two lookups, and an update


def test_updates_in_a_session_leave_out_keys_that_wait(session):
    v = tfplugin.get_kv_variable("v", 2, initializer=1.0, enter_threshold=2, partitioner=v1.fixed_size_partitioner(2))
    ids = v1.placeholder(tf.int64, [None])
    loss = tf.reduce_sum(tf.nn.embedding_lookup(v, ids))
    train = v1.train.AdamOptimizer(0.1).minimize(loss)
    session.run(v1.global_variables_initializer())
    session.run(train, {ids: [1, 2, 1]})
    session.run(train, {ids: [2, 3]})
    keys, rows = session.run(v.export())
    assert sorted(keys) == [1, 2]
    assert (rows < 1.0).all()
    assert session.run(v.get_counting([1, 2, 3])).tolist() == [3, 3, 1]


def test_accumulate_and_scatter_leave_out_keys_that_wait(make):
    v = make(dim=2, initializer=1.0, enter_threshold=2)
    v.scatter_update(tf.IndexedSlices(tf.ones([1, 2]), [1]))
    v.accumulate([1, 2], tf.ones([2, 2]))
    v.scatter_mul(tf.IndexedSlices(tf.fill([2, 2], 5.0), [1, 3]))
    assert keys_of(v) == [1]
    np.testing.assert_array_equal(v.sparse_read([1], training=False), [[10.0, 10.0]])


# ---- The padding key ----


def test_a_padding_key_never_gets_a_row(partitioner, rows_of):
    v = tfplugin.get_kv_variable("v", 2, initializer=1.0, padding_key=-1, partitioner=partitioner)
    parts = list(v) if partitioner else [v]
    for optimizer in optimizers().values():
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(v, [-1, 4, -1])
            loss = tf.reduce_sum(rows)
        np.testing.assert_array_equal(rows.numpy()[[0, 2]], np.zeros([2, 2]))
        tfplugin.OptimizerWrapper(optimizer()).apply_gradients(zip(tape.gradient(loss, parts), parts, strict=True))
    v.accumulate([-1, 4], tf.ones([2, 2]))
    v.increase_counting([-1], 3)
    assert keys_of(v) == [4]
    np.testing.assert_array_equal(initial(v, [-1, 5]), [[0.0, 0.0], [1.0, 1.0]])
    assert v.get_counting([-1]).numpy() == [0]
    with pytest.raises(tf.errors.InvalidArgumentError, match="key -1 is its padding_key, which never has a row"):
        v.upsert([3, -1], tf.ones([2, 2]))


def test_a_padding_key_of_drawn_rows_and_of_rows_is_zeros(make):
    for initializer in (tf.random_normal_initializer(), tf.ones([3, 4])):
        v = make(initializer=initializer, padding_key=0)
        rows = v.sparse_read([0, 1]).numpy()
        assert (rows[0] == 0).all() and (rows[1] != 0).any()
        np.testing.assert_array_equal(pooled(v, [0, 1]), rows)


# ---- Checkpoints ----


@pytest.mark.parametrize("admission", [CountAdmission(3), BloomAdmission(3, 100, 1e-6)], ids=["counts", "filter"])
@pytest.mark.parametrize("after", [1, 2, 3])
def test_counts_are_restored_into_any_number_of_parts(admission, after, partitioner, tmp_path):
    v = tfplugin.get_kv_variable("v", 2, admission=admission, partitioner=partitioner)
    v.sparse_read([1, 2, 2, 3, 3, 3, -7])
    path = tf.train.Checkpoint(v=v).save(str(tmp_path / "ckpt"))
    w = tfplugin.get_kv_variable(
        "v", 2, admission=admission, partitioner=v1.fixed_size_partitioner(after) if after > 1 else None
    )
    w.sparse_read([50, 50])  # forgotten
    tf.train.Checkpoint(v=w).restore(path)
    assert keys_of(w) == [3]
    assert w.get_counting([1, 2, 3, -7, 50]).numpy().tolist() == [1, 2, 3, 1, 0]
    w.sparse_read([1, 2])
    assert keys_of(w) == [2, 3]


def test_a_saver_keeps_counts_and_policies(session, tmp_path):
    v = tfplugin.get_kv_variable("v", 2, enter_threshold=2, padding_key=5)
    read = v.sparse_read([1, 5])
    session.run(v1.global_variables_initializer())
    session.run(read)
    saver = v1.train.Saver()
    path = saver.save(session, str(tmp_path / "ckpt"))
    session.run(v1.global_variables_initializer())
    assert session.run(v.get_counting([1])) == [0]
    saver.restore(session, path)
    assert session.run(v.get_counting([1, 5])).tolist() == [1, 0]
    meta = json.loads(tf.train.load_checkpoint(path).get_tensor("v-kvmeta"))
    assert meta["policies"] == {
        "admission": {"kind": "count", "enter_threshold": 2, "below": "initial"},
        "padding_key": 5,
    }


def test_counts_of_merged_checkpoints_go_on(tmp_path):
    """Counts are added up; one that reaches the threshold makes its row at the next lookup, with that frequency."""
    paths = []
    for name, ids in (("a", [1, 2, 2, 3, 3, 3]), ("b", [1, 2, 2, 3, 4, 4, 4])):
        v = tfplugin.get_kv_variable("v", 2, admission=CountAdmission(3))
        v.sparse_read(ids)
        paths.append(tf.train.Checkpoint(v=v).save(str(tmp_path / name)))
    assert main(["merge", *paths, str(tmp_path / "sum"), "--on-conflict", "sum"]) == 0
    w = tfplugin.get_kv_variable("v", 2, admission=CountAdmission(3))
    tf.train.Checkpoint(v=w).restore(str(tmp_path / "sum"))
    assert keys_of(w) == [3, 4]
    assert w.get_counting([1, 2, 3, 4]).numpy().tolist() == [2, 4, 3, 3]  # of 3, which has a row, the other waited
    w.sparse_read([2])
    assert keys_of(w) == [2, 3, 4] and w.get_counting([2]).numpy() == [4]


def test_a_filter_of_another_size_or_none_begins_anew(make, tmp_path):
    v = make(admission=BloomAdmission(2, 100))
    v.sparse_read([1])
    path = tf.train.Checkpoint(v=v).save(str(tmp_path / "ckpt"))
    for other in (None, CountAdmission(2), BloomAdmission(2, 5000)):
        w = make(admission=other)
        tf.train.Checkpoint(v=w).restore(path)
        assert w.get_counting([1]).numpy() == [0]


def test_a_saved_model_and_a_meta_graph_keep_policies(make, tmp_path):
    module = tf.Module()
    module.v = make(dim=2, enter_threshold=2, padding_key=3, initializer=1.0)
    module.v.sparse_read([1, 1])
    module.look = tf.function(
        lambda ids: tf.nn.embedding_lookup(module.v, ids), input_signature=[tf.TensorSpec([None], tf.int64)]
    )
    tf.saved_model.save(module, str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    np.testing.assert_array_equal(loaded.look(tf.constant([1, 2], tf.int64)), [[1.0, 1.0], [0.0, 0.0]])
    assert loaded.v.policies == Policies(CountAdmission(2), padding_key=3)
    with tf.Graph().as_default(), v1.Session() as session:
        v = tfplugin.get_kv_variable("v", 2, enter_threshold=2)
        ids = v1.placeholder(tf.int64, [None], name="ids")
        tf.identity(v.sparse_read(ids), name="rows")
        session.run(v1.global_variables_initializer())
        path = v1.train.Saver().save(session, str(tmp_path / "ckpt"))
    with tf.Graph().as_default(), v1.Session() as session:
        saver = v1.train.import_meta_graph(path + ".meta")
        saver.restore(session, path)
        (handle,) = [op for op in session.graph.get_operations() if op.type == "KvTableHandle"]
        assert Policies.from_json(handle.get_attr("policies")) == Policies(CountAdmission(2))
        session.run("rows:0", {"ids:0": [4]})


# ---- Bad input ----


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"enter_threshold": -1}, r"'v': enter_threshold must be a number of lookups, 0 or more; got -1"),
        ({"enter_threshold": 1.5}, r"'v': enter_threshold.*got 1.5"),
        ({"enter_threshold": 2, "admission": CountAdmission(3)}, r"'v': enter_threshold=2 and.*both say.*give one"),
        ({"padding_key": 2**70}, r"'v': padding_key must be one of its int64 keys"),
        ({"padding_key": True}, r"'v': padding_key.*got True"),
    ],
)
def test_arguments_that_are_out_of_range_or_contradict_each_other(make, arguments, says):
    with pytest.raises(ValueError, match=says):
        make(**arguments)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: CountAdmission(-2), "CountAdmission: enter_threshold must be.*got -2"),
        (lambda: CountAdmission(2, below="ones"), "below must be one of"),
        (lambda: BloomAdmission(2, 0), "capacity must be a number of keys, 1 to .*got 0"),
        (lambda: BloomAdmission(2, 10, 1.5), "error must be a probability.*got 1.5"),
        (lambda: BloomAdmission(70_000, 10), "at most 65535.*CountAdmission takes larger ones"),
        (lambda: ProbabilityAdmission(-0.1), "p must be a probability, 0 to 1; got -0.1"),
        (lambda: ProbabilityAdmission(True), "p must be a probability"),
    ],
)
def test_policies_that_cannot_be(made, says):
    with pytest.raises(ValueError, match=says):
        made()


def test_an_admission_that_is_none(make):
    with pytest.raises(TypeError, match=r"admission must be one of tfplugin.policies' CountAdmission"):
        make(admission=3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="'v': counts are increased by 0 or more, got -1"):
        make().increase_counting([1], [-1])


def test_shared_variables_have_the_same_policies(session):
    with v1.variable_scope("s", reuse=v1.AUTO_REUSE):
        v = tfplugin.get_kv_variable("v", 2, enter_threshold=3)
        assert tfplugin.get_kv_variable("v", 2) is v
        with pytest.raises(ValueError, match=r"share key-value variable s/v, but specified policies.*and found"):
            tfplugin.get_kv_variable("v", 2, enter_threshold=4)


def test_policies_survive_json():
    for policies in (
        Policies(),
        Policies(CountAdmission(7, "zeros"), padding_key=-3),
        Policies(BloomAdmission(2, 10, 0.5), admits_on="update"),
        Policies(ProbabilityAdmission(0.5), padding_key=2**64 - 1),
    ):
        assert Policies.from_json(policies.to_json()) == policies
