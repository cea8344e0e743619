"""Rows that are asked for: `get` of 500,000 keys to CSV, and `top` and `neighbours` beside NumPy on arrays in memory.

Part of ``make bench-tools``; ``python benchmarks/asked_rows.py`` runs it alone. The tables are TensorFlow bundles in
the page cache, four parts, of two sizes. `top` and `neighbours` are functions of one process, which read the table each
time, with its checksums; NumPy has the same rows in arrays, and checks nothing. `get` is the command, from its start to
its end; its rate is of the time beyond that of a `get` of one row from a small table: start, imports and end.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.array_table import ArrayTable
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.interface import TableReader
from kvtools.migrate import write_tables
from kvtools.neighbours import nearest
from kvtools.top import top_rows

KVTOOLS = str(Path(sys.executable).parent / "kvtools")
ROWS = (200_000, 2_000_000)
DIM = 64
CSV_DIM = 16
CSV_ROWS = 500_000
CSV_TABLES = (500_000, 4_000_000)
CSV_ASKED = 2_000_000
"""Rows a second that `get` is to write."""
FIRST = 100
VECTORS = (1, 64)
K = 10
ROUNDS = 5


def measure(
    say: Callable[[str], None], rows: tuple[int, ...] = ROWS, tables: tuple[int, ...] = CSV_TABLES
) -> dict[str, Any]:
    """Run all of it; seconds, medians of the rounds."""
    with tempfile.TemporaryDirectory(prefix="kvtools-bench-") as name:
        beside = {f"{count:,} rows": _beside_numpy(Path(name) / f"of-{count}", count, say) for count in rows}
        csv = {f"{count:,} rows": _csv(Path(name) / f"csv-{count}", count, say) for count in tables}
    return {"dim": DIM, "beside_numpy": beside, "csv_dim": CSV_DIM, "csv_rows": CSV_ROWS, "csv": csv}


def _table(path: Path, rows: int, dim: int) -> tuple[TableReader, np.ndarray, np.ndarray, np.ndarray]:
    """Write a table; return it opened, and its keys, values and frequencies in memory."""
    rng = np.random.default_rng(rows)
    keys = rng.permutation(rows).astype(np.int64) * 7 - rows
    values = rng.normal(0, 0.1, (rows, dim)).astype(np.float32)
    freqs = rng.zipf(1.5, rows).clip(1, 2**31).astype(np.uint32)
    parts = [rows // 4, rows // 4, rows // 4, rows - 3 * (rows // 4)]
    write_tables([ArrayTable("emb", keys, values, freqs=freqs, part_rows=parts)], path, "tfplugin")
    return open_checkpoint(path).table("emb"), keys, values, freqs


def _beside_numpy(path: Path, rows: int, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    table, keys, values, freqs = _table(path, rows, DIM)
    vectors = {count: values[:count].copy() for count in VECTORS}

    def first(numbers: np.ndarray) -> np.ndarray:
        found = np.argpartition(numbers, rows - FIRST)[rows - FIRST :]
        return keys[found[np.argsort(-numbers[found].astype(np.float64), kind="stable")]]

    def near(count: int) -> np.ndarray:
        of = vectors[count]
        lengths = np.sqrt(np.einsum("ij,ij->i", values, values))
        cosines = (of @ values.T) / lengths / np.sqrt(np.einsum("ij,ij->i", of, of))[:, None]
        found = np.argpartition(cosines, rows - K, axis=1)[:, rows - K :]
        order = np.argsort(-np.take_along_axis(cosines, found, 1), axis=1)
        return keys[np.take_along_axis(found, order, 1)]

    sides: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
        f"top {FIRST} by freq": (lambda: top_rows(table, "freq", FIRST), lambda: first(freqs)),
        f"top {FIRST} by norm": (lambda: top_rows(table, "norm", FIRST), lambda: first(np.linalg.norm(values, axis=1))),
    }
    for count in VECTORS:
        label = f"{K} neighbours of {count} vector{'s' if count > 1 else ''}, cosine"
        sides[label] = (lambda count=count: nearest(table, vectors[count], K), lambda count=count: near(count))  # type: ignore[misc]
    result = {}
    for name, (ours, numpy) in sides.items():
        took = {"kvtools": _median(ours), "numpy": _median(numpy)}
        result[name] = took
        say(f"  {name}, {rows:,} rows: {took['kvtools']:.3f} s, NumPy {took['numpy']:.3f} s")
    return result


def _median(work: Callable[[], Any]) -> float:
    work()
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _csv(path: Path, rows: int, say: Callable[[str], None]) -> dict[str, float]:
    _, keys, _, _ = _table(path, rows, CSV_DIM)
    _, small_keys, _, _ = _table(path.parent / f"{path.name}-small", 100, CSV_DIM)
    np.save(path.parent / "keys.npy", np.random.default_rng(0).choice(keys, CSV_ROWS, replace=False))
    np.save(path.parent / "one.npy", small_keys[:1])

    def command(of: Path, name: str) -> None:
        with (path.parent / "rows.csv").open("wb") as out:
            arguments = [KVTOOLS, "get", str(of), "--keys-file", str(path.parent / name), "--csv"]
            subprocess.run(arguments, stdout=out, check=True)

    whole, start = (
        _median(lambda: command(path, "keys.npy")),
        _median(lambda: command(path.parent / f"{path.name}-small", "one.npy")),
    )
    rate = CSV_ROWS / max(whole - start, 1e-9)
    took = f"{whole:.2f} s, start {start:.2f} s, {rate / 1e6:.2f} M rows/s"
    say(f"  get of {CSV_ROWS:,} from {rows:,} rows to CSV: {took}")
    return {"seconds": whole, "start": start, "rows_per_second": rate}


def markdown(result: dict[str, Any]) -> str:
    """The result as a part of the page of the tools."""
    lines = [
        "## Rows that are asked for",
        "",
        f"float32 rows of {result['dim']}; NumPy has the rows in arrays in memory, kvtools reads the table from the"
        " page cache and checks it against its checksums.",
        "",
        "| | rows | kvtools, s | NumPy, s | ratio |",
        "|---|---|---|---|---|",
    ]
    for rows, sides in result["beside_numpy"].items():
        for name, took in sides.items():
            ratio = took["kvtools"] / took["numpy"]
            lines.append(f"| {name} | {rows} | {took['kvtools']:.3f} | {took['numpy']:.3f} | {ratio:.2f} |")
    lines += [
        "",
        f"`kvtools get` of {result['csv_rows']:,} keys to CSV, rows of {result['csv_dim']}; asked: {CSV_ASKED / 1e6:g}"
        " M rows/s beyond the start.",
        "",
        "| table | seconds | of these start | M rows/s | reached |",
        "|---|---|---|---|---|",
    ]
    for rows, took in result["csv"].items():
        rate = took["rows_per_second"]
        reached = "yes" if rate >= CSV_ASKED else "**no**"
        lines.append(f"| {rows} | {took['seconds']:.2f} | {took['start']:.2f} | {rate / 1e6:.2f} | {reached} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(measure(lambda text: print(text, file=sys.stderr, flush=True))))
