"""Seconds of the command `kvtools`, on a checkpoint of half a gigabyte."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

KVTOOLS = str(Path(sys.executable).with_name("kvtools"))
"""The program that is installed. `python -m kvtools.cli.main` in the repository's folder would find its sources."""


def command_line(rounds: int) -> dict[str, float]:
    """Seconds of `kvtools --help` and of `kvtools inspect`: medians."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.ckpt"
        script = f"""
import numpy as np, tensorflow as tf, tfplugin
v1 = tf.compat.v1
with tf.Graph().as_default(), v1.Session() as session:
    table = tf.get_kv_variable("emb", 64, partitioner=v1.fixed_size_partitioner(4))
    ids = v1.placeholder(tf.int64, [None])
    rows = tf.nn.embedding_lookup(table, ids)
    session.run(v1.global_variables_initializer())
    for start in range(0, 2_000_000, 1 << 18):
        session.run(rows.op, {{ids: np.arange(start, min(2_000_000, start + (1 << 18)))}})
    v1.train.Saver().save(session, {str(path)!r})
"""
        subprocess.run([sys.executable, "-c", script], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        out = {"checkpoint_mib": sum(file.stat().st_size for file in Path(folder).iterdir()) / 2**20}
        for name, arguments in (("help_seconds", ["--help"]), ("inspect_seconds", ["inspect", str(path)])):
            seconds = []
            for _ in range(rounds):
                start = time.perf_counter()
                subprocess.run([KVTOOLS, *arguments], check=True, stdout=subprocess.DEVNULL)
                seconds.append(time.perf_counter() - start)
            out[name] = statistics.median(seconds)
    return out
