"""Steps of a table that keeps a quarter of its rows in memory, beside one that has all of them there.

    python benchmarks/spill.py [ROWS [FOLDER]]

Two tables of dim 16 take turns in one process: a lookup and an update by Adam of BATCH ids that follow Zipf's law, in a
compiled function of TensorFlow. Rows that are not in memory are in a file in FOLDER (default: that of `tempfile`). The
system keeps what it likes of a file in memory that nobody else wants; so it is measured twice: as it comes ("cached"),
and with the pages of the file dropped before each step ("from_disk"): then each row that is read comes from the disk,
as on a machine that has no memory left. Also printed: how many pages of the disk a step reads, what the disk alone
takes for one, and what a save takes. Prints one JSON object.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import ids
import numpy as np
import tensorflow as tf
from adam_step import adam_step

import tfplugin

DIM, BATCH, TURNS, STEPS, WARM = 16, 65536, 9, 6, 128
ROW_BYTES = DIM * 4 * 3  # the value, and two slots of Adam
BESIDE_ROW = 20  # bytes of memory for each row that is in it
ASKED = 0.5
C_LIBRARY = ctypes.CDLL(None, use_errno=True)
MADV_DONTNEED = 4


def trained(name: str, rows: int, **told: object) -> tuple[tfplugin.KvVariable, Callable[[tf.Tensor], None]]:
    """A table with rows, and one step of its training on ids."""
    table = tfplugin.get_kv_variable(name, DIM, initializer=0.01, **told)
    step = adam_step(table)
    # In another order than that of their ids' frequencies.
    order = np.random.default_rng(5).permutation(rows)
    for begin in range(0, rows, BATCH):
        step(tf.constant(order[begin : begin + BATCH]))
    return table, step


def spill_files(folder: str) -> list[int]:
    """The files without a name that this process has open there."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # that of the folder
            continue
        if target.startswith(folder) and target.endswith("(deleted)"):
            found.append(int(entry.name))
    return found


def dropped(files: list[int], folder: str) -> None:
    """Takes the files out of the system's memory: it keeps pages that are mapped, so those are let go first."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if folder in line:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if C_LIBRARY.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), MADV_DONTNEED) != 0:
                raise OSError(ctypes.get_errno(), "madvise")
    for file in files:
        os.fdatasync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def read_seconds(file: int, file_bytes: int, reads: int) -> float:
    """What the disk takes for as many rows at random places, all asked for at once."""
    places = np.random.default_rng(2).integers(0, file_bytes - ROW_BYTES, reads)
    begin = time.perf_counter()
    for place in places:
        os.posix_fadvise(file, int(place), ROW_BYTES, os.POSIX_FADV_WILLNEED)
    for place in places:
        os.pread(file, ROW_BYTES, int(place))
    return time.perf_counter() - begin


def read_bytes() -> int:
    """What the process has read from disks."""
    said = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(said["read_bytes"])


def resident_bytes() -> int:
    """Memory of the process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(rows: int, folder: str) -> None:
    """Measures and prints."""
    max_memory = rows // 4 * (ROW_BYTES + BESIDE_ROW)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        before = resident_bytes()
        tables = {"spilled": trained("spilled", rows, max_memory=max_memory, spill=own)}
        resident = resident_bytes() - before
        files = spill_files(own)
        tables["memory"] = trained("memory", rows)
        result: dict[str, object] = {"rows": rows, "dim": DIM, "batch": BATCH, "max_memory": max_memory}
        # Each once: of batches that come again all rows would be in memory by then.
        batches = iter([tf.constant(b) for b in ids.batches("zipf", rows, BATCH, WARM + 2 * TURNS * STEPS)])
        for batch in itertools.islice(batches, WARM):  # what is hot comes into memory
            for _, step in tables.values():
                step(batch)
        table = tables["spilled"][0]
        for how in ("cached", "from_disk"):
            ratios, seconds = [], {name: [] for name in tables}
            read = -read_bytes()
            for turn in range(TURNS):
                took = {}
                own_batches = list(itertools.islice(batches, STEPS))
                for name in sorted(tables, reverse=bool(turn % 2)):
                    _, step = tables[name]
                    took[name] = 0.0
                    for batch in own_batches:
                        if how == "from_disk":
                            dropped(files, own)
                        begin = time.perf_counter()
                        step(batch)
                        took[name] += (time.perf_counter() - begin) / STEPS
                    seconds[name].append(took[name])
                ratios.append(took["memory"] / took["spilled"])
            result[how] = {
                "step_ms": {name: round(1e3 * statistics.median(times), 2) for name, times in seconds.items()},
                "speed_of_memory": round(statistics.median(ratios), 3),
                "asked": ASKED,
                "pages_read_per_step": (read + read_bytes()) // os.sysconf("SC_PAGE_SIZE") // (TURNS * STEPS),
            }
        use = table.memory().numpy()
        dropped(files, own)
        result |= {
            "spilled_rows": int(use[5]),
            "file_mib": round(int(use[6]) / 2**20, 1),
            "resident_mib": round(resident / 2**20, 1),
            "row_mib_in_memory": round(int(use[1] + use[4]) / 2**20, 1),
            "disk_us_per_page": round(1e6 * read_seconds(files[0], int(use[6]), 4000) / 4000, 2),
        }
        for name, (variable, _) in tables.items():
            begin = time.perf_counter()
            tf.train.Checkpoint(table=variable).write(f"{own}/saved-{name}")
            result[f"save_{name}_s"] = round(time.perf_counter() - begin, 2)
        print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 2_000_000,
        sys.argv[2] if len(sys.argv) > 2 else tempfile.gettempdir(),
    )
