"""Starts Python scripts at once: as forks of a process that has imported TensorFlow, Horovod and the plugin already.

The imports take some seven seconds of a processor, and a test of ranks starts a process for each. Here one process
imports, once in a run of pytest, does nothing else, and forks. A fork is a process of its own from there: it starts
Horovod and TensorFlow's devices by itself, in the environment that it was given. Nothing has run in TensorFlow before
the fork, and there is one thread then.

    process = start(script, arguments, environment, output)
    while process.poll() is None: ...
"""

from __future__ import annotations

import atexit
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

IMPORTED = ("pytest", "hypothesis", "tensorflow", "tf_keras", "tfplugin.sok", "tfplugin.dynamic_embedding")


class ForkedProcess:
    """A script that runs in a fork."""

    def __init__(self, pid: int, ended: Path) -> None:
        self.pid = pid
        self._ended = ended
        self._status: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        if self._status is None and self._ended.exists():
            status, cpu = self._ended.read_text().split()
            self._status = int(status)
            _cpu["ended"] += float(cpu)
        return self._status


#: CPU seconds of the forks that were seen to end, and of the process that forks, which are no children of pytest's.
_cpu = {"ended": 0.0, "server": 0.0}


def cpu_seconds() -> float:
    """What has been used here, so far."""
    return sum(_cpu.values())


class _Server:
    """The process that forks, seen from pytest's."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fork-server-"))
        self._count = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self._process.terminate)

    def start(
        self, script: Path, arguments: Sequence[str], environment: Mapping[str, str], output: Path
    ) -> ForkedProcess:
        self._count += 1
        ended = self._folder / str(self._count)
        request = {
            "script": str(script),
            "arguments": list(arguments),
            "environment": dict(environment),
            "output": str(output),
            "ended": str(ended),
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that starts ranks has ended: see what it printed")
        pid, cpu = answer.split()
        _cpu["server"] = float(cpu)
        return ForkedProcess(int(pid), ended)


_server: _Server | None = None


def start(script: Path, arguments: Sequence[str], environment: Mapping[str, str], output: Path) -> ForkedProcess:
    """Run a script in a fork, in an environment, with what it prints going to a file.

    The first call starts the process that forks; what the imports read of its environment (TensorFlow's log level, the
    accelerators, threads) stays for all.
    """
    global _server
    if _server is None:
        _server = _Server(environment)
    return _server.start(script, arguments, environment, output)


# ---- In the process that forks ---------------------------------------------------------------------------------------


def serve() -> None:
    """Fork for each request until there are no more. In a fork it returns only when the script has ended."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed is no answer
    for module in IMPORTED:
        importlib.import_module(module)
    if importlib.util.find_spec("horovod") is not None:
        importlib.import_module("horovod.tensorflow")
    if threading.active_count() > 1:
        raise RuntimeError(f"threads run before the fork: {threading.enumerate()}")
    gc.freeze()  # no fork looks at what was imported, to find that it is no garbage
    running: dict[int, Path] = {}
    pending = b""
    while True:
        _note_ended(running)
        if not select.select([0], [], [], 0.02 if running else None)[0]:
            continue
        read = os.read(0, 1 << 20)
        if not read:
            break
        *requests, pending = (pending + read).split(b"\n")
        for text in requests:
            request = json.loads(text)
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                _run(request)
            running[pid] = Path(request["ended"])
            answers.write(f"{pid} {time.process_time()}\n")
            answers.flush()
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def _note_ended(running: dict[int, Path]) -> None:
    while running:
        pid, status, used = os.wait4(-1, os.WNOHANG)
        if pid == 0:
            return
        ended = running.pop(pid)
        fresh = ended.with_suffix(".new")
        fresh.write_text(f"{os.waitstatus_to_exitcode(status)} {used.ru_utime + used.ru_stime}")
        fresh.replace(ended)


def _run(request: dict[str, object]) -> None:
    """The script, from its first line to the end of the process."""
    os.setsid()
    output = os.open(str(request["output"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, file in ((0, nothing), (1, output), (2, output)):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(request["environment"])  # type: ignore[call-overload]
    script = str(request["script"])
    sys.argv = [script, *request["arguments"]]  # type: ignore[misc]
    sys.path[0] = str(Path(script).parent)
    status = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    serve()
