"""Bad input: whether all ranks give it or a single one, every rank gets an error that says so, and none waits.

What is wrong on one rank is wrong on the last. After each error the tables are as before, and the next call works.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tfplugin.sok as sok
from kvtools.errors import KvtoolsError

ROWS = 6
LOOKUP_ERRORS = (ValueError, TypeError, tf.errors.InvalidArgumentError)
Gather = Callable[[Any], list[Any]]


@pytest.fixture(scope="module", autouse=True)
def _sok_started() -> None:
    sok.init()


def _tables(size: int, number: int = 2) -> list[Any]:
    """A dynamic table with some rows, a distributed static one and a localized one; rows are all [0.5, 0.5]."""
    dynamic = sok.DynamicVariable(2, "0.5", name="dynamic")
    static = sok.Variable(np.full([ROWS, 2], 0.5), dtype=tf.float32, name="static")
    localized = sok.Variable(np.full([ROWS, 2], 0.5), dtype=tf.float32, name="localized", mode=f"localized:{size - 1}")
    sok.all2all_dense_embedding(dynamic, tf.range(ROWS, dtype=tf.int64))
    return [dynamic, static, localized][:number]


def _contents(tables: list[Any]) -> list[dict[int, list[float]]]:
    """All rows of this rank."""
    found = []
    for table in tables:
        if isinstance(table, sok.DynamicVariable):
            keys, rows = sok.export(table)
            found.append(dict(zip(keys.numpy().tolist(), rows.numpy().tolist(), strict=True)))
        else:
            found.append(dict(enumerate(table.numpy().tolist())))
    return found


def _ids(lists: list[list[int]] | None = None, dtype: tf.DType = tf.int64) -> tf.RaggedTensor:
    return tf.ragged.constant([[0, 1], [], [2]] if lists is None else lists, dtype, ragged_rank=1)


def _sparse_ids() -> tf.SparseTensor:
    return _ids().to_sparse()


def _weights(of: tf.RaggedTensor, extra: int = 0, dtype: tf.DType = tf.float32) -> tf.RaggedTensor:
    lengths = of.row_lengths() + tf.constant([extra, 0, 0], tf.int64)
    return tf.RaggedTensor.from_row_lengths(tf.ones([tf.reduce_sum(lengths)], dtype), lengths)


def _look_up(tables: list[Any], **wrong: Any) -> list[tf.Tensor]:
    good = {"sp_ids": [_ids() for _ in tables], "combiners": ["sum"] * len(tables)}
    return sok.lookup_sparse(tables, **{**good, **wrong})


#: What is wrong, and what every rank is told.
LOOKUPS: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "too few ids": (lambda t: _look_up(t, sp_ids=[_ids()]), "got 2 params and 1 sp_ids"),
    "too many combiners": (lambda t: _look_up(t, combiners=["sum"] * 3), "got 2 params and 3 combiners"),
    "too few weights": (lambda t: _look_up(t, sp_weights=[None]), "got 2 params and 1 sp_weights"),
    "too few hotness": (lambda t: _look_up(t, hotness=[3]), "got 2 params and 1 hotness"),
    "unknown combiner": (lambda t: _look_up(t, combiners=["sum", "max"]), "combiner of 'static.*got 'max'"),
    "negative hotness": (lambda t: _look_up(t, hotness=[2, -1]), "hotness of 'static.*must be 0 or more, got -1"),
    "more ids than hotness": (
        lambda t: _look_up(t, sp_ids=[_ids(), _ids([[1], [3, 4, 5], []])], hotness=[2, 2]),
        "'static.*row 1 has 3 ids, expected at most its hotness, 2",
    ),
    "ids of floats": (
        lambda t: _look_up(t, sp_ids=[tf.cast(_ids(), tf.float32), _ids()]),
        "'dynamic.*has int64 keys, got ids of float32: floats have lost the digits.*int64 inputs",
    ),
    "ids of strings": (
        lambda t: _look_up(t, sp_ids=[tf.ragged.constant([["a"]]), _ids()]),
        "'dynamic.*has int64 keys, got ids of string: hash them as layers of strings do",
    ),
    "uint64 ids that int64 cannot hold": (
        lambda t: _look_up(t, sp_ids=[tf.cast(_ids([[-1]]), tf.uint64), _ids()]),
        "'dynamic.*its keys are int64, got 18446744073709551615, at place 0",
    ),
    "dense ids": (lambda t: _look_up(t, sp_ids=[tf.constant([[1]]), _ids()]), "'dynamic.*must be a SparseTensor or"),
    "weights of integers": (
        lambda t: _look_up(t, sp_weights=[None, _weights(_ids(), dtype=tf.int32)]),
        "weights of 'static.*must be floats, got int32",
    ),
    "weights of another kind": (
        lambda t: _look_up(t, sp_weights=[None, _sparse_ids().with_values([1.0, 1.0, 1.0])]),
        "weights of 'static.*must be of the type of its ids",
    ),
    "more weights than ids": (
        lambda t: _look_up(t, sp_weights=[None, _weights(_ids(), 2)]),
        "'static.*got 3 ids and 5 weights",
    ),
    "weights in other rows": (
        lambda t: _look_up(t, sp_weights=[tf.RaggedTensor.from_row_lengths(tf.ones([3]), [1, 1, 1]), None]),
        "'dynamic.*weights are of another shape than the ids: row 0 has 2 ids and 1 weights",
    ),
    "weights of other rows": (
        lambda t: _look_up(t, sp_weights=[None, tf.RaggedTensor.from_row_lengths(tf.ones([3]), [2, 1])]),
        "'static.*weights are of another shape than the ids: ids have 3 rows, weights 2",
    ),
    "weights at other places": (
        lambda t: _look_up(
            t,
            sp_ids=[_ids(), _sparse_ids()],
            sp_weights=[None, tf.SparseTensor([[0, 0], [1, 0], [2, 0]], tf.ones([3]), [3, 2])],
        ),
        r"'static.*the id at place 1 has index \[0, 1\], its weight \[1, 0\]",
    ),
    "weights with a dimension more": (
        lambda t: _look_up(t, sp_weights=[None, tf.RaggedTensor.from_row_lengths(tf.ones([3, 1]), [2, 0, 1])]),
        "weights of 'static.*have shape .batch, None. as its ids",
    ),
    "a row that there is not": (
        lambda t: _look_up(t, sp_ids=[_ids(), _ids([[0], [ROWS]])]),
        "'static.*from 0 to 5, got 6, at place 1",
    ),
}


def _raised(call: Callable[[], Any], errors: Any = LOOKUP_ERRORS) -> tuple[str, str]:
    """The kind of error, and what it says."""
    with pytest.raises(errors) as caught:
        call()
    return type(caught.value).__name__, str(caught.value)


def _check_a_good_call(tables: list[Any], before: list[Any], traced: bool = False) -> None:
    assert _contents(tables) == before
    look_up = tf.function(_look_up) if traced else _look_up
    for rows in look_up(tables):
        np.testing.assert_array_equal(rows, [[1, 1], [0, 0], [0.5, 0.5]])
    assert _contents(tables) == before


TRACED = ("too few ids", "unknown combiner", "more ids than hotness", "ids of floats", "weights in other rows")


@pytest.mark.parametrize(
    ("wrong", "traced"), [*((wrong, False) for wrong in LOOKUPS), *((wrong, True) for wrong in TRACED)]
)
def test_a_lookup_that_one_rank_gets_wrong_fails_on_all(
    wrong: str, traced: bool, rank: int, size: int, gather: Gather
) -> None:
    call, message = LOOKUPS[wrong]
    tables = _tables(size)
    before = _contents(tables)

    def step() -> Any:
        return call(tables) if rank == size - 1 else _look_up(tables)

    kind, text = _raised(tf.function(step, autograph=False) if traced else step)
    assert re.search(message, text, re.DOTALL), text
    if rank < size - 1 or kind == "InvalidArgumentError":
        assert f"failed on 1 of {size} rank" in text and f"rank {size - 1}: " in text
    assert gather(True) == [True] * size  # none waits
    _check_a_good_call(tables, before)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("wrong", TRACED[:3])
def test_a_lookup_that_all_ranks_get_wrong_fails_on_all(wrong: str, traced: bool, size: int) -> None:
    call, message = LOOKUPS[wrong]
    tables = _tables(size)
    before = _contents(tables)
    step = lambda: call(tables)  # noqa: E731
    _, text = _raised(tf.function(step, autograph=False) if traced else step)
    assert re.search(message, text, re.DOTALL), text
    _check_a_good_call(tables, before, traced)


def test_a_train_step_that_one_rank_traces_wrong_fails_on_all_and_trains_nothing(rank: int, size: int) -> None:
    """Also what comes after the lookup in the graph is built: gradients, updates, and dense variables."""
    tables = _tables(size)
    before = _contents(tables)
    dense = tf.Variable(tf.ones([2, 1]))
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))

    def step(combiners: list[str]) -> None:
        with tf.GradientTape() as tape:
            pooled = _look_up(tables, combiners=combiners)
            loss = tf.reduce_sum(tf.add_n(pooled) @ dense - tf.zeros([3, 1]))
        variables = [*tables, dense]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    wrong = ["sum", "max"] if rank == size - 1 else ["sum", "sum"]
    _, text = _raised(lambda: tf.function(step, autograph=False)(wrong))
    assert "got 'max'" in text
    np.testing.assert_array_equal(dense, tf.ones([2, 1]))
    _check_a_good_call(tables, before)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
def test_weights_of_another_shape_are_an_error_of_one_table_too(traced: bool) -> None:
    """On one rank such a lookup is that of any table."""
    (table,) = _tables(1, 1)

    def look_up(ids: Any, weights: Any) -> tf.Tensor:
        return sok.lookup_sparse(table, ids, weights, "sum")

    run = tf.function(look_up) if traced else look_up
    good = tf.RaggedTensor.from_row_lengths(tf.constant([1.0, 2.0, 3.0]), [2, 0, 1])
    np.testing.assert_array_equal(run(_ids(), good), [[1.5, 1.5], [0, 0], [1.5, 1.5]])
    for lengths in ([1, 1, 1], [2, 1]):
        wrong = tf.RaggedTensor.from_row_lengths(tf.constant([1.0, 2.0, 3.0]), lengths)
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"dynamic.*weights are of another shape than the ids"):
            run(_ids(), wrong)
    sparse = tf.SparseTensor([[0, 0], [1, 0], [2, 0]], tf.ones([3]), [3, 2])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"dynamic.*weights are of another shape than the ids"):
        run(_sparse_ids(), sparse)


def _of_rank(keys: int, rank: int, size: int) -> list[list[int]]:
    """So many keys that a rank owns."""
    return [[rank + size * number for number in range(keys)]]


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("with_others", [False, True], ids=["alone", "with others"])
@pytest.mark.parametrize("wire_dtype", [None, tf.bfloat16])
def test_keys_that_one_rank_cannot_take_fail_on_all(
    wire_dtype: Any, with_others: bool, traced: bool, rank: int, size: int, gather: Gather
) -> None:
    if size == 1 and wire_dtype is not None:
        pytest.skip("on one rank nothing travels")
    bounded = sok.DynamicVariable(2, "0.5", "hybrid", name="bounded", max_capacity=3)
    tables = [bounded, *_tables(size)] if with_others else [bounded]
    too_many, enough = _of_rank(4, size - 1, size), [[0] * 4]

    def step(ids: tf.RaggedTensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            rows = _look_up(tables, sp_ids=[ids, _ids(), _ids()][: len(tables)], wire_dtype=wire_dtype)
            loss = tf.add_n([tf.reduce_sum(one) for one in rows])
        return [*rows, *map(tf.convert_to_tensor, (one.values for one in tape.gradient(loss, tables)))]

    run = tf.function(step, autograph=False) if traced else step
    before = _contents([bounded])
    _, text = _raised(lambda: run(_ids(too_many)))
    assert f"rank {size - 1}: Key-value variable 'bounded' keeps 3 rows" in text or size == 1
    assert "4 different keys" in text
    if size > 1:
        assert f"the lookup failed on 1 of {size} ranks, so none has its rows" in text
    assert gather(True) == [True] * size  # none waits
    if rank == size - 1:
        assert _contents([bounded]) == before
    np.testing.assert_array_equal(run(_ids(enough))[0], np.full([1, bounded.dim], 2.0))  # the next call works


def test_a_filtered_lookup_that_one_rank_cannot_take_fails_on_all(rank: int, size: int, gather: Gather) -> None:
    bounded = sok.DynamicVariable(2, "0.5", "hybrid", name="filtered", max_capacity=3, filter_ratio=0.999)
    _, text = _raised(
        lambda: _look_up([bounded], sp_ids=[_ids(_of_rank(4, size - 1, size))], use_low_frequency_filter=True)
    )
    assert "'filtered' keeps 3 rows" in text and (size == 1 or f"rank {size - 1}: " in text)
    assert gather(True) == [True] * size


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("wire_dtype", [None, tf.bfloat16])
def test_a_table_that_one_rank_has_not_initialized_fails_on_all(
    wire_dtype: Any, number: int, rank: int, size: int, gather: Gather
) -> None:
    if size == 1 and wire_dtype is not None:
        pytest.skip("on one rank nothing travels")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        tables = [sok.DynamicVariable(2, "0.5", name=f"uninitialized_{i}") for i in range(number)]
        rows = _look_up(tables, sp_ids=[_ids()] * number, wire_dtype=wire_dtype)
        if rank != size - 1:
            session.run(tf.compat.v1.global_variables_initializer())
        _, text = _raised(lambda: session.run(rows), (*LOOKUP_ERRORS, tf.errors.FailedPreconditionError))
        assert "uninitialized_0" in text and (size == 1 or f"rank {size - 1}: " in text)
    assert gather(True) == [True] * size  # none waits


#: What one rank has other than the others, and what every rank is told of rank 0 and of that one.
DIFFERENT = {
    "tables": ("rank 0 has 'static.*dim 2", "has only 1 table"),
    "order": ("rank 0 has 'dynamic.*int64 keys, dim 2, float32, on all ranks, sum", "has 'static.*6 rows"),
    "name": ("rank 0 has 'dynamic", "has 'another"),
    "dim": ("rank 0 has 'dynamic.*dim 2", "has 'dynamic.*dim 3"),
    "rows": ("rank 0 has 'static.*6 rows", "has 'static.*7 rows"),
    "key dtype": ("rank 0 has 'dynamic.*int64 keys", "has 'dynamic.*int32 keys"),
    "dtype": ("rank 0 has 'dynamic.*float32", "has 'dynamic.*float16"),
    "mode": ("rank 0 has 'dynamic.*on all ranks", "has 'dynamic.*on rank 0"),
    "limit": ("rank 0 has 'dynamic", "has 'dynamic.*int64 keys, at most 9 on a rank"),
    "combiner": ("rank 0 has 'dynamic.*sum", "has 'dynamic.*mean"),
    "admission": ("rank 0 has 'dynamic.*sum", "has 'dynamic.*0.5 of new keys admitted"),
    "training": ("rank 0 has a training lookup", "has an inference lookup"),
    "wire_dtype": ("rank 0 has .*travel as float32", "has .*travel as bfloat16"),
}


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("differs", DIFFERENT)
def test_what_one_rank_looks_up_otherwise_is_told_on_every_rank(
    differs: str, traced: bool, rank: int, size: int, gather: Gather
) -> None:
    """By the hash in the exchange: none waits, and the next call works."""
    if size == 1:
        pytest.skip("for several ranks")
    tables = _tables(size)
    before = _contents(tables)
    mine: Any = differs if rank == size - 1 else None
    dynamic, static = tables
    if mine in ("name", "dim", "key dtype", "dtype", "mode", "limit", "admission"):
        dynamic = sok.DynamicVariable(
            3 if mine == "dim" else 2,
            key_type=tf.int32 if mine == "key dtype" else tf.int64,
            dtype=tf.float16 if mine == "dtype" else tf.float32,
            name="another" if mine == "name" else tables[0].name,
            mode="localized:0" if mine == "mode" else None,
            filter_ratio=0.5,
        )
        dynamic.row_limit = 9 if mine == "limit" else -1
    if mine == "rows":
        static = sok.Variable(np.full([7, 2], 0.5), dtype=tf.float32, name=tables[1].name)
    own = {"tables": [dynamic], "order": [static, dynamic]}.get(mine, [dynamic, static])

    def step() -> Any:
        return _look_up(
            own,
            combiners=["mean" if mine == "combiner" else "sum"] * len(own),
            use_low_frequency_filter=mine == "admission",
            training=mine != "training",
            wire_dtype=tf.bfloat16 if mine == "wire_dtype" else None,
        )

    call = tf.function(step, autograph=False) if traced else step
    for _ in range(2):  # the second time all know what the others look up, and no text comes with the keys
        kind, text = _raised(call)
        assert kind == "InvalidArgumentError" and "All ranks must look up the same tables" in text, text
        of_first, of_other = DIFFERENT[differs]
        assert re.search(f"{of_first}.*, rank {size - 1} {of_other}", text, re.DOTALL), text
    assert gather(True) == [True] * size  # none waits
    _check_a_good_call(tables, before)


@pytest.mark.parametrize("bad", ["strings", "dense ids of floats", "ragged"])
def test_a_plain_lookup_that_one_rank_gets_wrong_fails_on_all(bad: str, rank: int, size: int) -> None:
    tables = _tables(size)
    before = _contents(tables)
    ids: Any = tf.constant([[0, 1], [2, 5]], tf.int64)
    wrong = {
        "strings": tf.constant([["a"]]),
        "dense ids of floats": tf.constant([[1.0]]),
        "ragged": tf.cast(_ids(), tf.float32),
    }[bad]
    asked = wrong if rank == size - 1 else ids
    _, text = _raised(lambda: sok.all2all_dense_embedding(tables[1], asked))
    assert re.search("'static.*has int64 keys, got ids of", text)
    _, text = _raised(tf.function(lambda: sok.all2all_dense_embedding(tables[1], asked), autograph=False))
    assert re.search("'static.*has int64 keys, got ids of", text)
    assert _contents(tables) == before
    np.testing.assert_array_equal(sok.all2all_dense_embedding(tables[1], ids), np.full([2, 2, 2], 0.5))


#: Layers, keys that they take, keys that they do not, and what every rank is told.
LAYERS: dict[str, tuple[Callable[[], Any], Any, Any, str]] = {
    "shape": (
        lambda: sok.All2AllDenseEmbedding(8, 2, 2, 2, embedding_initializer="ones", name="plain"),
        tf.constant([[[1, 2], [3, 4]]], tf.int64),
        tf.constant([[[1, 2, 3]]], tf.int64),
        r"'plain': inputs must be of shape \(None, 2, 2\)",
    ),
    "floats": (
        lambda: sok.All2AllDenseEmbedding(8, 2, 2, 2, embedding_initializer="ones", name="plain"),
        tf.constant([[[1, 2], [3, 4]]], tf.int64),
        tf.constant([[[1.0, 2.0], [3.0, 4.0]]]),
        "'plain': keys must be int64, got float32",
    ),
    "dense": (
        lambda: sok.DistributedEmbedding("sum", 8, 2, 2, 2, embedding_initializer="ones", name="pooled"),
        _ids([[1], [2]]),
        tf.constant([[1], [2]], tf.int64),
        "'pooled' wants a SparseTensor or RaggedTensor of keys",
    ),
    "slots": (
        lambda: sok.DistributedEmbedding("sum", 8, 2, 2, 2, embedding_initializer="ones", name="pooled"),
        _ids([[1], [2]]),
        _ids([[1], [2], [3]]),
        "'pooled': inputs must have 2 rows for each sample .slot_num., got",
    ),
}


@pytest.mark.parametrize("how", ["eager", "tf.function", "unknown batch"])
@pytest.mark.parametrize("wrong", LAYERS)
def test_keys_of_a_layer_that_one_rank_gets_wrong_fail_on_all(
    wrong: str, how: str, rank: int, size: int, gather: Gather
) -> None:
    make, good, bad, message = LAYERS[wrong]
    if how == "unknown batch" and wrong != "slots":
        pytest.skip("the trace tells")
    layer = make()

    def step(keys: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = layer(keys)
            loss = tf.reduce_sum(rows)
        tf.convert_to_tensor(tape.gradient(loss, layer.embedding_variable).values)
        return rows

    signature = [tf.RaggedTensorSpec([None, None], tf.int64)] if how == "unknown batch" else None
    run = step if how == "eager" else tf.function(step, autograph=False, input_signature=signature)
    _, text = _raised(lambda: run(bad if rank == size - 1 else good))
    assert re.search(message, text, re.DOTALL), text
    assert size == 1 or rank == size - 1 or f"failed on 1 of {size} ranks" in text
    assert gather(True) == [True] * size  # none waits
    np.testing.assert_array_equal(run(good), tf.ones_like(run(good)))
    assert layer.embedding_variable.size.numpy()[0] <= 4


@pytest.mark.parametrize("mode", ["localized:9", "localized:-1", "localized", "everywhere"])
def test_a_mode_that_there_is_not_is_told_on_every_rank(mode: str, size: int) -> None:
    message = f"names rank 9, but there are .*rank.* {size - 1}" if mode == "localized:9" else f"got '{mode}'"
    if size == 1:
        message = message.replace("rank.* 0", "rank 0")
    with pytest.raises(ValueError, match=message):
        sok.DynamicVariable(2, mode=mode)
    with pytest.raises(ValueError, match=message):
        sok.Variable(np.ones([4, 2]), mode=mode)
    _check_a_good_call(tables := _tables(size), _contents(tables))


# ---- Files -----------------------------------------------------------------------------------------------------------

FILE_ERRORS = (ValueError, TypeError, OSError, KvtoolsError, RuntimeError)


def _check_told(text: str, rank: int, size: int, doing: str) -> None:
    """A rank on which nothing was wrong is told where, and what."""
    if rank < size - 1:
        assert text.startswith(doing) and f"failed on 1 of {size} ranks" in text and f"rank {size - 1}: " in text, text


@pytest.fixture
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tfplugin.sok.shared_folder.SECONDS_TO_APPEAR", 0.2)


@pytest.mark.usefixtures("_no_wait")
def test_a_folder_that_cannot_be_written_is_told_on_every_rank(
    rank: int, size: int, shared_path: Path, gather: Gather
) -> None:
    tables = _tables(size, 3)
    before = _contents(tables)
    file = shared_path / "file"
    file.write_text("here")
    checkpoint = sok.Checkpoint(tables=tables)
    errors = (*FILE_ERRORS, tf.errors.OpError)
    for write in (lambda path: sok.dump(path, tables), lambda path: checkpoint.write(str(path / "model"))):
        _, text = _raised(lambda write=write: write(file / "below"), errors)
        assert "not a directory" in text.lower() and "file" in text, text
        if size > 1:  # the last rank has other folders than the others
            own = shared_path / ("own" if rank == size - 1 else "shared")
            own.mkdir(exist_ok=True)
            _, text = _raised(lambda write=write, own=own: write(own), errors)
            assert f"rank {size - 1} does not see what rank 0 wrote" in text and "all ranks share" in text, text
    gather("failed")
    assert file.read_text() == "here"
    assert not list(shared_path.glob("*/*"))
    sok.dump(shared_path / "good", tables)
    _check_a_good_call(tables, before)


@pytest.mark.parametrize("everywhere", [False, True], ids=["on one rank", "everywhere"])
@pytest.mark.parametrize("column", ["dynamic_0-weight", "static_0-key", "localized_0-weight"])
def test_a_truncated_dump_is_told_on_every_rank(
    column: str, everywhere: bool, rank: int, size: int, shared_path: Path, gather: Gather
) -> None:
    tables = _tables(size, 3)
    for name in ("whole", "cut"):
        sok.dump(shared_path / name, tables)
    if rank == 0:
        os.truncate(shared_path / "cut" / column, (shared_path / "cut" / column).stat().st_size - 4)
    gather("cut")
    tables[1].assign(tables[1] * 3)
    before = _contents(tables)
    path = shared_path / ("cut" if everywhere or rank == size - 1 else "whole")
    _, text = _raised(lambda: sok.load(path, tables), FILE_ERRORS)
    assert column in text and "truncated" in text, text
    if not everywhere:
        _check_told(text, rank, size, "sok.load from '")
    assert _contents(tables) == before
    sok.load(shared_path / "whole", tables)
    _check_a_good_call(tables, _contents(tables))


def test_a_truncated_checkpoint_is_told_on_every_rank(rank: int, size: int, shared_path: Path, gather: Gather) -> None:
    if size == 1:
        pytest.skip("TensorFlow's own")
    tables = _tables(size, 3)
    checkpoint = sok.Checkpoint(tables=tables)
    for name in ("whole", "cut"):
        (shared_path / name).mkdir(exist_ok=True)
        checkpoint.write(str(shared_path / name / "model"))
    data = shared_path / "cut" / "model.data-00000-of-00001"
    if rank == 0:
        data = sorted((shared_path / "cut").glob("model.data-*"))[-1]
        os.truncate(data, data.stat().st_size - 1)
    gather("cut")
    before = _contents(tables)
    for everywhere in (False, True):
        name = "cut" if everywhere or rank == size - 1 else "whole"
        _, text = _raised(lambda name=name: checkpoint.read(str(shared_path / name / "model")), FILE_ERRORS)
        assert "model.data-" in text, text
        if not everywhere:
            _check_told(text, rank, size, "sok.Checkpoint: restoring '")
        assert _contents(tables) == before
    checkpoint.read(str(shared_path / "whole" / "model")).assert_consumed()
    _check_a_good_call(tables, before)


def test_ranks_that_restore_different_checkpoints_are_told(rank: int, size: int, shared_path: Path) -> None:
    if size == 1:
        pytest.skip("for several ranks")
    tables = _tables(size)
    checkpoint = sok.Checkpoint(tables=tables)
    first, second = (checkpoint.save(str(shared_path / "model")) for _ in range(2))
    for mine in (None, second):
        path = mine if rank == size - 1 else first
        _, text = _raised(lambda path=path: checkpoint.restore(path), FILE_ERRORS)
        assert "every rank must restore the same checkpoint" in text and f"rank {size - 1}: {mine or 'none'}" in text
    checkpoint.restore(None)
    checkpoint.restore(second).assert_consumed()
    _check_a_good_call(tables, _contents(tables))


@pytest.mark.parametrize("wrong", ["path", "variable", "order", "optimizers"])
def test_a_dump_that_one_rank_calls_wrongly_fails_on_all(wrong: str, rank: int, size: int, shared_path: Path) -> None:
    if wrong == "order" and size == 1:
        pytest.skip("for several ranks")
    tables = _tables(size, 3)
    before = _contents(tables)
    sgd = [sok.OptimizerWrapper(tf.keras.optimizers.SGD())] * 2
    calls: dict[str, tuple[list[Any], str]] = {
        "path": ([None, tables], "NoneType"),
        "variable": (
            [shared_path / "d", [*tables, tf.Variable([1.0])]],
            "expected sok.DynamicVariable or sok.Variable",
        ),
        "order": ([shared_path / "d", tables[::-1]], "every rank must call it with the same variables"),
        "optimizers": ([shared_path / "d", tables, sgd], "one optimizer is dumped or loaded at a time, got 2"),
    }
    arguments, message = calls[wrong] if rank == size - 1 else ([shared_path / "d", tables], calls[wrong][1])
    _, text = _raised(lambda: sok.dump(*arguments), FILE_ERRORS)
    assert message in text, text
    assert not (shared_path / "d").exists()
    if wrong != "order":
        _check_told(text, rank, size, "sok.dump to '")
        _, text = _raised(lambda: sok.load(*arguments), FILE_ERRORS)
    _check_a_good_call(tables, before)


@pytest.mark.parametrize("differs", ["rows", "mode", "dimension"])
def test_variables_that_differ_on_one_rank_are_told(differs: str, rank: int, size: int, shared_path: Path) -> None:
    if size == 1:
        pytest.skip("for several ranks")
    other = differs if rank == size - 1 else ""
    mode = "localized:0" if other == "mode" else None
    static = sok.Variable(np.ones([6 if other == "rows" else 5, 2]), name="static", mode=mode)
    dynamic = sok.DynamicVariable(3 if other == "dimension" else 2, name="dynamic", mode=mode)
    for save in (
        lambda: sok.dump(shared_path / "d", [static, dynamic]),
        lambda: sok.Checkpoint(static=static, dynamic=dynamic).write(str(shared_path / "model")),
    ):
        _, text = _raised(save, FILE_ERRORS)
        assert "every rank must call it with the same" in text and f"rank {size - 1} " in text, text
    assert not list(shared_path.iterdir())


def test_an_incremental_dump_that_one_rank_calls_wrongly_fails_on_all(rank: int, size: int) -> None:
    tables = _tables(size)
    wrong: list[tuple[Any, Any, str]] = [
        (tables[1], 0, "wants a sok.DynamicVariable"),
        (tables[0], "yesterday", "must be a datetime.datetime or seconds"),
        (tables[0], [0, 0], "got 1 variables and 2 thresholds"),
    ]
    for variable, since, message in wrong:
        arguments = (variable, since) if rank == size - 1 else (tables[0], 0)
        _, text = _raised(lambda arguments=arguments: sok.incremental_model_dump(*arguments), FILE_ERRORS)
        assert message in text, text
        _check_told(text, rank, size, "sok.incremental_model_dump")
    if size > 1:
        asked = [tables[0]] * (2 if rank == size - 1 else 1)
        _, text = _raised(lambda: sok.incremental_model_dump(asked, 0), FILE_ERRORS)
        assert "every rank must call it with the same variables" in text
    keys, _ = sok.incremental_model_dump(tables[0], 0)
    assert sorted(keys[0].tolist()) == list(range(ROWS))
