"""Servers that have the same rows: which one is asked next, which one rests, and how fast they answer."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections import deque
from collections.abc import Collection, Sequence

from kvtools.client.endpoint import Endpoint

_LOG = logging.getLogger("kvtools.client")
_LATENCIES = 256
_ENOUGH_LATENCIES = 64
_HEDGES_SAVED = 10.0
_HEDGES_PER_CALL = 0.1


class Replica:
    """One server. `checked`: it was found to be what it should be, when its models had `versions`; see `Session`.

    `answered_at` is when it last answered anything, and `abandoned` how many requests in a row nobody waited for any
    more since then. `away`: the log says that others are asked in its place.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.under_way = 0
        self.rests_until = -math.inf
        self.checked = False
        self.versions: dict[str | None, int] = {}
        self.misses = 0
        self.generation = 0
        self.answered_at = -math.inf
        self.abandoned = 0
        self.away = False

    def forget(self) -> None:
        """Note that another server may be there now, or another version."""
        self.checked = False
        self.misses = 0
        self.generation += 1

    def __repr__(self) -> str:
        return f"Replica({self.endpoint.shown})"


class Replicas:
    """The replicas of one shard, whose `name` is for messages; any thread.

    The one with the fewest requests under way is asked, in turn where they are equal. One that failed rests.
    """

    def __init__(self, endpoints: Sequence[Endpoint], name: str = "") -> None:
        self.name = name
        self.all = [Replica(endpoint) for endpoint in endpoints]
        self._turn = itertools.count()
        self._lock = threading.Lock()
        self._latencies: deque[float] = deque(maxlen=_LATENCIES)
        self._hedges = _HEDGES_SAVED
        self._answers = 0
        self._p95: float | None = None

    def only(self, replica: Replica) -> Replicas:
        """Return a group of this replica alone, whose state it shares."""
        alone = Replicas([], self.name)
        alone.all = [replica]
        return alone

    @property
    def shown(self) -> str:
        """The name and the URLs, for messages."""
        urls = " and ".join(replica.endpoint.shown for replica in self.all)
        return f"{self.name} ({urls})" if self.name else urls

    def take(self, now: float, tried: Collection[Replica] = ()) -> Replica:
        """Return the replica to ask: one not tried yet if one is up, else any that is, else the first to be."""
        with self._lock:
            turn = next(self._turn)
            order = [self.all[(turn + i) % len(self.all)] for i in range(len(self.all))]
            up = [replica for replica in order if replica.rests_until <= now]
            fresh = [replica for replica in up if replica not in tried]
            if up:
                chosen = min(fresh or up, key=lambda replica: replica.under_way)
            else:
                chosen = min(order, key=lambda replica: replica.rests_until)
            chosen.under_way += 1
            return chosen

    def take_for_hedge(self, now: float, tried: Collection[Replica]) -> Replica | None:
        """Return another replica that is up, or None: there is none, or too many calls were hedged."""
        with self._lock:
            others = [replica for replica in self.all if replica not in tried and replica.rests_until <= now]
            if not others or self._hedges < 1:
                return None
            self._hedges -= 1
            chosen = min(others, key=lambda replica: replica.under_way)
            chosen.under_way += 1
            return chosen

    def has_other(self, now: float, tried: Collection[Replica]) -> bool:
        """Tell whether a replica that was not tried is up."""
        return any(replica not in tried and replica.rests_until <= now for replica in self.all)

    def release(self, replica: Replica) -> None:
        """Note that a request is over."""
        with self._lock:
            replica.under_way -= 1

    def rest(self, replica: Replica, until: float) -> None:
        """Leave a replica alone until then, while there are others."""
        with self._lock:
            replica.rests_until = max(replica.rests_until, until)

    def failed(self, replica: Replica, until: float, why: str) -> None:
        """Leave a replica that failed alone until then, and say so in the log: nobody else may notice."""
        self.rest(replica, until)
        self._note_away(replica, why)

    def _note_away(self, replica: Replica, why: str) -> None:
        if len(self.all) > 1 and not replica.away:  # Where it is the only one, the call says so.
            replica.away = True
            _LOG.warning("%s does not answer (%s): its replicas are asked in its place", replica.endpoint.shown, why)

    def lives(self, replica: Replica, now: float) -> None:
        """Note that a replica said something, if only that it is busy."""
        with self._lock:
            replica.answered_at, replica.abandoned = now, 0

    def abandoned(self, replica: Replica, since: float, until: float, patience: int) -> None:
        """Note that nobody waits any more for the answer to a request that began at `since`.

        If the replica answered nothing else since then it may hang, or be gone without a word. It is forgotten, as its
        connection is closed, and rests until `until` if this is the `patience`th time in a row: one that is merely
        slower than another now and then does not, which would leave nobody to hedge with.
        """
        with self._lock:
            if replica.answered_at >= since:
                return
            replica.abandoned += 1
            hangs = replica.abandoned >= patience
            if hangs:
                replica.rests_until = max(replica.rests_until, until)
        replica.forget()
        if hangs:
            self._note_away(
                replica, "a request was given up" if patience == 1 else f"{patience} requests were given up"
            )

    def answered(self, replica: Replica, seconds: float) -> None:
        """Note an answer, and how long it took."""
        with self._lock:
            replica.rests_until = -math.inf
            self._latencies.append(seconds)
            self._answers += 1
            self._hedges = min(_HEDGES_SAVED, self._hedges + _HEDGES_PER_CALL)
            if self._answers % _ENOUGH_LATENCIES == 0:
                self._p95 = sorted(self._latencies)[len(self._latencies) * 95 // 100]
        if replica.away:
            replica.away = False
            _LOG.warning("%s answers again", replica.endpoint.shown)

    @property
    def p95(self) -> float | None:
        """How long 95 of 100 answers took at most, lately; None before there are enough of them."""
        return self._p95
