"""Tables on a GPU, in TensorFlow: the tests of key-value variables once more, with their tables placed on `/GPU:0`.

The GPU is made of the CPU (`gpu/cpu_as_gpu.cc`): TensorFlow places ops on it, copies to it and runs the GPU kernels of
`kernels/tensorflow`. What these call runs on threads. What cannot be shown without a GPU is that the CUDA code under
them runs: `benchmarks/gpu/run.sh` does that, where there is one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from locks import locked
from tensorflow.python.framework import kernels

import tfplugin  # noqa: F401  (registers the ops)

HERE = Path(__file__).parent
PATHS = [str(HERE / "gpu"), str(HERE), *(str(HERE.parent / name) for name in ("suite", "kernels", "kvtools", "sok"))]
#: Of these all ops lie on the GPU, or the tests say otherwise. The first ones are run by `make test`.
FILES = [
    "gpu/check_placement.py",
    "test_lookup_many.py",
    "test_writes.py",
    "../tfra/test_variable.py",
    "test_admission.py",
    "test_async_moment.py",
    "test_chain.py",
    "test_checkpoint.py",
    "test_cuts.py",
    "test_eviction.py",
    "test_expiry.py",
    "test_fused_optimizers.py",
    "test_gradients.py",
    "test_lookup.py",
    "test_pooled_lookup.py",
    "test_restore_tables.py",
    "test_row_counts.py",
    "test_saver.py",
    "test_warm_start.py",
]
FIRST = 3


@pytest.fixture(scope="module")
def gpu() -> Path:
    """The library of the GPU that is made of the CPU, compiled once for all that run these tests."""
    pytest.importorskip("kvtools._device_table", reason="kvtools was built without it: `make setup` builds it")
    compiler = next((found for name in ("g++", "clang++", "c++") if (found := shutil.which(name))), None)
    assert compiler is not None
    include = f"-isystem{tf.sysconfig.get_include()}"
    source = HERE / "gpu" / "cpu_as_gpu.cc"
    command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", include, str(source)]
    told = "\0".join([*command, tf.version.VERSION, tf.version.GIT_VERSION, source.read_text()])
    folder = HERE.parents[1] / "build" / f"cpu-as-gpu-{hashlib.sha256(told.encode()).hexdigest()[:16]}"
    library = folder / "libcpu_as_gpu.so"
    with locked(folder / "lock"):
        if not library.exists():
            fresh = folder / "fresh.so"
            subprocess.run([*command, "-o", fresh], check=True)
            fresh.replace(library)
    return library


def run(files: list[str], gpu: Path, *options: str) -> None:
    """Run test files in a process in which tables are on that GPU."""
    environment = {**os.environ, "KVTOOLS_CPU_AS_GPU": str(gpu), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = ["-p", "no:cacheprovider", "-p", "tables_on_gpu", "-o", f"pythonpath={' '.join(PATHS)}"]
    command = [sys.executable, "-P", "-m", "pytest", "-q", *plugins, *options, *(str(HERE / file) for file in files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parents[1])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_with_tables_on_a_gpu(gpu: Path) -> None:
    run(FILES[:FIRST], gpu, "-m", "not thorough")


@pytest.mark.thorough
def test_more_with_tables_on_a_gpu(gpu: Path) -> None:
    run(FILES[FIRST:], gpu, "-m", "not thorough")


def test_every_op_has_a_kernel_for_gpus() -> None:
    ops = {kernel.op for kernel in kernels.get_all_registered_kernels().kernel if kernel.op.startswith("Kv")}
    assert len(ops) > 40
    for op in ops:
        devices = {kernel.device_type for kernel in kernels.get_registered_kernels_for_op(op).kernel}
        assert devices == {"CPU", "GPU"}, op


def test_rows_stay_on_the_gpu() -> None:
    """What is large does not pass through host memory: keys, rows and gradients of lookups and updates."""
    on_host = {
        "KvTableGather": set(),
        "KvTableGatherMany": set(),
        "KvTableUpsert": set(),
        "KvTableAccumulate": set(),
        "KvTableContains": set(),
        "KvTableApply": {"hyperparameters", "places"},
        "KvTableReadRows": set(),
        "KvTableWriteRows": set(),
        "KvTablePool": {"keys", "segments", "shapes", "weights", "fill_keys"},
        "KvTablePoolGradient": {"keys", "segments", "shapes", "weights", "fill_keys"},
    }
    for op, expected in on_host.items():
        (kernel,) = [k for k in kernels.get_registered_kernels_for_op(op).kernel if k.device_type == "GPU"]
        assert set(kernel.host_memory_arg) == expected, op
