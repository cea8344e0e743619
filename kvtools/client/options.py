"""What a client can be told."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from kvtools.errors import UsageError
from kvtools.partition import RULES

if TYPE_CHECKING:
    import ssl

KEYS_AT_ONCE = 65536
VALUES_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class Options:
    """How a client asks. Times are in seconds.

    Attributes:
        timeout: how long a call of the client may take in all: retries, shards and everything.
        connect_timeout: how long a connection may take to come about.
        attempt_timeout: after how long without an answer another attempt is made; None: never.
        retries: how many more attempts there are after a failed one. Lookups change nothing, so each may be repeated:
            when a connection fails, and when a server says 429, 502, 503 or 504.
        backoff: how long to wait before a retry of the same server, doubled each time up to `backoff_limit`; what is
            waited is drawn from the upper half of that. Another replica is tried at once.
        backoff_limit: see `backoff`.
        hedge: after how long without an answer a second replica is asked, too; the first answer counts. "p95": as long
            as 95 of 100 answers took lately. None: never. At most one call in ten is hedged, over time.
        rest: how long a replica that could not be reached is left alone while there are others.
        max_idle: how many unused connections to a replica are kept.
        idle: how long one is kept: less than the server's keep-alive.
        at_once: how many requests of one call are under way at a time.
        max_keys: how many keys go into one request, if the server does not say less.
        max_answer_bytes: the longest answer that is taken.
        api_key: sent as `Authorization: Bearer`.
        tls: the context for https; None: the system's certificates, or those in `ca_file`.
        ca_file: certificates to trust in place of the system's.
        rule: which shard has a key: a rule of `kvtools.partition`.
        shard_down: what a shard that does not answer gives: an "error", or "missing" rows.
        model: which model of the servers to ask, where they serve several; None: the only one that has the table.
        export: the `export` of a `kvtools.client.SplitModel`: rows of it are given, and of no other.
    """

    timeout: float = 10.0
    connect_timeout: float = 1.0
    attempt_timeout: float | None = None
    retries: int = 2
    backoff: float = 0.05
    backoff_limit: float = 1.0
    hedge: float | Literal["p95"] | None = None
    rest: float = 1.0
    max_idle: int = 16
    idle: float = 55.0
    at_once: int = 16
    max_keys: int = KEYS_AT_ONCE
    max_answer_bytes: int = 1 << 31
    api_key: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    ca_file: str | None = None
    rule: str = "floor_mod"
    shard_down: Literal["error", "missing"] = "error"
    model: str | None = None
    export: str | None = None

    def __post_init__(self) -> None:
        for name in ("timeout", "connect_timeout", "attempt_timeout", "hedge"):
            seconds = getattr(self, name)
            if (seconds is None and name in ("attempt_timeout", "hedge")) or (name == "hedge" and seconds == "p95"):
                continue
            if not _is_number(seconds) or not 0 < seconds < math.inf:
                expected = 'seconds, "p95" or None' if name == "hedge" else "seconds above 0"
                raise UsageError(f"making a client: got {name}={seconds!r}, expected {expected}")
        for name in ("backoff", "backoff_limit", "rest", "idle"):
            seconds = getattr(self, name)
            if not _is_number(seconds) or not 0 <= seconds < math.inf:
                raise UsageError(f"making a client: got {name}={seconds!r}, expected 0 or more")
        for name, least in (("retries", 0), ("max_idle", 0), ("at_once", 1), ("max_keys", 1), ("max_answer_bytes", 1)):
            number = getattr(self, name)
            if not isinstance(number, Integral) or isinstance(number, bool) or number < least:
                raise UsageError(f"making a client: got {name}={number!r}, expected an integer, {least} or more")
        if self.rule not in RULES:
            raise UsageError(f"making a client: got rule={self.rule!r}, expected one of {', '.join(RULES)}")
        if self.shard_down not in ("error", "missing"):
            raise UsageError(f"making a client: got shard_down={self.shard_down!r}, expected 'error' or 'missing'")
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise UsageError(f"making a client: got model={self.model!r}, expected the name of a model")
        if self.export is not None and not (isinstance(self.export, str) and re.fullmatch("[0-9A-Za-z]+", self.export)):
            raise UsageError(f"making a client: got export={self.export!r}, expected the export of a SplitModel")
        if self.api_key is not None and not isinstance(self.api_key, str):
            raise UsageError(f"making a client: the api_key is {type(self.api_key).__name__}, expected text")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise UsageError(
                "making a client: the api_key has characters that no header may have; check it for line ends"
            )


class OptionArguments(TypedDict, total=False):
    """The options as keyword arguments of a client; see `Options`."""

    timeout: float
    connect_timeout: float
    attempt_timeout: float | None
    retries: int
    backoff: float
    backoff_limit: float
    hedge: float | Literal["p95"] | None
    rest: float
    max_idle: int
    idle: float
    at_once: int
    max_keys: int
    max_answer_bytes: int
    api_key: str | None
    tls: ssl.SSLContext | None
    ca_file: str | None
    rule: str
    shard_down: Literal["error", "missing"]
    model: str | None
    export: str | None


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
