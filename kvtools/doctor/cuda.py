"""CUDA: a driver, GPUs, a compiler, and an engine that was built for them."""

from __future__ import annotations

import ctypes
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvtools.doctor.check import Check
from kvtools.op_library import package_folder

_BUILD = (
    "install from source where nvcc is: pip install -C cmake.define.KVTOOLS_CUDA=on ...; see the page 'Tables on a GPU'"
)


def check_cuda(root: Path = Path("/")) -> Iterator[Check]:
    """What is there; `root` is where `dev` and `proc` are looked for."""
    driver = _driver(root)
    gpus = len([path for path in (root / "dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
    if driver is None and not gpus:
        yield Check("GPU", "ok", "none of NVIDIA's: tables are in host memory")
    else:
        yield Check("GPU", "ok", f"{gpus}, driver {driver or 'unknown'}")
    for_gpus = engine_has_cuda()
    if for_gpus is None:
        return
    if for_gpus:
        yield Check("engine", "ok", "built with CUDA: tables can be in a GPU's memory")
    elif gpus:
        yield Check("engine", "note", "built without CUDA, as all wheels are: tables are in host memory", _BUILD)
    else:
        yield Check("engine", "ok", "built without CUDA")
    nvcc = shutil.which("nvcc")
    yield Check("nvcc", "ok", nvcc or "not on the path; only building the engine for GPUs needs it")


def engine_has_cuda() -> bool | None:
    """Whether the installed engine was built with CUDA; None where it is not there."""
    package = package_folder()
    if package is None:
        return None
    function = getattr(ctypes.CDLL(str(package / "libkvtable.so")), "_ZN7kvtable15IsBuiltWithCudaEv", None)
    if function is None:
        return None
    function.restype = ctypes.c_bool
    return bool(function())


def _driver(root: Path) -> str | None:
    try:
        text = (root / "proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", text)
    return found[1] if found else "unknown"
