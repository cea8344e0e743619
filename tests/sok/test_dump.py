"""`sok.dump` and `sok.load` on a single rank: the files byte by byte, and what is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import tfplugin.sok as sok
from kvtools.dialects.detect import open_checkpoint
from kvtools.errors import KvtoolsError
from kvtools.verify import verify
from tfplugin.sok import row_files
from tfplugin.sok.optimizer_slots import slots_of

DATA = Path(__file__).parent.parent / "data"
EXTREME = [np.iinfo(np.int64).min, np.iinfo(np.int64).max, -1, -2, 0, 1, 2**40]

legacy = tf_keras.optimizers.legacy
#: An optimizer, and the files of its slots as SparseOperationKit calls them.
OPTIMIZERS = {
    "sgd": (lambda: legacy.SGD(0.1), set()),
    "momentum": (lambda: legacy.SGD(0.1, momentum=0.9), {"SGD-momentum"}),
    "adam": (lambda: legacy.Adam(0.1), {"Adam-m", "Adam-v"}),
    "adagrad": (lambda: legacy.Adagrad(0.1), {"Adagrad-accumulator"}),
    "ftrl": (lambda: legacy.Ftrl(0.1), {"Ftrl-accumulator", "Ftrl-linear"}),
    "adadelta": (lambda: legacy.Adadelta(0.1), {"Adadelta-accum_grad", "Adadelta-accum_var"}),
    # What it calls Adamax, too.
    "adamax": (lambda: legacy.Adamax(0.1), {"Adam-m", "Adam-v"}),
    "tf_keras momentum": (lambda: tf_keras.optimizers.SGD(0.1, momentum=0.9), {"SGD-momentum"}),
    "tf_keras adam": (lambda: tf_keras.optimizers.Adam(0.1), {"Adam-m", "Adam-v"}),
    "tf_keras ftrl": (lambda: tf_keras.optimizers.Ftrl(0.1), {"Ftrl-accumulator", "Ftrl-linear"}),
    "Keras 3 momentum": (lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9), {"SGD-momentum"}),
    "Keras 3 adam": (lambda: tf.keras.optimizers.Adam(0.1), {"Adam-m", "Adam-v"}),
    "Keras 3 adagrad": (lambda: tf.keras.optimizers.Adagrad(0.1), {"Adagrad-accumulator"}),
    "Keras 3 adadelta": (lambda: tf.keras.optimizers.Adadelta(0.1), {"Adadelta-accum_grad", "Adadelta-accum_var"}),
}


def train(optimizer: Any, dynamic: Any, static: Any, steps: int = 2) -> None:
    for step in range(steps):
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(dynamic, tf.constant(EXTREME, dynamic.key_dtype))
            loss = tf.reduce_sum(rows * rows) + tf.reduce_sum(static * static) * (step + 1.0)
        variables = [dynamic, static]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def state(dynamic: Any, static: Any, optimizer: Any) -> dict[str, np.ndarray]:
    """All rows and slots, in an order of their own."""
    columns = {"static": static.numpy()}
    keys, rows = (tensor.numpy() for tensor in dynamic.export())
    order = np.argsort(keys)
    columns |= {"keys": keys[order], "rows": rows[order]}
    for name, slot in slots_of(optimizer, dynamic).items():
        columns[f"dynamic {name}"] = slot.read(tf.constant(keys[order], dynamic.key_dtype)).numpy()
    for name, slot in slots_of(optimizer, static).items():
        columns[f"static {name}"] = tf.convert_to_tensor(slot).numpy()
    return columns


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(got) == set(expected)
    for name, column in expected.items():
        np.testing.assert_array_equal(got[name], column, name)


def variables(dim: int = 3, name: str = "") -> tuple[Any, Any]:
    dynamic = sok.DynamicVariable(dim, initializer="13", name=f"dynamic{name}")
    static = sok.Variable(np.arange(5.0 * dim).reshape(5, dim), dtype=tf.float32, name=f"static{name}")
    return dynamic, static


@pytest.fixture
def dumped(tmp_path: Path) -> Path:
    """A dump of two variables."""
    dynamic, static = variables()
    sok.assign(dynamic, [5, -3, 9], np.arange(9.0).reshape(3, 3))
    sok.dump(tmp_path / "dump", [dynamic, static])
    return tmp_path / "dump"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ---- The files -------------------------------------------------------------------------------------------------------


def expected_file(kind: int, slot: str, dtype: int, rows: np.ndarray) -> bytes:
    """By the page that specifies the layout; the table's name is blank."""
    header = b" " * 256 + kind.to_bytes(4, "big") + slot.encode().rjust(32) + dtype.to_bytes(4, "big")
    return header + rows.tobytes()


def test_files_are_those_of_sparse_operation_kit_byte_by_byte(tmp_path):
    dynamic, static = variables()
    optimizer = sok.OptimizerWrapper(legacy.SGD(0.5, momentum=0.9))
    train(optimizer, dynamic, static)
    sok.dump(tmp_path, [dynamic, static], optimizer)
    columns = state(dynamic, static, optimizer)
    assert contents(tmp_path) == {
        "dynamic_0-key": expected_file(0, "", 1, np.array(sorted(EXTREME), np.int64)),
        "dynamic_0-weight": expected_file(1, "", 5, columns["rows"]),
        "dynamic_0-SGD-momentum": expected_file(2, "momentum", 5, columns["dynamic momentum"]),
        "static_0-key": expected_file(0, "", 1, np.arange(5, dtype=np.int64)),
        "static_0-weight": expected_file(1, "", 5, columns["static"]),
        "static_0-SGD-momentum": expected_file(2, "momentum", 5, columns["static momentum"]),
    }


def test_a_localized_variable_has_uint64_row_numbers(tmp_path):
    sok.dump(tmp_path, sok.Variable(np.ones((4, 2)), dtype=tf.float64, mode="localized:0", name="v"))
    assert contents(tmp_path) == {
        "v_0-key": expected_file(0, "", 3, np.arange(4, dtype=np.uint64)),
        "v_0-weight": expected_file(1, "", 6, np.ones((4, 2))),
    }


def test_a_dump_of_sparse_operation_kit_loads(tmp_path):
    expected = np.load(DATA / "sok-expected.npz")
    variable = sok.DynamicVariable(4, name="emb")
    optimizer = sok.OptimizerWrapper(legacy.Adam())
    sok.load(DATA / "sok", variable, optimizer)
    keys, rows = variable.export()
    order = {int(key): number for number, key in enumerate(expected["keys"])}
    where = [order[int(key)] for key in keys.numpy()]
    assert len(where) == len(order)
    np.testing.assert_array_equal(rows, expected["values"][where])
    for slot in "mv":
        np.testing.assert_array_equal(slots_of(optimizer, variable)[slot].read(keys), expected[slot][where])
    sok.dump(tmp_path, variable, optimizer)  # and it is what we write
    for column in ("weight", "Adam-m", "Adam-v"):
        name = f"emb_0-{column}"
        assert (tmp_path / name).read_bytes()[:296] == (DATA / "sok" / name).read_bytes()[:296]
    assert len((tmp_path / "emb_0-key").read_bytes()) == len((DATA / "sok" / "emb_0-key").read_bytes())


def test_kvtools_opens_and_verifies_a_dump(tmp_path):
    dynamic, static = variables()
    optimizer = sok.OptimizerWrapper(legacy.Adam())
    train(optimizer, dynamic, static)
    sok.dump(tmp_path, [dynamic, static], optimizer)
    report = verify(tmp_path)
    assert [finding for finding in report.findings if finding.severity != "info"] == []
    table = open_checkpoint(tmp_path).table("dynamic_0")
    assert (table.schema.rows, table.schema.dim, table.slots) == (len(EXTREME), 3, ("Adam.m", "Adam.v"))


# ---- There and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_slots_come_back(tmp_path, name):
    make, slot_files = OPTIMIZERS[name]
    dynamic, static = variables()
    optimizer = sok.OptimizerWrapper(make())
    train(optimizer, dynamic, static)
    trained = state(dynamic, static, optimizer)
    sok.dump(tmp_path, [dynamic, static], optimizer)
    held = {path.name.removeprefix("dynamic_0-") for path in tmp_path.glob("dynamic_0-*")}
    assert held == {"key", "weight"} | slot_files
    train(optimizer, dynamic, static)  # on, so that each row and slot is another
    sok.load(tmp_path, [dynamic, static], optimizer)
    assert_same(state(dynamic, static, optimizer), trained)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "sgd"])
def test_an_optimizer_that_took_no_step_gets_its_slots(tmp_path, name):
    make, _ = OPTIMIZERS[name]
    dynamic, static = variables()
    optimizer = sok.OptimizerWrapper(make())
    train(optimizer, dynamic, static)
    trained = state(dynamic, static, optimizer)
    sok.dump(tmp_path, [dynamic, static], optimizer)
    dynamic, static = variables()
    fresh = sok.OptimizerWrapper(make())
    sok.load(tmp_path, [dynamic, static], fresh)
    assert_same(state(dynamic, static, fresh), trained)
    train(fresh, dynamic, static, steps=1)  # and it goes on with these


def test_an_optimizer_whose_own_update_runs_keeps_its_slots(tmp_path):
    dynamic, static = variables()
    optimizer = sok.OptimizerWrapper(legacy.Adam(0.1), fused=False)
    train(optimizer, dynamic, static)
    trained = state(dynamic, static, optimizer)
    sok.dump(tmp_path, [dynamic, static], optimizer)
    dynamic, static = variables()
    fresh = sok.OptimizerWrapper(legacy.Adam(0.1), fused=False)
    sok.load(tmp_path, [dynamic, static], fresh)
    assert_same(state(dynamic, static, fresh), trained)


def test_an_optimizer_of_tf_keras_without_the_wrapper_keeps_its_slots(tmp_path):
    _, static = variables()
    optimizer = tf_keras.optimizers.Adam(0.1)
    optimizer.apply_gradients([(tf.constant(np.arange(15.0).reshape(5, 3), tf.float32), static)])
    trained = {name: slot.numpy() for name, slot in slots_of(optimizer, static).items()}
    assert set(trained) == {"m", "v"}
    sok.dump(tmp_path, [static], optimizer)
    _, static = variables()
    fresh = tf_keras.optimizers.Adam(0.1)
    sok.load(tmp_path, [static], fresh)
    assert_same({name: slot.numpy() for name, slot in slots_of(fresh, static).items()}, trained)


def test_loading_leaves_rows_that_are_not_in_the_dump(dumped):
    dynamic, static = variables()
    sok.assign(dynamic, [5, 77], np.full((2, 3), 7.0))
    sok.load(dumped, [dynamic, static])
    held = dict(zip(dynamic.indices.numpy().tolist(), dynamic.values.numpy()[:, 0].tolist(), strict=True))
    assert held == {5: 0.0, -3: 3.0, 9: 6.0, 77: 7.0}


def test_an_empty_table_is_dumped_and_loaded(tmp_path):
    variable = sok.DynamicVariable(3, name="empty")
    sok.dump(tmp_path, variable)
    assert {name: len(data) for name, data in contents(tmp_path).items()} == {"empty_0-key": 296, "empty_0-weight": 296}
    sok.load(tmp_path, variable)
    assert variable.size.numpy().tolist() == [0, 3]


def test_rows_looked_up_and_never_trained_have_slots_too(tmp_path):
    dynamic, static = variables()
    optimizer = sok.OptimizerWrapper(legacy.Adagrad(0.1, initial_accumulator_value=0.25))
    train(optimizer, dynamic, static)
    tf.nn.embedding_lookup(dynamic, tf.constant([1234], tf.int64))
    sok.dump(tmp_path, dynamic, optimizer)
    fresh = sok.DynamicVariable(3, initializer="1", name="dynamic")
    again = sok.OptimizerWrapper(legacy.Adagrad(0.1, initial_accumulator_value=0.25))
    sok.load(tmp_path, fresh, again)
    slot = slots_of(again, fresh)["accumulator"].read(tf.constant([1234], tf.int64))
    np.testing.assert_array_equal(slot, [[0.25] * 3])


@pytest.mark.parametrize("key_type", [tf.int32, tf.uint64])
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float64])
def test_all_dtypes_come_back(tmp_path, key_type, dtype):
    variable = sok.DynamicVariable(2, key_type=key_type, dtype=dtype, name="v")
    keys = tf.constant([0, 7, key_type.max], key_type)
    variable.upsert(keys, tf.cast([[1.5, 2.5], [3, 4], [5, 6]], dtype))
    sok.dump(tmp_path, variable)
    variable.clear()
    sok.load(tmp_path, variable)
    rows = tf.cast(variable.sparse_read(keys, training=False), tf.float64)
    np.testing.assert_array_equal(rows, [[1.5, 2.5], [3, 4], [5, 6]])


def test_rows_are_written_and_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("tfplugin.sok.row_files.CHUNK_BYTES", 64)
    dynamic, static = variables()
    sok.assign(dynamic, np.arange(1000), np.arange(3000.0).reshape(1000, 3))
    sok.dump(tmp_path, [dynamic, static])
    dynamic.clear()
    static.assign(static * 0)
    sok.load(tmp_path, [dynamic, static])
    np.testing.assert_array_equal(dynamic.sparse_read(np.arange(1000)), np.arange(3000.0).reshape(1000, 3))
    np.testing.assert_array_equal(static, np.arange(15.0).reshape(5, 3))


@pytest.mark.parametrize("save", ["dump", "Saver"])
def test_rows_that_go_while_a_dump_is_written_are_not_in_it(tmp_path, monkeypatch, save):
    # The table first: where rows of the static variable lie must not change.
    monkeypatch.setattr("tfplugin.sok.row_files.CHUNK_BYTES", 256)
    dynamic, static = variables()
    keys, rows = np.arange(100), np.arange(300.0).reshape(100, 3) + 1
    sok.assign(dynamic, keys, rows)
    stock = row_files._make_room

    def make_room(*args: Any) -> None:  # keys are known by now, and rows not read yet
        dynamic.remove(keys[::3])
        sok.assign(dynamic, [1000], [[1.0, 2.0, 3.0]])
        stock(*args)

    monkeypatch.setattr(row_files, "_make_room", make_room)
    if save == "dump":
        optimizer = legacy.Adam()
        optimizer._create_all_weights([static])
        sok.dump(tmp_path, [dynamic, static], optimizer)
    else:
        sok.Saver().dump_to_file(dynamic, tmp_path)
    left = np.delete(keys, keys[::3])
    again, again_static = variables()
    again_static.assign(again_static * 0)
    if save == "dump":
        sok.load(tmp_path, [again, again_static], legacy.Adam())
        np.testing.assert_array_equal(again_static, static)
        assert (tmp_path / "dynamic_0-key").stat().st_size - (tmp_path / "static_0-key").stat().st_size == 8 * 61
    else:
        sok.Saver().restore_from_file(again, tmp_path)
    np.testing.assert_array_equal(np.sort(again.export()[0]), left)
    np.testing.assert_array_equal(again.sparse_read(left), rows[left])


# ---- Where it fails --------------------------------------------------------------------------------------------------


def truncate(path: Path, size: int) -> None:
    os.truncate(path, path.stat().st_size - size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: truncate(d / "dynamic_0-weight", 4), "truncated"),
        (lambda d: truncate(d / "dynamic_0-weight", 8), "truncated"),
        (lambda d: truncate(d / "static_0-key", 8), "truncated|rows"),
        (lambda d: truncate(d / "dynamic_0-key", 310), "header"),
        (lambda d: (d / "static_0-weight").unlink(), "there is no 'static_0-weight'"),
        (lambda d: (d / "dynamic_0-key").unlink(), "there is no 'dynamic_0-key'"),
        (lambda d: shutil.copy(d / "dynamic_0-key", d / "dynamic_0-weight"), "kind"),
        (lambda d: shutil.copy(d / "dynamic_0-weight", d / "dynamic_0-key"), "kind"),
        (shutil.rmtree, "no folder"),
    ],
)
def test_a_damaged_dump_changes_nothing(dumped, damage, message):
    damage(dumped)
    dynamic, static = variables()
    sok.assign(dynamic, [1], [[1.0, 2.0, 3.0]])
    before = dynamic.values.numpy(), static.numpy()
    with pytest.raises((ValueError, OSError, KvtoolsError), match=message):
        sok.load(dumped, [static, dynamic])
    np.testing.assert_array_equal(dynamic.values, before[0])
    np.testing.assert_array_equal(static, before[1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sok.DynamicVariable(4, name="dynamic"), "rows of 4, its dump of 3"),
        (lambda: sok.DynamicVariable(3, dtype=tf.float64, name="dynamic"), "float64, its dump float32"),
        (lambda: sok.DynamicVariable(3, key_type=tf.int32, name="dynamic"), "int32 keys, its dump int64"),
        (lambda: sok.Variable(np.ones((6, 3)), dtype=tf.float32, name="static"), "6 rows, its dump 5"),
        (lambda: sok.Variable(np.ones((3, 3)), dtype=tf.float32, name="dynamic"), "has key"),
        (lambda: tf.Variable([[1.0]], name="dynamic"), "expected sok.DynamicVariable or sok.Variable"),
        (lambda: sok.DynamicVariable(3, name="other"), "there is no 'other_0-key'"),
    ],
)
def test_a_variable_that_the_dump_does_not_fit_is_told(dumped, make, message):
    with pytest.raises((ValueError, TypeError, KvtoolsError), match=message):
        sok.load(dumped, make())


def test_slots_that_are_not_in_the_dump_are_told(dumped):
    dynamic, _ = variables()
    with pytest.raises(ValueError, match=r"no slot 'Adam.m'.*without optimizer="):
        sok.load(dumped, dynamic, sok.OptimizerWrapper(legacy.Adam()))
    assert dynamic.size.numpy().tolist() == [0, 3]


def test_names_that_become_one_are_told(tmp_path):
    one, other = sok.DynamicVariable(3, name="a/b"), sok.DynamicVariable(3, name="a_b")
    with pytest.raises(ValueError, match="a/b:0' and 'a_b:0' have the same files"):
        sok.dump(tmp_path / "d", [one, other])
    assert not (tmp_path / "d").exists()


def test_an_unwritable_folder_is_told_and_nothing_is_left(tmp_path):
    (tmp_path / "file").write_text("here")
    with pytest.raises(OSError, match="file"):
        sok.dump(tmp_path / "file" / "below", variables()[0])
    assert (tmp_path / "file").read_text() == "here"


@pytest.mark.parametrize("where", ["_make_room", "_write_rows", "put_in_place"])
def test_a_dump_that_fails_leaves_the_old_one(dumped, monkeypatch, where):
    before = contents(dumped)

    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"tfplugin.sok.row_files.{where}", fail)
    with pytest.raises(OSError, match="No space left"):
        sok.dump(dumped, list(variables()))
    assert contents(dumped) == before


def test_a_move_that_fails_halfway_is_taken_back(dumped, monkeypatch):
    before = contents(dumped)
    stock, moves = Path.replace, []

    def replace(self: Path, target: Any) -> Any:
        moves.append(self)
        if len(moves) == 6:  # four files aside, and one in place
            raise OSError(5, "Input/output error")
        return stock(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(OSError, match="Input/output error"):
        sok.dump(dumped, list(variables()))
    assert contents(dumped) == before


def test_slots_of_an_earlier_dump_go_and_other_files_stay(tmp_path):
    dynamic, static = variables()
    optimizer = sok.OptimizerWrapper(legacy.Adam())
    train(optimizer, dynamic, static)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "dynamic_0-notes").write_text("mine, too")
    sok.dump(tmp_path, [dynamic, static], optimizer)
    sok.dump(tmp_path, dynamic)
    assert {path.name for path in tmp_path.iterdir()} == {
        "notes.txt",
        "dynamic_0-notes",
        "dynamic_0-key",
        "dynamic_0-weight",
        *(f"static_0-{column}" for column in ("key", "weight", "Adam-m", "Adam-v")),
    }


def test_slots_for_some_variables_only_are_told(tmp_path):
    dynamic, static = variables()
    optimizer = sok.OptimizerWrapper(legacy.Adam())
    train(optimizer, dynamic, static)
    other = sok.Variable(np.ones((2, 3)), dtype=tf.float32, name="other")
    with pytest.raises(ValueError, match=r"has slots for \['static:0'\] and none for \['other:0'\]"):
        sok.dump(tmp_path, [static, other], optimizer)
