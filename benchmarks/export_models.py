"""Exported models: what they take, how fast they answer, what they have learnt; and how fast `kvtools export` is.

``make bench-export`` runs it. Every export is loaded in a process of its own with stock TensorFlow, and its answers are
compared before its time counts; processes take turns, a fraction of a second each. benchmarks/exporting/ has the parts:

models     two click models, trained here: a graph of TensorFlow 1 with Ftrl and GroupAdam, and a DeepFM of Keras 3;
           each as it was trained, with tfplugin, and exported whole, clipped and with smaller rows
indexes    one table of 10^5, 10^6 and 10^7 rows: the indexes beside our own operation and a dense `tf.gather`
speed      `kvtools export` of 10 M x 32 beside `cat` of the same bytes, and of 1,000 tables
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from command_line import KVTOOLS
from exporting import page
from exporting.side import Model, SideError, bytes_of, in_turns, sides, told_by
from machine import file_name, machine
from tools import Run, clear, timed
from work.ctr import auc, write_log

ROOT = Path(__file__).resolve().parent.parent
LOG_BATCH = 4096
HELD_OUT = 15  # batches of the log
TABLES, TABLE_ROWS, TABLE_DIM = 1_000, 24, 8
TRAINED = "trained, tfplugin"
DENSE, OURS, XLA = "dense tf.gather", "our operation", "perfect, XLA"


@dataclass(frozen=True)
class Variant:
    """A way to export a model: what it is called, and the options of `kvtools export`.

    Attributes:
        same: whether its answers are those of the trained model, to the bit.
    """

    name: str
    options: tuple[str, ...]
    same: bool = False


#: kind -> title, and the norm below which the clipped export leaves rows out
CLICK_MODELS = {
    "tf1": ("TensorFlow 1, wide and deep, Ftrl and GroupAdam", "0.05"),
    "keras": ("Keras 3, DeepFM, Adam", "0.08"),
}


def variants(clip: str, chosen: Sequence[str] = ("",)) -> tuple[Variant, ...]:
    """The exports of a click model: those whose names begin with one of `chosen`."""
    every = (
        Variant("plain, all rows", ("--keep-zeros",), same=True),
        Variant("rows of zeros left out", (), same=True),
        Variant("perfect index", ("--index", "perfect"), same=True),
        Variant(f"clipped, l2 < {clip}", ("--clip-l2", clip)),
        Variant("float16", ("--dtype", "float16")),
        Variant("int8", ("--dtype", "int8")),
        Variant("int4", ("--dtype", "int4")),
        Variant("clipped, int8", ("--clip-l2", clip, "--dtype", "int8")),
    )
    return tuple(one for one in every if one.name.startswith(tuple(chosen)))


def say(text: str) -> None:
    """Progress, to stderr."""
    print(text, file=sys.stderr, flush=True)


def export(source: Path, output: Path, *options: str) -> dict[str, Any]:
    """Run `kvtools export`; returns what it says, and its seconds. Raises SystemExit if it fails."""
    command = [KVTOOLS, "export", str(source), "--savedmodel", str(output), *options, "--json"]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"export_models.py: {' '.join(command)}: {done.stderr.strip()[-500:]}")
    told: dict[str, Any] = json.loads(done.stdout)
    return told | {"seconds": time.perf_counter() - start}


def click_model(kind: str, log: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Train a model, export it in each way, and ask all of them the same."""
    title, clip = CLICK_MODELS[kind]
    learnt = told_by("exporting.train_models", kind, log, folder)
    say(f"{title}: {learnt['rows']:,} rows, trained in {learnt['seconds']:.0f} s, AUC {learnt['auc']:.4f}")
    held_out = folder / "held_out.npz"
    with np.load(held_out) as arrays:
        clicks, in_training = arrays["clicks"], arrays["probability"]
    models = {TRAINED: Model(folder / "trained", tfplugin=True)}
    found: dict[str, dict[str, Any]] = {TRAINED: {"rows": learnt["rows"], "bytes": bytes_of(folder / "trained")}}
    same = {TRAINED}
    expected = in_training
    for number, variant in enumerate(variants(clip, options.exports)):
        output = folder / f"export-{number}"
        told = export(folder / "trained", output, *variant.options)
        rows = sum(table["rows"] for table in told["tables"])
        found[variant.name] = {"rows": rows, "bytes": bytes_of(output), "export_seconds": told["seconds"]}
        models[variant.name] = Model(output)
        same |= {variant.name} if variant.same else set()
    with sides(models) as asked:
        for name, side in asked.items():
            found[name] |= {f"load_{what}": value for what, value in side.load(held_out).items()}
            answers = folder / "answers.npy"
            side.ask(do="answer", requests=str(held_out), batch=1_000, output=str(answers))
            got = np.load(answers)
            if name == TRAINED:
                # A session may fuse operations otherwise than the process that trained.
                learnt["difference"], expected = float(np.abs(got - in_training).max()), got
            found[name] |= {"auc": auc(clicks, got), "difference": float(np.abs(got - expected).max())}
            found[name]["same"] = bool(got.tobytes() == expected.tobytes())
            if name in same and not found[name]["same"]:
                raise SystemExit(
                    f"export_models.py: {title}: '{name}' answers otherwise than the trained model, by up to"
                    f" {found[name]['difference']:.3g}"
                )
            say(f"  {name}: {page.size(found[name]['bytes'])}, AUC {found[name]['auc']:.4f}")
        for batch in options.batches:
            rates = in_turns(asked, dict.fromkeys(asked, held_out), batch, options.rounds, options.seconds)
            for name, rate in rates.items():
                found[name][f"requests {batch}"] = rate
    return {"kind": kind, "title": title, "trained": learnt, "exports": found}


def measure_models(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The click models, on one log."""
    log = folder / "log"
    log.mkdir()
    write_log(log, LOG_BATCH, options.steps, HELD_OUT)
    result = []
    for kind in options.models:
        result.append(click_model(kind, log, folder / kind, options))
        shutil.rmtree(folder / kind)
    return result


def measure_indexes(rows: int, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One table: seconds to load, memory, and rows a second of each index."""
    sizes = options.ids
    told_by("exporting.table_models", "one", rows, options.dim, folder, "--requests", *sizes)
    models = {
        OURS: Model(folder / "ours", tfplugin=True, how="function"),
        DENSE: Model(folder / "dense", how="function"),
    }
    seconds = {}
    for index in ("hash", "perfect"):
        told = export(folder / "ours", folder / index, "--index", index)
        seconds[index] = told["seconds"]
        models[index] = Model(folder / index, how="function")
    models[XLA] = Model(folder / "perfect", how="xla")
    found: dict[str, dict[str, Any]] = {}

    def requests(name: str, size: int) -> Path:
        return folder / f"{'rows' if name == DENSE else 'keys'}-{size}.npz"

    with sides(models) as asked:
        checks = set()
        for name, side in asked.items():
            found[name] = {"bytes": bytes_of(models[name].folder), "export_seconds": seconds.get(name)}
            found[name] |= {f"load_{what}": value for what, value in side.load(requests(name, sizes[0])).items()}
            answers = folder / "answers.npy"
            side.ask(do="answer", requests=str(requests(name, sizes[0])), batch=sizes[0], output=str(answers))
            checks.add(zlib.crc32(np.load(answers).tobytes()))
            if len(checks) > 1:
                raise SystemExit(f"export_models.py: {rows:,} rows: '{name}' gives others than '{OURS}'")
        for size in sizes:
            files = {name: requests(name, size) for name in asked}
            rates = in_turns(asked, files, size, options.rounds, options.seconds)
            for name, rate in rates.items():
                found[name][f"rows {size}"] = rate * size
    for name, one in found.items():
        say(f"  {rows:,} rows, {name}: " + ", ".join(f"{one[f'rows {size}'] / 1e6:.2f} M rows/s" for size in sizes))
    return {"rows": rows, "dim": options.dim, "sides": found}


def speed_sides(source: Path, work: Path) -> dict[str, list[str]]:
    """The commands that are timed, by what they are called in the result."""
    variables, out = source / "variables", work / "out"
    exported = [KVTOOLS, "export", str(source), "--savedmodel", str(out)]
    return {
        "cat": ["sh", "-c", f"cat {variables}/* > {out}"],
        "cat and sync": ["sh", "-c", f"cat {variables}/* > {out} && sync {out}"],
        "export, hash": [*exported, "--index", "hash"],
        "export, perfect": [*exported, "--index", "perfect"],
        "export of the table alone, hash": [*exported, "--table", "emb", "--index", "hash"],
        "export, hash, int8": [*exported, "--index", "hash", "--dtype", "int8"],
    }


def measure_speed(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """`kvtools export` of a large table beside `cat` of its bytes, and of many tables."""
    large, work = folder / "large", folder / "work"
    told_by("exporting.table_models", "one", options.export_rows, options.export_dim, large)
    source = large / "ours"
    size = bytes_of(source)
    runs: dict[str, list[Run]] = {}
    for number in range(options.export_rounds):
        for name, command in speed_sides(source, work).items():
            clear(work)
            runs.setdefault(name, []).append(run := timed(command))
            say(f"  round {number + 1}: {name}: {run.seconds:.2f} s, peak {run.peak_mebibytes:.0f} MiB")
    shutil.rmtree(large)
    found: dict[str, Any] = {"rows": options.export_rows, "dim": options.export_dim, "bytes": size, "sides": {}}
    for name, done in runs.items():
        beside = {
            to: statistics.median(other.seconds / run.seconds for other, run in zip(runs[to], done, strict=True))
            for to in ("cat", "cat and sync")
        }
        found["sides"][name] = {
            "seconds": statistics.median(run.seconds for run in done),
            "peak_mebibytes": max(run.peak_mebibytes for run in done),
            "beside": beside,
        }
    many = folder / "many"
    told_by("exporting.table_models", "many", options.tables, TABLE_ROWS, TABLE_DIM, many)
    found["tables"] = {"count": options.tables, "sides": {}}
    for index in ("hash", "perfect"):
        clear(work)
        command = [KVTOOLS, "export", str(many / "ours"), "--savedmodel", str(work / "out"), "--index", index]
        found["tables"]["sides"][index] = timed(command).seconds
        say(f"  {options.tables:,} tables, {index}: {found['tables']['sides'][index]:.2f} s")
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--steps", type=int, default=500, help=f"of {LOG_BATCH} examples to train (default: 500)")
    parser.add_argument("--models", nargs="+", choices=CLICK_MODELS, default=list(CLICK_MODELS))
    parser.add_argument("--exports", nargs="+", default=[""], help="of these: names, or how they begin (default: all)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 100, 1_000], help="examples a request")
    parser.add_argument("--index-rows", type=int, nargs="+", default=[10**5, 10**6, 10**7], help="of the tables")
    parser.add_argument("--dim", type=int, default=16, help="of these (default: 16)")
    parser.add_argument("--ids", type=int, nargs="+", default=[65_536, 1_000], help="ids a call")
    parser.add_argument("--export-rows", type=int, default=10**7, help="of what is exported beside cat")
    parser.add_argument("--export-dim", type=int, default=32, help="of that (default: 32)")
    parser.add_argument("--export-rounds", type=int, default=2, help="how often every command runs (default: 2)")
    parser.add_argument("--tables", type=int, default=TABLES, help=f"of a model of many (default: {TABLES})")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every process (default: 3)")
    parser.add_argument("--seconds", type=float, default=0.3, help="of a turn (default: 0.3)")
    parser.add_argument("--folder", type=Path, help="where the files go, a disk (default: the system's temporary one)")
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for the .md and .json (default: build/benchmarks; of a whole run benchmarks/results)",
    )
    options = parser.parse_args()
    on = machine()
    began = time.monotonic()
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": on,
        "versions": page.versions(),
        "rounds": options.rounds,
        "seconds": options.seconds,
        "steps": options.steps,
    }
    with tempfile.TemporaryDirectory(prefix="kvtools-bench-", dir=options.folder) as name:
        for part, run in PARTS.items():
            if part not in options.parts:
                continue
            start, folder = time.monotonic(), Path(name) / part
            folder.mkdir()
            result[part] = run(folder, options)
            shutil.rmtree(folder)
            result.setdefault("took", {})[part] = time.monotonic() - start
            say(f"{part}: {result['took'][part]:.0f} s")
    result["took"]["all"] = time.monotonic() - began
    given = {"output", "folder"}
    whole = all(value == parser.get_default(name) for name, value in vars(options).items() if name not in given)
    output = options.output or ROOT / ("benchmarks/results" if whole else "build/benchmarks")
    output.mkdir(parents=True, exist_ok=True)
    stem = file_name(on, "export")
    (output / f"{stem}.json").write_text(json.dumps(result, indent=1) + "\n")
    text = page.markdown(result)
    (output / f"{stem}.md").write_text(text)
    print(text)


def _all_indexes(folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    result = []
    for rows in options.index_rows:
        result.append(measure_indexes(rows, folder / str(rows), options))
        shutil.rmtree(folder / str(rows))
    return result


PARTS: dict[str, Callable[[Path, argparse.Namespace], Any]] = {
    "models": measure_models,
    "indexes": _all_indexes,
    "speed": measure_speed,
}


if __name__ == "__main__":
    try:
        main()
    except SideError as problem:
        sys.exit(f"export_models.py: {problem}")
