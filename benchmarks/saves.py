"""Saving and restoring a table of gigabytes, beside `dd` of as many bytes; and training while a save goes on.

``make bench-saves`` runs it. The table has int64 keys, 32 float32 a row and Adam's two slots. Each part is a process of
its own:

    save      fills the table; saves it, and once more with a sync of the files; then trains alone, and trains while an
              asynchronous save goes on, in turns
    restore   with the files in the page cache, and without
    memory    takes as much memory as the table has, on huge pages, on all processors, and only clears it
    dd        writes as many zeros with ``oflag=direct``, with ``conv=fsync``, and into the page cache; reads the files,
              and once more with ``iflag=direct``

Peak memory is what a process has at most while it saves or restores, less what it has before (save) or after (restore):
what is taken beside the table. A step looks up ids drawn evenly, which is the hardest for a save that must keep rows as
they were: nearly each one that changes has not been written yet. And it looks up ids as they come, by a Zipf law
(`ids.py`).
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ids
from machine import file_name, machine

ROOT = Path(__file__).resolve().parent.parent
DIM = 32
BATCH = 8192
BATCHES = 256
FILL = 1 << 18
HUGE_PAGE = 2 << 20
MOST_MEBIBYTES = 256
LEAST_STEPS = 0.8


def _mebibytes(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise SystemExit(f"saves.py: /proc/self/status has no {field}")


class Beside:
    """How long a block takes, and what memory it takes at most beside what is there before or after."""

    def __enter__(self) -> Beside:
        self._before = _mebibytes("VmRSS:")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._cpu, self._start = sum(os.times()[:2]), time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        self.cpu_seconds = sum(os.times()[:2]) - self._cpu
        self.mebibytes = _mebibytes("VmHWM:") - max(self._before, _mebibytes("VmRSS:"))

    def figures(self) -> dict[str, float]:
        """By name."""
        return {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds, "mebibytes": self.mebibytes}


def _files(prefix: str) -> list[Path]:
    return sorted(Path(prefix).parent.glob(Path(prefix).name + ".*"))


def _sync(prefix: str) -> None:
    for path in _files(prefix):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _forget(prefix: str) -> None:
    """Out of the page cache."""
    _sync(prefix)
    for path in _files(prefix):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def save(prefix: str, rows: int, seconds: float, rounds: int) -> dict[str, Any]:
    """The process of saves."""
    import tensorflow as tf

    import tfplugin

    table = tf.get_kv_variable("t", DIM)
    optimizer = tfplugin.optimizers.Adam(0.01)
    dense = [tf.Variable(tf.random.normal([DIM, 64])), tf.Variable(tf.random.normal([64, 1]))]

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def fill(keys: Any) -> None:
        optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([tf.size(keys), DIM]), keys), table)])

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def step(keys: Any) -> None:
        with tf.GradientTape() as tape:
            hidden = tf.nn.relu(tf.nn.embedding_lookup(table, keys) @ dense[0])
            loss = tf.reduce_mean((hidden @ dense[1] - 1.0) ** 2)
        variables = [table, *dense]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    for first in range(0, rows, FILL):
        fill(tf.range(first, min(rows, first + FILL), dtype=tf.int64))
    batches = {how: [tf.constant(i) for i in ids.batches(how, rows, BATCH, BATCHES)] for how in ("zipf", "uniform")}
    for batch in batches["uniform"]:
        step(batch)

    def steps(batches: list[Any], goes_on: Callable[[], bool]) -> float:
        """How many a second."""
        count, start = 0, time.perf_counter()
        while goes_on():
            step(batches[count % len(batches)])
            count += 1
        return count / (time.perf_counter() - start)

    checkpoint = tf.train.Checkpoint(t=table, dense=dense, optimizer=optimizer)
    found: dict[str, Any] = {"table_bytes": int(table.memory().numpy()[1:].sum())}
    with Beside() as at_once:
        checkpoint.write(prefix)
    found["save"] = at_once.figures()
    found["bytes"] = sum(path.stat().st_size for path in _files(prefix))
    _sync(prefix)
    with Beside() as synced:
        checkpoint.write(prefix)
        _sync(prefix)
    found["save and sync"] = synced.figures()
    options = tf.train.CheckpointOptions(enable_async=True)
    found["beside"] = {}
    for name, some in batches.items():
        alone, beside, saves = [], [], []
        for _ in range(rounds):
            until = time.perf_counter() + seconds
            alone.append(steps(some, lambda until=until: time.perf_counter() < until))
            with Beside() as taken:
                checkpoint.write(prefix, options=options)
                begun = time.perf_counter()
                queue = checkpoint._async_checkpointer()._queue
                beside.append(steps(some, lambda queue=queue: queue.unfinished_tasks > 0))
                checkpoint.sync()
            saves.append({**taken.figures(), "write() seconds": begun - taken._start})
            _sync(prefix)
        ratio = statistics.median(there / here for here, there in zip(alone, beside, strict=True))
        found["beside"][name] = {"steps alone": alone, "steps beside": beside, "ratio": ratio, "saves": saves}
    return found


def restore(prefix: str, in_cache: bool) -> dict[str, Any]:
    """The process of a restore."""
    import tensorflow as tf

    import tfplugin

    table = tf.get_kv_variable("t", DIM)
    checkpoint = tf.train.Checkpoint(t=table)
    if in_cache:
        for path in _files(prefix):
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass
    else:
        _forget(prefix)
    with Beside() as read:
        checkpoint.restore(prefix).expect_partial()
    assert isinstance(table, tfplugin.KvVariable)
    return {"rows": int(table.size()), **read.figures()}


def touch(size: int) -> dict[str, Any]:
    """The process that takes memory: what the system wants for it, a restore has to pay as well."""
    threads = os.cpu_count() or 1
    each = size // threads // HUGE_PAGE * HUGE_PAGE
    clear = ctypes.CDLL(None).memset  # without the GIL
    clear.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    with Beside() as taken:
        kept = [mmap.mmap(-1, each, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(threads)]
        for memory in kept:
            memory.madvise(mmap.MADV_HUGEPAGE)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda memory: clear(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, each), kept))
    return taken.figures()


def dd(folder: Path, size: int, *flags: str, source: list[Path] | None = None) -> float:
    """Seconds that `dd` takes for as many bytes, or to read files."""
    commands = [["dd", f"if={path}", "of=/dev/null", "bs=16M", *flags] for path in source or []]
    out = folder / "zeros"
    if source is None:
        commands = [["dd", "if=/dev/zero", f"of={out}", "bs=16M", f"count={max(1, size >> 24)}", *flags]]
    start = time.perf_counter()
    for command in commands:
        subprocess.run(command, check=True, capture_output=True)
    took = time.perf_counter() - start
    out.unlink(missing_ok=True)
    os.sync()
    return took


def _child(*arguments: str) -> dict[str, Any]:
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"saves.py: {' '.join(arguments)}: exit {done.returncode}: {done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(rows: int, seconds: float, rounds: int, folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """All parts."""
    prefix = str(folder / "model.ckpt")
    found = _child(
        "--part", "save", "--prefix", prefix, "--rows", str(rows), "--seconds", str(seconds), "--rounds", str(rounds)
    )
    say(f"  saved: {found['save']}")
    found["restore from the disk"] = _child("--part", "restore-disk", "--prefix", prefix)
    found["restore from the cache"] = _child("--part", "restore-cache", "--prefix", prefix)
    found["memory alone"] = _child("--part", "memory", "--bytes", str(found["table_bytes"]))
    say(f"  restored: {found['restore from the disk']}")
    _forget(prefix)
    found["dd"] = {"read from the disk": dd(folder, found["bytes"], source=_files(prefix))}
    _forget(prefix)
    found["dd"]["read past the cache"] = dd(folder, found["bytes"], "iflag=direct", source=_files(prefix))
    for path in _files(prefix):
        path.unlink()
    os.sync()
    for name, flags in {"cache": [], "fsync": ["conv=fsync"], "direct": ["oflag=direct"]}.items():
        found["dd"][name] = dd(folder, found["bytes"], *flags)
    say(f"  dd: {found['dd']}")
    peaks = [
        found[part]["mebibytes"]
        for part in ("save", "save and sync", "restore from the disk", "restore from the cache")
    ]
    found["most mebibytes"] = max(
        peaks + [one["mebibytes"] for kind in found["beside"].values() for one in kind["saves"]]
    )
    return found


def markdown(result: dict[str, Any]) -> str:
    """The result as a page."""
    on, size, dds = result["machine"], result["bytes"], result["dd"]
    lines = [
        f"# Saving at scale: {on['cpu']}, {on['cpus']} CPUs",
        "",
        f"{result['date']}; Linux {on['kernel']}, {on['memory_gib']} GiB, Python {on['python']}; load average before"
        f" the run {on['load_before']:.2f}. {result['rows']:,} rows of dim {DIM} with Adam's slots:"
        f" {size / 1e9:.2f} GB on disk, {result['table_bytes'] / 1e9:.2f} GB in memory.",
        "",
        "| | seconds | GB/s | CPU seconds | memory beside the table, MiB | `dd` | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    beside = {
        "save": ("into the page cache", dds["cache"]),
        "save and sync": ("`conv=fsync`; `oflag=direct`", dds["fsync"]),
        "restore from the disk": ("read; `iflag=direct`", dds["read from the disk"]),
        "restore from the cache": ("", None),
    }
    for part, (name, seconds) in beside.items():
        one = result[part]
        more = {"save and sync": "direct", "restore from the disk": "read past the cache"}.get(part)
        also = f"; {dds[more]:.1f}" if more else ""
        lines.append(
            f"| {part} | {one['seconds']:.1f} | {size / 1e9 / one['seconds']:.2f} | {one['cpu_seconds']:.1f} |"
            f" {one['mebibytes']:.0f} | {name} | {'' if seconds is None else f'{seconds:.1f}'}{also} |"
        )
    one = result["memory alone"]
    lines.append(
        f"| as much memory as the table, and nothing else | {one['seconds']:.1f} | | {one['cpu_seconds']:.1f} | | | |"
    )
    most, told = result["most mebibytes"], []
    for name, kind in result["beside"].items():
        for one in kind["saves"]:
            lines.append(
                f"| asynchronous save, beside training ({name} ids) | {one['seconds']:.1f} |"
                f" {size / 1e9 / one['seconds']:.2f} | | {one['mebibytes']:.0f} | | |"
            )
        told.append(
            f"{name}: {statistics.median(kind['steps alone']):.1f} alone, {statistics.median(kind['steps beside']):.1f}"
            " while a save goes on"
        )
    lines += [
        "",
        f"Steps of {BATCH:,} ids a second, {'; '.join(told)}.",
        "",
        "| | | asked | reached |",
        "|---|---|---|---|",
        *(
            f"| steps beside an asynchronous save, of those alone, {name} ids | {kind['ratio']:.2f} | ≥ {LEAST_STEPS} |"
            f" {'yes' if kind['ratio'] >= LEAST_STEPS else '**no**'} |"
            for name, kind in result["beside"].items()
        ),
        f"| memory beside the table, MiB | {most:.0f} | ≤ {MOST_MEBIBYTES} |"
        f" {'yes' if most <= MOST_MEBIBYTES else '**no**'} |",
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000, help="of the table (default: 20 million, 8 GB)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of training alone, per round (default: 20)")
    parser.add_argument("--rounds", type=int, default=2, help="of training alone and beside a save (default: 2)")
    parser.add_argument(
        "--folder", type=Path, help="where to save, on the disk that is meant (default: a temporary one)"
    )
    parser.add_argument("--output", type=Path, help="folder for the .md and .json (default: benchmarks/results)")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--prefix", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part == "save":
        print(json.dumps(save(args.prefix, args.rows, args.seconds, args.rounds)))
        return
    if args.part == "memory":
        print(json.dumps(touch(args.bytes)))
        return
    if args.part:
        print(json.dumps(restore(args.prefix, args.part == "restore-cache")))
        return
    on = machine()
    with tempfile.TemporaryDirectory(prefix="kvtools-bench-", dir=args.folder) as folder:
        measured = measure(
            args.rows, args.seconds, args.rounds, Path(folder), lambda text: print(text, file=sys.stderr, flush=True)
        )
    result = {"date": datetime.date.today().isoformat(), "rows": args.rows, "machine": on, **measured}
    output = args.output or ROOT / "benchmarks" / "results"
    output.mkdir(parents=True, exist_ok=True)
    stem = file_name(on, "saves")
    (output / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    (output / f"{stem}.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
