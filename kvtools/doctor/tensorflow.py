"""TensorFlow, and the ops for it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from kvtools.cache_folder import cache_folder, others_cache_folders
from kvtools.doctor.check import Check
from kvtools.keras_version import UPGRADE, too_old
from kvtools.op_compiler import find_compiler
from kvtools.op_library import (
    FIRST_TENSORFLOW,
    OpLibrary,
    TensorFlowBuild,
    compile_seconds,
    find_op_library,
    package_folder,
    told_duration,
    unsupported,
)

SECONDS = 180

_ASK = """
import json, tensorflow as tf
version = tf.version
print("\\n" + json.dumps({
    "build": [version.VERSION, version.GIT_VERSION, version.COMPILER_VERSION,
              tf.sysconfig.get_compile_flags(), tf.sysconfig.get_link_flags()],
    "cuda": tf.test.is_built_with_cuda(),
    "gpus": [device.name for device in tf.config.list_physical_devices("GPU")],
}))
"""


def check_tensorflow() -> Iterator[Check]:
    """Does it load, which ops fit it, and why; Keras and Horovod."""
    if importlib.util.find_spec("tensorflow") is None:
        yield Check(
            "TensorFlow",
            "note",
            "not installed: the tools and the server work, training does not",
            "pip install 'kvtools[tensorflow]'",
        )
        return
    try:
        answer = ask_tensorflow()
    except RuntimeError as error:
        yield Check("TensorFlow", "error", f"cannot be imported: {error}", _advice(str(error)))
        return
    version, git_version, compiler, compile_flags, link_flags = answer["build"]
    build = TensorFlowBuild(version, git_version, compiler, tuple(compile_flags), tuple(link_flags))
    value = f"{version} ({git_version}), {'with' if answer['cuda'] else 'without'} CUDA, {len(answer['gpus'])} GPUs"
    if said := unsupported(build):
        older = build.minor < FIRST_TENSORFLOW
        yield Check("TensorFlow", "error" if older else "warning", value, said)
    else:
        yield Check("TensorFlow", "ok", value)
    if (package := package_folder()) is not None:
        yield ops_check(find_op_library(package, cache_folder(), build, others_cache_folders()))
    for name in ("keras", "tf_keras"):
        if (found := _version(name)) and name == "keras" and (said := too_old(found)):
            yield Check(name, "warning", said, UPGRADE)
        elif found:
            yield Check(name, "ok", found)
        elif name == "tf_keras":
            yield Check(
                name,
                "note",
                "not installed: only programs of Keras 2 need it",
                f"pip install 'tf_keras=={build.minor[0]}.{build.minor[1]}.*'",
            )
    yield _horovod()


def ops_check(library: OpLibrary) -> Check:
    """Say which ops are in use, or what it takes to have them."""
    if library.kind == "ready":
        return Check("ops", "ok", f"ready ones of the wheel: {library.path}")
    why = library.why_not_ready
    if library.kind == "compiled":
        return Check("ops", "ok", f"compiled here: {library.path}; {why}")
    how_long = told_duration(compile_seconds())
    if find_compiler() is None:
        return Check(
            "ops",
            "error",
            f"none: {why}; and there is no C++ compiler to make them with",
            "apt-get install g++ (or: conda install gxx), or name a compiler in $CXX; then the first import takes"
            f" {how_long}",
        )
    return Check("ops", "note", f"the first `import tfplugin` compiles them, {how_long}: {why}")


def ask_tensorflow() -> dict[str, Any]:
    """Import TensorFlow in a process of its own and return what it says of itself.

    Raises:
        RuntimeError: it cannot be imported; the message says why, in one line.
    """
    env = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK],
            capture_output=True,
            text=True,
            errors="replace",
            env=env,
            cwd="/",  # nobody else has modules there, nor has a source tree
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"it took more than {SECONDS} s") from None
    if done.returncode < 0:
        raise RuntimeError(f"the process died of {signal.Signals(-done.returncode).name}")
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise RuntimeError(lines[-1].strip() if lines else f"exit status {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _advice(why: str) -> str:
    if "SIGILL" in why:
        return "TensorFlow's wheels need a processor with AVX; in a virtual machine, pass the host's processor through"
    if "numpy" in why.lower() or "_ARRAY_API" in why:
        return "NumPy and TensorFlow do not fit: pip install --upgrade --force-reinstall tensorflow"
    return "repair it first, until `python -c 'import tensorflow'` works"


def _horovod() -> Check:
    found = _version("horovod")
    if found is None:
        return Check(
            "Horovod", "note", "not installed: only training on several ranks needs it", "kvtools setup-horovod"
        )
    return Check("Horovod", "ok", f"{found}; `kvtools setup-horovod` checks that it works")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
