"""Snapshots: the tables of a model in one immutable file, mapped and looked up as it is.

`kvtools migrate --to snapshot` and `kvtools export --snapshot` write them; docs/dialects/snapshot.md is the format. A
snapshot of any size is open at once, and processes that open the same one share its memory.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvtools import _snapshot
from kvtools.dialects.chunk import Array
from kvtools.errors import BadInputError, CorruptFileError, UnknownTableError, UsageError
from kvtools.remote.paths import local_path
from kvtools.remote.stored import stored

GoOn = Callable[[int, int], bool]
"""Called now and then with the bytes that are done and those there are; returning False stops the work."""


class SnapshotTable:
    """One table of an open snapshot. Any thread; `native` is the compiled table, for C++ that takes it.

    Every method raises `BadInputError` once the file was cut or written over in place: see `Snapshot`.
    """

    def __init__(self, native: _snapshot.Table) -> None:
        self.native = native
        self.name = native.name.decode("utf-8", "surrogateescape")
        self._key_limits = np.iinfo(native.key_dtype)

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return self.native.rows

    @property
    def dim(self) -> int:
        """How many numbers a row has."""
        return self.native.dim

    @property
    def key_dtype(self) -> np.dtype[Any]:
        """The type of the keys."""
        return np.dtype(self.native.key_dtype)

    def find(self, keys: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Return the row number of each of `keys`, integers of any shape; -1 where there is none.

        Raises:
            TypeError: they are no integers.
            UsageError: a key is out of the range of the table's key type.
        """
        with file_errors():
            return self.native.find(self._keys(keys))

    def lookup(self, keys: npt.ArrayLike, *, missing: Array | None = None) -> tuple[Array, npt.NDArray[np.bool_]]:
        """Return the rows of `keys` and which of them were found.

        Args:
            keys: [...], integers.
            missing: [dim], what an absent key gets; zeros if None.

        Returns:
            Values [..., dim] in the table's type (float32 where rows are int8 with a scale), found [...] bool.

        Raises:
            TypeError: they are no integers.
            UsageError: a key is out of the range of the table's key type.
        """
        with file_errors():
            return self.native.lookup(self._keys(keys), missing=missing)

    def pool(
        self,
        keys: npt.ArrayLike,
        splits: npt.NDArray[np.int64],
        combiner: Literal["sum", "mean", "sqrtn"] = "sum",
        *,
        weights: npt.NDArray[np.float32] | None = None,
        missing: npt.NDArray[np.float32] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Combine the rows of each bag of keys into one.

        Args:
            keys: [n], integers.
            splits: [bags + 1], rising from 0 to n: bag b has the keys from splits[b] to splits[b + 1].
            combiner: "sum", "mean" (over the sum of weights) or "sqrtn" (over the root of the sum of their squares).
            weights: [n]; all 1 if None.
            missing: [dim], the row of an absent key, which counts like others; zeros if None.

        Returns:
            [bags, dim] float32; zeros for a bag without keys.
        """
        with file_errors():
            return self.native.pool(self._keys(keys), splits, combiner, weights=weights, missing=missing)[0]

    def _keys(self, keys: npt.ArrayLike) -> Array:
        """Return keys in the table's type, in one piece of memory."""
        given = np.asarray(keys, order="C")
        limits = self._key_limits
        if given.dtype == limits.dtype:
            return given
        if not given.size:
            return given.astype(limits.dtype)
        if given.dtype.kind not in "iu":
            return given  # which is refused
        for key in (int(given.min()), int(given.max())):
            if not limits.min <= key <= limits.max:
                raise UsageError(
                    f"looking up in table '{self.name}': got key {key}, expected {limits.dtype}: {limits.min} to"
                    f" {limits.max}"
                )
        return given.astype(limits.dtype)


class Snapshot:
    """An open snapshot: `path`, `bytes`, `fingerprint` (two with the same one have the same rows), `tables` by name.

    Renaming another file to its path, or deleting it, changes nothing here. Where the file itself is cut, or becomes
    another snapshot, every use of it from then on raises `BadInputError`; it never gives rows of two files. Where it
    was written to or touched otherwise, uses raise that for 50 ms; from then on what they touch is compared with its
    checksum, as with `verify_on_use`, until `verify` has come to its end.

    Raises:
        BadInputError: there is no such file, or it cannot be read.
        CorruptFileError: it is no snapshot, or a damaged one, as far as header and description tell; see `verify`.

    Example:
        ```python
        snapshot = Snapshot("model.kvsnap")
        values, found = snapshot.table("user_emb").lookup(np.array([17, -3]))
        ```
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = local_path(path)
        self.path = Path(path)
        stored(path).keep()
        with file_errors():
            self.native = _snapshot.open(utf8_path(path))
        self.tables = {table.name: table for table in map(SnapshotTable, self.native.tables)}

    @property
    def bytes(self) -> int:
        """The size of the file."""
        return self.native.bytes

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits, of what the tables hold."""
        return self.native.fingerprint

    @property
    def warm(self) -> bool:
        """Whether `populate` came to its end."""
        return self.native.warm

    @property
    def resident(self) -> bool:
        """Whether `populate` came to its end and read all rows, too: there was memory for them."""
        return self.native.resident

    def table(self, name: str) -> SnapshotTable:
        """Return a table; raises `UnknownTableError`."""
        if name not in self.tables:
            raise UnknownTableError(
                f"opening table '{name}' of '{self.path}': no such table; it has {', '.join(self.tables) or 'none'}"
            )
        return self.tables[name]

    def populate(self, *, threads: int = 4, go_on: GoOn | None = None, background: bool = False) -> bool:
        """Read the file into memory, directories and keys first, then rows where memory has room for all of them.

        In the `background`, threads of the lowest priority do it: who looks up at the same time does not notice.

        Returns:
            Whether it came to its end: `go_on` may stop it.
        """
        with file_errors():
            return self.native.populate(threads, go_on, background)

    def verify_on_use(self) -> None:
        """Compare what lookups and reads touch with its checksum from now on, a mebibyte at a time, before it is used.

        What touches a damaged one raises `CorruptFileError`, and gives nothing. It ends when `verify` has come to its
        end: lookups cost nothing more from then on.

        Raises:
            CorruptFileError: a default row is damaged; they are compared at once.

        Example:
            ```python
            snapshot = Snapshot("model.kvsnap")
            snapshot.verify_on_use()
            values, found = snapshot.table("user_emb").lookup(keys)  # what was written, or an error
            ```
        """
        with file_errors():
            self.native.verify_on_use()

    def verify(self, *, threads: int = 0, go_on: GoOn | None = None, background: bool = False) -> bool:
        """Compare all bytes with their checksums, by so many threads (0: one per processor).

        In the `background`, they have the lowest priority; see `populate`.

        Returns:
            Whether it came to its end: `go_on` may stop it, and then so does who writes to the file.

        Raises:
            CorruptFileError: the message names table, section and place.
        """
        with file_errors():
            return self.native.verify(threads, go_on, background)


def utf8_path(path: str | os.PathLike[str]) -> str:
    """Return a path as the compiled module takes it, which knows names in UTF-8 only.

    Raises `BadInputError` of another: bytes that are no UTF-8, or letters in a locale that writes them otherwise.

    >>> utf8_path(Path("models/model.kvsnap"))
    'models/model.kvsnap'
    """
    text = os.fspath(path)
    if text.encode("utf-8", "replace") != os.fsencode(text):
        raise BadInputError(f"working on '{text}': names of snapshots are UTF-8, and this one is not; choose another")
    return text


@contextlib.contextmanager
def file_errors() -> Iterator[None]:
    """Raise what the compiled module says of a file as errors of kvtools."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(("opening '", "verifying '")):
            raise CorruptFileError(str(error)) from error
        raise
    except RuntimeError as error:
        raise BadInputError(str(error)) from error
