"""Which ops a TensorFlow gets: ready ones only where everything that they were compiled for is the same here."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
from pathlib import Path

import pytest

from kvtools import op_library
from kvtools.cache_folder import cache_folder, others_cache_folders
from kvtools.op_library import TensorFlowBuild

HERE = TensorFlowBuild(
    "2.21.0",
    "v2.21.0-rc1-5-ga481b10260d",
    "Ubuntu Clang 18.1.8",
    ("-I/env/include", "-D_GLIBCXX_USE_CXX11_ABI=1", "--std=c++17"),
    ("-L/env", "-l:libtensorflow_framework.so.2"),
)
PATCH = dataclasses.replace(HERE, version="2.21.1", git_version="v2.21.1-0-gabc")


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with a source, headers, and ready ops for two releases of TensorFlow 2.21 and one of 2.20."""
    package = tmp_path / "kvtools"
    for name in ("ops/lookup.cc", "ops/kernel.h", "include/kvtable/table.h", "libkvtable.so"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(f"// {name}")
    for minor, builds in {
        (2, 21): [HERE, PATCH],
        (2, 20): [dataclasses.replace(HERE, version="2.20.0", git_version="v2.20.0-0")],
    }.items():
        folder = op_library.ready_folder(package, minor)
        folder.mkdir(parents=True)
        (folder / op_library.LIBRARY_NAME).write_text(f"ops for {minor}")
        op_library.write_record(package, folder / op_library.LIBRARY_NAME, builds)
    return package


def find(package: Path, build: TensorFlowBuild) -> op_library.OpLibrary:
    return op_library.find_op_library(package, package.parent / "cache", build)


def test_ready_ops_are_taken_where_all_is_the_same(package: Path) -> None:
    library = package / "ops/ready/tensorflow-2.21/libkvtools_ops.so"
    for build in (HERE, PATCH, dataclasses.replace(HERE, compile_flags=("-I/elsewhere", *HERE.compile_flags[1:]))):
        assert find(package, build) == op_library.OpLibrary("ready", library)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"version": "2.21.2"}, "this wheel brings none for TensorFlow 2.21.2, but for 2.21.0, 2.21.1"),
        ({"version": "2.19.0"}, "this wheel brings none for TensorFlow 2.19.0, but for 2.20, 2.21"),
        ({"git_version": "unknown"}, r"another build \(unknown, Ubuntu Clang 18.1.8\) than .*\(v2.21.0-rc1-5-g"),
        ({"compiler": "13.3.0"}, r"another build \(v2.21.0-rc1-5-ga481b10260d, 13.3.0\)"),
        ({"compile_flags": ("-D_GLIBCXX_USE_CXX11_ABI=0", "--std=c++17")}, "asks for the flags .*ABI=0"),
    ],
    ids=["patch", "minor", "revision", "compiler", "ABI"],
)
def test_another_tensorflow_gets_none_and_is_told_why(package: Path, changed: dict[str, object], why: str) -> None:
    found = find(package, dataclasses.replace(HERE, **changed))  # type: ignore[arg-type]
    assert found.kind == "missing" and found.path.is_relative_to(package.parent / "cache")
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(found.why_not_ready)


@pytest.mark.parametrize("changed", ["ops/lookup.cc", "ops/kernel.h", "include/kvtable/table.h"])
def test_ops_of_other_sources_or_another_engine_are_not_taken(package: Path, changed: str) -> None:
    (package / changed).write_text("// changed")
    found = find(package, HERE)
    assert found.kind == "missing" and "not those that the ready ones were compiled from" in found.why_not_ready


def test_a_damaged_library_is_not_loaded(package: Path) -> None:
    library = op_library.ready_folder(package, (2, 21)) / op_library.LIBRARY_NAME
    library.write_text("ops fo")
    assert "is damaged: reinstall kvtools" in find(package, HERE).why_not_ready
    library.unlink()
    assert "is missing: reinstall kvtools" in find(package, HERE).why_not_ready


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"tensorflow": 3'])
def test_a_record_that_cannot_be_read_is_named(package: Path, content: str) -> None:
    record = op_library.ready_folder(package, (2, 21)) / op_library.RECORD_NAME
    record.write_text(content)
    assert "built_for.json cannot be read" in find(package, HERE).why_not_ready


def test_ops_of_another_kind_of_processor_are_not_loaded(package: Path) -> None:
    record = op_library.ready_folder(package, (2, 21)) / op_library.RECORD_NAME
    record.write_text(json.dumps({**json.loads(record.read_text()), "machine": "aarch64"}))
    assert f"are for aarch64, this machine is {platform.machine()}" in find(package, HERE).why_not_ready


def test_a_source_install_compiles_and_finds_what_it_compiled(package: Path) -> None:
    import shutil

    shutil.rmtree(package / "ops/ready")
    found = find(package, HERE)
    assert found.kind == "missing" and "installed from source" in found.why_not_ready
    found.path.parent.mkdir(parents=True)
    found.path.write_text("ops")
    assert find(package, HERE).kind == "missing", "without a checksum it may be half a file"
    found.path.with_name(op_library.CHECKSUM_NAME).write_text(op_library.file_checksum(found.path))
    assert find(package, HERE).kind == "compiled"
    moved = dataclasses.replace(HERE, compile_flags=("-I/elsewhere", *HERE.compile_flags[1:]))
    assert find(package, moved).kind == "compiled", "an environment that was moved"
    other = dataclasses.replace(HERE, compile_flags=("-D_GLIBCXX_USE_CXX11_ABI=0",))
    assert find(package, other).kind == "missing", "ops of another ABI"


def test_ops_that_another_user_compiled_are_used(package: Path) -> None:
    others = package.parent / "others"
    library = others / op_library.cache_key(package, HERE) / op_library.LIBRARY_NAME
    library.parent.mkdir(parents=True)
    library.write_text("ops")
    found = op_library.compiled_op_library(package, package.parent / "cache", HERE, "", [others])
    assert (found.kind, found.path.parents[1]) == ("missing", package.parent / "cache"), "they may be half a file"
    library.with_name(op_library.CHECKSUM_NAME).write_text(op_library.file_checksum(library))
    found = op_library.compiled_op_library(package, package.parent / "cache", HERE, "", [others])
    assert found == op_library.OpLibrary("compiled", library)


def test_the_environment_of_another_user_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTOOLS_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))
    monkeypatch.setattr("os.access", lambda path, mode: path != str(tmp_path / "venv"))
    assert cache_folder() == tmp_path / "mine/kvtools"
    assert others_cache_folders() == [tmp_path / "venv/var/cache/kvtools"]
    monkeypatch.setenv("KVTOOLS_CACHE_DIR", str(tmp_path / "told"))
    assert (cache_folder(), others_cache_folders()) == (tmp_path / "told", [])


def test_a_user_whom_the_system_does_not_know_is_at_home_where_docker_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> object:
        raise KeyError(uid)

    for name in ("KVTOOLS_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.prefix", sys.base_prefix)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert cache_folder() == Path("/.cache/kvtools")


def test_a_record_is_for_builds_of_one_abi(package: Path) -> None:
    other = dataclasses.replace(HERE, compile_flags=("-D_GLIBCXX_USE_CXX11_ABI=0",))
    with pytest.raises(ValueError, match="expected one set"):
        op_library.write_record(package, package / "libkvtable.so", [HERE, other])
