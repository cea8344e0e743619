"""Makes one file of a snapshot and what lies over it, beside the serving of both, and finds it again after a restart.

The file lies in the cache as `<digest of the chain>-<sequence>.kvsnap`. Of one chain there is one such file, and for a
moment a second one: whoever makes it holds a lock, and the others that follow the same chain take it over.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtools import __version__
from kvtools._snapshot import Writer
from kvtools.dialects.snapshot import SUFFIX
from kvtools.errors import KvtoolsError, OutputError
from kvtools.follow import Position
from kvtools.server.followed_store import FollowedStore
from kvtools.server.snapshot_cache import in_use, make_room
from kvtools.server.store import TableStore
from kvtools.snapshot import Snapshot, file_errors

_FIELD = "follows"
_MEMORY = 1 << 20  # bytes: rows come in their order, so none are held back


@dataclass(frozen=True)
class Fold:
    """A file that was made of a chain: all members up to `position.sequence` are in it."""

    path: Path
    position: Position

    def open(self) -> TableStore:
        """Map it; raises `BadInputError` if it cannot be."""
        store = TableStore(self.path)
        in_use(store.snapshot)
        return store


def folds_of(cache: Path, chain_folder: Path) -> list[Fold]:
    """Return the files that were made of a chain, the newest first; what cannot be read is none."""
    found = []
    for path in cache.glob(f"{_digest(chain_folder)}-*{SUFFIX}"):
        with contextlib.suppress(KvtoolsError, ValueError, KeyError, TypeError):
            said = json.loads(Snapshot(path).native.description)[_FIELD]
            position = Position(
                said["chain"], int(said["sequence"]), frozenset(map(str, said["fingerprints"])), float(said["time"])
            )
            found.append(Fold(path, position))
    return sorted(found, key=lambda fold: fold.position.sequence, reverse=True)


def make_fold(
    store: FollowedStore, position: Position, cache: Path, chain_folder: Path, go_on: Callable[[], bool]
) -> Fold | None:
    """Write `store`, which is at `position`, as one file; None where `go_on` ended it.

    The work is done by threads of the lowest priority.

    Raises:
        OutputError: there is no space for it, or it cannot be written.
        CorruptFileError: the file below is damaged.
    """
    path = cache / f"{_digest(chain_folder)}-{position.sequence:012d}{SUFFIX}"
    beside = path.with_name(f".{path.name}.kvtools-{os.getpid()}")
    make_room(cache, keep=path, needed=store.snapshot.bytes + store.bytes_over)
    said = {
        "format": "kvtools snapshot",
        "written_by": f"kvtools {__version__}",
        "tables": {
            name: {"version_unit": table.schema.version_unit, "metadata": dict(table.schema.metadata)}
            for name, table in store.tables.items()
        },
        _FIELD: {
            "chain": position.chain,
            "sequence": position.sequence,
            "fingerprints": sorted(position.follows),
            "time": position.time,
        },
    }
    try:
        beside.unlink(missing_ok=True)
        writer = Writer(str(beside), _MEMORY)
        try:
            for table in store.tables.values():
                with file_errors():
                    whole = writer.copy_table(table.table, lambda done, total: go_on(), background=True)
                if not whole:
                    return None
            writer.close(json.dumps(said).encode())
        finally:
            writer.abort()
        beside.replace(path)
    except OSError as error:
        raise OutputError(f"folding increments into '{path}': {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
    return Fold(path, position)


def remove_older(cache: Path, chain_folder: Path, newest: Fold) -> None:
    """Remove the files that `newest` takes the place of, and what killed runs left; who has one open keeps it."""
    for path in cache.glob(f"{_digest(chain_folder)}-*{SUFFIX}"):
        if path != newest.path:
            path.unlink(missing_ok=True)
    for path in cache.glob(f".{_digest(chain_folder)}-*{SUFFIX}.kvtools-*"):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def only_one(cache: Path, chain_folder: Path) -> Iterator[bool]:
    """Hold the lock of who makes files of a chain; gives False where another process has it.

    Raises `OutputError` where there can be no lock.
    """
    try:
        lock = os.open(cache / f"{_digest(chain_folder)}.folding", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _unusable(cache, error) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = True
        except BlockingIOError:
            mine = False
        except OSError as error:  # some file systems have no locks
            raise _unusable(cache, error) from error
        yield mine
    finally:
        os.close(lock)


def _unusable(cache: Path, error: OSError) -> OutputError:
    return OutputError(f"folding increments in '{cache}': {error.strerror or error}; name another --cache")


def _digest(chain_folder: Path) -> str:
    return hashlib.sha256(f"follow {os.path.normpath(chain_folder.absolute())}".encode()).hexdigest()[:24]
