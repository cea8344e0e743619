"""Building the ops against the installed TensorFlow."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfplugin import library


def importing(**env):
    return subprocess.Popen(
        [sys.executable, "-c", "import tfplugin; print('imported')"],
        env={**os.environ, **env},
        cwd=Path(__file__).parent,  # not the root, where the source tree hides the installed packages
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
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


def test_processes_that_start_at_once_build_once(tmp_path, compiler):
    processes = [importing(KVTOOLS_CACHE_DIR=str(tmp_path), CXX=compiler) for _ in range(3)]
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert sum("building the ops" in err for _, err in outputs) == 1
    (built,) = tmp_path.rglob("libkvtools_ops.so")
    assert not list(tmp_path.rglob("build-*")), "a scratch folder was left behind"

    # A cached build needs no compiler, and a killed build leaves nothing that is taken for one.
    built.rename(built.with_suffix(".part"))
    process = importing(KVTOOLS_CACHE_DIR=str(tmp_path), PATH="/nonexistent", CXX="")
    _, err = process.communicate()
    assert process.returncode != 0 and "no C++ compiler" in err and "apt-get install g++" in err


@pytest.mark.thorough
def test_a_cached_build_is_found_without_a_compiler():
    process = importing(PATH="/nonexistent", CXX="")
    out, err = process.communicate()
    assert process.returncode == 0 and "imported" in out and "building" not in err, err


@pytest.mark.thorough
def test_a_cache_that_cannot_be_written_says_what_to_set():
    process = importing(KVTOOLS_CACHE_DIR="/proc/kvtools")
    _, err = process.communicate()
    assert process.returncode != 0 and "BuildError" in err and "KVTOOLS_CACHE_DIR" in err


def test_a_compile_error_shows_the_compiler_output(tmp_path, monkeypatch):
    source = tmp_path / "broken.cc"
    source.write_text("int main() { return undeclared; }\n")
    with pytest.raises(library.BuildError, match=r"undeclared(.|\n)*The command was"):
        library._run(["g++", "-c", str(source), "-o", str(tmp_path / "broken.o")])


def test_the_cache_lies_in_the_environment_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv("KVTOOLS_CACHE_DIR", raising=False)
    assert str(library.cache_dir()).startswith(sys.prefix)
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library.cache_dir() == tmp_path / "kvtools"
    monkeypatch.setenv("KVTOOLS_CACHE_DIR", str(tmp_path / "mine"))
    assert library.cache_dir() == tmp_path / "mine"
