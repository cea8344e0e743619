"""Compiles the TensorFlow ops, whose sources come with the package, against a TensorFlow."""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtools.op_library import (
    CHECKSUM_NAME,
    LIBRARY_NAME,
    TensorFlowBuild,
    compile_command_flags,
    file_checksum,
    op_sources,
    unsupported,
)

# How many pieces the sources are compiled in. TensorFlow's headers take longer to read than the sources behind them, so
# each file for itself would take three times as long; and the same pieces everywhere, so that what was tested is built.
_UNITS = 4

_COMPILERS = ("g++", "clang++", "c++")


class BuildError(ImportError):
    """The ops could not be compiled or loaded; the message says why and what to do."""


def find_compiler() -> str | None:
    """Return the C++ compiler: ``$CXX``, else the first that is on the path, None if there is none."""
    return next((name for name in (os.environ.get("CXX"), *_COMPILERS) if name and shutil.which(name)), None)


def compile_ops(
    package: Path,
    build: TensorFlowBuild,
    target: Path,
    say: Callable[[str], None],
    *,
    options: Sequence[str] = (),
    link_options: Sequence[str] = (),
    jobs: int | None = None,
) -> None:
    """Compile the ops into `target`, with the checksum beside it; either both are there in the end, or nothing changed.

    Args:
        package: the installed package `kvtools`.
        build: the TensorFlow.
        target: the library to write.
        say: called with what is done.
        options: more flags for the compiler.
        link_options: more flags for the linker.
        jobs: how many pieces to compile at once; as many as there are processors if None.

    Raises:
        BuildError: no compiler, or a compile error (shown).
        OSError: the folder of `target` cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(
            "tfplugin: no C++ compiler found to build the TensorFlow ops. Install one "
            "(Debian and Ubuntu: apt-get install g++; conda: conda install gxx) or name it in $CXX, then import again."
        )
    sources, _ = op_sources(package)
    if not sources:
        raise BuildError(f"tfplugin: no op sources in {package / 'ops'}: reinstall kvtools.")
    flags = [*compile_command_flags(build), *options, f"-I{package / 'include'}"]
    if os.environ.get("KVTOOLS_WERROR"):
        flags.append("-Werror")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="build-") as scratch:
        units = [Path(scratch) / f"unit_{number}.cc" for number in range(len(_units(sources)))]
        for unit, parts in zip(units, _units(sources), strict=True):
            unit.write_text("".join(f'#include "{part.resolve()}"\n' for part in parts))
        objects = [unit.with_suffix(".o") for unit in units]
        try:
            with concurrent.futures.ThreadPoolExecutor(jobs or os.cpu_count() or 1) as pool:
                working = [
                    pool.submit(_run, [compiler, *flags, "-c", str(source), "-o", str(out)])
                    for source, out in zip(units, objects, strict=True)
                ]
                for number, job in enumerate(concurrent.futures.as_completed(working), 1):
                    job.result()
                    say(f"  {number}/{len(working)} parts compiled")
            built = Path(scratch) / LIBRARY_NAME
            libraries = [*build.link_flags, f"-L{package}", "-lkvtable"]
            _run([compiler, "-shared", "-o", str(built), *map(str, objects), *link_options, *libraries])
        except BuildError as error:
            if said := unsupported(build):
                raise BuildError(f"{error}\n{said}.") from error
            raise
        checksum = Path(scratch) / CHECKSUM_NAME
        checksum.write_text(file_checksum(built))
        built.replace(target)
        checksum.replace(target.with_name(CHECKSUM_NAME))


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        errors = [line for line in lines if "error" in line] or lines
        raise BuildError(
            "tfplugin: building the TensorFlow ops failed.\n  "
            + "\n  ".join(errors[:8])
            + f"\nThe command was:\n  {' '.join(command)}"
        )


def _units(sources: list[Path]) -> list[list[Path]]:
    """The sources in pieces of about the same size."""
    units: list[list[Path]] = [[] for _ in range(min(_UNITS, len(sources)))]
    for source in sorted(sources, key=lambda path: (-path.stat().st_size, path.name)):
        min(units, key=lambda unit: sum(path.stat().st_size for path in unit)).append(source)
    return [sorted(unit) for unit in units]
