"""Where the time of an operation on a GPU goes, kernel by kernel, by PyTorch's profiler.

    python benchmarks/gpu/kernels.py [--dims 8,64] [--rows 48000000] [--batch 1048576]

Needs kvtools with its module for tables on a GPU (benchmarks/gpu/run.sh builds it) and PyTorch. Prints one JSON object:
per dim and operation, microseconds of a call and the wait for it (the best), of all its kernels (the mean), and of
each, with how often it is launched. Names are those of the bodies in kernels/cuda; `sort` is CUB's. Where something is
missing, the object has `unavailable` with the reason, and no results.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable
from typing import Any

WARM_UPS, TIMED = 2, 4
TABLES, STEP_DIM, STEP_ROWS, STEP_BATCH = 26, 32, 1_000_000, 65_536
ADAM = {"learning_rate": 0.001, "beta_1_power": 0.5, "beta_2_power": 0.6}


def name_of(kernel: str) -> str | None:
    """Of a kernel of the tables; None of others.

    >>> name_of("void kvtable::RunBody<kvtable::GatherBody>(kvtable::GatherBody, unsigned long)")
    'GatherBody'
    >>> name_of("void at::native::vectorized_elementwise_kernel<2>()")
    """
    body = re.search(r"RunBody<kvtable::(\w+)", kernel)
    if body:
        return body[1]
    return "sort" if re.match(r"void cub::\w+::detail::radix_sort", kernel) else None


class Profiler:
    """Runs operations under PyTorch's profiler."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.results: list[dict[str, Any]] = []

    def ids(self, law: str, n: int, rows: int) -> Any:
        """Ids (n) below `rows`: each as likely, or after Zipf's law with exponent 1.05, mixed."""
        if law == "uniform":
            return self.torch.randint(0, rows, (n,), device="cuda")
        most = rows**-0.05
        u = self.torch.rand(n, device="cuda", dtype=self.torch.float64)
        rank = (1 - u * (1 - most)) ** (1 / -0.05)
        return (rank.long() * 0x9E3779B1 + 12345) % rows

    def measure(self, dim: int, operation: str, call: Callable[[], None], prepare: Callable[[int], None]) -> None:
        """Of `call`, before each of which prepare(run) makes its batch."""
        torch, walls = self.torch, []
        for run in range(WARM_UPS):
            prepare(run)
            call()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for run in range(TIMED):
                prepare(WARM_UPS + run)
                torch.cuda.synchronize()
                begin = time.perf_counter()
                call()
                torch.cuda.synchronize()
                walls.append(time.perf_counter() - begin)
        sums: dict[str, list[float]] = {}
        for event in profile.events():
            if (name := name_of(event.name)) is not None:
                of_kernel = sums.setdefault(name, [0, 0.0])
                of_kernel[0] += 1 / TIMED
                of_kernel[1] += event.device_time / TIMED
        kernels = [{"name": name, "launches": n, "us": round(us, 1)} for name, (n, us) in sums.items()]
        kernels.sort(key=lambda kernel: -kernel["us"])
        device = round(sum(kernel["us"] for kernel in kernels), 1)
        self.results.append(
            {"dim": dim, "operation": operation, "call_us": round(min(walls) * 1e6, 1), "device_us": device}
            | {"kernels": kernels}
        )


def fill(torch: Any, table: Any, rows: int, values: Any) -> None:
    """Inserts keys 0 to `rows` - 1, as many at a time as there are values."""
    for begin in range(0, rows, len(values)):
        n = min(len(values), rows - begin)
        table.upsert(torch.arange(begin, begin + n, device="cuda"), values[:n], 1, 1, distinct=True)


def profile_table(profiler: Profiler, table_class: Any, dim: int, rows: int, batch: int) -> None:
    """Lookups and writes, of a table with room for a third more rows. `all new` has the removal of the batch before."""
    torch = profiler.torch
    table = table_class("int64", "float32", dim)
    table.reserve(rows + rows // 3, 2 * batch)
    values = torch.rand(batch, dim, device="cuda")
    keys, found = (
        torch.empty(batch, dtype=torch.int64, device="cuda"),
        torch.empty(batch, dtype=torch.bool, device="cuda"),
    )
    pointers, out = torch.empty(batch, dtype=torch.uint64, device="cuda"), torch.empty_like(values)
    fill(torch, table, rows, values)

    def mixed(run: int) -> None:
        each = torch.arange(batch, device="cuda")
        each = torch.where(each < batch * 6 // 10, rows - batch + each, (1 << 40) + run * batch + each)
        keys.copy_(each[torch.randperm(batch, device="cuda")])

    def new(run: int) -> None:
        table.remove(keys)
        keys.copy_((1 << 41) + run * batch + torch.randperm(batch, device="cuda"))

    def drawn(law: str) -> Callable[[int], None]:
        return lambda run: keys.copy_(profiler.ids(law, batch, rows))

    def last(run: int) -> None:
        keys.copy_(rows - batch + torch.randperm(batch, device="cuda"))

    for operation, call, prepare in (
        ("gather, 60% there", lambda: table.gather(keys, out, found=found), mixed),
        ("gather, uniform", lambda: table.gather(keys, out, found=found), drawn("uniform")),
        ("pointers, 60% there", lambda: table.pointers(keys, pointers), mixed),
        ("upsert, all there", lambda: table.upsert(keys, values, 1, 1, distinct=True), last),
        ("upsert, Zipf", lambda: table.upsert(keys, values, 1, 1), drawn("zipf")),
        ("accumulate, Zipf", lambda: table.accumulate(keys, values, True, 1, 1), drawn("zipf")),
        ("gather_or_insert, Zipf", lambda: table.gather_or_insert(keys, out, 1, 1), drawn("zipf")),
        ("upsert, all new", lambda: table.upsert(keys, values, 1, 1, distinct=True), new),
    ):
        profiler.measure(dim, operation, call, prepare)

    def export() -> None:
        exporter = table.export()
        while exporter.next(keys, {"value": out}) > 0:
            pass

    profiler.measure(dim, "export", export, lambda run: None)


def profile_eviction(profiler: Profiler, table_class: Any, dim: int, rows: int, batch: int) -> None:
    """Batches of new keys into full tables, which hand out what goes."""
    torch = profiler.torch
    values = torch.rand(batch, dim, device="cuda")
    gone = {
        "evicted_keys": torch.empty(batch, dtype=torch.int64, device="cuda"),
        "evicted_values": torch.empty_like(values),
    }
    for eviction in ("lru", "lfu"):
        table = table_class("int64", "float32", dim, max_capacity=rows, eviction=eviction)
        table.reserve(rows, 2 * batch)
        keys = torch.empty(batch, dtype=torch.int64, device="cuda")
        fill(torch, table, rows, values)
        profiler.measure(
            dim,
            f"insert_and_evict, {eviction}, all new",
            lambda table=table, keys=keys: table.insert_and_evict(keys, values, None, 1, 1, distinct=True, **gone),
            lambda run, keys=keys: keys.copy_((1 << 41) + run * batch + torch.randperm(batch, device="cuda")),
        )


def profile_step(profiler: Profiler, table_class: Any) -> None:
    """The step of training_step_benchmark.cc: kernels are those of all tables."""
    torch, tables = profiler.torch, []
    rows = torch.rand(TABLES, STEP_BATCH, STEP_DIM, device="cuda")
    for t in range(TABLES):
        slots = [(name, STEP_DIM, "constant", 0.0) for name in ("m", "v")]
        tables.append(table_class("int64", "float32", STEP_DIM, slots=slots))
        tables[t].reserve(STEP_ROWS + STEP_BATCH, STEP_BATCH)
        fill(torch, tables[t], STEP_ROWS, rows[t])
    rows.uniform_(-0.5, 0.5)
    ids = torch.empty(TABLES, STEP_BATCH, dtype=torch.int64, device="cuda")

    def look_up() -> None:
        for t, table in enumerate(tables):
            table.gather_or_insert(ids[t], rows[t], 1, 1)

    def apply() -> None:
        for t, table in enumerate(tables):
            table.apply("adam", ids[t], rows[t], ADAM, slots=["m", "v"])

    for law in ("uniform", "zipf"):

        def prepare(run: int, law: str = law) -> None:
            ids.copy_(profiler.ids(law, TABLES * STEP_BATCH, STEP_ROWS).view(TABLES, STEP_BATCH))

        profiler.measure(STEP_DIM, f"step, lookup, {law}", look_up, prepare)
        profiler.measure(STEP_DIM, f"step, adam, {law}", apply, prepare)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dims", default="8,64")
    for name, fallback in (("rows", 48_000_000), ("batch", 1 << 20)):
        parser.add_argument(f"--{name}", type=int, default=fallback)
    options = parser.parse_args()
    result: dict[str, Any] = {"rows": options.rows, "batch": options.batch}
    try:
        import torch

        from kvtools._device_table import DeviceTable
    except ImportError as error:
        print(json.dumps(result | {"unavailable": f"kernels are told apart by PyTorch's profiler: {error}"}))
        return
    if not torch.cuda.is_available():
        print(json.dumps(result | {"unavailable": "PyTorch sees no GPU"}))
        return
    profiler = Profiler(torch)
    for dim in map(int, options.dims.split(",")):
        profile_table(profiler, DeviceTable, dim, options.rows, options.batch)
        torch.cuda.empty_cache()
        profile_eviction(profiler, DeviceTable, dim, options.rows, options.batch)
    profile_step(profiler, DeviceTable)
    print(json.dumps(result | {"device": torch.cuda.get_device_name(), "results": profiler.results}))


if __name__ == "__main__":
    main()
