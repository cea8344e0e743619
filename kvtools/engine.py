"""Run the same function over many shards: one after the other, on threads, or on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from kvtools.errors import MissingDependencyError, UsageError

Engine = Literal["local", "ray"]
T = TypeVar("T")
R = TypeVar("R")


def default_workers() -> int:
    """Return how many shards to work on at once when nobody says: the processors that this process may use."""
    return len(os.sched_getaffinity(0))


def run_all(
    function: Callable[[T], R], tasks: Sequence[T], *, workers: int | None = None, engine: Engine = "local"
) -> Iterator[R]:
    """Yield `function(task)` for each task, in their order, working on several at once.

    Args:
        function: a function of a module; with Ray, it and the tasks are pickled.
        tasks: what to work on.
        workers: how many at once; the processors there are if None.
        engine: "local" threads, or "ray": the cluster that RAY_ADDRESS names, else one on this machine.

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
    try:
        yield from pool.map(function, tasks)
    finally:
        pool.shutdown(cancel_futures=True)


def _run_on_ray(function: Callable[[T], R], tasks: Sequence[T], workers: int | None) -> Iterator[R]:
    try:
        import ray
    except ImportError:
        raise MissingDependencyError(
            "running on Ray: it is not installed; run `pip install 'kvtools[ray]'`, or leave --engine out"
        ) from None
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False, configure_logging=False)
    remote: Any = ray.remote(function)
    pending: list[Any] = []
    waiting = iter(tasks)
    limit = workers or len(tasks)
    for task in waiting:
        pending.append(remote.remote(task))
        if len(pending) >= limit:
            break
    while pending:
        try:
            result = ray.get(pending.pop(0))
        except ray.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, Exception) else error) from None
        for task in waiting:
            pending.append(remote.remote(task))
            break
        yield result
