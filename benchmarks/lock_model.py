"""A discrete model of a table's locks: threads that look up and train, on more processors than this machine has.

It starts from what ``lock_benchmark`` measures on this machine: what a key costs a lookup and each stage of a step, and
what it costs to fetch a cache line from another processor. It plays the locks event by event: blocks of a lookup that
take the shards they touch, writers that wait for those who read, cache lines that one processor at a time can write,
processors that threads share by turns. It knows nothing of memory bandwidth: where the memory is the limit, it is too
hopeful. It is put beside what was measured of one thread, of as many as this machine has processors, and of more; what
it says of machines of 4 to 64 processors is a model's word.

    python benchmarks/lock_model.py
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from engine import lock_benchmark

MOST_SHARDS = 64


@dataclass(frozen=True)
class Costs:
    """What this machine was measured to need, in nanoseconds; the engine's constants; the system's."""

    read: float  # a key of a lookup
    write: float  # a key of a step, under its shard's lock
    group: float  # a key of a step, before: sorted by shard, made distinct
    line: float = 75.0  # to fetch a line that another processor has written
    abreast: int = 8  # lines that a processor fetches at once, where it needs several
    own_line: float = 6.0  # to write a line that is here
    block: int = 512  # keys of a lookup under one set of locks
    turn: int = 256  # keys that a writer writes before it looks whether lookups wait
    spin: float = 100_000.0  # who waits for longer than this sleeps
    nap: float = 110_000.0  # for as long as this, once and again
    slice: float = 3_000_000.0  # of a processor, where there are more threads


@dataclass(frozen=True)
class Load:
    """Threads that look up and threads that train, each a batch after the other, on one table."""

    processors: int
    readers: int
    writers: int
    shards: int
    batch: int = 65_536  # of a step
    read_batch: int = 65_536
    shares: tuple[float, ...] = ()  # of a step's keys that each shard has; none: all alike


@dataclass(frozen=True)
class Outcome:
    """Millions of keys a second of all lookups and of all steps, and how often a second somebody waited."""

    reads: float
    writes: float
    waits: float


def default_shards(processors: int) -> int:
    """As ``DefaultShards`` in sharded_table.cc.

    >>> [default_shards(cpus) for cpus in (1, 2, 4, 16, 64)]
    [8, 8, 16, 64, 64]
    """
    shards = 8
    while shards < 4 * processors and shards < MOST_SHARDS:
        shards *= 2
    return shards


def zipf_shares(shards: int, exponent: float, batch: int, rows: int = 1_000_000, seed: int = 0) -> tuple[float, ...]:
    """How the distinct ids of a batch, drawn by Zipf's law, fall on the shards: a hash spreads them like balls in bins.

    >>> shares = zipf_shares(8, 1.05, 65_536)
    >>> len(shares), round(sum(shares), 6), max(shares) < 0.15
    (8, 1.0, True)
    """
    rng = np.random.default_rng(seed)
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    ids = np.unique(np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(batch)))
    counts = np.bincount(rng.integers(0, shards, rows)[ids.clip(max=rows - 1)], minlength=shards)
    return tuple(map(float, counts / counts.sum()))


@dataclass
class Line:
    """A cache line: one processor writes it at a time, and who does not have it fetches it."""

    free_at: float = 0.0
    owner: int = -1


@dataclass
class Lock:
    """A readers-writer lock that prefers writers."""

    line: Line = field(default_factory=Line)
    readers: int = 0
    writer: bool = False
    writers_waiting: deque[Thread] = field(default_factory=deque)
    readers_waiting: deque[Thread] = field(default_factory=deque)


@dataclass
class Thread:
    """One that works through a script of what takes time."""

    number: int
    script: Script
    slice_end: float = 0.0
    waits_since: float = -1.0
    done: float = 0.0  # keys


#: A script yields nanoseconds to work, or None to wait until it is woken.
Script = Generator[float | None, None, None]


class Machine:
    """Threads on processors: a processor runs one, for a slice where others want it, too."""

    def __init__(self, processors: int, costs: Costs) -> None:
        self.costs = costs
        self.now = 0.0
        self.waits = 0
        self._idle = processors
        self._ready: deque[tuple[Thread, float]] = deque()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0

    def at(self, when: float, what: Callable[[], None]) -> None:
        """Have something happen."""
        self._number += 1
        heapq.heappush(self._events, (when, self._number, what))

    def start(self, thread: Thread, work: float = 0.0) -> None:
        """Let a thread go on, as soon as there is a processor: with what is left of its work first."""
        self._ready.append((thread, work))
        self._dispatch()

    def wake(self, thread: Thread) -> None:
        """A thread finds that what it waited for is there: at once, or when it wakes from a nap."""
        waited = self.now - thread.waits_since
        asleep = max(0.0, waited - self.costs.spin)
        left = 0.0 if asleep == 0.0 else self.costs.nap - asleep % self.costs.nap
        self.at(self.now + left, lambda: self.start(thread))

    def run(self, until: float) -> None:
        """Let time pass."""
        while self._events and self._events[0][0] <= until:
            self.now, _, what = heapq.heappop(self._events)
            what()
        self.now = until

    def _dispatch(self) -> None:
        while self._idle > 0 and self._ready:
            self._idle -= 1
            thread, work = self._ready.popleft()
            thread.slice_end = self.now + self.costs.slice
            self._work(thread, work)

    def _work(self, thread: Thread, work: float) -> None:
        if self.now >= thread.slice_end:
            if self._ready:
                self._idle += 1
                self.start(thread, work)
                return
            thread.slice_end = self.now + self.costs.slice
        if work <= 0.0:
            more = next(thread.script)
            if more is None:
                thread.waits_since = self.now
                self.waits += 1
                self._idle += 1
                self._dispatch()
                return
            work = more
        piece = min(work, thread.slice_end - self.now)
        self.at(self.now + piece, lambda: self._work(thread, work - piece))


class Table:
    """What both ways of locking have in common: lookups in blocks, steps by shard."""

    def __init__(self, machine: Machine, load: Load) -> None:
        self.machine = machine
        self.load = load
        self.costs = machine.costs
        self.locks = [Lock() for _ in range(load.shards)]
        shares = np.asarray(load.shares or [1.0 / load.shards] * load.shards)
        self.group_sizes = [round(share * load.batch) for share in shares]

    def touch(self, line: Line, thread: Thread, abreast: int = 1) -> float:
        """Write a line, one of several abreast: how long until it is written. Nobody else has it that long."""
        if line.owner == thread.number and line.free_at <= self.machine.now:
            return self.costs.own_line
        waits = max(0.0, line.free_at - self.machine.now)
        line.owner, line.free_at = thread.number, self.machine.now + waits + self.costs.line
        return max(self.costs.own_line, waits + self.costs.line / abreast)

    def reader(self, thread: Thread) -> Script:
        """Lookups, one after the other."""
        raise NotImplementedError

    def write_group(self, thread: Thread, shard: int) -> Script:
        """A step's keys of one shard."""
        raise NotImplementedError

    def order(self, thread: Thread) -> Iterator[int]:
        """In which order a step visits the shards."""
        raise NotImplementedError

    def writer(self, thread: Thread) -> Script:
        """Steps, one after the other."""
        while True:
            yield self.costs.group * self.load.batch
            for shard in self.order(thread):
                yield from self.write_group(thread, shard)
                thread.done += self.group_sizes[shard]

    def _unlock_shared(self, lock: Lock) -> None:
        lock.readers -= 1
        if lock.readers == 0:
            self._next_writer(lock)

    def _next_writer(self, lock: Lock) -> None:
        if lock.writers_waiting and not lock.writer:
            lock.writer = True
            self.machine.wake(lock.writers_waiting.popleft())

    def _lock(self, thread: Thread, lock: Lock) -> Script:
        yield self.touch(lock.line, thread)
        if lock.writer or lock.readers or lock.writers_waiting:
            lock.writers_waiting.append(thread)
            yield None
        else:
            lock.writer = True


class CountedLocks(Table):
    """What the engine had before: a block of 2,048 keys counts itself in the lock of each shard, in ascending order,
    and waits there with those that it has; a step begins with the first shard, and keeps each for all of its keys.
    """

    block = 2048

    def reader(self, thread: Thread) -> Script:
        """A block after the other."""
        costs = self.costs
        while True:
            for lock in self.locks:
                yield self.touch(lock.line, thread, costs.abreast)
                if lock.writer or lock.writers_waiting:
                    lock.readers_waiting.append(thread)
                    yield None  # whoever wakes it has counted it
                else:
                    lock.readers += 1
            keys = min(self.block, self.load.read_batch)
            yield costs.read * keys
            for lock in self.locks:
                yield self.touch(lock.line, thread, costs.abreast)
                self._unlock_shared(lock)
            thread.done += keys

    def write_group(self, thread: Thread, shard: int) -> Script:
        """All keys of the shard under its lock."""
        lock = self.locks[shard]
        yield from self._lock(thread, lock)
        yield self.costs.write * self.group_sizes[shard]
        yield self.touch(lock.line, thread)
        lock.writer = False
        if lock.writers_waiting:
            self._next_writer(lock)
        while lock.readers_waiting and not lock.writer:
            lock.readers += 1
            self.machine.wake(lock.readers_waiting.popleft())

    def order(self, thread: Thread) -> Iterator[int]:
        """The first shard first."""
        return iter(range(self.load.shards))


class Seats(Table):
    """As it is: a block takes a seat, a line of its own, and puts off the keys of shards that writers have; a step
    begins with a shard that nobody writes, and lets lookups in that wait.
    """

    def __init__(self, machine: Machine, load: Load) -> None:
        super().__init__(machine, load)
        self.kept_line = Line()
        self.kept = [False] * load.shards
        self.reading = [0] * load.shards  # blocks
        self.keeper: list[Thread | None] = [None] * load.shards  # waits for them

    def _look(self, thread: Thread) -> float:
        """Read the word in which writers keep shards: fetched, if one has written it since."""
        return self.costs.own_line if self.kept_line.owner == thread.number else self.costs.line

    def _read(self, thread: Thread, shards: list[int], keys: float) -> Script:
        for shard in shards:
            self.reading[shard] += 1
        yield self.costs.read * keys
        thread.done += keys
        for shard in shards:
            self.reading[shard] -= 1
            keeper = self.keeper[shard]
            if keeper is None:
                continue
            thread.slice_end = self.machine.now  # leaves the processor to others, if there are any
            if self.reading[shard] == 0:
                self.keeper[shard] = None
                self.machine.wake(keeper)

    def reader(self, thread: Thread) -> Script:
        """Ranges as a batch on one thread has them; what was put off comes last."""
        costs, load = self.costs, self.load
        while True:
            put_off = [0.0] * load.shards
            for begin in range(0, load.read_batch, costs.block):
                keys = min(costs.block, load.read_batch - begin)
                yield costs.own_line + self._look(thread)
                free = [shard for shard in range(load.shards) if not self.kept[shard]]
                for shard in range(load.shards):
                    if self.kept[shard]:
                        put_off[shard] += keys / load.shards
                yield from self._read(thread, free, keys * len(free) / load.shards)
                if sum(put_off) > costs.block:
                    yield from self._read_put_off(thread, put_off)
            yield from self._read_put_off(thread, put_off)

    def _read_put_off(self, thread: Thread, put_off: list[float]) -> Script:
        while any(put_off):
            yield self.costs.own_line + self._look(thread)
            left = [shard for shard, keys in enumerate(put_off) if keys]
            free = [shard for shard in left if not self.kept[shard]]
            if free:
                yield from self._read(thread, free, sum(put_off[shard] for shard in free))
                for shard in free:
                    put_off[shard] = 0.0
                continue
            lock = self.locks[left[0]]
            yield self.touch(lock.line, thread)
            if lock.writer or lock.writers_waiting:
                lock.readers_waiting.append(thread)
                yield None
            else:
                lock.readers += 1
            yield self.costs.read * put_off[left[0]]
            thread.done += put_off[left[0]]
            put_off[left[0]] = 0.0
            yield self.touch(lock.line, thread)
            self._unlock_shared(lock)

    def write_group(self, thread: Thread, shard: int) -> Script:
        """Some keys of the shard under its lock, and on, while no lookup waits."""
        costs, lock, left = self.costs, self.locks[shard], self.group_sizes[shard]
        while left > 0:
            yield from self._lock(thread, lock)
            yield self.touch(self.kept_line, thread)
            self.kept[shard] = True
            yield costs.line * min(self.load.readers, self.load.processors) / costs.abreast  # looks at the seats
            if self.reading[shard]:
                self.keeper[shard] = thread
                yield None
            while left > 0:
                keys = min(costs.turn, left)
                yield costs.write * keys
                left -= keys
                if lock.readers_waiting:
                    break
            yield self.touch(self.kept_line, thread)
            self.kept[shard] = False
            lock.writer = False
            while lock.readers_waiting:
                lock.readers += 1
                self.machine.wake(lock.readers_waiting.popleft())
            if lock.readers == 0:
                self._next_writer(lock)

    def order(self, thread: Thread) -> Iterator[int]:
        """What nobody writes, beginning at the thread's own place."""
        left = [(thread.number + i) % self.load.shards for i in range(self.load.shards)]
        while left:
            free = next((s for s in left if not self.locks[s].writer and not self.locks[s].writers_waiting), left[0])
            left.remove(free)
            yield free


def simulate(load: Load, costs: Costs, kind: type[Table], milliseconds: float = 30.0) -> Outcome:
    """Play a load for some time, from a random beginning of each thread."""
    machine = Machine(load.processors, costs)
    table = kind(machine, load)
    rng = np.random.default_rng(1)
    threads = []
    for number in range(load.readers + load.writers):
        thread = Thread(number, script=iter(()))  # type: ignore[arg-type]
        thread.script = table.reader(thread) if number < load.readers else table.writer(thread)
        threads.append(thread)
        machine.at(float(rng.uniform(0, 2e5)), lambda thread=thread: machine.start(thread))  # type: ignore[misc]
    warm = 3e5 + 0.2 * milliseconds * 1e6
    machine.run(warm)
    before = [thread.done for thread in threads]
    waits = machine.waits
    machine.run(warm + milliseconds * 1e6)
    done = [thread.done - start for thread, start in zip(threads, before, strict=True)]
    return Outcome(
        reads=sum(done[: load.readers]) / milliseconds / 1e3,
        writes=sum(done[load.readers :]) / milliseconds / 1e3,
        waits=1e3 * (machine.waits - waits) / milliseconds,
    )


#: Lookups and steps of the points that are measured: one thread, as many as processors, more than processors.
VALIDATED = ((1, 0), (0, 1), (2, 0), (0, 2), (1, 1), (4, 0), (0, 4), (4, 4))


def measured_costs(measured: dict[str, Any], shards: int, busy: int) -> Costs:
    """The costs that ``lock_benchmark`` found with so many processors busy, each thread with a table of its own."""

    def of(readers: int, writers: int) -> dict[str, Any]:
        wanted = (shards, readers, writers)
        return next(p for p in measured["points"] if (p["shards"], p["readers"], p["writers"]) == wanted)

    reads, writes = of(busy, 0), of(0, busy)
    group = reads["group_ns"]
    return Costs(
        read=1e3 * busy / reads["reads_apart"],
        write=1e3 * busy / writes["writes_apart"] - group,
        group=group,
        line=measured["line_transfer_ns"],
        own_line=measured["own_line_ns"],
    )


def validate(measured: dict[str, Any], processors: int = 2, milliseconds: float = 200.0) -> list[dict[str, Any]]:
    """What was measured of each point, and what the model says of it."""
    rows = []
    for point in measured["points"]:
        busy = min(point["readers"] + point["writers"], processors)
        costs = measured_costs(measured, point["shards"], busy)
        load = Load(
            processors,
            point["readers"],
            point["writers"],
            point["shards"],
            batch=measured["batch"],
            read_batch=measured["read_batch"],
        )
        says = simulate(load, costs, Seats, milliseconds)
        row = {name: point[name] for name in ("shards", "readers", "writers", "reads", "writes")}
        rows.append({**row, "model_reads": says.reads, "model_writes": says.writes})
    return rows


def predict(
    costs: Costs, processors: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64), milliseconds: float = 20.0
) -> list[dict[str, Any]]:
    """What the model says of machines with as many threads as processors: shares of what threads would do that share no
    table. `zipf`: the steps' ids follow a Zipf law.
    """
    rows = []
    for cpus in processors:
        shards = default_shards(cpus)
        loads = {"lookups": (cpus, 0), "steps": (0, cpus)}
        if cpus > 1:
            loads |= {"lookups beside one": (cpus - 1, 1), "half and half": (cpus // 2, cpus // 2)}
        for name, (readers, writers) in loads.items():
            for ids in ("uniform", "zipf") if writers else ("uniform",):
                shares = zipf_shares(shards, 1.05, 65_536) if ids == "zipf" else ()
                load = Load(cpus, readers, writers, shards, shares=shares)
                row: dict[str, Any] = {"processors": cpus, "shards": shards, "load": name, "ids": ids}
                for kind in (CountedLocks, Seats):
                    says = simulate(load, costs, kind, milliseconds)
                    row[kind.__name__] = {
                        "reads": says.reads * costs.read / 1e3 / readers if readers else None,
                        "writes": says.writes * (costs.write + costs.group) / 1e3 / writers if writers else None,
                    }
                rows.append(row)
    return rows


def markdown(validated: list[dict[str, Any]], predicted: list[dict[str, Any]], costs: Costs) -> str:
    """Both as a page."""

    def cell(value: float | None) -> str:
        return "" if value is None else f"{value:.2f}"

    lines = [
        "Measured on this machine, and the model's word, millions of keys a second:",
        "",
        "| lookups + steps | shards | looked up | model | trained | model |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['readers']} + {row['writers']} | {row['shards']} | {row['reads']:.1f} | {row['model_reads']:.1f} | "
        f"{row['writes']:.1f} | {row['model_writes']:.1f} |"
        for row in validated
    ]
    lines += [
        "",
        "**A model's word, not measured**: shares of what the same threads would do if they shared no table, memory as "
        f"fast for all as for one; {costs.read:.0f} ns a key of a lookup, {costs.write + costs.group:.0f} of a step:",
        "",
        "| processors | shards | threads | ids | looked up, before | now | trained, before | now |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in predicted:
        before, now = row["CountedLocks"], row["Seats"]
        cells = [before["reads"], now["reads"], before["writes"], now["writes"]]
        first = f"| {row['processors']} | {row['shards']} | {row['load']} | {row['ids']} | "
        lines.append(first + " | ".join(map(cell, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measured", type=argparse.FileType(), help="what lock_benchmark printed (default: run it)")
    parser.add_argument("--processors", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    args = parser.parse_args()
    points = ",".join(f"{readers}+{writers}" for readers, writers in VALIDATED)
    measured = json.load(args.measured) if args.measured else lock_benchmark(points)
    costs = measured_costs(measured, 8, 1)
    print(markdown(validate(measured), predict(costs, tuple(args.processors)), costs), end="")


if __name__ == "__main__":
    main()
