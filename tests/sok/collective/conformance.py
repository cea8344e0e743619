"""Tables over the ranks beside dense ones on each rank alone: stock TensorFlow says what training must give.

Every rank knows the whole global batch. It trains its share of it through sok, and all of it through a dense
`tf.Variable` that no other rank has a part in: both must end with the same rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import tfplugin.sok as sok

ROWS, SAMPLES = 24, 7
KINDS = ("distributed", "localized", "hbm", "hybrid")
_INT64 = np.iinfo(np.int64)


@dataclass(frozen=True)
class Batch:
    """Samples with any number of ids each: `ids` [n] are numbers of dense rows."""

    ids: np.ndarray
    lengths: np.ndarray
    weights: np.ndarray

    def share(self, rank: int, size: int) -> Batch:
        """The samples of a rank: blocks of unequal sizes."""
        first, last = samples_of(rank, size)
        ends = np.concatenate([[0], np.cumsum(self.lengths)])
        ids = slice(ends[first], ends[last])
        return Batch(self.ids[ids], self.lengths[first:last], self.weights[ids])

    def ragged(self, keys: np.ndarray) -> tf.RaggedTensor:
        """[samples, None]: the keys of the rows."""
        return tf.RaggedTensor.from_row_lengths(tf.constant(keys[self.ids]), tf.constant(self.lengths), validate=False)

    def ragged_weights(self, dtype: tf.DType) -> tf.RaggedTensor:
        """[samples, None]"""
        return tf.RaggedTensor.from_row_lengths(
            tf.constant(self.weights, dtype), tf.constant(self.lengths), validate=False
        )


def samples_of(rank: int, size: int) -> tuple[int, int]:
    """First sample of a rank, and the first that is no longer one of its."""
    return SAMPLES * rank // size, SAMPLES * (rank + 1) // size


def random_batch(rng: np.random.Generator, every_row: bool) -> Batch:
    """A global batch with duplicates and at least one empty sample; on demand with every row in it."""
    extra = rng.integers(ROWS, size=10)
    ids = np.concatenate([rng.permutation(ROWS), extra]) if every_row else extra
    odds = rng.dirichlet(np.ones(SAMPLES))
    odds[rng.integers(SAMPLES)] = 0
    lengths = rng.multinomial(len(ids), odds / odds.sum()).astype(np.int64)
    return Batch(rng.permutation(ids), lengths, rng.uniform(0.5, 1.5, len(ids)))


@dataclass(frozen=True)
class Table:
    """A variable of sok, and which key of it stands for which dense row."""

    variable: Any
    keys: np.ndarray
    initial: np.ndarray

    def held(self, rank: int, size: int) -> np.ndarray:
        """The dense rows that a rank holds, in order."""
        if self.variable.target_gpu >= 0:
            return np.arange(ROWS if rank == self.variable.target_gpu else 0)
        return np.flatnonzero(self.keys % size == rank)

    def local_rows(self, rank: int, size: int) -> np.ndarray:
        """What the variable has for them; there must be no others."""
        held = self.held(rank, size)
        if not isinstance(self.variable, sok.DynamicVariable):
            return self.variable.numpy()
        keys, rows = (tensor.numpy() for tensor in sok.export(self.variable))
        at = {key: number for number, key in enumerate(keys.tolist())}
        assert sorted(at) == sorted(self.keys[held].tolist())
        return rows[[at[key] for key in self.keys[held].tolist()]]


def make_table(
    kind: str, rank: int, size: int, dim: int, dtype: tf.DType = tf.float32, name: str | None = None
) -> Table:
    """A table of one of `KINDS`; it starts from the same random rows whatever its kind."""
    rng = np.random.default_rng(dim)
    initial = rng.uniform(-0.5, 0.5, [ROWS, dim]).astype(dtype.as_numpy_dtype)
    if kind == "distributed":
        return Table(sok.Variable(initial, dtype=dtype), np.arange(ROWS), initial)
    if kind == "localized":
        return Table(sok.Variable(initial, dtype=dtype, mode=f"localized:{size - 1}"), np.arange(ROWS), initial)
    near = np.concatenate([np.arange(-8, 8), [_INT64.min, _INT64.min + 1, _INT64.max - 1, _INT64.max]])
    keys = np.concatenate([near, rng.integers(2**40, 2**62, ROWS - len(near))])
    table = Table(sok.DynamicVariable(dim, "random", kind, dtype=dtype, name=name), keys, initial)
    held = table.held(rank, size)
    sok.assign(table.variable, keys[held], initial[held])
    return table


def train(
    tables: Sequence[Table],
    combiners: Sequence[str],
    optimizer: Any,
    batches: Sequence[Sequence[Batch]],
    rank: int,
    size: int,
    *,
    weighted: Sequence[bool] = (),
    traced: bool = True,
) -> None:
    """Trains this rank's share of the batches: for each step there is a batch for each table, which may be weighted."""

    def look_up(ids: list[Any], weights: list[Any]) -> list[tf.Tensor]:
        return sok.lookup_sparse([table.variable for table in tables], ids, _one_each(weights, weighted), combiners)

    first, last = samples_of(rank, size)
    shares = [[batch.share(rank, size) for batch in step] for step in batches]
    step = _step([table.variable for table in tables], look_up, optimizer)
    keys = [table.keys for table in tables]
    if traced:
        step = tf.function(step, autograph=False, input_signature=_signature(tables, weighted))
    _run(step, tables, keys, shares, weighted, first, last)


def reference(
    tables: Sequence[Table],
    combiners: Sequence[str],
    optimizer: Any,
    batches: Sequence[Sequence[Batch]],
    *,
    weighted: Sequence[bool] = (),
) -> list[np.ndarray]:
    """Trains dense variables with the whole of each batch by stock TensorFlow alone, and returns their rows."""
    dense = [tf.Variable(table.initial) for table in tables]

    def look_up(ids: list[Any], weights: list[Any]) -> list[tf.Tensor]:
        pooled, weights = [], _one_each(weights, weighted)
        for number, variable in enumerate(dense):
            one = tf.nn.embedding_lookup_sparse(
                variable, ids[number], weights and weights[number], combiner=combiners[number]
            )
            pooled.append(tf.pad(one, [[0, SAMPLES - tf.shape(one)[0]], [0, 0]]))  # it drops empty samples at the end
        return pooled

    step = tf.function(
        _step(dense, look_up, optimizer, dense_gradients=True),
        autograph=False,
        input_signature=_signature(tables, weighted),
    )
    _run(step, tables, [np.arange(ROWS)] * len(tables), batches, weighted, 0, SAMPLES)
    return [variable.numpy() for variable in dense]


def _step(variables: Sequence[Any], look_up: Any, optimizer: Any, dense_gradients: bool = False) -> Any:
    def step(ids: list[Any], weights: list[Any], targets: list[tf.Tensor]) -> None:
        with tf.GradientTape() as tape:
            pooled = look_up(ids, weights)
            losses = [tf.nn.l2_loss(one - target) for one, target in zip(pooled, targets, strict=True)]
            loss = tf.add_n(losses)
        gradients = tape.gradient(loss, variables)
        if dense_gradients:  # Keras optimizers count equal rows of IndexedSlices more than once
            gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    return step


def _one_each(weights: Sequence[Any], weighted: Sequence[bool]) -> list[Any] | None:
    """The weights of the weighted tables, and None for each of the others."""
    given = iter(weights)
    return [next(given) if has_weights else None for has_weights in weighted] or None


def _signature(tables: Sequence[Table], weighted: Sequence[bool]) -> list[Any]:
    """Of a step: batches differ in all their sizes, and one trace must do for them."""
    dtypes = [table.variable.dtype for table in tables]
    return [
        [tf.RaggedTensorSpec([None, None], table.keys.dtype) for table in tables],
        [tf.RaggedTensorSpec([None, None], dtype) for dtype in itertools.compress(dtypes, weighted)],
        [tf.TensorSpec([None, table.initial.shape[1]], table.variable.dtype) for table in tables],
    ]


def _run(
    step: Any,
    tables: Sequence[Table],
    keys: Sequence[np.ndarray],
    batches: Sequence[Sequence[Batch]],
    weighted: Sequence[bool],
    first: int,
    last: int,
) -> None:
    rng = np.random.default_rng(99)
    dtypes = [table.variable.dtype for table in tables]
    for of_tables in batches:
        whole = [rng.uniform(-0.5, 0.5, [SAMPLES, table.initial.shape[1]]) for table in tables]
        step(
            [batch.ragged(key) for batch, key in zip(of_tables, keys, strict=True)],
            [
                batch.ragged_weights(dtype)
                for batch, dtype in itertools.compress(zip(of_tables, dtypes, strict=True), weighted)
            ],
            [tf.constant(target[first:last], dtype) for target, dtype in zip(whole, dtypes, strict=True)],
        )
