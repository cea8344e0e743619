"""`make wheels`: a source distribution, and wheels with ready TensorFlow ops for every Python that is here, in dist/.

    python wheels/build.py [--pythons "3.10 3.12"] [--tensorflows "2.16 2.21"] [--jobs 2] [--keep]

The source distribution is made first, and all else is built from it. From Python 3.12 on the modules use the stable
ABI: one wheel for it and for all after it. The ops are compiled once for each minor version of TensorFlow, in
an environment that is thrown away, and go into every wheel; what was compiled before from the same sources is taken as
it is. At last auditwheel looks which Linux a wheel runs on, and writes that into its name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvtools import op_library
from wheels.environments import BUILD, ROOT, discard, environment, run, tool, uv
from wheels.interpreters import find_interpreters
from wheels.tensorflows import PYTHONS, Minor, minors

DIST = ROOT / "dist"
STABLE_ABI = "3.12"
_STARTED = time.monotonic()
_BUILD_TOOLS = ("scikit-build-core", "nanobind", "cmake", "ninja")
_NOT_ABI = ("/version.h", "/external/")
"""Headers that may differ between two releases which the same ops serve: the one that names the release, and those of
libraries that TensorFlow has within it, which are not on the path that ops are compiled with."""


def main() -> None:
    """Build them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", default="", help=f"versions or paths of interpreters; {' '.join(PYTHONS)}")
    parser.add_argument("--tensorflows", default="", help="the minor versions to have ready ops for; all")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="how much to compile at once")
    parser.add_argument("--keep", action="store_true", help="keep the environments with TensorFlow, 2 GB each")
    arguments = parser.parse_args()

    interpreters, missing = find_interpreters(arguments.pythons.split() or PYTHONS)
    if missing:
        print(f"make wheels: no Python {', '.join(missing)} here: not on the path, and not in pyenv", file=sys.stderr)
        if arguments.pythons or not interpreters:
            raise SystemExit("make wheels: name those that are there: make wheels PYTHONS='3.11 /usr/bin/python3.12'")
    wanted = minors(arguments.tensorflows)
    source = make_sdist()
    first = build_wheel(source, _first(interpreters), arguments.jobs, None)
    package = _unpacked(first)
    ready = BUILD / "ready"
    for minor in wanted:
        ready_ops(minor, package, ready, interpreters, jobs=arguments.jobs, keep=arguments.keep)
    shipped = BUILD / "ready-in-wheels"
    shutil.rmtree(shipped, ignore_errors=True)
    for minor in wanted:
        shutil.copytree(ready / f"tensorflow-{minor.name}", shipped / f"tensorflow-{minor.name}")
    done = [
        repaired(build_wheel(source, (version, python), arguments.jobs, shipped))
        for version, python in interpreters.items()
        if not _served_by_another(version, interpreters)
    ]
    DIST.mkdir(exist_ok=True)
    for old in DIST.glob("kvtools-*"):
        old.unlink()
    for path in [source.parent / f"{source.name}.tar.gz", *done]:
        shutil.copy(path, DIST)
        print(f"dist/{path.name}  {path.stat().st_size / 2**20:.1f} MiB")


def make_sdist() -> Path:
    """Make the source distribution and return the folder that it unpacks to."""
    _say("the source distribution")
    out, tree = BUILD / "sdist", BUILD / "tree"
    before = _contents(out)
    for folder in (out, tree):
        shutil.rmtree(folder, ignore_errors=True)
    # What git knows, and nothing that was built or lies about.
    for name in run(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT).split("\0"):
        if name and (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    uv("build", "-q", "--sdist", "--out-dir", str(out), str(tree))
    (archive,) = out.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(out, filter="data")
    date_changes(out, before)
    return out / archive.name.removesuffix(".tar.gz")


def date_changes(folder: Path, before: dict[str, tuple[str, float]]) -> None:
    """Give the files of a folder the time at which their content was last another one.

    A source distribution has one time for all its files, and always the same. Ninja goes by times, and would take what
    it compiled before a source was changed.

    Args:
        folder: where it was unpacked.
        before: what lay there before, by `_contents`.
    """
    for name, (digest, _) in _contents(folder).items():
        known, since = before.get(name, ("", 0.0))
        when = since if known == digest else time.time()
        os.utime(folder / name, (when, when))


def _contents(folder: Path) -> dict[str, tuple[str, float]]:
    """A digest and the time of each file in a folder, by its path there."""
    return {
        path.relative_to(folder).as_posix(): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime)
        for path in folder.rglob("*")
        if path.is_file()
    }


def build_wheel(source: Path, interpreter: tuple[str, str], jobs: int, ready: Path | None) -> Path:
    """Build the wheel of a Python, with these ready ops."""
    version, python = interpreter
    _say(f"the wheel of Python {version}" + (", with ready ops" if ready else ""))
    tools = environment(BUILD / f"python-{version}", python, _BUILD_TOOLS, constrained=True)
    out = BUILD / f"plain-{version}"
    shutil.rmtree(out, ignore_errors=True)
    settings = {
        "build-dir": BUILD / f"cmake-{version}",
        "cmake.define.KVTOOLS_CUDA": "off",
        "cmake.define.CMAKE_CXX_FLAGS": f"-include {ROOT / 'wheels' / 'older_libstdcxx.h'}",
        "cmake.define.KVTOOLS_READY_OPS": ready or "",
    }
    if launcher := shutil.which("ccache"):
        settings["cmake.define.CMAKE_CXX_COMPILER_LAUNCHER"] = launcher
    options = [word for name, value in settings.items() for word in ("-C", f"{name}={value}")]
    env = {**os.environ, "CMAKE_BUILD_PARALLEL_LEVEL": str(jobs), "PATH": f"{tools.parent}:{os.environ['PATH']}"}
    command = ["build", "-q", "--wheel", "--no-build-isolation", "--python", str(tools), "--out-dir", str(out)]
    run([tool("uv"), *command, *options, str(source)], env={**env, "UV_NO_CONFIG": "1"})
    (wheel,) = out.glob("*.whl")
    return wheel


def ready_ops(minor: Minor, package: Path, ready: Path, interpreters: dict[str, str], *, jobs: int, keep: bool) -> None:
    """Compile the ops for a minor version of TensorFlow into the folder `ready`, unless they are there."""
    sys.path.insert(0, str(package.parent))
    folder = ready / f"tensorflow-{minor.name}"
    library = folder / op_library.LIBRARY_NAME
    builds = _recorded(folder)
    if builds and not any(op_library.why_not_ready(_with_ready(package, ready), build) for build in builds):
        _say(f"the ops for TensorFlow {minor.name} are there, for {', '.join(build.version for build in builds)}")
        return
    shutil.rmtree(folder, ignore_errors=True)
    served = []
    headers: dict[str, str] = {}
    for release in minor.releases:
        python = _tensorflow(release, minor, interpreters)
        script = [str(python), str(ROOT / "wheels" / "ready_ops.py")]
        if release == minor.newest:
            _say(f"compiling the ops for TensorFlow {release}")
            said = _last_json(run([*script, "compile", str(package), str(folder), str(jobs)]))
            _say(f"compiled in {said['seconds']} s, {said['cpu_seconds']} s of CPU")
            headers = _last_json(run([*script, "headers", str(package), str(folder)]))["headers"]
        else:
            other = _last_json(run([*script, "headers", str(package), str(folder)]))["headers"]
            if differing := _differing(headers, other):
                _say(f"TensorFlow {release} has other headers, and gets no ready ops: {', '.join(differing[:5])} ...")
                continue
        said = _last_json(run([*script, "try", str(package), str(folder)]))
        _say(f"TensorFlow {release} ({said['build']['git_version']}) loads them: {said['ops']} ops")
        served.append(_build_of(said["build"]))
        if not keep:
            discard(python.parents[1])
    (folder / op_library.CHECKSUM_NAME).unlink()
    op_library.write_record(package, library, served)


def repaired(wheel: Path) -> Path:
    """Let auditwheel name the Linux that a wheel runs on; returns the new one."""
    out = BUILD / f"repaired-{wheel.parent.name}"
    shutil.rmtree(out, ignore_errors=True)
    auditwheel = [tool("auditwheel"), "repair", "--exclude", "libtensorflow_framework.so.2", "--wheel-dir", str(out)]
    run([*auditwheel, str(wheel)], env={**os.environ, "PATH": f"{Path(tool('patchelf')).parent}:{os.environ['PATH']}"})
    (done,) = out.glob("*.whl")
    check_wheel(done)
    return done


def check_wheel(wheel: Path) -> None:
    """End the program where a wheel does not have what it is to have, as it is to be."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        for record in [name for name in names if name.endswith("/built_for.json")]:
            library = archive.read(record.replace("built_for.json", "libkvtools_ops.so"))
            if hashlib.sha256(library).hexdigest() != json.loads(archive.read(record))["library"]:
                raise SystemExit(f"{wheel}: {record} is not that of the library beside it: it was changed on the way")
    for needed in ("kvtools/libkvtable.so", "kvtools/cli/main.py", "kvtools/server/app.py", "tfplugin/__init__.py"):
        if needed not in names:
            raise SystemExit(f"{wheel}: lacks {needed}")
    if foreign := [name for name in names if ".libs/" in name or name.startswith(("tests/", "wheels/"))]:
        raise SystemExit(f"{wheel}: has {', '.join(foreign[:5])}, which do not belong there")


def _first(interpreters: dict[str, str]) -> tuple[str, str]:
    return next(iter(interpreters.items()))


def _served_by_another(version: str, interpreters: dict[str, str]) -> bool:
    """Whether the wheel of an older Python, with the stable ABI, is that of this one, too."""
    numbers = [tuple(map(int, one.split("."))) for one in (version, STABLE_ABI)]
    older = [one for one in interpreters if numbers[1] <= tuple(map(int, one.split("."))) < numbers[0]]
    return bool(older)


def _unpacked(wheel: Path) -> Path:
    """The package of a wheel, for what links against the engine."""
    folder = BUILD / "package"
    shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder / "kvtools"


def _with_ready(package: Path, ready: Path) -> Path:
    """The package with the ready ops in their place, as they are when installed."""
    place = package / "ops" / "ready"
    if not place.is_symlink():
        ready.mkdir(exist_ok=True)
        place.symlink_to(ready)
    return package


def _recorded(folder: Path) -> list[op_library.TensorFlowBuild]:
    """The builds of TensorFlow that a record names; none where there is none that can be read."""
    try:
        record = json.loads((folder / op_library.RECORD_NAME).read_text())
        return [op_library.TensorFlowBuild(*identity, tuple(record["flags"])) for identity in record["tensorflow"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _build_of(said: dict[str, Any]) -> op_library.TensorFlowBuild:
    return op_library.TensorFlowBuild(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in said.items()}
    )


def _tensorflow(release: str, minor: Minor, interpreters: dict[str, str]) -> Path:
    version = next((version for version in interpreters if version in minor.pythons), None)
    if version is None:
        raise SystemExit(f"make wheels: TensorFlow {release} needs one of Python {', '.join(minor.pythons)}")
    return environment(BUILD / f"tensorflow-{release}", interpreters[version], [f"tensorflow=={release}"])


def _differing(headers: dict[str, str], other: dict[str, str]) -> list[str]:
    """The headers that are not the same in two releases, and whose difference may matter."""
    names = headers.keys() | other.keys()
    return sorted(
        name
        for name in names
        if headers.get(name) != other.get(name) and not any(part in f"/{name}" for part in _NOT_ABI)
    )


def _last_json(printed: str) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(printed.strip().splitlines()[-1])
    return answer


def _say(what: str) -> None:
    print(f"make wheels: {time.monotonic() - _STARTED:4.0f} s  {what}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
