"""`kvtools sql` on a checkpoint, beside DuckDB on the same rows in a Parquet file, at two sizes.

Part of ``make bench-tools``; ``python benchmarks/queries.py [GIGABYTES...]`` runs it alone. Each side is a process of
its own, start-up and all, that prints what the query counts: the same on both. The Parquet file has row groups of
122,880 rows and pyarrow's usual compression, as DuckDB likes them. Files are in the page cache; a round lets each side
run once.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

KVTOOLS = str(Path(sys.executable).parent / "kvtools")
AT_MOST = 1.5
"""How many times DuckDB's time a query may take."""

QUERIES = {
    "rows of a filter": "select count(*) as n, sum(value[1]) as x from emb where freq >= 50",
    "vectors of a filter": "select count(*) as n, max(len(value)) as x from (select value from emb where freq < 3)",
    "every vector": "select count(*) as n, sum(value[2]) as x from emb where value[1] > 2.5",
    "counters": "select max(key) as n, sum(freq) as x from emb where freq > 3",
}
ON_PARQUET = """
import sys, duckdb
print(duckdb.sql(sys.argv[2].replace(" emb", f" '{sys.argv[1]}'")).fetchall())
"""


def write_parquet(prefix: Path, target: Path) -> None:
    """Write the table of a checkpoint as Parquet."""
    import pyarrow
    from pyarrow import parquet

    import kvtools

    reader = pyarrow.RecordBatchReader.from_stream(kvtools.open(prefix)["emb"])
    with parquet.ParquetWriter(target, reader.schema) as writer:
        held: list[Any] = []
        for batch in reader:
            held.append(batch)
            if sum(map(len, held)) >= 122_880:
                writer.write_table(pyarrow.Table.from_batches(held), row_group_size=122_880)
                held = []
        if held:
            writer.write_table(pyarrow.Table.from_batches(held), row_group_size=122_880)


def measure(sizes: Sequence[float], rounds: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run every query on both sides, at each size in gigabytes."""
    from tools import timed

    found = []
    for gigabytes in sizes:
        with tempfile.TemporaryDirectory(prefix="kvtools-bench-") as folder:
            prefix, target = Path(folder) / "model.ckpt", Path(folder) / "emb.parquet"
            write = [sys.executable, str(Path(__file__).with_name("tools.py")), "--gigabytes", str(gigabytes)]
            rows = int(
                subprocess.run([*write, "--write", str(prefix)], check=True, capture_output=True, text=True).stdout
            )
            subprocess.run([sys.executable, __file__, "--parquet", str(prefix), str(target)], check=True)
            for name, query in QUERIES.items():
                runs: dict[str, list[Any]] = {"kvtools": [], "duckdb": []}
                for _ in range(rounds):
                    runs["kvtools"].append(timed([KVTOOLS, "sql", str(prefix), query]))
                    runs["duckdb"].append(timed([sys.executable, "-c", ON_PARQUET, str(target), query]))
                pairs = zip(runs["kvtools"], runs["duckdb"], strict=True)
                entry = {
                    "query": name,
                    "rows": rows,
                    "gigabytes": gigabytes,
                    "ratio": statistics.median(mine.seconds / other.seconds for mine, other in pairs),
                    **{side: statistics.median(run.seconds for run in done) for side, done in runs.items()},
                    **{f"{side}_mebibytes": max(run.peak_mebibytes for run in done) for side, done in runs.items()},
                }
                found.append(entry)
                say(f"  {gigabytes:g} GB, {name}: {entry['kvtools']:.2f} s, DuckDB on Parquet {entry['duckdb']:.2f} s")
    return found


def markdown(entries: Sequence[dict[str, Any]]) -> str:
    """The result as a section of a page."""
    lines = [
        "## Queries",
        "",
        "`kvtools sql` on the checkpoint beside DuckDB on the same rows in Parquet, processes with start-up; peak"
        " memory in MiB, files' pages that are mapped included.",
        "",
        f"| query | GB | kvtools sql, s | DuckDB, s | times its time (≤ {AT_MOST:g} asked) | MiB | DuckDB's |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        ratio = f"{entry['ratio']:.2f}" if entry["ratio"] <= AT_MOST else f"**{entry['ratio']:.2f}**"
        lines.append(
            f"| {entry['query']} | {entry['gigabytes']:g} | {entry['kvtools']:.2f} | {entry['duckdb']:.2f} | {ratio} |"
            f" {entry['kvtools_mebibytes']:.0f} | {entry['duckdb_mebibytes']:.0f} |"
        )
    lines += ["", *(f"- {name}: `{query}`" for name, query in QUERIES.items())]
    return "\n".join([*lines, ""])


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gigabytes", nargs="*", type=float, help="sizes of the table (default: 0.4 4)")
    parser.add_argument("--rounds", type=int, default=3, help="how often every side runs (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--parquet", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.parquet:
        write_parquet(*args.parquet)
        return
    found = measure(args.gigabytes or (0.4, 4), args.rounds, lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps(found, indent=1) if args.json else markdown(found))


if __name__ == "__main__":
    main()
