"""The benchmark harness on tables so small that nothing it measures means anything."""

import doctest
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
ONE_TABLE = ["lookup", "train", "half", "parts", "pooled", "small", "ctr", "keras"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder that a run without peers wrote to."""
    pytest.importorskip("tfplugin")
    folder = tmp_path_factory.mktemp("results")
    options = ["--size", "tiny", "--no-peers", "--no-plots", "--output", str(folder), "--only", *ONE_TABLE]
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def result_of(run):
    (path,) = run.glob("*.json")
    return json.loads(path.read_text())


@pytest.mark.thorough
def test_a_run_writes_every_side_of_every_case(run):
    result = result_of(run)
    assert {case["group"] for case in result["cases"]} == set(ONE_TABLE)
    assert {"date", "machine", "versions", "size", "rounds", "left_out"} <= result.keys()
    assert "TFRA" in result["left_out"]
    for case in result["cases"]:
        assert case["sides"] and "TFRA" not in case["sides"]
        for side in case["sides"].values():
            assert "error" not in side
            assert len(side["seconds"]) == result["rounds"]
            assert side["median"] == pytest.approx(np.median(side["seconds"])) and side["median"] > 0


@pytest.mark.thorough
def test_ratios_with_a_target_say_whether_it_is_reached(run):
    entries = [entry for case in result_of(run)["cases"] for entry in case["ratios"]]
    judged = [entry for entry in entries if "reached" in entry]
    assert judged
    for entry in judged:
        reached = entry["ratio"] <= entry["at_most"] if "at_most" in entry else entry["ratio"] >= entry["at_least"]
        assert entry["reached"] == reached


@pytest.mark.thorough
def test_lookups_and_steps_stand_beside_the_memory_floor(run):
    floors = {case["group"]: case["floor"] for case in result_of(run)["cases"] if "floor" in case}
    assert floors.keys() == {"lookup", "train"}
    assert all(floor["share"] > 0 and floor["copy_bytes_per_second"] > 0 for floor in floors.values())


@pytest.mark.thorough
def test_cases_say_how_far_apart_the_processors_were(run):
    for case in result_of(run)["cases"]:
        assert len(case["line_transfer_ns"]) == 2 and min(case["line_transfer_ns"]) > 0


def test_the_page_names_the_cases_that_processors_without_a_common_cache_ran(module):
    def case(title, *line_transfer_ns):
        return {"group": "train", "title": title, "line_transfer_ns": line_transfer_ns}

    told = module("report")._line_transfers
    assert told([{"group": "train", "title": "SGD"}]) == []
    assert "45 ns and more" in told([case("SGD", 45, 60)])[1] and "never twice" in told([case("SGD", 45, 60)])[1]
    (page,) = told([case("SGD", 45, 60), case("Adam", 50, 210), case("Adagrad", 230, 44)])[1:]
    assert "Training step, Adam (50, 210); Training step, Adagrad (230, 44)." in page and "SGD" not in page


@pytest.mark.thorough
def test_the_end_to_end_run_says_what_was_learnt(run):
    (case,) = [case for case in result_of(run)["cases"] if case["group"] == "ctr"]
    for side in case["sides"].values():
        assert 0 < side["auc"] < 1 and side["log_loss"] > 0


@pytest.mark.thorough
def test_the_page_has_a_table_per_group(run):
    (path,) = run.glob("*.md")
    page = path.read_text()
    headings = ("Targets", "Lookup through", "Training step", "Parts", "Pooled", "Small batches", "End to end", "Keras")
    for heading in headings:
        assert f"\n## {heading}" in page
    for block in page.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.strip().splitlines()}) == 1, block


@pytest.fixture(scope="module")
def run_on_ranks(tmp_path_factory):
    """The folder that a run on two ranks wrote to, and what it printed."""
    pytest.importorskip("tfplugin")
    if importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: run `make setup-horovod`")
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(ROOT / "benchmarks" / "sok.py"), "--size", "tiny", "--json", "--output", str(folder)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


@pytest.mark.thorough
def test_a_run_on_ranks_puts_the_lookup_beside_the_bare_alltoall(run_on_ranks):
    folder, printed = run_on_ranks
    result = result_of(folder)
    assert json.loads(printed) == result
    assert {case["group"] for case in result["cases"]} == {"exchange", "overlap", "rank scaling", "bounded"}
    assert "horovod" in result["versions"]["ranks"]
    for case in result["cases"]:
        if case["group"] == "exchange":
            assert case["sides"].keys() == {
                "one call",
                "bfloat16",
                "a call each",
                "over Horovod",
                "alltoall",
                "one rank",
            }
        if case["group"] == "rank scaling":
            assert list(case["sides"]) == ["1 rank", "2 ranks"]
        for side in case["sides"].values():
            assert "error" not in side and len(side["seconds"]) == result["rounds"]
        assert all(entry["ratio"] > 0 for entry in case["ratios"])
        assert len(case["ratios"]) == {"exchange": 6, "overlap": 2, "rank scaling": 1, "bounded": 2}[case["group"]]
    (page,) = folder.glob("*-sok-tiny.md")
    assert "## `sok.lookup_sparse` over Horovod ranks" in page.read_text()


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_bare_alltoall_has_the_bytes_of_the_lookup(module, ranks):
    tf, raw = pytest.importorskip("tensorflow"), pytest.importorskip("tfplugin.ops").raw
    exchange = module("work.exchange")
    case = {"tables": 3, "samples": 40, "hotness": 2, "rows": 100, "ids": "zipf", "batches": 1}
    (ids,) = exchange.ids_of(1, case)
    _, splits, _ = raw.kv_exchange_request(
        list(tf.constant(ids)),
        [tf.range(0, 81, 2, dtype=tf.int64)] * 3,
        [],
        [],
        [],
        rank=1,
        ranks=ranks,
        names=["a", "b", "c"],
        owners=[-1] * 3,
        rows=[-1] * 3,
        key_dtypes=[tf.int64] * 3,
        dims=[4] * 3,
        hotness=[-1] * 3,
        outer=[-1] * 3,
        weighted=[False] * 3,
    )
    assert splits.numpy().tolist() == [exchange.HEADER_WORDS + 3 + keys for keys in exchange.asked_keys(ids, ranks)]


def test_ranks_that_cannot_start_say_why(module, monkeypatch):
    turns, ranks = module("turns"), module("horovod_ranks")
    monkeypatch.setattr(ranks, "HOROVODRUN", "import sys; sys.exit('no such launcher')")
    crew = ranks.WorkersWithRanks(2, {})
    with pytest.raises(turns.WorkerError, match="no such launcher"):
        crew.of(["ranks"], 1)
    crew.stop()


def test_a_rank_that_dies_is_an_error_and_no_wait(module, monkeypatch):
    turns, ranks = module("turns"), module("horovod_ranks")
    two_ranks = """
import json, socket, sys
for number in range(2):
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(sys.argv[-1])
    channel.sendall((json.dumps({"rank": 1 - number, "versions": {}, "horovod": "0"}) + "\\n").encode())
    globals()[f"rank_{number}"] = channel
rank_0.recv(1)
sys.exit("died at work")
"""
    monkeypatch.setattr(ranks, "HOROVODRUN", two_ranks)
    crew = ranks.WorkersWithRanks(2, {})
    worker = crew.of(["ranks"], 1)["ranks"]
    with pytest.raises(turns.WorkerError, match="ended"):
        worker.ask("run", "a side", calls=1)
    crew.stop()
    with pytest.raises(turns.WorkerError, match="stopped"):
        worker.ask("run", "a side", calls=1)


def test_bytes_are_counted_in_lines_where_access_is_random(module):
    floor = module("floor")
    assert doctest.testmod(floor).failed == 0
    assert floor.lookup_bytes(16) == 8 + 64 + 64 + 64
    assert floor.lookup_bytes(8) == 8 + 64 + 64 + 32
    assert floor.step_bytes(16, slots=0) < floor.step_bytes(16, slots=2)
    assert floor.step_bytes(16, slots=2, different=0.5) < floor.step_bytes(16, slots=2)


def test_results_are_named_after_the_machine(module):
    assert doctest.testmod(module("machine")).failed == 0


@pytest.mark.parametrize("how", ["uniform", "unique", "zipf"])
def test_ids_are_the_same_in_every_process(module, how):
    ids = module("ids")
    first, again = (ids.batches(how, 1000, 500, 3) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert a.dtype == np.int64 and a.shape == (500,) and np.array_equal(a, b)
        assert a.min() >= 0 and a.max() < 1000
        assert how != "unique" or len(np.unique(a)) == len(a)
    assert not np.array_equal(first[0], first[1])


def test_a_side_that_computed_something_else_is_not_compared(module, capsys):
    turns = module("turns")
    seconds = {"seconds": [1.0, 3.0, 2.0]}
    results = {"a": {"check": 0.5, **seconds}, "b": {"check": 0.5}, "c": {"check": 0.6}}
    turns._compare_checks(results)
    assert [name for name in results if "error" in results[name]] == ["c"]
    assert "0.6" in capsys.readouterr().err
    assert turns.ratio(results, "a", "c") is None


def test_ratios_are_taken_within_a_round(module):
    turns = module("turns")
    results = {"fast": {"seconds": [1.0, 10.0, 1.0]}, "slow": {"seconds": [2.0, 20.0, 4.0]}}
    assert turns.ratio(results, "fast", "slow") == 2.0
    assert turns.ratio(results, "fast", "slow", of_times=True) == 0.5


def test_tables_that_do_not_fit_are_left_out_and_named(module, monkeypatch):
    scaling, case = module("cases.scaling"), module("cases.case")
    monkeypatch.setattr(scaling, "available_bytes", lambda: scaling.needed_bytes(1_000_000, scaling.NARROW))
    rows = [c.parameters["rows"] for c in scaling.cases(case.FULL) if c.group == "rows"]
    assert max(rows) == 1_000_000
    assert [note.split()[0] for note in scaling.left_out(case.FULL)] == ["3,000,000", "10,000,000", "30,000,000"]


def test_a_peer_that_cannot_be_installed_is_left_out(module, monkeypatch, capsys):
    run = module("run")

    def set_up():
        raise run.tfra.PeerError("no network")

    monkeypatch.setattr(run.tfra, "set_up", set_up)
    assert run.pythons(with_peers=True).keys() == {"kv", "de", "dense"}
    assert "no network" in capsys.readouterr().err


def test_pictures_are_drawn_of_what_was_measured(module, tmp_path):
    pytest.importorskip("matplotlib")
    plots, report, scaling, case = (module(name) for name in ("plots", "report", "cases.scaling", "cases.case"))
    side = {"check": 0.5, "seconds": [0.01, 0.02], "median": 0.015, "calls": 1}
    cases = [
        report.case_result(c, {name: dict(side) for name in c.sides}, bandwidth=1e10)
        for c in (*scaling.cases(case.TINY), *module("cases.train").cases(case.TINY))
    ]
    drawn = plots.draw({"cases": cases}, tmp_path)
    assert {path.name for path in drawn} == {
        "speed-by-rows.png",
        "speed-by-dims.png",
        "speed-by-threads.png",
        "training-step.png",
    }
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


@pytest.mark.thorough
def test_snapshots_are_measured(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "snapshot.py"), "--tables", "3000x4", "--cold-rows", "3000"]
    command += ["--rounds", "1", "--seconds", "0.01", "--folder", str(tmp_path), "--output", str(tmp_path / "results")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = (tmp_path / "results").glob("*-snapshot.json")
    result = json.loads(path.read_text())
    assert all(rate > 0 for rate in result["lookups"][0]["batch 1000"].values())
    assert result["cold"]["rows"] == 3000
    for runs in result["cold"]["starts"].values():
        assert all(0 < run["live"] <= run["ready"] <= run["first lookup"] for run in runs) and runs[0]["warm"] > 0
    page = next((tmp_path / "results").glob("*-snapshot.md")).read_text()
    assert "## What was asked" in page and "3,000 rows, cold: seconds until it lives" in page
    for block in page.split("\n\n"):
        if block.startswith("|"):
            assert len({line.count("|") for line in block.strip().splitlines()}) == 1, block


@pytest.mark.parametrize("rate, live, reached", [(12.5, 0.9, [True, True]), (11.9, 1.1, [False, False])])
def test_goals_of_snapshots_are_judged(module, rate, live, reached):
    snapshot = module("snapshot")
    lookups = [{"rows": 20_000_000, "dim": 16} | {f"batch {size}": {"snapshot": rate} for size in snapshot.BATCHES}]
    cold = {"rows": 100_000_000, "starts": {"cold": [{"live": live}] * 3}}
    judged = snapshot.goals({"lookups": lookups, "cold": cold})
    assert [one["reached"] for one in judged] == [reached[0], *reached]


@pytest.mark.thorough
def test_the_stages_of_a_step_are_told(tmp_path):
    pytest.importorskip("tfplugin")
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "step_stages.py"),
        "--rows",
        "1000",
        "--batch",
        "64",
        "--dim",
        "4",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "of the floor" in done.stdout
    for stage in ("session", "feed", "between the ops", "KvTableGather", "KvTableApply", "Mul"):
        assert f"  {stage}" in done.stdout
