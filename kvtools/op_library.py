"""Which compiled TensorFlow ops fit the TensorFlow that is installed: those that a wheel brought along, those that were
compiled here before, or none yet.

A wheel has *ready* ops for each minor version of TensorFlow, in ``ops/ready/tensorflow-2.NN``, and beside them a record
(``built_for.json``) of what they were compiled from and for. They are taken only where all of it is as it is here: the
op sources and the engine's headers, TensorFlow's version, revision, compiler and ABI flags, the processor's
architecture, and the file itself. Nothing here imports TensorFlow.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

LIBRARY_NAME = "libkvtools_ops.so"
CHECKSUM_NAME = "libkvtools_ops.sha256"
RECORD_NAME = "built_for.json"
FIRST_TENSORFLOW = (2, 16)
LAST_TENSORFLOW = (2, 21)
SUPPORTED = ".".join(map(str, FIRST_TENSORFLOW)) + " to " + ".".join(map(str, LAST_TENSORFLOW))

_COMPILE_CPU_SECONDS = 90.0
"""What compiling takes on one processor: `make wheels` measured 63 s on an AMD EPYC for each TensorFlow; half as much
again, for slower ones."""

_OWN_FLAGS = ("-O2", "-fPIC", "-Wall", "-Wextra")
"""What the ops are compiled with beside the flags of TensorFlow."""


@dataclass(frozen=True)
class TensorFlowBuild:
    """A TensorFlow, as far as a library that is compiled against it depends on it.

    Attributes:
        version: such as "2.21.0".
        git_version: the revision that it was made of.
        compiler: what it was compiled with.
        compile_flags: what `tf.sysconfig.get_compile_flags()` gives, paths included.
        link_flags: what `tf.sysconfig.get_link_flags()` gives.
    """

    version: str
    git_version: str
    compiler: str
    compile_flags: tuple[str, ...] = ()
    link_flags: tuple[str, ...] = ()

    @staticmethod
    def of(tf: ModuleType) -> TensorFlowBuild:
        """Return that of an imported TensorFlow."""
        return TensorFlowBuild(
            tf.version.VERSION,
            tf.version.GIT_VERSION,
            tf.version.COMPILER_VERSION,
            tuple(tf.sysconfig.get_compile_flags()),
            tuple(tf.sysconfig.get_link_flags()),
        )

    @property
    def minor(self) -> tuple[int, int]:
        """The first two numbers of the version.

        >>> TensorFlowBuild("2.22.0-rc1", "", "").minor
        (2, 22)
        """
        numbers = re.match(r"(\d+)\.(\d+)", self.version)
        return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)

    @property
    def abi_flags(self) -> list[str]:
        """The flags of the compiler that change what is compiled: all but where headers lie."""
        return [flag for flag in self.compile_flags if not flag.startswith("-I")]

    @property
    def identity(self) -> list[str]:
        """What tells this build of TensorFlow from others, in a record."""
        return [self.version, self.git_version, self.compiler]


@dataclass(frozen=True)
class OpLibrary:
    """The ops for a TensorFlow.

    Attributes:
        kind: "ready": a wheel brought them; "compiled": they were compiled here before; "missing": to be compiled.
        path: the library, or where it will be.
        why_not_ready: what keeps the wheel's from being used, "" if they are.
    """

    kind: Literal["ready", "compiled", "missing"]
    path: Path
    why_not_ready: str = ""


def package_folder() -> Path | None:
    """Return the folder of the installed package, which has the engine's library, None if there is none.

    Where `kvtools` is imported from the source tree, its modules are there, and the library is not.
    """
    spec = importlib.util.find_spec("kvtools")
    for location in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(location) / "libkvtable.so").exists():
            return Path(location)
    return None


def op_sources(package: Path) -> tuple[list[Path], list[Path]]:
    """Return the sources of the ops in the installed package, and all headers that they may include."""
    ops = package / "ops"
    return sorted(ops.glob("*.cc")), [*sorted(ops.glob("*.h")), *sorted((package / "include").rglob("*.h"))]


def sources_digest(package: Path) -> str:
    """Return a digest of the sources and headers: equal where the ops and the engine's interface are."""
    digest = hashlib.sha256()
    sources, headers = op_sources(package)
    for path in (*sources, *headers):
        digest.update(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def is_whole(library: Path) -> bool:
    """Tell whether a compiled library is there as it was built. One that was cut short would end the process that
    loads it."""
    try:
        return library.with_name(CHECKSUM_NAME).read_text() == file_checksum(library)
    except (FileNotFoundError, PermissionError):
        return False


def ready_folder(package: Path, minor: tuple[int, int]) -> Path:
    """Return where the ready ops for a minor version of TensorFlow lie.

    >>> ready_folder(Path("kvtools"), (2, 16)).as_posix()
    'kvtools/ops/ready/tensorflow-2.16'
    """
    return package / "ops" / "ready" / f"tensorflow-{minor[0]}.{minor[1]}"


def write_record(package: Path, library: Path, builds: Sequence[TensorFlowBuild]) -> Path:
    """Write beside a ready library what it was compiled from, and for which builds of TensorFlow; returns the path.

    Args:
        package: the package whose sources and headers it was compiled from.
        library: the library, as it will be shipped.
        builds: those that it was compiled for or found to serve, all with the same ABI flags.

    Raises:
        ValueError: the builds have other flags than each other, or there are none.
    """
    flags = {tuple(build.abi_flags) for build in builds}
    if len(flags) != 1:
        raise ValueError(f"recording {library}: got builds of TensorFlow with flags {sorted(flags)}, expected one set")
    record = library.with_name(RECORD_NAME)
    content = {
        "tensorflow": [build.identity for build in builds],
        "flags": list(*flags),
        "machine": platform.machine(),
        "sources": sources_digest(package),
        "library": file_checksum(library),
    }
    record.write_text(json.dumps(content, indent=1) + "\n")
    return record


def why_not_ready(package: Path, build: TensorFlowBuild) -> str:
    """Return what keeps the ready ops of a package from serving a TensorFlow, "" if nothing does."""
    folder = ready_folder(package, build.minor)
    name = f"TensorFlow {build.version}"
    if not folder.parent.is_dir():
        return "this kvtools was installed from source, which brings no ready ops"
    try:
        record: dict[str, Any] = json.loads((folder / RECORD_NAME).read_text())
        known: list[list[str]] = record["tensorflow"]
        flags, machine, sources, checksum = (record[field] for field in ("flags", "machine", "sources", "library"))
    except FileNotFoundError:
        return f"this wheel brings none for {name}, but for {_versions(folder.parent)}"
    except (ValueError, KeyError, TypeError, OSError) as error:
        return f"{folder / RECORD_NAME} cannot be read ({error!r}): reinstall kvtools"
    if machine != platform.machine():
        return f"the ready ones are for {machine}, this machine is {platform.machine()}"
    if build.identity not in known:
        same = [one for one in known if one[0] == build.version]
        if not same:
            return f"this wheel brings none for {name}, but for {', '.join(one[0] for one in known)}"
        return (
            f"this {name} is another build ({build.git_version}, {build.compiler}) than the one that the ready ones are"
            f" for ({same[0][1]}, {same[0][2]})"
        )
    if flags != build.abi_flags:
        return f"this {name} asks for the flags {' '.join(build.abi_flags)}, the ready ones have {' '.join(flags)}"
    if sources != sources_digest(package):
        return f"the sources or headers in {package} are not those that the ready ones were compiled from"
    library = folder / LIBRARY_NAME
    if not library.is_file():
        return f"{library} is missing: reinstall kvtools"
    if checksum != file_checksum(library):
        return f"{library} is damaged: reinstall kvtools"
    return ""


def _versions(ready: Path) -> str:
    """Name the versions that a wheel has ops for."""
    names = [path.parent.name.removeprefix("tensorflow-") for path in ready.glob(f"tensorflow-*/{RECORD_NAME}")]
    return ", ".join(sorted(names, key=lambda name: [int(number) for number in name.split(".")])) or "no TensorFlow"


def compile_command_flags(build: TensorFlowBuild) -> list[str]:
    """Return the flags that the ops are compiled with against a TensorFlow."""
    includes = [flag.removeprefix("-I") for flag in build.compile_flags if flag.startswith("-I")]
    return [*build.abi_flags, *(f"-isystem{path}" for path in includes), *_OWN_FLAGS]


def cache_key(package: Path, build: TensorFlowBuild) -> str:
    """Name the folder of the cache for ops that are compiled against a TensorFlow from the sources of a package.

    Where that TensorFlow lies is not in it: an environment that was moved, or is reached by a link, has the same ops.
    """
    digest = hashlib.sha256()
    for part in (*build.identity, *build.abi_flags, *_OWN_FLAGS):
        digest.update(part.encode() + b"\0")
    sources, headers = op_sources(package)
    for path in (*sources, *headers):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"tensorflow-{build.version}-{digest.hexdigest()[:16]}"


def find_op_library(
    package: Path, cache: Path, build: TensorFlowBuild, others_caches: Sequence[Path] = ()
) -> OpLibrary:
    """Return the ops that a TensorFlow is to load, and why they are not ready ones where they are not.

    Args:
        package: the installed package `kvtools`, with `ops` and `include`.
        cache: where compiled ops are kept.
        build: the TensorFlow.
        others_caches: where compiled ops of others may be, if the cache has none.
    """
    why = why_not_ready(package, build)
    if not why:
        return OpLibrary("ready", ready_folder(package, build.minor) / LIBRARY_NAME)
    return compiled_op_library(package, cache, build, why, others_caches)


def compiled_op_library(
    package: Path, cache: Path, build: TensorFlowBuild, why_not_ready: str, others_caches: Sequence[Path] = ()
) -> OpLibrary:
    """Return the compiled ops for a TensorFlow, or where they will be, whatever the wheel has."""
    key = cache_key(package, build)
    for folder in (cache, *others_caches):
        if is_whole(folder / key / LIBRARY_NAME):
            return OpLibrary("compiled", folder / key / LIBRARY_NAME, why_not_ready)
    return OpLibrary("missing", cache / key / LIBRARY_NAME, why_not_ready)


def unsupported(build: TensorFlowBuild) -> str:
    """Return what is to be said of a TensorFlow out of the range that is tested, "" if it is in it.

    >>> unsupported(TensorFlowBuild("2.15.1", "", ""))
    'TensorFlow 2.15.1 is older than what kvtools works with: install 2.16 to 2.21'
    >>> unsupported(TensorFlowBuild("2.21.0", "", ""))
    ''
    """
    if build.minor < FIRST_TENSORFLOW:
        return f"TensorFlow {build.version} is older than what kvtools works with: install {SUPPORTED}"
    if build.minor > LAST_TENSORFLOW:
        return f"TensorFlow {build.version} is newer than what kvtools was tested with, {SUPPORTED}"
    return ""


def compile_seconds(processors: int | None = None) -> float:
    """Return about how long compiling takes on this many processors; on those of this process if None.

    >>> compile_seconds(2) < compile_seconds(1)
    True
    """
    # Four pieces, so more than four processors are of no use.
    return _COMPILE_CPU_SECONDS / max(1, min(4, processors or len(os.sched_getaffinity(0))))


def told_duration(seconds: float) -> str:
    """Write how long something takes as people say it.

    >>> told_duration(100), told_duration(61), told_duration(20)
    ('some 2 minutes', 'about a minute', 'less than a minute')
    """
    if seconds < 50:
        return "less than a minute"
    minutes = round(seconds / 60)
    return f"some {minutes} minutes" if minutes > 1 else "about a minute"
