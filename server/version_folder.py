"""Which versions of a model lie where it is served from, and whether anything about their files has changed.

A folder of versions has entries that are numbers: folders (`1/`, `20260101/`) or snapshots (`7.kvsnap`). What is no
such folder is one version by itself. What looks like a version and is none is told: an empty folder, a file without an
ending, a snapshot whose name is no number. Names that end otherwise (`8.kvsnap.tmp`) are somebody's work in progress,
and are told where nothing has been written for an hour.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from dataclasses import dataclass
from pathlib import Path

_NUMBERED = re.compile(r"([0-9]+)(\.kvsnap|\.snapshot)?")
_MOST = 2**63 - 1  # as protocols have them, int64
# What is not a version yet: as kvtools and others name what they are writing.
_UNDER_WAY = re.compile(
    r"\.[0-9]+(\.kvsnap|\.snapshot)?\.kvtools-.+|\.?[0-9]+(\.kvsnap|\.snapshot)?\.(tmp|temp|part|partial|incomplete)"
)
_LEFT_ALONE = 3600.0  # s: who writes does not stop for so long
_OTHER_FILES = re.compile(r"([0-9]{1,18})\.(npz|h5|hdf5|parquet|arrow|safetensors)")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.I)
_SNAPSHOTS = (".kvsnap", ".snapshot")
_MAKE_SNAPSHOT = "make a snapshot of it, `kvtools migrate --to snapshot`"

Stamp = tuple[tuple[str, int, int, int], ...]
"""Each file of a version: name, inode, size, time of its last change in ns. Equal stamps: nothing was written."""


@dataclass(frozen=True)
class FoundVersion:
    """A version as it lies on disk; `changed` is when its newest file was written or put there, in s since the epoch.

    `problem` says why it cannot be one, if that is plain from its name.
    """

    number: int
    path: str
    stamp: Stamp
    changed: float
    problem: str = ""

    @property
    def whole_when_there(self) -> bool:
        """Whether the file itself tells if it is complete: a snapshot's header has its size and checksums."""
        return self.path.endswith(_SNAPSHOTS)


def is_folder_of_versions(path: str) -> bool:
    """Return whether `path` is a folder with at least one numbered entry."""
    if _URL.match(path):
        return False
    try:
        return any(_is_numbered(entry) for entry in os.scandir(path))
    except OSError:
        return False


def versions_in(folder: str) -> list[FoundVersion]:
    """Return the versions in a folder, by number; raises `OSError` if it cannot be read."""
    by_number: dict[int, list[str]] = {}
    others: dict[int, str] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            number = _number(entry.name)
            if number is None:
                if other := _OTHER_FILES.fullmatch(entry.name):
                    others[int(other[1])] = f"{entry.name!r} is no version: {_MAKE_SNAPSHOT}"
            elif _is_numbered(entry):
                by_number.setdefault(number, []).append(entry.name)
            elif why := _out_of_reach(entry.path):
                others[number] = f"{entry.name!r} is no version: {why}"
            elif entry.is_file():
                others[number] = f"{entry.name!r} is no version: a snapshot is called {entry.name}.kvsnap"
            elif Path(entry.path).exists():  # a pipe, which nothing may ever be written to
                others[number] = f"{entry.name!r} is no version: it is neither a file nor a folder"
    found = [FoundVersion(number, "", (), 0, problem) for number, problem in others.items() if number not in by_number]
    for number, names in sorted(by_number.items()):
        if len(names) > 1:
            shown = " and ".join(repr(name) for name in sorted(names))
            found.append(FoundVersion(number, "", (), 0, f"{shown} are the same version; remove one"))
        else:
            path = Path(folder, names[0])
            stamp, changed = _stamp(path)
            if stamp:
                found.append(FoundVersion(number, str(path), stamp, changed))
            elif not path.is_symlink():  # of which the target may be gone for a moment
                with contextlib.suppress(OSError):  # gone again by now
                    status = path.stat()
                    empty = (str(path), status.st_ino, 0, status.st_mtime_ns)
                    problem = f"{names[0]!r} is no version: {_out_of_reach(path, 'the folder is empty')}"
                    found.append(FoundVersion(number, str(path), (empty,), status.st_mtime, problem))
    return sorted(found, key=lambda version: version.number)


def passed_over(folder: str) -> dict[str, str]:
    """Return the names in a folder that look like those of versions and can be of none, and why; raises `OSError`."""
    told = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            named = _NUMBERED.fullmatch(entry.name)
            if named and entry.is_symlink() and not _out_of_reach(entry.path) and not Path(entry.path).exists():
                told[entry.name] = "it is a link to nothing"
            elif named and int(named[1]) > _MOST:
                told[entry.name] = f"its number is above {_MOST}"
            elif entry.name.endswith(_SNAPSHOTS) and not (named or entry.name[0] == "." or entry.is_symlink()):
                told[entry.name] = "its name is no number"
    return dict(sorted(told.items()))


def left_behind(folder: str) -> list[str]:
    """Return the names in a folder of what was under way to be a version, and has not changed for an hour.

    Its writer was killed, as it seems. Raises `OSError`.
    """
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries if _UNDER_WAY.fullmatch(entry.name)]
    return sorted(name for name in names if 0 < _last_written(Path(folder, name)) < time.time() - _LEFT_ALONE)


def _out_of_reach(path: str | os.PathLike[str], otherwise: str = "") -> str:
    """Return why what lies at a path cannot be looked at, such as a link to itself; `otherwise` where it can."""
    try:
        if stat.S_ISDIR(Path(path).stat().st_mode):
            os.scandir(path).close()
    except FileNotFoundError:
        return otherwise
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return otherwise


def _last_written(path: Path) -> float:
    """Return when a file, a folder or anything in it was modified last, in s since the epoch; 0 if it is gone."""
    last = 0.0
    for each in (path, *path.rglob("*")):
        with contextlib.suppress(OSError):
            last = max(last, each.stat().st_mtime)
    return last


def single_version(path: str) -> list[FoundVersion]:
    """Return the one version that `path` is: its number is that of its name, or 1; none if there is nothing."""
    if _URL.match(path):
        return [FoundVersion(1, path, (), 0)]
    number = _number(Path(path).name)
    stamp, changed = _stamp(Path(path))
    return [FoundVersion(1 if number is None else number, path, stamp, changed)] if stamp else []


def _number(name: str) -> int | None:
    named = _NUMBERED.fullmatch(name)
    return int(named[1]) if named and int(named[1]) <= _MOST else None


def _is_numbered(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a snapshot whose name is a number, however large."""
    named = _NUMBERED.fullmatch(entry.name)
    try:
        return named is not None and (entry.is_dir() or (bool(named[2]) and entry.is_file()))
    except OSError:
        return False


def _stamp(path: Path) -> tuple[Stamp, float]:
    """Return the stamp of a file, of all files under a folder, or of those that a checkpoint's prefix names."""
    if path.is_dir():
        files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
    elif path.exists():
        files = [path]
    else:
        files = [each for each in path.parent.glob("*") if each.name.startswith(path.name + ".")]
    stamp, changed = [], 0.0
    for file in sorted(files):
        try:
            status = file.stat()
        except OSError:
            continue
        # The time of change, too: it is set by whoever writes, keeps or fakes the time of modification.
        stamp.append((str(file), status.st_ino, status.st_size, status.st_mtime_ns))
        changed = max(changed, status.st_mtime, status.st_ctime)
    return tuple(stamp), changed
