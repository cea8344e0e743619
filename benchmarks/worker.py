"""One library in one process: does the work it is told to, and says how long it took.

Reads a JSON object a line, answers each with one. The harness (`turns.py`) starts one worker per library and lets only
one of them work at a time.

    {"do": "prepare", "side": "kv", "work": "lookup", "case": {...}}   -> {"check": 0.5}
    {"do": "run", "side": "kv", "calls": 16}                           -> {"seconds": 0.021}
    {"do": "evaluate", "side": "kv"}                                   -> {...}
    {"do": "drop", "side": "kv"}                                       -> {}

An answer {"error": "..."} leaves the worker ready for the next line. Runs in TFRA's environment too, so it needs
nothing but TensorFlow, NumPy and the library.

With --socket it is one rank of several that `horovodrun` started (`horovod_ranks.py`), and the lines go over that
socket: ranks have no standard input of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import socket
import sys
import time
import traceback
from typing import Any, TextIO

LIBRARIES = ("kv", "de", "dense", "tfra")


def answer(request: dict[str, Any], library: Any, open_sides: dict[str, Any]) -> dict[str, Any]:
    """Does what one line asks for."""
    side = request["side"]
    if request["do"] == "prepare":
        work = importlib.import_module(f"work.{request['work']}")
        stack = contextlib.ExitStack()
        prepared = stack.enter_context(work.prepare(library, request["case"]))
        open_sides[side] = stack, prepared
        return {"check": prepared.check}
    if request["do"] == "run":
        step = open_sides[side][1].step
        start = time.perf_counter()
        for _ in range(request["calls"]):
            step()
        return {"seconds": time.perf_counter() - start}
    if request["do"] == "evaluate":
        return open_sides[side][1].evaluate()
    if request["do"] == "drop":
        if side in open_sides:
            open_sides.pop(side)[0].close()
        gc.collect()
        return {}
    raise ValueError(f"worker: no request called {request['do']!r}")


def channel(address: str | None) -> tuple[TextIO, TextIO]:
    """Where requests come from, and where answers go."""
    if address is None:
        # What libraries print must not come between the answers.
        answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        return sys.stdin, answers
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return connection.makefile("r"), os.fdopen(os.dup(connection.fileno()), "w", buffering=1)


def join_ranks() -> dict[str, Any]:
    """Waits for the other ranks, and says which one this is."""
    import horovod
    import horovod.tensorflow as hvd

    from tfplugin import sok

    hvd.init()
    sok.init()
    return {"rank": hvd.rank(), "horovod": horovod.__version__}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", choices=LIBRARIES, required=True)
    parser.add_argument("--threads", type=int, default=2, help="of TensorFlow's two pools, each")
    parser.add_argument("--socket", help="of the harness, to a rank")
    args = parser.parse_args()

    requests, answers = channel(args.socket)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    if args.library == "tfra":
        os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    library = importlib.import_module(f"libraries.{args.library}").Library(args.threads)
    hello = {"versions": library.versions()}
    if args.socket is not None:
        hello.update(join_ranks())
    print(json.dumps(hello), file=answers)

    open_sides: dict[str, Any] = {}
    for line in requests:
        try:
            reply = answer(json.loads(line), library, open_sides)
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"[:2000]}
        print(json.dumps(reply), file=answers)


if __name__ == "__main__":
    main()
