"""One request, from the first attempt to an answer or an error: retries, time limits, hedging.

A call does nothing by itself. Whoever moves the bytes, in threads or on an event loop, asks it what is due, and tells
it what happened; `wake` is when to ask again at the latest. So the rules are here once, and a test needs no clock.
"""

from __future__ import annotations

import email.utils
import math
import random
import time
from dataclasses import dataclass

from kvtools.client.errors import MORE_TIME, BadAnswerError, ClientError, TimeLimitError, UnavailableError
from kvtools.client.http_answer import Answer, Request
from kvtools.client.options import Options
from kvtools.client.replicas import Replica, Replicas

BUSY = frozenset({429, 502, 503, 504})

_LOST_HEDGES = 3
"""How often in a row another replica may be faster before one that answers nobody rests."""


@dataclass(eq=False)
class Attempt:
    """A request that is under way. `connected` is set by whoever connects; `fresh`: on no connection that was idle.

    `generation` is the replica's at its start.
    """

    replica: Replica
    started: float
    fresh: bool = False
    generation: int = 0
    connected: bool = False


class Call:
    """A request that any of `replicas` may answer, until `deadline` (of `time.monotonic`).

    `what` says in messages what is asked for; None: the target of the request.
    When `done`, either `answer` and `replica` are there or `error` is. `stopped` are attempts whose connections are to
    be closed: their answers are not wanted any more.
    """

    def __init__(
        self, request: Request, replicas: Replicas, options: Options, deadline: float, what: str | None = None
    ) -> None:
        self.request = request
        self.replicas = replicas
        self.deadline = deadline
        self.done = False
        self.answer: Answer | None = None
        self.replica: Replica | None = None
        self.error: ClientError | None = None
        self.running: list[Attempt] = []
        self.stopped: list[Attempt] = []
        self.wake = -math.inf
        self._options = options
        self._left = 1 + options.retries
        self._rounds = 0
        self._next = -math.inf
        self._fresh = False
        self._tried: list[Replica] = []
        self._generation = 0
        self._what = request.target if what is None else what
        self._failures: dict[Replica, str] = {}
        self._of_another_kind: set[Replica] = set()
        self._retry_after: float | None = None

    @property
    def is_there_still(self) -> bool:
        """Whether what answered is surely there still: the replica was not forgotten since it was asked."""
        return self.replica is not None and self.replica.generation == self._generation

    def due(self, now: float) -> list[Attempt]:
        """Return the attempts to start now."""
        if self.done:
            return []
        if now >= self.deadline:
            error = self._time_error()
            self._abandon(now, 1)
            self._give_up(error)
            return []
        self._stop_expired(now)
        if self.done:  # The last attempt expired.
            return []
        started: list[Attempt] = []
        if not self.running and now >= self._next:
            self._left -= 1
            started.append(self._start(self.replicas.take(now, self._tried), now))
        hedge_at = self._hedge_at()
        if now >= hedge_at:
            other = self.replicas.take_for_hedge(now, [attempt.replica for attempt in self.running])
            if other is not None:
                started.append(self._start(other, now))
            else:
                hedge_at = math.inf
        expiry = min((self._expiry(attempt)[0] for attempt in self.running), default=math.inf)
        self.wake = min(self.deadline, expiry, math.inf if self.running else self._next, self._hedge_at(hedge_at))
        return started

    def answered(self, attempt: Attempt, answer: Answer, now: float) -> None:
        """Note that an answer is there."""
        self.replicas.lives(attempt.replica, now)
        if not self._end(attempt):
            return
        if answer.status in BUSY:
            wait = _retry_after(answer.headers.get("retry-after"))
            if wait is not None:
                self._retry_after = wait
            self.replicas.rest(attempt.replica, now + (self._options.backoff if wait is None else wait))
            self._after_failure(attempt.replica, f" said {answer.status}: {_one_line(answer.error()[1])}", now)
            return
        self.replicas.answered(attempt.replica, now - attempt.started)
        self.answer, self.replica, self._generation = answer, attempt.replica, attempt.generation
        self._abandon(now, _LOST_HEDGES)
        self._finish()

    def failed(self, attempt: Attempt, error: Exception, now: float, *, stale: bool = False) -> None:
        """Note that an attempt came to nothing; `stale`: the server had closed the idle connection that it went on."""
        if not self._end(attempt):
            return
        attempt.replica.forget()
        if stale:
            self._left += 1
            self._fresh = True
            self._next = now
            return
        if isinstance(error, BadAnswerError):
            self._of_another_kind.add(attempt.replica)
        why = _one_line(str(error) or type(error).__name__)
        self.replicas.failed(attempt.replica, now + self._options.rest, why)
        self._after_failure(attempt.replica, f": {why}", now)

    def refuse(self, error: ClientError, now: float) -> None:
        """End the call with an error: nobody waits for it any more."""
        self._abandon(now, _LOST_HEDGES)
        self._give_up(error)

    def _start(self, replica: Replica, now: float) -> Attempt:
        attempt = Attempt(replica, now, fresh=self._fresh, generation=replica.generation)
        self.running.append(attempt)
        if replica not in self._tried:
            self._tried.append(replica)
        return attempt

    def _end(self, attempt: Attempt) -> bool:
        if attempt not in self.running:
            return False
        self.running.remove(attempt)
        self.replicas.release(attempt.replica)
        return not self.done

    def _after_failure(self, replica: Replica, failure: str, now: float) -> None:
        self._failures.pop(replica, None)
        self._failures[replica] = replica.endpoint.shown + failure
        if self.running:
            return  # The other one of a hedged pair may still answer.
        if self._of_another_kind.issuperset(self.replicas.all):  # Asking again makes them no servers of rows.
            self._give_up(BadAnswerError(f"{self._doing()}: {self._failed()}"))
            return
        if not self._left:
            self._give_up(UnavailableError(f"{self._doing()}: {self._failed()}", self._retry_after))
            return
        if self.replicas.has_other(now, self._tried):
            self._next = now
            return
        self._tried.clear()
        wait = min(self._options.backoff_limit, self._options.backoff * 2**self._rounds) * random.uniform(0.5, 1.0)
        self._rounds += 1
        # A server that named a time is not asked before it.
        free = min(replica.rests_until for replica in self.replicas.all)
        self._next = now + wait if self._retry_after is None else max(now + wait, free)
        if self._next >= self.deadline:
            self._give_up(UnavailableError(f"{self._doing()}: {self._failed()}", self._retry_after))

    def _stop_expired(self, now: float) -> None:
        for attempt in list(self.running):
            expiry, what = self._expiry(attempt)
            if now >= expiry:
                self.stopped.append(attempt)
                self.failed(attempt, TimeoutError(what), now)

    def _expiry(self, attempt: Attempt) -> tuple[float, str]:
        limit = math.inf if self._options.attempt_timeout is None else self._options.attempt_timeout
        if not attempt.connected and self._options.connect_timeout < limit:
            return attempt.started + self._options.connect_timeout, "connecting took too long; see connect_timeout"
        return attempt.started + limit, "no answer within attempt_timeout"

    def _hedge_at(self, otherwise: float | None = None) -> float:
        if otherwise == math.inf or len(self.running) != 1 or len(self.replicas.all) < 2:
            return math.inf
        delay = self.replicas.p95 if self._options.hedge == "p95" else self._options.hedge
        return math.inf if delay is None else self.running[0].started + float(delay)

    def _time_error(self) -> TimeLimitError:
        silent = []
        if len(self.replicas.all) > 1:
            silent = [f"{attempt.replica.endpoint.shown} did not answer" for attempt in self.running]
        why = f" ({'; '.join([*self._failures.values(), *silent])})" if self._failures or silent else ""
        return TimeLimitError(
            f"{self._doing()}: no answer within {self._options.timeout:g} s{why}{MORE_TIME}",
            self._retry_after,
        )

    def _abandon(self, now: float, patience: int) -> None:
        """Note that nobody waits for the attempts that are under way any more; see `Replicas.abandoned`."""
        for attempt in self.running:
            self.replicas.abandoned(attempt.replica, attempt.started, now + self._options.rest, patience)

    def _give_up(self, error: ClientError) -> None:
        self.error = error
        self._finish()

    def _finish(self) -> None:
        self.done = True
        for attempt in self.running:
            self.replicas.release(attempt.replica)
        self.stopped += self.running
        self.running = []

    def _doing(self) -> str:
        return f"asking {self.replicas.shown} for {self._what}"

    def _failed(self) -> str:
        """Return what went wrong last at each server that was asked."""
        return "; ".join(self._failures.values())


def _retry_after(text: str | None) -> float | None:
    """Return the seconds that a Retry-After header means, at most a day; None if there is none."""
    if text is None:
        return None
    if text.isascii() and text.isdecimal() and len(text) < 10:
        return min(float(text), 86400.0)
    try:
        when = email.utils.parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None
    return min(max(0.0, when.timestamp() - time.time()), 86400.0)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
