"""What some ranks have saved, any other number of ranks restores: rows, slots, and how training goes on."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import launch_on_ranks

from kvtools.dialects.detect import open_checkpoint
from kvtools.verify import verify

pytest.importorskip("horovod", reason="Horovod is not installed: run `make setup-horovod`")
pytestmark = pytest.mark.thorough

SCRIPT = Path(__file__).with_name("save_and_restore.py")
CHANGES = [(2, 1), (2, 3), (1, 3), (3, 2)]
MAKERS = ("keras", "legacy")
State = dict[str, dict[int, list[Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all launches have written. Each restores what those before it have saved."""
    folder = tmp_path_factory.mktemp("saved")
    for ranks, *asked in [(2, "save"), (1, "2", "save"), (3, "2", "1", "save"), (2, "3")]:
        done = launch_on_ranks(int(ranks), SCRIPT, str(folder), *map(str, asked))
        assert done.returncode == 0, done.stdout
    return folder


def _of_all_ranks(folder: Path, what: str, ranks: int) -> tuple[State, list[list[float]]]:
    """The states of all ranks in one; each row is on one of them."""
    whole: State = {}
    biases = []
    for rank in range(ranks):
        state, bias = pickle.loads((folder / f"{what}-{rank}.pickle").read_bytes())
        biases.append(bias)
        for table, rows in state.items():
            held = whole.setdefault(table, {})
            assert not held.keys() & rows.keys(), f"several ranks have rows of {table}"
            held.update(rows)
    return whole, biases


def _assert_same(got: State, expected: State, columns: int = 3, tolerance: float = 0.0) -> None:
    assert got.keys() == expected.keys()
    for table, rows in expected.items():
        assert got[table].keys() == rows.keys(), table
        for key, row in rows.items():
            assert len(row) == 3 and len(got[table][key]) == columns  # values, and two slots of Adam
            np.testing.assert_allclose(got[table][key], row[:columns], 0, tolerance, err_msg=f"{key} of {table}")


@pytest.mark.parametrize(("saved_by", "by"), CHANGES)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_dump_loads_on_another_number_of_ranks(folder: Path, maker: str, saved_by: int, by: int) -> None:
    saved = folder / f"{maker}-saved-by-{saved_by}"
    expected, _ = _of_all_ranks(saved, "state", saved_by)
    got, _ = _of_all_ranks(saved, f"loaded-by-{by}", by)
    _assert_same(got, expected)


@pytest.mark.parametrize(("saved_by", "by"), CHANGES)
@pytest.mark.parametrize("maker", MAKERS)
def test_a_checkpoint_restores_on_another_number_of_ranks(folder: Path, maker: str, saved_by: int, by: int) -> None:
    saved = folder / f"{maker}-saved-by-{saved_by}"
    expected, _ = _of_all_ranks(saved, "state", saved_by)
    got, biases = _of_all_ranks(saved, f"restored-by-{by}", by)
    _assert_same(got, expected, columns=1)
    assert biases == [[1.5, 0.0]] * by  # that of rank 0


@pytest.mark.parametrize(("saved_by", "by"), CHANGES)
@pytest.mark.parametrize("maker", MAKERS)
def test_training_goes_on_as_it_would_have(folder: Path, maker: str, saved_by: int, by: int) -> None:
    """Slots and the optimizer's count of steps are part of it."""
    saved = folder / f"{maker}-saved-by-{saved_by}"
    expected, _ = _of_all_ranks(saved, "next", saved_by)
    got, _ = _of_all_ranks(saved, f"next-by-{by}", by)
    _assert_same(got, expected, tolerance=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("what", ["dump", "model"])
def test_kvtools_verifies_what_ranks_have_saved(folder: Path, what: str, maker: str, ranks: int) -> None:
    saved = folder / f"{maker}-saved-by-{ranks}"
    expected, _ = _of_all_ranks(saved, "state", ranks)
    path = str(saved / what)
    assert [finding for finding in verify(path).findings if finding.severity != "info"] == []
    checkpoint = open_checkpoint(path)
    for table in ("int64", "uint64", "one_rank"):
        name = next(found for found in checkpoint.tables if table in found.removesuffix("_0").split("/"))
        rows = checkpoint.table(name).to_numpy()
        assert sorted(rows.keys.tolist()) == sorted(expected[table])
        for key, row in zip(rows.keys.tolist(), rows.values, strict=True):
            np.testing.assert_array_equal(row, expected[table][key][0])
        assert len(rows.slots) == 2
