"""The real loader with a wheel's ready ops: the ones of this environment, put where a wheel has them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtools import op_library
from tfplugin import library

pytestmark = pytest.mark.thorough


@pytest.fixture
def package(tmp_path):
    """A package of links to the installed one, with its ops compiled for this TensorFlow as ready ones."""
    installed = op_library.package_folder()
    package = tmp_path / "site" / "kvtools"
    (package / "ops").mkdir(parents=True)
    for path in (*installed.iterdir(), *(installed / "ops").iterdir()):
        if path.name not in ("ops", "ready"):
            (package / path.relative_to(installed)).symlink_to(path.resolve())
    build = op_library.TensorFlowBuild.of(library.tf)
    ready = op_library.ready_folder(package, build.minor)
    ready.mkdir(parents=True)
    shutil.copy(library.library_path(), ready / op_library.LIBRARY_NAME)
    op_library.write_record(package, ready / op_library.LIBRARY_NAME, [build])
    return package


def importing(package, tmp_path):
    program = "import tfplugin, tensorflow as tf; print(tf.get_kv_variable('user', 4).sparse_read([17, -3]).shape)"
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(package.parent), "PATH": "/nonexistent", "CXX": "",
             "KVTOOLS_CACHE_DIR": str(tmp_path / "cache")},
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
    )  # fmt: skip


def test_ready_ops_train_without_a_compiler_and_without_a_cache(package, tmp_path):
    done = importing(package, tmp_path)
    assert done.returncode == 0 and "(2, 4)" in done.stdout, done.stderr
    assert "building" not in done.stderr and not (tmp_path / "cache").exists()


def test_damaged_ready_ops_are_named_and_not_loaded(package, tmp_path):
    (ready,) = package.rglob(f"ready/*/{op_library.LIBRARY_NAME}")
    ready.write_bytes(ready.read_bytes()[:-1] + b"?")
    done = importing(package, tmp_path)
    assert done.returncode != 0 and "libkvtools_ops.so is damaged: reinstall kvtools" in done.stderr
    assert "no C++ compiler found" in done.stderr


def test_ready_ops_that_do_not_load_are_named_and_compiled_anew(package, tmp_path):
    (ready,) = package.rglob(f"ready/*/{op_library.LIBRARY_NAME}")
    ready.write_bytes(b"no library")
    op_library.write_record(package, ready, [op_library.TensorFlowBuild.of(library.tf)])
    done = importing(package, tmp_path)
    assert done.returncode != 0 and "does not load into TensorFlow" in done.stderr
    assert "the ready ones do not load" in done.stderr and "no C++ compiler found" in done.stderr
