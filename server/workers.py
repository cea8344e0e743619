"""Several processes that serve on one port, and a supervisor that keeps them alive.

Every worker has a listening socket of its own on the same port (SO_REUSEPORT), among which the kernel spreads new
connections. All map the same files, so rows are in memory once. The supervisor makes the sockets and forks the workers;
it serves nothing and holds no rows, so that nothing that a request does can bring it down. It keeps the sockets: when a
worker dies, connections that it had not accepted yet wait for the one that takes its place.

A worker that ends unasked is started again, at once; one that keeps dying within seconds is started ever later, up to
every 30 s, and its socket is closed meanwhile, so that nobody waits on it. So is one that cannot be started again, for
want of memory or descriptors, or of its port: the others go on. SIGHUP goes on to all workers. SIGTERM and
SIGINT have all of them end as `process.py` says; who has not ended soon after the time of grace is killed. Workers end
when the supervisor is killed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from kvtools.errors import KvtoolsError, one_line
from kvtools.server.settings import SAME_SIGNAL
from kvtools.server.terminal import has_terminal

log = logging.getLogger("kvtools.serve")

_SIGNALS = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
_SHORT_LIFE = 5.0
_FIRST_DELAY = 0.1
_LONGEST_DELAY = 30.0
_MOST_DOUBLINGS = 16  # of the first delay: it is far beyond the longest one then
_AFTER_GRACE = 5.0


@dataclass
class _Worker:
    slot: int
    listener: socket.socket | None
    pid: int = 0  # 0: does not run
    ready: int = -1  # the read end of the pipe on which it tells that it answers
    started: float = 0.0
    due: float = 0.0  # when to start it again
    short_lives: int = 0
    answers: bool = False


class Supervisor:
    """Keeps `count` workers running until it is told to end.

    Args:
        count: how many workers.
        grace: how long a worker may take to end, in s.
        listen: makes a bound socket for a worker.
        work: runs a worker: given its socket, the read end of a pipe that closes when the supervisor dies, and a
            function to call with a line of text as soon as it answers. What it raises ends the worker.
        on_ready: called once, with the line of the first worker, when all answer.
        prepare: called after the first worker was forked, to import what later ones need.
    """

    def __init__(
        self,
        count: int,
        grace: float,
        listen: Callable[[], socket.socket],
        work: Callable[[socket.socket, int, Callable[[str], None]], None],
        on_ready: Callable[[str], None],
        prepare: Callable[[], object],
    ) -> None:
        self._grace = grace
        self._listen = listen
        self._work = work
        self._on_ready = on_ready
        self._prepare = prepare
        self._workers = [_Worker(slot, None) for slot in range(count)]
        self._starting = set(range(count))  # slots that have not answered yet, of the first workers
        self._line = ""
        self._alive, self._alive_end = os.pipe()

    def run(self) -> int:
        """Run until SIGTERM or SIGINT; returns the exit status: that of the first worker, if it cannot begin."""
        had_terminal = has_terminal()
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            # The first one alone: what it has prepared the others find, and what keeps it from starting is told once.
            self._start(self._workers[0])
            self._prepare()
            while True:
                due = [worker.due for worker in self._workers if not worker.pid and worker.due]
                wait = max(0.0, min(due) - time.monotonic()) if due else 3600.0
                received = signal.sigtimedwait(_SIGNALS, wait)
                number = received.si_signo if received else 0
                closed = number == signal.SIGHUP and had_terminal and not has_terminal()
                if number in (signal.SIGTERM, signal.SIGINT) or closed:
                    log.info("got %s: ending; requests in hand get %g s", signal.Signals(number).name, self._grace)
                    return self._end()
                if number == signal.SIGHUP:
                    self._tell(signal.SIGHUP)
                self._hear()
                for worker, status in self._reap():
                    if worker.slot == 0 and 0 in self._starting:
                        return status if status > 0 else 128 - status
                    self._plan(worker, status)
                for worker in self._workers:
                    if not worker.pid and worker.due and worker.due <= time.monotonic():
                        self._start_again(worker)
        finally:
            self._tell(signal.SIGKILL)
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)

    def _start(self, worker: _Worker) -> None:
        if worker.listener is None:
            worker.listener = self._listen()
        if worker.ready >= 0:
            os.close(worker.ready)
            worker.ready = -1
        worker.ready, tell = os.pipe()
        os.set_blocking(worker.ready, False)
        worker.started, worker.answers = time.monotonic(), False
        _flush()
        try:
            worker.pid = os.fork()
        except OSError:
            os.close(tell)
            raise
        if worker.pid:
            os.close(tell)
            worker.due = 0.0
            return
        status = 1
        try:
            self._become(worker, tell)
            status = 0
        except KvtoolsError as error:
            print(f"kvtools: {one_line(str(error))}", file=sys.stderr)
            status = error.exit_code
        except BaseException:
            traceback.print_exc()
        finally:
            _flush()
            os._exit(status)

    def _start_again(self, worker: _Worker) -> None:
        try:
            self._start(worker)
        except (OSError, KvtoolsError) as error:
            worker.short_lives += 1
            delay = self._put_off(worker)
            log.error(
                "worker %d cannot be started: %s; tried again in %.1f s", worker.slot, one_line(str(error)), delay
            )

    def _become(self, worker: _Worker, tell: int) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.close(self._alive_end)
        for other in self._workers:
            if other is not worker and other.listener is not None:
                other.listener.close()
        supervisor = os.getppid()

        def answers(line: str) -> None:
            os.write(tell, line.encode() + b"\n")
            os.close(tell)
            os.kill(supervisor, signal.SIGUSR1)

        assert worker.listener is not None
        self._work(worker.listener, self._alive, answers)

    def _hear(self) -> None:
        """Take in which workers answer now; start the others after the first one."""
        for worker in self._workers:
            if not worker.pid or worker.answers:
                continue
            try:
                line = os.read(worker.ready, 65536).decode().strip()
            except BlockingIOError:
                continue
            if not line:
                continue
            worker.answers = True
            if worker.slot not in self._starting:
                took = time.monotonic() - worker.started
                log.info("worker %d answers again, as process %d, after %.1f s", worker.slot, worker.pid, took)
                continue
            self._starting.discard(worker.slot)
            if worker.slot == 0:
                self._line = line
                for other in self._workers[1:]:
                    self._start(other)
            if not self._starting:
                self._on_ready(self._line)

    def _reap(self) -> list[tuple[_Worker, int]]:
        """Return the workers that have ended, with their exit status, negative for a signal."""
        ended = []
        by_pid = {worker.pid: worker for worker in self._workers if worker.pid}
        while by_pid:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            if worker := by_pid.pop(pid, None):
                worker.pid = 0
                ended.append((worker, os.waitstatus_to_exitcode(status)))
        return ended

    def _plan(self, worker: _Worker, status: int) -> None:
        lived = time.monotonic() - worker.started
        worker.short_lives = worker.short_lives + 1 if lived < _SHORT_LIFE else 0
        delay = self._put_off(worker)
        how = f"by {_name(-status)}" if status < 0 else f"with status {status}"
        log.error("worker %d ended %s after %.1f s; another begins in %.1f s", worker.slot, how, lived, delay)

    def _put_off(self, worker: _Worker) -> float:
        """Say when to start a worker again; returns in how many seconds."""
        doublings = min(worker.short_lives - 1, _MOST_DOUBLINGS)
        delay = min(_LONGEST_DELAY, _FIRST_DELAY * 2**doublings) if worker.short_lives else 0.0
        worker.due = time.monotonic() + delay
        if delay > 1 and worker.listener is not None:
            worker.listener.close()
            worker.listener = None
        return delay

    def _tell(self, number: signal.Signals) -> None:
        for worker in self._workers:
            if worker.pid:
                os.kill(worker.pid, number)

    def _end(self) -> int:
        for worker in self._workers:
            if worker.listener is not None:
                worker.listener.close()
        self._tell(signal.SIGTERM)
        began = time.monotonic()
        last = began + self._grace + _AFTER_GRACE
        self._reap()
        while any(worker.pid for worker in self._workers) and (left := last - time.monotonic()) > 0:
            received = signal.sigtimedwait(_SIGNALS, left)
            number = received.si_signo if received else 0
            if number in (signal.SIGTERM, signal.SIGINT) and time.monotonic() >= began + SAME_SIGNAL:  # the second one
                self._tell(signal.SIGKILL)
                return 128 + number
            self._reap()
        late = [worker.slot for worker in self._workers if worker.pid]
        if late:
            log.error("workers %s did not end within %g s; killed", late, self._grace + _AFTER_GRACE)
        log.info("ended")
        return 1 if late else 0


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it any more
            stream.flush()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most of the real-time signals have none
        return f"signal {number}"
