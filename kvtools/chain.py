"""Chains of checkpoints: whole ones and increments between them, as docs/chain.md specifies them.

A listing reads names alone; records and checks read the members that they are asked for. Rows are read as those of any
checkpoint are.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvtools.dialects.bundle.reader import Bundle
from kvtools.errors import BadInputError, CorruptFileError
from kvtools.remote.stored import read_bytes

#: The tensor that has a member's record.
RECORD_TENSOR = "_KVTOOLS_CHAIN"
FORMAT = 1

_MEMBER = re.compile(r"(?P<name>.+)-(?P<number>\d+)(?P<delta>\.delta)?\.index")
_WAY_OUT = "; remove the members from there on to go back to what was before, or copy the folder again"

Kind = Literal["full", "delta"]


Reason = Literal["gap", "duplicate", "disorder", "other-chain", "other-table", "fingerprint", "no-full", "damaged"]


class ChainError(BadInputError):
    """Members do not follow one another: one is missing, there twice, out of order, or of another chain.

    `reason` says which in a word.
    """

    def __init__(self, message: str, reason: Reason = "disorder") -> None:
        super().__init__(message)
        self.reason: Reason = reason


@dataclass(frozen=True, order=True)
class Member:
    """A member by the name of its file: nothing of it has been read.

    Attributes:
        number: its sequence number.
        kind: `full` or `delta`.
        prefix: of its files, without `.index`.
    """

    number: int
    kind: Kind
    prefix: Path

    @property
    def index(self) -> Path:
        """The file by whose being there the member is there."""
        return Path(f"{self.prefix}.index")


@dataclass(frozen=True)
class Previous:
    """The member that another one follows."""

    sequence: int
    fingerprint: str


@dataclass(frozen=True)
class TableCounts:
    """What a member has of a part of a table: rows, keys that went, and how many of the rows were born."""

    rows: int
    removed: int
    born: int


@dataclass(frozen=True)
class Record:
    """What a member says of itself; docs/chain.md says what the fields mean."""

    chain: str
    sequence: int
    kind: Kind
    full: int
    previous: Previous | None
    time: float
    step: int | None
    tables: Mapping[str, TableCounts]

    def to_json(self) -> str:
        """Return it as it stands in a member.

        >>> record = Record("a", 2, "delta", 1, Previous(1, "0f"), 5.0, None, {"t": TableCounts(3, 1, 0)})
        >>> Record.from_json(record.to_json(), "m") == record
        True
        """
        previous = self.previous and {"sequence": self.previous.sequence, "fingerprint": self.previous.fingerprint}
        return json.dumps(
            {
                "format": FORMAT,
                "chain": self.chain,
                "sequence": self.sequence,
                "kind": self.kind,
                "full": self.full,
                "previous": previous,
                "time": self.time,
                "step": self.step,
                "tables": {x: {"rows": t.rows, "removed": t.removed, "born": t.born} for x, t in self.tables.items()},
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes, where: object) -> Record:
        """Read a record.

        Raises:
            CorruptFileError: it is no JSON, or lacks what a record has; `where` is named.
            BadInputError: it is of a later format.
        """
        try:
            found = json.loads(text)
            known = found["format"]
            if not isinstance(known, int) or known > FORMAT:
                raise BadInputError(
                    f"reading the chain's record of '{where}': got format {known}, expected {FORMAT}; update kvtools"
                )
            if found["kind"] not in ("full", "delta"):
                raise ValueError(f"kind {found['kind']!r}")
            given = found["previous"]
            step = found.get("step")
            return cls(
                str(found["chain"]),
                int(found["sequence"]),
                found["kind"],
                int(found["full"]),
                None if given is None else Previous(int(given["sequence"]), str(given["fingerprint"])),
                float(found["time"]),
                None if step is None else int(step),
                {x: TableCounts(int(t["rows"]), int(t["removed"]), int(t["born"])) for x, t in found["tables"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptFileError(
                f"reading the chain's record of '{where}': {error!r}; the member is damaged, copy it again"
            ) from error


def member_of(prefix: str | os.PathLike[str]) -> Member | None:
    """Return what the name of a checkpoint says that it is, or None for a name without a number.

    >>> member_of("run/ckpt-12.delta")
    Member(number=12, kind='delta', prefix=PosixPath('run/ckpt-12.delta'))
    >>> member_of("run/model.ckpt")
    """
    path = Path(os.fspath(prefix))
    found = _MEMBER.fullmatch(f"{path.name}.index")
    if found is None:
        return None
    return Member(int(found["number"]), _kind_of(found), path)


def members(folder: str | os.PathLike[str], name: str | None = None) -> list[Member]:
    """Return the members that are in a folder, by number, an increment before the full of its number.

    Args:
        folder: of the chain; one that does not exist has none.
        name: which chain, where the folder has several; by default all of them are taken.
    """
    return MembersOfFolder(folder, name).now()


class MembersOfFolder:
    """As `members`, for who asks again and again: beside the listing, only what has come or gone since makes work.

    Args:
        folder, name: as of `members`.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str | None = None) -> None:
        self._root = Path(os.fspath(folder))
        self._name = name
        self._indexes: set[str] = set()
        self._sorted: list[tuple[int, Kind, str, Member]] = []

    def now(self) -> list[Member]:
        """Return the members that are there now."""
        try:
            names = os.listdir(self._root)  # noqa: PTH208  (a path of each takes longer than to list them all)
        except FileNotFoundError:
            names = []
        indexes = {file for file in names if file.endswith(".index")}
        if indexes != self._indexes:
            kept = [one for one in self._sorted if f"{one[2]}.index" in indexes]
            self._sorted = sorted([*kept, *self._parsed(indexes - self._indexes)])
            self._indexes = indexes
        return [member for *_, member in self._sorted]

    def _parsed(self, files: set[str]) -> Iterator[tuple[int, Kind, str, Member]]:
        for file in files:
            match = _MEMBER.fullmatch(file)
            if match is not None and not file.startswith(".") and self._name in (None, match["name"]):
                number, kind, prefix = int(match["number"]), _kind_of(match), file.removesuffix(".index")
                yield number, kind, prefix, Member(number, kind, self._root / prefix)


def _kind_of(match: re.Match[str]) -> Kind:
    return "delta" if match["delta"] else "full"


def fingerprint(prefix: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a member's index, in hexadecimal.

    Raises:
        BadInputError: the index is not there.
    """
    index = Path(f"{os.fspath(prefix)}.index")
    try:
        return hashlib.sha256(read_bytes(index)).hexdigest()
    except OSError as error:
        raise BadInputError(f"reading checkpoint index '{index}': {error.strerror or error}; copy it again") from error


def record_of(member: Member, bundle: Bundle | None = None) -> Record | None:
    """Return the record of a member, or None of a checkpoint that was written by another program, without one.

    Raises:
        BadInputError, CorruptFileError: the index, the record or a data file is missing or damaged.
        ChainError: the file is called otherwise than the record says.
    """
    bundle = bundle or Bundle(member.prefix)
    if RECORD_TENSOR not in bundle:
        if member.kind == "delta":
            raise ChainError(
                f"reading '{member.prefix}': it is called an increment and has no record of a chain; it is none",
                "other-chain",
            )
        return None
    found = bundle.strings(RECORD_TENSOR)
    if len(found) != 1:
        raise CorruptFileError(f"reading the chain's record of '{member.prefix}': got {len(found)} strings, expected 1")
    record = Record.from_json(found[0], member.prefix)
    if (record.sequence, record.kind) != (member.number, member.kind):
        raise ChainError(
            f"chain in '{member.prefix.parent}': '{member.prefix.name}' is, by its record, the {_called(record.kind)}"
            f" {record.sequence}: it was renamed or copied{_WAY_OUT}"
        )
    return record


def newest_chain(folder: str | os.PathLike[str], name: str | None = None) -> list[Member]:
    """Return the newest full of a folder and the increments after it, in their order, or [] where there is no full.

    Names, records and fingerprints are checked; `check_bytes` checks the rest of a member.

    Raises:
        ChainError: there is a gap, a duplicate, disorder, or a member of another chain.
        BadInputError, CorruptFileError: an index or a record is missing or damaged.
    """
    return chain_of(members(folder, name))


def chain_to(member: Member) -> list[Member]:
    """As `newest_chain`, up to an increment that there is: the full that it goes back to, and what is between."""
    name = member.prefix.name.removesuffix(".delta").rpartition("-")[0]
    found = members(member.prefix.parent, name)
    fulls = [one for one in found if one.kind == "full" and one.number < member.number]
    return chain_of([*fulls, *(one for one in found if one.kind == "delta" and one.number <= member.number)])


def chain_of(found: Sequence[Member]) -> list[Member]:
    """As `newest_chain`, of members that `members` has listed."""
    fulls = [member for member in found if member.kind == "full"]
    deltas = [member for member in found if member.kind == "delta"]
    if not fulls:
        if deltas:
            raise ChainError(
                f"chain in '{deltas[0].prefix.parent}': it begins with increment '{deltas[0].prefix.name}' and has no"
                " full one: copy the full checkpoint that it goes back to",
                "no-full",
            )
        return []
    full = fulls[-1]
    _refuse_twins(fulls)
    after = [member for member in deltas if member.number > full.number]
    _refuse_twins(after)
    chain = [full]
    record = record_of(full)
    follows = {fingerprint(full.prefix)}
    if record is not None and record.previous is not None and record.previous.sequence == full.number:
        # The increment of the same moment: what came next may have been cut before the full was written.
        follows.add(record.previous.fingerprint)
        _check_same_moment(deltas, full, record.previous)
    for member in after:
        _check_next(chain[-1], member, full, None if record is None else record.chain, follows)
        follows = {fingerprint(member.prefix)}
        chain.append(member)
    return chain


def _refuse_twins(found: Sequence[Member]) -> None:
    for one, other in itertools.pairwise(found):
        if one.number == other.number:
            raise ChainError(
                f"chain in '{one.prefix.parent}': '{one.prefix.name}' and '{other.prefix.name}' have the same number;"
                " name the chain, or remove one of them",
                "duplicate",
            )


def _check_same_moment(deltas: Sequence[Member], full: Member, previous: Previous) -> None:
    for member in deltas:
        if member.number == full.number and fingerprint(member.prefix) != previous.fingerprint:
            raise ChainError(
                f"chain in '{full.prefix.parent}': duplicate: '{member.prefix.name}' has the number of"
                f" '{full.prefix.name}' and is not the increment that it was written beside; remove the increment",
                "duplicate",
            )


def _check_next(before: Member, member: Member, full: Member, chain: str | None, follows: set[str]) -> None:
    where = f"chain in '{member.prefix.parent}'"
    if member.number != before.number + 1:
        first, last = before.number + 1, member.number - 1
        missing = f"increment {first} is" if first == last else f"increments {first} to {last} are"
        raise ChainError(
            f"{where}: gap: {missing} missing between '{before.prefix.name}' and '{member.prefix.name}'{_WAY_OUT}",
            "gap",
        )
    record = record_of(member)
    if record is None or chain is None or record.chain != chain:
        raise ChainError(
            f"{where}: '{member.prefix.name}' is an increment of another chain than '{full.prefix.name}'{_WAY_OUT}",
            "other-chain",
        )
    if record.previous is None or record.previous.sequence != before.number or record.full >= member.number:
        raise ChainError(
            f"{where}: disorder: '{member.prefix.name}' says that it follows"
            f" {None if record.previous is None else record.previous.sequence} and goes back to full {record.full},"
            f" expected {before.number} and one before it{_WAY_OUT}"
        )
    if record.previous.fingerprint not in follows:
        raise ChainError(
            f"{where}: '{member.prefix.name}' does not follow '{before.prefix.name}' but another member of that number:"
            f" its fingerprint differs{_WAY_OUT}",
            "fingerprint",
        )


def check_bytes(member: Member, workers: int | None = None) -> None:
    """Read all of a member and check every checksum.

    Raises:
        BadInputError, CorruptFileError: a file is missing, cut short, or its bytes do not match.
    """
    bundle = Bundle(member.prefix)
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        for _ in pool.map(lambda stored: bundle.check(*stored), bundle.stored()):
            pass


def _called(kind: Kind) -> str:
    return "increment" if kind == "delta" else "full"
