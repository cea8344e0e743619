"""Write tables whose columns are runs of plain bytes at known places of files: what such dialects' writers share.

The number of rows is known beforehand, so every column has its place before the first row comes, and rows may be
written in any order, from any process.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from kvtools.dialects.bundle.checksum import CASTAGNOLI, ZIP, extend, of_runs
from kvtools.dialects.bundle.writer import Region, RegionWriter, Runs
from kvtools.dialects.bundle_output import plain_columns
from kvtools.dialects.chunk import Array, Chunk
from kvtools.dialects.writing import ShardWriter, TableWriter
from kvtools.errors import OutputError


def crc32(crc: int, data: Any) -> int:
    """Continue a zip file's CRC-32 over `data`, as `bundle.checksum.extend` does a CRC-32C."""
    return zlib.crc32(data, crc)


_CHECKSUMS = {CASTAGNOLI: extend, ZIP: crc32}


class RawShard(ShardWriter):
    """Writes rows of a table to its columns' places in one file or in several."""

    def __init__(self, regions: Mapping[str, Region], polynomial: int) -> None:
        self._regions = regions
        self._polynomial = polynomial
        self._writers: dict[str, RegionWriter] = {}

    def write(self, part: int, start: int, chunk: Chunk) -> None:
        """Write a chunk; see `ShardWriter.write`."""
        for column, rows in plain_columns(chunk).items():
            region = self._regions.get(column)
            if region is None:
                continue  # keys that are the row numbers
            if region.path not in self._writers:
                self._writers[region.path] = RegionWriter(region.path, _CHECKSUMS[self._polynomial])
            self._writers[region.path].write(region, start, rows)

    def finish(self) -> dict[str, Runs]:
        """Return what was written, for `RawTableWriter.absorb`."""
        written: dict[str, Runs] = {}
        for writer in self._writers.values():
            written.update(writer.finish())
        self._writers = {}
        return written


class RawTableWriter(TableWriter):
    """One table of one part being written to places in files that exist and have their full length.

    Args:
        regions: the place of each column, by the names of `plain_columns`; an extra array is "extra:<name>".
        polynomial: that of the checksum to take of each column.
    """

    random_access: ClassVar[bool] = True
    distributable: ClassVar[bool] = True

    def __init__(self, regions: Mapping[str, Region], polynomial: int = CASTAGNOLI) -> None:
        self.regions = dict(regions)
        self.checksums: dict[str, int] = {}  # by region's name, once closed
        self._polynomial = polynomial
        self._runs: dict[str, Runs] = {}

    def shard(self) -> RawShard:
        """Return a writer for one task."""
        columns = {name: region for name, region in self.regions.items() if not name.startswith("extra:")}
        return RawShard(columns, self._polynomial)

    def absorb(self, result: Any) -> None:
        """Take over what a shard wrote."""
        for name, runs in result.items():
            self._runs.setdefault(name, []).extend(runs)

    def extra(self, name: str, array: Array) -> None:
        """Write an extra array, whole."""
        region = self.regions[f"extra:{name}"]
        writer = RegionWriter(region.path, _CHECKSUMS[self._polynomial])
        writer.write(region, 0, np.asarray(array))
        self.absorb(writer.finish())

    def close(self) -> None:
        """End the table; raises `ValueError` if rows are missing."""
        for region in self.regions.values():
            runs, row = sorted(self._runs.get(region.name, [])), 0
            for first, count, _ in runs:
                if first != row:
                    break
                row += count
            if row != region.rows:
                raise ValueError(f"writing '{region.name}': rows {row} on of {region.rows} were not written once each")
            sized = ((crc, count * region.row_bytes) for _, count, crc in runs)
            self.checksums[region.name] = of_runs(sized, self._polynomial)


@contextlib.contextmanager
def named_after_table(doing: str, name: str) -> Iterator[None]:
    """Within it, a file or folder that cannot be made is an error that asks for another name of the table, unless it is
    for want of room."""
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise OutputError(f"{doing}: making '{name}': {reason}; rename the table") from error


def create_column(path: Path, header: bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Region:
    """Make a file of `header` and room for rows of `shape` [rows, ...]; return the rows' place."""
    region = Region(str(path), str(path), len(header), shape[0], shape[1:], dtype)
    with path.open("xb") as file:
        file.write(header)
        file.flush()
        os.truncate(file.fileno(), len(header) + dtype.itemsize * math.prod(shape))
    return region
