"""`get_kv_variable` follows `tf.compat.v1.variable_scope`, partitioners and initializers as `get_variable` does."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin
from tfplugin import dynamic_embedding as de
from tfplugin.kv_variable import KvVariable

v1 = tf.compat.v1
get = tfplugin.get_kv_variable


def _names(collection=v1.GraphKeys.GLOBAL_VARIABLES):
    return [v.name for v in v1.get_collection(collection)]


def test_names_carry_scopes_and_parts(session):
    with v1.variable_scope("a"), v1.variable_scope("b"):
        assert get("v", 4).name == "a/b/v:0"
        whole = get("p", 4, partitioner=v1.fixed_size_partitioner(2))
    assert whole.name == "a/b/p"
    assert _names() == ["a/b/v:0", "a/b/p/part_0:0", "a/b/p/part_1:0"]


def test_a_name_of_a_dense_variable_is_taken(session):
    """It would be saved under another name, by which was made first."""
    with v1.variable_scope("a"):
        v1.get_variable("v", [2])
        v1.get_variable("p", [4, 2], partitioner=v1.fixed_size_partitioner(2))
        for name in ("v", "p"):
            with pytest.raises(ValueError, match=f"a/{name}: there is a dense variable of that name already"):
                get(name, 4)
        assert get("other", 4).name == "a/other:0"


@pytest.mark.parametrize("reuse", [None, True, v1.AUTO_REUSE])
def test_a_name_of_a_table_is_no_dense_variable(session, reuse):
    """It would be another variable, of another name, that nothing trains."""
    partitioner = v1.fixed_size_partitioner(2)
    with v1.variable_scope("a"):
        get("v", 2)
        get("p", 2, partitioner=partitioner)
    with v1.variable_scope("a", reuse=reuse):
        for name in ("v", "p"):
            for parts in (None, partitioner):
                with pytest.raises(ValueError, match=f"a/{name}: there is a key-value variable of that name already"):
                    v1.get_variable(name, [4, 2], partitioner=parts)
    with v1.variable_scope(
        "a", custom_getter=lambda getter, name, *args, **kwargs: getter(f"{name}_d", *args, **kwargs)
    ):
        assert v1.get_variable("v", [4, 2]).name == "a/v_d:0"


@pytest.mark.parametrize(
    ("make_other", "kind"),
    [
        (lambda: KvVariable("t", 4), "table"),
        (lambda: de.get_variable("t", dim=4), "table"),
        (lambda: de.get_variable("t", dim=4, devices=["/CPU:0"] * 2), "table"),
        (lambda: tf.Variable(1.0, name="t"), "dense variable"),
        (lambda: v1.Variable(1.0, name="t", use_resource=False), "dense variable"),
    ],
    ids=["KvVariable", "de", "de in parts", "tf.Variable", "reference variable"],
)
@pytest.mark.parametrize("parts", [None, 2])
def test_a_name_of_a_variable_that_was_made_otherwise_is_taken(session, make_other, kind, parts):
    """It would be saved under another name, by which was made first."""
    make_other()
    partitioner = None if parts is None else v1.fixed_size_partitioner(parts)
    with (
        v1.variable_scope("", reuse=v1.AUTO_REUSE),
        pytest.raises(ValueError, match=f"t: there is a {kind} of that name in the graph already"),
    ):
        get("t", 4, partitioner=partitioner)


def test_names_of_other_operations_are_not_taken(session):
    v1.placeholder(tf.int64, name="ids")
    assert get("ids", 4).name == "ids_1:0"


def test_reuse_with_another_number_of_parts(session):
    by_size = v1.variable_axis_size_partitioner(max_shard_bytes=1 << 10)
    with v1.variable_scope("s", reuse=v1.AUTO_REUSE):
        whole, parts = get("v", 4), get("p", 4, partitioner=v1.fixed_size_partitioner(2))
        sized = get("z", 4, partitioner=by_size, capacity_hint=1000)
        with pytest.raises(ValueError, match=r"s/p, but specified a partitioner that gives 3 parts, and found 2"):
            get("p", 4, partitioner=v1.fixed_size_partitioner(3))
        with pytest.raises(ValueError, match=r"s/v, but specified a partitioner that gives 2 parts, and found 1"):
            get("v", 4, partitioner=v1.fixed_size_partitioner(2))
        with pytest.raises(ValueError, match=r"s/z, but specified a partitioner that gives 2 parts, and found 16"):
            get("z", 4, partitioner=by_size, capacity_hint=100)
        assert get("z", partitioner=by_size) is sized and len(sized) == 16
        assert get("p") is get("p", partitioner=v1.fixed_size_partitioner(2)) is parts
        assert get("v", partitioner=v1.fixed_size_partitioner(1)) is whole


def test_reuse(session):
    with v1.variable_scope("s") as scope:
        first = get("v", 4)
        with pytest.raises(ValueError, match="s/v already exists"):
            get("v", 4)
    with v1.variable_scope("s", reuse=True):
        assert get("v") is first
        assert get("v", 4) is first
        with pytest.raises(ValueError, match="s/w does not exist"):
            get("w", 4)
        with pytest.raises(ValueError, match="embedding_dim 8 and found 4"):
            get("v", 8)
        with pytest.raises(ValueError, match="key_dtype int32 and found int64"):
            get("v", 4, key_dtype=tf.int32)
    with v1.variable_scope(scope, reuse=v1.AUTO_REUSE):
        assert get("v", 4) is first
        assert get("new", 4) is get("new", 4)
    assert len(_names()) == 2


def test_a_function_that_would_make_its_table_once_more_is_an_error(partitioner):
    kept = []

    def rows(ids):
        if not kept:
            kept.append(tf.get_kv_variable("kept", 2, partitioner=partitioner))
        return tf.nn.embedding_lookup(kept[0], ids)

    def anew(ids):
        return tf.nn.embedding_lookup(tf.get_kv_variable("anew", 2, partitioner=partitioner), ids)

    once = tf.function(rows)
    assert once([1]).shape == (1, 2) and once([1, 2]).shape == (2, 2)
    again = [tf.function(anew) for _ in range(2)]
    for function in again:
        assert (function([1]).numpy() == function([1]).numpy()).all()
        with pytest.raises(ValueError, match=r"get_kv_variable\('anew'\) in a tf.function makes a new table each time"):
            function([1, 2])
        outer = tf.function(lambda ids, function=function: function(ids))
        with pytest.raises(ValueError, match=r"'anew'.*: make the table once, outside of the function"):
            outer([1, 2, 3])


def test_a_function_that_makes_its_table_says_nothing_of_autograph(caplog):
    logger = logging.getLogger("tensorflow")
    logger.addHandler(caplog.handler)
    try:
        tf.function(lambda: tf.nn.embedding_lookup(tf.get_kv_variable("made", 2), [1]))()
    finally:
        logger.removeHandler(caplog.handler)
    assert "AutoGraph" not in caplog.text


def test_a_table_of_eager_mode_in_a_graph_is_named(make, partitioner):
    table = make(partitioner=partitioner)
    with tf.Graph().as_default():
        for look_up in (tf.nn.embedding_lookup, tf.gather, lambda table, keys: table.sparse_read(keys)):
            with pytest.raises(RuntimeError, match=r"'v(/part_0)?:0' was made in eager mode.*or use a tf\.function"):
                look_up(table, tf.constant([1], tf.int64))
        assert tf.function(lambda: tf.nn.embedding_lookup(tf.get_kv_variable("w", 2), [1]))().shape == (1, 2)


def test_graphs_have_variables_of_their_own():
    made = []
    for _ in range(2):
        with tf.Graph().as_default(), v1.variable_scope("s", reuse=v1.AUTO_REUSE):
            made.append(get("v", 4))
    assert made[0] is not made[1]


def test_a_scope_gives_defaults(session):
    def regularizer(rows):
        return tf.reduce_sum(rows) * 0.5

    def constraint(rows):
        return rows

    with v1.variable_scope(
        "s",
        initializer=v1.ones_initializer(),
        regularizer=regularizer,
        partitioner=v1.fixed_size_partitioner(2),
        constraint=constraint,
    ):
        table = get("v", 4)
    assert len(table) == 2
    assert table[0].constraint is constraint
    rows = tf.nn.embedding_lookup(table, tf.constant([1, 2, 3], tf.int64))
    loss = v1.losses.get_regularization_loss()
    session.run(v1.global_variables_initializer())
    np.testing.assert_array_equal(session.run(rows), np.ones([3, 4]))
    assert session.run(loss) == 6


def test_collections(session):
    get("a", 4)
    get("frozen", 4, trainable=False)
    get("mine", 4, collections=["mine"])
    get("local", 4, trainable=False, collections=[v1.GraphKeys.LOCAL_VARIABLES])
    assert _names() == ["a:0", "frozen:0"]
    assert _names(v1.GraphKeys.TRAINABLE_VARIABLES) == ["a:0", "mine:0"]
    assert [v.name for v in v1.trainable_variables()] == ["a:0", "mine:0"]
    assert [v.name for v in v1.local_variables()] == ["local:0"]


@pytest.mark.parametrize(
    ("partitioner", "parts"),
    [
        (v1.fixed_size_partitioner(3), 3),
        (v1.variable_axis_size_partitioner(max_shard_bytes=1 << 20), 16),
        (v1.min_max_variable_partitioner(max_partitions=4, min_slice_size=1 << 10), 4),
        (tf.distribute.experimental.partitioners.FixedShardsPartitioner(2), 2),
    ],
)
def test_partitioners_see_a_nominal_first_dimension(make, partitioner, parts):
    assert len(make(partitioner=partitioner)) == parts


@pytest.mark.parametrize("hint", [0, 3000])
def test_a_strategy_of_servers_that_balances_bytes_sees_the_same(hint):
    loads = [0] * 2

    def least_loaded(op):
        size = op.get_attr("dtype").size * tf.TensorShape(op.get_attr("shape")).num_elements()
        task = loads.index(min(loads))
        loads[task] += size
        return task

    with tf.Graph().as_default(), v1.device(v1.train.replica_device_setter(ps_tasks=2, ps_strategy=least_loaded)):
        table = tf.get_kv_variable("t", 4, partitioner=v1.fixed_size_partitioner(3), capacity_hint=hint)
        one = tf.get_kv_variable("one", 8, capacity_hint=hint)
    rows = hint or 1 << 20
    assert [part.device[-1] for part in (*table, one)] == ["0", "1", "0", "1"]
    assert loads == [4 * 4 * -(-rows // 3) * 2, 4 * 4 * -(-rows // 3) + 4 * 8 * rows]


def test_partitioners_along_the_row_are_refused(make):
    with pytest.raises(ValueError, match="split by key only: use axis=0"):
        make(partitioner=v1.fixed_size_partitioner(2, axis=1))


INITIALIZERS = {
    "number": (0.25, 0.25),
    "name": ("ones", 1.0),
    "v1": (v1.constant_initializer(0.25), 0.25),
    "v1 class": (v1.ones_initializer, 1.0),
    "tf.initializers": (tf.initializers.Constant(0.25), 0.25),
    "Keras 3": (tf.keras.initializers.Zeros(), 0.0),
    "tf_keras": (tf_keras.initializers.Constant(0.25), 0.25),
    "class": (tf.keras.initializers.Ones, 1.0),
    "function": (lambda shape, dtype=None: tf.fill(shape, tf.cast(0.25, dtype)), 0.25),
    "Tensor [dim]": (lambda: tf.fill([4], 0.25), 0.25),
    "Tensor [M, dim]": (lambda: tf.fill([3, 4], 0.25), 0.25),
    "scalar Tensor": (lambda: tf.constant(0.25), 0.25),
    "array": (np.full([2, 4], 0.25), 0.25),
}


@pytest.mark.parametrize("name", INITIALIZERS)
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "graph"])
def test_initializers(name, eager, partitioner):
    initializer, expected = INITIALIZERS[name]

    def rows():
        value = initializer() if "Tensor" in name else initializer
        table = get("v", 4, initializer=value, partitioner=partitioner)
        return tf.nn.embedding_lookup(table, tf.constant([1, -2, 3], tf.int64))

    if eager:
        got = rows()
    else:
        with tf.Graph().as_default(), v1.Session() as session:
            tensor = rows()
            session.run(v1.global_variables_initializer())
            got = session.run(tensor)
    np.testing.assert_array_equal(got, np.full([3, 4], expected))


@pytest.mark.parametrize(
    "initializer",
    [
        None,
        v1.random_uniform_initializer(-2, 3),
        v1.random_normal_initializer(1.0, 0.5),
        v1.truncated_normal_initializer(1.0, 0.5),
        tf.keras.initializers.RandomNormal(1.0, 0.5),
        tf_keras.initializers.RandomUniform(-2, 3),
    ],
)
def test_random_initializers_have_the_moments_of_the_dense_ones(make, initializer):
    rows = make(dim=8, initializer=initializer).sparse_read(np.arange(4000))
    resolved = initializer or tf.keras.initializers.RandomUniform(-0.05, 0.05)
    dense = np.asarray(resolved([1024, 8], dtype="float32"))
    assert np.mean(rows) == pytest.approx(dense.mean(), abs=0.06)
    assert np.std(rows) == pytest.approx(dense.std(), rel=0.06)


def test_bad_initializers(make, session):
    with pytest.raises(ValueError, match="needs a defined shape"):
        make(initializer=v1.placeholder(tf.float32, [None, 4]))
    with pytest.raises(ValueError, match=r"has shape \[M, 4\] or \[4\]"):
        make(initializer=tf.ones([5]))
    with pytest.raises(TypeError, match="initializer must be None, a number"):
        make(initializer=object())


def test_initialization_of_graph_variables(session, partitioner):
    table = get("v", 4, partitioner=partitioner)
    size, missing = table.size(), v1.report_uninitialized_variables()
    rows = tf.nn.embedding_lookup(table, tf.constant([5], tf.int64))
    names = sorted(v.op.name.encode() for v in v1.global_variables())
    assert sorted(session.run(missing)) == names
    for fetch in (rows, size):
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"'v.*not initialized|'v.*initializer"):
            session.run(fetch)
    session.run(v1.global_variables_initializer())
    assert session.run(missing).size == 0
    session.run(rows)
    assert session.run(size) == 1
    session.run(table.initializer)
    assert session.run(size) == 0
    with v1.Session(graph=session.graph) as other:
        assert len(other.run(missing)) == len(names)


def test_meta_graphs_keep_the_variables(session, partitioner, tmp_path, caplog):
    table = get("v", 4, partitioner=partitioner, initializer=0.5)
    dense = v1.get_variable("w", [2], use_resource=True)
    tf.identity(tf.nn.embedding_lookup(table, tf.constant([5, -5], tf.int64)), name="rows")
    names = _names()
    v1.train.export_meta_graph(str(tmp_path / "graph.meta"))
    assert "serializing" not in caplog.text
    with tf.Graph().as_default() as graph, v1.Session() as other:
        v1.train.import_meta_graph(str(tmp_path / "graph.meta"))
        assert _names() == names
        assert _names(v1.GraphKeys.TRAINABLE_VARIABLES) == names
        other.run(v1.global_variables_initializer())
        np.testing.assert_array_equal(other.run(graph.get_tensor_by_name("rows:0")), np.full([2, 4], 0.5))
    assert dense.name in names


@pytest.mark.parametrize("scope", [None, "imported"])
def test_tables_of_an_imported_graph_say_what_cannot_be_made_for_them(session, partitioner, tmp_path, scope):
    """By its own Saver and ops such a graph goes on; another Saver or optimizer would take a table for a variable."""
    table = get("v", 4, partitioner=partitioner, initializer=0.5)
    tf.reduce_sum(tf.nn.embedding_lookup(table, tf.constant([5, -5], tf.int64)), name="loss")
    v1.train.export_meta_graph(str(tmp_path / "graph.meta"))
    told = r"imported graph \(.*v.*\).*build the graph by its code"
    with tf.Graph().as_default() as graph, v1.Session() as other:
        saver = v1.train.import_meta_graph(str(tmp_path / "graph.meta"), import_scope=scope)
        missing = v1.report_uninitialized_variables()
        assert len(other.run(missing)) == len(v1.global_variables())
        other.run(v1.global_variables_initializer())
        assert len(other.run(missing)) == 0
        for one in (saver, v1.train.Saver()):
            with pytest.raises(tf.errors.InvalidArgumentError, match=told):
                one.save(other, str(tmp_path / "c"))
            with pytest.raises(tf.errors.InvalidArgumentError, match=told):
                other.run(one.saver_def.restore_op_name, {one.saver_def.filename_tensor_name: str(tmp_path / "c")})
        for method in ("size", "export"):
            with pytest.raises(AttributeError, match=f"'{method}' is of tables .*{told}"):
                getattr(v1.global_variables()[0], method)
        with pytest.raises(TypeError, match=told):
            tf.nn.embedding_lookup(v1.global_variables()[0], tf.constant([5], tf.int64))
        with pytest.raises(TypeError, match=told):
            of_scope = f"{scope}/" if scope else ""
            v1.train.GradientDescentOptimizer(0.1).minimize(graph.get_tensor_by_name(f"{of_scope}loss:0"))
