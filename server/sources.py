"""Where models come from: what is named on the command line, and changed while the server runs."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

from kvtools.server.request import RequestError
from kvtools.server.version_policy import VersionPolicy

log = logging.getLogger("kvtools.serve")

_LOOKS_EVERY = 0.02  # s
_MOST_NOTES = 1000
MODEL_NAME = re.compile(r"[A-Za-z0-9_.-]+")  # others cannot stand in a URL


@dataclass(frozen=True)
class ModelSource:
    """A model to serve: where its versions lie, which of them to serve, and which names they get beside numbers."""

    name: str
    path: str
    policy: VersionPolicy = field(default_factory=VersionPolicy)
    labels: Mapping[str, int] = field(default_factory=dict)


class SharedSources:
    """What the workers of one server tell each other, in a folder: the sources, once one of them was told of a change.

    A change is written whole and renamed. The supervisor is asked, by SIGHUP, to have all workers look. `reload` names
    the last request for other models: whichever worker got it, only that one says which models go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "sources.json"
        self._known: tuple[int, int] | None = None
        self._lock = threading.Lock()
        self.reload = ""

    def changed(self) -> list[ModelSource] | None:
        """Return the sources, if they were changed since the last call here; None otherwise."""
        with self._lock:
            try:
                status = self._file.stat()
                if (state := (status.st_ino, status.st_mtime_ns)) == self._known:
                    return None
                told = json.loads(self._file.read_text())
            except FileNotFoundError:
                return None
            self._known = state
            self.reload = told["reload"]
        return [
            ModelSource(entry["name"], entry["path"], _policy(entry["policy"]), entry["labels"])
            for entry in told["sources"]
        ]

    @contextlib.contextmanager
    def change(self) -> Iterator[list[ModelSource] | None]:
        """Hold a lock of all workers, for a change on top of theirs; gives what `changed` does.

        Raises `RequestError` (503) if their changes cannot be read.
        """
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):  # a full disk, which `write` tells, or a file system without locks
                fcntl.flock(held.enter_context((self._folder / "changing").open("w")), fcntl.LOCK_EX)
            try:
                changed = self.changed()
            except OSError as error:
                raise self._refused(error) from error
            yield changed

    def write(self, sources: Sequence[ModelSource], reload: str = "") -> None:
        """Tell all workers of `sources`, and of the `reload` that they are of, if it is another one than before.

        Raises `RequestError` (503) if that cannot be written, and told nobody.
        """
        beside = self._folder / f"sources.{os.getpid()}"
        reload = reload or self.reload
        entries = [{**asdict(source), "labels": dict(source.labels)} for source in sources]
        with self._lock:
            try:
                beside.write_text(json.dumps({"reload": reload, "sources": entries}))
                status = beside.stat()
                beside.replace(self._file)
            except OSError as error:
                raise self._refused(error) from error
            self._known = status.st_ino, status.st_mtime_ns
            self.reload = reload
        os.kill(os.getppid(), signal.SIGHUP)

    def fault(self, what: str) -> str | None:
        """Return what a worker found wrong with `what`, or None: a worker that begins later need not find it again."""
        try:
            return self._note("fault", what).read_text("utf-8")
        except FileNotFoundError:
            return None

    def tell_fault(self, what: str, message: str) -> None:
        """Tell all workers, and those that begin later, what is wrong with `what`."""
        beside = self._folder / f"fault.{os.getpid()}"
        try:
            beside.write_text(message, "utf-8", "backslashreplace")
            beside.replace(self._note("fault", what))
        except OSError as error:  # each of them will find it by itself
            log.warning("a fault cannot be told to the other workers: '%s': %s", self._folder, error.strerror)

    def _refused(self, error: OSError) -> RequestError:
        log.error("a change cannot be told to the other workers: '%s': %s", self._folder, error.strerror)
        return RequestError(
            503,
            "not_shared",
            f"the other workers cannot be told: {error.strerror}; nothing was changed, and the server's log says where"
            " to make room",
        )

    def _note(self, kind: str, what: str) -> Path:
        return self._folder / f"{kind}-{hashlib.sha256(what.encode()).hexdigest()[:32]}"

    def _forget_old_notes(self) -> None:
        """Remove the oldest notes of what was done: each version has one, and there are ever more versions."""
        notes = sorted(self._folder.glob("done-*"), key=lambda note: note.stat().st_mtime_ns)
        for note in notes[:-_MOST_NOTES]:
            note.unlink(missing_ok=True)

    def says_first(self, what: str) -> bool:
        """Return whether no worker was told so for `what` before: what all of them find, one says."""
        try:
            self._note("said", what).touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:  # such as a full disk: better twice than never
            return True
        return True

    @contextlib.contextmanager
    def only_once(self, what: str, go_on: Callable[[], bool]) -> Iterator[bool | None]:
        """Hold a lock of all workers; gives whether one of them got through this block for `what` before.

        None: another one held the lock until `go_on` said no. What the block raises does not count as getting through.
        """
        note = self._note("done", what)
        try:
            lock = (self._folder / "lock").open("w")
        except OSError:  # a full disk: each does it for itself
            yield note.exists()
            return
        with lock:
            while not (held := _try_lock(lock)) and go_on():
                time.sleep(_LOOKS_EVERY)
            if not held:
                yield True if note.exists() else None
                return
            done = note.exists()
            yield done
            with contextlib.suppress(OSError):
                note.touch()
                self._forget_old_notes()


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: each does it for itself
        return True
    return True


def _policy(entry: Mapping[str, object]) -> VersionPolicy:
    return VersionPolicy(entry["kind"], entry["count"], tuple(entry["numbers"]))  # type: ignore[arg-type]
