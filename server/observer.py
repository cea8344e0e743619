"""Who watches lookups, and who guards them: one object is told of every answer, and asked before every lookup.

The one here counts. Metrics, access logs and access keys are made by deriving from it (`telemetry.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvtools._snapshot import Spin, Tally
from kvtools.server.answer import TableCount

SEVERAL = "*"
"""The table that a request for several is counted under."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer of a lookup, or a request that was no HTTP: what a metric or a line of a log is made of.

    `kind` is "lookup", "tables" or "row", "resp" in the Redis protocol, "predict", "classify", "regress" or "infer" in
    the protocols of others, and "" of what was no lookup. `code` is that of an error, "" of an answer.
    `seconds` are from the whole request to the whole answer, without what the network takes. `short` tells which way
    it went. `model` is the name of one that is served, or "" where the request named none; `path` that of a request
    which is told by nothing else. `version` and `signature` tell what of the model was asked, "" if it is not known.
    """

    kind: str
    status: int
    code: str
    counts: tuple[TableCount, ...]
    seconds: float
    bytes_in: int
    bytes_out: int
    client: tuple[str, int] | None
    headers: Mapping[str, str]
    short: bool
    protocol: Literal["http", "grpc", "resp"] = "http"
    request_id: str = ""
    model: str = ""
    path: str = ""
    version: int = 0
    signature: str = ""


class Tallied(NamedTuple):
    """What one `Tally` counts: lookups of status 200, of one table.

    `version` and `signature` are those of "predict" and "infer". The table "*" stands for requests for several, whose
    keys are counted by tallies of the tables.
    """

    protocol: Literal["http", "resp"]
    kind: str
    table: str
    model: str
    version: int = 0
    signature: str = ""


@dataclass
class Inferences:
    """What was asked of a signature in the protocols of others: answers and errors, how long they took, the last one.

    Times are in ns; `last` is in ms since 1970.
    """

    answers: int = 0
    answers_ns: int = 0
    errors: int = 0
    errors_ns: int = 0
    last: int = 0

    def add(self, other: Inferences) -> None:
        """Add what `other` has."""
        self.answers += other.answers
        self.answers_ns += other.answers_ns
        self.errors += other.errors
        self.errors_ns += other.errors_ns
        self.last = max(self.last, other.last)


class Observer:
    """Counts requests by status, and keys and missing keys by table; lets everybody in.

    `on_answer` is called on the event loop, `authorize` on any thread.
    """

    def __init__(self) -> None:
        self.requests: dict[int, int] = {}
        self.keys: dict[str, int] = {}
        self.missing: dict[str, int] = {}

    def authorize(self, headers: Mapping[str, str], tables: Iterable[str]) -> None:
        """Raise `RequestError` (401, 403) if who sends `headers` (names in lower case) may not look up `tables`."""

    def authorize_model(self, headers: Mapping[str, str], model: str | None) -> None:
        """Raise `RequestError` if who sends `headers` may not ask `model`; None: the first one."""

    def authorize_unknown(self, headers: Mapping[str, str], model: str) -> None:
        """Raise `RequestError` if who sends `headers` may not ask `model`, whose tables are not known."""

    def authorize_change(self, headers: Mapping[str, str]) -> None:
        """Raise `RequestError` if who sends `headers` may not change what is served."""

    def metrics(self) -> str:
        """Return what was counted, in Prometheus' text format."""
        return ""

    def inferences(self) -> Mapping[tuple[str, int, str], Inferences] | None:
        """Return what was asked in the protocols of others, by (model, version, signature); None: unknown."""
        return None

    def tally(self, counted: Tallied) -> Tally | None:
        """Return what answers of one kind may be counted by, in place of `on_answer`.

        None: `on_answer` has to be told of each. What `authorize` says to who asks the same again has to stay as it is
        where this is no None, until `Catalog.renew`.
        """
        return None

    def on_spin(self, spin: Spin) -> None:
        """Have the time counted for which `spin` looks for requests."""

    def on_answer(self, answered: Answered) -> None:
        """Count one answer."""
        self.requests[answered.status] = self.requests.get(answered.status, 0) + 1
        for count in answered.counts:
            self.keys[count.table] = self.keys.get(count.table, 0) + count.keys
            self.missing[count.table] = self.missing.get(count.table, 0) + count.missing
