"""A SavedModel in a process of its own, with stock TensorFlow or with tfplugin: loads it and asks it as it is told.

python -m exporting.model_process stock|tfplugin      reads a JSON object a line, answers each with one

    {"do": "load", "folder": F, "how": H, "requests": R}  -> {"seconds": 0.6, "memory": 1e8, "peak": 2e8}
    {"do": "answer", "requests": R, "batch": 1000, "output": O}  -> {}      the answers to all of R, as O, a .npy file
    {"do": "run", "requests": R, "batch": 100, "seconds": 0.5}   -> {"per_second": 812.0}

`how` is "session" (as TensorFlow Serving runs a model: inputs are fed, the signature's output is fetched), "function"
(the signature as a function, called with tensors) or "xla" (the same under `jit_compile=True`). R is a .npz file, an
array for each input of `serving_default`; requests are slices of it. To load a model is to have answered a first
request of one example. Memory is what the process then has beyond what it had before, peak the most it had meanwhile.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))

Request = tuple[Any, ...]
WARM = 3
"""Requests before time is taken."""
MOST = 1_000
"""Different requests while time is taken."""


def memory(field: str) -> int:
    """Bytes, by a line of the kernel's account of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


class Model:
    """A model that was loaded: a call, and what its inputs are called, in the order in which it takes them."""

    def __init__(self, folder: str, how: str) -> None:
        self.how = how
        (self.inputs, self.call) = (load_session if how == "session" else load_function)(folder, how)

    def requests(self, file: str, batch: int, most: int | None = None) -> list[Request]:
        """Requests of `batch` examples each, `most` at most; what is left of a file at the end is none."""
        arrays = arrays_of(file)
        count = len(arrays[self.inputs[0]]) // batch
        count = min(count, most or count)
        cut = [[arrays[name][at * batch : (at + 1) * batch] for name in self.inputs] for at in range(count)]
        if self.how == "session":
            return [tuple(request) for request in cut]
        import tensorflow as tf

        return [tuple(tf.constant(array) for array in request) for request in cut]


@functools.cache
def arrays_of(file: str) -> dict[str, np.ndarray]:
    """The arrays of a .npz file."""
    with np.load(file) as arrays:
        return dict(arrays)


def load_session(folder: str, how: str) -> tuple[list[str], Callable[..., Any]]:
    """Into a session."""
    import tensorflow.compat.v1 as tf

    graph = tf.Graph()
    with graph.as_default():
        session = tf.Session(graph=graph)
        signature = tf.saved_model.load(session, ["serve"], folder).signature_def["serving_default"]
    (output,) = signature.outputs.values()
    names = sorted(signature.inputs)
    return names, session.make_callable(output.name, [signature.inputs[name].name for name in names])


def load_function(folder: str, how: str) -> tuple[list[str], Callable[..., Any]]:
    """As an object, whose signature is called with tensors."""
    import tensorflow as tf

    loaded = tf.saved_model.load(folder)
    signature = loaded.signatures["serving_default"]
    names = sorted(signature.structured_input_signature[1])
    (output,) = signature.structured_outputs

    def call(*tensors: Any) -> Any:
        return signature(**dict(zip(names, tensors, strict=True)))[output]

    call.loaded = loaded  # type: ignore[attr-defined]  # it has to live as long
    return names, tf.function(call, jit_compile=True) if how == "xla" else call


def run(model: Model, requests: list[Request], seconds: float) -> float:
    """Requests a second, one after the other."""
    for request in requests[:WARM]:
        model.call(*request)
    done, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        model.call(*requests[done % len(requests)])
        done += 1
    return done / (time.perf_counter() - start)


def answers() -> Iterator[dict[str, Any]]:
    """One for each line of standard input."""
    model: Model | None = None
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "load":
            arrays_of(asked["requests"])
            before, start = memory("RssAnon"), time.perf_counter()
            with contextlib.suppress(OSError):  # forget the peak so far; not every system lets a process
                Path("/proc/self/clear_refs").write_text("5")
            model = Model(asked["folder"], asked["how"])
            model.call(*model.requests(asked["requests"], 1, most=1)[0])
            seconds = time.perf_counter() - start
            yield {
                "seconds": seconds,
                "memory": memory("RssAnon") - before,
                "peak": memory("VmHWM") - memory("RssFile") - before,
            }
            continue
        assert model is not None
        requests = model.requests(asked["requests"], asked["batch"], None if asked["do"] == "answer" else MOST)
        if asked["do"] == "answer":
            np.save(asked["output"], np.concatenate([np.asarray(model.call(*request)) for request in requests]))
            yield {}
        else:
            yield {"per_second": run(model, requests, asked["seconds"])}


def main() -> None:
    """Answer until standard input ends."""
    # What is imported may write to standard output: the answers have it for themselves.
    answered = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import quiet_tensorflow  # noqa: F401  (before TensorFlow)
    import tensorflow as tf

    tf.get_logger().setLevel("ERROR")
    if sys.argv[1] == "tfplugin":
        import tfplugin  # noqa: F401
    print(json.dumps({"tensorflow": tf.__version__}), file=answered, flush=True)
    for answer in answers():
        assert sys.argv[1] == "tfplugin" or not {"tfplugin", "kvtools"} & sys.modules.keys()
        print(json.dumps(answer), file=answered, flush=True)


if __name__ == "__main__":
    main()
