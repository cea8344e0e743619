"""The rows nearest to a vector, exactly: by cosine, dot product or Euclidean distance, in one pass over a table.

Every row is compared. A block of rows is multiplied with all vectors at once, in the rows' own precision, on the
threads of BLAS; how far such a product can be off is known, so what could be among the nearest is known, and is
computed again in float64. So the answer is that of float64, whatever the order of the rows, and equal ones come in the
order of their keys. What is kept meanwhile is a block and the nearest rows so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from kvtools.dialects.chunk import KEYS, KEYS_AND_VALUES, Array, Columns
from kvtools.dialects.interface import TableReader
from kvtools.dialects.options import Progress
from kvtools.dialects.schema import row_bytes
from kvtools.errors import BadInputError, UsageError
from kvtools.get import read_rows, rows_of_keys
from kvtools.read_ahead import read_ahead
from kvtools.row_filter import RowFilter
from kvtools.row_norms import as_floats, rows_not_finite
from kvtools.top_rows import sortable

Metric = Literal["cosine", "dot", "l2"]
"""cosine: of the angle between both, 1 where they point the same way; dot: the product; l2: the distance."""

_CHUNK_BYTES = 1 << 22
_PRODUCTS = 1 << 22
"""How many products are made at once, at most: rows times vectors."""
_EXACT_NUMBERS = 1 << 20
_LEAST, _MOST = 1e-30, 1e30
"""Between which the square of a norm is told well enough in float32."""


@dataclass(frozen=True)
class Neighbours:
    """The nearest rows of each of q vectors, the nearest one first.

    keys       the rows' keys, [k] of each vector, q of them; fewer than k where the table has no more
    scores     cosine, dot product or distance, float64 [k] of each
    rows       the rows' numbers, int64 [k] of each
    non_finite how many rows were left out for a NaN or an infinity
    zero       how many rows of zeros were left out: they have no direction (cosine only)
    """

    table: str
    metric: Metric
    keys: tuple[Array, ...]
    scores: tuple[npt.NDArray[np.float64], ...]
    rows: tuple[npt.NDArray[np.int64], ...]
    non_finite: int
    zero: int


def metric_named(name: str) -> Metric:
    """Return the metric of this name; raises `UsageError` if there is none.

    >>> metric_named("l2")
    'l2'
    """
    if name not in get_args(Metric):
        raise UsageError(f"looking for neighbours: got the metric {name!r}, expected {', '.join(get_args(Metric))}")
    return name  # type: ignore[return-value]


def vectors_of_keys(table: TableReader, keys: Array) -> tuple[Array, Array]:
    """Return the rows of keys that a table has, as they are stored [found, dim], and which keys were found, bool [n].

    Args:
        table: the table.
        keys: integers [n].
    """
    rows = rows_of_keys(table, keys)
    found = rows >= 0
    chunks = [chunk.values for chunk in read_rows(table, rows[found], KEYS_AND_VALUES) if chunk.values is not None]
    empty = np.empty((0, table.dim), table.value_dtype)
    return np.concatenate(chunks) if chunks else empty, np.asarray(found)


def has_neighbours(vectors: Array, metric: Metric) -> npt.NDArray[np.bool_]:
    """Return which vectors [q, dim] something can be near to, bool [q]: finite ones, for cosine no zeros.

    >>> has_neighbours(np.array([[0.0, 0.0], [1.0, 0.0], [np.nan, 0.0]]), "cosine").tolist()
    [False, True, False]
    """
    usable = ~rows_not_finite(vectors)
    return np.asarray(usable & (vectors != 0).any(axis=1) if metric == "cosine" else usable)


def nearest(
    table: TableReader,
    vectors: Array,
    k: int,
    *,
    metric: Metric = "cosine",
    exclude: Array | None = None,
    where: RowFilter | None = None,
    progress: Progress | None = None,
) -> Neighbours:
    """Return the `k` rows of a table nearest to each of some vectors; of equally near ones those of the smallest keys.

    Rows with a NaN or an infinity are left out, and for cosine rows of zeros, which have no direction; both are
    counted.

    Args:
        table: the table; it is streamed once.
        vectors: finite numbers [q, dim], for cosine no zeros.
        k: how many rows for each.
        metric: what is near.
        exclude: a key for each vector that is none of its neighbours, most likely its own; of the table's type [q].
        where: which rows can be neighbours.
        progress: called as rows are read.

    Raises:
        BadInputError: the vectors have another width than the rows, or are not finite, or have no direction.
        UsageError: k is less than 1, or there is no such metric.

    Example:
        >>> from kvtools.array_table import ArrayTable
        >>> table = ArrayTable("emb", np.array([5, 6, 7]), np.float32([[1, 0], [0, 1], [1, 1]]))
        >>> found = nearest(table, np.float32([[2, 1]]), 2)
        >>> found.keys[0].tolist(), found.scores[0].round(3).tolist()
        ([7, 5], [0.949, 0.894])
    """
    doing = f"looking for neighbours in table '{table.schema.name}'"
    metric = metric_named(metric)
    vectors = np.asarray(vectors)
    if k < 1:
        raise UsageError(f"{doing}: got k {k}, expected 1 or more")
    if vectors.ndim != 2 or vectors.shape[1] != table.dim:
        shape = " x ".join(map(str, vectors.shape))
        raise BadInputError(f"{doing}: got vectors of {shape} numbers, expected rows of {table.dim}")
    if rows_not_finite(vectors).any():
        number = int(np.flatnonzero(rows_not_finite(vectors))[0])
        raise BadInputError(f"{doing}: vector {number} has a NaN or an infinity, so nothing is near it")
    exclude = None if exclude is None else np.asarray(exclude).astype(table.key_dtype)
    k = max(1, min(k, table.rows))  # room is made for as many
    search = _Search(_wide(vectors), k, metric, exclude, table.value_dtype)
    if metric == "cosine" and not search.norms.all():
        number = int(np.flatnonzero(search.norms == 0)[0])
        raise BadInputError(f"{doing}: vector {number} is all zeros, which point nowhere; see --metric dot and l2")
    columns = KEYS_AND_VALUES | (where.columns_of(table) if where else KEYS)
    first = done = 0
    if len(vectors):
        for chunk in read_ahead(table.chunks(columns, rows=_block_rows(table, columns, len(vectors)))):
            assert chunk.values is not None
            search.add(chunk.keys, chunk.values, first, where.mask(chunk) if where else None)
            first += len(chunk)
            if progress:
                progress(table.schema.name, done := done + len(chunk), table.rows)
    return search.result(table.schema.name, table.key_dtype)


def _block_rows(table: TableReader, columns: Columns, vectors: int) -> int:
    return max(1, min(_CHUNK_BYTES // row_bytes(table.schema, columns), _PRODUCTS // vectors))


class _Search:
    """The nearest rows of what was added so far. A higher score is nearer: distances are negative here."""

    def __init__(
        self, vectors: npt.NDArray[np.float64], k: int, metric: Metric, exclude: Array | None, dtype: np.dtype[Any]
    ) -> None:
        self.k, self.metric = k, metric
        self.non_finite = self.zero = 0
        # float64 rows, and integers that float32 may not hold, are multiplied in float64.
        self._float: np.dtype[Any] = as_floats(np.empty((0, 1), dtype)).dtype
        # For cosine and dot vectors of length 1 give the same order, and products of the rows' own size.
        scale = _exponents(vectors)
        self._scaled = np.ldexp(vectors, -scale[:, None])
        self._lengths = np.sqrt(np.einsum("ij,ij->i", self._scaled, self._scaled))
        with np.errstate(over="ignore"):  # a length beyond float64 is infinite
            self.norms = np.ldexp(self._lengths, scale)
        self._vectors = vectors
        units = self._scaled / np.where(self._lengths == 0, 1, self._lengths)[:, None]
        fits = (self.norms <= 1e15) if self._float == np.float32 else (self.norms <= 1e140)
        # A distance from a vector beyond that is not told by squares.
        self._squares_fit = bool(fits.all())
        self._narrow = np.ascontiguousarray((self._vectors if metric == "l2" else units).astype(self._float).T)
        # By how much a product of two vectors of length 1 is off at most: each addition and product, and rounding both.
        self._slack = (vectors.shape[1] + 8) * float(np.finfo(self._float).eps)
        self._exclude = exclude
        count = len(vectors)
        self._scores = np.full((count, k), -np.inf)
        self._keys = np.zeros((count, k), np.uint64)  # in an order that all types of keys have
        self._rows = np.full((count, k), -1, np.int64)
        self._full = np.zeros(count, np.bool_)

    def add(self, keys: Array, values: Array, first: int, kept: npt.NDArray[np.bool_] | None) -> None:
        """Compare rows: their keys [n], values [n, dim], the first one's number, and which of them count."""
        if kept is not None and not kept.all():
            at = np.flatnonzero(kept)
            keys, values = keys[at], values[at]
        else:
            at = np.arange(len(keys))
        if not len(keys):
            return
        floats = as_floats(values)
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            squares = np.einsum("ij,ij->i", floats, floats)
            ordinary = (squares >= _LEAST) & (squares <= _MOST)
            odd = np.flatnonzero(~ordinary)
            odd = odd[self._comparable(values, odd)] if len(odd) else odd
            # Rows that cannot be told by products of their own precision are compared in float64, each of them.
            which = np.repeat(np.arange(len(self._vectors)), len(odd))
            self._compare(which, np.tile(odd, len(self._vectors)), keys, values, first + at)
            if not self._squares_fit and self.metric == "l2":
                rest = np.flatnonzero(ordinary)
                which = np.repeat(np.arange(len(self._vectors)), len(rest))
                self._compare(which, np.tile(rest, len(self._vectors)), keys, values, first + at)
                return
            self._filter(floats, squares, ordinary, keys, values, first + at)

    def _filter(self, floats: Array, squares: Array, ordinary: Array, keys: Array, values: Array, rows: Array) -> None:
        """Find the rows that could be among the nearest by products in their own precision, and compare these."""
        products = floats @ self._narrow  # (n, q)
        lengths = np.sqrt(squares)
        kind = products.dtype.type
        if self.metric == "cosine":
            products /= np.where(ordinary, lengths, kind(1))[:, None]
            slack: Any = kind(self._slack)
        elif self.metric == "dot":
            slack = (lengths * kind(self._slack))[:, None]
        else:
            norms = self.norms.astype(kind)
            products *= kind(2)
            products -= squares[:, None]
            products -= np.square(norms)[None, :]
            slack = np.square(lengths[:, None] + norms[None, :]) * kind(2 * self._slack)
        edges = self._edges(products.dtype)
        if not self._full.all() and len(products) > self.k:
            # What the k-th best of these is at least, whatever was rounded: nothing below can be among the nearest.
            least = products - slack
            least[~ordinary] = -np.inf
            if self._exclude is not None:
                least[keys[:, None] == self._exclude[None, :]] = -np.inf
            bound = np.partition(least, len(least) - self.k, axis=0)[len(least) - self.k]
            edges = np.maximum(edges, bound)
        products += slack
        near = products >= edges[None, :]
        near &= ordinary[:, None]
        at, which = np.nonzero(near)
        self._compare(which, at, keys, values, rows)

    def _edges(self, dtype: np.dtype[Any]) -> Array:
        """Return what a row must reach at the least to be among the nearest, as `_filter` computes it, rounded down."""
        edges = np.where(self._full, self._scores[:, -1], -np.inf)
        if self.metric == "dot":  # products are with vectors of length 1
            edges = edges / np.where(self.norms == 0, 1, self.norms)
        elif self.metric == "l2":
            edges = -np.square(edges)
        return np.asarray(np.nextafter(edges.astype(dtype), dtype.type(-np.inf)))

    def _comparable(self, values: Array, rows: Array) -> npt.NDArray[np.bool_]:
        """Return which of these rows can be compared, and count the others."""
        wild = rows_not_finite(values[rows])
        self.non_finite += int(np.count_nonzero(wild))
        if self.metric != "cosine":
            return ~wild
        zero = ~wild & ~(values[rows] != 0).any(axis=1)
        self.zero += int(np.count_nonzero(zero))
        return np.asarray(~wild & ~zero)

    def _compare(self, which: Array, at: Array, keys: Array, values: Array, rows: Array) -> None:
        """Take rows `at` as neighbours of vectors `which`, where they are near enough."""
        step = max(1, _EXACT_NUMBERS // self._vectors.shape[1])
        for start in range(0, len(at), step):
            self._compare_some(which[start : start + step], at[start : start + step], keys, values, rows)

    def _compare_some(self, which: Array, at: Array, keys: Array, values: Array, rows: Array) -> None:
        if self._exclude is not None:
            others = np.asarray(keys[at] != self._exclude[which], np.bool_)
            which, at = which[others], at[others]
        scores = self._exact(_wide(values[at]), which)
        near = (scores >= self._scores[which, -1]) | ~self._full[which]
        which, at, scores = which[near], at[near], scores[near]
        if not len(which):
            return
        changed = np.unique(which)
        # The rows that these vectors had, and the new ones, in one order.
        had = self._rows[changed] >= 0
        of = np.concatenate([np.repeat(changed, self.k)[had.ravel()], which])
        score = np.concatenate([self._scores[changed][had], scores])
        key = np.concatenate([self._keys[changed][had], sortable(keys[at])])
        row = np.concatenate([self._rows[changed][had], rows[at]])
        order = np.lexsort((row, key, -score, of))
        of, score, key, row = of[order], score[order], key[order], row[order]
        place = np.arange(len(of)) - np.searchsorted(of, of)
        best = place < self.k
        of, place = of[best], place[best]
        self._scores[of, place], self._keys[of, place], self._rows[of, place] = score[best], key[best], row[best]
        self._full[changed] = self._rows[changed, -1] >= 0

    def _exact(self, values: npt.NDArray[np.float64], which: Array) -> npt.NDArray[np.float64]:
        """Return the scores of rows [n, dim] with the vectors `which` [n], in float64, each row by itself."""
        if self.metric == "cosine":
            # Scaled by powers of two, which round nothing, so that no square is out of range.
            scaled = np.ldexp(values, -_exponents(values)[:, None])
            lengths = np.sqrt(np.einsum("ij,ij->i", scaled, scaled))
            products = np.einsum("ij,ij->i", scaled, self._scaled[which])
            return np.asarray(np.clip(products / (lengths * self._lengths[which]), -1, 1))
        if self.metric == "dot":
            return np.asarray(np.einsum("ij,ij->i", values, self._vectors[which]))
        apart = values - self._vectors[which]
        exponents = _exponents(apart)
        scaled = np.ldexp(apart, -exponents[:, None])
        return np.asarray(-np.ldexp(np.sqrt(np.einsum("ij,ij->i", scaled, scaled)), exponents))

    def result(self, table: str, key_dtype: np.dtype[Any]) -> Neighbours:
        """Return what was found."""
        found = [row >= 0 for row in self._rows]
        keys = [_unsorted(key[there], key_dtype) for key, there in zip(self._keys, found, strict=True)]
        sign = -1.0 if self.metric == "l2" else 1.0
        scores = [sign * score[there] + 0.0 for score, there in zip(self._scores, found, strict=True)]
        rows = [row[there] for row, there in zip(self._rows, found, strict=True)]
        return Neighbours(table, self.metric, tuple(keys), tuple(scores), tuple(rows), self.non_finite, self.zero)


def _exponents(values: npt.NDArray[np.float64]) -> npt.NDArray[np.int32]:
    """Return for each row a power of two that its largest number is about as large as, int32 [n]; 0 for zeros."""
    if not values.shape[1]:
        return np.zeros(len(values), np.int32)
    return np.asarray(np.frexp(np.maximum(values.max(axis=1), -values.min(axis=1)))[1], np.int32)


def _wide(values: Array) -> npt.NDArray[np.float64]:
    return values.astype(np.float64)


def _unsorted(keys: npt.NDArray[np.uint64], dtype: np.dtype[Any]) -> Array:
    """Return what `sortable` made its numbers of."""
    return keys.astype(dtype) if dtype.kind == "u" else (keys ^ np.uint64(1 << 63)).view(np.int64).astype(dtype)
