"""Tables in device memory give what the CPU's table gives, operation by operation: on the CPU's threads and, where
there are a GPU and CuPy, on the GPU."""

import doctest
from itertools import pairwise
from types import ModuleType

import numpy as np
import pytest

from kvtools._kvtable import Table

device_table = pytest.importorskip(
    "kvtools._device_table", reason="kvtools was built without CUDA: install it with -C cmake.define.KVTOOLS_CUDA=on"
)
DeviceTable = device_table.DeviceTable


def cupy() -> ModuleType:
    module = pytest.importorskip("cupy", reason="tables on a GPU are tested with CuPy, which is not installed")
    if not module.cuda.is_available():
        pytest.skip("there is no GPU")
    return module


@pytest.fixture(params=["threads", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def xp(device: str) -> ModuleType:
    """The library whose arrays the table takes."""
    return cupy() if device == "cuda" else np


def on_device(xp: ModuleType, array: np.ndarray) -> np.ndarray:
    """The array where the table reaches it; bfloat16 as its bits, which is how DLPack passes it from here."""
    return xp.asarray(array.view(np.uint16) if array.dtype.name == "bfloat16" else array)


def on_host(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    array = array.get() if hasattr(array, "get") else array
    return array.view(dtype) if dtype.name == "bfloat16" else array


@pytest.mark.parametrize("dim", [1, 8, 100])
def test_the_same_calls_leave_the_same_rows(device, xp, key_dtype, value_dtype, dim, make_keys):
    how = {"initializer": {"kind": "uniform", "low": -1.0, "high": 1.0, "seed": 3}}
    how["slots"] = [("m", dim, "copy_value"), ("v", 3, "constant", 0.25)]
    cpu = Table(key_dtype, value_dtype, dim, **how)
    table = DeviceTable(key_dtype, value_dtype, dim, device=device, **how)
    rng = np.random.default_rng(dim)
    pool = make_keys(700)

    def empty(*shape: int) -> np.ndarray:
        return on_device(xp, np.zeros(shape, value_dtype))

    for step in range(12):
        keys = rng.choice(pool, 500)
        rows = rng.integers(-8, 8, (500, dim)).astype(value_dtype)
        there, given = on_device(xp, keys), on_device(xp, rows)
        stamp = {"frequency": step % 3, "version": step}
        match step % 6:
            case 0:
                out, inserted = empty(500, dim), xp.zeros(500, bool)
                table.gather_or_insert(there, out, inserted=inserted, **stamp)
                new = np.zeros(500, bool)
                expected = cpu.gather_or_insert(keys, inserted=new, **stamp)
                np.testing.assert_array_equal(on_host(out, value_dtype), expected)
                np.testing.assert_array_equal(on_host(inserted, np.dtype(bool)), new)
            case 1:
                table.upsert(there, given, **stamp)
                cpu.upsert(keys, rows, **stamp)
            case 2:
                distinct = np.unique(keys)  # sums in another order differ in their last bits
                table.accumulate(on_device(xp, distinct), on_device(xp, rows[: len(distinct)]), **stamp)
                cpu.accumulate(distinct, rows[: len(distinct)], **stamp)
            case 3:
                table.remove(there[:100])
                cpu.remove(keys[:100])
            case 4:
                slot = rng.integers(-8, 8, (500, 3)).astype(value_dtype)
                table.upsert_columns(there, {"v": on_device(xp, slot)}, **stamp)
                cpu.upsert_columns(keys, {"v": slot}, **stamp)
            case 5:
                out, found = empty(500, dim), xp.zeros(500, bool)
                table.gather(there, out, "initial", found=found)
                was = np.zeros(500, bool)
                expected = cpu.gather(keys, "initial", found=was)
                np.testing.assert_array_equal(on_host(out, value_dtype), expected)
                np.testing.assert_array_equal(on_host(found, np.dtype(bool)), was)
        assert len(table) == len(cpu)
    columns = {"value": empty(700, dim), "m": empty(700, dim), "v": empty(700, 3)}
    table.gather_columns(on_device(xp, pool), columns)
    for got, expected in zip(columns.values(), cpu.gather_columns(pool), strict=True):
        np.testing.assert_array_equal(on_host(got, value_dtype), expected)


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_pooled_rows_and_their_gradient_follow_the_formula(device, xp, combiner, weighted):
    table = DeviceTable("int64", "float64", 3, device=device)
    rng = np.random.default_rng(5)
    keys, splits = rng.integers(-20, 20, 50), np.array([0, 4, 4, 5, 30, 50])
    rows, weights = rng.normal(size=(40, 3)), rng.uniform(0.5, 2.0, 50)
    table.upsert(on_device(xp, np.arange(-20, 20)), on_device(xp, rows))
    how = {"combiner": combiner, "weights": on_device(xp, weights) if weighted else None}
    out = xp.zeros((5, 3))
    table.gather_pooled(on_device(xp, keys), on_device(xp, splits), out, **how)

    share = np.zeros((5, 50))
    for bag, (begin, end) in enumerate(pairwise(splits)):
        factor = weights[begin:end] if weighted else np.ones(end - begin)
        divisor = {"sum": 1.0, "mean": factor.sum(), "sqrtn": np.sqrt((factor**2).sum())}[combiner]
        share[bag, begin:end] = factor / divisor if end > begin else 0
    np.testing.assert_allclose(on_host(out, np.dtype("float64")), share @ rows[keys + 20], rtol=1e-12, atol=1e-12)
    gradient = rng.normal(size=(5, 3))
    spread = xp.zeros((50, 3))
    table.spread_gradient(on_device(xp, splits), on_device(xp, gradient), spread, **how)
    np.testing.assert_allclose(on_host(spread, np.dtype("float64")), share.T @ gradient, rtol=1e-12)
    if weighted:  # against differences
        of_weights = xp.zeros(50)
        arrays = [on_device(xp, array) for array in (keys, splits, weights)]
        table.weights_gradient(*arrays, out, on_device(xp, gradient), of_weights, combiner)
        step, moved = 1e-6, xp.zeros((5, 3))
        for i in (0, 4, 20, 49):
            nudged = weights.copy()
            nudged[i] += step
            table.gather_pooled(*arrays[:2], moved, combiner, weights=on_device(xp, nudged))
            slope = ((moved - out) * on_device(xp, gradient)).sum() / step
            assert abs(float(slope) - float(of_weights[i])) < 1e-4
    with pytest.raises(ValueError, match="combiner is 'max'"):
        table.gather_pooled(on_device(xp, keys), on_device(xp, splits), out, "max")


def test_an_export_has_every_row_once(device, xp):
    table = DeviceTable("int64", "float32", 4, device=device)
    keys = np.arange(-5000, 5000)
    rows = np.repeat(keys[:, None], 4, 1).astype(np.float32)
    table.upsert(on_device(xp, keys), on_device(xp, rows), frequency=2, version=9)
    table.remove_if("version", "below", 9)
    assert len(table) == 10000
    exporter = table.export()
    seen = []
    buffer, values, freqs = xp.zeros(777, np.int64), xp.zeros((777, 4), np.float32), xp.zeros(777, np.uint32)
    while (n := exporter.next(buffer, {"value": values}, frequencies=freqs)) >= 0:
        assert (freqs[:n] == 2).all()
        assert (values[:n] == buffer[:n, None]).all()
        seen.extend(buffer[:n].tolist())
    assert sorted(seen) == keys.tolist()
    table.remove_if("frequency", "at_least", 2)
    assert len(table) == 0


def test_shrinking_takes_the_oldest_rows_first(device, xp):
    table = DeviceTable("int64", "float32", 2, device=device)
    for step in range(5):
        keys = np.arange(step * 100, step * 100 + 100)
        table.upsert(on_device(xp, keys), xp.zeros((100, 2), np.float32), frequency=9 - step, version=step)
    table.shrink(1000)
    assert len(table) == 500
    table.shrink(250)
    there = xp.zeros(500, bool)
    table.contains(on_device(xp, np.arange(500)), there)
    assert np.flatnonzero(on_host(there, np.dtype(bool))).tolist() == list(range(250, 500))
    table.shrink(100, "least_frequent")
    table.contains(on_device(xp, np.arange(500)), there)
    assert np.flatnonzero(on_host(there, np.dtype(bool))).tolist() == [*range(250, 300), *range(350, 400)]


def test_memory_beside_the_rows_stays_within_its_bound(device, xp):
    table = DeviceTable("int64", "float32", 8, device=device, max_hbm=2 << 20)
    for begin in range(0, 400_000, 50_000):
        keys = np.arange(begin, begin + 50_000)
        table.upsert(on_device(xp, keys), xp.zeros((50_000, 8), np.float32), distinct=True)
    memory = table.memory()
    assert memory["rows"] == 400_000
    assert memory["row_bytes"] == 400_000 * 32
    assert memory["host_bytes"] > 0
    # 16 bytes of index at the load where it grows by a quarter, and 8 of stamps for an eighth more rows.
    assert memory["index_bytes"] + memory["column_bytes"] < 400_000 * (16 * 1.25 + 8 * 1.25)


def test_an_array_that_does_not_fit_is_an_error_that_names_it():
    table = DeviceTable("int64", "float32", 2, device="threads")
    keys, out = np.zeros(3, np.int64), np.zeros((3, 2), np.float32)
    with pytest.raises(TypeError, match="keys has dtype int32; expected int64"):
        table.gather(keys.astype(np.int32), out)
    with pytest.raises(ValueError, match=r"out has shape \(3, 1\); expected \(3, 2\)"):
        table.gather(keys, np.zeros((3, 1), np.float32))
    with pytest.raises(TypeError):  # nothing is copied behind the caller's back
        table.gather(keys, np.zeros((2, 3), np.float32).T)
    with pytest.raises(ValueError, match="no column 'w'; it has 'value'"):
        table.upsert_columns(keys, {"w": out})
    with pytest.raises(ValueError, match="device is 'tpu'"):
        DeviceTable("int64", "float32", 2, device="tpu")
    assert len(table) == 0


def test_without_a_gpu_the_error_says_what_to_do():
    try:
        DeviceTable("int64", "float32", 2, name="users")
    except RuntimeError as error:
        assert "'users'" in str(error)
        assert "CPU" in str(error)


def test_examples():
    scope = {"np": np, "DeviceTable": DeviceTable}
    test = doctest.DocTestParser().get_doctest(DeviceTable.__doc__, scope, "DeviceTable", None, None)
    runner = doctest.DocTestRunner()
    runner.run(test)
    assert runner.failures == 0
    assert len(test.examples) >= 4
