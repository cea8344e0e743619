"""What is measured, as data: which work, on which libraries, and what the ratios should be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Side:
    """One competitor of a case: a library, and what it does differently from the case's parameters."""

    library: str  # kv, de, dense or tfra; or, on Horovod ranks, ranks
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Comparison:
    """Two sides of a case, and what is asked of their ratio. `at_most` makes it a ratio of times, else of speeds."""

    of: str
    to: str
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Case:
    """One row of the result."""

    group: str
    title: str
    work: str  # a module of benchmarks/work
    parameters: dict[str, Any]
    sides: dict[str, Side]
    items: int  # done by one call
    comparisons: tuple[Comparison, ...] = ()
    floor: float | None = None  # share of the memory floor asked of the side "kv"; 0: reported, None: not counted
    threads: int = 2
    calls: int | None = None  # in a turn; None: as many as fill it


@dataclass(frozen=True)
class Size:
    """How much is done of everything."""

    name: str
    rounds: int
    turn_seconds: float
    copy_mebibytes: int  # copied to find the memory's bandwidth
    batch: int
    batches: int
    lookup_rows: int
    train_rows: int
    lookup_dims: tuple[int, ...]
    train_dims: tuple[int, ...]
    optimizers: tuple[str, ...]
    small_batch: int
    ways: tuple[str, ...]  # of calling a small batch
    pooled: dict[str, int]  # features, examples, rows
    scaling_threads: tuple[int, ...]
    scaling_rows: tuple[int, ...]
    scaling_dims: tuple[int, ...]
    scaling_table: int  # rows of the tables whose dim or threads vary
    ctr: dict[str, int]  # batch, steps of a turn, held_out (batches), buckets (of the dense table)
    exchange: dict[str, int]  # tables, samples (of each rank), rows (of each table)
    exchange_dims: tuple[int, ...]
    exchange_hotness: tuple[int, ...]


FULL = Size(
    name="full",
    rounds=9,
    turn_seconds=0.25,
    copy_mebibytes=256,
    batch=65_536,
    batches=16,
    lookup_rows=2_000_000,
    train_rows=1_000_000,
    lookup_dims=(16, 64, 128),
    train_dims=(16, 64),
    optimizers=("SGD", "Adagrad", "Adam"),
    small_batch=1024,
    ways=("session", "function", "eager"),
    pooled={"features": 26, "examples": 4096, "rows": 100_000},
    scaling_threads=(1, 2),
    scaling_rows=(100_000, 300_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000),
    scaling_dims=(4, 8, 16, 32, 64, 128, 256),
    scaling_table=1_000_000,
    ctr={"batch": 4096, "steps": 30, "held_out": 20, "buckets": 1 << 20},
    exchange={"tables": 26, "samples": 4096, "rows": 100_000},
    exchange_dims=(16, 64),
    exchange_hotness=(1, 10),
)

QUICK = Size(
    name="quick",
    rounds=3,
    turn_seconds=0.1,
    copy_mebibytes=256,
    batch=65_536,
    batches=4,
    lookup_rows=1_000_000,
    train_rows=300_000,
    lookup_dims=(16,),
    train_dims=(16,),
    optimizers=("SGD", "Adam"),
    small_batch=1024,
    ways=("session", "function"),
    pooled={"features": 26, "examples": 1024, "rows": 20_000},
    scaling_threads=(1, 2),
    scaling_rows=(100_000, 1_000_000),
    scaling_dims=(8, 64),
    scaling_table=300_000,
    ctr={"batch": 4096, "steps": 5, "held_out": 5, "buckets": 1 << 18},
    exchange={"tables": 26, "samples": 4096, "rows": 100_000},
    exchange_dims=(16,),
    exchange_hotness=(1, 10),
)

# For the test of the harness: nothing here says how fast anything is.
TINY = Size(
    name="tiny",
    rounds=2,
    turn_seconds=0.001,
    copy_mebibytes=2,
    batch=256,
    batches=2,
    lookup_rows=1000,
    train_rows=1000,
    lookup_dims=(4,),
    train_dims=(4,),
    optimizers=("Adam",),
    small_batch=16,
    ways=("session", "eager"),
    pooled={"features": 2, "examples": 16, "rows": 100},
    scaling_threads=(2,),
    scaling_rows=(500, 1000),
    scaling_dims=(2, 4),
    scaling_table=1000,
    ctr={"batch": 64, "steps": 2, "held_out": 2, "buckets": 1 << 10},
    exchange={"tables": 3, "samples": 16, "rows": 100},
    exchange_dims=(4,),
    exchange_hotness=(2,),
)

SIZES = {size.name: size for size in (FULL, QUICK, TINY)}
