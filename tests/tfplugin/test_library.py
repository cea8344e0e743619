"""Building the ops against the installed TensorFlow."""

import concurrent.futures
import dataclasses
import fcntl
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvtools import op_compiler, op_library
from tfplugin import library


@pytest.fixture(autouse=True)
def source_install(monkeypatch):
    """As if no wheel had brought ready ops, however kvtools was installed; see tests/kvtools/test_op_library.py."""
    monkeypatch.setattr(op_library, "why_not_ready", lambda package, build: "none were brought")


@pytest.fixture
def nothing_ready():
    """For tests that import tfplugin in a process of its own: from a wheel, there would be nothing to compile."""
    if op_library.ready_folder(op_library.package_folder(), (2, 0)).parent.is_dir():
        pytest.skip("kvtools was installed from a wheel with ready ops")


def importing(**env):
    return subprocess.Popen(
        [sys.executable, "-c", "import tfplugin; print('imported')"],
        env={**os.environ, **env},
        cwd=Path(__file__).parent,  # not the root, where the source tree hides the installed packages
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_import_without_tensorflow_says_which_to_install(tmp_path):
    code = "import sys; sys.modules['tensorflow'] = None; import tfplugin"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == (
        f"ModuleNotFoundError: tfplugin needs TensorFlow {op_library.SUPPORTED}, and none is installed: "
        "pip install 'kvtools[tensorflow]'"
    )


@pytest.fixture
def compiler(tmp_path):
    """A compiler that takes its time and "links" the ops that this environment has built already."""
    script = tmp_path / "c++"
    script.write_text(
        f"""#!/bin/sh
for word in "$@"; do [ "$before" = -o ] && out=$word; [ "$word" = -shared ] && link=1; before=$word; done
sleep 0.3
if [ -n "$link" ]; then cp {library.library_path()} "$out"; else : > "$out"; fi
"""
    )
    script.chmod(0o755)
    return str(script)


@pytest.mark.thorough
def test_processes_that_start_at_once_build_once(tmp_path, compiler, nothing_ready):
    processes = [importing(KVTOOLS_CACHE_DIR=str(tmp_path), CXX=compiler) for _ in range(2)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert sum("building the ops" in err for _, err in outputs) == 1
    (built,) = tmp_path.rglob("libkvtools_ops.so")
    assert not list(tmp_path.rglob("build-*")), "a scratch folder was left behind"

    # A cached build needs no compiler, and a killed build leaves nothing that is taken for one.
    built.rename(built.with_suffix(".part"))
    process = importing(KVTOOLS_CACHE_DIR=str(tmp_path), PATH="/nonexistent", CXX="")
    _, err = process.communicate()
    assert process.returncode != 0 and "no C++ compiler" in err and "apt-get install g++" in err


@pytest.fixture
def built(tmp_path, monkeypatch):
    """Builds into a cache of its own by a linker that copies; says how often it was called."""
    real = library.library_path()
    calls = []

    def run(command):
        calls.append(command)
        if "-shared" in command:
            shutil.copy(real, command[command.index("-o") + 1])

    monkeypatch.setenv("KVTOOLS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(op_compiler, "_run", run)
    return calls


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "no checksum"])
def test_a_cached_build_that_is_damaged_is_built_again(built, capfd, damage):
    path = library.library_path()
    whole = path.read_bytes()
    assert library.library_path() == path
    links = sum("-shared" in command for command in built)
    assert links == 1
    if damage == "no checksum":
        path.with_name("libkvtools_ops.sha256").unlink()
    else:
        path.unlink()  # others may have it loaded
        path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "changed": whole[:-1] + b"?"}[damage])
    assert library.library_path().read_bytes() == whole
    assert sum("-shared" in command for command in built) == 2
    assert "libkvtools_ops.so is damaged" in capfd.readouterr().err


def test_a_process_that_waits_for_another_ones_build_says_so(built, tmp_path, capfd):
    path = library.library_path()
    path.unlink()
    said = threading.Event()
    with path.with_name("lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            waiting = pool.submit(library.library_path)
            err = ""
            while "waiting for it" not in err and not waiting.done():
                err += capfd.readouterr().err
                said.wait(0.01)
            fcntl.flock(held, fcntl.LOCK_UN)
            assert waiting.result() == path
    assert "another process builds the ops for TensorFlow" in err


def test_the_sources_are_compiled_in_few_pieces_that_have_each_file_once(tmp_path):
    sources = [tmp_path / f"{name}.cc" for name in "abcdefgh"]
    for size, source in enumerate(sources):
        source.write_text("//" + " " * 100 * size)
    units = op_compiler._units(sources)
    assert len(units) == 4 and sorted(source for unit in units for source in unit) == sources
    sizes = [sum(source.stat().st_size for source in unit) for unit in units]
    assert max(sizes) < 2 * min(sizes)
    assert op_compiler._units(sources[:2]) == [[sources[1]], [sources[0]]]


@pytest.mark.thorough
def test_a_cached_build_is_found_without_a_compiler(nothing_ready):
    process = importing(PATH="/nonexistent", CXX="")
    out, err = process.communicate()
    assert process.returncode == 0 and "imported" in out and "building" not in err, err


@pytest.mark.thorough
def test_a_cache_that_cannot_be_written_says_what_to_set(nothing_ready):
    process = importing(KVTOOLS_CACHE_DIR="/proc/kvtools")
    _, err = process.communicate()
    assert process.returncode != 0 and "BuildError" in err and "KVTOOLS_CACHE_DIR" in err


def test_a_cache_that_is_mounted_noexec_is_told_before_anything_is_compiled(monkeypatch, tmp_path):
    flags = os.statvfs_result((0,) * 8 + (os.ST_NOEXEC, 255))
    monkeypatch.setenv("KVTOOLS_CACHE_DIR", str(tmp_path / "new"))
    monkeypatch.setattr(os, "statvfs", lambda path: flags if path == tmp_path else None)
    with pytest.raises(library.BuildError, match=r"mounted noexec.*set KVTOOLS_CACHE_DIR"):
        library.library_path()


def test_a_compile_error_shows_the_compiler_output(tmp_path, monkeypatch):
    source = tmp_path / "broken.cc"
    source.write_text("int main() { return undeclared; }\n")
    with pytest.raises(library.BuildError, match=r"undeclared(.|\n)*The command was"):
        op_compiler._run(["g++", "-c", str(source), "-o", str(tmp_path / "broken.o")])


def test_the_cache_lies_in_the_environment_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("KVTOOLS_CACHE_DIR", raising=False)
    assert str(library.cache_dir()).startswith(sys.prefix)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.cache_dir() == tmp_path / "kvtools"
    monkeypatch.setenv("KVTOOLS_CACHE_DIR", str(tmp_path / "mine"))
    assert library.cache_dir() == tmp_path / "mine"


@pytest.fixture
def another_tensorflow(monkeypatch):
    """Says that the TensorFlow is of another version."""

    def say(version):
        build = op_library.TensorFlowBuild.of(library.tf)
        monkeypatch.setattr(
            op_library.TensorFlowBuild, "of", staticmethod(lambda tf: dataclasses.replace(build, version=version))
        )

    return say


def test_a_tensorflow_that_is_too_old_is_refused_before_anything_is_compiled(built, another_tensorflow):
    another_tensorflow("2.15.1")
    with pytest.raises(library.BuildError, match=r"2\.15\.1 is older than .* install 2\.16 to 2\.21"):
        library.library_path()
    assert built == []


def test_a_tensorflow_that_is_newer_than_any_tested_is_tried_and_named(built, another_tensorflow, capfd):
    another_tensorflow("2.22.0")
    library.library_path()
    assert "TensorFlow 2.22.0 is newer than what kvtools was tested with" in capfd.readouterr().err


def test_what_does_not_compile_against_a_newer_tensorflow_says_which_do(built, another_tensorflow, monkeypatch):
    another_tensorflow("2.22.0")

    def fail(command):
        raise library.BuildError("no member named 'Gone'")

    monkeypatch.setattr(op_compiler, "_run", fail)
    with pytest.raises(library.BuildError, match=r"'Gone'\n.*was tested with, 2\.16 to 2\.21"):
        library.library_path()


def test_a_build_says_why_and_for_how_long(built, capfd):
    library.library_path()
    said = capfd.readouterr().err
    assert "none were brought" in said and ("minute" in said)
