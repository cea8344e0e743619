"""From a URL to the local path that stands for it: ROOT/s3/bucket/name for s3://bucket/name.

What a store has is listed when it is asked for; files of the right names, sizes and times are then made under ROOT, and
have no contents yet: `RemoteFile` fetches these. Everything else sees ordinary paths. ROOT is a folder of this process,
beside other temporary files (TMPDIR), and goes when the process ends; what a killed one has left, the next one removes.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from kvtools.errors import BadInputError, OutputError
from kvtools.remote.fault import reason_of
from kvtools.remote.listing import list_folder, list_tree
from kvtools.remote.remote_file import RemoteFile
from kvtools.remote.shown import show_root, shown
from kvtools.remote.store import Entry, Store, store_of
from kvtools.remote.stored import forget, register, stored
from kvtools.remote.url import RemoteUrl, parse

_PREFIX = "kvtools-remote-"
_LOCK = threading.RLock()
_root: Path | None = None
_lock_file = -1

_OF_CHECKPOINT = re.compile(r"\.(index|meta|data-\d{5,}-of-\d{5,})$")
_BESIDE = re.compile(r"TFRADynamicEmbedding(-\d+)?|_extras")
"""Folders that belong to a checkpoint, or a file, beside which they lie."""


def mirrored(text: str) -> Path:
    """List what a URL names, as it is now, and return the local path that stands for it.

    Where nothing lies there the path does not exist, as with any path. `file://` URLs are their own paths.

    Raises:
        UsageError: the URL is of another kind, or has what URLs must not have; see `parse`.
        MissingDependencyError: a package is needed that is not installed.
        BadInputError: the store refuses, or cannot be reached.
    """
    url = parse(text)
    if url.scheme == "file":
        return Path("/", *url.parts)
    store = store_of(url)
    with _LOCK:
        _list(url, store)
    return local_path_of(url)


def local_path_of(url: RemoteUrl) -> Path:
    """Return the path that stands for a URL, listed or not."""
    return root().joinpath(url.scheme, *filter(None, (url.place,)), *url.parts)


def url_of(path: str | os.PathLike[str]) -> RemoteUrl | None:
    """Return the URL that a local path stands for, None where it is one of this machine."""
    if _root is None:
        return None
    absolute = Path(os.path.normpath(Path(path).absolute()))
    if not absolute.is_relative_to(_root) or absolute == _root:
        return None
    return parse(shown(str(absolute)))


def relist(path: Path) -> None:
    """List again what a path stands for, if that is in a store."""
    url = url_of(path)
    if url is not None:
        with _LOCK:
            _list(url, store_of(url))


def root() -> Path:
    """Return the folder of this process under which remote places lie."""
    global _root, _lock_file
    with _LOCK:
        if _root is None:
            base = Path(tempfile.gettempdir()).resolve()
            _remove_leftovers(base)
            try:
                _root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
                _lock_file = os.open(_root, os.O_RDONLY | os.O_CLOEXEC)
                fcntl.flock(_lock_file, fcntl.LOCK_EX)
            except OSError as error:
                raise BadInputError(
                    f"making a folder in '{base}' for remote files: {error.strerror or error}; name another by TMPDIR"
                ) from error
            show_root(str(_root))
            atexit.register(_remove, _root, os.getpid())
        return _root


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # and no fork of it
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(base: Path) -> None:
    """Remove what processes have left that were killed: a running one holds a lock on its own."""
    with contextlib.suppress(OSError):
        for folder in base.glob(f"{_PREFIX}*"):
            if folder.stat().st_uid != os.getuid() or folder.is_symlink():
                continue
            file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            except OSError:
                continue
            finally:
                os.close(file)


def _list(url: RemoteUrl, store: Store) -> None:
    if url.read_only:
        _list_web(url, store)
        return
    above = RemoteUrl(url.scheme, url.place, url.parts[:-1])
    if not url.parts:
        _take_tree(url, store)
        return
    try:
        beside = list_folder(store, store.name_of(above), above.text)
    except FileNotFoundError:
        beside = {}
    except BadInputError as refused:
        if not isinstance(refused.__cause__, PermissionError):
            raise
        # Who may read a file may not always list its folder.
        _take_alone(url, store, refused)
        return
    name = url.parts[-1]
    _take(above, {(child,): entry for child, entry in beside.items() if not entry.folder}, store, below=False)
    for child, entry in beside.items():
        if entry.folder and (child == name or _BESIDE.fullmatch(child)):
            _take_tree(RemoteUrl(url.scheme, url.place, (*above.parts, child)), store, entry.name)
    if name not in beside:
        _forget(local_path_of(url))


def _take_alone(url: RemoteUrl, store: Store, refused: BadInputError) -> None:
    try:
        entry = store.entry(store.call(f"reading '{url.text}'", lambda: store.fs.info(store.name_of(url))))
    except (FileNotFoundError, BadInputError):
        raise refused from None
    if entry.folder:
        raise refused
    name = url.parts[-1]
    above = RemoteUrl(url.scheme, url.place, url.parts[:-1])
    _take(above, {(name,): entry}, store, below=False, asked=lambda other: other == name)


def _list_web(url: RemoteUrl, store: Store) -> None:
    """List a place on a web server: a file, or what a page of links calls a folder or the files of a checkpoint."""
    name = store.name_of(url)
    doing = f"reading '{url.text}'"
    if url.folder or not url.parts:
        with contextlib.suppress(FileNotFoundError):
            _take_tree(url, store, name.rstrip("/") + "/")
        return
    above = RemoteUrl(url.scheme, url.place, url.parts[:-1])
    found: dict[tuple[str, ...], Entry] = {}
    try:
        told = store.call(doing, lambda: store.fs.info(name))
    except FileNotFoundError:
        told = None
    if told is not None and "html" in str(told.get("mimetype", "")):  # a page: of a folder, as servers list them
        with contextlib.suppress(FileNotFoundError):
            _take_tree(url, store, name.rstrip("/") + "/")
        return
    if told is None or _OF_CHECKPOINT.search(url.parts[-1]):
        with contextlib.suppress(FileNotFoundError, BadInputError):
            listed = list_folder(store, store.name_of(above).rstrip("/") + "/", above.text)
            found = {(child,): entry for child, entry in listed.items() if not entry.folder}
    if told is not None:
        if told.get("size") is None:
            raise BadInputError(f"{doing}: the server does not tell its size; copy the file, and name the copy")
        found[(url.parts[-1],)] = store.entry(told)
    own = _OF_CHECKPOINT.sub("", url.parts[-1])
    _take(above, found, store, below=False, asked=lambda other: _OF_CHECKPOINT.sub("", other) == own)


def _take_tree(url: RemoteUrl, store: Store, name: str | None = None) -> None:
    try:
        found = list_tree(store, name or store.name_of(url), url.text)
    except FileNotFoundError:
        _forget(local_path_of(url))
        return
    _take(url, found, store, below=True)


def _take(
    url: RemoteUrl,
    found: dict[tuple[str, ...], Entry],
    store: Store,
    *,
    below: bool,
    asked: Callable[[str], bool] = lambda name: True,
) -> None:
    """Make the files of a folder what was found in it.

    Args:
        url: the folder.
        found: what lies in it.
        store: where.
        below: whether all that lies deeper was looked for, too.
        asked: which files of the folder were looked for; others, which another URL has named, stay.
    """
    folder = local_path_of(url)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = {folder.joinpath(*path) for path in found}
        for old in list(folder.rglob("*") if below else folder.iterdir()):
            if old not in there and (below or not old.is_dir()) and asked(old.name):
                _forget(old)
        for path, entry in found.items():
            local = folder.joinpath(*path)
            if entry.folder:
                local.mkdir(parents=True, exist_ok=True)
            else:
                _make(local, entry, store)
    except OSError as error:
        raise BadInputError(f"opening '{url.text}': {reason_of(error)}") from error


def _make(local: Path, entry: Entry, store: Store) -> None:
    known = stored(local)
    if isinstance(known, RemoteFile) and known.entry == entry and local.exists():
        return
    forget(local)
    if local.is_dir():
        shutil.rmtree(local)
    local.unlink(missing_ok=True)
    file = os.open(local, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(file, entry.size)
    finally:
        os.close(file)
    if entry.modified is not None:
        os.utime(local, (entry.modified, entry.modified))
    register(local, RemoteFile(store, entry, local, shown(str(local))))


def _forget(local: Path) -> None:
    """Remove what stands for something that is not there any more; whoever reads it gets an error."""
    forget(local, below=True)
    if local.is_dir():
        shutil.rmtree(local, ignore_errors=True)
    else:
        local.unlink(missing_ok=True)


def is_writable_place(target: Path) -> bool:
    """Tell whether a path stands for a place in a store.

    Raises:
        OutputError: it stands for one where nothing can be written, as on a web server.
    """
    url = url_of(target)
    if url is not None and url.read_only:
        raise OutputError(f"writing '{url.text}': {url.scheme}:// is for reading; name a place in a store")
    return url is not None
