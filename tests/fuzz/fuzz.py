"""Open, stream and check checkpoints that were changed at random: only a KvtoolsError may come out, and soon.

    python tests/fuzz/fuzz.py                         FUZZ_SECONDS of it (600)
    python tests/fuzz/fuzz.py --case hdf5:1234        one case again, with its traceback

A small table is written in every dialect that can be written, beside the checkpoints in tests/data. A case is the name
of such a sample and a number from which all that happens follows. Cases run in processes of their own, with little
memory, that may crash or hang: the parent notes it and goes on. What is found is printed once per place; the exit
status is then 1.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import multiprocessing as mp
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mutate
import numpy as np

from kvtools.array_table import ArrayTable
from kvtools.dialects.chunk import ALL_COLUMNS
from kvtools.dialects.detect import dialects, open_checkpoint
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.options import OpenOptions
from kvtools.dialects.writing import WriteOptions
from kvtools.diff import compare_tables
from kvtools.errors import KvtoolsError
from kvtools.get import rows_of_keys
from kvtools.inspect import describe
from kvtools.migrate import write_tables
from kvtools.verify import check

DATA = Path(__file__).parent.parent / "data"
ROOM = 1 << 30
SECONDS_PER_CASE = 10
_LARGEST_SAMPLE = 1 << 20


@dataclass(frozen=True)
class Sample:
    """Files of a checkpoint, and which name among them is opened ("" for the folder)."""

    files: mutate.Files
    path: str


def table(parts: int) -> ArrayTable:
    """A small table with everything that a table can have."""
    rng = np.random.default_rng(7)
    keys = np.concatenate([np.arange(-20, 20), [2**63 - 1, -(2**63), 2**40]]).astype(np.int64)
    keys = keys[np.argsort(keys % parts, kind="stable")]
    values = rng.normal(size=(len(keys), 4)).astype(np.float32)
    return ArrayTable(
        "ads/emb",
        keys,
        values,
        slots={"Adam.m": -values, "Adam.v": values**2},
        freqs=np.arange(len(keys), dtype=np.uint32),
        versions=np.full(len(keys), 1_700_000_000, np.uint32),
        version_unit="seconds",
        part_rows=tuple(np.bincount(keys % parts, minlength=parts).tolist()),
        partition="floor_mod",
    )


def samples(folder: Path) -> dict[str, Sample]:
    """Write and collect the samples, by dialect and number of parts, and by their place in tests/data."""
    found: dict[str, Sample] = {}
    endings = {"hdf5": ".h5", "parquet": ".parquet", "arrow": ".arrow", "npz": ".npz", "safetensors": ".safetensors"}
    endings["torch"] = ".pt"
    for dialect in dialects().values():
        if dialect.write is None or dialect.output == "url":
            continue
        for parts, compression in itertools.product((1, 2), (None, "gzip", "zstd")):
            name = f"{dialect.name}-{parts}" + (f"-{compression}" if compression else "")
            where = folder / name
            where.mkdir()
            path = where / f"model{endings.get(dialect.name, '')}"
            try:
                write_tables([table(parts)], path, dialect, options=WriteOptions(compression=compression))
            except KvtoolsError:
                continue  # the dialect has no such compression
            found[name] = Sample(_files(where), path.name)
    for place in sorted(DATA.iterdir()):
        if place.is_dir() and place.name != "broken":
            for inner in [place, *sorted(p for p in place.rglob("*") if p.is_dir())]:
                found.update(_samples_of(inner))
    return found


def _samples_of(folder: Path) -> dict[str, Sample]:
    files = _files(folder)
    if not files or sum(map(len, files.values())) > _LARGEST_SAMPLE:
        return {}
    name = str(folder.relative_to(DATA))
    found = {name: Sample(files, "")}
    for file in files:
        if file.endswith((".index", ".h5", ".npz", ".parquet", ".arrow", ".safetensors", ".pt")) and "/" not in file:
            alone = {n: data for n, data in files.items() if n.startswith(file.removesuffix(".index"))}
            found[f"{name}/{file}"] = Sample(alone, file)
    return found


def _files(folder: Path) -> mutate.Files:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def run_case(sample: Sample, seed: int, folder: Path) -> list[str]:
    """Change the sample as the seed says and do all that the tools do with it; return what was changed."""
    rng = random.Random(seed)
    files = dict(sample.files)
    done = mutate.mutate(files, rng)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    try:
        options = OpenOptions(memory=1 << 16 if rng.random() < 0.3 else 1 << 26, lenient=rng.random() < 0.5)
        use(open_checkpoint(folder / sample.path, options), rng)
    except KvtoolsError as error:
        assert str(error) and len(str(error)) < 5000, "a message of no use"
    return done


def use(checkpoint: Checkpoint, rng: random.Random) -> None:
    """Do all that the tools do with a checkpoint."""
    describe(checkpoint)
    for error in checkpoint.broken.values():
        assert isinstance(error, KvtoolsError)
    for reader in checkpoint.tables.values():
        try:
            rows = 0
            for chunk in reader.chunks(rows=rng.choice([None, 1 + rng.randrange(50)]), verify=rng.random() < 0.7):
                assert chunk.values is not None and len(chunk.values) == len(chunk) > 0
                assert all(len(slot) == len(chunk) for slot in chunk.slots.values())
                rows += len(chunk)
            assert rows == reader.rows, f"{rows} rows, the schema says {reader.rows}"
            if rows:
                some = np.array([rng.randrange(rows) for _ in range(5)])
                assert len(reader.take(some, ALL_COLUMNS)) == 5
            rows_of_keys(reader, np.array([0, -7, 2**64 - 1], object))
            for extra in reader.schema.extras:
                reader.extra(extra.name)
            if rng.random() < 0.2:
                assert compare_tables(reader, reader, memory=1 << 20, top=2).same
        except KvtoolsError:
            pass
    check(checkpoint, memory=1 << 20, workers=1)


@dataclass(frozen=True)
class Failure:
    """What came out of a case that should not: `place` is the same for what is the same fault."""

    case: str
    place: str
    text: str


def _place(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/kvtools/" in f.filename]
    last = frames[-1] if frames else traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {Path(last.filename).name}:{last.lineno}"


def _work(chosen: dict[str, Sample], done: Any, seeds: range, results: Any, current: Any, folder: str) -> None:
    """Run the cases of these seeds, or until killed; `current` tells the parent which one is on."""
    mutate.SCRATCH = Path(folder)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    warnings.simplefilter("error", RuntimeWarning)
    signal.signal(signal.SIGALRM, _too_long)
    names = sorted(chosen)
    for seed in seeds:
        name = names[seed % len(names)]
        current.value = seed
        signal.alarm(SECONDS_PER_CASE)
        faulthandler.dump_traceback_later(2 * SECONDS_PER_CASE)  # for what is stuck outside Python
        try:
            run_case(chosen[name], seed, Path(folder) / "case")
        except BaseException as error:
            text = "".join(traceback.format_exception(error)[-12:])
            results.put(Failure(f"{name}:{seed}", _place(error), text))
        finally:
            signal.alarm(0)
        done.value += 1


def _too_long(*_: object) -> None:
    raise TimeoutError(f"a case took more than {SECONDS_PER_CASE} seconds")


class Worker:
    """A process that runs cases, and is started again, one case on, when it crashes or hangs."""

    def __init__(self, context: Any, chosen: dict[str, Sample], seeds: range, folder: Path) -> None:
        self._context, self._chosen, self._seeds, self._folder = context, chosen, seeds, folder
        self.done = context.Value("q", 0)
        self.current = context.Value("q", seeds.start)
        self.results = context.SimpleQueue()
        self._seen, self._since = -1, time.monotonic()
        folder.mkdir()
        self._start(seeds)

    def _start(self, seeds: range) -> None:
        arguments = (self._chosen, self.done, seeds, self.results, self.current, str(self._folder))
        self.process = self._context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        self._since = time.monotonic()

    def failures(self) -> Iterator[Failure]:
        """Yield what was found since the last call."""
        while not self.results.empty():
            yield self.results.get()
        seed = self.current.value
        if seed != self._seen:
            self._seen, self._since = seed, time.monotonic()
        stuck = time.monotonic() - self._since > 3 * SECONDS_PER_CASE
        if self.finished or (self.process.is_alive() and not stuck):
            return
        names = sorted(self._chosen)
        fate = "hung" if stuck else f"died with {self.process.exitcode}"
        self.stop()
        yield Failure(f"{names[seed % len(names)]}:{seed}", f"the process {fate}", "")
        self._start(range(seed + self._seeds.step, self._seeds.stop, self._seeds.step))

    @property
    def finished(self) -> bool:
        """Whether all its cases were run."""
        return self.process.exitcode == 0 and self.results.empty()

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()


def fuzz(seconds: float, workers: int, first: int, only: str, cases: int | None) -> dict[str, Failure]:
    """Run cases for so long, or so many; return what was found, by place."""
    found: dict[str, Failure] = {}
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="kvtools-fuzz-") as temporary:
        folder = Path(temporary)
        (folder / "samples").mkdir()
        chosen = {name: sample for name, sample in samples(folder / "samples").items() if only in name}
        if not chosen:
            raise SystemExit(f"fuzz.py: no sample has '{only}' in its name")
        context = mp.get_context("fork")
        last = first + (cases if cases is not None else 1 << 60)
        crew = [Worker(context, chosen, range(first + n, last, workers), folder / str(n)) for n in range(workers)]
        start = time.monotonic()
        try:
            while time.monotonic() < start + seconds and not all(worker.finished for worker in crew):
                time.sleep(0.2)
                for worker in crew:
                    for failure in worker.failures():
                        counts[failure.place] += 1
                        if failure.place not in found:
                            found[failure.place] = failure
                            print(f"\n{failure.case}: {failure.place}\n{failure.text}", flush=True)
        finally:
            for worker in crew:
                worker.stop()
        done = sum(worker.done.value for worker in crew)
    for place, count in counts.most_common():
        print(f"{count:6} times {place}, first in --case {found[place].case}")
    print(f"{done:,} cases of {len(chosen)} samples in {time.monotonic() - start:.0f} seconds: {len(found)} faults")
    return found


def main() -> int:
    """Fuzz, or run one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="run this case alone, and keep its files")
    parser.add_argument("--seed", type=int, help="begin with this number; a random one if left out")
    parser.add_argument("--only", default="", help="only samples with this in their name")
    parser.add_argument("--cases", type=int, help="stop after so many cases")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    if options.case:
        name, _, seed = options.case.rpartition(":")
        folder = Path(tempfile.mkdtemp(prefix="kvtools-fuzz-"))
        (folder / "samples").mkdir()
        mutate.SCRATCH = folder
        warnings.simplefilter("error", RuntimeWarning)
        print(folder / "case")
        print(run_case(samples(folder / "samples")[name], int(seed), folder / "case"))
        return 0
    seed = random.randrange(1 << 40) if options.seed is None else options.seed
    return bool(fuzz(float(os.environ.get("FUZZ_SECONDS", "600")), options.workers, seed, options.only, options.cases))


if __name__ == "__main__":
    sys.exit(main())
