"""The benchmarks of tables in device memory, on the CPU's threads: they run, and their JSON has every row.

No figure means anything here; `make bench-gpu` is for a machine with a GPU.
"""

import doctest
import importlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from locks import locked

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "benchmarks" / "gpu"
PROGRAMS = ["device_table_benchmark", "training_step_benchmark"]
TINY = {
    "device_table_benchmark": ["--rows", "4000", "--batch", "300", "--dims", "1,8", "--loads", "0.5,1"],
    "training_step_benchmark": ["--tables", "3", "--rows", "2000", "--batch", "256", "--dim", "4"],
}
# What HierarchicalKV's table does, and beside it true inserts, random hits and keys after Zipf's law.
OPERATIONS = {
    "find", "find*", "contains", "assign", "insert_or_assign", "accum_or_assign", "find_or_insert", "find_or_insert*",
    "erase", "erase_if", "export_batch", "export_batch_if", "size",
    "find, hits all over", "find, Zipf", "assign, Zipf", "accum, Zipf", "find_or_insert, Zipf",
    "insert_or_assign, may repeat", "insert_or_assign, all new", "insert_or_assign, all there",
}  # fmt: skip
# On bounded tables of their own, which are full.
EVICTIONS = {
    f"insert_and_evict, {policy}, {share} new" for policy in ("LRU", "LFU", "custom") for share in ("all", "40%")
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Name -> program on the CPU's threads, from the build of `make setup` where there is one."""
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if cmake is None:
        pytest.skip("building the benchmarks needs cmake, which is not on the PATH")
    build = ROOT / "build" / "setup"
    commands = []
    if not (build / "CMakeCache.txt").exists():
        build = tmp_path_factory.mktemp("build")
        options = ["-DKVTABLE_PYTHON=OFF", "-DKVTOOLS_CUDA=off", "-DKVTABLE_BUILD_TESTS=ON", "-DCMAKE_BUILD_TYPE=Debug"]
        commands.append([cmake, "-S", ROOT, "-B", build, *options])
    commands.append([cmake, "--build", build, "--target", *(f"{name}_on_threads" for name in PROGRAMS)])
    with locked(ROOT / "build" / "benchmarks.lock"):
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return {name: build / "kernels" / "tests" / f"{name}_on_threads" for name in PROGRAMS}


@pytest.fixture
def module(monkeypatch):
    monkeypatch.syspath_prepend(str(GPU))
    return importlib.import_module


def output_of(programs, name):
    done = subprocess.run([programs[name], *TINY[name]], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_finite(row):
    for name, value in row.items():
        assert not isinstance(value, int | float) or (math.isfinite(value) and value >= 0), (name, row)


def test_each_operation_is_measured_at_each_dim_and_load(programs):
    result = output_of(programs, "device_table_benchmark")
    assert result["device"] == "CPU threads"
    assert result["copy_bytes_per_second"] > 0
    measured = [row for row in result["results"] if row["operation"] != "memory"]
    assert sorted((row["dim"], row["load"], row["operation"]) for row in measured) == sorted(
        [(dim, load, operation) for dim in (1, 8) for load in (0.5, 1.0) for operation in OPERATIONS]
        + [(dim, 1.0, operation) for dim in (1, 8) for operation in EVICTIONS]
    )
    for row in measured:
        assert row.keys() == {
            *("dim", "rows", "load", "operation", "keys", "seconds", "keys_per_second"),
            *("hkv_unit", "bytes", "roofline"),
        }
        assert_finite(row)
        assert row["seconds"] > 0 and (row["bytes"] > 0 or row["operation"] == "size")
        assert row["hkv_unit"] == pytest.approx(row["keys"] / row["seconds"] / 2**30, rel=1e-2)
        assert row["roofline"] == pytest.approx(
            row["bytes"] / row["seconds"] / result["copy_bytes_per_second"], rel=1e-2
        )
    for row in measured:
        if row["operation"] in EVICTIONS:
            _, policy, share = row["operation"].split(", ")
            new, row_bytes = (1.0 if share == "all new" else 0.4), 4 * row["dim"]
            # Each key: itself, stamp, score, bucket and row; a new one: its bucket again, and the row that goes for it.
            each = 8 + 8 + (16 if policy == "custom" else 8) + 64 + 2 * row_bytes
            assert row["bytes"] == pytest.approx(
                row["keys"] * (each + new * (64 + 2 * 64 + 2 * row_bytes + 24)), rel=1e-3
            )
    memory = [row for row in result["results"] if row["operation"] == "memory"]
    assert [row["rows"] for row in memory] == [2000, 4000] * 2  # what an operation inserts goes again
    for row in memory:
        assert_finite(row)


def test_each_stage_of_a_training_step_is_measured(programs, module):
    result = output_of(programs, "training_step_benchmark")
    assert (result["tables"], result["dim"], result["rows"], result["batch"]) == (3, 4, 2000, 256)
    assert [(row["ids"], row["stage"]) for row in result["results"]] == [
        (ids, stage) for ids in ("uniform", "zipf") for stage in ("lookup", "apply", "step")
    ]
    torch_step = module("torch_step")
    for row in result["results"]:
        assert_finite(row)
        assert row["roofline"] == pytest.approx(
            row["bytes"] / row["seconds"] / result["copy_bytes_per_second"], rel=1e-2
        )
        # PyTorch gets the same ids.
        ids = [torch_step.LAWS[row["ids"]](256, 2000, seed) for seed in range(3 * torch_step.BATCHES)]
        assert int(row["checksum"]) == sum(int(each.sum()) for each in ids)
        assert row["distinct"] == sum(len(np.unique(each)) for each in ids) / torch_step.BATCHES
        looked_up = 3 * 256 * (8 + 16) + row["distinct"] * (64 + 16)
        applied = 3 * 256 * (8 + 16) + row["distinct"] * (64 + 6 * 16 + 16)
        bytes_of = {"lookup": looked_up, "apply": applied, "step": looked_up + applied}
        assert row["bytes"] == pytest.approx(bytes_of[row["stage"]], rel=1e-3)
    zipf, uniform = (next(row for row in result["results"] if row["ids"] == law) for law in ("zipf", "uniform"))
    assert zipf["distinct"] < 0.7 * uniform["distinct"]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("wrong", [["--what", "3"], ["--rows"], ["--rows", "0"], ["--rows", "many"]], ids=" ".join)
def test_options_that_there_are_not_are_refused(programs, name, wrong):
    done = subprocess.run([programs[name], *wrong], capture_output=True, text=True)
    assert done.returncode == 2
    assert wrong[0] in done.stderr


@pytest.mark.parametrize("name", ["torch_step", "kernels"])
def test_without_pytorch_or_a_gpu_the_result_says_so(name):
    done = subprocess.run(
        [sys.executable, GPU / f"{name}.py"],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["rows"] > 0 and "results" not in result
    assert "PyTorch" in result["unavailable"]


def test_examples(module):
    assert doctest.testmod(module("merge")) == (0, 1)
    assert doctest.testmod(module("kernels")) == (0, 2)


def test_steps_are_compared_where_the_ids_were_the_same(module):
    def side(seconds, checksum):
        return {"results": [{"ids": "zipf", "stage": "step", "seconds": seconds, "checksum": checksum}]}

    speedups = module("merge").speedups
    assert speedups(side(2.0, "7"), side(6.0, "7")) == {"zipf": 3.0}
    assert speedups(side(2.0, "7"), side(6.0, "8")) == {}
    assert speedups(side(2.0, "7"), {"unavailable": "PyTorch sees no GPU"}) == {}


@pytest.fixture
def run_script(programs, tmp_path):
    """run.sh over a build whose checks are shell scripts and whose benchmarks run on threads: (status, results)."""

    def run(check="exit 0"):
        build, out = tmp_path / "build", tmp_path / "results"
        folder = build / "kernels" / "tests"
        folder.mkdir(parents=True)
        tests = (ROOT / "kernels" / "tests").glob("device_*_test.cc")
        scripts = {path.stem.removesuffix("_test") + "_cuda_check": "exit 0" for path in tests}
        scripts["device_table_cuda_check"] = check
        scripts |= {name: f'exec "{programs[name]}" {" ".join(TINY[name])}' for name in PROGRAMS}
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)
        done = subprocess.run(
            ["/bin/sh", GPU / "run.sh", out],
            env=os.environ | {"KVTOOLS_GPU_BUILD": str(build), "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "-1"},
            capture_output=True,
            text=True,
        )
        files = list(out.glob("*-20??-??-??.json"))
        return done, json.loads(files[0].read_text()) if files else None

    return run


def test_one_command_puts_everything_into_one_file(run_script):
    done, result = run_script()
    assert done.returncode == 0, done.stderr
    assert result["chip"] == "CPU threads"
    checks = result["checks"]
    for name in ("device_table", "device_optimizer", "device_eviction", "benchmark", "training_step"):
        assert checks[name] == "passed", name
    assert checks["grid"].startswith("unavailable: kvtools._device_table was not built")
    assert {"memcheck", "racecheck"} <= checks.keys()
    assert checks["kernels"].startswith("unavailable") and "unavailable" in result["kernels"]
    assert checks["torch_step"] == "unavailable: " + result["torch_step"]["unavailable"]
    assert len(result["table"]["results"]) == 2 * (2 * (len(OPERATIONS) + 1) + len(EVICTIONS))
    assert len(result["training_step"]["results"]) == 6
    assert "PyTorch" in result["torch_step"]["unavailable"]
    assert result["step_times_as_fast_as_torch"] == {}


def test_a_check_that_fails_fails_the_command_and_stops_nothing(run_script):
    done, result = run_script("echo 'a row differs' >&2; exit 3")
    assert done.returncode == 1
    assert "a row differs" in done.stderr
    assert result["checks"]["device_table"] == "failed with status 3"
    assert result["table"]["results"]


def test_without_a_gpu_nothing_is_measured(run_script):
    done, result = run_script("echo 'There is no CUDA device: nothing ran.'")
    assert done.returncode == 1
    assert "no GPU" in done.stderr
    assert result is None
