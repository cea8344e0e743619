"""Compiles the ops against the TensorFlow of the environment that runs this, or tries compiled ones in it.

    python wheels/ready_ops.py compile PACKAGE FOLDER JOBS   # compiles FOLDER/libkvtools_ops.so
    python wheels/ready_ops.py try PACKAGE FOLDER            # loads it
    python wheels/ready_ops.py headers PACKAGE FOLDER        # prints a digest of TensorFlow's headers, by file

PACKAGE is an installed `kvtools` with the engine's library. Each prints one line of JSON: the TensorFlow, and what else
was asked for. The ops do not depend on the Python, so one environment for each TensorFlow does.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

OLDER_LIBRARY = Path(__file__).resolve().with_name("older_libstdcxx.h")


def main() -> None:
    """Do what the arguments say."""
    what, package, folder = sys.argv[1], Path(sys.argv[2]).resolve(), Path(sys.argv[3]).resolve()
    sys.path.insert(0, str(package.parent))
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    from kvtools.op_compiler import compile_ops
    from kvtools.op_library import LIBRARY_NAME, TensorFlowBuild

    build = TensorFlowBuild.of(tf)
    said: dict[str, Any] = {"build": build.__dict__}
    if what == "compile":
        folder.mkdir(parents=True, exist_ok=True)
        started, before = time.monotonic(), os.times()
        compile_ops(
            package,
            build,
            folder / LIBRARY_NAME,
            lambda line: print(line, file=sys.stderr, flush=True),
            options=["-include", str(OLDER_LIBRARY)],
            # Found beside the package, wherever that is installed; and no symbols but those that TensorFlow looks for.
            link_options=["-Wl,-rpath,$ORIGIN/../../..", "-Wl,--strip-all"],
            jobs=int(sys.argv[4]),
        )
        after = os.times()
        said["seconds"] = round(time.monotonic() - started, 1)
        said["cpu_seconds"] = round(
            after.children_user + after.children_system - before.children_user - before.children_system, 1
        )
    elif what == "try":
        ctypes.CDLL(str(package / "libkvtable.so"))
        ops = tf.load_op_library(str(folder / LIBRARY_NAME))
        said["ops"] = sum(name.startswith("kv_") for name in dir(ops))
    else:
        include = Path(tf.sysconfig.get_include())
        said["headers"] = {
            path.relative_to(include).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            for path in sorted(include.rglob("*"))
            if path.is_file()
        }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
