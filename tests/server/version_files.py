"""Versions of a model whose every row tells which version it is of."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from kvtools.array_table import ArrayTable
from kvtools.dialects.writing import WriteOptions
from kvtools.migrate import write_tables

ROWS = 200
DIM = 4


def expected_rows(number: int, keys: Any) -> Any:
    """The rows of `keys` in version `number`: version and key, in numbers that float32 has exactly."""
    return np.repeat((number * 1000 + np.asarray(keys, np.float32))[:, None], DIM, axis=1).astype(np.float32)


def _table(number: int) -> ArrayTable:
    keys = np.arange(ROWS)
    return ArrayTable("emb", keys, expected_rows(number, keys))


def write_snapshot(folder: Path, number: int, *, name: str | None = None, says: int | None = None) -> Path:
    """Write version `number` of the table `emb`, keys 0 to 199, as a snapshot; its rows are those of version `says`."""
    folder.mkdir(exist_ok=True)
    place = folder / f"{number if name is None else name}.kvsnap"
    if place.is_dir():
        shutil.rmtree(place)
    write_tables([_table(number if says is None else says)], place, "snapshot", options=WriteOptions(force=True))
    return place


def write_checkpoint(folder: Path, number: int, *, name: str | None = None, says: int | None = None) -> Path:
    """Write it as a checkpoint in a folder of its own, beside its place, and rename it."""
    folder.mkdir(exist_ok=True)
    beside, place = folder.parent / f"beside-{number}", folder / (name or str(number))
    shutil.rmtree(place, ignore_errors=True)
    beside.mkdir()
    write_tables([_table(number if says is None else says)], beside / "model", "tfplugin")
    beside.rename(place)
    return place
