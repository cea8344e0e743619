"""Two workers under a supervisor: the second one dies once, and ends the server when it has come again.

    python supervised_workers.py HOW

The exit status is 0 if the first worker has lived all the time, and nothing of what was opened is left.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvtools.errors import BadInputError, KvtoolsError
from kvtools.server import workers
from kvtools.server.workers import Supervisor

FAILURES = 3

HOW = sys.argv[1]
begun: list[int] = []  # the first worker, as each is forked
failed: list[int] = []  # descriptors that were open when one could not be


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def failing(real: Callable[[], Any], error: Exception) -> Callable[[], Any]:
    def call() -> Any:
        if len(begun) == 2 and len(failed) < FAILURES:
            failed.append(descriptors())
            raise error
        return real()

    return call


def fork() -> int:
    begun.append(supervisor._workers[0].pid)
    return real_fork()


def work(listener: socket.socket, alive: int, answers: Callable[[str], None]) -> None:
    if len(begun) == 2:
        if HOW == "signal":
            os.kill(os.getpid(), signal.SIGRTMIN + 5)
        if HOW == "print":
            print("what nobody reads")
        raise KvtoolsError("it dies")
    answers("here")
    if len(begun) > 2:
        os.kill(os.getppid(), signal.SIGTERM)
    os.read(alive, 1)  # until it is ended


def listen() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


workers._FIRST_DELAY = workers._LONGEST_DELAY = 0.001
logging.basicConfig(format="%(message)s")
real_fork = os.fork
os.fork = fork
if HOW == "listen":
    workers._FIRST_DELAY = workers._LONGEST_DELAY = 1.01  # its socket is closed meanwhile
    FAILURES = 1
    listen = failing(listen, BadInputError("listening on 127.0.0.1: Address already in use"))
elif HOW == "fork":
    os.fork = failing(fork, OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)))
elif HOW == "pipe":
    os.pipe = failing(os.pipe, OSError(errno.EMFILE, os.strerror(errno.EMFILE)))
supervisor = Supervisor(2, 30.0, listen, work, lambda line: None, lambda: None)
if HOW == "often":
    supervisor._workers[1].short_lives = 1024
status = supervisor.run()
assert len(begun) == 3 and begun[1] == begun[2] > 0, "the second worker alone was started again"
assert len(failed) in (0, FAILURES) and len(set(failed)) <= 1, f"descriptors that stay open: {failed}"
os._exit(status)  # what cannot be flushed shall not count
