"""The tables for CUDA devices compile, and what comes out loads on a machine without one.

Nothing here runs on a GPU: `benchmarks/gpu/run.sh` does that, where there is one.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
from locks import locked

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).resolve().parents[2]
CHECK = "device_table_cuda_check"


@pytest.fixture(scope="module")
def build():
    for tool in ("nvcc", "cmake", "nm", "readelf"):
        if shutil.which(tool) is None:
            pytest.skip(f"compiling for CUDA needs {tool}, which is not on the PATH")
    build = ROOT / "build" / "cuda"
    options = ["-DKVTABLE_PYTHON=OFF", "-DKVTABLE_WERROR=ON", "-DKVTABLE_BUILD_TESTS=ON"]
    cuda = ["-DKVTOOLS_CUDA=on", "-DKVTOOLS_CUDA_ARCHITECTURES=80-real"]  # one, for the time it takes
    with locked(ROOT / "build" / "cuda.lock"):
        for command in (
            ["cmake", "-S", ROOT, "-B", build, *options, *cuda],
            ["cmake", "--build", build, "--target", CHECK],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return build


def test_every_operation_has_its_kernel(build):
    built = sorted(build.rglob("cuda_*.cu.o"))
    symbols = subprocess.run(["nm", "-C", *built], capture_output=True, text=True, check=True).stdout
    bodies = set()
    for header in (ROOT / "kernels" / "cuda").glob("*_kernels.h"):
        lines = header.read_text().splitlines()
        bodies |= {line.split()[1] for line in lines if line.startswith("struct ") and line.split()[1].endswith("Body")}
    assert len(bodies) > 15
    missing = {body for body in bodies if f"RunBody<kvtable::{body}" not in symbols}
    assert not missing
    sections = subprocess.run(["readelf", "-S", "-W", *built], capture_output=True, text=True, check=True).stdout
    assert ".nv_fatbin" in sections


def test_it_loads_without_a_gpu_and_needs_no_cuda_library(build):
    (check,) = (path for path in build.rglob(CHECK) if path.is_file())
    needed = subprocess.run(["readelf", "-d", check], capture_output=True, text=True, check=True).stdout
    assert "cudart" not in needed and "libcuda" not in needed
    # Where there is no GPU it says so; where there is one, it runs the whole test of device tables there.
    done = subprocess.run([check], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
