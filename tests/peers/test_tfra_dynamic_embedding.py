"""Training that moves from TFRA 0.8.1 to `tfplugin.dynamic_embedding` and back, by every kind of checkpoint.

The models are in tests/peers/tfra/model.py; train.py trains them in TFRA,
train_on.py goes on there with what was saved here.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import kvtools
from kvtools.dialects.writing import WriteOptions
from tfplugin import dynamic_embedding as de

pytestmark = pytest.mark.thorough

Run = Callable[..., None]
State = Mapping[str, np.ndarray]

MODEL = runpy.run_path(str(Path(__file__).parent / "tfra" / "model.py"))
GraphModel, EagerModel, typed, bits = (MODEL[name] for name in ("GraphModel", "EagerModel", "typed", "bits"))
OPTIMIZERS = {
    "tf_keras": lambda: {"user": tf_keras.optimizers.Adam(0.1), "item": tf_keras.optimizers.legacy.Adagrad(0.1)},
    "Keras 3": lambda: {"user": tf.keras.optimizers.Adam(0.1), "item": tf.keras.optimizers.Adagrad(0.1)},
}
#: What slots start from, other than 0.
IN_GRAPH, EAGER = {"accumulator": 0.5, "accum": 0.1}, {"accumulator": 0.1}


@pytest.fixture(scope="module")
def trained(tfra: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What TFRA saved after three steps, and in states.npz what was in it then and three steps later."""
    folder = tmp_path_factory.mktemp("trained-in-tfra")
    tfra("train.py", folder)
    return folder


def state_of(folder: Path, case: str) -> State:
    with np.load(folder / "states.npz") as file:
        return {name.removeprefix(f"{case}|"): file[name] for name in file.files if name.startswith(f"{case}|")}


def tables(state: State) -> dict[str, dict[int, np.ndarray]]:
    """The rows by key, for each table of a state."""
    found = {}
    for name, keys in state.items():
        if name.endswith("|keys"):
            rows = state[f"{name.removesuffix('|keys')}|values"]
            assert len(set(keys.tolist())) == len(keys) == len(rows)
            found[name.removesuffix("|keys")] = dict(zip(keys.tolist(), rows, strict=True))
    return found


def assert_loaded(state: State, expected: State, initial: Mapping[str, float]) -> None:
    """To the bit. Rows that a slot table of TFRA lacks are what the optimizer starts from."""
    found, wanted = tables(state), tables(expected)
    assert found.keys() == wanted.keys()
    for table, rows in wanted.items():
        column = table.rpartition("|")[2]
        got = found[table]
        if column in ("values", "status"):
            assert got.keys() == rows.keys()
        for key, row in got.items():
            start = np.full(row.shape, initial.get(column, 0.0), row.dtype)
            np.testing.assert_array_equal(row, rows.get(key, start), err_msg=f"{table} of {key}")
        assert rows.keys() <= got.keys()
    if "dense" in expected:
        np.testing.assert_array_equal(state["dense"], expected["dense"])


def assert_trained_alike(state: State, expected: State) -> None:
    """To the last bits: TFRA runs TensorFlow's dense kernels, the table engine its own, which round in another order.

    Each of a step's ids is in it once: of equal ones TFRA trains the last only.
    """
    found, wanted = tables(state), tables(expected)
    assert found.keys() == wanted.keys()
    for table, rows in wanted.items():
        assert found[table].keys() == rows.keys()
        if table == "user|status" and found[table][0] > 10**9:  # of TimestampRestrictPolicy: each has its own clock
            continue
        keys = list(rows)
        got, want = (np.stack([of[key] for key in keys]) for of in (found[table], rows))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6, err_msg=table)
    if "dense" in expected:
        np.testing.assert_allclose(state["dense"], expected["dense"], rtol=1e-6)


def slots_before_a_step(model: Any) -> dict[str, np.ndarray]:
    """Slots that were restored before the optimizer has asked for them: they lie in the rows."""
    found: dict[str, np.ndarray] = {}
    for name in model.optimizers:
        parts = getattr(model, name).parts
        for slot in parts[0].slot_names():
            exported = [part.export(slot) for part in parts]
            for what, arrays in zip(("keys", "values"), zip(*exported, strict=True), strict=True):
                found[f"{name}|{slot.rpartition('.')[2]}|{what}"] = np.concatenate([array.numpy() for array in arrays])
    return found


@pytest.mark.parametrize("files", [False, True], ids=["in_checkpoint", "to_files"])
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.parametrize("case", ["name_based", "name_based_files"])
def test_a_saver_restores_what_tfra_s_saver_wrote_and_trains_on_alike(
    case: str, devices: int, files: bool, trained: Path
) -> None:
    with tf.Graph().as_default():
        model = GraphModel(de, devices, files)
        model.saver.restore(model.session, str(trained / case / "model-3"))
        assert_loaded(model.state(), state_of(trained, case), IN_GRAPH)
        model.train(range(3, 6))
        assert_trained_alike(model.state(), state_of(trained, f"{case} and on"))


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_files_that_tfra_saved_are_loaded_with_slots_and_status(devices: int, trained: Path) -> None:
    with tf.Graph().as_default():
        model = GraphModel(de, devices)
        for table in model.tables().values():
            if devices == 2:
                model.session.run(table.load_from_file_system(str(trained / "direct")))
            else:
                model.session.run(table.load_from_file_system_with_restore_function(str(trained / "direct")))
        expected = dict(state_of(trained, "name_based"))
        del expected["dense"]
        assert_loaded(model.state(), expected, IN_GRAPH)


@pytest.mark.parametrize("optimizers", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("files", [False, True], ids=["in_checkpoint", "to_files"])
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("case", ["object_based", "object_based_files"])
def test_a_checkpoint_restores_what_tfra_s_wrote_and_trains_on_alike(
    case: str, devices: int, files: bool, optimizers: Any, trained: Path
) -> None:
    model = EagerModel(de, devices, optimizers(), files)
    model.checkpoint.read(str(trained / case / "model")).expect_partial()
    assert_loaded({**model.state(), **slots_before_a_step(model)}, state_of(trained, case), EAGER)
    model.train(range(3, 6))
    assert_trained_alike(model.state(), state_of(trained, f"{case} and on"))


@pytest.mark.parametrize("files", [False, True], ids=["in_checkpoint", "to_files"])
@pytest.mark.parametrize("case", ["object_based", "object_based_files"])
def test_a_checkpoint_in_a_graph_restores_what_tfra_s_wrote(case: str, files: bool, trained: Path) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        user, item = (
            de.Variable(
                name=name,
                dim=4,
                devices=["/CPU:0"] * 3,
                restrict_policy=de.FrequencyRestrictPolicy if name == "tower/user" else None,
                kv_creator=MODEL["kv_creator"](de, files),
            )
            for name in ("tower/user", "tower/item")
        )
        checkpoint = tf.train.Checkpoint(model=tf.train.Checkpoint(user=user, item=item))
        checkpoint.read(str(trained / case / "model")).expect_partial().run_restore_ops(session)
        found = {"user|values": user, "user|status": user.restrict_policy.status, "item|values": item}
        exported = session.run({name: table.export() for name, table in found.items()})
    expected = state_of(trained, case)
    for name, (keys, values) in exported.items():
        wanted = {f"{name}|{what}": expected[f"{name}|{what}"] for what in ("keys", "values")}
        assert_loaded({f"{name}|keys": keys, f"{name}|values": values}, wanted, {})


def test_files_of_tfra_s_checkpoint_are_loaded_by_hand_too(trained: Path) -> None:
    model = EagerModel(de, 3, OPTIMIZERS["tf_keras"]())
    model.train(range(1))  # slots are there from the first step on
    for table in model.tables().values():
        table.load_from_file_system_with_restore_function(str(trained / "object_based_files" / "TFRADynamicEmbedding"))
    found, expected = tables(model.state()), tables(state_of(trained, "object_based_files"))
    for table, rows in expected.items():
        for key, row in rows.items():
            np.testing.assert_array_equal(found[table][key], row)


@pytest.mark.parametrize("devices", [2, 3])
def test_files_of_all_types_that_tfra_saved_are_loaded(devices: int, trained: Path) -> None:
    expected = tables(state_of(trained, "types"))
    for name, variable in typed(de, devices, fill=False).items():
        variable.load_from_file_system_with_restore_function(str(trained / "types"))
        keys, values = variable.export()
        found = tables({"|keys": keys.numpy(), "|values": bits(values.numpy())})[""]
        assert found.keys() == expected[name].keys()
        for key, row in expected[name].items():
            np.testing.assert_array_equal(found[key], row)


# ---- And back ----


def rewritten(checkpoint: str, output: Path, to: str, rule: str) -> None:
    """A checkpoint in TFRA's layout, for two devices."""
    source = kvtools.open(checkpoint)
    kvtools.write_tables(source.select([]), output, to, beside=source, parts=2, options=WriteOptions(partition=rule))


@pytest.fixture(scope="module")
def trained_on(trained: Path, tfra: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, State]]:
    """What TFRA makes of what was trained and saved here; and, by case, what was saved, and what comes of it here."""
    folder = tmp_path_factory.mktemp("trained-here")
    with np.load(trained / "states.npz") as file:
        rule = "low_31_bits" if file["cuda"] else "floor_mod"
    here: dict[str, State] = {}
    for case, devices in (("name_based", 3), ("name_based_files", 2), ("direct", 2)):
        with tf.Graph().as_default():
            model = GraphModel(de, devices, case == "name_based_files")
            model.saver.restore(model.session, str(trained / "name_based" / "model-3"))
            model.train(range(3, 6))
            (folder / case).mkdir()
            path = model.saver.save(model.session, str(folder / case / "model"), global_step=6)
            if case == "name_based":
                rewritten(path, folder / case / "model", "tfra", rule)
            if case == "direct":
                for table in model.tables().values():
                    model.session.run(table.save_to_file_system(str(folder / case / "tables")))
            here[case] = model.state()
            model.train(range(6, 9))
            here[f"{case} and on"] = model.state()
    for case in ("object_based_files", "object_based"):
        model = EagerModel(de, 2, OPTIMIZERS["tf_keras"](), case == "object_based_files")
        model.checkpoint.read(str(trained / "object_based" / "model")).expect_partial()
        model.train(range(3, 6))
        path = model.checkpoint.write(str(folder / case / "model"))
        if case == "object_based":
            for table in model.tables().values():
                table.save_to_file_system(str(folder / case / "tables"))
        here[case] = model.state()
        model.train(range(6, 9))
        here[f"{case} and on"] = model.state()
    for variable in typed(de, 2, fill=True).values():
        variable.save_to_file_system(str(folder / "types"))
    tfra("train_on.py", folder)
    return folder, here


@pytest.mark.parametrize("case", ["name_based", "name_based_files", "direct", "object_based_files", "object_based"])
def test_tfra_loads_what_was_trained_here_and_trains_on_alike(
    case: str, trained_on: tuple[Path, dict[str, State]]
) -> None:
    folder, here = trained_on
    assert_loaded(state_of(folder, case), here[case], {})
    assert_trained_alike(state_of(folder, f"{case} and on"), here[f"{case} and on"])


def test_tfra_s_checkpoint_reads_the_variables_that_a_file_system_saver_saved_here(
    trained_on: tuple[Path, dict[str, State]],
) -> None:
    folder, here = trained_on
    found, expected = tables(state_of(folder, "object_based_files, read")), tables(here["object_based_files"])
    for table in ("user|values", "item|values"):
        assert found[table].keys() == expected[table].keys()
        for key, row in expected[table].items():
            np.testing.assert_array_equal(found[table][key], row)


def test_tfra_loads_files_of_all_types(trained: Path, trained_on: tuple[Path, dict[str, State]]) -> None:
    found, expected = tables(state_of(trained_on[0], "types")), tables(state_of(trained, "types"))
    for name, rows in expected.items():
        assert found[name].keys() == rows.keys()
        for key, row in rows.items():
            np.testing.assert_array_equal(found[name][key], row)


def test_a_saver_of_tables_and_slots_is_restored_by_either(
    tfra: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")  # the script sets it: here, until the end of the test
    here = runpy.run_path(str(Path(__file__).parent / "tfra" / "saver_of_tables.py"))["main"]

    def there(_: Any, what: str, checkpoint: str, out: str) -> None:
        tfra("saver_of_tables.py", what, checkpoint, out)

    for number, (save, restore) in enumerate([(there, here), (here, there)]):
        saved, restored = (str(tmp_path / f"{number}-{what}.npz") for what in ("save", "restore"))
        save(de, "save", str(tmp_path / f"m{number}"), saved)
        restore(de, "restore", str(tmp_path / f"m{number}"), restored)
        with np.load(saved) as before, np.load(restored) as after:
            for name in ("values", "m", "v"):
                rows = [
                    dict(zip(f[f"{name}|0"].tolist(), f[f"{name}|1"].tolist(), strict=True)) for f in (before, after)
                ]
                assert rows[0] == rows[1] and len(rows[0]) == 4
            assert before["dense|1"].tolist() == after["dense|1"].tolist()
