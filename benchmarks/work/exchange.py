"""Look ids up in many tables that the ranks share, with or without the gradient and its apply.

case: tables, rows (of each), dim, samples (of a rank), hotness (ids of a sample), ids (how they are drawn), batches,
ranks, step (whether there is a gradient, applied by SGD), way (``one call`` for all tables; ``a call each``;
``over Horovod``: one call that does not go through memory which the ranks share;
``alltoall``: no lookup, only the alltoalls of one call's messages, one after the other); also wire_dtype (what rows
travel in), calls (of so many, each of some of the tables), own_batches (whether sides differ in them), dense (layers of
a dense part that does not wait for the lookup; with ``dense only`` there is no lookup). Each rank has ids of its own;
those of rank 0 are the same where it is the only one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import ids as id_batches
import numpy as np
import tensorflow as tf
from work.prepared import Prepared

#: Words of a message before its counts and keys, once all ranks know what is looked up (exchange_message.h).
HEADER_WORDS = 4
#: So small that rows stay what they are for any number of steps.
_RATE = 1e-9
#: Of a layer of the dense part.
_WIDTH = 256
_numbers = itertools.count()


def ids_of(rank: int, case: dict[str, Any]) -> list[np.ndarray]:
    """Ids [tables, samples * hotness] of each batch of a rank."""
    rng = np.random.default_rng([11, rank])
    count = case["samples"] * case["hotness"]
    return [
        np.stack([id_batches.draw(case["ids"], case["rows"], count, rng) for _ in range(case["tables"])])
        for _ in range(case["batches"])
    ]


def rows_of(keys: np.ndarray, dim: int) -> np.ndarray:
    """What the tables are filled with: [*keys.shape, dim], different for different keys."""
    return np.broadcast_to((keys % 1009 / 1009.0)[..., np.newaxis], [*keys.shape, dim]).astype(np.float32)


def asked_keys(ids: np.ndarray, ranks: int) -> list[int]:
    """How many different keys of all tables a rank's ids ask each rank for."""
    different = [np.unique(of_table) for of_table in ids]
    return [sum(int(np.count_nonzero(keys % ranks == rank)) for keys in different) for rank in range(ranks)]


@contextlib.contextmanager
def prepare(library: Any, case: dict[str, Any]) -> Iterator[Prepared]:
    """Fills the tables and yields the lookup, once it agrees with NumPy."""
    from tfplugin import ranks

    if case["way"] == "alltoall":
        yield _alltoalls(case, ranks.rank(), ranks.size())
        return
    case = {"dense": 0, **case}
    if case["way"] == "dense only":
        yield _dense_only(case)
        return
    batches = ids_of(ranks.rank(), case)
    look_up = _look_up(case, _tables(case, ranks.rank(), ranks.size()))
    tensors = [[tf.constant(ids) for ids in batch] for batch in batches]
    for batch, ids in zip(tensors, batches, strict=True):
        with _over_horovod() if case["way"] == "over Horovod" else contextlib.nullcontext():
            found = np.stack(look_up(batch)[: case["tables"]])  # traced in the first turn
        expected = rows_of(ids, case["dim"])
        expected = expected.reshape(case["tables"], case["samples"], case["hotness"], case["dim"]).mean(axis=2)
        if found.shape != expected.shape or not np.allclose(found, expected, atol=2e-3 if _wire(case) else 1e-4):
            raise AssertionError(f"a lookup gave {found.shape}, mean {found.mean()}, expected {expected.mean()}")
    turn = itertools.cycle(tensors)
    # Where sides have other batches there is nothing to compare: each agrees with NumPy.
    check = None if case.get("own_batches") else float(np.mean(rows_of(batches[0], 1)))
    yield Prepared(lambda: look_up(next(turn)), check=check)


@contextlib.contextmanager
def _over_horovod() -> Iterator[None]:
    """What is traced in it exchanges as if the ranks were on several machines."""
    from tfplugin import ranks

    world = ranks.current()
    world._shares_memory, before = False, world._shares_memory
    try:
        yield
    finally:
        world._shares_memory = before


def _tables(case: dict[str, Any], rank: int, size: int) -> list[Any]:
    from tfplugin import sok

    number = next(_numbers)
    keys = np.arange(rank, case["rows"], size)
    tables = [sok.DynamicVariable(case["dim"], name=f"exchange_{number}_{t}") for t in range(case["tables"])]
    for table in tables:
        sok.assign(table, keys, rows_of(keys, case["dim"]))
    return tables


def _look_up(case: dict[str, Any], tables: list[Any]) -> Callable[[list[tf.Tensor]], list[tf.Tensor]]:
    from tfplugin import sok

    dense = _Dense(case["dense"], case["samples"])
    splits = tf.range(0, (case["samples"] + 1) * case["hotness"], case["hotness"], dtype=tf.int64)
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(_RATE))

    def forward(ids: list[tf.Tensor]) -> list[tf.Tensor]:
        ragged = [tf.RaggedTensor.from_row_splits(values, splits, validate=False) for values in ids]
        calls = len(tables) if case["way"] == "a call each" else case.get("calls", 1)
        pooled: list[tf.Tensor] = []
        for own in np.array_split(np.arange(len(tables)), calls):
            asked = [tables[t] for t in own], [ragged[t] for t in own]
            pooled += sok.lookup_sparse(*asked, combiners=["mean"] * len(own), wire_dtype=_wire(case))
        return pooled

    def step(ids: list[tf.Tensor]) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            pooled = forward(ids)
            loss = tf.add_n([tf.nn.l2_loss(rows) for rows in [*pooled, *dense()]])
        gradients = tape.gradient(loss, [*tables, *dense.weights])
        optimizer.apply_gradients(zip(gradients[: len(tables)], tables, strict=True))
        return pooled if not dense.weights else [*pooled, *gradients[len(tables) :]]

    return tf.function(step if case["step"] else forward)


class _Dense:
    """Layers whose input is not what was looked up."""

    def __init__(self, layers: int, samples: int) -> None:
        rng = np.random.default_rng(2)
        scale = np.sqrt(2 / _WIDTH)
        self._inputs = tf.constant(rng.normal(size=[samples, _WIDTH]), tf.float32)
        self.weights = [
            tf.Variable(rng.normal(scale=scale, size=[_WIDTH] * 2), dtype=tf.float32) for _ in range(layers)
        ]

    def __call__(self) -> list[tf.Tensor]:
        """What comes out; nothing where there are no layers."""
        rows = self._inputs
        for weights in self.weights:
            rows = tf.nn.relu(rows @ weights)
        return [rows] if self.weights else []


def _dense_only(case: dict[str, Any]) -> Prepared:
    dense = _Dense(case["dense"], case["samples"])

    @tf.function
    def step() -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.nn.l2_loss(dense()[0])
        return tape.gradient(loss, dense.weights)

    step()
    return Prepared(step)


def _wire(case: dict[str, Any]) -> str | None:
    return case.get("wire_dtype")


def _alltoalls(case: dict[str, Any], rank: int, size: int) -> Prepared:
    import horovod.tensorflow as hvd

    # By batch: who asks whom for how many keys.
    of_ranks = [[asked_keys(ids, size) for ids in ids_of(asking, case)] for asking in range(size)]
    messages = []
    for batch in range(case["batches"]):
        asked = [of_ranks[asking][batch] for asking in range(size)]
        words = np.array([HEADER_WORDS + case["tables"] + keys for keys in asked[rank]], np.int32)
        elements = np.array([asked[asking][rank] * case["dim"] for asking in range(size)], np.int32)
        messages.append(
            tuple(
                tf.constant(part)
                for part in (np.zeros(words.sum(), np.int64), words, np.zeros(elements.sum(), np.float32), elements)
            )
        )

    @tf.function
    def exchange(keys: tf.Tensor, words: tf.Tensor, rows: tf.Tensor, elements: tf.Tensor) -> list[tf.Tensor]:
        got_keys, _ = hvd.alltoall(keys, splits=words, name="bare.keys")
        with tf.control_dependencies([got_keys]):
            got_rows, got_elements = hvd.alltoall(rows, splits=elements, name="bare.rows")
        if not case["step"]:
            return [got_keys, got_rows]
        with tf.control_dependencies([got_rows]):
            gradient, _ = hvd.alltoall(got_rows, splits=got_elements, name="bare.gradient")
        return [got_keys, got_rows, gradient]

    for message in messages:
        exchange(*message)
    turn = itertools.cycle(messages)
    return Prepared(lambda: exchange(*next(turn)))
