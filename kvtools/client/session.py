"""What a client does, whether it waits in a thread or on an event loop.

An operation is a generator: it yields calls that may go at once, is resumed when all of them are done, and returns what
the caller wants. `Client` and `AsyncClient` differ in who moves the calls, and in nothing else.
"""

from __future__ import annotations

import threading
import time
import urllib.parse
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

import numpy as np

from kvtools.client.call import Call
from kvtools.client.endpoint import endpoint_of
from kvtools.client.errors import (
    BadAnswerError,
    RefusedError,
    UnavailableError,
    WrongExportError,
    WrongShardError,
)
from kvtools.client.http_answer import Answer, Request
from kvtools.client.options import Options
from kvtools.client.pooling import COMBINERS, Combiner, pool
from kvtools.client.replicas import Replica, Replicas
from kvtools.client.tables import Array, Shard, Table, Tables, tables_of, typed_keys, wire_keys
from kvtools.errors import UnknownTableError, UsageError
from kvtools.lookup_frame import MEDIA_TYPE, MISSING, TableKeys, TableRows, decode_answer, encode_request
from kvtools.partition import owners
from kvtools.split_manifest import EXPORT_HEADER

T = TypeVar("T")
Steps = Generator[list[Call], None, T]
Missing = Literal["zeros", "default", "error"]
Rows = tuple[Array, Array]

_ROUNDS = 3  # in which pieces of one lookup may turn out to be of different versions
_SUSPECT_MISSES = 8  # answers without any row, after which a server is believed to have none
_SUSPECT_KEYS = 256
_TABLES_SHOWN = 3


class _ChangedError(BadAnswerError):
    """A table is not as it was described: another version is served."""


@dataclass
class _Wanted:
    """The keys of one table in a call, and where their rows go; `embeddings` is made when it is clear what comes."""

    table: Table
    keys: Array  # int64 [n], as on the wire
    shape: tuple[int, ...]
    embeddings: Array | None = None
    found: Array | None = None

    def put(self, where: Array | slice | None, part: TableRows) -> None:
        """Put rows in their places; None: they are all."""
        if where is None:
            self.embeddings, self.found = part.embeddings, part.found
            return
        self._make()
        assert self.embeddings is not None and self.found is not None
        self.embeddings[where], self.found[where] = part.embeddings, part.found

    def rows(self) -> Rows:
        """Return rows and found in the shape of the keys."""
        self._make()
        assert self.embeddings is not None and self.found is not None
        return self.embeddings.reshape(*self.shape, self.table.dim), self.found.reshape(self.shape)

    def _make(self) -> None:
        if self.embeddings is None:
            self.embeddings = np.zeros((len(self.keys), self.table.dim), self.table.rows_dtype)
            self.found = np.zeros(len(self.keys), np.bool_)


@dataclass
class _Piece:
    """A request: keys of one or more tables for one shard. `where` [i] is where the rows of part i go."""

    shard: int
    wanted: list[_Wanted] = field(default_factory=list)
    parts: list[TableKeys] = field(default_factory=list)
    where: list[Array | slice | None] = field(default_factory=list)
    at: Replica | None = None  # the only one to ask
    version: int = 0

    def add(self, wanted: _Wanted, where: Array | slice | None, keys: Array) -> None:
        self.wanted.append(wanted)
        self.parts.append(TableKeys(wanted.table.name, keys, own_type=wanted.table.rows_dtype != np.float32))
        self.where.append(where)

    @property
    def keys(self) -> int:
        return sum(len(part.keys) for part in self.parts)

    @property
    def shown(self) -> str:
        """What is asked for, for messages."""
        names = [f"'{part.table}'" for part in self.parts[:_TABLES_SHOWN]] + ["..."] * (len(self.parts) > _TABLES_SHOWN)
        return f"{self.keys} keys of table {', '.join(names)}"


class Session:
    """Shards and what is known of them; any thread."""

    def __init__(self, shards: Sequence[Sequence[str]], options: Options) -> None:
        self.options = options
        self.shards = [
            Replicas([endpoint_of(url) for url in urls], f"shard {number} of {len(shards)}" * (len(shards) > 1))
            for number, urls in enumerate(shards)
        ]
        places = [replica.endpoint for shard in self.shards for replica in shard.all]
        twice = next((place for place in places if places.count(place) > 1), None)
        if twice is not None:
            raise UsageError(f"making a client: '{twice.shown}' is named twice; each server once")
        if not places or not all(shard.all for shard in self.shards):
            raise UsageError("making a client: got a shard without a server, expected at least one URL for each")
        self._tables: Tables | None = None
        self._lock = threading.Lock()
        self._query = "" if options.model is None else f"?model={urllib.parse.quote(options.model, safe='')}"
        self._headers = {"Accept": "application/json"}
        if options.api_key is not None:
            self._headers["Authorization"] = f"Bearer {options.api_key}"
        if options.export is not None:
            self._headers[EXPORT_HEADER] = options.export

    def tables(self) -> Steps[dict[str, Table]]:
        """Return the tables that there are now, by name; `rows` counts those of all shards."""
        return dict((yield from self._describe(self._deadline())).tables)

    def check(self) -> Steps[tuple[list[Tables], str]]:
        """Ask every server of every shard; see `Client.check`."""
        deadline = self._deadline()
        asked = [(number, replica) for number, shard in enumerate(self.shards) for replica in shard.all]
        calls = [
            Call(self._listing_request(), self.shards[number].only(one), self.options, deadline)
            for number, one in asked
        ]
        yield calls
        listings: list[Tables] = []
        there: set[int] = set()
        for (number, _), call in zip(asked, calls, strict=True):
            if isinstance(call.error, UnavailableError):
                continue
            listings.append(self._listing(call, number))
            there.add(number)
            for table in listings[-1].tables.values():
                self._whole(table)
        lost = next((call.error for (number, _), call in zip(asked, calls, strict=True) if number not in there), None)
        return listings, "" if lost is None else str(lost)

    def lookup_many(self, keys: Mapping[str, Any], missing: Missing | None) -> Steps[dict[str, Rows]]:
        """Return embeddings and found of each table's keys."""
        _check_missing(missing)
        deadline = self._deadline()
        return (yield from self._as_described(deadline, lambda known: self._rows(known, keys, missing, deadline)))

    def _rows(
        self, known: Tables, keys: Mapping[str, Any], missing: Missing | None, deadline: float
    ) -> Steps[dict[str, Rows]]:
        wanted = {}
        for name, asked in keys.items():
            table = self._whole(known.table(name))
            wanted[name] = _Wanted(table, wire_keys(asked, table), np.shape(asked))
        _check_one_model([one.table for one in wanted.values()])
        pieces = [piece for piece in self._pieces(list(wanted.values()), known) if piece.keys]
        yield from self._look_up(pieces, known, missing, deadline)
        return {name: one.rows() for name, one in wanted.items()}

    def lookup_pooled(
        self,
        table: str,
        keys: Any,
        row_splits: Any,
        combiner: Combiner,
        weights: Any,
        missing: Missing | None,
    ) -> Steps[Array]:
        """Return one row for each bag; see `Client.lookup_pooled`."""
        if combiner not in COMBINERS:
            raise UsageError(f"looking up in table '{table}': got {combiner=}, expected one of {', '.join(COMBINERS)}")
        _check_missing(missing)
        deadline = self._deadline()
        bags = (table, keys, row_splits, combiner, weights)
        return (yield from self._as_described(deadline, lambda known: self._pooled(known, *bags, missing, deadline)))

    def _pooled(
        self,
        known: Tables,
        table: str,
        keys: Any,
        row_splits: Any,
        combiner: Combiner,
        weights: Any,
        missing: Missing | None,
        deadline: float,
    ) -> Steps[Array]:
        described = self._whole(known.table(table))
        flat = wire_keys(keys, described)
        splits, weighed = _bags(flat, row_splits, weights, table)
        bags = len(splits) - 1
        size = max(len(flat), bags)
        if not bags:
            return np.empty((0, described.dim), np.float32)
        if len(self.shards) == 1 and size <= known.max_keys and size * described.dim <= known.max_values:
            piece = _Piece(0, parts=[TableKeys(table, flat, combiner, splits, weighed)])
            call = self._call(piece, missing, deadline)
            yield [call]
            if not _is_too_large(call):
                piece.version, (answer,) = self._decode(call, piece.parts, known)
                if not (yield from self._check([(piece, call, True)], known, deadline)):
                    return answer.embeddings
        # Bags lie across servers or requests: their rows come here, and are pooled here.
        rows = yield from self._rows(known, {table: typed_keys(flat, described)}, missing, deadline)
        return pool(rows[table][0], splits, combiner, weighed)

    def _as_described(self, deadline: float, look_up: Callable[[Tables], Steps[T]]) -> Steps[T]:
        """Return what `look_up` gives, by the tables that are known; by those of now where they may have changed."""
        known, rounds = self._tables, 0
        while True:
            rounds += 1
            before = known
            if known is None:
                known = yield from self._describe(deadline)
            try:
                return (yield from look_up(known))
            except (UnknownTableError, UsageError):  # a new version may have the table, or take the key
                if before is None:
                    raise
            except _ChangedError:
                self._tables = None
                if rounds == _ROUNDS:
                    raise
            known = None

    def _deadline(self) -> float:
        return time.monotonic() + self.options.timeout

    @property
    def _goes_on(self) -> bool:
        """Whether the rows of other shards are wanted where one does not answer."""
        return len(self.shards) > 1 and self.options.shard_down == "missing"

    def _share(self, deadline: float) -> float:
        """Return until when some requests may take that go at once.

        Where a shard that does not answer only has missing rows, it is waited for half of the time that is left: with
        no time after it, the rows of the others could not be asked for, or not be checked.
        """
        now = time.monotonic()
        return now + (deadline - now) / 2 if self._goes_on else deadline

    def _at_once(self, pieces: list[_Piece]) -> tuple[list[_Piece], list[_Piece]]:
        """Return the pieces that go now, and those that wait: a shard that does not answer shall not hold others up."""
        if not self._goes_on:
            return pieces, []
        most = max(1, self.options.at_once // len(self.shards))
        now: list[_Piece] = []
        later: list[_Piece] = []
        asked = [0] * len(self.shards)
        for piece in pieces:
            (now if asked[piece.shard] < most else later).append(piece)
            asked[piece.shard] += 1
        return now, later

    def _call(self, piece: _Piece, missing: Missing | None, deadline: float) -> Call:
        headers = {**self._headers, "Content-Type": MEDIA_TYPE, "Accept": f"{MEDIA_TYPE}, application/json;q=0.5"}
        request = Request("POST", f"/v1/tables:lookup{self._query}", headers, encode_request(piece.parts, missing))
        shard = self.shards[piece.shard]
        return Call(request, shard if piece.at is None else shard.only(piece.at), self.options, deadline, piece.shown)

    def _pieces(self, wanted: Iterable[_Wanted], known: Tables) -> list[_Piece]:
        """Cut keys into requests of no more keys and numbers than a server takes."""
        pieces: list[_Piece] = []
        if len(self.shards) == 1:
            _fill(pieces, 0, [(one, None, one.keys) for one in wanted], known)
            return pieces
        by_shard: list[list[tuple[_Wanted, Array | None, Array]]] = [[] for _ in self.shards]
        for one in wanted:
            owner = owners(typed_keys(one.keys, one.table), len(self.shards), self.options.rule)
            for shard, chosen in enumerate(by_shard):
                where = np.flatnonzero(owner == shard)
                if len(where):
                    chosen.append((one, where, one.keys[where]))
        for shard, chosen in enumerate(by_shard):
            _fill(pieces, shard, chosen, known)
        return pieces

    def _look_up(self, pieces: list[_Piece], known: Tables, missing: Missing | None, deadline: float) -> Steps[None]:
        waiting, rounds = pieces, 0
        down: set[int] = set()
        while waiting:
            asked, later = self._at_once(waiting)
            calls = [self._call(piece, missing, self._share(deadline)) for piece in asked]
            yield calls
            smaller: list[_Piece] = []
            answered: list[tuple[_Piece, Call, bool]] = []
            rows: list[Sequence[TableRows]] = []
            for piece, call in zip(asked, calls, strict=True):
                if isinstance(call.error, UnavailableError) and self.options.shard_down == "missing":
                    pieces = [one for one in pieces if one is not piece]
                    down.add(piece.shard)
                    continue
                halves = _halves(piece) if _is_too_large(call) else []
                if halves:
                    pieces = [one for one in pieces if one is not piece] + halves
                    smaller += halves
                    continue
                piece.version, parts = self._decode(call, piece.parts, known)
                rows.append(parts)
                piece.at = call.replica
                answered.append((piece, call, any(_has_rows(part) for part in parts)))
            unsure = yield from self._check(answered, known, deadline)
            for (piece, _, _), parts in zip(answered, rows, strict=True):
                if any(piece is one for one in unsure):
                    piece.at = None
                    continue
                for one, where, part in zip(piece.wanted, piece.where, parts, strict=True):
                    one.put(where, part)
            older = _of_older_versions([piece for piece in pieces if piece.at is not None])
            rounds += bool(older or unsure)
            if rounds == _ROUNDS:
                raise UnavailableError(
                    "looking up: the servers changed versions, or were lost, again and again while they were asked; ask"
                    " for fewer keys at once"
                )
            waiting = smaller + older + unsure + [piece for piece in later if piece.shard not in down]

    def _decode(self, call: Call, parts: Sequence[TableKeys], known: Tables) -> tuple[int, Sequence[TableRows]]:
        answer = _checked(call)
        doing = f"looking up at {_place(call)}"
        if answer.headers.get("content-type", "").partition(";")[0].strip().lower() != MEDIA_TYPE:
            raise BadAnswerError(
                f"{doing}: got {answer.headers.get('content-type')!r}, expected {MEDIA_TYPE}; the server may be older"
                " than this client"
            )
        try:
            decoded, version = decode_answer(cast(bytes, answer.body.data))  # any buffer does
        except ValueError as error:
            raise BadAnswerError(f"{doing}: {error}") from error
        if len(decoded) != len(parts):
            raise BadAnswerError(f"{doing}: got rows of {len(decoded)} tables, expected {len(parts)}")
        for part, asked in zip(decoded, parts, strict=True):
            table = known.tables[asked.table]
            rows = len(asked.keys) if asked.combiner is None else asked.bags
            dtype = table.rows_dtype if asked.own_type else np.dtype(np.float32)
            got, shape = part.embeddings, (rows, table.dim)
            found = 0 if part.found is None else len(part.found)
            if got.shape != shape or got.dtype != dtype or (asked.combiner is None and found != rows):
                raise _ChangedError(
                    f"{doing}: got rows {got.dtype}{list(got.shape)} of table '{asked.table}', expected"
                    f" {dtype}{list(shape)}: it changed its dim or its type; look up again"
                )
        return version, decoded

    def _describe(self, deadline: float) -> Steps[Tables]:
        """Ask each shard for its tables."""
        share = self._share(deadline)
        calls = [Call(self._listing_request(), shard, self.options, share) for shard in self.shards]
        yield calls
        listings: list[Tables] = []
        for number, call in enumerate(calls):
            if isinstance(call.error, UnavailableError) and self.options.shard_down == "missing":
                continue
            listings.append(self._listing(call, number))
        if not listings:
            assert calls[0].error is not None
            raise calls[0].error
        known = _joined(listings)
        with self._lock:
            self._tables = known
        return known

    def _whole(self, table: Table) -> Table:
        """Return a table that is asked for rows: not one shard of several, as if it were all."""
        part = table.shard
        if len(self.shards) == 1 and part is not None and part.of > 1:
            raise WrongShardError(
                f"looking up in table '{table.name}': the server has shard {part.number} of {part.of} ({part.rule}),"
                " and other servers have the rest of the keys; name them all, in order, by shards="
            )
        return table

    def _listing_request(self) -> Request:
        return Request("GET", f"/v1/tables{self._query}", self._headers)

    def _listing(self, call: Call, shard: int) -> Tables:
        """Return what a server lists, checked: are these the tables of this shard?"""
        answer = _checked(call)
        assert call.replica is not None
        listing = tables_of(answer.body.tobytes(), f"asking {_place(call)}", self.options.max_keys)
        call.replica.versions = dict(listing.versions)
        if self.options.export is not None and listing.export != self.options.export:
            # A server that knows of exports has refused; this one would answer from whatever it has.
            raise WrongExportError(
                f"asking {_place(call)}: it does not say that its rows are of export '{self.options.export}'; serve the"
                " snapshot of that export, by a kvtools as new as this one"
            )
        if len(self.shards) == 1:
            call.replica.checked = call.is_there_still
            return listing
        said = {table.shard for table in listing.tables.values() if table.rows} - {None}
        expected = Shard(shard, len(self.shards), self.options.rule)
        wrong = next((one for one in said if one != expected), None)
        if wrong is not None:
            raise WrongShardError(
                f"asking {_place(call)}: it has shard {wrong.number} of {wrong.of} ({wrong.rule}), expected shard"
                f" {expected.number} of {expected.of} ({expected.rule}); see the order of shards="
            )
        call.replica.checked = bool(said) and call.is_there_still
        return listing

    def _check(
        self, answered: Sequence[tuple[_Piece, Call, bool]], known: Tables, deadline: float
    ) -> Steps[list[_Piece]]:
        """Look whether servers that were not looked at yet are the shards in whose place they stand.

        They are looked at anew when a connection was lost, since another server may be there, and when they have
        another version, since that may be of another shard.

        A server says which shard it has, or shows it by a row of a key that it should have. One that does neither is
        suspect: other shards are asked for the keys of which it has none.

        Args:
            answered: what was asked for, what became of it, and whether there was any row.

        Returns:
            The pieces whose server could not be looked at: their rows are not to be used.
        """
        new: dict[int, tuple[_Piece, Replica]] = {}
        for piece, call, _ in answered:
            replica = call.replica
            assert replica is not None
            if replica.versions.setdefault(_model(piece, known), piece.version) != piece.version:
                replica.forget()
            if not replica.checked:
                new[id(replica)] = piece, replica
        if not new:
            return []
        request = self._listing_request()
        share = self._share(deadline)
        calls = [Call(request, self.shards[piece.shard].only(one), self.options, share) for piece, one in new.values()]
        yield calls
        lost: set[int] = set()
        for call, (piece, replica) in zip(calls, new.values(), strict=True):
            if isinstance(call.error, UnavailableError):
                lost.add(id(replica))
            else:
                self._look_at(call, piece, known)
        if len(self.shards) > 1:
            yield from self._look_at_rows([one for one in answered if id(one[1].replica) not in lost], known, deadline)
        return [piece for piece, call, _ in answered if id(call.replica) in lost]

    def _look_at(self, call: Call, piece: _Piece, known: Tables) -> None:
        """Look at what a server lists that answered `piece`."""
        replica = call.replica
        listing = self._listing(call, piece.shard)
        assert replica is not None
        replica.versions.setdefault(_model(piece, known), piece.version)
        for name in [part.table for part in piece.parts if part.table in listing.tables]:
            before, here = known.tables[name], listing.tables[name]
            # The bits that were sent may be other keys, and the rows that came may be rounded.
            for what, was, now in (
                ("keys", before.key_dtype, here.key_dtype),
                ("rows", before.rows_dtype, here.rows_dtype),
            ):
                if was != now:
                    replica.forget()
                    raise _ChangedError(
                        f"looking up at {_place(call)}: the {what} of table '{name}' were {was} and are {now}; look up"
                        " again"
                    )
        if len(self.shards) > 1:
            return
        self._tables = None
        try:
            for name in [part.table for part in piece.parts if part.table in listing.tables]:
                self._whole(listing.tables[name])
        except WrongShardError:
            replica.forget()
            raise
        self._tables = listing

    def _look_at_rows(
        self, answered: Sequence[tuple[_Piece, Call, bool]], known: Tables, deadline: float
    ) -> Steps[None]:
        """Look at the rows of servers that do not say which shard they have."""
        about: list[tuple[_Piece, Replica, int, list[TableKeys]]] = []
        for _, call, has_rows in answered:
            assert call.replica is not None
            call.replica.checked = call.replica.checked or (has_rows and call.is_there_still)
        for piece, call, has_rows in answered:
            replica = call.replica
            assert replica is not None
            if replica.checked or has_rows:
                continue
            replica.misses += 1
            replica.checked = replica.misses >= _SUSPECT_MISSES
            parts = [TableKeys(part.table, part.keys[:_SUSPECT_KEYS]) for part in piece.parts]
            about += [(piece, replica, other, parts) for other in range(len(self.shards)) if other != piece.shard]
        share = self._share(deadline)
        calls = [self._call(_Piece(other, parts=parts), "zeros", share) for _, _, other, parts in about]
        if calls:
            yield calls
        for call, (piece, replica, other, parts) in zip(calls, about, strict=True):
            if isinstance(call.error, UnavailableError):
                continue
            _, decoded = self._decode(call, parts, known)
            if any(_has_rows(part) for part in decoded):
                raise WrongShardError(
                    f"asking {replica.endpoint.shown}: it has no row of {piece.keys} keys of shard {piece.shard}, and"
                    f" what stands in the place of {self.shards[other].shown} has some; see the order of shards="
                )


def _fill(
    pieces: list[_Piece], shard: int, chosen: Sequence[tuple[_Wanted, Array | None, Array]], known: Tables
) -> None:
    piece = _Piece(shard)
    keys_left, values_left = known.max_keys, known.max_values
    for wanted, where, keys in chosen:
        start = 0
        while start < len(keys):
            room = min(keys_left, values_left // wanted.table.dim)
            if room < 1 and piece.parts:
                pieces.append(piece)
                piece, keys_left, values_left = _Piece(shard), known.max_keys, known.max_values
                continue
            stop = min(len(keys), start + max(1, room))
            run = slice(start, stop)
            whole = where is None and stop - start == len(keys)
            piece.add(wanted, None if whole else run if where is None else where[run], keys[run])
            keys_left -= stop - start
            values_left -= (stop - start) * wanted.table.dim
            start = stop
    if piece.parts:
        pieces.append(piece)


def _halves(piece: _Piece) -> list[_Piece]:
    """Return two pieces of about half the keys each; none if there is one key only."""
    if piece.keys < 2:
        return []
    halves = [_Piece(piece.shard), _Piece(piece.shard)]
    left = piece.keys // 2
    for wanted, where, part in zip(piece.wanted, piece.where, piece.parts, strict=True):
        if where is None:
            where = np.arange(len(part.keys))
        elif isinstance(where, slice):
            where = np.arange(where.start, where.stop)
        cut = min(left, len(part.keys))
        left -= cut
        for half, run in zip(halves, (slice(0, cut), slice(cut, None)), strict=True):
            if len(part.keys[run]):
                half.add(wanted, where[run], part.keys[run])
    return halves


def _model(piece: _Piece, known: Tables) -> str | None:
    """Return the model that a piece is asked of, all of whose tables are of one."""
    return known.tables[piece.parts[0].table].model


def _has_rows(part: TableRows) -> bool:
    return part.found is not None and bool(part.found.any())


def _is_too_large(call: Call) -> bool:
    return call.answer is not None and call.answer.status == 413


def _of_older_versions(pieces: Sequence[_Piece]) -> list[_Piece]:
    """Return the pieces whose rows are of an older version than others of their shard, to be asked of that server."""
    newest: dict[int, _Piece] = {}
    for piece in pieces:
        if piece.shard not in newest or piece.version > newest[piece.shard].version:
            newest[piece.shard] = piece
    older = [piece for piece in pieces if piece.version != newest[piece.shard].version]
    for piece in older:
        piece.at = newest[piece.shard].at
    return older


def _joined(listings: Sequence[Tables]) -> Tables:
    """Return the tables of all shards as one; raises if they disagree."""
    tables = dict(listings[0].tables)
    for listing in listings[1:]:
        for name, table in listing.tables.items():
            first = tables.setdefault(name, table)
            if first is table:
                continue
            if (first.key_dtype, first.dim, first.rows_dtype) != (table.key_dtype, table.dim, table.rows_dtype):
                raise WrongShardError(
                    f"looking at the shards: table '{name}' is {first.key_dtype} -> {first.dim} {first.rows_dtype} in"
                    f" one and {table.key_dtype} -> {table.dim} {table.rows_dtype} in another; serve shards of one"
                    " checkpoint"
                )
            rows = first.rows + table.rows
            tables[name] = Table(name, first.key_dtype, first.value_dtype, first.dim, rows, model=first.model)
    several = {name: models for listing in listings for name, models in listing.several.items()}
    keys, values = (min(getattr(one, limit) for one in listings) for limit in ("max_keys", "max_values"))
    tables = {name: table for name, table in tables.items() if name not in several}
    return Tables(tables, keys, values, several=several)


def _checked(call: Call) -> Answer:
    """Return the answer of a call; raises what it came to instead."""
    if call.error is not None:
        raise call.error
    assert call.answer is not None
    answer = call.answer
    if answer.status == 200:
        return answer
    code, message = answer.error()
    message = message or "without a word; check that the URL is that of kvtools serve"
    doing = f"asking {call.replicas.name}{' at ' * bool(call.replicas.name)}{_place(call)}"
    if code == "unknown_table":
        raise UnknownTableError(f"{doing}: {message}")
    if answer.status in (401, 403) and "Authorization" not in call.request.headers:
        message += "; give api_key= to the client"
    raise RefusedError(f"{doing}: {answer.status}: {message}", answer.status, code)


def _place(call: Call) -> str:
    return call.replica.endpoint.shown if call.replica is not None else call.replicas.shown


def _bags(keys: Array, row_splits: Any, weights: Any, table: str) -> tuple[Array, Array | None]:
    """Return row_splits int64 [bags + 1] and weights float32 [keys] or None, checked."""
    doing = f"looking up in table '{table}'"
    try:
        splits = np.asarray(row_splits)
    except ValueError as error:
        raise UsageError(f"{doing}: got row_splits that are no array, expected integers [bags + 1]") from error
    if splits.ndim != 1 or splits.dtype.kind not in "iu" or not len(splits):
        raise UsageError(f"{doing}: got row_splits {splits.dtype}{list(splits.shape)}, expected integers [bags + 1]")
    splits = splits.astype(np.int64)
    if splits[0] != 0 or splits[-1] != len(keys) or (np.diff(splits) < 0).any():
        raise UsageError(f"{doing}: row_splits must ascend from 0 to the number of keys, {len(keys)}")
    if weights is None:
        return splits, None
    try:
        with np.errstate(over="ignore"):
            weighed = np.asarray(weights, np.float32).reshape(-1)
    except (ValueError, TypeError) as error:
        raise UsageError(f"{doing}: got weights that are no array of numbers, expected one for each key") from error
    if len(weighed) != len(keys):
        raise UsageError(f"{doing}: got {len(weighed)} weights, expected one for each of {len(keys)} keys")
    if not np.isfinite(weighed).all():  # as the server has it, which does not see them where rows are pooled here
        raise UsageError(f"{doing}: got a weight that is no finite number")
    return splits, weighed


def _check_one_model(tables: Sequence[Table]) -> None:
    for table in tables[1:]:
        first = tables[0]
        if table.model != first.model:
            raise UsageError(
                f"looking up: table '{first.name}' is of model '{first.model}' and table '{table.name}' of model"
                f" '{table.model}', and one lookup is answered by one model: look each up by itself"
            )


def _check_missing(missing: Missing | None) -> None:
    if missing is not None and missing not in MISSING:
        raise UsageError(f"looking up: got {missing=}, expected one of {', '.join(MISSING)}")
