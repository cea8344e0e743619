"""What lies in a remote folder: names, sizes and times, and nothing of the contents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvtools.errors import BadInputError
from kvtools.remote.store import Entry, Store

MOST = 100_000
"""Files and folders that are taken of one folder, at any depth."""
_DEPTH = 16
_AT_ONCE = 16
_LONGEST_NAME = 255


def list_folder(store: Store, name: str, shown: str) -> dict[str, Entry]:
    """Return what lies in a folder by its name there; an object and a folder of one name are an error.

    Raises:
        FileNotFoundError: there is no such folder.
        BadInputError: the store refuses, or a name cannot be that of a file on this machine.
    """
    found: dict[str, Entry] = {}
    told = store.call(f"listing '{shown}'", lambda: store.fs.ls(name, detail=True))
    for entry in _entries(store, name, told):
        below = entry.name.rstrip("/").rsplit("/", 1)[-1]
        if "\0" in below or below in (".", "..") or len(below.encode("utf-8", "surrogateescape")) > _LONGEST_NAME:
            raise BadInputError(
                f"listing '{shown}': a file in it is called {below[:80]!r}, which no file here can be; name the"
                " checkpoint itself, or rename that file"
            )
        twin = found.get(below)
        if twin is not None and twin.folder != entry.folder:
            raise BadInputError(
                f"listing '{shown}': '{below}' is a file and a folder there; name another, or rename one of them"
            )
        found[below] = entry
    return found


def list_tree(store: Store, name: str, shown: str) -> dict[tuple[str, ...], Entry]:
    """Return what lies in a folder and below it, by the names that lead there.

    Raises:
        FileNotFoundError, BadInputError: see `list_folder`; or there are more than `MOST` files.
    """
    found: dict[tuple[str, ...], Entry] = {}
    waiting: list[tuple[str, ...]] = [()]
    for _ in range(_DEPTH):
        if not waiting:
            return found

        def below(path: tuple[str, ...]) -> dict[str, Entry]:
            inside = found[path].name if path else name
            return list_folder(store, inside, "/".join([shown, *path]))

        with ThreadPoolExecutor(min(_AT_ONCE, len(waiting))) as pool:
            listed = list(pool.map(below, waiting))
        folders = []
        for path, entries in zip(waiting, listed, strict=True):
            for child, entry in entries.items():
                place = (*path, child)
                found[place] = entry
                if entry.folder:
                    folders.append(place)
        if len(found) > MOST:
            raise BadInputError(f"listing '{shown}': it has more than {MOST} files; name a folder below it")
        waiting = folders
    if waiting:
        raise BadInputError(f"listing '{shown}': folders lie in it {_DEPTH} deep; name a folder below it")
    return found


def _entries(store: Store, folder: str, told: list[Mapping[str, Any]]) -> Iterator[Entry]:
    own = folder.rstrip("/")
    web = store.scheme in ("http", "https")
    for one in told:
        entry = store.entry(one)
        below = entry.name.rstrip("/").rsplit("/", 1)[-1]
        if entry.name.rstrip("/") == own or not below:
            continue  # an object that stands for the folder itself
        if web:
            if "?" in below or "#" in below or not entry.name.startswith(own + "/"):
                continue  # links that sort the page, and those to elsewhere
            if not entry.folder:
                doing = f"reading '{entry.name}'"
                try:
                    entry = store.entry(store.call(doing, lambda: store.fs.info(entry.name)))  # noqa: B023
                except FileNotFoundError:
                    continue  # a link to what is gone
        yield entry
