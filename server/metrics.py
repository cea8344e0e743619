"""What a server counts, in Prometheus' text format (version 0.0.4), over all its workers.

Counting has to cost next to nothing beside a lookup of some microseconds, so it is done in plain integers, by the one
thread that runs the event loop: in Python for each answer, or in C++ (`Tally`), and added when counts are read. With
several workers each writes its counts to a file of its own in a folder that they share, once a second and in one piece;
who is asked for metrics adds up all of them. A worker that takes the place of a dead one goes on from its file, so
counters never fall, and there are never more files than workers.

Labels are names of tables and models that are served, and words of this program: nothing that a client makes up.
TensorFlow Serving's metrics have its names, labels and buckets, for dashboards that are there already:
https://github.com/tensorflow/serving/blob/master/tensorflow_serving/servables/tensorflow/util.cc
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from kvtools import __version__
from kvtools._snapshot import Spin, Tally
from kvtools.chain import Reason
from kvtools.server.catalog import Catalog, FollowStatus, UnknownModelError
from kvtools.server.observer import SEVERAL, Answered, Inferences, Tallied

MEDIA_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Upper bounds of the buckets of a request's time, in s.
BOUNDS = (
    *(step * 10**power for power in (-5, -4, -3, -2, -1) for step in (1, 2.5, 5)),
    *(1.0, 2.5, 5.0, 10.0),
)
#: TensorFlow Serving's, in us: scale 10, growth 1.8, 33 of them.
SERVING_BOUNDS = tuple(10 * 1.8**power for power in range(33))
_SERVING = ("predict", "classify", "regress")  # requests of TensorFlow Serving's
_INFERENCES = (*_SERVING, "infer")
# What its statuses are called there; a status of HTTP tells no more than this.
_SERVING_CODES = {200: "OK", 500: "INTERNAL", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"}

Key = tuple[str, ...]


class Counts:
    """Counters and histograms: what one worker has counted, or the sum over several."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, int], int] = {}  # protocol, api, status
        self.seconds: dict[tuple[str, str, str, str], list[float]] = {}  # protocol, api, table, model: buckets, the sum
        self.bytes: dict[str, list[int]] = {}  # protocol: in, out
        self.keys: dict[tuple[str, str], list[int]] = {}  # table, model: keys, missing
        self.versions: dict[str, list[int]] = {}  # model: loaded, failed
        self.serving_requests: dict[tuple[str, str], int] = {}  # model, code
        # model, version, signature: answers, their ns, errors, their ns
        self.inferences: dict[tuple[str, int, str], list[int]] = {}
        self.last_inferences: dict[tuple[str, int, str], int] = {}  # in ms since 1970
        self.serving_seconds: dict[tuple[str, str], list[float]] = {}  # model, entry: buckets, then the sum in us
        self.spun: dict[str, float] = {}  # found or vain: seconds

    def count(self, answered: Answered) -> None:
        """Count an answer; about a microsecond."""
        protocol, status, seconds = answered.protocol, answered.status, answered.seconds
        api = answered.kind or "other"
        request = (protocol, api, status)
        self.requests[request] = self.requests.get(request, 0) + 1
        counts = answered.counts
        table = "" if not counts else counts[0].table if len(counts) == 1 else SEVERAL
        timed = (protocol, api, table, counts[0].model if counts else answered.model)
        buckets = self.seconds.get(timed)
        if buckets is None:
            buckets = self.seconds[timed] = [0] * (len(BOUNDS) + 2)
        buckets[bisect_left(BOUNDS, seconds)] += 1
        buckets[-1] += seconds
        sizes = self.bytes.get(protocol)
        if sizes is None:
            sizes = self.bytes[protocol] = [0, 0]
        sizes[0] += answered.bytes_in
        sizes[1] += answered.bytes_out
        for count in counts:
            of = (count.table, count.model)
            keys = self.keys.get(of)
            if keys is None:
                keys = self.keys[of] = [0, 0]
            keys[0] += count.keys
            keys[1] += count.missing
        if answered.model and answered.kind in _INFERENCES:
            self._count_inference(answered)
            if answered.kind in _SERVING:
                self._count_serving(answered)

    def _count_inference(self, answered: Answered) -> None:
        asked = (answered.model, answered.version, answered.signature)
        counts = self.inferences.setdefault(asked, [0, 0, 0, 0])
        place = 0 if answered.status == 200 else 2
        counts[place] += 1
        counts[place + 1] += int(answered.seconds * 1e9)
        self.last_inferences[asked] = int(time.time() * 1000)

    def _count_serving(self, answered: Answered) -> None:
        status = answered.status
        code = answered.code.upper() or _SERVING_CODES.get(status, "INVALID_ARGUMENT" if status < 500 else "UNKNOWN")
        request = (answered.model, code)
        self.serving_requests[request] = self.serving_requests.get(request, 0) + 1
        if status == 200:
            entry = (answered.model, "GRPC" if answered.protocol == "grpc" else "REST")
            buckets = self.serving_seconds.setdefault(entry, [0] * (len(SERVING_BOUNDS) + 2))
            buckets[bisect_left(SERVING_BOUNDS, answered.seconds * 1e6)] += 1
            buckets[-1] += answered.seconds * 1e6

    def add_tally(self, tally: Tally, of: Tallied) -> None:
        """Add the answers that `tally` has counted, which are all of status 200."""
        answers, found, seconds, bytes_in, bytes_out, keys, missing = tally.counts()
        counted = Counts()
        if of.table != SEVERAL and (answers or keys):
            counted.keys[of.table, of.model] = [keys, missing]
        if answers:
            counted.requests[of.protocol, of.kind, 200] = answers
            counted.seconds[of.protocol, of.kind, of.table, of.model] = [*found, seconds]
            counted.bytes[of.protocol] = [bytes_in, bytes_out]
        if answers and of.kind in _INFERENCES:
            buckets, last = tally.more()
            asked = (of.model, of.version, of.signature)
            counted.inferences[asked] = [answers, int(seconds * 1e9), 0, 0]
            counted.last_inferences[asked] = last
            if of.kind in _SERVING:
                counted.serving_requests[of.model, "OK"] = answers
                counted.serving_seconds[of.model, "REST"] = [*buckets, seconds * 1e6]
        self.add(counted)

    def add(self, other: Counts) -> None:
        """Add what `other` has."""
        for name, mine in vars(self).items():
            for key, theirs in list(vars(other)[name].items()):  # at once: the event loop goes on counting
                if name == "last_inferences":
                    mine[key] = max(mine.get(key, 0), theirs)
                elif isinstance(theirs, list):
                    mine[key] = [a + b for a, b in zip(mine.get(key, [0] * len(theirs)), theirs, strict=True)]
                else:
                    mine[key] = mine.get(key, 0) + theirs

    def to_json(self) -> dict[str, Any]:
        """Return it as lists of keys and values."""
        return {name: [[key, value] for key, value in counts.items()] for name, counts in vars(self).items()}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Counts:
        """Return what `to_json` was given; raises `ValueError` and its like if this is none of it."""
        counts = cls()
        for name, mine in vars(counts).items():
            for key, value in document[name]:
                mine[tuple(key) if isinstance(key, list) else key] = value
        return counts


class Metrics:
    """The counts of this worker, and of the others in `shared`; None: there are no others."""

    def __init__(self, catalog: Catalog, shared: Path | None = None) -> None:
        self.counts = Counts()
        self._tallies: dict[Tallied, Tally] = {}
        self._gone: set[tuple[str, int]] = set()  # versions that are served no more
        self._spins: list[Spin] = []
        self._catalog = catalog
        self._shared = shared
        self._written: dict[str, Any] | None = None
        self._versions: dict[str, tuple[int, int]] = {}  # loads and failures of models that are counted already
        self._counting = threading.Lock()
        self._file = None if shared is None else shared / f"metrics-{os.getpid()}.json"
        if self._file is not None:
            self._take_over(self._file)

    def tally(self, of: Tallied) -> Tally:
        """Return what counts answers of status 200 in C++; its counts are added to `counts` when these are read."""
        found = self._tallies.get(of)
        if found is None:
            others = [bound / 1e6 for bound in SERVING_BOUNDS] if of.kind in _INFERENCES else []
            found = self._tallies[of] = Tally(BOUNDS, others)
        return found

    def add_spin(self, spin: Spin) -> None:
        """Count the time for which `spin` looks for requests."""
        self._spins.append(spin)

    def publish(self) -> None:
        """Let the other workers know what was counted; for every second or so."""
        self._forget_versions()
        if self._file is None:
            return
        self._count_versions()
        document = self._own().to_json()
        if document == self._written:
            return
        beside = self._file.with_suffix(".new")
        try:
            beside.write_text(json.dumps(document))
            beside.replace(self._file)
        except OSError:
            beside.unlink(missing_ok=True)
            raise
        self._written = document

    def text(self) -> str:
        """Return all metrics as Prometheus reads them."""
        self._count_versions()
        total, workers = self._total()
        return "".join(_lines(total, self._catalog, workers))

    def inferences(self) -> dict[tuple[str, int, str], Inferences]:
        """Return what was asked of models in the protocols of others, by model, version and signature."""
        total, _ = self._total()
        found = {}
        for asked, (answers, answers_ns, errors, errors_ns) in total.inferences.items():
            last = total.last_inferences.get(asked, 0)
            found[asked] = Inferences(answers, answers_ns, errors, errors_ns, last)
        return found

    def _total(self) -> tuple[Counts, int]:
        """Return what all workers have counted, and how many they are."""
        total = self._own()
        workers = 1
        for path in self._files():
            if path != self._file:
                total.add(_read(path))
                workers += _lives(path)
        return total, workers

    def _count_versions(self) -> None:
        """Count the versions that this worker has loaded, or could not load, since the last time."""
        with self._counting:
            for name in self._catalog.names():
                try:
                    model = self._catalog.model(name)
                except UnknownModelError:  # it was taken away at this moment
                    continue
                now = (model.loads, model.failures)
                before = self._versions.get(model.name, (0, 0))
                if any(after < earlier for after, earlier in zip(now, before, strict=True)):
                    before = (0, 0)  # another model has taken the name
                mine = self.counts.versions.setdefault(model.name, [0, 0])
                for place in (0, 1):
                    mine[place] += now[place] - before[place]
                self._versions[model.name] = now

    def _forget_versions(self) -> None:
        """Forget how often versions were asked that are served no more: nobody is told, and there are ever more.

        It is done a while after they went, when their last requests are answered.
        """
        served: set[tuple[str, int]] = set()
        for name in self._catalog.names():
            with contextlib.suppress(UnknownModelError):  # it was taken away at this moment
                served |= {(name, version.number) for version in self._catalog.versions(name)}
        tallied = {of: (of.model, of.version) for of in self._tallies if of.kind in _INFERENCES}
        gone = {*tallied.values(), *(asked[:2] for asked in self.counts.inferences)} - served
        forgotten = gone & self._gone
        self._gone = gone
        with self._counting:
            for of in [of for of, version in tallied.items() if version in forgotten]:
                self.counts.add_tally(self._tallies.pop(of), of)
            for asked in [asked for asked in self.counts.inferences if asked[:2] in forgotten]:
                del self.counts.inferences[asked], self.counts.last_inferences[asked]

    def _own(self) -> Counts:
        """Return what this worker has counted; for any thread."""
        own = Counts()
        with self._counting:
            own.add(self.counts)
            for of, tally in list(self._tallies.items()):
                own.add_tally(tally, of)
        if self._spins:
            spun = Counts()
            spun.spun = {
                "found": sum(spin.found for spin in self._spins),
                "vain": sum(spin.vain for spin in self._spins),
            }
            own.add(spun)
        return own

    def _files(self) -> Iterable[Path]:
        return [] if self._shared is None else sorted(self._shared.glob("metrics-*.json"))

    def _take_over(self, mine: Path) -> None:
        """Go on from the counts of a worker that is gone. A rename is done by one of those who try it."""
        for path in self._files():
            if not _lives(path):
                try:
                    path.rename(mine)
                except OSError:
                    continue
                self.counts = _read(mine)
                break
        with contextlib.suppress(OSError):  # no space: told when it is tried again, in a second
            self.publish()


def _read(path: Path) -> Counts:
    try:
        return Counts.from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError):  # it was taken over at this moment
        return Counts()


def _lives(path: Path) -> bool:
    try:
        os.kill(int(path.stem.removeprefix("metrics-")), 0)
    except OSError:
        return False
    return True


def _lines(counts: Counts, catalog: Catalog, workers: int) -> Iterator[str]:
    yield from _family("kvtools_info", "gauge", "The version of kvtools.", [({"version": __version__}, 1)])
    yield from _family("kvtools_workers", "gauge", "Processes that answer.", [({}, workers)])
    yield from _family("kvtools_ready", "gauge", "Whether every model has a version.", [({}, int(catalog.ready))])
    yield from _family("kvtools_warm", "gauge", "Whether what is served is in memory.", [({}, int(catalog.warm))])
    yield from _family(
        "kvtools_requests_total",
        "counter",
        "Answers, by protocol, interface and status.",
        [
            ({"protocol": protocol, "api": api, "status": str(status)}, value)
            for (protocol, api, status), value in sorted(counts.requests.items())
        ],
    )
    yield from _histogram(
        "kvtools_request_seconds",
        "From the whole request to the whole answer; table is * for several, and empty for none or an error.",
        BOUNDS,
        [
            ({"protocol": protocol, "api": api, "table": table, "model": model}, buckets)
            for (protocol, api, table, model), buckets in sorted(counts.seconds.items())
        ],
    )
    for place, name, what in ((0, "request", "requests"), (1, "response", "answers")):
        yield from _family(
            f"kvtools_{name}_bytes_total",
            "counter",
            f"Bytes of the bodies of {what}; streamed ones are not counted.",
            [({"protocol": protocol}, sizes[place]) for protocol, sizes in sorted(counts.bytes.items())],
        )
    tables = [({"table": table, "model": model}, keys) for (table, model), keys in sorted(counts.keys.items())]
    yield from _family("kvtools_keys_total", "counter", "Keys looked up.", [(of, keys[0]) for of, keys in tables])
    yield from _family(
        "kvtools_keys_found_total",
        "counter",
        "Keys that had a row.",
        [(of, keys[0] - keys[1]) for of, keys in tables],
    )
    yield from _family(
        "kvtools_keys_missing_total",
        "counter",
        "Keys that had none.",
        [(of, keys[1]) for of, keys in tables],
    )
    yield from _family(
        "kvtools_spin_seconds_total",
        "counter",
        "How long workers looked for the next lookup instead of sleeping: for some that came, and in vain.",
        [({"result": result}, seconds) for result, seconds in sorted(counts.spun.items())],
    )
    yield from _of_models(catalog, counts)
    yield from _of_chains(catalog)
    yield from _family(
        ":tensorflow:serving:request_count",
        "counter",
        "The total number of requests.",
        [
            ({"model_name": model, "status": code}, value)
            for (model, code), value in sorted(counts.serving_requests.items())
        ],
    )
    yield from _histogram(
        ":tensorflow:serving:request_latency",
        "Distribution of wall time (in microseconds) for requests that were answered.",
        SERVING_BOUNDS,
        [
            ({"model_name": model, "API": "Predict", "entrypoint": entry}, buckets)
            for (model, entry), buckets in sorted(counts.serving_seconds.items())
        ],
    )


def _of_models(catalog: Catalog, counts: Counts) -> Iterator[str]:
    models = [catalog.model(name) for name in catalog.names()]
    yield from _family(
        "kvtools_model_version",
        "gauge",
        "The latest version that is served.",
        [({"model": model.name}, model.versions[-1].number) for model in models if model.versions],
    )
    yield from _family(
        "kvtools_model_versions",
        "gauge",
        "How many versions are served.",
        [({"model": model.name}, len(model.versions)) for model in models],
    )
    yield from _family(
        "kvtools_versions_loaded_total",
        "counter",
        "Versions that were loaded, by all workers: each loads for itself.",
        [({"model": name}, loaded) for name, (loaded, _) in sorted(counts.versions.items())],
    )
    yield from _family(
        "kvtools_versions_failed_total",
        "counter",
        "Versions that could not be loaded, by all workers.",
        [({"model": name}, failed) for name, (_, failed) in sorted(counts.versions.items())],
    )
    yield from _family(
        "kvtools_table_rows",
        "gauge",
        "Rows of a table, in the latest version.",
        [
            ({"model": model.name, "table": name}, table.schema.rows)
            for model in models
            if model.versions
            for name, table in model.versions[-1].store.tables.items()
        ],
    )


def _of_chains(catalog: Catalog) -> Iterator[str]:
    """Yield how the models that follow chains do, as the worker that is asked sees it."""
    if not catalog.follows:
        return
    found = [(model, follows.status) for model, follows in catalog.follows.items()]

    def gauge(name: str, about: str, of: Callable[[FollowStatus], float], kind: str = "gauge") -> Iterator[str]:
        samples: list[tuple[dict[str, str], float]] = [({"model": model}, of(status)) for model, status in found]
        yield from _family(f"kvtools_follow_{name}", kind, about, samples)

    yield from _family(
        "kvtools_follow_version",
        "gauge",
        "The last member of its chain that is served.",
        [({"model": model}, status.sequence) for model, status in found if status.sequence is not None],
    )
    yield from gauge("lag_seconds", "Since when a newer member waits; 0 where all are served.", lambda of: of.lag)
    yield from _family(
        "kvtools_follow_moment_seconds",
        "gauge",
        "When the moment was that the rows served are of, Unix time.",
        [({"model": model}, status.moment) for model, status in found if status.moment],
    )
    yield from gauge(
        "freshness_seconds", "From the moment of the last increment until it was served.", lambda of: of.seconds
    )
    yield from gauge("increments_total", "Increments that were applied.", lambda of: of.applied, "counter")
    yield from _family(
        "kvtools_follow_refused_total",
        "counter",
        "Members that were refused.",
        [
            ({"model": model, "reason": reason}, count)
            for model, status in found
            for reason, count in (dict.fromkeys(get_args(Reason), 0) | dict(status.refused)).items()
        ],
    )
    yield from gauge("rows_over", "Rows and removed keys that lie over the file.", lambda of: of.rows_over)
    yield from gauge("bytes_over", "Bytes of memory that they take.", lambda of: of.bytes_over)
    yield from gauge("folds_total", "Files that were made of rows lying over one.", lambda of: of.folds, "counter")


def _family(name: str, kind: str, about: str, samples: Sequence[tuple[dict[str, str], float]]) -> Iterator[str]:
    yield f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
    for labels, value in samples:
        yield f"{name}{_labels(labels)} {_number(value)}\n"


def _histogram(
    name: str, about: str, bounds: Sequence[float], samples: Sequence[tuple[dict[str, str], Sequence[float]]]
) -> Iterator[str]:
    yield f"# HELP {name} {about}\n# TYPE {name} histogram\n"
    for labels, buckets in samples:
        below: float = 0
        for bound, value in zip((*map(_number, bounds), "+Inf"), buckets[:-1], strict=True):
            below += value
            yield f"{name}_bucket{_labels({**labels, 'le': bound})} {_number(below)}\n"
        yield f"{name}_sum{_labels(labels)} {_number(buckets[-1])}\n{name}_count{_labels(labels)} {_number(below)}\n"


def _labels(labels: dict[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return escaped.encode("utf-8", "replace").decode()


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.12g}"
