"""Reading a table from an S3 server, beside the downloads of the same bytes by boto3 and s3fs.

Part of ``make bench-tools``; ``python benchmarks/s3_reads.py [MEGABYTES...]`` runs it alone. The server is moto's, in a
process of its own on loopback: it gives what a Python process can, and takes up a whole object for each range of it, so
fewer and longer ranges are faster there. The table is a bundle whose rows, checksums included, kvtools reads as a
stream; the downloads write the same bytes to a file, and look at none of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

MEGABYTES = (100, 400)
ROUNDS = 3
AT_MOST = 1.5
"""Times the seconds of the faster download that reading may take."""

DIM = 64
ROW_BYTES = 8 + 4 * DIM
BUCKET = "bench"
_START = "import os, sys, time; name = sys.argv[1]; start = time.perf_counter(); "
_END = "; print(time.perf_counter() - start)"

SIDES = {
    "kvtools, every row": _START
    + "import kvtools; t = kvtools.open(f's3://bench/{name}').table('emb'); "
    + "assert sum(len(c) for c in t.chunks()) == t.rows"
    + _END,
    "boto3, download_file": _START
    + "import boto3; s = boto3.client('s3'); "
    + "s.download_file('bench', f'{name}.data-00000-of-00001', sys.argv[2])"
    + _END,
    "s3fs, get_file": _START
    + "import s3fs; s = s3fs.S3FileSystem(); "
    + "s.get_file(f'bench/{name}.data-00000-of-00001', sys.argv[2])"
    + _END,
}
"""What runs in a process of its own, and prints the seconds from its imports to its end."""


@contextlib.contextmanager
def server() -> Iterator[dict[str, str]]:
    """Run the server; give the environment by which its clients find it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(url).read()
                break
            time.sleep(0.1)
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
    finally:
        process.terminate()
        process.wait()


def write_table(prefix: Path, megabytes: int) -> None:
    """Write a table of so many megabytes."""
    import numpy as np

    import kvtools

    rows = megabytes * 1_000_000 // ROW_BYTES
    values = np.random.default_rng(0).normal(size=(rows, DIM)).astype(np.float32)
    kvtools.write_tables([kvtools.table_from_arrays("emb", np.arange(rows), values)], prefix, "tfplugin")


def measure(say: Callable[[str], None], megabytes: Sequence[int] = MEGABYTES) -> list[dict[str, Any]]:
    """Run all sides in turns, at each size."""
    results = []
    with server() as environment, tempfile.TemporaryDirectory(prefix="kvtools-bench-") as folder:
        os.environ.update(environment)
        import boto3

        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        for size in megabytes:
            local = Path(folder) / "tables"
            write_table(local / f"model-{size}", size)
            for file in local.iterdir():
                client.upload_file(str(file), BUCKET, file.name)
            shutil.rmtree(local)
            seconds: dict[str, list[float]] = {}
            for _ in range(ROUNDS):
                for side, program in SIDES.items():
                    copy = Path(folder) / "copy"
                    run = [sys.executable, "-c", program, f"model-{size}", str(copy)]
                    # In the folder: in that of the repository its packages would hide the installed ones.
                    told = subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True, cwd=folder).stdout
                    seconds.setdefault(side, []).append(float(told))
                    copy.unlink(missing_ok=True)
                    say(f"  {size} MB from S3: {side}: {seconds[side][-1]:.2f} s")
            results.append({"megabytes": size, "seconds": seconds})
    return results


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """The results as a section of a page."""
    lines = [
        "## Reads from an S3 server",
        "",
        "Every row of a table, checked, beside downloads of the same bytes; moto's server on loopback, one process.",
        "",
        "| MB | side | seconds (median) | MB/s | beside the faster download |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        medians = {side: statistics.median(seconds) for side, seconds in result["seconds"].items()}
        best = min(seconds for side, seconds in medians.items() if not side.startswith("kvtools"))
        for side, seconds in medians.items():
            times = f"{seconds / best:.2f}"
            if side.startswith("kvtools"):
                times += f" (asked: at most {AT_MOST:g})" + ("" if seconds / best <= AT_MOST else ", **not reached**")
            speed = result["megabytes"] / seconds
            lines.append(f"| {result['megabytes']} | {side} | {seconds:.2f} | {speed:.0f} | {times} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sizes = [int(argument) for argument in sys.argv[1:]] or MEGABYTES
    print(markdown(measure(lambda text: print(text, file=sys.stderr, flush=True), sizes)))
