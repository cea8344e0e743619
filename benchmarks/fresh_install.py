"""From nothing to the first trained step: what an install from the wheel takes, in environments made for it.

    python benchmarks/fresh_install.py [--tensorflows "2.16 2.21"] [--python 3.11]

For each TensorFlow: an empty environment, TensorFlow into it by pip from the package index (told apart: a download of
half a gigabyte), then the wheel of dist/ and what else it needs, then a program in a process of its own, with no
compiler on the path and no cache: import TensorFlow, import tfplugin, one lookup, one training step. Writes the table
into docs/versions.md and the numbers into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from wheels.environments import BUILD, ROOT, run, uv
from wheels.interpreters import find_interpreters
from wheels.matrix import serves
from wheels.tensorflows import minors

PAGE = ROOT / "docs" / "versions.md"
RESULT = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- make bench-install -->\n", "<!-- end of installs -->\n"
LIMIT = 60.0

PROGRAM = """
import json, time
began = time.time()
import tensorflow as tf
with_tensorflow = time.time()
import tfplugin
with_ops = time.time()
table = tf.get_kv_variable("user", embedding_dim=16)
ids = tf.constant([17, -3, 1 << 60], tf.int64)
tf.nn.embedding_lookup(table, ids)
looked_up = time.time()
optimizer = tfplugin.OptimizerWrapper(tf.keras.optimizers.Adam(0.01))
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)
optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table]))
assert int(table.size()) == 3
trained = time.time()
print(json.dumps({"import tensorflow": with_tensorflow - began, "import tfplugin": with_ops - with_tensorflow,
                  "first lookup": looked_up - with_ops, "first step": trained - looked_up}))
"""

TOOLS = """
import json, sys, time
began = time.time()
import kvtools
import kvtools.cli.main
done = time.time()
print(json.dumps({"seconds": done - began, "modules": len(sys.modules), "tensorflow": "tensorflow" in sys.modules}))
"""


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensorflows", default="2.16 2.21")
    parser.add_argument("--python", default="3.11", help="the version or path of an interpreter")
    arguments = parser.parse_args()
    interpreters, missing = find_interpreters([arguments.python])
    if missing:
        raise SystemExit(f"fresh_install.py: no Python {missing[0]} here")
    ((version, python),) = interpreters.items()
    wheel = next((wheel for wheel in sorted((ROOT / "dist").glob("*.whl")) if serves(wheel, version)), None)
    if wheel is None:
        raise SystemExit(f"fresh_install.py: no wheel for Python {version} in dist/: run `make wheels`")
    measured = [measure(minor.newest, python, wheel) for minor in minors(arguments.tensorflows)]
    light = measure_light(python, wheel)
    text = table(measured, light)
    print(text, end="")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + text + END + rest.partition(END)[2])
    record = {
        "wheel": wheel.name,
        "bytes": wheel.stat().st_size,
        "python": version,
        "installs": measured,
        "tools": light,
    }
    (RESULT / "fresh-install.json").write_text(json.dumps(record, indent=1) + "\n")
    if slow := [one for one in measured if one["wheel to step"] > LIMIT]:
        raise SystemExit(f"more than {LIMIT:.0f} s from the wheel to a trained step with {slow[0]['tensorflow']}")


def measure(release: str, python: str, wheel: Path) -> dict[str, Any]:
    """Install a TensorFlow, then the wheel, then train a step; returns what each took."""
    folder = BUILD / "fresh"
    shutil.rmtree(folder, ignore_errors=True)
    taken: dict[str, Any] = {"tensorflow": release}
    # pip, as most people have it; without what earlier installs have left in its cache.
    own = str(folder / "bin" / "python")
    pip = [
        own,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-cache-dir",
        "--disable-pip-version-check",
    ]
    for what, command in {
        "environment": [python, "-m", "venv", str(folder)],
        "install tensorflow": [*pip, f"tensorflow=={release}"],
        "install wheel": [*pip, str(wheel)],
    }.items():
        started = time.monotonic()
        run(command)
        taken[what] = round(time.monotonic() - started, 1)
    empty = BUILD / "empty"
    empty.mkdir(exist_ok=True)
    env = {
        "PATH": str(empty),  # no compiler, no anything
        "HOME": str(empty),
        "KVTOOLS_CACHE_DIR": str(empty / "cache"),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    started = time.monotonic()
    said = run([str(folder / "bin" / "python"), "-c", PROGRAM], env=env, cwd=empty)
    taken["program"] = round(time.monotonic() - started, 1)
    taken |= {name: round(seconds, 2) for name, seconds in json.loads(said.strip().splitlines()[-1]).items()}
    taken["wheel to step"] = round(taken["install wheel"] + taken["program"], 1)
    if (empty / "cache").exists():
        raise SystemExit(f"something was compiled or kept in {empty / 'cache'}: the wheel's ops were not used")
    shutil.rmtree(folder)
    return taken


def measure_light(python: str, wheel: Path) -> dict[str, Any]:
    """What `pip install kvtools` without TensorFlow is: megabytes, and the time until `kvtools --help` is printed."""
    folder = BUILD / "fresh"
    shutil.rmtree(folder, ignore_errors=True)
    uv("venv", "-q", "--python", python, str(folder))
    own = folder / "bin" / "python"
    uv("pip", "install", "-q", "--python", str(own), str(wheel))
    site = next((folder / "lib").glob("python*/site-packages"))
    size = lambda path: sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())  # noqa: E731
    sizes = {"kvtools": size(site / "kvtools") + size(site / "tfplugin"), "all": size(site)}
    subprocess.run([str(own), "-c", TOOLS], check=True, capture_output=True)  # compiles the bytecode
    imported = json.loads(run([str(own), "-c", TOOLS], cwd=folder))
    seconds = []
    for _ in range(5):
        started = time.monotonic()
        run([str(folder / "bin" / "kvtools"), "--help"], cwd=folder)
        seconds.append(time.monotonic() - started)
    if imported["tensorflow"]:
        raise SystemExit("`import kvtools` imported TensorFlow")
    shutil.rmtree(folder)
    return {"bytes": sizes, "import kvtools": round(imported["seconds"], 3), "kvtools --help": round(min(seconds), 3)}


def table(measured: list[dict[str, Any]], light: dict[str, Any]) -> str:
    """The numbers, as the page has them."""
    lines = [
        "| seconds | " + " | ".join(f"TensorFlow {one['tensorflow']}" for one in measured) + " |",
        "|---|" + "---:|" * len(measured),
    ]
    for name, title in {
        "install tensorflow": "`pip install tensorflow` (for comparison)",
        "install wheel": "`pip install` of the wheel, with what else it needs",
        "import tensorflow": "`import tensorflow`",
        "import tfplugin": "`import tfplugin`",
        "first lookup": "the first lookup",
        "first step": "the first training step",
        "wheel to step": "**from the wheel to a trained step**, interpreter included",
    }.items():
        lines.append(f"| {title} | " + " | ".join(str(one[name]) for one in measured) + " |")
    sizes = light["bytes"]
    lines += [
        "",
        f"Without TensorFlow, `pip install kvtools` takes {sizes['all'] / 2**20:.0f} MiB of disk,"
        f" {sizes['kvtools'] / 2**20:.0f} MiB of them its own; `kvtools --help` answers within"
        f" {light['kvtools --help']:.2f} s. {os.cpu_count()} processors.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
