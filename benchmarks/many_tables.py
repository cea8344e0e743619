"""What each table and each part costs the offline tools, beside its rows: 24 rows a table, 100 tables and 1,000.

Part of ``make bench-tools``; ``python benchmarks/many_tables.py [COUNT...] [COMMAND]`` runs it alone, with other counts
or one command if asked.
Each command is a process of its own; its seconds are those that it computes (user and system), start-up and all, and
those that pass. Where a dialect makes a file of each column, most of both are the file system's: the folder is in
memory (`/dev/shm`) where there is one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

KVTOOLS = str(Path(sys.executable).parent / "kvtools")
COUNTS = (100, 1000)
ROWS = 24
DIM = 8
DIALECTS = {
    "arrow": "",
    "deeprec": "",
    "hdf5": ".h5",
    "hugectr": "",
    "huggingface": "",
    "npz": ".npz",
    "parquet": "",
    "safetensors": ".safetensors",
    "sok": "",
    "sok-legacy": "",
    "tfplugin": "",
    "tfplus": "",
    "tfra": "",
    "tfra_files": "",
    "torch": ".pt",
}
"""The dialects that are written to a disk, and how their outputs' names end."""

LIMIT = 3.0
"""Seconds that 1,000 tables, or a table of 1,000 parts, may take."""


def write_sources(folder: Path, counts: Sequence[int]) -> None:
    """Write what the commands read: `tables-<n>` with n tables, `parts-<n>` with one table of n parts."""
    import numpy as np

    import kvtools
    from kvtools.chain_increment import write_increment
    from kvtools.migrate import write_tables

    def table(name: str, rows: int, seed: int) -> Any:
        rng = np.random.default_rng(rows + seed)
        return kvtools.table_from_arrays(
            name, np.arange(rows), rng.normal(size=(rows, DIM)).astype(np.float32), freqs=np.ones(rows, np.uint32)
        )

    for count in counts:
        for seed, later in enumerate(("", "-later")):
            tables = [table(f"emb_{number}", ROWS, seed) for number in range(count)]
            write_tables(tables, folder / f"tables-{count}{later}", "tfplugin")
            write_tables([table("emb", ROWS * count, seed)], folder / f"parts-{count}{later}", "tfplugin", parts=count)
        for kind in ("tables", "parts"):
            prefix = folder / f"{kind}-{count}"
            write_increment(prefix, f"{prefix}-later", f"{prefix}-changes.delta")


def commands() -> dict[str, Callable[[str, str], list[str]]]:
    """The commands by what they are called in the result, each from a source and an output's name."""

    def migrate(dialect: str, suffix: str) -> Callable[[str, str], list[str]]:
        return lambda source, out: ["migrate", source, f"{out}{suffix}", "--to", dialect]

    made = {f"migrate to {dialect}": migrate(dialect, suffix) for dialect, suffix in DIALECTS.items()}
    return {
        "inspect": lambda source, out: ["inspect", source],
        "inspect --sample": lambda source, out: ["inspect", source, "--sample", "1"],
        "stats": lambda source, out: ["stats", source],
        "verify": lambda source, out: ["verify", source],
        "diff": lambda source, out: ["diff", source, f"{source}-later", "--exit-zero"],
        "diff --output delta": lambda source, out: ["diff", source, f"{source}-later", out, "--output", "delta"],
        "get": lambda source, out: ["get", source, "5", "17", "--json-lines"],
        "get --where": lambda source, out: ["get", source, "--where", "norm > 0", "--json-lines"],
        "scan": lambda source, out: ["scan", source, "--from", "0", "--to", "100", "--json-lines"],
        "top": lambda source, out: ["top", source, "--by", "norm", "-n", "3", "--json-lines"],
        "neighbours": lambda source, out: ["neighbours", source, "5", "-k", "3", "--json-lines"],
        "sql": lambda source, out: ["sql", source, "select count(*) from {table} where norm > 1"],
        "explore": lambda source, out: ["explore", source, "--output", f"{out}.html"],
        "repair": lambda source, out: ["repair", source, out],
        "report": lambda source, out: ["report", source, "--html", f"{out}.html"],
        "clip": lambda source, out: ["clip", source, out, "--max-abs", "0.5"],
        "cast": lambda source, out: ["cast", source, out, "--to-value-dtype", "float16"],
        "cast --dtype int8": lambda source, out: ["cast", source, out, "--dtype", "int8", "--to", "snapshot"],
        "reshard": lambda source, out: ["reshard", source, out, "--parts", "2"],
        "merge": lambda source, out: ["merge", source, source, out],
        "apply": lambda source, out: ["apply", source, f"{source}-changes.delta", out],
        "split --by mod:2": lambda source, out: ["split", source, out, "--by", "mod:2"],
        "split --by table": lambda source, out: ["split", source, out, "--by", "table"],
        "rename": lambda source, out: ["rename", source, out, "--add-prefix", "x/"],
        "clip --where": lambda source, out: ["clip", source, out, "--where", "norm > 1"],
        "export": lambda source, out: ["export", source, "--savedmodel", out],
        "export --snapshot": lambda source, out: ["export", source, "--snapshot", out],
        "advise": lambda source, out: ["advise", source, "--output", f"{out}.toml"],
        "completion tables": lambda source, out: ["completion", "tables", source],
        **made,
    }


def measure(
    say: Callable[[str], None], counts: Sequence[int] = COUNTS, only: str = ""
) -> dict[str, dict[str, dict[str, float]]]:
    """Run every command, or those of which `only` is a part, on every source; seconds computed and passed."""
    memory = Path("/dev/shm")
    where = memory if memory.is_dir() and os.access(memory, os.W_OK) else None
    result: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="kvtools-bench-", dir=where) as name:
        folder = Path(name)
        write_sources(folder, counts)
        for command, arguments in commands().items():
            if only not in command:
                continue
            for source in [f"{kind}-{count}" for kind in ("tables", "parts") for count in counts]:
                out = folder / "out"
                out.mkdir()
                result.setdefault(command, {})[source] = took = _timed(_words(arguments, source, "out/it"), folder)
                say(f"  {command}, {source}: {took['computed']:.2f} s computed, {took['passed']:.2f} s passed")
                shutil.rmtree(out)
    return result


def _words(arguments: Callable[[str, str], list[str]], source: str, out: str) -> list[str]:
    """Return a command line; in a query, `{table}` is a table of the source."""
    table = "emb" if source.startswith("parts") else "emb_1"
    return [word.replace("{table}", table) for word in arguments(source, out)]


def _timed(arguments: list[str], folder: Path) -> dict[str, float]:
    start = time.perf_counter()
    process = subprocess.Popen(
        [KVTOOLS, *arguments], cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    message = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"many_tables.py: kvtools {' '.join(arguments)}: exit {process.returncode}: {message[-500:]}")
    return {"computed": usage.ru_utime + usage.ru_stime, "passed": time.perf_counter() - start}


def markdown(result: dict[str, dict[str, dict[str, float]]]) -> str:
    """The result as a table of a page."""
    sources = list(next(iter(result.values())))
    heads = [f"{source.partition('-')[2]} {source.partition('-')[0]}" for source in sources]
    lines = [
        f"Tables of {ROWS} rows, and one table of as many parts: seconds computed / passed, of each process as a whole."
        f" Asked: at most {LIMIT:g} computed.",
        "",
        f"| command | {' | '.join(heads)} | reached |",
        f"|---|{'---|' * (len(heads) + 1)}",
    ]
    for command, by_source in result.items():
        cells = [f"{took['computed']:.2f} / {took['passed']:.2f}" for took in by_source.values()]
        reached = all(took["computed"] <= LIMIT for took in by_source.values())
        lines.append(f"| {command} | {' | '.join(cells)} | {'yes' if reached else '**no**'} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        asked = [int(word) for word in sys.argv[1:] if word.isdecimal()] or COUNTS
        named = " ".join(word for word in sys.argv[1:] if not word.isdecimal())
        print(markdown(measure(lambda text: print(text, file=sys.stderr, flush=True), asked, named)))
