"""Python, the package, and its compiled parts."""

from __future__ import annotations

import importlib
import os
import platform
import sys
from collections.abc import Iterator

from kvtools import __version__
from kvtools.doctor.check import Check
from kvtools.op_library import package_folder

_MODULES = (
    "_kvtable",
    "_checked_io",
    "_row_stats",
    "_row_text",
    "_key_index",
    "_perfect_hash",
    "_quantized_rows",
    "_snapshot",
)


def check_installation() -> Iterator[Check]:
    """Is the package here and whole?"""
    package = package_folder()
    if package is None:
        yield Check(
            "kvtools",
            "error",
            f"{__version__}, without its engine: imported from a source tree",
            "run outside of the repository's root, or `pip install .` it",
        )
    else:
        yield Check("kvtools", "ok", f"{__version__} in {package}")
    in_environment = "" if sys.prefix == sys.base_prefix else ", a virtual environment"
    yield Check("Python", "ok", f"{platform.python_version()} in {sys.prefix}{in_environment}")
    glibc = " ".join(word for word in platform.libc_ver() if word)
    yield Check(
        "Linux", "ok", f"{platform.release()} on {platform.machine()}, {glibc or 'another C library than glibc'}"
    )
    broken = []
    for name in _MODULES:
        try:
            importlib.import_module(f"kvtools.{name}")
        except ImportError as error:
            broken.append(f"{name} ({error})")
    if broken:
        yield Check(
            "compiled modules", "error", f"do not load: {'; '.join(broken)}", "pip install --force-reinstall kvtools"
        )
    else:
        yield Check("compiled modules", "ok", f"{len(_MODULES)} of {len(_MODULES)} load")
    told = sorted(name for name in os.environ if name.startswith(("KVTOOLS_", "KVTABLE_")))
    shown = [name if "KEY" in name else f"{name}={os.environ[name]}" for name in told]
    yield Check("environment", "ok", ", ".join(shown) or "no variable of kvtools is set")
