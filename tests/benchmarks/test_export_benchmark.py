"""The benchmark of exported models, on models and tables so small that nothing it measures means anything."""

import doctest
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
#: One that answers to the bit, and one for each option.
EXPORTS = ("plain", "perfect index", "clipped, int8")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder that a run on little wrote to: without the second click model and exports that are like others."""
    pytest.importorskip("tfplugin")
    folder = tmp_path_factory.mktemp("export")
    command = [sys.executable, str(ROOT / "benchmarks" / "export_models.py"), "--steps", "3", "--batches", "1", "50"]
    command += ["--models", "tf1", "--exports", *EXPORTS]
    command += [
        "--index-rows",
        "3000",
        "--dim",
        "4",
        "--ids",
        "200",
        "20",
        "--export-rows",
        "5000",
        "--export-dim",
        "4",
    ]
    command += ["--export-rounds", "1", "--tables", "5", "--rounds", "1", "--seconds", "0.02", "--folder", str(folder)]
    done = subprocess.run([*command, "--output", str(folder / "results")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "results"


def result_of(run):
    (path,) = run.glob("*-export.json")
    return json.loads(path.read_text())


@pytest.mark.thorough
def test_every_export_that_is_asked_for_is_asked(run, module):
    export_models = module("export_models")
    models = result_of(run)["models"]
    assert [model["kind"] for model in models] == ["tf1"]
    for model in models:
        kinds = export_models.variants(export_models.CLICK_MODELS[model["kind"]][1], EXPORTS)
        assert len(kinds) == len(EXPORTS)
        assert model["exports"].keys() == {export_models.TRAINED, *(one.name for one in kinds)}
        for one in model["exports"].values():
            assert one["bytes"] > 0 and one["load_seconds"] > 0 and one["requests 1"] > 0 and one["requests 50"] > 0
            assert 0 < one["auc"] < 1
        for one in kinds:
            assert model["exports"][one.name]["same"] or not one.same


@pytest.mark.thorough
def test_the_indexes_stand_beside_a_dense_gather_and_our_operation(run, module):
    export_models = module("export_models")
    (table,) = result_of(run)["indexes"]
    assert table["sides"].keys() == {export_models.DENSE, export_models.OURS, export_models.XLA, "hash", "perfect"}
    for one in table["sides"].values():
        assert one["rows 200"] > 0 and one["rows 20"] > 0 and one["load_peak"] >= one["load_memory"]


@pytest.mark.thorough
def test_exports_stand_beside_cat(run):
    speed = result_of(run)["speed"]
    assert {"cat", "cat and sync", "export, hash", "export, perfect"} <= speed["sides"].keys()
    assert all(one["beside"]["cat"] > 0 for one in speed["sides"].values())
    # Of a process as short as `cat` Linux may have counted no page yet.
    assert all(one["peak_mebibytes"] > 0 for name, one in speed["sides"].items() if "cat" not in name)
    assert all(seconds > 0 for seconds in speed["tables"]["sides"].values())


@pytest.mark.thorough
def test_the_page_of_exports_has_tables_that_fit(run):
    page = next(run.glob("*-export.md")).read_text()
    for heading in (
        "What was asked",
        "TensorFlow 1, wide and deep",
        "Indexes",
        "Speed of an export",
    ):
        assert f"\n## {heading}" in page
    for block in page.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.strip().splitlines()}) == 1, block


def test_figures_of_exports_are_read_right(module):
    assert doctest.testmod(module("exporting.page")).failed == 0


@pytest.mark.parametrize("ratio, peak, seconds, reached", [(0.31, 900, 9, True), (0.29, 1400, 11, False)])
def test_goals_of_exports_are_judged(module, ratio, peak, seconds, reached):
    side = {"beside": {"cat": ratio}, "peak_mebibytes": peak}
    tables = {"count": 1000, "sides": {"hash": seconds}}
    speed = {"rows": 10_000_000, "dim": 32, "sides": {"cat": side, "export, hash": side}, "tables": tables}
    judged = module("exporting.page").goals({"speed": speed})
    assert [one["reached"] for one in judged] == [reached] * 3


def test_the_bit_for_bit_claim_of_a_model_is_judged(module):
    trained = {"difference": 0.0, "same": True}
    plain = trained | {"export_seconds": 1.0}
    int8 = {"difference": 0.1, "same": False, "export_seconds": 1.0}
    model = {"title": "a model", "exports": {"trained": trained, "plain": plain, "int8": int8}}
    (judged,) = module("exporting.page").goals({"models": [model]})
    assert "plain" in judged["what"] and judged["reached"]


def test_processes_take_turns_and_the_middle_counts(module):
    side = module("exporting.side")
    asked = []

    class Asked:
        def __init__(self, name, rates):
            self.name, self.rates = name, iter(rates)

        def ask(self, **what):
            asked.append((self.name, what["requests"], what["batch"]))
            return {"per_second": next(self.rates)}

    sides = {"a": Asked("a", [1.0, 9.0, 2.0]), "b": Asked("b", [5.0, 4.0, 6.0])}
    files = {"a": Path("keys"), "b": Path("rows")}
    assert side.in_turns(sides, files, 7, 3, 0.1) == {"a": 2.0, "b": 5.0}
    assert [name for name, _, _ in asked] == ["a", "b", "b", "a", "a", "b"]
    assert asked[0] == ("a", "keys", 7) and asked[1] == ("b", "rows", 7)


def test_requests_are_slices_of_a_file(module, tmp_path):
    process = module("exporting.model_process")
    np.savez(tmp_path / "r.npz", ids=np.arange(10), dense=np.arange(20).reshape(10, 2))
    model = process.Model.__new__(process.Model)
    model.inputs, model.how = ["dense", "ids"], "session"
    requests = model.requests(str(tmp_path / "r.npz"), 4)
    assert [request[1].tolist() for request in requests] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert requests[1][0].shape == (4, 2) and len(model.requests(str(tmp_path / "r.npz"), 1, most=3)) == 3
