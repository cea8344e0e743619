"""What kvtools keeps between runs, and how much that is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvtools.cache_folder import cache_folder
from kvtools.doctor.check import Check

_KINDS = {
    "tensorflow-": "compiled ops",
    "horovod": "Horovod's wheels",
    "snapshots": "snapshots of what was served",
}
_NEEDED = 100 << 20
_MUCH = 10 << 30


def check_caches() -> Iterator[Check]:
    """The folder, whether it can be written, and what is in it by kind."""
    folder = cache_folder()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    disk = shutil.disk_usage(there)
    # Root may write anywhere, and yet there is no room for files in what the kernel makes up.
    if not os.access(there, os.W_OK) or not there.is_dir() or not disk.total:
        value, way_out = f"{folder} cannot be written", "set KVTOOLS_CACHE_DIR to a folder that can be"
        if not folder.is_dir() or not os.access(folder, os.R_OK | os.X_OK) or not any(folder.iterdir()):
            yield Check("folder", "error", value, way_out)
            return
        # As of an image that was made with them: that does for what they were compiled for.
        yield Check("folder", "note", f"{value}: what is in it is used", f"for more, {way_out}")
    elif disk.free < _NEEDED:
        yield Check("folder", "warning", _value(folder, disk.free), "make room, or set KVTOOLS_CACHE_DIR")
    else:
        yield Check("folder", "ok", _value(folder, disk.free))
    for prefix, what in _KINDS.items():
        found = sorted(path for path in (folder.iterdir() if folder.exists() else ()) if path.name.startswith(prefix))
        if not found:
            continue
        total = sum(map(_bytes, found))
        files = f"{len(found)} sets" if prefix == "tensorflow-" else f"{len(list(found[0].iterdir()))} entries"
        yield Check(
            what,
            "note" if total > _MUCH else "ok",
            f"{_size(total)} in {files}",
            f"all of it may be deleted at any time: rm -r {folder / prefix}*" if total > _MUCH else "",
        )


def _value(folder: Path, free: int) -> str:
    return f"{folder}{'' if folder.exists() else ' (not there yet)'}, {_size(free)} free"


def _bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count / 2**20:.1f} MiB"
