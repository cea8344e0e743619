"""A table of 200 MB goes through every format in a fraction of its size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource, sys
import numpy as np
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.chunk import Chunk
from kvtools.dialects.interface import TableReader
from kvtools.dialects.schema import TableSchema
from kvtools.dialects.writing import WriteOptions
from kvtools.migrate import write_tables

class Generated(TableReader):
    def __init__(self, rows):
        self.schema = TableSchema("emb", "test", "int64", "float32", 64, (rows,))

    def read_part(self, part, columns, rows, verify):
        for start in range(0, self.rows, rows):
            keys = np.arange(start, min(start + rows, self.rows))
            values = np.broadcast_to(keys.astype(np.float32)[:, None], (len(keys), 64)).copy()
            yield Chunk(keys, values)

    def take(self, rows, columns):
        raise NotImplementedError

def go(rows, path):
    options = WriteOptions(compression or None, memory=256 << 20)
    write_tables([Generated(rows)], path, dialect, options=options, workers=1)
    table = open_checkpoint(path).table("emb")
    assert sum(len(chunk) for chunk in table.chunks()) == rows
    taken = table.take(np.array([rows - 1, 0, rows // 2]))
    assert taken.keys.tolist() == [rows - 1, 0, rows // 2]

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

dialect, compression, folder, suffix = sys.argv[1:]
go(1000, f"{folder}/small{suffix}")
before = peak()
go(800_000, f"{folder}/large{suffix}")
print(peak() - before)
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("dialect", "compression", "suffix"),
    [
        ("hdf5", "none", ".h5"),
        ("hdf5", "gzip", ".h5"),
        ("parquet", "", ""),
        ("arrow", "zstd", ".arrow"),
    ],
)
def test_memory_is_bounded(tmp_path: Path, dialect: str, compression: str, suffix: str) -> None:
    script = [sys.executable, "-P", "-c", SCRIPT, dialect, compression, str(tmp_path), suffix]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100 << 20  # of 208 MB
