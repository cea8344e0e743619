"""Writing to a store: files go up in parallel, and the one that makes them a checkpoint goes last.

What was written lies in a work folder on this machine, whole and synced. Where nothing stands at the target yet, its
files go there: data first, the index (or the folder's mark) when they are all there with the right sizes. In a folder
whose files open without an index, Parquet for one, `UNFINISHED` stands from the first file to the last: whoever opens a
folder with that in it is refused. Where something stands that is to be replaced, the new files first go to a folder
beside it; only when all of them are there does the old index go, and they are copied to their places within the store.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kvtools.errors import BadInputError, KvtoolsError, OutputError
from kvtools.remote.listing import list_folder, list_tree
from kvtools.remote.mirror import relist, url_of
from kvtools.remote.store import Entry, Store, store_of
from kvtools.remote.unfinished import UNFINISHED
from kvtools.remote.url import RemoteUrl

_FILES_AT_ONCE = 4
_PART_BYTES = 16 << 20
_MOST_PARTS = 9000


def put_files(files: Sequence[Path], target: Path, *, old: Sequence[str], force: bool) -> None:
    """Put files, the last of which makes them a checkpoint, beside each other where `target` is.

    Args:
        files: what was written, named as it is to be.
        target: the file, or the prefix of several.
        old: names there that are of what is replaced.
        force: what appeared there meanwhile may be replaced, too.

    Raises:
        OutputError: the store does not take them; what is left there is said.
    """
    url = url_of(target)
    assert url is not None
    above = RemoteUrl(url.scheme, url.place, url.parts[:-1])
    put = _Upload(above, url.text)
    paths: dict[tuple[str, ...], Path] = {(file.name,): file for file in files}
    order = list(paths)
    alone = len(files) == 1 and url.whole_puts
    unknown, there = False, list[str]()
    try:
        there = put.names_of((), [file.name for file in files] + list(old))
    except BadInputError as error:
        unknown = alone and isinstance(error.__cause__, PermissionError)  # who may write need not be able to list
        if not unknown:
            raise OutputError(f"writing '{url.text}': {error}; what is there is as it was") from error
    if there and not force:
        raise OutputError(f"writing '{url.text}': '{there[0]}' appeared there meanwhile; name another place")
    if alone and (there or unknown):
        put.put_over(files[0], order[0])
        put.remove([(name,) for name in there if (name,) not in paths])
    elif there:
        put.replace(paths, order, [(name,) for name in there], index=order[-1], beside=url.parts[-1])
    else:
        put.put(paths, order)
    relist(target)


def put_folder(work: Path, target: Path, *, mark: str, force: bool) -> None:
    """Put a folder where `target` is; the file `mark` in it goes last, and stands for the whole.

    Raises:
        OutputError: the store does not take it; what is left there is said.
    """
    url = url_of(target)
    assert url is not None
    put = _Upload(url, url.text)
    paths = {file.relative_to(work).parts: file for file in sorted(work.rglob("*")) if not file.is_dir()}
    order = sorted(paths, key=lambda path: (path == (mark,), path))
    try:
        old = [path for path, entry in list_tree(put.store, put.name_of(()), url.text).items() if not entry.folder]
    except FileNotFoundError:
        old = []
    if old and not force:
        raise OutputError(f"writing '{url.text}': '{'/'.join(old[0])}' appeared there meanwhile; name another place")
    if old:
        put.replace(paths, order, old, index=(mark,), beside=None)
    else:
        with put.unfinished() if mark.startswith(".") else contextlib.nullcontext():
            put.put(paths, order)
    relist(target)


class _StoppedError(KvtoolsError):
    """An upload is not wanted any more: another has failed, or the process is interrupted."""


def _stopping(stop: threading.Event) -> Any:
    """Return what fsspec calls when a part of a file is there; it raises once `stop` is set and no part is under way,
    as a store may keep one that comes when its upload has been given up."""
    callbacks: Any = importlib.import_module("fsspec.callbacks")

    class Stopping(callbacks.Callback):  # type: ignore[misc]
        def set_size(self, size: int) -> None:
            self.left, self.parts = size, 0

        def relative_update(self, inc: int = 1) -> None:
            self.left, self.parts = self.left - inc, self.parts + 1
            if stop.is_set() and (self.left <= 0 or self.parts % _FILES_AT_ONCE == 0):
                raise _StoppedError("the upload was given up")

    return Stopping()


class _Upload:
    """Puts files below one place of a store."""

    def __init__(self, place: RemoteUrl, shown: str) -> None:
        self.store: Store = store_of(place)
        self._place = place
        self._doing = f"writing '{shown}'"
        self._stop = threading.Event()

    def name_of(self, path: tuple[str, ...]) -> str:
        """Return what the store calls a file below the place."""
        return "/".join([self.store.name_of(self._place).rstrip("/"), *path])

    def names_of(self, folder: tuple[str, ...], names: Sequence[str]) -> list[str]:
        """Return which of these names there are in a folder below the place; raises as `list_folder` does where that
        cannot be known."""
        try:
            there = list_folder(self.store, self.name_of(folder), self._place.text)
        except FileNotFoundError:
            return []
        return [name for name in dict.fromkeys(names) if name in there]

    def put(self, paths: dict[tuple[str, ...], Path], order: Sequence[tuple[str, ...]]) -> None:
        """Put files where nothing is, all but the last of `order` at once, then that; or nothing.

        Raises:
            OutputError: with what is left, where what was put cannot be removed again.
        """
        begun: list[tuple[str, ...]] = []

        def put_one(path: tuple[str, ...]) -> None:
            self._put(paths[path], path, begun)

        try:
            self._all(order[:-1], put_one)
            self._check({path: paths[path] for path in order[:-1]})
            self._all(order[-1:], put_one)
        except BaseException as error:
            left = self.remove(begun[::-1])
            if left and isinstance(error, KvtoolsError):
                raise OutputError(f"{error}; {self._told(left)} could not be removed again: remove them") from error
            raise

    def put_over(self, file: Path, path: tuple[str, ...]) -> None:
        """Put one file where another may be: it takes its place at once, or not at all, so nothing is taken back."""
        self._all([path], lambda path: self._put(file, path, []))

    def replace(
        self,
        paths: dict[tuple[str, ...], Path],
        order: Sequence[tuple[str, ...]],
        old: Sequence[tuple[str, ...]],
        *,
        index: tuple[str, ...],
        beside: str | None,
    ) -> None:
        """Put files beside what is there; when all are there, let them take its place.

        Raises:
            OutputError: before the old index went, with everything as it was; later, the message says where the new
                files are, whole.
        """
        name = f".{beside or self._place.parts[-1]}.kvtools-{uuid.uuid4().hex[:12]}"
        above = self._place if beside else RemoteUrl(
            self._place.scheme, self._place.place, self._place.parts[:-1]
        )  # fmt: skip
        staged = RemoteUrl(above.scheme, above.place, (*above.parts, name))
        staging = _Upload(staged, staged.text)
        try:
            staging.put(paths, order)
            staging._check(paths)
        except KvtoolsError as error:
            raise OutputError(f"{self._doing}: {error}; what is there is as it was") from error
        try:
            with contextlib.nullcontext() if beside else self.unfinished():
                for path in [path for path in old if path == index or path[-1].endswith(".index")]:
                    self._remove(path)
                self._all(order[:-1], lambda path: self._copy(staging, path))
                self._copy(staging, order[-1])
                self._check(paths)
                self._all([path for path in old if path not in paths], self._remove)
        except Exception as error:
            raise OutputError(
                f"{self._doing}: {error}; the new files are whole at '{staged.text}': copy them to their place"
            ) from error
        left = staging.remove(order)
        if left:
            warnings.warn(
                f"{self._doing}: it is in its place; {self._told(left)} could not be removed at '{staged.text}'",
                stacklevel=2,
            )
        with contextlib.suppress(Exception):
            self.store.fs.rmdir(staging.name_of(()))  # where folders are more than names

    @contextlib.contextmanager
    def unfinished(self) -> Iterator[None]:
        """Have `UNFINISHED` stand in the folder until the block has ended well, or all it put is gone again."""
        name = self.name_of((UNFINISHED,))
        told = b"A checkpoint is being written here, or its writing was broken off: write it again, with --force.\n"
        self._make_folder((UNFINISHED,))
        self.store.call(self._doing, lambda: self.store.fs.pipe_file(name, told), writing=True)
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                if self.names_of((), [UNFINISHED]) and len(list_folder(self.store, self.name_of(()), "")) == 1:
                    self._remove((UNFINISHED,))
            raise
        self._remove((UNFINISHED,))

    def remove(self, paths: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
        """Remove files; return those that could not be."""
        left: list[tuple[str, ...]] = []

        def remove(path: tuple[str, ...]) -> None:
            try:
                self._remove(path)
            except Exception:
                left.append(path)

        self._all(paths, remove)
        return left

    def _put(self, file: Path, path: tuple[str, ...], begun: list[tuple[str, ...]]) -> None:
        name = self.name_of(path)
        self._make_folder(path)
        begun.append(path)
        options: dict[str, Any] = {}
        if self.store.scheme in ("s3", "s3a"):  # what lies in memory: parts at once, of files at once
            size = max(_PART_BYTES, file.stat().st_size // _MOST_PARTS)
            options = {"chunksize": size, "max_concurrency": _FILES_AT_ONCE, "callback": _stopping(self._stop)}
        self.store.call(self._doing, lambda: self.store.fs.put_file(str(file), name, **options), writing=True)

    def _copy(self, staging: _Upload, path: tuple[str, ...]) -> None:
        source, name = staging.name_of(path), self.name_of(path)
        self._make_folder(path)
        self.store.call(self._doing, lambda: self.store.fs.cp_file(source, name), writing=True)

    def _remove(self, path: tuple[str, ...]) -> None:
        name = self.name_of(path)
        with contextlib.suppress(FileNotFoundError):
            self.store.call(self._doing, lambda: self.store.fs.rm_file(name))

    def _make_folder(self, path: tuple[str, ...]) -> None:
        """Make the folders above a file, in a store that has folders."""
        if self._place.whole_puts and self.store.scheme != "memory":
            return
        folder = self.name_of(path).rpartition("/")[0]
        self.store.call(self._doing, lambda: self.store.fs.makedirs(folder, exist_ok=True), writing=True)

    def _check(self, paths: dict[tuple[str, ...], Path]) -> None:
        """Raise `OutputError` unless the store has these files with their sizes."""
        listed: dict[tuple[str, ...], dict[str, Entry]] = {}
        for path, file in paths.items():
            folder = path[:-1]
            if folder not in listed:
                try:
                    listed[folder] = list_folder(self.store, self.name_of(folder), self._place.text)
                except FileNotFoundError:
                    listed[folder] = {}
            found, size = listed[folder].get(path[-1]), file.stat().st_size
            if found is None or found.size != size:
                got = "nothing" if found is None else f"{found.size} bytes"
                raise OutputError(
                    f"{self._doing}: got {got} of '{'/'.join(path)}' there, expected {size}; write it again"
                )

    def _all(self, paths: Sequence[tuple[str, ...]], do: Callable[[tuple[str, ...]], object]) -> None:
        """Do it for all paths, on threads, for one path, too: an interrupt arrives in this one, which has them stop;
        s3fs takes back what it put when its callback raises."""
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            waiting = [pool.submit(do, path) for path in paths]
            try:
                for done in waiting:
                    done.result()
            except BaseException:
                self._stop.set()
                for one in waiting:
                    one.cancel()
                raise

    def _told(self, paths: Sequence[tuple[str, ...]]) -> str:
        names = ", ".join(f"'{'/'.join(path)}'" for path in paths[:4])
        return names + (f" and {len(paths) - 4} more" if len(paths) > 4 else "")
