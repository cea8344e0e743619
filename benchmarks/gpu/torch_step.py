"""The step of training_step_benchmark.cc with what PyTorch has: dense embeddings with sparse gradients, and SparseAdam.

    python benchmarks/gpu/torch_step.py [--tables 26] [--dim 32] [--rows 1000000] [--batch 65536] [--device cuda]

Prints one JSON object, of the same shape: per law of ids and stage, seconds (medians, by CUDA events) and bytes a
second beside those of a copy. The ids are the same, number for number. A stage more: `backward` makes the sparse
gradients, which a table does not need. Where PyTorch or a GPU is missing, the object has `unavailable` with the reason,
and no results. `--device cpu` shows that the script works, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

WARM_UPS = 3
TIMED = 15
BATCHES = 4  # that take turns


def mix64(x: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64, as kernels/src/base/hash.h has it."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform_ids(n: int, rows: int, seed: int) -> np.ndarray:
    """As benchmark_ids.h makes them: (n) of uint64 below `rows`."""
    return mix64(np.uint64(seed << 40) | np.arange(n, dtype=np.uint64)) % np.uint64(rows)


def zipf_ids(n: int, rows: int, seed: int) -> np.ndarray:
    """As benchmark_ids.h makes them: (n) of uint64 below `rows`."""
    exponent = 1.05
    most = float(rows) ** (1 - exponent)
    u = (mix64(np.uint64(seed << 40) | np.arange(n, dtype=np.uint64)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    rank = (1 - u * (1 - most)) ** (1 / (1 - exponent))
    return mix64(rank.astype(np.uint64)) % np.uint64(rows)


LAWS: dict[str, Callable[[int, int, int], np.ndarray]] = {"uniform": uniform_ids, "zipf": zipf_ids}


def seconds_of(torch: Any, device: str, queue: Callable[[], None]) -> float:
    if device == "cpu":
        begin = time.perf_counter()
        queue()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    queue()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def copy_bandwidth(torch: Any, device: str) -> float:
    """Bytes read and written per second."""
    size = 1 << 31 if device == "cuda" else 1 << 24
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / min(seconds_of(torch, device, lambda: target.copy_(source)) for _ in range(10))


class TorchStep:
    """The tables, their optimizer, and the stages of a step."""

    def __init__(self, torch: Any, sizes: argparse.Namespace) -> None:
        self.torch, self.sizes = torch, sizes
        self.tables = [
            torch.nn.Embedding(sizes.rows, sizes.dim, sparse=True, device=sizes.device) for _ in range(sizes.tables)
        ]
        with torch.no_grad():
            for table in self.tables:
                table.weight.uniform_(-0.05, 0.05)
        self.optimizer = torch.optim.SparseAdam([table.weight for table in self.tables], lr=0.001)
        self.rows: list[Any] = []

    def lookup(self, ids: Any) -> None:
        self.rows = [table(each) for table, each in zip(self.tables, ids, strict=True)]

    def backward(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.torch.autograd.backward(self.rows, [row.detach() for row in self.rows])

    def apply(self) -> None:
        self.optimizer.step()

    def step(self, ids: Any) -> None:
        self.lookup(ids)
        self.backward()
        self.apply()

    def run(self, law: str, bandwidth: float) -> list[dict[str, Any]]:
        sizes, stages = self.sizes, {}
        batches, distinct, checksum = [], 0.0, 0
        for batch in range(BATCHES):
            ids = [LAWS[law](sizes.batch, sizes.rows, table * BATCHES + batch) for table in range(sizes.tables)]
            distinct += sum(len(np.unique(each)) for each in ids) / BATCHES
            checksum += sum(int(each.sum()) for each in ids)
            batches.append(self.torch.from_numpy(np.stack(ids).astype(np.int64)).to(sizes.device))
        for run in range(WARM_UPS + TIMED):
            ids = batches[run % BATCHES]
            for stage, queue in (
                ("lookup", lambda ids=ids: self.lookup(ids)),
                ("backward", self.backward),
                ("apply", self.apply),
                ("step", lambda ids=ids: self.step(ids)),
            ):
                seconds = seconds_of(self.torch, sizes.device, queue)
                if run >= WARM_UPS:
                    stages.setdefault(stage, []).append(seconds)
        n, row = sizes.tables * sizes.batch, sizes.dim * 4
        # The least that must move, as in training_step_benchmark.cc: without buckets and stamps, which there are none.
        bytes_of = {
            "lookup": n * (8 + row) + distinct * row,
            "backward": 0,
            "apply": n * (8 + row) + distinct * 2 * 3 * row,
        }
        bytes_of["step"] = bytes_of["lookup"] + bytes_of["apply"]
        return [
            {
                "ids": law,
                "stage": stage,
                "seconds": (median := statistics.median(seconds)),
                "bytes": bytes_of[stage],
                "roofline": bytes_of[stage] / median / bandwidth,
                "distinct": distinct,
                "checksum": str(checksum % 2**64),
            }
            for stage, seconds in stages.items()
        ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, fallback in (("tables", 26), ("dim", 32), ("rows", 1_000_000), ("batch", 65_536)):
        parser.add_argument(f"--{name}", type=int, default=fallback)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    sizes = parser.parse_args()
    result: dict[str, Any] = {**vars(sizes), "optimizer": "SparseAdam"}
    try:
        import torch
    except ImportError as error:
        print(json.dumps(result | {"unavailable": f"PyTorch cannot be imported: {error}"}))
        return
    result["torch"] = torch.__version__
    if sizes.device == "cuda" and not torch.cuda.is_available():
        print(json.dumps(result | {"unavailable": "PyTorch sees no GPU"}))
        return
    bandwidth = copy_bandwidth(torch, sizes.device)
    result["device"] = torch.cuda.get_device_name() if sizes.device == "cuda" else "CPU"
    result["copy_bytes_per_second"] = bandwidth
    step = TorchStep(torch, sizes)
    result["results"] = [row for law in LAWS for row in step.run(law, bandwidth)]
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
