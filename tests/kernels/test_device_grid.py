"""The same operations on the CPU's table and on a table in device memory leave the same rows.

Every operation over every key type, value type and a range of widths: on the CPU's threads and, where there are a GPU
and CuPy or PyTorch, there, too.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from device_arrays import DEVICES, Pair, arrays_on, assert_same, device_table_module
from optimizer_cases import CASES, NAMES, hyperparameters
from table_dtypes import KEY_DTYPES, extreme_keys

from kvtools._kvtable import optimizers

device_table_module()

UNIFORM = {"kind": "uniform", "low": -1.0, "high": 1.0, "seed": 3}
DIMS = [1, 3, 8, 64]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


def test_the_grid_runs_on_a_gpu_too():
    arrays_on("cuda")


@pytest.fixture(params=DIMS, ids=lambda dim: f"dim{dim}")
def dim(request: pytest.FixtureRequest) -> int:
    return request.param


def rows_of(rng: np.random.Generator, n: int, width: int, dtype: np.dtype) -> np.ndarray:
    """Small numbers that every value type holds exactly, as it does their sums."""
    return rng.integers(-8, 8, (n, width)).astype(dtype)


def filled(device: str, key_dtype: np.dtype, value_dtype: np.dtype, dim: int, pool: np.ndarray, **options) -> Pair:
    """Half of the pool is there, with several stamps."""
    slots = [("m", dim, "copy_value"), ("v", 3, "constant", 0.25)]
    pair = Pair(device, key_dtype, value_dtype, dim, slots, **{"initializer": UNIFORM} | options)
    pair.remember(pool)
    rng = np.random.default_rng(dim)
    for version, end in enumerate((len(pool) // 2, len(pool) // 3, len(pool) // 5), 1):
        keys, rows = pool[:end], rows_of(rng, end, dim, value_dtype)
        for table, put in ((pair.cpu, np.asarray), (pair.table, pair.put)):
            table.upsert(put(keys), put(rows), frequency=2, version=version)
    return pair


def batches(pool: np.ndarray) -> list[np.ndarray]:
    rng = np.random.default_rng(len(pool))
    extremes = extreme_keys(pool.dtype)
    return [pool[:0], pool[:1], rng.choice(pool, 300), rng.permutation(pool), np.tile(extremes, 9)]


# ---- Operations: each does the same to both tables, and compares what comes back


def gathers(pair: Pair, keys: np.ndarray, rng: np.random.Generator) -> None:
    shape, there = (len(keys), pair.dim), pair.put(keys)
    defaults = rows_of(rng, 7, pair.dim, pair.value_dtype)
    for missing in ("zeros", "initial", defaults):
        how = {"defaults": pair.put(missing)} if missing is defaults else {"missing": missing}
        found = np.zeros(len(keys), bool)
        expected = pair.cpu.gather(keys, missing, found=found)
        out, flags = pair.read(
            lambda out, found, how=how: pair.table.gather(there, out, found=found, **how),
            out=(pair.value_dtype, shape),
            found=(bool, (len(keys),)),
        )
        assert_same(out, expected, pair.device)
        np.testing.assert_array_equal(flags, found)


def gathers_and_inserts(pair: Pair, keys: np.ndarray, rng: np.random.Generator) -> None:
    there, new = pair.put(keys), np.zeros(len(keys), bool)
    distinct = len(np.unique(keys)) == len(keys)
    expected = pair.cpu.gather_or_insert(keys, frequency=3, version=9, inserted=new)
    out, inserted = pair.read(
        lambda out, inserted: pair.table.gather_or_insert(there, out, 3, 9, inserted, distinct),
        out=(pair.value_dtype, (len(keys), pair.dim)),
        inserted=(bool, (len(keys),)),
    )
    assert_same(out, expected, pair.device)
    np.testing.assert_array_equal(inserted, new)


def gathers_columns(pair: Pair, keys: np.ndarray, rng: np.random.Generator) -> None:
    there, found = pair.put(keys), np.zeros(len(keys), bool)
    expected = pair.cpu.gather_columns(keys, ["v", "value"], found=found)
    *columns, flags = pair.read(
        lambda v, value, found: pair.table.gather_columns(there, {"v": v, "value": value}, found=found),
        v=(pair.value_dtype, (len(keys), 3)),
        value=(pair.value_dtype, (len(keys), pair.dim)),
        found=(bool, (len(keys),)),
    )
    for got, column in zip(columns, expected, strict=True):
        assert_same(got, column, pair.device)
    np.testing.assert_array_equal(flags, found)


def finds_pointers(pair: Pair, keys: np.ndarray, rng: np.random.Generator) -> None:
    there = pair.put(keys)
    (found,) = pair.read(lambda out: pair.table.pointers(there, out), out=(np.uint64, (len(keys),)))
    np.testing.assert_array_equal(found != 0, pair.cpu.contains(keys))
    new = np.zeros(len(keys), bool)
    pair.cpu.gather_or_insert(keys, frequency=1, version=5, inserted=new)
    pointers, inserted = pair.read(
        lambda out, inserted: pair.table.pointers_or_insert(there, out, 1, 5, inserted),
        out=(np.uint64, (len(keys),)),
        inserted=(bool, (len(keys),)),
    )
    np.testing.assert_array_equal(inserted, new)
    np.testing.assert_array_equal(pointers[found != 0], found[found != 0])  # rows stay where they are
    assert len(np.unique(pointers)) == len(np.unique(keys))


def upserts(pair: Pair, keys: np.ndarray, rng: np.random.Generator) -> None:
    rows = rows_of(rng, len(keys), pair.dim, pair.value_dtype)
    distinct = len(np.unique(keys)) == len(keys)
    pair.cpu.upsert(keys, rows, frequency=1, version=7)
    pair.table.upsert(pair.put(keys), pair.put(rows), 1, 7, distinct)


def upserts_columns(pair: Pair, keys: np.ndarray, rng: np.random.Generator) -> None:
    columns = {name: rows_of(rng, len(keys), pair.widths[name], pair.value_dtype) for name in ("v", "m")}
    pair.cpu.upsert_columns(keys, columns, frequency=1, version=7)
    pair.table.upsert_columns(pair.put(keys), {name: pair.put(rows) for name, rows in columns.items()}, 1, 7)


def accumulates(pair: Pair, keys: np.ndarray, rng: np.random.Generator) -> None:
    for from_zeros in (True, False):
        deltas = rows_of(rng, len(keys), pair.dim, pair.value_dtype)
        pair.cpu.accumulate(keys, deltas, from_zeros=from_zeros, frequency=1, version=7)
        pair.table.accumulate(pair.put(keys), pair.put(deltas), from_zeros, 1, 7)


def imports(pair: Pair, keys: np.ndarray, rng: np.random.Generator) -> None:
    for stamps in (["frequencies", "versions"], ["versions"], []):
        columns = {name: rows_of(rng, len(keys), width, pair.value_dtype) for name, width in pair.widths.items()}
        columns["value"][::3] = 0  # marked as zeroed
        given = {name: rng.integers(0, 2**32, len(keys), np.uint32) for name in stamps}
        pair.cpu.import_rows(keys, columns, **given)
        on_device = {name: pair.put(rows) for name, rows in columns.items()}
        pair.table.import_rows(pair.put(keys), on_device, **{name: pair.put(x) for name, x in given.items()})
        pair.check()


def removes(pair: Pair, keys: np.ndarray, rng: np.random.Generator) -> None:
    (removed,) = pair.read(lambda out: pair.table.remove(pair.put(keys), out), out=(np.uint64, (1,)))
    assert removed == pair.cpu.remove(keys)


def inserts_again_after_a_removal(pair: Pair, keys: np.ndarray, rng: np.random.Generator) -> None:
    removes(pair, keys[: len(keys) // 2], rng)
    gathers_and_inserts(pair, keys, rng)


def clears(pair: Pair, keys: np.ndarray, rng: np.random.Generator) -> None:
    for table in (pair.cpu, pair.table):
        table.clear()
    assert len(pair.table) == 0
    upserts(pair, keys, rng)


def reserves(pair: Pair, keys: np.ndarray, rng: np.random.Generator) -> None:
    pair.table.reserve(10_000, 2 * len(keys))
    gathers_and_inserts(pair, keys, rng)


OPERATIONS = [
    gathers,
    gathers_and_inserts,
    gathers_columns,
    finds_pointers,
    upserts,
    upserts_columns,
    accumulates,
    imports,
    removes,
    inserts_again_after_a_removal,
    clears,
    reserves,
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_each_operation_does_what_it_does_on_the_cpu(device, operation, key_dtype, value_dtype, dim, make_keys):
    pool = make_keys(200)
    # Sums of equal keys are in no particular order, so they start from a number that keeps them exact.
    pair = filled(device, key_dtype, value_dtype, dim, pool, initializer=1.5 if operation is accumulates else UNIFORM)
    rng = np.random.default_rng(1)
    for keys in batches(pool):
        operation(pair, pair.remember(keys), rng)
        pair.check()


@pytest.mark.parametrize(
    "initializer",
    [
        0.1,
        {"kind": "uniform", "low": -0.05, "high": 0.05, "seed": 7},
        {"kind": "normal", "mean": 0.5, "stddev": 2.0, "seed": -1},
        {"kind": "truncated_normal", "stddev": 0.01, "seed": 2**63},
        {"kind": "rows"},
    ],
    ids=lambda initializer: initializer["kind"] if isinstance(initializer, dict) else "constant",
)
def test_initial_values_are_those_of_the_cpu(device, initializer, key_dtype, value_dtype, make_keys):
    for dim in (1, 3, 33):
        if initializer == {"kind": "rows"} or "rows" in str(initializer):
            initializer = {"kind": "rows", "rows": np.random.default_rng(dim).normal(size=(5, dim)).astype(value_dtype)}
        pool = make_keys(200)
        pair = filled(device, key_dtype, value_dtype, dim, pool, initializer=initializer)
        gathers(pair, pool, np.random.default_rng(0))
        gathers_and_inserts(pair, pool, np.random.default_rng(0))
        pair.check()


# ---- What goes over the whole table


def stamped(pair: Pair, column: str, least: int, most: int, keys: np.ndarray) -> np.ndarray:
    """The keys of the CPU's table whose stamp is so."""
    keys = keys[pair.cpu.contains(keys)]
    stamp = pair.cpu.gather_stamps(keys)[column == "version"]
    return keys[(stamp >= least) & (stamp <= most)]


@pytest.mark.parametrize("side", ["at most", "at least"])
@pytest.mark.parametrize("column", ["frequency", "version"])
def test_rows_go_by_their_stamps(device, column, side, key_dtype, value_dtype, make_keys):
    pool = make_keys(300)
    pair = filled(device, key_dtype, value_dtype, 8, pool)
    bounds = (0, 1, 2, 3, 2**32 - 1)
    for bound in bounds if side == "at most" else bounds[::-1]:
        low = side == "at most"
        wanted = stamped(pair, column, 0 if low else bound, bound if low else 2**32 - 1, pool)
        (removed,) = pair.read(
            lambda out, low=low, bound=bound: pair.table.remove_if(
                **{column: (None, bound) if low else (bound, None)}, removed=out
            ),
            out=(np.uint64, (1,)),
        )
        assert removed == pair.cpu.remove(wanted) == len(wanted)
        pair.check()


@pytest.mark.parametrize("first", ["oldest", "least_frequent"])
def test_a_shrunk_table_keeps_what_comes_last_in_its_order(device, first, key_dtype, value_dtype, make_keys):
    pool = make_keys(300)
    pair = filled(device, key_dtype, value_dtype, 3, pool)
    for rows in (1000, 150, 120, 70, 1, 0):
        there = pool[pair.cpu.contains(pool)]
        frequencies, versions = pair.cpu.gather_stamps(there)
        unsigned = there.astype(np.uint64) if key_dtype != np.int32 else there.view(np.uint32)
        order = (unsigned, frequencies, versions) if first == "oldest" else (unsigned, versions, frequencies)
        pair.cpu.remove(there[np.lexsort(order)[: max(0, len(there) - rows)]])
        pair.table.shrink(rows, first)
        pair.check()


@pytest.mark.parametrize("dim", [1, 8])
@pytest.mark.parametrize("which", [{}, {"version": (2, None)}, {"frequency": (None, 2)}], ids=str)
def test_an_export_gives_each_row_once(device, which, key_dtype, value_dtype, dim, make_keys):
    pool = make_keys(300)
    pair = filled(device, key_dtype, value_dtype, dim, pool)
    wanted = pool[pair.cpu.contains(pool)]
    for column, (least, most) in which.items():
        wanted = stamped(pair, column, least or 0, 2**32 - 1 if most is None else most, wanted)
    exporter, chunks = pair.table.export(**which), []
    assert exporter.max_rows >= len(wanted)
    room = 37
    keys = pair.arrays.zeros(room, key_dtype)
    columns = {name: pair.arrays.zeros((room, width), value_dtype) for name, width in pair.widths.items()}
    stamps = [pair.arrays.zeros(room, np.uint32) for _ in range(2)]
    while (n := exporter.next(keys, columns, *stamps)) > 0:
        arrays = [pair.arrays.get(keys, key_dtype)]
        arrays += [pair.arrays.get(column, value_dtype) for column in columns.values()]
        arrays += [pair.arrays.get(stamp, np.uint32) for stamp in stamps]
        chunks.append([array[:n].copy() for array in arrays])
    got, *columns_and_stamps = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    np.testing.assert_array_equal(np.sort(got), np.sort(wanted))
    expected = [*pair.cpu.gather_columns(got), *pair.cpu.gather_stamps(got)]
    for column, want in zip(columns_and_stamps, expected, strict=True):
        assert_same(column, want, device)


# ---- Pooled lookups and their gradients, against the formula over the rows that the CPU gives


def assert_near(got: np.ndarray, expected: np.ndarray, terms: np.ndarray) -> None:
    """To 1e-6 of the sum of the absolute terms, or a unit of the last place in 16-bit types."""
    part = {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(got.dtype.name, 1e-6)
    assert (np.abs(got.astype(np.float64) - expected) <= part * terms + 1e-7).all()


class Bags:
    """A batch in bags, and what each of its keys counts in its bag: (bags, n)."""

    def __init__(self, pool: np.ndarray, lengths: list[int], combiner: str, weighted: bool, wide: type) -> None:
        rng = np.random.default_rng(len(lengths))
        self.combiner, self.lengths = combiner, lengths
        self.splits = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        n, bags = int(self.splits[-1]), len(lengths)
        self.keys, self.weights = rng.choice(pool, n), rng.uniform(0.5, 2.0, n).astype(wide) if weighted else None
        self.factors = np.ones(n) if self.weights is None else self.weights.astype(np.float64)
        self.share, self.divisors = np.zeros((bags, n)), np.ones(bags)
        for bag, (begin, end) in enumerate(pairwise(self.splits)):
            of = self.factors[begin:end]
            if end > begin:
                self.divisors[bag] = {"sum": 1.0, "mean": of.sum(), "sqrtn": np.sqrt((of**2).sum())}[combiner]
            self.share[bag, begin:end] = of / self.divisors[bag]

    def check_weights_gradient(self, got: np.ndarray, rows: np.ndarray, pooled: np.ndarray, gradient: np.ndarray):
        bag_of = np.repeat(np.arange(len(self.lengths)), self.lengths)
        g, p, d = (array[bag_of].astype(np.float64) for array in (gradient, pooled, self.divisors[:, None]))
        less = {"sum": 0.0 * p, "mean": p / d, "sqrtn": p * self.factors[:, None] / d**2}[self.combiner]
        terms = np.abs(g) * (np.abs(rows / d) + np.abs(less))
        assert (np.abs(got - (g * (rows / d - less)).sum(1)) <= 1e-6 * terms.sum(1) + 1e-7).all()


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("lengths", [[], [0], [*range(9), 0, 1] * 4], ids=["no bags", "an empty bag", "bags"])
def test_pooled_rows_and_gradients_follow_the_formula(
    device, lengths, combiner, weighted, key_dtype, value_dtype, dim, make_keys
):
    pool = make_keys(200)
    pair = filled(device, key_dtype, value_dtype, dim, pool)
    table, read = pair.table, pair.read
    wide = np.float64 if value_dtype == np.float64 else np.float32
    bags = Bags(pool, lengths, combiner, weighted, wide)
    n, pooled_like = len(bags.keys), {"out": (value_dtype, (len(lengths), dim))}
    keys, splits = pair.put(bags.keys), pair.put(bags.splits)
    weights = pair.put(bags.weights) if weighted else None
    how = {"combiner": combiner, "weights": weights}
    gradient = rows_of(np.random.default_rng(dim), len(lengths), dim, value_dtype)
    there = pair.put(gradient)

    def check_lookup(missing: str) -> None:
        rows = pair.cpu.gather(bags.keys, missing).astype(np.float64)
        (pooled,) = read(lambda out: table.gather_pooled(keys, splits, out, missing=missing, **how), **pooled_like)
        assert_near(pooled, bags.share @ rows, bags.share @ np.abs(rows))
        if weighted:
            given = (keys, splits, weights, pair.put(pooled), there)
            (slope,) = read(lambda out: table.weights_gradient(*given, out, combiner, missing), out=(wide, (n,)))
            bags.check_weights_gradient(slope, rows, pooled, gradient)

    check_lookup("zeros")
    check_lookup("initial")
    (spread,) = read(lambda out: table.spread_gradient(splits, there, out, **how), out=(value_dtype, (n, dim)))
    expected = bags.share.T @ gradient.astype(np.float64)
    assert_near(spread, expected, np.abs(expected))
    rows = pair.cpu.gather_or_insert(bags.keys, frequency=1, version=4).astype(np.float64)
    stamp = {"frequency": 1, "version": 4}
    (pooled,) = read(lambda out: table.gather_pooled_or_insert(keys, splits, out, **how, **stamp), **pooled_like)
    assert_near(pooled, bags.share @ rows, bags.share @ np.abs(rows))
    pair.check()


# ---- Optimizers


def steps(pair: Pair, name: str, changes: dict[str, float], pool: np.ndarray) -> None:
    """Four steps over keys that repeat, with what Apply can be told in turns."""
    rng = np.random.default_rng(4)
    order = list(optimizers()[name]["slots"])
    for t in range(1, 5):
        keys = np.unique(pool) if t == 2 else rng.choice(pool, 70)
        gradients = (rng.integers(-64, 64, (len(keys), pair.dim)) / 64).astype(pair.value_dtype)
        told = {"skip_nonfinite": t == 3, "stochastic_rounding": t == 4, "seed": t, "frequency": t, "version": 10 + t}
        if t == 3:
            gradients[::9] = np.nan
            gradients[1::11, 0] = -np.inf
        h = hyperparameters(name, changes, t)
        pair.cpu.apply(name, keys, gradients, h, slots=order, **told)
        pair.table.apply(name, pair.put(keys), pair.put(gradients), h, slots=order, distinct=t == 2, **told)
        pair.check()
    assert pair.table.skipped_updates > 0


@pytest.mark.parametrize(("name", "changes"), CASES, ids=NAMES)
def test_each_optimizer_does_what_it_does_on_the_cpu(device, name, changes, value_dtype):
    for turn, dim in enumerate(DIMS):
        key_dtype = KEY_DTYPES[turn % len(KEY_DTYPES)]
        slots = [(slot, dim, "constant", initial) for slot, initial in optimizers()[name]["slots"].items()]
        others = [("narrow", 2, "constant", 0.5), ("copy", dim, "copy_value")]
        pair = Pair(device, key_dtype, value_dtype, dim, [others[0], *slots[::-1], others[1]], initializer=UNIFORM)
        extremes = extreme_keys(key_dtype)
        steps(pair, name, changes, pair.remember(np.concatenate([extremes, np.arange(2, 40).astype(key_dtype)])))


@pytest.mark.parametrize("name", ["sgd", "adam", "group_adam"])
def test_an_empty_step_changes_nothing(device, name, key_dtype, value_dtype):
    slots = [(slot, 3, "constant", initial) for slot, initial in optimizers()[name]["slots"].items()]
    pair = Pair(device, key_dtype, value_dtype, 3, slots)
    keys, gradients = np.zeros(0, key_dtype), np.zeros((0, 3), value_dtype)
    h = hyperparameters(name, {}, 1)
    pair.cpu.apply(name, keys, gradients, h, slots=list(optimizers()[name]["slots"]))
    pair.table.apply(name, pair.put(keys), pair.put(gradients), h, slots=list(optimizers()[name]["slots"]))
    pair.check()
    assert len(pair.table) == 0


@pytest.mark.parametrize("dim", [1, 8])
def test_rows_that_a_penalty_zeroes_are_marked_until_they_are_written(device, value_dtype, dim):
    rule = optimizers()["group_adam"]["slots"]
    slots = [(slot, dim, "constant", initial) for slot, initial in rule.items()]
    pair = Pair(device, "int64", value_dtype, dim, slots, initializer=UNIFORM)
    keys = pair.remember(np.arange(-20, 20))
    gradients = np.ones((len(keys), dim), value_dtype)
    h = hyperparameters("group_adam", {"l21": 1e4}, 1)
    pair.cpu.apply("group_adam", keys, gradients, h, slots=list(rule))
    pair.table.apply("group_adam", pair.put(keys), pair.put(gradients), h, slots=list(rule))
    pair.check()
    assert pair.table.zeroed_rows == len(keys)
    writes: list[Callable[..., None]] = [upserts, accumulates, removes]
    for part, write in zip(np.array_split(keys, 4), writes, strict=False):
        write(pair, part, np.random.default_rng(0))
        pair.check()
    assert pair.table.zeroed_rows == 10
