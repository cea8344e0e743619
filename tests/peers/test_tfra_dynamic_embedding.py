"""Training that moves from TFRA 0.8.1 to `tfplugin.dynamic_embedding` and back, by every kind of checkpoint.

The models are in tests/peers/tfra/model.py; train.py trains them in TFRA.
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

from tfplugin import dynamic_embedding as de

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
