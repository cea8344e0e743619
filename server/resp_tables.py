"""Tables as a connection of the Redis protocol names them.

Where several models are served, a table has its model before it, as in `ctr:user_emb`, or its name alone where no other
model has one of that name.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtools._snapshot import Table, resp_answer
from kvtools.errors import BadInputError
from kvtools.server.catalog import Catalog, NoVersionError, ServedVersion
from kvtools.server.recent_keys import RecentKeys
from kvtools.server.store import StoredTable, lookup_errors

_NUMBER = re.compile(rb"-?[0-9]+")
_AT_ONCE = 65_536  # numbers: a lookup of more goes to a thread


@dataclass(frozen=True, slots=True)
class RespTable:
    """A table, with what every lookup of it needs at hand; keys are `low` to `high`, and `at_once` of them are few.

    `model` is None where there is only one; `served` is its name in any case.
    """

    name: str
    stored: StoredTable
    native: Table | None
    low: int
    high: int
    at_once: int
    recent: RecentKeys | None
    model: str | None = None
    served: str = ""


@dataclass
class _Served:
    """What is served: `by_name` has all names, `listed` one for each table, `ambiguous` those that could be several.

    `waiting` are models without a version.
    """

    versions: list[ServedVersion]
    listed: dict[bytes, RespTable]
    by_name: dict[bytes, RespTable]
    ambiguous: dict[bytes, list[bytes]]
    waiting: list[str] = field(default_factory=list)
    warm: bool = False


class Tables:
    """The tables of what is served now, by name as bytes, in the order of their names (of several models: by model)."""

    def __init__(self, catalog: Catalog, max_values: int) -> None:
        self._catalog = catalog
        self._numbers = min(_AT_ONCE, max_values)
        self._now: Callable[[], _Served | None] = lambda: None

    def now(self) -> dict[bytes, RespTable]:
        """Return the tables of the latest versions; raises `KvtoolsError` if none is served."""
        return self._served().listed

    def warm(self) -> bool:
        """Return whether they are in memory."""
        served = self._served()
        if not served.warm:
            served.warm = all(version.store.warm for version in served.versions)
        return served.warm

    def _served(self) -> _Served:
        served = self._now()
        if served is None:
            epoch = self._catalog.epoch
            models = self._catalog.names()
            if len(models) > 1:
                latest = {name: self._catalog.versions(name)[-1:] for name in models}
                versions = [version for each in latest.values() for version in each]
                served = self._of_several(versions or [self._catalog.version()])  # which says that there is none
                served.waiting = [name for name, each in latest.items() if not each]
            else:
                version = self._catalog.version()
                by_name = {name.encode(): self._table(version, name) for name in sorted(version.store.tables)}
                served = _Served([version], by_name, by_name, {})
            # The epoch keeps it, and not this: a version that is served no more is let go of.
            epoch.hold(served)
            self._now = weakref.ref(served)
        return served

    def _of_several(self, versions: list[ServedVersion]) -> _Served:
        """Return the tables of several models."""
        pairs = [
            (f"{version.model}:{name}".encode(), self._table(version, name, version.model))
            for version in versions
            for name in sorted(version.store.tables)
        ]
        meant: dict[bytes, list[int]] = {}
        for place, (whole, table) in enumerate(pairs):
            for name in (table.name.encode(), whole):
                meant.setdefault(name, []).append(place)
        by_name = {name: pairs[places[0]][1] for name, places in meant.items() if len(places) == 1}
        ambiguous = {name: [pairs[place][0] for place in places] for name, places in meant.items() if len(places) > 1}
        for alike, models in self._catalog.same_tables().items():  # also of one that has no version now
            by_name.pop(alike.encode(), None)
            ambiguous.setdefault(alike.encode(), [f"{model}:{alike}".encode() for model in models])
        listed = {}
        for whole, table in pairs:
            alone = table.name.encode()
            listed[alone if alone in by_name else whole] = table
        return _Served(versions, listed, by_name, ambiguous)

    def _refuse_ambiguous(self, name: bytes) -> None:
        """Raise `BadInputError` where a name could mean tables of several models."""
        if meant := self._served().ambiguous.get(name):
            shown = ", ".join(f"'{each.decode()}'" for each in meant)
            raise BadInputError(
                f"there is a table '{shown_bytes(name)}' in several models; write its model before it: {shown}"
            )

    def get_all(self, names: Iterable[bytes], selected: bytes | None) -> list[RespTable]:
        """Return tables as `get` does, all as they are at one moment."""
        served = self._served()
        return [self.get(name, selected, served) for name in names]

    def get(self, name: bytes, selected: bytes | None, served: _Served | None = None) -> RespTable:
        """Return a table; an empty name: the one that is selected, or the only one. Raises `KvtoolsError`."""
        served = served or self._served()
        table = served.by_name.get(name)
        if table is not None:
            return table
        tables = served.listed
        if not name:
            if selected is None and len(tables) == 1:
                return next(iter(tables.values()))
            if selected is None:
                shown = ", ".join(f"{number}: {one.decode()}" for number, one in enumerate(list(tables)[:8]))
                raise BadInputError(f"the key names no table; write table:17, or SELECT a table ({shown})")
            name = selected
        self._refuse_ambiguous(name)
        try:
            return served.by_name[name]
        except KeyError:
            if served.waiting:  # it may have the table
                raise NoVersionError(f"model '{served.waiting[0]}' has no version that can be served") from None
            raise BadInputError(f"there is no table '{shown_bytes(name)}'") from None

    def _table(self, served: ServedVersion, name: str, model: str | None = None) -> RespTable:
        stored = served.store.tables[name]
        limits = stored.key_limits
        at_once = self._numbers // max(1, stored.schema.dim)
        recent = served.recent.get(name)
        return RespTable(name, stored, stored.table, limits.min, limits.max, at_once, recent, model, served.model)

    def name_at(self, database: bytes) -> bytes:
        """Return the name of a table, from its number in the order of names, or its name. Raises `KvtoolsError`."""
        served = self._served()
        if database in served.by_name:
            return database
        self._refuse_ambiguous(database)
        tables = served.listed
        there = f"there are tables 0 to {len(tables) - 1}, by name"
        if not _NUMBER.fullmatch(database):
            raise BadInputError(f"there is no table '{shown_bytes(database)}'; {there}")
        number = int(database) if len(database) < 10 else -1
        if not 0 <= number < len(tables):
            raise BadInputError(f"DB index is out of range; {there}")  # as Redis says it
        return list(tables)[number]


def answer_command(table: StoredTable, keys: npt.NDArray[np.int64], single: bool, resp3: bool) -> tuple[bytes, int]:
    """Return the reply to a command that asks for `keys` [n] (of uint64: their bits), and how many have no row."""
    if table.table:
        with lookup_errors(table):
            return resp_answer(table.table, keys, single, resp3)
    key_dtype = table.schema.key_dtype
    typed: npt.NDArray[Any] = keys.view(np.uint64) if key_dtype == "uint64" else keys.astype(key_dtype)
    values, found = table.lookup(typed)
    rows = np.ascontiguousarray(values).view(np.uint8).reshape(len(keys), -1)
    null = b"_\r\n" if resp3 else b"$-1\r\n"
    head = b"$%d\r\n" % rows.shape[1]
    replies = [head + row.tobytes() + b"\r\n" if there else null for row, there in zip(rows, found, strict=True)]
    return b"".join(replies if single else [b"*%d\r\n" % len(keys), *replies]), int(np.count_nonzero(~found))


def shown_bytes(text: bytes) -> str:
    """Return text from outside as a message may show it."""
    return "".join(c if c.isprintable() else "?" for c in text[:64].decode("utf-8", "replace"))
