"""`make matrix`: the core of the tests from the wheels in dist/, with each TensorFlow on each Python that it is for.

    python wheels/matrix.py [--pythons "3.10 3.12"] [--tensorflows "2.16 2.21"] [--jobs 2] [--again] [--keep]

Each pair gets an environment of its own, with that release of TensorFlow and what its installer takes with it (Keras,
NumPy, ...). Nothing of this tree is on its path: the tests are those of the source distribution beside the wheels.
They must find ready ops, and may compile none. What each pair gave is kept in build/wheels/matrix and written as a
table into docs/versions.md; a pair that passed with this very wheel and these tests is not run again without `--again`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wheels.environments import BUILD, ROOT, discard, environment
from wheels.interpreters import find_interpreters
from wheels.tensorflows import MINORS, PYTHONS, Minor, minors

DIST = ROOT / "dist"
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- make matrix -->\n", "<!-- end -->\n"
RESULTS = BUILD / "matrix"

CORE = (
    "tests/cli/test_main.py",
    "tests/cli/test_serve.py",
    "tests/kvtools/test_bundle.py",
    "tests/kvtools/test_clip_tables.py",
    "tests/kvtools/test_get.py",
    "tests/kvtools/test_op_library.py",
    "tests/kvtools/test_tensorflow_reads.py",
    "tests/kvtools/test_tfplugin.py",
    "tests/server/test_live_server.py",
    "tests/sok/test_keras_layers.py",
    "tests/tfplugin/keras",
    "tests/tfplugin/test_admission.py",
    "tests/tfplugin/test_apply_in_backward.py",
    "tests/tfplugin/test_async_checkpoint.py",
    "tests/tfplugin/test_chain_writers.py",
    "tests/tfplugin/test_checkpoint.py",
    "tests/tfplugin/test_eviction.py",
    "tests/tfplugin/test_expiry.py",
    "tests/tfplugin/test_export_saved_model.py",
    "tests/tfplugin/test_fused_optimizers.py",
    "tests/tfplugin/test_gradients.py",
    "tests/tfplugin/test_hooks.py",
    "tests/tfplugin/test_keras_models.py",
    "tests/tfplugin/test_keras_optimizers.py",
    "tests/tfplugin/test_lookup.py",
    "tests/tfplugin/test_optimizer_classes.py",
    "tests/tfplugin/test_partitioned_lookup.py",
    "tests/tfplugin/test_pooled_lookup.py",
    "tests/tfplugin/test_saver.py",
    "tests/tfplugin/test_sparse_lookup.py",
    "tests/tfplugin/test_v1_control_flow.py",
    "tests/tfplugin/test_writes.py",
    "tests/tfra/test_variable.py",
)
"""What must pass everywhere: one file or folder for each thing that touches Python, TensorFlow, Keras or NumPy."""

_MINUTES = 60
"""For one pair; more than that is a hang."""


def main() -> None:
    """Run what is asked for, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pythons", default="", help=f"versions or paths of interpreters; {' '.join(PYTHONS)}")
    parser.add_argument("--tensorflows", default="", help="the minor versions; all")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="how many pairs to run at once")
    parser.add_argument("--again", action="store_true", help="run pairs that have passed, too")
    parser.add_argument("--keep", action="store_true", help="keep the environments, 2 GB each")
    arguments = parser.parse_args()
    wheels = sorted(DIST.glob("kvtools-*.whl"))
    if not wheels:
        raise SystemExit("make matrix: no wheel in dist/: run `make wheels` first")
    interpreters, missing = find_interpreters(arguments.pythons.split() or PYTHONS)
    if missing:
        print(f"make matrix: no Python {', '.join(missing)} here: not on the path, and not in pyenv", file=sys.stderr)
    tree = tests_tree()
    pairs = []
    for minor in minors(arguments.tensorflows):
        for version, python in interpreters.items():
            wheel = next((wheel for wheel in wheels if serves(wheel, version)), None)
            if version not in minor.pythons:
                continue
            if wheel is None:
                print(f"make matrix: no wheel for Python {version} in dist/", file=sys.stderr)
                continue
            pairs.append((minor, version, python, wheel))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        running = [pool.submit(run_pair, *pair, tree, again=arguments.again, keep=arguments.keep) for pair in pairs]
        for done in as_completed(running):
            result = done.result()
            print(f"TensorFlow {result['tensorflow']}, Python {result['python']}: {summary(result)}", flush=True)
            write_page(PAGE)
    failed = [result for result in results().values() if result["failed"]]
    for result in failed:
        print(f"{result['tensorflow']} on {result['python']}: {', '.join(result['failures'][:10])}", file=sys.stderr)
    if failed:
        raise SystemExit(1)


def serves(wheel: Path, version: str) -> bool:
    """Tell whether a wheel is for a Python.

    >>> serves(Path("kvtools-1-cp312-abi3-manylinux_2_34_x86_64.whl"), "3.13")
    True
    >>> serves(Path("kvtools-1-cp310-cp310-manylinux_2_34_x86_64.whl"), "3.11")
    False
    """
    tag, abi = wheel.name.split("-")[2:4]
    minor = int(version.split(".")[1])
    return int(tag.removeprefix("cp3")) <= minor if abi == "abi3" else tag == f"cp3{minor}"


def tests_tree() -> Path:
    """Unpack the tests of the source distribution beside the wheels, and none of its packages; returns the folder."""
    shutil.rmtree(RESULTS / "tree", ignore_errors=True)
    (archive,) = DIST.glob("kvtools-*.tar.gz")
    with tarfile.open(archive) as tar:
        wanted = ("tests/", "examples/", "docs/", "pyproject.toml")
        members = [one for one in tar.getmembers() if one.name.partition("/")[2].startswith(wanted)]
        tar.extractall(RESULTS / "tree", members, filter="data")
    tree = RESULTS / "tree" / archive.name.removesuffix(".tar.gz")
    if lost := [name for name in CORE if not (tree / name).exists()]:
        raise SystemExit(f"wheels/matrix.py names tests that are not there: {', '.join(lost)}")
    return tree


def run_pair(
    minor: Minor, version: str, python: str, wheel: Path, tree: Path, *, again: bool, keep: bool
) -> dict[str, Any]:
    """Run the core tests with a TensorFlow on a Python; returns what came of it, as it is kept."""
    name = f"tensorflow-{minor.newest}-python-{version}"
    record = RESULTS / f"{name}.json"
    state = _digest(wheel, tree)
    if not again and record.exists():
        before: dict[str, Any] = json.loads(record.read_text())
        if before["state"] == state and not before["failed"]:
            return before
    folder = RESULTS / name
    packages = [
        f"kvtools[tensorflow,formats,serve] @ {wheel.as_uri()}",
        f"tensorflow=={minor.newest}",
        f"tf-keras=={minor.name}.*",
        *minor.held_back,
        "hypothesis",
        "pandas",
        "pytest",
    ]
    shutil.rmtree(folder, ignore_errors=True)
    started = time.monotonic()
    executable = environment(folder, python, packages)
    installed = time.monotonic() - started
    cache = RESULTS / f"{name}-cache"
    shutil.rmtree(cache, ignore_errors=True)
    env = {**os.environ, "KVTOOLS_CACHE_DIR": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    doctor = _doctor(executable, env, tree)
    xml_file = RESULTS / f"{name}.xml"
    xml_file.unlink(missing_ok=True)
    command = [str(executable.parent / "pytest"), "-q", "-m", "not thorough", "--hypothesis-profile=quick"]
    started = time.monotonic()
    with (RESULTS / f"{name}.log").open("w") as log:
        try:
            done = subprocess.run(
                [*command, f"--junitxml={xml_file}", *CORE],
                cwd=tree,
                env=env,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=_MINUTES * 60,
            ).returncode
        except subprocess.TimeoutExpired:
            done = -1
    counts, failures = _counts(xml_file)
    if done and not failures:
        failures.append(f"pytest ended with {done}: see {log.name}")
    if compiled := [path.name for path in cache.glob("tensorflow-*")]:
        failures.append(f"ops were compiled: {', '.join(compiled)}")
    if not doctor["ops"].startswith("ready"):
        failures.append(f"ops: {doctor['ops']}")
    result = {
        "tensorflow": minor.newest,
        "python": version,
        **doctor,
        **counts,
        "failed": len(failures),
        "failures": failures,
        "install_seconds": round(installed, 1),
        "test_seconds": round(time.monotonic() - started, 1),
        "state": state,
    }
    record.write_text(json.dumps(result, indent=1))
    shutil.rmtree(cache, ignore_errors=True)
    if not keep:
        discard(folder)
    return result


def summary(result: dict[str, Any]) -> str:
    """Say in a few words what came of a pair."""
    failed = f"{result['failed']} failed, " if result["failed"] else ""
    return f"{failed}{result['passed']} passed, {result['skipped']} skipped in {result['test_seconds']:.0f} s"


def results() -> dict[tuple[str, str], dict[str, Any]]:
    """What is kept, by release of TensorFlow and version of Python."""
    kept = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("tensorflow-*.json"))]
    return {(result["tensorflow"], result["python"]): result for result in kept}


def write_page(page: Path) -> None:
    """Put the table of what is kept into a page, between its two marks; what was not run here stays as it is."""
    before, _, rest = page.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    page.write_text(before + BEGIN + table(results(), old) + END + after)


def table(kept: dict[tuple[str, str], dict[str, Any]], old: str = "") -> str:
    """A row for each TensorFlow, a column for each Python; of `old`, such a table, what is not kept."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in old.splitlines()]
    stood = {row[0]: row[1:] for row in rows if len(row) == len(PYTHONS) + 3}
    lines = [
        "| TensorFlow | " + " | ".join(f"Python {version}" for version in PYTHONS) + " | Keras | NumPy |",
        "|---|" + "---|" * len(PYTHONS) + "---|---|",
    ]
    for minor in MINORS:
        *before, keras_before, numpy_before = stood.get(minor.newest, ["not run"] * len(PYTHONS) + ["-", "-"])
        cells: list[str] = []
        keras, numpy = ({*names.split(", ")} - {"-"} for names in (keras_before, numpy_before))
        if all((minor.newest, version) in kept for version in minor.pythons):
            keras, numpy = set(), set()
        for version, cell in zip(PYTHONS, before, strict=True):
            result = kept.get((minor.newest, version))
            if result is not None:
                keras.add(result["keras"])
                numpy.add(result["numpy"])
                cell = _cell(result)
            cells.append(cell if version in minor.pythons else "no TensorFlow for it")
        lines.append(f"| {minor.newest} | {' | '.join(cells)} | {_range(keras)} | {_range(numpy)} |")
    return "\n".join(lines) + "\n"


def _cell(result: dict[str, Any]) -> str:
    failed = f"**{result['failed']} failed**, " if result["failed"] else ""
    return f"{failed}{result['passed']} passed"


def _range(versions: set[str]) -> str:
    return ", ".join(sorted(versions, key=lambda one: [int(n) for n in one.split(".") if n.isdigit()])) or "-"


def _doctor(python: Path, env: dict[str, str], cwd: Path) -> dict[str, str]:
    """What `kvtools doctor` says of the environment, and the versions that decide."""
    command = [str(python.parent / "kvtools"), "doctor", "--json", "--only", "tensorflow", "--only", "packages"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd)
    sections = json.loads(done.stdout)["sections"]
    found = {check["name"]: check["value"] for check in sections["tensorflow"]}
    ask = "import importlib.metadata as m; print(m.version('numpy'), m.version('keras'), m.version('tf_keras'))"
    numpy, keras, tf_keras = subprocess.run(
        [str(python), "-c", ask], capture_output=True, text=True, check=True, cwd=cwd
    ).stdout.split()
    return {"ops": found.get("ops", found["TensorFlow"]), "numpy": numpy, "keras": keras, "tf_keras": tf_keras}


def _counts(xml_file: Path) -> tuple[dict[str, int], list[str]]:
    """How many tests passed and were skipped, and the names of those that failed."""
    if not xml_file.exists():
        return {"passed": 0, "skipped": 0}, []
    cases = list(xml.etree.ElementTree.parse(xml_file).getroot().iter("testcase"))
    failures = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - skipped - len(failures), "skipped": skipped}, failures


def _digest(wheel: Path, tree: Path) -> str:
    digest = hashlib.sha256(wheel.read_bytes())
    for path in sorted((tree / "tests").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    main()
