"""What holds for tables in device memory beyond single operations (which test_device_grid.py has).

On the CPU's threads and, where there are a GPU and CuPy or PyTorch, there, too.
"""

import doctest

import numpy as np
import pytest
from device_arrays import DEVICES, Pair, arrays_on, assert_same, device_table_module

DeviceTable = device_table_module().DeviceTable


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dim", [1, 8, 100])
def test_the_same_calls_leave_the_same_rows(device, key_dtype, value_dtype, dim, make_keys):
    slots = [("m", dim, "copy_value"), ("v", 3, "constant", 0.25)]
    initializer = {"kind": "uniform", "low": -1.0, "high": 1.0, "seed": 3}
    pair = Pair(device, key_dtype, value_dtype, dim, slots, initializer=initializer)
    cpu, table, put = pair.cpu, pair.table, pair.put
    rng = np.random.default_rng(dim)
    pool = pair.remember(make_keys(700))
    for step in range(12):
        keys = rng.choice(pool, 500)
        rows = rng.integers(-8, 8, (500, dim)).astype(value_dtype)
        there, given = put(keys), put(rows)
        stamp = {"frequency": step % 3, "version": step}
        match step % 6:
            case 0:
                expected = cpu.gather_or_insert(keys, **stamp)
                out = pair.arrays.zeros((500, dim), value_dtype)
                table.gather_or_insert(there, out, **stamp)
                assert_same(pair.arrays.get(out, value_dtype), expected, device)
            case 1:
                table.upsert(there, given, **stamp)
                cpu.upsert(keys, rows, **stamp)
            case 2:
                distinct = np.unique(keys)  # sums in another order differ in their last bits
                table.accumulate(put(distinct), put(rows[: len(distinct)]), **stamp)
                cpu.accumulate(distinct, rows[: len(distinct)], **stamp)
            case 3:
                table.remove(put(keys[:100]))
                cpu.remove(keys[:100])
            case 4:
                slot = rng.integers(-8, 8, (500, 3)).astype(value_dtype)
                table.upsert_columns(there, {"v": put(slot)}, **stamp)
                cpu.upsert_columns(keys, {"v": slot}, **stamp)
            case 5:
                update = {"learning_rate": 0.5}
                table.apply("momentum", there, given, update, slots=["m"], **stamp)
                cpu.apply("momentum", keys, rows, update, slots=["m"], **stamp)
        pair.check()


def test_memory_beside_the_rows_stays_within_its_bound(device):
    arrays = arrays_on(device)
    table = DeviceTable("int64", "float32", 8, device=device, max_hbm=2 << 20)
    for begin in range(0, 400_000, 50_000):
        keys = np.arange(begin, begin + 50_000)
        table.upsert(arrays.put(keys), arrays.zeros((50_000, 8), np.float32), distinct=True)
    memory = table.memory()
    assert memory["rows"] == 400_000
    assert memory["row_bytes"] == 400_000 * 32
    assert memory["host_bytes"] > 0
    # 18.3 bytes of index at the load where it grows by a quarter, and 8 of stamps for an eighth more rows.
    assert memory["index_bytes"] + memory["column_bytes"] < 400_000 * (18.3 * 1.25 + 8 * 1.125)


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
    with pytest.raises(ValueError, match="combiner is 'max'"):
        table.gather_pooled(keys, np.array([0, 3]), np.zeros((1, 2), np.float32), "max")
    with pytest.raises(ValueError, match="missing is 'nothing'"):
        table.gather_pooled(keys, np.array([0, 3]), np.zeros((1, 2), np.float32), missing="nothing")
    with pytest.raises(ValueError, match="device is 'tpu'"):
        DeviceTable("int64", "float32", 2, device="tpu")
    assert len(table) == 0


@pytest.mark.parametrize(
    ("optimizer", "slots", "hyperparameters", "message"),
    [
        ("adma", [], {"learning_rate": 0.1}, "no optimizer 'adma'"),
        ("sgd", [], {}, "needs the hyperparameter 'learning_rate'"),
        ("sgd", [], {"learning_rate": 0.1, "weight_decay": -1}, "weight_decay = -1"),
        ("momentum", [], {"learning_rate": 0.1}, "keeps 1 slots"),
        ("momentum", ["narrow"], {"learning_rate": 0.1}, "2 elements wide"),
        ("momentum", ["m2"], {"learning_rate": 0.1}, "no column 'm2'"),
    ],
)
def test_an_impossible_step_says_why_and_changes_nothing(device, optimizer, slots, hyperparameters, message):
    arrays = arrays_on(device)
    table = DeviceTable("int64", "float32", 3, device=device, slots=[("m", 3), ("narrow", 2)])
    keys, gradients = arrays.put(np.arange(10)), arrays.zeros((10, 3), np.float32)
    with pytest.raises((ValueError, RuntimeError), match=message):
        table.apply(optimizer, keys, gradients, hyperparameters, slots=slots)
    assert len(table) == 0


def test_without_a_gpu_the_error_says_what_to_do():
    try:
        DeviceTable("int64", "float32", 2, name="users")
    except RuntimeError as error:
        assert "'users'" in str(error)
        assert "CPU" in str(error)


def test_examples():
    runner = doctest.DocTestRunner()
    examples = 0
    for thing in [DeviceTable, *(getattr(DeviceTable, name) for name in vars(DeviceTable) if name[0] != "_")]:
        scope = {"np": np, "DeviceTable": DeviceTable}
        test = doctest.DocTestParser().get_doctest(thing.__doc__ or "", scope, str(thing), None, None)
        examples += len(test.examples)
        runner.run(test)
    assert runner.failures == 0
    assert examples >= 20
