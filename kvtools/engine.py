"""Run the same function over many shards: one after the other, on threads, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from kvtools.errors import BadInputError, MissingDependencyError, UsageError

Engine = Literal["local", "ray"]
_AHEAD = 256
"""How many tasks may have begun before the first of their results is taken: there may be more than fit in memory."""
T = TypeVar("T")
R = TypeVar("R")


def default_workers() -> int:
    """Return how many shards to work on at once when nobody says: the processors that this process may use."""
    return len(os.sched_getaffinity(0))


def run_all(
    function: Callable[[T], R],
    tasks: Sequence[T],
    *,
    workers: int | None = None,
    engine: Engine = "local",
    stop: threading.Event | None = None,
) -> Iterator[R]:
    """Yield `function(task)` for each task, in their order, working on several at once.

    Work goes on while a result is looked at, some hundreds of tasks ahead and no more: their results are held.

    Args:
        function: a function of a module; with Ray, it and the tasks are pickled.
        tasks: what to work on.
        workers: how many at once; the processors there are if None.
        engine: "local" threads, or "ray": the cluster that RAY_ADDRESS names, else one on this machine.
        stop: set when no more results are wanted, after an error or an interrupt: a thread in a long task that looks
            at it can end early, and is waited for no longer than that.

    Raises:
        UsageError: fewer than one worker, or an unknown engine.
        MissingDependencyError: Ray is asked for and not installed.
        KvtoolsError: whatever the function raised; tasks that had not begun are dropped.

    >>> list(run_all(abs, [-1, 2], workers=2))
    [1, 2]
    """
    if workers is not None and workers < 1:
        raise UsageError(f"got {workers} workers, expected 1 or more")
    if engine == "ray":
        yield from _run_on_ray(function, tasks, workers)
        return
    if engine != "local":
        raise UsageError(f"got engine '{engine}', expected local or ray")
    workers = min(workers or default_workers(), len(tasks))
    if workers <= 1:
        yield from map(function, tasks)
        return
    pool = ThreadPoolExecutor(workers, thread_name_prefix="kvtools")
    running = _Running(function)
    try:
        waiting = iter(tasks)
        begun = deque(pool.submit(running, task) for task in itertools.islice(waiting, max(_AHEAD, 2 * workers)))
        while begun:
            result = begun.popleft().result()
            begun.extend(pool.submit(running, task) for task in itertools.islice(waiting, 1))
            yield result
            del result
    finally:
        if stop is not None:
            stop.set()
        try:
            pool.shutdown(cancel_futures=True)
        finally:
            running.end()


class _Running(Generic[T, R]):
    """A function of tasks that can be waited for.

    A pool does not know, and does not wait for, a thread that it was starting when Ctrl-C came: such a thread would
    write on in what the caller has closed.
    """

    def __init__(self, function: Callable[[T], R]) -> None:
        self._function = function
        self._changed = threading.Condition()
        self._calls = 0
        self._ended = False

    def __call__(self, task: T) -> R:
        with self._changed:
            if self._ended:
                raise CancelledError
            self._calls += 1
        try:
            return self._function(task)
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Return when no call goes on, and let none begin."""
        with self._changed:
            self._ended = True
            self._changed.wait_for(lambda: not self._calls)


@contextlib.contextmanager
def started(engine: Engine) -> Iterator[None]:
    """Have an engine ready for all calls of `run_all` inside the block, instead of for each one anew.

    The block joins the Ray cluster there is (of this process, or the one that RAY_ADDRESS names) or starts one on this
    machine; in the end it stops what it started and leaves what was there as it was.
    """
    if engine != "ray":
        yield
        return
    ray = _ray()
    if ray.is_initialized():
        yield
        return
    log = logging.getLogger("ray")
    level = log.level
    log.setLevel(logging.ERROR)
    address = os.environ.get("RAY_ADDRESS")
    try:
        with _away():
            _join(ray, address) if address else _start(ray)
    except (OSError, RuntimeError, ValueError) as error:
        where = f"the cluster at '{address}' (RAY_ADDRESS)" if address else "a cluster on this machine"
        # Ray says of a token that is missing what it says of a cluster that is not there.
        told = "RAY_AUTH_MODE" in os.environ or not address
        token = "" if told else "; where the cluster wants a token, set RAY_AUTH_MODE=token"
        raise BadInputError(f"running on Ray: {where} did not answer: {error}; see `ray status`{token}") from error
    try:
        yield
    finally:
        ray.shutdown()
        log.setLevel(level)


@contextlib.contextmanager
def _away() -> Iterator[None]:
    """Be in another folder: Ray looks for modules in the folder where it is started before it looks anywhere else.

    There may be a folder `kvtools` of something else in it, this package's sources for one.
    """
    here = Path.cwd()
    os.chdir(tempfile.gettempdir())
    try:
        yield
    finally:
        os.chdir(here)


def _join(ray: Any, address: str) -> None:
    ray.init(address=address, log_to_driver=False, configure_logging=False)


def _start(ray: Any) -> None:
    # Tasks and results are small: rows go from file to file, not through Ray's memory.
    ray.init(
        address="local",
        num_cpus=default_workers(),
        include_dashboard=False,
        object_store_memory=128 << 20,
        log_to_driver=False,
        configure_logging=False,
    )


def _run_on_ray(function: Callable[[T], R], tasks: Sequence[T], workers: int | None) -> Iterator[R]:
    ray = _ray()
    with started("ray"):
        # What a task did to a file is not undone: one that failed is an error, not to be tried again.
        remote: Any = ray.remote(max_retries=0)(function)
        waiting = iter(enumerate(tasks))
        running: dict[Any, int] = {}
        done: dict[int, R] = {}

        def start() -> None:
            for number, task in itertools.islice(waiting, 1):
                running[remote.remote(task)] = number

        # No more are handed over than can run: when one fails, those that run are left to their end (a cluster that
        # `started` joined ends them), since Ray 2 may bring the whole process down when a task is cancelled that
        # is about to end.
        limit = workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        for _ in range(min(limit, len(tasks))):
            start()
        for number in range(len(tasks)):
            while number not in done:
                (ready,), _ = ray.wait(list(running), num_returns=1)
                done[running.pop(ready)] = _ray_result(ray, ready)
                start()
            yield done.pop(number)


def _ray() -> Any:
    # Read when Ray is imported: it is to tell nobody, and to leave the devices alone.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise MissingDependencyError(
            "running on Ray: it is not installed; run `pip install 'kvtools[ray]'`, or leave --engine out"
        ) from None
    return ray


def _ray_result(ray: Any, task: Any) -> Any:
    try:
        return ray.get(task)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except ray.exceptions.RayError as error:
        raise BadInputError(
            f"running on Ray: a worker was lost ({type(error).__name__}); see `ray status` and the memory of its node"
        ) from error
