"""What `kvtools doctor` finds on machines and in environments that are not as they should be."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import resource
import socket
import sys
from pathlib import Path

import pytest

from kvtools import op_library
from kvtools.doctor import diagnose
from kvtools.doctor import tensorflow as of_tensorflow
from kvtools.doctor.caches import check_caches
from kvtools.doctor.check import Check
from kvtools.doctor.cuda import check_cuda
from kvtools.doctor.diagnose import SECTIONS
from kvtools.doctor.machine import check_machine
from kvtools.doctor.optional_packages import check_packages
from kvtools.doctor.serving import check_serving

GIB = 1 << 20  # in the KiB of /proc/meminfo


def by_name(checks: object) -> dict[str, Check]:
    return {check.name: check for check in checks}  # type: ignore[attr-defined]


def a_machine(root: Path, **files: str) -> Path:
    everything = {
        "proc/cpuinfo": "model name\t: Some Processor\nflags\t\t: fpu avx avx2 f16c\n",
        "proc/meminfo": f"MemTotal:       {32 * GIB} kB\nMemAvailable:   {8 * GIB} kB\n",
        "proc/sys/vm/overcommit_memory": "0\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        **{name.replace("__", "/"): text for name, text in files.items()},
    }
    for name, text in everything.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_machine_as_it_should_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTABLE_ISA", raising=False)
    found = by_name(check_machine(a_machine(tmp_path)))
    assert {check.status for check in found.values()} == {"ok"}
    assert "Some Processor" in found["processors"].value
    assert found["instructions"].value == "AVX2"
    assert found["memory"].value == "8.0 GiB free of 32.0 GiB"


def test_a_machine_that_holds_tables_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTABLE_ISA", raising=False)
    root = a_machine(
        tmp_path,
        proc__cpuinfo="flags : fpu sse2\n",
        proc__sys__vm__overcommit_memory="2\n",
        sys__kernel__mm__transparent_hugepage__enabled="always madvise [never]\n",
        sys__fs__cgroup__cpu_max="",
    )
    (root / "sys/fs/cgroup/cpu.max").write_text("50000 100000\n")
    (root / "sys/fs/cgroup/memory.max").write_text(f"{2 << 30}\n")
    found = by_name(check_machine(root))
    assert found["processors"].status == "warning" and "0.5 of them" in found["processors"].value
    assert found["instructions"].status == "warning"
    assert "the container may use 2.0 GiB" in found["memory"].value
    assert "sysctl vm.overcommit_memory=0" in found["overcommit"].advice
    assert "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled" in found["huge pages"].advice


def test_a_machine_that_tells_nothing_is_no_fault(tmp_path: Path) -> None:
    assert "error" not in {check.status for check in check_machine(tmp_path)}


def test_an_instruction_set_that_is_held_back_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTABLE_ISA", "baseline")
    found = by_name(check_machine(a_machine(tmp_path)))
    assert "KVTABLE_ISA=baseline" in found["instructions"].value


def test_without_tensorflow_the_way_to_have_it_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (found,) = of_tensorflow.check_tensorflow()
    assert found.status == "note" and "kvtools[tensorflow]" in found.advice


@pytest.mark.parametrize(
    ("program", "said", "advice"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "died of SIGILL", "a processor with AVX"),
        ("raise ImportError('numpy.core.multiarray failed to import')", "multiarray failed", "do not fit"),
        ("raise SystemExit(7)", "exit status 7", "repair it first"),
    ],
    ids=["no AVX", "NumPy", "silent"],
)
def test_a_tensorflow_that_does_not_load_is_an_error_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, program: str, said: str, advice: str
) -> None:
    monkeypatch.setattr(of_tensorflow, "_ASK", program)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    (found,) = of_tensorflow.check_tensorflow()
    assert found.status == "error" and said in found.value and advice in found.advice


def test_a_tensorflow_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_tensorflow, "_ASK", "import time; time.sleep(600)")
    monkeypatch.setattr(of_tensorflow, "SECONDS", 0.5)
    with pytest.raises(RuntimeError, match="more than"):
        of_tensorflow.ask_tensorflow()


@pytest.mark.parametrize("version", ["2.15.1", "2.21.0", "2.22.0"])
def test_versions_of_tensorflow_are_judged(monkeypatch: pytest.MonkeyPatch, version: str, tmp_path: Path) -> None:
    answer = f"import json; print(json.dumps({{'build': ['{version}', 'g', 'c', [], []], 'cuda': False, 'gpus': []}}))"
    monkeypatch.setattr(of_tensorflow, "_ASK", answer)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(of_tensorflow, "package_folder", lambda: None)
    found = by_name(of_tensorflow.check_tensorflow())
    assert found["TensorFlow"].status == {"2.15.1": "error", "2.21.0": "ok", "2.22.0": "warning"}[version]


@pytest.mark.parametrize(("version", "status"), [("3.3.3", "warning"), ("3.99.0", "ok")])
def test_a_keras_that_is_too_old_is_told_with_the_way_to_a_newer_one(
    monkeypatch: pytest.MonkeyPatch, version: str, status: str
) -> None:
    answer = "import json; print(json.dumps({'build': ['2.16.2', 'g', 'c', [], []], 'cuda': False, 'gpus': []}))"
    monkeypatch.setattr(of_tensorflow, "_ASK", answer)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(of_tensorflow, "package_folder", lambda: None)
    monkeypatch.setattr(importlib.metadata, "version", {"keras": version, "tf_keras": "2.16.0", "horovod": "1"}.get)
    found = by_name(of_tensorflow.check_tensorflow())
    assert found["keras"].status == status and version in found["keras"].value
    assert ("pip install" in found["keras"].advice) == (status == "warning")
    assert found["tf_keras"] == Check("tf_keras", "ok", "2.16.0")


def test_ops_are_told_with_what_they_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path("/somewhere/libkvtools_ops.so")
    assert "ready ones of the wheel" in of_tensorflow.ops_check(op_library.OpLibrary("ready", path)).value
    compiled = of_tensorflow.ops_check(op_library.OpLibrary("compiled", path, "from source"))
    assert compiled.status == "ok" and str(path) in compiled.value and "from source" in compiled.value
    missing = op_library.OpLibrary("missing", path, "another build")
    monkeypatch.setattr(of_tensorflow, "find_compiler", lambda: "g++")
    found = of_tensorflow.ops_check(missing)
    assert found.status == "note" and "minute" in found.value and "another build" in found.value
    monkeypatch.setattr(of_tensorflow, "find_compiler", lambda: None)
    found = of_tensorflow.ops_check(missing)
    assert found.status == "error" and "apt-get install g++" in found.advice


def test_gpus_without_an_engine_for_them_are_told_how_to_use_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    (tmp_path / "dev/nvidiactl").touch()
    version = tmp_path / "proc/driver/nvidia/version"
    version.parent.mkdir(parents=True)
    version.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n")
    monkeypatch.setattr("kvtools.doctor.cuda.engine_has_cuda", lambda: False)
    found = by_name(check_cuda(tmp_path))
    assert found["GPU"].value == "1, driver 550.54.15"
    assert found["engine"].status == "note" and "KVTOOLS_CUDA=on" in found["engine"].advice


def test_packages_that_are_missing_or_too_old_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"numpy": "1.20.0", "fastapi": "0.100.0", "uvicorn": "0.40", "redis": "5.0.1"}

    def version(name: str) -> str:
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return there[name]

    requires = [
        "numpy>=1.26",
        'tomli>=2; python_version < "3.11"',
        'fastapi>=0.110; extra == "serve"',
        'uvicorn[standard]>=0.30; extra == "serve"',
        'redis>=5; extra == "formats"',
        'h5py>=3.12; extra == "formats"',
        'ray>=2.9; extra == "ray"',
    ]
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requires)
    monkeypatch.setattr(sys, "version_info", (3, 12, 0))
    found = by_name(check_packages())
    assert found["always needed"].status == "error" and "numpy is 1.20.0" in found["always needed"].value
    assert "tomli" not in found["always needed"].value
    assert found["[serve]"].status == "warning" and "wanted is >=0.110" in found["[serve]"].value
    formats = "without h5py, for HDF5, Arrow, Parquet, Redis and safetensors"
    assert found["[formats]"] == Check("[formats]", "note", formats, "pip install 'kvtools[formats]'")
    assert found["[ray]"].status == "note"
    assert {"[sql]", "[remote]", "[explore]"} <= found.keys()
    assert found["tensorboard"].status == "note" and found["tensorboard"].advice == "pip install tensorboard"
    there["tensorboard"] = "2.20.0"
    assert by_name(check_packages())["tensorboard"] == Check("tensorboard", "ok", "tensorboard 2.20.0")


def test_pip_is_to_keep_the_tensorflow_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"tensorflow": "2.16.2", "protobuf": "7.36.2", "numpy": "1.26.4"}

    def version(name: str) -> str:
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return there[name]

    requires = {
        "kvtools": ['grpcio-reflection>=1.60; extra == "grpc"', 'tensorflow>=2.16,<2.22; extra == "tensorflow"'],
        "tensorflow": ["numpy<2.0.0,>=1.26.0", "protobuf!=4.21.0,<5.0.0dev,>=3.20.3", 'protobuf<1; extra == "more"'],
    }
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", requires.get)
    found = by_name(check_packages())
    assert found["[grpc]"].advice == "pip install 'kvtools[grpc]' 'tensorflow==2.16.2'"
    needed = found["TensorFlow's own"]
    assert needed.status == "warning" and "'tensorflow==2.16.2'" in needed.advice
    assert needed.value == "protobuf is 7.36.2, and TensorFlow needs !=4.21.0,<5.0.0dev,>=3.20.3"
    there["protobuf"] = "4.25.9"
    assert "TensorFlow's own" not in by_name(check_packages())


def test_a_pyarrow_that_refuses_this_numpy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "pyarrow" not in by_name(check_packages())
    (tmp_path / "pyarrow.py").write_text("raise ImportError('pyarrow requires NumPy 2.0 or newer, found 1.26.4')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pyarrow", raising=False)
    found = by_name(check_packages())["pyarrow"]
    assert found.status == "warning" and "found 1.26.4" in found.value and "pyarrow<25" in found.advice


def test_a_port_that_is_taken_and_few_descriptors_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr("kvtools.doctor.serving.PORTS", {port: "HTTP"})
        monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1024))
        (tmp_path / "proc/sys/net/core").mkdir(parents=True)
        (tmp_path / "proc/sys/net/core/somaxconn").write_text("128\n")
        found = by_name(check_serving(tmp_path))
    assert found[f"port {port}"].status == "note" and "--port" in found[f"port {port}"].advice
    assert found["descriptors"].status == "warning" and "ulimit -Hn" in found["descriptors"].advice
    assert "somaxconn" in found["accept queue"].advice


def test_temporary_files_without_a_folder_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", none)
    found = by_name(check_serving(tmp_path))["temporary files"]
    assert found.status == "error" and "No usable" in found.value and "TMPDIR" in found.advice


def test_caches_are_counted_by_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOLS_CACHE_DIR", str(tmp_path / "cache"))
    (only,) = check_caches()
    assert only.status == "ok" and "not there yet" in only.value
    for name in (
        "tensorflow-2.21.0-a/ops.so",
        "tensorflow-2.20.0-b/ops.so",
        "snapshots/a.kvsnap",
    ):
        (tmp_path / "cache" / name).parent.mkdir(parents=True)
        (tmp_path / "cache" / name).write_bytes(b"x" * (1 << 20))
    found = by_name(check_caches())
    assert found["compiled ops"].value == "2.0 MiB in 2 sets"
    assert found["snapshots of what was served"].value == "1.0 MiB in 1 entries"
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)  # as of an image that is mounted to be read
    found = by_name(check_caches())
    assert found["folder"].status == "note" and "what is in it is used" in found["folder"].value
    assert found["compiled ops"].status == "ok"


def test_a_cache_that_cannot_be_made_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOLS_CACHE_DIR", "/proc/kvtools")
    (found,) = check_caches()
    assert found.status == "error" and "KVTOOLS_CACHE_DIR" in found.advice


def test_a_check_that_fails_by_itself_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> object:
        raise ZeroDivisionError("by a check")

    monkeypatch.setitem(SECTIONS, "machine", fail)
    found = dict(diagnose(frozenset(SECTIONS) - {"kvtools", "machine"}))
    assert [check.status for check in found["machine"]] == ["error"]
    assert found["kvtools"]
