"""All benchmarks: builds what they need, runs them in turn, writes one table to benchmarks/results/.

``make bench`` runs it. Every ratio compares two things measured in the same run, interleaved; speeds alone depend on
the machine, which the result names.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def machine() -> dict[str, Any]:
    """What the figures were taken on."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "transparent_hugepages": huge.read_text().strip() if huge.exists() else "unknown",
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }


def table_engine(repetitions: int) -> dict[str, float]:
    """The C++ table against a bare gather; inserts; overhead."""
    build = ROOT / "build" / "bench"
    cmake = shutil.which("cmake", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}") or "cmake"
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DKVTABLE_PYTHON=OFF", "-DKVTABLE_BUILD_TESTS=ON"]
    subprocess.run([cmake, "-S", str(ROOT), "-B", str(build), *options], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(
        [cmake, "--build", str(build), "-j", "2", "--target", "table_benchmark"], check=True, stdout=subprocess.DEVNULL
    )
    binary = next(path for path in build.rglob("table_benchmark") if path.is_file() and os.access(path, os.X_OK))
    done = subprocess.run(
        [str(binary), "--threads", "2", "--repetitions", str(repetitions)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return dict(json.loads(done.stdout))


def lookup_op(rounds: int) -> list[dict[str, Any]]:
    """The TensorFlow op against tf.gather."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "lookup_op.py"), "--rounds", str(rounds)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def command_line(rounds: int) -> dict[str, float]:
    """Seconds of `kvtools --help` and of `kvtools inspect` on a checkpoint of half a gigabyte: medians."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.ckpt"
        script = f"""
import numpy as np, tensorflow as tf, tfplugin
v1 = tf.compat.v1
with tf.Graph().as_default(), v1.Session() as session:
    table = tf.get_kv_variable("emb", 64, partitioner=v1.fixed_size_partitioner(4))
    ids = v1.placeholder(tf.int64, [None])
    rows = tf.nn.embedding_lookup(table, ids)
    session.run(v1.global_variables_initializer())
    for start in range(0, 2_000_000, 1 << 18):
        session.run(rows.op, {{ids: np.arange(start, min(2_000_000, start + (1 << 18)))}})
    v1.train.Saver().save(session, {str(path)!r})
"""
        subprocess.run([sys.executable, "-c", script], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        command = str(Path(sys.executable).parent / "kvtools")
        out = {"checkpoint_mib": sum(file.stat().st_size for file in Path(folder).iterdir()) / 2**20}
        for name, arguments in (("help_seconds", ["--help"]), ("inspect_seconds", ["inspect", str(path)])):
            seconds = []
            for _ in range(rounds):
                start = time.perf_counter()
                subprocess.run([command, *arguments], check=True, stdout=subprocess.DEVNULL)
                seconds.append(time.perf_counter() - start)
            out[name] = statistics.median(seconds)
    return out


def versions() -> dict[str, str]:
    """Of what was measured."""
    from importlib.metadata import version

    return {name: version(name) for name in ("kvtools", "tensorflow", "numpy")}


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    on, engine = result["machine"], result["table_engine"]
    lines = [
        f"# {on['cpu']}, {on['cpus']} CPUs",
        "",
        f"{result['date']}; Linux {on['kernel']}, {on['memory_gib']} GiB, huge pages {on['transparent_hugepages']}; "
        + ", ".join(f"{name} {number}" for name, number in result["versions"].items())
        + f"; load average before the run {on['load_before']:.2f}.",
        "",
        "## TensorFlow lookup op against tf.gather on a dense variable",
        "",
        "2 M rows, uniformly random hits, million rows a second (median) and the median ratio within the run.",
        "",
        "| dim | batch | tf.gather | kv, inference | kv, training | inference / tf.gather | training / tf.gather |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["lookup_op"]:
        speed, ratio = row["rows_per_second"], row["ratio_to_tf_gather"]
        lines.append(
            f"| {row['dim']} | {row['batch']:,} | {speed['tf.gather'] / 1e6:.2f} | {speed['kv inference'] / 1e6:.2f} | "
            f"{speed['kv training'] / 1e6:.2f} | {ratio['kv inference']:.2f} | {ratio['kv training']:.2f} |"
        )
    lines += ["", "## Table engine (C++, 2 threads)", "", "| figure | value |", "|---|---|"]
    lines += [f"| {name.replace('_', ' ')} | {value:.4g} |" for name, value in engine.items()]
    lines += ["", "## Command line", "", "| figure | value |", "|---|---|"]
    lines += [f"| {name.replace('_', ' ')} | {value:.3g} |" for name, value in result["command_line"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="rounds of each comparison")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for the .md and .json")
    args = parser.parse_args()
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
    }
    for name, bench in (("table_engine", table_engine), ("lookup_op", lookup_op), ("command_line", command_line)):
        print(f"running {name} ...", file=sys.stderr, flush=True)
        result[name] = bench(args.rounds)
    args.output.mkdir(parents=True, exist_ok=True)
    on = result["machine"]
    stem = f"{on['cpu'].replace(' ', '-').lower()}-{on['cpus']}cpu"
    (args.output / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    page = markdown(result)
    (args.output / f"{stem}.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
