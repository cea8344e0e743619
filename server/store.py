"""The tables that a server answers from: those of a snapshot, mapped before the first lookup."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools._snapshot import Table
from kvtools.chain_reader import refuse_increments
from kvtools.dialects import snapshot as dialect
from kvtools.dialects.chunk import Array
from kvtools.dialects.detect import open_checkpoint
from kvtools.dialects.dialect import Source
from kvtools.dialects.interface import Checkpoint
from kvtools.dialects.options import OpenOptions, Progress
from kvtools.dialects.schema import TableSchema
from kvtools.errors import BadInputError, CorruptFileError, UnknownTableError, one_line
from kvtools.server.host_paths import without_folders
from kvtools.server.request import RequestError
from kvtools.server.snapshot_cache import snapshot_of
from kvtools.snapshot import Snapshot, file_errors
from kvtools.split_manifest import EXPORT

_LOG = logging.getLogger("kvtools.serve")
_TELLS_EVERY = 1.0  # s
_SAYS_AGAIN_AFTER = 60.0  # s without such a lookup


class ServedFile:
    """What lookups find out about the file that is served: that it was cut, written over or damaged. Any thread.

    The first one is told in the log. `on_change` is called then, and at most once a second from then on: whoever loads
    versions looks what lies there now.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        self._told: float | None = None
        self._telling = threading.Lock()

    def changed(self, error: BadInputError) -> RequestError:
        """Note that a lookup has met `error`; returns what to answer."""
        if self._tell():
            _LOG.error("%s; lookups of it are answered with 503, and it is looked for anew", one_line(str(error)))
        return RequestError(
            503,
            "file_changed",
            "the file of this table was cut or written over while it was served; it is loaded anew, try again",
            {"Retry-After": "1"},
        )

    def damaged(self, error: CorruptFileError) -> RequestError:
        """Note that a lookup has met what is not as its checksum says; returns what to answer."""
        self._tell()  # what is damaged says who takes it out of service
        return RequestError(503, "damaged", without_folders(one_line(str(error))), {"Retry-After": "1"})

    def _tell(self) -> bool:
        """Call `on_change`, unless that was just done; returns whether it is worth a line in the log."""
        now = time.monotonic()
        with self._telling:
            since = None if self._told is None else now - self._told
            if since is not None and since < _TELLS_EVERY:
                return False
            self._told = now
        self.on_change()
        return since is None or since >= _SAYS_AGAIN_AFTER


class StoredTable:
    """One table, ready for lookups from any number of threads. Immutable.

    `schema` says what the source has; `table` is the compiled table of the snapshot, `duplicates` how many rows of the
    source are hidden by a later row of the same key, `key_limits` what a key may be, `file` hears of lookups that fail.
    """

    def __init__(self, table: Table, schema: TableSchema, file: ServedFile) -> None:
        self.table = table
        self.file = file
        self.schema = schema
        self.duplicates = table.duplicates
        self.key_limits = np.iinfo(schema.key_dtype)

    def lookup(self, keys: npt.NDArray[Any]) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Look up `keys` [n] of the table's key type.

        Returns the values [n, dim] in the table's type (float32 where rows are int8 with a scale), zeros where there is
        no row, and whether each key was found, bool [n].

        Raises:
            RequestError: the snapshot was cut or written over in place, or is damaged where these keys or rows lie.
        """
        with lookup_errors(self):
            return self.table.lookup(np.ascontiguousarray(keys))


class TableStore:
    """The tables of a snapshot, or of anything else that kvtools reads, by name.

    A snapshot is mapped as it is. Of anything else a snapshot is made first, in a cache that the next start finds; the
    source is not looked at again. What happens to the path later changes nothing of what is served: another file
    renamed to it, or nothing there any more. Only a snapshot that is served itself must not be written over in place:
    what lookups touch of it is compared with its checksums from then on, and what differs is an error.

    `export` names the export that all of them are of, where it was one in two halves (`split_manifest`).

    Args:
        path: a snapshot, a checkpoint of any dialect, or a SavedModel that `kvtools export` wrote.
        options: how to open it.
        tables: these only; all if empty.
        cache: the folder of snapshots that are made; see `snapshot_cache`.
        progress: called as rows are written to a new snapshot, and with all of a table's rows when it is there.

    Raises:
        BadInputError: there is no table, or the path cannot be read.
        UnknownTableError: there is no table of one of these names.
        OutputError: the cache cannot be written.

    Example:
        ```python
        store = TableStore("exported")
        embeddings, found = store.table("user_emb").lookup(np.array([17, -3]))
        ```
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        options: OpenOptions | None = None,
        tables: Sequence[str] = (),
        cache: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> None:
        options = options or OpenOptions()
        source = Source(os.fspath(path))
        if options.dialect in (None, dialect.NAME) and dialect.sniff(source):
            snapshot = Snapshot(dialect.file_of(source))
            checkpoint = dialect.checkpoint_of(source, snapshot.native)
            readers = checkpoint.select(tables)
        else:
            checkpoint = open_checkpoint(path, options)
            readers = checkpoint.select(tables)
            _some(checkpoint, len(readers))
            refuse_increments(f"serving '{checkpoint.path}'", readers)
            snapshot = snapshot_of(
                checkpoint,
                readers,
                options=options,
                cache=None if cache is None else Path(cache),
                progress=progress,
            )
        _some(checkpoint, len(readers))
        exports = {reader.schema.metadata.get(EXPORT) for reader in readers}
        self.export: str | None = exports.pop() if len(exports) == 1 else None
        self.path = checkpoint.path
        self.dialect = checkpoint.dialect
        self.fingerprint = snapshot.fingerprint
        self.snapshot = snapshot
        self.file = ServedFile()
        self.tables: dict[str, StoredTable] = {}
        for reader in readers:
            name = reader.schema.name
            self.tables[name] = StoredTable(snapshot.table(name).native, reader.schema, self.file)
            if progress:
                progress(name, reader.schema.rows, reader.schema.rows)

    def table(self, name: str) -> StoredTable:
        """Return the table `name`; raises `UnknownTableError`."""
        try:
            return self.tables[name]
        except KeyError:
            raise UnknownTableError(f"there is no table '{name}'; GET /v1/tables lists the tables") from None

    @property
    def intact(self) -> bool:
        """Whether lookups are answered: those of a file that was cut, or is being written over, are errors."""
        try:
            with file_errors():
                self.snapshot.native.check_unchanged()
        except BadInputError as error:
            self.file.changed(error)
            return False
        return True

    @property
    def warm(self) -> bool:
        """Whether `populate` has come to its end."""
        return self.snapshot.warm

    @property
    def resident(self) -> bool:
        """Whether `populate` has brought all rows into memory."""
        return self.snapshot.resident

    def populate(self, stop: threading.Event | None = None) -> None:
        """Read the snapshot into memory, directories and keys first, until `stop` is set; takes its time.

        As `verify`, by threads of the lowest priority: lookups go on meanwhile, and shall not wait for a processor.
        """
        self.snapshot.populate(background=True, go_on=None if stop is None else lambda done, total: not stop.is_set())

    def verify(self, go_on: Callable[[], bool] | None = None) -> bool:
        """Compare the snapshot with its checksums; returns whether it came to its end, before `go_on` said no.

        Raises:
            CorruptFileError: the message names table, section and place.
        """
        return self.snapshot.verify(
            threads=1, background=True, go_on=None if go_on is None else lambda done, total: go_on()
        )

    def verify_on_use(self) -> None:
        """Verify what lookups touch before they use it, until `verify` has come to its end, or `trust` is called.

        Raises:
            CorruptFileError: a default row is damaged; they are verified at once.
        """
        self.snapshot.verify_on_use()

    @property
    def identity(self) -> str:
        """Tells the file that is mapped from every other, and from itself before it was written to.

        Who verifies it verifies it for all workers that have it.
        """
        return self.snapshot.native.identity

    def discard(self) -> bool:
        """Remove the snapshot, if it was made in the cache, so that the next store makes it anew; returns whether."""
        if self.snapshot.path == self.path:
            return False
        with contextlib.suppress(OSError):
            if self.snapshot.native.is_at(str(self.snapshot.path)):  # not what another worker made since
                self.snapshot.path.unlink(missing_ok=True)
        return True

    def trust(self, identity: str) -> None:
        """Verify nothing on use any more: another process has verified the file of this `identity`, if this is one."""
        self.snapshot.native.trust(identity)

    @property
    def verifies_on_use(self) -> bool:
        """Whether lookups verify what they touch: from `verify_on_use` on, and from when the file was written to."""
        return self.snapshot.native.verifies_on_use


@contextlib.contextmanager
def lookup_errors(stored: StoredTable) -> Iterator[None]:
    """Raise what the compiled module says of the file of a table as a `RequestError`: 503.

    The server lets go of a version whose damage was met, and another one, or another server, has these rows. Where the
    file was cut or written over, it looks what lies there now.
    """
    try:
        with file_errors():
            yield
    except CorruptFileError as error:
        raise stored.file.damaged(error) from error
    except BadInputError as error:
        raise stored.file.changed(error) from error


def _some(checkpoint: Checkpoint, tables: int) -> None:
    if not tables:
        raise BadInputError(
            f"serving '{checkpoint.path}': it has no key-value table; see `kvtools inspect`, or name another path"
        )
