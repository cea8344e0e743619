"""What an increment every second costs training: steps a second with a chain being written, and without, in turns.

``python benchmarks/chain_increments.py [--rows 2000000] [--changed 50000] [--turns 6]``. A table of `--rows` rows of
dim 32 with Adam's slots is trained beside two dense layers. The ids of each second come from a window of `--changed`
keys, which are so many changed rows a second. One full is written before the turns, none in them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import tensorflow as tf
from trained_table import BATCH, TrainedTable

import tfplugin
from kvtools.chain import members, record_of

DIM = 32
SECONDS = 8.0


class Training(TrainedTable):
    """A trained table, and whose turn it is."""

    def __init__(self, rows: int, changed: int) -> None:
        super().__init__(rows, DIM)
        self.changed = changed

    def run(self, seconds: float, manager: Any) -> dict[str, float]:
        """Trains so long, and tells steps a second and the longest step."""
        end = time.perf_counter() + seconds
        steps, longest, window_ends, window = 0, 0.0, 0.0, None
        begun = time.perf_counter()
        while (now := time.perf_counter()) < end:
            if window is None or now >= window_ends:
                window = self.random.integers(0, self.rows, self.changed)
                window_ends = now + 1.0
            self.step(tf.constant(window[self.random.integers(0, self.changed, BATCH)]))
            if manager is not None:
                manager.save_if_due()
            longest = max(longest, time.perf_counter() - now)
            steps += 1
        if manager is not None:
            manager.sync()
        return {"steps_per_second": steps / (time.perf_counter() - begun), "longest_ms": longest * 1e3}


def measure(rows: int, changed: int, turns: int) -> dict[str, Any]:
    """Takes turns with and without increments."""
    training = Training(rows, changed)
    training.run(3.0, None)
    plain = [training.run(SECONDS, None)]
    with tempfile.TemporaryDirectory() as folder:
        manager = tfplugin.CheckpointManager(training.checkpoint, folder, full_every=1e6, delta_every=1.0)
        begun = time.perf_counter()
        manager.save()
        full = time.perf_counter() - begun
        saved, quiet = [], []
        for _ in range(turns):
            saved.append(training.run(SECONDS, manager))
            quiet.append(training.run(SECONDS, None))
            manager.save()  # what the turn without increments changed belongs to none of them
        records = [record_of(member) for member in members(folder) if member.kind == "delta"]
        changed_rows = statistics.median(sum(t.rows for t in r.tables.values()) for r in records if r is not None)
        size = statistics.median(
            sum(path.stat().st_size for path in Path(folder).glob(f"{member.prefix.name}.*"))
            for member in members(folder)
            if member.kind == "delta"
        )

    def median(turns: list[dict[str, float]], name: str) -> float:
        return statistics.median(turn[name] for turn in turns)

    ratio = median(saved, "steps_per_second") / median(quiet, "steps_per_second")
    return {
        "rows": rows,
        "full_seconds": round(full, 2),
        "changed_rows_an_increment": changed_rows,
        "bytes_an_increment": size,
        "steps_per_second_before_any_manager": round(median(plain, "steps_per_second"), 1),
        "steps_per_second_tracked": round(median(quiet, "steps_per_second"), 1),
        "steps_per_second_with_increments": round(median(saved, "steps_per_second"), 1),
        "longest_step_ms_tracked": round(median(quiet, "longest_ms"), 1),
        "longest_step_ms_with_increments": round(median(saved, "longest_ms"), 1),
        "price_percent": round(100 * (1 - ratio), 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--changed", type=int, default=50_000)
    parser.add_argument("--turns", type=int, default=6)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.rows, arguments.changed, arguments.turns), indent=1))
