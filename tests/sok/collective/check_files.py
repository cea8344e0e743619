"""What ranks write and read back: dumps with optimizer slots, increments, rows that were evicted; and who is let in."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin
import tfplugin.sok as sok
from tfplugin.sok.optimizer_slots import slots_of

KINDS = ("distributed", "localized", "hbm", "hybrid")
KEYS = np.array([-(2**63), 2**63 - 1, -1, -2, 0, 1, 2, 3, 4, 2**40], np.int64)
Gather = Callable[[Any], list[Any]]


@pytest.fixture(scope="module", autouse=True)
def _sok_started() -> None:
    sok.init()


def _variable(kind: str, size: int, name: str) -> Any:
    if kind in ("hbm", "hybrid"):
        return sok.DynamicVariable(2, "0.5", kind, name=name)
    mode = "distributed" if kind == "distributed" else f"localized:{size - 1}"
    return sok.Variable(np.full([len(KEYS), 2], 0.5), dtype=tf.float32, name=name, mode=mode)


def _train(variables: list[Any], optimizer: Any, rank: int, seed: int = 0) -> None:
    """A step that gives each row another gradient; each rank has only some of the keys."""
    which = [np.random.default_rng(10 * seed + rank + 1).integers(len(KEYS), size=8) for _ in variables]
    which[0][:3] = 0, len(KEYS) - 1, rank  # some on all ranks
    with tf.GradientTape() as tape:
        losses = []
        for variable, places in zip(variables, which, strict=True):
            keys = KEYS[places] if isinstance(variable, sok.DynamicVariable) else places
            pooled = sok.lookup_sparse(variable, tf.RaggedTensor.from_row_lengths(keys, [3, 0, 5]), combiners="mean")
            losses.append(tf.reduce_sum(pooled * [[1.0, 2.0], [1.0, 1.0], [-3.0, 0.5]]))
        loss = tf.add_n(losses)
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def _state(variables: list[Any], optimizer: Any) -> list[dict[Any, list[list[float]]]]:
    """Of each variable, by local key or row: its values, and each slot's."""
    states = []
    for variable in variables:
        slots = slots_of(optimizer, variable)
        if isinstance(variable, sok.DynamicVariable):
            keys, rows = variable.export()
            columns = [rows, *(slots[name].read(keys) for name in sorted(slots))]
        else:
            keys = tf.range(len(variable.global_rows()))
            columns = [tf.convert_to_tensor(variable), *(tf.convert_to_tensor(slots[name]) for name in sorted(slots))]
        listed = [column.numpy().tolist() for column in columns]
        states.append({key: list(row) for key, *row in zip(keys.numpy().tolist(), *listed, strict=True)})
    return states


@pytest.mark.parametrize(
    "make", [tf_keras.optimizers.legacy.Adam, tf.keras.optimizers.Adagrad], ids=["Adam", "Adagrad"]
)
def test_all_kinds_in_one_dump_come_back_with_their_slots(make: Any, size: int, rank: int, shared_path: Path) -> None:
    variables = [_variable(kind, size, kind) for kind in KINDS]
    optimizer = sok.OptimizerWrapper(make(0.1))
    for seed in range(2):
        _train(variables, optimizer, rank, seed)
    trained = _state(variables, optimizer)
    assert all(len(columns) == (3 if "Adam" in str(make) else 2) for of_one in trained for columns in of_one.values())
    sok.dump(shared_path, variables, optimizer)
    _train(variables, optimizer, rank, 2)
    assert _state(variables, optimizer) != trained
    for variable in variables:
        if isinstance(variable, sok.DynamicVariable):
            variable.clear()
        else:
            variable.assign(tf.zeros_like(variable))
            for slot in slots_of(optimizer, variable).values():
                slot.assign(tf.zeros_like(slot))
    sok.load(shared_path, variables, optimizer)
    assert _state(variables, optimizer) == trained

    fresh = [_variable(kind, size, kind) for kind in KINDS]
    another = sok.OptimizerWrapper(make(0.1))
    sok.load(shared_path, fresh[::-1], another)  # in any order
    assert _state(fresh, another) == trained


@pytest.mark.parametrize("kind", KINDS)
def test_weights_alone_leave_the_slots_as_they_are(kind: str, size: int, rank: int, shared_path: Path) -> None:
    variables = [_variable(kind, size, kind)]
    optimizer = sok.OptimizerWrapper(tf_keras.optimizers.legacy.Adagrad(0.1))
    _train(variables, optimizer, rank)
    sok.dump(shared_path, variables)
    (first,) = _state(variables, optimizer)
    _train(variables, optimizer, rank)
    (second,) = _state(variables, optimizer)
    sok.load(shared_path, variables)
    (loaded,) = _state(variables, optimizer)
    assert loaded == {key: [first[key][0], second[key][1]] for key in first}


@pytest.mark.parametrize("built", [False, True], ids=["fresh", "built"])
def test_gradients_that_wait_for_an_update_come_back_to_the_ranks_that_own_them(
    built: bool, size: int, rank: int, shared_path: Path, gather: Gather
) -> None:
    def made() -> tuple[list[Any], Any, Any]:
        variables = [_variable(kind, size, f"waiting-{kind}") for kind in KINDS]
        variables.append(sok.DynamicVariable(2, "0.5", name="waiting-localized-table", mode=f"localized:{size - 1}"))
        optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1, gradient_accumulation_steps=3))
        named = {variable.name.partition(":")[0]: variable for variable in variables}
        return variables, optimizer, sok.Checkpoint(optimizer=optimizer, **named)

    variables, optimizer, checkpoint = made()
    for seed in range(2):
        _train(variables, optimizer, rank, seed)
    path = checkpoint.save(str(shared_path / "model"))
    _train(variables, optimizer, rank, 2)
    expected = _state(variables, optimizer)

    # For any number of ranks: what one rank would have.
    asked = [KEYS[np.random.default_rng(10 * seed + rank + 1).integers(len(KEYS), size=8)] for seed in range(2)]
    reader = tf.train.load_checkpoint(path)
    (saved,) = (name for name in reader.get_variable_to_shape_map() if "waiting-hbm/keys" in name)
    assert sorted(reader.get_tensor(saved).tolist()) == np.unique(gather(np.concatenate(asked))).tolist()

    variables, optimizer, checkpoint = made()
    if built:
        _train(variables, optimizer, rank, 7)
    checkpoint.restore(path)
    _train(variables, optimizer, rank, 2)
    assert _state(variables, optimizer) == expected
    sok.Checkpoint(table=variables[2]).save(str(shared_path / "again"))  # no rank has rows of another


# ---- Increments ------------------------------------------------------------------------------------------------------


def test_an_iterator_of_each_rank_is_none_of_a_checkpoint_of_all(rank: int, size: int, shared_path: Path) -> None:
    table, path = sok.DynamicVariable(2, name="beside_input"), str(shared_path / "model")
    data = tf.data.Dataset.range(20).shard(size, rank)
    inputs = iter(data)
    next(inputs)
    checkpoint, own = sok.Checkpoint(table=table, inputs=[inputs]), tf.train.Checkpoint(inputs=[inputs])
    if size > 1:
        with pytest.raises(ValueError, match=r"saving .* of rank 0 alone"):
            checkpoint.write(path)
        sok.Checkpoint(table=table).write(path)
        with pytest.raises(ValueError, match=r"restoring .* of rank 0 alone"):
            checkpoint.read(path)
        saved = own.write(f"{path}-input-{rank}")  # the way out that the error names
    else:
        saved = checkpoint.write(path)
    expected = next(inputs)
    again = iter(data)
    tf.train.Checkpoint(inputs=[again]).read(saved).expect_partial()
    assert next(again) == expected


@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
def test_an_increment_has_the_keys_of_all_ranks_since_then_and_no_others(
    var_type: str, rank: int, size: int, gather: Gather
) -> None:
    bounds = {"max_capacity": 1000} if var_type == "hybrid" else {}
    v = sok.DynamicVariable(2, "0.5", var_type, name="v", **bounds)
    other = sok.DynamicVariable(1, "1", name="other")
    optimizer = sok.SGD(1.0)

    def train(keys: list[int]) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(v, tf.ragged.constant([keys], tf.int64), combiners="sum"))
        optimizer.apply_gradients([(tape.gradient(loss, v), v)])

    train([100, 101, 102 + rank])
    time.sleep(1.1 if var_type == "hbm" else 0.01)  # what an unbounded table knows is the second
    since = time.time() if var_type == "hybrid" else float(int(time.time()))
    since = max(gather(since))
    mine = [[-5, 7, 100], [8, -9], [2**63 - 1, 7]]
    train(mine[rank % 3])
    (keys, none), (rows, _) = sok.incremental_model_dump([v, other], since)
    expected = sorted({key for r in range(size) for key in mine[r]})
    assert sorted(keys.tolist()) == expected and none.shape == (0,)
    occurrences = {key: sum(mine[r].count(key) for r in range(size)) for key in expected}
    for key, row in zip(keys.tolist(), rows, strict=True):
        np.testing.assert_array_equal(row, np.full(2, 0.5 - occurrences[key] - (size if key == 100 else 0)), str(key))
    assert sok.incremental_model_dump(v, time.time() + 1000)[0][0].shape == (0,)
    assert len(sok.incremental_model_dump(v, 0)[0][0]) == len({*expected, 100, 101, *(102 + r for r in range(size))})


def test_an_increment_of_a_graph_takes_a_session_that_is_not_the_default(rank: int, size: int) -> None:
    with tf.Graph().as_default() as graph:
        v = sok.DynamicVariable(1, "ones", name="v")
        row = sok.lookup_sparse(v, tf.ragged.constant([[7, 10 + rank]], tf.int64))
        session = tf.compat.v1.Session(graph=graph)
        session.run(v.initializer)
        session.run(row)
        (keys,), (rows,) = sok.incremental_model_dump(v, 0, session)
        session.close()
    assert sorted(keys.tolist()) == [7, *(10 + r for r in range(size))] and (rows == 1).all()


# ---- Eviction --------------------------------------------------------------------------------------------------------


def test_evicted_rows_are_those_that_the_rank_had_and_each_goes_once(rank: int) -> None:
    v = sok.DynamicVariable(2, "zeros", "hybrid", max_capacity=64, init_capacity=64)
    held: dict[int, list[float]] = {}
    rng = np.random.default_rng(rank)
    gone: list[int] = []
    for step in range(12):
        keys = rng.permutation(np.arange(-40, 40))[:20] * 1000 + rank  # each rank its own
        _, evicted, values = sok.sparse_read_and_evict(v, tf.constant(keys))
        evicted_keys = evicted.numpy().tolist()
        assert len(set(evicted_keys)) == len(evicted_keys)
        for key, row in zip(evicted_keys, values.numpy().tolist(), strict=True):
            assert held.pop(key) == row
        gone += evicted_keys
        fresh = [key for key in keys.tolist() if key not in evicted_keys]
        written = np.array([[key, step] for key in fresh], np.float32).reshape(-1, 2)
        sok.assign(v, fresh, written)
        held.update(zip(fresh, written.tolist(), strict=True))
        kept, rows = sok.export(v)
        assert dict(zip(kept.numpy().tolist(), rows.numpy().tolist(), strict=True)) == held
    assert gone and len(held) <= 64


def test_a_table_that_evicts_is_looked_up_over_the_ranks(rank: int, size: int) -> None:
    v = sok.DynamicVariable(1, "0.25", "hybrid", max_capacity=8)
    for first in range(0, 60, 6):
        ids = tf.reshape(tf.range(first * size, (first + 6) * size, dtype=tf.int64), [1, -1])
        rows = sok.lookup_sparse(v, tf.RaggedTensor.from_tensor(ids), combiners="sum")
        np.testing.assert_allclose(rows, [[0.25 * 6 * size]])
        kept = v.indices.numpy()
        assert len(kept) <= 8 and (kept % size == rank).all()


# ---- Admission -------------------------------------------------------------------------------------------------------


def _admit(v: Any, ids: tf.RaggedTensor, **options: Any) -> tuple[np.ndarray, Any]:
    with tf.GradientTape() as tape:
        rows = sok.lookup_sparse(v, ids, combiners="sum", **options)
        loss = tf.reduce_sum(rows)
    return rows.numpy(), tape.gradient(loss, v)


@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
def test_a_filter_admits_its_share_of_new_keys_and_the_others_are_zeros(
    var_type: str, rank: int, size: int, gather: Gather
) -> None:
    v = sok.DynamicVariable(2, "0.5", var_type, filter_ratio=0.3)
    ids = tf.RaggedTensor.from_tensor(tf.reshape(tf.range(-500, 500, dtype=tf.int64), [-1, 1]))
    rows, gradient = _admit(v, ids, use_low_frequency_filter=True)
    of_ranks = gather(v.indices.numpy())
    admitted = np.concatenate(of_ranks)
    assert 200 < len(admitted) < 200 + 250 * size  # one draw for each rank that asks, at most
    found = np.isin(np.arange(-500, 500), admitted)
    # A key may have been let in for another rank's lookup of it only.
    assert (found | (rows == 0).all(1)).all()
    assert set(np.unique(rows).tolist()) == {0.0, 0.5}
    sok.SGD(1.0).apply_gradients([(gradient, v)])
    gather("trained")
    assert sorted(v.indices.numpy().tolist()) == sorted(of_ranks[rank].tolist())  # and training inserts no others
    again, _ = _admit(v, ids, training=False)
    assert (again[~found] == 0).all() and (again[found] < 0).any()


@pytest.mark.parametrize(("ratio", "asked", "all_of_them"), [(0.0, True, False), (1.0, True, True), (0.0, False, True)])
def test_a_filter_of_0_admits_none_of_1_all_and_none_is_used_unless_asked(
    ratio: float, asked: bool, all_of_them: bool, gather: Gather
) -> None:
    v = sok.DynamicVariable(2, "0.5", filter_ratio=ratio)
    static = sok.Variable(np.ones([6, 2]), dtype=tf.float32)
    ids = tf.ragged.constant([[0, 1, 5], [], [3]], tf.int64)
    rows, of_static = sok.lookup_sparse([v, static], [ids, ids], combiners=["sum"] * 2, use_low_frequency_filter=asked)
    np.testing.assert_array_equal(rows, np.array([[1.5] * 2, [0] * 2, [0.5] * 2]) * all_of_them)
    np.testing.assert_array_equal(of_static, [[3, 3], [0, 0], [1, 1]])
    inserted = np.concatenate(gather(v.indices.numpy()))
    assert sorted(inserted.tolist()) == ([0, 1, 3, 5] if all_of_them else [])


def test_a_key_that_is_there_passes_the_filter() -> None:
    v = sok.DynamicVariable(2, "0.5", filter_ratio=0.0)
    ids = tf.ragged.constant([[7, 8]], tf.int64)
    sok.lookup_sparse(v, tf.ragged.constant([[7]], tf.int64))
    step = tf.function(lambda: sok.lookup_sparse(v, ids, combiners="sum", use_low_frequency_filter=True))
    np.testing.assert_array_equal(step(), [[0.5, 0.5]])


def test_a_saver_of_one_rank_takes_no_rows_of_a_rank(size: int, tmp_path: Path) -> None:
    """It would save this rank's rows as if they were all."""
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        v, dense = sok.Variable(np.ones([6, 2]), dtype=tf.float32, name="v"), v1.get_variable("dense", [2])
        table = sok.DynamicVariable(2, name="v_rows")
        optimizer = sok.OptimizerWrapper(v1.train.AdagradOptimizer(0.1))
        ids = tf.ragged.constant([[0, 1]], tf.int64)
        of_v, of_dense = v1.gradients(tf.reduce_sum(sok.lookup_sparse(v, ids, combiners="sum") * dense), [v, dense])
        optimizer.apply_gradients([(of_v, v), (of_dense, dense)])
        session.run(v1.global_variables_initializer())
        slot = optimizer.optimizer.get_slot(v, "accumulator")
        for variables in (None, [v], {"whole": v}, [slot], [table]):
            saver = v1.train.Saver(variables)  # as a MonitoredTrainingSession makes, also where it does not save
            refused = pytest.raises(
                tf.errors.InvalidArgumentError, match=r"v.*:0.* is spread over \d ranks, and this rank"
            )
            with refused if size > 1 else contextlib.nullcontext():
                saver.save(session, str(tmp_path / "model"))
        v1.train.Saver([dense, optimizer.optimizer.get_slot(dense, "accumulator")]).save(
            session, str(tmp_path / "model")
        )


# ---- A model for any server ----


def test_a_model_is_exported_by_one_rank_that_has_all_rows(rank: int, size: int, shared_path: Path) -> None:
    spec = tf.RaggedTensorSpec([None, None], tf.int64)
    spread, alone = tf.Module(), tf.Module()
    spread.table = sok.DynamicVariable(2, "0.5", name="spread")
    alone.table = tfplugin.get_kv_variable("alone", embedding_dim=2)
    for module in (spread, alone):
        module.table.upsert(KEYS[:3], np.ones((3, 2), np.float32))
    of_spread = tf.function(lambda ids: sok.lookup_sparse(spread.table, ids, combiners="sum"), input_signature=[spec])
    of_alone = tf.function(
        lambda ids: tf.nn.embedding_lookup_sparse(alone.table, ids, None, combiner="sum"), input_signature=[spec]
    )
    for module, function, told in ((spread, of_spread, "spread over"), (alone, of_alone, "call it on rank 0 only")):
        path = shared_path / module.table.name.replace(":", "_")
        if size > 1 and (module is spread or rank > 0):
            with pytest.raises(ValueError, match=told):
                tfplugin.export_saved_model(module, path, signatures=function)
        else:
            export = tfplugin.export_saved_model(module, path, signatures=function)
            assert [table.rows for table in export.tables] == [3]
