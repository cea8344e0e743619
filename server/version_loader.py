"""One version of a model, from what lies on disk to what is served: opened, compared with its checksums, in memory.

Nothing is answered from a byte that was not compared with its checksum. There are two ways to that, and `Versions` says
which: a version that takes the place of another is verified as a whole before; one for which requests wait already (at
the start, or where the version before turned out damaged) is served at once, and every mebibyte of it is verified
before its first use, until all are.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvtools.dialects.options import OpenOptions, Progress
from kvtools.errors import BadInputError, CorruptFileError, KvtoolsError, UsageError, one_line
from kvtools.server.catalog import ServedVersion
from kvtools.server.recent_keys import RecentKeys
from kvtools.server.request import RequestError
from kvtools.server.settings import Settings
from kvtools.server.sources import SharedSources
from kvtools.server.store import TableStore
from kvtools.server.version_folder import FoundVersion
from kvtools.snapshot import file_errors
from kvtools.split_manifest import check_half, is_split

log = logging.getLogger("kvtools.serve")

# How long a version may be verified before it is served, where requests wait for it: about a gigabyte in memory, in s.
_AT_ONCE = 0.1
_TOLD_EVERY = 5.0  # s
_TOUCHED_AT_ONCE = 256  # keys: the loader has the priority of those who answer, and shall not keep them waiting

GoOn = Callable[[], bool]


class StoppedError(Exception):
    """The server ends; what was being looked at is neither good nor bad."""


class ChangingFileError(KvtoolsError):
    """A file was written to while it was compared with its checksums: it is neither good nor bad yet."""


class VersionLoader:
    """Loads versions, one at a time, until `stop` is set; workers that share `shared` verify each of them once.

    Every method raises what is wrong with the version, most often a `KvtoolsError`; see `described`.
    """

    def __init__(
        self, settings: Settings, options: OpenOptions | None, shared: SharedSources | None, stop: threading.Event
    ) -> None:
        self._settings = settings
        self._options = options
        self._shared = shared
        self._stop = stop

    def load(self, model: str, found: FoundVersion, recent: dict[str, RecentKeys], *, at_once: bool) -> ServedVersion:
        """Load a version as a whole, or (`at_once`) so far that it may be served, for `finish` to do the rest.

        `recent` are the keys asked for lately by table, which the version goes on noting. A snapshot of the cache that
        is damaged is made again.
        """
        prepare = self._prepare_at_once if at_once else self._prepare
        version = self._open(model, found, recent)
        try:
            prepare(version)
        except CorruptFileError as error:
            if not version.store.discard():
                raise
            log.warning("%s; it was in the cache, and is made again", error)
            del version  # its file is gone with it
            version = self._open(model, found, recent)
            prepare(version)
        return version

    def finish(self, store: TableStore) -> None:
        """Verify the rest of what is served already, or all of what was written to meanwhile; bring it into memory."""
        if store.verifies_on_use:
            self._verify(store, self._goes_on)
        store.populate(self._stop)

    def damage(self, store: TableStore) -> str:
        """Return what is wrong now with a store that was sound; empty if nothing is, or it cannot be told yet.

        Where its file was written to, it is compared with its checksums again.
        """
        if (why := broken(store)) or not store.verifies_on_use:
            return why
        try:
            self._verify(store, self._goes_on)
        except CorruptFileError as error:
            return one_line(str(error))
        except (StoppedError, ChangingFileError):
            pass
        return ""

    def _open(self, model: str, found: FoundVersion, recent: dict[str, RecentKeys]) -> ServedVersion:
        progress = _Progress(f"model '{model}': version {found.number}")
        store = _open(found.path, self._options, self._settings, progress, self._stop)
        if self._settings.missing == "default":
            _check_default_rows(store, found.path)
        for name, table in store.tables.items():
            if table.duplicates and self._says_first(f"{found.stamp} {name} duplicates"):
                log.warning("table '%s': %s rows are hidden by a later row of their key", name, f"{table.duplicates:,}")
        of_tables = {name: recent.setdefault(name, RecentKeys()) for name in store.tables}
        return ServedVersion(model, found.number, Path(found.path), store, of_tables)

    def _prepare(self, version: ServedVersion) -> None:
        """Verify a version and bring it into memory, before it is served."""
        if self._settings.verify:
            self._verify(version.store, self._goes_on)
        version.store.populate(self._stop)
        if not version.store.resident:
            for name, keys in version.recent.items():
                _touch(version.store, name, keys)

    def _prepare_at_once(self, version: ServedVersion) -> None:
        """Make a version fit to be served in a moment: what is not verified by then is verified on use."""
        if not self._settings.verify:
            return
        version.store.verify_on_use()
        last = time.monotonic() + _AT_ONCE
        with contextlib.suppress(StoppedError, ChangingFileError):
            self._verify(version.store, lambda: self._goes_on() and time.monotonic() < last)

    def _goes_on(self) -> bool:
        return not self._stop.is_set()

    def _says_first(self, what: str) -> bool:
        return self._shared is None or self._shared.says_first(what)

    def _verify(self, store: TableStore, go_on: GoOn) -> None:
        """Compare all checksums; of several workers, one does it for all.

        Raises `StoppedError` if `go_on` ends it, and `ChangingFileError` if the file is written to meanwhile.
        """
        name = store.identity
        shared = self._shared if name else None
        _raise_fault(shared, name)
        with shared.only_once(name, go_on) if shared else contextlib.nullcontext(False) as done_before:
            if done_before:
                store.trust(name)
                return
            _raise_fault(shared, name)  # which another worker found meanwhile
            try:
                whole = done_before is not None and go_on() and store.verify(go_on)
            except CorruptFileError as error:
                if shared:
                    shared.tell_fault(name, str(error))
                raise
            if whole:
                return
            if done_before is None or not go_on():
                raise StoppedError
            raise ChangingFileError(
                f"verifying '{store.path}': it was written to meanwhile; it is compared with its checksums again, and a"
                " snapshot is best replaced by renaming another one to its name"
            )


def _raise_fault(shared: SharedSources | None, name: str) -> None:
    if shared and (fault := shared.fault(name)) is not None:
        raise CorruptFileError(fault)


class _Progress:
    """Tells in the log how far the snapshot of a version is, where making it takes long."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._last = time.monotonic()

    def __call__(self, table: str, rows: int, total: int) -> None:
        if (now := time.monotonic()) - self._last >= _TOLD_EVERY:
            self._last = now
            log.info("%s: making its snapshot: table '%s', %s of %s rows", self._what, table, f"{rows:,}", f"{total:,}")


def _open(
    path: str, options: OpenOptions | None, settings: Settings, progress: Progress, stop: threading.Event
) -> TableStore:
    cache = settings.cache
    if settings.backend is not None:
        from kvtools.server.redis_backend import RedisStore  # redis-py is optional

        if is_split(path):
            raise UsageError(f"serving '{path}': a model in two halves has rows of its own; leave --backend out")

        front = None
        if path != settings.backend:
            front = TableStore(path, options=options, cache=cache, progress=progress)
        missing = settings.backend_down == "missing"
        return cast(TableStore, RedisStore(settings.backend, options=options, front=front, missing_while_down=missing))
    if is_split(path):
        from kvtools.server.split_store import open_split  # takes long to import

        return cast(TableStore, open_split(path, settings.rows_from, ca=settings.rows_from_ca, progress=progress))
    check_half(path)
    if settings.rows_from:
        raise UsageError(
            f"serving '{path}': --rows-from is for a model in two halves, as kvtools export --split writes it"
        )
    if not (Path(path) / "saved_model.pb").is_file():
        return TableStore(path, options=options, cache=cache, progress=progress)
    from kvtools.server.saved_models import open_store  # takes long to import, and may be a whole model

    store: TableStore = open_store(path, options=options, cache=cache, progress=progress, stop=stop)
    return store


def _check_default_rows(store: TableStore, path: str) -> None:
    """Raise `BadInputError` for the first table that could not give missing keys what --missing default promises."""
    for name, table in store.tables.items():
        if table.table is None or table.table.default_row is None:
            why = (
                "its rows are in Redis"
                if table.table is None
                else "not all of its rows began alike, as far as is known"
            )
            raise BadInputError(
                f"--missing default: table '{name}' of '{path}' has no default row ({why}); say --missing zeros or"
                " error, or serve the checkpoint of a table whose initializer is a constant"
            )


def _touch(store: TableStore, name: str, recent: RecentKeys) -> None:
    table = store.tables[name]
    keys: np.ndarray[Any, Any] = recent.keys()
    if table.schema.key_dtype == "uint64":
        keys = keys.view(np.uint64)
    else:  # the table may have had wider keys before
        keys = keys[(keys >= table.key_limits.min) & (keys <= table.key_limits.max)].astype(table.schema.key_dtype)
    for start in range(0, len(keys), _TOUCHED_AT_ONCE):
        table.lookup(keys[start : start + _TOUCHED_AT_ONCE])


def broken(store: TableStore) -> str:
    """Return why a store that was sound gives no rows any more; empty if it does."""
    try:
        with file_errors():
            store.snapshot.native.look()
    except BadInputError as error:
        return one_line(str(error))
    except AttributeError:  # a whole model, or rows in Redis
        pass
    return ""


def described(error: Exception) -> tuple[str, str]:
    """Return a name of `google.rpc.Code` and a message for what keeps a version from being served."""
    if isinstance(error, CorruptFileError):
        return "DATA_LOSS", str(error)
    if isinstance(error, RequestError):  # of a lookup: it was cut or written over since it was opened
        return "DATA_LOSS", error.message
    if isinstance(error, (BadInputError, UsageError)):
        return "INVALID_ARGUMENT", str(error)
    if isinstance(error, KvtoolsError):
        return "UNAVAILABLE", str(error)
    if isinstance(error, MemoryError):
        return "RESOURCE_EXHAUSTED", "out of memory"
    if isinstance(error, OSError):
        where = f"'{error.filename}': " if error.filename else ""
        return "UNAVAILABLE", f"{where}{error.strerror or error}"
    log.error("loading a version", exc_info=error)
    return "INTERNAL", f"{type(error).__name__}: {error}"
