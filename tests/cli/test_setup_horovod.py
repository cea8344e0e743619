"""Building Horovod, piece by piece with small stand-ins, and the command on the Horovod that `make test` installed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shutil
import stat
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtools.cli.main import main
from kvtools.errors import BadInputError, KvtoolsError, MissingDependencyError
from kvtools.horovod_setup import build as horovod_build
from kvtools.horovod_setup import setup as setup_horovod
from kvtools.horovod_setup.build import HorovodBuildError
from kvtools.horovod_setup.setup import HorovodSetup, TensorFlowBuild

Capture = pytest.CaptureFixture[str]

CMAKE_LISTS = """# TF SOURCES
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/mpi_ops.cc")
list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")
add_library(${TF_TARGET_LIB} SHARED ${SOURCES} ${TF_SOURCES})
"""
MAIN_CMAKE_LISTS = """string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")
add_subdirectory(third_party/gloo)
"""
TENSORFLOW = TensorFlowBuild("2.21.0", "v2.21.0", "Ubuntu Clang 18", ("-D_GLIBCXX_USE_CXX11_ABI=1", "--std=c++17"))


def nothing(doing: str, done: int, total: int) -> None:
    pass


@pytest.fixture
def caching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment with TensorFlow and no Horovod, where pip does nothing and ranks agree."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("KVTOOLS_CACHE_DIR", str(cache))
    monkeypatch.setattr(setup_horovod, "ask_tensorflow", lambda: TENSORFLOW)
    monkeypatch.setattr(setup_horovod, "_is_installed", lambda: False)
    monkeypatch.setattr(setup_horovod, "check_alltoall", lambda: None)
    monkeypatch.setattr(setup_horovod, "pip", lambda arguments, log, doing: log.write_text(doing))
    return cache / "horovod"


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stands in for the compilation; holds the number of jobs of each call."""
    calls: list[int] = []

    def fake(scratch: Path, log: Path, *, jobs: int, sdist: Path | None, progress: object) -> Path:
        calls.append(jobs)
        wheel = scratch / "horovod-0.28.1-any.whl"
        wheel.write_text("wheel")
        return wheel

    monkeypatch.setattr(setup_horovod, "build_wheel", fake)
    return calls


def _fake_source(folder: Path, script: str) -> Path:
    source = folder / "horovod-0.28.1"
    source.mkdir()
    (source / "setup.py").write_text(script)
    return source


# The command itself


@pytest.mark.thorough
def test_the_installed_horovod_is_found_to_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    pytest.importorskip("horovod", reason="Horovod is not installed: run `make setup-horovod`")
    monkeypatch.setenv("KVTOOLS_CACHE_DIR", str(tmp_path))
    assert main(["setup-horovod", "--json"]) == 0  # the two ranks run
    first = json.loads(capfd.readouterr().out)
    assert first["action"] == "checked" and first["horovod"] == "0.28.1"
    assert first["library"].endswith(".so") and Path(first["library"]).exists()
    assert main(["setup-horovod", "--json"]) == 0
    again = json.loads(capfd.readouterr().out)
    assert again["action"] == "kept"
    assert again == {**first, "action": "kept", "seconds": again["seconds"]}
    assert main(["setup-horovod"]) == 0
    out = capfd.readouterr().out
    assert out.startswith(f"horovod 0.28.1 is installed and works with tensorflow {first['tensorflow']}")


def test_another_tensorflow_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "checked.json"
    files = [["/a/libtensorflow_framework.so.2", 1, 2]]
    monkeypatch.setattr(setup_horovod, "_fingerprint", lambda: files)
    setup_horovod._remember(record, "2.21.0")
    assert setup_horovod._checked_before(record) == "2.21.0"
    files[0][2] = 3
    assert setup_horovod._checked_before(record) is None
    for unreadable in ("{", "[]", '{"tensorflow": "2.21.0", "files": null}'):
        record.write_text(unreadable)
        assert setup_horovod._checked_before(record) is None


def test_nothing_is_known_of_a_horovod_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "checked.json"
    monkeypatch.setattr(setup_horovod, "_fingerprint", lambda: None)
    setup_horovod._remember(record, "2.21.0")
    assert setup_horovod._checked_before(record) is None


def test_json_tells_what_was_done(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    done = HorovodSetup("built", "0.28.1", "2.21.0", "/x/mpi_lib.so", "/c/h.whl", "/c/build.log", 300.0)
    monkeypatch.setattr("kvtools.cli.setup_horovod.setup_horovod", lambda **_: done)
    assert main(["setup-horovod", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "action": "built",
        "horovod": "0.28.1",
        "tensorflow": "2.21.0",
        "library": "/x/mpi_lib.so",
        "wheel": "/c/h.whl",
        "log": "/c/build.log",
        "seconds": 300.0,
    }


def test_a_failed_build_shows_the_errors_and_then_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def fail(**_: object) -> HorovodSetup:
        raise HorovodBuildError(
            "compiling Horovod failed; see /c/build.log", ["a.cc:1: error: one", "b.cc:2: error: two"]
        )

    monkeypatch.setattr("kvtools.cli.setup_horovod.setup_horovod", fail)
    assert main(["setup-horovod"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "  a.cc:1: error: one",
        "  b.cc:2: error: two",
        "kvtools: compiling Horovod failed; see /c/build.log",
    ]


def test_a_log_shows_the_steps_and_each_quarter(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def build(*, progress: Callable[[str, int, int], None], **_: object) -> HorovodSetup:
        progress("fetching", 0, 1)
        for done in range(101):
            progress("compiling", done, 100)
        return HorovodSetup("built", "0.28.1", "2.21.0", "/x/mpi_lib.so", None, None, 300.0)

    monkeypatch.setattr("kvtools.cli.setup_horovod.setup_horovod", build)
    assert main(["setup-horovod"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "horovod 0.28.1 was built and installed, and works with tensorflow 2.21.0 (300 s)\n"
    assert captured.err.splitlines() == [
        "kvtools: fetching ...",
        "kvtools: compiling ...",
        *(f"kvtools: compiling: {percent}%" for percent in (25, 50, 75, 100)),
    ]


def test_usage(capsys: Capture) -> None:
    assert main(["setup-horovod", "--jobs", "0"]) == 2
    assert "got --jobs 0, expected 1 or more" in capsys.readouterr().err


# What is built, kept and installed


def test_a_wheel_is_built_once_and_then_installed_from_the_cache(caching: Path, build: list[int]) -> None:
    first = setup_horovod.setup_horovod(jobs=3)
    assert first.action == "built" and build == [3]
    assert first.wheel == str(caching / TENSORFLOW.cache_key() / "horovod-0.28.1-any.whl")
    assert Path(first.wheel).read_text() == "wheel"
    assert setup_horovod.setup_horovod().action == "installed" and len(build) == 1
    assert setup_horovod.setup_horovod(force=True).action == "built" and len(build) == 2


def test_an_installed_horovod_of_another_tensorflow_is_replaced(
    caching: Path, build: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    checks: list[None] = []

    def fail_once() -> None:
        checks.append(None)
        if len(checks) == 1:
            raise HorovodBuildError("undefined symbol")

    monkeypatch.setattr(setup_horovod, "_is_installed", lambda: True)
    monkeypatch.setattr(setup_horovod, "check_alltoall", fail_once)
    assert setup_horovod.setup_horovod().action == "built" and len(checks) == 2


def test_a_wheel_that_does_not_work_is_not_kept(
    caching: Path, build: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise HorovodBuildError("the alltoall failed")

    monkeypatch.setattr(setup_horovod, "check_alltoall", fail)
    with pytest.raises(HorovodBuildError, match="the alltoall failed"):
        setup_horovod.setup_horovod()
    assert not list(caching.rglob("*.whl"))


def test_the_environment_is_left_alone_when_the_build_fails(caching: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Path:
        raise HorovodBuildError("compiling Horovod failed")

    def no_pip(*_: object) -> None:
        raise AssertionError("pip was run")

    monkeypatch.setattr(setup_horovod, "build_wheel", fail)
    monkeypatch.setattr(setup_horovod, "pip", no_pip)
    with pytest.raises(HorovodBuildError, match="compiling"):
        setup_horovod.setup_horovod()


def test_the_cache_key_tells_apart_what_a_wheel_depends_on() -> None:
    key = TENSORFLOW.cache_key()
    assert key.startswith(f"horovod-0.28.1-tensorflow-2.21.0-python-{sys.version_info[0]}.{sys.version_info[1]}-")
    assert key == TensorFlowBuild(*vars(TENSORFLOW).values()).cache_key()
    others = [
        TensorFlowBuild("2.20.0", TENSORFLOW.git_version, TENSORFLOW.compiler, TENSORFLOW.flags),
        TensorFlowBuild("2.21.0", "v2.21.0-custom", TENSORFLOW.compiler, TENSORFLOW.flags),
        TensorFlowBuild("2.21.0", TENSORFLOW.git_version, "GCC 13", TENSORFLOW.flags),
        TensorFlowBuild("2.21.0", TENSORFLOW.git_version, TENSORFLOW.compiler, ("-D_GLIBCXX_USE_CXX11_ABI=0",)),
    ]
    assert len({key, *(other.cache_key() for other in others)}) == 5


def test_a_second_run_waits_for_the_first(caching: Path, build: list[int]) -> None:
    caching.mkdir(parents=True)
    told: list[str] = []
    with (caching / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def progress(doing: str, done: int, total: int) -> None:
            told.append(doing)
            if "waiting" in doing:
                fcntl.flock(lock, fcntl.LOCK_UN)

        setup_horovod.setup_horovod(progress=progress)
    assert told[:2] == ["asking TensorFlow", "waiting for another setup-horovod to end"]


# What can be missing or wrong


def test_without_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup_horovod.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"has no TensorFlow.*pip install 'kvtools\[tensorflow\]'"):
        setup_horovod.ask_tensorflow()


@pytest.mark.parametrize("version", ["2.15.1", "2.22.0", "3.0.0", "unknown"])
def test_an_unknown_tensorflow_is_refused_unless_asked_for(
    version: str, caching: Path, build: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup_horovod, "ask_tensorflow", lambda: TensorFlowBuild(version, "", "", ()))
    with pytest.raises(HorovodBuildError, match=r"not known to work with Horovod 0.28.1, 2.16 to 2.21 are.*--any-tens"):
        setup_horovod.setup_horovod()
    assert setup_horovod.setup_horovod(any_tensorflow=True).action == "built"


@pytest.mark.parametrize("version", ["2.16.1", "2.21.0", "2.21.0-rc1"])
def test_a_known_tensorflow_is_taken(version: str) -> None:
    setup_horovod.check_known(version)


@pytest.mark.parametrize("there, missing", [({"make"}, "C.. compiler"), ({"c++"}, "make")])
def test_without_compiler_or_make(there: set[str], missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(horovod_build.shutil, "which", lambda name: name if name in there else None)
    with pytest.raises(MissingDependencyError, match=f"no {missing} was found; install g.. and make"):
        horovod_build.find_compiler()


def test_a_compiler_in_cxx_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "g++-99")
    with pytest.raises(MissingDependencyError, match=r"'g\+\+-99' \(from \$CXX\)"):
        horovod_build.find_compiler()


def test_a_full_disk_is_told_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_build.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 5 << 20))
    with pytest.raises(HorovodBuildError, match=r"the disk is full: 5 MiB are free.*TMPDIR"):
        horovod_build.check_space(tmp_path)


def test_a_disk_that_fills_up_and_a_folder_that_cannot_be_written(
    caching: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_with(number: int) -> Callable[..., Path]:
        def fail(*_: object, **__: object) -> Path:
            raise OSError(number, "so it is", "/scratch/a.o")

        return fail

    monkeypatch.setattr(setup_horovod, "build_wheel", fail_with(errno.ENOSPC))
    with pytest.raises(HorovodBuildError, match=r"the disk is full \(/scratch/a.o\)"):
        setup_horovod.setup_horovod()
    monkeypatch.setattr(setup_horovod, "build_wheel", fail_with(errno.EACCES))
    with pytest.raises(KvtoolsError, match=r"cannot write '/scratch/a.o'.*KVTOOLS_CACHE_DIR"):
        setup_horovod.setup_horovod()


# Fetching


def _pip_says(monkeypatch: pytest.MonkeyPatch, folder: Path, said: str, status: int = 1) -> None:
    """Put a program that says this in the place of Python, and with it of its pip."""
    fake = folder / "python"
    fake.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {status}\n")
    fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(horovod_build.importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    "arguments, said, told",
    [
        (
            ["download"],
            "ERROR: Could not find a version that satisfies",
            r"pip failed \(ERROR: Could.*--sdist; the log",
        ),
        (["install"], "ERROR: No matching distribution found", "check the network and pip's settings"),
        (["download"], "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES", "not the package that is known"),
        (["install"], "error: externally-managed-environment", "use a virtual environment"),
        (["install"], "ERROR: [Errno 28] No space left on device", "the disk is full"),
    ],
)
def test_pip_failures_say_what_to_do(
    arguments: list[str], said: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pip_says(monkeypatch, tmp_path, said)
    log = tmp_path / "build.log"
    with pytest.raises(HorovodBuildError, match=told) as caught:
        horovod_build.pip(arguments, log, "fetching")
    assert str(log) in str(caught.value) and said in log.read_text()


def test_an_environment_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(horovod_build.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"has no pip; run `.* -m ensurepip`"):
        horovod_build.pip(["install"], tmp_path / "log", "fetching")


def test_another_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / "horovod-0.28.1.tar.gz"
    with pytest.raises(BadInputError, match="No such file"):
        horovod_build.check_archive(archive)
    archive.write_bytes(b"not horovod")
    with pytest.raises(BadInputError, match=r"got sha256 [0-9a-f]{64}, expected 92a43f5a.*fetch it again"):
        horovod_build.check_archive(archive)
    monkeypatch.setattr(horovod_build, "ARCHIVE_SHA256", hashlib.sha256(b"not horovod").hexdigest())
    horovod_build.check_archive(archive)


# Compiling


def test_exactly_the_line_of_the_xla_op_is_dropped() -> None:
    lines = CMAKE_LISTS.splitlines()
    assert horovod_build.without_xla(CMAKE_LISTS).splitlines() == [*lines[:2], lines[3]]


@pytest.mark.parametrize("text, times", [("add_library(a)\n", 0), (CMAKE_LISTS * 2, 2)])
def test_other_sources_are_not_patched(text: str, times: int) -> None:
    with pytest.raises(HorovodBuildError, match=f"named {times} times .* expected once"):
        horovod_build.without_xla(text)


def test_debug_symbols_and_the_gloo_of_pytorch_are_left_out() -> None:
    assert horovod_build.without_idle_work(MAIN_CMAKE_LISTS).splitlines() == [
        'string(REPLACE "-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO "${CMAKE_CXX_FLAGS_RELWITHDEBINFO}")',
        "add_subdirectory(third_party/gloo EXCLUDE_FROM_ALL)",
    ]
    with pytest.raises(HorovodBuildError, match="stands 2 times in CMakeLists"):
        horovod_build.without_idle_work(MAIN_CMAKE_LISTS * 2)


def test_the_environment_of_the_build(tmp_path: Path) -> None:
    mine = {"PATH": "/bin", "HOROVOD_WITH_MPI": "1", "HOROVOD_GPU": "CUDA", "PYTHONPATH": "/mine", "MAKEFLAGS": "-j99"}
    built = horovod_build.build_environment(mine, tmp_path, 4)
    assert built["PATH"] == "/bin" and built["MAKEFLAGS"] == "-j4" and built["PYTHONPATH"] == str(tmp_path)
    assert {name: value for name, value in built.items() if name.startswith("HOROVOD_")} == {
        "HOROVOD_WITH_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_PYTORCH": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_CPU_OPERATIONS": "GLOO",
        "HOROVOD_CMAKE": str(tmp_path / "cmake" / "data" / "bin" / "cmake"),
    }


def test_a_failed_compilation_shows_the_compilers_errors(tmp_path: Path) -> None:
    said = [
        "[ 10%] Building CXX object a.o",
        "a.cc:3:5: warning: unused",
        "a.cc:7:9: error: 'x' was not declared",
        "make: *** [a.o] Error 1",
    ]
    source = _fake_source(tmp_path, f"import sys\nprint({chr(10).join(said)!r})\nsys.exit(1)\n")
    log = tmp_path / "build.log"
    with pytest.raises(HorovodBuildError, match=f"compiling Horovod failed.*{log}") as caught:
        horovod_build.compile_source(source, tmp_path, log, {}, nothing)
    assert caught.value.details == ["a.cc:7:9: error: 'x' was not declared"]
    assert all(line in log.read_text() for line in said)


def test_a_failure_without_an_error_line_shows_the_last_lines(tmp_path: Path) -> None:
    source = _fake_source(tmp_path, "import sys\nprint('one')\nprint('two')\nsys.exit(1)\n")
    with pytest.raises(HorovodBuildError) as caught:
        horovod_build.compile_source(source, tmp_path, tmp_path / "log", {}, nothing)
    assert caught.value.details == ["one", "two"]


@pytest.mark.parametrize(
    "line, told",
    [
        ("as: a.s: No space left on device", "the disk is full"),
        ("g++: fatal error: Killed signal terminated program cc1plus", "--jobs 1"),
    ],
)
def test_a_compilation_without_disk_or_memory(line: str, told: str, tmp_path: Path) -> None:
    source = _fake_source(tmp_path, f"import sys\nprint({line!r})\nsys.exit(1)\n")
    with pytest.raises(HorovodBuildError, match=told):
        horovod_build.compile_source(source, tmp_path, tmp_path / "log", {}, nothing)


def test_a_wheel_is_made_of_the_patched_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `build_wheel` on a source package whose setup.py copies its CMakeLists.txt instead of compiling."""
    setup = """
import os, pathlib, sys
assert sys.argv[1:3] == ["bdist_wheel", "-d"] and os.environ["HOROVOD_WITH_GLOO"] == "1"
print("[ 50%] Building CXX object a.o")
out = pathlib.Path(sys.argv[3])
out.mkdir()
texts = [pathlib.Path(name).read_text() for name in ("horovod/tensorflow/CMakeLists.txt", "CMakeLists.txt")]
(out / "horovod-0.28.1-any.whl").write_text("".join(texts))
"""
    source = _fake_source(tmp_path, setup)
    (source / "horovod" / "tensorflow").mkdir(parents=True)
    (source / "horovod" / "tensorflow" / "CMakeLists.txt").write_text(CMAKE_LISTS)
    (source / "CMakeLists.txt").write_text(MAIN_CMAKE_LISTS)
    sdist = tmp_path / "horovod-0.28.1.tar.gz"
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(source, source.name)
    fetched: list[str] = []
    monkeypatch.setattr(horovod_build, "pip", lambda arguments, log, doing: fetched.append(doing))
    monkeypatch.setattr(horovod_build, "ARCHIVE_SHA256", hashlib.sha256(sdist.read_bytes()).hexdigest())
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    told: list[tuple[str, int, int]] = []
    wheel = horovod_build.build_wheel(
        scratch, tmp_path / "log", jobs=1, sdist=sdist, progress=lambda *step: told.append(step)
    )
    patched = horovod_build.without_xla(CMAKE_LISTS), horovod_build.without_idle_work(MAIN_CMAKE_LISTS)
    assert wheel.parent.parent == scratch and wheel.read_text() == "".join(patched)
    assert fetched == ["fetching CMake and setuptools"]
    assert ("compiling Horovod", 50, 100) in told and told[-1] == ("compiling Horovod", 100, 100)
